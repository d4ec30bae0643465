"""RESP: what was sent is what is understood, however it was cut; what is wrong is refused, and costs nothing.

Redis itself is the judge of wording, quoting and types.
"""

from __future__ import annotations

import math
import random
import socket
import time
import tracemalloc
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.errors import MisuseError
from lmtier.wire.command_reader import CommandReader, Limits
from lmtier.wire.reply_reader import ReplyReader
from lmtier.wire.resp import (
    CRLF,
    DEPTH,
    INCOMPLETE,
    Error,
    NullArray,
    ProtocolError,
    Push,
    Simple,
    Verbatim,
    bulk_header,
    encode,
    encode_command,
    encode_command_parts,
)

KEEP = Limits()


def kept(args, argc, length):
    return None


def commands_in(parser, data):
    """Put `data` where the parser wants it, as a socket would; every command as soon as it is complete."""
    rest = memoryview(data)
    while rest:
        target = parser.target()
        assert target, "room for at least one byte"
        count = min(len(target), len(rest))
        target[:count] = rest[:count]
        parser.received(count)
        rest = rest[count:]
        while (args := parser.next()) is not None:
            yield [bytes(arg) for arg in args]


def replies_in(parser, data):
    parser.feed(data)
    while (value := parser.next()) is not INCOMPLETE:
        yield value


def give(parser, data):
    return list(commands_in(parser, data))


def parse(data, place=kept, limits=KEEP):
    return give(CommandReader(place, limits), data)


def replies(parser, data):
    return list(replies_in(parser, data))


def refusal(data, place=kept, limits=KEEP):
    with pytest.raises(ProtocolError) as caught:
        parse(data, place, limits)
    return str(caught.value)


def cuts(data, sizes):
    """`data` in pieces of `sizes`, over and over."""
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        yield data[at : at + size]
        at, turn = at + size, turn + 1


# ---- replies out, and back


