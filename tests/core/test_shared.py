"""A lower tier that must be asked: what is found in it, and what becomes of it while it is cleared."""

from __future__ import annotations

from typing import Any

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.index import Occupancy
from lmtier.format.keys import is_value, namespace, value_key
from lmtier.format.layout import Name
from lmtier.format.objects import Provenance, Selector
from lmtier.server.values import Values
from lmtier.testing import MemoryTier
from lmtier.tiers.base import Op, Reason
from tests.core.test_cache import ONE, TWO, cpu, keys, look, store
from tests.model.hand import HandTier

FAR = "far://"
M, N = namespace("m"), namespace("n")


def of(model: bytes, count: int, name: str = "a") -> list[bytes]:
    return [model + key[4:] for key in keys(count, name)]


@pytest.fixture
def tier():
    return HandTier({}, keeps=False)


def over(tier: HandTier, options: str = "", **others: Any) -> Cache:
    """A cache above this tier."""
    tiers = "cpu://?capacity=1MiB", FAR + options
    return Cache(Config(tiers=tiers, chunk_tokens=4, prefault=False), tiers={FAR + options: tier}, **others)


@pytest.fixture
def cache(tier):
    with over(tier) as cache:
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


def test_a_clear_waits_only_for_writes_of_its_namespace(cache, tier):
    store(cache, of(M, 2))
    store(cache, of(N, 1))
    cache.step()
    assert [job.op for job in tier.waiting] == [Op.STORE] * 3
    cache.clear(Selector(M), force=True)
    assert len(tier.waiting) == 3
    finish(cache, tier)
    assert len(tier.waiting) == 2
    finish(cache, tier)
    assert [job.op for job in tier.waiting] == [Op.STORE, Op.CLEAR]
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(N, 1)}
    assert cache.lower[0].is_clear_done


def test_a_value_is_not_looked_for_where_none_is_stored(tier):
    with Cache(
        Config(tiers=("cpu://?capacity=1MiB", FAR), prefault=False), tiers={FAR: tier}, is_record=is_value
    ) as cache:
        read = Values(cache).get(b"missing")
        with pytest.raises(StopIteration) as end:
            next(read)
        assert end.value.value is None
        assert not tier.waiting


def test_a_step_says_how_many_jobs_ended(cache, tier):
    store(cache, of(M, 3))
    cache.step()
    tier.finish(0)
    tier.finish(0)
    assert cache.step() == 2
    assert cache.step() == 0


def test_stores_under_way_hold_no_more_than_they_may(cache, tier):
    store(cache, of(M, 3))
    cache.lower[0].pump(2.5 * cache.index.entries()[0].nbytes)
    assert [job.op for job in tier.waiting] == [Op.STORE] * 2


def test_what_was_found_before_a_clear_is_not_loaded_in_it(cache, tier):
    store(cache, of(M, 2))
    settle(cache, tier)
    for entry in list(cache.index.entries()):  # the slab forgets, the tier does not
        cache.memory.discard(entry.key)
    match = cache.match(of(M, 2), ONE)
    assert finish(cache, tier) is Op.LOOKUP
    assert match.chunks == 2
    cache.clear(Selector(M))
    cache.prefetch(match)
    assert (match.chunks, match.cut_reason) == (0, "left_meanwhile")
    assert [job.op for job in tier.waiting] == [Op.CLEAR]
    cache.release(match)


def test_nothing_that_is_being_cleared_is_asked_for(cache, tier):
    cache.clear(Selector(M))
    assert not cache.match(of(M, 3), ONE).pending_lookups
    mixed = cache.match([*of(N, 1), *of(M, 1)], ONE)
    assert mixed.pending_lookups
    assert [item.name.key for item in tier.waiting[-1].items] == of(N, 1)


