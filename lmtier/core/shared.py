"""A lower tier that other processes write too, or that may drop objects: it must be asked what it holds.

Its content is never known for certain. So a clear searches it, and a chunk is deleted in every form.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from lmtier.config import WRITES, TierSpec
from lmtier.core.index import Occupancy
from lmtier.core.lower import LOST, CacheContext, LowerTier, WriteDeferral, WriteTarget, names_of
from lmtier.core.match import DELETED, Entry
from lmtier.errors import ConfigError
from lmtier.format.layout import ChunkForm, Name
from lmtier.format.objects import Selector, now_ms
from lmtier.rules.lifetimes import FOREVER
from lmtier.rules.worth import ArrivalEstimate, TierSpeed
from lmtier.tiers.base import Done, Item, Op, Reason, Stat, Tier

MAX_LOOKUPS = 64
"""The most unanswered lookups of a tier. Beyond that it is not asked."""
MAX_ASSUMED = 1 << 18
"""Objects that are remembered to be in the tier: 80 MB at most. Only chunks of the slab are written, and so
many of 2 MiB are half a TiB. One that is forgotten is written once more."""


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """The tier is still to be searched for a suspect."""

    suspect: Selector
    before: Set[bytes]
    """The writes that were in flight. They have to end first: the search would miss their objects."""


class SharedTier(LowerTier):
    def __init__(self, label: str, spec: TierSpec, tier: Tier, context: CacheContext) -> None:
        if spec.write == "auto":
            raise ConfigError(
                f"{spec}: write=auto is only for tiers that keep what they store;"
                f" for this one choose {', '.join(word for word in WRITES if word != 'auto')}"
            )
        if tier.source and spec.write not in ("always", "never"):
            raise ConfigError(f"{spec}: nothing is written to another server; remove write=")
        super().__init__(label, spec, tier, context)
        self.source = tier.source
        if self.source:
            self.write = "never"
        self._answers = TierSpeed()
        """The speed of lookups. They are answered one after the other, whatever their size."""
        self._lookups = 0
        self._assumed_stored = OrderedDict[Name, float]()
        """Objects that this cache wrote or found here, or writes now, and when each expires. They are not
        written again until a lookup or a read misses them. The tier may drop them at any time, so nothing
        else relies on this."""
        self._delete_after_job: dict[bytes, set[Name]] = {}
        """The objects to delete of chunks that are being written or deleted now."""
        self._clear_queue: tuple[bytes, ...] = ()
        """Prefixes of keys that the tier must still delete. If `_is_clearing`, it is deleting the first one.
        Until it is done, chunks with this prefix are neither read nor written."""
        self._is_clearing = False
        self._search_queue: list[_Search] = []
        self._is_searching = False
        self.cleared = 0
        """The number of clears and searches that have ended."""

    # ---- what it holds

    def is_stored(self, key: bytes, form: ChunkForm) -> bool:
        return False

    def is_stored_or_storing(self, key: bytes, form: ChunkForm) -> bool:
        return False

    def load_form(self, key: bytes, reader_form: ChunkForm) -> ChunkForm | None:
        # A read may overtake a concurrent deletion and return a chunk that must not be seen again.
        return None if key in self._busy_keys or key.startswith(self._clear_queue) else reader_form

    def occupancy(self) -> Occupancy:
        return Occupancy()

    def touch(self, keys: Sequence[bytes]) -> None:
        """The tier itself sees which objects are read."""

    def expire(self) -> bool:
        return False

    def persist_order(self) -> None:
        """The tier has its own order."""

    def _assume_stored(self, names: Iterable[Name], end: float) -> None:
        """Remember that these objects are in the tier, until then at most."""
        for name in names if self.write != "never" else ():
            self._assumed_stored[name] = end
            self._assumed_stored.move_to_end(name)
        while len(self._assumed_stored) > MAX_ASSUMED:
            self._assumed_stored.popitem(last=False)

    def _assume_absent(self, names: Iterable[Name]) -> None:
        for name in names:
            self._assumed_stored.pop(name, None)

    def _notify_followers(self, came: bool, keys: Collection[bytes]) -> None:
        """Notify the followers: these chunks were written to the tier, or were found missing."""
        for notify in () if self.source else self._context.followers.changed_elsewhere:
            notify(self.label, came, keys)

    # ---- asking

    def lookup(
        self, names: Iterable[Name], deadline: float, then: Callable[[dict[Name, Stat]], None]
    ) -> bool:
        """Ask the tier which of these it has. False: it has too many open lookups, or a clear covers them.

        Also False if it would hardly answer in time. An idle tier is asked even then, to measure whether it
        has become faster; the answer is not used.
        """
        now = time.monotonic()
        lookup_line = self._answers.line(now)
        # A tier that is idle and was never measured is asked even if the deadline has just passed.
        is_late = lookup_line.start + lookup_line.byte > max(0.0, deadline - now)
        if self._lookups >= (1 if is_late else MAX_LOOKUPS):
            return False
        items = tuple(Item(name) for name in names if not name.key.startswith(self._clear_queue))
        if not items:
            return False
        self._lookups += 1
        self._answers.asked(1, now)
        callback = (lambda found: None) if is_late else then
        # A request may wait for less time than this. Then a late answer is no fault of the tier.
        end_lookup = partial(self._end_lookup, callback, [item.name for item in items])
        self._jobs.submit(Op.LOOKUP, items, end_lookup, now + self._context.patience)
        return not is_late

    def _end_lookup(
        self, then: Callable[[dict[Name, Stat]], None], asked_names: Sequence[Name], done: Done
    ) -> None:
        self._lookups -= 1
        counts_for_speed = set(done.failed.values()) <= {Reason.DEADLINE} and not done.has_waited
        self._answers.ended(1, time.monotonic(), counts=counts_for_speed)
        # The answer may be older than a write or deletion that is under way.
        sure = [name for name in asked_names if not self._must_wait(name.key)]
        absent_names = (name for name in sure if done.failed.get(name, Reason.ABSENT) is Reason.ABSENT)
        self._assume_absent(name for name in absent_names if name not in done.ok)
        if not self._search_queue:  # what a search may still delete is not there
            self._assume_stored((name for name in sure if name in done.ok), self._clock() + self.ttl)
        then({name: stat for name, stat in done.ok.items() if isinstance(stat, Stat)})

    def prospect(self, now: float) -> ArrivalEstimate:
        """When the tier could deliver chunks, after its open lookups."""
        line, answer = self.speed.line(now), self._answers.line(now)
        return ArrivalEstimate(answer.start + line.start, line.byte)

    # ---- unfinished work

    @property
    def backlog(self) -> int:
        return super().backlog + self.pending_clears

    @property
    def pending_clears(self) -> int:
        return len(self._clear_queue) + len(self._search_queue)

    @property
    def is_clear_done(self) -> bool:
        return not self.pending_clears

    @property
    def _is_stuck(self) -> bool:
        return super()._is_stuck or self.is_clear_failing

    @property
    def is_clear_failing(self) -> bool:
        searching = self._jobs.searching
        can_clear = bool(self._clear_queue) and not self.clear_breaker.is_open
        can_search = bool(self._search_queue) and not searching.is_open
        return bool(self.pending_clears) and not (can_clear or can_search)

    def _run_background(self) -> None:
        super()._run_background()
        if self.load_breaker.is_open or self.store_breaker.is_open:
            self._assumed_stored.clear()  # a server that comes back may be empty
        self._clear_next()
        self._search_next()

    # ---- writing and loading

    def queue_write(self, entry: Entry) -> None:
        # A record may change, and others would not notice.
        if not (self.source or self._context.slab.is_record(entry.key)):
            super().queue_write(entry)

    def _needs(self, key: bytes, form: ChunkForm) -> bool:
        now, expiry_of = self._clock(), self._assumed_stored.get
        return super()._needs(key, form) and not all(
            expiry_of(Name(key, shard), 0.0) > now for shard in form.shards
        )

    def _given_up(self, key: bytes) -> None:
        """It holds no records, so nothing here is older than what waited."""

    def _must_wait(self, key: bytes) -> bool:
        return super()._must_wait(key) or key.startswith(self._clear_queue)

    def _spot_for(self, entry: Entry) -> WriteTarget | WriteDeferral:
        end = self._end_of(entry)
        self._assume_stored(names_of(entry), end)
        return WriteTarget(None, (None,) * len(entry.form.shards), end)

    def _note_stored(self, entry: Entry, target: WriteTarget, nbytes: int, done: Done) -> None:
        names, names_to_delete = names_of(entry), self._delete_after_job.pop(entry.key, set())
        if names_to_delete or done.failed:
            self._assume_absent(names)
        if names_to_delete:
            self._delete([*names_to_delete, *names])
        elif not done.failed:
            self._notify_followers(True, (entry.key,))

    def _begin_read(self, key: bytes) -> tuple[Entry | None, float]:
        return None, FOREVER

    def _end_read(self, tier_entry: Entry | None, end: float, reasons: set[Reason], done: Done) -> None:
        if not reasons & {*LOST, Reason.SEALED}:
            return
        if reasons & {Reason.EXPIRED, Reason.CLEARED}:
            self._delete([*done.ok])
        self._assume_absent((*done.ok, *done.failed))
        self._notify_followers(False, {name.key for name in (*done.ok, *done.failed)})

    # ---- deleting

    def discard(self, key: bytes, forms: Iterable[ChunkForm] = (), why: str = DELETED) -> None:
        names = [Name(key, shard) for form in forms for shard in form.shards]
        if names and not self._context.slab.is_record(key):  # it never got one
            self._delete(names)
            self._assume_absent(names)
            self._notify_followers(False, (key,))

    def _delete(self, names: list[Name], nbytes: int = 0, *, is_again: bool = False) -> None:
        """The objects of one chunk: no job may overtake another one that writes or deletes it."""
        if names and names[0].key in self._busy_keys and not is_again:
            self._delete_after_job.setdefault(names[0].key, set()).update(names)
        else:
            super()._delete(sorted(set(names)), nbytes, is_again=is_again)

    def _end_delete(self, names: list[Name], nbytes: int, is_again: bool, done: Done) -> None:
        super()._end_delete(names, nbytes, is_again, done)
        for key in {name.key for name in names} & self._delete_after_job.keys() - self._busy_keys:
            self._delete([*self._delete_after_job.pop(key)])

    def begin_clear(self, selector: Selector) -> None:
        super().begin_clear(selector)
        self._assumed_stored.clear()  # to find those that are covered takes longer than to write some twice

    def clear(self, selector: Selector, *, force: bool) -> Iterable[int]:
        """From now on this cache finds none of them. A failed clear is repeated until it is done or this
        process ends."""
        if selector.is_prefix:
            if selector.prefix not in self._clear_queue[self._is_clearing :]:
                self._clear_queue += (selector.prefix,)
                self._clear_next()
            return ()
        for tenants in {frozenset((tenant,)) for tenant in selector.tenants} or {selector.tenants}:
            suspect = replace(selector, tenants=tenants, until=min(selector.until, now_ms()))
            self._block_loads(suspect)
            self._search_queue.append(_Search(suspect, frozenset(self._busy_keys)))
        self._search_next()
        return ()

    def _clear_next(self) -> None:
        """Begin the next clear once earlier writes have ended: the search would miss their objects."""
        if self._is_clearing or not self._clear_queue or not self.clear_breaker.allows():
            return
        if not any(key.startswith(self._clear_queue[0]) for key in self._busy_keys):
            self._is_clearing = True
            end_clear = partial(self._end_clear, self._search_queue.copy())
            self._jobs.submit(Op.CLEAR, (), end_clear, selector=Selector(self._clear_queue[0]))

    def _end_clear(self, searches: list[_Search], done: Done) -> None:
        """`searches`: those that waited when the clear began."""
        self._is_clearing = False
        self.why_uncleared = done.error
        if not done.error:
            cleared, self._clear_queue = self._clear_queue[0], self._clear_queue[1:]
            # What was suspect there is gone. Some stores can be cleared, but not searched.
            for search in searches:
                if search in self._search_queue and search.suspect.prefix.startswith(cleared):
                    self._search_queue.remove(search)
            self.cleared += 1
            return
        # Other writes must not wait behind writes that may wait for ever.
        for key in self._writes.under(self._clear_queue):
            self._drop(self._writes.give_up(key), "cleared")

    def _search_next(self) -> None:
        search = next(iter(self._search_queue), None)
        if search is None or self._is_searching or not self._busy_keys.isdisjoint(search.before):
            return
        if self._jobs.searching.allows():
            self._is_searching = True
            self._jobs.submit(Op.CLEAR, (), partial(self._end_search, search), selector=search.suspect)

    def _end_search(self, search: _Search, done: Done) -> None:
        self._is_searching = False
        if search not in self._search_queue:  # a clear was faster
            return
        self.why_uncleared = done.error
        if not done.error:
            self._search_queue.remove(search)
            self.cleared += 1
