"""Per-layer save and load between an engine's KV memory and the extents of a cache.

A mover belongs to one rank. It looks nothing up: a match or a reservation names the extents, and the engine
names the blocks. Before the first copy a canary proves that save followed by load returns the engine's own
bytes. Later, fingerprints of the raw blocks are stored with the chunks and compared after a load. They are
computed by code that shares nothing with the copies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from lmtier.copy.blocks import ABSENT, ChunkBlocks
from lmtier.copy.store import Store
from lmtier.core.grant import Grant, Match
from lmtier.errors import CanaryError, LayoutError, MisuseError, log
from lmtier.format.keys import Extra, Identity, KeyChain, check_skip, seed
from lmtier.format.layout import ChunkForm, Layout, Shard, cover, form_of, padded
from lmtier.format.objects import NO_MARK

if TYPE_CHECKING:
    from lmtier.copy.cuda.paging import CudaKV
    from lmtier.copy.paging import PagedKV

RankKV: TypeAlias = "PagedKV | CudaKV"
"""The KV memory of one rank."""
Blocks: TypeAlias = "Sequence[int] | Sequence[Sequence[int]]"
"""A request's engine blocks, in token order. With several block tables, one row for each."""

_SAMPLE = 64  # verify=sample compares the chunks whose key is 0 modulo this


