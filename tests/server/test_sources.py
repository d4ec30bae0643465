"""A request that names another host's server gets what is in its memory: right, in time, or not at all."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from lmtier.client.client import Client
from lmtier.config import Config, TierSpec
from lmtier.core.cache import Cache
from lmtier.core.grant import Match
from lmtier.errors import ConfigError
from lmtier.format.keys import Identity, KeyChain, seed, value_key
from lmtier.format.layout import PAGE, Name
from lmtier.format.objects import peek
from lmtier.rules.hints import envelope
from lmtier.server.engines import EngineVerbs
from lmtier.testing import load, run
from lmtier.tiers.base import Item, Job, Op, Reason
from lmtier.tiers.registry import open_tier
from lmtier_backends.redis.source import SourceTier
from tests.certificates import certify
from tests.client.test_client import ONE, ROOM, TWO, C, is_right, keys, store, write
from tests.redis_process import Proxy, within
from tests.server.process import PATIENCE, Served, Wire, served, until
from tests.server.test_engines import Connection
from tests.stopping import stop

TOKEN = "a-token-of-some-length-0123456789"
DEADLINE, LATE = 1.0, 3.0  # seconds, on a machine that engines use too
CPU = "cpu://?capacity=8MiB"


class Host(NamedTuple):
    server: Served
    engine: Client


@contextmanager
def host(folder: Path, *lower: str, deadline: float = PATIENCE) -> Iterator[Host]:
    """A server, and an engine beside it."""
    folder.mkdir()
    path = str(folder / "socket")
    config = {"chunk_tokens": C, "load_deadline": deadline, "worth": "always"}
    with (
        served(folder, CPU, *lower, config=config, token=TOKEN, unix=path, http="127.0.0.1:0") as server,
        Client(path, name=folder.name) as engine,
    ):
        yield Host(server, engine)


@contextmanager
def two_hosts(folder: Path, deadline: float = PATIENCE) -> Iterator[tuple[Host, Host, str, Proxy]]:
    """The second can ask the first, through a proxy; and by what name."""
    with host(folder / "a") as a, Proxy(a.server.address) as link:
        url = f"lmtier://:{TOKEN}@127.0.0.1:{link.port}"
        with host(folder / "b", f"{url}?deadline={deadline}s", deadline=deadline) as b:
            yield a, b, f"127.0.0.1:{link.port}", link


def fetch(engine: Client, names: list[bytes], source: str, form=ONE) -> Match:
    """As an engine does: what was found is loaded."""
    match = engine.wait(engine.match(names, form, source=source))
    assert is_right(engine, match)
    return match


def chunks(engine: Client, names: list[bytes], source: str = "", form=ONE) -> int:
    match = fetch(engine, names, source, form)
    engine.release(match)
    return match.chunks


def in_memory(server: Served) -> int:
    return int(server.report()["tiers"][0]["chunks"])


def test_who_names_a_host_gets_what_is_in_its_memory(tmp_path: Path):
    names = keys(8)
    with two_hosts(tmp_path) as (a, b, source, link):
        assert store(a.engine, names[:6]) == 6
        link.forget()
        assert chunks(b.engine, names) == 0
        assert chunks(b.engine, names, "127.0.0.1:1") == 0
        assert link.moved["up"] == 0, "a host was asked that nobody named"
        assert counted(b.server, "lmtier_unknown_sources_total") == 1
        match = fetch(b.engine, names, source)
        assert (match.chunks, set(match.sources)) == (6, {"lmtier"})
        b.engine.release(match)
        match = fetch(b.engine, names, "")
        assert (match.chunks, set(match.sources)) == (6, {"cpu"}), "they are in its own memory now"
        b.engine.release(match)


def test_a_hint_names_a_host_before_any_request(tmp_path: Path):
    names = KeyChain(seed(Identity(model="m", weights="w"), C), C, range(8 * C)).keys
    with two_hosts(tmp_path) as (a, b, source, _):
        assert store(a.engine, names[:6]) == 6
        b.engine.release(b.engine.match(names, ONE, session="agent"))
        b.engine.hint(envelope("1", ("prefetch", {"source": source})), session="agent")
        until(lambda: in_memory(b.server) == 6)
        assert chunks(b.engine, names) == 6
        b.engine.hint(envelope("2", ("prefetch", {"source": 6})), session="agent")
        until(lambda: counted(b.server, 'lmtier_hints_total{action="prefetch",result="refused"}') == 1)


def counted(server: Served, sample: str) -> float:
    page = urllib.request.Request(f"http://{server.where['http']}/metrics")
    page.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(page) as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(sample)), 0.0)


def test_all_shards_of_a_chunk_come(tmp_path: Path):
    names = keys(5)
    with two_hosts(tmp_path) as (a, b, source, _):
        assert store(a.engine, names, TWO) == 5
        assert chunks(b.engine, names, source, TWO) == 5


def test_a_host_that_nobody_names_costs_no_lookup(tmp_path: Path):
    """A miss is still answered by the table in shared memory, as if there were no such tier."""
    with two_hosts(tmp_path) as (_, b, source, _link):
        asked = b.server.report()["clients"]
        b.engine.release(b.engine.match(keys(3, "new"), ONE))
        assert b.engine._server.link.presence_reader is not None
        assert len(b.server.report()["clients"]) == len(asked)
        b.engine.release(b.engine.wait(b.engine.match(keys(3, "new"), ONE, source=source)))


def test_nothing_is_written_or_deleted_at_another_host(tmp_path: Path):
    names = keys(30)
    with two_hosts(tmp_path) as (a, b, source, _):
        store(a.engine, names[:4])
        store(b.engine, keys(20, "b"))
        assert chunks(b.engine, names[:4], source) == 4
        store(b.engine, keys(200, "more"))  # which evicts all that was there
        with b.server.connect() as wire:
            wire.expect("OK", "AUTH", TOKEN)
            wire.granted("LMTIER.CALL", "/api/clear", '{"force": true}')
            report = json.loads(wire.granted("LMTIER.CALL", "/api/forget", '{"salt": "tenant"}'))
            assert report["tiers"] == [], "it can forget nothing there"
        assert in_memory(a.server) == 4
        assert chunks(a.engine, names[:4]) == 4


def test_what_was_deleted_there_is_a_miss(tmp_path: Path):
    names = keys(4)
    with two_hosts(tmp_path) as (a, b, source, _):
        store(a.engine, names)
        assert a.engine.delete([names[2]])
        assert chunks(b.engine, names, source) == 2


def test_a_chunk_ends_here_when_it_ends_there(tmp_path: Path):
    (key,) = keys(1)
    name = Name(key, ONE.shards[0])
    with two_hosts(tmp_path) as (a, b, source, _):
        reservation = a.engine.reserve([key], ONE, ttl=100.0)
        write(a.engine, reservation)
        a.engine.commit(reservation)
        time.sleep(0.2)  # a new life would end so much later
        assert chunks(b.engine, [key], source) == 1
        ends = []
        for each in (a, b):
            with each.server.connect() as wire:
                wire.expect("OK", "AUTH", TOKEN)
                page = memoryview(bytearray(wire.granted("LMTIER.READ", str(name))))[:PAGE]
                ends.append(peek(page, name)[0].expires)
    assert ends[0]
    assert abs(ends[0] - ends[1]) < 100, "ms: the copy has another end"


def test_a_chunk_gone_during_its_checksum_is_not_sent():
    """Its end has left with it, and its content may have been wrong."""
    (key,) = keys(1)
    cache = Cache(Config(tiers=("cpu://?capacity=1MiB",), chunk_tokens=C, prefault=False))
    cache.commit(cache.reserve([key], ONE))
    sending = Connection(EngineVerbs(cache), "NAME", "b").ask("READ", str(Name(key, ONE.shards[0])))
    next(sending)
    entry = cache.index.get(key)
    assert entry is not None
    cache.discard(entry.key, entry.form)
    with pytest.raises(StopIteration) as end:
        next(sending)
    assert end.value.value is None
    assert not cache.index.leased_bytes
    cache.check()
    cache.close()


def test_a_tenant_that_was_forgotten_does_not_come_back(tmp_path: Path):
    """Each host forgets by itself; who has forgotten takes nothing old from others."""
    old, new = (KeyChain(seed(Identity(model="m"), C, salt="gone"), C, [n] * C).keys for n in (1, 2))
    with two_hosts(tmp_path) as (a, b, source, _):
        store(a.engine, list(old))
        with b.server.connect() as wire:
            wire.expect("OK", "AUTH", TOKEN)
            wire.granted("LMTIER.CALL", "/api/forget", '{"salt": "gone"}')
        time.sleep(0.005)  # what is stored in the same millisecond counts as old
        store(a.engine, list(new))
        assert chunks(b.engine, list(old), source) == 0
        assert chunks(b.engine, list(new), source) == 1


def test_a_value_is_never_sent_as_kv(tmp_path: Path):
    with host(tmp_path / "a") as a, a.server.connect() as wire:
        wire.expect("OK", "AUTH", TOKEN)
        wire.expect("OK", "SET", "name", "v" * 100)
        name = str(Name(value_key(b"name"), ONE.shards[0]))
        wire.expect([0], "LMTIER.HAS", name)
        wire.expect(None, "LMTIER.READ", name)
        assert wire.ask("LMTIER.READ", "odd").startswith("ERR an object is named by")


def test_a_chunk_stays_while_it_is_sent(tmp_path: Path):
    """Also if it is deleted meanwhile, and the reader is slow: it is not overwritten under way."""
    (key,) = keys(1)
    with host(tmp_path / "a") as a, a.server.connect() as slow:
        slow.expect("OK", "AUTH", TOKEN)
        store(a.engine, [key])
        name = str(Name(key, ONE.shards[0]))
        whole = slow.ask("LMTIER.READ", name)
        assert len(whole) == PAGE + ROOM
        many = 400  # more than the sockets between them hold
        for _ in range(many):
            slow.send(b"*2\r\n$11\r\nLMTIER.READ\r\n$%d\r\n%s\r\n" % (len(name), name.encode()))
        until(lambda: a.server.held()[0] > 0)
        assert a.engine.delete([key])
        store(a.engine, keys(300, "over"))
        answers = [slow.reply() for _ in range(many)]
        sent = [each for each in answers if each is not None]
        assert sent
        assert set(sent) == {whole}
        assert answers == sent + [None] * (many - len(sent))


# ---- faults


def test_no_byte_is_wrong_wherever_the_link_breaks(tmp_path: Path):
    """Cut in the answer of the lookup, in a header, and in a payload; then it works again."""
    names = keys(3)
    with two_hosts(tmp_path, DEADLINE) as (a, b, source, link):
        store(a.engine, names)
        for after in (0, 1, 10, 100, PAGE, PAGE + 100, 2 * PAGE + 500):
            link.cut(down=after)
            found = within(DEADLINE + LATE, lambda: chunks(b.engine, names, source))
            assert found < 3
            link.cut()
            with b.server.connect() as wire:
                wire.expect("OK", "AUTH", TOKEN)
                wire.granted("LMTIER.CALL", "/api/clear", '{"force": true}')
        until(lambda: chunks(b.engine, names, source) == 3, 10.0)


@pytest.mark.parametrize("at", [0, 100, PAGE - 1, PAGE, PAGE + ROOM // 2, PAGE + ROOM - 1])
def test_a_byte_that_changes_on_the_way_is_a_miss(tmp_path: Path, at: int):
    (key,) = keys(1)
    name = Name(key, ONE.shards[0])
    with host(tmp_path / "a") as a, a.server.connect() as wire:
        wire.expect("OK", "AUTH", TOKEN)
        store(a.engine, [key])
        sent = bytearray(wire.ask("LMTIER.READ", str(name)))
        sent[at] ^= 1
    with answering(b"$%d\r\n%s\r\n" % (len(sent), sent)) as port:
        tier = open_tier(TierSpec.parse(f"lmtier://127.0.0.1:{port}?deadline=30s"))
        try:
            done, _ = load(tier, name, ROOM)
        finally:
            tier.close()
        assert done.failed == {name: Reason.CORRUPT}


@pytest.mark.parametrize(
    "said", [b"*1\r\n$1\r\nx\r\n", b"*0\r\n", b":1\r\n", b"*2\r\n:1\r\n:1\r\n", b"$-1\r\n", b"-ERR no\r\n"]
)
def test_an_odd_answer_to_a_lookup_is_no_hit(said: bytes):
    with answering(said) as port:
        tier = open_tier(TierSpec.parse(f"lmtier://127.0.0.1:{port}?deadline=30s"))
        try:
            name = Name(keys(1)[0], ONE.shards[0])
            done = run(tier, Job(1, Op.LOOKUP, (Item(name),)))
        finally:
            tier.close()
    assert (done.ok, done.failed) == ({}, {name: Reason.ERROR})


def test_a_host_that_stands_still_is_given_up_in_time(tmp_path: Path):
    names = keys(2)
    with two_hosts(tmp_path, DEADLINE) as (a, b, source, _):
        store(a.engine, names)
        stop(a.server.process.pid)
        try:
            assert within(DEADLINE + LATE, lambda: chunks(b.engine, names, source)) == 0
        finally:
            os.kill(a.server.process.pid, signal.SIGCONT)
        until(lambda: chunks(b.engine, names, source) == 2, 10.0)


def test_a_host_that_dies_is_a_miss_and_comes_back(tmp_path: Path):
    names = keys(2)
    with two_hosts(tmp_path, DEADLINE) as (a, b, source, link):
        store(a.engine, names)
        a.server.kill()
        link.drop()
        assert within(DEADLINE + LATE, lambda: chunks(b.engine, names, source)) == 0
        assert store(b.engine, names) == 2, "and what is computed instead is kept"
        assert chunks(b.engine, names, source) == 2


def test_who_has_no_token_gets_nothing(tmp_path: Path):
    names = keys(2)
    with host(tmp_path / "a") as a:
        store(a.engine, names)
        place = "{}:{}".format(*a.server.address)
        with host(tmp_path / "b", f"lmtier://:wrong@{place}") as b:
            assert chunks(b.engine, names, place) == 0
        with Wire(a.server.address) as stranger:
            for verb in ("HAS", "READ"):
                answer = stranger.ask(f"LMTIER.{verb}", str(Name(names[0], ONE.shards[0])))
                assert answer.startswith("NOAUTH")


def test_it_speaks_tls(tmp_path: Path):
    certificate, key = tmp_path / "crt", tmp_path / "key"
    certify(certificate, key)
    names = keys(3)
    with ExitStack() as stack:
        # The server's own clients of this test do not speak TLS, so the engine is asked alone.
        folder = tmp_path / "a"
        folder.mkdir()
        unix = str(folder / "socket")
        server = TlsServed(
            *(folder, CPU),
            config={"chunk_tokens": C},
            token=TOKEN,
            unix=unix,
            tls_cert=str(certificate),
            tls_key=str(key),
        )
        stack.callback(server.kill)
        engine = stack.enter_context(Client(unix))
        store(engine, names)
        port = server.address[1]
        url = f"lmtiers://:{TOKEN}@localhost:{port}?ssl_ca_certs={certificate}"
        b = stack.enter_context(host(tmp_path / "b", url))
        assert chunks(b.engine, names, f"localhost:{port}") == 3


class TlsServed(Served):
    def connect(self, timeout: float = PATIENCE) -> Wire:
        return Wire(self._serving["unix"], timeout)  # type: ignore[arg-type]  # a path


@contextmanager
def answering(said: bytes) -> Iterator[int]:
    """A server that says this to every command."""
    listener = socket.create_server(("127.0.0.1", 0))
    clients: list[socket.socket] = []

    def serve(client: socket.socket) -> None:
        with suppress(OSError):  # who asked has hung up
            while client.recv(1 << 16):
                client.sendall(said)

    def accept() -> None:
        while True:
            try:
                clients.append(listener.accept()[0])
            except OSError:
                return
            threading.Thread(target=serve, args=(clients[-1],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for each in (listener, *clients):
            each.close()


# ---- settings


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("lmtier://", "which server"),
        ("lmtier://a:6380/0", "write it like lmtier://:TOKEN@"),
        ("lmtier://a:6380?codec=shuffle-zstd", "remove codec="),
        ("lmtier://a:6380?ssl_ca_certs=x", "certificates are for lmtiers://"),
        ("lmtier://a:6380?namespace=x", "unknown option 'namespace'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(url: str, why: str):
    with pytest.raises(ConfigError, match=why):
        open_tier(TierSpec.parse(url))


@pytest.mark.parametrize(("place", "name"), [("h", "h:6380"), ("h:1", "h:1"), ("[::1]:9", "[::1]:9")])
def test_the_name_of_a_source_is_its_host_and_port(place: str, name: str):
    tier = SourceTier(place, deadline=0.05)
    try:
        assert tier.source == name
    finally:
        tier.close()
