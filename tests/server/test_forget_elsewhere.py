"""A tenant who is forgotten on one host, and the others that share a sealed Redis and the keys of tenants."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmtier.client.client import Client
from lmtier.format.keys import tenant, tenant_of
from lmtier.format.layout import Name
from lmtier.tiers.blocking import LEARNED_WITHIN
from lmtier.tools.cli import main
from tests.redis_process import RedisServer, running, stored
from tests.sealed import key_file
from tests.server.process import Served, served, until
from tests.server.test_forget import FORM, keys, store
from tests.stopwatch import Stopwatch

A, B = tenant("alice"), tenant("bob")
ROOM = 32
"""Chunks in the memory of a server."""


def of_model(model: bytes, names: list[bytes]) -> list[bytes]:
    return [model + name[4:] for name in names]


class Host:
    """A server in a process of its own, and an engine."""

    def __init__(self, server: Served, client: Client) -> None:
        self.server, self.client = server, client

    def loads(self, names: list[bytes]) -> int:
        """How many of these chunks an engine gets, with their bytes."""
        match = self.client.wait(self.client.match(names, FORM))
        for key, offsets in match.grant.places:
            assert (
                self.client.slab.view(offsets[0], FORM.slab_bytes)
                == (key * FORM.slab_bytes)[: FORM.slab_bytes]
            )
        count = match.chunks
        self.client.release(match)
        return count

    def forget(self, *words: str) -> int:
        return main(["forget", *words, "--server", self.server.where["unix"]])


class Hosts:
    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder, self.redis = folder, redis
        self.tenants = folder / "tenants"
        seal = f"seal=aes-256-gcm&key={key_file(folder, 1)}&tenants={self.tenants}"
        self.url = f"redis://127.0.0.1:{redis.port}?namespace=default&{seal}"

    @contextmanager
    def host(self, name: str, more: str = "", *tiers: str) -> Iterator[Host]:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        path = str(folder / "sock")
        memory = f"cpu://?capacity={ROOM * FORM.slab_bytes}&policy=lru"
        config = {"chunk_tokens": 16}
        tiers = (memory, *tiers, self.url + more)
        with (
            served(folder, *tiers, config=config, unix=path, log_format="text") as server,
            Client(path) as client,
        ):
            yield Host(server, client)

    def below(self, who: bytes) -> set[Name]:
        """The objects of a tenant in the shared Redis."""
        names = stored(self.redis.ask, self.redis.ask("KEYS", "lmtier:*"))
        return {name for name in names if tenant_of(name.key) == who}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with running(tmp_path / "redis") as redis:
        yield Hosts(tmp_path, redis)


def test_a_tenant_forgotten_on_one_host_is_gone_on_all(hosts, capsys):
    here = of_model(b"here", keys(A, 3))
    with hosts.host("one") as one, hosts.host("two", "&write=evicted") as two:
        store(one.client, keys(A, 3))
        store(one.client, keys(B, 3))
        assert two.loads(keys(A, 3)) == two.loads(keys(B, 3)) == 3
        store(two.client, here)  # in the memory of this host alone
        assert one.forget("alice") == 0
        watch = Stopwatch(two.server.process.pid)
        out = capsys.readouterr().out
        assert out.startswith(f"tenant {A.hex()} is forgotten\n")
        assert "Not reached yet: other servers that share these keys. They learn within 2 s." in out
        # At once, before the host has looked: what leaves its memory is written.
        store(two.client, of_model(b"fill", keys(B, ROOM - 1)))
        until(lambda: two.loads(keys(A, 3)) == two.loads(here) == 0)
        assert watch.seconds() <= LEARNED_WITHIN
        until(lambda: f"tenant {A.hex()}: cpu:" in two.server.log.read_text())
        assert two.client.flush(20)
        assert hosts.below(A) == set()
        assert not (hosts.tenants / A.hex()).exists()
        with hosts.host("three") as three:
            assert three.loads(keys(A, 3)) == three.loads(here) == 0
            assert three.loads(keys(B, 3)) == one.loads(keys(B, 3)) == 3, "others are untouched"
            back = of_model(b"back", keys(A, 3))
            store(three.client, back)  # new prompts, after all was dropped
            until(lambda: two.loads(back) == 3)
            assert two.loads(keys(A, 3)) == one.loads(keys(A, 3)) == 0
    assert "alice" not in one.server.log.read_text() + two.server.log.read_text()


DIES = """
import os, signal, sys
from lmtier.tiers.keyring import Keyring, TenantKeyFiles
TenantKeyFiles._destroy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Keyring(sys.argv[1], sys.argv[2]).tenants.forget(bytes.fromhex(sys.argv[3]))
"""


def test_a_tombstone_counts_though_its_writer_dies(hosts):
    """A key that is put back opens nothing."""
    with hosts.host("two") as two:
        store(two.client, keys(A, 3))
        store(two.client, keys(B, 3))
        file = hosts.tenants / A.hex()
        backup = file.read_bytes()
        words = [f"file:{hosts.folder}/keys", str(hosts.tenants), A.hex()]
        died = subprocess.run([sys.executable, "-c", DIES, *words], timeout=60)
        assert died.returncode == -signal.SIGKILL
        assert len(hosts.below(A)) == 3
        until(lambda: two.loads(keys(A, 3)) == 0)
        until(lambda: not file.exists())  # who sees the tombstone destroys what it is for
        with hosts.host("three") as three:
            assert three.loads(keys(A, 3)) == 0
            file.write_bytes(backup)
            file.chmod(0o600)
            assert two.loads(keys(A, 3)) == three.loads(keys(A, 3)) == 0
        with hosts.host("three") as three:
            assert three.loads(keys(A, 3)) == 0
            assert three.loads(keys(B, 3)) == 3
            store(three.client, of_model(b"back", keys(A, 2)))
            until(lambda: two.loads(of_model(b"back", keys(A, 2))) == 2)
            assert two.loads(keys(A, 3)) == 0


def test_a_host_that_was_down_serves_no_forgotten_tenant(hosts):
    """Its disk has no keys of tenants, so all that is there could be read."""
    disk = f"disk://{hosts.folder}/kv?capacity=1GiB"
    with hosts.host("one") as one:
        with hosts.host("two", "", disk) as two:
            store(two.client, keys(A, 3))
            store(two.client, keys(B, 3))
        assert one.forget("alice") == 0
        with hosts.host("two", "", disk) as two:
            assert two.loads(keys(A, 3)) == 0
            assert two.loads(keys(B, 3)) == 3
            assert hosts.below(A) == set()


def test_forgetting_with_a_tier_away_is_no_success(hosts, capsys, monkeypatch):
    """A tenant that was never seen is not known."""
    monkeypatch.setattr("lmtier.tools.commands.forgetting._PATIENCE", 1.0)
    with hosts.host("one") as one:
        store(one.client, keys(A, 3))
        assert one.forget("carol") == 1
        assert (
            f"tenant {tenant('carol').hex()} is not known: nothing of it was found\n"
            in capsys.readouterr().out
        )
        hosts.redis.kill()
        assert one.forget("alice") == 1
        out = capsys.readouterr().out
        assert out.startswith(
            f"tenant {A.hex()} is not forgotten yet: something is left, see below; ask again\n"
        )
        assert "redis: left: " in out
        hosts.redis.start()
        until(lambda: one.forget("alice", "--json") == 0)
        out = capsys.readouterr().out
        told = json.loads(out[out.rindex("\n{") if "\n{" in out else 0 :])
        assert (told["chunks"], told["others_within"]) == (0, LEARNED_WITHIN)
        assert told["since"] > 0
        assert one.forget("alice") == 0
        assert f"tenant {A.hex()} was forgotten at 2" in capsys.readouterr().out
