"""The identity of an engine's KV, read from vLLM's configuration.

Every setting that changes KV for the same tokens must change the key. If that is not known for certain, keys
are private to this run of the engine: a cold start only costs time, but a wrong hit gives a wrong answer.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from vllm.config import ModelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import ModelRegistry
from vllm.v1.request import Request

from lmtier.format.keys import Identity
from lmtier_integrations.identity import attention_of
from lmtier_integrations.vllm.messages import WeightsOrigin

TABLE: dict[str, list[dict[str, Any]]] = tomllib.loads(
    files("lmtier_integrations.vllm").joinpath("fields.toml").read_text()
)
_DTYPE = "dtype of the model"
_LONG = 32768  # tokens, above which Llama 4 scales its attention if nothing is said of it


def identity_of(config: VllmConfig, name: str = "", weights: str = "") -> Identity:
    """The identity of the model with the engine's settings. The mover adds the layout."""
    model, cache, speculative = config.model_config, config.cache_config, config.speculative_config
    attention = attention_of(
        _as_built(model),
        length=str(_built_length(model)),
        dtype=str(model.dtype),
        kv=str(cache.cache_dtype),
        quantization=str(model.quantization),
        speculative="" if speculative is None else str(speculative.method),
        engine=facts_of(config),
    )
    return Identity(model=name or model.model, weights=weights, attention=attention)


def name_of(origins: Mapping[int, WeightsOrigin], config: VllmConfig) -> tuple[str, str]:
    """The name of the weights that all ranks have loaded; or nothing, and why only this run finds KV."""
    files = {each.files for each in origins.values()}
    why = next((each.why for each in origins.values() if each.why), "")
    if getattr(config.model_config, "model_class_overrides", None):
        why = why or "model_class_overrides runs code that may change"
    if not why and (len(origins) < config.parallel_config.world_size or len(files) > 1 or "" in files):
        why = "the weights' files have changed since the engine began to load them"
    digest = max((each.digest for each in origins.values()), default="")
    return ("", why) if why else (digest, "")


def lora_of(request: Request, content: str) -> str:
    """The adapter's part of the key. It includes the content, because the files may be replaced."""
    lora: LoRARequest | None = request.lora_request
    return "" if lora is None else f"{lora.lora_name}\0{content}"


def _as_built(model: ModelConfig) -> Any:
    """The model's configuration with what its class writes into it while it is built.

    Llama 4 takes the scaling of its attention from the generation config. Only the process that builds the
    model sees the change, and only where the configuration has no parts.
    """
    if not str(getattr(model.hf_text_config, "model_type", "")).startswith("llama4"):
        return model.hf_config
    generation_config = model.try_get_generation_config() | model.override_generation_config
    config = copy.deepcopy(model.hf_config)
    config.get_text_config().attn_temperature_tuning = generation_config.get(
        "attn_temperature_tuning", _built_length(model) > _LONG
    )
    return config


def _built_length(model: ModelConfig) -> int:
    """The maximal length with which the model is built.

    With `--max-model-len auto` (-1) that is the model's own. Later vLLM lowers it to what fits into memory,
    which differs from start to start.
    """
    fits = model.original_max_model_len == -1
    return int(model.get_and_verify_max_len(-1) if fits else model.max_model_len)


# ---- settings that change KV for the same tokens: `fields.toml` lists every field of the configuration


def facts_of(config: VllmConfig) -> dict[str, Any]:
    """The settings that change KV and differ from the default. Most engines have none."""
    model = config.model_config
    facts = _configured(config)
    facts |= {
        name: value
        for entry in TABLE["environment"]
        for name in entry["names"].split()
        if (value := os.environ.get(name))
    }
    if callable(model.hf_overrides) or "architectures" in (model.hf_overrides or {}):
        facts["architecture"] = model.architecture
    if code := _code_of(model):
        facts["code"] = code
    return facts


def keeps_states(model: ModelConfig) -> bool:
    """Whether some layers of the model keep a state instead of KV, or all of them."""
    return bool(model.is_hybrid or model.is_attention_free)


def _configured(config: VllmConfig) -> dict[str, Any]:
    parts = {type(config).__name__: config}
    parts |= {type(each).__name__: each for each in vars(config).values()}
    facts: dict[str, Any] = {}
    for entry in TABLE["fields"]:
        part = parts.get(entry["of"])
        applies = "only" not in entry or keeps_states(config.model_config)
        if entry["key"] != "yes" or part is None or not applies:
            continue
        neutral_values = {str(value) for value in entry.get("plain", ())}
        if _DTYPE in neutral_values:
            neutral_values.add(str(config.model_config.dtype))
        defaults = {each.name: _default(each) for each in fields(part)}
        for name in entry["names"].split():
            value = getattr(part, name, None)
            if value and value != defaults.get(name) and str(value) not in neutral_values:
                facts[f"{entry['of']}.{name}"] = value
    return facts


def _default(field: Any) -> Any:
    given = field.default if field.default is not MISSING else field.default_factory
    if isinstance(given, FieldInfo):
        return given.get_default(call_default_factory=True)
    return given() if given is not MISSING and field.default is MISSING else given


def _code_of(model: Any) -> str:
    """A digest of the code that comes with the model or a plug-in. Empty for vLLM's own code."""
    if model.trust_remote_code and getattr(model.hf_config, "auto_map", None):
        folder = Path(model.model)
        if not folder.is_dir():
            return str(model.code_revision or model.revision or "")
        return _digest_of(sorted(folder.rglob("*.py")))
    registered = ModelRegistry.models.get(model.architecture)
    module = getattr(registered, "module_name", None) or getattr(
        getattr(registered, "model_cls", None), "__module__", ""
    )
    if not module or module.startswith("vllm."):
        return ""
    spec = importlib.util.find_spec(module)
    return _digest_of([Path(spec.origin)]) if spec is not None and spec.origin else module


def _digest_of(paths: list[Path]) -> str:
    digests = (hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
    return hashlib.sha256("".join(digests).encode()).hexdigest()
