"""All lower tiers of a cache, the nearest first: owned tiers and shared tiers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from lmtier.config import TierSpec
from lmtier.core.lower import CacheContext, LowerTier
from lmtier.core.match import Entry
from lmtier.core.owned import OwnedTier
from lmtier.core.shared import SharedTier
from lmtier.errors import ConfigError
from lmtier.tiers.base import Tier
from lmtier.tiers.registry import open_tier

_SEEN = 64


class LowerTiers(list[LowerTier]):
    def __init__(self) -> None:
        self.owned: list[OwnedTier] = []
        self.shared: list[SharedTier] = []
        self.ours: list[LowerTier] = []
        """All but those that belong to another server."""
        self.named: dict[str, LowerTier] = {}
        """The tiers by label."""
        self.watching: list[LowerTier] = []
        """The tiers whose writes depend on which chunks are asked for again."""
        self.written_ahead: list[LowerTier] = []
        """The tiers that get chunks when they are about to leave the slab."""
        self.pending_touches: deque[tuple[bytes, ...]] = deque(maxlen=_SEEN)
        """Prefixes that `touch` will mark as used."""

    def open(
        self,
        specs: Sequence[TierSpec],
        opened: Mapping[str, Tier],
        wake: Callable[[], None],
        above: CacheContext,
        locks: Mapping[str, int],
        is_known: Callable[[str], bool],
    ) -> None:
        """Open all tiers, or none. `opened` maps the URLs of some to tiers that are already open.

        `locks` has the locked files that a server before this one has handed over, by place. A tier whose
        place is known is not scanned. These descriptors are closed: a tier has duplicates.
        """
        unused_locks = dict(locks)
        try:
            for number, spec in enumerate(specs):
                tier = opened.get(spec.url) or open_tier(spec, unused_locks.pop(spec.base_url, None))
                tier.wake = wake
                same_scheme_count = sum(each.scheme == spec.scheme for each in specs[:number])
                label = f"{spec.scheme}-{same_scheme_count + 1}" if same_scheme_count else spec.scheme
                try:
                    if tier.keeps:
                        self.owned.append(
                            OwnedTier(label, spec, tier, above, scans=not is_known(spec.base_url))
                        )
                        self.append(self.owned[-1])
                    else:
                        self.shared.append(SharedTier(label, spec, tier, above))
                        self.append(self.shared[-1])
                except ConfigError:
                    tier.close()
                    raise
        except BaseException:
            for each in self:
                each.close(0.0)
            raise
        finally:
            for lock in locks.values():
                os.close(lock)
        self.ours = [tier for tier in self if not tier.tier.source]
        self.named = {tier.label: tier for tier in self}
        self.watching = [tier for tier in self if tier.watches]
        self.written_ahead = [tier for tier in self if tier.write in ("evicted", "auto")]

    def complete_takeover(self) -> None:
        """No other process needs the locks of the tiers any more: to close a tier ends its lock."""
        for tier in self:
            tier.tier.is_handed_over = False

    def is_leased_only_by_writes(self, entry: Entry) -> bool:
        """Whether only their writes lease this chunk of the slab: no engine reads it, and nothing pins it."""
        return entry.leases == sum(entry in tier.storing_entries for tier in self)

    def tiers_to_ask(self, source: str) -> list[SharedTier]:
        """The tiers that a request with this source asks what they have."""
        return [tier for tier in self.shared if tier.source in ("", source)]

    @contextmanager
    def replacing(self, key: bytes) -> Iterator[None]:
        """Within it a newer value comes under this key."""
        for tier in self.owned:  # shared tiers never got it
            tier.begin_replacing(key)
        yield
        for tier in self.owned:
            tier.end_replacing(key)

    def on_request(self, keys: Sequence[bytes], run: Sequence[Entry]) -> None:
        """A request asked for this prefix; the slab has `run` of it."""
        if self:
            self.pending_touches.append(tuple(keys))
        if self.watching:
            for entry in run:
                entry.is_reused = True
            for tier in self.watching:
                tier.on_hit(run)

    def touch(self) -> None:
        """Mark the prefixes as used that were seen since the last call."""
        while self.pending_touches:
            keys = self.pending_touches.popleft()
            for tier in self:
                tier.touch(keys)
