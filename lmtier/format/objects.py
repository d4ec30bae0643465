"""The object format, on disk and on the wire: one 4 KiB header page, then the payload.

    0    8   magic "lmtierKV"             88   8   payload bytes as stored (little endian)
    8    4   format version, 1            96   16  xxh3-128 of the payload as stored
    12   4   layout length, n             112  4   mark length, m
    16   32  key                          116  4   zeros
    48   16  shard, 4 × u32               120  8   when it expires, ms since the epoch; 0: never
    64   16  codec name, zero padded      128  n   layout, canonical JSON
    80   8   payload bytes, raw           ..   m   mark: free for the writer, a fingerprint for KV
                                          ..       zeros
                                          4000 8   when it was stored, ms since the epoch; 0: unknown
                                          4008 72  who stored it, UTF-8, zero padded
                                          4080 16  xxh3-128 of bytes 0..4079

A reader checks all of it before it uses one byte. docs/FORMAT.md specifies it for other readers. There is no
pickle, nothing is executed, and no size in a header makes the reader allocate memory: the layout gives the
decoded size, and the reader provides the room. The codecs are in compression.py.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

import numpy as np
import xxhash

from lmtier.errors import LayoutError
from lmtier.format.compression import CODECS, RAW, Codec, MissingLibrary, NotDecodable, find
from lmtier.format.keys import is_value
from lmtier.format.layout import PAGE, Layout, Name, Shard, padded

MAGIC = b"lmtierKV"
VERSION = 1
_HEAD = struct.Struct("<8sII32s4I16sQQ16sI4xQ")
_MADE = struct.Struct("<Q72s")
_MADE_AT = PAGE - 16 - _MADE.size
_ROOM = _MADE_AT - _HEAD.size
NO_MARK = b""
MAX_NAME = 72
"""The most bytes of an engine's name. Longer names are cut."""
MARK_ROOM = 3072
"""The most bytes of a mark. A long layout leaves less room: see `mark_room`."""
_WORTH = 16
"""A payload is stored encoded if that saves one part in so many, because every reader must decode it."""

__all__ = [
    "PAGE", "CorruptObject", "Header", "Made", "Scratch", "Suspect", "UnreadableObject", "check", "checksum",
    "encode", "mark_room", "padded", "peek", "read_header", "seal", "unseal", "worth",
]  # fmt: skip


class Made(NamedTuple):
    """Who stored an object, and when. Only `lmtier clear --stored-by` uses it."""

    by: str = ""
    at: int = 0
    """In ms since the epoch, by the clock of the server that stored it; 0: unknown."""


_UNSAID = Made()


@dataclass(frozen=True, slots=True)
class Suspect:
    """Chunks to delete: those under `prefix` that matching engines stored from `since` to `until`."""

    prefix: bytes = b""
    by: str = "*"
    """A shell pattern for the names of engines."""
    since: int = 0
    until: int = 1 << 62

    def covers(self, key: bytes, made: Made) -> bool:
        """Whether this chunk is suspect. A chunk without a time of storing is not."""
        is_meant = max(self.since, 1) <= made.at <= self.until and fnmatchcase(made.by, self.by)
        return is_meant and key.startswith(self.prefix) and not is_value(key)


Buffer: TypeAlias = "bytes | bytearray | memoryview"


class CorruptObject(Exception):
    """These bytes are not the requested object; the message says why. Never leaves the worker thread."""


class UnreadableObject(Exception):
    """A sound object that cannot be decoded here, because a library is missing. Never leaves the thread."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an object: its description, and the data to verify it."""

    name: Name
    layout: Layout
    nbytes: int
    mark: bytes = NO_MARK
    """For KV, the fingerprint of the engine's raw blocks, if one was taken: arrangement (8), xxh3-64 (8)."""
    codec: str = RAW
    encoded: int = 0
    """Payload bytes as stored, if they went through a codec."""
    expires: int = 0
    """When it expires, in ms since the epoch; 0: never. The cache that reads it checks this."""
    made: Made = _UNSAID

    @property
    def at_rest(self) -> int:
        """Payload bytes as stored."""
        return self.encoded or self.nbytes


class Scratch:
    """A thread's memory to encode and decode in. It is kept, and grows to the largest size needed."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Whole pages, aligned. The same memory is returned each time."""
        if len(self._memory) < padded(nbytes):
            self._memory = memoryview(b"")  # free the old memory first
            self._memory = memoryview(mmap.mmap(-1, padded(nbytes)))
        return self._memory[: padded(nbytes)]


def checksum(data: Buffer) -> bytes:
    return xxhash.xxh3_128_digest(data)


