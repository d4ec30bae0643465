"""The open connections, and the number of requests since the start."""

from __future__ import annotations

import time
from collections.abc import Iterator

from lmtier.server.commands import Caller
from lmtier.server.connection import Connection, HttpConnection
from lmtier.server.report import Client


class Roster:
    def __init__(self) -> None:
        self.by_fd: dict[int, Connection | HttpConnection] = {}
        self.accepted = 0
        """All connections so far, including refused ones."""
        self._asked = 0  # by closed connections

    def __len__(self) -> int:
        return len(self.by_fd)

    def __iter__(self) -> Iterator[Connection | HttpConnection]:
        """The connections that are open now. They may be removed during the iteration."""
        return iter(list(self.by_fd.values()))

    def came(self, connection: Connection | HttpConnection) -> None:
        self.by_fd[connection.fd] = connection

    def left(self, connection: Connection | HttpConnection) -> None:
        del self.by_fd[connection.fd]
        self._asked += connection.caller.asked

    @property
    def asked(self) -> int:
        """The number of commands and pages."""
        return self._asked + sum(each.caller.asked for each in self)

    def callers(self) -> list[Caller]:
        return [each.caller for each in self]

    def of_kind(self, kind: str) -> int:
        return sum(each.caller.kind == kind for each in self)

    def clients(self) -> list[Client]:
        now = time.monotonic()
        return [
            {
                "id": each.caller.id,
                "name": each.caller.name,
                "kind": each.caller.kind,
                "address": each.caller.address,
                "age": now - each.began,
                "asked": each.caller.asked,
                "received": each.received,
                "sent": each.sent,
            }
            for each in self
        ]
