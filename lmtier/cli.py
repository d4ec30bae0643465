"""The `lmtier` command: a function for each of its words, which `lmtier --help` lists."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from datetime import time as clock_time
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from queue import Full, Queue
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from lmtier import __version__, config
from lmtier.errors import ConfigError, LMTierError, TierError
from lmtier.lifetimes import MAX_TTL
from lmtier.terminal import Progress, complain, say, show_again, size, table
from lmtier.workers import start_thread

if TYPE_CHECKING:
    from lmtier.server.console import Address
    from lmtier.server.serve import Server

# Exit codes: 0 all is well, 1 something was found (below a floor, a corrupt object, no server), 2 misuse.

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_FOR = {
    "redis": "any Redis client, and other hosts",
    "unix": "engines on this host, who also get the slab",
    "kv-events": "routers: what comes to the tiers and leaves them",
    "kv-replay": "routers that missed some of it",
}
_LINES = 1000  # of the log, that may wait
_LAST_LINES = 1.0  # seconds for them in the end
_EVERY = 2.0  # seconds between two looks at a server


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except LMTierError as error:
        complain(str(error))
        return 2 if isinstance(error, ConfigError | TierError) else 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmtier", description="Tiered KV-cache offload for LLM serving.")
    parser.add_argument("--version", action="version", version=f"lmtier {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_server_commands(commands)

    bench = commands.add_parser("bench", help="measure every path beside its physical limit")
    bench.add_argument("--only", default="", metavar="PATTERN", help="paths whose name contains this")
    bench.add_argument("--dir", type=Path, help="where the disk paths write, in a directory of their own")
    bench.add_argument("--repeat", type=int, default=1, metavar="N", help="N times as many rounds")
    bench.add_argument(
        "--quick", action="store_true", help="a smoke test: tiny sizes, floors are not enforced"
    )
    bench.add_argument("--gpu", action="store_true", help="a GPU's memory and the slab, and nothing else")
    bench.set_defaults(run=_bench)

    show = commands.add_parser("config", help="print the effective configuration and where it came from")
    show.add_argument("--config", metavar="FILE", help="a TOML file (default: $LMTIER_CONFIG_FILE)")
    show.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=_SET)
    show.set_defaults(run=_config)

    demo = commands.add_parser("demo", help="a small model serves three users, from every tier")
    demo.add_argument(
        "--dir", type=Path, help="where the disk tier goes, in a directory of its own unless --keep"
    )
    demo.add_argument("--keep", action="store_true", help="leave the server running, and its disk")
    demo.set_defaults(run=_demo)

    verify = commands.add_parser("verify", help="read every object of a disk tier and report what is wrong")
    verify.add_argument("dir", type=Path, metavar="DIR")
    verify.add_argument("--fix", action="store_true", help="delete what is corrupt or orphaned")
    verify.set_defaults(run=_verify)

    simulate = _add_simulate(commands)
    sizes = _add_size(commands)

    for command in (bench, show, verify, simulate, sizes):
        command.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _add_simulate(commands: Any) -> Any:
    simulate = commands.add_parser(
        "simulate",
        help="what a cache would have done with a trace of requests",
        description="Replay a trace through the real cache without its bytes. Commas in --policy, --write and"
        " in the options of a tier make one configuration of each: cpu://?capacity=16GiB,64GiB.",
    )
    what = simulate.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "trace", nargs="?", type=Path, help="a request log: of Mooncake's, Qwen-Bailian's or Azure's format"
    )
    what.add_argument("--synthetic", choices=("multi-turn", "agentic", "rag"), help="make one up instead")
    simulate.add_argument("--requests", type=int, default=5_000, metavar="N", help="how many to make up")
    simulate.add_argument("--seed", type=int, default=1, metavar="N", help="the same seed, the same trace")
    simulate.add_argument(
        *("--tier", "-t"),
        action="append",
        required=True,
        metavar="URL",
        help="a tier, the top one first: cpu://?capacity=64GiB, disk://?capacity=1TiB",
    )
    simulate.add_argument("--policy", default="", metavar="NAME,…", help="of all tiers: lru, arc, …")
    simulate.add_argument(
        "--write", default="", metavar="RULE,…", help="of all lower tiers: always, reused, …"
    )
    model = simulate.add_mutually_exclusive_group()
    model.add_argument(
        "--bytes-per-token", default="128KiB", metavar="SIZE", help="KV of the model (default: %(default)s)"
    )
    model.add_argument(
        "--model", type=Path, metavar="CONFIG.json", help="or the model itself, as `size` takes"
    )
    simulate.add_argument("--chunk-tokens", type=int, metavar="N", help="default: 256, or the trace's blocks")
    simulate.add_argument("--block-tokens", type=int, metavar="N", help="of the trace, if it does not tell")
    simulate.add_argument(
        "--prefill", type=float, default=10_000, metavar="N", help="tokens a second that the engine computes"
    )
    simulate.add_argument(
        *("--bandwidth",),
        action="append",
        default=[],
        metavar="TIER=SIZE",
        help="bytes a second: cpu=20GB, disk=3GB (default: these; others 1GB)",
    )
    simulate.add_argument(
        *("--latency",),
        action="append",
        default=[],
        metavar="TIER=TIME",
        help="until the first byte: disk=1ms (default: this; others 2ms)",
    )
    simulate.add_argument("--plot", type=Path, metavar="FILE", help="hits by capacity: out.svg, out.png")
    simulate.set_defaults(run=_simulate)
    return simulate


def _add_size(commands: Any) -> Any:
    sizes = commands.add_parser("size", help="how much KV a model makes, and how much of it each tier holds")
    sizes.add_argument("model", type=Path, metavar="CONFIG.json", help="of Hugging Face, or its folder")
    sizes.add_argument("--cpu", metavar="SIZE", help="a tier of memory: 64GiB")
    sizes.add_argument("--disk", metavar="SIZE", help="a tier of files: 2TiB")
    sizes.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    sizes.add_argument(
        "--kv-dtype", default="auto", metavar="NAME", help="auto, fp8, bf16, … of the KV cache"
    )
    sizes.add_argument("--chunk-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    sizes.add_argument(
        "--length",
        type=int,
        action="append",
        metavar="N",
        help="tokens of a request (default: 8192, 32768)",
    )
    sizes.add_argument(
        *("--prefill",),
        type=float,
        action="append",
        metavar="N",
        help="tokens a second that the engine computes (default: 2000, 10000 and 50000)",
    )
    sizes.set_defaults(run=_size)
    return sizes


_ADDRESS = (
    "host:port, a socket's path, redis://host:port, or rediss:// for TLS (default: where the [serve]"
    " settings say that this host's server is)"
)
_SET = "override one setting; of the server: serve.NAME=VALUE"


def _add_server_commands(commands: Any) -> None:
    serve = commands.add_parser("serve", help="run the cache server until told to stop")
    serve.add_argument("--config", metavar="FILE", help="a TOML file (default: $LMTIER_CONFIG_FILE)")
    serve.add_argument(
        *("--tier", "-t"),
        action="append",
        metavar="URL",
        help="a tier, the top one first: cpu://?capacity=32GiB, disk:///nvme?capacity=500GiB",
    )
    serve.add_argument("--unix", metavar="PATH", help="for engines on this host, who also get the slab")
    serve.add_argument("--listen", metavar="HOST:PORT", help="for Redis clients; '' for none")
    serve.add_argument("--http", metavar="HOST:PORT", help="for people and Prometheus; '' for none")
    serve.add_argument("--kv-events", metavar="ENDPOINT", help="for routers, as ZMQ writes it: tcp://*:5557")
    serve.add_argument("--token-file", metavar="FILE", help="its first line must be shown by clients")
    serve.add_argument(
        "--insecure", action="store_true", default=None, help="listen beyond this host without a token"
    )
    serve.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=_SET)
    serve.set_defaults(run=_serve)

    access = argparse.ArgumentParser(add_help=False)
    access.add_argument("--config", metavar="FILE", help="a TOML file (default: $LMTIER_CONFIG_FILE)")
    access.add_argument("--token-file", metavar="FILE", help="the token is its first line (or $LMTIER_TOKEN)")
    access.add_argument(
        "--ca", metavar="FILE", help="TLS: who vouches for the server (default: this system's)"
    )
    access.add_argument("--cert", metavar="FILE", help="TLS: a certificate to show")
    access.add_argument("--key", metavar="FILE", help="TLS: its key")
    where = argparse.ArgumentParser(add_help=False, parents=[access])
    where.add_argument("address", nargs="?", metavar="ADDRESS", help=_ADDRESS)
    _add_prefix_commands(commands, where, access)

    ping = commands.add_parser("ping", parents=[where], help="is a server there, and is it ready?")
    ping.set_defaults(run=_ping)

    stats = commands.add_parser("stats", parents=[where], help="what a server was asked and what it holds")
    stats.add_argument("--watch", action="store_true", help=f"again every {_EVERY:g} s")
    stats.add_argument("--json", action="store_true", help="machine-readable output; one line a time")
    stats.set_defaults(run=_stats)

    top = commands.add_parser("top", parents=[where], help="a live view of a server; q quits")
    top.set_defaults(run=_top)
    for command in (stats, top):
        command.add_argument("--times", type=int, metavar="N", help="stop after N looks, when they are lines")

    explain = commands.add_parser("explain", parents=[where], help="why the last prompts missed")
    explain.add_argument("--last", type=int, default=20, metavar="N", help="lookups (default: %(default)s)")
    explain.add_argument(
        "--tokens", action="store_true", help="show the token ids where prompts part, if engines told them"
    )
    explain.add_argument("--json", action="store_true", help="machine-readable output")
    explain.set_defaults(run=_explain)

    clear = commands.add_parser("clear", parents=[where], help="make a server forget")
    what = clear.add_mutually_exclusive_group()
    what.add_argument(
        "--namespace", metavar="MODEL", help="the KV of one model, by the name its engine gives"
    )
    what.add_argument("--all", action="store_true", help="everything, named values too")
    clear.add_argument(
        "--stored-by",
        metavar="ENGINE",
        help="only what this engine stored: a name of `lmtier top` with its host, “vllm scheduler @host”, or "
        "a pattern, “*@host”",
    )
    clear.add_argument(
        "--since",
        metavar="TIME",
        help="only what was stored from then on: 2026-11-24T09:30, 09:30 (the last one), or 90m, 12h, 3d ago",
    )
    clear.add_argument("--force", action="store_true", help="also what is in use right now")
    clear.set_defaults(run=_clear)


def _add_prefix_commands(commands: Any, where: Any, access: Any) -> None:
    server = argparse.ArgumentParser(add_help=False, parents=[access])
    server.add_argument("--server", dest="address", metavar="ADDRESS", help=_ADDRESS)
    prompt = argparse.ArgumentParser(add_help=False, parents=[server])
    prompt.add_argument(
        "tokens", type=Path, metavar="TOKENS.json", help="a JSON list of token ids, or one a line"
    )
    prompt.add_argument(
        "--model", metavar="NAME", help="whose tokens they are, if engines of several are known"
    )
    prompt.add_argument("--salt", default="", help="the requests' cache salt (default: none)")
    prompt.add_argument("--lora", default="", metavar="NAME", help="the requests' adapter (default: none)")
    prompt.add_argument("--ttl", metavar="TIME", help="unpin after this long: 12h, 7d (default: never)")

    prefetch = commands.add_parser(
        "prefetch", parents=[prompt], help="bring prompts up into memory before they are asked for"
    )
    prefetch.add_argument("--pin", default="", metavar="NAME", help="and pin them, under this name")
    prefetch.set_defaults(run=_prefetch)
    pin = commands.add_parser("pin", parents=[prompt], help="keep prompts from being evicted, where they are")
    pin.add_argument("--name", required=True, help="to unpin them by; replaces what had it")
    pin.set_defaults(run=_pin)
    unpin = commands.add_parser("unpin", parents=[server], help="let go of what was pinned under a name")
    unpin.add_argument("name", metavar="NAME")
    unpin.set_defaults(run=_unpin)
    pins = commands.add_parser("pins", parents=[where], help="what is pinned")
    pins.set_defaults(run=_pins)
    for command in (prefetch, pins):
        command.add_argument("--json", action="store_true", help="machine-readable output")


# ---- the server


def _serve(args: argparse.Namespace) -> int:
    from lmtier.server.serve import give_way

    give_way()
    lines = _Aside()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", handlers=[lines])
    logging.getLogger("lmtier").setLevel(logging.INFO)
    try:
        return _run_server(args)
    finally:
        lines.close()


class _Aside(logging.Handler):
    """Lines to stderr, by a thread: whoever reads them, or does not, is not waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: Queue[str | None] = Queue(_LINES)
        self._thread = start_thread("lmtier-log", self._write)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Full):
            self._lines.put_nowait(self.format(record))

    def close(self) -> None:
        with suppress(Full):
            self._lines.put_nowait(None)
        self._thread.join(_LAST_LINES)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError):  # not print: its lock, held for ever, would end the process with an abort
                os.write(2, f"{line}\n".encode("utf-8", "backslashreplace"))


