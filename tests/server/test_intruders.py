"""Only who holds memory decides about it: nobody else ends, publishes or releases what an engine holds."""

from __future__ import annotations

import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from lmtier.client.client import Client
from lmtier.core.grant import Grant
from lmtier.errors import TierError
from lmtier.wire.resp import Error
from tests.client.test_client import (
    LAYOUT,
    LEFT,
    ONE,
    RIGHT,
    ROOM,
    TWO,
    C,
    child,
    heard,
    is_right,
    keys,
    look,
    store,
    used,
    write,
)
from tests.server.process import Served, Wire, secret, served

SECRET = secret("victim")
OTHER = secret("another")
INTRUDERS = [
    "over TCP",
    "over TCP, with the secret",
    "over the Unix socket",
    "over the Unix socket, as an engine",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("intruders")
    with served(
        *(folder, f"cpu://?capacity={8 * ROOM}"),
        config={"chunk_tokens": C, "verify": "always"},
        log_level="debug",
        unix=str(folder / "s"),
        http="127.0.0.1:0",
    ) as server:
        yield server


@pytest.fixture
def third(server: Served) -> Iterator[Client]:
    """An engine that has nothing to do with the other two. It begins with an empty server."""
    with Client(server.where["unix"]) as third:
        third.clear()
        assert used(third) == 0
        yield third


@pytest.fixture(params=INTRUDERS)
def intrude(request: pytest.FixtureRequest) -> Iterator[Callable[[Served], Wire]]:
    """A connection that tries to be in the victim's session."""
    wires: list[Wire] = []

    def intrude(server: Served) -> Wire:
        wire = Wire(server.address if "TCP" in request.param else server.where["unix"])
        wires.append(wire)
        if "secret" in request.param:
            wire.ask("LMTIER.HELLO", 1, "ENGINE", SECRET, "SHARD", str(RIGHT), "NAME", "scheduler")
        elif "engine" in request.param:
            wire.granted("LMTIER.HELLO", 1, "ENGINE", OTHER, "SHARD", str(RIGHT), "NAME", "scheduler")
        else:
            wire.ask("LMTIER.HELLO", 1, "NAME", "scheduler")
        wire.ask("LMTIER.HELLO", 1)  # if it was refused, with a session of its own
        return wire

    yield intrude
    for wire in wires:
        wire.socket.close()


def guesses(number: int) -> range:
    """Ids are counted, and each shows the run: who knows one knows those around it."""
    return range(max(1, number - 3), number + 4)


def finish(wire: Wire, reservation: Grant) -> None:
    for verb in ("COMMIT", "ABORT"):
        for number in guesses(reservation.id):
            for shard in ("*", *map(str, reservation.form.shards)):
                wire.ask(f"LMTIER.{verb}", number, shard)


def test_only_its_engine_publishes_an_unwritten_chunk(server, third, intrude):
    with Client(server.where["unix"], engine=SECRET) as victim:
        store(victim, keys(8, "before"))  # these bytes are what an extent has that is not written yet
        victim.clear()
        saving = victim.reserve(keys(4), ONE)
        finish(intrude(server), saving)
        assert look(third, keys(4)) == []
        write(victim, saving)
        victim.commit(saving)
        assert look(third, keys(4)) == ["cpu"] * 4


def test_what_an_engine_reads_changes_for_nobody_else(server, third, intrude):
    with Client(server.where["unix"], engine=SECRET) as victim:
        store(victim, keys(4))
        held = victim.match(keys(4), ONE)
        wire = intrude(server)
        for number in guesses(held.grant.id):
            wire.ask("LMTIER.RELEASE", number)
        store(third, keys(8, "after"))
        assert is_right(victim, held)
        assert look(third, keys(4)) == ["cpu"] * 4
        victim.release(held)


def test_what_an_engine_is_writing_is_given_to_nobody_else(server, third, intrude):
    """Also not when the intruder leaves, as if a rank had died."""
    with Client(server.where["unix"], engine=SECRET) as victim:
        saving = victim.reserve(keys(8), TWO)
        wire = intrude(server)
        finish(wire, saving)
        wire.socket.close()
        assert store(third, keys(8, "after"), TWO) == 0
        write(victim, saving)
        victim.commit(saving, LEFT)
        victim.commit(saving, RIGHT)
        assert look(third, keys(8), TWO) == ["cpu"] * 8


def test_a_client_without_the_slab_cannot_touch_extents(server, third):
    with server.connect() as wire:
        store(third, keys(2))
        wire.granted("LMTIER.HELLO", 1)
        form = wire.granted("LMTIER.FORM", LAYOUT.to_json(), str(LEFT))
        for words in (
            ("SLAB",),
            ("RESERVE", form, 0, keys(2, "far")[0]),
            ("COMMIT", 1, "*"),
            ("ABORT", 1, "*"),
            ("DISCARD", keys(2)[0]),
        ):
            answer = wire.ask(f"LMTIER.{words[0]}", *words[1:])
            assert isinstance(answer, Error), words
            assert answer.startswith("MISUSE only who maps the slab may do this"), answer
        assert look(third, keys(2)) == ["cpu"] * 2


def test_a_guessable_secret_begins_no_shared_session(server):
    with Wire(server.where["unix"]) as wire:
        for word in ("engine-0", "vllm-0123456789abcdef", "0" * 31, "G" * 32, "a" * 129, ""):
            assert wire.ask("LMTIER.HELLO", 1, "ENGINE", word).startswith("ERR ENGINE takes a secret")


def test_the_secret_of_an_engine_is_shown_to_nobody(server, third):
    with (
        Client(server.where["unix"], engine=SECRET, shard=LEFT, name="rank 0") as victim,
        Wire(server.where["unix"]) as wire,
    ):
        store(victim, keys(2), TWO)
        with pytest.raises(TierError, match="'rank 0' is connected and saves shard L0-2H0-1") as refused:
            Client(server.where["unix"], engine=SECRET, shard=LEFT)
        said = [str(refused.value), repr(victim)]
        asked = ["CLIENT LIST", "CLIENT INFO", "INFO", "CONFIG GET *"]
        asked += [f"LMTIER.CALL /api/{each}" for each in ("stats", "explain", "sessions", "models", "pins")]
        asked += ["LMTIER.HELLO 1 NAME curious"]
        said += [repr(wire.ask(*words.split())) for words in asked]
        for page in ("metrics", "api/stats", "api/explain", "api/view"):
            with urllib.request.urlopen(f"http://{server.where['http']}/{page}", timeout=20) as answer:
                said.append(answer.read().decode())
    said.append(server.log.read_text())
    assert any("rank 0" in each for each in said)
    assert not any(SECRET[:16] in each for each in said)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_does_not_join_with_the_secret():
    def joins(pipe: Connection, path: str) -> None:
        os.setuid(65534)
        with Wire(path) as wire:
            pipe.send(str(wire.ask("LMTIER.HELLO", 1, "ENGINE", SECRET)))

    # pytest's own folders are closed to others.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with served(Path(folder), unix=f"{folder}/s", insecure=True):
            os.chmod(f"{folder}/s", 0o666)
            with Client(f"{folder}/s", engine=SECRET), child(joins, f"{folder}/s") as (pipe, _):
                assert heard(pipe).startswith("NOPERM")
