"""What one cache leaves to the next: the facts of its handover file, its memory and the locks of its tiers.

The facts list the slab's chunks in their order of eviction, with leases, lifetimes and pins, and what engines
hold. Nothing here copies KV: the next cache maps the same memory. A tier below tells what still waits to be
written. If it is small, it tells what it holds. If not, the next cache scans it, under the lock that it gets.

An extent that an engine may still touch is never free in the next cache: its match or reservation goes over,
also if its chunk was deleted meanwhile (GONE).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from lmtier.core.grant import Grant
from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState, Lookup, placement_of
from lmtier.core.owned import OwnedTier
from lmtier.core.placement import keys_of, read_form, write_form
from lmtier.format.handover_file import HandoverFileError, pack
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


_ROW = struct.Struct("<32sIQB?IQqqd?")
"""An entry: key, form, bytes, state, is_reused, maker, time, last use, parent's row or -1, expiry, is_pinned.

JSON would take ten times as long, and no server answers meanwhile.
"""
_Found: TypeAlias = "list[tuple[Entry, int, float, bool]]"
"""The entries of a place: each with its parent's row, its expiry, and whether it is pinned."""


class HandoverWriter:
    """Writes the facts of a cache that stands still. The owner adds its own."""

    def __init__(self, cache: Cache) -> None:
        self.facts: dict[str, Any] = {}
        self._cache = cache
        self._forms: dict[ChunkForm, int] = {}
        self._numbers: dict[Entry, int] = {}

    def form(self, form: ChunkForm) -> int:
        """The number of a form in the file."""
        return self._forms.setdefault(form, len(self._forms))

    def pack(self) -> bytes:
        return pack(self.facts | {"forms": [write_form(form) for form in self._forms]})

    def write_cache(self, matches: Sequence[Lookup], saves: Sequence[Grant]) -> None:
        """Tell the slab, and what of it engines hold. Chunks that none of `saves` fills are left out."""
        cache, index, open_ones = self._cache, self._cache.index, self._cache.reservations.open
        filling = dict.fromkeys(each for grant in saves for each in open_ones[grant.id].entries.values())
        leased_entries = [entry for match in matches for entry in _entries_of(match)] + [*filling]
        handed_entries = [each for each in _order(index) if each.state is EntryState.READY or each in filling]
        entries = list(dict.fromkeys([*handed_entries, *leased_entries]))
        self._numbers = {entry: number for number, entry in enumerate(entries)}
        tiers = dict[str, dict[str, Any]]()
        for spec, tier in zip(cache.config.cache_tiers[1:], cache.lower, strict=True):
            told = tiers[spec.base_url] = {"writes": b"".join(tier.waiting_writes)}
            if isinstance(tier, OwnedTier) and tier.is_warm and len(tier.index) <= MOST_BELOW:
                told |= self._place([*tier.outdated.copies(), *_order(tier.index)], tier.index)
        pinning = cache.pinning
        self.facts |= {
            "capacity": cache.slab.capacity,
            "slab": self._place(entries, index),
            "tiers": tiers,
            "pins": [
                (pin.name, b"".join(pin.keys), pin.end, pins is pinning.hinted)
                for pins in (pinning.pins, pinning.hinted)
                for pin in pins
            ],
            "dropped": cache.forgotten_tenants.dropped_generations(),
        }

    def _place(self, entries: Sequence[Entry], index: Index) -> dict[str, Any]:
        numbers: dict[Entry | None, int] = {entry: number for number, entry in enumerate(entries)}
        makers: dict[str, int] = {}
        rows = [
            _ROW.pack(
                each.key,
                self.form(each.form),
                each.nbytes,
                each.state,
                each.is_reused,
                makers.setdefault(each.provenance.by, len(makers)),
                each.provenance.at,
                each.last_used_ns,
                numbers.get(each.parent, -1),
                index.expiries.expiry(each),
                each in index.pinned,
            )
            for each in entries
        ]
        offsets = [offset for each in entries for offset in each.offsets]
        return {
            "rows": b"".join(rows),
            "offsets": struct.pack(f"<{len(offsets)}Q", *offsets),
            "marks": [(number, each.marks) for number, each in enumerate(entries) if each.marks],
            "makers": list(makers),
        }

    def match(self, match: Lookup) -> dict[str, Any]:
        if match.pending_lookups or match.pending_loads:
            raise HandoverFileError("a match still waits for a tier")
        return {name: getattr(match, name) for name in _PLAIN} | {
            "keys": b"".join(match.keys),
            "form": self.form(match.form),
            "ends": None if match.state_form is None else self.form(match.state_form),
            "end": None if match.state_match is None else self.match(match.state_match),
            "run": [self._numbers[entry] for entry in match.run],
            "cost": match.cost,
            "decision": match.decision,
            "states": [*match.states.items()],
        }

    def reservation(self, grant: Grant) -> dict[str, Any]:
        reservation = self._cache.reservations.open[grant.id]
        return {
            "form": self.form(grant.form),
            "entries": [(chunk, self._numbers[entry]) for chunk, entry in reservation.entries.items()],
            "known": grant.leading_stored,
            "dropped": grant.dropped,
            "left": [str(shard) for shard in reservation.pending_shards],
            "marks": [*reservation.marks.items()],
            "aborted": reservation.is_aborted,
            "ttl": reservation.ttl,
        }


