"""The private server of an engine: the first process of the engine starts it, and the others find it.

It ends some seconds after the engine's last connection, so it always ends with the engine. It has no parent
in the engine: when vLLM stops it kills all descendants, and chunks may still wait for the disk then. A lock
file next to the socket decides which process starts it. Its log is there too; errors quote it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from lmtier.client.client import Client
from lmtier.config import TOKEN_VARIABLE
from lmtier.errors import ConfigError, TierError
from lmtier.format.layout import Shard
from lmtier.wire.resp import command
from lmtier_integrations.vllm.settings import Settings, log

_PATIENCE = 60.0  # seconds until a private server must answer
_LINGER = 5.0  # seconds without an engine until it ends; the next start needs its disk
_GRACE = 10.0  # seconds that it then has to write what waits for the disk
_HELD = _LINGER + _GRACE + 5.0  # seconds after which the server of an earlier engine holds nothing any more
_AGAIN = 5.0  # seconds until it is restarted again; twice as many each time, while it keeps dying
_AGAIN_AT_LAST = 300.0  # seconds, at most
_PROBE = 0.2  # seconds for a server to show that it is alive
_OLD = 24 * 3600.0  # seconds until the log of an ended engine is deleted

# A Python process that forks and ends at once, so that the server has no parent in the engine. A worker may
# be bound to the computing cores, but the server must not be.
_ORPHAN = """
import os, sys
if os.fork():
    os._exit(0)
try:
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
except OSError:
    pass
