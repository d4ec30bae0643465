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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
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
_INDEXES = "*.index.json"
_SETTLED = 1.0  # seconds: a file that changed later than that may change again without another time stamp
_TRIES = 3  # readings of files that change during the reading

Stamp: TypeAlias = tuple[str, int, int, int, int]
"""Path, inode, size, and when content and inode changed last in ns, of one file or folder."""
FileStamps: TypeAlias = tuple[Stamp, ...]

_digests: dict[Stamp, str] = {}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that weights are loaded from, in the order in which they are opened."""

    folder: str
    paths: tuple[str, ...]

    def stamps(self) -> FileStamps:
        """The stamps that show a change of these files, or of their choice, without reading them.

        A file that appears or disappears changes the stamp of its folder. Empty: a file is missing.
        """
        folders = {self.folder, *map(os.path.dirname, self.paths)}
        indexes = (path for each in folders for path in glob(os.path.join(escape(each), _INDEXES)))
        return stamps_of((*self.paths, *sorted(folders), *sorted(indexes)))

    def digest(self) -> str:
        """A digest of names and contents in this order. Two files may have the same tensor."""
        named = ((os.path.relpath(path, self.folder), _content_of(path)) for path in self.paths)
        return hashlib.sha256(json.dumps(list(named)).encode()).hexdigest()

    def settled(self) -> tuple[FileStamps, str]:
        """Stamps and digest that belong together. Empty: the files are missing, or change all the time."""
        for _ in range(_TRIES):
            if not (stamps := self.stamps()):
                break
            with suppress(FileNotFoundError):
                digest = self.digest()
                if self.stamps() == stamps:
                    return stamps, digest
        return (), ""

    def share_tensors(self) -> bool:
        """Whether two of the files have, or may have, the same tensor. Then their order counts."""
        if len(self.paths) < 2:
            return False
        earlier_names: set[str] = set()
        for path in self.paths:
            if not path.endswith(".safetensors"):
                return True
            with open(path, "rb") as file:
                try:
                    names = set(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
                except (ValueError, OverflowError):
                    return True
            names.discard("__metadata__")
            if not earlier_names.isdisjoint(names):
                return True
            earlier_names.update(names)
        return False


def _content_of(path: str) -> str:
    """A digest of one file. It is read again when it has changed."""
    (stamp,) = stamps_of((path,)) or ((),)
    if stamp and (cached := _digests.get(stamp)):
        return cached
    read_at = time.time_ns()
    digest = weights_digest((path,))
    if stamp and stamps_of((path,)) == (stamp,) and read_at - newest((stamp,)) > _SETTLED * 1e9:
        if len(_digests) >= 4096:
            _digests.clear()
        _digests[stamp] = digest
    return digest


def all_in(place: str, *beside: str) -> WeightFiles:
    """All files of weights in a folder, or one file. `beside` names other files of a folder with weights."""
    if os.path.isfile(place):
        return WeightFiles(os.path.dirname(place), (place,))
    found = sorted(path for each in _WEIGHT_FILES for path in glob(os.path.join(escape(place), each)))
    found += [path for each in beside if found and os.path.isfile(path := os.path.join(place, each))]
    return WeightFiles(place, tuple(found))


def checkpoint_in(folder: str) -> WeightFiles:
    """The files that transformers loads from a folder by itself."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if os.path.isfile(path := os.path.join(folder, name)):
            return WeightFiles(folder, (path,))
        if os.path.isfile(index := f"{path}.index.json"):
            with open(index) as file:
                names = sorted(set(json.load(file)["weight_map"].values()))
            return WeightFiles(folder, tuple(os.path.join(folder, each) for each in names))
    return WeightFiles(folder, ())


def weights_in(place: str, *beside: str) -> str:
    """A digest of all weights in a folder or in one file, or nothing."""
    files = all_in(place, *beside)
    return files.settled()[1] if files.paths else ""


def adapter_in(place: str) -> str:
    """The digest of an adapter, with its configuration: the numbers there scale its weights."""
    return weights_in(os.path.expanduser(place), "adapter_config.json")


def stamps_of(paths: Iterable[str]) -> FileStamps:
    """The stamps of these files and folders. Empty: one is missing."""
    try:
        return tuple(
            (path, stat.st_ino, stat.st_size, stat.st_mtime_ns, max(stat.st_ctime_ns, link.st_ctime_ns))
            for path in paths
            for stat, link in [(os.stat(path or "."), os.lstat(path or "."))]
        )
    except FileNotFoundError:  # replaced just now
        return ()


def newest(stamps: FileStamps) -> int:
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
