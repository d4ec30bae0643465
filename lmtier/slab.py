"""One big buffer, taken at start, and its extents: allocate, free, view. No keys, no policy.

Extents are whole pages. What is freed waits, by size, for the next object of that size, which is the
rule in a cache; when nothing fits, all that waits is merged with its neighbours, so memory that was
cut for one layout serves another later. Beyond that, best fit: O(log of the number of free sizes).
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lmtier.codec import PAGE, padded
from lmtier.errors import MisuseError

log = logging.getLogger("lmtier")

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_PROT_NONE = 0
_HUGE = 2 << 20
_PREFAULT_STEP = 8 << 20
SHARED = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
# Whoever cut it short would end all others with a SIGBUS.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
]


class Memory:
    """Bytes of a file, or of nobody's, at an address that suits huge pages (`mmap.mmap` promises none).

    Unmapped when the last view of it is gone, not before.
    """

    def __init__(self, nbytes: int, fd: int = -1) -> None:
        self.nbytes = nbytes
        kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        nobodys = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # Reserve addresses for more than is needed, then map over the aligned part of them.
        reserved = _map(None, nbytes + _HUGE, _PROT_NONE, nobodys, -1)
        self._start = -(-reserved // _HUGE) * _HUGE
        # A class of its own, because plain ctypes arrays take no finalizer.
        array: Any = type("Bytes", (ctypes.c_char * nbytes,), {}).from_address(self._start)  # type: ignore[attr-defined]
        weakref.finalize(array, _LIBC.munmap, ctypes.c_void_p(reserved), ctypes.c_size_t(nbytes + _HUGE))
        _map(self._start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind | _MAP_FIXED, fd)
        self.view = memoryview(array).cast("B")

    def advise(self, advice: int, at: int = 0, nbytes: int | None = None) -> bool:
        """Whether the kernel took it. A plain mmap.madvise would hold the GIL meanwhile."""
        start = ctypes.c_void_p(self._start + at)
        size = ctypes.c_size_t(self.nbytes if nbytes is None else nbytes)
        return not _LIBC.madvise(start, size, advice)


def _map(start: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    got = _LIBC.mmap(start, nbytes, protection, flags, fd, 0)
    if got == ctypes.c_void_p(-1).value:
        raise OSError(error := ctypes.get_errno(), os.strerror(error))
    return int(got)


class Extents:
    """Which ranges of so many bytes are taken. Offsets alone: the memory may be anywhere."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // PAGE * PAGE
        if self.capacity <= 0:
            raise MisuseError(f"{capacity} bytes hold no page of {PAGE}")
        self.used = 0
        self._taken: dict[int, int] = {}  # offset -> size
        self._waiting: dict[int, list[int]] = {}  # size -> offsets that were freed, oldest first
        self._free: dict[int, int] = {}  # offset -> size
        self._ends: dict[int, int] = {}  # end -> offset, of the free ranges
        self._by_size: dict[int, dict[int, None]] = {}  # size -> offsets, oldest first
        self._sizes: list[int] = []  # the keys of _by_size, sorted
        self._add_free(0, self.capacity)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} used {self.used} of {self.capacity}, {len(self._taken)} extents>"

    def allocate(self, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Offsets of extents for all `sizes` (rounded up to pages), or None and nothing changed."""
        taken: list[int] = []
        for size in sizes:
            offset = self._take(padded(size))
            if offset is None and self._waiting:
                self._merge()
                offset = self._take(padded(size))
            if offset is None:
                self.free(taken)
                return None
            taken.append(offset)
        return tuple(taken)

    def free(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            size = self._taken.pop(offset, None)
            if size is None:
                raise MisuseError(f"extent at {offset} is not allocated: freed twice?")
            self.used -= size
            self._waiting.setdefault(size, []).append(offset)

    def _merge(self) -> None:
        """Return what waits to the free ranges."""
        for size, offsets in self._waiting.items():
            for offset in offsets:
                self._give_back(offset, size)
        self._waiting.clear()

    def _give_back(self, offset: int, size: int) -> None:
        end = offset + size
        if (before := self._ends.get(offset)) is not None:
            size += self._drop_free(before)
            offset = before
        if end in self._free:
            size += self._drop_free(end)
        self._add_free(offset, size)

    def check(self) -> None:
        """Prove that free and taken ranges tile the buffer, and that all books agree."""
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

    def _take(self, size: int) -> int | None:
        if not size:
            raise MisuseError("an extent of no bytes")
        waiting = self._waiting.get(size)
        if waiting:
            # The youngest: a prompt is evicted tail first, so the next one is laid out head first.
            offset = waiting.pop()
            self._taken[offset] = size
            self.used += size
            return offset
        at = bisect.bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return None
        have = self._sizes[at]
        offset = next(iter(self._by_size[have]))
        self._drop_free(offset)
        if have > size:
            self._add_free(offset + size, have - size)
        self._taken[offset] = size
        self.used += size
        return offset

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
    """Extents of memory that is taken here."""

    def __init__(self, capacity: int, *, hugepages: bool = False, shared: bool = False) -> None:
        super().__init__(capacity)
        self.fd = os.memfd_create("lmtier-slab", SHARED) if shared else None
        """Given to others, who map the same memory. None: it is private, so that a forked child cannot
        write into its parent's extents."""
        if self.fd is not None:
            weakref.finalize(self, os.close, self.fd)
            os.truncate(self.fd, self.capacity)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self._memory = Memory(self.capacity, -1 if self.fd is None else self.fd)
        self._hugepages = hugepages and self._memory.advise(_MADV_HUGEPAGE)
        self._view = self._memory.view

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._view[offset : offset + nbytes]

    def clear_padding(self, offset: int, nbytes: int) -> None:
        """Zero what lies between the payload and the end of its last page: it goes to disk with it."""
        self._view[offset + nbytes : offset + padded(nbytes)] = bytes(padded(nbytes) - nbytes)

    def prefault(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Touch every page, so that no copy pays for a page fault (four times the cost). Takes seconds.

        Safe beside readers and writers: populating a page does not change it. Where the kernel is
        older than that call, pages are faulted by their first use instead, and a line says so.
        """
        for at in range(0, self.capacity, _PREFAULT_STEP):
            if stopped():
                return
            if not self._touch(at, min(_PREFAULT_STEP, self.capacity - at)):
                error = ctypes.get_errno()
                log.warning("slab is not prefaulted (errno %d): first writes will be slower", error)
                return
        if self.fd is not None and not self._hugepages:
            log.warning("lmtier: the slab has no huge pages: small blocks and the disk will be slower")

    def _touch(self, at: int, size: int) -> bool:
        if self.fd is not None and self._hugepages:
            # The kernel gives huge pages to shared memory only where that was allowed (sysfs), but makes them
            # of small ones at anybody's request: one small page is enough for that.
            # Some may be busy just then; if a whole step fails, the kernel does not know how, or has no more.
            starts = range(at, at + size - _HUGE + 1, _HUGE)
            done = [
                self._memory.advise(_MADV_POPULATE_WRITE, start, PAGE)
                and self._memory.advise(_MADV_COLLAPSE, start, _HUGE)
                for start in starts
            ]
            self._hugepages = not done or any(done)
        return self._memory.advise(_MADV_POPULATE_WRITE, at, size)
