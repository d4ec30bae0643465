"""`lmtier bench --gpu`, every line of it, on a simulated GPU, which gives no figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lmtier_bench as bench
from bench.gpu_simulated import Simulated, tiny
from lmtier.errors import ConfigError
from lmtier.tools.cli import main
from lmtier_bench import stub
from lmtier_bench.gpu import Rig, layout_of
from lmtier_bench.stub import Stub
from tests.copy.test_cuda_page_lock import MEMORY, Driver

ROOT = Path(__file__).parents[2]


def test_every_path_is_measured(monkeypatch):
    monkeypatch.setattr(bench, "_quick", tiny)
    gpu = Simulated()
    rows = list(bench.measure(quick=True, gpu=gpu))
    assert [row.path for row in rows] == list(bench.GPU_PATHS)
    assert gpu.products
    assert not gpu.pinned
    assert "cores, " in bench.header(None, gpu)
    assert "a simulated GPU" in bench.header(None, gpu)
    assert any(bench.line(row).startswith("gpu: fingerprint of 32 MiB") for row in rows)
    assert json.loads(json.dumps(bench.as_json(rows)))[0]["path"] == "gpu: to the slab, 8B, 2k"


def test_a_run_that_is_cut_off_leaves_what_it_has_measured(monkeypatch, tmp_path):
    class Lent(Simulated):
        """For as long as the first of its engines takes."""

        engines = 0

        def tensor(self, shape: Sequence[int]) -> Any:
            self.engines += 1
            if self.engines > 1:
                raise KeyboardInterrupt
            return super().tensor(shape)

    monkeypatch.setattr(bench, "_quick", tiny)
    with pytest.raises(KeyboardInterrupt):
        list(bench.measure(quick=True, gpu=Lent(), save=tmp_path / "bench.json"))
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert len(rows) == 5
    assert {row["path"].partition(", ")[2] for row in rows} == {"8B, 2k"}


def test_memory_that_cannot_be_locked_is_not_measured():
    driver, probe = Driver(most=250), import_module("bench.gpu_probe")
    lock = driver.page_lock()
    lock.start()
    machine = object.__new__(probe.Machine)  # a whole one needs a GPU
    machine.device = SimpleNamespace(lock_pages=lambda _: lock)
    with pytest.raises(ConfigError, match=r"could not be pinned: .*out of memory"), machine.pinned(MEMORY):
        pytest.fail("it is measured")
    assert not driver.ranges


@pytest.mark.parametrize(
    ("is_apart", "by_layer", "calls"),
    [
        (False, False, 1 + 3),  # all blocks in one batch; three launches for one fingerprint in 64 chunks
        (True, False, 2 * 32 + 3),  # a kernel, and a copy of rows, for each 32 MiB
        (False, True, 4 + 3),  # a batch for each group of layers
        (True, True, 2 * 32 + 3),
    ],
)
def test_a_gibibyte_takes_few_calls_of_the_driver(is_apart, by_layer, calls):
    with Rig(gpu := Stub(), layout_of("8B"), 512, is_apart=is_apart, is_proven=True) as rig:
        prompt, (ids, others) = rig.prompt(), rig.ids(2)
        save = rig.save(prompt, ids, by_layer=by_layer)
        for enqueue in (save, lambda: rig.load(prompt, others, by_layer=by_layer)()):
            before = gpu.calls
            enqueue()
            assert gpu.calls - before == calls
            rig.mover.drain()


def test_what_enqueueing_takes_is_measured_anywhere(monkeypatch):
    monkeypatch.setattr(bench, "_quick", tiny)
    rows = list(bench.measure(only="enqueue", quick=True))
    assert [row.path for row in rows] == list(bench.STUB_PATHS)
    assert all(row.ours > 0 for row in rows)


def test_enqueueing_takes_few_calls_of_python(tmp_path):
    """Calls are the same on every machine; `lmtier bench --only enqueue` has their time."""
    for what, rig in stub.rigs(bench._full(tmp_path, 1)):
        calls: dict[tuple[str, bool], int] = {}
        for by_layer in (False, True) * 2:  # the second time all that is made once is there
            prompt, (ids, others) = rig.prompt(), rig.ids(2)
            calls["save", by_layer] = _calls_of_python(rig.save(prompt, ids, by_layer=by_layer))
            rig.mover.drain()
            calls["load", by_layer] = _calls_of_python(rig.load(prompt, others, by_layer=by_layer))
            rig.mover.drain()
        for way in ("save", "load"):
            whole = calls[way, False]
            # Blocks whose layers are together cost no call each: their copies are one array.
            assert whole <= 400 + (5 * len(ids) if "apart" in what else 0), (what, way)
            assert calls[way, True] <= whole + 700, (what, way)


def _calls_of_python(work: Callable[[], object]) -> int:
    calls = 0

    def see(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_without_a_gpu_the_command_says_what_is_missing(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert main(["bench", "--gpu", "--quick"]) == 2
    assert "--gpu needs a CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_the_days_script_can_be_rehearsed(tmp_path):
    """The stages `tests` and `toy` run the tests beside this one, and `test_toy_engine`."""
    script = [*("bash", "bench/gpu_day.sh", "--simulated"), "probe", "bench"]
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    subprocess.run(script, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=200)
    assert json.loads((tmp_path / "probe.json").read_text())["saves and loads"][0]["load: GB/s"] > 0
    assert "a simulated GPU" in (tmp_path / "bench.txt").read_text()
    assert len(json.loads((tmp_path / "bench.json").read_text())) == len(bench.GPU_PATHS)
    wrong = subprocess.run(
        [*script[:3], "sanitize"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert "no stage sanitize" in wrong.stderr


def test_a_stage_for_which_the_day_has_no_time_is_left_out(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable, "LIMIT": "0"}
    done = subprocess.run(
        ["bash", "bench/gpu_day.sh", "bench"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "bench: left out, the 0 s of LIMIT are over" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure for minutes")
def test_the_days_script_needs_no_installation(tmp_path):
    """Only what PYTHONPATH says, beside this checkout."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o700)
    packages = str(Path(pytest.__file__).parents[1])
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": str(bare), "PYTHONPATH": packages}
    subprocess.run(["bash", "bench/gpu_day.sh", "bench"], cwd=ROOT, env=environment, check=False, timeout=100)
    assert "--gpu needs a CUDA device" in (tmp_path / "bench.txt").read_text()
