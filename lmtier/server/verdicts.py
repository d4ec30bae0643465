"""Five answers, one line each: is it working, what does it save, what was missed, what is the limit, is the
memory large enough. Numbers in, words out; no I/O.

The page, `lmtier stats` and `/api/stats` show the same words. A verdict has a state for its colour: `good`,
`idle` (nothing to judge, or too little), `warn` or `bad`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypedDict

from lmtier.config import read_price
from lmtier.errors import size_text
from lmtier.observe.metrics import INTENDED_DROPS, MISS_GROUPS, SECONDS

GOOD, IDLE, WARN, BAD = "good", "idle", "warn", "bad"
NORMAL = ("new", "chosen")
"""Groups of misses that no cache would have hit, or that someone chose."""
_MISSED_WARN, _MISSED_BAD = 0.05, 0.25  # of the tokens asked
_NEAR, _LIMIT = 0.7, 0.9  # of a resource
_SAVES = 0.02  # of the tokens asked: below that, a cache is not worth its memory
_FITS, _SMALL = 0.01, 0.05  # points of the hit rate that twice the memory gives
_FEW = 100  # loads: with fewer, one in a hundred has no meaning
EARLY = "too early"
EVIDENCE = 50
"""Lookups that a verdict needs: one of so many is 2 %, the smallest share that changes a verdict."""
LOST = 0.05
"""The share of what a tier should take or give above which a loss is a loss, as for the alerts."""


class Verdict(TypedDict):
    name: str
    """working, saves, misses, bottleneck, memory."""
    state: str
    word: str
    text: str


class Nearness(NamedTuple):
    """A resource, how near its limit it is (1: at it), and that in words."""

    name: str
    share: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """What the verdicts need to know of a tier."""

    name: str
    loads_down: float | None = None
    """Seconds since loads, lookups and scans are paused because they fail. None: they are not."""
    stores_down: float | None = None
    why: str = ""
    back: float | None = None
    """Seconds since it works again, if that was in the span."""
    was_down: float = 0.0
    """Seconds for which it was down before."""
    faults: int = 0
    """Objects that the tier failed to give or take in the span."""
    moves: int = 0
    """Chunks that it gave or took in the span."""
    stored: int = 0
    """Tokens that it took in the span."""
    slowest: float | None = None
    """Seconds in which 99 of 100 loads of the span ended. None: there were too few."""
    queue: float = 0.0
    """How full the queue of writes is."""
    capacity: int | None = None
    curve: Mapping[str, float | None] = field(default_factory=dict)

    def at(self, factor: str) -> float | None:
        """The hit rate if the tier were alone and so many times its size, as far as it is known."""
        return self.curve.get(factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What happened in the last `seconds`, unless it says otherwise."""

    seconds: float
    not_ready: str = ""
    """Why the server is not ready; empty if it is."""
    tiers: Sequence[TierFacts] = ()
    """All of them now, the memory first."""
    clients: Mapping[str, int] = field(default_factory=dict)
    """Connections by kind, now."""
    lookups: int = 0
    measured: int = 0
    """Lookups that the curve of hit rates is made of, since the start."""
    asked: int = 0
    hit: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Tokens by "tier reason"."""
    corrupt: int = 0
    differed: int = 0
    """Chunks that differed in an engine from what was saved, since the start."""
    saved_seconds: float = 0.0
    price: str = ""
    """The price of an hour of an engine: 2.50 $."""
    values: Mapping[str, int] = field(default_factory=dict)
    """Named values, by event."""
    busy: float = 0.0
    """The part of the time in which the server's thread ran."""
    leased: float = 0.0
    """The part of the memory that engines use now."""
    connected: float = 0.0
    """Connections over the most allowed."""
    deadline: float = math.inf
    """Seconds that a load may take."""


def _verdict(name: str, state: str, word: str, text: str) -> Verdict:
    return {"name": name, "state": state, "word": word, "text": text}


def judge(facts: Facts) -> list[Verdict]:
    return [_working(facts), _saves(facts), _misses(facts), _bottleneck(facts), _memory(facts)]


# ---- is it working?


