"""Who leaves, who stays, and in what order, for every policy."""

from __future__ import annotations

import ast
import hashlib
import random
from collections import OrderedDict

import pytest

from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState
from lmtier.errors import ConfigError, MisuseError
from lmtier.format.layout import Layout, form_of
from lmtier.rules.policy import POLICIES, make_policy

LAYOUT = Layout.uniform(
    layers=1, heads=1, head_dim=8, dtype="bf16", block_tokens=4, chunk_tokens=8, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))


def key(name: object) -> bytes:
    return repr(name).encode().ljust(32, b".")


def hashed(*name: object) -> bytes:
    """A key as real ones are: a policy may take its bytes for random."""
    return hashlib.sha256(repr(name).encode()).digest()


def fill(index: Index, chain: str, length: int) -> list[Entry]:
    """Store a chain the way a request does: in order, and its prefix refreshed with each chunk."""
    run: list[Entry] = []
    for i in range(length):
        run.append(index.add(key((chain, i)), FORM, 1, EntryState.FILLING, run[-1] if run else None))
        index.make_ready(run[-1])
        index.refresh(run)
    return run


@pytest.fixture(params=sorted(POLICIES))
def index(request: pytest.FixtureRequest):
    index = Index(100, make_policy(request.param))
    yield index
    index.check()


def test_none_follows_what_follows_it(index: Index):
    """Keys of an engine that are no chain would say so, and neither of them could ever leave."""
    run = fill(index, "a", 5)
    index.link(run[0], run[4])
    index.link(run[2], run[3])
    assert [entry.parent for entry in run] == [None, *run[:4]]
    assert len(index.evict(5) or ()) == 5


def test_a_tail_leaves_before_its_head(index: Index):
    for chain in "abc":
        fill(index, chain, 10)
    gone: list[bytes] = []
    while victims := index.evict(1):
        gone += [entry.key for entry in victims]
        index.check()
    assert len(gone) == 30
    for chain in "abc":
        order = [gone.index(key((chain, i))) for i in range(10)]
        assert order == sorted(order, reverse=True)


def test_a_tail_leaves_before_its_head_after_any_history(index: Index):
    chance = random.Random(7)
    for round_ in range(200):
        chain, length = f"chain{chance.randrange(6)}", chance.randrange(1, 12)
        run: list[Entry] = []
        for i in range(length):
            entry = index.get(key((chain, i)))
            if entry is None:
                break
            index.link(entry, run[-1] if run else None)
            run.append(entry)
        index.touch(run)
        for i in range(len(run), length):
            while index.free < 1:
                for victim in index.evict(1) or ():
                    assert key_of_child(victim) not in index, f"round {round_}: {victim!r} left its child"
            run.append(index.add(key((chain, i)), FORM, 1, EntryState.FILLING, run[-1] if run else None))
            index.make_ready(run[-1])
            index.refresh(run)
        index.check()
        if chance.random() < 0.3 and (victims := index.evict(chance.randrange(1, 8))):
            for victim in victims:
                assert key_of_child(victim) not in index


def key_of_child(entry: Entry) -> bytes:
    chain, number = ast.literal_eval(entry.key.rstrip(b".").decode())
    return key((chain, number + 1))


def test_a_leased_chunk_leaves_only_after_its_release(index: Index):
    run = fill(index, "a", 3)
    for entry in run:
        index.lease(entry)
    assert index.evict(1) is None
    index.release(run[2])
    assert index.evict(1) == [run[2]]
    assert index.evict(1) is None
    for entry in run[:2]:
        index.release(entry)
    assert index.evict(2) == [run[1], run[0]]


def test_evicting_too_much_evicts_nothing(index: Index):
    run = fill(index, "a", 5)
    index.lease(run[0])
    assert index.evict(5) is None
    assert len(index) == 5
    assert index.evict(4) == run[:0:-1]


