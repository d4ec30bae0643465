"""Engine blocks on a GPU ◄► extents: the counterpart of `PagedKV`, with the same layouts and marks.

There are two ways, by the bytes of a block that are contiguous in both memories:

    runs      long runs of bytes are copied directly, all of them in one call              no SM is used
    staged    a kernel puts blocks into the order of payloads in device memory, and one    few SMs
              copy moves them over PCIe, while the kernel does the next

Rejected: a kernel that reads or writes the slab itself. It needs no staging and reaches .93 of the bus. But
the engine's own kernels lose 10 to 70 % of that time on an H100, and both directions at once reach .65 of
what copies reach (docs/LOG.md).

A chunk that has a place in GPU memory (`lmtier.copy.gpu_copies`) is staged in that place. A complete copy is
scattered from there without PCIe.

Calls named `enqueue_…` return at once. They belong into a part of a transfer of `lmtier.copy.cuda.streams`.
The calls that `PagedKV` has too wait for the device. They are for the canary and for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from lmtier.copy.blocks import Blocks, Buffer, ChunkBlocks, check_dtype, payload_of, tensors_of_layers
from lmtier.copy.cuda.chunks import Chunks, Fingerprints, Staging, rows_of
from lmtier.copy.cuda.kernels import Geometry, TensorMemory
from lmtier.copy.cuda.streams import Device, Enqueue, StreamPair
from lmtier.copy.paging import PagedKV, Planes
from lmtier.copy.witness import raw_order
from lmtier.core.slab import Extents
from lmtier.errors import LayoutError, MisuseError
from lmtier.format.layout import Array, Layout, Shard

STAGING_BYTES = 64 << 20
"""The staging memory in each direction."""

SHORTEST_RUN = 512 << 10
"""Runs of at least this many bytes are copied directly. On an H100, pieces of 256 KiB reach .86 to .92 of the
bus, pieces of 640 KiB .97, and staging .95 with any size."""

GROUPS, GROUP_BYTES = 4, 8 << 20
"""If an engine saves and loads layer by layer, layers are enqueued in at most so many groups, of at least so
many bytes. Each group costs this thread up to .1 ms."""

SlotOfEachChunk: TypeAlias = "Sequence[tuple[int, bool] | None]"
"""For each chunk its offset in the memory of `allocate_slots`, and whether that is filled; or None."""

_SLOTS = 2  # one under the kernel, one on the bus
_WORKSPACE_BYTES = 8 << 20
_MARKS_BYTES = 4 << 20
_ALIGNED = 256


class CudaKV(Blocks):
    """The KV memory of one rank on a GPU, as the engine declares it."""

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        tensors: Sequence[Planes],
        device: Device,
        *,
        tables: Sequence[int] = (),
        table_count: int = 0,
        staging_bytes: int = STAGING_BYTES,
        shortest_run: int = SHORTEST_RUN,
    ) -> None:
        self.device, layer_tensors = device, tensors_of_layers(shard, tensors)
        self._tensors = [each for _, each in layer_tensors]
        memory = [[_memory(layout, number, each) for each in tensors] for number, tensors in layer_tensors]
        blocks = memory[0][0].shape[0]
        for (number, _), each in zip(layer_tensors, memory, strict=True):
            if any(m.shape[0] != blocks for m in each):
                raise LayoutError(f"layer {number}: expected {blocks} blocks, got {each[0].shape[0]}")
        self.geometry = Geometry(layout, shard, memory, tables)
        super().__init__(layout, shard, blocks, max(table_count, max(self.geometry.table) + 1))
        if not self.geometry.has_fingerprints:
            raise LayoutError(
                "a chunk of one layer takes so few bytes that kernels cannot take its fingerprint"
            )
        self.raw_tag = self.tag_of([[raw_order(m.item, m.shape, m.strides) for m in each] for each in memory])
        self._shortest_run = shortest_run
        self._taken: list[int] = []
        """The addresses of the device memory that this object owns."""
        try:
            self._take(staging_bytes)
        except BaseException:
            self.close()
            raise
        self._slots_address, self._slots_bytes = 0, 0

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
        # Memory for sums. One for each direction, whose kernels run one after another.
        self._workspace = {
            stores: self._own(device.memory(self._workspace_bytes)) for stores in (True, False)
        }
        self._fingerprints_memory, self._fingerprints_room = (
            device.host_memory(_MARKS_BYTES),
            Extents(_MARKS_BYTES),
        )
        self._own(self._fingerprints_memory.ctypes.data)

    def allocate_slots(self, nbytes: int, address: int = 0) -> None:
        """Allocate this much GPU memory for the payloads of chunks with places, or use what the caller owns
        at `address`. Call it once, at start."""
        if self._slots_bytes:
            raise MisuseError("this rank holds memory for copies already")
        self._slots_address, self._slots_bytes = address or self._own(self.device.memory(nbytes)), nbytes

    def close(self) -> None:
        """Free the GPU memory of this object. All transfers must have ended."""
        self.device.release(self._taken)
        self._taken = []

    def _own(self, address: int) -> int:
        self._taken.append(address)
        return address

    def __repr__(self) -> str:
        runs = sorted({int(run) for run in self.geometry.pieces["run"]})
        return f"<CudaKV {self.shard} {self.blocks} blocks in runs of {', '.join(map(str, runs))} bytes>"

    # ---- the parts of a transfer

    def bind(self, block_ids: Any, buffer: Buffer, first_block: int = 0) -> Chunks:
        """One chunk's blocks and its payload."""
        return self._bound(self.chunk(block_ids, first_block), [0], payload_of(buffer, self.nbytes))

    def bind_all(
        self, ids: ChunkBlocks, offsets: Sequence[int], view: Callable[[int, int], Buffer]
    ) -> Chunks:
        """Many chunks, whose payloads are at these offsets, as one object."""
        if not offsets:
            return self._bound(ids, [], np.empty(0, np.uint8))
        low, size = min(offsets), max(offsets) - min(offsets) + self.nbytes
        return self._bound(ids, offsets, payload_of(view(low, size), size), low)

    def _bound(self, ids: ChunkBlocks, offsets: Sequence[int], memory: Array, low: int = 0) -> Chunks:
        addresses = np.array(offsets, np.int64) + (memory.ctypes.data - low)
        slots = np.zeros(len(offsets), np.int64), np.zeros(len(offsets), np.bool_)
        return Chunks(addresses, ids, *slots, (memory,), self._copy_now)

    def set_gpu_slots(self, chunks: Chunks, gpu_slots: SlotOfEachChunk) -> None:
        """Use the places of the chunks that have one. The caller guarantees that the places are theirs."""
        if len(gpu_slots) != len(chunks):
            raise MisuseError(f"{len(chunks)} chunks need as many places (or None), got {len(gpu_slots)}")
        for number, place in enumerate(gpu_slots):
            if place is not None:
                offset, is_filled = place
                if not 0 <= offset <= self._slots_bytes - self.nbytes:
                    raise MisuseError(
                        f"a place at {offset} is beyond the {self._slots_bytes} bytes of memory for copies"
                    )
                chunks.slot_addresses[number], chunks.is_filled[number] = (
                    self._slots_address + offset,
                    is_filled,
                )

    def layer_groups(self, chunks: int) -> list[range]:
        """The layers in groups, each large enough for a call, if so many chunks are moved layer by layer."""
        layers, number = self.layers, min(GROUPS, chunks * self.nbytes // GROUP_BYTES, len(self.layers))
        if self._are_runs(layers):  # a part of a run must not be too short for a direct copy
            number = min(number, self.geometry.run_bytes(layers) // max(1, self._shortest_run))
        number = max(1, number)
        ends = [layers.start + len(layers) * each // number for each in range(number + 1)]
        return [range(*each) for each in pairwise(ends)]

    def _are_runs(self, layers: range) -> bool:
        """Whether these layers of a block are copied directly."""
        return self.geometry.run_bytes(layers) >= max(1, self._shortest_run)

    def enqueue_copies(self, lane: StreamPair, layers: range, chunks: Chunks) -> None:
        """Enqueue the copies of these layers of these chunks, in the direction of the lane."""
        if not chunks.slot_addresses.any():
            self._enqueue_far(lane, layers, chunks)
            return
        # First the chunks whose kernels need not wait for PCIe.
        for selected, enqueue in (
            (chunks.is_filled, self._enqueue_gpu_slots),
            ((chunks.slot_addresses != 0) & ~chunks.is_filled, self._enqueue_gpu_slots),
            (chunks.slot_addresses == 0, self._enqueue_far),
        ):
            if selected.any():
                enqueue(lane, layers, chunks.part(selected))

    def _enqueue_far(self, lane: StreamPair, layers: range, chunks: Chunks) -> None:
        if not chunks:
            return
        if self._are_runs(layers):
            runs = self.geometry.runs(layers, chunks.addresses, chunks.ids, stores=lane.is_store)
            if len(runs):
                lane.copies.copy(runs)
            return
        fits_slot = _aligned(self.geometry.place(layers)[1]) <= self._slot_bytes
        for step in [layers] if fits_slot else [range(layer, layer + 1) for layer in layers]:
            self._enqueue_staged(lane, step, chunks)

    def _enqueue_staged(self, lane: StreamPair, layers: range, chunks: Chunks) -> None:
        at, nbytes = self.geometry.place(layers)
        room, staging = _aligned(nbytes), self._staging[lane.is_store]
        chunks_per_group = staging.slot_bytes // room
        for first in range(0, len(chunks), chunks_per_group):
            group = chunks.part(slice(first, first + chunks_per_group))
            slot = staging.take(lane.kernels if lane.is_store else lane.copies)
            # A kernel looks for a layer at its place in a payload. So pass a payload that begins before the
            # slot.
            self._enqueue_through(lane, layers, group, slot - at + room * np.arange(len(group)))
            staging.turn(lane.copies if lane.is_store else lane.kernels)

    def _enqueue_gpu_slots(self, lane: StreamPair, layers: range, chunks: Chunks) -> None:
        # In groups as above, so that here too the kernel and PCIe work in parallel.
        chunks_per_group = max(1, self._slot_bytes // self.geometry.place(layers)[1])
        for first in range(0, len(chunks), chunks_per_group):
            group = chunks.part(slice(first, first + chunks_per_group))
            self._enqueue_through(lane, layers, group, group.slot_addresses)

    def _enqueue_through(self, lane: StreamPair, layers: range, chunks: Chunks, starts: Array) -> None:
        """Copy through device memory, where payloads begin at `starts`.

        Loads of complete copies need no PCIe.
        """
        at, nbytes = self.geometry.place(layers)
        kernel = "gather" if lane.is_store else "scatter"
        launches = self.geometry.copy_launches(
            kernel, layers, self._piece_table, starts, chunks.ids, self.device.spread
        )
        if not lane.is_store and not chunks.is_filled.all():
            for rows in rows_of(starts + at, chunks.addresses + at, nbytes):
                lane.copies.copy_rows(rows)
            lane.kernels.wait(lane.copies.record())
        for launch in launches:
            lane.kernels.launch(launch)
        if lane.is_store:
            lane.copies.wait(lane.kernels.record())
            for rows in rows_of(chunks.addresses + at, starts + at, nbytes):
                lane.copies.copy_rows(rows)

    def enqueue_fingerprints(
        self, lane: StreamPair, layers: range, ids: ChunkBlocks, marks: Fingerprints
    ) -> None:
        """Enqueue the marks. The values are ready when the enqueued work is done."""
        if not ids.size:
            return
        out = marks.values[layers.start - self.shard.first_layer :].ctypes.data
        workspace = self._workspace[lane.is_store], self._workspace_bytes
        for launch in self.geometry.fingerprint_launches(
            layers, self._raw_table, ids, workspace, out, self.device.spread
        ):
            lane.kernels.launch(launch)

    def take_fingerprints(self, chunks: int) -> Fingerprints:
        """Room for the marks of so many chunks, or of fewer if there is less room.

        Give it back when the values have been read. Rejected: allocating more memory then, which would block
        this thread until the device is done.
        """
        layers = len(self.layers)
        while chunks and (offsets := self._fingerprints_room.allocate([8 * layers * chunks])) is None:
            chunks //= 2
        if not chunks:
            return Fingerprints(np.empty((layers, 0), np.uint64), ())
        assert offsets is not None
        values = self._fingerprints_memory[offsets[0] : offsets[0] + 8 * layers * chunks].view(np.uint64)
        return Fingerprints(values.reshape(layers, chunks), offsets)

    def free_fingerprints(self, marks: Fingerprints) -> None:
        self._fingerprints_room.free(marks.offsets)

    def _table(self, layer: int) -> int:
        return self.geometry.table[layer - self.shard.first_layer]

    def _these(self, layer: int | None) -> range:
        """One layer, or (None) all."""
        return self.layers if layer is None else range(layer, layer + 1)

    # ---- the calls that `PagedKV` has too; they wait for the device

    def wait_for(self, enqueue: Enqueue, lane: StreamPair | None = None) -> None:
        """Run `enqueue` after the work that the engine has enqueued, and wait for it."""
        lane = lane or self.device.store
        lane.wait(self.device.compute.record())
        enqueue(lane)
        lane.record().wait()

    def _copy_now(self, chunks: Chunks, layer: int | None, stores: bool) -> None:
        lane = self.device.store if stores else self.device.load
        self.wait_for(lambda lane: self.enqueue_copies(lane, self._these(layer), chunks), lane)

    def raw_fingerprint(self, block_ids: Any, layer: int | None = None) -> bytes:
        ids, layers = np.array(self._listed(block_ids), np.intp)[:, None], self._these(layer)
        marks = self.take_fingerprints(1)
        self.wait_for(lambda lane: self.enqueue_fingerprints(lane, layers, ids, marks))
        prints = marks.prints(0)[layers.start - self.shard.first_layer :][: len(layers)]
        self.free_fingerprints(marks)
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

    def as_paged_kv(self, payload: Array) -> PagedKV:
        """A payload of ours, seen as an engine's blocks 0, 1, 2, …: the target of `PagedKV.convert`."""
        layout, views = self.layout, []
        for layer in self.layers:
            at, nbytes = self.geometry.place(self._these(layer))
            raw: Any = payload[at : at + nbytes].reshape(layout.blocks, layout.heads(layer, self.shard), -1)
            if not layout.is_opaque:
                raw = raw.view(f"u{layout.itemsize}").reshape(*raw.shape[:2], layout.block_tokens, -1)
            views.append(raw)
        return PagedKV(layout, self.shard, views)


def _memory(layout: Layout, number: int, tensor: Any) -> TensorMemory:
    memory = TensorMemory.of(tensor)
    dtype = str(tensor.dtype)
    check_dtype(layout, number, dtype, memory.item, is_integer="int" in dtype and "float" not in dtype)
    steps = [s for count, s in zip(memory.shape, memory.strides, strict=True) if count > 1]
    if not memory.shape or min(memory.shape) < 1 or min(steps, default=1) < 1:
        raise LayoutError(f"layer {number}: the tensor is empty, reversed or spread: {list(memory.shape)}")
    return memory


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _packed(memory: Array, runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(into `memory`, from there, bytes) one after another."""
    at = memory.ctypes.data
    for address, nbytes in runs:
        yield at, address, nbytes
        at += nbytes
