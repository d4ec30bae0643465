"""A command: its name, its arity, its caller, and its possible answers. A server has tables of commands.

A handler returns a value that `resp.encode` knows, or a generator. A generator that must wait for a tier
yields None, and is resumed after every step of the cache. It may yield parts of its answer, which are sent at
once. Its return value is the answer, or the rest of it. The caller's next command waits meanwhile. Other
callers do not wait, if a long handler yields PAUSE often.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from lmtier.errors import log
from lmtier.server.access import Role
from lmtier.wire.command_reader import Argument as Argument
from lmtier.wire.resp import Error, Simple


class Payload(NamedTuple):
    """Bytes in the slab, sent from there as a bulk string. `on_sent` is called later, also on failure."""

    view: memoryview
    on_sent: Callable[[], None]
    head: bytes = b""
    """Bytes before them in the same string."""


class WithDescriptors(NamedTuple):
    """An answer that carries open files to a caller on the Unix socket."""

    value: Any
    fds: tuple[int, ...]


class _NoAnswer(Enum):
    NOTHING = "ALREADY_SENT"


PAUSE = b""
"""A handler yields this where its turn may end, so that other callers get theirs."""

OK = Simple("OK")
"""What all handlers answer when it is done: they tell this object from errors by its identity."""
NO_ROOM = Error("OOM command not allowed when used memory > 'maxmemory'.")

MAX_ARGUMENTS = 1024
"""The most arguments of a command, unless the command sets another limit."""

ALREADY_SENT = _NoAnswer.NOTHING
"""The answer of a handler that has already yielded all of it in parts."""

PendingAnswer: TypeAlias = "Generator[bytes | Payload | None, None, Any]"
Handler: TypeAlias = "Callable[[Caller, list[Argument]], Any]"
"""Gets the caller and the whole command, including its name. Returns the answer or a `PendingAnswer`."""
Table: TypeAlias = "Mapping[bytes, Command]"
"""Commands by name, in capitals."""


class Refused(Exception):
    """The command is answered with this error."""

    def __init__(self, error: str) -> None:
        super().__init__(error)
        self.error = Error(error)


def error_of(failure: Refused | OSError) -> Error:
    """The answer of a command that has failed. A call of the system that fails must not end the server."""
    if isinstance(failure, Refused):
        return failure.error
    log.error("lmtier: a command failed: %s", failure)
    return Error(f"ERR {failure.strerror or failure}")


@dataclass(eq=False, slots=True)
class Caller:
    """One connection, as its commands see it."""

    id: int
    address: str
    is_local: bool = False
    """It is on the Unix socket, so it may get the slab."""
    peer: tuple[int, int] | None = None
    """On the Unix socket: its process and its user."""
    role: Role = Role.NONE
    """What it may do, by the token that it has sent."""
    foreign_reason: str = ""
    """Why it may do nothing without a token: it is of another user of this host."""
    resp3: bool = False
    name: str = ""
    kind: str = "redis"
    """The kind of client: redis, engine or console. Its commands decide."""
    engine_session: Any = None
    """The engine's session, if it has one."""
    drafts: list[Any] = field(default_factory=list)
    """Room for the values of its present command, in order. Unused drafts are dropped in the end."""
    multi_queue: Any = None
    """Its commands since MULTI."""
    watch: Any = None
    """The names that it watches until EXEC."""
    transaction: Any = None
    """Its transaction, until all answers of it are sent."""
    command_count: int = 0
    """The number of its commands."""
    last: str = ""
    """The name of its last command."""
    closing: bool = False
    """Close the connection once its answers are sent."""

    def __str__(self) -> str:
        """As in the audit."""
        return f"{self.kind} {self.name or 'client'!r} at {self.address} ({self.role.name.lower()})"

    @property
    def user(self) -> int | None:
        """On the Unix socket: the user of its process."""
        return None if self.peer is None else self.peer[1]


class Command(NamedTuple):
    handler: Handler
    arity: int
    """As in redis: the number of arguments, name included; negative: at least so many."""
    flags: tuple[str, ...] = ()
    """As in redis: readonly, write, fast, admin, no_auth; `loading` is obeyed. `access.RIGHTS`: who may."""
    keys: tuple[int, int, int] = (0, 0, 0)
    """As in redis: the first and the last argument that is a name, and the step between them."""
    payloads: range = range(0)
    """Which arguments are values: their bytes go straight into the slab."""
    writes_any_name: bool = False
    """It may write any value."""
    max_arguments: int = MAX_ARGUMENTS
    """The most arguments. A command with many arguments yields between them, or handles each very fast."""
