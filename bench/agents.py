"""The tables of sessions in docs/POLICIES.md: policies with and without sessions, over all traces.

    python bench/agents.py FOLDER/{claude_code,agentic,mooncake_synthetic}.jsonl.gz --plot docs/agents.svg

The bound is a cache that knows all requests beforehand. Three traces are made up: conversations that pause
for minutes and come back, the same under floods of prompts that come once, and two tenants of which one
scans. One tier of memory, 128 KiB a token.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import rivals
from lmtier.rules.hints import WAIT, Action
from lmtier.tools.sim import report
from lmtier.tools.sim.bound import set_bounds
from lmtier.tools.sim.replay import ReplayResult, replay
from lmtier.tools.sim.traces import Trace, TraceRequest, read
from lmtier.tools.terminal import say

PER_TOKEN = 128 << 10
BLOCK = 512
CAPACITIES = {
    "claude_code.jsonl.gz": (40, 60, 90, 125, 250),
    "agentic.jsonl.gz": (40, 60, 125, 250),
    "mooncake_synthetic.jsonl.gz": (60, 250, 1000),
}
DRAWN = {"agentic.jsonl.gz": "", "claude_code.jsonl.gz": "_recorded"}
"""The traces that are drawn, and what the names of their plots end with."""
DRAWN_TITLE = "agents: tokens hit"
MADE = (8, 16, 32)
ALONE = "waits alone"
"""Hints of agents that say when they wait, but never that they end: then the last request waits as well."""
HINTS = ("ends", "waits", ALONE)
COLUMNS = [("lru", "none"), ("arc", "none"), ("auto", "none"), *(("auto", hints) for hints in HINTS)]
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


def hinted(trace: Trace, hints: str) -> Trace:
    if hints != ALONE:
        return trace.hinted(hints)
    requests = [
        request._replace(hints=tuple(Action(hint.id, WAIT) for hint in request.hints))
        for request in trace.hinted("waits").requests
    ]
    return replace(trace, requests=requests)


def run(trace: Trace, policy: str, hints: str, gib: int) -> ReplayResult:
    url = f"cpu://?capacity={gib}GiB&policy={policy}"
    outcome = replay(hinted(trace, hints), [url], chunk_tokens=trace.block_tokens, bytes_per_token=PER_TOKEN)
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
        say(f"| GiB | {' | '.join(names)} | bound |")
        say(f"|--:|{'--:|' * (len(columns) + 1)}")
        for gib in CAPACITIES.get(trace.name, MADE):
            found = {each: run(trace, *each, gib) for each in columns}
            cells = [f"{100 * outcome.hit_ratio:.2f}" for outcome in found.values()]
            (lru, *_) = found.values()
            set_bounds([lru], trace, trace.block_tokens)
            assert lru.bound is not None
            say(f"| {gib} | {' | '.join(cells)} | {100 * lru.bound:.2f} |")
            if trace.name in DRAWN:
                drawn += [
                    each for (policy, hints), each in found.items() if policy != "arc" and hints != ALONE
                ]
        say()
        if plot is not None and trace.name in DRAWN:
            report.plot(plot.with_stem(f"{plot.stem}{DRAWN[trace.name]}"), DRAWN_TITLE, report.curves(drawn))
            drawn.clear()
    say(f"{time.process_time() - began:.0f} s of one core.")


if __name__ == "__main__":
    main(sys.argv[1:])
