"""Who leaves: LRU, S3-FIFO and ARC behind one interface.

A policy orders entries; it never decides that one may leave. The index asks for them in order and
skips what is leased, unfinished, or still has a child (a tail leaves before its head, whatever the
policy). `touch` and `refresh` are given a prefix tail first, so that its head ends up the youngest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Generator, Iterable
from itertools import chain
from typing import Generic, Protocol, TypeVar

from lmtier.errors import ConfigError


class Keyed(Protocol):
    """What is ordered: anything that hashes by identity and has a key that outlives it."""

    @property
    def key(self) -> bytes: ...


E = TypeVar("E", bound=Keyed)


class Policy(ABC, Generic[E]):
    @abstractmethod
    def insert(self, entry: E) -> None:
        """`entry` became resident."""

    @abstractmethod
    def touch(self, entries: Iterable[E]) -> None:
        """A new request saw these, tail first."""

    @abstractmethod
    def refresh(self, entries: Iterable[E]) -> None:
        """The same request goes on: keep these together with what it adds, but do not count a hit."""

    @abstractmethod
    def remove(self, entries: Iterable[E], evicted: bool) -> None:
        """These left: by eviction, which is remembered, or for another reason, which is not."""

    @abstractmethod
    def order(self) -> Generator[E, None, None]:
        """Who would leave, first to last. Lazy; the caller closes it before it calls anything else.

        May rearrange queues, never who is in them.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, entry: E) -> bool: ...


class LRU(Policy[E]):
    """Least recently used first. What recency-ruled KV traffic wants when memory is ample."""

    def __init__(self) -> None:
        self._queue: OrderedDict[E, None] = OrderedDict()

    def insert(self, entry: E) -> None:
        self._queue[entry] = None

    def touch(self, entries: Iterable[E]) -> None:
        move = self._queue.move_to_end
        for entry in entries:
            move(entry)

    refresh = touch

    def remove(self, entries: Iterable[E], evicted: bool) -> None:
        for entry in entries:
            del self._queue[entry]

    def order(self) -> Generator[E, None, None]:
        yield from self._queue

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, entry: E) -> bool:
        return entry in self._queue


class S3FIFO(Policy[E]):
    """A small queue tries newcomers, a main queue keeps what was seen again (Yang et al., SOSP'23).

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
        """Within the small queue a prefix stays in order, head youngest; elsewhere FIFO means FIFO."""
        for entry in entries:
            if entry in self._small:
                self._small.move_to_end(entry)

    def remove(self, entries: Iterable[E], evicted: bool) -> None:
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


class ARC(Policy[E]):
    """Seen once and seen again, each an LRU list; ghosts of both move the border (Megiddo, FAST'03)."""

    def __init__(self) -> None:
        self._once: OrderedDict[E, None] = OrderedDict()
        self._again: OrderedDict[E, None] = OrderedDict()
        self._once_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0  # how many of the residents `once` may be
        self._capacity = 0  # in entries: the most that were ever resident

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

    def touch(self, entries: Iterable[E]) -> None:
        once, again = self._once, self._again
        move = again.move_to_end
        for entry in entries:
            try:
                move(entry)  # the rule; asking first would cost as much again
            except KeyError:
                del once[entry]
                again[entry] = None

    def refresh(self, entries: Iterable[E]) -> None:
        for entry in entries:
            (self._once if entry in self._once else self._again).move_to_end(entry)

    def remove(self, entries: Iterable[E], evicted: bool) -> None:
        once, again = self._once, self._again
        self._capacity = max(self._capacity, len(once) + len(again))
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

    def order(self) -> Generator[E, None, None]:
        once, again = iter(self._once), iter(self._again)
        left = len(self._once)
        while left > self._target and (entry := next(once, None)) is not None:
            left -= 1
            yield entry
        yield from again
        yield from once

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, entry: E) -> bool:
        return entry in self._once or entry in self._again


POLICIES: dict[str, type[Policy[Keyed]]] = {"lru": LRU, "s3fifo": S3FIFO, "arc": ARC}


def make_policy(name: str) -> Policy[Keyed]:
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]()
