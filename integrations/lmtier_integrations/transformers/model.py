"""The properties of a model: its KV per token, its states, its rotation, and its weights.

A run on a few tokens finds out what a model keeps. A model of which that cannot be stored completely, or that
cannot go on from it, is declined.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import transformers
import xxhash
from safetensors import safe_open
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from lmtier.errors import LayoutError, MisuseError
from lmtier_integrations.identity import checkpoint_in
from lmtier_integrations.transformers.states import States, states_in

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ROTATES_BY_LENGTH = ("longrope", "su", "dynamic")
_LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")
_DROP_THE_CACHE = ("phi3", "phimoe", "phi4_multimodal")
"""Types whose `generate` drops the cache of a prompt beyond the original length, whatever the rotation."""
_LAYERS = DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer
_PROBED = 4  # tokens
_SAMPLE = 64  # elements of each tensor, about
_NO_ELEMENTS = RuntimeError, NotImplementedError, TypeError
"""What torch raises for tensors that are elsewhere, or in a format without plain elements."""
_CLOSE = 0.1  # a relative difference of a token's KV: rounding is far below, the effect of later tokens above


@dataclass(frozen=True)
class ModelCacheProbe:
    """What a model leaves in its cache of a few tokens."""

    kv: Mapping[int, tuple[Tensor, Tensor]]
    """K and V of each layer that has them."""
    states: States

    @property
    def kinds(self) -> list[object]:
        """The place, shape, dtype and device of each tensor."""
        planes = [(layer, plane) for layer, both in self.kv.items() for plane in both]
        return [(at, each.shape, each.dtype, each.device) for at, each in (*planes, *self.states.items())]


def probe(model: PreTrainedModel) -> ModelCacheProbe:
    """What the model keeps of a few tokens. Raises where it cannot be served."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise LayoutError(f"{type(model).__name__} is no transformers model that generates")
    decline_state(model)
    if model.config.is_encoder_decoder:
        raise LayoutError("lmtier serves decoders: the KV of an encoder-decoder is not of the prompt alone")
    if model.tp_size is not None:
        raise LayoutError("lmtier does not serve tensor parallelism in transformers: a rank holds some heads")
    cache, full_cache = (DynamicCache(config=model.config) for _ in range(2))
    for number, layer in enumerate(cache.layers):
        if type(layer) not in _LAYERS:  # descendants keep something else
            raise LayoutError(
                "lmtier serves layers with full attention, a sliding window or a state; "
                f"layer {number} keeps a {type(layer).__name__}"
            )
    if not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        raise LayoutError(
            f"no layer of {type(model).__name__} keeps KV; lmtier serves states beside layers that do"
        )
    if not model._supports_default_dynamic_cache():
        raise LayoutError(f"{type(model).__name__} has its own kind of cache")
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise LayoutError(f"{type(model).__name__} does not only cache keys and values")
    tokens = torch.arange(2 * _PROBED, device=model.device)[None]
    compute(model, tokens, cache, 0, _PROBED)
    logits = compute(model, tokens, full_cache, 0, 2 * _PROBED)
    planes_of = {
        number: (layer.keys, layer.values)
        for number, layer in enumerate(cache.layers)
        if isinstance(layer, DynamicLayer)
    }
    keys = next(iter(planes_of.values()))[0]
    for number, planes in planes_of.items():
        full_layer = full_cache.layers[number]
        for plane, full_plane in zip(planes, (full_layer.keys, full_layer.values), strict=True):
            if plane is None or plane.shape[:1] + plane.shape[2:3] != (1, _PROBED):
                raise LayoutError(f"layer {number} leaves no keys and values of its tokens in its cache")
            if plane.dtype not in DTYPES or plane.dtype != keys.dtype:
                raise LayoutError(
                    f"layer {number} keeps {plane.dtype}; lmtier serves {', '.join(DTYPES.values())}"
                )
            if (full_plane[:, :, :_PROBED] - plane).norm() > _CLOSE * plane.norm():
                raise LayoutError(
                    f"layer {number} attends to later tokens, so its KV is not a matter of the prefix alone"
                )
        if planes[0].shape[1] != planes[1].shape[1]:
            raise LayoutError(f"layer {number} has keys and values of different numbers of heads")
    kept = ModelCacheProbe(planes_of, {place: tensor.clone() for place, tensor in states_in(cache).items()})
    if kept.states:
        _check_states(model, kept, tokens, cache, [logits, *_all_of(full_cache)])
    return kept


def _check_states(
    model: PreTrainedModel,
    kept: ModelCacheProbe,
    tokens: Tensor,
    cache: DynamicCache,
    expected: Sequence[Tensor],
) -> None:
    """Raise if this model cannot go on from its state. `cache` has the first tokens, `expected` is of all."""
    planes = [plane for both in kept.kv.values() for plane in both]
    if any(each.device.type != "cpu" for each in (*planes, *kept.states.values())):
        raise LayoutError(
            f"{type(model).__name__} has layers that keep a state instead of KV; for those lmtier needs a "
            "model on a CPU"
        )
    # Some models compute as if there were no state if a forward has several tokens.
    forgetful = copy.deepcopy(cache)
    is_recurrent = any(place.is_recurrent for place in kept.states)
    for place, state in states_in(forgetful).items():
        if place.is_recurrent == is_recurrent:
            state.zero_()
    with_state, without_state = (
        [compute(model, tokens, each, _PROBED, 2 * _PROBED), *_all_of(each)] for each in (cache, forgetful)
    )
    if 2 * _distance(with_state, expected) > _distance(without_state, expected):
        raise LayoutError(
            f"{type(model).__name__} does not go on from the state in its cache, in transformers "
            f"{transformers.__version__}, if a forward has several tokens; lmtier needs a model that does"
        )


