"""The driver's calls, as far as that goes without a driver: each argument in its place, of its size."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmtier.copy.cuda import device
from lmtier.copy.cuda.driver import Driver
from lmtier.copy.cuda.kernels import Geometry, Spread
from lmtier.errors import DeviceError
from tests.copy.test_cuda_kernels import given_as
from tests.copy.test_paging import chunk_ids, engine, make_layout, noise
from tests.cuda_shim import cpu

STREAM = 0x123456789ABCDEF0


def test_a_launch_hands_over_its_grid_and_arguments():
    made, machine = engine(make_layout()), cpu()
    geometry = Geometry(made.layout, made.shard, given_as(made.tensors))
    payload, ids = noise(made.layout.nbytes(made.shard)), chunk_ids(made.layout)
    machine.allow(*made.memory, payload)
    machine.name_memory()
    wanted = payload.copy()
    made.paged().gather(None, ids, wanted)
    driver, function = Driver(machine.library), ctypes.create_string_buffer(b"gather")
    where = geometry.pieces.ctypes.data, [payload.ctypes.data], [np.array([ids], np.int32)]
    for launch in geometry.copy_launches("gather", geometry.layers, *where, Spread(2)):
        driver.launch(ctypes.addressof(function), launch, STREAM)
    assert payload.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("count", [1, 10, 10_000])  # the last one in three batches
def test_copies_in_a_batch_equal_single_copies(count):
    driver, size = Driver(cpu().library), 10_000 // count
    source, one_by_one, batch = noise(10_000), np.zeros(10_000, np.uint8), np.zeros(10_000, np.uint8)
    for i in range(count):
        at = i * size
        driver.copy(one_by_one.ctypes.data + at, source.ctypes.data + at, size, STREAM)
    listed = np.array(
        [(batch.ctypes.data + i * size, source.ctypes.data + i * size, size) for i in range(count)], np.int64
    )
    driver.copy_batch(listed, STREAM)
    assert one_by_one.tobytes() == batch.tobytes() == source.tobytes()


def test_only_devices_that_address_pinned_memory_batch():
    driver = Driver(cpu().library)
    assert [driver.can_batch(device) for device in (6, 7)] == [False, True]


def test_a_thread_that_pins_does_so_beside_captures():
    library, mode = cpu().library, ctypes.c_int(0)
    Driver(library).allow_beside_captures()
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 2


def test_a_refused_driver_call_raises_the_drivers_words():
    driver, launch, nothing = Driver(cpu().library), next(launches()), np.zeros((1, 3), np.int64)
    for call in (
        lambda: driver.copy(0, 0, 0, 0),
        lambda: driver.copy_batch(nothing, 0),
        lambda: driver.launch(0, launch, 0),
    ):
        with pytest.raises(DeviceError, match=r"invalid argument \(1\)"):
            call()


def launches():
    made = engine(make_layout())
    geometry = Geometry(made.layout, made.shard, given_as(made.tensors))
    ids = [np.array([chunk_ids(made.layout)], np.int32)]
    return geometry.copy_launches("gather", geometry.layers, 0, [0], ids, Spread(1))


# ---- a worker of several touches only its own device


class Machine:
    """Four GPUs, as far as torch and cupy show them: which of them were touched, by name or as the current
    one. A first touch makes a context there, which takes half a gigabyte of another worker's memory."""

    def __init__(self) -> None:
        self.touched: list[int] = []
        self._thread = threading.local()

    @property
    def current(self) -> int:
        return getattr(self._thread, "current", 0)

    def set_current(self, index: int) -> None:
        self.touched.append(index)
        self._thread.current = index

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self._thread.current = self.current, index
        yield
        self._thread.current = before

    def touch(self, *_: object, **__: object) -> Any:
        """A call that goes to the current one."""
        self.touched.append(self.current)
        return self

    def named(self, index: int) -> Any:
        self.touched.append(index)
        return self

    def empty(self, count: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        self.named(int(device.removeprefix("cuda:")))
        return torch.empty(count, dtype=dtype)

    def zeros(self, count: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        self.touch()
        return torch.zeros(count, dtype=dtype)

    def from_numpy(self, array: np.ndarray) -> Any:
        tensor = torch.from_numpy(array)
        return SimpleNamespace(to=lambda device: self.named(int(device.removeprefix("cuda:"))) and tensor)

    def event(self, **_: object) -> Any:
        return SimpleNamespace(record=lambda stream: stream.query(), query=lambda: True)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:

        def stream(index: int) -> Any:
            return self.named(index) and SimpleNamespace(query=lambda: self.named(index))

        cuda = SimpleNamespace(
            device=self.device,
            current_device=lambda: self.current,
            current_stream=lambda index=None: stream(self.current if index is None else index),
            Stream=stream,
            Event=self.event,
            synchronize=self.named,
        )
        monkeypatch.setattr(device, "_cuda", cuda)
        seen = {"empty": self.empty, "zeros": self.zeros, "from_numpy": self.from_numpy, "uint8": torch.uint8}
        monkeypatch.setattr(device, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor, **seen))
        runtime = SimpleNamespace(
            setDevice=self.set_current, hostRegister=self.touch, hostUnregister=self.touch
        )
        cupy = SimpleNamespace(cuda=SimpleNamespace(Device=self.device, runtime=runtime))
        monkeypatch.setattr(device, "import_module", lambda name: cupy)
        function = SimpleNamespace(kernel=SimpleNamespace(ptr=1))
        module = SimpleNamespace(get_function=lambda name: function)
        monkeypatch.setattr(device, "compiled", lambda index: self.touch() and self.named(index) and module)
        monkeypatch.setattr(device, "Driver", lambda: Driver(Library(self)))


class Library:
    """Each of the driver's functions goes to the current GPU, and works."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> int:
            self._machine.touch()
            return 0

        return call


def test_a_worker_of_several_touches_only_its_own_gpu(monkeypatch):
    machine = Machine()
    machine.install(monkeypatch)
    gpu = device.CudaDevice(3)
    gpu.memory(100)
    gpu.upload(np.zeros(3))
    gpu.release([gpu.host_memory(100).ctypes.data])
    for stream in (gpu.compute, gpu.store.copies, gpu.load.kernels):
        stream.record(timed=True)
    lock = gpu.lock_pages(memoryview(bytearray(1000)), step=300)
    assert lock.wait(30)
    lock.close()
    assert set(machine.touched) == {3}
