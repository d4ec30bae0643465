"""What hostile clients can make a server remember: all of them together, whatever they send."""

from __future__ import annotations

import gc
import resource
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from lmtier.config import Config, ServerConfig
from lmtier.format.layout import Layout
from lmtier.server.ledger import KEY_OVERHEAD, MAX_CLIENT_BYTES
from lmtier.server.serve import Server
from lmtier.threads import start_thread
from lmtier.wire.resp import Error, encode_command
from tests.server.process import MIB, PATIENCE, Served, Wire, served, until

LAYOUT = Layout.uniform(
    layers=1, heads=1, head_dim=16, dtype="fp16", block_tokens=16, chunk_tokens=16, packing="token"
)
FIGURE = MAX_CLIENT_BYTES + 256 * MIB
"""The most by which the server's memory grows, as docs/SERVER.md says."""
SMALL = 4096  # bytes that the kernel keeps of what nobody reads
TOGETHER = 2 * MAX_CLIENT_BYTES  # bytes that all of them try to make it remember


def matches(nbytes: int, name: int) -> bytes:
    """Lookups of keys that nobody has, which are never released."""
    begin = encode_command("LMTIER.HELLO", 1) + encode_command(
        "LMTIER.FORM", LAYOUT.to_json(), str(LAYOUT.whole)
    )
    keys = [b"%16d%16d" % (name, number) for number in range(nbytes // 100)]
    parts = [b"".join(keys[at : at + 1000]) for at in range(0, len(keys), 1000)]
    return begin + b"".join(encode_command("LMTIER.MATCH", 0, 0, 0, part) for part in parts)


def watches(nbytes: int, name: int) -> bytes:
    names = [b"%d %d" % (name, number) for number in range(nbytes // 340)]
    return b"".join(encode_command("WATCH", *names[at : at + 1000]) for at in range(0, len(names), 1000))


def queue(nbytes: int, name: int) -> bytes:
    names = [b"%d" % name] * 1000
    return encode_command("MULTI") + encode_command("MGET", *names) * (nbytes // 66_000)


def half(nbytes: int, name: int) -> bytes:
    """A request that never ends."""
    arguments = nbytes // 4000
    return b"*%d\r\n$4\r\nMGET\r\n" % (arguments + 2) + (b"$4000\r\n%4000d\r\n" % name) * arguments


def unread(nbytes: int, name: int) -> bytes:
    """Answers that nobody reads."""
    return encode_command("ECHO", b"x" * 32_000) * (nbytes // 32_000 + 1)


KINDS = (matches, watches, queue, half, unread)
ENDED_BEFORE = (unread,), (queue,)
"""An answer that is not read has a mebibyte of its own, and a queue has its number of commands."""


def begin(address: Any) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    sock.connect(address)
    return sock


def memory(server: Served, name: str) -> int:
    """Bytes of memory that it has: VmRSS now, VmHWM at most until now."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name)) << 10


def attack(server: Served, clients: int, kinds: Any = KINDS) -> tuple[int, int]:
    """By how much its memory grows at most, and how many are closed. Who is no enemy is served throughout."""
    before, each = memory(server, "VmRSS"), TOGETHER // clients
    with ExitStack() as stack, server.connect() as friend:
        friend.expect("OK", "SET", "name", "value")
        friend.expect("OK", "WATCH", "name")
        enemies = [stack.enter_context(begin(server.address)) for _ in range(clients)]
        for number, enemy in enumerate(enemies):
            kind = kinds[number % len(kinds)]
            enemy.settimeout(0.2 if kind is unread else 30.0)  # whose answers wait is not heard
            with suppress(OSError):  # it was closed before it had said all
                enemy.sendall(kind(each, number))
            if not number % 100:
                friend.expect(b"value", "GET", "name")
        friend.expect("OK", "MULTI")
        friend.expect("QUEUED", "GET", "name")
        friend.expect([b"value"], "EXEC")
        if kinds not in ENDED_BEFORE:
            until(lambda: server.held()[2] < clients + 1, 30.0)  # it has read as much as that takes
        closed = int(clients + 1 - server.held()[2])
        said = friend.ask("INFO", "memory").decode()
        assert 0 < int(said.partition("mem_clients_normal:")[2].split()[0]) <= MAX_CLIENT_BYTES
        grown = memory(server, "VmHWM") - before
    until(lambda: server.held()[2] == 0)
    said = server.ask("INFO", "memory").decode()
    assert int(said.partition("mem_clients_normal:")[2].split()[0]) < MIB, "all of it is given back"
    return grown, closed


SLOWLY = [pytest.param((kind,), id=kind.__name__, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kinds", [pytest.param(KINDS, id="all"), *SLOWLY])
def test_the_memory_of_all_clients_together_is_bounded(tmp_path: Path, kinds: Any):
    with served(tmp_path, "cpu://?capacity=16MiB", config={"chunk_tokens": 16}) as server:
        grown, closed = attack(server, 150, kinds)
        print(f"150 clients try {TOGETHER >> 20} MiB: {grown >> 20} MiB more, {closed} were closed")
        assert grown < FIGURE
        assert closed or kinds in ENDED_BEFORE


@pytest.mark.slow
def test_ten_thousand_hostile_clients_stay_in_the_bound(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    clients = min(10_000, (hard - 1000) * 15 // 16)
    try:
        with served(tmp_path, "cpu://?capacity=16MiB", config={"chunk_tokens": 16}, clients=11_000) as server:
            grown, closed = attack(server, clients)
            print(f"{clients:,} clients: {grown >> 20} MiB more, {closed} were closed")
            assert grown < FIGURE
            assert closed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_greedy_engine_is_refused_and_stays_connected(tmp_path: Path):
    """Its extents must stay until it releases them."""
    with (
        served(tmp_path, config={"chunk_tokens": 16}, unix=str(tmp_path / "socket")) as server,
        Wire(server.where["unix"], 4 * PATIENCE) as engine,
    ):
        engine.granted("LMTIER.HELLO", 1)
        engine.granted("LMTIER.FORM", LAYOUT.to_json(), str(LAYOUT.whole))
        refused = None
        for turn in range(60):
            keys = b"".join(b"%16d%16d" % (turn, number) for number in range(30_000))
            refused = engine.ask("LMTIER.MATCH", 0, 0, 0, keys)
            if isinstance(refused, Error):
                break
        assert isinstance(refused, Error)
        assert "take 128 MiB: end some" in refused
        engine.expect("PONG", "PING")


def test_engines_that_cannot_be_closed_close_no_others(tmp_path: Path, monkeypatch):
    """Otherwise each event of the server would close everybody who connects, and never be done."""
    monkeypatch.setattr("lmtier.server.ledger.MAX_CLIENT_BYTES", MIB)
    often = gc.get_threshold()
    address = str(tmp_path / "socket")
    server = Server(
        Config(tiers=("cpu://?capacity=4MiB",), chunk_tokens=16, prefault=False),
        ServerConfig(listen="127.0.0.1:0", http="", unix=address),
    )
    owner = start_thread("owner", server.run)
    try:
        host, _, port = dict(server.addresses)["redis"].rpartition(":")
        with (
            Wire((host, int(port))) as friend,
            Wire(address) as local,
            Wire(address) as engine,
            begin((host, int(port))) as enemy,
        ):
            engine.granted("LMTIER.HELLO", 1)
            engine.granted("LMTIER.FORM", LAYOUT.to_json(), str(LAYOUT.whole))
            for turn in range(2):
                keys = b"".join(b"%16d%16d" % (turn, number) for number in range(MIB // KEY_OVERHEAD))
                engine.granted("LMTIER.MATCH", 0, 0, 0, keys)
            for each in friend, local:
                each.expect("OK", "SET", "name", "value")
                each.expect(b"value", "GET", "name")
            value = server.cache.metrics.value
            assert value("lmtier_clients_shed_total") == 0
            with suppress(OSError):
                enemy.sendall(watches(3 * MIB, 0))
            until(lambda: value("lmtier_clients_shed_total") == 1)
            for each in friend, local, engine:
                each.expect("PONG", "PING")
        until(lambda: value("lmtier_clients_remember_bytes") == 0)
    finally:
        server.stop()
        owner.join(PATIENCE)
        gc.unfreeze()  # a server has a process of its own
        gc.set_threshold(*often)
