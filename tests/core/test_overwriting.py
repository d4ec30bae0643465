"""Values that follow each other under one name: the newest is written, and no restart goes too far back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.handover import Handover, HandoverWriter
from lmtier.format.handover_file import unpack
from lmtier.format.keys import is_value
from lmtier.format.layout import PAGE, Name
from lmtier.format.objects import EVERYTHING, read_header
from lmtier.server.commands import PAUSE
from lmtier.server.values import ValueInfo, Values
from lmtier.tiers.base import Op, Reason
from tests.core.test_shared import finish, settle
from tests.model.hand import HandTier

NAME = b"name"
URL = "near://?capacity=1GiB"
SLAB = 64 * PAGE


class LoggingTier(HandTier):
    """It counts the jobs that it gets."""

    def __init__(self, kept: dict[Name, bytes] | None = None, **options: bool) -> None:
        self.ops: list[Op] = []
        super().__init__({} if kept is None else kept, keeps=True, **options)

    def submit(self, job: Any) -> None:
        self.ops.append(job.op)
        super().submit(job)

    def values(self) -> list[bytes]:
        """The values that a restart would find now."""
        found = []
        for data in self.kept.values():
            header, _ = read_header(memoryview(data))
            mark = ValueInfo.parse(header.mark)
            assert mark is not None
            found.append(bytes(data[PAGE : PAGE + mark.nbytes]))
        return found


Open = Callable[..., tuple[Cache, Values]]


@pytest.fixture
def opened() -> Iterator[Open]:
    caches: list[Cache] = []
    all_tiers: list[LoggingTier] = []

    def opened(tiers: dict[str, LoggingTier], **options: Any) -> tuple[Cache, Values]:
        config = Config(
            tiers=[f"cpu://?capacity={SLAB}", *tiers], chunk_tokens=4, prefault=False, load_deadline=30.0
        )
        options = {"wait_until_warm": False, **options}
        all_tiers.extend(tiers.values())
        caches.append(Cache(config, tiers=tiers, is_record=is_value, **options))
        return caches[-1], Values(caches[-1])

    yield opened
    for cache in caches:
        cache.check()
        for tier in all_tiers:
            settle(cache, tier)
        cache.close(timeout=5)
        cache.check()


def put(values: Values, data: bytes, name: bytes = NAME) -> bool:
    """Whether it is acknowledged at once."""
    draft = values.draft(len(data))
    assert draft is not None
    draft.view[:] = data
    return next(values.put(draft, name), "acknowledged") == "acknowledged"


def ended(call: Any) -> bool:
    """Whether a deletion has been acknowledged after this turn."""
    return all(answer is PAUSE for answer in call)


def read(cache: Cache, values: Values, tier: HandTier, name: bytes = NAME) -> bytes | None:
    call = values.get(name)
    while True:
        try:
            next(call)
        except StopIteration as stop:
            if stop.value is None:
                return None
            data = bytes(stop.value.view)
            values.release(stop.value)
            return data
        settle(cache, tier)


def leave_memory(cache: Cache) -> None:
    for entry in cache.index.entries():
        cache.memory.discard(entry.key)


def test_many_overwrites_in_one_write_are_one_more_write(opened):
    tier = LoggingTier()
    cache, values = opened({URL: tier})
    assert put(values, b"first")
    cache.step()
    assert tier.ops[1:] == [Op.STORE]
    acknowledged = 0
    for number in range(1000):
        acknowledged += put(values, b"%d" % number)
        assert cache.slab.used <= 2 * PAGE, "more is in memory than the newest and the one being written"
        assert read(cache, values, tier) == b"%d" % number if not number % 100 else True
        cache.step()
    assert acknowledged == 1000
    cache.check()
    settle(cache, tier)
    assert tier.ops[1:] == [Op.STORE] * 2
    assert tier.values() == [b"999"]
    leave_memory(cache)
    assert read(cache, values, tier) == b"999"


def test_a_restart_finds_one_of_the_values_at_every_moment(opened):
    tier = LoggingTier()
    cache, values = opened({URL: tier})
    put(values, b"0")
    settle(cache, tier)
    last = 0
    for number in range(1, 20):
        assert put(values, b"%d" % number)
        cache.step()
        (found,) = tier.values()
        assert last <= int(found) <= number
        last = int(found)
        if number % 3:
            finish(cache, tier)
    settle(cache, tier)
    assert tier.values() == [b"19"]
    assert Op.DELETE not in tier.ops


def test_a_delete_ends_when_no_restart_finds_the_old_value(opened):
    tier = LoggingTier()
    cache, values = opened({URL: tier})
    put(values, b"first")
    cache.step()  # it is being written
    deleting = values.delete(NAME)
    assert not ended(deleting)
    assert put(values, b"second")
    cache.step()
    assert tier.ops[1:] == [Op.STORE]
    finish(cache, tier)
    assert tier.values() == [b"first"]
    assert not ended(deleting)
    assert finish(cache, tier) is Op.DELETE
    assert tier.values() == []
    assert ended(deleting)
    settle(cache, tier)
    assert tier.values() == [b"second"]


def test_deleting_a_queued_value_deletes_the_older_too(opened):
    tier = LoggingTier()
    cache, values = opened({URL: tier})
    put(values, b"first")
    settle(cache, tier)
    put(values, b"second")
    deleting = values.delete(NAME)
    assert not ended(deleting)
    cache.step()
    assert finish(cache, tier) is Op.DELETE
    assert ended(deleting)
    assert tier.kept == {}
    assert read(cache, values, tier) is None


def test_a_value_read_below_is_overwritten_after_the_read(opened):
    tier = LoggingTier()
    cache, values = opened({URL: tier})
    put(values, b"first")
    settle(cache, tier)
    leave_memory(cache)
    reading = values.get(NAME)
    next(reading)
    assert tier.waiting[0].op is Op.LOAD
    assert put(values, b"second")
    cache.step()
    assert [job.op for job in tier.waiting] == [Op.LOAD]
    finish(cache, tier)
    assert [job.op for job in tier.waiting] == [Op.STORE]
    with pytest.raises(StopIteration) as end:
        next(reading)
    assert bytes(end.value.value.view) == b"second"
    values.release(end.value.value)
    settle(cache, tier)
    assert tier.values() == [b"second"]


def test_an_unwritable_new_value_deletes_the_older_one(opened):
    """Otherwise it would be found once the newer one has left memory."""
    tier = LoggingTier()
    cache, values = opened({URL: tier})
    put(values, b"first")
    settle(cache, tier)
    assert put(values, b"second")
    cache.step()
    tier.fault = Reason.ERROR
    finish(cache, tier)
    tier.fault = None
    settle(cache, tier)
    assert tier.kept == {}
    assert read(cache, values, tier) == b"second"
    leave_memory(cache)
    assert read(cache, values, tier) is None
    assert put(values, b"third")
    settle(cache, tier)
    assert tier.values() == [b"third"]


@pytest.mark.parametrize("data", [b"2" * 300, b"2" * 5000])
def test_a_tier_for_one_value_gets_the_newest_or_none(opened, data):
    """There is no room for both, so the old one is deleted first. One that never fits is dropped."""
    url = f"near://?capacity={2 * PAGE}"
    tier = LoggingTier()
    cache, values = opened({url: tier})
    put(values, b"first")
    settle(cache, tier)
    assert put(values, data)
    settle(cache, tier)
    assert tier.values() == ([data] if len(data) <= PAGE else [])
    assert read(cache, values, tier) == data


def test_writing_on_eviction_keeps_no_older_value(opened):
    url = f"{URL}&write=evicted"
    tier = LoggingTier()
    cache, values = opened({url: tier})
    put(values, b"first")
    cache.lower.owned[0].queue_write(cache.index.entries()[0])
    settle(cache, tier)
    assert tier.values() == [b"first"]
    assert put(values, b"second")
    settle(cache, tier)
    assert tier.kept == {}


def test_a_value_put_during_the_scan_overwrites_the_scanned(opened):
    before = LoggingTier()
    cache, values = opened({URL: before})
    put(values, b"first")
    settle(cache, before)
    tier = LoggingTier(before.kept, scans_at_once=False)
    cache, values = opened({URL: tier})
    assert put(values, b"second")
    assert finish(cache, tier) is Op.SCAN
    settle(cache, tier)
    assert tier.ops == [Op.SCAN, Op.STORE]
    assert tier.values() == [b"second"]


def test_of_two_differing_tiers_the_one_that_was_read_wins(opened):
    near, far = LoggingTier(), LoggingTier()
    urls = URL, "far://?capacity=1GiB"
    cache, values = opened(dict(zip(urls, (near, far), strict=True)))
    put(values, b"first")
    settle(cache, near)
    settle(cache, far)
    put(values, b"second")
    settle(cache, near)
    assert (near.values(), far.values()) == ([b"second"], [b"first"])
    near, far = LoggingTier(dict(near.kept)), LoggingTier(dict(far.kept))
    cache, values = opened(dict(zip(urls, (near, far), strict=True)))
    cache.step()
    assert read(cache, values, near) == b"second"
    settle(cache, far)
    assert far.values() == [b"second"]


def handed_over(cache: Cache, *, is_known: bool = True) -> Handover:
    """`is_known`: the handover file lists what the first tier below holds."""
    writer = HandoverWriter(cache)
    writer.write_cache([], [])
    assert cache.slab.fd is not None
    assert cache.presence is not None
    locks = {cache.config.cache_tiers[1].base_url: os.open(os.devnull, os.O_RDONLY)} if is_known else {}
    return Handover(unpack(writer.pack()), os.dup(cache.slab.fd), os.dup(cache.presence.own), locks)


def test_the_next_cache_writes_a_queued_value_over_the_old(opened):
    tier = LoggingTier()
    cache, values = opened({URL: tier}, shared=True)
    put(values, b"first")
    settle(cache, tier)
    put(values, b"second")
    after = LoggingTier(tier.kept)
    cache, values = opened({URL: after}, shared=True, handover=handed_over(cache))
    assert after.ops == []
    assert len(values) == 1
    cache.check()
    settle(cache, after)
    assert after.ops == [Op.STORE]
    assert after.values() == [b"second"]
    leave_memory(cache)
    assert read(cache, values, after) == b"second"


@pytest.mark.parametrize("is_known", [True, False])
def test_the_next_cache_finds_no_old_value_below_a_new_tier(opened, is_known):
    tier, fast = LoggingTier(), LoggingTier()
    url, new = "near://a?capacity=1GiB", "near://b?capacity=1GiB"
    cache, values = opened({url: tier}, shared=True)
    put(values, b"first")
    settle(cache, tier)
    put(values, b"second")
    handover, after = handed_over(cache, is_known=is_known), LoggingTier(tier.kept)
    cache, values = opened({new: fast, url: after}, shared=True, handover=handover)
    cache.check()
    cache.step()
    for each in (fast, after):
        settle(cache, each)
    assert after.values() == [b"second"]
    fast.kept.clear()
    leave_memory(cache)
    assert read(cache, values, after) in (None, b"second")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_value_lost_unwritten_leaves_no_older_one_behind(opened, is_known):
    """The next cache finds neither."""
    tier = LoggingTier()
    cache, values = opened({URL: tier}, shared=True)
    put(values, b"first")
    settle(cache, tier)
    put(values, b"second")
    for below in cache.lower:  # as a clear in progress does
        below.begin_clear(EVERYTHING)
    leave_memory(cache)
    after = LoggingTier(tier.kept)
    cache, values = opened({URL: after}, shared=True, handover=handed_over(cache, is_known=is_known))
    assert Op.DELETE not in after.ops, "the process before may still go on"
    cache.check()
    settle(cache, after)
    assert read(cache, values, after) is None
    assert after.values() == []
