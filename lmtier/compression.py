"""Codecs: a payload in fewer bytes, exactly or approximately, from one buffer into another.

    lz4              LZ4 block                               KV of 8 bits, or mostly zeros
    bitshuffle-lz4   Blosc2 chunk                            bf16 and fp16, fast
    shuffle-zstd     Blosc2 chunk                            bf16 and fp16, small
    fp8, int8        f32 scale a head and channel, then one byte an element; approximate, for cold tiers

Nothing here takes memory by the size of an object, or on the word of its bytes: source and target are
the caller's, and what decodes fills exactly the room it was given, or refuses.

One small C library does the exact ones: C-Blosc, as the package `blosc` installs it. It is called by ctypes,
because its C functions write into a given buffer and run outside the GIL; the package's own functions make
a new string of bytes for each object. The library writes and reads chunks of Blosc 1. Those of Blosc2, which
are stored, hold the same blocks behind a header of 32 bytes instead of 16. docs/CODECS.md has the numbers.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path

import numpy as np

from lmtier.errors import TierError
from lmtier.layout import PAGE, Array, Layout, Shard

log = logging.getLogger("lmtier")

RAW = "raw"
AUTO = "auto"
_PACKAGE = "blosc"
_LIBRARY = "libblosc.so.1"
_LARGEST = (1 << 31) - (1 << 20)  # their lengths have 32 bits


class NotDecodable(Exception):
    """These bytes are not what the codec writes for this layout; says why."""


class MissingLibrary(TierError):
    """A codec's library is not installed."""


@dataclass(frozen=True, slots=True)
class Codec:
    name: str
    encode: Callable[[memoryview, memoryview, Layout, Shard], int]
    """From a payload into room; the bytes written. 0: they do not fit, or it is not for such a layout."""
    decode: Callable[[memoryview, memoryview, Layout, Shard], None]
    """Fills a payload to its last byte, or raises NotDecodable. Uses up its source."""
    is_exact: bool = True


def find(name: str) -> Codec:
    """The codec, ready to work. Raises MissingLibrary."""
    codec = CODECS[name]
    if codec.is_exact:
        try:
            _load()
        except (ImportError, OSError, AttributeError):
            raise MissingLibrary(
                f"codec={name} needs the package {_PACKAGE}: pip install 'lmtier[codecs]'"
            ) from None
    return codec


@cache
def _load() -> ctypes.CDLL:
    """The C library that the package installs; no Python of the package is run."""
    package = metadata.distribution(_PACKAGE)
    listed = [Path(str(each.locate())) for each in package.files or () if each.name == _LIBRARY]
    moved = Path(str(package.locate_file("lib64"))) / _LIBRARY  # by `pip install --target`
    library = ctypes.CDLL(str(next((at for at in (*listed, moved) if at.exists()), _LIBRARY)))
    number, size, address, text = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
    for function, result, arguments in (
        (library.blosc_compress_ctx, number,
         (number, number, size, size, address, address, size, text, size, number)),
        (library.blosc_decompress_ctx, number, (address, address, size, number)),
        (library.LZ4_compress_default, number, (address, address, number, number)),
        (library.LZ4_decompress_safe, number, (address, address, number, number)),
        (library.ZSTD_decompress, size, (address, size, address, size)),
    ):  # fmt: skip
        function.restype, function.argtypes = result, arguments
    return library


def _bytes(memory: memoryview) -> Array:
    return np.frombuffer(memory, "u1")


# ---- exact


def _encode_lz4(payload: memoryview, room: memoryview, layout: Layout, shard: Shard) -> int:
    if len(payload) > _LARGEST:
        return 0
    source, target = _bytes(payload), _bytes(room)
    room_for = min(len(room), _LARGEST)
    return int(_load().LZ4_compress_default(source.ctypes.data, target.ctypes.data, len(payload), room_for))


