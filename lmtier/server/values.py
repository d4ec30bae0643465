"""Named values that may change and expire, kept as chunks of one shard: what a Redis client thinks it stores.

    key    keys.value_key(name)
    mark   when it expires (i64, ms since the epoch; 0: never), its length (u64), its name
    bytes  as they were given; nobody looks into them

A value is received into a draft, which nobody sees, and takes its name when it is complete. Whatever
must be read from a tier is waited for: such calls are generators that yield until it is there.
"""

from __future__ import annotations

import heapq
import struct
import time
from bisect import bisect_left
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from lmtier.cache import Cache, Match, Reservation
from lmtier.codec import MARK_ROOM
from lmtier.index import State
from lmtier.keys import KEY_BYTES, VALUES, value_key
from lmtier.layout import Form, LayerShape, Layout, Shard, form_of
from lmtier.server.commands import PAUSE

_MARK = struct.Struct("<qQ")
MAX_NAME = MARK_ROOM - _MARK.size
_SHARD = Shard(0, 1, 0, 1)
ANY = form_of(None, (_SHARD,), (0,))
"""What a reader of a value asks for: it takes any size."""

_DRAFT_SHARE = 1 / 2  # of the slab that values on their way in may take: they may never be completed
_SNAPSHOT_SECONDS = 1.0
_FEW = 1024  # times at which something expires

T = TypeVar("T")
Waiting: TypeAlias = "Generator[bytes | None, None, T]"


class Mark(NamedTuple):
    """What is known of a value without its bytes."""

    expires: int
    nbytes: int
    name: bytes

    def pack(self) -> bytes:
        return _MARK.pack(self.expires, self.nbytes) + self.name

    @classmethod
    def parse(cls, mark: bytes) -> Mark | None:
        if len(mark) < _MARK.size:
            return None
        expires, nbytes = _MARK.unpack_from(mark)
        return cls(expires, nbytes, mark[_MARK.size :])


@dataclass(eq=False, slots=True)
class Draft:
    """Room for a value that is being received."""

    reservation: Reservation
    view: memoryview


@dataclass(eq=False, slots=True)
class Value:
    """A value in the slab, leased until it is let go of."""

    mark: Mark
    view: memoryview
    match: Match


@dataclass(eq=False, slots=True)
class Watch:
    """Names that somebody wants to hear of: has one of them changed?"""

    keys: dict[bytes, bool] = field(default_factory=dict)
    """And whether they were there."""
    is_over: bool = False
    """One has."""


