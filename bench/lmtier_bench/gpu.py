"""A GPU's memory ◄► the slab, beside what the bus does with bare copies of the same bytes.

Rates are of the device, as engines have them: copies were enqueued while it was still computing. What this
thread takes to enqueue them is rows of its own, in % of the time that the bus takes.

Everything goes through a `Gpu`: the real one, or in tests one that stands in for it and gives no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from lmtier.config import Config
from lmtier.copy.cuda.kernels import TensorMemory
from lmtier.copy.cuda.mover import CudaMover
from lmtier.copy.cuda.page_lock import PageLockingDevice
from lmtier.copy.cuda.paging import CudaKV
from lmtier.copy.cuda.streams import Device, StreamPair
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError
from lmtier.format.keys import Identity, KeyChain
from lmtier.format.layout import Layout, padded
from lmtier_bench import Samples, Scale
from lmtier_bench.copies import BLOCK_TOKENS, paired
from lmtier_bench.gpu_paths import MODELS, ORDERS, TOKENS

_ROUNDS = 7
_AHEAD_MS = 15.0  # of products, while copies are enqueued
_MATMULS_MS = 200.0
_SPARE = 1.5  # how much longer a step's products last than its copy, which is not always as fast


class Gpu(Protocol):
    """What the measurements need of a GPU beside its copies."""

    @property
    def name(self) -> str:
        """Of the GPU and its driver."""

    @property
    def device(self) -> Device: ...

    def tensor(self, shape: Sequence[int]) -> Any:
        """Of bf16, filled with anything."""

    def lock_pages(self, memory: memoryview) -> Callable[[], None]:
        """All of it, before this returns; what it returns unpins."""

    def matmuls(self, milliseconds: float) -> None:
        """Enqueue at least about that much of it on the engine's stream."""

    def synchronize(self) -> None: ...


class Torch:
    """The GPU that is current in torch."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise OSError("torch sees none")
        from lmtier.copy.cuda.device import CudaDevice

        self.device = CudaDevice()
        driver = Path("/sys/module/nvidia/version")
        version = driver.read_text().strip() if driver.exists() else "unknown"
        self.name = f"{torch.cuda.get_device_name()}, driver {version}, CUDA {torch.version.cuda}"
        self._torch: Any = torch
        self._matrices = [torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2)]
        self._in_a_millisecond = 20.0
        for _ in range(2):  # the first warms up
            began = perf_counter()
            self.matmuls(1)
            self.synchronize()
            took = 1e3 * (perf_counter() - began)
        self._in_a_millisecond = 20 / took

    def tensor(self, shape: Sequence[int]) -> Any:
        return self._torch.randn(*shape, device="cuda", dtype=self._torch.bfloat16)

    def lock_pages(self, memory: memoryview) -> Callable[[], None]:
        return lock_all_pages(self.device, memory)

    def matmuls(self, milliseconds: float) -> None:
        a, b = self._matrices
        for _ in range(ceil(milliseconds * self._in_a_millisecond)):
            self._torch.mm(a, b)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


def lock_all_pages(device: PageLockingDevice, memory: memoryview) -> Callable[[], None]:
    """Return what unlocks them. If the driver refuses, raise: copies of other memory would be measured."""
    lock = device.lock_pages(memory)
    lock.wait()
    if lock.failure:
        lock.close()
        raise ConfigError(f"the slab could not be pinned: {lock.failure}")
    return lock.close


def layout_of(model: str, layers: int | None = None) -> Layout:
    """Chunks of one block, as vLLM's connector has them by default."""
    count, heads = MODELS[model]
    return Layout.uniform(
        layers=min(count, layers or count),
        heads=heads,
        head_dim=128,
        dtype="bf16",
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=BLOCK_TOKENS,
        packing="token",
    )