def _all_of(cache: DynamicCache) -> list[Tensor]:
    planes = [
        each
        for layer in cache.layers
        if isinstance(layer, DynamicLayer)
        for each in (layer.keys, layer.values)
    ]
    return [*planes, *states_in(cache).values()]


def _distance(tensors: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    pairs = zip(tensors, references, strict=True)
    return sum(float((tensor - other).norm() / other.norm().clamp(1e-9)) for tensor, other in pairs)


@torch.no_grad()
def compute(model: PreTrainedModel, tokens: Tensor, cache: Cache, start: int, end: int) -> Tensor:
    """One forward over these columns of prompts without padding. Returns the last logits."""
    arguments = {
        "attention_mask": torch.ones_like(tokens[:, :end]),
        "position_ids": torch.arange(start, end, device=tokens.device).expand(len(tokens), -1),
        "logits_to_keep": 1,
    }
    parameters = inspect.signature(model.forward).parameters
    arguments = {word: value for word, value in arguments.items() if word in parameters}
    output = model(input_ids=tokens[:, start:end], past_key_values=cache, use_cache=True, **arguments)
    logits: Tensor = output.logits[:, -1]
    return logits


def decline_state(model: PreTrainedModel) -> None:
    if model.training:
        raise MisuseError("a model in training mode drops out values at random: call model.eval()")
    if torch.is_autocast_enabled(model.device.type):
        raise MisuseError(
            "torch.autocast changes the dtype of KV: turn it off, and load the model in the dtype you want"
        )
    # PEFT puts its layers into the model itself. Nothing in the weights shows which of them are on.
    peft = sys.modules.get("peft.tuners.tuners_utils")
    has_layers = peft is not None and any(isinstance(each, peft.BaseTunerLayer) for each in model.modules())
    if has_layers or getattr(model, "_hf_peft_config_loaded", False):
        raise MisuseError(
            "lmtier does not know which adapter is on: merge it into the weights (merge_and_unload)"
        )


def length_limit(config: dict[str, Any]) -> float:
    """From this many columns on, a prompt is left to the model.

    Its rotation depends on the prompt's length, or `generate` drops the cache.
    """
    limit = inf
    if config.get("model_type") in _DROP_THE_CACHE:
        limit = (config.get(_LENGTHS[0]) or inf) + 1
    waiting: list[Any] = [config]
    while waiting:
        config_part = waiting.pop()
        if isinstance(config_part, dict):
            waiting.extend(config_part.values())
            if (config_part.get("rope_type") or config_part.get("type")) in _ROTATES_BY_LENGTH:
                places = (config_part, config, config.get("text_config") or {})
                lengths = [place.get(word) for word in _LENGTHS for place in places]
                limit = min(limit, *(length for length in lengths if length), *[0] * (not any(lengths)))
    return limit


def stamp_of(model: PreTrainedModel) -> int:
    """A stamp that differs after a change of the weights.

    A change through `.data`, or of inference tensors, leaves no trace but the content. So the stamp has a
    sample of it.
    """
    facts: list[object] = []
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for number, parameter in enumerate(model.parameters()):
        facts.append((parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version))
        with suppress(*_NO_ELEMENTS):
            sample = _sample_of(parameter.detach(), number)
            samples.setdefault((parameter.device, parameter.dtype), []).append(sample)
    for parts in samples.values():
        with suppress(*_NO_ELEMENTS):
            facts.append(torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes())
    return hash(tuple(facts))


def _sample_of(tensor: Tensor, number: int) -> Tensor:
    count = tensor.numel()
    step = max(1, count // _SAMPLE) | 1  # odd, so that it falls into different columns
    first = number % step if number % step < count else 0
    size = (count - first + step - 1) // step
    return torch.as_strided(tensor, (size,), (step,), tensor.storage_offset() + first)


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


def digest_in(folder: str, model: PreTrainedModel) -> str:
    """The digest of the files in a folder that transformers loads by itself; other engines find it too.

    The model may have been loaded from other files there. So samples of all tensors that are in memory are
    compared with the files.
    """
    files = checkpoint_in(folder)
    if not files.paths or not (digest := files.settled()[1]):
        raise MisuseError(f"weights={folder!r} is no folder with files of weights that transformers loads")
    state_dict, prefix, matched = model.state_dict(), f"{model.base_model_prefix}.", 0
    for path in files.paths:
        for name, tensor in _tensors_in(path):
            names = name, prefix + name, name.removeprefix(prefix)
            in_memory = next((state_dict[alias] for alias in names if alias in state_dict), None)
            if in_memory is None or in_memory.shape != tensor.shape:
                continue  # transformers has put it together with others
            if not in_memory.is_meta:
                at = torch.arange(0, tensor.numel(), max(1, tensor.numel() // _SAMPLE) | 1)
                wanted = tensor.reshape(-1)[at].to(in_memory.dtype)
                if not torch.equal(in_memory.detach().reshape(-1)[at.to(in_memory.device)].cpu(), wanted):
                    raise MisuseError(
                        f"{name} in memory is not that of {path}: the model was loaded from other files, or "
                        "changed; leave weights out"
                    )
            matched += 1
    if not matched:
        raise MisuseError(f"weights={folder!r} has no tensors of this model: leave weights out")
    return digest


def _tensors_in(path: str) -> Iterator[tuple[str, Tensor]]:
    if not path.endswith(".safetensors"):  # others execute code when they are read
        raise MisuseError(f"{path} is no .safetensors file, so it is not compared: leave weights out")
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            yield name, file.get_tensor(name)
