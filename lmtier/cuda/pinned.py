"""Pinning memory that is there already: the slab, ours or a server's, step by step in the background.

A GPU copies to and from pinned memory by itself; from other memory the driver copies first, and the caller
waits. Pinning 32 GiB takes seconds, so it is done in steps, and copies are cut where two steps meet: the
driver takes no copy that spans two registrations. What cannot be pinned (a memlock limit, a driver that
refuses) stays as it is, and works, slower.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from lmtier.cuda.streams import Rows
from lmtier.errors import LMTierError
from lmtier.layout import Array
from lmtier.workers import start_thread

log = logging.getLogger("lmtier")

STEP = 64 << 20
_PAUSE = 5
"""Times as long as a step took: the driver holds locks while it pins, 3 ms a step on an H100, which launches
wait for. With pauses as long as the steps an engine that decoded lost up to 11 % meanwhile."""


class Pinning:
    """One stretch of memory that becomes pinned. `register` and `unregister` are the driver's calls."""

    def __init__(
        self,
        memory: memoryview,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        *,
        step: int = STEP,
    ) -> None:
        self._memory: memoryview | None = memory
        """Mapped until it is unpinned: what came to lie there instead could not be pinned."""
        array = np.frombuffer(memory, np.uint8)
        address, nbytes = array.ctypes.data, array.nbytes
        self._register, self._unregister = register, unregister
        self._steps = [
            (at, min(step, address + nbytes - at)) for at in range(address, address + nbytes, step)
        ]
        self._step = step
        self.address, self.nbytes = address, nbytes
        self.pinned_bytes = 0
        """So far, from the start of the memory on."""
        self.seconds = 0.0
        """What the driver took for that."""
        self.failure = ""
        """Why there is no more to come, if not all of it could be pinned."""
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._hurried = threading.Event()
        """Set, there are no pauses any more."""
        self._ended.set()
        self._closing = threading.Lock()

    def start(self) -> None:
        """In the background. Copies may go on meanwhile."""
        self._ended.clear()
        start_thread("lmtier-pin", self._run)

    def _run(self) -> None:
        try:
            self._pin()
        finally:
            self._ended.set()

    def _pin(self) -> None:
        for at, nbytes in self._steps:
            if self._stopped.is_set():
                return
            began = time.perf_counter()
            try:
                self._register(at, nbytes)
            except (OSError, RuntimeError, LMTierError) as error:
                self.failure = str(error) or type(error).__name__
                log.warning(
                    "lmtier: %d of %d bytes of the slab are pinned, the driver refuses more (%s): copies of "
                    "the rest are slower and hold the engine up; raise the memlock limit (ulimit -l)",
                    self.pinned_bytes,
                    self.nbytes,
                    self.failure,
                )
                return
            took = time.perf_counter() - began
            self.seconds += took
            self.pinned_bytes += nbytes
            self._hurried.wait(_PAUSE * took)

    @property
    def is_whole(self) -> bool:
        return self.pinned_bytes == self.nbytes

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is done, or has failed."""
        return self._ended.wait(timeout)

    def hurry(self) -> None:
        """Pin the rest without pauses, and wait for it."""
        self._hurried.set()
        self.wait()

    def leave(self) -> None:
        """Unpin in the background: 20 ms a GiB. Nothing may be copying any more."""
        start_thread("lmtier-unpin", self.close)

    def close(self) -> None:
        """The same, here and now. Whoever comes second waits, and finds nothing left."""
        self._stopped.set()
        self.hurry()
        with self._closing:
            for at, nbytes in reversed(self._steps):
                if at < self.address + self.pinned_bytes:
                    self._unregister(at)
                    self.pinned_bytes -= nbytes
            self._memory = None

    def cut(self, copies: Array) -> Array:
        """The same copies [n, (to, source, bytes)], in another order, none of which spans two steps."""
        spans = np.zeros(len(copies), np.bool_)
        for side in (0, 1):
            first = copies[:, side] - self.address
            last = first + copies[:, 2] - 1
            crosses = (first // self._step != last // self._step) | (last >= self.nbytes)
            spans |= crosses & (last >= 0) & (first < self.nbytes)
        if not spans.any():
            return copies
        # Few are: the others stay in an array.
        pieces = [piece for copy in copies[spans].tolist() for piece in self._pieces(*copy)]
        return np.concatenate([copies[~spans], np.array(pieces, np.int64)])

    def _pieces(self, to: int, source: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        while nbytes:
            part = min(nbytes, self._room(to), self._room(source))
            yield to, source, part
            to, source, nbytes = to + part, source + part, nbytes - part

    def _room(self, address: int) -> int:
        """Bytes from here to where the next step begins, or this memory does, or something else."""
        at = address - self.address
        if at < 0:
            return -at
        return min(self._step - at % self._step, self.nbytes - at) if at < self.nbytes else 1 << 62

    def parts(self, rows: Rows) -> Iterator[Rows]:
        """The same rows, in as few parts as can be of which none spans two steps."""
        is_to = self.address <= rows.to < self.address + self.nbytes
        at, step = (rows.to, rows.to_step) if is_to else (rows.source, rows.source_step)
        first = 0
        while first < rows.number:
            begin = at + first * step
            end = first + max(0, self._room(begin) - rows.width + step) // step
            if end > first:
                yield rows.part(first, min(end, rows.number))
            else:  # this one is cut in two or more
                end, row = first + 1, rows.part(first, first + 1)
                for to, source, nbytes in self._pieces(row.to, row.source, row.width):
                    yield Rows(to, nbytes, source, nbytes, nbytes, 1)
            first = end

    def covers(self, end: int) -> bool:
        """Whether the first so many bytes are pinned, or will never be."""
        return end <= self.pinned_bytes or self._ended.is_set()

    def holds(self, copies: Array) -> bool:
        """Whether one side of each of these is pinned by now."""
        low, high = self.address, self.address + self.pinned_bytes
        return bool(((copies[:, :2] >= low) & (copies[:, :2] < high)).any(axis=1).all())
