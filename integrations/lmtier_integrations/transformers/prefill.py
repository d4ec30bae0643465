"""Computes the prompts of models with states, up to the last place where a state is stored.

A state is only right where a forward ends, so `generate` must not compute such a prompt in one forward. It
computes the rest, which is at most a chunk. States are stored

    after the last whole chunk of a prompt
    after every `every` chunks
    where another prompt went on differently, once that is seen

Each row of a batch is loaded and computed alone, and equal rows once: a state has no columns, so rows that
are padded differently have no common place to go on from. Padding is never part of what is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lmtier_integrations.transformers.buffer import ChunkBuffer, PromptRow
from lmtier_integrations.transformers.model import compute
from lmtier_integrations.transformers.states import StateStore, put_states, states_in
from lmtier_integrations.transformers.stored_cache import (
    ExpectedPrompts,
    PromptSaving,
    StoredCache,
    StoredDynamicCache,
)


class PromptPrefill:
    def __init__(self, model: PreTrainedModel, buffer: ChunkBuffer, states: StateStore, every: int) -> None:
        self._model, self._buffer, self._states = model, buffer, states
        self._every = every

    def fill(
        self, cache: StoredCache, rows: Sequence[PromptRow], ids: Tensor, limit: float, stamp: int
    ) -> None:
        """Load and compute these prompts into an empty cache: all of them up to the same column."""
        size = self._buffer.chunk_tokens
        whole = [(row.chain.tokens - 1) // size * size for row in rows]
        column = max(row.pad + tokens for row, tokens in zip(rows, whole, strict=True))
        try:
            if len(rows) == 1 and not rows[0].pad:
                cache.loaded = [self._advance(cache, rows[0], ids, column, limit, stamp)]
            elif not any(whole):
                cache.loaded = [Counter() for _ in rows]
            else:
                self._fill_alone(cache, rows, ids, max(column, *(row.pad for row in rows)), limit, stamp)
        finally:
            self._buffer.abort()

    def _fill_alone(
        self,
        cache: StoredCache,
        rows: Sequence[PromptRow],
        ids: Tensor,
        column: int,
        limit: float,
        stamp: int,
    ) -> None:
        filled: dict[tuple[int, ...], tuple[StoredCache, PromptRow, Counter[str]]] = {}
        found = []
        for row, tokens in zip(rows, ids, strict=True):
            prompt = tokens[row.pad :]
            name = tuple(prompt.tolist())
            if name not in filled:
                row_cache, unpadded = StoredDynamicCache(config=self._model.config), PromptRow(row.chain, 0)
                loaded = self._advance(row_cache, unpadded, prompt[None], column - row.pad, limit, stamp)
                filled[name] = row_cache, unpadded, loaded
            found.append(filled[name])
            row.saved = filled[name][1].saved
        cache.loaded = [loaded for *_, loaded in found]
        self._join(cache, [row_cache for row_cache, *_ in found], column)

    def _advance(
        self, cache: StoredCache, row: PromptRow, ids: Tensor, until: int, limit: float, stamp: int
    ) -> Counter[str]:
        """Load what is stored of one prompt, and compute it up to `until`. Returns the tokens from each
        tier."""
        (found,), prefixes = self._buffer.load([row])
        for layer, planes in zip(self._buffer.numbers, prefixes, strict=False):
            cache.layers[layer].update(*planes)
        if row.state is not None:
            put_states(cache, row.state)
            row.state = None
        size, at = self._buffer.chunk_tokens, row.end
        prompts = ExpectedPrompts(ids, torch.ones_like(ids), is_static=False)
        cache.saving = PromptSaving(self._buffer, [row], at, limit, prompts, stamp)
        last = until // size
        places = {last, row.parted, *range(self._every, last, self._every)}
        for end in sorted({until, *(place * size for place in places if place <= last)}):
            if end <= at:
                continue
            compute(self._model, ids, cache, at, end)
            at = end
            if not end % size and row.end >= end:
                self._states.save(row.chain.keys[end // size - 1], states_in(cache))
        return found

    def _join(self, cache: StoredCache, rows: Sequence[Cache], columns: int) -> None:
        """Make one cache of those of the rows, padded on the left. A row may not have begun."""
        reference = next(row for row in rows if row.get_seq_length())
        for layer in self._buffer.numbers:
            planes = []
            for word in ("keys", "values"):
                sample = getattr(reference.layers[layer], word)
                plane = sample.new_zeros(len(rows), sample.shape[1], columns, sample.shape[3])
                for number, row in enumerate(rows):
                    if row.get_seq_length():
                        row_plane = getattr(row.layers[layer], word)
                        plane[number, :, columns - row_plane.shape[2] :] = row_plane[0]
                planes.append(plane)
            cache.layers[layer].update(*planes)
        alone = [states_in(row) for row in rows]
        empty = {place: torch.zeros_like(tensor) for place, tensor in states_in(reference).items()}
        put_states(cache, {place: torch.cat([(each or empty)[place] for each in alone]) for place in empty})
