"""A bucket that is away, slow, full, odd or hostile costs hits, never time or bytes: each case is a miss."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmtier.config import Config, TierSpec
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError
from lmtier.format.keys import namespace, tenant
from lmtier.format.layout import PAGE, Name, form_of
from lmtier.format.objects import Selector
from lmtier.testing import (
    Sample,
    delete,
    drain,
    load,
    lookup,
    opaque_layout,
    pages,
    replace_start,
    run,
    sample,
    store,
)
from lmtier.tiers.base import Item, Job, Op, Reason
from lmtier.tiers.registry import open_tier
from tests.certificates import certify
from tests.faults.deadlines import DEADLINE, PATIENCE, in_time
from tests.faults.test_redis_faults import saying
from tests.redis_process import Proxy, free_port, within
from tests.s3_process import (
    BUCKET,
    KEY,
    SECRET,
    Answer,
    Meddler,
    Rclone,
    Request,
    S3Server,
    SeaweedFS,
    refusal,
    serving,
)
from tests.server.process import until
from tests.stopping import stop

MODEL = namespace("m")


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serving(SeaweedFS, tmp_path_factory.mktemp("seaweed")) as process:
        process.put("first", b"x")  # the first store makes volumes, which takes a second
        yield process


@pytest.fixture
def meddler(server: S3Server) -> Iterator[Meddler]:
    with Meddler(server) as between:
        yield between


def tier_at(port: int, place: str, query: str = "", deadline: float = PATIENCE) -> Any:
    """A tier in the bucket, under a prefix of the test's own."""
    url = f"s3://{BUCKET}/{place}?endpoint=http://127.0.0.1:{port}&deadline={deadline}s&{query}"
    return open_tier(TierSpec.parse(url.rstrip("&")))


def of_model(number: int, nbytes: int = 2 * PAGE) -> Sample:
    return replace_start(sample(number, nbytes), MODEL)


def both(tier: Any, each: Sample) -> tuple[Reason | None, Reason | None]:
    """Why it could not be stored, and not be loaded; each in time, and wrong bytes never."""
    stored = in_time(tier, lambda: store(tier, each))
    return stored.failed.get(each.name), load_failure(tier, each)


def load_failure(tier: Any, each: Sample) -> Any:
    done, got = in_time(tier, lambda: load(tier, each.name, each.room))
    assert not done.ok or got == each.payload
    return done.failed.get(each.name)


def lookup_failure(tier: Any, name: Name) -> Any:
    done = in_time(tier, lambda: run(tier, Job(1, Op.LOOKUP, (Item(name),))))
    return done.failed.get(name)


# ---- the way to a bucket


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://", "which bucket"),
        ("s3://AB", "no bucket"),
        ("s3://kv", "no bucket"),
        ("s3://bucket?endpoint=localhost:9000", "https://host:9000"),
        ("s3://bucket?endpoint=ftp://host", "https://host:9000"),
        ("s3://bucket?endpoint=http://host:99999", "up to 65535"),
        ("s3://bucket?endpoint=http://user:hunter2@host", "https://host:9000"),
        ("s3://bucket?endpoint=http://host&ssl_ca_certs=/x", "https://"),
        ("s3://bucket?connections=0", "1 or more"),
        ("s3://bucket?deadline=0s", "more than 0"),
        ("s3://bucket?namespace=a/b", "namespace"),
        ("s3://bucket?style=vhost", "path or host"),
        ("s3://bucket?secret=hunter2", "unknown option"),
        ("s3://bucket?ttl=soon", "ttl='soon'"),
    ],
)
def test_a_wrong_url_is_an_error_at_start(url, why):
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match=why) as refused:
        open_tier(TierSpec.parse(url))
    assert "hunter2" not in str(refused.value)
    assert not set(threading.enumerate()) - threads


def test_a_file_that_is_not_there_is_an_error_at_start():
    with pytest.raises(ConfigError, match="/nowhere: No such file"):
        open_tier(TierSpec.parse("s3://bucket?endpoint=https://host&ssl_ca_certs=/nowhere"))


def test_it_starts_without_its_server_and_finds_it_later(server, tmp_path, caplog):
    each = sample(1)
    port = free_port()
    with closing(tier_at(port, tmp_path.name, deadline=DEADLINE)) as tier:
        assert "without it" in caplog.text
        assert both(tier, each) == (Reason.ERROR, Reason.ERROR)
        assert lookup_failure(tier, each.name) is Reason.ERROR
        with Proxy(server.address, port):
            until(lambda: both(tier, each) == (None, None))
            until(lambda: lookup_failure(tier, each.name) is None)
        assert both(tier, each) == (Reason.ERROR, Reason.ERROR)