def _run_server(args: argparse.Namespace) -> int:
    from lmtier.server.serve import Server

    ours, servers = _overrides(args.set)
    if args.tier:
        ours = {"tiers": args.tier} | ours
    flags = {
        name: getattr(args, name)
        for name in ("unix", "listen", "http", "kv_events", "token_file", "insecure")
    }
    servers = {name: value for name, value in flags.items() if value is not None} | servers
    effective, origins = config.load(args.config, overrides=ours)
    serving, _ = config.load_serving(args.config, overrides=servers)
    server = Server(effective, serving)
    server.obey_signals()
    say(_screen(server, origins["tiers"] == "default"))
    server.run()
    return 0


def _screen(server: Server, has_default_tiers: bool) -> str:
    """What a server that has just opened its doors is."""
    from lmtier.server.serve import read_token

    serving = server.serving
    scheme = "https" if serving.tls_cert else "http"
    lines = [f"lmtier {__version__}, cache server, process {os.getpid()}", ""]
    lines.append(table(_TIER[:-1], (_described(spec)[:-1] for spec in server.cache.config.specs)))
    if has_default_tiers:
        lines.append("These are the default tiers; name yours with --tier or in the file.")
    lines.append("")
    rows = []
    for what, address in server.where:
        if what == "http":
            host, _, port = address.rpartition(":")
            url = f"{scheme}://{_ANYWHERE.get(host, host)}:{port}"
            rows += [(what, address, f"{url}/ in a browser, {url}/metrics for Prometheus")]
        else:
            rows += [(what, address, _FOR[what])]
    lines += [table(("listens", "address", "for"), rows), ""]
    token = "is asked for" if read_token(serving) else "is not asked for"
    tls = "TLS" if serving.tls_cert else "no TLS"
    if serving.tls_ca:
        tls += ", with a certificate of the client's"
    unix = " The Unix socket asks for none: it is for its owner alone." if serving.unix else ""
    lines.append(f"A token {token}; {tls}.{unix}")
    return "\n".join(lines)


