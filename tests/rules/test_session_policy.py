"""Entries whose future is known leave first, under any policy; the gaps of those that wait are learned."""

from __future__ import annotations

import pytest

from lmtier.rules.policy import POLICIES, make_policy
from lmtier.rules.session_policy import ReturnTimes, SessionAwarePolicy


class Item:
    parent: Item | None = None

    def __init__(self, number: int) -> None:
        self.key = number.to_bytes(32)

    def __repr__(self) -> str:
        return str(int.from_bytes(self.key))


@pytest.fixture(params=sorted(POLICIES))
def policy(request):
    return SessionAwarePolicy(make_policy(request.param))


def numbers(policy: SessionAwarePolicy[Item], items: list[Item]) -> list[int]:
    """In the order in which they leave, each where it is met first."""
    return [items.index(each) for each in dict.fromkeys(policy.order())]


def test_what_is_over_leaves_first_then_what_waits_the_last_to_wait_first(policy):
    items = [Item(n) for n in range(8)]
    for each in items:
        policy.insert(each)
    usual = numbers(policy, items)
    policy.evict_next([items[3], items[2]])  # tail first
    policy.evict_next([items[5]])
    policy.evict_first([items[7], items[6]])
    first = [7, 6, 5, 3, 2]
    assert numbers(policy, items) == first + [each for each in usual if each not in first]
    assert len(policy) == 8


def test_a_request_for_a_foretold_entry_makes_it_as_good_as_any(policy):
    items = [Item(n) for n in range(4)]
    for each in items:
        policy.insert(each)
    policy.evict_first([items[3]])
    policy.evict_next([items[2]])
    policy.touch([items[3], items[2]])
    assert numbers(policy, items)[:2] == [0, 1]
    policy.evict_first([items[2]])
    policy.refresh(iter([items[2]]))
    assert numbers(policy, items)[0] != 2


def test_what_waits_can_end_and_what_left_is_forgotten(policy):
    items = [Item(n) for n in range(3)]
    for each in items:
        policy.insert(each)
    policy.evict_next([items[2], items[1]])
    policy.evict_first([items[2], items[1]])
    assert numbers(policy, items)[:2] == [2, 1]
    policy.remove([items[2], items[1]], evicted=True)
    assert list(policy.order()) == [items[0]]


def test_gaps_know_nothing_until_enough_have_come_back():
    gaps = ReturnTimes()
    for _ in range(ReturnTimes.ENOUGH - 1):
        gaps.add(5)
    assert gaps.longest == float("inf")
    gaps.add(5)
    assert gaps.longest == 16  # twice the end of the octave from 4 to 8 seconds


def test_gaps_follow_what_sessions_do_now():
    gaps = ReturnTimes()
    for _ in range(ReturnTimes.ENOUGH):
        gaps.add(1000)
    assert gaps.longest == 2048
    for _ in range(200 * ReturnTimes.ENOUGH):
        gaps.add(2)
    assert gaps.longest == 8
