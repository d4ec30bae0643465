"""The tables of sessions in docs/POLICIES.md: policies with and without sessions, over all traces.

    python bench/agents.py agentic.jsonl.gz mooncake_synthetic.jsonl.gz --plot docs/agents.svg

It adds three made-up traces: conversations that pause for minutes and come back, the same under floods of
prompts that come once, and two tenants of which one scans. One tier of memory, 128 KiB a token.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import rivals
from lmtier.tools.sim import report
from lmtier.tools.sim.replay import ReplayResult, replay
from lmtier.tools.sim.traces import Trace, TraceRequest, read
from lmtier.tools.terminal import say

PER_TOKEN = 128 << 10
BLOCK = 512
CAPACITIES = {"agentic.jsonl.gz": (60, 125, 250), "mooncake_synthetic.jsonl.gz": (60, 250, 1000)}
MADE = (8, 16, 32)
COLUMNS = [("lru", "none"), ("arc", "none"), ("auto", "none"), ("auto", "ends"), ("auto", "waits")]
"""LRU, its rival and lmtier's default without sessions, and the default with them."""


def talks(chance: random.Random, name: str, begin: float, pause: float) -> Iterator[TraceRequest]:
    """A conversation of fast steps, with a pause of some minutes after every few of them."""
    at, blocks = begin, [*(f"system{n}" for n in range(8)), *(f"{name}.{n}" for n in range(12))]
    for _ in range(chance.randrange(6, 18)):
        yield TraceRequest(at, len(blocks) * BLOCK, 200, tuple(blocks), name)
        blocks += [f"{name}.{len(blocks) + n}" for n in range(chance.randrange(1, 4))]
        at += chance.lognormvariate(5.2, 0.5) if chance.random() < pause else chance.lognormvariate(0.7, 0.6)


def once(chance: random.Random, number: int, at: float) -> TraceRequest:
    """A prompt that nobody asks for again."""
    length = chance.randrange(10, 40)
    return TraceRequest(
        at, length * BLOCK, 100, tuple(f"once{number}.{n}" for n in range(length)), f"once{number}"
    )


def made() -> Iterator[Trace]:
    def of(name: str, requests: list[TraceRequest]) -> Trace:
        return Trace(name, BLOCK, sorted(requests, key=lambda each: each.at))

    def conversations(seed: int, count: int = 150) -> list[TraceRequest]:
        chance = random.Random(seed)
        return [each for n in range(count) for each in talks(chance, f"talk{n}", 12.0 * n, 0.25)]

    chance = random.Random(7)
    yield of("pauses", conversations(1))
    floods = [once(chance, n, 400.0 * (n // 60) + 0.5 * (n % 60)) for n in range(300)]
    yield of("pauses and floods", conversations(2) + floods)
    scan = [once(chance, n, 4.0 * n) for n in range(450)]
    yield of("two tenants, one scans", conversations(3, 100) + scan)


def run(trace: Trace, policy: str, hints: str, gib: int) -> ReplayResult:
    url = f"cpu://?capacity={gib}GiB&policy={policy}"
    outcome = replay(trace.hinted(hints), [url], chunk_tokens=BLOCK, bytes_per_token=PER_TOKEN)
    outcome.hinted = hints
    return outcome


def main(words: list[str]) -> None:
    rivals.add()
    plot = Path(words.pop()) if words[-2:-1] == ["--plot"] else None
    words = [word for word in words if word != "--plot"]
    began = time.process_time()
    drawn: list[ReplayResult] = []
    for trace in (*(read(Path(path)) for path in words), *made()):
        columns = [each for each in COLUMNS if each[1] == "none" or any(r.session for r in trace.requests)]
        say(f"{trace.name}: {len(trace.requests):,} requests, {trace.tokens:,} tokens\n")
        names = [policy if hints == "none" else f"{policy}, {hints}" for policy, hints in columns]
        say(f"| GiB | {' | '.join(names)} | default behind |")
        say(f"|--:|{'--:|' * (len(columns) + 1)}")
        for gib in CAPACITIES.get(trace.name, MADE):
            found = {each: run(trace, *each, gib) for each in columns}
            cells = [f"{100 * outcome.hit_ratio:.2f}" for outcome in found.values()]
            best = max(found[rival, "none"].hit_ratio for rival in ("lru", "arc"))
            behind = 100 * (best - found["auto", "none"].hit_ratio)
            say(f"| {gib} | {' | '.join(cells)} | {max(0.0, behind):.2f} |")
            if trace.name.startswith("agentic"):
                drawn += [found[each] for each in columns if each[0] != "arc"]
        say()
    say(f"{time.process_time() - began:.0f} s of one core.")
    if plot is not None and drawn:
        report.plot(plot, "agents: tokens hit", report.curves(drawn))


if __name__ == "__main__":
    main(sys.argv[1:])
