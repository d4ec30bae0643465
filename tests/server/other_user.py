"""Another user of this host, in a process of its own. Only root can become one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

USER = 64_999
PATIENCE = 60.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
_FORKS = multiprocessing.get_context("forkserver")


def as_user(user: int, function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns in a process of that user, which imports nothing more."""
    ours, theirs = _FORKS.Pipe(duplex=False)
    child = _FORKS.Process(target=_run, args=(user, theirs, function, args), daemon=True)
    child.start()
    theirs.close()
    with ours:
        assert ours.poll(PATIENCE), "it takes too long"
        told = ours.recv()  # EOFError: it failed, and its traceback is in the output
    child.join(PATIENCE)
    return told


def _run(user: int, told: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    told.send(function(*args))
