"""Starting threads, and pausing the garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NEVER = 1 << 30
_SEARCHED = 300_000  # entries: .14 s


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector. While a million entries are made it finds nothing and doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class RestingCollector:
    """Lets the garbage collector search all objects only while the owner rests.

    A search takes half a second among a million entries. So the objects of the start are never searched, and
    what came later only at rest, and only if it takes no more than a sixth of a second. A search sees all of
    that again: what it froze would never be freed, if it became a cycle without users later.
    """

    def __init__(self) -> None:
        self._at_start = 0

    def begin(self, entries: int) -> None:
        """So many entries are there at the start."""
        self._at_start = entries
        gc.collect()
        gc.freeze()
        young_threshold, middle_threshold, _ = gc.get_threshold()
        gc.set_threshold(young_threshold, middle_threshold, _NEVER)

    def rest(self, entries: int) -> None:
        if gc.get_count()[2] and entries - self._at_start <= _SEARCHED:
            gc.collect()


def start_thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread
