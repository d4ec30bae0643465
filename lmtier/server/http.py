"""HTTP/1.1 for browsers, Prometheus and routers: bytes in, bytes out; no sockets here.

Pages are read with GET and HEAD. A form takes a JSON body with POST, and always needs the token.

The owner of the socket feeds the received bytes to a `Conversation` and sends the result of `next`. A request
must be well-formed to the byte, so that a proxy in front cannot be made to read it differently.
"""

from __future__ import annotations

import binascii
import ipaddress
import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, TypeAlias

from lmtier._version import __version__
from lmtier.core.cache import Cache
from lmtier.errors import MisuseError
from lmtier.format.keys import tenant
from lmtier.rules.hints import actions_of
from lmtier.server.access import RIGHTS, Right, Role, RoleTokens
from lmtier.server.explain import Explain
from lmtier.server.hint_execution import run_hints
from lmtier.server.report import Report

MAX_HEAD = 16 << 10
"""Bytes of a request line and its headers."""
MAX_BODY = 256 << 10
"""Bytes of a form."""
FOR_ALL = frozenset({"/metrics"})
"""The pages that every user of this host may read where no token is needed: Prometheus has its own user."""

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"

# On every response. The page is one file: it may use its own style, script and icon, and our numbers.
_ALWAYS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
)
_CHALLENGE = (
    ("WWW-Authenticate", 'Basic realm="lmtier", charset="UTF-8"'),
    ("WWW-Authenticate", 'Bearer realm="lmtier"'),
)

_BEGIN = re.compile(rb"[A-Z-]{0,20}(?: |\Z)")
_LINE = re.compile(rb"([A-Z-]{1,20}) ([\x21-\x7e]+) HTTP/(\d)\.(\d)")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")
_PORT = re.compile(r":\d*\Z")
_ONCE = frozenset({"authorization", "content-length", "host", "transfer-encoding"})


class Response(NamedTuple):
    status: int
    type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    at: float = 0.0
    """When to send it, by time.monotonic(); 0: now."""


Pages: TypeAlias = "Mapping[str, Callable[[], Response]]"
Answering: TypeAlias = "Generator[bytes, None, Response]"
"""A response that takes long. It yields where other connections may have their turns."""
Form: TypeAlias = "Callable[[bytes, str, Role], Response | Answering]"
"""Takes a body, who sent it, and what that client may do."""
Forms: TypeAlias = "Mapping[str, Form]"


class Reply(NamedTuple):
    data: bytes
    """The bytes to send, all of them."""
    at: float
    """When to send them, by time.monotonic(); 0: now. The answer to a wrong token is late."""
    keep: bool
    """False: close afterwards. First stop sending and read to the end: unread input would reset the reply."""


