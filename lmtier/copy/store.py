"""The interface that a mover needs from a store: a `Cache`, or the `Client` of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lmtier.config import Config
from lmtier.core.grant import Grant, Match
from lmtier.format.layout import ChunkForm, Shard


class SlabViews(Protocol):
    """The part of the slab that its users need."""

    def view(self, offset: int, nbytes: int) -> memoryview: ...


class Store(Protocol):
    @property
    def config(self) -> Config: ...

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def approximation(self) -> str: ...

    @property
    def slab(self) -> SlabViews: ...

    def match(
        self,
        keys: Sequence[bytes],
        form: ChunkForm,
        *,
        tokens: int | None = None,
        deadline: float | None = None,
        state_form: ChunkForm | None = None,
        source: str = "",
    ) -> Match: ...

    def wait(self, match: Match) -> Match: ...

    def release(self, match: Match) -> None: ...

    def reserve(
        self, keys: Sequence[bytes], form: ChunkForm, *, first: int = 0, ttl: float | None = None
    ) -> Grant: ...

    def commit(
        self, grant: Grant, shard: Shard | None = None, marks: Mapping[int, bytes] | None = None
    ) -> None: ...

    def abort(self, grant: Grant, shard: Shard | None = None) -> None: ...

    def discard(self, key: bytes, *forms: ChunkForm) -> None: ...

    def compared(self, chunks: int, differing: int) -> None: ...
