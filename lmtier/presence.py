"""What is surely not here: counts of keys in memory that other processes read, so that they need not ask.

Many keys share a count. None at all says for certain that a chunk is in no tier, any other number nothing.
The owner writes, readers look without any lock: who looks too early, or while a count changes, takes
for there what is not, or misses once what came just then. Rejected: a Bloom filter of several hashes, for
which a reader touches as many pages as there are hashes, and pages are what a cold look costs.
"""

from __future__ import annotations

import fcntl
import os
import weakref

from lmtier import forks
from lmtier.slab import SEALS, SHARED, Memory

SLOTS = 1 << 22
"""Bytes. With a million chunks, four of five keys that are not here are known not to be."""
NBYTES = SLOTS + 4096
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of Linux 5.1, which Python does not name
_FULL = 255  # such a count is not known any more, and stays


def slot(key: bytes) -> int:
    """From the middle of the hash: the first bytes are the model's and the tenant's."""
    return int.from_bytes(key[16:19], "little") % SLOTS


class Presence:
    def __init__(self) -> None:
        self.fd = os.memfd_create("lmtier-presence", SHARED)
        self._close = weakref.finalize(self, os.close, self.fd)
        os.truncate(self.fd, NBYTES)
        self._memory = Memory(NBYTES, self.fd)
        self._counts = self._memory.view
        # From here on no other process can write: a stray byte of one reader would make all others miss.
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS | _SEAL_FUTURE_WRITE)
        except OSError:  # an older kernel has no such seal: readers map it for reading all the same
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)

        forks.tell(self)

    def forked(self) -> None:
        self._memory.forget()
        self._close()

    def add(self, key: bytes) -> None:
        counts, at = self._counts, slot(key)
        if counts[at] < _FULL:
            counts[at] += 1

    def drop(self, key: bytes) -> None:
        counts, at = self._counts, slot(key)
        if counts[at] < _FULL:
            counts[at] -= 1

    def trust(self) -> None:
        """Every tier has told by now what it holds."""
        self._counts[SLOTS] = 1


class Look:
    """The same, as another process sees it."""

    def __init__(self, fd: int) -> None:
        self._counts = Memory(NBYTES, fd, is_writable=False).view

    def lacks(self, key: bytes) -> bool:
        """Whether this chunk is certainly in no tier."""
        counts = self._counts
        return not counts[slot(key)] and bool(counts[SLOTS])
