"""Per-layer save and load over CUDA: a mover whose saves and loads go on after their calls have returned.

    save.layer(n)   after the engine has enqueued layer n        commit(): visible in a later `poll`
    load            is enqueued when it begins                   layer(n): before the engine enqueues layer n

What a CPU's mover does at once, `poll` does here when the device is done: commit, compare fingerprints, end
leases. It belongs into the owner's step; no call but `drain` ever waits for the device.

`near` says which chunks go by way of places in GPU memory. Whoever gives it says `Hbm.done` when all ranks
are; without it, a mover whose settings have a gpu:// tier decides and ends by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType

import numpy as np

from lmtier.cache import Match, Reservation
from lmtier.cuda.paging import Chunks, CudaKV, Marks, Near
from lmtier.cuda.streams import Lane, Order
from lmtier.errors import MisuseError
from lmtier.hbm import Hbm, Places
from lmtier.index import Entry
from lmtier.keys import Identity
from lmtier.layout import Array, Shard, cover, padded
from lmtier.mover import Blocks, Load, Mover, Save
from lmtier.paging import BlockIds
from lmtier.store import Store


class CudaMover(Mover):
    """Moves KV between a GPU's blocks and a store. `layerwise`: loads come layer by layer, not as a whole."""

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
    ) -> None:
        self.order = Order(kv.device)
        self.layerwise = layerwise
        self.hbm: Hbm | None = None
        """The gpu:// tier, if it is this mover's own."""
        spec = cache.config.gpu
        if spec is not None and spec.capacity is not None:
            self.hbm = Hbm(spec.capacity, spec.policy)
            kv.hold(spec.capacity)
        super().__init__(cache, kv, identity, ranks=ranks, spare_blocks=spare_blocks)

    def load(
        self, match: Match, block_ids: Blocks, *, computed_tokens: int = 0, near: Near | None = None
    ) -> CudaLoad:
        """`near`: of each chunk of the match from the first on that the engine lacks, be it in part."""
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

    def fill(
        self, reservation: Reservation, blocks: Mapping[int, BlockIds], *, near: Near | None = None
    ) -> CudaSave:
        """`near`: of each chunk of the reservation, in its order."""
        self._need(reservation.form)
        return CudaSave(self, reservation, blocks, near)

    @property
    def under_way(self) -> int:
        return self.order.under_way

    def reuse(self, block_ids: Blocks) -> None:
        """The engine has taken these blocks from a request whose saves or loads may still be under way."""
        self.order.reuse(np.unique(np.asarray(block_ids)).tolist())

    def poll(self) -> int:
        """Commit, compare and release what the device is done with. How many saves and loads that ends."""
        return self.order.poll()

    def drain(self) -> None:
        """The same, and wait for it: when the engine stops."""
        self.order.drain()

    def give_back(self, places: Places | None, *, believed: bool) -> None:
        """What a save or load has of this mover's own tier."""
        if self.hbm is not None and places is not None:
            self.hbm.done(places, believed=believed)


