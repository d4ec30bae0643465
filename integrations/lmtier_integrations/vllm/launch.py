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
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from lmtier.client.client import Client
from lmtier.config import TOKEN_VARIABLE, TierSpec
from lmtier.errors import ConfigError, TierError, size_text
from lmtier.format.layout import Shard
from lmtier.threads import start_thread
from lmtier.wire.resp import encode_command
from lmtier_integrations.vllm.settings import Settings, log

_PATIENCE = 60.0  # seconds until a private server must answer
_LINGER = 5.0  # seconds without an engine until it ends; the next start needs its disk
_GRACE = 10.0  # seconds that it then has to write what waits for the disk
_HELD = _LINGER + _GRACE + 5.0  # seconds after which the server of an earlier engine holds nothing any more
_AGAIN = 5.0  # seconds until it is restarted again; twice as many each time, while it keeps dying
_AGAIN_AT_LAST = 300.0  # seconds, at most
_PROBE = 0.2  # seconds for a server to show that it is alive
_OLD = 24 * 3600.0  # seconds until the log of an ended engine is deleted

_LINES = 12  # of its log, to quote
_WARNING = re.compile(r"\S+ (WARNING|ERROR) (lmtier: )?(?P<text>.*)")

# A Python process that is the parent of the server while it starts. It ends with the server's exit code, or
# with 0 when the engine writes to it: then the server has no parent in the engine. A worker may be bound to
# the computing cores, but the server must not be.
_NURSE = """
import os, select, sys
ended, alive = os.pipe()
server = os.fork()
if server:
    os.close(alive)
    if ended in select.select([0, ended], [], [])[0]:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) & 255)
    os._exit(0)
os.set_inheritable(alive, True)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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
        self.is_first = not re.search(r"_dp[1-9]\d*$", engine)
        """Whether it is the first data-parallel engine of this host, which says what is true of all."""
        self._variables = self._variables_of_server() if self.is_private else {}
        # Data-parallel ranks have engines of their own, but one server on a host. An engine that comes back
        # with other settings gets another one.
        asked = re.sub(r"_dp\d+$", "", engine) + json.dumps(self._variables)
        base = hashlib.sha256(asked.encode()).hexdigest()[:16]
        self.path = _folder() / f"{base}.sock" if self.is_private else Path(settings.server)
        self._tried, self._pause = 0.0, _AGAIN
        self._connecting: Thread | None = None
        self._first: Client | Exception | None = None
        """The client that `begin` made, until it is given out, or the error."""

    def begin(self, name: str) -> None:
        """Connect to a private server while the engine does something else. `begun` gives the client.

        The connection stays: other engines of the host may keep this one waiting for longer than the server
        waits for an engine.
        """
        if self.is_private:
            self._connecting = start_thread("lmtier-start", lambda: self._try_to_connect(name))

    def begun(self, name: str) -> Client:
        """The client that `begin` made, or a new one. Raises TierError."""
        first = self._take_first()
        if isinstance(first, Exception):
            raise first
        return first or self.connect(name)

    def close(self) -> None:
        """Leave the server, if `begun` was not called."""
        first = self._take_first()
        if isinstance(first, Client):
            first.close()

    def connect(self, name: str, shard: Shard | None = None) -> Client:
        """A client of the server. A private server is started if it does not run. Raises TierError."""
        if self.is_private:
            self._start()
        token = os.environ.get(TOKEN_VARIABLE)
        address = str(self.path).removeprefix("unix:/")
        return Client(address, engine=self.secret, shard=shard, name=name, token=token, waits=False)

    def described(self, client: Client, gpu: TierSpec | None) -> str:
        """The tiers with their sizes, and the server: its process, its log and its page, or its address."""
        tiers = [(each["url"], each["capacity"]) for each in client.report().get("tiers", ())]
        if gpu is not None:
            tiers.insert(0, (gpu.url, gpu.capacity))
        tier_path = " → ".join(_tier(*each) for each in tiers)
        if not self.is_private:
            return f"{tier_path}, server {self.path}"
        description = f"{tier_path}, private server pid {self._process()}, log {self._log}"
        host, _, port = self.settings.http.rpartition(":")
        if port.isdigit() and int(port):
            page = host if host not in ("", "0.0.0.0", "[::]") else "127.0.0.1"
            description += f", page http://{page}:{port}/"
        return description

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
                    _leave(self._spawn())
                except (OSError, subprocess.SubprocessError) as error:
                    log.warning("lmtier: the private server cannot be started: %s", error)

    @property
    def _log(self) -> Path:
        return self.path.with_suffix(".log")

    def _try_to_connect(self, name: str) -> None:
        try:
            self._first = self.connect(name)
        except Exception as error:  # noqa: BLE001 - the thread's edge; `begun` raises it
            self._first = error

    def _take_first(self) -> Client | Exception | None:
        if self._connecting is not None:
            self._connecting.join()
            self._connecting = None
        first, self._first = self._first, None
        return first

    def _start(self) -> None:
        """Start the server if it does not run. Raises TierError.

        It is tried again only while another process has what it needs, as that of an earlier engine may.
        """
        deadline = time.monotonic() + _PATIENCE
        with self._lock(until=deadline):
            if self._answers():
                return
            _sweep(self.path.parent)
            has_warned = False
            while True:
                log_size = self._log.stat().st_size if self._log.exists() else 0
                code = self._comes_up(deadline)
                if code is None:
                    self._repeat_warnings(log_size)
                    return
                reason = self._last_words(log_size, code)
                if code != os.EX_TEMPFAIL or time.monotonic() > deadline - _PATIENCE + _HELD:
                    raise TierError(f"lmtier's private server does not start: {reason}")
                if not has_warned:
                    log.warning("lmtier: the private server does not start yet: %s", reason)
                has_warned = True
                time.sleep(0.5)

    def _comes_up(self, until: float) -> int | None:
        """Start a server. None: it answers; else the code with which it has ended."""
        try:
            server = self._spawn()
        except (OSError, subprocess.SubprocessError) as error:
            raise TierError(f"lmtier's private server cannot be started: {error}") from error
        try:
            while not self._answers():
                if (code := server.poll()) is not None:
                    return code
                if time.monotonic() > until:
                    raise TierError(
                        f"lmtier's private server does not answer within {_PATIENCE:.0f} s; "
                        f"its log: {self._log}"
                    )
                time.sleep(0.01)  # another process starts it
        finally:
            _leave(server)
        return None

    def _variables_of_server(self) -> dict[str, str]:
        config = self.settings.config
        return {
            "LMTIER_TIERS": " ".join(spec.url for spec in config.cache_tiers),
            "LMTIER_CHUNK_TOKENS": str(config.chunk_tokens),
            "LMTIER_LOAD_DEADLINE": str(config.load_deadline),
            "LMTIER_WORTH": config.worth,
            "LMTIER_VERIFY": config.verify,
            "LMTIER_SERVE_LISTEN": "",
            "LMTIER_SERVE_HTTP": self.settings.http,
            "LMTIER_SERVE_LINGER": str(_LINGER),
            "LMTIER_SERVE_GRACE": str(_GRACE),
            "LMTIER_SERVE_LOG_FORMAT": "text",
        }

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start a server. `_leave` must follow."""
        with open(self._log, "ab", opener=_for_this_user) as log_file:
            return subprocess.Popen(
                [sys.executable, "-P", "-S", "-c", _NURSE, sys.executable, "-P", "-m", "lmtier", "serve"],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                env={**os.environ, **self._variables, "LMTIER_SERVE_UNIX": str(self.path)},
                cwd="/",
                # Not a separate session: waiting workers of vLLM spin on sched_yield, which yields only to
                # their own session (autogroup). A separate group is enough to keep Ctrl-C away.
                process_group=0,
            )

    def _process(self) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.connect(str(self.path))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return int(struct.unpack("3i", credentials)[0])
        return 0

    def _answers(self) -> bool:
        """Whether it answers. To listen is not enough: opening its tiers comes later, and may fail."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE)
            try:
                probe.connect(str(self.path))
                probe.sendall(encode_command("PING"))
                return bool(probe.recv(64))  # any answer counts, also a request for a token
            except OSError:
                return False

    def _last_words(self, log_size: int, code: int) -> str:
        """Why the server has ended: the sentence with which it did, or the end of its log."""
        lines = self._lines(log_size)
        if code in (2, os.EX_TEMPFAIL) and lines:
            return f"{lines[-1].removeprefix('lmtier: ')} (its log: {self._log})"
        end = "\n".join(lines[-_LINES:])
        return f"it ended with code {code}. The end of its log, {self._log}:\n{end}"

    def _repeat_warnings(self, log_size: int) -> None:
        """Say in the engine's log what the new server has warned of."""
        for line in self._lines(log_size):
            if warning := _WARNING.match(line):
                log.warning("lmtier: the private server: %s", warning["text"])

    def _lines(self, log_size: int) -> list[str]:
        """The lines of its log beyond its first `log_size` bytes."""
        try:
            return self._log.read_bytes()[log_size:].decode(errors="replace").strip().splitlines()
        except OSError:
            return []

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


def _leave(server: subprocess.Popen[bytes]) -> None:
    """The server goes on by itself from here on, if it has not ended."""
    assert server.stdin is not None
    with suppress(BrokenPipeError), server.stdin as stdin:
        stdin.write(b"\n")
    server.wait()


def _tier(url: str, capacity: int | None) -> str:
    scheme, _, rest = url.partition("://")
    words = [scheme, rest.partition("?")[0], size_text(capacity) if capacity else ""]
    return " ".join(word for word in words if word)


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
