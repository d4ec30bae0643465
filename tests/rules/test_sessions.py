"""The book of sessions: names, prompts that extend each other, what no other needs, and bounds."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.rules.sessions import MAX_ANCESTORS, MAX_NAMELESS, Agent, SessionTable

TENANT = bytes(4)


def chain(words: str) -> list[bytes]:
    """A key for each letter, which names all letters up to it."""
    made = [hashlib.sha256(words[: end + 1].encode()).digest() for end in range(len(words))]
    return [bytes(8) + each[8:] for each in made]


def asks(book: SessionTable, name: str, words: str, parent: str = ""):
    agent = book.named(TENANT, name, parent)
    book.extend(agent, chain(words))
    book.check()
    return agent


def test_a_session_alone_needs_the_end_of_its_prompt():
    book = SessionTable()
    one, two = asks(book, "one", "system-a"), asks(book, "two", "system-bcd")
    assert book.needed_by_others(one) == len("system-")
    assert book.needed_by_others(two) == len("system-")
    three = asks(book, "three", "system-bc")
    assert book.needed_by_others(two) == len("system-bc")
    assert book.needed_by_others(three) == len("system-bc")
    book.drop(two)
    assert book.needed_by_others(three) == len("system-")


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=2, max_size=6))
def test_what_others_need_is_the_longest_common_prefix(prompts):
    book = SessionTable()
    agents = [asks(book, f"s{n}", words) for n, words in enumerate(prompts)]

    def common(a: str, b: str) -> int:
        return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    for n, agent in enumerate(agents):
        others = [words for m, words in enumerate(prompts) if m != n]
        assert book.needed_by_others(agent) == max(common(prompts[n], other) for other in others)


def test_an_unnamed_request_continues_the_prompt_it_extends():
    book = SessionTable()
    first = book.nameless(chain("hello"))
    book.extend(first, chain("hello"))
    assert book.nameless(chain("hello, again")) is first
    assert book.nameless(chain("hell")) is not first
    named = asks(book, "one", "other")
    assert book.nameless(chain("other, again")) is named


def test_names_belong_to_tenants():
    book = SessionTable()
    assert book.named(b"\1" * 4, "one") is not book.named(b"\2" * 4, "one")
    assert book.get(b"\3" * 4, "one") is None


def test_the_oldest_nameless_session_is_forgotten_first():
    book = SessionTable(max_keys=10)
    one = asks(book, "one", "aaa")
    nameless = book.nameless(chain("bbb"))
    book.extend(nameless, chain("bbb"))
    two = book.named(TENANT, "two")
    assert book.extend(two, chain("ccccc")) == [(nameless, None)]
    assert book.extend(book.named(TENANT, "three"), chain("ddd")) == [(one, None)]
    book.check()
    assert two in book
    assert one not in book
    assert nameless not in book


def test_the_number_of_sessions_is_bounded():
    book = SessionTable(max_sessions=3)
    for n in range(10):
        asks(book, f"s{n}", f"{n}")
    assert [each.name for each in book] == ["s7", "s8", "s9"]
    for n in range(MAX_NAMELESS + 5):
        agent = book.nameless(chain(f"<{n:05}"))
        book.extend(agent, chain(f"<{n:05}"))
    assert len(book) == 3 + MAX_NAMELESS
    book.check()


def test_a_prompt_longer_than_the_book_is_kept_alone():
    book = SessionTable(max_keys=3)
    asks(book, "one", "ab")
    asks(book, "two", "cdefgh")
    assert [each.name for each in book] == ["two"]


def test_a_forgotten_parent_leaves_no_trace_in_its_children():
    book = SessionTable()
    child = asks(book, "child", "ab", parent="parent")
    parent = book.get(TENANT, "parent")
    assert parent is not None
    assert (parent.children, child.parent) == (1, parent)
    book.drop(parent)
    book.check()
    assert child.parent is None


def depth(agent: Agent) -> int:
    return 0 if agent.parent is None else 1 + depth(agent.parent)


@pytest.mark.parametrize("order", [1, -1], ids=["the first parent first", "the last child first"])
def test_a_session_has_few_ancestors_in_any_family(order):
    """Each request of a child refreshes the prompts of all of them."""
    book = SessionTable()
    names = [f"{number}" for number in range(40)]
    for parent, child in list(itertools.pairwise(names))[::order]:
        asks(book, child, child, parent)
    assert max(map(depth, book)) == MAX_ANCESTORS
    assert sum(agent.parent is None for agent in book) <= 40 / MAX_ANCESTORS
    for name in names:  # whose children have left
        if (agent := book.get(TENANT, name)) is not None and not agent.children:
            book.drop(agent)
            book.check()


@pytest.mark.parametrize("path", [["a", "a"], ["a", "b", "a"], ["a", "b", "c", "a"]])
def test_no_session_becomes_its_own_ancestor(path):
    book = SessionTable()
    for child, parent in itertools.pairwise(path):
        book.named(TENANT, child, parent)
    book.check()
    for agent in book:
        seen = set()
        above: Agent | None = agent
        while above is not None:
            assert above not in seen
            seen.add(above)
            above = above.parent