def test_a_chunk_that_is_being_written_does_not_leave(index: Index):
    entry = index.add(key("x"), FORM, 1, EntryState.FILLING, None)
    assert index.evict(1) is None
    index.make_ready(entry)
    assert index.evict(1) == [entry]


def test_as_many_releases_as_leases(index: Index):
    (entry,) = fill(index, "a", 1)
    for _ in range(3):
        index.lease(entry)
    for _ in range(2):
        assert not index.release(entry)
        assert index.evict(1) is None
    index.release(entry)
    assert index.evict(1) == [entry]
    with pytest.raises(MisuseError, match="released twice"):
        index.release(entry)


def test_a_removed_entry_frees_room_with_its_last_lease(index: Index):
    (entry,) = fill(index, "a", 1)
    index.lease(entry)
    assert not index.remove(entry)
    assert index.used == 1
    assert entry.key not in index
    assert index.release(entry)
    assert index.used == 0


def test_evicted_differs_from_never_stored_within_bounds():
    index = Index(10_000, make_policy("lru"), ghosts=4)
    run = fill(index, "a", 8)
    index.evict(8)
    assert [index.why_gone(entry.key) for entry in run] == ["evicted"] * 4 + [""] * 4
    assert not index.why_gone(key("never"))


def test_lru_equals_a_reference_model():
    index = Index(50, make_policy("lru"))
    model: OrderedDict[bytes, None] = OrderedDict()
    chance = random.Random(3)
    for _ in range(5_000):
        name = key(chance.randrange(120))
        entry = index.get(name)
        if entry is not None:
            index.touch([entry])
            model.move_to_end(name)
            continue
        if index.free < 1:
            assert [victim.key for victim in index.evict(1) or ()] == [model.popitem(last=False)[0]]
        index.add(name, FORM, 1, EntryState.READY, None)
        model[name] = None
    assert {entry.key for entry in index.entries()} == set(model)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("touched", [0, 3, 10])
def test_the_order_of_eviction_has_everyone_once(policy: str, touched: int):
    index = Index(100, make_policy(policy))
    entries = [index.add(key(i), FORM, 1, EntryState.READY, None) for i in range(touched)]
    for entry in entries:  # asked for again: they may go to another queue
        index.touch([entry])
    index.order()
    entries += [index.add(key(i), FORM, 1, EntryState.READY, None) for i in range(touched, 10)]
    assert sorted(entry.key for entry in index.order()) == sorted(entry.key for entry in entries)


def test_a_scan_does_not_flush_what_is_seen_again():
    """What LRU cannot do, and why there is another one."""

    def survivors(name: str) -> int:
        index = Index(100, make_policy(name))
        hot = [index.add(hashed("hot", i), FORM, 1, EntryState.READY, None) for i in range(50)]
        index.touch(hot)
        index.touch(hot)
        for i in range(1_000):
            if index.free < 1:
                index.evict(1)
            index.add(hashed("scan", i), FORM, 1, EntryState.READY, None)
        index.check()
        return sum(entry.key in index for entry in hot)

    assert survivors("lru") == 0
    assert survivors("auto") >= 45


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_eviction_stops_at_once_if_all_chunks_are_leased(policy: str):
    index = Index(100_000, make_policy(policy))
    run = fill_flat(index, 100_000)
    for entry in run:
        index.lease(entry)
    seen = 0

    class Counting:
        def order(self):
            nonlocal seen
            seen += 1
            yield from ()

    index._policy, real = Counting(), index._policy  # type: ignore[assignment]
    assert index.evict(1) is None
    index._policy = real
    assert seen == 0, "it walked the queue although nothing can leave"


def fill_flat(index: Index, count: int) -> list[Entry]:
    return [index.add(key(i), FORM, 1, EntryState.READY, None) for i in range(count)]


def test_unknown_policy_names_the_known_ones():
    with pytest.raises(ConfigError, match="auto, lru"):
        make_policy("fifo")