def _working(facts: Facts) -> Verdict:
    verdict = partial(_verdict, "working")
    if facts.differed:
        return verdict(
            BAD, "wrong KV", f"{_plural(facts.differed, 'chunk')} in an engine differed from what was saved"
        )
    down = [tier for tier in facts.tiers if tier.loads_down is not None or tier.stores_down is not None]
    if down:
        word = f"{down[0].name} is down" if len(down) == 1 else f"{len(down)} tiers are down"
        return verdict(BAD, word, "; ".join(_down(tier, len(down) > 1) for tier in down))
    if facts.not_ready:
        return verdict(WARN, "not ready", facts.not_ready)
    troubles = list(_troubles(facts))
    if troubles:
        more = f" and {_plural(len(troubles) - 1, 'more kind')} of loss" if len(troubles) > 1 else ""
        return verdict(WARN, "with losses", f"{troubles[0]}{more} in {_last(facts)}")
    recovered = [tier for tier in facts.tiers if tier.back is not None]
    if recovered:
        tier = max(recovered, key=lambda each: each.was_down)
        since = f"{span(tier.back or 0.0)}, after {span(tier.was_down)} of failures"
        return verdict(GOOD, "yes, again", f"{tier.name} has worked for {since}")
    names = [tier.name for tier in facts.tiers]
    tiers = f"{_listed(names)} {'works' if len(names) == 1 else 'work'}"
    return verdict(GOOD, "yes", f"{tiers}; {_clients(facts.clients)}")


def _down(tier: TierFacts, named: bool) -> str:
    ways = {"loads": tier.loads_down, "stores": tier.stores_down}
    failing = [way for way, since in ways.items() if since is not None]
    longest = max(since for since in ways.values() if since is not None)
    text = f"{tier.name} has failed" if named else f"{_listed(failing)} have failed"
    return f"{text} for {span(longest)}" + (f": {_short(tier.why)}" if tier.why else "")


def _troubles(facts: Facts) -> Iterable[str]:
    """What was lost. What a tier lost while it was down belongs to that, and a little is lost everywhere."""
    if facts.corrupt:
        yield f"{_plural(facts.corrupt, 'chunk')} damaged and deleted"
    for tier in facts.tiers:
        if tier.back is not None:
            continue
        if tier.faults > LOST * (tier.faults + tier.moves):
            yield f"{_plural(tier.faults, 'object')} failed in {tier.name}"
        reasons = {
            reason: tokens
            for name, tokens in facts.dropped.items()
            for tier_name, reason in [name.split(" ")]
            if tier_name == tier.name and tokens and reason not in INTENDED_DROPS
        }
        lost = sum(reasons.values())
        if lost > LOST * (lost + tier.stored):
            for reason, tokens in sorted(reasons.items(), key=lambda each: -each[1]):
                why = f"{_percent(tokens / (lost + tier.stored))}, {reason.replace('_', ' ')}"
                yield f"{_plural(tokens, 'token')} not stored in {tier.name} ({why})"


def _clients(clients: Mapping[str, int]) -> str:
    kinds = {"engine": "engine connection", "redis": "Redis client"}
    counts = [_plural(clients[kind], word) for kind, word in kinds.items() if clients.get(kind)]
    return _listed(counts) or "no engine is connected"


# ---- what does it save?


def _saves(facts: Facts) -> Verdict:
    verdict = partial(_verdict, "saves")
    value_hits, value_misses = facts.values.get("hit", 0), facts.values.get("missed", 0)
    gets = value_hits + value_misses
    if facts.asked:
        share = facts.hit / facts.asked
        text = f"{_count(facts.hit)} of {_count(facts.asked)} tokens were not computed again"
        if facts.lookups < EVIDENCE:
            return verdict(IDLE, EARLY, f"{text}, in {_some(facts.lookups)}")
        if facts.saved_seconds >= 0.1:
            text += f": {span(facts.saved_seconds)} of computing{_money(facts)}"
        return verdict(GOOD if share >= _SAVES else WARN, _percent(share), text)
    if gets:
        if gets < EVIDENCE:
            return verdict(IDLE, EARLY, f"{_plural(value_hits, 'value')} found, in {_some(gets)}")
        text = f"of {_plural(gets, 'value')} that Redis clients asked for; no engine asked"
        return verdict(GOOD if value_hits else WARN, _percent(value_hits / gets), text)
    if stored := facts.values.get("set", 0):
        return verdict(IDLE, "nothing yet", f"Redis clients stored {_plural(stored, 'value')} and read none")
    return verdict(IDLE, "nothing yet", f"no prompt was looked up in {_last(facts)}")


