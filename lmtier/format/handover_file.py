"""What one server hands to the next: named facts, with a version and a checksum.

     0   8  magic "LMTBOOKS"      12  16  xxh3-128 of all bytes from 28 on
     8   4  version               28   ·  the facts: JSON, with {"hex": "…"} for bytes

A reader ignores facts that it does not know, and takes a default for those that are missing. So a server can
take over from an older one, and an older one from it. A change of meaning needs another version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import xxhash

from lmtier.errors import LMTierError

VERSION = 4
_MAGIC = b"LMTBOOKS"
_HEAD = struct.Struct("<8sI16s")


class HandoverFileError(LMTierError):
    """The handover file is damaged, contradicts itself, or is of a version that cannot be read here."""


def pack(facts: Mapping[str, Any]) -> bytes:
    content = json.dumps(facts, separators=(",", ":"), default=lambda value: {"hex": value.hex()}).encode()
    return _HEAD.pack(_MAGIC, VERSION, xxhash.xxh3_128_digest(content)) + content


def unpack(data: bytes) -> dict[str, Any]:
    """The inverse of `pack`, but that tuples are lists."""
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise HandoverFileError("this is no handover file")
    _, version, checksum = _HEAD.unpack_from(data)
    if version != VERSION:
        raise HandoverFileError(f"the handover file has version {version}; this lmtier reads {VERSION}")
    content = data[_HEAD.size :]
    if xxhash.xxh3_128_digest(content) != checksum:
        raise HandoverFileError("the handover file is damaged: its checksum differs")
    try:
        return dict(json.loads(content, object_hook=_bytes_or_dict))
    except (ValueError, TypeError) as error:
        raise HandoverFileError(f"the handover file cannot be read: {error!r}") from None


def _bytes_or_dict(found: dict[str, Any]) -> Any:
    return bytes.fromhex(found["hex"]) if found.keys() == {"hex"} else found
