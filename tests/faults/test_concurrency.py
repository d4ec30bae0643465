"""Many things at once, and ends at any moment: nobody waits for a writer, nothing leaks or counts twice."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lmtier.config import Config
from lmtier.copy.mover import Mover
from lmtier.copy.paging import PagedKV
from lmtier.core.cache import Cache
from lmtier.core.match import Lookup
from lmtier.format.keys import Identity
from lmtier.format.layout import PAGE, ChunkForm, Layout, Name, Shard, form_of, stored_size
from lmtier.rules.fullness import FULL_PAUSE
from lmtier.testing import PATIENCE, Gate, MemoryTier, SlowTier
from lmtier_backends.disk import DiskTier

C = 4
LAYOUT = Layout.uniform(
    layers=4, heads=2, head_dim=512, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
)
ONE = form_of(LAYOUT, (LAYOUT.whole,))
TWO = form_of(LAYOUT, (Shard(0, 4, 0, 1), Shard(0, 4, 1, 2)))
STAGE = form_of(LAYOUT, (Shard(0, 1, 0, 2),))
ROOM = ONE.slab_bytes  # 64 KiB
FAR = "far://"


def keys(count: int, name: str = "a") -> list[bytes]:
    return [hashlib.sha256(f"{name}{i}".encode()).digest() for i in range(count)]


def content(key: bytes, shard: Shard) -> bytes:
    size = LAYOUT.nbytes(shard)
    return (hashlib.sha256(key + str(shard).encode()).digest() * size)[:size]


def store(cache: Cache, names: list[bytes], form: ChunkForm = ONE) -> int:
    reservation = cache.reserve(names, form)
    for key, offsets in reservation.places:
        for offset, shard in zip(offsets, form.shards, strict=True):
            data = content(key, shard)
            cache.slab.view(offset, len(data))[:] = data
    for shard in reservation.form.shards if reservation.chunks else ():
        cache.commit(reservation, shard)
    return len(reservation.chunks)


def look(cache: Cache, names: list[bytes], form: ChunkForm = ONE) -> list[str]:
    """Where the matched chunks came from, after checking their bytes."""
    match = cache.wait(cache.match(names, form))
    for entry in match.run:
        for offset, shard in zip(entry.offsets, entry.form.shards, strict=True):
            assert bytes(cache.slab.view(offset, LAYOUT.nbytes(shard))) == content(entry.key, shard)
    sources = match.sources
    cache.release(match)
    return sources


def step_until(cache: Cache, done: Callable[[], bool], timeout: float = PATIENCE) -> None:
    until = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < until, "it never came to that"
        cache.step()
        cache._wake.wait(0.02)


def cpu(chunks: int) -> str:
    return f"cpu://?capacity={chunks * ROOM}&policy=lru"


def disk(path: Path, capacity: int = 1 << 30) -> str:
    return f"disk://{path}?capacity={capacity}"


@pytest.fixture
def make():
    caches = []

    def make(*tiers: str, opened=None, **settings) -> Cache:
        config = Config(tiers=tiers, chunk_tokens=C, prefault=False, **{"load_deadline": 30.0, **settings})
        caches.append(Cache(config, tiers=opened))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close(timeout=5)
        cache.check()


@pytest.fixture
def warm(make, tmp_path: Path) -> Path:
    """A directory with eight chunks."""
    cache = make(cpu(8), disk(tmp_path / "kv"))
    store(cache, keys(8))
    cache.close()
    return tmp_path / "kv"


# ---- many at once


def test_reads_of_many_chunks_run_at_once(make, warm):
    class Together(DiskTier):
        def read(self, item, buffers):
            all_are_reading.wait(PATIENCE)
            return super().read(item, buffers)

    all_are_reading = threading.Barrier(4)
    url = disk(warm)
    cache = make(cpu(20), url, opened={url: Together(warm, readers=4)})
    assert look(cache, keys(8)) == ["disk"] * 8


def test_loads_go_on_while_every_writer_is_stuck(make, warm):
    class Stuck(DiskTier):
        def write(self, item, buffers):
            stuck.release()
            assert go_on.wait(PATIENCE)
            super().write(item, buffers)

    stuck, go_on = threading.Semaphore(0), threading.Event()
    url = disk(warm)
    cache = make(cpu(20), url, opened={url: Stuck(warm, writers=2)})
    try:
        store(cache, keys(6, "new"))
        cache.step()
        assert stuck.acquire(timeout=PATIENCE)
        assert stuck.acquire(timeout=PATIENCE), "both writers"
        assert len(cache.lower[0].storing_entries) == 6, "and more wait behind them"
        assert look(cache, keys(8)) == ["disk"] * 8
        assert not stuck.acquire(blocking=False), "no writer had moved"
    finally:
        go_on.set()
    assert cache.flush()
    assert cache.stats()["disk"]["chunks"] == 14


# ---- a writer that dies


@pytest.mark.parametrize("form", [ONE, TWO], ids=["one rank", "two ranks, one of them done"])
def test_a_dead_writers_staging_is_invisible_and_reclaimed(make, form):
    cache = make(cpu(4))
    dead = cache.reserve(keys(3), form)
    *done, last = form.shards
    for shard in done:
        cache.commit(dead, shard)
    for _, offsets in dead.places:
        for offset in offsets:
            cache.slab.view(offset, PAGE)[:] = b"\xa5" * PAGE
    assert store(cache, keys(4, "b")) == 1, "what is staged does not leave for others"
    cache.clear()
    assert look(cache, keys(3), form) == []
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="being_filled") == 3 * C
    assert cache.slab.used == 3 * ROOM
    for _, offsets in dead.places:
        for offset in offsets:
            assert bytes(cache.slab.view(offset, PAGE)) == b"\xa5" * PAGE
    cache.abort(dead, last)  # its owner saw it die
    assert (cache.slab.used, cache.index.leased_bytes) == (0, 0)
    assert look(cache, keys(3), form) == []
    assert store(cache, keys(4), form) == 4
    assert look(cache, keys(4), form) == ["cpu"] * 4


# ---- a request that ends at any stage

TOKENS = range(8 * C)


class Engine:
    """KV of eight chunks in blocks 0 to 15, and a prompt of one token more."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.layers = [torch.randn(24, 2, 2, 1024).bfloat16() for _ in range(4)]
        kv = PagedKV(LAYOUT, LAYOUT.whole, self.layers)
        self.mover = Mover(cache, kv, Identity(model="m", weights="w"), spare_blocks=range(20, 24))
        self.chain = self.mover.chain([*TOKENS, 0])

    def match(self) -> Lookup:
        return self.cache.match(self.chain.keys, self.mover.form, tokens=self.chain.tokens)

    def save(self) -> None:
        with self.mover.save(self.chain, range(16)) as saving:
            saving.all()


