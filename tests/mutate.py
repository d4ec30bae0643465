"""Are the tests any good? Change the core a little, many times, and see whether some test minds.

    python -m tests.mutate collect                    once: which tests come to which line (minutes)
    python -m tests.mutate run --sample 300 --seed 1  a sample of all changes; --sample 0: all of them (days)
    python -m tests.mutate run --sample 300 --first 101    the same sample, from its 101st change
    python -m tests.mutate run --only lower.py:412 --tests tests/core/test_lower.py    one line, and new tests

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
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FILES = [
    *(f"lmtier/format/{name}.py" for name in ("keys", "layout", "objects")),
    *(f"lmtier/copy/{name}.py" for name in ("mover", "paging")),
    *("lmtier/tiers/blocking.py", "lmtier/server/values.py"),
    *(
        f"lmtier/server/engines/{name}.py"
        for name in ("arguments", "engine_sessions", "transfers", "operator_verbs")
    ),
    *("backends/lmtier_backends/disk.py", "backends/lmtier_backends/redis/tier.py"),
]
WALKED = [
    str(path.relative_to(ROOT))
    for part in ("core", "rules")
    for path in sorted((ROOT / "lmtier" / part).glob("[a-z]*.py"))  # a seed is the same sample everywhere
]
FILES += WALKED
TESTS = [f"tests/{part}" for part in ("core", "rules", "format", "tiers", "observe", "wire", "conformance")]
TESTS += [f"tests/copy/test_{name}.py" for name in ("mover", "paging", "layerwise")]
TESTS += [f"tests/server/test_{name}.py" for name in ("engines", "explain")]
TESTS += [
    "tests/model/test_values_machine.py",
    *(f"tests/faults/test_{name}.py" for name in ("disk_faults", "redis_faults", "forks")),
]
SERVED = [f"tests/server/test_{name}.py" for name in ("redis_conformance", "transactions", "lifetimes")]
SERVED += [f"tests/server/test_{name}.py" for name in ("nearly_right", "tracing")]
SERVED += ["tests/client/test_client.py"]
SERVED += ["tests/server/test_console.py::test_clear_forgets_what_an_engine_stored_since_a_moment"]
"""Tests of a server in a process of its own. Nobody sees to which lines they come."""
KNOWN = ROOT / ".mutants.json"
TURNED: dict[type[ast.AST], str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"},
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.And: "or", ast.Or: "and"},
}
ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # a stale one looks like the tree before
QUICK = 8.0
"""Seconds of the tests that run before the walks."""
SPARED = ("log.", "logging.", "self._declare", "assert")
"""What nobody promises."""


class Mutant(NamedTuple):
    file: str
    line: int
    start: int
    end: int
    """Characters of the file."""
    new: str
    reach: range
    """The lines of its statement, or of the function whose argument has it as a default."""
    name: str
    """What the statement assigns to, if that is one name."""

    def tests(self, lines: dict[str, dict[str, list[str]]]) -> list[str]:
        """The tests that come to its line; to its statement; or, of a constant, to a line that names it."""
        mine = lines.get(self.file, {})
        if at_line := mine.get(str(self.line)):
            return at_line
        met = {test for line in self.reach for test in mine.get(str(line), ())}
        if not met and self.name:
            named = re.compile(rf"\b{self.name}\b")
            for file, tests in lines.items():
                for number, line in enumerate((ROOT / file).read_text().splitlines(), 1):
                    if named.search(line):
                        met.update(tests.get(str(number), ()))
        return [*met]

    def __str__(self) -> str:
        source = (ROOT / self.file).read_text()
        first = source.rfind("\n", 0, self.start) + 1
        before, old = source[first : self.start].lstrip(), source[self.start : self.end]
        after = source[self.end :].partition("\n")[0]
        return " ".join(f"{self.file}:{self.line} {before}[{old} -> {self.new}]{after}".split())

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
        return Mutant(file, node.lineno, *span(node), new, reach, name)

    def text(node: Any) -> str:
        start, end = span(node)
        return source[start:end]

    reach, name = range(0), ""

    def visit(node: ast.AST) -> Iterator[Mutant]:
        nonlocal reach, name
        match node:
            case ast.FunctionDef(name="check" | "__repr__" | "__str__"):
                return
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case ast.stmt():
                name = ""
        if isinstance(node, ast.stmt):
            inner = None if isinstance(node, ast.FunctionDef) else getattr(node, "body", None)
            end = inner[0].lineno if inner else node.end_lineno
            assert end is not None
            reach = range(node.lineno, end + 1)
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
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Assert):
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
        ["-q", "-m", "not slow and not long and not sealed", "-p", "no:cacheprovider", *TESTS],
        plugins=[watch],
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


def verdict(mutant: Mutant, tests: list[str], seconds: dict[str, float], new: list[str]) -> str:
    """Who kills it: the quickest tests that come to its line, random walks, then its other tests."""
    path = ROOT / mutant.file
    source = path.read_text()
    path.write_text(mutant.apply(source))
    try:
        compile(mutant.apply(source), mutant.file, "exec")
        if said := tested(new, seconds):
            return f"killed: {said}"
        tests = sorted(tests, key=lambda test: seconds.get(test, 0.0))
        sums = accumulate(seconds.get(test, 0.0) for test in tests)
        quick = min(200, sum(total < QUICK for total in sums))
        if said := tested(tests[:quick], seconds):
            return f"killed: {said}"
        words = ["-m", "tests.model.walks", "--walks", "60", "--shorten", "0"]
        if mutant.file in WALKED and (said := asked(words, 60)):
            return f"killed by a walk: {said}"
        others = [*tests[quick:], *(SERVED if mutant.file.startswith("lmtier/server/") else ())]
        if said := tested(others, seconds):
            return f"killed: {said}"
        return "lives"
    except SyntaxError:
        return "killed: no Python"
    finally:
        path.write_text(source)


def tested(tests: list[str], seconds: dict[str, float]) -> str:
    if not tests:
        return ""
    each = 20 + 5 * max(seconds.get(test, 40.0) for test in tests)
    words = ["-m", "tests.mutate", "ask", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    words += ["-m", "not slow and not long and not sealed"]
    limit = 60 + 3 * sum(seconds.get(test, 40.0) for test in tests)
    return asked([*words, "-o", f"timeout={each:.0f}", *tests], limit)


class Plain:
    """A plugin of pytest: examples are the same each time, and are not made smaller when they fail."""

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        phases = Phase.explicit, Phase.generate
        settings.register_profile("plain", derandomize=True, database=None, phases=phases)
        settings.load_profile("plain")


def ask(arguments: list[str]) -> int:
    import pytest

    return pytest.main(arguments, plugins=[Plain()])


def asked(words: list[str], limit: float) -> str:
    """What they say against it."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            if not process.wait(limit):
                return ""
        except subprocess.TimeoutExpired:
            return "it takes for ever"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the servers that its tests started
        out.seek(0)
        said = out.read().splitlines()
    starts = ("FAILED", "ERROR", "walk ")
    return next((line for line in said if line.startswith(starts)), said[-1] if said else "it dies")[:120]


