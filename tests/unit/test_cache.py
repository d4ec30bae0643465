"""What a cache owes its owner: prefixes, leases, room, tiers, and counters that are exact."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lmtier.below import FULL_PAUSE
from lmtier.cache import Cache, Match
from lmtier.config import Config
from lmtier.errors import LayoutError, MisuseError, TierError
from lmtier.index import State
from lmtier.keys import namespace, value_key
from lmtier.layout import PAGE, Form, Layout, Name, Shard, form_of, padded, stored_size
from lmtier.server.values import Values
from lmtier.testing import FlakyTier, FullTier, Gate, MemoryTier, SlowTier, opaque_layout
from lmtier.tier import Done, Item, Op, Reason, Tier
from tests.model.hand import HandTier

C = 4  # tokens a chunk
LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=64, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
)
ONE = form_of(LAYOUT, (LAYOUT.whole,))
TWO = form_of(LAYOUT, (Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)))
ROOM = padded(LAYOUT.nbytes(LAYOUT.whole))
AT_REST = stored_size(LAYOUT.nbytes(LAYOUT.whole))


def keys(count: int, name: str = "a") -> list[bytes]:
    return [hashlib.sha256(f"{name}{i}".encode()).digest() for i in range(count)]


def content(key: bytes, shard: Shard) -> bytes:
    size = LAYOUT.nbytes(shard)
    return (hashlib.sha256(key + str(shard).encode()).digest() * size)[:size]


def store(cache: Cache, names: list[bytes], form=ONE, by: str = "") -> int:
    """Save what is not stored yet; the number of chunks that were."""
    reservation = cache.reserve(names, form, by=by)
    for entry in reservation.entries.values():
        for offset, shard in zip(entry.offsets, form.shards, strict=True):
            data = content(entry.key, shard)
            cache.slab.view(offset, len(data))[:] = data
    for shard in sorted(reservation.left):
        cache.commit(reservation, shard)
    return len(reservation.entries)


def holds_right_bytes(cache: Cache, match: Match) -> bool:
    return all(
        bytes(cache.slab.view(offset, LAYOUT.nbytes(shard))) == content(entry.key, shard)
        for entry in match.run
        for offset, shard in zip(entry.offsets, entry.form.shards, strict=True)
    )


def look(cache: Cache, names: list[bytes], form=ONE) -> list[str]:
    """Where the matched chunks came from, after checking their bytes."""
    match = cache.wait(cache.match(names, form))
    assert holds_right_bytes(cache, match)
    sources = match.sources
    cache.release(match)
    cache.check()
    return sources


def cpu(chunks: int, **options: str) -> str:
    return f"cpu://?capacity={chunks * ROOM}" + "".join(f"&{k}={v}" for k, v in options.items())


def disk(path: Path, chunks: int = 100, **options: str) -> str:
    return f"disk://{path}?capacity={chunks * AT_REST}" + "".join(f"&{k}={v}" for k, v in options.items())


@pytest.fixture
def make(tmp_path):
    caches = []

    def make(*tiers: str, opened: dict[str, Tier] | None = None, **settings) -> Cache:
        config = Config(tiers=tiers, chunk_tokens=C, prefault=False, **settings)
        caches.append(Cache(config, tiers=opened))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close(timeout=5)
        cache.check()


def kept(make, url: str, *chains: list[bytes]) -> dict[Name, bytes]:
    """What a tier holds after another process stored these there."""
    objects: dict[Name, bytes] = {}
    cache = make(cpu(60), url, opened={url: MemoryTier(objects)})
    for chain in chains:
        store(cache, chain)
    cache.close()
    return objects


# ---- room in pieces

LARGE_ROOM = 256 * PAGE
SMALL, MIDDLE, LARGE = (
    replace(opaque_layout(size), chunk_tokens=C, block_tokens=C) for size in (PAGE, 150 * PAGE, LARGE_ROOM)
)
FORMS = {each: form_of(each, (each.whole,)) for each in (SMALL, MIDDLE, LARGE)}


def pieces(make, *tiers: str) -> tuple[Cache, list[bytes]]:
    """A slab full of small chunks that were used in no order, and their keys, the oldest first."""
    cache = make(f"cpu://?capacity={16 * 256 * PAGE}&policy=lru", *tiers)
    names = keys(16 * 256, "small")
    for name in names:
        fill(cache, name, FORMS[SMALL])
    random.Random(7).shuffle(names)
    for name in names:
        cache.release(cache.match([name], FORMS[SMALL]))
    return cache, names


def fill(cache: Cache, name: bytes, form: Form) -> int:
    reservation = cache.reserve([name], form)
    for entry in reservation.entries.values():
        cache.slab.view(entry.offsets[0], form.sizes[0])[:32] = name
        cache.slab.view(entry.offsets[0], form.sizes[0])[-32:] = name
    if reservation.entries:
        cache.commit(reservation)
    cache.step()
    return len(reservation.entries)


def is_right(cache: Cache, name: bytes, form: Form) -> bool:
    match = cache.match([name], form)
    right = [
        bytes(cache.slab.view(entry.offsets[0], form.sizes[0])[at]) == name
        for entry in match.run
        for at in (slice(0, 32), slice(-32, None))
    ]
    cache.release(match)
    return right == [True, True]


def test_large_chunks_find_room_among_small_ones_that_left_in_no_order(make):
    """As many small ones leave as the large ones take, the oldest; the rest is moved, bytes and all."""
    cache, names = pieces(make)
    large = keys(6, "large")
    assert [fill(cache, name, FORMS[LARGE]) for name in large] == [1] * 6
    assert all(is_right(cache, name, FORMS[LARGE]) for name in large)
    stayed = [name for name in names if is_right(cache, name, FORMS[SMALL])]
    assert stayed == names[6 * 256 :]
    assert cache.metrics.value("lmtier_moved_bytes_total") > 0
    cache.check()


def test_large_chunks_of_two_sizes_close_up(make):
    """Between those of one size no other fits, and none of them fits elsewhere as a whole."""
    cache, _ = pieces(make)
    for name in keys(40, "large"):
        assert fill(cache, name, FORMS[LARGE]) == 1
        assert is_right(cache, name, FORMS[LARGE])
    assert len(cache.index) == 16, "the slab is full of them"
    for name in keys(40, "middle"):
        assert fill(cache, name, FORMS[MIDDLE]) == 1
        assert is_right(cache, name, FORMS[MIDDLE])
    assert cache.index.used >= 12 * LARGE_ROOM
    cache.check()


def test_what_somebody_reads_is_not_moved_and_others_are_not_evicted_for_nothing(make):
    """Every 200th small chunk is leased, so that there is no place for a large one."""
    cache, _ = pieces(make)
    places = {entry.offsets[0] // PAGE: entry.key for entry in cache.index.entries()}
    held = [cache.match([places[page]], FORMS[SMALL]) for page in range(100, 16 * 256, 200)]
    before = [match.run[0].offsets for match in held]
    assert [fill(cache, name, FORMS[LARGE]) for name in keys(20, "large")] == [0] * 20
    assert [match.run[0].offsets for match in held] == before
    assert len(cache.index) >= 15 * 256, "room for one was made, and none for the other 19"
    for match in held:
        cache.release(match)
    assert fill(cache, keys(1, "large")[0], FORMS[LARGE]) == 1
    cache.check()


# ---- prefixes


def test_a_match_is_the_longest_prefix(make):
    cache = make(cpu(20))
    store(cache, keys(5))
    assert look(cache, keys(5)) == ["cpu"] * 5
    assert look(cache, keys(5) + keys(3, "unseen")) == ["cpu"] * 5
    assert look(cache, keys(2)) == ["cpu"] * 2
    assert look(cache, keys(1, "other") + keys(5)) == []


def test_a_longer_prompt_stores_only_what_is_new(make):
    cache = make(cpu(20))
    assert store(cache, keys(3)) == 3
    assert store(cache, keys(5)) == 2
    assert store(cache, keys(5)) == 0
    assert cache.metrics.value("lmtier_skipped_tokens_total") == (3 + 5) * C
    assert cache.metrics.value("lmtier_stored_tokens_total", tier="cpu") == 5 * C


def test_two_writers_of_one_prefix_keep_one_copy(make):
    cache = make(cpu(20))
    first = cache.reserve(keys(3), ONE)
    second = cache.reserve(keys(4), ONE)
    assert sorted(first.entries) == [0, 1, 2]
    assert sorted(second.entries) == [3]
    cache.commit(second)
    assert look(cache, keys(4)) == [], "its head is not there yet"
    cache.commit(first)
    match = cache.match(keys(4), ONE)
    assert match.chunks == 4
    cache.release(match)
    assert cache.index.used == 4 * ROOM


def test_nothing_is_visible_before_the_last_shard_is_committed(make):
    cache = make(cpu(20))
    reservation = cache.reserve(keys(2), TWO)
    cache.commit(reservation, TWO.shards[0])
    assert look(cache, keys(2), TWO) == []
    cache.commit(reservation, TWO.shards[1])
    match = cache.match(keys(2), TWO)
    assert match.chunks == 2
    cache.release(match)


def test_an_abort_leaves_nothing_visible_and_gives_room_back_when_the_last_rank_is_done(make):
    cache = make(cpu(20))
    reservation = cache.reserve(keys(3), TWO)
    cache.abort(reservation, TWO.shards[0])
    assert look(cache, keys(3), TWO) == []
    assert cache.slab.used > 0, "the other rank may still be writing there"
    cache.commit(reservation, TWO.shards[1])
    assert cache.slab.used == 0
    assert store(cache, keys(3), TWO) == 3
    cache.check()


def test_committing_twice_is_refused(make):
    cache = make(cpu(20))
    reservation = cache.reserve(keys(1), ONE)
    cache.commit(reservation)
    with pytest.raises(MisuseError, match="before"):
        cache.commit(reservation)


def test_an_empty_range_does_nothing(make):
    cache = make(cpu(1))
    store(cache, keys(1))
    for _ in range(3):
        cache.commit(cache.reserve([], ONE))
        assert look(cache, []) == []
    assert look(cache, keys(1)) == ["cpu"]


# ---- room


def test_when_memory_is_short_a_prefix_is_stored_and_never_a_hole(make):
    cache = make(cpu(3))
    assert store(cache, keys(10)) == 3
    assert look(cache, keys(10)) == ["cpu"] * 3
    assert cache.metrics.value("lmtier_dropped_tokens_total", tier="cpu", reason="no_room") == 7 * C
    assert store(cache, keys(10)) == 0, "its own prefix does not leave to make room for its tail"
    assert look(cache, keys(10)) == ["cpu"] * 3


def test_room_is_made_at_once_and_the_tail_leaves_first(make):
    cache = make(cpu(4))
    store(cache, keys(4, "old"))
    assert store(cache, keys(2, "new")) == 2
    assert look(cache, keys(4, "old")) == ["cpu"] * 2
    assert look(cache, keys(2, "new")) == ["cpu"] * 2
    assert cache.metrics.value("lmtier_evictions_total", tier="cpu", cause="capacity") == 2


def test_what_is_leased_is_not_evicted(make):
    cache = make(cpu(3))
    store(cache, keys(3))
    match = cache.match(keys(3), ONE)
    assert store(cache, keys(3, "new")) == 0
    assert holds_right_bytes(cache, match)
    cache.release(match)
    assert store(cache, keys(3, "new")) == 3


def test_a_lease_of_two_readers_needs_two_releases(make):
    cache = make(cpu(2))
    store(cache, keys(2))
    one, other = cache.match(keys(2), ONE), cache.match(keys(2), ONE)
    cache.release(one)
    cache.release(one)
    assert store(cache, keys(2, "new")) == 0
    cache.release(other)
    assert store(cache, keys(2, "new")) == 2


def test_an_object_larger_than_the_slab_is_dropped_without_evicting(make):
    cache = make(cpu(2))
    store(cache, keys(2))
    huge = Layout.uniform(
        layers=64, heads=2, head_dim=64, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
    )
    assert cache.reserve(keys(1, "huge"), form_of(huge, (huge.whole,))).dropped == 1
    assert look(cache, keys(2)) == ["cpu"] * 2


def test_layouts_of_different_size_share_one_slab(make):
    cache = make(cpu(8))
    small = Layout.uniform(
        layers=1, heads=2, head_dim=64, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
    )
    form = form_of(small, (small.whole,))
    for turn in range(20):
        cache.commit(cache.reserve(keys(3, f"small{turn}"), form))
        assert store(cache, keys(5, f"large{turn}")) == 5
        cache.check()


def test_clear_skips_what_is_leased_and_force_does_not(make):
    cache = make(cpu(4))
    store(cache, keys(2))
    store(cache, keys(2, "b"))
    match = cache.match(keys(2), ONE)
    cache.clear()
    assert look(cache, keys(2, "b")) == []
    assert look(cache, keys(2)) == ["cpu"] * 2
    cache.clear(force=True)
    assert look(cache, keys(2)) == []
    assert holds_right_bytes(cache, match), "who holds a lease can still read"
    cache.release(match)
    assert cache.slab.used == 0


# ---- tiers below


def test_a_restart_finds_a_warm_disk_before_anything_is_computed(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, keys(5))
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    assert store(cache, keys(5)) == 0, "known before anything was loaded"
    assert look(cache, keys(5)) == ["disk"] * 5
    assert look(cache, keys(5)) == ["cpu"] * 5


def test_a_prefix_may_come_from_several_tiers(make, tmp_path):
    cache = make(cpu(4), disk(tmp_path / "kv"))
    store(cache, keys(4))
    assert cache.flush()
    store(cache, keys(2, "new"))
    assert cache.flush()
    assert look(cache, keys(4)) == ["cpu", "cpu", "disk", "disk"]


def test_a_chunk_that_vanished_cuts_the_match_there(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, keys(5))
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    (victim,) = (tmp_path / "kv").rglob(f"{keys(5)[2].hex()}.*")
    victim.unlink()
    assert look(cache, keys(5)) == ["disk"] * 2
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="absent") == 3 * C
    cache.flush()
    assert cache.index.pinned == 0


def test_a_corrupt_file_is_a_miss_counted_and_deleted(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, keys(3))
    cache.close()
    (victim,) = (tmp_path / "kv").rglob(f"{keys(3)[1].hex()}.*")
    data = bytearray(victim.read_bytes())
    data[5000] ^= 1
    victim.write_bytes(data)
    cache = make(cpu(20), disk(tmp_path / "kv"))
    assert look(cache, keys(3)) == ["disk"]
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="corrupt") == 2 * C
    assert cache.metrics.value("lmtier_tier_failures_total", tier="disk", op="load", reason="corrupt") == 1
    assert not victim.exists()
    assert store(cache, keys(3)) == 1, "the recomputed chunk is stored again"
    assert cache.flush()
    assert victim.exists()


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
    cache.seen(keys(2, "a"))
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv", chunks=8))
    leaving = [entry.key for entry in cache.below[0].index.order()]
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


def test_an_object_larger_than_a_tier_is_refused_without_evicting(make, tmp_path):
    cache = make(cpu(20), f"disk://{tmp_path}/kv?capacity={AT_REST - 1}")
    store(cache, keys(1))
    assert not cache.flush(), "it is not there"
    assert cache.metrics.value("lmtier_dropped_tokens_total", tier="disk", reason="larger_than_tier") == C


def test_write_policies_decide_what_goes_down(make, tmp_path):
    seen, left = disk(tmp_path / "seen", write="reused"), disk(tmp_path / "left", write="evicted")
    cache = make(cpu(4, policy="lru"), seen, left)
    store(cache, keys(2))
    cache.flush()
    assert [tier.label for tier in cache.below] == ["disk", "disk-2"]
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


def test_one_load_serves_every_request_that_waits_for_it(make):
    url = "slow://?capacity=1GiB"
    objects = kept(make, url, keys(3))
    loads = []

    class Counting(MemoryTier):
        def read(self, item, buffers):
            loads.append(item.name)
            return super().read(item, buffers)

    gate = Gate()
    tier = SlowTier(Counting(objects), gate)
    cache = make(cpu(20), url, opened={url: tier})
    gate.hold()
    matches = [cache.match(keys(3), ONE) for _ in range(4)]
    for match in matches:
        cache.prefetch(match)
        assert not match.ready
    gate.open()
    for match in matches:
        cache.wait(match)
        assert match.ready
        assert match.chunks == 3
        assert holds_right_bytes(cache, match)
        cache.release(match)
    assert len(loads) == 3


def test_a_request_waits_no_longer_than_its_deadline(make):
    url = "slow://?capacity=1GiB"
    objects = kept(make, url, keys(3))
    gate = Gate()
    cache = make(cpu(20), url, opened={url: SlowTier(MemoryTier(objects), gate)})
    gate.hold()
    began = time.monotonic()
    match = cache.wait(cache.match(keys(3), ONE, deadline=0.1))
    assert time.monotonic() - began < 1.0
    assert match.chunks == 0
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="deadline") == 3 * C
    cache.release(match)
    cache.check()
    gate.open()
    cache.flush()
    assert look(cache, keys(3)) == ["cpu"] * 3, "what arrives late is still of use to the next one"


def test_a_cancelled_request_gives_everything_back_at_every_stage(make):
    url = "slow://?capacity=1GiB"
    objects = kept(make, url, keys(3))
    gate = Gate()
    cache = make(cpu(20), url, opened={url: SlowTier(MemoryTier(objects), gate)})
    gate.hold()
    found = cache.match(keys(3), ONE)
    cache.release(found)
    loading = cache.match(keys(3), ONE)
    cache.prefetch(loading)
    cache.release(loading)
    gate.open()
    cache.flush()
    ready = cache.wait(cache.match(keys(3), ONE))
    cache.release(ready)
    saving = cache.reserve(keys(2, "b"), ONE)
    cache.abort(saving)
    cache.check()
    assert cache.index.pinned == 0
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="cancelled") == 6 * C


def test_a_suppressed_load_still_counts_as_stored(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, keys(3))
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    match = cache.match(keys(3), ONE)
    cache.prefetch(match, 0)
    assert (match.ready, match.chunks) == (True, 0)
    cache.release(match)
    assert cache.reserve(keys(3), ONE).known == 3
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="not_worth_it") == 3 * C


# ---- failing tiers


def test_a_failing_tier_is_left_alone_and_tried_again(make):
    url = "bad://?capacity=1GiB"
    tier = FlakyTier(MemoryTier(), every=1, reason=Reason.ERROR, ops=(Op.STORE,))
    cache = make(cpu(50), url, opened={url: tier})
    store(cache, keys(20))
    cache.flush(timeout=0.5)
    below = cache.below[0]
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


def test_a_full_tier_drops_what_it_cannot_take_and_counts_it(make):
    url = "full://?capacity=1GiB"
    cache = make(cpu(50), url, opened={url: FullTier(MemoryTier())})
    store(cache, keys(3))
    cache.flush(timeout=1)
    assert cache.metrics.value("lmtier_dropped_tokens_total", tier="full", reason="full") == 3 * C
    assert cache.stats()["full"] == {"chunks": 0, "used": 0, "capacity": 1 << 30}
    assert look(cache, keys(3)) == ["cpu"] * 3


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
    assert "slow was not given all that it should have: 16 queue_full" in caplog.text
    cache.step()
    assert len(caplog.records) == 1, "once in a while"
    gate.open()
    assert not cache.flush()
    assert cache.flush(), "it is told once"
    assert cache.stats()["slow"]["chunks"] == 4


def test_metrics_answer_while_every_worker_is_blocked(make):
    blocked, go_on = threading.Event(), threading.Event()

    class Stuck(MemoryTier):
        def write(self, item, buffers):
            blocked.set()
            assert go_on.wait(10)
            super().write(item, buffers)

    url = "stuck://?capacity=1GiB"
    cache = make(cpu(50), url, opened={url: Stuck()})
    store(cache, keys(20))
    cache.step()
    assert blocked.wait(10)
    assert b'lmtier_queue_depth{op="store",tier="stuck"} 20.0' in cache.metrics.exposition()
    assert look(cache, keys(20)) == ["cpu"] * 20
    go_on.set()
    assert cache.flush()


def test_a_tier_that_cannot_be_opened_fails_the_start_and_closes_the_others(make, tmp_path):
    make(cpu(2), disk(tmp_path / "taken"))
    with pytest.raises(TierError, match="taken"):
        make(cpu(2), disk(tmp_path / "free"), disk(tmp_path / "taken"))
    make(cpu(2), disk(tmp_path / "free"))


def test_a_gpu_tier_is_its_movers_and_nothing_to_a_cache(make):
    cache = make("gpu://?capacity=4KiB", cpu(2))
    assert cache.slab.capacity == cache.index.capacity
    assert not cache.below


def test_a_tier_that_hangs_does_not_take_the_cpu_tier_with_it(make):
    """Its loads never come back: it is blamed, left alone, and cannot hold all of the slab."""
    url = "hung://?capacity=1GiB"
    objects = kept(make, url, *(keys(5, f"old{name}") for name in range(10)))
    gate = Gate()
    cache = make(cpu(16), url, opened={url: SlowTier(MemoryTier(objects), gate)}, load_deadline=0.05)
    gate.hold()
    for name in range(10):
        match = cache.wait(cache.match(keys(5, f"old{name}"), ONE))
        assert match.chunks == 0
        cache.release(match)
        assert store(cache, keys(2, f"new{name}")) == 2
    assert cache.below[0].up.is_open
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="tier_down") > 0
    gate.open()
    cache.flush()
    cache.check()


def test_a_full_disk_can_still_be_read(make):
    url = "full://?capacity=1GiB"
    objects = kept(make, url, keys(3))
    cache = make(cpu(20), url, opened={url: FullTier(MemoryTier(objects))})
    for turn in range(8):
        store(cache, keys(1, f"turn{turn}"))
        assert not cache.flush(timeout=5), "it is not there, and will not be"
    assert not cache.below[0].has_jobs
    assert look(cache, keys(3)[1:]) == ["full"] * 2, "one left, and it did not help"


def test_storage_with_less_room_than_its_capacity_is_used_as_far_as_it_goes(make):
    """What comes takes the place of what is there; when others let go, the tier grows again."""
    url, now, tier = "small://?capacity=1GiB", [0.0], RoomyTier(5)
    config = Config(tiers=[cpu(60), url], chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: tier}, clock=lambda: now[0]) as cache:
        (below,) = cache.below
        for turn in range(4):
            store(cache, keys(4, f"turn{turn}"))
            assert cache.flush(), "all of it is there, and nothing is dropped"
            assert {name.key for name in tier.objects} >= set(keys(4, f"turn{turn}"))
        assert len(tier.objects) == 5
        assert not below.down.is_open
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


def test_storage_that_takes_nothing_though_others_left_is_asked_less_and_less(make):
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


def test_a_capacity_beyond_the_storage_is_said_and_not_believed(make, caplog):
    url, tier = "small://?capacity=1GiB", RoomyTier(5)
    tier.most = 5 * AT_REST
    cache = make(cpu(60), url, opened={url: tier})
    assert "capacity=1073741824 is more than the storage has" in caplog.text
    store(cache, keys(4))
    store(cache, keys(4, "b"))
    assert cache.flush()
    assert cache.stats()["small"]["capacity"] == 5 * AT_REST
    assert cache.metrics.value("lmtier_tier_failures_total", tier="small", op="store", reason="full") == 0


def test_a_scan_that_fails_is_tried_again_and_nothing_is_written_before(make):
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


class Hung(MemoryTier):
    """Storage in which calls really hang: reads, or writes."""

    def __init__(self, objects: dict[Name, bytes] | None = None, *calls: str) -> None:
        self.calls = calls
        self.hangs, self.goes_on = threading.Event(), threading.Event()
        super().__init__(objects)

    def read(self, item, buffers):
        self._hang("read")
        return super().read(item, buffers)

    def write(self, item, buffers):
        self._hang("write")
        super().write(item, buffers)

    def _hang(self, call: str) -> None:
        if call in self.calls:
            self.hangs.set()
            self.goes_on.wait(30)


def test_closing_ends_in_its_time_whatever_hangs(make):
    """Flushes, the order of use, and each tier's threads: all of it is one time, not one for each."""
    first, second = "hung://1?capacity=1GiB", "hung://2?capacity=1GiB"
    tiers = {url: Hung(None, "write") for url in (first, second)}
    cache = make(cpu(20), first, second, opened=tiers)
    store(cache, keys(3))
    cache.step()
    assert all(tier.hangs.wait(10) for tier in tiers.values())
    began = time.monotonic()
    cache.close(timeout=1.0)
    took = time.monotonic() - began
    for tier in tiers.values():
        tier.goes_on.set()
    assert took < 3


