"""What every lower tier does: when it writes, what it drops, and what happens when its storage fails."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any, cast

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.jobs import Jobs
from lmtier.core.lower_tiers import LowerTiers
from lmtier.errors import ConfigError, TierError
from lmtier.format.layout import Name
from lmtier.format.objects import Selector
from lmtier.observe.metrics import Metrics
from lmtier.server.report import Report
from lmtier.testing import FlakyTier, Gate, MemoryTier, SlowTier
from lmtier.tiers.base import Done, Item, Op, Reason
from tests.core.test_cache import (
    AT_REST,
    LAYOUT,
    ONE,
    C,
    cpu,
    disk,
    keys,
    look,
    store,
)
from tests.core.test_shared import FAR, M, of, settle
from tests.model.hand import HandTier
from tests.server.process import until


def test_write_policies_decide_what_goes_down(make, tmp_path):
    seen, left = disk(tmp_path / "seen", write="reused"), disk(tmp_path / "left", write="evicted")
    cache = make(cpu(4, policy="lru"), seen, left)
    store(cache, keys(2))
    cache.flush()
    assert [tier.label for tier in cache.lower] == ["disk", "disk-2"]
    assert cache.stats()["disk"]["chunks"] == 0
    look(cache, keys(2))
    cache.flush()
    assert cache.stats()["disk"]["chunks"] == 2, "seen a second time"
    for turn in range(3):
        store(cache, keys(2, f"turn{turn}"))
        cache.flush()
    assert cache.stats()["disk-2"]["chunks"] > 0, "next to leave, so written"
    assert look(cache, keys(2)) == ["disk"] * 2


def test_never_writes_nothing_and_still_reads(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, keys(2))
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv", write="never"))
    assert look(cache, keys(2)) == ["disk"] * 2
    store(cache, keys(2, "new"))
    cache.flush()
    assert cache.stats()["disk"]["chunks"] == 2


def test_a_failing_tier_is_left_alone_and_tried_again(make):
    url = "bad://?capacity=1GiB"
    tier = FlakyTier(MemoryTier(), every=1, reason=Reason.ERROR, ops=(Op.STORE,))
    cache = make(cpu(50), url, opened={url: tier})
    store(cache, keys(20))
    cache.flush(timeout=0.5)
    below = cache.lower[0]
    assert below.store_breaker.is_open
    assert cache.metrics.value("lmtier_breaker_open", tier="bad", direction="down") == 1
    assert cache.metrics.value("lmtier_breaker_open", tier="bad", direction="up") == 0
    assert look(cache, keys(20)) == ["cpu"] * 20, "the tier above is not disabled with it"
    tier._every = 1 << 60  # it is repaired
    until = time.monotonic() + 5
    while below.store_breaker.is_open and time.monotonic() < until:
        store(cache, keys(1, f"probe{time.monotonic()}"))
        cache.flush(timeout=0.1)
        cache._wake.wait(0.05)
    assert not below.store_breaker.is_open
    assert cache.metrics.value("lmtier_breaker_open", tier="bad", direction="down") == 0


def deleting(make, *fail: Op) -> tuple[Cache, FlakyTier]:
    """Six chunks are to be deleted, in a tier where these operations always fail."""
    url = "bad://"
    tier = FlakyTier(MemoryTier(), every=1, reason=Reason.ERROR, ops=())
    tier.keeps = False
    cache = make(cpu(50), url, opened={url: tier})
    store(cache, keys(6, "old"))
    assert cache.flush()
    tier._ops = fail
    for name in keys(6, "old"):
        cache.lower[0].discard(name, (ONE,))
    return cache, tier


def test_a_tier_that_deletes_nothing_still_takes_writes(make):
    """Its user may lack the permission. A deletion that is tried again must not take each probe."""
    cache, _ = deleting(make, Op.DELETE)
    below = cache.lower[0]
    until = time.monotonic() + 30
    while not below.store_breaker.is_open and time.monotonic() < until:
        cache.step()
        time.sleep(0.01)
    assert below.store_breaker.is_open
    written = cache.metrics.value("lmtier_stored_tokens_total", tier="bad")
    while cache.metrics.value("lmtier_stored_tokens_total", tier="bad") == written:
        assert time.monotonic() < until, "nothing is written"
        store(cache, keys(1, f"probe{time.monotonic()}"))
        cache.step()
        time.sleep(0.05)


def test_a_tier_that_takes_no_writes_deletes_all_the_same(make):
    """It is full for this user. Writes that come must not take each probe."""
    cache, tier = deleting(make, Op.STORE, Op.DELETE)
    below = cache.lower[0]
    until, left = time.monotonic() + 30, len(below._undeleted)
    while not (below.store_breaker.is_open and (left := len(below._undeleted))):
        assert time.monotonic() < until
        cache.step()
        time.sleep(0.01)
    tier._ops = (Op.STORE,)
    while len(below._undeleted) == left:
        assert time.monotonic() < until, "nothing is deleted"
        store(cache, keys(1, f"probe{time.monotonic()}"))
        cache.step()
        time.sleep(0.01)


def test_a_full_tier_writes_beside_an_undeletable_object(make):
    """Its directory may be another user's. The object keeps its room."""
    url = f"bad://?capacity={10 * AT_REST}"
    tier = FlakyTier(MemoryTier(), every=1, reason=Reason.ERROR, ops=())
    cache = make(cpu(50), url, opened={url: tier})
    store(cache, keys(10, "old"))
    assert cache.flush()
    tier._ops = (Op.DELETE,)
    below = cache.lower.owned[0]
    below.discard(keys(10, "old")[9], ())
    last = keys(1, "new")

    def is_written() -> bool:
        nonlocal last
        if not below.is_stored_or_queued(last[0], ONE):
            store(cache, last := keys(1, f"new{time.monotonic()}"))
        cache.step()
        cache.check()
        is_there: bool = below.is_stored(last[0], ONE)
        return is_there

    until(is_written, 30.0)
    assert below.index.used == 9 * AT_REST
    tier._ops = ()
    until(lambda: cache.step() >= 0 and not below.undeletable, 30.0)
    assert below.deleting_bytes == 0


