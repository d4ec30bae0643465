"""Latents beside an index cache, as DeepSeek V3.2 keeps them. vLLM has no kernel for such a model on CPUs.

So vLLM's own classes declare the layers, group them and allocate their memory. Random bytes stand for what
would be computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.utils import allocate_kv_cache

from lmtier.copy.paging import PagedKV
from lmtier.errors import LayoutError
from lmtier_integrations.vllm.kv import DeclaredKV, declare, layer_specs

LAYERS, BLOCK, CHUNK, BLOCKS = 3, 64, 128, 12
INDEX = 128 + 4
"""Bytes of one token: 8 bits a number, and a scale."""
LATENT = {"fp8_ds_mla": 656, "bfloat16": 2 * 576}


class Latents(AttentionLayerBase):
    """Declares what vLLM's layer does, and has no weights."""

    sliding_window = None
    non_causal_multi_token_decode = False
    head_size = 576
    get_kv_cache_spec = MLAAttention.get_kv_cache_spec

    def __init__(self, kv_cache_dtype: str, indexer: DeepseekV32IndexerCache) -> None:
        self.kv_cache_dtype, self.indexer = kv_cache_dtype, indexer

    def get_attn_backend(self) -> Any:
        return FlashMLASparseBackend


class Made:
    """The memory of an engine, as vLLM lays it out."""

    def __init__(self, dtype: str, order: str) -> None:
        cache = CacheConfig(block_size=BLOCK)
        cache.kv_cache_layout = order
        self.config = VllmConfig(cache_config=cache)
        with set_current_vllm_config(self.config):
            for number in range(LAYERS):
                name = f"model.layers.{number}.self_attn"
                index = DeepseekV32IndexerCache(INDEX, torch.uint8, f"{name}.indexer.k_cache", cache)
                self.layers[f"{name}.attn"] = Latents(dtype, index)
            specs = {name: layer.get_kv_cache_spec(self.config) for name, layer in self.layers.items()}
            groups = get_kv_cache_groups(self.config, specs)
            size = BLOCKS * LAYERS * BLOCK * (INDEX + LATENT[dtype])
            self.cache: KVCacheConfig = get_kv_cache_config_from_groups(self.config, groups, size)
        self.tensors = allocate_kv_cache(
            self.cache, torch.device("cpu"), cache.get_resolved_kv_cache_layout()
        )
        assert self.cache.num_blocks == BLOCKS

    @property
    def layers(self) -> dict[str, Any]:
        layers: dict[str, Any] = self.config.compilation_config.static_forward_context
        return layers

    def declared(self) -> DeclaredKV:
        return declare(self.config, self.cache, self.tensors, CHUNK)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    with set_current_vllm_config(VllmConfig()):
        where = f"file://{tmp_path_factory.mktemp('rank')}/meeting"
        init_distributed_environment(1, 0, where, 0, "gloo")
        initialize_model_parallel()
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def bytes_of(tensors: dict[str, torch.Tensor], block: int) -> dict[str, bytes]:
    return {
        name: tensor[block].contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("dtype", [*LATENT])
def test_latents_and_their_index_come_back_together(dtype, order):
    made = Made(dtype, order)
    declared = made.declared()
    layout = declared.layout
    assert len(declared.tensors) == 2 * LAYERS
    assert layout.nbytes(layout.whole) == LAYERS * CHUNK * (INDEX + LATENT[dtype])

    random = torch.Generator().manual_seed(7)
    for tensor in made.tensors.values():
        tensor.view(torch.uint8).random_(0, 256, generator=random)
    before = [bytes_of(made.tensors, block) for block in range(BLOCKS)]
    chunk = bytearray(layout.nbytes(layout.whole))
    memory = PagedKV(layout, layout.whole, declared.tensors, tables=declared.table_of_tensor)
    memory.gather(None, [9, 2], memoryview(chunk))
    memory.scatter(None, memoryview(chunk), [5, 7])
    for block in range(BLOCKS):
        assert bytes_of(made.tensors, block) == before[{5: 9, 7: 2}.get(block, block)]


def test_latents_in_another_precision_are_other_content():
    one, other = (Made(dtype, "LBHNC").declared().layout for dtype in LATENT)
    assert not one.reads(other)
    assert not other.reads(one)
    assert one.reads(Made("fp8_ds_mla", "BLHNC").declared().layout)


def test_every_rank_has_all_of_it_and_one_stores_it():
    layout = Made("fp8_ds_mla", "LBHNC").declared().layout
    assert [layout.shard(rank=rank, ranks=4) for rank in range(4)] == [layout.whole] * 4
    assert [layout.writes(rank=rank, ranks=4) for rank in range(4)] == [True, False, False, False]


def test_an_index_with_blocks_of_another_size_is_declined():
    made = Made("fp8_ds_mla", "LBHNC")
    (group,) = made.cache.kv_cache_groups
    specs = dict(group.kv_cache_spec.kv_cache_specs)
    name = next(name for name in specs if "indexer" in name)
    specs[name] = replace(specs[name], block_size=BLOCK // 2)
    with pytest.raises(LayoutError, match=r"blocks of one size, here are blocks of \[32, 64\] tokens"):
        layer_specs(
            replace(
                made.cache, kv_cache_groups=[KVCacheGroupSpec([each], spec) for each, spec in specs.items()]
            )
        )