def test_what_is_stored_meanwhile_is_written_afterwards(cache, tier):
    cache.clear(Selector(M))
    store(cache, of(M, 3))
    store(cache, of(N, 1))
    cache.step()
    assert [job.op for job in tier.waiting] == [Op.CLEAR, Op.STORE]
    assert cache.lower[0].backlog == 5
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(M, 3), *of(N, 1)}


def test_a_failed_clear_makes_room_for_other_writes(cache, tier):
    cache.clear(Selector(M))
    store(cache, of(M, 3))
    store(cache, of(N, 1))
    tier.fault = Reason.ERROR
    assert finish(cache, tier) is Op.CLEAR
    tier.fault = None
    assert cache.metrics.value("lmtier_dropped_tokens_total", tier="far", reason="cleared") == 3 * 4
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(N, 1)}
    assert cache.lower[0].is_clear_done


def test_a_tier_being_searched_gives_none_of_the_suspects(cache, tier):
    store(cache, of(M, 2), by="good")
    store(cache, of(N, 2), by="bad")
    settle(cache, tier)
    for entry in list(cache.index.entries()):  # the slab forgets, the tier does not
        cache.memory.discard(entry.key)
    match = cache.match(of(N, 2), ONE)
    finish(cache, tier)
    assert match.chunks == 2
    cache.clear(Selector(by="b*"))
    assert not cache.lower[0].is_clear_done
    assert [job.op for job in tier.waiting] == [Op.CLEAR]
    cache.prefetch(match)
    for _ in range(2):  # they are read before the search has come to them
        finish(cache, tier, next(at for at, job in enumerate(tier.waiting) if job.op is Op.LOAD))
    assert (match.chunks, match.cut_reason) == (0, "cleared")
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(M, 2)}
    assert cache.lower[0].is_clear_done
    cache.release(match)


def test_a_search_for_suspects_waits_for_earlier_writes(cache, tier):
    store(cache, of(M, 1), by="bad")
    cache.step()
    cache.clear(Selector(by="bad"), force=True)
    store(cache, of(N, 1), by="good")
    cache.step()
    assert [job.op for job in tier.waiting] == [Op.STORE, Op.STORE]
    finish(cache, tier)
    assert [job.op for job in tier.waiting] == [Op.STORE, Op.CLEAR]
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(N, 1)}


def test_suspects_leave_memory_unless_an_engine_reads_them(cache, tier):
    store(cache, of(M, 1), by="bad")
    cache.step()
    assert [job.op for job in tier.waiting] == [Op.STORE]
    cache.clear(Selector(by="bad"))
    assert cache.index.get(of(M, 1)[0]) is None
    settle(cache, tier)
    assert (tier.kept, cache.slab.used) == ({}, 0)
    store(cache, of(N, 1), by="bad")
    cache.step()
    match = cache.match(of(N, 1), ONE)
    cache.clear(Selector(by="bad"))
    assert cache.index.get(of(N, 1)[0]) is not None
    cache.release(match)
    cache.index.check()


def test_a_search_that_fails_is_made_again(cache, tier):
    store(cache, of(M, 1), by="bad")
    settle(cache, tier)
    tier.fault = Reason.ERROR
    cache.clear(Selector(by="bad"))
    assert finish(cache, tier) is Op.CLEAR
    assert cache.lower[0].why_uncleared
    tier.fault = None
    settle(cache, tier)
    assert (tier.kept, cache.lower[0].is_clear_done) == ({}, True)


def test_an_unsearchable_tier_recovers_after_a_clear(cache, tier):
    """Until then nothing waits for the search."""
    below = cache.lower[0]
    store(cache, of(M, 1), by="bad")
    settle(cache, tier)
    cache.clear(Selector(by="bad"))
    tier.fault = Reason.ERROR
    for _ in range(5):
        assert finish(cache, tier) is Op.CLEAR
    assert below.is_clear_failing
    cache.clear()
    assert not below.is_clear_failing
    cache.step()
    while tier.waiting:
        tier.fault = Reason.ERROR if not tier.waiting[0].selector.is_prefix else None
        finish(cache, tier)
    assert (tier.kept, below.why_busy(), cache.flush(5)) == ({}, "", True)


