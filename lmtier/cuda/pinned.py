"""Pinning memory that is there already: the slab, ours or a server's, step by step in the background.

A GPU copies to and from pinned memory by itself; from other memory the driver copies first, and the caller
waits. Pinning 32 GiB takes seconds, so it is done in steps, and copies are cut where two steps meet: the
driver takes no copy that spans two registrations. What cannot be pinned (a memlock limit, a driver that
refuses) stays as it is, and works, slower.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from lmtier.layout import Array
from lmtier.workers import start_thread

log = logging.getLogger("lmtier")

STEP = 128 << 20  # the driver holds locks while it pins, .1 s a GiB on an H200: others wait for those


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
        self._edges = [*(at for at, _ in self._steps), address + nbytes]
        self.address, self.nbytes = address, nbytes
        self.pinned_bytes = 0
        """So far, from the start of the memory on."""
        self.failure = ""
        """Why there is no more to come, if not all of it could be pinned."""
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._ended.set()

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
            except (OSError, RuntimeError) as error:
                self.failure = str(error) or type(error).__name__
                log.warning(
                    "lmtier: %d of %d bytes of the slab are pinned, the driver refuses more (%s): copies of "
                    "the rest are slower and hold the engine up; raise the memlock limit (ulimit -l)",
                    self.pinned_bytes,
                    self.nbytes,
                    self.failure,
                )
                return
            self.pinned_bytes += nbytes
            self._stopped.wait(time.perf_counter() - began)  # as long for others

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is done, or has failed."""
        return self._ended.wait(timeout)

    def close(self) -> None:
        """Unpin. Nothing may be copying any more."""
        self._stopped.set()
        self.wait()
        for at, nbytes in reversed(self._steps):
            if at < self.address + self.pinned_bytes:
                self._unregister(at)
                self.pinned_bytes -= nbytes
        self._memory = None

    def cut(self, copies: Array) -> Array:
        """The same copies [n, (to, source, bytes)], none of which spans two steps."""
        spans = np.zeros(len(copies), np.bool_)
        for side in (0, 1):
            first, last = copies[:, side], copies[:, side] + copies[:, 2] - 1
            spans |= np.searchsorted(self._edges, first, "right") != np.searchsorted(
                self._edges, last, "right"
            )
        if not spans.any():
            return copies
        pieces = [
            list(self._pieces(*copy)) if cut else [copy]
            for copy, cut in zip(copies.tolist(), spans, strict=True)
        ]
        return np.array([piece for each in pieces for piece in each], np.int64)

    def _pieces(self, to: int, source: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        while nbytes:
            part = min(nbytes, self._room(to), self._room(source))
            yield to, source, part
            to, source, nbytes = to + part, source + part, nbytes - part

    def _room(self, address: int) -> int:
        """Bytes from here to the next edge."""
        number = bisect.bisect_right(self._edges, address)
        return self._edges[number] - address if number < len(self._edges) else 1 << 62

    def holds(self, copies: Array) -> bool:
        """Whether one side of each of these is pinned by now."""
        low, high = self.address, self.address + self.pinned_bytes
        return bool(((copies[:, :2] >= low) & (copies[:, :2] < high)).any(axis=1).all())
