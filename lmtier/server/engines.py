"""Engines and the verbs they speak; what an engine holds ends with it.

A session is one engine: its scheduler, its ranks, each with connections of their own. Matches and
reservations belong to the session, so that what the scheduler reserved a rank can commit. They end with the
session's last connection. Until then a rank that dies costs its shard, and nothing else is freed: another
rank may still be copying. docs/PROTOCOL.md says the same to those who write clients.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import count, groupby
from typing import Any

from lmtier import __version__
from lmtier.cache import Cache, Match, Reservation
from lmtier.codec import MARK_ROOM, Suspect
from lmtier.errors import LayoutError, MisuseError
from lmtier.explain import MAX_LOOKUPS, Explain
from lmtier.index import Entry, State
from lmtier.keys import KEY_BYTES, VALUES, Identity, is_value, namespace
from lmtier.layout import PAGE, Form, Layout, Shard, form_of
from lmtier.prompts import Origin
from lmtier.server.commands import (
    MOST,
    PAUSE,
    Argument,
    Caller,
    Command,
    Handler,
    Refused,
    Table,
    Waiting,
    WithDescriptor,
)
from lmtier.server.request_log import RequestLog
from lmtier.server.resp import Error, Simple
from lmtier.tracing import MAX_HEADER, Tracing
from lmtier.worth import Cost

PROTOCOL = 1
MAX_KEYS = 65_536
"""In one request."""
MAX_HELD = 65_536
"""Matches in a session; as many reservations."""
MAX_CHANGES = 4096
"""In one reply."""
MAX_RESERVED = 16_384
"""New chunks in one request: each takes 12 µs, in which nobody else has a turn."""
MAX_HELD_KEYS = 1 << 20
"""Of all matches in a session: some 100 MB."""
MAX_FORMS = 64
MAX_SHARDS = 256
MAX_TOKENS = 1 << 40
"""In one prompt. Larger numbers would spoil the counters."""
MAX_CLEARINGS = 64
"""Of one tier that must be asked: those that wait for it."""
MAX_MODELS = 64
MAX_NAME = 128
_MAX_IDENTITY = 1 << 14
_IDENTITY = {each.name: type(each.default) if each.name != "model" else str for each in fields(Identity)}
MAX_MS = 24 * 3600 * 1000
_HOST = socket.gethostname()
RUN_SHIFT = 32
"""An id of a match or a reservation is the server's run, shifted by this, plus a counter: an id of another
run names nothing here."""

OK = Simple("OK")
_MOST = 2 * MAX_KEYS + 16
"""Arguments: of one chunk, two."""
_LONG = {"MATCH", "MISSED", "SEEN", "TELL", "RESERVE", "BRING", "PIN", "COMMIT", "DISCARD", "RELEASE"}
_KEY = struct.Struct(f"{KEY_BYTES}s")
_HEX_KEY = re.compile(rb"[0-9a-f]{64}")
_DIGITS = re.compile(rb"[0-9]{1,19}")


@dataclass(eq=False, slots=True)
class Session:
    """What one engine has, over all of its connections."""

    name: str
    members: dict[Caller, Shard | None] = field(default_factory=dict)
    """Its connections, and which shard each stands for."""
    forms: list[Form] = field(default_factory=list)
    matches: dict[int, Match] = field(default_factory=dict)
    held_keys: int = 0
    """Of the matches."""
    reservations: dict[int, Reservation] = field(default_factory=dict)
    cost: Cost | None = None
    """What computing takes it, once it has said so."""
    told_lost: int = 0
    """Of what tiers below were to get and did not: as many chunks as it knows of."""

    def need_room(self, arguments: Iterable[Argument]) -> None:
        """For one more match."""
        _need_room(self.matches, "matches: release some")
        if self.held_keys + sum(map(len, arguments)) // KEY_BYTES > MAX_HELD_KEYS:
            raise _refused(f"ERR the matches of this session hold {MAX_HELD_KEYS} keys: release some")

    def hold(self, number: int, match: Match) -> None:
        self.matches[number] = match
        self.held_keys += len(match.keys)

    def let_go(self, number: int) -> Match | None:
        match = self.matches.pop(number, None)
        self.held_keys -= 0 if match is None else len(match.keys)
        return match


class Engines:
    """The verbs `LMTIER.*` over one cache. Called by the cache's owner."""

    def __init__(self, cache: Cache, log: RequestLog | None = None, tracing: Tracing | None = None) -> None:
        self.cache = cache
        self.explain = Explain(cache)
        self._log = log
        self._tracing = tracing
        self.run = secrets.randbits(63 - RUN_SHIFT)
        self._ids = count((self.run << RUN_SHIFT) + 1)
        self._shared: dict[str, Session] = {}
        self.models: OrderedDict[tuple[Identity, str], Form] = OrderedDict()
        """Those that engines told of, and adapters; the last one is the youngest. They outlive sessions."""

    def table(self) -> Table:
        verbs: dict[str, tuple[Handler, int, str]] = {
            "HELLO": (self._hello, -2, "fast"),
            "SLAB": (self._slab, 1, "fast"),
            "PRESENCE": (self._presence, 1, "fast"),
            "FORM": (self._form, -3, "fast"),
            "MATCH": (self._match, -5, "readonly"),
            "MISSED": (self._missed, -4, "readonly"),
            "PREFETCH": (self._prefetch, -2, "readonly"),
            "POLL": (self._poll, 2, "readonly"),
            "WAIT": (self._wait, 2, "readonly"),
            "COST": (self._cost, 5, "fast"),
            "RELEASE": (self._release, -2, "readonly"),
            "SEEN": (self._seen, -2, "readonly"),
            "TELL": (self._told, -5, "readonly"),
            "TRACE": (self._trace, -3, "readonly"),
            "RESERVE": (self._reserve, -4, "write"),
            "BRING": (self._bring, -4, "readonly"),
            "MODEL": (self._model, -3, "fast"),
            "MODELS": (self._models, 1, "readonly"),
            "PIN": (self._pin, -3, "write"),
            "UNPIN": (self._unpin, 2, "write"),
            "PINS": (self._pins, 1, "readonly"),
            "COMMIT": (self._commit, -3, "write"),
            "ABORT": (self._abort, 3, "write"),
            "DISCARD": (self._discard, -2, "write"),
            "CLEAR": (self._clear, -1, "write"),
            "FLUSH": (self._flush, 2, "write"),
            "VERIFIED": (self._verified, 3, "fast"),
            "CHANGES": (self._changes, -1, "readonly"),
            "STATS": (self._stats, 1, "readonly"),
            "EXPLAIN": (self._explained, -1, "readonly"),
            "CHECK": (self._check, 1, "admin"),
        }
        return {
            f"LMTIER.{name}".encode(): Command(
                _answering(handler), arity, (flag, "loading"), most=_MOST if name in _LONG else MOST
            )
            for name, (handler, arity, flag) in verbs.items()
        }

    def gone(self, caller: Caller) -> None:
        """A connection was closed."""
        session: Session | None = caller.session
        if session is None:
            return
        caller.session = None
        shard = session.members.pop(caller)
        if not session.members:
            self._end(session)
        elif shard is not None:
            for number, reservation in list(session.reservations.items()):
                if shard in reservation.left:
                    self._abort_shards(session, number, reservation, [shard])

    def _end(self, session: Session) -> None:
        if self._shared.get(session.name) is session:
            del self._shared[session.name]
        for number, match in session.matches.items():
            self._let_go(number, match)
        for number, reservation in list(session.reservations.items()):
            self._abort_shards(session, number, reservation, list(reservation.left))
        session.matches.clear()

    # ---- who calls

    def _hello(self, caller: Caller, arguments: list[Argument]) -> Any:
        version = _number(arguments[1], "a protocol version")
        if version != PROTOCOL:
            raise _refused(
                f"LMTIERVERSION this server speaks {PROTOCOL}, you asked for {version}: "
                "install the same lmtier on both sides"
            )
        if caller.session is not None:
            raise _refused("MISUSE this connection said LMTIER.HELLO before")
        engine, name, shard = "", caller.name, None
        rest = list(map(_text, arguments[2:]))
        if len(rest) % 2:
            raise _refused("ERR LMTIER.HELLO takes pairs: ENGINE id, SHARD L0-32H0-4, NAME text")
        for option, value in zip(rest[::2], rest[1::2], strict=True):
            match option.upper():
                case "ENGINE":
                    engine = _name(value)
                case "SHARD":
                    shard = _shard(value)
                case "NAME":
                    name = _name(value)
                case _:
                    raise _refused(f"ERR unknown option {option[:32]!r}: ENGINE, SHARD and NAME are known")
        session = Session(engine, told_lost=self.cache.lost)
        if engine:
            session = self._shared.setdefault(engine, session)
        session.members[caller] = shard
        caller.session, caller.name, caller.kind = session, name, "engine"
        config = self.cache.config
        return {
            "version": __version__,
            "protocol": PROTOCOL,
            "run": self.run,
            "chunk_tokens": self.cache.chunk_tokens,
            "capacity": self.cache.slab.capacity,
            "verify": config.verify,
            "approximation": config.approximation,
            "load_deadline": config.load_deadline,
            "traces": self._tracing is not None,
            "options": "HAS TTL PRESENCE",  # of verbs that servers of this protocol had before without them
            "slab": caller.is_local and self.cache.slab.fd is not None,
        }

    def _slab(self, caller: Caller, arguments: list[Argument]) -> Any:
        fd = self.cache.slab.fd
        if not caller.is_local:
            raise _refused("ERR only a Unix socket hands out the slab: start the server with --unix PATH")
        if fd is None:
            raise _refused("ERR this server's slab is private memory: start it with --unix PATH")
        return WithDescriptor(self.cache.slab.capacity, fd)

    def _presence(self, caller: Caller, arguments: list[Argument]) -> Any:
        """What is surely not here. Nothing, if some tier must be asked each time."""
        presence = self.cache.presence
        return WithDescriptor(1, presence.fd) if caller.is_local and presence is not None else 0

    def _form(self, caller: Caller, arguments: list[Argument]) -> Any:
        session = _session(caller)
        if len(arguments) - 2 > MAX_SHARDS:
            raise _refused(f"ERR a form has at most {MAX_SHARDS} shards")
        form = form_of(Layout.from_json(bytes(arguments[1])), (_shard(_text(each)) for each in arguments[2:]))
        if form in session.forms:
            return session.forms.index(form)
        if len(session.forms) == MAX_FORMS:
            raise _refused(f"ERR a session has at most {MAX_FORMS} forms")
        session.forms.append(form)
        return len(session.forms) - 1

    # ---- load

    def _match(self, caller: Caller, arguments: list[Argument]) -> Any:
        began = time.time_ns() if self._tracing is not None else 0
        session = _session(caller)
        session.need_room(arguments[4:])
        deadline = _number(arguments[3], "a deadline in milliseconds", MAX_MS) / 1000
        match = self._look_up(caller, arguments[1], arguments[2], arguments[4:], deadline)
        number = next(self._ids)
        session.hold(number, match)
        if self._tracing is not None:
            self._tracing.matched(number, began, match, caller.name)
        return _described(number, match)

    def _missed(self, caller: Caller, arguments: list[Argument]) -> Any:
        """A lookup of which LMTIER.PRESENCE has said that it finds nothing: counted, and nothing is held."""
        self.cache.release(self._look_up(caller, arguments[1], arguments[2], arguments[3:]))
        return OK

    def _look_up(
        self,
        caller: Caller,
        form: Argument,
        tokens: Argument,
        keys: list[Argument],
        deadline: float | None = None,
    ) -> Match:
        session = _session(caller)
        match = self.cache.match(
            _keys(keys),
            _form_of(session, form),
            tokens=_number(tokens, "a number of tokens", MAX_TOKENS) or None,
            deadline=deadline,
            cost=session.cost,
        )
        match.asker = caller.name
        if self._log is not None:
            self._log.note(match.keys, match.asked_tokens)
        return match

    def _prefetch(self, caller: Caller, arguments: list[Argument]) -> Any:
        number, match = _held(caller, arguments[1])
        rest, has = arguments[2:], 0
        if len(rest) > 1 and _text(rest[-2]).upper() == "HAS":
            has = _number(rest[-1], "a number of tokens", MAX_TOKENS)
            del rest[-2:]
        if len(rest) > 1:
            raise _refused(
                "ERR LMTIER.PREFETCH takes a match, [how many chunks of it], [HAS tokens], no more"
            )
        chunks = _number(rest[0], "a number of chunks") if rest else None
        if self._tracing is not None:
            self._tracing.wanted(number, match)
        self.cache.prefetch(match, chunks, has=has)
        return self._described(number, match)

    def _cost(self, caller: Caller, arguments: list[Argument]) -> Any:
        """What computing takes this engine: fixed, token, position, copy. Decides for matches from now on."""
        session = _session(caller)
        try:
            cost = Cost(*(float(bytes(each)) for each in arguments[1:]))
        except ValueError:
            cost = Cost(-1.0, 0.0, 0.0, 0.0)
        if not cost.is_sane:
            raise _refused("ERR LMTIER.COST takes four numbers of seconds: fixed, token, position, copy")
        session.cost = cost
        return OK

    def _poll(self, caller: Caller, arguments: list[Argument]) -> Any:
        return self._described(*_held(caller, arguments[1]))

    def _wait(self, caller: Caller, arguments: list[Argument]) -> Any:
        number, match = _held(caller, arguments[1])
        if self._tracing is not None:
            self._tracing.wanted(number, match)
        if not match.asking:
            self.cache.prefetch(match)
        return self._described(number, match) if match.ready else self._waiting(number, match)

    def _waiting(self, number: int, match: Match) -> Waiting:
        """As Cache.wait; the owner steps meanwhile, and a step ends it at the match's deadline."""
        while match.asking:
            yield None
        if not match.released:
            self.cache.prefetch(match)
        while not match.ready and not match.released:
            yield None
        if match.released:
            return Error(f"NOSUCH match {number} was released meanwhile")
        return self._described(number, match)

    def _release(self, caller: Caller, arguments: list[Argument]) -> Any:
        session = _session(caller)
        for number in [_number(each, "a match") for each in arguments[1:]]:
            match = session.let_go(number)
            if match is not None:
                self._let_go(number, match)
        return OK

    def _let_go(self, number: int, match: Match) -> None:
        if self._tracing is not None:
            self._tracing.released(number, match)
        self.cache.release(match)

    def _described(self, number: int, match: Match) -> dict[str, Any]:
        if self._tracing is not None:
            self._tracing.told(number, match)
        return _described(number, match)

    def _trace(self, caller: Caller, arguments: list[Argument]) -> Any:
        """To which trace a match or a reservation belongs."""
        session, number = _session(caller), _number(arguments[1], "a match or a reservation")
        headers = [_text(each[:MAX_HEADER]) for each in arguments[2:4]]
        if self._tracing is not None and (number in session.matches or number in session.reservations):
            self._tracing.belongs(number, dict(zip(("traceparent", "tracestate"), headers, strict=False)))
        return OK

    def _seen(self, caller: Caller, arguments: list[Argument]) -> Any:
        self.cache.seen(_keys(arguments[1:]))
        return OK

    def _told(self, caller: Caller, arguments: list[Argument]) -> Any:
        _session(caller)
        origin, parent = Origin.from_json(bytes(arguments[1])), _keys(arguments[2:3])[-1:]
        tokens = b"".join(map(bytes, arguments[4:]))
        self.explain.prompts.tell(_keys(arguments[3:4]), tokens, origin, *parent)
        return OK

    def _explained(self, caller: Caller, arguments: list[Argument]) -> Any:
        words = [_text(each).upper() for each in arguments[1:]]
        tokens = bool(words) and words[-1] == "TOKENS"
        if len(words) - tokens > 1:
            raise _refused("ERR LMTIER.EXPLAIN takes [how many] [TOKENS]")
        most = _number(arguments[1], "a number of lookups", MAX_LOOKUPS) if len(words) > tokens else 20
        return json.dumps(self.explain.recent(most, tokens=tokens))

    # ---- save

    def _reserve(self, caller: Caller, arguments: list[Argument]) -> Any:
        session = _session(caller)
        if not caller.is_local:  # it would commit whatever lies in extents that it cannot see
            raise _refused(
                "MISUSE only engines on the Unix socket have the slab, and can fill what is reserved"
            )
        began = time.time_ns() if self._tracing is not None else 0
        _need_room(session.reservations, "reservations: commit or abort some")
        form = _form_of(session, arguments[1])
        first = _number(arguments[2], "a number of chunks")
        ttl, keys = _lifetime(arguments[3:])
        reservation = self.cache.reserve(
            keys, form, first=first, ttl=ttl, by=f"{caller.name} @{_HOST}", most=MAX_RESERVED
        )
        number = 0
        if reservation.entries:
            number = next(self._ids)
            session.reservations[number] = reservation
            if self._tracing is not None:
                self._tracing.reserved(number, began, caller.name)
        return {
            "id": number,
            "known": reservation.known,
            "dropped": reservation.dropped,
            "chunks": _ranges(reservation.entries),
            "pages": _pages(reservation.entries.values()),
        }

    def _commit(self, caller: Caller, arguments: list[Argument]) -> Any:
        session, number, reservation = _reserved(caller, arguments[1])
        pairs = arguments[3:]
        if len(pairs) % 2:
            raise _refused("ERR LMTIER.COMMIT takes marks in pairs: chunk hex")
        prints = {}
        for chunk, mark in zip(pairs[::2], pairs[1::2], strict=True):
            if len(mark) > 2 * MARK_ROOM:
                raise _refused(f"ERR a mark has at most {MARK_ROOM} bytes")
            prints[_number(chunk, "a chunk")] = _hex(mark)
        shard = _text(arguments[2])
        self.cache.commit(reservation, None if shard == "*" else _shard(shard), prints)
        if not reservation.left:
            self._finished(session, number, reservation)
        return OK

    def _finished(self, session: Session, number: int, reservation: Reservation) -> None:
        del session.reservations[number]
        if self._tracing is not None:
            self._tracing.stored(number, reservation)

    def _abort(self, caller: Caller, arguments: list[Argument]) -> Any:
        session, number, reservation = _reserved(caller, arguments[1])
        shard = _text(arguments[2])
        self._abort_shards(
            session, number, reservation, list(reservation.left) if shard == "*" else [_shard(shard)]
        )
        return OK

    def _abort_shards(
        self, session: Session, number: int, reservation: Reservation, shards: Sequence[Shard]
    ) -> None:
        for shard in shards:
            self.cache.abort(reservation, shard)
        if not reservation.left:
            self._finished(session, number, reservation)

    # ---- lifetimes

    def _bring(self, caller: Caller, arguments: list[Argument]) -> Any:
        session = _session(caller)
        session.need_room(arguments[3:])
        form = _form_of(session, arguments[1])
        deadline = _number(arguments[2], "a deadline in milliseconds", MAX_MS) / 1000
        match = self.cache.bring(_keys(arguments[3:]), form, deadline=deadline)
        if not match.asking:  # what is asked for first, whoever waits for it also wants
            self.cache.prefetch(match)
        number = next(self._ids)
        session.hold(number, match)
        return self._described(number, match)

    def _model(self, caller: Caller, arguments: list[Argument]) -> Any:
        """How an engine makes its keys, and its form: for people who have tokens."""
        form = _form_of(_session(caller), arguments[1])
        identity, lora = _identity(arguments[2]), _text(b"".join(arguments[3:])[:_MAX_IDENTITY])
        self.models[identity, lora] = form
        for model in (identity, lora), (identity, ""):  # without an adapter: younger than all with one
            if model in self.models:
                self.models.move_to_end(model)
        if len(self.models) > MAX_MODELS:
            self.models.popitem(last=False)
        return OK

    def _models(self, caller: Caller, arguments: list[Argument]) -> Any:
        return json.dumps(
            [
                # in hexadecimal, because the names of adapters are not always printable
                {"identity": asdict(identity), "lora": lora.encode().hex(), "form": _form_text(form)}
                for (identity, lora), form in self.models.items()
            ]
        )

    def _pin(self, caller: Caller, arguments: list[Argument]) -> Any:
        ttl, keys = _lifetime(arguments[2:])
        return self.cache.pin(_name(_text(arguments[1])), keys, ttl)

    def _unpin(self, caller: Caller, arguments: list[Argument]) -> Any:
        return int(self.cache.unpin(_text(arguments[1])))

    def _pins(self, caller: Caller, arguments: list[Argument]) -> Any:
        return json.dumps([pin._asdict() for pin in self.cache.pinned()])

    # ---- the whole cache

    def _changes(self, caller: Caller, arguments: list[Argument]) -> Any:
        """[where to go on, was anything lost, then tier, 1 came or 0 left, keys, of each run of changes]."""
        journal = self.cache.follow()
        position = _number(arguments[1], "a position") if len(arguments) > 1 else journal.end
        changes = journal.since(position, MAX_CHANGES)
        if changes is None:
            return [journal.end, 1]
        reply: list[Any] = [position + len(changes), 0]
        for (tier, came), run in groupby(changes, key=lambda change: change[:2]):
            reply += [tier.encode(), int(came), b"".join(change.key for change in run)]
        return reply

    def _discard(self, caller: Caller, arguments: list[Argument]) -> Any:
        forms = caller.session.forms if caller.session is not None else ()
        return self._discarding(_keys(arguments[1:]), tuple(forms))

    def _discarding(self, keys: list[bytes], forms: Sequence[Form]) -> Waiting:
        for key in keys:
            entry = self.cache.index.get(key)
            if entry is not None:
                self.cache.discard(entry)
            for below in self.cache.below if entry is None else ():
                if below.index is None:  # it says nothing of what it holds, so not in which form either
                    for form in forms:
                        below.discard(key, form)
                elif (held := below.index.get(key)) is not None:
                    below.discard(key, held.form)
            yield PAUSE
        return OK

    def _clear(self, caller: Caller, arguments: list[Argument]) -> Any:
        words = [_text(each) for each in arguments[1:]]
        until = None
        if len(words) > 1 and words[-2].upper() == "WAIT":
            until = time.monotonic() + _number(arguments[-1], "a timeout in milliseconds", MAX_MS) / 1000
            del words[-2:]
        force = bool(words) and words[-1].upper() == "FORCE"
        words = words[:-1] if force else words
        by, since = _option(words, "STOREDBY"), _option(words, "SINCE")
        match words:
            case []:
                prefix = b""
            case [option, model] if option.upper() == "NAMESPACE":
                prefix = namespace(model)
            case [option, digits] if option.upper() == "PREFIX" and len(digits) <= 2 * KEY_BYTES:
                prefix = _hex(digits.encode())
            case _:
                raise _refused(
                    "ERR LMTIER.CLEAR takes [NAMESPACE model | PREFIX hex] [STOREDBY pattern] [SINCE ms] "
                    "[FORCE] [WAIT ms]"
                )
        if not self.cache.is_warm:
            raise _refused("LOADING what the tiers hold is not known yet, so it cannot be cleared")
        if full := [each.label for each in self.cache.below if each.uncleared >= MAX_CLEARINGS]:
            raise _refused(f"TRYAGAIN {full[0]} has {MAX_CLEARINGS} models to clear, and does not come to it")
        if by or since:
            moment = _number(since.encode(), "a time in milliseconds", 1 << 53) if since else 0
            self.cache.purge(Suspect(prefix, by or "*", moment), force=force)
            return OK if until is None else self._cleared(until)
        return self._clearing(prefix, force, until)

    def _clearing(self, prefix: bytes, force: bool, until: float | None) -> Waiting:
        for _ in self.cache.clearing(prefix, force=force):
            yield PAUSE
        return OK if until is None else (yield from self._cleared(until))

    def _cleared(self, until: float) -> Waiting:
        """Until all is gone, or it cannot be: a tier that fails is not waited for."""
        tiers = self.cache.below
        while (
            any(not (each.is_clear or each.clearing.is_open) for each in tiers) and time.monotonic() < until
        ):
            yield None
        left = [f"{each.label} {each.why_uncleared}".strip() for each in tiers if not each.is_clear]
        if not left:
            return OK
        return Error(f"TRYAGAIN it is still there, to be deleted, and not used meanwhile: {', '.join(left)}")

    def _flush(self, caller: Caller, arguments: list[Argument]) -> Any:
        until = time.monotonic() + _number(arguments[1], "a timeout in milliseconds", MAX_MS) / 1000
        self.cache.step()
        return self._flushing(until, caller.session or Session("", told_lost=self.cache.lost))

    def _flushing(self, until: float, session: Session) -> Waiting:
        below = self.cache.below
        while any(each.is_busy for each in below) and time.monotonic() < until:
            yield None
        told, session.told_lost = session.told_lost, self.cache.lost
        return int(session.told_lost == told and not any(each.backlog for each in below))

    def _verified(self, caller: Caller, arguments: list[Argument]) -> Any:
        compared, failed = (_number(each, "a number of chunks", 1 << 32) for each in arguments[1:])
        self.cache.metrics.verified.inc(compared)
        self.cache.metrics.verify_failures.inc(failed)
        return OK

    def _stats(self, caller: Caller, arguments: list[Argument]) -> Any:
        return self.cache.stats()

    def _check(self, caller: Caller, arguments: list[Argument]) -> Any:
        try:
            self.cache.check()
        except AssertionError as error:
            return Error(f"ERR the cache's books do not agree: {error}")
        return OK


