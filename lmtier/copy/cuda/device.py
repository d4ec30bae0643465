"""The GPU itself: torch's streams and events, cupy's compiler.

This is the only module of lmtier that needs a GPU, so tests without a GPU do not run it. It decides nothing:
`kernels`, `paging` and `streams` decide what is launched and copied, and in which order.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from lmtier.copy.cuda.driver import Driver
from lmtier.copy.cuda.kernels import KERNELS, Launch, Spread, compiled
from lmtier.copy.cuda.page_lock import STEP, PageLock
from lmtier.copy.cuda.streams import Copies, Rows, StreamPair
from lmtier.format.layout import Array

_cuda: Any = torch.cuda  # it has types only in part
_PORTABLE, _MAPPED = 1, 2  # for registrations: valid in every context, and accessible to kernels

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
        page_lock = device.page_lock
        if page_lock is not None:
            listed = page_lock.split_at_steps(listed)
        # The driver batches the copies that it can make asynchronously; for the others this thread waits.
        if len(listed) > 1 and device.has_batches and page_lock is not None and page_lock.holds(listed):
            device.driver.copy_batch(listed, stream)
            return
        for to, source, nbytes in listed.tolist():
            device.driver.copy(to, source, nbytes, stream)

    def copy_rows(self, rows: Rows) -> None:
        device, stream = self._device, self.stream.cuda_stream
        for part in device.page_lock.parts(rows) if device.page_lock is not None else [rows]:
            device.driver.copy_rows(part, stream)


class CudaDevice:
    """A GPU, by its number in torch, or the current one. A kernel uses at most `sms` SMs."""

    def __init__(self, index: int | None = None, *, sms: int = DEFAULT_SMS) -> None:
        self.index = torch.cuda.current_device() if index is None else index
        self.spread = Spread(sms)
        with _cuda.device(self.index):  # cupy compiles for the driver's current device
            _cuda.current_stream().query()
            self.driver = Driver()
            self.has_batches = self.driver.can_batch(self.index)
            with import_module("cupy").cuda.Device(self.index):
                module = compiled(self.index)
                self.functions = {name: int(module.get_function(name).kernel.ptr) for name in KERNELS}
        self.store, self.load = (
            StreamPair(self._stream(), self._stream(), stores) for stores in (True, False)
        )
        self.page_lock: PageLock | None = None
        self._kept: dict[int, torch.Tensor] = {}
        """The memory that is kept, by address."""

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
        # Memory from torch may still be in use on the stream that freed it, and our streams are others.
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

    def lock_pages(self, memory: memoryview, step: int = STEP) -> PageLock:
        """Begin to page-lock the slab.

        Every process that maps it does this. The caller unlocks an earlier one.
        """
        runtime = import_module("cupy").cuda.runtime

        def register(address: int, nbytes: int) -> None:
            runtime.setDevice(self.index)  # for the locking thread
            self.driver.allow_beside_captures()
            runtime.hostRegister(address, nbytes, _PORTABLE | _MAPPED)

        def unregister(address: int) -> None:
            with _cuda.device(self.index):  # for the thread that ends it
                runtime.hostUnregister(address)

        self.page_lock = PageLock(memory, register, unregister, step=step)
        self.page_lock.start()
        return self.page_lock
