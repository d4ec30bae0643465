"""KV events for KV-aware routers: the chunks of this engine's prompts and their tiers, as vLLM's KV events.

A chunk is one block of `chunk_tokens` tokens, and its hash is the end of its key. An event is sent when a
chunk is stored or found here, whichever engine stored it, and when it leaves. After a gap in the changes, all
chunks are removed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.request import Request

from lmtier.client.client import Client
from lmtier.core.match import CPU
from lmtier.format.keys import KeyChain
from lmtier.observe.journal import Change

_PAUSE = 0.02  # seconds between two questions
_KNOWN = 16_384  # chunks whose tokens are kept, in case they come to another tier
_MEDIA = {CPU: "CPU", "disk": "STORAGE"}
_FIELDS = set(BlockStored.__struct_fields__)


class EventChunk(NamedTuple):
    parent: bytes | None
    tokens: list[int]
    lora: Any
    extra: tuple[Any, ...] | None


class KVEvents:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._chunks: OrderedDict[bytes, EventChunk] = OrderedDict()
        self._published: dict[str, set[bytes]] = {}
        """Maps each tier to the keys that routers know there."""
        self._found: list[Change] = []
        self._next = 0.0
        client.changes()

    def note_prompt(self, request: Request, chain: KeyChain, sources: Sequence[str]) -> None:
        """A prompt, as far as its keys are known, and where its leading chunks are; "": not there yet."""
        size, lora, salt = chain.chunk_tokens, request.lora_request, request.cache_salt
        items = [(each.identifier, each.mm_position) for each in request.mm_features]
        parent: bytes | None = None
        for number, key in enumerate(chain.keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)
            else:
                first, end = number * size, (number + 1) * size
                extra = (
                    *((lora.lora_name,) if lora else ()),
                    *(
                        (identifier, position.offset)
                        for identifier, position in items
                        if position.offset < end and position.offset + position.length > first
                    ),
                    *((salt,) if salt and not number else ()),
                )
                tokens = list(request.all_token_ids[first:end])
                self._chunks[key] = EventChunk(parent, tokens, lora, extra or None)
            parent = key
        while len(self._chunks) > _KNOWN:
            self._chunks.popitem(last=False)
        self._found += [
            Change(tier, True, key) for tier, key in zip(sources, chain.keys, strict=False) if tier
        ]

    def take(self) -> list[KVCacheEvent]:
        """The new events since the last call. It asks the server from time to time."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + _PAUSE
        changes = self._client.changes()
        if changes is None:
            self._found.clear()
            changes = [Change(tier, False, key) for tier, keys in self._published.items() for key in keys]
        noted, self._found = self._found, []
        new_changes = [change for change in (*noted, *changes) if self._is_news(change)]
        return [
            event
            for (tier, is_added), run in groupby(new_changes, key=lambda change: change[:2])
            for event in self._events_of(tier, is_added, [change.key for change in run])
        ]

    def forget(self) -> None:
        """Remove all chunks: no prompt of this engine will find them again."""
        self._found = [Change(tier, False, key) for tier, keys in self._published.items() for key in keys]
        self._chunks.clear()

    def _is_news(self, change: Change) -> bool:
        published = self._published.setdefault(change.tier, set())
        if change.tier.partition("-")[0] not in _MEDIA or (change.key in published) == change.is_added:
            return False
        if not change.is_added:
            published.discard(change.key)
        elif change.key in self._chunks:
            published.add(change.key)
        return not change.is_added or change.key in self._chunks

    def _events_of(self, tier: str, came: bool, keys: list[bytes]) -> list[KVCacheEvent]:
        medium = _MEDIA[tier.partition("-")[0]]
        # Some routers ignore events with an `ownership` that they do not know: only a second disk has one.
        ownership = {} if tier in _MEDIA or "ownership" not in _FIELDS else {"ownership": tier}
        if not came:
            return [BlockRemoved(block_hashes=[*map(_hash, keys)], medium=medium, **ownership)]
        return [self._stored(run, medium, ownership) for run in self._chains(keys)]

    def _chains(self, keys: list[bytes]) -> list[list[bytes]]:
        """Cut where one is not the child of the one before."""
        runs: list[list[bytes]] = []
        for key in keys:
            if runs and self._chunks[key].parent == runs[-1][-1]:
                runs[-1].append(key)
            else:
                runs.append([key])
        return runs

    def _stored(self, keys: list[bytes], medium: str, ownership: dict[str, str]) -> BlockStored:
        chunks = [self._chunks[key] for key in keys]
        lora = chunks[0].lora
        fields = {
            "block_hashes": [*map(_hash, keys)],
            "parent_block_hash": _hash(parent) if (parent := chunks[0].parent) is not None else None,
            "token_ids": [token for chunk in chunks for token in chunk.tokens],
            "block_size": len(chunks[0].tokens),
            "lora_id": lora.adapter_id if lora else None,
            "lora_name": lora.lora_name if lora else None,
            "medium": medium,
            "extra_keys": [chunk.extra for chunk in chunks],
            **ownership,
        }
        return BlockStored(**{name: value for name, value in fields.items() if name in _FIELDS})


def _hash(key: bytes) -> bytes | int:
    """As the engine says its own hashes: by default the last 64 bits."""
    return maybe_convert_block_hash(BlockHash(key))
