"""Reservations: extents for chunks that no tier holds, from the request to save them until the commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import wraps
from itertools import count
from typing import ParamSpec, TypeVar

from lmtier.core.cache_metrics import CacheMetrics
from lmtier.core.lower import LowerTier
from lmtier.core.match import CPU, Entry, EntryState, Reservation, check_chain
from lmtier.core.memory import MemoryPlace
from lmtier.errors import MisuseError
from lmtier.format.keys import is_state
from lmtier.format.layout import ChunkForm, Shard
from lmtier.format.objects import NO_MARK, Provenance, mark_room, now_ms
from lmtier.observe.follower import CacheObservers

_STEP = 128
"""New chunks for which others wait: less than a millisecond."""


P = ParamSpec("P")
R = TypeVar("R")


def at_once(in_steps: Callable[P, Generator[None, None, R]]) -> Callable[P, R]:
    """The same without steps."""

    @wraps(in_steps)
    def work(*args: P.args, **options: P.kwargs) -> R:
        steps = in_steps(*args, **options)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: R = end.value
                return result

    return work


class Reservations:
    def __init__(
        self, room: MemoryPlace, lower: Sequence[LowerTier], gauges: CacheMetrics, followers: CacheObservers
    ) -> None:
        self.open: dict[int, Reservation] = {}
        self._room, self._index, self._slab = room, room.index, room.slab
        self._lower = lower
        self._gauges = gauges
        self._followers = followers
        self._ids = count(1)

    def restore(self, reservation: Reservation) -> None:
        """A reservation of another process goes on here, with a lease for each shard that is to come."""
        reservation.id = next(self._ids)
        self.open[reservation.id] = reservation
        for entry in reservation.entries.values():
            for _ in reservation.pending_shards:
                self._index.lease(entry)

    def reserving(
        self, keys: Sequence[bytes], form: ChunkForm, first: int, ttl: float, by: str, most: int
    ) -> Generator[None, None, Reservation]:
        """Reserve extents for at most `most` missing chunks, from number `first` on, in small steps.

        They live `ttl` seconds. If it is closed before its end, nothing stays reserved.
        """
        provenance = Provenance(by, now_ms())
        check_chain(keys)
        if form.layout is None or form.layout.chunk_tokens != self._gauges.chunk_tokens:
            raise MisuseError("reserve needs a form with a layout of this cache's chunk_tokens")
        self._room.expire_among(keys)
        get, lower = self._index.get, self._lower
        wanted = [chunk >= first and get(key) is None for chunk, key in enumerate(keys)]
        if lower:  # a lower tier may have it, or get it, in a form that `form` can read
            wanted = [
                is_wanted and not any(tier.is_stored_or_storing(key, form) for tier in lower)
                for is_wanted, key in zip(wanted, keys, strict=True)
            ]
        missing = min(sum(wanted), most)
        new: dict[int, Entry] = {}
        reservation = Reservation(next(self._ids), form, new, 0, 0, set(form.shards), ttl=ttl)
        self.open[reservation.id] = reservation
        run: list[Entry] = []
        leading_stored = 0
        dropped_keys: list[bytes] = []
        drop_reason = ""  # a first chunk that could not be stored makes all later ones useless
        parent: Entry | None = None
        next_chunk = end = 0
        while next_chunk < len(keys):
            chunk, key, entry = next_chunk, keys[next_chunk], get(keys[next_chunk])
            next_chunk += 1
            if new and entry is None and chunk >= first and not wanted[chunk]:  # it left meanwhile, perhaps
                wanted[chunk] = not any(tier.is_stored_or_storing(key, form) for tier in lower)
            if entry is None and wanted[chunk]:
                end = max(end, next_chunk)
                while end < min(len(keys), chunk + _STEP) and wanted[end] and get(keys[end]) is None:
                    end += 1  # the end of the chunks that are missing, as far as a step goes
                drop_reason = drop_reason or ("too_many" if len(new) == most else "")
                added_entries: list[Entry] = []
                if not drop_reason:
                    if not len(new) % _STEP:
                        self._room.make(keys, min(_STEP, missing - len(new)) * form.slab_bytes, parent)
                    step_end = chunk + min(most - len(new), _STEP - len(new) % _STEP)
                    added_entries = self._add(keys[chunk : min(end, step_end)], form, parent)
                if not added_entries:
                    drop_reason = drop_reason or "no_room"
                    dropped_keys.append(key)
                    continue
                for added in added_entries:
                    added.provenance = provenance
                next_chunk = chunk + len(added_entries)
                new.update(zip(range(chunk, next_chunk), added_entries, strict=True))
                run += added_entries
                parent = added_entries[-1]
                if not len(new) % _STEP:
                    try:
                        yield
                    except GeneratorExit:
                        for shard in form.shards:
                            self.abort(reservation, shard)
                        raise
                    end = next_chunk  # others may have stored the next ones meanwhile
                    if added_entries[-1].state is EntryState.GONE:  # by a clear with `force`
                        parent = None
            elif entry is not None and chunk >= first and not entry.form.serves(form):
                drop_reason = drop_reason or "foreign"  # this engine cannot read the chunk that has its key
                dropped_keys.append(key)
            else:
                leading_stored += not new and not dropped_keys
                if entry is not None:
                    if parent is not None:  # a state's chunk comes without those before it
                        self._index.link(entry, parent)
                    run.append(entry)
                    parent = entry
        # A clear may have removed some between the steps.
        self._index.refresh([entry for entry in run if entry.state is not EntryState.GONE])
        if not (keys and is_state(keys[-1])):
            self._gauges.skip(len(keys) - len(dropped_keys) - len(new))
        self._drop(dropped_keys, drop_reason, form)
        reservation.leading_stored, reservation.dropped = leading_stored, len(dropped_keys)
        if not new:
            reservation.pending_shards.clear()
            del self.open[reservation.id]
        return reservation

    def _add(self, keys: Sequence[bytes], form: ChunkForm, parent: Entry | None) -> list[Entry]:
        """Add as many of these missing chunks as find room at once, in their order."""
        offsets = self._room.take(keys, form)
        if not offsets and (chunk_offsets := self._room.allocate(keys[0], form, parent)) is not None:
            offsets = [chunk_offsets]
        added = keys[: len(offsets)]
        run = self._index.add_run(added, form, form.slab_bytes, EntryState.FILLING, parent, len(form.shards))
        for entry, chunk_offsets in zip(run, offsets, strict=True):
            entry.offsets = chunk_offsets
        return run

    def commit(
        self, reservation: Reservation, shard: Shard | None, prints: Mapping[int, bytes] | None
    ) -> None:
        layout = reservation.form.layout
        longest = max(map(len, (prints or {}).values()), default=0)
        # A tier that seals has the least room: there each store would fail, as if the storage did.
        if layout is not None and longest > (room := mark_room(layout, is_sealed=True)):
            raise MisuseError(
                f"a mark has {longest} bytes, but a header with this layout has room for {room}; shorten it"
            )
        shard_number = self._finish(reservation, shard)
        for chunk, mark in (prints or {}).items():
            marks = reservation.marks.setdefault(chunk, [NO_MARK] * len(reservation.form.shards))
            marks[shard_number] = mark
        self._close_if_finished(reservation)

    def abort(self, reservation: Reservation, shard: Shard | None) -> None:
        self._finish(reservation, shard)
        if not reservation.aborted:
            reservation.aborted = True
            for entry in reservation.entries.values():
                if entry.state is not EntryState.GONE:
                    self._room.take_out(entry)
            self._drop([entry.key for entry in reservation.entries.values()], "aborted", reservation.form)
        self._close_if_finished(reservation)

    def _drop(self, keys: Sequence[bytes], why: str, form: ChunkForm) -> None:
        """Count chunks that should be stored in the slab and are not."""
        if keys:
            self._gauges.drop(keys, why, form)
            for notify in self._followers.not_stored:
                notify(CPU, keys, why)

    def _finish(self, reservation: Reservation, shard: Shard | None) -> int:
        shards = reservation.form.shards
        if shard is None:
            if len(shards) != 1:
                raise MisuseError(f"this reservation has {len(shards)} shards: pass the one that is done")
            shard = shards[0]
        if not reservation.entries:
            return 0
        if shard not in reservation.pending_shards:
            raise MisuseError(f"shard {shard} was committed or aborted before, or is not of this reservation")
        if self.open.get(reservation.id) is not reservation:
            raise MisuseError("commit or abort of a reservation that another cache made")
        reservation.pending_shards.remove(shard)
        return shards.index(shard)

    def _close_if_finished(self, reservation: Reservation) -> None:
        """Each entry was leased once per shard; end one of them, and with the last one make it visible."""
        if not reservation.entries:
            return
        if reservation.pending_shards or reservation.aborted:
            self._room.release(*reservation.entries.values())
        else:
            self._publish(reservation)
        if not reservation.pending_shards:
            del self.open[reservation.id]

    def _publish(self, reservation: Reservation) -> None:
        form = reservation.form
        for chunk, marks in reservation.marks.items():
            if chunk in reservation.entries:
                reservation.entries[chunk].marks = tuple(marks)
        entries: list[Entry] = []
        cleared: list[Entry] = []
        for entry in reservation.entries.values():
            (cleared if entry.state is EntryState.GONE else entries).append(entry)
        for entry in cleared:  # by a clear with `force`, while they were written
            self._room.release(entry)
            self._drop([entry.key], "cleared", form)
        for entry in () if form.is_whole_pages else entries:
            for offset, nbytes in zip(entry.offsets, form.sizes, strict=True):
                self._slab.clear_padding(offset, nbytes)
        self._room.live_until(self._room.clock() + reservation.ttl, *entries)
        self._index.make_ready(*entries)
        for tier in self._lower:
            for entry in entries:
                tier.on_ready(entry)
        self._gauges.store([entry.key for entry in entries])