def test_a_bucket_that_is_gone_is_a_failure_and_not_a_miss(server, tmp_path):
    with closing(
        open_tier(TierSpec.parse(f"s3://no-such-bucket/{tmp_path.name}?endpoint={server.url}"))
    ) as tier:
        assert load_failure(tier, sample(1)) is Reason.ERROR
        assert lookup_failure(tier, sample(1).name) is Reason.ERROR


def test_wrong_keys_are_a_failure_and_are_told_to_nobody(server, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with closing(tier_at(server.port, tmp_path.name)) as tier:
        assert "SignatureDoesNotMatch" in caplog.text
        assert both(tier, sample(1)) == (Reason.ERROR, Reason.ERROR)
        assert both(tier, sample(2, 4 << 20)) == (Reason.ERROR, Reason.ERROR)
        assert lookup_failure(tier, sample(1).name) is Reason.ERROR
        assert "hunter2" not in repr(tier) + caplog.text
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)  # they were replaced while it runs
        assert both(tier, sample(1)) == (None, None)


@pytest.mark.parametrize("skew", [-3600.0, 3600.0, 86400.0])
def test_a_wrong_clock_is_corrected_by_the_first_refusal(server, tmp_path, skew):
    each = sample(1)
    with closing(tier_at(server.port, tmp_path.name)) as tier:
        tier._bucket.skew = skew  # as if this host's clock were wrong by that
        assert both(tier, each) == (None, None)
        assert abs(tier._bucket.skew) < 5
        assert lookup_failure(tier, each.name) is None


