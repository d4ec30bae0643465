"""The GPU itself: torch's streams and events, cupy's compiler.

The only module of lmtier that needs a GPU, and so the only one that no test without one has run. It decides
nothing: what is launched and copied, and in which order, is said by `kernels`, `paging` and `streams`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from lmtier.cuda.driver import Driver
from lmtier.cuda.kernels import KERNELS, Launch, Spread, compiled
from lmtier.cuda.pinned import STEP, Pinning
from lmtier.cuda.streams import Copies, Lane, Rows
from lmtier.layout import Array

_cuda: Any = torch.cuda  # which is typed in part only
_PORTABLE, _MAPPED = 1, 2  # for registrations: in every context, and within reach of kernels

DEFAULT_SMS = 8


class CudaEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, earlier: Any) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaStream:
    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._device, self.stream = device, stream

    def record(self, *, timed: bool = False) -> CudaEvent:
        event = _cuda.Event(enable_timing=timed)
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event.event)

    def launch(self, launch: Launch) -> None:
        device = self._device
        device.driver.launch(device.functions[launch.kernel], launch, self.stream.cuda_stream)

    def copy(self, copies: Copies) -> None:
        device, stream = self._device, self.stream.cuda_stream
        listed = np.asarray(copies, np.int64).reshape(-1, 3)
        pinning = device.pinning
        if pinning is not None:
            listed = pinning.cut(listed)
        # The driver makes a batch of what it can copy by itself; the rest it copies while we wait.
        if len(listed) > 1 and device.has_batches and pinning is not None and pinning.holds(listed):
            device.driver.copy_batch(listed, stream)
            return
        for to, source, nbytes in listed.tolist():
            device.driver.copy(to, source, nbytes, stream)

    def copy_rows(self, rows: Rows) -> None:
        device, stream = self._device, self.stream.cuda_stream
        for part in device.pinning.parts(rows) if device.pinning is not None else [rows]:
            device.driver.copy_rows(part, stream)


class CudaDevice:
    """A GPU, by its number in torch, or the one that is current. `sms` at most are taken by one kernel."""

    def __init__(self, index: int | None = None, *, sms: int = DEFAULT_SMS) -> None:
        self.index = torch.cuda.current_device() if index is None else index
        self.spread = Spread(sms)
        with _cuda.device(self.index):  # cupy compiles for what is current in the driver
            _cuda.current_stream().query()
            self.driver = Driver()
            self.has_batches = self.driver.can_batch(self.index)
            with import_module("cupy").cuda.Device(self.index):
                module = compiled(self.index)
                self.functions = {name: int(module.get_function(name).kernel.ptr) for name in KERNELS}
        self.store, self.load = (Lane(self._stream(), self._stream(), stores) for stores in (True, False))
        self.pinning: Pinning | None = None
        self._kept: dict[int, torch.Tensor] = {}
        """By address."""

    def _stream(self) -> CudaStream:
        return CudaStream(self, _cuda.Stream(self.index))

    @property
    def compute(self) -> CudaStream:
        return CudaStream(self, torch.cuda.current_stream(self.index))

    def memory(self, nbytes: int) -> int:
        return self._keep(torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self.index}"))

    def upload(self, table: Array) -> int:
        raw = np.frombuffer(table.tobytes(), np.uint8).copy()
        return self._keep(torch.from_numpy(raw).to(f"cuda:{self.index}"))

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept[int(tensor.data_ptr())] = tensor
        # What torch hands out may still be in use on the stream on which it was freed; ours are others.
        torch.cuda.synchronize(self.index)
        return int(tensor.data_ptr())

    def host_memory(self, nbytes: int) -> Array:
        with _cuda.device(self.index):
            tensor = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        self._kept[int(tensor.data_ptr())] = tensor
        array: Array = tensor.numpy()
        return array

    def release(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            del self._kept[address]

    def pin(self, memory: memoryview, step: int = STEP) -> Pinning:
        """Begin to pin the slab, in every process that maps it. The caller ends what was pinned before."""
        runtime = import_module("cupy").cuda.runtime

        def register(address: int, nbytes: int) -> None:
            runtime.setDevice(self.index)  # of the thread that pins
            self.driver.allow_beside_captures()
            runtime.hostRegister(address, nbytes, _PORTABLE | _MAPPED)

        def unregister(address: int) -> None:
            with _cuda.device(self.index):  # of whatever thread ends it
                runtime.hostUnregister(address)

        self.pinning = Pinning(memory, register, unregister, step=step)
        self.pinning.start()
        return self.pinning