# ---- those who ask it


def _address(args: argparse.Namespace) -> Address:
    from lmtier.server.console import address_of, first_line, own_address
    from lmtier.server.serve import read_token

    if args.address:
        address = address_of(args.address)
        token = address.token or os.environ.get(config.TOKEN_VARIABLE) or None
    else:
        serving, _ = config.load_serving(args.config)
        address = own_address(serving)
        token = None if args.token_file or address.unix else read_token(serving)
    if args.token_file:
        token = first_line(args.token_file)
    address = replace(address, token=token)
    if args.ca:
        address = replace(address, ca=args.ca, is_pinned=False)
    return replace(address, cert=args.cert, key=args.key or "") if args.cert else address


def _ping(args: argparse.Namespace) -> int:
    from lmtier.server.console import Remote, pong

    with Remote(_address(args)) as remote:
        say(pong(remote))
    return 0


def _stats(args: argparse.Namespace) -> int:
    from lmtier.server.console import Remote, stats

    address = _address(args)
    with Remote(address) as remote, suppress(KeyboardInterrupt):
        for _ in _looks(args.times if args.watch else 1):
            now = remote.snapshot()
            if args.json:
                say(json.dumps(now, indent=None if args.watch else 2))
            else:
                (show_again if args.watch else say)(stats(now, str(address)))
    return 0