def cancel_while_asking(engine: Engine, gate: Gate) -> None:
    match = engine.match()
    assert match.pending_lookups
    engine.cache.release(match)


def cancel_when_matched(engine: Engine, gate: Gate) -> None:
    gate.open()
    match = engine.match()
    step_until(engine.cache, lambda: not match.pending_lookups)
    assert len(match.below) == match.chunks == 8
    engine.cache.release(match)


def cancel_while_prefetching(engine: Engine, gate: Gate) -> None:
    gate.open()
    match = engine.match()
    step_until(engine.cache, lambda: not match.pending_lookups)
    gate.hold()
    engine.cache.prefetch(match)
    assert match.pending_loads == 7, "as much as the slab gives to what is on its way"
    engine.cache.release(match)


def cancel_before_the_first_layer(engine: Engine, gate: Gate) -> None:
    gate.open()
    engine.cache.release(engine.mover.match(engine.chain))


def cancel_half_loaded(engine: Engine, gate: Gate) -> None:
    gate.open()
    match = engine.mover.match(engine.chain)
    assert match.chunks == 7

    def attend() -> None:
        with engine.mover.load(match, range(16)) as loading:
            for layer in range(2):
                loading.layer(layer)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attend()


def cancel_half_saved(engine: Engine, gate: Gate) -> None:
    saving = engine.mover.save(engine.mover.chain(range(100, 124)), range(12))
    assert saving.tokens == 24
    for layer in range(2):
        saving.layer(layer)
    saving.abort()
    assert engine.cache.slab.used == 0, "at once"


STAGES = [
    cancel_when_matched,
    cancel_while_prefetching,
    cancel_before_the_first_layer,
    cancel_half_loaded,
    cancel_half_saved,
]


