"""The tables of the kernels, as numpy arrays, and the arguments of their launches. No GPU except `compiled`.

An engine's memory is described twice, independently: `pieces` for the copies, which follow the declared axes,
and `raws` for the witness, which only uses addresses and strides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, resources
from itertools import zip_longest
from math import gcd, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmtier.copy.blocks import ChunkBlocks
from lmtier.errors import LayoutError, size_text
from lmtier.format.layout import Array, Layout, Shard

"""Engine blocks, [chunks, blocks]; negative: no block."""

# The structs of kernels.cu, and its constants.
AXES, BLOCKS, PART, LANES = 4, 1000, 1024, 8
PIECE = np.dtype(
    [
        *[("base", "u8"), ("at", "u8"), ("step", "i8"), ("place", "i8")],
        *[
            ("ours", "i8", AXES),
            ("theirs", "i8", AXES),
            ("count", "u4", AXES),
            ("run", "u4"),
            ("width", "u4"),
        ],
    ],
    align=True,
)
RAW = np.dtype(
    [
        *[("base", "u8"), ("step", "i8"), ("stride", "i8", AXES), ("count", "u4", AXES)],
        *[("run", "u4"), ("size", "u4")],
    ],
    align=True,
)
BATCH = np.dtype(
    [("payload", "u8"), ("apart", "u8"), ("block", "i4", BLOCKS), ("chunks", "u4"), ("blocks", "u4")],
    align=True,
)

KERNELS = ("gather", "scatter", "sums", "chain", "merge")
OPTIONS = ("-std=c++17",)
"""Options for NVRTC. cupy adds the architecture."""

SHORT = 240
"""Up to so many bytes xxh3 uses another algorithm, which no kernel implements."""

_THREADS = 256
_AHEAD = 4  # words that a thread has in flight
_WIDEST = 16
_THREAD_BLOCKS_PER_SM = 3
_MORE_TO_SUM = 4


class TensorMemory(NamedTuple):
    """One tensor [blocks, heads, …]: its address, and its strides in bytes."""

    address: int
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> TensorMemory:
        if isinstance(tensor, np.ndarray):
            return cls(tensor.ctypes.data, tensor.itemsize, tensor.shape, tensor.strides)
        item = tensor.element_size()
        return cls(tensor.data_ptr(), item, tuple(tensor.shape), tuple(s * item for s in tensor.stride()))


class Launch(NamedTuple):
    """A kernel, its grid, and its arguments by value: numbers of ctypes and 0-dimensional arrays."""

    kernel: str
    x: int
    y: int
    threads: int
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """The thread blocks of a launch: as many as fit on so many SMs. Copies over PCIe need few SMs.

    The GPU may put each of the three on a separate SM. Rejected: one thread block of 1,024 threads per SM,
    most of which have nothing to do if an engine's block is few words.
    """

    sms: int

    @property
    def thread_blocks(self) -> int:
        return self.sms * _THREAD_BLOCKS_PER_SM


class Geometry:
    """The memory of one rank, as the kernels need it. Layers are numbered as in the whole model."""

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        tensors: Sequence[Sequence[TensorMemory]],
        tables: Sequence[int] = (),
    ) -> None:
        if layout.blocks > BLOCKS:
            raise LayoutError(f"a chunk is {layout.blocks} blocks; on CUDA it may be {BLOCKS} at most")
        self.layout, self.shard = layout, shard
        self._known: dict[range, _KnownLayers] = {}
        self.table = list(tables) or [0] * len(tensors)
        """The block table of each layer of the shard."""
        numbers = range(shard.first_layer, shard.end_layer)
        # Sorted by table, so that the layers of one table are one launch; within a table, by layer.
        order = sorted(range(len(numbers)), key=lambda i: (self.table[i], i))
        parts = {i: _pieces(layout, shard, numbers[i], tensors[i]) for i in order}
        self.pieces = np.array([piece for i in order for piece in parts[i]], PIECE)
        ends = np.cumsum([len(parts[i]) for i in order]).tolist()
        self._span = {numbers[i]: (end - len(parts[i]), end) for i, end in zip(order, ends, strict=True)}
        self.raws = np.array([_raw(numbers[i], memory) for i in order for memory in tensors[i]], RAW)
        self._words = words_of(self.pieces)
        self._offsets = layout.offsets(shard)
        self._length = {
            numbers[i]: sum(
                layout.blocks * int(self.raws["size"][at]) for at in range(*self._span[numbers[i]])
            )
            for i in order
        }
        if max(self._length.values()) >= 1 << 32:
            raise LayoutError(
                f"a chunk of one layer takes {size_text(max(self._length.values()))}: 4 GiB or more"
            )

    @property
    def layers(self) -> range:
        return range(self.shard.first_layer, self.shard.end_layer)

    @property
    def has_fingerprints(self) -> bool:
        """Whether every layer of a chunk is long enough for a mark."""
        return min(self._length.values()) > SHORT

    def sums_bytes(self, layer: int) -> int:
        """The bytes of workspace for the mark of one chunk."""
        return ((self._length[layer] - 1) // PART + 1) * LANES * 8

    def copy_launches(
        self,
        kernel: str,
        layers: range,
        pieces: int,
        payloads: Sequence[int] | Array,
        ids: Sequence[Array] | ChunkBlocks,
        spread: Spread,
    ) -> Iterator[Launch]:
        """`gather` or `scatter` these layers of the chunks at these addresses.

        `pieces`: the device address of that table. `ids`: the ids of each block table.
        """
        for table, first, end, most in self._part(layers).ranges:
            for at, batch in batches(ids[table], payloads):
                x, y, threads = _grid((end - first) * len(at) * self.layout.blocks, most, spread)
                where = ctypes.c_uint64(pieces + first * PIECE.itemsize)
                yield Launch(kernel, x, y, threads, (where, ctypes.c_uint32(end - first), batch))

    def run_bytes(self, layers: range) -> int:
        """The average contiguous bytes in both the engine's memory and payloads, over these layers.

        0: a block is more than one piece of its layer.
        """
        return min(0 if runs is None else runs.mean_bytes for runs in self._part(layers).runs)

    def runs(
        self,
        layers: range,
        payloads: Sequence[int] | Array,
        ids: Sequence[Array] | ChunkBlocks,
        *,
        stores: bool,
    ) -> Array:
        """The copies without a kernel, [number, (to, source, bytes)]: contiguous pieces in both memories."""
        table_runs = [runs for runs in self._part(layers).runs if runs is not None]
        parts = [runs.copies(payloads, ids[runs.table], stores=stores) for runs in table_runs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def place(self, layers: range) -> tuple[int, int]:
        """The place of these layers in a payload: first byte, number of bytes."""
        first = self._offsets[layers.start - self.shard.first_layer]
        return first, self._offsets[layers.stop - self.shard.first_layer] - first

    def raw_runs(self, layer: int, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(address, bytes) of everything that a mark of these blocks covers, in order."""
        first, end = self._span[layer]
        for raw in self.raws[first:end]:
            starts = np.zeros(1, np.int64)
            for count, stride in zip(raw["count"].tolist(), raw["stride"].tolist(), strict=True):
                starts = (starts[:, None] + np.arange(count) * stride).reshape(-1)
            base, step, run = int(raw["base"]), int(raw["step"]), int(raw["run"])
            for block in ids:
                yield from ((base + step * block + at, run) for at in starts.tolist())

    def fingerprint_launches(
        self,
        layers: range,
        raws: int,
        ids: Sequence[Array] | ChunkBlocks,
        workspace: tuple[int, int],
        marks: int,
        spread: Spread,
    ) -> Iterator[Launch]:
        """One u64 a chunk and layer at address `marks`, [layers, chunks]: xxh3-64 of the layer's raw bytes.

        All blocks must be present. `workspace`: the address and the size of the memory for sums.
        """
        if not self.has_fingerprints:
            raise LayoutError(f"a chunk of one layer takes {SHORT} bytes or less: too few for a mark")
        if any(each.shape[1] != self.layout.blocks or each.min(initial=0) < 0 for each in ids):
            raise LayoutError(f"a mark needs all {self.layout.blocks} blocks of a chunk")
        workspace_address, workspace_bytes = workspace
        sums = ctypes.c_uint64(workspace_address)
        for table, group in self._part(layers).alike:
            first, end = self._span[group.start]
            nbytes, size, across = self._length[group.start], self.sums_bytes(group.start), len(ids[table])
            tensors, length, apart = map(ctypes.c_uint32, (end - first, nbytes, across))
            # A thread adds up two lanes. It mostly waits for memory and ends soon, so there are more threads.
            pairs, max_blocks = ((nbytes - 1) // PART + 1) * LANES // 2, _MORE_TO_SUM * spread.thread_blocks
            step = max(1, min(len(group), workspace_bytes // size))
            for low in range(group.start, group.stop, step):
                count = min(step, group.stop - low)
                where = ctypes.c_uint64(raws + self._span[low][0] * RAW.itemsize)
                out = marks + 8 * across * (low - layers.start)
                for chunk_range, batch in batches(ids[table], most=max(1, workspace_bytes // (size * count))):
                    rows = count * len(chunk_range)
                    layer_count, rows_, chunks = map(ctypes.c_uint32, (count, rows, len(chunk_range)))
                    to = ctypes.c_uint64(out + 8 * chunk_range.start)
                    x = min(-(-rows * pairs // 128), max_blocks)
                    yield Launch("sums", x, 1, 128, (where, tensors, length, layer_count, batch, sums))
                    yield Launch("chain", -(-rows * LANES // 32), 1, 32, (sums, length, rows_))
                    yield Launch("merge", -(-rows // 32), 1, 32, (sums, length, rows_, chunks, apart, to))

    def _alike(self, layers: range) -> Iterator[tuple[int, range]]:
        """(table, layers): consecutive layers of a table whose tensors are equally spaced and marked
        alike."""
        first = layers.start
        for layer in layers:
            following = layer + 1
            if following in layers and self._kind(following) == self._kind(layer):
                continue
            yield self.table[first - self.shard.first_layer], range(first, following)
            first = following

    def _kind(self, layer: int) -> tuple[Any, ...]:
        first, end = self._span[layer]
        table = self.table[layer - self.shard.first_layer]
        return table, self._length[layer], tuple(self.raws["run"][first:end].tolist())

    def _part(self, layers: range) -> _KnownLayers:
        if (found := self._known.get(layers)) is None:
            ranges = list(self._ranges(layers))
            found = self._known[layers] = _KnownLayers(
                [(table, first, end, int(self._words[first:end].max())) for table, first, end in ranges],
                [_Runs.of(table, self.pieces[first:end], self.layout.blocks) for table, first, end in ranges],
                list(self._alike(layers)),
            )
        return found

    def _ranges(self, layers: range) -> Iterator[tuple[int, int, int]]:
        for table in sorted(set(self.table)):
            spans = [
                self._span[layer] for layer in layers if self.table[layer - self.shard.first_layer] == table
            ]
            if spans:
                yield table, spans[0][0], spans[-1][1]


class _KnownLayers(NamedTuple):
    """The cached tables of a range of layers."""

    ranges: list[tuple[int, int, int, int]]
    """For each table: its number, the range of its pieces, and the most words of a piece."""
    runs: list[_Runs | None]
    """The runs of each table."""
    alike: list[tuple[int, range]]
    """(table, layers) whose marks are computed in one launch."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """The plain copies of blocks that need no kernel. Pieces of neighbouring layers may be one copy."""

    table: int
    base: Array
    step: Array
    at: Array
    place: Array
    nbytes: Array

    @classmethod
    def of(cls, table: int, pieces: Array, blocks: int) -> _Runs | None:
        if pieces["count"].max() > 1:
            return None
        base, step, at, place, run = (
            pieces[name].astype(np.int64) for name in ("base", "step", "at", "place", "run")
        )
        is_contiguous = (np.diff(base) == run[:-1]) & (np.diff(at) == run[:-1]) & (np.diff(step) == 0)
        if blocks > 1:  # then a payload holds a layer's blocks together, not a block's layers
            is_contiguous[:] = False
        starts = np.flatnonzero(np.append(True, ~is_contiguous))
        base, step, at, place = (each[starts][:, None, None] for each in (base, step, at, place))
        return cls(table, base, step, at, place, np.add.reduceat(run, starts))

    @property
    def mean_bytes(self) -> int:
        return int(self.nbytes.mean())

    def copies(self, payloads: Sequence[int] | Array, ids: Array, *, stores: bool) -> Array:
        copies = np.empty((len(self.base), *ids.shape, 3), np.int64)
        copies[..., int(stores)] = self.base + self.step * ids
        starts = np.asarray(payloads, np.int64)[:, None]
        copies[..., int(not stores)] = self.at + (self.place * np.arange(ids.shape[1]) + starts)
        copies[..., 2] = self.nbytes[:, None, None]
        if ids.min(initial=0) < 0:  # some blocks have left a window
            copies = copies[:, ids >= 0]
        return copies.reshape(-1, 3)


def batches(
    ids: Array, payloads: Sequence[int] | Array | None = None, most: int = BLOCKS
) -> Iterator[tuple[range, Array]]:
    """Ranges of chunks and their kernel argument: as many chunks as fit, with equally spaced payloads."""
    blocks = ids.shape[1]
    chunks_per_batch = min(most, BLOCKS // blocks)
    starts = np.zeros(len(ids), np.int64) if payloads is None else np.asarray(payloads, np.int64)
    steps = starts[1:] - starts[:-1]
    first = 0
    while first < len(ids):
        last = min(first + chunks_per_batch, len(ids)) - 1
        distance = steps[first] if first < last else 0
        if (breaks := (steps[first:last] != distance).nonzero()[0]).size:
            last = first + int(breaks[0])
        at = range(first, last + 1)
        batch = np.zeros((), BATCH)
        batch["payload"] = int(starts[first])
        batch["apart"] = int(distance) % (1 << 64)  # it wraps if it is negative
        batch["block"][: len(at) * blocks] = ids[first : at.stop].reshape(-1)
        batch["chunks"], batch["blocks"] = len(at), blocks
        yield at, batch
        first = at.stop


def words_of(pieces: Array) -> Array:
    """The number of words of a block in each piece."""
    return np.asarray(pieces["run"] // pieces["width"] * pieces["count"].prod(axis=1))


def _grid(items: int, words: int, spread: Spread) -> tuple[int, int, int]:
    """The grid: thread blocks over items, thread blocks that share an item, threads in each."""
    threads = min(_THREADS, -(-words // 32) * 32)
    x = min(items, spread.thread_blocks)
    y = min(-(-words // (threads * _AHEAD)), max(1, spread.thread_blocks // x))
    return x, y, threads


def _pieces(
    layout: Layout, shard: Shard, layer: int, tensors: Sequence[TensorMemory]
) -> list[tuple[Any, ...]]:
    heads, size = layout.heads(layer, shard), layout.head_block_bytes(layer)
    start = layout.offsets(shard)[layer - shard.first_layer]
    block = np.empty((heads, size), np.uint8)  # only for its strides: its views have those of the payload
    if len(tensors) == 1:
        shape = (
            tensors[0].shape[1:]
            if layout.is_opaque
            else (heads, layout.block_tokens, sum(layout.layers[layer][1:]))
        )
        fits = shape[:1] == (heads,) and prod(shape) * tensors[0].item == block.size
        views = [block.view(f"u{tensors[0].item}").reshape(shape)] if fits else []
    else:
        views = list(layout.split(block, layer)) if layout.packing in ("token", "planes") else []
    rows = []
    for memory, view in zip_longest(tensors, views):
        if memory is None or view is None or view.shape != memory.shape[1:] or view.itemsize != memory.item:
            wanted = [(view.itemsize, *view.shape) for view in views] or f"{block.size} bytes"
            got = [(memory.item, *memory.shape[1:]) for memory in tensors]
            raise LayoutError(f"layer {layer}: expected blocks of {wanted}, got {got} (item, heads, …)")
        run, axes = _common(memory.item, memory.shape[1:], memory.strides[1:], view.strides)
        counts, ours, theirs = _padded(layer, axes)
        at, step, place = start + view.ctypes.data - block.ctypes.data, memory.strides[0], heads * size
        width = gcd(_WIDEST, run, memory.address, at, step, place, *ours, *theirs)
        rows.append((memory.address, at, step, place, ours, theirs, counts, run, width))
    return rows


def _common(
    item: int, shape: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> tuple[int, list[tuple[int, ...]]]:
    """The bytes that are contiguous in both, and the fewest axes (count, ours, theirs) over them."""
    run = item
    axes = [axis for axis in zip(shape, ours, theirs, strict=True) if axis[0] > 1]
    while together := [axis for axis in axes if axis[1] == axis[2] == run]:
        run *= together[0][0]
        axes.remove(together[0])
    return run, _merged(axes)


def _merged(axes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Merges neighbouring axes (count, stride, …) where the outer one continues the inner one."""
    merged: list[tuple[int, ...]] = []
    for count, *strides in axes:
        if merged and all(a == b * count for a, b in zip(merged[-1][1:], strides, strict=True)):
            count *= merged.pop()[0]
        merged.append((count, *strides))
    return merged


def _padded(layer: int, axes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The counts, and each kind of strides, padded to exactly AXES axes."""
    if len(axes) > AXES:
        raise LayoutError(
            f"layer {layer}: the tensor needs {len(axes)} strides, but at most {AXES} are supported"
        )
    kinds = len(axes[0]) if axes else 3
    filled = [*[(1, *(0,) * (kinds - 1))] * (AXES - len(axes)), *axes]
    return tuple(zip(*filled, strict=True))


def _raw(layer: int, memory: TensorMemory) -> tuple[Any, ...]:
    """The raw description of a tensor, in order of addresses, whatever its axes mean."""
    axes = sorted(
        (
            (count, stride)
            for count, stride in zip(memory.shape[1:], memory.strides[1:], strict=True)
            if count > 1
        ),
        key=lambda axis: -axis[1],
    )
    run = memory.item
    while axes and axes[-1][1] == run:
        run *= axes.pop()[0]
    counts, strides = _padded(layer, _merged(axes)) if axes else ((1,) * AXES, (0,) * AXES)
    return memory.address, memory.strides[0], strides, counts, run, run * prod(counts)


def source_file() -> AbstractContextManager[Path]:
    return resources.as_file(resources.files("lmtier.copy.cuda").joinpath("kernels.cu"))


def source() -> str:
    with source_file() as path:
        return path.read_text()


@lru_cache
def compiled(device: int) -> Any:
    """The compiled module of kernels for the current device, which has this number. cupy caches it on
    disk."""
    cupy = import_module("cupy")  # imported here, because machines without a GPU do not have it
    return cupy.RawModule(code=source(), options=OPTIONS, backend="nvrtc")