def test_a_bucket_is_found_by_its_own_host_name_too(tmp_path, monkeypatch):
    """As Amazon wants it: the bucket in the name of the host, and not in the path."""
    real = socket.getaddrinfo

    def resolve(host: str, *args: Any, **kwargs: Any) -> Any:
        return real("127.0.0.1" if host.endswith(".example") else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with serving(SeaweedFS, tmp_path / "seaweed", "-s3.domainName", "s3.example") as process:
        url = (
            f"s3://{BUCKET}/a b+c/ä?endpoint=http://s3.example:{process.port}&style=host&deadline={PATIENCE}s"
        )
        with closing(open_tier(TierSpec.parse(url))) as tier:
            assert f"{BUCKET}.s3.example" in repr(tier)
            assert both(tier, sample(1)) == (None, None)
            assert lookup(tier, sample(1).name).keys() == {sample(1).name}
        assert process.keys() == [f"a b+c/ä/default/{sample(1).name}"]


def test_tls_that_is_not_to_be_trusted_is_a_miss(tmp_path):
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    for folder in (ours, theirs):
        folder.mkdir()
        certify(folder / "cert.pem", folder / "key.pem")
    cert, other = str(ours / "cert.pem"), str(theirs / "cert.pem")
    port = free_port()
    options = ("-s3.port.https", str(port), "-s3.cert.file", cert, "-s3.key.file", str(ours / "key.pem"))
    with serving(SeaweedFS, tmp_path / "seaweed", *options):
        for query, host, good in (
            (f"ssl_ca_certs={cert}", "localhost", True),
            (f"ssl_ca_certs={cert}&ssl_check_hostname=false", "127.0.0.1", True),
            (f"ssl_ca_certs={cert}", "127.0.0.1", False),
            (f"ssl_ca_certs={other}", "localhost", False),
            ("", "localhost", False),
        ):
            url = f"s3://{BUCKET}?endpoint=https://{host}:{port}&deadline={PATIENCE}s&{query}"
            with closing(open_tier(TierSpec.parse(url.rstrip("&")))) as tier:
                expected = (None, None) if good else (Reason.ERROR, Reason.ERROR)
                # What is not trusted is refused at once, long before its deadline.
                assert within(PATIENCE / 2, partial(both, tier, sample(1, 3 << 20))) == expected
        with closing(tier_at(port, "plain", deadline=DEADLINE)) as tier:  # plain words to a TLS port
            assert None not in both(tier, sample(1))


# ---- what it says


@pytest.mark.alone
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (refusal(500, "InternalError"), "InternalError"),
        (refusal(503, "SlowDown"), "SlowDown"),
        (refusal(503, "ServiceUnavailable"), "ServiceUnavailable"),
        (refusal(403, "AccessDenied"), "AccessDenied"),
        (refusal(403, "RequestTimeTooSkewed", Date="Tue, 01 Jan 1980 00:00:00 GMT"), "RequestTimeTooSkewed"),
        (refusal(404, "NoSuchBucket"), "NoSuchBucket"),
        (Answer(404, {"Content-Length": "0"}), "404 Not Found"),
        (refusal(412, "PreconditionFailed"), "PreconditionFailed"),
        (refusal(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-north-1"}), "region=eu-north-1"),
        (
            refusal(307, "TemporaryRedirect", Location="http://elsewhere.example/"),
            "http://elsewhere.example/",
        ),
        (Answer(204), "204 No Content"),
        (Answer(503, {}, b"overloaded", ends=True), "503 Service Unavailable"),
    ],
    ids=lambda each: str(each[:1]) if isinstance(each, Answer) else each,
)
def test_a_refusal_is_a_failure_in_time_that_says_why(meddler, tmp_path, answer, why):
    each = sample(1)
    with closing(tier_at(meddler.port, tmp_path.name, deadline=DEADLINE)) as tier:
        until(lambda: both(tier, each) == (None, None))
        until(lambda: lookup_failure(tier, each.name) is None)  # there is a list, which would go on answering
        meddler.spoil = lambda request, real: answer
        done = in_time(tier, lambda: store(tier, each))
        assert done.failed == {each.name: Reason.ERROR}
        assert why in done.error
        done, _ = in_time(tier, lambda: load(tier, each.name, each.room))
        assert done.failed == {each.name: Reason.ERROR}
        assert why in done.error
        assert lookup_failure(tier, each.name) is Reason.ERROR
        with closing(tier_at(meddler.port, tmp_path.name, deadline=DEADLINE)) as late:
            assert lookup_failure(late, each.name) is Reason.ERROR
        meddler.spoil = None
        until(lambda: both(tier, each) == (None, None))
        until(lambda: lookup_failure(tier, each.name) is None)


def test_a_refusal_before_the_whole_body_was_sent_is_heard(tmp_path):
    """Amazon's servers, MinIO and others answer the head of a request, and close."""
    each, asked = sample(1, 16 << 20), []

    def refuse(listener: socket.socket) -> None:
        for status in (b"403 Forbidden", b"403 Forbidden", b"507 Insufficient Storage"):
            with listener.accept()[0] as sock:
                head = sock.recv(4096)
                asked.append(head.split(b" ")[0])
                text = b"<Error><Code>%s</Code></Error>" % status.title().replace(b" ", b"")[3:]
                sock.sendall(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, args=(listener,), daemon=True)
        thread.start()
        with closing(tier_at(listener.getsockname()[1], tmp_path.name)) as tier:
            done = in_time(tier, lambda: store(tier, each))
            assert done.failed == {each.name: Reason.ERROR}
            assert "Forbidden" in done.error
            assert store(tier, each).failed == {each.name: Reason.FULL}
        thread.join(PATIENCE)
    assert asked == [b"GET", b"PUT", b"PUT"], "at the start; then no body is sent twice"


def test_a_request_is_sent_once_more_if_the_server_asks(meddler, tmp_path):
    """S3 says so of an internal error; rclone has one for the first stores in a folder."""
    each = sample(1)
    with closing(tier_at(meddler.port, tmp_path.name)) as tier:
        answers = iter([refusal(500, "InternalError")] * 2)
        meddler.spoil = lambda request, real: next(answers, None) or real()
        assert store(tier, each).failed == {each.name: Reason.ERROR}, "twice is enough"
        answers = iter([refusal(500, "InternalError")])
        assert store(tier, each).ok == {each.name: None}
        answers = iter([refusal(500, "InternalError")])
        assert load_failure(tier, each) is None


def test_a_full_store_is_full_and_still_read(meddler, tmp_path):
    there, new = sample(1), sample(2)
    with closing(tier_at(meddler.port, tmp_path.name)) as tier:
        store(tier, there)
        meddler.spoil = lambda request, real: (
            refusal(507, "InsufficientStorage") if request.method == "PUT" else real()
        )
        assert both(tier, new) == (Reason.FULL, Reason.ABSENT)
        assert load_failure(tier, there) is None


@pytest.mark.alone
@pytest.mark.parametrize(
    ("spoil", "reasons"),
    [
        # How an answer is changed, and what a load may then say.
        (lambda a: a._replace(body=a.body[:5000], ends=True), {Reason.ERROR}),
        (lambda a: a._replace(body=b"", ends=True), {Reason.ERROR}),
        (lambda a: a._replace(body=a.body[:5000]), {Reason.DEADLINE}),
        (lambda a: sized(a, len(a.body) - 1), {Reason.CORRUPT}),
        (lambda a: sized(a, 0), {Reason.CORRUPT}),
        (lambda a: sized(a, len(a.body) + 1), {Reason.DEADLINE, Reason.CORRUPT}),
        (lambda a: sized(a, 1 << 50), {Reason.CORRUPT}),
        (lambda a: sized(a, -1), {Reason.ERROR}),
        (lambda a: a._replace(headers={}, ends=True), {Reason.ERROR}),
        (lambda a: Answer(200, {"Transfer-Encoding": "chunked"}, b"5\r\nhello\r\n0\r\n\r\n"), {Reason.ERROR}),
        (lambda a: a._replace(body=a.body[:5000] + b"?" + a.body[5001:]), {Reason.CORRUPT}),
        (lambda a: a._replace(body=a.body[PAGE:] + a.body[:PAGE]), {Reason.CORRUPT}),
        (lambda a: sized(a, PAGE)._replace(status=206), {Reason.CORRUPT}),
    ],
)  # fmt: skip
def test_a_body_that_is_not_whole_is_a_miss_in_time(meddler, tmp_path, spoil, reasons):
    each = sample(1)
    with closing(tier_at(meddler.port, tmp_path.name, deadline=DEADLINE)) as tier:
        until(lambda: not store(tier, each).failed)
        meddler.spoil = lambda request, real: spoil(real()) if request.method == "GET" else real()
        assert load_failure(tier, each) in reasons
        meddler.spoil = None
        for _ in range(3):  # what was left on the connection is not taken for the next answer
            assert both(tier, each) == (None, None)


def sized(answer: Answer, nbytes: int) -> Answer:
    return answer._replace(headers={**answer.headers, "Content-Length": str(nbytes)})


@pytest.mark.alone
@pytest.mark.parametrize(
    "says",
    [
        b"+OK\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 9,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 3,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
        b"\r\n\r\n" * 9,
        b"",
    ],
    ids=lambda says: says[:40].decode("latin1").strip() or "nothing",
)
def test_whatever_a_server_says_is_a_miss_in_time(tmp_path, says):
    each = sample(1)
    # Less than usual: what is not all of an answer is waited for until then.
    with saying(says) as port, closing(tier_at(port, tmp_path.name, deadline=0.3)) as tier:
        stored, loaded = both(tier, each)
        assert loaded in (Reason.ERROR, Reason.DEADLINE, Reason.CORRUPT)
        if stored is not None:  # an empty 200 is a good answer to a store
            assert stored in (Reason.ERROR, Reason.DEADLINE)
        assert lookup_failure(tier, each.name) in (Reason.ERROR, Reason.DEADLINE)


@pytest.mark.alone
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("what", ["store", "load"])
def test_a_connection_cut_at_any_byte_is_a_miss(server, tmp_path, way, what):
    """Nothing that is half there is ever believed."""
    each = sample(1, 1)
    with (
        Proxy(server.address) as proxy,
        closing(tier_at(proxy.port, tmp_path.name, deadline=DEADLINE)) as tier,
    ):
        until(lambda: both(tier, each) == (None, None))

        def act() -> Any:
            return store(tier, each) if what == "store" else load(tier, each.name, each.room)[0]

        proxy.forget()
        act()
        size = proxy.moved[way]
        places = [n for n in range(size) if n < 12 or n > size - 12 or n % (11 if n < 700 else 97) == 0]
        for place in places:
            proxy.cut(**{way: place})
            done = in_time(tier, act)
            assert done.failed == {each.name: Reason.ERROR}, place
            proxy.cut()
        print(f"a {what} cut at {len(places)} of {size} bytes {way}: each a failure in time")
        assert both(tier, each) == (None, None)


@pytest.mark.alone
def test_a_server_that_stands_still_is_given_up_in_time(tmp_path):
    there, new = sample(1, 3 << 20), sample(2, 3 << 20)
    with (
        serving(SeaweedFS, tmp_path / "seaweed") as server,
        closing(tier_at(server.port, tmp_path.name, deadline=DEADLINE)) as tier,
    ):
        until(lambda: both(tier, there) == (None, None))
        until(lambda: lookup_failure(tier, there.name) is None)
        stop(server.process.pid)
        try:
            assert both(tier, new) == (Reason.DEADLINE, Reason.DEADLINE)
            assert lookup_failure(tier, there.name) is Reason.DEADLINE
            with closing(in_time(tier, lambda: tier_at(server.port, "x", deadline=DEADLINE))) as late:
                assert both(late, new) == (Reason.DEADLINE, Reason.DEADLINE)
            in_time(tier, tier.close)
        finally:
            server.process.send_signal(signal.SIGCONT)


@pytest.mark.alone
def test_a_server_that_drips_is_given_up_in_time(server, tmp_path):
    each, new = sample(1, 1), sample(2)
    with (
        Proxy(server.address) as proxy,
        closing(tier_at(proxy.port, tmp_path.name, deadline=DEADLINE)) as tier,
    ):
        until(lambda: both(tier, each) == (None, None))
        proxy.drip = DEADLINE / 8  # each wait for a byte is short; all of them are not
        assert load_failure(tier, each) is Reason.DEADLINE
        assert in_time(tier, lambda: store(tier, new)).failed == {new.name: Reason.DEADLINE}
        assert lookup_failure(tier, each.name) is Reason.DEADLINE
        proxy.drip = 0.0
        until(lambda: both(tier, each) == (None, None))


def test_two_writers_of_one_name_do_not_mix(server, tmp_path):
    one, two = sample(1, 20 * PAGE), sample(2, 20 * PAGE)
    other = Sample(one.header, two.payload)  # the same name, other bytes
    with (
        closing(tier_at(server.port, tmp_path.name)) as here,
        closing(tier_at(server.port, tmp_path.name)) as there,
    ):
        buffers = [pages(one.room) for _ in range(60)]
        for i, buffer in enumerate(buffers):
            here.submit(Job(3 * i, Op.STORE, (one.item(),)))
            there.submit(Job(3 * i + 1, Op.STORE, (other.item(),)))
            there.submit(Job(3 * i + 2, Op.LOAD, (Item(one.name, buffer),)))
        done = {each.id: each for each in (*drain(here, 60), *drain(there, 120))}
        seen = {bytes(buffer) for i, buffer in enumerate(buffers) if done[3 * i + 2].ok}
        assert seen <= {bytes(one.payload), bytes(two.payload)}
        store(here, one)
        assert load(there, one.name, one.room)[1] == one.payload


@pytest.mark.parametrize("kind", [Rclone, pytest.param(SeaweedFS, marks=pytest.mark.slow)])
def test_a_killed_server_gives_no_wrong_byte(tmp_path, kind):
    objects = [sample(i, 64 * PAGE) for i in range(25)]
    with serving(kind, tmp_path / "server") as server, closing(tier_at(server.port, "kills")) as tier:
        until(lambda: not store(tier, objects[0]).failed)
        failures = wrong = loaded = 0
        for turn in range(8):
            buffers = [pages(each.room) for each in objects]
            for i, (each, buffer) in enumerate(zip(objects, buffers, strict=True)):
                tier.submit(Job(2 * i, Op.STORE, (each.item(),)))
                tier.submit(Job(2 * i + 1, Op.LOAD, (Item(each.name, buffer),)))
            if is_deadly := turn % 4 == 1:
                server.kill()
            done = {each.id: each for each in drain(tier, 50, 30)}
            if is_deadly:
                server.start()
                until(lambda: not store(tier, objects[0]).failed)
            for i, (each, buffer) in enumerate(zip(objects, buffers, strict=True)):
                failures += bool(done[2 * i].failed)
                if done[2 * i + 1].ok:
                    loaded += 1
                    wrong += buffer[: each.header.nbytes] != each.payload[: each.header.nbytes]
        print(f"2 kills, {loaded} loads, {failures} failed stores, {wrong} wrong")
        assert wrong == 0
        assert failures >= 2
        assert loaded > 40


def test_idle_connections_that_ended_cost_nothing(server, tmp_path):
    with Proxy(server.address) as proxy, closing(tier_at(proxy.port, tmp_path.name)) as tier:
        assert not store(tier, *(sample(i) for i in range(16))).failed  # every connection is made
        proxy.drop()
        done = store(tier, *(sample(i) for i in range(16)))
        assert not done.failed


def test_failures_leak_neither_threads_nor_sockets(server, tmp_path):
    threads = set(threading.enumerate())
    with Proxy(server.address) as proxy, closing(tier_at(proxy.port, tmp_path.name, "connections=2")) as tier:
        assert both(tier, sample(1)) == (None, None)
        files = len(list(Path("/proc/self/fd").iterdir()))
        for number in range(100):
            proxy.cut(down=3 * number)
            both(tier, sample(number % 3))
        proxy.cut()
        proxy.drop()
        assert both(tier, sample(1)) == (None, None)
        started = set(threading.enumerate()) - threads
        assert len([each for each in started if each.name.startswith("lmtier-s3")]) == 6
        until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= files + 2 * 6)


