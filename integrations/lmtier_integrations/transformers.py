"""Prefixes that outlive `generate`: Hugging Face models load the KV of known prompts, save that of new ones.

    with PrefixCache(model, "cpu://?capacity=4GiB", "disk:///var/cache/lmtier?capacity=50GiB") as store:
        answer = store.generate(input_ids, max_new_tokens=64)

    cache_for   looks the prompts up; what is stored of them is in the cache's layers before the model runs
    update      saves the whole chunks of the prompts, layer by layer, as the model computes them
    commit      with the last layer: a forward that does not come to its end leaves nothing behind

What the model keeps is found out by running it on a few tokens; what cannot be kept whole is declined there.
KV goes through a buffer, a block for a chunk, because the tensors of a cache come and go with each request.
The buffer is as large as the most that was loaded or saved at once, and lies where the model does: in CPU
memory, or on one GPU. There, copies between it and the tiers go on while the model computes; the next call
ends them.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from math import inf, prod
from types import TracebackType
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lmtier import cache as core
from lmtier.config import Config
from lmtier.cuda.mover import CudaMover
from lmtier.cuda.paging import CudaKV
from lmtier.cuda.pinned import Pinning
from lmtier.cuda.streams import Device
from lmtier.errors import DeviceError, LayoutError, MisuseError
from lmtier.keys import Identity, KeyChain
from lmtier.layout import LayerShape, Layout
from lmtier.mover import Mover, Save, completed
from lmtier.paging import PagedKV
from lmtier.server.client import Client
from lmtier_integrations.identity import attention_of, weights_in

log = logging.getLogger("lmtier")

_OutOfMemory = torch.cuda.OutOfMemoryError
_FAILURES = _OutOfMemory, DeviceError
"""Of a GPU: what should have been loaded is computed, what should have been saved is not stored."""
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ROTATES_BY_LENGTH = ("longrope", "su", "dynamic")
_LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")
_PROBED = 4  # tokens
_NO_MATTER = ("cache_position", "logits_to_keep")  # what else a forward is given
_CANARY_BLOCKS = 3  # source, target, and one that must not change
_GPU_STAGING = 8 << 20  # for chunks of few bytes only: others are long enough to be copied as they lie
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
            config = Config(**{**settings, **({"tiers": tiers} if tiers else {})})
            if config.gpu is not None:
                raise MisuseError(f"tier {config.gpu.url!r}: lmtier keeps no copies there for transformers")
            self.cache = core.Cache(config)
        try:
            self._staging = _Staging(self.cache, probed, self._identity(self._weights))
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
        try:
            self._staging.close()
        finally:
            self.cache.close()

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until the tiers below memory have what was saved. False: not all of it, or not in time."""
        self._staging.settle()
        return self.cache.flush(timeout)

    def wait_until_pinned(self, timeout: float = 60.0) -> bool:
        """Wait until a GPU copies at full speed. False: not in time, or its driver refuses to pin all memory.

        Memory is pinned in the background, from the start on. On a CPU there is nothing to wait for.
        """
        return self._staging.place.wait_until_pinned(timeout)

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
        columns = int(cache.get_seq_length())
        cache.saving = _Saving(staging, rows, columns, self._limit, prompts, self._stamp)
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
            weights = _digest(self.model)
            self._staging.identify(self._identity(weights))
            self._stamp, self._weights = stamp, weights  # not before: what fails is tried again

    def _identity(self, weights: str) -> Identity:
        config = self.model.config
        quantized = getattr(config, "quantization_config", None)
        attention = attention_of(
            config,
            length="the prompt's",
            dtype=str(self.model.dtype),
            quantization=f"transformers {quantized}" if quantized else "None",
        )
        return Identity(model=self._name, weights=weights, attention=attention)


