"""`lmtier bench --gpu`, every line of it, on a simulated GPU, which gives no figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu_simulated import Simulated, tiny
from lmtier import bench
from lmtier.bench.gpu import Rig, layout_of
from lmtier.bench.stub import Stub
from lmtier.cli import main

ROOT = Path(__file__).parents[2]


def test_every_path_is_measured(monkeypatch):
    monkeypatch.setattr(bench, "_quick", tiny)
    gpu = Simulated()
    rows = bench.measure(quick=True, gpu=gpu)
    assert [row.path for row in rows] == list(bench.GPU_PATHS)
    assert gpu.products
    assert not gpu.pinned
    assert "cores, " in bench.header(None, gpu)
    assert "a simulated GPU" in bench.header(None, gpu)
    assert "gpu: fingerprint of 32 MiB" in bench.report(rows)
    assert json.loads(json.dumps(bench.as_json(rows)))[0]["path"] == "gpu: to the slab, 8B, 2k"


@pytest.mark.parametrize(
    ("is_apart", "calls"),
    [
        (False, 1 + 3),  # all blocks in one batch; three launches for the fingerprints of one chunk in 64
        (True, 2 * 32 + 3),  # a kernel, and a copy of rows, for each 32 MiB
    ],
)
def test_a_gibibyte_takes_few_calls_of_the_driver(is_apart, calls):
    with Rig(gpu := Stub(), layout_of("8B"), 512, is_apart=is_apart, is_proven=True) as rig:
        prompt, (ids, others) = rig.prompt(), rig.ids(2)
        for enqueue in (rig.save(prompt, ids), lambda: rig.load(prompt, others)()):
            before = gpu.calls
            enqueue()
            assert gpu.calls - before == calls
            rig.mover.drain()


def test_what_enqueueing_takes_is_measured_anywhere(monkeypatch):
    monkeypatch.setattr(bench, "_quick", tiny)
    rows = bench.measure(only="enqueue", quick=True)
    assert [row.path for row in rows] == list(bench.gpu_paths.stub_costs())
    assert all(row.ours > 0 for row in rows)


def test_without_a_gpu_the_command_says_what_is_missing(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert main(["bench", "--gpu", "--quick"]) == 2
    assert "--gpu needs a CUDA device" in capsys.readouterr().err


def test_the_days_script_can_be_rehearsed(tmp_path):
    """The stages `tests` and `toy` run the tests beside this one, and `test_toy_engine`."""
    script = [*("bash", "bench/gpu_day.sh", "--simulated"), "probe", "bench"]
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    subprocess.run(script, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=200)
    assert json.loads((tmp_path / "probe.json").read_text())["saves and loads"][0]["load: GB/s"] > 0
    assert "a simulated GPU" in (tmp_path / "bench.txt").read_text()
    wrong = subprocess.run(
        [*script[:3], "sanitize"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert "no stage sanitize" in wrong.stderr
