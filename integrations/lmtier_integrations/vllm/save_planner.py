"""Plans the saves of a step: the chunks of requests whose KV is complete after the step.

Room is requested in one step and filled in the next, so that no step waits for the server's answer. If the
next step may not have these blocks, room is filled in the same step. A request that ends early loses its last
requested chunks.

Where layers keep a state instead of KV, it is stored after steps that end at the end of a chunk, and wherever
else the engine says that it keeps one. It is stored in that step: the next one may have other things there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.v1.core.sched.output import SchedulerOutput

from lmtier.client.client import PendingReservation
from lmtier.format.keys import state_key
from lmtier_integrations.vllm.kv import tables_of_kv
from lmtier_integrations.vllm.messages import NULL_BLOCK, Plan, SavePlan
from lmtier_integrations.vllm.steps import (
    computed_before,
    entering_requests,
    states_of,
    tables_of,
)
from lmtier_integrations.vllm.tracked_request import NEVER, SchedulerParts, TrackedRequest

_TOGETHER = 256  # generated tokens that are stored at once, unless blocks may leave a window


class SavePlanner:
    def __init__(
        self,
        parts: SchedulerParts,
        *,
        block_tokens: int,
        step_tokens: int,
        has_windows: bool,
        saves_decode: bool,
        groups: tuple[list[int], list[int]],
    ) -> None:
        """`step_tokens`: the most in a step; `has_windows`: blocks may leave a request before it ends;
        `groups`: the block tables of layers with KV, and those of layers with a state."""
        self._client, self._names, _, self._stats, self._events = parts
        self._chunk_tokens = parts.client.chunk_tokens
        self._chunk_blocks = self._chunk_tokens // block_tokens
        self._step_tokens = step_tokens
        self._has_windows, self._saves_decode = has_windows, saves_decode
        self._kv_groups, self._state_groups = groups
        self._ahead: tuple[TrackedRequest, PendingReservation] | None = None
        """The request that has asked for room before its first step, and the request for room."""

    def reserve_ahead(self, tracked: TrackedRequest) -> None:
        """Ask for room for a prompt of which nothing is stored, in one message with the lookup.

        Each message may wake the server. Only one request at a time does this: a request behind many others
        waits long, and must not hold room meanwhile.
        """
        assert self._names.form is not None
        if self._ahead is not None and self._ahead[0].pending_reservation is self._ahead[1]:
            return
        tokens = tracked.request.num_prompt_tokens
        keys = tracked.keys(tokens).keys[: tracked.cacheable_tokens(tokens) // self._chunk_tokens]
        if keys and tokens <= self._step_tokens:
            tracked.pending_reservation = self._client.begin_reserve(
                keys, self._names.form, ttl=tracked.said.ttl
            )
            self._ahead = tracked, tracked.pending_reservation

    def plan(self, plan: Plan, output: SchedulerOutput, requests: Mapping[str, TrackedRequest]) -> None:
        """Save the complete chunks of the requests that the step computes."""
        scheduled, size = output.num_scheduled_tokens, self._chunk_tokens
        for request_id, computed in computed_before(output):
            tracked = requests.get(request_id)
            if tracked is None:
                continue
            if computed < tracked.stored_chunks * size:
                tracked.rewind(computed)
            # two comparisons: almost always the first says no, and it is cheap
            tokens_after = computed + scheduled[request_id]
            if (
                tokens_after >= tracked.next_save_tokens
                and (tokens := self._tokens(tracked, tokens_after)) >= tracked.next_save_tokens
            ):
                self._plan_save(plan, output, tracked, computed, tokens)
            if self._state_groups:
                self._plan_states(plan, output, tracked, tokens_after)

    def _plan_states(
        self, plan: Plan, output: SchedulerOutput, tracked: TrackedRequest, tokens_after: int
    ) -> None:
        """Save the states that the engine has at ends of chunks after this step, if those are stored too."""
        request_id = tracked.request.request_id
        blocks_at: dict[int, dict[int, int]] = {}
        if tokens_after and not tokens_after % self._chunk_tokens:
            # The last block of a request holds its state.
            last = tokens_after // self._chunk_tokens * self._chunk_blocks - 1
            tables = tables_of(output, request_id)
            blocks_at[tokens_after] = {
                n: tables[n][last] for n in self._state_groups if len(tables[n]) > last
            }
        for group, block, tokens in states_of(output, request_id):
            blocks_at.setdefault(tokens, {})[group] = block
        for tokens, blocks in blocks_at.items():
            chunks, remainder = divmod(tokens, self._chunk_tokens)
            is_chunk_end = not remainder and tokens == self._tokens(tracked, tokens)
            has_all_states = len(blocks) == len(self._state_groups) and NULL_BLOCK not in blocks.values()
            if is_chunk_end and has_all_states and tracked.loaded_chunks < chunks <= tracked.stored_chunks:
                self._plan_state(plan, tracked, chunks, [[blocks[group]] for group in self._state_groups])

    def _plan_state(self, plan: Plan, tracked: TrackedRequest, chunks: int, blocks: list[list[int]]) -> None:
        ends = self._names.state_form
        assert ends is not None
        assert ends.layout is not None
        key = tracked.keys(chunks * self._chunk_tokens).keys[chunks - 1]
        # The chunk before it is its parent: that does not leave before the state does.
        pair = [key, state_key(key, ends.layout.to_json())]
        grant = self._client.reserve(pair, ends, first=1, ttl=tracked.said.ttl)
        if grant.chunks:
            plan.saves.append(SavePlan(grant, blocks, tracked.since, tracked.adapter, is_state=True))
            self._stats.add("saved_states")
            self._client.disown(grant)

    def _tokens(self, tracked: TrackedRequest, tokens_after: int) -> int:
        """How many tokens have KV after the step and may be stored. Speculative ones may be taken back."""
        request = tracked.request
        most = request.num_tokens if self._saves_decode else request.num_prompt_tokens
        return tracked.cacheable_tokens(min(tokens_after, most))

    def _plan_save(
        self, plan: Plan, output: SchedulerOutput, tracked: TrackedRequest, computed: int, tokens: int
    ) -> None:
        assert self._names.form is not None
        tables = tables_of(output, tracked.request.request_id)
        if not tables:
            return  # not shown in this step; the one that takes another block will
        tables = tables_of_kv(tables, self._kv_groups)
        will_be_back = self._will_be_back(tracked, tokens)
        if (pending := tracked.pending_reservation) is not None:
            pending_end = len(pending.keys) * self._chunk_tokens
            if pending.first != tracked.stored_chunks or (tokens < pending_end and not will_be_back):
                self._abort_pending(tracked)  # it was preempted; or the step computes less of it
            elif computed < pending_end and will_be_back:
                return
            elif not self._shows(tables, pending.first, len(pending.keys)):
                self._abort_pending(tracked)  # the engine had these itself, and some have left a window
            else:
                self._save_pending(plan, tracked, tables)
        if tokens < tracked.next_save_tokens:
            return
        full = tokens // self._chunk_tokens
        if not self._shows(tables, tracked.stored_chunks, full):
            has_entered = any(
                entering.request_id == tracked.request.request_id for entering in entering_requests(output)
            )
            if has_entered and tracked.looked_at == NEVER:
                # The engine had the first ones itself, and they have left a window. They were stored, if at
                # all, when it computed them. If a lookup has missed them, what follows would not be found.
                tracked.stored_chunks = max(tracked.stored_chunks, min(full, computed // self._chunk_tokens))
            if tracked.stored_chunks == full or not self._shows(tables, tracked.stored_chunks, full):
                self._stored_to(tracked, full, tracked.stored_chunks)
                return
        keys = tracked.keys(full * self._chunk_tokens).keys[:full]
        with self._client.batched():
            tracked.pending_reservation = self._client.begin_reserve(
                keys, self._names.form, first=tracked.stored_chunks, ttl=tracked.said.ttl
            )
            tracked.send_tokens()
        if not will_be_back:
            self._save_pending(plan, tracked, tables)

    def _abort_pending(self, tracked: TrackedRequest) -> None:
        """Give back the room that was asked for, before room for the same chunks is asked for again.

        Until it is given back, the server takes these chunks for known, and gives no room for them again.
        `cancel_reserve` would only give it back when the server's answer comes. So this waits for the answer.
        """
        pending = tracked.take_pending_reservation()
        assert pending is not None
        grant = self._client.finish_reserve(pending)
        for shard in self._client.unfinished(grant):
            self._client.abort(grant, shard)

    def _will_be_back(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Whether another step will probably compute this request in the same blocks."""
        last = tracked.request.num_prompt_tokens + tracked.request.max_tokens - 1
        return not self._has_windows and tokens < last

    def _shows(self, tables: Sequence[Sequence[int]], first: int, end: int) -> bool:
        """Whether the request still has all blocks of these chunks."""
        part = slice(first * self._chunk_blocks, end * self._chunk_blocks)
        return not any(len(table) < part.stop or NULL_BLOCK in table[part] for table in tables)

    def _stored_to(self, tracked: TrackedRequest, end: int, stored: int) -> None:
        """The first `end` chunks need no more work. Later generated chunks are stored several at once."""
        size = self._chunk_tokens
        is_prompt = end < tracked.request.num_prompt_tokens // size
        tracked.stored_chunks = stored
        tracked.next_save_tokens = end * size + (
            size if is_prompt or self._has_windows else max(size, _TOGETHER)
        )

    def _save_pending(self, plan: Plan, tracked: TrackedRequest, tables: Sequence[Sequence[int]]) -> None:
        """Save into the room that was asked for."""
        pending = tracked.take_pending_reservation()
        assert pending is not None
        grant = self._client.finish_reserve(pending)
        self._stored_to(tracked, len(pending.keys), len(pending.keys) - grant.dropped)
        if self._events is not None:
            self._events.note_prompt(tracked.request, tracked.keys(), ())
        if grant.chunks:
            self._client.trace(grant, tracked.said.trace)
            plan.saves.append(SavePlan.of(grant, tables, self._chunk_blocks, tracked.since, tracked.adapter))
            self._stats.add("saved_tokens", len(grant.chunks) * self._chunk_tokens)
            self._client.disown(grant)
