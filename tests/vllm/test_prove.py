"""`lmtier prove` finds every fault that a connector can be given, and does not accuse one that is right.

`make prove` runs the same whole, and with LMCache too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import transfer
from tests.vllm.engine import PATIENCE
from tests.vllm.faults import FAULTS
from tests.vllm.test_serve import served

REUSING = "restored", "restored, 8 at a time", "prompts that part inside a block", "many abort"
"""Stages of which some answers came from a cache below the engine's own."""


@pytest.fixture(scope="module")
def engine(models, tmp_path_factory):
    """The address of an engine with adapters, and the file that names its fault."""
    folder = tmp_path_factory.mktemp("engine")
    fault = folder / "fault"
    fault.write_text("none")
    how = transfer(tiers=["cpu://?capacity=512MiB"], verify="off")
    how["kv_connector_module_path"] = "tests.vllm.broken"
    lora = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules"]
    lora += [f"first={models / 'first-adapter'}", f"second={models / 'second-adapter'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_FAULT", str(fault))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        with served(
            folder, models / "qwen2", json.dumps(how), "--enable-prompt-tokens-details", *lora
        ) as url:
            yield url, fault


def prove(url: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lmtier", "prove", url, "--short", "--json", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def right(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The stages of a proof that found nothing wrong."""
    assert done.returncode == 0, done.stdout
    return {each["name"]: each for each in json.loads(done.stdout)["stages"]}


@contextmanager
def other(folder: Path, model: Path, how: dict[str, Any] | None, *more: str) -> Iterator[str]:
    """An engine alone, or with a connector of vLLM's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "bench"))
        words = json.dumps(how) if how else None
        with served(folder, model, words, "--enable-prompt-tokens-details", *more) as url:
            yield url


def test_an_engine_that_is_right_is_not_accused(engine):
    url, fault = engine
    fault.write_text("none")
    stages = right(prove(url))
    for name in (*REUSING, "adapters"):
        assert stages[name]["reusing"], name
    assert {name for name, each in stages.items() if not each["is_tested"]} == {
        "images",
        "more than the engine has room for",
        "after a restart",
    }


def test_vllm_alone_is_not_accused(models, tmp_path):
    with other(tmp_path, models / "qwen2", None) as url:
        right(prove(url))


def test_vllms_own_offloading_is_not_accused(models, tmp_path):
    how = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    spec = {"spec_name": "CpuSpec", "spec_module_path": "cpu_offload_spec", "cpu_bytes_to_use": 512 << 20}
    with other(tmp_path, models / "qwen2", {**how, "kv_connector_extra_config": spec}) as url:
        stages = right(prove(url))
    for name in REUSING:
        assert stages[name]["reusing"], name


def test_vllms_example_is_found_to_ignore_the_salt(models, tmp_path):
    """It stores no more than the first step of a prompt, so all of a prompt is computed in one."""
    how = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    where = {"shared_storage_path": str(tmp_path / "kv")}
    all_at_once = "--max-num-batched-tokens", "16384"
    with other(tmp_path, models / "qwen2", {**how, "kv_connector_extra_config": where}, *all_at_once) as url:
        done = prove(url)
    assert done.returncode == 1, done.stdout
    findings = [each for stage in json.loads(done.stdout)["stages"] for each in stage["findings"]]
    assert findings
    assert all("another salt" in each["what"] for each in findings)


@pytest.mark.parametrize("name", FAULTS)
def test_it_finds(engine, name):
    url, fault = engine
    fault.write_text(name)
    done = prove(url, "--first")
    assert done.returncode == 1, done.stdout
