"""One client's socket: commands in, answers out, in order; payloads between the socket and the slab.

A connection works until the socket has no more bytes or accepts no more, or until its command must wait. Then
`interest` gives the events for which it is called again. The server closes a connection that is dead or
stuck. `close` releases everything that its present command held.
"""

from __future__ import annotations

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

from lmtier.server.commands import (
    ALREADY_SENT,
    PAUSE,
    Caller,
    Payload,
    PendingAnswer,
    Refused,
    WithDescriptors,
    error_of,
)
from lmtier.server.dispatch import Dispatch
from lmtier.server.http import Conversation, Reply
from lmtier.server.ledger import PIECE_OVERHEAD
from lmtier.wire.command_reader import CommandReader
from lmtier.wire.resp import CRLF, Error, ProtocolError, bulk_header, encode, encode_command

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

_NOT_RESTARTABLE = (b"LMTIER.RESERVE", b"LMTIER.CALL")
"""Verbs that another process must not begin again: they hold room here, or tell what they have changed."""

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, InterruptedError)


class _Out(NamedTuple):
    """A piece of an answer. `sent` is called when it is sent or dropped."""

    view: memoryview
    on_sent: Callable[[], None] | None = None
    fds: tuple[int, ...] = ()
    held_bytes: int = 0
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
        self.opened_at = time.monotonic()
        self._out: deque[_Out] = deque()
        self.unsent_bytes = 0
        """Bytes that wait to be sent."""
        self._unsent_memory = 0
        """The bytes of memory that they take."""
        self.last_byte_at = self.opened_at
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
        self.last_byte_at = time.monotonic()
        return count

    def push(
        self, data: bytes | memoryview, sent: Callable[[], None] | None = None, fds: tuple[int, ...] = ()
    ) -> None:
        if not self.is_open:
            if sent is not None:
                sent()
            return
        held = PIECE_OVERHEAD + (len(data) if sent is None else 0)
        self._out.append(_Out(memoryview(data), sent, fds, held))
        self._unsent_memory += held
        self.unsent_bytes += len(data)

    def flush(self) -> None:
        """Send as much as the socket accepts, at most for one turn."""
        budget = _AT_ONCE
        while self._out and self.is_open and budget > 0:
            try:
                count = self._send()
            except _NOT_NOW:
                return
            except OSError:
                self.close()
                return
            budget -= count
            self.sent += count
            self.unsent_bytes -= count
            self.last_byte_at = time.monotonic()
            self._forget(count)

    def _send(self) -> int:
        first = self._out[0]
        if first.fds:
            return socket.send_fds(self.sock, [first.view], first.fds)
        if self._is_tls:
            return self.sock.send(first.view[:_RECORDS])
        pieces = takewhile(lambda piece: not piece.fds, islice(self._out, _BUFFERS))
        return self.sock.sendmsg([piece.view for piece in pieces])

    def _forget(self, count: int) -> None:
        """Remove the sent bytes from the queue."""
        queue = self._out
        while queue and len(queue[0].view) <= count:
            count -= len(queue[0].view)
            piece = queue.popleft()
            self._unsent_memory -= piece.held_bytes
            if piece.on_sent is not None:
                piece.on_sent()
        if count:
            first = queue[0]
            queue[0] = first._replace(view=first.view[count:], fds=())

    def is_stuck(self, now: float, patience: float, is_busy: bool) -> bool:
        """Whether an unfinished transfer is stuck: no byte for `patience`, or too few bytes for longer."""
        if not (is_busy or self._out):
            self._busy_since = None
            return False
        if self._busy_since is None:
            self._busy_since = (now, self.received + self.sent)
        busy_since, bytes_before = self._busy_since
        bytes_moved = self.received + self.sent - bytes_before
        is_too_slow = now - busy_since > _FIRST and bytes_moved < _SLOWEST * (now - busy_since)
        return now - max(self.last_byte_at, busy_since) > patience or is_too_slow

    @property
    def is_unauthenticated(self) -> bool:
        """Whether it may do nothing yet: it has shown no token, or has not finished its handshake."""
        if isinstance(self.sock, ssl.SSLSocket) and self.sock.version() is None:
            return True
        return not self.caller.role

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            while self._out:
                if (sent := self._out.popleft().on_sent) is not None:
                    sent()
            self.unsent_bytes = self._unsent_memory = 0
            self.sock.close()


