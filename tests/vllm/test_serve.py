"""`vllm serve` as in docs/VLLM.md: the answers stay, its metrics say where the tokens came from.

test_guide.py and test_examples.py restart it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.redis_process import free_port
from tests.server.process import until
from tests.vllm.conftest import private_servers, prompts_of
from tests.vllm.engine import PATIENCE, environment

DOC = Path(__file__).parents[2] / "docs" / "VLLM.md"
IMAGE = Path(__file__).parents[2] / "deploy" / "vllm.Dockerfile"


@contextmanager
def served(folder: Path, model: Path, how: str | None, *more: str) -> Iterator[str]:
    port = free_port()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", IMAGE.read_text(), re.M)
    command = [sys.executable, *json.loads(entry)[1:], f"--model={model}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--enforce-eager"]
    command += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "4096"]
    command += ["--kv-transfer-config", how] if how else []
    log = folder / f"serve-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["nice", "-n", "5", *command, *more],
            stdout=out,
            stderr=out,
            process_group=0,
            env=environment(
                {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, forked=True
            ),
        )
    base = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        with suppress(OSError):
            return ask(f"{base}/health") == b""
        return False

    try:
        until(is_up, PATIENCE)  # until then SIGTERM may be lost
        yield base
        process.terminate()
        process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(url: str, body: Any = None, **headers: str) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        answer: bytes = reply.read()
    return answer


def complete(base: str, model: Path, prompt: list[int], **headers: str) -> list[int]:
    body = {"model": str(model), "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "detokenize": False}
    reply = json.loads(ask(f"{base}/v1/completions", body, **headers))
    tokens: list[int] = reply["choices"][0]["token_ids"]
    return tokens


def counted(base: str, name: str) -> float:
    text = ask(f"{base}/metrics").decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}[^ ]* (\S+)$", text, re.M))


def counts(base: str, name: str, tokens: int) -> None:
    """The engine's process tells its numbers a little after its answer."""
    until(lambda: counted(base, name) == tokens)


def test_the_documented_command_serves_two_engines(models, tmp_path, monkeypatch):
    home = tmp_path / "run"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    (command,) = re.findall(r"--kv-transfer-config '(\{.*?\})'\n", DOC.read_text(), re.S)[:1]
    told = json.loads(command)
    told["kv_connector_extra_config"]["tiers"] = [
        "cpu://?capacity=256MiB",
        f"disk://{tmp_path}/kv?capacity=1GiB",
    ]
    how, model = json.dumps(told), models / "qwen2"
    (prompt,) = prompts_of(1500)
    first, second = ({"X-data-parallel-rank": rank} for rank in "01")
    try:
        with served(tmp_path, model, how, "--data-parallel-size", "2") as base:
            cold = complete(base, model, prompt, **first)
            counts(base, 'lmtier:saved_tokens_total{engine="0"', 1472)  # whole blocks
            ask(f"{base}/reset_prefix_cache", {})
            assert complete(base, model, prompt, **first) == cold
            counts(base, "vllm:external_prefix_cache_hits_total", 1472)
            counts(base, 'lmtier:loaded_tokens_total{engine="0"', 1472)
            assert counted(base, "vllm:prompt_tokens_cached_by_source_total") >= 1472
            assert complete(base, model, prompt, **second) == cold
            counts(base, 'lmtier:loaded_tokens_total{engine="1"', 1472)
            (private,) = private_servers(home)
            os.kill(private, signal.SIGSTOP)  # what it has not written yet waits
        assert private_servers(home) == [private]  # vLLM has killed its descendants, and this is none
    finally:
        for each in private_servers(home):
            os.kill(each, signal.SIGCONT)
    until(lambda: not private_servers(home))  # it ends with the engines, when all is written
    assert len(list((tmp_path / "kv").glob("??/*"))) >= 1472 // 32
