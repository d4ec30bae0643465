"""The typed client: the calls of an in-process `Cache`, on a server's slab.

If a server is down, dies, stalls or restarts, the only cost is missed hits: calls find nothing and store
nothing until it is back. This is safe because of four rules:

    bytes     a match stays readable after its server died: the mapping keeps the memory, which is not written
    leases    a socket is not closed while it holds anything: the server would end its matches
    stalls    a late reply is still read, and everything that it granted is given back
    restarts  offsets of one slab are never used with the mapping of another: while anything is held from the
              old server there is no new connection, and ids of one run of a server are invalid in the next

One owner calls it, as with a `Cache`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from lmtier import forks
from lmtier.client.link import Argument, Link, MappedSlab, PendingReply
from lmtier.client.remote import RemoteServer
from lmtier.config import Config
from lmtier.core.grant import Grant, Match
from lmtier.errors import MisuseError, log
from lmtier.format.keys import Identity, as_tokens
from lmtier.format.layout import ChunkForm, Shard
from lmtier.format.objects import EVERYTHING, Selector
from lmtier.observe.journal import Change
from lmtier.observe.prompts import MAX_ORIGIN, Origin
from lmtier.rules.hints import MAX_BYTES, MAX_NAME, is_name
from lmtier.rules.lifetimes import Pinned, seconds_of
from lmtier.rules.worth import Cost
from lmtier.wire.resp import Error
from lmtier.wire.verbs import (
    AND_STATE,
    MAX_KEYS,
    MAX_MS,
    NOT_HELD,
    RUN_SHIFT,
    RemoteMatch,
    pack_keys,
    read_fields,
    read_match,
    read_reservation,
)

_NEWS = 0.05  # a cost that has changed by this part is sent again
_TOKENS_AN_ARGUMENT = 131_072
_PIECE = 512 << 10


@dataclass(eq=False, slots=True)
class PendingReservation:
    """A reservation that was requested."""

    keys: list[bytes]
    form: ChunkForm
    first: int
    link: Link | None = None
    """The connection of the request; None: it was not sent."""
    answer: PendingReply | None = None


class Client:
    """The calls of a `Cache` in another process. If there is no server, only the constructor raises.

    `engine` is the secret that the ranks and the scheduler of one engine share, as `secrets.token_hex(16)`
    makes one: with it they are one session. If it is empty, this connection has its own session.
    `name` is what people see. `shard` is the shard of this process: if the process dies, others do not
    wait for it. `waits`: committed chunks are visible to all when `commit` returns, not some moments later.
    """

    def __init__(
        self,
        address: str,
        *,
        engine: str = "",
        shard: Shard | None = None,
        name: str = "",
        timeout: float = 2.0,
        token: str | None = None,
        waits: bool = True,
    ) -> None:
        options = {"ENGINE": engine, "SHARD": str(shard or ""), "NAME": name}
        hello = [word for pair in options.items() if pair[1] for word in pair]
        self._server = RemoteServer(address, hello, token, timeout)
        self._waits = waits
        self._unready: list[RemoteMatch] = []
        """Matches of which something is still to come, and some that have ended since."""
        self._withdrawn = float("-inf")
        """When a reservation was given up last, before its reply had come."""
        self._read_to: tuple[int, int] | None = None
        """The position up to which `changes` were read, with the server's run."""
        self.chunk_tokens = self.config.chunk_tokens
        self.approximation = self._server.link.approximation
        forks.call_in_child(self)

    def __repr__(self) -> str:
        server = self._server
        state = "closed" if server.is_closed else "no server" if server.outage else "connected"
        return f"<Client of {server.address}, {state}, {len(server.held)} grants>"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def slab(self) -> MappedSlab:
        """The slab of the connected run of the server."""
        return self._server.link.slab

    @property
    def config(self) -> Config:
        return self._server.link.config

    @property
    def run_id(self) -> int:
        """The run of the server to which `slab` belongs. Offsets of one run are invalid in another."""
        return self._server.link.run_id

    @property
    def traffic(self) -> int:
        """Bytes on this connection, both ways. They are metadata only, never KV."""
        return self._server.link.traffic

    @property
    def lost(self) -> int:
        """The number of lost connections."""
        return self._server.lost

    @property
    def unserved(self) -> int:
        """The number of calls that found nothing because no server answered."""
        return self._server.unserved

    # ---- load

    def match(
        self,
        keys: Sequence[bytes],
        form: ChunkForm,
        *,
        tokens: int | None = None,
        deadline: float | None = None,
        state_form: ChunkForm | None = None,
        session: str = "",
        parent: str = "",
        source: str = "",
    ) -> RemoteMatch:
        """As Cache.match; empty if no server answers."""
        names = tuple(keys)
        key_tokens = len(names) * self.chunk_tokens
        asked = key_tokens if tokens is None else tokens
        if asked < key_tokens:
            raise MisuseError(f"tokens={asked} is less than the {key_tokens} tokens of these keys")
        seconds = self.config.load_deadline if deadline is None else deadline
        match = RemoteMatch(names, time.monotonic() + seconds, state_form, grant=Grant.of_nothing(form))
        link, number = self._server.number_of(form)
        forms: Argument = number
        if link is not None and state_form is not None:
            link, state_number = self._server.number_of(state_form)
            forms = f"{number}{AND_STATE}{state_number}"
        if link is not None:
            milliseconds = int(1000 * min(max(0.0, seconds), MAX_MS / 1000))
            words = _words(session, parent, source)
            # A server that traces is always asked: without its answer the lookup is missing in the trace.
            # So is another server that a source names.
            presence = None if link.traces or source else link.presence_reader
            if names and presence is not None and presence.lacks(names[0]):
                if len(set(names)) < len(names):
                    raise MisuseError("a key occurs twice in one request")
                # Only for the server's counters, without waiting.
                self._server.post("LMTIER.MATCH", forms, asked, NOT_HELD, *words, *pack_keys(names))
                return match
            request: list[Argument] = ["LMTIER.MATCH", forms, asked, milliseconds, *words, *pack_keys(names)]
            self._begin(match, *request, link=link)
        return match

    def _begin(self, match: RemoteMatch, *request: Argument, link: Link) -> None:
        self._update(match, self._server.call(*request, link=link, undo=self._server.unmatch))
        if match.grant.id:
            self._server.held[match.grant.id] = set()
            if not match.is_ready:
                self._unready.append(match)

    def costs(self, cost: Cost) -> None:
        """Set the cost of computing for this engine's matches from now on. Never waits or connects."""
        link = self._server.link
        if link.is_lost or link.is_stalled:  # do not connect during an engine's step
            return
        sent_cost = link.cost or Cost(0.0, 0.0, 0.0, 0.0)
        if any(abs(new - sent) > _NEWS * sent for new, sent in zip(cost, sent_cost, strict=True)):
            link.cost = cost
            self._server.post("LMTIER.COST", *map(repr, cost))

    def prefetch(self, held: Match, chunks: int | None = None, *, has: int = 0) -> None:
        """As Cache.prefetch."""
        match = _need_own(held, "prefetch")
        if match.grant.id and (not match.is_ready or (chunks is not None and chunks < match.chunks)):
            limit = () if chunks is None else (chunks,)
            has_option: tuple[Argument, ...] = ("HAS", has) if has else ()
            self._update(match, self._call_for(match, "LMTIER.PREFETCH", *limit, *has_option), *limit)

    def wait(self, held: Match) -> RemoteMatch:
        """As Cache.wait: until the match is ready, or its deadline has passed."""
        match = _need_own(held, "wait")
        if not match.is_ready:
            seconds = max(0.0, match.deadline - time.monotonic())
            self._update(match, self._call_for(match, "LMTIER.POLL", "WAIT", seconds=seconds))
        return match

    def step(self) -> int:
        """Update the matches that are not ready. Returns how many have become so."""
        held = self._server.held
        unready = [each for each in self._unready if each.grant.id in held and not each.is_ready]
        replies = self._server.call_all([("LMTIER.POLL", match.grant.id) for match in unready])
        for match, reply in zip(unready, replies, strict=True):
            self._update(match, reply)
        self._unready = [each for each in unready if not each.is_ready]
        return len(unready) - len(self._unready)

    def release(self, match: Match) -> None:
        """End the match's leases. Idempotent; does not wait for the server."""
        if match.released:
            return
        match.released = True
        if self._server.held.pop(match.grant.id, None) is not None:
            self._server.end("LMTIER.RELEASE", match.grant.id)

    def touch(self, keys: Sequence[bytes]) -> None:
        """As Cache.seen; does not wait for the server."""
        if self._server.reach() is not None:
            self._server.post("LMTIER.SEEN", *pack_keys(keys))

    def send_tokens(self, keys: Sequence[bytes], tokens: Any, origin: Origin, parent: bytes = b"") -> None:
        """Send the tokens of these chunks, and the chunk before them. Does not wait for the server.

        Only `lmtier explain` and KV events need them. An engine that uses neither need not send them.
        """
        link, origin_json = self._server.link, origin.to_json()
        if link.is_lost or link.is_stalled or len(origin_json) > MAX_ORIGIN:
            return
        step = max(1, _TOKENS_AN_ARGUMENT // self.chunk_tokens)  # chunks in one command
        ids, size = as_tokens(tokens), self.chunk_tokens
        for first in range(0, len(keys), step):
            batch_keys = keys[first : first + step]
            token_bytes = ids[first * size : (first + step) * size].tobytes()
            self._server.post("LMTIER.TELL", origin_json, parent, b"".join(batch_keys), token_bytes)
            parent = batch_keys[-1]

    def trace(self, grant: Grant, headers: Mapping[str, str] | None) -> None:
        """Send the trace of `grant`, from the request's W3C headers, if the server traces. Does not wait."""
        if not headers or not self._server.link.traces or "traceparent" not in headers:
            return
        if grant.id in self._server.held:
            parts = [headers[name] for name in ("traceparent", "tracestate") if name in headers]
            self._server.post("LMTIER.TRACE", grant.id, *parts)

    # ---- save

    def reserve(
        self, keys: Sequence[bytes], form: ChunkForm, *, first: int = 0, ttl: float | None = None
    ) -> Grant:
        """As Cache.reserve; everything is dropped if no server answers."""
        return self.finish_reserve(self.begin_reserve(keys, form, first=first, ttl=ttl))

    def begin_reserve(
        self, keys: Sequence[bytes], form: ChunkForm, *, first: int = 0, ttl: float | None = None
    ) -> PendingReservation:
        """Send the request of `reserve` without waiting. `finish_reserve` or `cancel_reserve` must follow."""
        if form.layout is None or form.layout.chunk_tokens != self.chunk_tokens:
            raise MisuseError("reserve needs a form with a layout of this cache's chunk_tokens")
        asked = PendingReservation(list(keys), form, first)
        lifetime = _lifetime(ttl)
        link, number = self._server.number_of(form)
        if link is not None:
            asked.link, asked.answer = link, PendingReply(self._server.unreserve)
            request: list[Argument] = [number, first, *lifetime, *pack_keys(asked.keys)]
            self._server.post("LMTIER.RESERVE", *request, then=asked.answer)
        return asked

    def finish_reserve(self, asked: PendingReservation) -> Grant:
        """The result of `reserve`. Everything is dropped also if the server was restarted meanwhile."""
        reply = grant = None
        if asked.link is not None and asked.answer is not None:
            reply = self._server.wait_for_reply(asked.link, asked.answer, "LMTIER.RESERVE")
        if reply is not None:
            grant = self._server.parse_reply(
                lambda: read_reservation(read_fields(reply), asked.keys, asked.form)
            )
        if grant is None:
            skipped = min(asked.first, len(asked.keys))
            return Grant.of_nothing(asked.form, skipped, len(asked.keys) - skipped)
        if grant.chunks:
            self._server.held[grant.id] = set(grant.form.shards)
        return grant

    @property
    def is_server_alive(self) -> bool:
        """Whether the server of this client's matches is still there. Does not wait for it."""
        return self._server.is_server_alive

    def cancel_reserve(self, asked: PendingReservation) -> None:
        """Give the reservation up. Does not wait for the server."""
        if asked.link is self._server.link and asked.answer is not None:
            asked.answer.abandon()
            if not asked.answer.has_arrived and not asked.link.is_lost:
                self._withdrawn = time.monotonic()

    @property
    def has_late_reservation(self) -> bool:
        """Whether a reservation that was given up may still arrive: `step` gives it back at once."""
        link = self._server.link
        is_recent = time.monotonic() - self._withdrawn < self._server.timeout
        return is_recent and bool(link.callbacks) and not (link.is_lost or link.is_stalled)

    def commit(
        self, grant: Grant, shard: Shard | None = None, marks: Mapping[int, bytes] | None = None
    ) -> None:
        """As Cache.commit. With no server, nothing becomes visible."""
        if grant.chunks:
            done = self._finish(grant, shard)
            pairs = [word for chunk, mark in (marks or {}).items() for word in (chunk, mark.hex())]
            self._end(grant, "LMTIER.COMMIT", grant.id, str(done), *pairs)

    def abort(self, grant: Grant, shard: Shard | None = None) -> None:
        """As Cache.abort."""
        if grant.chunks:
            self._end(grant, "LMTIER.ABORT", grant.id, str(self._finish(grant, shard)))

    def unfinished(self, grant: Grant) -> list[Shard]:
        """The shards that this process has to commit or abort."""
        return sorted(self._server.held.get(grant.id, ()))

    def _finish(self, grant: Grant, shard: Shard | None) -> Shard:
        done = grant.shard(shard)
        pending = self._server.held.get(grant.id, set())
        if done not in pending:
            raise MisuseError(
                f"shard {done} of {grant!r} was committed or aborted before, or another process made the "
                "grant: adopt it before you use its extents"
            )
        pending.remove(done)
        return done

    def _end(self, grant: Grant, *request: Argument) -> None:
        server, link = self._server, self._server.link
        answer = PendingReply()
        try:
            # The bytes are in place, so a commit counts as soon as the server reads it.
            is_late = link.is_stalled or link.is_lost or not self._waits
            server.end(*request, then=self._ended if is_late else answer)
            if not is_late:
                server.wait_for_reply(link, answer, request[0])
        finally:
            # Only now: while it is held, no other connection can get this call.
            if not server.held[grant.id]:
                del server.held[grant.id]

    # ---- grants of other processes of this engine

    def adopt(self, grant: Grant, *shards: Shard) -> bool:
        """Use what another process of this session holds, and commit or abort these shards of it.

        False: its slab is not mapped here. If others still use it at the end, call `disown`.
        """
        if self._server.reach() is None or grant.id >> RUN_SHIFT != self._server.link.run_id:
            return False
        self._server.held[grant.id] = set(shards)
        return True

    def disown(self, grant: Grant) -> None:
        """This process stops using its extents. Others finish it; it does not end by this."""
        self._server.held.pop(grant.id, None)

    # ---- calls of the JSON API

    def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """A call of the server's JSON API, after all that was sent before. None: no server, or it refused."""
        reply = self._server.call(*_call(name, arguments or {}))
        return self._server.parse_reply(lambda: json.loads(reply)) if reply is not None else None

    def pin(self, name: str, keys: Sequence[bytes], ttl: float | None = None) -> dict[str, int]:
        """As Cache.pin. The pin outlives this client, but not the server. Empty if no server answers."""
        lifetime = {} if ttl is None else {"seconds": seconds_of(ttl)}
        return self.call("pin", {"name": name, "keys": [key.hex() for key in keys], **lifetime}) or {}

    def unpin(self, name: str) -> bool:
        """As Cache.unpin."""
        return bool(self.call("unpin", {"name": name}))

    def pinned(self) -> list[Pinned]:
        """As Cache.pinned. Empty if no server answers."""
        found = self.call("pins") or []
        return self._server.parse_reply(lambda: [Pinned(**each) for each in found]) or []

    def declare(self, identity: Identity, form: ChunkForm, lora: str = "") -> None:
        """Send how this engine makes its keys, so that users can name prompts by their tokens.

        It is sent again to each new run of the server.
        """
        self._server.declare(identity, form, lora)

    # ---- sessions

    def hint(self, envelope: Mapping[str, Any], *, salt: str = "", session: str = "") -> None:
        """As Cache.hint, for the tenant of this salt. Does not wait for the server."""
        arguments = {**envelope, "salt": salt, "session": session}
        if len(json.dumps(arguments)) > MAX_BYTES:
            log.warning("lmtier: hints of more than %d bytes are not sent", MAX_BYTES)
            return
        if self._server.reach() is not None:
            self._server.post(*_call("hints", arguments), then=self._hinted)

    def _hinted(self, reply: Any) -> None:
        if isinstance(reply, Error):
            log.warning("lmtier: the server at %s refused hints: %s", self._server.address, reply)

    # ---- the whole cache

    def compared(self, chunks: int, differing: int) -> None:
        """As Cache.compared. It is sent with the next request."""
        self._server.compared += chunks
        self._server.differing += differing

    def discard(self, key: bytes, *forms: ChunkForm) -> None:
        """As Cache.discard; the server knows the forms of this session."""
        self.delete([key])

    def delete(self, keys: Sequence[bytes]) -> bool:
        """Delete these chunks in every tier. False: the server has not confirmed all of it."""
        batches = [keys[first : first + MAX_KEYS] for first in range(0, len(keys), MAX_KEYS)]
        return all(self._server.call("LMTIER.DISCARD", *batch) is not None for batch in batches)

    def flush(self, timeout: float = 30.0) -> bool:
        """As Cache.flush. False if no server answers."""
        milliseconds = int(1000 * min(max(0.0, timeout), MAX_MS / 1000))
        return bool(self._server.call("LMTIER.FLUSH", milliseconds, seconds=timeout) == 1)

    def clear(self, selector: Selector = EVERYTHING, *, force: bool = False) -> None:
        """As Cache.clear, but not for tenants: `lmtier forget` is for them."""
        if selector.tenants:
            raise MisuseError("a client clears no tenants: use lmtier forget")
        if not selector.by or selector.until != EVERYTHING.until:  # a server would clear more than is meant
            raise MisuseError("a client clears what engines with a name stored, until now")
        options = {
            "prefix": selector.prefix.hex(),
            "stored_by": "" if selector.by == "*" else selector.by,
            "since": selector.since,
        }
        self.call("clear", {"force": force, **{name: value for name, value in options.items() if value}})

    def changes(self) -> list[Change] | None:
        """The changes on the server since the last call. The first call starts it.

        None: some changes are not known, so any chunk may be gone.
        """
        link, position_before = self._server.reach(), self._read_to
        if link is None:
            return []
        is_new = position_before is None or position_before[0] != link.run_id
        given = {} if position_before is None or is_new else {"position": position_before[1]}
        reply = self._server.call(*_call("changes", given), link=link)
        found = (
            self._server.parse_reply(lambda: _read_changes(json.loads(reply))) if reply is not None else None
        )
        if found is None:
            return []
        next_position, is_lost, changes = found
        self._read_to = link.run_id, next_position
        return None if is_lost or (is_new and position_before is not None) else changes

    def report(self) -> dict[str, Any]:
        """The server's own report: its tiers, its load. Empty if no server answers."""
        return self.call("stats") or {}

    def stats(self) -> dict[str, dict[str, int]]:
        """As Cache.stats. Empty if no server answers."""
        report, numbers = self.report(), ("chunks", "used", "capacity")
        tiers = self._server.parse_reply(lambda: list(report["tiers"])) if report else None
        owned = [tier for tier in tiers or () if tier["chunks"] is not None]
        return {tier["tier"]: {name: tier[name] for name in numbers} for tier in owned}

    def check(self) -> None:
        """As Cache.check: AssertionError if an invariant of the server does not hold."""
        reply = self._server.call(*_call("check", {}), errors=True)
        if isinstance(reply, Error):
            raise AssertionError(reply)

    def close(self) -> None:
        """Close the connection.

        With a session's last connection, the server ends all that it held. Idempotent.
        """
        self._server.close()

    def forked(self) -> None:
        """A child needs its own connection and holds nothing of its parent's."""
        self._server.forked()
        forks.call_in_child(self)  # its children too

    def batched(self) -> AbstractContextManager[None]:
        """Send all requests of this block that need no reply at once: each send may have to wake the
        server."""
        return self._server.batched()

    def _ended(self, reply: Any) -> None:
        if isinstance(reply, Error):
            log.warning("lmtier: the server at %s refused the end of a save: %s", self._server.address, reply)

    def _call_for(self, match: RemoteMatch, verb: str, *request: Argument, seconds: float = 0.0) -> Any:
        """A call about a match. Only the server that made it knows it."""
        is_held = match.grant.id in self._server.held
        return self._server.call(verb, match.grant.id, *request, seconds=seconds) if is_held else None

    def _update(self, match: RemoteMatch, reply: Any, limit: int = MAX_KEYS) -> None:
        """Update a match from the server's reply. Without one, only its first `limit` chunks may stay."""
        parse = self._server.parse_reply
        if not isinstance(reply, list) or parse(lambda: read_match(match, read_fields(reply))) is None:
            match.lose_server(limit)


def _read_changes(found: dict[str, Any]) -> tuple[int, bool, list[Change]]:
    """The next position, whether changes were lost, the changes."""
    changes = [
        Change(str(tier), bool(is_added), bytes.fromhex(key))
        for tier, is_added, keys in found["runs"]
        for key in keys
    ]
    return int(found["position"]), bool(found["is_lost"]), changes


def _call(name: str, arguments: Mapping[str, Any]) -> list[Argument]:
    """The request of a call. Its JSON is in pieces as long as a server accepts."""
    text = json.dumps(arguments).encode()
    return ["LMTIER.CALL", f"/api/{name}", *(text[at : at + _PIECE] for at in range(0, len(text), _PIECE))]


def _words(session: str, parent: str, source: str) -> list[Argument]:
    """The words before the keys."""
    for name in (session, parent, source):
        if name and not is_name(name):
            raise MisuseError(f"{name!r:.40} is no name: it has 1 to {MAX_NAME} printable characters")
    words: list[Argument] = []
    if session:
        words += ("SESSION", session, *(("PARENT", parent) if parent else ()))
    if source:
        words += ("SOURCE", source)
    return words


def _lifetime(ttl: float | None) -> tuple[Argument, ...]:
    return () if ttl is None else ("TTL", max(1, int(seconds_of(ttl) * 1000)))


def _need_own(match: Match, call: str) -> RemoteMatch:
    if match.released or not isinstance(match, RemoteMatch):
        raise MisuseError(f"{call} of a match that was released, or that a cache in this process made")
    return match
