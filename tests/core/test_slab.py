"""Extents never overlap, never leak, and merge again."""

import ctypes
import gc
import os
import random
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.core.slab import Extents, Memory, Slab, nodes_to_use, numbers_of
from lmtier.errors import MisuseError
from lmtier.format.layout import PAGE, padded

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


def test_small_neighbours_merge_into_a_large_piece():
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


def test_a_shared_slab_is_one_memory_for_all_with_its_file():
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


def policies(memory: Memory) -> list[str]:
    """What the kernel says of the pages from here on: `7f00 prefer:0 ...`, a line a stretch."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory.view))
    found = []
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        at, policy = line.split()[:2]
        if start <= int(at, 16) < start + memory.nbytes:
            found.append(policy)
    return found


@pytest.mark.skipif(not nodes_to_use(), reason="this kernel or sandbox has no NUMA")
def test_memory_prefers_the_nodes_that_it_is_spread_over(tmp_path):
    node = nodes_to_use()[-1]
    with (tmp_path / "shared").open("w+b") as file:
        file.truncate(130 * MiB)
        for memory in (Memory(130 * MiB), Memory(130 * MiB, file.fileno())):
            assert memory.spread([node])
            assert set(policies(memory)) == {f"prefer:{node}"}
    assert not Memory(MiB).spread([1000]), "there is no such node"


@pytest.mark.skipif(not nodes_to_use(), reason="this kernel or sandbox has no NUMA")
def test_a_process_bound_to_a_node_keeps_its_memory_on_it():
    set_mempolicy = {"x86_64": 238, "aarch64": 237}[os.uname().machine]
    child = os.fork()
    if not child:  # MPOL_BIND to the first node
        mask = ctypes.c_ulong(1 << nodes_to_use()[0])
        is_set = ctypes.CDLL(None).syscall(set_mempolicy, 2, ctypes.byref(mask), ctypes.c_ulong(65)) == 0
        os._exit(0 if is_set and nodes_to_use() == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_sets_of_numbers_are_read_as_the_kernel_writes_them():
    assert numbers_of("0-2,5\n") == {0, 1, 2, 5}
    assert numbers_of("3") == {3}
    assert numbers_of("\n") == set()


in_pieces = given(
    st.lists(st.integers(1, 4), max_size=12),
    st.sets(st.integers(0, 11)),
    st.sets(st.integers(0, 11)),
    st.data(),
)


def left_of(
    slab: Extents, sizes: list[int], gone: set[int], stuck: set[int]
) -> tuple[dict[int, int], set[int]]:
    """Pieces of these sizes in it, some of them freed: what is left, and which of that may move."""
    taken = [offset for size in sizes for offset in slab.allocate([size * PAGE]) or ()]
    slab.free([offset for number, offset in enumerate(taken) if number in gone])
    left = {offset: slab._taken[offset] for number, offset in enumerate(taken) if number not in gone}
    return left, {at for number, at in enumerate(taken) if at in left and number not in stuck}


@settings(deadline=None)
@in_pieces
def test_a_window_is_the_cheapest_place_and_can_be_vacated(sizes, gone, stuck, data):
    slab = Extents(24 * PAGE)
    left, movable = left_of(slab, sizes, gone, stuck)
    need = data.draw(st.integers(1, 24)) * PAGE

    def within(start: int) -> set[int]:
        return {at for at, size in left.items() if start - size < at < start + need}

    costs = [
        sum(left[at] for at in within(start))
        for start in range(0, 24 * PAGE - need + 1, PAGE)
        if within(start) <= movable
    ]
    found = slab.window(need, movable)
    assert (found is None) == (not costs)
    if found is None:
        return
    start, offsets = found
    assert set(offsets) == within(start)
    assert sum(left[at] for at in offsets) == min(costs)
    places = slab.vacate(start, need, offsets)
    assert all(place >= start + need or place + left[at] <= start for at, place in places.items())
    slab.check()
    slab.free(places)
    slab.check()
    if len(places) == len(offsets):
        assert slab.allocate([need]) is not None
    slab.check()


@settings(deadline=None)
@in_pieces
def test_sliding_joins_pieces_wherever_that_moves_the_least(sizes, gone, stuck, data):
    slab = Slab(24 * PAGE)
    left, movable = left_of(slab, sizes, gone, stuck)
    for offset, size in left.items():
        slab.view(offset, size)[:] = (offset // PAGE + 1).to_bytes(2) * (size // 2)
    need = data.draw(st.integers(1, 24)) * PAGE
    costs = []
    for i, j in combinations(range(25), 2):
        inside = {at for at, size in left.items() if at < j * PAGE and at + size > i * PAGE}
        is_whole = all(i * PAGE <= at and at + left[at] <= j * PAGE for at in inside)
        bytes_inside = sum(left[at] for at in inside)
        if is_whole and inside <= movable and (j - i) * PAGE - bytes_inside >= need:
            costs.append(bytes_inside)
    most = data.draw(st.integers(0, 60)) * PAGE
    places = slab.slide(need, movable, most)
    possible = bool(costs) and min(costs) <= most
    assert bool(places) == (possible and min(costs) > 0)
    for offset, place in places.items():
        slab.move(offset, place)
    slab.check()
    for offset, size in left.items():
        place = places.get(offset, offset)
        assert slab.view(place, size) == (offset // PAGE + 1).to_bytes(2) * (size // 2), (
            "its bytes came along"
        )
    if possible:
        assert sum(left[offset] for offset in places) == min(costs)
        assert slab.allocate([need]) is not None
    slab.check()


def test_chunks_being_read_are_not_pushed_aside():
    slab = Slab(8 * PAGE)
    taken = slab.allocate([PAGE] * 8)
    assert taken is not None
    slab.free(taken[1::2])  # every second page is free, and the others are read
    assert slab.slide(2 * PAGE, [], 100 * PAGE) == {}
    slab.check()
    assert slab.used == 4 * PAGE
