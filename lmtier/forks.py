"""What a forked child gets of its parent: nothing that another would wait for, and nothing that half works.

A child has copies of its parent's sockets, locks and memory, and none of its threads. While it lives, a
server does not see that its parent has died, and nobody else gets its parent's directory; a call on a cache
whose threads are not there never ends. So in a child all of that is closed at once. Only `os.fork` is seen,
and what uses it; a fork in C must be followed by an exec.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

from lmtier.errors import MisuseError


class Forked(Protocol):
    def forked(self) -> None:
        """Called in a child: let go of what the parent has."""


class Closed(Protocol):
    def close(self) -> None: ...


_told: WeakSet[Any] = WeakSet()
_closed: WeakSet[Any] = WeakSet()


def tell(thing: Forked) -> None:
    """Have `thing.forked()` called in every child."""
    _told.add(thing)


def close_in_child(thing: Closed) -> None:
    """A socket, or a file: it is closed in every child, which ends nothing for the parent."""
    _closed.add(thing)


def bury(thing: object, what: str) -> None:
    """From now on `close` of `thing` does nothing, and whatever else it is asked is refused."""
    pid = os.getppid()

    def refuse(*_: object, **__: object) -> None:
        raise MisuseError(f"this {what} is that of process {pid}: a forked child opens its own")

    for name in dir(type(thing)):
        if not name.startswith("_") and callable(getattr(type(thing), name)):
            setattr(thing, name, refuse)
    thing.close = lambda *_, **__: None  # type: ignore[attr-defined]


def _in_child() -> None:
    told, closed = list(_told), list(_closed)
    _told.clear()
    _closed.clear()
    for thing in told:
        with suppress(OSError):
            thing.forked()
    for thing in closed:
        with suppress(OSError):
            thing.close()


os.register_at_fork(after_in_child=_in_child)
