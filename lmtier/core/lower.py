"""A lower tier, as the cache sees it: the parts that owned and shared tiers have in common.

The cache decides which chunks are written and loaded. A lower tier keeps account of its I/O: the chunks
that wait to be written, the jobs in flight, and whether the tier is trusted now. It runs on the owner's
thread.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import NamedTuple, TypeAlias

from lmtier.config import TierSpec
from lmtier.core.index import Index, Occupancy
from lmtier.core.jobs import Jobs
from lmtier.core.match import EVICTED, EXPIRED, Entry, EntryState
from lmtier.core.place import Place
from lmtier.core.write_queue import WriteQueue
from lmtier.errors import log
from lmtier.format.compression import RAW
from lmtier.format.keys import is_state, tenant_of
from lmtier.format.layout import PAGE, ChunkForm, Name, Shard, padded, stored_size
from lmtier.format.objects import NO_MARK, Header, Selector
from lmtier.observe.follower import CacheObservers
from lmtier.observe.metrics import INTENDED_DROPS, Metrics
from lmtier.rules.lifetimes import FOREVER, HeaderClock
from lmtier.rules.shares import Share
from lmtier.rules.worth import TierSpeed
from lmtier.rules.writing import Budget, WriteRate, WriteRuleTrial
from lmtier.tiers.base import Done, Item, Op, Reason, Stat, Tier

MAX_STORING = 12
"""The most chunks that are written to a tier at a time: enough to keep its threads busy, few to lose."""
_LOG_PAUSE = 60.0
"""Seconds between two lines of the log about what is dropped."""
_SUSPECTS = 16  # remembered after the searches for them have ended: a chunk may be written late

LOST = {
    *(Reason.ABSENT, Reason.CORRUPT, Reason.FOREIGN, Reason.UNSEALED, Reason.EXPIRED, Reason.CLEARED),
}
"""Reasons for which a part can never be read. Then the rest of its chunk is useless too."""

Heard: TypeAlias = "Callable[[dict[Shard, Header] | Reason, float], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheContext:
    """What a lower tier knows about the cache above it."""

    slab: Index
    view: Callable[[int, int], memoryview]
    """Returns the bytes of an extent of the slab."""
    release: Callable[[Entry], None]
    """Ends a lease in the slab."""
    metrics: Metrics
    followers: CacheObservers
    chunk_tokens: int
    queue_length: int
    patience: float
    """Seconds that a load may take."""
    clock: Callable[[], float] = time.monotonic
    shares: Sequence[Share] = ()


class WriteTarget(NamedTuple):
    """Where a chunk is written, and for how long."""

    entry: Entry | None
    """The entry in the tier's index, if it has one."""
    replaces: Sequence[Name | None]
    """The object that each shard overwrites, if any."""
    end: float
    """When the chunk expires."""


class WriteDeferral(Enum):
    LATER = auto()
    """Room is being made. This chunk waits, and so do those behind it."""
    SKIPPED = auto()
    """This chunk waits, or is not written at all. The next one may be written."""


