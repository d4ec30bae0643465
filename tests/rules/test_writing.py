"""What goes down to a disk: no more than its budget in any day, and by the rule that suits the traffic."""

from __future__ import annotations

import hashlib
import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.config import Config, TierSpec
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError
from lmtier.format.layout import form_of, stored_size
from lmtier.rules.writing import DAY, HOUR, Budget, WriteRate, WriteRuleTrial
from lmtier.testing import MemoryTier, opaque_layout
from lmtier.tools.sim import synthetic
from lmtier.tools.sim.replay import replay

CHUNK = 3 * 4096
AT_REST = stored_size(CHUNK)
TOKENS = 2
OPAQUE = opaque_layout(CHUNK)
LAYOUT = type(OPAQUE)(OPAQUE.layers, OPAQUE.dtype, TOKENS, TOKENS, OPAQUE.packing)
FORM = form_of(LAYOUT, [LAYOUT.whole])


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


# ---- the budget


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3 * HOUR),  # until then
            st.integers(1, 60_000) | st.integers(1, 400_000),  # bytes
            st.floats(0, 1),  # the share of them that is written
            st.floats(0, 3 * HOUR),  # how long that takes
            st.booleans(),  # asked for twice
            st.integers(0, 19),  # 0: a restart
        ),
        max_size=120,
    )
)
def test_no_day_sees_more_than_its_budget(history):
    per_day = 1_000_000
    now, budget, written = 0.0, Budget(per_day, 0.0), []
    for pause, nbytes, share, takes, is_proven, restart in history:
        now += pause
        if not restart:
            budget = Budget(per_day, now)
        if budget.allows(nbytes, is_proven, now):
            budget.reserve(nbytes)
            now += takes
            written.append((now, int(nbytes * share)))
            budget.spend(nbytes, written[-1][1], now)
    most = max([per_day / 24, *(nbytes for _, nbytes, *_ in history)])
    more = most - per_day / 24 if any(not restart for *_, restart in history) else 0
    for i, (began, _) in enumerate(written):
        assert sum(n for at, n in written[i:] if at - began <= DAY) <= per_day + more
        assert sum(n for at, n in written[i:] if at - began <= HOUR) <= most + per_day / 24


def test_a_days_budget_is_spent_fully_and_never_exceeded():
    """This holds on a day that begins with a full bucket too."""
    budget, spent = Budget(1_000_000, 0.0), 0
    for minute in range(24 * 60 + 1):
        now = 5 * HOUR + 60.0 * minute
        while budget.allows(100, True, now):
            budget.reserve(100)
            budget.spend(100, 100, now)
            spent += 100
    assert 0.99 < spent / 1_000_000 <= 1


def test_scarce_budget_is_kept_for_chunks_asked_for_twice():
    budget = Budget(24_000_000, 0.0)
    assert not budget.allows(1, True, 0.0), "a restart gives no new hour"
    assert budget.allows(1_000, True, 30.0)
    assert not budget.allows(1_000, False, 30.0)
    assert budget.allows(1_000, False, HOUR)
    assert not budget.allows(1_000_001, True, 10 * HOUR), "no more than an hour's worth at once"


def test_a_chunk_beyond_an_hours_budget_is_saved_up_for():
    budget, hours = Budget(24_000_000, 0.0), 0
    while not budget.allows(3_000_000, True, hours * HOUR):
        hours += 1
        assert hours < 5
    budget.reserve(3_000_000)
    budget.spend(3_000_000, 3_000_000, hours * HOUR)
    assert not budget.allows(3_000_000, True, (hours + 1) * HOUR)
    assert not budget.allows(13_000_000, True, 100 * DAY), "more than half of a day's bytes"


def test_writes_take_budget_and_what_codecs_save_returns():
    budget = Budget(24_000, 0.0)
    budget.reserve(900)
    assert budget.left(2 * HOUR) == pytest.approx(100)
    budget.spend(900, 300, 2 * HOUR)
    assert budget.left(2 * HOUR) == pytest.approx(700)


def test_the_pace_is_that_of_the_last_day():
    pace = WriteRate(0.0)
    assert pace.per_day(0.0) == 0
    for minute in range(60):
        pace.wrote(1_000, 60.0 * minute)
    assert pace.per_day(HOUR) == pytest.approx(24 * 60_000, rel=0.03)
    assert pace.per_day(10 * DAY) < 100


