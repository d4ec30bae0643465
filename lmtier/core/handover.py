"""What one cache leaves to the next: its handover file, its memory and the locks of its tiers.

The file lists the slab's chunks in their order of eviction, with leases, lifetimes and pins, and what engines
hold. Nothing here copies KV: the next cache maps the same memory. A tier below tells what still waits to be
written. If it is small, it tells what it holds. If not, the next cache scans it, under the lock that it gets.

An extent that an engine may still touch is never free in the next cache: its match or reservation goes over,
also if its chunk was deleted meanwhile (GONE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lmtier.core.grant import Grant
from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState, Lookup, placement_of
from lmtier.core.owned import OwnedTier
from lmtier.core.placement import keys_of, read_form, write_form
from lmtier.format.handover_file import HandoverFile, HandoverFileError
from lmtier.format.keys import KEY_BYTES
from lmtier.format.layout import ChunkForm, Shard, padded
from lmtier.format.objects import Provenance
from lmtier.rules.worth import Cost
from lmtier.threads import collector_paused

if TYPE_CHECKING:
    from lmtier.core.cache import Cache

MOST_BELOW = 10_000
"""The most chunks of a tier below in the file: each takes some µs in which no server answers."""
_PLAIN = ("asked_tokens", "deadline", "cut_reason", "found", "settled", "asker", "limit", "patience",
          "engine_tokens", "decided", "expected", "sources")  # fmt: skip
"""The fields of a match that JSON holds as they are."""


class FormTable:
    """A table of forms: the file names a form by its number."""

    def __init__(self, dumped: Sequence[Sequence[str]] = ()) -> None:
        self._forms = [read_form([part.encode() for part in form_parts]) for form_parts in dumped]
        self._numbers = {form: number for number, form in enumerate(self._forms)}

    def number(self, form: ChunkForm) -> int:
        number = self._numbers.setdefault(form, len(self._forms))
        if number == len(self._forms):
            self._forms.append(form)
        return number

    def __getitem__(self, number: int) -> ChunkForm:
        return self._forms[number]

    def dump(self) -> list[list[str]]:
        return [[part.decode() for part in write_form(form)] for form in self._forms]


# ---- telling


class HandoverWriter:
    """Writes the file of a cache that stands still. `file.facts` and `forms` are open to the owner."""

    def __init__(self, cache: Cache) -> None:
        self.file = HandoverFile()
        self.forms = FormTable()
        self._numbers: dict[Entry, int] = {}
        self._entries: list[Entry] = []
        self._cache = cache

    def write_cache(self, matches: Sequence[Lookup], saves: Sequence[Grant]) -> None:
        """Tell the slab, and what of it engines hold. Chunks that none of `saves` fills are left out."""
        index, open_ones = self._cache.index, self._cache.reservations.open
        filling = dict.fromkeys(each for grant in saves for each in open_ones[grant.id].entries.values())
        leased_entries = [entry for match in matches for entry in _entries_of(match)] + [*filling]
        order = dict.fromkeys(each for each in index.order() if each.state is not EntryState.GONE)
        order |= dict.fromkeys(index.entries_now())
        handed_entries = [each for each in order if each.state is EntryState.READY or each in filling]
        self._entries = list(dict.fromkeys([*handed_entries, *leased_entries]))
        self._numbers = {entry: number for number, entry in enumerate(self._entries)}
        self._tell_entries("", self._entries, index)
        pinning = self._cache.pinning
        pins = [
            [pin.name, b"".join(pin.keys).hex(), pin.end, pins is pinning.hinted]
            for pins in (pinning.pins, pinning.hinted)
            for pin in pins
        ]
        tiers = list[dict[str, str]]()
        for spec, tier in zip(self._cache.config.cache_tiers[1:], self._cache.lower, strict=True):
            tiers.append({"place": spec.base_url, "writes": b"".join(tier.waiting_writes).hex()})
            if isinstance(tier, OwnedTier) and tier.is_warm and len(tier.index) <= MOST_BELOW:
                order = dict.fromkeys(tier.index.order()) | dict.fromkeys(tier.index.entries_now())
                self._tell_entries(spec.base_url, [*tier.outdated.copies(), *order], tier.index)
        self.file.facts |= {"capacity": self._cache.slab.capacity, "pins": pins, "tiers": tiers}
        self.file.facts["dropped"] = self._cache.forgotten_tenants.dropped_generations()

    def _tell_entries(self, prefix: str, entries: list[Entry], index: Index) -> None:
        """`prefix`: of a tier; empty: the slab."""
        columns, expiries = self.file.columns, index.expiries
        numbers = {entry: number for number, entry in enumerate(entries)}
        makers: dict[str, int] = {}
        rows = [
            (
                self.forms.number(each.form),
                -1 if each.parent is None else numbers.get(each.parent, -1),
                int(each.state),
                each.is_reused,
                makers.setdefault(each.provenance.by, len(makers)),
                each.provenance.at,
                each.nbytes,
                each.last_used_ns,
            )
            for each in entries
        ]
        columns[prefix + "keys"] = b"".join(each.key for each in entries)
        columns[prefix + "rows"] = np.array(rows, "<i8").tobytes()
        columns[prefix + "ends"] = np.array([expiries.expiry(each) for each in entries], "<f8").tobytes()
        columns[prefix + "offsets"] = np.array(
            [offset for each in entries for offset in each.offsets], "<u8"
        ).tobytes()
        prints = {n: [mark.hex() for mark in each.marks] for n, each in enumerate(entries) if each.marks}
        pinned = [n for n, each in enumerate(entries) if each in index.pinned]
        details = {"makers": list(makers), "prints": list(prints.items()), "pinned": pinned}
        self.file.facts[prefix + "others"] = details

    def match(self, match: Lookup) -> dict[str, Any]:
        if match.pending_lookups or match.pending_loads:
            raise HandoverFileError("a match still waits for a tier")
        record: dict[str, Any] = {name: getattr(match, name) for name in _PLAIN}
        record["keys"] = b"".join(match.keys).hex()
        record["form"] = self.forms.number(match.form)
        record["ends"] = None if match.state_form is None else self.forms.number(match.state_form)
        record["end"] = None if match.state_match is None else self.match(match.state_match)
        record["run"] = [self._numbers[entry] for entry in match.run]
        record["cost"] = None if match.cost is None else list(match.cost)
        record["decision"] = match.decision
        record["states"] = list(match.states.items())
        return record

    def reservation(self, grant: Grant) -> dict[str, Any]:
        reservation = self._cache.reservations.open[grant.id]
        return {
            "form": self.forms.number(grant.form),
            "entries": [[chunk, self._numbers[entry]] for chunk, entry in reservation.entries.items()],
            "known": grant.leading_stored,
            "dropped": grant.dropped,
            "left": [str(shard) for shard in reservation.pending_shards],
            "prints": [[n, [mark.hex() for mark in marks]] for n, marks in reservation.marks.items()],
            "aborted": reservation.is_aborted,
            "ttl": reservation.ttl,
        }


def _entries_of(match: Lookup) -> list[Entry]:
    return match.run if match.state_match is None else [*match.run, *match.state_match.run]


# ---- beginning from them


@dataclass(slots=True)
class Handover:
    """What a cache begins with, in place of nothing."""

    file: HandoverFile
    slab: int
    """The descriptor of its memory."""
    presence: int | None = None
    """The descriptor of its table of presence, writable."""
    locks: Mapping[str, int] = field(default_factory=dict)
    """The locked files of tiers, by `TierSpec.place`."""
    forms: FormTable = field(init=False)
    _entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forms = FormTable(self.file.facts.get("forms", ()))

    @property
    def capacity(self) -> int:
        return int(self.file.facts["capacity"])

    def enter(self, cache: Cache) -> None:
        """Fill the empty slab and index of `cache`. HandoverFileError: the file contradicts itself.

        If it fails, the cache has left: its tiers are closed, and the other process has all that it had.
        """
        try:
            with collector_paused():
                self._enter(cache)
        except BaseException as error:
            cache.close_after_handover()
            if isinstance(error, ValueError | KeyError | TypeError | IndexError):
                raise HandoverFileError(f"the handover file contradicts itself: {error!r}") from None
            raise

    def _enter(self, cache: Cache) -> None:
        facts, index, allocated = self.file.facts, cache.index, dict[int, int]()
        places = [("", index)]
        slab_rows = self._read("")
        for entry, _, _ in slab_rows:
            if entry.nbytes != entry.form.slab_bytes:
                raise ValueError(f"{entry.nbytes} bytes for a chunk of {entry.form.slab_bytes}")
            for offset, size in zip(entry.offsets, entry.form.sizes, strict=True):
                if offset in allocated:
                    raise ValueError(f"two chunks at {offset}")
                allocated[offset] = padded(size)
        cache.slab.restore(allocated)
        self._entries = [entry for entry, _, _ in slab_rows]
        _resume(index, slab_rows)
        cache.memory.deleted_in_use.update(
            entry for entry, _, _ in slab_rows if entry.state is EntryState.GONE
        )
        cache.forgotten_tenants.restore(facts.get("dropped", {}))  # without: all leave once more
        writes = {tier_facts["place"]: _keys(tier_facts["writes"]) for tier_facts in facts["tiers"]}
        for spec, tier in zip(cache.config.cache_tiers[1:], cache.lower, strict=True):
            if isinstance(tier, OwnedTier) and self.knows(spec.base_url):
                _resume(tier.index, self._read(spec.base_url))
                places.append((spec.base_url, tier.index))
                tier.finish_restore()
            for key in writes.get(spec.base_url, ()):
                queued_entry = index.get(key)
                if queued_entry is not None and queued_entry.state is not EntryState.READY:
                    queued_entry = None
                if isinstance(tier, OwnedTier) and index.is_record(key):
                    # If it has left the slab, its turn to be written deletes the copy that it outdated.
                    if (queued_value := queued_entry or tier.index.get(key)) is not None:
                        tier.write_on(queued_value)
                    elif not tier.is_warm:  # the scan may find a copy
                        tier.discard(key)
                elif queued_entry is not None:
                    tier.queue_write(queued_entry)
        # Last, so that nothing is pinned before it is known what was. Those of hints first: all pins together
        # may take more than a quarter.
        for pin in facts["pins"]:
            pins = cache.pinning.hinted if pin[3] else cache.pinning.pins
            pins.put(pin[0], _keys(pin[1]), pin[2])
        for prefix, place_index in places:
            keys = keys_of(bytes(self.file.column(prefix + "keys")))
            pinned = [keys[number] for number in facts[prefix + "others"]["pinned"]]
            for key in sorted(pinned, key=place_index.keys_to_pin.__contains__):
                if (kept := place_index.get(key)) is not None and kept.state is EntryState.READY:
                    place_index.pin(kept)

    def knows(self, place: str) -> bool:
        """Whether the file lists what this tier holds, and only this process will write there."""
        return place in self.locks and place + "keys" in self.file.columns

    def _read(self, place: str) -> list[tuple[Entry, int, float]]:
        """The entries of a place, each with the number of its parent and its end."""
        file, details = self.file, self.file.facts[place + "others"]
        keys = keys_of(bytes(file.column(place + "keys")))
        rows = np.frombuffer(file.column(place + "rows"), "<i8").reshape(-1, 8).tolist()
        ends = np.frombuffer(file.column(place + "ends"), "<f8").tolist()
        offsets = iter(np.frombuffer(file.column(place + "offsets"), "<u8").tolist())
        makers, entries = details["makers"], list[tuple[Entry, int, float]]()
        if not len(keys) == len(rows) == len(ends):
            raise ValueError("the columns have different lengths")
        for key, (form, parent, state, seen, by, at, nbytes, used), end in zip(keys, rows, ends, strict=True):
            entry = Entry(key, self.forms[form], nbytes, EntryState(state), used)
            entry.is_reused, entry.provenance = bool(seen), Provenance(makers[by], at)
            entry.offsets = () if place else tuple(next(offsets) for _ in entry.form.shards)
            entries.append((entry, parent, end))
        for number, marks in details["prints"]:
            entries[number][0].marks = tuple(map(bytes.fromhex, marks))
        return entries

    def match(self, dumped: Mapping[str, Any], cache: Cache) -> Lookup:
        """A match that an engine holds: its leases go on."""
        run = [self._entries[number] for number in dumped["run"]]
        state_form = None if dumped["ends"] is None else self.forms[dumped["ends"]]
        match = Lookup(_keys(dumped["keys"]), 0.0, state_form, id=0, form=self.forms[dumped["form"]], run=run)
        for name in _PLAIN:
            setattr(match, name, dumped[name])
        match.cost = None if dumped["cost"] is None else Cost(*dumped["cost"])
        match.decision = (
            None if dumped["decision"] is None else (dumped["decision"][0], dumped["decision"][1])
        )
        match.states = {int(chunks): tier for chunks, tier in dumped["states"]}
        if dumped["end"] is not None:
            match.state_match = self.match(dumped["end"], cache)
            match.state_match.prompt_match = match
        cache.restore(match)
        return match

    def reservation(self, dumped: Mapping[str, Any], cache: Cache) -> Grant:
        """A reservation that an engine fills: it is still its own."""
        entries = {chunk: self._entries[number] for chunk, number in dumped["entries"]}
        pending_shards = {shard for text in dumped["left"] if (shard := Shard.parse(text)) is not None}
        form = self.forms[dumped["form"]]
        places = placement_of(form, tuple(entry.key for entry in entries.values()), entries.values())
        grant = Grant(0, tuple(entries), places, None, dumped["known"], dumped["dropped"])
        reservation = cache.reservations.restore(grant, entries, pending_shards)
        reservation.marks = {n: [bytes.fromhex(mark) for mark in marks] for n, marks in dumped["prints"]}
        reservation.is_aborted, reservation.ttl = dumped["aborted"], dumped["ttl"]
        return reservation.grant


def _keys(text: str) -> tuple[bytes, ...]:
    keys = keys_of(bytes.fromhex(text))
    if keys and len(keys[-1]) != KEY_BYTES:
        raise ValueError("a key was cut")
    return keys


def _resume(index: Index, rows: Sequence[tuple[Entry, int, float]]) -> None:
    for entry, parent_number, end in rows:
        index.restore(entry)
        if entry.state is not EntryState.GONE:
            index.link(entry, rows[parent_number][0] if parent_number >= 0 else None)
            index.expiries.set(entry, end)