class Values:
    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._count = cache.metrics.values
        self._drafts = count()
        self._drafting = 0
        """Bytes of the slab that drafts take."""
        self._expiring: list[tuple[int, bytes]] = []
        self._most_expiring = _FEW
        self._watches: dict[bytes, set[Watch]] = {}
        """By the key that is watched."""
        self._snapshot: tuple[float, float, list[bytes]] = (0.0, 0.0, [])
        """All keys in order: as they were then, until when they may be used."""

    # ---- in

    def watch(self, watch: Watch, names: Iterable[bytes]) -> None:
        for key in map(value_key, names):
            if key not in watch.keys:
                watch.keys[key] = self._is_there(key)
                self._watches.setdefault(key, set()).add(watch)

    def unwatch(self, watch: Watch) -> None:
        for key in watch.keys:
            watches = self._watches[key]
            watches.remove(watch)
            if not watches:
                del self._watches[key]
        watch.keys = {}

    def has_changed(self, watch: Watch) -> bool:
        """Also if it was evicted, or cleared, or its time is over: of that nobody tells."""
        return watch.is_over or any(was and not self._is_there(key) for key, was in watch.keys.items())

    def _is_there(self, key: bytes) -> bool:
        mark = self._known(key)
        is_over = mark is not None and 0 < mark.expires <= now_ms()
        return not is_over and any(key in held for held in self._places())

    def _forget(self, key: bytes) -> None:
        self._cache.forget(key, ANY)
        self._changed(key)

    def _changed(self, key: bytes) -> None:
        for watch in self._watches.get(key, ()):
            watch.is_over = True

    def draft(self, nbytes: int) -> Draft | None:
        """Room for a value of `nbytes`, or None: there is none."""
        cache = self._cache
        form = _form(nbytes, cache.chunk_tokens)
        if self._drafting + form.room <= cache.index.capacity * _DRAFT_SHARE:
            key = VALUES + next(self._drafts).to_bytes(KEY_BYTES - len(VALUES), "little")
            reservation = cache.reserve([key], form)
            if reservation.entries:
                self._drafting += form.room
                (entry,) = reservation.entries.values()
                return Draft(reservation, cache.slab.view(entry.offsets[0], nbytes))
        cache.no_room_at = time.monotonic()
        self._count.labels("refused").inc()
        return None

    def drop(self, draft: Draft) -> None:
        """It will not be completed."""
        self._drafting -= draft.reservation.form.room
        self._cache.abort(draft.reservation)

    def put(self, draft: Draft, name: bytes, expires: int = 0) -> Waiting[bool]:
        """Give a complete draft its name, in place of what had it. True when no restart can find the old one.

        False: it is to be had, but a tier keeps failing to delete the old one.
        """
        cache, key = self._cache, value_key(name)
        try:
            while cache.is_behind:  # the next one is told it is kept when there is a place to keep it
                yield None
        except GeneratorExit:
            self.drop(draft)
            raise
        self._drafting -= draft.reservation.form.room
        (entry,) = draft.reservation.entries.values()
        if entry.state is State.GONE:  # cleared by force while it came: as if it had been here by then
            cache.forget(key, ANY)
            cache.commit(draft.reservation)
        else:
            cache.replace(draft.reservation, key, Mark(expires, len(draft.view), name).pack())
        self._changed(key)
        if expires:
            self._will_expire(expires, key)
        self._count.labels("set").inc()
        return (yield from self._gone([key]))

    # ---- out

    def get(self, name: bytes) -> Waiting[Value | None]:
        """The value, leased: `release` it."""
        cache, key = self._cache, value_key(name)
        while True:
            match = cache.match([key], ANY)
            try:
                cache.prefetch(match)
                while not match.ready:
                    yield None
                value = self._value(match, name)
            except GeneratorExit:
                cache.release(match)
                raise
            if match.cut != "cleared" and (value is None or match.run[0].state is State.READY):
                break
            cache.release(match)  # while it was waited for it was replaced, or deleted: what is there now?
        self._count.labels("missed" if value is None else "hit").inc()
        if value is None:
            cache.release(match)
        return value

    def _value(self, match: Match, name: bytes) -> Value | None:
        if not match.run:
            return None
        (entry,) = match.run
        mark = Mark.parse(entry.prints[0]) if entry.prints else None
        if mark is None or mark.name != name or mark.nbytes > entry.nbytes:
            return None
        if self._is_over(entry.key, mark):
            return None
        return Value(mark, self._cache.slab.view(entry.offsets[0], mark.nbytes), match)

    def release(self, value: Value) -> None:
        self._cache.release(value.match)

    def mark(self, name: bytes) -> Waiting[Mark | None]:
        """What is known of a value; its header is read if it lies below and was not seen before."""
        mark = yield from self._mark(value_key(name))
        return mark if mark is not None and mark.name == name else None

    def _mark(self, key: bytes) -> Waiting[Mark | None]:
        entry = self._cache.index.get(key)
        if entry is not None and entry.state is State.READY:
            mark = Mark.parse(entry.prints[0]) if entry.prints else None
        else:
            mark = yield from self._mark_below(key)
        return None if mark is None or self._is_over(key, mark) else mark

    def _mark_below(self, key: bytes) -> Waiting[Mark | None]:
        for below in self._cache.below:
            if below.index is None or not below.holds(key, ANY):
                continue
            entry = below.index.get(key)
            if entry is not None and entry.prints:
                return Mark.parse(entry.prints[0])
            heard: list[object] = []
            below.peek(key, heard.append)
            until = time.monotonic() + self._cache.config.load_deadline
            while not heard and time.monotonic() < until:
                yield None
            if below.index.get(key) is not entry:  # replaced, or deleted, while it was waited for
                return (yield from self._mark(key))
            if heard and isinstance(heard[0], bytes):
                return Mark.parse(heard[0])
        return None

    # ---- all of them

    def __len__(self) -> int:
        most, *others = sorted(self._places(), key=len, reverse=True)
        return len(most) + len(set().union(*others) - most)

    def _places(self) -> list[set[bytes]]:
        indexes = (below.index for below in self._cache.below if below.index is not None)
        return [self._cache.index.names, *(index.names for index in indexes)]

    def _keys(self) -> set[bytes]:
        return set().union(*self._places())

    def _in_order(self) -> Waiting[list[bytes]]:
        """All keys as they are now, sorted; a million takes a second, and not from others."""
        parts: list[list[bytes]] = [[] for _ in range(256)]
        for number, key in enumerate(self._keys()):
            parts[key[len(VALUES)]].append(key)
            if not number % _FEW:
                yield PAUSE
        keys: list[bytes] = []
        for part in parts:
            keys += sorted(part)
            yield PAUSE
        return keys

    def scan(self, cursor: int, most: int) -> Waiting[tuple[int, list[bytes]]]:
        """Names from `cursor` on, in an order that changes do not disturb, and where to go on; 0: nowhere.

        A value that is there from the first call to the last is returned.
        """
        _, until, keys = self._snapshot
        if not cursor or time.monotonic() > until:
            taken = time.monotonic()
            keys = yield from self._in_order()
            # An older one, which another scan was slow to sort, may lack what this scan must return.
            self._snapshot = max(self._snapshot, (taken, time.monotonic() + _SNAPSHOT_SECONDS, keys))
        at = bisect_left(keys, cursor, key=_position)
        end = min(len(keys), at + most)
        while end < len(keys) and end > at and _position(keys[end]) == _position(keys[end - 1]):
            end += 1  # the cursor would point between equals
        names = []
        for key in keys[at:end]:
            mark = yield from self._mark(key)
            if mark is not None:
                names.append(mark.name)
            yield PAUSE
        return (_position(keys[end]) if end < len(keys) else 0), names

    def forget(self, *names: bytes) -> Waiting[int | None]:
        """Delete them for good; how many there were. None: a tier keeps failing to delete."""
        deleted = 0
        keys = []
        for name in names:
            keys.append(value_key(name))
            was_there = (yield from self.mark(name)) is not None
            if was_there:
                deleted += 1
                self._count.labels("deleted").inc()
            # A tier that fails may hold it all the same, and show it when it has recovered.
            if was_there or any(keys[-1] in held for held in self._places()):
                self._forget(keys[-1])
            yield PAUSE
        # Also those that somebody else deletes just now: what is not there must not come back.
        return deleted if (yield from self._gone(keys)) else None

    def clear(self) -> Waiting[bool]:
        """Delete all for good; not those that are being received."""
        keys = list(self._keys())
        for key in keys:
            self._forget(key)
            yield PAUSE
        self._count.labels("deleted").inc(len(keys))
        return (yield from self._gone(keys))

    def retime(self, name: bytes, expires: int) -> Waiting[bool | None]:
        """Let it expire at another time. None: it is not there; False: no room for the copy it takes."""
        value = yield from self.get(name)
        if value is None:
            return None
        draft = self.draft(len(value.view))
        if draft is not None:
            np.copyto(np.frombuffer(draft.view, np.uint8), np.frombuffer(value.view, np.uint8))
        self.release(value)
        return draft is not None and (yield from self.put(draft, name, expires))

    def expire(self) -> int:
        """Delete what is over, as far as it is known; the rest when somebody asks for it."""
        now, over = now_ms(), 0
        while self._expiring and self._expiring[0][0] <= now:
            _, key = heapq.heappop(self._expiring)
            mark = self._known(key)
            over += mark is not None and self._is_over(key, mark)  # it may have been set anew meanwhile
        return over

    def _will_expire(self, expires: int, key: bytes) -> None:
        heapq.heappush(self._expiring, (expires, key))
        if len(self._expiring) > self._most_expiring:  # most were set anew, or have left
            marks = {key: self._known(key) for _, key in self._expiring}
            live = {(mark.expires, key) for key, mark in marks.items() if mark is not None and mark.expires}
            self._expiring = sorted(live)
            self._most_expiring = max(_FEW, 2 * len(live))

    def _known(self, key: bytes) -> Mark | None:
        """What is known of a value without asking a tier."""
        entry = self._cache.index.get(key)
        for below in () if entry is not None else self._cache.below:
            entry = entry or (below.index.get(key) if below.index is not None else None)
        return Mark.parse(entry.prints[0]) if entry is not None and entry.prints else None

    def _is_over(self, key: bytes, mark: Mark) -> bool:
        if not mark.expires or mark.expires > now_ms():
            return False
        self._forget(key)
        self._count.labels("expired").inc()
        return True

    def _gone(self, keys: list[bytes]) -> Waiting[bool]:
        """Wait until no restart can find them. False: none of them has gone for too long."""
        is_leaving, patience = self._cache.is_leaving, self._cache.config.load_deadline
        until = time.monotonic() + patience
        for key in keys:  # what has gone comes back under this key only as another value
            if is_leaving(key):
                until = time.monotonic() + patience
            while is_leaving(key):
                if time.monotonic() > until:
                    return False
                yield None
            yield PAUSE
        return True


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _position(key: bytes) -> int:
    """Where a scan meets this key: 1 to 2**48."""
    return int.from_bytes(key[len(VALUES) : len(VALUES) + 6], "big") + 1


@lru_cache(maxsize=1024)
def _form(nbytes: int, chunk_tokens: int) -> Form:
    layout = Layout((LayerShape(1, max(1, nbytes), 0),), "u8", chunk_tokens, chunk_tokens, "value")
    return form_of(layout, (_SHARD,))
