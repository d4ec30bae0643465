"""CUDA's rules of ordering without a GPU: what is enqueued runs later, in any order that they allow.

Streams run one thing after another, and wait for events; nothing else holds them back, and each has a speed
of its own, so that one may fall behind for as long as another does not need it. Every access to memory is
recorded, those of kernels as the kernels themselves make them, and `check` finds the pairs that nothing
puts in order: a missing edge is found in every run that passes it, not only in those where it does harm.

With `host_computes` the engine computes on this thread, as a real one on a CPU does: what its stream waits
for has happened when the call returns, and everything else goes on late.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import TypeAlias

import numpy as np

from lmtier.copy.cuda.kernels import Launch, Spread
from lmtier.copy.cuda.streams import Copies, Event, Rows, StreamPair
from tests.cuda_shim import cpu

HOST = "host"
Range: TypeAlias = "tuple[int, int]"
Clock: TypeAlias = "dict[str, int]"
"""Of each stream, how many of its deeds come before."""


class Race(AssertionError):
    """Two accesses that nothing orders."""


@dataclass
class Deed:
    what: str
    stream: str
    number: int
    before: Clock
    run: Callable[[], None] | None
    reads: list[Range] = field(default_factory=list)
    writes: list[Range] = field(default_factory=list)

    def precedes(self, other: Deed) -> bool:
        return other.before.get(self.stream, 0) >= self.number


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice, stream: SimulatedStream) -> None:
        self.device, self.stream = device, stream
        self.at, self.clock = len(stream.deeds), dict(stream.clock)
        self.recorded = perf_counter()

    @property
    def has_come(self) -> bool:
        return self.stream.finished >= self.at

    def done(self) -> bool:
        self.device.progress()
        if self.device.is_impatient:
            return True
        if self.has_come:
            self.device.host_clock = join(self.device.host_clock, self.clock)
        return self.has_come

    def wait(self) -> None:
        while not self.has_come:
            self.device.one_deed()
        self.done()

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, SimulatedEvent)
        return self.time - earlier.time

    @property
    def time(self) -> float:
        """When it was recorded, or what is before it was done; now, if it comes at once but has not."""
        if not self.has_come:
            return perf_counter()
        return max(self.recorded, self.stream.ended[self.at - 1] if self.at else 0.0)


class SimulatedStream:
    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device, self.name = device, name
        self.deeds: list[Deed] = []
        self.waits: deque[tuple[int, SimulatedEvent]] = deque()
        self.finished = 0
        self.ended: list[float] = []
        """When, of each deed that is done."""
        self.clock: Clock = {}

    def record(self, *, timed: bool = False) -> SimulatedEvent:
        return SimulatedEvent(self.device, self)

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        edge = f"{self.name} waits for {event.stream.name}"
        lane, other = self.name.split()[0], event.stream.name.split()[0]
        if lane != other:
            edge = f"{lane} waits for {other}"
        self.device.edges.add(edge)
        if edge != self.device.without:
            self.waits.append((len(self.deeds), event))
            self.clock = join(self.clock, event.clock)
            self.enqueue("wait", None)  # what is recorded after a wait comes after it

    def launch(self, launch: Launch) -> None:
        def run() -> None:
            if self.device.is_recorded:
                deed.reads, deed.writes = self.device.cpu.traced(launch)
            else:
                self.device.cpu.run(launch)

        deed = self.enqueue(launch.kernel, run)

    def copy(self, copies: Copies) -> None:
        listed = np.asarray(copies, np.int64).reshape(-1, 3).tolist()

        def run() -> None:
            for to, source, nbytes in listed:
                ctypes.memmove(to, source, nbytes)

        self.enqueue(
            "copy", run, [(at, at + n) for _, at, n in listed], [(at, at + n) for at, _, n in listed]
        )

    def copy_rows(self, rows: Rows) -> None:
        assert max(rows.to_step, rows.source_step) < 1 << 31, "the driver takes no rows so far apart"
        assert min(rows.to_step, rows.source_step) >= rows.width or rows.number == 1
        self.copy([(row.to, row.source, row.width) for row in map(rows.part, *_each(rows.number))])

    def enqueue(
        self,
        what: str,
        run: Callable[[], None] | None,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> Deed:
        self.device.progress()
        self.clock = join(self.clock, self.device.host_clock)
        deed = Deed(what, self.name, len(self.deeds) + 1, dict(self.clock), run, list(reads), list(writes))
        self.clock[self.name] = deed.number
        self.deeds.append(deed)
        if self.device.is_recorded:
            self.device.history.append(deed)
        return deed

    @property
    def is_ready(self) -> bool:
        if self.finished == len(self.deeds):
            return False
        while self.waits and self.waits[0][0] <= self.finished:
            if not self.waits[0][1].has_come:
                return False
            self.waits.popleft()
        return True


class HostStream(SimulatedStream):
    """The engine's, if it computes on this thread: all that was enqueued here has been done."""

    def record(self, *, timed: bool = False) -> SimulatedEvent:
        event = SimulatedEvent(self.device, self)
        event.clock = dict(self.device.host_clock)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        edge = f"compute waits for {event.stream.name.split()[0]}"
        self.device.edges.add(edge)
        if edge != self.device.without:
            event.wait()