os.execv(sys.argv[1], sys.argv[1:])
"""


class Launcher:
    """How the processes of one engine reach their server."""

    def __init__(self, settings: Settings, engine: str) -> None:
        self.settings = settings
        # vLLM draws its id at random before it starts a process, and gives it to all of them. So the id is
        # what they share before any of them is connected.
        self.secret = hashlib.sha256(f"lmtier session {engine}".encode()).hexdigest()
        self.is_private = not settings.server
        self._variables = self._variables_of_server() if self.is_private else {}
        # Data-parallel ranks have engines of their own, but one server on a host. An engine that comes back
        # with other settings gets another one.
        asked = re.sub(r"_dp\d+$", "", engine) + json.dumps(self._variables)
        base = hashlib.sha256(asked.encode()).hexdigest()[:16]
        self.path = _folder() / f"{base}.sock" if self.is_private else Path(settings.server)
        self._tried, self._pause = 0.0, _AGAIN

    def connect(self, name: str, shard: Shard | None = None) -> Client:
        """A client of the server. A private server is started if it does not run. Raises TierError."""
        if self.is_private:
            self._start()
        token = os.environ.get(TOKEN_VARIABLE)
        address = str(self.path).removeprefix("unix:/")
        return Client(address, engine=self.secret, shard=shard, name=name, token=token, waits=False)

    def revive(self) -> None:
        """Restart the private server if it has died. Does not wait until it answers."""
        now = time.monotonic()
        if not self.is_private or now - self._tried < self._pause:
            return
        # More and more rarely while it keeps dying. Without an init process, as in many containers, each one
        # stays in the table of processes.
        self._pause = min(2 * self._pause, _AGAIN_AT_LAST) if now - self._tried < 2 * self._pause else _AGAIN
        self._tried = now
        with suppress(BlockingIOError), self._lock(wait=False):
            if not self._answers():
                log.warning(
                    "lmtier: the private server has died and is started again; its log: %s", self._log
                )
                try:
                    self._spawn().close()
                except (OSError, subprocess.SubprocessError) as error:
                    log.warning("lmtier: the private server cannot be started: %s", error)

    @property
    def _log(self) -> Path:
        return self.path.with_suffix(".log")

    def _start(self) -> None:
        until = time.monotonic() + _PATIENCE
        with self._lock(until=until):
            if self._answers():
                return
            _sweep(self.path.parent)
            is_told = False
            while not self._comes_up(until):
                if time.monotonic() > until - _PATIENCE + _HELD:
                    raise TierError(f"lmtier's private server does not start. {self._last_words()}")
                if not is_told:
                    log.warning("lmtier: the private server does not start yet. %s", self._last_words())
                is_told = True
                time.sleep(0.5)  # the server of an earlier engine may still hold the directory of a tier

    def _comes_up(self, until: float) -> bool:
        """Start a server. False: it has ended before it answered."""
        try:
            server = self._spawn()
        except (OSError, subprocess.SubprocessError) as error:
            raise TierError(f"lmtier's private server cannot be started: {error}") from error
        with server:
            while not self._answers():
                if server.read(1) is not None:
                    return False
                if time.monotonic() > until:
                    raise TierError(
                        f"lmtier's private server does not answer within {_PATIENCE:.0f} s. "
                        f"{self._last_words()}"
                    )
                time.sleep(0.01)  # another process starts it
        return True

    def _variables_of_server(self) -> dict[str, str]:
        config = self.settings.config
        return {
            "LMTIER_TIERS": " ".join(spec.url for spec in config.stores),
            "LMTIER_CHUNK_TOKENS": str(config.chunk_tokens),
            "LMTIER_LOAD_DEADLINE": str(config.load_deadline),
            "LMTIER_WORTH": config.worth,
            "LMTIER_VERIFY": config.verify,
            "LMTIER_SERVE_LISTEN": "",
            "LMTIER_SERVE_HTTP": self.settings.http,
            "LMTIER_SERVE_LINGER": str(_LINGER),
            "LMTIER_SERVE_GRACE": str(_GRACE),
        }

    def _spawn(self) -> FileIO:
        """Start a server. What is returned is at its end as soon as the server has ended."""
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        ends = FileIO(reads)
        with FileIO(writes, "w"), open(self._log, "ab", opener=_for_this_user) as log_file:
            subprocess.run(
                [sys.executable, "-P", "-S", "-c", _ORPHAN, sys.executable, "-P", "-m", "lmtier", "serve"],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={**os.environ, **self._variables, "LMTIER_SERVE_UNIX": str(self.path)},
                cwd="/",
                pass_fds=[writes],
                # Not a separate session: waiting workers of vLLM spin on sched_yield, which yields only to
                # their own session (autogroup). A separate group is enough to keep Ctrl-C away.
                process_group=0,
                check=True,
            )
        return ends

    def _answers(self) -> bool:
        """Whether it answers. To listen is not enough: opening its tiers comes later, and may fail."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE)
            try:
                probe.connect(str(self.path))
                probe.sendall(command("PING"))
                return bool(probe.recv(64))  # any answer counts, also a request for a token
            except OSError:
                return False

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()[-12:]
        except OSError:
            lines = []
        return f"The end of its log, {self._log}:\n" + "\n".join(lines)

    @contextmanager
    def _lock(self, *, wait: bool = True, until: float = 0.0) -> Iterator[None]:
        descriptor = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not wait:
                        raise
                    if time.monotonic() > until:
                        raise TierError(
                            f"another process holds {self.path.with_suffix('.lock')} and does not end"
                        ) from None
                    time.sleep(0.01)  # a wait in the kernel has no deadline
            yield
        finally:
            os.close(descriptor)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _folder() -> Path:
    """The folder of sockets that other users may not open."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "lmtier" if os.path.isdir(runtime) else Path(f"/tmp/lmtier-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} must be a directory that only you can enter: remove it, or chmod 700")
    return folder


def _sweep(folder: Path) -> None:
    """Delete the logs of engines that ended long ago."""
    for old in folder.glob("*.log"):
        with suppress(OSError):
            if not old.with_suffix(".sock").exists() and time.time() - old.stat().st_mtime > _OLD:
                old.unlink()
                old.with_suffix(".lock").unlink(missing_ok=True)
