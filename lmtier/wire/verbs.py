"""The limits and texts of the LMTIER.* verbs that client and server share. See docs/PROTOCOL.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from lmtier.core.grant import Grant
from lmtier.core.match import Entry, EntryState, Match, entries_from_placement
from lmtier.core.placement import Placement, keys_of, read_ranges, read_runs, write_ranges, write_runs
from lmtier.format.keys import state_key
from lmtier.format.layout import ChunkForm
from lmtier.observe.journal import Change

PROTOCOL = 1
MAX_KEYS = 65_536
"""The most keys in one request."""
MAX_MODELS = 64
MAX_MS = 24 * 3600 * 1000
RUN_SHIFT = 32
"""The id of a match or a reservation is the server's run, shifted by this, plus a counter. So an id of
another run is never valid."""
_KEYS_AN_ARGUMENT = 16_384
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


def write_match(number: int, match: Match) -> dict[str, Any]:
    reply: dict[str, Any] = {
        "id": number,
        "state": "asking" if match.pending_lookups else "ready" if match.is_ready else "found",
        "sources": write_runs(match.sources),
        **match.placement.fields(),
    }
    if match.pending_loads:
        # A chunk that was deleted while it was loading is GONE, but the tier still writes to its room.
        reply["loading"] = write_ranges(
            chunk for chunk, entry in enumerate(match.run) if entry.state is not EntryState.READY
        )
    if match.cut_reason:
        reply["cut"] = match.cut_reason
        reply["found"] = match.found
    if match.state_match is not None:
        reply["end"] = write_match(0, match.state_match)
    return reply


def read_match(match: Match, fields: dict[str, Any], made: list[Entry] | None = None) -> Match:
    """The inverse, into `match`. `made`: entries of its first chunks, if they are made already."""
    placement = Placement.of(match.form, match.keys, fields)
    run = entries_from_placement(placement, EntryState.READY, made)
    sources = read_runs(fields["sources"])
    loading = read_ranges(fields.get("loading", b""))
    for number in loading:
        run[number].state = EntryState.LOADING
    match.id = fields["id"]
    match.run = run
    match.sources = sources
    match.pending_loads = len(loading)
    match.pending_lookups = int(fields["state"] == b"asking")
    match.cut_reason = fields.get("cut", b"").decode()
    match.found = fields.get("found", 0)
    match.state_match = None
    if "end" in fields and match.state_form is not None and match.state_form.layout is not None:
        key = state_key(match.keys[len(sources) - 1], match.state_form.layout.to_json())
        match.state_match = Match(0, (key,), match.state_form, 0, match.deadline, prompt_match=match)
        read_match(match.state_match, read_fields(fields["end"]))
    if match.is_ready and fields["state"] != b"ready":
        match.pending_loads = 1  # an older server does not list everything that it waits for
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


def write_changes(end: int, changes: Iterable[Change]) -> list[Any]:
    """[next position, whether changes were lost, then for each run of changes: tier, 1 came or 0 left,
    keys]"""
    reply: list[Any] = [end, 0]
    for (tier, is_added), run in groupby(changes, key=lambda change: change[:2]):
        reply += [tier.encode(), int(is_added), b"".join(change.key for change in run)]
    return reply


def read_changes(reply: list[Any]) -> tuple[int, bool, list[Change]]:
    """The inverse: the next position, whether changes were lost, the changes."""
    next_position, is_lost, *runs = reply
    parts = iter(runs)
    changes = [
        Change(tier.decode(), bool(is_added), key)
        for tier, is_added, keys in zip(parts, parts, parts, strict=True)
        for key in keys_of(keys)
    ]
    return int(next_position), bool(is_lost), changes
