"""One tier below the slab, as the cache sees it: what it holds, what it may take, whether it is trusted now.

The cache decides what goes down and what comes up; this keeps the books of one tier beside its I/O:
an index with a policy where the tier keeps what it was given, the queue of chunks to be written, the
room that deletions will give back, and a breaker. Everything here runs on the owner's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count

from lmtier.codec import Header
from lmtier.config import TierSpec
from lmtier.index import Entry, Index, State
from lmtier.layout import Form, Name, Shard, form_of, padded, stored_size
from lmtier.metrics import Metrics
from lmtier.policy import make_policy
from lmtier.tier import Done, Item, Job, Op, Reason, Stat, Tier
from lmtier.workers import collector_paused

log = logging.getLogger("lmtier")

MAX_STORING = 8
"""Chunks on their way into one tier at a time: enough to keep its threads busy, little to lose."""


class Breaker:
    """Stops asking a tier that keeps failing, and tries it again after a pause that grows to 4 s."""

    FAILURES = 5
    PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0)

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._opened = 0
        self._retry_at = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._failures >= self.FAILURES

    def allows(self) -> bool:
        """May a job be sent? While open: one probe after each pause."""
        return not self.is_open or (not self._probing and self._clock() >= self._retry_at)

    def sent(self) -> None:
        self._probing = self.is_open

    def record(self, ok: bool) -> None:
        if ok:
            self._failures = self._opened = 0
            self._probing = False
        else:
            self._failures += 1
            if self.is_open:
                self._retry_at = self._clock() + self.PAUSES[min(self._opened, len(self.PAUSES) - 1)]
                self._opened += 1
                self._probing = False


class Below:
    def __init__(
        self, label: str, spec: TierSpec, tier: Tier, metrics: Metrics, chunk_tokens: int, queue_length: int
    ) -> None:
        self.label = label
        self.write = spec.write
        self.tier = tier
        self.breaker = Breaker()
        self.index: Index | None = None
        if tier.keeps:
            self.index = Index(spec.capacity or 1 << 62, make_policy(spec.policy))
        self.is_warm = not tier.keeps
        self.leaving = 0
        """Bytes of evicted objects whose deletion has not been confirmed: still taken."""
        self.storing = 0
        self._queue: deque[bytes] = deque()
        self._queued: set[bytes] = set()
        self._queue_length = queue_length
        self._metrics = metrics
        self._chunk_tokens = chunk_tokens
        self._undeleted: list[tuple[list[Name], int]] = []
        self._going: set[bytes] = set()
        """Chunks being written, deleted or written over: a name is in one such job at a time."""
        self._jobs: dict[int, Callable[[Done], None]] = {}
        self._ids = count(1)
        self._declare()
        if not self.is_warm:
            self._submit(Op.SCAN, (), self._scanned)

    def __repr__(self) -> str:
        state = "open" if self.breaker.is_open else "closed"
        return f"<{self.label} {self.index!r} backlog {self.backlog}, breaker {state}>"

    # ---- what it holds

    def holds(self, key: bytes, form: Form) -> bool:
        """Known to be there and of use to a reader of `form`. A tier that must be asked knows nothing."""
        entry = self.index.get(key) if self.index is not None else None
        return entry is not None and entry.state is State.READY and entry.form.serves(form)

    def keeps(self, key: bytes) -> bool:
        """There or being written, and the tier is trusted: no reason to store it once more."""
        return self.index is not None and key in self.index and not self.breaker.is_open

    def has(self, key: bytes) -> bool:
        """There, being written, or queued to be."""
        return key in self._queued or (self.index is not None and key in self.index)

    def touch(self, keys: Sequence[bytes]) -> None:
        if self.index is not None and len(self.index):
            get = self.index.get
            self.index.touch([entry for key in keys if (entry := get(key))])

    @property
    def is_ready(self) -> bool:
        """Whether it may be given work."""
        return self.is_warm and self.breaker.allows()

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    @property
    def backlog(self) -> int:
        """Chunks that are still to be written or deleted."""
        return len(self._queue) + self.storing + len(self._undeleted)

    @property
    def is_busy(self) -> bool:
        """Whether waiting helps: a tier behind an open breaker gets nothing done."""
        return bool(self._jobs) or (self.backlog > 0 and not self.breaker.is_open)

    # ---- down

    def offer(self, entry: Entry) -> None:
        """Write this chunk when its turn comes, if it is still in the slab by then."""
        if self.write == "never" or self.has(entry.key):
            return
        if len(self._queue) >= self._queue_length:
            self._drop("queue_full")
            return
        self._queue.append(entry.key)
        self._queued.add(entry.key)

    def pump(
        self, slab: Index, view: Callable[[int, int], memoryview], release: Callable[[Entry], None]
    ) -> None:
        """Submit what is queued, as far as the tier, its room and its breaker allow.

        Each chunk is leased in the slab until its write is done; then `release` hears of it.
        """
        self._retry_deletes()
        added: list[Entry] = []
        held_back = 0
        while len(self._queue) > held_back and self.storing < MAX_STORING and self.is_ready:
            key = self._queue[0]
            if key in self._going:
                self._queue.rotate(-1)
                held_back += 1
                continue
            entry = slab.get(key)
            if entry is None or entry.state is not State.READY:
                self._unqueue()
                self._drop("evicted_before_write")
                continue
            replaces: tuple[Name | None, ...] = (None,) * len(entry.form.shards)
            mine: Entry | None = None
            if self.index is not None:
                if key in self.index:
                    self._unqueue()
                    continue
                parent = self._nearest(entry)
                room = self._make_room(entry.form, parent)
                if room is None:
                    break  # deletions under way will make it
                if isinstance(room, str):
                    self._unqueue()
                    self._drop(room)
                    continue
                replaces = room
                mine = self.index.add(key, entry.form, entry.form.at_rest, State.FILLING, parent)
                added.append(mine)
            self._unqueue()
            slab.lease(entry)
            self._store(entry, mine, view, release, replaces)
        if self.index is not None:
            for tail in set(added) - {entry.parent for entry in added}:
                self.index.refresh(ancestry(tail))

    def _store(
        self,
        entry: Entry,
        mine: Entry | None,
        view: Callable[[int, int], memoryview],
        release: Callable[[Entry], None],
        replaces: Sequence[Name | None],
    ) -> None:
        form = entry.form
        self._going.update((entry.key, *(name.key for name in replaces if name)))
        assert form.layout is not None  # whatever is in the slab was declared, or loaded with its header
        prints = entry.prints or (bytes(16),) * len(form.shards)
        used = self._use(mine)
        items = tuple(
            Item(
                name := Name(entry.key, shard),
                view(offset, padded(size)),
                Header(name, form.layout, size, mark),
                old,
                used,
            )
            for shard, size, offset, mark, old in zip(
                form.shards, form.sizes, entry.offsets, prints, replaces, strict=True
            )
        )
        self.storing += 1
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
        self._going.difference_update((entry.key, *(name.key for name in replaced if name)))
        release(entry)
        self._record(Op.STORE, done)
        if not done.failed:
            self._metrics.stored_tokens.labels(self.label).inc(self._chunk_tokens)
            self._transfer("down", entry.form.at_rest, done.seconds)
        else:
            self._drop(next(iter(done.failed.values())))
        if mine is None or self.index is None:
            return
        if mine.state is State.GONE:  # cleared meanwhile: what was written must go
            self.index.release(mine)
            self._delete(list(done.ok), done_bytes(mine.form, done.ok))
        elif done.failed:
            self.index.remove(mine)
            self.index.release(mine)
            self._delete(list(done.ok), done_bytes(mine.form, done.ok))
        else:
            self.index.ready(mine)

    def _make_room(self, form: Form, parent: Entry | None) -> tuple[Name | None, ...] | str | None:
        """Room for one chunk: what it may write over, shard by shard; or why never; or None: later."""
        index, need = self.index, form.at_rest
        assert index is not None
        if need > index.capacity:
            return "larger_than_tier"
        free = index.free - self.leaving
        if free >= need:
            return (None,) * len(form.shards)
        short = need - free - self.leaving
        if short <= 0:
            return None
        # The parent must not leave to make room for its child: that would leave a hole.
        if parent is not None:
            index.lease(parent)
        victims = index.evict(short)
        if parent is not None:
            index.release(parent)
        if victims is None:
            return "no_room"
        self._metrics.evictions.labels(self.label, "capacity").inc(len(victims))
        if len(victims) == 1 and not self.leaving and rooms(victims[0].form) == rooms(form):
            (victim,) = victims
            return tuple(Name(victim.key, shard) for shard in victim.form.shards)
        for victim in victims:
            self._delete([Name(victim.key, shard) for shard in victim.form.shards], victim.nbytes)
        return None

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

    def load(
        self,
        key: bytes,
        form: Form,
        payloads: Sequence[memoryview],
        deadline: float,
        then: Callable[[dict[Shard, Header] | Reason], None],
    ) -> None:
        """Read one chunk into `payloads`; `then` hears its headers, or why it is a miss."""
        names = [Name(key, shard) for shard in form.shards]
        mine = self.index.get(key) if self.index is not None else None
        used = self._use(mine)
        items = tuple(Item(name, payload, used=used) for name, payload in zip(names, payloads, strict=True))
        if mine is not None and self.index is not None:
            self.index.lease(mine)
        self._submit(Op.LOAD, items, partial(self._loaded, mine, form, then), deadline)

    def form(self, key: bytes, asked: Form) -> Form | None:
        """The form in which the tier holds a chunk, None if it does not (any more)."""
        if self.index is None:
            return asked
        entry = self.index.get(key)
        return entry.form if entry is not None and entry.state is State.READY else None

    def _loaded(
        self,
        mine: Entry | None,
        form: Form,
        then: Callable[[dict[Shard, Header] | Reason], None],
        done: Done,
    ) -> None:
        if mine is not None and self.index is not None:
            self.index.release(mine)
        self._record(Op.LOAD, done)
        if not done.failed:
            self._transfer("up", form.at_rest, done.seconds)
            headers = {name.shard: value for name, value in done.ok.items() if isinstance(value, Header)}
            then(headers)
            return
        reasons = set(done.failed.values())
        if mine is not None and reasons & {Reason.ABSENT, Reason.CORRUPT} and self._is_here(mine):
            self.discard(mine.key)  # all of it: what stays of a chunk that lost a part is nobody's
        then(Reason.CORRUPT if Reason.CORRUPT in reasons else min(reasons))

    def _is_here(self, mine: Entry) -> bool:
        return self.index is not None and self.index.get(mine.key) is mine

    def discard(self, key: bytes) -> None:
        """Delete one chunk: now, or when its write is done. While it is read it stays."""
        if self.index is None or (entry := self.index.get(key)) is None:
            return
        if not entry.leases:
            self.index.remove(entry)
            self._delete([Name(key, shard) for shard in entry.form.shards], entry.nbytes)
        elif entry.state is State.FILLING:
            self.index.remove(entry)

    def clear(self, *, force: bool) -> None:
        self._queue.clear()
        self._queued.clear()
        for entry in self.index.entries() if self.index is not None else ():
            if force or not entry.leases:
                self.discard(entry.key)

    # ---- asking

    def lookup(self, names: Iterable[Name], then: Callable[[dict[Name, Stat]], None]) -> None:
        items = tuple(Item(name) for name in names)
        self._submit(Op.LOOKUP, items, partial(self._looked_up, then))

    def _looked_up(self, then: Callable[[dict[Name, Stat]], None], done: Done) -> None:
        self._record(Op.LOOKUP, done)
        then({name: stat for name, stat in done.ok.items() if isinstance(stat, Stat)})

    # ---- books

    def poll(self) -> int:
        """Apply what the tier has finished; the number of jobs."""
        done = self.tier.poll()
        for each in done:
            self._jobs.pop(each.id)(each)
        return len(done)

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
        if items and not self.breaker.is_open:
            self._submit(Op.TOUCH, tuple(items), partial(self._record, Op.TOUCH))

    def _use(self, mine: Entry | None) -> int:
        """The time to note for a use of `mine` now: never later than that of its parent."""
        now = time.time_ns()
        if mine is None:
            return now
        mine.used = now if mine.parent is None else min(now, mine.parent.used - 1000)
        return mine.used

    def close(self) -> None:
        self.tier.close()
        self.poll()

    def _submit(
        self,
        op: Op,
        items: tuple[Item, ...],
        then: Callable[[Done], None],
        deadline: float | None = None,
    ) -> None:
        job = Job(next(self._ids), op, items, deadline)
        self._jobs[job.id] = then
        self.breaker.sent()
        self.tier.submit(job)

    def _scanned(self, done: Done) -> None:
        """A warm start: everything that is there, the oldest first, as far as the capacity goes."""
        index = self.index
        assert index is not None
        parts: dict[bytes, tuple[tuple[Shard, int], ...]] = {}
        used: dict[bytes, int] = {}
        with collector_paused():
            for (key, shard), stat in done.ok.items():
                if isinstance(stat, Stat):
                    others = parts.get(key, ())
                    parts[key] = (*others, (shard, stat.nbytes))
                    used[key] = max(stat.used, used[key]) if others else stat.used
            forms = {cut: form_of(None, *zip(*sorted(cut), strict=True)) for cut in set(parts.values())}
            for key in sorted(parts, key=used.__getitem__):
                form = forms[parts[key]]
                index.adopt(Entry(key, form, form.at_rest, State.READY, used[key]))
        if index.used > index.capacity:
            for victim in index.evict(index.used - index.capacity) or ():
                self._metrics.evictions.labels(self.label, "capacity").inc()
                self._delete([Name(victim.key, shard) for shard in victim.form.shards], victim.nbytes)
        self.is_warm = True
        if done.error:
            log.error("lmtier: %s: the scan for a warm start failed: %s", self.label, done.error)
        elif len(index):
            log.info("lmtier: %s is warm: %d chunks, %d bytes", self.label, len(index), index.used)

    def _delete(self, names: list[Name], nbytes: int) -> None:
        if names:
            self.leaving += nbytes
            self._going.update(name.key for name in names)
            items = tuple(Item(name) for name in names)
            self._submit(Op.DELETE, items, partial(self._deleted, names, nbytes))

    def _deleted(self, names: list[Name], nbytes: int, done: Done) -> None:
        self._record(Op.DELETE, done)
        if done.failed:
            self._undeleted.append((names, nbytes))
        else:
            self.leaving -= nbytes
            self._going.difference_update(name.key for name in names)

    def _retry_deletes(self) -> None:
        if self._undeleted and self.breaker.allows():
            names, nbytes = self._undeleted.pop()
            self.leaving -= nbytes
            self._delete(names, nbytes)

    def _unqueue(self) -> None:
        self._queued.discard(self._queue.popleft())

    def _drop(self, reason: str) -> None:
        self._metrics.dropped_tokens.labels(self.label, reason).inc(self._chunk_tokens)

    def _transfer(self, direction: str, nbytes: int, seconds: float) -> None:
        self._metrics.transfer_bytes.labels(self.label, direction).observe(nbytes)
        self._metrics.transfer_seconds.labels(self.label, direction).observe(seconds)

    def _record(self, op: Op, done: Done) -> None:
        """Count failures, and tell the breaker. Absent and corrupt objects are no fault of the tier."""
        for reason in done.failed.values():
            self._metrics.tier_failures.labels(self.label, op.value, reason).inc()
        faults = {Reason.FULL, Reason.ERROR, Reason.DEADLINE} & set(done.failed.values())
        was_open = self.breaker.is_open
        self.breaker.record(not faults)
        if self.breaker.is_open and not was_open:
            log.warning("lmtier: %s keeps failing and is left alone for now: %s", self.label, done.error)
        elif was_open and not self.breaker.is_open:
            log.warning("lmtier: %s works again", self.label)

    def _declare(self) -> None:
        metrics, label = self._metrics, self.label
        metrics.breaker_open.labels(label).set_function(lambda: float(self.breaker.is_open))
        metrics.queue_depth.labels(label, "store").set_function(lambda: len(self._queue) + self.storing)
        metrics.queue_depth.labels(label, "all").set_function(lambda: len(self._jobs))
        if (index := self.index) is not None:
            metrics.capacity_bytes.labels(label).set(index.capacity)
            metrics.used_bytes.labels(label).set_function(lambda: index.used + self.leaving)
            metrics.chunks.labels(label).set_function(lambda: len(index))

    def check(self) -> None:
        if self.index is not None:
            self.index.check()
            assert self.index.used + self.leaving <= self.index.capacity, "over capacity"
        assert self._queued == set(self._queue), "the queue and its set differ"


def rooms(form: Form) -> list[int]:
    return [padded(size) for size in form.sizes]


def ancestry(entry: Entry | None) -> list[Entry]:
    """An entry and its ancestors that are still there, head first."""
    run: list[Entry] = []
    while entry is not None and entry.state is not State.GONE:
        run.append(entry)
        entry = entry.parent
    return run[::-1]


def done_bytes(form: Form, names: Iterable[Name]) -> int:
    """Bytes at rest of those parts of a chunk that `names` are."""
    sizes = dict(zip(form.shards, form.sizes, strict=True))
    return sum(stored_size(sizes[name.shard]) for name in names)
