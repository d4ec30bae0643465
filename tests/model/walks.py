"""Random walks over a whole cache: a slab, a tier that keeps, a tier that other hosts share.

A walk is a seed. It gives the settings, and a list of steps: each is the name of a rule and a number for what
the rule chooses, so a walk without some of its steps is a walk too. Engines save and load in several forms,
tiers end their jobs in any order and with any outcome, time runs out, people pin and clear, another host
writes and deletes, callers make mistakes, the process restarts and is killed. The clock is the walk's own:
deadlines, breakers and lifetimes go by it, and a walk is the same each time.

Beside the cache stands a model of the bytes. A chunk has an age: it is one older after each `discard` or
`clear`. The model knows how old each object may be, and compares what every match shows.

    python -m tests.model.walks --walks 10000         with a line of progress every ten seconds
    python -m tests.model.walks --seed 17 --walks 1   one walk again; if it fails, its shortened steps
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.grant import Grant
from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState, Lookup
from lmtier.core.reservations import Reservation
from lmtier.errors import MisuseError
from lmtier.format.layout import PAGE, Name, Shard, form_of
from lmtier.format.objects import Header, Provenance, Selector
from lmtier.rules.lifetimes import FOREVER
from lmtier.rules.shares import Pool, parse
from lmtier.rules.worth import Cost
from lmtier.testing import opaque_layout
from lmtier.tiers.base import Item, Op, Reason
from tests.model.hand import CHAINS, FORMS, LENGTH, HandTier, content, key

LENGTHS = (20, 80, 80, 250)
WRITES = (
    *("always", "always", "reused", "evicted", "auto", "never"),
    *(f"{write}&writes_per_day={200_000 * PAGE}" for write in ("always", "evicted", "auto")),
)
TIMES = (0, 0, 0, 0, 0, 2, 7, 30)
PINS = ("one", "two", "three")
FAULTS = [reason for reason in Reason if reason is not Reason.CLOSED]
COST = Cost(0.01, 0.002, 0.0, 0.0001)
ALL_NAMES = {
    at: [Name(at, shard) for form in FORMS.values() for shard in form.shards]
    for at in {key(chain, number) for chain in range(CHAINS) for number in range(LENGTH)}
}


class Step(NamedTuple):
    rule: str
    number: int


class Clock:
    """Time that passes only in steps of the walk, and a little with each look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now

    def wall(self) -> float:
        return self.monotonic() + 1.7e9

    def wall_ns(self) -> int:
        return int(self.wall() * 1e9)


