"""A lower tier that keeps an index: its room, its order, its scan, and what leaves it."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.match import DELETED
from lmtier.format.keys import is_value, namespace, value_key
from lmtier.format.layout import Name
from lmtier.format.objects import EVERYTHING, Selector
from lmtier.rules.fullness import FULL_PAUSE
from lmtier.testing import FullTier, Gate, MemoryTier, SlowTier
from lmtier.tiers.base import Done, Item, Op, Reason
from tests.core.test_cache import (
    AT_REST,
    ONE,
    TWO,
    C,
    cpu,
    disk,
    kept,
    keys,
    look,
    store,
)
from tests.core.test_shared import M, N, finish, of, settle
from tests.model.hand import HandTier


def test_a_restart_finds_a_warm_disk_before_any_load(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, keys(5))
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    assert store(cache, keys(5)) == 0, "known before anything was loaded"
    assert look(cache, keys(5)) == ["disk"] * 5
    assert look(cache, keys(5)) == ["cpu"] * 5


def test_disk_capacity_is_exact_and_the_files_agree(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv", chunks=5))
    for turn in range(6):
        store(cache, keys(3, f"turn{turn}"))
        assert cache.flush()
        files = [file.stat().st_size for file in (tmp_path / "kv").rglob("*.L*")]
        assert sum(files) == cache.stats()["disk"]["used"] <= 5 * AT_REST
        cache.check()
    assert len(files) == 5
    assert cache.metrics.value("lmtier_evictions_total", tier="disk", cause="capacity") == 13


def test_the_work_to_begin_loads_is_linear_in_their_number(make, tmp_path, monkeypatch):
    url = disk(tmp_path / "kv", chunks=200, ttl="1h")
    cache = make(cpu(200), url)
    store(cache, keys(200))
    cache.close()
    cache = make(cpu(300), url)
    looked: list[int] = []
    look_among = cache.memory.expire_among

    def count(names: Sequence[bytes]) -> None:
        looked.append(len(names))
        look_among(names)

    monkeypatch.setattr(cache.memory, "expire_among", count)
    assert look(cache, keys(200)) == ["disk"] * 200
    assert sum(looked) <= 3 * 200


def test_a_smaller_capacity_after_a_restart_is_enforced(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv", chunks=8))
    store(cache, keys(8))
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv", chunks=3))
    cache.flush()
    assert len(list((tmp_path / "kv").rglob("*.L*"))) == 3
    assert look(cache, keys(8)) == ["disk"] * 3, "the head of the prefix is what was kept"


def test_the_order_of_leaving_survives_a_restart(make, tmp_path):
    """Heads are written first and stay the youngest of their chain; what was seen last leaves last."""
    cache = make(cpu(20), disk(tmp_path / "kv", chunks=8))
    for name in "abcd":
        store(cache, keys(2, name))
        cache.flush()
    cache.touch(keys(2, "a"))
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv", chunks=8))
    leaving = [entry.key for entry in cache.lower.owned[0].index.order()]
    assert leaving == [key for name in "bcda" for key in reversed(keys(2, name))]


def test_after_a_kill_a_tail_is_still_older_than_its_head(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    for length in range(1, 7):
        store(cache, keys(length))
        cache.flush()
    times = {file.name[:64]: file.stat().st_mtime_ns for file in (tmp_path / "kv").rglob("*.L*")}
    order = [times[key.hex()] for key in keys(6)]
    assert order == sorted(order, reverse=True)
    assert len(set(order)) == 6


def test_an_object_larger_than_a_tier_evicts_nothing(make, tmp_path):
    cache = make(cpu(20), f"disk://{tmp_path}/kv?capacity={AT_REST - 1}")
    store(cache, keys(1))
    assert not cache.flush(), "it is not there"
    assert cache.metrics.value("lmtier_dropped_tokens_total", tier="disk", reason="larger_than_tier") == C


def test_a_full_tier_drops_and_counts_what_does_not_fit(make):
    url = "full://?capacity=1GiB"
    cache = make(cpu(50), url, opened={url: FullTier(MemoryTier())})
    store(cache, keys(3))
    cache.flush(timeout=1)
    assert cache.metrics.value("lmtier_dropped_tokens_total", tier="full", reason="full") == 3 * C
    assert cache.stats()["full"] == {"chunks": 0, "used": 0, "capacity": 1 << 30}
    assert look(cache, keys(3)) == ["cpu"] * 3


def test_a_full_disk_can_still_be_read(make):
    url = "full://?capacity=1GiB"
    objects = kept(make, url, keys(3))
    cache = make(cpu(20), url, opened={url: FullTier(MemoryTier(objects))})
    for turn in range(8):
        store(cache, keys(1, f"turn{turn}"))
        assert not cache.flush(timeout=5), "it is not there, and will not be"
    assert not cache.lower[0].has_jobs
    assert look(cache, keys(3)[1:]) == ["full"] * 2, "one left, and it did not help"


def test_storage_smaller_than_its_capacity_is_used_fully(make):
    """What comes takes the place of what is there; when others let go, the tier grows again."""
    url, now, tier = "small://?capacity=1GiB", [0.0], RoomyTier(5)
    config = Config(tiers=[cpu(60), url], chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: tier}, clock=lambda: now[0]) as cache:
        (below,) = cache.lower
        for turn in range(4):
            store(cache, keys(4, f"turn{turn}"))
            assert cache.flush(), "all of it is there, and nothing is dropped"
            assert {name.key for name in tier.objects} >= set(keys(4, f"turn{turn}"))
        assert len(tier.objects) == 5
        assert not below.store_breaker.is_open
        tier.room = 9
        store(cache, keys(4, "too soon"))
        assert cache.flush()
        assert len(tier.objects) == 5, "nobody has looked whether there is more room"
        now[0] += FULL_PAUSE
        store(cache, keys(4, "later"))
        assert cache.flush()
        assert len(tier.objects) == 9
        assert look(cache, keys(4, "later")) == ["cpu"] * 4
        cache.check()


def test_storage_that_takes_nothing_is_asked_less_and_less(make):
    url, now, tier = "small://?capacity=1GiB", [0.0], RoomyTier(10)
    config = Config(tiers=[cpu(200), url], chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: tier}, clock=lambda: now[0]) as cache:
        store(cache, keys(10))
        assert cache.flush()
        tier.room = 0  # somebody else takes all that is given up
        left = []
        for second in range(120):
            now[0] += 1
            store(cache, keys(1, f"second{second}"))
            assert not cache.flush()
            left.append(len(tier.objects))
        assert left[0] == 9
        assert left[-1] == 5, "after 2, 6, 14, 30 and 62 seconds one more was given up, at most"
        tier.room = 10
        now[0] += 130
        store(cache, keys(3, "at last"))
        assert cache.flush()


def test_a_capacity_beyond_the_storage_is_cut_and_logged(make, caplog):
    url, tier = "small://?capacity=1GiB", RoomyTier(5)
    tier.storage_bytes = 5 * AT_REST
    cache = make(cpu(60), url, opened={url: tier})
    assert "capacity=1 GiB is more than the storage has" in caplog.text
    store(cache, keys(4))
    store(cache, keys(4, "b"))
    assert cache.flush()
    assert cache.stats()["small"]["capacity"] == 5 * AT_REST
    assert cache.metrics.value("lmtier_tier_failures_total", tier="small", op="store", reason="full") == 0


def test_a_failed_scan_repeats_before_anything_is_written(make):
    class Unreadable(MemoryTier):
        def scan(self):
            if failing:
                raise OSError(5, "Input/output error")
            return super().scan()

    objects: dict[Name, bytes] = {}
    url = "disk2://?capacity=1GiB"
    failing: list[bool] = []
    cache = make(cpu(20), url, opened={url: MemoryTier(objects)})
    store(cache, keys(3))
    cache.close()
    failing.append(True)
    before = dict(objects)
    cache = make(cpu(20), url, opened={url: Unreadable(objects)})
    assert not cache.is_warm
    store(cache, keys(3, "new"))
    cache.flush(timeout=0.2)
    assert objects == before, "it would be written beside what nobody knows of"
    failing.clear()
    until = time.monotonic() + 10
    while not cache.is_warm and time.monotonic() < until:
        cache.step()
        cache._wake.wait(0.02)
    assert cache.flush()
    assert cache.stats()["disk2"]["chunks"] == 6
    assert look(cache, keys(3)) == ["disk2"] * 3


def test_a_chunk_that_lost_a_shard_is_stored_again(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, keys(2), TWO)
    cache.close()
    (half,) = (tmp_path / "kv").rglob(f"{keys(2)[1].hex()}.{TWO.shards[0]}")
    half.unlink()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    assert look(cache, keys(2), TWO) == ["disk"]
    assert store(cache, keys(2), TWO) == 1
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    assert look(cache, keys(2), TWO) == ["disk"] * 2


def test_a_chunk_discarded_during_a_scan_does_not_return(make):
    url, gate, chain = "late://?capacity=1GiB", Gate(), keys(3)
    objects = kept(make, url, chain)
    gate.hold()
    config = Config(tiers=[cpu(20), url], chunk_tokens=C, prefault=False)
    cache = Cache(config, tiers={url: SlowTier(MemoryTier(objects), gate)}, wait_until_warm=False)
    (below,) = cache.lower.owned
    assert not cache.is_warm
    below.discard(chain[2], (ONE,))
    assert below.may_come_back(chain[2]), "a restart now would find it"
    gate.open()
    assert cache.flush()
    assert cache.is_warm
    assert not below.may_come_back(chain[2])
    assert look(cache, chain) == ["late"] * 2
    assert {name.key for name in objects} == set(chain[:2])
    cache.close()


class RoomyTier(MemoryTier):
    """Has room for so many objects, whatever its capacity says."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        if item.replaces is not None:
            self.delete([item.replaces])
        if len(self.objects) >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(replace(item, replaces=None), buffers)


