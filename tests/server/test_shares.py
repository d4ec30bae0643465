"""Two tenants of one server: what one of them does is no concern of the other's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from lmtier.client.client import Client
from lmtier.format.keys import Identity, KeyChain, seed
from tests.client.test_client import ROOM, C, Server, look, store
from tests.server.process import PATIENCE

MODEL = Identity(model="m", weights="w")
SHARES = {"alice": 0.3, "bob": {"salt": "s3cret", "share": "20%"}}


def prompt(salt: str, number: int, chunks: int = 2) -> list[bytes]:
    return KeyChain(seed(MODEL, C, salt=salt), C, [number] * (chunks * C)).keys


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*tiers: str) -> Server:
        config = {"chunk_tokens": C, "shares": SHARES}
        cpu = f"cpu://?capacity={20 * ROOM}"
        servers.append(
            Server(tmp_path, cpu, *tiers, config=config, unix=str(tmp_path / "unix"), http="127.0.0.1:0")
        )
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def get(server: Server, path: str) -> str:
    with urlopen(f"http://{server.where['http']}{path}", timeout=PATIENCE) as reply:
        return str(reply.read().decode())


def test_a_flood_leaves_the_other_tenants_share_alone(start):
    server = start()
    with Client(server.path) as alice, Client(server.path) as bob:
        mine = prompt("alice", 1, 6)
        store(alice, mine)
        for number in range(100):
            assert store(bob, prompt("s3cret", number)) == 2, "a flood is served, out of what it had"
            assert look(alice, mine[:1]) == ["cpu"]
        assert look(alice, mine) == ["cpu"] * 6
        assert alice.stats()["cpu"]["chunks"] == 20, "and uses what nobody needs"
        assert store(alice, prompt("alice", 2, 6)) == 6
        assert look(bob, prompt("s3cret", 99)) == ["cpu"] * 2, "within his share he keeps his latest"


def test_a_flood_leaves_shares_on_disk_alone_after_restarts(start, tmp_path: Path):
    server = start(f"disk://{tmp_path}/kv?capacity={20 * (ROOM + 4096)}")
    mine = prompt("alice", 1, 6)
    with Client(server.path) as alice:
        store(alice, mine)
        assert alice.flush()
    server.stop()
    server.start()
    with Client(server.path) as alice, Client(server.path) as bob:
        for number in range(50):
            store(bob, prompt("s3cret", number))
            assert bob.flush()
        assert look(alice, mine) == ["disk"] * 6


def test_shares_are_shown_and_named_salts_are_not(start):
    server = start()
    with Client(server.path) as bob:
        store(bob, prompt("s3cret", 1))
    metrics = get(server, "/metrics")
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(lines['lmtier_share_used_bytes{tenant="bob",tier="cpu"}']) == 2 * ROOM
    assert float(lines['lmtier_share_bytes{tenant="alice",tier="cpu"}']) == 6 * ROOM
    assert float(lines['lmtier_share_bytes{tenant="other",tier="cpu"}']) == 10 * ROOM
    assert "s3cret" not in metrics + get(server, "/api/stats") + server.log.read_text()
