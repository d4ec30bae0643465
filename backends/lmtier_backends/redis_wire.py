"""One connection to a Redis: commands out, replies in, payloads straight from and into memory, in time.

Each call gets `until`, in time.monotonic(), and ends by then whatever the other side does: a byte now
and then buys it nothing. On a plain socket the kernel keeps that time (SO_SNDTIMEO and SO_RCVTIMEO run
over a whole call with MSG_WAITALL), so a payload is one system call and takes the GIL once.

After any exception the connection is of no use: what arrives next may belong to what was asked before.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lmtier import forks

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Argument: TypeAlias = "Buffer | str | int | tuple[Buffer, ...]"
"""Of a command; a tuple is one argument in pieces."""
Address: TypeAlias = "tuple[str, int] | str"
"""Host and port, or the path of a Unix socket."""
Reply: TypeAlias = "bytes | int | Refused | list[Reply] | None"

CRLF = b"\r\n"
_BUFFER = 64 << 10
_INLINE = 16 << 10  # a longer piece of a command goes out from where it lies
_LONGEST_LINE = 16 << 10
_LONGEST_REPLY = 1 << 20
_DEEPEST = 6
_IDLE = 60  # seconds; firewalls forget a silent connection after some minutes
_PIECES = 512  # that sendmsg takes at once
_TIMEVAL = struct.Struct("@ll")


class Refused(OSError):
    """What the server said instead of doing it; a reply, so the connection goes on."""

    def __init__(self, text: str) -> None:
        full = text.startswith("OOM ")
        super().__init__(errno.ENOSPC if full else errno.EPROTO, text)
        self.text = text

    def is_about(self, *words: str) -> bool:
        return self.text.split(" ", 1)[0] in words


class BadReply(ConnectionError):
    """Not what a Redis says."""


@dataclass(frozen=True, slots=True)
class Login:
    """What a new connection says first."""

    username: str = ""
    password: str = ""
    db: int = 0

    def __repr__(self) -> str:
        return f"Login({self.username!r}, db={self.db})"

    def commands(self) -> list[tuple[Argument, ...]]:
        said: list[tuple[Argument, ...]] = []
        if self.username:  # also without a password: who needs none must not be taken for somebody else
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


def command(*args: Argument) -> list[Buffer]:
    """`args` as they go over the wire, short pieces put together."""
    pieces: list[Buffer] = []
    text = b"*%d\r\n" % len(args)
    for arg in args:
        if not isinstance(arg, bytes) and isinstance(arg, (str, int)):
            arg = str(arg).encode("utf-8", "surrogateescape")  # a password need not be text
        if isinstance(arg, bytes) and len(arg) < _INLINE:  # as most are
            text += b"$%d\r\n%b\r\n" % (len(arg), arg)
            continue
        parts = arg if isinstance(arg, tuple) else (arg,)
        text += b"$%d\r\n" % sum(map(len, parts))
        for part in parts:
            if len(part) < _INLINE:
                text += part
            else:
                pieces += (text, part)
                text = b""
        text += CRLF
    return [*pieces, text]


def _joined(pieces: Sequence[Buffer]) -> list[Buffer]:
    joined: list[Buffer] = []
    short: list[Buffer] = []
    for piece in pieces:
        if len(piece) < _INLINE:
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
            wire.send([piece for each in said for piece in command(*each)], until)
            for _ in said:
                if isinstance(reply := wire.reply(until), Refused):
                    secret = login.password[:8]  # some repeat what they were told, or the beginning of it
                    raise Refused(reply.text.partition(secret)[0] if secret else reply.text)
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
            sock.settimeout(left(until) / (len(places) - tried))  # one that is silent leaves some to the next
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
        self._raw = bytearray(_BUFFER)
        self._buffer = memoryview(self._raw)
        self._at = self._end = 0  # what lies between has arrived and was not read
        self._crlf = memoryview(bytearray(2))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def is_closed(self) -> bool:
        return self._sock.fileno() < 0

    def is_stale(self) -> bool:
        """Whether an idle connection ended meanwhile, or says something that nobody asked for."""
        return self._at < self._end or bool(self._poll.poll(0))

    def close(self) -> None:
        self._sock.close()

    # ---- out

    def send(self, pieces: Sequence[Buffer], until: float) -> None:
        """Whole commands, from `command`; those of a pipeline one after the other."""
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

    # ---- in

    def reply(self, until: float, depth: int = 0) -> Reply:
        """The next reply, small ones only."""
        line = self._line(until)
        mark, text = line[:1], line[1:]
        if mark == b"+":
            return text
        if mark == b"-":
            return Refused(text.decode("utf-8", "replace"))
        number = _number(text)
        if mark == b":":
            return number
        if number == -1 and mark in b"$*":
            return None
        if mark == b"$" and 0 <= number <= _LONGEST_REPLY:
            end = self._at + number
            if end + 2 <= self._end and self._raw.startswith(CRLF, end):  # most are all here
                start, self._at = self._at, end + 2
                return bytes(self._raw[start:end])
            into = memoryview(bytearray(number))
            self._fill([into, self._crlf], until)
            return bytes(into)
        if mark == b"*" and 0 <= number <= _LONGEST_REPLY and depth < _DEEPEST:
            return [self.reply(until, depth + 1) for _ in range(number)]
        raise BadReply(f"not a reply: {line[:40]!r}")

    def bulk(self, into: Sequence[memoryview], expected: int, until: float) -> int | Refused | None:
        """The next reply, a string, into `into`; its length, None if there is none.

        `expected` is its likely length, for speed alone. One that is longer than `into` is not read, and
        the connection is closed.
        """
        line = self._line(until, 3 + len(str(expected)))
        if line[:1] == b"-":
            return Refused(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise BadReply(f"not a string: {line[:40]!r}")
        length = _number(line[1:])
        if length == -1:
            return None
        if length < 0:
            raise BadReply(f"not a length: {line[:40]!r}")
        if length > sum(map(len, into)):
            self.close()
            return length
        views, rest = [], length
        for view in into:
            views.append(view[:rest])
            rest -= len(views[-1])
        self._fill([*views, self._crlf], until)
        return length

    def _line(self, until: float, most: int = _BUFFER) -> bytes:
        """The next line. At first not more than `most` bytes are taken off the socket."""
        end = self._raw.find(CRLF, self._at, self._end)
        if end > self._at and self._raw.find(b"\n", self._at, end) < 0:  # most are all here
            start, self._at = self._at, end + 2
            return bytes(self._raw[start:end])
        line = b""
        while True:
            if self._at == self._end:
                self._at = 0
                self._end = self._receive(self._buffer[:most], until)
                most = 1 if most < _BUFFER else most
            start, self._at = self._at, self._raw.find(b"\n", self._at, self._end) + 1 or self._end
            line += self._raw[start : self._at]
            if line.endswith(CRLF) and len(line) > 2:
                return line[:-2]
            if line.endswith(b"\n") or len(line) > _LONGEST_LINE:
                raise BadReply(f"not a line of a reply: {line[:40]!r}")

    def _fill(self, views: Sequence[memoryview], until: float) -> None:
        """The next bytes, as many as `views` take; the last of them must be an end of a line."""
        rest = [view for view in views if view]
        while rest:
            if self._at < self._end:
                got = min(len(rest[0]), self._end - self._at)
                rest[0][:got] = self._buffer[self._at : self._at + got]
                self._at += got
            elif self._is_tls:
                got = self._receive(rest[0], until)
            else:
                got = self._receive_all(rest, until)
            while rest and got >= len(rest[0]):
                got -= len(rest.pop(0))
            if got:
                rest[0] = rest[0][got:]
        if self._crlf != CRLF:
            raise BadReply(f"a string ends in {bytes(self._crlf)!r}")

    def _receive(self, view: memoryview, until: float) -> int:
        """At least one byte."""
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
        """All of it in one call; less only if time is up, or a signal came."""
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
        # A time of zero would mean for ever.
        self._sock.setsockopt(
            socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, max(1000, int((seconds - whole) * 1e6)))
        )


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 18:
        raise BadReply(f"not a number: {text[:40]!r}")
    return int(text)
