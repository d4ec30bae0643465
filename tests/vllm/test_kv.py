"""What the engine declares is read right: compared with what its own kernels write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from lmtier.copy.paging import PagedKV
from lmtier.errors import LayoutError
from lmtier.format.layout import Layout
from lmtier_integrations.vllm.states import check_states

BLOCKS, HEADS, N = 6, 2, 32


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the packing of CPU kernels")
@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")], ids=str
)
@pytest.mark.parametrize("width", [64, 128])
def test_cpu_vec_is_what_the_kernel_keeps(dtype, name, width):
    """A token's K and V, written by vLLM's kernel into a real block, are found where the layout says."""
    isa = _get_attn_isa(dtype, N, width)
    if isa != "vec":
        pytest.skip(f"this processor's kernels keep {isa!r}, which lmtier treats as opaque")
    torch.manual_seed(0)
    cache = torch.zeros(BLOCKS, HEADS, N, 2 * width, dtype=dtype)
    keys, values = torch.randn(2, 2 * N, HEADS, width).to(dtype)
    planes = cache.view(BLOCKS, HEADS, 2 * N, width).chunk(2, dim=2)
    blocks = [4, 1]
    slots = torch.cat([torch.arange(N) + block * N for block in blocks])
    ops.cpu_attn_reshape_and_cache(keys, values, *planes, slots, isa)

    layout = Layout.uniform(
        layers=1,
        heads=HEADS,
        head_dim=width,
        dtype=name,
        block_tokens=N,
        chunk_tokens=2 * N,
        packing="cpu-vec",
    )
    extent = bytearray(layout.nbytes(layout.whole))
    PagedKV(layout, layout.whole, [cache]).gather(None, blocks, memoryview(extent))
    for token in (0, 1, N - 1, N, 2 * N - 1):
        for head in range(HEADS):
            for element in (0, 1, width - 1):
                for plane, given in enumerate((keys, values)):
                    at = layout.address(
                        layout.whole, layer=0, head=head, token=token, plane=plane, element=element
                    )
                    found = torch.frombuffer(extent, dtype=dtype, count=1, offset=at)
                    assert found.item() == given[token, head, element].item()


def test_a_model_that_keeps_nothing_is_declined():
    config: Any = SimpleNamespace(model_config=SimpleNamespace(model="some model"))
    nothing = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    with pytest.raises(LayoutError, match="some model keeps neither KV nor a state"):
        check_states(config, nothing)


@pytest.mark.parametrize(
    ("parallel", "need"),
    [
        ({"pipeline_parallel_size": 2}, "no pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "no context parallelism"),
        ({"prefill_context_parallel_size": 2}, "no context parallelism"),
        ({}, ""),
    ],
)
def test_states_in_parts_of_a_prompt_are_declined(parallel, need):
    one = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="some model"),
        cache_config=SimpleNamespace(prefix_match_unit=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(**{**one, **parallel}),
    )
    spec = MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
    cache = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    if not need:
        check_states(config, cache)
        return
    with pytest.raises(LayoutError, match=f"some model has layers that keep a state .* lmtier needs {need}"):
        check_states(config, cache)
