"""One connection to one run of a server: the socket, the handshake, and the mapped memory."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lmtier import forks
from lmtier.config import Config
from lmtier.core.match import CPU
from lmtier.core.presence import PresenceReader
from lmtier.core.slab import Memory
from lmtier.errors import ConfigError, MisuseError, TierError
from lmtier.format.layout import ChunkForm
from lmtier.rules.worth import Cost
from lmtier.wire.command_reader import Limits
from lmtier.wire.reply_reader import ReplyReader
from lmtier.wire.resp import INCOMPLETE, Error, encode_command
from lmtier.wire.verbs import PROTOCOL, read_fields

ReplyCallback: TypeAlias = "Callable[[Any], None]"
Argument: TypeAlias = "bytes | str | int"
_LIMITS = Limits()


def ignore(reply: Any) -> None:
    """For replies that no caller waits for."""


class MappedSlab:
    """A server's slab as this process sees it. Its memory lives as long as a view of it."""

    def __init__(self, capacity: int, fd: int) -> None:
        self.capacity = capacity
        self._view = Memory(capacity, fd).view

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._view[offset : offset + nbytes]


class PendingReply:
    """Receives the reply of one call: for the caller, or for `undo` if the caller has given up."""

    __slots__ = ("has_arrived", "is_abandoned", "undo", "value")

    def __init__(self, undo: ReplyCallback = ignore) -> None:
        self.value: Any = None
        self.has_arrived = False
        self.is_abandoned = False
        self.undo = undo

    def __call__(self, reply: Any) -> None:
        self.value, self.has_arrived = reply, True
        if self.is_abandoned:
            self.undo(reply)

    def abandon(self) -> None:
        self.is_abandoned = True
        if self.has_arrived:
            self.undo(self.value)


class Link:
    """A connection. Raises OSError or ProtocolError if it is lost, and TierError if it cannot begin."""

    def __init__(self, address: str, token: str | None, hello: Sequence[str], timeout: float) -> None:
        self.forms: dict[ChunkForm, int] = {}
        self.callbacks: deque[ReplyCallback] = deque()
        """The callbacks for the outstanding replies, in order."""
        self.cost: Cost | None = None
        """The cost that was last sent to this run of the server."""
        self.is_lost = False
        self.is_stalled = False
        """A call has given up. Until all outstanding replies have arrived, no other call begins."""
        self.is_batching = False
        """Posted requests are sent later."""
        self.traffic = 0
        self._unsent = bytearray()
        self._replies = ReplyReader()
        self._fds: list[int] = []
        self._setting_up = True
        path = _path(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # While a child has it open, this process looks alive to the server.
        forks.close_in_child(self._socket)
        try:
            self._begin(address, path, token, hello, timeout)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError, ConfigError) as error:
            self.close()
            raise TierError(f"the server at {address} is not an lmtier server: {error!r}") from None
        except BaseException:
            self.close()
            raise
        finally:
            for fd in self._fds:
                os.close(fd)
        self._setting_up = False

    def _begin(
        self, address: str, path: str, token: str | None, hello: Sequence[str], timeout: float
    ) -> None:
        deadline = time.monotonic() + timeout
        self._socket.settimeout(timeout)
        self._socket.connect(path)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        if token is not None:
            self._ask(deadline, address, "AUTH", token)
        facts = read_fields(self._ask(deadline, address, "LMTIER.HELLO", PROTOCOL, *hello))
        capacity, has_presence = self._ask(deadline, address, "LMTIER.SLAB")
        self.run_id: int = facts["run"]
        self.traces = bool(facts.get("traces"))
        self.approximation: str = facts.get("approximation", b"").decode()
        self.config = Config(
            chunk_tokens=facts["chunk_tokens"],
            verify=facts["verify"].decode(),
            load_deadline=float(facts["load_deadline"]),
            tiers=(f"{CPU}://?capacity={capacity}",),
        )
        if not self._fds or os.fstat(self._fds[0]).st_size < capacity:
            raise TierError(f"the server at {address} gave no slab of {capacity} bytes")
        self.slab = MappedSlab(capacity, self._fds[0])
        self.presence_reader = PresenceReader(self._fds[1]) if has_presence else None

    def _ask(self, until: float, address: str, *request: Argument) -> Any:
        answer = PendingReply()
        self.post(answer, *request)
        self.wait_for_reply(answer, until - time.monotonic())
        if isinstance(answer.value, Error):
            raise TierError(f"the server at {address} refused the connection: {answer.value.sentence}")
        return answer.value

    def close(self) -> None:
        self.is_lost = True
        self.callbacks.clear()  # they may name the owner of this link, which would keep the memory mapped
        self._socket.close()

    def wait_for_reply(self, answer: PendingReply, seconds: float) -> None:
        """Wait for the reply. TimeoutError: the call has given up."""
        if self.is_lost:
            raise ConnectionResetError("the connection was lost")
        if answer.has_arrived:
            return
        try:
            self.drain(0.0 if self.is_stalled else seconds)
        except BaseException:  # an interrupt too
            answer.abandon()
            raise

    @property
    def unsent(self) -> int:
        """Bytes of requests that the server does not take yet."""
        return len(self._unsent)

    def post(self, then: ReplyCallback, *request: Argument) -> None:
        """Send as much as possible without waiting. `then` gets the reply in a later `drain`."""
        data = encode_command(*request)  # it may raise: then nothing is owed
        if len(data) > _LIMITS.argument:
            _need_room(request, data)
        self.callbacks.append(then)
        self._unsent += data
        if not self.is_batching:
            self.send_unsent()

    def drain(self, seconds: float) -> None:
        """Wait for all outstanding replies. TimeoutError if that takes longer than `seconds`."""
        until = time.monotonic() + seconds
        self.send_unsent()
        while self.callbacks:
            reply = self._replies.next()
            if reply is not INCOMPLETE:
                self.callbacks.popleft()(reply)
                continue
            if self._unsent:
                self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
            ready = self._poll.poll(max(0.0, until - time.monotonic()) * 1000)
            if self._unsent:
                self._poll.modify(self._socket, select.POLLIN)
            if not ready:
                raise TimeoutError("it does not answer")
            if ready[0][1] & select.POLLOUT:
                self.send_unsent()
            if ready[0][1] & ~select.POLLOUT:
                self._receive()

    def check_alive(self) -> None:
        """Notice, without waiting, that the server has closed the connection."""
        if self._poll.poll(0):
            self._receive()

    def send_unsent(self) -> None:
        try:
            while self._unsent:
                count = self._socket.send(self._unsent)
                self.traffic += count
                del self._unsent[:count]
        except BlockingIOError:
            pass

    def _receive(self) -> None:
        if self._setting_up:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 2, socket.MSG_CMSG_CLOEXEC)
            self._fds += fds
        else:
            data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("it closed the connection")
        self.traffic += len(data)
        self._replies.feed(data)


def _need_room(request: Sequence[Argument], data: bytes) -> None:
    """The server closes a connection that sends more."""
    encoded = (each if isinstance(each, bytes) else str(each).encode(errors="replace") for each in request)
    longest = max(map(len, encoded))
    if longest > _LIMITS.argument or len(data) > _LIMITS.command:
        raise MisuseError(
            f"{request[0]!r} of {len(data)} bytes is too long: a server takes {_LIMITS.command} bytes, and "
            f"{_LIMITS.argument} of each argument"
        )


def _path(address: str) -> str:
    path = address.removeprefix("unix://")
    if not path.startswith("/"):
        raise ConfigError(
            f"{address!r} is not a path of a Unix socket: an engine needs a server on the same host"
        )
    return path