class Mover:
    """Moves KV between one rank's engine blocks and a store: a `Cache`, or the `Client` of a server.

    `ranks` lists the shards that the ranks of this engine store, including this rank's; replicas are listed
    once. By default this rank holds all. Empty fields of `identity` are filled from the layout.
    `spare_blocks` are unused engine blocks; the canary runs on them at once. Without them, call `prove`
    before the first copy, which raises MisuseError otherwise.
    """

    def __init__(
        self,
        cache: Store,
        kv: RankKV,
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
        self.identity = fill_identity(identity, kv.layout, cache.approximation)
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

    def match(
        self,
        chain: KeyChain,
        *,
        deadline: float | None = None,
        state_form: ChunkForm | None = None,
        source: str = "",
    ) -> Match:
        """Load the longest stored prefix into the slab. At least one token is left to compute.

        With `state_form` it ends with a state of that form, which another mover loads. `source` is the
        host:port of another server whose memory may have the prompt.
        """
        whole = max(0, chain.tokens - 1) // chain.chunk_tokens
        keys = chain.keys if whole >= len(chain.keys) else chain.keys[:whole]
        match = self.cache.match(
            keys, self.form, tokens=chain.tokens, deadline=deadline, state_form=state_form, source=source
        )
        try:
            return self.cache.wait(match)
        except BaseException:
            self.cache.release(match)
            raise

    def load(self, match: Match, block_ids: Blocks, *, computed_tokens: int = 0) -> Load:
        """Begin to load a match into the request's blocks. The slots of `computed_tokens` are not changed.

        The match's leases end with the load, or here if it cannot begin.
        """
        try:
            load = self.begin(granted(match), block_ids, computed_tokens=computed_tokens)
        except BaseException:
            self.cache.release(match)
            raise
        load.match = match
        return load

    def begin(self, grant: Grant, block_ids: Blocks, *, computed_tokens: int = 0) -> Load:
        """Like `load`, but the caller ends the leases, after this load is `done`."""
        self._need(grant.form)
        return Load(self, grant, block_ids, computed_tokens)

    def save(
        self,
        chain: KeyChain,
        block_ids: Blocks,
        *,
        skip_leading_tokens: int = 0,
        grant: Grant | None = None,
    ) -> Save:
        """Begin to save the full chunks of `chain` that are not stored yet.

        The blocks of the first `skip_leading_tokens` are never read. If several ranks store one form, one
        caller reserves with `cache.reserve(chain.keys, mover.form)`, and each rank saves its shard of that
        `grant`.
        """
        self._need_proof()
        if grant is None and len(self.form.shards) > 1:
            raise MisuseError("several ranks store this form: reserve once, pass it to each as grant=")
        first = check_skip(skip_leading_tokens, self.cache.chunk_tokens)
        # Every argument is checked before anything is reserved, so a bad call leaves nothing behind.
        ids = self.blocks_of(block_ids, first, len(chain.keys))
        reserved = grant or self.cache.reserve(chain.keys, self.form, first=first)
        try:
            save = self.fill(reserved, blocks_granted(reserved, ids, first))
        except BaseException:
            if grant is None:
                self.cache.abort(reserved, self.kv.shard)
            raise
        log.info(
            "Storing KV cache for %d out of %d tokens (skip_leading_tokens=%d)",
            save.tokens,
            chain.tokens,
            save.skip_leading_tokens,
        )
        return save

    def fill(self, grant: Grant, ids: ChunkBlocks) -> Save:
        """Begin to save this rank's shard of what a scheduler has reserved, from its chunks' blocks."""
        self._need(grant.form)
        return Save(self, grant, ids)

    @property
    def under_way(self) -> int:
        """The number of unfinished saves and loads. On a CPU they finish before the calls return."""
        return 0

    def order_before_reuse(self, block_ids: Blocks) -> None:
        """The engine reuses these blocks. On a CPU no copy is unfinished, so nothing must be done."""

    def wait_until_uncopied(self, block_ids: Blocks) -> None:
        """Another writer than the engine gets these blocks. Wait until nothing copies them."""

    def poll(self) -> int:
        """End the finished saves and loads, and return their number. On a CPU they end by themselves."""
        return 0

    def drain(self) -> None:
        """Wait for all saves and loads, and end them. For when the engine stops."""

    def sampled(self, keys: Sequence[bytes]) -> list[int]:
        """The numbers of those that have fingerprints. The keys decide, so that writer and reader agree."""
        verify = self.cache.config.verify
        if verify != "sample":
            return list(range(len(keys))) if verify == "always" else []
        return [number for number, key in enumerate(keys) if not key[-1] % _SAMPLE]

    def blocks_of(self, block_ids: Blocks, first: int, end: int) -> ChunkBlocks:
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
        """The canary: sends random bytes through save and load, layer by layer and whole, and compares.

        Half of `spare_blocks` are source and target. The rest are guards, which must not change.
        `block_bytes` is the engine's own size of a block over all layers of this rank. It detects a tensor
        that shows only part of a block. Contents are restored.
        """
        self._proven = False
        kv = self.kv
        size = kv.tables * kv.layout.blocks  # layers of different tables may share memory, but never a block
        spare = list(spare_blocks)
        if len(set(spare)) != len(spare) or len(spare) < 2 * size:
            raise CanaryError(f"the canary needs {2 * size} different spare blocks, got {len(set(spare))}")
        source, target, guards = spare[:size], spare[size : 2 * size], spare[2 * size :]
        source_ids, target_ids = (np.reshape(each, (kv.tables, -1)) for each in (source, target))
        saved_contents = kv.raw_blocks(spare)
        if block_bytes is not None and len(saved_contents) != block_bytes * len(spare):
            raise CanaryError(
                f"the engine says a block takes {block_bytes} bytes over all layers, the tensors show "
                f"{len(saved_contents) // len(spare)}: part of the KV would be lost"
            )
        extent = memoryview(bytearray(kv.nbytes))  # not in the slab, which may be full after a warm start
        layers = kv.layers
        try:
            for mode, steps in (("layer by layer", tuple(layers)), ("whole", (None,))):
                kv.write_raw(spare, os.urandom(len(saved_contents)))
                expected, guard_bytes = kv.raw_blocks(source_ids), kv.raw_blocks(guards)
                source_bytes = kv.raw_blocks(source)
                for step in steps:
                    kv.gather(step, source_ids, extent)
                for step in steps:
                    kv.scatter(step, extent, target_ids)
                if kv.raw_blocks(target_ids) != expected:
                    raise CanaryError(
                        f"canary ({mode}): loading what was saved does not return the engine's bytes; "
                        f"the declared layout does not fit {kv!r}"
                    )
                if kv.raw_blocks(source) != source_bytes or kv.raw_blocks(guards) != guard_bytes:
                    raise CanaryError(f"canary ({mode}): blocks outside of the copy were changed")
        finally:
            kv.write_raw(spare, saved_contents)
        self._proven = True

    def _need(self, form: ChunkForm) -> None:
        """Raise if a grant has another form: its extents have other sizes."""
        self._need_proof()
        if form is not self.form:
            raise MisuseError(f"this mover is for {self.form}, but the grant is for {form}")

    def _need_proof(self) -> None:
        if not self._proven:
            raise MisuseError(
                "the canary has not run on this engine's tensors; pass spare_blocks=… or call prove(…) "
                "with blocks that no request uses"
            )


class Load:
    """The load of one match into engine blocks. Call `layer` for each layer, or `all`; then `finish`.

    As a context manager it finishes by itself and ends the match's leases. KV that was computed on top of a
    load may be committed only after `finish` has confirmed the load.
    """

    done = True
    """Whether all of its copies have ended."""
    seconds: float | None = None
    """The time that the device needed, once `done`. None: this thread copied during the calls."""
    from_copies: Sequence[int] = ()
    """The chunks that come from copies in GPU memory which the mover manages."""
    match: Match | None = None
    """The match whose leases end with this load; None: the caller ends them."""

    def __init__(self, mover: Mover, grant: Grant, block_ids: Blocks, computed_tokens: int) -> None:
        kv, size = mover.kv, mover.cache.chunk_tokens
        if computed_tokens % kv.layout.block_tokens:
            raise LayoutError(
                f"computed_tokens={computed_tokens} is not whole blocks of {kv.layout.block_tokens}"
            )
        self._mover = mover
        self.tokens = len(grant.chunks) * size
        """The number of leading tokens whose KV is in the engine when the load is finished."""
        first, tokens_in_chunk = divmod(computed_tokens, size)
        self._finished = False
        self._missing = set(kv.layers)
        self._placed = grant.placement
        ids = mover.blocks_of(block_ids, first, len(grant.chunks))
        if tokens_in_chunk:
            ids = ids.copy()
            ids[:, 0, : tokens_in_chunk // kv.layout.block_tokens] = ABSENT
        self._first, self._ids = first, ids
        """The number of the first chunk that is loaded, and its blocks and those of the chunks after it."""
        offsets, number = self._placed.offsets, mover.number
        self._to_convert = sorted(chunk for chunk in self._placed.other_forms if chunk >= first)
        same_form = range(first, len(grant.chunks))
        if self._to_convert:
            is_foreign = set(self._to_convert)
            rows = [chunk for chunk in same_form if chunk not in is_foreign]
            ids, offsets = ids[:, [chunk - first for chunk in rows]], [offsets[chunk] for chunk in rows]
        else:
            offsets = offsets[first:]
        self._bound = kv.bind_all(ids, [each[number] for each in offsets], mover.cache.slab.view)

    def layer(self, layer: int) -> None:
        """Load one layer of every chunk, once. Ready for the engine's attention when this returns."""
        if layer not in self._missing:
            return
        self._bound.scatter(layer)
        self._convert_all(layer)
        self._missing.discard(layer)

    def all(self) -> None:
        """Load the layers that are missing, usually all of them at once."""
        if len(self._missing) < len(self._mover.kv.layers):
            for layer in sorted(self._missing):
                self.layer(layer)
            return
        self._bound.scatter(None)
        self._convert_all(None)
        self._missing.clear()

    def _convert_all(self, layer: int | None) -> None:
        kv = cast("PagedKV", self._mover.kv)  # a CudaLoad has converted them when it began
        for chunk in self._to_convert:
            for payload, stored, held, part in self._parts_of(chunk):
                if layer is None or part.first_layer <= layer < part.end_layer:
                    kv.convert(layer, payload, stored, held, self._blocks_of(chunk), part=part)

    def _parts_of(self, chunk: int) -> Iterator[tuple[memoryview, Layout, Shard, Shard]]:
        """The pieces that this rank needs of a chunk in another form: payload, layout, shard, and part."""
        form, offsets = self._placed.other_forms[chunk], self._placed.offsets[chunk]
        assert form.layout is not None  # the chunk's header was read, so it is known
        for held, part in cover(self._mover.kv.shard, form.shards) or ():
            n = form.shards.index(held)
            yield self._mover.cache.slab.view(offsets[n], padded(form.sizes[n])), form.layout, held, part

    def start(self) -> None:
        """Load everything, for an engine that uses none of it before it is `done`."""
        self.all()

    def confirm(self) -> None:
        """Block this thread until the load is `done`, if `finish` has fingerprints to compare."""

    def finish(self) -> int:
        """Compare fingerprints according to `verify`. Returns the number of leading tokens that are correct.

        Fewer than `tokens`: a chunk did not arrive as it was saved. The engine must compute from there, also
        if it has used some layers already. All chunks that differ are deleted, so that the recomputed ones
        are stored instead.
        """
        if self._finished:
            return self.tokens
        self._finished = True
        if self._missing and self._ids.size:
            raise MisuseError(f"finish of a load that lacks layers {sorted(self._missing)}")
        cache = self._mover.cache
        for chunk in self._comparable:
            if not self._differs(chunk):
                continue
            key = self._placed.keys[chunk]
            log.error(
                "lmtier: chunk %s differs from what was saved and was deleted; recompute from token %d",
                key.hex()[:16],
                chunk * cache.chunk_tokens,
            )
            cache.discard(key, self._placed.form_of(chunk))
            self.tokens = min(self.tokens, chunk * cache.chunk_tokens)
        return self.tokens

    def _blocks_of(self, chunk: int) -> ChunkBlocks:
        """The blocks of one chunk, a row for each block table."""
        return self._ids[:, chunk - self._first]

    @property
    def _comparable(self) -> Iterator[int]:
        """The chunks that are compared: they are sampled, have a mark of our own form, and are whole."""
        mover, placed = self._mover, self._placed
        for number in mover.sampled(placed.keys[self._first :]):
            chunk = self._first + number
            if chunk not in placed.marks or chunk in placed.other_forms or self._blocks_of(chunk).min() < 0:
                continue
            mark = placed.marks[chunk][mover.number]
            if mark != NO_MARK and mark[:8] == mover.kv.raw_tag:
                yield chunk

    def _differs(self, chunk: int) -> bool:
        is_different = self._placed.marks[chunk][self._mover.number][8:] != self._fingerprint(chunk)
        self._mover.cache.compared(1, int(is_different))
        return is_different

    def _fingerprint(self, chunk: int) -> bytes:
        return self._mover.kv.raw_fingerprint(self._blocks_of(chunk))

    def __enter__(self) -> Load:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._end_leases()

    def _end_leases(self) -> None:
        if self.match is not None:
            self._mover.cache.release(self.match)


class Save:
    """The save of new chunks from engine blocks. Call `layer` for each layer, or `all`; then `commit`.

    As a context manager it commits by itself, and aborts if the block raises. Chunks are visible only after
    the commit.
    """

    done = True
    """Whether all of its copies have ended, after commit or abort."""

    def __init__(self, mover: Mover, grant: Grant, ids: ChunkBlocks) -> None:
        cache = mover.cache
        self._mover = mover
        self.grant = grant
        if ids.shape[1] != len(grant.chunks):
            raise LayoutError(f"{grant} needs the blocks of as many chunks, got those of {ids.shape[1]}")
        self._ids = ids
        offsets = [each[mover.number] for each in grant.placement.offsets]
        self._bound = mover.kv.bind_all(ids, offsets, cache.slab.view)
        self.tokens = len(grant.chunks) * cache.chunk_tokens
        """The number of tokens that are being stored."""
        self.skip_leading_tokens = grant.leading_stored * cache.chunk_tokens
        self._missing = set(mover.kv.layers)
        self._fingerprints: dict[int, dict[int, bytes]] = {
            row: {} for row in mover.sampled(grant.placement.keys)
        }
        """Maps chunk -> layer -> fingerprint. Chunks are counted within the grant."""

    def layer(self, layer: int) -> None:
        """Save one layer of every new chunk."""
        kv = self._mover.kv
        self._bound.gather(layer)
        for row, fingerprints in self._fingerprints.items():
            fingerprints[layer] = kv.raw_fingerprint(self._ids[:, row], layer)
        self._missing.discard(layer)

    def all(self) -> None:
        """Save the layers that are missing, usually all of them at once."""
        kv = self._mover.kv
        if len(self._missing) < len(kv.layers):
            for layer in sorted(self._missing):
                self.layer(layer)
            return
        self._bound.gather(None)
        for row, fingerprints in self._fingerprints.items():
            for layer in self._missing:
                fingerprints[layer] = kv.raw_fingerprint(self._ids[:, row], layer)
        self._missing.clear()

    def commit(self) -> None:
        """Make the chunks visible. Every layer must have been saved."""
        kv = self._mover.kv
        if self._missing and self.grant.chunks:
            raise MisuseError(f"commit of a save that lacks layers {sorted(self._missing)}")
        marks = {
            self.grant.chunks[row]: kv.raw_tag
            + kv.fold([fingerprints[layer] for layer in sorted(fingerprints)])
            for row, fingerprints in self._fingerprints.items()
        }
        self._mover.cache.commit(self.grant, kv.shard, marks)

    def abort(self) -> None:
        self._mover.cache.abort(self.grant, self._mover.kv.shard)

    def __enter__(self) -> Save:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise


def granted(match: Match) -> Grant:
    """What a match that is ready grants. Raises MisuseError if it is not."""
    if match.released or not match.is_ready:
        state = "was released" if match.released else "is not ready: wait for it"
        raise MisuseError(f"load of a match that {state}")
    return match.grant


def blocks_granted(grant: Grant, ids: ChunkBlocks, first: int) -> ChunkBlocks:
    """The blocks of a grant's chunks, out of those of a prompt from chunk `first` on."""
    chunks, count = grant.chunks, ids.shape[1]
    if chunks and not first <= chunks[0] <= chunks[-1] < first + count:
        raise MisuseError(
            f"{grant} has other chunks than {first} to {first + count - 1}, whose blocks were given"
        )
    return ids if len(chunks) == count else ids[:, [chunk - first for chunk in chunks]]


def fill_identity(identity: Identity, layout: Layout, approximation: str) -> Identity:
    """Fill the empty fields of `identity` from the layout, so that different KV never shares a key.

    An opaque packing is included, because only engines with the same packing can read it. Known packings are
    not, because they can be converted. The `approximation` of a store with lossy tiers is included too. So
    its KV, and KV computed on top of it, is never found by users who did not choose lossy tiers.
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
