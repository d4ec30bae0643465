"""How much room the storage has for this tier, once it was full. No I/O; the caller passes a clock."""

from __future__ import annotations

from collections.abc import Callable

UNBOUNDED = 1 << 62
"""The capacity of an owned tier without a configured capacity."""

FULL_PAUSE = 2.0
_FULL_MOST = 600.0
"""Seconds after which full storage is tried again with more bytes than it had. If nothing fits although
chunks were evicted, the pause doubles each time, up to the second figure."""


class StorageLimit:
    """The limit is the number of bytes that the tier had stored when the storage became full.

    A job that was sent before the limit was known is sent again after evictions. If that fails too, evictions
    do not help, and nothing fits. After a pause the next job finds out whether that has changed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._nbytes = UNBOUNDED
        self._until = 0.0
        self._first = UNBOUNDED
        self._in_vain = 0

    @property
    def is_known(self) -> bool:
        if self._clock() >= self._until:
            self._nbytes = self._first = UNBOUNDED
        return self._nbytes < UNBOUNDED

    @property
    def nbytes(self) -> int:
        return self._nbytes if self.is_known else UNBOUNDED

    def is_unknown_to(self, job: int) -> bool:
        """Whether this job was sent before the limit was known."""
        return not self.is_known or job < self._first

    def on_full(self, job: int, used: int, following: int) -> None:
        """`job` found no room while the tier had `used` bytes. Jobs from `following` on know the limit."""
        if self.is_unknown_to(job):
            self._first = min(self._first, following)
            self._nbytes = min(self._nbytes, used)
        else:
            self._in_vain += 1
            self._nbytes = 0
        self._until = self._clock() + min(_FULL_MOST, FULL_PAUSE * 2**self._in_vain)

    def on_fit(self) -> None:
        """A job found room."""
        self._in_vain = 0
