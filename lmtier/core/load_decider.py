"""Decides how much of a match is worth loading, and keeps measuring tiers that were not worth it."""

from __future__ import annotations

import time
from typing import NamedTuple

from lmtier.core.lower import LowerTier
from lmtier.core.lower_tiers import LowerTiers
from lmtier.core.match import Entry, Lookup
from lmtier.format.layout import ChunkForm, padded
from lmtier.format.objects import anonymous
from lmtier.observe.metrics import Metrics
from lmtier.rules.worth import ALWAYS, EXPLORED_AT_LAST, NEVER, PATIENCE, ArrivalEstimate, Cost, choose_load

_EXPLORED_BYTES = 32 << 20  # read at a time to measure a tier; or one chunk, if that is larger


class _Skipped(NamedTuple):
    """Chunks that were found but not loaded."""

    since: float
    keys: tuple[bytes, ...]
    first: int
    """The number of the first skipped key."""
    form: ChunkForm


class LoadDecider:
    def __init__(self, worth: str, chunk_tokens: int, lower: LowerTiers, metrics: Metrics) -> None:
        self._is_always = worth == ALWAYS
        self.is_never = worth == NEVER
        """No request is given anything."""
        self._chunk_tokens = chunk_tokens
        self._lower = lower
        self.loading_tier: dict[Entry, LowerTier] = {}
        """The tier of each chunk that is being loaded."""
        self._metrics = metrics
        self._computing = 0.0
        """When engines finish computing the chunks they did not get, according to their own costs."""
        self._skipped: dict[LowerTier, _Skipped] = {}
        """The latest skipped chunks of each tier."""

    def begin(self, match: Lookup, cost: Cost, began: float) -> None:
        """Limit the wait of a match by `cost`, the time that computing would take."""
        if not self._is_always:
            match.cost = cost
            match.patience = PATIENCE * cost.prefill(0, len(match.keys) * self._chunk_tokens)
            match.deadline = min(match.limit, began + match.patience)

    def arrived_chunks(self, match: Lookup) -> int:
        """The number of its leading chunks that are in the slab, whole.

        A reply may have said so. Then the engine reads them, also if they were deleted since.
        """
        return next((n for n, entry in enumerate(match.run) if entry in self.loading_tier), len(match.run))

    def weigh(self, match: Lookup) -> int:
        """How many leading chunks to keep: only those that load sooner than they are computed.

        It decides once all tiers have answered. It decides earlier if no outstanding answer could make more
        chunks worth loading; then these answers are not waited for.
        """
        if not (match.pending_lookups or match.below or match.pending_loads):
            return match.chunks
        if match.cost is None:
            if not match.pending_lookups:
                match.decision = "all", "always" if self._is_always else "unmeasured"
            return match.chunks
        now, size, arrived = time.monotonic(), self._chunk_tokens, self.arrived_chunks(match)
        named = self._lower.named
        coming = [self.loading_tier.get(entry) if i >= arrived else None for i, entry in enumerate(match.run)]
        found_tiers = [named.get(label) for label in match.below]
        tiers = list(dict.fromkeys(tier for tier in (*coming, *found_tiers) if tier is not None))
        places = [-1 if tier is None else -2 - tiers.index(tier) for tier in coming]
        places += [-1 if tier is None else tiers.index(tier) for tier in found_tiers]
        lines = [tier.speed.line(now) for tier in tiers]
        if match.pending_lookups:  # assume that one tier has all the rest and is as fast as the fastest
            asked_lines = (tier.prospect(now) for tier in self._lower.tiers_to_ask(match.source))
            lines.append(ArrivalEstimate(*map(min, zip(*asked_lines, strict=True))))
            places += [len(tiers)] * (len(match.keys) - match.chunks)
        if match.state_form is not None:  # the state is as far away as the chunks before it
            lines = [
                ArrivalEstimate(start + byte * match.state_form.stored_bytes, byte) for start, byte in lines
            ]
        tokens, nbytes = match.asked_tokens, match.form.stored_bytes
        chunks, arrival = choose_load(match.cost, tokens, match.engine_tokens, size, places, nbytes, lines)
        chunks = max(chunks, arrived)
        if match.pending_lookups and chunks > match.chunks:
            return match.chunks
        is_measured = all(tier.speed.is_measured for tier in tiers)
        if chunks == match.chunks and not is_measured:
            if not match.pending_lookups:
                match.decision = "all", "unmeasured"
            return match.chunks
        if match.pending_lookups:
            match.pending_lookups = 0
            match.cut_reason, match.found = "not_worth_it", len(match.keys)
        match.decided, match.expected = now, arrival if chunks > arrived and is_measured else None
        reason = match.cut_reason
        if chunks < match.chunks:
            self._skip(match, chunks)
            reason = reason or "not_worth_it"
        match.decision = "all", "faster"
        if reason == "not_worth_it":
            match.decision = "part" if chunks > arrived else "none", "slower"
        compute_seconds = match.cost.prefill(
            max(match.engine_tokens, min(arrived, chunks) * size), max(match.engine_tokens, chunks * size)
        )
        match.patience = PATIENCE * compute_seconds
        match.deadline = min(match.limit, now + match.patience)
        return chunks

    def _skip(self, match: Lookup, chunks: int) -> None:
        """Remember chunks that are not worth loading, to measure the tier again later."""
        first = max(chunks, len(match.run))
        skipped = match.sources[first:]
        if skipped and (tier := self._lower.named.get(skipped[0])) is not None:
            run_length = next((i for i, label in enumerate(skipped) if label != tier.label), len(skipped))
            self.remember_skipped(tier, match.keys[: first + run_length], first, match.form)

    def remember_skipped(self, tier: LowerTier, keys: tuple[bytes, ...], first: int, form: ChunkForm) -> None:
        """Remember that the tier has the keys from `first` on, and that they are not loaded."""
        if len(keys) > first:
            tier.speed.skipped((len(keys) - first) * form.stored_bytes)
            since = self._skipped[tier].since if tier in self._skipped else time.monotonic()
            self._skipped[tier] = _Skipped(since, keys, first, form)

    def explore(self) -> None:
        """Read some of the skipped chunks only to measure the tier, if possible while no engine computes.

        They are read into separate memory. By then the engine has mostly stored the computed chunks, so the
        slab has no place for them and needs none.
        """
        now = time.monotonic()
        for tier, (since, keys, first, form) in list(self._skipped.items()):
            if now < self._computing and now - since < EXPLORED_AT_LAST:
                continue
            del self._skipped[tier]
            max_chunks = min(len(keys) - first, max(1, _EXPLORED_BYTES // form.slab_bytes))
            for key in keys[first : first + tier.speed.explores(max_chunks, form.stored_bytes, now)]:
                if (stored_form := tier.load_form(key, form)) is not None:
                    payloads = [anonymous(padded(size)) for size in stored_form.sizes]
                    tier.load(key, stored_form, payloads, lambda result, end: None)
                    self._metrics.worth_explored.labels(tier.label).inc()

    def settle(self, match: Lookup) -> None:
        """The engine computes the rest now. Compare the expected and the actual time of the load."""
        if match.cost is not None:
            compute_seconds = match.cost.prefill(
                max(match.engine_tokens, match.chunks * self._chunk_tokens), match.asked_tokens
            )
            self._computing = max(self._computing, time.monotonic()) + compute_seconds
        if match.decision is not None:
            self._metrics.worth_decisions.labels(*match.decision).inc()
        if match.expected is not None and match.is_ready:
            self._metrics.worth_seconds.labels("expected").observe(match.expected)
            self._metrics.worth_seconds.labels("actual").observe(time.monotonic() - match.decided)
