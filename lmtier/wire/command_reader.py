"""Commands out of the bytes of one client: the server's reader.

The bytes of a payload go from the socket directly to their place. Only those that arrive together with other
bytes of the command, 20 KiB at most, are copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from lmtier.errors import MisuseError
from lmtier.wire.resp import (
    BULK_LENGTHS,
    CRLF,
    DOLLAR,
    ProtocolError,
    Reader,
    bulk_header,
    parse_number,
    to_text,
)

Argument: TypeAlias = "bytes | memoryview"
Place: TypeAlias = "Callable[[list[Argument], int, int], memoryview | None]"

DROP: Final = memoryview(b"")
"""The place of an argument that is not stored: its bytes are dropped as they arrive."""
_BUFFER = 20 << 10  # the keys of 512 chunks, and a little
ARGUMENT_OVERHEAD: Final = 64
"""The bytes that an argument takes beside its own, about."""


def new_buffer() -> memoryview:
    """Where the bytes of a client arrive."""
    return memoryview(bytearray(_BUFFER))


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one command, in bytes, except `args`."""

    args: int = 1 << 20
    name: int = 16 << 10
    """The first argument. It is read before any check, so its sender may be unauthenticated."""
    argument: int = 1 << 20
    """One argument that is returned as bytes."""
    command: int = 4 << 20
    """All arguments of a command that are returned as bytes."""
    payload: int = 512 << 20
    """One argument that has a place."""
    inline: int = 64 << 10
    """A line: an inline command, or a number."""


