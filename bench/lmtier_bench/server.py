"""The cache server beside a bare socket, and beside redis where that is installed; each in its process."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from lmtier.client.client import Client
from lmtier.copy.mover import Mover
from lmtier.copy.paging import PagedKV
from lmtier.errors import ConfigError
from lmtier.format.keys import Identity
from lmtier.wire.resp import encode_command
from lmtier_bench import Samples, Scale
from lmtier_bench.copies import CHUNK_TOKENS, Engine, faulted_memory, large_layout, paired, seconds
from lmtier_bench.lookups import TINY
from lmtier_bench.peer import ORDER, take

VALUE = 32 << 20
NAMES = 24  # 768 MiB of values, more than any processor's cache
LOOKUP_CHUNKS = 512
REPEATS = 9
PATIENCE = 60.0


def values(scale: Scale) -> Samples:
    """SET and GET of large values over TCP, one connection."""
    nbytes = VALUE if scale.large_layers == 32 else 1 << 20
    memory = faulted_memory(scale.memory).data
    with ExitStack() as stack:
        bare = BareSocket(
            stack.enter_context(process(*module("lmtier_bench.peer"), free_port())), memory, nbytes
        )
        ours = LeanClient(stack.enter_context(lmtier_process(2 * NAMES * nbytes)), memory, nbytes)
        rounds: list[tuple[str, LeanClient, Callable[[], object], Callable[[], object]]] = [
            ("32 MiB values over TCP", ours, bare.send, bare.receive)
        ]
        if shutil.which("redis-server"):
            redis = LeanClient(stack.enter_context(redis_process(scale.directory)), memory, nbytes)
            rounds.append(("32 MiB values, against redis", ours, redis.set, redis.get))
            for _ in range(NAMES):
                redis.set()
        for _ in range(NAMES):
            ours.set()
            bare.send()
        for what, remote, send, receive in rounds:
            for number in range(scale.rounds):
                yield paired(f"SET, {what}", nbytes, number, *_timed(remote.set, send))
            for number in range(scale.rounds):
                yield paired(f"GET, {what}", nbytes, number, *_timed(remote.get, receive))


def engines(scale: Scale) -> Samples:
    """What an engine on this host sends and waits for; its KV goes through shared memory."""
    layout = large_layout(scale.large_layers)
    engine = Engine(layout, faulted_memory(4 * layout.nbytes(layout.whole)))
    unix = str(scale.directory / "server.sock")
    with ExitStack() as stack:
        stack.enter_context(lmtier_process(8 * engine.nbytes + LOOKUP_CHUNKS * 4096, unix))
        peer = str(scale.directory / "peer.sock")
        sock = stack.enter_context(process(*module("lmtier_bench.peer"), peer))
        bare = BareSocket(sock, faulted_memory(1 << 20).data, LOOKUP_CHUNKS * 32)
        client = stack.enter_context(Client(unix))
        yield from _lookups(scale, client, bare)
        kv = PagedKV(layout, layout.whole, engine.tensors)
        mover = Mover(
            client, kv, Identity(model="bench", weights="bench"), spare_blocks=range(2 * layout.blocks)
        )
        for number in range(scale.rounds):
            before = client.traffic
            tokens = np.full(CHUNK_TOKENS + 1, number, np.int32)
            chain = mover.chain(tokens)
            with mover.save(chain, engine.block_ids(1)) as save:
                save.all()
            with mover.load(mover.match(chain), engine.block_ids(1)) as load:
                load.all()
            assert save.tokens == load.tokens == CHUNK_TOKENS, "the chunk was not stored, or not found"
            yield "bytes on the Unix socket to save and load a 32 MiB chunk", client.traffic - before, 0


def _lookups(scale: Scale, client: Client, bare: BareSocket) -> Samples:
    kv = PagedKV(TINY, TINY.whole, [np.zeros((4, 1, CHUNK_TOKENS, 4), np.uint16)])
    mover = Mover(client, kv, Identity(model="bench", weights="bench"), spare_blocks=range(4))
    chain = mover.chain(np.full(LOOKUP_CHUNKS * CHUNK_TOKENS, 7, np.int32))
    with mover.save(chain, [0] * LOOKUP_CHUNKS) as save:
        save.all()

    def find() -> float:
        began = perf_counter()
        match = client.match(chain.keys, mover.form)
        took = perf_counter() - began
        assert match.chunks == LOOKUP_CHUNKS, f"{match!r}"
        client.release(match)
        client.stats()  # answered when the release was done: the next lookup does not wait for it
        return took

    for _ in range(scale.rounds):
        ours = median(find() for _ in range(REPEATS)) * 1e3
        limit = median(seconds(bare.send) for _ in range(REPEATS)) * 1e3
        yield "look up 512 keys over a Unix socket", ours, limit


class BareSocket:
    """The client's end of a bare socket."""

    def __init__(self, sock: socket.socket, memory: memoryview, nbytes: int) -> None:
        self._sock = sock
        self._views = _rotation(memory, nbytes)
        self._nbytes = nbytes
        self._word = memoryview(bytearray(1))

    def send(self) -> None:
        self._sock.sendall(ORDER.pack(b"S", self._nbytes))
        self._sock.sendall(next(self._views))
        take(self._sock, self._word)

    def receive(self) -> None:
        self._sock.sendall(ORDER.pack(b"G", self._nbytes))
        take(self._sock, next(self._views))


