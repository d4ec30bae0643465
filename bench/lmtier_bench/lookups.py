"""What a request pays before a byte moves: match, and an index of a million chunks."""

from __future__ import annotations

import hashlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lmtier.config import Config
from lmtier.copy.mover import Mover
from lmtier.copy.paging import PagedKV
from lmtier.core.cache import Cache
from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState
from lmtier.format.keys import Identity
from lmtier.format.layout import Layout, form_of
from lmtier.rules.policy import make_policy
from lmtier_bench import Samples, Scale
from lmtier_bench.copies import CHUNK_TOKENS, seconds

REPEATS = 5  # the best of them: these are microseconds on a shared machine
MISSING_TOKENS = 2048
SMALL_INDEX = 10_000
USES = 20_000

TINY = Layout.uniform(
    layers=1, heads=1, head_dim=2, dtype="bf16", block_tokens=256, chunk_tokens=256, packing="token"
)

T = TypeVar("T")


def match(scale: Scale) -> Samples:
    """Chunks of one page each: what they hold does not matter here, how many they are does."""
    chunks = scale.prompt_chunks
    tokens = [7] * (chunks * CHUNK_TOKENS + 1)  # the last one is always computed
    numbers = np.array(tokens, np.int32)
    tiers = (
        f"cpu://?capacity={4 * chunks * 4096}",
        f"disk://{scale.directory}/lookups?capacity={4 * chunks * 8192}",
    )
    memory = [np.zeros((4, 1, 256, 4), np.uint16)]
    kv = PagedKV(TINY, TINY.whole, memory)
    with Cache(Config(chunk_tokens=CHUNK_TOKENS, tiers=tiers)) as cache:
        mover = Mover(cache, kv, Identity(model="bench", weights="bench"), spare_blocks=range(4))
        chain = mover.chain(numbers)
        with mover.save(chain, [0] * chunks) as save:
            save.all()
        cache.flush()
        key_table = dict.fromkeys(chain.keys)

        def find(given: Any) -> None:
            found = mover.match(mover.chain(given))
            assert found.chunks == chunks, f"{found!r}"
            cache.release(found)

        def find_kept() -> None:
            cache.release(mover.match(chain))

        def get_kept() -> None:
            for key in chain.keys:
                key_table[key]

        for _ in range(scale.rounds):
            ours, limit = _best(lambda: find(tokens)), _best(partial(_hash, tokens))
            yield "match 128k tokens, Python list", ours, limit
            ours, limit = _best(lambda: find(numbers)), _best(partial(_hash, numbers))
            yield "match 128k tokens, int32 array", ours, limit
            yield "match 128k tokens, kept keys", _best(find_kept), _best(get_kept)
            new = [random.randrange(1 << 17) for _ in range(MISSING_TOKENS)]

            def miss(new: list[int] = new) -> None:
                cache.release(mover.match(mover.chain(new)))
                cache.step()

            yield "added to a request that misses", _best(miss), _best(partial(_hash, new))


def index(scale: Scale) -> Samples:
    """Memory as asked of the allocator; the time of an operation when the index is a hundred times larger.

    No memory is as fast for a million chunks as for ten thousand. The limit says what a bare dict of the
    same keys takes, and by how much its lookups slow down.
    """
    count, small_count = scale.index_chunks, min(SMALL_INDEX, scale.index_chunks)
    for policy in ("auto", "lru"):
        name = f"index of 1M chunks, {policy}: "
        large, taken = _traced(partial(_filled, policy, count))
        bare, bare_taken = _traced(partial(_bare, count))
        yield name + "memory a chunk", taken / count, bare_taken / count
        small, small_bare = _filled(policy, small_count), _bare(small_count)
        for _ in range(3):
            ours = _use(large, _some(bare)) / _use(small, _some(small_bare))
            yield name + "growth of an operation over 10k", ours, _get(bare) / _get(small_bare)


def _traced(make: Callable[[], T]) -> tuple[T, int]:
    """What `make` makes, and the bytes it holds on to."""
    tracemalloc.start()
    result = make()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, taken


def _filled(policy: str, count: int) -> Index:
    """Full, of prompts of 8 chunks."""
    form = form_of(TINY, [TINY.whole])
    index = Index(count, make_policy(policy))
    run: list[Entry] = []
    for number in range(count):
        if len(run) == 8:
            index.refresh(run)
            run = []
        run.append(index.add(_key(number), form, 1, EntryState.READY, run[-1] if run else None))
    index.refresh(run)
    return index


def _bare(count: int) -> dict[bytes, None]:
    return {_key(number): None for number in range(count)}


def _key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def _some(bare: dict[bytes, None]) -> list[bytes]:
    return random.choices(list(bare), k=USES)


def _get(bare: dict[bytes, None]) -> float:
    keys = _some(bare)
    return seconds(lambda: [bare[key] for key in keys])


def _use(index: Index, keys: list[bytes]) -> float:
    """Everything that happens to a chunk in its life, a prompt's prefix at a time."""

    def work() -> None:
        for key in keys:
            above = index.get(key)
            run = []
            while above is not None:
                run.append(above)
                above = above.parent
            run.reverse()
            index.touch(run)
            for entry in run:
                index.lease(entry)
            for entry in run:
                index.release(entry)
            victims = index.evict(1)
            assert victims, "nobody could leave"
            index.add(victims[0].key, victims[0].form, 1, EntryState.READY, None)

    return seconds(work)


def _best(work: Callable[[], object]) -> float:
    """Milliseconds of the fastest of a few runs."""
    return min(seconds(work) for _ in range(REPEATS)) * 1e3


def _hash(tokens: list[int] | npt.NDArray[np.int32]) -> None:
    """The limit of naming chunks: one chained hash over their bytes, and nothing about them."""
    row = struct.pack(f"{len(tokens)}i", *tokens) if isinstance(tokens, list) else tokens.data
    data = memoryview(row).cast("B")
    parent = bytes(32)
    for start in range(0, len(data), CHUNK_TOKENS * 4):
        digest = hashlib.sha256(parent)
        digest.update(data[start : start + CHUNK_TOKENS * 4])
        parent = digest.digest()
