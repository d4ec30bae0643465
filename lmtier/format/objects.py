"""The object format, on disk and on the wire: one 4 KiB header page, then the payload.

    0    8   magic "lmtierKV"             88   8   payload bytes as stored (little endian)
    8    4   format version, 1 or 2       96   16  xxh3-128 of the payload as stored
    12   4   layout length, n             112  4   mark length, m
    16   32  key                          116  4   zeros
    48   16  shard, 4 × u32               120  8   when it expires, ms since the epoch; 0: never
    64   16  codec name, zero padded      128  n   layout, canonical JSON
    80   8   payload bytes, raw           ..   m   mark: free for the writer, a fingerprint for KV
                                          ..       zeros
                                          4000 8   when it was stored, ms since the epoch; 0: unknown
                                          4008 72  who stored it, UTF-8, zero padded
                                          4080 16  xxh3-128 of bytes 0..4079

Version 2 is sealed (sealing.py): the whole pages of the payload and the mark are encrypted, and every byte is
authenticated.

                                          96   16  tag of the payload and of bytes 0..95
                                          3944 8   key id
                                          3952 32  salt
                                          3984 16  tag of the mark and of all other bytes up to 4079

A reader checks all of it before it uses one byte. docs/FORMAT.md specifies it for other readers. There is no
pickle, nothing is executed, and no size in a header makes the reader allocate memory: the layout gives the
decoded size, and the reader provides the room. The codecs are in compression.py.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

import numpy as np
import xxhash

from lmtier.errors import LayoutError
from lmtier.format.compression import CODECS, RAW, Codec, MissingLibrary, NotDecodable, find
from lmtier.format.keys import is_value, tenant_of
from lmtier.format.layout import PAGE, Layout, Name, Shard, padded
from lmtier.format.sealing import (
    ID_BYTES,
    MARK_NONCE,
    PAYLOAD_NONCE,
    SALT_BYTES,
    TAG_BYTES,
    BadSeal,
    Buffer,
    NoKey,
    SealingKeys,
    decrypt,
    encrypt,
    new_salt,
)

MAGIC = b"lmtierKV"
VERSION = 1
SEALED_VERSION = 2
_HEAD = struct.Struct("<8sII32s4I16sQQ16sI4xQ")
_MADE = struct.Struct("<Q72s")
_MADE_AT = PAGE - 16 - _MADE.size
_SEAL = struct.Struct(f"<{ID_BYTES}s{SALT_BYTES}s{TAG_BYTES}s")
_SEAL_AT = _MADE_AT - _SEAL.size
_MARK_TAG_AT = _MADE_AT - TAG_BYTES
_TAG_AT = 96
_ENDS = {VERSION: _MADE_AT, SEALED_VERSION: _SEAL_AT}
"""Where layout and mark end at the latest."""
_HUGE = 2 << 20
NO_MARK = b""
MAX_NAME = 72
"""The most bytes of an engine's name. Longer names are cut."""
MARK_ROOM = 3072
"""The most bytes of a mark. A long layout leaves less room: see `mark_room`."""
_WORTH = 16
"""A payload is stored encoded if that saves one part in so many, because every reader must decode it."""

__all__ = [
    "PAGE",
    "UNKNOWN_PROVENANCE",
    "CorruptObject",
    "Header",
    "Provenance",
    "Scratch",
    "Seal",
    "Selector",
    "UnreadableObject",
    "UnsealedObject",
    "authenticate",
    "check",
    "checksum",
    "describe",
    "encode",
    "mark_room",
    "max_encoded_bytes",
    "now_ms",
    "padded",
    "peek",
    "read_header",
    "seal",
    "unseal",
]  # fmt: skip


class Provenance(NamedTuple):
    """Who stored an object, and when. Only `lmtier clear --stored-by` uses it."""

    by: str = ""
    at: int = 0
    """In ms since the epoch, by the clock of the server that stored it; 0: unknown."""


UNKNOWN_PROVENANCE = Provenance()
"""Neither is known. This one object serves every entry without a maker."""


