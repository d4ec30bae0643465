"""The places of the buffer, CPU memory or the model's GPU, and the copies between it and the slab."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import lmtier
from lmtier.client.client import Client
from lmtier.copy.cuda.mover import CudaMover
from lmtier.copy.cuda.page_lock import PageLock, PageLockingDevice
from lmtier.copy.cuda.paging import CudaKV
from lmtier.copy.gpu_copies import GpuCopies
from lmtier.copy.mover import Mover, RankKV, Save
from lmtier.copy.paging import PagedKV
from lmtier.errors import ConfigError, MisuseError, log
from lmtier.format.keys import Identity
from lmtier.format.layout import Layout

_GPU_STAGING = 8 << 20  # only for small chunks: larger ones are copied directly


class InCpuMemory:
    """The buffer in this process's memory. Copies are done when a call returns."""

    device = torch.device("cpu")

    def __init__(self, cache: lmtier.Cache | Client) -> None:
        if cache.config.gpu is not None:
            raise MisuseError(
                f"{cache.config.gpu}: copies in GPU memory are for models whose KV is on one GPU, "
                "with cupy; leave that tier out"
            )
        self._cache = cache

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    def current(self) -> AbstractContextManager[Any]:
        """The context in which copies are enqueued and kernels are launched."""
        return nullcontext()

    def kv(self, layout: Layout, blocks: Sequence[Tensor]) -> PagedKV:
        return PagedKV(layout, layout.whole, blocks)

    def mover(self, kv: RankKV, identity: Identity) -> Mover:
        """A mover that is not proven yet."""
        return Mover(self._cache, kv, identity)

    def give_back(self, kv: RankKV) -> None:
        """Free everything that `kv` owns beside the blocks, which is nothing. It is no longer used."""

    def computed(self, save: Save, layer: int) -> None:
        """One layer of a save is in the buffer."""
        save.layer(layer)  # now, while a processor's caches have it

    def commit(self, save: Save) -> None:
        """All of them are."""
        save.commit()

    def follow(self) -> None:
        """The slab may have changed. All copies have ended."""

    def wait_until_pinned(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        """All copies have ended, and no more follow."""


class InGpuMemory:
    """The buffer on the model's GPU, which copies to and from the pinned slab while it computes."""

    def __init__(self, cache: lmtier.Cache | Client, copies: PageLockingDevice, device: torch.device) -> None:
        self.device = device
        self._cache, self._copies = cache, copies
        self._slab: object = None
        self._page_lock: PageLock | None = None
        self._gpu_copies: GpuCopies | None = None
        """The gpu:// tier. It outlives the buffers, which grow."""
        spec = cache.config.gpu
        if spec is not None and spec.capacity is not None:
            try:
                self._held = copies.memory(spec.capacity)
            except torch.cuda.OutOfMemoryError:
                raise ConfigError(f"{spec}: the GPU has no room for it; choose a smaller capacity") from None
            self._gpu_copies = GpuCopies(spec.capacity, spec.policy)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def current(self) -> AbstractContextManager[Any]:
        """Make the model's GPU current: kernels are launched on the current GPU."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def kv(self, layout: Layout, blocks: Sequence[Tensor]) -> CudaKV:
        return CudaKV(layout, layout.whole, blocks, self._copies, staging_bytes=_GPU_STAGING)

    def mover(self, kv: RankKV, identity: Identity) -> Mover:
        assert isinstance(kv, CudaKV)
        if self._gpu_copies is not None:
            kv.allocate_slots(self._gpu_copies.extents.capacity, self._held)
        return CudaMover(self._cache, kv, identity, layerwise=False, gpu_copies=self._gpu_copies)

    def give_back(self, kv: RankKV) -> None:
        assert isinstance(kv, CudaKV)
        for lane in (self._copies.store, self._copies.load):  # also work of a failed call
            lane.record().wait()
        kv.close()

    def computed(self, save: Save, layer: int) -> None:
        """Nothing to do until all layers are saved: calls for each layer would delay the model."""

    def commit(self, save: Save) -> None:
        save.all()
        save.commit()

    def follow(self) -> None:
        slab = self._cache.slab
        if slab is not self._slab:  # a restarted server has another slab
            self._unlock()
            self._slab, self._page_lock = slab, self._copies.lock_pages(slab.view(0, slab.capacity))

    def wait_until_pinned(self, timeout: float) -> bool:
        pinning = self._page_lock
        return pinning is not None and pinning.wait(timeout) and not pinning.failure

    def close(self) -> None:
        self._unlock()
        if self._gpu_copies is not None:
            self._copies.release([self._held])
            self._gpu_copies = None

    def _unlock(self) -> None:
        if self._page_lock is not None:
            self._page_lock.close()
            self._page_lock = None


def place_for(cache: lmtier.Cache | Client, devices: set[torch.device]) -> InCpuMemory | InGpuMemory:
    """The place on the GPU if all KV is on one GPU and the packages for copies are installed."""
    device = next(iter(devices))
    if len(devices) > 1 or device.type != "cuda":
        return InCpuMemory(cache)
    try:
        copies: PageLockingDevice = import_module("lmtier.copy.cuda.device").CudaDevice(device.index)
    except Exception as error:  # noqa: BLE001 the import, the driver and the compiler have their own
        return beside_the_gpu(cache, device, error)
    return InGpuMemory(cache, copies, device)


def beside_the_gpu(cache: lmtier.Cache | Client, device: torch.device, error: Exception) -> InCpuMemory:
    log.warning(
        "lmtier: KV goes from %s to the tiers through a buffer in CPU memory, which is slower (%s): "
        "install lmtier[cuda12] or lmtier[cuda13], as the driver is",
        device,
        error,
    )
    return InCpuMemory(cache)