def test_loads_and_stores_that_hang_together_leave_room_for_others(make):
    url = "hung://?capacity=1GiB"
    objects = kept(make, url, keys(40, "below"))
    tier = Hung(objects, "read", "write")
    cache = make(cpu(32), url, opened={url: tier}, load_deadline=0.05)
    store(cache, keys(12, "down"))
    cache.step()
    for first in range(0, 40, 4):
        cache.prefetch(cache.match(keys(40, "below")[first : first + 4], ONE))
    store(cache, keys(20, "more"))
    for _ in range(5):
        cache.step()
    assert tier.hangs.wait(10)
    assert store(cache, keys(2, "new")) == 2
    assert look(cache, keys(2, "new")) == ["cpu"] * 2
    tier.goes_on.set()


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


def test_room_is_made_only_for_what_will_be_stored(make, tmp_path):
    cache = make(cpu(8), disk(tmp_path / "kv"))
    store(cache, keys(7, "cold"))
    cache.flush()
    store(cache, keys(8, "hot"))
    cache.flush()
    assert store(cache, keys(8, "cold")) == 1, "seven are on disk"
    assert cache.stats()["cpu"]["chunks"] == 8


def test_what_was_discarded_is_gone_from_every_tier(make):
    class Asked(MemoryTier):
        keeps = False

    objects: dict[Name, bytes] = {}
    cache = make(cpu(20), "far://", opened={"far://": Asked(objects)})
    store(cache, keys(2))
    cache.flush()
    entry = cache.index.get(keys(2)[1])
    assert entry is not None
    cache.discard(entry)
    cache.flush()
    assert look(cache, keys(2)) == ["cpu"]
    assert len(objects) == 1