class Late:
    """A cache over a tier that is still being scanned: until the gate is open."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.objects: dict[Name, bytes] = {}
        self.caches: list[Cache] = []

    def open(self, *chains: list[bytes], form=ONE, capacity: str = "1GiB") -> Cache:
        """The tier holds `chains` since another process."""
        url = f"late://?capacity={capacity}"
        config = Config(tiers=[cpu(60), url], chunk_tokens=C, prefault=False)
        with Cache(config, tiers={url: MemoryTier(self.objects)}) as before:
            for chain in chains:
                store(before, chain, form)
        self.gate.hold()
        slow = SlowTier(MemoryTier(self.objects), self.gate)
        self.caches.append(Cache(config, tiers={url: slow}, is_record=is_value, wait_until_warm=False))
        assert not self.caches[-1].is_warm
        return self.caches[-1]

    def keys(self) -> set[bytes]:
        return {name.key for name in self.objects}


@pytest.fixture
def late():
    late = Late()
    yield late
    late.gate.open()
    for cache in late.caches:
        cache.close(timeout=5)
        cache.check()


@pytest.mark.parametrize(("before", "now"), [(TWO, ONE), (ONE, TWO)])
def test_a_discard_during_a_scan_covers_all_found_forms(late, before, now):
    chain = keys(3)
    cache = late.open(chain, form=before)
    store(cache, chain, now)
    entry = cache.index.get(chain[2])
    assert entry is not None
    cache.discard(entry.key, entry.form)
    late.gate.open()
    assert cache.flush()
    assert late.keys() == set(chain[:2]), "the next start would serve it"
    cache.check()


@pytest.mark.parametrize("form", [ONE, TWO])
def test_a_restart_finds_what_replaced_a_scanned_value(late, form):
    chain = keys(2)
    cache = late.open(chain, form=form)
    store(cache, chain, ONE)
    cache.discard(chain[1], why=DELETED)
    reservation = cache.reserve(keys(1, "new"), ONE)
    cache.commit_value(reservation, chain[1], b"")
    late.gate.open()
    assert cache.flush()
    assert {name.shard for name in late.objects if name.key == chain[1]} == {ONE.shards[0]}
    assert not cache.may_come_back(chain[1])


def test_a_clear_during_a_scan_forgets_what_the_scan_finds(late):
    ours, theirs = [[namespace(name) + key[4:] for key in keys(2)] for name in ("m", "n")]
    cache = late.open(ours, theirs, form=TWO)
    cache.clear(Selector(namespace("m")))
    assert not cache.lower[0].is_clear_done
    assert store(cache, ours[:1]) == 1, "what comes afterwards stays"
    late.gate.open()
    assert cache.flush()
    assert cache.lower[0].is_clear_done
    assert late.keys() == {ours[0], *theirs}
    assert {name.shard for name in late.objects if name.key == ours[0]} == {ONE.shards[0]}
    assert look(cache, theirs, TWO) == ["late"] * 2


def test_a_suspect_is_deleted_once_the_scan_has_found_it(late):
    """Nobody may read it for months, and a later process knows nothing of the suspicion."""
    ours, theirs = [[namespace(name) + key[4:] for key in keys(2)] for name in ("m", "n")]
    cache = late.open(ours, theirs, form=TWO)
    cache.clear(Selector(namespace("m"), since=1))
    assert not cache.lower[0].is_clear_done
    late.gate.open()
    assert cache.flush()
    assert cache.lower[0].is_clear_done
    assert late.keys() == {*theirs}
    assert look(cache, theirs, TWO) == ["late"] * 2


def test_clearing_kv_keeps_values_that_wait_to_be_written(late):
    """Values were acknowledged, and a clear by headers does not concern them."""
    cache = late.open()
    assert store(cache, [value_key(b"a"), value_key(b"b")]) == 2
    leased = cache.index.leased_bytes
    assert leased
    cache.clear(Selector(by="bad"))
    assert cache.index.leased_bytes == leased
    late.gate.open()
    assert cache.flush()
    assert late.keys() == {value_key(b"a"), value_key(b"b")}


def test_a_clear_of_all_during_a_scan_leaves_nothing(late):
    cache = late.open(keys(5))
    cache.clear()
    late.gate.open()
    assert cache.flush()
    assert late.objects == {}


def test_a_stored_object_beyond_its_tier_costs_no_other(late):
    cache = late.open(keys(1), capacity=str(8 * AT_REST))
    huge = next(iter(late.objects))._replace(key=bytes(32))
    late.objects[huge] = bytes(9 * AT_REST)
    late.gate.open()
    assert cache.flush()
    assert late.keys() == set(keys(1))
    assert look(cache, keys(1)) == ["late"]


def test_a_failed_overwrite_is_deleted_in_one_job(make):
    """In two, the first to end would let a new one be stored beside the second, which deletes it."""
    tier = HandTier({}, keeps=True)
    url = "hand://?capacity=" + str(TWO.stored_bytes)
    cache = make(cpu(9), url, opened={url: tier})
    store(cache, keys(1, "old"), TWO)
    cache.step()
    tier.finish(0)
    store(cache, keys(1, "new"), TWO)
    cache.step()
    (job,) = tier.waiting
    assert all(item.replaces for item in job.items)
    names = {item.name for item in job.items} | {item.replaces for item in job.items if item.replaces}
    tier.waiting.clear()
    tier.done.append(Done(job.id, {}, dict.fromkeys(names, Reason.ERROR)))
    cache.step()
    assert [(job.op, len(job.items)) for job in tier.waiting] == [(Op.DELETE, 2)]
    assert cache.stats()["hand"]["used"] == TWO.stored_bytes, "it takes its room until then"
    tier.finish(0)
    cache.step()
    assert not tier.kept
    assert cache.stats()["hand"]["used"] == 0


def test_the_counts_agree_while_a_smaller_tier_deletes(make):
    objects = kept(make, "near://?capacity=1MiB", keys(6))
    tier, url = HandTier(objects, keeps=True), f"near://?capacity={2 * AT_REST}"
    cache = make(cpu(9), url, opened={url: tier})
    assert [job.op for job in tier.waiting] == [Op.DELETE] * 4
    cache.check()
    assert cache.stats()["near"] == {"chunks": 2, "used": 6 * AT_REST, "capacity": 2 * AT_REST}
    store(cache, keys(1, "new"))
    cache.step()
    assert all(job.op is Op.DELETE for job in tier.waiting), "no room is taken before there is some"
    while tier.waiting:
        tier.finish(0)
        cache.step()
        cache.check()
    assert len(objects) == 2


def test_indexed_headers_are_read_a_few_at_a_time():
    tier = HandTier({}, keeps=True)
    tiers = ("cpu://?capacity=1MiB", "far://?capacity=1MiB")
    with Cache(
        Config(tiers=tiers, chunk_tokens=4, prefault=False), tiers={"far://?capacity=1MiB": tier}
    ) as cache:
        store(cache, of(M, 20), by="good")
        store(cache, of(N, 20), by="bad")
        settle(cache, tier)
        cache.clear(Selector(by="bad", since=1))
        assert len(cache.index) == 20
        assert 0 < len(tier.waiting) <= 8
        tier.fault = Reason.DEADLINE
        finish(cache, tier)
        tier.fault = None
        while not cache.lower[0].is_clear_done:
            assert tier.waiting
            finish(cache, tier)
        settle(cache, tier)
        assert {name.key for name in tier.kept} == {*of(M, 20)}
        assert all(cache.lower[0].is_stored(key, ONE) for key in of(M, 20))
        assert not any(cache.lower[0].is_stored(key, ONE) for key in of(N, 20))
        cache.check()


class DamagedTier(HandTier):
    """The medium of one object gives errors."""

    damaged = b""

    def attempt(self, op: Op, item: Item, done: Done) -> None:
        if op is Op.STORE and item.name.key == self.damaged:
            self.damaged = b""  # it is written to another place
        if op in (Op.LOAD, Op.PEEK) and item.name.key == self.damaged:
            done.failed[item.name] = Reason.ERROR
        else:
            super().attempt(op, item, done)


def damaged(make, chain: list[bytes]) -> tuple[Cache, DamagedTier]:
    """A cache over a tier in which the second of these chunks cannot be read."""
    url = "near://?capacity=1MiB"
    tier = DamagedTier(kept(make, url, chain), keeps=True)
    tier.damaged = chain[1]
    return make(cpu(9), url, opened={url: tier}), tier


def test_a_chunk_that_cannot_be_read_is_stored_again(make):
    chain = of(M, 3)
    cache, tier = damaged(make, chain)
    for _ in range(2):
        match = cache.match(chain, ONE)
        cache.prefetch(match)
        settle(cache, tier)
        assert (match.is_ready, match.chunks) == (True, 1)
        cache.release(match)
    match = cache.match(chain, ONE)
    assert match.chunks == 1, "it is not asked for again"
    cache.release(match)
    store(cache, chain)
    settle(cache, tier)
    assert cache.lower[0].is_stored(chain[1], ONE)
    assert not tier.damaged
    cache.check()


@pytest.mark.parametrize("times", [1, 2], ids=["failed once", "given up"])
def test_an_unreadable_chunk_is_forgotten_when_it_leaves(make, times):
    chain = of(M, 3)
    cache, tier = damaged(make, chain)
    for _ in range(times):
        match = cache.match(chain, ONE)
        cache.prefetch(match)
        settle(cache, tier)
        cache.release(match)
    cache.check()
    (below,) = cache.lower.owned
    below.resize(AT_REST)
    settle(cache, tier)
    assert len(below.index) == 1
    cache.check()


@pytest.mark.parametrize("search", [False, True])
def test_a_storage_that_is_away_for_a_while_loses_nothing(make, search):
    chain, url = of(M, 12), "near://?capacity=1MiB"
    tier = HandTier(kept(make, url, chain), keeps=True)
    cache = make(cpu(20), url, opened={url: tier})
    if search:
        cache.clear(Selector(by="nobody"))
    tier.fault = Reason.ERROR
    until = time.monotonic() + 1.2  # two pauses of the breaker
    while time.monotonic() < until:
        match = cache.match(chain, ONE)
        cache.prefetch(match)
        cache.step()
        while tier.waiting:
            finish(cache, tier)
        cache.release(match)
        time.sleep(0.01)
    assert cache.lower[0].load_breaker.is_open
    tier.fault = None
    until += 30
    while (match := cache.match(chain, ONE)).chunks < 12 or not match.is_ready:
        assert time.monotonic() < until
        cache.prefetch(match)
        settle(cache, tier)
        cache.release(match)
        time.sleep(0.01)
    cache.release(match)
    assert {name.key for name in tier.kept} == {*chain}
    cache.check()


def test_a_search_for_suspects_ends_despite_unreadable_ones(make):
    chain = of(M, 3)
    cache, tier = damaged(make, chain)
    cache.clear(Selector(by="bad"))
    for _ in range(20):
        if tier.waiting:
            finish(cache, tier)
    assert not tier.waiting
    assert cache.lower[0].is_clear_done
    assert not cache.lower[0].load_breaker.is_open
    assert {name.key for name in tier.kept} == {chain[0], chain[2]}, "what cannot be read may be suspect"
    cache.check()


@pytest.mark.parametrize("keeps", [True, False], ids=["owned", "shared"])
def test_no_suspect_is_forgotten_before_its_search_ends(keeps):
    """However many come meanwhile: a script names twenty engines, one after the other."""
    tier = HandTier({}, keeps=keeps)
    tiers = ("cpu://?capacity=1MiB", "far://?capacity=1MiB" if keeps else "far://")
    with Cache(Config(tiers=tiers, chunk_tokens=4, prefault=False), tiers={tiers[1]: tier}) as cache:
        chains = [[namespace("m") + key[4:] for key in keys(2, f"of {number}")] for number in range(20)]
        for number, chain in enumerate(chains):
            store(cache, chain, by=f"engine {number}")
        settle(cache, tier)
        assert {name.key for name in tier.kept} == {key for chain in chains for key in chain}
        for number in range(20):
            cache.clear(Selector(by=f"engine {number}"))
        for chain in chains:
            match = cache.match(chain, ONE)
            while match.pending_lookups:
                finish(cache, tier, -1)
            cache.prefetch(match)
            while not match.is_ready:
                finish(cache, tier, -1)
            assert not match.run
            cache.release(match)
        settle(cache, tier)
        assert cache.lower[0].is_clear_done
        assert not tier.kept
        cache.check()


def test_a_search_for_suspects_takes_a_few_chunks_a_step(make, monkeypatch):
    """Others have to get their turns. From its beginning on none is loaded."""
    url, looked = "near://?capacity=1GiB", []
    objects: dict[Name, bytes] = {}
    cache = make(cpu(2600), url, opened={url: MemoryTier(objects)}, queue_length=3000)
    bad, good = keys(2500, "bad"), keys(10, "good")
    store(cache, bad, by="bad")
    store(cache, good, by="good")
    assert cache.flush()
    assert len(objects) == 2510

    def counted(look):
        def counting(*what):
            looked.append(what)
            return look(*what)

        return counting

    monkeypatch.setattr(Selector, "concerns", counted(Selector.concerns))
    monkeypatch.setattr(Selector, "covers", counted(Selector.covers))

    def looks(work) -> int:
        """How often `work` looks; at a chunk of the slab, and at a header, twice."""
        looked.clear()
        work()
        return len(looked)

    for entry in cache.index.entries()[:5]:  # the slab forgets, the tier does not
        cache.memory.discard(entry.key)
    steps = cache.clear_in_steps(Selector(by="bad"))
    assert looks(lambda: next(steps)) <= 2 * 1024
    match = cache.wait(cache.match(bad[:5], ONE))
    assert (match.chunks, match.cut_reason) == (0, "cleared")
    cache.release(match)
    turns = 0
    while looks(lambda: next(steps, "ended")):
        assert len(looked) <= 2 * 1024
        turns += 1
    assert turns == 3
    (below,) = cache.lower
    assert not below.is_clear_done
    while not below.is_clear_done:
        assert looks(cache.step) <= 2 * 1024
    assert cache.flush()
    assert {name.key for name in objects} == set(good)


@pytest.mark.parametrize("selector", [Selector(by="bad"), EVERYTHING], ids=["headers", "keys"])
def test_a_clear_goes_on_without_the_one_who_asked(make, selector):
    url = "near://?capacity=1GiB"
    objects: dict[Name, bytes] = {}
    cache = make(cpu(1100), url, opened={url: MemoryTier(objects)}, queue_length=1200)
    store(cache, keys(1090), by="bad")
    assert cache.flush()
    steps = cache.clear_in_steps(selector)
    next(steps)
    steps.close()
    assert cache.flush()
    assert not objects


def test_it_says_what_it_holds_and_what_has_not_gone_yet(make):
    url = f"near://?capacity={9 * AT_REST}"
    tier = HandTier({}, keeps=True)
    cache = make(cpu(9), url, opened={url: tier})
    store(cache, keys(3))
    settle(cache, tier)
    (owned,) = cache.lower.owned
    assert owned.occupancy()[:4] == (3, 3 * AT_REST, 9 * AT_REST, 0)
    owned.discard(keys(3)[2], ())
    assert owned.may_come_back(keys(3)[2])
    assert owned.occupancy()[:3] == (2, 3 * AT_REST, 9 * AT_REST)
    settle(cache, tier)
    assert not owned.may_come_back(keys(3)[2])
    assert owned.occupancy()[:3] == (2, 2 * AT_REST, 9 * AT_REST)


def test_a_clear_deletes_what_is_being_written(make):
    url, tier = f"near://?capacity={9 * AT_REST}", HandTier({}, keeps=True)
    cache = make(cpu(9), url, opened={url: tier})
    store(cache, keys(2))
    cache.step()
    assert {job.op for job in tier.waiting} == {Op.STORE}
    cache.clear()
    settle(cache, tier)
    assert not len(cache.index)
    assert not tier.kept
