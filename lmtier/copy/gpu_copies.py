"""Copies of chunks in an engine's own GPU memory: which chunks, and at which offsets. No memory, no I/O.

Every chunk here comes from a match, so the slab has it too, and it is leased there. A copy only saves the
PCIe transfer; losing it is harmless. For a load, each chunk has one of these:

    a complete copy     the load reads it; it does not move until `release`
    a place to fill     the load writes it; it can be read after `release`, if it was verified
    neither             no room, or another load is filling it: the chunk goes over PCIe

Rejected: saves that leave copies too. Much of what is saved is never loaded, and takes the room of what is
(docs/LOG.md).

All ranks use the same offsets. A chunk takes as much room as the largest shard of its form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState
from lmtier.core.placement import Placement
from lmtier.core.slab import Extents
from lmtier.errors import MisuseError
from lmtier.format.layout import ChunkForm, padded
from lmtier.rules.policy import make_policy

Fingerprints: TypeAlias = "tuple[bytes, ...]"
"""The fingerprint of each shard of a chunk."""


class GpuSlot(NamedTuple):
    """The place of one chunk's copy. Two plain values, for messages."""

    offset: int
    is_filled: bool
    """True: the copy is complete, so read it. False: fill it."""


@dataclass(eq=False, slots=True)
class GpuSlots:
    """The places that one load uses until `GpuCopies.release`."""

    by_chunk: tuple[GpuSlot | None, ...]
    """The place of each chunk, in order."""
    held: list[tuple[Entry, Fingerprints]]
    """For each chunk with a place: our entry, which is leased, and the fingerprints in the slab."""

    @property
    def filled(self) -> int:
        """The number of chunks that need no PCIe transfer."""
        return sum(place is not None and place.is_filled for place in self.by_chunk)


class GpuCopies:
    """Manages `capacity` bytes on every rank. Only the owner of the engine's matches calls it."""

    def __init__(self, capacity: int, policy: str = "lru") -> None:
        self.extents = Extents(capacity)
        self.index = Index(self.extents.capacity, make_policy(policy))
        self._open: set[GpuSlots] = set()

    def __repr__(self) -> str:
        return f"<GpuCopies {self.index!r} in use by {len(self._open)}>"

    def load(self, placement: Placement, form: ChunkForm, first: int = 0) -> GpuSlots:
        """Places for the chunks of a match from `first` on, as payloads of `form`, the reader's form."""
        run = [
            (key, placement.marks.get(chunk, ()))
            for chunk, key in enumerate(placement.keys[first:], start=first)
        ]
        ready = [self._ready(key, marks, form) for key, marks in run]
        for copy in ready:
            if copy is not None:
                self.index.lease(copy)  # before room is made for others
        self.index.touch([copy for copy in ready if copy is not None])
        return self._give(run, ready, form)

    def release(self, places: GpuSlots, *, is_verified: bool = True) -> None:
        """No rank reads or writes these places any more. Filled places can be read from now on.

        `is_verified`: everything arrived, and all compared fingerprints agree. Otherwise these copies are
        deleted.
        """
        if places not in self._open:
            raise MisuseError("these places were given back before")
        self._open.remove(places)
        for copy, marks in places.held:
            if is_verified and copy.state is EntryState.FILLING:
                copy.marks = marks
                self.index.make_ready(copy)
                continue
            if not is_verified and copy.state is not EntryState.GONE:
                self.index.remove(copy)
            if self.index.release(copy):
                self.extents.free(copy.offsets)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget these copies. It is allowed at any time: a place in use stays reserved until `release`."""
        for key in keys:
            copy = self.index.get(key)
            if copy is not None and self.index.remove(copy):
                self.extents.free(copy.offsets)

    def clear(self) -> None:
        self.forget([copy.key for copy in self.index.entries()])

    def _ready(self, key: bytes, marks: Fingerprints, form: ChunkForm) -> Entry | None:
        copy = self.index.get(key)
        if copy is None or copy.state is not EntryState.READY:
            return None
        # Other marks: the chunk was computed again, by another engine. The KV is the same except for its last
        # bits.
        if copy.form is form and _given(copy.marks) == _given(marks):
            return copy
        self.forget([key])
        return None

    def _give(
        self, run: Sequence[tuple[bytes, Fingerprints]], ready: Sequence[Entry | None], form: ChunkForm
    ) -> GpuSlots:
        gpu_slots: list[GpuSlot | None] = []
        leased_pairs: list[tuple[Entry, Fingerprints]] = []
        parent: Entry | None = None
        for (key, marks), filled_copy in zip(run, ready, strict=True):
            copy = filled_copy or self._put(key, form)
            gpu_slots.append(None if copy is None else GpuSlot(copy.offsets[0], filled_copy is not None))
            if copy is not None:
                leased_pairs.append((copy, marks))
            entry = self.index.get(key)
            if entry is not None:
                if parent is not None:
                    self.index.link(entry, parent)
                parent = entry
        self.index.refresh([copy for copy, _ in leased_pairs])
        places = GpuSlots(tuple(gpu_slots), leased_pairs)
        self._open.add(places)
        return places

    def _put(self, key: bytes, form: ChunkForm) -> Entry | None:
        if key in self.index:  # being filled
            return None
        nbytes = padded(max(form.sizes))
        while (offsets := self.extents.allocate([nbytes])) is None:
            # Enough may be free, but in pieces. Then evict one more.
            victims = self.index.evict(max(1, nbytes - self.index.free))
            if not victims:
                return None
            for victim in victims:
                self.extents.free(victim.offsets)
        copy = self.index.add(key, form, nbytes, EntryState.FILLING, None)
        copy.offsets = offsets
        return copy

    def check(self) -> None:
        """Check every invariant; raises AssertionError."""
        self.index.check()
        self.extents.check()
        leases = Counter(copy for places in self._open for copy, _ in places.held)
        indexed = self.index.entries()
        for copy in indexed:
            assert copy.leases == leases[copy], f"{copy!r} is in use by {leases[copy]}"
        for copy in leases.keys() - set(indexed):
            assert copy.state is EntryState.GONE, f"{copy!r} is not indexed"
        at = 0
        for copy in sorted({*indexed, *leases}, key=lambda copy: copy.offsets):
            assert copy.offsets[0] >= at, f"{copy!r} overlaps another"
            at = copy.offsets[0] + copy.nbytes
        held = sum(copy.nbytes for copy in {*indexed, *leases})
        assert self.extents.used == self.index.used == held, "the extents and the index differ"


def _given(marks: Fingerprints) -> Fingerprints:
    """Empty, if its writer took none."""
    return marks if any(marks) else ()