def test_no_more_connections_than_threads(server, tmp_path):
    objects = [sample(i, 20 * PAGE) for i in range(40)]
    with Proxy(server.address) as proxy, closing(tier_at(proxy.port, tmp_path.name, "connections=3")) as tier:
        store(tier, *objects)
        for i, each in enumerate(objects):
            tier.submit(Job(3 * i, Op.LOAD, (Item(each.name, pages(each.room)),)))
            tier.submit(Job(3 * i + 1, Op.STORE, (sample(100 + i).item(),)))
            tier.submit(Job(3 * i + 2, Op.LOOKUP, (Item(each.name),)))
        assert not any(done.failed for done in drain(tier, 120))
        assert proxy.most <= 2 * 3 + 2


# ---- what is stored, as a lookup sees it


def pages_fetched(requests: list[Request]) -> int:
    return sum("list-type=2" in request.path for request in requests)


def test_a_lookup_of_512_asks_nothing_once_there_is_a_list(meddler, tmp_path):
    objects = [of_model(i, 1) for i in range(512)]
    with closing(tier_at(meddler.port, tmp_path.name)) as writer:
        for at in range(0, 512, 64):
            assert not store(writer, *objects[at : at + 64]).failed
    with closing(tier_at(meddler.port, tmp_path.name)) as tier:
        meddler.requests.clear()
        names = [each.name for each in objects]
        assert len(lookup(tier, *names)) == 512  # the first one waits for the list
        assert pages_fetched(meddler.requests) == len(meddler.requests) == 1
        assert len(lookup(tier, *names)) == 512
        assert len(meddler.requests) == 1


