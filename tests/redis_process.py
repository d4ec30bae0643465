"""Real redis servers in processes of their own, and a proxy that spoils what goes through it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lmtier.format.layout import Name
from lmtier.format.objects import PAGE
from tests.server.process import PATIENCE, Wire, until
from tests.stopping import stop
from tests.stopwatch import Stopwatch

CARD = struct.Struct("<8s8sQQ")
"""The first bytes under an object's name: magic, nonce, payload bytes, bytes in a part. Written down twice
on purpose: what is stored must not change by mistake."""


PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to connections: else one could take a port before its server has it."""


def free_port() -> int:
    """A port that nobody uses. No test of this machine gets it again before thousands of others."""
    with (Path(tempfile.gettempdir()) / f"lmtier-ports-of-tests-{os.getuid()}").open("a+") as book:
        fcntl.flock(book, fcntl.LOCK_EX)
        book.seek(0)
        last = int(book.read() or PORTS[0])
        for step in range(1, len(PORTS)):
            port = PORTS[(last - PORTS[0] + step) % len(PORTS)]
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("", port))
                book.truncate(0)
                book.write(str(port))
                return port
    raise RuntimeError(f"no port of {PORTS} is free")


class RedisServer:
    """One process, on a port of its own that it keeps over restarts."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int = 0,
        password: str = "",
        config: Path | None = None,
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
    ) -> None:
        """`inside`: the words before a command that run it on another host."""
        program = shutil.which("redis-server")
        if program is None:
            pytest.fail("this test needs a real redis-server: apt-get install redis-server")
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.address = (host, self.port)
        self._password = password
        given = [
            "--port",
            str(self.port),
            "--bind",
            host,
            "--protected-mode",
            "no",
            "--save",
            "",
            "--dir",
            str(folder),
        ]
        given += ["--repl-diskless-sync-delay", "0"]
        given = [str(config), *given[:2], "--sentinel"] if config else given
        self._command = [
            *inside,
            program,
            *given,
            *(["--requirepass", password] if password else []),
            *options,
        ]
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        try:
            until(self.answers)
        except BaseException:
            self.kill()
            raise

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            return bool(self.ask("PING") == "PONG")
        except (OSError, EOFError):
            return False

    def ask(self, *args: str | bytes | int) -> Any:
        with Wire(self.address) as wire:
            if self._password:
                wire.ask("AUTH", self._password)
            return wire.ask(*args)

    def info(self, section: str) -> dict[str, str]:
        lines = self.ask("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def clients(self) -> int:
        """Connections but for this one."""
        return int(self.info("clients")["connected_clients"]) - 1

    def names(self) -> list[bytes]:
        """Of everything that is stored."""
        return list(self.ask("KEYS", "*"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def freeze(self) -> None:
        stop(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running(folder: Path, *options: str, port: int = 0, password: str = "") -> Iterator[RedisServer]:
    server = RedisServer(folder, *options, port=port, password=password)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


class RedisCluster:
    """Nodes on one host that know each other and share the slots."""

    def __init__(
        self, folder: Path, nodes: int = 3, host: str = "127.0.0.1", inside: Sequence[str] = ()
    ) -> None:
        self.nodes: list[RedisServer] = []
        try:
            # By default a node's bus is on its port + 10000, which the kernel may have given to a connection.
            buses = [free_port() for _ in range(nodes)]
            for number, bus in enumerate(buses):
                options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
                options += ["--cluster-port", str(bus)]
                self.nodes.append(RedisServer(folder / str(number), *options, host=host, inside=inside))
            for number, node in enumerate(self.nodes):
                first, end = (16384 * i // nodes for i in (number, number + 1))
                assert node.ask("CLUSTER", "ADDSLOTSRANGE", first, end - 1) == "OK"
                assert node.ask("CLUSTER", "MEET", host, self.nodes[0].port, buses[0]) == "OK"
            until(self._is_whole)
        except BaseException:
            self.kill()
            raise

    def _is_whole(self) -> bool:
        return all(
            b"cluster_state:ok" in node.ask("CLUSTER", "INFO")
            and len(node.ask("CLUSTER", "SLOTS")) == len(self.nodes)
            for node in self.nodes
        )

    def start(self) -> None:
        """Again, on the same ports. They remember each other."""
        for node in self.nodes:
            node.start()
        until(self._is_whole)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


@contextmanager
def cluster(folder: Path, nodes: int = 3) -> Iterator[list[RedisServer]]:
    servers = RedisCluster(folder, nodes)
    try:
        yield servers.nodes
    finally:
        servers.kill()


@contextmanager
def sentinel(folder: Path, master: RedisServer, down_after: int = 500) -> Iterator[RedisServer]:
    """One that watches `master` under the name kv, and is enough to replace it."""
    folder.mkdir(parents=True)
    file = folder / "sentinel.conf"
    file.write_text(
        f"sentinel monitor kv 127.0.0.1 {master.port} 1\n"
        f"sentinel down-after-milliseconds kv {down_after}\n"
        f"sentinel failover-timeout kv 5000\n"
    )
    watcher = RedisServer(folder, config=file)
    try:
        yield watcher
    finally:
        watcher.kill()


# ---- the back door: what is stored, without the tier


def head_key(name: Name, namespace: str = "default") -> bytes:
    return f"lmtier:{namespace}:{{{name}}}".encode()


def stored(ask: Callable[..., Any], keys: list[bytes]) -> dict[Name, bytes]:
    """Every object among `keys`: header page and payload."""
    found = {}
    for key in keys:
        prefix, _, tail = key.decode().partition("{")
        stem, _, part = tail.partition("}")
        name = Name.parse(stem)
        if not prefix.startswith("lmtier:") or name is None or part:
            continue
        data = ask("GET", key)
        magic, nonce, nbytes, size = CARD.unpack_from(data)
        assert magic == b"lmtier-1"
        data = data[CARD.size :]
        for number in range(-(-nbytes // size) if size else 0):
            data += ask("GET", b"%s:%s:%d" % (key, nonce.hex().encode(), number))
        found[name] = data
    return found


def planted(ask: Callable[..., Any], name: Name, data: bytes, part: int = 0) -> None:
    """`data` as if a writer had stored it: under one name, or in parts of so many bytes."""
    nonce, key = b"plant" + bytes(3), head_key(name)
    payload = data[PAGE:]
    for number, at in enumerate(range(0, len(payload), part) if part else ()):
        assert ask("SET", b"%s:%s:%d" % (key, nonce.hex().encode(), number), payload[at : at + part]) == "OK"
    card = CARD.pack(b"lmtier-1", nonce, -(-len(payload) // PAGE) * PAGE, part)
    assert ask("SET", key, card + (data[:PAGE] if part else data)) == "OK"


# ---- a proxy


class Proxy:
    """Between a client and a server: counts, cuts, stalls, drips, slows down. Down is towards the client."""

    def __init__(self, server: tuple[str, int], port: int = 0) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._budget: dict[str, int] = {}
        self._cutting = 0
        """Connections that have had their bytes, and are about to be reset."""
        self.rate = float("inf")
        """Bytes a second down, over all connections; 0: none."""
        self._free = 0.0
        self.drip = 0.0
        """Seconds between two bytes down; 0: they flow."""
        self.moved = {"up": 0, "down": 0}
        self.turns = 0
        """How often something went up after something had come down."""
        self._last = "down"
        self.most = 0
        """The most connections at a time."""
        self._start(self._accept)

    def cut(self, **after: int) -> None:
        """Reset each connection after so many more bytes, up= or down=. Nothing: no more.

        What was to be reset before is reset when it returns. Else a client could still take it for sound.
        """
        with self._lock:
            self._budget = dict(after)
        while self._cutting and not self._gone.wait(0.001):
            pass

    def drop(self) -> None:
        """Reset every connection now."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for sock in sockets:
            _reset(sock)

    def lead_to(self, server: tuple[str, int]) -> None:
        """New connections only."""
        self._server = server

    def forget(self) -> None:
        self.turns, self._last = 0, "down"
        self.moved = {"up": 0, "down": 0}

    def close(self) -> None:
        self._gone.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        for thread in self._threads:
            thread.join(PATIENCE)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._gone.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server)
            except OSError:
                _reset(client)
                continue
            for end in (client, server):  # or what it splits waits 40 ms for a delayed acknowledgement
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
                self.most = max(self.most, len(self._sockets) // 2)
            self._start(self._pump, "up", client, server)
            self._start(self._pump, "down", server, client)

    def _pump(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        is_cut = False
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    room = self._budget.get(way)
                    if room is not None:
                        self._budget[way] = max(0, room - len(data))
                        is_cut = len(data) >= room
                        self._cutting += is_cut
                    self.turns += way == "up" and self._last == "down"
                    self._last = way
                    self.moved[way] += len(data)
                passed = data if room is None else data[:room]
                if way == "down" and self.drip:
                    for at in range(len(passed)):
                        sink.sendall(passed[at : at + 1])
                        if self._gone.wait(self.drip):
                            return
                else:
                    if way == "down":
                        self._pace(len(passed))
                    sink.sendall(passed)
                if is_cut:
                    break
        with self._lock:
            self._sockets -= {source, sink}
        _reset(source)
        _reset(sink)
        with self._lock:
            self._cutting -= is_cut

    def _pace(self, nbytes: int) -> None:
        while not self.rate:
            if self._gone.wait(0.01):
                return
        with self._lock:
            self._free = max(self._free, time.monotonic()) + nbytes / self.rate
            left = self._free - time.monotonic()
        if left > 0:
            self._gone.wait(left)


def _reset(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` returns, if it took no longer."""
    watch = Stopwatch()
    answer = work()
    took = watch.seconds()
    assert took <= seconds, f"took {took:.3f} s, not {seconds}"
    return answer