def _answering(handler: Handler) -> Handler:
    """A wrong use is answered, and has changed nothing."""

    def answer(caller: Caller, arguments: list[Argument]) -> Any:
        try:
            return handler(caller, arguments)
        except Refused as refused:
            return refused.error
        except MisuseError as error:
            return Error(f"MISUSE {error}")
        except LayoutError as error:
            return Error(f"ERR {error}")

    return answer


def _refused(text: str) -> Refused:
    return Refused(Error(text))


def _lifetime(arguments: list[Argument]) -> tuple[float | None, list[bytes]]:
    """[TTL milliseconds] keys…"""
    if len(arguments[0]) == 3 and bytes(arguments[0]).upper() == b"TTL":
        milliseconds = _number(arguments[1], "a time in milliseconds") if len(arguments) > 1 else 0
        return milliseconds / 1000, _keys(arguments[2:])
    return None, _keys(arguments)


# ---- what a session has


def _session(caller: Caller) -> Session:
    session: Session | None = caller.session
    if session is None:
        raise _refused(f"NOSESSION say LMTIER.HELLO {PROTOCOL} first")
    return session


def _form_of(session: Session, argument: Argument) -> Form:
    number = _number(argument, "a form")
    if number >= len(session.forms):
        raise _refused(f"NOSUCH form {number}: LMTIER.FORM gives the number of one")
    return session.forms[number]


