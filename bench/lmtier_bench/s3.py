"""The S3 tier beside a bare HTTP client with as many connections, and beside boto3: all of one SeaweedFS.

The bare client signs nothing, checks nothing and keeps nothing: it sends the head of a request and memory,
and receives into memory. The server takes requests without a signature too, so both move the same bytes.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from lmtier.config import TierSpec
from lmtier.copy.copy_threads import CopyThreads
from lmtier.errors import ConfigError
from lmtier.format.layout import PAGE, Name
from lmtier.format.objects import Header
from lmtier.testing import opaque_layout, pages, run
from lmtier.tiers.base import Item, Job, Op, Tier
from lmtier.tiers.registry import open_tier
from lmtier_bench import Samples, Scale
from lmtier_bench.copies import faulted_memory, large_layout, paired, seconds
from lmtier_bench.redis import BATCH, Objects
from lmtier_bench.server import LOOKUP_CHUNKS, NAMES, PATIENCE, REPEATS, free_port, installed

BUCKET = "lmtier-bench"
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret"}


def store_and_load(scale: Scale) -> Samples:
    if (program := installed("weed")) is None:
        return
    layout = large_layout(scale.large_layers)
    nbytes = layout.nbytes(layout.whole)
    total = BATCH * nbytes
    memory = faulted_memory(scale.memory).data
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, KEYS))
        port = stack.enter_context(_seaweed(program, scale.directory))
        objects = Objects(stack.enter_context(closing(_tier(port))), memory, layout)
        bare = stack.enter_context(closing(Bare(port, memory, nbytes)))
        baselines: list[tuple[str, Any]] = [("32 MiB objects", bare)]
        if (client := _boto3(port)) is not None:
            baselines.append(("against boto3", stack.enter_context(closing(Boto3(client, memory, nbytes)))))
        for what, baseline in baselines:
            for number in range(-1, scale.disk_rounds):
                sample = paired(f"store to s3, {what}", total, number, objects.store, baseline.put)
                if number >= 0:  # before that, the server makes its volumes
                    yield sample
            for _ in range(NAMES // BATCH):
                objects.store()
                baseline.put()
            for number in range(scale.rounds):
                yield paired(f"load from s3, {what}", total, number, objects.load, baseline.get)


def lookups(scale: Scale) -> Samples:
    if (program := installed("weed")) is None:
        return
    shard = opaque_layout(PAGE).whole
    names = [
        Name(bytes(4) + hashlib.sha256(b"%d" % number).digest()[4:], shard) for number in range(LOOKUP_CHUNKS)
    ]
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, KEYS))
        port = stack.enter_context(_seaweed(program, scale.directory))
        items = tuple(Item(name, pages(PAGE), Header(name, opaque_layout(PAGE), PAGE)) for name in names)
        with closing(_tier(port)) as writer:
            assert len(run(writer, Job(1, Op.STORE, items), PATIENCE).ok) == LOOKUP_CHUNKS
        tier = stack.enter_context(closing(_tier(port)))
        bare = stack.enter_context(closing(Bare(port, pages(PAGE), PAGE)))
        question = Job(1, Op.LOOKUP, tuple(map(Item, names)))

        def find() -> None:
            assert len(run(tier, question, PATIENCE).ok) == LOOKUP_CHUNKS

        find()  # it waits for the list
        bare.put()
        for _ in range(scale.rounds):
            ours = median(seconds(find) for _ in range(REPEATS))
            bound = median(seconds(partial(bare.head, 0)) for _ in range(REPEATS))
            yield "look up 512 keys in s3, against one HEAD", ours * 1e3, bound * 1e3


class Bare:
    """As many connections as the tier has. Each takes its share of a batch."""

    def __init__(self, port: str, memory: memoryview, nbytes: int) -> None:
        self._views = cycle([memory[at : at + nbytes] for at in range(0, len(memory) - nbytes + 1, nbytes)])
        self._nbytes = nbytes
        self._crew = CopyThreads(BATCH - 1)
        self._wires = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(BATCH)]
        for wire in self._wires:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._put, self._got = count(), count()

    def put(self) -> float:
        return self._all([partial(self._put_one, next(self._put), next(self._views)) for _ in range(BATCH)])

    def get(self) -> float:
        return self._all([partial(self._get_one, next(self._got), next(self._views)) for _ in range(BATCH)])

    def _all(self, work: list[Callable[[socket.socket], None]]) -> float:
        jobs = [partial(call, wire) for call, wire in zip(work, self._wires, strict=True)]
        return seconds(lambda: self._crew.run(jobs))

    def _put_one(self, number: int, view: memoryview, wire: socket.socket) -> None:
        wire.sendall(self._request("PUT", number, f"Content-Length: {self._nbytes}\r\n"))
        wire.sendall(view)
        assert self._head(wire)[0].startswith(b"HTTP/1.1 200")

    def _get_one(self, number: int, view: memoryview, wire: socket.socket) -> None:
        wire.sendall(self._request("GET", number))
        head, body = self._head(wire)
        assert head.startswith(b"HTTP/1.1 200"), head
        view[: len(body)] = body
        at = len(body)
        while at < len(view):
            at += wire.recv_into(view[at:], 0, socket.MSG_WAITALL)

    def head(self, number: int) -> None:
        self._wires[0].sendall(self._request("HEAD", number))
        assert self._head(self._wires[0])[0].startswith(b"HTTP/1.1 200")

    @staticmethod
    def _request(method: str, number: int, more: str = "") -> bytes:
        path = f"/{BUCKET}/bare/{number % NAMES}"
        return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}\r\n".encode()

    @staticmethod
    def _head(wire: socket.socket) -> tuple[bytes, bytes]:
        got = b""
        while b"\r\n\r\n" not in got:
            more = wire.recv(1 << 16)
            assert more, got
            got += more
        head, _, body = got.partition(b"\r\n\r\n")
        return head, body

    def close(self) -> None:
        self._crew.close()
        for wire in self._wires:
            wire.close()


class Boto3:
    """Objects as Amazon's client moves them, one thread for each: `bytes` in, a stream out."""

    def __init__(self, client: Any, memory: memoryview, nbytes: int) -> None:
        self._client = client
        self._crew = CopyThreads(BATCH - 1)
        self._values = cycle(
            [bytes(memory[at : at + nbytes]) for at in range(0, min(len(memory), 8 * nbytes), nbytes)]
        )
        self._put, self._got = count(), count()

    def put(self) -> float:
        return self._all([partial(self._put_one, next(self._put), next(self._values)) for _ in range(BATCH)])

    def get(self) -> float:
        return self._all([partial(self._get_one, next(self._got)) for _ in range(BATCH)])

    def _all(self, work: list[Callable[[], None]]) -> float:
        return seconds(lambda: self._crew.run(work))

    def _put_one(self, number: int, value: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"boto3/{number % NAMES}", Body=value)

    def _get_one(self, number: int) -> None:
        reply = self._client.get_object(Bucket=BUCKET, Key=f"boto3/{number % NAMES}")
        assert len(reply["Body"].read()) == reply["ContentLength"]

    def close(self) -> None:
        self._crew.close()
        self._client.close()