class Rig:
    """An engine on the GPU that holds three prompts, and a cache whose slab is pinned and holds four."""

    def __init__(
        self,
        gpu: Gpu,
        layout: Layout,
        chunks: int,
        *,
        is_apart: bool = False,
        with_gpu_copies: bool = False,
        is_proven: bool = False,
    ) -> None:
        """`is_proven`: nothing is copied, so the canary would find fault with it."""
        self.gpu, self.device, self.layout, self.chunks = gpu, gpu.device, layout, chunks
        nbytes = layout.nbytes(layout.whole)
        heads, k, v = layout.layers[0]
        layers, self.blocks = len(layout.layers), 3 * chunks * layout.blocks
        shape = (layers, self.blocks) if is_apart else (self.blocks, layers)
        every = gpu.tensor((*shape, heads, BLOCK_TOKENS, k + v))
        self.kv = CudaKV(layout, layout.whole, list(every if is_apart else every.swapaxes(0, 1)), gpu.device)
        urls = [f"cpu://?capacity={4 * chunks * padded(nbytes)}&policy=lru"]
        if with_gpu_copies:
            urls.insert(0, f"gpu://?capacity={padded(nbytes) * chunks}&policy=lru")
        config = Config(chunk_tokens=layout.chunk_tokens, tiers=urls, prefault=False, verify="sample")
        self.cache = Cache(config)
        if not is_proven:
            self.cache.slab.prefault()
        self._unpin = gpu.lock_pages(self.cache.slab.view(0, self.cache.slab.capacity))
        spare = None if is_proven else range(2 * layout.blocks)
        identity = Identity(model="bench", weights="bench")
        self.mover = CudaMover(self.cache, self.kv, identity, spare_blocks=spare, layerwise=False)
        self.mover._proven |= is_proven  # which nobody but a driver that copies nothing may claim
        self.random, self._prompts = np.random.default_rng(0), count()
        base, self.nbytes = TensorMemory.of(every).address, chunks * nbytes
        slab = np.frombuffer(self.cache.slab.view(0, 2 * self.nbytes), np.uint8).ctypes.data
        self.out = [(slab, base, self.nbytes)]
        self.back = [(base + self.nbytes, slab + self.nbytes, self.nbytes)]
        self.within = [(base + self.nbytes, base, self.nbytes)]

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.mover.drain()
        self.gpu.synchronize()
        self._unpin()  # before it is unmapped: what is mapped there next could not be pinned
        self.cache.close()

    # ---- ours

    def prompt(self) -> KeyChain:
        return self.mover.chain([next(self._prompts), *[7] * (self.chunks * self.layout.chunk_tokens)])

    def ids(self, prompts: int = 1) -> list[list[int]]:
        """Blocks anywhere, other ones for each: what is left of a free list after a day."""
        blocks, blocks_per_prompt = self.random.permutation(self.blocks), self.chunks * self.layout.blocks
        return [blocks[i * blocks_per_prompt : (i + 1) * blocks_per_prompt].tolist() for i in range(prompts)]

    def save(self, prompt: KeyChain, ids: list[int], *, by_layer: bool = False) -> Callable[[], None]:
        """What enqueues it; room for it is reserved here."""
        reservation = self.cache.reserve(prompt.keys, self.mover.form)
        assert len(reservation.chunks) == self.chunks, "the tier had no room"

        def enqueue() -> None:
            save = self.mover.fill(reservation, self.mover.blocks_of(ids, 0, self.chunks))
            for layer in self.kv.layers if by_layer else ():
                save.layer(layer)
            save.all()
            save.commit()

        return enqueue

    def load(self, prompt: KeyChain, ids: list[int], *, by_layer: bool = False) -> Callable[[], None]:
        match = self.mover.match(prompt)
        assert match.chunks == self.chunks, "the prompt was not there"
        self.mover.layerwise = by_layer

        def enqueue() -> None:
            with self.mover.load(match, ids) as load:  # the engine computes something else meanwhile
                for layer in self.kv.layers if by_layer else ():
                    load.layer(layer)

        return enqueue

    # ---- seconds

    def on_device(self, *ways: tuple[StreamPair, Callable[[], None]]) -> tuple[float, float]:
        """Of the device, from the first byte to the last of all of these; of this thread, to enqueue them."""
        self.gpu.synchronize()
        self.gpu.matmuls(_AHEAD_MS)
        (first, _), *others = ways
        for lane, _ in ways:
            lane.wait(self.device.compute.record())
        began = first.copies.record(timed=True)
        at = perf_counter()
        for _, enqueue in ways:
            enqueue()
        took = perf_counter() - at
        for lane, _ in others:
            first.wait(lane.record())
        ended = first.record(timed=True)
        self.gpu.synchronize()
        self.mover.drain()
        return ended.since(began), took

    def bare(self, *ways: tuple[StreamPair, list[tuple[int, int, int]]]) -> float:
        def copy(lane: StreamPair, copies: list[tuple[int, int, int]]) -> Callable[[], None]:
            return lambda: lane.copies.copy(copies)

        return self.on_device(*[(lane, copy(lane, copies)) for lane, copies in ways])[0]

    def timed(self, work: Callable[[], None]) -> float:
        """Until the device is done with it too."""
        self.gpu.synchronize()
        began = perf_counter()
        work()
        self.mover.drain()
        self.gpu.synchronize()
        return perf_counter() - began


