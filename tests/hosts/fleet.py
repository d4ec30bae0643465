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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any

from tests.mooncake_process import MooncakeServers
from tests.redis_process import RedisCluster, RedisServer
from tests.s3_process import BUCKET, KEY, SECRET, SeaweedFS
from tests.server.process import until

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
BRIDGE = "lmtier0"
BACK = 10.0
"""Seconds in which hits must be back after a link or a store is."""
THINKING = 0.05
"""Seconds between two prompts under load."""
REFRESHED = 0.6
"""Seconds after which an S3 tier fetches its list anew, and has it."""


def shell(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True)


class Host:
    """A namespace with one link to the bridge."""

    def __init__(self, number: int, folder: Path) -> None:
        self.address = f"{NETWORK}.{number}"
        self.folder = folder
        folder.mkdir(parents=True)
        self._link = f"link{number}"
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.inside = ["nsenter", "--target", str(self._holder.pid), "--net"]
        here = Path("/proc/self/ns/net").readlink()
        until(lambda: Path(f"/proc/{self._holder.pid}/ns/net").readlink() != here)
        shell(
            "ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._holder.pid
        )
        shell("ip", "link", "set", self._link, "master", BRIDGE, "up")
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            shell(*self.inside, "ip", *words)

    def cut(self) -> None:
        shell("ip", "link", "set", self._link, "down")

    def heal(self) -> None:
        shell("ip", "link", "set", self._link, "up")

    def slow_down(self, rate: str) -> None:
        """No more than so many bits a second, both ways."""
        limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
        shell("tc", "qdisc", "replace", "dev", self._link, *limit)
        shell(*self.inside, "tc", "qdisc", "replace", "dev", "eth0", *limit)

    def close(self) -> None:
        shell("ip", "link", "delete", self._link)  # it would go with the namespace, but later
        self._holder.kill()
        self._holder.wait()


