"""Entries and matches: what a cache knows of its chunks and of prompts. They decide nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from lmtier.core.grant import Grant, Match
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
        """The time of last use: by the cache's clock in the slab, as the tier recorded it in a lower tier."""

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


@dataclass(eq=False, slots=True, kw_only=True, repr=False)
class Lookup(Match):
    """A match as its cache knows it: by entries, and with all that decides how it goes on."""

    id: int
    form: ChunkForm
    asked_tokens: int = 0
    source: str = ""
    """Another server that is asked too."""
    state_match: Lookup | None = None
    """The match of the state at its end."""
    prompt_match: Lookup | None = None
    """If this is the match of a state: the match that ends with it."""
    states: dict[int, str] = field(default_factory=dict)
    """Chunks after which shared tiers have a state, and which tier."""
    run: list[Entry] = field(default_factory=list)
    """The leading chunks in the slab, each leased by this match. Some of them may be LOADING."""
    pending_loads: int = 0
    """Chunks of `run` that are LOADING."""
    settled: bool = False
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
    decision: tuple[str, str] | None = None
    """How much of the chunks in lower tiers is loaded, and why."""
    decided: float = 0.0
    expected: float | None = None
    """How long the load was expected to take, from `decided` on."""

    def __post_init__(self) -> None:
        self.limit = self.deadline

    @property
    def grant(self) -> Grant:
        state = None if self.state_match is None else self.state_match.grant
        placement = placement_of(self.form, self.keys[: len(self.run)], self.run)
        return Grant(self.id, tuple(range(len(self.run))), placement, state)

    @property
    def loading(self) -> tuple[int, ...]:
        # A chunk that was deleted while it was loading is GONE, but the tier still writes to its room.
        states = enumerate(self.run if self.pending_loads else ())
        return tuple(chunk for chunk, entry in states if entry.state is not EntryState.READY)

    @property
    def is_ready(self) -> bool:
        return not (self.pending_lookups or self.pending_loads or self.below) and (
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


def check_chain(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """The keys of a prompt. Raises if one occurs twice: its entry would be its own parent."""
    if len(set(keys)) < len(keys):
        raise MisuseError("a key occurs twice in one request; give each key of the prompt once, in order")
    return tuple(keys)
