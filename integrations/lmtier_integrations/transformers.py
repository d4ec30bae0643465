"""Prefixes that outlive `generate`: Hugging Face models load the KV of known prompts, save that of new ones.

    with PrefixCache(model, "cpu://?capacity=4GiB", "disk:///var/cache/lmtier?capacity=50GiB") as store:
        answer = store.generate(input_ids, max_new_tokens=64)

    cache_for   looks the prompts up; what is stored of them is in the cache's layers before the model runs
    update      saves the whole chunks of the prompts, layer by layer, as the model computes them
    commit      with the last layer: a forward that does not come to its end leaves nothing behind

What the model keeps is found out by running it on a few tokens; what cannot be kept whole is declined there.
KV goes through a buffer in CPU memory, a block for a chunk, because the tensors of a cache come and go with
each request and may be on a device. The buffer is as large as the longest prompt that was loaded or saved.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lmtier import cache as core
from lmtier.config import Config
from lmtier.errors import LayoutError, MisuseError
from lmtier.keys import Identity, KeyChain
from lmtier.layout import LayerShape, Layout
from lmtier.mover import Mover, Save
from lmtier.paging import PagedKV
from lmtier.server.client import Client
from lmtier_integrations.identity import attention_of, weights_in

log = logging.getLogger("lmtier")

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ROTATES_BY_LENGTH = ("longrope", "su", "dynamic")
_LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")
_PROBED = 4  # tokens
_NO_MATTER = ("cache_position", "logits_to_keep")  # what else a forward is given
_CANARY_BLOCKS = 3  # source, target, and one that must not change
_CLOSE = 0.1  # of a token's KV, relative: rounding is far below, what later tokens have to say is far above


class PrefixCache:
    """One model's prompts, in tiers of this process or of the server at `server`. Called from one thread.

    `settings` are those of `lmtier.config.Config`: `chunk_tokens`, `verify`, `load_deadline`, …; a server has
    its own. The model's weights are told from others by all of their bytes. Other engines see only files:
    to share with them, say in `weights` which folder the model is from, and in `name` what they call it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *tiers: str,
        server: str = "",
        name: str = "",
        weights: str = "",
        **settings: Any,
    ) -> None:
        if server and (tiers or settings):
            raise MisuseError(f"the server at {server} has its own tiers and settings: pass one or the other")
        self.model = model
        probed = _probe(model)
        self._kinds = [_kind(*each) for each in probed]
        self._limit = _length_limit(model.config.to_dict())
        self._name = name or weights or model.config.name_or_path or type(model).__name__
        self._weights = weights_in(weights) if weights else _digest(model)
        if not self._weights:
            raise MisuseError(f"weights={weights!r} is no folder with files of weights")
        self._stamp = _stamp(model)
        if server:
            self.cache: core.Cache | Client = Client(server, name="transformers")
        else:
            self.cache = core.Cache(Config(**{**settings, **({"tiers": tiers} if tiers else {})}))
        try:
            self._staging = _Staging(self.cache, probed, self._identity())
        except BaseException:
            self.cache.close()
            raise
        self._hook = model.register_forward_pre_hook(_before_forward, with_kwargs=True)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write down what waits to be written to tiers of this process, and let go of everything."""
        self._hook.remove()
        self._staging.abort()
        self.cache.close()

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until the tiers below memory have what was saved. False: not all of it, or not in time."""
        return self.cache.flush(timeout)

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, salt: str = "", **options: Any
    ) -> Any:
        """`model.generate`, from where these prompts are stored."""
        said = options.get("generation_config") or self.model.generation_config

        def option(word: str) -> Any:
            return options.get(word, getattr(said, word, None))

        if option("cache_implementation") or "past_key_values" in options or option("use_cache") is False:
            raise MisuseError("the cache is lmtier's: for a static one, pass cache_for(…) to model.generate")
        for word in ("prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_model"):
            if option(word):
                raise MisuseError(f"{word} makes generate begin at token 0, whatever the cache holds")
        mask = self._mask(input_ids, attention_mask)
        each = max(option("num_beams") or 1, option("num_return_sequences") or 1)
        cache = self.cache_for(*(rows.repeat_interleave(each, 0) for rows in (input_ids, mask)), salt=salt)
        try:
            return self.model.generate(input_ids, attention_mask=mask, past_key_values=cache, **options)
        finally:
            self._staging.abort()

    def cache_for(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        salt: str = "",
        max_cache_len: int = 0,
    ) -> StoredCache:
        """A cache for one `model.generate` of these prompts, or one forward: it holds what is stored of them.

        Static if `max_cache_len` says how many tokens it shall hold. Prompts with other salts share nothing.
        At least one token is left to compute. A batch goes on from where all of its rows are stored.
        """
        mask = self._mask(input_ids, attention_mask)
        if 0 < max_cache_len <= input_ids.shape[1]:
            raise MisuseError(f"max_cache_len={max_cache_len} has no room behind {input_ids.shape[1]} tokens")
        self._recognize()
        config, staging = self.model.config, self._staging
        cache = (
            StoredStaticCache(config, max_cache_len) if max_cache_len else StoredDynamicCache(config=config)
        )
        tokens = mask.sum(1).tolist()
        if max(tokens) >= self._limit:
            return cache
        rows = [
            _Row(staging.mover.chain(ids[len(ids) - count :], salt=salt), len(ids) - count)
            for ids, count in zip(input_ids.tolist(), tokens, strict=True)
        ]
        cache.loaded, prefixes = staging.load(rows)
        for layer, (_, _, _, device), prefix in zip(cache.layers, self._kinds, prefixes, strict=False):
            layer.update(*(plane.to(device) for plane in prefix))
        for row, where in zip(rows, cache.loaded, strict=True):
            log.info(
                "Loaded KV cache for %d out of %d tokens %s", where.total(), row.chain.tokens, dict(where)
            )
        prompts = _Prompts(input_ids, mask, is_static=bool(max_cache_len))
        cache.saving = _Saving(staging, rows, int(cache.get_seq_length()), self._limit, prompts)
        return cache

    def _mask(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        if input_ids.ndim != 2 or not input_ids.numel():
            raise MisuseError(f"input_ids must be rows of at least one token, not {list(input_ids.shape)}")
        if attention_mask is None:
            said = self.model.generation_config
            ends = said.eos_token_id if isinstance(said.eos_token_id, list) else [said.eos_token_id]
            padding = None if said.pad_token_id in ends else said.pad_token_id
            if padding is not None and (input_ids == padding).any():
                raise MisuseError("a prompt contains the padding token: pass an attention_mask")
            return torch.ones_like(input_ids)
        mask = attention_mask != 0
        if mask.shape != input_ids.shape or not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
            raise MisuseError(
                "lmtier serves prompts padded on the left, with an attention_mask of their shape"
            )
        return mask.to(input_ids.dtype)

    def _recognize(self) -> None:
        """Is this the model that the keys are of? If its weights have changed, other keys begin here."""
        _decline_state(self.model)
        if self._stamp != (stamp := _stamp(self.model)):
            if [_kind(*each) for each in _probe(self.model)] != self._kinds:
                raise MisuseError(
                    "the model has another dtype or device than when this was opened: open another"
                )
            self._stamp, self._weights = stamp, _digest(self.model)
            self._staging.identify(self._identity())

    def _identity(self) -> Identity:
        config = self.model.config
        quantized = getattr(config, "quantization_config", None)
        attention = attention_of(
            config,
            length="the prompt's",
            dtype=str(self.model.dtype),
            quantization=f"transformers {quantized}" if quantized else "None",
        )
        return Identity(model=self._name, weights=self._weights, attention=attention)


def _before_forward(model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    cache = given.get("past_key_values")
    if isinstance(cache, StoredCache) and cache.saving is not None:
        cache.saving.expect(model, {**({"input_ids": args[0]} if args else {}), **given})


class StoredCache(Cache):
    """What static and dynamic caches have in common: they save what the model computes of the prompts."""

    loaded: Sequence[Counter[str]] = ()
    """For each row, how many of its tokens came from which tier."""
    saving: _Saving | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.saving is not None and not self.saving.layer(layer_idx, key_states, value_states):
            self.saving = None
        return found

    # Rows and columns that are moved about are not the prompts' any more.

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self.saving = None
        super().crop(*args, **kwargs)

    def reset(self) -> None:
        self.saving = None
        super().reset()

    def reorder_cache(self, *args: Any, **kwargs: Any) -> None:
        self.saving = None
        super().reorder_cache(*args, **kwargs)

    def batch_repeat_interleave(self, *args: Any, **kwargs: Any) -> None:
        self.saving = None
        super().batch_repeat_interleave(*args, **kwargs)

    def batch_select_indices(self, *args: Any, **kwargs: Any) -> None:
        self.saving = None
        super().batch_select_indices(*args, **kwargs)


class StoredDynamicCache(StoredCache, DynamicCache):
    pass


class StoredStaticCache(StoredCache, StaticCache):
    pass


@dataclass
class _Row:
    """A prompt of a batch."""

    chain: KeyChain
    pad: int
    """Columns before its first token."""
    saved: int = 0
    """Chunks that are stored, or will be when the forward that runs ends."""


@dataclass
class _Filling:
    """New chunks of one row, and where a forward computes them."""

    save: Save
    row: int
    columns: slice


class _Prompts:
    """What a cache was made for, and what a forward with it must be of."""

    def __init__(self, input_ids: Tensor, mask: Tensor, *, is_static: bool) -> None:
        self._ids, self._mask, self._is_static = input_ids, mask, is_static
        self._is_padded = not mask.all()
        self._positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)

    def check(self, model: Any, given: Mapping[str, Any], start: int) -> None:
        """A forward from column `start` on: raises if its KV would not be that of these prompts alone."""
        wanted = {
            "input_ids": self._ids[:, start:],
            "position_ids": self._positions[:, start:],
            "attention_mask": self._mask,
        }
        for word, value in given.items():
            if word in _NO_MATTER or not isinstance(value, Tensor):
                continue
            if word == "attention_mask" and value.ndim == 4 and self._is_static:
                continue  # made of a mask by `generate`, which has been told of the padding in position_ids
            if word not in wanted:
                raise MisuseError(f"{word} may change KV, which lmtier knows by the prompt's tokens alone")
            columns = min(wanted[word].shape[1], value.shape[-1])
            ours, theirs = wanted[word][:, :columns], value[..., :columns]
            if word == "input_ids" and len(theirs) != len(ours):
                raise MisuseError(f"a cache of {len(ours)} prompts cannot serve {len(theirs)}")
            if theirs.ndim == 4 or not (theirs.to(ours.device) == ours).all():
                raise MisuseError(f"the {word} is not that of the prompts this cache was made for")
        needed = ["input_ids", *(["attention_mask", "position_ids"] if self._is_padded else [])]
        for word in needed:
            if given.get(word) is None and word in inspect.signature(model.forward).parameters:
                raise MisuseError(f"these prompts need {word}, as model.generate gives it")


class _Saving:
    """The prompts of one cache, as far as the model has computed them."""

    def __init__(
        self, staging: _Staging, rows: list[_Row], columns: int, limit: float, prompts: _Prompts
    ) -> None:
        self._staging, self._rows, self._columns, self._limit = staging, rows, columns, limit
        self._prompts = prompts
        self._is_expected = False
        self._is_running = False

    def expect(self, model: Any, given: Mapping[str, Any]) -> None:
        """A forward begins."""
        self._prompts.check(model, given, self._columns)
        self._is_expected = True

    def layer(self, number: int, keys: Tensor, values: Tensor) -> bool:
        """Save one layer of a forward. False: there is nothing to save from here on."""
        end = self._columns + keys.shape[-2]
        if number == 0:
            # The forward before did not come to its end, or this one rotates in another way.
            is_long = end - min(row.pad for row in self._rows) >= self._limit
            if is_long or self._is_running or not self._is_expected:
                return False
            self._staging.begin(self._rows, self._columns, end)
        self._is_running = number < self._staging.layers - 1
        self._staging.save(number, keys, values)
        if self._is_running:
            return True
        self._staging.commit()
        self._columns, self._is_expected = end, False
        # A chunk that the next forward begins in the middle of cannot be saved by it, nor what follows.
        size = self._staging.chunk_tokens
        return any(
            row.saved < len(row.chain.keys) and row.pad + row.saved * size >= end for row in self._rows
        )


class _Staging:
    """The buffer between the caches of requests and the store; one of them goes through it at a time."""

    def __init__(
        self, cache: core.Cache | Client, probed: Sequence[tuple[Tensor, Tensor]], identity: Identity
    ) -> None:
        self._cache = cache
        self.chunk_tokens = cache.chunk_tokens
        self.layers = len(probed)
        self._dtype = probed[0][0].dtype
        shapes = [LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1]) for keys, values in probed]
        self._layout = Layout(
            tuple(shapes), _DTYPES[self._dtype], self.chunk_tokens, self.chunk_tokens, "token"
        )
        self._fillings: list[_Filling] = []
        """Of the forward that runs."""
        self._identity = identity
        self._take(_CANARY_BLOCKS)

    def identify(self, identity: Identity) -> None:
        self._identity = identity
        self._take(len(self._blocks[0]))

    def _take(self, blocks: int) -> None:
        """Blocks [H, C, K | V] for at least so many chunks."""
        self._blocks = [
            torch.empty(max(blocks, _CANARY_BLOCKS), heads, self.chunk_tokens, k + v, dtype=self._dtype)
            for heads, k, v in self._layout.layers
        ]
        kv = PagedKV(self._layout, self._layout.whole, self._blocks)
        self.mover = Mover(self._cache, kv, self._identity, spare_blocks=range(_CANARY_BLOCKS))

    def _make_room(self, blocks: int) -> None:
        if blocks > len(self._blocks[0]):
            self._take(1 << (blocks - 1).bit_length())

    def load(self, rows: Sequence[_Row]) -> tuple[list[Counter[str]], list[list[Tensor]]]:
        """How much is stored of each row, by tier; and each layer's K and V of it, [rows, H, columns, D]."""
        self.abort()
        size = self.chunk_tokens
        matches: list[core.Match] = []
        try:
            for row in rows:
                matches.append(self.mover.match(row.chain))
                row.saved = matches[-1].chunks
            self._make_room(max(row.saved for row in rows))
            end = _common_end(rows, size)
            columns = max(row.pad + row.saved * size for row in rows) if end else 0
            prefixes = [
                [torch.zeros(len(rows), heads, columns, width, dtype=self._dtype) for width in (k, v)]
                for heads, k, v in self._layout.layers
            ]
            for number, (row, match) in enumerate(zip(rows, matches, strict=True)):
                if row.pad < end:
                    load = self.mover.load(match, range(match.chunks))
                    load.all()
                    row.saved = load.finish() // size
                    there = slice(row.pad, row.pad + match.chunks * size)
                    for blocks, (keys, values) in zip(self._blocks, prefixes, strict=True):
                        for block, plane in _facing(blocks, keys[number, :, there], values[number, :, there]):
                            plane.copy_(block)
        finally:
            for match in matches:
                self._cache.release(match)
            self._cache.step()
        end = _common_end(rows, size)  # less, where something differed from what had been saved
        found = [
            _by_tier(match.sources, end - row.pad, size) for match, row in zip(matches, rows, strict=True)
        ]
        return found, [[plane[:, :, :end] for plane in planes] for planes in prefixes] if end else []

    def begin(self, rows: Sequence[_Row], start: int, end: int) -> None:
        """Reserve what a forward over columns [start, end) computes of whole chunks that are not stored."""
        self.abort()
        size = self.chunk_tokens
        spans = []
        for number, row in enumerate(rows):
            full = min((end - row.pad) // size, len(row.chain.keys))
            if full > row.saved and row.pad + row.saved * size >= start:
                spans.append((number, row, full))
        self._make_room(max((full - row.saved for _, row, full in spans), default=0))
        for number, row, full in spans:
            first, at = row.saved, row.pad + row.saved * size - start
            blocks = dict(enumerate(self.mover.kv.check(range(full - first)), start=first))
            reservation = self._cache.reserve(row.chain.keys[:full], self.mover.form, first=first)
            columns = slice(at, at + (full - first) * size)
            self._fillings.append(_Filling(self.mover.fill(reservation, blocks), number, columns))
            row.saved = full - reservation.dropped

    def save(self, number: int, keys: Tensor, values: Tensor) -> None:
        for filling in self._fillings:
            if filling.save.tokens:
                new = (plane[filling.row, :, filling.columns].detach() for plane in (keys, values))
                for block, plane in _facing(self._blocks[number], *new):
                    block.copy_(plane)
                filling.save.layer(number)

    def commit(self) -> None:
        """The forward has come to its end: what it saved can be found from here on."""
        try:
            while self._fillings:  # in order: a chunk's parent may be of a row before
                self._fillings[0].save.commit()
                del self._fillings[0]
        finally:
            self.abort()
        self._cache.step()

    def abort(self) -> None:
        """Give back the room of a forward that did not come to its end, if there is one."""
        while self._fillings:
            self._fillings.pop().save.abort()


def _common_end(rows: Sequence[_Row], size: int) -> int:
    """The column up to which every row is stored."""
    end = min(row.pad + row.saved * size for row in rows)
    return end if end > min(row.pad for row in rows) else 0


def _by_tier(sources: Sequence[str], tokens: int, size: int) -> Counter[str]:
    """Of a row's first tokens, how many came from which tier."""
    found: Counter[str] = Counter()
    for tier in sources:
        found[tier] += min(size, max(0, tokens))
        tokens -= size
    return +found


def _facing(blocks: Tensor, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Blocks [chunks, H, C, K | V], and [H, tokens, D] of whole chunks: pairs of views for K and for V."""
    heads, size, k = *blocks.shape[1:3], keys.shape[-1]
    blocks = blocks[: keys.shape[1] // size]
    parts = (blocks[..., :k], keys), (blocks[..., k:], values)
    return [(part, plane.view(heads, -1, size, plane.shape[-1]).transpose(0, 1)) for part, plane in parts]


# ---- what kind of model this is


def _probe(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
    """K and V of a few tokens, as the model leaves them in each layer. Raises where it cannot be served."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise LayoutError(f"{type(model).__name__} is no transformers model that generates")
    _decline_state(model)
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
        raise LayoutError(f"{type(model).__name__} keeps something else than keys and values")
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
            if plane.dtype not in _DTYPES or plane.dtype != found[0][0].dtype:
                raise LayoutError(
                    f"layer {number} keeps {plane.dtype}; lmtier serves {', '.join(_DTYPES.values())}"
                )
            if (other[:, :, :_PROBED] - plane).norm() > _CLOSE * plane.norm():
                raise LayoutError(
                    f"layer {number} attends to later tokens, so its KV is not a matter of the prefix alone"
                )
        if planes[0].shape[1] != planes[1].shape[1]:
            raise LayoutError(f"layer {number} has keys and values of different numbers of heads")
    return found


def _kind(keys: Tensor, values: Tensor) -> tuple[torch.Size, torch.Size, torch.dtype, torch.device]:
    return keys.shape, values.shape, keys.dtype, keys.device


def _decline_state(model: PreTrainedModel) -> None:
    if model.training:
        raise MisuseError("a model in training drops out what it likes: call model.eval()")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise MisuseError("lmtier does not know which adapter is on: merge it into the weights")


def _length_limit(config: dict[str, Any]) -> float:
    """Prompts of so many tokens, and longer ones, rotate in a way that depends on how long they are."""
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


def _stamp(model: PreTrainedModel) -> int:
    """Another one after any change of the weights."""
    return hash(
        tuple((each.data_ptr(), 0 if each.is_inference() else each._version) for each in model.parameters())
    )


def _digest(model: PreTrainedModel) -> str:
    """What the weights are. All of them are read: one row of an embedding changes KV too."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            raise LayoutError(f"{name} is not in memory: say which folder it is of, weights=…")
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        data = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy()
        digest.update(xxhash.xxh3_128_digest(data.data))
    return f"tensors {digest.hexdigest()}"
