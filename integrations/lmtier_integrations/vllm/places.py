"""The place of the engine's KV, a CPU or a GPU: its mover, the time of its steps, and pinning for a GPU.

Modules for a GPU are only imported if there is one.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from vllm.config import VllmConfig

from lmtier.client.client import Client
from lmtier.config import TierSpec
from lmtier.copy.copy_threads import CopyThreads
from lmtier.copy.cuda.mover import CudaMover
from lmtier.copy.cuda.page_lock import PageLock, PageLockingDevice
from lmtier.copy.cuda.paging import CudaKV
from lmtier.copy.cuda.streams import Event
from lmtier.copy.mover import Blocks, Load, Mover
from lmtier.copy.paging import PagedKV
from lmtier.core.grant import Grant
from lmtier.errors import ConfigError, LayoutError
from lmtier.format.keys import Identity
from lmtier_integrations.vllm.kv import DeclaredKV
from lmtier_integrations.vllm.messages import PrefillWork, SlotOfEachChunk
from lmtier_integrations.vllm.stats import Stats

_HELPERS = 3  # more threads that copy on a CPU: a few use the full speed of memory


class OnCpu:
    is_asynchronous = False
    """Whether saves and loads continue after their calls have returned."""
    is_busy = False
    """Whether it needs a step although nothing is planned."""
    is_locked = True
    """Whether copies reach all of the server's memory without a detour."""

    def __init__(
        self,
        client: Client,
        declared: DeclaredKV,
        identity: Identity,
        gpu: TierSpec | None,
        states: DeclaredKV | None = None,
    ) -> None:
        if gpu is not None:
            raise ConfigError(f"{gpu}: this engine keeps its KV on a CPU; leave that tier out")
        cores = _cores()
        self._crew = CopyThreads(min(_HELPERS, len(cores) - 1), cores)
        self.mover = self._mover(client, declared, identity)
        self.states = self._mover(client, states, identity) if states is not None else None
        """What moves states, if there are any."""
        self._work: PrefillWork | None = None
        self._began = 0.0

    def _mover(self, client: Client, declared: DeclaredKV, identity: Identity) -> Mover:
        kv = PagedKV(
            *(declared.layout, declared.shard, declared.tensors, self._crew),
            tables=declared.table_of_tensor,
            table_count=declared.table_count,
        )
        return Mover(client, kv, identity, ranks=declared.shards)

    def begin(self, work: PrefillWork | None, *, waits: bool) -> None:
        """The computation of a step begins. `waits`: it waits for loads."""
        self._work, self._began = work, time.perf_counter()

    def end(self, copying: float) -> Iterator[tuple[PrefillWork, float]]:
        """Steps whose computing time is known now, in seconds. `copying`: seconds of copies in this step."""
        if self._work is not None:
            yield self._work, time.perf_counter() - self._began - copying

    def load(
        self, grant: Grant, blocks: Blocks, computed_tokens: int, gpu_slots: SlotOfEachChunk | None
    ) -> Load:
        """Begin a load. The caller ends its leases."""
        return self.mover.begin(grant, blocks, computed_tokens=computed_tokens)

    def can_save(self, grant: Grant) -> bool:
        """Whether a save does not delay the engine."""
        return True

    def follow(self, client: Client) -> None:
        """The client may see another slab than before."""

    def add_to(self, stats: Stats) -> None:
        """Add the changes since the last call to `stats`."""

    def close(self) -> None:
        """Wait for unfinished copies: the tensors and the slab are freed next."""
        self._crew.close()


def _cores() -> set[int]:
    """The cores of all threads of this process. Each thread may be bound to one, and waits while we copy."""
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            cores |= os.sched_getaffinity(int(thread))
    return cores


