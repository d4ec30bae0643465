"""Reads vLLM's scheduler output: the requests of a step, their tokens, and their blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

from lmtier_integrations.vllm.messages import NULL_BLOCK, Work

try:
    _tables_of = KVConnectorBlockState.get_block_ids
    SHOWS_TABLES = True
except AttributeError:  # before 0.30, vLLM only shows the tables that this step extends
    SHOWS_TABLES = False

    def _tables_of(state: KVConnectorBlockState, req_id: str) -> tuple[list[int], ...] | None:
        return state.block_ids.get(req_id)


def tables_of(output: SchedulerOutput, request_id: str) -> Sequence[Sequence[int]]:
    """A request's block tables; empty: this step does not show them."""
    state = output.kv_connector_block_state
    return (_tables_of(state, request_id) if state is not None else None) or ()


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
    new = ((each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs)
    return itertools.chain(running, new)


def entered(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """The same of those that begin in this step, or go on after they were preempted."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                yield request_id, computed


def blocks_taken(output: SchedulerOutput, loaded_from: Mapping[str, int], block_tokens: int) -> list[int]:
    """The blocks that requests get in this step, without shared blocks, which no request writes."""
    cached = output.scheduled_cached_reqs
    given = [(each.req_id, each.num_computed_tokens, each.block_ids) for each in output.scheduled_new_reqs]
    for request_id, computed, tables in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        # For a preempted request these are all of its blocks, otherwise only the new ones.
        is_whole = request_id in cached.resumed_req_ids
        given.append((request_id, computed if is_whole else 0, tables or ()))
    return sorted(
        {
            block
            for request_id, computed, tables in given
            for table in tables
            for block in table[loaded_from.get(request_id, computed) // block_tokens :]
        }
        - {NULL_BLOCK}
    )


def work_of(output: SchedulerOutput) -> Work | None:
    """A step's tokens, and the sum of their positions; None: there are none."""
    scheduled = output.num_scheduled_tokens
    area = sum(
        scheduled[request_id] * (computed + scheduled[request_id] / 2)
        for request_id, computed in computed_before(output)
        if request_id in scheduled
    )
    return (output.total_num_scheduled_tokens, area) if area else None
