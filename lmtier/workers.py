"""The only threads: a tier from plain blocking functions, copies on a second core, work in the background.

Threads here never touch the cache's state. They take work from a queue, move bytes, and put a result
into another queue, which the owner empties in `poll`.
"""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import TypeAlias

from lmtier import codec, forks
from lmtier.autocodec import Auto
from lmtier.codec import Header, Scratch, Suspect
from lmtier.compression import AUTO, RAW, Codec, find
from lmtier.layout import Name
from lmtier.tier import Done, Item, Job, Op, Reason, Stat, Tier

log = logging.getLogger("lmtier")

_GRACE = 0.25
"""Seconds that closing has at least: threads that wait for work only need to hear of it."""

Outcome: TypeAlias = "dict[Name, Header | Stat | None]"


@dataclass(slots=True)
class _Running:
    """A job under way, as the owner sees it."""

    waiting_for: int
    began: float
    done: Done


@dataclass(frozen=True, slots=True)
class _Part:
    """What a thread takes: one object of a LOAD, PEEK or STORE, or a whole LOOKUP, SCAN, DELETE or CLEAR."""

    job: Job
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class _Result:
    job: int
    ok: Outcome
    failed: dict[Name, Reason] = field(default_factory=dict)
    error: str = ""


class _Desk:
    """What a thread has of its own for ever: no fresh memory on the data path, aligned for O_DIRECT."""

    def __init__(self) -> None:
        self.page = memoryview(mmap.mmap(-1, codec.PAGE))
        self.scratch = Scratch()


