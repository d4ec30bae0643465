"""The Redis tier beside a bare socket that moves the same bytes, and beside redis-py: whole values, a
pipeline that asks the same of the same keys, and a PING, the least that a question costs.

All over TCP on this host. The bare socket is one, because redis is one thread that moves bytes: it takes
no checksum, keeps nothing and speaks no protocol.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import count, cycle
from statistics import median
from typing import Any

from lmtier.config import TierSpec
from lmtier.format.layout import PAGE, Layout, Name
from lmtier.format.objects import Header
from lmtier.testing import opaque_layout, pages, run
from lmtier.tiers.base import Item, Job, Op, Tier
from lmtier.tiers.registry import open_tier
from lmtier_bench import Samples, Scale
from lmtier_bench.copies import faulted_memory, large_layout, paired, seconds
from lmtier_bench.server import (
    LOOKUP_CHUNKS,
    NAMES,
    REPEATS,
    BareSocket,
    free_port,
    module,
    process,
    redis_process,
)

ROOM = 64  # objects that fit into the server, of which the last NAMES are loaded
BATCH = 8  # objects that are in flight together, as those of one prompt are
PATIENCE = 60.0


def store_and_load(scale: Scale) -> Samples:
    if not shutil.which("redis-server"):
        return
    layout = large_layout(scale.large_layers)
    nbytes = layout.nbytes(layout.whole)
    total = BATCH * nbytes
    memory = faulted_memory(scale.memory).data
    with ExitStack() as stack:
        bare = BareSocket(
            stack.enter_context(process(*module("lmtier_bench.peer"), free_port())), memory, nbytes
        )
        limits = ("--maxmemory", str(ROOM * nbytes), "--maxmemory-policy", "volatile-ttl")
        port = str(stack.enter_context(redis_process(scale.directory, *limits)).getpeername()[1])
        tier = open_tier(TierSpec.parse(f"redis://127.0.0.1:{port}?deadline=1m"))
        objects = Objects(stack.enter_context(closing(tier)), memory, layout)
        baselines: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            ("32 MiB objects", bare.send, bare.receive)
        ]
        baseline = stack.enter_context(redis_process(scale.directory))
        if (client := _redis_py(baseline.getpeername()[1])) is not None:
            whole = RedisPyValues(stack.enter_context(closing(client)), memory, nbytes)
            baselines.append(("against redis-py", whole.set, whole.get))
        for what, send, receive in baselines:
            for _ in range(ROOM // BATCH):  # full, and what was there before is gone
                objects.store()
            for _ in range(NAMES):
                send()
            for number in range(scale.rounds):
                yield paired(f"store to redis, {what}", total, number, objects.store, _batch(send))
            for _ in range(NAMES // BATCH):
                objects.store()
            for number in range(scale.rounds):
                yield paired(f"load from redis, {what}", total, number, objects.load, _batch(receive))


def lookups(scale: Scale) -> Samples:
    if not shutil.which("redis-server"):
        return
    shard = opaque_layout(PAGE).whole
    names = [Name(hashlib.sha256(b"%d" % number).digest(), shard) for number in range(LOOKUP_CHUNKS)]
    with ExitStack() as stack:
        port = stack.enter_context(redis_process(scale.directory)).getpeername()[1]
        client = _redis_py(port)
        if client is None:
            return
        stack.enter_context(closing(client))
        url = f"redis://127.0.0.1:{port}?deadline=1m"
        tier = stack.enter_context(closing(open_tier(TierSpec.parse(url))))
        for name in names:
            header = Header(name, opaque_layout(PAGE), PAGE)
            assert run(tier, Job(1, Op.STORE, (Item(name, pages(PAGE), header),)), PATIENCE).ok
        keys = list(client.scan_iter(count=1000))
        question = Job(1, Op.LOOKUP, tuple(map(Item, names)))

        def find() -> None:
            assert len(run(tier, question, PATIENCE).ok) == LOOKUP_CHUNKS

        def pipeline() -> None:
            with client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.getrange(key, 0, 31)
                assert len(pipe.execute()) == LOOKUP_CHUNKS

        for path, limit in (
            ("look up 512 keys in redis, against redis-py", pipeline),
            ("look up 512 keys in redis, against a PING", client.ping),
        ):
            for _ in range(scale.rounds):
                ours, bound = (median(seconds(work) for _ in range(REPEATS)) for work in (find, limit))
                yield path, ours * 1e3, bound * 1e3


class Objects:
    """New names for ever, a batch at a time, between a tier and rotating memory."""

    def __init__(self, tier: Tier, memory: memoryview, layout: Layout) -> None:
        nbytes = layout.nbytes(layout.whole)
        self._tier = tier
        self._layout = layout
        self._nbytes = nbytes
        self._extents = cycle([memory[at : at + nbytes] for at in range(0, len(memory) - nbytes + 1, nbytes)])
        self._numbers = count()
        self._stored: deque[Name] = deque(maxlen=NAMES)

    def store(self) -> float:
        items = []
        for _ in range(BATCH):
            name = Name(hashlib.sha256(b"%d" % next(self._numbers)).digest(), self._layout.whole)
            header = Header(name, self._layout, self._nbytes)
            items.append(Item(name, next(self._extents), header, lives=3600.0))  # so that it may be evicted
            self._stored.append(name)
        return self._run(Op.STORE, items)

    def load(self) -> float:
        """Those of the last NAMES that were not loaded for the longest time; the oldest were evicted."""
        names = [self._stored[i] for i in range(BATCH)]
        self._stored.rotate(-BATCH)
        return self._run(Op.LOAD, [Item(name, next(self._extents)) for name in names])

    def _run(self, op: Op, items: list[Item]) -> float:
        job = Job(1, op, tuple(items))

        def work() -> None:
            done = run(self._tier, job, PATIENCE)
            assert len(done.ok) == BATCH, f"{op}: {done.failed} {done.error}"

        return seconds(work)


class RedisPyValues:
    """Values as redis-py moves them: one call, one value."""

    def __init__(self, client: Any, memory: memoryview, nbytes: int) -> None:
        self._client = client
        self._values = [memory[at : at + nbytes] for at in range(0, len(memory) - nbytes + 1, nbytes)]
        self._set, self._got = count(), count()

    def set(self) -> None:
        number = next(self._set)
        self._client.set(f"value {number % NAMES}", self._values[number % len(self._values)])

    def get(self) -> None:
        assert self._client.get(f"value {next(self._got) % NAMES}") is not None


def _batch(one: Callable[[], object]) -> Callable[[], float]:
    def work() -> None:
        for _ in range(BATCH):
            one()

    return partial(seconds, work)


def _redis_py(port: int) -> Any:
    """A client, None where redis-py is not installed."""
    try:
        import redis
    except ImportError:
        return None
    return redis.Redis(host="127.0.0.1", port=port, socket_timeout=PATIENCE)
