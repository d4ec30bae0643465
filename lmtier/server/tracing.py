"""OpenTelemetry spans of a server's work for engines, in the trace of the engine's request.

    lmtier.match      from the lookup to its answer: which chunks are stored
    lmtier.prefetch   from the request to load chunks of lower tiers, until the engine learns that they are
                      loaded
    lmtier.load       from there until the engine's release: it has copied the chunks, or needs none of them
    lmtier.store      from the reservation to the last commit

A span is created when it is over. Until then only its times and the trace's context are stored; an engine may
send the context late. So a server without tracing pays one comparison per verb. All settings are the standard
OTEL_* variables.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmtier._version import __version__
from lmtier.core.grant import Grant
from lmtier.core.match import CPU, Lookup
from lmtier.errors import log
from lmtier.threads import start_thread

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MAX_HEADER = 512
_EXPORTERS = {("otlp", "grpc"): "otlp_proto_grpc", ("otlp", "http/protobuf"): "otlp_proto_http"}


def start(env: Mapping[str, str] = os.environ) -> Tracing | None:
    """Start tracing. None: the OTEL_* variables do not enable traces, or a needed package is missing.

    The server starts all the same, because the variables may be meant for the engine that started it.
    """
    kind = env.get("OTEL_TRACES_EXPORTER", "")
    endpoints = (env.get(f"OTEL_EXPORTER_OTLP_{each}ENDPOINT") for each in ("TRACES_", ""))
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true" or kind == "none" or not (kind or any(endpoints)):
        return None
    try:
        from importlib.metadata import entry_points

        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        log.warning("lmtier: OTEL_* variables ask for traces; they need: pip install 'lmtier[otel]'")
        return None
    default = env.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", default)
    name = _EXPORTERS.get((kind or "otlp", protocol), kind or protocol)
    exporters = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not exporters:
        log.warning("lmtier: OTEL_* variables ask for the trace exporter %r, which is not installed", name)
        return None
    resource = (
        Resource.create() if env.get("OTEL_SERVICE_NAME") else Resource.create({SERVICE_NAME: "lmtier"})
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporters[0].load()()))
    return Tracing(provider)


@dataclass(slots=True)
class _Times:
    """Times in ns since 1970; 0: it has not happened yet."""

    engine: str
    began: int
    answered: int = 0
    wanted: int = 0
    arrived: int = 0
    below: int = 0
    """The number of chunks to load from lower tiers."""
    is_aborted: bool = False
    headers: dict[str, str] = field(default_factory=dict)


class Tracing:
    """The unfinished spans, by the ids of matches and reservations. The owner calls it."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("lmtier", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[int, _Times] = {}

    def close(self, timeout: float) -> None:
        """Send the waiting spans within `timeout`: a collector may hang."""
        start_thread("lmtier-trace-end", self._provider.shutdown).join(max(0.1, timeout))

    def belongs(self, number: int, headers: dict[str, str]) -> None:
        """Set the trace of a match or reservation, from a W3C traceparent header."""
        if (times := self._open.get(number)) is not None:
            times.headers = headers

    # ---- a match

    def matched(self, number: int, began: int, match: Lookup, engine: str) -> None:
        self._open[number] = _Times(engine, began, time.time_ns())
        self.reply_sent(number, match)

    def wanted(self, number: int, match: Lookup) -> None:
        """The engine wants the found chunks loaded."""
        times = self._open.get(number)
        if times is not None and not times.wanted:
            times.wanted, times.below = time.time_ns(), match.chunks - len(match.run)

    def reply_sent(self, number: int, match: Lookup) -> None:
        """The engine gets the state of its match."""
        times = self._open.get(number)
        if times is not None and match.is_ready and not times.arrived:
            times.arrived = time.time_ns()

    def released(self, number: int, match: Lookup) -> None:
        """Call it before the match is released."""
        times = self._open.pop(number, None)
        if times is None:
            return
        now = time.time_ns()
        asked = {"lmtier.tokens.requested": match.asked_tokens, "lmtier.chunks.requested": len(match.keys)}
        found = {f"lmtier.chunks.{tier}": match.sources.count(tier) for tier in dict.fromkeys(match.sources)}
        self._span("match", times, times.began, times.answered, {**asked, **found})
        arrived = times.arrived or now
        if times.wanted and times.below:
            cut = {"lmtier.cut": match.cut_reason} if match.cut_reason else {}
            lower_found = {tier: count for tier, count in found.items() if not tier.endswith(f".{CPU}")}
            self._span("prefetch", times, times.wanted, arrived, {**lower_found, **cut})
        if match.chunks and times.arrived:
            self._span("load", times, arrived, now, found)

    # ---- a reservation

    def reserved(self, number: int, began: int, engine: str) -> None:
        self._open[number] = _Times(engine, began)

    def aborted(self, number: int) -> None:
        """One of its shards was aborted."""
        if (times := self._open.get(number)) is not None:
            times.is_aborted = True

    def stored(self, number: int, grant: Grant) -> None:
        """The last of its shards was committed or aborted."""
        if (times := self._open.pop(number, None)) is not None:
            chunks = len(grant.chunks)
            facts = {"lmtier.chunks": chunks, "lmtier.bytes": chunks * grant.form.stored_bytes}
            if times.is_aborted:
                facts["lmtier.aborted"] = True
            self._span("store", times, times.began, time.time_ns(), facts)

    def _span(self, name: str, times: _Times, began: int, ended: int, facts: dict[str, Any]) -> None:
        parent = self._propagator.extract(times.headers) if times.headers else None
        facts["lmtier.engine"] = times.engine
        span = self._tracer.start_span(f"lmtier.{name}", parent, attributes=facts, start_time=began)
        span.end(ended)
