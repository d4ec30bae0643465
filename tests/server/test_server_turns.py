"""Nobody is in the way of others, whatever they ask for; TLS loses nothing; nothing deleted comes back."""

from __future__ import annotations

import gc
import json
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.slab import Slab
from lmtier.format.keys import is_value, value_key
from lmtier.format.layout import LayerShape, Layout, Name
from lmtier.rules.hints import envelope
from lmtier.server.access import Role
from lmtier.server.api import Asker
from lmtier.server.commands import ALREADY_SENT, PAUSE, Caller, Refused
from lmtier.server.connection import Connection, HttpConnection
from lmtier.server.dispatch import Dispatch
from lmtier.server.engines import EngineVerbs
from lmtier.server.http import Http, Response
from lmtier.server.redis.strings import ValueCommands
from lmtier.server.transactions import Transactions
from lmtier.server.values import ANY, Values
from lmtier.tiers.base import Item, Stat
from lmtier.wire.reply_reader import ReplyReader
from lmtier.wire.resp import Error, bulk_header, encode_command
from lmtier_backends.disk import DiskTier
from tests.certificates import certify
from tests.server.process import MIB, PATIENCE, Served, Wire, served, until
from tests.stopwatch import Stopwatch

# ---- turns


class Pinging:
    """A client beside another, and the longest that it waited for an answer."""

    def __init__(self, server: Served) -> None:
        self.longest = 0.0
        """Not counting the time in which others had the cores."""
        self._server = server
        self._wire = server.connect()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ping)

    def _ping(self) -> None:
        while not self._over.is_set():
            watch = Stopwatch(self._server.process.pid)
            self._wire.expect("PONG", "PING")
            self.longest = max(self.longest, watch.seconds())

    def __enter__(self) -> Pinging:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        self._wire.close()


NAMES = [f"name:{i}" for i in range(200_000)]


@pytest.mark.alone
@pytest.mark.parametrize(
    "frame",
    [
        encode_command("EXISTS", *NAMES),
        encode_command("MGET", *NAMES),
        encode_command("DEL", *NAMES),
        encode_command("GET", "there") * 40_000,
    ],
    ids=["EXISTS", "MGET", "DEL", "a pipeline of GETs"],
)
def test_many_names_at_once_are_not_in_the_way_of_others(tmp_path: Path, frame: bytes):
    with served(tmp_path) as server, server.connect() as greedy:
        greedy.expect("OK", "SET", "there", "x")
        greedy.expect("OK", "SET", "name:1", "x")
        began = time.monotonic()
        with Pinging(server) as other:
            sender = threading.Thread(target=greedy.send, args=(frame,))
            sender.start()
            for _ in range(40_000 if frame.endswith(encode_command("GET", "there")) else 1):
                assert not isinstance(greedy.reply(), Error)
            sender.join(PATIENCE)
        assert other.longest < max(0.1, (time.monotonic() - began) / 6)


def test_the_names_of_all_values_are_sent_some_at_a_time():
    """A million of them would take half a second to encode, and nobody else had a turn."""
    config = Config(tiers=("cpu://?capacity=16MiB",), prefault=False)
    with Cache(config, is_record=is_value) as cache:
        values = Values(cache)
        names = {b"name:%d" % number for number in range(2500)}
        for name in names:
            draft = values.draft(1)
            assert draft is not None
            for _ in values.put(draft, name):
                pass
        ends: list[object] = []

        def going() -> Generator[Any, None, None]:
            ends.append((yield from ValueCommands(values).keys(Caller(1, "here"), [b"KEYS", b"name:*"])))

        parts = list(going())
        assert ends == [ALREADY_SENT]
        assert max(part.count(b"name:") for part in parts) <= 1000
        replies = ReplyReader()
        replies.feed(b"".join(parts))
        found = replies.next()
        assert isinstance(found, list)
        assert (len(found), set(found)) == (2500, names)


