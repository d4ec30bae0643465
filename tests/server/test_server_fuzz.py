"""Whatever is sent, to the whole server: it answers or closes, in time, and is sound and as small as before.

Frames are made from what commands look like, some of them wrong in what they ask, and the last of each
batch damaged in how it is written. Over real sockets a batch is followed by an ECHO of a word of its own: the
server has dealt with it when the word comes back, or the connection has ended. A batch that swallowed its
ECHO, because it announces more than it brings, is ended by the client.

A failure prints the seed and the batch; LMTIER_FUZZ_SEED makes another run.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from lmtier.config import Config, ServerConfig
from lmtier.server.access import Role
from lmtier.server.commands import Caller
from lmtier.server.connection import Connection
from lmtier.server.serve import Server
from lmtier.wire.reply_reader import ReplyReader
from lmtier.wire.resp import INCOMPLETE, Error, encode_command
from tests.server.process import MIB, PATIENCE, Served, secret, served, until
from tests.server.witness import Witness, assert_nothing_is_left

SEED = int(os.environ.get("LMTIER_FUZZ_SEED", "2026"))

ONE, TWO = secret("one").encode(), secret("two").encode()
NUMBERS = (
    *(b"0", b"1", b"-1", b"-2", b"2", b"3", b"7", b"16", b"1000", b"1024", b"65536", b"1048576", b"1048577"),
    *(b"536870912", b"536870913", b"2147483647", b"4294967296", b"9223372036854775807"),
    *(b"9223372036854775808", b"-9223372036854775808", b"99999999999999999999999", b"", b"+1", b"01", b" 1"),
    *(b"1 ", b"0x1", b"1_0", b"1e3", b"\xd9\xa1", b"nan", b"\0"),
)
WORDS = (
    *(b"NX", b"XX", b"GET", b"KEEPTTL", b"EX", b"PX", b"EXAT", b"PXAT", b"GT", b"LT", b"MATCH", b"COUNT"),
    *(b"TYPE", b"string", b"SYNC", b"ASYNC", b"AUTH", b"SETNAME", b"default", b"GETNAME", b"ID", b"INFO"),
    *(b"LIST", b"NO-EVICT", b"on", b"DOCS", b"*", b"h[a-", b"[^a]*?", b"*a*a*a*a*b", b"\\", b"maxmem*"),
    *(
        b"FORCE",
        b"NAMESPACE",
        b"PREFIX",
        b"ENGINE",
        ONE,
        b"SHARD",
        b"NAME",
        b"L0-1H0-1",
        b"00",
        b"ab" * 32,
        b"*",
    ),
)
NAMES = (*(b"k%d" % i for i in range(12)), b"", b"\x00\xff\r\n", b"n" * 3000, b"n" * 3100)
LAYOUT = b'{"layers": [[1, 4, 2]], "dtype": "u8", "block_tokens": 1, "chunk_tokens": 16, "packing": "token"}'
ALL_VERBS = """
    GET MGET GETRANGE STRLEN EXISTS TYPE TTL PTTL DBSIZE SCAN KEYS SET SETNX SETEX PSETEX GETSET
    MSET GETDEL DEL UNLINK EXPIRE PEXPIRE EXPIREAT PEXPIREAT PERSIST FLUSHALL FLUSHDB PING ECHO
    TIME SELECT INFO COMMAND CONFIG CLIENT HELLO AUTH RESET QUIT NOSUCH POST
    LMTIER.HELLO LMTIER.SLAB LMTIER.FORM LMTIER.MATCH LMTIER.PREFETCH LMTIER.POLL
    LMTIER.RELEASE LMTIER.SEEN LMTIER.RESERVE LMTIER.COMMIT LMTIER.ABORT LMTIER.DISCARD
    LMTIER.FLUSH LMTIER.CALL
    LMTIER.HAS LMTIER.READ