@pytest.mark.parametrize(
    ("value", "resp2", "resp3"),
    [
        (Simple("OK"), b"+OK\r\n", b"+OK\r\n"),
        (Error("ERR no such key"), b"-ERR no such key\r\n", b"-ERR no such key\r\n"),
        (Error("ERR a\r\nb"), b"-ERR a  b\r\n", b"-ERR a  b\r\n"),
        (Simple("a\n+OK"), b"+a +OK\r\n", b"+a +OK\r\n"),
        (0, b":0\r\n", b":0\r\n"),
        (-(1 << 63), b":-9223372036854775808\r\n", b":-9223372036854775808\r\n"),
        (1 << 63, b"$19\r\n9223372036854775808\r\n", b"(9223372036854775808\r\n"),
        (b"", b"$0\r\n\r\n", b"$0\r\n\r\n"),
        (b"a\r\nb", b"$4\r\na\r\nb\r\n", b"$4\r\na\r\nb\r\n"),
        pytest.param(memoryview(b"abc")[1:], b"$2\r\nbc\r\n", b"$2\r\nbc\r\n", id="a view"),
        ("é", b"$2\r\n\xc3\xa9\r\n", b"$2\r\n\xc3\xa9\r\n"),
        (None, b"$-1\r\n", b"_\r\n"),
        (NullArray, b"*-1\r\n", b"_\r\n"),
        (1.5, b"$3\r\n1.5\r\n", b",1.5\r\n"),
        (3.0, b"$1\r\n3\r\n", b",3\r\n"),
        (0.1, b"$3\r\n0.1\r\n", b",0.1\r\n"),
        (1e100, b"$6\r\n1e+100\r\n", b",1e+100\r\n"),
        (math.inf, b"$3\r\ninf\r\n", b",inf\r\n"),
        (-math.inf, b"$4\r\n-inf\r\n", b",-inf\r\n"),
        (math.nan, b"$3\r\nnan\r\n", b",nan\r\n"),
        (True, b":1\r\n", b"#t\r\n"),
        (False, b":0\r\n", b"#f\r\n"),
        ([], b"*0\r\n", b"*0\r\n"),
        ([1, [b"a", None]], b"*2\r\n:1\r\n*2\r\n$1\r\na\r\n$-1\r\n", b"*2\r\n:1\r\n*2\r\n$1\r\na\r\n_\r\n"),
        ((1, 2), b"*2\r\n:1\r\n:2\r\n", b"*2\r\n:1\r\n:2\r\n"),
        ({b"a": 1}, b"*2\r\n$1\r\na\r\n:1\r\n", b"%1\r\n$1\r\na\r\n:1\r\n"),
        ({b"a"}, b"*1\r\n$1\r\na\r\n", b"~1\r\n$1\r\na\r\n"),
        (frozenset([7]), b"*1\r\n:7\r\n", b"~1\r\n:7\r\n"),
        (
            Push([b"invalidate", 1]),
            b"*2\r\n$10\r\ninvalidate\r\n:1\r\n",
            b">2\r\n$10\r\ninvalidate\r\n:1\r\n",
        ),
        (Verbatim("# é"), b"$4\r\n# \xc3\xa9\r\n", b"=8\r\ntxt:# \xc3\xa9\r\n"),
    ],
    ids=repr,
)
def test_every_type_has_its_bytes_in_both_protocols(value, resp2, resp3):
    assert encode(value, resp3=False) == resp2
    assert encode(value, resp3=True) == resp3


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"+OK\r\n", Simple("OK")),
        (b"+\r\n", Simple("")),
        (b"-ERR \xff\r\n", Error("ERR \udcff")),
        (b":-12\r\n", -12),
        (b":123456789\r\n", 123456789),
        (b"$0\r\n\r\n", b""),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"_\r\n", None),
        (b",1.25e3\r\n", 1250.0),
        (b",10\r\n", 10.0),
        (b",-inf\r\n", -math.inf),
        (b"#t\r\n", True),
        (b"#f\r\n", False),
        (b"(-123456789012345678901234567890\r\n", -123456789012345678901234567890),
        (b"!8\r\nERR a\r\nb\r\n", Error("ERR a\r\nb")),
        (b"=7\r\nmkd:abc\r\n", Verbatim("abc")),
        (b"*0\r\n", []),
        (b"*2\r\n*1\r\n:1\r\n*-1\r\n", [[1], None]),
        (b"%0\r\n", {}),
        (b"%2\r\n+a\r\n*1\r\n:1\r\n:2\r\n%1\r\n:3\r\n:4\r\n", {"a": [1], 2: {3: 4}}),
        pytest.param(b"~3\r\n:1\r\n:1\r\n$1\r\nx\r\n", {1, b"x"}, id="a set"),
        (b">1\r\n:1\r\n", Push([1])),
    ],
    ids=repr,
)
def test_a_client_reads_every_type_of_both_protocols(data, value):
    found = replies(ReplyReader(), data)
    assert found == [value]
    assert type(found[0]) is type(value)


@pytest.mark.parametrize(
    "data",
    [
        *(b"x\r\n", b"\r\n", b"\n", b"+OK\n", b":\r\n", b":+1\r\n", b":01\r\n", b":1_0\r\n", b": 1\r\n"),
        *(
            b":9223372036854775808\r\n",
            b"$-2\r\n",
            b"*-2\r\n",
            b"%-1\r\n",
            b"~-1\r\n",
            b">-1\r\n",
            b"!-1\r\n",
        ),
        *(b"$1\r\nabc\r\n", b"$x\r\n", b"*1\n:1\r\n", b",\r\n", b",1_0\r\n", b",infinity\r\n", b",0x1p3\r\n"),
        *(b"(\r\n", b"(" + b"9" * 4301 + b"\r\n", b"#\r\n", b"#x\r\n", b"_x\r\n", b"=3\r\ntxt\r\n"),
        *(b"%1\r\n*1\r\n:1\r\n:1\r\n", b"~1\r\n%0\r\n", b"|1\r\n+a\r\n+b\r\n:1\r\n", b"$?\r\n"),
        *(b"+" + b"x" * 70000, b"$99999999999\r\n", b"*4000000000\r\n", b"%9223372036854775807\r\n"),
    ],
    ids=lambda data: repr(data[:24]),
)
def test_a_reply_that_is_none_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        replies(ReplyReader(), data)


