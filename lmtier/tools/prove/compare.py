"""When two answers to one question differ by more than the engine differs from itself.

An answer is a list of positions, each with the tokens that were likeliest there and their log-probabilities.
Two answers are compared up to the first position at which they chose different tokens: behind it they answer
different texts. The distance is the largest move of a log-probability. If the engine alone moves as far, the
answers agree, even if the move has turned a near tie into another token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

_FACTOR = 4.0
"""What was seen of the engine's own moves is a sample: a few times that is allowed."""
_FLOOR = 1e-3
"""Below this a move of a log-probability is rounding, even if none was seen."""
_LEADERS = 2
"""The tokens of a position that are compared: those that could have been chosen."""


@dataclass(frozen=True, slots=True)
class Position:
    token: str
    likeliest: dict[str, float]
    """Log-probabilities; empty: the engine does not tell them."""


Choice = Sequence[Position]


def distance(reference: Choice, other: Choice) -> float:
    """The largest move of a log-probability; infinite: other tokens, and no log-probabilities."""
    largest = 0.0
    for reference_position, other_position in zip(reference, other, strict=False):
        if reference_position.likeliest and other_position.likeliest:
            largest = max(largest, _move(reference_position.likeliest, other_position.likeliest))
        elif reference_position.token != other_position.token:
            return inf
        if reference_position.token != other_position.token:
            return largest
    return inf if len(reference) != len(other) else largest


def _move(reference: dict[str, float], other: dict[str, float]) -> float:
    leaders = sorted(reference, key=lambda token: -reference[token])[:_LEADERS]
    lowest = min(other.values())
    # A token that the other does not list is at most as likely there as the last that it lists.
    return max(
        abs(reference[each] - other[each]) if each in other else max(0.0, reference[each] - lowest)
        for each in leaders
    )


@dataclass(slots=True)
class Noise:
    """How far answers of the engine alone lie apart."""

    largest: float = 0.0
    pairs: int = 0
    """0: it was not measured, so a difference may be rounding."""

    def learn(self, moved: float) -> None:
        self.largest = max(self.largest, moved)
        self.pairs += 1

    @property
    def is_known(self) -> bool:
        """False: two answers to one prompt differed. There were no log-probabilities, or one ended early."""
        return self.largest < inf

    @property
    def limit(self) -> float:
        """A difference above this is a finding."""
        return max(_FLOOR, _FACTOR * self.largest)
