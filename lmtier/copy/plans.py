"""Plans the copies between blocks and payloads: as few as possible, planned once for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import gcd
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lmtier.copy.blocks import Ids
from lmtier.copy.layers import LayerKV, address, reach
from lmtier.format.layout import Array

Group: TypeAlias = "_Rows | _Strided"
"""Layers that are copied together."""
_Cut: TypeAlias = "tuple[CopyPlan, int, int]"

_SMALLEST_ROW = 64  # bytes; below this the row numbers weigh as much as the rows
_SHORT_RUN = 4  # fewer neighbouring blocks than this are copied like scattered ones


def grouped(layers: Sequence[LayerKV]) -> list[Group]:
    """The groups that need the fewest calls: layers of one shape in one allocation, if rows allow it."""
    groups: list[Group] = []
    for _, run in groupby(
        layers, key=lambda layer: (layer.table, layer.roots, [(v.shape, v.strides) for v in layer.views])
    ):
        alike = list(run)
        parts = [alike] if _row_width(alike) >= _SMALLEST_ROW else [[layer] for layer in alike]
        for part in parts:
            width = _row_width(part)
            groups.append(_Rows(part, width) if width >= _SMALLEST_ROW else _Strided(part[0]))
    return groups


class _Strided:
    """One layer with K and V in separate allocations, or odd strides: one copy per run of blocks."""

    def __init__(self, layer: LayerKV) -> None:
        self.first_layer, self.end_layer = layer.number, layer.number + 1
        self.table = layer.table
        self._layer = layer
        self._shape = layer.outer

    def __str__(self) -> str:
        return f"layer {self.first_layer} strided"

    def plan(self, payloads: Array, ids: Ids, first_block: int) -> CopyPlan:
        size = self._layer.layout.blocks - first_block
        pairs_of_chunks = (
            self._pairs(payload, ids[number * size : (number + 1) * size], first_block)
            for number, payload in enumerate(payloads)
        )
        return _Pairs([pair for pairs in pairs_of_chunks for pair in pairs])

    def _pairs(self, payload: Array, ids: Ids, first_block: int) -> Iterator[tuple[Array, Array]]:
        """Pairs of views of our memory and the payload's, for each plane and run of consecutive blocks."""
        layer = self._layer
        cuts = layer.payload_views(payload[layer.at : layer.end].reshape(self._shape))
        edges = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
        for view, cut in zip(layer.views, cuts, strict=True):
            for a, b in pairwise(edges):
                if a < b:
                    yield view[ids[a] : ids[a] + b - a], cut[first_block + a : first_block + b]


