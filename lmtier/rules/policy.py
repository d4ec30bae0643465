"""The eviction policies: LRU, S3-FIFO, ARC and an adaptive one, with one interface.

A policy orders entries; it never decides that one may leave. The index asks for them in order and
skips entries that are leased, unfinished, or have a child (with every policy a tail leaves before its
head). `touch` and `refresh` get a prefix tail first, so that its head ends up the youngest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence
from itertools import chain
from struct import Struct
from typing import Generic, Protocol, Self, TypeVar

from lmtier.errors import ConfigError


class Keyed(Protocol):
    """An item to order. It hashes by identity and has a key that outlives it."""

    @property
    def key(self) -> bytes: ...

    @property
    def parent(self) -> Self | None:
        """The entry before it in its chain, if it is resident. It cannot leave before this one."""


E = TypeVar("E", bound=Keyed)


class Policy(ABC, Generic[E]):
    @abstractmethod
    def insert(self, entry: E) -> None:
        """`entry` became resident."""

    @abstractmethod
    def touch(self, entries: Iterable[E]) -> None:
        """A new request used these, tail first."""

    @abstractmethod
    def refresh(self, entries: Iterable[E]) -> None:
        """The same request continues. Keep these with the entries that it adds, but count no hit."""

    @abstractmethod
    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        """These have left. An eviction is remembered; another reason is not."""

    @abstractmethod
    def order(self) -> Generator[E, None, None]:
        """The entries in order of eviction. Lazy; the caller closes it before any other call.

        It may rearrange queues, but adds and removes nothing.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, entry: E) -> bool: ...

    def another(self) -> Self:
        """An empty one of the same kind."""
        return type(self)()


class LRU(Policy[E]):
    """Least recently used first. It suits KV traffic when memory is ample."""

    def __init__(self) -> None:
        self._queue: OrderedDict[E, None] = OrderedDict()

    def insert(self, entry: E) -> None:
        self._queue[entry] = None

    def touch(self, entries: Iterable[E]) -> None:
        move = self._queue.move_to_end
        for entry in entries:
            move(entry)

    refresh = touch

    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        for entry in entries:
            del self._queue[entry]

    def order(self) -> Generator[E, None, None]:
        yield from self._queue

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, entry: E) -> bool:
        return entry in self._queue


class S3FIFO(Policy[E]):
    """New entries enter a small queue; those seen again move to a main queue (Yang et al., SOSP'23).

    The value of an entry is how often it was seen since it entered its queue, at most 3.
    """

    SMALL_SHARE = 0.1

    def __init__(self) -> None:
        self._small: OrderedDict[E, int] = OrderedDict()
        self._main: OrderedDict[E, int] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, entry: E) -> None:
        if self._ghost.pop(entry.key, 0) is None:
            self._main[entry] = 0
        else:
            self._small[entry] = 0

    def touch(self, entries: Iterable[E]) -> None:
        for entry in entries:
            queue = self._small if entry in self._small else self._main
            queue[entry] = min(3, queue[entry] + 1)

    def refresh(self, entries: Iterable[E]) -> None:
        """In the small queue a prefix stays in order, head youngest. The main queue is strictly FIFO."""
        for entry in entries:
            if entry in self._small:
                self._small.move_to_end(entry)

    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        for entry in entries:
            if self._small.pop(entry, None) is None:
                del self._main[entry]
            elif evicted:
                self._ghost[entry.key] = None
                while len(self._ghost) > max(16, len(self)):
                    self._ghost.popitem(last=False)

    def order(self) -> Generator[E, None, None]:
        promoted: list[E] = []
        again: list[E] = []
        spare = len(self._small) - max(1, int(len(self) * self.SMALL_SHARE))
        passed = 0
        try:
            for entry, seen in self._small.items():
                if passed >= spare and self._main:
                    break
                passed += 1
                if seen:
                    promoted.append(entry)
                else:
                    yield entry
            for entry, seen in self._main.items():
                if seen:
                    again.append(entry)
                else:
                    yield entry
            yield from chain(again, promoted)
            for number, entry in enumerate(self._small):
                if number >= passed:
                    yield entry
        finally:
            for entry in promoted:
                del self._small[entry]
                self._main[entry] = 0
            for entry in again:
                self._main[entry] -= 1
                self._main.move_to_end(entry)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, entry: E) -> bool:
        return entry in self._small or entry in self._main