@pytest.mark.alone
def test_all_values_are_forgotten_however_long_that_takes(tmp_path: Path):
    """As long as deletions go on, that the last comes late is no failure of the tier."""
    tiers = ("cpu://?capacity=64MiB", f"disk://{tmp_path}/disk?capacity=1GiB")
    config = {"load_deadline": 0.5, "queue_length": 30_000}
    with served(tmp_path, *tiers, config=config) as server, server.connect() as wire:
        for first in range(0, 24_000, 1000):
            wire.send(b"".join(encode_command("SET", f"k{i}", "x") for i in range(first, first + 1000)))
            assert [wire.reply() for _ in range(1000)] == ["OK"] * 1000
        wire.expect(1, "LMTIER.FLUSH", 15_000)
        wire.expect("OK", "FLUSHALL")
        wire.expect(0, "DBSIZE")
        assert not [each for each in (tmp_path / "disk").glob("??/*") if each.is_file()]


def a_layout(layers: int, heads: int) -> str:
    return Layout.uniform(
        layers=layers, heads=heads, head_dim=8, dtype="u8", block_tokens=16, chunk_tokens=256, packing="token"
    ).to_json().decode()  # fmt: skip


TOKENS = bytes(4 * 256)
HOSTILE: dict[str, Callable[[int], tuple[str | bytes | int, ...]]] = {
    "a form of many layers and shards": lambda n: (
        *("LMTIER.FORM", a_layout(1000, 1000 + n).replace("[[1000,", "[[65536,")),
        *(f"L0-65536H{i}-{i + 1}" for i in range(250)),
    ),
    "forms of as many layers and shards as there may be": lambda n: (
        *("LMTIER.FORM", a_layout(1024, 1024 + n)),
        *(f"L0-1024H{i}-{i + 1}" for i in range(255)),
    ),
    "shards like stairs": lambda n: (
        *("LMTIER.FORM", a_layout(1024, 1024 + n)),
        *(f"L{i}-{i + 1}H0-{1024 - i}" for i in range(255)),
    ),
    "shards that are none": lambda n: ("LMTIER.FORM", a_layout(1, 1), f"L{n}" + "x" * 1_000_000),
    "origins": lambda n: (
        *(
            "LMTIER.TELL",
            json.dumps({"identity": {f"{i}": "" for i in range(1000)}, "lora": "", "salt": str(n)}),
        ),
        *(b"", b"key" + n.to_bytes(29, "big"), TOKENS),
    ),
    "a pattern": lambda n: ("KEYS", f"{n}" + "a?" * 400_000),
    "patterns": lambda n: ("CONFIG", "GET", *(f"{n}{i}" + "a?" * 400 for i in range(1000))),
    "options": lambda n: ("SET", "k", "v", *["NX"] * 1_000_000),
    "arguments": lambda n: ("COMMAND", "INFO", *["x"] * 1_000_000),
    "pairs": lambda n: ("LMTIER.HELLO", 1, *["NAME", "x"] * 500_000),
}


@pytest.mark.alone
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_numbers_stop_no_client_and_leave_nothing(tmp_path: Path, what: str):
    with served(tmp_path) as server, server.connect(60) as wire:
        wire.ask("LMTIER.HELLO", 1)
        before = server.rss()
        with Pinging(server) as other:
            for number in range(2 if what in ("options", "arguments", "pairs") else 100):
                wire.ask(*HOSTILE[what](number))
        assert other.longest < 1.0
        assert server.rss() - before < 40 * MIB


# ---- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    certify(folder / "cert", folder / "key")
    return folder


class Secured(Served):
    def __init__(self, folder: Path, certificate: Path, **serving: Any) -> None:
        self.trust = ssl.create_default_context(cafile=str(certificate / "cert"))
        files = {"tls_cert": str(certificate / "cert"), "tls_key": str(certificate / "key")}
        super().__init__(folder, "cpu://?capacity=128MiB", **files, **serving)

    def connect(self, timeout: float = PATIENCE) -> Wire:
        wire = Wire(self.address, timeout)
        wire.socket = self.trust.wrap_socket(wire.socket, server_hostname="localhost")
        return wire


@pytest.fixture
def secured(tmp_path: Path, certificate: Path) -> Iterator[Secured]:
    server = Secured(tmp_path, certificate, http="127.0.0.1:0", patience=3.0)
    try:
        yield server
        server.check()
    finally:
        server.kill()


