"""A bounded ring of the changes in all tiers: which chunks can be found, or no longer, and why, in order.

The cache does not wait for followers. A follower that is behind by more than the ring learns that changes are
lost. A second ring has the chunks that should have been stored in a tier and were not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from itertools import chain, islice
from typing import NamedTuple

from lmtier.observe.follower import Follower

LENGTH = 65_536


class Change(NamedTuple):
    tier: str
    came: bool
    key: bytes


class Record(NamedTuple):
    """A change, or a chunk that was not stored, with the time by the journal's clock and the reason."""

    tier: str
    came: bool
    key: bytes
    at: float
    why: str
    """For a chunk that left: a word of match.py. For one that was not stored: one of metrics.DROP_REASONS."""
    was_there: bool
    """False: it was not stored."""


class Journal(Follower):
    def __init__(
        self,
        length: int = LENGTH,
        clock: Callable[[], float] = time.monotonic,
        is_record: Callable[[bytes], bool] = lambda key: False,
    ) -> None:
        self._is_record = is_record
        self._ring: deque[Record] = deque(maxlen=length)
        self._unstored: deque[Record] = deque(maxlen=length)
        self.clock = clock
        self.end = 0
        """The number of changes so far."""

    def changed(self, tier: str, came: bool, keys: Collection[bytes], why: str) -> None:
        """Records are not noted, because they are no part of a prompt."""
        now = self.clock()
        for key in keys:
            if not self._is_record(key):
                self._ring.append(Record(tier, came, key, now, why, True))
                self.end += 1

    def not_stored(self, tier: str, keys: Collection[bytes], why: str) -> None:
        now = self.clock()
        self._unstored += (
            Record(tier, False, key, now, why, False) for key in keys if not self._is_record(key)
        )

    def since(self, position: int, most: int) -> list[Change] | None:
        """Up to `most` changes after the first `position`. None: some of them are no longer known."""
        first = self.end - len(self._ring)
        if not first <= position <= self.end:
            return None
        found = islice(self._ring, position - first, position - first + most)
        return [Change(event.tier, event.came, event.key) for event in found]

    def past(self, keys: Collection[bytes]) -> list[Record]:
        """All records of these keys. It searches both rings, which takes some milliseconds."""
        return [event for event in chain(self._ring, self._unstored) if event.key in keys]
