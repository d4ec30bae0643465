"""The connector, as an engine would load it, whose worker moves KV as on a GPU: through the simulated device.

The engine computes on the CPU and at once, everything else goes on late and in any order. The file that
LMTIER_TEST_FAULT names says, step by step, what is left out: an edge of `tests/cuda_device.py`, or "reuse",
and then saves get nowhere while anything else can; or "refuses": the driver refuses every third copy. Or
"slow": nothing is left out. Or "stalled": nothing is done until something waits for it.

Requests load within their step or wait beside steps, as on a GPU. LMTIER_TEST_LOADS, if set, decides for all:
"in steps" or "beside steps"; or "short in steps".

Of hooks it says: "one has none", and the second layer never calls them; "replay" and "old replay", steps that
are one graph, as vLLM's two model runners tell it; "untold", such steps, and nobody tells; "no end", steps
without wait_for_save; "halves", layers that call them when the first of two micro-batches is through.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import CUDAGraphMode
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from lmtier.copy.cuda.page_lock import PageLock
from lmtier.copy.cuda.streams import Rows
from lmtier.errors import DeviceError
from lmtier.wire.verbs import RemoteMatch
from lmtier_integrations.vllm import LMTierConnector as LMTierConnector
from lmtier_integrations.vllm import scheduler, worker
from lmtier_integrations.vllm.load_planner import LoadPlanner
from lmtier_integrations.vllm.messages import Plan
from lmtier_integrations.vllm.tracked_request import TrackedRequest
from tests.cuda_device import SimulatedDevice, SimulatedStream

STEP = 3 << 20
PACE = (*[0] * 19, 10)  # it falls behind what is enqueued, until something waits for it
SLOW = (*[0] * 9, 1)
STALLED = {"store kernels": 1e-9, "store copies": 1e-9}


class Device(SimulatedDevice):
    def __init__(self) -> None:
        seed = int(os.environ.get("LMTIER_TEST_SEED", "0"))
        super().__init__(seed, host_computes=True, is_recorded=False, pace=PACE)
        self.pinned: dict[int, int] = {}
        self.has_stepped = False
        self.refuses = False
        self.usual = dict(self.speeds)

    @property
    def rests(self) -> bool:
        return all(each.finished == len(each.deeds) for each in self.streams)

    def lock_pages(self, memory: memoryview) -> PageLock:
        """The driver takes no more than LMTIER_TEST_PINS bytes."""
        limit = int(os.environ.get("LMTIER_TEST_PINS", str(1 << 40)))

        def register(address: int, nbytes: int) -> None:
            if sum(self.pinned.values()) + nbytes > limit:
                raise RuntimeError("out of memory")
            self.pinned[address] = nbytes

        assert self.has_stepped, "an engine captures its graphs before its first step"
        pinning = Pinned(memory, register, self.pinned.__delitem__, step=STEP)
        pinning.device = self
        pinning.start()
        return pinning


class Pinned(PageLock):
    """Of which nothing is copied any more when it is left."""

    device: Device

    def leave(self) -> None:
        assert self.device.rests
        super().leave()


DEVICES: list[Device] = []
"""Of this process."""


def _device_of(tensors: Sequence[Any]) -> Device:
    device = Device()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        whole = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        device.keep(np.frombuffer(whole, np.uint8))
    DEVICES.append(device)
    return device


def _copy_rows_or_not(self: SimulatedStream, rows: Rows) -> None:
    assert isinstance(self.device, Device)
    if self.device.refuses and self.device.random.random() < 0.3:
        raise DeviceError("a copy of rows: the driver does not want to (999)")
    _copy_rows(self, rows)


_copy_rows = SimulatedStream.copy_rows
_reuse = worker.Worker.reuse
_hooks = worker.Worker.wait_for_layer, worker.Worker.save_layer
_start, _wait = LMTierConnector.start_load_kv, LMTierConnector.wait_for_save


def told() -> str:
    named = os.environ.get("LMTIER_TEST_FAULT", "")
    return Path(named).read_text() if named else ""


def _reuse_or_not(self: worker.Worker, plan: Plan) -> None:
    fault = told()
    device: Any = self.rank.mover.kv.device  # type: ignore[union-attr]
    device.without, device.has_stepped = fault, True
    device.refuses = fault == "refuses"
    paces: dict[str, Sequence[int]] = {"slow": SLOW, "reuse": (0,), "stalled": (0,)}
    device.speeds = {**device.usual, **(STALLED if fault == "reuse" else {})}
    device.pace = paces.get(fault, PACE)
    if fault != "reuse":
        _reuse(self, plan)


def _is_hooked(self: worker.Worker, name: str) -> bool:
    if (how := told()) == "one has none":
        return self.rank.declared.layer_numbers.get(name) != 1
    return how not in ("replay", "old replay", "untold")


def _wait_if_hooked(self: worker.Worker, name: str) -> None:
    if _is_hooked(self, name):
        _hooks[0](self, name)
    if told() == "halves":  # the first half is through all layers, and nothing of the second was computed
        for each in self.rank.declared.layer_numbers:
            _hooks[1](self, each)
        device: Any = self.rank.mover.kv.device  # type: ignore[union-attr]
        while not device.rests:  # what it reads now is what it would store
            device.one_deed()


def _save_if_hooked(self: worker.Worker, name: str) -> None:
    if _is_hooked(self, name):
        _hooks[1](self, name)


def _start_as_told(self: LMTierConnector, forward_context: Any, **kwargs: Any) -> None:
    context = copy.copy(forward_context)
    if (how := told()) == "replay":
        context.attn_metadata = None
    elif how == "old replay":
        context.cudagraph_runtime_mode = CUDAGraphMode.FULL
    _start(self, context, **kwargs)


def _wait_unless_told(self: LMTierConnector) -> None:
    if told() != "no end":
        _wait(self)


def _refuse_beside_copies(kind: type, name: str) -> None:
    """What unmaps or changes memory must not run while something is copied."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        assert all(each.rests for each in DEVICES), f"copies are under way during {name}"
        return method(*args, **kwargs)

    setattr(kind, name, checked)


_refuse_beside_copies(CPUWorker, "sleep")
_refuse_beside_copies(GPUModelRunner, "reload_weights")
SimulatedStream.copy_rows = _copy_rows_or_not  # type: ignore[method-assign]
LMTierConnector.wait_for_save = _wait_unless_told  # type: ignore[method-assign]
LMTierConnector.start_load_kv = _start_as_told  # type: ignore[method-assign]
worker.Worker.wait_for_layer = _wait_if_hooked  # type: ignore[method-assign]
worker.Worker.save_layer = _save_if_hooked  # type: ignore[method-assign]
worker.device_of = _device_of  # type: ignore[attr-defined]
scheduler.is_on_gpu = lambda config: True  # type: ignore[attr-defined]
if loads := os.environ.get("LMTIER_TEST_LOADS"):
    MOST = {"in steps": 1 << 40, "short in steps": 400}.get(loads, 0)

    def _is_long(self: LoadPlanner, tracked: TrackedRequest, match: RemoteMatch, tokens: int) -> bool:
        return tokens > MOST

    LoadPlanner._must_wait = _is_long  # type: ignore[method-assign]
worker.Worker.reuse = _reuse_or_not  # type: ignore[method-assign]
