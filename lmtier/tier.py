"""The seam: what a storage tier must do. Everything in backends/ implements this and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from lmtier.codec import Header, Suspect
from lmtier.compression import RAW
from lmtier.errors import ConfigError
from lmtier.layout import Name


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
    """Why a key did not work. A metric label, so this list is all there is."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    FULL = "full"
    ERROR = "error"
    DEADLINE = "deadline"
    CLOSED = "closed"
    EXPIRED = "expired"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a job. `payload` is whole pages of a slab: source of a STORE, target of a LOAD."""

    name: Name
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    header: Header | None = None
    """STORE: what the header page shall say."""
    replaces: Name | None = None
    """STORE: an evicted object of about the same size whose place may be written over. It goes either
    way, also when the STORE fails; only Reason.CLOSED leaves it. If it cannot go, it is in `failed` too."""
    used: int = 0
    """STORE, LOAD, TOUCH: when it counts as last used, in ns since the epoch; 0: now. The caller keeps
    a tail older than its head, so that the order in which chunks leave survives a restart."""
    lives: float = 0.0
    """STORE: for how many seconds the object is of use, after which a tier may forget it; 0: for ever."""


@dataclass(frozen=True, slots=True)
class Job:
    """One batch of work. The caller leaves each `payload` alone until this job's Done was polled."""

    id: int
    op: Op
    items: tuple[Item, ...]
    deadline: float | None = None
    """In time.monotonic(). What has not begun by then fails with Reason.DEADLINE."""
    prefix: bytes = b""
    """CLEAR: every object whose key begins so is to go; only those that were there before are promised."""
    suspect: Suspect | None = None
    """CLEAR: of those, only what this covers, by what its header says."""


class Stat(NamedTuple):
    """What a tier knows of an object without reading it."""

    nbytes: int
    """Payload bytes as stored, in whole pages: the room a LOAD needs, if no codec made them fewer."""
    used: int = 0
    """When it was last used, in ns since the epoch."""


@dataclass(frozen=True, slots=True)
class Done:
    """One finished job. What is not in `ok` is a miss; tiers report errors, they never raise them."""

    id: int
    ok: dict[Name, Header | Stat | None]
    """LOAD: the verified header. PEEK: the header, and nothing said of the payload. LOOKUP, SCAN: a Stat.
    STORE: a Stat if the object takes less than its payload, otherwise None."""
    failed: dict[Name, Reason] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    """Of a SCAN or CLEAR, which name no items: it failed, all or the rest of it."""


class Tier(ABC):
    """Submit and poll. Both return at once; bytes move on the tier's own threads or hardware.

    The caller guarantees: `submit` and `poll` come from one thread; a name is in at most one STORE or
    DELETE at a time, and in no LOAD beside them; payloads hold still until the job's Done was polled.

    The tier owes: each job in `poll` exactly once, whatever happened to it; after a failed or missing
    item its payload may hold anything; a LOAD is only ok if `codec.unseal` said so; `wake` is called
    after something became pollable, from any thread. What is submitted after `close` fails with
    Reason.CLOSED.
    """

    keeps: bool = True
    """True: what was stored stays until deleted, so the caller's index knows it. False: it may go, ask."""

    most: int | None = None
    """Bytes that the storage has in all, if that is known: no capacity is larger."""

    wake: Callable[[], None] = staticmethod(lambda: None)

    patience: float = 5.0
    """Seconds that `close` may wait for calls into storage that are under way. Its owner sets it."""

    @property
    def codec(self) -> str:
        """What is done to payloads now; of `auto`, what it chose."""
        return RAW

    def use_codec(self, name: str) -> None:
        """Store what comes from now on so, one of `compression.WORDS`; before the first job. Reading needs
        no word: headers say it."""
        if name != RAW:
            raise ConfigError(f"{type(self).__name__} stores objects as they are: codec={name} is not for it")

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Accept `job`."""

    @abstractmethod
    def poll(self) -> list[Done]:
        """Return the jobs finished since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Finish or fail every accepted job, then release threads, files and sockets. Idempotent.

        What hangs for `patience` is left behind.
        """
