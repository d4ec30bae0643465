"""Finds the server of a key: the only one, the master that sentinels name, or a cluster's node by slot."""

from __future__ import annotations

import re
import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from lmtier.wire.resp import Argument, Error, to_bytes
from lmtier_backends.redis.connection import accepted
from lmtier_backends.sockets import Address, BadReply, printable_excerpt, seconds_left

SLOTS = 16384
MOST_NODES = 256
"""The most servers in one cluster: each may get connections."""
_LINE = 1024  # a redirection is shorter
_PORT = re.compile(b"[0-9]{1,5}")

Ask: TypeAlias = "Callable[[Address, Sequence[Argument], float], Any]"


class ServerMap:
    """One fixed server."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def server_of(self, key: bytes, until: float) -> Address:
        """The server of `key`."""
        return self._address

    def all_servers(self, until: float) -> Sequence[Address]:
        """The servers of all keys, as they are now."""
        return (self._address,)

    def redirection(self, error: Error, key: bytes, address: Address) -> tuple[Address, bool] | None:
        """Where to send a command that `address` refused, and whether to send ASKING first."""
        return None

    def invalidate(self, address: Address) -> None:
        """A call to `address` failed: find the server again before the next call."""


class _DiscoveredServers(ServerMap):
    """Servers that must be asked for. One of several sources is asked, and again after a failure."""

    def __init__(
        self, known_to: Iterable[Address], ask: Ask, keep_only: Callable[[Iterable[Address]], None]
    ) -> None:
        self._known_to = list(known_to)
        self._ask = ask
        self._keep_only = keep_only
        self._learning = threading.Lock()
        self._failed_source: Address | None = None
        """The last source that failed. It is asked last."""

    def _learn(self, args: Sequence[Argument], until: float, accept: Callable[[Address, Any], bool]) -> None:
        """Ask one source after the other until `accept` takes an answer. Each gets a share of the time."""
        last_error: OSError = ConnectionError("there is no server to ask")
        for tried, address in enumerate(sorted(self._known_to, key=lambda each: each == self._failed_source)):
            share = seconds_left(until) / (len(self._known_to) - tried)
            try:
                if accept(address, accepted(self._ask(address, args, time.monotonic() + share))):
                    return
                last_error = ConnectionError(f"{address} does not know")
            except OSError as error:
                last_error = error
                self._failed_source = address
        raise last_error

    @contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        """One thread asks. The others wait and use its result."""
        if not self._learning.acquire(timeout=seconds_left(until)):
            raise TimeoutError("the server did not answer in time")
        try:
            yield
        finally:
            self._learning.release()


class Sentinels(_DiscoveredServers):
    """The master, from the sentinels."""

    def __init__(
        self,
        sentinels: Iterable[Address],
        name: str,
        ask: Ask,
        keep_only: Callable[[Iterable[Address]], None],
    ) -> None:
        super().__init__(sentinels, ask, keep_only)
        self._name = name
        self._master: Address | None = None

    def server_of(self, key: bytes, until: float) -> Address:
        if (master := self._master) is not None:
            return master
        with self._turn(until):
            if self._master is None:
                self._learn(("SENTINEL", "get-master-addr-by-name", self._name), until, self._read)
            master = self._master
        if master is None:
            raise ConnectionError("the master was lost as soon as it was found")
        return master

    def all_servers(self, until: float) -> Sequence[Address]:
        self._master = None
        return (self.server_of(b"", until),)

    def invalidate(self, address: Address) -> None:
        if self._master == address:
            self._master = None

    def _read(self, sentinel: Address, reply: Any) -> bool:
        match reply:
            case [bytes(host), bytes(port)]:
                self._master = _address(host, port)
                self._keep_only([self._master])
                return True
        return False


class Cluster(_DiscoveredServers):
    """The nodes of a cluster, by slot."""

    def __init__(
        self, seeds: Iterable[Address], ask: Ask, keep_only: Callable[[Iterable[Address]], None]
    ) -> None:
        super().__init__(seeds, ask, keep_only)
        self._seeds = list(self._known_to)
        self._slots: list[Address | None] | None = None

    def server_of(self, key: bytes, until: float) -> Address:
        if (slots := self._slots) is None:
            with self._turn(until):
                if self._slots is None:
                    self._learn(("CLUSTER", "SLOTS"), until, self._read)
                slots = self._slots
        address = slots[slot_of(key)] if slots else None
        if address is None:
            self._slots = None
            raise ConnectionError("no node of the cluster has this slot")
        return address

    def all_servers(self, until: float) -> Sequence[Address]:
        """Slot by slot."""
        with self._turn(until):
            self._learn(("CLUSTER", "SLOTS"), until, self._read)
            slots = self._slots or ()
        homes = tuple(address for address in slots if address is not None)
        if len(homes) < SLOTS:
            raise ConnectionError("some slots are on no node of the cluster")
        return homes

    def redirection(self, error: Error, key: bytes, address: Address) -> tuple[Address, bool] | None:
        match error[:_LINE].split():
            case ["MOVED" | "ASK" as kind, _, target]:
                host, _, port = to_bytes(target).rpartition(b":")
                new_address = _address(host or address[0], port)
                if kind == "MOVED" and (slots := self._slots):
                    slots[slot_of(key)] = new_address
                return new_address, kind == "ASK"
        return None

    def invalidate(self, address: Address) -> None:
        self._slots = None
        self._failed_source = address

    def _read(self, source: Address, reply: Any) -> bool:
        if not isinstance(reply, list) or not reply:
            return False
        slots: list[Address | None] = [None] * SLOTS
        nodes: set[Address] = set()
        unassigned = SLOTS
        for slot_range in reply:
            match slot_range:
                case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                    node_host = host if isinstance(host, bytes) and host not in (b"", b"?") else source[0]
                    slot_count = last + 1 - first
                    node = _address(node_host, b"%d" % port)
                    slots[first : last + 1] = [node] * slot_count
                    nodes.add(node)
                    unassigned -= slot_count
                case _:
                    raise BadReply(f"not a run of slots: {printable_excerpt(slot_range)}")
            if unassigned < 0:
                raise BadReply("slots are on several nodes")
            if len(nodes) > MOST_NODES:
                raise BadReply(f"a cluster of more than {MOST_NODES} nodes")
        self._slots = slots
        self._known_to = [*nodes, *(seed for seed in self._seeds if seed not in nodes)]
        self._keep_only(nodes)  # a seed may be one of them with another name
        return True


def _address(host: bytes | str, port: bytes) -> Address:
    """Where a server says that another one is."""
    name = host if isinstance(host, str) else printable_excerpt(host)
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise BadReply(f"{name}:{printable_excerpt(port)} is no address")
    return name, int(port)


def slot_of(key: bytes) -> int:
    start = key.find(b"{") + 1
    end = key.find(b"}", start) if start else -1
    return crc_hqx(key[start:end] if end > start else key, 0) % SLOTS