def _decode_lz4(body: memoryview, payload: memoryview, layout: Layout, shard: Shard) -> None:
    _one_lz4(_bytes(body), _bytes(payload))


def _one_lz4(source: Array, target: Array) -> None:
    if max(source.size, target.size) > _LARGEST:
        raise NotDecodable(f"{source.size} bytes for {target.size}: too many")
    got = _load().LZ4_decompress_safe(source.ctypes.data, target.ctypes.data, source.size, target.size)
    if got != target.size:
        raise NotDecodable(f"LZ4 decodes {got} bytes, not {target.size}")


def _one_zstd(source: Array, target: Array) -> None:
    got = _load().ZSTD_decompress(target.ctypes.data, target.size, source.ctypes.data, source.size)
    if got != target.size:  # an error is a very large number
        raise NotDecodable(f"Zstandard does not decode {target.size} bytes")


_CHUNK = struct.Struct("<4B3I6sB7x2B")
"""A Blosc2 chunk's header: format, the compressor's, flags, size of an item; bytes, those of a block, those
as stored; filters, compressor, more flags, kind. Then an i32 for each block: where in the chunk it begins."""
_BLOSC1 = struct.Struct("<4B3I")
"""The same of a Blosc 1 chunk."""
_SHIFT = _CHUNK.size - _BLOSC1.size
_FORMAT, _FORMAT1, _OF_COMPRESSOR = 5, 2, 1
_HAS_FILTERS, _WHOLE_BLOCKS = 5, 1 << 4  # flags
_ALL_ZEROS = 1 << 4  # a kind
_I32 = struct.Struct("<i")
_BYTES, _BITS = 1, 2  # filters
_SLOW_BLOCK = 1 << 20
"""What is decoded in Python takes memory by the block. Blosc2 made none that is larger."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What a chunk's header says and `decode` needs."""

    flags: int
    itemsize: int
    block: int
    is_zeros: bool