def test_what_cannot_be_sent_is_misuse():
    with pytest.raises(MisuseError, match="object is no reply"):
        encode([object()], resp3=True)


def nested(depth):
    value: list[object] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("resp3", [False, True])
def test_replies_nest_so_deep_and_no_deeper(resp3):
    data = encode(nested(DEPTH), resp3)
    assert replies(ReplyReader(), data) == [nested(DEPTH)]
    with pytest.raises(MisuseError, match="deep"):
        encode(nested(DEPTH + 1), resp3)
    with pytest.raises(ProtocolError, match="levels"):
        replies(ReplyReader(), b"*1\r\n" + data)


def test_a_payload_is_framed_without_being_touched():
    payload = b"p" * 1000
    assert bulk_header(1000) + payload + CRLF == encode(payload, resp3=False)


def test_a_limit_holds_for_one_reply_before_its_bytes():
    parser = ReplyReader(limit=100)
    assert replies(parser, encode(b"x" * 80, True) * 3) == [b"x" * 80] * 3
    with pytest.raises(ProtocolError, match="too big reply"):
        replies(parser, b"$101\r\n")
    with pytest.raises(ProtocolError, match="too big reply"):
        replies(ReplyReader(limit=100), b"*9\r\n" + encode(b"x" * 40, True) * 3)
    with pytest.raises(ProtocolError, match="too many values"):
        replies(ReplyReader(limit=100), b"*34\r\n")
    many = b"*600000\r\n" + b":1\r\n" * 600_000
    assert len(replies(ReplyReader(), many * 2)) == 2
    with pytest.raises(ProtocolError, match="too many values"):
        replies(ReplyReader(), b"*2\r\n" + many * 2)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.binary()
    | st.from_regex(r"[^\r\n]*", fullmatch=True, alphabet=st.characters(codec="utf-8")).map(Simple)
    | st.from_regex(r"[^\r\n]*", fullmatch=True, alphabet=st.characters(codec="utf-8")).map(Error)
    | st.text(st.characters(codec="utf-8")).map(Verbatim)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(Push)
        | st.dictionaries(st.binary(), inner)
        | st.sets(st.binary() | st.integers())
    ),
    max_leaves=20,
)
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def typed(value):
    """1, 1.0 and True are equal; here they differ, and so do text and its kinds."""
    if isinstance(value, list):
        return type(value).__name__, [typed(each) for each in value]
    if isinstance(value, dict):
        return "dict", {key: typed(each) for key, each in value.items()}
    return type(value).__name__, value


@settings(deadline=None)
@given(st.lists(values, max_size=4), sizes)
def test_a_client_understands_a_server_however_it_is_cut(said, sizes):
    data = b"".join(encode(value, resp3=True) for value in said)
    parser = ReplyReader()
    heard = [value for piece in cuts(data, sizes) for value in replies(parser, piece)]
    assert typed(heard) == typed(said)
    assert typed(replies(ReplyReader(), memoryview(data))) == typed(said)


def test_long_replies_in_pieces_take_proportional_time():
    array = encode([b"item %d" % each for each in range(200_000)], resp3=True)
    bulk = encode(bytes(32 << 20), resp3=True)
    began = time.process_time()
    for data, size in ((array, 64), (bulk, 4096)):
        parser = ReplyReader()
        found = [value for piece in cuts(memoryview(data), [size]) for value in replies(parser, piece)]
        assert len(found) == 1
    assert time.process_time() - began < 10, "looked again at what it had seen: that takes minutes"


# ---- commands in


def test_a_request_is_an_array_of_bulks():
    assert (
        encode_command("SET", b"\xff", 12, 1.5)
        == b"*4\r\n$3\r\nSET\r\n$1\r\n\xff\r\n$2\r\n12\r\n$3\r\n1.5\r\n"
    )