@pytest.mark.parametrize(
    ("cancel", "kept"),
    [(cancel_while_asking, False), *((cancel, kept) for cancel in STAGES for kept in (True, False))],
)
def test_a_request_may_end_at_any_stage(make, tmp_path, cancel, kept):
    """Below is a disk, whose content is known or (not `kept`) must be asked for."""

    class Place(DiskTier):
        keeps = kept

    url = f"{disk(tmp_path / 'kv')}&write=always"
    cache = make(cpu(8), url, opened={url: Place(tmp_path / "kv")})
    torch.manual_seed(0)
    Engine(cache).save()
    cache.close()
    gate = Gate()
    cache = make(cpu(8), url, opened={url: SlowTier(Place(tmp_path / "kv"), gate)})
    engine = Engine(cache)
    gate.hold()
    cancel(engine, gate)
    gate.open()
    cache.flush()
    cache.check()
    assert cache.index.leased_bytes == cache._matches.loading == len(cache.lower[0].storing_entries) == 0
    assert [*cache._matches.open, *cache.reservations.open, *cache._matches.waiters] == []
    assert not any(entry.leases for tier in cache.lower.owned for entry in tier.index.entries())
    assert cache.metrics.value("lmtier_leased_bytes") == 0
    value = cache.metrics.value
    asked, hit = value("lmtier_asked_tokens_total"), value("lmtier_hit_tokens_total", tier="cpu")
    assert (asked, hit) == (0 if cancel is cancel_half_saved else 8 * C + 1, 0)
    assert store(cache, keys(8, "others")) == 8, "every byte can be had by others"
    cache.clear()
    assert cache.slab.used == 0


# ---- answers that come later


@pytest.fixture
def asked(make):
    """A cache over a tier with three chunks that must be asked; its gate; and the questions it got."""

    class Asked(MemoryTier):
        keeps = False

        def contains(self, names):
            questions.append(len(names))
            return super().contains(names)

    questions: list[int] = []
    objects: dict[Name, bytes] = {}
    cache = make(cpu(20), FAR, opened={FAR: Asked(objects)})
    store(cache, keys(3))
    cache.close()
    gate = Gate()
    cache = make(cpu(20), FAR, opened={FAR: SlowTier(Asked(objects), gate)})
    gate.hold()
    return cache, gate, questions


def test_an_answer_is_delivered_once(asked):
    cache, gate, questions = asked
    match = cache.match(keys(5), ONE)
    for _ in range(3):
        cache.step()
        assert (match.pending_lookups, match.chunks) == (1, 0), "waiting takes nothing away"
    gate.open()
    step_until(cache, lambda: not match.pending_lookups)
    for _ in range(3):
        assert match.sources == ["far"] * 3
        cache.step()
    cache.wait(match)
    cache.wait(match)
    assert match.sources == ["far"] * 3
    cache.release(match)
    assert questions == [5]
    value = cache.metrics.value
    assert value("lmtier_lookups_total") == 1
    assert value("lmtier_hit_tokens_total", tier="far") == 3 * C
    assert value("lmtier_missed_tokens_total", reason="never_stored") == 2 * C


@pytest.mark.parametrize("end", ["released", "expired", "expired, then released"])
def test_an_answer_that_nobody_waits_for_changes_nothing(asked, end):
    cache, gate, _ = asked
    match = cache.match(keys(3), ONE, deadline=0 if "expired" in end else 30)
    if "expired" in end:
        assert cache.wait(match).is_ready, "a timeout is a miss"
    if "released" in end:
        cache.release(match)
    names = ("lookups", "asked_tokens", "hit_tokens", "missed_tokens")

    def counters() -> list[str]:
        lines = cache.metrics.exposition().decode().splitlines()
        return [line for line in lines if line.startswith(tuple(f"lmtier_{name}_total" for name in names))]

    before = counters()
    gate.open()
    step_until(cache, lambda: not cache.lower[0].has_jobs)
    assert counters() == before
    assert match.chunks == 0
    assert match.is_ready or match.released
    assert cache.slab.used == cache.index.leased_bytes == 0
    assert look(cache, keys(3)) == ["far"] * 3, "the next one is answered"


def test_an_answer_that_comes_too_late_ends_no_lease(asked):
    """Somebody copies from these extents: they stay, whatever becomes of their chunks meanwhile."""
    cache, gate, _ = asked
    cache.commit(cache.reserve(keys(4, "near"), ONE))
    match = cache.wait(cache.match(keys(4, "near") + keys(1, "far"), ONE, deadline=0))
    run = list(match.run)
    cache.discard(run[1].key, run[1].form)  # another request's verification failed
    gate.open()
    step_until(cache, lambda: not cache.lower[0].has_jobs)
    assert [entry.leases for entry in run] == [1, 1, 1, 1]
    cache.release(match)


