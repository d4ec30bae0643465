"""The owner loop: one thread that owns a `Cache`, the sockets of its users, and everybody's turn.

    epoll says who can be read or written ─► connection: commands run, answers are sent
    a tier has finished (eventfd)         ─► cache.step, then those who waited for a tier go on
    a quarter of a second is over         ─► the stuck are closed, the expired forgotten, history is kept

Nothing here blocks: a turn is bounded in bytes, and whatever a tier must do is waited for by its asker alone.
"""

from __future__ import annotations

import errno
import gc
import ipaddress
import json
import logging
import os
import resource
import select
import signal
import socket
import ssl
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtier import __version__, forks, tracing
from lmtier.cache import Cache
from lmtier.config import TOKEN_VARIABLE, Config, Serving, host_and_port, without_login
from lmtier.errors import ConfigError
from lmtier.metrics import Metrics
from lmtier.server.commands import Argument, Caller, Command, Nothing, Refused
from lmtier.server.connection import Connection, HttpConnection
from lmtier.server.engines import Engines
from lmtier.server.http import Http, routes
from lmtier.server.redis import REDIS_VERSION, Redis
from lmtier.server.report import Client, History, Report
from lmtier.server.request_log import RequestLog
from lmtier.server.resp import DROP, Error, ProtocolError
from lmtier.server.transactions import Transactions
from lmtier.server.values import Values

if TYPE_CHECKING:
    from lmtier.server.events import Publisher

log = logging.getLogger("lmtier")

_TICK = 0.25
_SOON = 0.02  # while somebody waits for a tier: deadlines and breakers wake nobody
_ACCEPTS = 64  # new connections in one turn
_HURRY = 1.0  # the patience with those in the middle of something, when others find no room
_UNTRUSTED_ARGS = 10
_UNTRUSTED_BYTES = 16 << 10

_NO_AUTH = Error("NOAUTH Authentication required.")
_LOADING = Error("LOADING lmtier is reading what its tiers hold")
_TOO_MANY = b"-ERR max number of clients reached\r\n"