# ---- the choice


def lookup(choice: WriteRuleTrial, slab: dict[bytes, None], room: int, item: bytes) -> None:
    """One chunk in a slab that is LRU."""
    known = item in seen_before
    seen_before.add(item)
    if item in slab:
        del slab[item]
        choice.on_hit([item], 1, 0.0)
    else:
        choice.on_miss([item])
        choice.on_stored(item, known, 1, 0.0)
    slab[item] = None
    while len(slab) > room:
        left = next(iter(slab))
        del slab[left]
        choice.on_evicting(left, False, 1, 0.0)


seen_before: set[bytes] = set()


@pytest.mark.parametrize(
    ("loop", "scans", "rule"),
    [
        (3_000, 0, "evicted"),  # what leaves comes back before the disk has forgotten it
        (1_500, 3_000, "reused"),  # what leaves is noise, and drives out what comes back
    ],
)
def test_it_chooses_the_rule_that_would_hit_more(loop, scans, rule):
    seen_before.clear()
    choice, dice = WriteRuleTrial(4_000, None, 0.0), random.Random(1)
    slab: dict[bytes, None] = {}
    fresh = iter(range(10**6, 10**7))
    choice.rule = WriteRuleTrial.RULES[rule == "reused"]
    for turn in range(8):
        if rule == "evicted":  # a new set in every second turn: its first return is what counts
            items = [loop * (turn // 2) + i for i in range(loop)]
        else:
            items = [*range(loop), *(next(fresh) for _ in range(scans))]
            dice.shuffle(items)
        for item in items:
            lookup(choice, slab, 100, key(item))
    assert choice.rule == rule


def test_a_rule_that_writes_more_must_win_on_a_full_disk():
    choice = WriteRuleTrial(4_000, None, 0.0)
    assert choice.rule == "evicted", "there is room for all"
    choice.on_full()
    assert choice.rule == "reused"


@given(st.integers(1, 1 << 62), st.integers(1, 1 << 20), st.integers(0, 3_000))
def test_what_it_remembers_is_bounded(capacity, nbytes, keys):
    choice = WriteRuleTrial(capacity, None, 0.0)
    for number in range(keys):
        choice.on_stored(bytes(28) + (number * 32).to_bytes(4), True, nbytes, 0.0)
        choice.on_evicting(bytes(28) + (number * 32).to_bytes(4), True, nbytes, 0.0)
    most = max(1, capacity // nbytes // WriteRuleTrial.SAMPLE)
    assert all(len(trial) == min(keys, most, WriteRuleTrial.MOST) for trial in choice.trials)


@pytest.mark.parametrize(("kind", "requests"), [("rag", 900), ("agentic", 200), ("multi-turn", 1_200)])
@pytest.mark.parametrize(("memory", "disk"), [(300, 1_000), pytest.param(500, 4_000, marks=pytest.mark.slow)])
def test_auto_is_within_half_a_percent_of_the_better_rule(kind, requests, memory, disk):
    trace = synthetic.make(kind, requests=requests, seed=1)

    def outcome(write):
        urls = [f"cpu://?capacity={memory * 4096}", f"disk://?capacity={disk * 8192}&write={write}"]
        return replay(
            *(trace, urls),
            chunk_tokens=trace.block_tokens,
            bytes_per_token=4096 / trace.block_tokens,
            partial=True,
        )

    best = max((outcome("reused"), outcome("evicted")), key=lambda each: each.hit_ratio)
    auto = outcome("auto")
    assert auto.hit_ratio >= best.hit_ratio - 0.005
    assert auto.written["disk"] <= outcome("evicted").written["disk"] * 1.01


# ---- in the cache


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(url: str, clock: Clock, slab: int = 8) -> Cache:
    urls = [f"cpu://?capacity={slab * CHUNK}&policy=lru", url]
    config = Config(chunk_tokens=TOKENS, tiers=urls, prefault=False, load_deadline=30.0)
    return Cache(config, tiers={url: MemoryTier()}, clock=clock)


def store(cache: Cache, *numbers: int) -> None:
    cache.commit(cache.reserve([key(number) for number in numbers], FORM))
    assert cache.flush()


def look(cache: Cache, *numbers: int) -> None:
    cache.release(cache.wait(cache.match([key(number) for number in numbers], FORM)))
    assert cache.flush()


@pytest.mark.parametrize("write", ["always", "reused", "evicted", "auto"])
def test_a_budget_binds_every_rule_and_counts_refusals(write):
    clock = Clock()
    with make(f"memory://?capacity=10MiB&write={write}&writes_per_day={24 * 4 * AT_REST}", clock) as cache:
        for number in range(40):
            store(cache, number)
            look(cache, number)
        value = cache.metrics.value
        assert value("lmtier_chunks", tier="memory") == 0
        assert value("lmtier_dropped_tokens_total", tier="memory", reason="write_budget") > 0
        clock.now = 10 * HOUR
        assert value("lmtier_write_budget_bytes", tier="memory") == pytest.approx(4 * AT_REST)
        for number in range(40, 80):
            store(cache, number)
            look(cache, number)
        assert cache.stats()["memory"]["chunks"] == 4, "an hour's worth"
        assert value("lmtier_write_budget_bytes", tier="memory") == pytest.approx(0, abs=1)
        cache.check()


def test_the_days_of_life_follow_from_what_is_written():
    clock = Clock()
    with make(f"memory://?capacity=10MiB&endurance={2400 * AT_REST}", clock) as cache:
        value = cache.metrics.value
        assert value("lmtier_life_days", tier="memory") == inf
        for number in range(10):
            store(cache, number)
        clock.now = HOUR
        assert value("lmtier_written_bytes_per_day", tier="memory") == pytest.approx(240 * AT_REST, rel=0.05)
        assert value("lmtier_life_days", tier="memory") == pytest.approx(10, rel=0.05)


def test_what_came_before_a_chunk_goes_down_before_it():
    """The head of a prompt is in use and does not leave; on a disk its tail is of no use without it."""
    with make("memory://?capacity=10MiB&write=evicted", Clock(), slab=40) as cache:
        store(cache, *range(30))
        head = cache.match([key(number) for number in range(10)], FORM)
        for number in range(100, 110):
            store(cache, number)
        below = cache.lower.owned[0]
        held = [below.index.get(key(number)) is not None for number in range(30)]
        assert held[0]
        assert held == sorted(held, reverse=True), "a part of a prompt without its head"
        cache.release(head)


def test_what_left_and_came_back_counts_as_asked_for_twice():
    with make("memory://?capacity=10MiB&write=reused", Clock(), slab=4) as cache:
        store(cache, 1)
        for number in range(2, 8):
            store(cache, number)
        assert cache.stats()["memory"]["chunks"] == 0
        store(cache, 1)
        assert cache.stats()["memory"]["chunks"] == 1


# ---- settings


def test_a_budget_can_be_told_in_bytes_or_in_drives():
    def budget(rest: str) -> int | None:
        return TierSpec.parse(f"disk:///a?capacity=1TiB&{rest}").writes_per_day

    assert budget("writes_per_day=2TiB") == 2 << 40
    assert budget("drive_writes_per_day=0.5") == 1 << 39
    assert budget("drive_writes_per_day=0.5&drive=4TiB") == 2 << 40
    assert budget("endurance=600TiB") is None


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("writes_per_day=much", "'much' is not a size"),
        ("writes_per_day=0", "use write=never"),
        ("drive_writes_per_day=0.0", "use write=never"),
        ("drive_writes_per_day=half", "write it like 0.5"),
        ("drive_writes_per_day=1&writes_per_day=1TiB", "not both"),
        ("drive=1TiB", "only has a meaning with"),
        ("writes_per_dya=1TiB", "did you mean 'writes_per_day'"),
    ],
)
def test_a_budget_that_cannot_be_read_says_why(rest, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        Cache(Config(tiers=["cpu://?capacity=1MiB", f"disk://{tmp_path}?capacity=1GiB&{rest}"])).close()


def test_drives_need_a_size():
    with pytest.raises(ConfigError, match="like drive=4TiB"):
        TierSpec.parse("redis://host?drive_writes_per_day=1")


def test_memory_has_no_budget():
    for rest in ("writes_per_day=1GiB", "endurance=1TiB"):
        with pytest.raises(ConfigError, match="unknown option"):
            Config(tiers=[f"cpu://?capacity=1GiB&{rest}"])


def test_a_tier_that_must_be_asked_cannot_choose():
    with pytest.raises(ConfigError, match=r"tiers that keep .* choose always, reused, evicted, never"):
        Cache(Config(tiers=["cpu://?capacity=1MiB", "null://?write=auto"]))
