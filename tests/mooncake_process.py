"""A real Mooncake Store: a master, and nodes that lend their memory, each in a process."""

from __future__ import annotations

import ctypes
import mmap
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lmtier.format.layout import Name
from tests.redis_process import free_port
from tests.s3_process import program
from tests.server.process import PATIENCE, until

_NODE = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
host, metadata, master, room = sys.argv[1:]
code = store.setup(host, metadata, int(room), 16 << 20, "tcp", "", master)
print(code, flush=True)
threading.Event().wait()
"""


class MooncakeServers:
    def __init__(
        self,
        folder: Path,
        nodes: int = 1,
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
        room: int = 256 << 20,
    ) -> None:
        """`inside`: the words before a command that run it on another host. `room`: bytes of each node."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log"
        self.host, self._inside, self._count, self._room = host, inside, nodes, room
        self.port, self._http, self._metrics = free_port(), free_port(), free_port()
        self.metadata = f"http://{host}:{self._http}/metadata"
        self.nodes: list[subprocess.Popen[str]] = []
        self.start()

    def start(self) -> None:
        self.start_master()
        self.nodes = [self._node() for _ in range(self._count)]

    def start_master(self) -> None:
        here = ["-rpc_port", str(self.port), "-metrics_port", str(self._metrics)]
        here += ["-enable_http_metadata_server=true", "-http_metadata_server_host=" + self.host]
        here += ["-http_metadata_server_port", str(self._http)]
        command = [*self._inside, program("mooncake_master", "mooncake-transfer-engine-non-cuda"), *here]
        with self._log.open("ab") as log:
            self.master = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._answers)

    def _answers(self) -> bool:
        assert self.master.poll() is None, self._log.read_text()[-4000:]
        for port in (self.port, self._http):
            with suppress(OSError), socket.create_connection((self.host, port), 1):
                continue
            return False
        return True

    def _node(self) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", _NODE, self.host, self.metadata, f"{self.host}:{self.port}"]
        words.append(str(self._room))
        with self._log.open("ab") as log:
            node = subprocess.Popen([*self._inside, *words], stdout=subprocess.PIPE, stderr=log, text=True)
        assert node.stdout is not None
        if (said := node.stdout.readline().strip()) != "0":
            pytest.fail(f"a node did not start: {said!r} {self._log.read_text()[-4000:]}")
        return node

    def url(self, query: str = "") -> str:
        return f"mooncake://{self.host}:{self.port}?metadata={self.metadata}&{query}".rstrip("&")

    def stored(self) -> list[str]:
        """The names of everything."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/get_all_keys") as reply:
            return str(reply.read().decode()).split()

    def kill(self) -> None:
        self.master.kill()
        self.master.wait(PATIENCE)
        for node in self.nodes:
            node.kill()
            node.communicate()


@contextmanager
def mooncake(folder: Path, nodes: int = 1) -> Iterator[MooncakeServers]:
    servers = MooncakeServers(folder, nodes)
    try:
        yield servers
    finally:
        servers.kill()


class BackDoor:
    """What is stored, without the tier: a client with its own memory."""

    def __init__(self, servers: MooncakeServers) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        master = f"127.0.0.1:{servers.port}"
        assert self._store.setup("127.0.0.1", servers.metadata, 0, 16 << 20, "tcp", "", master) == 0
        self._servers = servers

    def put(self, key: str, data: bytes) -> None:
        self._store.remove(key, True)
        memory = mmap.mmap(-1, max(4096, len(data)))
        memory[: len(data)] = data
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert self._store.register_buffer(address, len(memory)) == 0
        try:
            assert self._store.put_from(key, address, len(data)) == 0
        finally:
            self._store.unregister_buffer(address)

    def objects(self, prefix: str) -> dict[Name, bytes]:
        found = {}
        for key in self._servers.stored():
            if key.startswith(prefix):
                name = Name.parse(key.removeprefix(prefix))
                assert name is not None, key
                found[name] = bytes(self._store.get(key))
        return found

    def close(self) -> None:
        self._store.close()