def _top(args: argparse.Namespace) -> int:
    from lmtier.server.console import Watched, plain, top

    address = _address(args)
    if sys.stdout.isatty():
        top(address, _EVERY)
        return 0
    watched = Watched(address)
    with suppress(KeyboardInterrupt):
        for look in _looks(args.times):
            if look:
                watched.look()
            say(plain(watched.now, watched.line))
    watched.close()
    return 0


def _looks(times: int | None) -> Iterator[int]:
    for look in islice(count(), times):
        if look:
            time.sleep(_EVERY)
        yield look


def _explain(args: argparse.Namespace) -> int:
    from lmtier.explain import MAX_LOOKUPS
    from lmtier.server.console import Remote, explained

    if not 0 < args.last <= MAX_LOOKUPS:
        raise ConfigError(f"--last {args.last}: must be 1 to {MAX_LOOKUPS}, which is what a server remembers")
    with Remote(_address(args)) as remote:
        found = remote.explanations(args.last, tokens=args.tokens)
    say(json.dumps(found, indent=2) if args.json else explained(found, get_terminal_size().columns))
    return 0


def _prefetch(args: argparse.Namespace) -> int:
    from lmtier.server import prefixes
    from lmtier.server.console import Remote

    prompts = prefixes.read_prompts(args.tokens)
    ttl = _ttl(args)
    with Remote(_address(args)) as remote:
        model = prefixes.model_of(remote, args.model, args.lora)
        chains = prefixes.keys_of(remote, model, prompts, args.salt)
        whole, done = sum(map(len, chains)), 0
        with Progress() as progress:

            def come(chunks: int) -> None:
                nonlocal done
                done += chunks
                progress.at(done, whole, f"{done} of {whole} chunks")

            results = prefixes.bring_up(remote, model, chains, come)
        kept = prefixes.pin(remote, args.pin, chains, ttl) if args.pin else {}
    if args.json:
        found: dict[str, Any] = {"prompts": [asdict(each) for each in results]}
        say(json.dumps(found | ({"pinned": kept} if args.pin else {}), indent=2))
    else:
        say(prefixes.brought_table(results))
        if args.pin:
            say(f"pinned as {args.pin}: {prefixes.kept_text(kept)}")
    return 1 if any(each.missing for each in results) else 0


