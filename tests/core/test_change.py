"""Capacity, policy and ttl of a cache that runs: at once, by eviction, within a bound for each step."""

import hashlib
from dataclasses import replace

import pytest

from lmtier.config import Config, with_option
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError, MisuseError
from lmtier.format.layout import form_of, padded
from lmtier.rules.shares import parse
from lmtier.testing import opaque_layout

LAYOUT = opaque_layout(8192)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
ROOM = padded(8192)


def keys(count, name="a"):
    return [hashlib.sha256(f"{name}{i}".encode()).digest() for i in range(count)]


def store(cache, names):
    for name in names:
        reservation = cache.reserve([name], FORM)
        if reservation.chunks:
            cache.commit(reservation)


def held(cache, names):
    match = cache.wait(cache.match(names[:1], FORM))
    cache.release(match)
    return match.chunks == 1


def changed(cache, tier=0, **options):
    """Change options of a tier by its URL, as `lmtier set` does."""
    urls = list(cache.config.tiers)
    for name, value in options.items():
        urls[tier] = with_option(urls[tier], name, value)
    cache.change(replace(cache.config, tiers=tuple(urls)))


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def cache(tmp_path, clock):
    """Over a disk."""
    tiers = [f"cpu://?capacity={64 * ROOM}", f"disk://{tmp_path}/kv?capacity=4MiB"]
    config = Config(tiers=tiers, chunk_tokens=1, prefault=False, load_deadline=30.0)
    with Cache(config, clock=lambda: clock[0]) as cache:
        yield cache
        cache.step()
        cache.check()


@pytest.fixture
def memory():
    """Alone, so that nothing is leased for a disk."""
    with Cache(Config(tiers=[f"cpu://?capacity={64 * ROOM}"], chunk_tokens=1, prefault=False)) as cache:
        yield cache
        cache.check()


def test_a_smaller_memory_evicts_the_oldest(memory):
    """A larger memory takes more."""
    store(memory, names := keys(64))
    changed(memory, capacity=str(16 * ROOM))
    while memory.index.capacity != memory.index.target:
        memory.step()
        memory.check()
    assert memory.index.used <= memory.index.capacity == 16 * ROOM
    assert [key in memory.index for key in names] == [False] * 48 + [True] * 16
    store(memory, keys(30, "b"))
    assert memory.index.used <= 16 * ROOM
    changed(memory, capacity=str(64 * ROOM))
    store(memory, keys(60, "c"))
    assert memory.index.used > 48 * ROOM
    assert memory.metrics.value("lmtier_capacity_bytes", tier="cpu") == 64 * ROOM


def test_memory_in_use_shrinks_as_it_is_released(memory):
    store(memory, names := keys(8))
    matches = [memory.match([name], FORM) for name in names]
    changed(memory, capacity=str(2 * ROOM))
    memory.step()
    assert memory.index.used == 8 * ROOM
    for match in matches:
        memory.release(match)
    memory.step()
    assert memory.index.used == memory.index.capacity == 2 * ROOM


def test_a_smaller_disk_deletes_files_down_to_its_capacity(tmp_path):
    tiers = [f"cpu://?capacity={64 * ROOM}", f"disk://{tmp_path}/kv?capacity=4MiB"]
    with Cache(Config(tiers=tiers, chunk_tokens=1, prefault=False)) as cache:
        store(cache, keys(60))
        assert cache.flush()
        (disk,) = cache.lower.owned
        assert disk.index.used > 400_000
        changed(cache, 1, capacity="256KiB")
        assert cache.flush()
        assert disk.index.used <= disk.index.capacity == 256 << 10
        cache.check()
    sizes = [each.stat().st_size for each in (tmp_path / "kv").rglob("*") if each.is_file()]
    assert sum(sizes) <= (256 << 10) + 8192


def test_a_step_evicts_only_for_a_few_milliseconds(memory, monkeypatch):
    store(memory, keys(64))
    changed(memory, capacity=str(ROOM))
    monkeypatch.setattr("lmtier.core.cache._COMING_DOWN", 0.0)
    monkeypatch.setattr("lmtier.core.place._LEAVE_AT_ONCE", 8)
    for step in range(1, 4):
        memory.step()
        assert memory.index.used == (64 - 8 * step) * ROOM, "one part, however late it is"
    monkeypatch.undo()
    memory.step()
    assert memory.index.used == ROOM


