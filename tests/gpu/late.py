"""Streams of a real GPU that fall behind: without its edges, what is enqueued there would come too late."""

from __future__ import annotations

import random
from typing import Any

import torch

from lmtier.copy.cuda.device import CudaDevice, CudaStream
from lmtier.copy.cuda.kernels import Launch
from lmtier.copy.cuda.streams import Copies, Rows

DELAYS = (10_000, 300_000, 30_000_000)
"""In cycles: about 5 µs, less than a launch takes Python; to 15 ms, more than all of a step does."""


class Late(CudaStream):
    """Sleeps before half of what it is given."""

    def __init__(self, device: CudaDevice, stream: Any, chance: random.Random) -> None:
        super().__init__(device, stream)
        self._chance = chance

    def _sleep(self) -> None:
        if self._chance.random() < 0.5:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(self._chance.choice(DELAYS))

    def launch(self, launch: Launch) -> None:
        self._sleep()
        super().launch(launch)

    def copy(self, copies: Copies) -> None:
        self._sleep()
        super().copy(copies)

    def copy_rows(self, rows: Rows) -> None:
        self._sleep()
        super().copy_rows(rows)
