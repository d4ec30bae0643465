"""Replays a trace through the real `Cache`: it makes all decisions, but no bytes move.

A chunk is one page of an untouched slab, capacities are counted in chunks of the simulated size, and lower
tiers complete each job at once. The cache's decisions do not depend on this, as long as all chunks have one
size. Requests come one after the other: nothing is leased when the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from lmtier.config import Config, TierSpec
from lmtier.copy.gpu_copies import GpuCopies
from lmtier.core.cache import Cache
from lmtier.core.match import CPU
from lmtier.errors import ConfigError, size_text
from lmtier.format.layout import PAGE, LayerShape, Layout, form_of, padded, stored_size
from lmtier.format.objects import Header
from lmtier.observe.metrics import Metrics
from lmtier.rules.hints import DONE
from lmtier.rules.lifetimes import FOREVER
from lmtier.threads import collector_paused
from lmtier.tiers.base import Done, Job, Op, Tier
from lmtier.tools.sim.engine import ENGINE, GPU, EngineMemory
from lmtier.tools.sim.traces import Trace

_HOT_METRICS = ("transfer_bytes", "transfer_seconds", "stored_tokens", "dropped_tokens", "evictions")
# Bytes per second, and seconds until the first byte. A copy in GPU memory: as measured on an H100.
_USUAL = {ENGINE: (inf, 0.0), GPU: (392e9, 0.0), "cpu": (20e9, 0.0), "disk": (3e9, 1e-3)}
_FAR = (1e9, 2e-3)
_AT_REST = stored_size(PAGE)  # the size of a chunk of one page in a lower tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The speeds from which expected times are computed."""

    prefill: float = 10_000.0
    """Tokens per second that the engine computes."""
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second, by tier; for `cpu` from the slab into the engine."""
    latency: Mapping[str, float] = field(default_factory=dict)
    """Seconds until the first byte, by tier."""

    def seconds(self, missed: int, hits: Mapping[str, int], bytes_per_token: float) -> float:
        """Seconds to the first token if the engine is idle: the loads, then the computation."""
        total = max(1, missed) / self.prefill
        for label, tokens in hits.items():
            usual_bandwidth, usual_latency = _USUAL.get(label.partition("-")[0], _FAR)
            total += self.latency.get(label, usual_latency)
            total += tokens * bytes_per_token / self.bandwidth.get(label, usual_bandwidth)
        return total


@dataclass(slots=True)
class ReplayResult:
    """The result of one replay."""

    specs: Sequence[TierSpec]
    seconds: float
    """The duration of the trace."""
    bytes_per_token: float
    hinted: str = "trace"
    """Which hints the trace had; one of traces.HINTS."""
    executed: int = 0
    """Hints that were executed."""
    requests: int = 0
    chunks: int = 0
    """Chunks that were looked up."""
    tokens: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    """Tokens supplied, by tier."""
    saved: int = 0
    """Tokens saved into the slab."""
    read: dict[str, int] = field(default_factory=dict)
    """Bytes read from each lower tier."""
    written: dict[str, int] = field(default_factory=dict)
    """Bytes written to each lower tier."""
    room: int | None = None
    """The number of chunks that all tiers hold together; None: one is unlimited."""
    bound: float | None = None
    """The hit ratio of a cache of this room that knows all requests beforehand; None: not computed."""
    ttft: list[float] = field(default_factory=list)
    """Expected seconds to the first token, in rising order."""

    @property
    def hit_tokens(self) -> int:
        return sum(self.hits.values())

    @property
    def tokens_not_computed(self) -> int:
        """Tokens that the engine would have computed without these tiers."""
        return self.hit_tokens - self.hits.get(ENGINE, 0)

    @property
    def hit_ratio(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    def percentile(self, share: float) -> float:
        return self.ttft[min(len(self.ttft) - 1, int(share * len(self.ttft)))]

    def written_per_day(self, label: str) -> float:
        return self.written[label] * 86_400 / self.seconds if self.seconds else 0.0


class InstantTier(Tier):
    """A tier that completes every job at once, and counts the bytes."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._done: list[Done] = []
        self.loaded = self.stored = 0

    def submit(self, job: Job) -> None:
        ok: dict[Any, Any]
        if job.op is Op.LOAD:
            self.loaded += len(job.items)
            ok = {item.name: Header(item.name, self._layout, PAGE) for item in job.items}
        else:
            self.stored += len(job.items) if job.op is Op.STORE else 0
            ok = {item.name: None for item in job.items}
        self._done.append(Done(job.id, ok))

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        pass


