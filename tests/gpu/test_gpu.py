"""What tests without a GPU cannot say: the driver, the bus, real streams, and kernels on real hardware."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmtier.config import Config
from lmtier.copy.cuda.device import CudaDevice
from lmtier.copy.cuda.mover import CudaLoad, CudaMover
from lmtier.copy.cuda.page_lock import STEP, PageLock
from lmtier.copy.cuda.paging import CudaKV
from lmtier.copy.cuda.streams import DeviceLoad, DeviceStore, StreamPair, TransferOrder
from lmtier.copy.mover import Mover
from lmtier.copy.paging import PagedKV
from lmtier.core.cache import Cache
from lmtier.core.slab import Slab
from lmtier.format.keys import Identity
from lmtier.format.layout import Layout
from tests.copy.test_cuda_paging import large_engines, ways
from tests.copy.test_paging import Engine, chunk_ids, engine, noise
from tests.gpu.late import DELAYS, Late

pytestmark = [
    pytest.mark.gpu,
    # What torch and cupy have to say about themselves.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:CUDA path could not be detected:UserWarning"),
]
WHERE = "cuda"
CHANCE = random.Random(0)
EXAMPLES = int(os.environ.get("LMTIER_EXAMPLES", "150"))  # fewer under a sanitizer
IDENTITY = Identity(model="tiny", weights="w1")
C, N = 64, 16
NEVER = 1 << 40


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice()


@contextmanager
def pinning(device: CudaDevice, memory: memoryview, step: int = STEP) -> Iterator[PageLock]:
    """Memory that is pinned here and no longer: what is mapped at its address later could not be pinned."""
    pinned = device.lock_pages(memory, step=step)
    try:
        assert pinned.wait(60)
        assert not pinned.failure
        yield pinned
    finally:
        torch.cuda.synchronize()  # a test that fails may leave copies behind
        pinned.close()
        device.page_lock = None


# ---- layouts


def moved(made: Engine) -> tuple[list[Any], list[torch.Tensor]]:
    """The same tensors on the GPU, and the memory that they lie in."""
    memory = [torch.from_numpy(each.view(np.uint8)).to(WHERE) for each in made.memory]
    starts = [each.ctypes.data for each in made.memory]

    def one(tensor: torch.Tensor) -> torch.Tensor:
        at = tensor.data_ptr()
        (number,) = (i for i, each in enumerate(made.memory) if starts[i] <= at < starts[i] + each.nbytes)
        typed = memory[number].view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), (at - starts[number]) // tensor.element_size())

    tensors = [tuple(map(one, each)) if isinstance(each, tuple) else one(each) for each in made.tensors]
    return tensors, memory


def held(memory: list[torch.Tensor]) -> list[bytes]:
    return [each.cpu().numpy().tobytes() for each in memory]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(large_engines(), ways, st.data())
def test_a_gpu_does_to_every_layout_what_a_cpu_does(device, made, way, data):
    layout, shard, how = made
    theirs = engine(layout, shard, **how)
    tensors, memory = moved(theirs)
    cuda, cpu = CudaKV(layout, shard, tensors, device, **way), theirs.paged()
    ids = chunk_ids(layout)
    layer = data.draw(st.sampled_from([None, *cpu.layers]))
    assert cuda.raw_tag == cpu.raw_tag
    assert cuda.raw_fingerprint(ids, layer) == cpu.raw_fingerprint(ids, layer)
    assert cuda.raw_blocks(ids) == cpu.raw_blocks(ids)
    got, wanted = noise(cpu.nbytes), noise(cpu.nbytes)
    cuda.gather(layer, ids, got)
    cpu.gather(layer, ids, wanted)
    assert got.tobytes() == wanted.tobytes()
    first, others = data.draw(st.integers(0, layout.blocks)), chunk_ids(layout, 8)
    cuda.scatter(layer, noise(cpu.nbytes, 5), others, first)
    cpu.scatter(layer, noise(cpu.nbytes, 5), others, first)
    assert held(memory) == theirs.snapshot()
    cuda.close()


def layouts() -> dict[str, tuple[Layout, list[Any]]]:
    """As engines keep KV: name -> layout, tensors of 40 blocks."""

    def uniform(packing: str, dtype: str, heads: int, head_dim: int) -> Layout:
        return Layout.uniform(
            layers=3,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            block_tokens=N,
            chunk_tokens=C,
            packing=packing,
        )

    def tensors(
        shape: tuple[int, ...], order: tuple[int, ...] = (0, 1, 2, 3), dtype: Any = torch.bfloat16
    ) -> Any:
        return [torch.zeros(shape, dtype=dtype, device=WHERE).permute(order) for _ in range(3)]

    hnd, nhd, split = (40, 8, N, 256), (40, N, 8, 256), (40, 8, N, 128)
    interleaved = torch.zeros((40, 3, 8, N, 256), dtype=torch.bfloat16, device=WHERE)
    return {
        "HND": (uniform("token", "bf16", 8, 128), tensors(hnd)),
        "NHD": (uniform("token", "bf16", 8, 128), tensors(nhd, (0, 2, 1, 3))),
        "K and V apart": (
            uniform("planes", "bf16", 8, 128),
            list(zip(tensors(split), tensors(split), strict=True)),
        ),
        "blocks of all layers": (uniform("token", "bf16", 8, 128), list(interleaved.unbind(1))),
        "MLA": (uniform("latent", "bf16", 1, 576), tensors((40, 1, N, 576))),
        "fp8": (uniform("token", "fp8_e4m3", 8, 128), tensors(hnd, dtype=torch.uint8)),
        "head size 80": (uniform("token", "bf16", 5, 80), tensors((40, 5, N, 160))),
        "head size 65, NHD": (
            uniform("token", "fp8_e4m3", 3, 65),
            tensors((40, N, 3, 130), (0, 2, 1, 3), torch.uint8),
        ),
    }


def a_cache(capacity: str = "256MiB", gpu: str = "") -> Cache:
    tiers = [*([f"gpu://?capacity={gpu}"] if gpu else []), f"cpu://?capacity={capacity}"]
    return Cache(Config(tiers=tiers, chunk_tokens=C, verify="always", prefault=False))


def pinned_slab(device: CudaDevice, cache: Cache) -> AbstractContextManager[PageLock]:
    return pinning(device, cache.slab.view(0, cache.slab.capacity))


@pytest.mark.parametrize("name", list(layouts()) if torch.cuda.is_available() else [])
@pytest.mark.parametrize("shortest_run", [0, NEVER])
@pytest.mark.parametrize("pinned", [True, False])
def test_the_canary_passes_and_a_cpu_reads_what_was_saved(device, name, shortest_run, pinned):
    layout, tensors = layouts()[name]
    with a_cache("16MiB") as cache, pinned_slab(device, cache) if pinned else nullcontext():
        kv = CudaKV(layout, layout.whole, tensors, device, shortest_run=shortest_run)
        mover = CudaMover(cache, kv, IDENTITY, spare_blocks=range(30, 40))
        blocks = [5, 6, 7, 8, 3, 1, 20, 9]
        written = random.Random(1).randbytes(len(kv.raw_blocks(blocks)))
        kv.write_raw(blocks, written)
        with mover.save(mover.chain(range(2 * C)), blocks) as save:
            for layer in kv.layers:
                save.layer(layer)
        mover.drain()
        on_cpu = [tuple(t.cpu() for t in each) if isinstance(each, tuple) else each.cpu() for each in tensors]
        twin = PagedKV(layout, layout.whole, on_cpu)
        reader = Mover(cache, twin, IDENTITY, spare_blocks=range(30, 40))
        others = [2, 4, 10, 11, 12, 13, 14, 15]
        with reader.load(reader.match(reader.chain(range(2 * C + 1))), others) as load:
            load.all()
            assert load.finish() == 2 * C
        assert twin.raw_blocks(others) == written
        with mover.load(mover.match(mover.chain(range(2 * C + 1))), others) as back:
            back.all()
        mover.drain()
        assert back.tokens == 2 * C
        assert kv.raw_blocks(others) == written
        assert cache.metrics.value("lmtier_verified_total") == (4 if twin.raw_tag == kv.raw_tag else 2)


@pytest.mark.parametrize("name", list(layouts()) if torch.cuda.is_available() else [])
@pytest.mark.parametrize("layerwise", [True, False])
def test_copies_in_gpu_memory_are_what_was_saved(device, name, layerwise):
    """The slab's bytes are gone when the copies are read."""
    layout, tensors = layouts()[name]
    with a_cache("16MiB", gpu="16MiB") as cache:
        kv = CudaKV(layout, layout.whole, tensors, device)
        mover = CudaMover(cache, kv, IDENTITY, spare_blocks=range(30, 40), layerwise=layerwise)
        blocks, others = [5, 6, 7, 8, 3, 1, 20, 9], [2, 4, 10, 11, 12, 13, 14, 15]
        written = random.Random(1).randbytes(len(kv.raw_blocks(blocks)))
        kv.write_raw(blocks, written)
        with mover.save(mover.chain(range(2 * C)), blocks) as save:
            save.all()
        mover.drain()
        assert mover.gpu_copies is not None
        for is_left in (False, True):
            match = mover.match(mover.chain(range(2 * C + 1)))
            for _, offsets in match.grant.places if is_left else ():
                cache.slab.view(offsets[0], kv.nbytes)[:] = bytes(kv.nbytes)
            kv.write_raw(others, bytes(len(written)))
            with mover.load(match, others) as load:
                load.all()
            mover.drain()
            assert load.tokens == 2 * C
            assert kv.raw_blocks(others) == written
            mover.gpu_copies.check()
        assert cache.metrics.value("lmtier_verify_failures_total") == 0


