"""A pool of connections to each server, and commands about keys that use them."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from lmtier.format.objects import CorruptObject
from lmtier.wire.resp import Argument, Buffer, Error, encode_command_parts
from lmtier_backends.redis.connection import ErrorReply, Login, RedisSocket, dial
from lmtier_backends.redis.server_map import MOST_NODES, ServerMap
from lmtier_backends.sockets import Address, BadReply, seconds_left

_HOPS = 5  # a slot moves once, or once more while we look
_DEMOTED = ("READONLY", "MASTERDOWN")


class Connections:
    """A limited number of connections to each server.

    They are made on demand, each for one thread at a time.
    """

    def __init__(
        self,
        most: int,
        login: Callable[[], Login],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._most = most
        self._login = login
        self._tls = tls
        self.lost: Callable[[Address], None] = lambda address: None
        """Called when a call to a server has failed."""
        self._lock = threading.Lock()
        self._idle: dict[Address, SimpleQueue[RedisSocket | None]] = {}
        self._closed = False

    @contextmanager
    def borrow(self, address: Address, until: float) -> Iterator[RedisSocket]:
        """Lend a connection. After an exception it is closed, and the next borrower gets a new one."""
        idle_connections = self._of(address)
        try:
            wire = idle_connections.get(timeout=seconds_left(until))
        except Empty:
            raise TimeoutError("all connections were busy") from None
        try:
            if wire is not None and wire.is_stale():
                wire.close()
                wire = None
            if wire is None:
                wire = self._dial(address, until)
            yield wire
        except BaseException as error:
            if wire is not None:
                wire.close()
            if isinstance(error, OSError):
                self.lost(address)
            raise
        finally:
            idle_connections.put(wire if wire is not None and not wire.is_closed else None)
            if self._idle.get(address) is not idle_connections:  # this address is no longer in use
                _drain(idle_connections)

    def ask(self, address: Address, args: Sequence[Argument], until: float) -> Any:
        """The reply to a command about a server, not about a key."""
        with self.borrow(address, until) as wire:
            wire.send(encode_command_parts(*args), until)
            return wire.read_reply(until)

    def _dial(self, address: Address, until: float) -> RedisSocket:
        try:
            return dial(address, until, self._login(), self._tls)
        # Of a socket or a password file; in a tier this exception would mean a miss.
        except FileNotFoundError as error:
            raise ConnectionError(f"{error.filename or address} does not exist") from None

    def keep_only(self, addresses: Iterable[Address]) -> None:
        kept = set(addresses)
        with self._lock:
            dropped = [self._idle.pop(address) for address in [*self._idle] if address not in kept]
        for idle in dropped:
            _drain(idle)

    def close(self) -> None:
        self._closed = True
        self.keep_only(())

    def _of(self, address: Address) -> SimpleQueue[RedisSocket | None]:
        evicted: SimpleQueue[RedisSocket | None] = SimpleQueue()
        with self._lock:
            if self._closed:
                raise ConnectionError("closed")
            if address not in self._idle:
                if len(self._idle) == MOST_NODES:  # sent on and on
                    evicted = self._idle.pop(next(iter(self._idle)))
                self._idle[address] = SimpleQueue()
                for _ in range(self._most):
                    self._idle[address].put(None)
            idle_connections = self._idle[address]
        _drain(evicted)
        return idle_connections


def _drain(idle_connections: SimpleQueue[RedisSocket | None]) -> None:
    with suppress(Empty):
        while True:
            if (wire := idle_connections.get_nowait()) is not None:
                wire.close()


class KeyCommand(NamedTuple):
    """A command about one key, as it is sent."""

    key: bytes
    encoded: Sequence[Buffer]

    @classmethod
    def of(cls, word: str, key: bytes, *args: Argument) -> KeyCommand:
        return cls(key, encode_command_parts(word, key, *args))

    def to_send(self, *, asking: bool) -> Sequence[Buffer]:
        """The bytes to send. With ASKING first for a node that a slot is moving to."""
        return (*encode_command_parts("ASKING"), *self.encoded) if asking else self.encoded


def _leave_if_demoted(wire: RedisSocket, replies: Iterable[object]) -> None:
    """A server that became a replica keeps its connections. The same address may lead to the master now."""
    if any(isinstance(reply, Error) and reply.code in _DEMOTED for reply in replies):
        wire.close()


class KeyCommandRouter:
    """Sends commands about keys to the servers that `homes` names."""

    def __init__(self, connections: Connections, homes: ServerMap) -> None:
        self._connections = connections
        self._homes = homes

    def ask(self, questions: Sequence[KeyCommand], until: float) -> list[Any]:
        """The replies to commands on keys: one round trip to all nodes at once, and one more for each
        move."""
        replies: list[Any] = [None] * len(questions)
        routes = {i: (self._homes.server_of(each.key, until), False) for i, each in enumerate(questions)}
        for _ in range(_HOPS):
            batches: dict[Address, list[int]] = {}
            for i, (address, _asking) in routes.items():
                batches.setdefault(address, []).append(i)
            if len(batches) > MOST_NODES:
                raise BadReply(f"keys were sent on to {len(batches)} servers")
            with ExitStack() as stack:
                # All threads borrow in the same order, so that they cannot deadlock.
                wires = [
                    (stack.enter_context(self._connections.borrow(address, until)), batches[address])
                    for address in sorted(batches, key=str)
                ]
                for wire, indexes in wires:
                    wire.send([p for i in indexes for p in questions[i].to_send(asking=routes[i][1])], until)
                for wire, indexes in wires:
                    replies_of_node = iter(wire.read_replies(sum(1 + routes[i][1] for i in indexes), until))
                    for i in indexes:
                        if routes[i][1]:
                            next(replies_of_node)
                        replies[i] = next(replies_of_node)
                    _leave_if_demoted(wire, (replies[i] for i in indexes))
            redirected = {}
            for i, (address, _asking) in routes.items():
                if isinstance(reply := replies[i], Error) and (
                    redirection := self._onward(reply, questions[i].key, address)
                ):
                    redirected[i] = redirection
            if not (routes := redirected):
                break
        return replies

    def fetch(self, command: KeyCommand, into: Sequence[memoryview], likely: int, until: float) -> int | None:
        """Read a string directly into memory. Returns its length, or None if it does not exist."""
        address, asking = self._homes.server_of(command.key, until), False
        for _ in range(_HOPS):
            with self._connections.borrow(address, until) as wire:
                wire.send(command.to_send(asking=asking), until)
                if asking:
                    wire.read_reply(until)
                length_or_error = wire.read_string(into, likely, until)
                _leave_if_demoted(wire, (length_or_error,))
            if not isinstance(length_or_error, Error):
                return length_or_error
            if length_or_error.code == "WRONGTYPE":
                raise CorruptObject("not a string")
            if (redirection := self._onward(length_or_error, command.key, address)) is None:
                raise ErrorReply(length_or_error)
            address, asking = redirection
        raise ConnectionError(f"sent from node to node {_HOPS} times")

    def _onward(self, error: Error, key: bytes, address: Address) -> tuple[Address, bool] | None:
        # Another server is the master, or soon will be.
        if error.code in (*_DEMOTED, "CLUSTERDOWN"):
            self._homes.invalidate(address)
        return self._homes.redirection(error, key, address)