class _TwoLists(Policy[E]):
    """Two lists in LRU order, for entries seen once and seen again, and a border between them."""

    def __init__(self) -> None:
        self._once: OrderedDict[E, None] = OrderedDict()
        self._again: OrderedDict[E, None] = OrderedDict()

    @property
    @abstractmethod
    def target(self) -> float:
        """How many residents the list `once` may have. While it has more, it shrinks first."""

    def touch(self, entries: Iterable[E]) -> None:
        once, again = self._once, self._again
        move = again.move_to_end
        for entry in entries:
            try:
                move(entry)  # the usual case; asking first would double the cost
            except KeyError:
                del once[entry]
                again[entry] = None

    def refresh(self, entries: Iterable[E]) -> None:
        for entry in entries:
            (self._once if entry in self._once else self._again).move_to_end(entry)

    def order(self) -> Generator[E, None, None]:
        once, again = iter(self._once), iter(self._again)
        left, target = len(self._once), self.target
        while left > target and (entry := next(once, None)) is not None:
            left -= 1
            yield entry
        yield from again
        yield from once

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, entry: E) -> bool:
        return entry in self._once or entry in self._again


class ARC(_TwoLists[E]):
    """The ghosts of both lists move the border (Megiddo, FAST'03)."""

    def __init__(self) -> None:
        super().__init__()
        self._once_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0
        self._capacity = 0  # how many entries fit: the most so far; evictions below that lower it

    @property
    def target(self) -> float:
        return self._target

    def insert(self, entry: E) -> None:
        if entry.key in self._once_ghosts:
            step = max(1.0, len(self._again_ghosts) / len(self._once_ghosts))
            self._target = min(self._capacity, self._target + step)
            del self._once_ghosts[entry.key]
            self._again[entry] = None
        elif entry.key in self._again_ghosts:
            step = max(1.0, len(self._once_ghosts) / len(self._again_ghosts))
            self._target = max(0.0, self._target - step)
            del self._again_ghosts[entry.key]
            self._again[entry] = None
        else:
            self._once[entry] = None

    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        once, again = self._once, self._again
        self._capacity = max(len(self), self._capacity - evicted * len(entries))
        self._target = min(self._target, self._capacity)
        for entry in entries:
            if entry in once:
                del once[entry]
                ghosts = self._once_ghosts
            else:
                del again[entry]
                ghosts = self._again_ghosts
            if evicted:
                ghosts[entry.key] = None
        if not evicted:
            return
        while len(self._once_ghosts) > max(0, self._capacity - len(once)):
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and len(self._once_ghosts) + len(self._again_ghosts) > self._capacity:
            self._again_ghosts.popitem(last=False)


