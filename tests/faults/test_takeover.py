"""One server takes over from another while engines work: no byte is wrong, no chunk lost, no connection."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lmtier
from lmtier.client.client import Client
from lmtier.config import Config
from lmtier.errors import ConfigError, TierError
from lmtier.format.handover_file import VERSION
from lmtier.format.layout import Layout, form_of
from lmtier.server.takeover import TakeoverReceiver
from lmtier.wire.resp import Error, encode_command
from tests.redis_process import free_port
from tests.server.other_user import USER, needs_root
from tests.server.process import PATIENCE, Wire, secret, served, speak, until

DEATHS = ("asked", "got", "damaged", "entered")
"""Where the next server ends before it has taken over."""

_SERVER = """
import json, os, signal, sys, time
from pathlib import Path
from lmtier.config import Config, ServerConfig
from lmtier.server import serve, takeover
config, serving, path, death = json.loads(sys.argv[1])
config = Config(**config)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if death == "damaged":
    unpack = takeover.unpack
    def damaged(data):
        some = bytearray(data)
        some[len(some) // 2] ^= 1
        return unpack(some)
    takeover.unpack = damaged
if death == "asked":
    takeover.TakeoverReceiver._receive = lambda self: die()
if death == "got":
    takeover.TakeoverReceiver(Path(path), config)
    die()
server = serve.Server(config, ServerConfig(**serving), Path(path) if path else None)
if death == "entered":
    die()
if death == "late":
    time.sleep(takeover._PATIENCE + 1)
server.obey_signals()
print("ready", flush=True)
server.run()
"""

_ENGINE = """
import hashlib, json, random, sys, time
from lmtier.client.client import Client
from lmtier.format.layout import Layout, form_of
path, seed = sys.argv[1:]
layout = Layout.uniform(
    layers=2, heads=2, head_dim=16, dtype="fp16", block_tokens=16, chunk_tokens=16, packing="token")
form, size = form_of(layout, (layout.whole,)), layout.nbytes(layout.whole)
client, chance = Client(path, timeout=30), random.Random(seed)
stored, filling, reading = set(), [], []
rounds = compared = missing = 0
worst = 0.0

def keys(prompt):
    return [hashlib.sha256(b"%s %d %d" % (seed.encode(), prompt, n)).digest() for n in range(5)]

def content(key):
    return key * (size // 32)

def end_save():
    prompt, saving = filling.pop(0)
    for key, offsets in saving.places:
        client.slab.view(offsets[0] + size // 2, size // 2)[:] = content(key)[size // 2 :]
    client.commit(saving)
    stored.add(prompt)

def end_load():
    global compared, missing
    prompt, match = reading.pop(0)
    missing += 5 - len(match.grant.chunks)
    for key, offsets in match.grant.places:
        assert client.slab.view(offsets[0], size) == content(key), "wrong bytes"
        compared += 1
    client.release(match)

print("ready", flush=True)
while True:
    began = time.monotonic()
    prompt = chance.randrange(200)
    if prompt in stored:
        reading.append((prompt, client.match(keys(prompt), form)))
        if len(reading) > 4:
            end_load()
    elif all(prompt != each for each, _ in filling):
        saving = client.reserve(keys(prompt), form)
        for key, offsets in saving.places:
            client.slab.view(offsets[0], size // 2)[:] = content(key)[: size // 2]
        filling.append((prompt, saving))
        if len(filling) > 4:
            end_save()
    elif filling:
        end_save()
    if chance.random() < 0.02 and stored:
        client.delete(keys(gone := chance.choice(sorted(stored))))
        stored.discard(gone)
        reading = [each for each in reading if each[0] != gone or client.release(each[1])]
    worst = max(worst, time.monotonic() - began)
    rounds += 1
    if not rounds % 50:
        print(json.dumps([rounds, compared, missing, client.lost, client.unserved, worst]), flush=True)
        worst = 0.0
    time.sleep(0.0005)
"""


class Process:
    """A child that prints lines."""

    def __init__(self, source: str, log: Path, *arguments: str, code: str = "") -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", source, *arguments],
                stdout=subprocess.PIPE,
                cwd=code or None,  # Python looks there first
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([code, *sys.path] if code else sys.path)},
            )

        self.said: list[str] = []
        self._hearing = threading.Thread(target=self._hear)
        self._hearing.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said.append(line.decode().strip())

    def is_ready(self) -> bool:
        """Waits until it says so, or ends."""
        until(lambda: self.said or not self._hearing.is_alive())
        return self.said[:1] == ["ready"]

    def goes_on(self) -> None:
        """Waits until it has said two lines more: the second one was begun after this call."""
        count = len(self.said)
        until(lambda: len(self.said) > count + 1 or not self._hearing.is_alive())
        assert len(self.said) > count + 1, f"it ended: {self.log.read_text()}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self._hearing.join()


class Host:
    """A server, and whoever takes over from it."""

    def __init__(self, folder: Path, capacity: str = "64MiB", **serving: Any) -> None:
        self.unix = str(folder / "socket")
        self.log = folder / "log"
        self.config: dict[str, Any] = {
            "tiers": [f"cpu://?capacity={capacity}", f"disk://{folder}/kv?capacity=256MiB"],
            "chunk_tokens": 16,
            "prefault": False,
        }
        self._settings = (
            self.config,
            {"listen": "127.0.0.1:0", "http": "", "unix": self.unix, **serving},
        )
        self.server = self.begin("", "")
        assert self.server.is_ready(), self.log.read_text()
        until(self._knows_its_disk)  # before, it refuses takeovers, and Redis clients get LOADING

    def _knows_its_disk(self) -> bool:
        with Wire(self.unix) as wire:
            return not speak(wire.socket, "/api/stats")[1]["why_not_ready"]

    def begin(self, path: str, death: str, code: str = "") -> Process:
        return Process(_SERVER, self.log, json.dumps([*self._settings, path, death]), code=code)

    def take_over(self, code: str = "") -> None:
        following = self.begin(self.unix, "", code)
        assert following.is_ready(), self.log.read_text()
        assert self.server.process.wait(PATIENCE) == 0, "the one before ends by itself"
        self.server.end()
        self.server = following

    def fail_to_take_over(self, death: str) -> None:
        following = self.begin(self.unix, death)
        assert not following.is_ready()
        assert following.process.wait(PATIENCE) in (1, -signal.SIGKILL)
        following.end()
        assert self.server.process.poll() is None, self.log.read_text()

    def set(self, **serving: Any) -> None:
        """Settings of the servers that take over from now on."""
        self._settings[1].update(serving)


@contextmanager
def host(folder: Path, capacity: str = "64MiB", **serving: Any) -> Iterator[Host]:
    made = Host(folder, capacity, **serving)
    try:
        yield made
    finally:
        made.server.end()


def busy(folder: Path, times: int, each_dies: int) -> None:
    with host(folder) as running:
        engines = [Process(_ENGINE, running.log, running.unix, f"engine {n}") for n in range(2)]
        try:
            assert all(each.is_ready() for each in engines)
            gaps: list[float] = []
            for number in range(times):
                for each in engines:
                    each.goes_on()
                before = [len(each.said) for each in engines]
                if number % each_dies == each_dies - 1:
                    running.fail_to_take_over(DEATHS[number // each_dies % len(DEATHS)])
                else:
                    running.take_over()
                for each, count in zip(engines, before, strict=True):
                    each.goes_on()
                    told = [json.loads(line) for line in each.said[count:]]
                    assert told[-1][2:5] == [0, 0, 0], f"missing, lost or unserved: {running.log.read_text()}"
                    gaps.append(max(line[5] for line in told))
            for each in engines:
                rounds, compared, *_ = json.loads(each.said[-1])
                assert compared > rounds
            print(f"{times} takeovers: p50 {sorted(gaps)[len(gaps) // 2] * 1000:.0f} ms", end=", ")
            print(f"longest {max(gaps) * 1000:.0f} ms in which an engine waited")
            assert max(gaps) < 5.0
        finally:
            for each in engines:
                each.end()
        with Client(running.unix) as client:
            until(lambda: client.flush(1.0))
            client.check()


def test_engines_survive_takeovers_also_those_that_fail(tmp_path: Path) -> None:
    busy(tmp_path, times=6, each_dies=3)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_fifty_takeovers_under_load(tmp_path: Path) -> None:
    busy(tmp_path, times=50, each_dies=5)


@pytest.mark.slow
def test_a_server_that_is_ready_too_late_does_not_serve(tmp_path: Path) -> None:
    with host(tmp_path) as running, Client(running.unix, timeout=30) as client:
        late = running.begin(running.unix, "late")
        assert late.is_ready()
        assert late.process.wait(PATIENCE) == 1
        late.end()
        assert "did not wait any longer" in running.log.read_text()
        client.check()
        assert client.lost == 0
        running.take_over()
        client.check()
        assert client.lost == 0


def test_a_takeover_never_gives_memory_away_twice(tmp_path: Path) -> None:
    """Two engines need more than the memory, so each takeover has chunks that leave, and extents in use."""
    with host(tmp_path, "1MiB") as running:
        engines = [Process(_ENGINE, running.log, running.unix, f"engine {n}") for n in range(2)]
        try:
            assert all(each.is_ready() for each in engines)
            with Wire(running.unix) as idle, Wire(running.unix) as half:
                for number in range(3):
                    for each in engines:
                        each.goes_on()
                    idle.expect("OK", "SET", "name", b"%d" % number * 5000, "EX", 1000)
                    half.send(encode_command("LMTIER.HELLO", "1")[:-3])  # the rest comes after the takeover
                    idle.send(encode_command("PING")[:4])
                    if number == 1:
                        running.fail_to_take_over("entered")
                    else:
                        running.take_over()
                    idle.send(encode_command("PING")[4:])
                    assert idle.reply() == "PONG"
                    idle.expect(b"%d" % number * 5000, "GET", "name")
                    half.send(encode_command("LMTIER.HELLO", "1")[-3:])
                    assert (half.reply()[0] == b"version") == (not number), "it has said HELLO once"
                for each in engines:
                    each.goes_on()
                    _, compared, _, lost, unserved, _ = json.loads(each.said[-1])
                    assert compared > 0
                    assert (lost, unserved) == (0, 0)
        finally:
            for each in engines:
                each.end()
        with Client(running.unix) as client:
            client.check()


def test_from_a_server_that_stops_nobody_takes_over(tmp_path: Path) -> None:
    """It has closed the connections of engines that may still copy, so it does not know what they use."""
    with host(tmp_path) as running, Wire(running.unix) as half:
        request = encode_command("LMTIER.TAKEOVER", VERSION, 16, "", 1)
        half.send(encode_command("PING") + request[:-3])  # it waits for the rest
        assert half.reply() == "PONG"
        running.server.process.send_signal(signal.SIGTERM)
        until(lambda: not Path(running.unix).exists())
        half.send(request[-3:])
        assert half.reply() == Error("ERR it stops")
        assert running.server.process.wait(PATIENCE) == 0
        assert "did not take over: it stops" in running.log.read_text()


def test_an_engine_of_two_processes_stays_one_session(tmp_path: Path) -> None:
    layout = Layout.uniform(
        layers=2, heads=2, head_dim=16, dtype="fp16", block_tokens=16, chunk_tokens=16, packing="token"
    )
    first, second = (layout.shard(rank=rank, ranks=2) for rank in range(2))
    keys, form, engine = [bytes(range(32))], form_of(layout, (first, second)), secret("engine")
    with (
        host(tmp_path) as running,
        Client(running.unix, engine=engine, shard=first) as one,
        Client(running.unix, engine=engine, shard=second) as other,
    ):
        saving = one.reserve(keys, form)
        one.commit(saving, first)
        running.take_over()
        with pytest.raises(TierError, match=f"is connected and saves shard {second}"):
            Client(running.unix, engine=engine, shard=second)
        assert other.adopt(saving, second)
        other.commit(saving, second)
        match = one.match(keys, form)
        assert len(match.grant.chunks) == 1
        assert next(match.grant.places) == next(saving.places)
        one.release(match)
        assert (one.lost, other.lost) == (0, 0)


def test_another_version_takes_over_and_this_one_again(tmp_path: Path) -> None:
    shutil.copytree(Path(lmtier.__file__).parent, tmp_path / "next" / "lmtier")
    (tmp_path / "next/lmtier/_version.py").write_text('__version__ = "99.0"\n')
    with host(tmp_path) as running:
        engine = Process(_ENGINE, running.log, running.unix, "engine")
        try:
            assert engine.is_ready()
            for code, version in ((str(tmp_path / "next"), b"99.0"), ("", lmtier.__version__.encode())):
                engine.goes_on()
                running.take_over(code)
                with Wire(running.unix) as wire:
                    assert wire.ask("LMTIER.HELLO", "1")[1] == version
                engine.goes_on()
                assert json.loads(engine.said[-1])[2:5] == [0, 0, 0]
        finally:
            engine.end()


def test_the_report_goes_on_where_the_other_server_ended(tmp_path: Path) -> None:
    """Else the counters of a long life would be those of the seconds since the takeover."""
    with host(tmp_path) as running:
        engine = Process(_ENGINE, running.log, running.unix, "engine")
        try:
            assert engine.is_ready()
            engine.goes_on()
        finally:
            engine.end()

        def told() -> tuple[dict[str, Any], dict[float, float]]:
            """The counters, and when how many tokens were asked."""
            with Wire(running.unix) as wire:
                report, view = (
                    json.loads(wire.ask("LMTIER.CALL", f"/api/{each}")) for each in ("stats", "view")
                )
            return report["counted"], {round(each["time"]): each["asked"] for each in view["columns"]}

        with Client(running.unix) as client:
            until(lambda: client.flush(1.0))
        until(lambda: told()[0]["seconds"] > 5)
        before, columns = told()
        running.take_over()
        after, more = told()
    assert before["seconds"] < after["seconds"] < before["seconds"] + 60
    for name in ("asked", "hit", "missed", "stored", "lookups", "loads", "lookup_seconds", "up", "down"):
        assert after[name] == before[name], name
    assert after["lookup_seconds"] > 0
    assert after["down"]["disk"] > 0
    asked = {time: tokens for time, tokens in columns.items() if tokens}
    assert asked == pytest.approx({time: more.get(time) for time in asked})


@needs_root
def test_a_takeover_serves_only_those_its_settings_allow(
    tmp_path: Path,
) -> None:
    address = "127.0.0.1", free_port()
    with (
        host(tmp_path, listen=f"{address[0]}:{address[1]}", insecure=True) as running,
        Wire(address) as own,
    ):
        os.seteuid(USER)
        try:
            other = Wire(address)
        finally:
            os.seteuid(0)
        with other:
            other.expect("OK", "SET", "name", "value")
            own.expect(b"value", "GET", "name")
            running.set(insecure=False)
            running.take_over()
            answer = other.ask("GET", "name")
            assert isinstance(answer, Error)
            assert answer.startswith(f"FOREIGN you are user {USER}")
            assert other.ask("FLUSHALL").startswith("FOREIGN")
            own.expect(b"value", "GET", "name")
            running.set(insecure=True)
            running.take_over()
            other.expect(b"value", "GET", "name")


def test_only_the_servers_user_takes_over_by_unix_socket(tmp_path: Path) -> None:
    with served(tmp_path, unix=str(tmp_path / "socket")) as server:
        answer = server.ask("LMTIER.TAKEOVER", VERSION, 256, "", 1)
        assert answer == "NOPERM only the user of this server can take over, on its Unix socket"
        with Wire(str(tmp_path / "socket")) as wire:
            assert f"files of version {VERSION}" in wire.ask("LMTIER.TAKEOVER", VERSION + 1, 256, "", 1)


def test_unfit_settings_are_refused_before_the_takeover(tmp_path: Path) -> None:
    with served(tmp_path, unix=str(tmp_path / "socket")):
        for wrong, why in (
            (Config(chunk_tokens=32, tiers=["cpu://?capacity=64MiB"]), "chunk_tokens=256"),
            (Config(tiers=["cpu://?capacity=65MiB"]), "memory cannot grow"),
        ):
            with pytest.raises(ConfigError, match=why):
                TakeoverReceiver(tmp_path / "socket", wrong)
    with pytest.raises(ConfigError, match="cannot take over from"):
        TakeoverReceiver(tmp_path / "nobody", Config())
