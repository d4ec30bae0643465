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
        self._began, self._queued, self._stolen = time.monotonic(), self._without_a_core(), stolen()

    def seconds(self) -> float:
        queued = max(0.0, self._without_a_core() - self._queued)  # threads that have ended count no more
        of_one_core = max(now - before for now, before in zip(stolen(), self._stolen, strict=True))
        return max(0.0, time.monotonic() - self._began - queued - of_one_core)

    def _without_a_core(self) -> float:
        """For how long threads of these processes were ready to run while others ran."""
        waited = 0
        for pid in self._pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):  # it has ended
                    waited += int((task / "schedstat").read_text().split()[1])
        return waited / 1e9


def stolen() -> list[float]:
    """For how many seconds each core was taken by other virtual machines of the host."""
    rows = Path("/proc/stat").read_text().splitlines()[1:]
    cores = [row.split() for row in rows if row.startswith("cpu")]
    return [int(core[8]) / os.sysconf("SC_CLK_TCK") for core in cores]
