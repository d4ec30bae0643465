"""What an engine holds of a store: extents to load from or to fill, as one value that its processes share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lmtier.core.placement import Placement
from lmtier.errors import MisuseError
from lmtier.format.layout import ChunkForm, Shard


@dataclass(frozen=True, slots=True)
class Grant:
    """Extents that a match leases, or that a reservation keeps for new chunks. It can be pickled.

    To load, it has the leading chunks of a prompt. To save, it has those that no tier holds; each rank
    commits or aborts its shard of all of them exactly once.
    """

    id: int
    """The match or the reservation; 0: nothing is held."""
    chunks: tuple[int, ...]
    """The number of each chunk in its prompt."""
    placement: Placement
    """The places of these chunks."""
    state: Grant | None = None
    """To load: the state after the last chunk, if the match ends with one."""
    leading_stored: int = 0
    """To save: the number of leading chunks that are stored, or that the caller skipped
    (skip_leading_tokens)."""
    dropped: int = 0
    """To save: the number of chunks that are neither stored nor in `chunks`."""

    @property
    def form(self) -> ChunkForm:
        return self.placement.form

    @property
    def places(self) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """The key of each chunk, and the offset of each of its shards."""
        return zip(self.placement.keys, self.placement.offsets, strict=True)

    def shard(self, shard: Shard | None) -> Shard:
        """The shard that is meant; None: the only one."""
        shards = self.form.shards
        if shard is None:
            if len(shards) != 1:
                raise MisuseError(f"this reservation has {len(shards)} shards: pass the one that is done")
            return shards[0]
        if shard not in shards:
            raise MisuseError(
                f"shard {shard} is not of this reservation, which has {', '.join(map(str, shards))}"
            )
        return shard

    @classmethod
    def of_nothing(cls, form: ChunkForm, leading_stored: int = 0, dropped: int = 0) -> Grant:
        return cls(0, (), Placement(form, (), ()), None, leading_stored, dropped)

    def leading(self, count: int) -> Grant:
        """Its first chunks, without a state."""
        return replace(self, chunks=self.chunks[:count], placement=self.placement.leading(count), state=None)

    def __repr__(self) -> str:
        chunks = f"{self.chunks[0]} to {self.chunks[-1]}" if self.chunks else "none"
        return f"<Grant {self.id} of {len(self.chunks)} chunks: {chunks}>"


@dataclass(eq=False, slots=True)
class Match:
    """The longest prefix of `keys` that the tiers can supply. It holds leases, so it must be released.

        asking   shared tiers have not answered yet: `chunks` may still grow
        found    `chunks` is known; chunks in lower tiers stay there until `prefetch`
        ready    `grant` holds all of `chunks`: leased, complete, verified

    If a chunk fails to load, the match ends before it: `chunks` shrinks, and the rest is recomputed.

    With `state_form`, a prefix can only be continued from the state at its end. The match then ends where a
    tier has a state, and holds that too. Without its last chunk or its state it has no chunks at all.
    """

    keys: tuple[bytes, ...]
    deadline: float
    state_form: ChunkForm | None = None
    """The form of the state that is needed at the end of the prefix, if one is."""
    sources: list[str] = field(default_factory=list)
    """Where each chunk was found. It is longer than the grant until the rest is prefetched. Beyond the grant,
    "cpu" means that the slab has the chunk, but a lower tier has one before it."""
    pending_lookups: int = 0
    cut_reason: str = ""
    """Why the match ends before the last found chunk, if it does."""
    found: int = 0
    """How many chunks were found before it was cut."""
    released: bool = False
    engine_tokens: int = 0
    """The number of tokens that the engine has itself."""

    @property
    def grant(self) -> Grant:
        """The leading chunks that are in the slab, leased, and the state that follows them."""
        raise NotImplementedError

    @property
    def loading(self) -> tuple[int, ...]:
        """Chunks of the grant that are still being loaded: they must not be read."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        raise NotImplementedError

    @property
    def chunks(self) -> int:
        return len(self.sources)

    @property
    def progress(self) -> str:
        return "asking" if self.pending_lookups else "ready" if self.is_ready else "found"

    def __repr__(self) -> str:
        slab = len(self.grant.chunks)
        return f"<Match {self.chunks} of {len(self.keys)} chunks, {slab} in the slab, {self.progress}>"
