"""Named values that may change and expire, for Redis clients. They are stored as chunks of one shard.

    key    keys.value_key(name)
    mark   when it expires (i64, ms since the epoch; 0: never), its length (u64), its name
    bytes  unchanged

A value is received into a draft, which is invisible, and gets its name when it is complete. Calls that must
wait for a tier are generators, which yield until the value is loaded.
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

from lmtier.core.cache import Cache
from lmtier.core.grant import Grant
from lmtier.core.match import DELETED, EntryState, Lookup
from lmtier.errors import MisuseError
from lmtier.format.keys import KEY_BYTES, VALUES, value_key
from lmtier.format.layout import ChunkForm, LayerShape, Layout, Shard, form_of
from lmtier.format.objects import MARK_ROOM, now_ms
from lmtier.server.commands import PAUSE

_MARK = struct.Struct("<qQ")
MAX_NAME = MARK_ROOM - _MARK.size
_SHARD = Shard(0, 1, 0, 1)
ANY = form_of(None, (_SHARD,), (0,))
"""The form of a reader of values: it accepts any size."""

_DRAFT_SHARE = 1 / 2  # the part of the slab for unfinished values, which may never be completed
_SNAPSHOT_SECONDS = 1.0
_FEW = 1024  # times at which something expires
_AT_ONCE = 64  # values that are deleted in one turn
_PIECE = 4 << 20  # bytes that are copied in one turn

T = TypeVar("T")
Waiting: TypeAlias = "Generator[bytes | None, None, T]"


class ValueInfo(NamedTuple):
    """The facts about a value without its bytes."""

    expires: int
    nbytes: int
    name: bytes

    def pack(self) -> bytes:
        return _MARK.pack(self.expires, self.nbytes) + self.name

    @classmethod
    def parse(cls, mark: bytes) -> ValueInfo | None:
        if len(mark) < _MARK.size:
            return None
        expires, nbytes = _MARK.unpack_from(mark)
        return cls(expires, nbytes, mark[_MARK.size :])


@dataclass(eq=False, slots=True)
class Draft:
    """Room for a value that is being received."""

    grant: Grant
    view: memoryview


@dataclass(eq=False, slots=True)
class Value:
    """A value in the slab, leased until it is released."""

    info: ValueInfo
    view: memoryview
    match: Lookup


@dataclass(eq=False, slots=True)
class Watch:
    """Watched names: whether one of them has changed."""

    keys: dict[bytes, bool] = field(default_factory=dict)
    """The watched keys, and whether each existed."""
    is_broken: bool = False
    """One of them has changed."""


class Values:
    def __init__(self, cache: Cache) -> None:
        if not cache.index.is_record(VALUES):
            raise MisuseError("the cache was opened for KV only; open it with is_record=is_value")
        self._cache = cache
        self._count = cache.metrics.values
        for event in ("hit", "missed", "set", "deleted", "expired", "refused"):
            self._count.labels(event)  # starts at 0, so that the first one shows as a rise
        self._drafts = count()
        self._drafting = 0
        """Bytes of the slab in drafts."""
        self.no_room_at = float("-inf")
        """When a value that can fit last found no room, in time.monotonic()."""
        self._expiring: list[tuple[int, bytes]] = []
        self._most_expiring = _FEW
        self._watches: dict[bytes, set[Watch]] = {}
        """The watches of each key."""
        self._snapshot: tuple[float, float, list[bytes]] = (0.0, 0.0, [])
        """All keys in order: the time of the snapshot, the time until which it may be used, and the keys."""

    # ---- writing

    def watch(self, watch: Watch, names: Iterable[bytes]) -> None:
        for key in map(value_key, names):
            if key not in watch.keys:
                watch.keys[key] = self._exists(key)
                self._watches.setdefault(key, set()).add(watch)

    def unwatch(self, watch: Watch) -> None:
        for key in watch.keys:
            watches = self._watches[key]
            watches.remove(watch)
            if not watches:
                del self._watches[key]
        watch.keys = {}

    def has_changed(self, watch: Watch) -> bool:
        """Whether a name has changed.

        It also checks for evictions, clears and expiry, which send no event.
        """
        return watch.is_broken or any(was and not self._exists(key) for key, was in watch.keys.items())

    def _exists(self, key: bytes) -> bool:
        mark = self._info_in_memory(key)
        is_expired = mark is not None and 0 < mark.expires <= now_ms()
        return not is_expired and any(key in keys for keys in self._key_sets())

    def _delete(self, key: bytes) -> None:
        self._cache.discard(key, why=DELETED)
        self._changed(key)

    def _changed(self, key: bytes) -> None:
        for watch in self._watches.get(key, ()):
            watch.is_broken = True

    def draft(self, nbytes: int) -> Draft | None:
        """Room for a value of `nbytes`. None: there is none."""
        cache = self._cache
        form = _form(nbytes, cache.chunk_tokens)
        max_draft_bytes = cache.index.capacity * _DRAFT_SHARE
        if self._drafting + form.slab_bytes <= max_draft_bytes:
            key = VALUES + next(self._drafts).to_bytes(KEY_BYTES - len(VALUES), "little")
            grant = cache.reserve([key], form)
            if grant.chunks:
                self._drafting += form.slab_bytes
                return Draft(grant, cache.slab.view(grant.placement.offsets[0][0], nbytes))
        if form.slab_bytes <= max_draft_bytes:  # for a value that never fits, other clients need not hurry
            self.no_room_at = time.monotonic()
        self._count.labels("refused").inc()
        return None

    def discard_draft(self, draft: Draft) -> None:
        """Give up a draft that will not be completed."""
        self._drafting -= draft.grant.form.slab_bytes
        self._cache.abort(draft.grant)

    def put(self, draft: Draft, name: bytes, expires: int = 0) -> Waiting[None]:
        """Give a complete draft its name, and replace an older value.

        It waits only while too many values wait to be written. Of values that follow each other under one
        name a tier writes the newest, and at a kill a restart finds the one that was written last.
        """
        cache, key = self._cache, value_key(name)
        try:
            nbytes = draft.grant.form.slab_bytes
            while cache.is_behind(nbytes):  # acknowledge it only when there is room in a tier's queue
                yield None
        except GeneratorExit:
            self.discard_draft(draft)
            raise
        self._drafting -= draft.grant.form.slab_bytes
        cache.commit_value(draft.grant, key, ValueInfo(expires, len(draft.view), name).pack())
        self._changed(key)
        if expires:
            self._will_expire(expires, key)
        self._count.labels("set").inc()

    # ---- reading

    def get(self, name: bytes) -> Waiting[Value | None]:
        """The value, leased. The caller must `release` it."""
        cache, key = self._cache, value_key(name)
        while True:
            match = cache.match([key], ANY)
            try:
                cache.prefetch(match)
                while not match.is_ready:
                    yield None
                value = self._value(match, name)
            except GeneratorExit:
                cache.release(match)
                raise
            if match.cut_reason != "cleared" and (value is None or match.run[0].state is EntryState.READY):
                break
            cache.release(match)  # it was replaced or deleted during the wait, so look it up again
        self._count.labels("missed" if value is None else "hit").inc()
        if value is None:
            cache.release(match)
        return value

    def _value(self, match: Lookup, name: bytes) -> Value | None:
        if not match.run:
            return None
        (entry,) = match.run
        mark = ValueInfo.parse(entry.marks[0]) if entry.marks else None
        if mark is None or mark.name != name or mark.nbytes > entry.nbytes:
            return None
        # One that was replaced during the wait says nothing about what has its key now.
        if entry.state is EntryState.READY and self._delete_if_expired(entry.key, mark):
            return None
        return Value(mark, self._cache.slab.view(entry.offsets[0], mark.nbytes), match)

    def release(self, value: Value) -> None:
        self._cache.release(value.match)

    def find_info(self, name: bytes) -> Waiting[ValueInfo | None]:
        """The mark of a value. If it is only in a lower tier, its header may have to be read."""
        mark = yield from self._find_info(value_key(name))
        return mark if mark is not None and mark.name == name else None

    def _find_info(self, key: bytes) -> Waiting[ValueInfo | None]:
        entry = self._cache.index.get(key)
        if entry is not None and entry.state is EntryState.READY:
            mark = ValueInfo.parse(entry.marks[0]) if entry.marks else None
        else:
            mark = yield from self._find_info_in_tiers(key)
        return None if mark is None or self._delete_if_expired(key, mark) else mark

    def _find_info_in_tiers(self, key: bytes) -> Waiting[ValueInfo | None]:
        for tier in self._cache.lower.owned:
            if not tier.is_stored(key, ANY):
                continue
            entry = tier.index.get(key)
            if entry is not None and entry.marks:
                return ValueInfo.parse(entry.marks[0])
            replies: list[object] = []
            tier.peek(key, replies.append)
            deadline = time.monotonic() + self._cache.config.load_deadline
            while not replies and time.monotonic() < deadline:
                yield None
            if tier.index.get(key) is not entry:  # replaced or deleted during the wait
                return (yield from self._find_info(key))
            if replies and isinstance(replies[0], bytes):
                return ValueInfo.parse(replies[0])
        return None

    # ---- all of them

    def __len__(self) -> int:
        largest, *smaller = sorted(self._key_sets(), key=len, reverse=True)
        return len(largest) + len(set().union(*smaller) - largest)

    def _key_sets(self) -> list[set[bytes]]:
        return [self._cache.index.records, *(tier.index.records for tier in self._cache.lower.owned)]

    def _keys(self) -> set[bytes]:
        return set().union(*self._key_sets())

    def _in_order(self) -> Waiting[list[bytes]]:
        """All present keys, sorted. A million keys take a second, but other clients get their turns."""
        buckets: list[list[bytes]] = [[] for _ in range(256)]
        for number, key in enumerate(self._keys()):
            buckets[key[len(VALUES)]].append(key)
            if not number % _FEW:
                yield PAUSE
        keys: list[bytes] = []
        for part in buckets:
            keys += sorted(part)
            yield PAUSE
        return keys

    def scan(self, cursor: int, most: int) -> Waiting[tuple[int, list[bytes]]]:
        """Names from `cursor` on, in a stable order, and the next cursor; 0: the end.

        A value that exists from the first call to the last is always returned.
        """
        _, valid_until, keys = self._snapshot
        if not cursor or time.monotonic() > valid_until:
            taken_at = time.monotonic()
            keys = yield from self._in_order()
            # An older snapshot, from a slow sort of another scan, may lack a value that this scan must
            # return.
            self._snapshot = max(self._snapshot, (taken_at, time.monotonic() + _SNAPSHOT_SECONDS, keys))
        first = bisect_left(keys, cursor, key=_position)
        end = min(len(keys), first + most)
        while end < len(keys) and end > first and _position(keys[end]) == _position(keys[end - 1]):
            end += 1  # otherwise the cursor would point between equal positions
        names = []
        for key in keys[first:end]:
            mark = yield from self._find_info(key)
            if mark is not None:
                names.append(mark.name)
            yield PAUSE
        return (_position(keys[end]) if end < len(keys) else 0), names

    def delete(self, *names: bytes) -> Waiting[int | None]:
        """Delete these values permanently. Returns how many existed. None: a tier keeps failing to delete."""
        deleted = 0
        keys = []
        for name in names:
            keys.append(value_key(name))
            existed = (yield from self.find_info(name)) is not None
            if existed:
                deleted += 1
                self._count.labels("deleted").inc()
            # A failing tier may still have the value, and show it after it has recovered.
            if existed or any(keys[-1] in held for held in self._key_sets()):
                self._delete(keys[-1])
            yield PAUSE
        # Also wait for values that another client deletes now: a missing value must not come back.
        return deleted if (yield from self._wait_until_deleted(keys)) else None

    def clear(self) -> Waiting[bool]:
        """Delete all values permanently, except those that are being received."""
        keys = list(self._keys())
        for key in keys:
            self._delete(key)
            yield PAUSE
        self._count.labels("deleted").inc(len(keys))
        return (yield from self._wait_until_deleted(keys))

    def set_expiry(self, name: bytes, expires: int) -> Waiting[bool | None]:
        """Change when a value expires. None: it does not exist. False: there is no room for its copy."""
        while (value := (yield from self.get(name))) is not None:
            draft = self.draft(len(value.view))
            if draft is None:
                self.release(value)
                return False
            if (yield from self._copy(value, draft)):
                yield from self.put(draft, name, expires)
                return True
            self.discard_draft(draft)
        return None

    def _copy(self, value: Value, draft: Draft) -> Waiting[bool]:
        """Copy a value, and wait until the copy may be put. False: the value was deleted meanwhile."""
        (entry,) = value.match.run
        source, target = np.frombuffer(value.view, np.uint8), np.frombuffer(draft.view, np.uint8)
        try:
            for first in range(0, len(source), _PIECE):
                if first:
                    yield PAUSE
                np.copyto(target[first : first + _PIECE], source[first : first + _PIECE])
            while self._cache.is_behind(draft.grant.form.slab_bytes):
                yield None
        except GeneratorExit:
            self.discard_draft(draft)
            raise
        finally:
            self.release(value)
        return entry.state is EntryState.READY

    def expire(self) -> bool:
        """Delete some of the values known to have expired. Returns whether there may be more.

        Those that are not known to have expired are deleted when a client asks for them.
        """
        now = now_ms()
        for _ in range(_AT_ONCE):
            if not self._expiring or self._expiring[0][0] > now:
                return False
            _, key = heapq.heappop(self._expiring)
            if (mark := self._info_in_memory(key)) is not None:
                self._delete_if_expired(key, mark)  # it may have been set again since
        return True

    def restore_expiries(self) -> None:
        """Find out when the values expire that were in memory before this process."""
        for key in self._cache.index.records:
            if (mark := self._info_in_memory(key)) is not None and mark.expires:
                self._will_expire(mark.expires, key)

    def _will_expire(self, expires: int, key: bytes) -> None:
        heapq.heappush(self._expiring, (expires, key))
        if len(self._expiring) > self._most_expiring:  # most of them were set again, or have left
            infos = {key: self._info_in_memory(key) for _, key in self._expiring}
            live = {(mark.expires, key) for key, mark in infos.items() if mark is not None and mark.expires}
            self._expiring = sorted(live)
            self._most_expiring = max(_FEW, 2 * len(live))

    def _info_in_memory(self, key: bytes) -> ValueInfo | None:
        """The info of a value, if it is known without asking a tier."""
        entry = self._cache.index.get(key)
        for tier in () if entry is not None else self._cache.lower.owned:
            entry = entry or tier.index.get(key)
        return ValueInfo.parse(entry.marks[0]) if entry is not None and entry.marks else None

    def _delete_if_expired(self, key: bytes, mark: ValueInfo) -> bool:
        if not mark.expires or mark.expires > now_ms():
            return False
        self._delete(key)
        self._count.labels("expired").inc()
        return True

    def _wait_until_deleted(self, keys: list[bytes]) -> Waiting[bool]:
        """Wait until no restart can find these keys.

        False: for too long, no more of them could be deleted.
        """
        is_leaving, timeout = self._cache.may_come_back, self._cache.config.load_deadline
        deadline = time.monotonic() + timeout
        for n, key in enumerate(keys):  # a deleted key comes back only with another value
            if n:
                yield PAUSE
            if is_leaving(key):
                deadline = time.monotonic() + timeout
            while is_leaving(key):
                if time.monotonic() > deadline:
                    return False
                yield None
        return True


def _position(key: bytes) -> int:
    """The position of a key in a scan: 1 to 2**48."""
    return int.from_bytes(key[len(VALUES) : len(VALUES) + 6], "big") + 1


@lru_cache(maxsize=1024)
def _form(nbytes: int, chunk_tokens: int) -> ChunkForm:
    layout = Layout((LayerShape(1, max(1, nbytes), 0),), "u8", chunk_tokens, chunk_tokens, "value")
    return form_of(layout, (_SHARD,))
