"""`lmtier top`: the last minutes of a server on one screen, or a line at a time."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from operator import attrgetter
from textwrap import wrap
from typing import Any, NamedTuple

from lmtier.server.report import Snapshot, row_of
from lmtier.tools.console import TIMEOUT, Console, ServerAddress, Unreachable
from lmtier.tools.terminal import Screen, bar, count_text, duration_text, size_text, spark, table
from lmtier.tools.views import (
    client_count,
    clients_table,
    curve_table,
    headline,
    percent,
    size_or_dash,
    working_text,
)

MINUTES = 15.0
"""The minutes of history that a server remembers and `top` shows."""
NOW = 1.5
"""Seconds that count as now."""
_APART = 10.0  # seconds between rows of a history without a gap
_time_of = attrgetter("time")


class Totals(NamedTuple):
    """Counters since the start, at one time."""

    time: float
    asked: int
    hit: Mapping[str, int]
    missed: Mapping[str, int]
    up: Mapping[str, int]
    down: Mapping[str, int]
    busy: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Totals:
        """A row of a server's history."""
        return cls(row["time"], row["asked"], row["hit"], row["missed"], row["up"], row["down"], row["busy"])


def counted_between(after: Totals, before: Totals) -> Totals:
    """What was counted between two times. `time` and `busy` are seconds."""

    def less(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
        return {name: count - b.get(name, 0) for name, count in a.items()}

    return Totals(
        after.time - before.time,
        after.asked - before.asked,
        less(after.hit, before.hit),
        less(after.missed, before.missed),
        less(after.up, before.up),
        less(after.down, before.down),
        after.busy - before.busy,
    )


def hit_rate(counted: Totals | None) -> str:
    return percent(sum(counted.hit.values()), counted.asked) if counted is not None else "-"


def timeline(now: Snapshot, history: Iterable[Mapping[str, Any]]) -> list[Totals]:
    """The known counters of the last minutes, the oldest first, the present last."""
    present = Totals.of(row_of(now))
    began = Totals(now["time"] - now["uptime"], 0, {}, {}, {}, {}, 0.0)
    rows = [Totals.of(row) for row in history if began.time < row["time"] < present.time]
    return [began, *rows, present]


def totals_before(line: Sequence[Totals], seconds: float) -> Totals:
    """The counters that were known so long before the present."""
    return line[max(0, bisect_right(line, line[-1].time - seconds, key=_time_of) - 1)]


def frame(
    now: Snapshot, line: Sequence[Totals], name: str, columns: int, rows: int, trouble: str = ""
) -> list[str]:
    """The screen of `top` on a terminal of this size. It answers six questions in a fixed order."""
    before_now, past, present = totals_before(line, NOW), totals_before(line, MINUTES * 60), line[-1]
    since = duration_text(present.time - past.time)
    quits = "  q quits"
    title = headline(now, name)[: max(0, columns - len(quits))] + quits
    works = trouble or f"works?   {working_text(now)}"
    header = [
        *([] if trouble else [title]),
        *wrap(works, columns, max_lines=2, placeholder="…"),
        f"saves?   hit rate   now {hit_rate(counted_between(present, before_now))}   "
        f"last {since} {hit_rate(counted_between(present, past))}   "
        f"since the start {hit_rate(counted_between(present, line[0]))}",
        spark(_levels(line, max(10, columns))),
    ]
    sources = _sources(before_now, past, present, since, columns)
    tiers = _tier_lines(now, before_now, present)
    curve = _bare(curve_table(now, "more memory?")) if now["curve"] else []
    few = min(2, len(now["clients"]))  # clients that are always visible, however long the rest is
    room = rows - len(header) - len(tiers) - len(curve) - few - 2  # the header of the clients, and their rest
    sources = sources[: max(2, room)]
    room = rows - len(header) - len(sources) - len(tiers) - len(curve) - 1
    clients = ["no clients"]
    if now["clients"]:
        clients = _bare(clients_table(now, room if len(now["clients"]) <= room else max(0, room - 1)))
    sections = [each for each in (header, sources, tiers, curve, clients) if each]
    blank_rows = rows - sum(map(len, sections))
    lines = [*sections[0]]
    for section in sections[1:]:  # an empty line above each, as far as there is room
        lines += [""] * (blank_rows > 0) + section
        blank_rows -= 1
    return [each[:columns] for each in lines[:rows]]


def _bare(table: str) -> list[str]:
    """The lines of a table without the rule below its headers."""
    headers, _, *lines = table.splitlines()
    return [headers, *lines]


def _levels(line: Sequence[Totals], columns: int) -> list[float | None]:
    """The hit rate in equal intervals of the last minutes, or since the start. None: no lookups.

    Between two close rows the counters are on a straight line: an interval may be shorter than that.
    """

    def at(moment: float) -> tuple[float, float]:
        i = min(max(1, bisect_right(line, moment, key=_time_of)), len(line) - 1)
        before, after = line[i - 1], line[i]
        interval = after.time - before.time
        share = max(0.0, (moment - before.time) / interval) if 0 < interval <= _APART else 0.0
        if moment >= after.time:
            share = 1.0
        hits = sum(before.hit.values()), sum(after.hit.values())
        return before.asked + share * (after.asked - before.asked), hits[0] + share * (hits[1] - hits[0])

    end = line[-1].time
    interval = min(MINUTES * 60, max(60.0, end - line[0].time))
    samples = [at(end - interval * (columns - i) / columns) for i in range(columns + 1)]
    return [
        (hit - old_hit) / (asked - old_asked) if asked - old_asked > 1e-6 else None
        for (old_asked, old_hit), (asked, hit) in pairwise(samples)
    ]


def _sources(latest: Totals, past: Totals, present: Totals, since: str, columns: int) -> list[str]:
    """The sources of the tokens: the tiers, then the reasons for misses, the most frequent first."""
    seconds = max(present.time - latest.time, 1e-3)
    asked = present.asked - past.asked
    rows = []
    for is_hit, at_end, at_now_start, at_window_start in (
        (True, present.hit, latest.hit, past.hit),
        (False, present.missed, latest.missed, past.missed),
    ):
        counts = [
            (key, (count - at_now_start.get(key, 0)) / seconds, count - at_window_start.get(key, 0))
            for key, count in at_end.items()
        ]
        for key, rate, count in sorted(counts, key=lambda entry: -entry[2]):
            if count or is_hit:
                share = count / asked if asked > 0 else 0.0
                label = f"from {key}" if is_hit else f"missed: {key}"
                rows.append((label, f"{rate:,.0f}", f"{count:,}", percent(count, asked), bar(share, 20)))
    rows = rows or [("no lookups", "0", "0", "-", bar(0, 20))]
    return _bare(table(("why missed?", "a second", f"last {since}", "share", ""), rows))


def _tier_lines(now: Snapshot, latest: Totals, present: Totals) -> list[str]:
    seconds = max(present.time - latest.time, 1e-3)

    def rate(after: Mapping[str, int], before: Mapping[str, int], tier: str) -> str:
        nbytes = max(0, after.get(tier, 0) - before.get(tier, 0))
        return f"{size_text(round(nbytes / seconds))}/s" if nbytes else "-"

    rows = [
        (
            tier["tier"],
            tier["state"],
            bar((tier["used"] or 0) / (tier["capacity"] or math.inf), 4),
            percent(tier["used"], tier["capacity"]),
            size_or_dash(tier["capacity"]),
            rate(present.up, latest.up, tier["tier"]),
            rate(present.down, latest.down, tier["tier"]),
            f"{tier['queue']:,}",
        )
        for tier in now["tiers"]
    ]
    busy = max(0.0, present.busy - latest.busy) / seconds
    rows.append(("the thread", "-", bar(busy, 4), percent(busy, 1), "-", "-", "-", "-"))
    return _bare(table(("bottleneck?", "state", "use", "", "of", "up", "down", "queue"), rows))


def plain(now: Snapshot, line: Sequence[Totals]) -> str:
    """The present state in one line, for a log."""
    counted = counted_between(line[-1], totals_before(line, NOW))
    seconds = max(counted.time, 1e-3)
    parts = [
        time.strftime("%H:%M:%S", time.localtime(now["time"])),
        f"hit {hit_rate(counted)} of {counted.asked / seconds:,.0f} tokens/s",
    ]
    for tier in now["tiers"]:
        name = tier["tier"]
        up, down = (moved.get(name, 0) / seconds for moved in (counted.up, counted.down))
        parts.append(
            f"{name} {percent(tier['used'], tier['capacity'])} full, up {size_text(round(up))}/s, down "
            f"{size_text(round(down))}/s, queue {tier['queue']:,}, {tier['state']}"
        )
    trouble = [] if now["verdicts"][0]["state"] == "good" else [working_text(now)]
    return "; ".join([*parts, count_text(client_count(now), "client"), *trouble])


class WatchedServer:
    """A server with its last answer."""

    def __init__(self, address: ServerAddress, timeout: float = TIMEOUT) -> None:
        self._remote = Console(address, timeout)
        self.ask()

    def ask(self) -> None:
        self.now = self._remote.snapshot()
        self.line = timeline(self.now, self._remote.history())


def top(address: ServerAddress, every: float = 2.0) -> None:
    """A live view until the user types q."""
    watched = WatchedServer(address, timeout=2.0)  # an error here is printed before the screen changes
    trouble = ""

    def lines(columns: int, rows: int) -> list[str]:
        return frame(watched.now, watched.line, str(address), columns, rows, trouble)

    with Screen() as screen, suppress(KeyboardInterrupt):
        while screen.show(lines, every):
            try:
                watched.ask()
                trouble = ""
            except Unreachable as error:
                trouble = str(error)