@pytest.mark.parametrize(
    ("data", "commands"),
    [
        (b"*1\r\n$4\r\nPING\r\n", [[b"PING"]]),
        (b"*2\r\n$3\r\nGET\r\n$0\r\n\r\n", [[b"GET", b""]]),
        (b"*1\r\n$4\r\n\r\n\r\n\r\n", [[b"\r\n\r\n"]]),
        (b"PING\r\n", [[b"PING"]]),
        (b"PING\n", [[b"PING"]]),
        (b"  set  a\tb \r\n", [[b"set", b"a", b"b"]]),
        (
            b'echo "a\\x41\\n\\q\\"" \'b\\\'\\n\' c"d e" ""\r\n',
            [[b"echo", b'aA\nq"', b"b'\\n", b"cd e", b""]],
        ),
        (b"\r\n\n  \r\n*0\r\n*-1\r\n*-5\r\nPING\r\n", [[b"PING"]]),
        (b"*1\r\n$4\r\nPING\r\nPING\r\n*1\r\n$1\r\nx\r\n", [[b"PING"], [b"PING"], [b"x"]]),
        (b"*2\r\n$4\r\nPING\r\n", []),
        (b"", []),
    ],
    ids=repr,
)
def test_commands_are_read_as_redis_reads_them(data, commands):
    assert parse(data) == commands
    parser = CommandReader(kept)
    assert [args for piece in cuts(data, [1]) for args in give(parser, piece)] == commands


arguments = st.lists(st.binary(max_size=60) | st.integers(1000, 3000).map(bytes), min_size=1, max_size=6)


@settings(deadline=None)
@given(st.lists(arguments, max_size=4), sizes, st.integers(0, 100))
def test_a_server_understands_a_client_however_it_is_cut(said, sizes, shortest):
    """Arguments of `shortest` bytes or more are payloads."""
    places = []

    def place(args, argc, length):
        assert args, "the name of a command is never a payload"
        if length < shortest:
            return None
        places.append((len(args), argc, memoryview(bytearray(length))))
        return places[-1][2]

    data = b"".join(encode_command(*args) for args in said)
    parser = CommandReader(place)
    assert [args for piece in cuts(data, sizes) for args in give(parser, piece)] == said
    assert not parser.in_command
    payloads = [(at, len(args), arg) for args in said for at, arg in enumerate(args) if at]
    assert places == [each for each in payloads if len(each[2]) >= shortest]


def test_a_payload_goes_to_its_own_memory_and_nothing_else():
    slab = memoryview(bytearray(b"." * 100_000))
    asked = []

    def place(args, argc, length):
        asked.append((list(args), argc, length))
        return slab[1000 : 1000 + length] if length > 10 else None

    parser = CommandReader(place)
    head = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$50000\r\n"
    assert give(parser, head + b"a" * 100) == []
    assert asked == [([b"SET"], 3, 1), ([b"SET", b"k"], 3, 50000)]
    target = parser.target()
    assert len(target) == 49_900
    target[:400] = b"b" * 400
    assert slab[1000:1600] == b"a" * 100 + b"b" * 400 + b"." * 100, "the target is the rest of the place"
    parser.received(400)
    assert parser.next() is None
    assert parser.in_command
    target = parser.target()
    target[:] = b"c" * len(target)
    parser.received(len(target))
    assert parser.next() is None, "the argument ends with CRLF"
    target = parser.target()
    tail = b"\r\nPING\r\n"
    target[: len(tail)] = tail
    parser.received(len(tail))
    assert parser.next() == [b"SET", b"k", slab[1000:51000]]
    assert parser.next() == [b"PING"]
    assert parser.next() is None
    assert slab[51000:] == b"." * 49_000
    assert not parser.in_command
    assert len(asked) == 2, "asked once for each"


