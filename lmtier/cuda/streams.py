"""The order of copies and compute: streams beside the engine's own, and the events between them.

    the engine computes ──► a store reads          its stream waits for an event of the compute stream
    the engine computes ──► a load writes          the same: what was there may still be read, or zeroed
    a load writes       ──► the engine computes    the compute stream waits, layer by layer
    a transfer touches  ──► the engine reuses      the compute stream waits for the blocks it is about to take
    a store reads       ──► a load writes          and the other way: the later one waits for the earlier
    a transfer ends     ──► the host               commit, release and abort when its last event was seen done

Everything here returns at once: it enqueues, or looks whether an event has come. Only `drain`, at the end,
waits. The host's side of an edge is as strict as the GPU's: until a transfer's event was seen, its extents
are neither readable (a commit), nor another's (a release or abort).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from lmtier.cuda.kernels import Launch, Spread
from lmtier.errors import MisuseError
from lmtier.layout import Array

Enqueue: TypeAlias = "Callable[[Lane], None]"
Copies: TypeAlias = "Array | Sequence[tuple[int, int, int]]"
"""Bytes from address to address: (to, source, how many) of each."""


class Rows(NamedTuple):
    """Pieces of `width` bytes that lie equally far apart on either side: one call of the driver for all."""

    to: int
    to_step: int
    source: int
    source_step: int
    width: int
    number: int

    def part(self, first: int, end: int) -> Rows:
        rows = self._replace(
            to=self.to + first * self.to_step,
            source=self.source + first * self.source_step,
            number=end - first,
        )
        return rows if rows.number > 1 else rows._replace(to_step=self.width, source_step=self.width)


_Kind = TypeVar("_Kind", bound="Transfer")


class Event(Protocol):
    def done(self) -> bool:
        """Whether all that was enqueued before it has finished. Never waits."""

    def wait(self) -> None:
        """Hold this thread until it is. At start and at the end only."""

    def since(self, earlier: Event) -> float:
        """Seconds between the two on the device, if both have come and are timed."""


class Stream(Protocol):
    """What is enqueued here runs in order; two streams run in any order but for their events."""

    def record(self, *, timed: bool = False) -> Event: ...

    def wait(self, event: Event) -> None:
        """What is enqueued from now on begins after the event. Returns at once."""

    def launch(self, launch: Launch) -> None: ...

    def copy(self, copies: Copies) -> None: ...

    def copy_rows(self, rows: Rows) -> None: ...


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction: kernels and copies over the bus, each in its own order, so that they overlap."""

    kernels: Stream
    copies: Stream
    stores: bool

    def wait(self, event: Event) -> None:
        self.kernels.wait(event)
        self.copies.wait(event)

    def record(self, *, timed: bool = False) -> Event:
        """After all of both. What data goes through first is not held up by it."""
        first, last = (self.kernels, self.copies) if self.stores else (self.copies, self.kernels)
        last.wait(first.record())
        return last.record(timed=timed)


class Streams(Protocol):
    """A device's: the two directions, and the stream on which the engine computes just now."""

    @property
    def compute(self) -> Stream: ...

    @property
    def store(self) -> Lane: ...

    @property
    def load(self) -> Lane: ...


class Device(Streams, Protocol):
    """A GPU, as far as copies go."""

    @property
    def spread(self) -> Spread: ...

    def memory(self, nbytes: int) -> int:
        """The address of memory on the device, kept for as long as this is."""

    def upload(self, table: Array) -> int:
        """The same, with something in it. At start."""

    def host_memory(self, nbytes: int) -> Array:
        """Pinned memory that both the host and kernels reach, zeroed."""

    def release(self, addresses: Iterable[int]) -> None:
        """Let go of memory of the three kinds above. Nothing may be using it any more."""


