"""Codecs: a payload in fewer bytes, exactly or approximately, from one buffer into another.

    bitshuffle-lz4   Blosc chunk                             bf16 and fp16, fast
    shuffle-zstd     Blosc chunk                             bf16 and fp16, small
    fp8, int8        f32 scale a head and channel, then one byte an element; approximate, for cold tiers

Nothing here allocates memory by the size of an object, or by a size that its bytes claim. The caller owns
source and target. A decoder fills exactly the room that it gets, or refuses.

One small C library does the exact codecs: C-Blosc, from the package `blosc`. It is called with ctypes,
because its C functions write into a given buffer and run outside the GIL; the package's own functions make
a new bytes object each time. docs/CODECS.md has the numbers.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from lmtier.errors import TierError
from lmtier.format.layout import PAGE, Array, Layout, Shard

RAW = "raw"
_PACKAGE = "blosc"
_LIBRARY = "libblosc.so.1"
_LARGEST = (1 << 31) - (1 << 20)  # their lengths have 32 bits


class NotDecodable(Exception):
    """The codec never writes such bytes for this layout. The message says why."""


class MissingLibrary(TierError):
    """A codec's library is not installed."""


@dataclass(frozen=True, slots=True)
class Codec:
    name: str
    encode: Callable[[memoryview, memoryview, Layout, Shard], int]
    """Encodes a payload into room; returns the bytes written. 0: no room, or the layout is unsuitable."""
    decode: Callable[[memoryview, memoryview, Layout, Shard], None]
    """Fills a payload to its last byte, or raises NotDecodable."""
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
    """Loads the C library that the package installs. No Python code of the package runs."""
    from importlib import metadata  # takes 25 ms, and most starts do not compress

    package = metadata.distribution(_PACKAGE)
    listed = [Path(str(each.locate())) for each in package.files or () if each.name == _LIBRARY]
    moved = Path(str(package.locate_file("lib64"))) / _LIBRARY  # by `pip install --target`
    library = ctypes.CDLL(str(next((at for at in (*listed, moved) if at.exists()), _LIBRARY)))
    number, size, address, text = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
    for function, result, arguments in (
        (library.blosc_compress_ctx, number,
         (number, number, size, size, address, address, size, text, size, number)),
        (library.blosc_decompress_ctx, number, (address, address, size, number)),
    ):  # fmt: skip
        function.restype, function.argtypes = result, arguments
    return library


def _bytes(memory: memoryview) -> Array:
    return np.frombuffer(memory, "u1")


# ---- exact


_CHUNK = struct.Struct("<4B3I")
"""The header of a Blosc chunk: format, format of the compressor, flags, item size; bytes, bytes of a block,
stored bytes. Then an i32 for each block: its offset in the chunk."""
_FORMAT, _OF_COMPRESSOR = 2, 1
_WHOLE_BLOCKS = 1 << 4
"""A flag: blocks are not split."""
_BYTES, _BITS = 1, 2  # filters