def test_locks_that_no_tier_takes_over_are_given_up():
    """A server that goes on without a disk of the one before must not keep others from it."""
    read, write = os.pipe()
    LowerTiers().open((), {}, print, cast(Any, None), {"disk:///left": write}, lambda place: False)
    assert os.read(read, 1) == b"", "the other end is closed"
    os.close(read)


def test_late_results_of_one_kind_do_not_hide_older_jobs():
    """Reads are late sooner than writes."""
    tier = HandTier({}, keeps=False)
    jobs = Jobs("far", tier, Metrics(), 0.05, lambda op, done: False)
    for number in range(6):
        jobs.submit(Op.DELETE, (Item(Name(keys(6)[number], LAYOUT.whole)),), lambda done: None)
    jobs.submit(Op.LOOKUP, (Item(Name(keys(1, "b")[0], LAYOUT.whole)),), lambda done: None)
    until = time.monotonic() + 30
    while not jobs.down.is_open and time.monotonic() < until:
        time.sleep(0.05)
        jobs.blame_late_ones()
    assert jobs.down.is_open
    tier.close()
    assert jobs.poll() == 7


@pytest.fixture
def now(monkeypatch):
    """The time, which passes when a test says so."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def queued(now: list[float], tier: HandTier, op: Op, count: int) -> Jobs:
    """So many jobs at once, which a tier may begin within two seconds."""
    jobs = Jobs("near", tier, Metrics(), 2.0, lambda op, done: False)
    for breaker in (jobs.up, jobs.down):
        breaker._clock = lambda: now[0]
    ask(now, jobs, op, count)
    return jobs


def ask(now: list[float], jobs: Jobs, op: Op, count: int) -> None:
    for key in keys(count, op.value):
        deadline = now[0] + 2 if op is Op.LOAD else None
        jobs.submit(op, (Item(Name(key, LAYOUT.whole)),), lambda done: None, deadline)


def one_comes_back(jobs: Jobs, tier: HandTier, which: int = 0) -> None:
    tier.finish(which)
    jobs.poll()
    jobs.blame_late_ones()


@pytest.mark.parametrize(("op", "seconds"), [(Op.LOAD, 0.05), (Op.DELETE, 0.5)])
def test_a_job_that_waits_behind_moving_ones_is_no_fault(now, op, seconds):
    """A prompt has more chunks than a disk reads in time; a clear has more than it deletes."""
    tier = HandTier({}, keeps=True)
    jobs = queued(now, tier, op, 100)
    for _ in range(80):
        now[0] += seconds
        assert jobs.is_moving
        one_comes_back(jobs, tier)
    while tier.waiting:
        one_comes_back(jobs, tier)
    assert (jobs.up.outage, jobs.down.outage) == (None, None)


@pytest.mark.parametrize(("op", "patience"), [(Op.LOAD, 2.0), (Op.DELETE, 20.0)])
def test_a_tier_that_stops_within_a_queue_is_paused(now, op, patience):
    tier = HandTier({}, keeps=True)
    jobs = queued(now, tier, op, 100)
    now[0] += 1.5
    one_comes_back(jobs, tier)
    breaker = jobs.up if op is Op.LOAD else jobs.down
    now[0] += patience - 0.1
    jobs.blame_late_ones()
    assert not breaker.is_open
    now[0] += 0.2
    jobs.blame_late_ones()
    assert breaker.is_open
    assert not jobs.is_moving


def test_reads_that_come_back_do_not_hide_writes_that_hang(now):
    tier = HandTier({}, keeps=True)
    jobs = queued(now, tier, Op.DELETE, 6)
    for _ in range(21):
        now[0] += 1.0
        ask(now, jobs, Op.LOAD, 1)
        one_comes_back(jobs, tier, -1)
    assert (jobs.up.is_open, jobs.down.is_open) == (False, True)


def test_deletions_that_return_do_not_hide_hanging_stores(now):
    """With more threads than stores in flight there is always one for a deletion."""
    tier = HandTier({}, keeps=True)
    jobs = queued(now, tier, Op.STORE, 12)
    for _ in range(21):
        now[0] += 1.0
        ask(now, jobs, Op.DELETE, 1)
        one_comes_back(jobs, tier, -1)
    assert (jobs.down.outage is not None, jobs.is_moving) == (True, False)
    assert jobs._metrics.value("lmtier_tier_failures_total", tier="near", op="store", reason="overdue") == 12
    tier.waiting.clear()


def test_stores_behind_deletions_that_return_are_not_late(now):
    """A clear deletes more than a disk can in a while, and what is stored next has its turn afterwards."""
    tier = HandTier({}, keeps=True)
    jobs = queued(now, tier, Op.DELETE, 50)
    ask(now, jobs, Op.STORE, 6)
    for _ in range(50):
        now[0] += 0.5
        one_comes_back(jobs, tier)
    assert jobs.down.outage is None
    tier.waiting.clear()


def test_a_probe_that_only_waited_ends_too(now):
    """Otherwise no other would be sent, and the tier stay paused."""
    tier = HandTier({}, keeps=True)
    jobs = queued(now, tier, Op.LOAD, 5)
    tier.fault = Reason.ERROR
    while tier.waiting:
        one_comes_back(jobs, tier)
    now[0] += 0.25
    assert jobs.up.allows()
    ask(now, jobs, Op.LOAD, 1)
    tier.fault = None
    now[0] += 2.1
    tier.finish(0)
    jobs.poll()
    assert jobs.up.is_open
    now[0] += 0.5
    assert jobs.up.allows()


def test_a_prompt_past_its_deadline_pauses_no_healthy_disk(now):
    """Others would miss what it has, and engines would store it again."""
    tier, url, names = HandTier({}, keeps=True), "near://?capacity=1MiB", keys(20)
    config = Config(tiers=(cpu(30), url), chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: tier}, clock=lambda: now[0]) as cache:
        store(cache, names)
        settle(cache, tier)
        for entry in cache.index.entries():  # the slab forgets, the tier does not
            cache.memory.discard(entry.key)
        match = cache.match(names, ONE)
        cache.prefetch(match)
        while tier.waiting:
            now[0] += 0.19
            tier.finish(0)
            cache.step()
        assert (match.chunks, match.cut_reason) == (10, "deadline")
        cache.release(match)
        assert cache.lower[0].load_breaker.outage is None
        assert cache.lower[0].is_stored_or_storing(names[-1], ONE)


def test_what_only_waited_is_no_fault_in_the_report(now):
    """A verdict would say that objects failed in a disk that gave all that it was asked for in time."""
    tier, url, names = HandTier({}, keeps=True), "near://?capacity=1MiB", keys(5)
    config = Config(tiers=(cpu(30), url), chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: tier}, clock=lambda: now[0]) as cache:
        store(cache, names)
        settle(cache, tier)
        for entry in cache.index.entries():  # the slab forgets, the tier does not
            cache.memory.discard(entry.key)
        match = cache.match(names, ONE)
        cache.prefetch(match)
        tier.finish(0)
        now[0] += 2.1
        settle(cache, tier)
        assert (match.chunks, match.cut_reason) == (1, "deadline")
        cache.release(match)
        failures = partial(cache.metrics.value, "lmtier_tier_failures_total", tier="near", op="load")
        assert (failures(reason="waited"), failures(reason="deadline")) == (4, 0)
        counted = Report(cache, list, 0.0).snapshot()["counted"]
        assert (counted["failed"], counted["faults"]) == ({"near": 4}, {})


def test_an_undeletable_object_keeps_no_other_waiting(now):
    tier, names = HandTier({}, keeps=False), keys(6)
    with Cache(
        Config(tiers=(cpu(30), FAR), chunk_tokens=C, prefault=False),
        tiers={FAR: tier},
        clock=lambda: now[0],
    ) as cache:
        below = cache.lower[0]
        for breaker in (below.store_breaker, below.deleting_again):
            breaker._clock = lambda: now[0]
        store(cache, names)
        settle(cache, tier)
        for name in names:
            below.discard(name, (ONE,))
        tier.fault = Reason.ERROR
        while tier.waiting:
            tier.finish(0)
        cache.step()
        assert below.store_breaker.is_open
        for _ in range(9):
            now[0] += 4.1
            cache.step()
            while tier.waiting:
                is_stuck = tier.waiting[0].items[0].name.key == names[-1]
                tier.fault = Reason.ERROR if is_stuck else None
                tier.finish(0)
                cache.step()
        assert {name.key for name in tier.kept} == {names[-1]}
        tier.fault = None
        now[0] += 4.1
        settle(cache, tier)
        assert not tier.kept


def test_an_undeletable_object_pauses_no_writes(now):
    """Values that come too fast would be dropped instead of held back while writes are paused."""
    tier, url = HandTier({}, keeps=True), "near://?capacity=1GiB"
    config = Config(tiers=(cpu(30), url), chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: tier}, clock=lambda: now[0]) as cache:
        (below,) = cache.lower
        for breaker in (below.store_breaker, below.deleting_again):
            breaker._clock = lambda: now[0]
        names = keys(3)
        store(cache, names)
        settle(cache, tier)
        below.discard(names[2], ())
        tries = 0
        for _ in range(100):
            now[0] += 0.3
            cache.step()
            while tier.waiting:
                tries += tier.waiting[0].op is Op.DELETE
                tier.fault = Reason.ERROR if tier.waiting[0].op is Op.DELETE else None
                tier.finish(0)
            assert not below.store_breaker.is_open
            cache.step()
        assert 8 < tries < 30, "it is tried again, but not all the time"
        assert not below.is_busy, "waiting changes nothing"
        assert not cache.flush(timeout=0)
        for entry in cache.index.entries():
            cache.memory.discard(entry.key)
        store(cache, names)
        assert below.waiting == 1, "the name is still in use"
        assert not below.is_busy, "nor for what waits behind it"
        tier.fault = None
        now[0] += 4.1
        settle(cache, tier)
        assert cache.flush(timeout=0)
        assert {name.key for name in tier.kept} == set(names)


def test_a_deletion_that_works_again_lets_writes_go_on(now):
    """Else a quiet server would call its tier broken until the next write."""
    tier, url, names = HandTier({}, keeps=True), "near://?capacity=1GiB", keys(6)
    config = Config(tiers=(cpu(30), url), chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: tier}, clock=lambda: now[0]) as cache:
        (below,) = cache.lower
        for breaker in (below.store_breaker, below.deleting_again):
            breaker._clock = lambda: now[0]
        store(cache, names)
        settle(cache, tier)
        tier.fault = Reason.ERROR
        for name in reversed(names):
            below.discard(name, ())
        while tier.waiting:
            tier.finish(0)
        cache.step()
        assert below.store_breaker.is_open
        tier.fault = None
        for _ in range(9):
            now[0] += 4.1
            settle(cache, tier)
        assert not tier.kept
        assert not below.store_breaker.is_open


def test_a_tier_that_may_not_be_used_so_is_closed_again(make):
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="write=auto"):
        make(cpu(9), "redis://127.0.0.1:1?write=auto")
    assert set(threading.enumerate()) <= before


def test_a_full_queue_drops_and_counts(make, caplog):
    url = "slow://?capacity=1GiB"
    gate = Gate()
    cache = make(cpu(50), url, opened={url: SlowTier(MemoryTier(), gate)}, queue_length=4)
    gate.hold()
    store(cache, keys(20))
    dropped = partial(cache.metrics.value, tier="slow", reason="queue_full")
    assert dropped("lmtier_dropped_tokens_total") == 16 * C
    assert dropped("lmtier_dropped_objects_total") == 16
    assert dropped("lmtier_dropped_bytes_total") == 16 * AT_REST
    cache.step()
    assert "tier slow: some objects were dropped instead of written: 16 queue_full" in caplog.text
    cache.step()
    assert len(caplog.records) == 1, "once in a while"
    gate.open()
    assert not cache.flush()
    assert cache.flush(), "it is told once"
    assert cache.stats()["slow"]["chunks"] == 4


def test_a_tier_that_cannot_open_fails_the_start(make, tmp_path):
    """The tiers that are open close again."""
    make(cpu(2), disk(tmp_path / "taken"))
    with pytest.raises(TierError, match="taken"):
        make(cpu(2), disk(tmp_path / "free"), disk(tmp_path / "taken"))
    make(cpu(2), disk(tmp_path / "free"))


def test_a_tier_that_says_nothing_of_an_object_has_failed(make):
    class Mute(MemoryTier):
        def poll(self):
            return [Done(done.id, {}, {}) if done.ok else done for done in super().poll()]

    url = "mute://?capacity=1GiB"
    cache = make(cpu(20), url, opened={url: Mute()})
    store(cache, keys(2))
    cache.flush(timeout=0.3)
    assert cache.stats()["mute"]["chunks"] == 0
    assert cache.metrics.value("lmtier_stored_tokens_total", tier="mute") == 0


@pytest.mark.parametrize("keeps", [False, True])
def test_what_the_same_engine_stores_later_is_not_suspect(keeps):
    tier, url = HandTier({}, keeps=keeps), "far://?capacity=1MiB"
    config = Config(tiers=("cpu://?capacity=1MiB", url if keeps else FAR), chunk_tokens=4, prefault=False)
    with Cache(config, tiers={url if keeps else FAR: tier}) as cache:
        store(cache, of(M, 2), by="bad")
        settle(cache, tier)
        cache.clear(Selector(by="bad"))
        settle(cache, tier)
        assert not tier.kept
        time.sleep(0.002)
        store(cache, of(M, 2), by="bad")
        settle(cache, tier)
        for entry in list(cache.index.entries()):  # the slab forgets, the tier does not
            cache.memory.discard(entry.key)
        match = cache.match(of(M, 2), ONE)
        settle(cache, tier)
        cache.prefetch(match)
        settle(cache, tier)
        assert (match.chunks, match.cut_reason) == (2, "")
        cache.release(match)
