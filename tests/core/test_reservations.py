"""Reservations: what is missing gets extents, and is found when all of it has come, or never."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.cache_metrics import CacheMetrics
from lmtier.core.grant import Grant
from lmtier.core.index import Index
from lmtier.core.lower_tiers import LowerTiers
from lmtier.core.match import CPU, EntryState
from lmtier.core.memory import MemoryPlace
from lmtier.core.reservations import Reservations, at_once
from lmtier.core.slab import Slab
from lmtier.errors import MisuseError
from lmtier.format.layout import PAGE, LayerShape, Shard, form_of
from lmtier.format.objects import mark_room
from lmtier.observe.follower import CacheObservers
from lmtier.observe.metrics import Metrics
from lmtier.rules.lifetimes import FOREVER
from lmtier.rules.policy import make_policy
from lmtier.testing import opaque_layout

PAGES = 8
LAYOUT = opaque_layout(PAGE)
ONE = form_of(LAYOUT, (LAYOUT.whole,))
KEYS = [b"name" + number.to_bytes(28, "big") for number in range(2 * PAGES)]


class Made(Reservations):
    def __init__(self) -> None:
        slab, self.metrics = Slab(PAGES * PAGE), Metrics()
        index = Index(slab.capacity, make_policy("lru"))
        gauges = CacheMetrics(self.metrics, {CPU: index}, LowerTiers(), LAYOUT.chunk_tokens)
        leaving = gauges.evict, lambda entry: not entry.leases
        self.room = MemoryPlace(slab, index, self.metrics, *leaving, lambda: 0.0, FOREVER)
        super().__init__(self.room, [], gauges, CacheObservers())

    def save(self, keys, form=ONE, *, first=0, most=99) -> Grant:
        return at_once(self.reserving)(keys, form, first, FOREVER, "", most)

    def tokens(self, name: str, **labels: str) -> float:
        return self.metrics.value(f"lmtier_{name}_tokens_total", **labels) / LAYOUT.chunk_tokens


@pytest.fixture
def made():
    made = Made()
    yield made
    made.room.index.check()
    assert made.room.slab.used == made.room.index.used
    assert not made.open


def test_only_missing_chunks_get_extents(made):
    made.commit(made.save(KEYS[:2]), None, None)
    reservation = made.save(KEYS[:4])
    assert (sorted(reservation.chunks), reservation.leading_stored, reservation.dropped) == ([2, 3], 2, 0)
    made.commit(reservation, None, {2: b"mark"})
    assert made.room.index.get(KEYS[2]).marks == (b"mark",)
    assert {made.room.index.get(key).state for key in KEYS[:4]} == {EntryState.READY}
    assert (made.tokens("skipped"), made.tokens("stored", tier=CPU)) == (2, 4)
    assert not made.save(KEYS[:4]).chunks


def test_a_prefix_is_reserved_and_never_a_hole(made):
    reservation = made.save(KEYS)
    assert (sorted(reservation.chunks), reservation.dropped) == ([*range(PAGES)], PAGES)
    made.commit(reservation, None, None)
    assert made.tokens("dropped", tier=CPU, reason="no_room") == PAGES


def test_a_reservation_covers_only_the_range_asked_for(made):
    reservation = made.save(KEYS[:6], first=1, most=2)
    assert sorted(reservation.chunks) == [1, 2]
    assert reservation.dropped == 3
    assert made.tokens("dropped", tier=CPU, reason="too_many") == 3
    made.abort(reservation, None)
    assert not len(made.room.index)
    assert made.tokens("dropped", tier=CPU, reason="aborted") == 2


def test_chunks_show_with_the_last_of_their_shards(made):
    """A shard comes once."""
    layout = LAYOUT
    wide = layout.uniform(
        layers=2, heads=2, head_dim=64, dtype="bf16", block_tokens=2, chunk_tokens=2, packing="token"
    )
    parts = tuple(Shard(0, 2, head, head + 1) for head in range(2))
    made._gauges.chunk_tokens = 2
    reservation = made.save(KEYS[:1], form_of(wide, parts))
    with pytest.raises(MisuseError, match="2 shards: pass the one"):
        made.commit(reservation, None, None)
    made.commit(reservation, parts[1], None)
    entry = made.room.index.get(KEYS[0])
    assert entry.state is EntryState.FILLING
    with pytest.raises(MisuseError, match="committed or aborted before"):
        made.commit(reservation, parts[1], None)
    made.commit(reservation, parts[0], None)
    assert made.room.index.get(KEYS[0]).state is EntryState.READY
    assert not entry.leases


def test_aborted_room_returns_when_the_last_shard_ended(made):
    wide = LAYOUT.uniform(
        layers=2, heads=2, head_dim=64, dtype="bf16", block_tokens=2, chunk_tokens=2, packing="token"
    )
    parts = tuple(Shard(0, 2, head, head + 1) for head in range(2))
    made._gauges.chunk_tokens = 2
    reservation = made.save(KEYS[:1], form_of(wide, parts))
    made.abort(reservation, parts[0])
    assert KEYS[0] not in made.room.index
    assert made.room.slab.used
    made.commit(reservation, parts[1], None)
    assert not made.room.slab.used


def test_chunks_cleared_while_written_never_show(made):
    reservation = made.save(KEYS[:2])
    made.room.discard(KEYS[0])
    made.commit(reservation, None, None)
    assert [key in made.room.index for key in KEYS[:2]] == [False, True]
    assert made.tokens("dropped", tier=CPU, reason="cleared") == 1


def test_a_reservation_of_another_cache_is_refused(made):
    """A fingerprint that no header has room for is refused as well."""
    other = Made()
    reservation = made.save(KEYS[:1])
    with pytest.raises(MisuseError, match="another cache made"):
        other.commit(reservation, None, None)
    with pytest.raises(MisuseError, match="a mark has 5000 bytes"):
        made.commit(reservation, None, {0: bytes(5000)})
    with pytest.raises(MisuseError, match="occurs twice"):
        made.save(KEYS[:1] * 2)
    made.abort(reservation, None)


def test_a_mark_has_to_fit_also_where_objects_are_sealed(made):
    """Found too late, each store of it would fail there, and the tier be paused for all others."""
    layout = replace(LAYOUT, layers=tuple(LayerShape(1, 1 + number % 2, 0) for number in range(150)))
    reservation = made.save(KEYS[:1], form_of(layout, (layout.whole,)))
    with pytest.raises(MisuseError, match="shorten it"):
        made.commit(reservation, None, {0: bytes(mark_room(layout))})
    made.commit(reservation, None, {0: bytes(mark_room(layout, is_sealed=True))})


MANY = [hashlib.sha256(bytes([number % 256, number // 256])).digest() for number in range(300)]


@pytest.fixture
def cache():
    with Cache(Config(tiers=(f"cpu://?capacity={400 * PAGE}",), chunk_tokens=LAYOUT.chunk_tokens)) as cache:
        yield cache
        cache.check()


def test_others_reserve_between_the_steps_of_a_large_one(cache):
    steps = cache.reserve_in_steps(MANY, ONE)
    next(steps)
    cache.check()
    other = cache.reserve(MANY[:200], ONE)
    assert (other.leading_stored, sorted(other.chunks)) == (128, [*range(128, 200)])
    large = at_once(lambda: steps)()
    assert sorted(large.chunks) == [*range(128), *range(200, 300)]
    cache.commit(large)
    assert cache.match(MANY, ONE).chunks == 128
    cache.commit(other)
    assert cache.match(MANY, ONE).chunks == 300


def test_others_reserve_within_what_a_large_one_lacks(cache):
    steps = cache.reserve_in_steps(MANY, ONE)
    next(steps)
    other = cache.reserve(MANY[:201], ONE, first=200)
    assert [*other.chunks] == [200]
    large = at_once(lambda: steps)()
    assert sorted(large.chunks) == [*range(200), *range(201, 300)]
    cache.commit(other)
    cache.commit(large)
    assert cache.match(MANY, ONE).chunks == 300


def test_what_leaves_between_the_steps_is_stored_again(cache):
    cache.commit(cache.reserve([MANY[250]], ONE))
    steps = cache.reserve_in_steps(MANY, ONE)
    next(steps)
    entry = cache.index.get(MANY[250])
    assert entry is not None
    cache.discard(entry.key, entry.form)
    large = at_once(lambda: steps)()
    assert (sorted(large.chunks), large.dropped) == ([*range(300)], 0)
    cache.commit(large)
    assert cache.match(MANY, ONE).chunks == 300


def test_a_reservation_dropped_between_steps_leaves_nothing(cache):
    steps = cache.reserve_in_steps(MANY, ONE)
    next(steps)
    next(steps)
    steps.close()
    assert cache.slab.used == cache.index.used == 0
    cache.commit(cache.reserve(MANY, ONE))
    assert cache.match(MANY, ONE).chunks == 300


def test_chunks_cleared_between_steps_never_show(cache):
    steps = cache.reserve_in_steps(MANY, ONE)
    next(steps)
    cache.clear(force=True)
    cache.check()
    large = at_once(lambda: steps)()
    cache.check()
    cache.commit(large)
    assert cache.match(MANY, ONE).chunks == 0
    assert len(cache.index) == 300 - 128


def test_a_large_reservation_makes_room_and_keeps_its_head(cache):
    old = [hashlib.sha256(b"old" + key).digest() for key in MANY]
    cache.commit(cache.reserve(MANY[:50], ONE))
    cache.commit(cache.reserve(old, ONE))
    cache.commit(cache.reserve(MANY, ONE))
    assert cache.match(MANY, ONE).chunks == 300


def test_a_lowered_capacity_bounds_what_is_reserved(cache):
    cache.change(replace(cache.config, tiers=(f"cpu://?capacity={100 * PAGE}",)))
    reservation = cache.reserve(MANY, ONE)
    assert (sorted(reservation.chunks), reservation.dropped) == ([*range(100)], 200)
    cache.check()
