"""One server under the load of four engines: its time for a chunk, what a lookup waits for, and whether both
stay the same with millions of chunks.

Engines are processes that move no KV, so that the server is the bottleneck. Each prompt has 512 chunks of 16
tokens, half of them new. An engine looks it up, reserves what is missing, and commits it.
"""

from __future__ import annotations

import hashlib
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from select import select
from time import perf_counter

from lmtier.client.client import Client
from lmtier.format.layout import Layout, form_of
from lmtier_bench import Samples, Scale
from lmtier_bench.copies import seconds
from lmtier_bench.server import lmtier_process, module

ENGINES, CHUNKS, TOKENS = 4, 512, 16
CAPACITY = 20_000  # chunks: full from the first round on
LARGE = 2_000  # chunks of a save beside which others look up
LOOKUPS = 300
ROUNDS = 5
KNOWN = 20  # prompts that are looked up beside many other chunks
LARGE_SAVES = 100  # that differ

_LAYOUT = Layout.uniform(
    layers=1, heads=1, head_dim=64, dtype="bf16", block_tokens=TOKENS, chunk_tokens=TOKENS, packing="token"
)
FORM = form_of(_LAYOUT, [_LAYOUT.whole])  # a page


def chunks(name: object, many: int) -> list[bytes]:
    return [hashlib.sha256(repr((name, number)).encode()).digest() for number in range(many)]


def engines(scale: Scale) -> Samples:
    rounds = range(min(ROUNDS, scale.rounds))
    with ExitStack() as stack:
        server = stack.enter_context(ServerUnderLoad.server(scale, "load", CAPACITY))
        server.run("fill", scale.engine_prompts)
        for number in rounds:
            ours = server.cost(f"{number}", scale.engine_prompts)
            yield "one server, four engines: of its core for a chunk", 1e6 * ours, 1e6 * _bare()
        prompt = chunks("known", CHUNKS)
        server.store(prompt)
        server.client.pin("known", prompt)  # on a busy machine ten saves may come between two lookups
        for number in rounds:
            alone = server.p99(prompt)
            with server.large_saves(number):
                beside = server.p99(prompt)
            yield "look up 512 keys beside saves of 2,000 chunks, p99", 1e3 * beside, 1e3 * alone


