"""Per-layer save and load between an engine's KV memory and the extents of a cache.

A mover belongs to one rank. It never looks anything up: a match or a reservation says which extents,
the engine says which blocks. Before it serves, a canary proves that save followed by load returns the
engine's own bytes; afterwards, fingerprints of the raw blocks, taken by a code path that shares nothing
with the copies, are kept with the chunks and compared after a load.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from lmtier.cache import Match, Reservation
from lmtier.codec import NO_MARK
from lmtier.errors import CanaryError, LayoutError, MisuseError
from lmtier.index import Entry
from lmtier.keys import Extra, Identity, KeyChain, check_skip, seed
from lmtier.layout import Form, Layout, Shard, cover, form_of, padded
from lmtier.paging import BlockIds, PagedKV
from lmtier.store import Store

log = logging.getLogger("lmtier")

Blocks: TypeAlias = "Sequence[int] | Sequence[Sequence[int]]"
"""A request's engine blocks, in token order; a row for each block table, if there are several."""

_SAMPLE = 64  # verify=sample compares the chunks whose key is 0 modulo this


class Mover:
    """Moves KV between one rank's engine blocks and a store: a `Cache`, or a `Client` of a server's.

    `ranks` lists the shards that the ranks of this engine store, this one's among them, replicas once;
    by default this rank holds all. What `identity` leaves open is taken from the layout. `spare_blocks`
    are engine blocks that nobody uses yet: the canary runs on them at once. Without them, call `prove`
    before the first real copy, which is refused otherwise.
    """

    def __init__(
        self,
        cache: Store,
        kv: PagedKV,
        identity: Identity,
        *,
        ranks: Sequence[Shard] | None = None,
        spare_blocks: Sequence[int] | None = None,
    ) -> None:
        if kv.layout.chunk_tokens != cache.chunk_tokens:
            raise LayoutError(
                f"the layout has chunk_tokens={kv.layout.chunk_tokens}, the cache {cache.chunk_tokens}"
            )
        self.cache = cache
        self.kv = kv
        self.identity = completed(identity, kv.layout, cache.approximation)
        self.form = form_of(kv.layout, dict.fromkeys(ranks or (kv.shard,)))
        if kv.shard not in self.form.shards:
            raise LayoutError(f"this rank's shard {kv.shard} is not among ranks {self.form.shards}")
        self.number = self.form.shards.index(kv.shard)
        self._proven = False
        if spare_blocks is not None:
            self.prove(spare_blocks)

    def chain(self, tokens: Any, *, lora: str = "", salt: str = "", extras: Sequence[Extra] = ()) -> KeyChain:
        """The keys of a request; `extend` it as the request grows."""
        start = seed(self.identity, self.cache.chunk_tokens, lora=lora, salt=salt)
        return KeyChain(start, self.cache.chunk_tokens, tokens, extras)

    def match(self, chain: KeyChain, *, deadline: float | None = None) -> Match:
        """The longest stored prefix, brought into the slab; it leaves at least one token to compute."""
        whole = max(0, chain.tokens - 1) // chain.chunk_tokens
        keys = chain.keys if whole >= len(chain.keys) else chain.keys[:whole]
        match = self.cache.match(keys, self.form, tokens=chain.tokens, deadline=deadline)
        try:
            return self.cache.wait(match)
        except BaseException:
            self.cache.release(match)
            raise

    def load(self, match: Match, block_ids: Blocks, *, computed_tokens: int = 0) -> Load:
        """Begin loading a match into the request's blocks; slots of `computed_tokens` are left alone.

        The match's leases end with the load, or here if it cannot begin.
        """
        try:
            return self.begin(match, block_ids, computed_tokens=computed_tokens)
        except BaseException:
            self.cache.release(match)
            raise

    def begin(self, match: Match, block_ids: Blocks, *, computed_tokens: int = 0) -> Load:
        """The same for a match whose leases others end: when this is `done`, not before."""
        self._need(match.form)
        return Load(self, match, block_ids, computed_tokens)

    def save(
        self,
        chain: KeyChain,
        block_ids: Blocks,
        *,
        skip_leading_tokens: int = 0,
        reservation: Reservation | None = None,
    ) -> Save:
        """Begin saving the full chunks of `chain` that are not stored yet.

        Blocks of the first `skip_leading_tokens` are not read, whatever is stored. Where several ranks
        store one form, somebody reserves once, `cache.reserve(chain.keys, mover.form)`, and each rank
        saves its shard of that `reservation`.
        """
        self._need_proof()
        if reservation is None and len(self.form.shards) > 1:
            raise MisuseError("several ranks store this form: reserve once, pass it to each as reservation=")
        first = check_skip(skip_leading_tokens, self.cache.chunk_tokens)
        # Every argument is checked before anything is reserved: a bad call leaves nothing behind.
        blocks = dict(enumerate(self.blocks_of(block_ids, first, len(chain.keys)), start=first))
        save = self.fill(reservation or self.cache.reserve(chain.keys, self.form, first=first), blocks)
        log.info(
            "Storing KV cache for %d out of %d tokens (skip_leading_tokens=%d)",
            save.tokens,
            chain.tokens,
            save.skip_leading_tokens,
        )
        return save

    def fill(self, reservation: Reservation, blocks: Mapping[int, BlockIds]) -> Save:
        """Begin saving this rank's shard of what a scheduler has reserved; `blocks` of each of its chunks."""
        self._need(reservation.form)
        return Save(self, reservation, blocks)

    @property
    def under_way(self) -> int:
        """Saves and loads that go on: on a CPU none, whenever a call has returned."""
        return 0

    def reuse(self, block_ids: Blocks) -> None:
        """The engine takes these blocks from others. Nothing is under way in them, on a CPU."""

    def poll(self) -> int:
        """End what is done. How many saves and loads that was; on a CPU, they end by themselves."""
        return 0

    def drain(self) -> None:
        """The same, and wait for it: when the engine stops."""

    def sampled(self, key: bytes) -> bool:
        """Whether this chunk carries a fingerprint; decided by its key, so that both sides agree."""
        verify = self.cache.config.verify
        return verify == "always" or (verify == "sample" and key[-1] % _SAMPLE == 0)

    def blocks_of(self, block_ids: Blocks, first: int, end: int) -> list[BlockIds]:
        """The engine blocks of chunks [first, end) of a request, checked."""
        per_chunk, ids = self.kv.layout.blocks, np.asarray(block_ids)
        ids = ids[..., first * per_chunk : end * per_chunk]
        if (chunk := first + ids.shape[-1] // per_chunk) < end:
            raise LayoutError(
                f"chunk {chunk} needs blocks {chunk * per_chunk} to {(chunk + 1) * per_chunk} of the "
                f"request, which has {first * per_chunk + ids.shape[-1]}"
            )
        return self.kv.check(ids)

    def prove(self, spare_blocks: Sequence[int], *, block_bytes: int | None = None) -> None:
        """The canary: random bytes through save and load, layer by layer and whole, compared raw.

        Half of `spare_blocks` are source and target, the rest guards that must not change.
        `block_bytes` is what the engine says one block takes over all layers of this rank: a tensor
        that shows only part of a block would otherwise go unnoticed. Contents are restored.
        """
        self._proven = False
        kv = self.kv
        size = kv.tables * kv.layout.blocks  # layers of different tables may share memory, but never a block
        spare = list(spare_blocks)
        if len(set(spare)) != len(spare) or len(spare) < 2 * size:
            raise CanaryError(f"the canary needs {2 * size} different spare blocks, got {len(set(spare))}")
        source, target, guards = spare[:size], spare[size : 2 * size], spare[2 * size :]
        (taken,) = kv.check(np.reshape(source, (kv.tables, -1)))
        (given,) = kv.check(np.reshape(target, (kv.tables, -1)))
        before = kv.raw_blocks(spare)
        if block_bytes is not None and len(before) != block_bytes * len(spare):
            raise CanaryError(
                f"the engine says a block takes {block_bytes} bytes over all layers, the tensors show "
                f"{len(before) // len(spare)}: part of the KV would be lost"
            )
        extent = memoryview(bytearray(kv.nbytes))  # not of the slab, which may be full of what is warm
        layers = kv.layers
        try:
            for way, steps in (("layer by layer", tuple(layers)), ("whole", (None,))):
                kv.write_raw(spare, os.urandom(len(before)))
                wanted, untouched = kv.raw_blocks(taken), kv.raw_blocks(guards)
                unread = kv.raw_blocks(source)
                for step in steps:
                    kv.gather(step, taken, extent)
                for step in steps:
                    kv.scatter(step, extent, given)
                if kv.raw_blocks(given) != wanted:
                    raise CanaryError(
                        f"canary ({way}): loading what was saved does not return the engine's bytes; "
                        f"the declared layout does not fit {kv!r}"
                    )
                if kv.raw_blocks(source) != unread or kv.raw_blocks(guards) != untouched:
                    raise CanaryError(f"canary ({way}): blocks that nobody asked for were changed")
        finally:
            kv.write_raw(spare, before)
        self._proven = True

    def _need(self, form: Form) -> None:
        """What was matched or reserved for another model has extents of another size."""
        self._need_proof()
        if form is not self.form:
            raise MisuseError(f"this mover is for {self.form}; what it was given is for {form}")

    def _need_proof(self) -> None:
        if not self._proven:
            raise MisuseError(
                "the canary has not run on this engine's tensors; pass spare_blocks=… or call prove(…) "
                "with blocks that no request uses"
            )


class Load:
    """One match on its way into engine blocks. Call `layer` for each, or `all`; then `finish`.

    As a context manager it finishes by itself and ends the match's leases. What was computed on top of
    a load may be committed only after `finish` has confirmed it.
    """

    done = True
    """Whether nothing of it is under way."""
    seconds: float | None = None
    """What a device took for it, when done. None: it was this thread, in the calls."""

    def __init__(self, mover: Mover, match: Match, block_ids: Blocks, computed_tokens: int) -> None:
        if match.released or not match.ready:
            state = "was released" if match.released else "is not ready: wait for it"
            raise MisuseError(f"load of a match that {state}")
        kv, size = mover.kv, mover.cache.chunk_tokens
        if computed_tokens % kv.layout.block_tokens:
            raise LayoutError(
                f"computed_tokens={computed_tokens} is not whole blocks of {kv.layout.block_tokens}"
            )
        self._mover = mover
        self._match = match
        self.tokens = len(match.run) * size
        """The prompt's leading tokens whose KV is in the engine when this is finished."""
        first, inside = divmod(computed_tokens, size)
        self._finished = False
        self._missing = set(kv.layers)
        self._first = first
        blocks, run = mover.blocks_of(block_ids, first, len(match.run)), match.run[first:]
        first_blocks = [inside // kv.layout.block_tokens, *[0] * (len(run) - 1)]
        self._chunks = list(zip(run, blocks, first_blocks, strict=False))  # of no chunk, nothing is computed
        """Their entries, their blocks, and how many of those are computed already."""
        number, form = mover.number, mover.form
        own = [(ids, entry.offsets[number], at) for entry, ids, at in self._chunks if entry.form is form]
        self._foreign = [each for each in self._chunks if each[0].form is not form]
        self._bound = kv.bind_all(own, mover.cache.slab.view)

    def layer(self, layer: int) -> None:
        """Load one layer of every chunk, once. Ready for the engine's attention when this returns."""
        if layer not in self._missing:
            return
        for bound in self._bound:
            bound.scatter(layer)
        self._convert_all(layer)
        self._missing.discard(layer)

    def all(self) -> None:
        """Load whatever layers are missing: mostly all of them, in one go."""
        if len(self._missing) < len(self._mover.kv.layers):
            for layer in sorted(self._missing):
                self.layer(layer)
            return
        self._mover.kv.scatter_all(self._bound)
        self._convert_all(None)
        self._missing.clear()

    def _convert_all(self, layer: int | None) -> None:
        for entry, ids, first_block in self._foreign:
            self._convert(layer, entry, ids, first_block)

    def _convert(self, layer: int | None, entry: Entry, ids: BlockIds, first_block: int) -> None:
        kv, view = self._mover.kv, self._mover.cache.slab.view
        form = entry.form
        assert form.layout is not None  # known since the chunk's header was read
        for held, part in cover(kv.shard, form.shards) or ():
            if layer is None or part.first_layer <= layer < part.end_layer:
                n = form.shards.index(held)
                payload = view(entry.offsets[n], padded(form.sizes[n]))
                kv.convert(layer, payload, form.layout, held, ids, part=part, first_block=first_block)

    def start(self) -> None:
        """All of it, for an engine that uses nothing of it before it is `done`."""
        self.all()

    def confirm(self) -> None:
        """Hold this thread until it is `done`, if `finish` has something to compare."""

    def finish(self) -> int:
        """Compare fingerprints, as `verify` says. The number of leading tokens to be believed.

        Fewer than `tokens` means that a chunk did not arrive as it had been saved: the engine must compute
        from there, also if it has used some layers already. All that differ are deleted, so that what is
        computed now is stored in their place.
        """
        if self._finished:
            return self.tokens
        self._finished = True
        if self._missing and self._chunks:
            raise MisuseError(f"finish of a load that lacks layers {sorted(self._missing)}")
        cache, sampled = self._mover.cache, self._mover.sampled
        for chunk, (entry, ids, first_block) in enumerate(self._chunks, start=self._first):
            if not sampled(entry.key) or not self._differs(entry, ids, first_block):
                continue
            log.error(
                "lmtier: chunk %s differs from what was saved and was deleted; recompute from token %d",
                entry.key.hex()[:16],
                chunk * cache.chunk_tokens,
            )
            cache.discard(entry)
            self.tokens = min(self.tokens, chunk * cache.chunk_tokens)
        return self.tokens

    def _differs(self, entry: Entry, ids: BlockIds, first_block: int) -> bool:
        """Whether these blocks are known not to be what was saved. Not every chunk can be compared."""
        if not self._is_comparable(entry, ids, first_block):
            return False
        mover, metrics = self._mover, self._mover.cache.metrics
        metrics.verified.inc()
        if entry.prints[mover.number][8:] == self._fingerprint(entry, ids):
            return False
        metrics.verify_failures.inc()
        return True

    def _is_comparable(self, entry: Entry, ids: BlockIds, first_block: int) -> bool:
        mover = self._mover
        if first_block or not ids.is_whole or not entry.prints or entry.form is not mover.form:
            return False
        mark = entry.prints[mover.number]
        return mark != NO_MARK and mark[:8] == mover.kv.raw_tag

    def _fingerprint(self, entry: Entry, ids: BlockIds) -> bytes:
        return self._mover.kv.raw_fingerprint(ids)

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._mover.cache.release(self._match)


class Save:
    """New chunks on their way out of engine blocks. Call `layer` for each, or `all`; then `commit`.

    As a context manager it commits by itself, and aborts if the block raises. Nothing is visible before.
    """

    done = True
    """Whether, after commit or abort, nothing of it is under way."""

    def __init__(self, mover: Mover, reservation: Reservation, blocks: Mapping[int, BlockIds]) -> None:
        cache = mover.cache
        self._mover = mover
        self.reservation = reservation
        number, kv = mover.number, mover.kv
        entries = reservation.entries.items()
        self._chunks = [(chunk, blocks[chunk]) for chunk, _ in entries]
        self._bounds = kv.bind_all(
            [(blocks[chunk], entry.offsets[number], 0) for chunk, entry in entries], cache.slab.view
        )
        self.tokens = len(self._chunks) * cache.chunk_tokens
        """Tokens that are being stored."""
        self.skip_leading_tokens = self.reservation.known * cache.chunk_tokens
        self._missing = set(mover.kv.layers)
        self._prints: dict[int, dict[int, bytes]] = {
            chunk: {} for chunk, entry in self.reservation.entries.items() if mover.sampled(entry.key)
        }
        """Chunk -> layer -> fingerprint."""

    def layer(self, layer: int) -> None:
        """Save one layer of every new chunk."""
        kv = self._mover.kv
        for bound in self._bounds:
            bound.gather(layer)
        for chunk, ids in self._chunks:
            if chunk in self._prints:
                self._prints[chunk][layer] = kv.raw_fingerprint(ids, layer)
        self._missing.discard(layer)

    def all(self) -> None:
        """Save whatever layers are missing: mostly all of them, in one go."""
        kv = self._mover.kv
        if len(self._missing) < len(kv.layers):
            for layer in sorted(self._missing):
                self.layer(layer)
            return
        kv.gather_all(self._bounds)
        for chunk, ids in self._chunks:
            if chunk in self._prints:
                for layer in self._missing:
                    self._prints[chunk][layer] = kv.raw_fingerprint(ids, layer)
        self._missing.clear()

    def commit(self) -> None:
        """Make the chunks visible. Every layer must have been saved."""
        kv = self._mover.kv
        if self._missing and self._chunks:
            raise MisuseError(f"commit of a save that lacks layers {sorted(self._missing)}")
        prints = {
            chunk: kv.raw_tag + kv.fold([marks[layer] for layer in sorted(marks)])
            for chunk, marks in self._prints.items()
        }
        self._mover.cache.commit(self.reservation, kv.shard, prints)

    def abort(self) -> None:
        self._mover.cache.abort(self.reservation, self._mover.kv.shard)

    def __enter__(self) -> Save:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise


def completed(identity: Identity, layout: Layout, approximation: str) -> Identity:
    """`identity` with what it leaves open taken from the layout, so that unlike KV never shares a key.

    An opaque packing is part of it: nobody but itself can read it. Known packings are not, because they
    convert. So is the `approximation` of a store whose tiers do not keep KV exactly: what comes from there,
    and what is computed on top of it, is never met by those who did not ask for that.
    """
    first = layout.layers[0]
    attention = [identity.attention] if identity.attention else []
    if len(set(layout.layers)) > 1:
        attention.append(f"layers={[tuple(shape) for shape in layout.layers]}")
    if layout.is_opaque:
        attention.append(f"packing={layout.packing},{layout.block_tokens}")
    if approximation:
        attention.append(f"approximation={approximation}")
    return replace(
        identity,
        dtype=identity.dtype or layout.dtype,
        layers=identity.layers or len(layout.layers),
        kv_heads=identity.kv_heads or first.heads,
        head_dim=identity.head_dim or first.k,
        planes=2 if first.v else 1,
        attention=";".join(attention),
    )
