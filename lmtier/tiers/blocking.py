"""BlockingTier: a tier made from plain blocking functions, which it runs on threads.

These threads never touch the cache's state. They take work from a queue, move bytes, and put a result
into another queue, which the owner empties in `poll`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import TypeAlias

from lmtier import forks
from lmtier.errors import ConfigError, log
from lmtier.format import objects
from lmtier.format.compression import RAW, Codec, find
from lmtier.format.layout import Name
from lmtier.format.objects import Header, Scratch, Selector, anonymous
from lmtier.format.sealing import NoKey, SealingKeys, TenantKeys
from lmtier.threads import collector_paused, start_thread
from lmtier.tiers.base import Done, Item, Job, Op, Reason, Stat, Tier

_CORES = os.cpu_count() or 1
LEARNED_WITHIN = 2.0
"""Seconds after which no server that shares a store of tenants' keys serves anything of a tenant whom one has
forgotten. It takes longer if the store does not answer."""
_LOOKS = 1.0  # seconds between two looks for that
_GRACE = 0.25
"""The least time for `close`, in seconds. Idle threads need no more to end."""
_MOST_THREADS = 1024

Outcome: TypeAlias = "dict[Name, Header | Stat | None]"


@dataclass(slots=True)
class _Running:
    """A running job, as the owner sees it."""

    waiting_for: int
    began: float
    done: Done


@dataclass(frozen=True, slots=True)
class _Part:
    """The work that a thread takes at once: one object of a LOAD, PEEK or STORE, or any other whole job."""

    job: Job
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class _Result:
    job: int
    ok: Outcome
    failed: dict[Name, Reason] = field(default_factory=dict)
    error: str = ""


class _Desk:
    """A thread's own buffers, aligned for O_DIRECT. It keeps them, so the data path allocates no memory."""

    def __init__(self) -> None:
        self.page = anonymous(objects.PAGE)
        self.scratch = Scratch()


class BlockingTier(Tier):
    """The base of a tier that is written as plain blocking functions.

    Write four functions: `read`, `write`, `delete` and `contains`. Add `touch` and `scan` for a warm start,
    or `clear` for a tier that does not keep what it stores.

    The functions run on several threads at once, never twice at once for the same name. They may raise:
    FileNotFoundError is a miss, TimeoutError a deadline, OSError with ENOSPC a full tier. Any other
    exception is an error, also a KeyError. None of them reaches the caller as an exception. Objects are
    encoded and sealed, or their checksums made, before `write`; they are checked and decoded after `read`, on
    the same thread. An object that fails the check is deleted.

    Reads and writes have separate threads, so that neither waits behind a queue of the other. With `askers`
    lookups have threads too: that is for a tier that every request asks.
    """

    def __init__(self, name: str, readers: int = 4, writers: int = 4, askers: int = 0) -> None:
        if (threads := readers + writers + askers) > _MOST_THREADS:
            raise ConfigError(f"{name} tier: {threads} threads are too many; at most {_MOST_THREADS}")
        self._running: dict[int, _Running] = {}
        self._results: SimpleQueue[_Result] = SimpleQueue()
        self._reads: SimpleQueue[_Part | None] = SimpleQueue()
        self._writes: SimpleQueue[_Part | None] = SimpleQueue()
        self._closing = threading.Event()
        self._left_behind = False
        """A thread was abandoned at `close`. Its call may still return one day."""
        # If all writers made their first checksums at once, they would share the cores, and the storage would
        # wait for all of them. With a few at a time, the first write begins when the first checksum is done.
        self._sealing = threading.Semaphore(max(1, _CORES // 2))
        self._codec: Codec | None = None
        self._lookups: SimpleQueue[_Part | None] = SimpleQueue() if askers else self._reads
        self._queues = [self._reads] * readers + [self._writes] * writers + [self._lookups] * askers
        self._threads = [
            start_thread(f"lmtier-{name}-{i}", self._work, queue) for i, queue in enumerate(self._queues)
        ]
        forks.call_in_child(self)

    def forked(self) -> None:
        """A child has no threads, and the storage belongs to its parent."""
        forks.bury(self, "tier")

    # ---- written by the author of a backend

    @abstractmethod
    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` (the header page, and room for a payload if one is wanted) with one read.

        Return the number of bytes read.

        An object longer than the buffers must return more than their size.
        """

    @abstractmethod
    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        """Store `buffers` (header page, payload) under `item.name`: all of it becomes visible, or none."""

    @abstractmethod
    def delete(self, names: Sequence[Name]) -> None:
        """Delete these objects. A name that does not exist is no error."""

    @abstractmethod
    def contains(self, names: Sequence[Name]) -> dict[Name, Stat]:
        """Return those of `names` that exist."""

    def touch(self, items: Sequence[Item]) -> None:
        """Record when these were last used, if `scan` returns that."""

    def scan(self) -> Iterable[tuple[Name, Stat]]:
        """Return all objects, for a warm start. A tier with `keeps = False` does not need it."""
        return ()

    def clear(self, selector: Selector) -> Iterable[None]:
        """Delete the objects that `selector` covers, some at a time, and yield in between.

        Only a tier with `keeps = False` needs it: it has no `scan`, so lmtier does not know its names. If
        `selector.is_prefix`, keys decide: no header has to be read.
        """
        page = memoryview(bytearray(objects.PAGE))
        for name, _ in self.scan():
            if selector.concerns(name.key):
                if selector.is_prefix or selector.covers(
                    name.key, objects.peek(page[: self.read(Item(name), (page,))], name)[0].provenance
                ):
                    self.delete([name])
                yield

    # ---- the interface of a tier

    def use_codec(self, name: str) -> None:
        self._codec = find(name) if name != RAW else None

    def use_keys(self, keys: SealingKeys) -> None:
        self.keys = keys
        # Encryption takes several times what a checksum takes: half of the cores would be too slow for the
        # storage.
        self._sealing = threading.Semaphore(_CORES)
        if keys.tenants is not None:  # not a thread that reads: it may wait for the storage
            self._threads.append(start_thread("lmtier-tenants", self._watch, keys.tenants))

    @property
    def codec(self) -> str:
        return RAW if self._codec is None else self._codec.name

    def submit(self, job: Job) -> None:
        is_one_part = job.op not in (Op.LOAD, Op.STORE, Op.PEEK)
        parts = [job.items] if is_one_part else [(item,) for item in job.items]
        self._running[job.id] = _Running(len(parts), time.monotonic(), Done(job.id, {}))
        if not parts or self._closing.is_set():  # no thread would take it
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
        deadline = time.monotonic() + max(_GRACE, self.patience)
        while self._threads:
            thread = self._threads.pop()
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():  # in a call that does not return; the thread keeps its memory alive
                self._left_behind = True
                log.error("lmtier: thread %s hangs in a call into its storage and was abandoned", thread.name)

    # ---- the threads

    def _work(self, queue: SimpleQueue[_Part | None]) -> None:
        desk = _Desk()
        while (part := queue.get()) is not None:
            self._results.put(self._attempt(part, desk))
            self.wake()

    def _watch(self, tenants: TenantKeys) -> None:
        """Notice who was forgotten by another server, also while nothing is stored or read."""
        is_failing = False
        while not self._closing.wait(_LOOKS):
            try:
                if tenants.read_tombstones():
                    self.wake()
                is_failing = False
            except OSError as error:
                if not is_failing:
                    log.error("lmtier: tenants=%s: who was forgotten is not known: %s", tenants.place, error)
                is_failing = True

    def _attempt(self, part: _Part, desk: _Desk) -> _Result:
        result = self._try(part, desk)
        victims = [item.replaces for item in part.items if item.replaces is not None]
        must_delete_victims = victims and result.failed and Reason.CLOSED not in result.failed.values()
        # The caller counts the victims as deleted, also if the store failed, unless `failed` names them.
        if must_delete_victims and not self._discard(victims):
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
        except FileNotFoundError as error:
            if job.op is Op.STORE:  # no miss: the directory for it no longer exists
                return self._fail(job, names, Reason.ERROR, _words(error))
            return self._fail(job, names, Reason.ABSENT, "")
        except objects.CorruptObject as error:
            log.error("lmtier: %s is corrupt, deleting it: %s", names[0], error)
            self._discard(names)
            return self._fail(job, names, Reason.CORRUPT, str(error))
        except objects.UnreadableObject as error:  # it is not deleted: others who share the tier may read it
            _warn_once(str(error))
            return self._fail(job, names, Reason.FOREIGN, str(error))
        except NoKey as error:  # it is not deleted: the key may come back
            if job.op is Op.STORE:  # the tenant was forgotten
                return self._fail(job, names, Reason.CLEARED, str(error))
            _warn_once(str(error))
            return self._fail(job, names, Reason.SEALED, str(error))
        except objects.UnsealedObject as error:  # anyone can have written it, and anyone can read it
            _warn_once(str(error))
            self._discard(names)
            return self._fail(job, names, Reason.UNSEALED, str(error))
        except TimeoutError as error:
            return self._fail(job, names, Reason.DEADLINE, str(error) or "no answer in time")
        except BaseException as error:  # noqa: BLE001 - the thread's edge; the caller counts a miss
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            return self._fail(job, names, Reason.FULL if is_full else Reason.ERROR, _words(error))

    def _do(self, job: Job, items: tuple[Item, ...], names: list[Name], desk: _Desk) -> Outcome:
        page = desk.page
        match job.op:
            case Op.LOAD:
                (item,) = items
                read_bytes = self.read(item, (page, item.payload))
                if read_bytes < objects.PAGE:
                    raise objects.CorruptObject(f"truncated: {read_bytes} bytes, but a header has 4096")
                read_bytes -= objects.PAGE
                header = objects.unseal(page, item.payload, item.name, read_bytes, desk.scratch, self.keys)
                return {item.name: header}
            case Op.PEEK:
                (item,) = items
                read_bytes = self.read(item, (page,))
                return {item.name: objects.authenticate(page[:read_bytes], item.name, self.keys)[0]}
            case Op.STORE:
                (item,) = items
                if item.header is None:
                    raise ValueError("a STORE item needs a header")
                with self._sealing:
                    header, payload = self._encoded(item.header, item.payload, desk.scratch)
                    payload = objects.seal(page, header, payload, self.keys, desk.scratch)
                self.write(item, (page, payload))
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
                for _ in self.clear(job.selector):
                    if self._closing.is_set():
                        raise ConnectionError("the tier was closed in the middle of the job")
                return {}

    def _encoded(self, header: Header, payload: memoryview, scratch: Scratch) -> tuple[Header, memoryview]:
        codec = self._codec
        return (header, payload) if codec is None else objects.encode(header, payload, codec, scratch)

    def _discard(self, names: list[Name]) -> bool:
        try:
            self.delete(names)
        except BaseException as error:  # noqa: BLE001 - the thread's edge, called from its handlers
            log.error("lmtier: could not delete %s: %s", names[0], error)
            return False
        return True

    @staticmethod
    def _fail(job: Job, names: list[Name], reason: Reason, error: str) -> _Result:
        return _Result(job.id, {}, dict.fromkeys(names, reason), error if names else error or reason.value)


@lru_cache(maxsize=64)
def _warn_once(why: str) -> None:
    log.warning("lmtier: an object cannot be read here and counts as a miss: %s", why)


def _words(error: BaseException) -> str:
    """The error of a system call in its own words; any other one with its type."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return repr(error)
