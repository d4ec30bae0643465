"""For authors of tiers: the conformance suite that every tier passes, and tiers that fail on purpose.

A new tier's test file is a subclass of TierSuite with three short methods; tests/conformance has examples.
Nothing here imports pytest or sleeps: concurrency is ordered by gates.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from lmtier.format import objects
from lmtier.format.keys import VALUES
from lmtier.format.layout import PAGE, LayerShape, Layout, Name, padded
from lmtier.format.objects import Header, Selector
from lmtier.format.sealing import SealingKeys
from lmtier.tiers.base import Done, Item, Job, Op, Reason, Stat, Tier
from lmtier.tiers.blocking import BlockingTier

PATIENCE = 10.0
"""Seconds after which a wait of a test is a failure."""


# ---- objects to store


def pages(nbytes: int) -> memoryview:
    """Fresh, aligned memory like an extent of a slab: whole pages, zeros."""
    return memoryview(mmap.mmap(-1, padded(nbytes)))


def opaque_layout(nbytes: int) -> Layout:
    """The simplest layout of an object of `nbytes`."""
    return Layout((LayerShape(1, nbytes, 0),), "u8", 1, 1, "test")


@dataclass(frozen=True, slots=True)
class Sample:
    """An object to store, and what to compare with after it was loaded."""

    header: Header
    payload: memoryview

    @property
    def name(self) -> Name:
        return self.header.name

    @property
    def room(self) -> int:
        return len(self.payload)

    def item(self, replaces: Name | None = None, used: int = 0) -> Item:
        """For a STORE."""
        return Item(self.name, self.payload, self.header, replaces, used)

    def at_rest(self) -> bytes:
        """Header page and payload, as the format has them."""
        page = pages(PAGE)
        objects.seal(page, self.header, self.payload)
        return bytes(page) + bytes(self.payload)


def sample(number: int, nbytes: int = 2 * PAGE) -> Sample:
    """The same number and size give the same object, in any process."""
    layout = opaque_layout(nbytes)
    name = Name(hashlib.sha256(f"sample {number}".encode()).digest(), layout.whole)
    payload = pages(nbytes)
    payload[:nbytes] = random.Random(number).randbytes(nbytes)
    return Sample(Header(name, layout, nbytes), payload)


def replace_start(each: Sample, prefix: bytes) -> Sample:
    """The same bytes under a key that begins with `prefix`."""
    name = Name(prefix + each.name.key[len(prefix) :], each.name.shard)
    return Sample(replace(each.header, name=name), each.payload)


# ---- asking a tier


def drain(tier: Tier, jobs: int, timeout: float = PATIENCE) -> list[Done]:
    """Poll, woken by the tier and never by a timer, until `jobs` of them are done."""
    woken = threading.Event()
    tier.wake = woken.set
    deadline = time.monotonic() + timeout
    finished = tier.poll()
    while len(finished) < jobs:
        if not woken.wait(deadline - time.monotonic()):
            raise TimeoutError(f"{len(finished)} of {jobs} jobs done after {timeout} s")
        woken.clear()
        finished += tier.poll()
    return finished


def run(tier: Tier, job: Job, timeout: float = PATIENCE) -> Done:
    """Submit one job and wait for it. Nothing else may be in flight."""
    tier.submit(job)
    (done,) = drain(tier, 1, timeout)
    assert done.id == job.id, f"job {done.id} was reported, {job.id} was submitted"
    return done


def store(tier: Tier, *samples: Sample, replaces: Name | None = None) -> Done:
    return run(tier, Job(0, Op.STORE, tuple(each.item(replaces) for each in samples)))


def load(tier: Tier, name: Name, room: int) -> tuple[Done, memoryview]:
    """The job, and the buffer that it filled. The buffer has exactly `room` bytes and was dirty before."""
    buffer = pages(room)
    buffer[:] = b"\xa5" * len(buffer)
    return run(tier, Job(0, Op.LOAD, (Item(name, buffer),))), buffer


def delete(tier: Tier, *names: Name) -> Done:
    return run(tier, Job(0, Op.DELETE, tuple(map(Item, names))))


def lookup(tier: Tier, *names: Name) -> dict[Name, Stat]:
    return _stats(run(tier, Job(0, Op.LOOKUP, tuple(map(Item, names)))))


def scan(tier: Tier) -> dict[Name, Stat]:
    return _stats(run(tier, Job(0, Op.SCAN, ())))


def _stats(done: Done) -> dict[Name, Stat]:
    assert not done.error, done.error
    return {name: stat for name, stat in done.ok.items() if isinstance(stat, Stat)}


# ---- faults


class Gate:
    """Lets jobs pass until `hold`. Any thread may open it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting = 0
        self._wakes: list[Callable[[], None]] = []
        self.is_open = True

    def hold(self) -> None:
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        for wake in self._wakes:
            wake()

    def wait_for(self, jobs: int, timeout: float = PATIENCE) -> None:
        """Wait until that many jobs wait here."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting >= jobs, timeout):
                raise TimeoutError(f"{self._waiting} of {jobs} jobs came to the gate in {timeout} s")

    def connect(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def count(self, change: int) -> None:
        with self._changed:
            self._waiting += change
            self._changed.notify_all()


class _Around(Tier):
    """A tier that hands everything to another one."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner
        self.keeps = inner.keeps
        inner.wake = self._woken

    def submit(self, job: Job) -> None:
        self._inner.submit(job)

    def poll(self) -> list[Done]:
        return self._inner.poll()

    def use_codec(self, name: str) -> None:
        self._inner.use_codec(name)

    def use_keys(self, keys: SealingKeys) -> None:
        self._inner.use_keys(keys)
        self.keys = keys

    @property
    def codec(self) -> str:
        return self._inner.codec

    def close(self) -> None:
        self._inner.close()

    def _woken(self) -> None:
        self.wake()  # looked up now: the caller sets it when it likes


