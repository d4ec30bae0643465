"""`lmtier top --server HOST …`: many servers on one screen, a line each, the one that needs help first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from lmtier.errors import ConfigError
from lmtier.observe.words import percent
from lmtier.server.view import Hits, View
from lmtier.threads import start_thread
from lmtier.tools.console import Console, ServerAddress, Unreachable
from lmtier.tools.terminal import Screen, bar, table
from lmtier.tools.top import MINUTES, hit_rate
from lmtier.tools.views import rows_of, tables_of, working_text

_NOTHING: Hits = {"time": 0.0, "seconds": 0.0, "asked": 0, "found": {}}
_PATIENCE = 2.0  # seconds in which a server has to answer


class ServerStatus(NamedTuple):
    """One server at one time. `trouble`: why it could not be seen; then nothing else counts."""

    name: str
    trouble: str = ""
    state: str = "good"
    """The state of its verdict on whether it works: good, warn or bad."""
    verdict: str = ""
    now: Hits = _NOTHING
    """What was asked in the last seconds, and in the last minutes."""
    lately: Hits = _NOTHING
    used: float = 0.0
    """The part of the memory in use."""
    busy: float = 0.0
    clients: int = 0

    @property
    def hit_rate_15min(self) -> float:
        """The hit rate of the last minutes; 1 if nothing was asked."""
        return sum(self.lately["found"].values()) / self.lately["asked"] if self.lately["asked"] else 1.0

    @property
    def health_order(self) -> tuple[bool, int, float]:
        """The smallest needs help most."""
        return not self.trouble, ("bad", "warn", "good").index(self.state), self.hit_rate_15min


class FleetServer:
    """A server that is asked again and again, on a thread for each look: one that hangs delays no other."""

    def __init__(self, address: ServerAddress) -> None:
        self.name = str(address)
        self._address = address
        self.last = ServerStatus(self.name, "did not answer yet")
        self._is_asking = False

    def ask(self) -> None:
        """Ask once. It does nothing while an earlier question is not answered."""
        if self._is_asking:
            return
        self._is_asking = True
        try:
            self.last = status_of(self.name, Console(self._address, _PATIENCE).view(MINUTES))
        except (Unreachable, ConfigError) as error:
            self.last = ServerStatus(self.name, str(error).removeprefix(f"{self.name} "))
        finally:
            self._is_asking = False


def status_of(name: str, view: View) -> ServerStatus:
    tables, working = tables_of(view), view["parts"][0]
    memory, thread = (next(iter(rows_of(tables.get(each))), {}) for each in ("tiers", "limits"))
    return ServerStatus(
        name,
        state=working["state"],
        verdict="" if working["state"] == "good" else working_text(view),
        now=view["now"],
        lately=view["lately"],
        used=memory.get("full") or 0.0,
        busy=thread.get("in use") or 0.0,
        clients=view["clients"],
    )


def ask_all(hosts: Sequence[FleetServer]) -> list[ServerStatus]:
    """Ask every server at once. Returns what is known of each, the one that needs help most first."""
    threads = [start_thread("lmtier-look", host.ask) for host in hosts]
    until = time.monotonic() + 2 * _PATIENCE
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return sorted((host.last for host in hosts), key=lambda status: status.health_order)


def lines_of(looks: Sequence[ServerStatus], columns: int, rows: int) -> list[str]:
    """The screen: a line for all, then a line for each server."""
    reachable = [status for status in looks if not status.trouble]
    asked = sum(status.lately["asked"] for status in reachable)
    hits = sum(sum(status.lately["found"].values()) for status in reachable)
    parts = [
        f"{len(looks)} servers",
        f"hit rate of the last minutes {percent(hits / asked if asked else None)}",
    ]
    if unreachable_count := len(looks) - len(reachable):
        parts.append(f"{unreachable_count} not reached")
    if broken_count := sum(status.state == "bad" for status in reachable):
        parts.append(f"{broken_count} {'needs' if broken_count == 1 else 'need'} help")
    quits = "  q quits"
    title = ", ".join(parts)[: max(0, columns - len(quits))] + quits
    width = max(12, columns - 57)
    names = [status.name if len(status.name) <= width else f"…{status.name[1 - width :]}" for status in looks]
    headers = ("server, the worst first", "now", "15 min", "memory", "", "thread", "clients", "state")
    body = [
        (name, "-", "-", "-", bar(0, 5), "-", "-", status.trouble)
        if status.trouble
        else (
            name,
            *(hit_rate(status.now), hit_rate(status.lately), percent(status.used), bar(status.used, 5)),
            *(percent(status.busy), f"{status.clients:,}", status.verdict or "works"),
        )
        for name, status in zip(names, looks, strict=True)
    ]
    head, _, *lines = table(headers, body).splitlines()
    room = rows - 3
    if len(lines) > room:
        lines = [*lines[: room - 1], f"and {len(lines) - room + 1:,} more, which fare better"]
    return [each[:columns] for each in (title, "", head, *lines)][:rows]


def fleet(addresses: Sequence[ServerAddress], every: float) -> None:
    """A live view of many servers until the user types q."""
    hosts = [FleetServer(address) for address in addresses]
    looks = ask_all(hosts)
    with Screen() as screen, suppress(KeyboardInterrupt):
        while screen.show(partial(lines_of, looks), every):
            looks = ask_all(hosts)