def test_a_search_that_keeps_failing_stops_nothing_else(cache, tier):
    below = cache.lower[0]
    cache.clear(Selector(by="bad"))
    tier.fault = Reason.ERROR
    for _ in range(5):
        assert finish(cache, tier) is Op.CLEAR
    tier.fault = None
    assert (below.is_clear_failing, below.load_breaker.is_open, below.store_breaker.is_open) == (
        True,
        False,
        False,
    )
    assert not below.is_busy


def test_a_chunk_without_a_time_is_not_suspect():
    (key,) = of(M, 1)
    assert not Selector(by="?*").covers(key, Provenance("x", 0))
    assert not Selector(since=1).covers(key, Provenance())
    assert Selector(M).covers(key, Provenance()), "its key decides"
    assert not Selector(since=6).covers(key, Provenance("x", 5))
    assert Selector(M, "x*", 5).covers(key, Provenance("xyz", 5))
    assert not Selector(N).covers(key, Provenance("x", 5))
    assert not Selector(by="x").covers(value_key(b"name"), Provenance("x", 5))
    assert Selector().covers(value_key(b"name"), Provenance("x", 5))


def test_a_tenants_chunk_is_suspect_whenever_it_was_stored():
    ours, theirs = b"mod_" + b"ours" + bytes(24), b"mod_" + b"them" + bytes(24)
    for made in (Provenance(), Provenance("x", 5)):
        assert Selector(tenants=frozenset({b"ours"})).covers(ours, made)
        assert not Selector(tenants=frozenset({b"ours"})).covers(theirs, made)
        assert not Selector(b"other", tenants=frozenset({b"ours"})).covers(ours, made)
    assert not Selector(tenants=frozenset({b"ours"}), until=4).covers(ours, Provenance("x", 5))


def test_a_clear_in_a_clear_is_one_more_and_never_a_third(cache, tier):
    for _ in range(5):
        cache.clear(Selector(M))
    cache.clear(Selector(N))
    ended = []
    while tier.waiting:
        ended.append(tier.waiting[0].selector.prefix)
        finish(cache, tier)
    assert ended == [M, M, N]


def test_a_clear_that_keeps_failing_stops_nothing_else(cache, tier):
    below = cache.lower[0]
    cache.clear(Selector(M))
    tier.fault = Reason.ERROR
    for _ in range(5):
        assert finish(cache, tier) is Op.CLEAR
    tier.fault = None
    assert (below.clear_breaker.is_open, below.load_breaker.is_open, below.store_breaker.is_open) == (
        True,
        False,
        False,
    )
    assert below.why_uncleared == "error"
    store(cache, of(N, 1))
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(N, 1)}
    assert not below.is_busy


def test_a_chunk_discarded_on_its_way_down_is_deleted_later(cache, tier):
    """A delete beside the write may come first, and then what was not to be believed is found again."""
    store(cache, of(M, 2))
    cache.step()
    assert [job.op for job in tier.waiting] == [Op.STORE] * 2
    entry = cache.index.get(of(M, 2)[1])
    assert entry is not None
    cache.discard(entry.key, entry.form)
    cache.step()
    while len(tier.waiting) > 1:  # whatever was submitted last ends first
        finish(cache, tier, -1)
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(M, 1)}
    store(cache, of(M, 2))
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(M, 2)}


