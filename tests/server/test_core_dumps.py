"""A server that crashes leaves no core dump: what clients sent is nobody's else, whoever reads dumps."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tests.server.process import Wire
from tests.server.test_console import ANY, SMALL, Serve

SECRET = "a-prompt-to-look-for"


def crash(pid: int) -> bool:
    """Whether a process that may dump a core of any size does so when it crashes."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
    resource.prlimit(pid, resource.RLIMIT_CORE, (hard, hard))
    os.kill(pid, signal.SIGSEGV)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    return os.WCOREDUMP(status)


def test_a_crash_leaves_the_stacks_in_the_log_and_no_core(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdout=-1, stdin=-1)
    server = Serve(tmp_path / "log", *SMALL, *ANY, LMTIER_TOKEN=SECRET)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        if not crash(other.pid):  # then this machine lets nobody dump, and the rest shows less
            assert resource.prlimit(0, resource.RLIMIT_CORE)[1] == 0
        host, _, port = server.redis.rpartition(":")
        with Wire((host, int(port))) as wire:
            wire.expect("OK", "AUTH", SECRET)
            wire.expect("OK", "SET", "name", SECRET)
            wire.send(b"*3\r\n$3\r\nSET\r\n")  # it is also in the middle of a command
            assert not crash(server.process.pid)
        assert "Fatal Python error: Segmentation fault" in server.log
        assert SECRET not in server.log
    finally:
        other.communicate()
        server.end()
