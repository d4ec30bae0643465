"""The server's requests to the system: scheduling, core dumps, open files, and systemd's notification."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import socket
from contextlib import suppress

from lmtier.errors import log

_PR_SET_DUMPABLE = 4
_FILES = 256  # the tiers' files, and the files that Python has open


def give_way() -> None:
    """Let an engine that wakes this server keep its core; the server takes a free one.

    By default the kernel may run the server in place of the engine, in the middle of a step, although the
    engine does not wait. A scheduling policy other than the default (chrt) is kept. Threads inherit it.
    """
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def leave_no_core() -> None:
    """No core dump of this process, and no debugger but root's: values, prompts, tokens and keys are in it.

    Marking buffers is not enough: Python and OpenSSL copy what arrives. A limit of 0 bytes for cores does not
    count where a program takes them. A crash leaves the stacks of all threads in the log instead.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        log.warning("lmtier: core dumps cannot be turned off: %s", os.strerror(ctypes.get_errno()))
    faulthandler.enable(file=2)


def allow_files(clients: int) -> int:
    """How many of so many clients may connect: each takes an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files_needed = clients + _FILES
    if soft < files_needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(files_needed, hard), hard))
        if hard < files_needed:
            log.warning(
                "lmtier: only %d files may be open, which is less than clients=%d need", hard, clients
            )
    return max(1, min(clients, hard - _FILES))


def tell_systemd(state: str) -> None:
    """Send the state that Type=notify waits for."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
