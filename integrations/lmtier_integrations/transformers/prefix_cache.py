"""One model's prompts in tiers: looks them up, and makes caches that hold their stored KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import lmtier
from lmtier.client.client import Client
from lmtier.config import load
from lmtier.errors import MisuseError, log
from lmtier.format.keys import Identity
from lmtier_integrations.identity import attention_of
from lmtier_integrations.transformers.buffer import ChunkBuffer, PromptRow
from lmtier_integrations.transformers.model import (
    decline_state,
    digest_in,
    digest_of,
    length_limit,
    probe,
    stamp_of,
)
from lmtier_integrations.transformers.prefill import PromptPrefill
from lmtier_integrations.transformers.states import StateStore
from lmtier_integrations.transformers.stored_cache import (
    ExpectedPrompts,
    PromptSaving,
    StoredCache,
    StoredDynamicCache,
    StoredStaticCache,
    before_forward,
)


class PrefixCache:
    """One model's prompts, in tiers of this process or of the server at `server`. Called from one thread.

    `tiers` are URLs, or one list of them.

    `settings` are those of `lmtier.config.Config`: `chunk_tokens`, `verify`, `load_deadline`, …; a server has
    its own. All bytes of the model's weights identify it. Other engines only see files: to share with them,
    set `weights` to the model's folder, and `name` to the name that they use. The model must be of the files
    that transformers loads from there by itself, without `variant=`, `subfolder=` or `gguf_file=`.

    If the model keeps states beside KV, a state is stored after the last whole chunk of a prompt, and after
    every `state_tokens` tokens before it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *tiers: str | Sequence[str],
        server: str = "",
        name: str = "",
        weights: str = "",
        state_tokens: int = 8192,
        **settings: Any,
    ) -> None:
        if server and (tiers or settings):
            raise MisuseError(f"the server at {server} has its own tiers and settings: pass one or the other")
        self.model = model
        self._kept = probe(model)
        self._limit = length_limit(model.config.to_dict())
        self._name = name or weights or model.config.name_or_path or type(model).__name__
        digest = digest_in(weights, model) if weights else digest_of(model)
        self._stamp = stamp_of(model)
        if server:
            self.cache: lmtier.Cache | Client = Client(server, name="transformers")
        else:
            if tiers:
                settings["tiers"] = tiers[0] if len(tiers) == 1 else tiers
            config, _ = load(env={}, overrides=settings)
            self.cache = lmtier.Cache(config)
        try:
            states = StateStore(self.cache, self._kept.states) if self._kept.states else None
            self._packing = states.packing if states is not None else ""
            self._buffer = ChunkBuffer(self.cache, self._kept, states, self._identity(digest))
        except BaseException:
            self.cache.close()
            raise
        every = max(1, state_tokens // self.cache.chunk_tokens)
        self._prefill = PromptPrefill(model, self._buffer, states, every) if states is not None else None
        self._hook = model.register_forward_pre_hook(before_forward, with_kwargs=True)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the waiting chunks to the tiers of this process, and release everything."""
        self._hook.remove()
        try:
            self._buffer.close()
        finally:
            self.cache.close()

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until the lower tiers have everything that was saved.

        False: not everything, or not in time.
        """
        self._buffer.settle()
        return self.cache.flush(timeout)

    def wait_until_pinned(self, timeout: float = 60.0) -> bool:
        """Wait until a GPU copies at full speed. False: not in time, or its driver refuses to pin all memory.

        Memory is pinned in the background, from the start on. On a CPU there is nothing to wait for.
        """
        return self._buffer.place.wait_until_pinned(timeout)

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, salt: str = "", **options: Any
    ) -> Any:
        """`model.generate`, which loads the stored part of these prompts."""
        how, _ = self.model._prepare_generation_config(**{"generation_config": None, **options})
        if how.cache_implementation or "past_key_values" in options or how.use_cache is False:
            raise MisuseError("the cache is lmtier's: for a static one, pass cache_for(…) to model.generate")
        for word in ("prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_model"):
            if getattr(how, word, options.get(word)):
                raise MisuseError(f"{word} makes generate begin at token 0 in any case; leave it out")
        mask = self._mask(input_ids, attention_mask, how)
        each = max(how.num_beams, how.num_return_sequences)
        cache = self.cache_for(*(rows.repeat_interleave(each, 0) for rows in (input_ids, mask)), salt=salt)
        try:
            return self.model.generate(input_ids, attention_mask=mask, past_key_values=cache, **options)
        finally:
            self._buffer.abort()

    def cache_for(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        salt: str = "",
        max_cache_len: int = 0,
    ) -> StoredCache:
        """A cache for one `model.generate` of these prompts, or one forward. It holds their stored KV.

        Static if `max_cache_len` says how many tokens it shall hold. Prompts with other salts share nothing.
        At least one token is left to compute. A batch goes on from where all of its rows are stored. If the
        model keeps states, its prompts are computed here, up to their last whole chunk.
        """
        mask = self._mask(input_ids, attention_mask, self.model.generation_config)
        if 0 < max_cache_len <= input_ids.shape[1]:
            raise MisuseError(f"max_cache_len={max_cache_len} has no room behind {input_ids.shape[1]} tokens")
        self._recognize()
        config, buffer = self.model.config, self._buffer
        cache = (
            StoredStaticCache(config, max_cache_len) if max_cache_len else StoredDynamicCache(config=config)
        )
        if input_ids.shape[1] >= self._limit:
            return cache
        tokens = mask.sum(1).tolist()
        rows = [
            PromptRow(buffer.mover.chain(ids[len(ids) - count :], salt=salt), len(ids) - count)
            for ids, count in zip(input_ids.tolist(), tokens, strict=True)
        ]
        if self._prefill is not None:
            self._prefill.fill(cache, rows, input_ids, self._limit, self._stamp)
        else:
            cache.loaded, prefixes = buffer.load(rows)
            for (number, (keys, _)), prefix in zip(self._kept.kv.items(), prefixes, strict=False):
                cache.layers[number].update(*(plane.to(keys.device) for plane in prefix))
        for row, where in zip(rows, cache.loaded, strict=True):
            log.info(
                "Loaded KV cache for %d out of %d tokens %s", where.total(), row.chain.tokens, dict(where)
            )
        prompts = ExpectedPrompts(input_ids, mask, is_static=bool(max_cache_len))
        columns = int(cache.get_seq_length())
        cache.saving = PromptSaving(buffer, rows, columns, self._limit, prompts, self._stamp)
        return cache

    def _mask(self, input_ids: Tensor, attention_mask: Tensor | None, how: GenerationConfig) -> Tensor:
        if input_ids.ndim != 2 or not input_ids.numel():
            raise MisuseError(f"input_ids must be rows of at least one token, not {list(input_ids.shape)}")
        if attention_mask is None:
            ends = how.eos_token_id if isinstance(how.eos_token_id, list) else [how.eos_token_id]
            padding = None if how.pad_token_id in ends else how.pad_token_id
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
        """Check that the keys belong to this model. If its weights have changed, new keys begin here."""
        decline_state(self.model)
        if self._stamp != (stamp := stamp_of(self.model)):
            if probe(self.model).kinds != self._kept.kinds:
                raise MisuseError(
                    "the model has another dtype or device than when this was opened: open another"
                )
            self._buffer.identify(self._identity(digest_of(self.model)))
            self._stamp = stamp  # only now, so that a failure is tried again

    def _identity(self, weights: str) -> Identity:
        config = self.model.config
        quantized = getattr(config, "quantization_config", None)
        attention = attention_of(
            config,
            length="the prompt's",
            dtype=str(self.model.dtype),
            quantization=f"transformers {quantized}" if quantized else "None",
            engine={"states": self._packing} if self._packing else None,
        )
        return Identity(model=self._name, weights=weights, attention=attention)
