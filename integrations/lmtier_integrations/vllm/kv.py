"""Reads the engine's declaration of its KV memory as a layout, a shard and tensors. It guesses nothing.

Shapes are only compared with the declaration: two layouts can have the same shape, and a confusion would
serve noise. If the inner order of blocks is not known for certain, the content is opaque: it only fits the
same backend, dtype and block size, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmtier.errors import LayoutError
from lmtier.format.layout import LayerShape, Layout, Shard

_PAIRS = {"FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"}
"""Backends that keep a token's K and V side by side, per head: [K | V], as vLLM declares it."""
_LATENTS = {
    "CPU_MLA",
    "TRITON_MLA",
    "FLASHMLA",
    "FLASH_ATTN_MLA",
    "FLASHINFER_MLA",
    "CUTLASS_MLA",
}
_FROM_SCRATCH = {"CPU_MLA"}
"""Backends that compute each prompt from its first token: behind a loaded prefix they answer wrongly."""
_WINDOWS = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Layers that do not see all tokens, so that blocks leave a request before it ends."""
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
_FP8 = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


@dataclass
class DeclaredKV:
    """One rank's KV memory."""

    layout: Layout
    shard: Shard
    shards: list[Shard]
    """The shards of all ranks."""
    is_writer: bool
    """False: another rank stores the same shard."""
    tensors: list[Any]
    table_of_tensor: list[int]
    """Which of a request's block tables each of them goes by, counted among those with KV."""
    table_count: int
    """All of these. A stage of a pipeline may have no layer that goes by one of them."""
    layer_numbers: dict[str, int]
    """Maps a layer's name to its number in the model."""
    kernel_blocks_per_block: int
    """The number of kernel blocks in one block of the scheduler."""
    block_bytes: int
    """The bytes of one kernel block over all layers of this rank, as the engine declares them."""
    backend_without_prefixes: str
    """The backend, if it cannot continue from loaded KV; else empty."""