class BlockingTier(Tier):
    """Subclass this and write plain blocking functions: four; two more for a warm start, or `clear`.

    The functions run on several threads at once, never twice at once for the same name. They may raise:
    FileNotFoundError is a miss, TimeoutError a deadline, OSError with ENOSPC a full tier, anything else
    an error; none of them reaches the caller as an exception. Objects are encoded and their checksums made
    before `write`, checked and decoded after `read`, on the same thread; one that fails is deleted.

    Reads and writes have threads of their own, so that neither waits behind a queue of the other; and
    lookups, with `askers`, for a tier of which every request asks.
    """

    def __init__(self, name: str, readers: int = 4, writers: int = 4, askers: int = 0) -> None:
        self._running: dict[int, _Running] = {}
        self._results: SimpleQueue[_Result] = SimpleQueue()
        self._reads: SimpleQueue[_Part | None] = SimpleQueue()
        self._writes: SimpleQueue[_Part | None] = SimpleQueue()
        self._closing = threading.Event()
        self._left_behind = False
        """A thread was left behind: it may go on one day."""
        # All writers at once would share the cores for their first checksums, and the storage would wait
        # for all of them; a few at a time, the first write begins when the first checksum is done.
        self._sealing = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))
        self._codec: Codec | None = None
        self._auto: Auto | None = None
        self._lookups: SimpleQueue[_Part | None] = SimpleQueue() if askers else self._reads
        self._queues = [self._reads] * readers + [self._writes] * writers + [self._lookups] * askers
        self._threads = [
            start_thread(f"lmtier-{name}-{i}", self._work, queue) for i, queue in enumerate(self._queues)
        ]
        forks.tell(self)

    def forked(self) -> None:
        """In a child there are no threads, and the storage is its parent's."""
        forks.bury(self, "tier")

    # ---- what a backend author writes

    @abstractmethod
    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` (header page, payload room if asked for) in one go; return the bytes that arrived.

        An object longer than the buffers must return more than their size.
        """

    @abstractmethod
    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        """Keep `buffers` (header page, payload) under `item.name`: all of it becomes visible, or none."""

    @abstractmethod
    def delete(self, names: Sequence[Name]) -> None:
        """Forget these. One that is not there is not an error."""

    @abstractmethod
    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        """Which of these are there."""

    def touch(self, items: Sequence[Item]) -> None:
        """Remember when these were last used, if the tier tells it in `scan`."""

    def scan(self) -> Iterable[tuple[Name, Stat]]:
        """Everything that is there, for a warm start. A tier that does not keep has nothing to say."""
        return ()

    def clear(self, prefix: bytes) -> Iterable[None]:
        """Forget every object whose key begins so, some at a time, and yield between.

        Asked of a tier that does not keep, and does not `scan`: nobody here knows its names.
        """
        for name, _ in self.scan():
            if name.key.startswith(prefix):
                self.delete([name])
                yield

    def sift(self, suspect: Suspect) -> Iterable[None]:
        """Forget what `suspect` covers, as `clear` does."""
        page = memoryview(bytearray(codec.PAGE))
        for name, _ in self.scan():
            if name.key.startswith(suspect.prefix):
                if suspect.covers(name.key, codec.peek(page[: self.read(Item(name), (page,))], name)[0].made):
                    self.delete([name])
                yield

    # ---- the seam

    def use_codec(self, name: str) -> None:
        self._auto = Auto() if name == AUTO else None
        self._codec = find(name) if name not in (AUTO, RAW) else None

    @property
    def codec(self) -> str:
        if self._auto is not None:
            return self._auto.name
        return RAW if self._codec is None else self._codec.name

    def submit(self, job: Job) -> None:
        whole = job.op not in (Op.LOAD, Op.STORE, Op.PEEK)
        parts = [job.items] if whole else [(item,) for item in job.items]
        self._running[job.id] = _Running(len(parts), time.monotonic(), Done(job.id, {}))
        if not parts or self._closing.is_set():  # no thread will ever see it
            names = [item.name for item in job.items]
            self._results.put(self._fail(job, names, Reason.CLOSED, "") if parts else _Result(job.id, {}))
            self._running[job.id].waiting_for = 1
            self.wake()
            return
        queue = self._writes if job.op in (Op.STORE, Op.DELETE, Op.CLEAR) else self._reads
        queue = self._lookups if job.op is Op.LOOKUP else queue
        for items in parts:
            queue.put(_Part(job, items))

    def poll(self) -> list[Done]:
        finished: list[Done] = []
        while True:
            try:
                result = self._results.get_nowait()
            except Empty:
                return finished
            running = self._running[result.job]
            done = running.done
            done.ok.update(result.ok)
            done.failed.update(result.failed)
            running.waiting_for -= 1
            if running.waiting_for <= 0:
                del self._running[result.job]
                seconds = time.monotonic() - running.began
                error = result.error or done.error
                finished.append(Done(done.id, done.ok, done.failed, seconds, error))
            elif result.error:
                running.done = Done(done.id, done.ok, done.failed, 0.0, result.error)

    def close(self) -> None:
        self._closing.set()
        while self._queues:
            self._queues.pop().put(None)
        until = time.monotonic() + max(_GRACE, self.patience)
        while self._threads:
            thread = self._threads.pop()
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():  # in a call that does not return; it keeps its memory alive
                self._left_behind = True
                log.error("lmtier: %s hangs in its storage and was left behind", thread.name)

    # ---- the threads

    def _work(self, queue: SimpleQueue[_Part | None]) -> None:
        desk = _Desk()
        while (part := queue.get()) is not None:
            self._results.put(self._attempt(part, desk))
            self.wake()

    def _attempt(self, part: _Part, desk: _Desk) -> _Result:
        result = self._try(part, desk)
        victims = [item.replaces for item in part.items if item.replaces is not None]
        must_go = victims and result.failed and Reason.CLOSED not in result.failed.values()
        # The caller counts them as gone, whatever became of the store, but for what is said here.
        if must_go and not self._discard(victims):
            result.failed.update(dict.fromkeys(victims, Reason.ERROR))
        return result

    def _try(self, part: _Part, desk: _Desk) -> _Result:
        job, names = part.job, [item.name for item in part.items]
        if self._closing.is_set():
            return self._fail(job, names, Reason.CLOSED, "")
        if job.deadline is not None and time.monotonic() > job.deadline:
            return self._fail(job, names, Reason.DEADLINE, "")
        try:
            return _Result(job.id, self._do(job, part.items, names, desk))
        except (FileNotFoundError, KeyError) as error:
            if job.op is Op.STORE:  # not a miss: the place to store it has gone
                return self._fail(job, names, Reason.ERROR, repr(error))
            return self._fail(job, names, Reason.ABSENT, "")
        except codec.CorruptObject as error:
            log.error("lmtier: %s is corrupt, deleting it: %s", names[0], error)
            self._discard(names)
            return self._fail(job, names, Reason.CORRUPT, str(error))
        except codec.UnreadableObject as error:  # left alone: others may share the tier
            _warn_once(str(error))
            return self._fail(job, names, Reason.FOREIGN, str(error))
        except TimeoutError as error:
            return self._fail(job, names, Reason.DEADLINE, str(error))
        except BaseException as error:  # noqa: BLE001 - the thread's edge; counted by the caller as a miss
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            return self._fail(job, names, Reason.FULL if full else Reason.ERROR, repr(error))

    def _do(self, job: Job, items: tuple[Item, ...], names: list[Name], desk: _Desk) -> Outcome:
        page = desk.page
        match job.op:
            case Op.LOAD:
                (item,) = items
                began = time.perf_counter()
                got = self.read(item, (page, item.payload))
                if got < codec.PAGE:
                    raise codec.CorruptObject(f"truncated: {got} bytes, the header takes 4096")
                if self._auto is not None:
                    self._auto.read(got, time.perf_counter() - began)
                got -= codec.PAGE
                return {item.name: codec.unseal(page, item.payload, item.name, got, desk.scratch)}
            case Op.PEEK:
                (item,) = items
                return {item.name: codec.peek(page[: self.read(item, (page,))], item.name)[0]}
            case Op.STORE:
                (item,) = items
                if item.header is None:
                    raise ValueError("a STORE item needs a header")
                with self._sealing:
                    header, payload = self._encoded(item.header, item.payload, desk.scratch)
                    codec.seal(page, header, payload)
                began = time.perf_counter()
                self.write(item, (page, payload))
                if self._auto is not None:
                    self._auto.wrote(codec.PAGE + len(payload), time.perf_counter() - began)
                return {item.name: Stat(len(payload)) if header.encoded else None}
            case Op.DELETE:
                self.delete(names)
                return dict.fromkeys(names)
            case Op.TOUCH:
                self.touch(items)
                return dict.fromkeys(names)
            case Op.LOOKUP:
                return dict(self.contains(names))
            case Op.SCAN:
                with collector_paused():
                    return dict(self.scan())
            case Op.CLEAR:
                for _ in self.clear(job.prefix) if job.suspect is None else self.sift(job.suspect):
                    if self._closing.is_set():
                        raise ConnectionError("closed in the middle")
                return {}

    def _encoded(self, header: Header, payload: memoryview, scratch: Scratch) -> tuple[Header, memoryview]:
        way = self._codec if self._auto is None else self._auto.pick(header, payload, scratch)
        return (header, payload) if way is None else codec.encode(header, payload, way, scratch)

    def _discard(self, names: list[Name]) -> bool:
        try:
            self.delete(names)
        except BaseException as error:  # noqa: BLE001 - the thread's edge, reached from its handlers
            log.error("lmtier: could not delete %s: %s", names[0], error)
            return False
        return True

    @staticmethod
    def _fail(job: Job, names: list[Name], reason: Reason, error: str) -> _Result:
        return _Result(job.id, {}, dict.fromkeys(names, reason), error if names else error or reason.value)


@dataclass(frozen=True, slots=True)
class _Batch:
    tasks: deque[Callable[[], None]]
    ends: SimpleQueue[BaseException | None] = field(default_factory=SimpleQueue)
    """Of those that helpers have taken."""

    def take(self) -> Callable[[], None] | None:
        try:
            return self.tasks.popleft()
        except IndexError:
            return None


class Crew:
    """A few threads that share a batch of copies with the caller: each takes the next, so who comes late
    takes fewer, and nobody waits for a thread that has no core.

    `cores`: where they may run. A thread inherits those of its creator, which an engine may bind to one.
    """

    def __init__(self, helpers: int, cores: Iterable[int] = ()) -> None:
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._cores = list(cores)
        self._threads = [start_thread(f"lmtier-copy-{i}", self._work) for i in range(max(0, helpers))]
        forks.tell(self)

    def forked(self) -> None:
        """In a child the caller copies alone."""
        self._threads = []

    def run(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Run all of them; return when the last is done; raise what one of them raised."""
        # Each run has its own queue of ends: one that is interrupted cannot leave an end for the next.
        batch = _Batch(deque(tasks))
        total, mine, dropped = len(batch.tasks), 0, 0
        for _ in self._threads[: max(0, total - 1)]:
            self._batches.put(batch)
        try:
            while (task := batch.take()) is not None:
                mine += 1
                task()
        finally:
            while batch.take() is not None:
                dropped += 1
            errors = [batch.ends.get() for _ in range(total - mine - dropped)]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        for _ in self._threads:
            self._batches.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        if self._cores:
            with suppress(OSError):  # they were taken from this process meanwhile
                os.sched_setaffinity(0, self._cores)
        while (batch := self._batches.get()) is not None:
            while (task := batch.take()) is not None:
                try:
                    task()
                except BaseException as error:  # noqa: BLE001 - the thread's edge; raised again by run()
                    batch.ends.put(error)
                else:
                    batch.ends.put(None)


@lru_cache(maxsize=64)
def _warn_once(why: str) -> None:
    log.warning("lmtier: objects that cannot be decoded here are misses: %s", why)


@contextmanager
def collector_paused() -> Iterator[None]:
    """A million entries that all stay are no garbage; looking for some among them doubles a warm start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def start_thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread
