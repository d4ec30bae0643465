"""The server's report: one snapshot of numbers, their recent history, and what they mean.

Counters are cumulative since the start; for rates subtract two snapshots. Numbers are raw. The units are
tokens, chunks, bytes and seconds. The verdicts of a snapshot are about the last minutes.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from operator import itemgetter, sub
from typing import Any, TypedDict, cast

from lmtier._version import __version__
from lmtier.config import read_price
from lmtier.core.cache import Cache
from lmtier.core.lower import LowerTier
from lmtier.core.match import CPU
from lmtier.core.sessions import SessionNow
from lmtier.errors import without_secrets
from lmtier.observe.metrics import MISS_GROUPS, MISS_REASONS
from lmtier.observe.miss_curve import FACTORS
from lmtier.rules.breaker import Outage
from lmtier.rules.money import HOUR, GpuSavings, next_gib
from lmtier.server.verdicts import Verdict, judge, slowest

ClientRow = dict[str, object]
"""One connection: name, kind, address, age (seconds), asked (requests), received and sent (bytes)."""

_TOP = 10  # sessions
_JUDGED = 300.0
"""Seconds that the verdicts are about."""
_FAULTS = ("error", "deadline", "overdue")


class Tokens(TypedDict):
    """asked = hit, over tiers, + missed, over reasons."""

    asked: int
    hit: dict[str, int]
    missed: dict[str, int]
    stored: dict[str, int]
    skipped: int
    dropped: dict[str, int]
    """Dropped tokens by "tier reason"."""


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
    evictions: int


class TierNow(TypedDict):
    """One tier. None: not known, because the tier is shared; or without meaning for the slab."""

    tier: str
    url: str
    chunks: int | None
    used: int | None
    capacity: int | None
    pinned: int | None
    """Bytes of pinned chunks."""
    warm: bool
    write: str | None
    queue: int
    """Chunks that are still to be written or deleted."""
    queue_full: float
    """How full the queue of writes is."""
    state: str
    """works, warming up, loads fail, stores fail, or fails: both."""
    outages: list[OutageNow]
    evictions: int
    shares: dict[str, ShareNow]
    """By tenant; empty if none are configured."""
    bytes_up: int
    bytes_down: int
    seconds_up: float
    seconds_down: float
    slowest: float | None
    """Seconds in which 99 of 100 loads of the last minutes ended. None: there were too few."""
    failures: int
    """Objects that it did not give or take, for any reason."""
    faults: int
    """Failures for which the tier is to blame: errors, and answers that came too late or never."""
    moves: int
    """Chunks that it gave or took."""


class Named(TypedDict):
    """Tokens of one model or tenant."""

    name: str
    asked: int
    hit: int


class NextGib(TypedDict):
    """What one more GiB of a tier would save in a day, by the miss curve."""

    gpu_hours: float
    money: float


class Savings(TypedDict):
    """What hits have saved since the start, by the engines' own costs of computing."""

    gpu_hour: float
    """The price of an hour; 0: not set, so `money` is 0."""
    gpu_hours: float
    money: float
    next_gib: dict[str, NextGib]
    """By tier; tiers whose curve is not known yet are missing."""


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
    uptime: float
    ready: bool
    why_not_ready: str
    chunk_tokens: int
    lookups: int
    recent_hit_ratio: float
    tokens: Tokens
    saved_seconds: float
    """Seconds that engines would have computed the hit tokens, as far as engines measured it."""
    models: list[Named]
    tenants: list[Named]
    values: dict[str, int]
    """Named values by event: hit, missed, set, …; `held` is how many the tier with most of them has."""
    leased_bytes: int
    tiers: list[TierNow]
    loads: dict[str, list[int]]
    """For each tier, how many loads took at most each of `metrics.SECONDS`, and at last all of them."""
    curve: dict[str, dict[str, float | None]]
    """The hit rate of each bounded tier if it were alone and so many times its size. None: not known."""
    savings: Savings
    sessions: SessionsNow
    busy: float
    """CPU seconds of the main thread. Near 1 per second it is the bottleneck."""
    lookup_seconds: float
    """The part of `busy` for lookups."""
    clients: list[ClientRow]
    verify_failures: int
    corrupt: int
    curve_lookups: int
    """Lookups that `curve` is made of."""
    price: str
    """The price of an hour of an engine, as set: 2.50 $."""
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
            self.history.sample(self.snapshot())

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
        why_not = self.why_not_ready()
        missed_tokens = whole(metrics.sums(metrics.missed_tokens, "reason"))
        up_down = ("tier", "direction")
        transfer_bytes = whole(metrics.sums(metrics.transfer_bytes, *up_down))
        transfer_seconds = metrics.sums(metrics.transfer_seconds, *up_down)
        loads = metrics.buckets(metrics.transfer_seconds, "tier", direction="up")
        stores = metrics.buckets(metrics.transfer_seconds, "tier", direction="down")
        evictions = whole(metrics.sums(metrics.evictions, "tier"))
        share_evictions = whole(metrics.sums(metrics.share_evictions, "tier", "tenant"))
        failures = whole(metrics.sums(metrics.tier_failures, "tier", "reason"))
        now, uptime = time.time(), self._clock() - self._started
        baseline = self.history.before(now - _JUDGED)
        if baseline is None or baseline["time"] > now:  # the clock was set back
            baseline = _nothing(now - uptime)
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
                "warm": below is None or below.is_warm,
                "write": None if below is None else below.write,
                "queue": 0 if below is None else below.backlog,
                "queue_full": 0.0 if below is None else min(1.0, below.waiting / cache.config.queue_length),
                "state": "works" if below is None else _state(below),
                "outages": [] if below is None else self._outages(below, now),
                "evictions": evictions.get(label, 0),
                "shares": {
                    pool.name: {
                        "used": pool.used,
                        "share": pool.share_bytes,
                        "evictions": share_evictions.get(f"{label} {pool.name}", 0),
                    }
                    for pool in occupancy.pools
                },
                "bytes_up": transfer_bytes.get(f"{label} up", 0),
                "bytes_down": transfer_bytes.get(f"{label} down", 0),
                "seconds_up": transfer_seconds.get(f"{label} up", 0.0),
                "seconds_down": transfer_seconds.get(f"{label} down", 0.0),
                "slowest": None,
                "failures": sum(count for key, count in failures.items() if key.split()[0] == label),
                "faults": sum(failures.get(f"{label} {reason}", 0) for reason in _FAULTS),
                "moves": sum(counts[label][-1] for counts in (loads, stores) if label in counts),
            }

        labels = [(CPU, None), *((below.label, below) for below in cache.lower)]
        values = whole(metrics.sums(metrics.values, "event"))
        values["held"] = max(
            len(each.records) for each in (cache.index, *(t.index for t in cache.lower.owned))
        )
        snapshot: Snapshot = {
            "name": self._name,
            "version": __version__,
            "verdicts": [],
            "time": now,
            "uptime": uptime,
            "ready": not why_not,
            "why_not_ready": why_not,
            "chunk_tokens": cache.chunk_tokens,
            "lookups": total(metrics.sums(metrics.lookups)),
            "recent_hit_ratio": sum(metrics.sums(metrics.hit_ratio).values()),
            "tokens": {
                "asked": total(metrics.sums(metrics.asked_tokens)),
                "hit": whole(metrics.sums(metrics.hit_tokens, "tier")),
                "missed": {reason: n for reason, n in missed_tokens.items() if n},
                "stored": whole(metrics.sums(metrics.stored_tokens, "tier")),
                "skipped": total(metrics.sums(metrics.skipped_tokens)),
                "dropped": whole(metrics.sums(metrics.dropped_tokens, "tier", "reason")),
            },
            "saved_seconds": sum(metrics.sums(metrics.saved_seconds).values()),
            "models": _named(metrics.sums(metrics.model_tokens, "model", "outcome")),
            "tenants": _named(metrics.sums(metrics.tenant_tokens, "tenant", "outcome")),
            "values": values,
            "leased_bytes": cache.index.leased_bytes,
            "tiers": [tier(label, url, below) for (label, below), url in zip(labels, urls, strict=True)],
            "curve": {
                place.tier: {
                    f"{factor:g}": _known(cache.outlook.hit_ratio(place, factor)) for factor in FACTORS
                }
                for place in cache.outlook.tiers
            },
            "savings": self._savings(),
            "sessions": self._sessions(),
            "busy": sum(metrics.sums(metrics.owner_seconds).values()),
            "lookup_seconds": sum(metrics.sums(metrics.lookup_seconds).values()),
            "clients": self._clients(),
            "verify_failures": total(metrics.sums(metrics.verify_failures)),
            "corrupt": sum(count for key, count in failures.items() if key.split()[1] == "corrupt"),
            "loads": loads,
            "curve_lookups": cache.outlook.lookups,
            "price": self._gpu_hour,
            "load_deadline": cache.config.load_deadline,
            "most_clients": self._most_clients,
        }
        recent = counted_between(row_of(snapshot), baseline)
        for row in snapshot["tiers"]:
            row["slowest"] = slowest(recent["loads"].get(row["tier"], []))
        snapshot["verdicts"] = judge(snapshot, recent)
        return snapshot

    def _outages(self, below: LowerTier, now: float) -> list[OutageNow]:
        def moment(at: float) -> float:
            return now - (self._clock() - at)

        found: list[tuple[str, Outage]] = [
            (what, breaker.outage)
            for what, breaker in (("loads", below.load_breaker), ("stores", below.store_breaker))
            if breaker.outage is not None
        ]
        return [
            {
                "what": what,
                "since": moment(outage.since),
                "until": None if outage.until is None else moment(outage.until),
                "why": outage.why,
            }
            for what, outage in found
        ]

    def _savings(self) -> Savings:
        cache, metrics = self._cache, self._cache.metrics
        saved = sum(metrics.sums(metrics.saved_seconds).values())
        price = read_price(self._gpu_hour)
        price_per_hour = price[1] if price is not None else 0.0
        hit = total(metrics.sums(metrics.hit_tokens))
        worth = GpuSavings(saved / HOUR, price_per_hour)
        next_gibs: dict[str, NextGib] = {}
        for place in cache.outlook.tiers if hit else ():
            hit_ratio, doubled = (_known(cache.outlook.hit_ratio(place, factor)) for factor in (1, 2))
            if hit_ratio is None or doubled is None:
                continue
            saving = next_gib(
                *(hit_ratio, doubled, place.capacity),
                asked=total(metrics.sums(metrics.asked_tokens)),
                seconds=self._clock() - self._started,
                token=saved / hit,
                price=price_per_hour,
            )
            next_gibs[place.tier] = {"gpu_hours": saving.gpu_hours, "money": saving.money}
        return {
            "gpu_hour": price_per_hour,
            "gpu_hours": worth.gpu_hours,
            "money": worth.money,
            "next_gib": next_gibs,
        }

    def _sessions(self) -> SessionsNow:
        sessions = self._cache.sessions
        return {
            "active": sessions.active,
            "waiting": sessions.waiting,
            "top": [sessions.now(each) for each in sessions.top(_TOP)],
        }


