"""Load or recompute: predicts the time of a load and of a prefill, and finds the cheapest cut. No I/O.

Both costs are learned from measurements: a tier's from its own transfers, a prefill's from the engine's own
steps. The metrics show the predicted time of loads next to the actual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log
from operator import mul
from typing import NamedTuple

import numpy as np

AUTO, ALWAYS, NEVER = "auto", "always", "never"
WORTH = (AUTO, ALWAYS, NEVER)

PATIENCE = 1.5
"""A load is given up after so many times the time of computing instead."""
_DAY = 86_400.0
"""Seconds. No step of an engine takes as long."""
_MARGIN = 0.03
"""Loading may be slower by this part, because it leaves the engine's time to other requests."""
_PIECE = 0.1
"""Seconds after which a tier that is never idle is measured."""
_TOGETHER = 1e-3
"""Chunks that arrive within so many seconds count as arriving together."""
_EXPLORED = 1 / 16
"""The part of skipped bytes that is loaded all the same, to learn whether a slow tier is still slow."""
_FRESH = 1.0
"""Seconds after a measurement for which a tier is not explored."""
EXPLORED_AT_LAST = 10.0
"""The longest time, in seconds, that exploring waits for engines to finish computing."""
_UNKNOWN = 1.0
"""The variance of the logarithm of an unknown weight."""
_ODD = 2.5
"""An observation that is off by so many standard deviations is odd."""
_WARM_UP = 8
"""The first observations, among which none counts as odd."""
_ENOUGH = 4
"""Steps until an engine's prefill cost is known. The first steps warm up."""


class CostFilter:
    """seconds = the sum of weight × amount, learned one observation at a time; old ones fade.

    A Kalman filter learns the logarithm of each weight. So weights stay positive, and ten times slower is
    learned as fast as ten times faster. Rejected: least squares with forgetting, for which a tier that gets
    slower is one error among many; and a step in each weight by its share of the error, which takes hundreds
    of observations to tell the weights apart.
    """

    def __init__(
        self, shares: Sequence[float], noise: float, drift: float, most: float, odd: int = 1
    ) -> None:
        """`shares` is a guess of each weight's share in the first observation. An observation is off by a
        factor of about 1 + `noise`. The variance of a weight's logarithm grows by `drift` between two
        observations. After the first few, an observation counts as off by at most the factor `most`. After
        `odd` successive observations that are far off to the same side, the weights are learned anew."""
        self.weights: tuple[float, ...] = ()
        self.observations = 0
        self._shares, self._noise, self._drift, self._most = shares, noise**2, drift**2, log(most)
        size = range(len(shares))
        self._spread = [[_UNKNOWN * (i == k) for i in size] for k in size]
        """The covariance of the logarithms."""
        self._patience = odd
        self._odd = 0
        """How many successive observations were far above the expected value; negative: far below it."""

    def seconds(self, amounts: Sequence[float]) -> float:
        return sum(weight * amount for weight, amount in zip(self.weights, amounts, strict=True))

    def learn(self, amounts: Sequence[float], seconds: float) -> None:
        seconds = max(seconds, 1e-7)
        self.observations += 1
        if not self.weights:
            self.weights = tuple(
                seconds * share / max(amount, 1.0)
                for share, amount in zip(self._shares, amounts, strict=True)
            )
        expected = self.seconds(amounts)
        shares = [weight * amount / expected for weight, amount in zip(self.weights, amounts, strict=True)]
        max_error = self._most if self.observations > _WARM_UP else inf
        error = max(-max_error, min(max_error, log(seconds / expected)))
        row_sums = [sum(map(mul, row, shares)) for row in self._spread]
        sign = (error > 0) - (error < 0)
        if error * error < _ODD**2 * (self._noise + sum(map(mul, row_sums, shares))):
            self._odd = 0
        else:
            self._odd = self._odd + sign if self._odd * sign > 0 else sign
        if abs(self._odd) >= self._patience:
            size = range(len(shares))
            self._spread = [[_UNKNOWN * (i == k) for i in size] for k in size]
            row_sums = [_UNKNOWN * share for share in shares]
        gain = [each / (self._noise + sum(map(mul, row_sums, shares))) for each in row_sums]
        self.weights = tuple(
            max(weight * exp(each * error), 1e-15) for weight, each in zip(self.weights, gain, strict=True)
        )
        for i, row in enumerate(self._spread):
            for k, each in enumerate(row_sums):
                row[k] -= gain[i] * each
            if row[i] < _UNKNOWN:
                row[i] += self._drift


class Cost(NamedTuple):
    """The cost that an engine reports: seconds to compute tokens, and to copy them from the slab."""

    fixed: float
    """Seconds of any prefill."""
    token: float
    """Seconds per token, at any position."""
    position: float
    """Seconds per token and per token before it."""
    copy: float
    """Seconds per token to copy it from the slab into the engine's blocks."""

    def prefill(self, start: int, end: int) -> float:
        """Seconds to compute the tokens from `start` to `end`."""
        return self.fixed + self.token * (end - start) + self.position * (end * end - start * start) / 2

    @property
    def is_sane(self) -> bool:
        return all(0 <= each <= _DAY for each in self)


