"""Reservations: extents for chunks that no tier holds, from the request to save them until the commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import count
from typing import ParamSpec, TypeVar

from lmtier.core.cache_metrics import CacheMetrics
from lmtier.core.grant import Grant
from lmtier.core.lower import LowerTier
from lmtier.core.match import CPU, Entry, EntryState, check_chain, placement_of
from lmtier.core.memory import MemoryPlace
from lmtier.core.placement import Placement
from lmtier.errors import MisuseError
from lmtier.format.keys import is_state
from lmtier.format.layout import ChunkForm, Shard
from lmtier.format.objects import NO_MARK, Provenance, mark_room, now_ms
from lmtier.observe.follower import CacheObservers
from lmtier.rules.lifetimes import FOREVER

_STEP = 128
"""New chunks for which others wait: less than a millisecond."""


P = ParamSpec("P")
R = TypeVar("R")


def at_once(in_steps: Callable[P, Generator[object, None, R]]) -> Callable[P, R]:
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


@dataclass(eq=False, slots=True)
class Reservation:
    """Chunks whose extents are being filled."""

    grant: Grant
    """What its writers hold."""
    entries: dict[int, Entry]
    """Maps a chunk's number to its entry, which is FILLING. Shard n goes to `entry.offsets[n]`."""
    pending_shards: set[Shard]
    marks: dict[int, list[bytes]] = field(default_factory=dict)
    is_aborted: bool = False
    ttl: float = FOREVER
    """Seconds for which its chunks may be used, from the commit of the last shard."""

    @property
    def form(self) -> ChunkForm:
        return self.grant.form


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

    def restore(self, grant: Grant, entries: dict[int, Entry], shards: set[Shard]) -> Reservation:
        """What another process granted goes on here, with a lease for each shard that is to come."""
        reservation = Reservation(replace(grant, id=next(self._ids)), entries, shards)
        self.open[reservation.grant.id] = reservation
        for entry in entries.values():
            for _ in shards:
                self._index.lease(entry)
        return reservation

    def unfinished(self, grant: Grant) -> list[Shard]:
        """The shards that were neither committed nor aborted."""
        return sorted(self.open[grant.id].pending_shards) if grant.id in self.open else []

    def reserving(
        self, keys: Sequence[bytes], form: ChunkForm, first: int, ttl: float, by: str, most: int
    ) -> Generator[None, None, Grant]:
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
        number = next(self._ids)
        reservation = Reservation(Grant(number, (), Placement(form, (), ())), new, set(form.shards), ttl=ttl)
        self.open[number] = reservation
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
                            reservation.pending_shards.remove(shard)
                            self._abort(reservation)
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
        if not new:
            del self.open[number]
        grant = reservation.grant = Grant(
            number if new else 0,
            tuple(new),
            placement_of(form, tuple(keys[chunk] for chunk in new), new.values()),
            leading_stored=leading_stored,
            dropped=len(dropped_keys),
        )
        return grant

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

    def commit(self, grant: Grant, shard: Shard | None, prints: Mapping[int, bytes] | None) -> None:
        if not grant.chunks:
            return
        layout = grant.form.layout
        longest = max(map(len, (prints or {}).values()), default=0)
        # A tier that seals has the least room: there each store would fail, as if the storage did.
        if layout is not None and longest > (room := mark_room(layout, is_sealed=True)):
            raise MisuseError(
                f"a mark has {longest} bytes, but a header with this layout has room for {room}; shorten it"
            )
        reservation, shard_number = self._finish(grant, shard)
        for chunk, mark in (prints or {}).items():
            marks = reservation.marks.setdefault(chunk, [NO_MARK] * len(grant.form.shards))
            marks[shard_number] = mark
        self._close_if_finished(reservation)

    def abort(self, grant: Grant, shard: Shard | None) -> None:
        if grant.chunks:
            self._abort(self._finish(grant, shard)[0])

    def _abort(self, reservation: Reservation) -> None:
        """One of its shards will not come."""
        if not reservation.is_aborted:
            reservation.is_aborted = True
            for entry in reservation.entries.values():
                if entry.state is not EntryState.GONE:
                    self._room.discard(entry.key)
            self._drop([entry.key for entry in reservation.entries.values()], "aborted", reservation.form)
        self._close_if_finished(reservation)

    def _drop(self, keys: Sequence[bytes], why: str, form: ChunkForm) -> None:
        """Count chunks that should be stored in the slab and are not."""
        if keys:
            self._gauges.drop(keys, why, form)
            for notify in self._followers.not_stored:
                notify(CPU, keys, why)

    def _finish(self, grant: Grant, shard: Shard | None) -> tuple[Reservation, int]:
        """The reservation of a grant with chunks, without this shard; and the shard's number."""
        reservation, shard = self.open.get(grant.id), grant.shard(shard)
        if reservation is None or reservation.grant is not grant or shard not in reservation.pending_shards:
            raise MisuseError(
                f"shard {shard} was committed or aborted before, or another cache made this grant"
            )
        reservation.pending_shards.remove(shard)
        return reservation, grant.form.shards.index(shard)

    def _close_if_finished(self, reservation: Reservation) -> None:
        """Each entry was leased once per shard; end one of them, and with the last one make it visible."""
        if reservation.pending_shards or reservation.is_aborted:
            self._room.release(*reservation.entries.values())
        else:
            self._publish(reservation)
        if not reservation.pending_shards:
            del self.open[reservation.grant.id]

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