@dataclass(frozen=True, slots=True)
class _Blosc:
    """A Blosc2 chunk of one filter and one compressor, on one thread: the tier has threads enough."""

    compressor: bytes
    number: int
    """Of the compressor, in the flags."""
    code: int
    """Of the compressor, in the header."""
    filter: int
    level: int
    block: int
    """Bytes of a block, before the library makes what it splits larger."""
    one: Callable[[Array, Array], None]
    """Decodes one stream."""

    def encode(self, payload: memoryview, room: memoryview, layout: Layout, shard: Shard) -> int:
        size = 8 if layout.is_opaque or layout.itemsize == 1 else layout.itemsize
        # Bits are shuffled in groups of 8 items. Blosc 1 leaves alone a block that is not made of groups.
        if len(payload) % (8 * size) or not PAGE <= len(payload) <= _LARGEST or len(room) < PAGE:
            return 0
        source, target = _bytes(payload), _bytes(room)
        # Zstandard keeps a table for each 128 KiB, and a few unlike bytes among them cost much. So the first,
        # second, … bytes of a small payload become a stream each. A large one goes faster if it is not split.
        is_small, block = self.filter == _BYTES and source.size <= self.block, self.block
        if is_small:
            source, block = np.ascontiguousarray(source.reshape(-1, size).T).reshape(-1), source.size // size
        got = _load().blosc_compress_ctx(
            *(self.level, 0 if is_small else self.filter, 1 if is_small else size),
            *(source.size, source.ctypes.data, target.ctypes.data + _SHIFT),
            min(target.size - _SHIFT, source.size),  # without room for a plain copy it makes none
            *(self.compressor, block, 1),
        )
        if got <= 0:  # it does not fit
            return 0
        _, _, flags, _, nbytes, block, _ = _BLOSC1.unpack_from(room, _SHIFT)
        starts = self._starts(room, nbytes, block)
        starts += _SHIFT
        if is_small:  # what are blocks of Blosc's are streams of the only one
            flags, block = flags & ~_WHOLE_BLOCKS, nbytes
        _CHUNK.pack_into(
            room, 0, _FORMAT, _OF_COMPRESSOR, flags & 0xF0 | _HAS_FILTERS, size, nbytes, block, got + _SHIFT,
            bytes(5) + bytes([self.filter]), self.code, 0, 0,
        )  # fmt: skip
        return int(got) + _SHIFT

    def decode(self, body: memoryview, payload: memoryview, layout: Layout, shard: Shard) -> None:
        chunk = self._check(body, len(payload))
        source, target = _bytes(body), _bytes(payload)
        if chunk.is_zeros:
            target[...] = 0
            return
        starts = self._starts(body, target.size, chunk.block)
        if self._is_for_blosc1(chunk, target.size):
            flags = chunk.flags & 0xF0 | (1 if self.filter == _BYTES else 4)
            starts -= _SHIFT
            _BLOSC1.pack_into(
                body, _SHIFT, _FORMAT1, _OF_COMPRESSOR, flags, chunk.itemsize, target.size, chunk.block,
                source.size - _SHIFT,
            )  # fmt: skip
            got = _load().blosc_decompress_ctx(
                source.ctypes.data + _SHIFT, target.ctypes.data, target.size, 1
            )
            if got == target.size:
                return
            starts += _SHIFT
        self._decode_slowly(chunk, source, starts.tolist(), target)

    def _check(self, body: memoryview, nbytes: int) -> _Chunk:
        """Chunks may also name plug-ins to load and files to read; `encode` makes none of those."""
        if len(body) < _CHUNK.size:
            raise NotDecodable(f"{len(body)} bytes are no Blosc2 chunk")
        head = _CHUNK.unpack_from(body)
        _, _, flags, itemsize, raw, block, stored, filters, _, more, kind = head
        if (raw, stored) != (nbytes, len(body)) or nbytes > _LARGEST:
            raise NotDecodable(f"a chunk of {stored} bytes for {raw}, not of {len(body)} for {nbytes}")
        if flags >> 5 != self.number or filters != bytes([0, 0, 0, 0, 0, self.filter]):
            raise NotDecodable("a chunk of another compressor or filter")
        if more or kind not in (0, _ALL_ZEROS) or flags & 0xF & ~_HAS_FILTERS:
            raise NotDecodable("a chunk of a kind that is never written here")
        if not 0 < itemsize <= block <= nbytes or block % itemsize:
            raise NotDecodable(f"a chunk with blocks of {block} and items of {itemsize} bytes")
        if not kind and _CHUNK.size + 4 * -(-nbytes // block) > stored:
            raise NotDecodable("a chunk without room for its blocks")
        return _Chunk(flags, itemsize, block, kind == _ALL_ZEROS)

    def _starts(self, chunk: memoryview, nbytes: int, block: int) -> Array:
        count = -(-nbytes // block)
        return np.frombuffer(chunk, "<i4", count, _CHUNK.size)

    def _is_for_blosc1(self, chunk: _Chunk, nbytes: int) -> bool:
        """Blosc2 shuffles the bits of as many items of a block as it can, Blosc 1 those of all or of none."""
        group = 8 * chunk.itemsize if self.filter == _BITS else 1
        return not (chunk.block % group or nbytes % chunk.block % group)

    def _decode_slowly(self, chunk: _Chunk, source: Array, starts: list[int], target: Array) -> None:
        """A chunk that only Blosc2 itself writes: with runs of one byte, or a rest of less than 8 items."""
        if chunk.block > _SLOW_BLOCK:
            raise NotDecodable(f"a chunk with blocks of {chunk.block} bytes")
        for at, first in zip(starts, range(0, target.size, chunk.block), strict=True):
            block = target[first : first + chunk.block]
            is_whole = chunk.flags & _WHOLE_BLOCKS or block.size < chunk.block
            plain = np.empty_like(block)
            for stream in plain.reshape(1 if is_whole else chunk.itemsize, -1):
                at = self._stream(source, at, stream)
            self._unfilter(plain, chunk.itemsize, block)

    def _stream(self, source: Array, at: int, stream: Array) -> int:
        """One stream of a block, from `at` on; where the next one begins."""
        if not 0 < at <= source.size - _I32.size:
            raise NotDecodable("a block outside its chunk")
        (size,) = _I32.unpack_from(source.data, at)
        at += _I32.size
        if size <= 0:
            if size < -255 or (size and source[at : at + 1].tolist() != [1]):
                raise NotDecodable("a run of more than a byte")
            stream[...] = -size
            return int(at + (size < 0))
        body = source[at : at + size]
        if body.size < size:
            raise NotDecodable("a block that goes beyond its chunk")
        if size == stream.size:
            stream[...] = body
        else:
            self.one(body, stream)
        return int(at + size)

    def _unfilter(self, plain: Array, size: int, block: Array) -> None:
        """Items of `size` bytes from all their first bytes, all their second bytes, …; or bits."""
        group = 8 if self.filter == _BITS else 1
        end = plain.size // (group * size) * group * size
        rows, items = plain[:end].reshape(group * size, -1), block[:end].reshape(-1, size)
        if group == 8:
            bits = np.unpackbits(rows, axis=1, bitorder="little")
            items[...] = np.packbits(bits.T, axis=1, bitorder="little")
        else:
            items[...] = rows.T
        block[end:] = plain[end:]


# ---- approximate

_FLOATS = {"bf16", "fp16", "fp32"}
_STEPS = {"fp8": 448.0, "int8": 127.0}
"""The largest number of each, to which the largest of a head and channel is mapped."""


@dataclass(frozen=True, slots=True)
class _Scaled:
    """One byte an element, and one scale for all tokens of a head's channel.

    All scales first, layer by layer, K's then V's, [heads, channels] of f32; then the bytes, in the
    order that the elements have in the payload.
    """

    kind: str

    def encode(self, payload: memoryview, room: memoryview, layout: Layout, shard: Shard) -> int:
        if layout.is_opaque or layout.dtype not in _FLOATS:
            return 0
        scales_at, size = _sizes(layout, shard)
        if size > len(room):
            return 0
        scales = np.frombuffer(room[:scales_at], "<f4")
        at = 0
        for source, target in _pairs(payload, room[scales_at:size], layout, shard):
            values = _to_floats(source, layout.dtype)
            most = np.maximum(values.max(axis=(0, 2)), -values.min(axis=(0, 2)))
            if not np.isfinite(most).all():  # NaN and infinity are not to be approximated
                return 0
            most /= _STEPS[self.kind]
            most[most == 0] = 1
            scales[at : at + most.size] = most.reshape(-1)
            at += most.size
            values /= most[None, :, None, :]
            if self.kind == "int8":
                np.copyto(target.view("i1"), np.rint(values, out=values), casting="unsafe")
            else:
                target[...] = _as_fp8()[_to_bf16(values)]
        return size

    def decode(self, body: memoryview, payload: memoryview, layout: Layout, shard: Shard) -> None:
        if layout.is_opaque or layout.dtype not in _FLOATS:
            raise NotDecodable(f"{self.kind} is not for {layout.packing} of {layout.dtype}")
        scales_at, size = _sizes(layout, shard)
        if len(body) != size:
            raise NotDecodable(f"{len(body)} bytes, its layout says {size}")
        scales = np.frombuffer(body[:scales_at], "<f4")
        if not np.isfinite(scales).all():
            raise NotDecodable("a scale is not a number")
        at = 0
        with np.errstate(over="ignore", invalid="ignore"):  # numbers that nobody has written
            for target, source in _pairs(payload, body[scales_at:], layout, shard):
                heads, channels = source.shape[1], source.shape[3]
                scale = scales[at : at + heads * channels].reshape(1, heads, 1, channels)
                at += heads * channels
                if self.kind == "int8":
                    values = source.view("i1") * scale
                else:
                    values = _fp8_values()[source]
                    values *= scale
                _from_floats(values, target, layout.dtype)


def _sizes(layout: Layout, shard: Shard) -> tuple[int, int]:
    """Bytes of the scales, and of everything."""
    scales = 0
    for layer in range(shard.first_layer, shard.end_layer):
        shape = layout.layers[layer]
        scales += layout.heads(layer, shard) * (shape.k + shape.v)
    return 4 * scales, 4 * scales + layout.nbytes(shard) // layout.itemsize


def _pairs(
    payload: memoryview, codes: memoryview, layout: Layout, shard: Shard
) -> Iterator[tuple[Array, Array]]:
    """Views [blocks, heads, tokens, channels] of each layer's K, and V, and of the bytes for them."""
    wide, narrow = np.frombuffer(payload, "u1"), np.frombuffer(codes, "u1")
    small = replace(layout, dtype="u8")
    for layer in range(shard.first_layer, shard.end_layer):
        yield from zip(layout.planes(wide, shard, layer), small.planes(narrow, shard, layer), strict=True)


def _to_floats(elements: Array, dtype: str) -> Array:
    if dtype == "bf16":
        return np.left_shift(elements, 16, dtype="u4").view("f4")
    return elements.view({"fp16": "f2", "fp32": "f4"}[dtype]).astype("f4")


def _from_floats(values: Array, elements: Array, dtype: str) -> None:
    if dtype == "bf16":
        elements[...] = _to_bf16(values)
    else:
        elements.view({"fp16": "f2", "fp32": "f4"}[dtype])[...] = values


def _to_bf16(values: Array) -> Array:
    """The upper halves, rounded to even; `values` are used up."""
    bits: Array = values.view("u4")
    bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)
    bits >>= 16
    return bits


@lru_cache(maxsize=1)
def _fp8_values() -> Array:
    """What each e4m3 byte means; the two that are not a number are never written, and mean 0."""
    code = np.arange(256)
    sign, power, part = np.where(code & 128, -1.0, 1.0), (code >> 3) & 15, code & 7
    values = np.where(power, (1 + part / 8) * 2.0 ** (power - 7), part * 2.0**-9) * sign
    values[code & 127 == 127] = 0
    return np.asarray(values, "f4")


@lru_cache(maxsize=1)
def _as_fp8() -> Array:
    """The nearest e4m3 byte for each bf16 from -448 to 448; ties to the even one."""
    numbers = (np.arange(1 << 16, dtype="u4") << 16).view("f4")
    steps = _fp8_values()[:127].astype("f8")
    with np.errstate(invalid="ignore"):
        size = np.minimum(np.nan_to_num(np.abs(numbers), nan=0, posinf=448), 448).astype("f8")
    above = np.searchsorted(steps, size).clip(1, 126)
    low, high = size - steps[above - 1], steps[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return np.asarray(code | np.where(np.signbit(numbers), 128, 0), "u1")


_LZ4_BITS = _Blosc(b"lz4", 1, 1, _BITS, 9, 1 << 17, _one_lz4)
_ZSTD_BYTES = _Blosc(b"zstd", 4, 5, _BYTES, 1, 1 << 19, _one_zstd)
CODECS = {
    codec.name: codec
    for codec in (
        Codec("lz4", _encode_lz4, _decode_lz4),
        Codec("bitshuffle-lz4", _LZ4_BITS.encode, _LZ4_BITS.decode),
        Codec("shuffle-zstd", _ZSTD_BYTES.encode, _ZSTD_BYTES.decode),
        *(Codec(kind, _Scaled(kind).encode, _Scaled(kind).decode, is_exact=False) for kind in _STEPS),
    )
}
WORDS = (RAW, *CODECS, AUTO)
"""What `codec=` may say."""
