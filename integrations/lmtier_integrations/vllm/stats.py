"""The connector's counters, in the form that vLLM needs for its log and its /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "found_tokens": "prompt tokens whose KV was stored, also those that the engine had itself",
    "loaded_tokens": "prompt tokens whose KV was promised to the engine",
    "loaded_in_step_tokens": "those of the loaded tokens that were loaded within a step, not beside it",
    "gpu_hit_tokens": "those of the loaded tokens that came from copies in GPU memory",
    "saved_tokens": "tokens whose KV was reserved for storing",
    "saved_states": "states of layers without KV that were reserved for storing",
    "load_bytes": "bytes copied into the engine's blocks",
    "load_seconds": "time of these copies; on a GPU, the device's time too",
    "save_bytes": "bytes copied out of the engine's blocks",
    "save_seconds": "time of these copies; on a GPU, only the time to enqueue them",
    "prefill_seconds": "time of steps that compute prompts, without copies",
    "prefill_expected_seconds": "expected time of these steps",
    "load_failures": "promised loads that failed; their tokens were computed",
    "save_failures": "saves that were given up",
    "unpinned_saves": "saves left out, because their memory was not pinned for the GPU yet",
    "pin_seconds": "time that the driver took to pin the slab for GPUs, over all ranks",
    "declined_requests": "requests that were neither looked up nor stored; the engine's log says why, once",
    "unserved": "calls that found no server",
}

GAUGES = {
    "pinned_bytes": "bytes of the slab that are pinned for GPUs, over all ranks",
    "slab_pinned": "ranks that have pinned all of it",
    "slab_pin_failed": "ranks that could not pin all of it",
}
"""Gauges. They are sent as changes, so that they add up like counters."""

_NAMES = (*COUNTERS, *GAUGES)


class Stats(KVConnectorStats):
    """Sums, over ranks and time."""

    def __init__(self, data: Mapping[str, float] | None = None) -> None:
        super().__init__(data={**dict.fromkeys(_NAMES, 0.0), **(data or {})})
        self._has_news = False

    def add(self, name: str, amount: float = 1) -> None:
        self.data[name] += amount
        self._has_news = True

    def reset(self) -> None:
        self.data = dict.fromkeys(_NAMES, 0.0)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in _NAMES:
            self.data[name] += other.data.get(name, 0)
        return self

    def reduce(self) -> dict[str, int | float]:
        data = self.data
        return {
            "tokens found": int(data["found_tokens"]),
            "tokens loaded": int(data["loaded_tokens"]),
            "tokens stored": int(data["saved_tokens"]),
            "requests not cached": int(data["declined_requests"]),
            "MB/s loaded": round(data["load_bytes"] / 1e6 / (data["load_seconds"] or 1), 1),
            "MB/s stored": round(data["save_bytes"] / 1e6 / (data["save_seconds"] or 1), 1),
            "failures": int(data["load_failures"] + data["save_failures"]),
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def taken(self) -> Stats | None:
        """What was counted since the last time."""
        if not self._has_news:  # asked of both halves in each step
            return None
        self._has_news = False
        taken = Stats(self.data)
        self.reset()
        return taken


class Prometheus(KVConnectorPromMetrics):
    """The sums on the engine's own /metrics, beside `vllm:`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._counters = self._labelled(self._counter_cls, COUNTERS)
        self._gauges = self._labelled(self._gauge_cls, GAUGES, multiprocess_mode="sum")
        self._sums: dict[tuple[str, int], float] = {}
        """The sums of gauges: not all kinds of them can be added to."""

    def _labelled(self, kind: Any, named: Mapping[str, str], **more: str) -> dict[str, dict[int, Any]]:
        series = {
            name: kind(name=f"lmtier:{name}", documentation=what, labelnames=self._labelnames, **more)
            for name, what in named.items()
        }
        return {
            name: {engine: each.labels(*values) for engine, values in self.per_engine_labelvalues.items()}
            for name, each in series.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data.get(name, 0))
        for name, gauges in self._gauges.items():
            key = name, engine_idx
            self._sums[key] = self._sums.get(key, 0) + transfer_stats_data.get(name, 0)
            gauges[engine_idx].set(self._sums[key])
