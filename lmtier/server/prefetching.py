"""Loads a prompt into memory before requests ask for it, in portions that suit the tiers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmtier.core.cache import Cache
from lmtier.core.match import Lookup
from lmtier.core.placement import write_runs
from lmtier.format.layout import ChunkForm
from lmtier.rules.breaker import Breaker
from lmtier.server.commands import PendingAnswer

SECONDS = 5.0
"""After which one call answers with what it has loaded so far."""
PATIENCE = 60.0
"""Seconds for one portion."""
_PORTION = 16 << 20  # bytes of the first portion
_MOST = 256 << 20
_HASTE = 0.25  # the part of a tier's deadline for a portion: late chunks count as failures of the tier
_PAUSE = max(Breaker.PAUSES) + 0.25  # seconds after which a tier is tried again, whatever has failed
_TOO_MUCH = frozenset({"deadline", "tier_down"})
_IN_MEMORY = "cpu"


class _Portion:
    """The number of chunks to load at a time, adapted to the time of the last ones."""

    def __init__(self, room: int, deadline: float) -> None:
        self.chunks = max(1, _PORTION // room)
        self._most = max(1, _MOST // room)
        self._soon = _HASTE * deadline

    def learn(self, loaded: int, seconds: float, *, is_cut: bool) -> None:
        if is_cut or seconds >= self._soon:
            self.chunks = max(1, self.chunks // 2)
        elif loaded >= self.chunks:  # fewer chunks prove nothing
            self.chunks = min(2 * self.chunks, self._most)


def prefetching(cache: Cache, keys: Sequence[bytes], form: ChunkForm) -> PendingAnswer:
    """Load the leading chunks of a prompt. Returns where they were, why it ended, and whether it has ended.

    Loaded chunks stay leased meanwhile, so that they are not evicted for the rest.
    """
    portion = _Portion(sum(form.sizes), cache.config.load_deadline)
    leased: Lookup | None = None
    until, done, why, has_retried, is_over = time.monotonic() + SECONDS, 0, "", False, False
    sources: list[str] = []
    try:
        while not is_over and (not done or time.monotonic() < until):
            began = time.monotonic()
            match = cache.bring(keys[: done + portion.chunks], form, deadline=PATIENCE)
            before, leased = leased, match
            try:
                while match.pending_lookups:
                    yield None
                cache.prefetch(match)
                while not match.is_ready:
                    yield None
            finally:
                if before is not None:
                    cache.release(before)
            loaded_count = sum(source != _IN_MEMORY for source in match.sources[done:])
            is_late = match.cut_reason in _TOO_MUCH
            portion.learn(loaded_count, time.monotonic() - began, is_cut=is_late)
            if match.chunks > done:
                sources += match.sources[done:]
                done, has_retried = match.chunks, False
                is_over = done == len(keys)
            elif is_late and not has_retried:
                has_retried, pause_end = True, time.monotonic() + _PAUSE
                while time.monotonic() < pause_end:
                    yield None
            else:
                is_over, why = True, match.cut_reason
        return {"sources": write_runs(sources).decode(), "why": why, "is_over": is_over}
    finally:
        if leased is not None:
            cache.release(leased)
