"""A tier in the hand of a test, and chunks whose bytes tell what they are."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import lru_cache

from lmtier.format import objects
from lmtier.format.keys import is_value, tenant
from lmtier.format.layout import PAGE, Layout, Name, Shard, form_of
from lmtier.format.objects import CorruptObject
from lmtier.tiers.base import Done, Item, Job, Op, Reason, Stat, Tier

LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=300, dtype="fp16", block_tokens=1, chunk_tokens=2, packing="planes"
)  # 9,600 bytes: not whole pages
FORMS = {
    "one rank": form_of(LAYOUT, (LAYOUT.whole,)),
    "two ranks": form_of(LAYOUT, (Shard(0, 2, 0, 1), Shard(0, 2, 1, 2))),
    "two stages": form_of(LAYOUT, (Shard(0, 1, 0, 2), Shard(1, 2, 0, 2))),
}
CHAINS = 5
LENGTH = 7


@lru_cache(maxsize=CHAINS * LENGTH)
def key(chain: int, number: int) -> bytes:
    """Chains 0-2 and 3-4 share their first three chunks, and are of one tenant."""
    root = chain if number >= 3 else (0 if chain < 3 else 3)
    digest = hashlib.sha256(f"{root}/{number}".encode()).digest()
    return digest[:4] + tenant("a" if chain < 3 else "b") + digest[8:]


@lru_cache(maxsize=4096)
def content(key: bytes, shard: Shard, age: int = 0) -> bytes:
    """The bytes of a shard. After a chunk was discarded it is written anew, one `age` later."""
    size = LAYOUT.nbytes(shard)
    return (hashlib.sha256(key + str(shard).encode() + bytes([age])).digest() * (size // 32 + 1))[:size]


class HandTier(Tier):
    """Objects in a dict; jobs end one by one, in any order, when the test says so, some of them badly."""

    def __init__(self, kept: dict[Name, bytes], keeps: bool, *, scans_at_once: bool = True) -> None:
        self.keeps = keeps
        self.kept = kept
        self.waiting: list[Job] = []
        self.done: list[Done] = []
        self.fault: Reason | None = None
        """What happens to every item of the jobs that end now."""
        self.chance: Callable[[], float] = lambda: 1.0
        """What is rolled for details of a failure; 1.0: none of them happens."""
        self._at_once = {Op.SCAN, Op.TOUCH} if scans_at_once else {Op.TOUCH}

    def submit(self, job: Job) -> None:
        self.check_promise(job)
        self.waiting.append(job)
        if job.op in self._at_once:
            self.finish(-1)

    def check_promise(self, job: Job) -> None:
        """What the caller guarantees; others who share a tier do not, so loads have to live with them."""
        names = {item.name for item in job.items}
        writes = [each for each in self.waiting if each.op in (Op.STORE, Op.DELETE)]
        loads = [each for each in self.waiting if each.op is Op.LOAD and self.keeps]
        beside: list[Job] = []
        if job.op in (Op.STORE, Op.DELETE):
            beside = writes + loads
        elif job.op is Op.LOAD:
            beside = writes if self.keeps else [each for each in writes if each.op is Op.DELETE]
        for each in beside:
            clash = names & {item.name for item in each.items}
            assert not clash, f"a {job.op.value} beside a {each.op.value} of {clash}"

    def poll(self) -> list[Done]:
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        while self.waiting:
            self.finish(0)

    def finish(self, which: int) -> None:
        job = self.waiting.pop(which % len(self.waiting))
        done = Done(job.id, {}, error=self.fault or "")
        late = job.deadline is not None and time.monotonic() > job.deadline
        for item in job.items:
            fault = Reason.DEADLINE if late else self.fault
            if fault is not None and self.chance() < 0.2:
                fault = None  # not every item of the job
            if fault is not None and job.op is not Op.TOUCH:
                self.fail(job.op, item, fault, done)
            else:
                self.attempt(job.op, item, done)
        if self.fault is None and job.op is Op.CLEAR:
            for name in list(self.kept):
                header, _ = objects.read_header(memoryview(self.kept[name]))
                if job.selector.covers(name.key, header.provenance):
                    del self.kept[name]
        if self.fault is None and job.op is Op.SCAN:
            done.ok.update({name: Stat(len(data) - PAGE) for name, data in self.kept.items()})
        self.done.append(done)
        self.wake()

    def fail(self, op: Op, item: Item, fault: Reason, done: Done) -> None:
        name = item.name
        if self.chance() < 0.1:
            fault = Reason.ERROR  # and it forgets to say so
        else:
            done.failed[name] = fault
        if item.replaces is not None and fault is not Reason.CLOSED:
            if self.chance() < 0.2:
                done.failed[item.replaces] = Reason.ERROR  # it cannot go
            else:
                self.kept.pop(item.replaces, None)
        lost = fault is Reason.CORRUPT or (fault is Reason.ABSENT and op in (Op.LOAD, Op.PEEK))
        if lost or (op is Op.DELETE and self.chance() < 0.3):
            self.kept.pop(name, None)
        if op is Op.STORE and not self.keeps and self.chance() < 0.3:
            self.write(item)  # and only the answer was lost

    def attempt(self, op: Op, item: Item, done: Done) -> None:
        name = item.name
        if op is Op.STORE:
            if item.replaces is not None:
                del self.kept[item.replaces]
            assert name not in self.kept or not self.keeps or is_value(name.key), "stored twice"
            self.write(item)
            done.ok[name] = None
        elif op in (Op.DELETE, Op.TOUCH):
            if op is Op.DELETE:
                self.kept.pop(name, None)
            done.ok[name] = None
        elif name not in self.kept:
            done.failed[name] = Reason.ABSENT
        elif op is Op.LOOKUP:
            done.ok[name] = Stat(len(self.kept[name]) - PAGE)
        elif op is Op.PEEK:
            done.ok[name] = objects.peek(memoryview(self.kept[name])[:PAGE], name)[0]
        else:
            data = self.kept[name]
            item.payload[:] = data[PAGE:]
            try:
                done.ok[name] = objects.unseal(memoryview(data)[:PAGE], item.payload, name)
            except CorruptObject:
                done.failed[name] = Reason.CORRUPT
                self.kept.pop(name)

    def write(self, item: Item) -> None:
        assert item.header is not None
        page = memoryview(bytearray(PAGE))
        objects.seal(page, item.header, item.payload)
        self.kept[item.name] = bytes(page) + bytes(item.payload)
