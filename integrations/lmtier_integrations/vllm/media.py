"""Names for images, audio and video, from the tensors that the model gets.

vLLM names each item itself, and the name is not always one of content: it is a counter while vLLM's caches
are off, it is what the user says in `multi_modal_uuids`, and a user's name may look like a hash. A hash of
the file also leaves out how the file was prepared. So the tensors are hashed that the processor made.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm.envs
from blake3 import blake3
from vllm.config import VllmConfig
from vllm.v1.request import Request

from lmtier.format.keys import Extra
from lmtier_integrations.identity import preparing_files_in
from lmtier_integrations.vllm.request_inputs import is_readable
from lmtier_integrations.vllm.settings import log

_NAMES = 65_536  # names of vLLM's that are remembered with their content: more than its caches hold items
_LEAST = 16  # least bytes of content per token: embeddings and patches of pixels have hundreds
_PREPARES = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
"""The fields of vLLM's `MultiModalConfig` that change embeddings for the same file or the same tensors."""
_SCALES = "mm_encoder_fp8_scale_path"

Contents = list[Extra]


class Media:
    """The names of the requests' items in keys."""

    def __init__(self, config: VllmConfig, *, trusts_ids: bool = False) -> None:
        model = config.model_config
        settings = model.multimodal_config
        self._preparation = preparation_of(model) if settings is not None else ""
        # Without these caches vLLM names items by a count, or by a hash of the count and some options.
        has_hashes = config.cache_config.enable_prefix_caching or (
            settings is not None and settings.mm_processor_cache_gb > 0
        )
        self._trusts_ids = trusts_ids and has_hashes
        lora = config.lora_config
        self._is_adapted = lora is not None and lora.enable_tower_connector_lora
        """Whether adapters also change what is computed of an item. vLLM keeps that under the adapter's name,
        also when another adapter has taken its place."""
        # With this setting embeddings may come from another engine, by vLLM's name for them.
        self._sees_contents = config.ec_transfer_config is None
        self._run = secrets.token_hex(16)
        self._contents: OrderedDict[str, str] = OrderedDict()
        """The last content under each of vLLM's names; empty: there were different contents."""
        self._hashed: dict[int, tuple[weakref.ref[Any], str]] = {}
        """By the identity of the item: vLLM keeps the objects of repeated items."""
        self._has_warned = False

    def of(self, request: Request, adapter: str = "") -> Contents | None:
        """The contents of a request's items. None: they are unknown, so nothing may be stored or loaded.

        Called for every request that the engine gets, before it computes any of it. `adapter`: its content.
        """
        adapter_suffix = f" {adapter}" if self._is_adapted and adapter else ""
        names = [self._name(feature, adapter_suffix) for feature in request.mm_features]
        if "" in names:
            return None
        return [
            Extra(item.mm_position.offset, item.mm_position.length, f"{name} {self._preparation}")
            for item, name in zip(request.mm_features, names, strict=True)
        ]

    def _name(self, feature: Any, adapter_suffix: str) -> str:
        """`adapter_suffix`: the adapter that changes what is computed of it."""
        identifier, position = feature.identifier, feature.mm_position
        if not is_readable(identifier) or position.offset < 0 or position.length < 1:
            return ""
        if self._trusts_ids:
            return self._agreed(identifier, f"id {identifier}{adapter_suffix}")
        content = self._content_of(feature) if self._sees_contents else ""
        if not content:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "lmtier: this engine does not show the content of an item (%s), so only this run finds "
                    "KV after it; to share it, set trust_media_ids if vLLM's names identify the content",
                    feature.modality,
                )
            private = f"private {self._run} {identifier}{adapter_suffix}"
            return self._agreed(identifier, private) if adapter_suffix else private
        return self._agreed(identifier, content + adapter_suffix)

    def _agreed(self, identifier: str, content: str) -> str:
        """The content; empty if this name has had two contents, because vLLM may mix them up."""
        known_content = self._contents.pop(identifier, content)
        if known_content and known_content != content:
            log.warning("lmtier: two contents have the same name, %.80r, and are not cached", identifier)
        self._contents[identifier] = content if known_content == content else ""
        if len(self._contents) > _NAMES:
            self._contents.popitem(last=False)
        return self._contents[identifier]

    def _content_of(self, feature: Any) -> str:
        """A digest of the item. Empty: the item is not in this process, or only a part of it."""
        item, position = feature.data, feature.mm_position
        if not item:
            return ""
        cached = self._hashed.get(id(item))
        if cached is None or cached[0]() is not item:
            key = id(item)
            reference = weakref.ref(item, lambda _: self._hashed.pop(key, None))
            cached = self._hashed[key] = reference, _hash(item, position.length)
        content = cached[1]
        if content and position.is_embed is not None:
            content += f" {blake3(np.asarray(position.is_embed).tobytes()).hexdigest(16)}"
        return content and f"{feature.modality} {content}"


def preparation_of(model: Any) -> str:
    """A digest of everything that turns a file into embeddings, except the weights.

    `model` is vLLM's configuration. Steps that the model does after the tensors were hashed are included.
    """
    settings = model.multimodal_config
    options = {name: getattr(settings, name, None) for name in _PREPARES}
    options["video loader"] = vllm.envs.VLLM_VIDEO_LOADER_BACKEND
    if scales := getattr(settings, _SCALES, None):
        options[_SCALES] = Path(scales).read_text()
    digest = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode())
    repos = {model.model: model.revision, model.tokenizer: model.tokenizer_revision}
    for place, revision in sorted(repos.items(), key=str):
        digest.update(f"\0{preparing_files_in(place) or f'{place} {revision}'}".encode())
    return digest.hexdigest()[:32]


def _hash(item: Any, tokens: int) -> str:
    """A digest of an item's tensors. Empty: one is unreadable here, or they are too small to be complete.

    An engine that gets KV from others accepts requests with only the sizes of the embeddings.
    """
    digest, large = blake3(), 0
    for name in sorted(item):
        digest.update(_framed("field", name.encode()))
        if not _add(digest, item[name].data):
            return ""
        if not item[name].field.keep_on_cpu:
            large += _bytes_of(item[name].data)
    return digest.hexdigest() if large >= tokens * _LEAST else ""


def _framed(kind: str, content: bytes) -> bytes:
    return f"{kind} {len(content)}\n".encode() + content


def _add(digest: Any, value: Any) -> bool:
    """Hash a value. Each part begins with its kind and length, so different values differ in bytes."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return False
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(raw.data)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"array {value.dtype.str} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)}\n".encode())
        return all(_add(digest, each) for each in value)
    elif value is None or isinstance(value, bool | int | float | str):
        digest.update(_framed(type(value).__name__, repr(value).encode()))
    else:
        return False
    return True


def _bytes_of(value: Any) -> int:
    """The bytes of a value that may be pixels, sound or embeddings. Sizes and positions do not count."""
    if isinstance(value, torch.Tensor):
        is_large = value.is_floating_point() or value.dtype == torch.uint8
        return value.numel() * value.element_size() if is_large else 0
    if isinstance(value, np.ndarray):
        return value.nbytes if value.dtype.kind == "f" or value.dtype == np.uint8 else 0
    return sum(map(_bytes_of, value)) if isinstance(value, list | tuple) else 0
