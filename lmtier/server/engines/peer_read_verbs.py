"""Verbs by which another lmtier server reads chunks from this server's memory: LMTIER.HAS and LMTIER.READ.

They only look at the slab and never ask a tier, so two servers that name each other do not ask in circles.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from xxhash import xxh3_128

from lmtier.core.cache import Cache
from lmtier.core.match import Entry, EntryState
from lmtier.format.layout import Name, padded
from lmtier.format.objects import NO_MARK, PAGE, Header, describe
from lmtier.rules.lifetimes import HeaderClock
from lmtier.server.commands import PAUSE, Argument, Caller, Payload, PendingAnswer, Refused

_STEP = 4 << 20
"""The bytes of which a turn makes the checksum: some .4 ms."""
_FEW = 256
"""The names that a turn looks up."""


class PeerReadVerbs:
    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._stamps = HeaderClock(time.monotonic(), time.time())

    def has(self, caller: Caller, arguments: list[Argument]) -> PendingAnswer:
        """The payload bytes of each named object, in whole pages; 0: it is not in memory."""
        sizes: list[int] = []
        for first in range(1, len(arguments), _FEW):
            names = _read_names(arguments[first : first + _FEW])
            for name in names:
                entry = self._find(name)
                sizes.append(padded(_size(entry, name)) if entry is not None else 0)
            # No insert follows, from which the policy of the memory would learn.
            self._cache.index.missed(dict.fromkeys(name.key for name in names))
            yield PAUSE
        return sizes

    def read(self, caller: Caller, arguments: list[Argument]) -> PendingAnswer:
        """One object, header page and payload, as any tier stores it; nothing, if it is not in memory."""
        cache = self._cache
        (name,) = _read_names(arguments[1:])
        entry = self._find(name)
        if entry is None:
            return None
        cache.index.touch([entry])
        cache.index.lease(entry)
        try:
            index, size, layout = entry.form.shards.index(name.shard), _size(entry, name), entry.form.layout
            assert layout is not None  # as of every chunk in the slab
            view = cache.slab.view(entry.offsets[index], padded(size))
            digest = xxh3_128()
            for at in range(0, size, _STEP):
                digest.update(view[at : min(size, at + _STEP)])
                yield PAUSE
            if self._find(name) is not entry:  # it has left meanwhile
                cache.memory.release(entry)
                return None
            expires = self._stamps.stamp(cache.index.expiries.expiry(entry))
            fingerprint = entry.marks[index] if entry.marks else NO_MARK
            header_page = bytearray(PAGE)
            header = Header(name, layout, size, fingerprint, expires=expires, provenance=entry.provenance)
            describe(memoryview(header_page), header, digest.digest())
        except BaseException:  # the reader is gone
            cache.memory.release(entry)
            raise
        return Payload(view, lambda: cache.memory.release(entry), bytes(header_page))

    def _find(self, name: Name) -> Entry | None:
        cache = self._cache
        if cache.index.is_record(name.key) or cache.forgotten_tenants.covers([name.key]):
            return None
        entry = cache.memory.live(name.key)
        is_filled = entry is not None and entry.state is EntryState.READY and name.shard in entry.form.shards
        return entry if is_filled else None


def _size(entry: Entry, name: Name) -> int:
    return entry.form.sizes[entry.form.shards.index(name.shard)]


def _read_names(arguments: Sequence[Argument]) -> list[Name]:
    names = [Name.parse(bytes(each).decode("latin-1")) for each in arguments]
    valid_names = [name for name in names if name is not None]
    if len(valid_names) < len(names):
        raise Refused("ERR an object is named by its key in hexadecimal, a dot, and its shard")
    return valid_names