class Connection(Channel):
    """A client that speaks RESP: a Redis client, or an engine."""

    def __init__(self, host: Dispatch, sock: socket.socket, caller: Caller) -> None:
        super().__init__(sock, caller)
        self._dispatch = host
        # No part of a connection refers back to it: long-lived objects are not searched for cycles.
        self._commands = CommandReader(partial(host.payload_target, caller), buffer=host.buffer)
        self._pending_answer: PendingAnswer | None = None
        self._restartable_command: list[Any] = []
        """The command that waits, if another process can begin it again."""
        self._turn_ends = 0.0
        self.needs_turn = False
        """Its turn ended before its work. It needs another turn, because no event will follow."""
        self.speaks_http = False
        """Its first line is one of HTTP: make an `HttpConnection` of it, and read nothing until then."""

    @property
    def wants_input(self) -> bool:
        is_ready = self._pending_answer is None and not self.speaks_http
        return is_ready and not self.caller.closing and not self._is_full

    @property
    def is_mid_request(self) -> bool:
        """Whether a request has begun and not ended."""
        return not self.is_idle

    @property
    def is_waiting(self) -> bool:
        """Whether its command waits for a tier."""
        return self._pending_answer is not None

    @property
    def is_idle(self) -> bool:
        return not (self._pending_answer or self.unsent_bytes or self._commands.in_command)

    @property
    def held_bytes(self) -> int:
        """The bytes that its requests make the server remember now."""
        running = self._commands.last if self._pending_answer is not None else 0
        return (
            self._unsent_memory + self._commands.held_bytes + running + self._dispatch.held_bytes(self.caller)
        )

    @property
    def _is_full(self) -> bool:
        """Whether its answers must be sent before more commands run."""
        return self.unsent_bytes >= _ENOUGH or len(self._out) >= _MANY

    def read_and_run(self) -> None:
        """Continue: the socket has bytes or is closed, or the last turn was cut."""
        was_cut = self._begin_turn()
        if was_cut:
            self._work()
        while self.is_open and self.wants_input and not self.needs_turn:
            target = self._commands.target()
            count = self.read(target)
            if not count:
                break
            self._commands.received(count)
            self._work()
            if count < len(target) and not self._is_tls:  # TLS may have more than the socket shows
                break
            self._is_turn_over()

    def run_and_send(self) -> None:
        """Continue: its command may no longer have to wait, or the socket accepts more."""
        self._begin_turn()
        self._work()

    def _begin_turn(self) -> bool:
        self._turn_ends = time.monotonic() + _TURN
        was_cut, self.needs_turn = self.needs_turn, False
        return was_cut

    def _is_turn_over(self) -> bool:
        self.needs_turn = self.needs_turn or time.monotonic() > self._turn_ends
        return self.needs_turn

    def _work(self) -> None:
        """Run commands and send their answers, as far as possible in this turn."""
        while self.is_open:
            if self._is_full:
                self.flush()
                if self._is_full:
                    break
                continue
            has_progressed = self._advance() if self._pending_answer else self._next()
            is_turn_done = not has_progressed or self._is_turn_over()
            if is_turn_done or self.unsent_bytes >= _BATCH:
                self.flush()
            if is_turn_done:
                break
        if self.caller.closing and not self.unsent_bytes and not self._pending_answer:
            self.close()

    def _next(self) -> bool:
        """Run the next complete command. False: there is none."""
        if self.caller.closing or self.speaks_http:
            return False
        if not self.caller.command_count and self._commands.begins_as_http:
            self.speaks_http = True
            return False
        try:
            args = self._commands.next()
        except ProtocolError as error:
            self._dispatch.drop_drafts(self.caller)
            self.caller.closing = True
            self._reply(Error(f"ERR Protocol error: {error}"))
            return False
        if args is None:
            return False
        answer = self._dispatch.answer(self.caller, args)
        if isinstance(answer, GeneratorType):
            self._pending_answer = answer
            # Verbs may run twice, because they yield no parts of their answer.
            name = bytes(args[0]).upper()
            self._restartable_command = (
                args if name.startswith(b"LMTIER.") and name not in _NOT_RESTARTABLE else []
            )
            return self._advance()
        self._end(answer)
        return True

    def _advance(self) -> bool:
        """Resume the waiting command. False: it still waits."""
        assert self._pending_answer is not None
        try:
            part = next(self._pending_answer)
        except StopIteration as stop:
            self._pending_answer = None
            self._end(stop.value)
            return True
        except (Refused, OSError) as failure:
            self._pending_answer = None
            self._end(error_of(failure))
            return True
        if part is None:
            return False
        if part is not PAUSE:
            self._reply(part) if isinstance(part, Payload) else self.push(part)
        return True

    def _end(self, answer: Any) -> None:
        self._dispatch.drop_drafts(self.caller)
        self._reply(answer)

    def _reply(self, answer: Any) -> None:
        if isinstance(answer, Payload):
            self.push(bulk_header(len(answer.head) + len(answer.view)) + answer.head)
            self.push(answer.view, answer.on_sent)
            self.push(CRLF)
        elif isinstance(answer, WithDescriptors):
            self.push(encode(answer.value, self.caller.resp3), fds=answer.fds)
        elif answer is not ALREADY_SENT:
            self.push(encode(answer, self.caller.resp3))

    # ---- to and from another process

    @property
    def can_hand_over(self) -> bool:
        """Whether another process can go on with it now."""
        caller = self.caller
        is_held = self._is_tls or caller.closing or caller.multi_queue or caller.watch or caller.drafts
        is_sending = any(piece.on_sent is not None or piece.fds for piece in self._out)
        is_at_work = self._pending_answer is not None and not self._restartable_command
        return not (is_held or is_sending or is_at_work) and self._commands.unread() is not None

    def dump(self) -> dict[str, Any]:
        """What another process needs to go on with it, but for its socket and its session."""
        restartable = (
            encode_command(*map(bytes, self._restartable_command))
            if self._pending_answer is not None
            else b""
        )
        caller = self.caller
        return {
            "input": restartable + (self._commands.unread() or b""),
            "output": b"".join(piece.view for piece in self._out),
            "address": caller.address,
            "role": int(caller.role),
            "resp3": caller.resp3,
            "name": caller.name,
            "kind": caller.kind,
            "asked": caller.command_count,
        }

    def restore(self, dumped: dict[str, Any]) -> None:
        """Go on where another process stopped."""
        caller = self.caller
        caller.resp3, caller.name, caller.kind = dumped["resp3"], dumped["name"], dumped["kind"]
        caller.command_count = dumped["asked"]
        if dumped["output"]:
            self.push(dumped["output"])
        self._commands.restore(dumped["input"])
        self.needs_turn = True

    def take_input(self) -> bytes:
        """What was received and is no command."""
        return self._commands.unread() or b""

    def is_receiving(self) -> bool:
        return self._commands.in_command and self._pending_answer is None and not self.needs_turn

    def close(self) -> None:
        if self.is_open:
            super().close()
            if self._pending_answer is not None:
                self._pending_answer.close()
                self._pending_answer = None
            self._dispatch.drop_drafts(self.caller)