class CudaSave(Save):
    """New chunks on their way out. After `commit` they become visible in the `poll` that finds them there."""

    _bounds: Chunks  # type: ignore[assignment]

    def __init__(
        self,
        mover: CudaMover,
        reservation: Reservation,
        blocks: Mapping[int, BlockIds],
        near: Near | None = None,
    ) -> None:
        super().__init__(mover, reservation, blocks)
        self._kv = mover.kv
        self.done = False
        self._bounds.check_whole()
        self._waiting: set[int] = set()
        """Layers that may be enqueued, and are when all of their group may be."""
        self._group_of: dict[int, range] = {}
        self._marked = [(chunk, ids) for chunk, ids in self._chunks if chunk in self._prints]
        self._cuda = mover
        self._places: Places | None = None
        if near is None and mover.hbm is not None:
            self._places = mover.hbm.save(list(reservation.entries.values()), mover.form)
            near = self._places.near
        try:
            if near is not None:
                self._kv.bring_near(self._bounds, near)
            self._store = mover.order.store(self._bounds.blocks)
        except BaseException:
            mover.give_back(self._places, believed=False)
            raise
        self._marks = self._kv.take_marks(len(self._marked))
        self._marked = self._marked[: self._marks.chunks]  # the others are stored without a fingerprint
        self._prints = {chunk: {} for chunk, _ in self._marked}

    def layer(self, layer: int) -> None:
        """Save one layer of every new chunk, as the engine has it enqueued by now: with all of its group."""
        if layer not in self._missing:
            return
        self._missing.discard(layer)
        self._waiting.add(layer)
        if not self._group_of:
            groups = self._kv.layer_groups(len(self._bounds))
            self._group_of = {each: group for group in groups for each in group}
        group = self._group_of[layer]
        if self._waiting.issuperset(group):
            self._waiting.difference_update(group)
            self._enqueue(group)

    def all(self) -> None:
        self._waiting |= self._missing
        self._missing.clear()
        self._enqueue_waiting()

    def _enqueue_waiting(self) -> None:
        waiting = sorted(self._waiting)
        self._waiting.clear()
        first = 0
        for at, layer in enumerate(waiting):
            if layer + 1 not in waiting[at + 1 : at + 2]:
                self._enqueue(range(waiting[first], layer + 1))
                first = at + 1

    def _enqueue(self, layers: range) -> None:
        if not self._bounds:
            return

        def enqueue(lane: Lane) -> None:
            self._kv.enqueue_copies(lane, layers, self._bounds)
            self._kv.enqueue_marks(lane, layers, [ids for _, ids in self._marked], self._marks)

        self._store.part(enqueue)

    def commit(self) -> None:
        if self._missing and self._chunks:
            raise MisuseError(f"commit of a save that lacks layers {sorted(self._missing)}")
        self._enqueue_waiting()
        self._store.end(self._commit)

    def abort(self) -> None:
        """The extents are the cache's again when nothing writes to them any more."""
        self._store.end(self._abort)

    def _commit(self) -> None:
        self.done = True
        for number, (chunk, _) in enumerate(self._marked):
            self._prints[chunk] = dict(zip(self._kv.layers, self._marks.prints(number), strict=True))
        self._kv.give_back(self._marks)
        try:
            super().commit()
        except BaseException:
            self._cuda.give_back(self._places, believed=False)
            super().abort()
            raise
        self._cuda.give_back(self._places, believed=True)

    def _abort(self) -> None:
        self.done = True
        self._kv.give_back(self._marks)
        self._cuda.give_back(self._places, believed=False)
        super().abort()