def test_a_complete_payload_is_copied_and_the_rest_parsed():
    slab = memoryview(bytearray(3000))
    room = iter((slab[:0], slab[:2000], slab[2000:]))
    data = encode_command("SET", b"", b"x" * 2000) + encode_command("GET", b"y" * 1000) + b"PING\r\n"
    assert parse(data, lambda *_: next(room)) == [
        [b"SET", b"", b"x" * 2000],
        [b"GET", b"y" * 1000],
        [b"PING"],
    ]
    assert slab == b"x" * 2000 + b"y" * 1000


def test_a_place_may_refuse():
    def place(args, argc, length):
        raise ProtocolError("no room")

    assert refusal(encode_command("SET", "k"), place) == "no room"


@pytest.mark.parametrize("length", [10, 5000])
def test_a_place_of_another_length_is_misuse(length):
    with pytest.raises(MisuseError, match=f"3 bytes for a payload of {length}"):
        parse(encode_command("SET", bytes(length)), lambda *_: memoryview(bytearray(3)))


def test_more_received_than_the_target_has_is_misuse():
    parser = CommandReader(kept)
    with pytest.raises(MisuseError, match="received"):
        parser.received(len(parser.target()) + 1)
    with pytest.raises(MisuseError, match="received"):
        parser.received(-1)


def test_a_command_that_has_begun_shows():
    parser = CommandReader(kept)
    assert not parser.in_command
    for byte in encode_command("SET", "k", "v")[:-1]:
        assert give(parser, bytes([byte])) == []
        assert parser.in_command
    assert give(parser, b"\n") == [[b"SET", b"k", b"v"]]
    assert not parser.in_command
    give(parser, b"PIN")
    assert parser.in_command


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"*1048577\r\n", "invalid multibulk length"),
        (b"*1\n$4\r\nPING\r\n", "invalid multibulk length"),
        (b"*1\r\n$4\nPING\r\n", "invalid bulk length"),
        (b"*1\r\n\0\r\n", "expected '$', got '\0'"),
        (b"*1\r\n$4\r\nPINGxx", "expected CRLF after a bulk"),
        (b"*1\r\n$4\r\nPING\n\n", "expected CRLF after a bulk"),
        (b"*1\r\n$1048577\r\n", "too big argument"),
        (b"*2\r\n$4\r\nPING\r\n$1048577\r\n", "too big argument"),
        (b"*1\r\n$536870913\r\n", "invalid bulk length"),
        (b"*1\r\n$16385\r\n", "too big argument"),
        (encode_command(*[bytes(1 << 20)] * 3), "too big argument"),
        (
            encode_command("", *[bytes(1 << 20)] * 4) + encode_command("", *[bytes(1 << 20)] * 4, "x"),
            "too big argument",
        ),
    ],
    ids=lambda each: repr(each[:24]),
)
def test_what_redis_would_let_pass_is_refused(data, text):
    assert refusal(data) == text


def test_small_limits_hold_for_short_arguments_too():
    limits = Limits(args=3, argument=10, command=15, payload=20, inline=30)
    assert parse(encode_command("0123456789", "01234") * 2, limits=limits) == [[b"0123456789", b"01234"]] * 2
    assert refusal(encode_command("a", "b", "c", "d"), limits=limits) == "invalid multibulk length"
    assert refusal(encode_command("0123456789A"), limits=limits) == "too big argument"
    assert refusal(encode_command("0123456789", "012345"), limits=limits) == "too big argument"
    assert refusal(encode_command("a", "x" * 21), limits=limits) == "invalid bulk length"
    assert refusal(b"x" * 31, limits=limits) == "too big inline request"
    assert refusal(encode_command("12345678"), limits=Limits(argument=10, payload=7)) == "invalid bulk length"
    place = memoryview(bytearray(20))
    assert parse(encode_command("a", "x" * 20), lambda *_: place, limits) == [[b"a", b"x" * 20]]


def test_what_is_announced_costs_nothing_before_it_comes():
    def peak(data):
        tracemalloc.start()
        with suppress(ProtocolError):
            parse(data)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    spent = peak(b"PING\r\n")
    for data in (b"*1048576\r\n", b"*1\r\n$1048576\r\n", b"*2\r\n$1\r\nx\r\n$1048576\r\nabc"):
        assert peak(data) < spent + 4096
    assert peak(encode_command(bytes(500_000))[:250_000]) < 600_000


