"""One connection to a Redis: commands, replies, and payloads directly from and into memory."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lmtier.wire.reply_reader import ReplyReader
from lmtier.wire.resp import (
    CRLF,
    INCOMPLETE,
    Argument,
    Error,
    Incomplete,
    ProtocolError,
    encode_command_parts,
    to_bytes,
)
from lmtier_backends.sockets import Address, BadReply, TimedSocket, advance, connect, printable_excerpt

T = TypeVar("T")
_BUFFER = 64 << 10
_VALUES = 1 << 17
"""The most in the lists of one answer. The slots of a large cluster are some thousands."""


class ErrorReply(OSError):
    """The server answered with an error. The connection stays usable."""

    def __init__(self, reply: Error) -> None:
        full = reply.code == "OOM"
        super().__init__(errno.ENOSPC if full else errno.EPROTO, printable_excerpt(to_bytes(reply)))


def accepted(reply: Any) -> Any:
    """Returns the reply; raises an error reply."""
    if isinstance(reply, Error):
        raise ErrorReply(reply)
    return reply


@dataclass(frozen=True, slots=True)
class Login:
    """The credentials and the database of a new connection."""

    username: str = ""
    password: str = ""
    db: int = 0

    def __repr__(self) -> str:
        return f"Login({self.username!r}, db={self.db})"

    def commands(self) -> list[tuple[Argument, ...]]:
        said: list[tuple[Argument, ...]] = []
        if self.username:  # also without a password, so that the server uses this user and no other
            said.append(("AUTH", self.username, self.password))
        elif self.password:
            said.append(("AUTH", self.password))
        if self.db:
            said.append(("SELECT", self.db))
        return said


def dial(address: Address, until: float, login: Login, tls: ssl.SSLContext | None) -> RedisSocket:
    """A connection that is logged in. Raises OSError."""
    sock = connect(address, until, tls)
    try:
        wire = RedisSocket(sock)
        commands = login.commands()
        if commands:
            wire.send([piece for command in commands for piece in encode_command_parts(*command)], until)
            for reply in wire.read_replies(len(commands), until):
                if isinstance(reply, Error):
                    # Some servers repeat the password, or its beginning, in errors.
                    secret = login.password[:8]
                    raise ErrorReply(Error(reply.partition(secret)[0]) if secret else reply)
    except BaseException:
        sock.close()
        raise
    return wire


class RedisSocket(TimedSocket):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._buffer = memoryview(bytearray(_BUFFER))
        self._replies = ReplyReader(values=_VALUES)
        self._crlf = memoryview(bytearray(2))

    def is_stale(self) -> bool:
        return self._replies.has_more or super().is_stale()

    def read_reply(self, until: float) -> Any:
        """The next reply, a small one."""
        return self.read_replies(1, until)[0]

    def read_replies(self, count: int, until: float) -> list[Any]:
        """The next `count` replies, at least one; errors are among them."""
        self._replies.expect(count)
        found: Any = self._next(self._replies.next, _BUFFER, until)
        return list(found)

    def read_string(self, into: Sequence[memoryview], expected: int, until: float) -> int | Error | None:
        """Read the next reply, a string, into `into`. Returns its length, or None if it does not exist.

        `expected` is its likely length, only for speed. A string longer than `into` is not read, and the
        connection is closed.
        """
        length = self._next(self._replies.string, 3 + len(str(expected)), until)
        if not isinstance(length, int):
            return length
        if length > sum(map(len, into)):
            self.close()
            return length
        targets, remaining = [], length
        for view in into:
            targets.append(view[:remaining])
            remaining -= len(targets[-1])
        self._fill([*targets, self._crlf], until)
        return length

    def _next(self, parse: Callable[[], T | Incomplete], receive_limit: int, until: float) -> T:
        """The result of `parse` once enough bytes have arrived.

        The first receive takes at most `receive_limit` bytes.
        """
        try:
            while (reply := parse()) is INCOMPLETE:
                received = self.receive(self._buffer[:receive_limit], until)
                self._replies.feed(self._buffer[:received])
                receive_limit = 1 if receive_limit < _BUFFER else receive_limit
        except ProtocolError as error:
            raise BadReply(f"not a reply: {error}") from None
        return reply

    def _fill(self, views: Sequence[memoryview], until: float) -> None:
        """Fill `views` with the next bytes. The last of them must be the end of a line."""
        rest = [view for view in views if view]
        while rest:
            got = self._replies.take(rest[0]) if self._replies.has_more else self.receive_all(rest, until)
            advance(rest, got)
        if bytes(self._crlf) != CRLF:
            raise BadReply(f"a string ends in {bytes(self._crlf)!r}")
