"""Compares two checkouts: the samples of `lmtier bench` from both in turn, so that noise meets both alike.

    python bench/two_trees.py OLD NEW lookups.match [--rounds 41] [--clock wall|thread|process]

`lookups.match` is a function of the package lmtier_bench. On a busy machine take the CPU time of the thread,
or of the process where a tier's threads work. It prints new : old by our value and by its ratio to the limit,
then both values. Above 1, NEW is better.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time, "process": time.process_time}


def side(group: str, rounds: int, clock: str) -> None:
    """One tree's samples: a line for each line on stdin."""
    time.perf_counter = CLOCKS[clock]
    bench: Any = import_module("lmtier_bench")
    module, _, name = group.partition(".")
    with tempfile.TemporaryDirectory(prefix="lmtier-bench-") as folder:
        scale = replace(bench._full(Path(folder), 1), rounds=rounds, disk_rounds=rounds)
        samples = getattr(import_module(f"lmtier_bench.{module}"), name)(scale)
        for _ in sys.stdin:
            sys.stdout.write(json.dumps(next(samples, None)) + "\n")
            sys.stdout.flush()


def start(tree: Path, asked: argparse.Namespace) -> subprocess.Popen[str]:
    roots = [tree / part for part in ("", "backends", "integrations", "bench")]
    return subprocess.Popen(
        [sys.executable, __file__, "--side", asked.group, str(asked.rounds), asked.clock],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots)), "PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def compare(asked: argparse.Namespace) -> None:
    trees = {name: start(tree.absolute(), asked) for name, tree in (("old", asked.old), ("new", asked.new))}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: defaultdict(list) for name in trees}
    running, turn = list(trees), 0
    while running:
        turn += 1
        for name in running[:: 1 if turn % 2 else -1]:
            process = trees[name]
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            if (sample := json.loads(process.stdout.readline() or "null")) is None:
                running.remove(name)
                process.communicate()
            else:
                found[name][sample[0]].append((sample[1], sample[2]))
    from lmtier.tools.terminal import say
    from lmtier_bench import PATHS

    for path, old in found["old"].items():
        if not (new := found["new"].get(path)):
            continue
        ours = [median(each[0] for each in samples) for samples in (old, new)]
        ratios = [median(a / b if b else 1 for a, b in samples) for samples in (old, new)]
        sign = 1 if PATHS[path].is_rate else -1
        changes = [(after / before) ** sign for before, after in (ours, ratios) if before]
        shown = " ".join(f"{change:6.3f}" for change in changes)
        say(f"{path:58} {shown}   {ours[0]:.4g} {ours[1]:.4g}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        side(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        options.add_argument("old", type=Path)
        options.add_argument("new", type=Path)
        options.add_argument("group", help="such as lookups.match, copies.small or disk.store_and_load")
        options.add_argument("--rounds", type=int, default=21)
        options.add_argument("--clock", choices=CLOCKS, default="wall")
        compare(options.parse_args())