def test_a_kept_argument_in_pieces_takes_proportional_time():
    data = encode_command("SET", "k", bytes(1 << 20))
    began = time.process_time()
    parser = CommandReader(kept)
    found = [args for piece in cuts(memoryview(data), [4]) for args in give(parser, piece)]
    assert found == [[b"SET", b"k", bytes(1 << 20)]]
    assert time.process_time() - began < 10


# ---- beside a real redis-server


def answers(path, data):
    """All that redis says to `data` until it closes."""
    heard = b""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(path))
        with suppress(ConnectionError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while piece := client.recv(65536):
                heard += piece
    return heard


WRONG = [
    *(
        b"*\r\n",
        b"*x\r\n",
        b"*+1\r\n",
        b"*01\r\n",
        b"*1 \r\n",
        b"* 1\r\n",
        b"*-0\r\n",
        b"*-\r\n",
        b"*1_0\r\n",
    ),
    *(
        b"*2147483648\r\n",
        b"*9223372036854775808\r\n",
        b"*-9223372036854775809\r\n",
        b"*" + b"1" * 99 + b"\r\n",
    ),
    *(
        b"*1\n$4\r\nPING\r\n",
        b"*1\r\n\r\n",
        b"*1\r\n\n\r\n",
        b"*1\r\nfoo\r\n",
        b"*1\r\n:4\r\n",
        b"*1\r\n*1\r\n",
    ),
    *(b"*1\r\n\x80\r\n", b"*1\r\n\xc3\xa9\r\n", b"*1\r\n'\r\n", b"*2\r\n$4\r\nPING\r\nx\r\n"),
    *(
        b"*1\r\n$\r\n",
        b"*1\r\n$x\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$+4\r\n",
        b"*1\r\n$04\r\n",
        b"*1\r\n$4 \r\n",
    ),
    *(b"*1\r\n$536870913\r\n", b"*1\r\n$9223372036854775808\r\n", b"*2\r\n$4\r\nPING\r\n$1x\r\n"),
    *(b"*" + b"1" * 70000, b"*1\r\n$" + b"1" * 70000, b"*1\r\n" + b"x" * 70000, b"x" * 70000),
    *(b'PING "x\r\n', b"PING 'x\r\n", b'PING "x"y\r\n', b"PING 'x'y\r\n", b'PING "\\\r\n', b"PING '\\'\r\n"),
]


@pytest.mark.parametrize("data", WRONG, ids=lambda data: repr(data[:24]))
def test_errors_are_worded_as_redis_words_them(redis_server, data):
    ours = encode(Error(f"ERR Protocol error: {refusal(data)}"), resp3=False)
    assert ours == answers(redis_server, data)


def test_inline_commands_are_cut_as_redis_cuts_them(redis_server):
    rng = random.Random(7)
    pieces = [
        b'"',
        b"'",
        b"\\",
        b"\\x4",
        b"1",
        b"g",
        b" ",
        b"\t",
        b"\v",
        b"\f",
        b"\r",
        b"n",
        b"\xff",
        b'" ',
        b"' ",
    ]
    wrong = 0
    for _ in range(1500):
        line = b"EVAL 'return ARGV' 0 " + b"".join(rng.choices(pieces, k=rng.randrange(12))) + b"\r\n"
        try:
            ours = encode(parse(line)[0][3:], resp3=False)
        except ProtocolError as error:
            ours = encode(Error(f"ERR Protocol error: {error}"), resp3=False)
            wrong += 1
        assert ours == answers(redis_server, line), line
    assert 300 < wrong < 1200


@pytest.mark.parametrize(
    ("lua", "value"),
    [
        ("redis.status_reply('OK')", Simple("OK")),
        ("'text'", b"text"),
        ("42", 42),
        ("true", True),
        ("false", False),
        ("nil", None),
        ("{1, {'a'}, {}}", [1, [b"a"], []]),
        ("{double=3.5}", 3.5),
        ("{double=-1/0}", -math.inf),
        ("{double=10}", 10.0),
        ("{double=1e100}", 1e100),
        ("{big_number='123456789012345678901234567890'}", 123456789012345678901234567890),
        ("{map={a=1}}", {b"a": 1}),
        ("{set={a=true}}", {b"a"}),
        ("{verbatim_string={format='txt', string='hi'}}", Verbatim("hi")),
    ],
)
@pytest.mark.parametrize("version", [2, 3])
def test_replies_are_written_as_redis_writes_them(redis_server, lua, value, version):
    script = f"redis.setresp(3); return {lua}"
    heard = answers(redis_server, encode_command("HELLO", version) + encode_command("EVAL", script, 0))
    ours = encode(value, resp3=version == 3)
    assert heard.endswith(ours)
    (greeting,) = replies(ReplyReader(), heard.removesuffix(ours))
    assert isinstance(greeting, dict if version == 3 else list)


# ---- anything at all

LENGTHS = (
    *(b"0", b"1", b"-1", b"-2", b"2", b"3", b"7", b"16", b"1000", b"1024", b"65536", b"1048576", b"1048577"),
    *(
        b"536870912",
        b"536870913",
        b"2147483647",
        b"4294967296",
        b"9223372036854775807",
        b"9223372036854775808",
    ),
    *(b"-9223372036854775808", b"99999999999999999999999", b"", b"+1", b"01", b" 1", b"1 ", b"0x1", b"1_0"),
    *(b"1e3", b"\xd9\xa1", b"nan", b"\0"),
)
COMMANDS = [
    encode_command(*args)
    for args in (
        *(["PING"], ["GET", b"k" * 32], ["SET", "key", b"v" * 100], ["MSET", "a", b"\r\n", "b", b"$3\r\n"]),
        *(["EXISTS", *map(str, range(20))], ["SET", "k", b"p" * 2000, "EX", 10], ["", "", ""]),
    )
] + [b"PING\r\n", b"SET k \"quoted \\x41\" 'and so'\r\n", b"*0\r\n", b"\r\n"]
REPLIES = [
    encode(value, resp3)
    for resp3 in (False, True)
    for value in (
        *(
            Simple("OK"),
            Error("ERR x"),
            7,
            -(1 << 40),
            1 << 70,
            b"bulk\r\n",
            b"x" * 1500,
            None,
            NullArray,
            1.5,
        ),
        *(True, [1, [b"a", [None, {b"k": {1, 2}}]]], {b"a": 1, b"b": [2.5, Verbatim("t")]}, Push([b"m", 1])),
        *(set(range(5)), list(range(50)), [b"k" * 32] * 20, nested(30)),
    )
]


def mutated(rng, frames):
    """Some frames, most of them damaged: a number replaced, bytes cut, doubled, overwritten or strewn in."""
    data = bytearray(b"".join(rng.choices(frames, k=rng.randrange(1, 4))))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 | 1:
                marks = [here for here, byte in enumerate(data) if byte in b"*$:,(%~>!="]
                if marks:
                    at = rng.choice(marks) + 1
                    end = data.find(b"\r\n", at)
                    data[at : max(end, at)] = rng.choice(LENGTHS)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + rng.randrange(1, 9)]
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 60)]
            case 5:
                data[at : at + 3] = rng.randbytes(rng.randrange(1, 4))
            case 6:
                data[at:at] = rng.choice(
                    (b"\r", b"\n", b"\r\n", b"*", b"$", b"%", b"~", b"-", b'"', b"'", b"\0")
                )
    return bytes(data)


