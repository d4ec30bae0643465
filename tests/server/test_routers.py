"""Routers read a server's KV events with their own code, and find the host that has a prompt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from lmtier.client.client import Client
from lmtier.format.keys import Identity, KeyChain, seed
from lmtier.observe.prompts import Origin
from tests.client.test_client import ROOM, C, store
from tests.redis_process import free_port
from tests.server.process import PATIENCE, served, until

ROUTERS = Path(sys.prefix) / "routers"
CHUNKS = 6

pytestmark = pytest.mark.skipif(
    not (ROUTERS / "dynamo").is_dir(), reason="`make test` installs the routers, where a package has them"
)


class Host(NamedTuple):
    engine: Client
    events: str
    replay: str

    def compute(self, prompt: list[int]) -> None:
        """As an engine that sends its tokens."""
        keys = KeyChain(seed(Identity(model="m"), C), C).extend(prompt).keys
        self.engine.send_tokens(keys, prompt, Origin.of({"model": "m"}, "", ""))
        assert store(self.engine, list(keys)) == CHUNKS
        assert self.engine.flush(PATIENCE)  # or it may be evicted before the disk has it


@contextmanager
def host(folder: Path) -> Iterator[Host]:
    folder.mkdir()
    unix, places = str(folder / "socket"), [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    tiers = f"cpu://?capacity={20 * ROOM}", f"disk://{folder}/disk?capacity={1000 * ROOM}"
    serving = {"unix": unix, "kv_events": places[0], "kv_events_replay": places[1]}
    with served(folder, *tiers, config={"chunk_tokens": C}, **serving), Client(unix) as engine:
        yield Host(engine, *places)


@contextmanager
def router(folder: Path, program: str, *arguments: str) -> Iterator[Path]:
    """The log of a router that runs."""
    log = folder / "router.log"
    environment = {**os.environ, "PYTHONPATH": str(ROUTERS)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *program.split(), *arguments], env=environment, stdout=file, stderr=file
        )
    try:
        yield log
    finally:
        process.kill()
        process.wait()


def post(url: str, what: object) -> Any:
    """What it answers; None: nobody does."""
    asked = urllib.request.Request(url, json.dumps(what).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code < 500:  # otherwise it is not ready
            raise AssertionError(error.read()) from None
        return None
    except OSError:
        return None


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + CHUNKS * C))


def test_dynamo_scores_hosts_and_tiers_that_have_a_prompt(tmp_path: Path):
    with ExitStack() as stack:
        hosts = [stack.enter_context(host(tmp_path / name)) for name in ("a", "b")]
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(router(tmp_path, "-m dynamo.indexer", "--port", str(port)))
        # One prompt before the indexer knows of the host: it asks for what it has missed.
        hosts[0].compute(prompt(1))
        for number, each in enumerate(hosts):
            told = {"instance_id": number, "endpoint": each.events, "replay_endpoint": each.replay}
            told |= {"model_name": "m", "block_size": C}
            until(lambda told=told: post(f"{url}/register", told))  # type: ignore[misc]

        def found(number: int) -> dict[str, Any]:
            scores = post(f"{url}/query", {"model_name": "m", "token_ids": prompt(number)})["instances"]
            return {name: (each["cpu"], each["disk"]) for name, each in scores.items() if any(each.values())}

        whole = CHUNKS * C
        more = count(2)

        def is_right() -> bool:
            # What was published before it listened it asks for when it hears of something newer.
            last = [next(more) for _ in hosts]
            for number, each in zip(last, hosts, strict=True):
                each.compute(prompt(number))
            wanted = [{str(number): (whole, whole)} for number in range(len(hosts))]
            return [found(each) for each in last] == wanted and found(1) == {"0": (0, whole)}

        until(is_right)  # the first prompt from disk alone


class Worker(BaseHTTPRequestHandler):
    """An engine's HTTP, as far as a router needs it to hand a request over."""

    protocol_version = "HTTP/1.1"

    def _answer(self, what: object) -> None:
        data = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._answer({"model_path": "m"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "text": "", "finish_reason": "stop"}
        address = f"http://127.0.0.1:{cast('HTTPServer', self.server).server_port}"
        self._answer({"id": "1", "object": "text_completion", "model": address, "choices": [choice]})

    def log_message(self, *_: object) -> None: ...


@contextmanager
def worker() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Worker) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


_ROUTER = """
import json, sys
from vllm_router.router import Router
from vllm_router.router_args import RouterArgs
Router.from_args(RouterArgs(**json.loads(sys.argv[1]))).start()
"""


def test_vllms_router_picks_the_host_that_has_the_prompt(tmp_path: Path):
    with ExitStack() as stack:
        hosts = [stack.enter_context(host(tmp_path / name)) for name in ("a", "b")]
        workers = [stack.enter_context(worker()) for _ in hosts]
        port = free_port()
        arguments = {
            **{"host": "127.0.0.1", "port": port, "worker_urls": workers, "policy": "kv_aware"},
            **{"kv_event_block_size": C, "kv_event_model": "m"},
            "kv_event_source": [f"{w}={h.events}" for w, h in zip(workers, hosts, strict=True)],
            "kv_event_replay_source": [f"{w}={h.replay}" for w, h in zip(workers, hosts, strict=True)],
        }
        (tmp_path / "route.py").write_text(_ROUTER)
        stack.enter_context(router(tmp_path, str(tmp_path / "route.py"), json.dumps(arguments)))
        url = f"http://127.0.0.1:{port}/v1/completions"

        def goes_to(number: int) -> str:
            asked = {"model": "m", "max_tokens": 1, "prompt": [*prompt(number), 7]}
            return str((post(url, asked) or {}).get("model"))

        until(lambda: goes_to(1) in workers)
        for number in range(10, 20):
            hosts[number % 2].compute(prompt(number))
        more = count(20)

        def is_right() -> bool:
            # What was published before it listened it asks for when it hears of something newer.
            for each in hosts:
                each.compute(prompt(next(more)))
            return all(goes_to(number) == workers[number % 2] for number in range(10, 20))

        until(is_right)
