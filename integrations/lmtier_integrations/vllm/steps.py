"""Reads vLLM's scheduler output: the requests of a step, their tokens, and their blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from lmtier_integrations.vllm.messages import NULL_BLOCK, PrefillWork


def tables_of(output: SchedulerOutput, request_id: str) -> Sequence[Sequence[int]]:
    """A request's block tables; empty: this step does not show them."""
    state = output.kv_connector_block_state
    return (state.get_block_ids(request_id) if state is not None else None) or ()


def states_of(output: SchedulerOutput, request_id: str) -> Sequence[tuple[int, int, int]]:
    """The states that the engine keeps of a request after this step: block table, block, and tokens."""
    state = output.kv_connector_block_state
    return state.boundary_state_offloads.get(request_id, ()) if state is not None else ()


def computed_before(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Each request of a step, and how many of its tokens have KV before it."""
    cached = output.scheduled_cached_reqs
    running = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    if not output.scheduled_new_reqs:  # most steps
        return running
    entering = ((each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs)
    return itertools.chain(running, entering)


class RequestBlocks(NamedTuple):
    """A request that gets blocks in a step."""

    request_id: str
    computed: int
    """How many of its tokens have KV before the step. 0, if it runs already: then all its blocks are new."""
    tables: Sequence[Sequence[int]]
    """Its block tables. Only their new blocks, if it runs already."""


def requests_with_new_blocks(output: SchedulerOutput) -> Iterator[RequestBlocks]:
    """The requests that get blocks in this step."""
    yield from entering_requests(output)
    cached = output.scheduled_cached_reqs
    for request_id, tables in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if tables and request_id not in cached.resumed_req_ids:
            yield RequestBlocks(request_id, 0, tables)


def entering_requests(output: SchedulerOutput) -> Iterator[RequestBlocks]:
    """Requests that begin in this step, or go on after they were preempted."""
    for request in output.scheduled_new_reqs:
        yield RequestBlocks(request.req_id, request.num_computed_tokens, request.block_ids)
    cached = output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        for request_id, computed, tables in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                yield RequestBlocks(request_id, computed, tables or ())


def blocks_taken(output: SchedulerOutput, loaded_from: Mapping[str, int], block_tokens: int) -> list[int]:
    """The blocks that requests get in this step, without shared blocks, which no request writes."""
    return sorted(
        {
            block
            for request_id, computed, tables in requests_with_new_blocks(output)
            for table in tables
            for block in table[loaded_from.get(request_id, computed) // block_tokens :]
        }
        - {NULL_BLOCK}
    )


def prefill_work_of(output: SchedulerOutput) -> PrefillWork | None:
    """A step's tokens, and the sum of their positions; None: there are none."""
    scheduled = output.num_scheduled_tokens
    area = sum(
        scheduled[request_id] * (computed + scheduled[request_id] / 2)
        for request_id, computed in computed_before(output)
        if request_id in scheduled
    )
    return (output.total_num_scheduled_tokens, area) if area else None
