"""Per-layer save and load on CUDA: saves and loads continue after their calls have returned.

    save.layer(n)   after the engine has enqueued layer n        commit(): visible in a later `poll`
    load            is enqueued when it begins                   layer(n): before the engine enqueues layer n

The mover on a CPU commits, compares fingerprints and ends leases at once. This mover does so in `poll`, when
the device is done. Call `poll` in the owner's step. Only `drain` waits for the device.

`gpu_slots` names the places in GPU memory that a load reads or fills. Its caller calls `GpuCopies.release`
when all ranks are done. Without `gpu_slots`, a mover with `gpu_copies` manages the places itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from lmtier.copy.blocks import ChunkBlocks
from lmtier.copy.cuda.chunks import Chunks, Fingerprints
from lmtier.copy.cuda.paging import CudaKV, SlotOfEachChunk
from lmtier.copy.cuda.streams import StreamPair, TransferOrder
from lmtier.copy.gpu_copies import GpuCopies, GpuSlots
from lmtier.copy.mover import Blocks, Load, Mover, Save, granted
from lmtier.copy.store import Store
from lmtier.core.grant import Grant, Match
from lmtier.errors import MisuseError
from lmtier.format.keys import Identity
from lmtier.format.layout import Array, Shard


class CudaMover(Mover):
    """Moves KV between a GPU's blocks and a store. `layerwise`: load layer by layer, not as a whole."""

    kv: CudaKV

    def __init__(
        self,
        cache: Store,
        kv: CudaKV,
        identity: Identity,
        *,
        ranks: Sequence[Shard] | None = None,
        spare_blocks: Sequence[int] | None = None,
        layerwise: bool = True,
        gpu_copies: GpuCopies | None = None,
    ) -> None:
        self.order = TransferOrder(kv.device)
        self.layerwise = layerwise
        self.gpu_copies = gpu_copies
        """The gpu:// tier, if this mover manages it; `kv` holds its memory. By default from the settings."""
        spec = cache.config.gpu
        if gpu_copies is None and spec is not None and spec.capacity is not None:
            self.gpu_copies = GpuCopies(spec.capacity, spec.policy)
            kv.allocate_slots(spec.capacity)
        super().__init__(cache, kv, identity, ranks=ranks, spare_blocks=spare_blocks)

    def load(
        self,
        match: Match,
        block_ids: Blocks,
        *,
        computed_tokens: int = 0,
        gpu_slots: SlotOfEachChunk | None = None,
    ) -> CudaLoad:
        """`gpu_slots` has a place, or None, for each chunk of the match that the engine lacks."""
        try:
            load = self.begin(granted(match), block_ids, computed_tokens=computed_tokens, gpu_slots=gpu_slots)
        except BaseException:
            self.cache.release(match)
            raise
        load.match = match
        return load

    def begin(
        self,
        grant: Grant,
        block_ids: Blocks,
        *,
        computed_tokens: int = 0,
        gpu_slots: SlotOfEachChunk | None = None,
    ) -> CudaLoad:
        self._need(grant.form)
        return CudaLoad(self, grant, block_ids, computed_tokens, gpu_slots)

    def fill(self, grant: Grant, ids: ChunkBlocks) -> CudaSave:
        self._need(grant.form)
        return CudaSave(self, grant, ids)

    @property
    def under_way(self) -> int:
        return self.order.under_way

    def order_before_reuse(self, block_ids: Blocks) -> None:
        """The engine has taken these blocks from a request whose saves or loads may be unfinished."""
        self.order.reuse(np.unique(np.asarray(block_ids)).tolist())

    def wait_until_uncopied(self, block_ids: Blocks) -> None:
        self.order.let_go(np.unique(np.asarray(block_ids)).tolist())

    def poll(self) -> int:
        """Commit, compare and release what the device has finished.

        Returns the number of ended saves and loads.
        """
        return self.order.poll()

    def drain(self) -> None:
        """Wait for all saves and loads, and end them. For when the engine stops."""
        self.order.drain()

    def give_back(self, places: GpuSlots | None, *, believed: bool) -> None:
        """Give back the places that a load has in this mover's own tier."""
        if self.gpu_copies is not None and places is not None:
            self.gpu_copies.release(places, is_verified=believed)


