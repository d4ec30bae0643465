"""Extents never overlap, never leak, and merge again."""

import gc
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.errors import MisuseError
from lmtier.layout import PAGE, padded
from lmtier.slab import Memory, Slab

MiB = 1 << 20


def test_what_is_written_to_an_extent_stays_in_it():
    slab = Slab(8 * PAGE)
    offsets = slab.allocate([PAGE, 2 * PAGE + 1, 5])
    assert offsets is not None
    for mark, (offset, size) in enumerate(zip(offsets, [PAGE, 2 * PAGE + 1, 5], strict=True), 1):
        slab.view(offset, size)[:] = bytes([mark]) * size
    for mark, (offset, size) in enumerate(zip(offsets, [PAGE, 2 * PAGE + 1, 5], strict=True), 1):
        assert bytes(slab.view(offset, size)) == bytes([mark]) * size
    slab.check()


def test_allocation_is_all_or_nothing():
    slab = Slab(4 * PAGE)
    assert slab.allocate([PAGE, PAGE, 3 * PAGE]) is None
    assert slab.used == 0
    assert slab.allocate([4 * PAGE]) == (0,)
    slab.check()


def test_neighbours_merge_so_that_small_pieces_become_a_large_one():
    slab = Slab(6 * PAGE)
    offsets = slab.allocate([PAGE] * 6)
    assert offsets is not None
    for offset in random.Random(1).sample(offsets, 6):
        slab.free([offset])
        slab.check()
    assert slab.allocate([6 * PAGE]) is not None


def test_freeing_twice_is_an_error():
    slab = Slab(2 * PAGE)
    offsets = slab.allocate([PAGE])
    assert offsets is not None
    slab.free(offsets)
    with pytest.raises(MisuseError, match="freed twice"):
        slab.free(offsets)


def test_padding_is_zeroed_and_the_payload_is_not():
    slab = Slab(2 * PAGE)
    (offset,) = slab.allocate([10]) or ()
    slab.view(offset, PAGE)[:] = b"x" * PAGE
    slab.clear_padding(offset, 10)
    assert bytes(slab.view(offset, PAGE)) == b"x" * 10 + bytes(PAGE - 10)


def test_prefault_does_not_change_what_is_written():
    slab = Slab(64 * PAGE)
    slab.view(0, 64 * PAGE)[:] = bytes(range(256)) * (64 * PAGE // 256)
    slab.prefault()
    assert bytes(slab.view(0, 64 * PAGE)) == bytes(range(256)) * (64 * PAGE // 256)


def test_prefault_stops_when_told():
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return True

    Slab(PAGE).prefault(stopped)
    assert asked == [1]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE)), max_size=60))
def test_any_mix_of_allocate_and_free_keeps_the_books(steps: list[tuple[bool, int]]):
    slab = Slab(32 * PAGE)
    held: list[tuple[int, int]] = []
    for take, size in steps:
        if take or not held:
            offsets = slab.allocate([size])
            if offsets is not None:
                held.append((offsets[0], padded(size)))
        else:
            offset, _ = held.pop(size % len(held))
            slab.free([offset])
        slab.check()
        assert slab.used == sum(size for _, size in held)
    for offset, _ in held:
        slab.free([offset])
    slab.check()
    assert slab.allocate([32 * PAGE]) == (0,)


# ---- shared


def test_a_shared_slab_is_the_same_memory_for_whoever_has_its_file():
    slab = Slab(8 * MiB + PAGE, hugepages=True, shared=True)
    (offset,) = slab.allocate([PAGE]) or ()
    slab.view(offset, 5)[:] = b"hello"
    slab.prefault()
    assert slab.fd is not None
    other = Memory(slab.capacity, slab.fd)
    assert bytes(other.view[offset : offset + 5]) == b"hello"
    other.view[offset] = ord("j")
    assert bytes(slab.view(offset, 5)) == b"jello", "prefaulting changes nothing that is there"


def test_a_view_outlives_the_slab_it_came_from():
    slab = Slab(4 * PAGE, shared=True)
    view = slab.view(0, PAGE)
    view[:5] = b"hello"
    del slab
    gc.collect()
    assert bytes(view[:5]) == b"hello"


def test_memory_and_file_of_a_slab_are_given_back():
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("lmtier-slab")

    before = mapped()
    slab = Slab(4 * PAGE, shared=True)
    fd = slab.fd
    assert fd is not None
    assert mapped() == before + 1
    del slab
    gc.collect()
    assert mapped() == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
