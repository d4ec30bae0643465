"""Per-layer save and load on CUDA: saves and loads continue after their calls have returned.

    save.layer(n)   after the engine has enqueued layer n        commit(): visible in a later `poll`
    load            is enqueued when it begins                   layer(n): before the engine enqueues layer n

The mover on a CPU commits, compares fingerprints and ends leases at once. This mover does so in `poll`, when
the device is done. Call `poll` in the owner's step. Only `drain` waits for the device.

`near` names the places in GPU memory that a load reads or fills. Its caller calls `GpuCopies.done` when all
ranks are done. Without `near`, a mover with `gpu_copies` manages the places itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from lmtier.copy.blocks import BlockIds
from lmtier.copy.cuda.chunks import Chunks, Marks
from lmtier.copy.cuda.paging import CudaKV, Near
from lmtier.copy.cuda.streams import Lane, Order
from lmtier.copy.gpu_copies import GpuCopies, GpuPlaces
from lmtier.copy.mover import Blocks, Load, Mover, Save
from lmtier.copy.store import Store
from lmtier.core.match import Match, Reservation
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
        self.order = Order(kv.device)
        self.layerwise = layerwise
        self.gpu_copies = gpu_copies
        """The gpu:// tier, if this mover manages it; `kv` holds its memory. By default from the settings."""
        spec = cache.config.gpu
        if gpu_copies is None and spec is not None and spec.capacity is not None:
            self.gpu_copies = GpuCopies(spec.capacity, spec.policy)
            kv.hold(spec.capacity)
        super().__init__(cache, kv, identity, ranks=ranks, spare_blocks=spare_blocks)

    def load(
        self, match: Match, block_ids: Blocks, *, computed_tokens: int = 0, near: Near | None = None
    ) -> CudaLoad:
        """`near` has a place, or None, for each chunk of the match, from the first that the engine lacks in
        part."""
        try:
            return self.begin(match, block_ids, computed_tokens=computed_tokens, near=near)
        except BaseException:
            self.cache.release(match)
            raise

    def begin(
        self, match: Match, block_ids: Blocks, *, computed_tokens: int = 0, near: Near | None = None
    ) -> CudaLoad:
        self._need(match.form)
        return CudaLoad(self, match, block_ids, computed_tokens, near)

    def fill(self, reservation: Reservation, blocks: Mapping[int, BlockIds]) -> CudaSave:
        self._need(reservation.form)
        return CudaSave(self, reservation, blocks)

    @property
    def under_way(self) -> int:
        return self.order.under_way

    def reuse(self, block_ids: Blocks) -> None:
        """The engine has taken these blocks from a request whose saves or loads may be unfinished."""
        self.order.reuse(np.unique(np.asarray(block_ids)).tolist())

    def let_go(self, block_ids: Blocks) -> None:
        self.order.let_go(np.unique(np.asarray(block_ids)).tolist())

    def poll(self) -> int:
        """Commit, compare and release what the device has finished.

        Returns the number of ended saves and loads.
        """
        return self.order.poll()

    def drain(self) -> None:
        """Wait for all saves and loads, and end them. For when the engine stops."""
        self.order.drain()

    def give_back(self, places: GpuPlaces | None, *, believed: bool) -> None:
        """Give back the places that a load has in this mover's own tier."""
        if self.gpu_copies is not None and places is not None:
            self.gpu_copies.done(places, believed=believed)


