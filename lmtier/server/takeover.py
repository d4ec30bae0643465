"""Taking over: the next server gets memory, handover file, listeners and connections of this one.

    next server                                   this server
    LMTIER.TAKEOVER on the Unix socket     ─►     answers with one end of a pair of sockets
    reads its settings, imports; GO        ─►     begins no writes to tiers; once they rest, it stands still
                                           ◄─     BOOKS, and all descriptors
    enters them, opens its tiers; TAKEN    ─►     leaves. It closes nothing for others and writes nothing

TAKEN is the commit point: the next server sends it before it serves its first request. Until then this server
has changed nothing. If the socket ends without it, or it takes too long, this server goes on; a TAKEN that
comes later finds the socket closed. So there is never more than one server that serves.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from lmtier._version import __version__
from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.handover import Handover, HandoverWriter
from lmtier.core.slab import SEALS, SHARED
from lmtier.errors import ConfigError, log, size_text
from lmtier.format.handover_file import MAX_BYTES, VERSION, HandoverFile, HandoverFileError
from lmtier.observe.metrics import Metrics
from lmtier.server.arguments import read_number
from lmtier.server.commands import Argument, Caller, Command, Refused, WithDescriptors
from lmtier.server.connection import Connection, HttpConnection
from lmtier.server.connection_table import ConnectionTable
from lmtier.server.engines import EngineVerbs
from lmtier.server.listening import Listeners
from lmtier.wire.reply_reader import ReplyReader
from lmtier.wire.resp import INCOMPLETE, encode_command
from lmtier.wire.verb_table import VERBS

GO, BOOKS, FILES, NO, TAKEN = b"GO", b"BOOKS", b"FILES", b"NO ", b"TAKEN"
_AT_ONCE = 200  # descriptors in a message; the kernel allows 253
_PREPARING = 60.0  # seconds in which the next server reads its settings and imports
_SOFT = 5.0  # seconds in which writes to tiers may end while the server still serves
_STILL = 1.0  # seconds in which reads may end while it stands still
_LINGER = 0.05  # seconds in which clients that are in the middle of a value may finish
_PATIENCE = 5.0  # seconds in which the next server must be ready
_MESSAGE = 4096


class TakeoverSender:
    """The side of the server that runs now."""

    def __init__(
        self,
        cache: Cache,
        engines: EngineVerbs,
        roster: ConnectionTable,
        doors: Listeners,
        watch: Callable[[int], None],
        give_turn: Callable[[Connection | HttpConnection], None],
        is_in_transaction: Callable[[], bool],
        tell_report: Callable[[], dict[str, Any]],
    ) -> None:
        self._cache, self._engines = cache, engines
        self._roster, self._doors = roster, doors
        self._watch, self._give_turn = watch, give_turn
        self._is_in_transaction, self._tell_report = is_in_transaction, tell_report
        self._takeover_socket: socket.socket | None = None
        self._since = 0.0
        self._go_at: float | None = None
        self._is_stopping = False
        self.pid = 0
        """The process that takes over."""

    @property
    def is_under_way(self) -> bool:
        return self._takeover_socket is not None

    def command(self) -> Command:
        return Command(self._ask, VERBS["TAKEOVER"].arity, ("admin",))

    def _ask(self, caller: Caller, arguments: list[Argument]) -> Any:
        if not caller.is_local or caller.peer is None or caller.peer[1] != os.geteuid():
            raise Refused("NOPERM only the user of this server can take over, on its Unix socket")
        if read_number(arguments[1], "a version of the handover file") != VERSION:
            raise Refused(f"ERR this server hands over files of version {VERSION}; restart it instead")
        if self._takeover_socket is not None:
            raise Refused("ERR another server is taking over now")
        if self._is_stopping:
            raise Refused("ERR this server stops")
        try:
            self._takeover_socket, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise Refused(f"ERR no file can be opened for a takeover: {error.strerror}") from None
        self._takeover_socket.setblocking(False)
        self.pid, self._since = caller.peer[0], time.monotonic()
        self._watch(self._takeover_socket.fileno())
        config = self._cache.config
        facts = f"{__version__} {config.chunk_tokens} {self._cache.slab.capacity} {config.approximation}"
        return WithDescriptors(facts, (their_end.detach(),), closes=True)

    def turn(self) -> bool:
        """Called by the loop. True: the next server has taken over, and this one must leave."""
        if self._takeover_socket is None:
            return False
        if self._go_at is None:
            message = _receive(self._takeover_socket)
            if message is None and time.monotonic() < self._since + _PREPARING:
                return False
            if message != GO:
                self._end("it ended before it began, or did not begin in time")
                return False
            self._go_at = time.monotonic()
            self._cache.pause(True)
        if self._cache.why_busy() and time.monotonic() < self._go_at + _SOFT:
            return False
        if self._cache.is_warm:
            return self._hand_over()
        self._refuse("a tier still finds out what it holds; try again later")
        return False

    def stop(self) -> None:
        """This server stops. From now on it no longer knows what engines use whose connections it closes."""
        self._is_stopping = True
        if self._takeover_socket is not None:
            self._refuse("it stops")

    def _hand_over(self) -> bool:
        assert self._takeover_socket is not None
        began = time.monotonic()
        why = self._wait_until_quiet(began)
        try:
            if why:
                self._takeover_socket.send(NO + why.encode())
            else:
                self._send(began)
                if self._wait_until_taken():
                    log.info("lmtier: process %d has taken over; this one leaves", self.pid)
                    return True
                why = "it died, or was not ready in time"
        except (OSError, HandoverFileError) as error:
            why = str(error)
            if self._close_and_check_taken():
                return True
        self._end(why)
        return False

    def _wait_until_quiet(self, began: float) -> str:
        """Let what is in the middle end. Why that is impossible; empty: all is still."""
        while time.monotonic() < began + _LINGER and self._busy_connections():
            for connection in self._busy_connections():
                self._give_turn(connection)
            self._cache.why_busy()
            time.sleep(0.001)
        if any(
            connection.caller.engine_session is not None and connection.caller.is_local
            for connection in self._busy_connections()
        ):
            return "an engine is in the middle of a request"
        if self._is_in_transaction():
            return "a transaction is running"
        while (busy_reason := self._cache.why_busy()) and time.monotonic() < began + _STILL:
            time.sleep(0.001)
        return busy_reason

    def _busy_connections(self) -> list[Connection | HttpConnection]:
        """The connections that cannot go over, or end, at this moment."""
        return [each for each in self._roster if not each.can_hand_over]

    def _send(self, began: float) -> None:
        assert self._takeover_socket is not None
        writer, files, clients = HandoverWriter(self._cache), list[tuple[str, int]](), list[dict[str, Any]]()
        movable = [each for each in self._roster if isinstance(each, Connection) and each.can_hand_over]
        slab_fd, presence = self._cache.slab.fd, self._cache.presence
        assert slab_fd is not None  # it was asked on the Unix socket
        files.append(("slab", slab_fd))
        if presence is not None:
            files.append(("presence", presence.own))
        for spec, tier in zip(self._cache.config.cache_tiers[1:], self._cache.lower, strict=True):
            if tier.tier.lock is not None:
                files.append((f"lock {spec.base_url}", tier.tier.lock))
        files += self._doors.files()
        facts = writer.file.facts
        facts["sessions"], numbers = self._engines.dump_sessions([each.caller for each in movable], writer)
        for each in movable:
            files.append((f"client {len(clients)}", each.fd))
            clients.append(each.dump() | {"session": numbers.get(id(each.caller.engine_session))})
        facts |= {
            "clients": clients,
            "files": [name for name, _ in files],
            "counters": self._cache.metrics.counter_values(),
            "histograms": self._cache.metrics.histogram_values(),
            "report": self._tell_report(),
            "version": __version__,
            "still_since": began,
            "forms": writer.forms.dump(),
        }
        with _sealed(writer.file) as fd:
            self._takeover_socket.setblocking(True)
            self._takeover_socket.settimeout(_PATIENCE)
            socket.send_fds(self._takeover_socket, [BOOKS], [fd.fileno()])
        fds = [fd for _, fd in files]
        for first in range(0, len(fds), _AT_ONCE):
            socket.send_fds(self._takeover_socket, [FILES], fds[first : first + _AT_ONCE])

    def _wait_until_taken(self) -> bool:
        assert self._takeover_socket is not None
        ready = select.poll()
        ready.register(self._takeover_socket, select.POLLIN)
        ready.poll(_PATIENCE * 1000)
        return self._close_and_check_taken()

    def _close_and_check_taken(self) -> bool:
        """From here on the next server cannot take over, unless it has."""
        assert self._takeover_socket is not None
        with suppress(OSError):
            self._takeover_socket.shutdown(socket.SHUT_RD)
        self._takeover_socket.setblocking(False)
        return _receive(self._takeover_socket) == TAKEN

    def _refuse(self, why: str) -> None:
        assert self._takeover_socket is not None
        with suppress(OSError):
            self._takeover_socket.send(NO + why.encode())
        _receive(self._takeover_socket)  # a GO that is not read would take the reason away with it
        self._end(why)

    def _end(self, why: str) -> None:
        assert self._takeover_socket is not None
        log.warning("lmtier: process %d did not take over: %s", self.pid, why)
        self._cache.metrics.takeovers.labels("failed").inc()
        self._takeover_socket.close()
        self._takeover_socket = self._go_at = None
        self._cache.pause(False)


def _receive(sock: socket.socket) -> bytes | None:
    """The next message; empty: the socket has ended. None: there is none yet."""
    try:
        return sock.recv(_MESSAGE)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _sealed(handover_file: HandoverFile) -> FileIO:
    """The handover file in memory, which cannot change any more."""
    file = FileIO(os.memfd_create("lmtier-handover", SHARED), "r+")
    for part in handover_file.pack():
        view = memoryview(part)
        while view:
            view = view[file.write(view) :]
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_WRITE)
    return file


# ---- the next server


@dataclass(slots=True)
class ServerHandover:
    """What the next server begins with."""

    handover: Handover
    listeners: dict[str, int]
    connections: list[tuple[int, dict[str, Any]]]


class TakeoverReceiver:
    """The side of the next server."""

    def __init__(self, path: Path, config: Config) -> None:
        """Asks the server at `path`. ConfigError: it refuses, or these settings do not fit its memory."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with sock:
            sock.settimeout(_PATIENCE)
            try:
                sock.connect(str(path))
                sock.sendall(encode_command(b"LMTIER.TAKEOVER", b"%d" % VERSION))
                replies, fds = ReplyReader(), list[int]()
                while (reply := replies.next()) is INCOMPLETE:
                    data, new_fds, _, _ = socket.recv_fds(sock, _MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
                    fds += new_fds
                    if not data:
                        raise ConnectionResetError("it closed the connection")
                    replies.feed(data)
            except OSError as error:
                raise ConfigError(f"serve: cannot take over from {path}: {error.strerror or error}") from None
        for fd in fds[1:]:
            os.close(fd)
        if not isinstance(reply, bytes) or not fds:
            raise ConfigError(f"serve: the server at {path} refuses to be taken over: {reply}")
        self._takeover_socket = socket.socket(fileno=fds[0])
        self._takeover_socket.settimeout(_SOFT + _STILL + _PATIENCE)
        self.path = path
        try:
            self._check(reply.decode(), config)
        except BaseException:
            self._takeover_socket.close()
            raise

    def _check(self, facts: str, config: Config) -> None:
        """ConfigError: these settings do not fit that server."""
        path = self.path
        self.version, tokens, capacity, approximation = facts.split(" ")
        memory = config.cache_tiers[0].capacity or 0
        for setting, own, theirs in (
            ("chunk_tokens", str(config.chunk_tokens), tokens),
            ("approximation", config.approximation, approximation),
        ):
            if own != theirs:
                raise ConfigError(
                    f"serve: the server at {path} has {setting}={theirs}, and these settings have {own}: its"
                    " chunks would have other names; stop it and start this one instead"
                )
        if memory > int(capacity):
            there, asked = size_text(int(capacity)), size_text(memory)
            raise ConfigError(
                f"serve: the server at {path} has {there} of memory, and these settings ask for {asked}: "
                "memory cannot grow in a takeover; ask for less, or stop it and start this one"
            )

    def receive(self) -> ServerHandover:
        """Let it stand still, and get what it has."""
        try:
            with suppress(BrokenPipeError):  # it has ended; why is read next
                self._takeover_socket.send(GO)
            message, fds, _, _ = socket.recv_fds(self._takeover_socket, _MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
            if message != BOOKS:
                self._takeover_socket.close()
                why = message.removeprefix(NO).decode() or "it ended"
                raise ConfigError(f"serve: the server at {self.path} cannot be taken over now: {why}")
            with os.fdopen(fds[0], "rb") as file:
                if os.fstat(file.fileno()).st_size > MAX_BYTES:
                    raise HandoverFileError("the handover file is too large")
                file.seek(0)  # the other process wrote with the same position
                handover_file = HandoverFile.unpack(file.read())
            names, got = list(handover_file.facts["files"]), list[int]()
            while len(got) < len(names):
                message, new_fds, _, _ = socket.recv_fds(
                    self._takeover_socket, _MESSAGE, _AT_ONCE, socket.MSG_CMSG_CLOEXEC
                )
                if message != FILES:
                    raise ConfigError(f"serve: the server at {self.path} ended while it handed over")
                got += new_fds
        except OSError as error:
            raise ConfigError(f"serve: {self.path}: the server ended while it handed over: {error}") from None
        except (HandoverFileError, KeyError) as error:
            raise ConfigError(f"serve: {self.path}: what the server hands over is wrong: {error}") from None
        return _sorted(handover_file, names, got)

    def commit_takeover(self) -> None:
        """The commit point: from here on this process serves, and the other one does not."""
        try:
            self._takeover_socket.send(TAKEN)
        except OSError:
            raise ConfigError(f"serve: {self.path}: the server did not wait any longer and goes on") from None
        self._takeover_socket.close()


def _sorted(file: HandoverFile, names: Sequence[str], fds: Sequence[int]) -> ServerHandover:
    by_kind: dict[str, dict[str, int]] = {}
    for name, fd in zip(names, fds, strict=True):
        kind, _, label = name.partition(" ")
        by_kind.setdefault(kind, {})[label] = fd
    handover = Handover(
        file, by_kind["slab"][""], by_kind.get("presence", {}).get(""), by_kind.get("lock", {})
    )
    clients = by_kind.get("client", {})
    dumped = [(clients[str(index)], each) for index, each in enumerate(file.facts["clients"])]
    return ServerHandover(handover, by_kind.get("door", {}), dumped)


def restore_metrics(metrics: Metrics, facts: dict[str, Any]) -> float:
    """Go on with the numbers. Returns the seconds for which no server served."""
    metrics.continue_from(facts.get("counters", []), facts.get("histograms", []))
    metrics.takeovers.labels("done").inc()
    seconds = time.monotonic() - float(facts["still_since"])
    metrics.takeover_seconds.set(seconds)
    return seconds
