"""A lower tier that only this process writes. It keeps objects until they are deleted, so its index is exact.

The tier evicts by a policy, deletes expired chunks, and reads headers to find suspect chunks, a few at a
time. At its start it scans the storage.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from lmtier.config import TierSpec
from lmtier.core.index import Index, Occupancy
from lmtier.core.lower import (
    LOST,
    CacheContext,
    LowerTier,
    WriteDeferral,
    WriteTarget,
    bytes_at_rest,
    count_shares,
    names_of,
    worst,
)
from lmtier.core.match import DELETED, REPLACED, Entry, EntryState, ancestry
from lmtier.core.outdated import Outdated
from lmtier.core.place import AT_ONCE, IndexedPlace
from lmtier.core.placement import form_of_parts
from lmtier.errors import log, size_text
from lmtier.format.layout import ChunkForm, Name, Shard, form_of, padded, stored_size
from lmtier.format.objects import Header, Selector
from lmtier.observe.metrics import Metrics
from lmtier.rules.fullness import UNBOUNDED, StorageLimit
from lmtier.rules.lifetimes import FOREVER
from lmtier.rules.policy import make_policy
from lmtier.rules.writing import WriteRuleTrial
from lmtier.threads import collector_paused
from lmtier.tiers.base import Done, Item, Op, Reason, Stat, Tier

_FAILED = 4096  # chunks whose first error is remembered
_HEADERS = 8  # read at once in a search for suspect chunks, so that loads continue


class OwnedTier(IndexedPlace, LowerTier):
    def __init__(
        self, label: str, spec: TierSpec, tier: Tier, context: CacheContext, *, scans: bool = True
    ) -> None:
        """`scans`: find out what the storage holds. If not, `finish_restore` follows."""
        super().__init__(label, spec, tier, context)
        capacity, shares = _capacity(spec, tier), context.shares if spec.capacity else ()
        policy, is_record = make_policy(spec.policy), context.slab.is_record
        self.index = Index(capacity, policy, shares=shares, is_record=is_record)
        self.index.label, self.index.followers = label, context.followers
        if spec.write == "auto":
            self.choice = WriteRuleTrial(capacity, spec.writes_per_day, self._clock())
        self._fullness = StorageLimit(self._clock)
        self._found = 0
        """Bytes that the scan found. They exceed the capacity if a user has reduced it."""
        self._deleted_before_scan: set[bytes] = set()
        self._cleared_before_scan: list[Selector] = []
        """Deleted before the scan was done. It finds their parts, which stay in the storage until then."""
        self._unreadable: dict[bytes, Entry] = {}
        """Chunks that cannot be read: their key is not known, or the storage failed twice while others were
        read. They stay until they are evicted or stored again. They are not asked for until a restart."""
        self._failed: dict[bytes, Entry] = {}
        """Chunks that could not be read once."""
        self._searches = deque[tuple[Selector, Iterator[Entry]]]()
        """The searches for suspect chunks, and the entries that each has still to look at."""
        self._unread = OrderedDict[bytes, None]()
        """Chunks whose headers are still to be read in a search for suspect chunks."""
        self._reading = 0
        self.outdated = Outdated()
        """What no job uses of it is in `deleting_bytes` too."""
        self._added: list[Entry] = []
        """The entries that this `pump` added."""
        _declare(self, context.metrics, context.clock)
        self.is_warm = False
        if scans:
            self._scan()

    # ---- what it holds

    def is_stored(self, key: bytes, form: ChunkForm) -> bool:
        entry = self.live(key)
        return entry is not None and entry.state is EntryState.READY and entry.form.serves(form)

    def is_stored_or_queued(self, key: bytes, form: ChunkForm) -> bool:
        entry = self.live(key)
        return super().is_stored_or_queued(key, form) or (entry is not None and entry.form.serves(form))

    def is_stored_or_storing(self, key: bytes, form: ChunkForm) -> bool:
        entry = self.live(key)
        return entry is not None and entry.form.serves(form) and not self.load_breaker.is_open

    def live(self, key: bytes) -> Entry | None:
        """The same, if it can be read."""
        entry = super().live(key)
        return None if entry is None or self._is_unreadable(entry) else entry

    def _is_unreadable(self, entry: Entry) -> bool:
        return bool(self._unreadable) and self._unreadable.get(entry.key) is entry

    def load_form(self, key: bytes, reader_form: ChunkForm) -> ChunkForm | None:
        entry = self.index.get(key)
        if entry is None or entry.state is not EntryState.READY or self._is_unreadable(entry):
            return None
        form, layout = entry.form, reader_form.layout
        if form.layout is None and layout is not None:  # a scan found it: its sizes are those after encoding
            sizes = (
                max(size, layout.nbytes(shard)) if shard.overlap(layout.whole) == shard else size
                for shard, size in zip(form.shards, form.sizes, strict=True)
            )
            form = form_of(None, form.shards, sizes)
        return form

    def occupancy(self) -> Occupancy:
        return self.index.occupancy(self.deleting_bytes)

    def may_come_back(self, key: bytes) -> bool:
        """Whether a restart now could find a chunk that was discarded under this key.

        Not if another one is written there: that began when the discarded one was gone.
        """
        return (key in self._busy_keys and key not in self.index) or self._was_deleted_before_scan(key)

    def _was_deleted_before_scan(self, key: bytes) -> bool:
        cleared = self._cleared_before_scan
        return key in self._deleted_before_scan or any(each.concerns(key) for each in cleared)

    def touch(self, keys: Sequence[bytes]) -> None:
        if len(self.index):
            get = self.index.get
            self.index.touch([entry for key in keys if (entry := get(key))])

    # ---- unfinished work

    @property
    def backlog(self) -> int:
        unfinished_search = len(self._searches) + len(self._unread) + self._reading + self._unsearched
        deleted = len(self._deleted_before_scan) + len(self._cleared_before_scan)
        return super().backlog + deleted + unfinished_search

    @property
    def pending_clears(self) -> int:
        return 0 if self.is_clear_done else len(self._suspects)

    @property
    def is_clear_done(self) -> bool:
        unfinished_search = self._searches or self._unread or self._reading or self._unsearched
        return not (self._cleared_before_scan or unfinished_search)

    @property
    def _unsearched(self) -> int:
        """The suspects that are searched for once the scan has found out what the tier holds."""
        return 0 if self.is_warm else len(self._suspects)

    def _run_background(self) -> None:
        super()._run_background()
        self._search_on()
        self._read_headers()
        if not self.is_warm and not self._jobs and self.load_breaker.allows():
            self._scan()

    # ---- writing

    def queue_unwritten_records(self) -> None:
        """At the end: offer the records that were not written because they came too fast, or the tier
        failed."""
        slab = self._context.slab
        for key in list(slab.records) if self.write != "never" else ():
            entry = slab.get(key)
            if entry is not None and not self.is_stored_or_queued(key, entry.form):
                self._writes.add(entry)

    def pump(self, spare: float = float("inf")) -> None:
        super().pump(spare)
        added, self._added = self._added, []
        for tail in set(added) - {entry.parent for entry in added}:
            self.index.refresh(ancestry(tail))

    def _must_wait(self, key: bytes) -> bool:
        self.live(key)  # if it has expired, its deletion has to end first
        return super()._must_wait(key)

    def _spot_for(self, entry: Entry) -> WriteTarget | WriteDeferral:
        key, form = entry.key, entry.form
        stored = self.index.get(key)
        if stored is not None and stored.form.serves(form) and not self._is_unreadable(stored):
            self._writes.give_up(key)
            return WriteDeferral.SKIPPED
        if stored is not None:  # a part of it is lost, or no reader can use it: the new chunk replaces it
            self._remove(stored, REPLACED)
            return WriteDeferral.SKIPPED
        parent = self._nearest(entry)
        replaces = self._room_for(entry, parent)
        if isinstance(replaces, WriteDeferral):
            return replaces
        tier_entry = self.index.add(key, form, form.stored_bytes, EntryState.FILLING, parent)
        end = self._end_of(entry)
        self.index.expiries.set(tier_entry, end)
        self._added.append(tier_entry)
        self.outdated.begin(key)
        return WriteTarget(tier_entry, replaces, end)

    def _room_for(self, entry: Entry, parent: Entry | None) -> Sequence[Name | None] | WriteDeferral:
        """The object that each shard may overwrite, if any."""
        key, form, index, need_bytes = entry.key, entry.form, self.index, entry.form.stored_bytes
        if need_bytes > index.capacity:
            return self._skip(entry, "larger_than_tier")
        usable_bytes = min(index.capacity, self._fullness.nbytes)
        if need_bytes > usable_bytes:
            return self._skip(entry, "full")
        stuck_bytes = self.undeletable + self.outdated.nbytes
        freeing_bytes = self.deleting_bytes - stuck_bytes
        missing_bytes = need_bytes - (usable_bytes - index.used - stuck_bytes)
        if missing_bytes <= 0:
            return WriteDeferral.LATER if freeing_bytes > -missing_bytes else (None,) * len(form.shards)
        if self.choice is not None:
            self.choice.on_full()
        if (
            self.undeletable
            and self.store_breaker.is_open
            and (freeing_bytes or not self._could_overwrite(key, form, parent, missing_bytes))
        ):
            return WriteDeferral.LATER  # deletions fail: what leaves would leave for nothing
        # The parent must not be evicted to make room for its child: the prefix would have a hole.
        victims = index.evict(missing_bytes, parent, index.pool(key), need_bytes)
        if victims is None and self.outdated.nbytes:  # there is no room for both
            for old in self.outdated.pop_all():
                self._delete_outdated(old)
            return WriteDeferral.LATER
        if victims is None:  # chunks that are being written can be evicted later
            return WriteDeferral.LATER if self.storing_entries else self._skip(entry, "no_room")
        self._evicted(victims)
        if len(victims) == 1 and not freeing_bytes and _rooms(victims[0].form) == _rooms(form):
            return names_of(victims[0])
        self._free(victims)
        return WriteDeferral.LATER

    def _could_overwrite(self, key: bytes, form: ChunkForm, parent: Entry | None, missing_bytes: int) -> bool:
        """Whether the next to leave for this chunk is a single one of its size."""
        index = self.index
        if parent is not None:
            index.lease(parent)
        victims, _ = index.next_victims(missing_bytes, index.pool(key), form.stored_bytes)
        if parent is not None:
            index.release(parent)
        return len(victims) == 1 and _rooms(victims[0].form) == _rooms(form)

    def _nearest(self, entry: Entry) -> Entry | None:
        """The entry here of the nearest ancestor that this tier holds."""
        ancestor = entry.parent
        while ancestor is not None:
            if (tier_entry := self.index.get(ancestor.key)) is not None:
                return tier_entry
            ancestor = ancestor.parent
        return None

    def _use(self, entry: Entry | None) -> int:
        now = super()._use(entry)
        if entry is None:
            return now
        entry.last_used_ns = now if entry.parent is None else min(now, entry.parent.last_used_ns - 1000)
        return entry.last_used_ns

    def _note_stored(self, entry: Entry, target: WriteTarget, nbytes: int, done: Done) -> None:
        mine = target.entry
        assert mine is not None
        # A victim that could neither be overwritten nor deleted must not come back after a restart.
        stuck = {
            old: stored_size(size)
            for old, size in zip(target.replaces, entry.form.sizes, strict=True)
            if old is not None and old in done.failed
        }
        self._delete(list(stuck), sum(stuck.values()))
        if (old := self.outdated.end(mine.key)) is not None:
            self.deleting_bytes -= old.nbytes
        if not done.failed:
            self._fullness.on_fit()
        if not done.failed and mine.state is not EntryState.GONE:
            if self.index.is_record(mine.key):
                mine.marks = entry.marks
            self.index.shrink(mine, nbytes)
            self.index.make_ready(mine)
            return
        is_deleted = mine.state is EntryState.GONE and mine not in self.outdated
        self.outdated.pop(mine.key)
        if mine.state is not EntryState.GONE:
            self.index.remove(mine)
        self.index.release(mine)
        if Reason.FULL in done.failed.values():
            self._note_full(entry, done)
        if not done.failed:
            mine.nbytes = nbytes
        leftover = old if done.failed else mine
        if leftover is not None and mine.key in self._writes and not is_deleted:
            self._keep(leftover)
        elif leftover is not None:
            self._free([leftover])
        else:
            self._delete(list(done.ok), bytes_at_rest(mine.form, done.ok))  # the parts that were written

    def _note_full(self, entry: Entry, done: Done) -> None:
        """The storage has less room than the capacity.

        A chunk that was submitted before may try once more.
        """
        is_retried = self._is_excused(Op.STORE, done)
        if not self._fullness.is_known:
            log.warning(
                "lmtier: the storage of tier %s is full with %s of %s: new chunks replace old ones",
                *(self.label, size_text(self.index.used), size_text(self.index.capacity)),
            )
        self._fullness.on_full(done.id, self.index.used, self._jobs.last + 1)
        if is_retried and entry.state is EntryState.READY:
            self.queue_write(entry)

    def _is_excused(self, op: Op, done: Done) -> bool:
        is_full = op is Op.STORE and Reason.FULL in done.failed.values()
        return is_full and self._fullness.is_unknown_to(done.id)

    # ---- changes while it runs

    def _most(self, capacity: int) -> int:
        return capacity if self.tier.storage_bytes is None else min(capacity, self.tier.storage_bytes)

    def resize(self, capacity: int) -> None:
        most = self._most(capacity)
        self._found = max(self._found, self.index.used + self.deleting_bytes)
        super().resize(most)
        if self.choice is not None:
            self.choice.resize(most)

    def _evicted(self, victims: Sequence[Entry]) -> None:
        self._metrics.evictions.labels(self.label, "capacity").inc(len(victims))
        for victim in victims:
            self._forget_faults(victim.key)

    # ---- loading

    def _begin_read(self, key: bytes) -> tuple[Entry | None, float]:
        tier_entry = self.index.get(key)
        if tier_entry is None:
            return None, FOREVER
        self.index.lease(tier_entry)
        return tier_entry, self.index.expiries.expiry(tier_entry)

    def _end_here(self, tier_entry: Entry | None) -> float:
        return FOREVER if tier_entry is None else self.index.expiries.expiry(tier_entry)

    def _end_read(self, tier_entry: Entry | None, end: float, reasons: set[Reason], done: Done) -> None:
        if tier_entry is None:
            return
        if self.index.release(tier_entry):  # discarded or outdated while it was read
            if tier_entry in self.outdated:
                self._busy_keys.remove(tier_entry.key)
                self._keep(tier_entry)
            else:
                self._free([tier_entry])
        elif self.index.get(tier_entry.key) is tier_entry:
            if lost_reasons := reasons & LOST:  # the other parts of a chunk that lost one are useless
                self._remove(tier_entry, worst(lost_reasons).value)
            elif Reason.SEALED in reasons:
                self._unreadable[tier_entry.key] = tier_entry
            elif Reason.ERROR in reasons:
                self._note_error(tier_entry)
            else:
                self._failed.pop(tier_entry.key, None)
                self.index.expiries.set(tier_entry, end)  # a scan does not find out when a chunk expires

    def _note_error(self, tier_entry: Entry) -> None:
        """A fault of the whole storage passes. One of the medium under a chunk does not."""
        if self.load_breaker.is_open or self.index.is_record(tier_entry.key):
            return  # a record that is there must not be taken for one that is not
        if self._failed.pop(tier_entry.key, None) is tier_entry:
            self._unreadable[tier_entry.key] = tier_entry
        elif len(self._failed) < _FAILED:
            self._failed[tier_entry.key] = tier_entry

    def _forget_faults(self, key: bytes) -> None:
        """The chunk leaves."""
        self._failed.pop(key, None)
        self._unreadable.pop(key, None)

    def peek(self, key: bytes, then: Callable[[bytes | Reason], None]) -> None:
        """Read the mark of a chunk with one shard, and store it in the entry."""
        tier_entry = self.index.get(key)
        if tier_entry is None or tier_entry.state is not EntryState.READY:
            then(Reason.ABSENT)
            return
        _, known_expiry = self._begin_read(key)
        item = Item(Name(key, tier_entry.form.shards[0]), used=tier_entry.last_used_ns)
        deadline = time.monotonic() + self._context.patience
        self._jobs.submit(Op.PEEK, (item,), partial(self._end_peek, tier_entry, known_expiry, then), deadline)

    def _end_peek(
        self, tier_entry: Entry, known_expiry: float, then: Callable[[bytes | Reason], None], done: Done
    ) -> None:
        _, reason = self._judge_read(tier_entry, known_expiry, done)
        if reason is None:
            (header,) = done.ok.values()
            assert isinstance(header, Header)
            tier_entry.marks = (header.mark,)
            then(header.mark)
        else:
            then(reason)

    # ---- values that replace others

    def on_ready(self, entry: Entry, source: LowerTier | None = None) -> None:
        if source in (None, self) or not self.index.is_record(entry.key):
            super().on_ready(entry, source)
            return
        # A scan found both. After a kill one of them may be older, and only the one that was read counts.
        tier_entry = self.index.get(entry.key)
        if tier_entry is not None and not tier_entry.marks:
            self.begin_replacing(entry.key)
        super().on_ready(entry, source)
        self.end_replacing(entry.key)

    def begin_replacing(self, key: bytes) -> None:
        """A newer value comes under this key. What is stored stays until the new one overwrites it."""
        if key in self._writes:
            self._writes.take(key)
        if (old := self.index.get(key)) is not None:
            self._forget_faults(key)
            if self.index.remove(old, why=REPLACED):
                self._keep(old)
            else:
                self._busy_keys.add(key)
                self.outdated.add(old)

    def end_replacing(self, key: bytes) -> None:
        """The newer value has come. If it does not wait to be written, what it outdated is deleted."""
        if key not in self._writes:
            self._given_up(key)

    def write_on(self, entry: Entry) -> None:
        """This value waited to be written when another process owned the tier."""
        self.begin_replacing(entry.key)
        self._writes.add(entry)

    def _keep(self, old: Entry) -> None:
        """No job uses it, and the value that waits under its key will overwrite it."""
        self.outdated.add(old)
        self.deleting_bytes += old.nbytes

    def _given_up(self, key: bytes) -> None:
        if not self.is_warm and self.index.is_record(key):
            self._deleted_before_scan.add(key)
        if (old := self.outdated.pop(key)) is not None:  # otherwise a job that uses it deletes it at its end
            self._delete_outdated(old)

    def _delete_outdated(self, old: Entry) -> None:
        self.deleting_bytes -= old.nbytes
        self._free([old])

    # ---- deleting

    def discard(self, key: bytes, forms: Iterable[ChunkForm] = (), why: str = DELETED) -> None:
        if key in self._writes and self.index.is_record(key):
            self._writes.give_up(key)
        if not self.is_warm:
            self._deleted_before_scan.add(key)
        super().discard(key, forms, why)

    def _remove(self, entry: Entry, why: str) -> None:
        self._forget_faults(entry.key)
        self._busy_keys.add(entry.key)
        super()._remove(entry, why)

    def _free(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._delete(names_of(entry), entry.nbytes)

    def _is_unused(self, entry: Entry) -> bool:
        return not entry.leases or entry.state is EntryState.FILLING

    def clear(self, selector: Selector, *, force: bool) -> Iterator[int]:
        if selector.needs_headers:
            self._search(selector)
            return
        yield from super().clear(selector, force=force)
        if not self.is_warm and selector not in self._cleared_before_scan:
            self._cleared_before_scan.append(selector)

    def _search(self, suspect: Selector) -> None:
        self._searches.append((suspect, iter(self.index.entries())))
        self._search_on()
        self._read_headers()

    def _search_on(self) -> None:
        """Look for suspect chunks among some more entries; the next step continues."""
        if not self._searches:
            return
        suspect, entries = self._searches[0]
        batch = list(islice(entries, AT_ONCE))
        self._unread.update((entry.key, None) for entry in batch if suspect.concerns(entry.key))
        if len(batch) < AT_ONCE:
            self._searches.popleft()
        if self._searches:
            self.tier.wake()

    def _read_headers(self) -> None:
        """Read the headers of chunks that may be suspect, a few at a time, so that loads continue."""
        for key in list(islice(self._unread, _HEADERS - self._reading)) if self.load_breaker.allows() else ():
            entry = self.index.get(key)
            if entry is not None and entry.state is not EntryState.READY:
                continue  # it is being written
            del self._unread[key]
            if entry is not None:
                self._reading += 1
                self.peek(key, partial(self._end_header, key))

    def _end_header(self, key: bytes, mark_or_reason: bytes | Reason) -> None:
        self._reading -= 1
        if (entry := self.index.get(key)) is not None and self._is_unreadable(entry):
            self.discard(key)  # whether it is suspect will not be known
        elif mark_or_reason in (Reason.ERROR, Reason.DEADLINE):
            self._unread[key] = None

    # ---- start and end

    def _scan(self) -> None:
        self._jobs.submit(Op.SCAN, (), self._end_scan)

    def _end_scan(self, done: Done) -> None:
        """A warm start: add all objects that the scan found, the oldest first, up to the capacity."""
        index = self.index
        if done.error:  # stay cold: writing beside unknown objects would take twice the capacity
            log.error("lmtier: tier %s: the scan for a warm start failed: %s", self.label, done.error)
            return
        parts: dict[bytes, tuple[tuple[Shard, int], ...]] = {}
        last_used_ns: dict[bytes, int] = {}
        with collector_paused():
            for (key, shard), stat in done.ok.items():
                if isinstance(stat, Stat):
                    parts_so_far = parts.get(key, ())
                    parts[key] = (*parts_so_far, (shard, stat.nbytes))
                    last_used_ns[key] = max(stat.used, last_used_ns[key]) if parts_so_far else stat.used
            forms = {parts_key: form_of_parts(parts_key) for parts_key in set(parts.values())}
            now = self._clock()
            unusable_keys: list[bytes] = []
            for key in sorted(parts, key=last_used_ns.__getitem__):
                form = forms[parts[key]]
                if form is None or form.stored_bytes > index.capacity or self._was_deleted_before_scan(key):
                    unusable_keys.append(key)
                    continue
                entry = Entry(key, form, form.stored_bytes, EntryState.READY, last_used_ns[key])
                if key in self._writes and index.is_record(key):
                    self._keep(entry)
                else:
                    index.adopt(entry)
                    if self.ttl < FOREVER:  # an upper limit, because it was stored before its last use
                        last_use = min(now, self.stamps.end(last_used_ns[key] // 1_000_000))
                        index.expiries.set(entry, last_use + self.ttl)
        for key in unusable_keys:
            self._delete([Name(key, shard) for shard, _ in parts[key]])
        self._found = index.used + self.outdated.nbytes
        if index.used > index.capacity:
            for victim in index.evict(index.used - index.capacity) or ():
                self._metrics.evictions.labels(self.label, "capacity").inc()
                self._free([victim])
        self._deleted_before_scan.clear()
        self._cleared_before_scan.clear()
        self.is_warm = True
        for suspect in self._suspects:  # of a clear that came before the scan was done
            self._search(suspect)
        if len(index):
            log.info("lmtier: tier %s is warm: %d chunks, %s", self.label, len(index), size_text(index.used))

    def finish_restore(self) -> None:
        """The index was filled from the handover of another process, which wrote here until now."""
        self.is_warm = True
        self._found = self.index.used
        self.index.resize(self.index.capacity)
        self.set_ttl(self.ttl)

    def persist_order(self) -> None:
        items, previous_ns = list[Item](), 0
        for entry in self.index.order():
            if entry.last_used_ns <= previous_ns:
                entry.last_used_ns = previous_ns + 1000
                items.extend(Item(name, used=entry.last_used_ns) for name in names_of(entry))
            previous_ns = entry.last_used_ns
        if items and not self.store_breaker.is_open:
            self._jobs.submit(Op.TOUCH, tuple(items), lambda done: None)

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        self.outdated = Outdated()  # the next start finds it

    def check(self) -> None:
        super().check()
        self.index.check()
        assert self.index.used <= self.index.capacity, "over capacity"
        for key, entry in (self._failed | self._unreadable).items():
            assert self.index.get(key) is entry, "a fault of a chunk that has left"
        self.outdated.check(self.index, self._writes, self._busy_keys)
        most = max(self.index.capacity, self._found)
        assert self.index.used + self.deleting_bytes <= most, "over capacity, with the bytes being deleted"


def _declare(tier: OwnedTier, metrics: Metrics, clock: Callable[[], float]) -> None:
    label, index = tier.label, tier.index
    metrics.written_bytes_per_day.labels(label).set_function(lambda: tier.pace.per_day(clock()))
    for rule in WriteRuleTrial.RULES if tier.choice is not None else ():
        metrics.write_rule.labels(label, rule).set_function(
            lambda rule=rule: float(tier.rule == rule)  # type: ignore[misc]  # mypy: lambdas
        )
    if index.capacity < UNBOUNDED:
        metrics.capacity_bytes.labels(label).set_function(lambda: index.target)
    metrics.used_bytes.labels(label).set_function(lambda: index.used + tier.deleting_bytes)
    metrics.pinned_bytes.labels(label).set_function(lambda: index.pinned_bytes)
    metrics.chunks.labels(label).set_function(lambda: len(index))
    count_shares(metrics, label, index)


def _capacity(spec: TierSpec, tier: Tier) -> int:
    """The configured capacity, or the size of the storage if that is less."""
    if spec.capacity is None:
        return UNBOUNDED
    if tier.storage_bytes is not None and tier.storage_bytes < spec.capacity:
        log.warning(
            "lmtier: %s: capacity=%s is more than the storage has: the tier uses %s, and from then on "
            "chunks leave for new ones",
            *(spec, size_text(spec.capacity), size_text(tier.storage_bytes)),
        )
        return max(1, tier.storage_bytes)
    return spec.capacity


def _rooms(form: ChunkForm) -> list[int]:
    return [padded(size) for size in form.sizes]
