"""One layer's tensors as numpy views in the declared packing, and the conversion of other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm
from typing import Any

import numpy as np

from lmtier.copy.blocks import Ids, check_dtype
from lmtier.errors import LayoutError
from lmtier.format.layout import Array, Layout, Shard


class LayerKV:
    """One layer's tensors, checked against the layout. Elements are unsigned integers."""

    def __init__(
        self, layout: Layout, shard: Shard, number: int, tensors: tuple[Any, ...], table: int
    ) -> None:
        self.layout, self.number, self.table = layout, number, table
        _, k, v = layout.layers[number]
        heads, size = layout.heads(number, shard), layout.block_tokens
        if len(tensors) == 1:
            shapes: list[list[Any]] = [[heads, size, k + v]]
        elif len(tensors) == 2 and layout.packing in ("planes", "token"):
            shapes = [[heads, size, k], [heads, size, v]]
        else:
            raise LayoutError(
                f"layer {number}: {len(tensors)} tensors do not make packing {layout.packing!r}"
            )
        self.views = [_as_array(tensor, layout, number) for tensor in tensors]
        for view, shape in zip(self.views, shapes, strict=True):
            got = list(view.shape[1:])
            if layout.is_opaque:
                fits = got[:1] == [heads] and int(np.prod(got[1:])) * view.itemsize == k and view.ndim > 2
                shape = [heads, f"… ({k} bytes)"]
            else:
                fits = got == shape
            if not fits or len(view) != len(self.views[0]):
                raise LayoutError(
                    f"layer {number}: expected [blocks, {', '.join(map(str, shape))}], got {list(view.shape)}"
                )
        self.blocks = len(self.views[0])
        self.roots = [_root(tensor) for tensor in tensors]
        self.at, self.end = layout.offsets(shard)[number - shard.first_layer :][:2]
        self.outer = layout.blocks, heads, -1

    def payload_views(self, raw: Array) -> Sequence[Array]:
        """Views onto raw head-blocks [B, H, bytes] of this layout that match `views`, one for one."""
        if len(self.views) == 2:
            return self.layout.split(raw, self.number)
        (view,) = self.views
        return [raw.view(view.dtype).reshape(*raw.shape[:2], *view.shape[2:])]

    def planes(self) -> Sequence[Array]:
        """Views [blocks, H, N, D] of K, and V if there is one, onto the engine's memory."""
        if len(self.views) == 2:
            return self.views
        (view,) = self.views
        if self.layout.packing == "latent":
            return self.views
        if self.layout.packing == "token":
            k = self.layout.layers[self.number].k
            return view[..., :k], view[..., k:]
        blocks, heads, size, width = view.shape
        if view.strides[2:] != (width * view.itemsize, view.itemsize):
            raise LayoutError(
                f"layer {self.number}: packing {self.layout.packing!r} needs each head's block in one piece"
            )
        flat = np.lib.stride_tricks.as_strided(
            view, (blocks, heads, size * width), (*view.strides[:2], view.itemsize)
        )
        return self.layout.split(flat, self.number)

    def convert(self, stored: Layout, raw: Array, heads: slice, ids: Ids, first_block: int) -> None:
        """Convert head-blocks `raw` [B, H, bytes] of layout `stored` into our `heads` of blocks `ids`."""
        if (stored.packing, stored.block_tokens) == (self.layout.packing, self.layout.block_tokens):
            for view, source in zip(self.views, self.payload_views(raw), strict=True):
                view[:, heads][ids] = source[first_block:]
            return
        # Tokens move in groups of the common divisor of both block sizes; the two block grids repeat
        # together every `period` tokens, so one strided copy takes the same group of every period.
        n, m = self.layout.block_tokens, stored.block_tokens
        group, period = gcd(n, m), lcm(n, m)
        for view, source in zip(self.planes(), stored.split(raw, self.number), strict=True):
            for token in range(0, period, group):
                (block, slot), (stored_block, place) = divmod(token, n), divmod(token, m)
                skip = max(0, -(-(first_block - block) // (period // n)))
                own_ids = ids[block + skip * (period // n) - first_block :: period // n]
                found = source[stored_block + skip * (period // m) :: period // m, :, place : place + group]
                view[:, heads, slot : slot + group][own_ids] = found


def _as_array(tensor: Any, layout: Layout, number: int) -> Array:
    """A torch CPU tensor or numpy array as a writable numpy view of unsigned integers."""
    if isinstance(tensor, np.ndarray):
        array: Array = tensor
        kind, dtype = array.dtype.kind, str(array.dtype)
    else:
        import torch

        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            where = getattr(tensor, "device", type(tensor).__name__)
            raise LayoutError(f"layer {number}: expected a CPU tensor or a numpy array, got {where}")
        kind, dtype = ("f" if tensor.is_floating_point() else "i"), str(tensor.dtype)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        array = tensor.detach().view(bits).numpy()
    check_dtype(layout, number, dtype, array.itemsize, is_integer=kind in "iu")
    if not array.size or min(array.strides) < 0 or not array.flags.writeable:
        raise LayoutError(f"layer {number}: the tensor is empty, reversed or read-only: {list(array.shape)}")
    return array.view(f"u{array.itemsize}")


def _root(tensor: Any) -> int:
    """The address of the allocation a tensor lives in."""
    if not isinstance(tensor, np.ndarray):
        return int(tensor.untyped_storage().data_ptr())
    while isinstance(tensor.base, np.ndarray):
        tensor = tensor.base
    return int(tensor.ctypes.data)


def address(array: Array) -> int:
    return int(array.ctypes.data)


def reach(shape: Sequence[int], strides: Sequence[int], item: int) -> int:
    """Bytes from the first element to the end of the last."""
    return item + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
