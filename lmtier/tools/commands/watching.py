"""`lmtier ping`, `stats`, `top`, `explain` and `clear`: requests to a server."""

from __future__ import annotations

import json
import re
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from datetime import time as clock_time
from itertools import count, islice
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from lmtier.errors import ConfigError, LMTierError, excerpt
from lmtier.tools.commands.command import (
    Subcommand,
    address_in,
    addresses_in,
    json_option,
    seconds,
    server_option,
    servers_option,
    whole_number,
)
from lmtier.tools.exits import Exit
from lmtier.tools.terminal import say, show_again

if TYPE_CHECKING:
    from lmtier.tools.console import ServerAddress

_EVERY = 2.0  # seconds between two looks at a server
_AGAIN = 0.1  # seconds between two attempts to reach one that starts


def _ping_options(parser: ArgumentParser) -> None:
    server_option(parser)
    parser.add_argument(
        "--wait", type=seconds, default=0.0, metavar="TIME", help="wait up to this long for it to be ready"
    )


def _ping(args: Namespace) -> Exit:
    from lmtier.tools.console import Console
    from lmtier.tools.views import ping_text

    until = time.monotonic() + args.wait
    while True:
        try:
            remote = Console(address_in(args))
            is_ready = not remote.view()["why_not_ready"]
            if is_ready or time.monotonic() >= until:
                say(ping_text(remote))
                return Exit.DONE if is_ready else Exit.NO
        except LMTierError:
            if time.monotonic() >= until:
                raise
        time.sleep(_AGAIN)


# ---- stats, top


def _stats_options(parser: ArgumentParser) -> None:
    server_option(parser)
    parser.add_argument("--watch", action="store_true", help=f"repeat every {_EVERY:g} s")
    json_option(parser, "print JSON; with --watch, one line each time")
    _times_option(parser)


def _top_options(parser: ArgumentParser) -> None:
    servers_option(parser)
    _times_option(parser)


def _times_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--times", type=_times, metavar="N", help="stop after N times, if stdout is no terminal"
    )


