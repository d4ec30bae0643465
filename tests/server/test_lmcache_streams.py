"""LMCache 0.5.6 against this server: its command streams, recorded byte for byte, and the exact replies.

Recorded from the wheel, through a proxy: `redis://` (redis-py 8.1, RESP3), `valkey://` (valkey-glide-sync
2.6, RESP3) and the RESP L2 adapter of the MP server (LMCache's own C++ client, RESP2, which compares replies
as bytes). Nothing of LMCache is installed here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.server.process import served

KV = bytes(range(256)) * 4
FORM = bytes.fromhex("00040000010000000200000001000000020000001000000010000000")
"""LMCache's metadata: 1024 bytes, a format, a dtype and a shape."""
ONE = b"meta-llama/Llama-3.1-8B-Instruct@1@0@00a1b2c3d4e5f607@bfloat16"
TWO = b"meta-llama/Llama-3.1-8B-Instruct@1@0@00a1b2c3d4e5f608@bfloat16"
OK, YES, NO = b"+OK\r\n", b":1\r\n", b":0\r\n"


def sent(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(bulk, words))


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


HELLO = (
    sent(b"HELLO", b"3"),
    b"%7\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n7.0.15\r\n$5\r\nproto\r\n:3\r\n$2\r\nid\r\n"
    b":N\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$7\r\nmodules\r\n*0\r\n",
)
REDIS = [
    HELLO,
    (
        sent(b"CLIENT", b"MAINT_NOTIFICATIONS", b"ON", b"moving-endpoint-type", b"internal-ip"),
        b"-ERR unknown subcommand 'MAINT_NOTIFICATIONS'. Try CLIENT HELP.\r\n",
    ),
    (sent(b"CLIENT", b"SETINFO", b"LIB-NAME", b"redis-py"), OK),
    (sent(b"CLIENT", b"SETINFO", b"LIB-VER", b"8.1.0"), OK),
    (sent(b"EXISTS", ONE + b"metadata"), NO),
    (sent(b"SET", ONE + b"kv_bytes", KV), OK),
    (sent(b"SET", ONE + b"metadata", FORM), OK),
    (sent(b"EXISTS", ONE + b"metadata"), YES),
    (sent(b"GET", ONE + b"metadata"), bulk(FORM)),
    (sent(b"GET", ONE + b"kv_bytes"), bulk(KV)),
    (sent(b"GET", TWO + b"metadata"), b"_\r\n"),
    (sent(b"DEL", ONE + b"metadata"), YES),
]
VALKEY = [
    HELLO,
    (
        sent(b"CLIENT", b"SETINFO", b"LIB-NAME", b"GlidePySync(lmcache:0.5.6)")
        + sent(b"CLIENT", b"SETINFO", b"LIB-VER", b"0.0.0"),
        OK + OK,
    ),
    (sent(b"INFO", b"REPLICATION"), b"=52\r\ntxt:# Replication\r\nrole:master\r\nconnected_slaves:0\r\n\r\n"),
    (sent(b"EXISTS", ONE), NO),
    (sent(b"SET", ONE, KV), OK),
    (sent(b"EXISTS", ONE), YES),
    (sent(b"GET", ONE), bulk(KV)),
    (sent(b"SET", ONE, KV, b"EX", b"60"), OK),
    (sent(b"GET", TWO), b"_\r\n"),
]
RESP_L2 = [
    (sent(b"EXISTS", ONE), NO),
    (sent(b"EXISTS", TWO), NO),
    (sent(b"SET", ONE, KV), OK),
    (sent(b"SET", TWO, KV), OK),
    (sent(b"EXISTS", ONE), YES),
    (sent(b"EXISTS", TWO), YES),
    (sent(b"GET", ONE), bulk(KV)),
    (sent(b"GET", TWO), bulk(KV)),
    (sent(b"DEL", ONE), YES),
    (sent(b"DEL", TWO), YES),
    (sent(b"DEL", TWO), NO),
]


@pytest.mark.parametrize("stream", [REDIS, VALKEY, RESP_L2], ids=["redis", "valkey", "resp-l2"])
def test_what_lmcache_sends_gets_the_bytes_that_it_expects(
    tmp_path: Path, stream: list[tuple[bytes, bytes]]
) -> None:
    with served(tmp_path) as server, server.connect() as wire:
        for request, wanted in stream:
            wire.send(request)
            got = b""
            while len(got) < len(wanted):
                data = wire.socket.recv(1 << 20)
                assert data, (request[:80], got)
                got += data
            if request == HELLO[0]:  # the number of the connection
                got = re.sub(rb"(\$2\r\nid\r\n):\d+", rb"\1:N", got)
            assert got == wanted, request[:80]