class LowerTier(Place):
    """The base of OwnedTier and SharedTier."""

    def __init__(self, label: str, spec: TierSpec, tier: Tier, context: CacheContext) -> None:
        self.label = label
        self.tier = tier
        self.write = spec.write
        self.ttl = spec.ttl
        self._context = context
        self._clock = clock = context.clock
        self._metrics = context.metrics
        self.stamps = HeaderClock(clock(), time.time())
        self.budget = Budget(spec.writes_per_day, clock()) if spec.writes_per_day else None
        self.pace = WriteRate(clock())
        self.choice: WriteRuleTrial | None = None
        """With write=auto, this chooses the rule."""
        self._has_codec = spec.codec != RAW
        self._jobs = Jobs(label, tier, context.metrics, context.patience, self._is_excused)
        self.load_breaker, self.store_breaker = self._jobs.up, self._jobs.down
        self.clear_breaker = self._jobs.clearing
        self.deleting_again = self._jobs.deleting_again
        self.speed = TierSpeed()
        """The speed of loads."""
        self.is_warm = True
        """Whether the content of the tier is known, if it can be. Until then nothing is written."""
        self.deleting_bytes = 0
        """Bytes of objects whose deletion has not been confirmed. They still take room."""
        self.undeletable = 0
        """Bytes whose deletion has failed. They take room until it succeeds, perhaps for ever."""
        self._deletions = 0
        """Unfinished deletion jobs."""
        self._undeleted = deque[tuple[list[Name], int]]()
        """Deletions that failed, to be tried again in turn: some objects can never be deleted."""
        self._is_deleting_again = False
        """One of them is tried now."""
        self._busy_keys: set[bytes] = set()
        """Chunks that are being written, deleted or overwritten. A name is in one such job at a time."""
        self.storing_entries: set[Entry] = set()
        """Chunks of the slab that are being written, each leased for that."""
        self._storing_bytes = 0
        self._writes = WriteQueue(context.slab, context.release, self._given_up, context.queue_length)
        self._suspects: list[Selector] = []
        """A chunk that one of these covers is not loaded. It is deleted as soon as its header is read."""
        self.why_uncleared = ""
        """The last error of a clear."""
        self.is_paused = False
        """Nothing new is written: another process is about to take over."""
        self.lost = 0
        """Chunks that should have been written here and were not."""
        self._dropped: Counter[str] = Counter()
        """Objects dropped since the last line in the log, by reason."""
        self._dropped_logged = float("-inf")
        self._declare(spec.endurance)

    def __repr__(self) -> str:
        return f"<{self.label} backlog {self.backlog}, breakers {self.load_breaker}, {self.store_breaker}>"

    # ---- what it holds

    @abstractmethod
    def is_stored(self, key: bytes, form: ChunkForm) -> bool:
        """Whether the chunk is known to be stored here, in a form that a reader of `form` can use."""

    @abstractmethod
    def is_stored_or_storing(self, key: bytes, form: ChunkForm) -> bool:
        """Whether the chunk is known to be stored or being written, and readable, so need not be stored
        again."""

    @abstractmethod
    def load_form(self, key: bytes, reader_form: ChunkForm) -> ChunkForm | None:
        """The form in which to load a chunk. None: it is not stored here, or is being deleted."""

    @abstractmethod
    def occupancy(self) -> Occupancy:
        """What the tier holds, as far as it is known."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """A request asked for these chunks. Mark them as used."""

    def is_stored_or_queued(self, key: bytes, form: ChunkForm) -> bool:
        """Whether the chunk is stored, being written, or waiting to be written, in a form that serves
        `form`."""
        return key in self._writes

    # ---- unfinished work

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    @property
    def waiting(self) -> int:
        """Chunks that wait to be written."""
        return len(self._writes)

    @property
    def backlog(self) -> int:
        """Chunks that are still to be written or deleted, and namespaces to be cleared."""
        return len(self._writes) + len(self.storing_entries) + self._deletions + len(self._undeleted)

    @property
    def is_busy(self) -> bool:
        """Whether the tier has unfinished work that waiting can finish."""
        return self._jobs.is_moving or (self.backlog > 0 and not self._is_stuck)

    @property
    def is_clear_failing(self) -> bool:
        """Whether what is still to be cleared or searched only fails now."""
        return self.clear_breaker.is_open

    @property
    def is_delete_failing(self) -> bool:
        """Whether what is still to be deleted only fails now."""
        return self.deleting_again.is_open and not self._deletions

    @property
    def _is_stuck(self) -> bool:
        """Nothing gets done: a breaker is open, or all waits for objects that cannot be deleted."""
        if self.store_breaker.is_open or not self.is_delete_failing:
            return self.store_breaker.is_open
        blocked_writes = sum(key in self._busy_keys for key in self.waiting_writes)
        return self.backlog == len(self._undeleted) + blocked_writes

    @property
    def leased_bytes(self) -> int:
        """Bytes of the slab that cannot leave until this tier has written them."""
        return self._storing_bytes + self._writes.leased_bytes

    @property
    def waiting_writes(self) -> list[bytes]:
        """The keys of the chunks that wait to be written here, in order."""
        return self._writes.under(b"")

    def why_busy(self) -> str:
        """Why another process must not use this tier now; empty: it may."""
        if self._jobs:
            return f"tier {self.label}: {len(self._jobs)} reads, writes or deletions have not ended"
        if self._undeleted or not self.is_clear_done or self.pending_clears:
            return f"tier {self.label}: a deletion is not done"
        return ""

    @property
    def leased(self) -> Iterable[Entry]:
        """The entries of the slab that are leased while they wait to be written here."""
        return self._writes.leased

    def is_behind(self, nbytes: int) -> bool:
        """Whether a record of so many bytes finds too many waiting, and their number is going down."""
        is_full = not self._writes.has_room_for_record(nbytes)
        return is_full and not self._is_stuck and not self._jobs.is_silent

    @property
    def pending_clears(self) -> int:
        """The namespaces that are still to be cleared, and the unfinished searches for suspect chunks."""
        return 0

    @property
    @abstractmethod
    def is_clear_done(self) -> bool:
        """Whether every clear is done."""

    # ---- writing

    @property
    def rule(self) -> str:
        """The rule in use now: the option `write`, or the rule that `auto` chose."""
        return self.write if self.choice is None else self.choice.rule

    @property
    def watches(self) -> bool:
        """Whether writes here depend on which chunks are asked for again."""
        return self.write in ("reused", "auto") or self.budget is not None

    def on_ready(self, entry: Entry, source: LowerTier | None = None) -> None:
        """A chunk is complete in the slab: it came from an engine, or from a tier."""
        if self.choice is not None:
            self.choice.on_stored(entry.key, entry.is_reused, entry.form.stored_bytes, self._clock())
        if source is not self and (self.rule == "always" or (self.rule == "reused" and entry.is_reused)):
            self.queue_write(entry)

    def on_miss(self, keys: Sequence[bytes]) -> None:
        """A request asked for these chunks, and the slab does not have them."""
        if self.choice is not None:
            self.choice.on_miss(keys)

    def on_hit(self, run: Sequence[Entry]) -> None:
        """A request asked for these chunks, and the slab has them."""
        if self.choice is not None and run:
            self.choice.on_hit([entry.key for entry in run], run[0].form.stored_bytes, self._clock())
        if self.rule == "reused":
            for entry in run:
                if entry.state is EntryState.READY:
                    self.queue_write(entry)

    def on_evicting(self, entries: Iterable[Entry]) -> None:
        """These chunks leave the slab next. The chunks before them in their prompts are written first.

        A chunk is useless without those before it, and the budget may end, or a restart may lose the slab.
        """
        visited: set[Entry] = set()
        for entry in entries:
            chain: list[Entry] = []
            ancestor: Entry | None = entry
            while ancestor is not None and ancestor not in visited:
                if self.choice is None and not self._needs(ancestor.key, ancestor.form):
                    break
                visited.add(ancestor)
                chain.append(ancestor)
                ancestor = ancestor.parent
            for each in reversed(chain):
                if self.choice is not None:
                    self.choice.on_evicting(each.key, each.is_reused, each.form.stored_bytes, self._clock())
                if self.rule == "evicted" and each.state is EntryState.READY:
                    self.queue_write(each)

    def queue_write(self, entry: Entry) -> None:
        """Write this chunk when its turn comes, if the slab still has it then."""
        if self.write == "never" or not self._needs(entry.key, entry.form):
            return
        if self._writes.has_room_for(entry):
            self._writes.add(entry)
        else:
            self._drop(entry, "queue_full")

    def _needs(self, key: bytes, form: ChunkForm) -> bool:
        """Whether the chunk must still be written here, as far as is known."""
        return not self.is_stored_or_queued(key, form)

    @abstractmethod
    def _given_up(self, key: bytes) -> None:
        """What waited under this key will not be written."""

    def pump(self, spare: float = float("inf")) -> None:
        """Submit waiting writes, as far as the tier, its room and its breaker allow.

        Each chunk is leased in the slab until its write is done. At most `spare` bytes are leased in addition
        to those that are leased now.
        """
        self._run_background()
        if not self.is_paused:
            self._submit_writes(spare)
        self._delete_again()

    def _delete_again(self) -> None:
        if self._undeleted and not self._is_deleting_again and self.deleting_again.allows():
            names, nbytes = self._undeleted.popleft()
            self.deleting_bytes -= nbytes
            self._is_deleting_again = True
            self._delete(names, nbytes, is_again=True)

    def _submit_writes(self, spare_bytes: float) -> None:
        slab, writes, postponed = self._context.slab, self._writes, 0
        while (
            len(writes) > postponed
            and len(self.storing_entries) < MAX_STORING
            and self.is_warm
            and self.store_breaker.allows()
        ):
            key = writes.next()
            if self._must_wait(key):
                writes.postpone(key)
                postponed += 1
                continue
            entry = slab.get(key)
            if entry is None or entry.state is not EntryState.READY:
                removal_reason = slab.why_gone(key)
                reason = EXPIRED if removal_reason == EXPIRED else "evicted_before_write"
                self._drop(writes.give_up(key), reason, is_lost=removal_reason == EVICTED)
                continue
            if not entry.leases and entry.nbytes > spare_bytes:
                break  # writes that hang must not take all of the slab
            if self.budget is not None and not self.budget.allows(
                entry.form.stored_bytes, entry.is_reused, self._clock()
            ):
                self._skip(entry, "write_budget")
                continue
            target = self._spot_for(entry)
            if target is WriteDeferral.LATER:
                break
            if target is WriteDeferral.SKIPPED:
                continue
            spare_bytes -= 0 if entry.leases else entry.nbytes
            slab.lease(entry)
            writes.take(key)
            self._store(entry, target)

    def _must_wait(self, key: bytes) -> bool:
        """Whether a running job for this chunk has to end first."""
        return key in self._busy_keys

    @abstractmethod
    def _spot_for(self, entry: Entry) -> WriteTarget | WriteDeferral:
        """Where to write this chunk. A chunk that should not be written is removed from the queue."""

    def _store(self, entry: Entry, target: WriteTarget) -> None:
        form = entry.form
        self._busy_keys.update((entry.key, *(name.key for name in target.replaces if name)))
        assert form.layout is not None  # every chunk in the slab was declared, or loaded with its header
        marks = entry.marks or (NO_MARK,) * len(form.shards)
        used_ns = self._use(target.entry)
        expires = self.stamps.stamp(target.end)
        ttl_seconds = 0.0 if target.end == FOREVER else max(1e-3, target.end - self._clock())
        items = tuple(
            Item(
                name := Name(entry.key, shard),
                self._context.view(offset, padded(size)),
                Header(name, form.layout, size, mark, expires=expires, provenance=entry.provenance),
                replaced_name,
                used_ns,
                ttl_seconds,
            )
            for shard, size, offset, mark, replaced_name in zip(
                form.shards, form.sizes, entry.offsets, marks, target.replaces, strict=True
            )
        )
        self.storing_entries.add(entry)
        self._storing_bytes += entry.nbytes
        if self.budget is not None:
            self.budget.reserve(form.stored_bytes)
        self._jobs.submit(Op.STORE, items, partial(self._end_store, entry, target))

    def _end_store(self, entry: Entry, target: WriteTarget, done: Done) -> None:
        self.storing_entries.remove(entry)
        self._storing_bytes -= entry.nbytes
        self._busy_keys.difference_update((entry.key, *(name.key for name in target.replaces if name)))
        self._context.release(entry)
        nbytes = _stored_bytes(entry.form, done)
        # A failed store may have written any part of an object.
        written_bytes, now = entry.form.stored_bytes if done.failed else nbytes, self._clock()
        self.pace.wrote(written_bytes, now)
        if self.budget is not None:
            self.budget.spend(entry.form.stored_bytes, written_bytes, now)
        if not done.failed:
            self._metrics.stored_tokens.labels(self.label).inc(self._tokens(entry.key))
            self._count_transfer("down", nbytes, done.seconds)
            if self._has_codec:
                headers = len(entry.form.shards) * PAGE
                self._metrics.codec_bytes.labels(self.label, "given").inc(entry.form.stored_bytes - headers)
                self._metrics.codec_bytes.labels(self.label, "stored").inc(nbytes - headers)
        elif not self._is_excused(Op.STORE, done):
            self._drop(entry, next(iter(done.failed.values())))
        self._note_stored(entry, target, nbytes, done)

    @abstractmethod
    def _note_stored(self, entry: Entry, target: WriteTarget, nbytes: int, done: Done) -> None:
        """Update this kind of tier after a store."""

    def _is_excused(self, op: Op, done: Done) -> bool:
        """Whether this job failed for a reason that could not be known before, and is tried again."""
        return False

    def _use(self, entry: Entry | None) -> int:
        """The time to record for a use now, in ns. It is never later than that of the parent."""
        return time.time_ns()

    def _end_of(self, entry: Entry) -> float:
        """When a chunk of the slab would expire here, if it were written now."""
        return min(self._context.slab.expiries.expiry(entry), self._clock() + self.ttl)

    # ---- loading

    def load(self, key: bytes, form: ChunkForm, payloads: Sequence[memoryview], callback: Heard) -> None:
        """Read one chunk into `payloads`.

        `callback` gets its headers or the reason of a miss, and when it expires.
        """
        tier_entry, known_expiry = self._begin_read(key)
        used = self._use(tier_entry)
        items = tuple(
            Item(Name(key, shard), payload, used=used)
            for shard, payload in zip(form.shards, payloads, strict=True)
        )
        now = time.monotonic()
        self.speed.asked(form.stored_bytes, now)
        end_load = partial(self._end_load, tier_entry, known_expiry, form, callback)
        self._jobs.submit(Op.LOAD, items, end_load, now + self._context.patience)

    def _end_load(
        self, tier_entry: Entry | None, known_expiry: float, form: ChunkForm, callback: Heard, done: Done
    ) -> None:
        expiry, reason = self._judge_read(tier_entry, known_expiry, done)
        counts_for_speed = reason is None or (reason is Reason.DEADLINE and not done.has_waited)
        self.speed.ended(form.stored_bytes, time.monotonic(), counts=counts_for_speed)
        if reason is None:
            headers = {name.shard: each for name, each in done.ok.items() if isinstance(each, Header)}
            nbytes = sum(stored_size(header.stored_nbytes) for header in headers.values())
            self._count_transfer("up", nbytes, done.seconds)
            callback(headers, expiry)
        else:
            callback(reason, expiry)

    def _judge_read(self, entry: Entry | None, known_end: float, done: Done) -> tuple[float, Reason | None]:
        """When a chunk that was read expires; and why reading failed, if it did."""
        known_end = min(known_end, self._end_here(entry))
        headers = [(name.key, each) for name, each in done.ok.items() if isinstance(each, Header)]
        expiry = min([known_end, *(self.stamps.end(header.expires) for _, header in headers)])
        reasons = set(done.failed.values())
        if any(each.covers(key, header.provenance) for each in self._suspects for key, header in headers):
            reasons.add(Reason.CLEARED)
        if expiry <= self._clock():
            reasons.add(Reason.EXPIRED)
            if entry is None or entry.state is not EntryState.GONE:  # otherwise it was counted when it left
                self._metrics.expired.labels(self.label).inc()
        self._end_read(entry, expiry, reasons, done)
        return expiry, worst(reasons) if reasons else None

    @abstractmethod
    def _begin_read(self, key: bytes) -> tuple[Entry | None, float]:
        """The entry of the chunk to read, leased; and when it expires, as far as that is known."""

    def _end_here(self, tier_entry: Entry | None) -> float:
        """When a chunk that was read ends in this tier by now. It may have been hastened meanwhile."""
        return FOREVER

    @abstractmethod
    def _end_read(self, tier_entry: Entry | None, end: float, reasons: set[Reason], done: Done) -> None:
        """End that lease. If a part of the chunk is lost, delete the whole chunk."""

    # ---- deleting

    def begin_clear(self, selector: Selector) -> None:
        self._writes.forget_missing()
        self._writes.unlease_queued(selector)
        if selector.needs_headers:
            self._block_loads(selector)

    def is_changing_tenant(self, tenant: bytes) -> bool:
        """Whether chunks of this tenant are being written or deleted now."""
        return any(tenant_of(key) == tenant for key in self._busy_keys)

    def fails_to_delete(self, tenant: bytes) -> bool:
        """Whether all that is still to be done for this tenant are deletions that fail."""
        if not (self.is_delete_failing and self.is_clear_done):
            return False
        failing_keys = {name.key for names, _ in self._undeleted for name in names}
        return all(key in failing_keys for key in self._busy_keys if tenant_of(key) == tenant)

    def _block_loads(self, suspect: Selector) -> None:
        if suspect not in self._suspects:
            if self.is_clear_done:
                del self._suspects[: 1 - _SUSPECTS]
            self._suspects.append(suspect)

    def _delete(self, names: list[Name], nbytes: int = 0, *, is_again: bool = False) -> None:
        if names:
            self.deleting_bytes += nbytes
            self._busy_keys.update(name.key for name in names)
            self._deletions += 1
            items = tuple(Item(name) for name in names)
            end_delete = partial(self._end_delete, names, nbytes, is_again)
            self._jobs.submit(Op.DELETE, items, end_delete, is_again=is_again)

    def _end_delete(self, names: list[Name], nbytes: int, is_again: bool, done: Done) -> None:
        self._deletions -= 1
        if is_again:
            self._is_deleting_again = False
            self.undeletable -= nbytes
        if done.failed:
            self.undeletable += nbytes
            self._undeleted.append((names, nbytes))
        else:
            self.deleting_bytes -= nbytes
            self._busy_keys.difference_update(name.key for name in names)

    # ---- results and the end

    def poll(self) -> int:
        """Apply the results of the tier. Returns the number of jobs."""
        return self._jobs.poll()

    @abstractmethod
    def persist_order(self) -> None:
        """Give the tier the order of eviction where its own differs. A restart needs it."""

    def close(self, timeout: float = 5.0) -> None:
        self.tier.patience = timeout
        self.tier.close()
        self.poll()
        self._writes.close()
        self._log_dropped()

    def _run_background(self) -> None:
        """Count late jobs as failures of the tier, and do what goes on in the background."""
        if self._dropped and time.monotonic() - self._dropped_logged > _LOG_PAUSE:
            self._log_dropped()
        self._jobs.blame_late_ones()

    def _tokens(self, key: bytes) -> int:
        return 0 if self._context.slab.is_record(key) or is_state(key) else self._context.chunk_tokens

    def _drop(self, entry: Entry, reason: str, *, is_lost: bool = True) -> None:
        """Count a chunk that should be written here and is not."""
        self._metrics.drop(self.label, reason, [entry.form.stored_bytes], self._tokens(entry.key))
        if reason not in INTENDED_DROPS:
            self._dropped[reason] += 1
            self.lost += is_lost
        for notify in self._context.followers.not_stored:
            notify(self.label, (entry.key,), reason)

    def _skip(self, entry: Entry, why: str) -> WriteDeferral:
        """This chunk of the slab, whose turn it is, is not written here at all."""
        self._writes.give_up(entry.key)
        self._drop(entry, why)
        return WriteDeferral.SKIPPED

    def _log_dropped(self) -> None:
        if self._dropped:
            what = ", ".join(f"{count} {reason}" for reason, count in sorted(self._dropped.items()))
            log.warning("lmtier: tier %s: some objects were dropped instead of written: %s", self.label, what)
            self._dropped.clear()
            self._dropped_logged = time.monotonic()

    def _count_transfer(self, direction: str, nbytes: int, seconds: float) -> None:
        self._metrics.transfer_bytes.labels(self.label, direction).observe(nbytes)
        self._metrics.transfer_seconds.labels(self.label, direction).observe(seconds)

    def _declare(self, endurance: float | None) -> None:
        metrics, label = self._metrics, self.label
        for direction, breaker in (("up", self.load_breaker), ("down", self.store_breaker)):
            gauge = metrics.breaker_open.labels(label, direction)
            gauge.set_function(lambda breaker=breaker: float(breaker.is_open))  # type: ignore[misc]  # mypy: lambdas
        sealed = [(Op.LOAD, Reason.SEALED)] if self.tier.keys is not None else []
        damaged = [(Op.LOAD, Reason.CORRUPT), (Op.PEEK, Reason.CORRUPT)]
        for op, reason in (*damaged, (Op.STORE, Reason.FULL), *sealed):
            # Starts at 0, so that the first one shows as a rise.
            metrics.tier_failures.labels(label, op.value, reason)
        metrics.dropped_tokens.labels(label, "queue_full")
        metrics.stored_tokens.labels(label)  # starts at 0: a tier that drops all that it gets drops 100 %
        if (budget := self.budget) is not None:
            metrics.dropped_tokens.labels(label, "write_budget")
            metrics.write_budget_bytes.labels(label).set_function(lambda: budget.left(self._clock()))
        if endurance is not None:
            metrics.life_days.labels(label).set_function(
                lambda: endurance / pace if (pace := self.pace.per_day(self._clock())) else float("inf")
            )
        metrics.queue_depth.labels(label, "store").set_function(
            lambda: len(self._writes) + len(self.storing_entries)
        )
        metrics.queue_depth.labels(label, "all").set_function(lambda: len(self._jobs))
        if self._has_codec:
            metrics.codec.labels(label, self.tier.codec).set(1)

    def check(self) -> None:
        """Check every invariant; raises AssertionError."""
        self._writes.check()
        assert self.budget is None or self.budget.left(self._clock()) >= -1, "over budget"


def count_shares(metrics: Metrics, tier: str, index: Index) -> None:
    for pool in index.pools or ():
        labels = (tier, pool.name)
        metrics.share_bytes.labels(*labels).set(pool.share_bytes)
        used = metrics.share_used_bytes.labels(*labels)
        used.set_function(lambda pool=pool: pool.used)  # type: ignore[misc]  # mypy: lambdas
        pool.evicted = metrics.share_evictions.labels(*labels).inc


def names_of(entry: Entry) -> list[Name]:
    """The names of the objects of a chunk."""
    return [Name(entry.key, shard) for shard in entry.form.shards]


def worst(reasons: set[Reason]) -> Reason:
    return Reason.CORRUPT if Reason.CORRUPT in reasons else min(reasons)


def _stored_bytes(form: ChunkForm, done: Done) -> int:
    """The bytes that the stored parts of a chunk take in the tier."""
    compressed_bytes = {name: PAGE + stat.nbytes for name, stat in done.ok.items() if isinstance(stat, Stat)}
    return sum(compressed_bytes.values()) + bytes_at_rest(form, done.ok.keys() - compressed_bytes)


def bytes_at_rest(form: ChunkForm, names: Iterable[Name]) -> int:
    """The bytes that the parts `names` of a chunk take in the tier, without a codec."""
    sizes = dict(zip(form.shards, form.sizes, strict=True))
    return sum(stored_size(sizes[name.shard]) for name in names)
