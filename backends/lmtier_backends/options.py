"""What tiers over a network have in common: the checks of their options, and a deadline for each call."""

from __future__ import annotations

import re
import time

from lmtier.errors import ConfigError
from lmtier.tiers.blocking import BlockingTier

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")


def need(scheme: str, condition: bool, otherwise: str) -> None:
    if not condition:
        raise ConfigError(f"{scheme} tier: {otherwise}")


def need_common(scheme: str, namespace: str, connections: int, deadline: float) -> None:
    """Check the options that all of them have."""
    need(scheme, connections >= 1, f"connections={connections}: must be 1 or more")
    need(scheme, deadline > 0, f"deadline={deadline}: must be more than 0 seconds")
    is_name = _NAMESPACE.fullmatch(namespace) is not None
    need(scheme, is_name, f"namespace={namespace!r}: up to 64 letters, digits and . _ -")


class TimedTier(BlockingTier):
    """A tier whose calls end in time, also if its server does not answer."""

    keeps = False
    _deadline: float

    def _by(self) -> float:
        """When a call that begins now has to end."""
        return time.monotonic() + self._deadline
