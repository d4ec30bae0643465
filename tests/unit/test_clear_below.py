"""Clearing a tier that must be asked: what is found meanwhile, what waits, and what becomes of it."""

from __future__ import annotations

import pytest

from lmtier.cache import Cache
from lmtier.config import Config
from lmtier.keys import namespace
from lmtier.tier import Op, Reason
from tests.model.test_cache_machine import HandTier
from tests.unit.test_cache import ONE, keys, store

FAR = "far://"
M, N = namespace("m"), namespace("n")


def of(model: bytes, count: int, name: str = "a") -> list[bytes]:
    return [model + key[4:] for key in keys(count, name)]


@pytest.fixture
def tier():
    return HandTier({}, keeps=False)


@pytest.fixture
def cache(tier):
    tiers = ("cpu://?capacity=1MiB", FAR)
    with Cache(Config(tiers=tiers, chunk_tokens=4, prefault=False), tiers={FAR: tier}) as cache:
        yield cache
        while tier.waiting:
            finish(cache, tier)


def finish(cache: Cache, tier: HandTier, which: int = 0) -> Op:
    """End one job, and tell the cache."""
    op = tier.waiting[which].op
    tier.finish(which)
    cache.step()
    return op


def settle(cache: Cache, tier: HandTier) -> None:
    cache.step()
    while tier.waiting:
        finish(cache, tier)


def test_a_clear_waits_for_writes_that_are_under_way_and_only_for_those_of_its_namespace(cache, tier):
    store(cache, of(M, 2))
    store(cache, of(N, 1))
    cache.step()
    assert [job.op for job in tier.waiting] == [Op.STORE] * 3
    cache.clear(M, force=True)
    assert len(tier.waiting) == 3
    finish(cache, tier)
    assert len(tier.waiting) == 2
    finish(cache, tier)
    assert [job.op for job in tier.waiting] == [Op.STORE, Op.CLEAR]
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(N, 1)}
    assert cache.below[0].is_clear


def test_what_was_found_before_a_clear_is_not_loaded_in_it(cache, tier):
    store(cache, of(M, 2))
    settle(cache, tier)
    for entry in list(cache.index.entries()):  # the slab forgets, the tier does not
        cache._take_out(entry)
    match = cache.match(of(M, 2), ONE)
    assert finish(cache, tier) is Op.LOOKUP
    assert match.chunks == 2
    cache.clear(M)
    cache.prefetch(match)
    assert (match.chunks, match.cut) == (0, "left_meanwhile")
    assert [job.op for job in tier.waiting] == [Op.CLEAR]
    cache.release(match)


def test_nothing_that_is_being_cleared_is_asked_for(cache, tier):
    cache.clear(M)
    assert not cache.match(of(M, 3), ONE).asking
    mixed = cache.match([*of(N, 1), *of(M, 1)], ONE)
    assert mixed.asking
    assert [item.name.key for item in tier.waiting[-1].items] == of(N, 1)


def test_what_is_stored_meanwhile_is_written_afterwards(cache, tier):
    cache.clear(M)
    store(cache, of(M, 3))
    store(cache, of(N, 1))
    cache.step()
    assert [job.op for job in tier.waiting] == [Op.CLEAR, Op.STORE]
    assert cache.below[0].backlog == 5
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(M, 3), *of(N, 1)}


def test_what_waits_for_a_clear_that_fails_makes_room_for_others(cache, tier):
    cache.clear(M)
    store(cache, of(M, 3))
    store(cache, of(N, 1))
    tier.fault = Reason.ERROR
    assert finish(cache, tier) is Op.CLEAR
    tier.fault = None
    assert cache.metrics.value("lmtier_dropped_tokens_total", tier="far", reason="cleared") == 3 * 4
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(N, 1)}
    assert cache.below[0].is_clear


def test_a_clear_in_a_clear_is_one_more_and_never_a_third(cache, tier):
    for _ in range(5):
        cache.clear(M)
    cache.clear(N)
    ended = []
    while tier.waiting:
        ended.append(tier.waiting[0].prefix)
        finish(cache, tier)
    assert ended == [M, M, N]


def test_a_clear_that_keeps_failing_stops_nothing_else(cache, tier):
    below = cache.below[0]
    cache.clear(M)
    tier.fault = Reason.ERROR
    for _ in range(5):
        assert finish(cache, tier) is Op.CLEAR
    tier.fault = None
    assert (below.clearing.is_open, below.up.is_open, below.down.is_open) == (True, False, False)
    assert below.why_uncleared == "error"
    store(cache, of(N, 1))
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(N, 1)}
    assert not below.is_busy
