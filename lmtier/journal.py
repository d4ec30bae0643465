"""What became findable in a tier, what ceased to be and why, in order: a bounded ring for those who follow.

Nobody waits for a follower. One who has fallen behind by more than the ring is told that changes are lost.
Beside it, as bounded: what should have been stored somewhere and was not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import chain, islice
from typing import NamedTuple

from lmtier.keys import is_value

LENGTH = 65_536


class Change(NamedTuple):
    tier: str
    came: bool
    key: bytes


class Event(NamedTuple):
    """A change, or a store that came to nothing, and more of it: when, by the journal's clock, and why."""

    tier: str
    came: bool
    key: bytes
    at: float
    why: str
    """Of what left: a word of index.py. Of what was not stored: a reason of metrics.DROP_REASONS."""
    was_there: bool
    """False: it was not stored."""


class Journal:
    def __init__(self, length: int = LENGTH, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring: deque[Event] = deque(maxlen=length)
        self._unstored: deque[Event] = deque(maxlen=length)
        self.clock = clock
        self.end = 0
        """How many changes there have been."""

    def note(self, tier: str, came: bool, keys: Iterable[bytes], why: str = "") -> None:
        """Named values are not told of: they are no part of a prompt."""
        now = self.clock()
        for key in keys:
            if not is_value(key):
                self._ring.append(Event(tier, came, key, now, why, True))
                self.end += 1

    def unstored(self, tier: str, keys: Iterable[bytes], why: str) -> None:
        """These should have come to `tier` and did not."""
        now = self.clock()
        self._unstored += (Event(tier, False, key, now, why, False) for key in keys if not is_value(key))

    def since(self, position: int, most: int) -> list[Change] | None:
        """Up to `most` changes after the first `position`; None: they are not all known any more."""
        first = self.end - len(self._ring)
        if not first <= position <= self.end:
            return None
        found = islice(self._ring, position - first, position - first + most)
        return [Change(event.tier, event.came, event.key) for event in found]

    def past(self, keys: Collection[bytes]) -> list[Event]:
        """What is remembered of these keys. Goes through all that is remembered: some milliseconds."""
        return [event for event in chain(self._ring, self._unstored) if event.key in keys]