def many_chunks(scale: Scale) -> Samples:
    """Servers that hold a million and four million chunks, in turn with one that holds few."""
    sizes = {"": CAPACITY, "1M": scale.index_chunks, "4M": 4 * scale.index_chunks}
    stored_prompts = [chunks(f"known {each}", CHUNKS) for each in range(KNOWN)]
    with ExitStack() as stack:
        servers = {}
        for name, capacity in sizes.items():
            server = servers[name] = stack.enter_context(
                ServerUnderLoad.server(scale, f"load{name}", capacity)
            )
            server.run("fill", capacity // (ENGINES * CHUNKS // 2) + 1)
            chunk_count = server.client.stats()["cpu"]["chunks"]
            assert chunk_count > 0.99 * capacity - CHUNKS, f"it holds {chunk_count} of {capacity} chunks"
            server.store(*stored_prompts)
        for number in range(min(ROUNDS, scale.rounds)):
            waits = {name: server.p99(*stored_prompts) for name, server in servers.items()}
            costs = {name: each.cost(f"{number}", scale.engine_prompts) for name, each in servers.items()}
            for name in ("1M", "4M"):
                where = f"one server of {name} chunks: "
                yield where + "a chunk, over 20k", costs[name] / costs[""], 1
                yield where + "p99 of lookups, over 20k", waits[name] / waits[""], 1


class ServerUnderLoad:
    """A server, the engines that work with it, and a client of ours."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self._path = path
        self._pid = _owner(path)
        self._engines = [stack.enter_context(_engine(path, each)) for each in range(ENGINES)]
        self.client = stack.enter_context(Client(path))

    @classmethod
    @contextmanager
    def server(cls, scale: Scale, name: str, capacity: int) -> Iterator[ServerUnderLoad]:
        """It has room for so many chunks. They stay empty, so they take no memory."""
        path = str(scale.directory / f"{name}.sock")
        settings = {"LMTIER_CHUNK_TOKENS": str(TOKENS), "LMTIER_PREFAULT": "false"}
        with lmtier_process(capacity * FORM.slab_bytes, path, **settings), ExitStack() as stack:
            yield cls(path, stack)

    def run(self, name: str, prompts: int) -> None:
        """Each engine does so many prompts. They begin together when all are ready."""
        for step in (f"{prompts} {name}", "go"):
            for each in self._engines:
                _tell(each, step)
            for each in self._engines:
                _hear(each)

    def cost(self, name: str, prompts: int) -> float:
        """Seconds of the server's core for a chunk, with all engines at work."""
        before = _processor_time(self._pid)
        self.run(name, prompts)
        return (_processor_time(self._pid) - before) / (ENGINES * prompts * CHUNKS)

    @contextmanager
    def large_saves(self, number: int) -> Iterator[None]:
        """One engine saves large prompts meanwhile."""
        with _engine(self._path, ENGINES) as engine:
            _tell(engine, f"{LARGE_SAVES} large {number}")
            _hear(engine)
            _tell(engine, "go")
            yield
            _tell(engine, "enough")
            _hear(engine)

    def store(self, *prompts: list[bytes]) -> None:
        for prompt in prompts:
            self.client.commit(self.client.reserve(prompt, FORM))

    def p99(self, *prompts: list[bytes]) -> float:
        took = []
        for number in range(LOOKUPS):
            began = perf_counter()
            match = self.client.match(prompts[number % len(prompts)], FORM)
            took.append(perf_counter() - began)
            assert match.chunks == CHUNKS, f"{match!r}"
            self.client.release(match)
        return sorted(took)[int(0.99 * LOOKUPS)]


def _bare() -> float:
    """What a dict takes for a chunk of the same traffic: half of them are found, half take the place of
    others."""
    existing, new = chunks("known", CHUNKS // 2), chunks("new", CHUNKS // 2)
    table = dict.fromkeys([*existing, *chunks("old", CHUNKS // 2)])

    def work() -> None:
        for key in (*existing, *new):
            table.get(key)
        for key in new:
            table[key] = None
            del table[next(iter(table))]

    return seconds(work) / CHUNKS


def _owner(path: str) -> int:
    """The process that listens there."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)


def _processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


@contextmanager
def _engine(path: str, number: int) -> Iterator[subprocess.Popen[str]]:
    """A process that does what it is told."""
    command = [*module("lmtier_bench.load"), path, str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        yield engine
        assert engine.stdin is not None
        engine.stdin.close()


def _tell(engine: subprocess.Popen[str], line: str) -> None:
    assert engine.stdin is not None
    engine.stdin.write(line + "\n")
    engine.stdin.flush()


def _hear(engine: subprocess.Popen[str]) -> None:
    assert engine.stdout is not None
    assert engine.stdout.readline(), "an engine of the bench failed"


def main(path: str, number: str) -> None:
    """An engine. Each line on stdin names some work, and the next line starts it."""
    heads = [chunks(f"head {each}", CHUNKS // 2) for each in range(20)]
    with Client(path, waits=False) as client:
        for line in sys.stdin:
            prompts, _, name = line.strip().partition(" ")
            is_large = name.startswith("large")
            chunk_count = LARGE if is_large else CHUNKS // 2
            tails = [chunks(f"{name}, {number}, {each}", chunk_count) for each in range(int(prompts))]
            dice = random.Random(f"{name} {number}")
            _say("ready")
            sys.stdin.readline()
            for each in count():
                if select([sys.stdin], [], [], 0)[0] if is_large else each == len(tails):
                    break
                tail = tails[each % len(tails)]
                prompt = tail if is_large else [*dice.choice(heads), *tail]
                client.release(client.match(prompt, FORM))
                client.commit(client.reserve(prompt, FORM))
            if is_large:
                sys.stdin.readline()
            _say("done")


def _say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
