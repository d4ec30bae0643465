"""Engine blocks ◄► extents on CPU: gather and scatter at memcpy speed, and conversion between known packings.

There are three ways to access the same memory:

    rows      blocks of many layers are rows of one flat memory: one numpy call per object     usual
    strided   K and V in separate allocations, or odd strides: one copy per run of blocks      the rest
    raw       only addresses and strides: fingerprints and the canary                          the witness

The witness shares only the check of block ids with the other two, so that neither can hide an error of the
other. Nothing here allocates payload-sized memory. All copies run outside the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import xxhash

from lmtier.copy.blocks import Blocks, Buffer, ChunkBlocks, payload_of, present, tensors_of_layers
from lmtier.copy.copy_threads import CopyThreads
from lmtier.copy.layers import LayerKV
from lmtier.copy.plans import CopyPlan, grouped
from lmtier.copy.witness import RawTensor
from lmtier.errors import LayoutError
from lmtier.format.layout import Array, Layout, Shard

Planes: TypeAlias = "Any | tuple[Any, Any]"
"""One layer's memory: a tensor [blocks, heads, N, C] in the declared packing, or K and V [.., N, D]."""

_Span: TypeAlias = "tuple[int, int, int]"
"""The number of a group, and its layers [low, high), counted from its first layer."""

_Run: TypeAlias = "tuple[ChunkBlocks, Array]"
"""The blocks of chunks, and their payloads [chunks, bytes]. Absent blocks are those of a single chunk."""

_SHARED_BYTES = 4 << 20  # below this, other threads cost more time than they save


class PagedKV(Blocks):
    """The KV memory of one rank, as the engine declares it.

    A payload is always that of the whole object, also if one layer is moved. It may be longer than the object
    (extents are whole pages). `block_ids` are the chunk's `layout.blocks` engine blocks, in token order.
    `tables` has the number of each layer's block table. There may be more of them (`table_count`) than the
    layers of this rank use.
    """

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        tensors: Sequence[Planes],
        crew: CopyThreads | None = None,
        *,
        tables: Sequence[int] = (),
        table_count: int = 0,
    ) -> None:
        layer_tensors = tensors_of_layers(shard, tensors)
        table_of_layer = tables or [0] * len(layer_tensors)
        self._layers = [
            LayerKV(layout, shard, number, planes, table)
            for (number, planes), table in zip(layer_tensors, table_of_layer, strict=True)
        ]
        first = self._layers[0]
        for layer in self._layers:
            if layer.blocks != first.blocks:
                raise LayoutError(
                    f"layer {layer.number}: expected {first.blocks} blocks as in layer {first.number}, "
                    f"got {layer.blocks}"
                )
        super().__init__(layout, shard, first.blocks, max(table_count, max(table_of_layer) + 1))
        self.groups = grouped(self._layers)
        self._raw = [[RawTensor(tensor) for tensor in planes] for _, planes in layer_tensors]
        self.crew = crew
        self._spans = {layer: self._spans_of(*self._range(layer)) for layer in (None, *self.layers)}
        self.raw_tag = self.tag_of([[raw.order for raw in tensors] for tensors in self._raw])

    def __repr__(self) -> str:
        ways = ", ".join(map(str, self.groups[:4])) + (", …" if len(self.groups) > 4 else "")
        return f"<PagedKV {self.shard} {self.blocks} blocks: {ways}>"

    # ---- to and from a payload

    def bind(self, block_ids: Any, buffer: Buffer, first_block: int = 0) -> Batch:
        """A copy between a chunk's blocks and its payload, prepared once, to run layer by layer or whole."""
        ids = self.chunk(block_ids, first_block)
        return Batch(self, [(ids, payload_of(buffer, self.nbytes)[None])], is_whole=bool(ids.min() >= 0))

    def bind_all(self, ids: ChunkBlocks, offsets: Sequence[int], view: Callable[[int, int], Buffer]) -> Batch:
        """Like `bind`, for many chunks whose payloads are at these offsets. `view` gives access to them.

        The chunks of a prompt are usually equally far apart. Then one numpy call moves a layer of all of
        them.
        """
        runs: list[_Run] = []
        is_whole = not ids.size or bool(ids.min() >= 0)
        joins = [is_whole] * len(offsets)
        if not is_whole:
            joins = [bool(chunk.min() >= 0) for chunk in ids.swapaxes(0, 1)]
        first = 0
        while first < len(offsets):
            offset, end, step = offsets[first], first + 1, self.nbytes
            if joins[first] and end < len(offsets) and (step := offsets[end] - offset) >= self.nbytes:
                end = len(offsets)
                if not all(joins[first:]) or list(offsets[first:]) != list(
                    range(offset, offset + (end - first) * step, step)
                ):
                    end = first + 1
                    while end < len(offsets) and joins[end] and offsets[end] == offset + (end - first) * step:
                        end += 1
            size = (end - first - 1) * step + self.nbytes
            payload = payload_of(view(offset, size), size)
            payloads = np.lib.stride_tricks.as_strided(payload, (end - first, self.nbytes), (step, 1))
            runs.append((ids[:, first:end], payloads))
            first = end
        return Batch(self, runs, is_whole=is_whole)

    def convert(
        self,
        layer: int | None,
        src: Buffer,
        stored: Layout,
        held: Shard,
        block_ids: Any,
        *,
        part: Shard | None = None,
        first_block: int = 0,
    ) -> None:
        """Scatter an object of another layout or shard: the part that `held` and this rank share.

        `part` limits it to one cell of `layout.cover`. Other layers are not changed.
        """
        if part is None and stored == self.layout and held == self.shard:
            return self.scatter(layer, src, block_ids, first_block)
        if not self.layout.reads(stored):
            raise LayoutError(f"an object stored as {_short(stored)} cannot be read as {_short(self.layout)}")
        common = held.overlap(self.shard)
        if common is not None and part is not None:
            common = common.overlap(part)
        if common is None:
            raise LayoutError(f"object {held} has no part of {part or self.shard} for {self.shard}")
        low, high = self._range(layer)
        ids = self.chunk(block_ids, first_block)[:, 0]
        payload = payload_of(src, stored.nbytes(held))
        for number in range(max(low, common.first_layer), min(high, common.end_layer)):
            at = stored.offsets(held)[number - held.first_layer]
            raw = payload[at : at + stored.layer_bytes(number, held)]
            raw = raw.reshape(stored.blocks, stored.heads(number, held), -1)
            unit = stored.layers[number].heads // stored.head_units
            stored_heads = slice((common[2] - held[2]) * unit, (common[3] - held[2]) * unit)
            own_heads = slice((common[2] - self.shard[2]) * unit, (common[3] - self.shard[2]) * unit)
            layer_kv = self._layers[number - self.shard.first_layer]
            layer_kv.convert(stored, raw[:, stored_heads], own_heads, *present(ids[layer_kv.table]))
        return None

    # ---- the witness

    def raw_fingerprint(self, block_ids: Any, layer: int | None = None) -> bytes:
        """xxh3-64 of these blocks' bytes in the engine's memory, in memory order.

        The fingerprint of an object is the hash of its layers' fingerprints, so a save can compute it layer
        by layer.
        """
        low, high = self._range(layer)
        fingerprints, tables = [], self._listed(block_ids)
        for number in range(low - self.shard.first_layer, high - self.shard.first_layer):
            digest = xxhash.xxh3_64()
            for piece in self._pieces(number, tables):
                digest.update(piece)
            fingerprints.append(digest.digest())
        return self.fold(fingerprints)

    def raw_blocks(self, block_ids: Any) -> bytes:
        """The bytes of any blocks, all layers, in memory order."""
        tables = self._listed(block_ids)
        return b"".join(piece for number in range(len(self._raw)) for piece in self._pieces(number, tables))

    def write_raw(self, block_ids: Any, data: bytes) -> None:
        """The inverse of `raw_blocks`."""
        tables = self._listed(block_ids)
        pieces = [piece for number in range(len(self._raw)) for piece in self._pieces(number, tables)]
        if sum(map(len, pieces)) != len(data):
            raise LayoutError(f"these blocks hold {sum(map(len, pieces))} bytes, got {len(data)}")
        at = 0
        for piece in pieces:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)

    def _pieces(self, number: int, tables: Sequence[list[int]]) -> Iterator[memoryview]:
        ids = tables[self._layers[number].table]
        return (piece for tensor in self._raw[number] for block in ids for piece in tensor.pieces(block))

    def _spans_of(self, low: int, high: int) -> list[_Span]:
        """The groups of layers [low, high), each with its part of them, counted from its first layer."""
        cuts = (
            (number, group.first_layer, max(low, group.first_layer), min(high, group.end_layer))
            for number, group in enumerate(self.groups)
        )
        return [(number, a - first, b - first) for number, first, a, b in cuts if a < b]

    def spans(self, layer: int | None) -> list[_Span]:
        spans = self._spans.get(layer)
        if spans is None:
            raise LayoutError(f"layer {layer} is not in shard {self.shard}")
        return spans


