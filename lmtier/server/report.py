"""The server's report: one snapshot of numbers, their recent history, and what they mean.

Counters are cumulative since the start; for rates subtract two snapshots. Numbers are raw. The units are
tokens, chunks, bytes and seconds. The verdicts of a snapshot are about the last minutes.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter, sub
from typing import Any, TypedDict, cast

from lmtier._version import __version__
from lmtier.config import read_price
from lmtier.core.cache import Cache
from lmtier.core.lower import LowerTier
from lmtier.core.match import CPU
from lmtier.core.sessions import SessionNow
from lmtier.errors import without_secrets
from lmtier.observe.miss_curve import FACTORS
from lmtier.rules.money import HOUR, GpuSavings, next_gib
from lmtier.server.explain import Explanation
from lmtier.server.verdicts import Verdict, judge, slowest
from lmtier.server.view import View, view_of

ClientRow = dict[str, Any]
"""One connection: name, kind, address, age (seconds), asked (requests), received and sent (bytes)."""

_TOP = 10  # sessions
_JUDGED = 300.0
"""Seconds that the verdicts are about."""
_NOW = 1.5
"""Seconds that count as now."""
_APART = 10.0
"""Seconds between rows of the history where some are missing."""
_DRAWN = ("asked", "hit", "up", "down", "values")  # over time
_FAULTS = ("error", "deadline", "overdue")


class Counters(TypedDict):
    """What was counted in so many `seconds`: since the server's start, or between two times.

    Tokens: asked = hit, over tiers, + missed, over reasons.
    """

    seconds: float
    lookups: int
    asked: int
    hit: dict[str, int]
    missed: dict[str, int]
    stored: dict[str, int]
    dropped: dict[str, int]
    """Dropped tokens by "tier reason"."""
    up: dict[str, int]
    """Bytes loaded from each tier, and stored to it."""
    down: dict[str, int]
    loads: dict[str, list[int]]
    """For each tier, how many loads took at most each of `metrics.SECONDS`, and at last all of them."""
    moves: dict[str, int]
    """Chunks that each tier gave or took."""
    failed: dict[str, int]
    """Objects that it did not give or take, for any reason."""
    faults: dict[str, int]
    """Failed objects for which the tier is to blame: errors, and answers that came too late or never."""
    evicted: dict[str, int]
    values: dict[str, int]
    """Named values by event: hit, missed, set, …"""
    saved_seconds: float
    """Seconds that engines would have computed the hit tokens, as far as engines measured it."""
    busy: float
    """CPU seconds of the main thread. Near 1 per second it is the bottleneck."""
    lookup_seconds: float
    """The part of `busy` for lookups."""
    corrupt: int
    differed: int
    """Chunks that differed in an engine from what was saved."""


class OutageNow(TypedDict):
    """The last time in which a tier was paused, because its loads or its stores failed."""

    what: str
    """loads, or stores."""
    since: float
    """In seconds since 1970."""
    until: float | None
    """None: it is still paused."""
    why: str


class ShareNow(TypedDict):
    """The bytes of one tenant in one tier, and the size of its share."""

    used: int
    share: int
    evicted: int


class TierNow(TypedDict):
    """One tier. None: not known, because the tier is shared; or without meaning for the slab."""

    tier: str
    url: str
    chunks: int | None
    used: int | None
    capacity: int | None
    pinned: int | None
    """Bytes of pinned chunks."""
    write: str | None
    queue: int
    """Chunks that are still to be written or deleted."""
    queue_full: float
    """How full the queue of writes is."""
    state: str
    """works, warming up, loads fail, stores fail, or fails: both."""
    outages: list[OutageNow]
    shares: dict[str, ShareNow]
    """By tenant; empty if none are configured."""
    slowest: float | None
    """Seconds in which 99 of 100 loads of the last minutes ended. None: there were too few."""


class Named(TypedDict):
    """Tokens of one model or tenant."""

    name: str
    asked: int
    hit: int


class Worth(TypedDict):
    gpu_hours: float
    money: float


class Savings(Worth):
    """What hits have saved since the start, by the engines' own costs of computing."""

    price: str
    """The price of an hour of an engine's GPUs, as set: 2.50 $."""
    gpu_hour: float
    """The same as a number; 0: not set, so `money` is 0."""
    next_gib: dict[str, Worth]
    """What one more GiB would save in a day, by tier, as far as the curve of the tier is known."""


