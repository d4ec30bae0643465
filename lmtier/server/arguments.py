"""Parses the arguments of `LMTIER.*`. An invalid one is refused with a sentence that says why."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from lmtier.format.keys import KEY_BYTES, VALUES, Identity, is_value
from lmtier.format.layout import Shard
from lmtier.rules.hints import MAX_NAME, is_name
from lmtier.server.commands import Argument, Refused
from lmtier.wire.verbs import MAX_KEYS, MAX_MS

MAX_TOKENS = 1 << 40
"""The most tokens of one prompt. Larger numbers would spoil the counters."""
MAX_IDENTITY = 1 << 14
"""The most bytes of an identity as JSON."""
_IDENTITY = {each.name: type(each.default) if each.name != "model" else str for each in fields(Identity)}
_HEX_KEY = re.compile(rb"[0-9a-f]{64}")
_SECRET = re.compile(r"[0-9a-f]{32,128}")
_DIGITS = re.compile(rb"[0-9]{1,19}")


def read_number(argument: Argument, what: str, most: int = (1 << 63) - 1) -> int:
    digits = bytes(argument)
    if not _DIGITS.fullmatch(digits):
        raise Refused(f"ERR {_quoted(argument)} is not {what}: digits only")
    number = int(digits)
    if number > most:
        raise Refused(f"ERR {number} is more than {most}, the most for {what}")
    return number


def read_seconds(argument: Argument, what: str) -> float:
    """Reads milliseconds and returns seconds."""
    return read_number(argument, f"{what} in milliseconds", MAX_MS) / 1000


def read_text(argument: Argument) -> str:
    try:
        return bytes(argument).decode()
    except UnicodeDecodeError:
        raise Refused(f"ERR {_quoted(argument)} is not UTF-8") from None


def read_name(text: str) -> str:
    if not is_name(text):
        raise Refused(f"ERR a name has 1 to {MAX_NAME} printable characters")
    return text


def read_secret(text: str) -> str:
    """Reads what lets a process join the session of its engine. The refusal does not repeat it."""
    if not _SECRET.fullmatch(text):
        raise Refused(
            "ERR ENGINE takes a secret of 16 to 64 random bytes, in hexadecimal; NAME is what is shown"
        )
    return text


def read_shard(text: str) -> Shard:
    shard = Shard.parse(text)
    if shard is None:
        raise Refused(f"ERR {text[:40]!r} is not a shard: write it like L0-32H0-4")
    return shard


def read_hex(argument: Argument) -> bytes:
    try:
        return bytes.fromhex(read_text(argument))
    except ValueError:
        raise Refused(f"ERR {_quoted(argument)} is not hexadecimal") from None


def read_keys(arguments: Sequence[Argument]) -> list[bytes]:
    """Reads keys of which none may occur twice."""
    keys = read_chain(arguments)
    if len(set(keys)) != len(keys):
        raise Refused("MISUSE a key occurs twice in one request")
    return keys


def read_chain(arguments: Sequence[Argument]) -> list[bytes]:
    """Reads the keys of a prompt: each argument has many concatenated keys, or one in hexadecimal.

    The core refuses a prompt with the same key twice.
    """
    key_runs = [
        each if len(each) != 64 or not _HEX_KEY.fullmatch(each) else read_hex(each) for each in arguments
    ]
    nbytes = sum(map(len, key_runs))
    if nbytes > MAX_KEYS * KEY_BYTES:
        raise Refused(f"ERR {nbytes // KEY_BYTES} keys: at most {MAX_KEYS} in one request")
    for part in key_runs:
        if len(part) % KEY_BYTES:
            raise Refused(f"ERR keys have {KEY_BYTES} bytes, or {2 * KEY_BYTES} hex digits; got {len(part)}")
    data = b"".join(key_runs)
    keys: list[bytes] = np.frombuffer(data, f"V{KEY_BYTES}").tolist()
    if VALUES in data and any(map(is_value, keys)):
        raise Refused("MISUSE a key belongs to a named value: engines store KV, SET stores values")
    return keys


def read_asker(arguments: list[Argument]) -> tuple[str, str, str, list[Argument]]:
    """Reads `[SESSION name] [PARENT name] [SOURCE name]` before the keys: the names, and the rest."""
    values_by_word = {b"SESSION": "", b"PARENT": "", b"SOURCE": ""}
    for _ in values_by_word:  # a word that is repeated is refused as a key
        word = bytes(arguments[0]).upper() if len(arguments) > 1 and len(arguments[0]) < 8 else b""
        if values_by_word.get(word) != "":
            break
        values_by_word[word] = read_name(read_text(arguments[1]))
        arguments = arguments[2:]
    return values_by_word[b"SESSION"], values_by_word[b"PARENT"], values_by_word[b"SOURCE"], arguments


def read_lifetime(arguments: list[Argument]) -> tuple[float | None, list[bytes]]:
    """Reads `[TTL milliseconds] keys…`."""
    if len(arguments[0]) == 3 and bytes(arguments[0]).upper() == b"TTL":
        milliseconds = read_number(arguments[1], "a time in milliseconds") if len(arguments) > 1 else 0
        return milliseconds / 1000, read_keys(arguments[2:])
    return None, read_keys(arguments)


def read_identity(argument: Argument) -> Identity:
    try:
        if len(argument) > MAX_IDENTITY:
            raise TypeError
        found = json.loads(bytes(argument))
        if any(type(value) is not _IDENTITY[name] for name, value in found.items()):
            raise TypeError
        json.dumps(found, ensure_ascii=False).encode()  # JSON can name half of a character
        return Identity(**found)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise Refused(
            "ERR an identity is JSON: an object of the fields of lmtier.format.keys.Identity"
        ) from None


def _quoted(argument: Argument) -> str:
    return repr(bytes(argument[:32]))[1:]
