"""Spans of what a server did for an engine stand in the request's trace; without the SDK there are none."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lmtier.client.client import Client
from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.server import tracing
from lmtier.server.engines import EngineVerbs
from lmtier.server.tracing import Tracing
from lmtier.testing import MemoryTier
from tests.client.test_client import ONE, Server, look, store
from tests.client.test_client import ROOM as CLIENT_ROOM
from tests.client.test_client import keys as client_keys
from tests.server.process import PATIENCE, until
from tests.server.test_engines import LAYOUT, ROOM, WHOLE, C, Connection, keys

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Traced:
    """Verbs over a cache, and the spans that came of them."""

    def __init__(self, *urls: str, opened: Any = None, is_on: bool = True) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        tiers = (f"cpu://?capacity={8 * ROOM}", *urls)
        self.cache = Cache(Config(tiers=tiers, chunk_tokens=C, prefault=False), tiers=opened)
        self.tracing = Tracing(provider) if is_on else None
        self.engines = EngineVerbs(self.cache, tracing=self.tracing)
        self.engine = Connection(self.engines, "NAME", "engine-0")
        self.form = self.engine.say("FORM", LAYOUT.to_json(), str(WHOLE))

    def store(self, names: list[bytes], verb: str = "COMMIT") -> None:
        number = self.engine.say("RESERVE", self.form, 0, *names)["id"]
        self.engine.say("TRACE", number, PARENT)
        self.engine.say(verb, number, str(WHOLE))
        self.cache.flush()

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def traced() -> Iterator[Traced]:
    url = "memory://?capacity=1MiB"
    traced = Traced(url, opened={url: MemoryTier()})
    yield traced
    assert traced.tracing is not None
    assert not traced.tracing._open
    traced.cache.close(timeout=5)


def facts(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def test_a_trace_has_the_steps_of_a_request_in_order(traced):
    began = time.time_ns()
    traced.store(keys(4))
    for name in ("b", "c"):  # out of memory
        traced.store(keys(4, name))
    engine = traced.engine
    match = engine.say("MATCH", traced.form, 5 * C, 2000, *keys(5))
    engine.say("TRACE", match["id"], PARENT, "vendor=1")
    assert engine.say("POLL", match["id"], "WAIT")["state"] == b"ready"
    engine.say("RELEASE", match["id"])
    spans = {span.name: span for span in traced.spans()}
    assert list(spans) == ["lmtier.store", "lmtier.match", "lmtier.prefetch", "lmtier.load"]
    for span in spans.values():
        assert span.context is not None
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
        assert facts(span)["lmtier.engine"] == "engine-0"
    assert facts(spans["lmtier.match"]) | {"lmtier.engine": ""} == {
        "lmtier.engine": "",
        "lmtier.tokens.requested": 5 * C,
        "lmtier.chunks.requested": 5,
        "lmtier.chunks.memory": 4,
    }
    assert facts(spans["lmtier.prefetch"])["lmtier.chunks.memory"] == 4
    assert facts(spans["lmtier.store"])["lmtier.chunks"] == 4
    order = [times(spans[f"lmtier.{name}"]) for name in ("match", "prefetch", "load")]
    flat = [began, *(moment for each in order for moment in each), time.time_ns()]
    assert flat == sorted(flat)
    assert order[1][1] == order[2][0]


def test_a_hit_in_memory_has_no_prefetch_and_a_miss_no_load(traced):
    traced.store(keys(2))
    for names in (keys(2), keys(2, "new")):
        match = traced.engine.say("MATCH", traced.form, 0, 2000, *names)
        traced.engine.say("RELEASE", match["id"])
    assert [span.name for span in traced.spans()] == [
        *("lmtier.store", "lmtier.match", "lmtier.load", "lmtier.match")
    ]


def test_a_request_without_a_trace_begins_one(traced):
    match = traced.engine.say("MATCH", traced.form, 0, 2000, *keys(2))
    traced.engine.say("RELEASE", match["id"])
    (span,) = traced.spans()
    assert span.parent is None


def test_what_an_engine_leaves_behind_is_a_span_too(traced):
    traced.engine.say("MATCH", traced.form, 0, 2000, *keys(2))
    traced.engine.say("RESERVE", traced.form, 0, *keys(2))
    traced.engines.on_disconnect(traced.engine.caller)
    match, stored = traced.spans()
    assert match.name == "lmtier.match"
    assert facts(stored)["lmtier.aborted"] is True


@pytest.mark.parametrize("header", ["", "nonsense", "00-zz-zz-01", "x" * 100_000])
def test_a_context_that_is_none_costs_nothing_but_itself(traced, header):
    match = traced.engine.say("MATCH", traced.form, 0, 2000, *keys(2))
    assert traced.engine.say("TRACE", match["id"], header) == "OK"
    traced.engine.say("RELEASE", match["id"])
    assert traced.spans()[0].parent is None


def test_who_does_not_trace_takes_the_verb_and_forgets_it():
    traced = Traced(is_on=False)
    traced.store(keys(2))
    match = traced.engine.say("MATCH", traced.form, 0, 2000, *keys(2))
    assert traced.engine.say("TRACE", match["id"], PARENT) == "OK"
    traced.engine.say("RELEASE", match["id"])
    assert traced.spans() == []
    traced.cache.close(timeout=5)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
    ],
    ids=str,
)
def test_nothing_is_traced_unless_the_variables_ask_for_it(env):
    assert tracing.start(env) is None


def test_a_missing_exporter_is_named_and_does_no_harm(caplog):
    assert tracing.start({"OTEL_TRACES_EXPORTER": "smoke"}) is None
    assert "'smoke', which is not installed" in caplog.text


def test_a_wish_for_traces_without_the_sdk_is_answered():
    """Nothing of the SDK is loaded."""
    code = (
        "import sys, logging; logging.basicConfig(format='%(message)s', stream=sys.stdout)\n"
        "import lmtier.server.serve, lmtier.server.tracing as tracing\n"
        "assert tracing.start({}) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "sys.modules['opentelemetry.sdk.resources'] = None\n"
        "assert tracing.start({'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://x'}) is None"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "pip install 'lmtier[otel]'" in out.stdout


class Collector:
    """Takes spans over HTTP as any collector does."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.services: set[str] = set()
        self.parents: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    outer.services |= {
                        each.value.string_value
                        for each in resource.resource.attributes
                        if each.key == "service.name"
                    }
                    for span in (span for scope in resource.scope_spans for span in scope.spans):
                        outer.parents.add(span.trace_id.hex())
                        outer.names.append(span.name)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(PATIENCE)
        self._server.server_close()


