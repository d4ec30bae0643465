"""Saves and loads that go on after their calls have returned: a real cache, a simulated GPU, any delays."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmtier.client.client import Client
from lmtier.config import Config
from lmtier.copy.cuda import paging
from lmtier.copy.cuda.mover import CudaLoad, CudaMover, CudaSave
from lmtier.copy.cuda.paging import CudaKV
from lmtier.copy.gpu_copies import GpuCopies
from lmtier.copy.mover import Mover
from lmtier.copy.paging import PagedKV
from lmtier.copy.store import Store
from lmtier.core.cache import Cache
from lmtier.errors import CanaryError, DeviceError, LayoutError, MisuseError
from lmtier.format.keys import Identity
from lmtier.format.layout import LayerShape, Layout, Shard
from tests.client.test_client import serve  # noqa: F401  # the fixture
from tests.cuda_device import Race, SimulatedDevice, SimulatedStream, span

C, N, L, H, D = 8, 4, 3, 2, 8
BLOCKS, SPARES = 40, 6
IDENTITY = Identity(model="tiny", weights="w1")
LAYOUT = Layout.uniform(
    layers=L, heads=H, head_dim=D, dtype="bf16", block_tokens=N, chunk_tokens=C, packing="token"
)
PLANES = Layout.uniform(
    layers=L, heads=H, head_dim=D, dtype="bf16", block_tokens=N, chunk_tokens=C, packing="planes"
)
OPAQUE = Layout((LayerShape(H, LAYOUT.head_block_bytes(0), 0),) * L, "bf16", N, C, "unknown")
"""The same blocks, of whose inner order only the heads are known."""


@pytest.fixture
def cache() -> Iterator[Cache]:
    with small_cache() as cache:
        yield cache
        cache.check()
        assert cache.index.leased_bytes == 0


@pytest.fixture
def near_cache() -> Iterator[Cache]:
    """Whose engines have a GPU tier each, of as much."""
    with small_cache(gpu="1MiB") as cache:
        yield cache
        cache.check()
        assert cache.index.leased_bytes == 0


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Each of these few layers is a group of its own."""
    monkeypatch.setattr(paging, "GROUP_BYTES", 1)


def small_cache(capacity: str = "1MiB", gpu: str = "") -> Cache:
    tiers = [*([f"gpu://?capacity={gpu}&policy=lru"] if gpu else []), f"cpu://?capacity={capacity}"]
    return Cache(Config(tiers=tiers, chunk_tokens=C, verify="always", prefault=False))


