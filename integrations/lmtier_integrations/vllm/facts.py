"""What of vLLM's configuration changes KV for the same tokens: `fields.toml` says of each field whether."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tomllib
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry

TABLE: dict[str, list[dict[str, Any]]] = tomllib.loads(
    files("lmtier_integrations.vllm").joinpath("fields.toml").read_text()
)
_FROM_FILES = {
    *("auto", "hf", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "safetensors"),
    *("runai_streamer", "runai_streamer_sharded", "sharded_state", "bitsandbytes", "gguf"),
}
"""Load formats that read the weights in the model's folder, as we do."""
_FOR_SPEED = {"enable_multithread_load", "num_threads", "concurrency", "memory_limit", "distributed"}
_DTYPE = "dtype of the model"


def facts_of(config: VllmConfig) -> dict[str, Any]:
    """What is said that changes KV, and is not the default; so most engines have none."""
    model = config.model_config
    found = _said(config)
    found |= {
        name: value
        for entry in TABLE["environment"]
        for name in entry["names"].split()
        if (value := os.environ.get(name))
    }
    if callable(model.hf_overrides) or "architectures" in (model.hf_overrides or {}):
        found["architecture"] = model.architecture
    if code := _code_of(model):
        found["code"] = code
    return found


def why_private(config: VllmConfig) -> str:
    """Why KV is of this run only, although the weights are known; empty if it is not."""
    load, extra = config.load_config.load_format, config.load_config.model_loader_extra_config
    if load == "dummy":
        return "load_format=dummy makes weights up"
    if load not in _FROM_FILES:
        return f"load_format={load} reads weights elsewhere"
    if other := sorted(set(extra or {}) - _FOR_SPEED) if isinstance(extra, dict | None) else [str(extra)]:
        return f"model_loader_extra_config may name other weights, by {', '.join(other)}"
    if getattr(config.model_config, "model_class_overrides", None):
        return "model_class_overrides runs code that changes"
    return ""


def _said(config: VllmConfig) -> dict[str, Any]:
    parts = {type(config).__name__: config}
    parts |= {type(each).__name__: each for each in vars(config).values()}
    found: dict[str, Any] = {}
    for entry in TABLE["fields"]:
        part = parts.get(entry["of"])
        if entry["key"] != "yes" or part is None:
            continue
        plain = {str(value) for value in entry.get("plain", ())}
        if _DTYPE in plain:
            plain.add(str(config.model_config.dtype))
        defaults = {each.name: _default(each) for each in fields(part)}
        for name in entry["names"].split():
            value = getattr(part, name, None)
            if value and value != defaults.get(name) and str(value) not in plain:
                found[f"{entry['of']}.{name}"] = value
    return found


def _default(field: Any) -> Any:
    given = field.default if field.default is not MISSING else field.default_factory
    if isinstance(given, FieldInfo):
        return given.get_default(call_default_factory=True)
    return given() if given is not MISSING and field.default is MISSING else given


def _code_of(model: Any) -> str:
    """A digest of code that comes with the model, or with a plug-in; empty if it is vLLM's own."""
    if model.trust_remote_code and getattr(model.hf_config, "auto_map", None):
        folder = Path(model.model)
        if not folder.is_dir():
            return str(model.code_revision or model.revision or "")
        return _digest_of(sorted(folder.rglob("*.py")))
    known = ModelRegistry.models.get(model.architecture)
    module = getattr(known, "module_name", None) or getattr(
        getattr(known, "model_cls", None), "__module__", ""
    )
    if not module or module.startswith("vllm."):
        return ""
    found = importlib.util.find_spec(module)
    return _digest_of([Path(found.origin)]) if found is not None and found.origin else module


def _digest_of(paths: list[Path]) -> str:
    digests = (hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
    return hashlib.sha256("".join(digests).encode()).hexdigest()
