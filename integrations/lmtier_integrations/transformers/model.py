"""The properties of a model: its KV per token, its rotation, and its weights.

A run on a few tokens finds out which KV a model has. A model whose KV cannot be stored completely is
declined.
"""

from __future__ import annotations

import hashlib
import inspect
from math import inf
from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lmtier.errors import LayoutError, MisuseError

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ROTATES_BY_LENGTH = ("longrope", "su", "dynamic")
_LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")
_PROBED = 4  # tokens
_CLOSE = 0.1  # a relative difference of a token's KV: rounding is far below, the effect of later tokens above


def probe(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
    """K and V of a few tokens, as the model leaves them in each layer. Raises where it cannot be served."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise LayoutError(f"{type(model).__name__} is no transformers model that generates")
    decline_state(model)
    if model.config.is_encoder_decoder:
        raise LayoutError("lmtier serves decoders: the KV of an encoder-decoder is not of the prompt alone")
    if model.tp_size is not None:
        raise LayoutError("lmtier does not serve tensor parallelism in transformers: a rank holds some heads")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for number, layer in enumerate(caches[0].layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):  # descendants keep something else
            raise LayoutError(
                "lmtier serves layers with full attention or a sliding window; "
                f"layer {number} keeps a {type(layer).__name__}"
            )
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise LayoutError(f"{type(model).__name__} does not only cache keys and values")
    tokens = torch.arange(2 * _PROBED, device=model.device)[None]
    with torch.no_grad():
        for cache, length in zip(caches, (_PROBED, 2 * _PROBED), strict=True):
            some = tokens[:, :length]
            model(input_ids=some, attention_mask=torch.ones_like(some), past_key_values=cache, use_cache=True)
    found = [(layer.keys, layer.values) for layer in caches[0].layers]
    for number, (planes, later) in enumerate(zip(found, caches[1].layers, strict=True)):
        for plane, other in zip(planes, (later.keys, later.values), strict=True):
            if plane is None or plane.shape[:1] + plane.shape[2:3] != (1, _PROBED):
                raise LayoutError(f"layer {number} leaves no keys and values of its tokens in its cache")
            if plane.dtype not in DTYPES or plane.dtype != found[0][0].dtype:
                raise LayoutError(
                    f"layer {number} keeps {plane.dtype}; lmtier serves {', '.join(DTYPES.values())}"
                )
            if (other[:, :, :_PROBED] - plane).norm() > _CLOSE * plane.norm():
                raise LayoutError(
                    f"layer {number} attends to later tokens, so its KV is not a matter of the prefix alone"
                )
        if planes[0].shape[1] != planes[1].shape[1]:
            raise LayoutError(f"layer {number} has keys and values of different numbers of heads")
    return found


def kind_of(keys: Tensor, values: Tensor) -> tuple[torch.Size, torch.Size, torch.dtype, torch.device]:
    return keys.shape, values.shape, keys.dtype, keys.device


def decline_state(model: PreTrainedModel) -> None:
    if model.training:
        raise MisuseError("a model in training mode drops out values at random: call model.eval()")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise MisuseError("lmtier does not know which adapter is on: merge it into the weights")


def length_limit(config: dict[str, Any]) -> float:
    """From this many tokens on, the rotation of a prompt depends on its length."""
    limit = inf
    waiting: list[Any] = [config]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting.extend(each.values())
            if (each.get("rope_type") or each.get("type")) in _ROTATES_BY_LENGTH:
                places = (each, config, config.get("text_config") or {})
                said = [place.get(word) for word in _LENGTHS for place in places]
                limit = min(limit, *(length for length in said if length), *[0] * (not any(said)))
    return limit


def stamp_of(model: PreTrainedModel) -> int:
    """A stamp that differs after any change of the weights."""
    return hash(
        tuple((each.data_ptr(), 0 if each.is_inference() else each._version) for each in model.parameters())
    )


def digest_of(model: PreTrainedModel) -> str:
    """A digest of the weights. It reads all of them, because one row of an embedding changes KV too."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            raise LayoutError(f"{name} is not in memory: say which folder it is of, weights=…")
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        data = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy()
        digest.update(xxhash.xxh3_128_digest(data.data))
    return f"tensors {digest.hexdigest()}"
