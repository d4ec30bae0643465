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
from tests.server.process import Served, Wire, served, until
from tests.server.test_lifetimes import FORM, ROOM, TOKENS, keys, store

WORDS = {Role.NONE: "", Role.LOOK: "only-look", Role.ENGINE: "the-engines", Role.ADMIN: "administration"}
KEY = "ab" * 32


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
        self._begin = f"LMTIER.UNPIN begin-{next(self.numbers)}"
        with of(server, Role.ADMIN) as wire:
            wire.expect(0, *self._begin.split())

    def lines(self) -> list[tuple[str, str]]:
        facts = map(json.loads, self._server.log.read_text().splitlines())
        lines = [(each["audit"], each["what"]) for each in facts if "audit" in each]
        begin = ("accepted", self._begin)
        return lines[lines.index(begin) + 1 :] if begin in lines else []

    def says(self, expected: list[tuple[str, str]], about: str = "") -> None:
        """Exactly this, of what begins so."""
        end = ("accepted", f"LMTIER.UNPIN end-{next(self.numbers)}")
        with of(self._server, Role.ADMIN) as wire:
            wire.expect(0, *end[1].split())
        until(lambda: end in self.lines())
        found = self.lines()
        assert [each for each in found[: found.index(end)] if each[1].startswith(about)] == expected


def everything(server: Served) -> dict[str, int]:
    """All commands and verbs of the server, with the number of words that each needs."""
    with of(server, Role.ADMIN) as wire:
        return {each[0].decode().upper(): abs(each[1]) for each in wire.ask("COMMAND")}


def test_the_table_has_each_command_page_and_hint_and_nothing_else(server):
    pages = {page for page in RIGHTS if page.startswith("/")}
    status, body = page(server, "/no-such-page", Role.ADMIN)
    assert status == 404
    assert pages == {*re.findall(r"/[\w/]*", json.loads(body)["error"]), "/api/hints"}
    assert {f"hint:{kind}" for kind in ACTIONS} == {
        row for row in RIGHTS if row.startswith("hint:") and row.count(":") == 1
    }
    rows = {row for row in RIGHTS if row not in pages and ":" not in row}
    assert rows == everything(server).keys()


def variants(name: str, words: int) -> list[list[str]]:
    """Words for this command that have no effect, once for each of its rows."""
    plain = {"HELLO": ["3", "AUTH", "default", "wrong"]}.get(name, [KEY] * (words - 1))
    rest = {"CLIENT:KILL": ["KILL", "ADDR", KEY], "LMTIER.EXPLAIN:TOKENS": ["5", "TOKENS"]}
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


def test_a_word_that_only_looks_like_tokens_gives_no_prompts(server):
    """In Unicode more letters than S become an S in upper case."""
    with of(server, Role.LOOK) as wire:
        for words in (["TOKEN\u017f"], ["5", "to\u212aens"], ["5", "token\u017f"]):
            answer = wire.ask("LMTIER.EXPLAIN", *words)
            assert isinstance(answer, Error), words
            assert answer.startswith("ERR "), words
        assert wire.ask("LMTIER.EXPLAIN", "5", "tokens").startswith("NOPERM")
        assert json.loads(wire.granted("LMTIER.EXPLAIN", "5")) is not None
    with of(server, Role.ADMIN) as wire:
        assert json.loads(wire.granted("LMTIER.EXPLAIN", "tokens")) is not None


def page(server: Served, path: str, role: Role, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.where["http"], timeout=20)
    headers = {"Content-Type": "application/json"}
    if role:
        headers["Authorization"] = f"Bearer {WORDS[role]}"
    connection.request("GET" if body is None else "POST", path, body, headers)
    answer = connection.getresponse()
    said = answer.status, answer.read()
    connection.close()
    return said


@pytest.mark.parametrize("role", Role)
def test_each_page_is_for_the_roles_that_the_table_names(server, role):
    said = json.dumps(envelope("none")).encode()
    for path, right in RIGHTS.items():
        if path.startswith("/"):
            status, _ = page(server, path, role, said if path == "/api/hints" else None)
            assert (status not in (401, 403)) == (role >= right.role), (path, status)


@pytest.mark.parametrize("way", ["LMTIER.HINT", "/api/hints"])
@pytest.mark.parametrize("role", [Role.ENGINE, Role.ADMIN])
def test_each_hint_is_for_the_roles_that_the_table_names_and_in_the_audit(server, role, way):
    audit, expected = Audit(server), []
    with Client(server.where["unix"]) as engine, of(server, role) as wire:
        for number, (row, right) in enumerate(RIGHTS.items()):
            if not row.startswith("hint:"):
                continue
            kind, _, keyed = row.removeprefix("hint:").partition(":")
            name = f"{role.name}-{way}-{number}"
            chain = keys([number + 1, 2, 3], name)
            match = engine.match(chain, FORM, session=name, parent="")
            engine.release(match)
            store(engine, chain)
            payload: dict[str, Any] = {"keys": [chain[0].hex()]} if keyed else {"session": name}
            payload |= {"seconds": 60} if kind in ("retain", "ttl", "pin") else {}
            said = envelope(name, (kind, payload))
            if way == "LMTIER.HINT":
                (outcome,) = json.loads(wire.granted("LMTIER.HINT", json.dumps(said), "SALT", name))
            else:
                status, body = page(server, way, role, json.dumps({**said, "salt": name}).encode())
                assert status == 200
                (outcome,) = json.loads(body)
            assert (outcome["result"] == "done") == (role >= right.role), (row, outcome)
            about = payload["keys"][0] if keyed else name
            if right.is_audited:
                how = "accepted" if role >= right.role else "refused"
                what = f"{kind}={about}"
                expected.append((how, f"LMTIER.HINT {what[:64]}{'…' * (len(what) > 64)}"))
            engine.unpin(f"{tenant(name).hex()} {about}")
            engine.clear()
    audit.says(expected, "LMTIER.HINT")


def test_a_chunk_that_an_engine_discards_is_in_the_audit(server):
    audit, (key,) = Audit(server), keys(TOKENS[:1])
    with Client(server.where["unix"]) as engine:
        store(engine, [key])
        assert engine.delete([key])
        assert engine.stats()["cpu"]["chunks"] == 0
    audit.says([("accepted", f"LMTIER.DISCARD {key.hex()}")])


def test_the_page_on_the_protocol_says_the_same_of_verbs():
    text = (Path(__file__).parents[2] / "docs/PROTOCOL.md").read_text()
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