class SessionsNow(TypedDict):
    """Agent sessions that have a name."""

    active: int
    waiting: int
    top: list[SessionNow]
    """The sessions that saved most."""


class Snapshot(TypedDict):
    name: str
    """Its host and address."""
    version: str
    verdicts: list[Verdict]
    """Five lines that say what all of this means."""
    time: float
    why_not_ready: str
    counted: Counters
    """Since the start."""
    tiers: list[TierNow]
    models: list[Named]
    tenants: list[Named]
    sessions: SessionsNow
    clients: list[ClientRow]
    values: int
    """Named values that the tier with most of them has."""
    curve: dict[str, dict[str, float | None]]
    """The hit rate of each bounded tier if it were alone and so many times its size. None: not known."""
    curve_lookups: int
    """Lookups that `curve` is made of."""
    savings: Savings
    leased_bytes: int
    chunk_tokens: int
    load_deadline: float
    most_clients: int
    """0: no limit."""


class Report:
    """Snapshots of one cache and its clients. The cost does not depend on the size of the cache."""

    def __init__(
        self,
        cache: Cache,
        clients: Callable[[], list[ClientRow]],
        started: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        most_clients: int = 0,
        gpu_hour: str = "",
        name: str = "",
    ) -> None:
        """`started` is the start of the server, by `clock`. `gpu_hour` is the price of an engine's hour, and
        `name` says which server this is."""
        self._cache = cache
        self._clients = clients
        self._started = started
        self._clock = clock
        self._most_clients = most_clients
        self._gpu_hour = gpu_hour
        self._name = name
        self.history = History(clock=clock)
        self.stopping = False
        """Set it when the server shuts down. From then on it is not ready for new work."""

    def sample(self) -> None:
        """Keep a row of the history, if one is due."""
        if not self.history.due():
            self.history.sample(self._counted())

    def dump(self) -> dict[str, Any]:
        """What another server needs to go on."""
        return {"started": self._started, "history": self.history.dump()}

    def restore(self, dumped: Mapping[str, Any]) -> None:
        """Go on where another server on this host ended."""
        self._started = float(dumped.get("started", self._started))
        self.history.restore(dumped.get("history", {}))

    def why_not_ready(self) -> str:
        """Why the server is not ready, in a sentence; empty if it is ready."""
        if self.stopping:
            return "the server is shutting down"
        for below in self._cache.lower:
            if not below.is_warm and below.has_jobs:
                return f"the scan of {below.label} is not finished"
            if not below.is_warm:
                return f"the scan of {below.label} has failed and is tried again"
        return ""

    def snapshot(self) -> Snapshot:
        cache, metrics = self._cache, self._cache.metrics
        now, counted = time.time(), self._counted()
        recent = self.history.since(counted, _JUDGED)
        share_evictions = metrics.sums(metrics.share_evictions, "tier", "tenant")
        urls = [without_secrets(spec.url) for spec in cache.config.cache_tiers]

        def tier(label: str, url: str, below: LowerTier | None) -> TierNow:
            occupancy = cache.index.occupancy() if below is None else below.occupancy()
            return {
                "tier": label,
                "url": url,
                "chunks": occupancy.chunks,
                "used": occupancy.used,
                "capacity": occupancy.capacity,
                "pinned": occupancy.pinned,
                "write": None if below is None else below.write,
                "queue": 0 if below is None else below.backlog,
                "queue_full": 0.0 if below is None else min(1.0, below.waiting / cache.config.queue_length),
                "state": "works" if below is None else _state(below),
                "outages": [] if below is None else self._outages(below, now),
                "shares": {
                    pool.name: {
                        "used": pool.used,
                        "share": pool.share_bytes,
                        "evicted": int(share_evictions.get(f"{label} {pool.name}", 0)),
                    }
                    for pool in occupancy.pools
                },
                "slowest": slowest(recent["loads"].get(label, [])),
            }

        labels = [(CPU, None), *((below.label, below) for below in cache.lower)]
        indexes = [cache.index, *(owned.index for owned in cache.lower.owned)]
        snapshot: Snapshot = {
            "name": self._name,
            "version": __version__,
            "verdicts": [],
            "time": now,
            "why_not_ready": self.why_not_ready(),
            "counted": counted,
            "tiers": [tier(label, url, below) for (label, below), url in zip(labels, urls, strict=True)],
            "models": _named(metrics.sums(metrics.model_tokens, "model", "outcome")),
            "tenants": _named(metrics.sums(metrics.tenant_tokens, "tenant", "outcome")),
            "sessions": {
                "active": cache.sessions.active,
                "waiting": cache.sessions.waiting,
                "top": [cache.sessions.now(each) for each in cache.sessions.top(_TOP)],
            },
            "clients": self._clients(),
            "values": max(len(index.records) for index in indexes),
            "curve": {
                place.tier: {
                    f"{factor:g}": _known(cache.outlook.hit_ratio(place, factor)) for factor in FACTORS
                }
                for place in cache.outlook.tiers
            },
            "curve_lookups": cache.outlook.lookups,
            "savings": self._savings(counted),
            "leased_bytes": cache.index.leased_bytes,
            "chunk_tokens": cache.chunk_tokens,
            "load_deadline": cache.config.load_deadline,
            "most_clients": self._most_clients,
        }
        snapshot["verdicts"] = judge(snapshot, recent)
        return snapshot

    def _counted(self) -> Counters:
        metrics = self._cache.metrics

        def by(metric: Any, *labels: str) -> dict[str, int]:
            return {key: int(value) for key, value in metrics.sums(metric, *labels).items() if value}

        def total(metric: Any) -> float:
            return sum(metrics.sums(metric).values())

        moved, failures = (
            by(metrics.transfer_bytes, "direction", "tier"),
            by(metrics.tier_failures, "reason", "tier"),
        )
        loads, stores = (
            metrics.buckets(metrics.transfer_seconds, "tier", direction=each) for each in ("up", "down")
        )
        moves = sum(
            (Counter({tier: n[-1] for tier, n in each.items()}) for each in (loads, stores)), Counter()
        )
        return {
            "seconds": self._clock() - self._started,
            "lookups": int(total(metrics.lookups)),
            "asked": int(total(metrics.asked_tokens)),
            "hit": by(metrics.hit_tokens, "tier"),
            "missed": by(metrics.missed_tokens, "reason"),
            "stored": by(metrics.stored_tokens, "tier"),
            "dropped": by(metrics.dropped_tokens, "tier", "reason"),
            "up": _by_tier(moved, "up"),
            "down": _by_tier(moved, "down"),
            "loads": {tier: counts for tier, counts in loads.items() if counts[-1]},
            "moves": dict(moves),
            "failed": by(metrics.tier_failures, "tier"),
            "faults": _by_tier(failures, *_FAULTS),
            "evicted": by(metrics.evictions, "tier"),
            "values": by(metrics.values, "event"),
            "saved_seconds": total(metrics.saved_seconds),
            "busy": total(metrics.owner_seconds),
            "lookup_seconds": total(metrics.lookup_seconds),
            "corrupt": sum(_by_tier(failures, "corrupt").values()),
            "differed": int(total(metrics.verify_failures)),
        }

    def view(self, minutes: float, parts: int, misses: Sequence[Explanation]) -> View:
        """What people see of it, about so many minutes, in so many parts."""
        now, history = self.snapshot(), self.history
        lately = history.since(now["counted"], minutes * 60)
        columns = history.columns(now["counted"], minutes * 60, parts)
        return view_of(now, history.since(now["counted"], _NOW), lately, columns, misses)

    def _outages(self, below: LowerTier, now: float) -> list[OutageNow]:
        def moment(at: float) -> float:
            return now - (self._clock() - at)

        breakers = {"loads": below.load_breaker, "stores": below.store_breaker}
        return [
            {
                "what": what,
                "since": moment(outage.since),
                "until": None if outage.until is None else moment(outage.until),
                "why": outage.why,
            }
            for what, breaker in breakers.items()
            if (outage := breaker.outage) is not None
        ]

    def _savings(self, counted: Counters) -> Savings:
        saved, hit = counted["saved_seconds"], sum(counted["hit"].values())
        parsed, outlook = read_price(self._gpu_hour), self._cache.outlook
        price = parsed[1] if parsed is not None else 0.0
        more: dict[str, Worth] = {}
        for place in outlook.tiers if hit else ():
            ratios = outlook.hit_ratio(place, 1), outlook.hit_ratio(place, 2), place.capacity
            if not any(map(math.isnan, ratios)):
                more[place.tier] = _worth(
                    next_gib(
                        *ratios,
                        asked=counted["asked"],
                        seconds=counted["seconds"],
                        token=saved / hit,
                        price=price,
                    )
                )
        total = _worth(GpuSavings(saved / HOUR, price))
        return {**total, "price": self._gpu_hour, "gpu_hour": price, "next_gib": more}


