"""The interface to follow the events of a cache, in their order, as they happen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from lmtier.format.layout import ChunkForm


class SettledLookup(Protocol):
    """The part of a match that followers read."""

    keys: tuple[bytes, ...]
    sources: list[str]
    asked_tokens: int
    asker: str
    cut_reason: str
    found: int


class CacheObserver:
    """The base of followers. Override the methods of the events that you need.

    The cache's owner calls them in the middle of its work, so they must be quick and must not raise.
    """

    def asked(self, keys: Sequence[bytes], tokens: int, form: ChunkForm) -> None:
        """A request asked for `tokens` tokens. `keys` are those of its whole chunks."""

    def settled(self, lookup: SettledLookup, missed: dict[str, int]) -> None:
        """The result of a lookup is known.

        `missed`: tokens by reason; the reason of the first token is first.
        """

    def used(self, keys: Sequence[bytes]) -> None:
        """An engine had these chunks itself."""

    def changed(self, tier: str, came: bool, keys: Collection[bytes], why: str) -> None:
        """In the slab or an owned tier these chunks can be found from now on, or no longer, and why."""

    def changed_elsewhere(self, tier: str, came: bool, keys: Collection[bytes]) -> None:
        """In a shared tier these chunks were written, or were found missing."""

    def not_stored(self, tier: str, keys: Collection[bytes], why: str) -> None:
        """These should have been stored in the tier and were not. `why` is one of metrics.DROP_REASONS."""

    def forgotten(self, tenants: Collection[bytes]) -> None:
        """These tenants were forgotten, here or by another server."""

    def stepped(self) -> None:
        """The owner has time for postponed work."""


class CacheObservers:
    """The followers of one cache, by event, so that an event without followers costs nothing."""

    def __init__(self) -> None:
        self.asked: tuple[Callable[[Sequence[bytes], int, ChunkForm], None], ...] = ()
        self.settled: tuple[Callable[[SettledLookup, dict[str, int]], None], ...] = ()
        self.used: tuple[Callable[[Sequence[bytes]], None], ...] = ()
        self.changed: tuple[Callable[[str, bool, Collection[bytes], str], None], ...] = ()
        self.changed_elsewhere: tuple[Callable[[str, bool, Collection[bytes]], None], ...] = ()
        self.not_stored: tuple[Callable[[str, Collection[bytes], str], None], ...] = ()
        self.forgotten: tuple[Callable[[Collection[bytes]], None], ...] = ()
        self.stepped: tuple[Callable[[], None], ...] = ()

    def add(self, follower: CacheObserver) -> None:
        for event, heard in vars(self).items():
            if getattr(type(follower), event) is not getattr(CacheObserver, event):
                setattr(self, event, (*heard, getattr(follower, event)))
