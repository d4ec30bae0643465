"""A Redis that is away, slow, full, odd or hostile costs hits, never time or bytes: each case is a miss."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lmtier.config import Config, TierSpec
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError, TierError
from lmtier.format.keys import namespace, tenant
from lmtier.format.layout import PAGE, Name, form_of
from lmtier.format.objects import EVERYTHING, Selector
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
from lmtier.tiers.base import Item, Job, Op, Reason, Tier
from lmtier.tiers.registry import open_tier
from lmtier.tools.cli import main
from tests.certificates import certify
from tests.redis_process import (
    CARD,
    Proxy,
    RedisServer,
    cluster,
    free_port,
    head_key,
    running,
    sentinel,
    within,
)
from tests.server.process import Wire, served, until

pytestmark = pytest.mark.alone

PATIENCE = 20.0  # of jobs that take long on a busy machine
DEADLINE = 1.0  # long enough that no busy machine makes it what ends a job that fails at once
SLACK = 0.3  # of a shared machine with two cores; the tier itself takes a few ms
PART = 16 * PAGE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture
def fresh(server: RedisServer) -> RedisServer:
    server.ask("FLUSHALL")
    return server


@pytest.fixture
def proxy(fresh: RedisServer) -> Iterator[Proxy]:
    with Proxy(fresh.address) as between:
        yield between


def tier_at(port: int, query: str = "", scheme: str = "redis", rest: str = "") -> Any:
    url = f"{scheme}://127.0.0.1:{port}{rest}?deadline={DEADLINE}s&part={PART}&{query}"
    return open_tier(TierSpec.parse(url.rstrip("&")))


def large(number: int) -> Sample:
    """An object in four parts."""
    return sample(number, 3 * PART + 5)


def both(tier: Tier, each: Sample) -> tuple[Reason | None, Reason | None]:
    """Why it could not be stored, and not be loaded; each in time, and wrong bytes never."""
    stored = within(DEADLINE + SLACK, lambda: store(tier, each))
    done, got = within(DEADLINE + SLACK, lambda: load(tier, each.name, each.room))
    assert not done.ok or got == each.payload
    return stored.failed.get(each.name), done.failed.get(each.name)


# ---- one server, and what it says


def test_it_starts_without_its_server_and_finds_it_later(tmp_path, caplog):
    port = free_port()
    each = sample(1)
    with closing(tier_at(port)) as tier:
        assert "runs without it" in caplog.text
        assert both(tier, each) == (Reason.ERROR, Reason.ERROR)
        with running(tmp_path, port=port):
            assert both(tier, each) == (None, None)
        assert both(tier, each) == (Reason.ERROR, Reason.ERROR)


def test_a_missing_socket_is_a_failure_and_not_a_miss(tmp_path):
    with closing(open_tier(TierSpec.parse(f"unix://{tmp_path}/socket"))) as tier:
        assert both(tier, sample(1)) == (Reason.ERROR, Reason.ERROR)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://", "which server"),
        ("redis://host:0", "not a host and port"),
        ("redis://host:99999", "not a host and port"),
        ("redis://host/zero", "not the number of a database"),
        ("redis://host/1?db=2", "given twice"),
        ("redis://host?part=100", "whole pages"),
        ("redis://host?connections=0", "1 or more"),
        ("redis://host?deadline=0s", "more than 0"),
        ("redis://host?namespace=a{b}", "namespace"),
        ("redis://host?ssl_ca_certs=/x", "rediss://"),
        ("redis://host?sentinel_username=x", "redis-sentinel://"),
        ("redis://host?timeout=3", "did you mean|known"),
        ("redis://host?ttl=soon", "ttl='soon'"),
        ("unix://run/redis.sock", "unix:///run"),
        ("redis-sentinel://host", "which master"),
        ("redis-cluster://host/1", "database 0"),
        ("redis-cluster://h1,,h2", "not a host and port"),
    ],
)
def test_a_wrong_url_is_an_error_at_start(url, why):
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match=why):
        open_tier(TierSpec.parse(url))
    assert not set(threading.enumerate()) - threads


@pytest.mark.parametrize("option", ["password_file=/nowhere", "ssl=true&ssl_ca_certs=/nowhere"])
def test_a_file_that_is_not_there_is_an_error_at_start(option):
    with pytest.raises((ConfigError, TierError), match="/nowhere"):
        open_tier(TierSpec.parse(f"redis://host?{option}"))


def test_passwords_come_from_three_places_and_never_show(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "secret").write_text("hunter2\n")
    with running(tmp_path / "redis", password="hunter2") as server:
        at = f"127.0.0.1:{server.port}"
        with closing(open_tier(TierSpec.parse(f"redis://{at}?password_file={tmp_path}/secret"))) as tier:
            assert both(tier, sample(1)) == (None, None)
        with closing(open_tier(TierSpec.parse(f"redis://:hunter2@{at}"))) as tier:
            assert both(tier, sample(1)) == (None, None)
            assert "hunter2" not in repr(tier)
        for wrong in ("redis://", "redis://:hunter3@", "redis://somebody:hunter2@"):
            with closing(open_tier(TierSpec.parse(f"{wrong}{at}"))) as tier:
                assert both(tier, sample(1)) == (Reason.ERROR, Reason.ERROR)
        monkeypatch.setenv("LMTIER_REDIS_PASSWORD", "hunter2")
        with closing(open_tier(TierSpec.parse(f"redis://{at}"))) as tier:
            assert both(tier, sample(1)) == (None, None)
        for query in ("nothing=1", "ttl=x", "part=7"):
            with pytest.raises(ConfigError) as refused:
                open_tier(TierSpec.parse(f"redis://:hunter2@{at}?{query}"))
            assert "hunter" not in str(refused.value)
        config = Config(tiers=("cpu://?capacity=1MiB", f"redis://:hunter2@{at}"))
        assert "hunter" not in repr(config) + repr(config.all_tiers)
    assert caplog.text.count("does not work now") == 3
    assert "hunter" not in caplog.text


def test_a_server_that_echoes_does_not_reveal_the_password(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with running(tmp_path, "--rename-command", "AUTH", "") as server:
        url = f"redis://:hunter2@127.0.0.1:{server.port}?deadline={DEADLINE}s"
        with closing(open_tier(TierSpec.parse(url))) as tier:
            done = store(tier, sample(1))
        assert done.failed == {sample(1).name: Reason.ERROR}
        assert "unknown command" in done.error
        assert "hunter2" not in done.error + caplog.text


@pytest.mark.parametrize(
    "url",
    ["redis://h?password=hunter2", "redis://:x?hunter2@h", "redis://h?ttl=x&sentinel_password=hunter2&ttl=y"],
)
def test_a_password_in_the_wrong_place_is_not_repeated(url):
    with pytest.raises(ConfigError) as error:
        open_tier(TierSpec.parse(url))
    assert "hunter2" not in str(error.value)


def test_a_user_who_needs_no_password_is_who_logs_in(tmp_path):
    with running(
        tmp_path, "--user", "kv", "on", "nopass", "~lmtier:*", "+get", "+getrange", "+set"
    ) as server:
        with closing(tier_at(server.port)) as tier:
            assert both(tier, sample(1)) == (None, None)
        server.ask("CONFIG", "RESETSTAT")
        with closing(open_tier(TierSpec.parse(f"redis://kv@127.0.0.1:{server.port}"))) as tier:
            assert both(tier, sample(1)) == (None, None)
            users = {field for field in server.ask("CLIENT", "LIST").decode().split() if "user=" in field}
            assert users == {"user=kv", "user=default"}
            assert len(server.ask("CLIENT", "LIST").decode().split("user=default")) == 2  # who asks here


def test_a_password_need_not_be_text(tmp_path, caplog, monkeypatch):
    password = b"\xffhunter2\xc3"
    (tmp_path / "password").write_bytes(password + b"\n")
    with running(tmp_path / "redis") as server:
        assert server.ask("CONFIG", "SET", "requirepass", password) == "OK"
        for query in (f"?password_file={tmp_path}/password", ""):
            if not query:
                monkeypatch.setenv("LMTIER_REDIS_PASSWORD", os.fsdecode(password))
            with closing(open_tier(TierSpec.parse(f"redis://127.0.0.1:{server.port}{query}"))) as tier:
                assert both(tier, sample(1)) == (None, None)
        assert caplog.text == ""


def test_a_socket_may_have_any_name(tmp_path):
    folder = tmp_path / "with space @ home"
    folder.mkdir()
    path = folder / "redis 1.sock"
    with running(tmp_path / "redis", "--unixsocket", str(path), password="a@/b c"):
        for login in (":a%40%2Fb%20c@", "default:a@/b c@"):
            with closing(open_tier(TierSpec.parse(f"unix://{login}{quote(str(path))}?db=3"))) as tier:
                assert both(tier, sample(1)) == (None, None)


def test_a_password_that_changes_is_read_again(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("one")
    with (
        running(tmp_path / "redis", password="one") as server,
        closing(tier_at(server.port, f"password_file={secret}")) as tier,
    ):
        assert both(tier, sample(1)) == (None, None)
        with Wire(server.address) as wire:
            wire.expect("OK", "AUTH", "one")
            wire.expect("OK", "CONFIG", "SET", "requirepass", "two")
            secret.write_text("two")
            wire.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert both(tier, sample(1)) == (None, None)


def test_a_full_server_is_full_and_still_read(tmp_path):
    full = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with running(tmp_path, *full) as server, closing(tier_at(server.port)) as tier:
        there = sample(1)
        assert both(tier, there) == (None, None)
        reasons = [both(tier, sample(i, 9 * PART))[0] for i in range(2, 12)]
        assert reasons[-1] is Reason.FULL
        assert load(tier, there.name, there.room)[0].ok
        # What was written of an object that found no room is gone with the next store.
        before = server.names()
        both(tier, sample(20))
        heads = [key for key in server.names() if key.endswith(b"}")]
        assert len(server.names()) <= len(before)
        assert all(any(key.startswith(head) for head in heads) for key in server.names())


def test_a_server_that_evicts_parts_gives_only_misses(tmp_path):
    objects = [large(i) for i in range(60)]
    evicting = ("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-random")
    with running(tmp_path, *evicting) as server, closing(tier_at(server.port)) as tier:
        for each in objects:
            store(tier, each)
        seen = set()
        for each in objects:
            done, got = load(tier, each.name, each.room)
            assert not done.ok or got[: each.header.nbytes] == each.payload[: each.header.nbytes]
            seen.add(done.failed.get(each.name))
        assert seen == {None, Reason.ABSENT}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("DEL", Reason.ABSENT),
        ("SETRANGE", Reason.CORRUPT),
        ("APPEND", Reason.CORRUPT),
        ("LPUSH", Reason.CORRUPT),
        ("SET", Reason.CORRUPT),
    ],
)
@pytest.mark.parametrize("number", [-1, 0, 1, 3])
def test_a_lost_or_foreign_part_makes_its_object_a_miss(fresh, spoil, reason, number):
    """The rest of the object is deleted."""
    each = large(1)
    with closing(tier_at(fresh.port)) as tier:
        store(tier, each)
        head = head_key(each.name)
        key = head if number < 0 else next(k for k in fresh.names() if k.endswith(b":%d" % number))
        if spoil == "LPUSH":
            fresh.ask("DEL", key)
        at = 9 if number < 0 else 2
        other = b"?" if spoil == "SETRANGE" and fresh.ask("GETRANGE", key, at, at) != b"?" else b"!"
        args = {"SETRANGE": (at, other), "APPEND": (b"?",), "LPUSH": (b"item",), "SET": (b"foreign",)}
        fresh.ask(spoil, key, *args.get(spoil, ()))
        if number < 0 and spoil == "SETRANGE":
            reason = Reason.ABSENT  # another nonce: its parts are nowhere
        assert load(tier, each.name, each.room)[0].failed == {each.name: reason}
        assert lookup(tier, each.name) == {}
        assert fresh.ask("EXISTS", head) == 0
        assert both(tier, each) == (None, None)


def test_two_writers_of_one_name_do_not_mix(fresh):
    one, two = large(1), large(2)
    other = Sample(one.header, two.payload)  # the same name, other bytes
    with closing(tier_at(fresh.port)) as here, closing(tier_at(fresh.port)) as there:
        buffers = [pages(one.room) for _ in range(60)]
        for i, buffer in enumerate(buffers):
            here.submit(Job(3 * i, Op.STORE, (one.item(),)))
            there.submit(Job(3 * i + 1, Op.STORE, (other.item(),)))
            there.submit(Job(3 * i + 2, Op.LOAD, (Item(one.name, buffer),)))
        done = {each.id: each for each in (*drain(here, 60), *drain(there, 120))}
        seen = {bytes(buffer) for i, buffer in enumerate(buffers) if done[3 * i + 2].ok}
        assert seen <= {bytes(one.payload), bytes(two.payload)}
        assert {r for each in done.values() for r in each.failed.values()} <= {Reason.ABSENT, Reason.CORRUPT}
        store(here, one)
        assert load(there, one.name, one.room)[1] == one.payload


def test_what_is_replaced_or_deleted_leaves_nothing_behind(fresh):
    with closing(tier_at(fresh.port)) as tier:
        for _ in range(5):
            assert store(tier, large(1)).ok
            assert len(fresh.names()) == 5  # the head and four parts
        store(tier, large(2), replaces=large(1).name)
        assert len(fresh.names()) == 5
        delete(tier, large(2).name)
        assert fresh.names() == []


@pytest.mark.unsealed  # its cards are written by hand
def test_a_card_that_promises_the_world_is_a_miss(fresh):
    each = sample(1)
    with closing(tier_at(fresh.port)) as tier:
        for nbytes, part in ((1 << 63, PAGE), ((1 << 64) - PAGE, 1 << 62), (1 << 40, 0), (8, 3), (0, PAGE)):
            data = CARD.pack(b"lmtier-1", bytes(8), nbytes, part) + each.at_rest()[:PAGE]
            fresh.ask("SET", head_key(each.name), data)
            failed = within(DEADLINE + SLACK, lambda: load(tier, each.name, each.room)[0].failed)
            assert failed == {each.name: Reason.CORRUPT}
            assert fresh.names() == []


def test_a_foreign_giant_under_our_name_is_not_read(fresh):
    each = sample(1)
    with closing(tier_at(fresh.port)) as tier:
        fresh.ask("SETRANGE", head_key(each.name), 200 << 20, b"x")
        failed = within(DEADLINE + SLACK, lambda: load(tier, each.name, each.room)[0].failed)
        assert failed == {each.name: Reason.CORRUPT}
        assert fresh.names() == []
        assert both(tier, each) == (None, None)


def test_the_server_forgets_what_is_of_no_more_use(fresh):
    used, unused, small = large(1), large(2), sample(3)
    with closing(tier_at(fresh.port)) as tier:
        items = tuple(replace(each.item(), lives=0.7) for each in (used, unused, small))
        assert not run(tier, Job(0, Op.STORE, items)).failed
        assert len(fresh.names()) == 11
        assert all(0 < fresh.ask("PTTL", key) <= 700 for key in fresh.names())
        assert load(tier, used.name, used.room)[0].ok
        assert all(fresh.ask("PTTL", key) <= 700 for key in fresh.names())
        until(lambda: fresh.names() == [])
        assert lookup(tier, used.name, unused.name, small.name) == {}


def test_otherwise_they_stay(fresh):
    with closing(tier_at(fresh.port)) as tier:
        store(tier, large(1), sample(2))
        assert {fresh.ask("TTL", key) for key in fresh.names()} == {-1}


def test_a_lookup_of_500_is_one_round_trip(fresh, proxy):
    objects = [sample(i, 1) for i in range(500)]
    with closing(tier_at(proxy.port)) as tier:
        store(tier, *objects[:250])
        proxy.forget()
        fresh.ask("CONFIG", "RESETSTAT")
        assert len(lookup(tier, *(each.name for each in objects))) == 250
        assert proxy.turns == 1
        assert proxy.moved["down"] < 500 * 64
        calls = {name: line for name, line in fresh.info("commandstats").items() if "cmdstat_" in name}
        assert calls.keys() <= {"cmdstat_getrange", "cmdstat_config|resetstat", "cmdstat_info"}


def test_deleting_many_objects_takes_one_or_two_round_trips(fresh, proxy):
    with closing(tier_at(proxy.port)) as tier:
        for objects, turns in (([sample(i) for i in range(50)], 1), ([large(i) for i in range(20)], 2)):
            store(tier, *objects)
            proxy.forget()
            delete(tier, *(each.name for each in objects))
            assert proxy.turns == turns
            assert fresh.names() == []


def test_a_lookup_does_not_wait_behind_loads(fresh):
    objects = [large(i) for i in range(20)]
    with closing(tier_at(fresh.port)) as tier:
        store(tier, *objects)
        for i in range(400):
            each = objects[i % 20]
            tier.submit(Job(i, Op.LOAD, (Item(each.name, pages(each.room)),)))
        tier.submit(Job(1000, Op.LOOKUP, (Item(objects[0].name),)))
        order = [done.id for done in drain(tier, 401)]
        assert order.index(1000) < 200


def test_never_more_than_the_configured_connections(fresh, proxy):
    objects = [large(i) for i in range(40)]
    with closing(tier_at(proxy.port, "connections=3")) as tier:
        store(tier, *objects)
        for i, each in enumerate(objects):
            tier.submit(Job(3 * i, Op.LOAD, (Item(each.name, pages(each.room)),)))
            tier.submit(Job(3 * i + 1, Op.STORE, (sample(100 + i).item(),)))
            tier.submit(Job(3 * i + 2, Op.LOOKUP, (Item(each.name),)))
        assert not any(done.failed for done in drain(tier, 120))
        assert proxy.most <= 3
    until(lambda: fresh.clients() == 0)


# ---- the way to it


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("what", ["store", "load"])
def test_a_connection_cut_at_any_byte_is_a_miss(fresh, way, what):
    """Every byte of a small object's transfer; nothing that is half there is ever believed."""
    each = sample(1, 1)
    with Proxy(fresh.address) as proxy, closing(tier_at(proxy.port)) as tier:
        assert both(tier, each) == (None, None)

        def act() -> Any:
            return store(tier, each) if what == "store" else load(tier, each.name, each.room)[0]

        proxy.forget()
        act()
        # The middle of a payload is like the rest of it: there, one byte of 97.
        size = proxy.moved[way]
        places = [n for n in range(size) if n < 300 or n > size - 300 or n % 97 == 0]
        for place in places:
            proxy.cut(**{way: place})
            done = within(DEADLINE + SLACK, act)
            assert done.failed == {each.name: Reason.ERROR}, place
            proxy.cut()
        print(
            f"a {what} cut at {len(places)} of {size} bytes {way}: each a failure within {DEADLINE + SLACK} s"
        )
        assert act().ok
        assert both(tier, each) == (None, None)
        assert fresh.names() == [head_key(each.name)]


