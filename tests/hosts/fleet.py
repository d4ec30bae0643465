"""Hosts on one machine: network namespaces on one bridge, an lmtier server and an engine in each.

`make test-hosts` runs it, as root in namespaces of its own. Links can be cut and slowed down to a rate. It
prints a row of JSON for each store and each thing that happens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from secrets import token_hex
from statistics import quantiles
from typing import Any, TypeAlias

from tests.hosts.engines import VLLM, HostsEngine, Real, Small
from tests.hosts.network import ROOT, Host, make_bridge, shell
from tests.mooncake_process import MooncakeServers
from tests.redis_process import RedisCluster, RedisServer
from tests.s3_process import BUCKET, KEY, SECRET, SeaweedFS
from tests.server.process import until

Row: TypeAlias = "dict[str, object]"
Start: TypeAlias = "Callable[[Host, Path], HostsEngine]"
PORT = 6380
STORE = 9
"""The number of the store's host."""
BACK = 10.0
"""Seconds in which hits must be back after a link or a store is."""
THINKING = 0.05
"""Seconds between two prompts under load."""
REFRESHED = 0.6
"""Seconds after which an S3 tier fetches its list anew, and has it."""
FAR: dict[str, dict[str, float]] = {
    "1 ms away": {"delay": 0.001},
    "50 ms away": {"delay": 0.05},
    "1 of 100 frames lost": {"loss": 0.01},
}
"""What happens to each frame, both ways."""
TOO_SLOW: dict[str, Callable[[Host], None]] = {
    "a link of 5 Mbit/s": lambda host: host.slow_down("5mbit"),
    "50 ms away": lambda host: host.spoil(delay=0.05),
}


class Machine:
    """A host with a server, and an engine that works with it."""

    def __init__(self, host: Host, tiers: Sequence[str], start: Start, worth: str = "auto") -> None:
        self.host = host
        self.name = f"{host.address}:{PORT}"
        socket = host.folder / "sock"
        command = [*host.inside, sys.executable, "-m", "lmtier", "serve", "--unix", str(socket), "--http", ""]
        command += ["--listen", self.name, "--set", f"worth={worth}"]
        for tier in ("cpu://?capacity=256MiB", *tiers):
            command += ["--tier", tier]
        with (host.folder / "log").open("wb") as log:
            self._server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        until(socket.exists)
        self.engine = start(host, socket)

    def kill(self) -> None:
        """As a host dies: at once, and its link with it."""
        self.host.cut()
        self.engine.kill()
        self._server.kill()
        self._server.wait()


@dataclass
class Given:
    store: str
    folder: Path
    prompts: int
    engine: Start


