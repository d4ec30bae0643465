"""Objects in a Mooncake Store, shared by many hosts. Each call has a deadline, which the library has not.

    <namespace>/<key>.<shard>     header page, then payload: one object of the format, one of Mooncake

Mooncake's client blocks for 30 s on a node or a master that stands still, and for 90 s if there is none at
start. So its calls run on lanes (lanes.py), and the client is set up by a separate thread. A dead node fails
a call (-800) until the master drops the node, although other nodes may have replicas. The client picks one
anew for each call, so a call is repeated before it counts as failed.
"""

from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from lmtier.errors import TierError, log
from lmtier.format.keys import is_value
from lmtier.format.layout import Name
from lmtier.format.objects import PAGE, Selector, padded
from lmtier.threads import start_thread
from lmtier.tiers.base import Item, Stat
from lmtier_backends.mooncake.call_threads import CallThread, CallThreads
from lmtier_backends.options import TimedTier, require, require_common_options

PORT = 50051
METADATA_PORT = 8080
_NO_ROOM = -200
_TOO_LONG = -600
_ABSENT = -704
_MOVED_NOTHING = -800
_ATTEMPTS = 3
_PAUSE = 0.5
"""Seconds between two attempts to reach a master."""

_need = partial(require, "mooncake")


class MooncakeError(OSError):
    def __init__(self, what: str, code: int) -> None:
        number = errno.ENOSPC if code == _NO_ROOM else errno.EPROTO
        super().__init__(number, f"Mooncake: {what} failed with code {code}")