class Adaptive(_TwoLists[E]):
    """New entries get no room, or half of it: whichever would have hit more lately.

    If memory is short, most entries leave before they are asked for again, and only entries that were seen
    before deserve room. If memory is ample, recency is worth more. Two small caches, which hold only keys,
    constantly test both on a sample of the keys. Entries that left lately are remembered in a few bits, so
    that they are not new when they return. docs/POLICIES.md has the figures.
    """

    SHARES = (0.0, 0.5)
    SAMPLE = 32  # one key in so many is tested
    PROOF = 12  # the lead in hits that only one of the two had, from which on it is used

    def __init__(self) -> None:
        super().__init__()
        self._left = _Recent()
        self._most = 0  # how many entries fit, as in ARC
        self._trials = [_Trial(share) for share in self.SHARES]
        self._balance = 0  # above 0, the second one hits more
        self.share = self.SHARES[0]

    @property
    def target(self) -> float:
        return self.share * len(self)

    def insert(self, entry: E) -> None:
        # A request for this chunk before was also one for its parent. Without this check the few chunks that
        # the filters mistake for known would keep whole prompts: their ancestors cannot leave.
        is_known = entry.key in self._left and (entry.parent is None or entry.parent not in self._once)
        (self._again if is_known else self._once)[entry] = None
        if entry.key[-1] % self.SAMPLE == 0:
            self._try(entry.key, is_known)

    def touch(self, entries: Iterable[E]) -> None:
        run = list(entries)
        super().touch(run)
        sample = self.SAMPLE
        for key in [entry.key for entry in run if entry.key[-1] % sample == 0]:
            self._try(key, True)

    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        once, again, left = self._once, self._again, self._left
        self._most = max(len(self), self._most - evicted * len(entries))
        for entry in entries:
            if entry in once:
                del once[entry]
            else:
                del again[entry]
            if evicted:
                left.add(entry.key, self._most)

    def _try(self, key: bytes, is_known: bool) -> None:
        room = max(1, max(self._most, len(self)) // self.SAMPLE)
        number = int.from_bytes(key[-8:])
        first, second = (trial.has(number, is_known, room) for trial in self._trials)
        if first is not second:
            self._balance = max(-self.PROOF, min(self.PROOF, self._balance + second - first))
            if abs(self._balance) == self.PROOF:
                self.share = self.SHARES[self._balance > 0]


class _Trial:
    """A cache that holds only keys, with the border at `share`."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()

    def has(self, key: int, is_known: bool, room: int) -> bool:
        """Whether it would have been a hit. Adds the key."""
        once, again = self._once, self._again
        if key in again:
            again.move_to_end(key)
            return True
        if key in once:
            del once[key]
            again[key] = None
            return True
        (again if is_known else once)[key] = None
        while len(once) + len(again) > room:
            (once if len(once) > self._share * room or not again else again).popitem(last=False)
        return False


class _Recent:
    """The keys that were added lately: the last 3 × `entries` of them, and some before those.

    A row of Bloom filters; the oldest is dropped when the youngest is full. One in twenty keys that were
    never added counts as added. The end is sharp: if one chunk in ten were forgotten, most prompts would be.
    """

    FILTERS = 4
    BITS = 10  # of a filter, per key
    LEAST = 512  # bytes of the smallest filter

    def __init__(self) -> None:
        self._filters: list[bytearray] = []
        self._room = 0

    def __contains__(self, key: bytes) -> bool:
        size = 0
        for bits in self._filters:
            if len(bits) != size:
                size = len(bits)
                a, b, c = _places(key, size)
            if bits[a >> 3] >> (a & 7) & bits[b >> 3] >> (b & 7) & bits[c >> 3] >> (c & 7) & 1:
                return True
        return False

    def add(self, key: bytes, entries: int) -> None:
        if not self._room:
            self._room = entries
            fresh = bytearray(max(self.LEAST, entries * self.BITS // 8))
            self._filters = [fresh, *self._filters[: self.FILTERS - 1]]
        self._room -= 1
        bits = self._filters[0]
        for place in _places(key, len(bits)):
            bits[place >> 3] |= 1 << (place & 7)


_TWO_NUMBERS = Struct("<QQ").unpack_from


def _places(key: bytes, nbytes: int) -> tuple[int, int, int]:
    """The bits of a key in a filter of `nbytes`. Keys are hashes, so no other hash is needed."""
    first, step = _TWO_NUMBERS(key, len(key) - 16)
    return first % (8 * nbytes), (first + step) % (8 * nbytes), (first + 2 * step) % (8 * nbytes)


POLICIES: dict[str, type[Policy[Keyed]]] = {"lru": LRU, "s3fifo": S3FIFO, "arc": ARC, "adaptive": Adaptive}


def make_policy(name: str) -> Policy[Keyed]:
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]()
