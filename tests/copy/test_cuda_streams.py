"""The order of copies and compute, in random interleavings that only the events between them restrict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.copy.cuda.kernels import Geometry, Launch, Spread, TensorMemory
from lmtier.copy.cuda.streams import DeviceLoad, DeviceStore, Enqueue, StreamPair, TransferOrder
from lmtier.errors import MisuseError
from lmtier.format.layout import Layout
from tests.cuda_device import Race, SimulatedDevice, SimulatedStream, span

L, BLOCKS, EXTENTS = 2, 14, 4
LAYOUT = Layout.uniform(
    layers=L, heads=1, head_dim=16, dtype="bf16", block_tokens=2, chunk_tokens=6, packing="token"
)
SIZE, SPREAD = LAYOUT.blocks, Spread(1)
NBYTES = LAYOUT.nbytes(LAYOUT.whole)


@dataclass
class Extent:
    memory: np.ndarray
    mark: np.ndarray
    """Of each layer, as the kernels leave it."""
    sums: np.ndarray
    holds: np.ndarray | None = None
    """What is to be found in it: [layers, blocks, bytes]."""
    is_ready: bool = False
    users: int = 0


class Engine:
    """An engine that computes, reuses blocks at once, and does nothing about our copies but what it must."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.order, self.random = device, TransferOrder(device), device.random
        self.kv = np.zeros((L, BLOCKS, NBYTES // L // SIZE), np.uint8)
        views = [layer.view(np.uint16).reshape(BLOCKS, 1, 2, 32) for layer in self.kv]
        self.geometry = Geometry(LAYOUT, LAYOUT.whole, [[TensorMemory.of(view)] for view in views])
        self.pieces, self.raws = self.geometry.pieces.copy(), self.geometry.raws.copy()
        self.extents = [
            Extent(np.zeros(NBYTES, np.uint8), np.zeros(L, np.uint64), np.zeros(64, np.uint64))
            for _ in range(EXTENTS)
        ]
        device.keep(self.kv, *(e.memory for e in self.extents), *(e.mark for e in self.extents))
        device.keep(*(e.sums for e in self.extents))
        self.free = list(range(BLOCKS))
        self.failures: list[str] = []
        self.committed = self.loaded = 0

    # ---- the engine

    def take(self) -> list[int]:
        """Blocks for one chunk, in any order. Whoever had them before is not asked."""
        self.random.shuffle(self.free)
        blocks, self.free = self.free[:SIZE], self.free[SIZE:]
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        self.free += blocks

    def write(self, layer: int, blocks: list[int], content: np.ndarray) -> None:
        def run() -> None:
            self.kv[layer, blocks] = content

        writes = [span(self.kv[layer, block]) for block in blocks]
        self.device.compute.enqueue("compute", run, [], writes)

    def attend(self, layer: int, blocks: list[int], content: np.ndarray) -> None:
        def run() -> None:
            if self.kv[layer, blocks].tobytes() != content.tobytes():
                self.failures.append("attention read something else")

        reads = [span(self.kv[layer, block]) for block in blocks]
        self.device.compute.enqueue("attention", run, reads)

    # ---- a step: a chunk is computed and saved, or loaded and used

    def compute_and_save(self, extent: Extent | None, *, layerwise: bool, ends: bool) -> None:
        blocks = self.take()
        self.order.reuse(blocks)
        content = np.random.default_rng(self.random.getrandbits(32)).integers(
            0, 256, (L, SIZE, self.kv.shape[-1]), np.uint8
        )
        store = self.order.store(blocks) if extent is not None else None
        for layer in range(L):
            self.write(layer, blocks, content[layer])
            self.attend(layer, blocks, content[layer])
            if store is not None and extent is not None and layerwise:
                self.save(store, extent, blocks, layer)
        if store is not None and extent is not None:
            if not layerwise:
                self.save(store, extent, blocks, None)
            extent.users += 1
            extent.holds = content
            store.end(self.abort(extent) if ends else self.commit(extent))
        self.give_back(blocks)

    def save(self, store: DeviceStore, extent: Extent, blocks: list[int], layer: int | None) -> None:
        ids = np.array([blocks], np.int32)
        payload = [extent.memory.ctypes.data]
        pieces, raws = self.pieces.ctypes.data, self.raws.ctypes.data

        layers = range(L) if layer is None else range(layer, layer + 1)
        launches = [*self.geometry.copy_launches("gather", layers, pieces, payload, [ids], SPREAD)]
        where = (extent.sums.ctypes.data, extent.sums.nbytes), extent.mark.ctypes.data + 8 * layers.start
        launches += self.geometry.fingerprint_launches(layers, raws, [ids], *where, SPREAD)
        store.part(launching(launches))

    def load(self, extent: Extent, onto: Extent | None, *, layerwise: bool, used: bool) -> None:
        """`onto`: and save what arrives, whether or not the engine ever looks at it."""
        blocks, content = self.take(), extent.holds
        assert content is not None
        load = self.order.load(blocks)
        extent.users += 1
        self.device.host("the plan", reads=[span(extent.memory)])
        payload, ids = [extent.memory.ctypes.data], np.array([blocks], np.int32)
        for layers in [range(layer, layer + 1) for layer in range(L)] if layerwise else [range(L)]:
            at = self.pieces.ctypes.data
            load.part(
                launching(self.geometry.copy_launches("scatter", layers, at, payload, [ids], SPREAD)), layers
            )
        load.end(self.release(extent))
        if onto is not None:
            store = self.order.store(blocks)
            self.save(store, onto, blocks, None)
            onto.users += 1
            onto.holds = content
            store.end(self.commit(onto))
        if used:  # else the request has gone away meanwhile
            if not layerwise:
                load.let_compute()
            for layer in range(L):
                if layerwise:
                    load.let_compute(layer)
                self.attend(layer, blocks, content[layer])
        self.give_back(blocks)

    # ---- the host's side, when the device is done with an extent

    def commit(self, extent: Extent) -> Callable[[], None]:
        def then() -> None:
            self.device.host("commit", reads=[span(extent.memory), span(extent.mark)])
            assert extent.holds is not None
            if extent.memory.tobytes() != extent.holds.tobytes():
                self.failures.append("an extent holds something else than was computed")
            marks = [xxhash.xxh3_64_intdigest(layer.tobytes()) for layer in extent.holds]
            if extent.mark.tolist() != marks:
                self.failures.append("a mark is of something else")
            extent.users -= 1
            extent.is_ready = True
            self.committed += 1

        return then

    def abort(self, extent: Extent) -> Callable[[], None]:
        def then() -> None:
            extent.users -= 1
            self.fill_from_disk(extent)

        return then

    def release(self, extent: Extent) -> Callable[[], None]:
        def then() -> None:
            extent.users -= 1
            self.loaded += 1

        return then

    def fill_from_disk(self, extent: Extent) -> None:
        """The extent is another's now: the host writes it."""
        rng = np.random.default_rng(self.random.getrandbits(32))
        extent.holds = rng.integers(0, 256, (L, SIZE, self.kv.shape[-1]), np.uint8)
        extent.memory[:] = extent.holds.reshape(-1)
        extent.is_ready = True
        self.device.host("disk", writes=[span(extent.memory)])

    def evict(self, extent: Extent) -> None:
        extent.is_ready, extent.holds = False, None

    def live(self, steps: int) -> None:
        """Anything that may happen, in any order."""
        for _ in range(steps):
            chance = self.random.random
            empty = [e for e in self.extents if not e.is_ready and not e.users]
            ready = [e for e in self.extents if e.is_ready]
            idle = [e for e in ready if not e.users]
            layerwise = chance() < 0.5
            match self.random.choice(["compute", "save", "save", "load", "load", "evict", "disk", "poll"]):
                case "compute":
                    self.compute_and_save(None, layerwise=layerwise, ends=False)
                case "save" if empty:
                    self.compute_and_save(empty[0], layerwise=layerwise, ends=chance() < 0.2)
                case "load" if ready:
                    onto = empty[0] if empty and chance() < 0.3 else None
                    self.load(self.random.choice(ready), onto, layerwise=layerwise, used=chance() < 0.8)
                case "evict" if idle:
                    self.evict(idle[0])
                case "disk" if idle:
                    self.fill_from_disk(idle[0])
                case "poll":
                    self.order.poll()
        self.order.drain()
        self.device.check()
        assert not self.failures
        assert not self.order.under_way


def launching(launches: Iterable[Launch]) -> Enqueue:
    def enqueue(lane: StreamPair) -> None:
        for launch in launches:
            lane.kernels.launch(launch)

    return enqueue


def lived(seed: int, steps: int = 40, **faults) -> Engine:
    engine = Engine(SimulatedDevice(seed, **faults))
    engine.live(steps)
    return engine


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_interleaving_is_right_and_without_a_race(seed):
    lived(seed)


def test_the_interleavings_meet_every_kind_of_edge():
    """The interleavings save and load as well."""
    engines = [lived(seed) for seed in range(12)]
    assert sum(engine.committed for engine in engines) > 12
    assert sum(engine.loaded for engine in engines) > 12
    assert set().union(*(engine.device.edges for engine in engines)) >= set(EDGES)


EDGES = [
    "store waits for compute",
    "load waits for compute",
    "load waits for store",
    "store waits for load",
    "compute waits for load",
    "compute waits for store",
]


class Ignored(list[str]):
    """Wrong bytes, which a race need not cause: what is asked is whether the race itself is found."""

    def append(self, _: str) -> None:
        pass


def live_until_a_race(**faults: Any) -> None:
    for seed in range(40):
        engine = Engine(SimulatedDevice(seed, **faults))
        engine.failures = Ignored()
        engine.live(40)


@pytest.mark.parametrize("edge", EDGES)
def test_a_missing_edge_is_a_race(edge):
    with pytest.raises(Race):
        live_until_a_race(without=edge)


def test_to_believe_an_event_before_it_has_come_is_a_race():
    with pytest.raises(Race):
        live_until_a_race(is_impatient=True)


@pytest.mark.parametrize(
    ("owner", "forgotten"), [(TransferOrder, "reuse"), (TransferOrder, "_delay"), (DeviceLoad, "let_compute")]
)
def test_a_call_that_is_left_out_is_a_race(monkeypatch, owner, forgotten):
    monkeypatch.setattr(owner, forgotten, lambda *_, **__: None)
    with pytest.raises(Race):
        live_until_a_race()


# ---- the order of what follows


class Streams:
    """Streams whose events come when the test says so."""

    def __init__(self) -> None:
        self.device = SimulatedDevice()
        self.device.progress = lambda: None  # type: ignore[method-assign]
        self.compute, self.store, self.load = self.device.compute, self.device.store, self.device.load

    def run_all(self) -> None:
        while any(each.is_ready for each in self.device.streams):
            self.device.one_deed()


def nothing(lane: StreamPair) -> None:
    for stream in (lane.kernels, lane.copies):
        assert isinstance(stream, SimulatedStream)
        stream.enqueue("work", None)


def test_nothing_follows_a_transfer_before_its_event():
    streams, ended = Streams(), []
    order = TransferOrder(streams)
    store = order.store([1])
    store.part(nothing)
    store.end(lambda: ended.append("store"))
    assert order.poll() == 0
    assert not store.done
    assert not ended
    streams.run_all()
    assert order.poll() == 1
    assert ended == ["store"]
    assert order.poll() == order.under_way == 0


def test_the_time_of_a_load_excludes_earlier_computing():
    streams = Streams()
    order = TransferOrder(streams)

    def copy(lane: StreamPair) -> None:
        assert isinstance(lane.copies, SimulatedStream)
        lane.copies.enqueue("copy", lambda: time.sleep(0.05))

    streams.compute.enqueue("compute", lambda: time.sleep(0.5))
    load = order.load([1])
    load.part(copy)
    load.end(lambda: None)
    time.sleep(0.5)
    streams.run_all()
    assert order.poll() == 1
    assert 0.05 <= load.seconds < 0.5


def test_a_transfer_that_was_not_ended_waits_for_its_end():
    streams = Streams()
    order = TransferOrder(streams)
    store = order.store([1])
    store.part(nothing)
    streams.run_all()
    assert order.poll() == 0
    order.drain()
    assert order.under_way == 1


def test_a_store_that_used_a_load_never_ends_before_it():
    """Also when both events come while they are being looked at."""
    streams, ended = Streams(), []
    order = TransferOrder(streams)
    load, store = order.load([1]), order.store([2])
    load.part(nothing, [0])
    load.end(lambda: ended.append("load"))
    load.let_compute(0)
    store.part(nothing)
    store.end(lambda: ended.append("store"))
    looks = []

    def progress() -> None:  # everything comes between the first look and the second
        looks.append(1)
        if len(looks) == 2:
            streams.run_all()

    streams.device.progress = progress  # type: ignore[method-assign]
    while order.under_way:
        order.poll()
    assert ended == ["load", "store"]


def test_the_rest_is_finished_in_a_later_poll_if_one_raises():
    streams, ended = Streams(), []
    order = TransferOrder(streams)

    def fail() -> None:
        raise OSError("the server is gone")

    for then in (fail, lambda: ended.append(1)):
        order.store([1]).end(then)
    streams.run_all()
    with pytest.raises(OSError, match="gone"):
        order.poll()
    order.poll()
    assert ended == [1]


def test_blocks_of_an_open_transfer_cannot_be_reused():
    order = TransferOrder(Streams())
    store = order.store([1, 2])
    order.store([2, 3])  # both only read
    order.reuse([4])
    for again in (order.reuse, order.load):
        with pytest.raises(MisuseError, match="not ended"):
            again([2])
    store.end(lambda: None)
    with pytest.raises(MisuseError, match="was ended"):
        store.part(nothing)
    with pytest.raises(MisuseError, match="was ended"):
        store.end(lambda: None)


def test_a_writer_without_a_stream_gets_blocks_at_rest():
    order = TransferOrder(Streams())
    first, second = order.store([1]), order.store([2])
    for each in (first, second):
        each.part(nothing)
        each.end(lambda: None)
    order.let_go([3])
    assert not first.done
    order.let_go([1])
    assert first.done
    assert not second.done
    order.drain()


def test_transfers_of_different_blocks_do_not_wait():
    streams = Streams()
    order = TransferOrder(streams)
    store = order.store([1])
    store.part(nothing)
    store.end(lambda: None)
    streams.device.edges.clear()
    order.load([2]).end(lambda: None)
    order.reuse([3])
    assert {edge for edge in streams.device.edges if "store" in edge or "compute waits" in edge} == set()
