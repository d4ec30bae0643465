"""What waits to be written: records stay in the slab meanwhile, chunks need not."""

from __future__ import annotations

import pytest

from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState
from lmtier.core.write_queue import WriteQueue
from lmtier.format.layout import form_of
from lmtier.format.objects import Selector
from lmtier.rules.policy import make_policy
from lmtier.testing import opaque_layout
from tests.stopwatch import Stopwatch

LAYOUT = opaque_layout(4096)
FORM = form_of(LAYOUT, (LAYOUT.whole,))


@pytest.fixture
def slab() -> Index:
    """Keys that begin with r are records."""
    return Index(8 * 4096, make_policy("lru"), is_record=lambda key: key.startswith(b"r"))


@pytest.fixture
def writes(slab):
    writes = WriteQueue(slab, slab.release, lambda key: None, most=2)
    yield writes
    writes.check()
    slab.check()


def stored(slab: Index, key: bytes) -> Entry:
    entry = slab.add(key, FORM, 4096, EntryState.FILLING, None)
    slab.make_ready(entry)
    return entry


def test_a_queued_record_is_leased_and_a_chunk_is_not(slab, writes):
    chunk, record = stored(slab, b"chunk"), stored(slab, b"record")
    writes.add(chunk)
    writes.add(record)
    assert (chunk.leases, record.leases, writes.leased_bytes) == (0, 1, 4096)
    assert writes.take(b"record") is record
    assert (record.leases, writes.leased_bytes) == (0, 0)


def test_queued_chunks_and_records_are_bounded(slab, writes):
    """Records take a quarter of the slab at most."""
    for key in (b"a", b"b"):
        assert writes.has_room_for(stored(slab, key))
        writes.add(slab.get(key))
    assert not writes.has_room_for(stored(slab, b"c"))
    for key in (b"r1", b"r2"):
        assert writes.has_room_for(stored(slab, key))
        writes.add(slab.get(key))
    assert not writes.has_room_for(stored(slab, b"r3"))
    assert not writes.has_room_for_record(4096)


def test_what_is_postponed_comes_after_the_others(slab, writes):
    for key in (b"a", b"b"):
        writes.add(stored(slab, key))
    writes.postpone(writes.next())
    assert writes.next() == b"b"


def test_queued_records_can_be_released_before_the_write(slab, writes):
    """The queue forgets what has left the slab."""
    writes.add(stored(slab, b"record"))
    writes.add(stored(slab, b"chunk"))
    writes.unlease_queued(Selector(b"re"))
    assert (writes.leased_bytes, len(writes)) == (0, 2)
    slab.remove(slab.get(b"record"))
    writes.forget_missing()
    assert b"record" not in writes
    assert b"chunk" in writes


def test_a_turn_costs_the_same_however_many_wait():
    """A server that is behind has as many values here as a quarter of its memory holds."""
    count = 200_000
    slab = Index(count * 4096, make_policy("lru"))
    writes = WriteQueue(slab, lambda entry: None, lambda key: None, most=count)
    for number in range(count):
        writes.add(stored(slab, b"%d" % number))
    watch = Stopwatch()
    while len(writes):
        writes.take(writes.next())
    assert watch.seconds() < 3  # it takes .1; it took 6 when each turn passed all that had left


def test_closing_lets_go_of_what_is_leased(slab, writes):
    writes.add(stored(slab, b"record"))
    writes.close()
    assert slab.leased_bytes == 0