# ---- a real disk that fills up


@pytest.fixture
def small_disk(tmp_path: Path):
    root = tmp_path / "small"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(root)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.strip()}")
    yield root
    subprocess.run(["umount", "--lazy", str(root)], check=True)


def test_a_disk_filled_by_others_is_used_when_room_returns(make, small_disk):
    cache = make(cpu(12), disk(small_disk / "kv"))
    label, value = "disk", cache.metrics.value
    store(cache, keys(4, "early"))
    assert cache.flush()
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(PAGE)):
            pass
    assert os.statvfs(small_disk).f_bavail == 0

    for turn in range(6):
        assert store(cache, keys(2, f"late{turn}")) == 2
        assert cache.flush(timeout=5), "it is written, in the place of another"
    assert all(cache.lower[0].is_stored(key, ONE) for key in keys(2, "late5"))
    assert cache.stats()[label]["chunks"] == 4
    assert not cache.lower[0].store_breaker.is_open
    assert value("lmtier_tier_failures_total", tier=label, op="store", reason="full") >= 1
    assert list((small_disk / "kv" / "partial").iterdir()) == []

    ballast.unlink()
    freed = time.monotonic()
    step_until(cache, lambda: time.monotonic() - freed > FULL_PAUSE, timeout=5)
    assert store(cache, keys(4, "after")) == 4
    assert cache.flush(timeout=5)
    assert cache.stats()[label]["chunks"] == 8
    assert all(cache.lower[0].is_stored(key, ONE) for key in keys(4, "after"))
    reasons = ("full", "evicted_before_write", "queue_full", "no_room", "error")
    dropped = sum(value("lmtier_dropped_tokens_total", tier=label, reason=reason) for reason in reasons)
    down = value("lmtier_stored_tokens_total", tier=label)
    assert down + dropped == value("lmtier_stored_tokens_total", tier="cpu") == 20 * C, (
        "each chunk is counted"
    )
    files = [file.stat().st_size for file in (small_disk / "kv").rglob("*.L*")]
    assert sum(files) == cache.stats()[label]["used"] == 8 * stored_size(LAYOUT.nbytes(LAYOUT.whole))


# ---- books and files


@pytest.mark.parametrize("seed", range(3))
def test_what_is_said_to_be_used_is_what_the_files_take(make, tmp_path, seed):
    """Any mix of store, evict, read, discard, clear and restart, with chunks of three sizes."""
    chance = random.Random(seed)
    root, capacity = tmp_path / "kv", 12 * ONE.stored_bytes + PAGE
    cache = make(cpu(8), disk(root, capacity))
    done: dict[str, int] = {}
    for turn in range(150):
        form = chance.choice((ONE, TWO, STAGE))
        names = keys(chance.randint(1, 6), f"{chance.randrange(12)}-{form.shards}")
        action = chance.choices(("store", "look", "discard", "clear", "restart"), (50, 25, 15, 2, 6))[0]
        if action == "store":
            store(cache, names, form)
        elif action == "look":
            look(cache, names, form)
        elif action == "discard" and (entries := cache.index.entries()):
            entry = chance.choice(entries)
            cache.discard(entry.key, entry.form)
        elif action == "clear":
            cache.clear(force=chance.random() < 0.5)
        elif action == "restart":
            cache.close()
            cache = make(cpu(8), disk(root, capacity))
        done[action] = done.get(action, 0) + 1
        if chance.random() < 0.3:
            cache.step()  # and the next one comes while this is under way
            continue
        cache.flush()  # a prompt may be longer than the disk
        assert not cache.lower[0].backlog
        files = [file.stat().st_size for file in root.rglob("*.L*")]
        assert sum(files) == cache.stats()["disk"]["used"] <= capacity, f"after {turn} turns, {action}"
        assert sum(files) == cache.metrics.value("lmtier_used_bytes", tier="disk")
        assert list((root / "partial").iterdir()) == []
        cache.check()
    assert len(done) == 5, "each was tried"
    cache.close()
    cache = make(cpu(8), disk(root, capacity))
    files = [file.stat().st_size for file in root.rglob("*.L*")]
    assert sum(files) == cache.stats()["disk"]["used"] > 0
