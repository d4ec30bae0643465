"""The live miss-ratio curve beside a full LRU simulation, on traces and generated traffic; and what it costs.

    python bench/curve.py [TRACE ...]

For several bounds on its memory: the largest difference over cache sizes from 1/64 of all chunks to all of
them, and microseconds of a lookup. Traces are Mooncake's, Qwen-Bailian's, or our own request logs.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lmtier.observe.miss_curve import MissCurve
from lmtier.tools.sim.traces import read
from lmtier.tools.terminal import say

Lookups = Sequence[tuple[bytes, ...]]


def simulated(lookups: Lookups, capacity: float) -> float:
    """A lookup hits the leading run that is there; then all of it is there, its head the youngest."""
    cached: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for keys in lookups:
        for key in keys:
            if key not in cached:
                break
            hits += 1
        for key in reversed(keys):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits / sum(map(len, lookups))


def chain(*names: object) -> tuple[bytes, ...]:
    keys: list[bytes] = []
    digest = b""
    for name in names:
        digest = hashlib.sha256(digest + repr(name).encode()).digest()
        keys.append(digest)
    return tuple(keys)


def chats(requests: int, people: int, seed: int) -> Lookups:
    """People come back to conversations that grow, under one of a few system prompts; some far more often."""
    dice = np.random.default_rng(seed)
    lengths, turns = dice.integers(1, 30, people), [0] * people
    lookups = []
    for who in (dice.zipf(1.15, requests) - 1) % people:
        turns[who] += 1
        topic, turn = divmod(turns[who], 8)
        own = [(int(who), topic, i) for i in range(lengths[who] * (turn + 1))]
        lookups.append(chain(*(("system", int(who) % 4, i) for i in range(6)), *own))
    return lookups


def documents(requests: int, count: int, seed: int) -> Lookups:
    """Questions about long documents, drawn evenly: a cliff at the size of all of them."""
    dice = np.random.default_rng(seed)
    return [
        chain("system", *((int(which), i) for i in range(40))) for which in dice.integers(0, count, requests)
    ]


def main(paths: Sequence[str]) -> None:
    traffic: dict[str, Lookups] = {}
    for path in paths:
        trace = read(Path(path))
        traffic[trace.name] = [tuple(keys) for keys in trace.keys(trace.block_tokens, partial=True)]
    traffic["chats"] = chats(3000, 1500, seed=1)
    traffic["documents"] = documents(3000, 600, seed=1)
    say(
        f"{'traffic':32} {'chunks':>8} {'memory':>8} {'rate':>6} {'largest difference':>18} {'us/lookup':>10}"
    )
    for name, lookups in traffic.items():
        unique = len({key for keys in lookups for key in keys})
        sizes = [unique >> n for n in range(7)]
        right = [simulated(lookups, size) for size in sizes]
        for bound in (1 << 16, 1 << 14, 1 << 12):
            curve = MissCurve(lambda unique=unique: unique, size=bound)  # type: ignore[misc]  # mypy: lambdas
            began = time.perf_counter()
            for keys in lookups:
                curve.add_lookup(keys)
            each = (time.perf_counter() - began) / len(lookups) * 1e6
            off = max(abs(curve.hit_ratio(size) - share) for size, share in zip(sizes, right, strict=True))
            say(f"{name:32} {unique:8} {bound:8} {curve.rate:6.3f} {off:18.4f} {each:10.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
