"""Why was that a miss? The last lookups, for each the first chunk that was missed, and what is known of it.

    a lookup is settled ─► noted, in half a microsecond             nothing else is on the hot path
    somebody asks       ─► what happened to that chunk (journal.py), and who else is like it (prompts.py)

A key does not tell its tokens. What was stored, evicted or deleted under it is known without them; at which
token two prompts part, and that they differ in nothing but a salt, only of engines that told their tokens.
What is not known is said to be so. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from typing import NamedTuple, TypeAlias, TypedDict

from lmtier.cache import Cache, Match
from lmtier.index import DIFFERED, EVICTED, State
from lmtier.journal import LENGTH, Event
from lmtier.metrics import DROP_REASONS, MISS_REASONS
from lmtier.prompts import Chunk, Prompts

MAX_LOOKUPS = 512
MAX_KEYS = 65_536
"""Of all lookups that are remembered: some 6 MB."""
_SHOWN_TOKENS = 8
_LIKE = 64  # other chunks that are looked at, the youngest

_WORDS = {DIFFERED: "it differed from what was saved"}
_UNTOLD = "its engine does not tell tokens (tell_tokens)"
_PARTIAL = "partial_chunk"


class Explanation(TypedDict):
    """One lookup that missed a whole chunk or more, or several in a row that were the same."""

    ago: float
    """Seconds."""
    asker: str
    times: int
    asked: int
    """Tokens."""
    hit: dict[str, int]
    """Tokens, by tier."""
    chunk: int
    """The first that was missed: so many leading chunks were there."""
    token: int
    """Where that chunk begins; or, if `is_exact`, the first token that differs from the nearest prompt."""
    is_exact: bool
    reason: str
    """As lmtier_missed_tokens_total has it."""
    why: str
    """A sentence."""
    here: list[int]
    """The tokens from `token` on, if they were asked for and told."""
    there: list[int]
    """What stood there in the nearest prompt."""


_Noted: TypeAlias = "tuple[float, Match, dict[str, int], int]"
"""What becomes a _Lookup when somebody asks: a bare tuple is made in half the time."""


class _Lookup(NamedTuple):
    at: float
    match: Match
    missed: dict[str, int]
    chunks: int
    """That were there."""


class _Parting(NamedTuple):
    """Another prompt that is equal up to a chunk."""

    token: int
    here: list[int]
    there: list[int]


class _Known(NamedTuple):
    """What is remembered of the first chunk that was missed, and of those like it, as it was then."""

    keys: list[bytes]
    """That chunk, and those like it."""
    events: dict[bytes, list[Event]]
    at: float

    def last(self, key: bytes) -> dict[str, Event]:
        """Tier -> what happened to it there last before the lookup."""
        events = sorted(self.events.get(key, ()), key=lambda event: event.at)
        return {event.tier: event for event in events if event.at <= self.at}


class Explain:
    """Follows one cache, from its construction on."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._journal = cache.follow()
        self._lookups: deque[_Noted] = deque()
        self._keys = 0
        self._clock = self._journal.clock
        self.prompts = Prompts(cache.chunk_tokens)
        cache.settled = self._settled

    def _settled(self, match: Match, missed: dict[str, int]) -> None:
        lookups = self._lookups
        lookups.append((self._clock(), match, missed, len(match.sources)))
        self._keys = keys = self._keys + len(match.keys)
        if keys > MAX_KEYS or len(lookups) > MAX_LOOKUPS:
            self._forget()

    def _forget(self) -> None:
        while self._keys > MAX_KEYS or len(self._lookups) > MAX_LOOKUPS:
            self._keys -= len(self._lookups.popleft()[1].keys)

    def recent(self, most: int = 20, *, tokens: bool = False) -> list[Explanation]:
        """The last lookups that missed something, the latest first; the tokens only if they are asked for."""
        chosen: dict[tuple[str, bytes, int, str], list[_Lookup]] = {}
        for lookup in map(_Lookup._make, reversed(self._lookups)):
            match = lookup.match
            reason = next(iter(lookup.missed), _PARTIAL)
            if reason == _PARTIAL:
                continue
            what = (match.asker, match.keys[-1], lookup.chunks, reason)
            if what not in chosen and len(chosen) == most:
                break
            chosen.setdefault(what, []).append(lookup)
        like = {what: self._like(same[0]) for what, same in chosen.items()}
        wanted = {key for keys in like.values() for key in keys}
        events: dict[bytes, list[Event]] = {}
        for event in self._journal.past(wanted) if wanted else ():
            events.setdefault(event.key, []).append(event)
        return [
            self._explained(same[0], len(same), what[-1], _Known(like[what], events, same[0].at), tokens)
            for what, same in chosen.items()
        ]

    def _like(self, lookup: _Lookup) -> list[bytes]:
        """The first chunk that was missed, and those of other prompts that could have stood in its place."""
        keys, chunk = lookup.match.keys, lookup.chunks
        key = keys[chunk]
        others: Iterable[bytes] = (
            other.keys[chunk]
            for _, other, _, _ in reversed(self._lookups)
            if chunk and len(other.keys) > chunk and other.keys[chunk - 1] == keys[chunk - 1]
        )
        if self.prompts.get(key) is not None:
            others = chain(islice(self.prompts.same(key), _LIKE), islice(self.prompts.beside(key), _LIKE))
        return list(dict.fromkeys((key, *others)))

    def _explained(
        self, lookup: _Lookup, times: int, reason: str, known: _Known, tokens: bool
    ) -> Explanation:
        match, size = lookup.match, self._cache.chunk_tokens
        sources = match.sources[: lookup.chunks]
        parting: _Parting | None = None
        if match.cut and lookup.chunks < match.found:
            why = f"{reason}: {MISS_REASONS[reason]}"
        elif not (why := self._history(known, reason)):
            why, parting = self._never(lookup.chunks, known)
        return {
            "ago": self._clock() - lookup.at,
            "asker": match.asker,
            "times": times,
            "asked": match.asked_tokens,
            "hit": {tier: sources.count(tier) * size for tier in dict.fromkeys(sources)},
            "chunk": lookup.chunks,
            "token": lookup.chunks * size if parting is None else parting.token,
            "is_exact": parting is not None,
            "reason": reason,
            "why": why,
            "here": parting.here if parting is not None and tokens else [],
            "there": parting.there if parting is not None and tokens else [],
        }

    # ---- what became of it

    def _history(self, known: _Known, reason: str) -> str:
        """What happened to the chunk in each tier before the lookup; empty if it never was anywhere."""
        last = known.last(known.keys[0])
        if not last:
            if reason == EVICTED:
                return (
                    f"was evicted; when is not known: more than {LENGTH:,} changes ago, or before the start"
                )
            return "" if reason == "never_stored" else f"{reason}: {MISS_REASONS[reason]}"
        said = [_said(event, known.at - event.at) for event in last.values()]
        for below in self._cache.below:
            if below.label in last:
                continue
            if below.index is None:
                said.append(f"whether it was ever in {below.label} is not known: that has to be asked")
            elif below.write != "always":
                said.append(f"not admitted to {below.label}: write={below.write}")
        if any(event.came for event in last.values()):
            said.append(MISS_REASONS[reason])
        return ", ".join(said)

    # ---- what was there instead

    def _never(self, chunk: int, known: _Known) -> tuple[str, _Parting | None]:
        """Of a chunk that nobody had stored: of those like it, what was stored by then?"""
        key, *others = known.keys
        stored = [other for other in others if self._was_stored(other, known)]
        mine, size = self.prompts.get(key), self._cache.chunk_tokens
        if mine is None:
            return self._never_told(chunk, bool(stored)), None
        told = [theirs for other in stored if (theirs := self.prompts.get(other)) is not None]
        for theirs in told:
            if theirs.plain == mine.plain:
                words = mine.origin.differs_in(theirs.origin) or ["what its placeholders stand for differs"]
                return f"never stored; the same tokens are: {', '.join(words)}", None
        if told:
            nearest = max((_parting(chunk * size, mine, theirs) for theirs in told), key=_token)
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
            return any(event.came for event in known.last(key).values())
        entry = self._cache.index.get(key)  # since longer ago than anybody remembers
        if entry is not None and entry.state is State.READY:
            return True
        return any(below.index is not None and key in below.index for below in self._cache.below)


def _parting(begin: int, mine: Chunk, theirs: Chunk) -> _Parting:
    here, there = mine.token_ids, theirs.token_ids
    at = next((n for n, (a, b) in enumerate(zip(here, there, strict=True)) if a != b), len(here))
    shown = slice(at, at + _SHOWN_TOKENS)
    return _Parting(begin + at, here[shown], there[shown])


def _token(parting: _Parting) -> int:
    return parting.token


def _said(event: Event, ago: float) -> str:
    if not event.was_there:
        return (
            f"was not stored in {event.tier} {_span(ago)} earlier: {DROP_REASONS.get(event.why, event.why)}"
        )
    if event.came:
        return f"is in {event.tier}, since {_span(ago)} earlier"
    if event.why == EVICTED:
        return f"was evicted from {event.tier} {_span(ago)} earlier"
    why = _WORDS.get(event.why) or MISS_REASONS.get(event.why, event.why)
    return f"was deleted from {event.tier} {_span(ago)} earlier: {why}"


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
