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
ChunkBlocks: TypeAlias = npt.NDArray[np.intp]
"""The checked blocks of chunks, [block tables, chunks, blocks of a chunk]. ABSENT: no block is copied."""
RawOrder: TypeAlias = "tuple[int, list[tuple[int, int]]]"
"""Bytes of an element; then (axis, count) from the outermost axis in memory to the innermost."""

ABSENT = -1  # in place of a block that has left a sliding window, or that was computed already
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

    def check(self, block_ids: Any) -> ChunkBlocks:
        """The checked blocks of consecutive chunks, to be used many times.

        They are integers, within the engine, none twice in a chunk. Raises LayoutError if one is wrong.
        """
        # A wrong id must never reach take(mode="clip"), which would read another request's block. So what was
        # checked is a copy, which the caller cannot change.
        ids, size = np.asarray(block_ids), self.layout.blocks
        if ids.shape[-1] % size or ids.ndim not in (1, 2) or (ids.ndim == 2 and len(ids) != self.tables):
            raise LayoutError(
                f"a chunk is {size} blocks of each of {self.tables} tables, "
                f"got block ids of shape {list(ids.shape)}"
            )
        if not ids.size:
            return np.empty((self.tables, 0, size), np.intp)
        self._need_integers(ids)
        low, high = int(ids.min()), int(ids.max())
        chunks = ids.reshape(-1, ids.shape[-1] // size, size).astype(np.intp)
        if low < ABSENT or high >= self.blocks or (low < 0 and not _are_leading(chunks)):
            rows = ids.reshape(len(chunks), -1)
            self._need_known(rows[~np.logical_and.accumulate(rows == ABSENT, axis=1)].tolist())
        if size > 1:
            by_number = np.sort(chunks, axis=2)
            twice = ((by_number[..., 1:] == by_number[..., :-1]) & (by_number[..., 1:] != ABSENT)).any(axis=2)
            if twice.any():  # two chunks may share a block
                raise LayoutError(f"a block id occurs twice among {chunks[twice][0].tolist()}")
        return (
            chunks
            if len(chunks) == self.tables
            else np.broadcast_to(chunks, (self.tables, *chunks.shape[1:]))
        )

    def _need_integers(self, ids: Any) -> None:
        if ids.dtype.kind not in "iu":
            raise LayoutError(
                f"block ids must be one row of integers, not {ids.ndim}-dimensional {ids.dtype}"
            )

    def _need_known(self, ids: Sequence[int]) -> None:
        for block in ids:
            if not 0 <= block < self.blocks:
                raise LayoutError(f"block id {block} is outside of the engine's {self.blocks} blocks")

    def chunk(self, block_ids: Any, first_block: int = 0) -> ChunkBlocks:
        """The checked blocks of one chunk, whose blocks before `first_block` are not copied."""
        ids = np.asarray(block_ids)
        if ids.shape[-1:] != (self.layout.blocks,) or not 0 <= first_block <= self.layout.blocks:
            raise LayoutError(
                f"a chunk is {self.layout.blocks} blocks, got block ids of shape {list(ids.shape)} "
                f"from block {first_block} on"
            )
        if first_block:
            ids = ids.copy()
            ids[..., :first_block] = ABSENT
        return self.check(ids)

    def _listed(self, block_ids: Any) -> list[list[int]]:
        """Any number of ids, by table."""
        ids = np.asarray(block_ids)
        rows = ids if ids.ndim == 2 else ids[None]
        if ids.size:
            self._need_integers(ids)
        listed: list[list[int]] = rows.tolist()
        for row in listed:
            self._need_known(row)
            if len(set(row)) != len(row):
                raise LayoutError(f"a block id occurs twice among {row}")
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


def _are_leading(chunks: ChunkBlocks) -> bool:
    """Whether only leading blocks of the tables are absent: they have left a window."""
    absent = chunks.reshape(len(chunks), -1) == ABSENT
    return bool((np.logical_and.accumulate(absent, axis=1) == absent).all())


def present(row: Ids) -> tuple[Ids, int]:
    """The ids of a chunk that are present, and the number of the first of them."""
    first = int((row == ABSENT).sum())
    return row[first:], first


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
