"""One tier below the slab, as the cache sees it: what it holds, what it may take, whether it is trusted now.

The cache decides what goes down and what comes up; this keeps the books of one tier beside its I/O:
an index with a policy where the tier keeps what it was given, the queue of chunks to be written, the
room that deletions will give back, and a breaker for each direction. All on the owner's thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import count, islice
from typing import NamedTuple, TypeAlias

from lmtier.breaker import Breaker
from lmtier.codec import NO_MARK, Header, Suspect
from lmtier.compression import AUTO, RAW, WORDS
from lmtier.config import WRITES, TierSpec, without_login
from lmtier.errors import ConfigError
from lmtier.index import CLEARED, DELETED, EVICTED, EXPIRED, REPLACED, Entry, Index, State
from lmtier.keys import is_value
from lmtier.layout import PAGE, Form, Name, Shard, form_of, overlapping, padded, stored_size
from lmtier.lifetimes import AT_ONCE, FOREVER, Stamps
from lmtier.metrics import Metrics
from lmtier.policy import make_policy
from lmtier.shares import Share
from lmtier.tier import Done, Item, Job, Op, Reason, Stat, Tier
from lmtier.workers import collector_paused
from lmtier.worth import Line, Speed
from lmtier.writing import Budget, Choice, Pace

log = logging.getLogger("lmtier")

MAX_STORING = 12
"""Chunks on their way into one tier at a time: enough to keep its threads busy, little to lose."""
_VALUES_SHARE = 1 / 4
"""Of the slab that named values may hold, acknowledged, until this tier has written them."""
_SAID_AGAIN = 60.0
"""Seconds between two lines of the log about what is dropped."""
_INTENDED = {"write_budget", "expired", "cleared"}
"""Why something is dropped as a setting or a person wants it: no word of it in the log."""
MAX_LOOKUPS = 64
"""Questions that a tier has not answered; beyond it is not asked."""
_SUSPECTS = 16  # that are remembered; a search ends sooner than so many come
_HEADERS = 8  # that are read at once to find what is suspect: loads go on beside
_OLDEST = 64
"""Jobs among which those that do not come back are looked for: there may be a deletion for every chunk."""

_LOST = {Reason.ABSENT, Reason.CORRUPT, Reason.FOREIGN, Reason.EXPIRED, Reason.CLEARED}
"""Why a part cannot be read, now or later: the only owner of a tier has no use for the whole chunk."""

FULL_PAUSE = 2.0
_FULL_MOST = 600.0
"""Seconds after which storage that was full is asked whether it has more room than it had; and if nothing
fits though somebody left for it: twice as many each time, up to so many."""

UNBOUNDED = 1 << 62
"""The capacity of a tier that keeps what it is given, if nobody gave one."""

View: TypeAlias = "Callable[[int, int], memoryview]"
Heard: TypeAlias = "Callable[[dict[Shard, Header] | Reason, float], None]"


class _Waiting(NamedTuple):
    """A job that was submitted."""

    op: Op
    names: tuple[Name, ...]
    then: Callable[[Done], None]
    since: float


class _Room(NamedTuple):
    """Room for one chunk: what it may write over, shard by shard; or why there is none."""

    replaces: tuple[Name | None, ...] = ()
    never: str = ""
    later: bool = False


class Below:
    def __init__(
        self,
        label: str,
        spec: TierSpec,
        tier: Tier,
        metrics: Metrics,
        chunk_tokens: int,
        queue_length: int,
        patience: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        shares: Sequence[Share] = (),
        slab: Index | None = None,
        let_go: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        """`slab` is above it; `let_go` ends a lease there."""
        self.label = label
        self._slab = slab
        self._let_go_above = let_go
        self.write = spec.write
        self._clock = clock
        self.ttl = spec.ttl
        self.stamps = Stamps(clock(), time.time())
        self.budget = Budget(spec.writes_per_day, clock()) if spec.writes_per_day else None
        self.pace = Pace(clock())
        self._endurance = spec.endurance
        self.choice: Choice | None = None
        self._has_codec = spec.codec != RAW
        self.tier = tier
        self.up, self.down, self.clearing = Breaker(), Breaker(), Breaker()
        self.speed, self._answers = Speed(), Speed()
        """Of loads, and of lookups: one after the other, whatever their size."""
        self.index: Index | None = None
        if tier.keeps:
            capacity, policy = self._capacity(spec, tier), make_policy(spec.policy)
            self.index = Index(capacity, policy, shares=shares if spec.capacity else ())
        if spec.write == "auto":
            if self.index is None:
                raise ConfigError(
                    f"tier {without_login(spec.url)!r}: write=auto is for a tier that keeps what it is given;"
                    f" for this one choose {', '.join(word for word in WRITES if word != 'auto')}"
                )
            self.choice = Choice(self.index.capacity, spec.writes_per_day, clock())
        self.is_warm = not tier.keeps
        """Whether it is known what the tier holds. Until then nothing is written to it."""
        self.deleting = 0
        """Bytes of objects whose deletion has not been confirmed: still taken."""
        self._found = 0
        """Bytes that the scan found; more than the capacity, if that was made smaller."""
        self._deletions = 0
        """Jobs that delete."""
        self.storing = 0
        self._storing_bytes = 0
        self._queue: dict[bytes, Entry] = {}
        """What is to be written, the next one first. Named values are leased in the slab meanwhile: they were
        acknowledged, and nobody can compute them again."""
        self._held: set[Entry] = set()
        """Those of the queue that are leased."""
        self._held_bytes = 0
        self._heard = time.monotonic()
        """When the tier last finished something."""
        self._dropped: Counter[str] = Counter()
        """Objects that were dropped since the log said so, by reason."""
        self._said_dropped = float("-inf")
        self._queue_length = queue_length
        self._metrics = metrics
        self._chunk_tokens = chunk_tokens
        self._patience = patience
        self._undeleted: list[tuple[list[Name], int]] = []
        self._afterwards: dict[bytes, set[Name]] = {}
        """Of a tier that must be asked: what is to be deleted of chunks that are being written or deleted."""
        self._going: set[bytes] = set()
        """Chunks being written, deleted or written over: a name is in one such job at a time."""
        self._unwanted: set[bytes] = set()
        self._unwanted_of: tuple[bytes, ...] = ()
        """Chunks, and what keys begin with, that were deleted before it was known what the tier holds. Its
        scan tells in which parts they are there, also of other forms; until then they stay."""
        self._uncleared: tuple[bytes, ...] = ()
        """What keys begin with that a tier which must be asked is to forget; the first, if `_is_clearing`,
        is being forgotten. Until it is, nothing of it is read, and nothing new of it written."""
        self._is_clearing = False
        self._suspects: list[Suspect] = []
        """What is not loaded, but deleted, as soon as its header is read."""
        self._unread: dict[bytes, None] = {}
        """Chunks whose headers are still to be read for that."""
        self._reading = 0
        self._unsifted: list[tuple[Suspect, set[bytes]]] = []
        """What a tier that must be asked is still to be searched for, and what was being written then."""
        self._is_sifting = False
        self.why_uncleared = ""
        """The last failure at it."""
        self.cleared = 0
        """How many times it was done."""
        self.lost = 0
        """Chunks that were to be written here and were not."""
        self._limit = _Limit(clock)
        self._jobs: dict[int, _Waiting] = {}
        self._lookups = 0
        self._overdue = 0
        """The last job for which the tier was blamed because it did not come back."""
        self._ids = count(1)
        self.unstored: Callable[[Iterable[bytes], str], None] | None = None
        """Told of what should have been written here and was not, and why, if anybody follows."""
        self.wrote: Callable[[str, bool, Iterable[bytes]], None] | None = None
        """Of a tier that must be asked: told of what was written (True), or found to be gone."""
        self._declare()
        if not self.is_warm:
            self._submit(Op.SCAN, (), self._scanned)

    def __repr__(self) -> str:
        state = f"up {self.up}, down {self.down}"
        return f"<{self.label} {self.index!r} backlog {self.backlog}, breakers {state}>"

    def _capacity(self, spec: TierSpec, tier: Tier) -> int:
        """What was asked for, or what the storage has in all, if that is less."""
        if spec.capacity is None:
            return UNBOUNDED
        if tier.most is not None and tier.most < spec.capacity:
            log.warning(
                "lmtier: %s: capacity=%d is more than the storage has: it holds what fits into %d bytes",
                *(without_login(spec.url), spec.capacity, tier.most),
            )
            return max(1, tier.most)
        return spec.capacity

    # ---- what it holds

    def holds(self, key: bytes, form: Form) -> bool:
        """Known to be there and of use to a reader of `form`. A tier that must be asked knows nothing."""
        entry = self._at(key)
        return entry is not None and entry.state is State.READY and entry.form.serves(form)

    def has(self, key: bytes, form: Form) -> bool:
        """There, being written, or queued to be, in a form that serves `form`."""
        entry = self._at(key)
        return key in self._queue or (entry is not None and entry.form.serves(form))

    def spares(self, key: bytes, form: Form) -> bool:
        """There or being written, and can be read: no reason to store it once more."""
        entry = self._at(key)
        return entry is not None and entry.form.serves(form) and not self.up.is_open

    def _at(self, key: bytes) -> Entry | None:
        """What is here under this key. It is deleted if its time is over."""
        entry = self.index.get(key) if self.index is not None else None
        if entry is None or self.index is None or not self.index.ends.is_over(entry, self._clock()):
            return entry
        self._expire(entry)
        return None

    def expire(self) -> bool:
        """Delete some of what is over. Whether there may be more."""
        over = self.index.ends.over(self._clock(), AT_ONCE) if self.index is not None else []
        for entry in over:
            self._expire(entry)
        return len(over) == AT_ONCE

    def _expire(self, entry: Entry) -> None:
        self._metrics.expired.labels(self.label).inc()
        self.discard(entry.key, entry.form, EXPIRED)

    def is_leaving(self, key: bytes) -> bool:
        """Whether a restart now could find what was discarded under this key."""
        return key in self._going or self._is_unwanted(key)

    def _is_unwanted(self, key: bytes) -> bool:
        return key in self._unwanted or key.startswith(self._unwanted_of)

    def touch(self, keys: Sequence[bytes]) -> None:
        if self.index is not None and len(self.index):
            get = self.index.get
            self.index.touch([entry for key in keys if (entry := get(key))])

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    @property
    def backlog(self) -> int:
        """Chunks that are still to be written or deleted, and namespaces to be cleared."""
        deleting = self._deletions + len(self._undeleted) + len(self._unwanted) + len(self._unwanted_of)
        unread = len(self._unread) + self._reading
        return len(self._queue) + self.storing + deleting + self.uncleared + unread

    @property
    def is_busy(self) -> bool:
        """Whether waiting helps: a tier behind an open breaker gets nothing done."""
        oldest = next(iter(self._jobs.values()), None)
        is_moving = oldest is not None and time.monotonic() - oldest.since <= self._patience
        if self._uncleared and self.clearing.is_open:
            return is_moving
        return is_moving or (self.backlog > 0 and not self.down.is_open)

    @property
    def pinned(self) -> int:
        """Bytes of the slab that cannot leave until this tier has written them."""
        return self._storing_bytes + self._held_bytes

    @property
    def is_behind(self) -> bool:
        """Whether as many values as may wait to be written here do, and get fewer."""
        is_full = self._slab is not None and self._held_bytes >= self._slab.capacity * _VALUES_SHARE
        return is_full and not self.down.is_open and time.monotonic() - self._heard < self._patience

    @property
    def uncleared(self) -> int:
        """Namespaces that are still to be cleared, and searches for what is suspect."""
        return len(self._uncleared) + len(self._unsifted)

    @property
    def is_clear(self) -> bool:
        """Whether all is gone that was to be cleared."""
        return not (self.uncleared or self._unwanted_of or self._unread or self._reading)

    # ---- down

    @property
    def rule(self) -> str:
        """When a chunk is written here, now: `write`, or what that chose."""
        return self.write if self.choice is None else self.choice.rule

    @property
    def watches(self) -> bool:
        """Whether it matters here what is asked for again."""
        return self.write in ("reused", "auto") or self.budget is not None

    @property
    def awaits_eviction(self) -> bool:
        return self.write in ("evicted", "auto")

    def came(self, entry: Entry, source: Below | None = None) -> None:
        """It is complete in the slab: from an engine, or a tier."""
        if self.choice is not None:
            self.choice.came(entry.key, entry.seen, entry.form.at_rest, self._clock())
        if source is not self and (self.rule == "always" or (self.rule == "reused" and entry.seen)):
            self.offer(entry)

    def missed(self, keys: Sequence[bytes]) -> None:
        """These were asked for, and the slab does not have them."""
        if self.choice is not None:
            self.choice.asked(keys)

    def saw(self, run: Sequence[Entry]) -> None:
        """These were asked for, and the slab has them."""
        if self.choice is not None and run:
            self.choice.seen([entry.key for entry in run], run[0].form.at_rest, self._clock())
        if self.rule == "reused":
            for entry in run:
                if entry.state is State.READY:
                    self.offer(entry)

    def leaves(self, entries: Iterable[Entry]) -> None:
        """These are the next that leave the slab. What comes before them in their prompts goes down first:

        they are of no use without it, be it that the budget ends, or that the slab is lost in a restart.
        """
        met: set[Entry] = set()
        for entry in entries:
            run: list[Entry] = []
            above: Entry | None = entry
            while above is not None and above not in met:
                if self.choice is None and self.has(above.key, above.form):
                    break
                met.add(above)
                run.append(above)
                above = above.parent
            for each in reversed(run):
                if self.choice is not None:
                    self.choice.leaves(each.key, each.seen, each.form.at_rest, self._clock())
                if self.rule == "evicted" and each.state is State.READY:
                    self.offer(each)

    def offer(self, entry: Entry) -> None:
        """Write this chunk when its turn comes, if it is still in the slab by then."""
        if self.write == "never" or self.has(entry.key, entry.form):
            return
        if self.index is None and is_value(entry.key):
            return  # it may change, and nobody can tell the others who ask this tier
        is_full = len(self._queue) >= self._queue_length
        if is_value(entry.key) and self._slab is not None:
            held = self._held_bytes
            is_full = held > 0 and held + entry.nbytes > self._slab.capacity * _VALUES_SHARE
        if is_full:
            self._drop(entry.key, "queue_full", entry)
        else:
            self._enqueue(entry)

    def offer_all(self) -> None:
        """At the end: the named values that it did not get while they came too fast, or when it failed."""
        for key in list(self._slab.names) if self._slab is not None and self.index is not None else ():
            entry = self._slab.get(key) if self._slab is not None else None
            if self.write != "never" and entry is not None and not self.has(key, entry.form):
                self._enqueue(entry)

    def _enqueue(self, entry: Entry) -> None:
        self._queue[entry.key] = entry
        if is_value(entry.key) and self._slab is not None:
            self._slab.lease(entry)
            self._held.add(entry)
            self._held_bytes += entry.nbytes

    def _unqueue(self, key: bytes) -> None:
        self._unhold(self._queue.pop(key))

    def _unhold(self, entry: Entry) -> None:
        if entry in self._held:
            self._held.remove(entry)
            self._held_bytes -= entry.nbytes
            self._let_go_above(entry)

    @property
    def held(self) -> Iterable[Entry]:
        """Leased in the slab until they are written here."""
        return self._held

    def let_wait(self, namespace: bytes) -> None:
        """What waits to be written of a namespace may leave the slab before."""
        for entry in [entry for entry in self._held if entry.key.startswith(namespace)]:
            self._unhold(entry)

    def _put_off(self, key: bytes) -> None:
        """Others first."""
        self._queue[key] = self._queue.pop(key)

    def pump(
        self, slab: Index, view: View, release: Callable[[Entry], None], spare: float = float("inf")
    ) -> None:
        """Submit what is queued, as far as the tier, its room and its breaker allow.

        Each chunk is leased in the slab until its write is done; then `release` hears of it. No more than
        `spare` bytes are, beside those that are now.
        """
        self._look_after()
        added: list[Entry] = []
        held_back = 0
        while (
            len(self._queue) > held_back
            and self.storing < MAX_STORING
            and self.is_warm
            and self.down.allows()
        ):
            key = next(iter(self._queue))
            there = self._at(key)
            if key in self._going or key.startswith(self._uncleared):
                self._put_off(key)
                held_back += 1
                continue
            entry = slab.get(key)
            if entry is None or entry.state is not State.READY:
                was = self._queue[key]
                self._unqueue(key)
                why = slab.why_gone(key)
                reason = EXPIRED if why == EXPIRED else "evicted_before_write"
                self._drop(key, reason, was, is_lost=why == EVICTED)
                continue
            if not entry.leases and entry.nbytes > spare:
                break  # what hangs must not take all of the slab
            if self.budget is not None and not self.budget.allows(
                entry.form.at_rest, entry.seen, self._clock()
            ):
                self._unqueue(key)
                self._drop(key, "write_budget", entry)
                continue
            room, mine = _Room((None,) * len(entry.form.shards)), None
            if self.index is not None:
                if there is not None:
                    if there.form.serves(entry.form):
                        self._unqueue(key)
                    else:  # a part of it was lost, or it is of no use: the new one takes its place
                        self.discard(key, there.form, REPLACED)
                        self._going.add(key)
                    continue
                parent = self._nearest(entry)
                room = self._room_for(key, entry.form, parent)
                if room.later:
                    break  # deletions under way will make it
                if room.never:
                    self._unqueue(key)
                    self._drop(key, room.never, entry)
                    continue
                mine = self.index.add(key, entry.form, entry.form.at_rest, State.FILLING, parent)
                added.append(mine)
            spare -= 0 if entry.leases else entry.nbytes
            slab.lease(entry)
            self._unqueue(key)
            end = min(slab.ends.end(entry), self._clock() + self.ttl)
            if mine is not None and self.index is not None:
                self.index.ends.set(mine, end)
            self._store(entry, mine, view, release, room.replaces, end)
        if self.index is not None:
            for tail in set(added) - {entry.parent for entry in added}:
                self.index.refresh(ancestry(tail))

    def _store(
        self,
        entry: Entry,
        mine: Entry | None,
        view: View,
        release: Callable[[Entry], None],
        replaces: Sequence[Name | None],
        end: float,
    ) -> None:
        form = entry.form
        self._going.update((entry.key, *(name.key for name in replaces if name)))
        assert form.layout is not None  # whatever is in the slab was declared, or loaded with its header
        prints = entry.prints or (NO_MARK,) * len(form.shards)
        used = self._use(mine)
        lives = 0.0 if end == FOREVER else max(1e-3, end - self._clock())
        items = tuple(
            Item(
                name := Name(entry.key, shard),
                view(offset, padded(size)),
                Header(name, form.layout, size, mark, expires=self.stamps.stamp(end), made=entry.made),
                old,
                used,
                lives,
            )
            for shard, size, offset, mark, old in zip(
                form.shards, form.sizes, entry.offsets, prints, replaces, strict=True
            )
        )
        self.storing += 1
        self._storing_bytes += entry.nbytes
        if self.budget is not None:
            self.budget.reserve(form.at_rest)
        self._submit(Op.STORE, items, partial(self._stored, entry, mine, replaces, release))

    def _stored(
        self,
        entry: Entry,
        mine: Entry | None,
        replaced: Sequence[Name | None],
        release: Callable[[Entry], None],
        done: Done,
    ) -> None:
        self.storing -= 1
        self._storing_bytes -= entry.nbytes
        self._going.difference_update((entry.key, *(name.key for name in replaced if name)))
        release(entry)
        unwanted = self._afterwards.pop(entry.key, set())
        if unwanted:
            self._delete(sorted(unwanted | {Name(entry.key, shard) for shard in entry.form.shards}), 0)
        nbytes = taken_bytes(entry.form, done)
        # Of what failed nobody knows how much was written.
        self._paid(entry.form.at_rest, entry.form.at_rest if done.failed else nbytes)
        if not done.failed:
            self._metrics.stored_tokens.labels(self.label).inc(self._tokens(entry.key))
            self._transfer("down", nbytes, done.seconds)
            if self._has_codec:
                headers = len(entry.form.shards) * PAGE
                self._metrics.codec_bytes.labels(self.label, "given").inc(entry.form.at_rest - headers)
                self._metrics.codec_bytes.labels(self.label, "stored").inc(nbytes - headers)
        elif not self._is_tried_again(Op.STORE, done):
            self._drop(entry.key, next(iter(done.failed.values())), entry)
        if mine is None or self.index is None:
            if self.wrote is not None and not done.failed and not unwanted:
                self.wrote(self.label, True, (entry.key,))
            return
        # A place that could neither be written over nor deleted still holds what must not come back.
        self._delete([old for old in replaced if old in done.failed], 0)
        if not done.failed:
            self._limit.fitted()
        if not done.failed and mine.state is not State.GONE:
            if is_value(mine.key):
                mine.prints = entry.prints
            self.index.resize(mine, nbytes)
            self.index.ready(mine)
            return
        if mine.state is not State.GONE:
            self.index.remove(mine)
        self.index.release(mine)
        self._delete(list(done.ok), done_bytes(mine.form, done.ok))  # what was written of it must go
        if Reason.FULL in done.failed.values():
            self._found_full(entry, done)

    def _found_full(self, entry: Entry, done: Done) -> None:
        """There is less room than the capacity says. What came first to learn it may try once more."""
        assert self.index is not None
        again = self._is_tried_again(Op.STORE, done)
        if not self._limit.is_known:
            log.warning(
                "lmtier: %s is full with %d of %d bytes: what comes takes the place of what is there",
                *(self.label, self.index.used, self.index.capacity),
            )
        self._limit.met(done.id, self.index.used, next(self._ids))
        if again and entry.state is State.READY:
            self.offer(entry)

    def _is_tried_again(self, op: Op, done: Done) -> bool:
        """Whether this store failed only because nobody knew how little room there is."""
        is_full = op is Op.STORE and self.index is not None and Reason.FULL in done.failed.values()
        return is_full and self._limit.is_news_to(done.id)

    def _paid(self, reserved: int, nbytes: int) -> None:
        now = self._clock()
        self.pace.wrote(nbytes, now)
        if self.budget is not None:
            self.budget.spend(reserved, nbytes, now)

    def _room_for(self, key: bytes, form: Form, parent: Entry | None) -> _Room:
        index, need = self.index, form.at_rest
        assert index is not None
        if need > index.capacity:
            return _Room(never="larger_than_tier")
        room = min(index.capacity, self._limit.nbytes)
        if need > room:
            return _Room(never="full")
        short = need - (room - index.used)
        if short <= 0 and self.deleting <= -short:
            return _Room((None,) * len(form.shards))
        if short <= 0:
            return _Room(later=True)
        if self.choice is not None:
            self.choice.full()
        # The parent must not leave to make room for its child: that would leave a hole.
        victims = index.evict(short, parent, index.pool(key), need)
        if victims is None:  # those that are being written can leave when they are
            return _Room(later=True) if self.storing else _Room(never="no_room")
        self._metrics.evictions.labels(self.label, "capacity").inc(len(victims))
        if len(victims) == 1 and not self.deleting and rooms(victims[0].form) == rooms(form):
            (victim,) = victims
            return _Room(tuple(Name(victim.key, shard) for shard in victim.form.shards))
        for victim in victims:
            self._delete([Name(victim.key, shard) for shard in victim.form.shards], victim.nbytes)
        return _Room(later=True)

    def _nearest(self, entry: Entry) -> Entry | None:
        """The entry here of the nearest ancestor that this tier holds."""
        assert self.index is not None
        above = entry.parent
        while above is not None:
            if (mine := self.index.get(above.key)) is not None:
                return mine
            above = above.parent
        return None

    # ---- up

    def form(self, key: bytes, asked: Form) -> Form | None:
        """The form in which the tier holds a chunk, None if it does not (any more)."""
        if self.index is None:
            # A read beside a deletion may come first, and bring back what nobody is to see again.
            return None if key in self._going or key.startswith(self._uncleared) else asked
        entry = self.index.get(key)
        if entry is None or entry.state is not State.READY:
            return None
        form, layout = entry.form, asked.layout
        if form.layout is None and layout is not None:  # a scan found it: its sizes are what a codec left
            sizes = (
                max(size, layout.nbytes(shard)) if shard.overlap(layout.whole) == shard else size
                for shard, size in zip(form.shards, form.sizes, strict=True)
            )
            form = form_of(None, form.shards, sizes)
        return form

    def load(self, key: bytes, form: Form, payloads: Sequence[memoryview], then: Heard) -> None:
        """Read one chunk into `payloads`; `then` hears its headers, or why it is a miss; and when it ends."""
        mine = self.index.get(key) if self.index is not None else None
        used = self._use(mine)
        items = tuple(
            Item(Name(key, shard), payload, used=used)
            for shard, payload in zip(form.shards, payloads, strict=True)
        )
        if mine is not None and self.index is not None:
            self.index.lease(mine)
        now = time.monotonic()
        self.speed.asked(form.at_rest, now)
        deadline = now + self._patience
        self._submit(Op.LOAD, items, partial(self._loaded, mine, self._known_end(mine), form, then), deadline)

    def _loaded(self, mine: Entry | None, known: float, form: Form, then: Heard, done: Done) -> None:
        end = self._end(known, done)
        reason = self._let_go(mine, end, done)
        took = reason is None or reason is Reason.DEADLINE
        self.speed.ended(form.at_rest, time.monotonic(), counts=took)
        if reason is None:
            self._transfer("up", loaded_bytes(done), done.seconds)
            then({name.shard: value for name, value in done.ok.items() if isinstance(value, Header)}, end)
        else:
            then(reason, end)

    def _let_go(self, mine: Entry | None, end: float, done: Done) -> Reason | None:
        """End the lease of a read; why it failed, if it did. What it showed to be lost is deleted whole."""
        reasons = set(done.failed.values())
        if self._suspects and any(self._is_suspect(name, header) for name, header in done.ok.items()):
            reasons.add(Reason.CLEARED)
        if end <= self._clock():
            reasons.add(Reason.EXPIRED)
            if mine is None or mine.state is not State.GONE:  # otherwise it was counted when it went
                self._metrics.expired.labels(self.label).inc()
        if mine is not None and self.index is not None:
            if self.index.release(mine):  # discarded while it was read
                self._delete([Name(mine.key, shard) for shard in mine.form.shards], mine.nbytes)
            elif reasons & _LOST and self.index.get(mine.key) is mine:
                # what stays of a chunk that lost a part is nobody's
                self.discard(mine.key, mine.form, _worst(reasons & _LOST).value)
            elif self.index.get(mine.key) is mine:
                self.index.ends.set(mine, end)  # of what a scan found this is the first word
        elif reasons & _LOST:
            if reasons & {Reason.EXPIRED, Reason.CLEARED}:
                for name in done.ok:
                    self._delete_there(name.key, {name})
            if self.wrote is not None:
                self.wrote(self.label, False, {name.key for name in (*done.ok, *done.failed)})
        return _worst(reasons) if reasons else None

    def _is_suspect(self, name: Name, header: Header | Stat | None) -> bool:
        return isinstance(header, Header) and any(
            each.covers(name.key, header.made) for each in self._suspects
        )

    def _known_end(self, mine: Entry | None) -> float:
        """When the time of a chunk is over, before it is read: it may be gone when it was."""
        return self.index.ends.end(mine) if self.index is not None and mine is not None else FOREVER

    def _end(self, known: float, done: Done) -> float:
        """When the time of a chunk is over that was read: by what was known of it, and by its headers."""
        return min(
            [known, *(self.stamps.end(each.expires) for each in done.ok.values() if isinstance(each, Header))]
        )

    def peek(self, key: bytes, then: Callable[[bytes | Reason], None]) -> None:
        """Read the mark of a chunk of one shard that this tier holds, and keep it with the entry."""
        mine = self.index.get(key) if self.index is not None else None
        if mine is None or self.index is None or mine.state is not State.READY:
            then(Reason.ABSENT)
            return
        self.index.lease(mine)
        item = Item(Name(key, mine.form.shards[0]), used=mine.used)
        deadline = time.monotonic() + self._patience
        self._submit(Op.PEEK, (item,), partial(self._peeked, mine, self._known_end(mine), then), deadline)

    def _peeked(self, mine: Entry, known: float, then: Callable[[bytes | Reason], None], done: Done) -> None:
        reason = self._let_go(mine, self._end(known, done), done)
        if reason is None:
            (header,) = done.ok.values()
            assert isinstance(header, Header)
            mine.prints = (header.mark,)
            then(header.mark)
        else:
            then(reason)

    def discard(self, key: bytes, form: Form, why: str = DELETED) -> None:
        """Delete one chunk: now, or when whoever writes or reads it is done."""
        if key in self._queue and is_value(key):
            self._unqueue(key)
        if self.index is None:
            self._delete_there(key, {Name(key, shard) for shard in form.shards})
            if self.wrote is not None:
                self.wrote(self.label, False, (key,))
        elif not self.is_warm:
            self._unwanted.add(key)
        elif (entry := self.index.get(key)) is not None:
            self._going.add(key)
            if self.index.remove(entry, why):
                self._delete([Name(key, shard) for shard in entry.form.shards], entry.nbytes)

    def clear_one(self, entry: Entry) -> None:
        self.discard(entry.key, entry.form, CLEARED)

    def clear(self, slab: Index, namespace: bytes, *, force: bool) -> None:
        """Forget everything but what is leased, here or (waiting to be written) in the slab.

        What a tier keeps that must be asked is leased by nobody. It takes its time, but from now on nothing
        of it is found through here. Tried again until it is done, or this process ends.
        """
        for key in [key for key in self._queue if key not in slab]:
            self._unqueue(key)
        for entry in self.index.entries() if self.index is not None else ():
            if entry.key.startswith(namespace) and (force or not entry.leases):
                self.clear_one(entry)
        if not self.is_warm and namespace not in self._unwanted_of:
            self._unwanted_of += (namespace,)
        if self.index is None and namespace not in self._uncleared[self._is_clearing :]:
            self._uncleared += (namespace,)
            self._clear_next()

    def _clear_next(self) -> None:
        """Begin, if no write of before is under way: it would land behind the search for what is there."""
        if self._is_clearing or not self._uncleared or not self.clearing.allows():
            return
        if not any(key.startswith(self._uncleared[0]) for key in self._going):
            self._is_clearing = True
            self._submit(Op.CLEAR, (), self._cleared, prefix=self._uncleared[0])

    def _cleared(self, done: Done) -> None:
        self._is_clearing = False
        self.why_uncleared = done.error
        if not done.error:
            self._uncleared = self._uncleared[1:]
            self.cleared += 1
            return
        # Others shall not wait behind what may wait for ever.
        for key, entry in [each for each in self._queue.items() if each[0].startswith(self._uncleared)]:
            self._unqueue(key)
            self._drop(key, "cleared", entry)

    def purge(self, slab: Index, suspect: Suspect) -> None:
        """Delete what it covers, which headers must be read for. Until then none of it is loaded."""
        for key in [key for key in self._queue if key not in slab]:
            self._unqueue(key)
        self._suspects = [*self._suspects[1 - _SUSPECTS :], suspect]
        if self.index is None:
            self._unsifted.append((suspect, set(self._going)))
        for entry in self.index.entries() if self.index is not None else ():
            if entry.key.startswith(suspect.prefix) and not is_value(entry.key):
                self._unread[entry.key] = None
        self._sift()

    def _sift(self) -> None:
        """Go on with that: a few headers at a time, beside loads."""
        suspect, before = self._unsifted[0] if self._unsifted else (None, set())
        if suspect and not self._is_sifting and self._going.isdisjoint(before) and self.clearing.allows():
            self._is_sifting = True
            self._submit(Op.CLEAR, (), self._sifted, suspect=suspect)
        for key in list(islice(self._unread, _HEADERS - self._reading)) if self.up.allows() else ():
            entry = self.index.get(key) if self.index is not None else None
            if entry is not None and entry.state is not State.READY:
                continue  # it is being written
            del self._unread[key]
            if entry is not None:
                self._reading += 1
                self.peek(key, partial(self._was_read, key))

    def _was_read(self, key: bytes, said: bytes | Reason) -> None:
        self._reading -= 1
        if said in (Reason.ERROR, Reason.DEADLINE):
            self._unread[key] = None

    def _sifted(self, done: Done) -> None:
        self._is_sifting = False
        self.why_uncleared = done.error
        if not done.error:
            del self._unsifted[0]
            self.cleared += 1

    # ---- asking

    def lookup(
        self, names: Iterable[Name], deadline: float, then: Callable[[dict[Name, Stat]], None]
    ) -> bool:
        """Ask which of these are there. False: it has enough to answer, or they are being cleared.

        Also if it will hardly answer in time. Then it is still asked, if it has nothing else to answer, to
        see whether it has got faster: what it says is late.
        """
        now = time.monotonic()
        line = self._answers.line(now)
        is_late = line is not None and line.start + line.byte > deadline - now
        if self._lookups >= (1 if is_late else MAX_LOOKUPS):
            return False
        items = tuple(Item(name) for name in names if not name.key.startswith(self._uncleared))
        if not items:
            return False
        self._lookups += 1
        self._answers.asked(1, now)
        heard = (lambda found: None) if is_late else then
        # Whoever asks may wait for less; that a tier did not answer in time for him is no fault of its.
        self._submit(Op.LOOKUP, items, partial(self._looked_up, heard), now + self._patience)
        return not is_late

    def prospect(self, now: float) -> Line | None:
        """When it would bring what it may have, after the answers that it owes. None: nobody knows yet."""
        line, answer = self.speed.line(now), self._answers.line(now)
        if line is None or answer is None:
            return None
        return Line(answer.start + line.start, line.byte)

    def _looked_up(self, then: Callable[[dict[Name, Stat]], None], done: Done) -> None:
        self._lookups -= 1
        took = set(done.failed.values()) <= {Reason.DEADLINE}
        self._answers.ended(1, time.monotonic(), counts=took)
        then({name: stat for name, stat in done.ok.items() if isinstance(stat, Stat)})

    # ---- books

    def poll(self) -> int:
        """Apply what the tier has finished; the number of jobs."""
        finished = self.tier.poll()
        if finished:
            self._heard = time.monotonic()
        for done in finished:
            job = self._jobs.pop(done.id)
            if job.op in (Op.STORE, Op.LOAD, Op.PEEK, Op.DELETE, Op.TOUCH):
                for name in job.names:  # what is not ok is a miss, also if the tier forgot to say why
                    if name not in done.ok:
                        done.failed.setdefault(name, Reason.ERROR)
            self._record(job, done)
            job.then(done)
        return len(finished)

    def persist_order(self) -> None:
        """Tell the tier who leaves first, as far as it thinks otherwise, so that a restart knows."""
        items: list[Item] = []
        newest = 0
        for entry in self.index.order() if self.index is not None else ():
            if entry.used <= newest:
                entry.used = newest + 1000
                names = (Name(entry.key, shard) for shard in entry.form.shards)
                items.extend(Item(name, used=entry.used) for name in names)
            newest = entry.used
        if items and not self.down.is_open:
            self._submit(Op.TOUCH, tuple(items), lambda done: None)

    def _use(self, mine: Entry | None) -> int:
        """The time to note for a use of `mine` now: never later than that of its parent."""
        now = time.time_ns()
        if mine is None:
            return now
        mine.used = now if mine.parent is None else min(now, mine.parent.used - 1000)
        return mine.used

    def close(self, timeout: float = 5.0) -> None:
        self.tier.patience = timeout
        self.tier.close()
        self.poll()
        for entry in list(self._held):
            self._unqueue(entry.key)
        self._say_dropped()

    def _submit(
        self,
        op: Op,
        items: tuple[Item, ...],
        then: Callable[[Done], None],
        deadline: float | None = None,
        prefix: bytes = b"",
        suspect: Suspect | None = None,
    ) -> None:
        job = Job(next(self._ids), op, items, deadline, prefix, suspect)
        names = tuple(item.name for item in items)
        self._jobs[job.id] = _Waiting(op, names, then, time.monotonic())
        self._breaker(op).sent()
        self.tier.submit(job)

    def _scanned(self, done: Done) -> None:
        """A warm start: everything that is there, the oldest first, as far as the capacity goes."""
        index = self.index
        assert index is not None
        if done.error:  # not warm: what is there would be written beside, twice the capacity
            log.error("lmtier: %s: the scan for a warm start failed: %s", self.label, done.error)
            return
        parts: dict[bytes, tuple[tuple[Shard, int], ...]] = {}
        used: dict[bytes, int] = {}
        with collector_paused():
            for (key, shard), stat in done.ok.items():
                if isinstance(stat, Stat):
                    others = parts.get(key, ())
                    parts[key] = (*others, (shard, stat.nbytes))
                    used[key] = max(stat.used, used[key]) if others else stat.used
            forms = {cut: form_of_parts(cut) for cut in set(parts.values())}
            now = self._clock()
            lost: list[bytes] = []
            for key in sorted(parts, key=used.__getitem__):
                form = forms[parts[key]]
                if form is None or form.at_rest > index.capacity or self._is_unwanted(key):
                    lost.append(key)
                else:
                    entry = Entry(key, form, form.at_rest, State.READY, used[key])
                    index.adopt(entry)
                    if self.ttl < FOREVER:  # no later, because it was stored before its last use
                        last = min(now, self.stamps.end(used[key] // 1_000_000))
                        index.ends.set(entry, last + self.ttl)
        for key in lost:
            self._delete([Name(key, shard) for shard, _ in parts[key]], 0)
        self._found = index.used
        if index.used > index.capacity:
            for victim in index.evict(index.used - index.capacity) or ():
                self._metrics.evictions.labels(self.label, "capacity").inc()
                self._delete([Name(victim.key, shard) for shard in victim.form.shards], victim.nbytes)
        self._unwanted.clear()
        self._unwanted_of = ()
        self.is_warm = True
        if len(index):
            log.info("lmtier: %s is warm: %d chunks, %d bytes", self.label, len(index), index.used)

    def _delete(self, names: list[Name], nbytes: int) -> None:
        if names:
            self.deleting += nbytes
            self._going.update(name.key for name in names)
            self._deletions += 1
            items = tuple(Item(name) for name in names)
            self._submit(Op.DELETE, items, partial(self._deleted, names, nbytes))

    def _delete_there(self, key: bytes, names: set[Name]) -> None:
        """Of a tier that must be asked. Beside a job that writes or deletes the chunk it might come first."""
        if key in self._going:
            self._afterwards.setdefault(key, set()).update(names)
        else:
            self._delete(sorted(names), 0)

    def _deleted(self, names: list[Name], nbytes: int, done: Done) -> None:
        self._deletions -= 1
        if done.failed:
            self._undeleted.append((names, nbytes))
        else:
            self.deleting -= nbytes
            keys = {name.key for name in names}
            self._going -= keys
            for key in keys & self._afterwards.keys():
                self._delete(sorted(self._afterwards.pop(key)), 0)

    def _look_after(self) -> None:
        """Try again what failed, and blame a tier for jobs that do not come back."""
        if self._undeleted and self.down.allows():
            names, nbytes = self._undeleted.pop()
            self.deleting -= nbytes
            self._delete(names, nbytes)
        self._clear_next()
        self._sift()
        if self._dropped and time.monotonic() - self._said_dropped > _SAID_AGAIN:
            self._say_dropped()
        if not self.is_warm and not self._jobs and self.up.allows():
            self._submit(Op.SCAN, (), self._scanned)
        now = time.monotonic()
        for number, job in islice(self._jobs.items(), _OLDEST):
            if now - job.since < self._patience:
                break
            # A write may wait for others of its size: it gets more time.
            late = now - job.since > self._patience * (1 if job.op in (Op.LOAD, Op.PEEK, Op.LOOKUP) else 10)
            if late and number > self._overdue and job.op not in (Op.SCAN, Op.CLEAR):
                self._overdue = number
                self._metrics.tier_failures.labels(self.label, job.op.value, "overdue").inc()
                self._judge(job.op, False, "jobs do not come back")

    def _tokens(self, key: bytes) -> int:
        return 0 if is_value(key) else self._chunk_tokens

    def _drop(self, key: bytes, reason: str, entry: Entry, *, is_lost: bool = True) -> None:
        count_dropped(self._metrics, self.label, reason, [entry.form.at_rest], self._tokens(key))
        if reason not in _INTENDED:
            self._dropped[reason] += 1
            self.lost += is_lost
        if self.unstored is not None:
            self.unstored((key,), reason)

    def _say_dropped(self) -> None:
        if self._dropped:
            what = ", ".join(f"{count} {reason}" for reason, count in sorted(self._dropped.items()))
            log.warning("lmtier: %s was not given all that it should have: %s", self.label, what)
            self._dropped.clear()
            self._said_dropped = time.monotonic()

    def _transfer(self, direction: str, nbytes: int, seconds: float) -> None:
        self._metrics.transfer_bytes.labels(self.label, direction).observe(nbytes)
        self._metrics.transfer_seconds.labels(self.label, direction).observe(seconds)

    def _breaker(self, op: Op) -> Breaker:
        if op is Op.CLEAR:  # for which a user may lack the right
            return self.clearing
        return self.up if op in (Op.LOAD, Op.PEEK, Op.LOOKUP, Op.SCAN) else self.down

    def _record(self, job: _Waiting, done: Done) -> None:
        """Count failures, and tell the breaker. Absent and corrupt objects are no fault of the tier."""
        for reason in done.failed.values():
            self._metrics.tier_failures.labels(self.label, job.op.value, reason).inc()
        faults = {Reason.FULL, Reason.ERROR, Reason.DEADLINE} & set(done.failed.values())
        if self._is_tried_again(job.op, done):
            faults.discard(Reason.FULL)
        self._judge(job.op, not (faults or (done.error and not done.failed)), done.error)

    def _judge(self, op: Op, ok: bool, error: str) -> None:
        breaker = self._breaker(op)
        was_open = breaker.is_open
        breaker.record(ok)
        if breaker.is_open and not was_open:
            log.warning(
                "lmtier: %s %s keeps failing and is left alone for now: %s", self.label, op.value, error
            )
        elif was_open and not breaker.is_open:
            log.warning("lmtier: %s %s works again", self.label, op.value)

    def _declare(self) -> None:
        metrics, label = self._metrics, self.label
        for direction, breaker in (("up", self.up), ("down", self.down)):
            gauge = metrics.breaker_open.labels(label, direction)
            gauge.set_function(lambda breaker=breaker: float(breaker.is_open))  # type: ignore[misc]  # mypy: lambdas
        for op, reason in ((Op.LOAD, Reason.CORRUPT), (Op.STORE, Reason.FULL)):
            metrics.tier_failures.labels(label, op.value, reason)  # 0, so that the first is seen to be a rise
        metrics.dropped_tokens.labels(label, "queue_full")
        if self.index is not None:
            metrics.written_bytes_per_day.labels(label).set_function(lambda: self.pace.per_day(self._clock()))
        if (budget := self.budget) is not None:
            metrics.dropped_tokens.labels(label, "write_budget")
            metrics.write_budget_bytes.labels(label).set_function(lambda: budget.left(self._clock()))
        if (endurance := self._endurance) is not None:
            metrics.life_days.labels(label).set_function(
                lambda: endurance / pace if (pace := self.pace.per_day(self._clock())) else float("inf")
            )
        for rule in Choice.RULES if self.choice is not None else ():
            metrics.write_rule.labels(label, rule).set_function(
                lambda rule=rule: float(self.rule == rule)  # type: ignore[misc]  # mypy: lambdas
            )
        metrics.queue_depth.labels(label, "store").set_function(lambda: len(self._queue) + self.storing)
        metrics.queue_depth.labels(label, "all").set_function(lambda: len(self._jobs))
        for word in WORDS if self._has_codec else ():
            if word != AUTO:
                gauge = metrics.codec.labels(label, word)
                gauge.set_function(lambda word=word: float(self.tier.codec == word))  # type: ignore[misc]  # mypy: lambdas
        if (index := self.index) is not None:
            if index.capacity < UNBOUNDED:
                metrics.capacity_bytes.labels(label).set(index.capacity)
            metrics.used_bytes.labels(label).set_function(lambda: index.used + self.deleting)
            metrics.pinned_bytes.labels(label).set_function(lambda: index.kept_bytes)
            metrics.chunks.labels(label).set_function(lambda: len(index))
            count_shares(metrics, label, index)

    def check(self) -> None:
        if self.index is not None:
            self.index.check()
            assert self.index.used <= self.index.capacity, "over capacity"
            most = max(self.index.capacity, self._found)
            assert self.index.used + self.deleting <= most, "over capacity, with what is being deleted"
        assert self._held <= set(self._queue.values()), "what is not queued is held"
        assert self._held_bytes == sum(entry.nbytes for entry in self._held), "held bytes"
        assert self.budget is None or self.budget.left(self._clock()) >= -1, "over budget"


def count_dropped(metrics: Metrics, tier: str, reason: str, nbytes: Collection[int], tokens: int) -> None:
    """Objects, by their bytes, that a tier should have got and did not."""
    metrics.dropped_tokens.labels(tier, reason).inc(tokens)
    metrics.dropped_objects.labels(tier, reason).inc(len(nbytes))
    metrics.dropped_bytes.labels(tier, reason).inc(sum(nbytes))


class _Limit:
    """How much the storage has for us, where it said that it is full: what we had there just then.

    What was sent before that was known is stored again, in the place of others. If that fails too, it does
    not help that others leave, and nothing fits. After a pause whatever comes next finds out more.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._nbytes = UNBOUNDED
        self._until = 0.0
        self._first = UNBOUNDED
        self._in_vain = 0

    @property
    def is_known(self) -> bool:
        if self._clock() >= self._until:
            self._nbytes = self._first = UNBOUNDED
        return self._nbytes < UNBOUNDED

    @property
    def nbytes(self) -> int:
        return self._nbytes if self.is_known else UNBOUNDED

    def is_news_to(self, job: int) -> bool:
        """Whether this job was sent before it was known."""
        return not self.is_known or job < self._first

    def met(self, job: int, used: int, following: int) -> None:
        """This job found no room, while we had `used` bytes there; jobs from `following` on know of it."""
        if self.is_news_to(job):
            self._first = min(self._first, following)
            self._nbytes = min(self._nbytes, used)
        else:
            self._in_vain += 1
            self._nbytes = 0
        self._until = self._clock() + min(_FULL_MOST, FULL_PAUSE * 2**self._in_vain)

    def fitted(self) -> None:
        """There was room for a job."""
        self._in_vain = 0


