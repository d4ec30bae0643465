"""Entries whose future is known leave out of turn, under any policy; how long waits last is learned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.rules.policy import POLICIES, Aging, make_policy
from lmtier.rules.session_policy import ReturnTimes, SessionAwarePolicy


class Item:
    parent: Item | None = None
    last_used_ns = 0

    def __init__(self, number: int) -> None:
        self.key = number.to_bytes(32)

    def __repr__(self) -> str:
        return str(int.from_bytes(self.key))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def returns(clock):
    """Nothing is known yet."""
    return ReturnTimes(clock)


@pytest.fixture(params=sorted(POLICIES))
def policy(request, returns):
    return SessionAwarePolicy(make_policy(request.param), returns)


def numbers(policy: SessionAwarePolicy[Item], items: list[Item]) -> list[int]:
    """In the order in which they leave, each where it is met first."""
    return [items.index(each) for each in dict.fromkeys(policy.order())]


def come_back_after(returns: ReturnTimes, *seconds: float) -> None:
    for _ in range(ReturnTimes.ENOUGH):
        for each in seconds:
            returns.add(each)


def test_ended_entries_leave_before_waiting_ones(policy, clock, returns):
    come_back_after(returns, 60)
    items = [Item(n) for n in range(8)]
    for each in items:
        policy.insert(each)
    usual = numbers(policy, items)
    policy.wait([items[3], items[2]], clock.now)  # tail first
    policy.evict_first([items[7], items[6]])
    clock.now += 1
    first = [7, 6, 3, 2]
    assert numbers(policy, items) == first + [each for each in usual if each not in first]
    assert len(policy) == 8


def test_waits_of_unknown_length_change_nothing(policy, clock):
    items = [Item(n) for n in range(8)]
    for each in items:
        policy.insert(each)
    usual = numbers(policy, items)
    policy.wait([items[3], items[2]], clock.now)
    clock.now += 1
    assert numbers(policy, items) == usual


def test_a_wait_leaves_early_only_if_it_lasts(policy, clock, returns):
    """The oldest entry was used 20 s ago: a return within 40 s is no later than its next use may be."""
    items = [Item(n) for n in range(4)]
    policy.insert(*items[:2])
    clock.now += 20
    policy.insert(*items[2:])
    policy.wait([items[3], items[2]], clock.now)
    come_back_after(returns, 30)
    clock.now += 1
    assert numbers(policy, items)[:2] == [0, 1]
    come_back_after(returns, 300)
    clock.now += 1
    assert numbers(policy, items)[:2] == [3, 2]


@pytest.mark.parametrize(
    ("gaps", "first"),
    [((50.0, 70.0), "the last to wait"), ((2.0, 8.0, 32.0, 128.0, 512.0, 2048.0), "the first to wait")],
    ids=["alike", "unlike"],
)
def test_the_wait_that_lasts_longest_leaves_first(policy, clock, returns, gaps, first):
    """Who waits a usual time is nearer to its end; where times differ widely, a long one goes on."""
    come_back_after(returns, *gaps)
    items = [Item(n) for n in range(3)]
    policy.insert(*items)
    policy.wait([items[1]], clock.now)
    clock.now += 25
    policy.touch([items[0]])
    policy.refresh([items[2]])
    policy.wait([items[2]], clock.now)
    clock.now += 1
    assert numbers(policy, items)[0] == (2 if first == "the last to wait" else 1)


def test_a_request_takes_back_an_announced_eviction(policy):
    items = [Item(n) for n in range(4)]
    for each in items:
        policy.insert(each)
    policy.evict_first([items[3]])
    policy.wait([items[2]], 0.0)
    policy.touch([items[3], items[2]])
    assert numbers(policy, items)[:2] == [0, 1]
    policy.evict_first([items[2]])
    policy.refresh(iter([items[2]]))
    assert numbers(policy, items)[0] != 2


def test_what_waits_can_end_and_what_left_is_forgotten(policy):
    items = [Item(n) for n in range(3)]
    for each in items:
        policy.insert(each)
    policy.wait([items[2], items[1]], 0.0)
    policy.evict_first([items[2], items[1]])
    assert numbers(policy, items)[:2] == [2, 1]
    policy.remove([items[2], items[1]], evicted=True)
    assert list(policy.order()) == [items[0]]


def test_waits_that_are_over_take_no_room(policy, clock):
    """Also where nothing is evicted, so that no one asks for the order."""
    item = Item(1)
    policy.insert(item)
    for _ in range(1000):
        policy.wait([item], clock.now)
        policy.touch([item])
    assert len(policy._ranking) <= 2 * (policy.LEAST + 1)


def test_a_wait_outlives_what_is_never_used_again(clock, returns):
    """Otherwise a flood of new prompts evicts agents that would come back a minute later."""
    policy: SessionAwarePolicy[Item] = SessionAwarePolicy(Aging(), returns)
    items = [Item(n) for n in range(3)]
    policy.insert(items[0])
    policy.touch([items[0]])
    policy.wait([items[0]], clock.now)
    come_back_after(returns, 60)
    policy.insert(*items[1:])
    clock.now += 1
    assert numbers(policy, items)[0] == 1


def test_entries_that_left_cost_nothing_in_the_order(policy, clock, returns):
    """Thousands may leave before the waits are ranked again."""
    come_back_after(returns, 60)
    items = [Item(n) for n in range(40)]
    policy.insert(*items)
    for first in range(0, 40, 10):
        policy.wait(items[first : first + 10], clock.now)
    clock.now += 1
    for item in items[:25]:
        policy.order()
        policy.remove([item], evicted=True)
    assert next(policy.order()) is not None
    assert sum(len(wait.entries) for _, wait in policy._ranking) == 15


def test_replaced_waits_take_no_room_beside_long_ones(policy, clock):
    items = [Item(n) for n in range(1000)]
    policy.insert(*items)
    for _ in range(200):
        policy.wait(items, clock.now)
    assert len(policy._ranking) <= 2 * (policy.LEAST + 1)


def test_nothing_is_expected_before_enough_came_back(returns):
    for _ in range(ReturnTimes.ENOUGH - 1):
        returns.add(5)
    assert returns.expected(0) == 0
    returns.add(5)
    assert returns.expected(0) == 5


def test_the_rest_of_a_wait_is_that_of_longer_waits(returns):
    come_back_after(returns, 10, 1000)
    assert returns.expected(0) == pytest.approx(505)
    assert returns.expected(20) == pytest.approx(980)
    assert returns.expected(5000) == 5000, "none took so long: it goes on for as long again"


def test_what_is_expected_follows_what_sessions_do_now(returns):
    come_back_after(returns, 1000)
    for _ in range(20 * ReturnTimes.MEMORY):
        returns.add(2)
    assert returns.expected(0) == pytest.approx(2, rel=0.01)


@given(st.lists(st.floats(0, 1e9), min_size=ReturnTimes.ENOUGH, max_size=60), st.floats(0, 1e9))
def test_what_is_expected_is_never_negative(gaps, waited):
    returns = ReturnTimes(Clock())
    for gap in gaps:
        returns.add(gap)
    assert 0 <= returns.expected(waited) <= 1e9 + waited