def run(sample: int, seed: int, first: int, only: str, new: list[str]) -> None:
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {"lines": {}, "seconds": {}}
    every = [mutant for file in FILES for mutant in mutants(file)]
    if only:
        file, _, line = only.partition(":")
        every = [each for each in every if each.file.endswith(file) and line in ("", str(each.line))]
    elif sample:
        random.Random(seed).shuffle(every)
        every = every[:sample]  # so a larger sample begins with a smaller one
    score: dict[str, int] = {}
    for number, mutant in enumerate(every[first - 1 :], first):
        tests = mutant.tests(known["lines"])
        began = time.monotonic()
        said = verdict(mutant, tests, known["seconds"], new)
        score[said.split(":")[0]] = score.get(said.split(":")[0], 0) + 1
        took = f"{len(tests)} tests, {time.monotonic() - began:.0f} s"
        print(f"{number}/{len(every)} {mutant}: {said} ({took}) {score}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ask"]:
        sys.exit(ask(sys.argv[2:]))
    parser = argparse.ArgumentParser(description="Change the core a little, and see whether a test minds.")
    parser.add_argument("what", choices=("collect", "run"))
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--tests", nargs="*", default=[])
    arguments = parser.parse_args()
    if arguments.what == "collect":
        collect()
    else:
        run(arguments.sample, arguments.seed, arguments.first, arguments.only, arguments.tests)
