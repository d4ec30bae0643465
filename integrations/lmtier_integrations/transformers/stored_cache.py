"""Caches that save the KV of their prompts, layer by layer, while the model computes it.

A cache is made for certain prompts. A forward that would store other KV under their names raises. An
unfinished forward stores nothing.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from lmtier.errors import MisuseError
from lmtier_integrations.transformers.buffer import ChunkBuffer, PromptRow
from lmtier_integrations.transformers.model import decline_state, stamp_of

_NO_MATTER = ("cache_position", "logits_to_keep")  # what else a forward is given


class StoredCache(Cache):
    """The common base of static and dynamic caches. It saves the prompts' KV as the model computes it."""

    loaded: Sequence[Counter[str]] = ()
    """For each row, how many of its tokens came from which tier."""
    saving: PromptSaving | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.saving is not None and not self.saving.layer(layer_idx, key_states, value_states):
            self.saving = None
        return found

    # After rows or columns are moved, the cache no longer belongs to its prompts.

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


class ExpectedPrompts:
    """The prompts that a cache was made for, to check each forward."""

    def __init__(self, input_ids: Tensor, mask: Tensor, *, is_static: bool) -> None:
        self._ids, self._mask, self._is_static = input_ids, mask, is_static
        self._is_padded = not mask.all()
        self._positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)

    def check(self, model: Any, given: Mapping[str, Any], start: int) -> None:
        """A forward from column `start` on: raises if its KV would not be that of these prompts alone."""
        tokens = given.get("input_ids")
        end = self._ids.shape[1] if tokens is None else start + tokens.shape[-1]
        wanted = {
            "input_ids": self._ids[:, start:],
            "position_ids": self._positions[:, start:],
            "attention_mask": self._mask,
        }
        for name, value in given.items():
            if name in _NO_MATTER or not isinstance(value, Tensor):
                continue
            if name == "attention_mask" and value.ndim == 4 and self._is_static:
                continue  # `generate` makes it from a mask, and passes the padding in position_ids
            if name not in wanted:
                raise MisuseError(f"{name} may change KV, which lmtier knows by the prompt's tokens alone")
            # transformers pads a short mask with zeros, and spreads one position over all tokens.
            width = end if name == "attention_mask" else end - start
            if value.shape[-1] < width or (name == "position_ids" and value.shape[-1] > width):
                raise MisuseError(f"{name} has a width of {value.shape[-1]}, and this forward needs {width}")
            columns = min(wanted[name].shape[1], value.shape[-1])
            expected, passed = wanted[name][:, :columns], value[..., :columns]
            if name == "input_ids" and len(passed) != len(expected):
                raise MisuseError(f"a cache of {len(expected)} prompts cannot serve {len(passed)}")
            if passed.ndim == 4 or not (passed.to(expected.device) == expected).all():
                raise MisuseError(f"the {name} is not that of the prompts this cache was made for")
        needed = ["input_ids", *(["attention_mask", "position_ids"] if self._is_padded else [])]
        for name in needed:
            if given.get(name) is None and name in _words_of(type(model).forward):
                raise MisuseError(f"these prompts need {name}, as model.generate gives it")


class PromptSaving:
    """The progress of the model on the prompts of one cache."""

    def __init__(
        self,
        buffer: ChunkBuffer,
        rows: list[PromptRow],
        columns: int,
        limit: float,
        prompts: ExpectedPrompts,
        stamp: int,
    ) -> None:
        self._buffer, self._rows, self._columns, self._limit = buffer, rows, columns, limit
        self._prompts, self._stamp = prompts, stamp
        self._is_expected = False
        self._is_running = False

    def expect(self, model: Any, given: Mapping[str, Any]) -> bool:
        """A forward begins. False: the weights have changed, so nothing is saved from here on."""
        decline_state(model)
        self._prompts.check(model, given, self._columns)
        self._is_expected = True
        return self._stamp == stamp_of(model)

    def layer(self, number: int, keys: Tensor, values: Tensor) -> bool:
        """Save one layer of a forward. False: there is nothing to save from here on."""
        number = self._buffer.numbers[number]
        end = self._columns + keys.shape[-2]
        if number == 0:
            # The forward before did not end, or this one may have another rotation.
            if end >= self._limit or self._is_running or not self._is_expected:
                return False
            self._buffer.begin(self._rows, self._columns, end)
        self._is_running = number < len(self._buffer.numbers) - 1
        self._buffer.save(number, keys, values)
        if self._is_running:
            return True
        self._columns, self._is_expected = end, False
        if not self._buffer.commit():
            return False
        # If the next forward begins in the middle of a chunk, this chunk and later ones cannot be saved.
        return any(row.saved < len(row.chain.keys) and row.end >= end for row in self._rows)


@cache
def _words_of(forward: Any) -> tuple[str, ...]:
    """The arguments of a model's forward, in their order."""
    return tuple(inspect.signature(forward).parameters)[1:]


def before_forward(model: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    given = {**dict(zip(_words_of(type(model).forward), args, strict=False)), **named}
    stored = given.get("past_key_values")
    if isinstance(stored, StoredCache) and stored.saving is not None:
        is_saved = stored.saving.expect(model, given)
        stored.saving = stored.saving if is_saved else None
