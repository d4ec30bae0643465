"""The miss-ratio curve agrees with a full simulation, in bounded memory."""

import random

import numpy as np
import pytest

from bench.curve import chain, simulated
from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.keys import VALUES, is_value
from lmtier.format.layout import form_of
from lmtier.observe.miss_curve import MissCurve
from lmtier.testing import opaque_layout

LAYOUT = opaque_layout(8192)
FORM = form_of(LAYOUT, (LAYOUT.whole,))


def conversations(requests, people, seed=1):
    """People who come back, some more than others, to a conversation that grows or is begun anew."""
    dice = np.random.default_rng(seed)
    turns = [0] * people
    lengths = dice.integers(1, 20, people)
    for who in (dice.zipf(1.2, requests) - 1) % people:
        turns[who] += 1
        topic, turn = divmod(turns[who], 6)
        own = [(who, topic, i) for i in range(lengths[who] * (turn + 1))]
        yield chain(*(("system", who % 3, i) for i in range(4)), *own)


def scan(requests, loop):
    """Over and over through more than a small cache holds, beside a few prompts that stay hot."""
    for i in range(requests):
        hot, place = i % 3 == 0, i % loop
        yield (
            chain(*((i % 5, "hot", j) for j in range(7))) if hot else chain(*((place, j) for j in range(12)))
        )


TRAFFIC = {
    "conversations": list(conversations(500, 100)),
    "scan": list(scan(600, 97)),
    "unique": [chain(i, 1, 2) for i in range(200)],
}
LARGE = {
    "one prompt before all": [chain("system", i * i % 4001, 1) for i in range(8000)],
    "conversations": list(conversations(1500, 400, seed=2)),
    "scan": list(scan(3000, 997)),
    "unique": [chain(i, 1, 2) for i in range(2000)],
}


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_the_curve_equals_lru_caches_of_any_size(traffic):
    lookups, curve = TRAFFIC[traffic], MissCurve(clock=lambda: 0.0)
    for keys in lookups:
        curve.add_lookup(keys)
    for capacity in (1, 10, 64, 400, 1200, 30_000):
        assert curve.hit_ratio(capacity) == pytest.approx(simulated(lookups, capacity), abs=1e-9)


@pytest.mark.parametrize("traffic", LARGE)
def test_with_too_many_keys_it_is_right_within_two_percent(traffic):
    lookups = LARGE[traffic]
    unique = len({key for keys in lookups for key in keys})
    size = unique // 3
    curve = MissCurve(lambda: unique, size=size, clock=lambda: 0.0)
    for keys in lookups:
        curve.add_lookup(keys)
        assert curve.tracked <= size
    assert curve.rate <= 0.25
    for capacity in (unique // 40, unique // 8, unique // 2, unique):
        assert curve.hit_ratio(capacity) == pytest.approx(simulated(lookups, capacity), abs=0.02)


def test_halving_the_sample_keeps_the_curve():
    lookups: list[tuple[bytes, ...]] = []
    curve = MissCurve(lambda: 1000, size=100, clock=lambda: 0.0)
    while curve.rate == 1:
        lookups.append(chain("system", len(lookups)))
        curve.add_lookup(lookups[-1])
    assert curve.hit_ratio(50) == pytest.approx(simulated(lookups, 50), abs=1e-9)


def test_keys_beyond_any_tiers_reach_are_forgotten():
    """The sample stays complete."""
    curve = MissCurve(lambda: 100, size=128, clock=lambda: 0.0)
    lookups = [chain(dice % 40, *range(dice % 7)) for dice in random.Random(1).choices(range(1000), k=3000)]
    for keys in lookups:
        curve.add_lookup(keys)
        assert curve.tracked <= 128
    assert curve.rate == 1
    for capacity in (10, 50, 100):
        assert curve.hit_ratio(capacity) == pytest.approx(simulated(lookups, capacity), abs=1e-9)


def test_lookups_are_numbered_anew_before_numbers_run_out():
    lookups = [chain(i % 9) for i in range(2000)] + [chain("end", i) for i in range(5)]
    curve = MissCurve(size=64, clock=lambda: 0.0)  # 512 numbers
    for keys in lookups:
        curve.add_lookup(keys)
    for capacity in (8, 9, 60):
        assert curve.hit_ratio(capacity) == pytest.approx(simulated(lookups, capacity), abs=1e-9)


def test_keys_that_are_no_chains_do_no_harm():
    dice = random.Random(1)
    names = chain(*range(200))
    curve = MissCurve(lambda: 1000, size=100, clock=lambda: 0.0)
    for _ in range(2000):
        curve.add_lookup(dice.sample(names, dice.randrange(30)))
        assert curve.tracked <= 100
    assert 0 <= curve.hit_ratio(50) <= 1


def test_history_fades():
    now = [0.0]
    curve = MissCurve(clock=lambda: now[0])
    for _ in range(100):
        curve.add_lookup(chain("again"))
    assert curve.hit_ratio(10) == pytest.approx(99 / 100)
    now[0] = 3600.0  # a half-life later it counts for half
    assert curve.hit_ratio(10) == pytest.approx(99 / 100)
    for i in range(50):
        curve.add_lookup(chain(i))
    assert curve.hit_ratio(10) == pytest.approx((99 / 2) / (100 / 2 + 50))


def test_nothing_asked_is_no_number():
    curve = MissCurve()
    assert np.isnan(curve.hit_ratio(10))
    curve.add_lookup(chain(1, 2), 0)
    assert np.isnan(curve.hit_ratio(10))


# ---- in a cache


def shown(cache, tier):
    return {
        factor: cache.metrics.value("lmtier_mrc_hit_ratio", tier=tier, size_factor=factor)
        for factor in ("0.5", "1", "2", "4", "8")
    }


@pytest.fixture
def cache(tmp_path):
    tiers = [
        f"cpu://?capacity={16 * FORM.slab_bytes}",
        f"disk://{tmp_path}?capacity={64 * FORM.stored_bytes}",
    ]
    with Cache(
        Config(tiers=tiers, chunk_tokens=4, prefault=False, load_deadline=30.0), is_record=is_value
    ) as cache:
        yield cache


def test_a_cache_shows_the_curve_of_each_of_its_tiers(cache):
    lookups = TRAFFIC["conversations"][:300]
    for keys in lookups:
        cache.release(cache.match(keys, FORM))
    for tier, size in (("cpu", 16), ("disk", 64)):
        for factor, ratio in shown(cache, tier).items():
            assert ratio == pytest.approx(simulated(lookups, size * float(factor)), abs=1e-9)


def test_tokens_beyond_the_last_chunk_count_as_asked(cache):
    for _ in range(2):
        cache.release(cache.match(chain(1, 2), FORM, tokens=16))
    assert shown(cache, "cpu")["8"] == 8 / 32


def test_chunks_of_the_engine_are_young_and_not_asked_for(cache):
    one, other = chain("one"), [chain(i) for i in range(16)]
    cache.release(cache.match(one, FORM))
    for keys in other[:15]:
        cache.release(cache.match(keys, FORM))
    cache.touch(one)
    cache.release(cache.match(other[15], FORM))
    cache.release(cache.match(one, FORM))
    assert shown(cache, "cpu")["1"] == pytest.approx(1 / 18)


def test_named_values_are_not_in_the_curve(cache):
    for _ in range(3):
        cache.release(cache.match([VALUES + bytes(28)], FORM))
    assert np.isnan(shown(cache, "cpu")["1"])
