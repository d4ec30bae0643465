"""One HTTP/1.1 connection: a request, its reply, and bodies directly from and into memory, with deadlines."""

from __future__ import annotations

import http.client
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lmtier.format.sealing import Buffer
from lmtier_backends.sockets import BadReply, TimedSocket, advance, printable_excerpt, seconds_left

_HEAD = 64 << 10
"""The most bytes of a reply before its body."""
MOST = 8 << 20
"""The most bytes of a body that is read as a whole. A page of 1,000 names takes some 300 KB."""
SMALL = 64 << 10
"""The most bytes of a body that says one thing: an error, or keys."""
_INTERIM = 8  # "100 Continue" and its like before one reply
_LINE = 4096
"""The most bytes of a line between chunks, its end included."""
_SIZE = re.compile(b"[0-9a-fA-F]{1,8}")
_NO_BODY = {204, 304}
_REFUSAL = 1.0  # seconds for a refusal that should be there already


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply without its body."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    """By name in lower case."""
    length: int | None = None
    """Bytes of the body; None: it comes in chunks, or until the connection ends."""


class HttpSocket(TimedSocket):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._head = memoryview(bytearray(_HEAD))
        self._ahead = memoryview(b"")
        """Bytes of the body that came with the head."""
        self._ends = False
        """Whether the server closes the connection after this reply."""
        self.replies = 0

    def is_stale(self) -> bool:
        return self._ends or bool(self._ahead) or super().is_stale()

    def ask(self, head: bytes, body: Sequence[Buffer], until: float) -> HttpReply:
        """Send a request. Returns the reply; its body must be read next, or the connection closed."""
        self._ahead = memoryview(b"")
        try:
            self.send((head, *body), until)
        except ConnectionError:
            if (refusal := self._early_refusal(until)) is None:
                raise
            return refusal
        for _ in range(1 + _INTERIM):
            if (reply := self._reply(until)).status >= 200:
                self.replies += 1
                return reply
        raise BadReply(f"more than {_INTERIM} replies of 1xx before one reply")

    def _early_refusal(self, until: float) -> HttpReply | None:
        """The refusal of a server that has closed the connection before it had the whole body."""
        with suppress(OSError):
            reply = self._reply(min(until, time.monotonic() + _REFUSAL))
            if reply.status >= 400:
                self._ends = True
                return reply
        return None

    def _reply(self, until: float) -> HttpReply:
        head, self._ahead = self._until_blank_line(until)
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, _, code_and_reason = status_line.partition(" ")
        code = code_and_reason[:3]
        if not version.startswith("HTTP/1.") or not re.fullmatch("[1-5][0-9][0-9]", code):
            raise BadReply(f"not a reply of HTTP: {status_line!r:.60}")
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise BadReply(f"not a header of HTTP: {line!r:.60}")
            name, value = name.strip().lower(), value.strip()
            if name == "content-length" and headers.get(name, value) != value:
                raise BadReply("two lengths of one body")
            headers[name] = value
        self._ends = version == "HTTP/1.0" or "close" in headers.get("connection", "").lower()
        if int(code) in _NO_BODY or int(code) < 200:
            return HttpReply(int(code), headers, 0)
        length = headers.get("content-length")
        if "transfer-encoding" in headers or length is None:
            return HttpReply(int(code), headers)
        if not re.fullmatch("[0-9]{1,18}", length):
            raise BadReply(f"Content-Length: {length!r:.60}")
        return HttpReply(int(code), headers, int(length))

    def _until_blank_line(self, until: float) -> tuple[bytes, memoryview]:
        """The head of the next reply, and what came after it."""
        received = len(self._ahead)
        self._head[:received] = bytes(self._ahead)
        searched = 0
        while True:
            end = bytes(self._head[searched:received]).find(b"\r\n\r\n")
            if end >= 0:
                end += searched
                return bytes(self._head[:end]), self._head[end + 4 : received]
            if received == _HEAD:
                raise BadReply(f"the head of a reply takes more than {_HEAD} bytes")
            searched = max(0, received - 3)
            received += self.receive(self._head[received:], until)

    # ---- bodies

    def fill(self, reply: HttpReply, views: Sequence[memoryview], until: float) -> int:
        """Read the body into `views`. Returns its length; what does not fit is not read."""
        if reply.length is None:
            raise BadReply("an object came without its length")
        targets, remaining = [], reply.length
        for view in views:
            if part := view[:remaining]:
                targets.append(part)
                remaining -= len(part)
        while targets:
            got = self._take(targets[0]) if self._ahead else self.receive_all(targets, until)
            advance(targets, got)
        if remaining:
            self.close()
        return reply.length

    def read(self, reply: HttpReply, until: float, most: int = MOST) -> bytes:
        """The whole body, of at most `most` bytes."""
        if reply.length is not None:
            if reply.length > most:
                raise BadReply(f"a body of {reply.length} bytes, where {most} are enough")
            body = bytearray(reply.length)
            self.fill(reply, (memoryview(body),), until)
            return bytes(body)
        if reply.headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunks(until, most)
        self._ends = True
        return self._rest(until, most)

    def _chunks(self, until: float, most: int) -> bytes:
        body = bytearray()
        while True:
            size = self._line(until).partition(b";")[0].strip()
            chunk_length = int(size, 16) if _SIZE.fullmatch(size) else most + 1
            if chunk_length > most - len(body):
                raise BadReply(f"a chunk of {printable_excerpt(size)} bytes")
            if not chunk_length:
                while self._line(until):  # headers after the body
                    pass
                return bytes(body)
            chunk = bytearray(chunk_length)
            self.fill(HttpReply(200, length=chunk_length), (memoryview(chunk),), until)
            body += chunk
            if self._line(until):
                raise BadReply("a chunk is longer than it says")

    def _line(self, until: float) -> bytes:
        seconds_left(until)  # thousands of lines may be here already
        before, line = 0, bytes(self._ahead[:_LINE])
        while (end := line.find(b"\r\n")) < 0:
            if len(line) >= _LINE:
                raise BadReply(f"a line of {_LINE} bytes and more")
            self._ahead = self._head[: self.receive(self._head, until)]
            before, line = len(line), line + bytes(self._ahead[: _LINE - len(line)])
        self._ahead = self._ahead[end + 2 - before :]
        return line[:end]

    def _rest(self, until: float, most: int) -> bytes:
        body = bytearray(self._ahead)
        self._ahead = memoryview(b"")
        while len(body) <= most:
            try:
                body += self._head[: self.receive(self._head, until)]
            except ConnectionResetError:
                return bytes(body)
        raise BadReply(f"a body of more than {most} bytes")

    def _take(self, view: memoryview) -> int:
        received = min(len(view), len(self._ahead))
        view[:received] = self._ahead[:received]
        self._ahead = self._ahead[received:]
        return received


def reason(status: int) -> str:
    return f"{status} {http.client.responses.get(status, '')}".strip()