class OnGpu:
    is_asynchronous = True
    states = None

    def __init__(
        self,
        client: Client,
        declared: DeclaredKV,
        identity: Identity,
        gpu: TierSpec | None,
        *,
        device: PageLockingDevice,
        layerwise: bool,
        pins_at_start: bool,
    ) -> None:
        self._device = device
        kv = CudaKV(
            *(declared.layout, declared.shard, declared.tensors, device),
            tables=declared.table_of_tensor,
            table_count=declared.table_count,
        )
        if gpu is not None and gpu.capacity:
            kv.allocate_slots(gpu.capacity)
        self.mover = CudaMover(client, kv, identity, ranks=declared.shards, layerwise=layerwise)
        self._run = 0
        self._page_lock: PageLock | None = None
        """The page lock of the present slab."""
        self._pins_at_start = pins_at_start
        self._pin_seconds = 0.0
        """Seconds for earlier slabs."""
        self._reported = dict.fromkeys(("pinned_bytes", "pin_seconds", "slab_pinned", "slab_pin_failed"), 0.0)
        self._began: tuple[PrefillWork, Event] | None = None
        self._computing: deque[tuple[PrefillWork, Event, Event]] = deque()
        """The steps to measure, with the events before and after each."""

    @property
    def is_busy(self) -> bool:
        return bool(self._computing) or self._page_lock is None or self._now() != self._reported

    @property
    def is_locked(self) -> bool:
        return self._page_lock is not None and self._page_lock.is_whole

    def begin(self, work: PrefillWork | None, *, waits: bool) -> None:
        # If a step waits for loads, the time of the wait is not known, so it is not measured.
        self._began = None
        if work is not None and not waits:
            self._began = work, self._device.compute.record(timed=True)

    def end(self, copying: float) -> Iterator[tuple[PrefillWork, float]]:
        """The device's time between the two calls. It is known in a later step: this one is only enqueued."""
        if self._began is not None:
            self._computing.append((*self._began, self._device.compute.record(timed=True)))
        while self._computing and self._computing[0][2].done():
            work, began, ended = self._computing.popleft()
            yield work, ended.since(began)

    def load(
        self, grant: Grant, blocks: Blocks, computed_tokens: int, gpu_slots: SlotOfEachChunk | None
    ) -> Load:
        return self.mover.begin(grant, blocks, computed_tokens=computed_tokens, gpu_slots=gpu_slots)

    def can_save(self, grant: Grant) -> bool:
        """Whether the memory is page-locked. A copy to other memory would block the engine's thread."""
        shard_number, nbytes = self.mover.number, self.mover.kv.nbytes
        last_offset = max((offsets[shard_number] for offsets in grant.placement.offsets), default=0)
        return self._page_lock is not None and self._page_lock.covers(last_offset + nbytes)

    def follow(self, client: Client) -> None:
        # Not before the first step: until then the engine may capture graphs, which page-locking disturbs.
        if client.run_id != self._run:  # then nothing is held from the old slab, so nothing copies there
            is_first = self._page_lock is None
            if self._page_lock is not None:
                self._pin_seconds += self._page_lock.seconds
                self._page_lock.leave()
            self._run = client.run_id
            self._page_lock = self._device.lock_pages(client.slab.view(0, client.slab.capacity))
            # The first step computes nothing: workers only report their facts.
            if is_first and self._pins_at_start:
                self._page_lock.hurry()

    def add_to(self, stats: Stats) -> None:
        now = self._now()
        if now != self._reported:
            for name, value in now.items():
                stats.add(name, value - self._reported[name])
            self._reported = now

    def _now(self) -> dict[str, float]:
        lock = self._page_lock
        if lock is None:
            return self._reported
        return {
            "pinned_bytes": lock.locked_bytes,
            "pin_seconds": self._pin_seconds + lock.seconds,
            "slab_pinned": lock.is_whole,
            "slab_pin_failed": bool(lock.failure),
        }

    def close(self) -> None:
        self.mover.drain()
        if self._page_lock is not None:
            self._page_lock.close()
            self._page_lock = None


def is_on_gpu(config: VllmConfig) -> bool:
    """Whether this engine will keep its KV on a GPU."""
    return bool(config.device_config.device_type != "cpu")


def device_of(tensors: Sequence[Any]) -> PageLockingDevice | None:
    """The GPU of these tensors; None: they are in CPU memory."""
    found = {tensor.device for tensor in tensors}
    if all(device.type == "cpu" for device in found):
        return None
    if len(found) > 1:
        raise LayoutError(f"lmtier serves ranks whose KV is on one device, this one's is on {found}")
    device: PageLockingDevice = import_module("lmtier.copy.cuda.device").CudaDevice(found.pop().index)
    return device
