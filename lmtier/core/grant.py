"""What an engine holds of a store: extents to load from or to fill, as one value that its processes share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

    def __repr__(self) -> str:
        chunks = f"{self.chunks[0]} to {self.chunks[-1]}" if self.chunks else "none"
        return f"<Grant {self.id} of {len(self.chunks)} chunks: {chunks}>"