def test_variables_make_a_server_send_a_clients_spans(tmp_path, monkeypatch):
    collector = Collector()
    for name, value in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }.items():
        monkeypatch.setenv(name, value)
    server = Server(
        tmp_path, f"cpu://?capacity={20 * CLIENT_ROOM}", config={"chunk_tokens": 4}, unix=f"{tmp_path}/s"
    )
    try:
        with Client(server.path) as client:
            store(client, client_keys(3))
            match = client.match(client_keys(3), ONE)
            client.trace(match.grant, {"traceparent": PARENT, "other": "x"})
            client.release(match)
            look(client, client_keys(3))
        until(lambda: len(collector.names) >= 5)
        assert collector.services == {"lmtier"}
        assert TRACE in collector.parents
        assert sorted(collector.names) == ["lmtier.load"] * 2 + ["lmtier.match"] * 2 + ["lmtier.store"]
        assert server.stop() == 0
    finally:
        server.kill()
        collector.close()


def test_a_missing_collector_keeps_no_server_from_ending(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    server = Server(
        tmp_path, f"cpu://?capacity={20 * CLIENT_ROOM}", config={"chunk_tokens": 4}, unix=f"{tmp_path}/s"
    )
    try:
        with Client(server.path) as client:
            store(client, client_keys(3))
            look(client, client_keys(3))
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < PATIENCE / 2
    finally:
        server.kill()
