"""How many tokens of a trace a model with states can reuse, by where states are kept.

    .venv/bin/python bench/state_places.py TRACE …

Nothing is ever evicted. A prefix is reusable up to its last chunk after which a state is kept. An answer's
tokens are those that a later prompt has behind this one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lmtier.tools.sim.traces import Trace, read
from lmtier.tools.terminal import say, table

STEP = 8192
CHOICES = {
    "where prompts end": {"prompts"},
    "and every 8,192 tokens": {"prompts", "steps"},
    "and where answers end": {"prompts", "steps", "answers"},
    "and where prompts part, once seen": {"prompts", "steps", "answers", "parts"},
    "after every chunk": {"all"},
}


def reused(trace: Trace, kept: set[str]) -> tuple[int, int]:
    """Tokens that are reused, and states that are kept."""
    size = trace.block_tokens
    stored_keys: set[bytes] = set()
    states: set[bytes] = set()
    answers: dict[bytes, int] = {}
    """After which chunk an answer begins, and the chunk at whose end it ends."""
    reused_tokens = 0
    for request, keys in zip(trace.requests, trace.keys(size), strict=True):
        full_chunks = (request.tokens - 1) // size
        chain = keys[:full_chunks]
        shared_chunks = next((n for n, key in enumerate(chain) if key not in stored_keys), full_chunks)
        if "answers" in kept:
            for n, key in enumerate(chain):
                end = answers.get(key, 0)
                if n < end <= shared_chunks:
                    states.add(chain[end - 1])
        usable = next((n for n in range(shared_chunks, 0, -1) if "all" in kept or chain[n - 1] in states), 0)
        reused_tokens += usable * size
        state_positions = {full_chunks} if "prompts" in kept else set()
        if "steps" in kept:
            state_positions |= {at // size for at in range(usable * size + STEP, request.tokens, STEP)}
        if "parts" in kept:
            state_positions.add(shared_chunks)
        states |= {chain[n - 1] for n in state_positions if usable < n <= full_chunks}
        stored_keys |= set(chain)
        if chain:
            answers[chain[-1]] = max(answers.get(chain[-1], 0), (request.tokens + request.output) // size)
    return reused_tokens, len(stored_keys if "all" in kept else states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    for path in parser.parse_args().traces:
        trace = read(path)
        asked = trace.tokens
        rows = []
        for name, kept in CHOICES.items():
            found, states = reused(trace, kept)
            rows.append((name, f"{100 * found / asked:.1f}", f"{states / len(trace.requests):.2f}"))
        say(f"\n{path.name}: {len(trace.requests)} requests, {asked} tokens, chunks of {trace.block_tokens}")
        say(table(("states are kept", "% of tokens reused", "states a request"), rows))


if __name__ == "__main__":
    main()
