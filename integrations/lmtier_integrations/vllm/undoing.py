"""After a load has failed within a step, the requests that computed on it begin anew.

vLLM names the blocks of a promise by their tokens before the step has loaded them, so that other requests use
them at once. If the load fails, all of these requests have sampled from wrong KV. vLLM's own repair moves the
first one back and lets it compute the blocks. But Model Runner V2 keeps the old position (vLLM #49250), and
later steps are under way already. So all of them are preempted here, as if memory had run out: every runner
begins a preempted request anew, and vLLM drops what steps under way still sample for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from typing import Any

from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from lmtier_integrations.vllm.memory import caller
from lmtier_integrations.vllm.steps import entered

_STEPS = 8
"""More than an engine plans before it hears of the first one."""


class Undoing:
    def __init__(self) -> None:
        """Call it while vLLM makes the connector."""
        self._engine: Any = caller(SchedulerInterface)
        self._entered: dict[str, tuple[int, Sequence[int]]] = {}
        """The requests that entered in recent steps: in which step, and their blocks; the latest last."""
        self._step = 0

    @property
    def is_possible(self) -> bool:
        """Whether lmtier sees vLLM's scheduler. Without it no load is part of a step."""
        return self._engine is not None

    def planned(self, output: SchedulerOutput) -> None:
        self._step += 1
        for request_id, _, tables in entered(output):
            if tables:  # one: without windows, models have one block table
                self._entered.pop(request_id, None)
                self._entered[request_id] = self._step, tables[0]
        for request_id in [each for each, (step, _) in self._entered.items() if step <= self._step - _STEPS]:
            del self._entered[request_id]

    def failed(self, blocks: Set[int]) -> list[Request]:
        """These were not loaded. Neither they nor what follows them is found by their names any more.

        Returns the requests that begin anew. Call it when vLLM has applied the step's output.
        """
        engine, begin_anew = self._engine, []
        tables = {request_id: table for request_id, (_, table) in self._entered.items()}
        for request in engine.running:
            (tables[request.request_id],) = engine.kv_cache_manager.get_block_ids(request.request_id)
            if not blocks.isdisjoint(tables[request.request_id]):
                begin_anew.append(request)
        for table in tables.values():  # also of requests that are done, or were aborted
            first = next((number for number, block in enumerate(table) if block in blocks), len(table))
            engine.kv_cache_manager.evict_blocks(set(table[first:]))
        now = time.monotonic()
        for request in reversed(begin_anew):  # each goes to the head of the queue
            engine.running.remove(request)
            engine._preempt_request(request, now, drop_stale_output=True)
            engine.prev_step_scheduled_req_ids.discard(request.request_id)
        return begin_anew