# ---- pinned memory


@pytest.mark.parametrize("shared", [False, True])
def test_copies_cross_the_steps_in_which_a_slab_was_pinned(device, shared):
    slab = Slab(8 << 20, shared=shared)
    memory = np.frombuffer(slab.view(0, slab.capacity), np.uint8)
    with pinning(device, slab.view(0, slab.capacity), step=1 << 20):
        source = torch.randint(0, 256, (7 << 20,), dtype=torch.uint8, device=WHERE)
        at = memory.ctypes.data + 333
        lane = device.store
        lane.wait(device.compute.record())
        lane.copies.copy([(at + i * 50_000, source.data_ptr() + i * 50_000, 50_000) for i in range(100)])
        lane.copies.copy([(at + 5_000_000, source.data_ptr() + 5_000_000, 2_000_000)])
        lane.record().wait()
        assert memory[333 : 333 + 7_000_000].tobytes() == source[:7_000_000].cpu().numpy().tobytes()


# ---- time


def test_timed_events_tell_the_devices_own_time(device):
    """In seconds, be its clock at 200 MHz or at 4 GHz; how late this thread looks is not in it."""
    torch.cuda._sleep(1)  # a kernel is loaded when it is first launched
    torch.cuda.synchronize()
    began = device.compute.record(timed=True)
    torch.cuda._sleep(100_000_000)
    ended = device.compute.record(timed=True)
    time.sleep(0.6)
    ended.wait()
    assert 0.025 < ended.since(began) < 0.5


