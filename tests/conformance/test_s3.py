"""The S3 tier passes the suite for tiers on two servers that share no code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmtier.config import TierSpec
from lmtier.format.layout import Name
from lmtier.testing import TierSuite
from lmtier.tiers.base import Tier
from lmtier.tiers.registry import open_tier
from tests.s3_process import BUCKET, KEY, SECRET, Rclone, S3Server, SeaweedFS, serving


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


class S3Suite(TierSuite):
    """Against a server that a fixture of the subclass has put into `self.server`."""

    server: S3Server

    def make(self, tmp_path: Path) -> Tier:
        # More than the usual 2 s: here a miss must say what is wrong, on however busy a machine.
        return open_tier(TierSpec.parse(f"s3://{BUCKET}/{tmp_path.name}?deadline=20s&{self.endpoint()}"))

    def endpoint(self) -> str:
        return f"endpoint={self.server.url}"

    def raw_objects(self, tmp_path: Path) -> dict[Name, bytes]:
        return self.server.objects(f"{tmp_path.name}/default/")

    def plant(self, tmp_path: Path, name: Name, data: bytes) -> None:
        self.server.put(f"{tmp_path.name}/default/{name}", data)


def started(kind: type[S3Server], factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(kind, factory.mktemp(kind.__name__)) as server:
        yield server


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from started(SeaweedFS, tmp_path_factory)


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from started(Rclone, tmp_path_factory)


class TestSeaweedFS(S3Suite):
    @pytest.fixture(autouse=True)
    def _server(self, seaweed: S3Server) -> None:
        self.server = seaweed


class TestRclone(S3Suite):
    @pytest.fixture(autouse=True)
    def _server(self, rclone: S3Server) -> None:
        self.server = rclone