class Walk:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock()
        self.said: list[str] = []
        """What was done, for people."""
        self.counts: Counter[str] = Counter()
        self.ages = dict.fromkeys(ALL_NAMES, 0)
        """What is written now."""
        self.least = {name: 0 for names in ALL_NAMES.values() for name in names}
        """The oldest that may be found under each name."""
        self.committed: set[bytes] = set()
        self.ends: dict[bytes, float] = {}
        """When the time of what was committed is over, at the latest."""
        self.stays: dict[bytes, float] = {}
        """What the slab kept for pins after the last step, and when its time is over."""
        self.pinned: set[str] = set()
        self.matches: list[Lookup] = []
        self.saves: list[tuple[Grant, list[Shard]]] = []
        self.old: tuple[Cache, list[Lookup], list[Grant]] | None = None
        """A cache that was closed or killed, and what its callers still hold."""

        chance = self.chance
        slab, disk = chance.randint(3, 14), chance.randint(2, 20)
        policy, write = chance.choice(("lru", "auto")), chance.choice(WRITES)
        self.ttl = chance.choice(TIMES) or FOREVER
        ttl = 0 if self.ttl == FOREVER else self.ttl
        self.urls = [
            f"cpu://?capacity={slab * 4 * PAGE}&policy={policy}&ttl={ttl}",
            f"near://?capacity={disk * 5 * PAGE}&write={write}&policy={policy}&ttl={chance.choice(TIMES)}",
        ]
        if chance.random() < 0.6:
            self.urls.append(f"far://?write={chance.choice(('always', 'always', 'reused', 'evicted'))}")
        self.shares = chance.choice(("", "", "a=40%", "a=25% b=50%", "b=100%"))
        self.worth = chance.choice(("auto", "auto", "always"))
        self.kept: dict[str, dict[Name, bytes]] = {url: {} for url in self.urls[1:]}
        self.faults = chance.choice((0.0, 0.0, 0.03, 0.15, 0.5))
        """The part of jobs that fail."""
        self.open()

    # ---- the cache

    def open(self) -> None:
        self.tiers = {
            url: HandTier(kept, keeps=url.startswith("near"), scans_at_once=False)
            for url, kept in self.kept.items()
        }
        for tier in self.tiers.values():
            tier.chance = self.chance.random
        config = Config(
            tiers=self.urls,
            chunk_tokens=2,
            prefault=False,
            hugepages=False,
            shares=parse(self.shares),
            worth=self.worth,
        )
        tiers = dict(self.tiers)
        self.cache = Cache(config, tiers=tiers, wait_until_warm=False, clock=self.clock.monotonic)
        self.cache._wait = self.wait  # type: ignore[method-assign]
        for below in self.cache.lower:
            for breaker in (
                below.load_breaker,
                below.store_breaker,
                below.clear_breaker,
                below._jobs.searching,
                below.deleting_again,
            ):
                breaker._clock = self.clock.monotonic
        self.near = self.cache.lower.owned[0]
        self.stays = {}
        self.check_shares()

    @property
    def near_kept(self) -> dict[Name, bytes]:
        return self.kept[self.urls[1]]

    @property
    def far_kept(self) -> dict[Name, bytes]:
        return self.kept[self.urls[2]] if len(self.urls) > 2 else {}

    def wait(self, until: float | None = None) -> None:
        """In place of sleeping: a job ends, and time passes."""
        busy = [tier for tier in self.tiers.values() if tier.waiting]
        if busy:
            self.end_a_job(self.chance.choice(busy), self.chance)
        self.clock.now += 0.05

    def check_shares(self) -> None:
        for index in self.cache.indexes.values():
            if index.pools is not None:
                index.evict = partial(_evict, index, index.evict)  # type: ignore[method-assign]

    def end_a_job(self, tier: HandTier, chance: random.Random) -> None:
        job = chance.choice(tier.waiting)
        tier.fault = chance.choice(FAULTS) if chance.random() < self.faults else None
        self.counts["jobs"] += 1
        self.counts["jobs failed"] += tier.fault is not None
        if job.op is Op.STORE and (tier.fault is None or tier.fault in (Reason.ERROR, Reason.DEADLINE)):
            for item in job.items:
                assert _age(item.name, item.payload) >= 0, f"{item.name}: not its bytes are written"
        tier.finish(tier.waiting.index(job))
        done = tier.done[-1]
        names = {
            str(item.name)[:8] + str(item.name)[64:]: done.failed.get(item.name, "") for item in job.items
        }
        told = " ".join(f"{name} {why}".rstrip() for name, why in names.items())
        self.said.append(f"    {'near' if tier.keeps else 'far'} {job.op.value} {told} {done.error}".rstrip())
        tier.fault = None

    # ---- what engines do

    def request(self, chance: random.Random) -> str:
        """All of one, without a pause: load what there is, store the rest."""
        chain, length, form = (
            chance.randrange(CHAINS),
            chance.randint(1, LENGTH),
            chance.choice(sorted(FORMS)),
        )
        keys = [key(chain, i) for i in range(length)]
        match = self.cache.match(keys, FORMS[form], cost=chance.choice((None, None, COST)))
        self.none_is_over(match.run)
        assert self.cache.wait(match).is_ready
        self.matches.append(match)
        self.matches_hold_the_right_bytes()
        found = match.sources[:]
        self.release_it(match)
        grant = self.cache.reserve(keys, FORMS[form])
        self.fill(grant)
        if grant.chunks:
            reservation = self.cache.reservations.open[grant.id]
            for shard in grant.form.shards:
                self.cache.commit(grant, shard)
            self.was_committed(reservation)
        return f"chain {chain}, {length} chunks, {form}: found in {found}, {len(grant.chunks)} stored"

    def reserve(self, chance: random.Random) -> str:
        chain, length = chance.randrange(CHAINS), chance.randint(0, LENGTH)
        form, ttl = chance.choice(sorted(FORMS)), chance.choice(TIMES)
        first = chance.choice((0, 0, 0, 1, 3))
        keys = [key(chain, i) for i in range(length)]
        reservation = self.cache.reserve(keys, FORMS[form], first=first, ttl=ttl or None)
        numbers = list(reservation.chunks)
        assert numbers == sorted(numbers), "chunks are reserved in order"
        if reservation.dropped:
            assert all(i < length - reservation.dropped for i in numbers), "a hole before what was kept"
        if reservation.chunks:
            self.saves.append((reservation, list(reservation.form.shards)))
        self.fill(reservation)
        return f"chain {chain}, {length} chunks, {form}, ttl={ttl}, first={first}: {numbers}"

    def fill(self, grant: Grant) -> None:
        for name, offsets in grant.places:
            for offset, shard in zip(offsets, grant.form.shards, strict=True):
                data = content(name, shard, self.ages[name])
                self.cache.slab.view(offset, len(data))[:] = data

    def finish_a_rank(self, chance: random.Random) -> str:
        if not self.saves:
            return ""
        grant, left = chance.choice(self.saves)
        reservation = self.cache.reservations.open[grant.id]
        shard = left.pop(chance.randrange(len(left)))
        aborts = chance.random() < 0.15
        (self.cache.abort if aborts else self.cache.commit)(grant, shard)
        if not left:
            self.saves = [save for save in self.saves if save[0] is not grant]
            if not reservation.is_aborted:
                self.was_committed(reservation)
        return f"{'abort' if aborts else 'commit'} {shard} of reservation {grant.id}"

    def was_committed(self, reservation: Reservation) -> None:
        end = self.clock.now + min(reservation.ttl, self.ttl)
        for entry in reservation.entries.values():
            if entry.state is EntryState.READY:  # otherwise it was cleared meanwhile
                self.committed.add(entry.key)
                self.ends[entry.key] = max(end, self.end_of_copies(entry.key))

    def end_of_copies(self, key: bytes) -> float:
        """When the time of what lies below of it is over, at the latest."""
        names = ALL_NAMES[key]
        stored = any(name in kept for kept in self.kept.values() for name in names)
        stores = (job for tier in self.tiers.values() for job in tier.waiting if job.op is Op.STORE)
        stored = stored or any(item.name.key == key for job in stores for item in job.items)
        return self.ends.get(key, 0.0) if stored else 0.0

    def match(self, chance: random.Random) -> str:
        chain, length = chance.randrange(CHAINS), chance.randint(0, LENGTH)
        form, limit = chance.choice(sorted(FORMS)), chance.choice((0, 3, LENGTH, LENGTH))
        keys, cost = [key(chain, i) for i in range(length)], chance.choice((None, None, COST))
        if chance.random() < 0.1:
            match = self.cache.bring(keys, FORMS[form], deadline=chance.choice((1.0, 30.0)))
        else:
            deadline = chance.choice((None, None, 0.5, 30.0))
            match = self.cache.match(keys, FORMS[form], tokens=2 * length + 1, deadline=deadline, cost=cost)
        self.none_is_over(match.run)
        self.matches.append(match)
        how = ""
        if chance.random() < 0.3:
            self.cache.wait(match)
            assert match.is_ready
            how = ", waited for"
        elif limit and not match.pending_lookups:
            self.cache.prefetch(match, limit if limit < LENGTH else None)
        return f"chain {chain}, {length} chunks, {form}, limit={limit}{how}: {match!r}"

    def prefetch(self, chance: random.Random) -> str:
        if not self.matches:
            return ""
        match, has = chance.choice(self.matches), chance.choice((0, 0, 2, 6))
        self.cache.prefetch(match, has=has)
        return f"match {match.id}, has={has}: {match!r}"

    def release(self, chance: random.Random) -> str:
        if not self.matches:
            return ""
        match = chance.choice(self.matches)
        self.release_it(match)
        return f"match {match.id}"

    def release_it(self, match: Lookup) -> None:
        self.matches = [each for each in self.matches if each is not match]
        self.cache.release(match)
        self.cache.release(match)

    def seen(self, chance: random.Random) -> str:
        chain, length = chance.randrange(CHAINS), chance.randint(0, LENGTH)
        self.cache.touch([key(chain, i) for i in range(length)])
        return f"chain {chain}, {length} chunks"

    # ---- what tiers do

    def step(self, chance: random.Random) -> str:
        coming = {entry for match in self.matches for entry in match.run if entry.state is EntryState.LOADING}
        for _ in range(chance.choice((0, 1, 1, 2, 4, 8))):
            busy = [tier for tier in self.tiers.values() if tier.waiting]
            if busy:
                self.end_a_job(chance.choice(busy), chance)
        self.cache.step()
        self.none_is_over(coming)
        self.books_below()
        return ""

    def settle(self, chance: random.Random) -> str:
        return f"flush: {self.cache.flush(chance.choice((0.1, 1.0, 20.0)))}"

    def time_passes(self, chance: random.Random) -> str:
        seconds = chance.choice((0.3, 1, 3, 10))
        self.clock.now += seconds
        for chain in range(CHAINS):
            match = self.cache.match([key(chain, i) for i in range(LENGTH)], FORMS["one rank"])
            self.none_is_over(match.run)
            self.cache.release(match)
        return f"{seconds} s"

    def another_host(self, chance: random.Random) -> str:
        """It stores in the tier that is shared, or the tier loses what it pleases."""
        if len(self.urls) < 3:
            return ""
        kept = self.far_kept
        if kept and chance.random() < 0.5:
            name = chance.choice(sorted(kept))
            del kept[name]
            return f"{name} is lost"
        chain, length, form = (
            chance.randrange(CHAINS),
            chance.randint(1, LENGTH),
            chance.choice(sorted(FORMS)),
        )
        for i in range(length):
            at = key(chain, i)
            for shard, size in zip(FORMS[form].shards, FORMS[form].sizes, strict=True):
                payload = memoryview(bytearray(-size % PAGE + size))
                payload[:size] = content(at, shard, self.ages[at])
                layout = FORMS[form].layout
                assert layout is not None
                made = Provenance("another host", self.clock.wall_ns() // 1_000_000)
                item = Item(Name(at, shard), payload, Header(Name(at, shard), layout, size, provenance=made))
                self.tiers[self.urls[2]].write(item)
            self.committed.add(at)
            self.ends[at] = FOREVER
        return f"chain {chain}, {length} chunks, {form}"

    # ---- what people do

    def pin(self, chance: random.Random) -> str:
        chain, length = chance.randrange(CHAINS), chance.randint(1, LENGTH)
        name, ttl = chance.choice(PINS), chance.choice(TIMES)
        before = [(pin.name, pin.chunks) for pin in self.cache.pinned()]
        self.stays = {}  # another one of this name ends
        try:
            self.cache.pin(name, [key(chain, i) for i in range(length)], ttl or None)
        except MisuseError:
            assert [(pin.name, pin.chunks) for pin in self.cache.pinned()] == before
        return f"{name}: chain {chain}, {length} chunks, ttl={ttl}"

    def unpin(self, chance: random.Random) -> str:
        name = chance.choice(PINS)
        self.stays = {}
        self.cache.unpin(name)
        return name

    def clear(self, chance: random.Random) -> str:
        force = chance.random() < 0.5
        chain = chance.randrange(CHAINS)
        namespace = key(chain, 0)[:4] if chance.random() < 0.3 else b""
        if force:
            self.stays = {}
        held = {entry.key for entry in self.cache.index.entries() if entry.leases}
        held |= {entry.key for entry in self.near.index.entries() if entry.leases}
        self.cache.clear(Selector(namespace), force=force)
        for at in ALL_NAMES:
            if at.startswith(namespace) and (force or at not in held):
                self.grow(at)
        return f"force={force}, namespace={namespace.hex()}"

    def purge(self, chance: random.Random) -> str:
        """Everything that was stored up to now is suspect, whoever stored it, and though it is in use."""
        namespace = key(chance.randrange(CHAINS), 0)[:4] if chance.random() < 0.5 else b""
        self.stays = {}
        self.cache.clear(Selector(namespace, since=1), force=True)
        self.clock.now += 0.002  # stamps count milliseconds
        for at in ALL_NAMES:
            if at.startswith(namespace):
                self.grow(at)
        return f"namespace={namespace.hex()}"

    def discard(self, chance: random.Random) -> str:
        matches = [match for match in self.matches if match.run]
        if not matches:
            return ""
        entry = chance.choice(chance.choice(matches).run)
        self.stays.pop(entry.key, None)
        stood = entry.state is not EntryState.GONE
        self.cache.discard(entry.key, entry.form)
        if stood:  # otherwise what the slab has of it now is another one
            # Cut another way it is another object in a tier that must be asked: nobody doubts that one.
            others = {name for name in self.far_kept if name.shard not in entry.form.shards}
            self.grow(entry.key, others)
        return f"{entry!r}"

    def grow(self, at: bytes, spared: Iterable[Name] = ()) -> None:
        """Nobody is to see again what was stored of this chunk up to now."""
        self.ages[at] += 1
        spared = set(spared)
        for name in ALL_NAMES[at]:
            if name not in spared:
                self.least[name] = self.ages[at]
        for reservation, _ in self.saves:
            self.fill(reservation)  # its engine computes what is right

    # ---- what goes wrong

    def restart(self, chance: random.Random) -> str:
        held = self.matches, [reservation for reservation, _ in self.saves]
        if chance.random() < 0.5:
            self.let_go()
            held = [], []
        self.cache.close(timeout=chance.choice((0.1, 5.0)))
        self.counts["restarts"] += 1
        return self.come_back(*held)

    def kill(self, chance: random.Random) -> str:
        """The process ends. Of jobs under way a tier has done all, some, or nothing."""
        sure = self.sure()
        for tier in self.tiers.values():
            tier.poll()
            while tier.waiting:
                tier.fault = chance.choice((None, Reason.ERROR, Reason.CLOSED))
                if tier.waiting[0].op in (Op.LOAD, Op.PEEK, Op.SCAN, Op.LOOKUP):
                    tier.fault = Reason.CLOSED
                tier.finish(chance.randrange(len(tier.waiting)))
            tier.fault = None
        lost = [name for name in sure if name not in self.near_kept]
        assert not lost, f"what was stored is lost: {lost}"
        self.counts["kills"] += 1
        self.counts["objects sure at a kill"] += len(sure)
        held = self.matches, [reservation for reservation, _ in self.saves]
        return self.come_back(*held, sure={name.key for name in sure})

    def sure(self) -> set[Name]:
        """What the near tier has, and nobody is about to delete or to write over."""
        index = self.near.index
        return {
            Name(entry.key, shard)
            for entry in index.entries()
            if entry.state is EntryState.READY and not self.near.may_come_back(entry.key)
            for shard in entry.form.shards
            if Name(entry.key, shard) in self.near_kept  # otherwise a load has just found out
        }

    def come_back(self, matches: list[Lookup], saves: list[Grant], sure: Iterable[bytes] = ()) -> str:
        self.every_token_is_counted_once()
        self.old = self.cache, matches, saves
        self.matches, self.saves = [], []
        for kept in self.kept.values():  # what was to be deleted, and is still there, is back
            for name, data in kept.items():
                self.least[name] = min(self.least[name], _age(name, data[PAGE:]))
        self.pinned = set()
        self.open()
        if self.chance.random() < 0.7:
            near = self.tiers[self.urls[1]]
            near.finish(0)
            self.cache.step()
            index = self.near.index
            fits = sum(map(len, self.near_kept.values())) <= index.capacity
            missing = [at for at in sure if index.get(at) is None and not self.near.may_come_back(at)]
            assert not fits or not missing, f"the scan did not find {missing}"
            self.books_below()
        return f"{sum(map(len, self.kept.values()))} objects below"

    def misuse(self, chance: random.Random) -> str:
        """A call that looks right, and is not, costs an error and changes nothing."""
        calls = self.wrong_calls(chance)
        what = chance.choice(sorted(calls))
        try:
            calls[what]()
        except MisuseError:
            self.counts["wrong calls refused"] += 1
            return f"{what}: refused"
        raise AssertionError(f"{what}: nobody minds")

    def wrong_calls(self, chance: random.Random) -> dict[str, Callable[[], object]]:
        cache, form = self.cache, FORMS["one rank"]
        some = [key(0, 0), key(0, 1)]
        small = form_of(opaque_layout(100), (opaque_layout(100).whole,))
        calls: dict[str, Callable[[], object]] = {
            "a key twice in match": partial(cache.match, [*some, some[0]], form),
            "a key twice in bring": partial(cache.bring, [*some, some[0]], form, deadline=1.0),
            "a key twice in reserve": partial(cache.reserve, [*some, some[1]], form),
            "too few tokens": partial(cache.match, some, form, tokens=3),
            "a form of other chunks": partial(cache.reserve, some, small),
            "no time": partial(cache.reserve, some, form, ttl=0),
            "a time that is none": partial(cache.reserve, some, form, ttl=float("nan")),
            "a key twice in a pin": partial(cache.pin, "one", [*some, some[0]]),
        }
        for reservation, left in self.saves[:1]:
            done = [shard for shard in reservation.form.shards if shard not in left]
            if done:
                calls["a shard again"] = partial(cache.commit, reservation, done[0])
                calls["a shard after all"] = partial(cache.abort, reservation, done[0])
            if len(reservation.form.shards) > 1:
                calls["a shard of another form"] = partial(cache.commit, reservation, form.shards[0])
                calls["which shard?"] = partial(cache.commit, reservation)
        if self.old is not None:
            closed, matches, saves = self.old
            if closed._closed.is_set():
                calls["match of what is closed"] = partial(closed.match, some, form)
                calls["reserve of what is closed"] = partial(closed.reserve, some, form)
            for match in [match for match in matches if not match.released][:1]:
                calls["prefetch of another cache's match"] = partial(cache.prefetch, match)
                calls["release of another cache's match"] = partial(cache.release, match)
            for other in saves[:1]:
                shard = other.form.shards[0]
                calls["commit of another cache's"] = partial(cache.commit, other, shard)
                calls["abort of another cache's"] = partial(cache.abort, other, shard)
        return calls

    # ---- what must hold

    def check(self) -> None:
        self.cache.check()
        self.matches_hold_the_right_bytes()
        self.what_is_pinned_stays()

    def is_right(self, name: Name, data: memoryview | bytes) -> None:
        """These are bytes that were stored under this name, and that nobody doubted since."""
        self.counts["shards compared"] += 1
        for age in range(self.ages[name.key], self.least[name] - 1, -1):
            expected = content(name.key, name.shard, age)
            if data[: len(expected)] == expected:
                return
        age = _age(name, data)
        raise AssertionError(
            f"{name} has wrong bytes" if age < 0 else f"{name} is {self.ages[name.key] - age} too old"
        )

    def matches_hold_the_right_bytes(self) -> None:
        view = self.cache.slab.view
        for match in self.matches:
            assert len(match.run) <= match.chunks <= len(match.keys)
            for at, entry in zip(match.keys, match.run, strict=False):
                assert entry.key == at
                if entry.state is EntryState.READY and entry.offsets:
                    assert at in self.committed, "visible, and nobody ever committed it"
                    for offset, shard in zip(entry.offsets, entry.form.shards, strict=True):
                        size = len(content(at, shard))
                        self.is_right(Name(at, shard), view(offset, size))

    def none_is_over(self, entries: Iterable[Entry]) -> None:
        """What is served from now on may be served now."""
        for entry in entries:
            assert entry.state is not EntryState.READY or self.clock.now < self.ends[entry.key] + 1e-3

    def what_is_pinned_stays(self) -> None:
        index, pinned = self.cache.index, {pin.name for pin in self.cache.pinned()}
        there = {entry.key: index.expiries.expiry(entry) for entry in index.pinned}
        if pinned == self.pinned:  # otherwise the time of one is over
            for name, end in self.stays.items():
                assert end <= self.clock.now or there.get(name) == end, "it was pinned, and left"
        self.stays, self.pinned = there, pinned

    def books_below(self) -> None:
        """What the near tier has is what its index says, but for what is about to go."""
        index = self.near.index
        if not self.near.is_warm:
            return
        for entry in index.entries():
            if entry.state is EntryState.READY and not self.near.has_jobs:
                for shard in entry.form.shards:
                    assert Name(entry.key, shard) in self.near_kept, f"{entry!r} is not there"
        for name in self.near_kept:
            mine = index.get(name.key)
            known = mine is not None and name.shard in mine.form.shards
            assert known or self.near.may_come_back(name.key), f"{name} is there, and in no book"

    def every_token_is_counted_once(self) -> None:
        metrics = self.cache.metrics
        hits = metrics.sums(metrics.hit_tokens, "tier")
        missed, asked = (
            sum(metrics.sums(each).values()) for each in (metrics.missed_tokens, metrics.asked_tokens)
        )
        assert asked == sum(hits.values()) + missed
        self.counts["chunks asked"] += int(asked) // 2
        for tier, hit in hits.items():
            self.counts[f"found in {tier}"] += int(hit) // 2

    # ---- the end

    def let_go(self) -> None:
        for match in self.matches:
            self.cache.release(match)
        for reservation, left in self.saves:
            for shard in left:
                self.cache.abort(reservation, shard)
        self.matches, self.saves = [], []

    def quiet(self) -> None:
        """Tiers fail no more, until nothing is left to do."""
        self.faults = 0.0
        for _ in range(400):
            for tier in self.tiers.values():
                while tier.waiting:
                    self.end_a_job(tier, self.chance)
            results = self.cache.step()
            waiting = any(tier.waiting for tier in self.tiers.values())
            backlog = any(below.backlog for below in self.cache.lower) or not self.cache.is_warm
            if not (results or waiting or backlog):
                return
            self.clock.now += 0.5
        raise AssertionError(f"it never comes to an end: {self.cache!r}")

    def end(self) -> None:
        """When everyone has let go, nothing is held, and nothing is left behind."""
        cache, near, index = self.cache, self.near, self.near.index
        self.let_go()
        for name in PINS:
            cache.unpin(name)
        self.quiet()
        self.every_token_is_counted_once()
        cache.check()
        self.books_below()
        assert cache.index.leased_bytes == index.leased_bytes == 0, "a lease was lost"
        assert near.deleting_bytes == len(near.storing_entries) == 0, "room below was lost"
        names = {Name(entry.key, shard) for entry in index.entries() for shard in entry.form.shards}
        assert names == self.near_kept.keys(), "the index and the tier differ"
        assert index.used == sum(map(len, self.near_kept.values())), "used is not what lies there"
        for chain in range(CHAINS):
            for form in FORMS.values():
                match = cache.match([key(chain, i) for i in range(LENGTH)], form, deadline=60)
                self.matches.append(cache.wait(match))
                self.matches_hold_the_right_bytes()
                self.let_go()
        self.quiet()
        cache.clear()
        self.quiet()
        assert cache.slab.used == 0, f"room was lost: {cache.index.entries()}, {self.cache!r}"
        assert not any(self.kept.values()), "not cleared"
        cache.close(timeout=1)
        matches = cache._matches
        coming, loading = matches.weighing.loading_tier, matches.loading
        left = matches.open, cache.reservations.open, matches.waiters, coming, loading
        assert not any(left), f"left behind: {left}"


RULES = {
    "request": 30,
    "reserve": 24,
    "finish_a_rank": 44,
    "match": 28,
    "prefetch": 8,
    "release": 20,
    "seen": 4,
    "step": 56,
    "settle": 2,
    "time_passes": 5,
    "another_host": 4,
    "pin": 4,
    "unpin": 2,
    "clear": 1,
    "purge": 1,
    "discard": 4,
    "restart": 1,
    "kill": 2,
    "misuse": 4,
}


def steps_of(seed: int) -> list[Step]:
    chance = random.Random(f"steps {seed}")
    rules = chance.choices(list(RULES), list(RULES.values()), k=chance.choice(LENGTHS))
    return [Step(rule, chance.getrandbits(32)) for rule in rules]


class Failure(NamedTuple):
    where: str
    """The same for the same defect, as far as anybody can tell."""
    story: str


def walk(seed: int, steps: Sequence[Step] | None = None) -> tuple[Counter[str], Failure | None]:
    """One walk. What was counted, and how it failed, if it did."""
    clock = Clock()
    counts: Counter[str] = Counter()
    said: list[str] = []
    with (
        patch("time.monotonic", lambda: clock.monotonic()),
        patch("time.time", lambda: clock.wall()),
        patch("time.time_ns", lambda: clock.wall_ns()),
    ):
        try:
            it = Walk(seed)
            clock, counts, said = it.clock, it.counts, it.said
            for step in steps_of(seed) if steps is None else steps:
                at = len(said)
                said.append(step.rule)
                said[at] += f" {getattr(it, step.rule)(random.Random(step.number))}"
                it.check()
                counts["steps"] += 1
            said.append("the end")
            it.end()
            counts = it.counts
        except Exception as error:  # noqa: BLE001 - whatever a walk raises is its failure
            frames = traceback.extract_tb(error.__traceback__)
            where = f"{type(error).__name__} {frames[-1].name} {str(error)[:20]}"
            return counts, Failure(where, "\n".join((*said, traceback.format_exc())))
    counts["walks"] += 1
    return counts, None


def shortened(seed: int, failure: Failure, patience: float) -> tuple[int, Failure]:
    """Leave out steps as long as it fails in the same way."""
    steps, until = steps_of(seed), time.monotonic() + patience
    size = max(1, len(steps) // 2)
    while time.monotonic() < until:
        at, before = 0, len(steps)
        while at < len(steps) and time.monotonic() < until:
            fewer = steps[:at] + steps[at + size :]
            _, other = walk(seed, fewer)
            if other is not None and other.where == failure.where:
                steps, failure = fewer, other
            else:
                at += size
        if size == 1 and len(steps) == before:
            break
        size = max(1, size // 2)
    return len(steps), failure


def run(first: int, walks: int, progress: bool = False, patience: float = 60.0) -> Counter[str]:
    """Walk after walk. Raises AssertionError with the story, which is shortened for `patience` seconds."""
    totals: Counter[str] = Counter()
    began = told = time.monotonic()
    logging.disable()
    try:
        for seed in range(first, first + walks):
            counts, failure = walk(seed)
            if failure is not None:
                steps, failure = shortened(seed, failure, patience)
                raise AssertionError(
                    f"walk {seed} fails ({failure.where}); {steps} of its {len(steps_of(seed))} steps do:\n"
                    f"{failure.story}\nagain: python -m tests.model.walks --seed {seed} --walks 1"
                )
            totals += counts
            now = time.monotonic()
            if progress and now - told > 10:
                told = now
                print(f"{now - began:6.0f} s  next seed {seed + 1}  {_text(totals)}", flush=True)
    finally:
        logging.disable(logging.NOTSET)
    totals["seconds"] = int(time.monotonic() - began)
    print(_text(totals))
    return totals


def _text(totals: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in totals.items())


def _age(name: Name, data: memoryview | bytes) -> int:
    """-1 if these are no bytes of it."""
    size = len(content(name.key, name.shard))
    return next((age for age in range(256) if data[:size] == content(name.key, name.shard, age)), -1)


def _evict(
    index: Index,
    evict: Callable[..., list[Entry] | None],
    need: int,
    keep: Entry | None = None,
    asker: Pool | None = None,
    claim: int = 0,
) -> list[Entry] | None:
    """As the index does; but nobody may lose what is within his share to another, to the chunk.

    Without an asker it is lost to nobody: the place itself is too small.
    """
    victims = evict(need, keep, asker, claim)
    for pool in index.pools or ():
        lost = [victim for victim in victims or () if index.pool(victim.key) is pool]
        if lost and asker is not None and pool is not asker:
            assert pool.used + max(victim.nbytes for victim in lost) > pool.share_bytes, f"{pool} lost {lost}"
    return victims


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Random walks over a whole cache.")
    parser.add_argument("--walks", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first; the next ones follow")
    parser.add_argument("--shorten", type=float, default=60.0, help="seconds to shorten one that fails")
    arguments = parser.parse_args()
    try:
        run(arguments.seed, arguments.walks, progress=True, patience=arguments.shorten)
    except AssertionError as error:
        sys.exit(str(error))
