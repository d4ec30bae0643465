"""The lifetimes of chunks: when each expires, and which are pinned by name. No I/O.

The end of a chunk never moves to a later time. It is set when the chunk is stored, from the ttl of the
request and of the tier. A load keeps it; a write to a lower tier may make it earlier, by that tier's ttl. A
pin protects a chunk from eviction, not from expiry.

The wall clock is read once, for `HeaderClock`. From then on time is monotonic, and headers of objects are
written and read by that one relation. So a step of the wall clock expires nothing early or late while a
process runs. Objects of another process are off by as much as its clock was.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Generic, NamedTuple, TypeVar

from lmtier.errors import MisuseError

FOREVER = inf
MAX_TTL = 100 * 365 * 86400.0
"""Seconds."""
MAX_PINS = 1024
MAX_PINNED = 1 << 18

K = TypeVar("K", bound=Hashable)


def seconds_of(ttl: float | None) -> float:
    """The ttl of a request; None: it has none."""
    if ttl is not None and not 0 < ttl <= MAX_TTL:
        raise MisuseError(f"ttl={ttl}: must be more than 0 seconds, and at most 100 years")
    return FOREVER if ttl is None else ttl


class HeaderClock:
    """Converts ends, in seconds of a monotonic clock, to the times in headers of objects, and back."""

    def __init__(self, now: float, wall: float) -> None:
        self._epoch = wall - now

    def stamp(self, end: float) -> int:
        """In ms since the epoch, rounded down; 0: never."""
        return 0 if end == FOREVER else max(1, int((end + self._epoch) * 1000))

    def end(self, stamp: int) -> float:
        return stamp / 1000 - self._epoch if stamp else FOREVER


class Expiries(Generic[K]):
    """The ends of the items that have one. Items without an end take no memory.

    They are also sorted into whole seconds, so that setting, forgetting and finding one are O(1), and an
    item that leaves before its end leaves nothing behind.
    """

    def __init__(self) -> None:
        self._ends: dict[K, float] = {}
        self._due: dict[int, dict[K, None]] = {}
        self._swept = 0
        """No item ends in a second before this one."""

    def __len__(self) -> int:
        return len(self._ends)

    def expiry(self, item: K) -> float:
        return self._ends.get(item, FOREVER)

    def is_expired(self, item: K, now: float) -> bool:
        return self._ends.get(item, FOREVER) <= now

    def set(self, item: K, end: float) -> None:
        self.forget(item)
        if end == FOREVER:
            return
        second = int(end)
        self._swept = min(self._swept, second) if self._due else second
        self._ends[item] = end
        self._due.setdefault(second, {})[item] = None

    def forget(self, item: K) -> None:
        end = self._ends.pop(item, None)
        if end is not None:
            due = self._due[int(end)]
            del due[item]
            if not due:
                del self._due[int(end)]

    def expired(self, now: float, most: int) -> list[K]:
        """Up to `most` expired items, at most a second late. The caller must `forget` them."""
        expired: list[K] = []
        while self._due and self._swept < int(now):
            expired += islice(self._due.get(self._swept, ()), most - len(expired))
            if len(expired) == most:
                break
            self._swept += 1
            if int(now) - self._swept > len(self._due):  # a year may lie between two ends, or fifty
                later = (second for second in self._due if second >= self._swept)
                self._swept = min(int(now), min(later, default=int(now)))
        return expired

    def check(self) -> None:
        due = {item: second for second, items in self._due.items() for item in items}
        assert due == {item: int(end) for item, end in self._ends.items()}, "seconds and ends differ"
        assert all(self._due.values()), "an empty second is kept"
        assert not due or self._swept <= min(self._due), "a second was passed over"


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    keys: tuple[bytes, ...]
    end: float


class Pinned(NamedTuple):
    """A pin, for display."""

    name: str
    chunks: int
    pinned: dict[str, int]
    """How many of its chunks each tier has pinned."""
    seconds_left: float | None
    """None: it lasts until `unpin`."""


class Pins:
    """Named pins, by key, so that chunks which are stored or loaded later are pinned too."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}
        self.wanted: dict[bytes, int] = {}
        """How many pins want each key."""

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    def need_room(self, name: str, keys: int) -> None:
        """Raise if there are too many pins or keys: their keys take memory."""
        if len(self._pins) >= MAX_PINS and name not in self._pins:
            raise MisuseError(f"there are {MAX_PINS} pins: unpin one first")
        if sum(len(pin.keys) for pin in self) + keys > MAX_PINNED:
            raise MisuseError(f"all pins together have at most {MAX_PINNED} chunks: unpin something first")

    def put(self, name: str, keys: Sequence[bytes], end: float = FOREVER) -> list[bytes]:
        """Add a pin, or replace the one of this name. Returns the keys that no pin wants any more."""
        for key in keys:  # before the old keys are removed, so that a key of both stays pinned
            self.wanted[key] = self.wanted.get(key, 0) + 1
        unwanted = self.take(name)
        self._pins[name] = Pin(name, tuple(keys), end)
        return unwanted

    def take(self, name: str) -> list[bytes]:
        """End a pin. Returns the keys that no pin wants any more."""
        pin = self._pins.pop(name, None)
        unwanted = []
        for key in pin.keys if pin is not None else ():
            self.wanted[key] -= 1
            if not self.wanted[key]:
                del self.wanted[key]
                unwanted.append(key)
        return unwanted

    def over(self, now: float) -> list[str]:
        return [pin.name for pin in self._pins.values() if pin.end <= now]

    def check(self) -> None:
        counts: dict[bytes, int] = {}
        for key in _all(pin.keys for pin in self):
            counts[key] = counts.get(key, 0) + 1
        assert counts == self.wanted, "the pins and their keys differ"


def _all(parts: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    return (key for part in parts for key in part)
