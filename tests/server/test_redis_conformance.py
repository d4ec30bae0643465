"""One script of commands to a real redis-server and to ours: the replies are the same bytes.

The script is read as redis-cli would read it. It is sent three ways: RESP2, RESP3, and as inline commands.
A line may begin with what its replies need, because no two servers would answer it alike:

    ~   a time: the numbers may differ by a second
    %   names in no order: compared as a set
    !   one of the few known differences: not the same, and ours must be what DIFFERENT says
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtier.wire.command_reader import CommandReader
from lmtier.wire.reply_reader import ReplyReader
from lmtier.wire.resp import INCOMPLETE, encode_command
from tests.server.process import PATIENCE, Served, served

SCRIPT = r"""
# the connection
PING
PING hello
PING a b
ping "with \r\n in it"
pInG
ECHO hi
ECHO ""
ECHO "\x00\xff\r\n"
ECHO
ECHO a b
SELECT 0
SELECT 00
SELECT 1.0
SELECT -1
SELECT 16
SELECT x
SELECT
SELECT 0 0
SELECT 99999999999999999999
~TIME
TIME x
NOSUCH
nosuch a b c
"no such" "\x01\xff" "a b"
NOSUCH aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa aaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbb bbbbbbbbbbbbbbbbbbbbbb bbbbbbb
NOSUCH 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
""
"" a
GETT
"SET\x00" "a\x00b" c

# transactions
EXEC
DISCARD
UNWATCH
MULTI x
MULTI
MULTI
SET t 1
GET t
SET t 2 NX
SET t 3 GET
GET t
GET missing
MGET t missing t
MSET t 4 u 5
STRLEN t
TTL t
DEL t u nobody
EXEC
GET t
MULTI
EXEC
MULTI
SET t 1
DISCARD
GET t
EXEC
MULTI
WATCH t
SET t 2
EXEC
MULTI
NOSUCH
SET t 3
EXEC
GET t
MULTI
SET t 4
GET
EXEC
EXEC
GET t
MULTI
SET t 5
EXEC x
EXEC
GET t
MULTI
DISCARD x
DISCARD
MULTI
SET t b EX x
SET t v EX 0
GETRANGE t a b
MSET t u v
SET t 6
EXEC
GET t
WATCH
WATCH t
SET t 7
MULTI
SET t 8
EXEC
GET t
WATCH t t
WATCH t u
MULTI
SET t 9
EXEC
WATCH t
UNWATCH
SET t 10
MULTI
GET t
EXEC
WATCH nobody
DEL nobody
MULTI
EXEC
WATCH t
SET t x NX
GET t
MULTI
EXEC
WATCH t
EXPIRE t 100
MULTI
EXEC
WATCH t
PERSIST t
MULTI
EXEC
WATCH t
DEL t
MULTI
EXEC
WATCH t
SET t 1
MULTI
EXEC
WATCH t nobody
FLUSHALL
MULTI
EXEC
WATCH nobody
FLUSHALL
MULTI
EXEC
WATCH t
MULTI
SET t 1
DISCARD
SET t 2
MULTI
EXEC
MULTI
UNWATCH
SELECT 0
PING
PING hello
ECHO hi
SELECT 16
CLIENT SETNAME z
CLIENT GETNAME
CLIENT SETNAME ""
EXEC
MULTI
FLUSHALL
DBSIZE
EXEC
RESET
MULTI
SET t 1
RESET
EXEC
GET t