def test_what_cannot_leave_now_keeps_no_owner_busy():
    """A chunk is not evicted before those that follow it, and one of these is pinned."""
    wakes: list[bool] = []
    config = Config(tiers=[f"cpu://?capacity={8 * ROOM}"], chunk_tokens=1, prefault=False)
    with Cache(config, wake=lambda: wakes.append(True)) as cache:
        chain = keys(3)
        cache.commit(cache.reserve(chain, FORM))
        cache.pin("tail", chain[2:])
        changed(cache, capacity=str(2 * ROOM))
        cache.step()
        assert (cache.index.used, cache.index.surplus, wakes) == (3 * ROOM, ROOM, [])
        cache.unpin("tail")
        cache.step()
        assert cache.index.used == cache.index.capacity == 2 * ROOM


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_another_policy_keeps_every_chunk_and_its_order(cache, policy):
    store(cache, names := keys(64))
    for name in names[:8]:
        assert held(cache, [name])
    changed(cache, policy=policy)
    cache.check()
    assert len(cache.index) == 64
    store(cache, keys(40, "b"))
    cache.check()
    assert cache.index.used <= 64 * ROOM


def test_a_shorter_ttl_ends_chunks_that_are_stored(cache, clock):
    """A longer one prolongs nothing."""
    store(cache, names := keys(2))
    cache.flush()
    changed(cache, ttl="10s")
    changed(cache, 1, ttl="10s")
    clock[0] += 5
    changed(cache, ttl="100s")
    changed(cache, 1, ttl="0")
    store(cache, later := keys(1, "later"))
    clock[0] += 6
    cache.step()
    assert not held(cache, names)
    assert held(cache, later)


def test_shares_follow_the_capacity():
    config = Config(
        tiers=[f"cpu://?capacity={64 * ROOM}"], chunk_tokens=1, prefault=False, shares=parse("a=25%")
    )
    with Cache(config) as cache:
        store(cache, keys(64))
        changed(cache, capacity=str(16 * ROOM), policy="lru")
        cache.step()
        assert cache.index.used == 16 * ROOM
        assert [pool.share_bytes for pool in cache.index.pools or ()] == [4 * ROOM, 12 * ROOM]
        cache.check()


def test_what_cannot_change_is_refused_and_nothing_changes(cache):
    before = cache.config
    with pytest.raises(MisuseError, match="the memory was taken at start: at most"):
        changed(cache, capacity="1GiB")
    with pytest.raises(ConfigError, match="unknown policy=lruu"):
        changed(cache, policy="lruu")
    with pytest.raises(ConfigError, match="capacity='much' is not a size"):
        changed(cache, capacity="much")
    with pytest.raises(MisuseError, match="only capacity, policy and ttl"):
        changed(cache, 1, write="never")
    with pytest.raises(MisuseError, match="only capacity, policy and ttl"):
        cache.change(replace(cache.config, queue_length=1))
    for tiers in (before.tiers[:1], (*before.tiers, "null://")):
        with pytest.raises(MisuseError, match="tiers cannot come or go while the cache is open"):
            cache.change(replace(before, tiers=tiers))
    store(cache, names := keys(4))
    cache.pin("system", names)
    with pytest.raises(MisuseError, match="are pinned, and pins get half of the capacity"):
        changed(cache, capacity=str(6 * ROOM))
    assert cache.config is before
    assert cache.index.capacity == 64 * ROOM


def test_if_one_of_two_tiers_cannot_change_neither_does(cache):
    before = cache.config
    store(cache, names := keys(4))
    assert cache.flush()
    cache.pin("system", names)
    memory = with_option(before.tiers[0], "capacity", str(32 * ROOM))
    below = with_option(before.tiers[1], "capacity", str(6 * ROOM))
    with pytest.raises(MisuseError, match=r"disk: .* are pinned"):
        cache.change(replace(before, tiers=(memory, below)))
    assert cache.config is before
    assert cache.index.target == 64 * ROOM


def test_a_shared_tier_decides_about_its_room_itself():
    with Cache(Config(tiers=["cpu://?capacity=1MiB", "null://"], chunk_tokens=1, prefault=False)) as cache:
        changed(cache, 1, ttl="5s")
        with pytest.raises(MisuseError, match="null is shared"):
            changed(cache, 1, policy="lru")
