"""`lmtier prove` finds every fault that a connector can be given, and does not accuse one that is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.conftest import transfer
from tests.vllm.engine import PATIENCE
from tests.vllm.faults import FAULTS
from tests.vllm.test_serve import served


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


def test_an_engine_that_is_right_is_not_accused(engine):
    url, fault = engine
    fault.write_text("none")
    done = prove(url)
    assert done.returncode == 0, done.stdout
    stages = {each["name"]: each for each in json.loads(done.stdout)["stages"]}
    for name in ("restored", "restored, 8 at a time", "prompts that part inside a block", "many abort"):
        assert stages[name]["reusing"], name
    assert stages["adapters"]["reusing"]
    assert {name for name, each in stages.items() if not each["is_tested"]} == {
        "images",
        "more than the engine has room for",
        "after a restart",
    }


@pytest.mark.parametrize("name", FAULTS)
def test_it_finds(engine, name):
    url, fault = engine
    fault.write_text(name)
    done = prove(url, "--first")
    assert done.returncode == 1, done.stdout
