"""A GPU's memory ◄► the slab, beside what the bus does with bare copies of the same bytes.

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

from lmtier.bench import Samples, Scale
from lmtier.bench.copies import BLOCK_TOKENS, CHUNK_TOKENS, large_layout, paired, small_layout
from lmtier.cache import Cache
from lmtier.config import Config
from lmtier.cuda.mover import CudaMover
from lmtier.cuda.paging import SHORTEST_RUN, CudaKV
from lmtier.cuda.streams import Device, Lane
from lmtier.errors import ConfigError
from lmtier.keys import Identity
from lmtier.layout import Layout, padded

_PROMPT_CHUNKS = 8  # of 2,048 tokens, which are 256 MiB
_SMALL_PROMPT_CHUNKS = 48
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

    def pin(self, memory: memoryview) -> Callable[[], None]:
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
        from lmtier.cuda.device import CudaDevice

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

    def pin(self, memory: memoryview) -> Callable[[], None]:
        pinning = self.device.pin(memory)
        pinning.wait()
        if pinning.failure:
            pinning.close()
            raise ConfigError(f"the slab could not be pinned: {pinning.failure}")
        return pinning.close

    def matmuls(self, milliseconds: float) -> None:
        a, b = self._matrices
        for _ in range(ceil(milliseconds * self._in_a_millisecond)):
            self._torch.mm(a, b)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


class Rig:
    """An engine of one allocation on the GPU, and a cache whose slab is pinned and holds half as much."""

    def __init__(
        self,
        gpu: Gpu,
        scale: Scale,
        layout: Layout,
        chunks: int,
        shortest_run: int = SHORTEST_RUN,
        *,
        near: bool = False,
    ) -> None:
        self.gpu, self.device, self.layout = gpu, gpu.device, layout
        nbytes = layout.nbytes(layout.whole)
        self.chunks = min(chunks, scale.memory // nbytes // 4)
        self.held = scale.memory // nbytes
        heads, k, v = layout.layers[0]
        blocks = self.held * layout.blocks
        every = gpu.tensor((len(layout.layers), blocks, heads, BLOCK_TOKENS, k + v))
        self.kv = CudaKV(layout, layout.whole, list(every), gpu.device, shortest_run=shortest_run)
        # Twice a prompt is enough for saves and loads to take turns, and pinning a slab takes time.
        urls = [f"cpu://?capacity={4 * self.chunks * nbytes}"]
        if near:
            urls.insert(0, f"gpu://?capacity={padded(nbytes) * self.chunks}&policy=lru")
        self.cache = Cache(Config(chunk_tokens=CHUNK_TOKENS, tiers=urls, prefault=False, verify="off"))
        self.cache.slab.prefault()
        self._unpin = gpu.pin(self.cache.slab.view(0, self.cache.slab.capacity))
        spare = range(2 * layout.blocks)
        identity = Identity(model="bench", weights="bench")
        self.mover = CudaMover(self.cache, self.kv, identity, spare_blocks=spare, layerwise=False)
        self.random, self._prompts = np.random.default_rng(0), count()
        base = every.data_ptr()
        slab = np.frombuffer(self.cache.slab.view(0, 4 * self.chunks * nbytes), np.uint8).ctypes.data
        size = self.chunks * nbytes
        self.out = [(slab + i * nbytes, base + i * nbytes, nbytes) for i in range(self.chunks)]
        self.back = [(base + size + i * nbytes, slab + size + i * nbytes, nbytes) for i in range(self.chunks)]
        self.within = [(base + size + i * nbytes, base + i * nbytes, nbytes) for i in range(self.chunks)]
        self.nbytes = size

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.mover.drain()
        self.gpu.synchronize()
        self._unpin()  # before it is unmapped: what is mapped there next could not be pinned
        self.cache.close()

    # ---- ours

    def tokens(self) -> list[int]:
        return [next(self._prompts), *[7] * (self.chunks * CHUNK_TOKENS)]

    def ids(self, prompts: int = 1) -> list[list[int]]:
        """Blocks anywhere, other ones for each: what is left of a free list after a day."""
        blocks, each = (
            self.random.permutation(self.held * self.layout.blocks),
            self.chunks * self.layout.blocks,
        )
        return [blocks[i * each : (i + 1) * each].tolist() for i in range(prompts)]

    def save(self, tokens: list[int], ids: list[int]) -> None:
        with self.mover.save(self.mover.chain(tokens), ids) as save:
            save.all()
        assert save.tokens == self.chunks * CHUNK_TOKENS, "the tier had no room"

    def load(self, tokens: list[int], ids: list[int]) -> None:
        with self.mover.load(self.mover.match(self.mover.chain(tokens)), ids) as load:
            load.all()
        assert load.tokens == self.chunks * CHUNK_TOKENS, "the prompt was not there"

    # ---- seconds

    def timed(self, work: Callable[[], None]) -> float:
        """Until the device is done with it too."""
        self.gpu.synchronize()
        began = perf_counter()
        work()
        self.mover.drain()
        self.gpu.synchronize()
        return perf_counter() - began

    def bare(self, *ways: tuple[Lane, list[tuple[int, int, int]]]) -> float:
        def work() -> None:
            for lane, copies in ways:
                lane.copies.copy(copies)

        return self.timed(work)


def both_ways(scale: Scale, gpu: Gpu) -> Samples:
    with Rig(gpu, scale, large_layout(scale.large_layers), _PROMPT_CHUNKS) as rig:
        yield from _rates(scale, rig, "32 MiB objects")
        yield from _at_once(scale, rig)
        yield from _hidden(scale, rig)
        yield from _kernels(scale, rig)
    with Rig(gpu, scale, small_layout(), _SMALL_PROMPT_CHUNKS) as rig:
        yield from _rates(scale, rig, "1 MiB objects")


def by_way_of_copies(scale: Scale, gpu: Gpu) -> Samples:
    """What copies in GPU memory are worth, and what it costs to leave them there."""
    with Rig(gpu, scale, large_layout(scale.large_layers), _PROMPT_CHUNKS, near=True) as rig:
        yield from _near(scale, rig, "32 MiB objects")
    with Rig(gpu, scale, small_layout(), _SMALL_PROMPT_CHUNKS, near=True) as rig:
        yield from _near(scale, rig, "1 MiB objects")


def as_they_are(scale: Scale, gpu: Gpu) -> Samples:
    """Blocks copied one by one, by no kernel: where this beats the kernels, SHORTEST_RUN is too high."""
    with Rig(gpu, scale, large_layout(scale.large_layers), _PROMPT_CHUNKS, shortest_run=0) as rig:
        yield from _rates(scale, rig, "64 KiB blocks as they are")
    with Rig(gpu, scale, small_layout(), _SMALL_PROMPT_CHUNKS, shortest_run=0) as rig:
        yield from _rates(scale, rig, "8 KiB blocks as they are")


def _rates(scale: Scale, rig: Rig, what: str) -> Samples:
    saved = [rig.tokens()]

    def save() -> float:
        saved.append(rig.tokens())
        (ids,) = rig.ids()
        return rig.timed(lambda: rig.save(saved[-1], ids))

    def load() -> float:
        (ids,) = rig.ids()
        return rig.timed(lambda: rig.load(saved[-1], ids))

    for name, ours, way in (
        (f"gpu: to the slab, {what}", save, (rig.device.store, rig.out)),
        (f"gpu: from the slab, {what}", load, (rig.device.load, rig.back)),
    ):
        for number in _numbers(scale):
            sample = paired(name, rig.nbytes, number, ours, lambda way=way: rig.bare(way))  # type: ignore[misc]
            if number >= 0:
                yield sample


def _near(scale: Scale, rig: Rig, what: str) -> Samples:
    hbm, tokens = rig.mover.hbm, rig.tokens()
    assert hbm is not None
    rig.timed(lambda: rig.save(tokens, *rig.ids()))

    def load() -> float:
        (ids,) = rig.ids()
        return rig.timed(lambda: rig.load(tokens, ids))

    def put() -> float:
        hbm.clear()
        return load()

    for name, ours in (
        (f"gpu: from the slab, leaving copies, {what}", put),
        (f"gpu: from copies, {what}, against the bus", load),
    ):
        for number in _numbers(scale):
            bus = rig.device.load, rig.back
            sample = paired(name, rig.nbytes, number, ours, lambda bus=bus: rig.bare(bus))  # type: ignore[misc]
            if number >= 0:
                yield sample


def _at_once(scale: Scale, rig: Rig) -> Samples:
    kept = rig.tokens()
    rig.timed(lambda: rig.save(kept, *rig.ids()))

    def ours() -> float:
        fresh, (these, those) = rig.tokens(), rig.ids(2)

        def work() -> None:
            rig.load(kept, these)
            rig.save(fresh, those)

        return rig.timed(work)

    def limit() -> float:
        return rig.bare((rig.device.store, rig.out), (rig.device.load, rig.back))

    for number in _numbers(scale):
        sample = paired("gpu: both directions at once, 32 MiB objects", 2 * rig.nbytes, number, ours, limit)
        if number >= 0:
            yield sample


def _hidden(scale: Scale, rig: Rig) -> Samples:
    """How much of a copy is left to see when the engine is busy with matrices all the while, in %.

    In steps of one copy each, beside products that last somewhat longer: what the copies add to those is then
    a large enough part of both to be told from how the products differ by themselves.
    """

    def nothing() -> None:
        pass

    def save() -> None:
        rig.save(rig.tokens(), *rig.ids())

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
            yield "gpu: of a copy, not hidden behind matrix products", ours, limit


def _kernels(scale: Scale, rig: Rig) -> Samples:
    kv, device = rig.kv, rig.device
    pieces, to = device.upload(kv.geometry.pieces), device.memory(rig.nbytes)
    payloads = range(to, to + rig.nbytes, kv.nbytes)

    def gather() -> float:
        ids = np.array(rig.ids()[0], np.int32).reshape(rig.chunks, -1)

        def work() -> None:
            for launch in kv.geometry.copies("gather", None, pieces, payloads, [ids], device.spread):
                device.store.kernels.launch(launch)

        return rig.timed(work)

    def fingerprint() -> float:
        (ids,) = rig.ids()
        chunks = kv.check(ids)
        marks = kv.take_marks(len(chunks))

        def work() -> None:
            for layer in kv.layers:
                kv.enqueue_marks(device.store, layer, chunks, marks)

        took = rig.timed(work)
        kv.give_back(marks)
        return took

    def within() -> float:
        return rig.bare((device.store, rig.within))

    for number in _numbers(scale):
        sample = paired(
            "gpu: gather alone, against the bus",
            rig.nbytes,
            number,
            gather,
            lambda: rig.bare((device.store, rig.out)),
        )
        if number >= 0:
            yield sample
            got = fingerprint() / rig.chunks, within() / rig.chunks
            yield "gpu: fingerprint of 32 MiB", 1e3 * got[0], 1e3 * got[1]


def _numbers(scale: Scale) -> Iterator[int]:
    """Of rounds; the negative ones warm up."""
    return iter(range(-2, scale.rounds))
