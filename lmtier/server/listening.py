"""The listening sockets of a server, with its certificates and tokens."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lmtier import forks
from lmtier.config import ServerConfig, host_and_port
from lmtier.errors import ConfigError, InUseError, log
from lmtier.server.access import RoleTokens
from lmtier.server.peers import why_foreign
from lmtier.wire.certificates import server_context


class Listener(NamedTuple):
    sock: socket.socket
    kind: str
    """redis, http or unix."""


class Listeners:
    """The open listeners, and their secrets."""

    def __init__(self, serving: ServerConfig) -> None:
        self._serving = serving
        self.tokens = RoleTokens.read(serving)
        check_exposure(serving, self.tokens)
        self._tls = _tls(serving)
        self.by_fd: dict[int, Listener] = {}
        self.addresses: list[tuple[str, str]] = []
        """The kind and the address of each listener."""

    def open(self, inherited: Mapping[str, int]) -> None:
        """Listen. `inherited`: the descriptors that a server before this one gave, by name."""
        theirs = {name: fd for name, fd in inherited.items() if name.startswith("door ")}
        try:
            for kind, address in self._wanted():
                fd = theirs.pop(f"door {kind} {address}", None)
                if fd is not None:
                    self._add(socket.socket(fileno=fd), kind)
                else:
                    self._add(_unix(Path(address)) if kind == "unix" else _tcp(address), kind)
            for fd in theirs.values():
                os.close(fd)
        except BaseException:
            self.close(keeps_paths=bool(inherited))
            raise

    def _wanted(self) -> list[tuple[str, str]]:
        serving = self._serving
        configured = [("redis", serving.listen), ("http", serving.http), ("unix", serving.unix)]
        return [each for each in configured if each[1]]

    def files(self) -> dict[str, int]:
        """The listeners for the next server: kind and configured address, and the descriptor."""
        address_of_kind = dict(self._wanted())
        return {f"door {door.kind} {address_of_kind[door.kind]}": fd for fd, door in self.by_fd.items()}

    def _add(self, listener: socket.socket, kind: str) -> None:
        forks.close_in_child(listener)
        self.by_fd[listener.fileno()] = Listener(listener, kind)
        self.addresses.append((kind, format_address(listener.getsockname())))

    def why_foreign(self, kind: str, sock: socket.socket) -> str:
        """Why a new client may do nothing without a token. Empty: it may, or everybody needs one."""
        serving = self._serving
        must_check_user = kind == "unix" or not (self.tokens.needs_token or serving.tls_ca)
        return why_foreign(sock) if must_check_user and not serving.insecure else ""

    def secured(self, sock: socket.socket) -> socket.socket:
        """Wrap a TCP connection in TLS, if it is configured."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setblocking(False)
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock

    def read_secrets_again(self) -> None:
        try:
            self.tokens, self._tls = RoleTokens.read(self._serving), _tls(self._serving)
            log.info("lmtier: tokens and certificates were read again")
        except ConfigError as error:
            log.error("lmtier: the old tokens and certificates stay in use: %s", error)

    def close(self, *, keeps_paths: bool = False) -> None:
        """`keeps_paths`: another server listens here."""
        for listener, _ in self.by_fd.values():
            if listener.family == socket.AF_UNIX and not keeps_paths:
                with suppress(OSError):
                    os.unlink(listener.getsockname())
            listener.close()
        self.by_fd.clear()


def check_exposure(serving: ServerConfig, tokens: RoleTokens) -> None:
    for name in ("listen", "http"):
        address = getattr(serving, name)
        if not address or _is_loopback(host_and_port(address, name)[0]):
            continue
        if not tokens.needs_token and not serving.tls_ca and not serving.insecure:
            raise ConfigError(
                f"serve: {name}={address} can be reached from other hosts, whose users could read and delete "
                "stored KV; set token_file, or tls_ca for client certificates, or insecure = true"
            )
        if not serving.tls_cert:
            log.warning(
                "lmtier: %s=%s has no TLS: prompts' KV and the token can be read by others", name, address
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tls(serving: ServerConfig) -> ssl.SSLContext | None:
    if not serving.tls_cert:
        return None
    return server_context("serve: TLS with", serving.tls_ca, serving.tls_cert, serving.tls_key)


def _tcp(address: str) -> socket.socket:
    host, port = host_and_port(address, "address")
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(sockaddr)
            listener.listen(1024)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except UnicodeError:  # a part of a name has 63 letters at most
        raise ConfigError(f"serve: cannot listen on {address}: {host!r} is not the name of a host") from None
    except OSError as error:
        error_type = InUseError if error.errno == errno.EADDRINUSE else ConfigError
        raise error_type(f"serve: cannot listen on {address}: {error.strerror or error}") from None
    return listener


def _unix(path: Path) -> socket.socket:
    """Only this user may open the socket, because it gives access to the slab."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        old_umask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old_umask)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"serve: cannot listen on {path}: {error.strerror or error}") from None
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket of a killed server, which does not answer."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"serve: {path} exists and is no socket; remove it or choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise InUseError(f"serve: another server listens on {path}; stop it or choose another path")


def format_address(address: Any) -> str:
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return address if isinstance(address, str) else ""
