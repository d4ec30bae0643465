"""`lmtier prefetch`, `pin`, `unpin`, `pins`: prompts by their tokens; and `lmtier sessions`: who asks."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lmtier.errors import ConfigError
from lmtier.rules import hints
from lmtier.rules.sessions import MAX_SESSIONS
from lmtier.tools.commands.command import (
    Subcommand,
    address_in,
    json_option,
    seconds,
    server_option,
    whole_number,
)
from lmtier.tools.exits import Exit
from lmtier.tools.terminal import Progress, say

if TYPE_CHECKING:
    from lmtier.tools.console import Console


def _prompt_options(parser: ArgumentParser) -> None:
    server_option(parser)
    parser.add_argument(
        "tokens", type=Path, metavar="TOKENS.json", help="a JSON list of token ids, or one such list per line"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the model of these tokens; needed if the server knows several models"
    )
    parser.add_argument("--salt", default="", help="the cache salt of the requests (default: none)")
    parser.add_argument("--lora", default="", metavar="NAME", help="adapter of the requests (default: none)")
    parser.add_argument(
        "--ttl", type=seconds, metavar="TIME", help="unpin after this time: 12h, 7d (default: never)"
    )


def _prefetch_options(parser: ArgumentParser) -> None:
    _prompt_options(parser)
    parser.add_argument("--pin", default="", metavar="NAME", help="also pin the prompts, under this name")
    json_option(parser)


def _pin_options(parser: ArgumentParser) -> None:
    _prompt_options(parser)
    parser.add_argument("--name", required=True, help="the pin's name, for unpin; an older pin is replaced")


def _unpin_options(parser: ArgumentParser) -> None:
    server_option(parser)
    parser.add_argument("name", metavar="NAME", help="the name of a pin, as `lmtier pins` lists it")


def _pins_options(parser: ArgumentParser) -> None:
    server_option(parser)
    json_option(parser)


def _prefetch(args: Namespace) -> Exit:
    from lmtier.tools import prefixes
    from lmtier.tools.console import Console

    prompts = prefixes.read_prompts(args.tokens)
    ttl = _ttl(args)
    remote = Console(address_in(args))
    model = prefixes.find_model(remote, args.model, args.lora)
    chains = prefixes.keys_of(remote, model, prompts, args.salt)
    total_chunks, done = sum(map(len, chains)), 0
    with Progress() as progress:

        def come(chunks: int) -> None:
            nonlocal done
            done += chunks
            progress.at(done, total_chunks, f"{done} of {total_chunks} chunks")

        results = prefixes.load_prompts(remote, model, chains, come)
    pinned = prefixes.pin(remote, args.pin, chains, ttl) if args.pin else {}
    if args.json:
        result: dict[str, Any] = {"prompts": [asdict(each) for each in results]}
        say(json.dumps(result | ({"pinned": pinned} if args.pin else {}), indent=2))
    else:
        say(prefixes.prefetch_table(results))
        if args.pin:
            say(f"pinned as {args.pin}: {prefixes.text_of(pinned)}")
    return Exit.NO if any(each.missing for each in results) else Exit.DONE


def _pin(args: Namespace) -> Exit:
    from lmtier.tools import prefixes
    from lmtier.tools.console import Console

    prompts = prefixes.read_prompts(args.tokens)
    ttl = _ttl(args)
    remote = Console(address_in(args))
    model = prefixes.find_model(remote, args.model, args.lora)
    chains = prefixes.keys_of(remote, model, prompts, args.salt)
    pinned = prefixes.pin(remote, args.name, chains, ttl)
    chunks = len({key for chain in chains for key in chain})
    say(f"pinned as {args.name}, {chunks} chunks: {prefixes.text_of(pinned)}; others as soon as they come")
    return Exit.DONE


def _ttl(args: Namespace) -> float | None:
    if args.ttl == 0:
        raise ConfigError("--ttl: must be more than 0; without it, pins stay for ever")
    ttl: float | None = args.ttl
    return ttl


def _unpin(args: Namespace) -> Exit:
    from lmtier.tools.console import Console

    was_pinned = Console(address_in(args)).post("/api/unpin", {"name": args.name}, bool)
    say(f"unpinned {args.name}" if was_pinned else f"nothing is pinned as {args.name}")
    return Exit.DONE if was_pinned else Exit.NO


def _pins(args: Namespace) -> Exit:
    from lmtier.tools import prefixes
    from lmtier.tools.console import Console

    found = prefixes.pinned(Console(address_in(args)))
    if args.json:
        say(json.dumps([each._asdict() for each in found], indent=2))
    else:
        say(prefixes.pins_table(found) if found else "nothing is pinned")
    return Exit.DONE


# ---- sessions


def _sessions_options(parser: ArgumentParser) -> None:
    server_option(parser)
    parser.add_argument(
        "--most", type=whole_number, default=20, metavar="N", help="how many (default: %(default)s)"
    )
    parser.add_argument("--end", metavar="NAME", help="end this one: what only it needs leaves first")
    parser.add_argument("--salt", default="", help="with --end: its requests' cache salt (default: none)")
    json_option(parser)


def _sessions(args: Namespace) -> Exit:
    from lmtier.tools import views
    from lmtier.tools.console import Console

    if not 0 < args.most <= MAX_SESSIONS:
        raise ConfigError(
            f"--most {args.most}: must be 1 to {MAX_SESSIONS}, which is what a server remembers"
        )
    remote = Console(address_in(args))
    if args.end:
        return _end_session(remote, args.end, args.salt)
    found = remote.get("/api/sessions", list, most=args.most)
    try:
        text = json.dumps(found, indent=2) if args.json else views.sessions_table(found)
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ConfigError(f"{remote.address} sent an invalid list of sessions") from None
    say(text)
    return Exit.DONE


def _end_session(remote: Console, name: str, salt: str) -> Exit:
    envelope = hints.envelope(uuid4().hex, (hints.END, {"session": name}))
    (outcome,) = remote.post("/api/hints", {**envelope, "salt": salt}, list)
    is_done = outcome["result"] == hints.DONE
    say(f"{name} is over" if is_done else f"{name}: {outcome['why']}")
    return Exit.DONE if is_done else Exit.NO


COMMANDS = (
    Subcommand(
        "prefetch", "load prompts into memory before requests ask for them", _prefetch_options, _prefetch
    ),
    Subcommand("pin", "keep prompts from being evicted, where they are", _pin_options, _pin),
    Subcommand("unpin", "let go of what was pinned under a name", _unpin_options, _unpin),
    Subcommand("pins", "what is pinned", _pins_options, _pins),
    Subcommand(
        "sessions", "which agent sessions ask, and what is kept of them", _sessions_options, _sessions
    ),
)
