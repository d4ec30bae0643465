"""Entries and matches: what a cache knows of its chunks and of prompts. They decide nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import repeat

from lmtier.core.grant import Grant
from lmtier.core.placement import Placement
from lmtier.errors import MisuseError
from lmtier.format.layout import ChunkForm
from lmtier.format.objects import UNKNOWN_PROVENANCE
from lmtier.rules.sessions import Agent
from lmtier.rules.worth import Cost

CPU = "cpu"
"""The name of the slab among the tiers."""

EVICTED, DELETED, CLEARED, DIFFERED, REPLACED = "evicted", "deleted", "cleared", "differed", "replaced"
EXPIRED = "expired"
"""Why a chunk left. A `Reason` stands there instead if it could not be read."""


class EntryState(IntEnum):
    FILLING = 0
    LOADING = 1
    READY = 2
    GONE = 3


class Entry:
    """One chunk in one place. It has slots, because there may be a million entries."""

    __slots__ = (
        "child_count",
        "form",
        "is_reused",
        "key",
        "last_used_ns",
        "leases",
        "marks",
        "nbytes",
        "offsets",
        "parent",
        "provenance",
        "state",
    )

    def __init__(self, key: bytes, form: ChunkForm, nbytes: int, state: EntryState, used: int = 0) -> None:
        self.key = key
        self.form = form
        self.nbytes = nbytes
        self.state = state
        self.leases = 0
        self.child_count = 0
        self.parent: Entry | None = None
        self.is_reused = False
        """It was asked for at least twice: it is remembered from before, or was found since it came."""
        self.offsets: tuple[int, ...] = ()
        """In the slab: the offset of each shard."""
        self.marks: tuple[bytes, ...] = ()
        """In the slab: the fingerprint of each shard, if its writer took one."""
        self.provenance = UNKNOWN_PROVENANCE
        """In the slab: who stored it, and when."""
        self.last_used_ns = used
        """In a lower tier: the time of last use that the tier has recorded, in ns."""

    def __repr__(self) -> str:
        return f"<{self.key.hex()[:8]} {self.state.name} leases={self.leases} kids={self.child_count}>"


def ancestry(entry: Entry | None) -> list[Entry]:
    """An entry and those of its ancestors that still exist, head first."""
    run: list[Entry] = []
    while entry is not None and entry.state is not EntryState.GONE:
        run.append(entry)
        entry = entry.parent
    return run[::-1]


def placement_of(form: ChunkForm, keys: tuple[bytes, ...], entries: Collection[Entry]) -> Placement:
    """Where the entries of these keys lie, for a reader or a writer of `form`."""
    return Placement(
        form,
        keys,
        [entry.offsets for entry in entries],
        {chunk: entry.marks for chunk, entry in enumerate(entries) if entry.marks},
        {chunk: entry.form for chunk, entry in enumerate(entries) if entry.form is not form},
    )


def entries_from_placement(
    placement: Placement, state: EntryState, made: list[Entry] | None = None
) -> list[Entry]:
    """Entries made from a placement, in another process. `made` holds the leading ones that exist already."""
    if placement.other_forms:
        keys_and_forms = zip(placement.keys, placement.forms, strict=True)
        entries = [Entry(key, form, form.slab_bytes, state) for key, form in keys_and_forms]
    else:
        entries = (made or list(unplaced(placement.keys, placement.form, state)))[: len(placement.keys)]
    for entry, offsets in zip(entries, placement.offsets, strict=True):
        entry.offsets = offsets
    for chunk, marks in placement.marks.items():
        entries[chunk].marks = marks
    return entries


def unplaced(keys: Sequence[bytes], form: ChunkForm, state: EntryState) -> Iterator[Entry]:
    """Makes entries whose offsets are not known yet."""
    return map(Entry, keys, repeat(form), repeat(form.slab_bytes), repeat(state))


@dataclass(eq=False, slots=True)
class Match:
    """The longest prefix of `keys` that the tiers can supply. It holds leases, so it must be released.

        asking   shared tiers have not answered yet: `chunks` may still grow
        found    `chunks` is known; chunks in lower tiers stay there until `prefetch`
        ready    `run` holds all of `chunks`: leased, complete, verified

    If a chunk fails to load, the match ends before it: `chunks` shrinks, and the rest is recomputed.

    With `state_form`, a prefix can only be continued from the state at its end. The match then ends where a
    tier has a state, and holds that too, as `state_match`. Without its last chunk or its state it has no
    chunks at all.
    """

    id: int
    keys: tuple[bytes, ...]
    form: ChunkForm
    asked_tokens: int
    deadline: float
    state_form: ChunkForm | None = None
    """The form of the state that is needed at the end of the prefix, if one is."""
    source: str = ""
    """Another server that is asked too."""
    state_match: Match | None = None
    """The match of that state."""
    prompt_match: Match | None = None
    """If this is the match of a state: the match that ends with it."""
    states: dict[int, str] = field(default_factory=dict)
    """Chunks after which shared tiers have a state, and which tier."""
    run: list[Entry] = field(default_factory=list)
    """The leading chunks in the slab, each leased by this match. Some of them may be LOADING."""
    sources: list[str] = field(default_factory=list)
    """Where each chunk was found. It is longer than `run` until the rest is prefetched. Beyond `run`, "cpu"
    means that the slab has the chunk, but a lower tier has one before it."""
    pending_loads: int = 0
    """Chunks of `run` that are LOADING."""
    pending_lookups: int = 0
    cut_reason: str = ""
    """Why the match ends before the last found chunk, if it does."""
    found: int = 0
    """How many chunks were found before it was cut."""
    settled: bool = False
    released: bool = False
    asker: str = ""
    """Who asked, for display."""
    agent: Agent | None = None
    """The session that asked, if a request did."""
    limit: float = field(init=False)
    """The requested deadline. `deadline` is earlier if computing takes less time."""
    patience: float = float("inf")
    """Seconds after `prefetch` until the engine computes instead."""
    cost: Cost | None = None
    """The engine's time to compute, if only chunks that are worth it should be loaded."""
    engine_tokens: int = 0
    """The number of tokens that the engine has itself."""
    decision: tuple[str, str] | None = None
    """How much of the chunks in lower tiers is loaded, and why."""
    decided: float = 0.0
    expected: float | None = None
    """How long the load was expected to take, from `decided` on."""

    def __post_init__(self) -> None:
        self.limit = self.deadline

    @property
    def placement(self) -> Placement:
        """The placement of `run`."""
        return placement_of(self.form, self.keys[: len(self.run)], self.run)

    @property
    def grant(self) -> Grant:
        """What a mover needs to load `run`, and the state that follows it."""
        state = None if self.state_match is None else self.state_match.grant
        return Grant(self.id, tuple(range(len(self.run))), self.placement, state)

    @property
    def chunks(self) -> int:
        return len(self.sources)

    @property
    def complete(self) -> int:
        """How many leading chunks are in the slab, complete."""
        states = enumerate(self.run)
        return next((count for count, entry in states if entry.state is not EntryState.READY), len(self.run))

    @property
    def is_ready(self) -> bool:
        has_unloaded = len(self.sources) > len(self.run) and not self.released
        return not (self.pending_lookups or self.pending_loads or has_unloaded) and (
            self.state_match is None or self.state_match.is_ready
        )

    @property
    def parent(self) -> Entry | None:
        """The entry that the next one of `run` follows."""
        if self.run:
            return self.run[-1]
        return self.prompt_match.parent if self.prompt_match is not None else None

    @property
    def below(self) -> list[str]:
        """The places of the chunks beyond `run`."""
        return [] if self.released else self.sources[len(self.run) :]

    def __repr__(self) -> str:
        state = "asking" if self.pending_lookups else "ready" if self.is_ready else "found"
        return f"<Match {self.chunks} of {len(self.keys)} chunks, {len(self.run)} in the slab, {state}>"


def check_chain(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """The keys of a prompt. Raises if one occurs twice: its entry would be its own parent."""
    if len(set(keys)) < len(keys):
        raise MisuseError("a key occurs twice in one request; give each key of the prompt once, in order")
    return tuple(keys)
