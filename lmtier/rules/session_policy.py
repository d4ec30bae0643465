"""Entries whose future is known leave before all others, under any policy.

Chunks of a session that has ended are not asked for again, so they leave first, in the order in which their
sessions ended. Chunks of a session that waits for a person are asked for late, so they leave next. Of those,
who began to wait last leaves first: the others are nearer to their return. docs/POLICIES.md has the figures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from math import log2
from typing import Self

from lmtier.rules.policy import E, Policy


class SessionAwarePolicy(Policy[E]):
    """A policy, with these two queues before its own order. An entry in a queue stays in the policy too."""

    def __init__(self, policy: Policy[E]) -> None:
        self._policy = policy
        self._over: OrderedDict[E, None] = OrderedDict()
        self._waiting: OrderedDict[E, None] = OrderedDict()

    def another(self) -> Self:
        return type(self)(self._policy.another())

    def use(self, policy: Policy[E]) -> None:
        """Order by another policy. It takes the present order as the order of arrival; the queues stay."""
        with closing(self._policy.order()) as order:
            policy.insert(*order)
        self._policy = policy

    def evict_first(self, run: Iterable[E]) -> None:
        """These are not asked for again, tail first."""
        run = list(run)
        self._forget(run)
        self._over.update(dict.fromkeys(run))

    def evict_next(self, run: Iterable[E]) -> None:
        """These are asked for late, tail first."""
        run = list(run)
        self._forget(run)
        self._waiting.update(dict.fromkeys(reversed(run)))

    def _forget(self, entries: Iterable[E]) -> None:
        over, waiting = self._over, self._waiting
        for entry in entries:
            over.pop(entry, None)
            waiting.pop(entry, None)

    def insert(self, *entries: E) -> None:
        self._policy.insert(*entries)

    def touch(self, entries: Iterable[E]) -> None:
        """A request was made for them after all, so nothing is known any more."""
        if self._over or self._waiting:
            entries = list(entries)
            self._forget(entries)
        self._policy.touch(entries)

    def refresh(self, entries: Iterable[E]) -> None:
        if self._over or self._waiting:
            entries = list(entries)
            self._forget(entries)
        self._policy.refresh(entries)

    def on_miss(self, keys: Sequence[bytes]) -> None:
        self._policy.on_miss(keys)

    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        if self._over or self._waiting:
            self._forget(entries)
        self._policy.remove(entries, evicted)

    def order(self) -> Generator[E, None, None]:
        """An entry of a queue comes a second time in the policy's order. The caller passes over it then."""
        yield from self._over
        yield from reversed(self._waiting)
        yield from self._policy.order()

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, entry: E) -> bool:
        return entry in self._policy


class ReturnTimes:
    """After how long sessions came back that waited: numbers of returns, by powers of two of seconds."""

    ENOUGH = 100
    """The number of returns from which on they show how long a return can take."""
    SHARE = 0.99
    """The share of returns that come within `longest`, or within half of it."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0

    def add(self, seconds: float) -> None:
        octave = int(log2(max(1.0, seconds)))
        self._counts[octave] = self._counts.get(octave, 0) + 1
        self._total += 1
        if self._total >= 10 * self.ENOUGH:  # old ones count less and less
            self._counts = {each: count / 2 for each, count in self._counts.items()}
            self._total /= 2

    @property
    def longest(self) -> float:
        """The seconds after which hardly any session comes back. Infinite: not known yet."""
        if self._total < self.ENOUGH:
            return float("inf")
        before = 0.0
        for octave in sorted(self._counts):
            before += self._counts[octave]
            if before >= self.SHARE * self._total:
                return float(4 << octave)  # twice the end of the octave
        raise AssertionError("the shares of all octaves add up to one")
