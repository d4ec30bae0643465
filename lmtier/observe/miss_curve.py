"""The live miss-ratio curve: the hit ratio that other sizes of memory would have. No I/O.

For every lookup it measures how far back in the order of recency its chunks were: the reuse distance. An LRU
tier of c chunks would have had those less than c back (Mattson's stack), so one pass gives every size.

    recency   ─ youngest ───────────────────────────────► oldest
    runs        [a0 a1 a2 a3]   [b0 b1 b2]   [a4 a5]   [c0 …]      a lookup a0…a5, then b, then a0…a3

The keys of one lookup were used together, and a key is never used without those before it in its chain. So
recency is stored by run, not by key. The rest of an earlier lookup is always one piece, its tail, and its
first key finds it. A lookup of 512 chunks that were used together costs as much as one of two.

Memory is bounded to `size` keys: the oldest keys are forgotten. If the tiers are too large for that, half of
all keys is dropped, chosen by hash (SHARDS, fixed size), and distances among the rest count twice. History
fades with a half-life of an hour, so that the curve describes the present.

Not modelled: policies other than LRU, leases, chunks of different sizes in one tier, and tiers that only get
some of the chunks.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmtier.format.layout import ChunkForm
from lmtier.observe.follower import CacheObserver

FACTORS = (0.5, 1, 2, 4, 8)
"""The multiples of a tier's size for which the curve is shown."""
_HALF_LIFE = 3600.0
_LATER = 64  # the most lookups that wait to be counted
_BLOCK = 256  # slots that share one sum


class _Run:
    """The keys of one lookup that no later lookup has used: the tail of a chain."""

    __slots__ = ("keys", "slot")

    def __init__(self, keys: Sequence[bytes], slot: int) -> None:
        self.keys = keys
        self.slot = slot


