"""Takes back what the engine believes of blocks that one of its steps should have loaded and did not.

vLLM names the blocks of a promise by their tokens before the step has loaded them, so that other requests use
them at once. If the load fails, the first of these requests computes the blocks again, and the names stay. A
request that came before that is done, or after that request was aborted, would read what was never loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from lmtier_integrations.vllm.steps import entered

_STEPS = 8
"""More than an engine plans before it hears of the first one."""


class Undoing:
    def __init__(self, block_tokens: int) -> None:
        self.pool: BlockPool | None = None
        """The engine's blocks and their names."""
        self._block_tokens = block_tokens
        self._entered: dict[str, tuple[int, Sequence[int]]] = {}
        """The requests that entered in recent steps: in which step, and their blocks; the latest last."""
        self._step = 0

    def planned(self, output: SchedulerOutput) -> None:
        self._step += 1
        for request_id, _, tables in entered(output):
            if tables:  # one: without windows, models have one block table
                self._entered.pop(request_id, None)
                self._entered[request_id] = self._step, tables[0]
        for request_id in [each for each, (step, _) in self._entered.items() if step <= self._step - _STEPS]:
            del self._entered[request_id]

    def failed(self, blocks: Set[int], requests: Mapping[str, Request]) -> None:
        """These were not loaded. Neither they nor what follows them is found by their names any more.

        Every request that has one of them computes it itself, whether lmtier follows it or not. vLLM lets
        only the first one do that.
        """
        for request_id, (_, table) in self._entered.items():
            first = next((number for number, block in enumerate(table) if block in blocks), len(table))
            if self.pool is not None:
                self.pool.evict_blocks(set(table[first:]))
            if first < len(table) and (request := requests.get(request_id)) is not None:
                request.num_computed_tokens = min(request.num_computed_tokens, first * self._block_tokens)
