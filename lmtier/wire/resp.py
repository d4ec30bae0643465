"""RESP2 and RESP3: the values on the wire, the encoder, and the common base of both readers.

As in all of `lmtier.wire`, there are no sockets and no cache. `command_reader` reads the commands of a
client, `reply_reader` reads the replies of a server.

Announced lengths are not trusted. A length is compared with the limits before memory is allocated. Memory
grows with the bytes received, never with an announced number. No byte is scanned twice, however small the
pieces in which it arrives, except in a line, and lines are short.

Framing is stricter than in redis in one point. Redis skips the byte after a line's CR, and the two bytes
after an argument, without checking them. Here they must be CRLF, or the connection is closed: a frame that
two readers would cut at different places is an attack or a bug.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, Final, Literal, TypeAlias

from lmtier.errors import MisuseError

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Argument: TypeAlias = "Buffer | str | int | float | tuple[Buffer, ...]"
"""An argument of a command to send. A tuple is one argument in pieces."""

CRLF: Final = b"\r\n"
DEPTH: Final = 64
"""The deepest nesting of arrays, in both directions."""


class ProtocolError(Exception):
    """The stream cannot be parsed any further: answer `-ERR Protocol error: ` and this text, then close."""


class Simple(str):
    """A status, `+OK`."""

    __slots__ = ()


class Error(str):
    """An error with its code, `-ERR no such key`."""

    __slots__ = ()

    @property
    def code(self) -> str:
        return self.partition(" ")[0]

    @property
    def sentence(self) -> str:
        """What people read: the code is for programs."""
        return self.partition(" ")[2] or str(self)


class Verbatim(str):
    """Text for display: redis-cli shows it unquoted."""

    __slots__ = ()


class Push(list[Any]):
    """A message out of band."""


class Marker(Enum):
    NULL_ARRAY = "NullArray"
    INCOMPLETE = "INCOMPLETE"


NullArray: Final = Marker.NULL_ARRAY
"""Encoded as `*-1`. RESP2 has two nulls, and clients distinguish them. A `ReplyReader` returns None."""
INCOMPLETE: Final = Marker.INCOMPLETE
"""`ReplyReader` returns this if there is no complete reply. None is a reply."""
Incomplete: TypeAlias = Literal[Marker.INCOMPLETE]


# ---- values to bytes


def encode_command(*args: Argument) -> bytes:
    """A request, as a client sends it."""
    return b"".join(encode_command_parts(*args))


def encode_command_parts(*args: Argument) -> list[Buffer]:
    """The same in pieces, without copying the arguments."""
    found: list[Buffer] = [b"*%d\r\n" % len(args)]
    for arg in args:
        if isinstance(arg, bytes):  # the usual type in long commands
            found += (b"$%d\r\n" % len(arg), arg, CRLF)
        elif isinstance(arg, (str, int, float)):
            text = _utf8(str(arg))
            found += (b"$%d\r\n" % len(text), text, CRLF)
        else:
            parts = arg if isinstance(arg, tuple) else (arg,)
            found += (bulk_header(sum(map(len, parts))), *parts, CRLF)
    return found


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # JSON can name one
        raise MisuseError(f"{text!r:.40} has half of a character, which cannot be sent") from None


def bulk_header(length: int) -> bytes:
    """The header of a payload that is sent from elsewhere. CRLF follows the payload."""
    return b"$%d\r\n" % length


def encode(value: Any, resp3: bool) -> bytes:
    """Encode a reply.

    Values without a RESP2 type are converted as in redis: to flat arrays, 0 and 1, text.
    """
    parts: list[bytes | bytearray | memoryview] = []
    _encode(value, resp3, parts, DEPTH)
    return b"".join(parts)


def _encode(value: Any, resp3: bool, parts: list[bytes | bytearray | memoryview], depth: int) -> None:
    if isinstance(value, (bytes, bytearray, memoryview)):
        length = value.nbytes if isinstance(value, memoryview) else len(value)
        parts += (b"$%d\r\n" % length, value, CRLF)
    elif isinstance(value, str):
        if isinstance(value, Simple | Error):
            prefix = b"+" if isinstance(value, Simple) else b"-"
            parts += (prefix, to_bytes(value).replace(b"\r", b" ").replace(b"\n", b" "), CRLF)
        elif isinstance(value, Verbatim) and resp3:
            text = to_bytes(value)
            parts += (b"=%d\r\ntxt:" % (len(text) + 4), text, CRLF)
        else:
            _encode(to_bytes(value), resp3, parts, depth)
    elif value is None:
        parts.append(b"_\r\n" if resp3 else b"$-1\r\n")
    elif value is NullArray:
        parts.append(b"_\r\n" if resp3 else b"*-1\r\n")
    elif isinstance(value, bool):
        parts.append((b"#t\r\n" if value else b"#f\r\n") if resp3 else b":%d\r\n" % value)
    elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        parts.append(b":%d\r\n" % value)
    elif isinstance(value, int | float):
        text = str(value).removesuffix(".0").encode()
        prefix = b"," if isinstance(value, float) else b"("
        parts += (prefix, text, CRLF) if resp3 else (bulk_header(len(text)), text, CRLF)
    elif isinstance(value, list | tuple | dict | set | frozenset):
        if not depth:
            raise MisuseError(f"a reply nested more than {DEPTH} deep")
        items: Any = value
        if isinstance(value, dict):
            parts.append(b"%%%d\r\n" % len(value) if resp3 else b"*%d\r\n" % (2 * len(value)))
            items = (each for pair in value.items() for each in pair)
        elif isinstance(value, set | frozenset):
            parts.append((b"~%d\r\n" if resp3 else b"*%d\r\n") % len(value))
        else:
            parts.append((b">%d\r\n" if resp3 and isinstance(value, Push) else b"*%d\r\n") % len(value))
        for item in items:
            _encode(item, resp3, parts, depth - 1)
    else:
        raise MisuseError(f"a {type(value).__name__} is no reply")


def to_bytes(text: str) -> bytes:
    """Encode text. Bytes that were no UTF-8 when they were read are restored."""
    return text.encode("utf-8", "surrogateescape")


def to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# ---- bytes that arrive

STAR, DOLLAR = b"*$"
# Most numbers, for the price of one look-up: of bulks, and of the others.
BULK_LENGTHS = {b"$%d\r\n" % number: number for number in range(1024)}
SMALL_NUMBERS = {b"%c%d\r\n" % (mark, number): number for mark in b"*:" for number in range(1024)}
_NUMBER = re.compile(rb".(0|-?[1-9][0-9]{0,18})\r\n", re.DOTALL)


def parse_number(line: bytes) -> int | None:
    """The number between a line's mark and its CRLF, as strict as redis: no +, no leading zero, no blank."""
    number = BULK_LENGTHS.get(line, SMALL_NUMBERS.get(line))
    if number is None and (found := _NUMBER.fullmatch(line)):
        number = int(found[1])
        if not -(1 << 63) <= number < 1 << 63:
            return None
    return number


