"""The command line's requests to a server: its address, one request at a time over HTTP, and clear errors.

Servers are not trusted: every wait has a limit, and no byte from a server can control the terminal.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlencode, urlsplit

from lmtier.config import ServerConfig, host_and_port
from lmtier.errors import ConfigError, LMTierError
from lmtier.server.explain import Explanation
from lmtier.server.report import Snapshot, TierNow
from lmtier.server.view import Hits, Part, Table, View
from lmtier.tools.terminal import printable
from lmtier.wire.certificates import client_context

TIMEOUT = 5.0
PORT = 6380
_MAX_HEAD = 64 << 10  # bytes
_MAX_ANSWER = 64 << 20
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) [^\r\n]*\r\n")
_LENGTH = re.compile(rb"\r\nContent-Length: *(\d{1,9})\r\n", re.IGNORECASE)
_NO_HTTP = "is no lmtier server: it answered something unexpected"
_STRANGE = "sends data that this version of lmtier does not know: use the same version on both sides"


class Unreachable(LMTierError):
    """A server does not answer, or is not an lmtier server. The message says what to do."""


# ---- where


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The address of a server, with the credentials for it."""

    unix: str = ""
    host: str = ""
    port: int = PORT
    tls: bool = False
    ca: str = ""
    """The file of its certificate authority; empty: those that this system trusts."""
    is_pinned: bool = False
    """`ca` is the server's own certificate, so the host's name is not checked."""
    cert: str = ""
    key: str = ""
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        if self.unix:
            return self.unix
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> ServerAddress:
    """host:port, a socket's path, unix:///path, redis://[:token@]host[:port] or rediss://, which is TLS."""
    scheme, separator, location = text.partition("://")
    if not separator:
        if "/" in text:
            return ServerAddress(unix=text)
        host, port = host_and_port(text, "address")
        return ServerAddress(host=_reachable(host), port=port)
    if scheme == "unix" and location.startswith("/"):
        return ServerAddress(unix=unquote(location))
    shown = f"{scheme}://{location.rpartition('@')[2]}"  # a token is not repeated
    try:
        url = urlsplit(text)
        host, port = url.hostname or "", PORT if url.port is None else url.port
    except ValueError:
        host, port = "", 0
    if scheme not in ("redis", "rediss") or not host or url.path not in ("", "/", "/0"):
        raise ConfigError(
            f"address {shown!r}: write it like 127.0.0.1:6380, /run/lmtier/socket, "
            "unix:///run/lmtier/socket, redis://:TOKEN@host:6380, or rediss:// for TLS"
        )
    if url.username and not url.password:
        raise ConfigError(f"address {shown!r}: a token follows a colon, like redis://:TOKEN@host:6380")
    token = unquote(url.password) if url.password else None
    return ServerAddress(host=host, port=port, tls=scheme == "rediss", token=token)


def address_from_settings(serving: ServerConfig) -> ServerAddress:
    """The address of the server with these settings: the Unix socket if there is one."""
    if serving.unix:
        return ServerAddress(unix=serving.unix)
    if not serving.listen:
        raise ConfigError(
            "the settings name neither a Unix socket nor an address to listen on; name a server"
        )
    host, port = host_and_port(serving.listen, "serve: listen")
    address = ServerAddress(host=_reachable(host), port=port)
    if not serving.tls_cert:
        return address
    address = replace(address, tls=True, ca=serving.tls_cert, is_pinned=True)
    return replace(address, cert=serving.tls_cert, key=serving.tls_key) if serving.tls_ca else address