def give_way() -> None:
    """An engine that tells us something keeps its core: woken, we take one that is free.

    By default the kernel may run us in its place, in the middle of its step, though it waits for nothing.
    What somebody gave us instead of the default (chrt) stays; threads inherit it.
    """
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Server:
    """Opens everything in its constructor, so that whatever is wrong is said at once; `run` serves."""

    def __init__(self, config: Config, serving: Serving) -> None:
        self.serving = serving
        self._token = read_token(serving)
        _check_exposure(serving, self._token)
        _allow_files(serving.clients)
        self._tls = _tls(serving)
        self._tracing = tracing.start()
        self._started = time.monotonic()
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        forks.tell(self)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._listeners: dict[int, tuple[socket.socket, Callable[[socket.socket, str], None]]] = {}
        self._connections: dict[int, Connection | HttpConnection] = {}
        self._masks: dict[int, int] = {}
        self._waiting: set[Connection] = set()
        """Those whose command waits for a tier, or whose turn was cut."""
        self._ids = count(1)
        self._accepted = 0
        self._asked = 0  # by those who left
        self._stop_at: float | None = None
        self._alone_since = self._started
        self._ran = 0.0
        """CPU seconds of this thread that are counted."""
        self._reload = False
        self.where: list[tuple[str, str]] = []
        """What is listened for, and at which address."""
        self._log: RequestLog | None = None
        self._publisher: Publisher | None = None
        metrics = Metrics(process=True)
        if config.gpu is not None:
            raise ConfigError(
                f"tier {without_login(config.gpu.url)!r}: engines have the GPU, not the server: put it into "
                "their settings"
            )
        self._listen()  # before the cache: an address in use is said before the tiers are touched
        try:
            if serving.request_log:
                self._log = RequestLog(serving.request_log, config.chunk_tokens, metrics)
            self.cache = Cache(
                config, metrics=metrics, wait_until_warm=False, shared=bool(serving.unix), wake=self._ring
            )
        except BaseException:
            self._close_listeners()
            if self._log is not None:
                self._log.close()
            raise
        self._values = Values(self.cache)
        self._transactions = Transactions(self._values)
        self._engines = Engines(self.cache, self._log, self._tracing)
        self._publish()
        self._redis = Redis(
            self._values,
            token=lambda: self._token,
            info=self._info,
            settings=self._settings,
            callers=lambda: [each.caller for each in self._connections.values()],
        )
        self._table: dict[bytes, Command] = {
            **self._redis.table(),
            **self._transactions.table(),
            **self._engines.table(),
            b"LMTIER.REPORT": Command(lambda *_: json.dumps(self._report.snapshot()), 1, ("readonly",)),
            b"LMTIER.HISTORY": Command(lambda *_: self._history.to_json(), 1, ("readonly",)),
        }
        self._redis.everything = self._table
        self._report = Report(self.cache, self._clients, self._started)
        self._history = History()
        self._pages = routes(self.cache, self._report, self._history, self._engines.explain)
        metrics.ready.set_function(lambda: not self._report.why_not_ready())
        for kind in ("redis", "engine", "http"):
            metrics.clients.labels(kind).set_function(partial(self._connected, kind))

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
            places = serving.kv_events, serving.kv_events_replay, serving.kv_events_topic
            self._publisher = Publisher(self.cache, self._engines.explain.prompts, *places)
        except BaseException:
            self._finish()
            raise
        self.where += self._publisher.where
        for what, address in self._publisher.where:
            if not address.startswith(("ipc:", "tcp://127.", "tcp://[::1]")):
                log.warning(
                    "lmtier: %s=%s is for whoever can reach it: keys, and the tokens that engines told",
                    what,
                    address,
                )

    # ---- the loop

    def run(self) -> None:
        """Serve until told to stop, by `stop` or a signal; then finish, and close the cache."""
        for listener in self._listeners:
            self._epoll.register(listener, select.EPOLLIN)
        _tell_systemd("READY=1")
        tick = 0.0
        self._ran = time.thread_time()
        try:
            while not self._is_done():
                timeout = _SOON if self._waiting or self._transactions.are_running else _TICK
                if self._transactions.goes_on or any(each.is_cut for each in self._waiting):
                    timeout = 0
                for fd, mask in self._epoll.poll(timeout):
                    self._event(fd, mask)
                self.cache.step()
                self._transactions.turn()
                if self._publisher is not None:
                    self._publisher.turn()
                for connection in [each for each in self._waiting if each.is_open]:
                    connection.hear() if connection.is_cut else connection.go_on()
                    self._look(connection)
                if (now := time.monotonic()) >= tick:
                    tick = now + _TICK
                    self._look_after(now)
        finally:
            self._finish()

    def stop(self) -> None:
        """Finish what has begun, as far as the grace period goes. May be called by a signal's handler."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self.serving.grace
        self._ring()

    def obey_signals(self) -> None:
        """SIGTERM and SIGINT stop; SIGHUP reads the token and the certificates again."""

        def hang_up(*_: object) -> None:
            self._reload = True
            self._ring()

        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        signal.signal(signal.SIGINT, lambda *_: self.stop())
        signal.signal(signal.SIGHUP, hang_up)

    def forked(self) -> None:
        """In a child: its parent goes on serving."""
        self._epoll.close()
        bell, self._bell = self._bell, -1
        os.close(bell)

    def _ring(self) -> None:
        with suppress(OSError):  # it rings already, or nobody is there any more
            os.eventfd_write(self._bell, 1)

    def _event(self, fd: int, mask: int) -> None:
        if fd == self._bell:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
        elif fd in self._listeners:
            self._accept(*self._listeners[fd])
        elif (connection := self._connections.get(fd)) is not None:
            if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                connection.hear() if connection.wants_input else self._died(connection, mask)
            if mask & select.EPOLLOUT and connection.is_open:
                connection.go_on()
            self._look(connection)

    @staticmethod
    def _died(connection: Connection | HttpConnection, mask: int) -> None:
        """Nothing is read of it now, so this is how its end is learned."""
        if mask & (select.EPOLLHUP | select.EPOLLERR):
            connection.close()

    def _look(self, connection: Connection | HttpConnection) -> None:
        """After whatever happened to a connection: what does it want to hear of next?"""
        fd = connection.fd
        if self._connections.get(fd) is not connection:
            return
        if not connection.is_open:
            self._forget(fd, connection)
            return
        mask = (select.EPOLLIN if connection.wants_input else 0) | (
            select.EPOLLOUT if connection.waits else 0
        )
        if mask != self._masks[fd]:
            self._epoll.modify(fd, mask)
            self._masks[fd] = mask
        if isinstance(connection, Connection):
            goes_on = connection.is_waiting or connection.is_cut
            (self._waiting.add if goes_on else self._waiting.discard)(connection)

    def _forget(self, fd: int, connection: Connection | HttpConnection) -> None:
        del self._masks[fd], self._connections[fd]
        self._asked += connection.caller.asked
        if isinstance(connection, Connection):
            self._waiting.discard(connection)
            self._transactions.gone(connection.caller)
            if not self._report.stopping:
                # Then it is we who close: an engine may still be copying, so nothing of its is used again.
                self._engines.gone(connection.caller)

    def _look_after(self, now: float) -> None:
        patience = self.serving.patience
        if now - self.cache.no_room_at < _HURRY:
            patience = min(patience, _HURRY)
        for connection in list(self._connections.values()):
            # Never an engine: what it holds must stay until it has let go, and it has closed its socket then.
            # One that does not see the slab has no bytes to let go of.
            is_engine = connection.caller.session is not None and connection.caller.is_local
            # Who thinks in the middle of MULTI may, as long as nobody needs the room of its values.
            is_idle = patience > _HURRY or connection.caller.queue is None
            is_busy = connection.is_in_the_middle() or not is_idle
            if not is_engine and connection.is_stuck(now, patience, is_busy):
                log.warning("lmtier: %s stopped in the middle and was closed", connection.caller.address)
                connection.close()
                self._look(connection)
        for fd in self._listeners.keys() - self._masks.keys():
            with suppress(FileExistsError):  # it may have been put aside for want of files
                self._epoll.register(fd, select.EPOLLIN)
        self._values.expire()
        # Here, because only the thread itself can ask.
        ran, self._ran = self._ran, time.thread_time()
        self.cache.metrics.owner_seconds.inc(self._ran - ran)
        # What lives by now is no garbage. To look for some among a million entries takes a second.
        gc.freeze()
        if self._connections:
            self._alone_since = now
        elif 0 < self.serving.linger < now - self._alone_since:
            log.info("lmtier: nobody was connected for %.0f s", self.serving.linger)
            self.stop()
        if not self._history.due():
            self._history.sample(self._report.snapshot())
        if self._reload:
            self._reload = False
            self._read_secrets_again()

    # ---- the end

    def _is_done(self) -> bool:
        if self._stop_at is None:
            return False
        if not self._report.stopping:
            self._report.stopping = True
            _tell_systemd("STOPPING=1")
            log.info("lmtier: stopping; what has begun may take %.0f s", self.serving.grace)
            self._close_listeners()
        late = time.monotonic() > self._stop_at
        for connection in list(self._connections.values()):
            if connection.is_idle or late:
                connection.close()
                self._look(connection)
        return late or not (self._connections or self._transactions.are_running)

    def _close_listeners(self) -> None:
        for fd, (listener, _) in self._listeners.items():
            with suppress(OSError):
                self._epoll.unregister(fd)
            if listener.family == socket.AF_UNIX:
                with suppress(OSError):
                    os.unlink(listener.getsockname())
            listener.close()
        self._listeners.clear()

    def _finish(self) -> None:
        self._close_listeners()
        for connection in list(self._connections.values()):
            connection.close()
            self._look(connection)
        self._transactions.close()
        until = max(self._stop_at or 0.0, time.monotonic() + 1.0)
        self.cache.close(timeout=until - time.monotonic())
        if self._publisher is not None:
            self._publisher.close()
        if self._tracing is not None:
            self._tracing.close(until - time.monotonic())
        if self._log is not None:
            self._log.close()
        self._epoll.close()
        bell, self._bell = self._bell, -1  # a thread that hangs in its storage may still want to ring
        os.close(bell)

    # ---- who comes

    def _listen(self) -> None:
        serving = self.serving
        try:
            if serving.listen:
                self._add(_tcp(serving.listen), self._welcome, "redis")
            if serving.http:
                self._add(_tcp(serving.http), self._welcome_http, "http")
            if serving.unix:
                self._add(_unix(Path(serving.unix)), self._welcome_local, "unix")
        except BaseException:
            self._close_listeners()
            raise

    def _add(self, listener: socket.socket, welcome: Callable[[socket.socket, str], None], what: str) -> None:
        forks.close_in_child(listener)
        self._listeners[listener.fileno()] = (listener, welcome)
        self.where.append((what, _written(listener.getsockname())))

    def _accept(self, listener: socket.socket, welcome: Callable[[socket.socket, str], None]) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, address = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.error("lmtier: no new connection for now: %s", error.strerror)
                    self._epoll.unregister(listener.fileno())  # until the next tick
                return
            self._accepted += 1
            if len(self._connections) >= self.serving.clients:
                with suppress(OSError):
                    sock.setblocking(False)
                    sock.send(_TOO_MANY)
                sock.close()
                continue
            try:
                welcome(sock, _written(address))
            except OSError as error:  # it has gone again
                log.debug("lmtier: %s went before it was served: %s", address, error)
                sock.close()

    def _welcome(self, sock: socket.socket, address: str) -> None:
        is_trusted = self._token is None
        self._begin(
            Connection(self, self._secured(sock), Caller(next(self._ids), address, is_trusted=is_trusted))
        )

    def _welcome_local(self, sock: socket.socket, address: str) -> None:
        forks.close_in_child(sock)
        caller = Caller(next(self._ids), address or "unix", is_local=True)
        self._begin(Connection(self, sock, caller))

    def _welcome_http(self, sock: socket.socket, address: str) -> None:
        caller = Caller(next(self._ids), address, kind="http")
        conversation = Http(self._pages, self._token).conversation()
        self._begin(HttpConnection(self._secured(sock), conversation, caller))

    def _secured(self, sock: socket.socket) -> socket.socket:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setblocking(False)
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        forks.close_in_child(sock)
        return sock

    def _begin(self, connection: Connection | HttpConnection) -> None:
        self._connections[connection.fd] = connection
        self._masks[connection.fd] = select.EPOLLIN
        self._epoll.register(connection.fd, select.EPOLLIN)

    # ---- what they ask (the connections' host)

    def place(self, caller: Caller, args: list[Argument], argc: int, length: int) -> memoryview | None:
        if not caller.is_trusted and (argc > _UNTRUSTED_ARGS or length > _UNTRUSTED_BYTES):
            raise ProtocolError(
                "unauthenticated " + ("bulk" if length > _UNTRUSTED_BYTES else "multibulk") + " length"
            )
        command = self._table.get(bytes(args[0]).upper())
        if command is None or len(args) not in command.payloads:
            return None
        if not caller.is_trusted or not self.cache.is_warm:
            return DROP  # and the command is refused when it is complete
        draft = self._values.draft(length)
        if draft is None:
            return DROP
        caller.drafts.append(draft)
        return draft.view

    def drop_drafts(self, caller: Caller) -> None:
        while caller.drafts:
            self._values.drop(caller.drafts.pop())

    def answer(self, caller: Caller, args: list[Argument]) -> Any:
        name = bytes(args[0]).upper()
        caller.asked += 1
        command = self._table.get(name)
        if command is None:
            if name in (b"POST", b"HOST:"):  # a browser was made to speak to us
                log.warning("lmtier: %s sends HTTP to the Redis port and was closed", caller.address)
                caller.closing = True
                return Nothing
            self._transactions.spoil(caller)
            return _unknown(args)
        caller.last = name.decode().lower()
        if (refused := self._refusal(caller, name, command, args)) is not None:
            self._transactions.spoil(caller)
            return refused
        if self._transactions.takes(caller, name):
            return self._transactions.keep(caller, name, command, args)
        if name == b"RESET":
            self._transactions.gone(caller)
        try:
            return self._transactions.behind(caller, command, args) or command.handler(caller, args)
        except Refused as error:
            return error.error

    def _refusal(self, caller: Caller, name: bytes, command: Command, args: list[Argument]) -> Error | None:
        """Why a command is not even looked at."""
        if len(args) != command.arity if command.arity > 0 else len(args) < -command.arity:
            wrong = f"wrong number of arguments for '{caller.last}' command"
            if name == b"EXEC" and caller.queue is not None:
                self._transactions.gone(caller)
                return Error(f"EXECABORT Transaction discarded because of: {wrong}")
            return Error(f"ERR {wrong}")
        if len(args) > command.most:
            return Error(f"ERR '{caller.last}' takes {command.most} arguments at most here")
        if not caller.is_trusted and "no_auth" not in command.flags:
            return _NO_AUTH
        if "loading" not in command.flags and not self.cache.is_warm and not name.startswith(b"LMTIER."):
            return _LOADING
        return None

    # ---- what is told

    def _connected(self, kind: str) -> int:
        return sum(each.caller.kind == kind for each in self._connections.values())

    def _clients(self) -> list[Client]:
        now = time.monotonic()
        return [
            {
                "id": each.caller.id,
                "name": each.caller.name,
                "kind": each.caller.kind,
                "address": each.caller.address,
                "age": now - each.began,
                "asked": each.caller.asked,
                "received": each.received,
                "sent": each.sent,
            }
            for each in self._connections.values()
        ]

    def _info(self) -> Mapping[str, Mapping[str, object]]:
        now = self._report.snapshot()
        value = self.cache.metrics.value
        asked = self._asked + sum(each.caller.asked for each in self._connections.values())
        port = host_and_port(self.serving.listen, "")[1] if self.serving.listen else 0
        keys = len(self._values)
        evicted = sum(tier["evictions"] for tier in now["tiers"])
        return {
            "Server": {
                "redis_version": REDIS_VERSION,
                "redis_mode": "standalone",
                "lmtier_version": __version__,
                "process_id": os.getpid(),
                "tcp_port": port,
                "uptime_in_seconds": int(now["uptime"]),
            },
            "Clients": {"connected_clients": len(self._connections), "maxclients": self.serving.clients},
            "Memory": {"used_memory": self.cache.index.used, "maxmemory": self.cache.index.capacity},
            "Persistence": {"loading": int(not self.cache.is_warm)},
            "Stats": {
                "total_connections_received": self._accepted,
                "total_commands_processed": asked,
                "keyspace_hits": int(value("lmtier_values_total", event="hit")),
                "keyspace_misses": int(value("lmtier_values_total", event="missed")),
                "expired_keys": int(value("lmtier_values_total", event="expired")),
                "evicted_keys": evicted,
            },
            "Replication": {"role": "master", "connected_slaves": 0},
            "Tiers": {
                tier["tier"]: f"chunks={tier['chunks']},used={tier['used']},capacity={tier['capacity']}"
                for tier in now["tiers"]
            },
            "Keyspace": {"db0": f"keys={keys},expires=0,avg_ttl=0"} if keys else {},
        }

    def _settings(self) -> Mapping[str, str]:
        config, serving = self.cache.config, self.serving
        return {
            "maxmemory": str(self.cache.index.capacity),
            "maxmemory-policy": "allkeys-lru",
            "maxclients": str(serving.clients),
            "save": "",
            "appendonly": "no",
            "databases": "1",
            "chunk-tokens": str(config.chunk_tokens),
        }

    def _read_secrets_again(self) -> None:
        try:
            self._token, self._tls = read_token(self.serving), _tls(self.serving)
            log.info("lmtier: token and certificates were read again")
        except ConfigError as error:
            log.error("lmtier: the old token and certificates stay: %s", error)


def read_token(serving: Serving) -> str | None:
    """The token that clients must show; None: none is asked for."""
    if not serving.token_file:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        lines = Path(serving.token_file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve: token_file {serving.token_file}: {error}") from None
    if not lines or not lines[0].strip():
        raise ConfigError(f"serve: token_file {serving.token_file} is empty; put a long random word in it")
    return lines[0].strip()


def _check_exposure(serving: Serving, token: str | None) -> None:
    for name in ("listen", "http"):
        address = getattr(serving, name)
        if not address or _is_loopback(host_and_port(address, name)[0]):
            continue
        if token is None and not serving.tls_ca and not serving.insecure:
            raise ConfigError(
                f"serve: {name}={address} can be reached from other hosts, and anybody there could read and "
                "delete what is stored; set token_file, or tls_ca for client certificates, or insecure = true"
            )
        if not serving.tls_cert:
            log.warning(
                "lmtier: %s=%s has no TLS: prompts' KV and the token can be read on the wire", name, address
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tls(serving: Serving) -> ssl.SSLContext | None:
    if not serving.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(serving.tls_cert, serving.tls_key)
        if serving.tls_ca:
            context.load_verify_locations(serving.tls_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"serve: TLS with {serving.tls_cert}, {serving.tls_key}: {error}") from None
    return context


def _tcp(address: str) -> socket.socket:
    host, port = host_and_port(address, "address")
    try:
        family, kind, number, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(1024)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"serve: cannot listen on {address}: {error.strerror or error}") from None
    return listener


def _unix(path: Path) -> socket.socket:
    """For this user alone: whoever may open it gets the slab."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"serve: cannot listen on {path}: {error.strerror or error}") from None
    except ConfigError:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """A socket that nobody answers was left by a server that was killed."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"serve: {path} is there, and is no socket; remove it or name another")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"serve: another server listens on {path}; stop it or name another")


def _allow_files(clients: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = clients + 256  # the tiers' files, and what Python has open
    if soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(need, hard), hard))
        if hard < need:
            log.warning(
                "lmtier: only %d files may be open, which is less than clients=%d need", hard, clients
            )


def _tell_systemd(state: str) -> None:
    """What Type=notify waits for."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


def _unknown(args: list[Argument]) -> Error:
    """As redis words it, and as little of the arguments as redis shows."""
    name, *words = (bytes(arg[:128]).split(b"\0")[0] for arg in args[:50])
    shown = b""
    for word in words:
        if len(shown) < 128:
            shown += b"'%s' " % word[: 128 - len(shown)]
    text = b"ERR unknown command '%s', with args beginning with: %s" % (name, shown)
    return Error(text.decode("utf-8", "surrogateescape"))


def _written(address: Any) -> str:
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return address if isinstance(address, str) else ""