class EngineCosts:
    """Learns the cost of an engine from its steps."""

    def __init__(self) -> None:
        self._steps = CostFilter((0.3, 0.6, 0.1), noise=0.1, drift=0.01, most=2.0, odd=4)
        self._copies = CostFilter((1.0,), noise=0.2, drift=0.03, most=2.0)

    def learn(self, tokens: int, area: float, seconds: float) -> float:
        """Learn from a step of `tokens` tokens; `area` is the sum of their positions.

        Returns the prediction.
        """
        expected = self._steps.seconds((1.0, tokens, area)) if self._steps.weights else seconds
        self._steps.learn((1.0, tokens, area), seconds)
        return expected

    def learn_copy(self, tokens: int, seconds: float) -> None:
        self._copies.learn((tokens,), seconds)

    @property
    def cost(self) -> Cost | None:
        """The learned cost. None: it is not known yet."""
        if self._steps.observations < _ENOUGH:
            return None
        fixed, token, position = self._steps.weights
        return Cost(fixed, token, position, *(self._copies.weights or (0.0,)))


class ArrivalEstimate(NamedTuple):
    """A prediction: bytes that are requested now arrive after start + byte × bytes."""

    start: float
    byte: float


class TierSpeed:
    """The speed of a tier, and the bytes that it still has to deliver."""

    def __init__(self) -> None:
        self.queued = 0
        """Bytes that were requested and have not arrived."""
        self._fit = CostFilter((0.2, 0.8), noise=0.2, drift=0.03, most=1000.0)
        self._heard = 0.0
        """When the last bytes arrived; or, if none have, when an idle tier got its first request."""
        self._began, self._was_idle, self._moved = 0.0, 1.0, 0
        """The state of the piece of time that is being measured."""
        self._measured = float("-inf")
        self._owed = 0.0
        """Skipped bytes that may be loaded to explore the tier."""
        self._next = 1
        """The number of chunks to explore next: 1, 2, 4 and so on.

        One alone does not tell latency from speed.
        """

    def asked(self, nbytes: int, now: float) -> None:
        if not self.queued:
            self._began = self._heard = now
            self._was_idle, self._moved = 1.0, 0
        self.queued += nbytes

    def ended(self, nbytes: int, now: float, *, counts: bool = True) -> None:
        """A request has ended. A miss gives no information about the speed, unless it was a timeout."""
        took = self._heard - self._began
        # Bytes that arrive together belong to one piece. A cut between them would make the rest look instant.
        if took >= _PIECE and (now - self._heard > _TOGETHER or took >= 4 * _PIECE):
            self._end_piece()
        self.queued -= nbytes
        self._heard = now
        self._moved += nbytes * counts
        if not self.queued and (self._was_idle or now - self._began >= _PIECE):
            self._end_piece()

    def _end_piece(self) -> None:
        """End the piece of time at the last arrival."""
        if self._moved:
            self._fit.learn((self._was_idle, self._moved), self._heard - self._began)
            self._measured = self._heard
            self._began, self._was_idle, self._moved = self._heard, 0.0, 0

    @property
    def is_measured(self) -> bool:
        return bool(self._fit.weights)

    def line(self, now: float) -> ArrivalEstimate:
        """The prediction. A tier that is stuck is expected to take as long again.

        Until the tier is measured this is a lower bound: the time for which it has delivered nothing.
        """
        latency, byte = self._fit.weights or (0.0, 0.0)
        stalled = now - self._heard if self.queued else 0.0
        return ArrivalEstimate(max(latency + byte * self.queued, stalled), byte)

    def skipped(self, nbytes: int) -> None:
        """These bytes are not requested, because the tier is too slow."""
        self._owed = min(self._owed + nbytes * _EXPLORED, float(nbytes))

    def explores(self, chunks: int, nbytes: int, now: float) -> int:
        """How many of `chunks` skipped chunks, of `nbytes` each, to load now to measure the tier again.

        A few are loaded from time to time. Otherwise a tier that has become faster would never be noticed.
        """
        wanted = min(self._next, chunks)
        if self.queued or self._owed < wanted * nbytes or now - self._measured < _FRESH:
            return 0
        self._owed -= wanted * nbytes
        self._next = 2 * wanted if wanted < chunks else 1
        return wanted


class LoadChoice(NamedTuple):
    chunks: int
    """How many leading chunks to load."""
    arrival: float
    """Seconds until all of these are in the slab."""


def choose_load(
    cost: Cost,
    tokens: int,
    has: int,
    chunk_tokens: int,
    places: Sequence[int],
    nbytes: int,
    lines: Sequence[ArrivalEstimate],
) -> LoadChoice:
    """The number of leading chunks to load for which the first token is expected soonest.

    `places`: the number of each chunk's line, -1 if it is in the slab, and -2 - number if it is being loaded
    from there. The tiers read at the same time. When all chunks have arrived, those that the engine lacks are
    copied. The rest of the prompt is computed.
    """
    ends = np.arange(len(places) + 1) * chunk_tokens
    line_of_chunk = np.array(places, dtype=np.int64)
    arrival = np.zeros(len(ends))
    for number, (start, byte) in enumerate(lines):
        asked = np.cumsum(line_of_chunk == number)
        is_started = np.cumsum(line_of_chunk == -2 - number) + asked > 0
        arrival[1:] = np.maximum(arrival[1:], is_started * (start + byte * nbytes * asked))
    known = np.maximum(ends, has).astype(float)
    compute_seconds = cost.token * (tokens - known) + cost.position * (tokens * tokens - known * known) / 2
    total = arrival + cost.copy * (known - has) + cost.fixed + compute_seconds
    chunks = int(np.flatnonzero(total <= total.min() + _MARGIN * abs(total.min()))[-1])
    return LoadChoice(chunks, float(arrival[chunks]))
