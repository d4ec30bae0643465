"""Entries whose future is known leave out of turn, under any policy.

Chunks of a session that has ended are not asked for again, so they leave first, in the order in which their
sessions ended. Those of a session that waits for a person are asked for late. How late is learned from all
that came back: they leave before the policy's oldest entry if their return is expected much later than that
entry was used, in time as the policy counts it. A wait that says nothing about the future changes nothing.
docs/POLICIES.md has the figures.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from math import log2
from typing import Generic, Self

from lmtier.rules.policy import E, Policy

_LATER = 2.0
"""How many times as late as the age of the policy's oldest entry a return has to be. Sessions that never come
back are not in the average: at 1, waits without ends cost .13 points on recorded agents."""
_RANKED_FOR = 0.1  # seconds: ranking thousands of waits takes some ms


class ReturnTimes:
    """After how long sessions came back that waited: their number and their seconds, by half octaves."""

    ENOUGH = 20
    """The number of returns from which on they show what to expect."""
    MEMORY = 1000
    """The number of returns that count at most: old ones count less and less."""
    RARE = 0.01
    """The share of returns that take so long that nothing is known of what comes after."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._counts: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._total = 0.0
        self._later: dict[int, tuple[float, float]] = {}
        """The sums of all half octaves after one, until the next return."""

    def add(self, seconds: float) -> None:
        self._later.clear()
        number = _half_octave(seconds)
        self._counts[number] = self._counts.get(number, 0.0) + 1
        self._seconds[number] = self._seconds.get(number, 0.0) + seconds
        self._total += 1
        if self._total >= self.MEMORY:
            for sums in (self._counts, self._seconds):
                sums.update({number: value / 2 for number, value in sums.items()})
            self._total /= 2

    def expected(self, waited: float) -> float:
        """The seconds until one comes back that has waited for so long, on average. 0: not known."""
        if self._total < self.ENOUGH:
            return 0.0
        number = _half_octave(waited)
        end = 2.0 ** ((number + 1) / 2)
        begin = 2.0 ** (number / 2) if number else 0.0
        count = self._counts.get(number, 0.0) * min(1.0, (end - waited) / (end - begin))
        seconds = count * (waited + end) / 2
        if number not in self._later:
            later = [each for each in self._counts if each > number]
            self._later[number] = (
                sum(map(self._counts.__getitem__, later)),
                sum(map(self._seconds.__getitem__, later)),
            )
        count += self._later[number][0]
        seconds += self._later[number][1]
        if count < self.RARE * self._total:
            return waited  # who has been silent for long stays so for as long again
        return float(seconds / count - waited)


def _half_octave(seconds: float) -> int:
    return int(2 * log2(max(1.0, seconds)))


class _Wait(Generic[E]):
    """The entries of a session that still wait, tail first, and since when it does."""

    __slots__ = ("entries", "since")

    def __init__(self, run: Iterable[E], since: float) -> None:
        self.entries, self.since = OrderedDict.fromkeys(run), since


class SessionAwarePolicy(Policy[E]):
    """A policy, with what is known of sessions before it. An entry that leaves out of turn is in both."""

    LEAST = 32
    """So many waits that are over may stay in the ranking; or as many as are not."""

    def __init__(self, policy: Policy[E], returns: ReturnTimes | None = None) -> None:
        """`returns`: of the sessions that wait. Without it none does, and entries keep their times."""
        self._policy = policy
        self._returns = returns
        self._over: OrderedDict[E, None] = OrderedDict()
        self._waits: dict[E, _Wait[E]] = {}
        self._ranking = deque[tuple[float, _Wait[E]]]()
        """The waits with their expected rest, the longest rest first, as it was a moment ago. New ones are
        last, with a rest of 0."""
        self._ranked_at = float("-inf")
        self._most = self.LEAST
        """The length of the ranking from which on those are looked for that are over."""

    def another(self) -> Self:
        return type(self)(self._policy.another(), self._returns)

    def use(self, policy: Policy[E]) -> None:
        """Order by another policy. It takes the present order as the order of arrival; what waits stays."""
        with closing(self._policy.order()) as order:
            policy.insert(*order)
        self._policy = policy

    def evict_first(self, run: Iterable[E]) -> None:
        """These are not asked for again, tail first."""
        run = list(run)
        self._forget(run)
        self._over.update(dict.fromkeys(run))

    def wait(self, run: Iterable[E], since: float) -> None:
        """These are asked for when a person comes back, tail first."""
        wait = _Wait(run, since)
        self._forget(wait.entries)
        self._waits.update(dict.fromkeys(wait.entries, wait))
        self._ranking.append((0.0, wait))
        if len(self._ranking) > self._most:  # nothing was evicted for long
            self._ranking = deque(each for each in self._ranking if each[1].entries)
            self._most = 2 * len(self._ranking) + self.LEAST

    def _forget(self, entries: Iterable[E]) -> None:
        over, waits = self._over, self._waits
        for entry in entries:
            over.pop(entry, None)
            if (wait := waits.pop(entry, None)) is not None:
                del wait.entries[entry]

    def insert(self, *entries: E) -> None:
        if self._returns is not None:
            now = self._now()
            for entry in entries:  # one that another process hands over has its time
                entry.last_used_ns = entry.last_used_ns or now
        self._policy.insert(*entries)

    def touch(self, entries: Iterable[E]) -> None:
        """A request was made for them after all, so nothing is known any more."""
        self._policy.touch(self._used(entries))

    def refresh(self, entries: Iterable[E]) -> None:
        self._policy.refresh(self._used(entries))

    def _used(self, entries: Iterable[E]) -> Iterable[E]:
        if self._over or self._waits:
            entries = list(entries)
            self._forget(entries)
        if self._returns is not None:
            entries, now = list(entries), self._now()
            for entry in entries:
                entry.last_used_ns = now
        return entries

    def on_miss(self, keys: Sequence[bytes]) -> None:
        self._policy.on_miss(keys)

    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        if self._over or self._waits:
            self._forget(entries)
        self._policy.remove(entries, evicted)

    def order(self) -> Generator[E, None, None]:
        """An entry that leaves out of turn comes again in the policy's order. The caller passes over it."""
        yield from self._over
        with closing(self._policy.order()) as usual:
            if self._waits:
                oldest, now, speed = next(usual, None), self._now(), self._policy.speed
                for rest, wait in self._ranked():
                    if not wait.entries:
                        continue
                    late = 1e9 / _LATER * rest * speed(next(reversed(wait.entries)))
                    while oldest is not None and speed(oldest) * (now - oldest.last_used_ns) >= late:
                        yield oldest
                        oldest = next(usual, None)
                    yield from wait.entries
                yield from () if oldest is None else (oldest,)
            yield from usual

    def _now(self) -> int:
        assert self._returns is not None
        return int(1e9 * self._returns.clock())

    def _ranked(self) -> Iterable[tuple[float, _Wait[E]]]:
        assert self._returns is not None
        now = self._returns.clock()
        if now - self._ranked_at >= _RANKED_FOR:
            waits = [wait for _, wait in self._ranking if wait.entries]
            rests = [(self._returns.expected(now - wait.since), wait) for wait in waits]
            self._ranking = deque(sorted(rests, key=lambda each: -each[0]))
            self._ranked_at = now
        while self._ranking and not self._ranking[0][1].entries:
            self._ranking.popleft()
        return self._ranking

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, entry: E) -> bool:
        return entry in self._policy
