"""Slab ◄► disk through the cache, beside as many bare threads that move the same bytes.

Both write over files that exist: the tier is kept full, so that each store takes the file of an evicted
chunk, and the bare threads have files of their own. Both use O_DIRECT where the file system has it. The
limit takes no checksum, makes no name visible and keeps no books.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lmtier.bench import Samples, Scale
from lmtier.bench.copies import CHUNK_TOKENS, large_layout, paired, seconds
from lmtier.cache import Cache, Match
from lmtier.config import Config
from lmtier.keys import Identity, KeyChain, seed
from lmtier.layout import PAGE, Form, form_of, stored_size
from lmtier.slab import Slab
from lmtier.workers import Crew

READERS, WRITERS = 4, 2
SETS = 5
PATIENCE = 120.0


def store_and_load(scale: Scale) -> Samples:
    layout = large_layout(scale.large_layers)
    form = form_of(layout, [layout.whole])
    chunks, room = scale.disk_chunks, form.room
    nbytes = chunks * room
    # The slab holds two sets, the disk SETS. A set is loaded two rounds after it was stored: it has left
    # the slab by then, and of the disk's sets it is the least recently used.
    tiers = (
        f"cpu://?capacity={2 * nbytes}&policy=lru",
        f"disk://{scale.directory}/tier?capacity={SETS * chunks * stored_size(room)}"
        f"&policy=lru&readers={READERS}&writers={WRITERS}",
    )
    config = Config(chunk_tokens=CHUNK_TOKENS, tiers=tiers, prefault=False, load_deadline=PATIENCE)
    bare = Bare(scale.directory / "bare", chunks, room)
    try:
        with Cache(config) as cache:
            cache.slab.prefault()
            tier = Tier(cache, form, chunks)
            for _ in range(SETS + 2):  # the slab and the disk are full, and every file is there
                tier.store()
                bare.write()
            for number in range(scale.disk_rounds):
                yield paired("store to disk, 32 MiB objects", nbytes, number, tier.store, bare.write)
                yield paired("load from disk, 32 MiB objects", nbytes, number, tier.load, bare.read)
    finally:
        bare.close()


class Tier:
    """Sets of chunks through a cache; what the slab holds is whatever it held."""

    def __init__(self, cache: Cache, form: Form, chunks: int) -> None:
        self._cache = cache
        self._form = form
        self._chunks = chunks
        self._stored: deque[list[bytes]] = deque()
        self._sets = 0

    def store(self) -> float:
        """From commit until the disk has it."""
        cache = self._cache
        self._sets += 1
        start = seed(Identity(model="bench", weights="bench"), CHUNK_TOKENS, salt=str(self._sets))
        keys = KeyChain(start, CHUNK_TOKENS, [0] * (CHUNK_TOKENS * self._chunks)).keys
        reservation = cache.reserve(keys, self._form)
        assert len(reservation.entries) == self._chunks, "the slab had no room"

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
        found: list[Match] = []

        def work() -> None:
            found.append(cache.wait(cache.match(keys, self._form)))

        took = seconds(work)
        assert found[0].sources == ["disk"] * self._chunks, f"{found[0]!r} came from {found[0].sources}, {found[0].cut}"
        cache.release(found[0])
        return took


class Bare:
    """The limit: threads that take the next file from a list and move it in one call.

    As many files as the tier has, in the same turns, so that both meet the same disk.
    """

    def __init__(self, directory: Path, chunks: int, room: int) -> None:
        directory.mkdir(parents=True)
        self._direct = _direct(directory)
        self._chunks = chunks
        self._size = PAGE + room
        self._paths = [directory / str(number) for number in range(SETS * chunks)]
        self._slab = Slab(2 * chunks * self._size)
        self._slab.prefault()
        self._readers, self._writers = Crew(READERS - 1), Crew(WRITERS - 1)
        self._sets = 0
        for path in self._paths:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._size)

    def write(self) -> float:
        self._sets += 1
        return self._all(self._sets, self._writers, WRITERS, partial(self._one, os.pwritev, os.O_WRONLY))

    def read(self) -> float:
        return self._all(self._sets - 2, self._readers, READERS, partial(self._one, os.preadv, os.O_RDONLY))

    def close(self) -> None:
        self._readers.close()
        self._writers.close()

    def _all(self, turn: int, crew: Crew, threads: int, one: Callable[[int], None]) -> float:
        left = deque(range(turn * self._chunks, (turn + 1) * self._chunks))

        def work() -> None:
            while left:
                try:
                    number = left.popleft()
                except IndexError:  # another thread took the last
                    return
                one(number)

        return seconds(lambda: crew.run([work] * threads))

    def _one(self, move: Callable[[int, list[memoryview], int], int], flags: int, number: int) -> None:
        start = number % (2 * self._chunks) * self._size
        page, payload = self._slab.view(start, PAGE), self._slab.view(start + PAGE, self._size - PAGE)
        fd = os.open(self._paths[number % len(self._paths)], flags | self._direct)
        try:
            moved = move(fd, [page, payload], 0)
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
