"""Engine memory ◄► the CPU tier, beside memcpy of the same bytes."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt

from lmtier.config import Config
from lmtier.copy.copy_threads import CopyThreads
from lmtier.copy.mover import Mover
from lmtier.copy.paging import PagedKV
from lmtier.core.cache import Cache
from lmtier.core.slab import Slab
from lmtier.format.keys import Identity
from lmtier.format.layout import Layout
from lmtier_bench import Samples, Scale

Bytes = npt.NDArray[np.uint8]

CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
PROMPT_CHUNKS = 8  # of 2,048 tokens, which are 256 MiB
SMALL_PROMPT_CHUNKS = 16  # of 4,096 tokens
FREE_CORE = 1.4  # the gain of two bare threads, from which on a second core counts as free


def large_layout(layers: int) -> Layout:
    """An 8B model: a chunk of 256 tokens is 1 MiB a layer, 32 MiB with its 32 layers."""
    return _layout(layers, heads=8, head_dim=128)


def small_layout() -> Layout:
    """A chunk of 256 tokens is 1 MiB, in blocks of 8 KiB a layer: the cost of calls and of rows shows."""
    return _layout(8, heads=2, head_dim=64)


def _layout(layers: int, heads: int, head_dim: int) -> Layout:
    return Layout.uniform(
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        dtype="bf16",
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        packing="token",
    )


class Engine:
    """Paged KV in one allocation, layer by layer (LBHNC).

    Blocks come as vLLM's free list gives them: runs that a finished request gave back, last block first.
    """

    def __init__(self, layout: Layout, memory: Bytes) -> None:
        self.layout = layout
        self.nbytes = layout.nbytes(layout.whole)
        self.chunks = len(memory) // self.nbytes
        self.memory = memory[: self.chunks * self.nbytes]
        layers = len(layout.layers)
        blocks = self.chunks * layout.blocks
        heads, k, v = layout.layers[0]
        all_layers = self.memory.view(np.uint16).reshape(layers, blocks, heads, BLOCK_TOKENS, k + v)
        self.tensors = list(all_layers)
        self._at = 0

    def block_ids(self, chunks: int) -> list[int]:
        """The blocks of the next request. All memory is used before any is used again."""
        if self._at + chunks > self.chunks:
            self._at = 0
        first, end = self._at * self.layout.blocks, (self._at + chunks) * self.layout.blocks
        self._at += chunks
        return list(range(end - 1, first - 1, -1))


def faulted_memory(nbytes: int) -> Bytes:
    """Memory whose pages are there, with no zeros in it."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory.reshape(-1, 4096)[:] = np.random.default_rng(0).integers(1, 256, 4096, np.uint8)
    return memory


