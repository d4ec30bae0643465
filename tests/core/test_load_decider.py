"""A cache cuts a match where computing is sooner, and sees when a tier recovers."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.match import Lookup
from lmtier.errors import ConfigError
from lmtier.format.keys import namespace
from lmtier.format.layout import Layout, form_of, padded
from lmtier.rules import worth
from lmtier.rules.worth import ALWAYS, AUTO, NEVER, PATIENCE, Cost
from lmtier.server.engines import EngineVerbs
from lmtier.testing import Gate, MemoryTier, SlowTier
from lmtier.tiers.base import Job, Op, Tier
from tests.memory_flags import memory_flags
from tests.model.hand import HandTier
from tests.server.process import secret
from tests.server.test_engines import Connection
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.alone

C = 4
LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=128, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
ROOM = padded(LAYOUT.nbytes(LAYOUT.whole))


def keys(count: int, name: str) -> list[bytes]:
    return [namespace("m") + hashlib.sha256(f"{name}{i}".encode()).digest()[4:] for i in range(count)]


class Asked(MemoryTier):
    keeps = False


class SlowToRead(SlowTier):
    def submit(self, job: Job) -> None:
        if job.op is Op.LOAD:
            super().submit(job)
        else:  # what it has is known at once
            self._inner.submit(job)


class Place:
    """A cache with a small slab over a tier that is as slow as is said, where prompts lie."""

    def __init__(self, worth: str, tier: Tier, prompts: int = 60) -> None:
        self.gate = Gate()
        self.tier = SlowToRead(tier, self.gate)
        url = "slow://?capacity=1GiB"
        config = Config(
            tiers=[f"cpu://?capacity={8 * ROOM}", url], chunk_tokens=C, prefault=False, worth=worth
        )
        self.cache = Cache(config, tiers={url: self.tier})
        self.prompts = [keys(4, f"prompt {number} ") for number in range(prompts)]
        for names in [*self.prompts, keys(8, "what fills the slab")]:
            self.store(names)
            assert self.cache.flush()
        self.unread = iter(self.prompts)

    def store(self, names: list[bytes]) -> None:
        reservation = self.cache.reserve(names, FORM)
        for key, offsets in reservation.places:
            self.cache.slab.view(offsets[0], ROOM)[:] = key * (ROOM // len(key))
        self.cache.commit(reservation)

    def ask(self, cost: Cost | None) -> Lookup:
        """The next prompt, loaded as far as it is worth it, and the rest stored, as engines do."""
        prompt = next(self.unread)
        match = self.cache.wait(self.cache.match(prompt, FORM, tokens=4 * C + 1, cost=cost))
        self.cache.release(match)
        self.store(prompt)
        assert self.cache.flush()
        self.cache.check()
        return match

    def compute(self, cost: Cost, prompts: int = 1) -> None:
        """For as long as an engine computes that many; what is loaded for nobody then arrives too."""
        until = time.monotonic() + prompts * cost.prefill(0, 4 * C + 1)
        while time.monotonic() < until:
            self.cache.step()
        self.cache.step()
        assert self.cache.flush()

    def learn(self, cost: Cost) -> None:
        self.tier._delay = 0.01
        for _ in range(3):
            self.ask(cost)

    def count(self, name: str, **labels: str) -> float:
        return self.cache.metrics.value(f"lmtier_{name}", **labels)

    def decided(self, decision: str, why: str) -> float:
        return self.count("worth_decisions_total", decision=decision, why=why)


@contextmanager
def place(worth: str = AUTO, tier: type[MemoryTier] = MemoryTier) -> Iterator[Place]:
    made = Place(worth, tier())
    try:
        yield made
    finally:
        made.gate.open()
        made.tier._delay = 0.0
        made.cache.close()


CHEAP = Cost(1e-3, 1e-3, 0.0, 0.0)
"""Of an engine that computes such a prompt in 17 ms."""


def test_all_is_loaded_until_both_are_known():
    with place() as at:
        at.tier._delay = 0.05
        assert at.ask(None).chunks == 4
        assert at.ask(None).chunks == 4
        assert at.decided("all", "unmeasured") == 2
        assert at.count("worth_seconds_count", stage="actual") == 0


@pytest.mark.parametrize("tier", [MemoryTier, Asked], ids=["known", "asked"])
def test_a_slow_tier_is_skipped_until_it_recovers(monkeypatch, tier):
    """Where a tier must be asked, the engine has stored the prompt meanwhile."""
    monkeypatch.setattr(worth, "_FRESH", 0.0)
    with place(tier=tier) as at:
        at.tier._delay = 0.2
        at.ask(None)
        slow = at.ask(CHEAP)
        assert (slow.chunks, slow.cut_reason) == (0, "not_worth_it")
        assert at.decided("none", "slower") == 1
        assert at.count("missed_tokens_total", reason="not_worth_it") == 4 * C
        for _ in range(7):
            at.ask(CHEAP)
        at.compute(CHEAP, 8)
        assert at.count("worth_explored_total", tier="slow") == 1, "of 32 chunks"
        at.tier._delay = 0.0
        for _ in range(40):
            if at.ask(CHEAP).chunks == 4:
                break
            at.compute(CHEAP)
        assert at.decided("all", "faster") == 1
        loaded = 1 + at.decided("part", "slower")  # a tier that is seen to recover may be worth a part first
        assert at.count("worth_seconds_count", stage="actual") == loaded
        assert at.count("worth_seconds_count", stage="expected") == loaded
        assert at.count("worth_seconds_sum", stage="expected") < loaded * 0.017
        assert at.count("worth_explored_total", tier="slow") <= 48 * 4 / 16


@pytest.mark.parametrize(("patience", "explored"), [(3600.0, 0), (0.0, 1)])
def test_nothing_is_explored_while_an_engine_computes(monkeypatch, patience, explored):
    """Beside an engine that never stops computing, a tier is explored in the end."""
    monkeypatch.setattr(worth, "_FRESH", 0.0)
    monkeypatch.setattr("lmtier.core.load_decider.EXPLORED_AT_LAST", patience)
    busy = Cost(0.0, 0.02, 0.0, 0.0)  # a third of a second a prompt
    with place() as at:
        at.tier._delay = 0.5
        at.ask(None)
        for _ in range(8):
            assert at.ask(busy).cut_reason == "not_worth_it"
        assert at.count("worth_explored_total", tier="slow") == explored


def test_a_stalled_tier_costs_half_more_than_computing():
    with place() as at:
        for _ in range(3):
            at.ask(CHEAP)
        at.gate.hold()
        began = time.monotonic()
        match = at.cache.match(next(at.unread), FORM, tokens=4 * C + 1, cost=CHEAP)
        at.cache.wait(match)
        waited = time.monotonic() - began
        assert (match.chunks, match.cut_reason) == (0, "deadline")
        assert waited < PATIENCE * CHEAP.prefill(0, 4 * C + 1) + 0.3 < at.cache.config.load_deadline
        second = at.cache.match(next(at.unread), FORM, tokens=4 * C + 1, cost=CHEAP)
        assert (second.is_ready, second.cut_reason) == (True, "not_worth_it"), "it is known to stall"
        at.gate.open()
        assert at.cache.flush()


def test_an_unmeasured_tier_that_stalls_is_awaited_once():
    with place() as at:
        at.gate.hold()
        first, second = (
            at.cache.wait(at.cache.match(next(at.unread), FORM, tokens=4 * C + 1, cost=CHEAP))
            for _ in range(2)
        )
        assert (first.chunks, first.cut_reason) == (0, "deadline")
        assert (second.chunks, second.cut_reason, second.decision) == (0, "not_worth_it", ("none", "slower"))
        assert at.count("worth_seconds_count", stage="expected") == 0, "how long it takes is not known yet"
        at.gate.open()
        assert at.cache.flush()
        assert at.cache.lower[0].speed.is_measured


def test_a_read_that_measures_a_tier_is_in_no_core_dump():
    tier, url = HandTier({}, keeps=False), "far://"
    config = Config(tiers=("cpu://?capacity=1MiB", url), chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: tier}) as cache:
        cache._matches.weighing.remember_skipped(cache.lower[0], tuple(keys(32, "found")), 0, FORM)
        cache.step()
        (job,) = tier.waiting
        (item,) = job.items
        address = ctypes.addressof(ctypes.c_char.from_buffer(item.payload))
        assert "dd" in memory_flags(address), "the kernel's word for: do not dump"
        tier.finish(0)
        cache.step()


def test_always_loads_a_slow_tier_and_never_loads_nothing():
    with place(ALWAYS) as at:
        at.tier._delay = 0.2
        for _ in range(2):
            assert at.ask(CHEAP).chunks == 4
        assert at.decided("all", "always") == 2
    with place(NEVER) as at:
        for names in (next(at.unread), keys(8, "what fills the slab")):
            match = at.cache.match(names, FORM, cost=CHEAP)
            assert (match.is_ready, match.chunks, match.cut_reason) == (True, 0, "not_worth_it")
        assert at.decided("none", "never") == 2
    with pytest.raises(ConfigError, match="did you mean 'auto'"):
        Config(worth="aut")


def test_chunks_that_the_engine_has_are_not_waited_for():
    cost = Cost(1e-2, 1e-1, 0.0, 0.0)  # beyond what a busy machine makes of loads of 10 ms
    with place() as at:
        at.learn(cost)
        at.gate.hold()
        match = at.cache.match(next(at.unread), FORM, tokens=4 * C + 1, cost=cost)
        at.cache.prefetch(match)
        assert (match.is_ready, match.chunks) == (False, 4)
        at.cache.prefetch(match, has=3 * C)
        left = match.deadline - time.monotonic()
        assert (match.is_ready, match.chunks) == (False, 4)
        assert left < PATIENCE * cost.prefill(3 * C, 4 * C), "it waits for what the rest is worth"
        at.cache.prefetch(match, has=4 * C)
        assert (match.is_ready, match.chunks) == (True, 0)
        at.cache.release(match)
        at.gate.open()
        assert at.cache.flush()
        at.cache.check()


def test_a_tier_with_slow_lookups_is_skipped_until_faster():
    cost = Cost(5e-3, 5e-3, 0.0, 0.0)
    tier, url = SlowTier(Asked()), "asked://"
    config = Config(tiers=[f"cpu://?capacity={8 * ROOM}", url], chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: tier}) as cache:

        def ask(number: int) -> Lookup:
            return cache.match(keys(4, str(number)), FORM, tokens=4 * C + 1, cost=cost)

        cache.release(cache.wait(ask(0)))
        tier._delay = 0.5
        watch = Stopwatch()
        assert not cache.wait(ask(1)).chunks
        assert watch.seconds() < 0.5
        assert ask(2).is_ready, "it has not answered for longer than this one may wait"
        assert cache.metrics.value("lmtier_queue_depth", tier="asked", op="all") == 1
        assert cache.flush()
        assert ask(3).is_ready, "it took too long"
        tier._delay = 0.0
        for number in range(4, 30):
            assert cache.flush()
            if ask(number).pending_lookups:
                break
        else:
            pytest.fail("nobody waits for it any more")


def test_no_lookup_is_awaited_where_no_load_could_pay():
    dear = Cost(1e-3, 1.0, 0.0, 0.0)
    with place(tier=Asked) as at:
        at.tier._delay = 0.2
        assert at.ask(None).chunks == 4
        prompt = next(at.unread)
        match = at.cache.match(prompt, FORM, tokens=4 * C + 1, cost=CHEAP)
        assert (match.is_ready, match.chunks, match.cut_reason) == (True, 0, "not_worth_it")
        assert at.decided("none", "slower") == 1
        assert at.count("missed_tokens_total", reason="not_worth_it") == 4 * C
        longer = at.cache.match(prompt, FORM, tokens=4 * C + 1, cost=dear)
        assert longer.pending_lookups, "for this engine it may be"
        assert at.cache.wait(longer).chunks == 4
        for each in (match, longer):
            at.cache.release(each)
        at.cache.check()


def test_near_chunks_load_at_once_if_far_ones_cannot_pay():
    near, far, urls = MemoryTier(), SlowToRead(Asked(), Gate()), ["near://?capacity=1GiB", "far://"]
    config = Config(tiers=[f"cpu://?capacity={8 * ROOM}", *urls], chunk_tokens=C, prefault=False)
    with Cache(config, tiers=dict(zip(urls, [near, far], strict=True))) as cache:
        prompts = [keys(4, f"prompt {number} ") for number in range(2)]
        for names in [*prompts, keys(8, "what fills the slab")]:
            cache.commit(cache.reserve(names, FORM))
            assert cache.flush()
        for names in prompts:
            cache.lower[0].discard(names[3], (FORM,))
        far._delay = 1.0
        learnt = cache.wait(cache.match(prompts[0], FORM, tokens=4 * C + 1))
        assert learnt.sources == ["near"] * 3 + ["far"]
        # It waits 0.27 s for an answer. Four tokens are computed in 0.04 s; to read them from afar takes 1 s.
        match = cache.match(prompts[1], FORM, tokens=4 * C + 1, cost=Cost(1e-2, 1e-2, 0.0, 0.0))
        assert (match.pending_lookups, match.sources, match.cut_reason) == (0, ["near"] * 3, "not_worth_it")
        assert match.decision == ("part", "slower")
        assert cache.wait(match).chunks == 3
        for each in (learnt, match):
            cache.release(each)
        assert cache.flush()
        cache.check()


@contextmanager
def asked(delay: float = 0.0) -> Iterator[tuple[Cache, SlowTier, Gate, list[bytes]]]:
    """A cache over a tier that must be asked, and a prompt that lies there alone."""
    gate, url = Gate(), "asked://"
    tier = SlowTier(Asked(), gate, delay)
    config = Config(tiers=[f"cpu://?capacity={8 * ROOM}", url], chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: tier}) as cache:
        prompt = keys(4, "prompt")
        for names in (prompt, keys(8, "what fills the slab")):
            cache.commit(cache.reserve(names, FORM))
            assert cache.flush()
        try:
            yield cache, tier, gate, prompt
        finally:
            gate.open()


def test_chunks_found_in_time_are_loaded_by_a_late_engine():
    patient = Cost(1e-2, 1e-2, 0.0, 0.0)  # it answers within a quarter of a second
    with asked() as (cache, _, _, prompt):
        match = cache.match(prompt, FORM, tokens=4 * C + 1, cost=patient)
        while (
            match.pending_lookups or time.monotonic() < match.deadline + 0.01
        ):  # the engine is in a long step
            cache.step()
        assert (match.chunks, match.cut_reason) == (4, "")
        assert (cache.wait(match).chunks, match.cut_reason) == (4, "")
        cache.release(match)


def test_a_tier_too_slow_for_one_engine_is_still_trusted():
    with asked() as (cache, _, gate, prompt):
        gate.hold()
        matches = [cache.match(prompt, FORM, tokens=4 * C + 1, cost=CHEAP) for _ in range(10)]
        while not all(match.is_ready for match in matches):
            cache.step()
        assert not any(match.chunks for match in matches)
        gate.open()
        assert cache.flush()
        assert not cache.lower[0].load_breaker.is_open
        for match in matches:
            cache.release(match)


def test_an_engine_that_claims_too_much_breaks_nothing():
    cost = Cost(1e-3, 10.0, 0.0, 0.0)  # however slow the tier is, it is faster
    with place() as at:
        at.learn(cost)
        match = at.cache.match(next(at.unread), FORM, tokens=4 * C + 1, cost=cost)
        assert match.chunks == len(match.below) == 4
        at.cache.prefetch(match, has=1_000_000_000)
        assert (match.is_ready, match.chunks) == (True, 0)
        at.cache.release(match)


# ---- the server


def test_lookups_are_decided_by_their_engines_own_costs():
    with place() as at:
        at.tier._delay = 0.2
        at.ask(None)
        engines = EngineVerbs(at.cache)
        knows, does_not = (
            Connection(engines, "ENGINE", secret("a")),
            Connection(engines, "ENGINE", secret("b")),
        )
        worker = Connection(engines, "ENGINE", secret("a"))
        assert worker.say("COST", "0.001", repr(1e-3), 0, 0) == "OK"
        found = {}
        for each in (knows, does_not):
            found[each] = each.match(next(at.unread))
        assert (found[knows]["sources"], found[knows]["cut"]) == (b"", b"not_worth_it")
        assert found[does_not]["sources"] == b"slow*4"
        number = found[does_not]["id"]
        assert does_not.say("PREFETCH", number, 2, "HAS", 4 * C)["sources"] == b"slow*2"
        assert "no more" in str(does_not.say("PREFETCH", number, 2, 3))
        assert "digits only" in str(does_not.say("PREFETCH", number, "HAS", "x"))
        for words in (("x", 0, 0, 0), ("nan", 0, 0, 0), (0, -1, 0, 0), ("inf", 0, 0, 0)):
            assert "four numbers of seconds" in str(worker.say("COST", *map(str, words)))
        for each in (knows, does_not, worker):
            each.close()