class Engine:
    """Random KV on a simulated GPU. Blocks are given back at once, and what they hold is known."""

    def __init__(
        self,
        cache: Store,
        device: SimulatedDevice | None = None,
        *,
        seed: int = 0,
        layout: Layout = LAYOUT,
        **options: Any,
    ) -> None:
        self.cache, self.device = cache, device or SimulatedDevice(seed)
        self.random = random.Random(seed)
        self.layers = [torch.zeros(BLOCKS, H, N, 2 * D, dtype=torch.bfloat16) for _ in range(L)]
        self.bits = [layer.view(torch.int16).numpy() for layer in self.layers]
        self.device.keep(*self.bits)
        names = ("staging_bytes", "shortest_run", "tables")
        way = {name: options.pop(name) for name in names if name in options}
        self.kv = CudaKV(layout, layout.whole, self.layers, self.device, **way)
        options.setdefault("spare_blocks", range(BLOCKS - SPARES, BLOCKS))
        self.mover = CudaMover(cache, self.kv, IDENTITY, **options)
        self.free = list(range(BLOCKS - SPARES))
        self.failures: list[str] = []

    def take(self, tokens: int) -> list[int]:
        self.random.shuffle(self.free)
        return [self.free.pop() for _ in range(-(-tokens // N))]

    def compute(self, blocks: Sequence[int], layer: int, content: np.ndarray) -> None:
        def run() -> None:
            self.bits[layer][blocks] = content

        writes = [span(self.bits[layer][block]) for block in blocks]
        self.device.compute.enqueue("compute", run, [], writes)

    def attend(self, blocks: Sequence[int], layer: int, content: np.ndarray) -> None:
        def run() -> None:
            if self.bits[layer][blocks].tobytes() != content.tobytes():
                self.failures.append(f"layer {layer} is not what was computed")

        reads = [span(self.bits[layer][block]) for block in blocks]
        self.device.compute.enqueue("attention", run, reads)

    def content_of(self, tokens: Sequence[int], layer: int) -> np.ndarray:
        """What the model makes of a prompt: of each block, by all tokens up to it."""
        return np.stack(
            [
                np.random.default_rng([layer, *tokens[: (block + 1) * N]]).integers(
                    -(2**15), 2**15, (H, N, 2 * D), np.int16
                )
                for block in range(len(tokens) // N)
            ]
        )

    # ---- requests

    def prefill(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        layerwise: bool = True,
        commits: bool = True,
    ) -> CudaSave:
        """Compute all of a prompt and save it; `blocks` are free for others when this returns."""
        self.mover.order_before_reuse(blocks)
        save = self.mover.save(self.mover.chain(tokens), blocks)
        assert isinstance(save, CudaSave)
        try:
            for layer in range(L):
                self.compute(blocks, layer, self.content_of(tokens, layer))
                if layerwise:
                    save.layer(layer)
            if not layerwise:
                save.all()
        except DeviceError:
            save.abort()
            raise
        if commits:
            save.commit()
        else:
            save.abort()
        return save

    def resume(self, tokens: Sequence[int], blocks: Sequence[int], *, layerwise: bool = True) -> CudaLoad:
        """Load what there is of a prompt, and attend to it layer by layer."""
        match = self.mover.match(self.mover.chain([*tokens, 0]))
        with self.mover.load(match, blocks) as load:
            there = load.tokens // N
            for layer in range(L):
                if layerwise:
                    load.layer(layer)
                else:
                    load.all()
                if there:
                    self.attend(blocks[:there], layer, self.content_of(tokens, layer)[:there])
        return load

    def settle(self) -> None:
        self.mover.drain()
        self.device.check()
        assert not self.failures
        if self.mover.gpu_copies is not None:
            self.mover.gpu_copies.check()
            assert self.mover.gpu_copies.index.leased_bytes == 0

    @property
    def gpu_copies(self) -> GpuCopies:
        assert self.mover.gpu_copies is not None
        return self.mover.gpu_copies

    def over_the_bus(self) -> int:
        """Bytes so far between GPU memory and the slab."""
        assert isinstance(self.cache, Cache)
        low, high = span(np.frombuffer(self.cache.slab.view(0, self.cache.slab.capacity), np.uint8))
        copies = [deed for deed in self.device.history if deed.what == "copy"]
        return sum(end - at for deed in copies for at, end in [*deed.reads, *deed.writes] if low <= at < high)

    def where(self, tokens: Sequence[int], chunk: int) -> int:
        """The address of a chunk's copy."""
        copy = self.gpu_copies.index.get(self.mover.chain(tokens).keys[chunk])
        assert copy is not None
        return self.kv._slots_address + copy.offsets[0]


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("shortest_run", [0, 1 << 40])
def test_what_one_engine_saved_another_loads(cache, layerwise, shortest_run):
    one, other = (Engine(cache, seed=seed, layerwise=layerwise, shortest_run=shortest_run) for seed in (1, 2))
    tokens = list(range(32))
    one.prefill(tokens, one.take(32), layerwise=layerwise)
    one.settle()
    load = other.resume(tokens, other.take(32), layerwise=layerwise)
    other.settle()
    assert load.done
    assert load.tokens == 32
    assert cache.metrics.value("lmtier_verified_total") == 4
    assert cache.metrics.value("lmtier_verify_failures_total") == 0


def test_a_cpu_engine_loads_what_a_gpu_saved(cache):
    """It finds the same fingerprints."""
    gpu = Engine(cache)
    tokens = list(range(16))
    gpu.prefill(tokens, gpu.take(16))
    gpu.settle()
    layers = [torch.zeros(BLOCKS, H, N, 2 * D, dtype=torch.bfloat16) for _ in range(L)]
    kv = PagedKV(LAYOUT, LAYOUT.whole, layers)
    mover = Mover(cache, kv, IDENTITY, spare_blocks=range(BLOCKS - SPARES, BLOCKS))
    with mover.load(mover.match(mover.chain([*tokens, 0])), [3, 1, 4, 5]) as load:
        load.all()
        assert load.finish() == 16
    assert cache.metrics.value("lmtier_verified_total") == 2
    for layer in range(L):
        assert (
            layers[layer][[3, 1, 4, 5]].view(torch.int16).numpy().tobytes()
            == gpu.content_of(tokens, layer).tobytes()
        )


def test_a_gpu_mover_works_with_a_server_as_with_a_cache(serve):  # noqa: F811
    server = serve(chunk_tokens=C)
    with Client(server.path) as ones, Client(server.path) as others:
        one, other = Engine(ones, seed=1), Engine(others, seed=2)
        tokens = list(range(32))
        one.prefill(tokens, one.take(32))
        one.settle()
        load = other.resume(tokens, other.take(32))
        other.settle()
        assert load.tokens == 32
        assert (others._server.compared, others._server.differing) == (4, 0)
        server.kill()
        assert other.prefill([9] * 8, [0, 1]).tokens == 0
        other.settle()


def seen(cache: Cache, device: SimulatedDevice) -> None:
    """Let the device know what a cache does with extents: it reads those of commits, and reuses the freed."""
    commit, free = cache.commit, cache.slab.free

    def noted_commit(reservation, shard=None, marks=None):
        for _, offsets in reservation.places:
            device.host("commit", reads=[span(view(offsets[0]))])
        commit(reservation, shard, marks)

    def noted_free(offsets):
        listed = list(offsets)
        device.host("free", writes=[span(view(offset)) for offset in listed])
        free(listed)

    def view(offset: int) -> np.ndarray:
        return np.frombuffer(cache.slab.view(offset, LAYOUT.nbytes(LAYOUT.whole)), np.uint8)

    cache.commit = noted_commit  # type: ignore[method-assign]
    cache.slab.free = noted_free  # type: ignore[method-assign]


def refusing(device: SimulatedDevice, share: float) -> list[str]:
    """From now on the driver refuses this share of its calls. Returns what it has refused."""
    refused: list[str] = []

    def wrap(stream: SimulatedStream, name: str) -> None:
        call = getattr(stream, name)

        def refuse_or_call(*arguments: Any) -> None:
            if device.random.random() < share:
                refused.append(f"{name} on {stream.name}")
                raise DeviceError(f"{name}: not now (999)")
            call(*arguments)

        setattr(stream, name, refuse_or_call)

    for stream in device.streams[1:]:
        for name in ("launch", "copy", "copy_rows"):
            wrap(stream, name)
    return refused


def live(seed: int, *, gpu: str | None = None, refuses: float = 0.0, **faults: Any) -> Engine:
    """Prompts that share beginnings come and go, through a cache that holds few of them, copies of fewer."""
    chance = random.Random(seed)
    few = chance.choice(["", "8KiB", "32KiB"]) if gpu is None else gpu
    with small_cache("32KiB", few) as cache:
        device = SimulatedDevice(seed)
        seen(cache, device)
        engine = Engine(
            cache,
            device,
            seed=seed,
            layerwise=chance.random() < 0.5,
            shortest_run=chance.choice([0, 1 << 40]),
            staging_bytes=chance.choice([1, 1 << 16]),
        )
        device.without = faults.get("without", "")
        device.is_impatient = faults.get("is_impatient", False)
        if faults:
            engine.failures = Ignored()
        refused = refusing(device, refuses) if refuses else []
        for _ in range(14):
            tokens = [*range(8 * chance.randint(0, 2)), *([chance.randint(0, 2)] * 8 * chance.randint(1, 2))]
            blocks = engine.take(len(tokens))
            what = chance.random()
            before = len(refused)
            try:
                if what < 0.45:
                    engine.prefill(tokens, blocks, layerwise=chance.random() < 0.5, commits=what < 0.4)
                elif what < 0.9:
                    engine.resume(tokens, blocks, layerwise=chance.random() < 0.5)
                else:
                    engine.mover.poll()
            except DeviceError:
                assert len(refused) > before
            engine.free += blocks  # at once: whoever takes them next has to wait, on the device
            if chance.random() < 0.3:
                engine.mover.poll()
        engine.settle()
        cache.check()
        assert cache.index.leased_bytes == 0
        return engine


def live_until_a_race(**faults: Any) -> None:
    for seed in range(30):
        live(seed, **faults)


@pytest.mark.parametrize("seed", range(12))
def test_a_refused_driver_call_costs_a_transfer_and_no_byte(seed):
    """Any call, also the last of many. What was enqueued before it still runs, and nothing may reuse its
    memory before."""
    live(seed, refuses=0.15)


class Ignored(list[str]):
    def append(self, _: str) -> None:
        pass


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 32))
def test_every_interleaving_is_right_and_without_a_race(seed):
    live(seed)


@pytest.mark.parametrize(
    "edge",
    [
        "store waits for compute",
        "load waits for compute",
        "load waits for store",
        "compute waits for load",
        "compute waits for store",
        "store copies waits for store kernels",
        "store kernels waits for store copies",
        "load kernels waits for load copies",
        "load copies waits for load kernels",
    ],
)
def test_a_missing_edge_is_a_race(edge):
    with pytest.raises(Race):
        live_until_a_race(without=edge)


def test_a_commit_before_the_device_is_done_is_a_race():
    with pytest.raises(Race):
        live_until_a_race(is_impatient=True)


def test_a_missing_edge_to_the_place_of_a_copy_is_a_race():
    """Everything that is loaded has a place here, so that it is staged in no other memory of ours."""
    with pytest.raises(Race):
        live_until_a_race(gpu="32KiB", without="load kernels waits for load copies")


def test_slots_freed_before_the_device_is_done_are_a_race(monkeypatch):
    begin = CudaLoad.__init__

    def hurried(self, mover, *arguments):
        begin(self, mover, *arguments)
        places, self._places = self._places, None
        mover.give_back(places, believed=True)

    def never_used(self, tokens, blocks, **_):
        """Else whatever comes later waits for what the engine computes with it."""
        with self.mover.load(self.mover.match(self.mover.chain([*tokens, 0])), blocks) as load:
            return load

    monkeypatch.setattr(CudaLoad, "__init__", hurried)
    monkeypatch.setattr(Engine, "resume", never_used)
    with pytest.raises(Race):
        live_until_a_race(gpu="8KiB", without="nothing")


def stopped(engine: Engine) -> None:
    """From now on the device does nothing of its own accord."""
    engine.device.progress = lambda: None  # type: ignore[method-assign]


def found(engine: Engine, tokens: Sequence[int]) -> int:
    match = engine.mover.match(engine.mover.chain([*tokens, 0]))
    engine.cache.release(match)
    return match.chunks


def test_nothing_is_visible_before_the_device_is_done(cache):
    engine = Engine(cache)
    stopped(engine)
    engine.prefill(range(16), engine.take(16))
    assert engine.mover.poll() == 0
    assert found(engine, range(16)) == 0
    engine.mover.drain()
    assert found(engine, range(16)) == 2


def test_an_aborted_save_keeps_extents_until_writes_end(cache):
    engine = Engine(cache)
    stopped(engine)
    engine.prefill(range(16), engine.take(16), commits=False)
    held = cache.slab.used
    assert held > 0
    engine.mover.poll()
    assert cache.slab.used == held
    engine.mover.drain()
    assert cache.slab.used == 0


def test_leases_of_a_load_end_when_the_device_has_read(cache):
    engine = Engine(cache)
    engine.prefill(range(16), engine.take(16))
    engine.settle()
    stopped(engine)
    load = engine.resume(range(16), engine.take(16))
    assert not load.done
    engine.mover.poll()
    assert cache.index.leased_bytes == 2 * 4096
    with pytest.raises(MisuseError, match="unfinished"):
        load.finish()
    engine.mover.drain()
    assert cache.index.leased_bytes == 0
    assert load.tokens == 16


def test_a_load_that_was_seen_done_needs_no_edge(cache):
    """What engines do that keep a request waiting while its KV comes."""
    for seed in range(20):
        engine = Engine(cache, seed=seed, layerwise=False)
        engine.prefill(range(16), engine.take(16))
        engine.settle()
        blocks = engine.take(16)
        with engine.mover.load(engine.mover.match(engine.mover.chain(range(17))), blocks) as load:
            pass
        while not load.done:
            engine.mover.poll()
        for layer in range(L):
            engine.attend(blocks, layer, engine.content_of(range(16), layer))
        engine.settle()


def test_outside_a_with_block_the_caller_ends_a_load(cache):
    engine = Engine(cache)
    engine.prefill(range(16), engine.take(16))
    engine.settle()
    match = engine.mover.match(engine.mover.chain(range(17)))
    load = CudaLoad(engine.mover, match.grant, engine.take(16), 0)
    engine.mover.drain()
    assert load.done
    assert not match.released
    assert load.finish() == 16
    cache.release(match)


def test_an_engines_error_aborts_once_the_device_is_done(cache):
    engine = Engine(cache)
    stopped(engine)
    blocks = engine.take(16)

    def step() -> None:
        with engine.mover.save(engine.mover.chain(range(16)), blocks) as save:
            save.layer(0)
            raise KeyError

    with pytest.raises(KeyError):
        step()
    engine.mover.drain()
    assert found(engine, range(16)) == 0
    assert cache.slab.used == 0


def test_a_commit_that_lacks_a_layer_is_refused_and_aborted(cache):
    engine = Engine(cache)

    def step() -> None:
        with engine.mover.save(engine.mover.chain(range(8)), engine.take(8)) as save:
            save.layer(0)

    with pytest.raises(MisuseError, match=r"lacks layers \[1, 2\]"):
        step()
    engine.mover.drain()
    assert cache.slab.used == 0


def test_a_chunk_damaged_in_the_slab_is_found_and_deleted(cache):
    engine = Engine(cache)
    engine.prefill(range(24), engine.take(24))
    engine.settle()
    victim = cache.index.get(engine.mover.chain(range(24)).keys[1])
    assert victim is not None
    cache.slab.view(victim.offsets[0], 64)[7] ^= 1
    engine.attend = lambda *_: None  # type: ignore[method-assign]
    load = engine.resume(range(24), engine.take(24))
    engine.settle()
    assert load.tokens == 8
    assert cache.metrics.value("lmtier_verify_failures_total") == 1
    assert found(engine, range(24)) == 1


def test_a_chunk_of_another_packing_is_converted_on_its_way(cache):
    layers = [torch.randn(BLOCKS, H, N, 2 * D).bfloat16() for _ in range(L)]
    views = [(layer[..., :D], layer[..., D:]) for layer in layers]
    kv = PagedKV(PLANES, PLANES.whole, views)
    mover = Mover(cache, kv, IDENTITY, spare_blocks=range(BLOCKS - SPARES, BLOCKS))
    with mover.save(mover.chain(range(16)), [7, 5, 3, 1]) as save:
        save.all()
    engine = Engine(cache)
    match = engine.mover.match(engine.mover.chain(range(17)))
    blocks = engine.take(16)
    with engine.mover.load(match, blocks, computed_tokens=4) as load:
        load.all()
    engine.settle()
    assert load.tokens == 16
    for layer, bits in zip(layers, engine.bits, strict=True):
        assert bits[blocks[1:]].tobytes() == layer[[5, 3, 1]].view(torch.int16).numpy().tobytes()
        assert not bits[blocks[0]].any()


@pytest.mark.parametrize("layout", [LAYOUT, OPAQUE], ids=lambda layout: layout.packing)
def test_shards_of_other_ranks_are_put_together(cache, layout):
    ranks = (Shard(0, L, 0, 1), Shard(0, L, 1, 2))
    layers = [torch.randn(BLOCKS, H, N, 2 * D).bfloat16() for _ in range(L)]
    movers = [
        Mover(
            cache,
            PagedKV(layout, shard, [layer[:, shard.first_head : shard.end_head] for layer in layers]),
            IDENTITY,
            ranks=ranks,
            spare_blocks=range(BLOCKS - SPARES, BLOCKS),
        )
        for shard in ranks
    ]
    chain = movers[0].chain(range(16))
    reservation = cache.reserve(chain.keys, movers[0].form)
    for mover in movers:
        with mover.save(chain, [7, 5, 3, 1], grant=reservation) as save:
            save.all()
    engine = Engine(cache, layout=layout)
    blocks = engine.take(16)
    with engine.mover.load(engine.mover.match(engine.mover.chain(range(17))), blocks) as load:
        load.all()
    engine.settle()
    assert load.tokens == 16
    for layer, bits in zip(layers, engine.bits, strict=True):
        assert bits[blocks].tobytes() == layer[[7, 5, 3, 1]].view(torch.int16).numpy().tobytes()


def test_the_canary_finds_a_device_kernel_that_misreads(cache):
    engine = Engine(cache)
    engine.kv.geometry.pieces["at"][1] += 32
    engine.kv._piece_table = engine.device.upload(engine.kv.geometry.pieces)
    with pytest.raises(CanaryError, match="does not return the engine's bytes"):
        engine.mover.prove(range(BLOCKS - SPARES, BLOCKS))
    with pytest.raises(MisuseError, match="canary"):
        engine.mover.save(engine.mover.chain(range(8)), engine.take(8))


def test_a_load_that_cannot_begin_leaves_no_lease(cache):
    engine = Engine(cache)
    engine.prefill(range(16), engine.take(16))
    engine.settle()
    match = engine.mover.match(engine.mover.chain(range(17)))
    with pytest.raises(LayoutError):
        engine.mover.load(match, [0, 1, 2])
    assert cache.index.leased_bytes == 0


# ---- copies in GPU memory


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("shortest_run", [0, 1 << 40])
def test_what_came_over_the_bus_once_does_not_come_again(near_cache, layerwise, shortest_run):
    one, other = (
        Engine(near_cache, seed=seed, layerwise=layerwise, shortest_run=shortest_run) for seed in (1, 2)
    )
    tokens, nbytes = list(range(32)), 4 * LAYOUT.nbytes(LAYOUT.whole)
    one.prefill(tokens, one.take(32), layerwise=layerwise)
    one.settle()
    assert one.over_the_bus() == nbytes
    for _ in range(2):
        blocks = other.take(32)
        assert other.resume(tokens, blocks, layerwise=layerwise).tokens == 32
        other.free += blocks
        other.settle()
        assert other.over_the_bus() == nbytes
    assert near_cache.metrics.value("lmtier_verified_total") == 8
    assert near_cache.metrics.value("lmtier_verify_failures_total") == 0


def test_a_chunk_loaded_in_part_has_a_full_gpu_copy(near_cache):
    one, other = Engine(near_cache, seed=1), Engine(near_cache, seed=2)
    one.prefill(range(16), one.take(16))
    one.settle()
    for computed in (4, 0):
        blocks = other.take(16)
        match = other.mover.match(other.mover.chain(range(17)))
        with other.mover.load(match, blocks, computed_tokens=computed) as load:
            load.all()
        other.settle()
        for layer in range(L):
            there = computed // N
            wanted = other.content_of(range(16), layer)
            assert other.bits[layer][blocks[there:]].tobytes() == wanted[there:].tobytes()
    assert other.over_the_bus() == 2 * LAYOUT.nbytes(LAYOUT.whole)


def test_a_copy_that_is_damaged_is_found_and_forgotten(near_cache):
    engine = Engine(near_cache)
    tokens = list(range(24))
    engine.prefill(tokens, engine.take(24))
    engine.settle()
    engine.resume(tokens, engine.take(24))
    engine.settle()
    ctypes.memset(engine.where(tokens, 1), 7, 64)
    attend, engine.attend = engine.attend, lambda *_: None  # type: ignore[method-assign]
    blocks = engine.take(24)
    assert not engine.resume(tokens, blocks).done
    engine.settle()
    assert near_cache.metrics.value("lmtier_verify_failures_total") == 1
    assert found(engine, tokens) == 1
    assert len(engine.gpu_copies.index) == 0
    engine.attend = attend  # type: ignore[method-assign]
    engine.prefill(tokens, blocks)
    engine.settle()
    for _ in range(2):
        assert engine.resume(tokens, blocks).tokens == 24
        engine.settle()
    assert near_cache.metrics.value("lmtier_verify_failures_total") == 1


def test_a_gpu_copy_is_not_read_before_it_is_written(near_cache):
    one, other = Engine(near_cache, seed=1), Engine(near_cache, seed=2)
    one.prefill(range(8), one.take(8))
    one.settle()
    stopped(other)
    nbytes = LAYOUT.nbytes(LAYOUT.whole)
    for _ in range(2):
        other.resume(range(8), other.take(8))
    assert other.over_the_bus() == 2 * nbytes, "the second goes its usual way"
    other.settle()
    other.resume(range(8), other.take(8))
    other.settle()
    assert other.over_the_bus() == 2 * nbytes


def test_a_save_takes_no_room_of_what_is_loaded(near_cache):
    engine = Engine(near_cache)
    engine.prefill(range(16), engine.take(16))
    engine.settle()
    assert len(engine.gpu_copies.index) == 0


def test_a_copy_of_another_packing_is_converted_once(near_cache, monkeypatch):
    layers = [torch.randn(BLOCKS, H, N, 2 * D).bfloat16() for _ in range(L)]
    views = [(layer[..., :D], layer[..., D:]) for layer in layers]
    kv = PagedKV(PLANES, PLANES.whole, views)
    mover = Mover(near_cache, kv, IDENTITY, spare_blocks=range(BLOCKS - SPARES, BLOCKS))
    with mover.save(mover.chain(range(16)), [7, 5, 3, 1]) as save:
        save.all()
    engine = Engine(near_cache)
    for _ in range(2):
        blocks = engine.take(16)
        match = engine.mover.match(engine.mover.chain(range(17)))
        with engine.mover.load(match, blocks) as load:
            load.all()
        for _, offsets in match.grant.places:
            near_cache.slab.view(offsets[0], 64)[:] = bytes(64)  # no longer read
        monkeypatch.setattr(PagedKV, "convert", None)
        engine.settle()
        assert load.tokens == 16
        for layer, bits in zip(layers, engine.bits, strict=True):
            assert bits[blocks].tobytes() == layer[[7, 5, 3, 1]].view(torch.int16).numpy().tobytes()


def test_places_may_be_decided_elsewhere(cache):
    """By the scheduler of an engine with several ranks."""
    gpu_copies, engine = GpuCopies(3 * 4096), Engine(cache)
    engine.kv.allocate_slots(3 * 4096)
    mover, tokens = engine.mover, list(range(32))
    chain, blocks = mover.chain(tokens), engine.take(32)
    for layer in range(L):
        engine.compute(blocks, layer, engine.content_of(tokens, layer))
    reservation = cache.reserve(chain.keys, mover.form)
    with mover.fill(reservation, mover.blocks_of(blocks, 0, 4)) as save:
        save.all()
    mover.drain()
    for computed, copied in ((0, 0), (0, 3), (8, 2)):
        match = mover.match(mover.chain([*tokens, 0]))
        places = gpu_copies.load(match.grant.placement, mover.form, computed // C)
        assert [place is None for place in places.by_chunk] == [False] * (3 - computed // C) + [True]
        assert places.filled == copied
        others = engine.take(32)
        with mover.load(match, others, computed_tokens=computed, gpu_slots=places.by_chunk) as load:
            load.all()
        engine.settle()
        gpu_copies.release(places, is_verified=load.tokens == 32)
        for layer in range(L):
            there = computed // N
            wanted = engine.content_of(tokens, layer)[there:]
            assert engine.bits[layer][others[there:]].tobytes() == wanted.tobytes()
        engine.free += others
    gpu_copies.check()


@pytest.mark.parametrize("wrong", [[None], [(1 << 20, True), None]])
def test_a_load_with_wrong_slots_keeps_no_lease(near_cache, wrong):
    engine = Engine(near_cache)
    engine.prefill(range(16), engine.take(16))
    engine.settle()
    match = engine.mover.match(engine.mover.chain(range(17)))
    with pytest.raises(MisuseError, match="place"):
        engine.mover.load(match, engine.take(16), gpu_slots=wrong)
    assert near_cache.index.leased_bytes == 0


def test_a_load_that_the_device_refuses_gives_slots_back(near_cache, monkeypatch):
    engine = Engine(near_cache)
    engine.prefill(range(16), engine.take(16))
    engine.settle()

    def refused(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(engine.kv, "enqueue_copies", refused)
    with pytest.raises(OSError, match="no"):
        engine.mover.load(engine.mover.match(engine.mover.chain(range(17))), engine.take(16))
    monkeypatch.undo()
    assert near_cache.index.leased_bytes == 0
    engine.settle()


@pytest.mark.parametrize("refused", ["enqueue_copies", "enqueue_fingerprints"])
def test_a_refused_load_gives_its_fingerprint_room_back(cache, monkeypatch, refused):
    engine = Engine(cache)
    engine.prefill(range(16), engine.take(16))
    engine.settle()

    def refuse(*_: object) -> None:
        raise DeviceError("no")

    monkeypatch.setattr(engine.kv, refused, refuse)
    for _ in range(3):
        with pytest.raises(DeviceError):
            engine.mover.load(engine.mover.match(engine.mover.chain(range(17))), engine.take(16))
        engine.free = list(range(BLOCKS - SPARES))
    assert engine.kv._fingerprints_room.used == 0


def test_without_fingerprint_room_chunks_save_and_load(cache, monkeypatch):
    engine = Engine(cache)
    all_of_it = engine.kv.take_fingerprints(paging._MARKS_BYTES // (8 * L))
    engine.prefill(range(16), engine.take(16))
    engine.settle()
    assert engine.resume(range(16), engine.take(16)).tokens == 16
    engine.settle()
    assert not engine.failures
    assert cache.metrics.value("lmtier_verified_total") == 0
    engine.kv.free_fingerprints(all_of_it)


def test_a_save_that_cannot_begin_reserves_nothing(cache):
    """A block of a new chunk has left a sliding window."""
    engine = Engine(cache, tables=(0, 1, 0), spare_blocks=range(BLOCKS - 10, BLOCKS))
    chain = engine.mover.chain(range(C))
    with pytest.raises(LayoutError, match="left a sliding window"):
        engine.mover.save(chain, [[0, 1], [-1, 2]])
    again = cache.reserve(chain.keys, engine.mover.form)
    assert len(again.chunks) == 1
    cache.abort(again)
