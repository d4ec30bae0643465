"""RESP2 and RESP3: commands in, replies out, and the other way round; payloads never pass through it.

Pure: no sockets, no cache. `Commands` and `encode` are the server's side, `command` and `Replies` the
client's. The bytes of a payload go from the socket to their own memory; what came along with a command's
other bytes, 20 KiB at most, is copied there.

Nothing is believed before it has arrived. A length is compared with the limits before anything is taken for
it; memory for what is kept grows with the bytes received, never with a number announced; no byte is looked
at twice, however small the pieces in which it came, except in a line, and lines are short.

Framing is stricter than redis' in one point: redis skips the byte that follows a line's CR, and the two that
follow an argument, without a look at them. Here they are CRLF, or the connection is lost: a frame that two
readers would cut at different places is an attack or a bug.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

from lmtier.errors import MisuseError

Argument: TypeAlias = "bytes | memoryview"
Place: TypeAlias = "Callable[[list[Argument], int, int], memoryview | None]"

CRLF: Final = b"\r\n"
DROP: Final = memoryview(b"")
"""The place of an argument for which there is none: its bytes are dropped as they come."""
DEPTH: Final = 64
"""Arrays in arrays, both ways."""
_BUFFER = 20 << 10  # the keys of 512 chunks, and a little
_LINE = 64 << 10
_VALUES = 1 << 20  # in one reply; an empty one costs 4 bytes on the wire and up to 216 here
_STAR, _DOLLAR = b"*$"


class ProtocolError(Exception):
    """Nothing can be understood from here on: answer `-ERR Protocol error: ` and this text, then close."""


class Simple(str):
    """A status, `+OK`."""

    __slots__ = ()


class Error(str):
    """An error with its code, `-ERR no such key`."""

    __slots__ = ()


class Verbatim(str):
    """Text for people: redis-cli shows it unquoted."""

    __slots__ = ()


class Push(list[Any]):
    """A message out of band."""


class _Mark(Enum):
    NULL_ARRAY = "NullArray"
    INCOMPLETE = "INCOMPLETE"
    OPENED = "OPENED"


NullArray: Final = _Mark.NULL_ARRAY
"""To send `*-1`: RESP2 has two nulls, and clients tell them apart. `Replies` gives None for both."""
INCOMPLETE: Final = _Mark.INCOMPLETE
"""What `Replies` gives instead of a reply; None is one."""


# ---- values to bytes


def command(*args: bytes | str | int | float) -> bytes:
    """A request, as a client sends it."""
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        body = arg if isinstance(arg, bytes) else _utf8(str(arg))
        parts += (bulk_header(len(body)), body, CRLF)
    return b"".join(parts)


def bulk_header(length: int) -> bytes:
    """What precedes a payload that is sent from elsewhere; CRLF follows it."""
    return b"$%d\r\n" % length


def encode(value: Any, resp3: bool) -> bytes:
    """A reply. What RESP2 has no type for becomes what redis makes of it: flat arrays, 0 and 1, text."""
    parts: list[bytes | bytearray | memoryview] = []
    _encode(value, resp3, parts, DEPTH)
    return b"".join(parts)


def _encode(value: Any, resp3: bool, parts: list[bytes | bytearray | memoryview], depth: int) -> None:
    if isinstance(value, (bytes, bytearray, memoryview)):
        length = value.nbytes if isinstance(value, memoryview) else len(value)
        parts += (b"$%d\r\n" % length, value, CRLF)
    elif isinstance(value, str):
        if isinstance(value, Simple | Error):
            mark = b"+" if isinstance(value, Simple) else b"-"
            parts += (mark, _utf8(value).replace(b"\r", b" ").replace(b"\n", b" "), CRLF)
        elif isinstance(value, Verbatim) and resp3:
            text = _utf8(value)
            parts += (b"=%d\r\ntxt:" % (len(text) + 4), text, CRLF)
        else:
            _encode(_utf8(value), resp3, parts, depth)
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
        mark = b"," if isinstance(value, float) else b"("
        parts += (mark, text, CRLF) if resp3 else (bulk_header(len(text)), text, CRLF)
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


def _utf8(text: str) -> bytes:
    """Bytes that were no UTF-8 when they were read leave as they came."""
    return text.encode("utf-8", "surrogateescape")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# ---- bytes to values

# Most numbers, for the price of one look-up: of bulks, and of the others.
_SHORT = {b"$%d\r\n" % number: number for number in range(1024)}
_SMALL = {b"%c%d\r\n" % (mark, number): number for mark in b"*:" for number in range(1024)}
_NUMBER = re.compile(rb".(0|-?[1-9][0-9]{0,18})\r\n", re.DOTALL)
_BIG_NUMBER = re.compile(rb"[+-]?[0-9]{1,4300}")  # the most digits that Python's int() takes
_DOUBLE = re.compile(rb"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?([eE][+-]?[0-9]{1,4})?|inf|nan)")


def _number(line: bytes) -> int | None:
    """The number between a line's mark and its CRLF, as strict as redis: no +, no leading zero, no blank."""
    number = _SHORT.get(line, _SMALL.get(line))
    if number is None and (found := _NUMBER.fullmatch(line)):
        number = int(found[1])
        if not -(1 << 63) <= number < 1 << 63:
            return None
    return number


