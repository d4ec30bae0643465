"""A server's answers as text: tables and sentences."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Any

from lmtier.observe.metrics import MISS_REASONS
from lmtier.observe.miss_curve import FACTORS
from lmtier.server.explain import Explanation
from lmtier.server.report import Snapshot
from lmtier.tools.console import Console
from lmtier.tools.terminal import count_text, duration_text, number_text, size_text, table

_SHOWN = 20  # clients
_CLEARING = 60.0  # seconds: TIMEOUT is too short for a million chunks, or to search a shared tier


def ping_text(remote: Console) -> str:
    began = time.monotonic()
    remote.get("/version")
    seconds = time.monotonic() - began
    return f"{headline(remote.snapshot(), str(remote.address))}; it answered in {seconds * 1000:.2f} ms"


def clear(
    remote: Console,
    model: str | None,
    *,
    by: str | None = None,
    since: datetime | None = None,
    force: bool = False,
) -> str:
    """Clear the KV of one model, of one engine, since a time; None: of all. Returns a report."""
    before = remote.snapshot()
    since_ms = None if since is None else int(since.timestamp() * 1000)
    given = {"model": model, "stored_by": by, "since": since_ms, "force": force, "seconds": _CLEARING}
    arguments = {name: value for name, value in given.items() if value is not None}
    remote.post("/api/clear", arguments, timeout=2 * _CLEARING)
    after = remote.snapshot()
    chunks_after = {tier["tier"]: tier["chunks"] or 0 for tier in after["tiers"]}
    counted = {tier["tier"]: tier["chunks"] for tier in before["tiers"] if tier["chunks"] is not None}
    deleted = {tier: chunks - chunks_after[tier] for tier, chunks in counted.items() if tier in chunks_after}
    uncounted_tiers = [tier["tier"] for tier in before["tiers"] if tier["chunks"] is None]
    target = "everything" if model is None else f"the KV of {model}"
    is_selection = by is not None or since is not None
    if is_selection:
        target = "what" if model is None else f"{target} that"
        target += " was stored" + (f" by {by}" if by is not None else "")
        target += f" since {since:%Y-%m-%d %H:%M:%S %z}" if since is not None else ""
    report = f"forgot {target}: " + ", ".join(
        [*(f"{count_text(max(0, count), 'chunk')} in {tier}" for tier, count in deleted.items())]
        + [f"{'such' if is_selection else 'whatever'} was in {tier}" for tier in uncounted_tiers]
    )
    if model is not None and not (any(deleted.values()) or uncounted_tiers):
        report += "; the name must be the one that its engine gives"
    if after["leased_bytes"] and not force:
        report += f"; chunks in use ({size_text(after['leased_bytes'])}) stay: --force deletes them too"
    return report


_COPIES = {
    "tenant": "unreadable for everyone, also in backups",
    "tier": "readable with the tier's key, which is not the tenant's own",
    "none": "readable: this tier does not seal",
}
"""What becomes of copies elsewhere, by who seals."""


NOT_YET = "is not forgotten yet: something is left, see below; ask again"
NOT_KNOWN = "is not known: nothing of it was found"


def forget_report_text(report: Mapping[str, Any]) -> str:
    """What became of a tenant who was forgotten, and what of copies that are out of reach."""
    rows = [
        ("cpu", f"{report['chunks']:,}", "-", f"{size_text(report['overwritten'])} of memory overwritten")
    ]
    for tier in report["tiers"]:
        deleted = "all that was found" if tier["chunks"] is None else f"{tier['chunks']:,}"
        rows.append((tier["tier"], deleted, f"{tier['keys']:,}", _COPIES[tier["sealed"]]))
    parts = [
        f"tenant {report['tenant']} {forget_outcome(report)}",
        table(("tier", "chunks deleted", "keys destroyed", "copies elsewhere"), rows),
    ]
    if report["in_use"]:
        parts.append(f"{count_text(report['in_use'], 'chunk')} in use: overwritten as soon as that ends")
    parts += [f"{tier['tier']}: left: {tier['problem']}" for tier in report["tiers"] if tier["problem"]]
    parts += [
        f"{tier}: what it had is not counted; a server that shares no keys can write its copies again"
        for tier in _uncounted(report)
    ]
    learn_seconds = report["others_within"]
    parts.append(
        "Other servers do not learn of it: no tier has tenants=. Ask each of them."
        if learn_seconds is None
        else f"Not reached yet: other servers that share these keys. They learn within {learn_seconds:g} s."
    )
    parts.append("Engines keep KV in their own memory until they need the room, or end.")
    return "\n".join(parts)


def forget_outcome(report: Mapping[str, Any]) -> str:
    """The first line after the tenant: what a hurried reader takes along."""
    if any(tier["problem"] for tier in report["tiers"]):
        return NOT_YET
    if any(
        [report["chunks"], report["in_use"], *(tier["chunks"] or tier["keys"] for tier in report["tiers"])]
    ):
        return "is forgotten"
    if report["since"]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(report["since"] / 1000))
        return f"was forgotten at {at} UTC, and nothing of it has come since"
    if uncounted := _uncounted(report):
        return f"is forgotten, if {' and '.join(uncounted)} had anything of it; nothing else did"
    return NOT_KNOWN


def _uncounted(report: Mapping[str, Any]) -> list[str]:
    """The tiers of which nothing shows whether they had anything of a tenant."""
    return [t["tier"] for t in report["tiers"] if t["chunks"] is None and t["sealed"] != "tenant"]


def stats(now: Snapshot, name: str) -> str:
    """Everything since the start, in tables."""
    parts = [
        headline(now, name),
        verdicts_table(now),
        _tokens_table(now),
        _tiers_table(now),
        *_shares_table(now),
        *_values(now),
        *_pinned(now),
        *_agents(now),
        *_savings(now),
        _thread_text(now, now["busy"], now["uptime"]),
    ]
    if now["curve"]:
        parts.append(curve_table(now, "hit rate if the tier were"))
    if now["clients"]:
        parts.append(clients_table(now))
    if now["verify_failures"] or now["corrupt"]:
        corrupt, differed = now["corrupt"], now["verify_failures"]
        parts.append(
            f"{count_text(corrupt, 'object')} corrupt and deleted; {count_text(differed, 'chunk')} in an "
            "engine not as saved: see the log."
        )
    return "\n\n".join(parts)


def _agents(now: Snapshot) -> list[str]:
    active, waiting = now["sessions"]["active"], now["sessions"]["waiting"]
    return [f"agent sessions: {active:,} active, {waiting:,} wait for a person"] if active + waiting else []


def _savings(now: Snapshot) -> list[str]:
    """What hits saved, if engines send their costs."""
    savings = now["savings"]
    if not savings["gpu_hours"]:
        return []
    price = savings["gpu_hour"]
    text = f"hits saved {number_text(savings['gpu_hours'])} GPU-hours"
    text += f": {savings['money']:,.2f} at {price:g} an hour" if price else ""
    for tier, next_gib in savings["next_gib"].items():
        amount = f"{next_gib['money']:,.2f}" if price else f"{number_text(next_gib['gpu_hours'])} GPU-hours"
        text += f"\none more GiB of {tier} would save {amount} a day"
    return [text]


def explanations_text(explanations: Sequence[Explanation], columns: int) -> str:
    """A line for each lookup, and under it why."""
    if not explanations:
        return "None of the lookups that the server remembers missed a whole chunk."
    rows = [
        (
            f"{duration_text(each['ago'])} ago",
            each["asker"][:24] or "-",
            f"{each['asked']:,}",
            f"{sum(each['hit'].values()):,}",
            f"{each['chunk']:,}",
            f"{each['token']:,}",
            each["reason"],
            f"{each['times']:,}",
        )
        for each in explanations
    ]
    headers = ("when", "who", "tokens asked", "there", "missed from chunk", "token", "reason", "times")
    first, rule, *lines = table(headers, rows).splitlines()
    parts = [first, rule]
    for line, each in zip(lines, explanations, strict=True):
        parts += [line, *wrap(each["why"], max(40, columns), initial_indent="  ", subsequent_indent="  ")]
        if each["here"] or each["there"]:
            asked, stored = (", ".join(map(str, each[side])) for side in ("here", "there"))
            parts.append(f"  asked there: {asked}; what stood there: {stored}")
    return "\n".join(parts)


def headline(now: Snapshot, name: str) -> str:
    ready = "ready" if now["ready"] else f"not ready: {now['why_not_ready']}"
    return f"lmtier {now['version']}, {ready}, up {duration_text(now['uptime'])}, at {name}"


def working_text(now: Snapshot) -> str:
    """Whether the server works, as it says itself."""
    working = now["verdicts"][0]
    return f"{working['word']}: {working['text']}"


def client_count(now: Snapshot) -> int:
    """Engines and Redis clients; not those who watch the server."""
    return sum(client["kind"] in ("engine", "redis") for client in now["clients"])


def verdicts_table(now: Snapshot) -> str:
    """Five lines that say what the numbers mean."""
    rows = [(each["name"], each["word"], each["text"]) for each in now["verdicts"]]
    return "\n".join(table(("", "", ""), rows).splitlines()[2:])


def _tokens_table(now: Snapshot) -> str:
    tokens = now["tokens"]
    asked = tokens["asked"]

    def row(what: str, count: int, meaning: str = "") -> tuple[str, ...]:
        return what, f"{count:,}", percent(count, asked), meaning

    rows = [row("asked", asked, f"in {count_text(now['lookups'], 'lookup')}")]
    rows += [row(f"hit in {tier}", count) for tier, count in tokens["hit"].items()]
    missed = sorted(tokens["missed"].items(), key=lambda each: -each[1])
    rows += [row(f"missed: {why}", count, MISS_REASONS.get(why, "")) for why, count in missed if count]
    rows += [(f"stored in {tier}", f"{count:,}", "-", "") for tier, count in tokens["stored"].items()]
    rows += [
        (f"dropped: {key.replace(' ', ', ')}", f"{count:,}", "-", "should have been stored, and was not")
        for key, count in tokens["dropped"].items()
    ]
    return table(("tokens", "count", "share", ""), rows)


def _tiers_table(now: Snapshot) -> str:
    headers = (
        "tier",
        "used",
        "capacity",
        "full",
        "chunks",
        "up",
        "down",
        "queue",
        "evicted",
        "failed",
        "state",
    )
    rows = [
        (
            tier["tier"],
            size_or_dash(tier["used"]),
            size_or_dash(tier["capacity"]),
            percent(tier["used"], tier["capacity"]),
            "-" if tier["chunks"] is None else f"{tier['chunks']:,}",
            size_text(tier["bytes_up"]),
            size_text(tier["bytes_down"]),
            f"{tier['queue']:,}",
            f"{tier['evictions']:,}",
            f"{tier['failures']:,}",
            tier["state"],
        )
        for tier in now["tiers"]
    ]
    return table(headers, rows)


def _values(now: Snapshot) -> list[str]:
    """What Redis clients did, if there were any."""
    values = now["values"]
    hit, missed, held = (values.get(event, 0) for event in ("hit", "missed", "held"))
    if not (hit or missed or values.get("set")):
        return []
    share = percent(hit, hit + missed)
    return [
        f"values of Redis clients: {held:,} stored; {hit + missed:,} were read, and {share} of them were here"
    ]


def _pinned(now: Snapshot) -> list[str]:
    pinned = [f"{size_text(tier['pinned'])} of {tier['tier']}" for tier in now["tiers"] if tier["pinned"]]
    return [f"pinned: {', '.join(pinned)}; `lmtier pins` says by what"] if pinned else []


def _shares_table(now: Snapshot) -> list[str]:
    rows = [
        (
            tenant,
            tier["tier"],
            size_or_dash(share["used"]),
            size_or_dash(share["share"]),
            percent(share["used"], share["share"]),
            f"{share['evictions']:,}",
        )
        for tier in now["tiers"]
        for tenant, share in tier["shares"].items()
    ]
    return [table(("tenant", "tier", "used", "share", "of it", "evicted"), rows)] if rows else []


def _thread_text(now: Snapshot, busy: float, seconds: float) -> str:
    """How busy the server's main thread is. Its limit is one second per second."""
    each = f"{now['lookup_seconds'] / now['lookups'] * 1e6:,.0f} µs" if now["lookups"] else "-"
    return f"the server's thread was busy {percent(busy, seconds)} of the time; a lookup takes it {each}"