class Batch:
    """Prepared copies of chunks between their blocks and their payloads."""

    __slots__ = ("_is_whole", "_kv", "_plans", "nbytes")

    def __init__(self, kv: PagedKV, runs: Sequence[_Run], *, is_whole: bool) -> None:
        self._kv, self._is_whole = kv, is_whole
        self.nbytes = kv.nbytes * sum(len(payloads) for _, payloads in runs)
        self._plans = [
            [
                group.plan(payloads, *((row, 0) if is_whole else present(row)))
                for row, payloads in ((ids[group.table].reshape(-1), payloads) for ids, payloads in runs)
            ]
            for group in kv.groups
        ]

    def gather(self, layer: int | None) -> None:
        """Copy the engine's blocks to the payloads: one layer, or (None) all, shared with the crew."""
        if not self._is_whole:
            raise LayoutError("blocks of this chunk have left a sliding window: it cannot be saved any more")
        if layer is None:
            return self._share([partial(plan.gather, low, high) for plan, low, high in self._cuts()])
        for number, low, high in self._kv.spans(layer):
            for plan in self._plans[number]:
                plan.gather(low, high)
        return None

    def scatter(self, layer: int | None) -> None:
        """Copy the payloads to the engine's blocks."""
        if layer is None:
            return self._share([partial(plan.scatter, low, high) for plan, low, high in self._cuts()])
        for number, low, high in self._kv.spans(layer):
            for plan in self._plans[number]:
                plan.scatter(low, high)
        return None

    def _cuts(self) -> Iterator[tuple[CopyPlan, int, int]]:
        for number, low, high in self._kv.spans(None):
            for plan in self._plans[number]:
                yield from plan.thread_tasks(low, high)

    def _share(self, copies: list[Callable[[], None]]) -> None:
        crew = self._kv.crew
        if crew is not None and self.nbytes >= _SHARED_BYTES:
            crew.run(copies)
            return
        for copy in copies:
            copy()


def _short(layout: Layout) -> str:
    return f"{layout.packing} {layout.dtype}, {len(layout.layers)} layers, blocks of {layout.block_tokens}"
