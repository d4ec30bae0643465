"""`lmtier bench`, `demo`, `verify` and `prove`: they measure this machine, check a disk, prove an engine."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path

from lmtier.config import first_line
from lmtier.errors import ConfigError, TierError
from lmtier.tools.commands.command import Subcommand, ensure_directory, json_option, seconds, whole_number
from lmtier.tools.exits import Exit
from lmtier.tools.terminal import Progress, complain, say, size_text, table, until_interrupted


def _bench_options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="TEXT", help="measure paths whose names contain this")
    parser.add_argument("--dir", type=Path, help="where the disk paths make a new directory and write")
    parser.add_argument(
        "--repeat", type=whole_number, default=1, metavar="N", help="do N times as many rounds"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: tiny sizes, floors are not enforced"
    )
    parser.add_argument("--gpu", action="store_true", help="measure only copies between a GPU and memory")
    parser.add_argument("--save", type=Path, metavar="FILE", help="after each round, write all rows as JSON")
    json_option(parser)


def _bench(args: Namespace) -> Exit:
    try:
        import lmtier_bench as bench
    except ModuleNotFoundError:
        raise ConfigError(
            "lmtier bench is no part of the package: in a checkout run `pip install -e .`, or `make bench`"
        ) from None
    if args.repeat < 1:
        raise ConfigError(f"--repeat {args.repeat}: must be at least 1")
    gpu = bench.real_gpu() if args.gpu else None
    folder = ensure_directory(args.dir)
    if args.save:
        _try_to_write("--save", args.save)
    measured = bench.measure(
        only=args.only, directory=folder, repeat=args.repeat, quick=args.quick, gpu=gpu, save=args.save
    )
    if not args.json:
        say(bench.header(args.dir, gpu))
        say(bench.heading())
    rows = []
    try:
        with until_interrupted() as interruption:
            for row in measured:
                rows.append(row)
                if not args.json:
                    say(bench.line(row))
    finally:
        if args.json:
            say(json.dumps(bench.as_json(rows), indent=2))
        elif goals := bench.goals(rows):
            say(goals)
    if interruption.came:
        return interruption.status
    if args.quick:
        complain("a quick run is a smoke test: sizes are tiny, floors are not enforced")
        return Exit.DONE
    return Exit.DONE if all(row.ok for row in rows) else Exit.NO


def _demo_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--dir", type=Path, help="the directory of the disk tier; without --keep, a new directory in it"
    )
    parser.add_argument("--keep", action="store_true", help="keep the disk tier, and the server running")


def _demo(args: Namespace) -> Exit:
    try:
        demo = import_module("lmtier_integrations.demo")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the demo needs {error.name}; install it with: pip install 'lmtier[demo]'"
        ) from None
    return Exit.DONE if demo.run(ensure_directory(args.dir), keep=args.keep) else Exit.NO


def _verify_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "dir", type=Path, metavar="DIR", help="the directory of a disk tier; no server uses it"
    )
    parser.add_argument(
        "--fix", action="store_true", help="delete what is corrupt or orphaned; with --key, what is unsealed"
    )
    parser.add_argument(
        "--key", metavar="SOURCE", help="check seals with these keys: file:PATH, command:PROGRAM, env:NAME"
    )
    parser.add_argument("--tenants", default="", metavar="DIR", help="where the keys of tenants are")
    parser.add_argument(
        "--reseal", action="store_true", help="seal with the current key what was sealed with another"
    )
    parser.add_argument("--drop-sealed", action="store_true", help="delete what none of the keys opens")
    json_option(parser)


def _verify(args: Namespace) -> Exit:
    from lmtier.tiers.keyring import Keyring
    from lmtier.tiers.registry import BUILTIN

    if not args.key and (args.tenants or args.reseal or args.drop_sealed):
        raise ConfigError("--tenants, --reseal and --drop-sealed need --key")
    keys = Keyring(args.key, args.tenants, "--key") if args.key else None
    module, _, _ = BUILTIN["disk"].partition(":")
    with Progress() as progress:
        report = import_module(module).verify(
            *(args.dir, args.fix, progress.at),
            keys=keys,
            reseal=args.reseal,
            drop_sealed=args.drop_sealed,
        )
    unfixed = len(report.findings) - report.fixed
    if args.json:
        findings = [
            {"path": str(finding.path), "fault": str(finding.fault), "reason": finding.reason}
            for finding in report.findings
        ]
        result = {"ok": report.ok, "bytes": report.nbytes, "fixed": report.fixed, "findings": findings}
        sealed = {"keys": report.keys, "unchecked": report.unchecked, "resealed": report.resealed}
        say(json.dumps(result | sealed))
    else:
        if report.findings:
            rows = [(finding.path, finding.fault, finding.reason) for finding in report.findings]
            say(table(("file", "fault", "reason"), rows))
            say()
        if any(report.keys):
            key_rows = [(key or "(not sealed)", f"{count:,}") for key, count in sorted(report.keys.items())]
            say(table(("sealed with key", "objects"), key_rows))
            say()
        say(
            f"{report.ok} objects are sound ({size_text(report.nbytes)}), {report.fixed} deleted, "
            f"{unfixed} left."
        )
        if report.resealed:
            say(f"{report.resealed} were sealed again with the current key.")
        if report.unchecked:
            say(f"{report.unchecked} are sealed; give --key to check them.")
        if unfixed and not args.fix:
            say("`--fix` deletes corrupt and orphaned files. For a reader they are misses.")
    return Exit.NO if unfixed else Exit.DONE


def _prove_options(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of the engine: http://127.0.0.1:8000")
    parser.add_argument("--model", default="", metavar="NAME", help="default: the first that it serves")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="its API key is the first line")
    parser.add_argument("--short", action="store_true", help="fewer and shorter prompts: a smoke test")
    parser.add_argument(
        "--seed", type=whole_number, default=None, metavar="N", help="of the prompts (default: new ones)"
    )
    parser.add_argument("--first", action="store_true", help="end with the first stage that finds something")
    parser.add_argument(
        *("--reset",),
        default="/reset_prefix_cache",
        metavar="PATH",
        help="POST this to empty the engine's own prefix cache (default: %(default)s, of vLLM)",
    )
    parser.add_argument("--restart", default="", metavar="COMMAND", help="a shell command that restarts it")
    parser.add_argument(
        "--baseline", default="", metavar="URL", help="the same engine without a cache, to compare its speed"
    )
    parser.add_argument(
        "--limit", type=seconds, default="300s", metavar="TIME", help="an answer later than that is a finding"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="the report as a page")
    json_option(parser)


def _try_to_write(option: str, file: Path) -> None:
    is_new = not file.exists()
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}") from None


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise TierError(f"--html {file}: {error.strerror}") from None


def _prove(args: Namespace) -> Exit:
    from lmtier.tools.prove import report
    from lmtier.tools.prove.endpoint import Endpoint, NoAnswer
    from lmtier.tools.prove.proof import Effort, Proof

    key = first_line("--key-file", args.key_file) if args.key_file else ""
    if args.html:
        _try_to_write("--html", args.html)  # before hours of asking
    engines = [
        Endpoint(url, token=key, name=args.model, limit=args.limit)
        for url in (args.url, args.baseline)
        if url
    ]
    for engine in engines:
        engine.connect()
    proof = Proof(
        engines[0],
        Effort.short() if args.short else Effort.whole(),
        seed=args.seed,
        reset=args.reset,
        restart=args.restart,
        baseline=engines[1] if len(engines) > 1 else None,
    )
    with Progress(proof.size) as progress, until_interrupted() as interruption:
        try:
            proof.run(progress.step, first=args.first)
        except NoAnswer as error:
            raise TierError(f"{args.url} does not answer: {error}") from None
    say(json.dumps(report.as_json(proof), indent=2) if args.json else report.text(proof))
    if args.html:
        _write(args.html, report.html(proof))
    return interruption.status if interruption.came else report.status(proof)


COMMANDS = (
    Subcommand("bench", "measure every path beside its physical limit", _bench_options, _bench),
    Subcommand("demo", "show hits from every tier with a small model", _demo_options, _demo),
    Subcommand(
        "verify", "read every object of a disk tier and report what is wrong", _verify_options, _verify
    ),
    Subcommand(
        "prove",
        "ask any engine with any cache, and compare its answers with and without reuse",
        _prove_options,
        _prove,
        "Exit codes: 0 right, 1 a wrong or missing answer, 3 nothing is proven; others as of all commands.",
    ),
)
