"""Engine blocks on a GPU ◄► extents: what `PagedKV` is on a CPU, over the same layouts, with the same marks.

Two ways, by how much of a block lies together in both memories:

    runs      long runs of bytes are copied as they are, all of them in one call          no SM is used
    staged    a kernel puts blocks into the order of payloads in device memory, and one    few SMs
              copy takes that over the bus, while the kernel does the next

Rejected: a kernel that reads or writes the slab itself. It needs no staging and reaches .93 of the bus, but
whatever the engine computes meanwhile loses 10 to 70 % of that time on an H100, and both directions at once
reach .65 of what copies do (docs/LOG.md).

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
from lmtier.cuda.streams import Device, Enqueue, Event, Lane, Rows, Stream
from lmtier.errors import LayoutError, MisuseError
from lmtier.layout import Array, Layout, Shard
from lmtier.paging import BlockIds, Buffer, PagedKV, Planes, check_dtype, raw_order
from lmtier.slab import Extents

STAGING_BYTES = 64 << 20
"""In each direction."""

SHORTEST_RUN = 512 << 10
"""From this many bytes on, runs are copied as they are: on an H100 pieces of 256 KiB reach .86 to .92 of the
bus, of 640 KiB .97, and staging .95 with any."""

GROUP_BYTES = 8 << 20
"""Layers are enqueued together until they are this much, where an engine saves and loads layer by layer."""

Near: TypeAlias = "Sequence[tuple[int, bool] | None]"
"""Of each chunk: its offset in the memory of `hold`, and whether its payload is there already; or None."""

_SLOTS = 2  # one under the kernel, one on the bus
_FARTHEST = 1 << 30  # rows of one copy: drivers take less than 2 GiB
_WORKSPACE_BYTES = 8 << 20
_MARKS_BYTES = 4 << 20
_ALIGNED = 256


class Marks:
    """The marks of a few chunks, [layers, chunks], which the device writes and the host reads."""

    def __init__(self, values: Array, offsets: tuple[int, ...]) -> None:
        self.values, self.offsets = values, offsets
        self.chunks = values.shape[1]

    def prints(self, chunk: int) -> list[bytes]:
        """Of each layer, as `PagedKV.raw_fingerprint` says it."""
        return [int(value).to_bytes(8, "big") for value in self.values[:, chunk]]


class Staging:
    """Device memory in slots that take turns. A slot's next use waits for the end of its last."""

    def __init__(self, slots: Sequence[int], slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._slots: list[tuple[int, Event | None]] = [(address, None) for address in slots]

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
        self._shortest_run = shortest_run
        self._taken: list[int] = []
        """Addresses of what the device keeps for this."""
        try:
            self._take(staging_bytes)
        except BaseException:
            self.close()
            raise
        self._held, self._held_bytes = 0, 0

    def _take(self, staging_bytes: int) -> None:
        device = self.device
        largest = max(self.geometry.place(self._these(layer))[1] for layer in self.layers)
        self._piece_table = self._own(device.upload(self.geometry.pieces))
        self._raw_table = self._own(device.upload(self.geometry.raws))
        self._slot_bytes = max(staging_bytes // _SLOTS, _aligned(largest))
        self._staging = {
            stores: Staging(
                [self._own(device.memory(self._slot_bytes)) for _ in range(_SLOTS)], self._slot_bytes
            )
            for stores in (True, False)
        }
        self._workspace_bytes = max(_WORKSPACE_BYTES, *map(self.geometry.sums_bytes, self.layers))
        # Of sums. One for each direction, whose kernels run one after another.
        self._workspace = {
            stores: self._own(device.memory(self._workspace_bytes)) for stores in (True, False)
        }
        self._marks_memory, self._marks_room = device.host_memory(_MARKS_BYTES), Extents(_MARKS_BYTES)
        self._own(self._marks_memory.ctypes.data)

    def hold(self, nbytes: int) -> None:
        """Take this much GPU memory for the payloads of chunks that are given places. Once, at start."""
        if self._held_bytes:
            raise MisuseError("this rank holds memory for copies already")
        self._held, self._held_bytes = self._own(self.device.memory(nbytes)), nbytes

    def close(self) -> None:
        """Let go of what was taken of the GPU for this. Nothing may be under way any more."""
        self.device.release(self._taken)
        self._taken = []

    def _own(self, address: int) -> int:
        self._taken.append(address)
        return address

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

    def bind(self, block_ids: Any, buffer: Buffer, first_block: int = 0) -> Chunks:  # type: ignore[override]
        """One chunk's blocks and its payload."""
        ids, payload = self._ids(block_ids, first_block), self._payload(buffer, self.nbytes)
        return self._bound([(ids, 0, first_block)], payload)

    def bind_all(  # type: ignore[override]
        self, chunks: Sequence[tuple[BlockIds, int, int]], view: Callable[[int, int], Buffer]
    ) -> Chunks:
        """Chunks (ids, offset, first block) of what `view` shows, as one: tables of them are made once."""
        if not chunks:
            return self._bound([], np.empty(0, np.uint8))
        offsets = [offset for _, offset, _ in chunks]
        low, size = min(offsets), max(offsets) - min(offsets) + self.nbytes
        return self._bound(chunks, self._payload(view(low, size), size), low)

    def _bound(self, chunks: Sequence[tuple[BlockIds, int, int]], memory: Array, low: int = 0) -> Chunks:
        first = memory.ctypes.data - low
        addresses = np.array([offset for _, offset, _ in chunks], np.int64) + first
        number, blocks = len(chunks), self.layout.blocks
        is_whole = all(ids.is_whole and not skipped for ids, _, skipped in chunks)
        tables = []
        for table in range(self.tables):
            if is_whole and chunks:
                rows = np.concatenate([ids.tables[table] for ids, _, _ in chunks]).astype(np.int32)
                tables.append(rows.reshape(number, blocks))
                continue
            tables.append(np.full((number, blocks), -1, np.int32))
            for row, (each, _, skipped) in zip(tables[-1], chunks, strict=True):
                ids, begin = each.after(table, skipped)
                row[begin : begin + len(ids)] = ids
        return Chunks(addresses, tables, is_whole=is_whole, memory=(memory,), kv=self)

    def bring_near(self, chunks: Chunks, near: Near) -> None:
        """Let those that have a place go by way of it. Whose places those are is the caller's care."""
        if len(near) != len(chunks):
            raise MisuseError(f"{len(chunks)} chunks, and {len(near)} places for them")
        for number, place in enumerate(near):
            if place is not None:
                offset, is_there = place
                if not 0 <= offset <= self._held_bytes - self.nbytes:
                    raise MisuseError(
                        f"a place at {offset}, beyond the {self._held_bytes} bytes that are held"
                    )
                chunks.near[number], chunks.is_there[number] = self._held + offset, is_there

    def layer_groups(self, chunks: int) -> list[range]:
        """The layers in groups that are worth a call each, where so many chunks are moved layer by layer."""
        groups, first = [], self.layers.start
        for end in range(first + 1, self.layers.stop + 1):
            if chunks * self.geometry.place(range(first, end))[1] >= GROUP_BYTES or end == self.layers.stop:
                groups.append(range(first, end))
                first = end
        return groups

    def enqueue_copies(self, lane: Lane, layers: range, chunks: Chunks) -> None:
        """These layers of these chunks: out of their blocks or into them, as the lane goes."""
        if not chunks.near.any():
            self._enqueue_far(lane, layers, chunks)
            return
        # First what no kernel has to wait for the bus for.
        for which, enqueue in (
            (chunks.is_there, self._enqueue_near),
            ((chunks.near != 0) & ~chunks.is_there, self._enqueue_near),
            (chunks.near == 0, self._enqueue_far),
        ):
            if which.any():
                enqueue(lane, layers, chunks.part(which))

    def _enqueue_far(self, lane: Lane, layers: range, chunks: Chunks) -> None:
        if not chunks:
            return
        if self.geometry.run_bytes(layers) >= max(1, self._shortest_run):
            runs = self.geometry.runs(layers, chunks.addresses, chunks.ids)
            if len(runs):
                lane.copies.copy(runs[:, [1, 0, 2]] if lane.stores else runs)
            return
        whole = _aligned(self.geometry.place(layers)[1]) <= self._slot_bytes
        for step in [layers] if whole else [range(layer, layer + 1) for layer in layers]:
            self._enqueue_staged(lane, step, chunks)

    def _enqueue_staged(self, lane: Lane, layers: range, chunks: Chunks) -> None:
        at, nbytes = self.geometry.place(layers)
        room, staging = _aligned(nbytes), self._staging[lane.stores]
        each = staging.slot_bytes // room
        for first in range(0, len(chunks), each):
            group = chunks.part(slice(first, first + each))
            slot = staging.take(lane.kernels if lane.stores else lane.copies)
            # A kernel finds a layer where it lies in a payload: as if that began before the slot.
            self._enqueue_through(lane, layers, group, slot - at + room * np.arange(len(group)))
            staging.turn(lane.copies if lane.stores else lane.kernels)

    def _enqueue_near(self, lane: Lane, layers: range, chunks: Chunks) -> None:
        # In groups as above, so that here too the kernel and the bus work side by side.
        each = max(1, self._slot_bytes // self.geometry.place(layers)[1])
        for first in range(0, len(chunks), each):
            group = chunks.part(slice(first, first + each))
            self._enqueue_through(lane, layers, group, group.near)

    def _enqueue_through(self, lane: Lane, layers: range, chunks: Chunks, starts: Array) -> None:
        """By way of device memory, where payloads begin at `starts`. To load what is there needs no bus."""
        at, nbytes = self.geometry.place(layers)
        kernel = "gather" if lane.stores else "scatter"
        launches = self.geometry.copies(
            kernel, layers, self._piece_table, starts, chunks.ids, self.device.spread
        )
        if not lane.stores and not chunks.is_there.all():
            for rows in _rows(starts + at, chunks.addresses + at, nbytes):
                lane.copies.copy_rows(rows)
            lane.kernels.wait(lane.copies.record())
        for launch in launches:
            lane.kernels.launch(launch)
        if lane.stores:
            lane.copies.wait(lane.kernels.record())
            for rows in _rows(chunks.addresses + at, starts + at, nbytes):
                lane.copies.copy_rows(rows)

    def enqueue_marks(self, lane: Lane, layers: range, chunks: Sequence[BlockIds], marks: Marks) -> None:
        """The values are there when what was enqueued is done."""
        if not chunks:
            return
        ids = [np.array([each.tables[table] for each in chunks], np.int32) for table in range(self.tables)]
        out = marks.values[layers.start - self.shard.first_layer :].ctypes.data
        workspace = self._workspace[lane.stores], self._workspace_bytes
        for launch in self.geometry.marks(layers, self._raw_table, ids, workspace, out, self.device.spread):
            lane.kernels.launch(launch)

    def take_marks(self, chunks: int) -> Marks:
        """Room for those of so many chunks, or of fewer: as many as there is room for.

        Give it back when the values have been read. Rejected: to take more memory then, which would hold this
        thread until the device is done.
        """
        layers = len(self.layers)
        while chunks and (offsets := self._marks_room.allocate([8 * layers * chunks])) is None:
            chunks //= 2
        if not chunks:
            return Marks(np.empty((layers, 0), np.uint64), ())
        assert offsets is not None
        values = self._marks_memory[offsets[0] : offsets[0] + 8 * layers * chunks].view(np.uint64)
        return Marks(values.reshape(layers, chunks), offsets)

    def give_back(self, marks: Marks) -> None:
        self._marks_room.free(marks.offsets)

    def _table(self, layer: int) -> int:
        return self.geometry.table[layer - self.shard.first_layer]

    def _these(self, layer: int | None) -> range:
        """A layer, or (None) all."""
        return self.layers if layer is None else range(layer, layer + 1)

    # ---- what a CPU's has too; these wait

    def wait_for(self, enqueue: Enqueue, lane: Lane | None = None) -> None:
        """Do this after all that the engine has enqueued, and before anything else."""
        lane = lane or self.device.store
        lane.wait(self.device.compute.record())
        enqueue(lane)
        lane.record().wait()

    def gather(self, layer: int | None, block_ids: Any, out: Buffer) -> None:
        self.bind(block_ids, out).gather(layer)

    def scatter(self, layer: int | None, src: Buffer, block_ids: Any, first_block: int = 0) -> None:
        self.bind(block_ids, src, first_block).scatter(layer)

    def raw_fingerprint(self, block_ids: Any, layer: int | None = None) -> bytes:
        tables, layers = self._listed(block_ids), self._these(layer)
        ids = BlockIds([np.array(table, np.intp) for table in tables], [0] * len(tables))
        marks = self.take_marks(1)
        self.wait_for(lambda lane: self.enqueue_marks(lane, layers, [ids], marks))
        prints = marks.prints(0)[layers.start - self.shard.first_layer :][: len(layers)]
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
            at, nbytes = self.geometry.place(self._these(layer))
            heads, (_, k, v) = layout.heads(layer, self.shard), layout.layers[layer]
            raw = payload[at : at + nbytes].view(f"u{layout.itemsize}")
            views.append(raw.reshape(layout.blocks, heads, layout.block_tokens, k + v))
        return PagedKV(layout, self.shard, views)


class Chunks:
    """Chunks on their way between blocks and payloads, as arrays that have a row for each."""

    __slots__ = ("_kv", "addresses", "ids", "is_there", "is_whole", "memory", "near")

    def __init__(
        self,
        addresses: Array,
        ids: Sequence[Ids],
        *,
        is_whole: bool,
        memory: tuple[Array, ...],
        kv: CudaKV,
        near: Array | None = None,
        is_there: Array | None = None,
    ) -> None:
        self.addresses = addresses
        """Of their payloads."""
        self.ids = ids
        """Of each block table: engine blocks [chunks, blocks], -1 where there is none."""
        self.is_whole = is_whole
        """Whether all blocks of all chunks are there."""
        self.memory = memory
        """Kept for as long as this is."""
        self.near = np.zeros(len(addresses), np.int64) if near is None else near
        """The addresses of their places in GPU memory; 0, of those that have none."""
        self.is_there = np.zeros(len(addresses), np.bool_) if is_there is None else is_there
        """Whether the payload is in that place already."""
        self._kv = kv

    def __len__(self) -> int:
        return len(self.addresses)

    def __add__(self, others: Chunks) -> Chunks:
        return self._of(
            np.concatenate([self.addresses, others.addresses]),
            [np.concatenate(each) for each in zip(self.ids, others.ids, strict=True)],
            np.concatenate([self.near, others.near]),
            np.concatenate([self.is_there, others.is_there]),
            is_whole=self.is_whole and others.is_whole,
            memory=self.memory + others.memory,
        )

    def part(self, which: slice | Array) -> Chunks:
        return self._of(
            self.addresses[which],
            [each[which] for each in self.ids],
            self.near[which],
            self.is_there[which],
            is_whole=self.is_whole,
            memory=self.memory,
        )

    def _of(
        self,
        addresses: Array,
        ids: Sequence[Ids],
        near: Array,
        is_there: Array,
        *,
        is_whole: bool,
        memory: tuple[Array, ...],
    ) -> Chunks:
        return Chunks(
            addresses, ids, is_whole=is_whole, memory=memory, kv=self._kv, near=near, is_there=is_there
        )

    @property
    def blocks(self) -> frozenset[int]:
        """All that they touch."""
        return frozenset(block for each in self.ids for block in np.unique(each).tolist() if block >= 0)

    def check_whole(self) -> None:
        if not self.is_whole:
            raise LayoutError("blocks of this chunk have left a sliding window: it cannot be saved any more")

    def gather(self, layer: int | None) -> None:
        self.check_whole()
        kv = self._kv
        kv.wait_for(lambda lane: kv.enqueue_copies(lane, kv._these(layer), self))

    def scatter(self, layer: int | None) -> None:
        kv = self._kv
        kv.wait_for(lambda lane: kv.enqueue_copies(lane, kv._these(layer), self), kv.device.load)


def _rows(to: Array, source: Array, width: int) -> Iterator[Rows]:
    """Copies of so many bytes each, in as few as can be: extents of a prompt mostly lie equally far apart."""
    there, here = to.tolist(), source.tolist()
    first = 0
    while first < len(there):
        end, steps = first + 1, (width, width)
        apart = (there[end] - there[first], here[end] - here[first]) if end < len(there) else (0, 0)
        if min(apart) >= width and max(apart) <= _FARTHEST:
            steps = apart
            while end < len(there) and (there[end] - there[end - 1], here[end] - here[end - 1]) == steps:
                end += 1
        yield Rows(there[first], steps[0], here[first], steps[1], width, end - first)
        first = end


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _packed(memory: Array, runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(into `memory`, from there, bytes) one after another."""
    at = memory.ctypes.data
    for address, nbytes in runs:
        yield at, address, nbytes
        at += nbytes