class CudaSave(Save):
    """The save of new chunks. After `commit` they become visible in the `poll` that finds the copies done."""

    _bound: Chunks

    def __init__(self, mover: CudaMover, grant: Grant, ids: ChunkBlocks) -> None:
        super().__init__(mover, grant, ids)
        self._kv = mover.kv
        self._bound.check_whole()
        self._groups: list[range] = []
        """Groups of layers that are not enqueued yet. One is enqueued once all of its layers may be."""
        self._group_of: dict[int, range] = {}
        self._store = mover.order.store(self._bound.blocks)
        self._fingerprint_room = self._kv.take_fingerprints(len(self._fingerprints))
        self._marked = list(self._fingerprints)[: self._fingerprint_room.chunks]
        """The chunks with a fingerprint, counted within the grant. There may be no room for all."""
        self._fingerprints = {}

    def layer(self, layer: int) -> None:
        """Save one layer of every new chunk, which the engine has enqueued by now.

        Its whole group goes together.
        """
        if layer not in self._missing:
            return
        self._missing.discard(layer)
        if not self._group_of:
            self._groups = self._kv.layer_groups(len(self._bound))
            self._group_of = {each: group for group in self._groups for each in group}
        group = self._group_of[layer]
        if self._missing.isdisjoint(reversed(group)):  # mostly the last layer of a group comes last
            self._groups.remove(group)
            self._enqueue(group)

    def all(self) -> None:
        if not self._missing:
            return
        self._missing.clear()
        if not self._group_of:
            self._enqueue(self._kv.layers)
        while self._groups:
            self._enqueue(self._groups.pop(0))

    def _enqueue(self, layers: range) -> None:
        if self._bound:
            self._store.part(partial(self._copy, layers))

    def _copy(self, layers: range, lane: StreamPair) -> None:
        self._kv.enqueue_copies(lane, layers, self._bound)
        if not self._groups:  # these layers are the last, so the fingerprints of all can be computed
            self._kv.enqueue_fingerprints(
                lane, self._kv.layers, self._ids[:, self._marked], self._fingerprint_room
            )

    def commit(self) -> None:
        if self._missing and self.grant.chunks:
            raise MisuseError(f"commit of a save that lacks layers {sorted(self._missing)}")
        self._store.end(self._commit)

    def abort(self) -> None:
        """Abort. The cache gets the extents back when nothing writes to them any more."""
        self._store.end(self._abort)

    def _commit(self) -> None:
        for number, row in enumerate(self._marked):
            self._fingerprints[row] = dict(
                zip(self._kv.layers, self._fingerprint_room.prints(number), strict=True)
            )
        self._kv.free_fingerprints(self._fingerprint_room)
        try:
            super().commit()
        except BaseException:
            super().abort()
            raise

    def _abort(self) -> None:
        self._kv.free_fingerprints(self._fingerprint_room)
        super().abort()