@dataclass(frozen=True, slots=True)
class _Blosc:
    """A codec that writes Blosc chunks with one filter and one compressor.

    It uses the calling thread only.
    """

    compressor: bytes
    number: int
    """The compressor's number in the flags."""
    filter: int
    level: int
    block: int
    """Bytes of a block. The library enlarges blocks that it splits."""

    @property
    def _flags(self) -> int:
        """The flags of all chunks, but for the one that says whether blocks are split."""
        return self.number << 5 | (1 if self.filter == _BYTES else 4)

    def encode(self, payload: memoryview, room: memoryview, layout: Layout, shard: Shard) -> int:
        size = 8 if layout.is_opaque or layout.itemsize == 1 else layout.itemsize
        # Bits are shuffled in groups of 8 items. Blosc does not shuffle a block that is not whole groups.
        if len(payload) % (8 * size) or not PAGE <= len(payload) <= _LARGEST or len(room) < PAGE:
            return 0
        source, target = _bytes(payload), _bytes(room)
        # Zstandard has a table for each 128 KiB, and a few unlike bytes in it cost much. So in a small
        # payload the first, second, … bytes each become a stream. A large payload is faster unsplit.
        is_small, block = self.filter == _BYTES and source.size <= self.block, self.block
        if is_small:
            source, block = np.ascontiguousarray(source.reshape(-1, size).T).reshape(-1), source.size // size
        got = _load().blosc_compress_ctx(
            *(self.level, 0 if is_small else self.filter, 1 if is_small else size),
            *(source.size, source.ctypes.data, target.ctypes.data, min(target.size, source.size)),
            *(self.compressor, block, 1),  # in so much room the library makes no plain copy
        )
        if is_small and got > 0:  # its blocks are the streams of a single block
            _CHUNK.pack_into(
                room, 0, _FORMAT, _OF_COMPRESSOR, self._flags, size, source.size, source.size, got
            )  # fmt: skip
        return max(int(got), 0)  # not positive: it does not fit

    def decode(self, body: memoryview, payload: memoryview, layout: Layout, shard: Shard) -> None:
        self._check(body, len(payload))
        source, target = _bytes(body), _bytes(payload)
        got = _load().blosc_decompress_ctx(source.ctypes.data, target.ctypes.data, target.size, 1)
        if got != target.size:
            raise NotDecodable(f"a chunk that decodes to {got} bytes, not {target.size}")

    def _check(self, body: memoryview, nbytes: int) -> None:
        """Refuse chunks that `encode` never writes. The library trusts the length that a chunk names."""
        if len(body) < _CHUNK.size:
            raise NotDecodable(f"{len(body)} bytes are no Blosc chunk")
        form, of_compressor, flags, itemsize, raw, block, stored = _CHUNK.unpack_from(body)
        if (raw, stored) != (nbytes, len(body)) or nbytes > _LARGEST:
            raise NotDecodable(f"a chunk of {stored} bytes for {raw}, not of {len(body)} for {nbytes}")
        if (form, of_compressor, flags & ~_WHOLE_BLOCKS) != (_FORMAT, _OF_COMPRESSOR, self._flags):
            raise NotDecodable("a chunk of another format, compressor or filter")
        if not 0 < itemsize <= block <= nbytes or block % itemsize:
            raise NotDecodable(f"a chunk with blocks of {block} and items of {itemsize} bytes")
        if _CHUNK.size + 4 * -(-nbytes // block) > stored:
            raise NotDecodable("a chunk without room for its blocks")


# ---- approximate

_FLOATS = {"bf16", "fp16", "fp32"}
_STEPS = {"fp8": 448.0, "int8": 127.0}
"""The largest number of each format. The largest value of a head and channel is mapped to it."""


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
            if not np.isfinite(most).all():  # NaN and infinity cannot be approximated
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
        with np.errstate(over="ignore", invalid="ignore"):  # for bytes that no encoder writes
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
    """The bytes of the scales, and of scales and elements."""
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
    """The upper halves of `values`, rounded to even. Overwrites `values`."""
    bits: Array = values.view("u4")
    bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)
    bits >>= 16
    return bits


@lru_cache(maxsize=1)
def _fp8_values() -> Array:
    """The value of each e4m3 byte. The two NaN bytes are never written; they are read as 0."""
    code = np.arange(256)
    sign, power, part = np.where(code & 128, -1.0, 1.0), (code >> 3) & 15, code & 7
    values = np.where(power, (1 + part / 8) * 2.0 ** (power - 7), part * 2.0**-9) * sign
    values[code & 127 == 127] = 0
    return np.asarray(values, "f4")


@lru_cache(maxsize=1)
def _as_fp8() -> Array:
    """The nearest e4m3 byte for each bf16 from -448 to 448. Ties go to the even one."""
    numbers = (np.arange(1 << 16, dtype="u4") << 16).view("f4")
    steps = _fp8_values()[:127].astype("f8")
    with np.errstate(invalid="ignore"):
        size = np.minimum(np.nan_to_num(np.abs(numbers), nan=0, posinf=448), 448).astype("f8")
    above = np.searchsorted(steps, size).clip(1, 126)
    low, high = size - steps[above - 1], steps[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return np.asarray(code | np.where(np.signbit(numbers), 128, 0), "u1")


_LZ4_BITS = _Blosc(b"lz4", 1, _BITS, 9, 1 << 17)
_ZSTD_BYTES = _Blosc(b"zstd", 4, _BYTES, 1, 1 << 19)
CODECS = {
    codec.name: codec
    for codec in (
        Codec("bitshuffle-lz4", _LZ4_BITS.encode, _LZ4_BITS.decode),
        Codec("shuffle-zstd", _ZSTD_BYTES.encode, _ZSTD_BYTES.decode),
        *(Codec(kind, _Scaled(kind).encode, _Scaled(kind).decode, is_exact=False) for kind in _STEPS),
    )
}
WORDS = (RAW, *CODECS)
"""The values of the option `codec=`."""