def curve_table(now: Snapshot, what: str) -> str:
    """The table that shows whether more memory would help."""
    capacities = {tier["tier"]: tier["capacity"] for tier in now["tiers"]}
    factors = [f"{factor:g}" for factor in FACTORS]
    rows = [
        (
            tier,
            size_or_dash(capacities.get(tier)),
            *("-" if (ratio := ratios.get(factor)) is None else percent(ratio, 1) for factor in factors),
        )
        for tier, ratios in now["curve"].items()
    ]
    return table((what, "of", *(f"× {factor}" for factor in factors)), rows)


def clients_table(now: Snapshot, most: int = _SHOWN) -> str:
    busiest = sorted(now["clients"], key=lambda client: -_moved(client))
    rows = [
        (
            str(client["kind"]),
            str(client["name"] or "-")[:24],
            str(client["address"])[:28],
            duration_text(_number(client["age"])),
            size_text(int(_number(client["received"]))),
            size_text(int(_number(client["sent"]))),
        )
        for client in busiest[:most]
    ]
    text = table(("client", "name", "address", "age", "received", "sent"), rows)
    hidden_count = len(busiest) - most
    return f"{text}\nand {hidden_count:,} more" if hidden_count > 0 else text


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _moved(client: Mapping[str, object]) -> float:
    return _number(client["received"]) + _number(client["sent"])


def percent(part: float | None, total: float | None) -> str:
    return f"{100 * part / total:.0f} %" if total and part is not None else "-"


def size_or_dash(count: int | None) -> str:
    return "-" if count is None else size_text(count)


def sessions_table(sessions: Sequence[Mapping[str, Any]]) -> str:
    """The agent sessions that asked last."""
    rows = [
        (
            f"{each['session']}" + (f" of {each['parent']}" if each["parent"] else ""),
            each["state"] + (f", {each['children']} below" if each["children"] else ""),
            f"{each['requests']:,}",
            f"{each['tokens']:,}",
            ", ".join(f"{tokens:,} in {tier}" for tier, tokens in each["kept"].items() if tokens) or "none",
            f"{each['saved']:,}",
            f"{duration_text(each['idle'])} ago",
        )
        for each in sessions
    ]
    headers = ("session", "state", "requests", "tokens", "kept", "saved", "last seen")
    return table(headers, rows) if rows else "no session has asked yet"