def test_force_also_clears_what_is_being_read(make):
    url = "slow://?capacity=1GiB"
    objects = kept(make, url, keys(2))
    gate = Gate()
    cache = make(cpu(20), url, opened={url: SlowTier(MemoryTier(objects), gate)})
    gate.hold()
    match = cache.match(keys(2), ONE)
    cache.prefetch(match)
    cache.clear(force=True)
    gate.open()
    cache.flush()
    assert match.chunks == 0
    cache.release(match)
    assert look(cache, keys(2)) == []
    assert not objects


def test_a_request_may_grow_while_its_match_is_open(make):
    cache = make(cpu(20))
    store(cache, keys(3))
    growing = keys(3)
    match = cache.match(growing, ONE)
    growing += keys(5, "later")
    cache.release(match)
    assert cache.metrics.value("lmtier_asked_tokens_total") == 3 * C
    with pytest.raises(MisuseError, match="less than"):
        cache.match(keys(3), ONE, tokens=5)
    assert cache.index.pinned == 0


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


def test_a_second_request_does_not_inherit_the_deadline_of_the_first(make):
    url = "slow://?capacity=1GiB"
    objects = kept(make, url, keys(3))
    gate = Gate()
    cache = make(cpu(20), url, opened={url: SlowTier(MemoryTier(objects), gate)})
    gate.hold()
    hasty, patient = cache.match(keys(3), ONE, deadline=0), cache.match(keys(3), ONE, deadline=30)
    cache.prefetch(hasty)
    cache.prefetch(patient)
    cache.step()
    assert (hasty.ready, hasty.chunks) == (True, 0)
    gate.open()
    assert cache.wait(patient).chunks == 3
    for match in (hasty, patient):
        cache.release(match)