class _Rows:
    """Consecutive layers whose blocks are rows of one flat memory: one numpy call moves them all.

    Rows are void scalars: numpy moves each with one memmove, whatever its size.
    """

    def __init__(self, layers: Sequence[LayerKV], width: int) -> None:
        self.first_layer, self.end_layer = layers[0].number, layers[-1].number + 1
        self.table = layers[0].table
        self.at, self.size = layers[0].at, layers[0].end - layers[0].at
        self.blocks = layers[0].layout.blocks
        views = [view for layer in layers for view in layer.views]
        base = min(views, key=address)
        low = address(base)
        high = max(address(view) + reach(view.shape, view.strides, view.itemsize) for view in views)
        self.dtype = np.dtype(f"V{width}")
        self.flat = np.lib.stride_tricks.as_strided(
            base[(0,) * (base.ndim - 1)][:1].view(np.uint8), ((high - low) // width * width,), (1,)
        ).view(self.dtype)
        self.step = base.strides[0] // width
        self.starts = np.stack([_row_numbers(layer, low, width) for layer in layers])[:, None, :]
        self.pieces: list[int] = self.starts[:, 0, 0].tolist()
        """The row where each layer begins, for blocks of one row."""
        self._neighbours = self.step == 1 and self.starts.shape[-1] == 1
        """Whether a block is one row, and the next block is the next row."""
        self.word = np.dtype(np.uint8 if width % 8 else np.uint64)
        """The type for small copies, because numpy copies rows of few void scalars while it holds the GIL."""

    def __str__(self) -> str:
        return f"layers {self.first_layer}-{self.end_layer} in rows of {self.dtype.itemsize}"

    def plan(self, payloads: Array, ids: Ids, first_block: int) -> CopyPlan:
        count, blocks = len(payloads), self.blocks
        if not self._neighbours or len(ids) != count * blocks:
            return self._scattered(payloads, ids, first_block)
        parts: list[CopyPlan] = [
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
        # For descending ids the engine's rows are still read in ascending order. The hardware prefetches
        # that:
        # it is a fifth faster than `take` in the order of the ids.
        first, last = int(ids[0]), int(ids[-1])
        if last < first:
            rows = rows[:, ::-1, ::-1]
        return _Piece(self, rows, min(first, last))

    def _rows(self, payloads: Array) -> Array:
        return payloads[:, self.at : self.at + (self.end_layer - self.first_layer) * self.size]

    def _runs(self, ids: Ids, count: int) -> list[tuple[int, int, bool]]:
        """Splits chunks into ranges [a, b): those whose blocks are all neighbours, in either order, and
        others."""
        steps = np.diff(ids)
        if not len(steps) or (abs(int(steps[0])) == 1 and bool((steps == steps[0]).all())):
            return [(0, count, True)]  # the usual result of a free list
        size = self.blocks
        # The step from each chunk's last block to the next chunk. Chunks of one block have no other steps.
        ways = joins = [*steps[size - 1 :: size].tolist(), 0]
        if size > 1:
            inner = steps[np.arange(len(steps)) % size != size - 1].reshape(count, -1)
            ways = np.where((inner == inner[:, :1]).all(1), inner[:, 0], 0).tolist()
        ranges: list[tuple[int, int, bool]] = []
        a = 0
        while a < count:
            b, way = a + 1, ways[a]
            while abs(way) == 1 and b < count and joins[b - 1] == way and (size == 1 or ways[b] == way):
                b += 1
            is_run = abs(way) == 1 and (b - a) * size >= _SHORT_RUN
            if ranges and not is_run and not ranges[-1][2]:
                ranges[-1] = (ranges[-1][0], b, False)
            else:
                ranges.append((a, b, is_run))
            a = b
        return ranges


class CopyPlan:
    """How the chunks of one group are copied."""

    __slots__ = ()

    def gather(self, low: int, high: int) -> None:
        """Copy layers [low, high) of the group, counted from its first, to the payloads."""
        raise NotImplementedError

    def scatter(self, low: int, high: int) -> None:
        raise NotImplementedError

    def thread_tasks(self, low: int, high: int) -> Iterator[_Cut]:
        """Pieces of this copy for several threads, each as fast as within one copy."""
        yield self, low, high


class _Pairs(CopyPlan):
    """The copies of a strided layer: pairs of views of our memory and of the payload's."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: list[tuple[Array, Array]]) -> None:
        self._pairs = pairs

    def gather(self, low: int, high: int) -> None:
        for ours, theirs in self._pairs:
            np.copyto(theirs, ours)

    def scatter(self, low: int, high: int) -> None:
        for ours, theirs in self._pairs:
            np.copyto(ours, theirs)


class _Parts(CopyPlan):
    """A plan of several parts, for chunks whose blocks lie in different ways."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[CopyPlan]) -> None:
        self._parts = parts

    def thread_tasks(self, low: int, high: int) -> Iterator[_Cut]:
        for part in self._parts:
            yield from part.thread_tasks(low, high)

    def gather(self, low: int, high: int) -> None:
        for part in self._parts:
            part.gather(low, high)

    def scatter(self, low: int, high: int) -> None:
        for part in self._parts:
            part.scatter(low, high)


class _Piece(CopyPlan):
    """Neighbouring blocks: one piece of memory per layer."""

    __slots__ = ("_count", "_first", "_flat", "_rows", "_shape", "_starts", "_word")

    def __init__(self, group: _Rows, rows: Array, first: int) -> None:
        """`rows`: [layers, chunks, blocks, words] of the payloads, in the order of the engine's memory."""
        self._flat, self._starts, self._shape = group.flat, group.pieces, rows.shape[1:]
        self._rows, self._first, self._count = rows, first, rows.shape[1] * rows.shape[2]
        self._word = group.word

    def thread_tasks(self, low: int, high: int) -> Iterator[_Cut]:
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


class _Scattered(CopyPlan):
    """Scattered blocks: one call for all requested layers."""

    __slots__ = ("_at", "_flat", "_rows", "_starts")

    def __init__(self, group: _Rows, rows: Array, at: Ids) -> None:
        """`rows`: [layers, chunks, blocks, rows of a block] of the payloads; `at`: [chunks, blocks, 1]."""
        self._flat, self._starts = group.flat, group.starts
        self._rows, self._at = rows, at

    def gather(self, low: int, high: int) -> None:
        for number, at in enumerate(self._at):  # a chunk's rows are contiguous, so `take` can write them
            rows = self._rows[low:high, number].reshape(-1)
            self._flat.take((self._starts[low:high] + at).reshape(-1), None, rows, "clip")

    def scatter(self, low: int, high: int) -> None:
        self._flat[self._starts[low:high, None] + self._at] = self._rows[low:high]


def _row_width(layers: Sequence[LayerKV]) -> int:
    """The largest row size for which all blocks of these layers are rows, in payload order; 0: none."""
    roots = {root for layer in layers for root in layer.roots}
    steps = {view.strides[0] for layer in layers for view in layer.views}
    if len(roots) > 1 or len(steps) > 1:
        return 0
    low = min(address(view) for layer in layers for view in layer.views)
    width = steps.pop()
    for layer in layers:
        for size, starts in _runs(layer):
            width = gcd(width, size, int(np.gcd.reduce(starts - low, axis=None)))
    return width


def _runs(layer: LayerKV) -> list[tuple[int, npt.NDArray[np.intp]]]:
    """For each tensor: the bytes that are contiguous in memory and in the payload, and block 0's addresses.

    Addresses are [outer, inner]: the planes of a payload alternate after `outer` runs.
    """
    outer_axes = 1 if len(layer.views) == 1 else {"planes": 2, "token": 3}[layer.layout.packing]
    runs = []
    for view in layer.views:
        size, end = view.itemsize, view.ndim
        while end > outer_axes and (view.shape[end - 1] == 1 or view.strides[end - 1] == size):
            end -= 1
            size *= view.shape[end]
        starts = np.full(1, address(view), np.intp)
        for axis in range(1, end):
            starts = (starts[:, None] + np.arange(view.shape[axis]) * view.strides[axis]).reshape(-1)
        runs.append((size, starts.reshape(int(np.prod(view.shape[1:outer_axes])), -1)))
    return runs


def _row_numbers(layer: LayerKV, low: int, width: int) -> Ids:
    """The rows of block 0, in payload order."""
    planes = [
        (((starts - low) // width)[..., None] + np.arange(size // width)).reshape(len(starts), -1)
        for size, starts in _runs(layer)
    ]
    return np.concatenate(planes, axis=1).reshape(-1).astype(np.intp, copy=False)
