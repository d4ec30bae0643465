"""A tier of your own: objects are rows of a SQLite file. Six functions, and the suite that proves them.

    python examples/my_tier.py FILE        # twice: the second run finds what the first one stored

`tests/examples/test_my_tier.py` runs lmtier's suite for tiers on it. In a package of your own, an entry point
in the group `lmtier.tiers`, `sqlite = "my_package:SqliteTier"`, makes a tier of `sqlite:///FILE?capacity=1GiB`.
"""

import sqlite3
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from lmtier import BlockingTier, Cache, Config, Identity, Item, Layout, Mover, Name, PagedKV, Stat

HEADER = 4096  # the first page of every object


class SqliteTier(BlockingTier):
    def __init__(self, location: str) -> None:
        self._location = location
        self._sql("CREATE TABLE IF NOT EXISTS objects (name TEXT PRIMARY KEY, used INT, bytes BLOB)")
        super().__init__("sqlite", readers=2, writers=1)

    def _sql(self, statement: str, rows: Sequence[Sequence[object]] = ((),)) -> list[Any]:
        """Run a statement once for each row of values: for all of them, or for none."""
        with closing(sqlite3.connect(self._location, timeout=10)) as file, file:
            file.execute("PRAGMA synchronous = OFF")  # a power loss may lose objects: they are misses
            return [found for row in rows for found in file.execute(statement, row)]

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        rows = self._sql("SELECT bytes FROM objects WHERE name = ?", [[str(item.name)]])
        if not rows:
            raise FileNotFoundError(item.name)
        self.touch([item])
        stored = rest = memoryview(rows[0][0])
        for buffer in buffers:
            piece, rest = rest[: len(buffer)], rest[len(buffer) :]
            buffer[: len(piece)] = piece
        return len(stored)

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        if item.replaces is not None:
            self.delete([item.replaces])
        row = [str(item.name), item.used or time.time_ns(), b"".join(buffers)]
        self._sql("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", [row])

    def delete(self, names: Sequence[Name]) -> None:
        self._sql("DELETE FROM objects WHERE name = ?", [[str(name)] for name in names])

    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        rows = [[str(name)] for name in names]
        return self._stats(self._sql("SELECT name, used, length(bytes) FROM objects WHERE name = ?", rows))

    def touch(self, items: Sequence[Item]) -> None:  # for the order in which chunks leave after a restart
        rows = [[each.used or time.time_ns(), str(each.name)] for each in items]
        self._sql("UPDATE objects SET used = ? WHERE name = ?", rows)

    def scan(self) -> Iterable[tuple[Name, Stat]]:  # for a warm start
        return self._stats(self._sql("SELECT name, used, length(bytes) FROM objects")).items()

    def _stats(self, rows: Iterable[tuple[str, int, int]]) -> dict[Name, Stat]:
        named = ((Name.parse(name), used, nbytes) for name, used, nbytes in rows)
        return {name: Stat(nbytes - HEADER, used) for name, used, nbytes in named if name}


def main(path: str) -> None:
    url = f"sqlite://{path}?capacity=1GiB"
    layout = Layout.uniform(
        layers=2, heads=2, head_dim=64, dtype="fp32", block_tokens=16, chunk_tokens=64, packing="token"
    )
    kv = [np.zeros((64, 2, 16, 128), np.float32) for _ in range(2)]
    config = Config(chunk_tokens=64, tiers=["cpu://?capacity=64MiB", url])
    with Cache(config, tiers={url: SqliteTier(path)}) as cache:
        identity = Identity(model="example", weights="v1")
        mover = Mover(cache, PagedKV(layout, layout.whole, kv), identity, spare_blocks=range(48, 64))
        chain = mover.chain(list(range(256)))
        with mover.load(mover.match(chain), list(range(16))) as loading:
            loading.all()
        with mover.save(chain, list(range(16))) as saving:
            saving.all()
        print(f"{loading.tokens} tokens came from SQLite, {256 - loading.tokens} were computed")


if __name__ == "__main__":
    main(*sys.argv[1:])
