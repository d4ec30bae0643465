"""The file that one server hands to the next: named facts and columns, with a version and a checksum.

     0   8  magic "LMTBOOKS"            16   8  length of the whole
     8   4  version                     24   8  length of the head
    12   4  0                           32  16  xxh3-128 of all bytes from 48 on
    48   ·  the head, JSON: {"facts": {…}, "columns": {name: [offset, length]}}
     ·   ·  the columns, at these offsets behind the head

Facts and columns have names. A reader ignores those that it does not know, and takes a default for those that
are missing. So a server can take over from an older one, and an older one from it. A change of meaning needs
another version.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

import xxhash

from lmtier.errors import LMTierError, size_text

VERSION = 3
MAX_BYTES = 4 << 30
"""The most bytes of such a file. A million chunks take some 100 MB."""
_MAGIC = b"LMTBOOKS"
_HEAD = struct.Struct("<8sIIQQ16s")


class HandoverFileError(LMTierError):
    """The handover file is damaged, or of a version that cannot be read here."""


@dataclass(slots=True)
class HandoverFile:
    facts: dict[str, Any] = field(default_factory=dict)
    """What JSON can hold."""
    columns: dict[str, bytes | memoryview] = field(default_factory=dict)

    def column(self, name: str) -> memoryview:
        """The bytes of a column; empty if there is none."""
        return memoryview(self.columns.get(name, b""))

    def pack(self) -> list[bytes | memoryview]:
        """The bytes, in parts."""
        places, offset = {}, 0
        for name, column in self.columns.items():
            places[name] = [offset, len(column)]
            offset += len(column)
        head = json.dumps({"facts": self.facts, "columns": places}, separators=(",", ":")).encode()
        parts = [head, *self.columns.values()]
        total = _HEAD.size + len(head) + offset
        if total > MAX_BYTES:
            raise HandoverFileError(
                f"the handover file has {size_text(total)}, and at most {size_text(MAX_BYTES)} can be handed "
                "over"
            )
        checksum = xxhash.xxh3_128()
        for part in parts:
            checksum.update(part)
        return [_HEAD.pack(_MAGIC, VERSION, 0, total, len(head), checksum.digest()), *parts]

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> HandoverFile:
        """The inverse of `pack`, with its parts joined."""
        view = memoryview(data)
        if len(view) < _HEAD.size:
            raise HandoverFileError(f"this is no handover file: only {len(view)} bytes")
        magic, version, _, total, length, checksum = _HEAD.unpack_from(view)
        if magic != _MAGIC:
            raise HandoverFileError("this is no handover file: it begins with something else")
        if version != VERSION:
            raise HandoverFileError(
                f"the handover file has version {version}, and this lmtier reads version {VERSION}"
            )
        if total != len(view) or length > total - _HEAD.size:
            raise HandoverFileError(f"the handover file has {len(view)} bytes, but says that it has {total}")
        content = view[_HEAD.size :]
        if xxhash.xxh3_128_digest(content) != checksum:
            raise HandoverFileError("the handover file is damaged: its checksum differs")
        try:
            head = json.loads(bytes(content[:length]))
            columns_bytes = content[length:]
            columns: dict[str, bytes | memoryview] = {}
            for name, (offset, size) in head["columns"].items():
                if not 0 <= offset <= offset + size <= len(columns_bytes):
                    raise ValueError(f"column {name} lies outside")
                columns[name] = columns_bytes[offset : offset + size]
            return cls(dict(head["facts"]), columns)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HandoverFileError(f"the handover file cannot be read: {error!r}") from None
