"""What a mover needs of whoever decides: a `Cache` in this process, or a `Client` of a cache server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lmtier.cache import Match, Reservation
from lmtier.config import Config
from lmtier.index import Entry
from lmtier.layout import Form, Shard


class Extents(Protocol):
    """The slab, as far as its users go."""

    def view(self, offset: int, nbytes: int) -> memoryview: ...


class Tally(Protocol):
    def inc(self, amount: float = 1) -> None: ...


class Comparisons(Protocol):
    """What became of fingerprints."""

    @property
    def verified(self) -> Tally: ...

    @property
    def verify_failures(self) -> Tally: ...


class Store(Protocol):
    @property
    def config(self) -> Config: ...

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def approximation(self) -> str: ...

    @property
    def slab(self) -> Extents: ...

    @property
    def metrics(self) -> Comparisons: ...

    def match(
        self,
        keys: Sequence[bytes],
        form: Form,
        *,
        tokens: int | None = None,
        deadline: float | None = None,
    ) -> Match: ...

    def wait(self, match: Match) -> Match: ...

    def release(self, match: Match) -> None: ...

    def reserve(
        self, keys: Sequence[bytes], form: Form, *, first: int = 0, ttl: float | None = None
    ) -> Reservation: ...

    def commit(
        self,
        reservation: Reservation,
        shard: Shard | None = None,
        prints: Mapping[int, bytes] | None = None,
    ) -> None: ...

    def abort(self, reservation: Reservation, shard: Shard | None = None) -> None: ...

    def discard(self, entry: Entry) -> None: ...
