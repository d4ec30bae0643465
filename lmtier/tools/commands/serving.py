"""`lmtier serve` and `lmtier config`: run a server, and show its settings."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtier import config
from lmtier._version import __version__
from lmtier.errors import ConfigError, excerpt, without_secrets
from lmtier.tools.commands.command import SET, Subcommand, config_option, json_option
from lmtier.tools.exits import Exit
from lmtier.tools.logs import write_log
from lmtier.tools.terminal import say, size_text, table

if TYPE_CHECKING:
    from lmtier.server.serve import Server

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_FOR = {
    "redis": "any Redis client, and other hosts",
    "unix": "engines on this host, which also map the slab",
    "kv-events": "routers: events of chunks that enter or leave a tier",
    "kv-replay": "routers: to get missed events again",
}
_TIER = ("tier", "location", "capacity", "write", "policy", "options")


# ---- serve


def _serve_options(parser: ArgumentParser) -> None:
    config_option(parser)
    parser.add_argument(
        *("--tier", "-t"),
        action="append",
        metavar="URL",
        help="a tier; repeat it, fastest first: cpu://?capacity=32GiB, disk:///nvme?capacity=500GiB",
    )
    parser.add_argument(
        "--takeover",
        metavar="SOCKET",
        help="take over from the server on this Unix socket: its memory, its chunks and its engines",
    )
    parser.add_argument("--unix", metavar="PATH", help="the Unix socket for engines on this host")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="the address for Redis clients and other hosts; '' for none"
    )
    parser.add_argument(
        "--http", metavar="HOST:PORT", help="the address for browsers and Prometheus; '' for none"
    )
    parser.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish KV events for routers at this ZMQ address: tcp://*:5557",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="a file with the token that clients must send, in its first line"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="serve every user of this host, and other hosts, without a token",
    )
    parser.add_argument("--gpu-hour", metavar="PRICE", help="of an engine's GPUs: stats say what hits save")
    parser.add_argument("--log-level", choices=config.LEVELS, help="default: info")
    parser.add_argument("--log-format", choices=config.FORMATS, help="default: text")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=SET)


def _serve(args: Namespace) -> Exit:
    from lmtier.server.process import give_way, leave_no_core
    from lmtier.server.serve import Server

    leave_no_core()
    give_way()
    effective, serving, has_default_tiers = _settings(args)
    lines = write_log(serving.log_level, serving.log_format)
    try:
        server = Server(effective, serving, Path(args.takeover) if args.takeover else None)
        server.obey_signals()
        lines.flush()  # warnings of its start are in the log before it answers
        say(_screen(server, has_default_tiers))
        server.run()
        return Exit.DONE
    finally:
        lines.close()


def _settings(args: Namespace) -> tuple[config.Config, config.ServerConfig, bool]:
    """The settings of the cache and of the server, and whether the tiers are the default ones."""
    cache_values, server_values = _overrides(args.set)
    if args.tier:
        cache_values = {"tiers": args.tier} | cache_values
    flags = {
        name: getattr(args, name)
        for name in (
            *("unix", "listen", "http", "kv_events", "token_file", "insecure", "log_level", "log_format"),
            "gpu_hour",
        )
    }
    server_values = {name: value for name, value in flags.items() if value is not None} | server_values
    effective, origins = config.load(args.config, overrides=cache_values)
    serving, _ = config.load_server(args.config, overrides=server_values)
    return effective, serving, origins["tiers"] == "default"


def _screen(server: Server, has_default_tiers: bool) -> str:
    """The text that a new server prints: its tiers and addresses."""
    from lmtier.server.access import Role

    serving = server.serving
    scheme = "https" if serving.tls_cert else "http"
    lines = [f"lmtier {__version__}, cache server, process {os.getpid()}", ""]
    lines.append(table(_TIER[:-1], (_described(spec)[:-1] for spec in server.cache.config.all_tiers)))
    if has_default_tiers:
        lines.append("These are the default tiers. Set yours with --tier or in the configuration file.")
    lines.append("")
    rows = []
    for what, address in server.addresses:
        if what == "http":
            host, _, port = address.rpartition(":")
            url = f"{scheme}://{_ANYWHERE.get(host, host)}:{port}"
            rows += [(what, address, f"{url}/ in a browser, {url}/metrics for Prometheus")]
        else:
            rows += [(what, address, _FOR[what])]
    lines += [table(("listens", "address", "for"), rows), ""]
    tokens = server.tokens
    token = "Clients must send the token" if tokens.needs_token else "Clients need no token"
    if not (tokens.needs_token or serving.tls_ca or serving.insecure):
        token = "Clients of this user and of root need no token, and others are not served"
    if Role.ADMIN in tokens:
        token += ", and another one for administration"
    tls = "TLS is on" if serving.tls_cert else "TLS is off"
    if serving.tls_ca:
        tls += ", and clients need a certificate"
    unix = " The Unix socket needs no token: only its owner and root may use it." if serving.unix else ""
    lines.append(f"{token}; {tls}.{unix}")
    return "\n".join(lines)


# ---- config


def _config_options(parser: ArgumentParser) -> None:
    config_option(parser)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=SET)
    json_option(parser)


def _config(args: Namespace) -> Exit:
    cache_values, server_values = _overrides(args.set)
    effective, origins = config.load(args.config, overrides=cache_values)
    serving, serving_origins = config.load_server(args.config, overrides=server_values)
    values: dict[str, Any] = {name: getattr(effective, name) for name in origins}
    values["tiers"] = [without_secrets(spec.url) for spec in effective.all_tiers]
    values["shares"] = " ".join(map(str, effective.shares))
    serve: dict[str, Any] = {name: getattr(serving, name) for name in serving_origins}
    tiers = [_described(spec) for spec in effective.all_tiers]
    token, token_origin = _token(serving.token_file, os.environ)
    if args.json:
        result: dict[str, Any] = {
            name: {"value": value, "origin": origins[name]} for name, value in values.items()
        }
        result["serve"] = {
            name: {"value": value, "origin": serving_origins[name]} for name, value in serve.items()
        }
        result["serve"]["token"] = {"value": token, "origin": token_origin}
        say(json.dumps(result, indent=2))
        return Exit.DONE
    urls = values.pop("tiers")
    rows = [(name, _written(value), origins[name]) for name, value in values.items()]
    rows += [(f"tiers[{i}]", url, origins["tiers"]) for i, url in enumerate(urls)]
    rows += [(f"serve.{name}", _written(value), serving_origins[name]) for name, value in serve.items()]
    rows += [("serve.token", token or "-", token_origin)]
    say(table(("setting", "value", "origin"), rows))
    say()
    say(table(_TIER, tiers))
    return Exit.DONE


def _token(file: str, env: Mapping[str, str]) -> tuple[str | None, str]:
    """Whether there is a token, and its source; never the token itself."""
    if file:
        return "(not shown)", file
    return ("(not shown)", config.TOKEN_VARIABLE) if env.get(config.TOKEN_VARIABLE) else (None, "default")


def _written(value: object) -> str:
    return "-" if value == "" else str(value)


def _overrides(pairs: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of --set: for a cache, and for its server."""
    cache_values: dict[str, Any] = {}
    server_values: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--set {excerpt(pair)}: write it as name=value")
        if name.startswith("serve."):
            server_values[name.removeprefix("serve.")] = value
        else:
            cache_values[name] = value
    return cache_values, server_values


def _described(spec: config.TierSpec) -> Sequence[str]:
    if spec.scheme not in ("cpu", "gpu"):
        from lmtier.tiers.registry import load_tier

        load_tier(spec.scheme)  # an unknown scheme is an error here, not first when the engine starts
    spec = config.TierSpec.parse(without_secrets(spec.url))
    capacity = "-" if spec.capacity is None else size_text(spec.capacity)
    options = " ".join(f"{name}={value}" for name, value in spec.options.items())
    return spec.scheme, spec.location or "-", capacity, spec.write, spec.policy, options or "-"


COMMANDS = (
    Subcommand("serve", "run the cache server until a signal stops it", _serve_options, _serve),
    Subcommand(
        "config", "print the effective configuration and where it came from", _config_options, _config
    ),
)