def count_shares(metrics: Metrics, tier: str, index: Index) -> None:
    for pool in index.pools or ():
        labels = (tier, pool.name)
        metrics.share_bytes.labels(*labels).set(pool.room)
        used = metrics.share_used_bytes.labels(*labels)
        used.set_function(lambda pool=pool: pool.used)  # type: ignore[misc]  # mypy: lambdas
        pool.evicted = metrics.share_evictions.labels(*labels).inc


def _worst(reasons: set[Reason]) -> Reason:
    return Reason.CORRUPT if Reason.CORRUPT in reasons else min(reasons)


def form_of_parts(cut: Iterable[tuple[Shard, int]]) -> Form | None:
    """The form of a chunk whose parts a scan found; None if they overlap, so that none can be trusted."""
    shards, sizes = zip(*sorted(cut), strict=True)
    if overlapping(shards) is not None:
        return None
    return form_of(None, shards, sizes)


def rooms(form: Form) -> list[int]:
    return [padded(size) for size in form.sizes]


def taken_bytes(form: Form, done: Done) -> int:
    """Bytes at rest of those parts of a chunk that were stored."""
    fewer = {name: PAGE + stat.nbytes for name, stat in done.ok.items() if isinstance(stat, Stat)}
    return sum(fewer.values()) + done_bytes(form, done.ok.keys() - fewer)


def loaded_bytes(done: Done) -> int:
    return sum(stored_size(header.at_rest) for header in done.ok.values() if isinstance(header, Header))


def done_bytes(form: Form, names: Iterable[Name]) -> int:
    """Bytes at rest of those parts of a chunk that `names` are."""
    sizes = dict(zip(form.shards, form.sizes, strict=True))
    return sum(stored_size(sizes[name.shard]) for name in names)


def ancestry(entry: Entry | None) -> list[Entry]:
    """An entry and its ancestors that are still there, head first."""
    run: list[Entry] = []
    while entry is not None and entry.state is not State.GONE:
        run.append(entry)
        entry = entry.parent
    return run[::-1]
