"""The `lmtier` command: bench, config, demo, verify."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lmtier import __version__, config
from lmtier.errors import ConfigError, LMTierError
from lmtier.terminal import Progress, complain, say, size, table

# Exit codes: 0 all is well, 1 something was found (below a floor, a corrupt object), 2 wrong usage.


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except LMTierError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmtier", description="Tiered KV-cache offload for LLM serving.")
    parser.add_argument("--version", action="version", version=f"lmtier {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    bench = commands.add_parser("bench", help="measure every path beside its physical limit")
    bench.add_argument("--only", default="", metavar="PATTERN", help="paths whose name contains this")
    bench.add_argument("--dir", type=Path, help="where the disk paths write, in a directory of their own")
    bench.add_argument("--repeat", type=int, default=1, metavar="N", help="N times as many rounds")
    bench.add_argument(
        "--quick", action="store_true", help="a smoke test: tiny sizes, floors are not enforced"
    )
    bench.set_defaults(run=_bench)

    show = commands.add_parser("config", help="print the effective configuration and where it came from")
    show.add_argument("--config", metavar="FILE", help="a TOML file (default: $LMTIER_CONFIG_FILE)")
    show.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override one setting")
    show.set_defaults(run=_config)

    demo = commands.add_parser("demo", help="a conversation, cold, from CPU, and from disk after a restart")
    demo.add_argument(
        "--dir", type=Path, help="where the disk tier goes, in a directory of its own unless --keep"
    )
    demo.add_argument("--keep", action="store_true", help="leave the disk tier's directory in place")
    demo.set_defaults(run=_demo)

    verify = commands.add_parser("verify", help="read every object of a disk tier and report what is wrong")
    verify.add_argument("dir", type=Path, metavar="DIR")
    verify.add_argument("--fix", action="store_true", help="delete what is corrupt or orphaned")
    verify.set_defaults(run=_verify)

    for command in (bench, show, verify):
        command.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _bench(args: argparse.Namespace) -> int:
    from lmtier import bench

    if args.repeat < 1:
        raise ConfigError(f"--repeat {args.repeat}: must be at least 1")
    rows = bench.measure(only=args.only, directory=_made(args.dir), repeat=args.repeat, quick=args.quick)
    if args.json:
        say(json.dumps(bench.as_json(rows), indent=2))
    else:
        say(bench.header(args.dir))
        say(bench.report(rows))
    if args.quick:
        complain("a quick run is a smoke test: sizes are tiny, floors are not enforced")
        return 0
    return 0 if all(row.ok for row in rows) else 1


def _config(args: argparse.Namespace) -> int:
    effective, origins = config.load(args.config, overrides=_overrides(args.set))
    values = {name: getattr(effective, name) for name in origins}
    tiers = [_described(spec) for spec in effective.specs]
    if args.json:
        shown = {name: {"value": value, "origin": origins[name]} for name, value in values.items()}
        say(json.dumps(shown, indent=2))
        return 0
    urls = values.pop("tiers")
    rows = [(name, str(value), origins[name]) for name, value in values.items()]
    rows += [(f"tiers[{i}]", url, origins["tiers"]) for i, url in enumerate(urls)]
    say(table(("setting", "value", "origin"), rows))
    say()
    say(table(("tier", "location", "capacity", "write", "policy", "options"), tiers))
    return 0


def _overrides(pairs: Sequence[str]) -> dict[str, str]:
    given = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--set {pair}: write it as name=value")
        given[name] = value
    return given


def _described(spec: config.TierSpec) -> Sequence[str]:
    if spec.scheme not in ("cpu", "gpu"):
        from lmtier.registry import load_tier

        load_tier(spec.scheme)  # an unknown scheme is an error here, not first when the engine starts
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
        from lmtier.demo import run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the demo needs {error.name}; install it with: pip install 'lmtier[torch]'"
        ) from None
    return 0 if run(_made(args.dir), keep=args.keep) else 1


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
