"""What a cache owes its owner: prefixes, leases, room, tiers, and counters that are exact."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.match import EntryState, Lookup
from lmtier.errors import LayoutError, MisuseError
from lmtier.format.keys import namespace, value_key
from lmtier.format.layout import PAGE, ChunkForm, Layout, Name, Shard, form_of, padded, stored_size
from lmtier.format.objects import Selector
from lmtier.server.values import Values
from lmtier.testing import Gate, MemoryTier, SlowTier, opaque_layout
from lmtier.tiers.base import Reason
from tests.model.hand import HandTier
from tests.stopwatch import Stopwatch

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
    for key, offsets in reservation.places:
        for offset, shard in zip(offsets, form.shards, strict=True):
            data = content(key, shard)
            cache.slab.view(offset, len(data))[:] = data
    for shard in reservation.form.shards if reservation.chunks else ():
        cache.commit(reservation, shard)
    return len(reservation.chunks)


def holds_right_bytes(cache: Cache, match: Lookup) -> bool:
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


def fill(cache: Cache, name: bytes, form: ChunkForm) -> int:
    reservation = cache.reserve([name], form)
    for _, offsets in reservation.places:
        cache.slab.view(offsets[0], form.sizes[0])[:32] = name
        cache.slab.view(offsets[0], form.sizes[0])[-32:] = name
    if reservation.chunks:
        cache.commit(reservation)
    cache.step()
    return len(reservation.chunks)


def is_right(cache: Cache, name: bytes, form: ChunkForm) -> bool:
    match = cache.match([name], form)
    right = [
        bytes(cache.slab.view(entry.offsets[0], form.sizes[0])[at]) == name
        for entry in match.run
        for at in (slice(0, 32), slice(-32, None))
    ]
    cache.release(match)
    return right == [True, True]


def test_large_chunks_find_room_among_scattered_small_ones(make):
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


def test_chunks_being_read_are_not_moved(make):
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
    assert sorted(first.chunks) == [0, 1, 2]
    assert sorted(second.chunks) == [3]
    cache.commit(second)
    assert look(cache, keys(4)) == [], "its head is not there yet"
    cache.commit(first)
    match = cache.match(keys(4), ONE)
    assert match.chunks == 4
    cache.release(match)
    assert cache.index.used == 4 * ROOM


def test_a_chunk_shows_once_its_last_shard_is_committed(make):
    cache = make(cpu(20))
    reservation = cache.reserve(keys(2), TWO)
    cache.commit(reservation, TWO.shards[0])
    assert look(cache, keys(2), TWO) == []
    cache.commit(reservation, TWO.shards[1])
    match = cache.match(keys(2), TWO)
    assert match.chunks == 2
    cache.release(match)


def test_an_abort_frees_room_when_the_last_rank_is_done(make):
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


def test_short_memory_stores_a_prefix_and_never_a_hole(make):
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


def test_an_object_beyond_the_slab_evicts_nothing(make):
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
    assert cache.index.leased_bytes == 0


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
        assert not match.is_ready
    gate.open()
    for match in matches:
        cache.wait(match)
        assert match.is_ready
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
    watch = Stopwatch()
    match = cache.wait(cache.match(keys(3), ONE, deadline=0.1))
    assert watch.seconds() < 1.0
    assert match.chunks == 0
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="deadline") == 3 * C
    cache.release(match)
    cache.check()
    gate.open()
    cache.flush()
    assert look(cache, keys(3)) == ["cpu"] * 3, "what arrives late is still of use to the next one"


def test_a_request_cancelled_at_any_stage_holds_nothing(make):
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
    assert cache.index.leased_bytes == 0
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="cancelled") == 6 * C


def test_a_suppressed_load_still_counts_as_stored(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, keys(3))
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    match = cache.match(keys(3), ONE)
    cache.prefetch(match, 0)
    assert (match.is_ready, match.chunks) == (True, 0)
    cache.release(match)
    assert cache.reserve(keys(3), ONE).leading_stored == 3
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="not_worth_it") == 3 * C


# ---- failing tiers


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


def test_a_gpu_tier_is_its_movers_and_nothing_to_a_cache(make):
    cache = make("gpu://?capacity=4KiB", cpu(2))
    assert cache.slab.capacity == cache.index.capacity
    assert not cache.lower


def test_a_tier_that_hangs_spares_the_cpu_tier(make):
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
    assert cache.lower[0].load_breaker.is_open
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="tier_down") > 0
    gate.open()
    cache.flush()
    cache.check()


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


def test_closing_ends_in_its_time_whatever_hangs(make, caplog):
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
    assert "closed before all chunks were written" in caplog.text


def test_hanging_loads_and_stores_leave_room_for_others(make):
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
    cache.discard(entry.key, entry.form)
    cache.flush()
    assert look(cache, keys(2)) == ["cpu"]
    assert len(objects) == 1


def test_a_second_discard_removes_what_was_stored_between(make):
    """As at a server, which is asked by key: `tests/model/test_client_machine.py` compares both."""
    cache = make(cpu(20))
    store(cache, keys(1))
    entry = cache.index.get(keys(1)[0])
    assert entry is not None
    cache.discard(entry.key, entry.form)
    store(cache, keys(1))
    assert look(cache, keys(1)) == ["cpu"]
    cache.discard(entry.key, entry.form)
    assert look(cache, keys(1)) == []


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
    assert cache.index.leased_bytes == 0


def test_a_request_does_not_inherit_anothers_deadline(make):
    url = "slow://?capacity=1GiB"
    objects = kept(make, url, keys(3))
    gate = Gate()
    cache = make(cpu(20), url, opened={url: SlowTier(MemoryTier(objects), gate)})
    gate.hold()
    hasty, patient = cache.match(keys(3), ONE, deadline=0), cache.match(keys(3), ONE, deadline=30)
    cache.prefetch(hasty)
    cache.prefetch(patient)
    cache.step()
    assert (hasty.is_ready, hasty.chunks) == (True, 0)
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


def test_a_forked_child_cannot_write_to_its_parents_slab(make):
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


def test_counters_are_exact_when_busy_and_still_when_idle(make):
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
    entry = cache.index.get(keys(1)[0])
    assert entry is not None
    assert repr(entry).endswith("FILLING leases=1 kids=0>")
    cache.commit(reservation)
    assert entry.state is EntryState.READY
    assert repr(cache.match(keys(1), ONE)) == "<Match 1 of 1 chunks, 1 in the slab, ready>"


# ---- namespaces, and what a server adds


def named(model: str, count: int) -> list[bytes]:
    return [namespace(model) + key[4:] for key in keys(count, model)]


def test_one_model_can_be_cleared_and_the_others_stay(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path / "kv"))
    store(cache, named("llama", 3))
    store(cache, named("qwen", 3))
    cache.flush()
    cache.clear(Selector(namespace("llama")))
    assert look(cache, named("llama", 3)) == []
    assert look(cache, named("qwen", 3)) == ["cpu"] * 3
    assert cache.flush()
    assert cache.stats()["disk"]["chunks"] == 3
    cache.close()
    cache = make(cpu(20), disk(tmp_path / "kv"))
    assert look(cache, named("llama", 3)) == []
    assert look(cache, named("qwen", 3)) == ["disk"] * 3


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


def test_clearing_values_counts_what_it_deletes(make):
    cache = make(cpu(20))
    values = Values(cache)
    for name in (b"one", b"two"):
        draft = values.draft(5)
        assert draft is not None
        drained(values.put(draft, name), cache)
    assert drained(values.clear(), cache)
    assert cache.metrics.value("lmtier_values_total", event="deleted") == 2


@pytest.mark.parametrize("fault", [None, Reason.ERROR])
def test_a_value_whose_header_does_not_come_is_a_miss(make, fault):
    url, tier = "hand://?capacity=1MiB", HandTier({}, keeps=True)
    cache = make(cpu(20), url, opened={url: tier}, load_deadline=0.05)
    values, key = Values(cache), value_key(b"name")
    draft = values.draft(5)
    assert draft is not None
    drained(values.put(draft, b"name"), cache)
    cache.step()
    tier.finish(0)
    cache.step()
    cache.memory.discard(key)  # the slab forgets, the tier does not
    cache.lower[0].index.get(key).marks = ()  # as after a restart
    asking = values.find_info(b"name")
    next(asking)
    tier.fault = fault
    if fault is not None:
        tier.finish(0)
    assert drained(asking, cache) is None
    while tier.waiting:
        tier.finish(0)


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
        for call in (cache.match, cache.reserve, partial(cache.bring, deadline=1.0)):
            with pytest.raises(MisuseError, match="twice"):
                call([a, b, b], ONE)
        cache.step()
        cache.check()


def test_grants_of_another_cache_raise_and_change_nothing():
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
