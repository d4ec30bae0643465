"""Seconds that are the fault of who is measured: while others have the cores, they do not count.

To read the tables of the kernel takes some hundred calls of the system, each of which waits for the GIL: .2 s
beside a thread that computes. So the seconds begin after the first reading and end before the last one.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class Stopwatch:
    """Runs while this process and those of `pids` could run, or wait for something else than a core."""

    def __init__(self, *pids: int) -> None:
        self._pids = os.getpid(), *pids
        self._queued, self._stolen = self._without_a_core(), stolen()
        self._began = time.monotonic()

    def seconds(self) -> float:
        passed = time.monotonic() - self._began
        queued = max(0.0, self._without_a_core() - self._queued)  # threads that have ended count no more
        of_one_core = max(now - before for now, before in zip(stolen(), self._stolen, strict=True))
        return max(0.0, passed - queued - of_one_core)

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
