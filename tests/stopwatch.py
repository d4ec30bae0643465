"""Seconds that are the fault of who is measured: while others have the cores, they do not count."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class Stopwatch:
    """Runs while this process and those of `pids` could run, or wait for something else than a core."""

    def __init__(self, *pids: int) -> None:
        self._pids = os.getpid(), *pids
        self._began, self._queued = time.monotonic(), self._without_a_core()

    def seconds(self) -> float:
        queued = self._without_a_core() - self._queued
        return max(0.0, time.monotonic() - self._began - queued)

    def _without_a_core(self) -> float:
        """For how long threads of these processes were ready to run while others ran."""
        waited = 0
        for pid in self._pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):  # it has ended
                    waited += int((task / "schedstat").read_text().split()[1])
        return waited / 1e9
