"""Tiny models with random weights, of as many kinds as transformers users have."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV2Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
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
    "phi3": Phi3Config(**SHAPE),
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


@cache
def model_of(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def prompt_of(tokens: int, seed: int = 1) -> torch.Tensor:
    """Two prompts of one seed begin in the same way, however long they are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (1024,), generator=generator)[None, :tokens]


def answer(generate: Any, *args: Any, tokens: int = 6, **options: Any) -> list[list[int]]:
    found = generate(*args, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options)
    return [row[-tokens:] for row in found.tolist()]
