"""The order of copies and compute: our streams, the engine's stream, and the events between them.

    the engine computes ──► a store reads          its stream waits for an event of the compute stream
    the engine computes ──► a load writes          the same: old contents may still be read, or be zeroed
    a load writes       ──► the engine computes    the compute stream waits, layer by layer
    a transfer touches  ──► the engine reuses      the compute stream waits for the blocks it is about to take
    a store reads       ──► a load writes          and the other way: the later one waits for the earlier
    a transfer ends     ──► the host               commit, release and abort once its last event is done

All calls return at once: they enqueue work, or check whether an event is done. Only `drain`, at the end,
waits. The host is as strict as the GPU: until it has seen a transfer's event, it neither makes the extents
readable (a commit) nor gives them to others (a release or abort).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from lmtier.copy.cuda.kernels import Launch, Spread
from lmtier.errors import MisuseError
from lmtier.format.layout import Array

Enqueue: TypeAlias = "Callable[[StreamPair], None]"
Copies: TypeAlias = "Array | Sequence[tuple[int, int, int]]"
"""Copies between addresses: (to, source, bytes) of each."""


class Rows(NamedTuple):
    """Pieces of `width` bytes, equally spaced on both sides. One call of the driver copies them all."""

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


_Kind = TypeVar("_Kind", bound="DeviceTransfer")


class Event(Protocol):
    def done(self) -> bool:
        """Whether all work enqueued before it has finished. Never waits."""

    def wait(self) -> None:
        """Block this thread until it is done. Used only at start and at the end."""

    def since(self, earlier: Event) -> float:
        """Seconds between the two on the device, if both are done and timed."""


class Stream(Protocol):
    """Work enqueued here runs in order. Two streams run in any order, except for their events."""

    def record(self, *, timed: bool = False) -> Event: ...

    def wait(self, event: Event) -> None:
        """Work enqueued from now on begins after the event. Returns at once."""

    def launch(self, launch: Launch) -> None: ...

    def copy(self, copies: Copies) -> None: ...

    def copy_rows(self, rows: Rows) -> None: ...


@dataclass(frozen=True, slots=True)
class StreamPair:
    """One direction: kernels and PCIe copies, each in its own stream, so that they overlap."""

    kernels: Stream
    copies: Stream
    is_store: bool

    def wait(self, event: Event) -> None:
        self.kernels.wait(event)
        self.copies.wait(event)

    def record(self, *, timed: bool = False) -> Event:
        """An event after the work of both streams. It does not delay the stream that the data uses first."""
        first, last = (self.kernels, self.copies) if self.is_store else (self.copies, self.kernels)
        last.wait(first.record())
        return last.record(timed=timed)


class Streams(Protocol):
    """The streams of a device: the two directions, and the stream on which the engine computes now."""

    @property
    def compute(self) -> Stream: ...

    @property
    def store(self) -> StreamPair: ...

    @property
    def load(self) -> StreamPair: ...


class Device(Streams, Protocol):
    """The part of a GPU that copies need."""

    @property
    def spread(self) -> Spread: ...

    def memory(self, nbytes: int) -> int:
        """The address of new memory on the device, which lives as long as this object."""

    def upload(self, table: Array) -> int:
        """The address of new device memory that holds `table`. Used at start."""

    def host_memory(self, nbytes: int) -> Array:
        """Zeroed page-locked memory that both the host and kernels can access."""

    def release(self, addresses: Iterable[int]) -> None:
        """Free memory of the three kinds above. It must not be in use any more."""


class DeviceTransfer:
    """A transfer between the engine's `blocks` and our memory: enqueue its parts, then `end` it."""

    writes_blocks = False

    def __init__(self, streams: Streams, lane: StreamPair, blocks: frozenset[int]) -> None:
        self.blocks = blocks
        self._streams, self._lane = streams, lane
        self._last: Event | None = None
        self._then: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether it was ended and all of its work is done."""
        return self._last is not None and self._last.done()

    def end(self, then: Callable[[], None]) -> None:
        """No more parts follow. `then` runs in a `poll` after the transfer has finished."""
        self._check_open()
        self._last, self._then = self._lane.record(timed=self.writes_blocks), then

    def delay(self, waiting: Stream | StreamPair) -> None:
        """Work enqueued on `waiting` from now on waits for this whole transfer."""
        if self._last is None:
            raise MisuseError("the engine reuses blocks of a transfer that was not ended; end it first")
        waiting.wait(self._last)

    def wait(self) -> None:
        """Block this thread until it is done."""
        if self._last is not None:
            self._last.wait()

    def finish(self) -> None:
        then, self._then = self._then, None  # it refers to this object: the cycle would keep memory alive
        if then is not None:
            then()

    def _check_open(self) -> None:
        if self._last is not None:
            raise MisuseError("this transfer was ended; begin another one for more parts")

    def _wait_for_compute(self) -> None:
        self._lane.wait(self._streams.compute.record())


class DeviceStore(DeviceTransfer):
    """A transfer out of the engine's blocks."""

    def part(self, enqueue: Enqueue) -> None:
        """Copy the KV that the engine has enqueued by now: one layer after its attention, or everything."""
        self._check_open()
        self._wait_for_compute()
        enqueue(self._lane)


