"""Key to entry for one bounded place (the slab, a disk): states, leases, parents, eviction. No I/O.

Every place that can fill up has its own index and its own policy. An entry is

    FILLING   an engine writes it (slab), or it is being written to the tier (lower tiers): invisible
    LOADING   it is being loaded from a lower tier (slab only): visible as "coming"
    READY     complete; evictable unless leased or the parent of another entry here
    GONE      removed while it was leased; its room is freed with the last lease

With shares (shares.py) each of their pools has its own policy. All operations are O(1) except `evict`,
which is O(victims × pools + skipped entries).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import closing
from heapq import merge
from itertools import groupby
from typing import NamedTuple

from lmtier.core.match import DELETED, EVICTED, EXPIRED, Entry, EntryState
from lmtier.core.presence import Presence
from lmtier.errors import MisuseError, size_text
from lmtier.format.layout import ChunkForm
from lmtier.observe.follower import CacheObservers
from lmtier.rules.fullness import UNBOUNDED
from lmtier.rules.lifetimes import Expiries
from lmtier.rules.policy import Keyed, Policy
from lmtier.rules.session_policy import ReturnTimes, SessionAwarePolicy
from lmtier.rules.shares import Pool, Pools, Share


class Occupancy(NamedTuple):
    """What a place holds, for display. None: the number is not known, or there is no limit."""

    chunks: int | None = None
    used: int | None = None
    capacity: int | None = None
    pinned: int | None = None
    pools: tuple[Pool, ...] = ()


PINS_DIVISOR, HINT_PINS_DIVISOR = 2, 4
"""The part of a place that pins may take: a half, and a quarter for those of hints."""


def _follows(descendant: Entry | None, ancestor: Entry) -> bool:
    while descendant is not None and descendant is not ancestor:
        descendant = descendant.parent
    return descendant is ancestor


def no_record(key: bytes) -> bool:
    """The `is_record` of an owner that stores only KV."""
    return False


class Index:
    def __init__(
        self,
        capacity: int,
        policy: Policy[Keyed],
        ghosts: int = 65_536,
        shares: Sequence[Share] = (),
        is_record: Callable[[bytes], bool] = no_record,
        returns: ReturnTimes | None = None,
    ) -> None:
        """`returns`: how late sessions come back, if they wait here. `is_record` tells whether a key holds
        a record or a chunk of KV.

        A record has no tokens and belongs to no prompt. Its owner may replace it but cannot compute it again.
        """
        self.capacity = capacity
        self.target = capacity
        """The capacity that was asked for last. `capacity` comes down to it as entries leave."""
        self.is_record = is_record
        self.used = 0
        self.leased_bytes = 0
        """Bytes that cannot leave now: leased or not READY. They let `evict` give up early."""
        self._entries: dict[bytes, Entry] = {}
        self._policy = SessionAwarePolicy(policy, returns)
        self.pools = Pools(shares, capacity, self._policy) if shares else None
        self._max_ghosts = ghosts
        self.records: set[bytes] = set()
        """The keys of complete records."""
        self._ghosts: OrderedDict[bytes, str] = OrderedDict()
        """Why past entries left, if they were evicted or expired."""
        self.expiries: Expiries[Entry] = Expiries()
        self.keys_to_pin: Container[bytes] = ()
        """Keys whose entries are pinned as soon as they are READY."""
        self.keys_to_pin_by_hints: Container[bytes] = ()
        """The same, for hints."""
        self.pinned: set[Entry] = set()
        """The pinned entries. The pin holds a lease on each."""
        self.pinned_bytes = 0
        self.label = ""
        self.followers = CacheObservers()
        """Notified of the keys that become READY, or leave after that, in the tier of this label."""
        self.presence: Presence | None = None
        """Updated with every key that is added or removed, if other processes read it."""
        self.get = self._entries.get

    def __repr__(self) -> str:
        return f"<Index {len(self._entries)} entries, used {self.used} of {self.capacity}>"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def resize(self, capacity: int) -> None:
        """Change the capacity: at once to a larger one. To a smaller one the owner evicts, with `surplus`."""
        self.need_room_for_pins(capacity)
        self.target = capacity
        if self.pools is not None:
            self.pools.resize(capacity)
        self.come_down()

    def need_room_for_pins(self, capacity: int) -> None:
        """Raises MisuseError if the capacity is too small for what is pinned."""
        if 2 * self.pinned_bytes > capacity:
            raise MisuseError(
                f"{self.label}: {size_text(self.pinned_bytes)} are pinned, and pins get half of the "
                "capacity: unpin something, or ask for more than twice that"
            )

    def come_down(self) -> None:
        self.capacity = max(self.target, self.used, 2 * self.pinned_bytes)

    @property
    def surplus(self) -> int:
        """Bytes above the target that can leave now."""
        return min(self.used - self.target, self.used - self.leased_bytes)

    def use(self, policy: Policy[Keyed]) -> None:
        """Order all entries by another policy. It takes their present order as their order of arrival."""
        if self.pools is not None:
            self.pools.use(policy)
        else:
            self._policy.use(policy)

    def entries_now(self) -> Iterable[Entry]:
        """For a look at a few of them, before anything changes."""
        return self._entries.values()

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def add(
        self,
        key: bytes,
        form: ChunkForm,
        nbytes: int,
        state: EntryState,
        parent: Entry | None,
        makers: int = 1,
    ) -> Entry:
        return self.add_run((key,), form, nbytes, state, parent, makers)[0]

    def add_run(
        self,
        keys: Sequence[bytes],
        form: ChunkForm,
        nbytes: int,
        state: EntryState,
        parent: Entry | None,
        makers: int = 1,
    ) -> list[Entry]:
        """Add entries that follow each other. The caller makes room first.

        Unless READY, each gets a lease for each of its makers.
        """
        entries, ghosts = self._entries, self._ghosts
        if not entries.keys().isdisjoint(keys):
            raise MisuseError(f"chunk {next(filter(entries.get, keys)).hex()[:8]} is here already")
        leases = 0 if state is EntryState.READY else makers
        added: list[Entry] = []
        for key in keys:
            entry = entries[key] = Entry(key, form, nbytes, state)
            entry.leases = leases
            if parent is not None:
                entry.parent = parent
                parent.child_count += 1
            parent = entry
            added.append(entry)
        for key in ghosts.keys() & keys if ghosts else ():
            del ghosts[key]
            entries[key].is_reused = True
        if self.presence is not None:
            self.presence.add(*keys)
        leased_bytes_each = nbytes if leases else 0
        if self.pools is None:
            self.used += nbytes * len(added)
            self.leased_bytes += leased_bytes_each * len(added)
            self._policy.insert(*added)
        else:
            for entry in added:
                self._count(entry, nbytes, leased_bytes_each)
                self._policy_of(entry).insert(entry)
        return added

    def _count(self, entry: Entry, used: int, leased: int) -> None:
        self.used += used
        self.leased_bytes += leased
        if self.pools is not None:
            self.pools.of(entry.key).count(used, leased)

    def _policy_of(self, entry: Entry) -> SessionAwarePolicy[Keyed]:
        return self._policy if self.pools is None else self.pools.of(entry.key).policy

    def rekey(self, entry: Entry, key: bytes) -> None:
        """Move an entry from its key to `key`, which must be free."""
        if key in self._entries:
            raise MisuseError(f"chunk {key.hex()[:8]} is here already")
        if self.pools is not None and self.pools.of(key) is not self.pools.of(entry.key):
            raise MisuseError(f"chunk {key.hex()[:8]} belongs to the share of another tenant")
        del self._entries[entry.key]
        self._entries[key] = entry
        if self.presence is not None:
            self.presence.drop(entry.key)
            self.presence.add(key)
        self._ghosts.pop(key, None)
        entry.key = key

    def adopt(self, entry: Entry) -> None:
        """Add an entry that a scan found, the oldest first. Its parent is not known."""
        self._entries[entry.key] = entry
        if self.presence is not None:
            self.presence.add(entry.key)
        self._count(entry, entry.nbytes, 0)
        self._policy_of(entry).insert(entry)
        if self.is_record(entry.key):
            self.records.add(entry.key)
        if self.is_wanted(entry.key):
            self.pin(entry)

    def restore(self, entry: Entry) -> None:
        """Add an entry that another process hands over, the first to leave first. Leases follow.

        One that is GONE only takes room, until the last of its leases ends.
        """
        if entry.state is EntryState.GONE:
            self._count(entry, entry.nbytes, 0)
            return
        if entry.key in self._entries:
            raise ValueError(f"chunk {entry.key.hex()[:8]} is there twice")
        if entry.state is EntryState.READY:
            self.adopt(entry)
            return
        self._entries[entry.key] = entry
        if self.presence is not None:
            self.presence.add(entry.key)
        self._count(entry, entry.nbytes, 0)
        self._policy_of(entry).insert(entry)

    def shrink(self, entry: Entry, nbytes: int) -> None:
        """The entry takes less room than was reserved for it."""
        change = nbytes - entry.nbytes
        self._count(entry, change, change if entry.leases else 0)
        entry.nbytes = nbytes

    def make_ready(self, *entries: Entry) -> None:
        """Their maker is done. They are visible from now on, and the maker's leases end."""
        keys = [entry.key for entry in entries]
        for entry in entries:
            entry.state = EntryState.READY
        self.records.update(filter(self.is_record, keys))
        for notify in self.followers.changed:
            notify(self.label, True, keys, "")
        for entry in entries:
            if self.is_wanted(entry.key):
                self.pin(entry)
        self.release(*entries)

    def link(self, entry: Entry, parent: Entry | None) -> None:
        """`entry` follows `parent`. Not if `parent` follows it: keys that are no chain could say so."""
        if entry.parent is not parent and not (entry.child_count and _follows(parent, entry)):
            if entry.parent is not None:
                entry.parent.child_count -= 1
            entry.parent = parent
            if parent is not None:
                parent.child_count += 1

    def lease(self, entry: Entry) -> None:
        if not entry.leases:
            self.leased_bytes += entry.nbytes
            if self.pools is not None:
                self.pools.of(entry.key).count(0, entry.nbytes)
        entry.leases += 1

    def is_wanted(self, key: bytes) -> bool:
        """Whether a pin of any kind wants it."""
        return key in self.keys_to_pin or key in self.keys_to_pin_by_hints

    def pin(self, entry: Entry) -> bool:
        """Never evict the entry. False: pins of its kind would take too much of this place."""
        if entry in self.pinned:
            return True
        divisor = (
            HINT_PINS_DIVISOR
            if entry.key in self.keys_to_pin_by_hints and entry.key not in self.keys_to_pin
            else PINS_DIVISOR
        )
        if self.pinned_bytes + entry.nbytes > self.capacity // divisor:
            return False
        self.pinned.add(entry)
        self.pinned_bytes += entry.nbytes
        self.lease(entry)
        return True

    def unpin(self, entry: Entry) -> None:
        if entry in self.pinned:
            self.pinned.remove(entry)
            self.pinned_bytes -= entry.nbytes
            self.release(entry)

    def release(self, *entries: Entry) -> list[Entry]:
        """End one lease of each. Returns those that are GONE and have none left: their room is free now."""
        if not all([entry.leases for entry in entries]):
            raise MisuseError(f"one of {entries[:8]} is not leased: released twice?")
        unleased: list[Entry] = []
        for entry in entries:
            entry.leases -= 1
            if not entry.leases:
                unleased.append(entry)
        gone = [entry for entry in unleased if entry.state is EntryState.GONE]
        self.leased_bytes -= sum([entry.nbytes for entry in unleased])
        self.used -= sum([entry.nbytes for entry in gone])
        if self.pools is not None:
            for entry in unleased:
                is_gone = entry.state is EntryState.GONE
                self.pools.of(entry.key).count(-entry.nbytes if is_gone else 0, -entry.nbytes)
        return gone

    def remove(self, *entries: Entry, why: str = DELETED) -> list[Entry]:
        """Remove them, so that no lookup finds them. Returns those without a lease: their room is free."""
        is_eviction = why == EVICTED
        for entry in entries if self.pinned else ():
            self.unpin(entry)
        if self.pools is None:
            self._policy.remove(entries, is_eviction)
        else:
            parts: dict[Pool, list[Entry]] = {}
            for entry in entries:
                parts.setdefault(self.pools.of(entry.key), []).append(entry)
            for pool, pool_entries in parts.items():
                pool.policy.remove(pool_entries, is_eviction)
                pool.used -= sum(entry.nbytes for entry in pool_entries if not entry.leases)
                if is_eviction:
                    pool.evicted(len(pool_entries))
        if self.followers.changed:
            ready_keys = [entry.key for entry in entries if entry.state is EntryState.READY]
            for notify in self.followers.changed:
                notify(self.label, False, ready_keys, why)
        keys = [entry.key for entry in entries]
        if self.presence is not None:
            self.presence.drop(*keys)
        for entry in entries:
            del self._entries[entry.key]
            if entry.parent is not None:
                entry.parent.child_count -= 1
                entry.parent = None
            entry.state = EntryState.GONE
            if not entry.leases:
                self.used -= entry.nbytes
        for entry in entries if self.expiries else ():
            self.expiries.forget(entry)
        if is_eviction or why == EXPIRED:
            self._ghosts.update(dict.fromkeys(keys, why))
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        if self.records:
            self.records.difference_update(keys)
        return [entry for entry in entries if not entry.leases]

    def touch(self, run: Sequence[Entry]) -> None:
        """A new request used this prefix. `run` is given head first."""
        for policy, entries in self._by_policy(run):
            policy.touch(entries)

    def missed(self, keys: Iterable[bytes]) -> None:
        """Another host asked for these. The policy learns which of them should have stayed."""
        absent = [key for key in keys if key not in self._entries and not self.is_record(key)]
        if self.pools is None and absent:
            self._policy.on_miss(absent)
        elif self.pools is not None:
            for pool, pool_keys in groupby(absent, key=self.pools.of):
                pool.policy.on_miss([*pool_keys])

    def refresh(self, run: Sequence[Entry]) -> None:
        """The request that used this prefix still uses it."""
        for policy, entries in self._by_policy(run):
            policy.refresh(entries)

    def evict_first(self, run: Sequence[Entry]) -> None:
        """These are not asked for again: they leave before others. `run` is given head first."""
        for policy, entries in self._by_policy(run):
            policy.evict_first(entries)

    def wait(self, run: Sequence[Entry], since: float) -> None:
        """These are asked for when a person comes back. `run` is given head first."""
        for policy, entries in self._by_policy(run):
            policy.wait(entries, since)

    def _by_policy(self, run: Sequence[Entry]) -> Iterable[tuple[SessionAwarePolicy[Keyed], Iterable[Entry]]]:
        """Tail first. Nearly always all entries belong to one tenant."""
        if self.pools is None:
            return ((self._policy, reversed(run)),)
        of = self.pools.of
        return ((pool.policy, part) for pool, part in groupby(reversed(run), key=lambda entry: of(entry.key)))

    def why_gone(self, key: bytes) -> str:
        """Why the key left, if it was evicted or expired. Only a bounded number of keys is remembered."""
        return self._ghosts.get(key, "")

    def gone(self, keys: Sequence[bytes]) -> dict[bytes, str]:
        """Maps those of `keys` that `why_gone` knows to the reason."""
        return {key: self._ghosts[key] for key in self._ghosts.keys() & keys} if self._ghosts else {}

    def among(self, keys: Sequence[bytes]) -> set[bytes]:
        """The part of `keys` that is here."""
        return self._entries.keys() & keys

    def order(self) -> list[Entry]:
        """All entries in the policy's order of eviction. Pools are merged by last use."""
        policies = [self._policy] if self.pools is None else [pool.policy for pool in self.pools]
        orders = (
            [each for each in dict.fromkeys(policy.order()) if isinstance(each, Entry)] for policy in policies
        )
        return list(merge(*orders, key=lambda entry: entry.last_used_ns))

    def pool(self, key: bytes) -> Pool | None:
        """The pool of the share to which this key counts, if there are shares."""
        return None if self.pools is None else self.pools.of(key)

    def next_victims(self, need: int, asker: Pool | None = None, claim: int = 0) -> tuple[list[Entry], int]:
        """The next victims, tails before their heads, until `need` bytes are free; and the bytes they free.

        With shares the victims depend on `asker`, which wants the room, and on `claim`, its total.
        """
        victims: list[Entry] = []
        freed = 0
        if self.used == self.leased_bytes:
            return victims, freed
        leaving_kids: dict[Entry, int] = {}  # parents of victims -> how many of their kids go; victims -> -1
        candidates = self._policy.order() if self.pools is None else self.pools.order(victims, asker, claim)
        with closing(candidates) as order:
            for entry in order:
                assert isinstance(entry, Entry)
                if entry.leases or entry.child_count != leaving_kids.get(entry, 0):
                    continue
                victims.append(entry)
                leaving_kids[entry] = -1  # an order may have it twice
                freed += entry.nbytes
                if freed >= need:
                    break
                if entry.parent is not None:
                    leaving_kids[entry.parent] = leaving_kids.get(entry.parent, 0) + 1
        return victims, freed

    def evict(
        self, need: int, keep: Entry | None = None, asker: Pool | None = None, claim: int = 0
    ) -> list[Entry] | None:
        """Remove just enough entries to free `need` bytes, or none. The prefix that ends in `keep` stays.

        With shares, `asker` wants `claim` bytes, and entries within the shares of other tenants stay too.
        Without an asker they may leave: what is used must fit.
        """
        if keep is not None:
            self.lease(keep)
        victims: list[Entry] = []
        freed = 0
        if need <= self.used - self.leased_bytes:
            victims, freed = self.next_victims(need, asker, claim)
        if keep is not None:
            self.release(keep)
        if freed < need:
            return None
        return self.remove(*victims, why=EVICTED)

    def occupancy(self, leaving: int = 0) -> Occupancy:
        """`leaving`: bytes that have left the index, but whose deletion is not confirmed yet."""
        capacity = self.capacity if self.capacity < UNBOUNDED else None
        pools = tuple(self.pools or ())
        return Occupancy(len(self), self.used + leaving, capacity, self.pinned_bytes, pools)

    def check(self) -> None:
        """Check every invariant; raises AssertionError."""
        entries = self._entries.values()
        kids: dict[Entry, int] = {}
        for entry in entries:
            assert entry.state is not EntryState.GONE, f"{entry!r} is indexed"
            assert entry.leases >= (entry.state is not EntryState.READY), f"{entry!r} lost its maker's lease"
            assert entry in self._policy_of(entry), f"{entry!r} is unknown to the policy"
            if entry.parent is not None:
                kids[entry.parent] = kids.get(entry.parent, 0) + 1
        for entry in entries:
            assert entry.child_count == kids.get(entry, 0), f"{entry!r} has {kids.get(entry, 0)} kids"
        policies = [self._policy] if self.pools is None else [pool.policy for pool in self.pools]
        assert sum(map(len, policies)) == len(self._entries), "the policy holds more than the index"
        for pool in self.pools or ():
            pool_entries = [entry for entry in entries if self.pool(entry.key) is pool]
            gone_bytes = pool.used - sum(entry.nbytes for entry in pool_entries)
            leased = sum(entry.nbytes for entry in pool_entries if entry.leases)
            assert gone_bytes >= 0, f"{pool!r} has more than is counted"
            assert pool.leased_bytes == leased + gone_bytes, f"{pool!r}: leased_bytes is wrong"
        if self.pools is not None:
            assert self.used == sum(pool.used for pool in self.pools), "the pools do not add up to the index"
        held_bytes = sum(entry.nbytes for entry in entries)
        assert self.used >= held_bytes, f"used {self.used} is less than the bytes held, {held_bytes}"
        leased = sum(entry.nbytes for entry in entries if entry.leases)
        assert self.leased_bytes == leased + (self.used - held_bytes), "leased_bytes is wrong"
        assert self.used <= self.capacity, f"used {self.used} of {self.capacity}"
        assert not self._ghosts.keys() & self._entries.keys(), "a ghost is also an entry"
        pinned = [entry for entry in entries if entry in self.pinned]
        assert len(pinned) == len(self.pinned), "a pinned entry has left"
        assert all(entry.leases and entry.state is EntryState.READY for entry in pinned), (
            "a pinned one may leave"
        )
        assert self.pinned_bytes == sum(entry.nbytes for entry in pinned) <= self.capacity // 2, (
            "pinned_bytes"
        )
        self.expiries.check()
        ready_keys = {entry.key for entry in entries if entry.state is EntryState.READY}
        assert self.records == set(filter(self.is_record, ready_keys)), "records are wrong"
