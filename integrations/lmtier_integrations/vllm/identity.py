"""What makes the KV of two engines interchangeable, read from vLLM's configuration.

Whatever changes KV for the same tokens must change the key. Where that cannot be known for certain, the
keys are private to this run of the engine: a cold start costs time, a wrong hit costs the answer.
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from lmtier.keys import Identity
from lmtier.lifetimes import MAX_TTL
from lmtier_integrations.identity import attention_of, weights_in
from lmtier_integrations.vllm.facts import facts_of, why_private

log = logging.getLogger("vllm.lmtier")

_SECRET = secrets.token_hex(16)


def identity_of(config: VllmConfig, name: str = "") -> Identity:
    """Of the model and all that the engine does to it; what the layout says is added by the mover."""
    model, cache = config.model_config, config.cache_config
    weights = _weights(model.model, model.revision, model.hf_config)
    why = ""
    if not weights:
        why = f"the weights of {model.model} are neither files nor a commit of a hub"
    else:
        why = why_private(config)
    if why:
        weights = ""
        log.warning("lmtier: %s, so what is stored is found by this run of the engine only", why)
    attention = attention_of(
        model.hf_config,
        length=str(model.max_model_len),
        dtype=str(model.dtype),
        kv=str(cache.cache_dtype),
        quantization=str(model.quantization),
        speculative=_draft(config),
        engine=facts_of(config),
    )
    return Identity(model=name or model.model, weights=weights, attention=attention)


def lora_of(request: Request, content: str) -> str:
    """The adapter as keys know it: by its content, because another one may come to lie at the same place."""
    lora: LoRARequest | None = request.lora_request
    return "" if lora is None else f"{lora.lora_name}\0{content}"


def ttl_of(request: Request) -> float | None:
    """Seconds that what it computes may be used, if it says so. A wrong word of a user's stops no engine."""
    params = request.kv_transfer_params
    seconds = params.get("lmtier_ttl") if isinstance(params, dict) else None
    if seconds is None:
        return None
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= MAX_TTL:
        return float(seconds)
    log.warning("lmtier: lmtier_ttl=%.40r of a request is no number of seconds: not obeyed", seconds)
    return None


def _weights(model: str, revision: str | None, config: Any) -> str:
    if files := weights_in(model):
        return files
    for commit in (revision, getattr(config, "_commit_hash", None)):
        if commit and re.fullmatch(r"[0-9a-f]{40}", commit):
            return str(commit)
    return ""


def _draft(config: VllmConfig) -> str:
    """A draft model has KV in the same blocks."""
    speculative = config.speculative_config
    if speculative is None:
        return ""
    draft = speculative.draft_model_config
    if draft is None:
        return str(speculative.method)
    return f"{speculative.method} {_weights(draft.model, draft.revision, draft.hf_config) or _SECRET}"
