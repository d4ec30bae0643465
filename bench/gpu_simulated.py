"""A GPU for rehearsals: copies and kernels run on this CPU, late and in any order. Its figures mean nothing.

PYTHONPATH=.:backends:integrations python3 bench/gpu_simulated.py    # what `lmtier bench --gpu` prints

With a FILE it also writes what `--save FILE` writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import lmtier_bench as bench
from lmtier.tools.terminal import say
from tests.cuda_device import SimulatedDevice


class Simulated:
    """Fills memory with something, and computes nothing."""

    def __init__(self) -> None:
        self.device, self.name = SimulatedDevice(is_recorded=False), "a simulated GPU"
        self.products = 0.0
        self.pinned: list[memoryview] = []

    def tensor(self, shape: Sequence[int]) -> Any:
        whole = torch.ones(*shape, dtype=torch.bfloat16)
        self.device.keep(whole.view(torch.int16).numpy())
        return whole

    def lock_pages(self, memory: memoryview) -> Callable[[], None]:
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


def tiny(directory: Path) -> bench.Scale:
    """The same code, on as few bytes as can be."""
    return bench.Scale(
        directory=directory,
        rounds=1,
        memory=8 << 20,
        large_layers=1,
        disk_rounds=1,
        disk_chunks=1,
        prompt_chunks=1,
        index_chunks=1,
        engine_prompts=1,
    )


def main(save: Path | None = None) -> int:
    bench._quick = tiny
    gpu = Simulated()
    say(bench.header(None, gpu))
    rows = list(bench.measure(quick=True, gpu=gpu, save=save))
    say("\n".join([bench.heading(), *map(bench.line, rows), bench.goals(rows)]))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main(*map(Path, sys.argv[1:])))
