"""Tiny models with random weights, of as many kinds as transformers users have."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    DeepseekV2Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    Zamba2Config,
)

VOCABULARY, WINDOW, ORIGINAL = 2048, 24, 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # wide: no next token is a near tie, which the order of additions could turn
    "tie_word_embeddings": False,
}
SHAPE: dict[str, Any] = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.01 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "mistral": MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gemma2": Gemma2Config(**SHAPE, head_dim=16, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 7}, head_dim=16, sliding_window=WINDOW
    ),  # the sixth layer attends to everything
    "phi3": Phi3Config(**SHAPE, original_max_position_embeddings=ORIGINAL),
    "gpt-neox": GPTNeoXConfig(**{**SHAPE, "num_key_value_heads": 4}),
    "gpt2": GPT2Config(**COMMON, n_embd=64, n_layer=3, n_head=4, n_positions=1024),
    "bloom": BloomConfig(**COMMON, hidden_size=64, n_layer=3, n_head=4),
    "deepseek-v2": DeepseekV2Config(
        **{**SHAPE, "num_key_value_heads": 4},
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
    ),
    "llama4": Llama4TextConfig(
        **SHAPE, head_dim=16, num_local_experts=2, attention_chunk_size=WINDOW, intermediate_size_mlp=64
    ),
    "gemma3n": Gemma3nTextConfig(  # two of four layers use the KV of others
        **{**SHAPE, "intermediate_size": [128] * 4, "num_hidden_layers": 4},
        head_dim=16,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        altup_num_inputs=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "longrope": Phi3Config(**SHAPE, original_max_position_embeddings=ORIGINAL, rope_parameters=LONGROPE),
    "dynamic": LlamaConfig(
        **{**SHAPE, "max_position_embeddings": ORIGINAL},
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    ),
}

_FOUR: dict[str, Any] = {**SHAPE, "num_hidden_layers": 4}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CONVOLUTIONS = ["conv", "conv", "full_attention", "conv"]
HYBRIDS: dict[str, PreTrainedConfig] = {
    "qwen3-next": Qwen3NextConfig(
        **_FOUR, **_DELTA, **_EXPERTS, head_dim=16, shared_expert_intermediate_size=32
    ),
    "falcon-h1": FalconH1Config(
        **SHAPE, **{**_MAMBA, "mamba_n_heads": 4, "mamba_expand": 1}, head_dim=16, mamba_d_ssm=64
    ),
    "lfm2": Lfm2Config(**_FOUR, layer_types=_CONVOLUTIONS, block_auto_adjust_ff_dim=False),
    "granite": GraniteMoeHybridConfig(
        **_FOUR,
        **_MAMBA,
        shared_intermediate_size=64,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=2,
        num_experts_per_tok=1,
        position_embedding_type="rope",
    ),
    "bamba": BambaConfig(**_FOUR, **_MAMBA, attn_layer_indices=[2]),
    "nemotron-h": NemotronHConfig(
        **_FOUR,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        expand=2,
    ),
    "qwen3.5": Qwen3_5TextConfig(**_FOUR, **_DELTA, head_dim=16),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **_FOUR, **_DELTA, **_EXPERTS, head_dim=16, shared_expert_intermediate_size=32
    ),
    "lfm2-moe": Lfm2MoeConfig(**_FOUR, **_EXPERTS, layer_types=_CONVOLUTIONS, num_dense_layers=1),
    "olmo-hybrid": OlmoHybridConfig(**_FOUR, **{**_DELTA, "linear_num_key_heads": 4}),
    "zamba2": Zamba2Config(
        **_FOUR,
        mamba_d_state=16,
        mamba_headdim=16,
        n_mamba_heads=8,
        mamba_ngroups=1,
        layers_block_type=["mamba", "hybrid"] * 2,
        num_mem_blocks=1,
        adapter_rank=8,
    ),
    "kimi-linear": KimiLinearConfig(
        **{**_FOUR, "num_key_value_heads": 4},
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_heads=4,
        linear_head_dim=16,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_experts=4,
        moe_intermediate_size=32,
        num_experts_per_token=2,
    ),
}
"""Models that mix layers with KV and layers with a state."""


@cache
def model_of(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config({**CONFIGS, **HYBRIDS}[kind]).to(dtype).eval()
    assert isinstance(model, PreTrainedModel)
    for name, weights in model.named_parameters():  # of states: so that they remember a whole prompt
        if name.endswith("dt_bias"):
            weights.data.fill_(-3.0)
        if name.endswith("A_log"):
            weights.data.copy_(torch.linspace(-3.0, 0.5, weights.numel()).view(weights.shape))
    return model


def prompt_of(tokens: int, seed: int = 1) -> torch.Tensor:
    """Two prompts of one seed begin in the same way, however long they are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (1024,), generator=generator)[None, :tokens]


def answer(generate: Any, *args: Any, tokens: int = 6, **options: Any) -> list[list[int]]:
    found = generate(*args, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options)
    return [row[-tokens:] for row in found.tolist()]
