"""What clients' requests make the server remember, in bytes: one count, and one bound for all of them.

A connection counts with what it has received of a request, its unsent answers, its queue since MULTI, its
transaction, and the names that it watches; an engine's session with its matches and forms. Values and KV are
in the slab, which has its own bound, and so have the journal, the book of sessions, and what is kept of
prompts, models and lookups.

If all of it together is more than the bound, the clients that take most are closed. So however many they are,
a client that takes less than they do is not disturbed.
"""

from __future__ import annotations

from collections.abc import Hashable

MAX_CLIENT_BYTES = 256 << 20
"""The most bytes that are remembered for all clients."""
MAX_SESSION_BYTES = MAX_CLIENT_BYTES // 2
"""The most bytes for one session. An engine on this host is refused more, as it cannot be closed."""
KEY_OVERHEAD = 112
"""The bytes of a key in a match."""
WATCHED_NAME_OVERHEAD = 512
"""The bytes of a watched name, at least."""
OBJECT_OVERHEAD = 1024
"""The bytes of a match, of a form and of a session, without their keys."""
PIECE_OVERHEAD = 320
"""The bytes of a piece of an answer that waits to be sent, beside its own."""
_LESS = (
    7 / 8
)  # the part of the bound that is reached again by closing clients: to look for them takes a while


class Ledger:
    def __init__(self) -> None:
        self._of: dict[Hashable, int] = {}
        self.total = 0

    def note(self, holder: Hashable, nbytes: int) -> None:
        """The holder takes so many bytes now."""
        self.total += nbytes - self._of.get(holder, 0)
        if nbytes:
            self._of[holder] = nbytes
        else:
            self._of.pop(holder, None)

    @property
    def is_over_limit(self) -> bool:
        return self.total > MAX_CLIENT_BYTES

    @property
    def is_well_below_limit(self) -> bool:
        """Whether enough clients are closed."""
        return self.total <= MAX_CLIENT_BYTES * _LESS

    def largest(self) -> list[Hashable]:
        """The holders, those with most first."""
        return sorted(self._of, key=self._of.__getitem__, reverse=True)
