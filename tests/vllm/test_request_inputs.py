"""Whatever a request brings: a real vLLM answers it as it does without lmtier, and goes on."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from lmtier.client.client import Client
from lmtier_integrations.vllm.request_inputs import said_by
from tests.server.process import until
from tests.vllm.conftest import CHUNK, CacheServer, prompts_of
from tests.vllm.engine import Engine
from tests.vllm.odd import deep

HALF = r"'\udc80'"
TEXTS = [
    HALF,
    r"'x\ud800'",
    r"'\0'",
    r"'a\nb\r\n*1'",
    "'x' * (1 << 20)",
    "'x' * 65536",
    "'\u00e9' * 9000",
    "'%s %d'",
]
NUMBERS = ["0", "-1", "7", "2**31", "2**64", "-2**70", "10**5000", "1.5", "True"]
NUMBERS += ["float('nan')", "float('inf')", "-float('inf')"]
OTHERS = [
    "None",
    "''",
    "b''",
    r"b'\xff'",
    "[]",
    "['x']",
    "{}",
    "{'a': {'b': [1, None]}}",
    "{1: 2}",
    "deep(5000)",
]
OTHERS += ["('x',)", "{1, 2}", "object()"]
ODD = [*TEXTS, *NUMBERS, *OTHERS]
WORDS = [f"kv_transfer_params.lmtier_{each}" for each in ("ttl", "session", "parent", "source", "hints")]
FIELDS = ["cache_salt", "session_id", "kv_hints", "trace_headers", "trace_headers.traceparent"]
FIELDS += ["kv_transfer_params.do_remote_prefill", "lora.lora_name", "lora.lora_path"]
UNREADABLE = {
    HALF,
    TEXTS[1],
    *TEXTS[4:7],
    *(each for each in (*NUMBERS, *OTHERS) if each not in ("0", "None", "''", "b''", "[]", "{}")),
}
"""As a salt. vLLM takes the rest for none."""
TOKENS = [
    "[-1] * 300",
    "[2**31] * 300",
    "[2**64, 1] * 150",
    "[1.5] * 300",
    "['x'] * 300",
    "[None] * 300",
    "[]",
]


def test_an_engine_answers_whatever_a_request_brings(models, tmp_path, server: CacheServer):
    (prompt,), (other,) = prompts_of(300), prompts_of(600, seed=2)
    cases = [*product((*FIELDS, *WORDS), ODD)]
    cases += [("kv_transfer_params", each) for each in ("{}", "{'lmtier_ttl': 1, 2: 3}")]
    cases += product(("request_id",), TEXTS)
    cases += product(("priority",), NUMBERS[:6])
    cases += product(("item.identifier",), ODD)
    cases += [("item.length", "0"), ("item.offset", "-1"), ("item.length", "10**9")]
    cases += product(("prompt_token_ids",), TOKENS)
    with Engine(tmp_path, models / "qwen2", transfer=server.transfer(), max_model_len=1024) as engine:
        engine.use_connector(False)
        wanted = engine.generate([prompt], 4)[0].tokens
        of_half = engine.generate([prompt], 4, salt="\udc80")[0].tokens
        engine.use_connector(True)
        assert engine.generate([prompt], 4, salt="\udc80")[0].tokens == of_half == wanted
        answers = dict(zip(cases, engine.add_odd(prompt, cases), strict=True))
        computed = {case: each for case, each in answers.items() if isinstance(each, list)}
        assert {case for case, each in computed.items() if each != wanted} == set()
        assert len(computed) > 250
        declined = engine.metrics()["lmtier:declined_requests_total"]
        assert declined >= len(UNREADABLE)
        engine.log_stats()
        right = engine.generate([other], 4)[0]
        engine.forget()
        again = engine.generate([other], 4)[0]
        assert (again.cached, again.tokens) == (2 * CHUNK, right.tokens)
        engine.log_stats()
    log = engine.log.read_text()
    assert log.count("its cache_salt is not text of at most 16384 bytes in UTF-8") == 1
    assert "lmtier_integrations/vllm/" not in log, "a traceback went through it"
    assert log.count(f"lmtier: caching in cpu 256 MiB, server {server.path}") == 1
    about = (
        rf"lmtier: loads and stores KV of {models}/qwen2 in chunks of 256 tokens \(1 MiB\), for all engines"
    )
    assert len(re.findall(about, log)) == 1
    # vLLM itself writes such a line every 10 s, so there may be more than the two that are asked for.
    *earlier, last = re.findall(
        r"KV Transfer metrics: tokens found=(\d+), tokens loaded=(\d+), tokens stored=(\d+), "
        r"requests not cached=(\d+), MB/s loaded=",
        log,
    )
    assert sum(int(not_cached) for *_, not_cached in earlier) == declined
    assert last in (("512", "512", stored, "0") for stored in ("512", "0"))
    with Client(str(server.path)) as client:
        client.check()
        until(lambda: client.stats()["cpu"]["chunks"] > 0)


def said(**fields: Any) -> Any:
    request = Request("r", [1, 2], SamplingParams(max_tokens=1), None)
    for name, value in fields.items():
        setattr(request, name, value)
    return said_by(request)


@pytest.mark.parametrize("value", sorted(UNREADABLE))
def test_a_salt_that_is_no_text_declines_the_request(value):
    """The hints of the request are dropped."""
    odd = eval(value, {"deep": deep})
    found = said(cache_salt=odd, kv_transfer_params={"lmtier_hints": {"actions": []}})
    assert "its cache_salt is not text" in found.why_not
    assert (found.salt, found.hints) == ("", ())


def test_headers_of_a_trace_are_sent_only_as_they_may_be():
    right = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    assert said(trace_headers={**right, "cookie": "\udc80"}).trace == right
    for wrong in ("\udc80", "a\nb", "x" * 513, 7, None, b"00"):
        assert said(trace_headers={**right, "tracestate": wrong}).trace == {}
