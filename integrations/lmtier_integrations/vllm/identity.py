"""What makes the KV of two engines interchangeable, read from vLLM's configuration.

Whatever changes KV for the same tokens must change the key. Where that cannot be known for certain, the
keys are private to this run of the engine: a cold start costs time, a wrong hit costs the answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
from functools import lru_cache
from glob import escape, glob
from typing import Any

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from lmtier.keys import Extra, Identity, weights_digest

log = logging.getLogger("vllm.lmtier")

_SAYS_NOTHING = {
    "_name_or_path",
    "transformers_version",
    "architectures",
    "torch_dtype",
    "dtype",
    "_commit_hash",
}
_TELLS_LENGTHS = re.compile("original_max_position|attn_temperature_tuning|llama4")
"""Models that rotate or scale by the length the engine was started with: LongRoPE, Llama 4."""
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SECRET = secrets.token_hex(16)


def identity_of(config: VllmConfig, name: str = "") -> Identity:
    """Of the model and all that the engine does to it; what the layout says is added by the mover."""
    model, cache = config.model_config, config.cache_config
    weights = _weights(model.model, model.revision, model.hf_config)
    why = ""
    if not weights:
        why = f"the weights of {model.model} are neither files nor a commit of a hub"
    elif config.load_config.load_format == "dummy":
        why = "load_format=dummy makes weights up"
    elif getattr(cache, "calculate_kv_scales", False):  # until 0.31
        why = "calculate_kv_scales makes KV depend on the first batch"
    if why:
        weights = ""
        log.warning("lmtier: %s, so what is stored is found by this run of the engine only", why)
    facts = {
        "config": _plain(model.hf_config),
        "dtype": str(model.dtype),
        "kv": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "speculative": _draft(config),
    }
    if _TELLS_LENGTHS.search(json.dumps(facts["config"], default=str)):
        facts["length"] = str(model.max_model_len)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return Identity(model=name or model.model, weights=weights, attention=f"vllm={digest[:32]}")


def lora_of(request: Request) -> str:
    """The adapter by its content, because another one may come to lie at the same place."""
    lora: LoRARequest | None = request.lora_request
    if lora is None:
        return ""
    files = _files(lora.lora_path, _WEIGHT_FILES)
    stamps = tuple((path, stat.st_mtime_ns, stat.st_size) for path in files for stat in [os.stat(path)])
    content = _digest(stamps) if stamps else f"private {_SECRET}"
    return f"{lora.lora_name}\0{content}"


def media_of(request: Request) -> list[Extra]:
    return [
        Extra(item.mm_position.offset, item.mm_position.length, item.identifier)
        for item in request.mm_features
    ]


def _weights(model: str, revision: str | None, config: Any) -> str:
    files = _files(model, _WEIGHT_FILES)
    if files:
        return _digest(
            tuple((path, stat.st_mtime_ns, stat.st_size) for path in files for stat in [os.stat(path)])
        )
    for commit in (revision, getattr(config, "_commit_hash", None)):
        if commit and re.fullmatch(r"[0-9a-f]{40}", commit):
            return str(commit)
    return ""


def _files(place: str, patterns: tuple[str, ...]) -> list[str]:
    if os.path.isfile(place):
        return [place]
    return sorted(path for each in patterns for path in glob(os.path.join(escape(place), each)))


@lru_cache(maxsize=256)
def _digest(stamps: tuple[tuple[str, int, int], ...]) -> str:
    return weights_digest(path for path, _, _ in stamps)


def _plain(config: Any) -> dict[str, Any]:
    """A model's configuration without what has no bearing on KV."""
    found = json.loads(json.dumps(config.to_dict(), default=str))

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cleaned(each) for name, each in value.items() if name not in _SAYS_NOTHING}
        return [cleaned(each) for each in value] if isinstance(value, list) else value

    result: dict[str, Any] = cleaned(found)
    return result


def _draft(config: VllmConfig) -> str:
    """A draft model has KV in the same blocks."""
    speculative = config.speculative_config
    if speculative is None:
        return ""
    draft = speculative.draft_model_config
    if draft is None:
        return str(speculative.method)
    return f"{speculative.method} {_weights(draft.model, draft.revision, draft.hf_config) or _SECRET}"