class LeanClient:
    """A client as lean as the bare one, of a server that speaks RESP."""

    def __init__(self, sock: socket.socket, memory: memoryview, nbytes: int) -> None:
        self._sock = sock
        self._views = _rotation(memory, nbytes)
        self._nbytes = nbytes
        self._header = memoryview(bytearray(b"$%d\r\n" % nbytes))
        self._answer = memoryview(bytearray(len(self._header)))
        self._set, self._got = count(), count()

    def set(self) -> None:
        head = encode_command("SET", f"value {next(self._set) % NAMES}", "").removesuffix(b"$0\r\n\r\n")
        self._sock.sendall(head + bytes(self._header))
        self._sock.sendall(next(self._views))
        self._sock.sendall(b"\r\n")
        take(self._sock, self._answer[:5])
        assert bytes(self._answer[:5]) == b"+OK\r\n", bytes(self._answer)

    def get(self) -> None:
        self._sock.sendall(encode_command("GET", f"value {next(self._got) % NAMES}"))
        take(self._sock, self._answer)
        assert self._answer == self._header, bytes(self._answer)
        take(self._sock, next(self._views))
        take(self._sock, self._answer[:2])


def _timed(ours: Callable[[], object], limit: Callable[[], object]) -> Sequence[Callable[[], float]]:
    return partial(seconds, ours), partial(seconds, limit)


def _rotation(memory: memoryview, nbytes: int) -> Iterator[memoryview]:
    while True:
        for at in range(0, len(memory) - nbytes + 1, nbytes):
            yield memory[at : at + nbytes]


def module(name: str) -> tuple[str, ...]:
    return sys.executable, "-m", name


@contextmanager
def lmtier_process(capacity: int, unix: str = "", **settings: str) -> Iterator[socket.socket]:
    """A server of lmtier, and a connection to its socket `unix`, or to its port if there is none."""
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMTIER_")}
    env |= {
        "LMTIER_TIERS": f"cpu://?capacity={capacity}",
        "LMTIER_SERVE_LISTEN": f"127.0.0.1:{port}",
        "LMTIER_SERVE_HTTP": "",
        "LMTIER_SERVE_UNIX": unix,
        **settings,
    }
    with process(*module("lmtier"), "serve", place=unix or port, env=env) as sock:
        yield sock


@contextmanager
def redis_process(directory: Path, *more: str) -> Iterator[socket.socket]:
    port = free_port()
    options = ("--port", port, "--save", "", "--appendonly", "no", "--dir", str(directory))
    with process("redis-server", *options, *more, place=port) as sock:
        yield sock


@contextmanager
def process(*words: str, place: str = "", env: dict[str, str] | None = None) -> Iterator[socket.socket]:
    """A server, and a connection to it; `place` is its port or socket, by default its last argument."""
    child = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        with _connect(place or words[-1], child) as sock:
            yield sock
    finally:
        child.kill()
        child.communicate()


def _connect(place: str, child: subprocess.Popen[bytes] | None = None) -> socket.socket:
    until = time.monotonic() + PATIENCE
    while True:
        sock = socket.socket(socket.AF_INET if place.isdigit() else socket.AF_UNIX)
        try:
            sock.connect(("127.0.0.1", int(place)) if place.isdigit() else place)
        except OSError as error:
            sock.close()
            if (child is not None and child.poll() is not None) or time.monotonic() > until:
                said = child.communicate()[1].decode() if child is not None else ""
                raise ConfigError(f"a server for the bench did not start: {error}\n{said}") from None
            time.sleep(0.02)  # another process starts
            continue
        if place.isdigit():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def installed(program: str) -> str | None:
    """Its path, if a package brought it, or the system."""
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.exists() else shutil.which(program)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