def _money(facts: Facts) -> str:
    price = read_price(facts.price)
    if price is None:
        return ""
    before, hour, after = price
    money = facts.saved_seconds / 3600 * hour
    return f", {before}{money:,.{2 if money >= 0.1 else 4}f}" + (f" {after}" if after else "")


# ---- what could have been a hit?


def groups(missed: Mapping[str, int]) -> dict[str, int]:
    """Missed tokens by the groups of reasons, without empty ones."""
    sums = {name: sum(missed.get(each, 0) for each in reasons) for name, (_, reasons) in MISS_GROUPS.items()}
    return {name: tokens for name, tokens in sums.items() if tokens}


def _misses(facts: Facts) -> Verdict:
    verdict = partial(_verdict, "misses")
    if not facts.asked:
        value_misses = facts.values.get("missed", 0)
        if value_misses:
            return verdict(IDLE, _count(value_misses), "values that Redis clients asked for were not here")
        return verdict(IDLE, "none", f"nothing was asked in {_last(facts)}")
    avoidable = {name: n for name, n in groups(facts.missed).items() if name not in NORMAL}
    share = sum(avoidable.values()) / facts.asked
    reasons = {reason: facts.missed[reason] for name in avoidable for reason in MISS_GROUPS[name][1]
               if facts.missed.get(reason)}  # fmt: skip
    if facts.lookups < EVIDENCE:
        return verdict(IDLE, EARLY, f"{_percent(share)} could have been hits, in {_some(facts.lookups)}")
    if not avoidable:
        return verdict(
            GOOD, "none", "that could have been hits: the rest is new text, or was not worth loading"
        )
    largest_reasons = sorted(reasons, key=lambda reason: -reasons[reason])[:2]
    parts = [
        f"{_percent(reasons[each] / facts.asked)} {_WORDS.get(each, each.replace('_', ' '))}"
        for each in largest_reasons
    ]
    state = BAD if share >= _MISSED_BAD else WARN if share >= _MISSED_WARN else GOOD
    return verdict(state, _percent(share), f"could have been hits: {', '.join(parts)}")


_WORDS = {
    "left_meanwhile": "evicted while they were asked for",
    "behind_a_gap": "lack the chunk before them",
    "tier_down": "in a tier that is down",
    "error": "failed to load",
    "deadline": "came too late",
    "absent": "gone when they were to be loaded",
    "no_room": "found no room in memory",
    "full": "found no room",
    "being_filled": "asked for while an engine stored them",
}

# ---- which resource is the limit?


def _bottleneck(facts: Facts) -> Verdict:
    verdict = partial(_verdict, "bottleneck")
    nearest = max(_limits(facts), key=lambda limit: limit.share)
    if nearest.share < _NEAR:
        return verdict(GOOD, "none", f"nearest to its limit is {nearest.text}")
    if nearest.share < _LIMIT:
        return verdict(WARN, f"{nearest.name} soon", nearest.text)
    return verdict(BAD, nearest.name, nearest.text)


def _limits(facts: Facts) -> Iterable[Nearness]:
    yield Nearness("the thread", facts.busy, f"the server's thread, busy {_percent(facts.busy)} of the time")
    yield Nearness(
        "memory in use", facts.leased, f"the memory: {_percent(facts.leased)} of it is in use right now"
    )
    yield Nearness(
        "connections", facts.connected, f"connections: {_percent(facts.connected)} of `clients` are open"
    )
    for tier in facts.tiers:
        queue = f"{tier.name}: its queue of writes is {_percent(tier.queue)} full"
        yield Nearness(f"writes to {tier.name}", tier.queue, queue)
        if tier.slowest is not None:
            took, allowed = _seconds(tier.slowest), _seconds(facts.deadline)
            loads = f"{tier.name}: 1 load in 100 takes {took} or longer, of {allowed} allowed"
            yield Nearness(f"loads from {tier.name}", tier.slowest / facts.deadline, loads)


