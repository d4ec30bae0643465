"""What one cache leaves to the next: its books, its memory and the locks of its tiers.

The books tell the slab's chunks in their order of eviction, with leases, lifetimes and pins, and what engines
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

from lmtier.core.index import Index
from lmtier.core.match import Entry, Match, Reservation, State
from lmtier.core.owned import OwnedTier
from lmtier.core.placement import keys_of, read_form, write_form
from lmtier.format.books import Books, BooksError
from lmtier.format.keys import KEY_BYTES
from lmtier.format.layout import ChunkForm, Shard, padded
from lmtier.format.objects import Made
from lmtier.rules.worth import Cost
from lmtier.threads import collector_paused

if TYPE_CHECKING:
    from lmtier.core.cache import Cache

MOST_BELOW = 10_000
"""The most chunks of a tier below in the books: each takes some µs in which no server answers."""
_PLAIN = ("asked_tokens", "deadline", "cut", "found", "settled", "asker", "limit", "patience", "has",
          "decided", "expected", "sources")  # fmt: skip
"""The fields of a match that JSON holds as they are."""


class Forms:
    """A table of forms: the books name a form by its number."""

    def __init__(self, told: Sequence[Sequence[str]] = ()) -> None:
        self._forms = [read_form([part.encode() for part in each]) for each in told]
        self._numbers = {form: number for number, form in enumerate(self._forms)}

    def number(self, form: ChunkForm) -> int:
        number = self._numbers.setdefault(form, len(self._forms))
        if number == len(self._forms):
            self._forms.append(form)
        return number

    def __getitem__(self, number: int) -> ChunkForm:
        return self._forms[number]

    def told(self) -> list[list[str]]:
        return [[part.decode() for part in write_form(form)] for form in self._forms]


# ---- telling


class Teller:
    """Writes the books of a cache that stands still. `books.facts` and `forms` are open to the owner."""

    def __init__(self, cache: Cache) -> None:
        self.books = Books()
        self.forms = Forms()
        self._numbers: dict[Entry, int] = {}
        self._entries: list[Entry] = []
        self._cache = cache

    def tell(self, held: Sequence[Match | Reservation]) -> None:
        """Tell the slab, and what of it `held` needs. Chunks that none of them fills are left out."""
        index = self._cache.index
        leased = [entry for thing in held for entry in _entries_of(thing)]
        filling = {entry for thing in held if isinstance(thing, Reservation) for entry in _entries_of(thing)}
        order = dict.fromkeys(each for each in index.order() if each.state is not State.GONE)
        order |= dict.fromkeys(index.entries_now())
        kept = [each for each in order if each.state is State.READY or each in filling]
        self._entries = list(dict.fromkeys([*kept, *leased]))
        self._numbers = {entry: number for number, entry in enumerate(self._entries)}
        self._tell_entries("", self._entries, index)
        pinning = self._cache.pinning
        pins = [
            [pin.name, b"".join(pin.keys).hex(), pin.end, pins is pinning.hinted]
            for pins in (pinning.pins, pinning.hinted)
            for pin in pins
        ]
        tiers = list[dict[str, str]]()
        for spec, tier in zip(self._cache.config.stores[1:], self._cache.lower, strict=True):
            tiers.append({"place": spec.place, "writes": b"".join(tier.waiting_writes).hex()})
            if isinstance(tier, OwnedTier) and tier.is_warm and len(tier.index) <= MOST_BELOW:
                order = dict.fromkeys(tier.index.order()) | dict.fromkeys(tier.index.entries_now())
                self._tell_entries(spec.place, [*tier.outdated.copies(), *order], tier.index)
        self.books.facts |= {"capacity": self._cache.slab.capacity, "pins": pins, "tiers": tiers}
        self.books.facts["dropped"] = self._cache.leaving.told()

    def _tell_entries(self, place: str, entries: list[Entry], index: Index) -> None:
        """`place`: of a tier; empty: the slab."""
        columns, ends = self.books.columns, index.ends
        numbers = {entry: number for number, entry in enumerate(entries)}
        makers: dict[str, int] = {}
        rows = [
            (
                self.forms.number(each.form),
                -1 if each.parent is None else numbers.get(each.parent, -1),
                int(each.state),
                each.seen,
                makers.setdefault(each.made.by, len(makers)),
                each.made.at,
                each.nbytes,
                each.used,
            )
            for each in entries
        ]
        columns[place + "keys"] = b"".join(each.key for each in entries)
        columns[place + "rows"] = np.array(rows, "<i8").tobytes()
        columns[place + "ends"] = np.array([ends.end(each) for each in entries], "<f8").tobytes()
        columns[place + "offsets"] = np.array(
            [at for each in entries for at in each.offsets], "<u8"
        ).tobytes()
        prints = {n: [mark.hex() for mark in each.prints] for n, each in enumerate(entries) if each.prints}
        pinned = [n for n, each in enumerate(entries) if each in index.pinned]
        others = {"makers": list(makers), "prints": list(prints.items()), "pinned": pinned}
        self.books.facts[place + "others"] = others

    def match(self, match: Match) -> dict[str, Any]:
        if match.asking or match.waiting:
            raise BooksError("a match still waits for a tier")
        told: dict[str, Any] = {name: getattr(match, name) for name in _PLAIN}
        told["keys"] = b"".join(match.keys).hex()
        told["form"] = self.forms.number(match.form)
        told["ends"] = None if match.ends is None else self.forms.number(match.ends)
        told["end"] = None if match.end is None else self.match(match.end)
        told["run"] = [self._numbers[each] for each in match.run]
        told["cost"] = None if match.cost is None else list(match.cost)
        told["decision"] = match.decision
        told["states"] = list(match.states.items())
        return told

    def reservation(self, reservation: Reservation) -> dict[str, Any]:
        return {
            "form": self.forms.number(reservation.form),
            "entries": [[chunk, self._numbers[each]] for chunk, each in reservation.entries.items()],
            "known": reservation.known,
            "dropped": reservation.dropped,
            "left": [str(shard) for shard in reservation.left],
            "prints": [[n, [mark.hex() for mark in each]] for n, each in reservation.prints.items()],
            "aborted": reservation.aborted,
            "ttl": reservation.ttl,
        }


def _entries_of(thing: Match | Reservation) -> list[Entry]:
    if isinstance(thing, Reservation):
        return list(thing.entries.values())
    return thing.run if thing.end is None else [*thing.run, *thing.end.run]


# ---- beginning from them


@dataclass(slots=True)
class Heritage:
    """What a cache begins with, in place of nothing."""

    books: Books
    slab: int
    """The descriptor of its memory."""
    presence: int | None = None
    """The descriptor of its table of presence, writable."""
    locks: Mapping[str, int] = field(default_factory=dict)
    """The locked files of tiers, by `TierSpec.place`."""
    forms: Forms = field(init=False)
    _entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forms = Forms(self.books.facts.get("forms", ()))

    @property
    def capacity(self) -> int:
        return int(self.books.facts["capacity"])

    def enter(self, cache: Cache) -> None:
        """Fill the empty slab and index of `cache`. BooksError: the books contradict themselves.

        If it fails, the cache has left: its tiers are closed, and the other process has all that it had.
        """
        try:
            with collector_paused():
                self._enter(cache)
        except BaseException as error:
            cache.leave()
            if isinstance(error, ValueError | KeyError | TypeError | IndexError):
                raise BooksError(f"the books contradict themselves: {error!r}") from None
            raise

    def _enter(self, cache: Cache) -> None:
        facts, index, taken = self.books.facts, cache.index, dict[int, int]()
        places = [("", index)]
        told_entries = self._read("")
        for entry, _, _ in told_entries:
            if entry.nbytes != entry.form.room:
                raise ValueError(f"{entry.nbytes} bytes for a chunk of {entry.form.room}")
            for offset, size in zip(entry.offsets, entry.form.sizes, strict=True):
                if offset in taken:
                    raise ValueError(f"two chunks at {offset}")
                taken[offset] = padded(size)
        cache.slab.resume(taken)
        self._entries = [entry for entry, _, _ in told_entries]
        _resume(index, told_entries)
        cache.room.leaving.update(entry for entry, _, _ in told_entries if entry.state is State.GONE)
        cache.leaving.resume(facts.get("dropped", {}))  # without: all leave once more
        writes = {told["place"]: _keys(told["writes"]) for told in facts["tiers"]}
        for spec, below in zip(cache.config.stores[1:], cache.lower, strict=True):
            if isinstance(below, OwnedTier) and self.knows(spec.place):
                _resume(below.index, self._read(spec.place))
                places.append((spec.place, below.index))
                below.resume()
            for key in writes.get(spec.place, ()):
                waiting = index.get(key)
                if waiting is not None and waiting.state is not State.READY:
                    waiting = None
                if isinstance(below, OwnedTier) and index.is_record(key):
                    # If it has left the slab, its turn to be written deletes the copy that it outdated.
                    if (value := waiting or below.index.get(key)) is not None:
                        below.write_on(value)
                    elif not below.is_warm:  # the scan may find a copy
                        below.discard(key, ())
                elif waiting is not None:
                    below.offer(waiting)
        # Last, so that nothing is pinned before it is known what was. Those of hints first: all pins together
        # may take more than a quarter.
        for pin in facts["pins"]:
            pins = cache.pinning.hinted if pin[3] else cache.pinning.pins
            pins.put(pin[0], _keys(pin[1]), pin[2])
        for place, there in places:
            keys = keys_of(bytes(self.books.column(place + "keys")))
            pinned = [keys[number] for number in facts[place + "others"]["pinned"]]
            for key in sorted(pinned, key=there.wanted.__contains__):
                if (kept := there.get(key)) is not None and kept.state is State.READY:
                    there.pin(kept)

    def knows(self, place: str) -> bool:
        """Whether the books tell what this tier holds, and only this process will write there."""
        return place in self.locks and place + "keys" in self.books.columns

    def _read(self, place: str) -> list[tuple[Entry, int, float]]:
        """The entries of a place, each with the number of its parent and its end."""
        books, others = self.books, self.books.facts[place + "others"]
        keys = keys_of(bytes(books.column(place + "keys")))
        rows = np.frombuffer(books.column(place + "rows"), "<i8").reshape(-1, 8).tolist()
        ends = np.frombuffer(books.column(place + "ends"), "<f8").tolist()
        offsets = iter(np.frombuffer(books.column(place + "offsets"), "<u8").tolist())
        makers, found = others["makers"], list[tuple[Entry, int, float]]()
        if not len(keys) == len(rows) == len(ends):
            raise ValueError("the columns have different lengths")
        for key, (form, parent, state, seen, by, at, nbytes, used), end in zip(keys, rows, ends, strict=True):
            entry = Entry(key, self.forms[form], nbytes, State(state), used)
            entry.seen, entry.made = bool(seen), Made(makers[by], at)
            entry.offsets = () if place else tuple(next(offsets) for _ in entry.form.shards)
            found.append((entry, parent, end))
        for number, marks in others["prints"]:
            found[number][0].prints = tuple(map(bytes.fromhex, marks))
        return found

    def match(self, told: Mapping[str, Any], cache: Cache) -> Match:
        """A match that an engine holds: its leases go on."""
        run = [self._entries[number] for number in told["run"]]
        ends = None if told["ends"] is None else self.forms[told["ends"]]
        match = Match(0, _keys(told["keys"]), self.forms[told["form"]], 0, 0.0, ends, run=run)
        for name in _PLAIN:
            setattr(match, name, told[name])
        match.cost = None if told["cost"] is None else Cost(*told["cost"])
        match.decision = None if told["decision"] is None else (told["decision"][0], told["decision"][1])
        match.states = {int(chunks): tier for chunks, tier in told["states"]}
        if told["end"] is not None:
            match.end = self.match(told["end"], cache)
            match.end.ended = match
        cache.resume(match)
        return match

    def reservation(self, told: Mapping[str, Any], cache: Cache) -> Reservation:
        """A reservation that an engine fills: it is still its own."""
        entries = {chunk: self._entries[number] for chunk, number in told["entries"]}
        left = {shard for text in told["left"] if (shard := Shard.parse(text)) is not None}
        reservation = Reservation(
            0, self.forms[told["form"]], entries, told["known"], told["dropped"], left, ttl=told["ttl"]
        )
        reservation.prints = {n: [bytes.fromhex(mark) for mark in each] for n, each in told["prints"]}
        reservation.aborted = told["aborted"]
        cache.resume(reservation)
        return reservation


def _keys(text: str) -> tuple[bytes, ...]:
    keys = keys_of(bytes.fromhex(text))
    if keys and len(keys[-1]) != KEY_BYTES:
        raise ValueError("a key was cut")
    return keys


def _resume(index: Index, told: Sequence[tuple[Entry, int, float]]) -> None:
    for entry, parent, end in told:
        index.resume(entry)
        if entry.state is not State.GONE:
            index.link(entry, told[parent][0] if parent >= 0 else None)
            index.ends.set(entry, end)
