"""What a GPU, its driver and its bus can do by themselves: the limits that lmtier's own figures stand beside.

    PYTHONPATH=.:backends:integrations python3 bench/gpu_probe.py --json probe.json

Each part runs alone. A part that fails prints its error and costs only itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch

from lmtier.config import Config
from lmtier.copy.cuda.device import CudaDevice
from lmtier.copy.cuda.kernels import Spread
from lmtier.copy.cuda.mover import CudaMover
from lmtier.copy.cuda.paging import CudaKV
from lmtier.core.cache import Cache
from lmtier.format.keys import Identity
from lmtier.format.layout import Layout
from lmtier.tools.terminal import say, table
from lmtier_bench.gpu import lock_all_pages

GIB = 1 << 30
ROUNDS = 7
Row = dict[str, Any]
Way: TypeAlias = "tuple[Callable[[], None], tuple[torch.cuda.Stream, ...]]"
"""What enqueues the copies, and the streams that they are on."""


def versions() -> list[Row]:
    def of(command: str) -> str:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        return " ".join(done.stdout.split())

    query = "name,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
    huge = "/sys/kernel/mm/transparent_hugepage"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    cupy = import_module("cupy").__version__ if find_spec("cupy") else "none"
    told = {
        "GPU, driver, PCIe now, at most, lanes": of(f"nvidia-smi --query-gpu={query} --format=csv,noheader"),
        "torch, CUDA of torch, cupy": f"{torch.__version__}, {torch.version.cuda}, {cupy}",
        "Python": sys.version.split()[0],
        "cores, memory GiB": f"{os.cpu_count()}, {pages:.0f}",
        "processor": of("grep -m1 'model name' /proc/cpuinfo | cut -d: -f2"),
        "kernel": os.uname().release,
        "NUMA nodes": of("ls -d /sys/devices/system/node/node* | wc -l"),
        "huge pages, of shared memory": of(f"cat {huge}/enabled {huge}/shmem_enabled"),
        "memlock limit": of("ulimit -l"),
    }
    return [{"what": what, "value": value} for what, value in told.items()]


class Machine:
    """A GPU, a GiB of its memory and a pinned GiB of the host's."""

    models: Sequence[str] = ("8B", "70B/TP8")
    lengths: Sequence[int] = (2048, 8192)
    """Of prompts, in tokens."""
    rounds = ROUNDS

    def __init__(self) -> None:
        self.device: Any = CudaDevice()
        self.near = torch.randint(0, 256, (GIB,), dtype=torch.uint8, device="cuda")
        self.host = torch.zeros(GIB, dtype=torch.uint8).pin_memory()
        self.out, self.back = (torch.cuda.Stream() for _ in range(2))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def tensor(self, *shape: int) -> torch.Tensor:
        """Filled with anything."""
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_()

    @contextmanager
    def pinned(self, memory: memoryview) -> Iterator[None]:
        unpin = lock_all_pages(self.device, memory)
        yield
        self.synchronize()
        unpin()
        self.device.page_lock = None

    def copying(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Calls of the driver that copy: one piece, and many in a batch."""
        driver, handle = self.device.driver, self.device.store.kernels.stream.cuda_stream
        return (
            lambda to, source, nbytes: driver.copy(to, source, nbytes, handle),
            lambda copies: driver.copy_batch(copies, handle),
        )

    def timed(self, work: Callable[[], None], *streams: torch.cuda.Stream) -> tuple[float, float]:
        """Median seconds of the device, from when all streams begin until all have ended, and of the host."""
        took, host = [], []
        for number in range(-2, ROUNDS):
            torch.cuda.synchronize()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(streams[0])
            for each in streams[1:]:
                each.wait_event(began)
            at = perf_counter()
            work()
            spent = perf_counter() - at
            for each in streams[1:]:
                streams[0].wait_stream(each)
            ended.record(streams[0])
            ended.synchronize()
            if number >= 0:
                took.append(began.elapsed_time(ended) / 1000)
                host.append(spent)
        return median(took), median(host)


class Rehearsal(Machine):
    """The simulated device: for what goes through lmtier's own interface to a device."""

    models = ("tiny",)
    lengths = (256,)
    rounds = 3

    def __init__(self) -> None:
        from bench.gpu_simulated import Simulated

        self.gpu = Simulated()
        self.device = self.gpu.device
        self.near, self.host = (torch.zeros(32 << 20, dtype=torch.uint8) for _ in range(2))
        self.device.keep(self.near.numpy(), self.host.numpy())

    def synchronize(self) -> None:
        self.gpu.synchronize()

    def tensor(self, *shape: int) -> torch.Tensor:
        made: torch.Tensor = self.gpu.tensor(shape)
        return made

    @contextmanager
    def pinned(self, memory: memoryview) -> Iterator[None]:
        unpin = self.gpu.lock_pages(memory)
        yield
        self.synchronize()
        unpin()

    def copying(self) -> tuple[Callable[..., None], Callable[..., None]]:
        copies = self.device.store.copies
        return lambda *copy: copies.copy([copy]), copies.copy


def peaks(machine: Machine) -> list[Row]:
    def to_host() -> None:
        with torch.cuda.stream(machine.out):
            machine.host[: GIB // 2].copy_(machine.near[: GIB // 2], non_blocking=True)

    def to_gpu() -> None:
        with torch.cuda.stream(machine.back):
            machine.near[GIB // 2 :].copy_(machine.host[GIB // 2 :], non_blocking=True)

    def within() -> None:
        with torch.cuda.stream(machine.out):
            machine.near[: GIB // 2].copy_(machine.near[GIB // 2 :], non_blocking=True)

    def both() -> None:
        to_host()
        to_gpu()

    half = GIB / 2 / 1e9
    return [
        {"copy of 512 MiB": "to the host", "GB/s": half / machine.timed(to_host, machine.out)[0]},
        {"copy of 512 MiB": "to the GPU", "GB/s": half / machine.timed(to_gpu, machine.back)[0]},
        {
            "copy of 512 MiB": "both at once, together",
            "GB/s": 2 * half / machine.timed(both, machine.out, machine.back)[0],
        },
        {"copy of 512 MiB": "within the GPU", "GB/s": half / machine.timed(within, machine.out)[0]},
    ]


def batches(machine: Machine) -> list[Row]:
    """Pieces anywhere in the GPU's memory, one after another on the host: as blocks and payloads lie."""
    rows, driver, chance = [], machine.device.driver, np.random.default_rng(0)
    near, host = machine.near.data_ptr(), machine.host.data_ptr()
    for size in (8, 16, 32, 64, 128, 256, 640, 2048):
        nbytes = size << 10
        count = min(2048, (256 << 20) // nbytes)
        at = near + chance.permutation(GIB // nbytes)[:count].astype(np.int64) * nbytes
        slab = host + np.arange(count, dtype=np.int64) * nbytes
        each = np.full(count, nbytes, np.int64)
        for way, stream, copies in (
            ("to the host", machine.out, np.stack([slab, at, each], axis=1)),
            ("to the GPU", machine.back, np.stack([at, slab, each], axis=1)),
        ):
            row: Row = {"pieces": f"{count} of {size} KiB", "way": way}
            handle = stream.cuda_stream
            for name, order in (("batch", 1), ("batch, any order", 3)):
                with _ordered(order):
                    took, spent = machine.timed(lambda: driver.copy_batch(copies, handle), stream)  # noqa: B023  # run at once
                row[f"{name} GB/s"] = count * nbytes / took / 1e9
                row[f"{name} host ms"] = 1e3 * spent

            def one_by_one() -> None:
                for to, source, n in copies.tolist():  # noqa: B023  # run at once
                    driver.copy(to, source, n, handle)  # noqa: B023  # run at once

            took, spent = machine.timed(one_by_one, stream)
            row["one by one GB/s"], row["one by one host ms"] = count * nbytes / took / 1e9, 1e3 * spent
            rows.append(row)
    return rows


def pitched(machine: Machine) -> list[Row]:
    """Rows that lie equally far apart on the host, and together on the GPU, in one call of the driver."""
    copy = import_module("cupy").cuda.runtime.memcpy2DAsync
    near, host, rows = machine.near.data_ptr(), machine.host.data_ptr(), []
    for kib, pitch, height in (
        (8, 640, 512),
        (16, 640, 512),
        (64, 640, 512),
        (64, 2048, 512),
        (128, 2048, 512),
        (512, 2048, 512),
    ):
        width, row = kib << 10, {"rows": f"{height} of {kib} KiB, every {pitch} KiB"}
        for way, stream, kind in (("to the host", machine.out, 2), ("to the GPU", machine.back, 1)):
            sides = [(host, pitch << 10), (near, width)][:: 1 if kind == 2 else -1]
            (to, step), (source, stride) = sides
            given = to, step, source, stride, width, height, kind, stream.cuda_stream

            def run() -> None:
                for _ in range(8):
                    copy(*given)  # noqa: B023  # run at once

            took, spent = machine.timed(run, stream)
            row |= {f"{way} GB/s": 8 * height * width / took / 1e9, f"{way} host ms a call": 1e3 * spent / 8}
        rows.append(row)
    return rows


@contextmanager
def _ordered(order: int) -> Iterator[None]:
    """Batches that are read in the order of the stream (1) or in any (3)."""
    module = import_module("lmtier.copy.cuda.driver")
    before, module._STREAM_ORDER = module._STREAM_ORDER, order
    try:
        yield
    finally:
        module._STREAM_ORDER = before


def layout_of(model: str, chunk_tokens: int) -> Layout:
    layers, heads = {"8B": (32, 8), "70B/TP8": (80, 1), "tiny": (4, 1)}[model]
    return Layout.uniform(
        layers=layers,
        heads=heads,
        head_dim=128,
        dtype="bf16",
        block_tokens=16,
        chunk_tokens=chunk_tokens,
        packing="token",
    )


def tensors_of(machine: Machine, layout: Layout, order: str, blocks: int) -> list[torch.Tensor]:
    """The memory of an engine: LBHNC keeps a layer's blocks together, BLHNC a block's layers."""
    layers = len(layout.layers)
    heads, k, v = layout.layers[0]
    shape = (layers, blocks) if order == "LBHNC" else (blocks, layers)
    every = machine.tensor(*shape, heads, layout.block_tokens, k + v)
    return list(every if order == "LBHNC" else every.unbind(1))


def without_staging(machine: Machine) -> list[Row]:
    """The kernels, straight between blocks and pinned memory, by how many SMs they may take."""
    rows, kernels = [], machine.device.store.kernels.stream
    for model in ("8B", "70B/TP8"):
        layout = layout_of(model, 256)
        chunks = (256 << 20) // layout.nbytes(layout.whole)
        tensors = tensors_of(machine, layout, "LBHNC", 3 * chunks * layout.blocks)
        kv = CudaKV(layout, layout.whole, tensors, machine.device)
        pieces = machine.device.upload(kv.geometry.pieces)
        chance = np.random.default_rng(0)
        ids = chance.permutation(3 * chunks * layout.blocks)[: chunks * layout.blocks]
        table_of = [ids.astype(np.int32).reshape(chunks, -1)]
        payloads = [machine.host.data_ptr() + i * kv.nbytes for i in range(chunks)]
        for sms in (2, 4, 8, 16, 32):
            row: Row = {"model": model, "SMs": sms}
            for kernel in ("gather", "scatter"):
                launches = list(
                    kv.geometry.copy_launches(kernel, kv.layers, pieces, payloads, table_of, Spread(sms))
                )

                def run() -> None:
                    for launch in launches:  # noqa: B023  # run at once
                        machine.device.store.kernels.launch(launch)

                took, spent = machine.timed(run, kernels)
                row[f"{kernel} GB/s"] = chunks * kv.nbytes / took / 1e9
                row[f"{kernel} host ms"] = 1e3 * spent
            rows.append(row)
        del tensors, kv
    return rows


def beside_compute(machine: Machine) -> list[Row]:
    """What each way of copying costs an engine that computes meanwhile, and what it costs the copy.

    `lost %` is the time that the engine lost, as a part of the time for which bytes moved.
    """
    device, torch_stream = machine.device, torch.cuda.Stream()
    layout = layout_of("8B", 256)
    chunks, blocks = 8, 24 * layout.blocks
    tensors = tensors_of(machine, layout, "LBHNC", blocks)
    kv = CudaKV(layout, layout.whole, tensors, device)
    pieces = device.upload(kv.geometry.pieces)
    ids = np.random.default_rng(0).permutation(blocks)[: chunks * layout.blocks].astype(np.int32)
    chunk_ids = [ids.reshape(chunks, -1)]
    slabs = [machine.host.data_ptr() + i * kv.nbytes for i in range(2 * chunks)]
    base, slab = tensors[0].data_ptr(), machine.host.data_ptr()
    again = 4
    size = again * chunks * kv.nbytes

    def direct(kernel: str, sms: int, threads: int = 256, priority: int = 0) -> Way:
        stream = torch.cuda.Stream(priority=priority)
        some = slabs[:chunks] if kernel == "gather" else slabs[chunks:]
        launches = list(kv.geometry.copy_launches(kernel, kv.layers, pieces, some, chunk_ids, Spread(sms)))
        if threads != 256:
            launches = [each._replace(x=sms, y=1, threads=threads) for each in launches]

        def run() -> None:
            for launch in again * launches:
                device.driver.launch(device.functions[kernel], launch, stream.cuda_stream)

        return run, (stream,)

    def bus(kib: int, *, out: bool) -> Way:
        stream, step = torch.cuda.Stream(), kib << 10
        at = np.arange(chunks * kv.nbytes // step, dtype=np.int64) * step
        sides = (slab + at, base + at) if out else (base + at, slab + (GIB >> 1) + at)
        copies = np.stack([*sides, np.full_like(at, step)], axis=1)

        def run() -> None:
            for _ in range(again):
                device.driver.copy_batch(copies, stream.cuda_stream)

        return run, (stream,)

    def staged() -> Way:
        memory = machine.host.numpy().data
        blocks = kv.check(ids)
        offsets = [number * kv.nbytes for number in range(blocks.shape[1])]
        bounds = kv.bind_all(blocks, offsets, lambda at, size: memory[at : at + size])
        pinning = device.page_lock
        lane = device.store

        def run() -> None:
            for _ in range(again):
                kv.enqueue_copies(lane, kv.layers, bounds)

        assert pinning is None
        return run, (lane.kernels.stream, lane.copies.stream)

    def both(*ways: Way) -> Way:
        def run() -> None:
            for work, _ in ways:
                work()

        return run, tuple(stream for _, streams in ways for stream in streams)

    ways: dict[str, Way] = {
        "to the host: bus, 2 MiB pieces": bus(2048, out=True),
        "to the host: bus, 64 KiB pieces": bus(64, out=True),
        "to the host: staged, 8 SMs": staged(),
        **{f"to the host: kernel, {sms} x 4 x 256": direct("gather", sms) for sms in (1, 2, 4, 8)},
        **{f"to the host: kernel, {sms} x 512": direct("gather", sms, 512) for sms in (2, 4, 8)},
        "to the host: kernel, 2 x 4 x 256, first": direct("gather", 2, priority=-5),
        "to the GPU: bus, 2 MiB pieces": bus(2048, out=False),
        "to the GPU: bus, 64 KiB pieces": bus(64, out=False),
        **{f"to the GPU: kernel, {sms} x 4 x 256": direct("scatter", sms) for sms in (2, 4, 8)},
        **{f"to the GPU: kernel, {sms} x 512": direct("scatter", sms, 512) for sms in (4, 8, 16)},
        "to the GPU: kernel, 4 x 4 x 256, first": direct("scatter", 4, priority=-5),
        "both: bus, 2 MiB pieces": both(bus(2048, out=True), bus(2048, out=False)),
        "both: kernel, 2 x 4 x 256 each": both(direct("gather", 2), direct("scatter", 2)),
        "both: kernel, 4 x 4 x 256 each": both(direct("gather", 4), direct("scatter", 4)),
        "both: kernel, 8 x 4 x 256 each": both(direct("gather", 8), direct("scatter", 8)),
        "both: kernel out, bus in": both(direct("gather", 2), bus(2048, out=False)),
    }
    rows: list[Row] = [{"way": name} for name in ways]
    works = {"nothing": None, **_works()}
    for name, work in works.items():
        spent, graph = 0.0, None
        if work is not None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(torch_stream):
                work()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=torch_stream):
                work()
            alone = [_span(torch_stream, graph.replay) for _ in range(5)]
            spent = median(alone)
        for row, (run, streams) in zip(rows, ways.values(), strict=True):
            copied, computed = [], []
            for number in range(-1, 5):
                torch.cuda.synchronize()
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
                with torch.cuda.stream(torch_stream):
                    marks[0].record()
                    # The copies begin when the work has begun.
                    for each in streams:
                        each.wait_event(marks[0])
                    if graph is not None:
                        graph.replay()
                    marks[1].record()
                marks[2].record(streams[0])
                run()
                for each in streams[1:]:
                    streams[0].wait_stream(each)
                marks[3].record(streams[0])
                torch.cuda.synchronize()
                if number >= 0:
                    copied.append(marks[2].elapsed_time(marks[3]))
                    computed.append(marks[0].elapsed_time(marks[1]))
            times = 2 if row["way"].startswith("both") else 1
            row[f"{name}: GB/s"] = times * size / median(copied) / 1e6
            if graph is not None:
                row[f"{name}: lost %"] = 100 * (median(computed) - spent) / min(median(copied), spent)
    return rows


def _works() -> dict[str, Callable[[], None]]:
    """Each takes longer than a GiB takes over the bus."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    big, up, down = random(8192, 4096), random(4096, 14336), random(14336, 4096)
    few, square = random(2048, 4096), random(4096, 4096)
    one, many = random(32, 4096), [random(4096, 14336) for _ in range(8)]
    q = random(1, 32, 8192, 128)

    def prefill() -> None:
        for _ in range(25):
            big @ up @ down

    def short_prefill() -> None:
        for _ in range(400):
            few @ square

    def decode() -> None:
        for i in range(1000):
            one @ many[i % 8]

    def attention() -> None:
        for _ in range(40):
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    return {"prefill": prefill, "short": short_prefill, "decode": decode, "attention": attention}


def _span(stream: torch.cuda.Stream, work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        began.record()
        work()
        ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended))


def pinning(machine: Machine) -> list[Row]:
    runtime = import_module("cupy").cuda.runtime
    rows = []
    for name, flags, advice in (
        ("anonymous", mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0),
        ("anonymous, huge pages", mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MADV_HUGEPAGE),
        ("memfd", mmap.MAP_SHARED, 0),
        ("memfd, huge pages", mmap.MAP_SHARED, mmap.MADV_HUGEPAGE),
    ):
        file = os.memfd_create("probe") if name.startswith("memfd") else -1
        if file >= 0:
            os.ftruncate(file, 2 * GIB)
        memory = mmap.mmap(file, 2 * GIB, flags=flags)
        if advice:
            memory.madvise(advice)
        began = perf_counter()
        array = np.frombuffer(memory, np.uint8)
        array[::4096] = 1
        touched = perf_counter() - began
        row: Row = {"memory": name, "touch s/GiB": touched / 2}
        for step in (128 << 20, GIB):
            began = perf_counter()
            for at in range(0, 2 * GIB, step):
                runtime.hostRegister(array.ctypes.data + at, step, 3)
            row[f"pin s/GiB, steps of {step >> 20} MiB"] = (perf_counter() - began) / 2
            began = perf_counter()
            for at in range(0, 2 * GIB, step):
                runtime.hostUnregister(array.ctypes.data + at)
            row[f"unpin s/GiB, steps of {step >> 20} MiB"] = (perf_counter() - began) / 2
        rows.append(row)
        del array
        memory.close()
        if file >= 0:
            os.close(file)
    return rows


def calls(machine: Machine) -> list[Row]:
    """What one call costs the thread that makes it."""
    device, many = machine.device, 2000
    stream, (copy, copy_batch) = device.store.kernels, machine.copying()
    layout = layout_of("8B", 16)
    kv = CudaKV(layout, layout.whole, tensors_of(machine, layout, "LBHNC", 64), device)
    pieces = device.upload(kv.geometry.pieces)
    ids = [np.zeros((1, 1), np.int32)]
    (launch,) = kv.geometry.copy_launches(
        "gather", range(1), pieces, [machine.near.data_ptr()], ids, device.spread
    )
    event = stream.record()
    near, host = machine.near.data_ptr(), machine.host.data_ptr()
    copies = np.array([(host + i * 65536, near + i * 65536, 65536) for i in range(512)], np.int64)

    def each(work: Callable[[], object], count: int = many) -> float:
        took = []
        for _ in range(5):
            machine.synchronize()
            began = perf_counter()
            for _ in range(count):
                work()
            took.append((perf_counter() - began) / count)
            machine.synchronize()
        return 1e6 * median(took)

    return [
        {"call": "record an event", "µs": each(stream.record)},
        {"call": "record a timed event", "µs": each(lambda: stream.record(timed=True))},
        {"call": "wait for an event", "µs": each(lambda: stream.wait(event))},
        {"call": "ask an event whether it is done", "µs": each(event.done)},
        {"call": "launch a kernel", "µs": each(lambda: stream.launch(launch))},
        {
            "call": "make the arguments of a launch",
            "µs": each(
                lambda: list(
                    kv.geometry.copy_launches("gather", range(1), pieces, [near], ids, device.spread)
                )
            ),
        },
        {"call": "copy 64 KiB", "µs": each(lambda: copy(host, near, 65536), 500)},
        {"call": "copy 512 x 64 KiB in a batch", "µs": each(lambda: copy_batch(copies), 10)},
    ]


def transfers(machine: Machine) -> list[Row]:
    """lmtier's own saves and loads, as an engine makes them, beside one copy of as many bytes."""
    rows = []
    for model in machine.models:
        for order in ("LBHNC", "BLHNC"):
            for chunk in (16, 256):
                for tokens in machine.lengths:
                    rows += _transfer(machine, model, order, chunk, tokens)
    return rows


def _transfer(machine: Machine, model: str, order: str, chunk: int, tokens: int) -> list[Row]:
    device, layout = machine.device, layout_of(model, chunk)
    blocks = 3 * tokens // 16
    tensors = tensors_of(machine, layout, order, blocks + 64)
    nbytes = layout.nbytes(layout.whole) * (tokens // chunk)
    rows = []
    config = Config(
        chunk_tokens=chunk, tiers=[f"cpu://?capacity={4 * nbytes}"], prefault=False, verify="sample"
    )
    with Cache(config) as cache, ExitStack() as leave:
        cache.slab.prefault()
        leave.enter_context(machine.pinned(cache.slab.view(0, cache.slab.capacity)))
        chance, number = np.random.default_rng(0), iter(range(1, 1000))
        for mode in ("step", "layerwise"):
            kv = CudaKV(layout, layout.whole, tensors, device)
            mover = CudaMover(
                cache,
                kv,
                Identity(model=mode, weights="w"),
                spare_blocks=range(blocks, blocks + 64),
                layerwise=mode != "step",
            )
            saves, loads = [], []
            for _ in range(machine.rounds):
                ids = chance.permutation(blocks)[: tokens // 16].tolist()
                prompt = [next(number)] * (tokens + 1)
                chain = mover.chain(prompt)
                machine.synchronize()
                began = perf_counter()
                with mover.save(chain, ids) as save:
                    for layer in kv.layers if mover.layerwise else ():
                        save.layer(layer)
                    save.all()
                enqueued = perf_counter()
                mover.drain()
                saves.append((enqueued - began, perf_counter() - began))
                ids = chance.permutation(blocks)[: tokens // 16].tolist()
                began = perf_counter()
                with mover.load(mover.match(mover.chain(prompt)), ids) as load:
                    for layer in kv.layers if mover.layerwise else ():
                        load.layer(layer)
                    load.all()
                enqueued = perf_counter()
                mover.drain()
                loads.append((enqueued - began, perf_counter() - began))
                assert load.tokens == tokens
            row: Row = {"model": model, "order": order, "chunk": chunk, "tokens": tokens, "mode": mode}
            for what, times in (("save", saves), ("load", loads)):
                enqueue, whole = (median(each) for each in zip(*times[2:], strict=True))
                row[f"{what}: enqueue ms"], row[f"{what}: ms"] = 1e3 * enqueue, 1e3 * whole
                row[f"{what}: GB/s"] = nbytes / whole / 1e9
            rows.append(row)
    return rows


PARTS: dict[str, Callable[[Machine], list[Row]]] = {
    "peaks": peaks,
    "calls": calls,
    "batches": batches,
    "pitched copies": pitched,
    "kernels without staging": without_staging,
    "beside compute": beside_compute,
    "pinning": pinning,
    "saves and loads": transfers,
}


REHEARSED = ("calls", "saves and loads")
"""What goes through lmtier's own interface to a device; the others talk to CUDA."""


def shown(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = [
        [f"{row[name]:.3g}" if isinstance(row.get(name), float) else str(row.get(name, "")) for name in names]
        for row in rows
    ]
    return table(names, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument(
        "--simulated",
        action="store_true",
        help=f"without a GPU: {', '.join(REHEARSED)}, on the simulated device",
    )
    args = parser.parse_args(arguments)
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": versions()}
    say(shown(found["machine"]))
    machine = Rehearsal() if args.simulated else Machine()
    failed = 0
    for name, part in PARTS.items():
        if args.only not in name or (args.simulated and name not in REHEARSED):
            continue
        began = perf_counter()
        try:
            found[name] = part(machine)
            say(f"\n{name} ({perf_counter() - began:.0f} s)\n{shown(found[name])}")
        except Exception:  # noqa: BLE001  # one part tells nothing of the others
            failed += 1
            found[name] = traceback.format_exc()
            say(f"\n{name} FAILED\n{found[name]}")
        if args.json:
            args.json.write_text(json.dumps(found, indent=1, default=str))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