def _reachable(host: str) -> str:
    """The address to connect to if a server listens on every address."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


# ---- one question, one answer


class _Answer(NamedTuple):
    status: int
    body: bytes


class Console:
    """Waits for every answer. It sends the token only when the server asks for it."""

    def __init__(self, address: ServerAddress, timeout: float = TIMEOUT) -> None:
        self.address = address
        self._timeout = timeout
        self._sends_token = False

    def get(self, path: str, kind: type = dict, **query: object) -> Any:
        """The answer to a call that changes nothing."""
        target = f"{path}?{urlencode(query)}" if query else path
        return self._value(f"GET {target} HTTP/1.0\r\nX-Lmtier: 1\r\n\r\n".encode(), kind, self._timeout)

    def post(
        self, path: str, arguments: Mapping[str, Any], kind: type = dict, timeout: float | None = None
    ) -> Any:
        """The answer to another call."""
        body = json.dumps(arguments).encode()
        fields = f"X-Lmtier: 1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        request = f"POST {path} HTTP/1.0\r\n{fields}\r\n\r\n".encode() + body
        return self._value(request, kind, timeout or self._timeout)

    def _value(self, request: bytes, kind: type, timeout: float) -> Any:
        """The value of an answer. An error is raised, with a message that says what to do."""
        token = self.address.token
        answer = self._exchange(request, timeout)
        if answer.status in (401, 403) and token is not None and not self._sends_token:
            self._sends_token = True
            answer = self._exchange(request, timeout)
        try:
            value = _harmless(json.loads(answer.body))
        except (ValueError, RecursionError):
            value = None
        if answer.status == 200 and isinstance(value, kind):
            return value
        why = value.get("error") if isinstance(value, dict) else None
        if not isinstance(why, str) or answer.status == 404:
            raise self._trouble("is no lmtier server of this version: it gave an unexpected answer")
        if answer.status == 401 and self._sends_token:
            raise self._trouble(f"refuses this token: {why}")
        if answer.status == 401:
            raise self._trouble("asks for a token: give it with --token-file FILE, or in LMTIER_TOKEN")
        if answer.status == 403 and not self._sends_token:
            raise ConfigError(f"{self.address} refuses you: {why}")
        raise self._trouble(f"answered: {why}")

    def snapshot(self) -> Snapshot:
        """The server's report about itself."""
        report = self.get("/api/stats")
        if Snapshot.__required_keys__ <= report.keys() and _are(report["tiers"], TierNow.__required_keys__):
            return cast(Snapshot, report)
        raise self._trouble(_STRANGE)

    def view(self, minutes: float = 5.0, columns: int = 1) -> View:
        """What people see of it."""
        view = self.get("/api/view", minutes=minutes, columns=columns)
        with suppress(KeyError, TypeError):
            tables = [table for part in view["parts"] for table in part["tables"]]
            rows = [row for table in tables for row in (table["columns"], *table["rows"])]
            hits = [view["now"], view["lately"], view["start"], *view["columns"]]
            if (
                all(isinstance(row, list) for row in rows)
                and all(isinstance(column, str) for table in tables for column in table["columns"])
                and _are([view], View.__required_keys__)
                and _are(view["parts"] or None, Part.__required_keys__)
                and _are(tables, Table.__required_keys__)
                and _are(hits, Hits.__required_keys__)
            ):
                return cast(View, view)
        raise self._trouble(_STRANGE)

    def explanations(self, most: int, *, tokens: bool = False) -> list[Explanation]:
        """Why its last lookups missed, the latest first."""
        found = self.get("/api/explain", list, most=most, **({"tokens": "true"} if tokens else {}))
        if _are(found, Explanation.__required_keys__):
            return cast("list[Explanation]", found)
        raise self._trouble(_STRANGE)

    def _exchange(self, request: bytes, timeout: float) -> _Answer:
        """One request on a separate connection. All of it takes `timeout` at most."""
        until = time.monotonic() + timeout
        if self._sends_token and self.address.token is not None:
            shown = f"\r\nAuthorization: Bearer {self.address.token}\r\n".encode()
            request = request.replace(b"\r\n", shown, 1)
        received = bytearray()
        try:
            with self._connected() as sock:
                sock.settimeout(timeout)
                sock.sendall(request)
                while (answer := self._answer(received)) is None:
                    if (seconds_left := until - time.monotonic()) <= 0:
                        raise TimeoutError
                    sock.settimeout(seconds_left)
                    data = sock.recv(1 << 16)
                    if not data:
                        raise self._trouble(self._hung_up())
                    received += data
        except OSError as error:
            raise self._unreachable(error, timeout) from None
        return answer

    def _answer(self, received: bytearray) -> _Answer | None:
        """The answer, if all of it is here."""
        if received and not received.startswith(b"HTTP/"[: len(received)]):
            if not received.startswith(b"-"):
                raise self._trouble(_NO_HTTP)
            if b"\n" not in received and len(received) < _MAX_HEAD:
                return None
            if b"max number of clients" in received:
                raise self._trouble("answered: max number of clients reached")
            raise self._trouble("is no lmtier server, or an older one: it only knows Redis commands")
        body_at = received.find(b"\r\n\r\n", 0, _MAX_HEAD) + 4
        if body_at < 4 and len(received) < _MAX_HEAD:
            return None
        head = received[: max(0, body_at - 2)]
        status, length = _STATUS.match(head), _LENGTH.search(head)
        if status is None or length is None or int(length[1]) > _MAX_ANSWER:
            raise self._trouble(_NO_HTTP)
        is_whole = len(received) - body_at >= int(length[1])
        return _Answer(int(status[1]), bytes(received[body_at:])) if is_whole else None

    def _connected(self) -> socket.socket:
        address = self.address
        try:
            if address.unix:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    sock.settimeout(self._timeout)
                    sock.connect(address.unix)
                except BaseException:
                    sock.close()
                    raise
                return sock
            context = _context(address) if address.tls else None
            sock = socket.create_connection((address.host, address.port), self._timeout)
            if context is None:
                return sock
            try:
                return context.wrap_socket(sock, server_hostname=address.host)
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise self._unreachable(error, self._timeout) from None

    def _hung_up(self) -> str:
        if self.address.unix:
            return "closed the connection; its log may say why"
        if self.address.tls:
            return (
                "closed the connection; if it wants a client certificate, pass --cert and --key; "
                "if it has no TLS, write redis://"
            )
        return "closed the connection without an answer; if it asks for TLS, write rediss://"

    def _unreachable(self, error: OSError, timeout: float) -> Unreachable:
        """A message for an error of the system. The order matters: they are all OSError."""
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = error.verify_message.rstrip(".")
            return self._trouble(
                f"has a certificate that is not trusted ({reason}): pass its authority with --ca"
            )
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return self._trouble(self._hung_up())
        if isinstance(error, ssl.SSLError):
            if "CERTIFICATE_REQUIRED" in (error.reason or "") or "HANDSHAKE_FAILURE" in (error.reason or ""):
                return self._trouble("wants a client certificate: pass --cert and --key")
            return self._trouble(
                f"does not speak TLS as this client does ({error.reason}): write redis:// if it has no TLS"
            )
        if isinstance(error, socket.gaierror):
            return self._trouble("cannot be found: is the host's name right?")
        if isinstance(error, TimeoutError):
            hint = "; does it speak TLS? If not, write redis://" if self.address.tls else ""
            return self._trouble(f"did not answer within {timeout:g} s{hint}")
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return self._trouble(
                "does not answer: is `lmtier serve` running? `lmtier config` shows its address"
            )
        if isinstance(error, PermissionError):
            return self._trouble(
                "may be opened only by the server's user: run as that user, or use the TCP address"
            )
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            return self._trouble(self._hung_up())
        return self._trouble(f"cannot be reached: {error.strerror or error}")

    def _trouble(self, what: str) -> Unreachable:
        return Unreachable(f"{self.address} {what}")


def _context(address: ServerAddress) -> ssl.SSLContext:
    context = client_context("TLS with", address.ca, address.cert, address.key)
    if address.is_pinned:
        context.check_hostname = False
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _are(rows: object, keys: frozenset[str]) -> bool:
    """Whether these are objects with these keys."""
    return isinstance(rows, list) and all(isinstance(each, dict) and keys <= each.keys() for each in rows)


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_harmless(item) for item in value]
    if isinstance(value, dict):
        return {printable(name): _harmless(item) for name, item in value.items()}
    return value
