"""A server in a child that was forked from a process that had imported all that a server needs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lmtier.config import Config, ServerConfig
from lmtier.server.serve import Server
from lmtier.tools.logs import write_log

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.server.forked", "lmtier_backends.disk"])


def _serve(settings: tuple[Any, Any], log: Path, environment: dict[str, str], told: Connection) -> None:
    """The child: a server that tells where it listens."""
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.simplefilter("error")
    config, serving = settings
    if "log_format" in serving:
        write_log(serving.get("log_level", "info"), serving["log_format"])
    server = Server(Config(**config), ServerConfig(**serving))
    server.obey_signals()
    with told:
        told.send(dict(server.addresses))
    server.run()


class Process:
    """The child, with the methods of `subprocess.Popen`. It saves nine tenths of the CPU of a start."""

    def __init__(self, settings: tuple[Any, Any], log: Path) -> None:
        self._told, child = _FORKS.Pipe(duplex=False)
        arguments = (settings, log, dict(os.environ), child)
        self._process = _FORKS.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        child.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def where(self, seconds: float) -> dict[str, str]:
        """The addresses of its listeners, by kind. Empty: it did not start."""
        found: dict[str, str] = {}
        with self._told, suppress(EOFError):
            if self._told.poll(seconds):
                found = self._told.recv()
        return found

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a server", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):  # it has ended, and its status is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)
