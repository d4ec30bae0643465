"""Stops a process as SIGSTOP does, and waits until it stands still."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.server.process import until


def stop(pid: int) -> None:
    """The kernel hands the signal to one thread. On a busy machine others still serve until that one runs."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(_state(task) in "TZX" for task in Path(f"/proc/{pid}/task").iterdir()))


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