class _Refusal(Exception):
    """A request that is answered with an error, after which the connection is closed."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    keep: bool

    @property
    def length(self) -> int:
        """Bytes of its body."""
        return int(self.headers.get("content-length", "0"))


class Http:
    """The served pages and forms, and who may use them."""

    def __init__(
        self,
        pages: Pages,
        tokens: Callable[[], RoleTokens] = lambda: RoleTokens({}),
        wrong: Callable[[str], float] = lambda address: 0.0,
        names: Iterable[str] = (),
        forms: Forms | None = None,
    ) -> None:
        """`wrong` notes that this address showed a wrong token, and returns the time of the answer.

        `names` are the names of this host under which a browser may ask, beside `localhost`.
        """
        self._pages = pages
        self._forms = forms or {}
        self._tokens = tokens
        self._wrong = wrong
        self._names = {name.lower() for name in names}

    def conversation(self, address: str = "", foreign: str = "") -> Conversation:
        """A new conversation, for one connection. `foreign`: why its client is not this user's."""
        return Conversation(self, address, foreign)

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], address: str, foreign: str = ""
    ) -> Response:
        """The answer to a request without a body."""
        role_needed = RIGHTS.get(path, Right(Role.LOOK)).role
        if role_needed:  # Kubernetes has no token for its probes
            tokens, authorization = self._tokens(), headers.get("authorization", "")
            token = _token_in(authorization) if authorization else None
            if token is None or tokens.role_of(token) < Role.LOOK:
                if foreign and tokens.role_without_token() and path not in FOR_ALL:
                    return sentence(403, foreign.partition(" ")[2])
                if not tokens.role_without_token() or (path in self._forms and tokens):
                    answer_at = self._wrong(address) if authorization else 0.0
                    why = "send the token as Authorization: Bearer, or as the password"
                    return sentence(401, why, _CHALLENGE)._replace(at=answer_at)
                if not self._is_own(headers.get("host", "")):
                    why = "this host has no such name: a web page may have sent your browser here; use its"
                    return sentence(421, f"{why} address, or add the name to http_names in [serve]")
        if path in self._forms:
            return sentence(405, f"{path} takes a JSON body with POST", (("Allow", "POST"),))
        if method not in ("GET", "HEAD"):
            return sentence(405, f"{method} is not supported; use GET or HEAD", (("Allow", "GET, HEAD"),))
        if path not in self._pages:
            return sentence(404, f"no such page; there are {', '.join(sorted(self._pages))}")
        return self._pages[path]()

    def form(self, request: _Request, address: str) -> Callable[[bytes], Response | Answering] | None:
        """What takes the body of this request; None: `answer` answers it."""
        if request.method != "POST" or request.path not in self._forms:
            return None
        tokens = self._tokens()
        if not tokens:  # any page in a browser can send a form; it cannot know a token
            raise _Refusal(403, "this needs a token: start the server with --token-file")
        token = _token_in(request.headers.get("authorization", ""))
        role = Role.NONE if token is None else tokens.role_of(token)
        if role is Role.NONE:
            return None
        if role < RIGHTS[request.path].role:
            raise _Refusal(403, "this token may look, and do nothing else")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise _Refusal(415, "send JSON, with Content-Type: application/json")
        if "content-length" not in request.headers:
            raise _Refusal(411, "send the length of the body, as Content-Length")
        if request.length > MAX_BODY:
            raise _Refusal(413, f"the body has at most {MAX_BODY} bytes")
        sender = f"http 'client' at {address} ({role.name.lower()})"
        form = self._forms[request.path]
        return lambda body: form(body, sender, role)

    def _is_own(self, host: str) -> bool:
        """Whether the Host header names this host.

        A name without a token may be one that an attacker owns and points here, so that a page of that name
        can read our answers (DNS rebinding). Attackers own no addresses and no names without a dot.
        """
        name = _PORT.sub("", host.lower()).rstrip(".")
        if "." not in name or name.startswith("[") or name.endswith(".localhost") or name in self._names:
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _token_in(authorization: str) -> bytes | None:
    """The token of an Authorization header. None: it has none that we can read."""
    scheme, _, credentials = authorization.partition(" ")
    shown = credentials.strip(" \t").encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return binascii.a2b_base64(shown, strict_mode=True).partition(b":")[2]
        except binascii.Error:
            return None
    return shown if scheme.lower() == "bearer" else None


class Conversation:
    """One connection: requests in, replies out, in order.

    It holds at most one head or body, and the bytes after it.
    """

    def __init__(self, http: Http, address: str = "", foreign: str = "") -> None:
        self._http = http
        self._address, self._foreign = address, foreign
        self._input = bytearray()
        self._form: tuple[_Request, Callable[[bytes], Response | Answering]] | None = None
        """A request whose body has not come yet, and what takes it."""
        self._answering: tuple[_Request, Answering] | None = None
        """A request whose response takes long."""
        self._is_closing = False

    @property
    def is_answering(self) -> bool:
        """Whether the next reply takes more turns: call `next` again, and read nothing until then."""
        return self._answering is not None

    @property
    def held_bytes(self) -> int:
        """The bytes of the requests that it has not answered, about."""
        return len(self._input) + (MAX_BODY if self.is_answering else 0)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes. After the last reply they are ignored."""
        if not self._is_closing:
            self._input += data

    def next(self) -> Reply | None:
        """The reply to the next whole request; None if there is none (yet).

        Call it again only after the last reply was sent, and read nothing until then. That bounds both sides.
        """
        if self._is_closing:
            return None
        if self._answering is not None:
            return self._answer_on(*self._answering)
        try:
            if self._form is None:
                head = self._head()
                if head is None:
                    return None
                request = parse(head)
                if (form := self._http.form(request, self._address)) is not None:
                    self._form = request, form
            if self._form is not None:
                return self._fill(*self._form)
        except _Refusal as refusal:
            return self._reply(sentence(refusal.status, str(refusal)), with_body=True, keep=False)
        response = self._http.answer(
            request.method, request.path, request.headers, self._address, self._foreign
        )
        has_body = (
            request.headers.get("content-length", "0").strip("0") or "transfer-encoding" in request.headers
        )
        if has_body and response.status not in (401, 403, 405, 421):
            response = sentence(413, "requests have no body here")
        return self._reply(response, request.method != "HEAD", request.keep and not has_body)

    def _fill(self, request: _Request, form: Callable[[bytes], Response | Answering]) -> Reply | None:
        """Give the form its body, once all of it is here."""
        if len(self._input) < request.length:
            return None
        self._form = None
        body = bytes(self._input[: request.length])
        del self._input[: request.length]
        answer = form(body)
        if isinstance(answer, Response):
            return self._reply(answer, with_body=True, keep=request.keep)
        self._answering = request, answer
        return self._answer_on(request, answer)

    def _answer_on(self, request: _Request, answering: Answering) -> Reply | None:
        try:
            next(answering)
        except StopIteration as end:
            self._answering = None
            return self._reply(end.value, with_body=True, keep=request.keep)
        return None

    def _head(self) -> bytes | None:
        """Take the next request's line and headers out of the input."""
        received = self._input
        while received.startswith(b"\r\n"):  # some clients end a request with one line end too many
            del received[:2]
        if received and received != b"\r" and not _BEGIN.match(received):
            raise _Refusal(400, "this is no HTTP request")
        end = received.find(b"\r\n\r\n", 0, MAX_HEAD)
        if end < 0:
            if len(received) >= MAX_HEAD:
                raise _Refusal(431, f"the headers are longer than {MAX_HEAD} bytes")
            if _BARE.search(received):
                raise _Refusal(400, "lines end in CR LF")
            return None
        head = bytes(received[:end])
        del received[: end + 4]
        return head

    def _reply(self, response: Response, with_body: bool, keep: bool) -> Reply:
        if not keep:
            self._is_closing = True
            self._input.clear()
        lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
        fields = (
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", response.type),
            ("Content-Length", str(len(response.body))),
            ("Connection", "keep-alive" if keep else "close"),
            *_ALWAYS,
            *response.headers,
        )
        lines.extend(f"{name}: {value}" for name, value in fields)
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        return Reply(head + response.body if with_body else head, response.at, keep)


