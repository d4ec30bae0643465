"""`lmtier forget`: make a server, or the tiers of a configuration, forget a tenant who leaves."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from getpass import getuser
from pathlib import Path
from typing import Any

from lmtier import config
from lmtier.errors import ConfigError, LMTierError
from lmtier.format.keys import TENANT_BYTES, tenant
from lmtier.tools.commands.command import Subcommand, json_option, server_option
from lmtier.tools.exits import Exit
from lmtier.tools.terminal import say

_PATIENCE = 60.0  # seconds for the tiers
_OFFLINE_ROOM = "cpu://?capacity=1MiB"


def _options(parser: ArgumentParser) -> None:
    server_option(parser)
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("tenant", nargs="?", metavar="TENANT", help="the cache salt of its requests")
    who.add_argument("--salt-file", type=Path, metavar="FILE", help="the salt is its first line")
    who.add_argument("--share", metavar="NAME", help="who has this share, in the settings")
    who.add_argument("--id", metavar="HEX", help="the 8 digits of a tenant in keys and file names")
    parser.add_argument(
        "--offline", action="store_true", help="no server runs: open the tiers of the settings instead"
    )
    parser.add_argument(
        *("--tier", "-t"), action="append", metavar="URL", help="with --offline: a tier to open"
    )
    json_option(parser)


def _forget(args: Namespace) -> Exit:
    from lmtier.tools.views import NOT_KNOWN, NOT_YET, forget_outcome, forget_report_text

    report = _offline(args) if args.offline or args.tier else _online(args)
    say(json.dumps(report, indent=2) if args.json else forget_report_text(report))
    return Exit.NO if forget_outcome(report) in (NOT_YET, NOT_KNOWN) else Exit.DONE


def _online(args: Namespace) -> dict[str, Any]:
    from lmtier.tools.commands.command import address_in
    from lmtier.tools.console import Console

    who = {"share": args.share} if args.share else {"id": _id(args).hex()}
    remote, arguments = Console(address_in(args)), {**who, "seconds": _PATIENCE}
    report: dict[str, Any] = remote.post("/api/forget", arguments, timeout=3 * _PATIENCE)
    return report


def _offline(args: Namespace) -> dict[str, Any]:
    from lmtier.core.cache import Cache
    from lmtier.core.forgetting import forget
    from lmtier.tools.logs import write_log

    settings, _ = config.load(args.config)
    urls = tuple(args.tier) if args.tier else tuple(spec.url for spec in settings.cache_tiers[1:])
    lower_urls = [url for url in urls if not url.startswith(("cpu://", "gpu://"))]
    if not lower_urls:
        raise ConfigError("--offline: the settings name no tier below memory; give --config or --tier")
    if args.share:
        salts = [share.salt for share in settings.shares if share.name == args.share]
        if not salts:
            raise ConfigError(f"--share {args.share}: the settings have no share of that name")
        tenant_id = tenant(salts[0])
    else:
        tenant_id = _id(args)
    log_handler = write_log("warning", "text")
    try:
        with Cache(replace(settings, tiers=(_OFFLINE_ROOM, *lower_urls), prefault=False)) as cache:
            if not cache.is_warm:
                raise LMTierError("a tier could not be searched; its log lines say why")
            return forget(cache, tenant_id, _PATIENCE, f"user {getuser()}, offline,").fields()
    finally:
        log_handler.close()


def _id(args: Namespace) -> bytes:
    """The tenant as keys have it. Its salt stays here."""
    if args.id is not None:
        try:
            digits = bytes.fromhex(args.id)
        except ValueError:
            digits = b""
        if len(digits) != TENANT_BYTES:
            raise ConfigError(f"--id {args.id!r}: a tenant has {2 * TENANT_BYTES} hexadecimal digits")
        return digits
    salt = args.tenant
    if args.salt_file is not None:
        salt = config.first_line("--salt-file", args.salt_file)
    if not salt:
        raise ConfigError("requests without a salt belong to no tenant; `lmtier clear` deletes their KV")
    return tenant(salt)


COMMANDS = (
    Subcommand(
        "forget",
        "destroy a tenant's keys and KV, everywhere",
        _options,
        _forget,
        "Destroys the keys of a tenant, deletes its chunks in every tier, overwrites its memory, tells other "
        "servers that share the keys, and says what was reached. Exit code 1: something is left, or no such "
        "tenant is known.",
    ),
)