def test_a_closed_cache_refuses_work(make):
    cache = make(cpu(2))
    cache.close()
    for call in (cache.match, cache.reserve):
        with pytest.raises(MisuseError, match="closed"):
            call(keys(1), ONE)


def test_a_form_with_overlapping_shards_is_refused():
    with pytest.raises(LayoutError, match="overlaps"):
        form_of(LAYOUT, (LAYOUT.whole, TWO.shards[0]))


def test_a_forked_child_cannot_write_into_its_parents_extents(make):
    cache = make(cpu(4))
    store(cache, keys(1))
    child = os.fork()
    if child == 0:
        cache.slab.view(0, cache.slab.capacity)[:] = b"x" * cache.slab.capacity
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert look(cache, keys(1)) == ["cpu"]


# ---- sharing between engines that cut differently


@pytest.mark.parametrize(("saved", "wanted"), [(ONE, TWO), (TWO, ONE)])
def test_what_one_parallel_size_saved_another_finds(make, tmp_path, saved, wanted):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, keys(3), saved)
    assert look(cache, keys(3), wanted) == ["cpu"] * 3
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    assert look(cache, keys(3), wanted) == ["disk"] * 3


def test_half_of_a_chunk_is_a_miss(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, keys(2), TWO)
    cache.close()
    (half,) = (tmp_path / "kv").rglob(f"{keys(2)[0].hex()}.{TWO.shards[0]}")
    half.unlink()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    assert look(cache, keys(2), TWO) == []