class _Reader:
    """What arrived and was not understood yet: less than a line, whenever its owner asks for more."""

    def __init__(self, longest_line: int) -> None:
        self._longest_line = longest_line
        self._data = b""
        self._at = 0  # what lies before was understood
        self._part = bytearray()  # of a bulk that is not all here

    def _add(self, data: bytes | memoryview) -> None:
        self._data = self._data[self._at :] + data
        self._at = 0

    def _line(self, what: str) -> bytes | None:
        """The next line, its end included. None: it is not all here."""
        end = self._data.find(b"\n", self._at) + 1
        if not end:
            if len(self._data) - self._at > self._longest_line:
                raise ProtocolError("too big " + what)
            return None
        line = self._data[self._at : end]
        self._at = end
        return line

    def _bulk(self, length: int) -> bytes | None:
        """The next `length` bytes, and past their CRLF. None: not all here; ask again, for as many."""
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What one command may take: bytes, but for `args`."""

    args: int = 1 << 20
    name: int = 16 << 10
    """The first argument, which nobody is asked about: whoever sends it may be a stranger."""
    argument: int = 1 << 20
    """One argument that is kept as bytes."""
    command: int = 4 << 20
    """All arguments of a command that are kept as bytes."""
    payload: int = 512 << 20
    """One argument that was given its place."""
    inline: int = 64 << 10
    """A line: an inline command, or a number."""


class Commands(_Reader):
    """Commands out of the bytes of one client; payloads go straight to where `place` wants them.

    The owner alternates: bytes into `target()`, `received(count)`, `next()` until it is None.

    `place(args, argc, length)` is called once for each argument but the first, when its length is known: the
    memory that it returns is filled, and is that argument in the end; None keeps the argument as bytes, DROP
    does not keep it. It may raise ProtocolError. After any ProtocolError, or when the client is gone, memory
    that was given for a command that `next` never returned is the owner's to take back. Inline commands are
    all bytes.
    """

    def __init__(self, place: Place, limits: Limits = Limits()) -> None:
        super().__init__(limits.inline)
        self._place = place
        self._limits = limits
        self._buffer = memoryview(bytearray(_BUFFER))
        self._argc = 0  # of the command that has begun; 0: none has
        self._args: list[Argument] = []
        self._longest_kept = min(limits.argument, limits.payload)
        self._longest_name = min(limits.name, self._longest_kept)
        self._room = limits.command  # for arguments kept as bytes
        self._length = -1  # of the argument that has begun; -1: none has
        self._payload: memoryview | None = None  # where it goes, if not here
        self._filled = 0

    @property
    def in_command(self) -> bool:
        """A command has begun and is not complete. Ask when `next` has returned None."""
        return self._argc > 0 or self._at < len(self._data)

    def target(self) -> memoryview:
        """Where the next bytes from the client must go. Never empty."""
        if self._payload is not None and self._filled < len(self._payload):
            return self._payload[self._filled :]
        return self._buffer

    def received(self, count: int) -> None:
        """So many bytes were put at the front of `target()`."""
        target = self.target()
        if not 0 <= count <= len(target):
            raise MisuseError(f"received {count} bytes into {len(target)}")
        if target is self._buffer:
            self._add(target[:count])
        else:
            self._filled += count

    def next(self) -> list[Argument] | None:
        """The next complete command, never empty. None: more bytes are needed."""
        while not self._argc:
            is_multibulk = self._data.startswith(b"*", self._at)
            line = self._line("mbulk count string" if is_multibulk else "inline request")
            if line is None:
                return None
            if is_multibulk:
                argc = _number(line)
                if argc is None or argc > self._limits.args:
                    raise ProtocolError("invalid multibulk length")
                self._argc = max(argc, 0)
            elif args := _words(line):
                return args
        args = self._args
        if self._length < 0:
            self._skim()
        while len(args) < self._argc:
            if self._length < 0:
                line = self._line("bulk count string")
                if line is None:
                    return None
                self._begin(line)
            argument = self._bulk(self._length) if self._payload is None else self._fill(self._payload)
            if argument is None:
                return None
            args.append(argument)
            self._length, self._payload = -1, None
            self._skim()
        self._args, self._argc, self._room = [], 0, self._limits.command
        return args

    def _skim(self) -> None:
        """Take the arguments that are short, all here and right, as most are: one call for each, to `place`.

        What differs is left to the long way, which is right for every argument.
        """
        data, at, args = self._data, self._at, self._args
        while len(args) < self._argc:
            start = data.find(b"\n", at) + 1
            length = _SHORT.get(data[at:start], self._longest_kept + 1)
            end = start + length
            if length > self._longest_kept or length > self._room or data[end : end + 2] != CRLF:
                break
            if args and (payload := self._place(args, self._argc, length)) is not None:
                at = start
                self._begin_payload(payload, length)
                break
            args.append(data[start:end])
            at = end + 2
            self._room -= length
        self._at = at

    def _begin(self, line: bytes) -> None:
        """Settle how long the argument is that `line` announces, and where it goes."""
        if line[0] != _DOLLAR:
            raise ProtocolError(f"expected '$', got '{_text(line[:1])}'")
        length = _number(line)
        if length is None or not 0 <= length <= self._limits.payload:
            raise ProtocolError("invalid bulk length")
        payload = self._place(self._args, self._argc, length) if self._args else None
        if payload is not None:
            self._begin_payload(payload, length)
        elif length > min(self._longest_kept if self._args else self._longest_name, self._room):
            raise ProtocolError("too big argument")
        else:
            self._room -= length
            self._length = length

    def _begin_payload(self, payload: memoryview, length: int) -> None:
        if len(payload) != length and payload is not DROP:
            raise MisuseError(f"{len(payload)} bytes for a payload of {length}")
        self._length, self._payload, self._filled = length, payload, 0

    def _fill(self, payload: memoryview) -> memoryview | None:
        """What has arrived of the payload goes to its place; the payload, if that was all of it."""
        piece = self._data[self._at : self._at + self._length - self._filled]
        if payload is not DROP:
            payload[self._filled : self._filled + len(piece)] = piece
        self._filled += len(piece)
        self._at += len(piece)
        if self._filled < self._length or self._bulk(0) is None:
            return None
        return payload


_WORD = re.compile(
    rb"""\s*+ (?P<bare> [^ \t\r\n"']*+ )
    (?: " (?P<double> (?: \\. | [^"\\] )*+ ) " | ' (?P<single> (?: \\' | [^'] )*+ ) ' )?
    (?= \s | \Z )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a"}


