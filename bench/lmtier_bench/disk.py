"""Slab ◄► disk through the cache, beside as many bare threads that move the same bytes.

Both write over files that exist: the tier is kept full, so that each store takes the file of an evicted
chunk, and the bare threads have files of their own. Both use O_DIRECT where the file system has it. The
limit takes no checksum, makes no name visible and keeps no books.

A new engine's prompt comes from there through a server.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter

from lmtier.client.client import Client
from lmtier.config import Config
from lmtier.copy.copy_threads import CopyThreads
from lmtier.core.cache import Cache
from lmtier.core.grant import Match
from lmtier.format.keys import Identity, KeyChain, seed
from lmtier.format.layout import PAGE, ChunkForm, form_of, stored_size
from lmtier_bench import Samples, Scale
from lmtier_bench.copies import CHUNK_TOKENS, faulted_memory, large_layout, paired, seconds, small_layout
from lmtier_bench.server import lmtier_process

READERS, WRITERS = 8, 8
PROMPT_CHUNKS = 24  # of 1 MiB
SETS = 5
PATIENCE = 120.0


def store_and_load(scale: Scale) -> Samples:
    layout = large_layout(scale.large_layers)
    form = form_of(layout, [layout.whole])
    chunks, room = scale.disk_chunks, form.slab_bytes
    nbytes = chunks * room
    # The slab holds two sets, the disk SETS. A set is loaded two rounds after it was stored: it has left
    # the slab by then, and of the disk's sets it is the least recently used.
    tiers = (
        f"cpu://?capacity={2 * nbytes}&policy=lru",
        f"disk://{scale.directory}/tier?capacity={SETS * chunks * stored_size(room)}"
        f"&policy=lru&readers={READERS}&writers={WRITERS}",
    )
    config = Config(chunk_tokens=CHUNK_TOKENS, tiers=tiers, prefault=False, load_deadline=PATIENCE)
    with Cache(config) as cache:
        cache.slab.prefault()
        tier = ChunkSets(cache, form, chunks)
        tier.store()
        bare = BareFiles(scale.directory / "bare", lambda: tier.extents, room)
        try:
            for _ in range(SETS + 2):  # the slab and the disk are full, and every file is there
                tier.store()
                bare.write()
            for _ in range(scale.disk_rounds):  # ours first: the limit then takes the same memory
                yield paired("store to disk, 32 MiB objects", nbytes, 0, tier.store, bare.write)
                yield paired("load from disk, 32 MiB objects", nbytes, 0, tier.load, bare.read)
        finally:
            bare.close()


def new_engine(scale: Scale) -> Samples:
    """An engine connects to a server that has its prompt on disk alone: what it waits for, beyond a hit in
    memory and the bare time of the disk."""
    layout = small_layout()
    form = form_of(layout, [layout.whole])
    chunks, room = min(PROMPT_CHUNKS, scale.disk_chunks), form.slab_bytes
    unix = str(scale.directory / "new-engine.sock")
    # The slab holds two prompts. The third to be stored is one too many.
    tiers = (
        f"cpu://?capacity={2 * chunks * room}&policy=lru",
        f"disk://{scale.directory}/new-engine?capacity={8 * chunks * stored_size(room)}",
    )
    settings = {"LMTIER_TIERS": " ".join(tiers), "LMTIER_CHUNK_TOKENS": str(CHUNK_TOKENS)}
    memory = faulted_memory(chunks * room).data
    parts = [memory[at : at + room] for at in range(0, len(memory), room)]
    bare = BareFiles(scale.directory / "bare-prompt", lambda: parts, room)
    with ExitStack() as stack:
        stack.callback(bare.close)
        stack.enter_context(lmtier_process(0, unix, **settings))
        saver = stack.enter_context(Client(unix))
        prompts = [_keys(f"prompt {number}", chunks) for number in range(4)]
        for prompt in prompts:
            saver.commit(saver.reserve(prompt, form))
            assert saver.flush(PATIENCE), "the disk did not take it"
        bare.write()
        for number in range(2 * scale.disk_rounds):
            prompt = prompts[number % len(prompts)]  # of four, the slab has the last two
            with Client(unix) as engine:
                cold, label = _found(engine, prompt, form)
                assert label == "disk", f"it came from {label}"
                hit, label = _found(engine, prompt, form)
                assert label == "cpu", f"it came from {label}"
            limit = bare.read()
            beyond = max(1e-6, cold - hit - limit)  # below 0 where the bare read was the slower one
            path = "new engine, 24 MiB from disk: beyond a hit and a bare read"
            yield path, 1e3 * beyond, 1e3 * (hit + limit)


def _found(engine: Client, keys: list[bytes], form: ChunkForm) -> tuple[float, str]:
    """Seconds until the prompt is in memory, and where it was."""
    began = perf_counter()
    match = engine.wait(engine.match(keys, form, deadline=PATIENCE))
    took = perf_counter() - began
    assert match.chunks == len(keys), f"{match!r}"
    label = match.sources[0]
    engine.release(match)
    return took, label


def _keys(salt: str, chunks: int) -> list[bytes]:
    start = seed(Identity(model="bench", weights="bench"), CHUNK_TOKENS, salt=salt)
    return KeyChain(start, CHUNK_TOKENS, [0] * (CHUNK_TOKENS * chunks)).keys


class ChunkSets:
    """Sets of chunks through a cache; what the slab holds is whatever it held."""

    def __init__(self, cache: Cache, form: ChunkForm, chunks: int) -> None:
        self._cache = cache
        self._form = form
        self._chunks = chunks
        self._stored: deque[list[bytes]] = deque()
        self._sets = 0
        self.extents: list[memoryview] = []
        """The memory of the set that is about to be stored, or was loaded last."""

    def store(self) -> float:
        """From commit until the disk has it."""
        cache = self._cache
        self._sets += 1
        keys = _keys(str(self._sets), self._chunks)
        reservation = cache.reserve(keys, self._form)
        assert len(reservation.chunks) == self._chunks, "the slab had no room"

        self.extents = self._extents(reservation.placement.offsets)

        def work() -> None:
            cache.commit(reservation)
            assert cache.flush(PATIENCE), "the disk did not take it"

        self._stored.append(keys)
        return seconds(work)

    def load(self) -> float:
        """From the lookup until the chunks are leased and verified in the slab."""
        cache = self._cache
        while len(self._stored) > 3:
            self._stored.popleft()
        keys = self._stored[0]
        matches: list[Match] = []

        def work() -> None:
            matches.append(cache.wait(cache.match(keys, self._form)))

        took = seconds(work)
        assert matches[0].sources == ["disk"] * self._chunks, (
            f"{matches[0]!r} came from {matches[0].sources}, {matches[0].cut_reason}"
        )
        self.extents = self._extents(matches[0].grant.placement.offsets)
        cache.release(matches[0])
        return took

    def _extents(self, offsets: Iterable[tuple[int, ...]]) -> list[memoryview]:
        return [self._cache.slab.view(first, self._form.slab_bytes) for first, *_ in offsets]


class BareFiles:
    """The limit: threads that take the next file from a list and move it in one call.

    Its memory is the tier's own, because how contiguous that happens to be in the machine decides the
    speed of direct I/O by a factor of 1.5. What it reads there is not looked at again.
    """

    def __init__(self, directory: Path, extents: Callable[[], list[memoryview]], room: int) -> None:
        """`extents`: the memory of the next set, a view for each file."""
        directory.mkdir(parents=True)
        self._direct = _direct(directory)
        self._extents = extents
        self._size = PAGE + room
        self._paths = [directory / str(number) for number in range(len(extents()))]
        self._pages = [memoryview(mmap.mmap(-1, PAGE)) for _ in self._paths]
        self._readers, self._writers = CopyThreads(READERS - 1), CopyThreads(WRITERS - 1)
        for path in self._paths:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._size)

    def write(self) -> float:
        return self._all(self._writers, WRITERS, partial(self._one, os.pwritev, os.O_WRONLY))

    def read(self) -> float:
        return self._all(self._readers, READERS, partial(self._one, os.preadv, os.O_RDONLY))

    def close(self) -> None:
        self._readers.close()
        self._writers.close()

    def _all(self, crew: CopyThreads, threads: int, one: Callable[[int], None]) -> float:
        pending = deque(range(len(self._paths)))

        def work() -> None:
            while pending:
                try:
                    number = pending.popleft()
                except IndexError:  # another thread took the last
                    return
                one(number)

        return seconds(lambda: crew.run([work] * threads))

    def _one(self, move: Callable[[int, list[memoryview], int], int], flags: int, number: int) -> None:
        fd = os.open(self._paths[number], flags | self._direct)
        try:
            moved = move(fd, [self._pages[number], self._extents()[number]], 0)
            assert moved == self._size, f"moved {moved} of {self._size} bytes"
        finally:
            os.close(fd)


def _direct(directory: Path) -> int:
    try:
        os.close(os.open(directory / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    return os.O_DIRECT