def test_a_load_tells_how_long_the_device_took_for_it(device):
    with a_cache("16MiB") as cache:
        life = Life(device, cache, 0)
        life.run(20)
        took = [load.seconds for load in life.loads if load.tokens]
        assert took
        assert all(seconds is not None and 0 < seconds < 10 for seconds in took)


# ---- races


@pytest.fixture
def slow() -> Iterator[CudaDevice]:
    device = CudaDevice()
    for name in ("store", "load"):
        lane = getattr(device, name)
        kernels, copies = (Late(device, each.stream, CHANCE) for each in (lane.kernels, lane.copies))
        slowly = StreamPair(kernels, copies, lane.stores)
        setattr(device, name, slowly)
    yield device
    torch.cuda.synchronize()


@contextmanager
def never_waiting() -> Iterator[None]:
    """An operation of torch that waits for the device is an error: it would have caught up by then."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


L, BLOCKS, SPARE = 4, 64, range(56, 64)
LAYOUT = Layout.uniform(
    layers=L, heads=8, head_dim=64, dtype="bf16", block_tokens=N, chunk_tokens=C, packing="token"
)


class Life:
    """Requests whose blocks others take at once. What KV should be is known from the tokens."""

    def __init__(self, device: CudaDevice, cache: Cache, seed: int, **options: Any) -> None:
        self.chance, self.cache = random.Random(seed), cache
        self.layers = [torch.zeros(BLOCKS, 8, N, 128, dtype=torch.bfloat16, device=WHERE) for _ in range(L)]
        self.kv = CudaKV(LAYOUT, LAYOUT.whole, self.layers, device, **options)
        self.mover = CudaMover(
            cache, self.kv, IDENTITY, spare_blocks=SPARE, layerwise=self.chance.random() < 0.5
        )
        self.wrong = torch.zeros((), dtype=torch.int64, device=WHERE)
        self.loads: list[CudaLoad] = []
        self.late = 0
        """Steps that this thread had ended before the device began to compute them."""

    def content(self, tokens: list[int], blocks: list[int], layer: int) -> list[tuple[torch.Tensor, int]]:
        """Blocks, and the number that fills each; integers below 128 are exact in bf16.

        Numbers, and blocks one by one: a tensor of either would be copied to the device, which waits for it.
        """
        numbers = [(sum(tokens[: (i + 1) * N]) * 7 + i + layer * 13) % 128 for i in range(len(blocks))]
        return [(self.layers[layer][block], number) for block, number in zip(blocks, numbers, strict=True)]

    def _late(self) -> None:
        if self.chance.random() < 0.4:
            torch.cuda._sleep(self.chance.choice(DELAYS))

    def prefill(self, tokens: list[int], blocks: list[int]) -> None:
        layerwise = self.chance.random() < 0.5
        self.mover.order_before_reuse(blocks)
        with self.mover.save(self.mover.chain(tokens), blocks) as save:
            for layer in range(L):
                self._late()
                for block, number in self.content(tokens, blocks, layer):
                    block.fill_(number)
                if layerwise:
                    save.layer(layer)
            if not layerwise:
                save.all()

    def resume(self, tokens: list[int], blocks: list[int]) -> None:
        match = self.mover.match(self.mover.chain([*tokens, 0]))
        with self.mover.load(match, blocks) as load:
            there = load.tokens // N
            for layer in range(L):
                load.layer(layer)
                self._late()
                for block, number in self.content(tokens, blocks[:there], layer):
                    self.wrong += (block != number).sum()
        self.loads.append(load)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            with never_waiting():
                self._step()
            if self.chance.random() < 0.2:
                self.mover.drain()  # else most saves would end after the last load has asked for them
        self.mover.drain()

    def _step(self) -> None:
        tokens = [*([1] * C * self.chance.randint(0, 2)), *([self.chance.randint(2, 5)] * C)]
        blocks = self.chance.sample(range(SPARE.start), len(tokens) // N)
        begun = self.kv.device.compute.record()
        if self.chance.random() < 0.5:
            self.prefill(tokens, blocks)
        else:
            self.resume(tokens, blocks)
        self.late += not begun.done()
        self.mover.poll()

    @property
    def faults(self) -> int:
        differing = int(self.cache.metrics.value("lmtier_verify_failures_total"))
        return int(self.wrong.item()) + differing


def lived(device: CudaDevice, seed: int) -> Life:
    with a_cache("4MiB", gpu=["", "1MiB", "4MiB"][seed % 3]) as cache, pinned_slab(device, cache):
        options = {"shortest_run": NEVER if seed % 2 else 0, "staging_bytes": 1 if seed % 3 else 1 << 22}
        life = Life(device, cache, seed, **options)
        life.run(60)
        return life


@pytest.mark.parametrize("seed", range(8))
def test_no_delay_anywhere_makes_a_byte_wrong(slow, seed):
    life = lived(slow, seed)
    assert life.faults == 0
    assert life.late > 6, "of 60 steps: nothing was late, so nothing is proven"
    assert sum(load.tokens for load in life.loads) > 0


@pytest.mark.parametrize(
    ("owner", "forgotten"),
    [(TransferOrder, "reuse"), (DeviceLoad, "let_compute"), (DeviceStore, "_wait_for_compute")],
)
def test_an_edge_that_is_left_out_makes_bytes_wrong(slow, monkeypatch, owner, forgotten):
    """Else the delays of the test above would prove nothing."""
    monkeypatch.setattr(owner, forgotten, lambda *_, **__: None)
    assert any(lived(slow, seed).faults for seed in range(12))
