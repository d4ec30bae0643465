"""The engine blocks of one rank's KV. The block ids of a chunk are checked before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from lmtier.errors import LayoutError
from lmtier.format.layout import Array, Layout, Shard

Buffer: TypeAlias = "memoryview | bytes | bytearray | Array"
Ids: TypeAlias = npt.NDArray[np.intp]
RawOrder: TypeAlias = "tuple[int, list[tuple[int, int]]]"
"""Bytes of an element; then (axis, count) from the outermost axis in memory to the innermost."""

_LEFT = -1  # the id of a block that has left a sliding window
_DTYPES = {
    "torch.float32": "fp32",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.int8": "int8",
    "torch.uint8": "u8",
    "float32": "fp32",
    "float16": "fp16",
}


class BlockIds:
    """A chunk's block ids, checked once by `Blocks.check` and then used for every layer."""

    __slots__ = ("absent", "is_whole", "tables")

    def __init__(self, tables: Sequence[Ids], absent: Sequence[int]) -> None:
        self.tables = tables
        """The ids of each block table, without those of missing leading blocks."""
        self.absent = absent
        """How many leading blocks are missing, because they have left a sliding window."""
        self.is_whole = not any(absent)

    def after(self, table: int, first_block: int) -> tuple[Ids, int]:
        """The ids from `first_block` on, or from the first present block; and the number of that block."""
        gone = self.absent[table]
        first = max(first_block, gone)
        return self.tables[table][first - gone :], first


