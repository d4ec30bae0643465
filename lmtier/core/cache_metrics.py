"""The metrics of a cache: the content of its slab, the hits and misses of lookups, and dropped chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from functools import partial

from lmtier.core.index import Index
from lmtier.core.lower import count_shares
from lmtier.core.lower_tiers import LowerTiers
from lmtier.core.match import CPU, Entry, EntryState, Lookup
from lmtier.format.keys import is_state
from lmtier.format.layout import ChunkForm
from lmtier.observe.metrics import Metrics
from lmtier.observe.miss_curve import FACTORS, BoundedTier, MissCurves
from lmtier.rules.fullness import UNBOUNDED


class CacheMetrics:
    """The metrics of the slab and of lookups. A lower tier has its own."""

    def __init__(
        self, metrics: Metrics, indexes: Mapping[str, Index], lower: LowerTiers, chunk_tokens: int
    ) -> None:
        """`indexes`: of the slab and, once they are open, of owned tiers, by label."""
        self._metrics, self._indexes, self._lower, self.chunk_tokens = metrics, indexes, lower, chunk_tokens
        self._index = indexes[CPU]
        self._stored = metrics.stored_tokens.labels(CPU)
        self._evicted = metrics.evictions.labels(CPU, "capacity")
        self._evicted_unwritten = metrics.evictions.labels(CPU, "capacity_unwritten")

    def declare(self, outlook: MissCurves, pins: Sized) -> None:
        """Call it once all lower tiers are open."""
        metrics, index = self._metrics, self._index
        count_shares(metrics, CPU, index)
        metrics.capacity_bytes.labels(CPU).set_function(lambda: index.target)
        metrics.used_bytes.labels(CPU).set_function(lambda: index.used)
        metrics.chunks.labels(CPU).set_function(lambda: len(index))
        metrics.leased_bytes.set_function(lambda: index.leased_bytes)
        metrics.pinned_bytes.labels(CPU).set_function(lambda: index.pinned_bytes)
        metrics.pins.set_function(lambda: len(pins))
        for label in (CPU, *(tier.label for tier in self._lower)):
            metrics.expired.labels(label)  # starts at 0, so that the first one shows as a rise
            metrics.hit_tokens.labels(label)  # starts at 0: without hits the ratio is 0, and not unknown
        for bounded_tier in outlook.tiers:
            for factor in FACTORS:
                gauge = metrics.mrc_hit_ratio.labels(bounded_tier.tier, f"{factor:g}")
                gauge.set_function(partial(outlook.hit_ratio_of, bounded_tier.tier, factor))

    def tokens(self, keys: Sequence[bytes]) -> int:
        """The number of tokens in these chunks. Records and states have no tokens and are not counted."""
        tokenless = sum(self._index.is_record(key) or is_state(key) for key in keys)
        return (len(keys) - tokenless) * self.chunk_tokens

    def store(self, keys: Sequence[bytes]) -> None:
        self._stored.inc(self.tokens(keys))

    def skip(self, chunks: int) -> None:
        """Count chunks that need not be stored because they already are."""
        self._metrics.skipped_tokens.inc(chunks * self.chunk_tokens)

    def drop(self, keys: Sequence[bytes], why: str, form: ChunkForm) -> None:
        self._metrics.drop(CPU, why, [form.slab_bytes] * len(keys), self.tokens(keys))

    def evict(self, entries: Sequence[Entry]) -> None:
        """Count chunks that leave the slab to make room for others."""
        lower, unwritten_count = self._lower, 0
        if lower:
            unwritten_count = sum(
                not any(tier.is_stored_or_queued(entry.key, entry.form) for tier in lower)
                for entry in entries
            )
        self._evicted.inc(len(entries) - unwritten_count)
        self._evicted_unwritten.inc(unwritten_count)

    def count_lookup(self, match: Lookup) -> dict[str, int] | None:
        """Count a lookup: each token was hit in one tier or missed for one reason. Returns these numbers.

        None: no request made the lookup, or it was for a record.
        """
        chunk_tokens = self.chunk_tokens
        if not match.asked_tokens and match.keys:
            for label in {*match.sources} - {CPU} if not self._index.is_record(match.keys[0]) else ():
                self._metrics.prefetched_tokens.labels(label).inc(match.sources.count(label) * chunk_tokens)
            return None
        hits = {label: match.sources.count(label) * chunk_tokens for label in set(match.sources)}
        missed_tokens: dict[str, int] = {}
        cut_chunks = max(0, match.found - match.chunks)
        reasons = [match.cut_reason] * cut_chunks + self._why_missing(match.keys[match.chunks + cut_chunks :])
        for reason in reasons:
            missed_tokens[reason] = missed_tokens.get(reason, 0) + chunk_tokens
        if partial_tokens := match.asked_tokens - len(match.keys) * chunk_tokens:
            missed_tokens["partial_chunk"] = partial_tokens
        saved, cost = match.chunks * chunk_tokens, match.cost
        # The fixed part is paid all the same: the rest of the prompt has to be computed.
        saves_time = cost is not None and saved > match.engine_tokens
        seconds = (
            cost.prefill(match.engine_tokens, saved) - cost.fixed if cost is not None and saves_time else 0.0
        )
        self._metrics.settle(match.asked_tokens, hits, missed_tokens, seconds)
        return missed_tokens

    def _why_missing(self, keys: Sequence[bytes]) -> list[str]:
        reasons = dict.fromkeys(keys, "never_stored")
        for index in self._indexes.values():
            reasons |= index.gone(keys)
        for tier in reversed(self._lower.owned):
            reason = "tier_down" if tier.load_breaker.is_open else "behind_a_gap"
            reasons |= dict.fromkeys(tier.index.among(keys), reason)
        for key in self._index.among(keys):
            entry = self._index.get(key)
            is_filling = entry is not None and entry.state is EntryState.FILLING
            reasons[key] = "being_filled" if is_filling else "behind_a_gap"
        return list(reasons.values())


def bounded_tiers(index: Index, lower: LowerTiers) -> list[BoundedTier]:
    """The bounded tiers."""
    owned_tiers = [BoundedTier(tier.label, tier.index.capacity, True) for tier in lower.owned]
    return [
        BoundedTier(CPU, index.capacity, False),
        *(place for place in owned_tiers if place.capacity < UNBOUNDED),
    ]
