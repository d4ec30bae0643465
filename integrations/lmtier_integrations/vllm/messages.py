"""What the scheduler and the workers of an engine tell each other; all of it can be pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmtier.core.match import Reservation
from lmtier.core.placement import Placement
from lmtier.format.layout import Shard

NULL_BLOCK = 0
"""In a request's block table: a block that has left a sliding window, or a state that is not kept."""

Near: TypeAlias = "list[tuple[int, bool] | None]"
"""Of each chunk: a place in the GPU's own memory, and whether its copy lies there already; or None."""

Work: TypeAlias = "tuple[int, float]"
"""Of a step that mostly computes prompts: its tokens, and the sum of their positions."""

Adapter: TypeAlias = "tuple[int, str]"
"""Its number, as vLLM counts them, and what it is by content."""

Origin: TypeAlias = "tuple[str, str]"
"""Of weights that were loaded from files: which ones, and a digest of them, from the rank that has taken it;
empty: from elsewhere."""


@dataclass
class RankFacts:
    """How the model's KV is laid out in a worker, and which part of it is there."""

    layout: bytes
    shard: Shard
    run: int
    from_scratch: str
    """A backend that cannot go on from loaded KV, or nothing."""
    is_asynchronous: bool
    """Whether copies go on after a step: on a GPU."""
    files: str
    """The files that its weights are of; empty: that is not known, or weights may change unseen."""
    states: tuple[bytes, Shard] | None = None
    """The layout and the shard of its states, if it has any."""


@dataclass
class LoadPlan:
    """A match to copy into a request's blocks."""

    id: int
    placement: Placement
    block_ids: list[list[int]]
    """Of each block table."""
    computed_tokens: int
    request: str
    """The request that waits for this one, if it does: an asynchronous load."""
    near: Near | None = None
    """Of the chunks that are not computed whole."""
    adapter: Adapter | None = None
    """That the keys say it was computed with."""
    end: Placement | None = None
    """The state after its last chunk, if it ends with one."""
    end_block_ids: list[list[int]] = field(default_factory=list)
    """Of that state: its block in each block table."""


@dataclass
class SavePlan:
    """Reserved extents to fill from a request's blocks."""

    id: int
    chunks: list[int]
    placement: Placement
    block_ids: list[list[int]]
    """Of these chunks, one after the other, by table."""
    since: int = 0
    """The first step that may have computed any of it."""
    adapter: Adapter | None = None
    is_state: bool = False
    """Whether it is a state, not chunks of KV."""

    @classmethod
    def of(
        cls,
        reservation: Reservation,
        tables: Sequence[Sequence[int]],
        blocks_a_chunk: int,
        since: int = 0,
        adapter: Adapter | None = None,
    ) -> SavePlan:
        chunks = list(reservation.entries)
        return cls(
            reservation.id,
            chunks,
            reservation.placement,
            [
                [
                    block
                    for chunk in chunks
                    for block in table[chunk * blocks_a_chunk : (chunk + 1) * blocks_a_chunk]
                ]
                for table in tables
            ],
            since,
            adapter,
        )


@dataclass
class Plan(KVConnectorMetadata):
    """The scheduler, to the workers, each step."""

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    epoch: int = 0
    """Counts failed loads, as far as the scheduler knew of them. What was planned before it learned of one
    may stand on blocks that were not loaded: nothing of that step is stored."""
    step: int = 0
    """Its number."""
    names: int = 0
    """Counts names of the model, as far as the scheduler knew that its weights have changed. Under older ones
    than a rank's nothing is loaded and nothing stored."""
    compares: bool = False
    """Whether ranks are to see, before they compute, if their weights are those of before."""
    asks: bool = False
    """Whether the workers are to say what they hold: the scheduler knows nothing of them yet."""
    run: int = 0
    """The run of the server that the workers are asked to follow to; 0: all are there."""
    taken: list[int] = field(default_factory=list)
    """Blocks that the engine hands out in this step. Only filled if workers are asynchronous."""
    computes: Work | None = None

    @property
    def has_work(self) -> bool:
        """For a worker, once blocks have changed hands."""
        return bool(self.loads or self.saves or self.computes or self.asks or self.run or self.compares)


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """The workers, to the scheduler, each step; added up over the ranks."""

    facts: dict[int, RankFacts] = field(default_factory=dict)
    """Of each rank, if it was asked."""
    loaded: dict[int, int] = field(default_factory=dict)
    """Matches whose copies have ended or failed, with the number of ranks."""
    failed: set[int] = field(default_factory=set)
    """Those of them that failed."""
    epoch: int = 0
    names: int = 0
    """What the scheduler is to count, because weights have changed; 0: they have not."""
    origins: dict[int, Origin] = field(default_factory=dict)
    """Of each rank whose weights have changed."""
    was_unnoticed: bool = False
    """Whether they had changed for a while."""
    compared: dict[int, int] = field(default_factory=dict)
    """Maps a step to the number of ranks that have compared their weights, or learned of a change, in it."""
    slept: int = 0
    """Ranks that have slept, at the level that keeps weights."""
    adapters: dict[int, dict[int, str]] = field(default_factory=dict)
    """The adapters in each rank's memory, if they have changed."""
    runs: dict[int, int] = field(default_factory=dict)
    """How many ranks followed to which run of the server."""
    under_way: int = 0
    """Saves and loads that have not ended."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        assert isinstance(other, RankReport)
        return RankReport(
            self.facts | other.facts,
            _sum(self.loaded, other.loaded),
            self.failed | other.failed,
            max(self.epoch, other.epoch),
            max(self.names, other.names),
            self.origins | other.origins,
            self.was_unnoticed or other.was_unnoticed,
            _sum(self.compared, other.compared),
            self.slept + other.slept,
            self.adapters | other.adapters,
            _sum(self.runs, other.runs),
            self.under_way + other.under_way,
        )


def _sum(some: dict[int, int], more: dict[int, int]) -> dict[int, int]:
    return {key: some.get(key, 0) + more.get(key, 0) for key in some.keys() | more.keys()}
