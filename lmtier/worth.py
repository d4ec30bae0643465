"""Load or recompute: what a load will take, what a prefill will take, and the cut that costs the least. Pure.

Both costs are learned from what happened: a tier's from its own transfers, a prefill's from the engine's own
steps. How well a decision went can be seen: what was predicted stands beside what it took, in the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, isfinite, log
from operator import mul
from typing import NamedTuple

import numpy as np

AUTO, ALWAYS, NEVER = "auto", "always", "never"
WORTH = (AUTO, ALWAYS, NEVER)

PATIENCE = 1.5
"""A load is given up after so many times what computing instead would take."""
_MARGIN = 0.03
"""Loading may be slower by this: it leaves the engine's time to others."""
_PIECE = 0.1
"""Seconds after which a tier that is never idle is measured."""
_TOGETHER = 1e-3
"""Seconds between what comes at the same time."""
_EXPLORED = 1 / 16
"""Of the bytes that are not loaded because a tier is slow: so many are, to learn whether it still is."""
_FRESH = 1.0
"""Seconds for which a tier that was measured is not explored."""
EXPLORED_AT_LAST = 10.0
"""Seconds for which that waits until engines are done with what they compute instead."""
_UNKNOWN = 1.0
"""The variance of the logarithm of what nobody knows."""
_ODD = 2.5
"""Standard deviations from which on an observation is odd."""
_WARM_UP = 8
"""Observations before the first of which an odd one can be told."""
_ENOUGH = 4
"""Steps until an engine's prefill is known: the first ones warm up."""


class Fit:
    """seconds = the sum of weight × amount, learned one observation at a time, the past forgotten.

    What is learned is the logarithm of each weight, by a Kalman filter: so weights stay positive, and ten
    times slower is learned as fast as ten times faster. Rejected: least squares with forgetting, for which a
    tier that gets slower is one error among many; and a step in each weight by its share of the error, which
    takes hundreds of observations to tell the weights apart.
    """

    def __init__(
        self, shares: Sequence[float], noise: float, drift: float, most: float, odd: int = 1
    ) -> None:
        """`shares`: of what makes up the first observation, as far as one can guess. An observation is off
        by a factor of about 1 + `noise`, and the variance of a weight's logarithm grows by `drift` between
        two. Once there are some, none counts as further off than by the factor `most`. After `odd` of them
        in turn that are far off to the same side, what was learned before counts no more."""
        self.weights: tuple[float, ...] = ()
        self.seen = 0
        self._shares, self._noise, self._drift, self._most = shares, noise**2, drift**2, log(most)
        size = range(len(shares))
        self._spread = [[_UNKNOWN * (i == k) for i in size] for k in size]
        """The covariance of the logarithms."""
        self._patience = odd
        self._odd = 0
        """How many observations in turn were much more than expected, or, negative, much less."""

    def seconds(self, amounts: Sequence[float]) -> float:
        return sum(weight * amount for weight, amount in zip(self.weights, amounts, strict=True))

    def learn(self, amounts: Sequence[float], seconds: float) -> None:
        seconds = max(seconds, 1e-7)
        self.seen += 1
        if not self.weights:
            self.weights = tuple(
                seconds * share / max(amount, 1.0)
                for share, amount in zip(self._shares, amounts, strict=True)
            )
        expected = self.seconds(amounts)
        shares = [weight * amount / expected for weight, amount in zip(self.weights, amounts, strict=True)]
        most = self._most if self.seen > _WARM_UP else inf
        error = max(-most, min(most, log(seconds / expected)))
        along = [sum(map(mul, row, shares)) for row in self._spread]
        sign = (error > 0) - (error < 0)
        if error * error < _ODD**2 * (self._noise + sum(map(mul, along, shares))):
            self._odd = 0
        else:
            self._odd = self._odd + sign if self._odd * sign > 0 else sign
        if abs(self._odd) >= self._patience:
            size = range(len(shares))
            self._spread = [[_UNKNOWN * (i == k) for i in size] for k in size]
            along = [_UNKNOWN * share for share in shares]
        gain = [each / (self._noise + sum(map(mul, along, shares))) for each in along]
        self.weights = tuple(
            max(weight * exp(each * error), 1e-15) for weight, each in zip(self.weights, gain, strict=True)
        )
        for i, row in enumerate(self._spread):
            for k, each in enumerate(along):
                row[k] -= gain[i] * each
            if row[i] < _UNKNOWN:
                row[i] += self._drift


class Cost(NamedTuple):
    """What an engine tells of itself: seconds to compute tokens, and to take them from the slab."""

    fixed: float
    """Of any prefill."""
    token: float
    """Each token, wherever it stands."""
    position: float
    """Each token, for each token before it."""
    copy: float
    """Each token, from the slab into the engine's blocks."""

    def prefill(self, start: int, end: int) -> float:
        """Seconds to compute the tokens from `start` to `end`."""
        return self.fixed + self.token * (end - start) + self.position * (end * end - start * start) / 2

    @property
    def is_sane(self) -> bool:
        return all(isfinite(each) and each >= 0 for each in self)


