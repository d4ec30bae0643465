"""Every metric, declared once; the only importer of prometheus_client.

Base units, `_total` on counters, few and bounded labels: never a request, a key or a prompt. Only the
cache's owner updates them, so sums are exact.

A lookup does not wait for its counters: it is noted, and counted when the cache steps or metrics are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from lmtier._version import __version__
from lmtier.errors import ConfigError

SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10)
_BYTES = tuple(4.0**n for n in range(6, 18))  # 4 KiB to 16 GiB
_WINDOW = 1000
_LATER = 64  # the most lookups that wait to be counted: an owner may never step


MISS_GROUPS = {
    "new": ("New text", ("never_stored", "partial_chunk")),
    "left": ("Left before it was asked for again", ("evicted", "left_meanwhile", "expired", "behind_a_gap")),
    "failed": (
        "Was stored, and did not come",
        ("tier_down", "error", "deadline", "absent", "corrupt", "foreign", "sealed", "unsealed", "closed"),
    ),
    "room": ("No room to load it", ("no_room", "full")),
    "early": ("Asked for while an engine stored it", ("being_filled",)),
    "chosen": ("By choice", ("not_worth_it", "no_state", "cancelled", "cleared")),
}
"""What the reasons for a miss have in common. `new` and `chosen` are normal: no cache would have hit."""

MISS_REASONS = {
    "never_stored": "no tier had it, as far as the journal goes back",
    "evicted": "a tier had it, and it left to make room",
    "expired": "its time to live was over",
    "no_state": "a tier has it, but no state from which the model could go on after it or a later chunk",
    "behind_a_gap": "a tier has it, but not the chunk before it; or it is being stored now",
    "partial_chunk": "the tokens after the last whole chunk, and the one that is always computed",
    "absent": "it was gone when it was to be loaded",
    "corrupt": "it was damaged or not what its name says, and was deleted",
    "foreign": "its layout cannot be read by this engine, or its codec's library is not installed",
    "sealed": "it is sealed with a key that its tier does not have; it was not deleted",
    "unsealed": "its tier serves only sealed objects, and this was none; it was deleted",
    "error": "its tier failed to read it",
    "full": "its tier had no room",
    "deadline": "it did not come in time",
    "closed": "its tier was closed",
    "tier_down": "its tier keeps failing and is paused",
    "no_room": "everything in the cpu tier was leased, or within the shares of others",
    "being_filled": "an engine was storing it",
    "left_meanwhile": "it was evicted below between lookup and load",
    "cleared": "the cache was cleared",
    "cancelled": "the request ended before it was loaded",
    "not_worth_it": "computing it was expected to be sooner, or the caller asked for less",
}
"""Why a requested token was not supplied. These are all values of the label."""

DROP_REASONS = {
    "no_room": "everything that could leave was leased, or within the shares of others",
    "too_many": "one request wanted to store more chunks than a server reserves at a time",
    "aborted": "the engine that stores it gave up, or died",
    "foreign": "a chunk with its key is stored already, in a layout that this engine cannot read",
    "cleared": "the cache was cleared while it was written",
    "queue_full": "too many chunks waited to be written there",
    "evicted_before_write": "it left the slab before its turn came",
    "expired": "its time to live was over by then",
    "larger_than_tier": "it is larger than the whole tier",
    "full": "the tier had no room below its capacity, and evicting others did not help",
    "sealed": "the key to seal it with was destroyed meanwhile",
    "error": "the tier failed to write it",
    "deadline": "it was not written in time",
    "write_budget": "the day's bytes were spent, are too few for it, or are kept for chunks asked for twice",
    "closed": "the tier was closed",
}
"""Why a token that should have been stored in a tier was not."""
INTENDED_DROPS = {"write_budget", "expired", "cleared"}
"""The reasons that a setting or a user intends. The log and the verdicts pass over them."""

LABELS = {
    "tier": "`cpu`, then the scheme of each tier below: `disk`, `redis`; a second one is `disk-2`",
    "tenant": "the names in `shares=`, and `other` for all other tenants",
    "reason": "see below",
    "direction": "`down` is storing, `up` is loading",
    "model": "the names that engines give their models, at most 64, then `other`",
    "outcome": "`asked`, `hit`. Of takeovers: `done`, `failed`",
    "event": "`hit`, `missed`, `set`, `deleted`, `expired`, `refused`",
    "op": "what the tier was asked to do: `store`, `load`, `peek`, `lookup`, `delete`, `scan`, `touch`, "
    "`clear`. Of a queue: `store` is what is to be written, `all` every job in hand",
    "cause": "`capacity`: to make room. `capacity_unwritten`: and no tier below is known to have it. What a "
    "shared tier has is not known",
    "size_factor": "times the tier's capacity: 0.5, 1, 2, 4, 8",
    "kind": "who is connected: `engine`, `redis`, `http`, `console` (who asks for the report). Of wrong "
    "tokens: to which of them it was shown",
    "rule": "of `write=auto`: `reused`, `evicted`",
    "codec": "the words of `codec=`",
    "stage": "of a codec: `given` to the tier, and `stored` by it, header pages not included. "
    "Of a load: `expected` and `actual`",
    "decision": "`all`, `part` or `none` of what was found",
    "why": "`faster` to load, `slower`; `unmeasured`: the tier or the engine; as set: `always`, `never`",
    "version": "of lmtier",
    "state": "of agent sessions: `active`, and `waiting` for a person",
    "action": "of hints: `pin`, `retain`, `ttl`, `prefetch`, `release`, `session_end`, `session_wait`, "
    "`demote`; `other`: all that lmtier does not know",
    "result": "of hints: `done`, `repeated`, `unknown`, `refused`",
}
"""Every label and its values. All are bounded, by the settings or by a list in the source."""


class Metric(NamedTuple):
    """One metric, as Prometheus sees it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Metrics:
    """One cache's metrics, in a new registry unless one is given.

    `process` adds those of the whole process: memory, CPU, open files.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, process: bool = False) -> None:
        self.registry = registry or CollectorRegistry()
        if process:
            ProcessCollector(registry=self.registry)

        self.declared: list[Metric] = []
        """All metrics, for docs/METRICS.md."""

        def declare(name: str, kind: str, labels: tuple[str, ...], text: str) -> str:
            full = f"lmtier_{name}"
            self.declared.append(Metric(f"{full}_total" if kind == "counter" else full, kind, labels, text))
            return full

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(declare(name, "counter", labels, text), text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(declare(name, "gauge", labels, text), text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            full = declare(name, "histogram", labels, text)
            return Histogram(full, text, labels, buckets=buckets, registry=self.registry)

        self.takeovers = counter(
            "takeovers", "Servers that took over from another: `done`, and `failed` at this one.", "outcome"
        )
        self.takeover_seconds = gauge(
            "takeover_seconds", "Seconds without a server when this one took over from another; else 0."
        )
        # tokens: asked = hit, over tiers, + missed, over reasons
        self.lookups = counter("lookups", "Prefix lookups that were settled.")
        self.asked_tokens = counter("asked_tokens", "Tokens of prompts that were looked up.")
        self.hit_tokens = counter("hit_tokens", "Tokens supplied, by the tier that had them.", "tier")
        self.missed_tokens = counter("missed_tokens", "Tokens not supplied, by reason.", "reason")
        self.saved_seconds = counter(
            "saved_seconds",
            "Seconds that engines would have computed the hit tokens, by their own measurements. Engines that"
            " send none (and all, with `worth=always`) add nothing.",
        )
        self.model_tokens = counter(
            "model_tokens", "Tokens of prompts, by model: `asked`, and `hit`.", "model", "outcome"
        )
        self.tenant_tokens = counter(
            "tenant_tokens", "Tokens of prompts, by tenant: `asked`, and `hit`.", "tenant", "outcome"
        )
        self.stored_tokens = counter("stored_tokens", "Tokens whose KV became readable in a tier.", "tier")
        self.skipped_tokens = counter(
            "skipped_tokens", "Tokens not saved because they were stored already (skip_leading_tokens)."
        )
        self.dropped_tokens = counter(
            "dropped_tokens", "Tokens that should have been stored in a tier and were not.", "tier", "reason"
        )
        self.moved_bytes = counter("moved_bytes", "Bytes moved within memory to join free pieces of it.")
        self.dropped_objects = counter(
            "dropped_objects", "Chunks and named values that should have been stored in a tier and were not.",
            *("tier", "reason"),
        )  # fmt: skip
        self.dropped_bytes = counter("dropped_bytes", "Their bytes, as far as known.", "tier", "reason")
        self.values = counter(
            "values", "Named values: hit, missed, set, deleted, expired, refused for want of room.", "event"
        )
        # bytes and seconds
        self.transfer_bytes = histogram(
            "transfer_bytes", "Bytes of one finished transfer.", _BYTES, "tier", "direction"
        )
        self.transfer_seconds = histogram(
            "transfer_seconds", "Seconds of one finished transfer, queueing included.",
            *(SECONDS, "tier", "direction"),
        )  # fmt: skip
        self.worth_decisions = counter(
            "worth_decisions", "Lookups that found something below the slab, by how much of it was loaded.",
            *("decision", "why"),
        )  # fmt: skip
        self.worth_explored = counter(
            "worth_explored", "Chunks loaded though not worth it, to learn whether that is still so.", "tier"
        )
        self.worth_seconds = histogram(
            "worth_seconds", "Seconds from the decision until all of it was in the slab, or given up.",
            *(SECONDS, "stage"),
        )  # fmt: skip
        self.lookup_seconds = histogram("lookup_seconds", "Seconds of the owner for one lookup.", SECONDS)
        self.codec_bytes = counter(
            "codec_bytes", "Payload bytes of chunks that a tier with a codec took.", "tier", "stage"
        )
        # state
        self.codec = gauge("codec", "1: how this tier encodes what it stores now.", "tier", "codec")
        self.write_rule = gauge("write_rule", "1: when `write=auto` writes to this tier now.", "tier", "rule")
        self.write_budget_bytes = gauge(
            "write_budget_bytes",
            "Bytes that may be written now. It fills up to an hour's worth, or to one chunk if that is more; "
            "below 1/32 of that, only chunks that are asked for twice are written.",
            "tier",
        )
        self.written_bytes_per_day = gauge(
            "written_bytes_per_day",
            "Bytes written a day: what was written a day ago weighs a third of what is written now.",
            "tier",
        )
        self.life_days = gauge(
            "life_days",
            "Days until `endurance=` bytes are written, at the pace of `written_bytes_per_day`.",
            "tier",
        )
        self.used_bytes = gauge("used_bytes", "Bytes in use.", "tier")
        self.capacity_bytes = gauge("capacity_bytes", "Bytes that may be used.", "tier")
        self.share_bytes = gauge(
            "share_bytes", "Bytes that a tenant does not lose to others.", "tier", "tenant"
        )
        self.share_used_bytes = gauge("share_used_bytes", "Bytes in use, by tenant.", "tier", "tenant")
        self.chunks = gauge("chunks", "Chunks held.", "tier")
        self.queue_depth = gauge("queue_depth", "Jobs waiting or running.", "tier", "op")
        self.leased_bytes = gauge(
            "leased_bytes", "Bytes in the slab that cannot leave now: leased, loading or being filled."
        )
        self.sessions = gauge(
            "sessions", "Agent sessions in the book that have a name, by what they do.", "state"
        )
        self.sessions_ended = counter("sessions_ended", "Agent sessions that were over.")
        self.sessions_forgotten = counter(
            "sessions_forgotten", "Agent sessions that the bounded book had no room for."
        )
        self.hints = counter(
            "hints", "Hints of engines and routers, by action and result.", "action", "result"
        )
        self.pins = gauge("pins", "Prefixes that are pinned, by name.")
        self.pinned_bytes = gauge("pinned_bytes", "Bytes that stay because they are pinned.", "tier")
        self.breaker_open = gauge(
            "breaker_open", "1 while a tier is paused because it fails.", "tier", "direction"
        )
        self.hit_ratio = gauge(
            "recent_hit_ratio", f"Hit tokens over asked tokens of the last {_WINDOW} lookups."
        )
        self.mrc_hit_ratio = gauge(
            "mrc_hit_ratio",
            "What the hit ratio would be if this tier were alone, LRU, and of size_factor times its size. "
            "History fades with a half-life of an hour. NaN: nothing was asked.",
            *("tier", "size_factor"),
        )
        # the server
        self.ready = gauge("ready", "1 while the server is up and knows what its tiers hold.")
        self.clients = gauge("clients", "Open connections to the server.", "kind")
        self.clients_remember = gauge(
            "clients_remember_bytes",
            "Bytes that clients' requests make the server remember. Above 256 MiB it closes who takes most.",
        )
        self.clients_shed = counter("clients_shed", "Clients that were closed because they took most of it.")
        self.owner_seconds = counter(
            "owner_seconds",
            "CPU seconds of the thread that owns the cache. Near 1 per second it is the bottleneck.",
        )
        self.wrong_tokens = counter("wrong_tokens", "Clients that showed a wrong token.", "kind")
        self.unknown_sources = counter(
            "unknown_sources", "Requests that named a host as their source that is none of the tiers."
        )
        self.request_log_dropped = counter(
            "request_log_dropped", "Lookups missing in the request log: its disk was too slow, or failed."
        )
        # trouble
        self.expired = counter(
            "expired_chunks", "Chunks deleted because their time to live was over.", "tier"
        )
        self.prefetched_tokens = counter(
            "prefetched_tokens",
            "Tokens that were loaded before a request asked for them, by the tier that had them.",
            "tier",
        )
        self.evictions = counter("evictions", "Chunks that left a tier to make room.", "tier", "cause")
        self.share_evictions = counter(
            "share_evictions", "Chunks that left a tier to make room, by tenant.", "tier", "tenant"
        )
        self.tier_failures = counter(
            "tier_failures",
            "Objects that failed. `waited`: more were asked for than the tier could begin in time.",
            "tier",
            "op",
            "reason",
        )
        self.verify_failures = counter(
            "verify_failures", "Chunks whose raw blocks in the engine differ from those saved."
        )
        self.verified = counter("verified", "Chunks whose raw blocks in the engine were compared.")
        self.build = gauge("build_info", "1; the version in the label.", "version")
        self.build.labels(__version__).set(1)
        self._recent: deque[tuple[int, int]] = deque(maxlen=_WINDOW)
        self._recent_asked = 0
        self._recent_hit = 0
        self.hit_ratio.set_function(
            lambda: self._recent_hit / self._recent_asked if self._recent_asked else 0.0
        )
        self._hit: dict[str, Counter] = {}  # a child costs less than labels(), which every lookup would call
        self._missed = {reason: self.missed_tokens.labels(reason) for reason in MISS_REASONS}
        need_fields(self.lookup_seconds)
        self._settled: list[tuple[int, dict[str, int], dict[str, int], float]] = []
        self._looked_up: list[float] = []

    def looked_up(self, seconds: float) -> None:
        """Note the owner's time for one lookup."""
        self._looked_up.append(seconds)
        if len(self._looked_up) >= _LATER:
            self.count()

    def settle(self, asked: int, hits: dict[str, int], missed: dict[str, int], saved: float = 0.0) -> None:
        """Account for one lookup. Every token asked is hit in one tier or missed for one reason.

        `saved` is the time that computing the hit tokens would have taken.
        """
        self._settled.append((asked, hits, missed, saved))
        if len(self._settled) >= _LATER:
            self.count()

    def drop(self, tier: str, reason: str, nbytes: Collection[int], tokens: int) -> None:
        """Count objects that should be written to a tier and are not. `nbytes` has the size of each."""
        self.dropped_tokens.labels(tier, reason).inc(tokens)
        self.dropped_objects.labels(tier, reason).inc(len(nbytes))
        self.dropped_bytes.labels(tier, reason).inc(sum(nbytes))

    def count(self) -> None:
        """Count the noted lookups."""
        lookup_seconds, self._looked_up = self._looked_up, []
        for seconds in lookup_seconds:
            self.lookup_seconds.observe(seconds)
        settled, self._settled = self._settled, []
        if not settled:
            return
        asked_total, seconds = 0, 0.0
        hit_by: dict[str, int] = {}
        missed_by: dict[str, int] = {}
        for asked, hits, missed, saved in settled:
            seconds += saved
            hit = sum(hits.values())
            assert asked == hit + sum(missed.values()), "a token was neither hit nor missed"
            for tier, tokens in hits.items():
                hit_by[tier] = hit_by.get(tier, 0) + tokens
            for reason, tokens in missed.items():
                missed_by[reason] = missed_by.get(reason, 0) + tokens
            if len(self._recent) == _WINDOW:
                old_asked, old_hit = self._recent[0]
                self._recent_asked -= old_asked
                self._recent_hit -= old_hit
            self._recent.append((asked, hit))
            self._recent_asked += asked
            self._recent_hit += hit
            asked_total += asked
        self.lookups.inc(len(settled))
        self.asked_tokens.inc(asked_total)
        self.saved_seconds.inc(seconds)
        for tier, tokens in hit_by.items():
            if tier not in self._hit:
                self._hit[tier] = self.hit_tokens.labels(tier)
            self._hit[tier].inc(tokens)
        for reason, tokens in missed_by.items():
            self._missed[reason].inc(tokens)

    def value(self, name: str, **labels: str) -> float:
        """The current value of a sample, 0 if it never moved. Names are as in the exposition."""
        self.count()
        return self.registry.get_sample_value(name, labels) or 0.0

    def sums(self, metric: Counter | Gauge | Histogram, *labels: str) -> dict[str, float]:
        """The values of one metric (of a histogram: its sum), by these labels, joined by a space.

        Much cheaper than `value`, which collects the whole registry.
        """
        self.count()
        sums: dict[str, float] = {}
        for family in metric.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_created", "_bucket", "_count")):
                    key = " ".join(sample.labels[label] for label in labels)
                    sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def buckets(self, metric: Histogram, label: str, **where: str) -> dict[str, list[int]]:
        """For each value of `label`: how many observations were at most each bound, and at last all."""
        found: dict[str, list[int]] = {}
        for family in metric.collect():
            for sample in family.samples:
                if sample.name.endswith("_bucket") and where.items() <= sample.labels.items():
                    found.setdefault(sample.labels[label], []).append(int(sample.value))
        return found

    def dump(self) -> list[Any]:
        """All counters and histograms, for a process that goes on with them: name, labels, numbers."""
        self.count()
        series: dict[tuple[str, ...], tuple[str, dict[str, str], dict[str, float]]] = {}
        for name, metric in vars(self).items():
            for family in metric.collect() if isinstance(metric, Counter | Histogram) else ():
                for sample in family.samples:
                    labels = {**sample.labels}
                    part = labels.pop("le", sample.name.removeprefix(family.name))  # a bucket has a bound
                    if part != "_created":
                        *_, numbers = series.setdefault((name, *labels.values()), (name, labels, {}))
                        numbers[part] = sample.value
        return list(series.values())

    def restore(self, series: list[Any]) -> None:
        """Go on with the numbers of another process, those that are known here."""
        for name, labels, numbers in series:
            metric = getattr(self, name, None)
            if isinstance(metric, Counter | Histogram):
                with suppress(ValueError):  # it has other labels or buckets in this version
                    child = metric.labels(**labels) if labels else metric
                    child.inc(numbers["_total"]) if isinstance(child, Counter) else _add(child, numbers)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        self.count()
        return generate_latest(self.registry)


def need_fields(histogram: Histogram) -> None:
    """ConfigError: with this version of the library a takeover would lose the histograms."""
    missing = [name for name in ("_upper_bounds", "_sum", "_buckets") if name not in vars(histogram)]
    if missing:
        from importlib.metadata import version

        raise ConfigError(
            f"prometheus_client {version('prometheus_client')} has no {', '.join(missing)} in its Histogram,"
            " which a takeover needs; install the version that lmtier was tested with"
        )


def _add(histogram: Histogram, numbers: dict[str, float]) -> None:
    """Add what another process observed: its sum, and how much was at most each bound.

    The library has no public way. ValueError: it has other buckets.
    """
    below = {float(part): count for part, count in numbers.items() if not part.startswith("_")}
    if [*below] != histogram._upper_bounds:
        raise ValueError("it has other buckets in this version")
    histogram._sum.inc(numbers["_sum"])
    counts = [*below.values()]
    for bucket, before, upto in zip(histogram._buckets, [0.0, *counts], counts, strict=False):
        bucket.inc(upto - before)
