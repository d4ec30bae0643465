"""HTTP by bytes: what is answered, what is refused, and that nothing breaks it."""

import base64
import json
import random
import re
import socket

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.errors import MisuseError
from lmtier.rules.hints import envelope
from lmtier.server.access import Role, RoleTokens
from lmtier.server.commands import Caller
from lmtier.server.connection import HttpConnection
from lmtier.server.engines import EngineVerbs
from lmtier.server.http import MAX_HEAD, Http, Reply, Response, routes
from lmtier.server.report import Report

PAGES = {
    "/": lambda: Response(200, "text/html; charset=utf-8", b"<p>page"),
    "/healthz": lambda: Response(200, "text/plain; charset=utf-8", b"ok\n"),
    "/readyz": lambda: Response(503, "text/plain; charset=utf-8", b"not yet\n"),
}


def tokens(word):
    given = RoleTokens({Role.ENGINE: word} if word else {})
    return lambda: given


def web(address="here"):
    """A client of the listener for HTTP."""
    return Caller(1, address, kind="http")


def talk(data, token=None, pages=PAGES, api=None):
    """All replies to these bytes."""
    conversation = Http(pages, api, tokens(token)).conversation(web())
    conversation.feed(data)
    replies = []
    while (reply := conversation.next()) is not None or conversation.is_answering:
        replies += [reply] if reply is not None else []
    return replies


def taken_apart(reply):
    head, _, body = reply.data.partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    version, status, phrase = first.split(" ", 2)
    assert version == "HTTP/1.1"
    assert phrase
    return int(status), [tuple(field.split(": ", 1)) for field in fields], body


def one(data, token=None, pages=PAGES, api=None):
    (reply,) = talk(data, token, pages, api)
    status, fields, body = taken_apart(reply)
    headers = dict(fields)
    assert int(headers["Content-Length"]) == len(body) or data.startswith(b"HEAD")
    assert headers["Connection"] == ("keep-alive" if reply.keep else "close")
    return status, headers, body, reply.keep


def get(path, *lines, version="1.1"):
    return "\r\n".join([f"GET {path} HTTP/{version}", *lines, "", ""]).encode("latin-1")


# ---- answers


def test_a_page_is_served():
    status, headers, body, keep = one(get("/", "Host: x"))
    assert (status, headers["Content-Type"], body, keep) == (
        200,
        "text/html; charset=utf-8",
        b"<p>page",
        True,
    )
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", headers["Date"])


def test_every_response_is_locked_down():
    for request in (get("/"), get("/none"), get("/", "bad"), b"POST / HTTP/1.1\r\n\r\n"):
        headers = one(request)[1]
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "connect-src 'self'", "img-src data:"} <= set(policy)


def test_head_is_get_without_the_body():
    (long,), (short,) = talk(get("/")), talk(get("/").replace(b"GET", b"HEAD"))
    drop_date = re.compile(rb"Date: [^\r]*\r\n")
    assert drop_date.sub(b"", short.data) + b"<p>page" == drop_date.sub(b"", long.data)


def test_a_query_is_not_part_of_the_path():
    assert one(get("/healthz?verbose=1"))[0] == 200
    assert one(get("http://proxy.example/healthz?x"))[0] == 200
    assert one(get("http://proxy.example"))[0] == 200


def test_an_unknown_path_names_the_known_ones():
    status, headers, body, keep = one(get("/metrix"))
    assert (status, headers["Content-Type"], keep) == (404, "application/json", True)
    assert json.loads(body)["error"] == "no such page; there are /, /healthz, /readyz"


def test_other_methods_are_told_what_is_allowed():
    for method in ("POST", "DELETE", "OPTIONS", "CONNECT", "M-SEARCH"):
        status, headers, _, keep = one(get("/").replace(b"GET", method.encode()))
        assert (status, headers["Allow"], keep) == (405, "GET, HEAD", True)


@pytest.mark.parametrize(
    ("version", "line", "keep"),
    [
        ("1.1", "x: y", True),
        ("1.1", "Connection: close", False),
        ("1.1", "Connection: TE, Close", False),
        ("1.0", "x: y", False),
        ("1.0", "Connection: Keep-Alive", True),
    ],
)
def test_the_connection_is_kept_as_the_client_asks(version, line, keep):
    assert one(get("/", line, version=version))[3] is keep


def test_pipelined_requests_are_answered_in_order():
    replies = talk(get("/healthz") + b"\r\n" + get("/none") + get("/readyz", "Connection: close") + get("/"))
    assert [taken_apart(reply)[0] for reply in replies] == [200, 404, 503]
    assert [reply.keep for reply in replies] == [True, True, False]


def test_a_request_may_come_byte_by_byte():
    conversation = Http(PAGES).conversation(web())
    data = get("/healthz", "Host: x")
    for byte in data[:-1]:
        conversation.feed(bytes([byte]))
        assert conversation.next() is None
    conversation.feed(data[-1:])
    reply = conversation.next()
    assert reply is not None
    assert reply.data.endswith(b"\r\n\r\nok\n")
    assert conversation.next() is None


