"""What happens to lmtier's objects in a forked child: they are closed there at once.

A child has copies of its parent's sockets, locks and memory, but none of its threads. While such copies
stay open, a server does not see that the parent has died, and no other process can lock the parent's
directory. A call on a cache without its threads would never end. Only `os.fork` and its users are handled;
a fork in C must be followed by an exec.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

from lmtier.errors import MisuseError


class Forked(Protocol):
    def forked(self) -> None:
        """Called in a child: release everything that belongs to the parent."""


class Closed(Protocol):
    def close(self) -> None: ...


_called: WeakSet[Any] = WeakSet()
_closed: WeakSet[Any] = WeakSet()


def call_in_child(owner: Forked) -> None:
    """Have `thing.forked()` called in every child."""
    _called.add(owner)


def close_in_child(resource: Closed) -> None:
    """Close this socket or file in every child. The parent's own stays open."""
    _closed.add(resource)


def bury(target: object, what: str) -> None:
    """From now on `target.close()` does nothing, and every other call on `target` raises MisuseError."""
    pid = os.getppid()

    def refuse(*_: object, **__: object) -> None:
        raise MisuseError(f"this {what} belongs to process {pid}: a forked child must open its own")

    for name in dir(type(target)):
        if not name.startswith("_") and callable(getattr(type(target), name)):
            setattr(target, name, refuse)
    target.close = lambda *_, **__: None  # type: ignore[attr-defined]


def _in_child() -> None:
    called, closed = list(_called), list(_closed)
    _called.clear()
    _closed.clear()
    for thing in called:
        with suppress(OSError):
            thing.forked()
    for thing in closed:
        with suppress(OSError):
            thing.close()


os.register_at_fork(after_in_child=_in_child)
