"""A socket whose calls all end by a given time, whatever the other side does; single bytes do not extend it.

Each call gets `until`, in time.monotonic(). On a plain socket the kernel keeps that time (SO_SNDTIMEO and
SO_RCVTIMEO cover a whole call with MSG_WAITALL), so a payload is one system call and takes the GIL once.
The kernel has a coarse clock for it, and may be late by an eighth. So it gets seven eighths of the time, and
`poll` keeps the end with a fine clock.

After any exception the socket must be closed: the next bytes may belong to an earlier request.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

from lmtier import forks
from lmtier.format.sealing import Buffer
from lmtier.wire.certificates import client_context

Address: TypeAlias = "tuple[str, int] | str"
"""Host and port, or the path of a Unix socket."""


_SHOWN = 300  # letters of what a server said
_SHORT = 16 << 10  # longer pieces are sent without a copy
_IDLE = 60  # seconds; firewalls forget a silent connection after some minutes
_PIECES = 512  # the most pieces for one sendmsg
_ENCRYPTED = 1 << 20  # bytes of one send over TLS, so that its time is limited again and again
_TIMEVAL = struct.Struct("@ll")
_KERNEL_SHARE = 7 / 8  # of the time that is left: for so long the kernel may keep it
_END = {socket.SO_SNDTIMEO: 0.25, socket.SO_RCVTIMEO: 0.02}
"""The last seconds, which `poll` keeps. A send may wait .2 s in the kernel before it looks at its limit."""


class BadReply(ConnectionError):
    """An answer that no server of this kind sends."""


def printable_excerpt(text: object) -> str:
    """What a server said, for a message: one short line. The repr of a whole answer may take seconds."""
    if isinstance(text, bytes):
        text = text[:_SHOWN].decode(errors="replace")
    if not isinstance(text, str):
        return f"a {type(text).__name__}"
    return "".join(character if character.isprintable() else "?" for character in text[:_SHOWN])


def seconds_left(until: float) -> float:
    """Seconds until then. Raises TimeoutError if there are none."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the server did not answer in time")
    return seconds


def connect(address: Address, until: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A connected socket. Raises OSError."""
    sock = _connect(address, until)
    if tls is None:
        sock.settimeout(None)
        return sock
    try:
        sock.settimeout(seconds_left(until))
        sock = tls.wrap_socket(sock, server_hostname=address if isinstance(address, str) else address[0])
        forks.close_in_child(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(address: Address, until: float) -> socket.socket:
    if isinstance(address, str):
        candidates: list[tuple[socket.AddressFamily, object]] = [(socket.AF_UNIX, address)]
    else:
        try:
            resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        except (ValueError, OverflowError):  # a server named it
            raise BadReply(f"{printable_excerpt(address[0])!r} is not the name of a host") from None
        candidates = [(family, target) for family, *_, target in resolved]
    last_error: OSError = ConnectionError(f"{address} is no address")
    for attempt, (family, target) in enumerate(candidates):
        sock = socket.socket(family)
        forks.close_in_child(sock)
        try:
            # So that a silent address leaves time for the next one.
            sock.settimeout(seconds_left(until) / (len(candidates) - attempt))
            sock.connect(target)  # type: ignore[arg-type]  # a path or a pair, as the family wants it
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        except OSError as error:
            sock.close()
            last_error = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise last_error


def tls_context(scheme: str, ca: str, cert: str, key: str, check_hostname: bool) -> ssl.SSLContext:
    context = client_context(f"{scheme} tier: TLS with", ca, cert, key)
    context.check_hostname = check_hostname
    return context


def advance(rest: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes of `rest`, which were sent or have come."""
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    if count:
        rest[0] = rest[0][count:]


class TimedSocket:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def is_closed(self) -> bool:
        return self._sock.fileno() < 0

    def is_stale(self) -> bool:
        """Whether an idle connection was closed, or has unexpected bytes."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        self._sock.close()

    # ---- sending

    def send(self, pieces: Sequence[Buffer], until: float) -> None:
        unsent = [memoryview(piece) for piece in _joined(pieces)]
        while unsent:
            advance(unsent, self._send(unsent, until))

    def _send(self, unsent: list[memoryview], until: float) -> int:
        if self._is_tls:
            self._sock.settimeout(seconds_left(until))
            return self._sock.send(unsent[0][:_ENCRYPTED])
        while True:
            flags = self._limit(socket.SO_SNDTIMEO, until)
            with suppress(BlockingIOError):
                return self._sock.sendmsg(unsent[:_PIECES], (), flags)

    # ---- receiving

    def receive(self, view: memoryview, until: float) -> int:
        """Receive at least one byte."""
        if self._is_tls:
            self._sock.settimeout(seconds_left(until))
            return self._some(self._sock.recv_into(view))
        while True:
            flags = self._limit(socket.SO_RCVTIMEO, until)
            with suppress(BlockingIOError):
                return self._some(self._sock.recv_into(view, 0, flags))

    def receive_all(self, views: Sequence[memoryview], until: float) -> int:
        """Receive everything, if the socket can do that in one call, and at least one byte."""
        if self._is_tls:
            return self.receive(views[0], until)
        while True:
            flags = self._limit(socket.SO_RCVTIMEO, until)
            with suppress(BlockingIOError):
                return self._some(self._sock.recvmsg_into(views, 0, flags or socket.MSG_WAITALL)[0])

    @staticmethod
    def _some(got: int) -> int:
        if not got:
            raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
        return got

    def _limit(self, option: int, until: float) -> int:
        """Let the kernel limit the next call, or near `until` wait here. Returns the flags of the call."""
        seconds = seconds_left(until)
        if seconds > _END[option]:
            whole, fraction = divmod(seconds * _KERNEL_SHARE, 1)
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(fraction * 1e6)))
            return 0
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT if option == socket.SO_SNDTIMEO else select.POLLIN)
        if not poller.poll(seconds * 1000):
            seconds_left(until)
        return socket.MSG_DONTWAIT


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
