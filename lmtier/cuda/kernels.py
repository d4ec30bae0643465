"""What the kernels need to know, as numpy tables, and how they are launched. Pure, but for `compiled`.

Two readings of an engine's memory, made apart from each other: `pieces` for the copies, which follow the
declared axes, and `raws` for the witness, which goes by addresses and strides alone.
"""

from __future__ import annotations

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
import numpy.typing as npt

from lmtier.errors import LayoutError
from lmtier.layout import Array, Layout, Shard

Ids = npt.NDArray[np.int32]
"""Engine blocks, [chunks, blocks]; negative where there is none."""

# The structs of kernels.cu, and its constants.
AXES, CHUNKS, BLOCKS, PART, LANES = 4, 64, 832, 1024, 8
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
    [("payload", "u8", CHUNKS), ("block", "i4", BLOCKS), ("chunks", "u4"), ("blocks", "u4")], align=True
)

KERNELS = ("gather", "scatter", "sums", "chain", "merge")
OPTIONS = ("-std=c++17",)
"""For NVRTC; cupy adds the architecture."""

SHORT = 240
"""Up to so many bytes, xxh3 hashes in another way, which no kernel does."""

_THREADS = 256
_AHEAD = 4  # words a thread has under way
_WIDEST = 16
_THREAD_BLOCKS_PER_SM = 4


class Memory(NamedTuple):
    """One tensor [blocks, heads, …]: where it is, and how it is strided, in bytes."""

    address: int
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Memory:
        if isinstance(tensor, np.ndarray):
            return cls(tensor.ctypes.data, tensor.itemsize, tensor.shape, tensor.strides)
        item = tensor.element_size()
        return cls(tensor.data_ptr(), item, tuple(tensor.shape), tuple(s * item for s in tensor.stride()))


