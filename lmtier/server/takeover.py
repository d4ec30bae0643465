"""Taking over: the next server gets memory, facts, listeners and connections of this one.

    next server                                      this server
    LMTIER.TAKEOVER and its settings          ─►     begins no writes to tiers; once they rest, stands still
                                              ◄─     the handover file, and all descriptors
    enters the facts, opens its tiers; TAKEN  ─►     leaves. It closes nothing for others, writes nothing

TAKEN is the commit point: the next server sends it before it serves its first request. Until then this
server has changed nothing. If the connection ends without it, or it takes too long, this server goes on; a
TAKEN that comes later finds the connection closed. So there is never more than one server that serves.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lmtier._version import __version__
from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.handover import Handover, HandoverWriter
from lmtier.errors import ConfigError, log, size_text
from lmtier.format.handover_file import VERSION, HandoverFileError, unpack
from lmtier.server.arguments import read_number, read_text
from lmtier.server.commands import OK, Argument, Caller, Command, PendingAnswer, Refused
from lmtier.server.connection import Connection, HttpConnection
from lmtier.server.connection_table import ConnectionTable
from lmtier.server.engines import EngineVerbs
from lmtier.server.listening import Listeners
from lmtier.server.report import Report
from lmtier.wire.reply_reader import ReplyReader
from lmtier.wire.resp import INCOMPLETE, Error, encode, encode_command
from lmtier.wire.verb_table import VERBS

_TAKEN = b"TAKEN"
_AT_ONCE = 200  # descriptors in a message; the kernel allows 253
_SOFT = 5.0  # seconds in which writes to tiers may end while the server still serves
_STILL = 1.0  # seconds in which reads may end while it stands still
_LINGER = 0.05  # seconds in which clients that are in the middle of a value may finish
_PATIENCE = 5.0  # seconds in which the next server must be ready


class TakenOver(Exception):
    """Another process serves from now on: this one must leave, and change nothing."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pid = pid


class TakeoverSender:
    """The side of the server that runs now."""

    def __init__(
        self,
        cache: Cache,
        engines: EngineVerbs,
        roster: ConnectionTable,
        doors: Listeners,
        report: Report,
        give_turn: Callable[[Connection | HttpConnection], None],
        is_in_transaction: Callable[[], bool],
    ) -> None:
        self._cache, self._engines = cache, engines
        self._roster, self._doors, self._report = roster, doors, report
        self._give_turn, self._is_in_transaction = give_turn, is_in_transaction
        self._is_under_way = False

    def command(self) -> Command:
        return Command(self._answer, VERBS["TAKEOVER"].arity, ("admin",))

    def _answer(self, caller: Caller, arguments: list[Argument]) -> PendingAnswer:
        """Raises TakenOver out of the owner's loop: nothing else may run then."""
        if not caller.is_local or caller.peer is None or caller.peer[1] != os.geteuid():
            raise Refused("NOPERM only the user of this server can take over, on its Unix socket")
        self._check_settings(arguments)
        if self._is_under_way:
            raise Refused("ERR another server is taking over now")
        why, began = "it ended", time.monotonic()
        self._is_under_way = True
        self._cache.pause(True)
        try:
            while self._cache.why_busy() and time.monotonic() < began + _SOFT and not self._report.stopping:
                yield None
            self._hand_over(caller)
        except (Refused, HandoverFileError) as error:
            why = str(error).removeprefix("ERR ")
            raise Refused(f"ERR {why}") from None
        except TakenOver:
            log.info("lmtier: process %d has taken over; this one leaves", caller.peer[0])
            why = ""
            raise
        finally:
            if why:
                log.warning("lmtier: process %d did not take over: %s", caller.peer[0], why)
                self._cache.metrics.takeovers.labels("failed").inc()
                self._cache.pause(False)
                self._is_under_way = False

    def _check_settings(self, arguments: list[Argument]) -> None:
        """Refuse settings that do not fit, before this server stands still."""
        if read_number(arguments[1], "a version of the handover file") != VERSION:
            raise Refused(f"ERR this server hands over files of version {VERSION}; restart it instead")
        config, capacity = self._cache.config, self._cache.slab.capacity
        tokens, approximation, memory = map(read_text, arguments[2:])
        for setting, own, theirs in (
            ("chunk_tokens", str(config.chunk_tokens), tokens),
            ("approximation", config.approximation, approximation),
        ):
            if own != theirs:
                raise Refused(
                    f"ERR it has {setting}={own}, and these settings have {theirs}: its chunks would have "
                    "other names; stop it and start this one instead"
                )
        if (asked := read_number(memory.encode(), "a capacity")) > capacity:
            raise Refused(
                f"ERR it has {size_text(capacity)} of memory, and these settings ask for {size_text(asked)}: "
                "memory cannot grow in a takeover; ask for less, or stop it and start this one"
            )

    def _hand_over(self, caller: Caller) -> NoReturn:
        if self._report.stopping:
            raise Refused("it stops")  # it no longer knows what engines use whose connections it closes
        if not self._cache.is_warm:
            raise Refused("a tier still finds out what it holds; try again later")
        asker, began = self._roster.find(caller.id), time.monotonic()
        assert isinstance(asker, Connection)
        assert caller.peer is not None
        self._wait_until_quiet(asker, began)
        file, fds = self._dump(asker, began)
        caller.closing, sock = True, asker.sock
        with suppress(OSError):
            sock.settimeout(_PATIENCE)
            sock.sendall(encode(file, False))
            for first in range(0, len(fds), _AT_ONCE):
                socket.send_fds(sock, [encode(OK, False)], fds[first : first + _AT_ONCE])
            sock.recv(1, socket.MSG_PEEK)
        with suppress(OSError):  # from here on the next server cannot take over, unless it has
            sock.shutdown(socket.SHUT_RD)
        sock.setblocking(False)
        with suppress(OSError):
            if sock.recv(len(_TAKEN)) == _TAKEN:
                raise TakenOver(caller.peer[0])
        raise Refused("it died, or was not ready in time")

    def _wait_until_quiet(self, asker: Connection, began: float) -> None:
        """Let what is in the middle end. Refused: that is impossible now."""

        def busy() -> list[Connection | HttpConnection]:
            return [each for each in self._roster if each is not asker and not each.can_hand_over]

        while (connections := busy()) and time.monotonic() < began + _LINGER:
            for connection in connections:
                self._give_turn(connection)
            self._cache.why_busy()
            time.sleep(0.001)
        if any(each.caller.engine_session is not None and each.caller.is_local for each in connections):
            raise Refused("an engine is in the middle of a request")
        if self._is_in_transaction():
            raise Refused("a transaction is running")
        while (why := self._cache.why_busy()) and time.monotonic() < began + _STILL:
            time.sleep(0.001)
        if why:
            raise Refused(why)

    def _dump(self, asker: Connection, began: float) -> tuple[bytes, list[int]]:
        """The handover file, and the descriptors that it names."""
        cache, writer, files = self._cache, HandoverWriter(self._cache), dict[str, int]()
        assert cache.slab.fd is not None  # it was asked on the Unix socket
        files["slab"] = cache.slab.fd
        if cache.presence is not None:
            files["presence"] = cache.presence.own
        for spec, tier in zip(cache.config.cache_tiers[1:], cache.lower, strict=True):
            if tier.tier.lock is not None:
                files[f"lock {spec.base_url}"] = tier.tier.lock
        files |= self._doors.files()
        movable = [
            each
            for each in self._roster
            if isinstance(each, Connection) and each is not asker and each.can_hand_over
        ]
        self._engines.dump_sessions([each.caller for each in movable], writer)
        files |= {f"client {number}": each.fd for number, each in enumerate(movable)}
        writer.facts |= {
            "clients": [each.dump() for each in movable],
            "files": list(files),
            "metrics": cache.metrics.dump(),
            "report": self._report.dump(),
            "version": __version__,
            "still_since": began,
        }
        return writer.pack(), list(files.values())


