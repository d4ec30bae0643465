"""`lmtier simulate` and `lmtier size`: predict a cache before you buy the hardware."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from lmtier import config
from lmtier.config import suggest
from lmtier.errors import ConfigError, excerpt
from lmtier.format.compression import RAW
from lmtier.tools.commands.command import Subcommand, json_option, nbytes, rate, seconds, whole_number
from lmtier.tools.exits import Exit
from lmtier.tools.terminal import Progress, say, until_interrupted


def _simulate_options(parser: ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "trace",
        nargs="?",
        type=Path,
        help="a request log in the format of Mooncake, Qwen-Bailian or Azure, or a folder of recorded agents",
    )
    what.add_argument(
        "--synthetic", choices=("multi-turn", "agentic", "rag"), help="use generated traffic instead of a log"
    )
    parser.add_argument(
        "--requests", type=whole_number, default=5_000, metavar="N", help="how many requests to generate"
    )
    parser.add_argument(
        "--seed", type=whole_number, default=1, metavar="N", help="the same seed generates the same requests"
    )
    parser.add_argument(
        *("--tier", "-t"),
        action="append",
        required=True,
        metavar="URL",
        help="a tier, the top one first: cpu://?capacity=64GiB, disk://?capacity=1TiB",
    )
    parser.add_argument("--policy", default="", metavar="NAME,…", help="for all tiers: auto, lru")
    parser.add_argument("--write", default="", metavar="RULE,…", help="for lower tiers: always, reused, …")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--bytes-per-token",
        type=nbytes,
        default="128KiB",
        metavar="SIZE",
        help="the size of the model's KV (default: %(default)s)",
    )
    model.add_argument(
        "--model",
        type=Path,
        metavar="CONFIG.json",
        help="compute that size from the model's config.json, as `lmtier size` does",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=whole_number,
        metavar="N",
        help="default: 256, or the size of the trace's blocks",
    )
    parser.add_argument(
        "--block-tokens",
        type=whole_number,
        metavar="N",
        help="size of the trace's blocks, if it is not clear",
    )
    parser.add_argument(
        "--users",
        type=whole_number,
        default=12,
        metavar="N",
        help="of recorded sessions, a folder of .json: how many run at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--longest-gap",
        type=seconds,
        default="1h",
        metavar="TIME",
        help="of recorded sessions: the longest time between two requests of one (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill",
        type=rate,
        default=10_000,
        metavar="N",
        help="tokens that the engine computes per second",
    )
    parser.add_argument(
        "--bandwidth",
        action="append",
        default=[],
        metavar="TIER=SIZE",
        help="bytes per second of a tier (default: cpu=20GB, disk=3GB, gpu=392GB, others 1GB)",
    )
    parser.add_argument(
        "--latency",
        action="append",
        default=[],
        metavar="TIER=TIME",
        help="time to the first byte of a tier (default: disk=1ms, others 2ms)",
    )
    parser.add_argument(
        *("--engine",),
        type=nbytes,
        metavar="SIZE",
        default="0",
        help="memory of the engine's own prefix cache",
    )
    parser.add_argument(
        *("--forgets",),
        type=seconds,
        metavar="TIME",
        default="0s",
        help="how often the engine empties it: 10m",
    )
    parser.add_argument(
        *("--hints",),
        default="",
        metavar="WHICH,…",
        help="none: no sessions; trace: what the trace has (default); ends: sessions end with their last "
        "request; waits: and agents say that they wait for a person",
    )
    parser.add_argument(
        *("--person-after",),
        type=seconds,
        default="10s",
        metavar="TIME",
        help="with waits: an agent that is silent for longer waits for a person (default: %(default)s)",
    )
    _price_option(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="hits by capacity: out.svg, out.png")
    json_option(parser)


def _price_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-hour",
        type=rate,
        default=0.0,
        metavar="PRICE",
        help="of all GPUs of the engine: what hits save",
    )


def _check_price(args: Namespace) -> None:
    if not 0 <= args.gpu_hour < float("inf"):
        raise ConfigError(f"--gpu-hour {args.gpu_hour}: a price is 0 or more")


def _simulate(args: Namespace) -> Exit:
    from lmtier.tools import sizing
    from lmtier.tools.sim import report, synthetic, traces
    from lmtier.tools.sim.bound import set_bounds
    from lmtier.tools.sim.recorded import read_recorded
    from lmtier.tools.sim.replay import Hardware, replay

    configurations = report.variants(args.tier, args.policy, args.write)
    for urls in configurations:
        # Report errors before the work begins.
        config.Config(tiers=urls, chunk_tokens=256 if args.chunk_tokens is None else args.chunk_tokens)
    for name in ("requests", "prefill", "block_tokens", "users"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be more than 0")
    hints = args.hints.split(",") if args.hints else ["trace"]
    if unknown := [mode for mode in hints if mode not in traces.HINTS]:
        raise ConfigError(f"--hints {unknown[0]}: unknown{suggest(unknown[0], traces.HINTS)}")
    _check_price(args)
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
        if args.trace.is_dir():
            trace = read_recorded(args.trace, args.users, args.longest_gap)
        else:
            trace = traces.read(args.trace, block_tokens=args.block_tokens)
    chunk_tokens = args.chunk_tokens or max(256, trace.block_tokens)
    if (per_token := args.bytes_per_token) <= 0:
        raise ConfigError(f"--bytes-per-token {per_token}: must be more than 0")
    if args.model:
        per_token = sizing.read(args.model).bytes_per_token
    if hints != ["trace"] and not any(request.session for request in trace.requests):
        raise ConfigError(f"--hints {args.hints}: the trace has no session_id, so there are no sessions")
    outcomes = []
    with Progress(len(configurations) * len(hints)) as progress, until_interrupted() as interruption:
        for hint_mode in hints:
            with_hints = trace.hinted(hint_mode, args.person_after)
            for urls in configurations:
                outcome = replay(
                    *(with_hints, urls),
                    chunk_tokens=chunk_tokens,
                    bytes_per_token=per_token,
                    hardware=hardware,
                    engine=args.engine,
                    engine_resets_every=args.forgets,
                )
                outcome.hinted = hint_mode
                outcomes.append(outcome)
                progress.step(report.described(outcome.specs))
    if not interruption.came:
        set_bounds(outcomes, trace, chunk_tokens)
    if args.json:
        say(json.dumps([report.as_json(each, hardware, args.gpu_hour) for each in outcomes], indent=2))
    else:
        has_codec = any(spec.codec != RAW for outcome in outcomes for spec in outcome.specs)
        say(report.summary(trace, chunk_tokens, per_token, hardware, has_codec=has_codec))
        say()
        say(report.report(outcomes))
        if savings := report.comparison_text(outcomes, hardware, args.gpu_hour):
            say()
            say(savings)
    if args.plot and outcomes:
        report.plot(args.plot, f"{trace.name}: tokens hit", report.curves(outcomes))
    return interruption.status if interruption.came else Exit.DONE


def _by_tier(what: str, pairs: Sequence[str], read: Callable[[str], float]) -> dict[str, float]:
    values: dict[str, float] = {}
    for pair in pairs:
        label, separator, text = pair.partition("=")
        if not separator:
            raise ConfigError(f"--{what} {excerpt(pair)}: write it as tier=value")
        try:
            values[label] = read(text)
        except ConfigError as error:
            raise ConfigError(f"--{what} {excerpt(label)}: {error}") from None
        if values[label] <= 0:
            raise ConfigError(f"--{what} {pair}: must be more than 0")
    return values


def _size_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=Path,
        metavar="CONFIG.json",
        help="the config.json of a Hugging Face model, or its folder",
    )
    parser.add_argument("--cpu", type=nbytes, metavar="SIZE", help="the capacity of the cpu tier: 64GiB")
    parser.add_argument("--disk", type=nbytes, metavar="SIZE", help="the capacity of the disk tier: 2TiB")
    parser.add_argument(
        "--tp", type=whole_number, default=1, metavar="N", help="number of tensor-parallel ranks"
    )
    parser.add_argument(
        "--kv-dtype", default="auto", metavar="NAME", help="the dtype of the KV cache: auto, fp8, bf16, …"
    )
    parser.add_argument(
        "--chunk-tokens", type=whole_number, default=256, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--length",
        type=whole_number,
        action="append",
        metavar="N",
        help="tokens of a request; may be repeated (default: 8192 and 32768)",
    )
    parser.add_argument(
        "--prefill",
        type=rate,
        action="append",
        metavar="N",
        help="tokens that the engine computes per second; may be repeated (default: 2000, 10000 and 50000)",
    )
    _price_option(parser)
    json_option(parser)


def _size(args: Namespace) -> Exit:
    from lmtier.tools import sizing

    lengths, prefills = args.length or [8_192, 32_768], args.prefill or [2_000, 10_000, 50_000]
    options = {"cpu": args.cpu, "disk": args.disk}
    capacities = {tier: capacity for tier, capacity in options.items() if capacity is not None}
    for name, values in (*(("tp", [args.tp]), ("length", lengths), ("prefill", prefills)),):
        if min(values) <= 0:
            raise ConfigError(f"--{name} {min(values)}: must be more than 0")
    config.Config(chunk_tokens=args.chunk_tokens)  # it is as large as a cache allows
    for tier, capacity in capacities.items():
        if capacity <= 0:
            raise ConfigError(f"--{tier} {capacity}: must be more than 0")
    _check_price(args)
    model = sizing.read(args.model, args.kv_dtype)
    form = model.form(args.chunk_tokens, args.tp)
    found = sizing.tier_capacities(capacities, form, args.chunk_tokens)
    if args.json:
        result = sizing.as_json(model, found, form, lengths=lengths, prefills=prefills)
        if args.gpu_hour:
            result["reused_once"] = sizing.savings_as_json(found, prefills, args.gpu_hour)
        say(json.dumps(result, indent=2))
    else:
        say(sizing.report(model, found, form, lengths=lengths, prefills=prefills))
        if args.gpu_hour and found:
            say()
            say(sizing.savings_table(found, prefills, args.gpu_hour))
    return Exit.DONE


COMMANDS = (
    Subcommand(
        "simulate",
        "replay a trace of requests, and show the hits of a cache",
        _simulate_options,
        _simulate,
        "Replay a trace through the real cache, without bytes. Use commas in --policy, --write or an option "
        "of a tier to compare several configurations: cpu://?capacity=16GiB,64GiB.",
    ),
    Subcommand("size", "show the size of a model's KV, and how much of it fits", _size_options, _size),
)