def _times(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or not int(text):
        raise ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def _stats(args: Namespace) -> Exit:
    from lmtier.tools.console import Console
    from lmtier.tools.views import stats

    address = address_in(args)
    ends = (KeyboardInterrupt,) if args.watch else ()
    remote = Console(address)
    with suppress(*ends):
        for _ in _looks(args.times if args.watch else 1):
            if args.json:
                say(json.dumps(remote.snapshot(), indent=None if args.watch else 2))
            else:
                (show_again if args.watch else say)(stats(remote.view(), str(address)))
    return Exit.DONE


def _top(args: Namespace) -> Exit:
    from lmtier.tools.console import Console
    from lmtier.tools.top import MINUTES, plain, top

    address, *others = addresses_in(args)
    if others:
        return _fleet([address, *others], args.times)
    if sys.stdout.isatty():
        top(address, _EVERY)
        return Exit.DONE
    remote = Console(address)
    with suppress(KeyboardInterrupt):
        for _ in _looks(args.times):
            say(plain(remote.view(MINUTES)))
    return Exit.DONE


def _fleet(addresses: list[ServerAddress], times: int | None) -> Exit:
    from lmtier.tools.fleet import FleetServer, ask_all, fleet, lines_of

    if sys.stdout.isatty():
        fleet(addresses, _EVERY)
        return Exit.DONE
    hosts = [FleetServer(address) for address in addresses]
    with suppress(KeyboardInterrupt):
        for _ in _looks(times):
            say("\n".join(lines_of(ask_all(hosts), 200, len(hosts) + 3)).replace("  q quits", "") + "\n")
    return Exit.DONE


def _looks(times: int | None) -> Iterator[int]:
    for round_number in islice(count(), times):
        if round_number:
            time.sleep(_EVERY)
        yield round_number


# ---- explain


def _explain_options(parser: ArgumentParser) -> None:
    server_option(parser)
    parser.add_argument(
        "--last",
        type=whole_number,
        default=20,
        metavar="N",
        help="how many lookups to show (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", action="store_true", help="show the token ids where prompts differ, if engines send them"
    )
    json_option(parser)


def _explain(args: Namespace) -> Exit:
    from lmtier.server.explain import MAX_LOOKUPS
    from lmtier.tools.console import Console
    from lmtier.tools.views import explanations_text

    if not 0 < args.last <= MAX_LOOKUPS:
        raise ConfigError(f"--last {args.last}: must be 1 to {MAX_LOOKUPS}, which is what a server remembers")
    found = Console(address_in(args)).explanations(args.last, tokens=args.tokens)
    say(json.dumps(found, indent=2) if args.json else explanations_text(found, get_terminal_size().columns))
    return Exit.DONE


# ---- clear


def _clear_options(parser: ArgumentParser) -> None:
    server_option(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--namespace", metavar="MODEL", help="delete the KV of one model, by the name that its engine uses"
    )
    what.add_argument("--all", action="store_true", help="delete everything, also values of Redis clients")
    parser.add_argument(
        "--stored-by",
        metavar="ENGINE",
        help="delete only KV that this engine stored: its name in `lmtier top` and its host, as in "
        "“vllm scheduler @host”, or a pattern, “*@host”",
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="delete only KV that was stored since then: 2026-11-24T09:30, 09:30, or 90m, 12h, 3d ago",
    )
    parser.add_argument("--force", action="store_true", help="also delete KV that is in use now")


def _clear(args: Namespace) -> Exit:
    from lmtier.tools.console import Console
    from lmtier.tools.views import clear

    if args.namespace == "":
        raise ConfigError("--namespace needs the name of a model; --all forgets everything")
    if args.stored_by == "":
        raise ConfigError("--stored-by needs the name of an engine; --all forgets everything")
    is_suspect = args.stored_by is not None or args.since is not None
    if args.namespace is None and not args.all and not is_suspect:
        raise ConfigError("nothing to delete is given: use --namespace, --stored-by, --since or --all")
    if args.all and is_suspect:
        raise ConfigError("--all deletes everything; leave it out to use --stored-by or --since")
    since = None if args.since is None else _moment(args.since, datetime.now().astimezone())
    remote = Console(address_in(args))
    say(clear(remote, args.namespace, by=args.stored_by, since=since, force=args.force))
    return Exit.DONE


def _moment(text: str, now: datetime) -> datetime:
    """A time in the past: a date, a time of day, or how long ago; by this machine's time zone."""
    try:
        if (age_match := re.fullmatch(r"(\d+)([smhd])", text)) is not None:
            unit = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[age_match[2]]
            return now - timedelta(**{unit: int(age_match[1])})
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            # The offset is that of this zone at that time: clocks may have changed since.
            today = datetime.combine(now.date(), clock_time.fromisoformat(text.zfill(5)))
            moment = today.astimezone()
            return moment if moment <= now else (today - timedelta(days=1)).astimezone()
        moment = datetime.fromisoformat(text)
        moment = moment if moment.tzinfo is not None else moment.astimezone()
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--since {excerpt(text)} is not a time: write it like 2026-11-24T09:30, 09:30, 90m, 12h or 3d"
        ) from None
    if moment > now:
        raise ConfigError(f"--since {excerpt(text)} is in the future")
    return moment


# ---- set


def _set_options(parser: ArgumentParser) -> None:
    server_option(parser)
    parser.add_argument(
        *("settings",),
        nargs="+",
        metavar="NAME=VALUE",
        help="cpu.capacity=16GiB, disk.policy=lru, disk.ttl=7d (0: none), log_level=debug",
    )


def _set(args: Namespace) -> Exit:
    from lmtier.tools.console import Console

    settings: dict[str, str] = {}
    for pair in args.settings:
        name, separator, value = pair.partition("=")
        if not separator or not value:
            raise ConfigError(f"{pair}: write it as name=value")
        settings[name] = value
    for line in Console(address_in(args)).post("/api/set", {"settings": settings}, list):
        say(str(line))
    say("until the server ends: change its settings too, so that the next one has them")
    return Exit.DONE


COMMANDS = (
    Subcommand("ping", "check that a server runs and is ready", _ping_options, _ping),
    Subcommand("stats", "show a server's hits, misses and tiers", _stats_options, _stats),
    Subcommand("top", "watch a server live, or several; q quits", _top_options, _top),
    Subcommand("explain", "say why the last prompts missed", _explain_options, _explain),
    Subcommand("set", "change a setting of a server that runs", _set_options, _set),
    Subcommand("clear", "delete stored KV from a server and its tiers", _clear_options, _clear),
)
