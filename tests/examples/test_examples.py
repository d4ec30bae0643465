"""Every example runs, and prints what it promises."""

import re
import subprocess
import sys
from pathlib import Path

from tests.redis_process import running
from tests.server.process import served

EXAMPLES = Path(__file__).parents[2] / "examples"
VLLM = {"vllm_offline.py", "vllm_serve_restart.py", "prefill_decode.py", "agent.py"}


def run(name: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_example_is_forgotten():
    here = Path(__file__).read_text()
    there = (Path(__file__).parents[1] / "vllm" / "test_examples.py").read_text()
    for each in EXAMPLES.glob("*.py"):
        assert f'"{each.name}"' in (there if each.name in VLLM else here.replace(repr(VLLM), ""))


def test_library(tmp_path):
    assert "found 0 of 3 chunks" in run("library.py", tmp_path)
    again = run("library.py", tmp_path)
    assert "found 2 of 3 chunks, in: disk, disk" in again
    assert "every byte is what the model computes" in again


def test_a_custom_tier_finds_what_an_earlier_run_stored(tmp_path):
    """`test_my_tier.py` runs the suite for tiers on it."""
    assert "0 tokens came from SQLite, 256 were computed" in run("my_tier.py", tmp_path / "file")
    assert "192 tokens came from SQLite, 64 were computed" in run("my_tier.py", tmp_path / "file")


def test_engines_share_a_server(tmp_path):
    with served(tmp_path, "cpu://?capacity=16MiB", unix=str(tmp_path / "socket")):
        for options, loaded in (((), 0), ((), 1024), (("--first-token", 7), 0), (("--salt", "b"), 0)):
            told = run("shared_server.py", tmp_path / "socket", "--tell", *options)
            assert f"{loaded} tokens loaded" in told
            assert f"{1030 - loaded} computed" in told


def test_a_fleet_shares_redis(tmp_path):
    with running(tmp_path) as server:
        told = run("redis_fleet.py", f"redis://127.0.0.1:{server.port}")
    first, second = re.findall(r"(\d+) tokens came from Redis, (\d+) were computed", told)
    assert first == ("0", "256")
    assert second == ("192", "64")


def test_transformers(tmp_path):
    assert re.findall(r"loaded: (.*)", run("transformers_generate.py", tmp_path)) == ["none", "1280 from cpu"]
    assert re.findall(r"loaded: (.*)", run("transformers_generate.py", tmp_path)) == [
        "1280 from disk",
        "1280 from cpu",
    ]
