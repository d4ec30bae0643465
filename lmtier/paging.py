"""Engine blocks ◄► extents on CPU: gather and scatter at memcpy speed, and conversion between known packings.

Three ways through the same memory, and no fourth:

    rows      blocks of many layers are rows of one flat memory: one numpy call an object    the rule
    strided   K and V in allocations of their own, or odd strides: a copy a run of blocks    the rest
    raw       addresses and strides only: fingerprints and the canary                        the witness

The witness shares nothing with the other two but the check of block ids, so that neither can hide the
other's misreading. Nothing here allocates payload-sized memory; all copies are made outside the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from lmtier.errors import LayoutError
from lmtier.layout import Array, Layout, Shard

if TYPE_CHECKING:
    from lmtier.workers import Crew

Planes: TypeAlias = "Any | tuple[Any, Any]"
"""One layer's memory: a tensor [blocks, heads, N, C] in the declared packing, or K and V [.., N, D]."""

Buffer: TypeAlias = "memoryview | bytes | bytearray | Array"
Ids: TypeAlias = npt.NDArray[np.intp]
_Span: TypeAlias = "tuple[int, int, int]"
"""Of a group, by number: its layers [low, high), counted from its first."""

_Cut: TypeAlias = "tuple[_Lane, int, int]"

RawOrder: TypeAlias = "tuple[int, list[tuple[int, int]]]"
"""Bytes of an element; (axis, how many) from the outermost in memory to the innermost."""

_LEFT = -1  # the id of a block that has left a sliding window
_SMALLEST_ROW = 64  # bytes; below this the row numbers weigh as much as the rows
_SHARED_BYTES = 4 << 20  # below this other threads cost more than they copy
_SHORT_RUN = 4  # neighbouring blocks, of which fewer are moved like those that lie anywhere

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
    """A chunk's block ids that `PagedKV.check` has found to be right: checked once, used for every layer."""

    __slots__ = ("absent", "is_whole", "tables")

    def __init__(self, tables: Sequence[Ids], absent: Sequence[int]) -> None:
        self.tables = tables
        """Of each block table; without those of leading blocks that it does not have."""
        self.absent = absent
        """How many those are: they have left a sliding window."""
        self.is_whole = not any(absent)

    def after(self, table: int, first_block: int) -> tuple[Ids, int]:
        """The ids from `first_block` on, or from the first that is there; and which block that is."""
        gone = self.absent[table]
        first = max(first_block, gone)
        return self.tables[table][first - gone :], first


