"""The vLLM connector: translates the calls of vLLM's connector interface, and delegates them by role.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "LMTierConnector",
        "kv_connector_module_path": "lmtier_integrations.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": ["cpu://?capacity=32GiB", "disk:///nvme/kv?capacity=500GiB"]}}'

The scheduler's half decides, the workers' halves move; docs/VLLM.md is for users.
"""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmtier.errors import LayoutError
from lmtier_integrations.vllm.kv import state_groups, window_of
from lmtier_integrations.vllm.launch import Launcher
from lmtier_integrations.vllm.messages import Plan, RankReport
from lmtier_integrations.vllm.places import is_on_gpu
from lmtier_integrations.vllm.scheduler import Scheduler
from lmtier_integrations.vllm.settings import ANY, BLHNC, Settings
from lmtier_integrations.vllm.states import check_states
from lmtier_integrations.vllm.stats import Prometheus, Stats
from lmtier_integrations.vllm.worker import Worker

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32
    CacheHitSource = None

# Returned in most steps. vLLM does not change it.
_NOTHING_ARRIVED = KVConnectorTransferResults()

NAME = "LMTierConnector"


def register() -> None:
    """vLLM calls this at start, by an entry point. Then users only have to name the connector."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, __name__, NAME)


class LMTierConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_states(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = Settings.of(
            transfer.kv_connector_extra_config,
            vllm_config.cache_config.block_size,
            window_of(kv_cache_config),
            has_states=bool(state_groups(kv_cache_config)),
        )
        if is_on_gpu(vllm_config) and kv_cache_config.needs_kv_cache_zeroing:
            # Model Runner V2 zeroes them before it asks whether a copy of those is under way.
            raise LayoutError(
                "lmtier serves engines on GPUs whose layers keep KV in one precision: others zero the blocks "
                "that they hand out; give all layers one kv-cache-dtype"
            )
        launcher = Launcher(settings, transfer.engine_id)
        self._half: Scheduler | Worker
        self._scheduler: Scheduler
        self._worker: Worker
        if role == KVConnectorRole.SCHEDULER:
            self._half = self._scheduler = Scheduler(vllm_config, kv_cache_config, settings, launcher)
        else:
            self._half = self._worker = Worker(vllm_config, kv_cache_config, settings, launcher)

    # ---- the calls of every connector

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The wanted order of a block. If its layers are together, a GPU copies it without a kernel.

        vLLM takes an order that its backend supports. This is its first call, so models that lmtier cannot
        serve are declined here.
        """
        if vllm_config.diffusion_config is not None:
            raise LayoutError(
                "lmtier serves models whose tokens only see earlier tokens, but "
                f"{vllm_config.model_config.model} computes several tokens at once: start it without this "
                "connector"
            )
        asked = vllm_config.kv_transfer_config.kv_connector_extra_config.get("layout", BLHNC)
        return None if asked == ANY or not is_on_gpu(vllm_config) else BLHNC

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Prometheus:
        return Prometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> Stats | None:
        return self._half.stats.taken()

    def shutdown(self) -> None:
        self._half.close()

    # ---- workers

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # vLLM calls this before each step, also without preemptions, and before it zeroes blocks.
        assert isinstance(kv_connector_metadata, Plan)
        self._worker.reuse(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Plan)
        self._worker.begin(connector_metadata)

    def has_connector_metadata(self) -> bool:
        # vLLM asks before it calls the two hooks of a layer. Most steps have nothing for the hooks.
        return self._worker.copies_layers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self._worker.loads.of_step:
            return
        # A step that replays one CUDA graph calls no hooks. It has no context, or the context shows it. So
        # graphs need not be piecewise.
        is_graph = forward_context.cudagraph_runtime_mode == CUDAGraphMode.FULL
        self._worker.loads.start(calls_hooks=forward_context.attn_metadata is not None and not is_graph)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.finish()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        arrived, lost = self._worker.loads.take_ended()
        if not arrived:
            return _NOTHING_ARRIVED
        return KVConnectorTransferResults(finished_recving=arrived, failed_recving=lost)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.loads.failed_blocks()

    def build_connector_worker_meta(self) -> RankReport | None:
        return self._worker.report()

    # ---- scheduler

    def on_new_request(self, request: Any) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens) and self._scheduler.waits(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        found: dict[Any, int] = {}
        for tier, tokens in self._scheduler.sources(request, num_external_tokens).items():
            names = {"cpu": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
            source = names.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[source] = found.get(source, 0) + tokens
        return found

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:  # of any connector
            self._scheduler.repair_failed_loads(connector_output.invalid_block_ids)
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            self._scheduler.apply_report(report)

    def take_events(self) -> list[KVCacheEvent]:
        return self._scheduler.events()

    def has_pending_push_work(self) -> bool:
        # vLLM 0.30 to 0.32 ask this before they go idle, and run steps without tokens while it is True.
        # Rejected: request_finished returns True until finished_sending. It also keeps a request's blocks.
        return self._scheduler.wants_a_step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        self._scheduler.finished(request, block_ids)
        return False, None

    def reset_cache(self) -> bool:
        self._scheduler.clear()
        return True
