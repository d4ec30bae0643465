"""A table of counts in shared memory. It shows other processes which keys are surely absent.

Many keys share a count. A count of 0 means that a chunk is in no tier; any other count means "maybe". The
owner writes, and readers look without a lock. A racing reader may see a false "maybe", or miss a key added
at that moment. Rejected: a Bloom filter of several hashes. Its reader touches one page per hash, and pages
are the cost of a cold look.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from lmtier import forks
from lmtier.core.slab import SEALS, SHARED, Memory

SLOTS = 1 << 22
"""Bytes. With a million chunks, the table identifies four of five absent keys."""
NBYTES = SLOTS + 4096
_AT_ONCE = 4096  # keys
_FULL = 255  # the count has overflowed and stays at this value


def slot(key: bytes) -> int:
    """Taken from the middle of the hash, because the first bytes are the model's and the tenant's."""
    return int.from_bytes(key[16:20], "little") % SLOTS


def _slots(keys: Sequence[bytes]) -> list[int]:
    if len(keys) == 1:  # numpy takes many times as long for one
        return [slot(keys[0])]
    found: list[int] = (np.frombuffer(b"".join(keys), "<u4")[4::8] % SLOTS).tolist()
    return found


class Presence:
    def __init__(self, own: int | None = None) -> None:
        """`own`: the table of a server before this one, which needs it until `begin`."""
        self.own = os.memfd_create("lmtier-presence", SHARED) if own is None else own
        """Writable: only for the server that takes over from this one."""
        if own is None:
            os.truncate(self.own, NBYTES)
            fcntl.fcntl(self.own, fcntl.F_ADD_SEALS, SEALS)
            os.fchmod(self.own, 0o400)  # nor can a reader open it again to write, unless it is root
        # Others get a descriptor that cannot write: a stray write of one reader would make all others miss.
        # Rejected: F_SEAL_FUTURE_WRITE. The next server could not write either, and engines that go on would
        # look at a table that no server keeps.
        self.fd = os.open(f"/proc/self/fd/{self.own}", os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, _close, self.own, self.fd)
        self._memory = Memory(NBYTES, self.own)
        self._counts = self._memory.view
        forks.call_in_child(self)

    def forked(self) -> None:
        self._memory.forget()
        self._close()

    def add(self, *keys: bytes) -> None:
        counts = self._counts
        for slot_number in _slots(keys):
            if counts[slot_number] < _FULL:
                counts[slot_number] += 1

    def drop(self, *keys: bytes) -> None:
        counts = self._counts
        for slot_number in _slots(keys):
            if counts[slot_number] < _FULL:
                counts[slot_number] -= 1

    def begin(self, keys: Iterable[bytes]) -> None:
        """Begin with these keys. Readers have to ask until `trust`."""
        self._counts[SLOTS] = 0
        self._counts[:SLOTS] = bytes(SLOTS)
        key_stream = iter(keys)
        while batch := tuple(islice(key_stream, _AT_ONCE)):
            self.add(*batch)

    def trust(self) -> None:
        """Every tier knows what it holds now, so a count of 0 can be trusted."""
        self._counts[SLOTS] = 1


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


class PresenceReader:
    """The table, as another process sees it."""

    def __init__(self, fd: int) -> None:
        self._counts = Memory(NBYTES, fd, is_writable=False).view

    def lacks(self, key: bytes) -> bool:
        """Whether this chunk is certainly in no tier."""
        counts = self._counts
        return not counts[slot(key)] and bool(counts[SLOTS])
