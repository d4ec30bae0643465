"""How late a call to a tier may be: by 50 ms where a test runs alone, by seconds beside other tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.redis_process import within

PATIENCE = 20.0  # a deadline that no busy machine makes what ends a job that works
DEADLINE = 1.0  # one that is to be what ends a job, or that a failure must not need
ALONE, BESIDE = 0.05, 2.0


class Lateness:
    slack = ALONE


def in_time(tier: Any, work: Callable[[], Any]) -> Any:
    """What `work` returns, if it took no longer than the tier may."""
    return within(tier._deadline + Lateness.slack, work)
