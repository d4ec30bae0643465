"""A connector to run beside ours. It loads noise for two requests, and reports a failed load for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from tests.vllm.beside import Beside


@dataclass
class Noise(KVConnectorMetadata):
    blocks: list[int] = field(default_factory=list)
    is_said: bool = False
    requests: set[str] = field(default_factory=set)


class Noisy(Beside):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._served: set[str] = set()
        self._next = Noise()
        self._caches: dict[str, torch.Tensor] = {}
        self._failed: set[int] = set()

    # ---- the scheduler's half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        size = self._vllm_config.cache_config.block_size
        found = (request.num_prompt_tokens - 1) // size * size
        is_over = request.request_id in self._served or len(self._served) == 2
        return (0 if is_over else found - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._next.is_said = not self._served
            self._served.add(request.request_id)
            size = self._vllm_config.cache_config.block_size
            self._next.blocks += blocks.get_block_ids()[0][: num_external_tokens // size]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        found, self._next = self._next, Noise()
        return found

    # ---- the worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        noise = self._get_connector_metadata()
        assert isinstance(noise, Noise)
        if noise.blocks:
            blocks = torch.tensor(noise.blocks)
            for cache in self._caches.values():
                dim = list(cache.shape).index(self._vllm_config.cache_config.num_gpu_blocks)
                cache.index_copy_(dim, blocks, torch.randn_like(cache.index_select(dim, blocks)))
            self._failed |= {*noise.blocks} if noise.is_said else set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


LONG = 600


class NoisyAhead(Noisy):
    """It writes noise for long prompts at once, before a step computes them, whatever a device does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._loading: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.num_prompt_tokens <= LONG or request.request_id in self._served:
            return 0, False
        size = self._vllm_config.cache_config.block_size
        return (request.num_prompt_tokens - 1) // size * size - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._next.is_said = False
        if num_external_tokens:
            self._next.requests.add(request.request_id)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        noise = self._get_connector_metadata()
        assert isinstance(noise, Noise)
        self._loading |= noise.requests

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded, self._loading = self._loading, set()
        return None, loaded