# ---- refusals


def refused(data, status):
    code, headers, body, keep = one(data)
    assert (code, headers["Content-Type"], keep) == (status, "application/json", False)
    return json.loads(body)["error"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET /\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1 \r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / http/1.1\r\n\r\n",
        b"get / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\n\n",
        b"GET / HTTP/1.1\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"Host\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"Host : x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b" Host: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\rc: d\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b": x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"Host: x\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"Content-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"Content-Length: %s\r\n\r\n" % (b"9" * 5000),
        b"GET / HTTP/1.1\r\n" + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx",
        b"GET / HTTP/1.1\r\n" + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"*1\r\n$4\r\nPING\r\n",  # a Redis client
    ],
)
def test_what_is_not_well_formed_is_refused(data):
    refused(data, 400)


def test_another_version_is_refused():
    refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505)


def test_bodies_are_refused_and_nothing_in_them_is_read():
    inner = get("/healthz")
    refused(get("/", f"Content-Length: {len(inner)}") + inner, 413)
    refused(get("/", "Transfer-Encoding: chunked") + inner, 413)
    status, _, _, keep = one(get("/", f"Content-Length: {len(inner)}").replace(b"GET", b"POST", 1) + inner)
    assert (status, keep) == (405, False)
    assert one(get("/", "Content-Length: 0"))[0] == 200


def test_headers_are_refused_as_soon_as_they_are_too_long():
    conversation = Http(PAGES).conversation(web())
    conversation.feed(b"GET / HTTP/1.1\r\na: " + b"b" * (MAX_HEAD - 20))
    assert conversation.next() is None
    conversation.feed(b"b" * 10)
    reply = conversation.next()
    assert reply is not None
    assert (taken_apart(reply)[0], reply.keep) == (431, False)
    assert one(get("/", "a: " + "b" * (MAX_HEAD - 30)))[0] == 200


def test_after_the_last_reply_nothing_is_kept_or_answered():
    conversation = Http(PAGES).conversation(web())
    conversation.feed(b"\x16")
    reply = conversation.next()
    assert reply is not None
    assert not reply.keep
    conversation.feed(get("/"))
    assert conversation.next() is None


# ---- the token


def basic(text):
    return "Authorization: Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer sés:ame",
        "authorization: bearer  sés:ame ",
        basic(":sés:ame"),
        basic("anybody:sés:ame"),
    ],
)
def test_the_token_opens(line):
    assert one(get("/", line.encode().decode("latin-1")), token="sés:ame")[0] == 200


@pytest.mark.parametrize(
    "line",
    [
        "x: y",
        "Authorization: Bearer",
        "Authorization: Bearer sesame2",
        "Authorization: Bearer sesam",
        "Authorization: sesame",
        "Authorization: Token sesame",
        "Authorization: Basic sesame",
        "Authorization: Basic !!!!",
        basic("sesame"),
        basic("sesame:"),
        basic("user:Sesame"),
    ],
)
def test_nothing_else_does(line):
    for path in ("/", "/none", "/healthz/", "//healthz"):
        (reply,) = talk(get(path, line), token="sesame")
        status, fields, body = taken_apart(reply)
        assert (status, reply.keep) == (401, True)
        assert [value.split()[0] for name, value in fields if name == "WWW-Authenticate"] == [
            "Basic",
            "Bearer",
        ]
        assert b"sesame" not in reply.data
        assert b"page" not in body


def test_a_probe_needs_no_token():
    assert one(get("/healthz"), token="sesame")[0] == 200
    assert one(get("/readyz"), token="sesame")[0] == 503


def test_an_empty_token_is_a_mistake():
    with pytest.raises(MisuseError, match="allow every client"):
        RoleTokens({Role.ENGINE: ""})


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("127.0.0.1:9470", 200), ("[::1]:9470", 200), ("10.1.2.3", 200), ("localhost:9470", 200)),
        *(("lmtier:9470", 200), ("GPU-7.cluster.example.", 200), ("page.localhost", 200)),
        *(("rebound.attacker.example:9470", 421), ("127.0.0.1.attacker.example", 421), ("1.2.3", 421)),
    ],
)
def test_without_a_token_only_local_names_are_answered(host, status):
    http = Http(PAGES, names=("gpu-7.cluster.example",))
    conversation = http.conversation(web())
    conversation.feed(get("/", f"Host: {host}") + get("/healthz", f"Host: {host}"))
    statuses = [taken_apart(conversation.next())[0] for _ in range(2)]
    assert statuses == [status, 200]


def test_whoever_has_the_token_may_use_any_name():
    lines = ("Host: proxy.example", "Authorization: Bearer sesame")
    assert one(get("/", *lines), token="sesame")[0] == 200