# set and get
GET missing
SET a 1
GET a
SET a "two words"
GET a
SET a ""
GET a
STRLEN a
EXISTS a
SET "" "no name"
GET ""
EXISTS ""
DEL ""
SET "bin\x00\x01\xffary\r\n" "\x00\r\n\xff$-1"
GET "bin\x00\x01\xffary\r\n"
STRLEN "bin\x00\x01\xffary\r\n"
DEL "bin\x00\x01\xffary\r\n"
SET é ü
GET é
set lower case
get lower
GET LOWER
SET
SET a
GET
GET a b
STRLEN
STRLEN a b
STRLEN missing
SET a 1 BAD
SET a 1 NX XX
SET a 1 XX NX
SET a 1 NX NX
SET a 1 XX XX
SET a 1 GET GET
SET a 1 KEEPTTL KEEPTTL
SET a 1 EX 1 EX 1
SET a 1 NX GET
SET a 1 EX
SET a 1 PX
SET a 1 EX NX
SET a 1 EX 0
SET a 1 EX -1
SET a 1 EX x
SET a 1 EX 1.5
SET a 1 EX " 1"
SET a 1 EX +1
SET a 1 EX 01
SET a 1 EX ""
SET a 1 EX -0
SET a 1 PX 0
SET a 1 PX -5
SET a 1 EX 9223372036854775807
SET a 1 EX 9223372036854775
SET a 1 PX 9223372036854775807
SET a 1 EX 9223372036854775808
SET a 1 EXAT 0
SET a 1 EXAT -1
SET a 1 PXAT 0
SET a 1 PXAT x
SET a 1 EX 10 PX 10
SET a 1 EX 10 KEEPTTL
SET a 1 KEEPTTL EX 10
SET a 1 EX 10 EXAT 99999999999
SET a 1 PXAT 99999999999999 EXAT 99999999999
SET a 1 PERSIST
SET a 1 EX 10 NX XX
SET a 1 nx get ex 100 bad
SET a 1 EX 0 BAD
SET a 1 EX x BAD
SET a 1 EX 100 EX 200
TTL a
SET a 1 PXAT 9223372036854775807
SET a 1 EXAT 9223372036854775
SET a 1 EXAT 9223372036854776
GET a
~TTL a

# conditions
SET c 1 XX
GET c
SET c 1 NX
SET c 2 NX
GET c
SET c 2 XX
GET c
SET c 3 GET
SET c 4 XX GET
SET c 5 NX GET
GET c
SET d 1 GET
GET d
DEL d
SET d 1 NX GET
GET d
DEL d
SET d 1 XX GET
GET d
SET c 6 EX 100
TTL c
SET c 7 KEEPTTL
TTL c
SET c 8
TTL c
SET c 8 PX 100000
TTL c
SET c 9 KEEPTTL GET
TTL c
SET c 9 EX 100 NX
SET c 9 XX EX 1000
TTL c
SET c 9 EX 100 GET
TTL c
SET c 10 EXAT 33177117420
SET c 10 PXAT 33177117420000
~TTL c
SET c old EXAT 1
GET c
EXISTS c
SET c old PXAT 1 GET
EXISTS c
SET c new
SET c old PXAT 1 GET
GET c
SET e 1 get Nx pX 5000000
TTL e
SETNX f 1
SETNX f 2
GET f
SETNX f
SETNX f 1 2
SETNX "" empty
GET ""
SETEX g 100 v
GET g
TTL g
SETEX g 0 v
SETEX g -1 v
SETEX g x v
SETEX g 1
SETEX g 9223372036854775807 v
PSETEX g 100000 v
TTL g
PSETEX g 0 v
PSETEX g -1 v
PSETEX g x v
PSETEX g
PSETEX g 9223372036854775807 v
GET g
GETSET f 3
GETSET h 1
GETSET h 2
GETSET h
SET h 1 EX 100
GETSET h 2
TTL h
GETDEL h
GETDEL h
EXISTS h
GETDEL
GETDEL a b
SET x 'it\'s'
GET x