def _held(caller: Caller, argument: Argument) -> tuple[int, Match]:
    number = _number(argument, "a match")
    match = _session(caller).matches.get(number)
    if match is None:
        raise _refused(f"NOSUCH match {number}: it was released, or belongs to another engine")
    return number, match


def _reserved(caller: Caller, argument: Argument) -> tuple[Session, int, Reservation]:
    session, number = _session(caller), _number(argument, "a reservation")
    reservation = session.reservations.get(number)
    if reservation is None:
        raise _refused(f"NOSUCH reservation {number}: it is finished, or belongs to another engine")
    return session, number, reservation


def _need_room(held: dict[int, Any], what: str) -> None:
    if len(held) >= MAX_HELD:
        raise _refused(f"ERR this session has {MAX_HELD} {what}")


# ---- arguments


def _identity(argument: Argument) -> Identity:
    try:
        if len(argument) > _MAX_IDENTITY:
            raise TypeError
        found = json.loads(bytes(argument))
        if any(type(value) is not _IDENTITY[name] for name, value in found.items()):
            raise TypeError
        return Identity(**found)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise _refused("ERR an identity is JSON: an object of the fields of lmtier.keys.Identity") from None


def _number(argument: Argument, what: str, most: int = (1 << 63) - 1) -> int:
    digits = bytes(argument)
    if not _DIGITS.fullmatch(digits):
        raise _refused(f"ERR {_shown(argument)} is not {what}: digits only")
    number = int(digits)
    if number > most:
        raise _refused(f"ERR {number} is more than {most}, the most for {what}")
    return number


