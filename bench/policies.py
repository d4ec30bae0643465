"""The tables of docs/POLICIES.md: prefix hits of lmtier's policies, and of ARC, on real traces.

    python bench/policies.py conversation_trace.jsonl synthetic_trace.jsonl

The traces are Mooncake's (FAST'25 release), replayed through the real cache. One tier of memory, a block of
512 tokens a chunk, and the last part of a prompt counts as one, as in studies of policies. A hit is a chunk
of the leading run that is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import rivals
from lmtier.tools.sim.replay import replay
from lmtier.tools.sim.traces import read
from lmtier.tools.terminal import say

CHUNK = 4096
POLICIES = "lru", "arc", "auto"
CAPACITIES = (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 60_000)


def main(paths: list[str]) -> None:
    rivals.add()
    for path in paths:
        trace = read(Path(path))
        prompts = list(trace.keys(trace.block_tokens, partial=True))
        unique = len({key for keys in prompts for key in keys})
        accesses = sum(map(len, prompts))
        say(f"{trace.name}: {len(prompts):,} requests, {accesses:,} chunks, {unique:,} different ones\n")
        say(f"| chunks | {' | '.join(POLICIES)} |")
        say(f"|--:|{'--:|' * len(POLICIES)}")
        began = time.process_time()
        for capacity in CAPACITIES:
            ratios = []
            for policy in POLICIES:
                outcome = replay(
                    *(trace, [f"cpu://?capacity={capacity * CHUNK}&policy={policy}"]),
                    chunk_tokens=trace.block_tokens,
                    bytes_per_token=CHUNK / trace.block_tokens,
                    partial=True,
                )
                ratios.append(outcome.hit_ratio)
            best = max(ratios)
            cells = (f"{'**' * (ratio == best)}{ratio:.4f}{'**' * (ratio == best)}" for ratio in ratios)
            say(f"| {capacity:,} | {' | '.join(cells)} |")
        each = (time.process_time() - began) / accesses / len(CAPACITIES) / len(POLICIES)
        say(f"\n{each * 1e6:.1f} µs of one core a chunk, decisions and all.\n")


if __name__ == "__main__":
    main(sys.argv[1:])