def _before_forward(model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    cache = given.get("past_key_values")
    if isinstance(cache, StoredCache) and cache.saving is not None:
        is_saved = cache.saving.expect(model, {**({"input_ids": args[0]} if args else {}), **given})
        cache.saving = cache.saving if is_saved else None


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
    blocks: slice
    """Of the buffer."""


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
        self,
        staging: _Staging,
        rows: list[_Row],
        columns: int,
        limit: float,
        prompts: _Prompts,
        stamp: int,
    ) -> None:
        self._staging, self._rows, self._columns, self._limit = staging, rows, columns, limit
        self._prompts, self._stamp = prompts, stamp
        self._is_expected = False
        self._is_running = False

    def expect(self, model: Any, given: Mapping[str, Any]) -> bool:
        """A forward begins. False: of other weights than the keys, so nothing is saved from here on."""
        self._prompts.check(model, given, self._columns)
        self._is_expected = True
        return self._stamp == _stamp(model)

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
        self._columns, self._is_expected = end, False
        if not self._staging.commit():
            return False
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
        self._blocks: list[Tensor] = []
        self.mover: Mover
        self.place: _OnCpu | _OnGpu = _place_of(
            cache, {plane.device for planes in probed for plane in planes}
        )
        try:
            self._take(_CANARY_BLOCKS)
        except DeviceError as error:
            self.place = _beside_the_gpu(cache, self.place.device, error)
            self._take(_CANARY_BLOCKS)
        self.place.follow()

    def close(self) -> None:
        self.settle()
        self.place.close()
        self.place.give_back(self.mover.kv)
        self._blocks.clear()

    def settle(self) -> None:
        """Wait for copies that earlier calls have left under way. What those saved is found from now on."""
        self.abort()
        self.mover.drain()
        self._cache.step()

    def identify(self, identity: Identity) -> None:
        """From now on keys are of other weights. The buffer stays, and the canary has proven it."""
        self.settle()
        self.mover.identity = completed(identity, self._layout, self._cache.approximation)
        self._identity = identity

    def _take(self, blocks: int) -> None:
        """Blocks [H, C, K | V] for at least so many chunks."""
        count = max(blocks, _CANARY_BLOCKS)
        shapes = [(heads, self.chunk_tokens, k + v) for heads, k, v in self._layout.layers]
        sizes = [prod(shape) for shape in shapes]
        # A chunk's layers lie one after the other, as they do in a payload: it can be copied as one piece.
        whole = self.place.empty((count, sum(sizes)), self._dtype)
        parts = torch.split(whole, sizes, dim=1)
        taken = [part.view(count, *shape) for part, shape in zip(parts, shapes, strict=True)]
        with self.place.current():
            kv = self.place.kv(self._layout, taken)
            try:
                mover = self.place.mover(kv, self._identity)
                mover.prove(range(_CANARY_BLOCKS))
            except BaseException:
                self.place.give_back(kv)
                raise
        if self._blocks:
            self.place.give_back(self.mover.kv)
        self._blocks, self.mover = taken, mover

    def _make_room(self, blocks: int) -> None:
        """Raises one of _FAILURES if the GPU has none; what was taken before is still there then."""
        if blocks > len(self._blocks[0]):
            self.mover.drain()  # nothing may copy to or from blocks that are given up
            self._take(1 << (blocks - 1).bit_length())

    def load(self, rows: Sequence[_Row]) -> tuple[list[Counter[str]], Iterator[list[Tensor]]]:
        """How much is stored of each row, by tier; and each layer's K and V of it, [rows, H, columns, D]."""
        self.settle()
        size = self.chunk_tokens
        matches: list[core.Match] = []
        held: dict[int, core.Match] = {}
        """Those whose leases are ours to end: a load ends its match's own, perhaps later."""
        prefixes: list[list[Tensor]] = []
        try:
            for number, row in enumerate(rows):
                matches.append(self.mover.match(row.chain))
                held[number] = matches[-1]
                row.saved = matches[-1].chunks
            self.place.follow()
            if end := _common_end(rows, size):
                prefixes = self._prefixes(rows, max(row.pad + row.saved * size for row in rows))
            for number, (row, match) in enumerate(zip(rows, matches, strict=True)):
                if prefixes and row.pad < end:
                    there = slice(row.pad, row.pad + match.chunks * size)
                    # What has a fingerprint is waited for: how much of it is to be believed is used below.
                    with (
                        self.place.current(),
                        self.mover.load(held.pop(number), range(match.chunks)) as load,
                    ):
                        load.all()
                        load.confirm()
                    row.saved = load.tokens // size
                    for blocks, (keys, values) in zip(self._blocks, prefixes, strict=True):
                        for block, plane in _facing(blocks, keys[number, :, there], values[number, :, there]):
                            plane.copy_(block)
        except DeviceError as error:
            _warn(error, f"load {end} tokens: they are computed")
            prefixes = []
        finally:
            for match in held.values():
                self._cache.release(match)
            self._cache.step()
        # Less, where something differed from what had been saved.
        end = _common_end(rows, size) if prefixes else 0
        found = [
            _by_tier(match.sources, end - row.pad, size) for match, row in zip(matches, rows, strict=True)
        ]
        return found, _handed_over(prefixes, end)

    def _prefixes(self, rows: Sequence[_Row], columns: int) -> list[list[Tensor]]:
        """Room for what is stored of these rows, on its way to their cache; none, if the GPU has none."""
        try:
            self._make_room(max(row.saved for row in rows))
            return [
                [
                    torch.zeros(len(rows), heads, columns, width, dtype=self._dtype, device=self.place.device)
                    for width in (k, v)
                ]
                for heads, k, v in self._layout.layers
            ]
        except _FAILURES as error:
            _warn(error, f"load {columns} tokens: they are computed")
            return []

    def begin(self, rows: Sequence[_Row], start: int, end: int) -> None:
        """Reserve what a forward over columns [start, end) computes of whole chunks that are not stored."""
        self.abort()
        size = self.chunk_tokens
        spans = []
        for number, row in enumerate(rows):
            full = min((end - row.pad) // size, len(row.chain.keys))
            if full > row.saved and row.pad + row.saved * size >= start:
                spans.append((number, row, full))
        needed = sum(full - row.saved for _, row, full in spans)
        try:
            self._make_room(needed)
        except _FAILURES as error:
            _warn(error, f"save {needed * size} tokens: they are not stored")
            return
        self.mover.reuse(range(needed))
        taken = 0
        for number, row, full in spans:
            first, at = row.saved, row.pad + row.saved * size - start
            own = range(taken, taken := taken + full - first)
            blocks = dict(enumerate(self.mover.kv.check(own), start=first))
            reservation = self._cache.reserve(row.chain.keys[:full], self.mover.form, first=first)
            columns = slice(at, at + (full - first) * size)
            save = self.mover.fill(reservation, blocks)
            self._fillings.append(_Filling(save, number, columns, slice(own.start, own.stop)))
            row.saved = full - reservation.dropped

    def save(self, number: int, keys: Tensor, values: Tensor) -> None:
        for filling in self._fillings:
            if filling.save.tokens:
                new = (plane[filling.row, :, filling.columns].detach() for plane in (keys, values))
                for block, plane in _facing(self._blocks[number][filling.blocks], *new):
                    block.copy_(plane)
                self.place.computed(filling.save, number)

    def commit(self) -> bool:
        """The forward has come to its end: what it saved can be found from the next call on.

        False: not all of it, and chunks behind that have nothing to follow.
        """
        is_whole = True
        try:
            with self.place.current():
                while self._fillings:  # in order: a chunk's parent may be of a row before
                    self.place.commit(self._fillings[0].save)
                    del self._fillings[0]
        except DeviceError as error:
            is_whole = False
            tokens = sum(each.save.tokens for each in self._fillings)
            _warn(error, f"save {tokens} tokens: they are not stored")
        finally:
            self.abort()
        self._cache.step()
        return is_whole

    def abort(self) -> None:
        """Give back the room of a forward that did not come to its end, if there is one."""
        while self._fillings:
            self._fillings.pop().save.abort()
        if self.mover.poll():
            self._cache.step()


# ---- where the buffer lies


class _OnCpu:
    """In this process's own memory: copies have happened when a call returns."""

    device = torch.device("cpu")

    def __init__(self, cache: core.Cache | Client) -> None:
        self._cache = cache

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    def current(self) -> AbstractContextManager[Any]:
        """Where copies are enqueued and kernels launched."""
        return nullcontext()

    def kv(self, layout: Layout, blocks: Sequence[Tensor]) -> PagedKV:
        return PagedKV(layout, layout.whole, blocks)

    def mover(self, kv: PagedKV, identity: Identity) -> Mover:
        """One that has not been proven yet."""
        return Mover(self._cache, kv, identity)

    def give_back(self, kv: PagedKV) -> None:
        """What it has taken beside the blocks: nothing. They are not used by it any more."""

    def computed(self, save: Save, layer: int) -> None:
        """One layer of a save is in the buffer."""
        save.layer(layer)  # now, while a processor's caches have it

    def commit(self, save: Save) -> None:
        """All of them are."""
        save.commit()

    def follow(self) -> None:
        """The slab may be another than before. Nothing is under way."""

    def wait_until_pinned(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        """Nothing is under way, and nothing will be."""


class _PinningDevice(Device, Protocol):
    def pin(self, memory: memoryview) -> Pinning: ...


class _OnGpu:
    """On the model's GPU, which copies to and from the slab while it computes. The slab is pinned for it."""

    def __init__(self, cache: core.Cache | Client, copies: _PinningDevice, device: torch.device) -> None:
        self.device = device
        self._cache, self._copies = cache, copies
        self._slab: object = None
        self._pinning: Pinning | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def current(self) -> AbstractContextManager[Any]:
        """A kernel is launched on the GPU that is current, which need not be the model's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def kv(self, layout: Layout, blocks: Sequence[Tensor]) -> CudaKV:
        return CudaKV(layout, layout.whole, blocks, self._copies, staging_bytes=_GPU_STAGING)

    def mover(self, kv: PagedKV, identity: Identity) -> Mover:
        assert isinstance(kv, CudaKV)
        return CudaMover(self._cache, kv, identity, layerwise=False)

    def give_back(self, kv: PagedKV) -> None:
        assert isinstance(kv, CudaKV)
        for lane in (self._copies.store, self._copies.load):  # also what a call that failed has left there
            lane.record().wait()
        kv.close()

    def computed(self, save: Save, layer: int) -> None:
        """It stays there until all are: layer by layer, the host's calls would hold the model up."""

    def commit(self, save: Save) -> None:
        save.all()
        save.commit()

    def follow(self) -> None:
        slab = self._cache.slab
        if slab is not self._slab:  # a server that was started anew has another one
            self.close()
            self._slab, self._pinning = slab, self._copies.pin(slab.view(0, slab.capacity))

    def wait_until_pinned(self, timeout: float) -> bool:
        pinning = self._pinning
        return pinning is not None and pinning.wait(timeout) and not pinning.failure

    def close(self) -> None:
        if self._pinning is not None:
            self._pinning.close()
            self._pinning = None


def _place_of(cache: core.Cache | Client, devices: set[torch.device]) -> _OnCpu | _OnGpu:
    """On the GPU if all KV is on one, and what copies there is installed."""
    device = next(iter(devices))
    if len(devices) > 1 or device.type != "cuda":
        return _OnCpu(cache)
    try:
        copies: _PinningDevice = import_module("lmtier.cuda.device").CudaDevice(device.index)
    except Exception as error:  # noqa: BLE001 the import, the driver and the compiler have their own
        return _beside_the_gpu(cache, device, error)
    return _OnGpu(cache, copies, device)


def _beside_the_gpu(cache: core.Cache | Client, device: torch.device, error: Exception) -> _OnCpu:
    log.warning(
        "lmtier: KV goes from %s to the tiers by way of a buffer in CPU memory, which is slower (%s): "
        "install lmtier[cuda12] or lmtier[cuda13], as the driver is",
        device,
        error,
    )
    return _OnCpu(cache)


def _warn(failure: Exception, what_not: str) -> None:
    why = "has no room" if isinstance(failure, _OutOfMemory) else f"fails ({failure})"
    log.warning("lmtier: the GPU %s to %s", why, what_not)


def _common_end(rows: Sequence[_Row], size: int) -> int:
    """The column up to which every row is stored."""
    end = min(row.pad + row.saved * size for row in rows)
    return end if end > min(row.pad for row in rows) else 0


def _handed_over(prefixes: list[list[Tensor]], end: int) -> Iterator[list[Tensor]]:
    """Layer by layer, each of which is kept no longer than the caller keeps it."""
    while prefixes and end:
        yield [plane[:, :, :end] for plane in prefixes.pop(0)]


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
