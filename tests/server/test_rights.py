"""What each role may do: every verb, command, page and hint against a real server, as the table says."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lmtier.client.client import Client
from lmtier.format.keys import tenant
from lmtier.rules.hints import ACTIONS, envelope
from lmtier.server.access import NAMES, RIGHTS, Role, right_to
from lmtier.wire.resp import Error
from lmtier.wire.verb_table import VERBS, Verb
from tests.server.process import Served, Wire, served, until
from tests.server.test_lifetimes import FORM, ROOM, TOKENS, keys, store

WORDS = {Role.NONE: "", Role.LOOK: "only-look", Role.ENGINE: "the-engines", Role.ADMIN: "administration"}
KEY = "ab" * 32
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("rights")
    files: dict[str, Any] = {name: str(folder / name) for name in NAMES.values()}
    for role, name in NAMES.items():
        (folder / name).write_text(WORDS[role])
    with served(
        *(folder, f"cpu://?capacity={64 * ROOM}"),
        config={"chunk_tokens": 1},
        token=WORDS[Role.ADMIN],
        unix=str(folder / "s"),
        http="127.0.0.1:0",
        log_format="json",
        **files,
    ) as server:
        yield server


def of(server: Served, role: Role) -> Wire:
    """A client over TCP that has shown this role's token."""
    wire = server.connect()
    if role:
        wire.expect("OK", "AUTH", WORDS[role])
    return wire


class Audit:
    """What the server's log says from here on. Another thread writes it, so it comes late."""

    numbers = count()

    def __init__(self, server: Served) -> None:
        self._server = server
        self._begin = f"begin-{next(self.numbers)}"
        server.call("/api/unpin", {"name": self._begin})

    def lines(self) -> list[tuple[str, str]]:
        facts = map(json.loads, self._server.log.read_text().splitlines())
        lines = [(each["audit"], each["what"]) for each in facts if "audit" in each]
        begin = ("accepted", f"/api/unpin name={self._begin}")
        return lines[lines.index(begin) + 1 :] if begin in lines else []

    def says(self, expected: list[tuple[str, str]], about: str = "") -> None:
        """Exactly this, of what begins so."""
        name = f"end-{next(self.numbers)}"
        self._server.call("/api/unpin", {"name": name})
        end = ("accepted", f"/api/unpin name={name}")
        until(lambda: end in self.lines())
        found = self.lines()
        assert [each for each in found[: found.index(end)] if each[1].startswith(about)] == expected

    def says_how(self, expected: list[str]) -> None:
        """Whether what is written was accepted or refused."""
        name = f"end-{next(self.numbers)}"
        self._server.call("/api/unpin", {"name": name})
        end = ("accepted", f"/api/unpin name={name}")
        until(lambda: end in self.lines())
        found = self.lines()
        assert [how for how, _ in found[: found.index(end)]] == expected


def everything(server: Served) -> dict[str, int]:
    """All commands and verbs of the server, with the number of words that each needs."""
    with of(server, Role.ADMIN) as wire:
        return {each[0].decode().upper(): abs(each[1]) for each in wire.ask("COMMAND")}


def test_the_table_has_all_commands_pages_and_hints_only(server):
    pages = {page for page in RIGHTS if page.startswith("/") and ":" not in page}
    status, body = page(server, "/no-such-page", Role.ADMIN)
    assert status == 404
    assert pages == {*re.findall(r"/[\w/]*", json.loads(body)["error"])}
    assert {f"hint:{kind}" for kind in ACTIONS} == {
        row for row in RIGHTS if row.startswith("hint:") and row.count(":") == 1
    }
    rows = {row for row in RIGHTS if row not in pages and ":" not in row}
    assert rows == everything(server).keys()


def variants(name: str, words: int) -> list[list[str]]:
    """Words for this command that have no effect, once for each of its rows."""
    plain = {"HELLO": ["3", "AUTH", "default", "wrong"]}.get(name, [KEY] * (words - 1))
    rest = {"CLIENT:KILL": ["KILL", "ADDR", KEY]}
    return [plain, *(rest[row] for row in RIGHTS if row.startswith(f"{name}:"))]