def _text(argument: Argument) -> str:
    try:
        return bytes(argument).decode()
    except UnicodeDecodeError:
        raise _refused(f"ERR {_shown(argument)} is not UTF-8") from None


def _option(words: list[str], name: str) -> str:
    """The value of an option, which is taken out; empty if it is not there."""
    for at, word in enumerate(words[:-1]):
        if word.upper() == name:
            value = words[at + 1]
            del words[at : at + 2]
            return value
    return ""


def _name(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= MAX_NAME:
        raise _refused(f"ERR a name has 1 to {MAX_NAME} printable characters")
    return text


def _shard(text: str) -> Shard:
    shard = Shard.parse(text)
    if shard is None:
        raise _refused(f"ERR {text[:40]!r} is not a shard: write it like L0-32H0-4")
    return shard


def _hex(argument: Argument) -> bytes:
    try:
        return bytes.fromhex(_text(argument))
    except ValueError:
        raise _refused(f"ERR {_shown(argument)} is not hexadecimal") from None


def _keys(arguments: Sequence[Argument]) -> list[bytes]:
    """Keys, many concatenated or one in hexadecimal an argument. No key twice: chains have no circles."""
    parts = [each if len(each) != 64 or not _HEX_KEY.fullmatch(each) else _hex(each) for each in arguments]
    nbytes = sum(map(len, parts))
    if nbytes > MAX_KEYS * KEY_BYTES:
        raise _refused(f"ERR {nbytes // KEY_BYTES} keys: at most {MAX_KEYS} in one request")
    for part in parts:
        if len(part) % KEY_BYTES:
            raise _refused(f"ERR keys have {KEY_BYTES} bytes, or {2 * KEY_BYTES} hex digits; got {len(part)}")
    data = b"".join(parts)
    keys = [key for (key,) in _KEY.iter_unpack(data)]
    if len(set(keys)) != len(keys):
        raise _refused("MISUSE a key stands twice in one request")
    if VALUES in data and any(map(is_value, keys)):
        raise _refused("MISUSE a key of a named value: engines keep KV, SET keeps values")
    return keys


def _shown(argument: Argument) -> str:
    return repr(bytes(argument[:32]))[1:]


# ---- replies


def _described(number: int, match: Match) -> dict[str, Any]:
    """A match in few fields that are cheap to write and to read: the numbers of 512 chunks are one text."""
    run, form = match.run, match.form
    reply: dict[str, Any] = {
        "id": number,
        "state": "asking" if match.asking else "ready" if match.ready else "found",
        "sources": " ".join(f"{source}*{length}" for source, length in _runs(match.sources)),
        "pages": _pages(run),
    }
    if match.waiting:
        loading = [n for n, entry in enumerate(run) if entry.state is State.LOADING]
        reply["loading"] = _ranges(loading)
    if any(entry.form is not form for entry in run):
        forms = {form: 0}
        numbers = [forms.setdefault(entry.form, len(forms)) for entry in run]
        reply["forms"] = " ".join(f"{number}*{length}" for number, length in _runs(numbers))
        reply["other_forms"] = [_form_text(each) for each in list(forms)[1:]]
    marks = [
        f"{n}:{shard}:{mark.hex()}"
        for n, entry in enumerate(run)
        if entry.prints  # few have any
        for shard, mark in enumerate(entry.prints)
        if mark
    ]
    if marks:
        reply["marks"] = " ".join(marks)
    if match.cut:
        reply["cut"] = match.cut
    return reply


def _pages(entries: Iterable[Entry]) -> str:
    return repr([offset // PAGE for entry in entries for offset in entry.offsets])


def _form_text(form: Form) -> list[str]:
    """A chunk on its way has no layout yet, if only its file's name is known: then its sizes say it all."""
    layout = form.layout.to_json().decode() if form.layout is not None else ""
    return [layout, *(f"{shard}:{size}" for shard, size in zip(form.shards, form.sizes, strict=True))]


def _runs(values: list[Any]) -> Iterable[tuple[Any, int]]:
    if values and values.count(values[0]) == len(values):  # the rule, at a tenth of the cost
        return [(values[0], len(values))]
    return ((value, sum(1 for _ in same)) for value, same in groupby(values))


def _ranges(numbers: Iterable[int]) -> str:
    """`0-5 7 9`, of ascending numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return " ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in ranges)
