"""The orchestrator: match, prefetch, reserve, commit, release, step, flush, close.

One owner calls it; it has no locks. State changes happen in these calls, at once and briefly; bytes
move elsewhere, and what became of them is learned in `step`, the only place where results of I/O
change state. Nothing here knows tensors: an engine adapter moves KV between its memory and the
extents that a match or a reservation names.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import NamedTuple

from lmtier import forks, memory
from lmtier.below import UNBOUNDED, Below, count_dropped, count_shares
from lmtier.codec import NO_MARK, Header, Made, Suspect, mark_room
from lmtier.config import Config, without_login
from lmtier.curve import FACTORS, Outlook, Place
from lmtier.errors import ConfigError, MisuseError
from lmtier.index import CLEARED, DELETED, DIFFERED, EXPIRED, Entry, Index, State
from lmtier.journal import Journal
from lmtier.keys import is_value
from lmtier.layout import Form, Name, Shard, form_of, padded
from lmtier.lifetimes import AT_ONCE, FOREVER, MAX_TTL, Pinned, Pins
from lmtier.metrics import Metrics
from lmtier.policy import make_policy
from lmtier.presence import Presence
from lmtier.registry import open_tier
from lmtier.shares import Pool
from lmtier.slab import Slab
from lmtier.tier import Reason, Stat, Tier
from lmtier.workers import start_thread
from lmtier.worth import ALWAYS, EXPLORED_AT_LAST, NEVER, PATIENCE, Cost, Line, cut

log = logging.getLogger("lmtier")

CPU = "cpu"
_AHEAD = 16  # chunks that write=evicted keeps saved ahead of their eviction, at least
_TRIES = 4  # evictions for one chunk before its room is given up as too fragmented
_SLID = 4  # times the size of a chunk, that may be moved for it; or
_SLID_BYTES = 32 << 20
_COMPACTING = 0.05  # seconds of a step that moving chunks together may take, or one move
_EXPLORED_BYTES = 32 << 20  # at a time, or one chunk
# Of the slab that may wait for tiers below, those that hang must not take all of it: what loads fill, and
# what loads and stores hold together.
_LOADING_SHARE = 7 / 8
_WAITING_SHARE = 15 / 16
_WARM_PATIENCE = 60.0  # seconds that opening a cache waits for its tiers to know what they hold
_CLEARED_AT_ONCE = 1024  # chunks
_SEEN = 64  # prefixes whose recency below is brought up to date in the next step


@dataclass(eq=False, slots=True)
class Match:
    """The longest prefix of `keys` that the tiers can supply, and from where. Holds leases: release it.

        asking   tiers that must be asked have not answered: `chunks` may still grow
        found    `chunks` are known; those below the slab stay there until `prefetch`
        ready    `run` holds all of `chunks`: leased, complete, verified

    A chunk that fails on its way up cuts the match there: `chunks` shrinks, the rest is recomputed.
    """

    id: int
    keys: tuple[bytes, ...]
    form: Form
    asked_tokens: int
    deadline: float
    run: list[Entry] = field(default_factory=list)
    """The leading chunks in the slab, each leased by this match; those LOADING are on their way."""
    sources: list[str] = field(default_factory=list)
    """Where each found chunk was; longer than `run` until the rest is prefetched."""
    below: list[Below | None] = field(default_factory=list)
    """The tiers of the chunks beyond `run`; None: in the slab again, behind such a chunk."""
    waiting: int = 0
    """Chunks of `run` that are LOADING."""
    asking: int = 0
    cut: str = ""
    """Why it ends before what had been found, if it does."""
    found: int = 0
    """How many chunks had been found by then."""
    settled: bool = False
    released: bool = False
    asker: str = ""
    """Who asked, for people."""
    limit: float = field(init=False)
    """The deadline that was asked for; `deadline` is earlier where computing takes less."""
    patience: float = float("inf")
    """Seconds from `prefetch` on until computing is begun instead."""
    cost: Cost | None = None
    """What computing takes the engine, if it is to be loaded only as far as that is worth it."""
    has: int = 0
    """Tokens that the engine has itself."""
    decision: tuple[str, str] | None = None
    """How much of what lies below is loaded, and why."""
    decided: float = 0.0
    expected: float | None = None
    """When that was, and how long it was to take from then on."""

    def __post_init__(self) -> None:
        self.limit = self.deadline

    @property
    def chunks(self) -> int:
        return len(self.sources)

    @property
    def ready(self) -> bool:
        return not (self.asking or self.waiting or self.below)

    def __repr__(self) -> str:
        state = "asking" if self.asking else "ready" if self.ready else "found"
        return f"<Match {self.chunks} of {len(self.keys)} chunks, {len(self.run)} in the slab, {state}>"


@dataclass(eq=False, slots=True)
class Reservation:
    """Extents for the chunks that were not stored yet. Commit or abort each shard exactly once."""

    id: int
    form: Form
    entries: dict[int, Entry]
    """Chunk number -> its entry, FILLING; `entry.offsets[n]` is where shard n of the form goes."""
    known: int
    """Leading chunks that are stored, or that the caller skipped: skip_leading_tokens, in chunks."""
    dropped: int
    """Chunks that are neither stored nor in `entries`."""
    left: set[Shard]
    prints: dict[int, list[bytes]] = field(default_factory=dict)
    aborted: bool = False
    ttl: float = FOREVER
    """Seconds from the commit of its last shard on that its chunks may be used."""

    def __repr__(self) -> str:
        return f"<Reservation {sorted(self.entries)} known={self.known} left={len(self.left)}>"


class _Skipped(NamedTuple):
    """What was not loaded, though it was there."""

    since: float
    keys: tuple[bytes, ...]
    first: int
    """Of the keys: those from here on."""
    form: Form


class Cache:
    def __init__(
        self,
        config: Config,
        *,
        metrics: Metrics | None = None,
        tiers: Mapping[str, Tier] | None = None,
        wait_until_warm: bool = True,
        shared: bool = False,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the tiers of `config`. `tiers` supplies opened ones for some of its URLs (tests, adapters).

        `shared` makes a slab that can be given to other processes. `wake` is called, from any thread, when
        `step` would find something to do.

        Returns when the tiers below know what they hold, unless told not to wait for that. A tier that
        fails at it, or takes more than a minute, is used when it is done.
        """
        self.config = config
        self.chunk_tokens = config.chunk_tokens
        self.approximation = config.approximation
        self.metrics = metrics or Metrics()
        self._wake = threading.Event()
        self._tell = wake
        self._clock = clock
        self._ids = count(1)
        self._told_lost = 0
        """Of `lost`, as many as `flush` has told."""
        self._reservations: dict[int, Reservation] = {}
        self._matches: dict[int, Match] = {}
        self._waiters: dict[Entry, list[Match]] = {}
        self._seen: deque[tuple[bytes, ...]] = deque(maxlen=_SEEN)
        self._closed = threading.Event()
        top, *lower = config.stores
        assert top.capacity is not None
        memory.check(f"tier {without_login(top.url)!r}", top.capacity)
        try:
            self.slab = Slab(top.capacity, hugepages=config.hugepages, shared=shared)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"tier {without_login(top.url)!r}: this machine does not give that much memory: {error}"
            ) from None
        self._loading = 0
        """Bytes of extents that wait for tiers below."""
        self._coming: dict[Entry, Below] = {}
        """From which."""
        self._computing = 0.0
        """Until when engines compute what they did not get, by what they say of themselves."""
        self._skipped: dict[Below, _Skipped] = {}
        """The latest that was not worth it, of each tier."""
        self.index = Index(self.slab.capacity, make_policy(top.policy), shares=config.shares)
        self.pins = Pins()
        self._ttl = top.ttl
        self.below: list[Below] = []
        try:
            for spec in lower:
                tier = (tiers or {}).get(spec.url) or open_tier(spec)
                tier.wake = self._woken
                twins = sum(each.scheme == spec.scheme for each in lower[: len(self.below)])
                label = f"{spec.scheme}-{twins + 1}" if twins else spec.scheme
                self.below.append(
                    Below(
                        *(label, spec, tier, self.metrics, self.chunk_tokens, config.queue_length),
                        patience=config.load_deadline,
                        clock=clock,
                        shares=config.shares,
                        slab=self.index,
                        let_go=self._release,
                    )
                )
        except BaseException:
            for below in self.below:
                below.close(0.0)
            raise
        self.presence: Presence | None = None
        """For other processes, if no tier has to be asked what it holds."""
        if shared and all(below.index is not None for below in self.below):
            self.presence = Presence()
        for index in self._places_kept().values():
            index.wanted, index.presence = self.pins.wanted, self.presence
        self._watching = [below for below in self.below if below.watches]
        self._evicted = [below for below in self.below if below.awaits_eviction]
        self._room = 0  # of the largest chunk so far
        self._compacting = 0.0  # seconds since the last step
        self._took = 0  # bytes since the last step
        self._ahead = 0  # bytes that write=evicted keeps saved: twice the most that a step took, lately
        self._took_room: set[Pool | None] = set()
        """Whose chunks, if there are shares."""
        self._journal: Journal | None = None
        self.settled: Callable[[Match, dict[str, int]], None] | None = None
        """Told of every lookup that is settled, and the tokens missed by reason, the first one's first."""
        self.no_room_at = float("-inf")
        """When somebody last found no room, because all there is was leased; in time.monotonic()."""
        self.outlook = Outlook(self._places())
        self._declare()
        forks.tell(self)
        self._prefault = None
        if config.prefault:
            self._prefault = start_thread("lmtier-prefault", self.slab.prefault, self._closed.is_set)
        until = time.monotonic() + _WARM_PATIENCE
        while wait_until_warm and any(below.has_jobs for below in self.below) and time.monotonic() < until:
            self._wait(until)
            for below in self.below:
                below.poll()

    def __repr__(self) -> str:
        return f"<Cache {self.index!r} below {self.below!r}>"

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forked(self) -> None:
        """In a child: its parent goes on with the tiers, and nobody has the threads."""
        forks.bury(self, "cache")

    def _woken(self) -> None:
        self._wake.set()
        self._tell()

    @property
    def lost(self) -> int:
        """Chunks that tiers below were to get and did not, so far."""
        return sum(below.lost for below in self.below)

    @property
    def is_warm(self) -> bool:
        """Whether every tier below knows what it holds."""
        return all(below.is_warm for below in self.below)

    # ---- load: match, prefetch, release

    def match(
        self,
        keys: Sequence[bytes],
        form: Form,
        *,
        tokens: int | None = None,
        deadline: float | None = None,
        cost: Cost | None = None,
    ) -> Match:
        """How long a prefix of `keys` is there for a reader of `form`? Leases what is in the slab.

        `tokens` is the length of the prompt. `deadline` is in seconds from now. `cost` is what computing
        takes instead: with `worth=auto` the match ends where loading would take longer.
        """
        began = time.monotonic()
        self._need_open()
        names = tuple(keys)  # the caller's list grows with its request
        _check_chain(names)
        whole = sum(map(self._tokens, names[:1])) * len(names)
        asked = whole if tokens is None else tokens
        if asked < whole:
            raise MisuseError(f"tokens={asked} is less than the {whole} that these keys stand for")
        seconds = self.config.load_deadline if deadline is None else deadline
        match = Match(next(self._ids), names, form, asked, began + seconds)
        self._matches[match.id] = match
        if whole and self.config.worth == NEVER:
            match.cut, match.found, match.decision = "not_worth_it", len(names), ("none", "never")
        else:
            if whole and cost is not None and self.config.worth != ALWAYS:
                match.cost = cost
                match.patience = PATIENCE * cost.prefill(0, whole)
                match.deadline = min(match.limit, began + match.patience)
            self._extend(match, len(names))
            self._find_below(match)
            self._weigh(match)
        self._saw(names, match.run)
        self._settle_if_ready(match)
        if whole:
            self.outlook.saw(names, asked / self.chunk_tokens, form.room, form.at_rest)
            self.metrics.looked_up(time.monotonic() - began)
        return match

    def bring(self, keys: Sequence[bytes], form: Form, *, deadline: float) -> Match:
        """As `match`, before any request: not counted as one, and whatever it costs. `prefetch` it next."""
        self._need_open()
        match = Match(next(self._ids), tuple(keys), form, 0, time.monotonic() + deadline)
        self._matches[match.id] = match
        self._extend(match, len(match.keys))
        self._find_below(match)
        self.index.touch(match.run)
        self._settle_if_ready(match)
        return match

    def _tokens(self, key: bytes) -> int:
        """What a chunk stands for. A named value stands for none, and is in no count of them."""
        return 0 if is_value(key) else self.chunk_tokens

    def _saw(self, keys: Sequence[bytes], run: Sequence[Entry]) -> None:
        """Keep a prefix young: in the slab now, below in the next step."""
        self.index.touch(run)
        if self.below:
            self._seen.append(tuple(keys))
        if self._watching:
            for entry in run:
                entry.seen = True
            for below in self._watching:
                below.saw(run)

    def _extend(self, match: Match, end: int) -> None:
        """Lease the chunks from `run` to `end` that are in the slab now, or on their way into it."""
        index, form, run, keys = self.index, match.form, match.run, match.keys
        self._expire_among(keys[len(run) : end])
        get, ready = index.get, State.READY
        parent = run[-1] if run else None
        is_shared, pinned = index.pools is not None, 0
        for i in range(len(run), end):
            entry = get(keys[i])
            if entry is None or (entry.form is not form and not entry.form.serves(form)):
                break
            if entry.state is not ready:
                if entry.state is not State.LOADING:
                    break
                match.waiting += 1
                self._waiters.setdefault(entry, []).append(match)
            if entry.parent is not parent:
                index.link(entry, parent)
            if is_shared:
                index.lease(entry)
            else:  # the same, without the call: this loop is the cost of a long hit
                if not entry.leases:
                    pinned += entry.nbytes
                entry.leases += 1
            run.append(entry)
            parent = entry
        index.pinned += pinned
        match.sources.extend([CPU] * (len(run) - len(match.sources)))

    def _find_below(self, match: Match) -> None:
        """Add the chunks beyond `run` whose place is known; ask the tiers whose content is not."""
        keys, form = match.keys, match.form
        trusted = [below for below in self.below if below.up.allows()]
        known = [below for below in trusted if below.index is not None and len(below.index)]
        for each in self._watching:
            each.missed(keys[len(match.run) :])
        asked = [below for below in trusted if below.index is None]
        for i in range(match.chunks, len(keys)):
            entry = self.index.get(keys[i])
            if entry is not None and entry.state >= State.LOADING and entry.form.serves(form):
                match.sources.append(CPU)  # the slab again, behind what was found below
                match.below.append(None)
                continue
            below = next((below for below in known if below.holds(keys[i], form)), None)
            if below is None:
                break
            match.sources.append(below.label)
            match.below.append(below)
        first = match.chunks
        if asked and first < len(keys):
            names = [Name(key, shard) for key in keys[first:] for shard in form.shards]
            for below in asked:
                match.asking += below.lookup(
                    names, match.deadline, partial(self._answered, match, below, first)
                )

    def _answered(self, match: Match, below: Below, first: int, found: dict[Name, Stat]) -> None:
        """A tier has said what it has of the keys from `first` on."""
        sizes = [padded(size) for size in match.form.sizes]
        there = first
        for key in match.keys[first:]:
            stats = (found.get(Name(key, shard)) for shard in match.form.shards)
            if not all(stat and stat.nbytes <= size for stat, size in zip(stats, sizes, strict=True)):
                break  # less is what a codec left of it
            there += 1
        if not match.asking or match.released:  # nobody waits for it
            if match.cut == "not_worth_it":
                self._overlook(below, match.keys[:there], first, match.form)
            return
        match.asking -= 1
        new = there - match.chunks
        match.sources.extend([below.label] * new)
        match.below.extend([below] * new)
        self._weigh(match)
        self._settle_if_ready(match)

    def _weigh(self, match: Match) -> None:
        """Cut the match where loading takes longer than computing.

        Not before it is known what there is, unless no answer could make more of it worth it: then those
        that are outstanding are not waited for.
        """
        if not (match.asking or match.below or match.waiting) or is_value(match.keys[0]):
            return
        if match.cost is None:
            if not match.asking:
                match.decision = "all", "always" if self.config.worth == ALWAYS else "unmeasured"
            return
        now, size, there = time.monotonic(), self.chunk_tokens, complete(match)
        coming = [self._coming.get(entry) if i >= there else None for i, entry in enumerate(match.run)]
        tiers = list(dict.fromkeys(tier for tier in (*coming, *match.below) if tier is not None))
        places = [-1 if tier is None else -2 - tiers.index(tier) for tier in coming]
        places += [-1 if tier is None else tiers.index(tier) for tier in match.below]
        lines = [tier.speed.line(now) for tier in tiers]
        if match.asking:  # as if one had all the rest, and were as fast as the fastest
            asked = [tier.prospect(now) for tier in self.below if tier.index is None]
            known = [line for line in asked if line is not None]
            lines.append(Line(*map(min, zip(*known, strict=True))) if len(known) == len(asked) else None)
            places += [len(tiers)] * (len(match.keys) - match.chunks)
        measured = [line for line in lines if line is not None]
        if len(measured) < len(lines):
            if not match.asking:
                match.decision = "all", "unmeasured"
            return
        tokens, nbytes = match.asked_tokens, match.form.at_rest
        chunks, arrival = cut(match.cost, tokens, match.has, size, places, nbytes, measured)
        if match.asking and chunks > match.chunks:
            return
        if match.asking:
            match.asking = 0
            match.cut, match.found = "not_worth_it", len(match.keys)
        match.decided, match.expected = now, arrival if chunks > there else None
        if chunks < match.chunks:
            self._skip(match, chunks)
            self._truncate(match, chunks, "not_worth_it")
        match.decision = "all", "faster"
        if match.cut == "not_worth_it":
            match.decision = "part" if chunks > there else "none", "slower"
        instead = match.cost.prefill(max(match.has, min(there, chunks) * size), max(match.has, chunks * size))
        match.patience = PATIENCE * instead
        match.deadline = min(match.limit, now + match.patience)

    def _skip(self, match: Match, chunks: int) -> None:
        """Note what is not worth it, to see later whether it still is not."""
        first = max(chunks, len(match.run))
        skipped = match.below[first - len(match.run) :]
        below = skipped[0] if skipped else None
        if below is None:
            return
        same = next((i for i, tier in enumerate(skipped) if tier is not below), len(skipped))
        self._overlook(below, match.keys[: first + same], first, match.form)

    def _overlook(self, below: Below, keys: tuple[bytes, ...], first: int, form: Form) -> None:
        """The keys from `first` on are there, and are not loaded."""
        if len(keys) > first:
            below.speed.skipped((len(keys) - first) * form.at_rest)
            since = self._skipped[below].since if below in self._skipped else time.monotonic()
            self._skipped[below] = _Skipped(since, keys, first, form)

    def _explore(self) -> None:
        """Read some of what was not worth it, for nobody, and if possible not beside engines that compute.

        Into memory of its own: until then the engine has mostly stored what it computed instead, so in the
        slab there is no place for it, nor need.
        """
        now = time.monotonic()
        for below, (since, keys, first, form) in list(self._skipped.items()):
            if now < self._computing and now - since < EXPLORED_AT_LAST:
                continue
            del self._skipped[below]
            most = min(len(keys) - first, max(1, _EXPLORED_BYTES // form.room))
            for key in keys[first : first + below.speed.explores(most, form.at_rest, now)]:
                if (held := below.form(key, form)) is not None:
                    payloads = [memoryview(mmap.mmap(-1, padded(size))) for size in held.sizes]
                    below.load(key, held, payloads, lambda result, end: None)
                    self.metrics.worth_explored.labels(below.label).inc()

    def prefetch(self, match: Match, chunks: int | None = None, *, has: int = 0) -> None:
        """Bring what was found so far into leased extents; `chunks` keeps only the first so many.

        `has`: the engine turned out to have so many tokens itself, which may make the rest not worth it.
        Returns at once. The match is ready when `step` has seen the last of them arrive or fail.
        """
        self._need_open()
        if self._matches.get(match.id) is not match:
            raise MisuseError("prefetch of a match that was released, or that another cache made")
        if match.asking or has > match.has:
            match.asking = 0  # what has not been answered by now is not waited for
            match.has = min(has, match.asked_tokens)
            self._weigh(match)
        if chunks is not None and chunks < match.chunks:
            self._truncate(match, chunks, "not_worth_it")
        if match.below:  # the engine may have taken its time to come to this
            match.decided = time.monotonic()
            match.deadline = min(match.limit, match.decided + match.patience)
        while match.below:
            before = len(match.run)
            self._extend(match, match.chunks)  # what came into the slab meanwhile, for another request
            del match.below[: len(match.run) - before]
            if not match.below or not self._fetch(match, match.below.pop(0)):
                break
        self._settle_if_ready(match)

    def _fetch(self, match: Match, below: Below | None) -> bool:
        """Start loading the chunk that follows `run` into a new entry; False if the match ends here."""
        at = len(match.run)
        key = match.keys[at]
        form = below.form(key, match.form) if below is not None else None
        if below is None or form is None or not below.up.allows():
            self._truncate(match, at, "left_meanwhile" if form is None else "tier_down")
            return False
        if (entry := self.index.get(key)) is not None:
            self._truncate(match, at, "being_filled" if entry.state is State.FILLING else "foreign")
            return False
        started = self._load(key, form, below, match.run[-1] if match.run else None)
        if started is None:
            self._truncate(match, at, "no_room")
            return False
        self.index.lease(started)
        match.run.append(started)
        match.waiting += 1
        self._waiters[started] = [match]
        return True

    def _load(self, key: bytes, form: Form, below: Below, parent: Entry | None) -> Entry | None:
        """Start loading a chunk into a new entry, for whoever will wait for it; None if there is no room."""
        if self._waiting_bytes + form.room > self.index.capacity * _LOADING_SHARE:
            return None
        offsets = self._allocate(key, form, parent)
        if offsets is None:
            return None
        entry = self.index.add(key, form, form.room, State.LOADING, parent)
        entry.offsets = offsets
        self._loading += form.room
        self._coming[entry] = below
        payloads = [
            self.slab.view(offset, padded(size)) for offset, size in zip(offsets, form.sizes, strict=True)
        ]
        below.load(key, form, payloads, partial(self._arrived, entry, below))
        return entry

    @property
    def _waiting_bytes(self) -> int:
        """Of the slab, that wait for tiers below."""
        return self._loading + sum(below.pinned for below in self.below)

    def _arrived(self, entry: Entry, below: Below, result: dict[Shard, Header] | Reason, end: float) -> None:
        """A chunk came up from a tier below, or did not."""
        self._loading -= entry.nbytes
        del self._coming[entry]
        waiters = self._waiters.pop(entry, [])
        failure = result.value if isinstance(result, Reason) else self._adopt(entry, result)
        if not isinstance(result, Reason):
            self._live_until(entry, end)
        if failure == "foreign" and not isinstance(result, Reason):
            below.discard(entry.key, entry.form, failure)
        if not failure:
            self.index.ready(entry)
            for each in self.below:
                each.came(entry, below)
        elif entry.state is not State.GONE:
            self.index.remove(entry)
        for match in waiters:
            match.waiting -= 1
            if match.released:
                continue
            if failure or not entry.form.serves(match.form):
                self._truncate(match, match.run.index(entry), failure or "foreign")
            self._settle_if_ready(match)
        if failure:
            self._release(entry)  # the lease of the load itself

    def _adopt(self, entry: Entry, headers: dict[Shard, Header]) -> str:
        """Believe what verified headers say of the chunk's layout; or why not."""
        if entry.state is State.GONE:
            return "cleared"
        each = [headers[shard] for shard in entry.form.shards]
        layout = each[0].layout
        if any(header.layout is not layout and header.layout != layout for header in each):
            return "foreign"
        form = form_of(layout, entry.form.shards)
        if [padded(size) for size in form.sizes] != [padded(size) for size in entry.form.sizes]:
            return "foreign"
        entry.form = form
        entry.prints = tuple(header.mark for header in each)
        entry.made = each[0].made
        return ""

    def release(self, match: Match) -> None:
        """End the match's leases. Idempotent."""
        if match.released:
            return
        if self._matches.get(match.id) is not match:
            raise MisuseError("release of a match that another cache made")
        match.released = True
        del self._matches[match.id]
        if not match.settled:
            if not match.ready:
                self._truncate(match, complete(match), "cancelled")
            self._settle(match)
        for entry in match.run:
            self._release(entry)
        match.run = []

    def _truncate(self, match: Match, chunks: int, reason: str) -> None:
        """Keep the first `chunks` of the match; end the leases of the rest."""
        for entry in match.run[chunks:]:
            waiters = self._waiters.get(entry, [])
            if match in waiters:
                waiters.remove(match)
                match.waiting -= 1
            self._release(entry)
        if not match.cut:
            match.cut, match.found = reason, match.chunks
        del match.run[chunks:]
        del match.sources[chunks:]
        del match.below[max(0, chunks - len(match.run)) :]

    def _settle_if_ready(self, match: Match) -> None:
        if match.ready and not match.settled:
            self._settle(match)

    def _settle(self, match: Match) -> None:
        """Count the lookup, once: each token asked was hit somewhere, or missed for one reason."""
        match.settled = True
        size = self.chunk_tokens
        if not match.asked_tokens and match.keys:  # a named value, or nobody's request
            for label in {*match.sources} - {CPU} if not is_value(match.keys[0]) else ():
                self.metrics.prefetched_tokens.labels(label).inc(match.sources.count(label) * size)
            return
        hits = {label: match.sources.count(label) * size for label in set(match.sources)}
        missed: dict[str, int] = {}
        for i in range(match.chunks, len(match.keys)):
            reason = match.cut if i < match.found else self._why_missing(match.keys[i])
            missed[reason] = missed.get(reason, 0) + size
        tail = match.asked_tokens - len(match.keys) * size
        if tail:
            missed["partial_chunk"] = tail
        self.metrics.settle(match.asked_tokens, hits, missed)
        if match.cost is not None:
            took = match.cost.prefill(max(match.has, match.chunks * size), match.asked_tokens)
            self._computing = max(self._computing, time.monotonic()) + took
        if match.decision is not None:
            self.metrics.worth_decisions.labels(*match.decision).inc()
        if match.expected is not None and match.ready:
            self.metrics.worth_seconds.labels("expected").observe(match.expected)
            self.metrics.worth_seconds.labels("actual").observe(time.monotonic() - match.decided)
        if self.settled is not None:
            self.settled(match, missed)

    def _why_missing(self, key: bytes) -> str:
        entry = self.index.get(key)
        if entry is not None and entry.state is State.FILLING:
            return "being_filled"
        reason = self.index.why_gone(key) or "never_stored"
        for below in self.below:
            if below.index is not None and key in below.index:
                return "tier_down" if below.up.is_open else "behind_a_gap"
            if below.index is not None:
                reason = below.index.why_gone(key) or reason
        return reason if entry is None else "behind_a_gap"

    def seen(self, keys: Sequence[bytes]) -> None:
        """The engine had this prefix itself: keep it young here too, since the engine will lose it first."""
        run = []
        for key in keys:
            entry = self.index.get(key)
            if entry is None:
                break
            run.append(entry)
        self._saw(keys, run)
        self.outlook.used(keys)

    # ---- save: reserve, commit, abort

    def reserve(
        self,
        keys: Sequence[bytes],
        form: Form,
        *,
        first: int = 0,
        ttl: float | None = None,
        by: str = "",
        most: int | None = None,
    ) -> Reservation:
        """Extents for those chunks of `keys`, from number `first` on, that no tier holds or is getting.

        All or nothing per chunk, and in order: when room ends, or `most` are new, what was reserved is a
        usable prefix and the rest is dropped and counted. Reserving makes nothing visible: `commit` does.

        What is stored now can be used for `ttl` seconds; what was stored before, for as long as was said
        then. `by` is who stores it, for `purge`.
        """
        self._need_open()
        made = Made(by, time.time_ns() // 1_000_000)
        seconds = self._seconds(ttl)
        _check_chain(keys)
        if form.layout is None or form.layout.chunk_tokens != self.chunk_tokens:
            raise MisuseError("reserve needs a form with a layout of this cache's chunk_tokens")
        self._expire_among(keys)
        wanted = [number >= first and not self._is_stored(key, form) for number, key in enumerate(keys)]
        end = len(keys) if most is None else most
        self._make_room(keys, min(sum(wanted), end) * form.room)
        new: dict[int, Entry] = {}
        run: list[Entry] = []
        known = 0
        dropped: list[bytes] = []
        why = ""  # a first chunk that could not be stored makes all later ones useless
        parent: Entry | None = None
        for number, key in enumerate(keys):
            entry = self.index.get(key)
            if entry is None and wanted[number]:
                why = why or ("too_many" if len(new) == end else "")
                if not why and (offsets := self._allocate(key, form, parent)) is not None:
                    entry = self.index.add(key, form, form.room, State.FILLING, parent, len(form.shards))
                    entry.offsets, entry.made = offsets, made
                    new[number] = entry
                else:
                    why = why or "no_room"
                    dropped.append(key)
                    continue
            elif entry is not None and not entry.form.serves(form):
                why = why or "foreign"  # this engine cannot read what stands under its key
                dropped.append(key)
                continue
            else:
                known += not new and not dropped
                if entry is None:
                    continue
                self.index.link(entry, parent)
            run.append(entry)
            parent = entry
        self.index.refresh(run)
        self._seen.append(tuple(keys))
        self.metrics.skipped_tokens.inc((len(keys) - len(dropped) - len(new)) * self.chunk_tokens)
        self._drop(dropped, why, form)
        left = set(form.shards) if new else set()
        reservation = Reservation(next(self._ids), form, new, known, len(dropped), left, ttl=seconds)
        if new:
            self._reservations[reservation.id] = reservation
        return reservation

    def commit(
        self,
        reservation: Reservation,
        shard: Shard | None = None,
        prints: Mapping[int, bytes] | None = None,
    ) -> None:
        """The bytes of `shard` (None: of the only one) are in place. With the last one, chunks are visible.

        `prints` maps chunk numbers to the fingerprint of this shard.
        """
        layout = reservation.form.layout
        longest = max(map(len, (prints or {}).values()), default=0)
        if layout is not None and longest > (room := mark_room(layout)):
            raise MisuseError(f"a mark of {longest} bytes: beside this layout a header has room for {room}")
        number = self._finish(reservation, shard)
        for chunk, mark in (prints or {}).items():
            marks = reservation.prints.setdefault(chunk, [NO_MARK] * len(reservation.form.shards))
            marks[number] = mark
        self._close_if_finished(reservation)

    def abort(self, reservation: Reservation, shard: Shard | None = None) -> None:
        """`shard` will not come. Its chunks never become visible; room returns when no shard is in flight."""
        self._finish(reservation, shard)
        if not reservation.aborted:
            reservation.aborted = True
            for entry in reservation.entries.values():
                if entry.state is not State.GONE:
                    self.index.remove(entry)
            self._drop([entry.key for entry in reservation.entries.values()], "aborted", reservation.form)
        self._close_if_finished(reservation)

    def _drop(self, keys: Sequence[bytes], why: str, form: Form) -> None:
        """These are not stored in the slab, though they should be."""
        if keys:
            count_dropped(self.metrics, CPU, why, [form.room] * len(keys), sum(map(self._tokens, keys)))
            if self._journal is not None:
                self._journal.unstored(CPU, keys, why)

    def _finish(self, reservation: Reservation, shard: Shard | None) -> int:
        shards = reservation.form.shards
        if shard is None:
            if len(shards) != 1:
                raise MisuseError(f"this reservation has {len(shards)} shards: say which one is done")
            shard = shards[0]
        if not reservation.entries:
            return 0
        if shard not in reservation.left:
            raise MisuseError(f"shard {shard} was committed or aborted before, or is not of this reservation")
        if self._reservations.get(reservation.id) is not reservation:
            raise MisuseError("commit or abort of a reservation that another cache made")
        reservation.left.remove(shard)
        return shards.index(shard)

    def _close_if_finished(self, reservation: Reservation) -> None:
        """Each entry was leased once per shard; end one of them, and with the last one make it visible."""
        if not reservation.entries:
            return
        if reservation.left or reservation.aborted:
            for entry in reservation.entries.values():
                self._release(entry)
        else:
            self._publish(reservation)
        if not reservation.left:
            del self._reservations[reservation.id]

    def _publish(self, reservation: Reservation) -> None:
        form = reservation.form
        tokens = 0
        for chunk, entry in reservation.entries.items():
            if entry.state is State.GONE:  # cleared by force while it was written
                self._release(entry)
                self._drop([entry.key], "cleared", form)
                continue
            if chunk in reservation.prints:
                entry.prints = tuple(reservation.prints[chunk])
            if not form.is_whole_pages:
                for offset, nbytes in zip(entry.offsets, form.sizes, strict=True):
                    self.slab.clear_padding(offset, nbytes)
            self._live_until(entry, self._clock() + reservation.ttl)
            self.index.ready(entry)
            tokens += self._tokens(entry.key)
            for below in self.below:
                below.came(entry)
        self._stored.inc(tokens)

    # ---- I/O results

    def step(self) -> int:
        """Apply what the tiers have finished, and give them new work. Returns the number of results."""
        results = sum(below.poll() for below in self.below)
        if self.presence is not None and self.is_warm:
            self.presence.trust()
        self._end_lifetimes()
        if self.below:
            while self._seen:
                keys = self._seen.popleft()
                for below in self.below:
                    below.touch(keys)
            self._write_ahead()
            self._explore()
            for below in self.below:
                waiting = self._waiting_bytes
                spare = self.index.capacity * _WAITING_SHARE - waiting if waiting else self.index.capacity
                below.pump(self.index, self.slab.view, self._release, spare)
            self._expire()
        self._compacting = 0.0
        self.metrics.count()
        self.outlook.count()
        return results

    def _write_ahead(self) -> None:
        """For tiers with write=evicted: send down what is next to leave, before its room is needed."""
        took_room, self._took_room = self._took_room, set()
        took, self._took = self._took, 0
        if took:
            self._ahead = max(2 * took, _AHEAD * self._room, self._ahead - self._ahead // 256)
        short = self._ahead - self.index.free
        # Only after room was taken: a tier with little room would drop one such chunk for another for ever.
        if self._evicted and took_room and short > 0:
            entries = [e for asker in took_room for e in self.index.next_to_leave(short, asker, short)[0]]
            for below in self._evicted:
                below.leaves(entries)

    def _expire(self) -> None:
        """A request waits no longer than its deadline for what is on its way: it computes instead."""
        now = time.monotonic()
        for match in [match for match in self._matches.values() if now > match.deadline]:
            if match.waiting or match.asking:
                match.asking = 0
                self._truncate(match, complete(match), "deadline")
                self._settle_if_ready(match)

    def wait(self, match: Match) -> Match:
        """For owners without a loop: prefetch, and step until the match is ready or its deadline passed."""
        while match.asking:
            self._wait(match.deadline)
            self.step()
        self.prefetch(match)
        while not match.ready:
            self._wait(match.deadline)
            self.step()
        return match

    def flush(self, timeout: float = 30.0) -> bool:
        """Step until the tiers below are done: what they were to get is written, what was to go has gone.

        What a tier is to get is decided by its rule and its budget. False: not in time; or some of it was
        not written and will not be, since the last call of this, be it that the tier failed, was full, or
        was too slow. That is told once, as fsync does.
        """
        before = self._told_lost
        ended = self._drain(timeout)
        self._told_lost = self.lost
        return ended and self._told_lost == before

    def _drain(self, timeout: float) -> bool:
        """Step until nothing waits to be written or deleted; False: not in time."""
        until = time.monotonic() + timeout
        self.step()
        while any(below.is_busy for below in self.below) and time.monotonic() < until:
            self._wait(until)
            self.step()
        return not any(below.backlog for below in self.below)

    def _wait(self, until: float | None = None) -> None:
        # At most 50 ms: an open breaker and a deadline wake nobody.
        seconds = 0.05 if until is None else min(0.05, max(0.0, until - time.monotonic() + 1e-3))
        self._wake.wait(seconds)
        self._wake.clear()

    def purge(self, suspect: Suspect, *, force: bool = False) -> None:
        """Forget what it covers, but for what is leased; with `force` also that. Below, by headers: they are
        read one by one, and `flush` waits for that; until then what is suspect is found, and not loaded."""
        suspect = replace(suspect, until=min(suspect.until, time.time_ns() // 1_000_000))
        for below in self.below:
            below.let_wait(suspect.prefix)
        for entry in self.index.entries():
            if suspect.covers(entry.key, entry.made) and (force or not entry.leases):
                self._take_out(entry, CLEARED)
        for below in self.below:
            below.purge(self.index, suspect)

    def clear(self, namespace: bytes = b"", *, force: bool = False) -> None:
        """Forget everything that is not leased; with `force` also that. Later releases are harmless.

        `namespace`, from `keys.namespace`, says of which model. Tiers that must be asked are searched for it,
        for all who share them: `flush` waits for that, and until then nothing of it is found in them here.
        """
        for below in self.below:
            below.let_wait(namespace)
        for entry in self.index.entries():
            if entry.key.startswith(namespace) and (force or not entry.leases):
                self._clear_one(entry)
        for below in self.below:
            below.clear(self.index, namespace, force=force)

    def _clear_one(self, entry: Entry) -> None:
        self._take_out(entry, CLEARED)

    def clearing(self, namespace: bytes = b"", *, force: bool = False) -> Iterator[None]:
        """`clear`, a little at a time, for who has others to serve: of a million chunks it takes seconds."""
        for below in self.below:
            below.let_wait(namespace)
        places: list[tuple[Index, Callable[[Entry], None]]] = [(self.index, self._clear_one)]
        places += [(below.index, below.clear_one) for below in self.below if below.index is not None]
        for index, clear_one in places:
            for number, entry in enumerate(index.entries(), 1):
                is_there = entry.state is not State.GONE and entry.key.startswith(namespace)
                if is_there and (force or not entry.leases):
                    clear_one(entry)
                if not number % _CLEARED_AT_ONCE:
                    yield
        self.clear(namespace, force=force)  # what came back meanwhile

    def discard(self, entry: Entry) -> None:
        """Delete a chunk in every tier, because its content is not to be believed. Leases on it stay."""
        if entry.state is not State.GONE:
            if self.index.get(entry.key) is not entry:
                raise MisuseError(f"discard of {entry!r}, which another cache has")
            self._take_out(entry, DIFFERED)
        for below in self.below:
            below.discard(entry.key, entry.form, DIFFERED)

    # ---- lifetimes

    def _seconds(self, ttl: float | None) -> float:
        if ttl is not None and not 0 < ttl <= MAX_TTL:
            raise MisuseError(f"ttl={ttl}: must be more than 0 seconds, and at most 100 years")
        return FOREVER if ttl is None else ttl

    def _live_until(self, entry: Entry, end: float) -> None:
        if entry.state is not State.GONE:
            self.index.ends.set(entry, min(end, self._clock() + self._ttl))

    def _expire_among(self, keys: Sequence[bytes]) -> None:
        """Take out what the slab has of these whose time is over. Whoever reads it already may go on."""
        if ends := self.index.ends:
            now = self._clock()
            for key in keys:
                if (entry := self.index.get(key)) is not None and ends.is_over(entry, now):
                    self._end(entry)

    def _end(self, entry: Entry) -> None:
        self.metrics.expired.labels(CPU).inc()
        self._take_out(entry, EXPIRED)

    def _end_lifetimes(self) -> None:
        """Delete some of what is over, everywhere; the next step goes on."""
        now = self._clock()
        for name in self.pins.over(now):
            self.unpin(name)
        over = self.index.ends.over(now, AT_ONCE)
        for entry in over:
            self._end(entry)
        if len(over) == AT_ONCE or any([below.expire() for below in self.below]):
            self._woken()

    def _places_kept(self) -> dict[str, Index]:
        """The slab and the tiers that keep what they are given, by their labels."""
        lower = {below.label: below.index for below in self.below if below.index is not None}
        return {CPU: self.index, **lower}

    def pin(self, name: str, keys: Sequence[bytes], ttl: float | None = None) -> dict[str, int]:
        """`keys` are not evicted where they are, or come to be, until `unpin` or for `ttl` seconds.

        In place of what had this name. Returns how many of them each tier keeps; nothing is brought up. A
        tier gives pins half of its capacity: what does not fit now is refused, what comes later is not kept.
        """
        self._need_open()
        now = self._clock()
        end = now + self._seconds(ttl)
        if len(set(keys)) != len(keys) or any(map(is_value, keys)):
            raise MisuseError("a pin is for keys of KV, each of them once")
        self.pins.need_room(name, len(keys))
        self._expire_among(keys)
        places = self._places_kept()
        for label, index in places.items():
            new = {entry for key in keys if (entry := index.get(key)) is not None} - index.kept
            more = sum(entry.nbytes for entry in new)
            if index.kept_bytes + more > index.capacity // 2:
                raise MisuseError(
                    f"{label} gives pins half of its {index.capacity} bytes: {index.kept_bytes} are pinned,"
                    f" and this would be {more} more; unpin something, or pin fewer tokens"
                )
        self._unkeep(self.pins.put(name, keys, end))
        for index in places.values():
            for key in keys:
                if (entry := index.get(key)) is not None and entry.state is State.READY:
                    index.keep(entry)
        return self._kept(keys)

    def unpin(self, name: str) -> bool:
        """Whether there was such a pin."""
        is_there = name in self.pins
        self._unkeep(self.pins.take(name))
        return is_there

    def _unkeep(self, keys: Sequence[bytes]) -> None:
        for index in self._places_kept().values():
            for key in keys:
                if (entry := index.get(key)) is not None:
                    index.unkeep(entry)

    def _kept(self, keys: Sequence[bytes]) -> dict[str, int]:
        places = self._places_kept().items()
        return {label: sum(index.get(key) in index.kept for key in keys) for label, index in places}

    def pinned(self) -> list[Pinned]:
        now = self._clock()
        left = {pin.name: None if pin.end == FOREVER else pin.end - now for pin in self.pins}
        return [Pinned(pin.name, len(pin.keys), self._kept(pin.keys), left[pin.name]) for pin in self.pins]

    # ---- named values: chunks that may be replaced

    def forget(self, key: bytes, form: Form) -> None:
        """Delete what stands under `key`, wherever it is. Gone for good when `is_leaving` says no."""
        if (entry := self.index.get(key)) is not None:
            self._take_out(entry)
        for below in self.below:
            if below.index is not None:  # the others never got it
                below.discard(key, form)

    def replace(self, reservation: Reservation, key: bytes, mark: bytes) -> None:
        """Commit the one chunk of `reservation`, made under a key of nobody's, under `key` from now on.

        What stood there is forgotten first: a restart finds the new one, or none.
        """
        (entry,) = reservation.entries.values()
        self.forget(key, reservation.form)
        self.index.rekey(entry, key)
        self.commit(reservation, prints={0: mark})

    @property
    def is_behind(self) -> bool:
        """Whether a value that comes now would not be written, and one that waits a little would."""
        return any(below.is_behind for below in self.below)

    def is_leaving(self, key: bytes) -> bool:
        """Whether a restart now could still find what was forgotten or replaced under this key."""
        return any(below.is_leaving(key) for below in self.below)

    def _take_out(self, entry: Entry, why: str = DELETED) -> None:
        if self.index.remove(entry, why):
            self._free([entry])

    def close(self, timeout: float = 30.0) -> None:
        """Write down what waits to be written, then let go of everything, all in `timeout`. Idempotent."""
        if self._closed.is_set():
            return
        until = time.monotonic() + timeout
        for below in self.below:
            below.offer_all()
        if not self._drain(timeout):
            log.warning("lmtier: closed before everything was written to the tiers below")
        for below in self.below:
            below.persist_order()
        self._drain(until - time.monotonic())
        self._closed.set()
        for below in self.below:
            below.close(until - time.monotonic())
        if self._prefault is not None:
            self._prefault.join()

    def _need_open(self) -> None:
        if self._closed.is_set():
            raise MisuseError("this cache is closed")

    # ---- room

    def _is_stored(self, key: bytes, form: Form) -> bool:
        """In the slab, in whatever form; or below, of use to a reader of `form`. Or on its way there."""
        if key in self.index:
            return True
        return bool(self.below) and any(below.spares(key, form) for below in self.below)

    def _make_room(self, keys: Sequence[bytes], need: int) -> None:
        """Evict at once what the missing chunks of a prompt will need, if that much can leave.

        `_allocate` would do it chunk by chunk; this is for speed alone.
        """
        if need > self.index.free:
            get = self.index.get
            tail = next((entry for key in reversed(keys) if (entry := get(key)) is not None), None)
            self._evict(need - self.index.free, tail, self.index.pool(keys[0]), need)

    def _allocate(self, key: bytes, form: Form, parent: Entry | None) -> tuple[int, ...] | None:
        """Extents for one chunk, evicting what must go; None if what is left is leased, or others' share."""
        self._room = max(self._room, form.room)
        self._took += form.room
        asker = self.index.pool(key)
        self._took_room.add(asker)
        # Enough bytes may be free and yet in pieces. Then what nobody reads is moved together; to evict more
        # would rarely join pieces. Leased chunks in between can make it impossible.
        short = form.room - self.index.free
        for _ in range(_TRIES):
            if (offsets := self.slab.allocate(form.sizes)) is not None:
                return offsets
            if short > 0 and not self._evict(short, parent, asker, form.room):
                break
            if (offsets := self.slab.allocate(form.sizes)) is not None:
                return offsets
            if (short := self._compact(form.room)) < 0:
                break
        self.no_room_at = time.monotonic()
        return None

    def _compact(self, nbytes: int) -> int:
        """Make `nbytes` free in a row, if so many are free, by moving chunks that nobody has leased.

        Returns how many bytes more must be free for that; less than 0: it is impossible now.
        """
        began = time.monotonic()
        if self._compacting > _COMPACTING:
            return -1
        movable = {
            offset: entry
            for entry in self.index.entries()
            if not entry.leases and entry.state is State.READY
            for offset in entry.offsets
        }
        window = self.slab.window(nbytes, movable)
        if window is None:
            return -1
        start, offsets = window
        places = self.slab.vacate(start, nbytes, offsets)
        self._move(places, movable)
        self.slab.free(places)
        short = sum(movable[offset].nbytes for offset in offsets if offset not in places)
        if short:  # large ones find no room of their size, but may close up
            places = self.slab.slide(nbytes, movable, max(_SLID * nbytes, _SLID_BYTES))
            self._move(places, movable)
            short = 0 if places else short
        self._compacting += time.monotonic() - began
        return short

    def _move(self, places: Mapping[int, int], entries: dict[int, Entry]) -> None:
        """Bytes and books of extents that have new places, in this order."""
        for offset, place in places.items():
            self.metrics.moved_bytes.inc(self.slab.move(offset, place))
        moved = {entries.pop(offset) for offset in places}
        for entry in moved:  # once each: the new place of one may be the old one of another
            entry.offsets = tuple(places.get(each, each) for each in entry.offsets)
            entries.update(dict.fromkeys(entry.offsets, entry))

    def _evict(self, need: int, tail: Entry | None, asker: Pool | None, claim: int) -> bool:
        """Free at least `need` bytes, or nothing. The prefix that ends in `tail` stays whatever happens."""
        victims = self.index.evict(need, tail, asker, claim)
        if not victims:
            return False
        unwritten = 0
        if self.below:
            unwritten = sum(not any(below.has(v.key, v.form) for below in self.below) for v in victims)
        self._free(victims)
        self._evicted_chunks.inc(len(victims) - unwritten)
        self._evicted_unwritten.inc(unwritten)
        return True

    def _release(self, entry: Entry) -> None:
        if self.index.release(entry):
            self._free([entry])

    def _free(self, entries: Sequence[Entry]) -> None:
        self.slab.free([offset for entry in entries for offset in entry.offsets])
        for entry in entries:
            entry.offsets = ()

    # ---- books

    def _declare(self) -> None:
        metrics, index = self.metrics, self.index
        count_shares(metrics, CPU, index)
        metrics.capacity_bytes.labels(CPU).set(index.capacity)
        metrics.used_bytes.labels(CPU).set_function(lambda: index.used)
        metrics.chunks.labels(CPU).set_function(lambda: len(index))
        self._stored = metrics.stored_tokens.labels(CPU)
        self._evicted_chunks = metrics.evictions.labels(CPU, "capacity")
        self._evicted_unwritten = metrics.evictions.labels(CPU, "capacity_unwritten")
        metrics.leased_bytes.set_function(lambda: index.pinned)
        metrics.pinned_bytes.labels(CPU).set_function(lambda: index.kept_bytes)
        metrics.pins.set_function(lambda: len(self.pins))
        for label in (CPU, *(below.label for below in self.below)):
            metrics.expired.labels(label)  # 0, so that the first is seen to be a rise
        for place in self.outlook.places:
            for factor in FACTORS:
                metrics.mrc_hit_ratio.labels(place.tier, f"{factor:g}").set_function(
                    partial(self.outlook.hit_ratio, place, factor)
                )

    def _places(self) -> list[Place]:
        """The bounded tiers."""
        lower = [
            Place(each.label, each.index.capacity, True) for each in self.below if each.index is not None
        ]
        return [
            Place(CPU, self.index.capacity, False),
            *(place for place in lower if place.capacity < UNBOUNDED),
        ]

    def follow(self) -> Journal:
        """What comes and goes, from the first call on, in the slab and in tiers that know what they hold."""
        if self._journal is None:
            self._journal = Journal()
            self.index.changed = partial(self._journal.note, CPU)
            for below in self.below:
                below.unstored = partial(self._journal.unstored, below.label)
                if below.index is not None:
                    below.index.changed = partial(self._journal.note, below.label)
        return self._journal

    def stats(self) -> dict[str, dict[str, int]]:
        """Chunks, bytes used and capacity per tier, as they are now."""
        tiers: dict[str, dict[str, int]] = {
            CPU: {"chunks": len(self.index), "used": self.index.used, "capacity": self.index.capacity}
        }
        for below in self.below:
            if (index := below.index) is not None:
                used = index.used + below.deleting
                tiers[below.label] = {"chunks": len(index), "used": used, "capacity": index.capacity}
        return tiers

    def check(self) -> None:
        """Prove every invariant; raises AssertionError. Cheap enough to run after every test."""
        self.slab.check()
        self.index.check()
        self.pins.check()
        assert self.slab.used == self.index.used, "slab and index disagree on what is taken"
        leases: dict[Entry, int] = {}
        for match in self._matches.values():
            waiting = sum(match in waiters for waiters in self._waiters.values())
            for entry in match.run:
                leases[entry] = leases.get(entry, 0) + 1
            assert match.waiting == waiting, f"{match!r} waits for {waiting}"
            assert len(match.run) + len(match.below) == match.chunks, f"{match!r} lost count"
        for reservation in self._reservations.values():
            for entry in reservation.entries.values():
                leases[entry] = leases.get(entry, 0) + len(reservation.left)
        for entry in (*self.index.kept, *(entry for below in self.below for entry in below.held)):
            leases[entry] = leases.get(entry, 0) + 1
        for entry in self.index.entries():
            assert entry.leases >= leases.get(entry, 0), f"{entry!r} has lost a lease"
        if not any(below.has_jobs for below in self.below):
            for entry in self.index.entries():
                assert entry.leases == leases.get(entry, 0), f"{entry!r} is leased by nobody"
        for below in self.below:
            below.check()


def complete(match: Match) -> int:
    """How many leading chunks of the match are in the slab, complete."""
    states = enumerate(match.run)
    return next((i for i, entry in states if entry.state is not State.READY), len(match.run))


def _check_chain(keys: Sequence[bytes]) -> None:
    """An entry that came twice would be its own parent."""
    if len(set(keys)) < len(keys):
        raise MisuseError("a key stands twice in one request: chains have no circles")
