"""The Redis tier passes the suite for tiers on everything it can speak to, and shares what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmtier.config import TierSpec
from lmtier.format.layout import PAGE, Name
from lmtier.testing import TierSuite
from lmtier.tiers.base import Tier
from lmtier.tiers.registry import open_tier
from lmtier.wire.resp import Error
from tests.certificates import certify
from tests.redis_process import (
    RedisServer,
    cluster,
    free_port,
    planted,
    running,
    sentinel,
    stored,
)
from tests.sealed import Sealed
from tests.server.process import Served, Wire, served


class RedisSuite(TierSuite):
    """Against a server that a fixture of the subclass has put into `self.url` and `self.wire`."""

    wire: Wire
    url: str
    part = 0

    def make(self, tmp_path: Path) -> Tier:
        # More than the usual second: here a miss must say what is wrong, on however busy a machine.
        return open_tier(TierSpec.parse(f"{self.url}{'&' if '?' in self.url else '?'}deadline=10s"))

    def raw_objects(self, tmp_path: Path) -> dict[Name, bytes]:
        return stored(self.wire.ask, list(self.wire.ask("KEYS", "*")))

    def plant(self, tmp_path: Path, name: Name, data: bytes) -> None:
        planted(self.wire.ask, name, data, self.part)


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


class TestStandalone(RedisSuite):
    @pytest.fixture(autouse=True)
    def _server(self, standalone: RedisServer) -> Iterator[None]:
        self.url = f"redis://127.0.0.1:{standalone.port}"
        with Wire(standalone.address) as self.wire:
            self.wire.expect("OK", "FLUSHALL")
            yield


class TestInParts(TestStandalone):
    """All but the smallest objects are in parts, and live for an hour."""

    part = PAGE

    @pytest.fixture(autouse=True)
    def _parts(self, _server: None) -> None:
        self.url += f"?part={PAGE}&ttl=1h"


class TestUnix(RedisSuite):
    @pytest.fixture(autouse=True)
    def _server(self, redis_server: Path) -> Iterator[None]:
        self.url = f"unix://{redis_server}?db=1"
        with Wire(str(redis_server)) as self.wire:
            self.wire.expect("OK", "SELECT", 1)
            self.wire.expect("OK", "FLUSHDB")
            yield


class TestTls(RedisSuite):
    """With a certificate on both sides, a user of its own and a password from a file."""

    server: RedisServer

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _process(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("tls")
        cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
        certify(folder / "cert.pem", folder / "key.pem")
        (folder / "password").write_text("s p@ce/d\n")
        tls = ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert)
        port = free_port()
        user = (
            "--user",
            "kv",
            "on",
            ">s p@ce/d",
            "~lmtier:*",
            *["+get", "+getrange", "+set", "+unlink", "+pexpire", "+scan"],
        )
        with running(folder, "--tls-port", str(port), *tls, *user) as cls.server:
            cls.url = (
                f"rediss://kv@localhost:{port}?password_file={folder}/password"
                f"&ssl_ca_certs={cert}&ssl_certfile={cert}&ssl_keyfile={key}&ttl=1h"
            )
            yield

    @pytest.fixture(autouse=True)
    def _server(self, _process: None) -> Iterator[None]:
        with Wire(self.server.address) as self.wire:
            self.wire.expect("OK", "FLUSHALL")
            yield


class TestCluster(RedisSuite):
    part = PAGE
    nodes: list[RedisServer]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _process(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with cluster(tmp_path_factory.mktemp("cluster")) as cls.nodes:
            cls.url = f"redis-cluster://localhost:{cls.nodes[1].port}?part={PAGE}"
            yield

    @pytest.fixture(autouse=True)
    def _server(self, _process: None) -> Iterator[None]:
        self.wires = [Wire(node.address) for node in self.nodes]
        for wire in self.wires:
            wire.expect("OK", "FLUSHALL")
        yield
        for wire in self.wires:
            wire.close()

    def raw_objects(self, tmp_path: Path) -> dict[Name, bytes]:
        return stored(self.ask, [key for wire in self.wires for key in wire.ask("KEYS", "*")])

    def plant(self, tmp_path: Path, name: Name, data: bytes) -> None:
        planted(self.ask, name, data, self.part)

    def ask(self, *args: str | bytes | int) -> Any:
        for wire in self.wires:
            if not isinstance(reply := wire.ask(*args), Error):
                return reply
            assert reply.startswith("MOVED"), reply
        raise AssertionError("no node has it")


class TestSentinel(RedisSuite):
    server: RedisServer

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _process(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("sentinel")
        with running(folder) as cls.server, sentinel(folder / "sentinel", cls.server) as watcher:
            cls.url = f"redis-sentinel://127.0.0.1:{free_port()},127.0.0.1:{watcher.port}/kv"
            yield

    @pytest.fixture(autouse=True)
    def _server(self, _process: None) -> Iterator[None]:
        with Wire(self.server.address) as self.wire:
            self.wire.expect("OK", "FLUSHALL")
            yield


class TestOurOwnServer(RedisSuite):
    part = PAGE
    server: Served

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _process(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("lmtier")
        with served(folder, "cpu://?capacity=128MiB", token="open sesame") as cls.server:
            _, port = cls.server.address
            cls.url = f"redis://:open sesame@127.0.0.1:{port}?part={PAGE}&ttl=1d"
            yield

    @pytest.fixture(autouse=True)
    def _server(self, _process: None) -> Iterator[None]:
        with self.server.connect() as self.wire:
            self.wire.expect("OK", "AUTH", "open sesame")
            self.wire.expect("OK", "FLUSHALL")
            yield


@pytest.mark.sealed
class TestSealedStandalone(Sealed, TestStandalone):
    """With every object sealed."""


@pytest.mark.sealed
class TestSealedInParts(Sealed, TestInParts):
    """With every object sealed."""


@pytest.mark.sealed
class TestSealedUnix(Sealed, TestUnix):
    """With every object sealed."""


@pytest.mark.sealed
class TestSealedTls(Sealed, TestTls):
    """With every object sealed."""


@pytest.mark.sealed
class TestSealedCluster(Sealed, TestCluster):
    """With every object sealed."""


@pytest.mark.sealed
class TestSealedSentinel(Sealed, TestSentinel):
    """With every object sealed."""


@pytest.mark.sealed
class TestSealedOurOwnServer(Sealed, TestOurOwnServer):
    """With every object sealed."""