def _pin(args: argparse.Namespace) -> int:
    from lmtier.server import prefixes
    from lmtier.server.console import Remote

    prompts = prefixes.read_prompts(args.tokens)
    ttl = _ttl(args)
    with Remote(_address(args)) as remote:
        model = prefixes.model_of(remote, args.model, args.lora)
        chains = prefixes.keys_of(remote, model, prompts, args.salt)
        kept = prefixes.pin(remote, args.name, chains, ttl)
    chunks = len({key for chain in chains for key in chain})
    say(f"pinned as {args.name}, {chunks} chunks: {prefixes.kept_text(kept)}; others as soon as they come")
    return 0


def _ttl(args: argparse.Namespace) -> float | None:
    if args.ttl is None:
        return None
    seconds = config.parse_seconds(args.ttl)
    if not 0 < seconds <= MAX_TTL:
        raise ConfigError(f"--ttl {args.ttl}: must be more than 0, and at most 100 years")
    return seconds


def _unpin(args: argparse.Namespace) -> int:
    from lmtier.server.console import Remote

    with Remote(_address(args)) as remote:
        was_there = remote.ask("LMTIER.UNPIN", args.name) == 1
    say(f"unpinned {args.name}" if was_there else f"nothing is pinned as {args.name}")
    return 0 if was_there else 1


def _pins(args: argparse.Namespace) -> int:
    from lmtier.server import prefixes
    from lmtier.server.console import Remote

    with Remote(_address(args)) as remote:
        found = prefixes.pinned(remote)
    if args.json:
        say(json.dumps([each._asdict() for each in found], indent=2))
    else:
        say(prefixes.pins_table(found) if found else "nothing is pinned")
    return 0


def _clear(args: argparse.Namespace) -> int:
    from lmtier.server.console import Remote, clear

    if args.namespace == "":
        raise ConfigError("--namespace needs the name of a model; --all forgets everything")
    is_suspect = args.stored_by is not None or args.since is not None
    if args.namespace is None and not args.all and not is_suspect:
        raise ConfigError("say what to forget: --namespace, --stored-by, --since or --all")
    if args.all and is_suspect:
        raise ConfigError("--all forgets everything; leave it out to forget what --stored-by or --since say")
    since = None if args.since is None else _moment(args.since, datetime.now().astimezone())
    with Remote(_address(args)) as remote:
        say(clear(remote, args.namespace, by=args.stored_by, since=since, force=args.force))
    return 0


def _moment(text: str, now: datetime) -> datetime:
    """A time in the past: a date, a time of day, or how long ago; by this machine's time zone."""
    if (ago := re.fullmatch(r"(\d+)([smhd])", text)) is not None:
        unit = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[ago[2]]
        return now - timedelta(**{unit: int(ago[1])})
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            then = datetime.combine(now.date(), clock_time.fromisoformat(text.zfill(5)), now.tzinfo)
            return then if then <= now else then - timedelta(days=1)
        then = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--since {text!r} is no time: say 2026-11-24T09:30, 09:30, 90m, 12h or 3d"
        ) from None
    then = then if then.tzinfo is not None else then.astimezone()
    if then > now:
        raise ConfigError(f"--since {text!r} is in the future")
    return then