@pytest.mark.parametrize("role", Role)
def test_each_command_is_for_the_roles_that_the_table_names(server, role):
    audit, expected = Audit(server), []
    for name, words in everything(server).items():
        for arguments in variants(name, words):
            right = right_to(name.encode(), [name.encode(), *(each.encode() for each in arguments)])
            with of(server, role) as wire:
                answer = wire.ask(name, *arguments)
            is_refused = isinstance(answer, Error) and answer.startswith(("NOPERM", "NOAUTH"))
            may = role >= right.role
            if name == "LMTIER.TAKEOVER" and may:
                assert answer.startswith("NOPERM only the user of this server"), answer
            else:
                assert is_refused != may, (name, arguments, answer)
            is_far = may and right.needs_slab
            assert is_far == (
                isinstance(answer, Error) and answer.startswith("MISUSE only who maps the slab")
            )
            # An attempt without a token is not written, because then anybody could fill the log.
            if right.is_audited and role and not is_far:
                expected.append((("accepted" if may else "refused"), " ".join((name, *arguments))))
    audit.says(expected)


ARGUMENTS: dict[str, Any] = {
    "/api/hints": envelope("none"),
    "/api/prefetch": {"identity": {"model": "m"}, "keys": [KEY]},
    "/api/pin": {"name": "rights", "keys": [KEY]},
    "/api/unpin": {"name": "rights"},
    "/api/set": {"settings": {"log_level": "info"}},
    "/api/clear": {"prefix": "00"},
    "/api/forget": {"id": "00000001", "seconds": 1},
    "/api/check": {},
}
"""For each call with a body."""


def ways(server: Served) -> dict[str, Any]:
    """The listeners: of each an address, and what a client may do there without a token."""
    address = server.where["http"].rpartition(":")
    return {"http": (address[0], int(address[2])), "redis": server.address, "unix": server.where["unix"]}


@pytest.mark.parametrize("way", ["http", "redis", "unix"])
@pytest.mark.parametrize("role", Role)
def test_pages_and_calls_are_for_the_roles_of_the_table(server, role, way):
    """On each listener. Without a token only the owner's Unix socket gives a role."""
    has_role = Role.ADMIN if way == "unix" and not role else role
    audit, expected = Audit(server), []
    for row, right in RIGHTS.items():
        if not row.startswith("/"):
            continue
        path, _, argument = row.partition(":")
        body, query = ARGUMENTS.get(path), f"?{argument}=true" if argument else ""
        data = None if body is None else json.dumps(body).encode()
        status, _ = page(server, path + query, role, data, ways(server)[way])
        needed = max(right.role, Role.LOOK) if way != "http" else right.role
        assert (status not in (401, 403)) == (has_role >= needed), (row, status)
        # An attempt without a token is not written, because then anybody could fill the log.
        if right.is_audited and has_role:
            expected.append("accepted" if has_role >= right.role else "refused")
    audit.says_how(expected)


def test_odd_arguments_give_no_more_rights(server):
    for query in ("tokens=%C5%BF", "tokens=yes", "token=1", "tokens=1", "Tokens=1", "tokens=0x1"):
        status, _ = page(server, f"/api/explain?{query}", Role.ADMIN)
        assert status == 400, query
        assert page(server, f"/api/explain?{query}", Role.LOOK)[0] in (400, 403), query
    assert page(server, "/api/explain?tokens=true&tokens=false", Role.ADMIN)[0] == 200
    for words in ("tokens=true", "most=5&tokens=true"):
        assert page(server, f"/api/explain?{words}", Role.LOOK)[0] == 403
        assert page(server, f"/api/explain?{words}", Role.ENGINE)[0] == 403
    for words in ("", "?tokens=false", "?most=5"):
        assert page(server, f"/api/explain{words}", Role.LOOK)[0] == 200
    with of(server, Role.LOOK) as wire:
        answer = wire.ask("LMTIER.CALL", "/api/explain", '{"tokens": true}')
        assert isinstance(answer, Error)
        assert answer.startswith("NOPERM")


