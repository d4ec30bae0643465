"""The connector with one fault at a time: the one that the file named by TEST_FAULT names just now.

These are faults that users of caches have met: a cache that reads memory wrongly, or names it wrongly.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmtier.format.keys import KeyChain
from lmtier_integrations.vllm import LMTierConnector as LMTierConnector
from lmtier_integrations.vllm.kv_naming import KVNaming
from lmtier_integrations.vllm.load_planner import LoadPlanner
from lmtier_integrations.vllm.rank import RankLoads
from tests.vllm.faults import OF_MEMORY

Blocks = list[int]
Spoil = Callable[[list[Any], Blocks, list[Any]], None]


def fault() -> str:
    return Path(os.environ["TEST_FAULT"]).read_text()


# ---- what is in memory after a load: tensors, the blocks that were loaded, and what those held before


def a_byte(tensors: list[Any], blocks: Blocks, before: list[Any]) -> None:
    import torch

    tensors[0][blocks[0]].view(torch.uint8).view(-1)[3] ^= 0x82


def values_of_two_blocks_swapped(tensors: list[Any], blocks: Blocks, before: list[Any]) -> None:
    """Not their keys: attention does not mind where a block lies."""
    for tensor in tensors:
        first, last = (tensor[block].view(tensor.shape[1], 2, -1)[:, 1] for block in (blocks[0], blocks[-1]))
        kept = first.clone()
        first.copy_(last)
        last.copy_(kept)


def a_layer_stale(tensors: list[Any], blocks: Blocks, before: list[Any]) -> None:
    tensors[1][blocks] = before[1]


def another_scale(tensors: list[Any], blocks: Blocks, before: list[Any]) -> None:
    tensors[2][blocks] *= 1.05


def the_last_chunk_missing(tensors: list[Any], blocks: Blocks, before: list[Any]) -> None:
    for tensor in tensors:
        tensor[blocks[-8:]] = 0


def blocks_off_by_one(tensors: list[Any], blocks: Blocks, before: list[Any]) -> None:
    for tensor in tensors:
        tensor[blocks[1:]] = tensor[blocks[:-1]]


SPOILS: dict[str, Spoil] = dict(
    zip(
        OF_MEMORY,
        (
            a_byte,
            values_of_two_blocks_swapped,
            a_layer_stale,
            another_scale,
            the_last_chunk_missing,
            blocks_off_by_one,
        ),
        strict=True,
    )
)

_start, _matched, _seed, _extend = RankLoads.start, LoadPlanner.matched, KVNaming.seed, KeyChain.extend


def _start_and_spoil(self: RankLoads, *, calls_hooks: bool) -> None:
    name = fault()
    if name == "loaded too late":
        return  # what ends the step copies it
    rank, loads = self._rank, list(self.of_step)
    tensors, size = rank.declared.tensors, rank.block_tokens
    loaded = []
    for each in loads:
        end = len(each.plan.grant.chunks) * rank.client.chunk_tokens // size
        (blocks,) = each.plan.block_ids
        loaded.append(blocks[each.plan.computed_tokens // size : end])
    before = [[tensor[blocks].clone() for tensor in tensors] for blocks in loaded]
    _start(self, calls_hooks=calls_hooks)
    if name in SPOILS:
        for blocks, old in zip(loaded, before, strict=True):
            SPOILS[name](tensors, blocks, old)


def _match_more(self: LoadPlanner, tracked: Any, computed_tokens: int) -> int | None:
    more = _matched(self, tracked, computed_tokens)
    room = tracked.request.num_tokens - 1 - computed_tokens
    if fault() == "more promised than loaded" and more and more + 32 <= room:
        return more + 32
    return more


def _seed_of_less(self: KVNaming, lora: str, salt: str) -> bytes:
    name = fault()
    return _seed(
        self, "" if name == "the adapter ignored" else lora, "" if name == "the salt ignored" else salt
    )


def _extend_by_less(self: KeyChain, tokens: Any) -> KeyChain:
    name = fault()
    if name == "named by length":
        return _extend(self, [0] * len(tokens))
    if name == "named without what comes before":
        known = len(self.keys)
        _extend(self, tokens)
        seed = self.keys[0][:8] if self.keys else b""
        for number in range(known, len(self.keys)):
            part = _all_tokens(self, tokens)[number * self.chunk_tokens :][: self.chunk_tokens]
            alone = _extend(KeyChain(seed + bytes([number]) * 24, self.chunk_tokens), part)
            self.keys[number] = alone.keys[0]
        return self
    return _extend(self, tokens)


def _all_tokens(chain: KeyChain, tokens: Any) -> Any:
    """Of a chain that is made at once, as those of prompts are."""
    assert chain.tokens == len(tokens)
    return tokens


RankLoads.start = _start_and_spoil  # type: ignore[method-assign]
LoadPlanner.matched = _match_more  # type: ignore[method-assign]
KVNaming.seed = _seed_of_less  # type: ignore[method-assign]
KeyChain.extend = _extend_by_less  # type: ignore[method-assign]
