"""Sessions: the properties of an engine, and its matches and reservations, which end with it.

A session is one engine: its scheduler and its ranks, each with separate connections. Matches and reservations
belong to the session, so a rank can commit a reservation of the scheduler. They end with the session's last
connection. If a rank dies before that, only its shard is lost, and nothing else is freed: another rank may
still be copying. docs/PROTOCOL.md describes this for authors of clients.

Only who shares an engine's secret joins its session, on the Unix socket and as the same user. The server
never shows the secret: people see NAME.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from lmtier._version import __version__
from lmtier.core.cache import Cache
from lmtier.core.grant import Grant
from lmtier.core.handover import Handover, HandoverWriter
from lmtier.core.match import Lookup
from lmtier.errors import size_text
from lmtier.format.keys import KEY_BYTES
from lmtier.format.layout import ChunkForm, Layout, Shard, form_of
from lmtier.rules.worth import Cost
from lmtier.server.arguments import (
    MAX_IDENTITY,
    read_identity,
    read_name,
    read_number,
    read_secret,
    read_shard,
    read_text,
)
from lmtier.server.commands import OK, Argument, Caller, Refused, WithDescriptors
from lmtier.server.ledger import KEY_OVERHEAD, MAX_SESSION_BYTES, OBJECT_OVERHEAD
from lmtier.server.models import Models
from lmtier.server.tracing import MAX_HEADER, Tracing
from lmtier.wire.verbs import AND_STATE, PROTOCOL, RUN_SHIFT

MAX_FORMS = 64
MAX_SHARDS = 256


@dataclass(eq=False, slots=True)
class EngineSession:
    """The state of one engine, over all of its connections."""

    secret: str = field(repr=False)
    """What its processes share; empty: it has one connection."""
    members: dict[Caller, Shard | None] = field(default_factory=dict)
    """Its connections, and the shard of each."""
    forms: list[ChunkForm] = field(default_factory=list)
    matches: dict[int, Lookup] = field(default_factory=dict)
    held_keys: int = 0
    """The number of keys of its matches."""
    reservations: dict[int, Grant] = field(default_factory=dict)
    cost: Cost | None = None
    """Its cost of computing, once it has sent it."""
    lost_at_flush: int = 0
    """How many of the cache's lost chunks were reported to this session."""

    def form(self, argument: Argument) -> ChunkForm:
        number = read_number(argument, "a form")
        if number >= len(self.forms):
            raise Refused(f"NOSUCH form {number}: LMTIER.FORM gives the number of one")
        return self.forms[number]

    def forms_of(self, argument: Argument) -> tuple[ChunkForm, ChunkForm | None]:
        """The form of a match, and that of the state at its end: "3", or "3+4"."""
        form, separator, state_form = bytes(argument).partition(AND_STATE.encode())
        return self.form(form), self.form(state_form) if separator else None

    @property
    def held_bytes(self) -> int:
        """The bytes that the server remembers for it."""
        objects = len(self.matches) + len(self.reservations) + len(self.forms)
        return OBJECT_OVERHEAD * (1 + objects) + KEY_OVERHEAD * self.held_keys

    def need_room(self, arguments: Iterable[Argument]) -> None:
        """For a match or a reservation of these keys."""
        if (
            self.held_bytes + OBJECT_OVERHEAD + KEY_OVERHEAD * sum(map(len, arguments)) // KEY_BYTES
            > MAX_SESSION_BYTES
        ):
            raise Refused(
                f"ERR the matches and reservations of this session take {size_text(MAX_SESSION_BYTES)}: end "
                "some"
            )

    def hold(self, number: int, match: Lookup) -> None:
        self.matches[number] = match
        self.held_keys += len(match.keys)


