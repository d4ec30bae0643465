"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

# On a busy machine one example may take any time.
settings.register_profile("lmtier", deadline=None)
settings.load_profile("lmtier")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in ("slow", "alone"):
            if item.get_closest_marker(mark) and f"mark.{mark}" not in item.path.read_text():
                raise pytest.UsageError(f"{item.nodeid}: mark.{mark} must be in its file: make looks there")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Unix socket of a real redis-server that keeps nothing."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.fail("this test compares with a real redis-server: apt-get install redis-server")
    folder = tmp_path_factory.mktemp("redis")
    path = folder / "socket"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 30
        while not _listens(path):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
            if process.returncode is not None or time.monotonic() > deadline:
                pytest.fail(f"redis-server did not start: {(folder / 'log').read_text()}")
        yield path
    finally:
        process.kill()
        process.wait()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0
