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
    SHOWS_TABLES,
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

    def reserve_ahead(self, known: TrackedRequest) -> None:
        """Ask for room for a prompt of which nothing is stored, in one message with the lookup.

        Each message may wake the server. Only one request at a time does this: a request behind many others
        waits long, and must not hold room meanwhile.
        """
        assert self._names.form is not None
        if self._ahead is not None and self._ahead[0].pending_reservation is self._ahead[1]:
            return
        tokens = known.request.num_prompt_tokens
        keys = known.keys(tokens).keys[: known.cacheable_tokens(tokens) // self._chunk_tokens]
        if keys and tokens <= self._step_tokens:
            known.pending_reservation = self._client.begin_reserve(keys, self._names.form, ttl=known.said.ttl)
            self._ahead = known, known.pending_reservation

    def plan(self, plan: Plan, output: SchedulerOutput, requests: Mapping[str, TrackedRequest]) -> None:
        """Save the complete chunks of the requests that the step computes."""
        scheduled, size = output.num_scheduled_tokens, self._chunk_tokens
        for request_id, computed in computed_before(output):
            known = requests.get(request_id)
            if known is None:
                continue
            if computed < known.stored_chunks * size:
                known.rewind(computed)
            # two comparisons: almost always the first says no, and it is cheap
            after = computed + scheduled[request_id]
            if (
                after >= known.next_save_tokens
                and (tokens := self._tokens(known, after)) >= known.next_save_tokens
            ):
                self._plan_save(plan, output, known, computed, tokens)
            if self._state_groups:
                self._plan_states(plan, output, known, after)

    def _plan_states(self, plan: Plan, output: SchedulerOutput, known: TrackedRequest, after: int) -> None:
        """Save the states that the engine has at ends of chunks after this step, if those are stored too."""
        request_id = known.request.request_id
        found: dict[int, dict[int, int]] = {}
        if after and not after % self._chunk_tokens:
            # The last block of a request holds its state.
            last, tables = after // self._chunk_tokens * self._chunk_blocks - 1, tables_of(output, request_id)
            found[after] = {n: tables[n][last] for n in self._state_groups if len(tables[n]) > last}
        for group, block, tokens in states_of(output, request_id):
            found.setdefault(tokens, {})[group] = block
        for tokens, blocks in found.items():
            chunks, rest = divmod(tokens, self._chunk_tokens)
            is_named = not rest and tokens == self._tokens(known, tokens)
            is_kept = len(blocks) == len(self._state_groups) and NULL_BLOCK not in blocks.values()
            if is_named and is_kept and known.loaded_chunks < chunks <= known.stored_chunks:
                self._plan_state(plan, known, chunks, [[blocks[group]] for group in self._state_groups])

    def _plan_state(self, plan: Plan, known: TrackedRequest, chunks: int, blocks: list[list[int]]) -> None:
        ends = self._names.state_form
        assert ends is not None
        assert ends.layout is not None
        key = known.keys(chunks * self._chunk_tokens).keys[chunks - 1]
        # The chunk before it is its parent: that does not leave before the state does.
        pair = [key, state_key(key, ends.layout.to_json())]
        reservation = self._client.reserve(pair, ends, first=1, ttl=known.said.ttl)
        if reservation.entries:
            places, since, adapter = reservation.placement, known.since, known.adapter
            save = SavePlan(reservation.id, [1], places, blocks, since, adapter, is_state=True)
            plan.saves.append(save)
            self._stats.add("saved_states")
            self._client.disown(reservation)

    def _tokens(self, known: TrackedRequest, after: int) -> int:
        """How many tokens have KV after the step and may be stored. Speculative ones may be taken back."""
        request = known.request
        most = request.num_tokens if self._saves_decode else request.num_prompt_tokens
        return known.cacheable_tokens(min(after, most))

    def _plan_save(
        self, plan: Plan, output: SchedulerOutput, known: TrackedRequest, computed: int, tokens: int
    ) -> None:
        assert self._names.form is not None
        tables = tables_of(output, known.request.request_id)
        if not tables:
            return  # not shown in this step; the one that takes another block will
        tables = tables_of_kv(tables, self._kv_groups)
        will_be_back = self._will_be_back(known, tokens)
        if (asked := known.pending_reservation) is not None:
            end = len(asked.keys) * self._chunk_tokens
            if asked.first != known.stored_chunks or (tokens < end and not will_be_back):
                self._abort_pending(known)  # it was preempted; or the step computes less of it
            elif computed < end and will_be_back:
                return
            elif not self._shows(tables, asked.first, len(asked.keys)):
                self._abort_pending(known)  # the engine had these itself, and some have left a window
            else:
                self._save_pending(plan, known, tables)
        if tokens < known.next_save_tokens:
            return
        full = tokens // self._chunk_tokens
        if not self._shows(tables, known.stored_chunks, full):
            has_entered = any(
                each.request_id == known.request.request_id for each in entering_requests(output)
            )
            if has_entered and known.looked_at == NEVER:
                # The engine had the first ones itself, and they have left a window. They were stored, if at
                # all, when it computed them. If a lookup has missed them, what follows would not be found.
                known.stored_chunks = max(known.stored_chunks, min(full, computed // self._chunk_tokens))
            if known.stored_chunks == full or not self._shows(tables, known.stored_chunks, full):
                self._stored_to(known, full, known.stored_chunks)
                return
        keys = known.keys(full * self._chunk_tokens).keys[:full]
        with self._client.batched():
            known.pending_reservation = self._client.begin_reserve(
                keys, self._names.form, first=known.stored_chunks, ttl=known.said.ttl
            )
            known.send_tokens()
        if not will_be_back:
            self._save_pending(plan, known, tables)

    def _abort_pending(self, known: TrackedRequest) -> None:
        """Give back the room that was asked for, before room for the same chunks is asked for again.

        Until it is given back, the server takes these chunks for known, and gives no room for them again.
        `withdraw` would only give it back when the server's answer comes. So this waits for the answer.
        """
        asked = known.take_pending_reservation()
        assert asked is not None
        reservation = self._client.finish_reserve(asked)
        for shard in tuple(reservation.pending_shards):
            self._client.abort(reservation, shard)

    def _will_be_back(self, known: TrackedRequest, tokens: int) -> bool:
        """Whether another step will probably compute this request in the same blocks."""
        last = known.request.num_prompt_tokens + known.request.max_tokens - 1
        return SHOWS_TABLES and not self._has_windows and tokens < last

    def _shows(self, tables: Sequence[Sequence[int]], first: int, end: int) -> bool:
        """Whether the request still has all blocks of these chunks."""
        part = slice(first * self._chunk_blocks, end * self._chunk_blocks)
        return not any(len(table) < part.stop or NULL_BLOCK in table[part] for table in tables)

    def _stored_to(self, known: TrackedRequest, end: int, stored: int) -> None:
        """The first `end` chunks need no more work. Later generated chunks are stored several at once."""
        size = self._chunk_tokens
        is_prompt = end < known.request.num_prompt_tokens // size
        known.stored_chunks = stored
        known.next_save_tokens = end * size + (
            size if is_prompt or self._has_windows else max(size, _TOGETHER)
        )

    def _save_pending(self, plan: Plan, known: TrackedRequest, tables: Sequence[Sequence[int]]) -> None:
        """Save into the room that was asked for."""
        asked = known.take_pending_reservation()
        assert asked is not None
        reservation = self._client.finish_reserve(asked)
        self._stored_to(known, len(asked.keys), len(asked.keys) - reservation.dropped)
        if self._events is not None:
            self._events.note_prompt(known.request, known.keys(), ())
        if reservation.entries:
            self._client.trace(reservation, known.said.trace)
            plan.saves.append(
                SavePlan.of(reservation, tables, self._chunk_blocks, known.since, known.adapter)
            )
            self._stats.add("saved_tokens", len(reservation.entries) * self._chunk_tokens)
            self._client.disown(reservation)