def test_a_chunk_being_deleted_is_neither_read_nor_deleted(cache, tier):
    """A read beside the deletion may come first, and bring back what is not to be believed."""
    store(cache, of(M, 2))
    settle(cache, tier)
    asked, entry = cache.match(of(M, 2), ONE), cache.index.get(of(M, 2)[1])
    assert entry is not None
    cache.release(asked)
    for each in cache.index.entries():  # the slab forgets, the tier does not
        cache.memory.discard(each.key)
    match = cache.match(of(M, 2), ONE)
    assert finish(cache, tier) is Op.LOOKUP
    for _ in range(2):
        cache.discard(entry.key, entry.form)
    assert [job.op for job in tier.waiting] == [Op.DELETE]
    cache.prefetch(match)
    assert [job.op for job in tier.waiting] == [Op.DELETE, Op.LOAD]
    assert (match.chunks, match.cut_reason) == (1, "left_meanwhile")
    assert finish(cache, tier) is Op.DELETE
    assert [job.op for job in tier.waiting] == [Op.LOAD, Op.DELETE]  # it was asked for twice
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(M, 1)}
    cache.release(match)


def test_tiers_that_must_be_asked_are_asked_once(make):
    class Asked(MemoryTier):
        keeps = False

        def contains(self, names):
            asked.append(len(names))
            return super().contains(names)

    asked: list[int] = []
    objects: dict[Name, bytes] = {}
    cache = make(cpu(20), "far://", opened={"far://": Asked(objects)})
    store(cache, keys(6))
    cache.close()
    cache = make(cpu(20), "far://", opened={"far://": Asked(objects)})
    assert look(cache, keys(8)) == ["far"] * 6
    assert asked == [8]


def test_a_shared_tier_never_gets_a_value_that_may_change(make):
    shared, own = "shared://x", "own://?capacity=1GiB"
    tiers: dict[str, MemoryTier] = {shared: MemoryTier(), own: MemoryTier()}
    tiers[shared].keeps = False
    cache = make(cpu(20), own, shared, opened=dict(tiers))
    values = Values(cache)
    draft = values.draft(5)
    assert draft is not None
    draft.view[:] = b"hello"
    list(values.put(draft, b"name"))
    store(cache, keys(2))
    assert cache.flush()
    assert {name.key for name in tiers[own].objects} == {value_key(b"name"), *keys(2)}
    assert {name.key for name in tiers[shared].objects} == set(keys(2))


def test_what_it_holds_is_not_known(cache, tier):
    store(cache, of(M, 2))
    settle(cache, tier)
    (shared,) = cache.lower.shared
    assert len(tier.kept) == 2
    assert (shared.occupancy(), cache.lower.owned) == (Occupancy(), [])
    assert not shared.is_stored(of(M, 1)[0], ONE)
    assert not shared.is_stored_or_storing(of(M, 1)[0], ONE)


def sent(cache: Cache, tier: HandTier) -> list[bytes]:
    """The chunks that are written until nothing is left to do."""
    keys: list[bytes] = []
    cache.step()
    while tier.waiting:
        job = tier.waiting[0]
        keys += [item.name.key for item in job.items if job.op is Op.STORE]
        finish(cache, tier)
    return keys


def test_each_hit_sends_only_what_was_not_sent_before(tier):
    with over(tier, "?write=reused") as cache:
        store(cache, of(M, 3))
        assert sent(cache, tier) == [], "not asked for yet"
        for _ in range(2):
            cache.release(cache.match(of(M, 3), ONE))
            cache.step()
        assert sent(cache, tier) == of(M, 3), "once, also if it is asked for while it is written"
        cache.release(cache.match(of(M, 3), ONE))
        assert sent(cache, tier) == []
        store(cache, of(N, 1))
        tier.fault = Reason.ERROR
        cache.release(cache.match(of(N, 1), ONE))
        assert sent(cache, tier) == of(N, 1)
        tier.fault = None
        cache.release(cache.match(of(N, 1), ONE))
        assert sent(cache, tier) == of(N, 1), "it was not written"


def test_an_evicted_chunk_is_not_resent_with_later_ones(tier):
    with over(tier, "?write=evicted") as cache:
        store(cache, of(M, 3))
        for length, new in ((2, of(M, 2)), (2, []), (3, of(M, 3)[2:])):
            entry = cache.index.get(of(M, 3)[length - 1])
            assert entry is not None
            cache.lower[0].on_evicting([entry])
            assert sent(cache, tier) == new