"""
VERBS = ALL_VERBS.split()
STRICT = ("GET", "SET", "SET", "SET", "GETRANGE", "EXPIRE", "DEL", "MSET", "GETDEL", "SCAN", "SETEX")


class Frames:
    """Frames by chance, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def value(self) -> bytes:
        size = self.chance.choice((0, 1, 20, 20, 200, 1023, 1024, 4096, 20_000))
        return self.chance.randbytes(1) * size

    def argument(self) -> bytes:
        chance = self.chance
        match chance.randrange(6):
            case 0:
                return chance.choice(NUMBERS)
            case 1 | 2:
                return chance.choice(WORDS)
            case 3:
                return self.value()
            case _:
                return chance.choice(NAMES)

    def command(self) -> bytes:
        chance, name = self.chance, self.chance.choice(NAMES[:13])
        number = chance.choice(NUMBERS[:8])
        verb = chance.choice(STRICT if chance.random() < 0.5 else VERBS)
        args: list[bytes] = []
        if chance.random() < 0.6:  # as it should be
            match verb:
                case "SET":
                    args = [name, self.value(), *chance.choice(((), (), (b"EX", b"9"), (b"NX",), (b"GET",)))]
                case "GETRANGE":
                    args = [name, number, chance.choice(NUMBERS[:8])]
                case "EXPIRE" | "PEXPIRE" | "EXPIREAT" | "PEXPIREAT":
                    args = [name, number, *chance.choice(((), (b"XX",), (b"GT",)))]
                case "SETEX" | "PSETEX":
                    args = [name, number, self.value()]
                case "SETNX" | "GETSET":
                    args = [name, self.value()]
                case "MSET":
                    args = [part for _ in range(chance.randrange(1, 4)) for part in (name, self.value())]
                case "SCAN":
                    args = [b"0", *chance.choice(((), (b"COUNT", b"3"), (b"MATCH", b"k*")))]
                case "LMTIER.HELLO":
                    args = [
                        b"1",
                        *chance.choice(((), (b"ENGINE", ONE), (b"ENGINE", TWO, b"NAME", b"n"))),
                    ]
                case "LMTIER.FORM":
                    args = [LAYOUT, b"L0-1H0-1"]
                case "LMTIER.MATCH":
                    args = [b"0", b"0", b"100", b"ab" * 32, b"cd" * 32]
                case "LMTIER.RESERVE":
                    args = [b"0", b"0", chance.choice((b"ab", b"cd", b"ef")) * 32]
                case "LMTIER.HAS" | "LMTIER.READ":
                    args = [chance.choice((b"ab", b"cd", b"ef")) * 32 + b".L0-1H0-1"]
                case "GET" | "DEL" | "GETDEL":
                    args = [name]
                case _:
                    args = [self.argument() for _ in range(chance.randrange(3))]
        else:
            args = [self.argument() for _ in range(chance.randrange(6))]
        if verb == "MSET" and chance.random() < 0.3:
            args *= 5
        if verb == "LMTIER.DISCARD" and chance.random() < 0.5:
            args = [chance.choice((b"ab", b"cd", b"00")) * 32]
        if chance.random() < 0.05:
            return (
                verb.encode() + b" " + b" ".join(args).replace(b"\n", b"") + chance.choice((b"\n", b"\r\n"))
            )
        return encode_command(verb, *args)

    def batch(self, most: int) -> list[bytes]:
        """Some frames; two times of three the last is damaged."""
        frames = [self.command() for _ in range(self.chance.randrange(1, most))]
        if self.chance.random() < 0.67:
            frames[-1] = self.damaged(frames[-1])
        return frames

    def damaged(self, frame: bytes) -> bytes:
        chance = self.chance
        data = bytearray(frame)
        for _ in range(chance.choice((1, 1, 2, 3))):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(7):
                case 0 | 1:
                    marks = [here for here, byte in enumerate(data[:200]) if byte in b"*$"]
                    if marks:
                        at = chance.choice(marks) + 1
                        end = data.find(b"\r\n", at)
                        data[at : max(end, at)] = chance.choice(NUMBERS)
                case 2:
                    del data[at:]
                case 3:
                    del data[at : at + chance.randrange(1, 9)]
                case 4:
                    data[at:at] = data[at : at + chance.randrange(1, 60)]
                case 5:
                    data[at : at + 3] = chance.randbytes(chance.randrange(1, 4))
                case 6:
                    data[at:at] = chance.choice((b"\r", b"\n", b"\r\n", b"*", b"$", b'"', b"'", b"\0"))
        return bytes(data)