class PagedKV:
    """The KV memory of one rank, as the engine declares it. Layers are numbered as in the whole model.

    A payload is the whole object's, also where one layer is moved; it may be longer than the object
    (extents are whole pages). `block_ids` are the chunk's `layout.blocks` engine blocks, in token order.
    Where an engine keeps several block tables for a request, `tables` says which of them each layer goes
    by; ids are then one row a table, or one row for all. An id of -1 is a block that has left a sliding
    window: a scatter passes it over.
    """

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        tensors: Sequence[Planes],
        crew: Crew | None = None,
        *,
        tables: Sequence[int] = (),
    ) -> None:
        self.layout, self.shard = layout, shard
        self.nbytes = layout.nbytes(shard)
        numbers = range(shard.first_layer, shard.end_layer)
        if len(tensors) != len(numbers):
            raise LayoutError(f"shard {shard} has {len(numbers)} layers, got tensors for {len(tensors)}")
        given = [tuple(t) if isinstance(t, (tuple, list)) else (t,) for t in tensors]
        goes_by = tables or [0] * len(numbers)
        self.tables = max(goes_by) + 1
        self._layers = [
            _Layer(layout, shard, number, t, table)
            for number, t, table in zip(numbers, given, goes_by, strict=True)
        ]
        self.blocks = self._layers[0].blocks
        for layer in self._layers:
            if layer.blocks != self.blocks:
                raise LayoutError(
                    f"layer {layer.number}: expected {self.blocks} blocks as in layer {numbers[0]}, "
                    f"got {layer.blocks}"
                )
        self.groups = _grouped(self._layers)
        self._raw = [[_Raw(tensor) for tensor in t] for t in given]
        self._crew = crew
        self._whole = self._spans(*self._range(None))
        self._single = [self._spans(number, number + 1) for number in numbers]
        self.raw_tag = self._tag([[raw.order for raw in tensors] for tensors in self._raw])

    @classmethod
    def dense(cls, layout: Layout, shard: Shard, tensors: Sequence[Planes]) -> PagedKV:
        """Caches without pages: tensors [heads, S, D] or [1, heads, S, D], seen as blocks 0, 1, 2, …

        Views only. Tokens after the last whole block are out of reach.
        """
        size = layout.block_tokens

        def paged(tensor: Any) -> Any:
            row = tensor[0] if tensor.ndim == 4 and tensor.shape[0] == 1 else tensor
            if row.ndim != 3:
                raise LayoutError(
                    f"a dense cache is [heads, S, D] or [1, heads, S, D], got {list(tensor.shape)}"
                )
            heads, tokens, width = row.shape
            whole = tokens // size
            return row[:, : whole * size].reshape(heads, whole, size, width).swapaxes(0, 1)

        return cls(
            layout,
            shard,
            [tuple(map(paged, t)) if isinstance(t, (tuple, list)) else paged(t) for t in tensors],
        )

    def __repr__(self) -> str:
        ways = ", ".join(map(str, self.groups[:4])) + (", …" if len(self.groups) > 4 else "")
        return f"<PagedKV {self.shard} {self.blocks} blocks: {ways}>"

    @property
    def layers(self) -> range:
        return range(self.shard.first_layer, self.shard.end_layer)

    # ---- to and from a payload

    def bind(self, block_ids: Any, buffer: Buffer, first_block: int = 0) -> Bound:
        """A chunk's blocks and its payload, looked up once, to be copied layer by layer or whole."""
        payload = self._payload(buffer, self.nbytes)[None]
        return Bound(self, self._ids(block_ids, first_block), payload, first_block)

    def bind_all(
        self, chunks: Sequence[tuple[BlockIds, int, int]], view: Callable[[int, int], Buffer]
    ) -> list[Bound]:
        """The same for many chunks (ids, offset, first block) of what `view` shows: in as few as can be.

        Those of a prompt mostly lie alike far apart, and then a call of numpy moves a layer of all of them.
        """
        bounds: list[Bound] = []
        offsets = [offset for _, offset, _ in chunks]
        joins = [ids.is_whole and not first_block for ids, _, first_block in chunks]
        at = 0
        while at < len(chunks):
            ids, offset, first_block = chunks[at]
            end = at + 1
            if joins[at] and end < len(chunks) and (step := offsets[end] - offset) >= self.nbytes:
                end = len(chunks)
                if not all(joins[at:]) or offsets[at:] != list(
                    range(offset, offset + (end - at) * step, step)
                ):
                    end = at + 1
                    while end < len(chunks) and joins[end] and offsets[end] == offset + (end - at) * step:
                        end += 1
            if end == at + 1:
                bounds.append(self.bind(ids, view(offset, self.nbytes), first_block))
            else:
                bounds.append(self._bind_run([ids for ids, _, _ in chunks[at:end]], offset, step, view))
            at = end
        return bounds

    def _bind_run(
        self, ids: Sequence[BlockIds], offset: int, step: int, view: Callable[[int, int], Buffer]
    ) -> Bound:
        size = (len(ids) - 1) * step + self.nbytes
        payload = self._payload(view(offset, size), size)
        payloads = np.lib.stride_tricks.as_strided(payload, (len(ids), self.nbytes), (step, 1))
        tables = [np.concatenate([each.tables[table] for each in ids]) for table in range(self.tables)]
        return Bound(self, BlockIds(tables, [0] * self.tables), payloads, 0)

    def gather_all(self, bounds: Sequence[Bound]) -> None:
        """All layers of them, with the crew's help if there is enough to do."""
        for bound in bounds:
            bound.need_all_blocks()
        self._share([partial(lane.gather, a, b) for lane, a, b in self._cuts(bounds)], bounds)

    def scatter_all(self, bounds: Sequence[Bound]) -> None:
        self._share([partial(lane.scatter, a, b) for lane, a, b in self._cuts(bounds)], bounds)

    def _cuts(self, bounds: Sequence[Bound]) -> Iterator[_Cut]:
        for bound in bounds:
            for number, low, high in self._whole:
                yield from bound.lanes[number].cuts(low, high)

    def _share(self, copies: list[Callable[[], None]], bounds: Sequence[Bound]) -> None:
        if self._crew is not None and self.nbytes * sum(each.chunks for each in bounds) >= _SHARED_BYTES:
            self._crew.run(copies)
            return
        for copy in copies:
            copy()

    def gather(self, layer: int | None, block_ids: Any, out: Buffer) -> None:
        """Copy the chunk in `block_ids` to its place in `out`: one layer, or (None) all of them."""
        self.bind(block_ids, out).gather(layer)

    def scatter(self, layer: int | None, src: Buffer, block_ids: Any, first_block: int = 0) -> None:
        """Copy `src` to the engine. The chunk's blocks before `first_block` are left alone."""
        self.bind(block_ids, src, first_block).scatter(layer)

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
        """Scatter an object of another layout or shard: what `held` and this rank have in common.

        `part` narrows it to one cell of `layout.cover`. Layers outside of it are left alone.
        """
        if part is None and stored == self.layout and held == self.shard:
            return self.scatter(layer, src, block_ids, first_block)
        if not self.layout.reads(stored):
            raise LayoutError(f"an object stored as {_short(stored)} cannot be read as {_short(self.layout)}")
        common = held.overlap(self.shard)
        if common is not None and part is not None:
            common = common.overlap(part)
        if common is None:
            raise LayoutError(f"object {held} holds nothing of {part or self.shard} for {self.shard}")
        low, high = self._range(layer)
        ids = self._ids(block_ids, first_block)
        payload = self._payload(src, stored.nbytes(held))
        for number in range(max(low, common.first_layer), min(high, common.end_layer)):
            at = stored.offsets(held)[number - held.first_layer]
            raw = payload[at : at + stored.layer_bytes(number, held)]
            raw = raw.reshape(stored.blocks, stored.heads(number, held), -1)
            unit = stored.layers[number].heads // stored.head_units
            theirs = slice((common[2] - held[2]) * unit, (common[3] - held[2]) * unit)
            ours = slice((common[2] - self.shard[2]) * unit, (common[3] - self.shard[2]) * unit)
            layer_of = self._layers[number - self.shard.first_layer]
            layer_of.convert(stored, raw[:, theirs], ours, *ids.after(layer_of.table, first_block))
        return None

    # ---- the witness

    def raw_fingerprint(self, block_ids: Any, layer: int | None = None) -> bytes:
        """xxh3-64 of these blocks' bytes in the engine's memory, in memory order.

        The whole object's is the hash of its layers', so a layerwise save can take it layer by layer.
        """
        low, high = self._range(layer)
        each, tables = [], self._listed(block_ids)
        for number in range(low - self.shard.first_layer, high - self.shard.first_layer):
            digest = xxhash.xxh3_64()
            for piece in self._pieces(number, tables):
                digest.update(piece)
            each.append(digest.digest())
        return self.fold(each)

    @staticmethod
    def fold(layers: Sequence[bytes]) -> bytes:
        """The fingerprint of an object from those of its layers, in order. That of one layer is its own."""
        return layers[0] if len(layers) == 1 else xxhash.xxh3_64_digest(b"".join(layers))

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

    def _listed(self, block_ids: Any) -> list[list[int]]:
        """Any number of ids, by table."""
        if isinstance(block_ids, BlockIds):
            return [ids.tolist() for ids in block_ids.tables]
        ids = np.asarray(block_ids)
        listed = [self._checked(row, len(row)).tolist() for row in (ids if ids.ndim == 2 else [ids])]
        return listed * self.tables if len(listed) == 1 else listed

    def _tag(self, orders: list[list[RawOrder]]) -> bytes:
        """Which raw arrangement a fingerprint is of; fingerprints of different ones are not comparable."""
        layout = self.layout
        said = [layout.packing, layout.dtype, layout.block_tokens, layout.chunk_tokens, self.shard]
        return xxhash.xxh3_64_digest(repr((said, orders)).encode())

    # ---- arguments

    def check(self, block_ids: Any) -> list[BlockIds]:
        """The blocks of consecutive chunks, to be used many times. Raises LayoutError if they cannot be."""
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
        """One table's ids chunk by chunk, without those that have left a window, and how many those are."""
        gone = 0
        if ids.size and ids.dtype.kind == "i" and ids[0] == _LEFT:
            gone = int(np.logical_and.accumulate(ids == _LEFT).sum())
        checked = self._checked(ids[gone:], size)
        if not gone:
            return list(checked.reshape(-1, size)), [0] * (len(ids) // size)
        at = range(0, len(ids), size)
        return (
            [checked[max(first - gone, 0) : max(first + size - gone, 0)] for first in at],
            [min(max(gone - first, 0), size) for first in at],
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

    def _checked(self, ids: Any, size: int) -> Ids:
        """Ids of whole chunks, `size` of each: integers, within the engine, none twice in a chunk."""
        # A wrong id must never reach take(mode="clip"), which would read another request's block.
        # So few ids: Python's min and max are faster than numpy's.
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
            for at in range(0, len(listed), size):
                if len(set(chunk := listed[at : at + size])) != size:
                    raise LayoutError(f"a block id occurs twice among {chunk}")
        return np.asarray(ids, np.intp)

    @staticmethod
    def _payload(buffer: Buffer, nbytes: int) -> Array:
        payload: Array = np.frombuffer(buffer, np.uint8)
        if len(payload) < nbytes:
            raise LayoutError(f"the object takes {nbytes} bytes, the buffer has {len(payload)}")
        return payload

    def _range(self, layer: int | None) -> tuple[int, int]:
        if layer is None:
            return self.shard.first_layer, self.shard.end_layer
        if not self.shard.first_layer <= layer < self.shard.end_layer:
            raise LayoutError(f"layer {layer} is not in shard {self.shard}")
        return layer, layer + 1

    def _spans(self, low: int, high: int) -> list[_Span]:
        """The groups that hold layers [low, high), each with its own part of them, counted from its first."""
        cuts = (
            (number, group.first_layer, max(low, group.first_layer), min(high, group.end_layer))
            for number, group in enumerate(self.groups)
        )
        return [(number, a - first, b - first) for number, first, a, b in cuts if a < b]

    def spans(self, layer: int | None) -> list[_Span]:
        if layer is None:
            return self._whole
        self._range(layer)
        return self._single[layer - self.shard.first_layer]


class Bound:
    """Chunks on their way between their blocks and their payloads, which are alike far apart."""

    __slots__ = ("_is_whole", "_kv", "chunks", "lanes")

    def __init__(self, kv: PagedKV, ids: BlockIds, payloads: Array, first_block: int) -> None:
        """`payloads`: [chunks, bytes]. Blocks before `first_block` are left alone, if it is one chunk."""
        self._kv, self._is_whole = kv, ids.is_whole and not first_block
        self.chunks = len(payloads)
        self.lanes = [group.lane(payloads, *ids.after(group.table, first_block)) for group in kv.groups]

    def need_all_blocks(self) -> None:
        if not self._is_whole:
            raise LayoutError("blocks of this chunk have left a sliding window: it cannot be saved any more")

    def gather(self, layer: int | None) -> None:
        """The engine's blocks to the payload."""
        self.need_all_blocks()
        for number, low, high in self._kv.spans(layer):
            self.lanes[number].gather(low, high)

    def scatter(self, layer: int | None) -> None:
        """The payload to the engine's blocks."""
        for number, low, high in self._kv.spans(layer):
            self.lanes[number].scatter(low, high)


class _Layer:
    """One layer's tensors as numpy views, checked against the layout. Elements are unsigned integers."""

    def __init__(
        self, layout: Layout, shard: Shard, number: int, tensors: tuple[Any, ...], table: int
    ) -> None:
        self.layout, self.number, self.table = layout, number, table
        _, k, v = layout.layers[number]
        heads, size = layout.heads(number, shard), layout.block_tokens
        if len(tensors) == 1:
            shapes: list[list[Any]] = [[heads, size, k + v]]
        elif len(tensors) == 2 and layout.packing in ("planes", "token"):
            shapes = [[heads, size, k], [heads, size, v]]
        else:
            raise LayoutError(
                f"layer {number}: {len(tensors)} tensors do not make packing {layout.packing!r}"
            )
        self.views = [_as_array(tensor, layout, number) for tensor in tensors]
        for view, shape in zip(self.views, shapes, strict=True):
            got = list(view.shape[1:])
            if layout.is_opaque:
                fits = got[:1] == [heads] and int(np.prod(got[1:])) * view.itemsize == k and view.ndim > 2
                shape = [heads, f"… ({k} bytes)"]
            else:
                fits = got == shape
            if not fits or len(view) != len(self.views[0]):
                raise LayoutError(
                    f"layer {number}: expected [blocks, {', '.join(map(str, shape))}], got {list(view.shape)}"
                )
        self.first_layer, self.end_layer, self.blocks = number, number + 1, len(self.views[0])
        self.roots = [_root(tensor) for tensor in tensors]
        self.at, self.end = layout.offsets(shard)[number - shard.first_layer :][:2]
        self.outer = layout.blocks, heads, -1

    def __str__(self) -> str:
        return f"layer {self.number} strided"

    def lane(self, payloads: Array, ids: Ids, first_block: int) -> _Lane:
        size = self.layout.blocks - first_block
        each = (
            self._pairs(payload, ids[number * size : (number + 1) * size], first_block)
            for number, payload in enumerate(payloads)
        )
        return _Pairs([pair for pairs in each for pair in pairs])

    def _pairs(self, payload: Array, ids: Ids, first_block: int) -> Iterator[tuple[Array, Array]]:
        """Our memory and the payload's, a pair of views for each plane and run of consecutive blocks."""
        cuts = self.cut(payload[self.at : self.end].reshape(self.outer))
        edges = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
        for view, cut in zip(self.views, cuts, strict=True):
            for a, b in pairwise(edges):
                if a < b:
                    yield view[ids[a] : ids[a] + b - a], cut[first_block + a : first_block + b]

    def cut(self, raw: Array) -> Sequence[Array]:
        """Views onto raw head-blocks [B, H, bytes] of this layout that match `views`, one for one."""
        if len(self.views) == 2:
            return self.layout.split(raw, self.number)
        (view,) = self.views
        return [raw.view(view.dtype).reshape(*raw.shape[:2], *view.shape[2:])]

    def planes(self) -> Sequence[Array]:
        """Views [blocks, H, N, D] of K, and V if there is one, onto the engine's memory."""
        if len(self.views) == 2:
            return self.views
        (view,) = self.views
        if self.layout.packing == "latent":
            return self.views
        if self.layout.packing == "token":
            k = self.layout.layers[self.number].k
            return view[..., :k], view[..., k:]
        blocks, heads, size, width = view.shape
        if view.strides[2:] != (width * view.itemsize, view.itemsize):
            raise LayoutError(
                f"layer {self.number}: packing {self.layout.packing!r} needs each head's block in one piece"
            )
        flat = np.lib.stride_tricks.as_strided(
            view, (blocks, heads, size * width), (*view.strides[:2], view.itemsize)
        )
        return self.layout.split(flat, self.number)

    def convert(self, stored: Layout, raw: Array, heads: slice, ids: Ids, first_block: int) -> None:
        """Put head-blocks `raw` [B, H, bytes] of layout `stored` into our `heads` of blocks `ids`."""
        if (stored.packing, stored.block_tokens) == (self.layout.packing, self.layout.block_tokens):
            for view, source in zip(self.views, self.cut(raw), strict=True):
                view[:, heads][ids] = source[first_block:]
            return
        # Tokens move in groups of the common divisor of both block sizes; the two block grids repeat
        # together every `period` tokens, so one strided copy takes the same group of every period.
        n, m = self.layout.block_tokens, stored.block_tokens
        group, period = gcd(n, m), lcm(n, m)
        for view, source in zip(self.planes(), stored.split(raw, self.number), strict=True):
            for token in range(0, period, group):
                (block, slot), (there, place) = divmod(token, n), divmod(token, m)
                skip = max(0, -(-(first_block - block) // (period // n)))
                mine = ids[block + skip * (period // n) - first_block :: period // n]
                found = source[there + skip * (period // m) :: period // m, :, place : place + group]
                view[:, heads, slot : slot + group][mine] = found


class _Rows:
    """Consecutive layers whose blocks are rows of one flat memory: one numpy call moves them all.

    Rows are void scalars: numpy moves each with one memmove, whatever its size.
    """

    def __init__(self, layers: Sequence[_Layer], width: int) -> None:
        self.first_layer, self.end_layer = layers[0].number, layers[-1].number + 1
        self.table = layers[0].table
        self.at, self.size = layers[0].at, layers[0].end - layers[0].at
        self.blocks = layers[0].layout.blocks
        views = [view for layer in layers for view in layer.views]
        base = min(views, key=_address)
        low = _address(base)
        high = max(_address(view) + _reach(view.shape, view.strides, view.itemsize) for view in views)
        self.dtype = np.dtype(f"V{width}")
        self.flat = np.lib.stride_tricks.as_strided(
            base[(0,) * (base.ndim - 1)][:1].view(np.uint8), ((high - low) // width * width,), (1,)
        ).view(self.dtype)
        self.step = base.strides[0] // width
        self.starts = np.stack([_row_numbers(layer, low, width) for layer in layers])[:, None, :]
        self.pieces: list[int] = self.starts[:, 0, 0].tolist()
        """Where each layer begins, for blocks of one row."""
        self._neighbours = self.step == 1 and self.starts.shape[-1] == 1
        """Whether a block is one row, and the next block the next row."""
        self.word = np.dtype(np.uint8 if width % 8 else np.uint64)
        """Rows of few void scalars would be copied within the GIL."""

    def __str__(self) -> str:
        return f"layers {self.first_layer}-{self.end_layer} in rows of {self.dtype.itemsize}"

    def lane(self, payloads: Array, ids: Ids, first_block: int) -> _Lane:
        count, blocks = len(payloads), self.blocks
        if not self._neighbours or len(ids) != count * blocks:
            return self._scattered(payloads, ids, first_block)
        parts: list[_Lane] = [
            (self._piece if is_run else self._scattered)(payloads[a:b], ids[a * blocks : b * blocks], 0)
            for a, b, is_run in self._runs(ids, count)
        ]
        return parts[0] if len(parts) == 1 else _Parts(parts)

    def _scattered(self, payloads: Array, ids: Ids, first_block: int) -> _Scattered:
        count, rows = len(payloads), self._rows(payloads).view(self.dtype)
        rows = rows.reshape(count, -1, self.blocks, self.starts.shape[-1]).swapaxes(0, 1)
        at = (ids * self.step).reshape(count, -1, 1)
        return _Scattered(self, rows[:, :, first_block:], at)

    def _piece(self, payloads: Array, ids: Ids, first_block: int) -> _Piece:
        count, rows = len(payloads), self._rows(payloads).view(self.word)
        rows = rows.reshape(count, -1, self.blocks, self.dtype.itemsize // self.word.itemsize).swapaxes(0, 1)
        # Downwards, the engine's rows are still touched upwards, which the hardware prefetches: a fifth
        # faster than `take` in the order of the ids.
        first, last = int(ids[0]), int(ids[-1])
        if last < first:
            rows = rows[:, ::-1, ::-1]
        return _Piece(self, rows, min(first, last))

    def _rows(self, payloads: Array) -> Array:
        return payloads[:, self.at : self.at + (self.end_layer - self.first_layer) * self.size]

    def _runs(self, ids: Ids, count: int) -> list[tuple[int, int, bool]]:
        """Chunks [a, b) of which all blocks are neighbours, upwards or downwards, and others."""
        steps = np.diff(ids)
        if not len(steps) or (abs(int(steps[0])) == 1 and bool((steps == steps[0]).all())):
            return [(0, count, True)]  # what a free list mostly gives
        size = self.blocks
        # From each chunk's last block to the next chunk; of chunks of one block, that is all there is.
        ways = joins = [*steps[size - 1 :: size].tolist(), 0]
        if size > 1:
            inner = steps[np.arange(len(steps)) % size != size - 1].reshape(count, -1)
            ways = np.where((inner == inner[:, :1]).all(1), inner[:, 0], 0).tolist()
        found: list[tuple[int, int, bool]] = []
        a = 0
        while a < count:
            b, way = a + 1, ways[a]
            while abs(way) == 1 and b < count and joins[b - 1] == way and (size == 1 or ways[b] == way):
                b += 1
            is_run = abs(way) == 1 and (b - a) * size >= _SHORT_RUN
            if found and not is_run and not found[-1][2]:
                found[-1] = (found[-1][0], b, False)
            else:
                found.append((a, b, is_run))
            a = b
        return found


class _Lane:
    """How chunks of one group are moved."""

    __slots__ = ()

    def gather(self, low: int, high: int) -> None:
        """Layers [low, high) of the group, counted from its first, to the payloads."""
        raise NotImplementedError

    def scatter(self, low: int, high: int) -> None:
        raise NotImplementedError

    def cuts(self, low: int, high: int) -> Iterator[_Cut]:
        """What several threads can do of that, each as fast as in one go."""
        yield self, low, high


class _Pairs(_Lane):
    """A strided layer's lane: views of our memory and of the payload's."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: list[tuple[Array, Array]]) -> None:
        self._pairs = pairs

    def gather(self, low: int, high: int) -> None:
        for ours, theirs in self._pairs:
            np.copyto(theirs, ours)

    def scatter(self, low: int, high: int) -> None:
        for ours, theirs in self._pairs:
            np.copyto(ours, theirs)


class _Parts(_Lane):
    """Chunks that lie in several ways."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[_Lane]) -> None:
        self._parts = parts

    def cuts(self, low: int, high: int) -> Iterator[_Cut]:
        for part in self._parts:
            yield from part.cuts(low, high)

    def gather(self, low: int, high: int) -> None:
        for part in self._parts:
            part.gather(low, high)

    def scatter(self, low: int, high: int) -> None:
        for part in self._parts:
            part.scatter(low, high)


class _Piece(_Lane):
    """Neighbouring blocks: one piece of memory a layer."""

    __slots__ = ("_count", "_first", "_flat", "_rows", "_shape", "_starts", "_word")

    def __init__(self, group: _Rows, rows: Array, first: int) -> None:
        """`rows`: [layers, chunks, blocks, words] of the payloads, in the order of the engine's memory."""
        self._flat, self._starts, self._shape = group.flat, group.pieces, rows.shape[1:]
        self._rows, self._first, self._count = rows, first, rows.shape[1] * rows.shape[2]
        self._word = group.word

    def cuts(self, low: int, high: int) -> Iterator[_Cut]:
        return ((self, layer, layer + 1) for layer in range(low, high))

    def _piece(self, layer: int) -> Array:
        start = self._starts[layer] + self._first
        return self._flat[start : start + self._count].view(self._word).reshape(self._shape)

    def gather(self, low: int, high: int) -> None:
        for layer in range(low, high):
            np.copyto(self._rows[layer], self._piece(layer))

    def scatter(self, low: int, high: int) -> None:
        for layer in range(low, high):
            np.copyto(self._piece(layer), self._rows[layer])


class _Scattered(_Lane):
    """Blocks anywhere: one call for all layers asked."""

    __slots__ = ("_at", "_flat", "_rows", "_starts")

    def __init__(self, group: _Rows, rows: Array, at: Ids) -> None:
        """`rows`: [layers, chunks, blocks, rows of a block] of the payloads; `at`: [chunks, blocks, 1]."""
        self._flat, self._starts = group.flat, group.starts
        self._rows, self._at = rows, at

    def gather(self, low: int, high: int) -> None:
        for number, at in enumerate(self._at):  # a chunk's rows lie together, so that `take` can write them
            rows = self._rows[low:high, number].reshape(-1)
            self._flat.take((self._starts[low:high] + at).reshape(-1), None, rows, "clip")

    def scatter(self, low: int, high: int) -> None:
        self._flat[self._starts[low:high, None] + self._at] = self._rows[low:high]


class _Raw:
    """One tensor as addresses: the witness of what gather and scatter do."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor  # keeps the memory alive
        if isinstance(tensor, np.ndarray):
            address, item, strides = tensor.ctypes.data, tensor.itemsize, tensor.strides
        else:
            address, item = tensor.data_ptr(), tensor.element_size()
            strides = tuple(stride * item for stride in tensor.stride())
        shape = tuple(tensor.shape)
        memory = (ctypes.c_uint8 * _reach(shape, strides, item)).from_address(address)
        self.memory = memoryview(memory).cast("B")
        self.step = strides[0]
        self.order = raw_order(item, shape, strides)
        axes = [(-strides[axis], axis) for axis, _ in self.order[1]]
        self.length = item
        while axes and -axes[-1][0] == self.length:
            self.length *= shape[axes.pop()[1]]
        self.starts = [0]
        for stride, axis in axes:
            self.starts = [at - stride * i for at in self.starts for i in range(shape[axis])]

    def pieces(self, block: int) -> Iterator[memoryview]:
        for start in self.starts:
            at = block * self.step + start
            yield self.memory[at : at + self.length]


def raw_order(item: int, shape: Sequence[int], strides: Sequence[int]) -> RawOrder:
    """The axes within a block in the order of memory, outermost first."""
    axes = sorted((-strides[axis], axis) for axis in range(1, len(shape)) if shape[axis] > 1)
    return item, [(axis, shape[axis]) for _, axis in axes]


def _grouped(layers: Sequence[_Layer]) -> list[_Rows | _Layer]:
    """The fewest calls: layers of one shape in one allocation move together, where rows allow it."""
    groups: list[_Rows | _Layer] = []
    for _, run in groupby(
        layers, key=lambda layer: (layer.table, layer.roots, [(v.shape, v.strides) for v in layer.views])
    ):
        alike = list(run)
        parts = [alike] if _row_width(alike) >= _SMALLEST_ROW else [[layer] for layer in alike]
        for part in parts:
            width = _row_width(part)
            groups.append(_Rows(part, width) if width >= _SMALLEST_ROW else part[0])
    return groups


def _row_width(layers: Sequence[_Layer]) -> int:
    """The largest size such that all these layers' blocks are rows of it, in payload order; 0 if none."""
    roots = {root for layer in layers for root in layer.roots}
    steps = {view.strides[0] for layer in layers for view in layer.views}
    if len(roots) > 1 or len(steps) > 1:
        return 0
    low = min(_address(view) for layer in layers for view in layer.views)
    width = steps.pop()
    for layer in layers:
        for size, starts in _runs(layer):
            width = gcd(width, size, int(np.gcd.reduce(starts - low, axis=None)))
    return width


def _runs(layer: _Layer) -> list[tuple[int, npt.NDArray[np.intp]]]:
    """For each tensor: the bytes that lie together in memory and in the payload, and block 0's addresses.

    Addresses are [outer, inner]: the planes of a payload take turns after `outer` runs.
    """
    turns = 1 if len(layer.views) == 1 else {"planes": 2, "token": 3}[layer.layout.packing]
    found = []
    for view in layer.views:
        size, end = view.itemsize, view.ndim
        while end > turns and (view.shape[end - 1] == 1 or view.strides[end - 1] == size):
            end -= 1
            size *= view.shape[end]
        starts = np.full(1, _address(view), np.intp)
        for axis in range(1, end):
            starts = (starts[:, None] + np.arange(view.shape[axis]) * view.strides[axis]).reshape(-1)
        found.append((size, starts.reshape(int(np.prod(view.shape[1:turns])), -1)))
    return found


def _row_numbers(layer: _Layer, low: int, width: int) -> Ids:
    """The rows of block 0, in payload order."""
    planes = [
        (((starts - low) // width)[..., None] + np.arange(size // width)).reshape(len(starts), -1)
        for size, starts in _runs(layer)
    ]
    return np.concatenate(planes, axis=1).reshape(-1).astype(np.intp, copy=False)


def _as_array(tensor: Any, layout: Layout, number: int) -> Array:
    """A torch CPU tensor or numpy array as a writable numpy view of unsigned integers."""
    if isinstance(tensor, np.ndarray):
        array: Array = tensor
        kind, dtype = array.dtype.kind, str(array.dtype)
    else:
        import torch

        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            where = getattr(tensor, "device", type(tensor).__name__)
            raise LayoutError(f"layer {number}: expected a CPU tensor or a numpy array, got {where}")
        kind, dtype = ("f" if tensor.is_floating_point() else "i"), str(tensor.dtype)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        array = tensor.detach().view(bits).numpy()
    check_dtype(layout, number, dtype, array.itemsize, is_integer=kind in "iu")
    if not array.size or min(array.strides) < 0 or not array.flags.writeable:
        raise LayoutError(f"layer {number}: the tensor is empty, reversed or read-only: {list(array.shape)}")
    return array.view(f"u{array.itemsize}")


def check_dtype(layout: Layout, number: int, dtype: str, item: int, *, is_integer: bool) -> None:
    # Integers of the right size are taken as raw bits: numpy has no bf16, and engines keep fp8 in uint8.
    fits = _DTYPES.get(dtype) == layout.dtype or (is_integer and item == layout.itemsize)
    if not fits and not layout.is_opaque:
        raise LayoutError(f"layer {number}: expected dtype {layout.dtype}, got {dtype}")


def _root(tensor: Any) -> int:
    """The address of the allocation a tensor lives in."""
    if not isinstance(tensor, np.ndarray):
        return int(tensor.untyped_storage().data_ptr())
    while isinstance(tensor.base, np.ndarray):
        tensor = tensor.base
    return int(tensor.ctypes.data)


def _address(array: Array) -> int:
    return int(array.ctypes.data)


def _reach(shape: Sequence[int], strides: Sequence[int], item: int) -> int:
    """Bytes from the first element to the end of the last."""
    return item + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))


def _short(layout: Layout) -> str:
    return f"{layout.packing} {layout.dtype}, {len(layout.layers)} layers, blocks of {layout.block_tokens}"
