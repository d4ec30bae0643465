"""A GPU whose driver does nothing at once: what is left of a transfer is what Python takes to enqueue it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lmtier.copy.cuda.driver import Driver
from lmtier.copy.cuda.kernels import Launch, Spread
from lmtier.copy.cuda.streams import Copies, Event, Rows, StreamPair
from lmtier.format.layout import Array
from lmtier_bench import Samples, Scale
from lmtier_bench.gpu import Rig, layout_of
from lmtier_bench.gpu_paths import BUS, BY_LAYER, MODELS, ORDERS, TOKENS

_FUNCTION, _STREAM = 1 << 40, 1 << 41


class Library:
    """Says yes to all calls."""

    def __init__(self) -> None:
        for name in ("cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync_v2", "cuMemcpy2DAsync_v2"):
            # A function of C that looks at nothing but its first two arguments: 0, unless they are the same.
            setattr(self, name, ctypes.CDLL(None).pthread_equal)


class NoEvent:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def since(self, earlier: Event) -> float:
        return 0.0


class NoStream:
    def __init__(self, gpu: Stub) -> None:
        self._gpu = gpu

    def record(self, *, timed: bool = False) -> NoEvent:
        return NoEvent()

    def wait(self, event: Event) -> None:
        pass

    def launch(self, launch: Launch) -> None:
        self._gpu.calls += 1
        self._gpu.driver.launch(_FUNCTION, launch, _STREAM)

    def copy(self, copies: Copies) -> None:
        self._gpu.calls += 1
        self._gpu.driver.copy_batch(np.asarray(copies, np.int64).reshape(-1, 3), _STREAM)

    def copy_rows(self, rows: Rows) -> None:
        self._gpu.calls += 1
        self._gpu.driver.copy_rows(rows, _STREAM)


class Stub:
    """Both a `Gpu` and its device. `calls`: of the driver, so far."""

    name = "a driver that does nothing"
    spread = Spread(8)

    def __init__(self) -> None:
        self.driver, self.calls = Driver(Library()), 0
        streams = [NoStream(self) for _ in range(4)]
        self.compute = NoStream(self)
        self.store, self.load = (
            StreamPair(streams[0], streams[1], True),
            StreamPair(streams[2], streams[3], False),
        )
        self._kept: dict[int, Array] = {}

    @property
    def device(self) -> Stub:
        return self

    def tensor(self, shape: Sequence[int]) -> Any:
        return np.empty(shape, np.uint16)  # whose pages nobody touches

    def lock_pages(self, memory: memoryview) -> Callable[[], None]:
        return lambda: None

    def matmuls(self, milliseconds: float) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def memory(self, nbytes: int) -> int:
        return self._keep(np.empty(nbytes, np.uint8))

    def upload(self, table: Array) -> int:
        return self._keep(table.copy())

    def host_memory(self, nbytes: int) -> Array:
        array = np.zeros(nbytes, np.uint8)
        self._keep(array)
        return array

    def _keep(self, array: Array) -> int:
        self._kept[int(array.ctypes.data)] = array
        return int(array.ctypes.data)

    def release(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            del self._kept[address]


def rigs(scale: Scale) -> Iterator[tuple[str, Rig]]:
    for model in MODELS:
        layout = layout_of(model, scale.large_layers * MODELS[model][0] // 32)
        for tokens, number in TOKENS.items():
            chunks = max(1, min(number, scale.prompt_chunks * 16) // layout.chunk_tokens)
            for order in ORDERS:
                with Rig(Stub(), layout, chunks, is_apart=bool(order), is_proven=True) as rig:
                    yield f"{model}, {tokens}{order}", rig


def enqueueing(scale: Scale) -> Samples:
    for what, rig in rigs(scale):
        store, load, bus = rig.device.store, rig.device.load, rig.nbytes / BUS
        for number in range(-2, scale.rounds):
            took: dict[tuple[str, bool], float] = {}
            for by_layer in (False, True):
                prompt, (ids, others) = rig.prompt(), rig.ids(2)
                _, took["save", by_layer] = rig.on_device((store, rig.save(prompt, ids, by_layer=by_layer)))
                _, took["load", by_layer] = rig.on_device((load, rig.load(prompt, others, by_layer=by_layer)))
            for way in ("save", "load") if number >= 0 else ():
                whole = took[way, False]
                yield f"enqueue a GPU's {way}, {what}", 100 * whole / bus, 100.0
                yield f"enqueue a GPU's {way}{BY_LAYER}, {what}", took[way, True] / whole, 1.0