class Peer:
    """One connection after the other; knows whether what it sent was dealt with."""

    def __init__(self, server: Served, meanwhile: Callable[[], None]) -> None:
        self._server = server
        self._meanwhile = meanwhile
        self._socket: socket.socket | None = None
        self.ended = self.echoed = self.swallowed = 0

    def send(self, frames: list[bytes], word: bytes) -> None:
        """The frames, in one piece each or cut; then wait for the echo, or the end."""
        echo = encode_command("ECHO", word)
        wanted = echo[-len(word) - len(b"$%d\r\n" % len(word)) - 2 :]
        sock = self._socket or self._server.connect().socket
        self._socket = None
        tail = b""
        try:
            for frame in frames:
                sock.sendall(frame)
            sock.sendall(echo)
            self._meanwhile()
            sock.settimeout(0.02)
            began = time.monotonic()
            while True:
                try:
                    data = sock.recv(1 << 16)
                except TimeoutError:
                    # Either it waits for more of a frame, or it is slow: the end of what we say tells.
                    sock.shutdown(socket.SHUT_WR)
                    sock.settimeout(PATIENCE)
                    while sock.recv(1 << 16):
                        pass
                    self.swallowed += 1
                    break
                if not data:
                    self.ended += 1
                    break
                tail = (tail + data)[-100:]
                if tail.endswith(wanted):
                    self.echoed += 1
                    self._socket = sock
                    return
                assert time.monotonic() - began < PATIENCE, frames
        except OSError as error:
            if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                raise  # it hangs
            self.ended += 1
        sock.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class Within:
    """The server in this process: its turns are taken here, and what it says is all read."""

    def __init__(self, folder: Path) -> None:
        tiers = ("cpu://?capacity=4MiB", f"disk://{folder}/kv?capacity=8MiB")
        self.server = Server(
            Config(tiers=tiers, chunk_tokens=16, prefault=False),
            ServerConfig(listen="", http="", unix=str(folder / "socket")),
        )
        until(self._is_warm)
        self.ids = count(1)
        self.answers = self.refused = self.longest = 0.0

    def _is_warm(self) -> bool:
        self.server.cache.step()
        return self.server.cache.is_warm

    def send(self, frames: list[bytes], chance: random.Random) -> None:
        """A connection of its own: the frames, cut anywhere; then it ends, maybe in the middle."""
        ours, theirs = socket.socketpair()
        caller = Caller(next(self.ids), "fuzz", is_local=chance.random() < 0.5, role=Role.ADMIN)
        connection = Connection(self.server._dispatch, theirs, caller)
        self.server._begin(connection)
        replies = ReplyReader()
        ours.setblocking(False)
        data = memoryview(b"".join(frames))
        cut = max(1 + len(data) // 50, chance.choice((len(data), len(data), 1, 7, 100, 1000)))
        moved = time.monotonic()
        while data and connection.is_open:
            with suppress(BlockingIOError):  # the server reads nothing while a command of this client waits
                data = data[ours.send(data[:cut]) :]
                moved = time.monotonic()
            began = time.monotonic()
            assert began - moved < PATIENCE, "it reads no more"
            self._turn(connection)
            while self._goes_on(connection) or (connection.is_waiting and chance.random() < 0.95):
                select.select([], [], [], 0.0002)
                self._turn(connection)
                assert time.monotonic() - began < PATIENCE, "it hangs"
            self.longest = max(self.longest, time.monotonic() - began)
            self._hear(ours, replies)
        ours.close()
        if connection.is_open:
            self._turn(connection)
        if connection.is_open:  # it waits for a tier: epoll would say that its client is gone
            connection.close()
            self.server._update_events(connection)

    @staticmethod
    def _goes_on(connection: Connection) -> bool:
        """Whether its turn was cut, and it waits for nothing."""
        return connection.is_open and connection.needs_turn and not connection.is_waiting

    def _turn(self, connection: Connection) -> None:
        self.server._event(connection.fd, select.EPOLLIN)
        self.server.cache.step()
        if connection.is_open and connection.is_waiting:
            connection.run_and_send()
            self.server._update_events(connection)

    def _hear(self, ours: socket.socket, replies: ReplyReader) -> None:
        with suppress(BlockingIOError, ConnectionError):
            while said := ours.recv(1 << 16):
                replies.feed(said)
                while (reply := replies.next()) is not INCOMPLETE:
                    self.answers += 1
                    self.refused += isinstance(reply, Error)

    def check(self) -> None:
        self.server.cache.check()
        assert not self.server._connections
        assert self.server._values._drafting == 0
        assert not self.server._resumable

    def close(self) -> None:
        self.server.stop()
        self.server.run()


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(8_000, id="8,000"),
        pytest.param(150_000, id="150,000", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param(1_000_000, id="1,000,000", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_any_input_within_one_process_is_answered_in_resp(tmp_path: Path, frames: int):
    within, source = Within(tmp_path), Frames(SEED)
    sent = warm = 0
    began = time.monotonic()
    while sent < frames:
        batch = source.batch(16)
        try:
            within.send(batch, source.chance)
            if sent % 1000 < len(batch):
                within.check()
        except BaseException:
            print(f"seed {SEED}, {sent} frames were sent before these: {batch!r}")
            raise
        sent += len(batch)
        if not warm and sent > 5000:
            warm = rss()
    grown = rss() - warm
    print(
        f"{sent} frames in {time.monotonic() - began:.0f} s: {within.answers:.0f} answers, "
        f"{within.refused:.0f} of them errors; the slowest {within.longest:.3f} s; {grown >> 10} KiB grown"
    )
    assert grown < 64 * MIB
    assert within.answers > sent / 2
    assert within.refused < within.answers
    until(lambda: within.server.cache.step() == 0 and within.server.cache.index.leased_bytes == 0, 5)
    within.check()
    within.close()


@pytest.mark.parametrize(
    ("frames", "most"),
    [
        pytest.param(8_000, 16, id="8,000"),
        pytest.param(100_000, 60, id="100,000", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param(1_000_000, 60, id="1,000,000", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_any_input_leaves_the_server_up_sound_and_small(tmp_path: Path, frames: int, most: int):
    tiers = ("cpu://?capacity=4MiB", f"disk://{tmp_path}/kv?capacity=8MiB")
    config = {"chunk_tokens": 16, "prefault": True}
    with served(tmp_path, *tiers, config=config, unix=str(tmp_path / "socket")) as server:
        source, witness = Frames(SEED), Witness(server, SEED)
        peers = [Peer(server, witness.look) for _ in range(8)]
        sent = warm = 0
        began = time.monotonic()
        while sent < frames:
            batch = source.batch(most)
            try:
                source.chance.choice(peers).send(batch, b"%d" % sent)
                if source.chance.random() < 0.1:
                    witness.use()
            except BaseException:
                print(f"seed {SEED}, {sent} frames were sent before these: {batch!r}")
                raise
            sent += len(batch)
            if not warm and sent > 5000:
                warm = server.rss()
        for peer in peers:
            peer.close()
        witness.close()
        grown = server.rss() - warm
        echoed, ended, swallowed = (
            sum(getattr(peer, what) for peer in peers) for what in ("echoed", "ended", "swallowed")
        )
        print(
            f"{sent} frames in {time.monotonic() - began:.0f} s: {echoed} batches answered, {ended} ended by "
            f"the server, {swallowed} by us; {witness}; {grown >> 10} KiB grown"
        )
        assert grown < 64 * MIB
        assert echoed > sent / most / 4
        assert witness.frozen < 1
        assert witness.chunks
        assert witness.values
        assert_nothing_is_left(server)
        assert b"Traceback" not in server.log.read_bytes()
