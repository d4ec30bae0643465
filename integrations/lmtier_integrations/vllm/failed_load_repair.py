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
from vllm.v1.request import Request, RequestStatus

from lmtier_integrations.vllm.loaded_model import object_on_stack
from lmtier_integrations.vllm.messages import LoadPlan
from lmtier_integrations.vllm.steps import entering_requests, requests_with_new_blocks

_WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS
_STEPS = 8
"""More than an engine plans before it hears of the first one."""


class FailedLoadRepair:
    def __init__(self) -> None:
        """Call it while vLLM makes the connector."""
        self._engine: Any = object_on_stack(SchedulerInterface)
        self._entered: dict[str, tuple[int, Sequence[int]]] = {}
        """The requests that entered, the latest last: when they last got blocks, and all of these."""
        self._loaded: dict[int, int] = {}
        """The blocks that lmtier has loaded within recent steps, and in which step."""
        self._undone: set[str] = set()
        """The requests that began anew because of a load that was not lmtier's."""
        self._step = 0

    @property
    def is_possible(self) -> bool:
        """Whether lmtier sees vLLM's scheduler. Without it no load is part of a step."""
        return self._engine is not None

    def planned(self, output: SchedulerOutput, loads: Sequence[LoadPlan]) -> None:
        self._step += 1
        entering = {each.request_id for each in entering_requests(output)}
        for request_id, _, tables in requests_with_new_blocks(output):
            if tables and (request_id in entering or request_id in self._entered):
                # One: without windows, models have one block table.
                _, old_blocks = self._entered.pop(request_id, (0, ()))
                kept_blocks = () if request_id in entering else old_blocks
                self._entered[request_id] = self._step, [*kept_blocks, *tables[0]]
        for load in loads:
            if not load.request:
                self._loaded |= dict.fromkeys(load.block_ids[0], self._step)
        for request_id in [each for each, (step, _) in self._entered.items() if step <= self._step - _STEPS]:
            del self._entered[request_id]
        for block in [each for each, step in self._loaded.items() if step <= self._step - _STEPS]:
            del self._loaded[block]

    def failed(self, blocks: Set[int]) -> list[Request]:
        """These were not loaded. Neither they nor what follows them is found by their names any more.

        Returns the requests that begin anew. Call it when vLLM has applied the step's output. A load of
        another connector may fail each time. So a request begins anew for it only once, and then vLLM's own
        repair counts.
        """
        engine = self._engine
        tables = {request_id: table for request_id, (_, table) in self._entered.items()}
        waiting = [each for each in engine.requests.values() if each.status == _WAITING]
        for request in (*engine.running, *waiting):
            (tables[request.request_id],) = engine.kv_cache_manager.get_block_ids(request.request_id)
        restarted = [each for each in engine.running if not blocks.isdisjoint(tables[each.request_id])]
        if blocks.isdisjoint(self._loaded):
            restarted = [each for each in restarted if each.request_id not in self._undone]
            self._undone |= {each.request_id for each in restarted}
        elif engine.recompute_kv_load_failures:
            # These wait for other loads, which continue from the failed blocks. When those loads have ended,
            # vLLM lets the requests begin anew.
            for request in waiting:
                if not blocks.isdisjoint(tables[request.request_id]):
                    request.num_computed_tokens = 0
                    engine.failed_recving_kv_req_ids.add(request.request_id)
        for table in tables.values():  # also of requests that are done, or were aborted
            first_failed = next((number for number, block in enumerate(table) if block in blocks), len(table))
            engine.kv_cache_manager.evict_blocks(set(table[first_failed:]))
        now = time.monotonic()
        for request in reversed(restarted):  # each goes to the head of the queue
            engine.running.remove(request)
            engine._preempt_request(request, now, drop_stale_output=True)
            engine.prev_step_scheduled_req_ids.discard(request.request_id)
        self._undone &= engine.requests.keys()
        return restarted
