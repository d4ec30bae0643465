"""What a tier has stored under the keys of values that wait to be written, until these overwrite it."""

from __future__ import annotations

from collections.abc import Set

from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState
from lmtier.core.write_queue import WriteQueue


class Outdated:
    """These entries have left the index, so this process does not find them. After a kill a restart may."""

    def __init__(self) -> None:
        self.nbytes = 0
        """The bytes of those that no job uses now."""
        self._entries: dict[bytes, Entry] = {}
        self._overwritten: dict[bytes, Entry] = {}
        """Copies whose newer value is being written now."""

    def __contains__(self, entry: Entry) -> bool:
        return self._entries.get(entry.key) is entry

    def add(self, entry: Entry) -> None:
        """If a job still uses it, add it again at the end of the job."""
        self._entries[entry.key] = entry
        if not entry.leases:
            self.nbytes += entry.nbytes

    def pop(self, key: bytes) -> Entry | None:
        """Forget the entry of this key. Returns it, unless there is none, or a job still uses it."""
        entry = self._entries.pop(key, None)
        if entry is None or entry.leases:
            return None
        self.nbytes -= entry.nbytes
        return entry

    def pop_all(self) -> list[Entry]:
        return [entry for key in list(self._entries) if (entry := self.pop(key)) is not None]

    def begin(self, key: bytes) -> None:
        """A newer value is being written over it, if there is one."""
        if (entry := self.pop(key)) is not None:
            self._overwritten[key] = entry

    def end(self, key: bytes) -> Entry | None:
        """The write has ended."""
        return self._overwritten.pop(key, None)

    def copies(self) -> list[Entry]:
        """As they would stand in the index."""
        return [
            Entry(e.key, e.form, e.nbytes, EntryState.READY, e.last_used_ns) for e in self._entries.values()
        ]

    def check(self, index: Index, writes: WriteQueue, going: Set[bytes]) -> None:
        for key in self._entries:
            assert key in writes, "an old value that nothing overwrites"
            assert key not in index, "an old value beside a new one"
        unleased_bytes = sum(entry.nbytes for entry in self._entries.values() if not entry.leases)
        assert self.nbytes == unleased_bytes, "the bytes of old values are wrong"
        assert self._overwritten.keys() <= going, "an old value whose writer is gone"