class SlowTier(_Around):
    """Holds each job, in order, until `gate` is open and `delay` seconds have passed.

    The inner tier sees a job late, not only the caller its result: a caller that touches a payload
    too early gets wrong bytes.
    """

    def __init__(self, inner: Tier, gate: Gate | None = None, delay: float = 0.0) -> None:
        super().__init__(inner)
        self._gate = gate or Gate()
        self._gate.connect(self._woken)
        self._delay = delay
        self._held: deque[tuple[float, threading.Timer, Job]] = deque()
        self._failed: list[Done] = []
        self._closed = False

    def submit(self, job: Job) -> None:
        timer = threading.Timer(self._delay, self._woken)
        self._held.append((time.monotonic() + self._delay, timer, job))
        self._gate.count(1)
        if self._delay and not self._closed:
            timer.daemon = True
            timer.start()
        self._forward()

    def poll(self) -> list[Done]:
        self._forward()
        failed, self._failed = self._failed, []
        return failed + self._inner.poll()

    def close(self) -> None:
        self._closed = True
        while self._held:
            _, timer, job = self._pop()
            timer.cancel()
            self._failed.append(Done(job.id, {}, {item.name: Reason.CLOSED for item in job.items}))
        self._inner.close()

    def _forward(self) -> None:
        now = time.monotonic()
        while self._held and (self._closed or (self._gate.is_open and self._held[0][0] <= now)):
            self._inner.submit(self._pop()[-1])

    def _pop(self) -> tuple[float, threading.Timer, Job]:
        self._gate.count(-1)
        return self._held.popleft()


class FlakyTier(_Around):
    """Fails one item in `every` with `reason`, chosen by `seed`; the inner tier never sees its bytes."""

    def __init__(
        self,
        inner: Tier,
        *,
        every: int,
        reason: Reason = Reason.ERROR,
        seed: int = 0,
        ops: Collection[Op] = (Op.STORE, Op.LOAD),
    ) -> None:
        super().__init__(inner)
        self._every, self._reason, self._ops = every, reason, ops
        self._count = random.Random(seed).randrange(every)
        self._failing: dict[int, dict[Name, Reason]] = {}

    def submit(self, job: Job) -> None:
        failures: dict[Name, Reason] = {}
        for item in job.items if job.op in self._ops else ():
            self._count += 1
            if self._count % self._every == 0:
                failures[item.name] = self._reason
        self._failing[job.id] = failures
        items: Iterable[Item] = (item for item in job.items if item.name not in failures)
        if job.op is Op.STORE:
            # Without a header the inner tier must fail it too, so that what it replaces goes either way.
            items = (replace(item, header=None) if item.name in failures else item for item in job.items)
        self._inner.submit(replace(job, items=tuple(items)))

    def poll(self) -> list[Done]:
        return [replace(done, failed=done.failed | self._failing.pop(done.id)) for done in self._inner.poll()]


