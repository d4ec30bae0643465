"""Clients that others wrote work against the server as they are."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from glide_sync import (
    Batch,
    ExpirySet,
    ExpiryType,
    GlideClient,
    GlideClientConfiguration,
    NodeAddress,
    ProtocolVersion,
    RequestError,
)
from redis._parsers import _HiredisParser, _RESP2Parser, _RESP3Parser
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.server.process import MIB, Served, served

PARSERS = {
    "RESP2, in Python": (2, _RESP2Parser),
    "RESP3, in Python": (3, _RESP3Parser),
    "RESP2, hiredis": (2, _HiredisParser),
    "RESP3, hiredis": (3, _HiredisParser),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    with served(folder, "cpu://?capacity=160MiB", unix=str(folder / "socket")) as server:
        yield server


@pytest.fixture(params=PARSERS)
def client(server: Served, request: pytest.FixtureRequest) -> Iterator[Any]:
    protocol, parser = PARSERS[request.param]
    host, port = server.address
    pool = redis.ConnectionPool(host=host, port=port, protocol=protocol, parser_class=parser)
    with redis.Redis(connection_pool=pool) as client:
        client.flushall()
        yield client
    pool.disconnect()


def test_redis_py_does_what_it_does_elsewhere(client: Any):
    assert client.ping() is True
    assert client.set("a", b"\x00\xff\r\n") is True
    assert client.get("a") == b"\x00\xff\r\n"
    assert client.get("missing") is None
    assert client.set("a", "no", nx=True) is None
    assert client.set("a", "new", get=True) == b"\x00\xff\r\n"
    assert client.exists("a", "missing", "a") == 2
    assert client.mset({"b": 1, "c": "", "d e": "ä"}) is True
    assert client.mget("a", "missing", "c", "d e") == [b"new", None, b"", "ä".encode()]
    assert client.getrange("a", 1, -1) == b"ew"
    assert client.strlen("a") == 3
    assert client.expire("a", 100) is True
    assert client.ttl("a") == 100
    assert 99_000 < client.pttl("a") <= 100_000
    assert client.persist("a") is True
    assert client.ttl("a") == -1
    assert client.set("e", "v", ex=100) is True
    assert client.set("f", "v", px=100_000, keepttl=False) is True
    assert client.getdel("e") == b"v"
    assert client.set("f", "w", get=True, keepttl=True) == b"v"
    assert client.ttl("f") == 100
    assert client.type("a") == b"string"
    assert client.dbsize() == 5
    assert sorted(client.scan_iter(count=2)) == sorted(client.keys("*")) == [b"a", b"b", b"c", b"d e", b"f"]
    assert list(client.scan_iter(match="d*")) == [b"d e"]
    assert client.delete("a", "b", "missing") == 2
    assert client.unlink("c") == 1
    assert client.flushall() is True
    assert client.dbsize() == 0
    assert client.echo("x") == b"x"
    assert abs(client.time()[0] - time.time()) < 5
    with pytest.raises(redis.ResponseError, match="unknown command 'LPUSH'"):
        client.lpush("l", 1)
    with pytest.raises(redis.ResponseError, match="invalid expire"):
        client.set("a", 1, ex=-1)
    assert client.ping() is True


def test_redis_py_learns_who_the_server_is(server: Served, client: Any):
    info = client.info()
    assert info["redis_version"].startswith("7.")
    assert info["maxmemory"] == 160 * MIB
    assert client.info("clients").keys() == {"connected_clients", "blocked_clients", "maxclients"}
    client.set("a", 1)
    assert client.info("keyspace")["db0"]["keys"] == 1
    assert client.config_get("maxmemory*")["maxmemory-policy"] == "allkeys-lru"
    assert client.client_id() in {int(each["id"]) for each in client.client_list()}
    assert client.client_setname("me") is True
    assert client.client_getname() in ("me", b"me")
    assert client.command_count() > 40
    commands = client.command()
    assert {"get", "set", "lmtier.call"} <= commands.keys()
    assert commands["mset"]["step_count"] == 2


def test_a_transaction_of_redis_py(client: Any):
    with client.pipeline() as pipeline:
        assert pipeline.set("a", 1).set("b", b"x" * MIB, ex=1000).get("a").get("b").delete("a").execute() == [
            *(True, True, b"1", b"x" * MIB, 1)
        ]
        pipeline.set("a", 2).execute_command("NOSUCH")
        with pytest.raises(redis.ResponseError, match="unknown command"):
            pipeline.execute()
        assert client.get("a") is None, "nothing of it was run"
        pipeline.set("a", 2).expire("a", "soon").get("a")
        with pytest.raises(redis.ResponseError, match="not an integer"):
            pipeline.execute()
        assert client.get("a") == b"2", "as in redis, what was not refused was run"


def test_many_values_are_set_at_once_as_django_does(client: Any):
    values = {f"django:{i}": b"%d" % i for i in range(2000)}
    pipeline = client.pipeline()
    for name, value in values.items():
        pipeline.set(name, value, px=100_000)
    assert pipeline.execute() == [True] * 2000
    assert client.mget(values) == list(values.values())


def test_two_who_count_with_watch_lose_nothing(client: Any):
    """Each reads, adds one and writes, and does it again if somebody else was faster."""
    client.set("count", 0)

    def count() -> None:
        for _ in range(50):
            client.transaction(
                lambda p: (n := int(p.get("count")), p.multi(), p.set("count", n + 1)), "count"
            )

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert client.get("count") == b"200"


def test_a_pipeline_of_redis_py(client: Any):
    names = [f"name {i}" for i in range(500)]
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.set(name, name * 100, ex=1000)
        for name in names:
            pipeline.get(name)
        pipeline.execute_command("NOSUCH")
        pipeline.delete(*names)
        answers = pipeline.execute(raise_on_error=False)
    assert answers[:500] == [True] * 500
    assert answers[500:1000] == [(name * 100).encode() for name in names]
    assert isinstance(answers[1000], redis.ResponseError)
    assert answers[1001] == 500


def test_values_of_32_mib_come_back_equal(client: Any):
    value = hashlib.shake_128(b"32").digest(MIB) * 32
    for size in (32 * MIB, 32 * MIB - 1, 32 * MIB + 1):
        expected = (value + b"x")[:size]
        assert client.set("large", expected) is True
        assert client.get("large") == expected
    assert client.strlen("large") == 32 * MIB + 1
    assert client.getrange("large", 32 * MIB - 1, -1) == value[-1:] + b"x"
    assert client.delete("large") == 1


def test_redis_py_over_the_unix_socket_and_with_the_token(server: Served, tmp_path: Any):
    with redis.Redis(unix_socket_path=server.where["unix"]) as client:
        assert client.set("a", 1)
        assert client.get("a") == b"1"
    with served(tmp_path, token="secret") as closed:
        host, port = closed.address
        for protocol in (2, 3):

            def client(**given: Any) -> Any:
                return redis.Redis(host, port, protocol=protocol, retry=Retry(NoBackoff(), 0), **given)  # noqa: B023

            for user in (None, "default"):
                with client(password="secret", username=user) as known:
                    assert known.ping()
            with (
                client(password="wrong") as unknown,
                pytest.raises(redis.AuthenticationError, match="invalid"),
            ):
                unknown.ping()
            with client() as unknown, pytest.raises(redis.AuthenticationError):
                unknown.get("a")


def test_the_keys_and_values_of_a_kv_cache_connector(client: Any):
    """What LMCache's Redis connector sends: metadata and KV bytes of each chunk, asked for by EXISTS."""
    key = "meta-llama/Llama-3.1-8B@1@0@%064x@bfloat16"
    metadata = (7 * 4).to_bytes(4, "little") * 7
    for chunk in range(8):
        name = key % chunk
        assert client.exists(name + "metadata") == 0
        assert client.set(name + "kv_bytes", bytes([chunk]) * 2 * MIB)
        assert client.set(name + "metadata", metadata)
    for chunk in range(8):
        name = key % chunk
        assert bool(client.exists(name + "metadata"))
        assert client.get(name + "metadata") == metadata
        assert client.get(name + "kv_bytes") == bytes([chunk]) * 2 * MIB
    assert client.get(key % 8 + "metadata") is None
    assert len(list(client.scan_iter(match="meta-llama*kv_bytes"))) == 8


