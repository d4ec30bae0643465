"""The examples for vLLM run on a real engine, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.vllm.engine import PATIENCE, environment

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: object) -> str:
    done = subprocess.run(
        ["nice", "-n", "5", sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment({}, forked=True),
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def test_offline(models, tmp_path):
    for expected in ([0, 1920, 1920], [1920, 1920, 1920]):
        told = run("vllm_offline.py", models / "qwen2", tmp_path / "kv")
        assert [int(each) for each in re.findall(r"(\d+) of 2000 tokens were there", told)] == expected


def test_prefill_and_decode(models):
    told = run("prefill_decode.py", models / "qwen2")
    ((computed, loaded),) = re.findall(r"prefill computed (\d+) tokens, decode loaded (\d+) of them", told)
    assert int(computed) == 2000
    assert int(loaded) == 1792  # whole chunks of 256 tokens


def test_serve_and_restart(models, tmp_path):
    told = run("vllm_serve_restart.py", models / "qwen2", tmp_path / "kv")
    assert [int(each) for each in re.findall(r"(\d+) of 2000 tokens loaded", told)] == [0, 1920]


def test_an_agent_whose_cache_server_cannot_start_ends(models):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "agent.py"), str(models / "qwen2")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**environment({}), "LMTIER_QUEUE_LENGTH": "many"},
    )
    assert done.returncode == 1
    assert "the cache server did not start" in done.stderr


def test_an_agent_says_what_it_knows(models):
    told = run("agent.py", models / "qwen2")
    before, after = (int(each) for each in re.findall(r": (\d+) of \d+ tokens were there", told))
    assert before == 0
    assert after >= 3 * 1024  # its whole first prompt, in each turn but the first
    assert f"agent-2 saved {after} tokens, and has 0 children" in told