def test_a_list_is_as_long_as_the_bucket_and_of_one_model(server, tmp_path):
    place = tmp_path.name
    mine, others = [of_model(i) for i in range(1005)], [sample(i) for i in range(5)]
    for each in (*mine, *others):
        server.client.put_object(Bucket=BUCKET, Key=f"{place}/default/{each.name}", Body=b"x" * 2 * PAGE)
    server.client.put_object(Bucket=BUCKET, Key=f"{place}/default/{MODEL.hex()} <&> foreign", Body=b"x")
    with closing(tier_at(server.port, place)) as tier:
        fetched = tier._catalogue.fetched
        assert len(lookup(tier, *(each.name for each in mine))) == 1005
        assert tier._catalogue.fetched - fetched == 2
        assert lookup(tier, others[0].name).keys() == {others[0].name}


def test_the_next_list_finds_what_another_host_has_stored(meddler, tmp_path):
    """Lookups before that list send no request."""
    one, two = of_model(1), of_model(2)
    with (
        closing(tier_at(meddler.port, tmp_path.name)) as writer,
        closing(tier_at(meddler.port, tmp_path.name, "refresh=100ms")) as tier,
        closing(tier_at(meddler.port, tmp_path.name, "refresh=1h")) as patient,
    ):
        store(writer, one)
        for each in (tier, patient):
            assert lookup(each, one.name).keys() == {one.name}
        store(writer, two)
        assert load_failure(patient, two) is None  # a list is no permission: what is asked for is read
        until(lambda: len(lookup(tier, one.name, two.name)) == 2)
        meddler.requests.clear()
        for _ in range(20):
            assert lookup(patient, one.name, two.name).keys() == {one.name}
        assert meddler.requests == []


