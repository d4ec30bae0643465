"""Engine blocks on a GPU ◄► extents: what `PagedKV` is on a CPU, over the same layouts, with the same marks.

Two ways, by how much of a block lies together:

    runs      long runs of bytes are copied as they are, all of them in one call          no SM is used
    staged    a kernel puts blocks into the order of payloads in device memory, and one    few SMs
              copy a chunk takes that over the bus, while the kernel does the next

A chunk that has a place in GPU memory (`lmtier.hbm`) goes the second way, with that place as its staging:
what was brought there once is scattered from there without the bus.

What is called `enqueue_…` returns at once, and belongs into a part of a transfer of `lmtier.cuda.streams`.
The calls that `PagedKV` has too wait for the device: they are for the canary, and for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from lmtier.cuda.kernels import Geometry, Ids, Memory
from lmtier.cuda.streams import Device, Enqueue, Event, Lane, Stream
from lmtier.errors import LayoutError, MisuseError
from lmtier.layout import Array, Layout, Shard
from lmtier.paging import BlockIds, Buffer, PagedKV, Planes, check_dtype, raw_order

STAGING_BYTES = 64 << 20
"""In each direction."""

SHORTEST_RUN = 128 << 10
"""From this many bytes on, on average, runs are copied as they are. Not measured here yet: a single copy
costs peers about 2 µs of the bus, which is this much."""

Near: TypeAlias = "Sequence[tuple[int, bool] | None]"
"""Of each chunk: its offset in the memory of `hold`, and whether its payload is there already; or None."""

_SLOTS = 2  # one under the kernel, one on the bus
_WORKSPACE_BYTES = 8 << 20
_ALIGNED = 256


class Marks:
    """Room for the marks of a few chunks, [layers, chunks], which the device writes and the host reads."""

    def __init__(self, layers: int, chunks: int, memory: Array) -> None:
        self.memory = memory
        self.values = memory[: layers * chunks * 8].view(np.uint64).reshape(layers, chunks)

    def prints(self, chunk: int) -> list[bytes]:
        """Of each layer, as `PagedKV.raw_fingerprint` says it."""
        return [int(value).to_bytes(8, "big") for value in self.values[:, chunk]]


class Staging:
    """Device memory in slots that take turns. A slot's next use waits for the end of its last."""

    def __init__(self, device: Device, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._slots: list[tuple[int, Event | None]] = [
            (device.memory(slot_bytes), None) for _ in range(_SLOTS)
        ]

    def take(self, stream: Stream) -> int:
        """The address of the next one, for `stream` to fill."""
        address, end = self._slots[0]
        if end is not None:
            stream.wait(end)
        return address

    def turn(self, stream: Stream) -> None:
        """`stream` has emptied it."""
        address, _ = self._slots.pop(0)
        self._slots.append((address, stream.record()))


class CudaKV(PagedKV):
    """The KV memory of one rank on a GPU, as the engine declares it."""

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        tensors: Sequence[Planes],
        device: Device,
        *,
        tables: Sequence[int] = (),
        staging_bytes: int = STAGING_BYTES,
        shortest_run: int = SHORTEST_RUN,
    ) -> None:
        self.layout, self.shard, self.device = layout, shard, device
        self.nbytes = layout.nbytes(shard)
        numbers = range(shard.first_layer, shard.end_layer)
        if len(tensors) != len(numbers):
            raise LayoutError(f"shard {shard} has {len(numbers)} layers, got tensors for {len(tensors)}")
        self._tensors = [tuple(t) if isinstance(t, (tuple, list)) else (t,) for t in tensors]
        memory = [
            [self._memory(number, t) for t in ts] for number, ts in zip(numbers, self._tensors, strict=True)
        ]
        self.blocks = memory[0][0].shape[0]
        for number, each in zip(numbers, memory, strict=True):
            if any(m.shape[0] != self.blocks for m in each):
                raise LayoutError(f"layer {number}: expected {self.blocks} blocks, got {each[0].shape[0]}")
        self.geometry = Geometry(layout, shard, memory, tables)
        self.tables = max(self.geometry.table) + 1
        if not self.geometry.is_marked:
            raise LayoutError(
                "a chunk of one layer takes so few bytes that kernels cannot take its fingerprint"
            )
        self.raw_tag = self._tag([[raw_order(m.item, m.shape, m.strides) for m in each] for each in memory])
        largest = max(self.geometry.place(layer)[1] for layer in numbers)
        self._shortest_run = shortest_run
        self._piece_table = device.upload(self.geometry.pieces)
        self._raw_table = device.upload(self.geometry.raws)
        self._slot_bytes = max(staging_bytes // _SLOTS, _aligned(largest))
        self._staging = {stores: Staging(device, self._slot_bytes) for stores in (True, False)}
        self._workspace_bytes = max(_WORKSPACE_BYTES, *map(self.geometry.sums_bytes, numbers))
        # Of sums. One for each direction, whose kernels run one after another.
        self._workspace = {stores: device.memory(self._workspace_bytes) for stores in (True, False)}
        self._spare_marks: dict[int, list[Array]] = {}
        self._held, self._held_bytes = 0, 0

    def hold(self, nbytes: int) -> None:
        """Take this much GPU memory for the payloads of chunks that are given places. Once, at start."""
        if self._held_bytes:
            raise MisuseError("this rank holds memory for copies already")
        self._held, self._held_bytes = self.device.memory(nbytes), nbytes

    def _memory(self, number: int, tensor: Any) -> Memory:
        memory = Memory.of(tensor)
        dtype = str(tensor.dtype)
        check_dtype(
            self.layout, number, dtype, memory.item, is_integer="int" in dtype and "float" not in dtype
        )
        steps = [s for count, s in zip(memory.shape, memory.strides, strict=True) if count > 1]
        if not memory.shape or min(memory.shape) < 1 or min(steps, default=1) < 1:
            raise LayoutError(
                f"layer {number}: the tensor is empty, reversed or spread: {list(memory.shape)}"
            )
        return memory

    def __repr__(self) -> str:
        runs = sorted({int(run) for run in self.geometry.pieces["run"]})
        return f"<CudaKV {self.shard} {self.blocks} blocks in runs of {', '.join(map(str, runs))} bytes>"

    # ---- what a transfer is made of

    def bind(self, block_ids: Any, buffer: Buffer, first_block: int = 0) -> Bound:  # type: ignore[override]
        """A chunk's blocks and its payload."""
        return Bound(self, self._ids(block_ids, first_block), self._payload(buffer, self.nbytes), first_block)

    def bind_all(  # type: ignore[override]
        self, chunks: Sequence[tuple[BlockIds, int, int]], view: Callable[[int, int], Buffer]
    ) -> list[Bound]:
        """Each for itself: a launch takes chunks wherever they lie."""
        return [self.bind(ids, view(offset, self.nbytes), first) for ids, offset, first in chunks]

    def bring_near(self, chunks: Sequence[Bound], near: Near) -> None:
        """Let those that have a place go by way of it. Whose places those are is the caller's care."""
        if len(near) != len(chunks):
            raise MisuseError(f"{len(chunks)} chunks, and {len(near)} places for them")
        for chunk, place in zip(chunks, near, strict=True):
            if place is not None:
                offset, chunk.is_there = place
                if not 0 <= offset <= self._held_bytes - self.nbytes:
                    raise MisuseError(
                        f"a place at {offset}, beyond the {self._held_bytes} bytes that are held"
                    )
                chunk.near = self._held + offset

    def enqueue_copies(self, lane: Lane, layer: int | None, chunks: Sequence[Bound]) -> None:
        """One layer, or (None) all, of these chunks: out of their blocks or into them, as the lane goes."""
        # First what no kernel has to wait for the bus for.
        self._enqueue_near(lane, layer, [chunk for chunk in chunks if chunk.is_there])
        self._enqueue_near(lane, layer, [chunk for chunk in chunks if chunk.near and not chunk.is_there])
        self._enqueue_far(lane, layer, [chunk for chunk in chunks if not chunk.near])

    def _enqueue_far(self, lane: Lane, layer: int | None, chunks: Sequence[Bound]) -> None:
        if not chunks:
            return
        ids = self._tables_of(chunks)
        runs = self.geometry.runs(layer, [chunk.address for chunk in chunks], ids)
        if runs is not None and len(runs) and runs[:, 2].mean() >= self._shortest_run:
            lane.copies.copy(runs[:, [1, 0, 2]] if lane.stores else runs)
            return
        whole = layer is None and _aligned(self.nbytes) <= self._slot_bytes
        for step in [layer] if whole or layer is not None else self.layers:
            self._enqueue_staged(lane, step, chunks, ids)

    def _enqueue_staged(
        self, lane: Lane, layer: int | None, chunks: Sequence[Bound], ids: Sequence[Ids]
    ) -> None:
        at, nbytes = self.geometry.place(layer)
        room, staging = _aligned(nbytes), self._staging[lane.stores]
        for group in _groups(len(chunks), staging.slot_bytes // room):
            slot = staging.take(lane.kernels if lane.stores else lane.copies)
            # A kernel finds a layer where it lies in a payload: as if that began before the slot.
            starts = [slot + i * room - at for i in range(len(chunks[group]))]
            self._enqueue_through(lane, layer, chunks[group], starts, [table[group] for table in ids])
            staging.turn(lane.copies if lane.stores else lane.kernels)

    def _enqueue_near(self, lane: Lane, layer: int | None, chunks: Sequence[Bound]) -> None:
        if not chunks:
            return
        ids, (_, nbytes) = self._tables_of(chunks), self.geometry.place(layer)
        # In groups as above, so that here too the kernel and the bus work side by side.
        for group in _groups(len(chunks), max(1, self._slot_bytes // nbytes)):
            starts = [chunk.near for chunk in chunks[group]]
            self._enqueue_through(lane, layer, chunks[group], starts, [table[group] for table in ids])

    def _enqueue_through(
        self,
        lane: Lane,
        layer: int | None,
        chunks: Sequence[Bound],
        starts: Sequence[int],
        ids: Sequence[Ids],
    ) -> None:
        """By way of device memory, where payloads begin at `starts`. To load what is there needs no bus."""
        at, nbytes = self.geometry.place(layer)
        kernel = "gather" if lane.stores else "scatter"
        launches = self.geometry.copies(kernel, layer, self._piece_table, starts, ids, self.device.spread)
        ours = [
            (chunk.address + at, start + at)
            for chunk, start in zip(chunks, starts, strict=True)
            if lane.stores or not chunk.is_there
        ]
        if not lane.stores and ours:
            lane.copies.copy([(start, payload, nbytes) for payload, start in ours])
            lane.kernels.wait(lane.copies.record())
        for launch in launches:
            lane.kernels.launch(launch)
        if lane.stores:
            lane.copies.wait(lane.kernels.record())
            lane.copies.copy([(payload, start, nbytes) for payload, start in ours])

    def enqueue_marks(self, lane: Lane, layer: int, chunks: Sequence[BlockIds], marks: Marks) -> None:
        """The values are there when what was enqueued is done."""
        if not chunks:
            return
        ids = np.array([each.tables[self._table(layer)] for each in chunks], np.int32)
        each = self._workspace_bytes // self.geometry.sums_bytes(layer)
        out = marks.values[layer - self.shard.first_layer].ctypes.data
        for first in range(0, len(ids), each):
            for launch in self.geometry.marks(
                layer,
                self._raw_table,
                ids[first : first + each],
                self._workspace[lane.stores],
                out + 8 * first,
                self.device.spread,
            ):
                lane.kernels.launch(launch)

    def take_marks(self, chunks: int) -> Marks:
        """Give it back when the values have been read."""
        nbytes = 1 << (len(self.layers) * chunks * 8).bit_length()
        spare = self._spare_marks.setdefault(nbytes, [])
        return Marks(len(self.layers), chunks, spare.pop() if spare else self.device.host_memory(nbytes))

    def give_back(self, marks: Marks) -> None:
        self._spare_marks[len(marks.memory)].append(marks.memory)

    def _table(self, layer: int) -> int:
        return self.geometry.table[layer - self.shard.first_layer]

    def _tables_of(self, chunks: Sequence[Bound]) -> list[Ids]:
        tables = np.full((self.tables, len(chunks), self.layout.blocks), -1, np.int32)
        for number, chunk in enumerate(chunks):
            for table in range(self.tables):
                ids, first = chunk.ids.after(table, chunk.first_block)
                tables[table, number, first : first + len(ids)] = ids
        return list(tables)

    # ---- what a CPU's has too; these wait

    def wait_for(self, enqueue: Enqueue, lane: Lane | None = None) -> None:
        """Do this after all that the engine has enqueued, and before anything else."""
        lane = lane or self.device.store
        lane.wait(self.device.compute.record())
        enqueue(lane)
        lane.record().wait()

    def raw_fingerprint(self, block_ids: Any, layer: int | None = None) -> bytes:
        low, high = self._range(layer)
        tables = self._listed(block_ids)
        ids = BlockIds([np.array(table, np.intp) for table in tables], [0] * len(tables))
        marks = self.take_marks(1)

        def enqueue(lane: Lane) -> None:
            for number in range(low, high):
                self.enqueue_marks(lane, number, [ids], marks)

        self.wait_for(enqueue)
        prints = marks.prints(0)[low - self.shard.first_layer : high - self.shard.first_layer]
        self.give_back(marks)
        return self.fold(prints)

    def raw_blocks(self, block_ids: Any) -> bytes:
        runs = list(self._raw_runs(block_ids))
        out = np.empty(sum(nbytes for _, nbytes in runs), np.uint8)
        self.wait_for(lambda lane: lane.copies.copy(list(_packed(out, runs))))
        return out.tobytes()

    def write_raw(self, block_ids: Any, data: bytes) -> None:
        runs = list(self._raw_runs(block_ids))
        if (held := sum(nbytes for _, nbytes in runs)) != len(data):
            raise LayoutError(f"these blocks hold {held} bytes, got {len(data)}")
        source = np.frombuffer(data, np.uint8)
        self.wait_for(lambda lane: lane.copies.copy([(to, at, n) for at, to, n in _packed(source, runs)]))

    def _raw_runs(self, block_ids: Any) -> Iterator[tuple[int, int]]:
        tables = self._listed(block_ids)
        for layer in self.layers:
            yield from self.geometry.raw_runs(layer, tables[self._table(layer)])

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
        """What a CPU's does, by way of a payload of our own layout. Rare, and slow."""
        if part is None and stored == self.layout and held == self.shard:
            return self.scatter(layer, src, block_ids, first_block)
        payload = np.empty(self.nbytes, np.uint8)
        ids = self._ids(block_ids, first_block)
        if first_block or not ids.is_whole:
            raise LayoutError("a chunk of another layout is loaded as a whole, or not at all")
        self.gather(layer, ids, payload.data)
        self.over(payload).convert(layer, src, stored, held, np.arange(self.layout.blocks), part=part)
        return self.scatter(layer, payload.data, ids)

    def over(self, payload: Array) -> PagedKV:
        """A payload of ours as if it were an engine's blocks 0, 1, 2, …: what `convert` writes to."""
        layout, views = self.layout, []
        for layer in self.layers:
            at, nbytes = self.geometry.place(layer)
            heads, (_, k, v) = layout.heads(layer, self.shard), layout.layers[layer]
            raw = payload[at : at + nbytes].view(f"u{layout.itemsize}")
            views.append(raw.reshape(layout.blocks, heads, layout.block_tokens, k + v))
        return PagedKV(layout, self.shard, views)


class Bound:
    """One chunk on its way between its blocks and a payload."""

    __slots__ = ("_kv", "address", "first_block", "ids", "is_there", "near", "payload")

    def __init__(self, kv: CudaKV, ids: BlockIds, payload: Array, first_block: int) -> None:
        self._kv, self.payload = kv, payload
        self.ids, self.first_block = ids, first_block
        self.address = payload.ctypes.data
        self.near, self.is_there = 0, False
        """The address of its place in GPU memory, if it has one, and whether the payload is there already."""

    def check_whole(self) -> None:
        if self.first_block or not self.ids.is_whole:
            raise LayoutError("blocks of this chunk have left a sliding window: it cannot be saved any more")

    def gather(self, layer: int | None) -> None:
        self.check_whole()
        kv = self._kv
        kv.wait_for(lambda lane: kv.enqueue_copies(lane, layer, [self]))

    def scatter(self, layer: int | None) -> None:
        kv = self._kv
        kv.wait_for(lambda lane: kv.enqueue_copies(lane, layer, [self]), kv.device.load)


def _groups(count: int, each: int) -> Iterator[slice]:
    return (slice(first, first + each) for first in range(0, count, each))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _packed(memory: Array, runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(into `memory`, from there, bytes) one after another."""
    at = memory.ctypes.data
    for address, nbytes in runs:
        yield at, address, nbytes
        at += nbytes