def slowest(before: Sequence[int], after: Sequence[int], part: float = 0.99) -> float | None:
    """The seconds in which this part of the loads between two counts ended; None: there were too few.

    Counts are those of a histogram: at most each bound of SECONDS, and all of them last. Within a bucket
    loads count as evenly spread.
    """
    if len(before) != len(after):  # none yet; or those of a server of another version, with other bounds
        before = [0] * len(after)
    counts = [b - a for a, b in zip(before, after, strict=True)]
    if not counts or counts[-1] < _FEW:
        return None
    rank, bucket_start, count_before = part * counts[-1], 0.0, 0
    for bound, count in zip(SECONDS, counts, strict=False):
        if count >= rank:
            return bucket_start + (bound - bucket_start) * (rank - count_before) / (count - count_before)
        bucket_start, count_before = bound, count
    return float(SECONDS[-1])


# ---- is the memory large enough?


def _memory(facts: Facts) -> Verdict:
    verdict = partial(_verdict, "memory")
    tiers = [tier for tier in facts.tiers if tier.at("1") is not None and tier.at("2") is not None]
    if facts.measured < EVIDENCE:
        return verdict(IDLE, EARLY, _some(facts.measured))
    if not any(hits for tier in tiers for hits in tier.curve.values()):
        return verdict(IDLE, "no use yet", "no prompt came back, so memory of any size would hit nothing")
    # What a tier would hit alone, the tiers below it may hit already. The largest of them sets the hit rate.
    best_hit_ratio = max(tier.at("1") or 0.0 for tier in tiers)
    tier = max(tiers, key=lambda each: each.at("2") or 0.0)
    gain = max(0.0, (tier.at("2") or 0.0) - best_hit_ratio)
    twice = f"{tier.name} × 2 ({size_text(2 * (tier.capacity or 0))}) would give {_points(gain)}"
    if gain >= _SMALL:
        return verdict(WARN, f"{tier.name} is small", twice)
    top = tiers[0]
    sooner = (top.at("2") or 0.0) - (top.at("1") or 0.0)
    if top is not tier and sooner >= _SMALL:
        double = f"{top.name} × 2 ({size_text(2 * (top.capacity or 0))})"
        return verdict(GOOD, "enough", f"{double} would give no more hits, but {_points(sooner)} sooner")
    spare = [
        each
        for each in tiers
        if (half := each.at("0.5")) is not None and half > (each.at("1") or 0.0) - _FITS / 2
    ]
    if gain < _FITS and spare:
        half_of = size_text((spare[0].capacity or 0) // 2)
        return verdict(GOOD, "ample", f"half of {spare[0].name} ({half_of}) would give as many hits")
    return verdict(GOOD, "enough", twice)


def _points(gain: float) -> str:
    points = round(100 * gain, 0 if abs(gain) >= 0.095 else 1)
    return "no more hits" if not points else f"{points:+g} point{'s' if abs(points) != 1 else ''} of hit rate"


# ---- words


def _some(lookups: int) -> str:
    return f"{_count(lookups)} of the {EVIDENCE} lookups that a verdict needs"


def _last(facts: Facts) -> str:
    return f"the last {span(facts.seconds)}"


def _count(number: int) -> str:
    """As the page writes it: 9,999, 12.3K, 1.23M."""
    if abs(number) < 10_000:
        return f"{number:,}"
    value, unit = number / 1000, "K"
    for larger in ("M", "B", "T"):
        if abs(value) >= 999.5:
            value, unit = value / 1000, larger
    return f"{value:.3g}{unit}"


def _plural(number: int, word: str) -> str:
    return f"{_count(number)} {word}{'s' * (number != 1)}"


def _percent(share: float) -> str:
    value = 100 * share
    fine = 0 < value < 9.95 or 99 < value < 100
    return "< 0.1 %" if 0 < value < 0.1 else f"{value:.1f} %" if fine else f"{value:.0f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.2g} s"


def span(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    hours, days = whole // 3600, whole // 86400
    return f"{hours} h {whole // 60 % 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _short(text: str, most: int = 110) -> str:
    return text if len(text) <= most else f"{text[:most].rstrip()}…"