class Launch(NamedTuple):
    """A kernel, its grid, and its arguments by value: numpy scalars and 0-dimensional arrays."""

    kernel: str
    x: int
    y: int
    threads: int
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Thread blocks of a launch: as many as fit so many SMs. Copies over PCIe need few; the rest computes.

    The GPU may put each of the four on an SM of its own. Rejected: one of 1,024 threads an SM, most of which
    have nothing to do where an engine's block is few words.
    """

    sms: int

    @property
    def thread_blocks(self) -> int:
        return self.sms * _THREAD_BLOCKS_PER_SM


class Geometry:
    """The memory of one rank in the kernels' terms. Layers are numbered as in the whole model."""

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        tensors: Sequence[Sequence[Memory]],
        tables: Sequence[int] = (),
    ) -> None:
        if layout.blocks > BLOCKS:
            raise LayoutError(f"a chunk is {layout.blocks} blocks; on CUDA it may be {BLOCKS} at most")
        self.layout, self.shard = layout, shard
        self.table = list(tables) or [0] * len(tensors)
        """Of each layer of the shard: the block table that it goes by."""
        numbers = range(shard.first_layer, shard.end_layer)
        # Table by table, so that what goes by one table is one launch; within it, layer by layer.
        order = sorted(range(len(numbers)), key=lambda i: (self.table[i], i))
        parts = {i: _pieces(layout, shard, numbers[i], tensors[i]) for i in order}
        self.pieces = np.array([piece for i in order for piece in parts[i]], PIECE)
        ends = np.cumsum([len(parts[i]) for i in order]).tolist()
        self._span = {numbers[i]: (end - len(parts[i]), end) for i, end in zip(order, ends, strict=True)}
        self.raws = np.array([_raw(numbers[i], memory) for i in order for memory in tensors[i]], RAW)
        self._length = {
            numbers[i]: sum(
                layout.blocks * int(self.raws["size"][at]) for at in range(*self._span[numbers[i]])
            )
            for i in order
        }
        if max(self._length.values()) >= 1 << 32:
            raise LayoutError(f"a chunk of one layer takes {max(self._length.values())} bytes: 4 GiB or more")

    @property
    def is_marked(self) -> bool:
        """Whether every layer of a chunk is long enough for a mark."""
        return min(self._length.values()) > SHORT

    def sums_bytes(self, layer: int) -> int:
        """Of the workspace that one chunk's mark takes."""
        return ((self._length[layer] - 1) // PART + 1) * LANES * 8

    def copies(
        self,
        kernel: str,
        layer: int | None,
        pieces: int,
        payloads: Sequence[int],
        ids: Sequence[Ids],
        spread: Spread,
    ) -> Iterator[Launch]:
        """`gather` or `scatter` one layer, or (None) all, of the chunks that have these addresses.

        `pieces`: where the device keeps that table. `ids`: of each block table.
        """
        for table, first, end in self._ranges(layer):
            most = int(words_of(self.pieces[first:end]).max())
            for at, batch in batches(payloads, ids[table]):
                x, y, threads = _grid((end - first) * at.size * self.layout.blocks, most, spread)
                where = np.uint64(pieces + first * PIECE.itemsize)
                yield Launch(kernel, x, y, threads, (where, np.uint32(end - first), batch))

    def runs(self, layer: int | None, payloads: Sequence[int], ids: Sequence[Ids]) -> Array | None:
        """The same copies without a kernel, [number, (engine, payload, bytes)]: what lies together in both.

        None, where a block is more than one piece.
        """
        found = []
        for table, first, end in self._ranges(layer):
            pieces, there = self.pieces[first:end], ids[table] >= 0
            if pieces["count"].max() > 1:
                return None
            base, at, step, place, run = (
                pieces[name].astype(np.int64)[:, None, None]
                for name in ("base", "at", "step", "place", "run")
            )
            numbers = np.arange(self.layout.blocks)
            engine = (base + step * ids[table].astype(np.int64))[:, there]
            payload = (at + place * numbers + np.asarray(payloads, np.int64)[:, None])[:, there]
            begins = np.ones(engine.shape, np.bool_)
            gaps = (np.diff(engine) != run[:, 0]) | (np.diff(payload) != run[:, 0])
            begins[:, 1:] = gaps
            starts = np.flatnonzero(begins)
            each = np.broadcast_to(run[:, 0], engine.shape).reshape(-1)[starts]
            nbytes = np.diff(np.append(starts, engine.size)) * each
            found.append(np.stack([engine.reshape(-1)[starts], payload.reshape(-1)[starts], nbytes], axis=1))
        return np.concatenate(found)

    def place(self, layer: int | None) -> tuple[int, int]:
        """Where a layer, or (None) all, lies in a payload: first byte, how many."""
        if layer is None:
            return 0, self.layout.nbytes(self.shard)
        first, end = self.layout.offsets(self.shard)[layer - self.shard.first_layer :][:2]
        return first, end - first

    def raw_runs(self, layer: int, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(address, bytes) of everything that a mark of these blocks is of, in its order."""
        first, end = self._span[layer]
        for raw in self.raws[first:end]:
            starts = np.zeros(1, np.int64)
            for count, stride in zip(raw["count"].tolist(), raw["stride"].tolist(), strict=True):
                starts = (starts[:, None] + np.arange(count) * stride).reshape(-1)
            base, step, run = int(raw["base"]), int(raw["step"]), int(raw["run"])
            for block in ids:
                yield from ((base + step * block + at, run) for at in starts.tolist())

    def marks(
        self, layer: int, raws: int, ids: Ids, workspace: int, marks: int, spread: Spread
    ) -> Iterator[Launch]:
        """One u64 a chunk at address `marks`: xxh3-64 of the layer's raw bytes. All blocks must be there."""
        if not self.is_marked:
            raise LayoutError(f"a chunk of one layer takes {SHORT} bytes or less: too few for a mark")
        if ids.shape[1] != self.layout.blocks or ids.min(initial=0) < 0:
            raise LayoutError(f"a mark is of a chunk's {self.layout.blocks} blocks, all of them")
        first, end = self._span[layer]
        length, size = np.uint32(self._length[layer]), self.sums_bytes(layer)
        for at, batch in batches([0] * len(ids), ids):
            begin, chunks = int(at[0]), at.size
            sums = np.uint64(workspace + begin * size)
            items = chunks * size // 16  # a thread adds up two lanes
            x = min(-(-items // 128), spread.thread_blocks)
            where = np.uint64(raws + first * RAW.itemsize)
            yield Launch("sums", x, 1, 128, (where, np.uint32(end - first), length, batch, sums))
            count, out = np.uint32(chunks), np.uint64(marks + begin * 8)
            yield Launch("chain", -(-chunks * LANES // 32), 1, 32, (sums, length, count))
            yield Launch("merge", -(-chunks // 32), 1, 32, (sums, length, count, out))

    def _ranges(self, layer: int | None) -> Iterator[tuple[int, int, int]]:
        """Table, and the range of its pieces."""
        if layer is not None:
            yield self.table[layer - self.shard.first_layer], *self._span[layer]
            return
        for table in sorted(set(self.table)):
            spans = [
                self._span[self.shard.first_layer + i] for i, each in enumerate(self.table) if each == table
            ]
            yield table, min(first for first, _ in spans), max(end for _, end in spans)


def batches(payloads: Sequence[int], ids: Ids) -> Iterator[tuple[npt.NDArray[np.intp], Array]]:
    """Which chunks, and the argument that says so: as many as one takes."""
    blocks = ids.shape[1]
    each = min(CHUNKS, BLOCKS // blocks)
    for first in range(0, len(payloads), each):
        at = np.arange(first, min(first + each, len(payloads)))
        batch = np.zeros((), BATCH)
        batch["payload"][: at.size] = payloads[first : first + at.size]
        batch["block"][: at.size * blocks] = ids[first : first + at.size].reshape(-1)
        batch["chunks"], batch["blocks"] = at.size, blocks
        yield at, batch


def words_of(pieces: Array) -> Array:
    """How many words a block of each piece takes."""
    return np.asarray(pieces["run"] // pieces["width"] * pieces["count"].prod(axis=1))


def _grid(items: int, words: int, spread: Spread) -> tuple[int, int, int]:
    """Thread blocks over items, thread blocks that share an item, threads in each."""
    threads = min(_THREADS, -(-words // 32) * 32)
    x = min(items, spread.thread_blocks)
    y = min(-(-words // (threads * _AHEAD)), max(1, spread.thread_blocks // x))
    return x, y, threads


def _pieces(layout: Layout, shard: Shard, layer: int, tensors: Sequence[Memory]) -> list[tuple[Any, ...]]:
    heads, size = layout.heads(layer, shard), layout.head_block_bytes(layer)
    start = layout.offsets(shard)[layer - shard.first_layer]
    block = np.empty((heads, size), np.uint8)  # never touched: its views tell the payload's strides
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
    """What lies together in both, and the axes (count, ours, theirs) over it, as few as can be."""
    run = item
    axes = [axis for axis in zip(shape, ours, theirs, strict=True) if axis[0] > 1]
    while together := [axis for axis in axes if axis[1] == axis[2] == run]:
        run *= together[0][0]
        axes.remove(together[0])
    return run, _merged(axes)


def _merged(axes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Axes (count, stride, …); neighbours are one where the outer goes on as the inner does."""
    merged: list[tuple[int, ...]] = []
    for count, *strides in axes:
        if merged and all(a == b * count for a, b in zip(merged[-1][1:], strides, strict=True)):
            count *= merged.pop()[0]
        merged.append((count, *strides))
    return merged


def _padded(layer: int, axes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Counts, and each kind of strides, of exactly AXES axes."""
    if len(axes) > AXES:
        raise LayoutError(
            f"layer {layer}: the tensor takes {len(axes)} strides to walk, {AXES} are supported"
        )
    kinds = len(axes[0]) if axes else 3
    filled = [*[(1, *(0,) * (kinds - 1))] * (AXES - len(axes)), *axes]
    return tuple(zip(*filled, strict=True))


def _raw(layer: int, memory: Memory) -> tuple[Any, ...]:
    """In the order of addresses, whatever the axes mean."""
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
    return resources.as_file(resources.files("lmtier.cuda").joinpath("kernels.cu"))


def source() -> str:
    with source_file() as path:
        return path.read_text()


@lru_cache(maxsize=1)
def compiled() -> Any:
    """The module of kernels for the current device. cupy keeps what it has compiled on disk."""
    cupy = import_module("cupy")  # here only: nobody without a GPU has it
    return cupy.RawModule(code=source(), options=OPTIONS, backend="nvrtc")