@pytest.mark.parametrize("place", [0, 1, 5, 20, 60, 4000, PART + 10, 2 * PART])
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_large_object_cut_anywhere_leaves_no_litter(fresh, proxy, way, place):
    each = large(1)
    with closing(tier_at(proxy.port)) as tier:
        proxy.cut(**{way: place})
        stored = store(tier, each)
        proxy.cut()
        if stored.ok:  # so far down nothing comes of a store
            proxy.cut(**{way: place})
            assert load(tier, each.name, each.room)[0].ok == {} or way == "up"
            proxy.cut()
        assert both(tier, each) == (None, None)
        assert len(fresh.names()) == 5


def test_a_server_that_stands_still_is_given_up_in_time(tmp_path):
    with running(tmp_path) as server, closing(tier_at(server.port)) as tier:
        there, new = large(1), large(2)
        assert both(tier, there) == (None, None)
        server.freeze()
        try:
            assert both(tier, new) == (Reason.DEADLINE, Reason.DEADLINE)
            done = within(DEADLINE + SLACK, lambda: run(tier, Job(1, Op.LOOKUP, (Item(there.name),))))
            assert done.failed == {there.name: Reason.DEADLINE}
            with closing(within(DEADLINE + SLACK, lambda: tier_at(server.port))) as late:
                assert both(late, new) == (Reason.DEADLINE, Reason.DEADLINE)
            within(DEADLINE + SLACK, tier.close)
        finally:
            server.thaw()


