"""Finds foreign KV, which is not stored: another connector has loaded it, or it was computed behind such KV.

The other connector's load may yet fail, and its names may say less than ours. The engine shares blocks with
later requests, so foreign blocks are remembered until a step writes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from vllm.v1.core.sched.output import SchedulerOutput

from lmtier_integrations.vllm.messages import NULL_BLOCK
from lmtier_integrations.vllm.steps import RequestBlocks, entering_requests, requests_with_new_blocks


class OtherConnectorKV:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._looked_up: dict[str, tuple[int, int]] = {}
        """For requests that have not begun: the tokens that the engine had, and those that it has after
        lmtier's load."""
        self._requests: set[str] = set()
        """The running requests that have foreign blocks."""
        self._blocks: set[int] = set()

    def looked_up(self, request_id: str, computed: int) -> None:
        self._looked_up[request_id] = computed, computed

    def loads(self, request_id: str, tokens: int) -> None:
        """The engine takes so many more tokens from lmtier."""
        computed, _ = self._looked_up[request_id]
        self._looked_up[request_id] = computed, computed + tokens

    def finished(self, request_id: str, computed: int, tables: Sequence[Sequence[int]]) -> None:
        """It ends, perhaps before its first step, when others may share what was loaded for it."""
        engine_tokens, own_tokens = self._looked_up.pop(request_id, (computed, computed))
        if computed > own_tokens:
            first = engine_tokens // self._block_tokens
            self._blocks |= {block for table in tables for block in table[first:]} - {NULL_BLOCK}
        self._requests.discard(request_id)

    def planned(self, output: SchedulerOutput) -> Set[str]:
        """The requests that have foreign blocks from this step on."""
        tainted, had = set[str](), dict[str, int]()
        for each in entering_requests(output):
            self._requests.discard(each.request_id)
            # A request that goes on without a lookup has loaded nothing.
            had[each.request_id], own = self._looked_up.pop(each.request_id, (each.computed, each.computed))
            if each.computed > own:
                tainted.add(each.request_id)
        if tainted or self._blocks:  # without another connector this is never true
            self._follow(list(requests_with_new_blocks(output)), had, tainted)
        return tainted

    def _follow(self, requests: Sequence[RequestBlocks], had: dict[str, int], tainted: set[str]) -> None:
        shared, written = dict[str, set[int]](), dict[str, set[int]]()
        for request_id, _, tables in requests:
            first = had.get(request_id, 0) // self._block_tokens
            shared[request_id] = {block for table in tables for block in table[:first]}
            written[request_id] = {block for table in tables for block in table[first:]} - {NULL_BLOCK}
            self._blocks -= written[request_id]
        self._requests |= tainted
        rest = set(written)
        # Not in one pass: a request may share what another one, later in this order, writes in the same step.
        while reached := {each for each in rest if each in self._requests or shared[each] & self._blocks}:
            rest -= reached
            self._blocks.update(*(written[each] for each in reached))
            tainted |= reached - self._requests
            self._requests |= reached
