"""Cycles of objects are found again, though the server searches for them only at rest."""

from __future__ import annotations

import subprocess
import sys

_SERVER = """
import gc, time, weakref
from lmtier.config import Config, ServerConfig
from lmtier.server.serve import Server
config = Config(tiers=["cpu://?capacity=1MiB"], prefault=False)
server = Server(config, ServerConfig(listen="127.0.0.1:0", http=""))
class Cycle:
    pass
def tick():
    gc.collect(1)
    server._ran = time.thread_time()
    server._tick(time.monotonic())
tick()
cycle = Cycle()
cycle.me = cycle
seen = weakref.ref(cycle)
tick()
assert seen() is not None
del cycle
tick()
print("found" if seen() is None else "kept")
"""


def test_a_cycle_alive_at_one_tick_is_freed_at_a_later_one():
    command = [sys.executable, "-c", _SERVER]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("found", 0), ran.stderr