def test_a_server_that_drips_is_given_up_in_time(fresh, proxy):
    each = sample(1, 1)
    with closing(tier_at(proxy.port)) as tier:
        assert both(tier, each) == (None, None)
        proxy.drip = DEADLINE / 8  # each wait for a byte is short; all of them are not
        failed = within(DEADLINE + SLACK, lambda: load(tier, each.name, each.room)[0].failed)
        assert failed == {each.name: Reason.DEADLINE}
        new = within(DEADLINE + SLACK, lambda: store(tier, large(2)))
        assert new.failed == {large(2).name: Reason.DEADLINE}
        assert within(DEADLINE + SLACK, lambda: run(tier, Job(1, Op.LOOKUP, (Item(each.name),)))).failed
        proxy.drip = 0.0
        assert both(tier, each) == (None, None)


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"$99999999999999999999\r\n",
        b"$18446744073709551615\r\n",
        b"$5\r\nhelloXX",
        b"$-7\r\n",
        b"*1000000000\r\n",
        b"*1\r\n" * 10_000,
        b":x\r\n",
        b"\r\n",
        b"\n" * 9,
        b"-" + b"x" * 100_000,
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-READONLY You can't write against a read only replica.\r\n",
        b"-MOVED 1 127.0.0.1:1\r\n",
        b"-ASK 1 127.0.0.1:1\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
        b"+OK\r\n+OK\r\n+OK\r\n+OK\r\n+OK\r\n",
        b"",
    ],
    ids=lambda says: says[:12].decode("latin1").strip() or "nothing",
)
def test_whatever_a_server_says_is_a_miss_in_time(says):
    each = large(1)
    with saying(says) as port, closing(tier_at(port)) as tier:
        reasons = [*both(tier, each), within(DEADLINE + SLACK, lambda: lookup_failure(tier, each.name))]
        if says.startswith(b"+OK"):  # to a store that is an answer; to a lookup, one that finds nothing
            assert (reasons.pop(0), reasons.pop()) == (None, None)
        expected = {Reason.ERROR, Reason.DEADLINE, Reason.CORRUPT}
        assert {*reasons} <= expected | ({Reason.FULL} if says.startswith(b"-OOM") else set())