class SimulatedDevice:
    """`without` names one kind of edge, which is then left out; `is_impatient`: events come at once.
    `is_recorded`: accesses are, for `check`; nobody checks those of an engine that runs for minutes.
    `pace`: how much gets done between two calls of the host, any of these.

    Edges are named by lanes where they go from one to another, else by streams.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        without: str = "",
        is_impatient: bool = False,
        host_computes: bool = False,
        is_recorded: bool = True,
        pace: Sequence[int] = (0, 0, 0, 1, 2, 10),
    ) -> None:
        self.cpu = cpu()
        self.random = Random(seed)
        self.without, self.is_impatient, self.is_recorded = without, is_impatient, is_recorded
        self.pace = pace
        self.edges: set[str] = set()
        self.history: list[Deed] = []
        self.host_clock: Clock = {}
        lanes = [
            SimulatedStream(self, name)
            for name in ("store kernels", "store copies", "load kernels", "load copies")
        ]
        self.compute = (HostStream if host_computes else SimulatedStream)(self, "compute")
        self.streams = [self.compute, *lanes]
        self.store, self.load = (StreamPair(lanes[0], lanes[1], True), StreamPair(lanes[2], lanes[3], False))
        self.speeds = {each.name: self.random.choice([0.01, 0.3, 1.0]) for each in self.streams}
        self._kept: list[np.ndarray] = []

    def progress(self) -> None:
        """What the device happens to get done between two calls of the host."""
        for _ in range(self.random.choice(self.pace)):
            self.one_deed()

    def one_deed(self) -> None:
        ready = [each for each in self.streams if each.is_ready]
        if not ready:
            return
        (stream,) = self.random.choices(ready, [self.speeds[each.name] for each in ready])
        deed = stream.deeds[stream.finished]
        if deed.run is not None:
            deed.run()
            deed.run = None  # it holds what it has moved
        stream.finished += 1
        stream.ended.append(perf_counter())

    def host(self, what: str, reads: Sequence[Range] = (), writes: Sequence[Range] = ()) -> None:
        """This thread touches memory now."""
        number = self.host_clock.get(HOST, 0) + 1
        self.history.append(Deed(what, HOST, number, dict(self.host_clock), None, list(reads), list(writes)))
        self.host_clock[HOST] = number

    @property
    def spread(self) -> Spread:
        return Spread(1 + len(self.history) % 3)

    def memory(self, nbytes: int) -> int:
        array = np.zeros(nbytes, np.uint8)
        self.keep(array)
        return int(array.ctypes.data)

    def upload(self, table: np.ndarray) -> int:
        array = table.copy()
        self.keep(array)
        return int(array.ctypes.data)

    def host_memory(self, nbytes: int) -> np.ndarray:
        array = np.zeros(nbytes, np.uint8)
        self.keep(array)
        return array

    def release(self, addresses: Iterable[int]) -> None:
        """From now on, whoever touches it fails."""
        gone = set(addresses)
        assert gone <= {each.ctypes.data for each in self._kept}
        self._kept = [each for each in self._kept if each.ctypes.data not in gone]
        self.cpu.forbid(gone)

    def keep(self, *arrays: np.ndarray) -> None:
        """Memory that kernels may touch; it lives as long as this device."""
        self._kept += arrays
        self.cpu.allow(*arrays)

    def check(self) -> None:
        """Let everything run to its end, and raise Race if nothing orders two accesses that must not meet."""
        while any(each.is_ready for each in self.streams):
            self.one_deed()
        assert all(each.finished == len(each.deeds) for each in self.streams), "streams wait in a circle"
        deeds = [deed for deed in self.history if deed.reads or deed.writes]
        for number, later in enumerate(deeds):
            for earlier in deeds[:number]:
                if earlier.stream == later.stream or earlier.precedes(later):
                    continue
                for mine, theirs in (
                    (later.writes, earlier.reads),
                    (later.writes, earlier.writes),
                    (later.reads, earlier.writes),
                ):
                    if overlap(mine, theirs):
                        raise Race(
                            f"{later.what} on {later.stream} does not wait for "
                            f"{earlier.what} on {earlier.stream}"
                        )


def _each(count: int) -> tuple[range, range]:
    return range(count), range(1, count + 1)


def join(a: Clock, b: Clock) -> Clock:
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in a.keys() | b.keys()}


def overlap(a: Sequence[Range], b: Sequence[Range]) -> bool:
    return any(low < top and bottom < high for low, high in a for bottom, top in b)


def span(array: np.ndarray) -> Range:
    """Where a contiguous array lies."""
    assert array.flags.c_contiguous
    return array.ctypes.data, array.ctypes.data + array.nbytes
