"""Forgetting a tenant who leaves: its keys, its chunks in every tier, and its bytes in memory.

The tombstone comes first, and then the keys go: from then on what is sealed with them is unreadable, wherever
copies of it are. Other servers that share the store of keys read the tombstone, and forget the tenant too.
Until a server has dropped all that it holds from before, it seals nothing of this tenant: bytes from before
must not come back under a new key.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from lmtier.core.lower import LowerTier
from lmtier.core.match import CPU
from lmtier.core.owned import OwnedTier
from lmtier.errors import LMTierError, MisuseError, audit, log, size_text
from lmtier.format.keys import NO_TENANT, TENANT_BYTES, tenant_of
from lmtier.format.objects import Selector
from lmtier.format.sealing import TenantKeys, Tombstone
from lmtier.tiers.blocking import LEARNED_WITHIN

if TYPE_CHECKING:
    from lmtier.core.cache import Cache

Steps: TypeAlias = "Generator[bool, None, TenantReport]"

BY_TENANT, BY_TIER, NOT = "tenant", "tier", "none"
"""Whose key seals: the tenant's own, one of the tier for all, none."""


@dataclass(slots=True)
class TierReport:
    """What became of a tenant in one tier."""

    tier: str
    sealed: str
    """BY_TENANT: copies of its chunks elsewhere are unreadable. Otherwise they are not."""
    chunks: int | None = None
    """How many were deleted. None: the tier was searched and does not count them."""
    keys: int = 0
    """How many keys were destroyed."""
    problem: str = ""
    """Why something is left, if so."""

    def __str__(self) -> str:
        outcome = "searched" if self.chunks is None else f"{self.chunks} chunks deleted"
        text = f"{self.tier}: {outcome}, {self.keys} keys destroyed, sealed by: {self.sealed}"
        return f"{text}; left: {self.problem}" if self.problem else text


@dataclass(slots=True)
class TenantReport:
    tenant: str
    """In hexadecimal, as in its keys."""
    since: int = 0
    """When it was forgotten before, in ms since the epoch. 0: it was not, as far as tiers know."""
    chunks: int = 0
    """How many left the slab."""
    overwritten: int = 0
    """Bytes of the slab that are zeros now: all of its free ones."""
    in_use: int = 0
    """Chunks that engines are reading. They are overwritten as soon as that ends."""
    tiers: list[TierReport] = field(default_factory=list)
    others_within: float | None = None
    """Seconds after which all servers that share the keys of tenants know it. None: no keys are shared."""

    @property
    def is_done(self) -> bool:
        return not any(tier_report.problem for tier_report in self.tiers)

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def need_tenant(tenant: bytes) -> None:
    """Raises MisuseError."""
    if len(tenant) != TENANT_BYTES:
        raise MisuseError(f"the id of a tenant has {TENANT_BYTES} bytes, not {len(tenant)}")
    if tenant == NO_TENANT:
        raise MisuseError("requests without a salt belong to no tenant; `lmtier clear` deletes them")


def forget(cache: Cache, tenant: bytes, patience: float = 60.0, who: str = "the owner") -> TenantReport:
    """`forgetting`, for owners without a loop."""
    steps = forgetting(cache, tenant, patience, who)
    try:
        while True:
            if next(steps):
                cache.wait_for_tiers()
    except StopIteration as end:
        report: TenantReport = end.value
        return report


def forgetting(cache: Cache, tenant: bytes, patience: float, who: str) -> Steps:
    """Forget a tenant, in steps between which the owner may serve others.

    It yields True if the owner has to step the cache before it goes on. It waits at most `patience` seconds
    until tiers know what they hold and have deleted it. `who` asked for it, for the audit. If it is closed
    before its end, the cache goes on by itself. Raises MisuseError.
    """
    need_tenant(tenant)
    deadline = time.monotonic() + patience
    report = _new_report((tenant,), cache.lower.ours)
    audit.info("lmtier: forget tenant %s, as %s asks", report.tenant, who)
    with cache.forgotten_tenants.in_hand(tenant) as stores:
        tombstones = (store.forgotten.get(tenant) for store in stores)
        report.since = max((tombstone.at for tombstone in tombstones if tombstone is not None), default=0)
        report.others_within = LEARNED_WITHIN if stores else None
        _destroy_keys(cache, tenant, report)
        generations = cache.forgotten_tenants.known((tenant,))
        yield from _clear(cache, (tenant,), report)
        while time.monotonic() < deadline and any(
            _is_deletion_unfinished(tier, tenant) and not _is_hopeless(tier, tenant)
            for tier in cache.lower.ours
        ):
            yield True
        for tier, tier_report in zip(cache.lower.ours, report.tiers, strict=True):
            if _is_deletion_unfinished(tier, tenant) and not tier_report.problem:
                not_yet = f"not everything is deleted yet {tier.why_uncleared}".strip()
                tier_report.problem = not_yet if tier.is_warm else "what it holds is not known yet"
        yield from _clear(cache, (tenant,), report, ())  # what a tier gave before it had deleted it
        if report.is_done and not cache.forgotten_tenants.hears_of_others:
            cache.forgotten_tenants.have_left(generations)  # otherwise `step` sees to it
        yield from _end(cache, (tenant,), report)
    return report


