"""The orchestrator: match, prefetch, reserve, commit, release, step, flush, close.

One owner calls it; it has no locks. State changes happen in these calls, at once and briefly; bytes
move elsewhere. Results of I/O change state only in `step`. Nothing here knows tensors: an engine
adapter moves KV between its memory and the extents of a match or a reservation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from lmtier import forks
from lmtier.config import Config, TierSpec
from lmtier.core import memory_limits
from lmtier.core.cache_metrics import CacheMetrics, bounded_tiers
from lmtier.core.forgetting import ForgottenTenants
from lmtier.core.grant import Grant, Match
from lmtier.core.handover import Handover
from lmtier.core.hinting import Hinting
from lmtier.core.index import Index, no_record
from lmtier.core.load_decider import LoadDecider
from lmtier.core.lower import CacheContext, LowerTier
from lmtier.core.lower_tiers import LowerTiers
from lmtier.core.match import CPU, DELETED, DIFFERED, Entry, EntryState, Lookup, check_chain
from lmtier.core.matches import Matches
from lmtier.core.memory import MemoryPlace
from lmtier.core.pinning import NamedPins
from lmtier.core.place import IndexedPlace, Place
from lmtier.core.presence import Presence
from lmtier.core.reservations import Reservations, at_once
from lmtier.core.sessions import AgentSessions
from lmtier.core.shared import SharedTier
from lmtier.core.slab import Slab
from lmtier.errors import ConfigError, MisuseError, log
from lmtier.format.keys import NO_TENANT
from lmtier.format.layout import ChunkForm, Shard
from lmtier.format.objects import EVERYTHING, Selector, now_ms
from lmtier.observe.follower import CacheObservers
from lmtier.observe.metrics import Metrics
from lmtier.observe.miss_curve import MissCurves
from lmtier.rules.hints import Action, ActionResult
from lmtier.rules.lifetimes import Pinned, seconds_of
from lmtier.rules.policy import make_policy
from lmtier.rules.session_policy import ReturnTimes
from lmtier.rules.worth import Cost
from lmtier.threads import start_thread
from lmtier.tiers.base import Tier

# The part of the slab that loads and stores may hold together. Tiers that hang must not take all of it.
_WAITING_SHARE = 15 / 16
_WARM_PATIENCE = 60.0  # seconds that opening a cache waits for its tiers to know what they hold
_COMING_DOWN = 0.004  # seconds of a step for evictions because a capacity became smaller

M = TypeVar("M", bound=Match)


class Cache:
    def __init__(
        self,
        config: Config | Sequence[str],
        *,
        metrics: Metrics | None = None,
        tiers: Mapping[str, Tier] | None = None,
        wait_until_warm: bool = True,
        shared: bool = False,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        is_record: Callable[[bytes], bool] = no_record,
        handover: Handover | None = None,
    ) -> None:
        """Open the tiers of `config`, or these. `tiers` maps some URLs to tiers that are already open.

        `shared` makes a slab that other processes can map. `wake` is called, from any thread, when `step`
        would find something to do. `is_record` tells the keys of records from the keys of KV. `handover` is
        what a cache of another process leaves to this one.

        Returns when the lower tiers know what they hold, unless `wait_until_warm` is false. It waits for at
        most a minute; a tier that takes longer, or fails, is used as soon as it is ready.
        """
        self.config = config = config if isinstance(config, Config) else Config(tiers=config)
        self.chunk_tokens = config.chunk_tokens
        self.approximation = config.approximation
        self.metrics = metrics or Metrics()
        self.followers = CacheObservers()
        self._wake = threading.Event()
        self._wake_owner = wake
        self._clock = clock
        self._lost_at_flush = 0
        """How many of `lost` `flush` has reported."""
        self._closed = threading.Event()
        cpu, *lower_specs = config.cache_tiers
        assert cpu.capacity is not None
        if handover is None:
            memory_limits.check(str(cpu), cpu.capacity)
        slab_bytes = cpu.capacity if handover is None else handover.capacity
        slab_fd = None if handover is None else handover.slab
        try:
            self.slab = Slab(slab_bytes, hugepages=config.hugepages, shared=shared, fd=slab_fd)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{cpu}: this machine does not give that much memory: {error}") from None
        returns = ReturnTimes(clock)
        self.index = Index(
            self.slab.capacity,
            make_policy(cpu.policy),
            shares=config.shares,
            is_record=is_record,
            returns=returns,
        )
        self.index.label, self.index.followers = CPU, self.followers
        self.indexes = {CPU: self.index}
        """The indexes of the slab and of owned tiers, by label."""
        self.lower = LowerTiers()
        self._gauges = CacheMetrics(self.metrics, self.indexes, self.lower, self.chunk_tokens)
        leaving = self._gauges.evict, self.lower.is_leased_only_by_writes
        self.memory = MemoryPlace(self.slab, self.index, self.metrics, *leaving, clock, cpu.ttl)
        context = CacheContext(
            slab=self.index,
            view=self.slab.view,
            release=self.memory.release,
            metrics=self.metrics,
            followers=self.followers,
            chunk_tokens=self.chunk_tokens,
            queue_length=config.queue_length,
            patience=config.load_deadline,
            clock=clock,
            shares=config.shares,
        )
        locks, has_index_of = (handover.locks, handover.knows) if handover else ({}, lambda place: False)
        self.lower.open(lower_specs, tiers or {}, self._woken, context, locks, has_index_of)
        self.indexes |= {tier.label: tier.index for tier in self.lower.owned}
        shared_parts = self.memory, self.lower, self._gauges, self.followers
        self.reservations = Reservations(*shared_parts)
        weighing = LoadDecider(config.worth, self.chunk_tokens, self.lower, self.metrics)
        self.forgotten_tenants = ForgottenTenants(self)
        self._matches = Matches(*shared_parts, weighing, self.forgotten_tenants.covers)
        self.presence: Presence | None = None
        """The table that other processes read. It exists only if no tier must always be asked what it has."""
        self._table = None if handover is None or handover.presence is None else Presence(handover.presence)
        if shared and all(tier.source for tier in self.lower.shared):
            self.presence = self._table = self._table or Presence()
        self.pinning = NamedPins(self.indexes, clock)
        self.sessions = AgentSessions(self.indexes, self.metrics, self.chunk_tokens, returns)
        self._hinting = Hinting(self, clock)
        if handover is None:
            for index in self.indexes.values():
                index.presence = self.presence
        else:
            handover.enter(self)
            self.memory.resize(min(cpu.capacity, self.slab.capacity))
            self.memory.set_ttl(cpu.ttl)
        self.outlook = MissCurves(bounded_tiers(self.index, self.lower), self.chunk_tokens)
        self.followers.add(self.outlook)
        self._gauges.declare(self.outlook, self.pinning)
        forks.call_in_child(self)
        self._prefault = None
        if config.prefault:
            self._prefault = start_thread("lmtier-prefault", self.slab.prefault, self._closed.is_set)
        deadline = time.monotonic() + _WARM_PATIENCE
        while wait_until_warm and time.monotonic() < deadline:
            if not any(tier.has_jobs and not tier.is_warm for tier in self.lower):
                break
            self._wait(deadline)
            for tier in self.lower:
                tier.poll()

    def __repr__(self) -> str:
        return f"<Cache {self.index!r} below {self.lower!r}>"

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forked(self) -> None:
        """In a child: the tiers belong to the parent, and the threads do not exist here."""
        forks.bury(self, "cache")

    def _woken(self) -> None:
        self._wake.set()
        self._wake_owner()

    @property
    def lost(self) -> int:
        """How many chunks should have been written to lower tiers and were not."""
        return sum(tier.lost for tier in self.lower)

    @property
    def is_warm(self) -> bool:
        """Whether every lower tier knows what it holds."""
        return all(tier.is_warm for tier in self.lower)

    # ---- load: match, prefetch, release

    def match(
        self,
        keys: Sequence[bytes],
        form: ChunkForm,
        *,
        tokens: int | None = None,
        deadline: float | None = None,
        cost: Cost | None = None,
        state_form: ChunkForm | None = None,
        session: str = "",
        parent: str = "",
        source: str = "",
    ) -> Lookup:
        """Find the longest stored prefix of `keys` that a reader of `form` can use.

        Leases its part in the slab. With `state_form`, the prefix ends at a state of that form, leased too.

        `tokens` is the length of the prompt. `deadline` is in seconds from now. `cost` is the time that
        computing would take: with `worth=auto` the match ends where loading would take longer.

        `session` is the name of the session that asks, and `parent` of the one that started it. Without a
        name a request belongs to the session whose prompt it extends. `source`: another server to ask.
        """
        began = time.monotonic()
        self._need_open()
        chain = check_chain(keys)  # a copy: the caller's list grows with its request
        key_tokens = self._gauges.tokens(chain[:1]) * len(chain)
        asked = key_tokens if tokens is None else tokens
        if asked < key_tokens or (chain and asked and not key_tokens):  # states and records have no tokens
            relation = "less" if key_tokens else "more"
            raise MisuseError(f"tokens={asked} is {relation} than the {key_tokens} tokens of these keys")
        patience = self.config.load_deadline if deadline is None else deadline
        agent = self.sessions.asks(chain, form, asked, session, parent, state_form) if key_tokens else None
        match = self._matches.begin(
            chain, form, asked, began + patience, cost, began, state_form, agent, source
        )
        self.index.touch(match.run)
        self.lower.on_request(chain, match.run)
        if key_tokens:
            for notify in self.followers.asked:
                notify(chain, asked, form)
            self.metrics.looked_up(time.monotonic() - began)
        return match

    def bring(self, keys: Sequence[bytes], form: ChunkForm, *, deadline: float, source: str = "") -> Lookup:
        """Like `match`, but before any request: it is not counted, and costs are ignored."""
        self._need_open()
        match = self._matches.begin(check_chain(keys), form, 0, time.monotonic() + deadline, source=source)
        self.index.touch(match.run)
        return match

    def prefetch(self, match: Match, chunks: int | None = None, *, has: int = 0) -> None:
        """Load the chunks found so far into leased extents. `chunks` limits the match to its first chunks.

        `has` is the number of tokens that the engine has itself. They may make the rest not worth loading.
        Returns at once. The match is ready when `step` has seen the last chunk arrive or fail.
        """
        self._need_open()
        self._matches.prefetch(match, chunks, has)

    def release(self, match: Match) -> None:
        """End the match's leases. Idempotent."""
        self._matches.release(match)

    def touch(self, keys: Sequence[bytes]) -> None:
        """The engine has this prefix itself. Mark it as used here too: the engine will evict it first."""
        leading_entries = []
        for key in keys:
            entry = self.index.get(key)
            if entry is None:
                break
            leading_entries.append(entry)
        self.index.touch(leading_entries)
        self.lower.on_request(keys, leading_entries)
        for notify in self.followers.used:
            notify(keys)

    # ---- save: reserve, commit, abort

    def reserve_in_steps(
        self,
        keys: Sequence[bytes],
        form: ChunkForm,
        *,
        first: int = 0,
        ttl: float | None = None,
        by: str = "",
        most: int | None = None,
    ) -> Generator[None, None, Grant]:
        """Reserve extents for those chunks of `keys`, from number `first` on, that no tier holds or receives.

        A chunk gets all its extents or none, and chunks get them in order. If room ends, or `most` chunks
        are new, the reserved ones are a usable prefix; the rest is dropped and counted. Only `commit` makes
        chunks visible.

        New chunks can be used for `ttl` seconds. Chunks that are already stored keep their ttl. `by` names
        the writer, for `clear`.

        Between its small steps the owner can serve others. The first step finds all misuse. If it is closed
        before its end, nothing stays reserved.
        """
        self._need_open()
        end = len(keys) if most is None else most
        grant = yield from self.reservations.reserving(keys, form, first, seconds_of(ttl), by, end)
        self.lower.pending_touches.append(tuple(keys))
        self.sessions.reserves(keys)
        return grant

    reserve = at_once(reserve_in_steps)

    def commit(
        self, grant: Grant, shard: Shard | None = None, marks: Mapping[int, bytes] | None = None
    ) -> None:
        """The bytes of `shard` (None: the only one) are in place. With the last shard chunks become visible.

        `marks` maps chunk numbers to the fingerprint of this shard.
        """
        self.reservations.commit(grant, shard, marks)

    def abort(self, grant: Grant, shard: Shard | None = None) -> None:
        """`shard` will not be written. Its chunks never become visible.

        Their room is freed when no shard is being written.
        """
        self.reservations.abort(grant, shard)

    def unfinished(self, grant: Grant) -> list[Shard]:
        """The shards of it that were neither committed nor aborted."""
        return self.reservations.unfinished(grant)

    # ---- changes while it runs

    def change(self, config: Config) -> None:
        """Take the capacities, policies and lifetimes of `config`; all else must be as it is.

        A smaller capacity is reached by eviction, a few milliseconds in each step. A shorter lifetime also
        ends the chunks that are stored. Raises MisuseError before anything has changed.
        """
        old_specs, new_specs = self.config.cache_tiers, config.cache_tiers
        _check_change(self.config, config)
        places = [*zip(old_specs, new_specs, (self.memory, *self.lower), strict=True)]
        for old, new, place in places:
            if isinstance(place, SharedTier) and (old.capacity, old.policy) != (new.capacity, new.policy):
                raise MisuseError(f"{place.label} is shared: its server decides about capacity and policy")
        for resized, capacity in _resize(places):  # capacities first: only they may be refused
            self.outlook.resize(resized.index.label, capacity)
        for old, new, place in places:
            if isinstance(place, IndexedPlace) and old.policy != new.policy:
                place.index.use(make_policy(new.policy))
            if old.ttl != new.ttl:
                place.set_ttl(new.ttl)
        self.config = config

    # ---- I/O results

    def step(self) -> int:
        """Apply the results of the tiers, and give them new work. Returns the number of results."""
        results = 0
        for tier in self.lower:
            results += tier.poll()
        if self.presence is not None and self.is_warm:
            self.presence.trust()
        self._end_lifetimes()
        self._hinting.step()
        self._come_down()
        if self.lower:
            self.lower.touch()
            self._write_ahead()
            self._matches.weighing.explore()
            for tier in self.lower:
                waiting = self._matches.waiting_bytes
                spare = self.index.capacity * _WAITING_SHARE - waiting if waiting else self.index.capacity
                tier.pump(spare)
            self._matches.expire()
        self.memory.begin_step()
        self.metrics.count()
        for notify in self.followers.stepped:
            notify()
        return results

    def _write_ahead(self) -> None:
        """For tiers with write=evicted: write the next chunks to be evicted, before their room is needed."""
        if self.lower.written_ahead:
            entries = self.memory.next_victims()
            for tier in self.lower.written_ahead:
                tier.on_evicting(entries)

    def wait(self, match: M) -> M:
        """For owners without a loop: prefetch, then step until the match is ready or its deadline passes."""
        while match.pending_lookups:
            self._wait(match.deadline)
            self.step()
        self.prefetch(match)
        while not match.is_ready:
            self._wait(match.deadline)
            self.step()
        return match

    def wait_for_tiers(self) -> None:
        """For owners without a loop: wait until a tier reports something, or for a moment; then step."""
        self._wait()
        self.step()

    def flush(self, timeout: float = 30.0) -> bool:
        """Step until the lower tiers have written and deleted everything that they should.

        The rule and the budget of a tier decide what it should write. False: it was not done in time; or
        since the last call some chunks were lost, because a tier failed, was full, or was too slow. As with
        fsync, a loss is reported once.
        """
        lost_before, is_drained = self._lost_at_flush, self._drain(timeout)
        self._lost_at_flush = self.lost
        return is_drained and self._lost_at_flush == lost_before

    def _drain(self, timeout: float) -> bool:
        """Step until nothing waits to be written or deleted. False: the time ran out."""
        deadline = time.monotonic() + timeout
        self.step()
        while any(tier.is_busy for tier in self.lower) and time.monotonic() < deadline:
            self._wait(deadline)
            self.step()
        return not any(tier.backlog for tier in self.lower)

    def _wait(self, until: float | None = None) -> None:
        # At most 50 ms: an open breaker and a passed deadline do not wake this thread.
        seconds = 0.05 if until is None else min(0.05, max(0.0, until - time.monotonic() + 1e-3))
        self._wake.wait(seconds)
        self._wake.clear()

    def clear_in_steps(
        self,
        selector: Selector = EVERYTHING,
        *,
        force: bool = False,
        tiers: Sequence[LowerTier] | None = None,
    ) -> Generator[tuple[str, int], None, None]:
        """Delete what `selector` covers except what is in use; with `force` that too: releases do no harm.

        Shared tiers are searched, and what is found is deleted for all users of the tier; until then this
        cache finds none of it there. Where headers decide, lower tiers read them one by one: lookups find
        such chunks, but from the first step on none is loaded. `flush` waits for both. What tenants leave in
        the slab is overwritten. `tiers`: delete in the slab and in these only.

        It yields after each small step, so that the owner can serve others: a place, and how many chunks
        have left it. If it is closed before its end, it still deletes everywhere.
        """
        if selector.needs_headers:
            selector = replace(selector, until=min(selector.until, now_ms()))
        tiers = self.lower if tiers is None else tiers
        by_keys = [] if selector.needs_headers else [self.memory]
        owned = [tier for tier in tiers if tier in self.lower.owned and by_keys]
        rest = self._clear_once(selector, force, *by_keys, *tiers)
        try:
            yield from self._clear_once(selector, force, self.memory, *owned)
            if selector.tenants:  # in steps too: meanwhile a forgotten tenant is not found
                yield from chain(rest)  # its close does not close `rest`
        finally:  # at once: what was stored again in the meantime; also if the one who asked has left
            deque(rest, 0)

    clear = at_once(clear_in_steps)

    def _clear_once(self, selector: Selector, force: bool, *places: Place) -> Iterator[tuple[str, int]]:
        for place in (self.memory, *self.lower):
            place.begin_clear(selector)
        for place in places:
            for chunks in place.clear(selector, force=force):
                yield place.label, chunks

    def compared(self, chunks: int, differing: int) -> None:
        """Count the chunks whose fingerprints were compared after a load, and how many of them differed."""
        self.metrics.verified.inc(chunks)
        self.metrics.verify_failures.inc(differing)

    def discard(self, key: bytes, *forms: ChunkForm, why: str = DIFFERED) -> None:
        """Delete a chunk in every tier: its content cannot be trusted. Leases on it stay.

        `forms`: those in which tiers that must be asked may have it. Of a named value, when not
        `may_come_back`, it is gone permanently.
        """
        if (entry := self.index.get(key)) is not None:
            forms = (*forms, entry.form)
        for place in (self.memory, *self.lower):
            place.discard(key, dict.fromkeys(forms), why)

    # ---- lifetimes

    def _end_lifetimes(self) -> None:
        """Delete some chunks that expired or are forgotten; the next step goes on."""
        self.pinning.expire()
        has_more = self.memory.expire() | self.forgotten_tenants.step()
        for tier in self.lower:
            has_more |= tier.expire()
        if has_more:
            self._woken()

    def _come_down(self) -> None:
        """Evict what is above capacities that have become smaller; the next step continues."""
        places: list[IndexedPlace] = [self.memory, *self.lower.owned]
        for place in places:
            if place.index.capacity != place.index.target:
                used_before = place.index.used
                place.come_down(time.monotonic() + _COMING_DOWN)
                if place.index.surplus > 0 and place.index.used < used_before:
                    self._woken()

    def pin(self, name: str, keys: Sequence[bytes], ttl: float | None = None) -> dict[str, int]:
        """Protect `keys` from eviction in every tier that has or gets them.

        The pin lasts until `unpin` or for `ttl` seconds. It replaces an earlier pin of this name. Returns how
        many of them each tier has pinned; nothing is loaded. Pins may take half of a tier's capacity: a pin
        that does not fit now is refused, and a chunk that comes later and does not fit is not pinned.
        """
        self._need_open()
        self.memory.expire_among(keys)
        return self.pinning.pin(name, keys, seconds_of(ttl))

    def unpin(self, name: str) -> bool:
        """Returns whether such a pin existed."""
        return self.pinning.unpin(name)

    def pinned(self) -> list[Pinned]:
        return self.pinning.pinned()

    # ---- sessions

    def hint(
        self, actions: Sequence[Action], tenant: bytes = NO_TENANT, session: str = ""
    ) -> list[ActionResult]:
        """Execute hints of a tenant. `session` is meant where an action names none."""
        self._need_open()
        return self._hinting.execute(actions, tenant, session)

    # ---- named values: chunks that may be replaced

    def commit_value(self, grant: Grant, key: bytes, mark: bytes) -> None:
        """Commit the one chunk of `grant`, which was reserved under a temporary key, under `key`.

        A tier overwrites the old value in its time. After a kill a restart finds either, or one between.
        """
        (entry,) = self.reservations.open[grant.id].entries.values()
        if entry.state is EntryState.GONE:  # a clear with `force`: as if it had been stored before that
            self.discard(key, why=DELETED)
            self.commit(grant)
            return
        self.memory.discard(key)
        with self.lower.replacing(key):
            self.index.rekey(entry, key)
            self.commit(grant, marks={0: mark})

    def is_behind(self, nbytes: int) -> bool:
        """Whether a new value should wait: it could not be written now, but a little later it could."""
        return any(tier.is_behind(nbytes) for tier in self.lower)

    def may_come_back(self, key: bytes) -> bool:
        """Whether a restart now could still find an old value under this key."""
        return any(tier.may_come_back(key) for tier in self.lower.owned)  # shared tiers never got it

    def close(self, timeout: float = 30.0) -> None:
        """Write the waiting chunks to the tiers and release everything, within `timeout`. Idempotent."""
        if self._closed.is_set():
            return
        deadline = time.monotonic() + timeout
        self.pause(False)
        for owned in self.lower.owned:
            owned.queue_unwritten_records()
        if not self._drain(timeout):
            log.warning("lmtier: the cache was closed before all chunks were written to the lower tiers")
        for tier in self.lower:
            tier.persist_order()
        self._drain(deadline - time.monotonic())
        self._closed.set()
        for tier in self.lower:
            tier.close(deadline - time.monotonic())
        if self._prefault is not None:
            self._prefault.join()

    # ---- to and from another process

    def pause(self, paused: bool) -> None:
        """Begin no writes to lower tiers, or begin them again. What runs goes on."""
        for tier in self.lower:
            tier.is_paused = paused

    def why_busy(self) -> str:
        """Take the results of tiers. Why another process cannot take over now; empty: it can."""
        for tier in self.lower:
            tier.poll()
        if self.memory.to_wipe:
            return "chunks of a tenant that was forgotten are still in use"
        return next((why for tier in self.lower if (why := tier.why_busy())), "")

    def restore(self, match: Lookup) -> None:
        """An engine holds it since a time when another process owned the slab."""
        self._matches.restore(match)

    def complete_takeover(self) -> None:
        """This process owns the handover now. Before, the other one may still need all of it unchanged."""
        if self._table is not None:  # others look at it, also if it is of no more use here
            self._table.begin(entry.key for index in self.indexes.values() for entry in index.entries_now())
        for index in self.indexes.values():
            index.presence = self.presence
        self.lower.complete_takeover()

    def close_after_handover(self) -> None:
        """Another process owns the slab and the tiers from now on: end, and change nothing."""
        self._closed.set()
        for tier in self.lower:
            tier.tier.is_handed_over = True
            tier.tier.patience = 0.0
            tier.tier.close()

    def _need_open(self) -> None:
        if self._closed.is_set():
            raise MisuseError("this cache is closed")

    # ---- numbers and checks

    def stats(self) -> dict[str, dict[str, int]]:
        """Chunks, bytes used and capacity per tier, as they are now."""
        tiers: dict[str, dict[str, int]] = {
            CPU: {"chunks": len(self.index), "used": self.index.used, "capacity": self.index.capacity}
        }
        for tier in self.lower.owned:
            index, used = tier.index, tier.index.used + tier.deleting_bytes
            tiers[tier.label] = {"chunks": len(index), "used": used, "capacity": index.capacity}
        return tiers

    def check(self) -> None:
        """Check every invariant; raises AssertionError. It is cheap enough to run after every test."""
        self.slab.check()
        self.index.check()
        self.pinning.check()
        self.sessions.check()
        assert self.slab.used == self.index.used, "slab and index disagree on the bytes in use"
        self.memory.check()
        expected: dict[Entry, int] = {}
        self._matches.check()
        for match in self._matches.open.values():
            for entry in match.run:
                expected[entry] = expected.get(entry, 0) + 1
        for reservation in self.reservations.open.values():
            for entry in reservation.entries.values():
                expected[entry] = expected.get(entry, 0) + len(reservation.pending_shards)
        for entry in (*self.index.pinned, *(entry for tier in self.lower for entry in tier.leased)):
            expected[entry] = expected.get(entry, 0) + 1
        for entry in self.index.entries():
            assert entry.leases >= expected.get(entry, 0), f"{entry!r} has lost a lease"
        if not any(tier.has_jobs for tier in self.lower):
            for entry in self.index.entries():
                assert entry.leases == expected.get(entry, 0), f"{entry!r} has a lease without a holder"
        for tier in self.lower:
            tier.check()


def _check_change(before: Config, after: Config) -> None:
    """Raises MisuseError if they differ in what cannot change."""
    if len(before.cache_tiers) != len(after.cache_tiers):
        raise MisuseError("tiers cannot come or go while the cache is open: open a new one")
    if replace(after, tiers=before.tiers) != before or not all(
        replace(old, url=new.url, capacity=new.capacity, policy=new.policy, ttl=new.ttl) == new
        for old, new in zip(before.cache_tiers, after.cache_tiers, strict=True)
    ):
        raise MisuseError("only capacity, policy and ttl of a tier can change while it runs")


def _resize(
    places: Sequence[tuple[TierSpec, TierSpec, Place]],
) -> list[tuple[IndexedPlace, int]]:
    """Change all capacities that differ, or none. Raises MisuseError."""
    resizable = [
        (place, new.capacity)
        for old, new, place in places
        if isinstance(place, IndexedPlace) and new.capacity and old.capacity != new.capacity
    ]
    for place, capacity in resizable:
        place.need_fits(capacity)
    for place, capacity in resizable:
        place.resize(capacity)
    return resizable