def replay(
    trace: Trace,
    urls: Sequence[str],
    *,
    chunk_tokens: int,
    bytes_per_token: float,
    hardware: Hardware | None = None,
    partial: bool = False,
    engine: int = 0,
    engine_resets_every: float = 0.0,
    heard: Callable[[Cache, Mapping[str, int]], None] = lambda cache, hits: None,
) -> ReplayResult:
    """Replay a trace on a cache with these tiers. `heard` is called with the result of each request.

    `partial` counts the last part of a prompt as a whole chunk, as studies of policies do. `engine`: the
    bytes of the engine's own prefix cache. `engine_resets_every`: seconds until it empties that; 0: never.
    """
    hardware = hardware or Hardware()
    chunk_bytes = round(chunk_tokens * bytes_per_token)
    layout = Layout((LayerShape(1, PAGE, 0),), "u8", chunk_tokens, chunk_tokens, "simulated")
    form = form_of(layout, [layout.whole])
    requested_config = Config(tiers=urls)
    specs, gpu = requested_config.cache_tiers, requested_config.gpu
    tiers = [InstantTier(layout) for _ in specs[1:]]
    config = Config(
        chunk_tokens=chunk_tokens,
        tiers=[_in_chunks(number, spec, chunk_bytes) for number, spec in enumerate(specs)],
        hugepages=False,
        prefault=False,
        queue_length=1 << 40,  # no limit: a trace does not show when chunks come faster than a disk writes
    )
    copies = None
    if gpu is not None:
        copies = GpuCopies(_chunks_of(gpu, padded(chunk_bytes)) * PAGE, gpu.policy)
    memory = EngineMemory(engine // chunk_bytes, engine_resets_every, copies)
    outcome = ReplayResult(requested_config.all_tiers, trace.seconds, bytes_per_token)
    if all(spec.capacity is not None for spec in specs):
        outcome.room = engine // chunk_bytes + sum(_chunks_of(spec, padded(chunk_bytes)) for spec in specs)
        outcome.room += 0 if gpu is None else _chunks_of(gpu, padded(chunk_bytes))
    tiers_by_url = dict(zip(config.tiers[1:], tiers, strict=True))
    now = 0.0
    with collector_paused(), Cache(config, metrics=_quiet(), tiers=tiers_by_url, clock=lambda: now) as cache:
        engine_labels = [ENGINE] * (engine > 0) + [GPU] * (gpu is not None)
        outcome.hits = dict.fromkeys([*engine_labels, CPU, *(below.label for below in cache.lower)], 0)
        for label in {**hardware.bandwidth, **hardware.latency}:
            if label not in outcome.hits:
                raise ConfigError(
                    f"the speed of {label}: there is no such tier, only {', '.join(outcome.hits)}"
                )
        for request, keys in zip(trace.requests, trace.keys(chunk_tokens, partial=partial), strict=True):
            now = request.at
            cached_prefix = memory.has(keys, now)
            match = cache.match(keys, form, session=request.session, parent=request.parent)
            cache.prefetch(match, has=cached_prefix * chunk_tokens)
            _finish(cache)
            sources = memory.load(match, cached_prefix, form)
            hits = {label: sources.count(label) * chunk_tokens for label in set(sources)}
            cache.release(match)
            grant = cache.reserve(keys, form)
            cache.commit(grant)
            memory.keep(keys)
            outcomes = cache.hint(request.hints, session=request.session) if request.hints else ()
            outcome.executed += sum(hint_result.result == DONE for hint_result in outcomes)
            _finish(cache)
            outcome.requests += 1
            outcome.chunks += len(keys)
            outcome.tokens += max(request.tokens, len(keys) * chunk_tokens)
            outcome.saved += len(grant.chunks) * chunk_tokens
            for label, tokens in hits.items():
                outcome.hits[label] += tokens
            missed = request.tokens - sum(hits.values())
            outcome.ttft.append(hardware.seconds(missed, hits, bytes_per_token))
            heard(cache, hits)
        for below, tier in zip(cache.lower, tiers, strict=True):
            outcome.read[below.label] = tier.loaded * stored_size(chunk_bytes)
            outcome.written[below.label] = tier.stored * stored_size(chunk_bytes)
    outcome.ttft.sort()
    return outcome


def _finish(cache: Cache) -> None:
    """Let the tiers finish all jobs. A real engine's step takes much longer than these."""
    cache.step()
    while any(below.backlog or below.has_jobs for below in cache.lower):
        cache.step()


def _in_chunks(number: int, spec: TierSpec, nbytes: int) -> str:
    """The URL of a tier that holds as many pages as the given tier holds chunks."""
    rules = f"&policy={spec.policy}" + (f"&ttl={spec.ttl}s" if spec.ttl != FOREVER else "")
    if spec.scheme == "cpu":
        room, scaled = padded(nbytes), PAGE
    else:
        room, scaled, rules = stored_size(nbytes), _AT_REST, f"{rules}&write={spec.write}"
        if spec.writes_per_day is not None:
            rules += f"&writes_per_day={max(1, spec.writes_per_day * scaled // room)}"
    if spec.capacity is None:
        return f"{spec.scheme}:///{number}?{rules[1:]}"
    capacity = _chunks_of(spec, room) * scaled
    return f"{spec.scheme}://{f'/{number}' if number else ''}?capacity={capacity}{rules}"


def _chunks_of(spec: TierSpec, room: int) -> int:
    assert spec.capacity is not None
    if not (chunks := spec.capacity // room):
        raise ConfigError(f"{spec} is too small for one chunk of {size_text(room)}; give it more capacity")
    return chunks


class _Unread:
    """A metric without effect. Real ones would take a fifth of the time."""

    def labels(self, *_: object) -> _Unread:
        return self

    def inc(self, *_: object) -> None:
        pass

    observe = inc


def _quiet() -> Metrics:
    metrics = Metrics()
    for name in _HOT_METRICS:
        setattr(metrics, name, _Unread())
    return metrics
