"""Random walks over a whole cache (walks.py says what they do): some of them, always the same."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lmtier.core.cache import Cache
from lmtier.format.layout import ChunkForm, Name
from lmtier.format.objects import Header
from tests.model import walks
from tests.model.hand import FORMS, LAYOUT, content, key


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("first", "number"),
    [
        pytest.param(1, 200, id="200"),
        pytest.param(100_001, 1_000, id="1,000", marks=pytest.mark.slow),
    ],
)
def test_any_walk_keeps_every_promise(first: int, number: int):
    totals = walks.run(first, number)
    assert totals["walks"] == number
    # They come to what they are about: each limit is about half of what is usual.
    for what, least in {
        "shards compared": 100,
        "jobs": 20,
        "jobs failed": 4,
        "kills": 0.4,
        "restarts": 0.2,
        "objects sure at a kill": 0.5,
        "wrong calls refused": 1,
        "found in cpu": 5,
        "found in near": 0.5,
        "found in far": 0.25,
    }.items():
        assert totals[what] > least * number, f"{totals[what]} {what} in {number} walks"


def test_a_seed_is_a_walk():
    assert walks.walk(7) == walks.walk(7)
    assert walks.walk(7)[0] != walks.walk(8)[0]


def test_a_walk_that_fails_is_told_in_few_steps(monkeypatch: pytest.MonkeyPatch):
    """A cache that forgets to take what was discarded out of its slab."""

    def check_and_forget(self: Cache, key: bytes, *forms: ChunkForm) -> None:
        """It deletes nothing."""

    monkeypatch.setattr(Cache, "discard", check_and_forget)
    with pytest.raises(AssertionError, match="1 too old") as caught:
        walks.run(1, 200)
    story = str(caught.value)
    steps = int(story.split("); ")[1].split()[0])
    assert steps <= 6
    assert "\ndiscard" in story
    assert "again: python -m tests.model.walks --seed" in story


def test_the_bytes_tell_what_they_are():
    """They depend on key, shard and age, so a swapped object cannot pass for the right one."""
    one, other = FORMS["two ranks"].shards
    some = [(key(0, 0), one, 0), (key(0, 0), other, 0), (key(0, 1), one, 0), (key(0, 0), one, 1)]
    assert len({content(*each) for each in some}) == len(some)
    assert Header(Name(key(0, 0), one), LAYOUT, 4800) != Header(Name(key(0, 0), other), LAYOUT, 4800)


def test_every_rule_is_in_the_walks():
    chance = random.Random(1)
    rules = Counter(step.rule for _ in range(20) for step in walks.steps_of(chance.randrange(10**6)))
    assert rules.keys() == walks.RULES.keys()
