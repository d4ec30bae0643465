"""A server that lies: raw sockets, on which it says what a test wants, in pieces, slowly or for ever."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import repeat
from typing import TypeAlias

Said: TypeAlias = "bytes | Iterable[bytes]"
Lie: TypeAlias = "Said | Callable[[Liar, bytes], Said]"
"""What is answered to each request. A function gets the server and the request."""

DRIP = 0.05
PATIENCE = 20.0


class Liar:
    """Answers `lie` to whatever arrives, on any number of connections. HTTP: to each whole request."""

    def __init__(self, lie: Lie, *, http: bool = False, ends: bool = False) -> None:
        self.lie = lie
        self.requests = 0
        self.over = threading.Event()
        self._http, self._ends = http, ends
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(PATIENCE)

    def drip(self, said: bytes, first: bytes = b"") -> Iterator[bytes]:
        """Each byte comes soon after the one before. All of them take for ever."""
        yield first
        for at in range(len(said)):
            if self.over.wait(DRIP):
                return
            yield said[at : at + 1]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(sock)
                self._threads.append(threading.Thread(target=self._talk, args=(sock,), daemon=True))
                self._threads[-1].start()

    def _talk(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            while request := self._request(sock):
                self.requests += 1
                lie = self.lie(self, request) if callable(self.lie) else self.lie
                for piece in (lie,) if isinstance(lie, bytes) else lie:
                    sock.sendall(piece)
                if self._ends:
                    return

    def _request(self, sock: socket.socket) -> bytes:
        data = sock.recv(1 << 20)
        while self._http and data and not _is_whole(data):
            more = sock.recv(1 << 20)
            if not more:
                return b""
            data += more
        return data


def for_ever(piece: bytes) -> Iterable[bytes]:
    """In sends that are worth it."""
    return repeat(piece * (1 + (64 << 10) // len(piece)))


def http_reply(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    named = {"Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _is_whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return bool(end) and len(body) >= int(length[1] if length else 0)
