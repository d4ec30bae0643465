"""Copies of chunks in an engine's own GPU memory: which, and at which offset. Pure, no memory here.

Whatever is asked for here was promised by a match, so it is in the slab too, and leased there. A copy saves
it the way over the bus, nothing else: to have none, or to lose it, is never an error. A transfer's chunk has

    a copy that is there    the transfer reads it; it stays where it is until `done`
    a place to be filled    the transfer writes it; nobody reads it before it is `done`, and believed
    neither                 there is no room, or another transfer fills it just now: it goes its usual way

All ranks use the same offsets: a chunk takes as much as the largest shard of its form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmtier.errors import MisuseError
from lmtier.index import Entry, Index, State
from lmtier.layout import Form, padded
from lmtier.policy import make_policy
from lmtier.slab import Extents


class Place(NamedTuple):
    """Where one chunk lies, or is to lie. Two plain values, for messages."""

    offset: int
    is_there: bool
    """The copy is complete: read it. Otherwise: fill it."""


@dataclass(eq=False, slots=True)
class Places:
    """What one load or save works with, until `Hbm.done`."""

    near: tuple[Place | None, ...]
    """Of each of its chunks, in their order."""
    held: list[tuple[Entry, Entry]]
    """(our entry, the slab's) of those that have one; ours is leased."""

    @property
    def there(self) -> int:
        """Chunks that need no bus."""
        return sum(place is not None and place.is_there for place in self.near)


class Hbm:
    """`capacity` bytes of every rank. Called by one owner: whoever owns the engine's matches."""

    def __init__(self, capacity: int, policy: str = "lru") -> None:
        self.extents = Extents(capacity)
        self.index = Index(self.extents.capacity, make_policy(policy))
        self._open: set[Places] = set()

    def __repr__(self) -> str:
        return f"<Hbm {self.index!r} in use by {len(self._open)}>"

    def load(self, run: Sequence[Entry], form: Form) -> Places:
        """Places for these chunks of a match, head first, as payloads of `form`: its reader's."""
        ready = [self._ready(source, form) for source in run]
        for copy in ready:
            if copy is not None:
                self.index.lease(copy)  # before room is made for others
        self.index.touch([copy for copy in ready if copy is not None])
        return self._give(run, ready, form)

    def save(self, entries: Sequence[Entry], form: Form) -> Places:
        """Places for chunks that were just reserved, head first. Copies of what was there before are gone."""
        self.forget(entry.key for entry in entries)
        return self._give(entries, [None] * len(entries), form)

    def done(self, places: Places, *, believed: bool = True) -> None:
        """Nobody reads or writes these any more, on any rank. What was filled can be read from now on.

        `believed`: all of it arrived, and fingerprints agree where they were compared. Otherwise all of these
        are forgotten.
        """
        if places not in self._open:
            raise MisuseError("these places were given back before")
        self._open.remove(places)
        for copy, source in places.held:
            if believed and copy.state is State.FILLING:
                copy.prints = source.prints
                self.index.ready(copy)
                continue
            if not believed and copy.state is not State.GONE:
                self.index.remove(copy)
            if self.index.release(copy):
                self.extents.free(copy.offsets)

    def forget(self, keys: Iterable[bytes]) -> None:
        """At any time: what a transfer uses stays its own until it is done."""
        for key in keys:
            copy = self.index.get(key)
            if copy is not None and self.index.remove(copy):
                self.extents.free(copy.offsets)

    def clear(self) -> None:
        self.forget([copy.key for copy in self.index.entries()])

    def _ready(self, source: Entry, form: Form) -> Entry | None:
        copy = self.index.get(source.key)
        if copy is None or copy.state is not State.READY:
            return None
        # Other marks: computed anew since then, by somebody else. The same KV, but for its last bits.
        if copy.form is form and _marks(copy) == _marks(source):
            return copy
        self.forget([copy.key])
        return None

    def _give(self, run: Sequence[Entry], ready: Sequence[Entry | None], form: Form) -> Places:
        near: list[Place | None] = []
        held: list[tuple[Entry, Entry]] = []
        parent: Entry | None = None
        for source, there in zip(run, ready, strict=True):
            copy = there or self._put(source.key, form)
            near.append(None if copy is None else Place(copy.offsets[0], there is not None))
            if copy is not None:
                held.append((copy, source))
            here = self.index.get(source.key)
            if here is not None:
                if parent is not None:
                    self.index.link(here, parent)
                parent = here
        self.index.refresh([copy for copy, _ in held])
        places = Places(tuple(near), held)
        self._open.add(places)
        return places

    def _put(self, key: bytes, form: Form) -> Entry | None:
        if key in self.index:  # being filled
            return None
        nbytes = padded(max(form.sizes))
        while (offsets := self.extents.allocate([nbytes])) is None:
            # Enough may be free, and yet in pieces: then one more leaves.
            victims = self.index.evict(max(1, nbytes - self.index.free))
            if not victims:
                return None
            for victim in victims:
                self.extents.free(victim.offsets)
        copy = self.index.add(key, form, nbytes, State.FILLING, None)
        copy.offsets = offsets
        return copy

    def check(self) -> None:
        """Prove every invariant; raises AssertionError."""
        self.index.check()
        self.extents.check()
        leases = Counter(copy for places in self._open for copy, _ in places.held)
        indexed = self.index.entries()
        for copy in indexed:
            assert copy.leases == leases[copy], f"{copy!r} is in use by {leases[copy]}"
        for copy in leases.keys() - set(indexed):
            assert copy.state is State.GONE, f"{copy!r} is not indexed"
        at = 0
        for copy in sorted({*indexed, *leases}, key=lambda copy: copy.offsets):
            assert copy.offsets[0] >= at, f"{copy!r} overlaps another"
            at = copy.offsets[0] + copy.nbytes
        held = sum(copy.nbytes for copy in {*indexed, *leases})
        assert self.extents.used == self.index.used == held, "room without a copy, or the other way"


def _marks(entry: Entry) -> tuple[bytes, ...]:
    """Its fingerprints, if it has any."""
    return entry.prints if any(entry.prints) else ()
