"""Clients that die, stall and drip, a server that is killed: they cost themselves; no value is ever wrong."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import multiprocessing
import os
import random
import re
import resource
import select
import signal
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.handover_file import VERSION
from lmtier.format.keys import is_value, value_key
from lmtier.format.objects import now_ms
from lmtier.server.access import Role
from lmtier.server.commands import Argument, Caller, Command, PendingAnswer
from lmtier.server.connection import Connection as ServerSide
from lmtier.server.dispatch import Dispatch
from lmtier.server.transactions import Transactions
from lmtier.server.values import Values
from lmtier.wire.resp import Error, bulk_header, encode_command
from tests.server.process import MIB, PATIENCE, Served, Wire, served, until

FORK = multiprocessing.get_context("fork")


def content(seed: object, size: int) -> bytes:
    block = hashlib.shake_128(repr(seed).encode()).digest(min(size, 1 << 16))
    return (block * (size // max(1, len(block)) + 1))[:size]


def begun(*args: str | bytes, length: int) -> bytes:
    """A command whose last argument is announced and does not come."""
    return b"*%d\r\n" % (len(args) + 1) + encode_command(*args).partition(b"\r\n")[2] + bulk_header(length)


# ---- clients that die


@pytest.mark.parametrize("end", [Wire.close, Wire.reset])
@pytest.mark.parametrize(
    "frame",
    [
        encode_command("SET", "k", "a small value", "EX", 1000),
        encode_command("SET", "k", "another") + encode_command("GET", "k"),
        encode_command("MSET", "k", "one", "l", "two", "k", "three"),
        encode_command("SET", "k", "new", "GET") + encode_command("GETDEL", "l"),
    ],
    ids=["SET", "SET and GET", "MSET", "SET GET"],
)
def test_a_client_that_dies_at_any_byte_costs_nothing(tmp_path: Path, frame: bytes, end: Any):
    with served(tmp_path, "cpu://?capacity=1MiB") as server, server.connect() as other:
        other.expect("OK", "MSET", "k", "1", "l", "2")
        before = server.held()[:2]
        for cut in range(len(frame) + 1):
            dying = server.connect()
            dying.send(frame[:cut])
            end(dying)
            if cut % 10 == 0:
                other.expect("PONG", "PING")
        until(lambda: server.held()[0] == 0 and server.held()[2] == 1, 5.0)
        other.expect("OK", "MSET", "k", "1", "l", "2")
        assert server.held() == (*before, 1)


def test_a_client_killed_in_a_large_value_frees_its_memory(tmp_path: Path):
    with served(tmp_path, "cpu://?capacity=64MiB") as server:
        for sent in (0, 1, 5 * MIB, 20 * MIB):
            ours, theirs = FORK.Pipe()

            def die(sent: int = sent, theirs: Connection = theirs) -> None:
                wire = server.connect()
                wire.send(begun("SET", "k", length=20 * MIB) + b"x" * sent)
                theirs.send("sent")
                signal.pause()

            child = FORK.Process(target=die)
            child.start()
            assert ours.recv() == "sent"
            until(lambda: server.held()[1] >= 20 * MIB)
            os.kill(child.pid or 0, signal.SIGKILL)
            until(lambda: server.held() == (0, 0, 0), 5.0)
            child.join()


# ---- clients that stall


@pytest.mark.alone
def test_stuck_readers_are_closed_when_room_is_needed(tmp_path: Path):
    values = [content(i, 64 * MIB) for i in range(2)]
    with served(tmp_path, "cpu://?capacity=130MiB") as server, server.connect() as writer:
        stuck = []
        for number, value in enumerate(values):
            writer.expect("OK", "SET", f"large {number}", value)
            stuck.append(server.connect(timeout=5))
            stuck[-1].send(encode_command("GET", f"large {number}"))
            assert stuck[-1].socket.recv(1) == b"$"
        until(lambda: server.held()[0] == 128 * MIB)
        writer.expect("OK", "SET", "small", b"while there is room, nobody is hurried")
        for each in stuck:
            each.socket.recv(MIB)  # each is as patient from here
        began = time.monotonic()
        assert isinstance(writer.ask("SET", "other", values[0][: 20 * MIB]), Error)
        assert server.held()[2] == 3
        until(lambda: writer.ask("SET", "other", values[0][: 20 * MIB]) == "OK", 4)
        assert time.monotonic() - began < 3
        assert any(each.ends() for each in stuck)
        writer.expect(values[0][: 20 * MIB], "GET", "other")
        for each in stuck:
            each.close()


@pytest.mark.parametrize("last", [("GETDEL", "k"), ("EXPIRE", "k", "-1"), ("DEL", "k")], ids=lambda c: c[0])
def test_a_deletion_holds_though_the_value_was_unreadable(tmp_path: Path, last: tuple[str]):
    tiers = ("cpu://?capacity=32MiB", disk(tmp_path, "1GiB"))
    with served(tmp_path, *tiers) as server, server.connect() as writer:
        for name in ("k", "large 0", "large 1"):
            writer.expect("OK", "SET", name, content(name, 14 * MIB))
            until(lambda: is_written(server))
        with contextlib.ExitStack() as stuck:
            for number in range(2):  # nobody can make room for k
                reader = stuck.enter_context(server.connect())
                reader.send(encode_command("GET", f"large {number}"))
                assert reader.socket.recv(1) == b"$"
            assert server.held()[0] == 28 * MIB
            writer.expect(None, "GET", "k")
            assert writer.ask(*last) in (None, 0, 1)
        until(lambda: server.held()[0] == 0)
        writer.expect(content("large 0", 14 * MIB), "GET", "large 0")
        writer.expect(None, "GET", "k")


def test_a_client_that_stops_goes_when_patience_is_over(tmp_path: Path):
    value = content("large", 32 * MIB)
    with served(tmp_path, "cpu://?capacity=128MiB", patience=1.5) as server:
        with server.connect() as writer:
            writer.expect("OK", "SET", "large", value)
        stuck = [server.connect(timeout=5) for _ in range(4)]
        idle = stuck.pop()
        stuck[0].send(encode_command("GET", "large"))
        stuck[1].send(begun("SET", "k", length=8 * MIB) + b"begun")
        stuck[2].send(b"*2\r\n$3\r\nGE")
        reader = server.connect()
        reader.send(encode_command("GET", "large"))
        began, heard = time.monotonic(), b""
        while time.monotonic() - began < 2.5:  # slow, but it goes on
            heard += reader.socket.recv(200_000)
            if time.monotonic() - began < 1:
                assert server.held()[2] == 5
            select.select([], [], [], 0.02)
        while len(heard) < len(value):
            heard += reader.socket.recv(MIB)
        assert value[:MIB] in heard
        until(lambda: server.held()[2] == 2, 5.0)
        for each in stuck:
            assert each.ends()
        idle.expect("PONG", "PING")
        for each in (*stuck, idle, reader):
            each.close()


def test_who_drips_bytes_is_not_fed_for_ever(tmp_path: Path):
    """Each byte comes in time, but a value would take days."""
    with served(tmp_path, "cpu://?capacity=128MiB", patience=8) as server, server.connect() as other:
        other.expect("OK", "SET", "large", content("large", 32 * MIB))
        starts = (begun("SET", "k", length=32 * MIB), b"PING ", b"*3\r\n$", encode_command("GET", "large"))
        drips = [server.connect() for _ in starts]
        for wire, data in zip(drips, starts, strict=True):
            wire.send(data)
        began = time.monotonic()
        while server.held()[2] > 1:
            assert time.monotonic() - began < 20, server.ask("CLIENT", "LIST")
            for wire in drips[:3]:
                with contextlib.suppress(ConnectionError):
                    wire.send(b"1")
            drips[3].socket.recv(100)
            select.select([], [], [], 0.1)
        assert time.monotonic() - began > 5
        for wire in drips:
            wire.close()


def test_who_never_reads_fills_its_own_buffers_only(tmp_path: Path):
    with served(tmp_path, "cpu://?capacity=64MiB", patience=2) as server, server.connect() as other:
        for i in range(20):
            other.expect("OK", "SET", f"k{i}", content(i, MIB))
        before = server.rss()
        wires = [server.connect(timeout=0.5) for _ in range(3)]
        for wire, request in zip(
            wires,
            (
                encode_command("PING"),
                encode_command("GET", "k1"),
                encode_command("MGET", *(f"k{i}" for i in range(20))),
            ),
            strict=True,
        ):
            many = request * (MIB * 64 // len(request))
            with pytest.raises(TimeoutError):
                wire.send(many)
        assert server.rss() - before < 16 * MIB
        assert server.held()[0] <= 20 * MIB
        other.expect("PONG", "PING")
        answered, end = -1, 0.0
        while server.held() != (0, 20 * MIB, 1):
            # A client is not stuck while the commands that its kernel took are answered: 300,000 PINGs.
            rows = other.ask("CLIENT", "LIST").decode().splitlines()
            found = sum(int(re.findall(r"tot-cmds=(\d+)", row)[0]) for row in rows if "cmd=ping" in row)
            if found > answered:
                answered, end = found, time.monotonic() + PATIENCE
            assert time.monotonic() < end, "a client that is stuck stays"
            time.sleep(0.005)
        for wire in wires:
            wire.close()


@pytest.mark.alone
def test_a_thousand_idle_connections_cost_little(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4000), hard))
    with served(tmp_path, "cpu://?capacity=1MiB") as server, server.connect() as one:

        def median() -> float:
            times = []
            for _ in range(300):
                began = time.perf_counter()
                one.expect("PONG", "PING")
                times.append(time.perf_counter() - began)
            return statistics.median(times)

        alone, before = median(), server.rss()
        idle = [server.connect() for _ in range(1000)]
        for wire in idle:
            wire.expect("PONG", "PING")
        among, grown = median(), server.rss() - before
        print(f"PING alone {alone * 1e6:.0f} µs, among 1000 {among * 1e6:.0f} µs; {grown >> 10} KiB")
        assert among < 2 * alone + 200e-6
        assert grown < 48 * MIB
        for wire in idle:
            wire.send(encode_command("ECHO", "here"))
        for wire in idle:
            assert wire.reply() == b"here"
            wire.close()


# ---- values


def test_a_value_beyond_the_room_is_refused(tmp_path: Path):
    """The connection goes on."""
    with served(tmp_path, "cpu://?capacity=4MiB") as server, server.connect() as wire:
        wire.expect("OK", "SET", "k", "kept")
        for frame in (
            encode_command("SET", "k", b"x" * 5 * MIB),
            encode_command("MSET", "a", b"x" * MIB, "b", b"x" * MIB, "c", b"x" * MIB),
            encode_command("SETEX", "k", 10, b"x" * 64 * MIB),
        ):
            wire.send(frame + encode_command("GET", "k"))
            refusal = wire.reply()
            assert isinstance(refusal, Error)
            assert refusal.startswith("OOM"), refusal
            assert wire.reply() == b"kept"
        wire.expect(1, "DBSIZE")
        assert server.held() == (0, 4096, 1)


def disk(folder: Path, capacity: str) -> str:
    return f"disk://{folder}/kv?capacity={capacity}"


def is_written(server: Served) -> bool:
    queue: int = server.report()["tiers"][1]["queue"]
    return not queue


def test_values_beyond_the_slab_come_back_from_disk(tmp_path: Path):
    tiers = ("cpu://?capacity=16MiB", disk(tmp_path, "256MiB"))
    with served(tmp_path, *tiers) as server, server.connect() as wire:
        sizes = {f"k{i}": 1 + i * 37_021 for i in range(64)}
        for name, size in sizes.items():
            wire.expect("OK", "SET", name, content(name, size))
            until(lambda: is_written(server))
        wire.expect(64, "DBSIZE")
        for name in random.Random(1).sample(sorted(sizes), 64):
            wire.expect(content(name, sizes[name]), "GET", name)
        assert wire.ask("MGET", *sizes) == [content(name, size) for name, size in sizes.items()]
        wire.expect(64, "EXISTS", *sizes)
        for name, size in sizes.items():
            wire.expect(size, "STRLEN", name)
        wire.expect(content("k63", sizes["k63"])[1_000_000:], "GETRANGE", "k63", 1_000_000, -1)
        wire.send(b"".join(encode_command("GET", name) for name in sizes))  # while others are served
        with server.connect() as other:
            other.expect("PONG", "PING")
        for name, size in sizes.items():
            assert wire.reply() == content(name, size)


def test_a_restart_keeps_values_with_their_time(tmp_path: Path):
    """Values that have expired do not come back."""
    tiers = ("cpu://?capacity=8MiB", disk(tmp_path, "64MiB"))
    with served(tmp_path, *tiers) as server:
        with server.connect() as wire:
            for i in range(20):
                wire.expect("OK", "SET", f"k{i}", content(i, 100_000))
            told = time.monotonic()
            wire.expect("OK", "SET", "minutes", "v", "EX", 300)
            wire.expect("OK", "SET", "later", "v")
            wire.expect(1, "EXPIRE", "later", 600)
            wire.expect("OK", "SET", "soon", "v", "PX", 700)
            wire.expect("OK", "SET", "over", "v", "PX", 1)
            wire.expect("OK", "SET", "kept", "v", "EX", 300)
            wire.expect(1, "PERSIST", "kept")
            wire.expect("OK", "SET", "deleted", "v")
            wire.expect(1, "DEL", "deleted")
            wire.expect("OK", "SET", b"\x00 any \xff name", "")
            assert server.stop() == 0
        server.start()
        with server.connect() as wire:
            until(lambda: wire.ask("GET", "soon") is None, 3)
            for i in range(20):
                wire.expect(content(i, 100_000), "GET", f"k{i}")
            minutes, later = wire.ask("TTL", "minutes"), wire.ask("TTL", "later")
            passed = time.monotonic() - told + 1
            assert 300 - passed < minutes <= 300
            assert 600 - passed < later <= 600
            wire.expect(-1, "TTL", "kept")
            wire.expect([None, None, None], "MGET", "soon", "over", "deleted")
            wire.expect(-2, "TTL", "soon")
            wire.expect(b"", "GET", b"\x00 any \xff name")
            cursor, names = wire.ask("SCAN", 0, "COUNT", 1000)
            assert cursor == b"0"
            assert sorted(names) == sorted(
                [*(b"k%d" % i for i in range(20)), b"minutes", b"later", b"kept", b"\x00 any \xff name"]
            )
            wire.expect(len(names), "DBSIZE")


def test_every_acknowledged_value_survives_a_stop(tmp_path: Path):
    """Faster than the disk writes, more than may wait, and more than memory holds."""
    tiers, count = ("cpu://?capacity=12MiB", disk(tmp_path, "256MiB")), 4500
    slow = {"queue_length": 64, "load_deadline": 60}  # however slow the disk is
    with served(tmp_path, *tiers, config=slow, grace=60) as server:
        with server.connect() as wire:
            sender = threading.Thread(
                target=wire.send,
                args=(b"".join(encode_command("SET", f"k{i}", f"v{i}" * 20) for i in range(count)),),
            )
            sender.start()
            assert [wire.reply() for _ in range(count)] == ["OK"] * count
            sender.join()
        assert server.stop(80) == 0
        server.start()
        with server.connect() as wire:
            wire.expect(count, "DBSIZE")
            for first in range(0, count, 500):
                names = range(first, first + 500)
                wire.expect([b"v%d" % i * 20 for i in names], "MGET", *(f"k{i}" for i in names))


def test_a_stop_ends_in_its_time_though_the_disk_hangs(tmp_path: Path):
    """To open a pipe that nobody reads hangs as a disk does that is gone."""
    with served(tmp_path, "cpu://?capacity=8MiB", disk(tmp_path, "64MiB"), grace=2) as server:
        for i in range(12):
            os.mkfifo(tmp_path / "kv" / "partial" / f"{value_key(b'k%d' % i).hex()}.L0-1H0-1")
        with server.connect() as wire:
            for i in range(12):
                wire.expect("OK", "SET", f"k{i}", "v")
            wire.expect(b"v", "GET", "k1")
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 5
    assert "closed before all chunks were written" in server.log.read_text()


def test_sigterm_lets_a_value_that_has_begun_be_finished(tmp_path: Path):
    tiers = ("cpu://?capacity=64MiB", disk(tmp_path, "64MiB"))
    value = content("late", 8 * MIB)
    with served(tmp_path, *tiers) as server, server.connect() as wire, server.connect() as idle:
        frame = encode_command("SET", "late", value)
        wire.send(frame[: 4 * MIB])
        until(lambda: server.held()[1] >= 8 * MIB)
        server.process.send_signal(signal.SIGTERM)
        assert idle.ends()
        wire.send(frame[4 * MIB :])
        assert wire.reply() == "OK"
        assert wire.ends()
        assert server.process.wait(10) == 0
        server.start()
        with server.connect() as again:
            again.expect(value, "GET", "late")


def test_a_damaged_file_is_no_value(tmp_path: Path):
    tiers = ("cpu://?capacity=8MiB", disk(tmp_path, "64MiB"))
    with served(tmp_path, *tiers) as server:
        for i in range(10):
            server.ask("SET", f"k{i}", content(i, 50_000))
        assert server.stop() == 0
        files = sorted((tmp_path / "kv").rglob("*.L*"))
        assert len(files) == 10
        for number, file in enumerate(files):
            data = bytearray(file.read_bytes())
            at = number * len(data) // 10 + 20
            if number % 3:
                data[at] ^= 1
            else:
                del data[at:]
            file.write_bytes(data)
        server.start()
        with server.connect() as wire:
            intact = 0
            for i in range(10):
                value = wire.ask("GET", f"k{i}")
                assert value in (None, content(i, 50_000))
                intact += value is not None
            assert intact <= 3  # where padding was hit
            assert server.report()["counted"]["corrupt"] >= 6 - intact  # the short ones are not even there
            for i in range(10):
                wire.expect("OK", "SET", f"k{i}", "new")
                wire.expect(b"new", "GET", f"k{i}")


def test_flushall_while_a_value_is_being_sent(tmp_path: Path):
    value = content("large", 30 * MIB)
    tiers = ("cpu://?capacity=64MiB", disk(tmp_path, "128MiB"))
    with served(tmp_path, *tiers) as server, server.connect() as reader, server.connect() as other:
        other.expect("OK", "SET", "large", value)
        reader.send(encode_command("GET", "large"))
        assert reader.socket.recv(1) == b"$"
        other.expect("OK", "FLUSHALL")
        other.expect(None, "GET", "large")
        other.expect(0, "DBSIZE")
        for i in range(8):
            other.expect("OK", "SET", f"k{i}", b"z" * 4 * MIB)  # over whatever is free
        rest = b"%d\r\n%s\r\n+PONG\r\n" % (len(value), value)
        reader.send(encode_command("PING"))
        heard = bytearray()
        while len(heard) < len(rest):
            heard += reader.socket.recv(MIB)
        assert heard == rest


def test_the_slab_is_handed_out_among_other_answers(tmp_path: Path):
    with served(tmp_path, unix=str(tmp_path / "socket")) as server, Wire(server.where["unix"]) as wire:
        wire.expect("OK", "SET", "k", "v" * 20_000)
        slab = encode_command("LMTIER.SLAB")
        wire.send(
            encode_command("GET", "k")
            + encode_command("PING")
            + slab
            + encode_command("ECHO", "x")
            + slab
            + encode_command("QUIT")
        )
        heard, files = b"", []
        while True:
            data, some, _, _ = socket.recv_fds(wire.socket, 1 << 16, 10)
            files += some
            if not data:
                break
            heard += data
        size = b"*2\r\n:%d\r\n:1\r\n" % (64 * MIB)
        assert heard == b"$20000\r\n%s\r\n+PONG\r\n%s$1\r\nx\r\n%s+OK\r\n" % (b"v" * 20_000, size, size)
        assert [os.fstat(file).st_size for file in files[::2]] == [64 * MIB] * 2
        assert len(files) == 4  # and the table of absent keys
        for file in files:
            os.close(file)


def test_what_is_cleared_by_force_while_it_comes_is_gone(tmp_path: Path):
    value = content("cleared", MIB)
    tiers = ("cpu://?capacity=16MiB", disk(tmp_path, "64MiB"))
    with served(tmp_path, *tiers) as server, server.connect() as wire, server.connect() as other:
        for frame, answer in (
            (encode_command("SET", "k", value), "OK"),
            (encode_command("MSET", "l", value, "k", value), "OK"),
            (encode_command("SET", "k", value, "GET"), None),
            (encode_command("SETNX", "k", value), 1),
        ):
            other.expect("OK", "SET", "k", "older")
            wire.send(frame[: -MIB // 2])
            until(lambda frame=frame: server.held()[1] > len(frame) - 8192)  # type: ignore[misc]
            server.call("/api/clear", {"force": True})
            wire.send(frame[-MIB // 2 :])
            assert wire.reply() == answer
            wire.expect([None, None], "MGET", "k", "l")


def overwrite(server: Served, writer: int, said: Connection) -> None:
    with server.connect() as wire:
        turn = 0
        while turn < 3 or not said.poll():
            head = struct.pack("<QQ", writer, turn)
            value = head + content((writer, turn % 4), 8 * MIB - 16)
            assert wire.ask("SET", "shared", value) == "OK"
            turn += 1
        said.send(turn)


@pytest.mark.parametrize("below", [False, True])
def test_of_two_overwriting_values_a_reader_gets_one_intact(tmp_path: Path, below: bool):
    tiers = ("cpu://?capacity=64MiB", *([disk(tmp_path, "64MiB")] if below else []))
    with served(tmp_path, *tiers) as server, server.connect() as reader:
        reader.expect("OK", "SET", "shared", struct.pack("<QQ", 0, 0) + content((0, 0), 8 * MIB - 16))
        with writers(server) as turns:
            reads, seen = 0, set[tuple[int, int]]()
            began = time.monotonic()
            while (lasts := time.monotonic() - began) < 1.5 or (len(seen) < 3 and lasts < PATIENCE):
                value = reader.ask("GET", "shared")
                assert isinstance(value, bytes), value
                writer, turn = struct.unpack_from("<QQ", value)
                assert value[16:] == content((writer, turn % 4), 8 * MIB - 16)
                seen.add((writer, turn))
                reads += 1
        assert min(turns) >= 3
        assert len(seen) >= 3


@contextlib.contextmanager
def writers(server: Served) -> Iterator[list[int]]:
    turns: list[int] = []
    pipes = [FORK.Pipe() for _ in range(2)]
    children = [
        FORK.Process(target=overwrite, args=(server, i, theirs)) for i, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    try:
        yield turns
        for ours, _ in pipes:
            ours.send("stop")
            assert ours.poll(20), "a writer does not end"
            turns.append(ours.recv())
    finally:
        for child in children:
            child.kill()
            child.join()


def test_times_to_live_are_kept_for_what_is_there_only():
    with Cache(Config(tiers=["cpu://?capacity=1MiB"], prefault=False), is_record=is_value) as cache:
        values = Values(cache)

        def put(name: bytes, expires: int) -> None:
            draft = values.draft(100)
            assert draft is not None
            for _ in values.put(draft, name, expires):
                pass

        far = now_ms() + 10**9
        for i in range(20_000):
            put(b"k%d" % (i % 400), far + i)
        soon = now_ms() + 200
        for i in range(50):
            put(b"k%d" % i, soon)
        assert len(values._expiring) < 2000
        until(lambda: now_ms() > soon)
        before = len(values)
        assert not values.expire()
        assert before - len(values) in range(40, 51)  # one or the other may have been evicted


def test_a_value_that_never_fits_hurries_no_other_client():
    with Cache(Config(tiers=["cpu://?capacity=1MiB"], prefault=False), is_record=is_value) as cache:
        values = Values(cache)
        assert values.draft(MIB) is None
        assert values.no_room_at == float("-inf")
        draft = values.draft(MIB // 3)
        assert draft is not None
        assert values.draft(MIB // 3) is None
        assert values.no_room_at > 0
        values.discard_draft(draft)


def test_values_that_expire_together_go_some_at_a_time():
    with Cache(Config(tiers=["cpu://?capacity=8MiB"], prefault=False), is_record=is_value) as cache:
        values = Values(cache)
        for number in range(1000):
            draft = values.draft(100)
            assert draft is not None
            for _ in values.put(draft, b"k%d" % number, now_ms() + 1):
                pass
        until(lambda: now_ms() > values._expiring[-1][0])
        left, turns = len(values), 0
        assert left == 1000
        while values.expire():
            assert 0 < left - len(values) <= 100
            left, turns = len(values), turns + 1
        assert (len(values), turns) == (0, 15)


# ---- no file can be opened


@contextlib.contextmanager
def no_free_files(server: Served) -> Iterator[None]:
    """As many files are open as the server may have."""
    pid = server.process.pid
    taken = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(taken) + 1)) - taken), limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_without_a_free_file_commands_are_still_answered(tmp_path: Path):
    path = tmp_path / "socket"
    with (
        served(tmp_path, "cpu://?capacity=4MiB", unix=str(path)) as server,
        server.connect() as other,
        Wire(server.where["unix"]) as wire,
        Wire(server.where["unix"]) as following,
    ):
        for each in (wire, other, following):
            each.expect("PONG", "PING")  # they were accepted
        with no_free_files(server):
            assert b"\r\nused_memory_rss:0\r\n" in wire.ask("INFO")
            with following:
                following.granted("LMTIER.TAKEOVER", VERSION, 256, "", 1)  # it needs no file
            for each in (wire, other):
                each.expect("OK", "SET", "k", "v")
        assert b"\r\nused_memory_rss:0\r\n" not in wire.ask("INFO")


def failing(caller: Caller, args: list[Argument]) -> object:
    raise OSError(errno.EMFILE, "Too many open files")


def failing_later(caller: Caller, args: list[Argument]) -> PendingAnswer:
    yield None
    return failing(caller, args)


def test_a_failing_system_call_is_its_commands_answer():
    with Cache(Config(tiers=["cpu://?capacity=1MiB"], prefault=False), is_record=is_value) as cache:
        values = Values(cache)
        transactions = Transactions(values)
        commands = {b"TIME": Command(failing, 1), b"DBSIZE": Command(failing_later, 1)}
        dispatch = Dispatch(cache, values, transactions, {**transactions.table(), **commands})
        ours, theirs = socket.socketpair()
        connection = ServerSide(dispatch, ours, Caller(1, "here", role=Role.ADMIN))
        with theirs, contextlib.closing(connection):

            def said(*words: bytes) -> bytes:
                theirs.send(b"".join(encode_command(word) for word in words))
                connection.read_and_run()
                while connection.is_waiting or connection.needs_turn:
                    transactions.turn()
                    connection.run_and_send()
                return theirs.recv(1 << 16)

            refused = b"-ERR Too many open files\r\n"
            assert said(b"TIME") == said(b"DBSIZE") == refused
            assert said(b"MULTI", b"TIME", b"DBSIZE", b"EXEC").endswith(b"*2\r\n" + 2 * refused)


# ---- a server that is killed

NAMES = 24


class Oracle:
    """What one client may find under its own names: nothing, or a value not older than it was told.

    After a kill it may be older, but not older than the last flush or deletion.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.chance = random.Random(number)
        self.turn = 0
        self.least = dict.fromkeys((f"{number}/{i}" for i in range(NAMES)), 0)
        self.kept = dict(self.least)
        self.counts = dict.fromkeys(("set", "gone", "hit", "nil", "refused", "flushed"), 0)

    def value(self, name: str) -> bytes:
        self.turn += 1
        body = content((name, self.turn), self.chance.choice((20, 3000, 60_000, 250_000)))
        head = struct.pack("<QHQ", self.turn, len(name), len(body)) + name.encode()
        return head + body + hashlib.sha256(head + body).digest()

    def believe(self, name: str, value: object) -> None:
        if value is None:
            self.counts["nil"] += 1
            return
        assert isinstance(value, bytes), f"{name}: {value!r}"
        turn, length, size = struct.unpack_from("<QHQ", value)
        assert value[18 : 18 + length].decode() == name, f"{name} has the value of another"
        assert len(value) == 18 + length + size + 32, f"{name} is torn"
        assert hashlib.sha256(value[:-32]).digest() == value[-32:], f"{name} is torn"
        if name in self.least:
            assert self.least[name] <= turn <= self.turn, f"{name} is of turn {turn}: {self.least[name]}"
        self.counts["hit"] += 1

    def act(self, wire: Wire) -> None:
        """One command; what it does to `least` counts from its answer on."""
        name = self.chance.choice(list(self.least))
        gone = self.turn + 1
        match self.chance.randrange(20):
            case 0 | 1 | 2 | 3 | 4 | 5:
                self.written(name, wire.ask("SET", name, self.value(name)))
            case 6:
                self.written(name, wire.ask("SET", name, self.value(name), "EX", 1000))
            case 7:
                answer = wire.ask("SET", name, self.value(name), "GET")
                if isinstance(answer, Error):
                    self.written(name, answer)
                else:
                    self.believe(name, answer)
                    self.written(name, "OK")
            case 8:
                other = self.chance.choice([each for each in self.least if each != name])
                values = {each: self.value(each) for each in (name, other)}
                turn = self.turn
                answer = wire.ask("MSET", *(part for pair in values.items() for part in pair))
                self.written(name, answer, turn - 1)
                self.written(other, answer, turn)
            case 9 | 10:
                answer = wire.ask(self.chance.choice(("DEL", "UNLINK")), name)
                if not isinstance(answer, Error):
                    self.gone(name, gone)
            case 11:
                answer = wire.ask("GETDEL", name)
                if not isinstance(answer, Error):
                    self.believe(name, answer)
                    self.gone(name, gone)
            case 12:
                answer = wire.ask(*self.chance.choice((("EXPIRE", name, 1000), ("PERSIST", name))))
                assert answer in (0, 1) or isinstance(answer, Error)
            case 13:
                some = self.chance.sample(list(self.least), 4)
                for each, value in zip(some, wire.ask("MGET", *some), strict=True):
                    self.believe(each, value)
            case 14:
                other = f"{self.chance.randrange(4)}/{self.chance.randrange(NAMES)}"
                self.believe(other, wire.ask("GET", other))
            case 15 if self.chance.random() < 0.1:
                answer = wire.ask("FLUSHALL")
                if answer == "OK":
                    for each in self.least:
                        self.gone(each, gone)
            case 16 if self.chance.random() < 0.3:
                if wire.ask("LMTIER.FLUSH", 5000) == 1:
                    self.kept = dict(self.least)
                    self.counts["flushed"] += 1
            case _:
                self.believe(name, wire.ask("GET", name))

    def written(self, name: str, answer: object, turn: int = 0) -> None:
        if isinstance(answer, Error):
            assert answer.split()[0] in ("OOM", "TRYAGAIN"), answer
            self.counts["refused"] += 1
        else:
            assert answer == "OK", answer
            self.least[name] = turn or self.turn
            self.counts["set"] += 1

    def gone(self, name: str, turn: int) -> None:
        self.least[name] = self.kept[name] = turn
        self.counts["gone"] += 1


