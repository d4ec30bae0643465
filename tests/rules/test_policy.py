"""The default policy: against a plain model, what it is for, and what it costs. test_index has the rest."""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState
from lmtier.format.layout import Layout, form_of
from lmtier.rules.policy import POLICIES, Aging, make_policy

LAYOUT = Layout.uniform(
    layers=1, heads=1, head_dim=8, dtype="bf16", block_tokens=4, chunk_tokens=8, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))


def key(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def ask(index: Index, prompt: list[object]) -> int:
    """One request: match the leading run, then store the rest. The number of chunks that were there."""
    run: list[Entry] = []
    for name in prompt:
        entry = index.get(key(name))
        if entry is None:
            break
        index.link(entry, run[-1] if run else None)
        run.append(entry)
    hits = len(run)
    index.touch(run)
    for entry in run:
        index.lease(entry)
    for name in prompt[hits:]:
        if index.free < 1 and index.evict(1, keep=run[-1] if run else None) is None:
            break
        if (there := index.get(key(name))) is None:
            run.append(index.add(key(name), FORM, 1, EntryState.FILLING, run[-1] if run else None))
        else:
            index.link(there, run[-1] if run else None)
            index.lease(there)
            run.append(there)
    index.refresh(run)
    for entry in run:
        if entry.state is EntryState.FILLING:
            index.make_ready(entry)
        else:
            index.release(entry)
    return hits


# ---- what it is, in the plainest words


Queue: TypeAlias = "list[tuple[bytes, int]]"


class Model:
    """Lists instead of everything: of keys with the time of their last use, oldest first."""

    def __init__(self) -> None:
        self.now = 0
        self.once: Queue = []
        self.again: Queue = []
        self.left: list[bytes] = []
        self.trials: list[tuple[Queue, Queue]] = [([], []) for _ in Eager.RATES]
        self.behind = [0.0 for _ in Eager.RATES]
        self.rate = Eager.RATES[-1]
        self.most = 0

    def insert(self, key: bytes, parent: bytes | None) -> None:
        self.now += parent is None
        known = key in self.remembered() and parent not in keys_of(self.once)
        (self.again if known else self.once).append((key, self.now))
        self.tried([key], known)

    def remembered(self) -> list[bytes]:
        """What left lately: the last three batches as large as the cache, and the one that grows."""
        room = max(1, self.most)
        batches = [self.left[i : i + room] for i in range(0, len(self.left), room)]
        return [key for batch in batches[-4:] for key in batch]

    def touch(self, keys: list[bytes]) -> None:
        self.now += 1
        for key in keys:
            take(key, self.once, self.again)
            self.again.append((key, self.now))
        self.tried(keys, True)

    def refresh(self, keys: list[bytes]) -> None:
        for key in keys:
            for lists in ((self.once, self.again), *self.trials):
                if (queue := take(key, *lists)) is not None:
                    queue.append((key, self.now))

    def order(self) -> list[bytes]:
        return self.by_age(self.once, self.again, self.rate)

    def by_age(self, once: Queue, again: Queue, rate: float) -> list[bytes]:
        """What was used once comes first among those of one age."""
        aged = [((self.now - used) * rate, key) for key, used in once]
        aged += [(self.now - used, key) for key, used in again]
        return [key for _, key in sorted(aged, key=lambda each: -each[0])]

    def evicted(self, keys: list[bytes]) -> None:
        self.most = max(self.most, len(self.once) + len(self.again))
        for key in keys:
            take(key, self.once, self.again)
            self.left.append(key)

    def missed(self, keys: list[bytes]) -> None:
        self.now += 1
        self.tried(keys, None)

    def tried(self, keys: list[bytes], known: bool | None) -> None:
        """The chunks of one request are used at once. None: nobody adds them."""
        room = max(1, max(self.most, len(self.once) + len(self.again)))
        hits = []
        for rate, (once, again) in zip(Eager.RATES, self.trials, strict=True):
            hits.append([key in keys_of(once) + keys_of(again) for key in keys])
            for key in keys:
                was_here = take(key, once, again) is not None
                if was_here or known is not None:
                    (again if was_here or known else once).append((key, self.now))
            while len(once) + len(again) > room:
                take(self.by_age(once, again, rate)[0], once, again)
        for each in zip(*hits, strict=True):
            behind = [behind - hit for behind, hit in zip(self.behind, each, strict=True)]
            self.behind = [min(Eager.PROOF, each - min(behind)) for each in behind]
            if self.behind[Eager.RATES.index(self.rate)] == Eager.PROOF:
                self.rate = Eager.RATES[self.behind.index(0)]


def keys_of(queue: Queue) -> list[bytes]:
    return [key for key, _ in queue]


def take(key: bytes, *queues: Queue) -> Queue | None:
    """The list that had it, without it."""
    for queue in queues:
        if key in keys_of(queue):
            del queue[keys_of(queue).index(key)]
            return queue
    return None


class Eager(Aging["Chunk"]):
    """With the real proof, no short history would tell anything apart."""

    PROOF = 3.0


class Chunk:
    last_used_ns = 0

    def __init__(self, key: bytes, parent: Chunk | None) -> None:
        self.key = key
        self.parent = parent


KEYS = [key(n) for n in range(40)]


@settings(max_examples=60, deadline=None)
@given(room=st.integers(2, 24), favourites=st.integers(1, 30), seed=st.integers(0, 1 << 32))
def test_it_equals_a_plain_model(room: int, favourites: int, seed: int):
    """Long histories tell the most, and what a generator makes by itself is short."""
    chance = random.Random(seed)
    pools = [chance.sample(KEYS, favourites), KEYS]
    prompts = [
        list(dict.fromkeys(chance.choices(pools[chance.random() < 0.4], k=chance.randrange(6))))
        for _ in range(300)
    ]
    policy = Eager()
    model = Model()
    chunks: dict[bytes, Chunk] = {}
    for prompt in prompts:
        if chance.random() < 0.3:  # another host asks
            asked = [each for each in dict.fromkeys(chance.choices(KEYS, k=4)) if each not in chunks]
            policy.on_miss(asked)
            model.missed(asked)
        hits = [each for each in reversed(prompt) if each in chunks]
        policy.touch([chunks[each] for each in hits])
        model.touch(hits)
        parent = None
        for each in prompt:
            if each in chunks:
                continue
            while len(chunks) >= room:
                order = policy.order()
                victim = next(order)
                order.close()
                assert victim.key == model.order()[0]
                policy.remove([victim], evicted=True)
                model.evicted([victim.key])
                del chunks[victim.key]
                if victim is parent:
                    parent = None
            chunks[each] = Chunk(each, parent)
            policy.insert(chunks[each])
            model.insert(each, parent.key if parent else None)
            parent = chunks[each]
        again = [each for each in reversed(prompt) if each in chunks]
        policy.refresh([chunks[each] for each in again])
        model.refresh(again)
        assert [chunk.key for chunk in policy.order()] == model.order()
        assert policy.rate == model.rate
        assert len(policy) == len(chunks)


# ---- what it is for


def hits(policy: str, room: int, traffic: Callable[[random.Random], list[object]], prompts: int) -> int:
    index = Index(room, make_policy(policy))
    chance = random.Random(1)
    found = sum(ask(index, traffic(chance)) for _ in range(prompts))
    index.check()
    return found


def mostly_once(chance: random.Random) -> list[object]:
    """One prompt in four is of a fixed set that just fits, the others never come again."""
    name = chance.randrange(40) if chance.random() < 0.25 else chance.random()
    return [(name, i) for i in range(10)]


def drifting() -> Callable[[random.Random], list[object]]:
    """Each prompt comes five times, within a short time."""
    count = 0

    def traffic(chance: random.Random) -> list[object]:
        nonlocal count
        count += 1
        return [(max(0, count // 5 - chance.randrange(45)), i) for i in range(10)]

    return traffic


def test_where_most_comes_once_it_keeps_what_comes_again():
    lru, auto = (hits(policy, 500, mostly_once, 3_000) for policy in ("lru", "auto"))
    assert auto > 2 * lru


def test_where_the_recent_returns_it_keeps_the_recent():
    lru, auto = (hits(policy, 500, drifting(), 3_000) for policy in ("lru", "auto"))
    assert auto > 0.95 * lru


def test_it_follows_traffic_that_changes():
    recent = drifting()
    phases = [mostly_once] * 2_000 + [recent] * 2_000 + [mostly_once] * 2_000
    policy: Aging[Entry] = Aging()
    index = Index(500, policy)  # type: ignore[arg-type]
    chance = random.Random(1)
    rates = []
    for traffic in phases:
        ask(index, traffic(chance))
        rates.append(policy.rate)
    assert rates[1_999] > rates[3_999] < rates[5_999]


def test_what_another_host_reads_stays_until_then():
    """Memory is full of prompts that were used twice, and each new prompt is read once, by another host."""
    index = Index(500, make_policy("auto"))
    for n in [*range(50)] * 2:
        ask(index, [("old", n, i) for i in range(10)])
    found = []
    for n in range(400):
        ask(index, [(n, i) for i in range(10)])
        names = [key((n - 20, i)) for i in range(10)]
        run = [entry for each in names if (entry := index.get(each)) is not None]
        index.missed(names)
        index.touch(run)
        found.append(len(run))
    assert sum(found[-200:]) > 0.95 * 2_000


# ---- what it costs


def memory(policy: str, room: int) -> float:
    """Bytes an entry of a full index, after everything in it was replaced some times."""
    gc.collect()
    tracemalloc.start()
    try:
        index = Index(room, make_policy(policy), ghosts=16)
        before = tracemalloc.get_traced_memory()[0] - index.__sizeof__()
        for n in range(3 * room // 20):
            ask(index, [(n, i) for i in range(20)])
            if n % 3 == 0:
                ask(index, [(n, i) for i in range(20)])
        return (tracemalloc.get_traced_memory()[0] - before) / len(index)
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_it_takes_no_more_memory_than_lru():
    lru, auto = memory("lru", 20_000), memory("auto", 20_000)
    assert auto < 1.05 * lru


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_costs_the_same_work_in_a_large_place(policy: str):
    work = []
    for room in (1_000, 16_000):
        index = Index(room, make_policy(policy))
        for n in range(room // 20 * 2):
            ask(index, [(n, i) for i in range(20)])
        work.append(lines_run(lambda index=index: ask(index, [("new", i) for i in range(20)])))  # type: ignore[misc]
    assert work[1] < 1.2 * work[0]


def test_with_room_for_all_a_hit_costs_little_more_than_lru():
    work = {}
    for policy in POLICIES:
        index = Index(1_000, make_policy(policy))
        prompt: list[object] = list(range(500))
        ask(index, prompt)
        run = [entry for each in prompt if (entry := index.get(key(each))) is not None]
        work[policy] = lines_run(partial(index.touch, run))
    assert work["auto"] < 4 * work["lru"]


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that ran: work, counted instead of timed."""
    count = 0

    def trace(frame: object, event: str, _: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    finally:
        sys.settrace(before)
    return count
