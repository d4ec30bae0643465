"""Forgetting a tenant who leaves: its keys, its chunks in every tier, and its bytes in memory.

The keys go first: from then on what is sealed with them is unreadable, wherever copies of it are. Stores that
were on their way may still make a new key. So they are awaited, and that key goes too.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from lmtier.core.cache import Cache
from lmtier.core.lower import LowerTier
from lmtier.core.match import CLEARED, State
from lmtier.errors import LMTierError, MisuseError, audit, log
from lmtier.format.keys import NOBODY, TENANT_BYTES, tenant_of

_AT_ONCE = 1024  # chunks
_BYTES_AT_ONCE = 8 << 20

Steps: TypeAlias = "Generator[bool, None, TenantReport]"

BY_TENANT, BY_TIER, NOT = "tenant", "tier", "none"
"""Whose key seals: the tenant's own, one of the tier for all, none."""


@dataclass(slots=True)
class Forgotten:
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
        what = "searched" if self.chunks is None else f"{self.chunks} chunks deleted"
        said = f"{self.tier}: {what}, {self.keys} keys destroyed, sealed by: {self.sealed}"
        return f"{said}; left: {self.problem}" if self.problem else said


@dataclass(slots=True)
class TenantReport:
    tenant: str
    """In hexadecimal, as in its keys."""
    chunks: int = 0
    """How many left the slab."""
    overwritten: int = 0
    """Bytes of the slab that are zeros now: all of its free ones."""
    in_use: int = 0
    """Chunks that engines are reading. They are overwritten as soon as that ends."""
    tiers: list[Forgotten] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return not any(each.problem for each in self.tiers)

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def need_tenant(tenant: bytes) -> None:
    """Raises MisuseError."""
    if len(tenant) != TENANT_BYTES:
        raise MisuseError(f"the id of a tenant has {TENANT_BYTES} bytes, not {len(tenant)}")
    if tenant == NOBODY:
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
    until tiers know what they hold, and as long until they have deleted it. `who` asked for it, for the
    audit. Raises MisuseError.
    """
    need_tenant(tenant)
    until = time.monotonic() + patience
    report = TenantReport(tenant.hex())
    audit.info("lmtier: forget tenant %s, as %s asks", report.tenant, who)
    for tier in cache.lower.ours:
        keys = tier.tier.keys
        sealed = NOT if keys is None else BY_TENANT if keys.has_tenants else BY_TIER
        report.tiers.append(Forgotten(tier.label, sealed))
    _destroy_keys(cache, tenant, report)
    yield from _leave_slab(cache, tenant, report)
    while not cache.is_warm and time.monotonic() < until:
        yield True  # a scan would bring its chunks back
    yield from _leave_slab(cache, tenant, report)  # what was on its way up
    until = time.monotonic() + patience
    found = {told.tier: told for told in report.tiers}
    for owned in cache.lower.owned:
        found[owned.label].chunks = 0
    for tiers in (cache.lower.owned, cache.lower):
        for tier in tiers:  # again, for what was stored meanwhile; and no other host brings it back
            for chunks in tier.forget(tenant):
                found[tier.label].chunks = (found[tier.label].chunks or 0) + chunks
                yield False
    while time.monotonic() < until and any(
        _is_left(tier, tenant) and not _is_hopeless(tier, tenant) for tier in cache.lower.ours
    ):
        yield True
    for tier, told in zip(cache.lower.ours, report.tiers, strict=True):
        if not tier.is_warm:
            told.problem = told.problem or "what it holds is not known yet"
        elif _is_left(tier, tenant):
            told.problem = told.problem or f"not everything is deleted yet {tier.why_uncleared}".strip()
    _destroy_keys(cache, tenant, report)
    for nbytes in cache.slab.wipe_free():
        report.overwritten += nbytes
        yield False
    report.in_use = sum(tenant_of(entry.key) == tenant for entry in cache.room.erasing)
    audit.info(
        "lmtier: tenant %s: cpu: %d chunks deleted, %d in use, %d bytes overwritten",
        *(report.tenant, report.chunks, report.in_use, report.overwritten),
    )
    for told in report.tiers:
        audit.info("lmtier: tenant %s: %s", report.tenant, told)
    return report


def _destroy_keys(cache: Cache, tenant: bytes, report: TenantReport) -> None:
    for tier, told in zip(cache.lower.ours, report.tiers, strict=True):
        if tier.tier.keys is not None:
            try:
                told.keys += tier.tier.keys.forget(tenant)
            except LMTierError as error:  # the others go nevertheless
                log.error("lmtier: %s", error)
                told.problem = str(error)


def _leave_slab(cache: Cache, tenant: bytes, report: TenantReport) -> Generator[bool, None, None]:
    # What was deleted for another reason, while an engine reads it.
    cache.room.erasing.update(entry for entry in cache.room.leaving if tenant_of(entry.key) == tenant)
    done = 0
    for number, entry in enumerate(cache.index.entries(), 1):
        if tenant_of(entry.key) == tenant and entry.state is not State.GONE:
            cache.room.erase(entry, CLEARED)
            report.chunks += 1
            done += entry.nbytes
        if not number % _AT_ONCE or done > _BYTES_AT_ONCE:
            done = 0
            yield False


def _is_left(tier: LowerTier, tenant: bytes) -> bool:
    return tier.is_moving(tenant) or not tier.is_clear


def _is_hopeless(tier: LowerTier, tenant: bytes) -> bool:
    """Whether waiting does not help: the tier fails."""
    return tier.down.is_open or tier.cannot_clear or tier.fails_to_delete(tenant)
