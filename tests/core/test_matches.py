"""Matches over a slab and one tier: what is found is leased, what lies below is brought up once for all."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.match import CPU, EntryState, Lookup
from lmtier.core.matches import Matches
from lmtier.errors import MisuseError
from lmtier.format.layout import form_of
from lmtier.rules.worth import Cost
from lmtier.testing import Gate, MemoryTier, SlowTier, opaque_layout

LAYOUT = opaque_layout(4096)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
KEYS = tuple(b"name" + number.to_bytes(28, "big") for number in range(4))


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def cache(gate: Gate) -> Iterator[Cache]:
    """Its tier has four chunks, of which the slab has the first."""
    url = "slow://?capacity=1MiB"
    config = Config(tiers=["cpu://?capacity=64KiB", url], chunk_tokens=LAYOUT.chunk_tokens, prefault=False)
    with Cache(config, tiers={url: SlowTier(MemoryTier(), gate)}) as cache:
        cache.commit(cache.reserve(KEYS, FORM))
        assert cache.flush()
        for entry in cache.index.entries()[1:]:
            cache.memory.discard(entry.key)
        yield cache
        gate.open()
        cache.check()


def begin(matches: Matches, seconds: float = 30.0) -> Lookup:
    return matches.begin(KEYS, FORM, len(KEYS) * LAYOUT.chunk_tokens, time.monotonic() + seconds)


def arrive(cache: Cache, *found: Lookup) -> None:
    until = time.monotonic() + 30
    while not all(match.is_ready for match in found) and time.monotonic() < until:
        cache.step()


def test_a_match_leases_memory_and_names_lower_tiers(cache: Cache) -> None:
    match = begin(cache._matches)
    assert match.sources == [CPU, "slow", "slow", "slow"]
    assert [entry.leases for entry in match.run] == [1]
    cache._matches.release(match)
    cache._matches.release(match)
    assert not cache._matches.open
    assert not cache.index.leased_bytes


def test_one_load_serves_all_who_wait_and_is_leased_by_each(cache: Cache, gate: Gate) -> None:
    gate.hold()
    one, two = begin(cache._matches), begin(cache._matches)
    for match in (one, two):
        cache._matches.prefetch(match, None, 0)
    assert len(cache._matches.waiters) == 3
    assert cache._matches.loading == cache._matches.waiting_bytes == 3 * FORM.slab_bytes
    gate.open()
    arrive(cache, one, two)
    assert [entry.leases for entry in one.run] == [2] * 4
    assert {entry.state for entry in two.run} == {EntryState.READY}
    assert not cache._matches.waiters
    assert not cache._matches.loading
    for match in (one, two):
        cache._matches.release(match)


def test_who_lets_go_of_a_load_leaves_it_to_the_others(cache: Cache, gate: Gate) -> None:
    gate.hold()
    one, two = begin(cache._matches), begin(cache._matches)
    for match in (one, two):
        cache._matches.prefetch(match, None, 0)
    cache._matches.release(one)
    gate.open()
    arrive(cache, two)
    assert (two.chunks, two.cut_reason) == (4, "")
    cache._matches.release(two)


def test_what_is_late_is_cut_at_its_deadline(cache: Cache, gate: Gate) -> None:
    gate.hold()
    match = begin(cache._matches, seconds=0.0)
    cache._matches.prefetch(match, None, 0)
    cache._matches.expire()
    assert (match.is_ready, match.chunks, match.cut_reason) == (True, 1, "deadline")
    cache._matches.release(match)


def test_a_steps_work_does_not_grow_with_held_matches(cache: Cache, gate: Gate) -> None:
    looked = []

    class Deadline(float):
        def __lt__(self, now: float) -> bool:
            looked.append(self)
            return float(self) < now

        def __ge__(self, now: float) -> bool:
            looked.append(self)
            return float(self) >= now

    held = []
    for _ in range(100):
        held.append(cache._matches.begin(KEYS[:1], FORM, 0, time.monotonic() + 30))
        held[-1].deadline = Deadline(held[-1].deadline)
    gate.hold()
    waiting = begin(cache._matches)
    cache._matches.prefetch(waiting, None, 0)
    waiting.deadline = Deadline(waiting.deadline)
    for _ in range(5):
        cache.step()
        cache.check()
    assert looked == [waiting.deadline] * 5
    gate.open()
    arrive(cache, waiting)
    cache.step()
    looked.clear()
    cache.step()
    assert not looked
    for match in (waiting, *held):
        cache._matches.release(match)


def test_an_offered_chunk_outlives_its_deletion(cache: Cache, gate: Gate) -> None:
    """The engine reads it when it likes: its reply may be the last one that came through."""
    gate.hold()
    match = begin(cache._matches, seconds=0.0)
    cache._matches.prefetch(match, None, 0)
    first = match.run[0]
    cache.memory.discard(first.key)
    cache._matches.expire()
    assert (match.run, match.is_ready) == ([first], True)
    assert first.offsets
    cache._matches.release(match)
    assert not first.offsets


def test_an_offered_chunk_stays_however_slow_copying_is(cache: Cache) -> None:
    before = begin(cache._matches)
    cache._matches.prefetch(before, 2, 0)
    arrive(cache, before)
    match = begin(cache._matches)
    assert len(match.run) == 2
    match.cost = Cost(fixed=0.0, token=1e-9, position=0.0, copy=1.0)
    cache._matches.prefetch(match, None, 1)
    assert (match.chunks, match.cut_reason) == (2, "not_worth_it")
    assert match.run[1].leases == 2
    for each in (before, match):
        cache._matches.release(each)


def test_a_match_of_another_cache_is_refused(cache: Cache) -> None:
    strange = Lookup(KEYS, 0.0, id=99, form=FORM)
    with pytest.raises(MisuseError, match="another cache made"):
        cache._matches.prefetch(strange, None, 0)
    with pytest.raises(MisuseError, match="another cache made"):
        cache._matches.release(strange)
