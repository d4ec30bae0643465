"""Copies on a second core: a few threads that share a batch of copies with the caller."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from lmtier import forks
from lmtier.threads import start_thread


@dataclass(frozen=True, slots=True)
class _Batch:
    tasks: deque[Callable[[], None]]
    ends: SimpleQueue[BaseException | None] = field(default_factory=SimpleQueue)
    """The results of the copies that helpers have taken."""

    def take(self) -> Callable[[], None] | None:
        try:
            return self.tasks.popleft()
        except IndexError:
            return None


class CopyThreads:
    """A few threads that share a batch of copies with the caller.

    Each thread takes the next copy. A late thread takes fewer copies, and the caller does not wait for a
    thread without a core. `cores` are the cores for the threads. Without it a thread inherits those of its
    creator, which an engine may bind to one core.
    """

    def __init__(self, helpers: int, cores: Iterable[int] = ()) -> None:
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._cores = list(cores)
        self._threads = [start_thread(f"lmtier-copy-{i}", self._work) for i in range(max(0, helpers))]
        forks.call_in_child(self)

    def forked(self) -> None:
        """In a child the caller makes all copies."""
        self._threads = []

    def run(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Run all tasks and return when the last is done. If one of them raised, raise that."""
        # Each run has its own queue of results, so an interrupted run leaves nothing for the next one.
        batch = _Batch(deque(tasks))
        total, mine, dropped = len(batch.tasks), 0, 0
        for _ in self._threads[: max(0, total - 1)]:
            self._batches.put(batch)
        try:
            while (task := batch.take()) is not None:
                mine += 1
                task()
        finally:
            while batch.take() is not None:
                dropped += 1
            errors = [batch.ends.get() for _ in range(total - mine - dropped)]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        for _ in self._threads:
            self._batches.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        if self._cores:
            with suppress(OSError):  # the process may not use these cores any more
                os.sched_setaffinity(0, self._cores)
        while (batch := self._batches.get()) is not None:
            while (task := batch.take()) is not None:
                try:
                    task()
                except BaseException as error:  # noqa: BLE001 - the thread's edge; raised again by run()
                    batch.ends.put(error)
                else:
                    batch.ends.put(None)
