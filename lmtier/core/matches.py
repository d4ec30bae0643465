"""Matches: finds a prompt's chunks in the slab and in lower tiers, leases them, loads them, releases them.

A match whose reader needs a state ends at the last chunk after which a tier has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from lmtier.core.cache_metrics import CacheMetrics
from lmtier.core.grant import Match
from lmtier.core.load_decider import LoadDecider
from lmtier.core.lower import LowerTier
from lmtier.core.lower_tiers import LowerTiers
from lmtier.core.match import CPU, Entry, EntryState, Lookup
from lmtier.core.memory import MemoryPlace
from lmtier.errors import MisuseError
from lmtier.format.keys import state_key
from lmtier.format.layout import ChunkForm, Name, Shard, form_of, padded
from lmtier.format.objects import Header
from lmtier.observe.follower import CacheObservers
from lmtier.rules.sessions import Agent
from lmtier.rules.worth import Cost
from lmtier.tiers.base import Reason, Stat

_LOADING_SHARE = 7 / 8
"""The part of the slab that loads may fill. Tiers that hang must not take all of it."""


class Matches:
    def __init__(
        self,
        room: MemoryPlace,
        lower: LowerTiers,
        gauges: CacheMetrics,
        followers: CacheObservers,
        weighing: LoadDecider,
        is_forgotten: Callable[[Sequence[bytes]], bool],
    ) -> None:
        """`is_forgotten`: these are of a tenant who was forgotten and has not left yet."""
        self.open: dict[int, Lookup] = {}
        self._pending: dict[Lookup, None] = {}
        """Matches that ask tiers or wait for loads, the first one first, and some that have ended since."""
        self.waiters: dict[Entry, list[Lookup]] = {}
        """The matches that wait for each chunk that is being loaded."""
        self.loading = 0
        """Bytes of extents that wait for lower tiers."""
        self.weighing = weighing
        self._is_leaving = is_forgotten
        self._room, self._index, self._slab = room, room.index, room.slab
        self._lower = lower
        self._gauges = gauges
        self._followers = followers
        self._ids = count(1)

    def restore(self, match: Lookup) -> None:
        """A match of another process goes on here, with its leases. No answers that it waited for come."""
        match.id, match.pending_lookups, match.pending_loads = next(self._ids), 0, 0
        self.open[match.id] = match
        for entry in match.run:
            self._index.lease(entry)

    def begin(
        self,
        keys: tuple[bytes, ...],
        form: ChunkForm,
        tokens: int,
        deadline: float,
        cost: Cost | None = None,
        began: float = 0.0,
        ends: ChunkForm | None = None,
        agent: Agent | None = None,
        source: str = "",
    ) -> Lookup:
        """Begin the match of a request for `tokens` tokens that came at `began`. 0 tokens: no request, or a
        record. `source`: a tier that is only asked by name."""
        number = next(self._ids)
        match = Lookup(
            keys, deadline, ends, id=number, form=form, asked_tokens=tokens, source=source, agent=agent
        )
        self.open[match.id] = match
        is_weighed = bool(tokens and keys)
        if is_weighed and self.weighing.is_never:
            match.cut_reason, match.found, match.decision = "not_worth_it", len(keys), ("none", "never")
        elif self._is_leaving(keys):
            match.cut_reason = "cleared"
        else:
            if is_weighed and cost is not None:
                self.weighing.begin(match, cost, began)
            self._extend(match, len(keys))
            self._find_below(match)
            self._decide(match)
        self._settle_if_ready(match)
        return match

    def _extend(self, match: Lookup, end: int) -> None:
        """Lease the chunks from `run` to `end` that are in the slab now, or are being loaded into it."""
        index, form, run, keys = self._index, match.form, match.run, match.keys
        self._room.expire_among(keys[len(run) : end])
        ready, append = EntryState.READY, run.append
        parent = match.parent
        has_pools, newly_leased = index.pools is not None, 0
        for entry in map(index.get, keys[len(run) : end]):
            if entry is None or (entry.form is not form and not entry.form.serves(form)):
                break
            if entry.state is not ready:
                if entry.state is not EntryState.LOADING:
                    break
                match.pending_loads += 1
                self.waiters.setdefault(entry, []).append(match)
            if entry.parent is not parent:
                index.link(entry, parent)
            if has_pools:
                index.lease(entry)
            else:  # the same, without the call: this loop is the cost of a long hit
                if not entry.leases:
                    newly_leased += entry.nbytes
                entry.leases += 1
            append(entry)
            parent = entry
        index.leased_bytes += newly_leased
        if match.pending_loads:
            self._pending[match] = None
        match.sources.extend([CPU] * (len(run) - len(match.sources)))

    def _find_below(self, match: Lookup) -> None:
        """Add the chunks beyond `run` whose place is known, and ask the shared tiers for the rest."""
        keys, form = match.keys, match.form
        known = [tier for tier in self._lower.owned if tier.load_breaker.allows() and len(tier.index)]
        for each in self._lower.watching:
            each.on_miss(keys[len(match.run) :])
        asked_tiers = [tier for tier in self._lower.tiers_to_ask(match.source) if tier.load_breaker.allows()]
        if keys and self._index.is_record(keys[0]):
            asked_tiers = []  # no record is ever stored there
        for i in range(match.chunks, len(keys)):
            entry = self._index.get(keys[i])
            if entry is not None and entry.state >= EntryState.LOADING and entry.form.serves(form):
                match.sources.append(CPU)  # the slab again, after a chunk that a lower tier has
                continue
            holder = next((tier for tier in known if tier.is_stored(keys[i], form)), None)
            if holder is None:
                break
            match.sources.append(holder.label)
        if not asked_tiers:
            return
        first = match.chunks
        names = [Name(key, shard) for key in keys[first:] for shard in form.shards]
        if match.state_form is not None and (names or (first and not self._place_of_state(match, first))):
            state_keys = [_state_of(match, chunk_count) for chunk_count in range(1, len(keys) + 1)]
            names += [Name(key, shard) for key in state_keys for shard in match.state_form.shards]
        for tier in asked_tiers if names else ():
            match.pending_lookups += tier.lookup(
                names, match.deadline, partial(self._answered, match, tier, first)
            )
        if match.pending_lookups:
            self._pending[match] = None

    def _answered(self, match: Lookup, tier: LowerTier, first: int, found: dict[Name, Stat]) -> None:
        """A tier has answered which of the keys from `first` on it has."""
        found_end = first
        while found_end < len(match.keys) and _is_found(match.keys[found_end], match.form, found):
            found_end += 1
        if match.state_form is not None:
            for chunks in range(1, len(match.keys) + 1):
                if _is_found(_state_of(match, chunks), match.state_form, found):
                    match.states.setdefault(chunks, tier.label)
        if not match.pending_lookups or match.released:  # no request waits for the answer
            if match.cut_reason == "not_worth_it":
                self.weighing.remember_skipped(tier, match.keys[:found_end], first, match.form)
            return
        match.pending_lookups -= 1
        new_chunks = found_end - match.chunks
        match.sources.extend([tier.label] * new_chunks)
        self._decide(match)
        self._settle_if_ready(match)

    def _decide(self, match: Lookup) -> None:
        """How much of it to load: what is worth it, and of that, what ends with a state."""
        if match.state_form is not None and match.pending_lookups:
            return
        self._weigh(match)
        if match.state_form is None or match.state_match is not None:
            return
        candidates = (chunks for chunks in range(match.chunks, 0, -1) if self._place_of_state(match, chunks))
        chunks = next(candidates, 0)
        if chunks < match.chunks:
            self._truncate(match, chunks, "no_state")
        if chunks:
            key = _state_of(match, chunks)
            state_match = match.state_match = Lookup(
                (key,), match.deadline, id=next(self._ids), form=match.state_form, prompt_match=match
            )
            self.open[state_match.id] = state_match
            tier_label = self._place_of_state(match, chunks)
            self._extend(state_match, 1)
            state_match.sources = [tier_label]
            # A use of the state, which stays older than its chunks and so leaves before them.
            self._index.touch(state_match.run)
            # Some may have left while a tier was asked.
            self._index.refresh([entry for entry in match.run if entry.state is not EntryState.GONE])
            self._lower.on_request(state_match.keys, state_match.run)

    def _place_of_state(self, match: Lookup, chunks: int) -> str:
        """A tier that can supply the state after so many chunks; empty: none is known."""
        key, form = _state_of(match, chunks), match.state_form
        assert form is not None
        entry = self._room.live(key)
        if entry is not None:
            return (
                CPU
                if entry.state in (EntryState.LOADING, EntryState.READY) and entry.form.serves(form)
                else ""
            )
        for tier in self._lower.owned:
            if tier.load_breaker.allows() and tier.is_stored(key, form):
                return tier.label
        return match.states.get(chunks, "")

    def _weigh(self, match: Lookup) -> None:
        """Cut the match where loading takes longer than computing."""
        chunks = self.weighing.weigh(match)
        if chunks < match.chunks:
            self._truncate(match, chunks, "not_worth_it")

    def _need_own(self, match: Match, call: str) -> Lookup:
        if not isinstance(match, Lookup) or self.open.get(match.id) is not match:
            raise MisuseError(f"{call} of a match that was released, or that another cache made")
        return match

    def prefetch(self, held: Match, chunks: int | None, has: int) -> None:
        match = self._need_own(held, "prefetch")
        if match.pending_lookups or has > match.engine_tokens:
            match.pending_lookups = 0  # late answers are not waited for
            match.engine_tokens = min(has, match.asked_tokens)
            self._decide(match)
        if chunks is not None and chunks < match.chunks:
            self._truncate(match, chunks, "not_worth_it")
        if match.below:  # some time may have passed since the match
            match.decided = time.monotonic()
            match.deadline = min(match.limit, match.decided + match.patience)
        self._load_all(match)
        if match.state_match is not None:
            match.state_match.deadline = match.deadline
            self._load_all(match.state_match)
        self._settle_if_ready(match)

    def _load_all(self, match: Lookup) -> None:
        while match.below:
            if self._index.get(match.keys[len(match.run)]) is not None:
                self._extend(match, match.chunks)  # it came into the slab meanwhile, for another request
            if match.below:
                self._fetch(match)

    def _fetch(self, match: Lookup) -> None:
        """Start loading the chunk that follows `run` into a new entry, or end the match here."""
        chunk = len(match.run)
        key, tier = match.keys[chunk], self._lower.named.get(match.sources[chunk])
        form = tier.load_form(key, match.form) if tier is not None else None
        if tier is None or form is None or not tier.load_breaker.allows():
            self._truncate(match, chunk, "left_meanwhile" if form is None else "tier_down")
            return
        if (entry := self._index.get(key)) is not None:
            self._truncate(match, chunk, "being_filled" if entry.state is EntryState.FILLING else "foreign")
            return
        loading_entry = self._load(key, form, tier, match.parent)
        if loading_entry is None:
            self._truncate(match, chunk, "no_room")
            return
        self._index.lease(loading_entry)
        match.run.append(loading_entry)
        match.pending_loads += 1
        self._pending[match] = None
        self.waiters[loading_entry] = [match]

    def _load(self, key: bytes, form: ChunkForm, tier: LowerTier, parent: Entry | None) -> Entry | None:
        """Start loading a chunk into a new entry. Matches may wait for it. None: there is no room."""
        if self.waiting_bytes + form.slab_bytes > self._index.capacity * _LOADING_SHARE:
            return None
        offsets = self._room.allocate(key, form, parent)
        if offsets is None:
            return None
        entry = self._index.add(key, form, form.slab_bytes, EntryState.LOADING, parent)
        entry.offsets = offsets
        self.loading += form.slab_bytes
        self.weighing.loading_tier[entry] = tier
        buffers = [
            self._slab.view(offset, padded(size)) for offset, size in zip(offsets, form.sizes, strict=True)
        ]
        tier.load(key, form, buffers, partial(self._arrived, entry, tier))
        return entry

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the slab that wait for lower tiers."""
        return self.loading + sum(tier.leased_bytes for tier in self._lower)

    def _arrived(
        self, entry: Entry, tier: LowerTier, result: dict[Shard, Header] | Reason, end: float
    ) -> None:
        """A load from a lower tier has ended or failed."""
        self.loading -= entry.nbytes
        del self.weighing.loading_tier[entry]
        waiters = self.waiters.pop(entry, [])
        failure = result.value if isinstance(result, Reason) else self._take_layout(entry, result)
        if not isinstance(result, Reason):
            self._room.live_until(end, entry)
        if failure == "foreign" and not isinstance(result, Reason):
            tier.discard(entry.key, (entry.form,), failure)
        if not failure:
            self._index.make_ready(entry)
            for each in self._lower:
                each.on_ready(entry, tier)
        elif entry.state is not EntryState.GONE:
            self._index.remove(entry)
        for match in waiters:
            match.pending_loads -= 1
            if match.released:
                continue
            if failure or not entry.form.serves(match.form):
                self._truncate(match, match.run.index(entry), failure or "foreign")
            self._settle_if_ready(match)
        if failure:
            self._room.release(entry)  # the lease of the load itself

    def _take_layout(self, entry: Entry, headers: dict[Shard, Header]) -> str:
        """Take the chunk's layout from its verified headers. Returns why that is impossible, or nothing."""
        if entry.state is EntryState.GONE:
            return "cleared"
        ordered_headers = [headers[shard] for shard in entry.form.shards]
        layout = ordered_headers[0].layout
        if any(header.layout is not layout and header.layout != layout for header in ordered_headers):
            return "foreign"
        form = form_of(layout, entry.form.shards)
        if [padded(size) for size in form.sizes] != [padded(size) for size in entry.form.sizes]:
            return "foreign"
        entry.form = form
        entry.marks = tuple(header.mark for header in ordered_headers)
        entry.provenance = ordered_headers[0].provenance
        return ""

    def release(self, held: Match) -> None:
        if held.released:
            return
        match = self._need_own(held, "release")
        was_ready, match.released = match.is_ready, True
        del self.open[match.id]
        if not match.settled:
            if not was_ready:
                self._truncate(match, self.weighing.arrived_chunks(match), "cancelled")
            self._settle(match)
        if match.state_match is not None:
            self._drop_end(match)
        if match.run:
            self._room.release(*match.run)
            match.run = []

    def _truncate(self, match: Lookup, chunks: int, reason: str) -> None:
        """Keep the first `chunks` of the match; end the leases of the rest. One that has an end has to keep
        it, or keeps nothing."""
        if match.prompt_match is not None:
            match, chunks = match.prompt_match, 0
        if match.state_form is not None and (match.state_match is not None or match.pending_lookups):
            chunks = 0
        if match.state_match is not None:
            self._drop_end(match)
        if not match.cut_reason:
            match.cut_reason, match.found = reason, match.chunks
        self._let_go(match, chunks)

    def _drop_end(self, match: Lookup) -> None:
        state_match, match.state_match = match.state_match, None
        assert state_match is not None
        self._let_go(state_match, 0)
        state_match.released = True
        del self.open[state_match.id]

    def _let_go(self, match: Lookup, chunks: int) -> None:
        for entry in match.run[chunks:]:
            waiters = self.waiters.get(entry, [])
            if match in waiters:
                waiters.remove(match)
                match.pending_loads -= 1
        self._room.release(*match.run[chunks:])
        del match.run[chunks:]
        del match.sources[chunks:]

    def expire(self) -> None:
        """End the waits whose deadlines have passed. Those requests compute the rest instead."""
        now = time.monotonic()
        for match in list(self._pending):
            if match.released or not (match.pending_loads or match.pending_lookups):
                del self._pending[match]
                continue
            if now <= match.deadline:
                continue
            if match.pending_lookups and match.state_form is not None:
                match.pending_lookups, match.cut_reason, match.found = (
                    0,
                    match.cut_reason or "deadline",
                    match.chunks,
                )
                self._decide(match)
            match.pending_lookups = 0
            if match.state_form is None or not match.is_ready:
                self._truncate(match, self.weighing.arrived_chunks(match), "deadline")
            self._settle_if_ready(match)

    def _settle_if_ready(self, match: Lookup) -> None:
        match = match.prompt_match or match
        if match.is_ready and not match.settled:
            self._settle(match)

    def _settle(self, match: Lookup) -> None:
        match.settled = True
        missed_tokens = self._gauges.count_lookup(match)
        if missed_tokens is None:
            return
        self.weighing.settle(match)
        hit_tokens = match.asked_tokens - sum(missed_tokens.values())
        if match.agent is not None:
            match.agent.saved += hit_tokens
        for notify in self._followers.settled:
            notify(match, missed_tokens)

    def check(self) -> None:
        for match in self.open.values():
            waiting = sum(match in waiters for waiters in self.waiters.values())
            assert match.pending_loads == waiting, f"{match!r} waits for {waiting}"
            assert match in self._pending or not (waiting or match.pending_lookups), (
                f"{match!r} would wait for ever"
            )
            assert len(match.run) <= match.chunks, f"{match!r} lost count"


def _state_of(match: Lookup, chunks: int) -> bytes:
    """The key of the state after so many chunks."""
    assert match.state_form is not None
    assert match.state_form.layout is not None
    return state_key(match.keys[chunks - 1], match.state_form.layout.to_json())


def _is_found(key: bytes, form: ChunkForm, found: dict[Name, Stat]) -> bool:
    """Whether all objects of it are. They may be smaller than in the slab: a codec shrank them."""
    stats = (found.get(Name(key, shard)) for shard in form.shards)
    return all(stat and stat.nbytes <= padded(size) for stat, size in zip(stats, form.sizes, strict=True))
