"""OpenTelemetry spans of what a server does for engines, in the trace of the request that it is done for.

    lmtier.match      from the question to its answer: which chunks are there
    lmtier.prefetch   from the wish to bring up what lies below, until the engine is told that it is there
    lmtier.load       from there until the engine lets go: it has copied, or found that it needs none of it
    lmtier.store      from the reservation to the last commit

Nothing of a span exists before it is over: what is kept until then are the times, and the trace's context,
which an engine may send after the fact. So a server that does not trace pays one comparison a verb. All
settings are the standard OTEL_* variables.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from lmtier import __version__
from lmtier.cache import CPU, Match, Reservation
from lmtier.workers import start_thread

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("lmtier")

MAX_HEADER = 512
_EXPORTERS = {("otlp", "grpc"): "otlp_proto_grpc", ("otlp", "http/protobuf"): "otlp_proto_http"}


def start(env: Mapping[str, str] = os.environ) -> Tracing | None:
    """None: the OTEL_* variables do not ask for traces, or what they ask for is not installed.

    That is no reason not to start: they may be meant for the engine that started us.
    """
    kind = env.get("OTEL_TRACES_EXPORTER", "")
    places = (env.get(f"OTEL_EXPORTER_OTLP_{each}ENDPOINT") for each in ("TRACES_", ""))
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true" or kind == "none" or not (kind or any(places)):
        return None
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        log.warning("lmtier: OTEL_* variables ask for traces; they need: pip install 'lmtier[otel]'")
        return None
    default = env.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", default)
    name = _EXPORTERS.get((kind or "otlp", protocol), kind or protocol)
    found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        log.warning("lmtier: OTEL_* variables ask for the trace exporter %r, which is not installed", name)
        return None
    resource = (
        Resource.create() if env.get("OTEL_SERVICE_NAME") else Resource.create({SERVICE_NAME: "lmtier"})
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(found[0].load()()))
    return Tracing(provider)


@dataclass(slots=True)
class _Times:
    """In ns since 1970; 0: it has not come to that."""

    engine: str
    began: int
    answered: int = 0
    wanted: int = 0
    arrived: int = 0
    below: int = 0
    """Chunks that were to be brought up."""
    headers: dict[str, str] = field(default_factory=dict)


class Tracing:
    """What is not over yet, by the numbers that engines use. Called by the owner."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("lmtier", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[int, _Times] = {}

    def close(self, timeout: float) -> None:
        """Send what waits, if that does not take long: a collector may hang."""
        start_thread("lmtier-trace-end", self._provider.shutdown).join(max(0.1, timeout))

    def belongs(self, number: int, headers: dict[str, str]) -> None:
        """To which trace, as a W3C traceparent says it."""
        if (times := self._open.get(number)) is not None:
            times.headers = headers

    # ---- a match

    def matched(self, number: int, began: int, match: Match, engine: str) -> None:
        self._open[number] = _Times(engine, began, time.time_ns())
        self.told(number, match)

    def wanted(self, number: int, match: Match) -> None:
        """What was found is to be brought up."""
        times = self._open.get(number)
        if times is not None and not times.wanted:
            times.wanted, times.below = time.time_ns(), match.chunks - len(match.run)

    def told(self, number: int, match: Match) -> None:
        """An engine hears how far its match is."""
        times = self._open.get(number)
        if times is not None and match.ready and not times.arrived:
            times.arrived = time.time_ns()

    def released(self, number: int, match: Match) -> None:
        """Before the match is released."""
        times = self._open.pop(number, None)
        if times is None:
            return
        now = time.time_ns()
        asked = {"lmtier.tokens.requested": match.asked_tokens, "lmtier.chunks.requested": len(match.keys)}
        found = {f"lmtier.chunks.{tier}": match.sources.count(tier) for tier in dict.fromkeys(match.sources)}
        self._span("match", times, times.began, times.answered, {**asked, **found})
        arrived = times.arrived or now
        if times.wanted and times.below:
            cut = {"lmtier.cut": match.cut} if match.cut else {}
            below = {tier: count for tier, count in found.items() if not tier.endswith(f".{CPU}")}
            self._span("prefetch", times, times.wanted, arrived, {**below, **cut})
        if match.chunks and times.arrived:
            self._span("load", times, arrived, now, found)

    # ---- a reservation

    def reserved(self, number: int, began: int, engine: str) -> None:
        self._open[number] = _Times(engine, began)

    def stored(self, number: int, reservation: Reservation) -> None:
        """The last shard of it was committed, or it was given up."""
        if (times := self._open.pop(number, None)) is not None:
            nbytes = sum(entry.form.at_rest for entry in reservation.entries.values())
            facts = {"lmtier.chunks": len(reservation.entries), "lmtier.bytes": nbytes}
            if reservation.aborted:
                facts["lmtier.aborted"] = True
            self._span("store", times, times.began, time.time_ns(), facts)

    def _span(self, name: str, times: _Times, began: int, ended: int, facts: dict[str, Any]) -> None:
        parent = self._propagator.extract(times.headers) if times.headers else None
        facts["lmtier.engine"] = times.engine
        span = self._tracer.start_span(f"lmtier.{name}", parent, attributes=facts, start_time=began)
        span.end(ended)
