"""Parses the arguments of Redis commands, with redis' errors for invalid ones."""

from __future__ import annotations

import re

from lmtier.format.objects import now_ms
from lmtier.server.commands import Argument, Refused
from lmtier.server.values import MAX_NAME
from lmtier.wire.resp import Error

SYNTAX = Error("ERR syntax error")
NOT_AN_INTEGER = Error("ERR value is not an integer or out of range")
TIMES = ("EX", "PX", "EXAT", "PXAT")
NEVER = 1 << 63
"""Later than any time."""
_MAX_PATTERNS = 1024
"""The most bytes of patterns in one command.

Compiled they take a hundred times as much, and 512 are cached.
"""
_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")


def read_word(arg: Argument) -> str:
    return bytes(arg).decode("latin-1").upper()


def shown(arg: Argument) -> str:
    """A client's argument, shortened for an error."""
    return bytes(arg[:128]).decode("utf-8", "surrogateescape")


def read_name(arg: Argument) -> bytes:
    if len(arg) > MAX_NAME:
        raise Refused(f"ERR the name has {len(arg)} bytes; names have {MAX_NAME} at most here")
    return bytes(arg)


def read_integer(arg: Argument, error: str = NOT_AN_INTEGER) -> int:
    text = bytes(arg)
    if not _INTEGER.fullmatch(text) or not -(1 << 63) <= (number := int(text)) < 1 << 63:
        raise Refused(error)
    return number


def read_expiry(word: str, arg: Argument, command: str, least: int = 1) -> int:
    """The time given by EX, PX, EXAT or PXAT, in ms since the epoch."""
    amount = read_integer(arg)
    millis = amount if word.startswith("PX") else amount * 1000
    expires_at = millis if word.endswith("AT") else now_ms() + millis
    if amount < least or not -NEVER <= millis < NEVER or expires_at >= NEVER:
        raise Refused(f"ERR invalid expire time in '{command}' command")
    return expires_at


# ---- patterns of names: bounded, and never slow, however hostile


def need_short(patterns: list[Argument]) -> None:
    if (nbytes := sum(map(len, patterns))) > _MAX_PATTERNS:
        raise Refused(f"ERR patterns of {nbytes} bytes; here they have {_MAX_PATTERNS} at most")


def compile_glob(pattern: bytes) -> re.Pattern[bytes]:
    """Compiles a pattern with redis' syntax: * ? [a-c] [^a], and a backslash before a literal character."""
    pieces = [b""]  # between stars
    position = 0
    while position < len(pattern):
        char = pattern[position : position + 1]
        position += 1
        if char == b"*":
            pieces.append(b"")
        elif char == b"?":
            pieces[-1] += b"."
        elif char == b"[":
            position, group = _group(pattern, position)
            pieces[-1] += group
        else:
            if char == b"\\" and position < len(pattern):
                char = pattern[position : position + 1]
                position += 1
            pieces[-1] += re.escape(char)
    first, *middle = pieces
    last = b".*" + middle.pop() if middle else b""
    # The first match of a piece is as good as any other. The groups are atomic: otherwise a hostile pattern
    # could take for ever.
    atomic_pieces = b"".join(b"(?>.*?" + piece + b")" for piece in middle if piece)
    return re.compile(first + atomic_pieces + last + rb"\Z", re.DOTALL)


def _group(pattern: bytes, at: int) -> tuple[int, bytes]:
    """The class that begins after a [, and its end. A class without ] extends to the end."""
    is_not = pattern[at : at + 1] == b"^"
    at += is_not
    parts: list[bytes] = []
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        if pattern[at : at + 1] == b"\\" and at + 1 < len(pattern):
            at += 1
            parts.append(re.escape(pattern[at : at + 1]))
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            low, high = sorted((pattern[at : at + 1], pattern[at + 2 : at + 3]))
            parts.append(re.escape(low) + b"-" + re.escape(high))
            at += 2
        else:
            parts.append(re.escape(pattern[at : at + 1]))
        at += 1
    if not parts:
        return at + 1, b"." if is_not else b"(?!)"
    return at + 1, b"[" + (b"^" if is_not else b"") + b"".join(parts) + b"]"
