"""Chunks that are copied between a GPU's blocks and payloads, and the staging memory on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lmtier.copy.blocks import ABSENT, ChunkBlocks
from lmtier.copy.cuda.streams import Event, Rows, Stream
from lmtier.errors import LayoutError
from lmtier.format.layout import Array

_FARTHEST = 1 << 30  # the largest distance of rows in one copy: drivers accept less than 2 GiB


@dataclass(eq=False, slots=True)
class Chunks:
    """Chunks that are copied between blocks and payloads, as arrays with one row per chunk."""

    addresses: Array
    """The addresses of their payloads."""
    ids: ChunkBlocks
    slot_addresses: Array
    """The addresses of their places in GPU memory; 0: no place."""
    is_filled: Array
    """Whether that place already holds the payload."""
    memory: tuple[Array, ...]
    """The memory of the payloads, kept alive as long as this object."""
    copy: Callable[[Chunks, int | None, bool], None]

    def __len__(self) -> int:
        return len(self.addresses)

    def __add__(self, others: Chunks) -> Chunks:
        return Chunks(
            np.concatenate([self.addresses, others.addresses]),
            np.concatenate([self.ids, others.ids], axis=1),
            np.concatenate([self.slot_addresses, others.slot_addresses]),
            np.concatenate([self.is_filled, others.is_filled]),
            self.memory + others.memory,
            self.copy,
        )

    def part(self, which: slice | Array) -> Chunks:
        places = self.slot_addresses[which], self.is_filled[which]
        return Chunks(self.addresses[which], self.ids[:, which], *places, self.memory, self.copy)

    @property
    def blocks(self) -> frozenset[int]:
        """All engine blocks of these chunks."""
        return frozenset(self.ids.reshape(-1).tolist()) - {ABSENT}

    def check_whole(self) -> None:
        if self.ids.min(initial=0) < 0:
            raise LayoutError("blocks of this chunk have left a sliding window: it cannot be saved any more")

    def gather(self, layer: int | None) -> None:
        """Copy out of the blocks. Like `scatter`, it waits for the device."""
        self.check_whole()
        self.copy(self, layer, True)

    def scatter(self, layer: int | None) -> None:
        self.copy(self, layer, False)


class Fingerprints:
    """The marks of a few chunks, [layers, chunks]. The device writes them and the host reads them."""

    def __init__(self, values: Array, offsets: tuple[int, ...]) -> None:
        self.values, self.offsets = values, offsets
        self.chunks = values.shape[1]

    def prints(self, chunk: int) -> list[bytes]:
        """The fingerprint of each layer, as `PagedKV.raw_fingerprint` returns it."""
        return [int(value).to_bytes(8, "big") for value in self.values[:, chunk]]


class Staging:
    """Device memory in slots that are used in turn. The next use of a slot waits for the end of its last."""

    def __init__(self, slots: Sequence[int], slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._slots: list[tuple[int, Event | None]] = [(address, None) for address in slots]

    def take(self, stream: Stream) -> int:
        """The address of the next slot, which `stream` fills."""
        address, end = self._slots[0]
        if end is not None:
            stream.wait(end)
        return address

    def turn(self, stream: Stream) -> None:
        """`stream` has emptied the slot."""
        address, _ = self._slots.pop(0)
        self._slots.append((address, stream.record()))


def rows_of(to: Array, source: Array, width: int) -> Iterator[Rows]:
    """The fewest copies of `width` bytes each: extents of a prompt are usually equally far apart."""
    targets, sources = to.tolist(), source.tolist()
    first, number = 0, len(targets)
    while first < number:
        end, steps = first + 1, (width, width)
        distances = (targets[end] - targets[first], sources[end] - sources[first]) if end < number else (0, 0)
        if min(distances) >= width and max(distances) <= _FARTHEST:
            steps = distances
            end = first + min(_alike(targets, first, distances[0]), _alike(sources, first, distances[1]))
        yield Rows(targets[first], steps[0], sources[first], steps[1], width, end - first)
        first = end


def _alike(places: list[int], first: int, step: int) -> int:
    """How many places from `first` on are equally far apart. Mostly all, which is found at once."""
    number = len(places) - first
    if places[first:] == list(range(places[first], places[first] + number * step, step)):
        return number
    end = first + 1
    while places[end] - places[end - 1] == step:
        end += 1
    return end - first
