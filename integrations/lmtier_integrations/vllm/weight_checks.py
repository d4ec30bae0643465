"""Whether ranks still have the weights of their names: schedules comparisons, and tracks unchecked chunks.

If weights may have changed, because vLLM's prefix cache was reset or a call into the ranks was made, nothing
is promised until the ranks have compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.engine.core import EngineCore

from lmtier_integrations.vllm.loaded_model import object_on_stack, wrap_method
from lmtier_integrations.vllm.messages import Plan, RankReport

_MOST = 65_536
"""Chunks that are stored between two comparisons, at most."""


class WeightChecks:
    def __init__(self, ranks: int, period: float) -> None:
        """Call it in the process of the engine's core, while vLLM makes the connector."""
        self._ranks, self._period = ranks, period
        self.step = 0
        """The number of the last plan."""
        self.is_pending = False
        """Whether weights may have changed, and ranks have not yet compared."""
        self._since = 0
        """The first step in which a comparison ends the doubt."""
        self._reset_at = 0
        """The last plan before the engine reset its prefix cache.

        Its present prefixes were computed later.
        """
        self._unchecked: list[tuple[int, list[bytes]]] = []
        """Chunks that were stored since weights were compared, and in which step."""
        self._count = 0
        """The chunks that were stored since their number last made the ranks compare."""
        self._compared_at = time.monotonic()
        self._engine: SchedulerInterface | None = object_on_stack(SchedulerInterface)
        self._restore_methods = ExitStack()
        if self._engine is not None:
            wrap_method(self._restore_methods, self._engine, "reset_prefix_cache", self._reset)
        if (core := object_on_stack(EngineCore)) is not None:
            for name in ("collective_rpc", "add_lora", "remove_lora"):
                wrap_method(self._restore_methods, core, name, self._call)

    def close(self) -> None:
        self._restore_methods.close()

    @property
    def sees_engine(self) -> bool:
        """Whether lmtier sees the calls that may change weights."""
        return self._engine is not None

    @property
    def wants_a_step(self) -> bool:
        """Whether to ask for a step. Not while the engine sleeps: a step would disturb it."""
        return self.is_pending and (self._engine is None or self._engine.pause_state == PauseState.UNPAUSED)

    def _reset(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The engine forgets its own prefixes: a trainer makes it do that after it has changed weights."""
        is_done = method(*args, **kwargs)
        if is_done:
            self._reset_at = self.step
        self._doubt()
        return is_done

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call into the ranks, which may change weights."""
        try:
            return method(*args, **kwargs)
        finally:
            self._doubt()

    def _doubt(self) -> None:
        self.is_pending, self._since = True, self.step + 1

    def first_step(self, computed_tokens: int) -> int:
        """The first step that may have computed any of a request's `computed_tokens` tokens."""
        return self._reset_at + 1 if computed_tokens else self.step + 1

    def planned(self, plan: Plan) -> None:
        """Remember what the plan stores. Now and then all ranks compare in one step, before it computes."""
        if plan.saves:
            keys = [key for save in plan.saves for key in save.grant.placement.keys]
            self._count += len(keys)
            self._unchecked.append((self.step, keys))
        if self._count > _MOST:  # also without a period: this list must not grow for ever
            plan.checks_weights, self._count = True, 0
        if self._period and (self._unchecked or plan.loads):
            if (now := time.monotonic()) - self._compared_at >= self._period:
                plan.checks_weights = True
            if plan.checks_weights:
                self._compared_at = now

    def compared(self, report: RankReport) -> bool:
        """Chunks that were stored before the comparison are confirmed. True: it has ended a doubt."""
        step = max(
            (step for step, ranks in report.checked_weights.items() if ranks == self._ranks), default=0
        )
        self._unchecked = [each for each in self._unchecked if each[0] >= step]
        if not self.is_pending or step < self._since:
            return False
        self.is_pending = False
        return True

    def unchecked(self) -> list[bytes]:
        """The chunks that may have been computed with other weights than their names.

        Each is returned once.
        """
        unchecked, self._unchecked = self._unchecked, []
        return list(dict.fromkeys(key for _, keys in unchecked for key in keys))
