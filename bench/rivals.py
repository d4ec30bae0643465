"""ARC, the usual rival of LRU, to compare with. `add()` makes it a policy that a tier's URL can name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence

from lmtier.rules.policy import POLICIES, E, Policy


class ARC(Policy[E]):
    """Two lists in LRU order, for entries seen once and seen again (Megiddo, FAST'03).

    The keys that left either list lately move the border between them.
    """

    def __init__(self) -> None:
        self._once: OrderedDict[E, None] = OrderedDict()
        self._again: OrderedDict[E, None] = OrderedDict()
        self._once_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0
        self._capacity = 0  # how many entries fit: the most so far; evictions below that lower it

    def touch(self, entries: Iterable[E]) -> None:
        for entry in entries:
            if entry in self._again:
                self._again.move_to_end(entry)
            else:
                del self._once[entry]
                self._again[entry] = None

    def refresh(self, entries: Iterable[E]) -> None:
        for entry in entries:
            (self._once if entry in self._once else self._again).move_to_end(entry)

    def on_miss(self, keys: Sequence[bytes]) -> None: ...

    def order(self) -> Generator[E, None, None]:
        once, again = iter(self._once), iter(self._again)
        left = len(self._once)
        while left > self._target and (entry := next(once, None)) is not None:
            left -= 1
            yield entry
        yield from again
        yield from once

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, entry: E) -> bool:
        return entry in self._once or entry in self._again

    def insert(self, *entries: E) -> None:
        for entry in entries:
            if entry.key in self._once_ghosts:
                step = max(1.0, len(self._again_ghosts) / len(self._once_ghosts))
                self._target = min(self._capacity, self._target + step)
                del self._once_ghosts[entry.key]
                self._again[entry] = None
            elif entry.key in self._again_ghosts:
                step = max(1.0, len(self._once_ghosts) / len(self._again_ghosts))
                self._target = max(0.0, self._target - step)
                del self._again_ghosts[entry.key]
                self._again[entry] = None
            else:
                self._once[entry] = None

    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        once, again = self._once, self._again
        self._capacity = max(len(self), self._capacity - evicted * len(entries))
        self._target = min(self._target, self._capacity)
        for entry in entries:
            if entry in once:
                del once[entry]
                ghosts = self._once_ghosts
            else:
                del again[entry]
                ghosts = self._again_ghosts
            if evicted:
                ghosts[entry.key] = None
        if not evicted:
            return
        while len(self._once_ghosts) > max(0, self._capacity - len(once)):
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and len(self._once_ghosts) + len(self._again_ghosts) > self._capacity:
            self._again_ghosts.popitem(last=False)


def add() -> None:
    POLICIES["arc"] = ARC