def test_only_a_wrong_token_is_answered_late():
    late = {"10.0.0.9:5": 12.5}
    conversation = Http(PAGES, None, tokens("sesame"), late.__getitem__).conversation(web("10.0.0.9:5"))
    conversation.feed(get("/") + get("/", basic("a:guess")) + get("/", "Authorization: Bearer sesame"))
    replies = list(iter(conversation.next, None))
    assert [(taken_apart(each)[0], each.at) for each in replies] == [(401, 0.0), (401, 12.5), (200, 0.0)]


# ---- the routes


@pytest.fixture
def server():
    with Cache(Config(tiers=["cpu://?capacity=1MiB"], prefault=False)) as cache:
        report = Report(cache, list, started=0.0)
        report.sample()
        yield report, routes(cache, report), EngineVerbs(cache, report=report).api


def test_the_routes(server):
    _, pages, api = server
    assert set(pages) == {"/", "/metrics", "/healthz", "/health", "/readyz", "/version"}
    for path in ("/healthz", "/health"):
        assert one(get(path), pages=pages)[2] == b"ok\n"
    assert one(get("/"), pages=pages)[2].startswith(b"<!doctype html>")
    status, headers, body, _ = one(get("/metrics"), pages=pages)
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert b"\nlmtier_asked_tokens_total 0.0\n" in body
    assert json.loads(one(get("/version"), pages=pages)[2])["version"]
    assert json.loads(one(get("/api/stats"), api=api)[2])["counted"]["asked"] == 0
    view = json.loads(one(get("/api/view?minutes=1&columns=30"), api=api)[2])
    assert (len(view["columns"]), view["lately"]["asked"]) == (30, 0)
    for minutes in ("0", "1e-300", "16", "true"):
        assert one(get(f"/api/view?minutes={minutes}"), api=api)[0] == 400


def test_readiness_is_a_status_and_a_reason(server):
    report, pages, _ = server
    assert one(get("/readyz"), pages=pages)[::2] == (200, b"ready\n")
    report.stopping = True
    assert one(get("/readyz"), pages=pages)[::2] == (503, b"the server is shutting down\n")
    assert one(get("/healthz"), pages=pages)[0] == 200


# ---- any bytes at all


def test_fifty_thousand_mutated_requests_break_nothing():
    rng = random.Random(20)
    seeds = [
        get("/", "Host: x", "Connection: keep-alive"),
        get("/healthz", basic("a:sesame"), version="1.0"),
        get("/readyz", "Content-Length: 5", "Accept: */*") + b"hello",
        get("/none", "Transfer-Encoding: chunked") + b"5\r\nhello\r\n0\r\n\r\n",
        get("http://h/x", "Authorization: Bearer sesame") * 3,
    ]
    pieces = [
        b"\r\n",
        b"\n",
        b"\r",
        b":",
        b" ",
        b"\0",
        b"\xff",
        b"HTTP/1.1",
        b"Content-Length: 9",
        b"\r\n\r\n",
        b"%00",
    ]
    http = Http(PAGES, None, tokens("sesame"))
    seen = set()
    for _ in range(50_000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    data[at:at] = rng.choice(pieces)
                case 2:
                    del data[at : at + rng.randrange(1, 9)]
                case 3:
                    data += data[at:]
        conversation = http.conversation(web())
        cut = rng.randrange(len(data) + 1)
        keep = True
        for part in (data[:cut], data[cut:]):
            conversation.feed(part)
            while (reply := conversation.next()) is not None:
                assert keep, "a reply after the last one"
                keep = reply.keep
                seen.add(reply.data[9:12])
    assert seen >= {b"200", b"400", b"401", b"404", b"405", b"413", b"503"}


def test_of_many_hints_each_has_a_turn_of_its_own():
    """One may look at every session, and other clients wait meanwhile."""
    body = json.dumps(envelope("many", *[("release", {"session": "agent"})] * 5)).encode()
    lines = "Host: x", "Authorization: Bearer sesame", "Content-Type: application/json"
    head = get("/api/hints", *lines, f"Content-Length: {len(body)}").replace(b"GET", b"POST")
    with Cache(Config(tiers=["cpu://?capacity=1MiB"], prefault=False)) as cache:
        http = Http(PAGES, EngineVerbs(cache).api, tokens("sesame"))
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        caller = web()
        connection = HttpConnection(ours, http.conversation(caller), caller)
        theirs.send(head + body + get("/healthz", *lines))
        done = []
        connection.read_and_run()
        while connection.needs_turn:
            done.append(cache.metrics.value("lmtier_hints_total", action="release", result="done"))
            assert (connection.wants_input, connection.is_idle) == (False, False)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
            connection.read_and_run()
        assert done == [1, 2, 3, 4, 5]
        status, fields, said = taken_apart(Reply(theirs.recv(1 << 16), 0.0, True))
        told, rest = said[: int(dict(fields)["Content-Length"])], said[int(dict(fields)["Content-Length"]) :]
        assert (status, [each["result"] for each in json.loads(told)]) == (200, ["done"] * 5)
        assert rest.endswith(b"ok\n"), "the next request has its answer"
        connection.close()
        theirs.close()
