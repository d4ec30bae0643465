"""What makes the KV of one model the same in every engine: the files of its weights, and its configuration.

Engines that describe a model by these functions find each other's KV. Whatever else an engine does to KV
is an argument here, so that it changes the key.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from functools import lru_cache
from glob import escape, glob
from typing import Any

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
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def weights_in(place: str) -> str:
    """The content of the weights in a folder, or of one file, or nothing. Read again when a file changes."""
    files = [place] if os.path.isfile(place) else []
    files = files or sorted(
        path for each in _WEIGHT_FILES for path in glob(os.path.join(escape(place), each))
    )
    return _digest(
        tuple((path, stat.st_mtime_ns, stat.st_size) for path in files for stat in [os.stat(path)])
    )


def attention_of(
    config: Any,
    *,
    length: str,
    dtype: str,
    kv: str = "auto",
    quantization: str = "None",
    speculative: str = "",
) -> str:
    """All that a model's configuration and an engine's settings do to KV, for `Identity.attention`.

    `length` is what the engine was started with, or another word for it; it counts for those models only
    whose KV may depend on it. `kv` is the dtype of the cache, where it is not the model's.
    """
    facts = {
        "config": _plain(config),
        "dtype": dtype,
        "kv": kv,
        "quantization": quantization,
        "speculative": speculative,
    }
    if _TELLS_LENGTHS.search(json.dumps(facts["config"], default=str)):
        facts["length"] = length
    return (
        f"config={hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]}"
    )


@lru_cache(maxsize=256)
def _digest(stamps: tuple[tuple[str, int, int], ...]) -> str:
    return weights_digest(path for path, _, _ in stamps) if stamps else ""


def _plain(config: Any) -> dict[str, Any]:
    """A model's configuration without what has no bearing on KV."""
    found = json.loads(json.dumps(config.to_dict(), default=str))

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cleaned(each) for name, each in value.items() if name not in _SAYS_NOTHING}
        return [cleaned(each) for each in value] if isinstance(value, list) else value

    result: dict[str, Any] = cleaned(found)
    return result
