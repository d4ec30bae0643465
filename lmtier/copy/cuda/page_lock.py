"""Page-locks existing memory in the background, step by step: our own slab or that of a server.

A GPU itself copies to and from page-locked memory. For other memory the driver makes a copy first, and the
caller waits. Locking 32 GiB takes seconds, so it is done in steps. Copies are cut where two steps meet,
because the driver accepts no copy that spans two registrations. Memory that cannot be page-locked (a memlock
limit, a driver that refuses) still works, but slower.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from lmtier.copy.cuda.streams import Device, Rows
from lmtier.errors import LMTierError, log, size_text
from lmtier.format.layout import Array
from lmtier.threads import start_thread

STEP = 64 << 20
_PAUSE = 5
"""The pause after a step, as a multiple of the step's time. During a step the driver holds locks, 3 ms on an
H100, and launches wait for them. With pauses as long as the steps, a decoding engine lost up to 11 %."""


_locked_ones: set[PageLock] = set()
"""What the driver has locked stays mapped until it is unlocked, even if everyone else has forgotten it.

Otherwise the driver would go on copying to and from the old pages when other memory gets this address.
"""


class PageLock:
    """One range of memory that becomes page-locked. `register` and `unregister` are the driver's calls."""

    def __init__(
        self,
        memory: memoryview,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        *,
        step: int = STEP,
    ) -> None:
        self._memory: memoryview | None = memory
        """Keeps the memory mapped, until it is unlocked."""
        array = np.frombuffer(memory, np.uint8)
        address, nbytes = array.ctypes.data, array.nbytes
        self._register, self._unregister = register, unregister
        self._steps = [
            (at, min(step, address + nbytes - at)) for at in range(address, address + nbytes, step)
        ]
        self._step = step
        self.address, self.nbytes = address, nbytes
        self.locked_bytes = 0
        """The bytes that are locked so far, from the start of the memory on."""
        self.seconds = 0.0
        """The seconds that the driver needed for them."""
        self.failure = ""
        """Why the rest will not be page-locked, if so."""
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._hurried = threading.Event()
        """If it is set, there are no more pauses."""
        self._ended.set()
        self._closing = threading.Lock()

    def start(self) -> None:
        """Lock the memory in the background. Copies may run meanwhile."""
        self._ended.clear()
        _locked_ones.add(self)
        start_thread("lmtier-lock", self._run)

    def _run(self) -> None:
        try:
            self._lock()
        finally:
            self._ended.set()

    def _lock(self) -> None:
        for address, nbytes in self._steps:
            if self._stopped.is_set():
                return
            began = time.perf_counter()
            try:
                self._register(address, nbytes)
            except (OSError, RuntimeError, LMTierError) as error:
                self.failure = str(error) or type(error).__name__
                log.warning(
                    "lmtier: %s of %s of the slab are page-locked, the driver refuses more (%s): "
                    "copies of the rest are slower and delay the engine; raise the memlock limit "
                    "(ulimit -l)",
                    size_text(self.locked_bytes),
                    size_text(self.nbytes),
                    self.failure,
                )
                return
            seconds = time.perf_counter() - began
            self.seconds += seconds
            self.locked_bytes += nbytes
            self._hurried.wait(_PAUSE * seconds)

    @property
    def is_whole(self) -> bool:
        return self.locked_bytes == self.nbytes

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done or has failed."""
        return self._ended.wait(timeout)

    def hurry(self) -> None:
        """Lock the rest without pauses, and wait for it."""
        self._hurried.set()
        self.wait()

    def leave(self) -> None:
        """Unlock the memory in the background: 20 ms per GiB. All copies must have ended."""
        start_thread("lmtier-unlock", self.close)

    def close(self) -> None:
        """Unlock the memory in this thread. A second caller waits and then has nothing to do."""
        self._stopped.set()
        self.hurry()
        with self._closing:
            for at, nbytes in reversed(self._steps):
                if at < self.address + self.locked_bytes:
                    self._unregister(at)
                    self.locked_bytes -= nbytes
            self._memory = None
        _locked_ones.discard(self)

    def split_at_steps(self, copies: Array) -> Array:
        """The same copies [n, (to, source, bytes)], cut so that none spans two steps.

        The order may change.
        """
        spans = np.zeros(len(copies), np.bool_)
        for side in (0, 1):
            first = copies[:, side] - self.address
            last = first + copies[:, 2] - 1
            crosses = (first // self._step != last // self._step) | (last >= self.nbytes)
            spans |= crosses & (last >= 0) & (first < self.nbytes)
        if not spans.any():
            return copies
        # Few copies span two steps. The others stay in an array.
        pieces = [piece for copy in copies[spans].tolist() for piece in self._pieces(*copy)]
        return np.concatenate([copies[~spans], np.array(pieces, np.int64)])

    def _pieces(self, to: int, source: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        while nbytes:
            part = min(nbytes, self._room(to), self._room(source))
            yield to, source, part
            to, source, nbytes = to + part, source + part, nbytes - part

    def _room(self, address: int) -> int:
        """Bytes from `address` to the next boundary: of a step, or of this memory."""
        at = address - self.address
        if at < 0:
            return -at
        return min(self._step - at % self._step, self.nbytes - at) if at < self.nbytes else 1 << 62

    def parts(self, rows: Rows) -> Iterator[Rows]:
        """The same rows in the fewest parts that do not span two steps."""
        locks_target = self.address <= rows.to < self.address + self.nbytes
        at, step = (rows.to, rows.to_step) if locks_target else (rows.source, rows.source_step)
        first = 0
        while first < rows.number:
            begin = at + first * step
            end = first + max(0, self._room(begin) - rows.width + step) // step
            if end > first:
                yield rows.part(first, min(end, rows.number))
            else:  # this row is cut in two or more
                end, row = first + 1, rows.part(first, first + 1)
                for to, source, nbytes in self._pieces(row.to, row.source, row.width):
                    yield Rows(to, nbytes, source, nbytes, nbytes, 1)
            first = end

    def covers(self, end: int) -> bool:
        """Whether the bytes up to `end` are page-locked, or never will be."""
        return end <= self.locked_bytes or self._ended.is_set()

    def holds(self, copies: Array) -> bool:
        """Whether one side of each of these copies is page-locked by now."""
        low, high = self.address, self.address + self.locked_bytes
        return bool(((copies[:, :2] >= low) & (copies[:, :2] < high)).any(axis=1).all())


class PageLockingDevice(Device, Protocol):
    def lock_pages(self, memory: memoryview) -> PageLock: ...