# ---- counters


def test_counters_are_exact_over_many_events_and_still_while_idle(make):
    cache = make(cpu(200))
    store(cache, keys(100))
    asked = hit = 0
    names = keys(100)
    for turn in range(10_000):
        length = turn * 37 % 100 + 1
        cache.release(cache.match(names[:length], ONE, tokens=length * C + 3))
        asked += length * C + 3
        hit += length * C
    value = cache.metrics.value
    assert value("lmtier_asked_tokens_total") == asked
    assert value("lmtier_hit_tokens_total", tier="cpu") == hit
    assert value("lmtier_missed_tokens_total", reason="partial_chunk") == asked - hit
    assert value("lmtier_recent_hit_ratio") == pytest.approx(hit / asked, abs=0.02)
    before = {name: value(f"lmtier_{name}_total") for name in ("asked_tokens", "skipped_tokens", "lookups")}
    for _ in range(100):
        cache.step()
    assert before == {name: value(f"lmtier_{name}_total") for name in before}


def test_evicted_and_never_stored_are_different_misses(make):
    cache = make(cpu(2))
    store(cache, keys(2))
    store(cache, keys(2, "b"))
    assert look(cache, keys(2) + keys(1, "c")) == []
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="evicted") == 2 * C
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="never_stored") == C


