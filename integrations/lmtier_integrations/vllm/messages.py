"""The messages between the scheduler and the workers of an engine. All of them can be pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmtier.core.grant import Grant
from lmtier.format.layout import Shard

NULL_BLOCK = 0
"""In a request's block table: a block that has left a sliding window, or a state that is not kept."""

SlotOfEachChunk: TypeAlias = "list[tuple[int, bool] | None]"
"""For each chunk: its place in GPU memory, and whether a copy is there already; or None."""

PrefillWork: TypeAlias = "tuple[int, float]"
"""For a step that mostly computes prompts: the number of its tokens, and the sum of their positions."""

Adapter: TypeAlias = "tuple[int, str]"
"""An adapter: vLLM's number for it, and a digest of its content."""


class WeightsOrigin(NamedTuple):
    """What the weights in a rank's memory were loaded from."""

    files: str = ""
    """The files and their time stamps; empty: that is not known, or weights may change unseen."""
    digest: str = ""
    """The digest of the files' names and contents, from the rank that computed it."""
    why: str = ""
    """Why the files cannot be known."""


@dataclass
class RankFacts:
    """The layout of the model's KV in a worker, and the part that the worker holds."""

    layout: bytes
    shard: Shard
    run: int
    backend_without_prefixes: str
    """The backend, if it cannot continue from loaded KV; else empty."""
    is_asynchronous: bool
    """Whether copies continue after a step, as on a GPU."""
    origin: WeightsOrigin
    states: tuple[bytes, Shard] | None = None
    """The layout and the shard of its states, if it has any."""


@dataclass
class LoadPlan:
    """A match to copy into a request's blocks."""

    grant: Grant
    block_ids: list[list[int]]
    """For each block table."""
    computed_tokens: int
    request: str
    """For an asynchronous load: the request that waits for it. Empty: the step computes on it."""
    gpu_slots: SlotOfEachChunk | None = None
    """For the chunks that the engine has not computed completely."""
    adapter: Adapter | None = None
    """That the keys say it was computed with."""
    state_block_ids: list[list[int]] = field(default_factory=list)
    """The block in each block table of the state that it ends with, if it ends with one."""


@dataclass
class SavePlan:
    """Reserved extents to fill from a request's blocks."""

    grant: Grant
    block_ids: list[list[int]]
    """For each block table, the blocks of these chunks, one after the other."""
    since: int = 0
    """The first step that may have computed any of it."""
    adapter: Adapter | None = None
    is_state: bool = False
    """Whether it is a state, not chunks of KV."""

    @classmethod
    def of(
        cls,
        grant: Grant,
        tables: Sequence[Sequence[int]],
        blocks_a_chunk: int,
        since: int = 0,
        adapter: Adapter | None = None,
    ) -> SavePlan:
        return cls(
            grant,
            [
                [
                    block
                    for chunk in grant.chunks
                    for block in table[chunk * blocks_a_chunk : (chunk + 1) * blocks_a_chunk]
                ]
                for table in tables
            ],
            since,
            adapter,
        )


@dataclass
class Plan(KVConnectorMetadata):
    """From the scheduler to the workers, in each step."""

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    failed_loads: int = 0
    """The number of failed loads that the scheduler knew of. A rank that knows of more stores nothing in this
    step, because the step may compute from blocks that were not loaded."""
    step: int = 0
    """The number of the step."""
    weights_version: int = 0
    """How often the model's name had changed, as far as the scheduler knew. A rank that knows of more changes
    loads nothing and stores nothing."""
    checks_weights: bool = False
    """Whether ranks must compare their weights with their earlier ones before they compute."""
    wants_facts: bool = False
    """Whether workers must report their facts, because the scheduler has none yet."""
    run: int = 0
    """The run of the server that workers must connect to; 0: all are connected to it."""
    reused_blocks: list[int] = field(default_factory=list)
    """Blocks that the engine hands out in this step. Only filled if workers are asynchronous."""
    lent: list[int] = field(default_factory=list)
    """Blocks of requests that are not in this step. Another connector may write into them at once."""
    prefill_work: PrefillWork | None = None

    @property
    def has_work(self) -> bool:
        """Whether a worker has more to do than to wait for copies in `reused_blocks`."""
        return bool(
            self.loads
            or self.saves
            or self.prefill_work
            or self.wants_facts
            or self.run
            or self.checks_weights
        )


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, in each step; added up over the ranks."""

    facts: dict[int, RankFacts] = field(default_factory=dict)
    """By rank, if the plan asked."""
    loaded: dict[int, int] = field(default_factory=dict)
    """Matches whose copies have ended or failed, with the number of ranks."""
    failed: set[int] = field(default_factory=set)
    """Matches whose copies failed."""
    failed_loads: int = 0
    weights_version: int = 0
    """The new `Plan.weights_version`, because weights have changed; 0: they have not."""
    origins: dict[int, WeightsOrigin] = field(default_factory=dict)
    """For each rank whose weights have changed."""
    was_unnoticed: bool = False
    """Whether a comparison found the change, some time after it happened."""
    checked_weights: dict[int, int] = field(default_factory=dict)
    """Maps a step to the number of ranks that have compared their weights, or learned of a change, in it."""
    slept_ranks: int = 0
    """The number of ranks that have slept at level 1, which keeps the weights."""
    adapters: dict[int, dict[int, str]] = field(default_factory=dict)
    """The adapters in each rank's memory, if they have changed."""
    connected_ranks: dict[int, int] = field(default_factory=dict)
    """Maps a run of the server to the number of ranks that have connected to it."""
    pinned_ranks: dict[int, int] = field(default_factory=dict)
    """Maps a run of the server to the number of ranks that reach all of its memory without a detour."""
    load_tokens: int = 0
    load_seconds: float = 0.0
    """The tokens that devices have loaded, and how long that took, over all ranks."""
    under_way: int = 0
    """The number of unfinished saves and loads."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        assert isinstance(other, RankReport)
        return RankReport(
            self.facts | other.facts,
            _sum(self.loaded, other.loaded),
            self.failed | other.failed,
            max(self.failed_loads, other.failed_loads),
            max(self.weights_version, other.weights_version),
            self.origins | other.origins,
            self.was_unnoticed or other.was_unnoticed,
            _sum(self.checked_weights, other.checked_weights),
            self.slept_ranks + other.slept_ranks,
            self.adapters | other.adapters,
            _sum(self.connected_ranks, other.connected_ranks),
            _sum(self.pinned_ranks, other.pinned_ranks),
            self.load_tokens + other.load_tokens,
            self.load_seconds + other.load_seconds,
            self.under_way + other.under_way,
        )


def _sum(left: dict[int, int], right: dict[int, int]) -> dict[int, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in left.keys() | right.keys()}
