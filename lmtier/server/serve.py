"""The owner loop: one thread that owns a `Cache` and the sockets of its users, and gives each user turns.

    epoll: a socket is readable or writable ─► connection: commands run, answers are sent
    a tier has finished (eventfd)           ─► cache.step, then commands that waited for a tier go on
    every quarter of a second               ─► close stuck connections, delete expired values, record history

Nothing here blocks. A turn is bounded in bytes, and only the caller that needs a tier waits for it.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from lmtier import forks
from lmtier.config import Config, ServerConfig
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError, log
from lmtier.format.keys import is_value
from lmtier.observe.metrics import Metrics
from lmtier.server import tracing
from lmtier.server.access import Role, WrongTokens
from lmtier.server.commands import Caller, Command, Refused
from lmtier.server.connection import Connection, HttpConnection
from lmtier.server.connection_table import ConnectionTable
from lmtier.server.dispatch import Dispatch
from lmtier.server.engines import EngineVerbs
from lmtier.server.engines.engine_sessions import EngineSession
from lmtier.server.http import Http, routes
from lmtier.server.ledger import Ledger
from lmtier.server.listening import Listener, Listeners, format_address
from lmtier.server.peers import peer_of
from lmtier.server.process import allow_files, tell_systemd
from lmtier.server.redis import redis_table
from lmtier.server.redis.info import info, settings
from lmtier.server.redis.service import ServerCommands
from lmtier.server.report import Report
from lmtier.server.request_log import RequestLog
from lmtier.server.takeover import TakenOver, TakeoverReceiver, TakeoverSender
from lmtier.server.transactions import Transactions
from lmtier.server.values import Values
from lmtier.threads import RestingCollector
from lmtier.tiers.registry import load_tier

if TYPE_CHECKING:
    from lmtier.server.events import Publisher

_TICK = 0.25
_SOON = 0.02  # seconds between steps while a command waits for a tier: deadlines and breakers send no event
_ACCEPTS = 64  # new connections in one turn
_KEPT = 16  # of so many places, one is kept for the Unix socket and for those who have shown a token
_TO_SHOW = 1.0  # seconds that a stranger has at least to show a token, also if others need its place
_RESTING = 0.005  # seconds of CPU in a tick: less is rest
_HURRY = 1.0  # the patience in seconds with unfinished requests, if other requests find no room
_TOO_MANY = b"-ERR max number of clients reached\r\n"


class Server:
    """The constructor opens everything, so that errors are reported at once; `run` serves."""

    def __init__(self, config: Config, serving: ServerConfig, takeover_path: Path | None = None) -> None:
        """`takeover_path`: the Unix socket of the running server from which this one takes over."""
        self.serving = serving
        self._listeners = Listeners(serving)
        self.addresses = self._listeners.addresses
        """The kind and the address of each listener."""
        self.tokens = self._listeners.tokens
        """The tokens of its start."""
        self._max_connections = allow_files(serving.clients)
        self._tracing = tracing.start()
        self._started = time.monotonic()
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        forks.call_in_child(self)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._connections = ConnectionTable()
        self._masks: dict[int, int] = {}
        self._resumable: set[Connection | HttpConnection] = set()
        """The connections whose answer has to wait, or whose turn was cut."""
        self._ledger = Ledger()
        self._ids = count(1)
        self._stop_at: float | None = None
        self._expires = False
        """Some values may have expired."""
        self._alone_since = self._started
        self._ran = 0.0
        """The CPU seconds of this thread that are counted already."""
        self._collector = RestingCollector()
        self._reload = False
        self._log: RequestLog | None = None
        self._publisher: Publisher | None = None
        metrics = Metrics(process=True)
        if config.gpu is not None:
            raise ConfigError(
                f"{config.gpu}: engines have the GPU, not the server: move this tier to their settings"
            )
        if takeover_path is not None and serving.kv_events:
            raise ConfigError(
                "serve: kv_events and --takeover do not go together yet: stop the running server first"
            )
        for spec in config.cache_tiers[1:]:
            load_tier(spec.scheme)  # before another server stands still for this one
        # Before the cache, so that an address in use is reported before any tier is opened.
        predecessor = None if takeover_path is None else TakeoverReceiver(takeover_path, config)
        self._predecessor = predecessor
        self._listeners.open(predecessor.files if predecessor else {})
        try:
            if serving.request_log:
                self._log = RequestLog(serving.request_log, config.chunk_tokens, metrics)
            self.cache = Cache(
                config,
                metrics=metrics,
                wait_until_warm=False,
                shared=bool(serving.unix),
                wake=self._wake,
                is_record=is_value,
                handover=predecessor.handover if predecessor else None,
            )
        except BaseException:
            self._listeners.close(keeps_paths=predecessor is not None)
            if self._log is not None:
                self._log.close()
            raise
        self._values = Values(self.cache)
        self._transactions = Transactions(self._values)
        self._report = Report(
            self.cache,
            self._connections.clients,
            self._started,
            most_clients=serving.clients,
            gpu_hour=serving.gpu_hour,
            name=self._name(),
        )
        self._engines = EngineVerbs(
            self.cache, self._log, self._tracing, self._report, self._transactions.alone
        )
        self._publish()
        self._wrong = WrongTokens(metrics)
        service = ServerCommands(
            tokens=lambda: self._listeners.tokens,
            wrong=self._wrong,
            info=lambda: info(self.cache, serving, self._report, self._connections, self._values),
            settings=lambda: settings(self.cache, serving),
            present=self._connections.connected_clients,
            kill=self._kill,
        )
        table: dict[bytes, Command] = {
            **redis_table(self._values, service),
            **self._transactions.table(),
            **self._engines.table(),
        }
        sender = TakeoverSender(
            self.cache,
            self._engines,
            self._connections,
            self._listeners,
            self._report,
            self._give_turn,
            lambda: self._transactions.are_running,
        )
        table[b"LMTIER.TAKEOVER"] = sender.command()
        service.everything = table
        self._dispatch = Dispatch(self.cache, self._values, self._transactions, table)
        self._http = Http(
            routes(self.cache, self._report),
            self._engines.api,
            lambda: self._listeners.tokens,
            partial(self._wrong.register, "http"),
            (*serving.http_names.replace(",", " ").split(), socket.gethostname()),
        )
        metrics.ready.set_function(lambda: not self._report.why_not_ready())
        if predecessor is not None:
            self._take_over(predecessor)
        metrics.clients_remember.set_function(lambda: self._ledger.total)
        for kind in ("redis", "engine", "http", "console"):
            metrics.clients.labels(kind).set_function(partial(self._connections.of_kind, kind))

    def _name(self) -> str:
        """This host, and the address that a client would name."""
        addresses = dict(reversed(self.addresses))  # the first one of each kind
        where = next((addresses[kind] for kind in ("redis", "unix", "http") if kind in addresses), "")
        return ", ".join(filter(None, (socket.gethostname(), where)))

    def _publish(self) -> None:
        serving = self.serving
        if not serving.kv_events:
            return
        try:
            try:
                from lmtier.server.events import Publisher
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"serve: kv_events needs {error.name}; install it with: pip install 'lmtier[events]'"
                ) from None
            explain = self._engines.explain
            options = serving.kv_events, serving.kv_events_replay, serving.kv_events_topic
            self._publisher = Publisher(self.cache, explain.journal, explain.prompts, *options)
        except BaseException:
            self._finish()
            raise
        self.addresses += self._publisher.address
        for kind, address in self._publisher.address:
            if not address.startswith(("ipc:", "tcp://127.", "tcp://[::1]")):
                log.warning(
                    "lmtier: every host that can reach %s=%s can read keys, and the tokens that engines send",
                    kind,
                    address,
                )

    def _take_over(self, predecessor: TakeoverReceiver) -> None:
        """Go on with the connections and the numbers of another process."""
        facts, connections = predecessor.facts, list[Connection]()
        for number, dumped in enumerate(facts["clients"]):
            sock = socket.socket(fileno=predecessor.files[f"client {number}"])
            kind = "unix" if sock.family == socket.AF_UNIX else "redis"
            connection = self._make_connection(kind, sock, dumped["address"])
            assert isinstance(connection, Connection)
            if self._listeners.tokens:  # if not, who it is decides, by these settings
                connection.caller.role = Role(dumped["role"])
            connection.restore(dumped)
            connections.append(connection)
        self._engines.restore_sessions(predecessor.handover, [each.caller for each in connections])
        for connection in connections:
            self._begin(connection)
            self._update_events(connection)
        self._values.restore_expiries()
        self._report.restore(facts.get("report", {}))
        metrics, seconds = self.cache.metrics, time.monotonic() - float(facts["still_since"])
        metrics.restore(facts.get("metrics", []))
        metrics.takeovers.labels("done").inc()
        metrics.takeover_seconds.set(seconds)
        log.info(
            "lmtier: takes over from a server of version %s with %d chunks and %d connections, after %.0f ms",
            *(facts["version"], len(self.cache.index), len(connections), 1000 * seconds),
        )

    # ---- the loop

    def run(self) -> None:
        """Serve until `stop` or a signal; then finish, and close the cache."""
        if self._predecessor is not None:
            try:
                self._predecessor.commit()
            except BaseException:
                self._exit_after_takeover(os.getpid())
                raise
            self.cache.complete_takeover()
        for fd in self._listeners.by_fd:
            self._epoll.register(fd, select.EPOLLIN)
        tell_systemd("READY=1")
        next_tick, next_pid = 0.0, 0
        self._collector.begin(self._entries())
        self._ran = time.thread_time()
        try:
            while not self._is_done():
                is_work_pending = self._resumable or self._transactions.are_running
                timeout = _SOON if is_work_pending else _TICK
                if (
                    self._transactions.goes_on
                    or self._expires
                    or any(each.needs_turn for each in self._resumable)
                ):
                    timeout = 0
                for fd, mask in self._epoll.poll(timeout):
                    self._event(fd, mask)
                    if self._ledger.is_over_limit:
                        self._close_largest_clients()
                self.cache.step()
                self._transactions.turn()
                if self._expires:
                    self._expires = self._values.expire()
                if self._publisher is not None:
                    self._publisher.turn()
                for connection in [each for each in self._resumable if each.is_open]:
                    connection.read_and_run() if connection.needs_turn else connection.run_and_send()
                    self._update_events(connection)
                    if self._ledger.is_over_limit:
                        self._close_largest_clients()
                if (now := time.monotonic()) >= next_tick:
                    next_tick = now + _TICK
                    self._tick(now)
        except TakenOver as taken_over:
            next_pid = taken_over.pid
        finally:
            self._exit_after_takeover(next_pid) if next_pid else self._finish()

    def stop(self) -> None:
        """Finish running requests within the grace period, then stop. A signal handler may call it."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self.serving.grace
        self._wake()

    def obey_signals(self) -> None:
        """SIGTERM and SIGINT stop the server. SIGHUP reads the tokens and the certificates again."""

        def hang_up(*_: object) -> None:
            self._reload = True
            self._wake()

        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        signal.signal(signal.SIGINT, lambda *_: self.stop())
        signal.signal(signal.SIGHUP, hang_up)

    def forked(self) -> None:
        """In a child: only the parent continues to serve."""
        self._epoll.close()
        bell, self._wake_fd = self._wake_fd, -1
        os.close(bell)

    def _wake(self) -> None:
        with suppress(OSError):  # it is set already, or closed
            os.eventfd_write(self._wake_fd, 1)

    def _event(self, fd: int, mask: int) -> None:
        if fd == self._wake_fd:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
        elif (connection := self._connections.by_fd.get(fd)) is not None:
            if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                connection.read_and_run() if connection.wants_input else self._close_if_hung_up(
                    connection, mask
                )
            if mask & select.EPOLLOUT and connection.is_open:
                connection.run_and_send()
            self._update_events(connection)
        elif (door := self._listeners.by_fd.get(fd)) is not None:
            self._accept(door)

    def _give_turn(self, connection: Connection | HttpConnection) -> None:
        connection.read_and_run() if connection.wants_input else connection.run_and_send()
        self._update_events(connection)

    def _kill(self, number: int) -> bool:
        """Close a client's connection. False: there is none of this number."""
        connection = self._connections.find(number)
        if connection is None:
            return False
        caller = connection.caller
        if caller.engine_session is not None and caller.is_local:
            raise Refused("ERR an engine on this host maps the memory and may be copying: stop the engine")
        connection.close()
        self._update_events(connection)
        return True

    @staticmethod
    def _close_if_hung_up(connection: Connection | HttpConnection, mask: int) -> None:
        """Whether a connection has ended from which nothing is read at present."""
        if mask & (select.EPOLLHUP | select.EPOLLERR):
            connection.close()

    def _update_events(self, connection: Connection | HttpConnection) -> None:
        """After an event of a connection: register the events that it waits for next."""
        fd = connection.fd
        if self._connections.by_fd.get(fd) is not connection:
            return
        if isinstance(connection, Connection) and connection.speaks_http:
            connection = self._speak_http(connection)
        if not connection.is_open:
            self._forget(fd, connection)
            return
        events = (select.EPOLLIN if connection.wants_input else 0) | (
            select.EPOLLOUT if connection.unsent_bytes else 0
        )
        if events != self._masks[fd]:
            self._epoll.modify(fd, events)
            self._masks[fd] = events
        self._update_trust(connection)
        self._ledger.note(connection, connection.held_bytes)
        # An engine that maps the slab cannot be closed and has its own bound. Others do not pay for it.
        if (session := connection.caller.engine_session) is not None and not connection.caller.is_local:
            self._ledger.note(session, session.held_bytes)
        is_resumable = connection.is_waiting or connection.needs_turn
        (self._resumable.add if is_resumable else self._resumable.discard)(connection)

    def _speak_http(self, connection: Connection) -> HttpConnection:
        """Go on with an operator's tool on the port of Redis clients, or on the Unix socket."""
        caller = connection.caller
        caller.kind = "console"  # who watches a server is none of its clients
        successor = HttpConnection.of(connection, self._http.conversation(caller))
        self._connections.replace(connection, successor)
        self._resumable.discard(connection)
        self._ledger.note(connection, 0)
        successor.run_and_send()
        return successor

    def _forget(self, fd: int, connection: Connection | HttpConnection) -> None:
        del self._masks[fd]
        self._connections.remove(connection)
        self._resumable.discard(connection)
        self._ledger.note(connection, 0)
        session: EngineSession | None = connection.caller.engine_session
        if isinstance(connection, Connection):
            self._transactions.drop_client(connection.caller)
            if not self._report.stopping:
                # The server closes it, but the engine may still be copying. So its extents are not used
                # again.
                self._engines.on_disconnect(connection.caller)
        if session is not None and not session.members:
            self._ledger.note(session, 0)

    def _close_largest_clients(self) -> None:
        """Close the clients for which most is remembered, until all of it is well below the bound."""
        connection_of = {each.caller: each for each in self._connections}
        for holder in self._ledger.largest():
            if self._ledger.is_well_below_limit:
                return
            callers = holder.members if isinstance(holder, EngineSession) else (holder.caller,)  # type: ignore[attr-defined]
            for connection in [connection_of[caller] for caller in callers if caller in connection_of]:
                if _maps_slab(connection):
                    continue
                address = connection.caller.address
                log.warning("lmtier: %s was closed: it makes the server remember most", address)
                connection.close()
                self._update_events(connection)
                self.cache.metrics.clients_shed.inc()

    def _entries(self) -> int:
        return sum(map(len, self.cache.indexes.values()))

    def _tick(self, now: float) -> None:
        patience = self.serving.patience
        if now - max(self.cache.memory.no_room_at, self._values.no_room_at) < _HURRY:
            patience = min(patience, _HURRY)
        for connection in self._connections:
            # A client may pause in the middle of MULTI, as long as no request needs the room of its values.
            may_be_idle = patience > _HURRY or connection.caller.multi_queue is None
            # A client without a token must not keep a place for ever that others need.
            is_busy = connection.is_receiving() or not may_be_idle or connection.is_unauthenticated
            if not _maps_slab(connection) and connection.is_stuck(now, patience, is_busy):
                address = connection.caller.address
                if connection.is_mid_request:
                    log.warning("lmtier: %s stopped in the middle of a request and was closed", address)
                connection.close()
                self._update_events(connection)
        for fd in self._listeners.by_fd:
            with suppress(FileExistsError):  # it may have been unregistered when no file could be opened
                self._epoll.register(fd, select.EPOLLIN)
        self._expires = True
        self._connections.sample()
        # Here, because only the thread itself can read its CPU time.
        counted, self._ran = self._ran, time.thread_time()
        self.cache.metrics.owner_seconds.inc(self._ran - counted)
        if self._ran - counted < _RESTING:
            self._collector.rest(self._entries())
        linger = self.serving.linger
        if linger <= 0 or self._connections.of_kind("engine"):  # to count thousands of clients takes a while
            self._alone_since = now
        elif now - self._alone_since > linger:
            log.info("lmtier: there was no engine for %.0f s", linger)
            self.stop()
        self._report.sample()
        if self._reload:
            self._reload = False
            self._listeners.read_secrets_again()

    # ---- the end

    def _is_done(self) -> bool:
        if self._stop_at is None:
            return False
        if not self._report.stopping:
            self._report.stopping = True
            tell_systemd("STOPPING=1")
            log.info("lmtier: stopping; running requests have %.0f s to finish", self.serving.grace)
            self._close_doors()
        is_past_grace = time.monotonic() > self._stop_at
        for connection in self._connections:
            if connection.is_idle or is_past_grace:
                connection.close()
                self._update_events(connection)
        return is_past_grace or not (self._connections or self._transactions.are_running)

    def _close_doors(self) -> None:
        for fd in self._listeners.by_fd:
            with suppress(OSError):
                self._epoll.unregister(fd)
        self._listeners.close()

    def _exit_after_takeover(self, pid: int) -> None:
        """Another process serves: end without a change to what is its own now. `pid`: the main process."""
        tell_systemd(f"STOPPING=1\nMAINPID={pid}")
        self._listeners.close(keeps_paths=True)
        for connection in self._connections:
            connection.sock.close()
        self.cache.close_after_handover()
        self._close_rest(1.0)

    def _finish(self) -> None:
        self._close_doors()
        for connection in self._connections:
            connection.close()
            self._update_events(connection)
        self._transactions.close()
        deadline = max(self._stop_at or 0.0, time.monotonic() + 1.0)
        self.cache.close(timeout=deadline - time.monotonic())
        self._close_rest(deadline - time.monotonic())

    def _close_rest(self, seconds: float) -> None:
        if self._publisher is not None:
            self._publisher.close()
        if self._tracing is not None:
            self._tracing.close(seconds)
        if self._log is not None:
            self._log.close()
        self._epoll.close()
        bell, self._wake_fd = self._wake_fd, -1  # a thread that hangs in its storage may still use it
        os.close(bell)

    # ---- new connections

    def _accept(self, door: Listener) -> None:
        for _ in range(_ACCEPTS):
            if self._must_wait(door.kind):
                self._epoll.unregister(door.sock.fileno())  # until the next tick
                return
            try:
                sock, address = door.sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.error("lmtier: cannot accept new connections for now: %s", error.strerror)
                    self._epoll.unregister(door.sock.fileno())  # until the next tick
                return
            self._connections.accepted += 1
            if not self._find_place(door.kind):
                log.warning(
                    "lmtier: %s was refused, because %d clients are connected: close some, or raise "
                    "serve.clients",
                    *(format_address(address) or "a client", len(self._connections)),
                )
                with suppress(OSError):
                    sock.setblocking(False)
                    sock.send(_TOO_MANY)
                sock.close()
                continue
            try:
                sock = sock if door.kind == "unix" else self._listeners.secured(sock)
                self._begin(self._make_connection(door.kind, sock, format_address(address)))
            except OSError as error:  # it was closed again
                log.debug("lmtier: %s disconnected before it was served: %s", address, error)
                sock.close()

    def _is_full(self, kind: str) -> bool:
        """Whether all places are taken.

        Some are kept for the Unix socket and for those who have shown a token.
        """
        limit, untrusted = self._max_connections, len(self._connections.unknown)
        reserved = max(limit > 1, limit // _KEPT)
        return len(self._connections) >= limit or (kind != "unix" and untrusted >= limit - reserved)

    def _must_wait(self, kind: str) -> bool:
        """Whether new clients wait in the kernel's queue, so that those before them can show their tokens."""
        stranger = self._connections.oldest_unauthenticated
        if kind == "unix" or stranger is None or not self._is_full(kind):
            return False
        return time.monotonic() - stranger.opened_at < _TO_SHOW

    def _find_place(self, kind: str) -> bool:
        """Whether a new client gets a place. If all are taken, the stranger that came first loses its own."""
        if not self._is_full(kind):
            return True
        stranger = self._connections.oldest_unauthenticated
        if stranger is None:
            return False
        log.warning(
            "lmtier: %s was closed, because others need its place and it has shown no token",
            stranger.caller.address,
        )
        stranger.close()
        self._update_events(stranger)
        return True

    def _make_connection(self, kind: str, sock: socket.socket, address: str) -> Connection | HttpConnection:
        caller = Caller(next(self._ids), address, foreign_reason=self._listeners.why_foreign(kind, sock))
        if kind == "unix":
            caller.address, caller.is_local, caller.peer = address or kind, True, peer_of(sock)
        forks.close_in_child(sock)
        if kind == "http":
            caller.kind, caller.role = kind, Role.NONE  # its token comes with each request
            return HttpConnection(sock, self._http.conversation(caller), caller)
        caller.role = self._listeners.tokens.role_without_token(
            caller.foreign_reason, is_local=caller.is_local
        )
        return Connection(self._dispatch, sock, caller)

    def _begin(self, connection: Connection | HttpConnection) -> None:
        self._connections.add(connection)
        self._masks[connection.fd] = select.EPOLLIN
        self._update_trust(connection)
        self._epoll.register(connection.fd, select.EPOLLIN)

    def _update_trust(self, connection: Connection | HttpConnection) -> None:
        """Note what the client has shown until now."""
        caller = connection.caller
        has_shown = caller.role > self._listeners.tokens.role_without_token(caller.foreign_reason)
        self._connections.set_trust(connection, is_known=bool(caller.role) and (caller.is_local or has_shown))


def _maps_slab(connection: Connection | HttpConnection) -> bool:
    """Whether it must not be closed: its extents stay until it releases them, and it closes its socket then.

    An engine that does not map the slab has no extents to release.
    """
    return connection.caller.engine_session is not None and connection.caller.is_local
