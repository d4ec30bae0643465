"""Synthetic traffic with the patterns that matter to a prefix cache. The same seed gives the same trace.

    multi-turn   users who talk to an assistant: each prompt is the last one, its answer, and a message
    agentic      programs in a loop over a large shared prompt: fast steps, long contexts, compaction
    rag          questions after some documents of a large library: only the first ones can be shared

Lengths and pauses are lognormal, popularity is Zipf's. The numbers are plausible, not measured.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from math import log
from typing import TypeAlias

from lmtier.tools.sim.traces import Trace, TraceRequest

BLOCK_TOKENS = 256
_CONTEXT = 131_072
_RATE = 2.0  # requests per second

Prompt: TypeAlias = "list[tuple[int, int]]"
"""Texts in order: which one, how many tokens."""
Visit: TypeAlias = "tuple[float, Prompt, int]"
"""Seconds since the visit before, the prompt, tokens of the answer."""


@dataclass
class World:
    """The state that all sessions share: the random numbers and the texts."""

    chance: random.Random
    texts: Iterator[int] = field(default_factory=count)

    def about(self, median: float, spread: float = 1.0) -> int:
        return max(1, int(self.chance.lognormvariate(log(median), spread)))

    def write(self, tokens: int) -> tuple[int, int]:
        return next(self.texts), tokens

    def library(self, size: int, low: int, high: int) -> Shelf:
        return Shelf(self.chance, [self.write(self.chance.randint(low, high)) for _ in range(size)])


class Shelf:
    """Texts with Zipf's popularity: the n-th is used 1/n times as often as the first."""

    def __init__(self, chance: random.Random, texts: Sequence[tuple[int, int]]) -> None:
        self._chance = chance
        self._texts = texts
        self._weights = list(accumulate(1 / n for n in range(1, len(texts) + 1)))

    def pick(self, number: int = 1) -> Prompt:
        return self._chance.choices(self._texts, cum_weights=self._weights, k=number)


def _multi_turn(world: World) -> Callable[[], Iterator[Visit]]:
    systems = world.library(20, 200, 2_000)

    def session() -> Iterator[Visit]:
        prompt = systems.pick()
        pause = 0.0
        while sum(tokens for _, tokens in prompt) < _CONTEXT:
            prompt = [*prompt, world.write(world.about(120, 1.3))]
            answer = world.write(world.about(250, 0.8))
            yield pause, prompt, answer[1]
            if world.chance.random() < 0.2:
                return
            prompt = [*prompt, answer]
            pause = world.about(45, 1.2)

    return session


def _agentic(world: World) -> Callable[[], Iterator[Visit]]:
    systems = world.library(5, 4_000, 16_000)

    def session() -> Iterator[Visit]:
        system = systems.pick()
        prompt = [*system, world.write(world.about(400))]
        pause = 0.0
        for _ in range(world.about(15)):
            answer = world.write(world.about(150, 0.8))
            yield pause, prompt, answer[1]
            prompt = [*prompt, answer, world.write(world.about(800, 1.3))]
            if sum(tokens for _, tokens in prompt) > _CONTEXT * 3 // 4:
                prompt = [*system, world.write(world.about(3_000, 0.5))]  # a summary of all that
            pause = world.about(5)

    return session


def _rag(world: World) -> Callable[[], Iterator[Visit]]:
    systems = world.library(1, 500, 500)
    documents = world.library(5_000, 300, 1_500)

    def session() -> Iterator[Visit]:
        found = list(dict.fromkeys(documents.pick(world.chance.randint(3, 8))))
        yield 0.0, [*systems.pick(), *found, world.write(world.about(40, 0.6))], world.about(200, 0.8)

    return session


SHAPES: dict[str, Callable[[World], Callable[[], Iterator[Visit]]]] = {
    "multi-turn": _multi_turn,
    "agentic": _agentic,
    "rag": _rag,
}


def make(shape: str, *, requests: int, seed: int) -> Trace:
    """A trace of `requests` requests. Sessions begin at random."""
    world = World(random.Random(f"{shape} {seed}"))
    session = SHAPES[shape](world)
    block_ids: dict[tuple[tuple[int, int, int], ...], int] = {}
    length = _mean_length(shape)
    next_turns: list[tuple[float, int, Iterator[Visit], Visit]] = []
    order = count()
    made: list[TraceRequest] = []
    session_start = 0.0
    while len(made) < requests:
        while not next_turns or session_start <= next_turns[0][0]:
            visits = session()
            heapq.heappush(next_turns, (session_start, next(order), visits, next(visits)))
            session_start += world.chance.expovariate(_RATE / length)
        at, _, visits, (_, prompt, answer) = heapq.heappop(next_turns)
        tokens = sum(size for _, size in prompt)
        made.append(TraceRequest(at, tokens, answer, _blocks(prompt, block_ids)))
        if (next_turn := next(visits, None)) is not None:
            heapq.heappush(next_turns, (at + next_turn[0], next(order), visits, next_turn))
    return Trace(f"{shape} traffic, seed {seed}", BLOCK_TOKENS, made)


def _mean_length(shape: str) -> float:
    """The average number of requests per session, from a sample."""
    session = SHAPES[shape](World(random.Random(0)))
    return sum(1 for _ in range(200) for _ in session()) / 200


def _blocks(prompt: Prompt, block_ids: dict[tuple[tuple[int, int, int], ...], int]) -> list[int]:
    """A number for each block. Blocks with the same parts of the same texts have equal numbers."""
    blocks: list[int] = []
    parts: list[tuple[int, int, int]] = []
    block_space = BLOCK_TOKENS
    for text, tokens in prompt:
        offset = 0
        while offset < tokens:
            end = min(tokens, offset + block_space)
            parts.append((text, offset, end))
            block_space -= end - offset
            offset = end
            if not block_space:
                blocks.append(block_ids.setdefault(tuple(parts), len(block_ids)))
                parts, block_space = [], BLOCK_TOKENS
    if parts:
        blocks.append(block_ids.setdefault(tuple(parts), len(block_ids)))
    return blocks
