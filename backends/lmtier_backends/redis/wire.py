"""One connection to a Redis: commands, replies, and payloads directly from and into memory, with deadlines.

Each call gets `until`, in time.monotonic(), and ends by then whatever the other side does; single bytes do
not extend it. On a plain socket the kernel keeps that time (SO_SNDTIMEO and SO_RCVTIMEO cover a whole call
with MSG_WAITALL), so a payload is one system call and takes the GIL once.

After any exception the connection must be closed: the next bytes may belong to an earlier request.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from lmtier import forks
from lmtier.wire.replies import Replies
from lmtier.wire.resp import (
    CRLF,
    INCOMPLETE,
    Argument,
    Buffer,
    Error,
    Incomplete,
    ProtocolError,
    pieces,
    to_bytes,
)

T = TypeVar("T")
Address: TypeAlias = "tuple[str, int] | str"
"""Host and port, or the path of a Unix socket."""

_BUFFER = 64 << 10
_SHORT = 16 << 10  # longer pieces of a command are sent without a copy
_IDLE = 60  # seconds; firewalls forget a silent connection after some minutes
_PIECES = 512  # the most pieces for one sendmsg
_TIMEVAL = struct.Struct("@ll")


class ErrorReply(OSError):
    """The server answered with an error. The connection stays usable."""

    def __init__(self, reply: Error) -> None:
        full = reply.code == "OOM"
        super().__init__(errno.ENOSPC if full else errno.EPROTO, to_bytes(reply).decode("utf-8", "replace"))


def accepted(reply: Any) -> Any:
    """Returns the reply; raises an error reply."""
    if isinstance(reply, Error):
        raise ErrorReply(reply)
    return reply


class BadReply(ConnectionError):
    """A reply that no Redis sends."""


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


NOBODY = Login()


def left(until: float) -> float:
    """Seconds until then. Raises TimeoutError if there are none."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the server did not answer in time")
    return seconds


def _joined(pieces: Sequence[Buffer]) -> list[Buffer]:
    joined: list[Buffer] = []
    short: list[Buffer] = []
    for piece in pieces:
        if len(piece) < _SHORT:
            short.append(piece)
        else:
            joined += (b"".join(short), piece)
            short = []
    return [*joined, b"".join(short)] if short else joined


def dial(address: Address, until: float, login: Login = NOBODY, tls: ssl.SSLContext | None = None) -> Wire:
    """A connection that is logged in. Raises OSError."""
    sock = _connect(address, until)
    try:
        if tls is not None:
            host = address if isinstance(address, str) else address[0]
            sock.settimeout(left(until))
            sock = tls.wrap_socket(sock, server_hostname=host)
            forks.close_in_child(sock)
        wire = Wire(sock)
        said = login.commands()
        if said:
            wire.send([piece for each in said for piece in pieces(*each)], until)
            for reply in wire.replies(len(said), until):
                if isinstance(reply, Error):
                    # Some servers repeat the password, or its beginning, in errors.
                    secret = login.password[:8]
                    raise ErrorReply(Error(reply.partition(secret)[0]) if secret else reply)
    except BaseException:
        sock.close()
        raise
    return wire


def _connect(address: Address, until: float) -> socket.socket:
    if isinstance(address, str):
        places: list[tuple[socket.AddressFamily, object]] = [(socket.AF_UNIX, address)]
    else:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        places = [(family, place) for family, *_, place in found]
    problem: OSError = ConnectionError(f"{address} is no address")
    for tried, (family, place) in enumerate(places):
        sock = socket.socket(family)
        forks.close_in_child(sock)
        try:
            # So that a silent address leaves time for the next one.
            sock.settimeout(left(until) / (len(places) - tried))
            sock.connect(place)  # type: ignore[arg-type]  # a path or a pair, as the family wants it
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise problem


class Wire:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        if not self._is_tls:
            sock.settimeout(None)
        self._buffer = memoryview(bytearray(_BUFFER))
        self._replies = Replies()
        self._crlf = memoryview(bytearray(2))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def is_closed(self) -> bool:
        return self._sock.fileno() < 0

    def is_stale(self) -> bool:
        """Whether an idle connection was closed, or has unexpected bytes."""
        return self._replies.has_more or bool(self._poll.poll(0))

    def close(self) -> None:
        self._sock.close()

    # ---- sending

    def send(self, pieces: Sequence[Buffer], until: float) -> None:
        """Send whole commands, from `command`; those of a pipeline one after the other."""
        rest = [memoryview(piece) for piece in _joined(pieces)]
        if self._is_tls:
            for piece in rest:
                self._sock.settimeout(left(until))
                self._sock.sendall(piece)
            return
        while rest:
            self._limit(socket.SO_SNDTIMEO, until)
            try:
                sent = self._sock.sendmsg(rest[:_PIECES])
            except BlockingIOError:
                raise TimeoutError("the server takes no more bytes") from None
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    # ---- receiving

    def reply(self, until: float) -> Any:
        """The next reply, a small one."""
        return self.replies(1, until)[0]

    def replies(self, count: int, until: float) -> list[Any]:
        """The next `count` replies, at least one; errors are among them."""
        self._replies.expect(count)
        found: Any = self._next(self._replies.next, _BUFFER, until)
        return list(found)

    def bulk(self, into: Sequence[memoryview], expected: int, until: float) -> int | Error | None:
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
        views, rest = [], length
        for view in into:
            views.append(view[:rest])
            rest -= len(views[-1])
        self._fill([*views, self._crlf], until)
        return length

    def _next(self, read: Callable[[], T | Incomplete], most: int, until: float) -> T:
        """The result of `read` once enough bytes have arrived.

        The first receive takes at most `most` bytes.
        """
        try:
            while (found := read()) is INCOMPLETE:
                got = self._receive(self._buffer[:most], until)
                self._replies.feed(self._buffer[:got])
                most = 1 if most < _BUFFER else most
        except ProtocolError as error:
            raise BadReply(f"not a reply: {error}") from None
        return found

    def _fill(self, views: Sequence[memoryview], until: float) -> None:
        """Fill `views` with the next bytes. The last of them must be the end of a line."""
        rest = [view for view in views if view]
        while rest:
            if self._replies.has_more:
                got = self._replies.take(rest[0])
            elif self._is_tls:
                got = self._receive(rest[0], until)
            else:
                got = self._receive_all(rest, until)
            while rest and got >= len(rest[0]):
                got -= len(rest.pop(0))
            if got:
                rest[0] = rest[0][got:]
        if bytes(self._crlf) != CRLF:
            raise BadReply(f"a string ends in {bytes(self._crlf)!r}")

    def _receive(self, view: memoryview, until: float) -> int:
        """Receive at least one byte."""
        if self._is_tls:
            self._sock.settimeout(left(until))
        else:
            self._limit(socket.SO_RCVTIMEO, until)
        try:
            got = self._sock.recv_into(view)
        except BlockingIOError:
            raise TimeoutError("the server did not answer in time") from None
        return self._some(got)

    def _receive_all(self, views: Sequence[memoryview], until: float) -> int:
        """Receive everything in one call. It is less only after a timeout or a signal."""
        self._limit(socket.SO_RCVTIMEO, until)
        try:
            got = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("the server stopped in the middle of a reply") from None
        return self._some(got)

    @staticmethod
    def _some(got: int) -> int:
        if not got:
            raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
        return got

    def _limit(self, option: int, until: float) -> None:
        seconds = left(until)
        whole = int(seconds)
        # A timeout of zero would mean no limit.
        self._sock.setsockopt(
            socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, max(1000, int((seconds - whole) * 1e6)))
        )