# ---- the next server


class TakeoverReceiver:
    """The side of the next server. What it has got is open to that server."""

    def __init__(self, path: Path, config: Config) -> None:
        """Let the server at `path` stand still, and get what it has. ConfigError: it refuses, or fails."""
        self._path, self._socket = path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        settings = config.chunk_tokens, config.approximation, config.cache_tiers[0].capacity or 0
        try:
            self._socket.settimeout(_SOFT + _STILL + _PATIENCE)
            self._socket.connect(str(path))
            self._socket.sendall(encode_command("LMTIER.TAKEOVER", VERSION, *settings))
            self._receive()
        except BaseException as error:
            self._socket.close()
            if isinstance(error, OSError):
                raise ConfigError(f"serve: cannot take over from {path}: {error.strerror or error}") from None
            if isinstance(error, HandoverFileError | KeyError | ValueError):
                raise ConfigError(f"serve: {path}: what the server hands over is wrong: {error}") from None
            raise

    def _receive(self) -> None:
        replies, fds = ReplyReader(limit=sys.maxsize), list[int]()

        def receive() -> Any:
            while (reply := replies.next()) is INCOMPLETE:
                data, new, _, _ = socket.recv_fds(self._socket, 1 << 20, _AT_ONCE, socket.MSG_CMSG_CLOEXEC)
                fds.extend(new)
                if not data:
                    raise ConnectionResetError("it ended")
                replies.feed(data)
            return reply

        if isinstance(file := receive(), Error):
            raise ConfigError(f"serve: the server at {self._path} cannot be taken over now: {file.sentence}")
        self.facts = unpack(file)
        names = self.facts["files"]
        while len(fds) < len(names):
            receive()
        self.files = dict(zip(names, fds, strict=True))
        """Descriptors: slab, presence, lock PLACE, door KIND ADDRESS, client NUMBER."""
        locks = {name[5:]: fd for name, fd in self.files.items() if name.startswith("lock ")}
        self.handover = Handover(self.facts, self.files["slab"], self.files.get("presence"), locks)

    def commit(self) -> None:
        """The commit point: from here on this process serves, and the other one does not."""
        try:
            self._socket.send(_TAKEN)
        except OSError:
            raise ConfigError(
                f"serve: {self._path}: the server did not wait any longer and goes on"
            ) from None
        self._socket.close()