@pytest.mark.parametrize("protocol", [ProtocolVersion.RESP2, ProtocolVersion.RESP3])
def test_valkey_glide(server: Served, protocol: ProtocolVersion):
    host, port = server.address
    client = GlideClient.create(
        GlideClientConfiguration([NodeAddress(host, port)], protocol=protocol, request_timeout=20_000)
    )
    try:
        client.flushall()
        large = hashlib.shake_128(b"glide").digest(MIB) * 32
        assert client.set("a", large) == "OK"
        assert client.get("a") == large
        assert client.set("b", "2", expiry=ExpirySet(ExpiryType.SEC, 100)) == "OK"
        assert client.ttl("b") == 100
        assert client.mget(["b", "missing"]) == [b"2", None]
        batch = Batch(is_atomic=False)
        for i in range(100):
            batch.set(f"k{i}", f"v{i}").get(f"k{i}")
        answers = client.exec(batch, raise_on_error=True)
        assert answers == [part for i in range(100) for part in ("OK", b"v%d" % i)]
        cursor: Any = b"0"
        names = 0
        while True:
            cursor, some = client.scan(cursor, match="k*", count=30)
            names += len(some)
            if cursor == b"0":
                break
        assert names == 100
        assert client.delete(["a", "b"]) == 2
        assert client.dbsize() == 100
        with pytest.raises(RequestError, match="unknown command"):
            client.lpush("l", ["1"])
        assert client.ping() == b"PONG"
    finally:
        client.close()