class EngineSessions:
    """All sessions, and how their matches and reservations end."""

    def __init__(self, cache: Cache, tracing: Tracing | None, models: Models) -> None:
        self._cache = cache
        self._tracing = tracing
        self._models = models
        self._run = secrets.randbits(63 - RUN_SHIFT)
        self.ids = count((self._run << RUN_SHIFT) + 1)
        """The ids of matches and reservations."""
        self._shared: dict[str, EngineSession] = {}
        """By their secret."""

    # ---- properties of an engine

    def hello(self, caller: Caller, arguments: list[Argument]) -> Any:
        version = read_number(arguments[1], "a protocol version")
        if version != PROTOCOL:
            raise Refused(
                f"LMTIERVERSION this server speaks {PROTOCOL}, the client asked for {version}: "
                "install the same lmtier on both sides"
            )
        if caller.engine_session is not None:
            raise Refused("MISUSE this connection has sent LMTIER.HELLO before")
        secret, name, shard = "", caller.name, None
        options = list(map(read_text, arguments[2:]))
        if len(options) % 2:
            raise Refused("ERR LMTIER.HELLO takes pairs: ENGINE secret, SHARD L0-32H0-4, NAME text")
        for option, value in zip(options[::2], options[1::2], strict=True):
            match option.upper():
                case "ENGINE" | "SHARD" if not caller.is_local:
                    raise Refused("MISUSE only who maps the slab shares a session: use the Unix socket")
                case "ENGINE":
                    secret = read_secret(value)
                case "SHARD":
                    shard = read_shard(value)
                case "NAME":
                    name = read_name(value)
                case _:
                    raise Refused(f"ERR unknown option {option[:32]!r}: ENGINE, SHARD and NAME are known")
        session = self._shared.get(secret) or EngineSession(secret, lost_at_flush=self._cache.lost)
        for member, member_shard in session.members.items():
            if member.user != caller.user:
                raise Refused("NOPERM another user's processes have this session")
            if shard is not None and shard == member_shard:
                # When one of the two left, the server would give away what the other one fills.
                raise Refused(
                    f"MISUSE {member.name or 'a process'!r} is connected and saves shard {shard} of this "
                    "engine: each engine needs its own secret (engine_id in vLLM)"
                )
        if secret:
            self._shared[secret] = session
        session.members[caller] = shard
        caller.engine_session, caller.name, caller.kind = session, name, "engine"
        config = self._cache.config
        return {
            "version": __version__,
            "protocol": PROTOCOL,
            "run": self._run,
            "chunk_tokens": self._cache.chunk_tokens,
            "capacity": self._cache.slab.capacity,
            "verify": config.verify,
            "approximation": config.approximation,
            "load_deadline": config.load_deadline,
            "traces": self._tracing is not None,
            "slab": caller.is_local and self._cache.slab.fd is not None,
        }

    def slab(self, caller: Caller, arguments: list[Argument]) -> Any:
        """The slab, and the table of absent keys, if no shared tier must be asked each time."""
        fd, presence = self._cache.slab.fd, self._cache.presence
        if fd is None:
            raise Refused("ERR this server's slab is private memory: start it with --unix PATH")
        fds = (fd,) if presence is None else (fd, presence.fd)
        return WithDescriptors([self._cache.slab.capacity, len(fds) - 1], fds)

    def form(self, caller: Caller, arguments: list[Argument]) -> Any:
        """Give a form its number in the session. With MODEL: users can name its prompts by their tokens."""
        session, model = engine_session_of(caller), None
        layout, *shards = arguments[1:]
        if len(shards) > 3 and bytes(shards[-3]).upper() == b"MODEL":
            model = read_identity(shards[-2]), read_text(shards[-1][:MAX_IDENTITY])
            del shards[-3:]
        if len(shards) > MAX_SHARDS:
            raise Refused(f"ERR a form has at most {MAX_SHARDS} shards")
        form = form_of(Layout.from_json(bytes(layout)), (read_shard(read_text(each)) for each in shards))
        if form not in session.forms:
            if len(session.forms) == MAX_FORMS:
                raise Refused(f"ERR a session has at most {MAX_FORMS} forms")
            session.forms.append(form)
        if model is not None:
            self._models.add(*model, form)
        return session.forms.index(form)

    def cost(self, caller: Caller, arguments: list[Argument]) -> Any:
        """Set this engine's cost of computing, for matches from now on: fixed, token, position, copy."""
        session = engine_session_of(caller)
        try:
            cost = Cost(*(float(bytes(each)) for each in arguments[1:]))
        except ValueError:
            cost = Cost(-1.0, 0.0, 0.0, 0.0)
        if not cost.is_sane:
            raise Refused("ERR LMTIER.COST takes four numbers of seconds: fixed, token, position, copy")
        session.cost = cost
        return OK

    def trace(self, caller: Caller, arguments: list[Argument]) -> Any:
        """Set the trace of a match or a reservation."""
        session, number = engine_session_of(caller), read_number(arguments[1], "a match or a reservation")
        headers = [read_text(each[:MAX_HEADER]) for each in arguments[2:4]]
        if self._tracing is not None and (number in session.matches or number in session.reservations):
            self._tracing.belongs(number, dict(zip(("traceparent", "tracestate"), headers, strict=False)))
        return OK

    # ---- to and from another process

    def dump(self, callers: Sequence[Caller], writer: HandoverWriter) -> dict[str, Any]:
        """The sessions of these callers, which go over too, and what they hold."""
        numbers = {caller: number for number, caller in enumerate(callers)}
        sessions = dict.fromkeys(each.engine_session for each in callers if each.engine_session is not None)
        matches = [match for each in sessions for match in each.matches.values()]
        writer.write_cache(matches, [grant for each in sessions for grant in each.reservations.values()])
        return {
            "run": self._run,
            "next": next(self.ids),
            "each": [
                {
                    "secret": each.secret,
                    "members": [
                        (numbers[caller], None if shard is None else str(shard))
                        for caller, shard in each.members.items()
                        if caller in numbers
                    ],
                    "forms": list(map(writer.form, each.forms)),
                    "matches": [(number, writer.match(match)) for number, match in each.matches.items()],
                    "reservations": [
                        (number, writer.reservation(grant)) for number, grant in each.reservations.items()
                    ],
                    "cost": each.cost,
                    "lost": self._cache.lost - each.lost_at_flush,
                }
                for each in sessions
            ],
        }

    def restore(self, facts: dict[str, Any], handover: Handover, callers: Sequence[Caller]) -> None:
        """The ids of matches and reservations stay valid: it is the same run for engines."""
        self._run, self.ids = facts["run"], count(facts["next"])
        for dumped in facts["each"]:
            session = EngineSession(
                dumped["secret"], forms=[handover.forms[form] for form in dumped["forms"]]
            )
            session.cost = None if dumped["cost"] is None else Cost(*dumped["cost"])
            session.lost_at_flush = self._cache.lost - dumped["lost"]
            for number, match in dumped["matches"]:
                session.hold(number, handover.match(match, self._cache))
            for number, grant in dumped["reservations"]:
                session.reservations[number] = handover.reservation(grant, self._cache)
            if session.secret:
                self._shared[session.secret] = session
            for number, shard in dumped["members"]:
                session.members[callers[number]] = None if shard is None else read_shard(shard)
                callers[number].engine_session = session

    # ---- ends of matches and reservations

    def release(self, session: EngineSession, number: int) -> None:
        match = session.matches.pop(number, None)
        if match is not None:
            session.held_keys -= len(match.keys)
            if self._tracing is not None:
                self._tracing.released(number, match)
            self._cache.release(match)

    def abort(self, session: EngineSession, number: int, shards: Sequence[Shard]) -> None:
        for shard in shards:
            self._cache.abort(session.reservations[number], shard)
        if self._tracing is not None:
            self._tracing.aborted(number)
        self.finish(session, number)

    def finish(self, session: EngineSession, number: int) -> None:
        """End a reservation when no shard of it is left."""
        grant = session.reservations[number]
        if not self._cache.unfinished(grant):
            del session.reservations[number]
            if self._tracing is not None:
                self._tracing.stored(number, grant)

    def on_disconnect(self, caller: Caller) -> None:
        """A connection was closed."""
        session: EngineSession | None = caller.engine_session
        if session is None:
            return
        caller.engine_session = None
        shard = session.members.pop(caller)
        if not session.members:
            self._end(session)
        elif shard is not None:
            for number, grant in list(session.reservations.items()):
                if shard in self._cache.unfinished(grant):
                    self.abort(session, number, [shard])

    def _end(self, session: EngineSession) -> None:
        if session.secret:
            del self._shared[session.secret]
        for number in list(session.matches):
            self.release(session, number)
        for number, grant in list(session.reservations.items()):
            self.abort(session, number, self._cache.unfinished(grant))


def engine_session_of(caller: Caller) -> EngineSession:
    session: EngineSession | None = caller.engine_session
    if session is None:
        raise Refused(f"NOSESSION send LMTIER.HELLO {PROTOCOL} first")
    return session
