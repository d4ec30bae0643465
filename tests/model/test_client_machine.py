"""One history, three ways: a `Cache` in this process, and a server's two clients, one of them elsewhere.

What a client does is done to the cache too; they must say the same, hold the same, and see the same bytes.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lmtier.client.client import Client
from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.grant import Grant, Match
from lmtier.format.layout import PAGE, Shard
from tests.model.hand import CHAINS, FORMS, LENGTH, content, key
from tests.server.process import Served

SETTINGS = {"chunk_tokens": 2, "load_deadline": 3600.0, "verify": "always"}


def keys(chain: int, length: int) -> list[bytes]:
    return [key(chain, number) for number in range(length)]


class Hand:
    """Does things to a cache, wherever that is, and says what came of it in plain values."""

    def __init__(self, store: Cache | Client) -> None:
        self.store = store
        self.matches: dict[int, Match] = {}
        self.saves: dict[int, Grant] = {}

    def reserve(self, number: int, chain: int, length: int, form: str, first: int) -> object:
        reservation = self.store.reserve(keys(chain, length), FORMS[form], first=first)
        for name, offsets in reservation.places:
            for offset, shard in zip(offsets, reservation.form.shards, strict=True):
                data = content(name, shard)
                self.store.slab.view(offset, len(data))[:] = data
        self.saves[number] = reservation
        return list(reservation.chunks), reservation.leading_stored, reservation.dropped

    def finish(self, number: int, shard: Shard, aborts: bool) -> object:
        reservation = self.saves[number]
        if aborts:
            self.store.abort(reservation, shard)
        else:
            named = zip(reservation.chunks, reservation.placement.keys, strict=True)
            marks = {chunk: name[:16] for chunk, name in named if chunk % 2}
            self.store.commit(reservation, shard, marks)
        return self.store.unfinished(reservation)

    def match(self, number: int, chain: int, length: int, form: str) -> object:
        match = self.store.match(keys(chain, length), FORMS[form], tokens=2 * length + 1)
        self.matches[number] = match
        return self.told(number)

    def wait(self, number: int, chunks: int | None) -> object:
        match = self.matches[number]
        if chunks is not None:
            self.store.prefetch(match, chunks)
        self.store.wait(match)
        assert match.is_ready
        assert len(match.grant.chunks) == match.chunks
        return self.told(number)

    def told(self, number: int) -> object:
        """What a match says: the bytes too, which are there until its release, whoever discards them."""
        match = self.matches[number]
        placement = match.grant.placement
        marks = [placement.marks.get(chunk, ()) for chunk in match.grant.chunks]
        complete = [
            (
                key,
                form.shards,
                marks[chunk] if any(marks[chunk]) else (),
                [
                    bytes(self.store.slab.view(offset, size))
                    for offset, size in zip(placement.offsets[chunk], form.sizes, strict=True)
                ],
            )
            for chunk, (key, form) in enumerate(zip(placement.keys, placement.forms, strict=True))
            if chunk not in match.loading
        ]
        return (
            match.chunks,
            match.sources,
            match.is_ready,
            match.cut_reason,
            match.pending_lookups,
            match.loading,
            complete,
        )

    def release(self, number: int) -> None:
        self.store.release(self.matches.pop(number))

    def seen(self, chain: int, length: int) -> None:
        self.store.touch(keys(chain, length))

    def discard(self, number: int) -> None:
        placement = self.matches[number].grant.placement
        if placement.keys:
            self.store.discard(placement.keys[-1], placement.forms[-1])

    def clear(self) -> None:
        self.store.clear()

    def settle(self) -> object:
        """Until what was to be written is; then everything can be compared."""
        # False, once, if a small disk had no room for something.
        assert self.store.flush() or self.store.flush()
        self.store.check()
        return self.store.stats()


class Elsewhere:
    """A hand in another process, which stays from one history to the next."""

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=self._work, args=(theirs,))
        self._process.start()
        theirs.close()

    def _work(self, pipe: Connection) -> None:
        self._pipe.close()
        hand = None
        while True:
            try:
                action, arguments = pipe.recv()
            except EOFError:
                return
            if action == "open":
                hand = Hand(Client(*arguments))
                pipe.send(None)
            elif action == "close":
                assert hand is not None
                assert isinstance(hand.store, Client)
                hand.store.close()
                pipe.send(None)
            else:
                pipe.send(getattr(hand, action)(*arguments))

    def do(self, action: str, *arguments: object) -> Any:
        self._pipe.send((action, arguments))
        assert self._pipe.poll(30), f"{action} does not end"
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.close()
        self._process.join()


class ClientMachine(RuleBasedStateMachine):
    elsewhere: ClassVar[Elsewhere]

    @initialize(
        slab=st.integers(3, 14),
        disk=st.none() | st.integers(2, 20),
        write=st.sampled_from(("always", "reused", "evicted")),
        policy=st.sampled_from(("lru", "auto")),
    )
    def start(self, slab: int, disk: int | None, write: str, policy: str) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.stack = ExitStack()
        self.stack.callback(shutil.rmtree, self.root)
        tiers = [f"cpu://?capacity={slab * 4 * PAGE}&policy={policy}"]
        below = [] if disk is None else [f"?capacity={disk * 5 * PAGE}&write={write}&policy={policy}"]
        ours, theirs = (
            [*tiers, *(f"disk://{self.root}/{name}{url}" for url in below)] for name in ("a", "b")
        )
        server = Served(self.root, *theirs, config=SETTINGS, unix=str(self.root / "socket"))
        self.stack.callback(server.kill)
        config = Config(tiers=ours, prefault=False, **SETTINGS)  # type: ignore[arg-type]
        self.here = Hand(self.stack.enter_context(Cache(config)))
        self.near = Hand(self.stack.enter_context(Client(server.where["unix"])))
        self.elsewhere.do("open", server.where["unix"])
        self.stack.callback(self.elsewhere.do, "close")
        self.numbers = 0
        self.saves: list[tuple[int, bool, list[Shard]]] = []
        self.matches: list[tuple[int, bool]] = []

    def both(self, far: bool, action: str, *arguments: object) -> Any:
        """The same thing to the cache here and to the server; then everything must be as there."""
        said = getattr(self.here, action)(*arguments)
        other = self.client(far, action, *arguments)
        assert said == other, action
        assert self.here.settle() == self.client(far, "settle"), f"after {action}"
        return said

    def client(self, far: bool, action: str, *arguments: object) -> Any:
        return self.elsewhere.do(action, *arguments) if far else getattr(self.near, action)(*arguments)

    def next(self) -> int:
        self.numbers += 1
        return self.numbers

    @rule(
        far=st.booleans(),
        chain=st.integers(0, CHAINS - 1),
        length=st.integers(0, LENGTH),
        form=st.sampled_from(sorted(FORMS)),
        first=st.sampled_from((0, 0, 0, 1, 3)),
    )
    def reserve(self, far: bool, chain: int, length: int, form: str, first: int) -> None:
        number = self.next()
        chunks, _, _ = self.both(far, "reserve", number, chain, length, form, first)
        if chunks:
            self.saves.append((number, far, list(FORMS[form].shards)))

    @precondition(lambda self: self.saves)
    @rule(which=st.integers(0, 9), aborts=st.sampled_from((False, False, False, True)))
    def finish_a_rank(self, which: int, aborts: bool) -> None:
        number, far, left = self.saves[which % len(self.saves)]
        self.both(far, "finish", number, left.pop(), aborts)
        if not left:
            del self.saves[which % len(self.saves)]

    @rule(
        far=st.booleans(),
        chain=st.integers(0, CHAINS - 1),
        length=st.integers(0, LENGTH),
        form=st.sampled_from(sorted(FORMS)),
        chunks=st.none() | st.none() | st.integers(0, LENGTH),
        waits=st.booleans(),
    )
    def match(self, far: bool, chain: int, length: int, form: str, chunks: int | None, waits: bool) -> None:
        number = self.next()
        self.both(far, "match", number, chain, length, form)
        if waits:
            self.both(far, "wait", number, chunks)
        self.matches.append((number, far))

    @precondition(lambda self: self.matches)
    @rule(which=st.integers(0, 9))
    def wait(self, which: int) -> None:
        number, far = self.matches[which % len(self.matches)]
        self.both(far, "wait", number, None)

    @precondition(lambda self: self.matches)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        number, far = self.matches.pop(which % len(self.matches))
        self.both(far, "release", number)

    @rule(far=st.booleans(), chain=st.integers(0, CHAINS - 1), length=st.integers(0, LENGTH))
    def seen(self, far: bool, chain: int, length: int) -> None:
        self.both(far, "seen", chain, length)

    @precondition(lambda self: self.matches)
    @rule(which=st.integers(0, 9))
    def discard(self, which: int) -> None:
        number, far = self.matches[which % len(self.matches)]
        self.both(far, "discard", number)

    @rule(far=st.booleans())
    def clear(self, far: bool) -> None:
        self.both(far, "clear")

    def teardown(self) -> None:
        if "stack" not in vars(self):
            return
        with self.stack:
            for number, far in self.matches:
                self.both(far, "release", number)
            for number, far, left in self.saves:
                for shard in left:
                    self.both(far, "finish", number, shard, True)
            self.both(False, "clear")
            assert self.here.settle()["cpu"]["used"] == 0  # type: ignore[index]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    ClientMachine.elsewhere = Elsewhere()
    yield
    ClientMachine.elsewhere.end()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("walks", [12, pytest.param(30, marks=pytest.mark.slow)])
def test_a_cache_and_two_clients_of_a_server_tell_the_same(walks: int):
    run_state_machine_as_test(
        ClientMachine,
        settings=settings(
            max_examples=walks,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )
