"""The interface of a storage tier. Everything in backends/ implements this and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from lmtier.errors import ConfigError
from lmtier.format.compression import RAW
from lmtier.format.layout import Name
from lmtier.format.objects import EVERYTHING, Header, Selector
from lmtier.format.sealing import SealingKeys


class Op(Enum):
    SCAN = "scan"
    LOOKUP = "lookup"
    STORE = "store"
    LOAD = "load"
    PEEK = "peek"
    DELETE = "delete"
    TOUCH = "touch"
    CLEAR = "clear"


class Reason(StrEnum):
    """Why an object failed. It is a metric label, so this list is complete."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    FULL = "full"
    ERROR = "error"
    DEADLINE = "deadline"
    CLOSED = "closed"
    EXPIRED = "expired"
    CLEARED = "cleared"
    SEALED = "sealed"
    UNSEALED = "unsealed"


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a job. `payload` is whole pages of a slab: source of a STORE, target of a LOAD."""

    name: Name
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    header: Header | None = None
    """STORE: the header to write."""
    replaces: Name | None = None
    """STORE: an evicted object of about the same size, whose space may be overwritten. It is deleted also
    if the STORE fails, except with Reason.CLOSED. If it cannot be deleted, it is in `failed` too."""
    used: int = 0
    """STORE, LOAD, TOUCH: the time of last use to record, in ns since the epoch; 0: now. The caller makes
    a tail older than its head, so that the order of eviction survives a restart."""
    lives: float = 0.0
    """STORE: the seconds after which a tier may forget the object; 0: never."""


@dataclass(frozen=True, slots=True)
class Job:
    """One batch of work. The caller does not touch a `payload` until it has polled this job's Done."""

    id: int
    op: Op
    items: tuple[Item, ...]
    deadline: float | None = None
    """In time.monotonic(). An item that has not begun by then fails with Reason.DEADLINE."""
    selector: Selector = EVERYTHING
    """CLEAR: delete every object that it covers. Objects stored during the job may stay."""


class Stat(NamedTuple):
    """What a tier knows about an object without reading it."""

    nbytes: int
    """Payload bytes as stored, in whole pages. A LOAD needs as much room, or more if a codec shrank them."""
    used: int = 0
    """When it was last used, in ns since the epoch."""


@dataclass(frozen=True, slots=True)
class Done:
    """One finished job. An item that is not in `ok` is a miss. Tiers report errors and never raise them."""

    id: int
    ok: dict[Name, Header | Stat | None]
    """LOAD: the verified header. PEEK: the header; the payload is not checked. LOOKUP, SCAN: a Stat.
    STORE: a Stat if the object takes less space than its payload, otherwise None."""
    failed: dict[Name, Reason] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    """Why the job, or the rest of it, failed. SCAN and CLEAR have no items: for them only this says so. Empty
    with Reason.DEADLINE: the items that failed had not begun."""

    @property
    def has_waited(self) -> bool:
        """A part of it failed because its turn did not come in time. That tells nothing of the storage."""
        return not self.error and Reason.DEADLINE in self.failed.values()


class Tier(ABC):
    """A storage tier takes jobs with `submit` and returns their results with `poll`.

    Both return at once; bytes move on the tier's own threads or hardware.

    The caller guarantees:

    - `submit` and `poll` are called from one thread.
    - A name is in at most one STORE or DELETE at a time, and in no LOAD at the same time.
    - Payloads do not change until the job's Done was polled.

    The tier guarantees:

    - `poll` returns each job exactly once, also if it failed.
    - A LOAD is only ok if `objects.unseal` accepted the object. The payload of a failed or missing item may
      hold anything.
    - A STORE of a name that is stored overwrites that object as a whole. If it fails, either may be there.
    - `wake` is called, from any thread, after a result became available to `poll`.
    - A job that is submitted after `close` fails with Reason.CLOSED.
    """

    keeps: bool = True
    """True: a stored object stays until it is deleted, so the caller's index is exact. False: objects may
    disappear, so the caller must ask."""

    source: str = ""
    """The name by which a request asks for this tier. Other requests do not ask it, and nothing is written
    to it. Empty: every request asks it."""

    storage_bytes: int | None = None
    """The size of the storage in bytes, if it is known. It limits the capacity."""

    wake: Callable[[], None] = staticmethod(lambda: None)

    keys: SealingKeys | None = None
    """The keys with which it seals objects. None: it does not seal."""

    is_handed_over: bool = False
    """Another process may own the storage, with `lock`: `close` leaves it as it is. The owner sets it."""

    @property
    def lock(self) -> int | None:
        """The file whose lock makes this process the only owner of the storage. None: it has no such file.

        A process that is given it opens the tier with it, as the keyword `lock` of the constructor, while
        this one begins no job. The constructor duplicates it. At no time is the storage without its lock.
        """
        return None

    patience: float = 5.0
    """Seconds that `close` may wait for running calls into the storage. The owner sets it."""

    @property
    def codec(self) -> str:
        """The codec that is in use."""
        return RAW

    def use_codec(self, name: str) -> None:
        """Store new objects with this codec, one of `compression.WORDS`. Call it before the first job.

        Reading needs no setting: each header names its codec.
        """
        if name != RAW:
            raise ConfigError(
                f"{type(self).__name__} stores objects as they are and has no codecs; remove codec={name}"
            )

    def use_keys(self, keys: SealingKeys) -> None:
        """Seal new objects, and accept only sealed ones. Call it before the first job."""
        raise ConfigError(
            f"{type(self).__name__} stores objects as they are and cannot seal them; remove seal="
        )

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Accept `job`."""

    @abstractmethod
    def poll(self) -> list[Done]:
        """Return the jobs finished since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Finish or fail every accepted job, then release threads, files and sockets. Idempotent.

        A thread that hangs for more than `patience` seconds is abandoned.
        """