class History:
    """The counters of the last minutes, a row every two seconds, for people who look later."""

    def __init__(
        self, interval: float = 2.0, minutes: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._rows = deque([_nothing()], maxlen=int(minutes * 60 / interval) + 1)
        self._next = clock()

    def due(self) -> float:
        """Seconds until the next row is due; 0: now."""
        return max(0.0, self._next - self._clock())

    def sample(self, row: Counters) -> None:
        self._next = self._clock() + self._interval
        self._rows.append(row)

    def since(self, now: Counters, seconds: float) -> Counters:
        """What was counted in the last seconds, or in all that are known."""
        after = bisect_right(self._rows, now["seconds"] - seconds, key=itemgetter("seconds"))
        return cast(Counters, _merged(now, self._rows[max(0, after - 1)], sub))

    def columns(self, now: Counters, seconds: float, count: int) -> list[Counters]:
        """What was counted in equal parts of the last seconds.

        They begin at round times, so that they stand still while time goes by. Between two rows counters are
        on a straight line, unless rows are missing there.
        """
        width = seconds / count
        end = math.ceil(now["seconds"] / width) * width
        edges = [self._at(end - (count - i) * width, now) for i in range(count + 1)]
        return [_merged(after, before, sub) for before, after in pairwise(edges)]

    def _at(self, moment: float, now: Counters) -> Counters:
        i = bisect_right(self._rows, moment, key=itemgetter("seconds"))
        before, after = self._rows[max(0, i - 1)], self._rows[i] if i < len(self._rows) else now
        apart = after["seconds"] - before["seconds"]
        passed = max(0.0, moment - before["seconds"]) / apart if 0 < apart <= _APART else 0.0
        passed = 1.0 if moment >= after["seconds"] else passed
        drawn = {name: each for name, each in after.items() if name in _DRAWN}
        counters = _merged(drawn, before, lambda later, earlier: earlier + passed * (later - earlier))
        return cast(Counters, {**counters, "seconds": moment})

    def dump(self) -> dict[str, Any]:
        return {"names": [*Counters.__annotations__], "rows": [*self._rows]}

    def restore(self, dumped: Mapping[str, Any]) -> None:
        """Begin with the rows of another server, unless it kept fewer counters in a row."""
        if Counters.__annotations__.keys() <= {*dumped.get("names", ())}:
            self._rows = deque(dumped["rows"], self._rows.maxlen)


def _nothing() -> Counters:
    """The counters at the start of the server."""
    kinds = Counters.__annotations__.items()
    return cast(Counters, {name: {} if "dict" in str(kind) else 0 for name, kind in kinds})


def _merged(later: Any, earlier: Any, merge: Callable[[float, float], float]) -> Any:
    """Two rows as one. What only the later one has was 0."""
    if isinstance(later, dict):
        return {name: _merged(each, earlier and earlier.get(name), merge) for name, each in later.items()}
    if isinstance(later, list):  # of other lengths: of a server of another version, with other bounds
        is_like = earlier and len(earlier) == len(later)
        return list(map(merge, later, earlier if is_like else [0] * len(later)))
    return merge(later, earlier or 0)


def _by_tier(sums: Mapping[str, int], *wanted: str) -> dict[str, int]:
    """Sums by tier, of sums by "word tier" with these words."""
    found: Counter[str] = Counter()
    for key, number in sums.items():
        word, tier = key.split(" ")
        found[tier] += number if word in wanted else 0
    return {tier: number for tier, number in found.items() if number}


def _state(below: LowerTier) -> str:
    """The word of the page, `stats` and `top`: a breaker that is open has stopped what fails."""
    loads, stores = below.load_breaker.is_open, below.store_breaker.is_open
    if loads and stores:
        return "fails"
    if loads or stores:
        return "loads fail" if loads else "stores fail"
    return "works" if below.is_warm else "warming up"


def _named(sums: Mapping[str, float]) -> list[Named]:
    """Rows from tokens by "name outcome". The most asked first."""
    asked = {key.removesuffix(" asked"): int(n) for key, n in sums.items() if key.endswith(" asked")}
    order = sorted(asked.items(), key=lambda each: -each[1])
    return [{"name": name, "asked": n, "hit": int(sums.get(f"{name} hit", 0))} for name, n in order]


def _worth(savings: GpuSavings) -> Worth:
    return {"gpu_hours": savings.gpu_hours, "money": savings.money}


def _known(ratio: float) -> float | None:
    return None if math.isnan(ratio) else ratio