class Transfer:
    """Bytes on their way between `blocks` and memory of ours: enqueue its parts, then `end` it."""

    writes_blocks = False

    def __init__(self, streams: Streams, lane: Lane, blocks: frozenset[int]) -> None:
        self.blocks = blocks
        self._streams, self._lane = streams, lane
        self._last: Event | None = None
        self._then: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether it was ended, and nothing of it is left to do."""
        return self._last is not None and self._last.done()

    def end(self, then: Callable[[], None]) -> None:
        """All is enqueued, or no more will be; `then` runs in a `poll` after it has finished."""
        self._check_open()
        self._last, self._then = self._lane.record(timed=self.writes_blocks), then

    def hold(self, waiting: Stream | Lane) -> None:
        """Let what is enqueued there from now on wait for all of this."""
        if self._last is None:
            raise MisuseError("blocks of a transfer that was not ended are about to be used again")
        waiting.wait(self._last)

    def wait(self) -> None:
        """Hold this thread until it is done."""
        if self._last is not None:
            self._last.wait()

    def finish(self) -> None:
        then, self._then = self._then, None  # which knows this: a circle, that would keep memory alive
        if then is not None:
            then()

    def _check_open(self) -> None:
        if self._last is not None:
            raise MisuseError("a transfer that was ended takes no more")

    def _wait_for_compute(self) -> None:
        self._lane.wait(self._streams.compute.record())


class Store(Transfer):
    """Out of the engine's blocks."""

    def part(self, enqueue: Enqueue) -> None:
        """Copy what the engine has enqueued by now: one layer after its attention, or everything."""
        self._check_open()
        self._wait_for_compute()
        enqueue(self._lane)


class Load(Transfer):
    """Into blocks that the engine has given for it; it may read layer by layer, as they come."""

    writes_blocks = True

    def __init__(self, streams: Streams, lane: Lane, blocks: frozenset[int]) -> None:
        super().__init__(streams, lane, blocks)
        self._layers: dict[int, Event] = {}
        # Whoever had the blocks before may still be reading them, and engines zero what they give out.
        self._wait_for_compute()
        self._first = lane.copies.record(timed=True)

    @property
    def seconds(self) -> float:
        """What the device took for it, once it is done; not for what it had to do first."""
        assert self._last is not None
        return self._last.since(self._first)

    def part(self, enqueue: Enqueue, layers: Iterable[int] = ()) -> None:
        """Bring these layers, or something that none waits for."""
        self._check_open()
        enqueue(self._lane)
        there = self._lane.record()  # whatever comes next, a fingerprint say, finds it complete
        self._layers.update(dict.fromkeys(layers, there))

    def let_compute(self, layer: int | None = None) -> None:
        """What the engine enqueues from now on may read this layer, or (None) all that was loaded."""
        if layer is None:
            self.hold(self._streams.compute)
        else:
            self._streams.compute.wait(self._layers[layer])


class Order:
    """The transfers of one rank that are under way. Called from the engine's thread alone."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._under_way: list[Transfer] = []

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def store(self, blocks: Iterable[int]) -> Store:
        return self._begin(Store, self._streams.store, frozenset(blocks))

    def load(self, blocks: Iterable[int]) -> Load:
        return self._begin(Load, self._streams.load, frozenset(blocks))

    def reuse(self, blocks: Iterable[int]) -> None:
        """The engine is about to write these blocks for something else: not before we are done with them."""
        self._hold(self._streams.compute, frozenset(blocks), writes=True)

    def poll(self) -> int:
        """Finish the transfers that are done, oldest first; how many. For the owner's step."""
        # Looked at youngest first: what a done one waited for is then found done too, and finished before it,
        # so that nothing computed on top of a load is committed before the load was checked.
        done = [each for each in reversed(self._under_way) if each.done]
        for each in reversed(done):
            self._under_way.remove(each)
            each.finish()
        return len(done)

    def drain(self) -> None:
        """Wait for all that were ended, and finish them: when the engine stops."""
        for each in self._under_way:
            each.wait()
        self.poll()

    def _begin(self, kind: type[_Kind], lane: Lane, blocks: frozenset[int]) -> _Kind:
        self._hold(lane, blocks, writes=kind.writes_blocks)
        transfer = kind(self._streams, lane, blocks)
        self._under_way.append(transfer)
        return transfer

    def _hold(self, waiting: Stream | Lane, blocks: frozenset[int], *, writes: bool) -> None:
        """Before `waiting` touches these blocks: the end of every transfer that must not overlap it."""
        for each in self._under_way:
            if (writes or each.writes_blocks) and not blocks.isdisjoint(each.blocks):
                each.hold(waiting)