def now_ms() -> int:
    """In ms since the epoch, as in headers."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Selector:
    """Which chunks: those under `prefix`, of these tenants, that matching engines stored in a time."""

    prefix: bytes = b""
    by: str = "*"
    """A shell pattern for the names of engines."""
    since: int = 0
    """In ms since the epoch. With it, or with `by`, headers decide, and no named value is meant."""
    until: int = 1 << 62
    """It limits chunks of tenants, and those whose headers decide."""
    tenants: frozenset[bytes] = frozenset()
    """As `keys.tenant` gives them. Empty: all, and named values too."""

    @property
    def needs_headers(self) -> bool:
        return bool(self.since) or self.by != "*"

    @property
    def is_prefix(self) -> bool:
        return not (self.tenants or self.needs_headers)

    def concerns(self, key: bytes) -> bool:
        """Whether a chunk with this key may be meant."""
        is_theirs = not self.tenants or tenant_of(key) in self.tenants
        return is_theirs and key.startswith(self.prefix) and (self.is_prefix or not is_value(key))

    def covers(self, key: bytes, made: Provenance) -> bool:
        """Whether this chunk is meant. Where headers decide, one without a time of storing is not."""
        if not self.concerns(key):  # quick: it is asked for each chunk of a tier
            return False
        since = max(self.since, 1) if self.needs_headers else 0
        in_time = since <= made.at <= self.until
        return self.is_prefix or (in_time and fnmatchcase(made.by, self.by))


EVERYTHING = Selector()


class CorruptObject(Exception):
    """These bytes are not the requested object; the message says why. Never leaves the worker thread."""


class UnreadableObject(Exception):
    """A sound object that cannot be decoded here, because a library is missing. Never leaves the thread."""


class UnsealedObject(Exception):
    """An object that anyone could have written, in a tier that seals. Never leaves the thread."""


class Seal(NamedTuple):
    """How an object is sealed."""

    key_id: bytes
    salt: bytes
    tag: bytes
    """The tag of the payload."""
    mark: bytes
    """The encrypted mark."""
    mark_tag: bytes


Proof: TypeAlias = "bytes | Seal"
"""What shows that a payload is the right one: its checksum, or its seal."""


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
    provenance: Provenance = UNKNOWN_PROVENANCE

    @property
    def stored_nbytes(self) -> int:
        """Payload bytes as stored."""
        return self.encoded or self.nbytes


def anonymous(nbytes: int) -> memoryview:
    """Whole pages that no core dump has."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_DONTDUMP)
    return memoryview(memory)


class Scratch:
    """A thread's memory to encode and decode in. It is kept, and grows to the largest size needed."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Whole pages, aligned. The same memory is returned each time."""
        if len(self._memory) < padded(nbytes):
            self._memory = memoryview(b"")  # free the old memory first
            # Huge pages, which are aligned and private: the disk reads small ones at half the speed.
            memory = mmap.mmap(-1, padded(nbytes) + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_DONTDUMP)
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE
            self._memory = memoryview(memory)[start : start + padded(nbytes)]
        return self._memory[: padded(nbytes)]


def checksum(data: Buffer) -> bytes:
    return xxhash.xxh3_128_digest(data)


