"""Room for new chunks: who leaves for them, what is moved for them, and whose time is over."""

from __future__ import annotations

import pytest

from lmtier.core.index import Index
from lmtier.core.match import EVICTED, EXPIRED, Entry, EntryState
from lmtier.core.memory import MemoryPlace
from lmtier.core.slab import Slab
from lmtier.format.layout import PAGE, form_of
from lmtier.observe.metrics import Metrics
from lmtier.rules.lifetimes import FOREVER
from lmtier.rules.policy import make_policy
from lmtier.testing import opaque_layout

PAGES = 8
SMALL, LARGE = (form_of(layout, (layout.whole,)) for layout in map(opaque_layout, (PAGE, 2 * PAGE)))


class Made(MemoryPlace):
    """Room of its own, with a clock, and a list of what left for others."""

    def __init__(self) -> None:
        slab = Slab(PAGES * PAGE)
        index = Index(slab.capacity, make_policy("lru"))
        self.now = 0.0
        self.left: list[Entry] = []
        super().__init__(
            slab, index, Metrics(), self.left.extend, lambda entry: not entry.leases, lambda: self.now, 10.0
        )

    def add(self, name: int, form=SMALL, parent: Entry | None = None, end: float = FOREVER) -> Entry | None:
        offsets = self.allocate(key(name), form, parent)
        if offsets is None:
            return None
        entry = self.index.add(key(name), form, form.slab_bytes, EntryState.FILLING, parent)
        entry.offsets = offsets
        self.slab.view(offsets[0], 32)[:] = entry.key
        self.live_until(end, entry)
        self.index.make_ready(entry)
        return entry


def key(name: int) -> bytes:
    return name.to_bytes(32, "big")


@pytest.fixture
def room():
    made = Made()
    yield made
    made.slab.check()
    made.index.check()
    assert made.slab.used == made.index.used
    for entry in made.index.entries():
        assert made.slab.view(entry.offsets[0], 32) == entry.key


def test_the_oldest_leaves_and_its_extents_are_reused(room):
    first = room.add(0)
    offsets = first.offsets
    for name in range(1, PAGES):
        room.add(name)
    assert not room.left
    assert room.add(PAGES).offsets == offsets
    assert room.left == [first]
    assert first.state is EntryState.GONE
    assert not first.offsets
    assert room.index.why_gone(first.key) == EVICTED


def test_room_for_a_prompt_is_made_at_once(room):
    """The prompt's own head stays."""
    run = [room.add(0)]
    for name in range(1, PAGES):
        room.add(name)
    room.make([key(0), *map(key, range(100, 103))], 3 * SMALL.slab_bytes, run[0])
    assert [entry.key for entry in room.left] == [key(1), key(2), key(3)]
    assert run[0].state is EntryState.READY
    room.make([key(0), key(100)], SMALL.slab_bytes, run[0])
    assert len(room.left) == 3, "there is room enough"


def test_room_for_a_gap_is_not_made_of_what_lies_before_it(room):
    head, _, _ = room.add(0), room.add(2), room.add(3)
    others = [room.add(10 + n) for n in range(PAGES - 3)]
    room.make([key(n) for n in range(4)], PAGE, head)
    assert len(room.left) == 1
    assert head.state is EntryState.READY
    assert not head.leases
    assert others


def test_nothing_leaves_if_that_would_not_be_enough(room):
    for name in range(PAGES):
        room.index.lease(room.add(name))
    assert room.no_room_at == float("-inf")
    assert room.add(PAGES) is None
    assert not room.left
    assert room.no_room_at > 0
    for entry in room.index.entries():
        room.release(entry)


def test_free_pieces_are_joined_by_moving_unread_chunks(room):
    entries = [room.add(name) for name in range(PAGES)]
    for entry in entries[::2]:
        room.discard(entry.key)
    assert room.add(100, LARGE) is not None
    assert not room.left
    assert room.index.free == 2 * PAGE


def test_what_somebody_reads_is_not_moved(room):
    entries = [room.add(name) for name in range(PAGES)]
    for entry in entries[1::2]:
        room.index.lease(entry)
    places = [entry.offsets for entry in entries[1::2]]
    for entry in entries[::2]:
        room.discard(entry.key)
    assert room.add(100, LARGE) is None
    assert [entry.offsets for entry in entries[1::2]] == places
    for entry in entries[1::2]:
        room.release(entry)


def test_moving_takes_no_more_than_a_moment_of_a_step(room, monkeypatch):
    monkeypatch.setattr("lmtier.core.memory._COMPACTING", -1.0)
    for entry in [room.add(name) for name in range(PAGES)][::2]:
        room.discard(entry.key)
    assert room.add(100, LARGE) is None
    monkeypatch.setattr("lmtier.core.memory._COMPACTING", 1.0)
    room.begin_step()
    assert room.add(100, LARGE) is not None


def test_a_reader_keeps_the_bytes_of_a_deleted_chunk(room):
    entry = room.add(0)
    room.index.lease(entry)
    room.discard(entry.key)
    assert entry.offsets
    used = room.slab.used
    room.release(entry)
    assert not entry.offsets
    assert room.slab.used == used - SMALL.slab_bytes


def test_next_victims_are_named_only_when_memory_is_taken(room):
    assert room.next_victims() == []
    for name in range(PAGES):
        room.add(name)
    assert [entry.key for entry in room.next_victims()][:2] == [key(0), key(1)]
    assert room.next_victims() == []


def test_the_sooner_time_of_request_and_tier_ends_a_chunk(room):
    short, long = room.add(0, end=3.0), room.add(1)
    room.now = 3.0
    room.expire_among([long.key])
    assert key(0) in room.index
    room.expire_among([short.key, long.key, key(2)])
    assert key(0) not in room.index
    assert room.index.why_gone(key(0)) == EXPIRED
    room.now = 10.0
    assert not room.expire(), "the second is not over"
    room.now = 11.0
    assert not room.expire()
    assert not len(room.index)
