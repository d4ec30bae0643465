"""What became findable in a tier and what ceased to be, in order: a bounded ring for those who follow.

Nobody waits for a follower. One who has fallen behind by more than the ring is told that changes are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from lmtier.keys import is_value

_LENGTH = 65_536


class Change(NamedTuple):
    tier: str
    came: bool
    key: bytes


class Journal:
    def __init__(self, length: int = _LENGTH) -> None:
        self._ring: deque[Change] = deque(maxlen=length)
        self.end = 0
        """How many changes there have been."""

    def note(self, tier: str, came: bool, keys: Iterable[bytes]) -> None:
        """Named values are not told of: they are no part of a prompt."""
        for key in keys:
            if not is_value(key):
                self._ring.append(Change(tier, came, key))
                self.end += 1

    def since(self, position: int, most: int) -> list[Change] | None:
        """Up to `most` changes after the first `position`; None: they are not all known any more."""
        first = self.end - len(self._ring)
        if not first <= position <= self.end:
            return None
        return list(islice(self._ring, position - first, position - first + most))
