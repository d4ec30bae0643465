"""The states of layers without KV (linear attention, Mamba, convolutions): read, written, stored, loaded.

A state stands for all tokens so far, and the next token replaces it. So it is taken where a forward ends, and
stored beside the chunk that ends there. Its bytes are those of the cache's tensors, one after the other. They
fit the same model in the same version of transformers only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
import transformers
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

import lmtier
from lmtier.client.client import Client
from lmtier.copy.mover import Mover
from lmtier.copy.paging import PagedKV
from lmtier.core.grant import Grant
from lmtier.errors import MisuseError
from lmtier.format.keys import Identity, state_key
from lmtier.format.layout import LayerShape, Layout

CANARY_BLOCKS = 3
"""Source, target, and one that must not change."""


class StatePlace(NamedTuple):
    """The place of a tensor in a cache."""

    layer: int
    is_recurrent: bool
    """Otherwise it is of a convolution."""
    number: int
    """Among the tensors of its kind in this layer."""


States: TypeAlias = Mapping[StatePlace, Tensor]
"""What the layers without KV remember: tensors [rows, …]."""


def states_in(cache: Cache) -> States:
    found: dict[StatePlace, Tensor] = {}
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for is_recurrent, tensors in enumerate((layer.conv_states, layer.recurrent_states)):
                for index, tensor in tensors.items():
                    if tensor is not None:
                        found[StatePlace(number, bool(is_recurrent), index)] = tensor
    return found


def put_states(cache: Cache, states: States) -> None:
    """Into a cache that has none. They are copied: a model changes its own in place."""
    for place, tensor in states.items():
        update = cache.update_recurrent_state if place.is_recurrent else cache.update_conv_state
        update(tensor, place.layer, place.number)


class StateStore:
    """Moves one state at a time between a cache and the store."""

    def __init__(self, cache: lmtier.Cache | Client, probed: States) -> None:
        self._cache = cache
        self._kinds = _kinds_of(probed)
        self._sizes = [tensor[0].nbytes for tensor in probed.values()]
        said = transformers.__version__, [(*place, *kind) for place, kind in self._kinds.items()]
        self.packing = f"state-{hashlib.sha256(repr(said).encode()).hexdigest()[:40]}"
        size = cache.chunk_tokens
        layout = Layout((LayerShape(1, sum(self._sizes), 0),), "u8", size, size, self.packing)
        self._named = layout.to_json()
        self._blocks = torch.empty(CANARY_BLOCKS, 1, sum(self._sizes), dtype=torch.uint8)
        kv = PagedKV(layout, layout.whole, [self._blocks[:, None]])
        self.mover = Mover(cache, kv, Identity(model=""), spare_blocks=range(CANARY_BLOCKS))

    def save(self, key: bytes, states: States) -> None:
        """Store the state after the chunk `key`, if it is not stored and there is room."""
        if _kinds_of(states) != self._kinds:
            raise MisuseError("the model keeps other states than when this was opened: open another")
        pair = [key, state_key(key, self._named)]
        grant = self._cache.reserve(pair, self.mover.form, first=1)
        with self.mover.fill(grant, self.mover.kv.check([0] * len(grant.chunks))) as save:
            if grant.chunks:
                for part, state in zip(self._parts(), states.values(), strict=True):
                    part.copy_(state.contiguous().view(-1).view(torch.uint8))
                save.all()
        self._cache.step()

    def load(self, grant: Grant) -> States | None:
        """The state that a match ends with. None: it differs from what was saved. The caller ends its
        leases."""
        load = self.mover.begin(grant, [0])
        load.all()
        if load.finish() != self._cache.chunk_tokens:
            return None
        found = {}
        for part, (place, (shape, dtype)) in zip(self._parts(), self._kinds.items(), strict=True):
            found[place] = part.clone().view(dtype).view(1, *shape)
        return found

    def _parts(self) -> tuple[Tensor, ...]:
        """The bytes of each tensor in the block."""
        return torch.split(self._blocks[0, 0], self._sizes)


def _kinds_of(states: States) -> dict[StatePlace, tuple[tuple[int, ...], torch.dtype]]:
    return {place: (tuple(tensor.shape[1:]), tensor.dtype) for place, tensor in states.items()}
