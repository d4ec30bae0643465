"""`lmtier top`: the last minutes of a server on one screen, or a line at a time."""

from __future__ import annotations

from contextlib import suppress
from shutil import get_terminal_size
from textwrap import wrap

from lmtier.observe.words import percent
from lmtier.server.view import Hits, Table, View
from lmtier.tools.console import Console, ServerAddress, Unreachable
from lmtier.tools.terminal import Screen, count_text, duration_text, spark
from lmtier.tools.views import cell_text, headline, rows_of, table_text, tables_of, working_text

MINUTES = 15.0
"""The minutes of history that a server remembers and `top` shows."""
_TIERS = "tier, state, full, capacity, loading, storing, queue"
_WIDEST = 28  # letters of a name
_CLIENTS = "kind, name, address, age, received, sent"


def hit_rate(hits: Hits) -> str:
    return percent(sum(hits["found"].values()) / hits["asked"] if hits["asked"] else None)


def frame(view: View, name: str, columns: int, rows: int, trouble: str = "") -> list[str]:
    """The screen of `top` on a terminal of this size. It answers six questions in a fixed order."""
    tables = tables_of(view)
    quits = "  q quits"
    title = headline(view, name)[: max(0, columns - len(quits))] + quits
    works = trouble or f"works?   {working_text(view)}"
    header = [
        *([] if trouble else [title]),
        *wrap(works, columns, max_lines=2, placeholder="…"),
        f"saves?   hit rate   now {hit_rate(view['now'])}   "
        f"last {duration_text(view['lately']['seconds'])} {hit_rate(view['lately'])}   "
        f"since the start {hit_rate(view['start'])}",
        spark(
            sum(each["found"].values()) / each["asked"] if each["asked"] > 1e-6 else None
            for each in view["columns"]
        ),
    ]
    sources = _bare(tables.get("tokens"), "tokens, a second, lately, share", "why missed?", bars=20)
    del sources[1:2]  # all that were asked
    tiers = _bare(tables.get("tiers"), _TIERS, "bottleneck?", bars=4)
    tiers += _bare(tables.get("limits"), bars=4)[1:2]  # that of the thread
    curve = _bare(tables.get("curve"), head="more memory?")
    connected = rows_of(tables.get("clients"))
    few = min(2, len(connected))  # clients that are always visible, however long the rest is
    room = rows - len(header) - len(tiers) - len(curve) - few - 2  # the header of the clients, and their rest
    sources = sources[: max(2, room)]
    room = rows - len(header) - len(sources) - len(tiers) - len(curve) - 1
    most = room if len(connected) <= room else max(0, room - 1)
    clients = _bare(tables.get("clients"), _CLIENTS, most=most) or ["no clients"]
    sections = [each for each in (header, sources, tiers, curve, clients) if each]
    blank_rows = rows - sum(map(len, sections))
    lines = [*sections[0]]
    for section in sections[1:]:  # an empty line above each, as far as there is room
        lines += [""] * (blank_rows > 0) + section
        blank_rows -= 1
    return [each[:columns] for each in lines[:rows]]


def _bare(
    shown: Table | None, names: str = "", head: str = "", bars: int = 0, most: int | None = None
) -> list[str]:
    """The lines of a table without the rule below its headers; none if there is no such table."""
    lines = table_text(shown, names, most, head, bars, _WIDEST).splitlines() if shown is not None else []
    return lines[:1] + lines[2:]


def plain(view: View) -> str:
    """The present state in one line, for a log."""
    now, tables = view["now"], tables_of(view)
    parts = [
        cell_text(view["time"], "time"),
        f"hit {hit_rate(now)} of {now['asked'] / max(1e-3, now['seconds']):,.0f} {view['what']}/s",
    ]
    for tier in rows_of(tables.get("tiers")):
        up, down = (cell_text(tier[way], "rate") for way in ("loading", "storing"))
        full, queue = cell_text(tier["full"], "share"), cell_text(tier["queue"], "count")
        parts.append(f"{tier['tier']} {full} full, up {up}, down {down}, queue {queue}, {tier['state']}")
    trouble = [] if view["parts"][0]["state"] == "good" else [working_text(view)]
    return "; ".join([*parts, count_text(view["clients"], "client"), *trouble])


def top(address: ServerAddress, every: float = 2.0) -> None:
    """A live view until the user types q."""
    remote, trouble = Console(address, timeout=2.0), ""
    view = remote.view(
        MINUTES, get_terminal_size().columns
    )  # an error here is printed before the screen changes

    def lines(columns: int, rows: int) -> list[str]:
        return frame(view, str(address), columns, rows, trouble)

    with Screen() as screen, suppress(KeyboardInterrupt):
        while screen.show(lines, every):
            try:
                view, trouble = remote.view(MINUTES, screen.size[0]), ""
            except Unreachable as error:
                trouble = str(error)
