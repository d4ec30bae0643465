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
from lmtier.format.objects import Suspect
from lmtier.observe.metrics import Metrics
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
    assert below.down.is_open
    assert cache.metrics.value("lmtier_breaker_open", tier="bad", direction="down") == 1
    assert cache.metrics.value("lmtier_breaker_open", tier="bad", direction="up") == 0
    assert look(cache, keys(20)) == ["cpu"] * 20, "the tier above is not disabled with it"
    tier._every = 1 << 60  # it is repaired
    until = time.monotonic() + 5
    while below.down.is_open and time.monotonic() < until:
        store(cache, keys(1, f"probe{time.monotonic()}"))
        cache.flush(timeout=0.1)
        cache._wake.wait(0.05)
    assert not below.down.is_open
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


def test_a_tier_that_deletes_nothing_is_written_to_all_the_same(make):
    """Its user may lack the permission. A deletion that is tried again must not take each probe."""
    cache, _ = deleting(make, Op.DELETE)
    below = cache.lower[0]
    until = time.monotonic() + 30
    while not below.down.is_open and time.monotonic() < until:
        cache.step()
        time.sleep(0.01)
    assert below.down.is_open
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
    while not (below.down.is_open and (left := len(below._undeleted))):
        assert time.monotonic() < until
        cache.step()
        time.sleep(0.01)
    tier._ops = (Op.STORE,)
    while len(below._undeleted) == left:
        assert time.monotonic() < until, "nothing is deleted"
        store(cache, keys(1, f"probe{time.monotonic()}"))
        cache.step()
        time.sleep(0.01)


def test_a_full_tier_with_an_object_that_cannot_be_deleted_is_written_to_all_the_same(make):
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
        if not below.has(last[0], ONE):
            store(cache, last := keys(1, f"new{time.monotonic()}"))
        cache.step()
        cache.check()
        is_there: bool = below.holds(last[0], ONE)
        return is_there

    until(is_written, 30.0)
    assert below.index.used == 9 * AT_REST
    tier._ops = ()
    until(lambda: cache.step() >= 0 and not below.undeletable, 30.0)
    assert below.deleting == 0


def test_locks_that_no_tier_takes_over_are_given_up():
    """A server that goes on without a disk of the one before must not keep others from it."""
    read, write = os.pipe()
    LowerTiers().open((), {}, print, cast(Any, None), {"disk:///left": write}, lambda place: False)
    assert os.read(read, 1) == b"", "the other end is closed"
    os.close(read)


def test_jobs_that_came_back_late_do_not_hide_older_ones_of_another_kind():
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


def test_a_tier_that_cannot_be_opened_fails_the_start_and_closes_the_others(make, tmp_path):
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
        cache.purge(Suspect(by="bad"))
        settle(cache, tier)
        assert not tier.kept
        time.sleep(0.002)
        store(cache, of(M, 2), by="bad")
        settle(cache, tier)
        for entry in list(cache.index.entries()):  # the slab forgets, the tier does not
            cache.room.take_out(entry)
        match = cache.match(of(M, 2), ONE)
        settle(cache, tier)
        cache.prefetch(match)
        settle(cache, tier)
        assert (match.chunks, match.cut) == (2, "")
        cache.release(match)
