"""What SGLang takes from kernels and drivers of GPUs, for an engine on a CPU.

SGLang publishes no kernels for CPUs. Its own native code computes the model. HiCache needs copies between its
two pools besides, which are both CPU memory here, and need not be page-locked. No memory is set aside for
others. All else is SGLang.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch


class Absent(ModuleType):
    """A part of SGLang's kernels: it can be imported, and not called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} needs a GPU")


def direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def direct_to_layer(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    for pages, layer in zip(src_ptrs, dst_ptrs, strict=True):
        layer[dst_indices] = pages[src_indices // page_size, layer_id, src_indices % page_size]


def direct_to_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, layer in enumerate(src_ptrs):
        pages = dst_ptrs[number // layers]
        pages[dst_indices // page_size, number % layers, dst_indices % page_size] = layer[src_indices]


def kernel_to_layer(**given: Any) -> None:
    """From the host's pool, which is by token, then by layer (`page_first`), or by layer."""
    for kind in ("_k", "_v"):
        source, target = given[f"src{kind}"], given[f"dst{kind}"]
        if "layer_id" in given:
            source = source[:, given["layer_id"]]
        target[given["dst_indices"]] = source[given["src_indices"]]


def kernel_to_host(**given: Any) -> None:
    """To the host's pool. Layers are tables of addresses, as a kernel reads them."""
    size, count = given["item_size"], given["num_layers"]
    pairs = list(zip(given["src_indices"].tolist(), given["dst_indices"].tolist(), strict=True))
    for kind in ("_k", "_v"):
        sources = given[f"src{kind}_layers"].tolist()
        for layer in range(count):
            if f"dst{kind}" in given:  # by token, then by layer
                start, step = given[f"dst{kind}"].data_ptr() + layer * size, given["dst_layout_dim"]
            else:
                start, step = int(given[f"dst{kind}_layers"][layer]), size
            for source, target in pairs:
                ctypes.memmove(start + target * step, sources[layer] + source * size, size)


COPIES: dict[str, Callable[..., None]] = {
    "transfer_kv_direct": direct,
    "transfer_kv_per_layer_direct_pf_lf": direct_to_layer,
    "transfer_kv_all_layer_direct_lf_pf": direct_to_pages,
    "transfer_kv_per_layer": kernel_to_layer,
    "transfer_kv_per_layer_pf_lf": kernel_to_layer,
    "transfer_kv_all_layer": kernel_to_host,
    "transfer_kv_all_layer_lf_pf": kernel_to_host,
}


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *given, pin_memory=False, **more: make(*given, **more)


def install() -> None:
    """In each process, before it imports SGLang."""
    for part in ("", ".flash_attn", ".kvcacheio", ".mamba", ".scalar_type", ".speculative", ".utils"):
        sys.modules[f"sgl_kernel{part}"] = Absent(f"sgl_kernel{part}")
    # torchvision's operators are linked with CUDA's libraries. SGLang wants its names alone.
    register = torch.library.register_fake

    def register_fake(op: Any, *given: Any, **more: Any) -> Any:
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register(op, *given, **more)

    torch.library.register_fake = register_fake

    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    tensors: Any = torch.Tensor
    tensors.pin_memory = lambda tensor: tensor

    from sglang.srt.mem_cache.pool_host import base, common, mha

    # HiCache leaves 10 GiB of memory to others, and does not start where less is free. Its pools have 20 MB
    # here, and how much is free is a matter of what other tests run.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    for module in (common, mha):
        module._cuda_host_register = module._cuda_host_unregister = lambda *_, **__: None
        for name, copy in COPIES.items():
            setattr(module, name, copy)
