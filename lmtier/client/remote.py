"""A server that may be down: calls, messages without waiting, reconnecting, and outages."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import repeat
from typing import Any, TypeVar

from lmtier.client.link import Argument, Link, PendingReply, ReplyCallback, ignore
from lmtier.errors import LMTierError, MisuseError, TierError, log
from lmtier.format.keys import Identity
from lmtier.format.layout import ChunkForm, Shard
from lmtier.wire.resp import Error, ProtocolError
from lmtier.wire.verbs import MAX_MODELS, read_fields

_AGAIN = 1.0  # seconds between attempts to reach a server
_OWED = 64  # outstanding replies of posted requests, above which they are read
_UNSENT = 1 << 20  # bytes of them that a server does not take, above which it is stalled
_REST = 4  # times as long as an attempt took: an engine's step waits for it
_INVALID = ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error, LMTierError

T = TypeVar("T")


class RemoteServer:
    """The connection to a server. Only the constructor raises if there is no server; calls return None."""

    def __init__(self, address: str, hello: Sequence[str], token: str | None, timeout: float) -> None:
        self.address, self.timeout = address, timeout
        self.held: dict[int, set[Shard]] = {}
        """What this process holds of the server, and the shards of it that it has to commit or abort.

        While there is any, it does not connect to another run.
        """
        self.lost = 0
        self.unserved = 0
        self.is_closed = False
        self.outage = ""
        """Why there is no server."""
        self._hello, self._token = hello, token
        self._try_after = 0.0
        self.compared = self.differing = 0
        """Chunks whose fingerprints were compared, and those of them that differed."""
        self._sent_compared = 0, 0
        """The part of these numbers that was sent. The server sums them up for all of its engines."""
        self._ending: dict[tuple[Argument, ...], int] = {}
        """Ends of what was held, until the server answers; and its run."""
        self._models: dict[ChunkForm, dict[str, str]] = {}
        """For each declared form: adapter -> the identity, as JSON."""
        try:
            self.link = Link(address, token, hello, timeout)
        except (OSError, ProtocolError) as error:
            raise TierError(f"no lmtier server at {address}: {_reason(error)}") from None
        self._chunk_tokens, self._approximation = self.link.config.chunk_tokens, self.link.approximation

    @property
    def is_server_alive(self) -> bool:
        """Whether the server of what is held here is still there. Does not wait for it."""
        link = self.link
        if not link.is_lost:
            try:
                link.check_alive()
            except (OSError, ProtocolError) as error:
                self.lose(link, error)
        return not link.is_lost

    def reach(self) -> Link | None:
        """The connection, if it can be used now. A lost one is made again if it holds nothing."""
        if self.is_closed:
            raise MisuseError("this client is closed")
        link = self.link
        if not link.is_lost:
            try:
                link.check_alive()
                if link.is_stalled:
                    link.drain(0.0)
                    link.is_stalled = False
                    self._back()
                return link
            except TimeoutError:
                self.unserved += 1
                return None
            except (OSError, ProtocolError) as error:
                self.lose(link, error)
        if not self.held and time.monotonic() >= self._try_after and self._connect():
            return self.link
        self.unserved += 1
        return None

    def _connect(self) -> bool:
        self.link.close()
        began = time.monotonic()
        try:
            link = Link(self.address, self._token, self._hello, self.timeout)
        except (OSError, ProtocolError, TierError) as error:
            self._down(_reason(error), is_news=isinstance(error, TierError))
            return False
        finally:
            # Measured from now, because the attempt may have taken its whole timeout.
            ended = time.monotonic()
            self._try_after = ended + max(_AGAIN, _REST * (ended - began))
        for name, new_value, old_value in (
            ("chunk_tokens", link.config.chunk_tokens, self._chunk_tokens),
            ("approximation", link.approximation, self._approximation),
        ):
            if new_value != old_value:  # the keys of this process do not fit the new server
                link.close()
                self._down(f"it came back with {name}={new_value}, not {old_value}", is_news=True)
                return False
        self.link = link
        self._back()
        ending, self._ending = self._ending, {}
        for request, run in ending.items():
            if run == link.run_id:
                self.end(*request)
        return True

    def forked(self) -> None:
        """A child needs its own connection and holds nothing of its parent's."""
        self.held.clear()
        self._ending.clear()
        self.link.close()
        self.link.is_stalled = False
        self._try_after = 0.0

    def close(self) -> None:
        self.is_closed = True
        self.held.clear()
        self.link.close()

    # ---- calls

    def call(
        self,
        *request: Argument,
        link: Link | None = None,
        undo: ReplyCallback = ignore,
        seconds: float = 0.0,
        errors: bool = False,
    ) -> Any:
        """The reply.

        None: no server, or it refused. `seconds` is the time for its work beyond the timeout.
        """
        link = link or self.reach()
        if link is None:
            return None
        answer = PendingReply(undo)
        self.post(*request, then=answer)
        return self.wait_for_reply(link, answer, request[0], seconds, errors)

    def wait_for_reply(
        self, link: Link, answer: PendingReply, verb: Argument, seconds: float = 0.0, errors: bool = False
    ) -> Any:
        """As `call`, for a request that was posted."""
        try:
            link.wait_for_reply(answer, self.timeout + seconds)
        except TimeoutError:
            self.stall(link)
            return None
        except (OSError, ProtocolError) as error:
            self.unserved += 1
            self.lose(link, error)
            return None
        reply = answer.value
        if not isinstance(reply, Error) or errors:
            return reply
        code, _, sentence = reply.partition(" ")
        if code == "MISUSE":
            raise MisuseError(sentence)
        log.warning("lmtier: the server at %s refused %s: %s", self.address, verb, sentence)
        return None

    def call_all(self, requests: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """The reply of each, or None. Replies of earlier posted requests are read too."""
        link, replies = self.reach(), list[Any]()
        try:
            if link is not None:
                self._send_compared(link)
                for request in requests:
                    link.post(replies.append, *request)
                link.drain(self.timeout if requests else 0.0)
        except TimeoutError:
            if requests:
                self.stall(link)
        except (OSError, ProtocolError) as error:
            self.lose(link, error)
        replies += repeat(None, len(requests) - len(replies))
        return replies

    def post(self, *request: Argument, then: ReplyCallback = ignore) -> None:
        """Send without waiting for the reply."""
        link = self.link
        if link.is_lost:
            return
        try:
            self._send_compared(link)
            link.post(then, *request)
            if len(link.callbacks) > _OWED and not link.is_stalled:
                link.drain(0.0)
        except TimeoutError:
            if link.unsent > _UNSENT:
                self.stall(link)
        except (OSError, ProtocolError) as error:
            self.lose(link, error)

    def end(self, *request: Argument, then: ReplyCallback = ignore) -> None:
        """As `post`, for the end of what is held.

        If the connection is lost before the reply, the same run of the server hears it over the next one.
        """

        def ended(reply: Any) -> None:
            self._ending.pop(request, None)
            then(reply)

        self._ending[request] = self.link.run_id
        self.post(*request, then=ended)

    @contextmanager
    def batched(self) -> Iterator[None]:
        """Send all requests that are posted in this block at once: each send may have to wake the server."""
        link = self.link
        link.is_batching = True
        try:
            yield
        finally:
            link.is_batching = False
            try:
                if not link.is_lost:
                    link.send_unsent()
            except OSError as error:
                self.lose(link, error)

    def parse_reply(self, read: Callable[[], T]) -> T | None:
        """The result of `read` for a reply. None: the reply is invalid, and the connection is closed."""
        try:
            return read()
        except _INVALID as error:
            self.lose(self.link, ProtocolError(f"an invalid reply: {error!r}"))
            return None

    # ---- undo late grants

    def unmatch(self, reply: Any) -> None:
        if number := self._id_of(reply):
            self.end("LMTIER.RELEASE", number)

    def unreserve(self, reply: Any) -> None:
        if number := self._id_of(reply):
            self.end("LMTIER.ABORT", number, "*")

    def _id_of(self, reply: Any) -> int | None:
        return self.parse_reply(lambda: int(read_fields(reply)["id"])) if isinstance(reply, list) else None

    # ---- sent again to each run of the server

    def number_of(self, form: ChunkForm) -> tuple[Link | None, int]:
        """A connection whose server knows the form, and the form's number there. Other servers use others."""
        if form.layout is None:
            raise MisuseError("a form without a layout cannot be sent to a server")
        link = self.reach()
        if link is not None and form not in link.forms:
            reply = self.call(*_form(form), link=link)
            if not isinstance(reply, int):
                return None, 0
            link.forms[form] = reply
            for lora, identity in self._models.get(form, {}).items():
                self.post(*_form(form), "MODEL", identity, lora)
        return (link, link.forms[form]) if link is not None else (None, 0)

    def declare(self, identity: Identity, form: ChunkForm, lora: str) -> None:
        declared = json.dumps(asdict(identity))
        models = self._models.setdefault(form, {})
        if not lora:  # the adapters of an earlier model of this form are invalid
            models = self._models[form] = {name: each for name, each in models.items() if each == declared}
        models.pop(lora, None)
        models[lora] = declared
        if "" in models:
            models[""] = models.pop("")  # the last to be dropped
        if len(models) > MAX_MODELS:
            del models[next(iter(models))]
        link = self.reach()
        if link is not None and form in link.forms:
            self.post(*_form(form), "MODEL", declared, lora)
        elif link is not None:
            self.number_of(form)

    def _send_compared(self, link: Link) -> None:
        compared, differing = self._sent_compared
        if self.compared != compared:
            totals = self._sent_compared = self.compared, self.differing
            link.post(ignore, "LMTIER.RELEASE", "VERIFIED", totals[0] - compared, totals[1] - differing)

    # ---- outages

    def stall(self, link: Link | None) -> None:
        if link is not None:
            self.unserved += 1
            link.is_stalled = True
            self._down(f"no answer within {self.timeout} s")

    def lose(self, link: Link | None, error: Exception) -> None:
        if link is not None and not link.is_lost:
            link.is_lost, link.is_stalled = True, False
            self.lost += 1
            self._down(_reason(error))

    def _down(self, why: str, *, is_news: bool = False) -> None:
        """Log the start of an outage once, and once more if a server is back but does not fit."""
        if not self.outage or (is_news and self.outage != why):
            log.warning(
                "lmtier: the server at %s is down, and all lookups miss until it returns: %s",
                self.address,
                why,
            )
        self.outage = why

    def _back(self) -> None:
        if self.outage:
            self.outage = ""
            log.info("lmtier: the server at %s is back", self.address)


def _form(form: ChunkForm) -> tuple[Argument, ...]:
    """The request for the number of a form."""
    assert form.layout is not None
    return "LMTIER.FORM", form.layout.to_json(), *map(str, form.shards)


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