def test_chunks_deleted_elsewhere_are_missed_when_read(server, tmp_path):
    one, two = of_model(1), of_model(2)
    with (
        closing(tier_at(server.port, tmp_path.name)) as tier,
        closing(tier_at(server.port, tmp_path.name)) as far,
    ):
        store(tier, one, two)
        assert len(lookup(tier, one.name, two.name)) == 2
        delete(far, one.name)
        assert len(lookup(tier, one.name, two.name)) == 2
        assert load_failure(tier, one) is Reason.ABSENT
        assert lookup(tier, one.name, two.name).keys() == {two.name}


def test_a_list_undoes_nothing_that_happens_while_it_comes(meddler, tmp_path):
    gone, new, there = of_model(1), of_model(2), of_model(3)
    reached, go = threading.Event(), threading.Event()

    def late(request: Request, real: Any) -> Any:
        answer = real()
        if "list-type=2" in request.path and "max-keys=1000" in request.path:
            reached.set()
            go.wait(10)
        return answer

    with closing(tier_at(meddler.port, tmp_path.name, "refresh=0s")) as tier:
        store(tier, gone, there)
        assert len(lookup(tier, gone.name, there.name)) == 2
        meddler.spoil = late
        until(lambda: (lookup(tier, sample(0).name._replace(key=MODEL + bytes(28))), reached.is_set())[1])
        delete(tier, gone.name)
        store(tier, new)
        go.set()
        meddler.spoil = None
        fetched = tier._catalogue.fetched
        until(lambda: tier._catalogue.fetched > fetched or not tier._catalogue._wanted)
        assert lookup(tier, gone.name, new.name, there.name).keys() == {new.name, there.name}


