"""What all places of chunks have in common: the slab, tiers that lmtier owns, and tiers that others share.

A chunk leaves a place for one of four reasons: a clear covers it, it is discarded by its key, its time is
over, or it is evicted. An `IndexedPlace` knows what it holds, so it evicts, and deletes at once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from lmtier.core.index import Index
from lmtier.core.match import CLEARED, DELETED, EXPIRED, Entry, EntryState
from lmtier.format.layout import ChunkForm
from lmtier.format.objects import Selector
from lmtier.observe.metrics import Metrics
from lmtier.rules.lifetimes import FOREVER

AT_ONCE = 1024  # entries that are looked at in one step
_WIPED_AT_ONCE = 8 << 20  # bytes
_LEAVE_AT_ONCE = 64  # the most entries that leave together because a place became smaller, or they expired


class Place(ABC):
    label: str
    ttl: float
    """Seconds for which the place may serve a chunk."""

    @abstractmethod
    def begin_clear(self, selector: Selector) -> None:
        """`clear` follows. From now on no chunk is loaded that is covered by its header."""

    @abstractmethod
    def clear(self, selector: Selector, *, force: bool) -> Iterable[int]:
        """Delete what `selector` covers, in small steps: how many chunks in each, if that is known.

        It keeps what is in use, except with `force`. Where headers decide they must be read first; until
        then nothing that it covers is loaded.
        """

    @abstractmethod
    def discard(self, key: bytes, forms: Iterable[ChunkForm] = (), why: str = DELETED) -> None:
        """Delete one chunk. It is not found from now on; what reads or writes it goes on.

        A place that does not know in which form it holds the chunk deletes it in each of `forms`.
        """

    @abstractmethod
    def expire(self) -> bool:
        """Delete some expired chunks. Returns whether there may be more."""

    def set_ttl(self, ttl: float) -> None:
        """From now on the place may serve a chunk for so many seconds."""
        self.ttl = ttl


class IndexedPlace(Place):
    index: Index
    _clock: Callable[[], float]
    _metrics: Metrics
    _is_unused: Callable[[Entry], bool]
    """Whether nothing leases it, except writes of it to tiers."""
    _evicted: Callable[[Sequence[Entry]], None]
    """Called with entries that have left the index to make room."""

    def _wipe_when_free(self, entry: Entry) -> int:
        """What tenants leave is overwritten, if this place can: so many bytes."""
        return 0

    @abstractmethod
    def _free(self, entries: Sequence[Entry]) -> None:
        """These have left the index, and nothing leases them: give their room back."""

    def _remove(self, entry: Entry, why: str) -> None:
        """Delete this entry: its room is free when the last of its leases ends."""
        self._free(self.index.remove(entry, why=why))

    def clear(self, selector: Selector, *, force: bool) -> Iterator[int]:
        entries, chunks, wiped_bytes = iter(self.index.entries()), 0, 0
        while batch := list(islice(entries, AT_ONCE)):
            for entry in [each for each in batch if selector.covers(each.key, each.provenance)]:
                if wiped_bytes > _WIPED_AT_ONCE:
                    yield chunks
                    chunks = wiped_bytes = 0
                if entry.state is not EntryState.GONE and (force or self._is_unused(entry)):
                    wiped_bytes += self._wipe_when_free(entry) if selector.tenants else 0
                    self.discard(entry.key, why=CLEARED)
                    chunks += 1
            yield chunks
            chunks = wiped_bytes = 0

    def discard(self, key: bytes, forms: Iterable[ChunkForm] = (), why: str = DELETED) -> None:
        if (entry := self.index.get(key)) is not None:
            self._remove(entry, why)

    def live(self, key: bytes) -> Entry | None:
        """The entry under this key. An expired one is deleted."""
        entry = self.index.get(key)
        if entry is None or not self.index.expiries.is_expired(entry, self._clock()):
            return entry
        self._expire(entry)
        return None

    def expire(self) -> bool:
        expired = self.index.expiries.expired(self._clock(), _LEAVE_AT_ONCE)
        for entry in expired:
            self._expire(entry)
        return len(expired) == _LEAVE_AT_ONCE

    def _expire(self, entry: Entry) -> None:
        self._metrics.expired.labels(self.label).inc()
        self._remove(entry, EXPIRED)

    def set_ttl(self, ttl: float) -> None:
        """Chunks that are here end then at the latest, too."""
        super().set_ttl(ttl)
        end, expiries = self._clock() + ttl, self.index.expiries
        for entry in self.index.entries() if end < FOREVER else ():
            expiries.set(entry, min(end, expiries.expiry(entry)))

    def need_fits(self, capacity: int) -> None:
        """Raises MisuseError if `resize` cannot do that."""
        self.index.need_room_for_pins(capacity)

    def resize(self, capacity: int) -> None:
        self.index.resize(capacity)

    def come_down(self, until: float) -> None:
        """Evict what is above a capacity that has become smaller, until a time.monotonic() or its end.

        Some are evicted also when that time has passed, because a step that was interrupted must progress.
        """
        index = self.index
        while (surplus := index.surplus) > 0:
            nearest = islice(index.entries_now(), _LEAVE_AT_ONCE)
            largest_bytes = max((entry.nbytes for entry in nearest), default=0)
            victims = index.evict(min(surplus, _LEAVE_AT_ONCE * largest_bytes)) or index.evict(1)
            if not victims:  # what is left has children that are in use
                break
            self._evicted(victims)
            self._free(victims)
            if time.monotonic() >= until:
                break
        index.come_down()