def _tier(port: str) -> Tier:
    url = f"s3://{BUCKET}?endpoint=http://127.0.0.1:{port}&deadline=1m&connections={BATCH}"
    return open_tier(TierSpec.parse(url))


def _boto3(port: str) -> Any:
    """A client, None where boto3 is not installed."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        return None
    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        config=Config(max_pool_connections=BATCH, s3={"addressing_style": "path"}),
    )


@contextmanager
def _seaweed(program: str, directory: Path) -> Iterator[str]:
    """The port of a server with a bucket, which takes requests with our signature and with none."""
    folder = directory / f"weed-{free_port()}"
    folder.mkdir()
    actions = ["Admin", "Read", "Write", "List"]
    keys = [{"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}]
    identities = [
        {"name": "bench", "credentials": keys, "actions": actions},
        {"name": "anonymous", "actions": actions},
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    words = [program, "server", "-dir", str(folder), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1"]
    words += ["-s3", "-s3.config", str(folder / "s3.json"), "-s3.port", (port := free_port())]
    words += ["-s3.port.grpc", free_port(), "-s3.port.iceberg", "0", "-s3.port.lance", "0"]
    for part in ("master", "volume", "filer"):
        words += [f"-{part}.port", free_port(), f"-{part}.port.grpc", free_port()]
    words += ["-volume.max", "0", "-volume.preStopSeconds", "0", "-master.telemetry=false"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
    try:
        until = time.monotonic() + PATIENCE
        while not _has_bucket(int(port)):
            if server.poll() is not None or time.monotonic() > until:
                raise ConfigError(f"SeaweedFS did not start:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)  # another process starts, and sends no word
        yield port
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder)


def _has_bucket(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection, suppress(OSError):
        connection.request("PUT", f"/{BUCKET}")
        return connection.getresponse().status in (200, 409)
    return False
