"""Makes tiny models with random weights, which a real engine loads in a second."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessor,
    DeepseekV2Config,
    FalconH1Config,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    Mamba2Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3NextConfig,
)

COMMON = {"vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, PretrainedConfig] = {
    # Wide weights: the next token is never a near tie, which the order of additions could turn.
    "qwen2": Qwen2Config(
        **COMMON,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        initializer_range=0.2,
    ),
    "mqa": Qwen2Config(
        **COMMON,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        initializer_range=0.2,
    ),
    "gemma3": Gemma3TextConfig(
        **COMMON,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=512,
        max_position_embeddings=8192,
        initializer_range=0.2,
    ),
    "llama4": Llama4TextConfig(
        **COMMON,
        hidden_size=256,
        intermediate_size=256,
        intermediate_size_mlp=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=512,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        no_rope_layers=[1, 1, 1, 0],
        max_position_embeddings=8192,
        initializer_range=0.2,
    ),
    "deepseek": DeepseekV2Config(
        **COMMON,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=3,
        max_position_embeddings=8192,
        initializer_range=0.2,
    ),
    # Which factors rotate is a matter of the length that an engine is started with.
    "phi3": Phi3Config(
        **COMMON,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        original_max_position_embeddings=2048,
        initializer_range=0.2,
        sliding_window=None,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0 + 0.01 * i for i in range(32)],
            "long_factor": [1.0 + 0.5 * i for i in range(32)],
        },
    ),
    "qwen3-next": Qwen3NextConfig(
        **COMMON,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        max_position_embeddings=8192,
        initializer_range=0.2,
    ),
    "lfm2": Lfm2Config(
        **COMMON,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention", "conv"],
        max_position_embeddings=8192,
        initializer_range=0.2,
        block_auto_adjust_ff_dim=False,
        # vLLM reads the names of the models on the hub, which transformers has renamed
        conv_dim=256,
        block_dim=256,
        block_ff_dim=512,
    ),
    "falcon-h1": FalconH1Config(
        **COMMON,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_expand=1,
        max_position_embeddings=8192,
        initializer_range=0.2,
    ),
    "jamba": JambaConfig(
        **COMMON,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=16,
        mamba_dt_rank=16,
        max_position_embeddings=8192,
        initializer_range=0.2,
    ),
    "mamba2": Mamba2Config(
        **COMMON,
        hidden_size=256,
        num_hidden_layers=3,
        num_heads=16,
        head_dim=32,
        expand=2,
        n_groups=1,
        state_size=32,
        initializer_range=0.2,
        tie_word_embeddings=False,
    ),
    "granite-hybrid": GraniteMoeHybridConfig(
        **COMMON,
        hidden_size=256,
        intermediate_size=128,
        shared_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=2,
        num_experts_per_tok=1,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_expand=2,
        max_position_embeddings=8192,
        position_embedding_type="rope",
        initializer_range=0.2,
        tie_word_embeddings=False,
    ),
}


def make(folder: Path) -> None:
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        if name in ("jamba", "mamba2"):
            remember(model)
        model.to(torch.bfloat16).save_pretrained(folder / name)
    torch.manual_seed(1)
    trained = AutoModelForCausalLM.from_config(CONFIGS["qwen2"])
    trained.to(torch.bfloat16).save_pretrained(folder / "qwen2-trained")
    for seed, name in enumerate(("first-adapter", "second-adapter")):
        make_adapter(folder / name, CONFIGS["qwen2"], seed)
    make_seeing(folder / "blip2")


def remember(model: Any) -> None:
    """Let states decay so slowly that they hang on the first of thousands of tokens."""
    for name, weights in model.named_parameters():
        if name.endswith("dt_bias"):
            weights.data.fill_(-3.0)
        if name.endswith("A_log"):
            weights.data.copy_(torch.linspace(-8.0, 0.5, weights.numel()).view(weights.shape))


def make_seeing(folder: Path) -> None:
    """A model that sees 56 × 56 pixels as 32 tokens before the prompt; it needs no torchvision."""
    torch.manual_seed(0)
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.2,
    }
    text = OPTConfig(
        **COMMON,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=4096,
        init_std=0.2,
    )
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**small, image_size=56, patch_size=14).to_dict(),
        qformer_config=Blip2QFormerConfig(**small, encoder_hidden_size=64, vocab_size=2048).to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=32,
        image_text_hidden_size=64,
        image_token_index=3,
        initializer_range=0.2,
    )
    model = Blip2ForConditionalGeneration(config)
    model.query_tokens.data.normal_()
    model.language_projection.weight.data.mul_(8)  # so that answers tell what it saw
    model.to(torch.bfloat16).save_pretrained(folder)
    words = {"<unk>": 0, "<image>": 3} | {f"w{each}": each for each in range(2048) if each not in (0, 3)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>", pad_token="<unk>"
    )
    pixels = BlipImageProcessor(size={"height": 56, "width": 56})
    Blip2Processor(image_processor=pixels, tokenizer=tokenizer, num_query_tokens=32).save_pretrained(folder)


def make_adapter(folder: Path, config: PretrainedConfig, seed: int) -> None:
    """A LoRA of the queries and values of every layer."""
    generator = torch.Generator().manual_seed(seed)
    hidden, rank = config.hidden_size, 8
    widths = {"q_proj": hidden, "v_proj": config.num_key_value_heads * hidden // config.num_attention_heads}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for module, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.2
            tensors[f"{at}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * 0.2
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(widths),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
