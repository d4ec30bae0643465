"""Codecs: a payload in fewer bytes, exactly or approximately, from one buffer into another.

    lz4              LZ4 block                               KV of 8 bits, or mostly zeros
    bitshuffle-lz4   Blosc2 chunk                            bf16 and fp16, fast
    shuffle-zstd     Blosc2 chunk                            bf16 and fp16, small
    fp8, int8        f32 scale a head and channel, then one byte an element; approximate, for cold tiers

Nothing here takes memory by the size of an object, or on the word of its bytes: source and target are
the caller's, and what decodes fills exactly the room it was given, or refuses.

The libraries are those in imagecodecs, because that one package writes into a given buffer; python-lz4,
blosc2 and numcodecs make a new string of bytes for each object. docs/CODECS.md has the numbers.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from lmtier.errors import TierError
from lmtier.layout import PAGE, Array, Layout, Shard

log = logging.getLogger("lmtier")

RAW = "raw"
AUTO = "auto"
_LIBRARY = "imagecodecs"
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
    """Fills a payload to its last byte, or raises NotDecodable."""
    is_exact: bool = True
    library: str = _LIBRARY


def find(name: str) -> Codec:
    """The codec, ready to work. Raises MissingLibrary."""
    codec = CODECS[name]
    if codec.library:
        try:
            _load(codec.library)
        except ImportError:
            raise MissingLibrary(
                f"codec={name} needs the package {codec.library}: pip install 'lmtier[codecs]'"
            ) from None
    return codec


@cache
def _load(library: str) -> Any:
    return import_module(library)


# ---- exact


def _encode_lz4(payload: memoryview, room: memoryview, layout: Layout, shard: Shard) -> int:
    library = _load(_LIBRARY)
    try:
        return len(library.lz4_encode(payload, out=room)) if len(payload) <= _LARGEST else 0
    except library.Lz4Error:  # it does not fit
        return 0


def _decode_lz4(body: memoryview, payload: memoryview, layout: Layout, shard: Shard) -> None:
    library = _load(_LIBRARY)
    try:
        got = len(library.lz4_decode(body, out=payload))
    except library.Lz4Error as error:
        raise NotDecodable(str(error)) from None
    if got != len(payload):
        raise NotDecodable(f"{got} bytes came out, not {len(payload)}")


_CHUNK = struct.Struct("<2xBx3I6BB7xBB")  # the fields of a Blosc2 chunk's header that are looked at
_ALL_ZEROS = 1 << 4


@dataclass(frozen=True, slots=True)
class _Blosc:
    """A Blosc2 chunk of one filter and one compressor, on one thread: the tier has threads enough."""

    compressor: str
    number: int
    """Of the compressor, in the chunk."""
    filter: str
    filter_number: int
    level: int

    def encode(self, payload: memoryview, room: memoryview, layout: Layout, shard: Shard) -> int:
        library = _load(_LIBRARY)
        # Zeros that are not whole items of 8 are encoded but not decoded; small chunks lose their filter; and
        # up to 4 bytes are written beyond a room of 32 to 35.
        if len(payload) % 8 or not PAGE <= len(payload) <= _LARGEST or len(room) < PAGE:
            return 0
        itemsize = 1 if layout.is_opaque else layout.itemsize
        try:
            done = library.blosc2_encode(
                np.frombuffer(payload, f"u{itemsize}"),  # it takes the item's size from here
                level=self.level,
                compressor=self.compressor,
                shuffle=self.filter,
                numthreads=1,
                out=room,
            )
        except library.Blosc2Error:  # it does not fit
            return 0
        return len(done)

    def decode(self, body: memoryview, payload: memoryview, layout: Layout, shard: Shard) -> None:
        self._check(body, len(payload))
        library = _load(_LIBRARY)
        try:
            got = len(library.blosc2_decode(body, numthreads=1, out=payload))
        except library.Blosc2Error as error:
            raise NotDecodable(str(error)) from None
        if got != len(payload):
            raise NotDecodable(f"{got} bytes came out, not {len(payload)}")

    def _check(self, body: memoryview, nbytes: int) -> None:
        """Chunks may also name plug-ins to load and files to read; `encode` makes none of those."""
        if len(body) < _CHUNK.size:
            raise NotDecodable(f"{len(body)} bytes are no Blosc2 chunk")
        flags, raw, _, stored, *filters, _, more, kind = _CHUNK.unpack_from(body)
        if (raw, stored) != (nbytes, len(body)):
            raise NotDecodable(f"a chunk of {stored} bytes for {raw}, not of {len(body)} for {nbytes}")
        if flags >> 5 != self.number or filters != [0, 0, 0, 0, 0, self.filter_number]:
            raise NotDecodable("a chunk of another compressor or filter")
        if more or kind not in (0, _ALL_ZEROS):
            raise NotDecodable("a chunk of a kind that is never written here")


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


_LZ4_BITS = _Blosc("lz4", 1, "bitshuffle", 2, 5)
_ZSTD_BYTES = _Blosc("zstd", 4, "shuffle", 1, 1)
CODECS = {
    codec.name: codec
    for codec in (
        Codec("lz4", _encode_lz4, _decode_lz4),
        Codec("bitshuffle-lz4", _LZ4_BITS.encode, _LZ4_BITS.decode),
        Codec("shuffle-zstd", _ZSTD_BYTES.encode, _ZSTD_BYTES.decode),
        *(
            Codec(kind, _Scaled(kind).encode, _Scaled(kind).decode, is_exact=False, library="")
            for kind in _STEPS
        ),
    )
}
WORDS = (RAW, *CODECS, AUTO)
"""What `codec=` may say."""
