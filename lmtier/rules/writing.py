"""Which chunks are written to a lower tier: the rule that would have hit more, within a daily budget. No I/O.

Writes wear an SSD, and most chunks are never asked for again. `WriteRuleTrial` constantly tests two rules on
a sample of the keys, as `policy=auto` does for eviction. `Budget` is a token bucket of bytes per day.
`WriteRate` measures the bytes written per day. Callers pass times, in seconds of any clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp

DAY, HOUR = 86_400.0, 3_600.0  # seconds


class Budget:
    """Bytes that may be written: never more than `per_day` in any 24 hours, restarts included.

    The bucket holds an hour's worth. This and the day's drip together stay within the day's bytes. It begins
    empty: a bucket that began full would give that hour again after every restart. While it is nearly empty,
    only chunks that were asked for twice are written.

    If a chunk is larger than an hour's worth, the bucket grows to hold it, and drips less. A restart forgets
    that. So the 24 hours around a restart may have one such chunk more.
    """

    LARGEST = 1 / 2  # the part of the day's bytes that one chunk may take
    KEPT = 1 / 32  # the part of the bucket that is reserved for chunks that were asked for twice

    def __init__(self, per_day: float, now: float) -> None:
        self._per_day = per_day
        self._hold(per_day * HOUR / DAY)
        self._left = 0.0
        self._at = now
        self._reserved = 0

    def _hold(self, most: float) -> None:
        self._most, self._rate = most, (self._per_day - most) / DAY

    def left(self, now: float) -> float:
        """Bytes in the bucket that are not reserved."""
        self._left = min(self._most, self._left + self._rate * (now - self._at))
        self._at = now
        return self._left - self._reserved

    def allows(self, nbytes: int, is_proven: bool, now: float) -> bool:
        available = self.left(now)
        if self._most < nbytes <= self._per_day * self.LARGEST:
            self._hold(nbytes)
        return nbytes <= available and (is_proven or available >= self._most * self.KEPT)

    def reserve(self, nbytes: int) -> None:
        """Reserve the bytes that `allows` has just allowed. `spend` follows with the bytes written."""
        self._reserved += nbytes

    def spend(self, reserved: int, written: int, now: float) -> None:
        """Count a write: `written` bytes of the `reserved` ones, which is not more."""
        self.left(now)
        self._reserved -= reserved
        self._left -= written


class WriteRate:
    """The recent bytes per day. A byte written a day ago weighs a third of one written now.

    The first hour counts as a whole hour from its start, because the first minutes say little about a day.
    """

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self._bytes = 0.0

    def wrote(self, nbytes: int, now: float) -> None:
        self._bytes = self._faded(now) + nbytes
        self._at = now

    def per_day(self, now: float) -> float:
        weight = 1 - exp(-max(HOUR, now - self._began) / DAY)  # the sum that one byte a day would give
        return self._faded(now) / weight

    def _faded(self, now: float) -> float:
        return self._bytes * exp((self._at - now) / DAY)


class WriteRuleTrial:
    """Chooses to write chunks that are asked for again, or those that leave the slab, by recent hits.

    Each rule has a small cache of keys that stands for the tier. It gets one key in `SAMPLE`, and its share
    of the budget if there is one: hits that the budget would not have paid for do not count.
    """

    RULES = ("reused", "evicted")
    SAMPLE = 32  # one key in so many is tested
    PROOF = 12  # the lead in hits that only one of the two had, from which on it is used
    MOST = 32_768  # keys that a small cache holds at most, however large the tier is

    def __init__(self, capacity: int, per_day: float | None, now: float) -> None:
        self.resize(capacity)
        self.trials = [
            _KeyCache(None if per_day is None else Budget(per_day / self.SAMPLE, now)) for _ in self.RULES
        ]
        self._balance = 0  # above 0, the second one hits more
        self._was_full = False
        self.rule = self.RULES[1]

    def resize(self, capacity: int) -> None:
        self._capacity = capacity

    def on_miss(self, keys: Sequence[bytes]) -> None:
        """A request asked for these, and the slab did not have them."""
        for key in reversed(keys):  # the head is the youngest, so that it stays longest
            if key[-1] % self.SAMPLE == 0:
                first, second = (trial.has(key) for trial in self.trials)
                if first is not second:
                    self._balance = max(-self.PROOF, min(self.PROOF, self._balance + second - first))
                    if abs(self._balance) == self.PROOF:
                        self.rule = self.RULES[self._balance > 0]

    def on_full(self) -> None:
        """A chunk must leave.

        Until then there was room for all; from now on the rule that writes more must lead.
        """
        if not self._was_full:
            self._was_full = True
            self.rule = self.RULES[self._balance == self.PROOF]

    def on_stored(self, key: bytes, is_proven: bool, nbytes: int, now: float) -> None:
        """The chunk is in the slab now."""
        if is_proven and key[-1] % self.SAMPLE == 0:
            self.trials[0].write(key, nbytes, is_proven, self._room(nbytes), now)

    def on_hit(self, keys: Sequence[bytes], nbytes: int, now: float) -> None:
        """A request asked for these, at least the second one, and the slab has them."""
        reused, evicted = self.trials
        for key in reversed(keys):
            if key[-1] % self.SAMPLE == 0:
                evicted.has(key)
                if not reused.has(key):
                    reused.write(key, nbytes, True, self._room(nbytes), now)

    def on_evicting(self, key: bytes, is_proven: bool, nbytes: int, now: float) -> None:
        """The chunk is among the next to leave the slab."""
        if key[-1] % self.SAMPLE == 0:
            self.trials[1].write(key, nbytes, is_proven, self._room(nbytes), now)

    def _room(self, nbytes: int) -> int:
        return min(self.MOST, max(1, self._capacity // nbytes // self.SAMPLE))


class _KeyCache:
    """A tier that holds only keys, in LRU order."""

    def __init__(self, budget: Budget | None) -> None:
        self._budget = budget
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def has(self, key: bytes) -> bool:
        if key not in self._keys:
            return False
        self._keys.move_to_end(key)
        return True

    def write(self, key: bytes, nbytes: int, is_proven: bool, room: int, now: float) -> None:
        if key in self._keys:
            return
        if self._budget is not None:
            if not self._budget.allows(nbytes, is_proven, now):
                return
            self._budget.reserve(nbytes)
            self._budget.spend(nbytes, nbytes, now)
        self._keys[key] = None
        while len(self._keys) > room:
            self._keys.popitem(last=False)