class CudaLoad(Load):
    """The load of one match, which is enqueued at once. Call `layer`, or `all`, before the engine uses it.

    As a context manager it compares and releases by itself, in the `poll` that finds it done. Otherwise wait
    until it is `done`, then call `finish`, then release the match.
    """

    _bound: Chunks

    def __init__(
        self,
        mover: CudaMover,
        grant: Grant,
        block_ids: Blocks,
        computed_tokens: int,
        gpu_slots: SlotOfEachChunk | None = None,
    ) -> None:
        super().__init__(mover, grant, block_ids, computed_tokens)
        self._kv, self._cuda = mover.kv, mover
        self.done = False
        """Whether the last `poll` found all copies done."""
        self._has_exited = False
        marked = list(self._comparable)
        self._fingerprints: dict[int, bytes] = {}
        self._places: GpuSlots | None = None
        if gpu_slots is None and mover.gpu_copies is not None:
            self._places = mover.gpu_copies.load(grant.placement, mover.form, self._first)
            gpu_slots = self._places.by_chunk
            self.from_copies = [
                chunk
                for chunk, place in enumerate(gpu_slots, start=self._first)
                if place is not None and place.is_filled
            ]
        try:
            self._bound = self._with_slots(gpu_slots)
            self._load = mover.order.load(self._bound.blocks)
            marks = self._kv.take_fingerprints(len(marked))
            self._marked = marked[: marks.chunks]  # the others are not compared
            try:
                self._begin(marks)
            except BaseException:
                # The leases end with this call, so nothing may read the extents any more.
                self._load.end(lambda: None)
                self._load.wait()
                self._kv.free_fingerprints(marks)
                raise
        except BaseException:
            self._give_back(believed=False)
            raise

    def _begin(self, marks: Fingerprints) -> None:
        kv, marked = self._kv, self._marked
        for layers in kv.layer_groups(len(self._bound)) if self._cuda.layerwise else [kv.layers]:
            self._load.part(partial(self._enqueue, layers), layers)

        def enqueue_marks(lane: StreamPair) -> None:
            ids = self._ids[:, [chunk - self._first for chunk in marked]]
            kv.enqueue_fingerprints(lane, kv.layers, ids, marks)

        def arrived() -> None:
            for number, chunk in enumerate(marked):
                self._fingerprints[chunk] = kv.fold(marks.prints(number))
            kv.free_fingerprints(marks)
            self.done, self.seconds = True, self._load.seconds
            if self._has_exited:
                self._settle()

        if marked:
            self._load.part(enqueue_marks)
        self._load.end(arrived)

    def _enqueue(self, layers: range, lane: StreamPair) -> None:
        self._kv.enqueue_copies(lane, layers, self._bound)

    def _with_slots(self, gpu_slots: SlotOfEachChunk | None) -> Chunks:
        """The chunks of our form, then the others.

        These are converted to payloads that live as long as the load.
        """
        kv, same_form, nbytes = self._kv, self._bound, self._kv.nbytes
        if not self._to_convert:
            if gpu_slots is not None:
                kv.set_gpu_slots(same_form, gpu_slots)
            return same_form
        payloads = np.empty((len(self._to_convert), nbytes), np.uint8)
        memory = payloads.reshape(-1).data
        ids = self._ids[:, [chunk - self._first for chunk in self._to_convert]]
        offsets = [at * nbytes for at in range(len(self._to_convert))]
        chunks = same_form + kv.bind_all(ids, offsets, lambda at, size: memory[at : at + size])
        if gpu_slots is not None:
            is_foreign = [self._first + at in self._placed.other_forms for at in range(len(gpu_slots))]
            kv.set_gpu_slots(
                chunks, [gpu_slots[at] for at in sorted(range(len(gpu_slots)), key=is_foreign.__getitem__)]
            )
        for payload, chunk, is_filled in zip(
            payloads, self._to_convert, chunks.is_filled[len(same_form) :], strict=True
        ):
            if not is_filled:
                self._convert_into(payload, chunk)
        return chunks

    def _convert_into(self, payload: Array, chunk: int) -> None:
        as_blocks, all_blocks = self._kv.as_paged_kv(payload), np.arange(self._kv.layout.blocks)
        for source, stored, stored_shard, part in self._parts_of(chunk):
            as_blocks.convert(None, source, stored, stored_shard, all_blocks, part=part)

    def _give_back(self, *, believed: bool) -> None:
        places, self._places = self._places, None
        self._cuda.give_back(places, believed=believed)

    def layer(self, layer: int) -> None:
        """Work that the engine enqueues from now on may read this layer."""
        if self._cuda.layerwise:
            self._load.let_compute(layer)
            self._missing.discard(layer)
        else:
            self.all()

    def all(self) -> None:
        """Work that the engine enqueues from now on may read all layers."""
        if self._missing:
            self._load.let_compute()
        self._missing.clear()

    def start(self) -> None:
        """Nothing to do: the load was enqueued when it began."""

    def confirm(self) -> None:
        if self._marked and not self.done:
            self._load.wait()
            self._cuda.poll()

    def finish(self) -> int:
        if not self.done:
            raise MisuseError("finish of an unfinished load: poll until it is done")
        self._missing.clear()
        loaded, tokens = self.tokens, -1
        try:
            tokens = super().finish()
        finally:
            self._give_back(believed=tokens == loaded)
        return tokens

    def _differs(self, chunk: int) -> bool:
        return chunk in self._fingerprints and super()._differs(chunk)

    def _fingerprint(self, chunk: int) -> bytes:
        return self._fingerprints[chunk]

    def _settle(self) -> None:
        try:
            self.finish()
        finally:
            self._end_leases()

    def __enter__(self) -> CudaLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self._has_exited = True
        if self.done:
            self._settle()
