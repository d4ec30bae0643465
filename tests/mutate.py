"""Are the tests any good? Change the core a little, many times, and see whether some test minds.

    python -m tests.mutate collect                    once: which tests come to which line (minutes)
    python -m tests.mutate run --sample 300 --seed 1  a sample of all changes; --sample 0: all of them (days)
    python -m tests.mutate run --only below.py:412    one line

Run it in a copy of the tree: it writes each change into it, and takes it back. A change is a comparison
turned, a condition negated, a call dropped, a result that is nothing, a number off by one, plus for minus.
For each, only the tests that come to its line run, the quickest first. docs/RELIABILITY.md has what came out.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CORE = (
    *("cache", "below", "index", "slab", "keys", "layout", "mover", "paging", "store", "policy", "shares"),
    *("lifetimes", "codec", "presence", "workers", "breaker", "writing", "server/engines", "server/values"),
)
FILES = [f"lmtier/{name}.py" for name in CORE]
FILES += ["backends/lmtier_backends/disk.py", "backends/lmtier_backends/redis.py"]
UNITS = (
    *(
        "cache",
        "clear_below",
        "codec",
        "codec_objects",
        "codec_tiers",
        "curve",
        "engines",
        "explain",
        "index",
    ),
    *(
        "journal",
        "keys",
        "layerwise",
        "layout",
        "lifetimes",
        "metrics",
        "mover",
        "paging",
        "policy",
        "presence",
    ),
    *("resp", "shares", "slab", "worth", "writing"),
)
WALKED = [
    f"lmtier/{name}.py"
    for name in ("cache", "below", "index", "slab", "policy", "shares", "lifetimes", "writing", "breaker")
]
TESTS = [f"tests/unit/test_{name}.py" for name in UNITS]
TESTS += ["tests/conformance", "tests/model/test_values_machine.py", "tests/faults/test_disk_faults.py"]
KNOWN = ROOT / ".mutants.json"
TURNED: dict[type[ast.AST], str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"},
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.And: "or", ast.Or: "and"},
}
ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # a stale one looks like the tree before
SPARED = ("log.", "logging.", "self._declare", "assert")
"""What nobody promises."""


class Mutant(NamedTuple):
    file: str
    line: int
    start: int
    end: int
    """Characters of the file."""
    new: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]


def mutants(file: str) -> Iterator[Mutant]:
    source = (ROOT / file).read_text()
    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: Any) -> tuple[int, int]:
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def change(node: Any, new: str) -> Mutant:
        return Mutant(file, node.lineno, *span(node), new)

    def text(node: Any) -> str:
        start, end = span(node)
        return source[start:end]

    def visit(node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef) and node.name in ("check", "__repr__", "__str__"):
            return
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield change(node, f"({text(left)}) {TURNED[type(op)]} ({text(right)})")
            case ast.BoolOp(op=op, values=[first, *others]):
                yield change(
                    node, f" {TURNED[type(op)]} ".join(f"({text(each)})" for each in (first, *others))
                )
            case ast.BinOp(left=left, op=op, right=right) if type(op) in TURNED:
                yield change(node, f"({text(left)}) {TURNED[type(op)]} ({text(right)})")
            case ast.If() | ast.While() | ast.IfExp():
                yield change(node.test, f"(not ({text(node.test)}))")
            case ast.Expr(value=ast.Call()) if not text(node).startswith(SPARED):
                yield change(node, "pass")
            case ast.Return(value=ast.expr() as value) if text(value) != "None":
                yield change(value, {"True": "False", "False": "True"}.get(text(value), "None"))
            case ast.AugAssign(target=target, op=op, value=value) if type(op) in (ast.Add, ast.Sub):
                yield change(node, f"{text(target)} {TURNED[type(op)]}= {text(value)}")
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                yield change(node, str(number + 1))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Assert):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not (
                    isinstance(child, ast.Call) and text(child).startswith(SPARED)
                ):
                    yield from visit(child)

    yield from visit(ast.parse(source))


class Watch:
    """A plugin of pytest: tells coverage which test runs, and takes its time."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:  # without any change: its word is worth nothing
            self.failed.add(report.nodeid)


def collect() -> None:
    import coverage
    import pytest

    measured = coverage.Coverage(data_file=None, include=FILES)
    watch = Watch(measured)
    measured.start()
    status = pytest.main(
        ["-q", "-m", "not slow and not long", "-p", "no:cacheprovider", *TESTS], plugins=[watch]
    )
    measured.stop()
    data = measured.get_data()
    lines = {
        str(Path(file).relative_to(ROOT)): {
            line: sorted({*tests} - {""} - watch.failed)
            for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    KNOWN.write_text(json.dumps({"lines": lines, "seconds": watch.seconds}))
    sys.exit(status)


def verdict(mutant: Mutant, tests: list[str], seconds: dict[str, float]) -> str:
    """Who kills it: random walks are asked first, then the quick tests, so that most need no others."""
    path = ROOT / mutant.file
    source = path.read_text()
    path.write_text(mutant.apply(source))
    try:
        compile(mutant.apply(source), mutant.file, "exec")
        words = ["-m", "tests.model.walks", "--walks", "60", "--shorten", "0"]
        if mutant.file in WALKED and (said := asked(words, 240)):
            return f"killed by a walk: {said}"
        tests = sorted(tests, key=lambda test: seconds.get(test, 0.0))
        total = 0.0
        quick = [test for test in tests if (total := total + seconds.get(test, 0.0)) < 8.0][:400]
        for some in (quick, [test for test in tests if test not in {*quick}]):
            limit = 60 + 5 * sum(seconds.get(test, 0.0) for test in some)
            words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
            if some and (said := asked([*words, "-o", f"timeout={limit / 2:.0f}", *some], limit)):
                return f"killed: {said}"
        return "lives"
    except SyntaxError:
        return "killed: no Python"
    finally:
        path.write_text(source)


def asked(words: list[str], limit: float) -> str:
    """What they say against it."""
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=limit, env=ENVIRONMENT
        )
    except subprocess.TimeoutExpired:
        return "it takes for ever"
    if not done.returncode:
        return ""
    said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    starts = ("FAILED", "ERROR", "walk ")
    return next((line for line in said if line.startswith(starts)), said[-1] if said else "it dies")[:120]


def run(sample: int, seed: int, only: str) -> None:
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {"lines": {}, "seconds": {}}
    every = [mutant for file in FILES for mutant in mutants(file)]
    if only:
        file, _, line = only.partition(":")
        every = [each for each in every if each.file.endswith(file) and line in ("", str(each.line))]
    elif sample:
        every = random.Random(seed).sample(every, sample)
    score: dict[str, int] = {}
    for number, mutant in enumerate(every, 1):
        tests = known["lines"].get(mutant.file, {}).get(str(mutant.line), [])
        began = time.monotonic()
        said = verdict(mutant, tests, known["seconds"])
        if said == "lives" and not tests:
            said = "no test comes here"
        score[said.split(":")[0]] = score.get(said.split(":")[0], 0) + 1
        source = (ROOT / mutant.file).read_text()
        old = " ".join(source[mutant.start : mutant.end].split())
        print(
            f"{number}/{len(every)} {mutant.file}:{mutant.line} `{old}` -> `{' '.join(mutant.new.split())}`: "
            f"{said} ({len(tests)} tests, {time.monotonic() - began:.0f} s) {score}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Change the core a little, and see whether a test minds.")
    parser.add_argument("what", choices=("collect", "run"))
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    if arguments.what == "collect":
        collect()
    else:
        run(arguments.sample, arguments.seed, arguments.only)