class MooncakeTier(TimedTier):
    """mooncake://master[:port]?metadata=http://host:8080/metadata"""

    def __init__(
        self,
        location: str,
        *,
        metadata: str = "",
        protocol: str = "tcp",
        device: str = "",
        local: str = "",
        replicas: int = 1,
        segment: int = 0,
        namespace: str = "default",
        connections: int = 4,
        deadline: float = 2.0,
    ) -> None:
        found = re.fullmatch(r"([^:/@\s]+)(?::(\d{1,5}))?", location)
        _need(found is not None, "which master? write it like mooncake://host:50051")
        assert found is not None
        self._master = (found[1], int(found[2] or PORT))
        _need(0 < self._master[1] < 65536, f"{location!r} is not a host and port")
        _need(protocol in ("tcp", "rdma"), f"protocol={protocol!r}: tcp or rdma")
        require_common_options("mooncake", namespace, connections, deadline)
        _need(replicas >= 1, f"replicas={replicas}: must be 1 or more")
        try:
            self._library: Any = import_module("mooncake.store")
        except ImportError as error:
            raise TierError(
                f"mooncake tier: {error}; pip install 'lmtier[mooncake]' and apt-get install libibverbs1"
            ) from None
        self._where = f"mooncake://{self._master[0]}:{self._master[1]} namespace {namespace}"
        self._prefix = f"{namespace}/"
        self._deadline = deadline
        self._settings = (
            local,
            metadata or f"http://{self._master[0]}:{METADATA_PORT}/metadata",
            (segment, 16 << 20, protocol, device),
        )
        self._replicas = self._library.ReplicateConfig()
        self._replicas.replica_num = replicas
        self._client: Any = None
        self._ready, self._closed = threading.Event(), threading.Event()
        self._lanes = CallThreads("mooncake", 2 * connections + 2)
        super().__init__("mooncake", connections, connections, askers=1)
        self._dialer = start_thread("lmtier-mooncake-setup", self._dial)
        if not self._ready.wait(deadline):
            log.warning("lmtier: %s cannot be used now, going on without it", self._where)

    def __repr__(self) -> str:
        return f"<MooncakeTier {self._where}>"

    # ---- the functions of a tier

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        until, key, client = self._call_deadline(), self._key(item.name), self._connected_client()
        room = sum(map(len, buffers))
        with self._lanes.lend(until) as lane:
            self._hold(lane, room, until)
            if len(buffers) == 1:
                got = lane.run(lambda: self._read_start(key, lane.address, room), until)
            else:
                got = lane.run(lambda: _with_retries(lambda: client.get_into(key, lane.address, room)), until)
            if got == _ABSENT:
                raise FileNotFoundError(item.name)
            if got == _TOO_LONG:
                return room + 1
            if got < 0:
                raise MooncakeError("a read", got)
            offset = 0
            for buffer in buffers:
                count = min(len(buffer), got - offset)
                _copy(buffer[:count], lane.memory[offset : offset + count])
                offset += count
            return got

    def _read_start(self, key: str, address: int, nbytes: int) -> int:
        """Read the first bytes. An object that is shorter has no header, so only its length is returned."""
        ranges = [address], [[key]], [[[0]]], [[[0]]], [[[nbytes]]]
        got = _with_retries(lambda: int(self._connected_client().get_into_ranges(*ranges)[0][0][0]))
        return int(self._connected_client().get_size(key)) if got == _TOO_LONG else got

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        until, key, client = self._call_deadline(), self._key(item.name), self._connected_client()
        nbytes = sum(map(len, buffers))
        if item.replaces is not None:
            self.delete([item.replaces])
        with self._lanes.lend(until) as lane:
            self._hold(lane, nbytes, until)
            at = 0
            for buffer in buffers:
                _copy(lane.memory[at : at + len(buffer)], buffer)
                at += len(buffer)
            # A chunk of KV stays as it is: another host may read it. Only values are overwritten.
            put = client.upsert_from if is_value(item.name.key) else client.put_from
            code = lane.run(
                lambda: _with_retries(lambda: put(key, lane.address, nbytes, self._replicas)), until
            )
        if code:
            raise MooncakeError("a store", code)

    def delete(self, names: Sequence[Name]) -> None:
        until, keys, client = (
            self._call_deadline(),
            [self._key(name) for name in names],
            self._connected_client(),
        )
        if not keys:
            return
        with self._lanes.lend(until) as lane:
            codes = lane.run(lambda: client.batch_remove(keys, True), until)
        if error_codes := [code for code in codes if code not in (0, _ABSENT)]:
            raise MooncakeError("a deletion", error_codes[0])

    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        until, keys, client = (
            self._call_deadline(),
            [self._key(name) for name in names],
            self._connected_client(),
        )

        def ask() -> dict[str, int]:
            # The second question is about sizes. Its library logs an error for each name that is missing.
            codes = client.batch_is_exist(keys)
            if error_codes := [code for code in codes if code < 0]:
                raise MooncakeError("a lookup", error_codes[0])
            existing = [key for key, code in zip(keys, codes, strict=True) if code]
            descriptors = client.batch_get_replica_desc(existing) if existing else {}
            return {key: self._size(replicas) for key, replicas in descriptors.items()}

        with self._lanes.lend(until) as lane:
            sizes = lane.run(ask, until) if keys else {}
        return {
            name: Stat(padded(sizes[key] - PAGE))
            for name, key in zip(names, keys, strict=True)
            if sizes.get(key, 0) > PAGE
        }

    def clear(self, selector: Selector) -> Iterator[None]:
        """The master does it, in one call."""
        if not selector.is_prefix:
            raise OSError(
                errno.ENOSYS, "Mooncake cannot list its objects, so it cannot be searched: clear all of it"
            )
        until, store = self._call_deadline(), self._connected_client()
        pattern = f"^{re.escape(self._prefix)}{selector.prefix.hex()}.*"
        with self._lanes.lend(until) as lane:
            count = lane.run(lambda: store.remove_by_regex(pattern, True), until)
        if count < 0:
            raise MooncakeError("a clear", count)
        yield

    def close(self) -> None:
        self._closed.set()
        super().close()
        self._dialer.join(_PAUSE)
        # A call that still runs needs the client, so then it stays.
        if self._lanes.close() and (store := self._client) is not None:
            self._client = None
            closer = start_thread("lmtier-mooncake-close", store.close)
            closer.join(max(self.patience, 1.0))

    # ---- what they stand on

    def _key(self, name: Name) -> str:
        return f"{self._prefix}{name}"

    def _connected_client(self) -> Any:
        if (store := self._client) is None:
            raise ConnectionError("Mooncake: no master was reached yet")
        return store

    def _hold(self, lane: CallThread, nbytes: int, until: float) -> None:
        """Have registered memory for so much. The library may have to ask its master."""
        if len(lane.memory) < nbytes:
            lane.run(lambda: self._register(lane, nbytes), until)

    def _register(self, lane: CallThread, nbytes: int) -> None:
        store = self._connected_client()
        if len(lane.memory):
            store.unregister_buffer(lane.address)
            lane.drop_memory()
        lane.take_memory(nbytes)
        if code := store.register_buffer(lane.address, len(lane.memory)):
            lane.drop_memory()
            raise MooncakeError("registering memory", code)

    def _size(self, replicas: Sequence[Any]) -> int:
        complete = self._library.ReplicaStatus.COMPLETE
        sizes = [
            int(replica.get_memory_descriptor().buffer_descriptor.size)
            for replica in replicas
            if replica.status == complete and replica.is_memory_replica()
        ]
        return max(sizes, default=0)

    def _dial(self) -> None:
        """Set up the client as soon as there is a master."""
        local, metadata, (segment, buffer_bytes, protocol, device) = self._settings
        master = "{}:{}".format(*self._master)
        while not self._closed.is_set():
            with suppress(OSError):
                # The library would try for 90 s.
                with socket.create_connection(self._master, self._deadline) as probe:
                    local_host = local or str(probe.getsockname()[0])
                store = self._library.MooncakeDistributedStore()
                code = store.setup(local_host, metadata, segment, buffer_bytes, protocol, device, master)
                if not code:
                    self._client = store
                    self._ready.set()
                    return
                log.warning("lmtier: %s: its client could not be set up: code %d", self._where, code)
            self._closed.wait(_PAUSE)


def _with_retries(call: Callable[[], int]) -> int:
    """The first result that is not the failure of one node, or the last one."""
    for _ in range(_ATTEMPTS):
        if (code := call()) != _MOVED_NOTHING:
            break
    return code


def _copy(target: memoryview, source: memoryview) -> None:
    """Without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
