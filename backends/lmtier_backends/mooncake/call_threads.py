"""Calls into a library that knows no deadlines, each on a thread that can be left behind with its memory.

A call that is late may still write into the memory that it was given. So it gets memory of its lane and never
an extent: when the caller gives up, thread and memory stay together until the call returns. The price is one
copy.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from lmtier.format.objects import anonymous, padded
from lmtier.threads import start_thread
from lmtier_backends.sockets import seconds_left

T = TypeVar("T")


class _Call:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class CallThread:
    """A thread, and memory that only its calls use."""

    def __init__(self, name: str, free: SimpleQueue[CallThread]) -> None:
        self._free = free
        self._lock = threading.Lock()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._map: memoryview | None = None
        self.is_abandoned = False
        """Whether the caller has given up on the running call."""
        self.thread = start_thread(name, self._work)

    @property
    def memory(self) -> memoryview:
        return memoryview(b"") if self._map is None else self._map

    @property
    def address(self) -> int:
        assert self._map is not None
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def take_memory(self, nbytes: int) -> None:
        """New memory; the old one must not be registered any more."""
        self._map = anonymous(padded(nbytes))

    def drop_memory(self) -> None:
        self._map = None

    def run(self, work: Callable[[], T], until: float) -> T:
        """The result of `work`. Raises TimeoutError at `until`."""
        call = _Call(work)
        self._calls.put(call)
        if not call.done.wait(max(0.0, until - time.monotonic())):
            with self._lock:
                self.is_abandoned = not call.done.is_set()
            if self.is_abandoned:
                raise TimeoutError("the library did not answer in time")
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def end(self) -> None:
        self._calls.put(None)
        self.thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.work()
            except BaseException as error:  # noqa: BLE001 - the thread's edge; the caller gets it
                call.error = error
            with self._lock:
                call.done.set()
                was_left, self.is_abandoned = self.is_abandoned, False
            if was_left:
                self._free.put(self)


class CallThreads:
    def __init__(self, name: str, count: int) -> None:
        self._free: SimpleQueue[CallThread] = SimpleQueue()
        self._count = count
        for number in range(count):
            self._free.put(CallThread(f"lmtier-{name}-lane-{number}", self._free))

    @contextmanager
    def lend(self, until: float) -> Iterator[CallThread]:
        """A lane for one call. If the call is late, the lane comes back when the call does."""
        try:
            lane = self._free.get(timeout=seconds_left(until))
        except Empty:
            raise TimeoutError("all calls into the library hang") from None
        is_late = False
        try:
            yield lane
        except TimeoutError:
            is_late = True
            raise
        finally:
            if not is_late:
                self._free.put(lane)

    def close(self) -> bool:
        """End the threads. Returns whether every call has returned."""
        for ended_count in range(self._count):
            try:
                self._free.get_nowait().end()
            except Empty:
                return ended_count == self._count
        return True
