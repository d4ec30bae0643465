"""A bounded ring of the changes in all tiers: which chunks can be found, or no longer, and why, in order.

The cache does not wait for followers. A follower that is behind by more than the ring learns that changes are
lost. A second ring has the chunks that should have been stored in a tier and were not.

A server keeps both rings as long as it runs, so records are packed: 48 bytes each, where an object takes 200.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np

from lmtier.format.keys import KEY_BYTES
from lmtier.observe.follower import CacheObserver

LENGTH = 65_536
_PACKED = struct.Struct(f"<{KEY_BYTES}sdQ")  # key, time, number of the event
_FIELDS = np.dtype([("key", f"V{KEY_BYTES - 8}"), ("tail", "<u8"), ("at", "<f8"), ("event", "<u8")])

_Event: TypeAlias = "tuple[str, bool, str]"
"""The tier, whether the chunk came, and why."""


class Change(NamedTuple):
    tier: str
    is_added: bool
    key: bytes


class Record(NamedTuple):
    """A change, or a chunk that was not stored, with the time by the journal's clock and the reason."""

    tier: str
    is_added: bool
    key: bytes
    at: float
    why: str
    """For a chunk that left: a word of match.py. For one that was not stored: one of metrics.DROP_REASONS."""
    was_there: bool
    """False: it was not stored."""


class _Ring:
    """The last records, by number. A record has the number of its event: few of them differ."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._packed = bytearray(length * _PACKED.size)
        self._fields = np.frombuffer(self._packed, _FIELDS)
        self._events: list[_Event] = []
        self._numbers: dict[_Event, int] = {}
        self.start = self.end = 0
        """The number of the first record, and the number of records so far."""

    @property
    def first(self) -> int:
        """The number of the first record that is still there."""
        return max(self.start, self.end - self._length)

    def add(self, event: _Event, keys: Collection[bytes], at: float) -> None:
        number = self._numbers.get(event)
        if number is None:
            number = self._numbers[event] = len(self._events)
            self._events.append(event)
        length, size, end = self._length, _PACKED.size, self.end
        for key in keys:
            _PACKED.pack_into(self._packed, end % length * size, key, at, number)
            end += 1
        self.end = end

    def since(self, position: int) -> Iterator[tuple[bytes, float, _Event]]:
        """The records from this number on, which must still be there."""
        return map(self._record, range(position, self.end))

    def _record(self, number: int) -> tuple[bytes, float, _Event]:
        key, at, event = _PACKED.unpack_from(self._packed, number % self._length * _PACKED.size)
        return key, at, self._events[event]

    def past(self, keys: Collection[bytes]) -> Iterator[tuple[bytes, float, _Event]]:
        """All records of these keys, in order. A key is the end of a hash: its last bytes nearly tell it."""
        tails = np.frombuffer(b"".join(key[-8:] for key in keys), "<u8")
        positions = np.flatnonzero(np.isin(self._fields["tail"], tails))
        for number in np.sort((positions - self.first) % self._length + self.first).tolist():
            if number < self.end and (record := self._record(number))[0] in keys:
                yield record


class Journal(CacheObserver):
    def __init__(
        self,
        length: int = LENGTH,
        clock: Callable[[], float] = time.monotonic,
        is_record: Callable[[bytes], bool] = lambda key: False,
    ) -> None:
        self._is_record = is_record
        self._changes, self._unstored = _Ring(length), _Ring(length)
        self.clock = clock

    @property
    def end(self) -> int:
        """The number of changes so far."""
        return self._changes.end

    def begin_at(self, position: int) -> None:
        """Go on with the numbers of a journal of another process, whose changes are not known here."""
        self._changes.start = self._changes.end = position

    def changed(self, tier: str, came: bool, keys: Collection[bytes], why: str) -> None:
        """Records are not noted, because they are no part of a prompt."""
        self._changes.add((tier, came, why), self._of_prompts(keys), self.clock())

    def not_stored(self, tier: str, keys: Collection[bytes], why: str) -> None:
        self._unstored.add((tier, False, why), self._of_prompts(keys), self.clock())

    def _of_prompts(self, keys: Collection[bytes]) -> list[bytes]:
        return [key for key in keys if not self._is_record(key)]

    def since(self, position: int, most: int) -> list[Change] | None:
        """Up to `most` changes after the first `position`. None: some of them are no longer known."""
        if not self._changes.first <= position <= self.end:
            return None
        found = islice(self._changes.since(position), most)
        return [Change(tier, came, key) for key, _, (tier, came, _) in found]

    def past(self, keys: Collection[bytes]) -> list[Record]:
        """All records of these keys. It searches both rings, which takes some milliseconds."""
        return [
            Record(tier, came, key, at, why, ring is self._changes)
            for ring in (self._changes, self._unstored)
            for key, at, (tier, came, why) in ring.past(keys)
        ]
