"""What client and server share of the LMTIER.* verbs: limits, texts, a match. See docs/PROTOCOL.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmtier.core.grant import Grant, Match
from lmtier.core.match import Lookup
from lmtier.core.placement import Placement, read_ranges, read_runs, write_ranges, write_runs
from lmtier.format.keys import state_key
from lmtier.format.layout import ChunkForm

PROTOCOL = 1
MAX_KEYS = 65_536
"""The most keys in one request."""
MAX_MODELS = 64
MAX_MS = 24 * 3600 * 1000
RUN_SHIFT = 32
"""The id of a match or a reservation is the server's run, shifted by this, plus a counter. So an id of
another run is never valid."""
_KEYS_AN_ARGUMENT = 16_384
NOT_HELD = b"-"
"""The deadline of a lookup that is only counted."""
AND_STATE = "+"
"""Between the number of a form and that of the state at whose end a match has to end."""


def pack_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Arguments with many keys each, as long as a server accepts."""
    return [
        b"".join(keys[at : at + _KEYS_AN_ARGUMENT]) for at in range(0, max(1, len(keys)), _KEYS_AN_ARGUMENT)
    ]


def read_fields(reply: Any) -> dict[str, Any]:
    """Reads a flat map."""
    names = iter(reply)
    return {name.decode(): value for name, value in zip(names, names, strict=True)}


@dataclass(eq=False, slots=True, kw_only=True, repr=False)
class RemoteMatch(Match):
    """A match of a server, as its last reply describes it."""

    grant: Grant
    loading: tuple[int, ...] = ()
    is_ready: bool = True

    @property
    def needs_prefetch(self) -> bool:
        """Whether a part of it is in lower tiers, and no prefetch has asked for it yet."""
        lacks_state = self.state_form is not None and self.chunks > 0 and self.grant.state is None
        return not self.pending_lookups and (lacks_state or self.chunks > len(self.grant.chunks))

    def lose_server(self, limit: int) -> None:
        """Nothing more comes: keep what is complete of the first `limit` chunks. With a state it is all or
        nothing."""
        complete = min((*self.loading[:1], len(self.grant.chunks), limit)) if self.state_form is None else 0
        if complete < self.chunks and not self.cut_reason:
            self.cut_reason, self.found = "tier_down", self.chunks
        self.grant, self.sources = self.grant.leading(complete), self.sources[:complete]
        self.loading, self.pending_lookups, self.is_ready = (), 0, True


def write_match(number: int, match: Lookup) -> dict[str, Any]:
    reply: dict[str, Any] = {
        "id": number,
        "state": match.progress,
        "sources": write_runs(match.sources),
        **match.grant.placement.fields(),
    }
    if loading := match.loading:
        reply["loading"] = write_ranges(loading)
    if match.cut_reason:
        reply["cut"] = match.cut_reason
        reply["found"] = match.found
    if match.state_match is not None:
        reply["end"] = write_match(0, match.state_match)
    return reply


def read_match(match: RemoteMatch, fields: dict[str, Any]) -> RemoteMatch:
    """The inverse, into `match`."""
    sources, state, form = read_runs(fields["sources"]), None, match.state_form
    if "end" in fields and form is not None and form.layout is not None:
        key = state_key(match.keys[len(sources) - 1], form.layout.to_json())
        placement = Placement.of(form, (key,), read_fields(fields["end"]))
        state = Grant(0, (0,), placement) if placement.keys else None
    placement = Placement.of(match.grant.form, match.keys, fields)
    match.sources, match.loading = sources, tuple(read_ranges(fields.get("loading", b"")))
    match.pending_lookups = int(fields["state"] == b"asking")
    match.cut_reason, match.found = fields.get("cut", b"").decode(), fields.get("found", 0)
    match.grant = Grant(fields["id"], tuple(range(len(placement.keys))), placement, state)
    match.is_ready = fields["state"] == b"ready" and not (match.loading or match.needs_prefetch)
    return match


def write_reservation(number: int, grant: Grant) -> dict[str, Any]:
    return {
        "id": number,
        "known": grant.leading_stored,
        "dropped": grant.dropped,
        "chunks": write_ranges(grant.chunks),
        **grant.placement.fields(),
    }


def read_reservation(fields: dict[str, Any], keys: Sequence[bytes], form: ChunkForm) -> Grant:
    """The inverse. `keys` are the requested ones."""
    chunks = read_ranges(fields["chunks"])
    placement = Placement.of(form, tuple(keys[chunk] for chunk in chunks), fields)
    if len(placement.keys) < len(chunks):
        raise ValueError(f"there are places for {len(placement.keys)} chunks, but {len(chunks)} were named")
    return Grant(fields["id"], tuple(chunks), placement, None, fields["known"], fields["dropped"])
