"""The few calls of libcuda that torch and cupy lack, or make slowly: launches and copies.

It needs neither torch nor a GPU. Any library with these functions works, also one whose calls do nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from lmtier.copy.cuda.kernels import Launch
from lmtier.copy.cuda.streams import Rows
from lmtier.errors import DeviceError
from lmtier.format.layout import Array

_POINTER = ctypes.c_void_p
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_MOST = 4096  # copies of one batch: drivers have crashed on tens of thousands


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. Sources are read in stream order; any other order reads KV too early."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("to_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D, between unified addresses, from which the driver finds the kind of memory."""

    _fields_ = [
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_kind", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_step", ctypes.c_size_t),
        ("to_x", ctypes.c_size_t),
        ("to_y", ctypes.c_size_t),
        ("to_kind", ctypes.c_int),
        ("to_host", ctypes.c_void_p),
        ("to", ctypes.c_uint64),
        ("to_array", ctypes.c_void_p),
        ("to_step", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("number", ctypes.c_size_t),
    ]


def _address(argument: Any) -> int:
    """The address of a number of ctypes, or of an array. numpy takes ten times as long to say its own."""
    is_number = isinstance(argument, (ctypes.c_uint32, ctypes.c_uint64))
    return ctypes.addressof(argument if is_number else ctypes.c_char.from_buffer(argument))


class Driver:
    def __init__(self, library: Any = None) -> None:
        self._cuda = library or ctypes.CDLL("libcuda.so.1")
        # Set the argument types once, so that a call takes plain numbers: launches delay an engine's step.
        self._launch = self._cuda.cuLaunchKernel
        self._launch.argtypes = [_POINTER, *[ctypes.c_uint] * 7, _POINTER, _POINTER, _POINTER]
        self._copy = self._cuda.cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, _POINTER]
        self._batch: Any = None
        for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"):
            try:
                self._batch = getattr(self._cuda, name)
            except AttributeError:
                continue
            # The first version reports which copy failed, the second does not.
            self._tells_which = not name.endswith("_v2")
            break

    def launch(self, function: int, launch: Launch, stream: int) -> None:
        kernel, x, y, threads, arguments = launch
        pointers = (_POINTER * len(arguments))(*map(_address, arguments))
        self._check(self._launch(function, x, y, 1, threads, 1, 1, 0, stream, pointers, None), kernel)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._check(self._copy(to, source, nbytes, stream), "a copy")

    def copy_rows(self, rows: Rows, stream: int) -> None:
        said = _Copy2D(source_kind=_UNIFIED, to_kind=_UNIFIED, **rows._asdict())
        self._check(self._cuda.cuMemcpy2DAsync_v2(ctypes.byref(said), _POINTER(stream)), "a copy of rows")

    def copy_batch(self, copies: Array, stream: int) -> None:
        """[n, (to, source, bytes)]"""
        for first in range(0, len(copies), _MOST):
            self._batch_of(copies[first : first + _MOST], stream)

    def _batch_of(self, copies: Array, stream: int) -> None:
        columns = np.array(copies.T, np.uint64, order="C")
        attributes, first = _CopyAttributes(order=_STREAM_ORDER), ctypes.c_size_t(0)
        failed = ctypes.c_size_t()
        address, column = columns.ctypes.data, columns.strides[0]
        arrays = [ctypes.c_void_p(address + number * column) for number in range(3)]
        count = ctypes.c_size_t(len(copies))
        said = ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)
        which = [ctypes.byref(failed)] if self._tells_which else []
        self._check(self._batch(*arrays, count, *said, *which, ctypes.c_void_p(stream)), "a batch of copies")

    def allow_beside_captures(self) -> None:
        """Allow this thread's calls while other threads capture graphs.

        Otherwise they fail or break the graphs.
        """
        mode = ctypes.c_int(_RELAXED)
        self._check(self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "a thread's mode")

    def can_batch(self, device: int) -> bool:
        """Whether the driver has batches and accepts addresses of page-locked memory unchanged."""
        says, asked = ctypes.c_int(), (ctypes.c_int(_HOST_POINTERS), ctypes.c_int(device))
        self._check(self._cuda.cuDeviceGetAttribute(ctypes.byref(says), *asked), "a device's attribute")
        return self._batch is not None and bool(says.value)

    def _check(self, result: int, what: str) -> None:
        if result:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(result), ctypes.byref(text))
            raise DeviceError(f"{what}: {(text.value or b'unknown error').decode()} ({result})")
