"""The buffer between the caches of requests and the store: one block for each chunk of a prompt.

KV goes through it because the tensors of a cache exist only for one request. It is as large as the largest
load or save so far, and lies on the model's device. On a GPU, copies between it and the tiers continue while
the model computes; the next call ends them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

import lmtier
from lmtier.client.client import Client
from lmtier.copy.mover import Mover, Save, blocks_granted, fill_identity
from lmtier.core.grant import Match
from lmtier.errors import DeviceError, log
from lmtier.format.keys import Identity, KeyChain
from lmtier.format.layout import LayerShape, Layout
from lmtier_integrations.transformers.model import DTYPES, ModelCacheProbe
from lmtier_integrations.transformers.places import InCpuMemory, InGpuMemory, beside_the_gpu, place_for
from lmtier_integrations.transformers.states import CANARY_BLOCKS, States, StateStore

_FAILURES = torch.cuda.OutOfMemoryError, DeviceError
"""Failures of a GPU. Then a load is computed instead, and a save is dropped."""


@dataclass
class PromptRow:
    """A prompt of a batch."""

    chain: KeyChain
    pad: int
    """Columns before its first token."""
    saved: int = 0
    """Chunks that are stored, or will be at the end of the running forward."""
    parted: int = 0
    """Chunks after which another prompt went on differently, if no state is stored there."""
    state: States | None = None
    """The state after `saved` chunks, if one was loaded."""

    @property
    def end(self) -> int:
        """The column up to which the row is stored."""
        return self.pad + self.saved * self.chain.chunk_tokens


@dataclass
class _Filling:
    """The new chunks of one row, with their columns in a forward."""

    save: Save
    row: int
    columns: slice
    blocks: slice
    """Its blocks in the buffer."""


class ChunkBuffer:
    """The buffer between the caches of requests and the store; one of them goes through it at a time."""

    def __init__(
        self,
        cache: lmtier.Cache | Client,
        kept: ModelCacheProbe,
        states: StateStore | None,
        identity: Identity,
    ) -> None:
        self._cache = cache
        self._states = states
        self.chunk_tokens = cache.chunk_tokens
        self.numbers = {layer: number for number, layer in enumerate(kept.kv)}
        """The number of each layer among those with KV."""
        probed = list(kept.kv.values())
        self._dtype = probed[0][0].dtype
        shapes = [LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1]) for keys, values in probed]
        self._layout = Layout(
            tuple(shapes), DTYPES[self._dtype], self.chunk_tokens, self.chunk_tokens, "token"
        )
        self._fillings: list[_Filling] = []
        """The new chunks of the running forward."""
        self._identity = identity
        self._blocks: list[Tensor] = []
        self.mover: Mover
        self.place: InCpuMemory | InGpuMemory = place_for(
            cache, {plane.device for planes in probed for plane in planes}
        )
        try:
            self._take(CANARY_BLOCKS)
        except DeviceError as error:
            self.place.close()
            self.place = beside_the_gpu(cache, self.place.device, error)
            self._take(CANARY_BLOCKS)
        self.place.follow()

    def close(self) -> None:
        self.settle()
        self.place.give_back(self.mover.kv)
        self.place.close()
        self._blocks.clear()

    def settle(self) -> None:
        """Wait for unfinished copies of earlier calls. Their saved chunks can be found from now on."""
        self.abort()
        self.mover.drain()
        self._cache.step()

    def identify(self, identity: Identity) -> None:
        """Use keys of other weights from now on. The buffer stays: the canary has proven it."""
        self.settle()
        self.mover.identity = fill_identity(identity, self._layout, self._cache.approximation)
        self._identity = identity

    def _take(self, blocks: int) -> None:
        """Blocks [H, C, K | V] for at least so many chunks."""
        count = max(blocks, CANARY_BLOCKS)
        shapes = [(heads, self.chunk_tokens, k + v) for heads, k, v in self._layout.layers]
        sizes = [prod(shape) for shape in shapes]
        # A chunk's layers are contiguous, as in a payload, so it can be copied as one piece.
        memory = self.place.empty((count, sum(sizes)), self._dtype)
        parts = torch.split(memory, sizes, dim=1)
        layer_blocks = [part.view(count, *shape) for part, shape in zip(parts, shapes, strict=True)]
        with self.place.current():
            kv = self.place.kv(self._layout, layer_blocks)
            try:
                mover = self.place.mover(kv, self._identity)
                mover.prove(range(CANARY_BLOCKS))
            except BaseException:
                self.place.give_back(kv)
                raise
        if self._blocks:
            self.place.give_back(self.mover.kv)
        self._blocks, self.mover = layer_blocks, mover

    def _make_room(self, blocks: int) -> None:
        """Enlarge the buffer. Raises one of _FAILURES if the GPU has no room; then the old buffer stays."""
        if blocks > len(self._blocks[0]):
            self.mover.drain()  # no copy may use blocks that are freed
            self._take(1 << (blocks - 1).bit_length())

    def load(self, rows: Sequence[PromptRow]) -> tuple[list[Counter[str]], Iterator[list[Tensor]]]:
        """The stored tokens of each row, by tier; and each layer's K and V of them, [rows, H, columns, D]."""
        self.settle()
        matches: list[Match] = []
        unreleased: dict[int, Match] = {}
        """The matches whose leases end here. A load ends the leases of its match itself, perhaps later."""
        sources: list[list[str]] = []
        prefixes: list[list[Tensor]] = []
        try:
            for row_number, row in enumerate(rows):
                ends = self._states.mover.form if self._states is not None else None
                matches.append(self.mover.match(row.chain, state_form=ends))
                unreleased[row_number] = matches[-1]
                row.saved = matches[-1].chunks
                row.parted = matches[-1].found if matches[-1].cut_reason == "no_state" else 0
                sources.append(list(matches[-1].sources))
            self.place.follow()
            if common_end := _common_end(rows):
                prefixes = self._prefixes(rows, max(row.end for row in rows))
            for row_number, row in enumerate(rows):
                if prefixes and row.pad < common_end:
                    for chunk in self._load_row(row_number, row, unreleased.pop(row_number), prefixes):
                        sources[row_number][chunk] = "gpu"
        except DeviceError as error:
            _warn(error, f"load {common_end} tokens: they are computed")
            prefixes = []
        finally:
            for match in unreleased.values():
                self._cache.release(match)
            self._cache.step()
        # It is less if a fingerprint differed.
        common_end = _common_end(rows) if prefixes else 0
        tokens_by_tier = [
            _by_tier(places, common_end - row.pad, self.chunk_tokens)
            for places, row in zip(sources, rows, strict=True)
        ]
        return tokens_by_tier, _handed_over(prefixes, common_end)

    def _load_row(
        self, row_number: int, row: PromptRow, match: Match, prefixes: list[list[Tensor]]
    ) -> Sequence[int]:
        """Load a match through the buffer into this row of the prefixes. Returns chunks that were copied on
        the GPU."""
        columns = slice(row.pad, row.end)
        # Wait for chunks with fingerprints: only verified chunks count as stored.
        with self.place.current(), self.mover.load(match, range(match.chunks)) as load:
            load.all()
            load.confirm()
            state = match.grant.state
            if self._states is not None and state is not None:
                is_whole = load.finish() == row.saved * self.chunk_tokens
                row.state = self._states.load(state) if is_whole else None
        row.saved = load.tokens // self.chunk_tokens
        if self._states is not None and row.state is None:
            row.saved = 0
        for blocks, (keys, values) in zip(self._blocks, prefixes, strict=True):
            for block, plane in _facing(blocks, keys[row_number, :, columns], values[row_number, :, columns]):
                plane.copy_(block)
        return load.from_copies

    def _prefixes(self, rows: Sequence[PromptRow], columns: int) -> list[list[Tensor]]:
        """Room for the stored KV of these rows. Empty if the GPU has no room."""
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

    def begin(self, rows: Sequence[PromptRow], start: int, end: int) -> None:
        """Reserve the whole chunks that a forward over columns [start, end) computes and that are not
        stored."""
        self.abort()
        size = self.chunk_tokens
        new_rows = []
        for number, row in enumerate(rows):
            full_chunks = min((end - row.pad) // size, len(row.chain.keys))
            if full_chunks > row.saved and row.end >= start:
                new_rows.append((number, row, full_chunks))
        needed = sum(full_chunks - row.saved for _, row, full_chunks in new_rows)
        try:
            self._make_room(needed)
        except _FAILURES as error:
            _warn(error, f"save {needed * size} tokens: they are not stored")
            return
        self.mover.order_before_reuse(range(needed))
        next_block = 0
        for number, row, full_chunks in new_rows:
            first, first_column = row.saved, row.end - start
            block_ids = range(next_block, next_block := next_block + full_chunks - first)
            ids = self.mover.kv.check(block_ids)
            grant = self._cache.reserve(row.chain.keys[:full_chunks], self.mover.form, first=first)
            columns = slice(first_column, first_column + (full_chunks - first) * size)
            save = self.mover.fill(grant, blocks_granted(grant, ids, first))
            self._fillings.append(_Filling(save, number, columns, slice(block_ids.start, block_ids.stop)))
            row.saved = full_chunks - grant.dropped

    def save(self, number: int, keys: Tensor, values: Tensor) -> None:
        for filling in self._fillings:
            if filling.save.tokens:
                new = (plane[filling.row, :, filling.columns].detach() for plane in (keys, values))
                for block, plane in _facing(self._blocks[number][filling.blocks], *new):
                    block.copy_(plane)
                self.place.computed(filling.save, number)

    def commit(self) -> bool:
        """The forward has ended: its saved chunks can be found from the next call on.

        False: some chunks were not saved, and chunks after them would lack a prefix.
        """
        is_whole = True
        try:
            with self.place.current():
                while self._fillings:  # in order: a chunk's parent may be in an earlier row
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
        """Give back the room of an unfinished forward, if there is one."""
        while self._fillings:
            self._fillings.pop().save.abort()
        if self.mover.poll():
            self._cache.step()


def _warn(failure: Exception, what_not: str) -> None:
    why = "has no room" if isinstance(failure, torch.cuda.OutOfMemoryError) else f"fails ({failure})"
    log.warning("lmtier: the GPU %s to %s", why, what_not)


def _common_end(rows: Sequence[PromptRow]) -> int:
    """The column up to which every row is stored."""
    end = min(row.end for row in rows)
    return end if end > min(row.pad for row in rows) else 0


def _handed_over(prefixes: list[list[Tensor]], end: int) -> Iterator[list[Tensor]]:
    """The prefixes layer by layer. A layer is freed when the caller drops it."""
    while prefixes and end:
        yield [plane[:, :, :end] for plane in prefixes.pop(0)]


def _by_tier(sources: Sequence[str], tokens: int, size: int) -> Counter[str]:
    """The number of a row's first tokens from each tier."""
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
