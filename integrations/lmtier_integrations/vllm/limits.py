"""What keeps an engine from loading: it needs every token of a prompt computed."""

from __future__ import annotations

from vllm.config import VllmConfig


def pools_whole_prompts(config: VllmConfig) -> bool:
    """Whether a pooling model needs each prompt in one step, as with the mean over its tokens.

    vLLM has no prefix caching for these. Behind a loaded prefix their pooler raises an error, which ends the
    engine.
    """
    model = config.model_config
    return bool(model.runner_type == "pooling" and not model.is_prefix_caching_supported)


def returns_experts(config: VllmConfig) -> bool:
    """Whether the engine returns the experts that computed each token.

    It knows them for tokens that it has computed itself. Of loaded ones vLLM 0.31 and later miss them, which
    ends the engine, and earlier versions return those of other tokens.
    """
    outputs = getattr(config, "aux_output_config", None) or config.model_config
    return bool(outputs.enable_return_routed_experts)
