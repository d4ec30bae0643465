"""Reads what layers without KV keep, one state a request: its layout, its shard and its tensors.

In vLLM's mode "align" the last block of a request holds the state after its last token, and each step of a
prompt ends at a block's end. So the state after a whole block can be copied as bytes, out of that block and
into the same block of another request. Its content is opaque: it fits the same kernels only.

If no layer keeps KV, `stand_in` declares what takes its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmtier.errors import LayoutError
from lmtier.format.layout import LayerShape, Layout
from lmtier_integrations.vllm.kv import (
    DeclaredKV,
    layer_specs,
    owners_of,
    state_groups,
    state_specs,
    tables_of_layers,
)
from lmtier_integrations.vllm.places import is_on_gpu

ALIGN = "align"


def check_states(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Raise LayoutError, in one sentence, if this engine has states that lmtier cannot serve."""
    if not cache.kv_cache_groups:
        raise LayoutError(
            f"{config.model_config.model} keeps neither KV nor a state between steps: start it without lmtier"
        )
    states = state_specs(cache)
    if not states:
        return
    kv, step = layer_specs(cache), config.scheduler_config.max_num_batched_tokens
    modes = {spec.mamba_cache_mode for spec in states.values()}
    sizes = {spec.block_size for spec in (*states.values(), *kv.values())}
    splits = any(spec.num_prefill_checkpoint_blocks for spec in states.values())
    drafts = config.speculative_config is not None or any(
        spec.num_speculative_blocks for spec in states.values()
    )
    parallel = config.parallel_config
    requirements = {
        "an engine on a CPU": not is_on_gpu(config),
        f"vLLM to keep states at ends of blocks: --enable-prefix-caching --mamba-cache-mode {ALIGN}": modes
        == {ALIGN},
        f"blocks of one size in all layers, not of {sorted(sizes)} tokens": len(sizes) == 1,
        "no speculative decoding": not drafts,
        # A hit would end inside a block, where lmtier has no state.
        "no --prefix-match-unit": not config.cache_config.prefix_match_unit,
        "no pipeline parallelism": parallel.pipeline_parallel_size == 1,
        "no context parallelism": parallel.decode_context_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1,
        # In longer ones vLLM 0.32 wants a state within a step, and dies: its kernels for CPUs have none.
        f"steps of one block: --max-num-batched-tokens {max(sizes)}": not splits or step <= max(sizes),
    }
    for requirement, is_met in requirements.items():
        if not is_met:
            raise LayoutError(
                f"{config.model_config.model} has layers that keep a state instead of KV; for those lmtier "
                f"needs {requirement}"
            )


def stand_in(
    config: VllmConfig, cache: KVCacheConfig, tensors: Mapping[str, Any], chunk_tokens: int
) -> DeclaredKV:
    """Instead of KV, if all layers keep a state: one byte a chunk, so that the prefix of a state is a run of
    chunks in this model too. The bytes are in memory of this connector."""
    layout = Layout((LayerShape(1, 1, 0),), "u8", chunk_tokens, chunk_tokens, "stand-in")
    rank, ranks = get_tensor_model_parallel_rank(), config.parallel_config.tensor_parallel_size
    blocks = max(cache.num_blocks, 1 + cdiv(config.model_config.max_model_len, chunk_tokens))
    return DeclaredKV(
        layout,
        layout.whole,
        [layout.whole],
        is_writer=layout.writes(rank=rank, ranks=ranks),
        tensors=[next(iter(tensors.values())).new_zeros(blocks, 1, 1).byte()],
        table_of_tensor=[0],
        table_count=1,
        layer_numbers={},
        kernel_blocks_per_block=1,
        block_bytes=1,
        backend_without_prefixes="",
    )


def declare_states(
    config: VllmConfig, cache: KVCacheConfig, tensors: Mapping[str, Any], chunk_tokens: int
) -> DeclaredKV | None:
    """What this rank keeps; None: no layer keeps a state."""
    specs = state_specs(cache)
    if not specs:
        return None
    tables = tables_of_layers(cache, state_groups(cache))
    owners = owners_of(specs, tables, tensors)
    if len(owners) < len(specs):
        raise LayoutError("lmtier serves layers that keep a state if each has its own memory")
    layers: dict[str, Any] = get_layers_from_vllm_config(config, AttentionLayerBase, owners)
    ranks = config.parallel_config.tensor_parallel_size
    facts: list[object] = [config.device_config.device_type, ranks, envs.VLLM_SSM_CONV_STATE_LAYOUT]
    shapes = []
    for name in owners:
        spec, tensor = specs[name], tensors[name]
        nbytes = spec.real_page_size_bytes
        if tensor.shape[0] != cache.num_blocks or tensor[0].numel() * tensor.element_size() != nbytes:
            raise LayoutError(
                f"{name}: declared are {cache.num_blocks} states of {nbytes} bytes; registered is a tensor "
                f"{list(tensor.shape)} of {tensor.dtype}"
            )
        shapes.append(LayerShape(ranks, nbytes, 0))
        backend = layers[name].get_attn_backend().get_name()
        facts.append((spec.mamba_type.name, spec.shapes, [str(each) for each in spec.dtypes], backend))
    packing = f"state-{hashlib.sha256(repr(facts).encode()).hexdigest()[:40]}"
    layout = Layout(tuple(shapes), "u8", chunk_tokens, chunk_tokens, packing)
    return DeclaredKV(
        layout,
        layout.shard(rank=get_tensor_model_parallel_rank(), ranks=ranks),
        [layout.shard(rank=rank, ranks=ranks) for rank in range(ranks)],
        is_writer=True,
        tensors=[tensors[name] for name in owners],
        table_of_tensor=[tables[name] for name in owners],
        table_count=len(state_groups(cache)),
        layer_numbers={},
        kernel_blocks_per_block=1,
        block_bytes=sum(specs[name].real_page_size_bytes for name in owners),
        backend_without_prefixes="",
    )
