"""The Mooncake tier passes the suite for tiers on a real master and a real node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtier.config import TierSpec
from lmtier.format.layout import Name
from lmtier.testing import TierSuite
from lmtier.tiers.base import Tier
from lmtier.tiers.registry import open_tier
from tests.mooncake_process import BackDoor, MooncakeServers, mooncake

pytest.importorskip(
    "mooncake.store", reason="its client is for x86-64, and needs libibverbs1", exc_type=ImportError
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServers]:
    with mooncake(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


@pytest.fixture(scope="module")
def door(servers: MooncakeServers) -> Iterator[BackDoor]:
    back = BackDoor(servers)
    yield back
    back.close()


class TestMooncake(TierSuite):
    @pytest.fixture(autouse=True)
    def _servers(self, servers: MooncakeServers, door: BackDoor) -> None:
        self.servers, self.door = servers, door

    def make(self, tmp_path: Path) -> Tier:
        query = f"namespace={tmp_path.name}&deadline=20s&connections=2"
        return open_tier(TierSpec.parse(self.servers.url(query)))

    def raw_objects(self, tmp_path: Path) -> dict[Name, bytes]:
        return self.door.objects(self.prefix(tmp_path))

    def plant(self, tmp_path: Path, name: Name, data: bytes) -> None:
        # Mooncake keeps no object without bytes.
        self.door.put(f"{self.prefix(tmp_path)}{name}", data or b"x")

    def prefix(self, tmp_path: Path) -> str:
        return f"{tmp_path.name}/"