class DeviceLoad(DeviceTransfer):
    """A transfer into blocks of the engine, which may read it layer by layer."""

    writes_blocks = True

    def __init__(self, streams: Streams, lane: StreamPair, blocks: frozenset[int]) -> None:
        super().__init__(streams, lane, blocks)
        self._layers: dict[int, Event] = {}
        self._computes_after: Event | None = None
        """The event of the layers that were allowed last."""
        # The previous user of the blocks may still read them, and engines zero blocks that they hand out.
        self._wait_for_compute()
        self._first = lane.copies.record(timed=True)

    @property
    def seconds(self) -> float:
        """The seconds that the device needed, once it is done, without earlier work."""
        assert self._last is not None
        return self._last.since(self._first)

    def part(self, enqueue: Enqueue, layers: Iterable[int] = ()) -> None:
        """Load these layers; or, without `layers`, enqueue work that no layer waits for."""
        self._check_open()
        enqueue(self._lane)
        loaded = self._lane.record()  # later work, such as a fingerprint, finds the layers complete
        self._layers.update(dict.fromkeys(layers, loaded))

    def let_compute(self, layer: int | None = None) -> None:
        """Work that the engine enqueues from now on may read this layer, or (None) all loaded layers."""
        if layer is None:
            self.delay(self._streams.compute)
        else:
            loaded = self._layers[layer]
            if loaded is not self._computes_after:  # most layers came with the one before
                self._streams.compute.wait(loaded)
                self._computes_after = loaded


class TransferOrder:
    """The unfinished transfers of one rank. Only the engine's thread may call it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._under_way: list[DeviceTransfer] = []

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def store(self, blocks: Iterable[int]) -> DeviceStore:
        return self._begin(DeviceStore, self._streams.store, frozenset(blocks))

    def load(self, blocks: Iterable[int]) -> DeviceLoad:
        return self._begin(DeviceLoad, self._streams.load, frozenset(blocks))

    def reuse(self, blocks: Iterable[int]) -> None:
        """The engine will write these blocks for another request.

        Its writes wait for our transfers of them.
        """
        self._delay(self._streams.compute, frozenset(blocks), writes=True)

    def let_go(self, blocks: Iterable[int]) -> None:
        """Another writer gets these blocks, and waits for no stream. Wait for our transfers of them."""
        handed_over = frozenset(blocks)
        for transfer in self._under_way:
            if not handed_over.isdisjoint(transfer.blocks):
                transfer.wait()

    def poll(self) -> int:
        """Finish the transfers that are done, oldest first.

        Returns their number. Call it in the owner's step.
        """
        # Check the youngest first. The transfers that a done one waited for are then found done too, and are
        # finished before it. So nothing computed on top of a load is committed before the load was checked.
        done = [transfer for transfer in reversed(self._under_way) if transfer.done]
        for transfer in reversed(done):
            self._under_way.remove(transfer)
            transfer.finish()
        return len(done)

    def drain(self) -> None:
        """Wait for all ended transfers, and finish them. For when the engine stops."""
        for transfer in self._under_way:
            transfer.wait()
        self.poll()

    def _begin(self, kind: type[_Kind], lane: StreamPair, blocks: frozenset[int]) -> _Kind:
        self._delay(lane, blocks, writes=kind.writes_blocks)
        transfer = kind(self._streams, lane, blocks)
        self._under_way.append(transfer)
        return transfer

    def _delay(self, waiting: Stream | StreamPair, blocks: frozenset[int], *, writes: bool) -> None:
        """Make `waiting` wait for every transfer of these blocks that must not overlap with it."""
        for transfer in self._under_way:
            if (writes or transfer.writes_blocks) and not blocks.isdisjoint(transfer.blocks):
                transfer.delay(waiting)
