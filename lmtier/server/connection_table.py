"""The open connections, and the number of requests since the start."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from lmtier.server.commands import Caller
from lmtier.server.connection import Connection, HttpConnection
from lmtier.server.report import ClientRow

_RATE = 8
"""Samples of the number of requests, a quarter of a second apart."""


class ConnectedClient(NamedTuple):
    """A client that is connected now."""

    caller: Caller
    age: int
    """Seconds."""
    idle: int
    """Seconds without a byte."""


class ConnectionTable:
    def __init__(self) -> None:
        self.by_fd: dict[int, Connection | HttpConnection] = {}
        self.unknown: set[int] = set()
        """The descriptors of those who came over TCP and have shown no token."""
        self._strangers: dict[int, Connection | HttpConnection] = {}
        """Connections that may do nothing yet, the first one first."""
        self.accepted = 0
        """All connections so far, including refused ones."""
        self._asked = 0  # by closed connections
        self._samples: deque[tuple[float, int]] = deque(maxlen=_RATE)

    def __len__(self) -> int:
        return len(self.by_fd)

    def __iter__(self) -> Iterator[Connection | HttpConnection]:
        """The connections that are open now. They may be removed during the iteration."""
        return iter(list(self.by_fd.values()))

    def add(self, connection: Connection | HttpConnection) -> None:
        self.by_fd[connection.fd] = connection

    def replace(self, connection: Connection, successor: HttpConnection) -> None:
        """The same client, which speaks another protocol."""
        self.by_fd[connection.fd] = successor
        if connection.fd in self._strangers:
            self._strangers[connection.fd] = successor

    def set_trust(self, connection: Connection | HttpConnection, *, is_known: bool) -> None:
        """What it has shown may have changed."""
        (self.unknown.discard if is_known else self.unknown.add)(connection.fd)
        if connection.is_unauthenticated:
            self._strangers.setdefault(connection.fd, connection)
        else:
            self._strangers.pop(connection.fd, None)

    @property
    def oldest_unauthenticated(self) -> Connection | HttpConnection | None:
        """The first of those who may do nothing yet."""
        return next(iter(self._strangers.values()), None)

    def remove(self, connection: Connection | HttpConnection) -> None:
        del self.by_fd[connection.fd]
        self.unknown.discard(connection.fd)
        self._strangers.pop(connection.fd, None)
        self._asked += connection.caller.command_count

    @property
    def request_count(self) -> int:
        """The number of commands and pages."""
        return self._asked + sum(each.caller.command_count for each in self)

    def sample(self) -> None:
        """Note how many requests there were, for `rate`."""
        self._samples.append((time.monotonic(), self.request_count))

    @property
    def rate(self) -> float:
        """Requests a second, over the last seconds."""
        if len(self._samples) < 2:
            return 0.0
        (first_at, count_before), (last_at, count_after) = self._samples[0], self._samples[-1]
        return (count_after - count_before) / max(1e-3, last_at - first_at)

    @property
    def waiting(self) -> int:
        """The number of clients whose command waits for a tier."""
        return sum(each.is_waiting for each in self)

    def find(self, number: int) -> Connection | HttpConnection | None:
        """The connection with this number."""
        return next((connection for connection in self if connection.caller.id == number), None)

    def connected_clients(self) -> list[ConnectedClient]:
        now = time.monotonic()
        return [
            ConnectedClient(each.caller, int(now - each.opened_at), int(now - each.last_byte_at))
            for each in self
        ]

    def of_kind(self, kind: str) -> int:
        return sum(each.caller.kind == kind for each in self)

    def clients(self) -> list[ClientRow]:
        now = time.monotonic()
        return [
            {
                "id": connection.caller.id,
                "name": connection.caller.name,
                "kind": connection.caller.kind,
                "address": connection.caller.address,
                "age": now - connection.opened_at,
                "asked": connection.caller.command_count,
                "received": connection.received,
                "sent": connection.sent,
            }
            for connection in self
        ]
