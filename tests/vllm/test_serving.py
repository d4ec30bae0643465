"""The workloads and the goals of bench/serving.py; the servers are for a run of the bench."""

from __future__ import annotations

import random
from itertools import count, islice

import pytest

from bench.serving import BLOCK, LEAST, NOTHING_AGAIN, WORKLOADS, Row, goals

ENGINE = 512  # blocks, by default


def made(workload: str, asks: int = 40):
    numbers = count()
    return WORKLOADS[workload](random.Random(1), lambda many: list(islice(numbers, many)), asks)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_trace_is_the_same_each_time_and_fits_its_cell(workload):
    asks = made(workload)
    assert asks == made(workload)
    assert all(0 <= each.at <= 1 for each in asks)
    assert max(len(each.blocks) for each in asks) * BLOCK < 8192


@pytest.mark.parametrize("workload", ["prefix repetition", "multi-turn", "long-document QA"])
def test_what_comes_back_is_more_than_the_engine_holds(workload):
    asks = made(workload, LEAST)
    assert len({block for each in asks for block in each.blocks}) > ENGINE
    assert len({block for each in asks for block in each.blocks}) < sum(len(each.blocks) for each in asks)


def test_nothing_comes_twice_without_reuse():
    blocks = [block for each in made(NOTHING_AGAIN) for block in each.blocks]
    assert len(blocks) == len(set(blocks))


def test_a_goal_is_missed_if_every_round_misses_it():
    def row(name: str, *times: float) -> Row:
        rounds = [{"failed": 0.0, "ttft p99": each, "tokens/s": 1.0} for each in times]
        return Row("larger", "convoy", 0.9, name, rounds)

    missed = [line[:6] == "MISSED" for line in goals([row("lmtier", 11, 11), row("plain", 10, 10)])]
    assert missed == [True, False]
    assert not any(line[:6] == "MISSED" for line in goals([row("lmtier", 11, 10), row("plain", 10, 10)]))
