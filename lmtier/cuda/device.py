"""The GPU itself: torch's streams and events, cupy's compiler, the driver's calls for launches and copies.

The only module of lmtier that needs a GPU, and so the only one that no test without one has run. It decides
nothing: what is launched and copied, and in which order, is said by `kernels`, `paging` and `streams`.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

import numpy as np
import torch

from lmtier.cuda.kernels import KERNELS, Launch, Spread, compiled
from lmtier.cuda.pinned import STEP, Pinning
from lmtier.cuda.streams import Copies, Lane
from lmtier.errors import LMTierError
from lmtier.layout import Array

_cuda: Any = torch.cuda  # which is typed in part only
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PORTABLE, _MAPPED = 1, 2  # for registrations: in every context, and within reach of kernels
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_MOST = 4096  # copies of one batch: drivers were seen to crash on tens of thousands

DEFAULT_SMS = 8


class CudaError(LMTierError):
    """A call of the driver has failed: mostly one before it, that went on after it had returned."""


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. Sources are read in the order of the stream: any other reads KV too early."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("to_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class Driver:
    """The few calls of libcuda that torch and cupy do not have, or make slower."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._cuda = library or ctypes.CDLL("libcuda.so.1")
        self._batch: Any = None
        for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"):
            try:
                self._batch = getattr(self._cuda, name)
            except AttributeError:
                continue
            # The first version tells which copy failed, the second does not.
            self._tells_which = not name.endswith("_v2")
            break

    def launch(self, function: int, launch: Launch, stream: int) -> None:
        held = [np.asarray(each) for each in launch.arguments]
        arguments = (ctypes.c_void_p * len(held))(*[each.ctypes.data for each in held])
        grid = [ctypes.c_uint(each) for each in (launch.x, launch.y, 1, launch.threads, 1, 1, 0)]
        where = ctypes.c_void_p(function), *grid, ctypes.c_void_p(stream)
        self._check(self._cuda.cuLaunchKernel(*where, arguments, None), launch.kernel)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        addresses = ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
        self._check(self._cuda.cuMemcpyAsync(*addresses, ctypes.c_void_p(stream)), "a copy")

    def copy_batch(self, copies: Array, stream: int) -> None:
        """[n, (to, source, bytes)]"""
        for first in range(0, len(copies), _MOST):
            self._batch_of(copies[first : first + _MOST], stream)

    def _batch_of(self, copies: Array, stream: int) -> None:
        columns = np.array(copies.T, np.uint64, order="C")
        attributes, first = _CopyAttributes(order=_STREAM_ORDER), ctypes.c_size_t(0)
        failed = ctypes.c_size_t()
        arrays = [ctypes.c_void_p(column.ctypes.data) for column in columns]
        count = ctypes.c_size_t(len(copies))
        said = ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)
        which = [ctypes.byref(failed)] if self._tells_which else []
        self._check(self._batch(*arrays, count, *said, *which, ctypes.c_void_p(stream)), "a batch of copies")

    def allow_beside_captures(self) -> None:
        """In this thread. Otherwise what it calls fails, or breaks graphs that others capture meanwhile."""
        mode = ctypes.c_int(_RELAXED)
        self._check(self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "a thread's mode")

    def can_batch(self, device: int) -> bool:
        """Whether it has batches, and takes addresses of pinned memory as they are."""
        says, asked = ctypes.c_int(), (ctypes.c_int(_HOST_POINTERS), ctypes.c_int(device))
        self._check(self._cuda.cuDeviceGetAttribute(ctypes.byref(says), *asked), "a device's attribute")
        return self._batch is not None and bool(says.value)

    def _check(self, result: int, what: str) -> None:
        if result:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(result), ctypes.byref(text))
            raise CudaError(f"{what}: {(text.value or b'unknown error').decode()} ({result})")


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


class CudaDevice:
    """The GPU that is current in torch. `sms` at most are taken by one of our kernels."""

    def __init__(self, *, sms: int = DEFAULT_SMS) -> None:
        self.index = torch.cuda.current_device()
        self.spread = Spread(sms)
        self.driver = Driver()
        self.has_batches = self.driver.can_batch(self.index)
        module = compiled()
        self.functions = {name: int(module.get_function(name).kernel.ptr) for name in KERNELS}
        self.store, self.load = (Lane(self._stream(), self._stream(), stores) for stores in (True, False))
        self.pinning: Pinning | None = None
        self._kept: list[torch.Tensor] = []

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
        self._kept.append(tensor)
        # What torch hands out may still be in use on the stream on which it was freed; ours are others.
        torch.cuda.synchronize(self.index)
        return int(tensor.data_ptr())

    def host_memory(self, nbytes: int) -> Array:
        tensor = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        self._kept.append(tensor)
        array: Array = tensor.numpy()
        return array

    def pin(self, memory: memoryview, step: int = STEP) -> Pinning:
        """Begin to pin the slab; in every process that maps it."""
        runtime = import_module("cupy").cuda.runtime

        def register(address: int, nbytes: int) -> None:
            runtime.setDevice(self.index)  # of the thread that pins
            self.driver.allow_beside_captures()
            runtime.hostRegister(address, nbytes, _PORTABLE | _MAPPED)

        if self.pinning is not None:
            self.pinning.close()
        self.pinning = Pinning(memory, register, runtime.hostUnregister, step=step)
        self.pinning.start()
        return self.pinning
