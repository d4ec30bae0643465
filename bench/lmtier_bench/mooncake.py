"""The Mooncake tier beside Mooncake's own `put_from` and `get_into`, on one master and one node.

The limit has as many threads as the tier, and moves the same bytes from and to memory that it has registered
once. It writes no header, takes no checksum and makes no copy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from socket import create_connection
from typing import Any

import numpy as np

from lmtier.config import TierSpec
from lmtier.copy.copy_threads import CopyThreads
from lmtier.errors import ConfigError
from lmtier.tiers.registry import open_tier
from lmtier_bench import Samples, Scale
from lmtier_bench.copies import faulted_memory, large_layout, paired, seconds
from lmtier_bench.redis import BATCH, Objects
from lmtier_bench.server import NAMES, PATIENCE, free_port, installed

SEGMENT = 2 << 30
THREADS = 4

_NODE = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
metadata, master, segment = sys.argv[1:]
code = store.setup("127.0.0.1", metadata, int(segment), 16 << 20, "tcp", "", master)
print("ready" if code == 0 else code, flush=True)
threading.Event().wait()
"""


def store_and_load(scale: Scale) -> Samples:
    if (program := installed("mooncake_master")) is None:
        return
    os.environ.setdefault("GLOG_minloglevel", "3")  # what its library logs would be among the rows
    layout = large_layout(scale.large_layers)
    nbytes = layout.nbytes(layout.whole)
    total = BATCH * nbytes
    memory = faulted_memory(min(scale.memory, NAMES * nbytes))
    with ExitStack() as stack:
        master, metadata = stack.enter_context(_cluster(program, scale.directory))
        url = f"mooncake://{master}?metadata={metadata}&local=127.0.0.1&deadline=1m&connections={THREADS}"
        objects = Objects(stack.enter_context(closing(open_tier(TierSpec.parse(url)))), memory.data, layout)
        bare = stack.enter_context(closing(OwnCalls(master, metadata, memory, nbytes)))
        for number in range(scale.rounds):
            yield paired("store to mooncake, 32 MiB objects", total, number, objects.store, bare.put)
            bare.clear()  # of both
        for _ in range(NAMES // BATCH):
            objects.store()
            bare.put()
        for number in range(scale.rounds):
            yield paired("load from mooncake, 32 MiB objects", total, number, objects.load, bare.get)


class OwnCalls:
    """Mooncake's client, and threads that take the next object from a list."""

    def __init__(self, master: str, metadata: str, memory: Any, nbytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        assert self._store.setup("127.0.0.1", metadata, 0, 16 << 20, "tcp", "", master) == 0
        self._memory = np.copy(memory)
        self._nbytes = nbytes
        assert self._store.register_buffer(self._memory.ctypes.data, self._memory.nbytes) == 0
        self._crew = CopyThreads(THREADS - 1)
        self._numbers = count()
        self._stored: deque[int] = deque(maxlen=NAMES)

    def put(self) -> float:
        """New names, as those of the tier are."""
        new = [next(self._numbers) for _ in range(BATCH)]
        self._stored += new
        return self._all(partial(self._moved, self._store.put_from, 0), new)

    def get(self) -> float:
        oldest = [self._stored[i] for i in range(BATCH)]
        self._stored.rotate(-BATCH)
        return self._all(partial(self._moved, self._store.get_into, self._nbytes), oldest)

    def clear(self) -> None:
        assert self._store.remove_by_regex(".*", True) >= 0

    def _all(self, move: Callable[[int], None], numbers: list[int]) -> float:
        pending = deque(numbers)

        def work() -> None:
            with suppress(IndexError):  # another thread took the last
                while True:
                    move(pending.popleft())

        return seconds(lambda: self._crew.run([work] * THREADS))

    def _moved(self, call: Callable[[str, int, int], int], answer: int, number: int) -> None:
        place = number % (self._memory.nbytes // self._nbytes)
        code = call(f"bare/{number}", self._memory.ctypes.data + place * self._nbytes, self._nbytes)
        assert code == answer, f"object {number}: {code}"

    def close(self) -> None:
        self._crew.close()
        self._store.close()


@contextmanager
def _cluster(program: str, directory: Path) -> Iterator[tuple[str, str]]:
    """The addresses of a master and of its metadata, with one node."""
    port, metadata = free_port(), free_port()
    words = [program, "-rpc_port", port, "-metrics_port", free_port(), "-enable_http_metadata_server=true"]
    words += ["-http_metadata_server_host=127.0.0.1", "-http_metadata_server_port", metadata]
    master, where = f"127.0.0.1:{port}", f"http://127.0.0.1:{metadata}/metadata"
    with ExitStack() as stack:
        log = stack.enter_context((directory / "mooncake.log").open("wb"))

        def start(*words: str, stdout: Any = log) -> subprocess.Popen[str]:
            process = subprocess.Popen(words, stdout=stdout, stderr=log, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        first = start(*words)
        until = time.monotonic() + PATIENCE
        while not (_answers(port) and _answers(metadata)):
            if first.poll() is not None or time.monotonic() > until:
                raise ConfigError(f"Mooncake did not start:\n{Path(log.name).read_text()[-2000:]}")
            time.sleep(0.05)  # another process starts, and sends no word
        node = start(sys.executable, "-c", _NODE, where, master, str(SEGMENT), stdout=subprocess.PIPE)
        assert node.stdout is not None
        if (first_line := node.stdout.readline().strip()) != "ready":
            raise ConfigError(f"a node of Mooncake did not start: {first_line}")
        yield master, where


def _answers(port: str) -> bool:
    with suppress(OSError), create_connection(("127.0.0.1", int(port)), 1):
        return True
    return False
