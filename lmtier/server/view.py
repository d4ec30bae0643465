"""The view of a server: its verdicts, each with the sentences and tables behind it, and hits over time.

The page, `lmtier stats` and `lmtier top` draw it as it is. A cell is a raw number, or null if it is not
known; the unit of its column says how to write it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from lmtier.errors import size_text
from lmtier.observe.metrics import DROP_REASONS, MISS_GROUPS, MISS_REASONS
from lmtier.observe.miss_curve import FACTORS
from lmtier.observe.words import amount, duration_text, listed, percent, plural
from lmtier.server.explain import Explanation
from lmtier.server.verdicts import Verdict, limits

if TYPE_CHECKING:
    from lmtier.server.report import Counters, Snapshot

_SHOWN = 50  # clients
_GROUPS = {reason: (group, title) for group, (title, some) in MISS_GROUPS.items() for reason in some}
_NONE = ("", "")
_EVENTS = {
    **{"hit": "read and found", "missed": "read and not found", "set": "stored"},
    **{"deleted": "deleted", "expired": "expired", "refused": "refused: no room"},
}


class Table(TypedDict):
    name: str
    columns: list[str]
    """The name and the unit of each: "tier text", "used bytes". With + it is a note to the column before.

    Units: text, state, count, share, bytes, rate (bytes a second), seconds, age, time, line (rates).
    """
    rows: list[list[Any]]
    marks: list[str]
    """The colour of each row, if rows have colours: that of a tier, or of a group of misses."""
    more: int
    """How many rows are left out."""


class Part(Verdict):
    """A verdict, and what is behind it."""

    notes: list[str]
    tables: list[Table]


class Hits(TypedDict):
    """What was asked in the `seconds` before a time, and where it was found."""

    time: float
    seconds: float
    asked: float
    found: dict[str, float]


class View(TypedDict):
    name: str
    version: str
    time: float
    why_not_ready: str
    headline: str
    what: str
    """What hits are: tokens; or values, if Redis clients read some and no engine asked."""
    now: Hits
    """Hits of the last seconds, of the time that the tables are about, and of all since the start."""
    lately: Hits
    start: Hits
    columns: list[Hits]
    """The time of `lately` in equal parts."""
    clients: int
    """Engines and Redis clients; not those who watch the server."""
    parts: list[Part]


def view_of(
    now: Snapshot,
    latest: Counters,
    lately: Counters,
    columns: Sequence[Counters],
    misses: Sequence[Explanation] = (),
) -> View:
    """The view of a report. The other counters are as in a View."""
    is_values = not lately["asked"] and bool(_gets(lately))
    behind = {
        "working": _working(now),
        "saves": _saves(now, lately),
        "misses": _misses(now, latest, lately, misses),
        "bottleneck": _bottleneck(now, latest, columns),
        "memory": _memory(now),
    }

    tiers: dict[str, float] = dict.fromkeys((tier["tier"] for tier in now["tiers"]), 0)

    def hits(each: Counters, time: float) -> Hits:
        found: dict[str, float]
        found = {"here": each["values"].get("hit", 0)} if is_values else {**tiers, **each["hit"]}
        asked = _gets(each) if is_values else each["asked"]
        return {"time": time, "seconds": each["seconds"], "asked": asked, "found": found}

    def part(verdict: Verdict) -> Part:
        notes, tables = behind.get(verdict["name"], ([], []))
        shown = [each for each in tables if each["rows"]]
        return {**verdict, "notes": list(filter(None, notes)), "tables": shown}

    age, width = now["counted"]["seconds"], columns[0]["seconds"]
    end = now["time"] - age + math.ceil(age / width) * width + width
    return {
        "name": now["name"],
        "version": now["version"],
        "time": now["time"],
        "why_not_ready": now["why_not_ready"],
        "headline": _headline(lately),
        "what": "values" if is_values else "tokens",
        "now": hits(latest, now["time"]),
        "lately": hits(lately, now["time"]),
        "start": hits(now["counted"], now["time"]),
        "columns": [hits(each, end - width * (len(columns) - i)) for i, each in enumerate(columns)],
        "clients": sum(client.get("kind") in ("engine", "redis") for client in now["clients"]),
        "parts": [part(verdict) for verdict in now["verdicts"]],
    }


def _gets(counted: Counters) -> int:
    """How many values Redis clients asked for."""
    return counted["values"].get("hit", 0) + counted["values"].get("missed", 0)


def _share(part: float | None, total: float | None) -> float | None:
    return part / total if total and part is not None else None


def _table(
    name: str, columns: str, rows: Iterable[Any], marks: Iterable[str] = (), most: int | None = None
) -> Table:
    """A row has its cells in order, or by the names of the columns."""
    names = columns.split(", ")
    keys = [each.rpartition(" ")[0].replace(" ", "_") for each in names]
    cells = [list(map(row.get, keys)) if isinstance(row, dict) else list(row) for row in rows]
    more = len(cells) - len(cells[:most])
    return {"name": name, "columns": names, "rows": cells[:most], "marks": [*marks], "more": more}


def _tier_colours(now: Snapshot, tiers: Iterable[str]) -> list[str]:
    order = [tier["tier"] for tier in now["tiers"]]
    return [f"tier{order.index(tier) % 6}" if tier in order else "" for tier in tiers]


def _headline(lately: Counters) -> str:
    last = f"in the last {duration_text(lately['seconds'])}"
    if asked := lately["asked"]:
        hit = sum(lately["hit"].values())
        found = f"{percent(hit / asked)} of the tokens that were asked {last} were here already"
        return f"{found}: {amount(hit)} tokens that no engine had to compute again."
    if gets := _gets(lately):
        found = percent(lately["values"].get("hit", 0) / gets)
        return f"{found} of the {plural(gets, 'value')} that Redis clients read {last} were here."
    return f"No prompt was looked up {last}."


# ---- what is behind each verdict: sentences and tables


def _working(now: Snapshot) -> tuple[list[str], list[Table]]:
    counted = now["counted"]
    outages = [{**each, "tier": tier["tier"]} for tier in now["tiers"] for each in tier["outages"]]
    lost = [
        (f"tokens not stored in {tier}: {reason.replace('_', ' ')}", DROP_REASONS.get(reason), tokens)
        for name, tokens in counted["dropped"].items()
        for tier, _, reason in [name.partition(" ")]
    ]
    lost += [(f"objects failed in {tier}", None, faults) for tier, faults in counted["faults"].items()]
    lost += [("objects corrupt, found by checksum, deleted", "see the log", counted["corrupt"])]
    lost += [("chunks in an engine not as saved", "see the log", counted["differed"])]
    lost = [row for row in lost if row[2]]
    clients = sorted(now["clients"], key=lambda each: -each.get("received", 0) - each.get("sent", 0))
    columns = "kind text, name text, address text, age age, asked count, received bytes, sent bytes"
    return ["" if outages or lost else "No trouble since the start."], [
        _table("outages", "tier text, what text, since time, until time, why text", outages),
        _table("lost since the start", "what text, why text+, count count", lost),
        _table("clients", columns, clients, most=_SHOWN),
    ]


def _saves(now: Snapshot, lately: Counters) -> tuple[list[str], list[Table]]:
    counted, savings, sessions = now["counted"], now["savings"], now["sessions"]
    hit, gets, price = sum(counted["hit"].values()), _gets(counted), savings["gpu_hour"]
    looked_up = f" of {amount(counted['asked'])} tokens in {plural(counted['lookups'], 'lookup')}"
    parts = [f"{percent(hit / counted['asked'])}{looked_up}" if counted["asked"] else "no lookup"]
    if gets or now["values"]:
        parts.append(f"{plural(gets, 'read')} of values, at least {amount(now['values'])} stored")
    notes = [f"Since the start, {duration_text(counted['seconds'])} ago: {'; '.join(parts)}."]
    if seconds := counted["saved_seconds"]:
        money = f": {savings['money']:,.2f} at {price:g} an hour" if price else ""
        hours = f"hits saved {savings['gpu_hours']:.3g} GPU-hours{money}"
        notes.append(
            f"Engines did not compute for {duration_text(seconds)}, by their own measurements; {hours}."
        )
        for tier, more in savings["next_gib"].items():
            worth = f"{more['money']:,.2f}" if price else f"{more['gpu_hours']:.3g} GPU-hours"
            notes.append(f"One more GiB of {tier} would save {worth} a day.")
    else:
        notes.append("How long engines would have computed is not known: none has measured it yet.")
    if sessions["active"] or sessions["waiting"]:
        active = plural(sessions["active"], "agent session")
        notes.append(f"{active} active, {amount(sessions['waiting'])} wait for a person.")
    named = [
        [{**each, "share": _share(each["hit"], each["asked"])} for each in rows]
        for rows in (now["models"], now["tenants"])
    ]
    counts = "name text, asked count, hit count, share share"
    session = "session text, state text, children count, requests count, tokens count, saved count, idle age"
    events = [
        (words, lately["values"].get(event, 0), counted["values"].get(event, 0))
        for event, words in (_EVENTS.items() if counted["values"] else ())
    ]
    return notes, [
        _table("models", counts, named[0]),
        _table("tenants", counts, named[1] if len(named[1]) > 1 else ()),
        _table("agent sessions", session, sessions["top"]),
        _table("values of Redis clients", "value text, lately count, since the start count", events),
    ]


def _misses(
    now: Snapshot, latest: Counters, lately: Counters, misses: Sequence[Explanation]
) -> tuple[list[str], list[Table]]:
    start, seconds = now["counted"], max(1e-3, latest["seconds"])
    times, tiers = (latest, lately, start), [tier["tier"] for tier in now["tiers"]]
    missed = sorted(start["missed"], key=lambda reason: -start["missed"][reason])
    lookups = f"in {plural(start['lookups'], 'lookup')}"
    sources = [("asked", lookups, "", [each["asked"] for each in times])]
    sources += [(f"hit in {tier}", "", "", [each["hit"].get(tier, 0) for each in times]) for tier in tiers]
    for reason in missed:
        counts = [each["missed"].get(reason, 0) for each in times]
        sources.append(
            (f"missed: {reason}", MISS_REASONS.get(reason, ""), _GROUPS.get(reason, _NONE)[1], counts)
        )
    rows = [
        (name, a / seconds, b, _share(b, lately["asked"]), c, _share(c, start["asked"]), meaning, group)
        for name, meaning, group, (a, b, c) in sources
    ]
    marks = ["", *_tier_colours(now, tiers), *(_GROUPS.get(reason, _NONE)[0] for reason in missed)]
    tokens = "tokens text, a second count, lately count, share share, since the start count, of all share"
    last = "ago age, times count, asker text, asked count, hit count, token count, why text, reason text+"
    found = [{**each, "hit": sum(each["hit"].values())} for each in misses]
    return ["Grey misses are normal: no cache had them, or they were not worth loading."], [
        _table("tokens", f"{tokens}, meaning text, group text+", rows, marks),
        _table("the last prompts that missed", last, found),
    ]


def _bottleneck(
    now: Snapshot, latest: Counters, columns: Sequence[Counters]
) -> tuple[list[str], list[Table]]:
    counted = now["counted"]

    def rate(each: Counters, way: str, tier: str) -> float:
        moved = each["up"] if way == "up" else each["down"]
        return moved.get(tier, 0) / max(1e-3, each["seconds"])

    tiers = []
    for tier in now["tiers"]:
        name = tier["tier"]
        counts = {key: counted[key].get(name, 0) for key in ("up", "down", "stored", "evicted", "failed")}
        tiers.append({
            **tier, "99_%_within": tier["slowest"],
            "write": tier["write"] if tier["write"] != "always" else None,
            "full": _share(tier["used"], tier["capacity"]),
            "loading": rate(latest, "up", name), "loaded": counts["up"],
            "storing": rate(latest, "down", name), "stored": counts["down"],
            "loads": [rate(each, "up", name) for each in columns],
            "stores": [rate(each, "down", name) for each in columns],
            "tokens_stored": counts["stored"], "evicted": counts["evicted"], "failed": counts["failed"],
        })  # fmt: skip
    shares = [
        {**pool, "tenant": tenant, "tier": tier["tier"], "of_it": _share(pool["used"], pool["share"])}
        for tier in now["tiers"]
        for tenant, pool in tier["shares"].items()
    ]
    lookup = f"{1e6 * counted['lookup_seconds'] / max(1, counted['lookups']):,.0f} µs"
    pinned = [f"{size_text(tier['pinned'])} of {tier['tier']}" for tier in now["tiers"] if tier["pinned"]]
    columns_of_tiers = (
        "tier text, url text+, state state, write text+, used bytes, capacity bytes+, full share+, "
        "loading rate, 99 % within seconds+, loaded bytes+, loads line+, storing rate, stored bytes+, "
        "stores line+, chunks count, tokens stored count+, evicted count, queue count, failed count"
    )
    return [
        f"A lookup takes the server's thread {lookup}." if counted["lookups"] else "",
        f"Chunks are pinned, {listed(pinned)}: `lmtier pins` says by what." if pinned else "",
    ], [
        _table("limits", "limit text, in use share", [each[:2] for each in limits(now, latest)]),
        _table("tiers", columns_of_tiers, tiers, _tier_colours(now, (tier["tier"] for tier in now["tiers"]))),
        _table(
            "shares", "tenant text, tier text, used bytes, share bytes, of it share, evicted count", shares
        ),
    ]


def _memory(now: Snapshot) -> tuple[list[str], list[Table]]:
    capacities = {tier["tier"]: tier["capacity"] for tier in now["tiers"]}
    factors = [f"{factor:g}" for factor in FACTORS]
    rows = [(tier, capacities.get(tier), *map(each.get, factors)) for tier, each in now["curve"].items()]
    columns = ", ".join(
        ["hit rate if the tier were text", "of bytes", *(f"× {each} share" for each in factors)]
    )
    return ["The hit rate of the last hour, if a tier were alone and of this size."], [
        _table("curve", columns, rows, _tier_colours(now, now["curve"]))
    ]
