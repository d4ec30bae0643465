"""A tier that stores nothing: it accepts every store and finds no object. The smallest example of a tier."""

from __future__ import annotations

from collections.abc import Sequence

from lmtier.format.layout import Name
from lmtier.tiers.base import Item, Stat
from lmtier.tiers.blocking import BlockingTier


class NullTier(BlockingTier):
    keeps = False

    def __init__(self, location: str = "") -> None:
        super().__init__("null", readers=1, writers=1)

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        raise FileNotFoundError(item.name)

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        pass

    def delete(self, names: Sequence[Name]) -> None:
        pass

    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        return {}