def page(
    server: Served, path: str, role: Role, body: bytes | None = None, address: Any = None, **headers: str
) -> tuple[int, bytes]:
    address = address or ways(server)["http"]
    with Wire(address) as wire:
        connection = http.client.HTTPConnection("localhost", timeout=20)
        connection.sock = wire.socket
        headers = {"Content-Type": "application/json", **headers}
        if role:
            headers["Authorization"] = f"Bearer {WORDS[role]}"
        connection.request("GET" if body is None else "POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("way", ["redis", "unix"])
def test_a_web_page_in_an_operators_browser_changes_nothing(tmp_path, way):
    """Its browser runs as the operator, so a server without a token takes it for one."""
    with served(tmp_path, unix=str(tmp_path / "s"), http="127.0.0.1:0") as server:
        address, body = ways(server)[way], b"{}"
        server.ask("SET", "name", "value")

        def status(**headers: str) -> int:
            headers = {"X-Lmtier": "1", **headers}
            return page(server, "/api/clear", Role.NONE, body, address, **headers)[0]

        assert status(**{"Content-Type": "text/plain"}) == 415, "the types that a page may send unasked"
        assert status(**{"Content-Type": "application/x-www-form-urlencoded"}) == 415
        assert status(Origin="http://attacker.example") == 403
        assert status(Origin="null") == 403
        assert status(Host="attacker.example:6380", Origin="http://attacker.example:6380") == 421
        assert page(server, "/api/stats", Role.NONE, None, address, Host="attacker.example")[0] == 421
        assert page(server, "/api/clear", Role.NONE, None, address, **{"X-Lmtier": "1"})[0] == 405
        assert server.ask("DBSIZE") == 1
        assert page(server, "/api/clear", Role.NONE, body, ways(server)["http"])[0] == 403
        assert server.ask("DBSIZE") == 1
        assert status() == 200
        assert server.ask("DBSIZE") == 0


def test_software_misled_by_others_can_do_nothing(tmp_path):
    """It is the same user's, and chooses the URL and the JSON, but no header."""
    with served(tmp_path) as server:
        server.ask("SET", "name", "value")
        calls = (("/api/sessions", None), ("/api/explain?tokens=true", None), ("/api/clear", b"{}"))
        for path, body in calls:
            assert page(server, path, Role.NONE, body, server.address)[0] in (401, 403)
        assert server.ask("DBSIZE") == 1
        for path, body in calls:
            assert page(server, path, Role.NONE, body, server.address, **{"X-Lmtier": "1"})[0] == 200
        assert server.ask("DBSIZE") == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/clear", b""),
        ("/api/clear?model=llama", b"{}"),
        *[("/api/clear", b'{"%s": null}' % name) for name in (b"model", b"prefix", b"stored_by", b"since")],
        ("/api/clear", b'{"model": "llama", "model": null}'),
    ],
)
def test_a_clear_whose_arguments_are_lost_clears_nothing(server, path, body):
    server.call("/api/clear", {})
    with of(server, Role.ADMIN) as wire:
        wire.expect("OK", "SET", "name", "value")
        status, said = page(server, path, Role.ADMIN, body)
        assert status == 400, said
        wire.expect(1, "DBSIZE")
        assert isinstance(wire.ask("LMTIER.CALL", path, body), Error)
        wire.expect(1, "DBSIZE")


@pytest.mark.parametrize(("role", "path"), [(Role.LOOK, "/api/hints"), (Role.ENGINE, "/api/pin")])
def test_a_call_without_the_right_is_not_read(server, role, path):
    """Megabytes of JSON take a fifth of a second."""
    with of(server, role) as wire:
        assert wire.ask("LMTIER.CALL", path, "no JSON").startswith("NOPERM")