class HttpConnection(Channel):
    """A browser, Prometheus, or an operator's tool."""

    def __init__(self, sock: socket.socket, conversation: Conversation, caller: Caller) -> None:
        super().__init__(sock, caller)
        self._conversation = conversation
        self._last = False  # nothing more will be answered
        self._late: Reply | None = None
        self._is_cut = False  # its turn ended with requests left

    @classmethod
    def of(cls, connection: Connection, conversation: Conversation) -> HttpConnection:
        """Go on with a connection whose first line is one of HTTP."""
        successor = cls(connection.sock, conversation, connection.caller)
        successor.opened_at, successor.received = connection.opened_at, connection.received
        conversation.feed(connection.take_input())
        connection.is_open = False
        return successor

    @property
    def needs_turn(self) -> bool:
        return self._is_cut or self._conversation.needs_turn

    @property
    def wants_input(self) -> bool:
        return self.is_idle

    @property
    def is_waiting(self) -> bool:
        """Whether its next answer has to be late, or waits for a tier or for its turn."""
        return self._late is not None or self._is_cut or self._conversation.is_answering

    @property
    def is_idle(self) -> bool:
        return not (self.unsent_bytes or self.is_waiting)

    @property
    def can_hand_over(self) -> bool:
        """Whether its client loses no answer if this process ends."""
        return self.is_idle

    def is_receiving(self) -> bool:
        """A browser's connection may be idle for as long as a transfer; a call may take longer."""
        return not self._conversation.is_answering

    @property
    def held_bytes(self) -> int:
        """The bytes that its requests make the server remember now."""
        return self._unsent_memory + self._conversation.held_bytes

    is_mid_request = False
    """A browser connects before it asks, and keeps its connection afterwards: no reason for a warning."""

    def close(self) -> None:
        if self.is_open:
            super().close()
            self._conversation.close()

    def read_and_run(self) -> None:
        buffer = memoryview(bytearray(_INPUT))
        count = self.read(buffer) if self.wants_input else 0
        if count and not self._last:
            self._conversation.feed(buffer[:count])
        self.run_and_send()

    def run_and_send(self) -> None:
        self.flush()
        turn_ends, self._is_cut = time.monotonic() + _TURN, False
        while self.is_open and not self.unsent_bytes:
            reply, self._late = self._late or self._conversation.next(), None
            if reply is None:
                break
            if reply.at > time.monotonic():
                self._late = reply
                break
            self.caller.command_count += 1
            self._busy_since = None  # its patience starts again: answers are few, and are no transfer
            self.push(reply.data)
            self.flush()
            if not reply.keep:
                self._last = True
            elif time.monotonic() > turn_ends:  # a client may send hundreds of requests at once
                self._is_cut = True
                break
        if self._last and not self.unsent_bytes and self.is_open:
            # Read on to the end: unread input would reset the connection, and the answer would be lost.
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
