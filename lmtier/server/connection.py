"""One client's socket: commands in, answers out, in order; payloads between the socket and the slab.

A connection works until the socket has no more bytes or accepts no more, or until its command must wait. Then
`interest` gives the events for which it is called again. The server closes a connection that is dead or
stuck. `close` releases everything that its present command held.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from types import GeneratorType
from typing import Any, NamedTuple

from lmtier.server.commands import PAUSE, Caller, Nothing, Payload, Refused, Waiting, WithDescriptor, error_of
from lmtier.server.dispatch import Dispatch
from lmtier.server.http import Conversation, Reply
from lmtier.server.ledger import PIECE
from lmtier.wire.commands import Commands
from lmtier.wire.resp import CRLF, Error, ProtocolError, bulk_header, command, encode

_TURN = 0.001  # seconds after which a client's turn ends
_AT_ONCE = 4 << 20  # bytes sent after which a client's turn ends
_RECORDS = 256 << 10  # bytes per call with TLS: a call that TLS takes in part does not count as progress
_ENOUGH = 1 << 20  # bytes of unsent answers above which no more commands run
# Pieces of unsent answers above which no more commands run: small ones cost 50 times their bytes.
_MANY = 4096
_BATCH = 64 << 10  # bytes of answers that are sent before more commands run
_INPUT = 16 << 10  # bytes that are read of a browser at once
_BUFFERS = 64  # in one system call
_SLOWEST = 16 << 10  # bytes per second that a transfer must average to be worth its memory
_FIRST = 10.0  # seconds at the start of a transfer without this limit

_ONCE = (b"LMTIER.RESERVE", b"LMTIER.FORGET", b"LMTIER.HINT")
"""Verbs that another process must not begin again: they hold room here, or tell what they have changed."""

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, InterruptedError)


class _Out(NamedTuple):
    """A piece of an answer. `sent` is called when it is sent or dropped."""

    view: memoryview
    sent: Callable[[], None] | None = None
    fd: int | None = None
    held: int = 0
    """The bytes of memory that it takes. A view of the slab takes none."""


class Channel:
    """A non-blocking socket with its output queue."""

    def __init__(self, sock: socket.socket, caller: Caller) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.caller = caller
        self.fd = sock.fileno()
        self.is_open = True
        self.received = 0
        self.sent = 0
        self.began = time.monotonic()
        self._out: deque[_Out] = deque()
        self.waits = 0
        """Bytes that wait to be sent."""
        self._unsent = 0
        """The bytes of memory that they take."""
        self.moved = self.began
        """When a byte last moved."""
        self._busy_since: tuple[float, int] | None = None
        self._is_tls = isinstance(sock, ssl.SSLSocket)

    def read(self, target: memoryview) -> int:
        """Receive into `target`; returns the bytes. 0: none now. Closes itself if the other side is gone."""
        try:
            count = self.sock.recv_into(target)
        except _NOT_NOW:
            return 0
        except OSError:
            count = 0
        if not count:
            self.close()
        self.received += count
        self.moved = time.monotonic()
        return count

    def push(
        self, data: bytes | memoryview, sent: Callable[[], None] | None = None, fd: int | None = None
    ) -> None:
        if not self.is_open:
            if sent is not None:
                sent()
            return
        held = PIECE + (len(data) if sent is None else 0)
        self._out.append(_Out(memoryview(data), sent, fd, held))
        self._unsent += held
        self.waits += len(data)

    def flush(self) -> None:
        """Send as much as the socket accepts, at most for one turn."""
        turn = _AT_ONCE
        while self._out and self.is_open and turn > 0:
            try:
                count = self._send()
            except _NOT_NOW:
                return
            except OSError:
                self.close()
                return
            turn -= count
            self.sent += count
            self.waits -= count
            self.moved = time.monotonic()
            self._forget(count)

    def _send(self) -> int:
        first = self._out[0]
        if first.fd is not None:
            return socket.send_fds(self.sock, [first.view], [first.fd])
        if self._is_tls:
            return self.sock.send(first.view[:_RECORDS])
        pieces = takewhile(lambda each: each.fd is None, islice(self._out, _BUFFERS))
        return self.sock.sendmsg([each.view for each in pieces])

    def _forget(self, count: int) -> None:
        """Remove the sent bytes from the queue."""
        out = self._out
        while out and len(out[0].view) <= count:
            count -= len(out[0].view)
            done = out.popleft()
            self._unsent -= done.held
            if done.sent is not None:
                done.sent()
        if count:
            first = out[0]
            out[0] = first._replace(view=first.view[count:], fd=None)

    def is_stuck(self, now: float, patience: float, busy: bool) -> bool:
        """Whether an unfinished transfer is stuck: no byte for `patience`, or too few bytes for longer."""
        if not (busy or self._out):
            self._busy_since = None
            return False
        if self._busy_since is None:
            self._busy_since = (now, self.received + self.sent)
        since, moved = self._busy_since
        rate = self.received + self.sent - moved
        too_slow = now - since > _FIRST and rate < _SLOWEST * (now - since)
        return now - max(self.moved, since) > patience or too_slow

    @property
    def is_stranger(self) -> bool:
        """Whether it may do nothing yet: it has shown no token, or has not finished its handshake."""
        if isinstance(self.sock, ssl.SSLSocket) and self.sock.version() is None:
            return True
        return not self.caller.role

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            while self._out:
                if (sent := self._out.popleft().sent) is not None:
                    sent()
            self.waits = self._unsent = 0
            self.sock.close()


class Connection(Channel):
    """A client that speaks RESP: a Redis client, or an engine."""

    def __init__(self, host: Dispatch, sock: socket.socket, caller: Caller) -> None:
        super().__init__(sock, caller)
        self._host = host
        # No part of a connection refers back to it: long-lived objects are not searched for cycles.
        self._commands = Commands(partial(host.place, caller), buffer=host.buffer)
        self._waiting: Waiting | None = None
        self._again: list[Any] = []
        """The command that waits, if another process can begin it again."""
        self._turn_ends = 0.0
        self.is_cut = False
        """Its turn ended before its work. It needs another turn, because no event will follow."""

    @property
    def wants_input(self) -> bool:
        return self._waiting is None and not self.caller.closing and not self._is_full

    @property
    def has_begun(self) -> bool:
        """Whether a request has begun and not ended."""
        return not self.is_idle

    @property
    def is_waiting(self) -> bool:
        """Whether its command waits for a tier."""
        return self._waiting is not None

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self.waits or self._commands.in_command)

    @property
    def held(self) -> int:
        """The bytes that its requests make the server remember now."""
        begun = self._commands.last if self._waiting is not None else 0
        return self._unsent + self._commands.held + begun + self._host.held(self.caller)

    @property
    def _is_full(self) -> bool:
        """Whether its answers must be sent before more commands run."""
        return self.waits >= _ENOUGH or len(self._out) >= _MANY

    def hear(self) -> None:
        """Continue: the socket has bytes or is closed, or the last turn was cut."""
        was_cut = self._begin_turn()
        if was_cut:
            self._work()
        while self.is_open and self.wants_input and not self.is_cut:
            target = self._commands.target()
            count = self.read(target)
            if not count:
                break
            self._commands.received(count)
            self._work()
            if count < len(target) and not self._is_tls:  # TLS may have more than the socket shows
                break
            self._is_over()

    def go_on(self) -> None:
        """Continue: its command may no longer have to wait, or the socket accepts more."""
        self._begin_turn()
        self._work()

    def _begin_turn(self) -> bool:
        self._turn_ends = time.monotonic() + _TURN
        was_cut, self.is_cut = self.is_cut, False
        return was_cut

    def _is_over(self) -> bool:
        self.is_cut = self.is_cut or time.monotonic() > self._turn_ends
        return self.is_cut

    def _work(self) -> None:
        """Run commands and send their answers, as far as possible in this turn."""
        while self.is_open:
            if self._is_full:
                self.flush()
                if self._is_full:
                    break
                continue
            ran = self._resume() if self._waiting else self._next()
            ends = not ran or self._is_over()
            if ends or self.waits >= _BATCH:
                self.flush()
            if ends:
                break
        if self.caller.closing and not self.waits and not self._waiting:
            self.close()

    def _next(self) -> bool:
        """Run the next complete command. False: there is none."""
        if self.caller.closing:
            return False
        try:
            args = self._commands.next()
        except ProtocolError as error:
            self._host.drop_drafts(self.caller)
            self.caller.closing = True
            self._reply(Error(f"ERR Protocol error: {error}"))
            return False
        if args is None:
            return False
        answer = self._host.answer(self.caller, args)
        if isinstance(answer, GeneratorType):
            self._waiting = answer
            # Verbs may run twice, because they yield no parts of their answer.
            name = bytes(args[0]).upper()
            self._again = args if name.startswith(b"LMTIER.") and name not in _ONCE else []
            return self._resume()
        self._end(answer)
        return True

    def _resume(self) -> bool:
        """Resume the waiting command. False: it still waits."""
        assert self._waiting is not None
        try:
            part = next(self._waiting)
        except StopIteration as stop:
            self._waiting = None
            self._end(stop.value)
            return True
        except (Refused, OSError) as failure:
            self._waiting = None
            self._end(error_of(failure))
            return True
        if part is None:
            return False
        if part is not PAUSE:
            self._reply(part) if isinstance(part, Payload) else self.push(part)
        return True

    def _end(self, answer: Any) -> None:
        self._host.drop_drafts(self.caller)
        self._reply(answer)

    def _reply(self, answer: Any) -> None:
        if isinstance(answer, Payload):
            self.push(bulk_header(len(answer.head) + len(answer.view)) + answer.head)
            self.push(answer.view, answer.sent)
            self.push(CRLF)
        elif isinstance(answer, WithDescriptor):
            sent = partial(os.close, answer.fd) if answer.closes else None
            self.push(encode(answer.value, self.caller.resp3), sent, fd=answer.fd)
        elif answer is not Nothing:
            self.push(encode(answer, self.caller.resp3))

    # ---- to and from another process

    @property
    def can_move(self) -> bool:
        """Whether another process can go on with it now."""
        caller = self.caller
        is_held = self._is_tls or caller.closing or caller.queue or caller.watch or caller.drafts
        is_sending = any(each.sent is not None or each.fd is not None for each in self._out)
        is_at_work = self._waiting is not None and not self._again
        return not (is_held or is_sending or is_at_work) and self._commands.unread() is not None

    def told(self) -> dict[str, Any]:
        """All that another process needs to go on with it, but for its socket and its session."""
        again = command(*map(bytes, self._again)) if self._waiting is not None else b""
        caller = self.caller
        return {
            "input": (again + (self._commands.unread() or b"")).hex(),
            "output": b"".join(each.view for each in self._out).hex(),
            "address": caller.address,
            "is_local": caller.is_local,
            "role": int(caller.role),
            "resp3": caller.resp3,
            "name": caller.name,
            "kind": caller.kind,
            "asked": caller.asked,
            "peer": caller.peer,
            "shard": str(caller.session.members[caller] or "") if caller.session is not None else "",
        }

    def resume(self, told: dict[str, Any]) -> None:
        """Go on where another process stopped."""
        if output := bytes.fromhex(told["output"]):
            self.push(output)
        self._commands.go_on(bytes.fromhex(told["input"]))
        self.is_cut = True

    def is_in_the_middle(self) -> bool:
        return self._commands.in_command and self._waiting is None and not self.is_cut

    def close(self) -> None:
        if self.is_open:
            super().close()
            if self._waiting is not None:
                self._waiting.close()
                self._waiting = None
            self._host.drop_drafts(self.caller)


class HttpConnection(Channel):
    """A browser, or Prometheus."""

    def __init__(self, sock: socket.socket, conversation: Conversation, caller: Caller) -> None:
        super().__init__(sock, caller)
        self._conversation = conversation
        self._last = False  # nothing more will be answered
        self._late: Reply | None = None

    @property
    def is_cut(self) -> bool:
        return self._conversation.is_answering

    @property
    def wants_input(self) -> bool:
        return self.is_idle

    @property
    def is_waiting(self) -> bool:
        """Whether its next answer has to be late."""
        return self._late is not None

    @property
    def is_idle(self) -> bool:
        return not (self.waits or self._late or self.is_cut)

    def is_in_the_middle(self) -> bool:
        return True  # a browser's connection may be idle for as long as a transfer

    @property
    def held(self) -> int:
        """The bytes that its requests make the server remember now."""
        return self._unsent + self._conversation.held

    has_begun = False
    """A browser connects before it asks, and keeps its connection afterwards: no reason for a warning."""

    def hear(self) -> None:
        arrived = memoryview(bytearray(_INPUT))
        count = 0 if self.is_cut else self.read(arrived)
        if count and not self._last:
            self._conversation.feed(arrived[:count])
        self.go_on()

    def go_on(self) -> None:
        self.flush()
        while self.is_open and not self.waits:
            reply, self._late = self._late or self._conversation.next(), None
            if reply is None:
                break
            if reply.at > time.monotonic():
                self._late = reply
                break
            self.caller.asked += 1
            self._busy_since = None  # its patience starts again: answers are few, and are no transfer
            self.push(reply.data)
            self.flush()
            if not reply.keep:
                self._last = True
        if self._last and not self.waits and self.is_open:
            # Read on to the end: unread input would reset the connection, and the answer would be lost.
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
