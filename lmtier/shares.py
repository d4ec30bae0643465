"""Who may keep how much: a pool for each tenant with a share, one for all others, and who must give. Pure.

A share is no wall. Room that nobody needs may be used by anybody. When something must leave, it leaves from
the pool that is furthest above its share, the room that is asked for counted as taken; and who has no more
than its share loses nothing to others. So a tenant's flood drives out its own first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

from lmtier.errors import ConfigError
from lmtier.keys import tenant, tenant_of
from lmtier.policy import Keyed, Policy

OTHER = "other"
"""What everybody without a share is called."""


class Weighed(Protocol):
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Share:
    name: str
    """For people."""
    salt: str = field(repr=False)  # may be a secret
    part: Fraction
    """Of every place that can fill up."""

    def __str__(self) -> str:
        return f"{self.name}={float(self.part * 100):g}%"


def parse(given: object) -> tuple[Share, ...]:
    """{"tenant-a": 0.3, "b": "20%", "c": {"salt": "…", "share": 0.1}}, or text: tenant-a=0.3 b=20%."""
    if isinstance(given, tuple) and all(isinstance(each, Share) for each in given):
        shares: tuple[Share, ...] = given
    elif isinstance(given, str):
        pairs = (word.rpartition("=") if "=" in word else (word, "", "") for word in given.split())
        shares = tuple(Share(name, name, _part(name, part)) for name, _, part in pairs)
    elif isinstance(given, Mapping):
        shares = tuple(_share(name, value) for name, value in given.items())
    else:
        raise ConfigError(f"shares={given!r}: write them as a table, or like tenant-a=0.3 tenant-b=20%")
    names = [share.name for share in shares]
    if "" in names or not all(share.salt for share in shares):
        raise ConfigError("shares: a share belongs to a salt; write it like tenant-a=0.3")
    if OTHER in names:
        raise ConfigError(
            f"shares: {OTHER!r} are those without a share; name it otherwise:"
            f' name = {{salt = "{OTHER}", share = …}}'
        )
    if len({tenant(share.salt) for share in shares}) < len(shares) or len(set(names)) < len(shares):
        raise ConfigError("shares: two of them are for the same name or salt")
    if (total := sum(share.part for share in shares)) > 1:
        raise ConfigError(f"shares: together they are {float(total * 100):g}%, of 100%")
    return shares


def _share(name: str, value: Any) -> Share:
    if isinstance(value, Mapping):
        if value.keys() != {"salt", "share"} or not isinstance(value["salt"], str):
            raise ConfigError(f'shares: {name} as a table is written {{salt = "…", share = 0.3}}')
        return Share(name, value["salt"], _part(name, value["share"]))
    return Share(name, name, _part(name, value))


def _part(name: str, value: object) -> Fraction:
    text = "" if isinstance(value, bool) else str(value).strip()
    try:
        part = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        part = Fraction(-1)
    if not 0 <= part <= 1:
        raise ConfigError(f"shares: {name}={value}: a share is a part of the room, like 0.3 or 30%")
    return part


class Pool:
    """What one tenant, or everybody else, has in one place."""

    __slots__ = ("evicted", "name", "pinned", "policy", "room", "used")

    def __init__(self, name: str, room: int, policy: Policy[Keyed]) -> None:
        self.name = name
        self.room = room
        """Bytes that it loses to nobody else."""
        self.used = 0
        self.pinned = 0
        self.policy = policy
        # It is told no size and needs none: it goes by how much there was when it last had to give. That is
        # what the pool can get as things are; its share may be far less, the capacity far more.
        self.evicted: Callable[[float], None] = lambda chunks: None
        """Told how many had to leave, if anybody counts."""

    def __repr__(self) -> str:
        return f"<Pool {self.name}: {self.used} of {self.room}>"

    def count(self, used: int, pinned: int) -> None:
        self.used += used
        self.pinned += pinned

    def fullness(self, used: int) -> tuple[float, int]:
        """How far it would be above its share; of several without one, the larger."""
        if self.room:
            return used / self.room, used
        return math.inf if used else 0.0, used


class Pools:
    def __init__(self, shares: Sequence[Share], capacity: int, policy: Policy[Keyed]) -> None:
        self._of = {
            tenant(share.salt): Pool(share.name, int(capacity * share.part), policy.another())
            for share in shares
        }
        rest = capacity - sum(pool.room for pool in self._of.values())
        self.other = Pool(OTHER, rest, policy)

    def __iter__(self) -> Iterator[Pool]:
        yield from self._of.values()
        yield self.other

    def of(self, key: bytes) -> Pool:
        return self._of.get(tenant_of(key), self.other)

    def order(self, taken: Sequence[Weighed], asker: Pool | None, claim: int) -> Generator[Keyed, None, None]:
        """Who would leave for `asker`, who wants `claim` bytes, first to last. `taken` grows by who does.

        O(pools) for each. The caller closes it before it calls anything else.
        """
        left = {pool: pool.used for pool in self if pool.used > pool.pinned}
        if asker in left:
            left[asker] += claim
        orders: dict[Pool, Generator[Keyed, None, None]] = {}
        with ExitStack() as opened:
            while left:
                pool = max(left, key=lambda pool: pool.fullness(left[pool]))
                if left[pool] <= pool.room:  # nobody is above: only what is the asker's own
                    if asker not in left:
                        return
                    pool = asker
                if pool not in orders:
                    orders[pool] = opened.enter_context(closing(pool.policy.order()))
                before = len(taken)
                for entry in orders[pool]:
                    yield entry
                    if len(taken) > before:
                        left[pool] -= taken[-1].nbytes
                        break
                else:
                    del left[pool]
