"""What ends, ends: in the slab and below, whatever moves, whatever clocks say."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.config import Config, TierSpec
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError, MisuseError
from lmtier.format import objects
from lmtier.format.layout import PAGE, Layout, Name, form_of, padded, stored_size
from lmtier.format.objects import CorruptObject, Header
from lmtier.rules.lifetimes import FOREVER, Expiries, HeaderClock
from lmtier.testing import Gate, MemoryTier, SlowTier
from lmtier.tiers.base import Tier

C = 4
LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=64, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
)
ONE = form_of(LAYOUT, (LAYOUT.whole,))
ROOM = padded(LAYOUT.nbytes(LAYOUT.whole))
AT_REST = stored_size(LAYOUT.nbytes(LAYOUT.whole))
HOUR, DAY = 3600.0, 86400.0


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


def missed(cache: Cache, reason: str) -> int:
    return int(cache.metrics.value("lmtier_missed_tokens_total", reason=reason)) // C


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def make(time, monkeypatch):
    monkeypatch.setattr("time.time", lambda: time.wall)
    caches: list[Cache] = []

    def make(*tiers: str, opened: dict[str, Tier] | None = None) -> Cache:
        config = Config(tiers=tiers, chunk_tokens=C, prefault=False, load_deadline=30.0)
        caches.append(Cache(config, tiers=opened, clock=time))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close(timeout=5)
        cache.check()


# ---- ends, one by one


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.just(FOREVER), st.floats(0, 60)), st.floats(0, 3))))
def test_an_end_is_exact_and_found_within_a_second(moves):
    ends: Expiries[int] = Expiries()
    model: dict[int, float] = {}
    now = 0.0
    for each, end, pause in moves:
        ends.set(each, end)
        model[each] = end
        now += pause
        for found in ends.expired(now, 100):
            assert model.pop(found) <= now
            ends.forget(found)
        ends.check()
        assert all(end > now - 1 for end in model.values())
        assert all(ends.is_expired(each, now) == (end <= now) for each, end in model.items())
    assert len(ends) == sum(end < FOREVER for end in model.values())


def test_a_mass_expiry_is_dealt_out_in_small_portions():
    ends: Expiries[int] = Expiries()
    for each in range(1000):
        ends.set(each, 5.5)
    portions = []
    while found := ends.expired(7.0, 64):
        portions.append(len(found))
        for each in found:
            ends.forget(each)
    assert sum(portions) == 1000
    assert max(portions) == 64


def test_a_portion_over_several_seconds_is_no_larger():
    ends: Expiries[int] = Expiries()
    for each in range(9):
        ends.set(each, each // 3 + 5.5)
    assert ends.expired(9.0, 4) == [0, 1, 2, 3]


def test_an_end_long_ago_does_not_cost_its_seconds(monkeypatch):
    """A file whose clock says 1970 held the owner for ten minutes."""
    ends: Expiries[int] = Expiries()
    now = 1_800_000_000.0
    for each, end in enumerate([1.5, 40_000_000.5, now - 3, now + 5]):
        ends.set(each, end)
    looked = 0

    class Counted(dict[int, dict[int, None]]):
        def get(self, *given: object) -> object:  # type: ignore[override]
            nonlocal looked
            looked += 1
            return super().get(*given)  # type: ignore[call-overload]

    monkeypatch.setattr(ends, "_due", Counted(ends._due))
    assert ends.expired(now, 100) == [0, 1, 2]
    assert looked < 20
    for each in (0, 1, 2):
        ends.forget(each)
    ends.check()
    assert ends.expired(now + 7, 100) == [3]


def test_nothing_is_kept_of_what_has_no_end_or_has_left():
    ends: Expiries[int] = Expiries()
    for each in range(1000):
        ends.set(each, FOREVER)
        ends.set(each, each)
        ends.forget(each)
    assert not ends._ends
    assert not ends._due


def test_an_end_is_the_same_in_every_process(time):
    stamps = HeaderClock(time.now, time.wall)
    end = time.now + HOUR
    stamp = stamps.stamp(end)
    assert stamp == int((time.wall + HOUR) * 1000)
    assert end - 0.001 <= stamps.end(stamp) <= end
    later = HeaderClock(time.now + 60, time.wall + 60)
    assert later.stamp(end) == stamp
    assert stamps.stamp(FOREVER) == 0
    assert stamps.end(0) == FOREVER


# ---- settings


def test_every_tier_takes_a_ttl():
    for url in ("cpu://?capacity=1GiB", "disk:///x?capacity=1GiB", "redis://h", "null://"):
        join = "&" if "?" in url else "?"
        assert TierSpec.parse(f"{url}{join}ttl=7d").ttl == 7 * DAY
        assert TierSpec.parse(url).ttl == FOREVER
    for wrong in ("soon", "-1", "0.0001", "200000d"):
        with pytest.raises(ConfigError, match=r"is not a time; |write it like 7d"):
            TierSpec.parse(f"disk:///x?capacity=1GiB&ttl={wrong}")


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf")])
def test_a_request_for_no_time_is_a_mistake(make, ttl):
    cache = make(cpu(8))
    with pytest.raises(MisuseError, match="ttl"):
        cache.reserve(keys(1), ONE, ttl=ttl)
    with pytest.raises(MisuseError, match="ttl"):
        cache.pin("p", keys(1), ttl=ttl)


# ---- in the slab


def test_nothing_is_served_after_its_time(make, time):
    """The miss names the reason."""
    cache = make(cpu(8))
    store(cache, keys(3), ttl=10)
    time.pass_by(9.9)
    assert look(cache, keys(3)) == ["cpu"] * 3
    time.pass_by(0.1)
    assert look(cache, keys(3)) == []
    assert missed(cache, "expired") == 3
    assert cache.slab.used == 0
    assert cache.metrics.value("lmtier_expired_chunks_total", tier="cpu") == 3


def test_it_counts_from_when_the_last_shard_was_committed(make, time):
    cache = make(cpu(8))
    reservation = cache.reserve(keys(2), ONE, ttl=10)
    time.pass_by(100)
    cache.commit(reservation)
    time.pass_by(9)
    assert look(cache, keys(2)) == ["cpu"] * 2


def test_what_is_over_goes_by_itself(make, time):
    cache = make(cpu(200))
    store(cache, keys(150), ttl=10)
    store(cache, keys(3, "b"))
    time.pass_by(11)
    for _ in range(3):
        cache.step()
    assert len(cache.index) == 3
    assert cache.slab.used == 3 * ROOM


def test_the_first_writers_ttl_counts_until_it_is_over(make, time):
    cache = make(cpu(8))
    store(cache, keys(2), ttl=10)
    time.pass_by(5)
    assert store(cache, keys(2), ttl=1000) == 0
    time.pass_by(5)
    assert store(cache, keys(2), ttl=1000) == 2
    time.pass_by(500)
    assert look(cache, keys(2)) == ["cpu"] * 2


def test_the_tiers_ttl_and_the_requests_whichever_is_sooner(make, time):
    cache = make(cpu(8, "&ttl=20s"))
    store(cache, keys(1, "short"), ttl=10)
    store(cache, keys(1, "long"), ttl=1000)
    time.pass_by(10)
    assert look(cache, keys(1, "short")) == []
    assert look(cache, keys(1, "long")) == ["cpu"]
    time.pass_by(10)
    assert look(cache, keys(1, "long")) == []


def test_whoever_reads_when_it_ends_reads_on(make, time):
    cache = make(cpu(8))
    store(cache, keys(2), ttl=10)
    match = cache.match(keys(2), ONE)
    time.pass_by(20)
    cache.step()
    assert look(cache, keys(2)) == []
    assert cache.slab.used == 2 * ROOM
    cache.check()
    cache.release(match)
    assert cache.slab.used == 0


def test_without_a_ttl_nothing_is_remembered_of_times(make):
    cache = make(cpu(8))
    store(cache, keys(8))
    assert len(cache.index.expiries) == 0
    assert "end" not in type(next(iter(cache.index.entries()))).__slots__


# ---- below


def test_a_chunk_takes_its_end_along_down_and_up(make, time):
    objects: dict[Name, bytes] = {}
    cache = make(cpu(8), "near://?capacity=1MiB", opened={"near://?capacity=1MiB": MemoryTier(objects)})
    store(cache, keys(2), ttl=10)
    assert cache.flush()
    for entry in cache.index.entries():
        cache.memory.discard(entry.key)
    time.pass_by(5)
    assert look(cache, keys(2)) == ["near"] * 2
    time.pass_by(5)
    assert look(cache, keys(2)) == []
    time.pass_by(1)
    assert cache.flush()
    assert objects == {}
    assert cache.metrics.value("lmtier_expired_chunks_total", tier="near") == 2


def test_a_tier_below_ends_it_sooner(make, time):
    url, objects = "near://?capacity=1MiB&ttl=1h", Objects()
    cache = make(cpu(8), url, opened={url: MemoryTier(objects)})
    store(cache, keys(2))
    assert cache.flush()
    time.pass_by(HOUR - 1)
    cache.step()
    assert len(objects) == 2
    time.pass_by(3)
    cache.flush()
    assert objects == {}
    assert look(cache, keys(2)) == ["cpu"] * 2, "the slab has no ttl"


@pytest.mark.parametrize("query", ["", "&ttl=1d"])
def test_a_restart_keeps_the_time_exactly(make, time, query):
    url, objects = f"near://?capacity=1MiB{query}", Objects()
    first = make(cpu(8), url, opened={url: MemoryTier(objects)})
    store(first, keys(1, "short"), ttl=10)
    store(first, keys(1, "long"), ttl=100)
    first.close()
    time.pass_by(8)
    second = make(cpu(8), url, opened={url: MemoryTier(objects)})
    assert look(second, keys(1, "long")) == ["near"]
    assert look(second, keys(1, "short")) == ["near"]
    second.close()
    time.pass_by(3)
    third = make(cpu(8), url, opened={url: MemoryTier(objects)})
    assert look(third, keys(1, "long")) == ["near"]
    assert look(third, keys(1, "short")) == []
    assert missed(third, "expired") == 1
    third.flush()
    assert [name.key for name in objects] == keys(1, "long")


def test_an_object_from_before_ttls_does_not_end_by_itself(make, time):
    url, objects = "near://?capacity=1MiB", Objects()
    make(cpu(8), url, opened={url: MemoryTier(objects)})
    store(first := make(cpu(8), url, opened={url: MemoryTier(objects)}), keys(1))
    first.close()
    (data,) = objects.values()
    assert data[120:128] == bytes(8)
    time.pass_by(400 * DAY)
    assert look(make(cpu(8), url, opened={url: MemoryTier(objects)}), keys(1)) == ["near"]


def test_a_tier_that_is_asked_gives_nothing_expired(make, time):
    url, objects = "far://", Objects()
    tier = MemoryTier(objects)
    tier.keeps = False
    cache = make(cpu(8), url, opened={url: tier})
    store(cache, keys(2), ttl=10)
    assert cache.flush()
    time.pass_by(20)
    assert len(objects) == 2
    assert look(cache, keys(2)) == []
    assert missed(cache, "expired") == 2
    cache.flush()
    assert keys(2)[0] not in {name.key for name in objects}


def test_a_chunk_that_ends_while_it_is_read_is_not_served(make, time):
    """It was written before the tier had a ttl: that it is over now is known from the scan alone."""
    objects, gate = Objects(), Gate()
    plain, url = "near://?capacity=1MiB", "near://?capacity=1MiB&ttl=1h"
    store(first := make(cpu(8), plain, opened={plain: MemoryTier(objects)}), keys(1))
    first.close()
    cache = make(cpu(8), url, opened={url: SlowTier(MemoryTier(objects), gate)})
    assert cache.flush()
    gate.hold()
    match = cache.match(keys(1), ONE)
    cache.prefetch(match)
    assert match.pending_loads == 1
    time.pass_by(2 * HOUR)
    for _ in range(3):
        cache.step()
    gate.open()
    assert (cache.wait(match).chunks, match.cut_reason) == (0, "expired")
    cache.release(match)
    assert look(cache, keys(1)) == []
    assert cache.flush()
    assert not objects
    assert cache.metrics.value("lmtier_expired_chunks_total", tier="near") == 1


def test_a_bring_also_asks_tiers_that_must_be_asked(make):
    url, tier = "far://", MemoryTier()
    tier.keeps = False
    cache = make(cpu(8), url, opened={url: tier})
    store(cache, keys(2))
    assert cache.flush()
    store(cache, keys(8, "what fills the slab"))
    assert cache.flush()
    brought = cache.wait(cache.bring(keys(2), ONE, deadline=5))
    assert brought.sources == ["far"] * 2
    cache.release(brought)


def test_a_step_of_the_wall_clock_ends_nothing_early(make, time):
    url, objects = "near://?capacity=1MiB&ttl=1h", Objects()
    cache = make(cpu(8), url, opened={url: MemoryTier(objects)})
    store(cache, keys(4), ttl=HOUR)
    assert cache.flush()
    time.wall += 2 * DAY
    for entry in cache.index.entries():
        cache.memory.discard(entry.key)
    assert look(cache, keys(4)) == ["near"] * 4
    time.wall -= 4 * DAY
    time.pass_by(HOUR)
    assert look(cache, keys(4)) == []


def test_it_is_written_again_below_once_the_old_one_is_gone(make, time):
    url, objects = "near://?capacity=1MiB&ttl=10s", Objects()
    cache = make(cpu(8), url, opened={url: MemoryTier(objects)})
    store(cache, keys(2), ttl=10)
    assert cache.flush()
    time.pass_by(10)
    assert store(cache, keys(2)) == 2
    assert cache.flush()
    assert len(objects) == 2
    time.pass_by(5)
    for entry in cache.index.entries():
        cache.memory.discard(entry.key)
    assert look(cache, keys(2)) == ["near"] * 2


def test_a_changed_end_in_a_header_is_noticed():
    page, name = memoryview(bytearray(PAGE)), Name(keys(1)[0], LAYOUT.whole)
    payload = memoryview(bytes(ROOM))
    objects.seal(page, Header(name, LAYOUT, ONE.sizes[0], expires=1_700_000_000_000), payload)
    assert objects.check(page, payload, name).expires == 1_700_000_000_000
    for at in range(116, 128):
        broken = memoryview(bytearray(page))
        broken[at] ^= 1
        with pytest.raises(CorruptObject, match="header checksum"):
            objects.check(broken, payload, name)


# ---- before a request


def test_what_is_brought_up_is_no_request(make):
    url, objects = "near://?capacity=1MiB", Objects()
    cache = make(cpu(8), url, opened={url: MemoryTier(objects)})
    store(cache, keys(4))
    assert cache.flush()
    for entry in cache.index.entries()[1:]:
        cache.memory.discard(entry.key)
    match = cache.bring(keys(6), ONE, deadline=10)
    cache.wait(match)
    assert match.sources == ["cpu", "near", "near", "near"]
    cache.release(match)
    value = cache.metrics.value
    assert value("lmtier_asked_tokens_total") == value("lmtier_lookups_total") == 0
    assert value("lmtier_prefetched_tokens_total", tier="near") == 3 * C
    assert look(cache, keys(4)) == ["cpu"] * 4


def test_disk_files_carry_the_time(make, time, tmp_path: Path):
    url = f"disk://{tmp_path}?capacity=1MiB"
    cache = make(cpu(8), url)
    store(cache, keys(1), ttl=10)
    cache.close()
    (file,) = [path for path in tmp_path.glob("*/*") if path.parent.name != "partial"]
    assert int.from_bytes(file.read_bytes()[120:128], "little") == int((time.wall + 10) * 1000)
