"""What a command is: its name, its arity, who calls it, and what it may answer. A server is tables of them.

A handler answers at once with a value that `resp.encode` knows, or with a generator: one that must wait
for a tier yields None and is resumed after every step of the cache; it may yield parts of its answer to be
sent meanwhile; what it returns is the answer, or the rest of it. Its caller's next command waits; nobody
else does, if what takes long yields PAUSE often.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from lmtier.server.resp import Argument, Error

__all__ = [
    "PAUSE",
    "Argument",
    "Caller",
    "Command",
    "Handler",
    "Nothing",
    "Payload",
    "Refused",
    "Table",
    "Waiting",
    "WithDescriptor",
]


class Payload(NamedTuple):
    """Bytes in the slab, sent from there as a bulk string; then `sent` is called, whatever happened."""

    view: memoryview
    sent: Callable[[], None]


class WithDescriptor(NamedTuple):
    """An answer that carries an open file to a caller on the Unix socket."""

    value: Any
    fd: int


class _Mark(Enum):
    NOTHING = "Nothing"


PAUSE = b""
"""What a handler yields where the others may have their turn, if its own was long enough."""

MOST = 1024
"""Arguments that a command takes, if it does not say more."""

Nothing = _Mark.NOTHING
"""The answer of a handler that has sent all of it in parts."""

Waiting: TypeAlias = "Generator[bytes | Payload | None, None, Any]"
Handler: TypeAlias = "Callable[[Caller, list[Argument]], Any]"
"""Given who calls and the whole command, name included: the answer, or `Waiting` for it."""
Table: TypeAlias = "Mapping[bytes, Command]"
"""Commands by name, in capitals."""


class Refused(Exception):
    """The command is answered with this error."""

    def __init__(self, error: Error) -> None:
        super().__init__(error)
        self.error = error


@dataclass(eq=False, slots=True)
class Caller:
    """One connection, as its commands see it."""

    id: int
    address: str
    is_local: bool = False
    """On the Unix socket: may be given the slab."""
    is_trusted: bool = True
    """Has shown the token, or none is needed."""
    resp3: bool = False
    name: str = ""
    kind: str = "redis"
    """What it turned out to be: redis, or engine."""
    session: Any = None
    """What the verbs of engines keep for it."""
    drafts: list[Any] = field(default_factory=list)
    """Room for the values of its present command, in their order. What is left in the end is dropped."""
    queue: Any = None
    """What it said since MULTI."""
    watch: Any = None
    """What it watches until EXEC."""
    asked: int = 0
    """How many commands it gave."""
    last: str = ""
    """The name of the last."""
    closing: bool = False
    """Close it when what it was answered has been sent."""


class Command(NamedTuple):
    handler: Handler
    arity: int
    """As in redis: the number of arguments, name included; negative: at least so many."""
    flags: tuple[str, ...] = ()
    """As in redis: readonly, write, fast, admin; `loading` and `no_auth` are obeyed."""
    keys: tuple[int, int, int] = (0, 0, 0)
    """As in redis: the first argument that is a name, the last, and the step between them."""
    payloads: range = range(0)
    """Which arguments are values: their bytes go straight into the slab."""
    most: int = MOST
    """Arguments. A command that takes more yields between them, or looks at each for an instant only."""
