"""The type of a subcommand, the options that several share, and how commands find a server."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from lmtier import config
from lmtier.errors import ConfigError, excerpt
from lmtier.tools.exits import Exit

if TYPE_CHECKING:
    from lmtier.tools.console import ServerAddress

_ADDRESS = (
    "host:port, the path of a Unix socket, redis://host:port, or rediss:// for TLS (default: the address in"
    " the [serve] settings)"
)
SET = "override one setting; for a setting of the server: serve.NAME=VALUE"


class Subcommand(NamedTuple):
    """A word after `lmtier`."""

    name: str
    help: str
    options: Callable[[ArgumentParser], None]
    """Adds them to the command's own parser."""
    run: Callable[[Namespace], Exit]
    description: str = ""


# ---- the types of options


T = TypeVar("T")


def _typed(read: Callable[[str], T]) -> Callable[[str], T]:
    """`read` for argparse, which names the option in its errors."""

    def of(text: str) -> T:
        try:
            return read(text)
        except ConfigError as error:
            raise ArgumentTypeError(str(error)) from None

    return of


seconds = _typed(config.parse_seconds)
nbytes = _typed(config.parse_size)


def whole_number(text: str) -> int:
    """A number of things. What is too many for one command is a mistake."""
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise ArgumentTypeError(f"{excerpt(text)} is not a whole number of up to 9 digits")
    return int(text)


def rate(text: str) -> float:
    """A number of things in a second, or of money in an hour."""
    try:
        if isfinite(number := float(text)):
            return number
    except ValueError:
        pass
    raise ArgumentTypeError(f"{excerpt(text)} is not a number; write it like 10000 or 2.5")


# ---- options


def config_option(parser: ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="a TOML file (default: $LMTIER_CONFIG_FILE)")


def json_option(parser: ArgumentParser, help: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=help)


def ensure_directory(directory: Path | None) -> Path | None:
    """The folder of --dir, created if needed."""
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--dir {directory}: {error.strerror}") from None
    return directory


# ---- a server


def server_option(parser: ArgumentParser) -> None:
    _access_options(parser)
    parser.add_argument("--server", dest="address", metavar="ADDRESS", help=_ADDRESS)


def servers_option(parser: ArgumentParser) -> None:
    """Several servers, with the same credentials."""
    _access_options(parser)
    parser.add_argument(
        *("--server",),
        dest="addresses",
        action="append",
        metavar="ADDRESS",
        help=f"{_ADDRESS}; repeat it to watch several",
    )


def addresses_in(args: Namespace) -> list[ServerAddress]:
    addresses = args.addresses or [None]
    return [address_in(Namespace(**{**vars(args), "address": address})) for address in addresses]


def _access_options(parser: ArgumentParser) -> None:
    config_option(parser)
    parser.add_argument(
        "--token-file", metavar="FILE", help="the token is its first line (default: $LMTIER_TOKEN)"
    )
    parser.add_argument(
        "--ca", metavar="FILE", help="TLS: the certificate authority to trust (default: the system's)"
    )
    parser.add_argument("--cert", metavar="FILE", help="TLS: a client certificate, if the server wants one")
    parser.add_argument("--key", metavar="FILE", help="TLS: the key of --cert")


def address_in(args: Namespace) -> ServerAddress:
    from lmtier.server.access import own_token
    from lmtier.tools.console import address_from_settings, parse_address

    if args.address:
        address = parse_address(args.address)
        token = address.token or os.environ.get(config.TOKEN_VARIABLE) or None
    else:
        serving, _ = config.load_server(args.config)
        address = address_from_settings(serving)
        token = None if args.token_file or address.unix else own_token(serving)
    if args.token_file:
        token = config.first_line("--token-file", args.token_file).strip()
    address = replace(address, token=token)
    if args.ca:
        address = replace(address, ca=args.ca, is_pinned=False)
    return replace(address, cert=args.cert, key=args.key or "") if args.cert else address
