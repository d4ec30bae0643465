"""The tables of docs/POLICIES.md on what is written to a disk: hits and bytes a day, by rule and budget.

    python bench/writes.py mooncake_synthetic.jsonl.gz rag:2000 agentic:600 [--sizes 1000/4000,5000/20000]

A trace is a file that `lmtier simulate` reads, or made-up traffic and its number of requests. Memory and a
disk, both with their default policy; a chunk is a block of the trace, at 128 KiB a token (Llama-3.1-8B in
bf16), and the last part of a prompt counts as one. Replayed through the real cache; only the bytes are
missing. A cell: share of the tokens found, TiB written a day.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from lmtier.format.layout import stored_size
from lmtier.tools.sim import synthetic
from lmtier.tools.sim.replay import ReplayResult, replay
from lmtier.tools.sim.traces import Trace, read
from lmtier.tools.terminal import say

BYTES_PER_TOKEN = 128 * 1024
RULES = ("always", "reused", "evicted", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--sizes", default="500/2000,1000/4000,2000/8000,2000/20000,5000/20000")
    parser.add_argument("--budgets", default="64TiB,16TiB", help="a day")
    asked = parser.parse_args()
    budgets = asked.budgets.split(",")
    for name in asked.traces:
        trace = made_up(name) or read(Path(name))
        say(f"{trace.name}: {len(trace.requests):,} requests in {trace.seconds:,.0f} s\n")
        columns = [*RULES, *(f"{rule} {budget}" for budget in budgets for rule in RULES)]
        say(f"| memory / disk, chunks | {' | '.join(columns)} |")
        say(f"|--:|{'--:|' * len(columns)}")
        began = time.process_time()
        for pair in asked.sizes.split(","):
            memory, disk = map(int, pair.split("/"))
            rules = [*RULES, *(f"{rule}&writes_per_day={budget}" for budget in budgets for rule in RULES)]
            cells = [cell(run(trace, memory, disk, rule)) for rule in rules]
            say(f"| {memory:,} / {disk:,} | {' | '.join(cells)} |")
        say(f"\n{time.process_time() - began:.0f} s of one core.\n")


def made_up(name: str) -> Trace | None:
    kind, _, requests = name.partition(":")
    return synthetic.make(kind, requests=int(requests), seed=1) if requests.isdigit() else None


def run(trace: Trace, memory: int, disk: int, rule: str) -> ReplayResult:
    chunk = trace.block_tokens * BYTES_PER_TOKEN
    urls = [
        f"cpu://?capacity={memory * chunk}",
        f"disk://?capacity={disk * stored_size(chunk)}&write={rule}",
    ]
    return replay(
        *(trace, urls), chunk_tokens=trace.block_tokens, bytes_per_token=BYTES_PER_TOKEN, partial=True
    )


def cell(outcome: ReplayResult) -> str:
    tib = outcome.written_per_day("disk") / 2**40
    return f"{outcome.hit_ratio:.4f}, {tib:,.1f}"


if __name__ == "__main__":
    main()