class Prefill:
    """Learns the cost of an engine from its steps."""

    def __init__(self) -> None:
        self._steps = Fit((0.3, 0.6, 0.1), noise=0.1, drift=0.01, most=2.0, odd=4)
        self._copies = Fit((1.0,), noise=0.2, drift=0.03, most=2.0)

    def learn(self, tokens: int, area: float, seconds: float) -> float:
        """A step computed so many tokens; `area` is the sum of their positions. What was expected of it."""
        expected = self._steps.seconds((1.0, tokens, area)) if self._steps.weights else seconds
        self._steps.learn((1.0, tokens, area), seconds)
        return expected

    def copied(self, tokens: int, seconds: float) -> None:
        self._copies.learn((tokens,), seconds)

    @property
    def cost(self) -> Cost | None:
        """None: not known yet."""
        if self._steps.seen < _ENOUGH:
            return None
        fixed, token, position = self._steps.weights
        return Cost(fixed, token, position, *(self._copies.weights or (0.0,)))


class Line(NamedTuple):
    """When so many bytes, asked for now, will have come: start + byte × bytes."""

    start: float
    byte: float


class Speed:
    """How fast a tier supplies what is asked of it, and what it owes just now."""

    def __init__(self) -> None:
        self.queued = 0
        """Bytes that were asked for and have not come."""
        self._fit = Fit((0.2, 0.8), noise=0.2, drift=0.03, most=1000.0)
        self._heard = 0.0
        """When something came, or, if nothing has, was asked of an idle tier."""
        self._began, self._was_idle, self._moved = 0.0, 1.0, 0
        """Of the piece of time that is being measured."""
        self._measured = float("-inf")
        self._owed = 0.0
        """Bytes of what was too slow that may be asked for all the same."""
        self._next = 1
        """Chunks of them to ask for next: 1, 2, 4 and so on, as one alone tells latency from speed badly."""

    def asked(self, nbytes: int, now: float) -> None:
        if not self.queued:
            self._began = self._heard = now
            self._was_idle, self._moved = 1.0, 0
        self.queued += nbytes

    def ended(self, nbytes: int, now: float, *, counts: bool = True) -> None:
        """It has come, or will not. A miss says nothing of the speed, one for want of time does."""
        took = self._heard - self._began
        # What comes together is of one piece: cut in its middle, the rest would have come in no time.
        if took >= _PIECE and (now - self._heard > _TOGETHER or took >= 4 * _PIECE):
            self._cut()
        self.queued -= nbytes
        self._heard = now
        self._moved += nbytes * counts
        if not self.queued and (self._was_idle or now - self._began >= _PIECE):
            self._cut()

    def _cut(self) -> None:
        """The end of a piece of time, when something was last heard."""
        if self._moved:
            self._fit.learn((self._was_idle, self._moved), self._heard - self._began)
            self._measured = self._heard
            self._began, self._was_idle, self._moved = self._heard, 0.0, 0

    def line(self, now: float) -> Line | None:
        """None: nothing has been measured yet. What has not moved for a while may take as long again."""
        if not self._fit.weights:
            return None
        latency, byte = self._fit.weights
        stalled = now - self._heard if self.queued else 0.0
        return Line(max(latency + byte * self.queued, stalled), byte)

    def skipped(self, nbytes: int) -> None:
        """So much is not asked for, because it is too slow."""
        self._owed = min(self._owed + nbytes * _EXPLORED, float(nbytes))

    def explores(self, chunks: int, nbytes: int, now: float) -> int:
        """How many of so many chunks, of so many bytes each, to load all the same: few, and now and then,
        or it would never be seen that it is not slow any more."""
        wanted = min(self._next, chunks)
        if self.queued or self._owed < wanted * nbytes or now - self._measured < _FRESH:
            return 0
        self._owed -= wanted * nbytes
        self._next = 2 * wanted if wanted < chunks else 1
        return wanted


class Choice(NamedTuple):
    chunks: int
    """How many leading ones to load."""
    arrival: float
    """Seconds until all of them are in the slab."""


def cut(
    cost: Cost,
    tokens: int,
    has: int,
    chunk_tokens: int,
    places: Sequence[int],
    nbytes: int,
    lines: Sequence[Line],
) -> Choice:
    """The number of leading chunks after which the first token is expected soonest, of all there are.

    `places`: the number of each chunk's line, -1 if it is in the slab, and -2 - number if it is under way
    from there. The tiers read at the same time; what the engine has not yet, is copied when all has come;
    the rest of the prompt is computed.
    """
    ends = np.arange(len(places) + 1) * chunk_tokens
    place = np.array(places, dtype=np.int64)
    arrival = np.zeros(len(ends))
    for number, (start, byte) in enumerate(lines):
        asked = np.cumsum(place == number)
        begun = np.cumsum(place == -2 - number) + asked > 0
        arrival[1:] = np.maximum(arrival[1:], begun * (start + byte * nbytes * asked))
    known = np.maximum(ends, has).astype(float)
    rest = cost.token * (tokens - known) + cost.position * (tokens * tokens - known * known) / 2
    total = arrival + cost.copy * (known - has) + cost.fixed + rest
    chunks = int(np.flatnonzero(total <= total.min() + _MARGIN * abs(total.min()))[-1])
    return Choice(chunks, float(arrival[chunks]))
