"""The slab and its index: finds extents for new chunks and frees those of expired ones.

It evicts chunks to make room for new ones and moves chunks that lie in their way. It does no I/O and knows
nothing about lower tiers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from lmtier.core.index import Index
from lmtier.core.match import CPU, Entry, EntryState
from lmtier.core.place import IndexedPlace
from lmtier.core.slab import Slab
from lmtier.errors import MisuseError, size_text
from lmtier.format.layout import ChunkForm, padded
from lmtier.format.objects import Selector
from lmtier.observe.metrics import Metrics
from lmtier.rules.lifetimes import FOREVER
from lmtier.rules.shares import Pool

_AHEAD = 16  # chunks that write=evicted keeps saved ahead of their eviction, at least
_TRIES = 4  # evictions for one chunk before its room is given up as too fragmented
_SLID = 4  # bytes that may be moved for a chunk, as a multiple of its size; or
_SLID_BYTES = 32 << 20
_COMPACTING = 0.05  # seconds that compaction may take in a step; a single move may take longer


class MemoryPlace(IndexedPlace):
    def __init__(
        self,
        slab: Slab,
        index: Index,
        metrics: Metrics,
        evicted: Callable[[Sequence[Entry]], None],
        is_unused: Callable[[Entry], bool],
        clock: Callable[[], float],
        ttl: float,
    ) -> None:
        """`evicted` is called with the victims. `is_unused`: only writes to lower tiers lease this chunk.

        `ttl` is the longest time a chunk may stay, by `clock`.
        """
        self.slab, self.index, self.label = slab, index, CPU
        self.no_room_at = float("-inf")
        """When a request last found no room, because all of it was leased; in time.monotonic()."""
        self._metrics = metrics
        self._evicted, self._is_unused = evicted, is_unused
        self.clock = self._clock = clock
        self.ttl = ttl
        self._largest = 0  # bytes of the largest chunk since the last step
        self._compacting = 0.0  # seconds spent since the last step
        self._took = 0  # bytes allocated since the last step
        self._ahead = 0  # bytes that write=evicted keeps saved: twice the most that a recent step took
        self.to_wipe: set[Entry] = set()
        """Chunks whose bytes are overwritten as soon as no engine and no tier uses them."""
        self.deleted_in_use: set[Entry] = set()
        """Chunks that were deleted while an engine or a tier uses them: they keep their room until then."""
        self._takers: set[Pool | None] = set()
        """The pools of the chunks that took them, if there are shares."""

    # ---- a place for a chunk

    def make(self, keys: Sequence[bytes], need: int, parent: Entry | None) -> None:
        """Evict in one go the room that the missing chunks of a prompt need, if that much can leave.

        `allocate` would do the same chunk by chunk. This is only for speed. `parent` and the last chunk that
        is here stay, each with those before it.
        """
        if need > self.index.free:
            get = self.index.get
            tail = next((entry for key in reversed(keys) if (entry := get(key)) is not None), None)
            if parent is not None:
                self.index.lease(parent)
            self._evict(need - self.index.free, tail, self.index.pool(keys[0]), need)
            if parent is not None:
                self.index.release(parent)

    def take(self, keys: Sequence[bytes], form: ChunkForm) -> list[tuple[int, ...]]:
        """Extents for as many of these chunks, in their order, as are free now."""
        offsets = self.slab.allocate_some(
            form.sizes, min(len(keys), max(0, self.index.free) // form.slab_bytes)
        )
        self._note(keys[: len(offsets)], form)
        return offsets

    def _note(self, keys: Sequence[bytes], form: ChunkForm) -> None:
        """These have taken room."""
        if keys:
            self._largest = max(self._largest, form.slab_bytes)
            self._took += form.slab_bytes * len(keys)
            self._takers.update(map(self.index.pool, keys))

    def allocate(self, key: bytes, form: ChunkForm, parent: Entry | None) -> tuple[int, ...] | None:
        """Extents for one chunk; evicts if needed. None: the rest is leased or belongs to other shares."""
        asker = self.index.pool(key)
        # Enough bytes may be free, but in pieces. Then unleased chunks are moved together; evicting more
        # would rarely join the pieces. Leased chunks in between can make it impossible.
        short = form.slab_bytes - self.index.free
        for _ in range(_TRIES):
            if short > 0 and not self._evict(short, parent, asker, form.slab_bytes):
                break
            if (offsets := self.slab.allocate(form.sizes)) is not None:
                self._note([key], form)
                return offsets
            if (short := self._compact(form.slab_bytes)) < 0:
                break
        self.no_room_at = time.monotonic()
        return None

    def _evict(self, need: int, tail: Entry | None, asker: Pool | None, claim: int) -> bool:
        """Free at least `need` bytes, or nothing. The prefix that ends in `tail` always stays."""
        victims = self.index.evict(need, tail, asker, claim)
        if not victims:
            return False
        self._evicted(victims)
        self._free(victims)
        return True

    def _compact(self, nbytes: int) -> int:
        """Make `nbytes` free in a row, if so many are free, by moving chunks that are not leased.

        Returns how many more bytes must be freed for it. Less than 0: it is impossible now.
        """
        began = time.monotonic()
        if self._compacting > _COMPACTING:
            return -1
        movable = {
            offset: entry
            for entry in self.index.entries()
            if not entry.leases and entry.state is EntryState.READY
            for offset in entry.offsets
        }
        window = self.slab.window(nbytes, movable)
        if window is None:
            return -1
        start, offsets = window
        new_offsets = self.slab.vacate(start, nbytes, offsets)
        self._move(new_offsets, movable)
        self.slab.free(new_offsets)
        missing_bytes = sum(movable[offset].nbytes for offset in offsets if offset not in new_offsets)
        if missing_bytes:  # large chunks find no other room, but can slide together
            new_offsets = self.slab.slide(nbytes, movable, max(_SLID * nbytes, _SLID_BYTES))
            self._move(new_offsets, movable)
            missing_bytes = 0 if new_offsets else missing_bytes
        self._compacting += time.monotonic() - began
        return missing_bytes

    def _move(self, places: Mapping[int, int], entries: dict[int, Entry]) -> None:
        """Move the bytes of extents to their new places, in this order, and update their entries."""
        for offset, new_offset in places.items():
            self._metrics.moved_bytes.inc(self.slab.move(offset, new_offset))
        moved = {entries.pop(offset) for offset in places}
        for entry in moved:  # once each: the new place of one may be the old one of another
            entry.offsets = tuple(places.get(each, each) for each in entry.offsets)
            entries.update(dict.fromkeys(entry.offsets, entry))

    def next_victims(self) -> list[Entry]:
        """After a step that took room: the chunks to save before later steps take as much again."""
        takers, self._takers = self._takers, set()
        allocated_bytes, self._took = self._took, 0
        if allocated_bytes:
            self._ahead = max(2 * allocated_bytes, _AHEAD * self._largest, self._ahead - self._ahead // 256)
            self._largest = 0
        short = self._ahead - self.index.free
        # Only after room was taken. Otherwise a tier with little room would swap such chunks for ever.
        return [e for taker in takers for e in self.index.next_victims(short, taker, short)[0] if short > 0]

    def begin_step(self) -> None:
        self._compacting = 0.0

    # ---- leaving

    def release(self, *entries: Entry) -> None:
        """End one lease of each."""
        if gone := self.index.release(*entries):
            self._free(gone)

    def _remove(self, entry: Entry, why: str) -> None:
        super()._remove(entry, why)
        if entry.leases:
            self.deleted_in_use.add(entry)

    def begin_clear(self, selector: Selector) -> None:
        if selector.tenants:
            self.to_wipe.update(entry for entry in self.deleted_in_use if selector.concerns(entry.key))

    def _wipe_when_free(self, entry: Entry) -> int:
        self.to_wipe.add(entry)
        return entry.nbytes

    def _free(self, entries: Sequence[Entry]) -> None:
        for entry in self.to_wipe.intersection(entries) if self.to_wipe else ():
            for offset, size in zip(entry.offsets, entry.form.sizes, strict=True):
                self.slab.wipe(offset, padded(size))
            self.to_wipe.remove(entry)
        if self.deleted_in_use:
            self.deleted_in_use.difference_update(entries)
        self.slab.free([offset for entry in entries for offset in entry.offsets])
        for entry in entries:
            entry.offsets = ()

    # ---- changes while it runs

    def need_fits(self, capacity: int) -> None:
        super().need_fits(capacity)
        if capacity > self.slab.capacity:  # the slab stays as large as it was made
            raise MisuseError(
                f"cpu: the memory was taken at start: at most {size_text(self.slab.capacity)} is possible"
            )

    # ---- lifetimes

    def live_until(self, end: float, *entries: Entry) -> None:
        """They end then, or when the tier's ttl has passed, but not later than they do now."""
        end = min(end, self.clock() + self.ttl)
        for entry in entries if end < FOREVER else ():
            if entry.state is not EntryState.GONE:
                self.index.expiries.set(entry, min(end, self.index.expiries.expiry(entry)))

    def expire_among(self, keys: Sequence[bytes]) -> None:
        """Remove those of `keys` that have expired. A running read continues."""
        for key in keys if self.index.expiries else ():
            self.live(key)

    def check(self) -> None:
        for entry in self.deleted_in_use:
            assert entry.state is EntryState.GONE, f"{entry!r} is not leaving"
            assert entry.leases, f"{entry!r} has left"
