"""Five answers, one line each: is it working, what does it save, what was missed, what is the limit, is the
memory large enough. Numbers in, words out; no I/O.

The page, `lmtier stats` and `/api/stats` show the same words. A verdict has a state for its colour: `good`,
`idle` (nothing to judge, or too little), `warn` or `bad`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypedDict

from lmtier.config import read_price
from lmtier.errors import size_text
from lmtier.observe.metrics import INTENDED_DROPS, MISS_GROUPS, SECONDS
from lmtier.observe.words import amount, duration_text, listed, percent, plural, seconds_text

if TYPE_CHECKING:
    from lmtier.server.report import Counters, OutageNow, Snapshot, TierNow

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


_Judged: TypeAlias = tuple[str, str, str]
"""State, word and text."""


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


def judge(now: Snapshot, recent: Counters) -> list[Verdict]:
    """The verdicts on a report, in which `recent` is what was counted in the last minutes."""
    judged = {
        "working": _working(now, recent),
        "saves": _saves(now, recent),
        "misses": _misses(recent),
        "bottleneck": _bottleneck(now, recent),
        "memory": _memory(now),
    }
    return [
        {"name": name, "state": state, "word": word, "text": text}
        for name, (state, word, text) in judged.items()
    ]


# ---- is it working?


def _working(now: Snapshot, recent: Counters) -> _Judged:
    if differed := now["counted"]["differed"]:
        return (BAD, "wrong KV", f"{plural(differed, 'chunk')} in an engine differed from what was saved")
    down = [tier for tier in now["tiers"] if _failing(tier)]
    if down:
        word = f"{down[0]['tier']} is down" if len(down) == 1 else f"{len(down)} tiers are down"
        return BAD, word, "; ".join(_down(tier, now, is_named=len(down) > 1) for tier in down)
    if now["why_not_ready"]:
        return WARN, "not ready", now["why_not_ready"]
    outages = {
        tier["tier"]: max(ended)
        for tier in now["tiers"]
        if (
            ended := [
                each for each in map(_ended, tier["outages"]) if each[0] > now["time"] - recent["seconds"]
            ]
        )
    }
    if troubles := list(_troubles(now, recent, outages)):
        more = f" and {plural(len(troubles) - 1, 'more kind')} of loss" if len(troubles) > 1 else ""
        return WARN, "with losses", f"{troubles[0]}{more} in {_last(recent)}"
    if outages:
        name, (until, since) = max(outages.items(), key=lambda each: now["time"] - each[1][0])
        worked, failed = duration_text(now["time"] - until), duration_text(until - since)
        return GOOD, "yes, again", f"{name} has worked for {worked}, after {failed} of failures"
    names = [tier["tier"] for tier in now["tiers"]]
    tiers = f"{listed(names)} {'works' if len(names) == 1 else 'work'}"
    return GOOD, "yes", f"{tiers}; {_clients(now)}"


def _failing(tier: TierNow) -> list[OutageNow]:
    return [each for each in tier["outages"] if each["until"] is None]


def _ended(outage: OutageNow) -> tuple[float, float]:
    return outage["until"] or 0.0, outage["since"]


def _down(tier: TierNow, now: Snapshot, *, is_named: bool) -> str:
    outages = _failing(tier)
    what = f"{tier['tier']} has failed" if is_named else f"{listed([o['what'] for o in outages])} have failed"
    text = f"{what} for {duration_text(now['time'] - min(each['since'] for each in outages))}"
    why = next((each["why"] for each in outages if each["why"]), "")
    return f"{text}: {_short(why)}" if why else text


def _troubles(now: Snapshot, recent: Counters, outages: Collection[str]) -> Iterable[str]:
    """What was lost. What a tier lost while it was down belongs to that, and a little is lost everywhere."""
    if recent["corrupt"]:
        yield f"{plural(recent['corrupt'], 'chunk')} damaged and deleted"
    for tier in (each["tier"] for each in now["tiers"] if each["tier"] not in outages):
        faults, moves = recent["faults"].get(tier, 0), recent["moves"].get(tier, 0)
        if faults > LOST * (faults + moves):
            yield f"{plural(faults, 'object')} failed in {tier}"
        reasons = {
            reason: tokens
            for name, tokens in recent["dropped"].items()
            for tier_name, reason in [name.split(" ")]
            if tier_name == tier and tokens and reason not in INTENDED_DROPS
        }
        lost = sum(reasons.values())
        total = lost + recent["stored"].get(tier, 0)
        if lost > LOST * total:
            for reason, tokens in sorted(reasons.items(), key=lambda each: -each[1]):
                why = f"{percent(tokens / total)}, {reason.replace('_', ' ')}"
                yield f"{plural(tokens, 'token')} not stored in {tier} ({why})"


def _clients(now: Snapshot) -> str:
    counts = Counter(client.get("kind") for client in now["clients"])
    kinds = {"engine": "engine connection", "redis": "Redis client"}
    connected = [plural(counts[kind], word) for kind, word in kinds.items() if counts[kind]]
    return listed(connected) or "no engine is connected"


# ---- what does it save?


def _saves(now: Snapshot, recent: Counters) -> _Judged:
    value_hits, value_misses = recent["values"].get("hit", 0), recent["values"].get("missed", 0)
    gets = value_hits + value_misses
    if asked := recent["asked"]:
        hit = sum(recent["hit"].values())
        text = f"{amount(hit)} of {amount(asked)} tokens were not computed again"
        if recent["lookups"] < EVIDENCE:
            return IDLE, EARLY, f"{text}, in {_some(recent['lookups'])}"
        if (saved := recent["saved_seconds"]) >= 0.1:
            text += f": {duration_text(saved)} of computing{_money(saved, now['savings']['price'])}"
        return GOOD if hit / asked >= _SAVES else WARN, percent(hit / asked), text
    if gets:
        if gets < EVIDENCE:
            return IDLE, EARLY, f"{plural(value_hits, 'value')} found, in {_some(gets)}"
        text = f"of {plural(gets, 'value')} that Redis clients asked for; no engine asked"
        return GOOD if value_hits else WARN, percent(value_hits / gets), text
    if stored := recent["values"].get("set", 0):
        return IDLE, "nothing yet", f"Redis clients stored {plural(stored, 'value')} and read none"
    return IDLE, "nothing yet", f"no prompt was looked up in {_last(recent)}"


def _money(seconds: float, per_hour: str) -> str:
    price = read_price(per_hour)
    if price is None:
        return ""
    before, hour, after = price
    money = seconds / 3600 * hour
    return f", {before}{money:,.{2 if money >= 0.1 else 4}f}" + (f" {after}" if after else "")


# ---- what could have been a hit?


def _misses(recent: Counters) -> _Judged:
    asked, missed = recent["asked"], recent["missed"]
    if not asked:
        value_misses = recent["values"].get("missed", 0)
        if value_misses:
            return IDLE, amount(value_misses), "values that Redis clients asked for were not here"
        return IDLE, "none", f"nothing was asked in {_last(recent)}"
    reasons = {
        reason: missed[reason]
        for group, (_, some) in MISS_GROUPS.items()
        for reason in some
        if missed.get(reason) and group not in NORMAL
    }
    share = sum(reasons.values()) / asked
    if recent["lookups"] < EVIDENCE:
        return IDLE, EARLY, f"{percent(share)} could have been hits, in {_some(recent['lookups'])}"
    if not reasons:
        return (GOOD, "none", "that could have been hits: the rest is new text, or was not worth loading")
    largest_reasons = sorted(reasons, key=lambda reason: -reasons[reason])[:2]
    parts = [
        f"{percent(reasons[each] / asked)} {_WORDS.get(each, each.replace('_', ' '))}"
        for each in largest_reasons
    ]
    state = BAD if share >= _MISSED_BAD else WARN if share >= _MISSED_WARN else GOOD
    return state, percent(share), f"could have been hits: {', '.join(parts)}"


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


def _bottleneck(now: Snapshot, recent: Counters) -> _Judged:
    nearest = max(limits(now, recent), key=lambda limit: limit.share)
    if nearest.share < _NEAR:
        return GOOD, "none", f"nearest to its limit is {nearest.text}"
    if nearest.share < _LIMIT:
        return WARN, f"{nearest.name} soon", nearest.text
    return BAD, nearest.name, nearest.text


def limits(now: Snapshot, recent: Counters) -> Iterable[Nearness]:
    """Each resource that may be the limit."""
    busy = recent["busy"] / max(1e-3, recent["seconds"])
    leased = now["leased_bytes"] / max(1, now["tiers"][0]["capacity"] or 0)
    connected = len(now["clients"]) / now["most_clients"] if now["most_clients"] else 0.0
    yield Nearness("the thread", busy, f"the server's thread, busy {percent(busy)} of the time")
    yield Nearness("memory in use", leased, f"the memory: {percent(leased)} of it is in use right now")
    yield Nearness("connections", connected, f"connections: {percent(connected)} of `clients` are open")
    for tier in now["tiers"]:
        name, full, slow = tier["tier"], tier["queue_full"], tier["slowest"]
        yield Nearness(f"writes to {name}", full, f"{name}: its queue of writes is {percent(full)} full")
        if slow is not None:
            took, allowed = seconds_text(slow), seconds_text(now["load_deadline"])
            loads = f"{name}: 1 load in 100 takes {took} or longer, of {allowed} allowed"
            yield Nearness(f"loads from {name}", slow / now["load_deadline"], loads)


def slowest(counts: Sequence[int], part: float = 0.99) -> float | None:
    """The seconds in which this part of the counted loads ended; None: there were too few.

    Counts are those of a histogram: at most each bound of SECONDS, and all of them last. Within a bucket
    loads count as evenly spread.
    """
    if not counts or counts[-1] < _FEW:
        return None
    rank, bucket_start, count_before = part * counts[-1], 0.0, 0
    for bound, count in zip(SECONDS, counts, strict=False):
        if count >= rank:
            return bucket_start + (bound - bucket_start) * (rank - count_before) / (count - count_before)
        bucket_start, count_before = bound, count
    return float(SECONDS[-1])


# ---- is the memory large enough?


def _memory(now: Snapshot) -> _Judged:
    curve = {
        name: ratios
        for name, ratios in now["curve"].items()
        if ratios.get("1") is not None and ratios.get("2") is not None
    }
    if now["curve_lookups"] < EVIDENCE:
        return IDLE, EARLY, _some(now["curve_lookups"])
    if not any(hits for ratios in curve.values() for hits in ratios.values()):
        return IDLE, "no use yet", "no prompt came back, so memory of any size would hit nothing"

    def at(name: str, factor: str) -> float:
        return curve[name].get(factor) or 0.0

    def sized(name: str, factor: float, text: str) -> str:
        capacity = next(tier["capacity"] or 0 for tier in now["tiers"] if tier["tier"] == name)
        return f"{text} ({size_text(factor * capacity)})"

    # What a tier would hit alone, the tiers below it may hit already. The largest of them sets the hit rate.
    best_hit_ratio = max(at(name, "1") for name in curve)
    largest = max(curve, key=lambda name: at(name, "2"))
    gain = max(0.0, at(largest, "2") - best_hit_ratio)
    twice = f"{sized(largest, 2, f'{largest} × 2')} would give {_points(gain)}"
    if gain >= _SMALL:
        return WARN, f"{largest} is small", twice
    top = next(iter(curve))
    sooner = at(top, "2") - at(top, "1")
    if top != largest and sooner >= _SMALL:
        double = sized(top, 2, f"{top} × 2")
        return GOOD, "enough", f"{double} would give no more hits, but {_points(sooner)} sooner"
    spare = [
        name
        for name, ratios in curve.items()
        if (half := ratios.get("0.5")) is not None and half > at(name, "1") - _FITS / 2
    ]
    if gain < _FITS and spare:
        return (GOOD, "ample", f"{sized(spare[0], 0.5, f'half of {spare[0]}')} would give as many hits")
    return GOOD, "enough", twice


def _points(gain: float) -> str:
    points = round(100 * gain, 0 if abs(gain) >= 0.095 else 1)
    return "no more hits" if not points else f"{points:+g} point{'s' if abs(points) != 1 else ''} of hit rate"


# ---- words


def _some(lookups: int) -> str:
    return f"{amount(lookups)} of the {EVIDENCE} lookups that a verdict needs"


def _last(recent: Counters) -> str:
    return f"the last {duration_text(recent['seconds'])}"


def _short(text: str, most: int = 110) -> str:
    return text if len(text) <= most else f"{text[:most].rstrip()}…"