class ForgottenTenants:
    """The tenants whom another server has forgotten, and who leave this one.

    A tombstone in a store of keys says so. From the moment that a thread of a tier has read it, their chunks
    are not found, and no tier seals any of them. In small steps they leave the slab and the tiers. When that
    is done, and no store from before is on its way, they may come back.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        stores = [keys.tenants for tier in cache.lower.ours if (keys := tier.tier.keys) and keys.tenants]
        self._stores: list[TenantKeys] = stores
        self._seen: list[Mapping[bytes, Tombstone]] = [{} for _ in stores]
        """The tombstones that `step` has seen: at first none, because some came after `dropped` was set."""
        self._waiting: set[bytes] = set()
        """Tenants who are still to leave."""
        self._in_hand: set[bytes] = set()
        """Tenants whom `forgetting` takes care of."""
        self._steps: Generator[bool, None, None] | None = None
        self.hears_of_others = any(_sealed_by(tier) != BY_TENANT for tier in cache.lower.shared)
        """Whether a tier may give it what another server holds that has not read the tombstone yet."""
        self._exposed = [tier for tier in cache.lower.owned if _sealed_by(tier) != BY_TENANT]
        """Tiers whose content from before can still be read."""
        if self._exposed:  # this server may not have run when a tenant was forgotten
            forgotten_tenants = {tenant for store in stores for tenant in store.forgotten}
            for store in stores:
                store.dropped.clear()
            self._steps = self._leave(forgotten_tenants, self._exposed) if forgotten_tenants else None

    def covers(self, keys: Sequence[bytes]) -> bool:
        """Whether these are of a tenant who leaves."""
        return bool(self._stores and keys) and self._is_here(tenant_of(keys[0]))

    def _is_here(self, tenant: bytes) -> bool:
        return any(
            (tombstone := store.forgotten.get(tenant)) is not None
            and store.dropped.get(tenant, 0) < tombstone.generation
            for store in self._stores
        )

    def step(self) -> bool:
        """Go on. Returns whether the next step should follow at once."""
        lower = self._cache.lower
        for i, store in enumerate(self._stores):
            if store.forgotten is not self._seen[i]:
                self._seen[i] = store.forgotten
                self._waiting.update(store.forgotten)
        if self._waiting and self._steps is None:
            self._waiting = {tenant for tenant in self._waiting if self._is_here(tenant)}
            if new_tenants := self._waiting - self._in_hand:
                self._waiting -= new_tenants
                # Who wrote the tombstone searches shared tiers; what is sealed there cannot be read.
                left_to_others = {tier for tier in lower.shared if _sealed_by(tier) == BY_TENANT}
                self._steps = self._leave(new_tenants, [t for t in lower.ours if t not in left_to_others])
        if self._steps is None:
            return False
        must_wait = next(self._steps, None)
        if must_wait is None:
            self._steps = None
        return not must_wait

    def _leave(self, tenants: set[bytes], tiers: Sequence[LowerTier]) -> Generator[bool, None, None]:
        """They leave the slab and these tiers."""
        cache, report = self._cache, _new_report(tenants, tiers)
        generations, began_at = self.known(tenants), time.monotonic()
        audit.info("lmtier: %s: forgotten, says the store of keys", report.tenant)
        yield from _clear(cache, tenants, report, tiers)
        while self.hears_of_others and time.monotonic() < began_at + LEARNED_WITHIN:
            yield True
        yield from _clear(cache, tenants, report, ())  # what was on its way up
        writes_from_before = {
            entry for tier in cache.lower for entry in tier.storing_entries if tenant_of(entry.key) in tenants
        }
        while any(not writes_from_before.isdisjoint(tier.storing_entries) for tier in cache.lower):
            yield True
        self.have_left(generations)
        yield from _end(cache, tenants, report)

    @contextmanager
    def in_hand(self, tenant: bytes) -> Iterator[list[TenantKeys]]:
        """The caller sees to it that this tenant leaves. If it does not, `step` does."""
        self._in_hand.add(tenant)
        try:
            yield self._stores
        finally:
            self._in_hand.discard(tenant)

    def known(self, tenants: Collection[bytes]) -> list[tuple[TenantKeys, bytes, int]]:
        """The generation that each has now, for `have_left`."""
        return [
            (store, tenant, tombstone.generation)
            for store in self._stores
            for tenant in tenants
            if (tombstone := store.forgotten.get(tenant)) is not None
        ]

    def have_left(self, generations: Iterable[tuple[TenantKeys, bytes, int]]) -> None:
        """Nothing from before these generations is here."""
        for store, tenant, generation in generations:
            store.dropped[tenant] = generation

    # ---- to and from another process

    def dropped_generations(self) -> dict[str, list[tuple[bytes, int]]]:
        """What this process has dropped, for one that takes over its memory."""
        return {store.place: [*store.dropped.items()] for store in self._stores}

    def restore(self, dumped: Mapping[str, Sequence[tuple[bytes, int]]]) -> None:
        """The memory of another process is here, which had dropped this."""
        for store in self._stores:
            store.dropped.clear()
            store.dropped.update(dumped.get(store.place, ()))
        self._steps = None


def _sealed_by(tier: LowerTier) -> str:
    keys = tier.tier.keys
    return NOT if keys is None else BY_TIER if keys.tenants is None else BY_TENANT


def _new_report(tenants: Collection[bytes], tiers: Sequence[LowerTier]) -> TenantReport:
    report = TenantReport(" ".join(sorted(tenant.hex() for tenant in tenants)))
    for tier in tiers:
        is_counted = isinstance(tier, OwnedTier) and tier.is_warm
        report.tiers.append(TierReport(tier.label, _sealed_by(tier), 0 if is_counted else None))
    return report


def _destroy_keys(cache: Cache, tenant: bytes, report: TenantReport) -> None:
    destroyed_stores = set[str]()
    for tier, tier_report in zip(cache.lower.ours, report.tiers, strict=True):
        store = None if tier.tier.keys is None else tier.tier.keys.tenants
        if store is not None:
            try:
                if store.place in destroyed_stores:
                    store.read_tombstones()
                else:
                    destroyed_stores.add(store.place)
                    tier_report.keys += store.forget(tenant)
            except (LMTierError, OSError) as error:  # the others go nevertheless
                log.error("lmtier: %s", error)
                tier_report.problem = str(error)


def _clear(
    cache: Cache, tenants: Collection[bytes], report: TenantReport, tiers: Sequence[LowerTier] | None = None
) -> Generator[bool, None, None]:
    for notify in cache.followers.forgotten:
        notify(tenants)
    selector = Selector(tenants=frozenset(tenants))
    tier_reports = {tier_report.tier: tier_report for tier_report in report.tiers}
    for place, chunks in cache.clear_in_steps(selector, force=True, tiers=tiers):
        report.chunks += chunks if place == CPU else 0
        if (tier_report := tier_reports.get(place)) is not None:
            tier_report.chunks = (tier_report.chunks or 0) + chunks
        yield False


def _end(cache: Cache, tenants: Collection[bytes], report: TenantReport) -> Generator[bool, None, None]:
    for nbytes in cache.slab.wipe_free():
        report.overwritten += nbytes
        yield False
    report.in_use = sum(tenant_of(entry.key) in tenants for entry in cache.memory.to_wipe)
    audit.info(
        "lmtier: tenant %s: cpu: %d chunks deleted, %d in use, %s overwritten",
        *(report.tenant, report.chunks, report.in_use, size_text(report.overwritten)),
    )
    for tier_report in report.tiers:
        audit.info("lmtier: tenant %s: %s", report.tenant, tier_report)


def _is_deletion_unfinished(tier: LowerTier, tenant: bytes) -> bool:
    return tier.is_changing_tenant(tenant) or not tier.is_clear_done


def _is_hopeless(tier: LowerTier, tenant: bytes) -> bool:
    """Whether waiting does not help: the tier fails."""
    return tier.store_breaker.is_open or tier.is_clear_failing or tier.fails_to_delete(tenant)
