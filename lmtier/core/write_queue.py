"""The chunks that wait to be written to one lower tier, the next one first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from lmtier.core.index import Index
from lmtier.core.match import Entry
from lmtier.format.objects import Selector

_RECORDS_SHARE = 1 / 4
"""The part of the slab that acknowledged records may hold until this tier has written them."""


class WriteQueue:
    """The queue of chunks to write.

    A record is leased in the slab while it waits: it was acknowledged, and cannot be computed again. Any
    other chunk may leave the slab before its turn; then it is not written.
    """

    def __init__(
        self, slab: Index, release: Callable[[Entry], None], given_up: Callable[[bytes], None], most: int
    ) -> None:
        """`release` ends a lease in the slab. `given_up` hears which chunk will not be written.

        At most `most` chunks wait; records are not counted.
        """
        self._slab = slab
        self._release = release
        self._given_up = given_up
        self._most = most
        self._waiting = OrderedDict[bytes, Entry]()
        """A dict finds its first key only after it has skipped the places of all keys that have left. With a
        long queue each turn would do that."""
        self.leased: set[Entry] = set()
        """The entries of the slab that are leased until they are written."""
        self.leased_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def next(self) -> bytes:
        return next(iter(self._waiting))

    def under(self, prefix: bytes | tuple[bytes, ...]) -> list[bytes]:
        """The keys that begin with `prefix`, or with one of several."""
        return [key for key in self._waiting if key.startswith(prefix)]

    def has_room_for_record(self, nbytes: int) -> bool:
        leased_after = self.leased_bytes + nbytes
        return not self.leased_bytes or leased_after <= self._slab.capacity * _RECORDS_SHARE

    def has_room_for(self, entry: Entry) -> bool:
        if self._slab.is_record(entry.key):
            return self.has_room_for_record(entry.nbytes)
        return len(self._waiting) < self._most

    def add(self, entry: Entry) -> None:
        """A record that is not in the slab is given up at its turn."""
        self._waiting[entry.key] = entry
        if self._slab.is_record(entry.key) and self._slab.get(entry.key) is entry:
            self._slab.lease(entry)
            self.leased.add(entry)
            self.leased_bytes += entry.nbytes

    def take(self, key: bytes) -> Entry:
        """Remove the chunk from the queue: it is written now, or another one comes in its place."""
        entry = self._waiting.pop(key)
        self._unlease(entry)
        return entry

    def give_up(self, key: bytes) -> Entry:
        """Remove the chunk from the queue: it will not be written."""
        entry = self.take(key)
        self._given_up(key)
        return entry

    def postpone(self, key: bytes) -> None:
        """Move the chunk to the end of the queue."""
        self._waiting.move_to_end(key)

    def unlease_queued(self, selector: Selector) -> None:
        """Records that `selector` covers may leave the slab before they are written."""
        for entry in [entry for entry in self.leased if selector.concerns(entry.key)]:
            self._unlease(entry)

    def forget_missing(self) -> None:
        """Remove the chunks that the slab no longer has."""
        for key in [key for key in self._waiting if key not in self._slab]:
            self.give_up(key)

    def close(self) -> None:
        for entry in list(self.leased):
            self.take(entry.key)

    def _unlease(self, entry: Entry) -> None:
        if entry in self.leased:
            self.leased.remove(entry)
            self.leased_bytes -= entry.nbytes
            self._release(entry)

    def check(self) -> None:
        assert self.leased <= set(self._waiting.values()), "a chunk is leased but does not wait"
        assert self.leased_bytes == sum(entry.nbytes for entry in self.leased), "leased_bytes is wrong"