class History:
    """Rows of cumulative counters for the last minutes, so that a newly opened page can draw them.

    A row is kept as the JSON to send: 450 rows are some 300 KB, and cost nothing to serve.
    """

    def __init__(
        self, interval: float = 2.0, minutes: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._rows: deque[tuple[float, bytes]] = deque(maxlen=int(minutes * 60 / interval) + 1)
        self._next = clock()

    def due(self) -> float:
        """Seconds until the next row is due; 0: now."""
        return max(0.0, self._next - self._clock())

    def sample(self, snapshot: Snapshot) -> None:
        """Keep a row of this snapshot."""
        self._next = self._clock() + self._interval
        row = json.dumps(row_of(snapshot), separators=(",", ":")).encode()
        self._rows.append((snapshot["time"], row))

    def before(self, moment: float) -> Counters | None:
        """The last row at or before this time, else the first one. None: there is none."""
        after = bisect_right(self._rows, moment, key=itemgetter(0))
        return json.loads(self._rows[max(0, after - 1)][1]) if self._rows else None

    def dump(self) -> dict[str, Any]:
        return {"names": [*Counters.__annotations__], "rows": list(self._rows)}

    def restore(self, dumped: Mapping[str, Any]) -> None:
        """Begin with the rows of another server, unless it kept fewer counters in a row."""
        if Counters.__annotations__.keys() <= {*dumped.get("names", ())}:
            self._rows.extend(dumped["rows"])

    def to_json(self) -> bytes:
        """The rows, the oldest first, and the meaning of each reason for a miss and their groups."""
        groups = [
            {"name": name, "title": title, "reasons": each} for name, (title, each) in MISS_GROUPS.items()
        ]
        head = {"interval": self._interval, "reasons": MISS_REASONS, "groups": groups}
        return (
            json.dumps(head).encode().removesuffix(b"}")
            + b', "rows": ['
            + b",".join(row for _, row in self._rows)
            + b"]}"
        )


class Counters(TypedDict):
    """What was counted in so many `seconds`: since the start, as in a row of the history, or between two."""

    seconds: float
    time: float
    lookups: int
    asked: int
    hit: dict[str, int]
    missed: dict[str, int]
    stored: dict[str, int]
    dropped: dict[str, int]
    up: dict[str, int]
    down: dict[str, int]
    faults: dict[str, int]
    moves: dict[str, int]
    loads: dict[str, list[int]]
    values: dict[str, int]
    saved_seconds: float
    corrupt: int
    busy: float


def _nothing(time: float) -> Counters:
    """The counters at the start of the server."""
    nothing: dict[str, Any] = {
        name: {} if "dict" in str(kind) else 0 for name, kind in Counters.__annotations__.items()
    }
    return cast(Counters, nothing | {"time": time})


def counted_between(now: Any, then: Any) -> Any:
    """Counters of later less those of earlier. What only the later ones have was 0."""
    if isinstance(now, dict):
        return {name: counted_between(value, then.get(name)) for name, value in now.items()} if then else now
    if isinstance(now, list):  # of other lengths: of a server of another version, with other bounds
        return list(map(sub, now, then)) if then and len(then) == len(now) else now
    return now - (then or 0)


def row_of(snapshot: Snapshot) -> Counters:
    """The row of a snapshot in the history."""
    tokens, tiers = snapshot["tokens"], snapshot["tiers"]
    return {
        "seconds": round(snapshot["uptime"], 3),
        "time": round(snapshot["time"], 3),
        "lookups": snapshot["lookups"],
        "asked": tokens["asked"],
        "hit": tokens["hit"],
        "missed": tokens["missed"],
        "stored": tokens["stored"],
        "dropped": tokens["dropped"],
        "up": {tier["tier"]: tier["bytes_up"] for tier in tiers},
        "down": {tier["tier"]: tier["bytes_down"] for tier in tiers},
        "faults": {tier["tier"]: tier["faults"] for tier in tiers if tier["faults"]},
        "moves": {tier["tier"]: tier["moves"] for tier in tiers if tier["moves"]},
        "loads": {name: counts for name, counts in snapshot["loads"].items() if counts[-1]},
        "values": snapshot["values"],
        "saved_seconds": round(snapshot["saved_seconds"], 3),
        "corrupt": snapshot["corrupt"],
        "busy": round(snapshot["busy"], 3),
    }


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


def _known(ratio: float) -> float | None:
    return None if math.isnan(ratio) else ratio


def whole(sums: dict[str, float]) -> dict[str, int]:
    return {key: int(value) for key, value in sums.items() if value}


def total(sums: dict[str, float]) -> int:
    return int(sum(sums.values()))
