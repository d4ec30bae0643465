"""A store that lies costs a hit at most: each lie is a counted miss in time, and holds up nobody else."""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmtier.client.client import Client
from lmtier.config import TierSpec
from lmtier.format.layout import PAGE
from lmtier.testing import drain, pages, run, sample
from lmtier.tiers.base import Done, Item, Job, Op, Stat
from lmtier.tiers.registry import open_tier
from tests.client.test_client import ONE, C, store
from tests.client.test_client import keys as keys_of
from tests.faults.deadlines import PATIENCE, Lateness, in_time
from tests.liar import Liar, Lie, Said, for_ever, http_reply
from tests.redis_process import CARD
from tests.s3_process import BUCKET, KEY, SECRET
from tests.server.process import served, until
from tests.stopwatch import Stopwatch

pytestmark = [pytest.mark.alone, pytest.mark.unsealed]

DEADLINE = 0.3
TURN = 0.2
"""The longest that others may wait for their turn."""
MIB = 1 << 20
OURS = sample(1)
NAME = f"lie/default/{OURS.name}"
DIGITS = b"7" * 5000


class Turns:
    """A thread that wants a turn now and then, as the loop of a server does: the longest wait for one.

    As in a server, the collector does not walk what was there before.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Turns:
        gc.freeze()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        gc.unfreeze()

    def _work(self) -> None:
        while True:
            watch = Stopwatch()
            if self._over.wait(0.02):
                return
            self.longest = max(self.longest, watch.seconds() - 0.02)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def nothing_left() -> Iterator[None]:
    threads, files, memory = set(threading.enumerate()), descriptors(), resident()
    yield
    until(lambda: descriptors() <= files and not set(threading.enumerate()) - threads)
    assert resident() - memory < 64 * MIB


def endure(url: str) -> list[Done]:
    """All that a tier there is asked for, from its start on. Nothing is found, and nothing is late."""
    with nothing_left(), Turns() as turns:
        began = Stopwatch()
        with closing(open_tier(TierSpec.parse(url))) as tier:
            assert began.seconds() < DEADLINE + Lateness.slack, "the start"
            done: list[Done] = in_time(tier, lambda: ask_everything(tier))
    print(f"{url}: {[f'{each.seconds:.2f} s {each.error[:70]}' for each in done]}; {turns.longest:.3f}")
    assert turns.longest < TURN
    return done


def ask_everything(tier: Any) -> list[Done]:
    """A store, a load, a lookup and a deletion at once, by number of the job."""
    tier.submit(Job(0, Op.STORE, (sample(2).item(),)))
    tier.submit(Job(1, Op.LOAD, (Item(OURS.name, pages(OURS.room)),)))
    tier.submit(Job(2, Op.LOOKUP, (Item(OURS.name),)))
    tier.submit(Job(3, Op.DELETE, (Item(sample(3).name),)))
    return sorted(drain(tier, 4), key=lambda done: done.id)


def finds(done: Done) -> bool:
    return any(isinstance(each, Stat) for each in done.ok.values())


def must_miss(done: list[Done]) -> None:
    _, loaded, looked_up, _ = done
    assert loaded.failed.keys() == {OURS.name}
    assert not finds(looked_up)


# ---- HTTP


def list_of(*entries: tuple[str, str], more: str = "", **extra: str) -> bytes:
    rows = "".join(f"<Contents><Key>{k}</Key><Size>{size}</Size></Contents>" for k, size in entries)
    rest = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{more}</NextContinuationToken>" * bool(
        more
    )
    return xml(f"<ListBucketResult>{rows}{rest}</ListBucketResult>".encode())


def xml(body: bytes) -> bytes:
    return http_reply(body, Content_Type="application/xml")


def error(code: str, status: str = "403 Forbidden", more: bytes = b"", **headers: str) -> bytes:
    return http_reply(b"<Error><Code>" + code.encode() + b"</Code>" + more + b"</Error>", status, **headers)


def chunked(body: bytes, **headers: str) -> bytes:
    head = http_reply(b"", **headers, Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
    return head + body


def new_tokens(liar: Liar, request: bytes) -> Said:
    number = liar.requests
    return list_of((f"lie/default/{OURS.name.key[:4].hex()}{number:08d}", "9999"), more=f"t{number}")


OK = b"HTTP/1.1 200 OK\r\n"
BOMB = gzip.compress(bytes(16 * MIB), 9)
SIZED = ("lie/default/" + str(OURS.name), str(PAGE + OURS.room))
EVIL_XML = {
    "100 KB of open tags": b"<ListBucketResult>" + b"<Contents>" * 10_000,
    "4 MB of open tags": b"<Contents>" * 400_000,
    "open rules": b"<Error>" * 9_000,
    "a tag of 4 MiB": b"<ListBucketResult " + b"x" * 4 * MIB,
    "an attribute of 4 MiB": b"<ListBucketResult x='" + b"x" * 4 * MIB,
    "a comment of 4 MiB": b"<ListBucketResult><!--" + b"x" * 4 * MIB,
    "a text of 4 MiB": b"<ListBucketResult>" + b"&#120;" * (4 * MIB // 6),
    "half a million attributes": b"<a " + b" ".join(b"a%d=''" % i for i in range(500_000)),
    "half a million elements": b"<ListBucketResult>" + b"<a/>" * 500_000 + b"</ListBucketResult>",
    "entities that grow": b"<!DOCTYPE a [<!ENTITY a 'aaaaaaaaaa'>"
    + b"".join(b"<!ENTITY %c '%s'>" % (i, b"&%c;" % (i - 1) * 10) for i in range(98, 108))
    + b"]><ListBucketResult><Contents><Key>&k;</Key></Contents></ListBucketResult>",
    "an entity of another place": b"<!DOCTYPE a [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><ListBucketResult>&a;"
    b"</ListBucketResult>",
    "another encoding": "<?xml version='1.0' encoding='utf-16'?><ListBucketResult/>".encode("utf-16"),
    "bytes that are no text": b"<ListBucketResult>" + b"\xff\xfe\x00" * 1000,
    "an unknown entity": b"<ListBucketResult>&nbsp;</ListBucketResult>",
    "another document": b"<html><body>hello</body></html>",
    "JSON": b"[" * 100_000,
}
LIES: Mapping[str, Lie] = {
    # the head
    "no HTTP": b"+OK\r\n",
    "a status of 5,000 digits": b"HTTP/1.1 " + DIGITS + b"\r\n\r\n",
    "a line without end": lambda liar, request: for_ever(b"HTTP/1.1 200 OK"),
    "headers without end": lambda liar, request: itertools.chain((OK,), for_ever(b"x: y\r\n")),
    "a header of 1 MiB": OK + b"x: " + b"y" * MIB + b"\r\n\r\n",
    "a head that drips": lambda liar, request: liar.drip(OK * 9),
    "no colon": OK + b"nothing\r\n\r\n",
    "replies of 1xx without end": lambda liar, request: for_ever(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "1,000 replies of 1xx": b"HTTP/1.1 102 Processing\r\n\r\n" * 1000 + list_of(SIZED),
    "two replies": http_reply(b"x") * 2,
    "nothing": b"",
    # lengths
    "a length of 5,000 digits": OK + b"Content-Length: " + DIGITS + b"\r\n\r\n",
    "a length below 0": OK + b"Content-Length: -1\r\n\r\n",
    "a length in other digits": OK + "Content-Length: \u0663\r\n\r\n".encode(),
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 9\r\n\r\nx",
    "a huge length": OK + b"Content-Length: 4611686018427387904\r\n\r\n",
    "a huge length, and bytes": lambda liar, request: itertools.chain(
        (OK + b"Content-Length: 4611686018427387904\r\n\r\n",), for_ever(bytes(9))
    ),
    "more than comes": OK + b"Content-Length: 5000\r\n\r\nhello",
    "less than comes": OK + b"Content-Length: 5\r\n\r\n" + list_of(SIZED),
    "no length and no end": lambda liar, request: itertools.chain((OK + b"\r\n",), for_ever(b" ")),
    "a body that drips": lambda liar, request: liar.drip(b"<List", OK + b"Content-Length: 99\r\n\r\n"),
    # chunks
    "a chunk of 5,000 digits": chunked(DIGITS + b"\r\n"),
    "a chunk below 0": chunked(b"-5\r\nhello\r\n"),
    "a chunk with an underscore": chunked(b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n"),
    "a chunk longer than it says": chunked(b"1\r\nhello\r\n0\r\n\r\n"),
    "a chunk of 2 GiB": chunked(b"7fffffff\r\n"),
    "chunks without end": lambda liar, request: itertools.chain((chunked(b""),), for_ever(b"1\r\n \r\n")),
    "chunks that drip": lambda liar, request: liar.drip(b"1\r\n \r\n" * 9, chunked(b"")),
    "an extension without end": lambda liar, request: itertools.chain((chunked(b"1;"),), for_ever(b"x")),
    "trailers without end": lambda liar, request: itertools.chain((chunked(b"0\r\n"),), for_ever(b"x:\r\n")),
    # what nobody asked for
    "a bomb": http_reply(BOMB, Content_Encoding="gzip"),
    "a bomb in chunks": chunked(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BOMB), BOMB), Content_Encoding="gzip, br"),
    "a packed transfer": chunked(BOMB).replace(b"chunked", b"gzip, chunked"),
    "an ETag of something else": http_reply(bytes(2 * PAGE), ETag='"00"', x_amz_checksum_sha256="AAAA"),
    "not modified": http_reply(b"", "304 Not Modified", ETag='"00"'),
    "a part of something else": http_reply(
        bytes(PAGE), "206 Partial Content", Content_Range="bytes 9-8/7"
    ),
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
    # documents
    **{name: xml(body) for name, body in EVIL_XML.items()},
    **{f"refused with {name}": http_reply(body, "403 Forbidden") for name, body in EVIL_XML.items()},
    # lists
    "a size of 5,000 digits": list_of((SIZED[0], DIGITS.decode())),
    "a size below 0": list_of((SIZED[0], "-5")),
    "a size in other digits": list_of((SIZED[0], "\u0663" * 4)),
    "a size of an exabyte": list_of((SIZED[0], str(1 << 59))),
    "a name of 1 MiB": list_of(("lie/default/" + "x" * MIB, "9")),
    "names that were not asked for": list_of(("other/" + str(OURS.name), "9999")),
    "more names than there can be": list_of(*(("lie/default/x", "9"),) * 2000),
    "the same page for ever": list_of(("lie/default/" + OURS.name.key[:4].hex(), "9999"), more="again"),
    "pages without end": new_tokens,
    "a token of 1 MiB": list_of(("lie/default/" + OURS.name.key[:4].hex(), "9999"), more="x" * MIB),
    "a list that goes on nowhere": list_of(more=" "),
    # refusals
    "a date of 5,000 digits": error("RequestTimeTooSkewed", Date=f"Tue, 1 Jan {'7' * 5000} 00:00:00"),
    "a date in the year 1": error("RequestTimeTooSkewed", Date="Mon, 01 Jan 0001 00:00:00 +2359"),
    "a date far away": error("RequestTimeTooSkewed", Date="Mon, 01 Jan 9999999999 00:00:00 GMT"),
    "a zone far away": error("RequestTimeTooSkewed", Date="Tue, 01 Jan 2030 00:00:00 +99999999999"),
    "another date each time": lambda liar, request: error(
        "RequestTimeTooSkewed", Date=f"Tue, 01 Jan {2000 + liar.requests} 00:00:00 GMT"
    ),
    "once more, for ever": error("InternalError", "500 Internal Server Error"),
    "a code of 1 MiB": error("x" * MIB),
    "a message that forges a log": error("No", more=b"<Message>&#10;ERROR lmtier: you are root</Message>"),
    "a redirect to itself": lambda liar, request: http_reply(
        b"", "307 Temporary Redirect", Location=f"http://127.0.0.1:{liar.port}/"
    ),
    "a region of 60 KB": http_reply(b"", "301 Moved Permanently", x_amz_bucket_region="x" * 60_000),
}  # fmt: skip
EARLY_ENDS = {
    "in the status": OK[:9],
    "in the head": OK + b"Content-Le",
    "in the body": OK + b"Content-Length: 99\r\n\r\n<List",
    "in a chunk": chunked(b"5\r\nhel"),
    "between chunks": chunked(b"5\r\n<List\r\n"),
    "where nothing says how long it is": OK + b"\r\n<ListBucketResult>",
}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def s3_at(port: int) -> str:
    return f"s3://{BUCKET}/lie?endpoint=http://127.0.0.1:{port}&deadline={DEADLINE}s&ttl=1d"


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_bucket_that_lies_is_a_miss_in_time(keys, lie):
    with Liar(lie, http=True) as liar:
        must_miss(endure(s3_at(liar.port)))


@pytest.mark.parametrize("lie", EARLY_ENDS.values(), ids=EARLY_ENDS.keys())
def test_a_bucket_that_ends_early_is_a_miss_in_time(keys, lie):
    with Liar(lie, http=True, ends=True) as liar:
        must_miss(endure(s3_at(liar.port)))


def test_a_truthful_bucket_is_found_in_the_same_way(keys):
    """So what the lies do not get is not missed for another reason."""

    def truth(liar: Liar, request: bytes) -> Said:
        is_list = b"list-type" in request.split(b"\r\n")[0]
        return list_of(SIZED) if is_list else http_reply(OURS.at_rest() if request[:3] == b"GET" else b"")

    with Liar(truth, http=True) as liar:
        done = endure(s3_at(liar.port))
        assert not any(each.failed for each in done)
        assert finds(done[2])


def test_who_sends_us_on_gets_no_request_there(keys):
    with Liar(b"") as elsewhere:
        there = f"http://127.0.0.1:{elsewhere.port}/"
        for status in ("301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"):
            with Liar(http_reply(b"", status, Location=there), http=True) as liar:
                must_miss(endure(s3_at(liar.port)))
        assert elsewhere.requests == 0


def test_a_corrupt_load_and_its_deletion_share_a_deadline(keys):
    def truth_late(liar: Liar, request: bytes) -> Said:
        if request[:3] == b"GET" and b"list-type" not in request:
            return http_reply(bytes(PAGE + OURS.room))
        return b""  # the deletion is never answered

    with Liar(truth_late, http=True) as liar:
        done = endure(s3_at(liar.port))
        assert done[1].failed == {OURS.name: "corrupt"}


# ---- the services that give keys


AS_KEYS = {"AccessKeyId": "id", "SecretAccessKey": "s", "Token": "t", "Expiration": "2999-01-01T00:00:00Z"}
JSON_LIES: Mapping[str, bytes] = {
    "100,000 levels": b"[" * 100_000,
    "20,000 levels": b"[" * 20_000 + b"]" * 20_000,
    "a million values": b"[" + b"[]," * MIB + b"[]]",
    "a number of 5,000 digits": b'{"AccessKeyId": ' + DIGITS + b"}",
    "a list": b"[]",
    "no text": b"\xff\xfe",
    "no keys": b"{}",
    **{
        f"{name} as {name_of}": json.dumps({**AS_KEYS, name: value}).encode()
        for name in ("AccessKeyId", "Token", "Expiration")
        for name_of, value in (
            ("lines of a request", "id\r\nX-Evil: yes"),
            ("other letters", "\u0663\u4e2d"),
            ("1 MiB", "x" * MIB),
            ("a number", 5),
            ("a list", [1]),
        )
    },
    "an end in the year 1": json.dumps({**AS_KEYS, "Expiration": "0001-01-01T00:00:00"}).encode(),
    "an end in another unit": json.dumps({**AS_KEYS, "Expiration": "9" * 5000}).encode(),
}
SOURCES = {
    "container": {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:{port}/role"},
    "instance": {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:{port}"},
    "identity": {
        "AWS_ENDPOINT_URL_STS": "http://127.0.0.1:{port}",
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/cache",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "{folder}/identity",
    },
}
OF_KEYS: Mapping[str, Mapping[str, Lie]] = {
    "container": {name: http_reply(body) for name, body in JSON_LIES.items()},
    "instance": {name: lie for name, lie in LIES.items() if name[0] in "12n"},
    "identity": {
        name: xml(b"<a><Credentials>" + body + b"</Credentials></a>")
        for name, body in (
            ("nothing", b""),
            ("half of it", b"<AccessKeyId>id</AccessKeyId>"),
            ("lines", b"<AccessKeyId>i&#13;&#10;x: y</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"),
            *EVIL_XML.items(),
        )
    },
}


@pytest.mark.parametrize("source", SOURCES)
def test_who_lies_about_keys_is_a_failure_in_time(tmp_path, monkeypatch, source):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", str(source != "instance").lower())
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    (tmp_path / "identity").write_text("a signed statement")
    with Liar(b"", http=True) as bucket, Liar(b"", http=True) as liar:
        for name, value in SOURCES[source].items():
            monkeypatch.setenv(name, value.format(port=liar.port, folder=tmp_path))
        for name, lie in OF_KEYS[source].items():
            print(name)
            liar.lie = lie
            must_miss(endure(s3_at(bucket.port)))
        assert bucket.requests == 0, "who has no keys asks for nothing"


# ---- Redis


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def array(*items: bytes) -> bytes:
    return b"*%d\r\n%s" % (len(items), b"".join(items))


def slots(*runs: tuple[int, int, bytes, bytes]) -> bytes:
    return array(
        *(array(b":%d\r\n" % a, b":%d\r\n" % b, array(bulk(host), port)) for a, b, host, port in runs)
    )


def to_itself(word: bytes) -> Lie:
    return lambda liar, request: b"-%s 1 127.0.0.1:%d\r\n" % (word, liar.port)


MILLION = 1_000_000
REDIS_LIES: Mapping[str, Lie] = {
    "a million empty lists": b"*1000000\r\n" + b"*0\r\n" * MILLION,
    "a million empty strings": b"*1000000\r\n" + b"$0\r\n\r\n" * MILLION,
    "a million nulls": b"~1000000\r\n" + b"_\r\n" * MILLION,
    "a million lists of a million": b"*1000000\r\n" * 1000,
    "empty lists without end": lambda liar, request: for_ever(b"*0\r\n"),
    "lists in lists": b"*1\r\n" * 100_000,
    "maps in sets": b"~1\r\n%1\r\n" * 10_000,
    "a map with lists as keys": b"%1\r\n*0\r\n+v\r\n",
    "a length of 5,000 digits": b"$" + DIGITS + b"\r\n",
    "a list of 5,000 digits": b"*" + DIGITS + b"\r\n",
    "a length below 0": b"$-5\r\n",
    "an exabyte": b"$1152921504606846976\r\n",
    "an exabyte, and bytes": lambda liar, request: itertools.chain(
        (b"$1152921504606846976\r\n",), for_ever(bytes(9))
    ),
    "a number of 5,000 digits": b":" + DIGITS + b"\r\n",
    "a big number of 5,000 digits": b"(" + DIGITS + b"\r\n",
    "a double of 5,000 digits": b"," + DIGITS + b"\r\n",
    "a double with an exponent": b",1e999999999\r\n",
    "a line without end": lambda liar, request: itertools.chain((b"+",), for_ever(b"x")),
    "an error of 8 MiB": b"!8388608\r\n" + b"x" * (8 * MIB) + b"\r\n",
    "an error that forges a log": b"-ERR no\x1b[2J\x07\r\n",
    "messages that nobody asked for": lambda liar, request: for_ever(b">2\r\n+message\r\n+x\r\n"),
    "attributes": b"|1\r\n+ttl\r\n:5\r\n" * 1000,
    "a string that drips": lambda liar, request: liar.drip(b"x" * 99, b"$4128\r\n"),
    "a list that drips": lambda liar, request: liar.drip(b"*0\r\n" * 99, b"*99\r\n"),
    "a line that drips": lambda liar, request: liar.drip(b"x" * 99, b"-"),
    "two answers": bulk(b"x" * CARD.size) * 2,
    "a string that ends otherwise": b"$5\r\nhelloXX",
    "another card": bulk(CARD.pack(b"lmtier-1", bytes(8), 1 << 62, PAGE)),
    "a card with a giant part": bulk(CARD.pack(b"lmtier-1", bytes(8), 1 << 62, 1 << 61)),
    "nothing": b"",
    "a move": to_itself(b"MOVED"),
}
CLUSTER_LIES: Mapping[str, Lie] = {
    "all slots 20,000 times": slots(*((0, 16383, b"127.0.0.1", b":1\r\n"),) * 20_000),
    "16,384 nodes": slots(*((n, n, b"127.0.0.1", b":%d\r\n" % (n + 1)) for n in range(16384))),
    "a port of 5,000 digits": slots((0, 16383, b"127.0.0.1", b":" + DIGITS + b"\r\n")),
    "port 99999": slots((0, 16383, b"127.0.0.1", b":99999\r\n")),
    "a port below 0": slots((0, 16383, b"127.0.0.1", b":-1\r\n")),
    "a host of 60 KB": slots((0, 16383, b"x" * 60_000, b":1\r\n")),
    "a host with a NUL": slots((0, 16383, b"a\0b", b":1\r\n")),
    "a host of dots": slots((0, 16383, b"....", b":1\r\n")),
    "a host that is no text": slots((0, 16383, b"\xff\xfe", b":1\r\n")),
    "slots that do not exist": slots((0, 99999, b"127.0.0.1", b":1\r\n")),
    "slots backwards": slots((9, 3, b"127.0.0.1", b":1\r\n")),
    "no slots": b"*0\r\n",
    "texts": array(*(bulk(b"x" * MIB),) * 8),
    "moved for ever": to_itself(b"MOVED"),
    "asked for ever": to_itself(b"ASK"),
    "moved to a port of 5,000 digits": b"-MOVED 1 127.0.0.1:" + DIGITS + b"\r\n",
    "moved to a port in other digits": "-MOVED 1 127.0.0.1:\u00b2\r\n".encode(),
    "moved to port 99999": b"-MOVED 1 127.0.0.1:99999\r\n",
    "moved to no host": b"-MOVED 1 " + b"." * 70 + b":1\r\n",
    "moved in 8 MiB": b"!8388608\r\nMOVED " + b"x " * (4 * MIB - 3) + b"\r\n",
    "moved to many": lambda liar, request: b"-MOVED 1 127.%d.0.1:1\r\n" % (liar.requests % 250),
}
SENTINEL_LIES: Mapping[str, Lie] = {
    "a port of 5,000 digits": array(bulk(b"127.0.0.1"), bulk(DIGITS)),
    "port 0": array(bulk(b"127.0.0.1"), bulk(b"0")),
    "port 99999": array(bulk(b"127.0.0.1"), bulk(b"99999")),
    "a host that is no text": array(bulk(b"\xff\xfe"), bulk(b"1")),
    "a host of 60 KB": array(bulk(b"x" * 60_000), bulk(b"1")),
    "a host with a NUL": array(bulk(b"a\0b"), bulk(b"1")),
    "itself, for ever": lambda liar, request: array(bulk(b"127.0.0.1"), bulk(b"%d" % liar.port)),
    "no master": b"*-1\r\n",
    "a million empty lists": b"*1000000\r\n" + b"*0\r\n" * MILLION,
}
SOURCE_LIES: Mapping[str, Lie] = {
    "a size below 0": b"*1\r\n:-5\r\n",
    "a size of an exabyte": b"*1\r\n:1152921504606846976\r\n",
    "more sizes than names": b"*2\r\n:1\r\n:1\r\n",
    "a million empty lists": b"*1000000\r\n" + b"*0\r\n" * MILLION,
    "a text of 32 MiB": bulk(bytes(32 * MIB)),
}


def knows_slots(lie: Lie) -> Lie:
    """It names itself as the only node, and lies about keys."""

    def say(liar: Liar, request: bytes) -> Said:
        if b"SLOTS" in request:
            return slots((0, 16383, b"127.0.0.1", b":%d\r\n" % liar.port))
        return lie(liar, request) if callable(lie) else lie

    return say


ALL_REDIS: Mapping[str, tuple[str, Lie]] = {
    **{f"redis: {name}": ("redis://127.0.0.1:{port}", lie) for name, lie in REDIS_LIES.items()},
    **{
        f"cluster: {name}": (
            "redis-cluster://127.0.0.1:{port}",
            knows_slots(lie) if name.startswith(("moved", "asked")) else lie,
        )
        for name, lie in CLUSTER_LIES.items()
    },
    **{
        f"sentinel: {name}": ("redis-sentinel://127.0.0.1:{port}/kv", lie)
        for name, lie in SENTINEL_LIES.items()
    },
    **{f"source: {name}": ("lmtier://127.0.0.1:{port}", lie) for name, lie in SOURCE_LIES.items()},
}


@pytest.mark.parametrize(("url", "lie"), ALL_REDIS.values(), ids=ALL_REDIS.keys())
def test_a_redis_that_lies_is_a_miss_in_time(url, lie):
    with Liar(lie) as liar:
        must_miss(endure(url.format(port=liar.port) + f"?deadline={DEADLINE}s"))


# ---- searches and deletions, which have no end of their own


def clear(tier: Any) -> Done:
    done: Done = in_time(tier, lambda: run(tier, Job(1, Op.CLEAR, ())))
    return done


def test_a_search_that_comes_back_to_where_it_was_ends(keys):
    with (
        Liar(LIES["the same page for ever"], http=True) as liar,
        closing(open_tier(TierSpec.parse(s3_at(liar.port)))) as tier,
    ):
        assert "ends in the middle" in clear(tier).error
    scans = array(bulk(b"7"), array())
    with Liar(scans) as liar, closing(open_tier(TierSpec.parse(f"redis://127.0.0.1:{liar.port}"))) as tier:
        assert "a SCAN was answered" in clear(tier).error
    scans = array(bulk(b"7" * 30), array())
    with Liar(scans) as liar, closing(open_tier(TierSpec.parse(f"redis://127.0.0.1:{liar.port}"))) as tier:
        assert "a SCAN was answered" in clear(tier).error


def test_cards_that_promise_many_parts_delay_no_deletion():
    card = bulk(CARD.pack(b"lmtier-1", bytes(8), 65_536 * PAGE, PAGE))

    def say(liar: Liar, request: bytes) -> Said:
        return card * request.count(b"GETRANGE") + b":1\r\n" * request.count(b"UNLINK")

    with Liar(say) as liar, nothing_left(), Turns() as turns:
        url = f"redis://127.0.0.1:{liar.port}?deadline={DEADLINE}s"
        with closing(open_tier(TierSpec.parse(url))) as tier:
            victims = tuple(Item(sample(number, 1).name) for number in range(100))
            for _ in range(3):
                assert in_time(tier, lambda: run(tier, Job(1, Op.DELETE, victims))).failed
        assert turns.longest < TURN


# ---- others, while stores lie


def test_a_server_answers_others_while_its_stores_lie(tmp_path, keys):
    """Each second answer is true, so that the server goes on asking."""

    def of_bucket(request: bytes) -> Said:
        if request[:3] == b"GET":
            return list_of() if b"list-type" in request else error("NoSuchKey", "404 Not Found")
        return http_reply()

    def of_redis(request: bytes) -> Said:
        answers = {b"GETRANGE": b"$0\r\n\r\n", b"GET": b"$-1\r\n", b"SET": b"+OK\r\n", b"UNLINK": b":0\r\n"}
        return b"".join(answers[word] for word in re.findall(rb"\n(GETRANGE|GET|SET|UNLINK)\r", request))

    def in_turn(lies: Mapping[str, Lie], truth: Any) -> Lie:
        rest = iter(lies.values())
        told = itertools.count()

        def say(liar: Liar, request: bytes) -> Said:
            lie = truth(request) if next(told) % 2 else next(rest, None) or truth(request)
            return lie(liar, request) if callable(lie) else lie

        return say

    def ask(engine: Client) -> None:
        for number in itertools.count():
            if over.is_set():
                return
            names = keys_of(4, f"model {number}")
            engine.release(engine.wait(engine.match(names, ONE)))
            store(engine, names)

    over = threading.Event()
    config = {"chunk_tokens": C, "load_deadline": 2 * DEADLINE, "worth": "always"}
    with (
        Liar(in_turn(LIES, of_bucket), http=True) as bucket,
        Liar(in_turn(REDIS_LIES, of_redis)) as redis,
        served(
            tmp_path,
            "cpu://?capacity=8MiB",
            f"redis://127.0.0.1:{redis.port}?deadline={DEADLINE}s",
            s3_at(bucket.port),
            config=config,
            unix=str(tmp_path / "socket"),
        ) as server,
        Client(str(tmp_path / "socket")) as engine,
        server.connect() as other,
    ):
        longest, pings, before = 0.0, 0, server.rss()
        asking = threading.Thread(target=ask, args=(engine,), daemon=True)
        asking.start()
        end = time.monotonic() + 60
        while bucket.requests < 2 * len(LIES) or redis.requests < 2 * len(REDIS_LIES):
            assert time.monotonic() < end, (bucket.requests, redis.requests)
            watch = Stopwatch(server.process.pid)  # it looks at each thread, of which there are many
            other.expect("PONG", "PING")
            longest, pings = max(longest, watch.seconds()), pings + 1
            time.sleep(0.005)
        over.set()
        asking.join(PATIENCE)
        grown = (server.rss() - before) / MIB
        print(f"{pings} pings beside {len(LIES)} + {len(REDIS_LIES)} lies: {longest:.3f} s, {grown:.0f} MiB")
        assert longest < TURN
        assert grown < 128
