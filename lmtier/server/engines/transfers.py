"""Verbs that load and save.

To load: look up a prompt, prefetch chunks of lower tiers, wait for them, release, report wrong chunks. To
save: reserve room in the slab, fill it, and commit or abort.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from lmtier.core.cache import Cache
from lmtier.core.grant import Grant
from lmtier.core.match import Lookup
from lmtier.format.layout import ChunkForm
from lmtier.format.objects import MARK_ROOM
from lmtier.server.arguments import (
    MAX_TOKENS,
    read_asker,
    read_chain,
    read_hex,
    read_keys,
    read_lifetime,
    read_number,
    read_seconds,
    read_shard,
    read_text,
)
from lmtier.server.commands import OK, PAUSE, Argument, Caller, PendingAnswer, Refused
from lmtier.server.engines.engine_sessions import EngineSession, EngineSessions, engine_session_of
from lmtier.server.request_log import RequestLog
from lmtier.server.tracing import Tracing
from lmtier.wire.resp import Error
from lmtier.wire.verbs import NOT_HELD, write_match, write_reservation

MAX_RESERVED = 16_384
"""The most new chunks in one request."""
_HOST = socket.gethostname()


class TransferVerbs:
    def __init__(
        self, cache: Cache, sessions: EngineSessions, tracing: Tracing | None, log: RequestLog | None
    ) -> None:
        self._cache = cache
        self._sessions = sessions
        self._tracing = tracing
        self._log = log
        self._sources = {"", *(tier.source for tier in cache.lower.shared)}

    # ---- look up

    def match(self, caller: Caller, arguments: list[Argument]) -> Any:
        began = time.time_ns() if self._tracing is not None else 0
        session = engine_session_of(caller)
        if bytes(arguments[3]) == NOT_HELD:
            self._cache.release(self._look_up(caller, arguments[1], arguments[2], arguments[4:]))
            return OK
        session.need_room(arguments[4:])
        deadline = read_seconds(arguments[3], "a deadline")
        match = self._look_up(caller, arguments[1], arguments[2], arguments[4:], deadline)
        match_id = next(self._sessions.ids)
        session.hold(match_id, match)
        if self._tracing is not None:
            self._tracing.matched(match_id, began, match, caller.name)
        return write_match(match_id, match)

    def _look_up(
        self,
        caller: Caller,
        form: Argument,
        tokens: Argument,
        keys: list[Argument],
        deadline: float | None = None,
    ) -> Lookup:
        session = engine_session_of(caller)
        chunk_form, state_form = session.forms_of(form)
        agent_session, parent, source, keys = read_asker(keys)
        if source not in self._sources:
            self._cache.metrics.unknown_sources.inc()
        match = self._cache.match(
            read_chain(keys),
            chunk_form,
            tokens=read_number(tokens, "a number of tokens", MAX_TOKENS) or None,
            deadline=deadline,
            cost=session.cost,
            state_form=state_form,
            session=agent_session,
            parent=parent,
            source=source,
        )
        match.asker = caller.name
        if self._log is not None:
            self._log.note(match.keys, match.asked_tokens)
        return match

    def seen(self, caller: Caller, arguments: list[Argument]) -> Any:
        self._cache.touch(read_keys(arguments[1:]))
        return OK

    # ---- prefetch and wait

    def prefetch(self, caller: Caller, arguments: list[Argument]) -> Any:
        match_id, match = _held(caller, arguments[1])
        options, engine_tokens = arguments[2:], 0
        if len(options) > 1 and read_text(options[-2]).upper() == "HAS":
            engine_tokens = read_number(options[-1], "a number of tokens", MAX_TOKENS)
            del options[-2:]
        if len(options) > 1:
            raise Refused("ERR LMTIER.PREFETCH takes a match, [how many chunks of it], [HAS tokens], no more")
        chunks = read_number(options[0], "a number of chunks") if options else None
        if self._tracing is not None:
            self._tracing.wanted(match_id, match)
        self._cache.prefetch(match, chunks, has=engine_tokens)
        return self._described(match_id, match)

    def poll(self, caller: Caller, arguments: list[Argument]) -> Any:
        match_id, match = _held(caller, arguments[1])
        if [bytes(each).upper() for each in arguments[2:]] not in ([], [b"WAIT"]):
            raise Refused("ERR LMTIER.POLL takes a match, [WAIT], no more")
        if len(arguments) == 2:
            return self._described(match_id, match)
        if self._tracing is not None:
            self._tracing.wanted(match_id, match)
        if not match.pending_lookups:
            self._cache.prefetch(match)
        return self._described(match_id, match) if match.is_ready else self._waiting(match_id, match)

    def _waiting(self, number: int, match: Lookup) -> PendingAnswer:
        """As Cache.wait. The owner steps meanwhile, and a step ends the wait at the match's deadline."""
        while match.pending_lookups and not match.released:
            yield None
        if not match.released:
            self._cache.prefetch(match)
        while not match.is_ready and not match.released:
            yield None
        if match.released:
            return Error(f"NOSUCH match {number} was released meanwhile")
        return self._described(number, match)

    def _described(self, number: int, match: Lookup) -> dict[str, Any]:
        if self._tracing is not None:
            self._tracing.reply_sent(number, match)
        return write_match(number, match)

    # ---- release

    def release(self, caller: Caller, arguments: list[Argument]) -> Any:
        session, words, verified = engine_session_of(caller), arguments[1:], [0, 0]
        if len(words) > 2 and bytes(words[-3]).upper() == b"VERIFIED":
            verified = [read_number(each, "a number of chunks", 1 << 32) for each in words[-2:]]
            del words[-3:]
        for number in [read_number(each, "a match") for each in words]:
            self._sessions.release(session, number)
        if any(verified):
            self._cache.compared(*verified)
        return OK

    def discard(self, caller: Caller, arguments: list[Argument]) -> Any:
        forms = caller.engine_session.forms if caller.engine_session is not None else ()
        return self._discarding(read_keys(arguments[1:]), tuple(forms))

    def _discarding(self, keys: list[bytes], forms: Sequence[ChunkForm]) -> PendingAnswer:
        for key in keys:
            self._cache.discard(key, *forms)
            yield PAUSE
        return OK

    # ---- save

    def reserve(self, caller: Caller, arguments: list[Argument]) -> Any:
        session = engine_session_of(caller)
        began = time.time_ns() if self._tracing is not None else 0
        session.need_room(())
        form = session.form(arguments[1])
        first = read_number(arguments[2], "a number of chunks")
        ttl, keys = read_lifetime(arguments[3:])
        steps = self._cache.reserve_in_steps(
            keys, form, first=first, ttl=ttl, by=f"{caller.name} @{_HOST}", most=MAX_RESERVED
        )
        try:
            next(steps)
        except StopIteration as end:  # as usual
            return self._reserved(caller, session, end.value, began)
        return self._reserving(caller, session, steps, began)

    def _reserving(
        self, caller: Caller, session: EngineSession, steps: Generator[None, None, Grant], began: int
    ) -> PendingAnswer:
        with closing(steps):
            while True:
                yield PAUSE
                try:
                    next(steps)
                except StopIteration as end:
                    return self._reserved(caller, session, end.value, began)

    def _reserved(self, caller: Caller, session: EngineSession, grant: Grant, began: int) -> Any:
        number = 0
        if grant.chunks:
            number = next(self._sessions.ids)
            session.reservations[number] = grant
            if self._tracing is not None:
                self._tracing.reserved(number, began, caller.name)
        return write_reservation(number, grant)

    def commit(self, caller: Caller, arguments: list[Argument]) -> Any:
        session, reservation_id, grant = _reserved(caller, arguments[1])
        chunk_fingerprints = arguments[3:]
        if len(chunk_fingerprints) % 2:
            raise Refused("ERR LMTIER.COMMIT takes marks in pairs: chunk hex")
        fingerprints = {}
        for chunk, fingerprint in zip(chunk_fingerprints[::2], chunk_fingerprints[1::2], strict=True):
            if len(fingerprint) > 2 * MARK_ROOM:
                raise Refused(f"ERR a mark has at most {MARK_ROOM} bytes")
            fingerprints[read_number(chunk, "a chunk")] = read_hex(fingerprint)
        shard = read_text(arguments[2])
        self._cache.commit(grant, None if shard == "*" else read_shard(shard), fingerprints)
        self._sessions.finish(session, reservation_id)
        return OK

    def abort(self, caller: Caller, arguments: list[Argument]) -> Any:
        session, reservation_id, grant = _reserved(caller, arguments[1])
        shard = read_text(arguments[2])
        shards = self._cache.unfinished(grant) if shard == "*" else [read_shard(shard)]
        self._sessions.abort(session, reservation_id, shards)
        return OK


def _held(caller: Caller, argument: Argument) -> tuple[int, Lookup]:
    number = read_number(argument, "a match")
    match = engine_session_of(caller).matches.get(number)
    if match is None:
        raise Refused(f"NOSUCH match {number}: it was released, or belongs to another engine")
    return number, match


def _reserved(caller: Caller, argument: Argument) -> tuple[EngineSession, int, Grant]:
    session, number = engine_session_of(caller), read_number(argument, "a reservation")
    grant = session.reservations.get(number)
    if grant is None:
        raise Refused(f"NOSUCH reservation {number}: it is finished, or belongs to another engine")
    return session, number, grant