class CommandReader(Reader):
    """Parses the commands of one client. Payloads go directly to the memory that `place` returns.

    The owner repeats three calls: read bytes into `target()`, `received(count)`, `next()` until it is None.

    `place(args, argc, length)` is called once for each argument except the first, when its length is known.
    The memory that it returns is filled, and becomes that argument. None: the argument becomes bytes. DROP:
    it is dropped. `place` may raise ProtocolError. After any ProtocolError, or when the client is gone, the
    owner takes back the memory of a command that `next` never returned. Arguments of inline commands are
    always bytes.
    """

    def __init__(self, place: Place, limits: Limits = Limits(), buffer: memoryview | None = None) -> None:
        """`buffer`: where bytes arrive, if readers of one thread share it. None of them keeps any there."""
        super().__init__(limits.inline)
        self._place = place
        self._limits = limits
        self._buffer = new_buffer() if buffer is None else buffer
        self._argc = 0  # arguments of the unfinished command; 0: none
        self._args: list[Argument] = []
        self._longest_kept = min(limits.argument, limits.payload)
        self._longest_name = min(limits.name, self._longest_kept)
        self._bytes_left = limits.command  # for arguments kept as bytes
        self._length = -1  # of the unfinished argument; -1: none
        self.last = 0
        """The bytes that the last command takes."""
        self._payload: memoryview | None = None  # where it goes, if not here
        self._filled = 0

    @property
    def in_command(self) -> bool:
        """Whether a command has begun and is not complete. It is valid after `next` has returned None."""
        return self._argc > 0 or self.has_more

    @property
    def begins_as_http(self) -> bool:
        """Whether the first bytes of a client are the first line of an HTTP request."""
        return not self._argc and _HTTP.match(self._data, self._at) is not None

    @property
    def held_bytes(self) -> int:
        """The bytes of what has arrived of the unfinished command, and of an announced argument."""
        return self._limits.command - self._bytes_left + ARGUMENT_OVERHEAD * len(self._args) + len(self._data)

    def target(self) -> memoryview:
        """Where the next bytes from the client must go. Never empty."""
        if self._payload is not None and self._filled < len(self._payload):
            return self._payload[self._filled :]
        return self._buffer

    def received(self, count: int) -> None:
        """`count` bytes were written to the front of `target()`."""
        target = self.target()
        if not 0 <= count <= len(target):
            raise MisuseError(f"received {count} bytes into {len(target)}")
        if target is self._buffer:
            self._add(target[:count])
        else:
            self._filled += count

    def unread(self) -> bytes | None:
        """The received bytes of the command that is not complete. None: some of them have their place."""
        if self._payload is not None:
            return None
        pieces = [b"*%d\r\n" % self._argc] if self._argc else []
        for argument in self._args:
            if isinstance(argument, memoryview):
                return None
            pieces += (bulk_header(len(argument)), argument, CRLF)
        if self._argc and self._length >= 0:
            pieces.append(bulk_header(self._length))
        return b"".join((*pieces, self._part, self._data[self._at :]))

    def restore(self, data: bytes) -> None:
        """Begin with what `unread` of another reader returned."""
        self._add(data)

    def next(self) -> list[Argument] | None:
        """The next complete command, never empty. None: more bytes are needed."""
        while not self._argc:
            is_multibulk = self._data.startswith(b"*", self._at)
            line = self._line("mbulk count string" if is_multibulk else "inline request")
            if line is None:
                return None
            if is_multibulk:
                argc = parse_number(line)
                if argc is None or argc > self._limits.args:
                    raise ProtocolError("invalid multibulk length")
                self._argc = max(argc, 0)
            elif args := _words(line):
                self.last = len(line) + ARGUMENT_OVERHEAD * len(args)
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
        self.last = self.held_bytes
        self._args, self._argc, self._bytes_left = [], 0, self._limits.command
        return args

    def _skim(self) -> None:
        """A fast path for short, complete and valid arguments, as most are: one call of `place` for each.

        The slow path, which handles every argument, takes the others.
        """
        data, at, args = self._data, self._at, self._args
        while len(args) < self._argc:
            start = data.find(b"\n", at) + 1
            length = BULK_LENGTHS.get(data[at:start], self._longest_kept + 1)
            end = start + length
            if length > self._longest_kept or length > self._bytes_left or data[end : end + 2] != CRLF:
                break
            if args and (payload := self._place(args, self._argc, length)) is not None:
                at = start
                self._begin_payload(payload, length)
                break
            args.append(data[start:end])
            at = end + 2
            self._bytes_left -= length
        self._at = at

    def _begin(self, line: bytes) -> None:
        """Read the length of the next argument from `line`, and decide where it goes."""
        if line[0] != DOLLAR:
            raise ProtocolError(f"expected '$', got '{to_text(line[:1])}'")
        length = parse_number(line)
        if length is None or not 0 <= length <= self._limits.payload:
            raise ProtocolError("invalid bulk length")
        payload = self._place(self._args, self._argc, length) if self._args else None
        if payload is not None:
            self._begin_payload(payload, length)
        elif length > min(self._longest_kept if self._args else self._longest_name, self._bytes_left):
            raise ProtocolError("too big argument")
        else:
            self._bytes_left -= length
            self._length = length

    def _begin_payload(self, payload: memoryview, length: int) -> None:
        if len(payload) != length and payload is not DROP:
            raise MisuseError(f"{len(payload)} bytes for a payload of {length}")
        self._length, self._payload, self._filled = length, payload, 0

    def _fill(self, payload: memoryview) -> memoryview | None:
        """Move the arrived bytes of the payload to its place. Returns the payload if it is complete."""
        piece = self._data[self._at : self._at + self._length - self._filled]
        if payload is not DROP:
            payload[self._filled : self._filled + len(piece)] = piece
        self._filled += len(piece)
        self._at += len(piece)
        if self._filled < self._length or self._bulk(0) is None:
            return None
        return payload


_HTTP = re.compile(rb"[A-Z]{3,7} [\x21-\x7e]+ HTTP/1\.[01]\r?\n")
_WORD = re.compile(
    rb"""\s*+ (?P<bare> [^ \t\r\n"']*+ )
    (?: " (?P<double> (?: \\. | [^"\\] )*+ ) " | ' (?P<single> (?: \\' | [^'] )*+ ) ' )?
    (?= \s | \Z )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a"}


def _words(line: bytes) -> list[Argument]:
    """The arguments of an inline command, with quotes as in redis' sdssplitargs."""
    words: list[Argument] = []
    position = 0
    while position < len(line):
        match = _WORD.match(line, position)
        if match is None:
            raise ProtocolError("unbalanced quotes in request")
        word, double, single = match.groups()
        if double is not None:
            word += _ESCAPE.sub(_unescaped, double)
        elif single is not None:
            word += single.replace(b"\\'", b"'")
        elif not word:
            break  # only blanks are left
        words.append(word)
        position = match.end()
    return words


def _unescaped(found: re.Match[bytes]) -> bytes:
    code, letter = found.groups()
    return bytes([int(code, 16)]) if code else _ESCAPED.get(letter, letter)
