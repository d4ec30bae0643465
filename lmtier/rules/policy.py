"""The eviction policies, with one interface: LRU, and one that learns how fast newcomers should age.

A policy orders entries; it never decides that one may leave. The index asks for them in order and
skips entries that are leased, unfinished, or have a child (with every policy a tail leaves before its
head). `touch` and `refresh` get a prefix tail first, so that its head ends up the youngest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import Generic, Protocol, Self, TypeVar

from lmtier.errors import ConfigError


class Keyed(Protocol):
    """An item to order. It hashes by identity and has a key that outlives it."""

    last_used_ns: int

    @property
    def key(self) -> bytes: ...

    @property
    def parent(self) -> Self | None:
        """The entry before it in its chain, if it is resident. It cannot leave before this one."""


E = TypeVar("E", bound=Keyed)
T = TypeVar("T")


class Policy(ABC, Generic[E]):
    @abstractmethod
    def insert(self, *entries: E) -> None:
        """These became resident, in this order."""

    @abstractmethod
    def touch(self, entries: Iterable[E]) -> None:
        """A new request used these, tail first."""

    @abstractmethod
    def refresh(self, entries: Iterable[E]) -> None:
        """The same request continues. Keep these with the entries that it adds, but count no hit."""

    @abstractmethod
    def on_miss(self, keys: Sequence[bytes]) -> None:
        """A request asked for these, which are not here, and it will not add them."""

    @abstractmethod
    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        """These have left. An eviction is remembered; another reason is not."""

    @abstractmethod
    def order(self) -> Generator[E, None, None]:
        """The entries in order of eviction. Lazy; the caller closes it before any other call.

        It may rearrange queues, but adds and removes nothing.
        """

    def speed(self, entry: E) -> int:
        """How many times as fast as for others time passes for this entry."""
        return 1

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, entry: E) -> bool: ...

    def another(self) -> Self:
        """An empty one of the same kind."""
        return type(self)()


class LRU(Policy[E]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._queue: OrderedDict[E, None] = OrderedDict()

    def insert(self, *entries: E) -> None:
        self._queue.update(dict.fromkeys(entries))

    def touch(self, entries: Iterable[E]) -> None:
        move = self._queue.move_to_end
        for entry in entries:
            move(entry)

    refresh = touch

    def on_miss(self, keys: Sequence[bytes]) -> None: ...

    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        for entry in entries:
            del self._queue[entry]

    def order(self) -> Generator[E, None, None]:
        yield from self._queue

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, entry: E) -> bool:
        return entry in self._queue


class Aging(Policy[E]):
    """Least recently used first, where time passes faster for what was used once.

    At a rate of 1 this is LRU. It is best where the next use is near, or memory is ample. At a huge rate,
    what was used once leaves first. That is best where memory is so short that most entries leave before
    their next use. Small caches, which hold only keys, test some rates on a sample of the keys, and the one
    that hits most is used. Entries that left lately are remembered in a few bits, so that they are not new
    when they return. docs/POLICIES.md has the figures.
    """

    RATES = (1, 2, 8, 1 << 30)
    TESTED = 1024
    """The least places of a small cache. When it has twice as many, it is tested with half of its keys."""
    SAMPLE = 64
    """One key in so many is tested at least."""
    PROOF = 48.0
    """The lead in hits that another rate needs, where each key is tested. Smaller samples need less."""

    def __init__(self) -> None:
        self._now = 0
        """Counts requests."""
        # Each entry with the time of its last use, which is also the order.
        self._once: OrderedDict[E, int] = OrderedDict()
        self._again: OrderedDict[E, int] = OrderedDict()
        self._left = _Recent()
        self._most = 0
        """How many entries fit: the most so far. Evictions below that lower it."""
        self._trials: list[_Trial] = []
        """Empty until the cache is full or large. Before that, each would hold what the cache holds."""
        self._behind = [0.0 for _ in self.RATES]
        """By how many hits each rate is behind the best."""
        self._best = len(self.RATES) - 1
        self._sample, self._proof = 1, self.PROOF

    @property
    def rate(self) -> int:
        return self.RATES[self._best]

    def speed(self, entry: E) -> int:
        return self.rate if entry in self._once else 1

    def insert(self, *entries: E) -> None:
        once, again, sample = self._once, self._again, self._sample
        tested: dict[int, bool] = {}
        for entry, was_evicted_lately in zip(entries, self._left.have(entries), strict=True):
            parent = entry.parent
            if parent is None:
                self._now += 1
            # A request for this chunk before was also one for its parent. Without this check the few chunks
            # that the filters mistake for known would keep whole prompts: their ancestors cannot leave.
            is_known = was_evicted_lately and (parent is None or parent not in once)
            (again if is_known else once)[entry] = self._now
            if entry.key[-1] % sample == 0:
                tested[_number(entry.key)] = is_known
        self._try(tested)

    def touch(self, entries: Iterable[E]) -> None:
        self._now = now = self._now + 1
        once, again, sample = self._once, self._again, self._sample
        move = again.move_to_end
        if self._trials:
            entries = list(entries)
            tested = {_number(each.key): True for each in entries if each.key[-1] % sample == 0}
        for entry in entries:
            try:
                move(entry)  # the usual case; asking first would double the cost
            except KeyError:
                del once[entry]
            again[entry] = now
        if self._trials:
            self._try(tested)

    def refresh(self, entries: Iterable[E]) -> None:
        once, again, now, sample = self._once, self._again, self._now, self._sample
        if self._trials:
            entries = list(entries)
            tested = [_number(each.key) for each in entries if each.key[-1] % sample == 0]
            for trial in self._trials:
                trial.refresh(tested, now)
        for entry in entries:
            queue = once if entry in once else again
            queue.move_to_end(entry)
            queue[entry] = now

    def on_miss(self, keys: Sequence[bytes]) -> None:
        self._now += 1
        if self._trials:
            self._try({_number(key): None for key in keys if key[-1] % self._sample == 0})

    def remove(self, entries: Sequence[E], evicted: bool) -> None:
        once, again = self._once, self._again
        self._most = max(len(self), self._most - evicted * len(entries))
        if evicted:
            self._begin_to_test()
            self._left.add([entry.key for entry in entries], self._most)
        for entry in entries:
            if once.pop(entry, None) is None:
                del again[entry]

    def order(self) -> Generator[E, None, None]:
        return _by_age(self._once, self._again, self.rate, self._now)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, entry: E) -> bool:
        return entry in self._once or entry in self._again

    def _begin_to_test(self) -> None:
        """Each trial begins with what the cache holds."""
        if not self._trials:
            once, again = (
                {_number(entry.key): used for entry, used in queue.items()}
                for queue in (self._once, self._again)
            )
            self._trials = [_Trial(rate, once, again) for rate in self.RATES]

    def _try(self, tested: Mapping[int, bool | None]) -> None:
        """A request used these keys, all at once: a trial makes room after the last. See `_Trial.ask`."""
        room = max(1, max(self._most, len(self)) // self._sample)
        if room >= 2 * self.TESTED and self._sample < self.SAMPLE:
            self._test_less()
            return
        if not self._trials:
            return
        missed = [trial.ask(tested, self._now, room) for trial in self._trials]
        if not any(missed):  # as usual, which proves nothing
            return
        by_some = missed[0].union(*missed) - missed[0].intersection(*missed)
        for key in filter(by_some.__contains__, tested):
            behind = [behind - (key not in keys) for keys, behind in zip(missed, self._behind, strict=True)]
            least = min(behind)
            self._behind = [min(self._proof, each - least) for each in behind]
            if self._behind[self._best] == self._proof:
                self._best = self._behind.index(0.0)

    def _test_less(self) -> None:
        self._begin_to_test()
        self._sample *= 2
        self._proof = self.PROOF / self._sample**0.6
        for trial in self._trials:
            trial.thin(self._sample)


class _Trial:
    """A cache that holds only keys, where those that came once age at `rate`."""

    def __init__(self, rate: int, once: dict[int, int], again: dict[int, int]) -> None:
        """It begins with these keys, the oldest first, and the times of their last use."""
        self._rate = rate
        self._once, self._again = OrderedDict(once), OrderedDict(again)

    def ask(self, keys: Mapping[int, bool | None], now: int, room: int) -> set[int]:
        """A request uses these keys. A missing one is added as known (True) or as new (False), or is not
        added (None). Returns the missing ones."""
        once, again = self._once, self._again
        move, missed = again.move_to_end, set()
        for key, is_known in keys.items():
            if key in again:
                move(key)
            elif once.pop(key, None) is None:
                missed.add(key)
                if not is_known:
                    if is_known is not None:
                        once[key] = now
                    continue
            again[key] = now
        while len(once) + len(again) > room:
            victim = next(_by_age(once, again, self._rate, now))
            (once if victim in once else again).pop(victim)
        return missed

    def refresh(self, keys: Sequence[int], now: int) -> None:
        once, again = self._once, self._again
        for key in keys:
            queue = once if key in once else again
            if key in queue:
                queue.move_to_end(key)
                queue[key] = now

    def thin(self, sample: int) -> None:
        """Forget the keys that are not tested any more."""
        for queue in (self._once, self._again):
            for key in [key for key in queue if key % sample]:
                del queue[key]


def _by_age(
    once: OrderedDict[T, int], again: OrderedDict[T, int], rate: int, now: int
) -> Generator[T, None, None]:
    """The oldest first, where time passes `rate` times as fast for those of `once`."""
    reused_entries, end = iter(again.items()), (None, now + 1)
    reused, last = next(reused_entries, end)
    age_limit = last_time = -1
    for entry, used in once.items():
        if used != last_time:  # chunks of one request have the same time
            last_time, age_limit = used, now - (now - used) * rate
        while last < age_limit:
            assert reused is not None
            yield reused
            reused, last = next(reused_entries, end)
        yield entry
    while reused is not None:
        yield reused
        reused, last = next(reused_entries, end)


class _Recent:
    """The keys that were added lately: the last 3 × `entries` of them, and some before those.

    Four Bloom filters in one table: a bit of each byte belongs to one. The places of a key are in one line
    of the processor's cache. The oldest filter is emptied when the youngest is full. Up to one in twelve keys
    that were never added counts as added. The end is sharp: if one chunk in ten were forgotten, most prompts
    would be.
    """

    LAST = 8  # the bit of the fourth filter
    PLACES = 10  # at least, for each key of a filter
    LEAST = 4096

    def __init__(self) -> None:
        self._table = bytearray(self.LEAST)
        self._mask = self.LEAST - 1
        self._bit = 1
        self._room = 0

    def have(self, entries: Iterable[Keyed]) -> Iterator[bool]:
        """Whether each of them left lately."""
        table, mask = self._table, self._mask
        for entry in entries:
            line, first, second = _THREE_NUMBERS(entry.key, -8)
            line &= mask
            yield table[line] & table[line ^ first & 63] & table[line ^ second & 63] != 0

    def add(self, keys: Sequence[bytes], entries: int) -> None:
        if self._room < len(keys):
            self._begin(entries)
        self._room -= len(keys)
        table, mask, bit = self._table, self._mask, self._bit
        for key in keys:
            line, first, second = _THREE_NUMBERS(key, -8)
            line &= mask
            table[line] |= bit
            table[line ^ first & 63] |= bit
            table[line ^ second & 63] |= bit

    def _begin(self, entries: int) -> None:
        """Go on with the oldest filter, emptied; for more entries in a table of twice the size."""
        self._room = entries
        self._bit = self._bit << 1 if self._bit < self.LAST else 1
        table = self._table.translate(bytes(byte & ~self._bit for byte in range(256)))
        while len(table) < self.PLACES * entries:
            table = table * 2  # a place is a number modulo the size, so each key stays
        self._table, self._mask = table, len(table) - 1


_THREE_NUMBERS: Callable[[bytes, int], tuple[int, int, int]] = Struct("<IHH").unpack_from
"""Reads the end of a key. Keys are hashes, so no other hash is needed."""


def _number(key: bytes) -> int:
    """What a trial keeps of a key."""
    return int.from_bytes(key[-8:])


POLICIES: dict[str, type[Policy[Keyed]]] = {"auto": Aging, "lru": LRU}


def make_policy(name: str) -> Policy[Keyed]:
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]()
