"""The server's report: one snapshot of numbers, and their recent history.

Counters are cumulative since the start; for rates subtract two snapshots. Numbers are raw. The units are
tokens, chunks, bytes and seconds.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypedDict
from urllib.parse import unquote

from lmtier._version import __version__
from lmtier.config import TierSpec
from lmtier.core.cache import Cache
from lmtier.core.lower import LowerTier
from lmtier.core.match import CPU
from lmtier.core.sessions import SessionNow
from lmtier.observe.metrics import MISS_REASONS
from lmtier.observe.miss_curve import FACTORS
from lmtier.rules.money import HOUR, Worth, next_gib

Client = dict[str, object]
"""One connection: name, kind, address, age (seconds), asked (requests), received and sent (bytes)."""

_TOP = 10  # sessions
_SECRET = re.compile(r"pass|secret|token|auth|cred|key(?!file)", re.IGNORECASE)


class Tokens(TypedDict):
    """asked = hit, over tiers, + missed, over reasons."""

    asked: int
    hit: dict[str, int]
    missed: dict[str, int]
    stored: dict[str, int]
    skipped: int
    dropped: dict[str, int]
    """Dropped tokens by "tier reason"."""


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
    breaker_up: str
    breaker_down: str
    evictions: int
    shares: dict[str, ShareNow]
    """By tenant; empty if none are configured."""
    bytes_up: int
    bytes_down: int
    seconds_up: float
    seconds_down: float
    failures: int


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
    """Agent sessions."""

    active: int
    waiting: int
    top: list[SessionNow]
    """Those that saved most."""


class Snapshot(TypedDict):
    version: str
    time: float
    uptime: float
    ready: bool
    why_not_ready: str
    chunk_tokens: int
    lookups: int
    recent_hit_ratio: float
    tokens: Tokens
    leased_bytes: int
    tiers: list[TierNow]
    curve: dict[str, dict[str, float | None]]
    """The hit rate of each bounded tier if it were alone and so many times its size. None: not known."""
    savings: Savings
    sessions: SessionsNow
    busy: float
    """CPU seconds of the main thread. Near 1 per second it is the bottleneck."""
    lookup_seconds: float
    """The part of `busy` for lookups."""
    clients: list[Client]
    verify_failures: int
    corrupt: int


class Report:
    """Snapshots of one cache and its clients. The cost does not depend on the size of the cache."""

    def __init__(
        self,
        cache: Cache,
        clients: Callable[[], list[Client]],
        started: float,
        clock: Callable[[], float] = time.monotonic,
        gpu_hour: float = 0.0,
    ) -> None:
        """`started` is the start of the server, by `clock`; `gpu_hour` is the price of an engine's hour."""
        self._gpu_hour = gpu_hour
        self._cache = cache
        self._clients = clients
        self._started = started
        self._clock = clock
        self._urls = [without_secrets(spec) for spec in cache.config.specs]
        self.stopping = False
        """Set it when the server shuts down. From then on it is not ready for new work."""

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
        missed = whole(metrics.sums(metrics.missed_tokens, "reason"))
        up_down = ("tier", "direction")
        moved = whole(metrics.sums(metrics.transfer_bytes, *up_down))
        seconds = metrics.sums(metrics.transfer_seconds, *up_down)
        evictions = whole(metrics.sums(metrics.evictions, "tier"))
        gave = whole(metrics.sums(metrics.share_evictions, "tier", "tenant"))
        failed = whole(metrics.sums(metrics.tier_failures, "tier", "reason"))

        def tier(label: str, url: str, below: LowerTier | None) -> TierNow:
            held = cache.index.occupancy() if below is None else below.occupancy()
            return {
                "tier": label,
                "url": url,
                "chunks": held.chunks,
                "used": held.used,
                "capacity": held.capacity,
                "pinned": held.pinned,
                "warm": below is None or below.is_warm,
                "write": None if below is None else below.write,
                "queue": 0 if below is None else below.backlog,
                "breaker_up": "closed" if below is None else str(below.up),
                "breaker_down": "closed" if below is None else str(below.down),
                "evictions": evictions.get(label, 0),
                "shares": {
                    pool.name: {
                        "used": pool.used,
                        "share": pool.room,
                        "evictions": gave.get(f"{label} {pool.name}", 0),
                    }
                    for pool in held.pools
                },
                "bytes_up": moved.get(f"{label} up", 0),
                "bytes_down": moved.get(f"{label} down", 0),
                "seconds_up": seconds.get(f"{label} up", 0.0),
                "seconds_down": seconds.get(f"{label} down", 0.0),
                "failures": sum(count for key, count in failed.items() if key.split()[0] == label),
            }

        labels = [(CPU, None), *((below.label, below) for below in cache.lower)]
        return {
            "version": __version__,
            "time": time.time(),
            "uptime": self._clock() - self._started,
            "ready": not why_not,
            "why_not_ready": why_not,
            "chunk_tokens": cache.chunk_tokens,
            "lookups": total(metrics.sums(metrics.lookups)),
            "recent_hit_ratio": sum(metrics.sums(metrics.hit_ratio).values()),
            "tokens": {
                "asked": total(metrics.sums(metrics.asked_tokens)),
                "hit": whole(metrics.sums(metrics.hit_tokens, "tier")),
                "missed": {reason: n for reason, n in missed.items() if n},
                "stored": whole(metrics.sums(metrics.stored_tokens, "tier")),
                "skipped": total(metrics.sums(metrics.skipped_tokens)),
                "dropped": whole(metrics.sums(metrics.dropped_tokens, "tier", "reason")),
            },
            "leased_bytes": cache.index.leased_bytes,
            "tiers": [
                tier(label, url, below) for (label, below), url in zip(labels, self._urls, strict=True)
            ],
            "curve": {
                place.tier: {
                    f"{factor:g}": _known(cache.outlook.hit_ratio(place, factor)) for factor in FACTORS
                }
                for place in cache.outlook.places
            },
            "savings": self._savings(),
            "sessions": self._sessions(),
            "busy": sum(metrics.sums(metrics.owner_seconds).values()),
            "lookup_seconds": sum(metrics.sums(metrics.lookup_seconds).values()),
            "clients": self._clients(),
            "verify_failures": total(metrics.sums(metrics.verify_failures)),
            "corrupt": sum(count for key, count in failed.items() if key.split()[1] == "corrupt"),
        }

    def _savings(self) -> Savings:
        cache, metrics = self._cache, self._cache.metrics
        saved = sum(metrics.sums(metrics.saved_gpu_seconds).values())
        hit = total(metrics.sums(metrics.hit_tokens))
        worth = Worth(saved / HOUR, self._gpu_hour)
        found: dict[str, NextGib] = {}
        for place in cache.outlook.places if hit else ():
            now, more = (_known(cache.outlook.hit_ratio(place, factor)) for factor in (1, 2))
            if now is None or more is None:
                continue
            each = next_gib(
                *(now, more, place.capacity),
                asked=total(metrics.sums(metrics.asked_tokens)),
                seconds=self._clock() - self._started,
                token=saved / hit,
                price=self._gpu_hour,
            )
            found[place.tier] = {"gpu_hours": each.gpu_hours, "money": each.money}
        return {
            "gpu_hour": self._gpu_hour,
            "gpu_hours": worth.gpu_hours,
            "money": worth.money,
            "next_gib": found,
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

    A row is kept as the JSON to send: 450 rows are some 100 KB, and cost nothing to serve.
    """

    def __init__(
        self, interval: float = 2.0, minutes: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._rows: deque[bytes] = deque(maxlen=int(minutes * 60 / interval) + 1)
        self._next = clock()

    def due(self) -> float:
        """Seconds until the next row is due; 0: now."""
        return max(0.0, self._next - self._clock())

    def sample(self, snapshot: Snapshot) -> None:
        """Keep a row of this snapshot, if one is due."""
        if self.due():
            return
        self._next = self._clock() + self._interval
        self._rows.append(json.dumps(row_of(snapshot), separators=(",", ":")).encode())

    def to_json(self) -> bytes:
        """The rows, the oldest first, and the meaning of each reason for a miss."""
        head = {"interval": self._interval, "reasons": MISS_REASONS}
        return json.dumps(head).encode().removesuffix(b"}") + b', "rows": [' + b",".join(self._rows) + b"]}"


def row_of(snapshot: Snapshot) -> dict[str, Any]:
    """The row of a snapshot in the history."""
    tokens, tiers = snapshot["tokens"], snapshot["tiers"]
    return {
        "time": round(snapshot["time"], 3),
        "asked": tokens["asked"],
        "hit": tokens["hit"],
        "missed": tokens["missed"],
        "up": {tier["tier"]: tier["bytes_up"] for tier in tiers},
        "down": {tier["tier"]: tier["bytes_down"] for tier in tiers},
        "used": {tier["tier"]: tier["used"] for tier in tiers},
        "busy": round(snapshot["busy"], 3),
    }


def without_secrets(spec: TierSpec) -> str:
    """The tier's URL without secrets: the user, the password, and options with such names become ***."""
    head, mark, query = spec.url.partition("?")
    scheme, _, location = head.partition("://")
    if not location.startswith("/") and "@" in location:  # a path contains no user
        location = "***@" + location.rpartition("@")[2]
    options = [option.partition("=") for option in query.split("&")]
    shown = "&".join(
        f"{name}=***" if _SECRET.search(unquote(name)) else name + is_ + value for name, is_, value in options
    )
    return f"{scheme}://{location}{mark}{shown}"


def _known(ratio: float) -> float | None:
    return None if math.isnan(ratio) else ratio


def whole(sums: dict[str, float]) -> dict[str, int]:
    return {key: int(value) for key, value in sums.items() if value}


def total(sums: dict[str, float]) -> int:
    return int(sum(sums.values()))
