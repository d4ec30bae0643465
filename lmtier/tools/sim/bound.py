"""The most hits that a cache of some size can have: one that knows all requests beforehand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush

from lmtier.tools.sim.replay import ReplayResult
from lmtier.tools.sim.traces import Trace


def set_bounds(outcomes: Sequence[ReplayResult], trace: Trace, chunk_tokens: int) -> None:
    """Give each result of this trace its bound, if its tiers have one."""
    prompts = [*trace.keys(chunk_tokens)]
    hits: dict[int, int] = {}
    for outcome in outcomes:
        if (room := outcome.room) is not None and outcome.requests == len(prompts):
            if room not in hits:
                hits[room] = most_hits(prompts, room)
            outcome.bound = hits[room] * chunk_tokens / max(1, outcome.tokens)


def most_hits(prompts: Sequence[Sequence[bytes]], room: int) -> int:
    """How many chunks a cache of `room` chunks finds that always evicts what is asked for last.

    Of chunks that are asked for again at once, the one deepest in its prompt leaves: the others are no hits
    without those before them.
    """
    uses: dict[bytes, list[int]] = defaultdict(list)
    for number in range(len(prompts) - 1, -1, -1):
        for key in prompts[number]:
            uses[key].append(number)
    never, hits = len(prompts), 0
    next_use: dict[bytes, tuple[int, int]] = {}
    """For each key in the cache: the negative number of the next request for it, and its negative depth."""
    leaving: list[tuple[tuple[int, int], bytes]] = []
    """A heap of these, of which some are outdated."""
    for keys in prompts:
        hits += next((depth for depth, key in enumerate(keys) if key not in next_use), len(keys))
        for depth, key in enumerate(keys):
            uses[key].pop()
            next_use[key] = -(uses[key][-1] if uses[key] else never), -depth
            heappush(leaving, (next_use[key], key))
        while len(next_use) > room:
            when, key = heappop(leaving)
            if next_use.get(key) == when:
                del next_use[key]
    return hits