def test_a_list_that_takes_long_is_waited_for_once(meddler, tmp_path):
    each, go = of_model(1), threading.Event()

    def late(request: Request, real: Any) -> Any:
        if "max-keys=1000" in request.path:
            go.wait(10)
        return real()

    with closing(tier_at(meddler.port, tmp_path.name)) as writer:
        store(writer, each)
    with closing(tier_at(meddler.port, tmp_path.name, deadline=DEADLINE)) as tier:
        meddler.spoil = late
        assert lookup_failure(tier, each.name) in (None, Reason.DEADLINE, Reason.ERROR)
        go.set()
        until(lambda: lookup(tier, each.name).keys() == {each.name})


def test_a_list_that_failed_is_fetched_again_soon(meddler, tmp_path):
    one, two = of_model(1), of_model(2)
    failed, go = threading.Event(), threading.Event()

    def frozen(request: Request, real: Any) -> Any:
        if "max-keys=1000" in request.path and not failed.is_set():
            go.wait(10)
            failed.set()
        return real()

    with (
        closing(tier_at(meddler.port, tmp_path.name)) as writer,
        closing(tier_at(meddler.port, tmp_path.name, "refresh=50ms", DEADLINE)) as tier,
    ):
        store(writer, one)
        until(lambda: run(tier, Job(1, Op.LOOKUP, (Item(one.name),))).ok)
        store(writer, two)
        time.sleep(0.1)
        meddler.spoil = frozen
        fetched = tier._catalogue._lists[MODEL]
        # Its list hangs until the deadline, and fails. The next one need not wait nine times as long.
        until(lambda: (run(tier, Job(1, Op.LOOKUP, (Item(two.name),))), fetched.problem is not None)[1])
        go.set()
        until(lambda: run(tier, Job(1, Op.LOOKUP, (Item(two.name),))).ok, 4.0)


def test_a_search_deletes_suspects_and_nothing_else(server, tmp_path):
    mine, others = [of_model(i) for i in range(30)], [sample(i) for i in range(9)]
    with closing(tier_at(server.port, tmp_path.name)) as tier:
        store(tier, *mine, *others)
        server.put(f"{tmp_path.name}/default/{MODEL.hex()}-somebody-else's", b"x")
        assert run(tier, Job(1, Op.CLEAR, (), selector=Selector(MODEL))).error == ""
        left = {key.rpartition("/")[2] for key in server.keys(f"{tmp_path.name}/")}
        assert left == {*(str(each.name) for each in others), f"{MODEL.hex()}-somebody-else's"}
        assert lookup(tier, *(each.name for each in mine)) == {}


def test_only_the_headers_of_a_tenant_who_leaves_are_read(server, tmp_path, monkeypatch):
    who = tenant("leaver")
    mine = [replace_start(sample(number), MODEL + who) for number in range(3)]
    others = [sample(number) for number in range(40)]
    with closing(tier_at(server.port, tmp_path.name)) as tier:
        store(tier, *mine, *others)
        read: list[str] = []
        get = tier._bucket.get

        def count(key: str, *args: Any, **options: Any) -> Any:
            read.append(key)
            return get(key, *args, **options)

        monkeypatch.setattr(tier._bucket, "get", count)
        assert run(tier, Job(1, Op.CLEAR, (), selector=Selector(tenants=frozenset({who})))).error == ""
        assert len(read) == len(mine)
        left = {key.rpartition("/")[2] for key in server.keys(f"{tmp_path.name}/")}
        assert left == {str(each.name) for each in others}


