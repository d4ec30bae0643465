"""The tiers of lmtier.testing: sound ones pass the suite, faulty ones fail as they say and no other way."""

import asyncio
import os
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from lmtier.format.layout import Name
from lmtier.testing import (
    FaultyModule,
    FlakyTier,
    FullTier,
    Gate,
    MemoryTier,
    SlowTier,
    TierSuite,
    delete,
    drain,
    load,
    lookup,
    run,
    sample,
    store,
)
from lmtier.tiers.base import Item, Job, Op, Reason
from tests.sealed import Sealed


class TestMemory(TierSuite):
    def setup_method(self):
        self.objects: dict[Name, bytes] = {}
        self.tier = MemoryTier()

    def make(self, tmp_path: Path):
        self.tier.close()
        used = self.tier.used
        self.tier = MemoryTier(self.objects, used)
        return self.tier

    def raw_objects(self, tmp_path: Path):
        return self.objects

    def plant(self, tmp_path: Path, name: Name, data: bytes):
        self.objects[name] = data


class TestSlow(TestMemory):
    """With its gate open it is a tier like any other."""

    def make(self, tmp_path: Path):
        return SlowTier(super().make(tmp_path), Gate())


class TestFlakyThatNeverFails(TestMemory):
    def make(self, tmp_path: Path):
        return FlakyTier(super().make(tmp_path), every=1_000_000_000)


@pytest.mark.sealed
class TestSealedSlow(Sealed, TestSlow):
    """A tier around another one hands the keys to it."""


def test_a_gate_holds_jobs_in_order_until_it_opens():
    gate, objects = Gate(), [sample(i) for i in range(3)]
    with closing(MemoryTier()) as inner, closing(SlowTier(inner, gate)) as tier:
        gate.hold()
        for i, each in enumerate(objects):
            tier.submit(Job(i, Op.STORE, (each.item(),)))
        gate.wait_for(3, timeout=0)
        assert tier.poll() == []
        assert inner.objects == {}
        opener = threading.Thread(target=gate.open)
        opener.start()
        assert sorted(done.id for done in drain(tier, 3)) == [0, 1, 2]
        opener.join()
        assert len(inner.objects) == 3
        with pytest.raises(TimeoutError, match="0 of 1 jobs"):
            gate.wait_for(1, timeout=0)


def test_a_closed_gate_does_not_stop_close():
    gate = Gate()
    tier = SlowTier(MemoryTier(), gate)
    gate.hold()
    each = sample(1)
    tier.submit(Job(1, Op.STORE, (each.item(),)))
    tier.close()
    (done,) = tier.poll()
    assert (done.id, done.failed) == (1, {each.name: Reason.CLOSED})


def test_a_delay_is_waited_for():
    with closing(SlowTier(MemoryTier(), delay=0.05)) as tier:
        began = time.monotonic()
        assert store(tier, sample(1)).ok
        assert time.monotonic() - began >= 0.05


def test_one_in_n_fails_and_the_seed_says_which():
    objects = [sample(i) for i in range(30)]

    def failures(seed: int) -> list[Name]:
        with closing(FlakyTier(MemoryTier(), every=10, reason=Reason.FULL, seed=seed)) as tier:
            done = store(tier, *objects)
            assert set(done.failed.values()) == {Reason.FULL}
            assert done.ok.keys() | done.failed.keys() == {each.name for each in objects}
            assert lookup(tier, *(each.name for each in objects)).keys() == done.ok.keys()
            return list(done.failed)

    assert [len(failures(seed)) for seed in range(5)] == [3] * 5
    assert failures(1) == failures(1)
    assert len({tuple(failures(seed)) for seed in range(5)}) > 1


def test_a_flaky_load_leaves_the_object():
    each = sample(1)
    with closing(FlakyTier(MemoryTier(), every=2, seed=0, ops=(Op.LOAD,))) as tier:
        store(tier, each)
        outcomes = [bool(load(tier, each.name, each.room)[0].ok) for _ in range(4)]
        assert outcomes in ([True, False] * 2, [False, True] * 2)


def test_a_full_tier_still_supplies_and_forgets():
    objects = [sample(i) for i in range(3)]
    known = {each.name: each.at_rest() for each in objects}
    with closing(FullTier(MemoryTier(known))) as tier:
        new = sample(10)
        assert store(tier, new).failed == {new.name: Reason.FULL}
        assert load(tier, objects[0].name, objects[0].room)[0].ok
        assert delete(tier, objects[0].name).ok
        assert store(tier, new, replaces=objects[1].name).failed == {new.name: Reason.FULL}
        assert known.keys() == {objects[2].name}
        assert run(tier, Job(5, Op.LOOKUP, (Item(new.name),))).ok == {}


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_a_panic_costs_its_job_and_not_the_thread(error):
    """A panic in an extension, say: without its threads a tier never comes back."""

    class Panics(MemoryTier):
        is_calm = False

        def _panic(self) -> None:
            if not self.is_calm:
                raise error("a panic")

        def write(self, item, buffers):
            self._panic()
            super().write(item, buffers)

        def delete(self, names):
            self._panic()
            super().delete(names)

    objects = [sample(number) for number in range(9)]  # more than there are threads
    with closing(Panics()) as tier:
        done = store(tier, *objects)
        assert done.failed == dict.fromkeys((each.name for each in objects), Reason.ERROR)
        assert delete(tier, objects[0].name).failed
        tier.is_calm = True
        assert store(tier, *objects).ok.keys() == {each.name for each in objects}


class Forgetful(MemoryTier):
    """Looks an object up as a dict does."""

    def read(self, item, buffers):
        buffers[0][:] = self.objects[item.name][: len(buffers[0])]
        return super().read(item, buffers)


def test_a_key_error_is_a_bug_of_the_tier_and_not_a_miss(tmp_path):
    each = sample(1)
    with closing(Forgetful()) as tier:
        done, _ = load(tier, each.name, each.room)
        assert done.failed == {each.name: Reason.ERROR}
        assert "KeyError" in done.error

    class Suite(TierSuite):
        def make(self, tmp_path):
            return Forgetful()

    with pytest.raises(AssertionError):
        Suite().test_what_is_absent_is_a_miss_and_may_be_deleted(tmp_path)


def test_the_nth_call_of_a_module_fails():
    def refuse(name: str) -> None:
        raise OSError(5, name)

    faulty = FaultyModule(os, {"stat"}, 2, refuse)
    assert faulty.getpid() == os.getpid()
    faulty.stat("/")
    with pytest.raises(OSError, match="stat"):
        faulty.stat("/")
    faulty.stat("/")
    assert faulty.made == ["stat"] * 3