def declare(
    config: VllmConfig, cache: KVCacheConfig, tensors: Mapping[str, Any], chunk_tokens: int
) -> DeclaredKV:
    """Read what the engine declares. Raises LayoutError, in one sentence, where lmtier cannot serve it."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise LayoutError(
            "lmtier does not serve context parallelism: its ranks hold tokens, not heads, of a block"
        )
    tables, specs = tables_of_layers(cache, kv_groups(cache)), layer_specs(cache)
    owners = owners_of(specs, tables, tensors)
    layers: dict[str, Any] = get_layers_from_vllm_config(config, AttentionLayerBase, list(owners))
    backends = {name: layers[name].get_attn_backend().get_name() for name in owners}
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    ratio = _ratio(cache, specs, tensors, owners)

    packing, dtype = _packing(config, owners, specs, layers, backends, ranks, ratio)
    is_opaque = packing not in ("token", "latent", "cpu-vec")
    shapes = [_shape(config, name, specs[name], ranks, ratio, packing, is_opaque) for name in owners]
    for name, shape in zip(owners, shapes, strict=True):
        _compare(name, specs[name], tensors[name], cache.num_blocks * ratio, ratio)
        if ranks == 1 and shape.heads != tensors[name].shape[1]:
            raise LayoutError(
                f"{name}: {shape.heads} heads are declared, the tensor has {tensors[name].shape[1]}"
            )

    total, stage_layers = len(shapes), [(0, len(shapes))]
    if stages > 1:
        total = config.model_config.get_total_num_hidden_layers()
        stage_layers = [get_pp_indices(total, stage, stages) for stage in range(stages)]
        first, end = stage_layers[get_pp_group().rank_in_group]
        if len(shapes) != end - first or len(set(shapes)) > 1:
            raise LayoutError(
                "lmtier serves pipeline parallelism where all layers are alike and none shares KV"
            )
        shapes = shapes[:1] * total
    layout = Layout(
        tuple(shapes), dtype, next(iter(specs.values())).block_size // ratio, chunk_tokens, packing
    )
    rank, stage = get_tensor_model_parallel_rank(), get_pp_group().rank_in_group
    shard = layout.shard(rank=rank, ranks=ranks, layers=stage_layers[stage])
    shards = [
        layout.shard(rank=each, ranks=ranks, layers=some) for some in stage_layers for each in range(ranks)
    ]
    return DeclaredKV(
        layout,
        shard,
        list(dict.fromkeys(shards)),
        layout.writes(rank=rank, ranks=ranks),
        [tensors[name] for name in owners],
        [tables[name] for name in owners],
        len(kv_groups(cache)),
        {name: shard.first_layer + number for number, name in enumerate(owners)},
        ratio,
        sum(specs[name].real_page_size_bytes for name in owners) // ratio,
        ", ".join(sorted(_FROM_SCRATCH.intersection(backends.values()))),
    )


def _specs(cache: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """What each layer declares."""
    specs: dict[str, KVCacheSpec] = {}
    for group in cache.kv_cache_groups:
        found = group.kv_cache_spec
        if isinstance(found, UniformTypeKVCacheSpecs):
            specs.update(found.kv_cache_specs)
        else:
            specs.update(dict.fromkeys(group.layer_names, found))
    return specs


def state_specs(cache: KVCacheConfig) -> dict[str, MambaSpec]:
    """The layers that keep a state."""
    return {name: spec for name, spec in _specs(cache).items() if type(spec) is MambaSpec}


def layer_specs(cache: KVCacheConfig) -> dict[str, AttentionSpec]:
    """The declared kind of KV of each layer that keeps KV; one sentence if there is one that cannot be
    served."""
    specs: dict[str, AttentionSpec] = {}
    for name, spec in _specs(cache).items():
        if type(spec) is MambaSpec:
            continue
        # Exactly these: their descendants keep something else.
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, *_WINDOWS):
            raise LayoutError(
                "lmtier serves layers with full attention, a sliding window or chunked local attention; "
                f"{name} is declared as {type(spec).__name__}"
            )
        if type(spec) not in _WINDOWS and spec.non_causal:
            raise LayoutError(
                f"{name} attends to later tokens, so its KV is not a matter of the prefix alone"
            )
        specs[name] = spec
    sizes = sorted({spec.block_size for spec in specs.values()})
    if len(sizes) > 1:
        raise LayoutError(
            f"lmtier serves layers with blocks of one size, here are blocks of {sizes} tokens: "
            "start the engine with --disable-hybrid-kv-cache-manager"
        )
    return specs


def window_of(cache: KVCacheConfig) -> int:
    """The smallest window out of which blocks are dropped, in tokens; 0: none.

    Chunked local attention is a window that moves by its whole length.
    """
    specs = layer_specs(cache).values()
    windows = [spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)]
    windows += [spec.attention_chunk_size for spec in specs if isinstance(spec, ChunkedLocalAttentionSpec)]
    return min(windows, default=0)


def kv_groups(cache: KVCacheConfig) -> list[int]:
    """The numbers of the block tables of layers with KV, among all of a request."""
    return [number for number in range(len(cache.kv_cache_groups)) if number not in state_groups(cache)]


def tables_of_kv(tables: Sequence[Any], groups: Sequence[int]) -> list[Any]:
    """The block tables of layers with KV, among all of a request. If there are none, that of a stand-in
    (states.py): its blocks have their places in the request as numbers."""
    return [tables[group] for group in groups] or [list(range(1, len(tables[0]) + 1))]


def state_groups(cache: KVCacheConfig) -> list[int]:
    """The same of layers with a state."""
    states = state_specs(cache)
    return [n for n, group in enumerate(cache.kv_cache_groups) if states.keys() & set(group.layer_names)]


def tables_of_layers(cache: KVCacheConfig, groups: Sequence[int]) -> dict[str, int]:
    """Maps each layer of these groups to the number of its table, counted among them."""
    return {
        name: table for table, group in enumerate(groups) for name in cache.kv_cache_groups[group].layer_names
    }


def owners_of(
    specs: Mapping[str, KVCacheSpec], tables: Mapping[str, int], tensors: Mapping[str, Any]
) -> list[str]:
    """The layers in the model's order. Of layers that share memory and blocks, only the first."""
    owners: dict[tuple[int, int], str] = {}
    for name in sorted(specs, key=_natural):
        if name not in tensors:
            raise LayoutError(f"the engine declared {name}, but registered no KV memory for it")
        owners.setdefault((tables[name], tensors[name].data_ptr()), name)
    return list(owners.values())


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _ratio(
    cache: KVCacheConfig,
    specs: Mapping[str, AttentionSpec],
    tensors: Mapping[str, Any],
    owners: Sequence[str],
) -> int:
    rows = {tensors[name].shape[0] for name in owners}
    sizes = {specs[name].block_size for name in owners}
    count = rows.pop()
    if rows or len(sizes) != 1 or count % cache.num_blocks or sizes.pop() % (count // cache.num_blocks):
        raise LayoutError(
            f"{cache.num_blocks} blocks are declared, the tensors have {sorted({count, *rows})}"
        )
    return int(count // cache.num_blocks)


def _packing(
    config: VllmConfig,
    owners: Sequence[str],
    specs: Mapping[str, AttentionSpec],
    layers: Mapping[str, Any],
    backends: Mapping[str, str],
    ranks: int,
    ratio: int,
) -> tuple[str, str]:
    """The packing of a block, and its dtype."""
    packings = {
        (*_inner(specs[name], backends[name], getattr(layers[name], "isa", "")), _dtype(config, specs[name]))
        for name in owners
    }
    if len(packings) == 1:
        packing, dtype = packings.pop()
        if packing in ("token", "latent", "cpu-vec") and dtype:
            return packing, dtype
    else:
        packing, dtype = "+".join(sorted({each[0] for each in packings})), ""
    spec = specs[owners[0]]
    name_parts = [packing, dtype or str(spec.dtype).removeprefix("torch."), str(spec.block_size // ratio)]
    if any(specs[name].num_head_slots is not None for name in owners):
        name_parts.append(f"tp{ranks}")  # then a slot is no head, and other numbers of ranks have other slots
    name = re.sub(r"[^a-z0-9._:-]", "-", "-".join(name_parts).lower())[:64]
    return name, "u8"


def _inner(spec: AttentionSpec, backend: str, isa: str) -> tuple[str]:
    is_dense = (
        spec.state_content_bytes is None
        and spec.num_head_slots is None
        and spec.tokens_per_state == 1
        and spec.kv_quant_mode.name in ("NONE", "FP8_PER_TENSOR")
    )
    if backend == "CPU_ATTN":
        # The kernel orders a block by instruction set; "vec" in 16 bits is known: K transposed, then V.
        return ("cpu-vec",) if isa == "vec" and is_dense and str(spec.dtype) in _DTYPES else (f"cpu-{isa}",)
    if isinstance(spec, MLAAttentionSpec):
        return ("latent",) if backend in _LATENTS and is_dense else (backend,)
    return ("token",) if backend in _PAIRS and is_dense else (backend,)


def _dtype(config: VllmConfig, spec: AttentionSpec) -> str:
    if spec.kv_quant_mode.name == "FP8_PER_TENSOR":
        return _FP8.get(str(config.cache_config.cache_dtype), "")
    return _DTYPES.get(str(spec.dtype), "")


def _shape(
    config: VllmConfig,
    name: str,
    spec: AttentionSpec,
    ranks: int,
    ratio: int,
    packing: str,
    is_opaque: bool,
) -> LayerShape:
    """The layout of the whole model, from the part of one rank."""
    if isinstance(spec, MLAAttentionSpec):
        heads = spec.num_heads  # every rank has all of it
    elif ranks == 1:
        heads = spec.num_heads
    else:
        total = config.model_config.get_total_num_kv_heads()
        if spec.num_kv_heads != max(1, total // ranks):
            raise LayoutError(
                f"{name} has {spec.num_kv_heads} KV heads on each of {ranks} ranks, the model has {total}"
            )
        heads = total if spec.num_head_slots is None else spec.num_heads * ranks
    if is_opaque:
        return LayerShape(heads, spec.real_page_size_bytes // ratio // spec.num_heads, 0)
    if packing == "latent":
        return LayerShape(heads, spec.head_size, 0)
    return LayerShape(heads, spec.head_size, spec.head_size_v)


def _compare(name: str, spec: AttentionSpec, tensor: Any, blocks: int, ratio: int) -> None:
    heads, block_tokens = spec.num_heads, spec.block_size // ratio
    nbytes = spec.real_page_size_bytes // ratio
    shape = list(tensor.shape)
    size = tensor.element_size()
    for count in shape[1:]:
        size *= count
    if shape[:2] != [blocks, heads] or size != nbytes:
        raise LayoutError(
            f"{name}: declared are {blocks} blocks of {block_tokens} tokens, {heads} heads, {nbytes} bytes; "
            f"registered is a tensor {shape} of {size} bytes a block"
        )