class Machine:
    """A host with a server and an engine."""

    def __init__(self, host: Host, tier: str) -> None:
        self.host = host
        socket = host.folder / "sock"
        command = [
            *host.inside,
            sys.executable,
            "-m",
            "lmtier",
            "serve",
            "--unix",
            str(socket),
            "--listen",
            "",
        ]
        command += ["--http", "", "--tier", "cpu://?capacity=64MiB", "--tier", tier]
        with (host.folder / "log").open("wb") as log:
            self._server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            until(socket.exists)
            self._engine = subprocess.Popen(
                [*host.inside, sys.executable, "-m", "tests.hosts.engine", str(socket)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._engine.stdout is not None
        assert self._engine.stdout.readline() == "ready\n", (host.folder / "log").read_text()[-4000:]

    def flush(self) -> None:
        """Wait until what it computed is stored, or given up."""
        self.ask("flush")

    def ask(self, prompt: int | str) -> dict[str, Any]:
        assert self._engine.stdin is not None
        assert self._engine.stdout is not None
        self._engine.stdin.write(f"{prompt}\n")
        self._engine.stdin.flush()
        line = self._engine.stdout.readline()
        assert line, (self.host.folder / "log").read_text()[-4000:]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """As a host dies: at once, and its link with it."""
        self.host.cut()
        for process in (self._engine, self._server):
            process.kill()
        self._engine.communicate()
        self._server.wait()


class Asked:
    """The answers to a row of prompts."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers = answers

    @property
    def hits(self) -> int:
        return sum(bool(each["loaded"]) for each in self.answers)

    def row(self, store: str, what: str, **more: object) -> dict[str, object]:
        seconds = sorted(each["seconds"] for each in self.answers)
        tenths = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else seconds * 19
        wrong = sum(each["wrong"] for each in self.answers)
        assert not wrong, self.answers
        times = {"p50_ms": round(1e3 * tenths[9], 1), "p95_ms": round(1e3 * tenths[18], 1)}
        asked = {"asked": len(self.answers), "hits": self.hits, "wrong": wrong}
        return {"store": store, "what": what, **asked, **times, **more}


def story(store: str, folder: Path, prompts: int) -> Iterator[dict[str, object]]:
    """Three hosts over one store, and what happens to them."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(_host(number, folder / str(number))) for number in (1, 2, 3, 9)]
        server, tier = STORES[store](hosts[3])
        stack.callback(server.kill)
        numbers = count(1)
        a, b, c = machines = [Machine(host, tier) for host in hosts[:3]]
        for machine in machines:
            stack.callback(machine.kill)

        def asked(machine: Machine, what: list[int]) -> Asked:
            return Asked([machine.ask(prompt) for prompt in what])

        def new(machine: Machine) -> tuple[list[int], Asked]:
            what = [next(numbers) for _ in range(prompts)]
            return what, asked(machine, what)

        def settle(writer: Machine, reader: Machine) -> None:
            """Wait until what was computed is stored, and have the list of an S3 tier fetched again."""
            writer.flush()
            time.sleep(REFRESHED)
            reader.ask(next(numbers))
            time.sleep(REFRESHED)

        def shared(writer: Machine, reader: Machine) -> tuple[Asked, float]:
            """What one host computes is a hit on another, all of it, and after how many seconds."""
            began = time.monotonic()
            while True:
                what, _ = new(writer)
                settle(writer, reader)
                seen, took = asked(reader, what), time.monotonic() - began
                if seen.hits == prompts:
                    return seen, round(took, 1)
                assert took < BACK, f"{seen.hits} of {prompts} hits {took:.1f} s later"

        yield new(a)[1].row(store, "computed on a")
        seen, _ = shared(a, b)
        yield seen.row(store, "a to b")

        what, _ = new(a)
        settle(a, c)
        a.kill()
        seen = asked(c, what)
        assert seen.hits == prompts
        yield seen.row(store, "a has died: what it stored, on c")

        c.host.cut()
        yield new(c)[1].row(store, "c is cut off: new prompts on c")
        c.host.heal()
        seen, back = shared(b, c)
        yield seen.row(store, "c is back: b to c", back_s=back)

        server.kill()
        yield new(b)[1].row(store, "the store is killed: new prompts on b")
        server.start()
        seen, back = shared(b, c)
        yield seen.row(store, "the store is back: b to c", back_s=back)

        with working(b, numbers) as answers:
            until(lambda: len(answers) > 2)
            server.kill()
            server.start()
            begun = len(answers)
            until(lambda: len(answers) > begun + 2)
        yield Asked(answers).row(store, "the store is restarted under load: new prompts on b")
        seen, back = shared(b, c)
        yield seen.row(store, "after that: b to c", back_s=back)

        for machine in (b, c):
            machine.host.slow_down("100mbit")
        seen, _ = shared(b, c)
        yield seen.row(store, "links of 100 Mbit/s: b to c")


@contextmanager
def working(machine: Machine, numbers: Iterator[int]) -> Iterator[list[dict[str, Any]]]:
    """It computes new prompts meanwhile. The answers to them."""
    answers: list[dict[str, Any]] = []
    over = threading.Event()

    def work() -> None:
        while not over.wait(THINKING):
            answers.append(machine.ask(next(numbers)))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()


@contextmanager
def _host(number: int, folder: Path) -> Iterator[Host]:
    host = Host(number, folder)
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
    servers = MooncakeServers(host.folder, host=host.address, inside=host.inside)
    return servers, servers.url()


STORES: dict[str, Callable[[Host], tuple[Any, str]]] = {
    "redis": _redis,
    "redis-cluster": _redis_cluster,
    "s3": _s3,
    "mooncake": _mooncake,
}


def main() -> None:
    options = argparse.ArgumentParser(description="Hosts that share a store, and lose it.")
    options.add_argument("folder", type=Path)
    options.add_argument("--store", action="append", choices=[*STORES], default=[])
    options.add_argument("--prompts", type=int, default=20)
    given = options.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    shell("ip", "link", "set", "lo", "up")
    shell("ip", "link", "add", BRIDGE, "type", "bridge")
    shell("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
    shell("ip", "link", "set", BRIDGE, "up")
    for store in given.store or STORES:
        for row in story(store, given.folder / store, given.prompts):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
