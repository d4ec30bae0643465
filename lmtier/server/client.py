"""The typed client: the calls of an in-process `Cache`, on a server's slab.

A server that is down, dies, stalls or restarts costs hits and nothing else: calls find nothing and store
nothing until it is back. What makes that safe:

    bytes     a match stays readable after its server died: the mapping keeps the memory, nobody writes it
    leases    a socket is not closed while anything is held by it: the server would end what it stands for
    stalls    a reply that comes too late is still read, and what it granted is given back
    restarts  offsets of one slab never meet the mapping of another: while anything is held from the old
              server there is no new connection, and ids of one run of a server name nothing in the next

One owner calls it, as with a `Cache`.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, repeat
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from lmtier import forks
from lmtier.cache import CPU, Match, Reservation
from lmtier.config import Config
from lmtier.errors import ConfigError, LMTierError, MisuseError, TierError
from lmtier.index import Entry, State
from lmtier.journal import Change
from lmtier.keys import KEY_BYTES, Identity, as_tokens
from lmtier.layout import PAGE, Form, Layout, Shard, form_of
from lmtier.lifetimes import MAX_TTL, Pinned
from lmtier.presence import Look
from lmtier.prompts import Origin
from lmtier.server.engines import MAX_MODELS, MAX_MS, PROTOCOL, RUN_SHIFT
from lmtier.server.resp import INCOMPLETE, Error, ProtocolError, Replies, command
from lmtier.slab import Memory
from lmtier.worth import Cost

log = logging.getLogger("lmtier")

_AGAIN = 1.0  # seconds between attempts to reach a server
_OWED = 64  # replies that nobody waits for, until they are read
_NEWS = 0.05  # by which a cost has changed that is told again
_KEYS_AN_ARGUMENT = 16_384
_TOKENS_AN_ARGUMENT = 131_072
_LOST = "tier_down"

T = TypeVar("T")
Then: TypeAlias = "Callable[[Any], None]"
Argument: TypeAlias = "bytes | str | int"


def _ignore(reply: Any) -> None:
    """Nobody waits for it."""


@dataclass(slots=True)
class Tally:
    """A count, and how much of it the server was told."""

    value: int = 0
    told: int = 0

    def inc(self, amount: float = 1) -> None:
        self.value += int(amount)

    def news(self) -> int:
        more, self.told = self.value - self.told, self.value
        return more


@dataclass(slots=True)
class Comparisons:
    """The server counts these for all of its engines."""

    verified: Tally = field(default_factory=Tally)
    verify_failures: Tally = field(default_factory=Tally)


class Window:
    """A server's slab as this process sees it. Its memory lives as long as a view of it."""

    def __init__(self, capacity: int, fd: int) -> None:
        self.capacity = capacity
        self._view = Memory(capacity, fd).view

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._view[offset : offset + nbytes]