def test_chunks_of_other_hosts_are_resent_only_if_missing(cache, tier):
    names = of(M, 2)
    with over(other := HandTier(tier.kept, keeps=False)) as host:
        store(host, names)
        settle(host, other)
    for missing in ([], names[1:]):
        for key in missing:  # the tier evicts
            del tier.kept[Name(key, ONE.shards[0])]
        for entry in cache.index.entries():
            cache.memory.discard(entry.key)
        match = cache.match(names, ONE)
        assert finish(cache, tier) is Op.LOOKUP
        cache.prefetch(match, 0)  # it is not worth it: the engine computes, and stores
        cache.release(match)
        store(cache, names)
        assert sent(cache, tier) == missing


def test_a_chunk_deleted_in_a_shared_tier_is_sent_again(cache, tier):
    store(cache, of(M, 2))
    settle(cache, tier)
    for delete in (
        lambda: cache.discard(of(M, 2)[1]),
        lambda: cache.clear(Selector(since=1)),
        cache.clear,
    ):
        before = {name.key for name in tier.kept}
        delete()
        settle(cache, tier)
        gone = [key for key in of(M, 2) if key in before - {name.key for name in tier.kept}]
        store(cache, of(M, 2))
        assert sent(cache, tier) == gone != []


def test_having_sent_a_chunk_is_no_proof_that_it_is_stored(cache, tier, monkeypatch):
    monkeypatch.setattr("lmtier.core.shared.MAX_ASSUMED", 2)
    store(cache, of(M, 3))
    settle(cache, tier)
    (shared,) = cache.lower.shared
    assert [shared._needs(key, ONE) for key in of(M, 3)] == [True, False, False], "so many are remembered"
    last = of(M, 3)[2]
    assert shared._needs(last, TWO), "in another form it is another object"
    assert not shared.is_stored_or_queued(last, ONE)
    assert not shared.is_stored(last, ONE)
    assert not shared.is_stored_or_storing(last, ONE)
    for _ in range(5):
        shared.load_breaker.record(False, "refused")
    cache.step()
    assert shared._needs(last, ONE), "a server that comes back may be empty"


def test_what_may_have_expired_there_is_sent_again(tier):
    now = [0.0]
    with over(tier, "?ttl=1h", clock=lambda: now[0]) as cache:
        store(cache, of(M, 1))
        settle(cache, tier)
        (shared,), (entry,) = cache.lower.shared, cache.index.entries()
        for seconds, jobs in ((3599.0, 0), (3601.0, 1)):
            now[0] = seconds
            shared.queue_write(entry)
            cache.step()
            assert len(tier.waiting) == jobs
        settle(cache, tier)


def test_a_suspect_found_during_its_search_is_not_trusted(cache, tier):
    store(cache, of(M, 1))
    settle(cache, tier)
    (shared,), (entry,) = cache.lower.shared, cache.index.entries()
    shared.begin_clear(Selector(since=1))
    shared.clear(Selector(since=1), force=False)
    match = cache.match(of(M, 2), ONE)
    (lookup,) = (number for number, job in enumerate(tier.waiting) if job.op is Op.LOOKUP)
    finish(cache, tier, lookup)
    assert shared._needs(entry.key, ONE)
    cache.release(match)
    settle(cache, tier)


def test_a_chunk_is_deleted_in_every_form_it_may_have(cache, tier):
    store(cache, of(M, 2))
    settle(cache, tier)
    (shared,) = cache.lower.shared
    shared.discard(of(M, 2)[0], ())
    assert not tier.waiting
    shared.discard(of(M, 2)[0], (TWO, ONE))
    (job,) = tier.waiting
    assert {item.name.shard for item in job.items} == {*ONE.shards, *TWO.shards}
    settle(cache, tier)
    assert {name.key for name in tier.kept} == {*of(M, 2)[1:]}