class FullTier(FlakyTier):
    """Has no room for any store; what it already holds can be loaded."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner, every=1, reason=Reason.FULL, ops=(Op.STORE,))


class FaultyModule:
    """Stands in for a module such as `os`: the `nth` of the `calls` does `fault(name)` instead.

    A close closes first, so that the injected fault is not the leak that a test looks for.
    """

    def __init__(
        self, module: ModuleType, calls: Collection[str], nth: int, fault: Callable[[str], None]
    ) -> None:
        self._module, self._calls, self._nth, self._fault = module, calls, nth, fault
        self._lock = threading.Lock()
        self.made: list[str] = []
        """The calls so far, by name."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        return self._counted(name, real) if name in self._calls else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.made.append(name)
                fails = len(self.made) == self._nth
            if fails:
                if name == "close":
                    real(*args, **kwargs)
                self._fault(name)
            return real(*args, **kwargs)

        return call


class MemoryTier(BlockingTier):
    """Objects in dicts that the caller may own, look into and spoil; given them again, it has them again."""

    def __init__(self, objects: dict[Name, bytes] | None = None, used: dict[Name, int] | None = None) -> None:
        self.objects: dict[Name, bytes] = {} if objects is None else objects
        self.used: dict[Name, int] = {} if used is None else used
        super().__init__("memory", readers=2, writers=2)

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        stored = self.objects.get(item.name)
        if stored is None:
            raise FileNotFoundError(item.name)
        data, position = memoryview(stored), 0
        self.touch([item])
        for buffer in buffers:
            piece = data[position : position + len(buffer)]
            buffer[: len(piece)] = piece
            position += len(piece)
        return len(data)

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        if item.replaces is not None:
            self.delete([item.replaces])
        self.touch([item])
        self.objects[item.name] = b"".join(buffers)

    def delete(self, names: Sequence[Name]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def touch(self, items: Sequence[Item]) -> None:
        self.used.update({item.name: item.used or time.time_ns() for item in items})

    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        return {
            name: Stat(len(data) - PAGE, self.used.get(name, 0))
            for name in names
            if (data := self.objects.get(name)) is not None  # it may go at any moment
        }

    def scan(self) -> list[tuple[Name, Stat]]:
        return list(self.contains(list(self.objects)).items())


# ---- the suites


class SeamSuite:
    """What holds for every Tier, also for one that forgets."""

    def make(self, tmp_path: Path) -> Tier:
        """A tier whose objects are in `tmp_path`. Called again after close, it finds what was there."""
        raise NotImplementedError

    def test_each_job_is_reported_once(self, tmp_path: Path) -> None:
        objects = [sample(i) for i in range(40)]
        with closing(self.make(tmp_path)) as tier:
            for i, each in enumerate(objects):
                tier.submit(Job(i, Op.STORE, (each.item(),)))
            others = [Op.LOAD, Op.DELETE, Op.LOOKUP, Op.STORE]
            for i, op in enumerate(others, 100):
                tier.submit(Job(i, op, ()))
                tier.submit(Job(i + 10, op, (sample(i).item(),)))
            tier.submit(Job(120, Op.SCAN, ()))
            done = drain(tier, 40 + 2 * len(others) + 1)
            expected = [*range(40), *range(100, 104), *range(110, 114), 120]
            assert sorted(each.id for each in done) == expected
            assert tier.poll() == []
            assert all(not (each.ok.keys() & each.failed.keys()) for each in done)
            assert all(each.seconds >= 0 for each in done)

    def test_what_is_absent_is_a_miss_and_may_be_deleted(self, tmp_path: Path) -> None:
        """`read` raises FileNotFoundError for it. Any other exception, also a KeyError, is an error."""
        name = sample(1).name
        with closing(self.make(tmp_path)) as tier:
            done, _ = load(tier, name, PAGE)
            assert done.ok == {}
            assert done.failed == {name: Reason.ABSENT}
            assert lookup(tier, name) == {}
            assert delete(tier, name).ok == {name: None}

    def test_what_has_not_begun_by_its_deadline_fails(self, tmp_path: Path) -> None:
        stored_sample = sample(1)
        with closing(self.make(tmp_path)) as tier:
            for op in (Op.STORE, Op.LOAD):
                done = run(tier, Job(0, op, (stored_sample.item(),), deadline=time.monotonic() - 1))
                assert (done.ok, done.failed) == ({}, {stored_sample.name: Reason.DEADLINE})
            assert lookup(tier, stored_sample.name) == {}

    def test_the_caller_is_woken(self, tmp_path: Path) -> None:
        with closing(self.make(tmp_path)) as tier:
            for items in ((), (sample(1).item(),)):
                woken = threading.Event()
                tier.wake = woken.set
                tier.submit(Job(1, Op.STORE, items))
                assert woken.wait(PATIENCE)
                assert [done.id for done in drain(tier, 1)] == [1]

    def test_close_ends_every_job_and_may_be_called_again(self, tmp_path: Path) -> None:
        objects = [sample(i) for i in range(64)]
        tier = self.make(tmp_path)
        for i, stored_sample in enumerate(objects):
            tier.submit(Job(i, Op.STORE, (stored_sample.item(),)))
        tier.close()
        tier.close()
        done = tier.poll()
        assert sorted(done_job.id for done_job in done) == list(range(64))
        for done_job in done:
            name = objects[done_job.id].name
            assert name in done_job.ok or done_job.failed[name] is Reason.CLOSED

    def test_a_closed_tier_fails_what_it_is_given(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        tier.close()
        stored_sample = sample(1)
        for op in (Op.STORE, Op.LOAD, Op.LOOKUP, Op.DELETE):
            done = run(tier, Job(3, op, (stored_sample.item(),)))
            assert (done.ok, done.failed) == ({}, {stored_sample.name: Reason.CLOSED})
        assert run(tier, Job(4, Op.SCAN, ())).ok == {}
        assert run(tier, Job(5, Op.CLEAR, ())).error

    def test_threads_end_with_close(self, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        tier = self.make(tmp_path)
        store(tier, sample(1))
        tier.close()
        assert set(threading.enumerate()) <= before


class TierSuite(SeamSuite):
    """The tests for every Tier that stores objects.

    `raw_objects` and `plant` access the storage directly. They must not use the tier, so that an error in its
    write cannot hide an error in its read.
    """

    def raw_objects(self, tmp_path: Path) -> dict[Name, bytes]:
        """Every object at rest: header page and payload."""
        raise NotImplementedError

    def plant(self, tmp_path: Path, name: Name, data: bytes) -> None:
        """Put `data`, sound or not, where the tier looks for `name`."""
        raise NotImplementedError

    def at_rest(self, each: Sample) -> bytes:
        """What the tier would store of a sample, to plant it. A suite over a tier that seals has its own."""
        return each.at_rest()

    def stored(self, tmp_path: Path) -> dict[Name, bytes]:
        """`raw_objects`, without seals."""
        return self.raw_objects(tmp_path)

    def assert_corrupt(self, tier: Tier, tmp_path: Path, name: Name, data: bytes, room: int) -> None:
        """Check that `data`, planted under `name`, counts as corrupt, and is deleted after a load."""
        self.plant(tmp_path, name, data)
        done, _ = load(tier, name, room)
        assert (done.ok, done.failed) == ({}, {name: Reason.CORRUPT})
        assert lookup(tier, name) == {}

    def test_what_was_stored_is_loaded(self, tmp_path: Path) -> None:
        with closing(self.make(tmp_path)) as tier:
            for i, nbytes in enumerate((1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5, 1 << 20)):
                stored_sample = sample(i, nbytes)
                assert store(tier, stored_sample).ok == {stored_sample.name: None}
                assert self.stored(tmp_path)[stored_sample.name] == stored_sample.at_rest()
                done, buffer = load(tier, stored_sample.name, stored_sample.room)
                assert (done.ok, done.failed) == ({stored_sample.name: stored_sample.header}, {})
                assert buffer[:nbytes] == stored_sample.payload[:nbytes]

    def test_a_header_can_be_read_alone(self, tmp_path: Path) -> None:
        each, absent = sample(1, 9 * PAGE), sample(2)
        with closing(self.make(tmp_path)) as tier:
            store(tier, each)
            done = run(tier, Job(0, Op.PEEK, (Item(each.name), Item(absent.name))))
            assert (done.ok, done.failed) == ({each.name: each.header}, {absent.name: Reason.ABSENT})
            self.plant(tmp_path, absent.name, self.at_rest(each))
            assert run(tier, Job(0, Op.PEEK, (Item(absent.name),))).failed == {absent.name: Reason.CORRUPT}

    def test_what_was_planted_is_loaded(self, tmp_path: Path) -> None:
        stored_sample = sample(1)
        with closing(self.make(tmp_path)) as tier:
            self.plant(tmp_path, stored_sample.name, self.at_rest(stored_sample))
            done, buffer = load(tier, stored_sample.name, stored_sample.room)
            assert done.ok == {stored_sample.name: stored_sample.header}
            assert buffer == stored_sample.payload

    def test_a_job_of_many(self, tmp_path: Path) -> None:
        objects = [sample(i, PAGE * (1 + i % 5)) for i in range(64)]
        with closing(self.make(tmp_path)) as tier:
            done = store(tier, *objects)
            assert done.ok == dict.fromkeys(each.name for each in objects)
            absent = sample(1000)
            items = tuple(Item(each.name, pages(each.room)) for each in (*objects, absent))
            done = run(tier, Job(7, Op.LOAD, items))
            assert done.ok == {each.name: each.header for each in objects}
            assert done.failed == {absent.name: Reason.ABSENT}
            for each, item in zip(objects, items, strict=False):
                assert item.payload == each.payload

    def test_room_may_be_longer_but_never_shorter(self, tmp_path: Path) -> None:
        stored_sample = sample(1, 2 * PAGE)
        with closing(self.make(tmp_path)) as tier:
            store(tier, stored_sample)
            done, buffer = load(tier, stored_sample.name, 5 * PAGE)
            assert done.ok == {stored_sample.name: stored_sample.header}
            assert buffer[: stored_sample.room] == stored_sample.payload
            done, _ = load(tier, stored_sample.name, PAGE)
            assert done.ok == {}

    def test_lookup_tells_the_room(self, tmp_path: Path) -> None:
        objects = [sample(i, nbytes) for i, nbytes in enumerate((1, PAGE, PAGE + 1, 9 * PAGE))]
        with closing(self.make(tmp_path)) as tier:
            store(tier, *objects)
            found = lookup(tier, *(each.name for each in objects), sample(99).name)
            assert {name: stat.nbytes for name, stat in found.items()} == {
                each.name: each.room for each in objects
            }

    def test_delete_is_idempotent(self, tmp_path: Path) -> None:
        objects = [sample(i) for i in range(3)]
        names = [each.name for each in objects]
        with closing(self.make(tmp_path)) as tier:
            store(tier, *objects)
            for _ in range(2):
                assert delete(tier, *names[:2]).ok == dict.fromkeys(names[:2])
                assert self.raw_objects(tmp_path).keys() == {names[2]}
            assert load(tier, names[0], PAGE)[0].failed == {names[0]: Reason.ABSENT}
            assert load(tier, names[2], objects[2].room)[0].ok

    def test_clear_forgets_what_begins_with_a_prefix_and_nothing_else(self, tmp_path: Path) -> None:
        objects = [sample(i, PAGE * (1 + i % 3)) for i in range(60)]
        prefix = objects[7].name.key[:4]
        cleared = [replace_start(each, prefix) if i % 2 else each for i, each in enumerate(objects)]
        others = [each for each in cleared if not each.name.key.startswith(prefix)]
        with closing(self.make(tmp_path)) as tier:
            store(tier, *cleared)
            for start, remaining in ((bytes(4), cleared), (prefix, others), (prefix, others), (b"", [])):
                done = run(tier, Job(1, Op.CLEAR, (), selector=Selector(start)))
                assert (done.ok, done.failed, done.error) == ({}, {}, "")
                assert self.stored(tmp_path) == {each.name: each.at_rest() for each in remaining}

    def test_a_store_overwrites_the_value_of_its_name(self, tmp_path: Path) -> None:
        with closing(self.make(tmp_path)) as tier:
            for each in (replace_start(sample(1, size), VALUES) for size in (PAGE, PAGE, 9 * PAGE, PAGE)):
                assert store(tier, each).ok == {each.name: None}
                assert self.stored(tmp_path) == {each.name: each.at_rest()}

    def test_a_store_takes_the_place_of_what_it_replaces(self, tmp_path: Path) -> None:
        with closing(self.make(tmp_path)) as tier:
            for number, (old_size, new_size) in enumerate(((4, 4), (4, 2), (2, 4)), 1):
                old, new = sample(2 * number, old_size * PAGE), sample(2 * number + 1, new_size * PAGE)
                store(tier, old)
                assert store(tier, new, replaces=old.name).ok == {new.name: None}
                raw = self.stored(tmp_path)
                assert old.name not in raw
                assert raw[new.name] == new.at_rest()
                assert load(tier, new.name, new.room)[1] == new.payload
                assert lookup(tier, old.name) == {}
            absent, new = sample(100), sample(101)
            assert store(tier, new, replaces=absent.name).ok == {new.name: None}
            assert store(tier, new, replaces=new.name).ok == {new.name: None}
            assert self.stored(tmp_path)[new.name] == new.at_rest()

    def test_what_is_replaced_goes_though_the_store_fails(self, tmp_path: Path) -> None:
        old, new = sample(1), sample(2)
        with closing(self.make(tmp_path)) as tier:
            for job in (
                Job(1, Op.STORE, (replace(new.item(old.name), header=None),)),
                Job(2, Op.STORE, (new.item(old.name),), deadline=time.monotonic() - 1),
            ):
                store(tier, old)
                assert run(tier, job).ok == {}
                assert self.raw_objects(tmp_path) == {}

    def test_a_flipped_bit_anywhere_is_a_miss(self, tmp_path: Path) -> None:
        stored_sample = sample(1, PAGE)
        sound, rng = self.at_rest(stored_sample), random.Random(0)
        header, zeros = [*range(512), *range(PAGE - 32, PAGE)], range(512, PAGE - 32)
        places = [*header, *rng.sample(zeros, 200), PAGE, *rng.sample(range(PAGE, len(sound)), 200)]
        with closing(self.make(tmp_path)) as tier:
            for position in places:
                spoilt = bytearray(sound)
                spoilt[position] ^= 1 << rng.randrange(8)
                self.assert_corrupt(tier, tmp_path, stored_sample.name, bytes(spoilt), stored_sample.room)

    def test_any_other_length_is_a_miss(self, tmp_path: Path) -> None:
        each = sample(1, 3 * PAGE)
        sound = self.at_rest(each)
        edges = {position + by for position in range(0, len(sound), PAGE) for by in (-1, 0, 1, 512)}
        short_lengths = sorted({*edges, *range(0, len(sound), 509), len(sound) - 1} & {*range(len(sound))})
        with closing(self.make(tmp_path)) as tier:
            for length in short_lengths:
                self.assert_corrupt(tier, tmp_path, each.name, sound[:length], each.room)
            for more in (1, 16, 511, 512, PAGE - 1, PAGE, PAGE + 1, 7 * PAGE, 1 << 20):
                self.assert_corrupt(tier, tmp_path, each.name, sound + bytes(more), each.room)
            self.assert_corrupt(tier, tmp_path, each.name, sound + sound, each.room)

    def test_bytes_of_another_object_are_a_miss(self, tmp_path: Path) -> None:
        first, second = sample(1), sample(2)
        other_shard = Name(first.name.key, first.name.shard._replace(end_layer=2))
        with closing(self.make(tmp_path)) as tier:
            self.assert_corrupt(tier, tmp_path, first.name, self.at_rest(second), first.room)
            self.assert_corrupt(tier, tmp_path, second.name, self.at_rest(first), first.room)
            self.assert_corrupt(tier, tmp_path, other_shard, self.at_rest(first), first.room)
            mixed = self.at_rest(first)[:PAGE] + self.at_rest(second)[PAGE:]
            self.assert_corrupt(tier, tmp_path, first.name, mixed, first.room)
            for junk in (bytes(3 * PAGE), b"\xff" * 3 * PAGE, b"lmtierKV" * PAGE):
                self.assert_corrupt(tier, tmp_path, first.name, junk, first.room)

    def test_what_was_corrupt_can_be_stored_again(self, tmp_path: Path) -> None:
        each = sample(1)
        with closing(self.make(tmp_path)) as tier:
            blank = self.at_rest(each)[:PAGE] + bytes(each.room)
            self.assert_corrupt(tier, tmp_path, each.name, blank, each.room)
            store(tier, each)
            assert load(tier, each.name, each.room)[0].ok == {each.name: each.header}

    def test_a_scan_after_reopening_finds_what_was_stored(self, tmp_path: Path) -> None:
        objects = [sample(i, PAGE * (1 + i % 3)) for i in range(50)]
        tier = self.make(tmp_path)
        store(tier, *objects)
        delete(tier, *(each.name for each in objects[:10]))
        tier.close()
        with closing(self.make(tmp_path)) as tier:
            if tier.keeps:
                assert {name: stat.nbytes for name, stat in scan(tier).items()} == {
                    each.name: each.room for each in objects[10:]
                }

    def test_the_order_of_use_survives_reopening(self, tmp_path: Path) -> None:
        objects = [sample(i) for i in range(5)]
        tier = self.make(tmp_path)
        now, step = time.time_ns(), 10_000_000_000
        head_to_tail = tuple(each.item(used=now - i * step) for i, each in enumerate(objects))
        run(tier, Job(0, Op.STORE, head_to_tail))
        load(tier, objects[3].name, objects[3].room)
        run(tier, Job(0, Op.TOUCH, (Item(objects[4].name, used=now - step // 2),)))
        tier.close()
        with closing(self.make(tmp_path)) as tier:
            if tier.keeps:
                oldest_first = [name for name, _ in sorted(scan(tier).items(), key=lambda each: each[1].used)]
                assert oldest_first[0] != objects[4].name, "`touch` records nothing that `scan` returns"
                assert oldest_first == [objects[i].name for i in (2, 1, 4, 0, 3)]

    def test_one_object_may_be_loaded_twice_at_once(self, tmp_path: Path) -> None:
        each = sample(1, 64 * PAGE)
        with closing(self.make(tmp_path)) as tier:
            store(tier, each)
            buffers = [pages(each.room) for _ in range(16)]
            for i, buffer in enumerate(buffers):
                tier.submit(Job(i, Op.LOAD, (Item(each.name, buffer),)))
            done = drain(tier, len(buffers))
            assert all(done_job.ok == {each.name: each.header} for done_job in done)
            assert all(buffer == each.payload for buffer in buffers)

    def test_loads_beside_stores_and_deletes(self, tmp_path: Path) -> None:
        objects = [sample(i, 16 * PAGE) for i in range(60)]
        loaded, stored, gone = objects[:20], objects[20:40], objects[40:]
        buffers = [pages(each.room) for each in loaded]
        with closing(self.make(tmp_path)) as tier:
            store(tier, *loaded, *gone)
            for i, (old, buffer, new, victim) in enumerate(zip(loaded, buffers, stored, gone, strict=True)):
                tier.submit(Job(3 * i, Op.LOAD, (Item(old.name, buffer),)))
                if i % 2:
                    tier.submit(Job(3 * i + 1, Op.STORE, (new.item(replaces=victim.name),)))
                else:
                    tier.submit(Job(3 * i + 1, Op.STORE, (new.item(),)))
                    tier.submit(Job(3 * i + 2, Op.DELETE, (Item(victim.name),)))
            done = drain(tier, 50)
            assert all(not each.failed for each in done)
            assert buffers == [each.payload for each in loaded]
            assert self.stored(tmp_path) == {each.name: each.at_rest() for each in (*loaded, *stored)}