class Client:
    """`Cache`, for another process. Only the constructor raises TierError, if there is no server.

    `engine` names the session that the ranks and the scheduler of one engine share; left empty, it is this
    connection's own. `shard` is what ends with this process: should it die, others need not wait for that.
    `waits`: what was committed is visible to all when `commit` returns, not some moments later.
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
        self.address = address
        self.timeout = timeout
        self.lost = 0
        """Connections that ended without our doing."""
        self.unserved = 0
        """Calls that found nothing because no server answered."""
        self.metrics = Comparisons()
        options = {"ENGINE": engine, "SHARD": str(shard or ""), "NAME": name}
        self._hello = [word for pair in options.items() if pair[1] for word in pair]
        self._token = token
        self._waits = waits
        self._is_closed = False
        self._outage = ""
        self._try_after = 0.0
        self._matches: dict[int, Match] = {}
        self._reservations: dict[int, Reservation] = {}
        self._models: dict[Form, dict[str, str]] = {}
        """Of forms that were declared: adapter -> the identity, as JSON."""
        self._read_to: tuple[int, int] | None = None
        """Up to where `changes` were read: the server's run, and the position."""
        try:
            self._link = _Link(address, token, self._hello, timeout)
        except (OSError, ProtocolError) as error:
            raise TierError(f"no lmtier server at {address}: {_said(error)}") from None
        self.slab = self._link.window
        self.config = self._link.config
        self.chunk_tokens = self.config.chunk_tokens
        self.approximation = self._link.approximation
        forks.tell(self)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "no server" if self._outage else "connected"
        held = f"{len(self._matches)} matches, {len(self._reservations)} reservations"
        return f"<Client of {self.address}, {state}, {held}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def run(self) -> int:
        """Which run of the server `slab` belongs to. Offsets mean nothing to a process that sees another."""
        return self._link.run

    @property
    def traffic(self) -> int:
        """Bytes on this connection, both ways: who has what, and never a byte of it."""
        return self._link.traffic

    # ---- load

    def match(
        self,
        keys: Sequence[bytes],
        form: Form,
        *,
        tokens: int | None = None,
        deadline: float | None = None,
    ) -> Match:
        """As Cache.match; empty if no server answers."""
        names = tuple(keys)
        whole = len(names) * self.chunk_tokens
        asked = whole if tokens is None else tokens
        if asked < whole:
            raise MisuseError(f"tokens={asked} is less than the {whole} that these keys stand for")
        seconds = self.config.load_deadline if deadline is None else deadline
        match = Match(0, names, form, asked, time.monotonic() + seconds)
        link, number = self._told_of(form)
        if link is not None:
            milliseconds = int(1000 * min(max(0.0, seconds), MAX_MS / 1000))
            # A server that traces is asked: only by its answer does a lookup get into its request's trace.
            if names and not link.traces and link.look is not None and link.look.lacks(names[0]):
                if len(set(names)) < len(names):
                    raise MisuseError("a key stands twice in one request")
                self._post("LMTIER.MISSED", number, asked, *arguments(names))  # for the books: nobody waits
                return match
            request: list[Argument] = ["LMTIER.MATCH", number, asked, milliseconds, *arguments(names)]
            entries: list[Entry] = []
            reply = self._call(
                *request,
                link=link,
                undo=self._unmatch,
                meanwhile=lambda: entries.extend(
                    _entries(names, form)
                ),  # as for a hit, while the server looks
            )
            if self._fill(match, reply, entries):
                self._matches[match.id] = match
        return match

    def costs(self, cost: Cost) -> None:
        """What computing takes this engine: decides for its matches from now on. Never waits or connects."""
        link = self._link
        if link.is_lost or link.stalled:  # an engine's step is no time to connect in
            return
        old = link.cost or Cost(0.0, 0.0, 0.0, 0.0)
        if any(abs(new - told) > _NEWS * told for new, told in zip(cost, old, strict=True)):
            link.cost = cost
            self._post("LMTIER.COST", *map(repr, cost))

    def prefetch(self, match: Match, chunks: int | None = None, *, has: int = 0) -> None:
        """As Cache.prefetch."""
        if match.released:
            raise MisuseError("prefetch of a match that was released")
        if match.id and (not match.ready or (chunks is not None and chunks < match.chunks)):
            limit = () if chunks is None else (chunks,)
            has_some: tuple[Argument, ...] = ("HAS", has) if has and "HAS" in self._link.options else ()
            reply = self._call_for(match, "LMTIER.PREFETCH", match.id, *limit, *has_some)
            if not self._fill(match, reply):
                _cut(match, *limit)

    def wait(self, match: Match) -> Match:
        """As Cache.wait: until the match is ready, or its deadline has passed."""
        if match.released:
            raise MisuseError("wait for a match that was released")
        if not match.ready:
            left = max(0.0, match.deadline - time.monotonic())
            if not self._fill(match, self._call_for(match, "LMTIER.WAIT", match.id, seconds=left)):
                _cut(match)
        return match

    def step(self) -> int:
        """Learn what became of matches that are not ready. The number of those that changed."""
        link = self._reach()
        unready = [match for match in self._matches.values() if not match.ready]
        before = [_outline(match) for match in unready]
        replies: list[Any] = []
        try:
            if link is not None:
                self._tell(link)
                for match in unready:
                    link.post(replies.append, "LMTIER.POLL", match.id)
                link.drain(self.timeout if unready else 0.0)
        except TimeoutError:
            if unready:
                self._stalled(link)
        except (OSError, ProtocolError) as error:
            self._lose(link, error)
        for match, reply in zip(unready, chain(replies, repeat(None)), strict=False):
            if not self._fill(match, reply):
                _cut(match)
        return sum(old != _outline(match) for old, match in zip(before, unready, strict=True))

    def release(self, match: Match) -> None:
        """End the match's leases. Idempotent; does not wait for the server."""
        if match.released:
            return
        match.released = True
        match.run = []
        if self._matches.pop(match.id, None) is not None:
            self._post("LMTIER.RELEASE", match.id)

    def seen(self, keys: Sequence[bytes]) -> None:
        """As Cache.seen; does not wait for the server."""
        if self._reach() is not None:
            self._post("LMTIER.SEEN", *arguments(keys))

    def tell(self, keys: Sequence[bytes], tokens: Any, origin: Origin, parent: bytes = b"") -> None:
        """What the tokens of these chunks are, and the chunk before them; does not wait for the server.

        Nothing needs it but `lmtier explain` and KV events; who wants neither keeps them to himself.
        """
        step = max(1, _TOKENS_AN_ARGUMENT // self.chunk_tokens)  # chunks in one command
        ids, size = as_tokens(tokens), self.chunk_tokens
        for at in range(0, len(keys), step):
            some = keys[at : at + step]
            words = ids[at * size : (at + step) * size].tobytes()
            self._post("LMTIER.TELL", origin.to_json(), parent, b"".join(some), words)
            parent = some[-1]

    def trace(self, thing: Match | Reservation, headers: Mapping[str, str] | None) -> None:
        """To which trace it belongs, by the request's W3C headers, if the server traces; does not wait."""
        if not headers or not self._link.traces or "traceparent" not in headers:
            return
        if thing.id in self._matches or thing.id in self._reservations:
            parts = [headers[name] for name in ("traceparent", "tracestate") if name in headers]
            self._post("LMTIER.TRACE", thing.id, *parts)

    # ---- save

    def reserve(
        self, keys: Sequence[bytes], form: Form, *, first: int = 0, ttl: float | None = None
    ) -> Reservation:
        """As Cache.reserve; everything is dropped if no server answers."""
        return self.reserved(self.ask_to_reserve(keys, form, first=first, ttl=ttl))

    def ask_to_reserve(
        self, keys: Sequence[bytes], form: Form, *, first: int = 0, ttl: float | None = None
    ) -> Asked:
        """`reserve`, as far as it goes without waiting. `reserved` or `withdraw` must follow."""
        if form.layout is None or form.layout.chunk_tokens != self.chunk_tokens:
            raise MisuseError("reserve needs a form with a layout of this cache's chunk_tokens")
        asked = Asked(list(keys), form, first)
        lifetime = _lifetime(ttl)
        link, number = self._told_of(form)
        if link is not None and (not lifetime or self._can_end(link)):
            asked.link, asked.answer = link, _Answer(self._unreserve)
            request: list[Argument] = [number, first, *lifetime, *arguments(asked.keys)]
            self._post("LMTIER.RESERVE", *request, then=asked.answer)
        return asked

    def reserved(self, asked: Asked) -> Reservation:
        """What `reserve` returns. Everything is dropped, too, if the server is not that which was asked."""
        reply = reservation = None
        if asked.link is not None and asked.answer is not None:
            reply = self._hear(asked.link, asked.answer, "LMTIER.RESERVE")
        if reply is not None:
            reservation = self._understood(lambda: _reservation(_fields(reply), asked.keys, asked.form))
        if reservation is None:
            known = min(asked.first, len(asked.keys))
            return Reservation(0, asked.form, {}, known, len(asked.keys) - known, set())
        if reservation.entries:
            self._reservations[reservation.id] = reservation
        return reservation

    def withdraw(self, asked: Asked) -> None:
        """Nobody wants it any more; does not wait for the server."""
        if asked.link is self._link and asked.answer is not None:
            asked.answer.give_up()

    def _can_end(self, link: _Link) -> bool:
        """What was asked to end is rather not stored than stored for ever."""
        if "TTL" not in link.options and not link.is_told_off:
            link.is_told_off = True
            log.warning(
                "lmtier: the server at %s is older and knows no TTL: what has one is not stored", self.address
            )
        return "TTL" in link.options

    def commit(
        self,
        reservation: Reservation,
        shard: Shard | None = None,
        prints: Mapping[int, bytes] | None = None,
    ) -> None:
        """As Cache.commit. With no server, nothing becomes visible."""
        if reservation.entries:
            done = self._finish(reservation, shard)
            marks = [word for chunk, mark in (prints or {}).items() for word in (chunk, mark.hex())]
            self._end(reservation, "LMTIER.COMMIT", reservation.id, str(done), *marks)

    def abort(self, reservation: Reservation, shard: Shard | None = None) -> None:
        """As Cache.abort."""
        if reservation.entries:
            done = self._finish(reservation, shard)
            reservation.aborted = True
            self._end(reservation, "LMTIER.ABORT", reservation.id, str(done))

    def _finish(self, reservation: Reservation, shard: Shard | None) -> Shard:
        if shard is None:
            if len(reservation.form.shards) != 1:
                raise MisuseError(
                    f"this reservation has {len(reservation.form.shards)} shards: say which one is done"
                )
            shard = reservation.form.shards[0]
        if shard not in reservation.left:
            raise MisuseError(f"shard {shard} was committed or aborted before, or is not of this reservation")
        if reservation.id not in self._reservations:
            raise MisuseError(
                f"{reservation!r} was made by another process: adopt it before its extents are used"
            )
        reservation.left.remove(shard)
        return shard

    def _end(self, reservation: Reservation, *request: Argument) -> None:
        try:
            if self._link.stalled or not self._waits:
                self._post(*request, then=self._ended)  # the bytes are in place: it counts when it is read
            elif not self._link.is_lost:
                self._call(*request)
        finally:
            if not reservation.left:  # not before: while it is held, no other connection gets this call
                del self._reservations[reservation.id]

    # ---- what other processes of this engine began

    def adopt(self, thing: Match | Reservation) -> bool:
        """Use what another process of this session holds. False: keep away, its slab is not seen here.

        What is released is released for all of them; `disown` it instead if others still use it.
        """
        if self._reach() is None or thing.id >> RUN_SHIFT != self._link.run:
            return False
        if isinstance(thing, Match):
            self._matches[thing.id] = thing
        else:
            self._reservations[thing.id] = thing
        return True

    def disown(self, thing: Match | Reservation) -> None:
        """Others finish it; this process does not touch its extents any more. Nothing ends by this."""
        self._matches.pop(thing.id, None)
        self._reservations.pop(thing.id, None)

    # ---- lifetimes

    def bring(self, keys: Sequence[bytes], form: Form, *, deadline: float) -> Match:
        """As Cache.bring, prefetched."""
        match = Match(0, tuple(keys), form, 0, time.monotonic() + deadline)
        link, number = self._told_of(form)
        if link is not None:
            milliseconds = int(1000 * min(max(0.0, deadline), MAX_MS / 1000))
            request: list[Argument] = [number, milliseconds, *arguments(match.keys)]
            if self._fill(match, self._call("LMTIER.BRING", *request, link=link, undo=self._unmatch)):
                self._matches[match.id] = match
        return match

    def pin(self, name: str, keys: Sequence[bytes], ttl: float | None = None) -> dict[str, int]:
        """As Cache.pin; the pin outlives this client, not the server. Empty if no server answers."""
        reply = self._call("LMTIER.PIN", name, *_lifetime(ttl), *arguments(keys))
        return (self._understood(lambda: _fields(reply)) if reply is not None else None) or {}

    def unpin(self, name: str) -> bool:
        """As Cache.unpin."""
        return bool(self._call("LMTIER.UNPIN", name) == 1)

    def pinned(self) -> list[Pinned]:
        """As Cache.pinned. Empty if no server answers."""
        reply = self._call("LMTIER.PINS")
        if reply is None:
            return []
        return self._understood(lambda: [Pinned(**each) for each in json.loads(reply)]) or []

    def declare(self, identity: Identity, form: Form, lora: str = "") -> None:
        """How this engine makes its keys, so that people can name prompts by their tokens.

        The server is told again whenever it is another one.
        """
        told = json.dumps(asdict(identity))
        models = self._models.setdefault(form, {})
        if not lora:  # adapters of what was there before are no more
            models = self._models[form] = {name: each for name, each in models.items() if each == told}
        models.pop(lora, None)
        models[lora] = told
        if "" in models:
            models[""] = models.pop("")  # the last to be dropped
        if len(models) > MAX_MODELS:
            del models[next(iter(models))]
        link = self._reach()
        if link is not None and form in link.forms:
            self._post("LMTIER.MODEL", link.forms[form], told, lora)
        elif link is not None:
            self._told_of(form)

    # ---- the whole cache

    def discard(self, entry: Entry) -> None:
        self.delete([entry.key])

    def delete(self, keys: Sequence[bytes]) -> None:
        """These chunks, in every tier."""
        self._call("LMTIER.DISCARD", *keys)

    def flush(self, timeout: float = 30.0) -> bool:
        """As Cache.flush. False if no server answers."""
        milliseconds = int(1000 * min(max(0.0, timeout), MAX_MS / 1000))
        return bool(self._call("LMTIER.FLUSH", milliseconds, seconds=timeout) == 1)

    def clear(self, namespace: bytes = b"", *, force: bool = False) -> None:
        prefix = ("PREFIX", namespace.hex()) if namespace else ()
        self._call("LMTIER.CLEAR", *prefix, *(("FORCE",) if force else ()))

    def changes(self) -> list[Change] | None:
        """What came and went on the server since the last call; the first starts it.

        None: some of it is not known, so whatever was there may be gone.
        """
        link, before = self._reach(), self._read_to
        if link is None:
            return []
        is_new = before is None or before[0] != link.run
        position = () if before is None or is_new else (before[1],)
        reply = self._call("LMTIER.CHANGES", *position, link=link)
        found = self._understood(lambda: _changes(reply)) if isinstance(reply, list) else None
        if found is None:
            return []
        end, is_lost, changes = found
        self._read_to = link.run, end
        return None if is_lost or (is_new and before is not None) else changes

    def stats(self) -> dict[str, dict[str, int]]:
        """As Cache.stats. Empty if no server answers."""
        reply = self._call("LMTIER.STATS")
        if reply is None:
            return {}
        return self._understood(lambda: {tier: _fields(each) for tier, each in _fields(reply).items()}) or {}

    def check(self) -> None:
        """As Cache.check: AssertionError if the server's books do not agree."""
        reply = self._call("LMTIER.CHECK", errors=True)
        if isinstance(reply, Error):
            raise AssertionError(reply)

    def close(self) -> None:
        """The server ends what this session's last connection held. Idempotent."""
        self._is_closed = True
        self._matches.clear()
        self._reservations.clear()
        self._link.close()

    # ---- the connection

    def _reach(self) -> _Link | None:
        """The connection, if it can be used now; made again if it was lost and nothing is held by it."""
        if self._is_closed:
            raise MisuseError("this client is closed")
        link = self._link
        if not link.is_lost:
            try:
                link.glance()
                if link.stalled:
                    link.drain(0.0)
                    link.stalled = False
                    self._back()
                return link
            except TimeoutError:
                self.unserved += 1
                return None
            except (OSError, ProtocolError) as error:
                self._lose(link, error)
        is_held = self._matches or self._reservations
        if not is_held and time.monotonic() >= self._try_after and self._connect():
            return self._link
        self.unserved += 1
        return None

    def _connect(self) -> bool:
        self._link.close()
        try:
            link = _Link(self.address, self._token, self._hello, self.timeout)
        except (OSError, ProtocolError, TierError) as error:
            self._down(_said(error), is_news=isinstance(error, TierError))
            return False
        finally:
            self._try_after = time.monotonic() + _AGAIN  # from now: the attempt may have taken its timeout
        for name, now in (("chunk_tokens", link.config.chunk_tokens), ("approximation", link.approximation)):
            if now != (mine := getattr(self, name)):  # the keys that are known here are not those there
                link.close()
                self._down(f"it came back with {name}={now}, not {mine}", is_news=True)
                return False
        self._link, self.slab, self.config = link, link.window, link.config
        self._back()
        return True

    def forked(self) -> None:
        """A child has its own connection and holds nothing of its parent's."""
        self._matches.clear()
        self._reservations.clear()
        self._link.close()
        self._link.stalled = False
        self._try_after = 0.0

    def _call(
        self,
        *request: Argument,
        link: _Link | None = None,
        undo: Then = _ignore,
        meanwhile: Callable[[], None] | None = None,
        seconds: float = 0.0,
        errors: bool = False,
    ) -> Any:
        """The reply; None: no server, or one that refuses. `seconds` beyond the timeout is for its work."""
        link = link or self._reach()
        if link is None:
            return None
        answer = _Answer(undo)
        self._post(*request, then=answer)
        if meanwhile is not None:
            meanwhile()
        return self._hear(link, answer, request[0], seconds, errors)

    def _hear(
        self, link: _Link, answer: _Answer, verb: Argument, seconds: float = 0.0, errors: bool = False
    ) -> Any:
        """As `_call`, of a request that was posted."""
        try:
            link.hear(answer, self.timeout + seconds)
        except TimeoutError:
            self._stalled(link)
            return None
        except (OSError, ProtocolError) as error:
            self.unserved += 1
            self._lose(link, error)
            return None
        reply = answer.value
        if not isinstance(reply, Error) or errors:
            return reply
        code, _, sentence = reply.partition(" ")
        if code == "MISUSE":
            raise MisuseError(sentence)
        log.warning("lmtier: the server at %s refused %s: %s", self.address, verb, reply)
        return None

    def _ended(self, reply: Any) -> None:
        if isinstance(reply, Error):
            log.warning("lmtier: the server at %s refused the end of a save: %s", self.address, reply)

    def _call_for(self, match: Match, *request: Argument, seconds: float = 0.0) -> Any:
        """A call about a match, which only its own server knows."""
        return self._call(*request, seconds=seconds) if match.id in self._matches else None

    def _post(self, *request: Argument, then: Then = _ignore) -> None:
        """Send without waiting for the reply."""
        link = self._link
        if link.is_lost:
            return
        try:
            self._tell(link)
            link.post(then, *request)
            if len(link.owed) > _OWED and not link.stalled:
                link.drain(0.0)
        except TimeoutError:
            pass
        except (OSError, ProtocolError) as error:
            self._lose(link, error)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is posted meanwhile is sent in one go: each send may have to wake the server."""
        link = self._link
        link.holds = True
        try:
            yield
        finally:
            link.holds = False
            try:
                if not link.is_lost:
                    link.push()
            except OSError as error:
                self._lose(link, error)

    def _tell(self, link: _Link) -> None:
        compared, failed = self.metrics.verified.news(), self.metrics.verify_failures.news()
        if compared or failed:
            link.post(_ignore, "LMTIER.VERIFIED", compared, failed)

    def _told_of(self, form: Form) -> tuple[_Link | None, int]:
        """A connection whose server knows the form, and its number there; it means nothing on another."""
        if form.layout is None:
            raise MisuseError("a form without a layout means nothing to another process")
        link = self._reach()
        if link is not None and form not in link.forms:
            reply = self._call("LMTIER.FORM", form.layout.to_json(), *map(str, form.shards), link=link)
            if not isinstance(reply, int):
                return None, 0
            link.forms[form] = reply
            for lora, identity in self._models.get(form, {}).items():
                self._post("LMTIER.MODEL", reply, identity, lora)
        return (link, link.forms[form]) if link is not None else (None, 0)

    def _fill(self, match: Match, reply: Any, entries: Sequence[Entry] = ()) -> bool:
        """What the server says of a match becomes what the match says; False if it says nothing of it."""
        if not isinstance(reply, list):
            return False
        return bool(self._understood(lambda: _describe(match, _fields(reply), entries)))

    def _understood(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, LMTierError) as error:
            self._lose(self._link, ProtocolError(f"a reply that means nothing: {error!r}"))
            return None

    def _unmatch(self, reply: Any) -> None:
        """A match that came too late for its caller."""
        if number := self._id_of(reply):
            self._post("LMTIER.RELEASE", number)

    def _unreserve(self, reply: Any) -> None:
        if number := self._id_of(reply):
            self._post("LMTIER.ABORT", number, "*")

    def _id_of(self, reply: Any) -> int | None:
        return self._understood(lambda: int(_fields(reply)["id"])) if isinstance(reply, list) else None

    def _stalled(self, link: _Link | None) -> None:
        if link is not None:
            self.unserved += 1
            link.stalled = True
            self._down(f"no answer within {self.timeout} s")

    def _lose(self, link: _Link | None, error: Exception) -> None:
        if link is not None and not link.is_lost:
            link.is_lost, link.stalled = True, False
            self.lost += 1
            self._down(_said(error))

    def _down(self, why: str, *, is_news: bool = False) -> None:
        """One line says that an outage began, another that a server is there which is of no use."""
        if not self._outage or (is_news and self._outage != why):
            log.warning(
                *(
                    "lmtier: the server at %s is not there, nothing is found until it is: %s",
                    self.address,
                    why,
                )
            )
        self._outage = why

    def _back(self) -> None:
        if self._outage:
            self._outage = ""
            log.warning("lmtier: the server at %s is there again", self.address)


class _Answer:
    """Where the reply of one call goes: to its caller, or, if that one has given up, to `undo`."""

    __slots__ = ("has_come", "is_late", "undo", "value")

    def __init__(self, undo: Then) -> None:
        self.value: Any = None
        self.has_come = False
        self.is_late = False
        self.undo = undo

    def __call__(self, reply: Any) -> None:
        self.value, self.has_come = reply, True
        if self.is_late:
            self.undo(reply)

    def give_up(self) -> None:
        self.is_late = True
        if self.has_come:
            self.undo(self.value)


@dataclass(eq=False, slots=True)
class Asked:
    """A reservation that was asked for."""

    keys: list[bytes]
    form: Form
    first: int
    link: _Link | None = None
    """Where; None: nowhere."""
    answer: _Answer | None = None


class _Link:
    """One connection to one run of a server. Raises OSError and ProtocolError when it is of no more use."""

    def __init__(self, address: str, token: str | None, hello: Sequence[str], timeout: float) -> None:
        self.forms: dict[Form, int] = {}
        self.owed: deque[Then] = deque()
        """What to do with each reply that is to come, in order."""
        self.cost: Cost | None = None
        """What this run of the server was told."""
        self.is_told_off = False
        """Somebody was warned that the server is too old."""
        self.is_lost = False
        self.stalled = False
        """A call has given up; until all that is owed has come, the others do not even begin."""
        self.holds = False
        """What is posted is sent later."""
        self.traffic = 0
        self._unsent = bytearray()
        self._replies = Replies()
        self._fds: list[int] = []
        self._setting_up = True
        path = _path(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        forks.close_in_child(self._socket)  # while a child has it, the server takes this process for alive
        until = time.monotonic() + timeout
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(path)
            self._socket.setblocking(False)
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)
            if token is not None:
                self._ask(until, address, "AUTH", token)
            facts = _fields(self._ask(until, address, "LMTIER.HELLO", PROTOCOL, *hello))
            capacity = self._ask(until, address, "LMTIER.SLAB")
            self.run: int = facts["run"]
            self.traces = bool(facts.get("traces"))
            self.options = facts.get("options", b"").decode().split()
            self.approximation: str = facts.get("approximation", b"").decode()
            self.config = Config(
                chunk_tokens=facts["chunk_tokens"],
                verify=facts["verify"].decode(),
                load_deadline=float(facts["load_deadline"]),
                tiers=(f"{CPU}://?capacity={capacity}",),
            )
            if not self._fds or os.fstat(self._fds[0]).st_size < capacity:
                raise TierError(f"the server at {address} gave no slab of {capacity} bytes")
            self.window = Window(capacity, self._fds[0])
            self.look: Look | None = None
            if "PRESENCE" in self.options and self._ask(until, address, "LMTIER.PRESENCE"):
                self.look = Look(self._fds[1])
        except (KeyError, IndexError, ValueError, TypeError, AttributeError, ConfigError) as error:
            self.close()
            raise TierError(f"the server at {address} is no lmtier server: {error!r}") from None
        except BaseException:
            self.close()
            raise
        finally:
            for fd in self._fds:
                os.close(fd)
        self._setting_up = False

    def _ask(self, until: float, address: str, *request: Argument) -> Any:
        answer = _Answer(_ignore)
        self.post(answer, *request)
        self.hear(answer, until - time.monotonic())
        if isinstance(answer.value, Error):
            raise TierError(f"the server at {address} says: {answer.value}")
        return answer.value

    def close(self) -> None:
        self.is_lost = True
        self._socket.close()

    def hear(self, answer: _Answer, seconds: float) -> None:
        """Until it has come. TimeoutError: it is given up."""
        if self.is_lost:
            raise ConnectionResetError("the connection was lost")
        if answer.has_come:
            return
        try:
            self.drain(0.0 if self.stalled else seconds)
        except TimeoutError:
            answer.give_up()
            raise

    def post(self, then: Then, *request: Argument) -> None:
        """Send, as far as that goes without waiting; `then` gets the reply, in some `drain`."""
        self.owed.append(then)
        self._unsent += command(*request)
        if not self.holds:
            self.push()

    def drain(self, seconds: float) -> None:
        """Until every reply that is owed has come; TimeoutError if that takes longer."""
        until = time.monotonic() + seconds
        self.push()
        while self.owed:
            reply = self._replies.next()
            if reply is not INCOMPLETE:
                self.owed.popleft()(reply)
                continue
            if self._unsent:
                self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
            ready = self._poll.poll(max(0.0, until - time.monotonic()) * 1000)
            if self._unsent:
                self._poll.modify(self._socket, select.POLLIN)
            if not ready:
                raise TimeoutError("it does not answer")
            if ready[0][1] & select.POLLOUT:
                self.push()
            if ready[0][1] & ~select.POLLOUT:
                self._receive()

    def glance(self) -> None:
        """Notice, without waiting, that the server has gone."""
        if self._poll.poll(0):
            self._receive()

    def push(self) -> None:
        try:
            while self._unsent:
                count = self._socket.send(self._unsent)
                self.traffic += count
                del self._unsent[:count]
        except BlockingIOError:
            pass

    def _receive(self) -> None:
        if self._setting_up:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
            self._fds += fds
        else:
            data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("it closed the connection")
        self.traffic += len(data)
        self._replies.feed(data)


def _path(address: str) -> str:
    path = address.removeprefix("unix://")
    if not path.startswith("/"):
        raise ConfigError(
            f"{address!r} is no path of a Unix socket: an engine shares memory with its server, on one host"
        )
    return path


def _said(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


# ---- requests and replies


def arguments(keys: Sequence[bytes]) -> list[bytes]:
    """Many keys an argument, in pieces that a server takes."""
    return [
        b"".join(keys[at : at + _KEYS_AN_ARGUMENT]) for at in range(0, max(1, len(keys)), _KEYS_AN_ARGUMENT)
    ]


def _lifetime(ttl: float | None) -> tuple[Argument, ...]:
    if ttl is not None and not 0 < ttl <= MAX_TTL:
        raise MisuseError(f"ttl={ttl}: must be more than 0 seconds, and at most 100 years")
    return () if ttl is None else ("TTL", max(1, int(ttl * 1000)))


def _fields(reply: Any) -> dict[str, Any]:
    """A flat map."""
    names = iter(reply)
    return {name.decode(): value for name, value in zip(names, names, strict=True)}


def _changes(reply: list[Any]) -> tuple[int, bool, list[Change]]:
    end, is_lost, *runs = reply
    parts = iter(runs)
    return (
        int(end),
        bool(is_lost),
        [
            Change(tier.decode(), bool(came), keys[at : at + KEY_BYTES])
            for tier, came, keys in zip(parts, parts, parts, strict=True)
            for at in range(0, len(keys), KEY_BYTES)
        ],
    )


def _describe(match: Match, fields: dict[str, Any], entries: Sequence[Entry]) -> bool:
    """`entries`: of the first chunks in the match's own form, if somebody has made them already."""
    offsets = [page * PAGE for page in json.loads(fields["pages"])]
    if "forms" in fields:
        table = [match.form, *map(_form, fields["other_forms"])]
        forms = [table[int(text)] for text, count in _runs(fields["forms"].decode()) for _ in range(count)]
        rest = iter(offsets)
        places = [tuple(next(rest) for _ in form.shards) for form in forms]
        run = [
            entry for key, form in zip(match.keys, forms, strict=False) for entry in _entries((key,), form)
        ]
    else:
        each_shard = [iter(offsets)] * len(match.form.shards)
        places = list(zip(*each_shard, strict=True))
        run = list(entries or _entries(match.keys, match.form))[: len(places)]
    for entry, place in zip(run, places, strict=True):
        entry.offsets = place
    sources: list[str] = []
    for text, count in _runs(fields["sources"].decode()):
        sources += repeat(text, count)
    loading = _numbers(fields.get("loading", b""))
    for number in loading:
        run[number].state = State.LOADING
    for text in fields.get("marks", b"").decode().split():
        number, shard, mark = text.split(":")
        entry = run[int(number)]
        prints = list(entry.prints or repeat(b"", len(entry.offsets)))
        prints[int(shard)] = bytes.fromhex(mark)
        entry.prints = tuple(prints)
    match.id = fields["id"]
    match.run = run
    match.sources = sources
    match.below = [None] * (len(sources) - len(run))
    match.waiting = len(loading)
    match.asking = int(fields["state"] == b"asking")
    match.cut = fields.get("cut", b"").decode()
    return True


def _entries(keys: Sequence[bytes], form: Form) -> Iterator[Entry]:
    return map(Entry, keys, repeat(form), repeat(form.room), repeat(State.READY))


def _form(reply: list[bytes]) -> Form:
    layout, *parts = reply
    pairs = [part.decode().split(":") for part in parts]
    shards = [_shard(text) for text, _ in pairs]
    return form_of(Layout.from_json(layout) if layout else None, shards, [int(size) for _, size in pairs])


def _shard(text: str) -> Shard:
    shard = Shard.parse(text)
    if shard is None:
        raise ValueError(f"{text!r} is not a shard")
    return shard


def _reservation(fields: dict[str, Any], keys: Sequence[bytes], form: Form) -> Reservation:
    chunks = _numbers(fields["chunks"])
    places = zip(*[iter(page * PAGE for page in json.loads(fields["pages"]))] * len(form.shards), strict=True)
    entries = {}
    for chunk, place in zip(chunks, places, strict=True):
        entry = entries[chunk] = Entry(keys[chunk], form, form.room, State.FILLING)
        entry.offsets = place
    left = set(form.shards) if entries else set()
    return Reservation(fields["id"], form, entries, fields["known"], fields["dropped"], left)


def _numbers(text: bytes) -> list[int]:
    """`0-5 7 9`"""
    numbers: list[int] = []
    for part in text.split():
        first, _, last = part.partition(b"-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _runs(text: str) -> list[tuple[str, int]]:
    """`cpu*500 disk*12`"""
    pairs = (part.rsplit("*", 1) for part in text.split())
    return [(value, int(count)) for value, count in pairs]


def _outline(match: Match) -> tuple[object, ...]:
    return match.chunks, len(match.run), match.waiting, match.asking, match.cut


def _cut(match: Match, limit: int | None = None) -> None:
    """Keep what is complete, and of that the first `limit` chunks: nobody will bring the rest."""
    complete = [entry.state is State.READY for entry in match.run[:limit]]
    chunks = complete.index(False) if False in complete else len(complete)
    if chunks < match.chunks and not match.cut:
        match.cut, match.found = _LOST, match.chunks
    del match.run[chunks:]
    del match.sources[chunks:]
    match.below, match.waiting, match.asking = [], 0, 0
