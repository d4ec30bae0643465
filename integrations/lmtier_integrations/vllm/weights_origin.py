"""What weights in a rank's memory were loaded from: the files that vLLM's own loaders choose and open.

A folder may hold several checkpoints, and an index may name some of its files. So vLLM's loader itself is
asked, as it is configured and with the model that it has filled. Where its choice cannot be known, keys are
private to this run of the engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from glob import escape, glob
from typing import Any

from huggingface_hub import snapshot_download
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import DefaultModelLoader, ShardedStateLoader, get_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader
from vllm.model_executor.model_loader.utils import get_model_cls

from lmtier_integrations.identity import FileStamps, WeightFiles, newest
from lmtier_integrations.vllm.messages import WeightsOrigin

_FOR_SPEED = {"enable_multithread_load", "num_threads", "concurrency", "memory_limit", "distributed"}
_BESIDE = ("*quant*.json", "mask_embedding.pt")
"""Files that say how weights are to be read, and weights of drafts that no loader opens."""


class _Unknown(Exception):
    """Why it is not known what a loader opens."""


@dataclass(frozen=True, slots=True)
class _Source:
    prefix: str
    """The prefix of the tensors' names in the model."""
    files: WeightFiles
    commit: str
    """The commit of a hub, which stands for the files' content; or empty."""

    @property
    def named(self) -> list[str]:
        return [os.path.relpath(path, self.files.folder) for path in self.files.paths]

    def settled(self, *, reads: bool) -> tuple[FileStamps | str, object]:
        """Something that differs when the files have changed, and their digest. Empty: they are changing."""
        if self.commit:
            return f"{self.commit} {self.named}", [self.prefix, self.commit, self.named]
        stamps, digest = self.files.settled() if reads else (self.files.stamps(), "")
        return stamps, [self.prefix, digest] if self.prefix else digest


def origin_of(
    model: ModelConfig,
    load: LoadConfig,
    built: Any = None,
    *,
    computes_digest: bool = True,
    since: float = 0.0,
    is_at_start: bool = True,
) -> WeightsOrigin:
    """The origin of the weights of a model that was built. `computes_digest`: of their bytes too.

    `since` is when loading began, in seconds since 1970: what is newer may have been loaded in part.
    `is_at_start`: they were loaded as the engine began, so of a hub the commit is that of the model's
    configuration.
    """
    try:
        sources = list(_sources_of(model, load, built, began=is_at_start))
    except _Unknown as why:
        return WeightsOrigin(why=str(why))
    except (OSError, RuntimeError, ValueError):  # files are missing by now, or an index does not fit them
        return WeightsOrigin()
    settled_sources = [source.settled(reads=computes_digest) for source in sources]
    stamps = [stamps for stamps, _ in settled_sources]
    newest_times = [newest(stamp) / 1e9 for stamp in stamps if stamp and not isinstance(stamp, str)]
    if not all(stamps) or any(changed_at > since > 0 for changed_at in newest_times):
        return WeightsOrigin()
    digests = [digest for _, digest in settled_sources]
    # Other engines find this name too, if all is in one place.
    name = digests[0] if len(digests) == 1 and isinstance(digests[0], str) else _digest_of(digests)
    return WeightsOrigin(files=_digest_of(stamps), digest=str(name) if computes_digest else "")


def origin_of_draft(
    config: VllmConfig, built: Any, *, computes_digest: bool = True, since: float = 0.0
) -> WeightsOrigin | None:
    """The same for a draft model, whose KV is in the same blocks; None: there is none.

    A stage of a pipeline may not have built it, but its class says as much.
    """
    speculative = config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None or draft is config.model_config:
        return None
    load = speculative.draft_load_config or config.load_config
    return origin_of(draft, load, built or get_model_cls(draft), computes_digest=computes_digest, since=since)


