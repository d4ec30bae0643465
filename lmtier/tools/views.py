"""A server's answers as text: tables and sentences."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from textwrap import wrap
from typing import Any

from lmtier.observe.words import percent, seconds_text
from lmtier.server.explain import Explanation
from lmtier.server.view import Table, View
from lmtier.tools.console import Console
from lmtier.tools.terminal import bar, count_text, duration_text, size_text, table

_CLEARING = 60.0  # seconds: TIMEOUT is too short for a million chunks, or to search a shared tier


def ping_text(remote: Console) -> str:
    began = time.monotonic()
    remote.get("/version")
    seconds = time.monotonic() - began
    return f"{headline(remote.view(), str(remote.address))}; it answered in {seconds * 1000:.2f} ms"


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


def stats(view: View, name: str) -> str:
    """All of a view."""
    verdicts = table(("", "", ""), ((part["name"], part["word"], part["text"]) for part in view["parts"]))
    texts = [headline(view, name), "\n".join(verdicts.splitlines()[2:])]
    for part in view["parts"]:
        texts += [
            *part["notes"],
            *(table_text(each, _COLUMNS.get(each["name"], "")) for each in part["tables"]),
        ]
    return "\n\n".join(texts)


_COLUMNS = {
    "tokens": "tokens, since the start, of all, meaning",
    "the last prompts that missed": "ago, times, asker, asked, hit, token, reason",
    "tiers": "tier, used, capacity, full, chunks, loaded, stored, queue, evicted, failed, state",
}
"""The columns in `stats`, of tables that have more than fit."""


def headline(view: View, name: str) -> str:
    ready = f"not ready: {view['why_not_ready']}" if view["why_not_ready"] else "ready"
    return f"lmtier {view['version']}, {ready}, up {duration_text(view['start']['seconds'])}, at {name}"


def working_text(view: View) -> str:
    """Whether the server works, as it says itself."""
    working = view["parts"][0]
    return f"{working['word']}: {working['text']}"


def tables_of(view: View) -> dict[str, Table]:
    return {each["name"]: each for part in view["parts"] for each in part["tables"]}


def rows_of(shown: Table | None) -> list[dict[str, Any]]:
    """The cells of each row, by the names of their columns."""
    names = [each.rpartition(" ")[0] for each in shown["columns"]] if shown else []
    return [dict(zip(names, row, strict=False)) for row in (shown["rows"] if shown else ())]


def table_text(
    shown: Table, names: str = "", most: int | None = None, head: str = "", bars: int = 0, widest: int = 90
) -> str:
    """A table with these columns, or with all but notes. `head` is said in place of the first name, `bars` is
    the width of a bar beside each share, and `widest` that of a text."""
    units = {name: unit.rstrip("+") for name, _, unit in (each.rpartition(" ") for each in shown["columns"])}
    plain = [each.rpartition(" ")[0] for each in shown["columns"] if not each.endswith("+")]
    order = names.split(", ") if names else plain

    def text(name: str, value: object) -> str:
        unit = units.get(name, "text")
        said = cell_text(value, unit)[:widest]
        if bars and unit == "share" and isinstance(value, int | float):
            return f"{said:>5}  {bar(value, bars)}"
        return said

    rows = rows_of(shown)[:most]
    cells = [[text(name, row.get(name)) for name in order] for row in rows]
    more = shown["more"] + len(shown["rows"]) - len(rows)
    lines = table((head or order[0], *order[1:]), cells)
    return f"{lines}\nand {more:,} more" if more else lines


def cell_text(value: object, unit: str) -> str:
    if not isinstance(value, int | float) or unit in ("text", "state"):
        return "-" if value in (None, "") or isinstance(value, list) else str(value)
    texts: dict[str, Callable[[float], str]] = {
        "count": lambda number: f"{number:,.0f}",
        "share": percent,
        "bytes": size_text,
        "rate": lambda nbytes: f"{size_text(round(nbytes))}/s" if nbytes else "-",
        "seconds": seconds_text,
        "age": duration_text,
        "time": lambda moment: time.strftime("%H:%M:%S", time.localtime(moment)),
    }
    return texts.get(unit, str)(value)


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