def told(take, pieces):
    """All that a parser makes of `pieces`, the error included; nothing else is ever raised."""
    heard: list[str] = []
    try:
        for piece in pieces:
            heard.extend(repr(each) for each in take(piece))
    except ProtocolError as error:
        heard.append(f"Protocol error: {error}")
    return heard


def servers(rng):
    """Two parsers with the same idea of what is a payload."""
    shortest = rng.choice((0, 1, 33, 1000, 1 << 40))

    def place(args, argc, length):
        if length < shortest:
            return None
        if length > 1 << 16:
            raise ProtocolError("no room")
        return memoryview(bytearray(length))

    return [partial(commands_in, CommandReader(place)) for _ in range(2)]


def clients(rng):
    return [partial(replies_in, ReplyReader()) for _ in range(2)]


@pytest.mark.parametrize(("frames", "parsers"), [(COMMANDS, servers), (REPLIES, clients)])
def test_cuts_change_nothing_about_what_is_understood(frames, parsers):
    rng = random.Random(2026)
    refused = 0
    for _ in range(50_000):
        data = mutated(rng, frames)
        whole, pieces = parsers(rng)
        heard = told(whole, [data])
        refused += bool(heard) and heard[-1].startswith("Protocol error")
        assert told(pieces, cuts(data, [rng.choice((1, 2, 5, 50)) * 10, 7, 300])) == heard, data
    assert 15_000 < refused < 45_000


