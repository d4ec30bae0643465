"""What makes the KV of one model the same in every engine: the files of its weights, and its configuration.

Engines that describe a model by these functions find each other's KV. Whatever else an engine does to KV
is an argument here, so that it changes the key.
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

from lmtier.keys import weights_digest

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
"""Beginnings of files that decide about tokens only, which are in keys themselves."""
_IN_KEYS = "config.json"
"""The model's configuration, which `attention_of` cleans of what has no bearing on KV."""
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SETTLED = 1.0  # seconds: a file that changed later than that may change again without another time stamp
_TRIES = 3  # readings of files that somebody writes meanwhile

Stamps: TypeAlias = tuple[tuple[str, int, int, int, int], ...]
"""Path, inode, size, and when content and inode changed last in ns, of each file."""

_digests: dict[Stamps, str] = {}


def weights_in(place: str, *beside: str) -> str:
    """The content of the weights in a folder, or of one file, or nothing. Read again when a file changes.

    `beside` names files of the folder that count too, where it has weights.
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


def adapter_in(place: str) -> str:
    """The same of an adapter: the numbers in its configuration scale its weights."""
    return weights_in(os.path.expanduser(place), "adapter_config.json")


def stamps_of(place: str, *beside: str) -> Stamps:
    """What tells that these files have changed, without reading them."""
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
    """A digest of what prepares images, audio and video in the folder of a model, or beside its one file.

    Of settings and code; empty if there is no such folder.
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
    """All that a model's configuration and an engine's settings do to KV, for `Identity.attention`.

    `length` is what the engine was started with, or another word for it; it counts for those models only
    whose KV may depend on it. `kv` is the dtype of the cache, where it is not the model's. `engine` is
    whatever else an engine was told that changes KV; engines that were told nothing meet.
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
    """A model's configuration without what has no bearing on KV."""
    found = json.loads(json.dumps(config.to_dict(), default=str))

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cleaned(each) for name, each in value.items() if name not in _SAYS_NOTHING}
        return [cleaned(each) for each in value] if isinstance(value, list) else value

    result: dict[str, Any] = cleaned(found)
    return result
