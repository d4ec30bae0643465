"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

import fcntl
import shutil
import socket
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With several workers: while a test that is marked `alone` runs, no other does."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    folder = Path(item.config.option.basetemp).parent
    with (folder / "turn").open("w") as turn, (folder / "run").open("w") as run:
        fcntl.flock(turn, fcntl.LOCK_EX)  # who waits to be alone is the next
        fcntl.flock(run, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(run, fcntl.LOCK_UN)  # of the test's children too


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