class Blocks:
    """The common base of KV memory on a CPU and on a GPU. Layers are numbered as in the whole model.

    If an engine has several block tables for a request, ids are one row per table, or one row for all.
    An id of -1 is a block that has left a sliding window; a scatter skips it.
    """

    def __init__(self, layout: Layout, shard: Shard, blocks: int, tables: int) -> None:
        self.layout, self.shard = layout, shard
        self.nbytes = layout.nbytes(shard)
        self.blocks, self.tables = blocks, tables

    @property
    def layers(self) -> range:
        return range(self.shard.first_layer, self.shard.end_layer)

    def check(self, block_ids: Any) -> list[BlockIds]:
        """The checked blocks of consecutive chunks, to be used many times.

        Raises LayoutError if one is wrong.
        """
        ids, size = np.asarray(block_ids), self.layout.blocks
        if ids.shape[-1] % size or ids.ndim not in (1, 2) or (ids.ndim == 2 and len(ids) != self.tables):
            raise LayoutError(
                f"a chunk is {size} blocks of each of {self.tables} tables, "
                f"got block ids of shape {list(ids.shape)}"
            )
        tables = [self._chunks(table, size) for table in ([ids] if ids.ndim == 1 else ids)]
        if len(tables) < self.tables:
            tables *= self.tables
        all_ids, all_gone = zip(*tables, strict=True)
        return list(map(BlockIds, zip(*all_ids, strict=True), zip(*all_gone, strict=True)))

    def _chunks(self, ids: Any, size: int) -> tuple[Sequence[Ids], Sequence[int]]:
        """One table's ids chunk by chunk, without those that have left a window, and the number of the
        latter."""
        absent = 0
        if ids.size and ids.dtype.kind == "i" and ids[0] == _LEFT:
            absent = int(np.logical_and.accumulate(ids == _LEFT).sum())
        checked = self._checked(ids[absent:], size, absent % size)
        if not absent:
            return list(checked.reshape(-1, size)), [0] * (len(ids) // size)
        firsts = range(0, len(ids), size)
        return (
            [checked[max(first - absent, 0) : max(first + size - absent, 0)] for first in firsts],
            [min(max(absent - first, 0), size) for first in firsts],
        )

    def _ids(self, block_ids: Any, first_block: int = 0) -> BlockIds:
        if isinstance(block_ids, BlockIds):
            return block_ids
        ids = np.asarray(block_ids)
        if ids.shape != (self.layout.blocks,) or not 0 <= first_block <= self.layout.blocks:
            raise LayoutError(
                f"a chunk is {self.layout.blocks} blocks, got block ids of shape {list(ids.shape)} "
                f"from block {first_block} on"
            )
        checked = self._checked(ids[first_block:], self.layout.blocks - first_block)
        return BlockIds([checked] * self.tables, [first_block] * self.tables)

    def _checked(self, ids: Any, size: int, absent: int = 0) -> Ids:
        """Ids of chunks, `size` of each, the first one without its `absent` leading blocks.

        They are integers, within the engine, none twice in a chunk.
        """
        # A wrong id must never reach take(mode="clip"), which would read another request's block.
        # For so few ids Python's min and max are faster than numpy's.
        if not ids.size:
            return np.empty(0, np.intp)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise LayoutError(
                f"block ids must be one row of integers, not {ids.ndim}-dimensional {ids.dtype}"
            )
        listed = ids.tolist()
        if min(listed) < 0 or max(listed) >= self.blocks:
            wrong = next(block for block in listed if not 0 <= block < self.blocks)
            raise LayoutError(f"block id {wrong} is outside of the engine's {self.blocks} blocks")
        if len(set(listed)) != len(listed):  # two chunks may share a block
            for at in range(-absent, len(listed), size):
                chunk = listed[max(at, 0) : at + size]
                if len(set(chunk)) != len(chunk):
                    raise LayoutError(f"a block id occurs twice among {chunk}")
        return np.asarray(ids, np.intp)

    def _listed(self, block_ids: Any) -> list[list[int]]:
        """Any number of ids, by table."""
        if isinstance(block_ids, BlockIds):
            return [ids.tolist() for ids in block_ids.tables]
        ids = np.asarray(block_ids)
        listed = [self._checked(row, len(row)).tolist() for row in (ids if ids.ndim == 2 else [ids])]
        return listed * self.tables if len(listed) == 1 else listed

    def bind(self, block_ids: Any, buffer: Buffer, first_block: int = 0) -> Any:
        raise NotImplementedError

    def gather(self, layer: int | None, block_ids: Any, out: Buffer) -> None:
        """Copy the chunk in `block_ids` to its place in `out`: one layer, or (None) all of them."""
        self.bind(block_ids, out).gather(layer)

    def scatter(self, layer: int | None, src: Buffer, block_ids: Any, first_block: int = 0) -> None:
        """Copy `src` to the engine. The chunk's blocks before `first_block` are not changed."""
        self.bind(block_ids, src, first_block).scatter(layer)

    def _range(self, layer: int | None) -> tuple[int, int]:
        if layer is None:
            return self.shard.first_layer, self.shard.end_layer
        if not self.shard.first_layer <= layer < self.shard.end_layer:
            raise LayoutError(f"layer {layer} is not in shard {self.shard}")
        return layer, layer + 1

    def tag_of(self, orders: list[list[RawOrder]]) -> bytes:
        """Identifies the raw arrangement of a fingerprint.

        Fingerprints of different ones are not comparable.
        """
        layout = self.layout
        layout_facts = [layout.packing, layout.dtype, layout.block_tokens, layout.chunk_tokens, self.shard]
        return xxhash.xxh3_64_digest(repr((layout_facts, orders)).encode())

    @staticmethod
    def fold(layers: Sequence[bytes]) -> bytes:
        """The fingerprint of an object from those of its layers, in order. A single layer keeps its own."""
        return layers[0] if len(layers) == 1 else xxhash.xxh3_64_digest(b"".join(layers))


def payload_of(buffer: Buffer, nbytes: int) -> Array:
    payload: Array = np.frombuffer(buffer, np.uint8)
    if len(payload) < nbytes:
        raise LayoutError(f"the object takes {nbytes} bytes, the buffer has {len(payload)}")
    return payload


def tensors_of_layers(shard: Shard, tensors: Sequence[Any]) -> list[tuple[int, tuple[Any, ...]]]:
    """Each layer's number and its one or two tensors."""
    numbers = range(shard.first_layer, shard.end_layer)
    if len(tensors) != len(numbers):
        raise LayoutError(f"shard {shard} has {len(numbers)} layers, got tensors for {len(tensors)}")
    given = (tuple(t) if isinstance(t, (tuple, list)) else (t,) for t in tensors)
    return list(zip(numbers, given, strict=True))


def check_dtype(layout: Layout, number: int, dtype: str, item: int, *, is_integer: bool) -> None:
    # Integers of the right size are taken as raw bits: numpy has no bf16, and engines keep fp8 in uint8.
    fits = _DTYPES.get(dtype) == layout.dtype or (is_integer and item == layout.itemsize)
    if not fits and not layout.is_opaque:
        raise LayoutError(f"layer {number}: expected dtype {layout.dtype}, got {dtype}")
