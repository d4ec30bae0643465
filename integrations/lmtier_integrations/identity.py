"""The identity of a model's KV in all engines: the files of its weights, and its configuration.

Engines that use these functions find each other's KV. Every other setting of an engine that changes KV is an
argument, so that it changes the key.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from glob import escape, glob
from pathlib import Path
from typing import Any, TypeAlias

from lmtier.format.keys import weights_digest

_SAYS_NOTHING = {
    "_name_or_path",
    "transformers_version",
    "architectures",
    "torch_dtype",
    "dtype",
    "_commit_hash",
}
_TELLS_LENGTHS = re.compile("original_max_position|attn_temperature_tuning|llama4")
"""Models that may rotate or scale by the length they are run with: LongRoPE, Llama 4."""
_ON_TOKENS = ("chat_template", "generation_config", "tokenizer", "vocab", "added_tokens", "special_tokens")
"""The start of the names of files that only affect tokens. Tokens are in keys anyway."""
_IN_KEYS = "config.json"
"""The model's configuration. `attention_of` removes the fields that do not affect KV."""
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SETTLED = 1.0  # seconds: a file that changed later than that may change again without another time stamp
_TRIES = 3  # readings of files that change during the reading

Stamps: TypeAlias = tuple[tuple[str, int, int, int, int], ...]
"""Path, inode, size, and when content and inode changed last in ns, of each file."""

_digests: dict[Stamps, str] = {}


def weights_in(place: str, *beside: str) -> str:
    """A digest of the weights in a folder or in one file, or nothing. Files are read again when they change.

    `beside` names other files of the folder to include, if it has weights.
    """
    for _ in range(_TRIES):
        stamps = stamps_of(place, *beside)
        if not stamps:
            return ""
        if known := _digests.get(stamps):
            return known
        began = time.time_ns()
        try:
            digest = weights_digest(path for path, *_ in stamps)
        except FileNotFoundError:
            continue
        if stamps_of(place, *beside) != stamps:
            continue
        if began - newest(stamps) > _SETTLED * 1e9:
            if len(_digests) >= 256:
                _digests.clear()
            _digests[stamps] = digest
        return digest
    return ""


def weights_of(model: str, revision: str | None = None) -> str:
    """The digest of a folder with its configuration, or the commit of a hub; empty if neither is known."""
    if not (weights := weights_in(model)):
        return revision if revision and re.fullmatch("[0-9a-f]{40}", revision) else ""
    config = Path(model, "config.json")
    return hashlib.sha256(weights.encode() + (config.read_bytes() if config.is_file() else b"")).hexdigest()


def adapter_in(place: str) -> str:
    """The digest of an adapter, with its configuration: the numbers there scale its weights."""
    return weights_in(os.path.expanduser(place), "adapter_config.json")


def stamps_of(place: str, *beside: str) -> Stamps:
    """The stamps that show a change of these files without reading them."""
    files = [place] if os.path.isfile(place) else []
    files = files or sorted(
        path for each in _WEIGHT_FILES for path in glob(os.path.join(escape(place), each))
    )
    files += [path for each in beside if files and os.path.isfile(path := os.path.join(place, each))]
    try:
        return tuple(
            (path, stat.st_ino, stat.st_size, stat.st_mtime_ns, max(stat.st_ctime_ns, link.st_ctime_ns))
            for path in files
            for stat, link in [(os.stat(path), os.lstat(path))]
        )
    except FileNotFoundError:  # replaced just now
        return ()


def newest(stamps: Stamps) -> int:
    """When the last of these files changed, or was put in its place: nanoseconds since 1970."""
    return max(max(stamp[-2:]) for stamp in stamps)


def preparing_files_in(place: str) -> str:
    """A digest of the settings and code that prepare images, audio and video for a model.

    They are in the model's folder, or next to its one file. Empty if there is no such folder.
    """
    folder = Path(place).parent if os.path.isfile(place) else Path(place)
    if not folder.is_dir():
        return ""
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (*folder.glob("*.json"), *folder.glob("*.py"))
        if not path.name.startswith(_ON_TOKENS) and not path.name.endswith(".index.json")
    }
    found.pop(_IN_KEYS, None)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def attention_of(
    config: Any,
    *,
    length: str,
    dtype: str,
    kv: str = "auto",
    quantization: str = "None",
    speculative: str = "",
    engine: Mapping[str, Any] | None = None,
) -> str:
    """All effects of a model's configuration and an engine's settings on KV, for `Identity.attention`.

    `length` is the engine's maximal length, or a word for it. It only counts for models whose KV may depend
    on it. `kv` is the dtype of the cache, if it is not the model's. `engine` has all other settings that
    change KV; engines without such settings share KV.
    """
    facts = {
        "config": _plain(config),
        "dtype": dtype,
        "kv": kv,
        "quantization": quantization,
        "speculative": speculative,
    }
    if engine:
        facts["engine"] = dict(engine)
    if _TELLS_LENGTHS.search(json.dumps(facts["config"], default=str)):
        facts["length"] = length
    return (
        f"config={hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]}"
    )


def _plain(config: Any) -> dict[str, Any]:
    """A model's configuration without the fields that do not affect KV."""
    found = json.loads(json.dumps(config.to_dict(), default=str))

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cleaned(each) for name, each in value.items() if name not in _SAYS_NOTHING}
        return [cleaned(each) for each in value] if isinstance(value, list) else value

    result: dict[str, Any] = cleaned(found)
    return result
