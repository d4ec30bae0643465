"""The server in a process of its own, and a client that says exactly what it is told."""

from __future__ import annotations

import hashlib
import http.client
import json
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmtier.wire.reply_reader import ReplyReader
from lmtier.wire.resp import INCOMPLETE, Error, encode_command
from tests.server.forked import Process

PATIENCE = 20.0
MIB = 1 << 20


def secret(name: str) -> str:
    """What the processes of this engine share."""
    return hashlib.sha256(name.encode()).hexdigest()


def speak(sock: socket.socket, path: str, arguments: Any = None, token: str = "") -> tuple[int, Any]:
    """The status and the answer to a call over HTTP, with these arguments in a body if there are any."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = sock
    headers = {"X-Lmtier": "1", **({"Authorization": f"Bearer {token}"} if token else {})}
    if arguments is None:
        connection.request("GET", path, headers=headers)
    else:
        headers["Content-Type"] = "application/json"
        connection.request("POST", path, json.dumps(arguments), headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


class Served:
    """A server on a port of its own choice, ready to answer; its log is `log`."""

    def __init__(
        self, folder: Path, *tiers: str, config: Any = None, token: str = "", **serving: object
    ) -> None:
        self.log = folder / "log"
        self._token = token
        if token:
            (folder / "token").write_text(token)
            (folder / "token").chmod(0o600)
            serving.setdefault("token_file", str(folder / "token"))
        # Patient: on a busy machine a disk may take seconds.
        patient = {"tiers": tiers or ("cpu://?capacity=64MiB",), "prefault": False, "load_deadline": 15.0}
        self._config = {**patient, **(config or {})}
        self._serving = {"listen": "127.0.0.1:0", "http": "", **serving}
        self.start()

    def start(self) -> None:
        self.process = Process((self._config, self._serving), self.log)
        try:
            self.where = self.process.where(PATIENCE)
            assert self.where, f"the server did not start:\n{self.log.read_text()}"
            until(lambda: not self.report()["why_not_ready"])
        except BaseException:
            self.kill()
            raise

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.where["redis"].rpartition(":")
        return host, int(port)

    def connect(self, timeout: float = PATIENCE) -> Wire:
        return Wire(self.address, timeout)

    def ask(self, *args: str | bytes | int) -> Any:
        with self.connect() as wire:
            if self._token:
                wire.expect("OK", "AUTH", self._token)
            return wire.ask(*args)

    def asks(self, path: str, arguments: Any = None, token: str | None = None) -> tuple[int, Any]:
        """The status and the answer to a call, on the port of Redis clients."""
        with self.connect() as wire:
            return speak(wire.socket, path, arguments, self._token if token is None else token)

    def call(self, path: str, arguments: Any = None) -> Any:
        """The answer to a call, which is no error."""
        status, answer = self.asks(path, arguments)
        assert status == 200, answer
        return answer

    def report(self) -> Any:
        return self.call("/api/stats")

    def held(self) -> tuple[int, int, int]:
        """Bytes that are leased or being received, bytes in the slab, and connections but for this one."""
        report = self.report()
        return report["leased_bytes"], report["tiers"][0]["used"], len(report["clients"]) - 1

    def check(self) -> None:
        """Nothing is held for anybody, and every invariant of the cache is true."""
        until(lambda: self.held()[0] == 0 and self.held()[2] == 0)
        self.call("/api/check", {})
        assert self.process.poll() is None

    def rss(self) -> int:
        """Bytes of its own: without those of the slab, which is taken once and stays."""
        rollup = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Rss:")) << 10

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def stop(self, seconds: float = PATIENCE) -> int:
        """As systemd stops it; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextmanager
def served(folder: Path, *tiers: str, **settings: Any) -> Iterator[Served]:
    """Checked before it is killed in the end, if it lives: whatever was done to it, it must be sound."""
    server = Served(folder, *tiers, **settings)
    try:
        yield server
        if server.process.poll() is None:
            server.check()
    finally:
        if server.process.poll() is None:
            server.kill()


class Wire:
    """A socket, and the replies that come on it."""

    def __init__(self, address: tuple[str, int] | str, timeout: float = PATIENCE) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.socket = socket.socket(family)
        self.socket.settimeout(timeout)
        try:
            self.socket.connect(address)
        except BaseException:
            self.socket.close()
            raise
        if family == socket.AF_INET:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = ReplyReader(limit=1 << 30)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self) -> Any:
        """The next reply; EOFError when the server has closed."""
        while (value := self._replies.next()) is INCOMPLETE:
            try:
                data = self.socket.recv(MIB)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            self._replies.feed(data)
        return value

    def ask(self, *args: str | bytes | int) -> Any:
        self.send(encode_command(*args))
        return self.reply()

    def expect(self, wanted: object, *args: str | bytes | int) -> None:
        answer = self.ask(*args)
        assert (answer, isinstance(answer, Error)) == (wanted, isinstance(wanted, Error))

    def granted(self, *args: str | bytes | int) -> Any:
        """The answer, which is no error."""
        answer = self.ask(*args)
        assert not isinstance(answer, Error), answer
        return answer

    def ends(self) -> bool:
        """Whether the server closes this connection, after whatever else it says, before the timeout."""
        try:
            while self.socket.recv(MIB):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True

    def reset(self) -> None:
        """End as a machine that is switched off ends: with a RST, not a FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self.socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Poll for what another process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.005)