def lookup_failure(tier: Tier, name: Name) -> Reason | None:
    return run(tier, Job(1, Op.LOOKUP, (Item(name),))).failed.get(name)


@contextmanager
def saying(says: bytes) -> Iterator[int]:
    """A server that answers whatever arrives with the same bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def talk(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            while sock.recv(1 << 20):
                sock.sendall(says)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True))
                threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(10)
        for thread in threads:
            thread.join(10)


def test_a_restarted_server_costs_only_what_was_under_way(tmp_path):
    each = sample(1)
    with running(tmp_path) as server, closing(tier_at(server.port)) as tier:
        store(tier, *(sample(i) for i in range(16)))  # every connection is made
        server.kill()
        server.start()
        for _ in range(8):
            assert both(tier, each) == (None, None)


def test_failures_leak_neither_threads_nor_sockets(fresh, proxy):
    threads = set(threading.enumerate())
    with closing(tier_at(proxy.port)) as tier:
        assert both(tier, large(1)) == (None, None)
        files = len(list(Path("/proc/self/fd").iterdir()))
        for number in range(200):
            proxy.cut(down=number)
            both(tier, large(number % 3))
        proxy.cut()
        proxy.drop()
        assert both(tier, large(1)) == (None, None)
        started = set(threading.enumerate()) - threads
        assert len([each for each in started if each.name.startswith("lmtier-redis")]) == 9
        until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= files + 2 * 4)


def test_tls_that_is_not_to_be_trusted_is_a_miss(tmp_path):
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    for folder in (ours, theirs):
        folder.mkdir()
        certify(folder / "cert.pem", folder / "key.pem")
    cert, key, other = str(ours / "cert.pem"), str(ours / "key.pem"), theirs / "cert.pem"
    port = free_port()
    options = ("--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key)
    with running(tmp_path / "redis", *options, "--tls-ca-cert-file", cert, "--tls-auth-clients", "no"):
        for query, host, good in (
            (f"ssl_ca_certs={cert}", "localhost", True),
            (f"ssl_ca_certs={cert}&ssl_check_hostname=false", "127.0.0.1", True),
            (f"ssl_ca_certs={cert}", "127.0.0.1", False),
            (f"ssl_ca_certs={other}", "localhost", False),
            ("", "localhost", False),
        ):
            url = f"rediss://{host}:{port}?deadline={PATIENCE}s&part={PART}&{query}"
            with closing(open_tier(TierSpec.parse(url.rstrip("&")))) as tier:
                assert both(tier, large(1)) == ((None, None) if good else (Reason.ERROR, Reason.ERROR))
        with closing(tier_at(port)) as tier:  # plain words to a TLS port
            assert both(tier, large(1)) == (Reason.ERROR, Reason.ERROR)


# ---- several servers


def test_a_read_only_replica_fails_stores_and_can_be_read(tmp_path):
    each, new = large(1), large(2)
    with running(tmp_path / "master") as master, running(tmp_path / "replica") as replica:
        with closing(tier_at(master.port)) as tier:
            store(tier, each)
        replica.ask("REPLICAOF", "127.0.0.1", master.port)
        until(lambda: replica.info("replication")["master_link_status"] == "up")
        with closing(tier_at(replica.port)) as tier:
            assert store(tier, new).failed == {new.name: Reason.ERROR}
            assert load(tier, each.name, each.room)[1] == each.payload


# Sentinel closes the connections to a server whose role changes: whoever asks just then asks again.


def has(server: RedisServer, key: bytes) -> bool:
    try:
        return key in server.names()
    except EOFError:
        return False


def plays(server: RedisServer, role: str) -> bool:
    try:
        return server.info("replication")["role"] == role
    except EOFError:
        return False


@pytest.mark.slow
def test_a_failover_costs_some_misses_and_is_followed(tmp_path):
    each, later = large(1), large(2)
    with (
        running(tmp_path / "master") as master,
        running(tmp_path / "replica", "--replicaof", f"127.0.0.1 {master.port}") as replica,
        sentinel(tmp_path / "sentinel", master) as watcher,
    ):
        until(lambda: replica.info("replication")["master_link_status"] == "up")
        until(lambda: int(watcher.info("sentinel")["master0"].partition("slaves=")[2][0]) == 1)
        with closing(tier_at(watcher.port, scheme="redis-sentinel", rest="/kv")) as tier:
            assert both(tier, each) == (None, None)
            until(lambda: len(replica.names()) == 5)
            master.kill()
            assert None not in both(tier, later)
            until(lambda: both(tier, later) == (None, None))
            assert load(tier, each.name, each.room)[1] == each.payload
            assert len(replica.names()) == 10
            # A forced one: the old master lives, and refuses.
            master.start()
            master.ask("REPLICAOF", "127.0.0.1", replica.port)
            until(lambda: master.info("replication")["master_link_status"] == "up")
            until(lambda: watcher.ask("SENTINEL", "FAILOVER", "kv") == "OK")
            until(lambda: plays(master, "master"))
            # Until the sentinel and the clients have heard, the old master takes writes that will be lost.
            # A sentinel asks every ten seconds, and what it has seen once it asks again.
            name = head_key(sample(9).name)
            until(lambda: both(tier, sample(9)) == (None, None) and has(master, name), 60.0)


def test_a_cluster_is_resharded_while_it_is_used(tmp_path):
    objects = [large(i) for i in range(80)]
    with cluster(tmp_path) as nodes:
        seeds = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        url = f"redis-cluster://{seeds}?part={PART}&connections=2&deadline=5s"
        with closing(open_tier(TierSpec.parse(url))) as tier:
            store(tier, *objects)
            assert min(len(node.names()) for node in nodes) > 20  # they spread
            source, target = nodes[0], nodes[1]
            ids = {node: node.ask("CLUSTER", "MYID").decode() for node in nodes}
            slots = sorted({source.ask("CLUSTER", "KEYSLOT", key) for key in source.names()})
            assert len(slots) > 10
            for number, slot in enumerate(slots):
                target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
                source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
                keys = source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1000)
                for at, key in enumerate(keys):
                    assert source.ask("MIGRATE", "127.0.0.1", target.port, key, 0, 5000) in ("OK", "NOKEY")
                    if number < 5 and at == 2:  # in the middle of an object
                        assert_all_there(tier, objects)
                        assert store(tier, *objects).failed == {}
                for key in source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1000):
                    source.ask("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
                for node in (target, source, nodes[2]):
                    node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
            assert_all_there(tier, objects)
            assert source.names() == []
            assert max(node.clients() for node in nodes) < 2 + 5  # and the nodes' own
            delete(tier, *(each.name for each in objects))
            assert [key for node in nodes for key in node.names()] == []


def assert_all_there(tier: Tier, objects: list[Sample]) -> None:
    assert len(lookup(tier, *(each.name for each in objects))) == len(objects)
    items = tuple(Item(each.name, pages(each.room)) for each in objects)
    done = run(tier, Job(1, Op.LOAD, items))
    assert done.failed == {}
    assert all(item.payload == each.payload for item, each in zip(items, objects, strict=True))


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_is_a_miss_in_time(tmp_path):
    objects = [sample(i) for i in range(20)]
    with cluster(tmp_path) as nodes, closing(tier_at(nodes[0].port, scheme="redis-cluster")) as tier:
        store(tier, *objects)
        nodes[0].freeze()
        try:
            for each in objects:
                both(tier, each)
            within(DEADLINE + SLACK, lambda: lookup_failure(tier, objects[0].name))
        finally:
            nodes[0].thaw()
        until(lambda: all(both(tier, each) == (None, None) for each in objects))


def test_parts_on_a_dead_node_stop_no_write_to_others(tmp_path):
    """Else one node takes the whole cluster along."""
    with cluster(tmp_path) as nodes, closing(tier_at(nodes[0].port, scheme="redis-cluster")) as tier:
        for node in nodes:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        objects = [large(i) for i in range(20)]
        assert store(tier, *objects).failed == {}
        on_first = {each.name for each in objects if head_key(each.name) in nodes[0].names()}
        lost = next(each for each in objects if each.name in on_first)
        others = [each for each in objects if each.name not in on_first]
        nodes[0].kill()
        assert set(store(tier, lost).failed) == {lost.name}
        for each in others:
            assert within(DEADLINE + SLACK, partial(store, tier, each)).failed == {}
        assert delete(tier, *(each.name for each in others)).failed == {}
        assert [key for node in nodes[1:] for key in node.names()] == []


@pytest.mark.slow
def test_objects_that_move_during_a_clear_go_too(tmp_path):
    objects = [large(i) for i in range(60)]
    with cluster(tmp_path) as nodes, closing(tier_at(nodes[0].port, scheme="redis-cluster")) as tier:
        store(tier, *objects)
        names = {node: node.names() for node in nodes}
        steps = tier.clear(EVERYTHING)
        next(steps)
        (searched,) = [node for node in nodes if not node.names()]
        source = next(node for node in nodes if node is not searched)
        slots = {source.ask("CLUSTER", "KEYSLOT", key) for key in names[source]}
        ids = {node: node.ask("CLUSTER", "MYID").decode() for node in nodes}
        for slot in slots:
            searched.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
            source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[searched])
            for key in source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1000):
                assert source.ask("MIGRATE", "127.0.0.1", searched.port, key, 0, 5000) == "OK"
            for node in (searched, source, *nodes):
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[searched])
        assert len(searched.names()) > 20
        for _ in steps:
            pass
        assert [key for node in nodes for key in node.names()] == []


# ---- clear


def of_model(model: str, objects: list[Sample]) -> list[Sample]:
    return [replace_start(each, namespace(model)) for each in objects]


def clear(tier: Tier, model: str) -> str:
    """Why it did not work."""
    return run(tier, Job(1, Op.CLEAR, (), selector=Selector(namespace(model)))).error


def test_a_clear_takes_all_parts_of_one_model(fresh):
    """Parts whose object is lost go too."""
    mine, others = of_model("m", [large(i) for i in range(40)]), of_model("n", [large(i) for i in range(9)])
    with closing(tier_at(fresh.port)) as tier, closing(tier_at(fresh.port, "namespace=de")) as next_door:
        store(next_door, *mine)
        store(tier, *others)
        fresh.ask("SET", "somebody else's", "1")
        stay = set(fresh.names())
        store(tier, *mine)
        for each in mine[::2]:
            fresh.ask("DEL", head_key(each.name))  # its writer died: parts that no object names
        fresh.ask("CONFIG", "RESETSTAT")
        assert clear(tier, "m") == ""
        told = {name for name in fresh.info("commandstats") if "cmdstat_" in name}
        assert told == {"cmdstat_scan", "cmdstat_unlink", "cmdstat_config|resetstat"}
        assert set(fresh.names()) == stay
        assert lookup(tier, *(each.name for each in mine)) == {}
        assert load(tier, others[0].name, others[0].room)[1] == others[0].payload


TENANT = tenant("alice")


def sift(tier: Tier) -> str:
    """Why what a tenant has could not be deleted."""
    return run(tier, Job(1, Op.CLEAR, (), selector=Selector(tenants=frozenset({TENANT})))).error


def of_tenant(objects: list[Sample]) -> list[Sample]:
    start = namespace("m") + TENANT
    return [replace_start(each, start) for each in objects]


def test_forgetting_a_tenant_takes_parts_without_an_object(fresh):
    theirs, other = of_tenant([large(1), large(2), sample(3)]), large(4)
    with closing(tier_at(fresh.port)) as tier:
        store(tier, other)
        stay = set(fresh.names())
        store(tier, *theirs)
        fresh.ask("DEL", head_key(theirs[0].name))  # evicted
        assert sift(tier) == ""
        assert set(fresh.names()) == stay


def test_a_search_that_may_not_read_has_not_searched(tmp_path):
    options = ("--user", "default", "on", "nopass", "~*", "+@all", "-getrange")
    with running(tmp_path, *options) as server, closing(tier_at(server.port)) as tier:
        (each,) = of_tenant([sample(1)])
        assert store(tier, each).failed == {}
        assert "getrange" in sift(tier).lower()
        assert server.names() == [head_key(each.name)]


def test_behind_one_address_another_master_is_found(tmp_path):
    """As behind a load balancer: the old one lives on as a replica, and keeps its connections."""
    with (
        running(tmp_path / "a") as old,
        running(tmp_path / "b") as new,
        Proxy(old.address) as proxy,
        closing(tier_at(proxy.port, "connections=1")) as tier,
    ):
        assert both(tier, sample(1)) == (None, None)
        proxy.lead_to(new.address)
        assert old.ask("REPLICAOF", "127.0.0.1", new.port) == "OK"
        until(lambda: both(tier, sample(1)) == (None, None))
        assert new.names() == [head_key(sample(1).name)]


def test_a_clear_asks_a_little_at_a_time(fresh, proxy):
    for number in range(20):
        fresh.ask("MSET", *(word for i in range(500) for word in (f"lmtier:default:{{{number}.{i}", "x")))
    with closing(tier_at(proxy.port)) as tier:
        proxy.forget()
        fresh.ask("CONFIG", "RESETSTAT")
        assert run(tier, Job(1, Op.CLEAR, ())).error == ""
        assert 10 <= int(fresh.info("commandstats")["cmdstat_scan"].split(",")[0].partition("=")[2]) <= 12
        assert fresh.names() == []


@pytest.mark.parametrize("place", [0, 30, 3000])
def test_a_clear_cut_in_the_middle_can_be_repeated(fresh, proxy, place):
    objects = of_model("m", [large(i) for i in range(40)])
    with closing(tier_at(proxy.port)) as tier:
        store(tier, *objects)
        proxy.cut(down=place)
        assert clear(tier, "m") != ""
        assert fresh.names() != []
        proxy.cut()
        assert clear(tier, "m") == ""
        assert fresh.names() == []


def test_a_tier_closes_in_the_middle_of_a_clear(fresh, proxy):
    fresh.ask("MSET", *(word for i in range(5000) for word in (f"lmtier:default:{{{i}", "x")))
    tier = tier_at(proxy.port)
    proxy.drip = 1e-4
    tier.submit(Job(1, Op.CLEAR, ()))
    within(2 * DEADLINE + SLACK, tier.close)
    (done,) = tier.poll()
    assert done.error


# ---- as a cache sees it

LAYOUT = opaque_layout(2 * PART)
FORM = form_of(LAYOUT, [LAYOUT.whole])


def cache_at(port: int, query: str = "", **settings: Any) -> Cache:
    url = f"redis://127.0.0.1:{port}?deadline={DEADLINE}s&part={PART}&{query}"
    tiers = ("cpu://?capacity=8MiB", url.rstrip("&"))
    return Cache(Config(chunk_tokens=1, tiers=tiers, prefault=False, load_deadline=DEADLINE, **settings))


def keys_of(first: int, count: int) -> list[bytes]:
    return [sample(number).name.key for number in range(first, first + count)]


def save(cache: Cache, keys: list[bytes]) -> None:
    reservation = cache.reserve(keys, FORM)
    for key, offsets in reservation.places:
        cache.slab.view(offsets[0], FORM.slab_bytes)[:] = content(key)
    cache.commit(reservation)


def content(key: bytes) -> bytes:
    return (key * (FORM.slab_bytes // len(key) + 1))[: FORM.slab_bytes]


def find(cache: Cache, keys: list[bytes]) -> list[str]:
    """Where the chunks were; their bytes are right, or this fails."""
    match = within(2 * DEADLINE + SLACK, lambda: cache.wait(cache.match(keys, FORM)))
    for entry in match.run:
        assert cache.slab.view(entry.offsets[0], FORM.slab_bytes) == content(entry.key)
    sources = list(match.sources)
    cache.release(match)
    return sources


def test_caches_share_what_they_store_and_namespaces_do_not(fresh):
    keys = keys_of(0, 20)
    with (
        cache_at(fresh.port) as one,
        cache_at(fresh.port) as two,
        cache_at(fresh.port, "namespace=b") as alien,
    ):
        save(one, keys)
        assert one.flush(10)
        assert find(two, keys) == ["redis"] * 20
        assert find(two, keys) == ["cpu"] * 20
        assert find(alien, keys) == []
        save(alien, keys[:5])
        assert alien.flush(10)
        assert find(one, keys) == ["cpu"] * 20
        mine = [key for key in fresh.names() if key.startswith(b"lmtier:b:")]
        assert len(mine) == 5 * 3
        fresh.ask("DEL", *mine)
        alien.clear()
        assert find(alien, keys) == []
    with cache_at(fresh.port) as later:
        assert find(later, keys) == ["redis"] * 20
        later.check()


def test_a_clear_hides_its_model_at_once_and_keeps_new_kv(tmp_path):
    model = [namespace("m") + key[4:] for key in keys_of(0, 20)]
    other = [namespace("n") + key[4:] for key in keys_of(0, 5)]
    with running(tmp_path) as server, cache_at(server.port) as cache, cache_at(server.port) as far:
        save(cache, model)
        save(cache, other)
        assert cache.flush(10)
        server.freeze()
        try:
            cache.clear(Selector(namespace("m")))
            assert find(cache, model) == []  # at once: it is not even asked
            save(cache, model[:7])
            assert not cache.flush(0.05)
        finally:
            server.thaw()
        assert cache.flush(10)
        assert find(far, model) == ["redis"] * 7
        assert find(far, other) == ["redis"] * 5
        cache.clear(Selector(namespace("m")))
        cache.clear(Selector(namespace("m")))
        assert cache.flush(10)
        assert len(server.names()) == 5 * 3
        cache.check()


def test_a_write_that_was_under_way_is_cleared_too(tmp_path):
    keys = [namespace("m") + key[4:] for key in keys_of(0, 12)]
    with running(tmp_path) as server, cache_at(server.port, "connections=1") as cache:
        save(cache, keys)
        cache.step()
        assert cache.lower[0].storing_entries
        cache.clear(Selector(namespace("m")), force=True)
        assert cache.flush(10)
        assert server.names() == []
        cache.check()


def test_a_server_that_is_away_is_cleared_when_it_returns(tmp_path):
    keys = [namespace("m") + key[4:] for key in keys_of(0, 20)]
    with running(tmp_path / "one") as server, Proxy(server.address) as proxy, cache_at(proxy.port) as cache:
        save(cache, keys)
        assert cache.flush(10)
        proxy.cut(down=300)
        cache.clear(Selector(namespace("m")))
        until(lambda: (cache.step(), cache.lower[0].clear_breaker.is_open)[1])
        assert find(cache, keys) == []
        assert not within(1, lambda: cache.flush(5))  # it does not wait for what keeps failing
        assert server.names() != []
        proxy.cut()
        until(lambda: (cache.step(), cache.lower[0].is_clear_done)[1])
        assert server.names() == []
        save(cache, keys)
        assert cache.flush(10)
        assert len(server.names()) == 20 * 3


def test_a_user_who_may_not_search_only_loses_the_clear(tmp_path):
    keys = [namespace("m") + key[4:] for key in keys_of(0, 4)]
    other = [namespace("n") + key[4:] for key in keys_of(0, 4)]
    rights = ("+get", "+getrange", "+set", "+unlink")
    with running(tmp_path, "--user", "kv", "on", ">x", "~lmtier:*", *rights) as server:
        tiers = ("cpu://?capacity=8MiB", f"redis://kv:x@127.0.0.1:{server.port}?part={PART}")
        with Cache(Config(chunk_tokens=1, tiers=tiers, prefault=False, queue_length=8)) as cache:
            save(cache, keys)
            assert cache.flush(10)
            cache.clear(Selector(namespace("m")))
            until(lambda: (cache.step(), cache.lower[0].clear_breaker.is_open)[1])
            assert "NOPERM" in cache.lower[0].why_uncleared
            for number in range(4):  # more than may wait
                save(cache, [namespace("m") + key[4:] for key in keys_of(100 * number, 4)])
                cache.clear(Selector(namespace("m")))
                until(lambda: (cache.step(), not cache.lower[0]._writes)[1])
            save(cache, other)
            until(lambda: (cache.step(), len(server.names()) == 8 * 3)[1])
            assert (cache.lower[0].load_breaker.is_open, cache.lower[0].store_breaker.is_open) == (
                False,
                False,
            )
            assert find(cache, keys) == []
            assert find(cache, other) == ["cpu"] * 4


def test_a_server_clears_its_redis_tier_when_told_to(tmp_path, capsys):
    objects = of_model("m", [large(i) for i in range(40)])
    with running(tmp_path / "redis") as redis, closing(tier_at(redis.port)) as tier:
        store(tier, *objects, *of_model("n", [large(0)]))
        url = f"redis://127.0.0.1:{redis.port}?deadline={DEADLINE}s"
        with served(tmp_path, "cpu://?capacity=8MiB", url) as server:
            server.call("/api/clear", {"model": "m", "seconds": 10})
            assert len(redis.names()) == 5
            store(tier, *objects)
            server.call("/api/clear", {"model": "m"})
            until(lambda: len(redis.names()) == 5)
            redis.kill()
            status, reply = within(5, lambda: server.asks("/api/clear", {"seconds": 10}))
            assert status == 503
            assert reply["error"].startswith("not everything is deleted yet")
            assert "redis Connection refused" in reply["error"]
            redis.start()
            until(lambda: server.asks("/api/clear", {"seconds": 10})[0] == 200)
            assert main(["clear", "--server", "{}:{}".format(*server.address), "--namespace", "m"]) == 0
            assert "forgot the KV of m: 0 chunks in cpu, whatever was in redis\n" in capsys.readouterr().out


def test_a_dead_server_is_used_soon_after_it_returns(tmp_path):
    keys = keys_of(0, 8)
    with running(tmp_path) as server, cache_at(server.port) as cache:
        save(cache, keys)
        assert cache.flush(10)
        server.kill()
        below = cache.lower[0]
        began = time.monotonic()
        number = 100
        while not (below.load_breaker.is_open and below.store_breaker.is_open):
            assert time.monotonic() < began + 10
            find(cache, keys_of(number, 2))
            save(cache, keys_of(number, 2))
            cache.flush(0.05)
            number += 10
        assert time.monotonic() < began + 1.5  # refused connections are quick failures
        until(
            lambda: (find(cache, keys_of(5000, 1)), below.load_breaker._opened >= 5)[1]
        )  # its pause is the longest
        server.start()
        began = time.monotonic()
        while below.load_breaker.is_open or below.store_breaker.is_open:
            find(cache, keys_of(number, 2))
            save(cache, keys_of(number, 2))
            cache.flush(0.02)
            number += 10
        assert time.monotonic() < began + 5
        fresh_keys = keys_of(900, 4)
        save(cache, fresh_keys)
        assert cache.flush(10)
        with cache_at(server.port) as other:
            assert find(other, fresh_keys) == ["redis"] * 4
        cache.check()


def test_many_transfers_between_kills_give_no_wrong_byte(tmp_path):
    objects = [large(i) for i in range(25)]
    with running(tmp_path) as server, closing(tier_at(server.port)) as tier:
        failures = wrong = loaded = 0
        for turn in range(20):
            buffers = [pages(each.room) for each in objects]
            for i, (each, buffer) in enumerate(zip(objects, buffers, strict=True)):
                tier.submit(Job(2 * i, Op.STORE, (each.item(),)))
                tier.submit(Job(2 * i + 1, Op.LOAD, (Item(each.name, buffer),)))
            if turn % 4 == 1:
                server.kill()
            done = {each.id: each for each in drain(tier, 50, 30)}
            if turn % 4 == 1:
                server.start()
            for i, (each, buffer) in enumerate(zip(objects, buffers, strict=True)):
                failures += bool(done[2 * i].failed)
                if done[2 * i + 1].ok:
                    loaded += 1
                    wrong += buffer[: each.header.nbytes] != each.payload[: each.header.nbytes]
        assert wrong == 0
        assert failures >= 5
        assert loaded > 100
        assert both(tier, objects[0]) == (None, None)
