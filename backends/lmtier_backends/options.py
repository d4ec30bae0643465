"""What tiers over a network have in common: the checks of their options, and a deadline for each call."""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING

from lmtier.errors import ConfigError
from lmtier.tiers.base import Op
from lmtier.tiers.blocking import BlockingTier

if TYPE_CHECKING:
    from lmtier.tiers.blocking import _Desk, _Part, _Result

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")


def require(scheme: str, condition: bool, otherwise: str) -> None:
    if not condition:
        raise ConfigError(f"{scheme} tier: {otherwise}")


def require_common_options(scheme: str, namespace: str, connections: int, deadline: float) -> None:
    """Check the options that all of them have."""
    require(scheme, connections >= 1, f"connections={connections}: must be 1 or more")
    require(scheme, deadline > 0, f"deadline={deadline}: must be more than 0 seconds")
    is_name = _NAMESPACE.fullmatch(namespace) is not None
    require(scheme, is_name, f"namespace={namespace!r}: up to 64 letters, digits and . _ -")


class _LoadDeadline(threading.local):
    ends = 0.0
    """When the load of this thread has to end; 0: it has none."""


class TimedTier(BlockingTier):
    """A tier whose calls end in time, also if its server does not answer."""

    keeps = False
    _deadline: float

    def __init__(self, name: str, readers: int, writers: int, askers: int = 0) -> None:
        self._load = _LoadDeadline()
        super().__init__(name, readers, writers, askers)

    def _call_deadline(self) -> float:
        """When a call that begins now has to end."""
        return self._load.ends or time.monotonic() + self._deadline

    def _try(self, part: _Part, desk: _Desk) -> _Result:
        """The deletion of what is corrupt belongs to the load that finds it."""
        if part.job.op is Op.LOAD:
            self._load.ends = time.monotonic() + self._deadline
        try:
            return super()._try(part, desk)
        finally:
            self._load.ends = 0.0
