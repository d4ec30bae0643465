"""HTTP/1.1 for browsers, Prometheus, routers and operators: bytes in, bytes out; no sockets here.

Pages, and calls that change nothing, are read with GET and HEAD. Other calls take a JSON body with POST.

    the listener for HTTP         without a token a client may look, because a page in a browser may send it
    the Redis port and the Unix   without a token it may do what it may with RESP; only health probes differ:
    socket                        they need what a look needs

The owner of the socket feeds the received bytes to a `Conversation` and sends the result of `next`. A request
must be well-formed to the byte, so that a proxy in front cannot be made to read it differently.
"""

from __future__ import annotations

import binascii
import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, TypeAlias

from lmtier._version import __version__
from lmtier.core.cache import Cache
from lmtier.errors import log
from lmtier.server.access import RIGHTS, Right, Role, RoleTokens, why_not, write_audit
from lmtier.server.api import Api, Asker
from lmtier.server.commands import PAUSE, Caller, PendingAnswer, Refused, error_of
from lmtier.server.report import Report

MAX_HEAD = 16 << 10
"""Bytes of a request line and its headers."""
FOR_ALL = frozenset({"/metrics"})
"""The pages that every user of this host may read where no token is needed: Prometheus has its own user."""
OWN_HEADER = "x-lmtier"
"""A request without a token has it if it is meant for lmtier.

Software that an attacker makes send a request here, by a URL and a body, does not have it.
"""

_STATUS = {"LOADING": 503, "TRYAGAIN": 503, "BROKEN": 500}
"""By the code of an error; others are 400."""

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


class Reply(NamedTuple):
    data: bytes
    """The bytes to send, all of them."""
    at: float
    """When to send them, by time.monotonic(); 0: now. The answer to a wrong token is late."""
    keep: bool
    """False: close afterwards. First stop sending and read to the end: unread input would reset the reply."""


class _Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, why: str, headers: tuple[tuple[str, str], ...] = (), at: float = 0.0
    ) -> None:
        super().__init__(why)
        self.response = sentence(status, why, headers)._replace(at=at)


class _Request(NamedTuple):
    method: str
    path: str
    query: str
    headers: dict[str, str]
    keep: bool

    @property
    def length(self) -> int:
        """Bytes of its body."""
        return int(self.headers.get("content-length", "0"))