class CudaSave(Save):
    """The save of new chunks. After `commit` they become visible in the `poll` that finds the copies done."""

    _bound: Chunks

    def __init__(
        self,
        mover: CudaMover,
        reservation: Reservation,
        blocks: Mapping[int, BlockIds],
    ) -> None:
        super().__init__(mover, reservation, blocks)
        self._kv = mover.kv
        self._bound.check_whole()
        self._groups: list[range] = []
        """Groups of layers that are not enqueued yet. One is enqueued once all of its layers may be."""
        self._group_of: dict[int, range] = {}
        self._marked = [(chunk, ids) for chunk, ids in self._chunks if chunk in self._prints]
        self._store = mover.order.store(self._bound.blocks)
        self._marks = self._kv.take_marks(len(self._marked))
        self._marked = self._marked[: self._marks.chunks]  # the others are stored without a fingerprint
        self._prints = {chunk: {} for chunk, _ in self._marked}

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

    def _copy(self, layers: range, lane: Lane) -> None:
        self._kv.enqueue_copies(lane, layers, self._bound)
        if not self._groups:  # these layers are the last, so the fingerprints of all can be computed
            self._kv.enqueue_marks(lane, self._kv.layers, [ids for _, ids in self._marked], self._marks)

    def commit(self) -> None:
        if self._missing and self._chunks:
            raise MisuseError(f"commit of a save that lacks layers {sorted(self._missing)}")
        self._store.end(self._commit)

    def abort(self) -> None:
        """Abort. The cache gets the extents back when nothing writes to them any more."""
        self._store.end(self._abort)

    def _commit(self) -> None:
        for number, (chunk, _) in enumerate(self._marked):
            self._prints[chunk] = dict(zip(self._kv.layers, self._marks.prints(number), strict=True))
        self._kv.give_back(self._marks)
        try:
            super().commit()
        except BaseException:
            super().abort()
            raise

    def _abort(self) -> None:
        self._kv.give_back(self._marks)
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
        match: Match,
        block_ids: Blocks,
        computed_tokens: int,
        near: Near | None = None,
    ) -> None:
        super().__init__(mover, match, block_ids, computed_tokens)
        self._kv, self._cuda = mover.kv, mover
        self.done = False
        """Whether the last `poll` found all copies done."""
        self._is_left = False
        sampled = mover.sampled([self._placed.keys[chunk] for chunk, _, _ in self._chunks])
        marked = [
            (chunk, ids)
            for (chunk, ids, first_block), is_sampled in zip(self._chunks, sampled, strict=True)
            if is_sampled and self._is_comparable(chunk, ids, first_block)
        ]
        self._fingerprints: dict[int, bytes] = {}
        self._places: GpuPlaces | None = None
        if near is None and mover.gpu_copies is not None:
            self._places = mover.gpu_copies.load(
                [self._run[chunk] for chunk, _, _ in self._chunks], mover.form
            )
            near = self._places.near
            self.from_copies = [
                chunk
                for (chunk, _, _), place in zip(self._chunks, near, strict=True)
                if place is not None and place.is_there
            ]
        try:
            self._bound = self._bring_near(near)
            self._load = mover.order.load(self._bound.blocks)
            marks = self._kv.take_marks(len(marked))
            self._marked = marked[: marks.chunks]  # the others are not compared
            try:
                self._begin(marks)
            except BaseException:
                # The leases end with this call, so nothing may read the extents any more.
                self._load.end(lambda: None)
                self._load.wait()
                self._kv.give_back(marks)
                raise
        except BaseException:
            self._give_back(believed=False)
            raise

    def _begin(self, marks: Marks) -> None:
        kv, marked = self._kv, self._marked
        for layers in kv.layer_groups(len(self._bound)) if self._cuda.layerwise else [kv.layers]:
            self._load.part(partial(self._enqueue, layers), layers)

        def enqueue_marks(lane: Lane) -> None:
            kv.enqueue_marks(lane, kv.layers, [ids for _, ids in marked], marks)

        def arrived() -> None:
            for number, (chunk, _) in enumerate(marked):
                self._fingerprints[chunk] = kv.fold(marks.prints(number))
            kv.give_back(marks)
            self.done, self.seconds = True, self._load.seconds
            if self._is_left:
                self._settle()

        if marked:
            self._load.part(enqueue_marks)
        self._load.end(arrived)

    def _enqueue(self, layers: range, lane: Lane) -> None:
        self._kv.enqueue_copies(lane, layers, self._bound)

    def _bring_near(self, near: Near | None) -> Chunks:
        """The chunks of our form, then the others.

        These are converted to payloads that live as long as the load.
        """
        kv, own, nbytes = self._kv, self._bound, self._kv.nbytes
        if not self._foreign:
            if near is not None:
                kv.bring_near(own, near)
            return own
        payloads = np.empty((len(self._foreign), nbytes), np.uint8)
        memory = payloads.reshape(-1).data
        rows = [(ids, at * nbytes, first) for at, (_, ids, first) in enumerate(self._foreign)]
        chunks = own + kv.bind_all(rows, lambda at, size: memory[at : at + size])
        if near is not None:
            is_foreign = [chunk in self._placed.others for chunk, _, _ in self._chunks]
            kv.bring_near(chunks, [near[at] for at in sorted(range(len(near)), key=is_foreign.__getitem__)])
        for payload, (chunk, _, _), is_there in zip(
            payloads, self._foreign, chunks.is_there[len(own) :], strict=True
        ):
            if not is_there:
                self._convert_into(payload, chunk)
        return chunks

    def _convert_into(self, payload: Array, chunk: int) -> None:
        as_blocks, whole = self._kv.over(payload), np.arange(self._kv.layout.blocks)
        for source, stored, held, part in self._parts_of(chunk):
            as_blocks.convert(None, source, stored, held, whole, part=part)

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

    def _differs(self, chunk: int, ids: BlockIds, first_block: int) -> bool:
        return chunk in self._fingerprints and super()._differs(chunk, ids, first_block)

    def _fingerprint(self, chunk: int, ids: BlockIds) -> bytes:
        return self._fingerprints[chunk]

    def _settle(self) -> None:
        try:
            self.finish()
        finally:
            self._mover.cache.release(self._match)

    def __enter__(self) -> CudaLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        if self.done:
            self._settle()
