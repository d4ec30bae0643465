"""Sessions and hints on a real server: over its own protocol, over HTTP, and from the command line."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from lmtier.client.client import Client
from lmtier.rules.hints import ACTIONS, MAX_BYTES, envelope
from lmtier.rules.worth import Cost
from lmtier.tools.cli import main
from lmtier.tools.console import Console, ServerAddress
from lmtier.wire.verbs import MAX_KEYS
from tests.server.process import Served, until
from tests.server.test_lifetimes import FORM, ROOM, TOKENS, keys, store

TOKEN = "sesame"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    served = Served(
        *(folder, f"cpu://?capacity={32 * ROOM}"),
        config={"chunk_tokens": 1},
        unix=str(folder / "socket"),
        http="127.0.0.1:0",
        token=TOKEN,
        gpu_hour="3.5",
    )
    yield served
    served.process.kill()
    served.process.wait()


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(server.where["unix"]) as client:
        client.clear()
        yield client


@pytest.fixture
def remote(server: Served) -> Console:
    return Console(ServerAddress(unix=server.where["unix"]))


def ask(client: Client, names: list[bytes], session: str, parent: str = "") -> int:
    match = client.match(names, FORM, session=session, parent=parent)
    found = match.chunks
    client.release(match)
    store(client, names)
    return found


def listed(remote: Console) -> dict[str, dict[str, Any]]:
    return {each["session"]: each for each in remote.get("/api/sessions", list, most=100)}


def test_sessions_show_what_they_saved_and_what_is_kept(client, remote, capsys):
    ask(client, keys(TOKENS[:8]), "listed")
    assert ask(client, keys(TOKENS[:8]), "listed") == 8
    ask(client, keys([*TOKENS[:4], 7, 7]), "below", "listed")
    found = listed(remote)["listed"]
    assert (found["requests"], found["tokens"], found["saved"], found["children"]) == (2, 8, 8, 1)
    assert found["kept"] == {"cpu": 8}
    assert main(["sessions", "--server", remote.address.unix]) == 0
    out = capsys.readouterr().out
    assert "below of listed" in out
    assert "8 in cpu" in out
    assert main(["sessions", "--server", remote.address.unix, "--json"]) == 0
    assert {each["session"] for each in json.loads(capsys.readouterr().out)} >= {"listed", "below"}
    assert main(["sessions", "--server", remote.address.unix, "--most", "0"]) == 2


def test_stats_count_sessions_and_what_hits_saved(client, remote, capsys):
    client.costs(Cost(fixed=1.0, token=60.0, position=0.0, copy=0.0))
    ask(client, keys(TOKENS[:8]), "saving")
    ask(client, keys(TOKENS[:8]), "saving")
    until(lambda: listed(remote)["saving"]["saved"] == 8)
    assert main(["stats", "--server", remote.address.unix]) == 0
    out = capsys.readouterr().out
    assert "active, 0 wait for a person" in out
    assert "hits saved 0.133 GPU-hours: 0.47 at 3.5 an hour" in out


def test_a_sure_miss_counts_for_its_session_too(client, remote):
    match = client.match(keys([5, 5, 5]), FORM, session="missed")
    client.release(match)
    until(lambda: "missed" in listed(remote))
    assert (listed(remote)["missed"]["asked"], listed(remote)["missed"]["saved"]) == (3, 0)


def test_a_person_ends_a_session(client, remote, capsys):
    ask(client, keys(TOKENS[:8], "salty"), "ending")
    address = remote.address.unix
    assert main(["sessions", "--server", address, "--end", "ending"]) == 1  # another tenant's
    assert "no such session is known" in capsys.readouterr().out
    assert main(["sessions", "--server", address, "--end", "ending", "--salt", "salty"]) == 0
    assert "ending is over" in capsys.readouterr().out
    assert "ending" not in listed(remote)


def test_an_engine_sends_hints_without_waiting(client, remote):
    ask(client, keys(TOKENS[:8]), "hinting")
    client.hint(envelope("e1", ("pin", {})), session="hinting")
    until(lambda: any(pin["chunks"] == 8 for pin in remote.get("/api/pins", list)))
    client.hint({"protocol_version": "1"})  # refused in the log
    client.hint(envelope("e2", ("session_end", {"session": "hinting"})))
    until(lambda: "hinting" not in listed(remote))
    assert remote.get("/api/pins", list) == []


def post(server: Served, body: bytes, token: str = TOKEN, kind: str = "application/json") -> tuple[int, Any]:
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {token}"} if token else {})
    url = f"http://{server.where['http']}/api/hints"
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_hints_come_over_http_with_the_token(server, client, remote):
    ask(client, keys(TOKENS[:8], "salty"), "web")
    said = envelope("h1", ("session_end", {}), ("fetch", {}))
    assert post(server, json.dumps(said).encode(), token="")[0] == 401
    assert post(server, json.dumps(said).encode(), token="wrong")[0] == 401
    assert post(server, json.dumps(said).encode(), kind="text/plain")[0] == 415
    assert "web" in listed(remote)
    status, outcomes = post(server, json.dumps({**said, "salt": "salty", "session": "web"}).encode())
    assert (status, [each["result"] for each in outcomes]) == (200, ["done", "unknown"])
    assert "web" not in listed(remote)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[7]", b"7", b'"x"', b"{}", b'{"salt": 7}', b"\xff"])
def test_another_body_is_refused_in_a_sentence(server, body):
    status, answer = post(server, body)
    assert status == 400
    assert answer["error"]


HALF = "\ud800"  # of a character: JSON can name it, UTF-8 cannot write it
ODD: list[dict[str, Any]] = [
    *({"session": name} for name in (HALF, f"a{HALF}" * 40, None, 7, 1e300, True, [HALF], {HALF: HALF}, "")),
    *({"keys": [key]} for key in (HALF, None, 7, [[HALF]], {"": 0}, "xyz")),
    *({"keys": all_keys} for all_keys in (HALF, None, 7, {"0": HALF}, [HALF, HALF])),
    *({"session": "s", field: 60} for field in (HALF, "seconds")),
    {"session": "s", "seconds": HALF},
]
"""What a payload may be by mistake, or by intent."""


@pytest.mark.parametrize("kind", ACTIONS)
def test_the_server_refuses_odd_hints_and_goes_on(server, client, remote, kind):
    said = json.dumps(envelope(f"odd-{kind}", *((kind, payload) for payload in ODD))).encode()
    status, over_http = post(server, said)
    over_redis = json.loads(server.ask("LMTIER.CALL", "/api/hints", said))
    assert status == 200
    for outcomes in over_http, over_redis:
        assert len(outcomes) == len(ODD)
        assert all(each["result"] in ("refused", "done", "repeated") for each in outcomes)
        assert outcomes[0]["result"] == "refused" or kind == "release"
    around = {**envelope(f"around-{kind}", (kind, {})), "session": HALF}
    assert [each["result"] for each in post(server, json.dumps(around).encode())[1]] == ["refused"]


def test_a_body_is_bounded_and_read_whole(server):
    assert post(server, b" " * (MAX_BYTES + 1))[0] == 413
    status, answer = post(server, json.dumps(envelope("big")).encode().ljust(MAX_BYTES))
    assert (status, answer) == (200, [])


def test_a_body_has_room_for_the_keys_of_the_longest_prompt(server):
    names = [f"ab{number:062x}" for number in range(MAX_KEYS + 1)]
    assert server.asks("/api/pin", {"name": "long", "keys": names[:-1]}) == (200, {"cpu": 0})
    assert server.call("/api/unpin", {"name": "long"})
    status, answer = server.asks("/api/pin", {"name": "long", "keys": names})
    assert (status, answer["error"]) == (400, "65537 keys: at most 65536 in one request")
    status, answer = server.asks("/api/pin", {"name": "x" * (5 << 20), "keys": []})
    assert (status, answer["error"]) == (413, "the body has at most 5242880 bytes")


def test_a_server_without_a_token_takes_no_hints_over_http(tmp_path):
    served = Served(tmp_path, f"cpu://?capacity={16 * ROOM}", http="127.0.0.1:0")
    try:
        status, answer = post(served, json.dumps(envelope("h")).encode(), token="")
        assert (status, "token" in answer["error"]) == (403, True)
    finally:
        served.process.kill()
        served.process.wait()


@pytest.mark.parametrize(
    ("path", "arguments", "said"),
    [
        ("/api/hints", [], "the arguments of /api/hints are a JSON object"),
        ("/api/hints", {"message_id": "w"}, "an envelope of hints has a protocol_version and a message_id"),
        (
            "/api/hints",
            {"self": 1, "asker": 2},
            "an envelope of hints has a protocol_version and a message_id",
        ),
        ("/api/unpin", {"self": 1, "asker": 2, "name": "x"}, "/api/unpin takes name: "),
        ("/api/hints", {**envelope("w"), "salt": 7}, "salt is text, not 7"),
        ("/api/sessions?most=x", None, "most is a whole number, not 'x'"),
        ("/api/sessions?most=-1", None, "most=-1 is too large, or negative"),
        ("/api/sessions?most=99999", None, "99999 is more than"),
        (
            "/api/prefetch",
            {"identity": dict.fromkeys(map(str, range(65)), 1), "keys": []},
            "a model has 64 facts at most, not 65",
        ),
        ("/api/sessions?some=1", None, "/api/sessions takes most: got an unexpected "),
    ],
)
def test_wrong_arguments_are_refused(server, path, arguments, said):
    status, answer = server.asks(path, arguments)
    assert (status, answer["error"][: len(said)]) == (400, said)
