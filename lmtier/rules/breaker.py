"""A circuit breaker: pauses a tier that keeps failing, and tries it again later. No I/O; it reads a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Outage(NamedTuple):
    """A time in which a breaker was open, by its clock."""

    since: float
    until: float | None
    """None: it is still open."""
    why: str
    """The last error."""


class Breaker:
    """Pauses a tier that keeps failing, and tries it again after a pause that grows to 4 s.

    Only a success of a kind of job that has failed shows that a tier works again. A disk without its
    directory deletes all day, and a full Redis answers every lookup.
    """

    FAILURES = 5
    PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0)

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._opened = 0
        self._retry_at = 0.0
        self._probing = False
        self._failing: set[str] = set()
        """The kinds of jobs that have failed since it worked."""
        self.outage: Outage | None = None
        """The last one."""

    @property
    def is_open(self) -> bool:
        return self._failures >= self.FAILURES

    def allows(self) -> bool:
        """Whether a job may be sent. While the breaker is open: one probe after each pause."""
        return not self.is_open or (not self._probing and self._clock() >= self._retry_at)

    def sent(self) -> None:
        self._probing = self.is_open

    def record(self, ok: bool, why: str = "", kind: str = "") -> None:
        if ok and kind in self._failing:
            if self.is_open and self.outage is not None:
                self.outage = self.outage._replace(until=self._clock())
            self._failing.clear()
            self._failures = self._opened = 0
        elif not ok:
            self._failing.add(kind)
            self._failures += 1
            if self.is_open:
                began = self.outage.since if self._opened and self.outage is not None else self._clock()
                self.outage = Outage(began, None, why)
                if not self._opened or self._probing:  # jobs that were sent before it opened prolong no pause
                    self._retry_at = self._clock() + self.PAUSES[min(self._opened, len(self.PAUSES) - 1)]
                    self._opened += 1
        self._probing = False
