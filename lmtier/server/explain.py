"""Explains misses: the last lookups, with the first missed chunk of each and the known facts about it.

    a lookup is settled    ─► noted, in half a microsecond; nothing else is on the hot path
    a user asks            ─► the history of that chunk (journal.py), and chunks like it (prompts.py)

A key does not contain its tokens. What was stored, evicted or deleted under a key is known without them. At
which token two prompts differ, and whether they only differ in a salt, is known only if the engine has sent
its tokens. The explanation names what is not known. No I/O.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple, TypeAlias, TypedDict

from lmtier.core.cache import Cache
from lmtier.core.match import DIFFERED, EVICTED, EntryState
from lmtier.observe.follower import CacheObserver, SettledLookup
from lmtier.observe.journal import LENGTH, Journal, Record
from lmtier.observe.metrics import DROP_REASONS, MISS_REASONS
from lmtier.observe.prompts import PromptChunk, Prompts

MAX_LOOKUPS = 512
MAX_KEYS = 65_536
"""The most keys of all remembered lookups: some 6 MB."""
_SHOWN_TOKENS = 8
_LIKE = 64  # the most similar chunks to compare with, the youngest first

_WORDS = {DIFFERED: "it differed from the saved bytes"}
_UNTOLD = "its engine does not send tokens (vLLM sends them with tell_tokens)"
_PARTIAL = "partial_chunk"


class Explanation(TypedDict):
    """One lookup, or several equal ones in a row, that missed at least a whole chunk."""

    ago: float
    """Seconds."""
    asker: str
    times: int
    asked: int
    """Tokens."""
    hit: dict[str, int]
    """Tokens that were hit, by tier."""
    chunk: int
    """The number of the first missed chunk, which is also the number of found chunks."""
    token: int
    """Where that chunk begins; or, if `is_exact`, the first token that differs from the nearest prompt."""
    is_exact: bool
    reason: str
    """The label `reason` of lmtier_missed_tokens_total."""
    why: str
    """The explanation in one sentence."""
    here: list[int]
    """The tokens from `token` on, if they were requested and are known."""
    there: list[int]
    """The tokens at this place in the nearest prompt."""


_Noted: TypeAlias = "tuple[float, SettledLookup, dict[str, int], int]"
"""A `_Lookup` as a bare tuple, which is made in half the time. It is converted when a user asks."""


class _Lookup(NamedTuple):
    at: float
    match: SettledLookup
    missed: dict[str, int]
    chunks: int
    """The number of found chunks."""


class _Parting(NamedTuple):
    """Another prompt that is equal up to a chunk."""

    token: int
    here: list[int]
    there: list[int]


class _Known(NamedTuple):
    """The remembered history of the first missed chunk and of similar ones, up to the lookup."""

    keys: list[bytes]
    """That chunk, and similar ones."""
    events: dict[bytes, list[Record]]
    at: float

    def last(self, key: bytes) -> dict[str, Record]:
        """Maps each tier to the last event of this key there before the lookup."""
        events = sorted(self.events.get(key, ()), key=lambda event: event.at)
        return {event.tier: event for event in events if event.at <= self.at}


class Explain(CacheObserver):
    """Follows one cache from its construction on, and adds a journal to it."""

    def __init__(self, cache: Cache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self.journal = Journal(clock=clock, is_record=cache.index.is_record)
        self._lookups: deque[_Noted] = deque()
        self._keys = 0
        self._clock = clock
        self.prompts = Prompts(cache.chunk_tokens)
        cache.followers.add(self.journal)
        cache.followers.add(self)

    def forgotten(self, tenants: Collection[bytes]) -> None:
        self.prompts.forget(tenants)

    def settled(self, lookup: SettledLookup, missed: dict[str, int]) -> None:
        lookups = self._lookups
        lookups.append((self._clock(), lookup, missed, len(lookup.sources)))
        self._keys = keys = self._keys + len(lookup.keys)
        if keys > MAX_KEYS or len(lookups) > MAX_LOOKUPS:
            self._forget()

    def _forget(self) -> None:
        while self._keys > MAX_KEYS or len(self._lookups) > MAX_LOOKUPS:
            self._keys -= len(self._lookups.popleft()[1].keys)

    def recent(self, most: int = 20, *, tokens: bool = False) -> list[Explanation]:
        """The last lookups with a miss, the latest first. `tokens` adds the tokens."""
        groups: dict[tuple[str, bytes, int, str], list[_Lookup]] = {}
        for lookup in map(_Lookup._make, reversed(self._lookups)):
            match = lookup.match
            reason = next(iter(lookup.missed), _PARTIAL)
            if reason == _PARTIAL:
                continue
            group = (match.asker, match.keys[-1], lookup.chunks, reason)
            if group not in groups and len(groups) == most:
                break
            groups.setdefault(group, []).append(lookup)
        like = {group: self._like(same[0]) for group, same in groups.items()}
        wanted = {key for keys in like.values() for key in keys}
        events: dict[bytes, list[Record]] = {}
        for event in self.journal.past(wanted) if wanted else ():
            events.setdefault(event.key, []).append(event)
        return [
            self._explained(same[0], len(same), group[-1], _Known(like[group], events, same[0].at), tokens)
            for group, same in groups.items()
        ]

    def _like(self, lookup: _Lookup) -> list[bytes]:
        """The first missed chunk, and those of other prompts that could be at its place."""
        keys, chunk = lookup.match.keys, lookup.chunks
        key = keys[chunk]
        candidates: Iterable[bytes] = (
            other.keys[chunk]
            for _, other, _, _ in reversed(self._lookups)
            if chunk and len(other.keys) > chunk and other.keys[chunk - 1] == keys[chunk - 1]
        )
        if self.prompts.get(key) is not None:
            candidates = chain(islice(self.prompts.same(key), _LIKE), islice(self.prompts.beside(key), _LIKE))
        return list(dict.fromkeys((key, *candidates)))

    def _explained(
        self, lookup: _Lookup, times: int, reason: str, known: _Known, tokens: bool
    ) -> Explanation:
        match, chunk_tokens = lookup.match, self._cache.chunk_tokens
        sources = match.sources[: lookup.chunks]
        divergence: _Parting | None = None
        if match.cut_reason and lookup.chunks < match.found:
            why = f"{reason}: {MISS_REASONS[reason]}"
        elif not (why := self._history(known, reason)):
            why, divergence = self._never(lookup.chunks, known)
        return {
            "ago": self._clock() - lookup.at,
            "asker": match.asker,
            "times": times,
            "asked": match.asked_tokens,
            "hit": {tier: sources.count(tier) * chunk_tokens for tier in dict.fromkeys(sources)},
            "chunk": lookup.chunks,
            "token": lookup.chunks * chunk_tokens if divergence is None else divergence.token,
            "is_exact": divergence is not None,
            "reason": reason,
            "why": why,
            "here": divergence.here if divergence is not None and tokens else [],
            "there": divergence.there if divergence is not None and tokens else [],
        }

    # ---- its history

    def _history(self, known: _Known, reason: str) -> str:
        """The history of the chunk in each tier before the lookup; empty if no tier ever had it."""
        latest = known.last(known.keys[0])
        if not latest:
            if reason == EVICTED:
                return (
                    f"was evicted; when is not known: more than {LENGTH:,} changes ago, or before the start"
                )
            return "" if reason == "never_stored" else f"{reason}: {MISS_REASONS[reason]}"
        clauses = [_describe(event, known.at - event.at) for event in latest.values()]
        for tier in self._cache.lower.owned:
            if tier.label not in latest and tier.write != "always":
                clauses.append(f"not admitted to {tier.label}: write={tier.write}")
        shared = [tier.label for tier in self._cache.lower.tiers_to_ask("") if tier.label not in latest]
        clauses += [f"whether it was ever in {label} is not known: that is a shared tier" for label in shared]
        if any(event.is_added for event in latest.values()):
            clauses.append(MISS_REASONS[reason])
        return ", ".join(clauses)

    # ---- similar prompts

    def _never(self, chunk: int, known: _Known) -> tuple[str, _Parting | None]:
        """Explain a chunk that was never stored, by similar chunks that were stored then."""
        key, *similar = known.keys
        stored_chunks = [other for other in similar if self._was_stored(other, known)]
        mine, size = self.prompts.get(key), self._cache.chunk_tokens
        if mine is None:
            return self._never_told(chunk, bool(stored_chunks)), None
        known_prompts = [theirs for other in stored_chunks if (theirs := self.prompts.get(other)) is not None]
        for theirs in known_prompts:
            if theirs.plain == mine.plain:
                words = mine.origin.differs_in(theirs.origin) or ["what its placeholders stand for differs"]
                return f"never stored; the same tokens are: {', '.join(words)}", None
        if known_prompts:
            nearest = max(
                (_parting(chunk * size, mine, theirs) for theirs in known_prompts), key=itemgetter(0)
            )
            return f"never stored; the nearest stored prompt differs from token {nearest.token:,} on", nearest
        return f"never stored; {self._end(chunk)}", None

    def _never_told(self, chunk: int, goes_on: bool) -> str:
        size = self._cache.chunk_tokens
        if not chunk:
            return (
                "never stored, from its first chunk on; whether a prompt like it is, or the same one under "
                f"another salt, adapter or model, is not known: {_UNTOLD}"
            )
        if goes_on:
            return (
                f"never stored; a stored prompt goes on differently from somewhere within tokens "
                f"{chunk * size:,} to {(chunk + 1) * size - 1:,}; from which one is not known: {_UNTOLD}"
            )
        return f"never stored; {self._end(chunk)}"

    def _end(self, chunk: int) -> str:
        end = f"token {chunk * self._cache.chunk_tokens:,}"
        return f"what is stored of it ends before {end}" if chunk else "nothing of it is stored"

    def _was_stored(self, key: bytes, known: _Known) -> bool:
        if key in known.events:
            return any(event.is_added for event in known.last(key).values())
        entry = self._cache.index.get(key)  # it was stored before the journal begins
        if entry is not None and entry.state is EntryState.READY:
            return True
        return any(key in tier.index for tier in self._cache.lower.owned)


def _parting(begin: int, mine: PromptChunk, theirs: PromptChunk) -> _Parting:
    own, other = mine.token_ids, theirs.token_ids
    differs_at = next((n for n, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), len(own))
    shown = slice(differs_at, differs_at + _SHOWN_TOKENS)
    return _Parting(begin + differs_at, own[shown], other[shown])


def _describe(event: Record, ago: float) -> str:
    if not event.was_there:
        return (
            f"was not stored in {event.tier} {_span(ago)} earlier: {DROP_REASONS.get(event.why, event.why)}"
        )
    if event.is_added:
        return f"is in {event.tier}, since {_span(ago)} earlier"
    if event.why == EVICTED:
        return f"was evicted from {event.tier} {_span(ago)} earlier"
    why = _WORDS.get(event.why) or MISS_REASONS.get(event.why, event.why)
    return f"was deleted from {event.tier} {_span(ago)} earlier: {why}"


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