class MissCurve:
    def __init__(
        self,
        reach: Callable[[], float] = lambda: 0.0,
        *,
        size: int = 1 << 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reach` is the largest number of chunks that `hit_ratio` will get, as far as it is known now."""
        self._reach = reach
        self._size = size
        self._clock = clock
        self.rate = 1.0
        """The share of keys in the sample: 1, 1/2, 1/4, …"""
        self._mask = np.uint32(0)
        # Each lookup has its own slot. Slots are renumbered after at least `size` lookups.
        self._slots = -(-2 * size // _BLOCK) * _BLOCK
        self._runs: OrderedDict[int, _Run] = OrderedDict()  # by slot, the oldest first
        self._first: dict[bytes, _Run] = {}
        self._counts = [0] * self._slots  # keys in the run of each slot
        self._blocks = [0] * (self._slots // _BLOCK)
        self._slot = 0
        self.tracked = 0
        # Lookups since the last reading, then faded history. A run at distances d, d+1, … adds 1 at d and
        # takes it back behind its end: the running sum is how many keys were at each distance.
        self._edges = array("q", bytes(8 * (size + 1)))
        self._asked = 0.0
        self._expected = 0.0
        self._seen = 0
        self._past: npt.NDArray[np.float64] = np.zeros(size + 1)
        self._past_asked = 0.0
        self._past_missing = 0.0
        self._read_at = clock()
        self._hits: npt.NDArray[np.float64] | None = None

    def add_lookup(self, keys: Sequence[bytes], asked: float | None = None) -> None:
        """Note a lookup of `asked` chunks: those of `keys`, and a partial one. 0: used, but not asked for."""
        key_count = len(keys)
        if self._mask:
            words = np.frombuffer(b"".join(keys), np.uint32)[7::8]
            keys = [keys[i] for i in np.flatnonzero(words & self._mask == 0).tolist()]
        else:
            keys = tuple(keys)  # the caller's list may grow
        asked = key_count if asked is None else asked
        if asked:
            self._asked += asked
            self._expected += key_count * self.rate
            self._seen += len(keys)
            self._hits = None
        if not keys:
            return
        if self._slot == self._slots:
            self._renumber()
        first, counts, blocks = self._first, self._counts, self._blocks
        position, end, last_block = 0, len(keys), self._slot // _BLOCK + 1
        while position < end and (run := first.pop(keys[position], None)) is not None:
            shared_keys = _common(run.keys, keys, position)
            slot = run.slot
            if asked:
                block = slot // _BLOCK
                newer = sum(blocks[block + 1 : last_block]) + sum(counts[slot + 1 : (block + 1) * _BLOCK])
                distance = newer + position  # `position` keys of this lookup have just become newer
                self._edges[distance] += 1
                self._edges[distance + shared_keys] -= 1
            self._shorten(run, run.keys[shared_keys:], shared_keys)
            if run.keys:
                first[run.keys[0]] = run
            position += shared_keys
        slot, self._slot = self._slot, self._slot + 1
        self._runs[slot] = run = _Run(keys, slot)
        first[keys[0]] = run
        counts[slot] = end
        blocks[slot // _BLOCK] += end
        self.tracked += end
        while self.tracked > self._size:
            self._forget(self.tracked - self._size)

    def _shorten(self, run: _Run, keys: Sequence[bytes], lost: int) -> None:
        run.keys = keys
        self._counts[run.slot] -= lost
        self._blocks[run.slot // _BLOCK] -= lost
        self.tracked -= lost
        if not keys:
            del self._runs[run.slot]

    def _forget(self, excess: int) -> None:
        if self._reach() * self.rate > self._size:
            self._halve()
            return
        run = next(iter(self._runs.values()))
        lost = min(excess, len(run.keys))
        head = run.keys[0]
        self._shorten(run, run.keys[:-lost], lost)
        if not run.keys and self._first.get(head) is run:
            del self._first[head]

    def _halve(self) -> None:
        self._read()
        self.rate /= 2
        self._mask = np.uint32(round(1 / self.rate) - 1)
        pairs = self._past[: self._size // 2 * 2].reshape(-1, 2).sum(axis=1) / 2
        self._past = np.concatenate([pairs, np.zeros(self._size + 1 - len(pairs))])
        self._past_missing /= 2
        for run in self._runs.values():
            words = np.frombuffer(b"".join(run.keys), np.uint32)[7::8]
            run.keys = [run.keys[i] for i in np.flatnonzero(words & self._mask == 0).tolist()]
        self._renumber()
        self._hits = None  # it is of the rate before

    def _renumber(self) -> None:
        runs = [run for run in self._runs.values() if run.keys]
        self._counts = [len(run.keys) for run in runs] + [0] * (self._slots - len(runs))
        self._blocks = [sum(self._counts[i : i + _BLOCK]) for i in range(0, self._slots, _BLOCK)]
        for slot, run in enumerate(runs):
            run.slot = slot
        self._runs = OrderedDict(enumerate(runs))
        self._first = {run.keys[0]: run for run in runs}
        self._slot = len(runs)
        self.tracked = sum(self._counts)

    # ---- reading

    def hit_ratio(self, chunks: float) -> float:
        """The hit ratio that an LRU tier of `chunks` chunks would have had. NaN: there was no lookup."""
        hits = self._read()
        asked = self._past_asked * self.rate
        if not asked or chunks <= 0:
            return float("nan")
        at, share = divmod(min(chunks * self.rate, len(hits) - 1), 1)
        hits_at = float(hits[int(at)])
        if share:
            hits_at += share * float(hits[int(at) + 1] - hits[int(at)])
        # The sample may lack the hottest keys: there are few of them, at short distances (SHARDS_adj).
        return min(1.0, max(0.0, (hits_at + self._past_missing) / asked))

    def _read(self) -> npt.NDArray[np.float64]:
        """How many of the sample were hit, by the size of the tier in sampled chunks."""
        if self._hits is None:
            now = self._clock()
            fade = 0.5 ** ((now - self._read_at) / _HALF_LIFE)
            self._read_at = now
            at_distance = np.cumsum(np.frombuffer(self._edges, np.int64))
            self._past = self._past * fade + at_distance
            self._past_asked = self._past_asked * fade + self._asked
            self._past_missing = self._past_missing * fade + self._expected - self._seen
            self._edges = array("q", bytes(8 * (self._size + 1)))
            self._asked = self._expected = self._seen = 0
            self._hits = np.concatenate([[0.0], np.cumsum(self._past)])
        return self._hits


class BoundedTier(NamedTuple):
    """A bounded tier."""

    tier: str
    capacity: int
    """Bytes."""
    has_header_pages: bool
    """Whether its chunks have header pages, as in lower tiers, or not, as in the slab."""


class MissCurves(CacheObserver):
    """The curve in bytes for these tiers, each as if it were the only one.

    It shows whether more memory helps.
    """

    def __init__(self, places: Sequence[BoundedTier], chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self.tiers = tuple(places)
        self.curve = MissCurve(self._reach)
        self._later: list[tuple[Sequence[bytes], float, int, int]] = []
        self._chunks = 0
        """The number of requested chunks; and their bytes."""
        self.lookups = 0
        """The number of lookups that it is made of."""
        self._in_slab = 0
        self._at_rest = 0

    def asked(self, keys: Sequence[bytes], tokens: int, form: ChunkForm) -> None:
        """Note the lookup; it is counted later, as in metrics.py. `keys` must not change."""
        self._later.append((keys, tokens / self._chunk_tokens, form.slab_bytes, form.stored_bytes))
        if len(self._later) >= _LATER:
            self.stepped()

    def used(self, keys: Sequence[bytes]) -> None:
        """Note keys that were used without a request."""
        self._later.append((tuple(keys), 0, 0, 0))
        if len(self._later) >= _LATER:
            self.stepped()

    def stepped(self) -> None:
        """Count the noted lookups."""
        later, self._later = self._later, []
        for keys, asked, in_slab, at_rest in later:
            self.curve.add_lookup(keys, asked)
            if asked:
                self.lookups += 1
                self._chunks += len(keys)
                self._in_slab += in_slab * len(keys)
                self._at_rest += at_rest * len(keys)

    def resize(self, tier: str, capacity: int) -> None:
        """A tier has another capacity now."""
        places = (each._replace(capacity=capacity) if each.tier == tier else each for each in self.tiers)
        self.tiers = tuple(places)

    def hit_ratio_of(self, tier: str, factor: float) -> float:
        place = next(each for each in self.tiers if each.tier == tier)
        return self.hit_ratio(place, factor)

    def hit_ratio(self, place: BoundedTier, factor: float) -> float:
        """The hit ratio of this tier if it were alone, LRU, and `factor` times its size. NaN: no lookup."""
        self.stepped()
        return self.curve.hit_ratio(self._fits(place, factor))

    def _fits(self, place: BoundedTier, factor: float) -> float:
        """The capacity in chunks of the average requested size."""
        nbytes = self._at_rest if place.has_header_pages else self._in_slab
        return factor * place.capacity * self._chunks / nbytes if nbytes else 0.0

    def _reach(self) -> float:
        """The number of chunks of the largest tier on the curve."""
        return max((self._fits(place, FACTORS[-1]) for place in self.tiers), default=0.0)


def _common(run: Sequence[bytes], keys: Sequence[bytes], at: int) -> int:
    """How many keys `run` and `keys[at:]` share at their start, at least one.

    Equal keys have equal prefixes.
    """
    most = min(len(run), len(keys) - at)
    if run[most - 1] == keys[at + most - 1]:
        return most
    return bisect_left(range(most), True, lo=1, key=lambda i: run[i] != keys[at + i])