def models(scale: Scale, gpu: Gpu) -> Samples:
    for model in MODELS:
        layout = layout_of(model, scale.large_layers * MODELS[model][0] // 32)
        for tokens, number in TOKENS.items():
            for order in ORDERS:
                most = scale.memory // layout.nbytes(layout.whole)
                chunks = max(1, min(number // layout.chunk_tokens, most))
                with Rig(gpu, layout, chunks, is_apart=bool(order)) as rig:
                    yield from _rates(scale, rig, f"{model}, {tokens}{order}")


def _rates(scale: Scale, rig: Rig, what: str) -> Samples:
    store, load = rig.device.store, rig.device.load
    for number in _numbers(scale):
        saved_prompt, stored_prompt, fresh = rig.prompt(), rig.prompt(), rig.prompt()
        ids = rig.ids(2)
        rig.on_device((store, rig.save(stored_prompt, ids[0])))
        out, enqueue_out = rig.on_device((store, rig.save(saved_prompt, ids[0])))
        back, enqueue_back = rig.on_device((load, rig.load(stored_prompt, ids[1])))
        both, _ = rig.on_device((load, rig.load(stored_prompt, ids[1])), (store, rig.save(fresh, ids[0])))
        bare_out, bare_back = rig.bare((store, rig.out)), rig.bare((load, rig.back))
        bare_both = rig.bare((load, rig.back), (store, rig.out))
        if number < 0:
            continue
        for way, nbytes, ours, bare in (
            ("to the slab", rig.nbytes, out, bare_out),
            ("from the slab", rig.nbytes, back, bare_back),
            ("both ways at once", 2 * rig.nbytes, both, bare_both),
        ):
            yield f"gpu: {way}, {what}", nbytes / ours / 1e9, nbytes / bare / 1e9
        yield f"gpu: enqueue a save, {what}", 100 * enqueue_out / bare_out, 100.0
        yield f"gpu: enqueue a load, {what}", 100 * enqueue_back / bare_back, 100.0


def beside_work(scale: Scale, gpu: Gpu) -> Samples:
    for order in ORDERS:
        with Rig(gpu, *_one_model(scale), is_apart=bool(order)) as rig:
            yield from _hidden(scale, rig, order)
            if order:
                yield from _kernels(scale, rig)


def by_way_of_copies(scale: Scale, gpu: Gpu) -> Samples:
    """What copies in GPU memory are worth, and what it costs to leave them there."""
    with Rig(gpu, *_one_model(scale), with_gpu_copies=True) as rig:
        yield from _near(scale, rig)


def _one_model(scale: Scale) -> tuple[Layout, int]:
    layout = layout_of("8B", scale.large_layers)
    return layout, max(1, min(128, scale.memory // layout.nbytes(layout.whole) // 4))


def _near(scale: Scale, rig: Rig) -> Samples:
    gpu_copies, prompt, lane = rig.mover.gpu_copies, rig.prompt(), rig.device.load
    assert gpu_copies is not None
    rig.on_device((rig.device.store, rig.save(prompt, *rig.ids())))

    def load() -> float:
        (ids,) = rig.ids()
        return rig.on_device((lane, rig.load(prompt, ids)))[0]

    def put() -> float:
        gpu_copies.clear()
        return load()

    for name, ours in (
        ("gpu: from the slab, leaving copies", put),
        ("gpu: from copies, against the bus", load),
    ):
        for number in _numbers(scale):
            sample = paired(name, rig.nbytes, number, ours, lambda: rig.bare((lane, rig.back)))
            if number >= 0:
                yield sample


def _hidden(scale: Scale, rig: Rig, order: str) -> Samples:
    """How much of a copy is left to see when the engine is busy with matrices all the while, in %.

    In steps of one copy each, beside products that last somewhat longer: what the copies add to those is then
    a large enough part of both to be told from how the products differ by themselves.
    """

    def nothing() -> None:
        pass

    def save() -> None:
        rig.save(rig.prompt(), *rig.ids())()

    def bare() -> None:
        rig.device.store.copies.copy(rig.out)

    def lasts() -> float:
        """A save beside products, whose kernels leave it little room, in ms."""
        rig.gpu.synchronize()
        began = perf_counter()
        save()
        rig.gpu.matmuls(_MATMULS_MS)
        rig.mover.drain()
        return 1e3 * (perf_counter() - began)

    step = _SPARE * median(lasts() for _ in range(5))
    steps = max(1, round(_MATMULS_MS / step))

    def busy(copy: Callable[[], None]) -> float:
        def work() -> None:
            rig.gpu.matmuls(step)  # while this thread enqueues the first copy
            for _ in range(steps):
                while rig.mover.under_way > 1:  # there is room for four; the engine has work until then
                    rig.mover.poll()
                copy()
                rig.gpu.matmuls(step)

        return rig.timed(work)

    for number in _numbers(scale):
        alone = {copy: rig.timed(copy) for copy in (save, bare)}
        took = {copy: busy(copy) for copy in (nothing, save, bare)[:: 1 if number % 2 else -1]}
        ours, limit = (100 * (took[copy] - took[nothing]) / (steps * alone[copy]) for copy in (save, bare))
        if number >= 0:
            yield f"gpu: of a copy, not hidden behind matrix products{order}", ours, limit


def _kernels(scale: Scale, rig: Rig) -> Samples:
    kv, device = rig.kv, rig.device
    pieces, to = device.upload(kv.geometry.pieces), device.memory(rig.nbytes)
    payloads = range(to, to + rig.nbytes, kv.nbytes)
    lane = device.store

    def gather() -> float:
        ids = np.array(rig.ids()[0], np.int32).reshape(rig.chunks, -1)

        def work() -> None:
            for launch in kv.geometry.copy_launches(
                "gather", kv.layers, pieces, payloads, [ids], device.spread
            ):
                lane.kernels.launch(launch)

        return rig.on_device((lane, work))[0]

    def fingerprint() -> float:
        chunks = kv.check(rig.ids()[0])
        marks = kv.take_fingerprints(chunks.shape[1])
        took, _ = rig.on_device((lane, lambda: kv.enqueue_fingerprints(lane, kv.layers, chunks, marks)))
        kv.free_fingerprints(marks)
        return took

    for number in _numbers(scale):
        sample = paired(
            "gpu: gather alone, against the bus",
            rig.nbytes,
            number,
            gather,
            lambda: rig.bare((lane, rig.out)),
        )
        if number >= 0:
            yield sample
            scale_to_32_mib = (32 << 20) / rig.nbytes
            got = fingerprint() * scale_to_32_mib, rig.bare((lane, rig.within)) * scale_to_32_mib
            yield "gpu: fingerprint of 32 MiB", 1e3 * got[0], 1e3 * got[1]


def _numbers(scale: Scale) -> Iterator[int]:
    """Of rounds; the negative ones warm up."""
    return iter(range(-2, min(scale.rounds, _ROUNDS)))
