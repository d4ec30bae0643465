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