class Asked:
    """The answers to a row of prompts."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers = answers

    @property
    def hits(self) -> int:
        return sum(bool(each["loaded"]) for each in self.answers)

    def times(self) -> Row:
        seconds = sorted(each["seconds"] for each in self.answers)
        tenths = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else seconds * 19
        return {"p50_ms": round(1e3 * tenths[9], 1), "p95_ms": round(1e3 * tenths[18], 1)}

    def row(self, store: str, what: str, **more: object) -> Row:
        wrong = sum(each["wrong"] for each in self.answers)
        assert not wrong, self.answers
        asked = {"asked": len(self.answers), "hits": self.hits, "wrong": wrong}
        return {"store": store, "what": what, **asked, **self.times(), **more}


class Fleet:
    """Three hosts over one store."""

    def __init__(self, stack: ExitStack, given: Given, *, far: bool = False, worth: str = "auto") -> None:
        self.store, self._prompts = given.store, given.prompts
        *hosts, last = [
            stack.enter_context(_host(number, given.folder / str(number), far and number < STORE))
            for number in (1, 2, 3, STORE)
        ]
        self.server, tier = STORES[self.store](last)
        stack.callback(self.server.kill)
        self.numbers = count(1)
        self.machines = []
        for host in hosts:
            self.machines.append(Machine(host, [tier], given.engine, worth))
            stack.callback(self.machines[-1].kill)

    def asked(self, machine: Machine, what: list[int]) -> Asked:
        return Asked([machine.engine.ask(prompt) for prompt in what])

    def new(self, machine: Machine) -> tuple[list[int], Asked]:
        what = [next(self.numbers) for _ in range(self._prompts)]
        return what, self.asked(machine, what)

    def settle(self, writer: Machine, reader: Machine) -> None:
        """Wait until what was computed is stored, and have the list of an S3 tier fetched again."""
        writer.engine.flush()
        time.sleep(REFRESHED)
        reader.engine.ask(next(self.numbers))
        time.sleep(REFRESHED)

    def shared(self, writer: Machine, reader: Machine) -> tuple[Asked, float]:
        """What one host computes is a hit on another, all of it, and after how many seconds."""
        began = time.monotonic()
        while True:
            what, _ = self.new(writer)
            self.settle(writer, reader)
            seen, took = self.asked(reader, what), time.monotonic() - began
            if seen.hits == self._prompts:
                return seen, round(took, 1)
            assert took < BACK, f"{seen.hits} of {self._prompts} hits {took:.1f} s later"


def failing(given: Given) -> Iterator[Row]:
    """A host, a link and the store fail."""
    with ExitStack() as stack:
        fleet = Fleet(stack, given, worth="always")
        a, b, c = fleet.machines
        store, server = fleet.store, fleet.server
        yield fleet.new(a)[1].row(store, "computed on a")
        seen, _ = fleet.shared(a, b)
        yield seen.row(store, "a to b")

        what, _ = fleet.new(a)
        fleet.settle(a, c)
        a.kill()
        seen = fleet.asked(c, what)
        assert seen.hits == len(what)
        yield seen.row(store, "a has died: what it stored, on c")

        c.host.cut()
        yield fleet.new(c)[1].row(store, "c is cut off: new prompts on c")
        c.host.heal()
        seen, back = fleet.shared(b, c)
        yield seen.row(store, "c is back: b to c", back_s=back)

        server.kill()
        yield fleet.new(b)[1].row(store, "the store is killed: new prompts on b")
        server.start()
        seen, back = fleet.shared(b, c)
        yield seen.row(store, "the store is back: b to c", back_s=back)

        with working(b, fleet.numbers) as answers:
            until(lambda: len(answers) > 2)
            server.kill()
            server.start()
            begun = len(answers)
            until(lambda: len(answers) > begun + 2)
        yield Asked(answers).row(store, "the store is restarted under load: new prompts on b")
        seen, back = fleet.shared(b, c)
        yield seen.row(store, "after that: b to c", back_s=back)

        for machine in (b, c):
            machine.host.slow_down("100mbit")
        seen, _ = fleet.shared(b, c)
        yield seen.row(store, "links of 100 Mbit/s: b to c")


def far(given: Given) -> Iterator[Row]:
    """All hosts are far from the store, or their links lose frames."""
    with ExitStack() as stack:
        fleet = Fleet(stack, given, far=True, worth="always")
        _, b, c = fleet.machines
        for what, spoilt in FAR.items():
            for machine in (b, c):
                machine.host.spoil(**spoilt)
            prompts, _ = fleet.new(b)
            fleet.settle(b, c)
            yield fleet.asked(c, prompts).row(fleet.store, f"{what}: b to c")


def too_slow(given: Given) -> Iterator[Row]:
    """Loading takes longer than computing: every other prompt is asked without a cache, for comparison."""
    with ExitStack() as stack:
        fleet = Fleet(stack, given, far=True)
        _, b, c = fleet.machines
        assert isinstance(c.engine, Real)
        fleet.new(c)  # it learns what computing costs
        for what, spoil in TOO_SLOW.items():
            c.host.spoil()
            c.host.slow_down("10gbit")
            prompts, _ = fleet.new(b)
            more, _ = fleet.new(b)
            fleet.settle(b, c)
            spoil(c.host)
            pairs = zip(prompts, more, strict=True)
            both = [(c.engine.ask(one), c.engine.ask(other, with_cache=False)) for one, other in pairs]
            ours, bare = (Asked([pair[which] for pair in both]) for which in (0, 1))
            yield ours.row(fleet.store, f"{what}: b to c", without_cache=bare.times())


@contextmanager
def working(machine: Machine, numbers: Iterator[int]) -> Iterator[list[dict[str, Any]]]:
    """It computes new prompts meanwhile. The answers to them."""
    answers: list[dict[str, Any]] = []
    over = threading.Event()

    def work() -> None:
        while not over.wait(THINKING):
            answers.append(machine.engine.ask(next(numbers)))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()


@contextmanager
def _host(number: int, folder: Path, far: bool = False) -> Iterator[Host]:
    host = Host(number, folder, far=far)
    try:
        yield host
    finally:
        host.close()


def _redis(host: Host) -> tuple[RedisServer, str]:
    server = RedisServer(host.folder, host=host.address, inside=host.inside)
    return server, f"redis://{host.address}:{server.port}/0?ttl=1h"


def _s3(host: Host) -> tuple[SeaweedFS, str]:
    server = SeaweedFS(host.folder, host=host.address, inside=host.inside)
    return server, f"s3://{BUCKET}/kv?endpoint={server.url}&refresh=500ms"


def _redis_cluster(host: Host) -> tuple[RedisCluster, str]:
    servers = RedisCluster(host.folder, host=host.address, inside=host.inside)
    return servers, f"redis-cluster://{host.address}:{servers.nodes[0].port}?ttl=1h"


def _mooncake(host: Host) -> tuple[MooncakeServers, str]:
    servers = MooncakeServers(host.folder, host=host.address, inside=host.inside, room=1 << 30)
    return servers, servers.url()


STORES: dict[str, Callable[[Host], tuple[Any, str]]] = {
    "redis": _redis,
    "redis-cluster": _redis_cluster,
    "s3": _s3,
    "mooncake": _mooncake,
}


def sources(given: Given) -> Iterator[Row]:
    """No store: requests name the host whose memory has the prompt."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(_host(number, given.folder / str(number))) for number in (1, 2, 3)]
        machines = []
        for host in hosts:
            others = [f"lmtier://{each.address}:{PORT}?deadline=1s" for each in hosts if each is not host]
            machines.append(Machine(host, others, given.engine, "always"))
            stack.callback(machines[-1].kill)
        a, b, c = machines
        numbers = count(1)

        def row(what: str, reader: Machine, source: str = "", **more: object) -> Row:
            prompts = [next(numbers) for _ in range(given.prompts)]
            for each in prompts:
                a.engine.ask(each)
            return Asked([reader.engine.ask(each, source=source) for each in prompts]).row("", what, **more)

        yield row("b names a", b, a.name)
        yield row("c names no host", c)
        a.host.cut()
        yield row("a is cut off, and c names it", c, a.name)
        a.host.heal()
        began = time.monotonic()
        while (seen := row("a is back, and c names it", c, a.name))["hits"] != given.prompts:
            assert time.monotonic() - began < BACK, seen
        yield {**seen, "back_s": round(time.monotonic() - began, 1)}


STORIES: dict[str, Callable[[Given], Iterator[Row]]] = {
    "failing": failing,
    "far": far,
    "too-slow": too_slow,
    "sources": sources,
}


def main() -> None:
    options = argparse.ArgumentParser(description="Hosts that share a store, and lose it.")
    options.add_argument("folder", type=Path)
    options.add_argument("--store", action="append", choices=[*STORES], default=[])
    options.add_argument("--story", action="append", choices=[*STORIES], default=[])
    options.add_argument("--prompts", type=int, default=20)
    options.add_argument("--vllm", action="store_true", help="the engines are real ones (make engines)")
    given = options.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "LMTIER_TOKEN": token_hex()}
    make_bridge()
    start: Start = Small
    if given.vllm:
        models = given.folder / "models"
        shell(VLLM, ROOT / "tests/vllm/models.py", models)
        start = partial(Real, model=models / "qwen2")
    for story in given.story or ["failing", "far", "sources"]:
        for store in [""] if story == "sources" else given.store or STORES:
            folder = given.folder / story / store
            for row in STORIES[story](Given(store, folder, given.prompts, start)):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