@pytest.mark.parametrize(("frames", "parsers"), [(COMMANDS, servers), (REPLIES, clients)])
def test_whatever_arrives_memory_stays_flat(frames, parsers):
    rng = random.Random(62)
    told(parsers(rng)[0], [frames[0]])
    tracemalloc.start()
    for _ in range(3000):
        told(parsers(rng)[0], [mutated(rng, frames)])
    left, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20, "no number that was only announced took memory"
    assert left < 64 << 10


# ---- what a client with memory of its own needs


def test_a_command_in_pieces_copies_nothing():
    payload = memoryview(bytearray(b"payload" * 10_000))
    found = encode_command_parts("SET", b"key", (b"head", payload), "PX", 5, bytearray(b"x"))
    assert b"".join(found) == encode_command("SET", b"key", b"head" + payload, "PX", "5", b"x")
    assert any(each is payload for each in found)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_expected_replies_equal_single_replies(data):
    values = data.draw(st.lists(st.sampled_from([b"", b"x" * 40, b"y" * 5000, 7, None, [1, [b"a"]], []])))
    values.append(b"last")
    wire = b"".join(encode(value, resp3=False) for value in values) + b":1\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    parser = ReplyReader()
    parser.expect(len(values))
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        parser.feed(wire[start:end])
        while (reply := parser.next()) is not INCOMPLETE:
            found.append(reply)
    assert found == [values, 1]


@pytest.mark.parametrize("here", [0, 1, 4, 5, 9, 15, 17])
def test_the_bytes_of_a_string_go_where_their_owner_wants(here):
    wire = b"$10\r\n0123456789\r\n"
    parser = ReplyReader()
    assert parser.string() is INCOMPLETE
    parser.feed(wire[:here])
    length = parser.string()
    if here < 5:
        assert length is INCOMPLETE
        parser.feed(wire[here:5])
        length = parser.string()
    assert length == 10
    view = memoryview(bytearray(12))
    taken = parser.take(view[:4])
    taken += parser.take(view[taken:])
    assert bytes(view[:taken]) == wire[5 : max(5, here)]
    assert not parser.has_more
    parser.feed(b"+OK\r\n")  # the rest of the string went past the parser
    assert parser.next() == "OK"


def test_a_string_may_be_missing_refused_or_something_else():
    parser = ReplyReader()
    parser.feed(b"$-1\r\n-WRONGTYPE no\r\n")
    assert parser.string() is None
    error = parser.string()
    assert isinstance(error, Error)
    assert error.code == "WRONGTYPE"
    for wrong in (b"+OK\r\n", b":1\r\n", b"*1\r\n", b"$-2\r\n", b"$x\r\n", b"\r\n", b"=5\r\ntxt:x\r\n"):
        parser = ReplyReader()
        parser.feed(wrong)
        with pytest.raises(ProtocolError):
            parser.string()