class CudaLoad(Load):
    """One match on its way in, all of it enqueued. `layer`, or `all`, before the engine uses it.

    As a context manager it compares and releases by itself, in the `poll` that finds it there. Otherwise:
    when `done`, call `finish`, then release the match; not before.
    """

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
        """Whether everything is there, as the last `poll` saw it."""
        self._is_left = False
        marked = [
            (entry, ids)
            for entry, ids, first_block in self._chunks
            if mover.sampled(entry.key) and self._is_comparable(entry, ids, first_block)
        ]
        self._fingerprints: dict[bytes, bytes] = {}
        self._places: Places | None = None
        if near is None and mover.hbm is not None:
            self._places = mover.hbm.load([entry for entry, _, _ in self._chunks], mover.form)
            near = self._places.near
        try:
            self._bounds = self._bind(near)
            self._load = mover.order.load(self._bounds.blocks)
            marks = self._kv.take_marks(len(marked))
            self._marked = marked[: marks.chunks]  # the others are not compared
            try:
                self._begin(marks)
            except BaseException:
                # The leases end with this call: nothing may read the extents any more.
                self._load.end(lambda: None)
                self._load.wait()
                self._kv.give_back(marks)
                raise
        except BaseException:
            self._give_back(believed=False)
            raise

    def _begin(self, marks: Marks) -> None:
        kv, marked = self._kv, self._marked
        for layers in kv.layer_groups(len(self._bounds)) if self._cuda.layerwise else [kv.layers]:
            self._load.part(partial(self._enqueue, layers), layers)

        def enqueue_marks(lane: Lane) -> None:
            kv.enqueue_marks(lane, kv.layers, [ids for _, ids in marked], marks)

        def arrived() -> None:
            for number, (entry, _) in enumerate(marked):
                self._fingerprints[entry.key] = kv.fold(marks.prints(number))
            kv.give_back(marks)
            self.done, self.seconds = True, self._load.seconds
            if self._is_left:
                self._settle()

        if marked:
            self._load.part(enqueue_marks)
        self._load.end(arrived)

    def _enqueue(self, layers: range, lane: Lane) -> None:
        self._kv.enqueue_copies(lane, layers, self._bounds)

    def _bind(self, near: Near | None) -> Chunks:
        """Those of our form, then the others, which become payloads of ours that live as long as this."""
        kv, own, nbytes = self._kv, self._bound, self._kv.nbytes
        assert isinstance(own, Chunks)
        if not self._foreign:
            if near is not None:
                kv.bring_near(own, near)
            return own
        payloads = np.empty((len(self._foreign), nbytes), np.uint8)
        memory = memoryview(payloads.reshape(-1))
        rows = [(ids, at * nbytes, first) for at, (_, ids, first) in enumerate(self._foreign)]
        chunks = own + kv.bind_all(rows, lambda at, size: memory[at : at + size])
        if near is not None:
            is_foreign = [entry.form is not self._mover.form for entry, _, _ in self._chunks]
            kv.bring_near(chunks, [near[at] for at in sorted(range(len(near)), key=is_foreign.__getitem__)])
        for payload, (entry, _, _), is_there in zip(
            payloads, self._foreign, chunks.is_there[len(own) :], strict=True
        ):
            if not is_there:
                self._convert_into(payload, entry)
        return chunks

    def _convert_into(self, payload: Array, entry: Entry) -> None:
        kv, form = self._kv, entry.form
        assert form.layout is not None  # known since the chunk's header was read
        as_blocks, whole = kv.over(payload), np.arange(kv.layout.blocks)
        for held, part in cover(kv.shard, form.shards) or ():
            number = form.shards.index(held)
            source = self._mover.cache.slab.view(entry.offsets[number], padded(form.sizes[number]))
            as_blocks.convert(None, source, form.layout, held, whole, part=part)

    def _give_back(self, *, believed: bool) -> None:
        places, self._places = self._places, None
        self._cuda.give_back(places, believed=believed)

    def layer(self, layer: int) -> None:
        """What the engine enqueues from now on may read this layer."""
        if self._cuda.layerwise:
            self._load.let_compute(layer)
            self._missing.discard(layer)
        else:
            self.all()

    def all(self) -> None:
        """The same for all of them."""
        if self._missing:
            self._load.let_compute()
        self._missing.clear()

    def start(self) -> None:
        """It is on its way since it began."""

    def confirm(self) -> None:
        if self._marked and not self.done:
            self._load.wait()
            self._cuda.poll()

    def finish(self) -> int:
        if not self.done:
            raise MisuseError("finish of a load that is under way: poll until it is done")
        self._missing.clear()
        loaded, tokens = self.tokens, -1
        try:
            tokens = super().finish()
        finally:
            self._give_back(believed=tokens == loaded)
        return tokens

    def _differs(self, entry: Entry, ids: BlockIds, first_block: int) -> bool:
        return entry.key in self._fingerprints and super()._differs(entry, ids, first_block)

    def _fingerprint(self, entry: Entry, ids: BlockIds) -> bytes:
        return self._fingerprints[entry.key]

    def _settle(self) -> None:
        try:
            self.finish()
        finally:
            self._mover.cache.release(self._match)

    def __enter__(self) -> CudaLoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_left = True
        if self.done:
            self._settle()
