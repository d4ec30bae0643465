"""The running loads of ranks: leases and places in GPU memory are held until all ranks are done."""

from __future__ import annotations

from dataclasses import dataclass

from lmtier.config import TierSpec
from lmtier.copy.gpu_copies import GpuCopies, GpuSlots
from lmtier.wire.verbs import RemoteMatch
from lmtier_integrations.vllm.messages import RankReport, SlotOfEachChunk

_FORGETS = 0.9  # the weight of all loads before, when one more is learned


@dataclass(eq=False, slots=True)
class _TrackedLoad:
    match: RemoteMatch
    left: int
    """Ranks that are not done."""
    places: GpuSlots | None = None
    """The places in GPU memory."""
    is_believed: bool = True
    is_in_step: bool = False


class LoadTracker:
    def __init__(self, ranks: int, gpu: TierSpec | None) -> None:
        self._ranks = ranks
        self._gpu = GpuCopies(gpu.capacity, gpu.policy) if gpu is not None and gpu.capacity else None
        """The copies in GPU memory."""
        self._loads: dict[int, _TrackedLoad] = {}
        """By the match's number."""
        self.failed_loads = 0
        """The number of failed loads that ranks have reported."""
        self.is_under_way = False
        """Whether ranks have unfinished copies. They need another step to commit and to end leases."""
        self._tokens, self._seconds = 0.0, 0.0

    @property
    def is_unconfirmed(self) -> bool:
        """Whether steps have computed on loads that not all ranks have confirmed."""
        return any(each.is_in_step for each in self._loads.values())

    def seconds(self, tokens: int) -> float | None:
        """How long ranks take to load so many tokens, by recent loads; None: that is not known yet."""
        return tokens * self._seconds / self._tokens if self._tokens else None

    def load(self, match: RemoteMatch, first: int, *, is_in_step: bool) -> tuple[SlotOfEachChunk | None, int]:
        """Ranks load chunks from `first` on: their places in GPU memory, and how many lie there already."""
        copy = self._loads[match.grant.id] = _TrackedLoad(match, self._ranks, is_in_step=is_in_step)
        if self._gpu is None:
            return None, 0
        copy.places = self._gpu.load(match.grant.placement, match.grant.form, first)
        return _slots_of(copy.places), copy.places.filled

    def learn(self, report: RankReport) -> list[RemoteMatch]:
        """Apply a report. Returns the matches that no rank uses any more."""
        self.failed_loads = max(self.failed_loads, report.failed_loads)
        self.is_under_way = report.under_way > 0
        if report.load_tokens:
            self._tokens = self._tokens * _FORGETS + report.load_tokens
            self._seconds = self._seconds * _FORGETS + report.load_seconds
        released_matches: list[RemoteMatch] = []
        for match_id in report.failed:
            self._loads[match_id].is_believed = False
        for match_id, ranks in report.loaded.items():
            load = self._loads[match_id]
            load.left -= ranks
            if load.left:
                continue
            del self._loads[match_id]
            released_matches.append(load.match)
            if self._gpu is not None and load.places is not None:
                self._gpu.release(load.places, is_verified=load.is_believed)
        return released_matches

    def forget_gpu(self) -> None:
        """Delete all copies: they are from other weights, or from another run of the server."""
        if self._gpu is not None:
            self._gpu.clear()


def _slots_of(places: GpuSlots) -> SlotOfEachChunk:
    return [place and (place.offset, place.is_filled) for place in places.by_chunk]
