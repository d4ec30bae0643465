"""The shares of tenants: a pool for each tenant with a share, and one pool for all others. No I/O.

A share is not a limit: any tenant may use free room. When a chunk must leave, it leaves from the pool that is
furthest above its share, where the requested room counts as taken. A tenant within its share loses nothing
to others. So a flood of one tenant evicts that tenant's own chunks first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

from lmtier.errors import ConfigError, excerpt
from lmtier.format.keys import tenant, tenant_of
from lmtier.rules.policy import Keyed, Policy
from lmtier.rules.session_policy import SessionAwarePolicy

OTHER = "other"
"""The name of all tenants without a share."""


class Weighed(Protocol):
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Share:
    name: str
    """The name for display."""
    salt: str = field(repr=False)  # may be a secret
    part: Fraction
    """The part of every place that can fill up."""

    def __str__(self) -> str:
        return f"{self.name}={float(self.part * 100):g}%"


def parse(setting: object) -> tuple[Share, ...]:
    """Reads {"tenant-a": 0.3, "b": "20%", "c": {"salt": "…", "share": 0.1}}, or the text tenant-a=0.3
    b=20%."""
    if isinstance(setting, tuple) and all(isinstance(each, Share) for each in setting):
        shares: tuple[Share, ...] = setting
    elif isinstance(setting, str):
        pairs = (word.rpartition("=") if "=" in word else (word, "", "") for word in setting.split())
        shares = tuple(Share(name, name, _part(name, part)) for name, _, part in pairs)
    elif isinstance(setting, Mapping):
        shares = tuple(_share(name, value) for name, value in setting.items())
    else:
        raise ConfigError(
            f"shares={excerpt(setting)}: write them as a table, or like tenant-a=0.3 tenant-b=20%"
        )
    names = [share.name for share in shares]
    try:
        "".join(share.name + share.salt for share in shares).encode()
    except UnicodeEncodeError:
        raise ConfigError("shares: a name or a salt is not text in UTF-8") from None
    if "" in names or not all(share.salt for share in shares):
        raise ConfigError("shares: a share belongs to a salt; write it like tenant-a=0.3")
    if OTHER in names:
        raise ConfigError(
            f"shares: {OTHER!r} is the name of all tenants without a share; use another name:"
            f' name = {{salt = "{OTHER}", share = …}}'
        )
    if len({tenant(share.salt) for share in shares}) < len(shares) or len(set(names)) < len(shares):
        raise ConfigError("shares: two shares have the same name or salt; remove one")
    if (total := sum(share.part for share in shares)) > 1:
        raise ConfigError(f"shares: together they are {float(total * 100):g}%; at most 100% is possible")
    return shares


def _share(name: str, value: Any) -> Share:
    if isinstance(value, Mapping):
        if value.keys() != {"salt", "share"} or not isinstance(value["salt"], str):
            raise ConfigError(f'shares: {excerpt(name)} as a table is written {{salt = "…", share = 0.3}}')
        return Share(name, value["salt"], _part(name, value["share"]))
    return Share(name, name, _part(name, value))


def _part(name: str, value: object) -> Fraction:
    try:
        text = "" if isinstance(value, bool) else str(value).strip()
        if not re.fullmatch(r"[\d.]{1,20}(/\d{1,20}|e-\d\d)?%?", text):  # Fraction would compute 1e9999999999
            raise ValueError
        part = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        part = Fraction(-1)
    if not 0 <= part <= 1:
        raise ConfigError(
            f"shares: {excerpt(name)}={excerpt(value)}: a share is a part of the room, like 0.3 or 30%"
        )
    return part


class Pool:
    """The chunks of one tenant, or of all tenants without a share, in one place."""

    __slots__ = ("evicted", "leased_bytes", "name", "policy", "share_bytes", "used")

    def __init__(self, name: str, room: int, policy: SessionAwarePolicy[Keyed]) -> None:
        self.name = name
        self.share_bytes = room
        """Bytes that it never loses to other pools."""
        self.used = 0
        self.leased_bytes = 0
        self.policy = policy
        # The policy gets no size and needs none: it uses the size at the last eviction. That is the room the
        # pool can get at present; its share may be far smaller, and the capacity far larger.
        self.evicted: Callable[[float], None] = lambda chunks: None
        """Counts evictions, if there is a metric for them."""

    def __repr__(self) -> str:
        return f"<Pool {self.name}: {self.used} of {self.share_bytes}>"

    def count(self, used: int, leased: int) -> None:
        self.used += used
        self.leased_bytes += leased

    def fullness(self, used: int) -> tuple[float, int]:
        """How far it would be above its share. Among pools without a share, the larger one is fuller."""
        if self.share_bytes:
            return used / self.share_bytes, used
        return math.inf if used else 0.0, used


class Pools:
    def __init__(self, shares: Sequence[Share], capacity: int, policy: SessionAwarePolicy[Keyed]) -> None:
        self._parts = [share.part for share in shares]
        self._of = {
            tenant(share.salt): Pool(share.name, int(capacity * share.part), policy.another())
            for share in shares
        }
        rest = capacity - sum(pool.share_bytes for pool in self._of.values())
        self.other = Pool(OTHER, rest, policy)

    def __iter__(self) -> Iterator[Pool]:
        yield from self._of.values()
        yield self.other

    def resize(self, capacity: int) -> None:
        for pool, part in zip(self._of.values(), self._parts, strict=True):
            pool.share_bytes = int(capacity * part)
        self.other.share_bytes = capacity - sum(pool.share_bytes for pool in self._of.values())

    def use(self, policy: Policy[Keyed]) -> None:
        """Order the chunks of every pool by this kind of policy."""
        for pool in self:
            pool.policy.use(policy if pool is self.other else policy.another())

    def of(self, key: bytes) -> Pool:
        return self._of.get(tenant_of(key), self.other)

    def order(self, taken: Sequence[Weighed], asker: Pool | None, claim: int) -> Generator[Keyed, None, None]:
        """The victims, in order, if `asker` wants `claim` bytes. The caller adds each to `taken`.

        Without an asker the place itself becomes smaller: then the fullest pool gives, also within its share.
        O(pools) for each. The caller closes it before any other call.
        """
        bytes_of = {pool: pool.used for pool in self if pool.used > pool.leased_bytes}
        if asker in bytes_of:
            bytes_of[asker] += claim
        orders: dict[Pool, Generator[Keyed, None, None]] = {}
        with ExitStack() as opened:
            while bytes_of:
                pool = max(bytes_of, key=lambda pool: pool.fullness(bytes_of[pool]))
                if asker is not None and bytes_of[pool] <= pool.share_bytes:
                    if asker not in bytes_of:  # no pool is above its share, so only the asker's own may leave
                        return
                    pool = asker
                if pool not in orders:
                    orders[pool] = opened.enter_context(closing(pool.policy.order()))
                before = len(taken)
                for entry in orders[pool]:
                    yield entry
                    if len(taken) > before:
                        bytes_of[pool] -= taken[-1].nbytes
                        break
                else:
                    del bytes_of[pool]
