"""CPU of the server for one value of a Redis client, by size, beside a real Redis on the same machine.

    python bench/values.py [--times 2000]

One client, one command at a time. CPU time is that of the whole server process (user and system), so that
other programs on the machine change it little.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lmtier.tools.terminal import say, table
from tests.redis_process import RedisServer
from tests.server.process import Served, Wire

SIZES = (64, 4 << 10, 64 << 10, 1 << 20)


def cpu(pid: int) -> float:
    """Seconds of CPU so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(address: tuple[str, int], pid: int, size: int, times: int) -> tuple[float, float]:
    """Microseconds of CPU for a SET and for a GET."""
    data = b"x" * size
    took = []
    with Wire(address) as wire:
        for words in (("SET", "name", data), ("GET", "name")):
            wire.ask(*words)
            before = cpu(pid)
            for _ in range(times):
                wire.ask(*words)
            took.append((cpu(pid) - before) / times * 1e6)
    return took[0], took[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=2000)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder) / "redis")
        ours = Served(Path(folder), "cpu://?capacity=256MiB")
        try:
            rows = []
            for size in SIZES:
                few = times if size < 1 << 20 else times // 10
                mine = measure(ours.address, ours.process.pid, size, few)
                theirs = measure(redis.address, redis.process.pid, size, few)
                pairs = zip(mine, theirs, strict=True)
                rows.append((f"{size:,}", *(f"{micros:.0f}" for pair in pairs for micros in pair)))
            say(table(("bytes", "SET, µs of CPU", "redis", "GET, µs of CPU", "redis"), rows))
        finally:
            ours.kill()
            redis.kill()


if __name__ == "__main__":
    main()