def test_an_entry_shows_its_state_in_its_repr(make):
    cache = make(cpu(4))
    reservation = cache.reserve(keys(1), ONE)
    (entry,) = reservation.entries.values()
    assert repr(entry).endswith("FILLING leases=1 kids=0>")
    cache.commit(reservation)
    assert entry.state is State.READY
    assert repr(cache.match(keys(1), ONE)) == "<Match 1 of 1 chunks, 1 in the slab, ready>"


# ---- namespaces, and what a server adds


def named(model: str, count: int) -> list[bytes]:
    return [namespace(model) + key[4:] for key in keys(count, model)]


def test_one_model_can_be_cleared_and_the_others_stay(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, named("llama", 3))
    store(cache, named("qwen", 3))
    cache.flush()
    cache.clear(namespace("llama"))
    assert look(cache, named("llama", 3)) == []
    assert look(cache, named("qwen", 3)) == ["cpu"] * 3
    assert cache.flush()
    assert cache.stats()["disk"]["chunks"] == 3
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    assert look(cache, named("llama", 3)) == []
    assert look(cache, named("qwen", 3)) == ["disk"] * 3


def test_what_is_discarded_while_a_tier_is_still_being_scanned_does_not_come_back_with_the_scan(make):
    url, gate, chain = "late://?capacity=1GiB", Gate(), keys(3)
    objects = kept(make, url, chain)
    gate.hold()
    config = Config(tiers=[cpu(20), url], chunk_tokens=C, prefault=False)
    cache = Cache(config, tiers={url: SlowTier(MemoryTier(objects), gate)}, wait_until_warm=False)
    (below,) = cache.below
    assert not cache.is_warm
    below.discard(chain[2], ONE)
    assert below.is_leaving(chain[2]), "a restart now would find it"
    gate.open()
    assert cache.flush()
    assert cache.is_warm
    assert not below.is_leaving(chain[2])
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
        self.caches.append(Cache(config, tiers={url: slow}, wait_until_warm=False))
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
def test_what_is_discarded_during_a_scan_goes_in_every_form_that_the_scan_finds(late, before, now):
    chain = keys(3)
    cache = late.open(chain, form=before)
    store(cache, chain, now)
    entry = cache.index.get(chain[2])
    assert entry is not None
    cache.discard(entry)
    late.gate.open()
    assert cache.flush()
    assert late.keys() == set(chain[:2]), "the next start would serve it"
    cache.check()


