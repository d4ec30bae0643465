"""Key to entry for one bounded place (the slab, a disk): states, leases, parents, eviction. No I/O.

Every place that can fill up has one of these, with a policy of its own. An entry is

    FILLING   an engine writes it (slab), or it is on its way into the tier (below): invisible
    LOADING   on its way up from a tier below (slab only): visible as "coming"
    READY     complete; evictable unless leased or the parent of another entry here
    GONE      taken out while someone still held a lease; its room is given back with the last one

With shares (shares.py) each of their pools has a policy of its own. All operations are O(1) but `evict`,
which is O(victims × pools + what it skips).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import closing
from enum import IntEnum
from heapq import merge
from itertools import groupby

from lmtier.codec import Made
from lmtier.errors import MisuseError
from lmtier.keys import is_value
from lmtier.layout import Form
from lmtier.lifetimes import Ends
from lmtier.policy import Keyed, Policy
from lmtier.presence import Presence
from lmtier.shares import Pool, Pools, Share

EVICTED, DELETED, CLEARED, DIFFERED, REPLACED = "evicted", "deleted", "cleared", "differed", "replaced"
EXPIRED = "expired"
"""Why a chunk left. Or the reason why it could not be read."""


_UNSAID = Made()


class State(IntEnum):
    FILLING = 0
    LOADING = 1
    READY = 2
    GONE = 3


class Entry:
    """One chunk in one place. Plain slots: there may be a million of them."""

    __slots__ = (
        "form",
        "key",
        "kids",
        "leases",
        "made",
        "nbytes",
        "offsets",
        "parent",
        "prints",
        "seen",
        "state",
        "used",
    )

    def __init__(self, key: bytes, form: Form, nbytes: int, state: State, used: int = 0) -> None:
        self.key = key
        self.form = form
        self.nbytes = nbytes
        self.state = state
        self.leases = 0
        self.kids = 0
        self.parent: Entry | None = None
        self.seen = False
        """Asked for at least twice: it was here before, as far as we remember, or was found since it came."""
        self.offsets: tuple[int, ...] = ()
        """In the slab: where each shard of the form lies."""
        self.prints: tuple[bytes, ...] = ()
        """In the slab: the fingerprint of each shard, if its writer took one."""
        self.made = _UNSAID
        """In the slab: who stored it, and when."""
        self.used = used
        """In a tier below: what that tier thinks when it was last used, in ns."""

    def __repr__(self) -> str:
        return f"<{self.key.hex()[:8]} {self.state.name} leases={self.leases} kids={self.kids}>"


class Index:
    def __init__(
        self, capacity: int, policy: Policy[Keyed], ghosts: int = 65_536, shares: Sequence[Share] = ()
    ) -> None:
        self.capacity = capacity
        self.used = 0
        self.pinned = 0
        """Bytes that cannot leave now: leased or not READY. `evict` gives up early by it."""
        self._entries: dict[bytes, Entry] = {}
        self._policy = policy
        self.pools = Pools(shares, capacity, policy) if shares else None
        self._max_ghosts = ghosts
        self.names: set[bytes] = set()
        """The keys of named values among them, complete ones."""
        self._ghosts: OrderedDict[bytes, str] = OrderedDict()
        """Why what is not here any more left, if that was room or time."""
        self.ends: Ends[Entry] = Ends()
        self.wanted: Container[bytes] = ()
        """Keys whose entries are kept as soon as they are READY: those of pins."""
        self.kept: set[Entry] = set()
        """Those that stay for a pin, which leases them."""
        self.kept_bytes = 0
        self.changed: Callable[[bool, Iterable[bytes], str], None] | None = None
        """Told which keys have become READY (True) or left after that, and why, if anybody follows."""
        self.presence: Presence | None = None
        """Told of every key that comes or goes, if others look."""
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

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def add(
        self, key: bytes, form: Form, nbytes: int, state: State, parent: Entry | None, makers: int = 1
    ) -> Entry:
        """A new entry, leased once by each of its makers unless READY. Room is the caller's business."""
        if key in self._entries:
            raise MisuseError(f"chunk {key.hex()[:8]} is here already")
        entry = self._entries[key] = Entry(key, form, nbytes, state)
        if self.presence is not None:
            self.presence.add(key)
        entry.seen = self._ghosts.pop(key, None) is not None
        self.link(entry, parent)
        pinned = 0
        if state is not State.READY:
            entry.leases = makers
            pinned = nbytes
        self._count(entry, nbytes, pinned)
        self._policy_of(entry).insert(entry)
        return entry

    def _count(self, entry: Entry, used: int, pinned: int) -> None:
        self.used += used
        self.pinned += pinned
        if self.pools is not None:
            self.pools.of(entry.key).count(used, pinned)

    def _policy_of(self, entry: Entry) -> Policy[Keyed]:
        return self._policy if self.pools is None else self.pools.of(entry.key).policy

    def rekey(self, entry: Entry, key: bytes) -> None:
        """What was made under another key becomes findable under `key`, where nothing may be now."""
        if key in self._entries:
            raise MisuseError(f"chunk {key.hex()[:8]} is here already")
        if self.pools is not None and self.pools.of(key) is not self.pools.of(entry.key):
            raise MisuseError(f"chunk {key.hex()[:8]} belongs to somebody else")
        del self._entries[entry.key]
        self._entries[key] = entry
        if self.presence is not None:
            self.presence.drop(entry.key)
            self.presence.add(key)
        self._ghosts.pop(key, None)
        entry.key = key

    def adopt(self, entry: Entry) -> None:
        """What was there before this process, one by one, the oldest first; nothing is known of its chain."""
        self._entries[entry.key] = entry
        if self.presence is not None:
            self.presence.add(entry.key)
        self._count(entry, entry.nbytes, 0)
        self._policy_of(entry).insert(entry)
        if is_value(entry.key):
            self.names.add(entry.key)
        if entry.key in self.wanted:
            self.keep(entry)

    def resize(self, entry: Entry, nbytes: int) -> None:
        """It takes less than was reserved for it."""
        more = nbytes - entry.nbytes
        self._count(entry, more, more if entry.leases else 0)
        entry.nbytes = nbytes

    def ready(self, entry: Entry) -> None:
        """Its maker is done: visible from now on, and the maker's lease ends."""
        entry.state = State.READY
        if is_value(entry.key):
            self.names.add(entry.key)
        if self.changed is not None:
            self.changed(True, (entry.key,), "")
        if entry.key in self.wanted:
            self.keep(entry)
        self.release(entry)

    def link(self, entry: Entry, parent: Entry | None) -> None:
        if entry.parent is not parent:
            if entry.parent is not None:
                entry.parent.kids -= 1
            entry.parent = parent
            if parent is not None:
                parent.kids += 1

    def lease(self, entry: Entry) -> None:
        if not entry.leases:
            self.pinned += entry.nbytes
            if self.pools is not None:
                self.pools.of(entry.key).count(0, entry.nbytes)
        entry.leases += 1

    def keep(self, entry: Entry) -> bool:
        """Never evict it. False: what is kept leaves half of this place to others."""
        if entry in self.kept:
            return True
        if self.kept_bytes + entry.nbytes > self.capacity // 2:
            return False
        self.kept.add(entry)
        self.kept_bytes += entry.nbytes
        self.lease(entry)
        return True

    def unkeep(self, entry: Entry) -> None:
        if entry in self.kept:
            self.kept.remove(entry)
            self.kept_bytes -= entry.nbytes
            self.release(entry)

    def release(self, entry: Entry) -> bool:
        """End one lease. True: it was the last of an entry that is GONE, so its room is free now."""
        if not entry.leases:
            raise MisuseError(f"{entry!r} is not leased: released twice?")
        entry.leases -= 1
        if entry.leases:
            return False
        nbytes, is_gone = entry.nbytes, entry.state is State.GONE
        self.pinned -= nbytes
        if is_gone:
            self.used -= nbytes
        if self.pools is not None:
            self.pools.of(entry.key).count(-nbytes if is_gone else 0, -nbytes)
        return is_gone

    def remove(self, entry: Entry, why: str = DELETED) -> bool:
        """Take it out, so that nobody finds it. True: nobody holds it either, its room is free now."""
        self._take_out([entry], why)
        return not entry.leases

    def _take_out(self, entries: Sequence[Entry], why: str) -> None:
        evicted = why == EVICTED
        for entry in entries if self.kept else ():
            self.unkeep(entry)
        if self.pools is None:
            self._policy.remove(entries, evicted)
        else:
            parts: dict[Pool, list[Entry]] = {}
            for entry in entries:
                parts.setdefault(self.pools.of(entry.key), []).append(entry)
            for pool, mine in parts.items():
                pool.policy.remove(mine, evicted)
                pool.used -= sum(entry.nbytes for entry in mine if not entry.leases)
                if evicted:
                    pool.evicted(len(mine))
        if self.changed is not None:
            self.changed(False, [entry.key for entry in entries if entry.state is State.READY], why)
        for entry in entries:
            del self._entries[entry.key]
            if self.presence is not None:
                self.presence.drop(entry.key)
            self.ends.forget(entry)
            self.link(entry, None)
            entry.state = State.GONE
            if not entry.leases:
                self.used -= entry.nbytes
            if evicted or why == EXPIRED:
                self._ghosts[entry.key] = why
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        if self.names:
            self.names.difference_update(entry.key for entry in entries)

    def touch(self, run: Sequence[Entry]) -> None:
        """A new request saw this prefix, given head first."""
        for policy, part in self._by_policy(run):
            policy.touch(part)

    def refresh(self, run: Sequence[Entry]) -> None:
        """The request that saw this prefix goes on with it."""
        for policy, part in self._by_policy(run):
            policy.refresh(part)

    def _by_policy(self, run: Sequence[Entry]) -> Iterable[tuple[Policy[Keyed], Iterable[Entry]]]:
        """Tail first; nearly always it is all one tenant's."""
        if self.pools is None:
            return ((self._policy, reversed(run)),)
        of = self.pools.of
        return ((pool.policy, part) for pool, part in groupby(reversed(run), key=lambda entry: of(entry.key)))

    def why_gone(self, key: bytes) -> str:
        """Why it left, if it was evicted or its time was over, as far as a bounded memory goes."""
        return self._ghosts.get(key, "")

    def order(self) -> list[Entry]:
        """Everybody, first to leave first, as the policy sees it; pools are merged by last use."""
        policies = [self._policy] if self.pools is None else [pool.policy for pool in self.pools]
        orders = ([each for each in policy.order() if isinstance(each, Entry)] for policy in policies)
        return list(merge(*orders, key=lambda entry: entry.used))

    def pool(self, key: bytes) -> Pool | None:
        """To whose share this key counts, if there are shares."""
        return None if self.pools is None else self.pools.of(key)

    def next_to_leave(self, need: int, asker: Pool | None = None, claim: int = 0) -> tuple[list[Entry], int]:
        """Who leaves next, tails before their heads, until `need` bytes are free; and the bytes that are.

        With shares it depends on who wants the room, and how much altogether.
        """
        victims: list[Entry] = []
        freed = 0
        if self.used == self.pinned:
            return victims, freed
        childless: dict[Entry, int] = {}  # parents of victims -> how many of their kids go
        turns = self._policy.order() if self.pools is None else self.pools.order(victims, asker, claim)
        with closing(turns) as order:
            for entry in order:
                assert isinstance(entry, Entry)
                if entry.leases or entry.kids != childless.get(entry, 0):
                    continue
                victims.append(entry)
                freed += entry.nbytes
                if freed >= need:
                    break
                if entry.parent is not None:
                    childless[entry.parent] = childless.get(entry.parent, 0) + 1
        return victims, freed

    def evict(
        self, need: int, keep: Entry | None = None, asker: Pool | None = None, claim: int = 0
    ) -> list[Entry] | None:
        """Take out just enough to free `need` bytes, or nothing. The prefix that ends in `keep` stays.

        With shares, for `asker`, who wants `claim` bytes; what is within the shares of others stays too.
        """
        if keep is not None:
            self.lease(keep)
        victims: list[Entry] = []
        freed = 0
        if need <= self.used - self.pinned:
            victims, freed = self.next_to_leave(need, asker, claim)
        if keep is not None:
            self.release(keep)
        if freed < need:
            return None
        self._take_out(victims, EVICTED)
        return victims

    def check(self) -> None:
        """Prove every invariant; raises AssertionError."""
        entries = self._entries.values()
        kids: dict[Entry, int] = {}
        for entry in entries:
            assert entry.state is not State.GONE, f"{entry!r} is indexed"
            assert entry.leases >= (entry.state is not State.READY), f"{entry!r} lost its maker's lease"
            assert entry in self._policy_of(entry), f"{entry!r} is unknown to the policy"
            if entry.parent is not None:
                kids[entry.parent] = kids.get(entry.parent, 0) + 1
        for entry in entries:
            assert entry.kids == kids.get(entry, 0), f"{entry!r} has {kids.get(entry, 0)} kids"
        policies = [self._policy] if self.pools is None else [pool.policy for pool in self.pools]
        assert sum(map(len, policies)) == len(self._entries), "the policy holds what the index does not"
        for pool in self.pools or ():
            mine = [entry for entry in entries if self.pool(entry.key) is pool]
            taken = pool.used - sum(entry.nbytes for entry in mine)
            pinned = sum(entry.nbytes for entry in mine if entry.leases)
            assert taken >= 0, f"{pool!r} has more than is counted"
            assert pool.pinned == pinned + taken, f"{pool!r}: pinned is wrong"
        if self.pools is not None:
            assert self.used == sum(pool.used for pool in self.pools), "pools are not all there is"
        held = sum(entry.nbytes for entry in entries)
        assert self.used >= held, f"used {self.used} is less than what is held, {held}"
        pinned = sum(entry.nbytes for entry in entries if entry.leases)
        assert self.pinned == pinned + (self.used - held), "pinned is wrong"
        assert self.used <= self.capacity, f"used {self.used} of {self.capacity}"
        assert not self._ghosts.keys() & self._entries.keys(), "a ghost lives"
        kept = [entry for entry in entries if entry in self.kept]
        assert len(kept) == len(self.kept), "what is kept has left"
        assert all(entry.leases and entry.state is State.READY for entry in kept), "kept, and may leave"
        assert self.kept_bytes == sum(entry.nbytes for entry in kept) <= self.capacity // 2, "kept_bytes"
        self.ends.check()
        complete = {entry.key for entry in entries if entry.state is State.READY}
        assert self.names == {key for key in complete if is_value(key)}, "names are wrong"