def test_tls_carries_values_of_every_size(secured: Secured):
    """Whatever is left in a TLS record when a turn ends is heard of, though the socket shows nothing more."""
    with secured.connect(2.0) as wire:
        for size in (0, 1, 16_383, *range(3_500_000, 4_300_000, 16_000), 32 * MIB):
            value = os.urandom(64) * (size // 64) + bytes(size % 64)
            wire.expect("OK", "SET", "k", value)
            assert wire.ask("GET", "k") == value


def test_strangers_on_the_tls_port_cost_only_themselves(secured: Secured):
    with secured.connect() as wire:
        with Wire(secured.address) as plain:  # no handshake at all
            plain.send(encode_command("PING"))
            assert plain.ends()
        silent = [Wire(secured.address) for _ in range(20)]  # a handshake that never begins
        hello = silent[0].socket
        hello.send(b"\x16\x03\x01\x02")  # or never ends
        with Wire(secured.address) as cut:  # a name of nobody's, and the end in the middle of a value
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            secret = context.wrap_socket(cut.socket, server_hostname="nobody.example")
            secret.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n" + bulk_header(20 * MIB) + bytes(5 * MIB))
            secret.close()
        wire.expect("PONG", "PING")
        for each in silent:
            each.close()
        host, _, port = secured.where["http"].rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as bare:
            web = secured.trust.wrap_socket(bare, server_hostname="localhost")
            web.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert web.recv(MIB).startswith(b"HTTP/1.1 200")
            web.close()


# ---- what must not come back, or end others


class Refusing(DiskTier):
    """Its file system became read-only, as one does after an error."""

    is_read_only = False

    def write(self, item: Item, buffers: Sequence[memoryview]) -> None:
        if self.is_read_only:
            raise OSError(30, "read-only file system")
        super().write(item, buffers)

    def delete(self, names: Sequence[Name]) -> None:
        if self.is_read_only:
            raise OSError(30, "read-only file system")
        super().delete(names)


def test_a_value_that_a_failing_disk_keeps_is_not_forgotten(tmp_path: Path):
    """DEL says that it is gone only if the disk cannot show it to the next server."""
    url = f"disk://{tmp_path}?capacity={3 * 2 * 4096}"
    config = Config(tiers=("cpu://?capacity=1MiB", url), prefault=False, load_deadline=0.2)
    disk = Refusing(tmp_path)
    with Cache(config, tiers={url: disk}, is_record=is_value) as cache:
        values = Values(cache)

        def finished(waiting: Any) -> Any:
            while True:
                try:
                    next(waiting)
                except StopIteration as stop:
                    return stop.value
                cache.step()

        def put(name: bytes) -> None:
            draft = values.draft(3)
            assert draft is not None
            draft.view[:] = b"old"
            finished(values.put(draft, name))

        for name in (b"a", b"b", b"c"):
            put(name)
        assert cache.flush(5.0)
        disk.is_read_only = True
        put(b"d")  # in the place of one of them, on the disk
        until(
            lambda: (
                cache.step()
                or cache.metrics.value("lmtier_tier_failures_total", tier="disk", op="store", reason="error")
            ),
            5.0,
        )
        (lost,) = [name for name in (b"a", b"b", b"c") if not cache.lower[0].is_stored(value_key(name), ANY)]
        assert finished(values.delete(lost)) is None
        disk.is_read_only = False
        until(lambda: cache.step() is not None and not cache.lower[0].backlog, 10.0)
        assert finished(values.delete(lost)) == 0


def test_a_tier_that_may_not_write_now_is_waited_for(tmp_path: Path):
    """It is paused for a takeover, and has no job that could end. What is acknowledged would be dropped."""
    tiers = ("cpu://?capacity=1MiB", f"disk://{tmp_path}?capacity=8MiB")
    with Cache(Config(tiers=tiers, prefault=False), is_record=is_value) as cache:
        values = Values(cache)
        until(lambda: cache.step() or cache.is_warm)
        cache.pause(True)
        jobs = cache.lower[0]._jobs
        jobs._came = dict.fromkeys(jobs._came, float("-inf"))  # a long time ago
        for number in count():
            draft = values.draft(20_000)
            assert draft is not None
            waiting = values.put(draft, b"%d" % number)
            if cache.is_behind(len(draft.view)):
                break
            with pytest.raises(StopIteration):
                next(waiting)
        assert number > 4
        assert next(waiting, "acknowledged") is None
        cache.pause(False)
        until(lambda: cache.step() is not None and next(waiting, "acknowledged") == "acknowledged")
        assert cache.flush(5.0)
        assert (
            sum(cache.lower[0].is_stored(value_key(b"%d" % n), ANY) for n in range(number + 1)) == number + 1
        )


def test_a_write_held_by_a_pause_is_done_at_the_close(tmp_path: Path):
    tiers = ("cpu://?capacity=1MiB", f"disk://{tmp_path}?capacity=8MiB")
    for is_first in (True, False):
        with Cache(Config(tiers=tiers, prefault=False), is_record=is_value) as cache:
            values = Values(cache)
            while not cache.is_warm:
                cache.wait_for_tiers()
            assert cache.lower[0].is_stored(value_key(b"a"), ANY) == (not is_first)
            if is_first:
                cache.pause(True)
                draft = values.draft(3)
                assert draft is not None
                with pytest.raises(StopIteration):
                    next(values.put(draft, b"a"))


def test_an_engine_cannot_cut_the_slab_short():
    slab = Slab(1 << 20, shared=True)
    assert slab.fd is not None
    for size in (0, 4096, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, size)
    assert bytes(slab.view(0, 4)) == bytes(4)


def test_a_value_that_finds_no_room_drops_no_tokens(tmp_path: Path):
    with Cache(Config(tiers=("cpu://?capacity=64KiB",), prefault=False), is_record=is_value) as cache:
        values = Values(cache)
        taken = [values.draft(8192) for _ in range(8)]
        assert None in taken
        assert not cache.metrics.value("lmtier_dropped_tokens_total", tier="cpu", reason="no_room")


# ---- patience


def test_a_browser_that_asks_at_times_keeps_its_connection(tmp_path: Path):
    with served(tmp_path, http="127.0.0.1:0") as server:
        host, _, port = server.where["http"].rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as web:
            end = time.monotonic() + 11.5
            while time.monotonic() < end:
                web.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert web.recv(MIB).startswith(b"HTTP/1.1 200")
                threading.Event().wait(1.0)
        assert "stopped in the middle" not in server.log.read_text()


def test_one_turn_answers_some_of_many_browser_requests():
    def page() -> Response:
        until_turn_ends = time.monotonic() + 0.002
        while time.monotonic() < until_turn_ends:
            pass
        return Response(200, "text/plain", b"slow")

    here, there = socket.socketpair()
    with here, there:
        caller = Caller(1, "here", kind="http")
        connection = HttpConnection(there, Http({"/": page}).conversation(caller), caller)
        here.sendall(20 * b"GET / HTTP/1.1\r\n\r\n")
        for answered in range(1, 21):
            connection.read_and_run()
            assert here.recv(MIB).count(b"200 OK") == 1
            assert caller.command_count == answered
            assert connection.needs_turn
        connection.read_and_run()
        assert connection.is_idle
        assert connection.wants_input


def test_a_server_lingers_for_engines_and_no_other_clients(tmp_path: Path):
    with served(tmp_path, http="127.0.0.1:0", linger=5.0) as server:
        host, _, port = server.where["http"].rpartition(":")
        with server.connect() as client, socket.create_connection((host, int(port)), PATIENCE) as page:
            with server.connect() as engine:
                engine.granted("LMTIER.HELLO", 1)
                until(lambda: server.report()["counted"]["seconds"] > 7)

            def has_ended() -> bool:
                with suppress(OSError):
                    client.send(encode_command("PING"))
                    page.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                return server.process.poll() is not None

            until(has_ended)
        assert server.process.returncode == 0


def test_a_fake_engine_without_the_slab_is_not_waited_for(tmp_path: Path):
    with served(tmp_path, patience=0.5) as server, server.connect() as wire:
        assert not isinstance(wire.ask("LMTIER.HELLO", 1), Error)
        wire.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n" + bulk_header(20 * MIB) + b"some")
        assert wire.ends()
        until(lambda: server.held()[0] == 0)


def test_a_closed_connection_leaves_the_collector_nothing():
    """Which looks no more at what has lived for a while: among a million entries it would take a second."""
    host: Any = SimpleNamespace(
        payload_target=lambda *_: None, answer=lambda *_: "", drop_drafts=lambda _: None, buffer=None
    )
    gc.disable()
    try:
        ours, theirs = socket.socketpair()
        connection = Connection(host, ours, Caller(1, "here", role=Role.ADMIN))
        theirs.send(encode_command("SET", "k", "v") + b"*2\r\n$3\r\n")
        connection.read_and_run()
        connection.close()
        theirs.close()
        left = weakref.ref(connection)
        del connection
        assert left() is None
    finally:
        gc.enable()


class Slow(DiskTier):
    """Does not know what it holds until it is told to look."""

    def __init__(self, root: Path) -> None:
        self.may_look = threading.Event()
        super().__init__(root)

    def scan(self) -> Iterator[tuple[Name, Stat]]:
        assert self.may_look.wait(PATIENCE)
        return super().scan()


def test_what_is_not_known_yet_is_not_said_to_be_cleared(tmp_path: Path):
    url = f"disk://{tmp_path}?capacity=1MiB"
    config = Config(tiers=("cpu://?capacity=1MiB", url), prefault=False)
    disk = Slow(tmp_path)
    with Cache(config, tiers={url: disk}, wait_until_warm=False) as cache:
        api, who = EngineVerbs(cache).api, Asker("an operator", Role.ADMIN)
        with pytest.raises(Refused, match="the tiers are still being scanned"):
            next(api.run("/api/clear", {}, who))
        disk.may_look.set()
        until(lambda: cache.step() is not None and cache.is_warm)
        assert answer_of(api.run("/api/clear", {}, who)) == b"{}"


def answer_of(going: Generator[object, None, object]) -> object:
    """Of a command that pauses, with nothing else to do meanwhile."""
    while True:
        try:
            assert next(going) is PAUSE
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize(
    "words",
    [
        ("/api/forget", '{"salt": "alice"}'),
        ("/api/hints", json.dumps(envelope("once", ("session_end", {"session": "agent"})))),
    ],
    ids=lambda words: words[0],
)
def test_an_answer_that_tells_of_changes_is_not_handed_over(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """Its second answer would be that there was nothing to do."""
    monkeypatch.setattr("lmtier.server.connection._TURN", -1.0)  # a turn ends where it may
    config = Config(tiers=("cpu://?capacity=1MiB",), prefault=False)
    with Cache(config, is_record=is_value) as cache:
        values = Values(cache)
        dispatch = Dispatch(cache, values, Transactions(values), EngineVerbs(cache).table())
        ours, theirs = socket.socketpair()
        connection = Connection(dispatch, ours, Caller(1, "here", role=Role.ADMIN))
        with theirs:
            assert connection.can_hand_over
            theirs.send(encode_command("LMTIER.CALL", *words))
            connection.read_and_run()
            assert connection.is_waiting
            assert not connection.can_hand_over
            while connection.is_waiting:
                connection.read_and_run()
            assert connection.can_hand_over
            assert theirs.recv(1 << 16).startswith(b"$")
        connection.close()


def test_a_large_reservation_leaves_with_its_client():
    """It pauses between its steps."""
    layout = Layout((LayerShape(1, 4096, 0),), "u8", 256, 256, "test").to_json()
    config = Config(tiers=(f"cpu://?capacity={1_100 * 4096}",), prefault=False)
    keys = os.urandom(1_000 * 32)
    with Cache(config) as cache:
        table, caller = EngineVerbs(cache).table(), Caller(1, "here", is_local=True)

        def ask(verb: str, *arguments: bytes) -> Any:
            return table[f"LMTIER.{verb}".encode()].handler(caller, [b"", *arguments])

        ask("HELLO", b"1")
        ask("FORM", layout, b"L0-1H0-1")
        assert ask("RESERVE", b"0", b"0", keys[: 100 * 32])["chunks"] == b"0-99"  # a small one: at once
        given_up = ask("RESERVE", b"0", b"0", keys)
        next(given_up)
        assert cache.index.used == 228 * 4096
        cache.check()
        given_up.close()
        assert cache.index.used == 100 * 4096
        cache.check()
        large = ask("RESERVE", b"0", b"0", keys)
        pauses = sum(1 for _ in iter(lambda: next(large, None), None))
        assert pauses == 900 // 128
        cache.check()
        assert cache.index.used == 1_000 * 4096
