"""What is pinned by name stays: in the slab and below, until its time is over or it is unpinned."""

from __future__ import annotations

import hashlib

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.index import Index
from lmtier.core.match import EntryState
from lmtier.core.pinning import NamedPins
from lmtier.errors import MisuseError
from lmtier.format.keys import is_value, value_key
from lmtier.format.layout import Layout, Name, form_of, padded, stored_size
from lmtier.rules.lifetimes import FOREVER, MAX_PINNED, MAX_PINS, Pins
from lmtier.rules.policy import make_policy
from lmtier.testing import MemoryTier
from lmtier.tiers.base import Tier

C = 4
LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=64, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
)
ONE = form_of(LAYOUT, (LAYOUT.whole,))
ROOM = padded(LAYOUT.nbytes(LAYOUT.whole))
AT_REST = stored_size(LAYOUT.nbytes(LAYOUT.whole))

Objects = dict[Name, bytes]


class Time:
    """Two clocks that go when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.25
        self.wall = 1.7e9

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


def keys(count: int, name: str = "a") -> list[bytes]:
    return [hashlib.sha256(f"{name}{i}".encode()).digest() for i in range(count)]


def cpu(chunks: int, query: str = "") -> str:
    return f"cpu://?capacity={chunks * ROOM}{query}"


def store(cache: Cache, names: list[bytes], ttl: float | None = None) -> int:
    reservation = cache.reserve(names, ONE, ttl=ttl)
    for _, offsets in reservation.places:
        cache.slab.view(offsets[0], ROOM)[:] = bytes(ROOM)
    if reservation.chunks:
        cache.commit(reservation)
    return len(reservation.chunks)


def look(cache: Cache, names: list[bytes]) -> list[str]:
    match = cache.wait(cache.match(names, ONE))
    sources = list(match.sources)
    cache.release(match)
    cache.check()
    return sources


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def make(time, monkeypatch):
    monkeypatch.setattr("time.time", lambda: time.wall)
    caches: list[Cache] = []

    def make(*tiers: str, opened: dict[str, Tier] | None = None) -> Cache:
        config = Config(tiers=tiers, chunk_tokens=C, prefault=False)
        caches.append(Cache(config, tiers=opened, clock=time, is_record=is_value))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close(timeout=5)
        cache.check()


# ---- of its own


@pytest.fixture
def places():
    return {label: Index(8 * ROOM, make_policy("lru")) for label in ("cpu", "near")}


def test_a_pin_holds_present_and_later_chunks_everywhere(places, time):
    pinning = NamedPins(places, time)
    first, second = keys(2)
    places["cpu"].add(first, ONE, ROOM, EntryState.READY, None)
    assert pinning.pin("p", [first, second], FOREVER) == {"cpu": 1, "near": 0}
    places["near"].make_ready(places["near"].add(second, ONE, ROOM, EntryState.FILLING, None))
    (pin,) = pinning.pinned()
    assert (pin.name, pin.chunks, pin.pinned, pin.seconds_left) == ("p", 2, {"cpu": 1, "near": 1}, None)
    assert not places["cpu"].evict(ROOM)
    assert pinning.unpin("p")
    assert places["cpu"].evict(ROOM)
    for index in places.values():
        index.check()


def test_a_refused_pin_changes_nothing_in_any_place(places, time):
    pinning = NamedPins(places, time)
    names = keys(5)
    for name in names:
        places["near"].add(name, ONE, ROOM, EntryState.READY, None)
    places["cpu"].add(names[0], ONE, ROOM, EntryState.READY, None)
    pinning.pin("p", names[:1], FOREVER)
    with pytest.raises(MisuseError, match="near gives pins half"):
        pinning.pin("p", names, FOREVER)
    assert [pin.pinned for pin in pinning.pinned()] == [{"cpu": 1, "near": 1}]


def test_those_whose_time_is_over_are_taken_away(places, time):
    pinning = NamedPins(places, time)
    pinning.pin("short", keys(1), 5.0)
    pinning.pin("long", keys(1), 50.0)
    time.pass_by(5)
    pinning.expire()
    assert [(pin.name, pin.seconds_left) for pin in pinning.pinned()] == [("long", 45.0)]


# ---- in a cache


def test_what_is_pinned_stays_until_it_is_unpinned(make):
    cache = make(cpu(8))
    store(cache, keys(3))
    assert cache.pin("system", keys(3)) == {"cpu": 3}
    for i in range(10):
        store(cache, keys(5, f"flood{i}"))
    assert look(cache, keys(3)) == ["cpu"] * 3
    cache.clear()
    assert look(cache, keys(3)) == ["cpu"] * 3
    assert cache.unpin("system") is True
    assert cache.unpin("system") is False
    store(cache, keys(8, "flood"))
    assert look(cache, keys(3)) == []
    assert cache.index.leased_bytes == 0


def test_a_pinned_chunk_stays_in_its_tier(make):
    """It stays in every tier that has it, and is not brought up."""
    url, objects = f"near://?capacity={8 * AT_REST}&policy=lru", Objects()
    cache = make(cpu(4), url, opened={url: MemoryTier(objects)})
    store(cache, keys(3))
    assert cache.flush()
    store(cache, keys(4, "b"))
    cache.flush()
    assert cache.pin("p", keys(3)) == {"cpu": 0, "near": 3}
    for i in range(6):
        store(cache, keys(4, f"flood{i}"))
        cache.flush()
    assert look(cache, keys(3)) == ["near"] * 3


def test_half_of_a_tier_can_be_pinned_and_not_a_chunk_more(make):
    cache = make(cpu(9))
    store(cache, keys(9))
    with pytest.raises(
        MisuseError, match=r"^cpu gives pins half of its [\d.]+ [KM]iB: 0 B are pinned, and this would"
    ):
        cache.pin("all", keys(9))
    assert cache.pinned() == []
    assert cache.index.pinned_bytes == 0
    assert cache.pin("half", keys(4)) == {"cpu": 4}
    with pytest.raises(MisuseError, match="more; unpin something"):
        cache.pin("more", keys(5)[4:])
    assert cache.pin("again", keys(4)) == {"cpu": 4}, "what is kept already takes no more"
    cache.check()


def test_two_pins_of_one_chunk_hold_it_until_the_last_goes(make):
    cache = make(cpu(8))
    store(cache, keys(4))
    cache.pin("one", keys(3))
    cache.pin("two", keys(4)[1:])
    cache.unpin("one")
    assert cache.index.pinned_bytes == 3 * ROOM
    cache.pin("two", keys(2))
    assert {entry.key for entry in cache.index.pinned} == set(keys(2))
    cache.unpin("two")
    assert cache.index.pinned_bytes == 0


def test_a_pin_waits_for_what_is_not_there_yet(make):
    cache = make(cpu(8))
    assert cache.pin("soon", keys(2)) == {"cpu": 0}
    store(cache, keys(3))
    store(cache, keys(8, "flood"))
    assert look(cache, keys(3)) == ["cpu"] * 2
    assert cache.pinned()[0].pinned == {"cpu": 2}
    cache.pin("much", keys(8, "much"))
    store(cache, keys(6, "much"))
    assert cache.index.pinned_bytes == 4 * ROOM
    assert len(cache.index) == 8


def test_a_pin_ends_with_its_time(make, time):
    cache = make(cpu(8))
    store(cache, keys(2))
    cache.pin("p", keys(2), ttl=60)
    time.pass_by(59)
    cache.step()
    assert cache.pinned()[0].seconds_left == pytest.approx(1)
    time.pass_by(1)
    cache.step()
    assert cache.pinned() == []
    assert cache.index.pinned_bytes == 0


def test_time_is_stronger_than_a_pin_and_force_too(make, time):
    cache = make(cpu(8))
    store(cache, keys(2), ttl=10)
    cache.pin("p", keys(2))
    time.pass_by(12)
    cache.step()
    assert (len(cache.index), cache.slab.used, cache.index.pinned_bytes) == (0, 0, 0)
    store(cache, keys(2))
    assert cache.index.pinned_bytes == 2 * ROOM
    cache.clear(force=True)
    assert (len(cache.index), cache.slab.used, cache.index.pinned_bytes) == (0, 0, 0)
    cache.check()


def test_a_discarded_pinned_chunk_gives_its_room_back(make):
    cache = make(cpu(8))
    store(cache, keys(2))
    cache.pin("p", keys(2))
    entry = cache.index.get(keys(2)[1])
    assert entry is not None
    cache.discard(entry.key, entry.form)
    assert entry.state is EntryState.GONE
    assert cache.slab.used == ROOM
    cache.check()


def test_a_pin_extends_to_tiers_written_later(make):
    url, objects = f"near://?capacity={8 * AT_REST}", Objects()
    cache = make(cpu(8), url, opened={url: MemoryTier(objects)})
    store(cache, keys(2))
    assert cache.pin("p", keys(2)) == {"cpu": 2, "near": 0}
    assert cache.flush()
    assert cache.pinned()[0].pinned == {"cpu": 2, "near": 2}
    value = cache.metrics.value
    assert value("lmtier_pinned_bytes", tier="cpu") == 2 * ROOM
    assert value("lmtier_pinned_bytes", tier="near") == 2 * AT_REST
    assert value("lmtier_pins") == 1


def test_pins_are_for_kv_and_are_bounded(make):
    cache = make(cpu(8))
    for wrong in ([value_key(b"x")], keys(1) * 2):
        with pytest.raises(MisuseError, match="a pin takes keys of KV"):
            cache.pin("p", wrong)
    pins = Pins()
    for i in range(MAX_PINS):
        pins.put(str(i), [])
    with pytest.raises(MisuseError, match="unpin one first"):
        pins.need_room("one more", 1)
    pins.need_room("7", 1)
    with pytest.raises(MisuseError, match="unpin something first"):
        pins.need_room("7", MAX_PINNED + 1)
