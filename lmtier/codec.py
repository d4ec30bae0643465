"""The object format, on disk and on the wire alike: one 4 KiB header page, then the payload.

    0    8   magic "lmtierKV"             88   8   payload bytes as stored (little endian)
    8    4   format version, 1            96   16  xxh3-128 of the payload as stored
    12   4   layout length, n             112  4   mark length, m
    16   32  key                          116  12  zeros
    48   16  shard, 4 × u32               128  n   layout, canonical JSON
    64   16  codec name, zero padded      ..   m   mark: what its writer wants to read again
    80   8   payload bytes, raw           ..       zeros
                                          4080 16  xxh3-128 of bytes 0..4079

A reader checks all of it before one byte is believed. docs/FORMAT.md says the same for other people's
readers. No pickle, nothing is executed, nothing is allocated on a header's word.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from lmtier.errors import LayoutError
from lmtier.layout import PAGE, Layout, Name, Shard, padded

MAGIC = b"lmtierKV"
VERSION = 1
RAW = b"raw"
_HEAD = struct.Struct("<8sII32s4I16sQQ16sI12x")
_ROOM = PAGE - 16 - _HEAD.size
NO_MARK = b""
MARK_ROOM = 3072
"""Bytes that a mark may take, which leaves enough for any layout."""

__all__ = ["PAGE", "CorruptObject", "Header", "checksum", "padded", "peek", "read_header", "seal", "unseal"]

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class CorruptObject(Exception):
    """These bytes are not the object that was asked for; says why. Never leaves the worker thread."""


@dataclass(frozen=True, slots=True)
class Header:
    """What an object says of itself, and what must be known to believe it."""

    name: Name
    layout: Layout
    nbytes: int
    mark: bytes = NO_MARK
    """For KV, the fingerprint of the engine's raw blocks, if one was taken: of what (8), xxh3-64 (8)."""


def checksum(data: Buffer) -> bytes:
    return xxhash.xxh3_128_digest(data)


def seal(page: memoryview, header: Header, payload: memoryview) -> None:
    """Write the header of `payload` into `page`. One pass over the payload, outside the GIL."""
    layout = header.layout.to_json()
    if len(layout) + len(header.mark) > _ROOM:
        raise LayoutError(
            f"layout and mark take {len(layout)} + {len(header.mark)} bytes, the header has room for {_ROOM}"
        )
    key, shard = header.name
    body = payload[: header.nbytes]
    head = _HEAD.pack(
        *(MAGIC, VERSION, len(layout), key, *shard, RAW),
        *(header.nbytes, header.nbytes, checksum(body), len(header.mark)),
    )
    page[:PAGE] = (head + layout + header.mark).ljust(PAGE - 16, b"\0") + bytes(16)
    page[PAGE - 16 : PAGE] = checksum(page[: PAGE - 16])


def read_header(page: memoryview) -> tuple[Header, bytes]:
    """The header in `page` and the payload's checksum. Raises CorruptObject."""
    if len(page) < PAGE:
        raise CorruptObject(f"truncated: {len(page)} bytes, the header takes {PAGE}")
    if page[:8] != MAGIC:
        raise CorruptObject("not an lmtier object (magic)")
    fields = _HEAD.unpack_from(page)
    _, version, layout_len, key, *rest = fields
    shard, (codec, raw, stored, digest, mark_len) = Shard(*rest[:4]), rest[4:]
    if version != VERSION:
        raise CorruptObject(f"format version {version}, this reader knows {VERSION}")
    if checksum(page[: PAGE - 16]) != page[PAGE - 16 : PAGE]:
        raise CorruptObject("header checksum differs")
    if codec.rstrip(b"\0") != RAW or raw != stored:
        raise CorruptObject(f"unknown codec {codec!r}")
    try:
        if layout_len + mark_len > _ROOM:
            raise LayoutError("layout and mark do not fit in the header")
        end = _HEAD.size + layout_len
        layout = Layout.from_json(bytes(page[_HEAD.size : end]))
        if layout.nbytes(shard) != raw:
            raise LayoutError(f"{raw} bytes, its layout says {layout.nbytes(shard)}")
    except LayoutError as error:
        raise CorruptObject(str(error)) from None
    return Header(Name(key, shard), layout, raw, bytes(page[end : end + mark_len])), digest


def peek(page: memoryview, name: Name) -> tuple[Header, bytes]:
    """The header of `name` and its payload's checksum; nothing is known of the payload itself."""
    header, digest = read_header(page)
    if header.name != name:
        raise CorruptObject(f"holds {header.name}, asked for {name}")
    return header, digest


def unseal(page: memoryview, payload: memoryview, name: Name, got: int | None = None) -> Header:
    """Check everything; return the header. `got` is the number of payload bytes that arrived.

    `payload` may be longer than the object (extents are whole pages), never shorter.
    """
    header, digest = peek(page, name)
    arrived = len(payload) if got is None else got
    if arrived < header.nbytes or len(payload) < header.nbytes:
        raise CorruptObject(f"truncated: {arrived} of {header.nbytes} payload bytes")
    if arrived not in (header.nbytes, padded(header.nbytes)):
        raise CorruptObject(f"{arrived} payload bytes arrived, the header says {header.nbytes}")
    if checksum(payload[: header.nbytes]) != digest:
        raise CorruptObject("payload checksum differs")
    return header
