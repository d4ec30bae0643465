"""Parses the replies of a server, for all clients."""

from __future__ import annotations

import re
from typing import Any, Final

from lmtier.wire.resp import (
    BULK_LENGTHS,
    CRLF,
    DEPTH,
    DOLLAR,
    INCOMPLETE,
    SMALL_NUMBERS,
    STAR,
    Error,
    Incomplete,
    ProtocolError,
    Push,
    Reader,
    Simple,
    Verbatim,
    parse_number,
    to_text,
)

_LINE = 64 << 10
_VALUES = 1 << 20  # in one reply; an empty one costs 4 bytes on the wire and up to 216 here
_BIG_NUMBER = re.compile(rb"[+-]?[0-9]{1,4300}")  # the most digits that Python's int() takes
_DOUBLE = re.compile(rb"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?([eE][+-]?[0-9]{1,4})?|inf|nan)")
_OPENED: Final = object()


class ReplyReader(Reader):
    """Parses the replies of one server. A long reply that arrives in pieces is parsed only once.

    Strings are bytes; errors are values. A key of a map or a member of a set that Python cannot hash raises
    ProtocolError, and so does a reply that needs more than `limit` bytes, or has more than `values` values.
    Close the connection after it.
    """

    def __init__(self, limit: int = 64 << 20, values: int = _VALUES) -> None:
        super().__init__(_LINE)
        self._limit, self._values = limit, values
        self._bytes_left = limit  # of the reply that has begun
        self._values_left = values
        self._open: list[_Aggregate] = []  # outermost first
        self._header: tuple[int, int] | None = None  # of the bulk that has begun: its mark and length

    def feed(self, data: bytes | memoryview) -> None:
        """Bytes from the server, of any number. Then call `next` until it has nothing more."""
        self._add(data)

    def expect(self, count: int) -> None:
        """Make `next` return the next `count` replies, at least one, as a list.

        That is cheaper than each alone.
        """
        self._open.append(_Aggregate(STAR, count))

    def next(self) -> object:
        """The next complete reply, or INCOMPLETE."""
        while (value := self._value()) is not INCOMPLETE:
            while value is not _OPENED:
                if not self._open:
                    self._bytes_left, self._values_left = self._limit, self._values
                    return value
                aggregate = self._open[-1]
                aggregate.items.append(value)
                if len(aggregate.items) < aggregate.count:
                    break
                value = self._open.pop().close()
            self._skim(self._open[-1])
        return INCOMPLETE

    def string(self) -> int | Error | Incomplete | None:
        """As `next`, for a string whose bytes go elsewhere: returns their number. They follow, then CRLF.

        `take` returns those that have arrived already. The caller receives the rest itself.
        """
        line = self._line("line")
        if line is None:
            return INCOMPLETE
        if line[0] == DOLLAR:
            return _length(line)
        if isinstance(error := _scalar(line), Error):
            return error
        raise ProtocolError(f"expected a string, got {to_text(line[:32])!r}")

    def take(self, view: memoryview) -> int:
        """Move the next arrived bytes into `view`. Returns their number."""
        piece = self._data[self._at : self._at + len(view)]
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _skim(self, aggregate: _Aggregate) -> None:
        """A fast path for complete small numbers and short strings.

        The last item is left: it closes the list.
        """
        data, at, items = self._data, self._at, aggregate.items
        while len(items) < aggregate.count - 1:
            start = end = data.find(b"\n", at) + 1
            line = data[at:start]
            value: object = SMALL_NUMBERS.get(line)
            if value is None:
                end += BULK_LENGTHS.get(line, len(data))
                if data[end : end + 2] != CRLF:
                    break
                value = data[start:end]
                end += 2
            elif line[0] == STAR:
                break
            items.append(value)
            at = end
        self._spend(at - self._at)
        self._at = at

    def _value(self) -> object:
        """The next value that holds no others; OPENED: an aggregate has begun."""
        if self._header is None:
            line = self._line("line")
            if line is None:
                return INCOMPLETE
            self._spend(len(line))
            type_byte = line[0]
            if type_byte not in b"$=!*~%>":
                return _scalar(line)
            length = _length(line)
            if length is None:
                return None
            if type_byte not in b"$=!":
                return self._begin(type_byte, length)
            if type_byte == ord("!") and length > _LINE:
                raise ProtocolError("too big error")
            self._spend(length)
            self._header = type_byte, length
        type_byte, length = self._header
        data = self._bulk(length)
        if data is None:
            return INCOMPLETE
        self._header = None
        if type_byte == DOLLAR:
            return data
        if type_byte == ord("!"):
            return Error(to_text(data))
        if data[3:4] != b":":
            raise ProtocolError("invalid verbatim string")
        return Verbatim(to_text(data[4:]))

    def _begin(self, mark: int, length: int) -> object:
        aggregate = _Aggregate(mark, 2 * length if mark == ord("%") else length)
        self._values_left -= aggregate.count
        if self._values_left < 0 or 3 * aggregate.count > self._bytes_left:
            raise ProtocolError("too many values in a reply")
        if len(self._open) == DEPTH:
            raise ProtocolError("too many levels in a reply")
        if not length:
            return aggregate.close()
        self._open.append(aggregate)
        return _OPENED

    def _spend(self, count: int) -> None:
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise ProtocolError("too big reply")


class _Aggregate:
    """An unfinished list, map, set or push."""

    __slots__ = ("count", "items", "mark")

    def __init__(self, mark: int, count: int) -> None:
        self.mark = mark
        self.count = count
        self.items: list[Any] = []

    def close(self) -> object:
        try:
            if self.mark == ord("%"):
                return dict(zip(self.items[::2], self.items[1::2], strict=True))
            if self.mark == ord("~"):
                return set(self.items)
        except TypeError:
            raise ProtocolError("a key or a member that is an aggregate") from None
        return self.items if self.mark == STAR else Push(self.items)


def _length(line: bytes) -> int | None:
    """The length in a header. None: the reply is a null."""
    length = parse_number(line)
    if length is not None and length >= 0:
        return length
    if line in (b"$-1\r\n", b"*-1\r\n"):
        return None
    raise ProtocolError("invalid length")


def _scalar(line: bytes) -> object:
    """The value of a line that is a whole reply."""
    mark, text = line[:1], line[1:-2]
    if not line.endswith(CRLF):
        raise ProtocolError("expected CRLF after a line")
    if mark == b"+":
        return Simple(to_text(text))
    if mark == b"-":
        return Error(to_text(text))
    if mark == b":" and (number := parse_number(line)) is not None:
        return number
    if mark == b"," and _DOUBLE.fullmatch(text):
        return float(text)
    if mark == b"(" and _BIG_NUMBER.fullmatch(text):
        return int(text)
    if line in _CONSTANTS:
        return _CONSTANTS[line]
    raise ProtocolError(f"no reply begins with {to_text(line[:32])!r}")


_CONSTANTS = {b"_\r\n": None, b"#t\r\n": True, b"#f\r\n": False}