# GETRANGE
SET r "0123456789"
GETRANGE r 0 -1
GETRANGE r 0 0
GETRANGE r 0 3
GETRANGE r 3 100
GETRANGE r -3 -1
GETRANGE r -3 -2
GETRANGE r -100 3
GETRANGE r -100 -50
GETRANGE r -100 -10
GETRANGE r -1 -3
GETRANGE r 5 3
GETRANGE r 9 9
GETRANGE r 10 10
GETRANGE r 10 -1
GETRANGE r 0 -11
GETRANGE r 0 -10
GETRANGE r -10 0
GETRANGE r 3 -20
GETRANGE r 0 9223372036854775807
GETRANGE r -9223372036854775808 9223372036854775807
GETRANGE r -9223372036854775808 -1
GETRANGE r 9223372036854775807 9223372036854775807
GETRANGE r 0 9223372036854775808
GETRANGE r x 1
GETRANGE r 0 1.0
GETRANGE r 0
GETRANGE r 0 1 2
GETRANGE missing 0 -1
GETRANGE missing x 1
SET r ""
GETRANGE r 0 -1
GETRANGE r 0 0
GETRANGE r -1 -1

# many at once
MSET m1 1 m2 2 m3 3
MGET m1 m2 m3
MGET m1 missing m3 m1
MGET missing
MGET ""
MGET
MSET
MSET a
MSET a 1 b
MSET m1 first m1 second m1 third
GET m1
MSET m4 "" m5 "\x00"
MGET m4 m5
SET m6 1 EX 100
MSET m6 2
TTL m6
EXISTS m1 m2 m3 missing
EXISTS m1 m1 m1
EXISTS
DEL m1
DEL m1
DEL m2 m3 missing m2
DEL
UNLINK m4 m5 m4
UNLINK
EXISTS m1 m2 m3 m4 m5
TYPE a
TYPE missing
TYPE
TYPE a b

# time to live
SET t 1
TTL t
PTTL t
TTL missing
PTTL missing
TTL
TTL t t
PTTL
PERSIST t
PERSIST missing
PERSIST
EXPIRE t 100
TTL t
~PTTL t
PERSIST t
TTL t
PERSIST t
EXPIRE missing 100
EXPIRE t
EXPIRE t x
EXPIRE t 1.5
EXPIRE t ""
EXPIRE t 100 BAD
EXPIRE t 100 "\xff bad"
EXPIRE t 100 NX BAD
EXPIRE t 100 NX XX
EXPIRE t 100 NX GT
EXPIRE t 100 NX LT
EXPIRE t 100 GT LT
EXPIRE t 100 XX NX GT
EXPIRE t 100 NX NX
EXPIRE t 50 nx
EXPIRE t 50 XX
TTL t
EXPIRE t 40 GT
TTL t
EXPIRE t 60 GT
TTL t
EXPIRE t 70 LT
TTL t
EXPIRE t 30 LT
TTL t
EXPIRE t 200 XX GT
TTL t
EXPIRE t 100 XX LT
TTL t
PERSIST t
EXPIRE t 100 XX
EXPIRE t 100 GT
TTL t
EXPIRE t 100 LT
TTL t
EXPIRE t 9223372036854775807
EXPIRE t -9223372036854775808
EXPIRE t 9223372036854775808
EXPIRE t 9223372036854775
PEXPIRE t 9223372036854775807
PEXPIRE t 100000
TTL t
PEXPIRE t x
PEXPIRE t
PEXPIRE t 300000 GT
TTL t
EXPIREAT t 33177117420
PEXPIREAT t 33177117420000
~TTL t
EXPIREAT t x
EXPIREAT t
EXPIREAT t 9223372036854775807
PEXPIREAT t 9223372036854775807
PEXPIREAT t x BAD
PERSIST t
PEXPIREAT t 9223372036854775807 GT
PEXPIREAT t 9223372036854775807 LT
EXPIRE t x BAD WORSE
EXPIRE t 9223372036854775807 NX XX
EXPIREAT t 9223372036854775
EXPIREAT t 9223372036854776
PEXPIRE t 9223370000000000000
EXPIREAT t 1
EXISTS t
SET t 1
EXPIRE t 0
EXISTS t
SET t 1
EXPIRE t -1
EXISTS t
SET t 1
PEXPIRE t -1
EXISTS t
SET t 1
PEXPIREAT t 1
GET t
SET t 1
PEXPIREAT t -5
GET t
SET t 1 EX 100
EXPIRE t -1 GT
TTL t
EXPIRE t -1 LT
EXISTS t
EXPIRE t 1
SET t 1
EXPIRE t -1 GT
EXISTS t
EXPIRE t -1 LT
EXISTS t
EXPIRE missing 1 NX XX
EXPIRE missing x