def seconds(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


class Memcpy:
    """The limit: the same number of bytes in pieces of one object, one thread, rotating like ours."""

    def __init__(self, memory: Bytes, piece: int) -> None:
        bare = Slab(len(memory), hugepages=Config().hugepages)  # the same kind of pages as ours
        bare.prefault()
        self._memory = memory
        self._bare = np.frombuffer(bare.view(0, bare.capacity), np.uint8)
        self._piece = piece
        self._at = 0

    def out(self, pieces: int) -> float:
        memory, bare = self._spans(pieces)
        return seconds(partial(_copy, memory, bare))

    def back(self, pieces: int) -> float:
        memory, bare = self._spans(pieces)
        return seconds(partial(_copy, bare, memory))

    def gain(self, crew: CopyThreads) -> float:
        """How many times faster two threads are just now: a second core that is busy, or memory that one
        thread can saturate, has nothing to give. The best of two readings each, or noise would choose."""
        ones, twos = [], []
        for _ in range(2):
            memory, bare = self._spans(PROMPT_CHUNKS)
            ones.append(seconds(partial(_copy, memory, bare)))
            halves = [partial(_copy, memory[i::2], bare[i::2]) for i in range(2)]
            twos.append(seconds(partial(crew.run, halves)))
        return min(ones) / min(twos)

    def _spans(self, pieces: int) -> tuple[list[Bytes], list[Bytes]]:
        """The next pieces of both memories."""
        size, total = self._piece, len(self._memory) // self._piece
        starts = [(self._at + i) % total * size for i in range(pieces)]
        self._at = (self._at + pieces) % total
        return [self._memory[at : at + size] for at in starts], [self._bare[at : at + size] for at in starts]


def _copy(src: list[Bytes], dst: list[Bytes]) -> None:
    for a, b in zip(src, dst, strict=True):
        np.copyto(b, a)


def paired(
    path: str, nbytes: int, number: int, ours: Callable[[], float], limit: Callable[[], float]
) -> tuple[str, float, float]:
    """One round in GB/s. Who goes first alternates: the second finds the caches as the first left them."""
    if number % 2:
        limit_seconds, our_seconds = limit(), ours()
    else:
        our_seconds, limit_seconds = ours(), limit()
    return path, nbytes / our_seconds / 1e9, nbytes / limit_seconds / 1e9


def alone(scale: Scale) -> Samples:
    """Gather and scatter, without keys, index or leases."""
    engine = Engine(large_layout(scale.large_layers), faulted_memory(scale.memory))
    kv = PagedKV(engine.layout, engine.layout.whole, engine.tensors)
    memcpy = Memcpy(engine.memory, kv.nbytes)
    slab = Slab(engine.chunks * kv.nbytes, hugepages=Config().hugepages)
    slab.prefault()
    chunks = min(PROMPT_CHUNKS, engine.chunks)

    def copy(one: Callable[[list[int], memoryview], None], number: int) -> float:
        starts = [(number * chunks + i) % engine.chunks * kv.nbytes for i in range(chunks)]
        views = [slab.view(start, kv.nbytes) for start in starts]
        ids = engine.block_ids(chunks)
        parts = [ids[i * engine.layout.blocks : (i + 1) * engine.layout.blocks] for i in range(chunks)]

        def work() -> None:
            for part, view in zip(parts, views, strict=True):
                one(part, view)

        return seconds(work)

    def gather(ids: list[int], extent: memoryview) -> None:
        kv.gather(None, ids, extent)

    def scatter(ids: list[int], extent: memoryview) -> None:
        kv.scatter(None, extent, ids)

    for path, one, limit in (
        ("gather, 32 MiB objects", gather, memcpy.out),
        ("scatter, 32 MiB objects", scatter, memcpy.back),
    ):
        for number in range(-2, scale.rounds):
            sample = paired(
                path,
                chunks * kv.nbytes,
                number,
                lambda one=one, number=number: copy(one, number),  # type: ignore[misc]  # mypy: lambdas
                lambda limit=limit: limit(chunks),  # type: ignore[misc]  # mypy: lambdas
            )
            if number >= 0:
                yield sample


def large(scale: Scale) -> Samples:
    with OneTierCache(scale, large_layout(scale.large_layers)) as tier:
        yield from tier.samples("32 MiB objects")
        crew = CopyThreads(helpers=1)
        try:
            yield from tier.samples("32 MiB objects, 2 cores", crew)
        finally:
            crew.close()


def small(scale: Scale) -> Samples:
    with OneTierCache(scale, small_layout(), SMALL_PROMPT_CHUNKS) as tier:
        yield from tier.samples("1 MiB objects")


class OneTierCache:
    """A cache of one CPU tier beside an engine of the same size: each save evicts an older prompt."""

    def __init__(self, scale: Scale, layout: Layout, prompt_chunks: int = PROMPT_CHUNKS) -> None:
        self._rounds = scale.rounds
        self._engine = Engine(layout, faulted_memory(scale.memory))
        self._chunks = min(prompt_chunks, self._engine.chunks // 2)
        self._memcpy = Memcpy(self._engine.memory, self._engine.nbytes)
        url = f"cpu://?capacity={self._engine.chunks * self._engine.nbytes}"
        self._cache = Cache(Config(chunk_tokens=CHUNK_TOKENS, tiers=[url], prefault=False))
        self._cache.slab.prefault()
        self._prompts = 0

    def __enter__(self) -> OneTierCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.close()

    def samples(self, what: str, crew: CopyThreads | None = None) -> Samples:
        """Fill the tier; rounds of saves, of which each must evict; rounds of loads of what is there."""
        engine, chunks, memcpy = self._engine, self._chunks, self._memcpy
        layout = engine.layout
        self._cache.clear()
        kv = PagedKV(layout, layout.whole, engine.tensors, crew)
        spare = range(2 * layout.blocks)  # nobody uses any block yet
        mover = Mover(self._cache, kv, Identity(model="bench", weights="bench"), spare_blocks=spare)
        nbytes = chunks * engine.nbytes
        # A prompt of the small model takes less than a millisecond: several make one reading.
        times = max(1, min(engine.chunks // chunks // 2, (64 << 20) // nbytes))
        prompts_that_fit = engine.chunks // chunks
        recent: list[Sequence[int]] = []

        def save() -> float:
            tokens, ids = self._tokens(), engine.block_ids(chunks)
            recent.append(tokens)
            return seconds(lambda: self._save(mover, tokens, ids))

        for _ in range(prompts_that_fit + 2):
            save()
        for number in self._numbers(crew):
            yield paired(
                f"save to cpu, {what}",
                times * nbytes,
                number,
                lambda: sum(save() for _ in range(times)),
                lambda: memcpy.out(times * chunks),
            )
        stored_prompts = [tokens for tokens in recent[-prompts_that_fit:] if self._is_stored(mover, tokens)]
        turns = _turns(stored_prompts)

        def load() -> float:
            tokens, ids = next(turns), engine.block_ids(chunks)
            return seconds(lambda: self._load(mover, tokens, ids))

        for _ in range(2):
            load()
        for number in self._numbers(crew):
            yield paired(
                f"load from cpu, {what}",
                times * nbytes,
                number,
                lambda: sum(load() for _ in range(times)),
                lambda: memcpy.back(times * chunks),
            )
        self._cache.check()

    def _numbers(self, crew: CopyThreads | None) -> Iterator[int]:
        """Of the rounds; with a crew, of those that begin while bare threads gain from a second core."""
        if crew is not None and median(self._memcpy.gain(crew) for _ in range(9)) < FREE_CORE:
            return  # else the few rounds in which noise slowed the one thread would be all there is
        number = 0
        for _ in range(2 * self._rounds):
            if number < self._rounds and (crew is None or self._memcpy.gain(crew) >= FREE_CORE):
                yield number
                number += 1

    def _tokens(self) -> Sequence[int]:
        """A prompt nobody has seen; one token more than its chunks, because the last is always computed."""
        self._prompts += 1
        tokens = np.full(self._chunks * CHUNK_TOKENS + 1, 7, np.int32)
        tokens[0] = self._prompts
        return tokens  # type: ignore[return-value]  # an array is a sequence of ints to us

    def _save(self, mover: Mover, tokens: Sequence[int], ids: list[int]) -> None:
        chain = mover.chain(tokens)
        self._cache.release(mover.match(chain))
        with mover.save(chain, ids) as save:
            save.all()
        self._cache.step()
        assert save.tokens == self._chunks * CHUNK_TOKENS, "the tier had no room"

    def _load(self, mover: Mover, tokens: Sequence[int], ids: list[int]) -> None:
        with mover.load(mover.match(mover.chain(tokens)), ids) as load:
            load.all()
        self._cache.step()
        assert load.tokens == self._chunks * CHUNK_TOKENS, "the prompt was not there"

    def _is_stored(self, mover: Mover, tokens: Sequence[int]) -> bool:
        match = mover.match(mover.chain(tokens))
        self._cache.release(match)
        return match.chunks == self._chunks


def _turns(prompts: list[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Round and round, so that what is loaded was not touched for a whole turn of the memory."""
    while True:
        yield from prompts