def worth(nbytes: int) -> int:
    """The most bytes that `nbytes` may take encoded: a page and a sixteenth less. 0: impossible."""
    return max(0, nbytes - max(PAGE, nbytes // _WORTH))


def encode(header: Header, payload: memoryview, codec: Codec, scratch: Scratch) -> tuple[Header, memoryview]:
    """The header and payload to seal and store. They are unchanged if `codec` does not save enough.

    Named values are not encoded: a scan reads their size from the stored bytes. KV that is stored
    approximately loses its mark: the original bytes will not come back.
    """
    body = payload[: header.nbytes]
    room = worth(header.nbytes)
    if not room or is_value(header.name.key):
        return header, payload
    memory = scratch.take(room)
    got = codec.encode(body, memory[:room], header.layout, header.name.shard)
    if not got:
        return header, payload
    memory[got : padded(got)] = bytes(padded(got) - got)
    mark = header.mark if codec.is_exact else NO_MARK
    return replace(header, mark=mark, codec=codec.name, encoded=got), memory[: padded(got)]


def mark_room(layout: Layout) -> int:
    """Bytes that a mark may take in the header of an object of this layout."""
    return min(MARK_ROOM, _ROOM - len(layout.to_json()))


def seal(page: memoryview, header: Header, payload: memoryview) -> None:
    """Write the header of `payload`, as stored, into `page`. One pass over the payload, outside the GIL."""
    layout = header.layout.to_json()
    if len(layout) + len(header.mark) > _ROOM:
        raise LayoutError(
            f"layout and mark take {len(layout)} + {len(header.mark)} bytes; a header has room for {_ROOM}"
        )
    key, shard = header.name
    body = payload[: header.at_rest]
    head = _HEAD.pack(
        *(MAGIC, VERSION, len(layout), key, *shard, header.codec.encode()),
        *(header.nbytes, header.at_rest, checksum(body), len(header.mark), header.expires),
    )
    made = _MADE.pack(header.made.at, header.made.by.encode()[:MAX_NAME])
    page[:PAGE] = (head + layout + header.mark).ljust(_MADE_AT, b"\0") + made + bytes(16)
    page[PAGE - 16 : PAGE] = checksum(page[: PAGE - 16])


def read_header(page: memoryview) -> tuple[Header, bytes]:
    """The header in `page` and the checksum of the payload as stored. Raises CorruptObject."""
    if len(page) < PAGE:
        raise CorruptObject(f"truncated: {len(page)} bytes, the header takes {PAGE}")
    if page[:8] != MAGIC:
        raise CorruptObject("not an lmtier object (magic)")
    fields = _HEAD.unpack_from(page)
    _, version, layout_len, key, *rest = fields
    shard, (codec, raw, stored, digest, mark_len, expires) = Shard(*rest[:4]), rest[4:]
    if version != VERSION:
        raise CorruptObject(f"format version {version}; this reader knows {VERSION}")
    if checksum(page[: PAGE - 16]) != page[PAGE - 16 : PAGE]:
        raise CorruptObject("header checksum differs")
    word = _CODEC_NAMES.get(codec)
    if word is None:
        raise CorruptObject(f"unknown codec {codec!r}")
    if raw != stored if word == RAW else not 0 < stored < raw:
        raise CorruptObject(f"{stored} bytes of {word} cannot decode to {raw}")
    try:
        if layout_len + mark_len > _ROOM:
            raise LayoutError("layout and mark do not fit in the header")
        end = _HEAD.size + layout_len
        layout = Layout.from_json(bytes(page[_HEAD.size : end]))
        if layout.nbytes(shard) != raw:
            raise LayoutError(f"{raw} bytes, its layout says {layout.nbytes(shard)}")
    except LayoutError as error:
        raise CorruptObject(str(error)) from None
    mark, encoded = bytes(page[end : end + mark_len]), 0 if word == RAW else stored
    at, by = _MADE.unpack_from(page, _MADE_AT)
    made = Made(by.rstrip(b"\0").decode(errors="replace"), at)
    return Header(Name(key, shard), layout, raw, mark, word, encoded, expires, made), digest


_CODEC_NAMES = {name.encode().ljust(16, b"\0"): name for name in (RAW, *CODECS)}


def peek(page: memoryview, name: Name) -> tuple[Header, bytes]:
    """The header of `name` and its payload's checksum. The payload itself is not checked."""
    header, digest = read_header(page)
    if header.name != name:
        raise CorruptObject(f"holds {header.name}, asked for {name}")
    return header, digest


def check(page: memoryview, payload: memoryview, name: Name, got: int | None = None) -> Header:
    """Check an object as stored, without decoding it. Returns the header.

    `got` is the number of payload bytes that arrived. `payload` may be longer than the object (extents
    are whole pages), never shorter.
    """
    header, digest = peek(page, name)
    arrived = len(payload) if got is None else got
    if arrived < header.at_rest or len(payload) < header.at_rest:
        raise CorruptObject(f"truncated: {arrived} of {header.at_rest} payload bytes")
    if arrived not in (header.at_rest, padded(header.at_rest)):
        raise CorruptObject(f"{arrived} payload bytes arrived, the header says {header.at_rest}")
    if checksum(payload[: header.at_rest]) != digest:
        raise CorruptObject("payload checksum differs")
    return header


def unseal(
    page: memoryview,
    payload: memoryview,
    name: Name,
    got: int | None = None,
    scratch: Scratch | None = None,
) -> Header:
    """`check`, then decode in place. Raises CorruptObject, or UnreadableObject if a library is missing.

    `payload` needs room for the decoded size, and `scratch` for the stored size.
    """
    header = check(page, payload, name, got)
    if header.codec == RAW:
        return header
    if len(payload) < header.nbytes:
        raise CorruptObject(f"{header.nbytes} bytes decoded, where {len(payload)} are expected")
    try:
        codec = find(header.codec)
        memory = (scratch or Scratch()).take(header.encoded)[: header.encoded]
        # The encoded bytes are overwritten by the decoded ones. numpy copies them aside, outside the GIL.
        np.copyto(np.frombuffer(memory, "u1"), np.frombuffer(payload[: header.encoded], "u1"))
        codec.decode(memory, payload[: header.nbytes], header.layout, header.name.shard)
    except MissingLibrary as error:
        raise UnreadableObject(str(error)) from None
    except NotDecodable as error:
        raise CorruptObject(f"{header.codec}: {error}") from None
    beyond = payload[header.nbytes : padded(header.nbytes)]
    beyond[:] = bytes(len(beyond))  # the same as an object stored without a codec
    return header