def _order(index: Index) -> Iterable[Entry]:
    """All entries but those that are GONE, the first to leave first."""
    order = dict.fromkeys(each for each in index.order() if each.state is not EntryState.GONE)
    return order | dict.fromkeys(index.entries_now())


def _entries_of(match: Lookup) -> list[Entry]:
    return match.run if match.state_match is None else [*match.run, *match.state_match.run]


# ---- beginning from them


@dataclass(slots=True)
class Handover:
    """What a cache begins with, in place of nothing."""

    facts: dict[str, Any]
    slab: int
    """The descriptor of its memory."""
    presence: int | None = None
    """The descriptor of its table of presence, writable."""
    locks: Mapping[str, int] = field(default_factory=dict)
    """The locked files of tiers, by `TierSpec.place`."""
    forms: list[ChunkForm] = field(init=False)
    _entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forms = [read_form(parts) for parts in self.facts.get("forms", ())]

    @property
    def capacity(self) -> int:
        return int(self.facts["capacity"])

    def enter(self, cache: Cache) -> None:
        """Fill the empty slab and index of `cache`. HandoverFileError: the file contradicts itself.

        If it fails, the cache has left: its tiers are closed, and the other process has all that it had.
        """
        try:
            with collector_paused():
                self._enter(cache)
        except BaseException as error:
            cache.close_after_handover()
            if isinstance(error, ValueError | KeyError | TypeError | IndexError | struct.error):
                raise HandoverFileError(f"the handover file contradicts itself: {error!r}") from None
            raise

    def _enter(self, cache: Cache) -> None:
        facts, index, allocated = self.facts, cache.index, dict[int, int]()
        places = {index: self._read(facts["slab"])}
        self._entries = [entry for entry, *_ in places[index]]
        for entry in self._entries:
            if entry.nbytes != entry.form.slab_bytes:
                raise ValueError(f"{entry.nbytes} bytes for a chunk of {entry.form.slab_bytes}")
            for offset, size in zip(entry.offsets, entry.form.sizes, strict=True):
                if offset in allocated:
                    raise ValueError(f"two chunks at {offset}")
                allocated[offset] = padded(size)
        cache.slab.restore(allocated)
        cache.memory.deleted_in_use.update(each for each in self._entries if each.state is EntryState.GONE)
        cache.forgotten_tenants.restore(facts.get("dropped", {}))  # without: all leave once more
        _resume(index, places[index])
        for spec, tier in zip(cache.config.cache_tiers[1:], cache.lower, strict=True):
            told = facts["tiers"].get(spec.base_url, {})
            if isinstance(tier, OwnedTier) and self.knows(spec.base_url):
                places[tier.index] = self._read(told)
                _resume(tier.index, places[tier.index])
                tier.finish_restore()
            for key in keys_of(told.get("writes", b"")):
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
        for name, keys, end, is_hinted in facts["pins"]:
            (cache.pinning.hinted if is_hinted else cache.pinning.pins).put(name, keys_of(keys), end)
        for place_index, found in places.items():
            pinned = [entry.key for entry, *_, is_pinned in found if is_pinned]
            for key in sorted(pinned, key=place_index.keys_to_pin.__contains__):
                if (kept := place_index.get(key)) is not None and kept.state is EntryState.READY:
                    place_index.pin(kept)

    def knows(self, place: str) -> bool:
        """Whether the file lists what this tier holds, and only this process will write there."""
        return place in self.locks and "rows" in self.facts["tiers"].get(place, ())

    def _read(self, place: Mapping[str, Any]) -> _Found:
        found: _Found = []
        offsets, makers = iter(memoryview(place["offsets"]).cast("Q")), place["makers"]
        for key, form, nbytes, state, is_reused, by, at, used, *rest in _ROW.iter_unpack(place["rows"]):
            entry = Entry(key, self.forms[form], nbytes, EntryState(state), used)
            entry.is_reused, entry.provenance = is_reused, Provenance(makers[by], at)
            entry.offsets = tuple(islice(offsets, len(entry.form.shards)))  # in the slab
            found.append((entry, *rest))
        for number, marks in place["marks"]:
            found[number][0].marks = tuple(marks)
        return found

    def match(self, dumped: Mapping[str, Any], cache: Cache) -> Lookup:
        """A match that an engine holds: its leases go on."""
        ends, end, cost = dumped["ends"], dumped["end"], dumped["cost"]
        run = [self._entries[number] for number in dumped["run"]]
        state_form = None if ends is None else self.forms[ends]
        match = Lookup(
            keys_of(dumped["keys"]), 0.0, state_form, id=0, form=self.forms[dumped["form"]], run=run
        )
        for name in _PLAIN:
            setattr(match, name, dumped[name])
        match.cost = None if cost is None else Cost(*cost)
        match.decision = None if dumped["decision"] is None else tuple(dumped["decision"])
        match.states = dict(dumped["states"])
        if end is not None:
            match.state_match = self.match(end, cache)
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
        reservation.marks = dict(dumped["marks"])
        reservation.is_aborted, reservation.ttl = dumped["aborted"], dumped["ttl"]
        return reservation.grant


def _resume(index: Index, found: _Found) -> None:
    for entry, parent, expiry, _ in found:
        index.restore(entry)
        if entry.state is not EntryState.GONE:
            index.link(entry, found[parent][0] if parent >= 0 else None)
            index.expiries.set(entry, expiry)