@pytest.mark.parametrize("form", [ONE, TWO])
def test_what_is_replaced_during_a_scan_is_what_the_next_start_finds(late, form):
    chain = keys(2)
    cache = late.open(chain, form=form)
    store(cache, chain, ONE)
    cache.forget(chain[1], ONE)
    reservation = cache.reserve(keys(1, "new"), ONE)
    cache.replace(reservation, chain[1], b"")
    late.gate.open()
    assert cache.flush()
    assert {name.shard for name in late.objects if name.key == chain[1]} == {ONE.shards[0]}
    assert not cache.is_leaving(chain[1])


def test_a_clear_during_a_scan_forgets_what_the_scan_finds(late):
    ours, theirs = [[namespace(name) + key[4:] for key in keys(2)] for name in ("m", "n")]
    cache = late.open(ours, theirs, form=TWO)
    cache.clear(namespace("m"))
    assert not cache.below[0].is_clear
    assert store(cache, ours[:1]) == 1, "what comes afterwards stays"
    late.gate.open()
    assert cache.flush()
    assert cache.below[0].is_clear
    assert late.keys() == {ours[0], *theirs}
    assert {name.shard for name in late.objects if name.key == ours[0]} == {ONE.shards[0]}
    assert look(cache, theirs, TWO) == ["late"] * 2