# all of them
FLUSHALL
DBSIZE
DBSIZE x
MSET one 1 two 2 three 3 four 4 o*e 5 a[b]c 6 a\\b 7 h-llo 8 hello 9 hallo 10 hbllo 11 "" 12
MSET "new\nline" 13 ä 14
DBSIZE
%KEYS *
%KEYS o*
%KEYS *o*
%KEYS t?o
%KEYS ???
%KEYS h[ae]llo
%KEYS h[^e]llo
%KEYS h[a-b]llo
%KEYS h[b-a]llo
%KEYS h[^a-b]llo
%KEYS h[-]llo
%KEYS h[a-]llo
%KEYS h[]llo
%KEYS h[^]llo
%KEYS h[
%KEYS h[a
%KEYS h[a-
%KEYS h[^
%KEYS "h\[a"
%KEYS o\*e
%KEYS o\\*e
%KEYS "a\\[b]c"
%KEYS "a[[]b]c"
%KEYS "a[\\[]b]c"
%KEYS "a[\\]b]*"
%KEYS "a\\\\b"
%KEYS "a\\b"
%KEYS "h[\\e]llo"
%KEYS "\\h\\e\\llo"
%KEYS "hello\\"
%KEYS ""
%KEYS ?*?
%KEYS *e
%KEYS *l*l*
%KEYS *l*l*l*
%KEYS h*o
%KEYS HELLO
%KEYS "new?line"
%KEYS "new*"
%KEYS ?
%KEYS ??
%KEYS "[\xc3]?"
%KEYS "[^a-z]*"
%KEYS [!-~]*
%KEYS .*
%KEYS (one|two)
%KEYS h.llo
KEYS
KEYS a b
SCAN
SCAN x
!SCAN -1
SCAN 18446744073709551616
SCAN 0 MATCH
SCAN 0 COUNT
SCAN 0 COUNT 0
SCAN 0 COUNT -1
SCAN 0 COUNT x
SCAN 0 BAD
SCAN 0 BAD 1
SCAN 0 MATCH * BAD
SCAN 0 TYPE
%SCAN 0 COUNT 1000
%SCAN 0 COUNT 1000 MATCH *
%SCAN 0 MATCH h* COUNT 1000
%SCAN 0 MATCH h* COUNT 1000 MATCH o*
%SCAN 0 COUNT 1000 TYPE string
%SCAN 0 COUNT 1000 TYPE STRING
%SCAN 0 COUNT 1000 TYPE list MATCH *
%SCAN 0 match [ht]* count 1000 type string
%SCAN 0 COUNT 1000 MATCH ""
!SCAN 00
!SCAN +0
!SCAN ""
SCAN "0 "
DEL ""
%KEYS **
%KEYS ***e**
FLUSHDB
DBSIZE
SET a 1
FLUSHALL SYNC
SET a 1
FLUSHDB ASYNC
FLUSHDB async
FLUSHALL x
FLUSHALL SYNC ASYNC
FLUSHALL SYNC SYNC
GET a
SCAN 0
SCAN 0 MATCH x

# who speaks
CLIENT
CLIENT GETNAME
CLIENT SETNAME me
CLIENT GETNAME
CLIENT SETNAME "with space"
CLIENT SETNAME "new\nline"
CLIENT SETNAME é
CLIENT SETNAME ""
CLIENT GETNAME
CLIENT SETNAME
CLIENT SETNAME a b
CLIENT GETNAME x
CLIENT ID x
CLIENT NOSUCH
CLIENT nosuch a b
CLIENT NO-EVICT on
CLIENT NO-EVICT off
CLIENT NO-EVICT bad
CLIENT ID a b c
client SETname
config get
CLIENT NO-EVICT
client getname
CONFIG
CONFIG NOSUCH
CONFIG GET
CONFIG GET nosuch
CONFIG GET save
CONFIG GET appendonly
!CONFIG GET APPENDONLY
CONFIG GET APPENDONL?
CONFIG GET sav[e]
CONFIG GET nosuch appendonly
COMMAND NOSUCH
COMMAND COUNT x
COMMAND INFO nosuch
COMMAND INFO nosuch nosuch2
INFO nosuch
HELLO x
HELLO 1
HELLO 4
HELLO 99999999999999999999
HELLO 3 BAD
HELLO 3 AUTH
HELLO 3 AUTH a
HELLO 3 AUTH a b
HELLO 3 AUTH nobody x
HELLO 2 SETNAME
HELLO 2 SETNAME "a b"
HELLO 2 AUTH default x SETNAME
AUTH
AUTH x
AUTH default x
AUTH nobody x
AUTH a b c
RESET x
QUIT
"""

AFTER_RESET = r"""
HELLO 3
GET missing
CLIENT SETNAME me
CLIENT GETNAME
RESET
CLIENT GETNAME
GET missing
HELLO 2 SETNAME you
CLIENT GETNAME
HELLO
HELLO 3 AUTH default anything SETNAME other
CLIENT GETNAME
HELLO 2
HELLO 3 SETNAME
CLIENT GETNAME
GET missing
RESET
QUIT
"""

WITH_PASSWORD = r"""
GET a
PING
ECHO x
HELLO
HELLO 3
HELLO 2
HELLO 9
HELLO x
HELLO 3 SETNAME me
HELLO 3 AUTH default wrong
HELLO 3 AUTH nobody secret
HELLO 3 AUTH
NOSUCH
SET a 1
SET a
SELECT 0
CLIENT ID
CLIENT SETNAME x
AUTH
AUTH wrong
AUTH ""
AUTH secre
AUTH secrett
AUTH SECRET
AUTH nobody secret
AUTH default wrong
AUTH default secret extra
AUTH default secret
GET missing
PING
RESET
GET missing
AUTH secret
GET missing
AUTH wrong
GET missing
RESET
HELLO 3 AUTH default secret
GET missing
HELLO 2 AUTH default wrong
GET missing
RESET
PING
QUIT
"""

# Sent as they are; the connection ends.
BROKEN = [
    *(b"*1\r\n$4\r\nPING\r\n*x\r\n", b"*1\r\n+PING\r\n", b"*1\r\n$-1\r\n", b"*1\r\n$x\r\n"),
    *(b"*2\r\n$3\r\nGET\r\n:1\r\n", b"*1\r\n$536870913\r\n", b'SET a "unbalanced\r\n', b"GET 'a\r\n"),
    *(
        b'SET "a"b c\r\nPING\r\n',
        b"*9223372036854775808\r\n",
        b"*-\r\n",
        b"*1\r\n$4\r\nPING\r\n$4\r\nQUIT\r\n",
    ),
    *(
        b"\x16\x03\x01\x02\x01\x01\r\nQUIT\r\n",
        b"*1\r\n$4\r\nQUIT\r\n*1\r\n$4\r\nPING\r\n",
        b"QUIT\r\nPING\r\n",
    ),
    *(b"*0\r\n*-1\r\n\r\nPING\r\nQUIT\r\n", b"  \r\n\r\nPING\nPING\r\nQUIT\n", b"\t PING \t a \r\nQUIT\r\n"),
    *(b"POST / HTTP\r\n\r\n", b"Host: a\r\n\r\n", b"POST\r\nPING\r\n"),
    *(b"x" * 70_000, b"*" + b"1" * 70_000, b"*1\r\n$" + b"1" * 70_000),
]

# Before AUTH: little is taken from whom nobody knows.
UNTRUSTED = [
    *(b"*11\r\n$4\r\nPING\r\n$1\r\na\r\n", b"*10\r\n" + b"$1\r\na\r\n" * 10 + b"QUIT\r\n"),
    *(b"*2\r\n$4\r\nECHO\r\n$16385\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$16385\r\n"),
    encode_command("SET", "a", b"v" * 16384) + b"QUIT\r\n",
    b"AUTH secret\r\n" + encode_command("SET", "a", b"v" * 20_000) + b"QUIT\r\n",
]

DIFFERENT = {
    # Redis takes whatever strtoul(3) takes for a cursor; no server ever gave such a one.
    **dict.fromkeys(("SCAN -1", "SCAN 00", "SCAN +0", 'SCAN ""'), "ERR invalid cursor"),
    # Redis 7.0 gives a name back as it was asked for, if it is no pattern.
    "CONFIG GET APPENDONLY": "appendonly",
}
"""What ours answers, or begins with, where redis answers otherwise. Not in the script, since ours answers as
it likes: INFO, CLIENT LIST and INFO, COMMAND, CONFIG SET; `KEYS **`, which in redis misses the name "";
more than 2**20 arguments, names above 3 KiB, which are refused here.
"""

ID = re.compile(rb"(\$2\r\nid\r\n:)\d+")
UNKNOWN = re.compile(rb"(-ERR unknown command '[^'\r]*')[^\r]*")
"""Redis goes on with the arguments; ours says what it is."""


class Side:
    """One of the two servers."""

    def __init__(self, address: tuple[str, int] | Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(address) if isinstance(address, Path) else address)
        self._replies = ReplyReader()

    def __call__(self, request: bytes) -> tuple[bytes, object]:
        """The bytes of one reply, and what they mean."""
        self.socket.sendall(request)
        heard = b""
        while (value := self._replies.next()) is INCOMPLETE:
            data = self.socket.recv(1 << 16)
            assert data, f"closed after {request!r}"
            heard += data
            self._replies.feed(data)
        return UNKNOWN.sub(rb"\1", heard), value

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def rest(self, request: bytes = b"") -> bytes:
        """All that is said until the end."""
        heard = b""
        try:
            self.socket.sendall(request)
            while data := self.socket.recv(1 << 16):
                heard += data
        except (ConnectionResetError, BrokenPipeError):
            pass
        self.socket.close()
        return UNKNOWN.sub(rb"\1", heard)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("ours")) as server:
        yield server


def steps(script: str) -> Iterator[tuple[str, str, list[bytes]]]:
    for line in filter(lambda line: line and not line.startswith("# "), script.splitlines()):
        mark, text = (line[0], line[1:]) if line[0] in "~%!" else ("", line)
        parser = CommandReader(lambda *_: None)
        data = text.encode() + b"\n"
        parser.target()[: len(data)] = data
        parser.received(len(data))
        args = parser.next()
        assert args is not None
        yield mark, text, [bytes(arg) for arg in args]


def names(value: object) -> object:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[1], list):
        return value[0], sorted(value[1])
    assert isinstance(value, list)
    return sorted(value)


def near(one: object, other: object, most: int) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return abs(int(one[0]) - int(other[0])) <= 1 and len(one) == len(other)
    assert isinstance(one, int)
    assert isinstance(other, int)
    return abs(one - other) <= most


def compare(script: str, redis: Side, ours: Side, way: str) -> list[str]:
    """What is not as it should be."""
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for mark, line, args in steps(script):
        request = line.encode() + b"\n" if way == "inline" else encode_command(*args)
        (theirs, their_value), (mine, my_value) = redis(request), ours(request)
        theirs, mine = ID.sub(rb"\1?", theirs), ID.sub(rb"\1?", mine)
        counts[repr(args[0].upper()[:12])[2:-1]] += 1
        match mark:
            case "~":
                # The one is asked a moment after the other, so a second may have begun meanwhile.
                right = near(their_value, my_value, most=1 if args[0] == b"TTL" else 1000)
            case "%":
                right = names(their_value) == names(my_value)
            case "!":
                right = theirs != mine and DIFFERENT[line] in str(my_value)
            case _:
                right = theirs == mine
        if not right:
            wrong.append(f"{line}\n    redis: {theirs!r}\n    ours:  {mine!r}")
    print(
        f"\n{way}: {sum(counts.values())} commands, {len(wrong)} differ; "
        + ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    )
    return wrong


@pytest.mark.parametrize("way", ["RESP2", "RESP3", "inline"])
def test_every_command_is_answered_as_redis_answers_it(redis_server: Path, ours: Served, way: str):
    with Side(redis_server) as redis, Side(ours.address) as mine:
        for side in (redis, mine):
            side(encode_command("FLUSHALL"))
            side(encode_command("HELLO", 3 if way == "RESP3" else 2))
        wrong = compare(SCRIPT, redis, mine, way)
        assert redis.rest() == mine.rest() == b""
    assert not wrong, "\n".join(wrong)


def test_hello_and_reset_change_the_protocol_as_in_redis(redis_server: Path, ours: Served):
    with Side(redis_server) as redis, Side(ours.address) as mine:
        wrong = compare(AFTER_RESET, redis, mine, "HELLO")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("way", ["RESP2", "inline"])
def test_with_a_password_as_redis_does(redis_server: Path, tmp_path: Path, way: str):
    with Side(redis_server) as admin, served(tmp_path, token="secret") as server:
        admin(encode_command("FLUSHALL"))
        admin(encode_command("CONFIG", "SET", "requirepass", "secret"))
        try:
            with Side(redis_server) as redis, Side(server.address) as mine:
                wrong = compare(WITH_PASSWORD, redis, mine, f"with a password, {way}")
            assert not wrong, "\n".join(wrong)
            for data in UNTRUSTED:
                with Side(redis_server) as redis, Side(server.address) as mine:
                    assert mine.rest(data) == redis.rest(data), data[:60]
        finally:
            admin(encode_command("CONFIG", "SET", "requirepass", ""))


@pytest.mark.parametrize("data", BROKEN, ids=lambda data: repr(data[:30]))
def test_what_ends_a_connection_ends_it_as_redis_does(redis_server: Path, ours: Served, data: bytes):
    with Side(redis_server) as redis, Side(ours.address) as mine:
        assert mine.rest(data) == redis.rest(data)


def test_a_pipeline_is_answered_in_order_however_it_is_cut(redis_server: Path, ours: Served):
    requests = [
        encode_command("FLUSHALL"),
        *(encode_command("SET", f"name {i}", b"value %d\r\n" % i * (i * i)) for i in range(60)),
        *(encode_command("GET", f"name {i}") for i in range(60)),
        encode_command("MGET", *(f"name {i}" for i in range(0, 60, 7))),
        b"GET 'name 3'\r\n",
        encode_command("GETRANGE", "name 59", 1000, 20_000),
        *(encode_command("DEL", f"name {i}") for i in range(0, 60, 2)),
        *(encode_command("GET", f"name {i}") for i in range(60)),
        encode_command("DBSIZE"),
        encode_command("QUIT"),
    ]
    data = b"".join(requests)
    with Side(redis_server) as redis:
        wanted = redis.rest(data)
    assert len(wanted) > len(data) / 2
    for size in (len(data), 100_000, 4096, 997):
        with Side(ours.address) as mine:
            for at in range(0, len(data) - size, size):
                mine.socket.sendall(data[at : at + size])
            last = range(0, len(data), size)[-1] if size < len(data) else 0
            assert mine.rest(data[last:]) == wanted


def test_a_scan_from_0_to_0_finds_every_name_that_stays(ours: Served):
    with ours.connect() as wire:
        wire.ask("FLUSHALL")
        names = {b"name %d" % i for i in range(1000)}
        for name in names:
            wire.send(encode_command("SET", name, "v"))
        for _ in names:
            assert wire.reply() == "OK"
        cursor, found, turns = b"0", [], 0
        while turns == 0 or cursor != b"0":
            cursor, some = wire.ask("SCAN", cursor, "COUNT", 50)
            found += some
            turns += 1
            wire.ask("SET", f"new {turns}", "v")  # what comes may be found
            wire.ask("DEL", f"new {turns - 3}")
        assert names <= set(found)
        assert len(found) == len(set(found))
        assert 20 <= turns <= 30