def max_encoded_bytes(nbytes: int) -> int:
    """The most bytes that `nbytes` may take encoded: a page and a sixteenth less. 0: impossible."""
    return max(0, nbytes - max(PAGE, nbytes // _WORTH))


def encode(header: Header, payload: memoryview, codec: Codec, scratch: Scratch) -> tuple[Header, memoryview]:
    """The header and payload to seal and store. They are unchanged if `codec` does not save enough.

    Named values are not encoded: a scan reads their size from the stored bytes. KV that is stored
    approximately loses its mark: the original bytes will not come back.
    """
    body = payload[: header.nbytes]
    room = max_encoded_bytes(header.nbytes)
    if not room or is_value(header.name.key):
        return header, payload
    memory = scratch.take(room)
    got = codec.encode(body, memory[:room], header.layout, header.name.shard)
    if not got:
        return header, payload
    memory[got : padded(got)] = bytes(padded(got) - got)
    mark = header.mark if codec.is_exact else NO_MARK
    return replace(header, mark=mark, codec=codec.name, encoded=got), memory[: padded(got)]


def mark_room(layout: Layout, *, is_sealed: bool = False) -> int:
    """Bytes that a mark may take in the header of an object of this layout."""
    end = _ENDS[SEALED_VERSION if is_sealed else VERSION]
    return min(MARK_ROOM, end - _HEAD.size - len(layout.to_json()))


def seal(
    page: memoryview,
    header: Header,
    payload: memoryview,
    keys: SealingKeys | None = None,
    scratch: Scratch | None = None,
) -> memoryview:
    """Write the header of `payload`, which is encoded already, into `page`. Returns the payload to store.

    One pass over the payload, outside the GIL. With `keys` the pass encrypts it into `scratch`, where it may
    be already; otherwise it is unchanged. Raises NoKey.
    """
    digest = bytes(TAG_BYTES) if keys is not None else checksum(payload[: header.stored_nbytes])
    describe(page, header, digest, VERSION if keys is None else SEALED_VERSION)
    if keys is not None:
        payload = _encrypt(page, header, payload, keys, (scratch or Scratch()).take(header.stored_nbytes))
        page[PAGE - 16 : PAGE] = checksum(page[: PAGE - 16])
    return payload


def describe(page: memoryview, header: Header, digest: bytes, version: int = VERSION) -> None:
    """Write the header of a payload whose checksum is `digest` into `page`."""
    layout = header.layout.to_json()
    if len(layout) + len(header.mark) > _ENDS[version] - _HEAD.size:
        raise LayoutError(
            f"layout and mark take {len(layout)} + {len(header.mark)} bytes; a header has room for "
            f"{_ENDS[version] - _HEAD.size}"
        )
    key, shard = header.name
    head = _HEAD.pack(
        *(MAGIC, version, len(layout), key, *shard, header.codec.encode()),
        *(header.nbytes, header.stored_nbytes, digest, len(header.mark), header.expires),
    )
    made = _MADE.pack(header.provenance.at, header.provenance.by.encode()[:MAX_NAME])
    page[:PAGE] = (head + layout + header.mark).ljust(_MADE_AT, b"\0") + made + bytes(16)
    page[PAGE - 16 : PAGE] = checksum(page[: PAGE - 16])


def _encrypt(
    page: memoryview, header: Header, payload: memoryview, keys: SealingKeys, target: memoryview
) -> memoryview:
    secret, salt = keys.sealing_secret(header.name.key), new_salt()
    key = secret.key(salt)
    body = payload[: padded(header.stored_nbytes)]
    page[_TAG_AT : _TAG_AT + TAG_BYTES] = encrypt(key, PAYLOAD_NONCE, body, target, (page[:_TAG_AT],))
    _SEAL.pack_into(page, _SEAL_AT, secret.id, salt, bytes(TAG_BYTES))
    mark, rest = _around_mark(page, len(header.layout.to_json()), len(header.mark))
    page[_MARK_TAG_AT:_MADE_AT] = encrypt(key, MARK_NONCE, mark, mark, rest)
    return target


def _around_mark(page: memoryview, layout: int, mark: int) -> tuple[memoryview, Sequence[memoryview]]:
    """The mark, and all other bytes of the header that its tag covers."""
    start = _HEAD.size + layout
    end = start + mark
    return page[start:end], (page[:start], page[end:_MARK_TAG_AT], page[_MADE_AT : PAGE - 16])


def read_header(page: memoryview) -> tuple[Header, Proof]:
    """The header in `page`, and the proof of its payload. Raises CorruptObject.

    A checksum detects damage and a seal forgery; only `authenticate` looks at the seal. Until then the mark
    of a sealed object is empty.
    """
    if len(page) < PAGE:
        raise CorruptObject(f"truncated: {len(page)} bytes, the header takes {PAGE}")
    if page[:8] != MAGIC:
        raise CorruptObject("not an lmtier object (magic)")
    fields = _HEAD.unpack_from(page)
    _, version, layout_len, key, *rest = fields
    shard, (codec, raw, stored, digest, mark_len, expires) = Shard(*rest[:4]), rest[4:]
    if version not in _ENDS:
        raise CorruptObject(f"format version {version}; this reader knows {VERSION} and {SEALED_VERSION}")
    if checksum(page[: PAGE - 16]) != page[PAGE - 16 : PAGE]:
        raise CorruptObject("header checksum differs")
    codec_name = _CODEC_NAMES.get(codec)
    if codec_name is None:
        raise CorruptObject(f"unknown codec {codec!r}")
    if raw != stored if codec_name == RAW else not 0 < stored < raw:
        raise CorruptObject(f"{stored} bytes of {codec_name} cannot decode to {raw}")
    try:
        if layout_len + mark_len > _ENDS[version] - _HEAD.size:
            raise LayoutError("layout and mark do not fit in the header")
        end = _HEAD.size + layout_len
        layout = Layout.from_json(bytes(page[_HEAD.size : end]))
        if layout.nbytes(shard) != raw:
            raise LayoutError(f"{raw} bytes, its layout says {layout.nbytes(shard)}")
    except LayoutError as error:
        raise CorruptObject(str(error)) from None
    mark, encoded = bytes(page[end : end + mark_len]), 0 if codec_name == RAW else stored
    stored_at, stored_by = _MADE.unpack_from(page, _MADE_AT)
    made = Provenance(stored_by.rstrip(b"\0").decode(errors="replace"), stored_at)
    header = Header(Name(key, shard), layout, raw, mark, codec_name, encoded, expires, made)
    if version == VERSION:
        return header, digest
    key_id, salt, mark_tag = _SEAL.unpack_from(page, _SEAL_AT)
    return replace(header, mark=NO_MARK), Seal(key_id, salt, digest, mark, mark_tag)


_CODEC_NAMES = {name.encode().ljust(16, b"\0"): name for name in (RAW, *CODECS)}


def peek(page: memoryview, name: Name) -> tuple[Header, Proof]:
    """The header of `name` and the proof of its payload, which is not checked; nor is a seal."""
    header, proof = read_header(page)
    if header.name != name:
        raise CorruptObject(f"holds {header.name}, asked for {name}")
    return header, proof


def authenticate(page: memoryview, name: Name, keys: SealingKeys | None) -> tuple[Header, Proof, bytes]:
    """`peek`, with a seal checked, and the mark decrypted. Returns the key of the object too, if it has one.

    With `keys` only sealed objects are accepted: others could be anyone's. Without, only unsealed ones.
    """
    header, proof = peek(page, name)
    if not isinstance(proof, Seal):
        if keys is not None:
            raise UnsealedObject("it is not sealed, and this tier serves sealed objects only")
        return header, proof, b""
    secret = None if keys is None else keys.opening_secret(name.key, proof.key_id)
    if secret is None:
        why = "no key is given" if keys is None else "that key is not known"
        raise NoKey(f"it is sealed with key {proof.key_id.hex()}, and {why} here")
    key, mark = secret.key(proof.salt), bytearray(len(proof.mark))
    _, rest = _around_mark(page, len(header.layout.to_json()), len(mark))
    try:
        decrypt(key, MARK_NONCE, proof.mark, mark, proof.mark_tag, rest)
    except BadSeal as error:
        raise CorruptObject(f"header: {error}") from None
    return replace(header, mark=bytes(mark)), proof, key


def check(
    page: memoryview, payload: memoryview, name: Name, got: int | None = None, keys: SealingKeys | None = None
) -> Header:
    """Check an object as stored, without decoding it. Returns the header. A sealed payload is decrypted.

    `got` is the number of payload bytes that arrived. `payload` may be longer than the object (extents
    are whole pages), never shorter. Raises CorruptObject, UnsealedObject or NoKey.
    """
    header, proof, key = authenticate(page, name, keys)
    arrived, size = len(payload) if got is None else got, header.stored_nbytes
    if isinstance(proof, Seal):
        size = padded(size)
    if arrived < size or len(payload) < size:
        raise CorruptObject(f"truncated: {arrived} of {size} payload bytes")
    if arrived not in (size, padded(size)):
        raise CorruptObject(f"{arrived} payload bytes arrived, the header says {size}")
    body = payload[:size]
    if not isinstance(proof, Seal):
        if checksum(body) != proof:
            raise CorruptObject("payload checksum differs")
        return header
    try:
        decrypt(key, PAYLOAD_NONCE, body, body, proof.tag, (page[:_TAG_AT],))
    except BadSeal as error:
        raise CorruptObject(f"payload: {error}") from None
    return header


def unseal(
    page: memoryview,
    payload: memoryview,
    name: Name,
    got: int | None = None,
    scratch: Scratch | None = None,
    keys: SealingKeys | None = None,
) -> Header:
    """`check`, then decode in place. Raises what `check` raises, or UnreadableObject: a library is missing.

    `payload` needs room for the decoded size, and `scratch` for the stored size.
    """
    header = check(page, payload, name, got, keys)
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
        if keys is not None:  # what was sealed does not stay behind
            memory[:] = bytes(len(memory))
    except MissingLibrary as error:
        raise UnreadableObject(str(error)) from None
    except NotDecodable as error:
        raise CorruptObject(f"{header.codec}: {error}") from None
    beyond = payload[header.nbytes : padded(header.nbytes)]
    beyond[:] = bytes(len(beyond))  # the same as an object stored without a codec
    return header