def _words(line: bytes) -> list[Argument]:
    """The arguments of an inline command, quoted as redis' sdssplitargs has it."""
    words: list[Argument] = []
    at = 0
    while at < len(line):
        found = _WORD.match(line, at)
        if found is None:
            raise ProtocolError("unbalanced quotes in request")
        word, double, single = found.groups()
        if double is not None:
            word += _ESCAPE.sub(_unescaped, double)
        elif single is not None:
            word += single.replace(b"\\'", b"'")
        elif not word:
            break  # blanks were left
        words.append(word)
        at = found.end()
    return words


def _unescaped(found: re.Match[bytes]) -> bytes:
    code, letter = found.groups()
    return bytes([int(code, 16)]) if code else _ESCAPED.get(letter, letter)


class Replies(_Reader):
    """Replies out of the bytes of one server. What has been parsed of a long one is not parsed again.

    Strings are bytes; errors are values. A key of a map or a member of a set that Python cannot hash is a
    ProtocolError, and so is any other reply that costs more than `limit` says: after it, close.
    """

    def __init__(self, limit: int = 64 << 20) -> None:
        super().__init__(_LINE)
        self._limit = limit
        self._bytes_left = limit  # of the reply that has begun
        self._values_left = _VALUES
        self._open: list[_Aggregate] = []  # outermost first
        self._header: tuple[int, int] | None = None  # of the bulk that has begun: its mark and length

    def feed(self, data: bytes | memoryview) -> None:
        """Bytes from the server, of any number. Then call `next` until it has nothing more."""
        self._add(data)

    def next(self) -> object:
        """The next complete reply, or INCOMPLETE."""
        while (value := self._value()) is not INCOMPLETE:
            while value is not _Mark.OPENED:
                if not self._open:
                    self._bytes_left, self._values_left = self._limit, _VALUES
                    return value
                aggregate = self._open[-1]
                aggregate.items.append(value)
                if len(aggregate.items) < aggregate.count:
                    break
                value = self._open.pop().close()
            self._skim(self._open[-1])
        return INCOMPLETE

    def _skim(self, aggregate: _Aggregate) -> None:
        """Take small numbers and short strings that are all here, but never the last item: it closes."""
        data, at, items = self._data, self._at, aggregate.items
        while len(items) < aggregate.count - 1:
            start = end = data.find(b"\n", at) + 1
            line = data[at:start]
            value: object = _SMALL.get(line)
            if value is None:
                end += _SHORT.get(line, len(data))
                if data[end : end + 2] != CRLF:
                    break
                value = data[start:end]
                end += 2
            elif line[0] == _STAR:
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
            mark = line[0]
            if mark not in b"$=!*~%>":
                return _scalar(line)
            length = _number(line)
            if length is None or length < 0:
                if line in (b"$-1\r\n", b"*-1\r\n"):
                    return None
                raise ProtocolError("invalid length")
            if mark not in b"$=!":
                return self._begin(mark, length)
            self._spend(length)
            self._header = mark, length
        mark, length = self._header
        data = self._bulk(length)
        if data is None:
            return INCOMPLETE
        self._header = None
        if mark == _DOLLAR:
            return data
        if mark == ord("!"):
            return Error(_text(data))
        if data[3:4] != b":":
            raise ProtocolError("invalid verbatim string")
        return Verbatim(_text(data[4:]))

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
        return _Mark.OPENED

    def _spend(self, count: int) -> None:
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise ProtocolError("too big reply")


class _Aggregate:
    """A list, map, set or push of which some items are here."""

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
        return self.items if self.mark == _STAR else Push(self.items)


def _scalar(line: bytes) -> object:
    """The value of a line that is a whole reply."""
    mark, text = line[:1], line[1:-2]
    if not line.endswith(CRLF):
        raise ProtocolError("expected CRLF after a line")
    if mark == b"+":
        return Simple(_text(text))
    if mark == b"-":
        return Error(_text(text))
    if mark == b":" and (number := _number(line)) is not None:
        return number
    if mark == b"," and _DOUBLE.fullmatch(text):
        return float(text)
    if mark == b"(" and _BIG_NUMBER.fullmatch(text):
        return int(text)
    if line in _CONSTANTS:
        return _CONSTANTS[line]
    raise ProtocolError(f"no reply begins with {_text(line[:32])!r}")


_CONSTANTS = {b"_\r\n": None, b"#t\r\n": True, b"#f\r\n": False}