# ---- what needs no server


def _bench(args: argparse.Namespace) -> int:
    from lmtier import bench

    if args.repeat < 1:
        raise ConfigError(f"--repeat {args.repeat}: must be at least 1")
    gpu = bench.real_gpu() if args.gpu else None
    folder = _made(args.dir)
    rows = bench.measure(only=args.only, directory=folder, repeat=args.repeat, quick=args.quick, gpu=gpu)
    if args.json:
        say(json.dumps(bench.as_json(rows), indent=2))
    else:
        say(bench.header(args.dir, gpu))
        say(bench.report(rows))
    if args.quick:
        complain("a quick run is a smoke test: sizes are tiny, floors are not enforced")
        return 0
    return 0 if all(row.ok for row in rows) else 1


def _simulate(args: argparse.Namespace) -> int:
    from lmtier import sizing
    from lmtier.sim import report, synthetic, traces
    from lmtier.sim.replay import Hardware, replay

    configurations = report.variants(args.tier, args.policy, args.write)
    for urls in configurations:
        config.Config(tiers=urls)  # what is wrong is said before the work begins
    for name in ("requests", "prefill", "chunk_tokens", "block_tokens"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be more than 0")
    if args.plot:
        report.check_plot(args.plot)
    hardware = Hardware(
        prefill=args.prefill,
        bandwidth=_by_tier("bandwidth", args.bandwidth, config.parse_size),
        latency=_by_tier("latency", args.latency, config.parse_seconds),
    )
    if args.synthetic:
        trace = synthetic.make(args.synthetic, requests=args.requests, seed=args.seed)
    else:
        trace = traces.read(args.trace, block_tokens=args.block_tokens)
    chunk_tokens = args.chunk_tokens or max(256, trace.block_tokens)
    per_token = config.parse_size(args.bytes_per_token)
    if args.model:
        per_token = sizing.read(args.model).bytes_per_token
    outcomes = []
    with Progress(len(configurations)) as progress:
        for urls in configurations:
            outcome = replay(
                trace, urls, chunk_tokens=chunk_tokens, bytes_per_token=per_token, hardware=hardware
            )
            outcomes.append(outcome)
            progress.step(report.described(outcome.specs))
    if args.json:
        say(json.dumps([report.as_json(outcome) for outcome in outcomes], indent=2))
    else:
        say(report.summary(trace, chunk_tokens, per_token, hardware))
        say()
        say(report.report(outcomes))
    if args.plot:
        report.plot(args.plot, f"{trace.name}: tokens hit", report.curves(outcomes))
    return 0


def _size(args: argparse.Namespace) -> int:
    from lmtier import sizing

    lengths, prefills = args.length or [8_192, 32_768], args.prefill or [2_000, 10_000, 50_000]
    for name, values in (
        *(("tp", [args.tp]), ("chunk-tokens", [args.chunk_tokens])),
        *(("length", lengths), ("prefill", prefills)),
    ):
        if min(values) <= 0:
            raise ConfigError(f"--{name} {min(values)}: must be more than 0")
    model = sizing.read(args.model, args.kv_dtype)
    given = {"cpu": args.cpu, "disk": args.disk}
    capacities = {tier: config.parse_size(text) for tier, text in given.items() if text}
    form = model.form(args.chunk_tokens, args.tp)
    found = sizing.holdings(capacities, form, args.chunk_tokens)
    if args.json:
        say(json.dumps(sizing.as_json(model, found, form, lengths=lengths, prefills=prefills), indent=2))
    else:
        say(sizing.report(model, found, form, lengths=lengths, prefills=prefills))
    return 0


def _by_tier(what: str, pairs: Sequence[str], read: Callable[[str], float]) -> dict[str, float]:
    values: dict[str, float] = {}
    for pair in pairs:
        label, separator, text = pair.partition("=")
        if not separator:
            raise ConfigError(f"--{what} {pair}: write it as tier=value")
        values[label] = read(text)
        if values[label] <= 0:
            raise ConfigError(f"--{what} {pair}: must be more than 0")
    return values


_TIER = ("tier", "location", "capacity", "write", "policy", "options")


def _config(args: argparse.Namespace) -> int:
    from lmtier.server.report import without_secrets

    ours, servers = _overrides(args.set)
    effective, origins = config.load(args.config, overrides=ours)
    serving, serving_origins = config.load_serving(args.config, overrides=servers)
    values: dict[str, Any] = {name: getattr(effective, name) for name in origins}
    values["tiers"] = [without_secrets(spec) for spec in effective.specs]
    values["shares"] = " ".join(map(str, effective.shares))
    serve: dict[str, Any] = {name: getattr(serving, name) for name in serving_origins}
    tiers = [_described(spec) for spec in effective.specs]
    token, token_origin = _token(serving.token_file, os.environ)
    if args.json:
        shown: dict[str, Any] = {
            name: {"value": value, "origin": origins[name]} for name, value in values.items()
        }
        shown["serve"] = {
            name: {"value": value, "origin": serving_origins[name]} for name, value in serve.items()
        }
        shown["serve"]["token"] = {"value": token, "origin": token_origin}
        say(json.dumps(shown, indent=2))
        return 0
    urls = values.pop("tiers")
    rows = [(name, _written(value), origins[name]) for name, value in values.items()]
    rows += [(f"tiers[{i}]", url, origins["tiers"]) for i, url in enumerate(urls)]
    rows += [(f"serve.{name}", _written(value), serving_origins[name]) for name, value in serve.items()]
    rows += [("serve.token", token or "-", token_origin)]
    say(table(("setting", "value", "origin"), rows))
    say()
    say(table(_TIER, tiers))
    return 0


def _token(file: str, env: Mapping[str, str]) -> tuple[str | None, str]:
    """That there is a token, and where; never the token."""
    if file:
        return "(not shown)", file
    return ("(not shown)", config.TOKEN_VARIABLE) if env.get(config.TOKEN_VARIABLE) else (None, "default")


def _written(value: object) -> str:
    return "-" if value == "" else str(value)


def _overrides(pairs: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What --set says: of a cache, and of its server."""
    ours: dict[str, Any] = {}
    servers: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--set {pair}: write it as name=value")
        if name.startswith("serve."):
            servers[name.removeprefix("serve.")] = value
        else:
            ours[name] = value
    return ours, servers


def _described(spec: config.TierSpec) -> Sequence[str]:
    from lmtier.server.report import without_secrets

    if spec.scheme not in ("cpu", "gpu"):
        from lmtier.registry import load_tier

        load_tier(spec.scheme)  # an unknown scheme is an error here, not first when the engine starts
    spec = config.TierSpec.parse(without_secrets(spec))
    capacity = "-" if spec.capacity is None else size(spec.capacity)
    options = " ".join(f"{name}={value}" for name, value in spec.options.items())
    return spec.scheme, spec.location or "-", capacity, spec.write, spec.policy, options or "-"


def _made(directory: Path | None) -> Path | None:
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--dir {directory}: {error.strerror}") from None
    return directory


def _demo(args: argparse.Namespace) -> int:
    try:
        demo = import_module("lmtier_integrations.demo")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the demo needs {error.name}; install it with: pip install 'lmtier[demo]'"
        ) from None
    return 0 if demo.run(_made(args.dir), keep=args.keep) else 1


def _verify(args: argparse.Namespace) -> int:
    from lmtier.registry import BUILTIN

    module, _, _ = BUILTIN["disk"].partition(":")
    with Progress() as progress:
        report = import_module(module).verify(args.dir, args.fix, progress.at)
    left = len(report.findings) - report.fixed
    if args.json:
        findings = [
            {"path": str(each.path), "fault": str(each.fault), "reason": each.reason}
            for each in report.findings
        ]
        say(
            json.dumps({"ok": report.ok, "bytes": report.nbytes, "fixed": report.fixed, "findings": findings})
        )
    else:
        if report.findings:
            rows = [(each.path, each.fault, each.reason) for each in report.findings]
            say(table(("file", "fault", "reason"), rows))
            say()
        say(f"{report.ok} objects are sound ({size(report.nbytes)}), {report.fixed} deleted, {left} left.")
        if left and not args.fix:
            say("`--fix` deletes what is corrupt or orphaned; a reader would treat it as a miss.")
    return 1 if left else 0
