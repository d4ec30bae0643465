"""`lmtier bench --gpu`, every line of it, on a simulated GPU, which gives no figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lmtier import bench
from lmtier.cli import main
from tests.cuda_device import SimulatedDevice


class Simulated:
    """Fills memory with something, and computes nothing."""

    def __init__(self) -> None:
        self.device, self.name = SimulatedDevice(), "a simulated GPU"
        self.products = 0.0
        self.pinned: list[memoryview] = []

    def tensor(self, shape: Sequence[int]) -> Any:
        whole = torch.ones(*shape, dtype=torch.bfloat16)
        self.device.keep(whole.view(torch.int16).numpy())
        return whole

    def pin(self, memory: memoryview) -> Callable[[], None]:
        assert len(memory)
        self.pinned.append(memory)
        return self.unpin

    def unpin(self) -> None:
        assert not any(stream.is_ready for stream in self.device.streams)
        self.pinned.pop()

    def matmuls(self, milliseconds: float) -> None:
        self.products += milliseconds

    def synchronize(self) -> None:
        while any(stream.is_ready for stream in self.device.streams):
            self.device.one_deed()


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
    assert json.loads(json.dumps(bench.as_json(rows)))[0]["path"] == "gpu: to the slab, 32 MiB objects"


def test_without_a_gpu_the_command_says_what_is_missing(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert main(["bench", "--gpu", "--quick"]) == 2
    assert "--gpu needs a CUDA device" in capsys.readouterr().err


def tiny(directory: Any) -> bench.Scale:
    return bench.Scale(
        directory=directory,
        rounds=1,
        memory=8 << 20,
        large_layers=1,
        disk_rounds=1,
        disk_chunks=1,
        prompt_chunks=1,
        index_chunks=1,
    )