def parse(head: bytes) -> _Request:
    """A request without its final empty line; raises _Refusal."""
    if _BARE.search(head):
        raise _Refusal(400, "lines end in CR LF")
    first, *header_lines = head.split(b"\r\n")
    line = _LINE.fullmatch(first)
    if line is None:
        raise _Refusal(400, "the first line must read like GET /metrics HTTP/1.1")
    method, target, major, minor = (part.decode() for part in line.groups())
    if major != "1":
        raise _Refusal(505, "this server speaks HTTP/1.1")
    headers: dict[str, str] = {}
    for each in header_lines:
        field = _HEADER.fullmatch(each)
        if field is None:
            raise _Refusal(400, "a header line must read like Name: value")
        name, value = field[1].decode().lower(), field[2].decode("latin-1").rstrip(" \t")
        if name in headers and name in _ONCE:
            raise _Refusal(400, f"{name} is given twice")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) <= 15):
        raise _Refusal(400, "content-length is no number")
    if "transfer-encoding" in headers and "content-length" in headers:
        raise _Refusal(400, "a body has one length")
    connection_options = {wish.strip().lower() for wish in headers.get("connection", "").split(",")}
    keep = "close" not in connection_options and (minor != "0" or "keep-alive" in connection_options)
    if target.lower().startswith(("http://", "https://")):  # the form for proxies
        target = "/" + target.split("://", 1)[1].partition("/")[2]
    return _Request(method, target.partition("?")[0], headers, keep)


def sentence(status: int, error: str, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    return Response(status, JSON, json.dumps({"error": error}).encode() + b"\n", headers)


def forms(cache: Cache) -> dict[str, Form]:
    """What takes a body, by path."""

    def answering(steps: Generator[bytes, None, str]) -> Answering:
        return Response(200, JSON, (yield from steps).encode())

    def hints(body: bytes, who: str, role: Role) -> Response | Answering:
        try:
            envelope = json.loads(body)
            salt, session = (envelope.pop(name, "") for name in ("salt", "session")) if envelope else ("", "")
            if not isinstance(salt, str) or not isinstance(session, str):
                raise MisuseError("salt and session are text")
            return answering(run_hints(cache, actions_of(envelope), tenant(salt), session, who, role))
        except (ValueError, RecursionError, AttributeError, TypeError):
            return sentence(400, "the body is an envelope of hints: a JSON object")
        except MisuseError as error:
            return sentence(400, str(error))

    return {"/api/hints": hints}


def routes(cache: Cache, report: Report, explain: Explain) -> dict[str, Callable[[], Response]]:
    """All pages of a server, by path. None of them contains a prompt's tokens."""
    page = Path(__file__).with_name("page.html").read_bytes()

    def alive() -> Response:  # the thread that could be stuck sends this answer itself
        return Response(200, TEXT, b"ok\n")

    def ready() -> Response:
        why_not = report.why_not_ready()
        return Response(503 if why_not else 200, TEXT, f"{why_not or 'ready'}\n".encode())

    return {
        "/": lambda: Response(200, "text/html; charset=utf-8", page),
        "/metrics": lambda: Response(200, METRICS, cache.metrics.exposition()),
        "/healthz": alive,
        "/health": alive,
        "/readyz": ready,
        "/version": lambda: Response(200, JSON, json.dumps({"version": __version__}).encode()),
        "/api/stats": lambda: Response(200, JSON, json.dumps(report.snapshot()).encode()),
        "/api/history": lambda: Response(200, JSON, report.history.to_json()),
        "/api/explain": lambda: Response(200, JSON, json.dumps(explain.recent()).encode()),
    }