@pytest.mark.parametrize("way", ["LMTIER.CALL", "/api/hints"])
@pytest.mark.parametrize("role", [Role.ENGINE, Role.ADMIN])
def test_hints_are_for_the_roles_of_the_table_and_audited(server, role, way):
    audit, expected = Audit(server), []
    with Client(server.where["unix"]) as engine, of(server, role) as wire:
        for number, (row, right) in enumerate(RIGHTS.items()):
            if not row.startswith("hint:"):
                continue
            kind, _, keyed = row.removeprefix("hint:").partition(":")
            name = f"{role.name}-{way[-5:]}-{number}"
            chain = keys([number + 1, 2, 3], name)
            match = engine.match(chain, FORM, session=name, parent="")
            engine.release(match)
            store(engine, chain)
            payload: dict[str, Any] = {"keys": [chain[0].hex()]} if keyed else {"session": name}
            payload |= {"seconds": 60} if kind in ("retain", "ttl", "pin") else {}
            said = envelope(name, (kind, payload))
            if way == "LMTIER.CALL":
                text = json.dumps({**said, "salt": name})
                (outcome,) = json.loads(wire.granted("LMTIER.CALL", "/api/hints", text))
            else:
                status, body = page(server, way, role, json.dumps({**said, "salt": name}).encode())
                assert status == 200
                (outcome,) = json.loads(body)
            assert (outcome["result"] == "done") == (role >= right.role), (row, outcome)
            about = payload["keys"][0] if keyed else name
            if right.is_audited:
                how = "accepted" if role >= right.role else "refused"
                what = f"{kind}={about}"
                expected.append((how, f"/api/hints {what[:64]}{'…' * (len(what) > 64)}"))
            engine.unpin(f"{tenant(name).hex()} {about}")
            engine.clear()
    audit.says(expected, "/api/hints")


def test_a_chunk_that_an_engine_discards_is_in_the_audit(server):
    audit, (key,) = Audit(server), keys(TOKENS[:1])
    with Client(server.where["unix"]) as engine:
        store(engine, [key])
        assert engine.delete([key])
        assert engine.stats()["cpu"]["chunks"] == 0
    audit.says([("accepted", f"LMTIER.DISCARD {key.hex()}")])


def test_the_protocol_page_has_every_verb_as_declared():
    text = (ROOT / "docs/PROTOCOL.md").read_text()
    rows = re.findall(r"^\| `LMTIER\.(\w+) ?(.*?)` \|", text, re.M)
    assert dict(rows) == {name: verb.fields for name, verb in VERBS.items()}
    assert len(rows) == len(VERBS)


def test_every_verb_has_a_handler_and_a_client(server):
    assert everything(server).items() >= {f"LMTIER.{n}": abs(verb.arity) for n, verb in VERBS.items()}.items()
    spoken = set[str]()
    for folder in ("client", "server/takeover.py", "../backends/lmtier_backends/redis"):
        path = ROOT / "lmtier" / folder
        for file in path.rglob("*.py") if path.is_dir() else (path,):
            spoken.update(re.findall(r'"LMTIER\.(\w+)"', file.read_text()))
    assert spoken == VERBS.keys()


@pytest.mark.parametrize(
    ("fields", "arity"),
    [
        ("", 1),
        ("match", 2),
        ("[position]", -1),
        ("keys…", -2),
        ("match …", -2),
        ("form tokens [SESSION name] keys…", -4),
        ("reservation shard [chunk mark …]", -3),
    ],
)
def test_the_arity_of_a_verb_follows_from_its_fields(fields, arity):
    assert Verb(fields).arity == arity


def test_the_page_on_the_protocol_says_the_same_of_rights():
    text = (ROOT / "docs/PROTOCOL.md").read_text()
    rows = re.findall(
        r"^\| (.*?) \| (.*) \|$", text.partition("| who may use it |")[2].partition("\n\n")[0], re.M
    )
    listed = {
        f"LMTIER.{verb.replace(' … ', ':')}": who
        for who, verbs in rows
        for verb in re.findall("`(.*?)`", verbs)
    }
    roles = {
        "looking": Role.LOOK,
        "engines": Role.ENGINE,
        "the same": Role.ENGINE,
        "administrators": Role.ADMIN,
    }
    for row, right in RIGHTS.items():
        if row.startswith("LMTIER."):
            who = listed.pop(row, "that of engines")
            assert [role for word, role in roles.items() if word in who] == [right.role], row
            assert ("in the log" in who) == right.is_audited, row
            assert ("Unix socket" in who or "the same" in who) == right.needs_slab, row
    assert not listed
