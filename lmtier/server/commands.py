"""What a command is: its name and arity, who calls it, and what it may answer. Tables of them make the server.

A handler answers at once with a value that `resp.encode` knows, or with a generator: one that must wait
for a tier yields, is resumed after every step of the cache, and returns the value in the end. Its caller's
next command waits; nobody else does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

Argument: TypeAlias = "bytes | memoryview"
Waiting: TypeAlias = "Generator[None, None, Any]"
Handler: TypeAlias = "Callable[[Caller, list[Argument]], Any]"
"""Given who calls and the whole command, name included; a value, or `Waiting` for one."""
Table: TypeAlias = "Mapping[bytes, Command]"
"""Commands by name, in capitals."""


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
    asked: int = 0
    last: str = ""
    """How many commands it gave, and the name of the last."""
    closing: bool = False
    """Close it when what it was answered has been sent."""


class Command(NamedTuple):
    handler: Handler
    arity: int
    """As in redis: the number of arguments, name included; negative: at least so many."""
    flags: tuple[str, ...] = ()
    """As in redis: readonly, write, fast, admin, no-auth."""


class WithDescriptor(NamedTuple):
    """An answer that carries an open file to a caller on the Unix socket."""

    value: Any
    fd: int