class Reader:
    """The received bytes that are not parsed yet. It is less than a line whenever the owner reads more."""

    def __init__(self, longest_line: int) -> None:
        self._longest_line = longest_line
        self._data = b""
        self._at = 0  # the bytes before this are parsed
        self._part = bytearray()  # the part of an incomplete bulk

    @property
    def has_more(self) -> bool:
        """Whether there are received bytes that are not parsed yet."""
        return self._at < len(self._data)

    def _add(self, data: bytes | memoryview) -> None:
        self._data = self._data[self._at :] + data
        self._at = 0

    def _line(self, what: str) -> bytes | None:
        """The next line, with its end. None: it is not complete."""
        end = self._data.find(b"\n", self._at) + 1
        if not end:
            if len(self._data) - self._at > self._longest_line:
                raise ProtocolError("too big " + what)
            return None
        line = self._data[self._at : end]
        self._at = end
        return line

    def _bulk(self, length: int) -> bytes | None:
        """The next `length` bytes; skips their CRLF. None: not complete, call again with the same length."""
        length += len(CRLF)
        piece = self._data[self._at : self._at + length - len(self._part)]
        self._at += len(piece)
        if len(piece) < length:
            self._part += piece
            if len(self._part) < length:
                return None
            piece = bytes(self._part)
            self._part = bytearray()
        if not piece.endswith(CRLF):
            raise ProtocolError("expected CRLF after a bulk")
        return piece[:-2]