def use(server: Served, oracle: Oracle, said: Connection) -> None:
    """Everything under the oracle's names, then whatever it likes, until the server is gone."""
    random.seed(oracle.number)
    try:
        with server.connect() as wire:
            assert isinstance(wire.ask("LMTIER.HELLO", "1"), list)
            for name in oracle.least:
                oracle.believe(name, wire.ask("GET", name))
            while True:
                oracle.act(wire)
                said.send("acted")
    except (EOFError, ConnectionError):
        said.send(oracle)
    except AssertionError as wrong:
        said.send(f"wrong: {wrong}")


@pytest.mark.parametrize("kills", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_a_kill_revives_nothing_replaced_or_deleted(tmp_path: Path, kills: int):
    """No value is older than the last flush or deletion."""
    tiers = ("cpu://?capacity=6MiB", disk(tmp_path, "10MiB"))
    oracles = [Oracle(number) for number in range(4)]
    chance = random.Random(5)
    with served(tmp_path, *tiers) as server:
        for _ in range(kills):
            pipes = [FORK.Pipe() for _ in oracles]
            children = [
                FORK.Process(target=use, args=(server, oracle, theirs))
                for oracle, (_, theirs) in zip(oracles, pipes, strict=True)
            ]
            for child in children:
                child.start()
            for _, theirs in pipes:
                theirs.close()
            for _ in range(chance.randrange(10, 120)):
                for ours, _ in pipes:
                    assert ours.poll(20), "a client hangs"
                    assert (said := ours.recv()) == "acted", f"{said}\n{server.log.read_text()[-4000:]}"
            server.kill()
            oracles = []
            for (ours, _), child in zip(pipes, children, strict=True):
                while (word := ours.recv()) == "acted":
                    pass
                assert isinstance(word, Oracle), word
                word.least = dict(word.kept)
                oracles.append(word)
                child.join()
                ours.close()
            server.start()
        with server.connect() as wire:
            for oracle in oracles:
                for name in oracle.least:
                    oracle.believe(name, wire.ask("GET", name))
        assert server.report()["counted"]["corrupt"] == 0
    counts = {what: sum(oracle.counts[what] for oracle in oracles) for what in oracles[0].counts}
    print(counts)
    assert counts["set"] > 20 * kills
    assert counts["gone"] > 10 * kills
    assert counts["hit"] > 20 * kills
    assert counts["flushed"] > kills
    assert counts["refused"] < counts["set"] / 4
