"""One tensor as addresses, for fingerprints and the canary. It shares no code with the copies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lmtier.copy.blocks import RawOrder
from lmtier.copy.layers import reach


class RawTensor:
    """An independent view of a tensor, to check gather and scatter."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor  # keeps the memory alive
        if isinstance(tensor, np.ndarray):
            address, item, strides = tensor.ctypes.data, tensor.itemsize, tensor.strides
        else:
            address, item = tensor.data_ptr(), tensor.element_size()
            strides = tuple(stride * item for stride in tensor.stride())
        shape = tuple(tensor.shape)
        memory = (ctypes.c_uint8 * reach(shape, strides, item)).from_address(address)
        self.memory = memoryview(memory).cast("B")
        self.step = strides[0]
        self.order = raw_order(item, shape, strides)
        axes = [(-strides[axis], axis) for axis, _ in self.order[1]]
        self.length = item
        while axes and -axes[-1][0] == self.length:
            self.length *= shape[axes.pop()[1]]
        self.starts = [0]
        for stride, axis in axes:
            self.starts = [at - stride * i for at in self.starts for i in range(shape[axis])]

    def pieces(self, block: int) -> Iterator[memoryview]:
        for start in self.starts:
            at = block * self.step + start
            yield self.memory[at : at + self.length]


def raw_order(item: int, shape: Sequence[int], strides: Sequence[int]) -> RawOrder:
    """The axes within a block in the order of memory, outermost first."""
    axes = sorted((-strides[axis], axis) for axis in range(1, len(shape)) if shape[axis] > 1)
    return item, [(axis, shape[axis]) for _, axis in axes]