def combined_origin(model: WeightsOrigin, draft: WeightsOrigin | None) -> WeightsOrigin:
    """The origin of all weights of a rank."""
    if draft is None:
        return model
    return WeightsOrigin(
        files=_digest_of([model.files, draft.files]) if model.files and draft.files else "",
        digest=_digest_of([model.digest, draft.digest]) if model.digest and draft.digest else "",
        why=model.why or draft.why,
    )


def _sources_of(model: ModelConfig, load: LoadConfig, built: Any, *, began: bool) -> Iterator[_Source]:
    load_format = load.load_format
    if unknown_options := _not_for_speed(load):
        raise _Unknown(f"model_loader_extra_config may name other weights with {', '.join(unknown_options)}")
    loader: Any = get_model_loader(load)
    if type(loader) is DummyModelLoader:
        raise _Unknown("load_format=dummy gives the model random weights")
    if load_format == "npcache":
        raise _Unknown("load_format=npcache loads a copy of the weights, which may be of earlier ones")
    if type(loader) is ShardedStateLoader:
        folder = model.model_weights or model.model
        paths = sorted(glob(os.path.join(escape(folder), "*.safetensors")))  # each rank opens some of them
        if not paths:
            raise _Unknown(f"load_format={load_format} does not read the weights in the model's folder")
        yield _Source("", WeightFiles(folder, tuple(paths)), "")
        return
    if type(loader) not in (DefaultModelLoader, RunaiModelStreamerLoader):
        raise _Unknown(f"load_format={load_format} does not say which files it reads")
    recorded: list[Any] = []

    def note(*source: Any) -> tuple[()]:
        recorded.append(source)
        return ()

    loader._get_weights_iterator = note
    for _ in loader.get_all_weights(model, built):
        pass
    for source_args in recorded:
        if type(loader) is RunaiModelStreamerLoader:
            folder, commit = _place_of(source_args[0], source_args[1], model, load, began=began)
            paths, is_in_order, prefix = sorted(loader._prepare_weights(folder, None)), False, ""
        else:
            (source,) = source_args
            folder, commit = _place_of(source.model_or_path, source.revision, model, load, began=began)
            choice = (None, source.fall_back_to_pt, source.allow_patterns_overrides)
            _, paths, is_safetensors, *_ = loader._prepare_weights(folder, source.subfolder, *choice)
            is_racy = load_format == "instanttensor" or (load.model_loader_extra_config or {}).get(
                "enable_multithread_load"
            )
            is_in_order, prefix = not is_racy, source.prefix
            if is_safetensors or is_racy:  # else they are opened in the order of their folder
                paths = sorted(paths)
        files = WeightFiles(folder, tuple(paths))
        if not is_in_order and files.share_tensors():
            raise _Unknown("several files may have the same tensor, and are loaded in no certain order")
        folders = sorted({folder, *map(os.path.dirname, paths)})
        patterns = (os.path.join(escape(each), name) for each in folders for name in _BESIDE)
        side_files = (path for place in patterns for path in glob(place))
        yield _Source(prefix, replace(files, paths=(*paths, *side_files)), commit)


def _place_of(
    repo_or_folder: str, revision: str | None, model: ModelConfig, load: LoadConfig, *, began: bool
) -> tuple[str, str]:
    """The folder that is loaded from, and its commit if it is of a hub."""
    if os.path.isdir(repo_or_folder):
        return repo_or_folder, ""
    is_of_config = began and repo_or_folder == model.model
    commits = [revision, getattr(model.hf_config, "_commit_hash", None) if is_of_config else None]
    for commit in commits:
        if commit and re.fullmatch("[0-9a-f]{40}", commit):
            download_options: dict[str, Any] = {"cache_dir": load.download_dir, "local_files_only": True}
            return snapshot_download(repo_or_folder, revision=commit, **download_options), commit
    raise _Unknown(f"the weights of {repo_or_folder} are neither files nor a commit of a hub")


def _not_for_speed(load: LoadConfig) -> list[str]:
    extra = load.model_loader_extra_config
    return sorted(set(extra or {}) - _FOR_SPEED) if isinstance(extra, dict | None) else [str(extra)]


def _digest_of(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