def test_a_clear_of_all_during_a_scan_leaves_nothing(late):
    cache = late.open(keys(5))
    cache.clear()
    late.gate.open()
    assert cache.flush()
    assert late.objects == {}


def test_what_is_larger_than_its_tier_is_deleted_and_costs_no_other_chunk(late):
    cache = late.open(keys(1), capacity=str(8 * AT_REST))
    huge = next(iter(late.objects))._replace(key=bytes(32))
    late.objects[huge] = bytes(9 * AT_REST)
    late.gate.open()
    assert cache.flush()
    assert late.keys() == set(keys(1))
    assert look(cache, keys(1)) == ["late"]


def test_a_tier_that_others_share_never_gets_a_value_that_may_change(make):
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


def test_values_are_no_tokens(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    values = Values(cache)
    draft = values.draft(5)
    assert draft is not None
    draft.view[:] = b"hello"
    list(values.put(draft, b"name"))
    cache.flush()
    found = drained(values.get(b"name"), cache)
    assert bytes(found.view) == b"hello"
    values.release(found)
    assert drained(values.get(b"other"), cache) is None
    for name in ("asked_tokens", "lookups", "skipped_tokens"):
        assert cache.metrics.value(f"lmtier_{name}_total") == 0
    for tier in ("cpu", "disk"):
        assert cache.metrics.value("lmtier_stored_tokens_total", tier=tier) == 0


def drained(call, cache):
    """What a call returns that waits for tiers."""
    until = time.monotonic() + 10
    while True:
        try:
            next(call)
        except StopIteration as stop:
            return stop.value
        assert time.monotonic() < until, "it waits for ever"
        cache.step()


def test_a_key_that_stands_twice_is_refused():
    """It would be its own parent, and the policy would walk in a circle for ever."""
    a, b = keys(2)
    with Cache(Config(tiers=[cpu(4)], chunk_tokens=C, prefault=False)) as cache:
        for call in (cache.match, cache.reserve):
            with pytest.raises(MisuseError, match="twice"):
                call([a, b, b], ONE)
        cache.step()
        cache.check()


def test_what_another_cache_made_costs_an_error_and_changes_nothing():
    """Its numbers are the same: a release would end the leases of somebody else's match."""
    config = Config(tiers=[cpu(9)], chunk_tokens=C, prefault=False)
    with Cache(config) as one, Cache(config) as other:
        store(one, keys(2))
        store(other, keys(2))
        mine, theirs = one.match(keys(2), ONE), other.match(keys(2), ONE)
        saving, filling = one.reserve(keys(4), ONE), other.reserve(keys(4), ONE)
        for wrong in (
            lambda: one.release(theirs),
            lambda: one.prefetch(theirs),
            lambda: one.discard(theirs.run[0]),
            lambda: one.commit(filling),
            lambda: one.abort(filling),
        ):
            with pytest.raises(MisuseError, match="another cache"):
                wrong()
            one.check()
            other.check()
        assert len(one.index) == len(other.index) == 4
        one.release(mine)
        other.release(theirs)
        one.abort(saving)
        other.abort(filling)


def test_what_could_not_be_written_over_is_deleted_in_one_job(make):
    """In two, the first to end would let a new one be stored beside the second, which deletes it."""
    tier = HandTier({}, keeps=True)
    url = "hand://?capacity=" + str(TWO.at_rest)
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
    tier.finish(0)
    cache.step()
    assert not tier.kept


def test_the_books_agree_while_what_is_too_much_for_a_smaller_capacity_is_deleted(make):
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
