"""One big buffer, allocated at start, and its extents: allocate, free, view. No keys, no policy.

Extents are whole pages. A freed extent waits, by size, for the next object of that size, which is the usual
case in a cache. If none fits, all waiting extents are merged with their neighbours, so memory that was cut
for one layout serves another later. Otherwise it is best fit: O(log of the number of free sizes).
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lmtier import forks
from lmtier.errors import MisuseError, log
from lmtier.format.objects import PAGE, padded

Counts: TypeAlias = "npt.NDArray[np.int64]"

_MADV_HUGEPAGE = 14
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_HUGE = 2 << 20
_PREFAULT_STEP = 8 << 20
_NODE_STEP = 64 << 20
_WIPE_STEP = 8 << 20  # a millisecond or two of the owner
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_GET_MEMPOLICY, _MBIND = {"x86_64": (239, 237), "aarch64": (236, 235)}.get(os.uname().machine, (-1, -1))
"""The numbers of system calls for which the C library has no functions."""
SHARED = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
# If a process truncated the file, all others would get a SIGBUS.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
]


class Memory:
    """Bytes of a file, or anonymous memory, at an address that suits huge pages (`mmap.mmap` promises none).

    It is unmapped when its last view is gone, not before.
    """

    def __init__(self, nbytes: int, fd: int = -1, *, is_writable: bool = True) -> None:
        self.nbytes = nbytes
        map_flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        private_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # Reserve addresses for more than is needed, then map over the aligned part of them.
        reserved = _map(None, nbytes + _HUGE, _PROT_NONE, private_flags, -1)
        self._start = -(-reserved // _HUGE) * _HUGE
        # A separate class, because plain ctypes arrays take no finalizer.
        array: Any = type("Bytes", (ctypes.c_char * nbytes,), {}).from_address(self._start)  # type: ignore[attr-defined]
        unmap = weakref.finalize(
            array, _LIBC.munmap, ctypes.c_void_p(reserved), ctypes.c_size_t(nbytes + _HUGE)
        )
        # When the interpreter ends, threads of tiers may still read it; the kernel unmaps it.
        unmap.atexit = False
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        _map(self._start, nbytes, protection, map_flags | _MAP_FIXED, fd)
        self.advise(_MADV_DONTDUMP)  # prompts can be read out of KV, and core dumps are sent to others
        view = memoryview(array).cast("B")
        self.view = view if is_writable else view.toreadonly()

    def forget(self) -> None:
        """Replace the memory by zeros that are private to this process."""
        nobodys = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        _map(self._start, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, nobodys | _MAP_FIXED, -1)

    def advise(self, advice: int, at: int = 0, nbytes: int | None = None) -> bool:
        """Returns whether the kernel accepted the advice.

        A plain mmap.madvise would hold the GIL meanwhile.
        """
        start = ctypes.c_void_p(self._start + at)
        size = ctypes.c_size_t(self.nbytes if nbytes is None else nbytes)
        return not _LIBC.madvise(start, size, advice)

    def spread(self, nodes: Sequence[int]) -> bool:
        """Prefer these NUMA nodes in turn, a stretch each, for pages that are not touched yet.

        Rejected: the kernel's own interleaving. It works on small pages, and the first small page of a huge
        page decides where the whole page lies: with two nodes, always on the first.
        """
        for number, at in enumerate(range(0, self.nbytes, _NODE_STEP)):
            start = ctypes.c_void_p(self._start + at)
            size = ctypes.c_ulong(min(_NODE_STEP, self.nbytes - at))
            mask, bits = _mask(nodes[number % len(nodes)])
            if _LIBC.syscall(_MBIND, start, size, _MPOL_PREFERRED, mask, bits, 0):
                return False
        return True


def _mask(node: int) -> tuple[ctypes.Array[ctypes.c_ulong], ctypes.c_ulong]:
    """A set of one node as the kernel reads it, and the number of its bits. The kernel reads one bit less."""
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    return words, ctypes.c_ulong(64 * len(words) + 1)


def nodes_to_use() -> list[int]:
    """The NUMA nodes over which this process may spread memory. Empty if it was started under `numactl`."""
    policy = ctypes.c_int(-1)
    if _LIBC.syscall(_GET_MEMPOLICY, ctypes.byref(policy), None, 0, None, 0) or policy.value != _MPOL_DEFAULT:
        return []
    try:
        with open("/proc/self/status") as status, open("/sys/devices/system/node/has_memory") as has_memory:
            allowed = next(line.split()[1] for line in status if line.startswith("Mems_allowed_list:"))
            return sorted(numbers_of(allowed) & numbers_of(has_memory.read()))
    except (OSError, StopIteration):  # a kernel without NUMA, or a sandbox
        return []


def numbers_of(text: str) -> set[int]:
    """Reads `0-2,5`, as the kernel writes sets."""
    nodes: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1) if first else ())
    return nodes


def _map(start: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    address = _LIBC.mmap(start, nbytes, protection, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(error := ctypes.get_errno(), os.strerror(error))
    return int(address)


class Extents:
    """Which ranges of `capacity` bytes are taken. It knows only offsets: the memory may be anywhere."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // PAGE * PAGE
        if self.capacity <= 0:
            raise MisuseError(f"capacity={capacity} is less than a page of {PAGE} bytes")
        self.used = 0
        self._taken: dict[int, int] = {}  # offset -> size
        self._waiting: dict[int, list[int]] = {}  # size -> freed offsets, oldest first
        self._free: dict[int, int] = {}  # offset -> size
        self._ends: dict[int, int] = {}  # end -> offset, of the free ranges
        self._by_size: dict[int, dict[int, None]] = {}  # size -> offsets, oldest first
        self._sizes: list[int] = []  # the keys of _by_size, sorted
        self._add_free(0, self.capacity)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} used {self.used} of {self.capacity}, {len(self._taken)} extents>"

    def allocate(self, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Offsets of extents for all `sizes` (rounded up to pages).

        None: no room, and nothing has changed.
        """
        allocated: list[int] = []
        for size in sizes:
            offsets = self._take(padded(size))
            if not offsets and self._waiting:
                self._merge()
                offsets = self._take(padded(size))
            if not offsets:
                self.free(allocated)
                return None
            allocated += offsets
        return tuple(allocated)

    def allocate_some(self, sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
        """`allocate`, up to `count` times, as long as there is room."""
        found: list[tuple[int, ...]] = []
        if len(sizes) == 1:
            while len(found) < count and (offsets := self._take(padded(sizes[0]), count - len(found))):
                found += [(offset,) for offset in offsets]
        while len(found) < count and (each := self.allocate(sizes)) is not None:
            found.append(each)
        return found

    def free(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            size = self._taken.pop(offset, None)
            if size is None:
                raise MisuseError(f"extent at {offset} is not allocated: freed twice?")
            self.used -= size
            self._waiting.setdefault(size, []).append(offset)

    def window(self, nbytes: int, movable: Collection[int]) -> tuple[int, list[int]] | None:
        """Where `nbytes` in a row could become free at the least cost, and which extents must move for it.

        Only extents in `movable` may move. None: the others leave no such place. O(n log n) in all extents.
        """
        starts, sizes, moved_before, stay = self._in_order(movable)
        at = np.concatenate(([0], starts + sizes))  # a window begins where nothing or an extent ends
        first, last = np.arange(len(at)), np.searchsorted(starts, at + nbytes)
        cost = moved_before[last] - moved_before[first]
        cost[(stay[last] > stay[first]) | (at + nbytes > self.capacity)] = self.capacity + 1
        best = int(np.argmin(cost))
        if cost[best] > self.capacity:
            return None
        return int(at[best]), starts[first[best] : last[best]].tolist()

    def slide(self, nbytes: int, movable: Collection[int], most: int) -> dict[int, int]:
        """Push extents together where that frees `nbytes` in a row at the least cost. Maps old places to new.

        The new places are taken from now on, and the old ones are free. Move the bytes at once, in this
        order, downwards. Empty: it is impossible without moving more than `most` bytes.
        """
        self._merge()
        starts, sizes, moved_before, stay = self._in_order(movable)
        ends = np.concatenate(([0], starts + sizes))
        gaps = np.concatenate((starts, [self.capacity])) - ends  # before each extent, and behind the last
        free = np.concatenate(([0], np.cumsum(gaps)))
        first = np.arange(len(gaps))
        last = np.searchsorted(free, free[:-1] + nbytes) - 1  # the last of the gaps that together are enough
        has_enough = last < len(gaps)
        last = np.minimum(last, len(gaps) - 1)
        cost = moved_before[last] - moved_before[first]
        cost[~has_enough | (stay[last] > stay[first])] = self.capacity + 1
        best = int(np.argmin(cost))
        if cost[best] > min(most, self.capacity):  # a cost above the capacity means impossible
            return {}
        span = slice(first[best], last[best] + 1)
        for gap, size in zip(ends[span].tolist(), gaps[span].tolist(), strict=True):
            if size:
                self._drop_free(gap)
        target = int(ends[first[best]])
        new_offsets: dict[int, int] = {}
        for offset in starts[first[best] : last[best]].tolist():
            size = self._taken.pop(offset)
            new_offsets[offset] = target
            target += size
        for offset, place in new_offsets.items():
            self._taken[place] = int(sizes[np.searchsorted(starts, offset)])
        self._add_free(target, int(gaps[span].sum()))
        return new_offsets

    def _in_order(self, movable: Collection[int]) -> tuple[Counts, Counts, Counts, Counts]:
        """Extents in order of place: offset, size, and before each the bytes and the number that must
        stay."""
        taken, count = self._taken, len(self._taken)
        starts = np.fromiter(taken.keys(), np.int64, count)
        order = np.argsort(starts)
        sizes = np.fromiter(taken.values(), np.int64, count)[order]
        stays = np.fromiter((offset not in movable for offset in taken), np.int64, count)[order]
        moved, stay = (np.concatenate(([0], np.cumsum(each))) for each in (sizes, stays))
        return starts[order], sizes, moved, stay

    def vacate(self, start: int, nbytes: int, offsets: Iterable[int]) -> dict[int, int]:
        """New places outside these `nbytes` for the extents at `offsets`, as far as there is room.

        The old places stay taken: move the bytes, then free them.
        """
        places: dict[int, int] = {}
        unsuitable: list[int] = []
        for offset in offsets:
            size = self._taken[offset]
            new_offsets = self.allocate([size])
            while new_offsets is not None and start - size < new_offsets[0] < start + nbytes:
                unsuitable += new_offsets
                new_offsets = self.allocate([size])
            if new_offsets is None:
                break
            (places[offset],) = new_offsets
        self.free(unsuitable)
        return places

    def _merge(self) -> None:
        """Return the waiting extents to the free ranges."""
        for size, offsets in self._waiting.items():
            for offset in offsets:
                self._give_back(offset, size)
        self._waiting.clear()

    def _give_back(self, offset: int, size: int) -> None:
        end = offset + size
        if (previous_offset := self._ends.get(offset)) is not None:
            size += self._drop_free(previous_offset)
            offset = previous_offset
        if end in self._free:
            size += self._drop_free(end)
        self._add_free(offset, size)

    def restore(self, taken: dict[int, int]) -> None:
        """Begin with these extents, offset to size, in place of none. ValueError: they overlap."""
        self._drop_free(0)
        at = 0
        for offset, size in sorted(taken.items()):
            if offset < at or offset % PAGE or offset + size > self.capacity or size <= 0:
                raise ValueError(f"an extent of {size} bytes at {offset}")
            if offset > at:
                self._add_free(at, offset - at)
            at = offset + size
        if at < self.capacity:
            self._add_free(at, self.capacity - at)
        self._taken, self.used = taken, sum(taken.values())

    def check(self) -> None:
        """Check that free and taken ranges tile the buffer, and that all tables agree."""
        waiting = [(offset, size) for size, offsets in self._waiting.items() for offset in offsets]
        ranges = sorted([*self._taken.items(), *self._free.items(), *waiting])
        at = 0
        for offset, size in ranges:
            assert offset == at, f"gap or overlap at {at}: next range begins at {offset}"
            assert size > 0, f"empty range at {offset}"
            assert size % PAGE == 0, f"range at {offset} is not whole pages"
            at = offset + size
        assert at == self.capacity, f"ranges end at {at}, capacity is {self.capacity}"
        assert self.used == sum(self._taken.values()), "used is wrong"
        assert self._ends == {offset + size: offset for offset, size in self._free.items()}, "ends"
        assert not self._ends.keys() & self._free.keys(), "free neighbours were not merged"
        assert self._sizes == sorted(self._by_size), "sizes are not sorted"
        sizes = {size: set(offsets) for size, offsets in self._by_size.items()}
        for offset, size in self._free.items():
            sizes[size].remove(offset)
        assert not any(sizes.values()), "a size list holds a range that is not free"

    def _take(self, size: int, count: int = 1) -> list[int]:
        """Up to `count` extents, out of one place."""
        if not size:
            raise MisuseError("an extent of no bytes")
        waiting = self._waiting.get(size)
        if waiting:
            # Take the youngest. A prompt is evicted tail first, so the next one is laid out head first.
            offsets = waiting[: -count - 1 : -1]
            del waiting[-count:]
        else:
            at = bisect.bisect_left(self._sizes, size)
            if at == len(self._sizes):
                return []
            range_bytes = self._sizes[at]
            start, need = next(iter(self._by_size[range_bytes])), min(count, range_bytes // size) * size
            self._drop_free(start)
            if range_bytes > need:
                self._add_free(start + need, range_bytes - need)
            offsets = list(range(start, start + need, size))
        self._taken.update(dict.fromkeys(offsets, size))
        self.used += size * len(offsets)
        return offsets

    def _add_free(self, offset: int, size: int) -> None:
        self._free[offset] = size
        self._ends[offset + size] = offset
        offsets = self._by_size.get(size)
        if offsets is None:
            offsets = self._by_size[size] = {}
            bisect.insort(self._sizes, size)
        offsets[offset] = None

    def _drop_free(self, offset: int) -> int:
        size = self._free.pop(offset)
        del self._ends[offset + size]
        offsets = self._by_size[size]
        del offsets[offset]
        if not offsets:
            del self._by_size[size]
            del self._sizes[bisect.bisect_left(self._sizes, size)]
        return size


class Slab(Extents):
    """Extents with their memory."""

    def __init__(
        self, capacity: int, *, hugepages: bool = False, shared: bool = False, fd: int | None = None
    ) -> None:
        """`fd`: the shared memory of a server before this one, which has `capacity` bytes."""
        super().__init__(capacity)
        self.fd = os.memfd_create("lmtier-slab", SHARED) if shared and fd is None else fd
        """Other processes get it to map the same memory. None: the memory is private, so that a forked child
        cannot write into its parent's extents."""
        if self.fd is not None:
            self._close = weakref.finalize(self, os.close, self.fd)
            if fd is None:
                os.truncate(self.fd, self.capacity)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            elif os.fstat(fd).st_size != self.capacity:
                raise MisuseError(f"a slab of {self.capacity} bytes in a file of {os.fstat(fd).st_size}")
        self._memory = Memory(self.capacity, -1 if self.fd is None else self.fd)
        if len(nodes := nodes_to_use()) > 1 and not self._memory.spread(nodes):
            log.warning("lmtier: the slab cannot be spread over NUMA nodes (errno %d)", ctypes.get_errno())
        self._hugepages = hugepages and self._memory.advise(_MADV_HUGEPAGE)
        self._view = self._memory.view
        forks.call_in_child(self)

    def forked(self) -> None:
        """Drop the memory in a child: as long as the child holds it, it is not freed."""
        self._memory.forget()
        if self.fd is not None:
            self._close()

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._view[offset : offset + nbytes]

    def move(self, offset: int, place: int) -> int:
        """Copy the extent at `offset` to `place`, which is taken, without the GIL. Returns its bytes."""
        nbytes = self._taken[place]
        target, source = (np.frombuffer(self.view(at, nbytes), np.uint8).ctypes for at in (place, offset))
        ctypes.memmove(target.data, source.data, nbytes)
        return nbytes

    def clear_padding(self, offset: int, nbytes: int) -> None:
        """Zero the bytes between the payload and the end of its last page: they are written to disk too."""
        self._view[offset + nbytes : offset + padded(nbytes)] = bytes(padded(nbytes) - nbytes)

    def wipe(self, offset: int, nbytes: int) -> None:
        """Overwrite a range with zeros, outside the GIL."""
        ctypes.memset(np.frombuffer(self.view(offset, nbytes), np.uint8).ctypes.data, 0, nbytes)

    def wipe_free(self) -> Iterator[int]:
        """Overwrite all that is free, a piece of the slab at a time. Yields the bytes of each; between them
        all may change."""
        for at in range(0, self.capacity, _WIPE_STEP):
            end, wiped = at + _WIPE_STEP, 0
            self._merge()
            for start, size in self._free.items():
                if start < end and at < start + size:
                    first, last = max(at, start), min(end, start + size)
                    self.wipe(first, last - first)
                    wiped += last - first
            yield wiped

    def prefault(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Touch every page, so that no copy pays for a page fault (four times the cost). Takes seconds.

        It is safe while others read and write: populating a page does not change it. A kernel without this
        call faults pages at their first use instead, and the log says so.
        """
        for at in range(0, self.capacity, _PREFAULT_STEP):
            if stopped():
                return
            if not self._touch(at, min(_PREFAULT_STEP, self.capacity - at)):
                error = ctypes.get_errno()
                log.warning("lmtier: the slab is not prefaulted (errno %d): first writes are slower", error)
                return
        if self.fd is not None and not self._hugepages:
            log.warning("lmtier: the slab has no huge pages: small blocks and the disk are slower")

    def _touch(self, at: int, size: int) -> bool:
        if self.fd is not None and self._hugepages:
            # The kernel gives huge pages to shared memory only if sysfs allows it. But any process may ask it
            # to merge small pages into a huge one: one small page is enough for that.
            # Some pages may be busy. If a whole step fails, the kernel lacks the call or has no huge pages
            # left.
            starts = range(at, at + size - _HUGE + 1, _HUGE)
            done = [
                self._memory.advise(_MADV_POPULATE_WRITE, start, PAGE)
                and self._memory.advise(_MADV_COLLAPSE, start, _HUGE)
                for start in starts
            ]
            self._hugepages = not done or any(done)
        return self._memory.advise(_MADV_POPULATE_WRITE, at, size)
