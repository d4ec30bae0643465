"""What an operator sees of a real engine: why a prompt missed, and its work in the trace of the request."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmtier.tools.console import Console, ServerAddress
from tests.vllm.conftest import CacheServer, prompts_of, transfer
from tests.vllm.engine import Engine, environment

TRACE = "0af7651916cd43dd8448eb211c80319c"
ONE_REQUEST = """
import json, sys
from vllm import LLM, SamplingParams
how = json.loads(sys.argv[1])
llm = LLM(how["model"], max_model_len=1024, enforce_eager=True, skip_tokenizer_init=True, load_format="auto",
          kv_transfer_config=how["transfer"])
for number, prompt in enumerate(how["prompts"]):
    llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt},
        SamplingParams(max_tokens=2, detokenize=False), trace_headers={"traceparent": how["trace"]})
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    llm.reset_prefix_cache()
"""


def test_sent_tokens_explain_where_prompts_part(models, tmp_path, server):
    (prompt,) = prompts_of(600)
    other = [*prompt[:300], prompt[300] + 1, *prompt[301:]]
    how = transfer(server=str(server.path), tell_tokens=True)
    options: dict[str, Any] = {"max_model_len": 2048}
    remote = Console(ServerAddress(unix=str(server.path)))
    with (
        Engine(tmp_path, models / "qwen2", transfer=how, **options) as engine,
    ):
        engine.generate([prompt])
        (first,) = remote.explanations(5)
        assert first["why"].startswith("never stored; nothing of it is stored")
        engine.forget()
        engine.generate([other])
        found = remote.explanations(5, tokens=True)[0]
        assert (found["token"], found["is_exact"], found["hit"]) == (300, True, {"cpu": 256})
        assert (found["here"][0], found["there"][0]) == (other[300], prompt[300])
        engine.generate([prompt], salt="tenant")
        salted = remote.explanations(5, tokens=True)[0]
        assert salted["why"] == "never stored; the same tokens are: salt differs"
        assert "tenant" not in json.dumps(salted)


def test_spans_stand_in_the_trace_that_a_request_came_with(models, tmp_path, monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    server = CacheServer(tmp_path)
    try:
        (prompt,) = prompts_of(600)
        given = {
            "model": str(models / "qwen2"),
            "transfer": transfer(server=str(server.path)),
            "prompts": [prompt, prompt],
            "trace": f"00-{TRACE}-b7ad6b7169203331-01",
        }
        env = environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OTEL_TRACES_EXPORTER": "none"})
        command = ["nice", "-n", "5", sys.executable, "-c", ONE_REQUEST, json.dumps(given)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        log = Path(server._log.name)
        until = time.monotonic() + 10
        wanted = {f"lmtier.{name}" for name in ("match", "store", "load")}
        while time.monotonic() < until and not all(f'"{name}"' in log.read_text() for name in wanted):
            time.sleep(0.05)
    finally:
        server.close()
    spans = _spans(log.read_text())
    assert {span["name"] for span in spans} == wanted
    assert {span["context"]["trace_id"] for span in spans} == {f"0x{TRACE}"}
    assert {span["parent_id"] for span in spans} == {"0xb7ad6b7169203331"}
    loads = [span["attributes"] for span in spans if span["name"] == "lmtier.load"]
    assert loads[0]["lmtier.chunks.cpu"] == 2
    assert loads[0]["lmtier.engine"] == "vllm scheduler"


def _spans(text: str) -> list[dict[str, Any]]:
    """Objects of JSON among the lines of a log."""
    decoder, at = json.JSONDecoder(), 0
    found: list[dict[str, Any]] = []
    while (at := text.find("{\n", at)) >= 0:
        span, at = decoder.raw_decode(text, at)
        found.append(span)
    return found
