"""The reuse of stored chunks: lookups, waits until a deadline, and promises once chunks are in the slab.

Every lease belongs to a request, or to a load that not all ranks have finished.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable

from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from lmtier.core.match import CPU
from lmtier.wire.verbs import RemoteMatch
from lmtier_integrations.vllm.kv import tables_of_kv
from lmtier_integrations.vllm.messages import LoadPlan, Plan
from lmtier_integrations.vllm.tracked_request import NEVER, SchedulerParts, TrackedRequest

_ASK = 0.001  # seconds between polls of a server that reads: a waiting engine polls in a loop
_FRESH = 0.1  # seconds until a lookup that found less than everything is made again
_LATE = 1.0  # seconds beyond its deadline after which a match is not waited for, whatever the server says
_IN_VAIN = 5.0  # seconds without another lookup for a request that has waited until its deadline
_AHEAD = 0.5  # the part of the slab that requests may lease before the engine schedules them
_BESIDE = 0.025  # seconds that a step which also decodes may wait for loads


class LoadPlanner:
    def __init__(
        self,
        parts: SchedulerParts,
        *,
        block_tokens: int,
        loads_in_steps: bool,
        shares: bool,
        groups: tuple[list[int], list[int]],
    ) -> None:
        """`loads_in_steps`: a load may be part of a step; `shares`: the engine shares a request's blocks with
        others; `groups`: the block tables of layers with KV, and those of layers with a state."""
        self._client, self._names, self._load_tracker, self._stats, self._events = parts
        self._chunk_tokens = parts.client.chunk_tokens
        self._chunk_blocks = self._chunk_tokens // block_tokens
        self._loads_in_steps, self._shares = loads_in_steps, shares
        self._kv_groups, self._state_groups = groups
        self._arriving: Counter[bytes] = Counter()
        """Chunks that requests wait for. Another request for one waits too, and then shares the blocks."""
        self._joined: set[int] = set()
        """The matches of these chunks, by number."""
        self._promised: list[TrackedRequest] = []
        """Requests for which the engine has accepted a promise since the last plan."""
        self._asked_at = NEVER
        self.copies_beside = False
        """Whether ranks copy beside the engine's computing, as GPUs do."""
        self.pinned_run = 0
        """The run of the server whose memory all ranks reach without a detour."""
        self._neighbours = 0
        """How many requests the last step computed: most of them are in the next one too."""
        self._in_step = 0
        """The tokens that the next step loads."""

    def has_room(self, requests: Iterable[TrackedRequest]) -> bool:
        """Whether one more request may lease chunks before the engine schedules it."""
        assert self._names.form is not None
        matches = [each.match for each in requests if each.match is not None]
        leased_bytes = self._names.form.slab_bytes * sum(len(match.grant.chunks) for match in matches)
        if (ends := self._names.state_form) is not None:
            leased_bytes += ends.slab_bytes * sum(match.grant.state is not None for match in matches)
        return leased_bytes < _AHEAD * self._client.slab.capacity

    def look_up(self, tracked: TrackedRequest) -> None:
        """Match anew; what an older match holds is given back only if the new one has more."""
        form, said = self._names.form, tracked.said
        assert form is not None
        tracked.looked_at = time.monotonic()
        tokens = tracked.request.num_tokens
        chunks = tracked.cacheable_tokens(tokens - 1) // self._chunk_tokens  # something is left to compute
        if not chunks:
            return
        chain = tracked.keys(tokens)
        match = self._client.match(
            chain.keys[:chunks],
            form,
            tokens=tokens,
            state_form=self._names.state_form,
            session=said.session,
            parent=said.parent,
            source=said.source,
        )
        self._client.trace(match.grant, tracked.said.trace)
        tracked.send_tokens()
        self._prefetch(match)
        if self._events is not None:
            ready = {*match.grant.chunks}.difference(match.loading)
            sources = [
                "" if source == CPU and number not in ready else source
                for number, source in enumerate(match.sources)
            ]
            self._events.note_prompt(tracked.request, chain, sources)
        old_match = tracked.match
        if (match.chunks or match.pending_lookups) and (old_match is None or match.chunks > old_match.chunks):
            tracked.release_match()
            tracked.match = match
        else:
            self._client.release(match)

    def _prefetch(self, match: RemoteMatch) -> None:
        """Once all tiers have said what they have."""
        if match.needs_prefetch:
            self._client.prefetch(match)

    def matched(self, tracked: TrackedRequest, computed_tokens: int) -> int | None:
        """How many tokens beyond those computed can be loaded; None: not known yet."""
        request = tracked.request
        if tracked.preemptions_at_promise == request.num_preemptions:
            tracked.release_match()  # what was loaded has failed: now it is computed
            return 0
        match = tracked.match
        found_too_little = match is None or (
            match.is_ready
            and match.cut_reason
            not in ("deadline", "error")  # a tier that fails would be asked again for ever
            and match.chunks < tracked.cacheable_tokens(request.num_tokens - 1) // self._chunk_tokens
        )
        if found_too_little and time.monotonic() - tracked.looked_at > _FRESH:
            self.look_up(tracked)
            match = tracked.match
        if match is None:
            return 0
        if not self._poll(match):
            if computed_tokens > match.engine_tokens and not match.pending_lookups:
                match.engine_tokens = computed_tokens
                self._client.prefetch(match, has=computed_tokens)
            if not match.is_ready and time.monotonic() < match.deadline + _LATE:
                return None
        if not match.is_ready:
            tracked.release_match()
            return 0
        if match.cut_reason in ("deadline", "error"):
            tracked.looked_at = time.monotonic() + _IN_VAIN
        tracked.stored_chunks, tracked.next_save_tokens = (
            match.chunks,
            (match.chunks + 1) * self._chunk_tokens,
        )
        loadable_tokens = match.chunks * self._chunk_tokens - computed_tokens
        if loadable_tokens <= 0:
            # The match has marked the engine's own prefix as used, in every tier.
            tracked.release_match()
            return 0
        if match.grant.placement.keys[computed_tokens // self._chunk_tokens] in self._arriving:
            return None
        tracked.promised_at_tokens = computed_tokens
        tracked.waits = self._must_wait(tracked, match, loadable_tokens)
        return loadable_tokens

    def _must_wait(self, tracked: TrackedRequest, match: RemoteMatch, tokens: int) -> bool:
        """Whether the request waits for its load beside steps, and is not loaded within its first step.

        Within a step the launch of the computing overlaps the copy, and the engine need not notice its end.
        But the whole step waits, so beside requests that decode it may only take a short time.
        """
        if not self._loads_in_steps or self.pinned_run != self._client.run_id:
            return True
        if not self.copies_beside:  # the copies of a CPU take its time anyway
            return False
        first = tracked.promised_at_tokens // self._chunk_tokens
        if any(chunk >= first for chunk in match.grant.placement.other_forms):
            return True  # the engine's thread would convert them
        if not self._neighbours:
            return False
        seconds = self._load_tracker.seconds(self._in_step + tokens)
        return seconds is None or seconds > _BESIDE

    def _poll(self, match: RemoteMatch) -> bool:
        """Whether the match is ready. One poll serves all requests that wait."""
        if not match.is_ready and (now := time.monotonic()) - self._asked_at >= _ASK:
            self._asked_at = now
            self._client.step()
        self._prefetch(match)
        return match.is_ready

    def allocated(self, tracked: TrackedRequest, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine has blocks for the request, and accepts so many of the promised tokens."""
        match = tracked.match
        if match is None:
            return
        if not external_tokens:
            tracked.release_match()
            return
        tracked.match = None
        tracked.preemptions_at_promise = tracked.request.num_preemptions
        tracked.looked_at = NEVER  # after a preemption, look it up again
        tracked.promise = match, list(blocks.get_block_ids())
        tracked.loaded_chunks = match.chunks
        self._promised.append(tracked)
        if not tracked.waits:
            self._in_step += external_tokens
            self._stats.add("loaded_in_step_tokens", external_tokens)
        elif self._shares:
            self._joined.add(match.grant.id)
            self._arriving.update(match.grant.placement.keys)
        self._stats.add("loaded_tokens", external_tokens)

    def sources(self, tracked: TrackedRequest, external_tokens: int) -> dict[str, int]:
        """The tiers of the tokens that were just promised."""
        if tracked.promise is None:
            return {}
        match, _ = tracked.promise
        found: dict[str, int] = {}
        first, inside = divmod(tracked.promised_at_tokens, self._chunk_tokens)
        for source in match.sources[first:]:
            tier = source if source == CPU else source.partition("-")[0]
            found[tier] = found.get(tier, 0) + self._chunk_tokens - inside
            inside = 0
        return found if sum(found.values()) == external_tokens else {}

    def plan(self, plan: Plan, scheduled: Collection[str]) -> dict[str, int]:
        """Load the promised chunks. Maps each such request of this step to its first loaded token."""
        loaded_from: dict[str, int] = {}
        self._neighbours, self._in_step = len(scheduled), 0
        if not self._promised:  # most steps
            return loaded_from
        promised, self._promised = self._promised, []
        for tracked in promised:
            if tracked.promise is None:  # forgotten
                continue
            (match, tables), tracked.promise = tracked.promise, None
            request_id = tracked.request.request_id
            if not tracked.waits and request_id not in scheduled:
                self.release(match)
                continue
            computed = loaded_from[request_id] = tracked.promised_at_tokens
            first = computed // self._chunk_tokens
            gpu_slots, filled = self._load_tracker.load(match, first, is_in_step=not tracked.waits)
            self._stats.add("gpu_hit_tokens", filled * self._chunk_tokens)
            waits = request_id if tracked.waits else ""
            kv_tables = tables_of_kv(tables, self._kv_groups)
            grant = match.grant
            load = LoadPlan(grant, kv_tables, computed, waits, gpu_slots, tracked.adapter)
            if grant.state is not None:
                last_block = match.chunks * self._chunk_blocks - 1
                load.state_block_ids = [[tables[group][last_block]] for group in self._state_groups]
            plan.loads.append(load)
        return loaded_from

    def release(self, match: RemoteMatch) -> None:
        """Release a match that the engine has accepted."""
        is_joined = match.grant.id in self._joined
        self._joined.discard(match.grant.id)
        for key in match.grant.placement.keys if is_joined else ():
            if self._arriving[key] > 1:
                self._arriving[key] -= 1
            else:
                del self._arriving[key]
        self._client.release(match)

    def forget(self, tracked: TrackedRequest) -> None:
        tracked.release_match()
        if tracked.promise is not None:
            self.release(tracked.promise[0])
            tracked.promise = None