class Http:
    """The served pages and calls, and who may use them."""

    def __init__(
        self,
        pages: Pages,
        api: Api | None = None,
        tokens: Callable[[], RoleTokens] = lambda: RoleTokens({}),
        wrong: Callable[[str], float] = lambda address: 0.0,
        names: Iterable[str] = (),
    ) -> None:
        """`wrong` notes that this address showed a wrong token, and returns the time of the answer.

        `names` are the names of this host under which a browser may ask, beside `localhost`.
        """
        self._pages = pages
        self.api = api
        self.calls = {} if api is None else api.calls
        self._tokens = tokens
        self._wrong = wrong
        self._names = {name.lower() for name in names}

    def conversation(self, caller: Caller) -> Conversation:
        """A new conversation, for one connection."""
        return Conversation(self, caller)

    def admit(self, request: _Request, caller: Caller) -> Role:
        """The role of who asks. Raises _Refusal."""
        tokens, authorization = self._tokens(), request.headers.get("authorization", "")
        token = _token_in(authorization) if authorization else None
        role = Role.NONE if token is None else tokens.role_of(token)
        needed, is_for_web = RIGHTS.get(request.path, Right(Role.LOOK)), caller.kind == "http"
        if not needed.role and is_for_web:  # Kubernetes has no token for its probes
            return role
        if authorization and not role and tokens:  # first: no other answer may tell a right token from it
            raise _Refusal(401, "this token is wrong", _CHALLENGE, self._wrong(caller.address))
        least = max(needed.role, Role.LOOK)
        caller.role = role or caller.role  # who has shown a token is no stranger
        if role >= least:
            return role
        if role:
            if needed.is_audited:
                write_audit(_asker(caller, role).name, [request.path.encode()], refused=True)
            raise _Refusal(403, why_not(least))
        is_meant = is_for_web or caller.is_local or OWN_HEADER in request.headers
        free = tokens.role_without_token(caller.foreign_reason, is_local=caller.is_local)
        if is_for_web:
            is_for_all = request.path in FOR_ALL and bool(tokens.role_without_token())
            free = Role.LOOK if is_for_all else min(free, Role.LOOK)
        elif not is_meant:
            free = min(free, Role.LOOK)
        if free >= least:
            if not self._is_own(request.headers.get("host", "")):
                why = "this host has no such name: a web page may have sent your browser here; use its"
                raise _Refusal(421, f"{why} address, or add the name to http_names in [serve]")
            return free
        if caller.foreign_reason:
            raise _Refusal(403, caller.foreign_reason.partition(" ")[2])
        if not tokens and not is_meant:
            raise _Refusal(403, "without a token, this needs the header X-Lmtier: 1")
        if not tokens:  # any page in a browser can send a body; it cannot know a token
            raise _Refusal(403, "this needs a token here: start the server with --token-file")
        why = "send the token as Authorization: Bearer, or as the password"
        raise _Refusal(401, why, _CHALLENGE)

    def page(self, request: _Request) -> Response:
        """The page of a request without a body."""
        if request.method not in ("GET", "HEAD"):
            why = f"{request.method} is not supported; use GET or HEAD"
            raise _Refusal(405, why, (("Allow", "GET, HEAD"),))
        if request.path not in self._pages:
            raise _Refusal(404, f"no such page; there are {', '.join(sorted({*self._pages, *self.calls}))}")
        return self._pages[request.path]()

    def check_body(self, request: _Request, caller: Caller) -> None:
        """Whether a call gets the body of this request. Raises _Refusal."""
        headers, call = request.headers, self.calls[request.path]
        if request.method != "POST":
            raise _Refusal(405, f"{request.path} takes a JSON body with POST", (("Allow", "POST"),))
        # A page of another site cannot send this type unasked, and its browser says where it comes from.
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise _Refusal(415, "send JSON, with Content-Type: application/json")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
            log.warning("lmtier: %s sends what a web page of another site wants", caller.address)
            raise _Refusal(403, "a page of another site sends this")
        if "content-length" not in headers:
            raise _Refusal(411, "send the length of the body, as Content-Length")
        # Otherwise a clear whose arguments are lost, or are in the wrong place, would clear everything.
        if request.query:
            raise _Refusal(400, f"the arguments of {request.path} are its body, not a query")
        if not request.length:
            raise _Refusal(400, f"{request.path} takes a JSON body: {{}} if there are no arguments")
        if request.length > call.max_body:
            raise _Refusal(413, f"the body has at most {call.max_body} bytes")

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

    def __init__(self, http: Http, caller: Caller) -> None:
        self._http = http
        self._caller = caller
        self._input = bytearray()
        self._bodiless: tuple[_Request, Role] | None = None
        """A call whose body has not come yet, and the role of who makes it."""
        self._answering: tuple[_Request, PendingAnswer] | None = None
        """A call whose response takes long."""
        self.needs_turn = False
        """The turn of that call ended before its work."""
        self._is_closing = False

    @property
    def is_answering(self) -> bool:
        """Whether the next reply takes more turns: call `next` again, and read nothing until then."""
        return self._answering is not None

    @property
    def held_bytes(self) -> int:
        """The bytes of the requests that it has not answered, about."""
        return len(self._input) + (self._answering[0].length if self._answering is not None else 0)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes. After the last reply they are ignored."""
        if not self._is_closing:
            self._input += data

    def close(self) -> None:
        """The client has gone: end what runs for it."""
        if self._answering is not None:
            self._answering[1].close()
            self._answering, self.needs_turn = None, False

    def next(self) -> Reply | None:
        """The reply to the next whole request; None if there is none (yet).

        Call it again only after the last reply was sent, and read nothing until then. That bounds both sides.
        """
        if self._is_closing:
            return None
        if self._answering is not None:
            return self._answer_on(*self._answering)
        if self._bodiless is None:
            try:
                head = self._head()
                if head is None:
                    return None
                request = parse(head)
            except _Refusal as refusal:
                return self._reply(refusal.response, with_body=True, keep=False)
            length = request.headers.get("content-length", "0").strip("0")
            has_body = bool(length) or "transfer-encoding" in request.headers
            try:
                response = self._begin(request, has_body)
            except _Refusal as refusal:
                response = refusal.response
            if response is not None:
                return self._reply(response, request.method != "HEAD", request.keep and not has_body)
            if self._answering is not None:
                return self._answer_on(*self._answering)
        assert self._bodiless is not None
        return self._fill(*self._bodiless)

    def _begin(self, request: _Request, has_body: bool) -> Response | None:
        """The response to a page. None: a call is made, as soon as its body has come. Raises _Refusal."""
        http, role = self._http, self._http.admit(request, self._caller)
        call = http.calls.get(request.path)
        if call is not None and call.method == "POST":
            http.check_body(request, self._caller)
            self._bodiless = request, role
            return None
        if has_body and request.method in ("GET", "HEAD"):
            raise _Refusal(413, "requests have no body here")
        if call is None or request.method not in ("GET", "HEAD"):
            return http.page(request)
        self._answering = request, self._called(request, role, None)
        return None

    def _fill(self, request: _Request, role: Role) -> Reply | None:
        """Make a call with its body, once all of it is here."""
        if len(self._input) < request.length:
            return None
        self._bodiless = None
        body = bytes(self._input[: request.length])
        del self._input[: request.length]
        self._answering = request, self._called(request, role, body)
        return self._answer_on(*self._answering)

    def _called(self, request: _Request, role: Role, body: bytes | None) -> PendingAnswer:
        """The response to a call."""
        api, path = self._http.api, request.path
        assert api is not None
        try:
            arguments = api.parse_query(request.query) if body is None else api.parse(path, body)
            return Response(200, JSON, (yield from api.run(path, arguments, _asker(self._caller, role))))
        except (Refused, OSError) as failure:
            error = error_of(failure)
        if error.code == "NOPERM":
            has_token = "authorization" in request.headers
            return sentence(403 if has_token else 401, error.sentence, () if has_token else _CHALLENGE)
        return sentence(_STATUS.get(error.code, 400), error.sentence)

    def _answer_on(self, request: _Request, answering: PendingAnswer) -> Reply | None:
        try:
            self.needs_turn = next(answering) == PAUSE
        except StopIteration as end:
            self._answering, self.needs_turn = None, False
            return self._reply(end.value, request.method != "HEAD", request.keep)
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
    path, _, query = target.partition("?")
    return _Request(method, path, query, headers, keep)


def sentence(status: int, error: str, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    return Response(status, JSON, json.dumps({"error": error}).encode() + b"\n", headers)


def _asker(caller: Caller, role: Role) -> Asker:
    return Asker(f"http 'client' at {caller.address} ({role.name.lower()})", role)


def routes(cache: Cache, report: Report) -> dict[str, Callable[[], Response]]:
    """All pages of a server, by path."""
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
    }
