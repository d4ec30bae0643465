"""What a server tells about itself: one snapshot of numbers, and its recent history.

Counters are cumulative, since the start: whoever shows rates subtracts two snapshots. Numbers are raw;
units are tokens, chunks, bytes and seconds.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable
from typing import TypedDict
from urllib.parse import unquote

from lmtier import __version__
from lmtier.below import UNBOUNDED, Below
from lmtier.cache import CPU, Cache
from lmtier.config import TierSpec
from lmtier.curve import FACTORS
from lmtier.metrics import MISS_REASONS

Client = dict[str, object]
"""One connection: name, kind, address, age (seconds), asked (requests), received and sent (bytes)."""

_SECRET = re.compile(r"pass|secret|token|auth|cred|key(?!file)", re.IGNORECASE)


class Tokens(TypedDict):
    """asked = hit, over tiers, + missed, over reasons."""

    asked: int
    hit: dict[str, int]
    missed: dict[str, int]
    stored: dict[str, int]
    skipped: int
    dropped: dict[str, int]
    """By "tier reason"."""


class ShareNow(TypedDict):
    """What one tenant has in one tier, and keeps whatever others want; bytes."""

    used: int
    share: int
    evictions: int


class TierNow(TypedDict):
    """One tier. None: not known, because it is shared or forgets; or of no meaning, for the slab."""

    tier: str
    url: str
    chunks: int | None
    used: int | None
    capacity: int | None
    pinned: int | None
    """Bytes that stay for pins."""
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
    """What each bounded tier would hit if it were alone, and of this many times its size; None: not known."""
    busy: float
    """CPU seconds of the thread that does everything; near 1 a second, it is the limit."""
    lookup_seconds: float
    """Of it, for lookups."""
    clients: list[Client]
    verify_failures: int
    corrupt: int


class Report:
    """Snapshots of one cache and of those who use it. Costs the same however much the cache holds."""

    def __init__(
        self,
        cache: Cache,
        clients: Callable[[], list[Client]],
        started: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`started` is when the server did, by `clock`."""
        self._cache = cache
        self._clients = clients
        self._started = started
        self._clock = clock
        self._urls = [without_secrets(spec) for spec in cache.config.specs]
        self.stopping = False
        """Set it when the server drains: it is not ready for new work from then on."""

    def why_not_ready(self) -> str:
        """A sentence; empty when it is ready."""
        if self.stopping:
            return "the server is shutting down"
        for below in self._cache.below:
            if not below.is_warm and below.has_jobs:
                return f"{below.label} is still being scanned for what it holds"
            if not below.is_warm:
                return f"the scan for what {below.label} holds failed; it is tried again"
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

        def tier(label: str, url: str, below: Below | None) -> TierNow:
            index = cache.index if below is None else below.index
            return {
                "tier": label,
                "url": url,
                "chunks": None if index is None else len(index),
                "used": None if index is None else index.used + (below.deleting if below else 0),
                "capacity": None if index is None or index.capacity >= UNBOUNDED else index.capacity,
                "pinned": None if index is None else index.kept_bytes,
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
                    for pool in (index.pools if index is not None else None) or ()
                },
                "bytes_up": moved.get(f"{label} up", 0),
                "bytes_down": moved.get(f"{label} down", 0),
                "seconds_up": seconds.get(f"{label} up", 0.0),
                "seconds_down": seconds.get(f"{label} down", 0.0),
                "failures": sum(count for key, count in failed.items() if key.split()[0] == label),
            }

        labels = [(CPU, None), *((below.label, below) for below in cache.below)]
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
            "leased_bytes": cache.index.pinned,
            "tiers": [
                tier(label, url, below) for (label, below), url in zip(labels, self._urls, strict=True)
            ],
            "curve": {
                place.tier: {
                    f"{factor:g}": _known(cache.outlook.hit_ratio(place, factor)) for factor in FACTORS
                }
                for place in cache.outlook.places
            },
            "busy": sum(metrics.sums(metrics.owner_seconds).values()),
            "lookup_seconds": sum(metrics.sums(metrics.lookup_seconds).values()),
            "clients": self._clients(),
            "verify_failures": total(metrics.sums(metrics.verify_failures)),
            "corrupt": sum(count for key, count in failed.items() if key.split()[1] == "corrupt"),
        }


class History:
    """Rows of cumulative counters for the last minutes, so that a page opened now has a past to draw.

    A row is kept as the JSON it will be sent as: 450 rows are some 100 KB, and cost nothing to serve.
    """

    def __init__(
        self, interval: float = 2.0, minutes: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._rows: deque[bytes] = deque(maxlen=int(minutes * 60 / interval) + 1)
        self._next = clock()

    def due(self) -> float:
        """Seconds until the next row is wanted; 0 is now."""
        return max(0.0, self._next - self._clock())

    def sample(self, snapshot: Snapshot) -> None:
        """Keep a row of this snapshot, if one is due."""
        if self.due():
            return
        self._next = self._clock() + self._interval
        tokens = snapshot["tokens"]
        row = {
            "time": round(snapshot["time"], 3),
            "asked": tokens["asked"],
            "hit": tokens["hit"],
            "missed": tokens["missed"],
            "up": {tier["tier"]: tier["bytes_up"] for tier in snapshot["tiers"]},
            "down": {tier["tier"]: tier["bytes_down"] for tier in snapshot["tiers"]},
            "used": {tier["tier"]: tier["used"] for tier in snapshot["tiers"]},
            "busy": round(snapshot["busy"], 3),
        }
        self._rows.append(json.dumps(row, separators=(",", ":")).encode())

    def to_json(self) -> bytes:
        """The rows, the oldest first, and what the reasons for a miss mean."""
        head = {"interval": self._interval, "reasons": MISS_REASONS}
        return json.dumps(head).encode().removesuffix(b"}") + b', "rows": [' + b",".join(self._rows) + b"]}"


def without_secrets(spec: TierSpec) -> str:
    """The tier's URL as anybody may see it: user and password, and options that sound like one, are ***."""
    head, mark, query = spec.url.partition("?")
    scheme, _, location = head.partition("://")
    if not location.startswith("/") and "@" in location:  # a path names nobody
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