def program(name: str, server: Served, *args: str | int, given: bytes = b"") -> str:
    found = shutil.which(name)
    assert found, f"this test needs {name}: apt-get install redis-tools"
    host, port = server.address
    command = [found, "-h", host, "-p", str(port), *map(str, args)]
    done = subprocess.run(command, capture_output=True, timeout=60, input=given, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


PIPELINED = ("-t", "ping,set,get", "-q", "-n", 20_000, "-P", 16, "-d", 1000, "-r", 1000)
MANY = ("-t", "set,get,mset", "-q", "-n", 2000, "-c", 20, "-d", 20_000, "-3")


def test_redis_benchmark_sees_no_error(server: Served):
    said = program("redis-benchmark", server, *PIPELINED)
    assert said.count("requests per second") == 4, said
    assert "rror" not in said, said
    said = program("redis-benchmark", server, *MANY)
    assert said.count("requests per second") == 3, said
    assert "rror" not in said, said


def test_redis_cli(server: Served):
    assert program("redis-cli", server, "FLUSHALL") == "OK\n"
    assert program("redis-cli", server, given=b"SET a 1\nSET b 'two words'\nMGET a b c\n") == (
        "OK\nOK\n1\ntwo words\n\n"
    )
    assert program("redis-cli", server, "-3", "GET", "a") == "1\n"
    assert program("redis-cli", server, "-x", "SET", "c", given=b"from a file") == "OK\n"
    assert sorted(program("redis-cli", server, "--scan").split()) == ["a", "b", "c"]
    assert sorted(program("redis-cli", server, "--scan", "--pattern", "[bc]*").split()) == ["b", "c"]
    assert "redis_version:7" in program("redis-cli", server, "INFO")
    assert "unknown command" in program("redis-cli", server, "LPUSH", "a", "b")
    said = program("redis-cli", server, "--pipe", given=b"SET piped 1\r\nSET piped 2\r\nGET piped\r\n")
    assert "errors: 0, replies: 3" in said, said
    assert "wrong number of arguments" in program("redis-cli", server, "GET")


def test_a_name_with_blanks_is_one_field_of_the_list(server: Served):
    with server.connect() as engine:
        engine.granted("LMTIER.HELLO", 1, "NAME", "vllm worker id=0")
        number = engine.ask("CLIENT", "ID")
        fields = dict(field.split("=", 1) for field in engine.ask("CLIENT", "INFO").decode().split())
        assert (fields["name"], fields["id"]) == ("vllm_worker_id=0", str(number))


def test_what_operators_and_exporters_ask(server: Served):
    with server.connect() as wire, server.connect() as other:
        other.expect("OK", "CLIENT", "SETNAME", "other")
        wire.expect("OK", "SET", "name", b"x" * 5000)
        info = dict(line.split(":", 1) for line in wire.ask("INFO").decode().splitlines() if ":" in line)
        assert int(info["blocked_clients"]) == 0
        assert int(info["instantaneous_ops_per_sec"]) >= 0
        assert int(info["used_memory_rss"]) > 1 << 20
        lines = {
            line["name"]: line
            for text in wire.ask("CLIENT", "LIST").decode().splitlines()
            if (line := dict(field.split("=", 1) for field in text.split(" ")))
        }
        assert int(lines["other"]["age"]) >= int(lines["other"]["idle"]) >= 0
        assert f"id={lines['other']['id']} " not in wire.ask("CLIENT", "INFO").decode()
        assert wire.ask("MEMORY", "USAGE", "name") == 8192
        assert wire.ask("MEMORY", "USAGE", "nothing") is None
        assert wire.ask("MEMORY", "DOCTOR", "x").startswith("ERR MEMORY knows USAGE")
        docs = wire.ask("COMMAND", "DOCS", "get", "nosuch")
        assert docs[0] == b"get"
        assert len(docs) == 2
        assert wire.ask("CLIENT", "KILL", "1.2.3.4:5") == "ERR No such client"
        assert wire.ask("CLIENT", "KILL", "TYPE", "normal").startswith("ERR CLIENT KILL knows ID, ADDR")
        assert wire.ask("CLIENT", "KILL", "ID", lines["other"]["id"]) == 1
        assert other.ends()
        wire.expect("PONG", "PING")
        assert wire.ask("LPUSH", "a", "b") == (
            "ERR unknown command 'LPUSH': this is lmtier, a cache of KV and of large values, not redis; "
            "COMMAND LIST lists its commands"
        )
