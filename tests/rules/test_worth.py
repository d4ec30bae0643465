"""Load or recompute: the best of all cuts, and costs learned from what happens."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.format.layout import Layout, form_of, padded
from lmtier.rules import worth
from lmtier.rules.worth import ArrivalEstimate, Cost, CostFilter, EngineCosts, TierSpeed, choose_load

C = 4
LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=128, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
ROOM = padded(LAYOUT.nbytes(LAYOUT.whole))

# ---- the cut

seconds = st.floats(0, 10)


@st.composite
def situations(draw):
    lines = draw(st.lists(st.builds(ArrivalEstimate, seconds, st.floats(0, 1e-3)), max_size=3))
    place = st.sampled_from([-1, *range(len(lines)), *(-2 - number for number in range(len(lines)))])
    places = draw(st.lists(place, min_size=1, max_size=12))
    chunk = draw(st.integers(1, 300))
    tokens = len(places) * chunk + draw(st.integers(1, 500))
    cost = Cost(*(draw(st.floats(0, most)) for most in (1, 1e-2, 1e-4, 1e-3)))
    return cost, tokens, draw(st.integers(0, tokens - 1)), chunk, places, draw(st.integers(1, 10**6)), lines


def first_token(chunks, cost, tokens, has, chunk, places, nbytes, lines):
    """Seconds, in plain words: each tier brings its own, all at once; then the copy; then the rest."""
    arrivals = [0.0]
    for number, line in enumerate(lines):
        mine = places[:chunks].count(number)
        if mine or -2 - number in places[:chunks]:
            arrivals.append(line.start + line.byte * nbytes * mine)
    known = max(has, chunks * chunk)
    return max(arrivals) + cost.copy * (known - has) + cost.prefill(known, tokens), max(arrivals)


@given(situations())
def test_no_other_cut_is_expected_to_be_clearly_sooner(situation):
    chosen = choose_load(*situation)
    times = [first_token(chunks, *situation)[0] for chunks in range(len(situation[4]) + 1)]
    assert times[chosen.chunks] <= min(times) * (1 + worth._MARGIN) + 1e-9
    longer = times[chosen.chunks + 1 :]
    assert all(each >= min(times) * (1 + worth._MARGIN) - 1e-9 for each in longer), "of equals, the longest"
    assert chosen.arrival == pytest.approx(first_token(chosen.chunks, *situation)[1])


def test_a_slow_tier_is_worth_it_only_for_long_prompts():
    cost, slow = Cost(0.0, 1e-5, 1e-6, 0.0), ArrivalEstimate(0.0, 1e-3)

    def chosen(chunks: int) -> int:
        return choose_load(cost, 100 * chunks + 1, 0, 100, [0] * chunks, 10, [slow]).chunks

    assert (chosen(1), chosen(100)) == (0, 100)


def test_what_the_engine_has_itself_is_no_reason_to_load():
    cost, line = Cost(0.0, 1e-3, 0.0, 0.0), ArrivalEstimate(0.0, 0.5e-5)
    assert choose_load(cost, 1001, 0, 100, [0] * 10, 10_000, [line]).chunks == 10
    assert choose_load(cost, 1001, 900, 100, [0] * 10, 10_000, [line]).chunks == 0


# ---- learning


def work(start: int, end: int) -> tuple[int, float]:
    return end - start, (end * end - start * start) / 2


def run(prefill: EngineCosts, cost: Cost, dice: random.Random, prompts: int, *, noise=0.1, stalls=0.0):
    """Prompts in steps of at most 2,048 tokens."""
    for _ in range(prompts):
        length = dice.choice([100, 500, 1000, 2000, 4000, 8000])
        for start in range(0, length, 2048):
            took = cost.prefill(start, end := min(length, start + 2048)) * dice.lognormvariate(0, noise)
            prefill.learn(*work(start, end), took * (30 if dice.random() < stalls else 1))


def error(prefill: EngineCosts, cost: Cost) -> float:
    """The worst, as a factor."""
    found = prefill.cost
    assert found is not None
    parts = [(0, 500), (0, 2000), (0, 8000), (6000, 8000)]
    ratios = [found.prefill(*part) / cost.prefill(*part) for part in parts]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


COSTS = [Cost(0.004, 5e-5, 1e-8, 0.0), Cost(0.03, 1e-5, 1e-9, 0.0), Cost(1e-3, 1e-3, 1e-7, 0.0)]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("seed", range(5))
def test_the_cost_of_a_prefill_is_learned_despite_noise(cost, seed):
    """Stalls do not mislead it, and a cost that changes is learned anew."""
    dice, prefill = random.Random(seed), EngineCosts()
    run(prefill, cost, dice, 40, stalls=0.03)
    assert error(prefill, cost) < 1.35
    run(prefill, cost, dice, 10)
    assert error(prefill, cost) < 1.25
    slower = Cost(*(3 * each for each in cost))
    run(prefill, slower, dice, 40)
    assert error(prefill, slower) < 1.35


def test_one_stalled_step_changes_little():
    prefill = EngineCosts()
    run(prefill, COSTS[0], random.Random(0), 30)
    before = prefill.cost
    prefill.learn(*work(0, 2000), 100.0)
    assert before is not None
    assert prefill.cost is not None
    assert prefill.cost.prefill(0, 2000) < 2 * before.prefill(0, 2000)


def test_the_cost_of_copies_is_learned_after_some_steps():
    prefill = EngineCosts()
    for _ in range(3):
        prefill.learn(*work(0, 1000), 0.1)
        assert prefill.cost is None
    prefill.learn(*work(0, 1000), 0.1)
    assert prefill.cost is not None
    assert prefill.cost.copy == 0
    for _ in range(10):
        prefill.learn_copy(1000, 1e-3)
    assert prefill.cost.copy == pytest.approx(1e-6, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e6)), min_size=1, max_size=50))
def test_weights_stay_positive_and_finite_in_any_case(observations):
    fit = CostFilter((0.2, 0.8), noise=0.3, drift=0.5, most=1000.0)
    for amount, took in observations:
        fit.learn((1.0, amount), took)
    assert all(0 < weight < inf for weight in fit.weights)


class Link:
    """Brings what is asked of it, one after the other, at a given speed; time is a number."""

    def __init__(self, latency: float, byte: float, noise: float = 0.0) -> None:
        self.speed, self.now, self.dice = TierSpeed(), 0.0, random.Random(1)
        self.latency, self.byte, self.noise = latency, byte, noise

    def bring(self, *sizes: int) -> float:
        began = self.now
        for size in sizes:
            self.speed.asked(size, self.now)
        self.now += self.latency * self.dice.lognormvariate(0, self.noise)
        for size in sizes:
            self.now += self.byte * size * self.dice.lognormvariate(0, self.noise)
            self.speed.ended(size, self.now)
        took = self.now - began
        self.now += 10.0  # nobody asks
        return took

    def expected(self, nbytes: int) -> float:
        line = self.speed.line(self.now)
        return line.start + line.byte * nbytes


def test_a_tiers_speed_is_learned_from_its_transfers():
    """Idle time does not count."""
    link = Link(latency=2e-3, byte=1e-8, noise=0.1)
    assert not link.speed.is_measured
    for _ in range(60):
        link.bring(*[2**17] * link.dice.choice([1, 4, 16, 64]))
    for chunks in (1, 16, 64):
        assert link.expected(chunks * 2**17) == pytest.approx(2e-3 + 1e-8 * chunks * 2**17, rel=0.35)
    link.byte *= 100
    for _ in range(4):
        link.bring(*[2**17] * 16)
    assert link.expected(2**21) == pytest.approx(1e-6 * 2**21, rel=0.35)


def test_what_comes_in_bursts_is_not_taken_for_fast():
    """Four connections share a link, so four chunks come at a time, the last of a long load too."""
    speed, now = TierSpeed(), 0.0
    for chunks in (3, 8, 10, 1, 17, 60, 9, 11, 12, 125):
        for _ in range(chunks):
            speed.asked(100_000, now)
        while chunks:
            together, chunks = min(4, chunks), max(0, chunks - 4)
            now += together * 0.01
            for i in range(together):
                speed.ended(100_000, now + i * 1e-5)
        line = speed.line(now)
        assert line.byte * 12_500_000 == pytest.approx(1.25, rel=0.25), f"at {now:.2f} s"
        now += 5.0


def test_a_busy_tier_is_expected_to_take_longer():
    """A tier that does not move may take as long again."""
    link = Link(latency=1e-3, byte=1e-8)
    for _ in range(20):
        link.bring(2**20)
    idle = link.expected(2**20)
    link.speed.asked(10 * 2**20, link.now)
    assert link.expected(2**20) == pytest.approx(idle + 10 * 2**20 * 1e-8, rel=0.35)
    link.now += 100
    assert link.expected(2**20) >= 100
    link.speed.ended(10 * 2**20, link.now, counts=False)
    assert link.expected(2**20) == idle, "a miss says nothing of the speed"


def test_an_unmeasured_tier_takes_as_long_as_it_has_so_far():
    speed = TierSpeed()
    assert speed.line(5.0) == ArrivalEstimate(0.0, 0.0)
    speed.asked(2**20, 5.0)
    assert speed.line(7.0) == ArrivalEstimate(2.0, 0.0)
    assert not speed.is_measured
    speed.ended(2**20, 9.0)
    assert speed.is_measured
    assert speed.line(9.0).start + speed.line(9.0).byte * 2**20 == pytest.approx(4.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 3)), max_size=200))
def test_only_a_share_of_a_slow_tier_is_explored(skips):
    speed, now, skipped, explored, last = TierSpeed(), 0.0, 0, 0, -inf
    for chunks, wait in skips:
        now += wait
        skipped += chunks
        speed.skipped(1000 * chunks)
        if count := speed.explores(chunks, 1000, now):
            assert count <= chunks
            assert now - last >= worth._FRESH, "it was measured just now"
            explored, last = explored + count, now
            speed.asked(count * 1000, now)
            speed.ended(count * 1000, now)
    assert explored <= skipped * worth._EXPLORED


def test_nothing_is_explored_before_the_last_load_has_come():
    speed = TierSpeed()
    speed.asked(1000, 0.0)
    speed.skipped(100_000)
    assert not speed.explores(100, 1000, 100.0)
    speed.ended(1000, 100.0, counts=False)
    counts = []
    for _ in range(3):
        speed.skipped(100_000)
        counts.append(speed.explores(100, 1000, 100.0))
    assert counts == [1, 2, 4]