def test_a_lifecycle_rule_is_compared_with_the_ttl_at_start(tmp_path, caplog):
    rule = {"ID": "kv", "Filter": {"Prefix": "kv/"}, "Status": "Enabled", "Expiration": {"Days": 8}}
    with serving(SeaweedFS, tmp_path) as server:
        for place, ttl, word in (
            ("kv", "", ""),
            ("kv", "ttl=7d", "no lifecycle rule"),
            ("kv", "ttl=7d", ""),
            ("kv", "ttl=9d", "after 8 days, before the ttl"),
            ("other", "ttl=7d", "no lifecycle rule"),
        ):
            caplog.clear()
            tier_at(server.port, place, ttl).close()
            assert (word in caplog.text) if word else caplog.text == ""
            if word == "no lifecycle rule":
                server.client.put_bucket_lifecycle_configuration(
                    Bucket=BUCKET, LifecycleConfiguration={"Rules": [rule]}
                )


# ---- as a cache sees it

LAYOUT = opaque_layout(20 * PAGE)
FORM = form_of(LAYOUT, [LAYOUT.whole])


def cache_at(port: int, place: str, query: str = "") -> Cache:
    url = f"s3://{BUCKET}/{place}?endpoint=http://127.0.0.1:{port}&deadline={PATIENCE}s&{query}"
    tiers = ("cpu://?capacity=8MiB", url.rstrip("&"))
    return Cache(Config(chunk_tokens=1, tiers=tiers, prefault=False, load_deadline=PATIENCE))


def keys_of(first: int, count: int) -> list[bytes]:
    return [of_model(number).name.key for number in range(first, first + count)]


def save(cache: Cache, keys: list[bytes]) -> None:
    reservation = cache.reserve(keys, FORM)
    for key, offsets in reservation.places:
        cache.slab.view(offsets[0], FORM.slab_bytes)[:] = content(key)
    cache.commit(reservation)


def content(key: bytes) -> bytes:
    return (key * (FORM.slab_bytes // len(key) + 1))[: FORM.slab_bytes]


def find(cache: Cache, keys: list[bytes]) -> list[str]:
    """Where the chunks were; their bytes are right, or this fails."""
    match = cache.wait(cache.match(keys, FORM))
    for entry in match.run:
        assert cache.slab.view(entry.offsets[0], FORM.slab_bytes) == content(entry.key)
    sources = list(match.sources)
    cache.release(match)
    return sources


def test_caches_share_what_they_store_and_namespaces_do_not(server, tmp_path):
    keys, place = keys_of(0, 20), tmp_path.name
    with cache_at(server.port, place) as one, cache_at(server.port, place, "namespace=b") as alien:
        save(one, keys)
        assert one.flush(10)
        assert find(alien, keys) == []
    with cache_at(server.port, place) as two:
        assert find(two, keys) == ["s3"] * 20
        assert find(two, keys) == ["cpu"] * 20
        two.check()


@pytest.mark.alone
def test_a_failing_server_is_used_soon_after_it_works(meddler, tmp_path):
    keys = keys_of(0, 8)
    with cache_at(meddler.port, tmp_path.name) as cache:
        save(cache, keys)
        assert cache.flush(10)
        meddler.spoil = lambda request, real: refusal(503, "SlowDown")
        below, number = cache.lower[0], 100
        began = time.monotonic()
        while not (
            below.load_breaker._opened >= 5 and below.store_breaker._opened >= 5
        ):  # its pause is the longest
            assert time.monotonic() < began + 60
            find(cache, keys_of(number, 2))
            save(cache, keys_of(number, 2))
            cache.flush(0.02)
            number += 10
        meddler.requests.clear()
        for _ in range(100):
            find(cache, keys_of(number, 2))
        assert len(meddler.requests) <= 4  # probes
        meddler.spoil = None
        began = time.monotonic()
        while below.load_breaker.is_open or below.store_breaker.is_open:
            find(cache, keys_of(number, 2))
            save(cache, keys_of(number, 2))
            cache.flush(0.02)
            number += 10
        took = time.monotonic() - began
        print(f"both breakers closed {took:.2f} s after the server worked again")
        assert took < 5
        cache.check()
