"""One server under the load of four engines: its time for a chunk, and what a lookup waits for.

Engines are processes that move no KV, so that the server is the bottleneck. Each prompt has 512 chunks of 16
tokens, half of them new. An engine looks it up, reserves what is missing, and commits it.
"""

from __future__ import annotations

import hashlib
import random
import socket
import subprocess
import sys
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from select import select
from time import perf_counter

from lmtier.client.client import Client
from lmtier.format.layout import Layout, form_of
from lmtier_bench import Samples, Scale
from lmtier_bench.copies import seconds
from lmtier_bench.server import lmtier_process, module

ENGINES, PROMPTS, CHUNKS, TOKENS = 4, 100, 512, 16
CAPACITY = 20_000  # chunks: full from the first round on
LARGE = 2_000  # chunks of a save beside which others look up
LOOKUPS = 300
ROUNDS = 5

_LAYOUT = Layout.uniform(
    layers=1, heads=1, head_dim=64, dtype="bf16", block_tokens=TOKENS, chunk_tokens=TOKENS, packing="token"
)
FORM = form_of(_LAYOUT, [_LAYOUT.whole])  # a page


def chunks(name: object, many: int) -> list[bytes]:
    return [hashlib.sha256(repr((name, number)).encode()).digest() for number in range(many)]


def engines(scale: Scale) -> Samples:
    path = str(scale.directory / "load.sock")
    with ExitStack() as stack:
        stack.enter_context(lmtier_process(CAPACITY * FORM.room, path, LMTIER_CHUNK_TOKENS=str(TOKENS)))
        pid = _owner(path)
        rounds = range(min(ROUNDS, scale.rounds))
        _together(path, [f"fill {each}" for each in range(ENGINES)])
        for number in rounds:
            before = _processor_time(pid)
            _together(path, [f"{number} {each}" for each in range(ENGINES)])
            ours = (_processor_time(pid) - before) / (ENGINES * PROMPTS * CHUNKS)
            yield "one server, four engines: of its core for a chunk", 1e6 * ours, 1e6 * _bare()
        prompt = chunks("known", CHUNKS)
        with Client(path) as client:
            client.commit(client.reserve(prompt, FORM))
            client.pin("known", prompt)  # on a busy machine ten saves may come between two lookups
            for number in rounds:
                alone = _p99(client, prompt)
                saver = _engine(path, f"large {number}")
                beside = _p99(client, prompt)
                saver.communicate("enough\n")
                yield "look up 512 keys beside saves of 2,000 chunks, p99", 1e3 * beside, 1e3 * alone


def _p99(client: Client, prompt: list[bytes]) -> float:
    took = []
    for _ in range(LOOKUPS):
        began = perf_counter()
        match = client.match(prompt, FORM)
        took.append(perf_counter() - began)
        assert match.chunks == CHUNKS, f"{match!r}"
        client.release(match)
    return sorted(took)[int(0.99 * LOOKUPS)]


def _bare() -> float:
    """What a dict takes for a chunk of the same traffic: half of them are found, half take the place of
    others."""
    known, new = chunks("known", CHUNKS // 2), chunks("new", CHUNKS // 2)
    held = dict.fromkeys([*known, *chunks("old", CHUNKS // 2)])

    def work() -> None:
        for key in (*known, *new):
            held.get(key)
        for key in new:
            held[key] = None
            del held[next(iter(held))]

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


def _together(path: str, names: list[str]) -> None:
    """Engines begin together when all are ready; returns when all are done."""
    running = [_engine(path, name) for name in names]
    for each in running:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    for each in running:
        each.communicate()
        assert not each.returncode, "an engine of the bench failed"


def _engine(path: str, name: str) -> subprocess.Popen[str]:
    """One that is ready."""
    engine = subprocess.Popen(
        [*module("lmtier_bench.load"), path, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "ready\n", "an engine of the bench does not start"
    return engine


def main(path: str, name: str) -> None:
    """An engine: a number of prompts, or large saves until it is told that it is enough."""
    heads = [chunks(f"head {each}", CHUNKS // 2) for each in range(20)]
    is_large = name.startswith("large")
    tails = [chunks(f"{name}, {each}", LARGE if is_large else CHUNKS // 2) for each in range(PROMPTS)]
    dice = random.Random(name)
    with Client(path, waits=False) as client:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        if not is_large:
            sys.stdin.readline()
        for number in count():
            if select([sys.stdin], [], [], 0)[0] if is_large else number == PROMPTS:
                return
            tail = tails[number % PROMPTS]
            prompt = tail if is_large else [*dice.choice(heads), *tail]
            client.release(client.match(prompt, FORM))
            client.commit(client.reserve(prompt, FORM))


if __name__ == "__main__":
    main(*sys.argv[1:])
