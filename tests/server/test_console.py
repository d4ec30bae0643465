"""The server as whoever runs it meets it: started, asked, and looked at in a terminal, by its commands."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lmtier
from lmtier.client.client import Client
from lmtier.config import ServerConfig
from lmtier.errors import ConfigError
from lmtier.format.keys import namespace
from lmtier.format.layout import form_of
from lmtier.observe.metrics import MISS_REASONS
from lmtier.server.report import Counters, History, Snapshot, _nothing
from lmtier.server.view import View, view_of
from lmtier.testing import opaque_layout
from lmtier.tools.cli import main
from lmtier.tools.commands import watching
from lmtier.tools.console import (
    Console,
    ServerAddress,
    Unreachable,
    address_from_settings,
    parse_address,
)
from lmtier.tools.terminal import Screen, bar, duration_text, printable, spark
from lmtier.tools.top import frame
from lmtier.tools.views import stats
from tests.certificates import certify
from tests.redis_process import RedisServer
from tests.server.process import PATIENCE, Wire, until
from tests.test_config import of_kubernetes

TOKEN = "a-long-random-word"
SMALL = ("--tier", "cpu://?capacity=4MiB", "--set", "prefault=false")
ANY = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
LAYOUT = opaque_layout(8192)
FORM = form_of(LAYOUT, [LAYOUT.whole])


def environment(**more: object) -> dict[str, str]:
    """Nobody's settings but these."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("LMTIER_")}
    return {
        **ours,
        "PYTHONPATH": os.pathsep.join(sys.path),
        **{name: str(each) for name, each in more.items()},
    }


def test_a_log_that_nobody_reads_stops_nobody():
    """A pipe takes 64 KiB; what comes after is dropped, and the server serves, and ends."""
    words = ["serve", "--listen", "127.0.0.1:0", "--set", "serve.http=", "--tier", "cpu://?capacity=1MiB"]
    words += ["--log-level", "debug"]  # which leaves out no repeats
    process = subprocess.Popen(
        [sys.executable, "-m", "lmtier", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    try:
        out: Any = process.stdout
        (port,) = next(found for line in out if (found := re.findall(r"127\.0\.0\.1:(\d+)", line)))
        address = "127.0.0.1", int(port)
        for _ in range(1500):  # each is told of in a line
            with Wire(address) as browser:
                browser.send(b"PING\r\nPOST / HTTP/1.1\r\n\r\n")
                assert browser.ends()
        with Wire(address) as wire:
            wire.expect("PONG", "PING")
        process.terminate()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()


class Serve:
    """`lmtier serve` in a process of its own; returns when it has said where it listens."""

    def __init__(self, log: Path, *argv: object, **env: object) -> None:
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "lmtier", "serve", *map(str, argv)],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(**env),
                text=True,
            )
        out: Any = self.process.stdout
        lines = []
        for line in out:
            lines.append(line)
            if line.startswith("Clients "):
                break
        self.screen = "".join(lines)
        if not self.screen:
            pytest.fail(f"it did not start: {self.log}")
        self.where: dict[str, str] = dict(
            re.findall(r"^(redis|http|unix|kv-\w+) +(\S+)", self.screen, re.MULTILINE)
        )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def redis(self) -> str:
        return self.where["redis"]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*argv: object, **env: object) -> Serve:
        started.append(Serve(tmp_path / f"log{len(started)}", *SMALL, *argv, **env))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """For all who only ask: 30 tokens of `m` were asked for, 10 hit; 10 of `n` are stored."""
    folder = tmp_path_factory.mktemp("shared")
    options = (
        "--set",
        "chunk_tokens=1",
        "--unix",
        folder / "socket",
        "--tier",
        f"disk://{folder}/kv?capacity=8MiB",
    )
    server = Serve(folder / "log", *SMALL, *ANY, *options)
    with Client(str(folder / "socket"), name="the-engine") as client:
        store(client, names("m", 10))
        store(client, names("n", 10))
        assert client.flush(PATIENCE)
        client.release(client.match(names("m", 30), FORM))
        yield server
    server.end()


def names(model: str, count: int) -> list[bytes]:
    return [namespace(model) + hashlib.sha256(f"{model}{i}".encode()).digest()[4:] for i in range(count)]


def store(client: Client, keys: list[bytes]) -> None:
    client.commit(client.reserve(keys, FORM))


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process; its exit code, stdout and stderr."""
    for name in [name for name in os.environ if name.startswith("LMTIER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(watching, "_EVERY", 0.01)

    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(each) for each in argv])
        return code, *capsys.readouterr()

    return run


# ---- serve


def test_serve_shows_its_tiers_and_addresses_on_one_screen(serve, tmp_path):
    disk = tmp_path / "kv"
    server = serve(*ANY, "--tier", f"disk://{disk}?capacity=1GiB&policy=lru", "--unix", tmp_path / "socket")
    assert len(server.screen.splitlines()) <= 24
    assert server.screen.startswith(
        f"lmtier {lmtier.__version__}, cache server, process {server.process.pid}\n"
    )
    cells = [re.split(r" {2,}", line) for line in server.screen.splitlines()]
    assert ["cpu", "-", "4 MiB", "always", "auto"] in cells
    assert ["disk", str(disk), "1 GiB", "always", "lru"] in cells
    assert server.where["unix"] == str(tmp_path / "socket")
    assert f"http://{server.where['http']}/metrics" in server.screen
    assert (
        "Clients of this user and of root need no token, and others are not served; TLS is off."
        in server.screen
    )
    assert "default tiers" not in server.screen
    assert server.stop() == 0
    assert "INFO lmtier: stopping" in server.log


def test_with_no_tier_given_serve_says_which_it_has(tmp_path):
    server = Serve(tmp_path / "log", *ANY, "--set", "prefault=false")
    server.end()
    assert re.search(r"^cpu +- +1 GiB ", server.screen, re.MULTILINE)
    assert "These are the default tiers" in server.screen


def test_flags_win_over_variables_and_those_over_the_file(serve, tmp_path):
    file = tmp_path / "lmtier.toml"
    file.write_text(
        f'[serve]\nunix = "{tmp_path}/file"\nlisten = "127.0.0.9:0"\nhttp = "127.0.0.9:0"\ngrace = 3\n'
    )
    server = serve("--config", file, "--unix", tmp_path / "flag", LMTIER_SERVE_HTTP="127.0.0.8:0")
    assert server.where["unix"] == str(tmp_path / "flag")
    assert server.where["http"].startswith("127.0.0.8:")
    assert server.where["redis"].startswith("127.0.0.9:")


def test_it_starts_beside_a_kubernetes_service_of_its_name(serve, run, monkeypatch):
    """A connector's private server gets these variables too: it is `lmtier serve` with the engine's."""
    env = of_kubernetes("LMTIER", {"REDIS": 6380, "HTTP": 9470})
    server = serve(*ANY, **env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert run("ping", "--server", server.redis)[0] == run("config")[0] == 0


def test_a_browser_that_connects_ahead_is_no_warning(serve):
    """A server without a free place is one."""
    server = serve(*ANY, "--log-format", "json", "--set", "serve.patience=0.2", "--set", "serve.clients=3")
    with Wire(address_in(server.where["http"])) as browser:
        assert browser.ends(), "its connection is needed for others"
    with Wire(address_in(server.redis)) as one, Wire(address_in(server.redis)) as two:
        one.expect("PONG", "PING")
        two.expect("PONG", "PING")
        for _ in range(30):
            with Wire(address_in(server.redis)) as third:
                assert third.ends()
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    warnings = [line["message"] for line in lines if line["level"] == "warning"]
    assert all("was refused, because 2 clients are connected" in line for line in warnings)
    assert 1 <= len(warnings) <= 10, "and not one a client"


def address_in(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def test_where_routers_listen_is_said(serve, tmp_path):
    places = (
        "--kv-events",
        f"ipc://{tmp_path}/events",
        "--set",
        f"serve.kv_events_replay=ipc://{tmp_path}/replay",
    )
    server = serve(*ANY, *places)
    assert server.where["kv-events"] == f"ipc://{tmp_path}/events"
    assert re.search(
        r"^kv-replay +ipc://.*/replay +routers: to get missed events again", server.screen, re.MULTILINE
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_server_ends_in_time_without_its_socket(serve, tmp_path, number):
    """Its exit code is 0."""
    server = serve("--listen", "", "--http", "", "--unix", tmp_path / "socket", "--set", "serve.grace=5")
    with Wire(str(tmp_path / "socket")) as idle:
        idle.expect("PONG", "PING")
        began = time.monotonic()
        assert server.stop(number) == 0
    assert time.monotonic() - began < 5
    assert not (tmp_path / "socket").exists()


def test_it_takes_no_core_from_engines_unless_asked_to(serve):
    assert os.sched_getscheduler(serve(*ANY).process.pid) == os.SCHED_BATCH
    ours = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # what starts here inherits it
    try:
        other = serve(*ANY)
    finally:
        os.sched_setscheduler(0, ours, os.sched_param(0))
    assert os.sched_getscheduler(other.process.pid) == os.SCHED_IDLE


def refused(*argv: object, code: int = 2, **env: object) -> str:
    """The one sentence of a server that does not start."""
    command = [sys.executable, "-W", "error", "-m", "lmtier", "serve", *map(str, argv)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(**env), timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout) == (code, "")
    lines = [line for line in done.stderr.splitlines() if " WARNING " not in line]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_an_address_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        said = refused(*SMALL, "--http", "", "--listen", address, code=os.EX_TEMPFAIL)
    assert said == f"lmtier: serve: cannot listen on {address}: Address already in use"


def test_a_disk_that_another_server_has_open_is_named(serve, tmp_path):
    tier = ("--tier", f"disk://{tmp_path}/kv?capacity=1GiB")
    serve(*ANY, *tier)
    assert f"{tmp_path}/kv" in refused(*SMALL, *ANY, *tier, code=os.EX_TEMPFAIL)


def test_a_hopeless_tier_ends_the_server_with_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("")
    never = {
        "cpu://?capacity=8000PiB": "it would be killed when the slab fills; choose a smaller capacity",
        "disk:///?capacity=1GiB": "/ is the root of the whole system",
        f"disk:///{'../' * 30}?capacity=1GiB": "/ is the root of the whole system",
        f"disk://{tmp_path}/file?capacity=1GiB": f"cannot use {tmp_path}/file: File exists",
        f"disk://{tmp_path}/home?capacity=1GiB": "holds other things, such as 'letters': name an empty",
    }
    for url, said in never.items():
        tiers = ("--tier", url) if url.startswith("cpu") else (*SMALL, "--tier", url)
        assert said in refused(*tiers, *ANY)
    assert os.listdir(tmp_path / "home") == ["letters"]


def test_a_disk_below_its_capacity_is_reported_in_one_line(serve, tmp_path):
    server = serve(*ANY, "--tier", f"disk://{tmp_path}/kv?capacity=4000PiB")
    assert server.stop() == 0
    (line,) = (line for line in server.log.splitlines() if "capacity=" in line)
    assert re.search(
        r"is more than the storage has: the tier uses [\d.]+ [MGT]iB, and from then on chunks", line
    )


def test_other_hosts_are_not_let_in_without_a_token(serve):
    said = refused(*SMALL, "--listen", "0.0.0.0:0")
    assert "can be reached from other hosts" in said
    assert "token" in said
    assert (
        serve("--listen", "0.0.0.0:0", "--http", "", LMTIER_TOKEN=TOKEN).where["redis"].startswith("0.0.0.0:")
    )
    assert "need no token" in serve("--listen", "0.0.0.0:0", "--http", "", "--insecure").screen


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--set", "serve.lisen=:1"), "did you mean 'listen'"),
        (("--set", "chunk_token=1"), "did you mean 'chunk_tokens'"),
        (("--tier", "cpu://?capacity=4MiB"), "exactly one cpu:// tier"),
        (("--set", "tiers=gpu://?capacity=1MiB cpu://?capacity=4MiB"), "move this tier to their settings"),
        (("--listen", "6380"), "write it like 127.0.0.1:6380"),
        (("--token-file", "/nowhere"), "/nowhere"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence(argv, words):
    assert words in refused(*SMALL, *argv)


# ---- a token


def test_a_token_is_asked_for_and_never_shown(serve, run, tmp_path, monkeypatch):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "wrong").write_text("another\n")
    server = serve(*ANY, "--token-file", tmp_path / "token")
    assert "Clients must send the token" in server.screen
    code, out, err = run("ping", "--server", server.redis)
    assert (code, out) == (1, "")
    assert (
        err
        == f"lmtier: {server.redis} asks for a token: give it with --token-file FILE, or in LMTIER_TOKEN\n"
    )
    assert run("ping", "--server", server.redis, "--token-file", tmp_path / "token")[0] == 0
    assert run("ping", "--server", f"redis://:{TOKEN}@{server.redis}")[0] == 0
    code, _, err = run("stats", "--server", server.redis, "--token-file", tmp_path / "wrong")
    assert (code, "refuses this token" in err) == (1, True)
    monkeypatch.setenv("LMTIER_TOKEN", TOKEN)
    code, out, err = run("stats", "--server", server.redis)
    assert (code, err) == (0, "")
    for shown in (out, server.screen, server.log):
        assert TOKEN not in shown


def test_a_token_is_not_sent_to_a_server_that_asks_for_none(run, shared, monkeypatch):
    monkeypatch.setenv("LMTIER_TOKEN", TOKEN)
    assert run("ping", "--server", shared.redis)[::2] == (0, "")


def test_ping_waits_for_a_server_that_starts(run, serve, tmp_path):
    nowhere = tmp_path / "socket"
    code, out, err = run("ping", "--server", nowhere, "--wait", "0.3")
    assert (code, out) == (1, "")
    assert str(nowhere) in err
    asking = threading.Thread(target=lambda: answers.append(run("ping", "--server", nowhere, "--wait", "20")))
    answers: list[tuple[int, str, str]] = []
    asking.start()
    serve(*ANY, "--unix", nowhere)
    asking.join(20)
    ((code, out, err),) = answers
    assert (code, err) == (0, "")
    assert ", ready, " in out


def test_ping_fails_while_a_server_is_not_ready(run, impostor, now):
    now["why_not_ready"] = "the scan of disk is not finished"
    answer = answered(viewed(now))
    code, out, err = run("ping", "--server", impostor(answer, answered({"version": "1"}), answer))
    assert (code, err) == (1, "")
    assert "not ready: the scan of disk is not finished" in out


def test_sighup_reads_the_token_again(serve, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    server = serve(*ANY, "--token-file", token)

    def takes(word: str) -> bool:
        host, _, port = server.redis.rpartition(":")
        try:
            return bool(Console(ServerAddress(host=host, port=int(port), token=word)).get("/version"))
        except Unreachable:
            return False

    assert takes(TOKEN)
    token.write_text("the-next-one")
    server.process.send_signal(signal.SIGHUP)
    until(lambda: takes("the-next-one"))
    assert not takes(TOKEN)
    token.write_text("")
    server.process.send_signal(signal.SIGHUP)
    until(lambda: "the old tokens and certificates stay in use" in server.log)
    assert takes("the-next-one")
    assert server.stop() == 0


# ---- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """server.crt for localhost and client.crt, each signed by itself, with their keys."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client"):
        certify(folder / f"{name}.crt", folder / f"{name}.key", "DNS:localhost,IP:127.0.0.1")
    return folder


def test_tls_with_a_certificate_of_ones_own(serve, run, certificates, tmp_path):
    file = tmp_path / "lmtier.toml"
    file.write_text(
        f'[serve]\ntls_cert = "{certificates}/server.crt"\ntls_key = "{certificates}/server.key"\n'
    )
    server = serve(*ANY, "--config", file)
    assert "; TLS is on." in server.screen
    assert f"https://{server.where['http']}/" in server.screen
    code, out, _ = run("ping", "--server", f"rediss://{server.redis}", "--ca", certificates / "server.crt")
    assert (code, "ready" in out) == (0, True)
    code, _, err = run("ping", "--server", f"rediss://{server.redis}")
    assert (code, "is not trusted" in err, "--ca" in err) == (1, True, True)
    code, _, err = run("ping", "--server", server.redis)
    assert (code, "write rediss://" in err) == (1, True)
    with file.open("a") as settings:  # who has the server's own settings needs no more
        settings.write(f'listen = "{server.redis}"\n')
    assert run("ping", "--config", file)[0] == 0


def test_client_certificates_are_asked_for(serve, run, certificates):
    settings = {"tls_cert": "server.crt", "tls_key": "server.key", "tls_ca": "client.crt"}
    options = [f"serve.{name}={certificates / file}" for name, file in settings.items()]
    server = serve(*ANY, *(word for option in options for word in ("--set", option)))
    assert "clients need a certificate" in server.screen
    to = ("ping", "--server", f"rediss://{server.redis}", "--ca", certificates / "server.crt")
    code, _, err = run(*to)
    assert (code, "pass --cert and --key" in err) == (1, True), err
    assert run(*to, "--cert", certificates / "client.crt", "--key", certificates / "client.key")[0] == 0


def test_a_server_without_tls_is_not_spoken_to_in_tls(run, shared):
    code, _, err = run("ping", "--server", f"rediss://{shared.redis}")
    assert (code, "write redis://" in err) == (1, True)


# ---- ping, stats, clear


def test_ping_says_who_answers_how_it_is_and_how_fast(run, shared):
    for address in (shared.redis, shared.where["unix"], f"unix://{shared.where['unix']}"):
        code, out, err = run("ping", "--server", address)
        assert (code, err) == (0, "")
        assert re.fullmatch(
            rf"lmtier {re.escape(lmtier.__version__)}, ready, up .* s, at \S+; it answered in [\d.]+ ms\n",
            out,
        )


def test_without_an_address_the_settings_say_where(run, shared, monkeypatch):
    monkeypatch.setenv("LMTIER_SERVE_UNIX", shared.where["unix"])
    assert f"at {shared.where['unix']};" in run("ping")[1]
    monkeypatch.delenv("LMTIER_SERVE_UNIX")
    monkeypatch.setenv("LMTIER_SERVE_LISTEN", shared.redis)
    assert f"at {shared.redis};" in run("ping")[1]


def test_stats_account_for_every_token_and_explain_misses(run, shared):
    code, out, err = run("stats", "--server", shared.redis)
    assert (code, err) == (0, "")
    cells = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    assert ["asked", "30", "100 %", "in 1 lookup"] in cells
    assert ["hit in cpu", "10", "33 %", "-"] in cells
    assert ["missed: never_stored", "20", "67 %", MISS_REASONS["never_stored"]] in cells
    assert any(row[:4] == ["cpu", "160 KiB", "4 MiB", "3.9 %"] for row in cells)
    assert any(row[0] == "disk" for row in cells)
    assert any(row[:3] == ["engine", "the-engine", "unix"] for row in cells)


def test_stats_in_json_are_what_the_server_said(run, shared):
    _, out, _ = run("stats", "--server", shared.redis, "--json")
    found = json.loads(out)
    counted = found["counted"]
    assert counted["asked"] == sum(counted["hit"].values()) + sum(counted["missed"].values())
    assert [tier["tier"] for tier in found["tiers"]] == ["cpu", "disk"]


def test_a_server_knows_the_price_of_a_gpu_hour(serve, run):
    server = serve(*ANY, "--gpu-hour", "3.5")
    assert json.loads(run("stats", "--server", server.redis, "--json")[1])["savings"]["gpu_hour"] == 3.5
    code, _, err = run("serve", *ANY, "--gpu-hour", "-1")
    assert (code, "gpu_hour='-1' is no price" in err) == (2, True)


def test_stats_that_watch_go_on_until_they_need_not(run, shared):
    _, out, _ = run("stats", "--server", shared.redis, "--watch", "--times", "3")
    assert len(re.findall("^asked ", out, re.MULTILINE)) == 3
    _, out, _ = run("stats", "--server", shared.redis, "--watch", "--times", "2", "--json")
    assert [json.loads(line)["counted"]["lookups"] for line in out.splitlines()] == [1, 1]


@pytest.mark.parametrize("command", [("stats", "--watch"), ("top",)])
@pytest.mark.parametrize("times", ["0", "-1", "many"])
def test_a_view_is_shown_once_at_least(capsys, command, times):
    assert main([*command, "--times", times]) == 2
    assert f"--times: {times}: must be a whole number, at least 1" in capsys.readouterr().err


def test_clear_forgets_one_model_or_with_all_everything(serve, run, tmp_path):
    server = serve(*ANY, "--set", "chunk_tokens=1", "--unix", tmp_path / "socket")
    with Client(str(tmp_path / "socket")) as client:
        store(client, names("m", 3))
        store(client, names("n", 4))
        lease = client.match(names("n", 1), FORM)
        code, out, _ = run("clear", "--server", server.redis, "--namespace", "m")
        assert (code, "forgot the KV of m: 3 chunks in cpu" in out) == (0, True)
        assert (
            "the name must be the one that its engine gives"
            in run("clear", "--server", server.redis, "--namespace", "x")[1]
        )
        out = run("clear", "--server", server.redis, "--all")[1]
        assert "forgot everything: 3 chunks in cpu" in out
        assert "chunks in use (8 KiB) stay: --force deletes them too" in out
        assert (
            "forgot everything: 1 chunk in cpu"
            in run("clear", "--server", server.redis, "--all", "--force")[1]
        )
        client.release(lease)


def test_clear_forgets_what_an_engine_stored_since_a_moment(serve, run, tmp_path, redis_server):
    """In memory, on disk and in Redis; also after a restart, which is why headers say it."""
    tiers = [
        *("--tier", f"disk://{tmp_path}/kv?capacity=1MiB"),
        *("--tier", f"unix://{redis_server}?namespace=suspect"),
    ]
    settings = ("--set", "chunk_tokens=1", "--unix", tmp_path / "socket")
    host = socket.gethostname()

    def left(server) -> dict[str, int]:
        with Client(str(tmp_path / "socket")) as client:
            assert client.flush(10)
            found = {}
            for name in ("good", "bad", "late"):
                match = client.match(names(name, 5), FORM)
                client.wait(match)
                found[name] = match.chunks
                client.release(match)
            return found

    server = serve(*ANY, *tiers, *settings)
    for name in ("good", "bad"):
        with Client(str(tmp_path / "socket"), name=f"engine {name}") as client:
            store(client, names(name, 5))
            assert client.flush(10)
    time.sleep(0.01)
    moment = datetime.now().astimezone()
    with Client(str(tmp_path / "socket"), name="engine bad") as client:
        store(client, names("late", 5))
        assert client.flush(10)
    server.stop()
    server = serve(*ANY, *tiers, *settings)
    code, out, _ = run(
        "clear", "--server", server.redis, "--stored-by", "engine good*", "--since", moment.isoformat()
    )
    assert (code, "0 chunks in disk" in out) == (0, True)
    assert left(server) == {"good": 5, "bad": 5, "late": 5}
    code, out, _ = run(
        "clear", "--server", server.redis, "--stored-by", "engine bad*", "--since", moment.isoformat()
    )
    assert (code, "5 chunks in disk" in out, "such was in unix" in out) == (0, True, True)
    assert left(server) == {"good": 5, "bad": 5, "late": 0}
    code, _, _ = run("clear", "--server", server.redis, "--namespace", "bad", "--stored-by", f"* @{host}")
    assert left(server) == {"good": 5, "bad": 0, "late": 0}
    code, _, _ = run("clear", "--server", server.redis, "--since", "1h")
    assert left(server) == {"good": 0, "bad": 0, "late": 0}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--since", "yesterday"), "is not a time"),
        (("--since", "2999-01-01"), "is in the future"),
        (("--since", "99999999999d"), "is not a time"),
        (("--all", "--stored-by", "x"), "--all deletes everything; leave it out"),
    ],
)
def test_a_moment_that_is_none_is_said(run, shared, words, sentence):
    code, _, err = run("clear", "--server", shared.redis, *words)
    assert (code, sentence in err) == (2, True)


@pytest.fixture
def summer_time(monkeypatch):
    """A zone whose clocks went from 2 to 3 o'clock on 2026-03-29."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("text", ["01:30", "2026-03-29T01:30"])
def test_a_moment_has_the_offset_that_clocks_had_then(summer_time, text):
    noon = datetime(2026, 3, 29, 12).astimezone()
    assert watching._moment(text, noon).isoformat() == "2026-03-29T01:30:00+01:00"


@pytest.mark.parametrize("what", [(), ("--namespace", "m", "--all"), ("--force",)])
def test_clear_does_not_guess_what_is_to_be_forgotten(shared, what, capsys):
    code = main(["clear", "--server", shared.redis, *what])
    assert (code, "--all" in capsys.readouterr().err) == (2, True)
    assert Console(parse_address(shared.redis)).snapshot()["tiers"][0]["chunks"] == 20


@pytest.mark.parametrize("option", ["--namespace", "--stored-by"])
def test_clear_of_no_name_is_not_clear_of_everything(run, shared, option):
    """As of a script whose variable is not set."""
    code, _, err = run("clear", "--server", shared.redis, option, "")
    assert (code, "--all forgets everything" in err) == (2, True)


# ---- those that are not there, or are something else


@pytest.mark.parametrize("command", [("ping",), ("stats",), ("clear", "--all"), ("top",)])
def test_where_nobody_listens_every_command_says_so(run, command, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    for address in (f"127.0.0.1:{port}", tmp_path / "socket"):
        code, out, err = run(*command, "--server", address)
        assert (code, out) == (1, "")
        assert err.startswith(f"lmtier: {address} does not answer: is `lmtier serve` running?")
        assert err.count("\n") == 1


def test_a_redis_server_is_no_lmtier_server(run, redis_server):
    code, _, err = run("ping", "--server", redis_server)
    assert (code, "it only knows Redis commands" in err) == (1, True)


def test_the_pages_address_serves_looks_and_nothing_more(run, shared):
    code, out, _ = run("ping", "--server", shared.where["http"])
    assert (code, ", ready, " in out) == (0, True)
    code, _, err = run("clear", "--all", "--server", shared.where["http"])
    assert (code, "this needs a token here" in err) == (2, True)


def answered(value: Any, status: int = 200) -> bytes:
    """As a server answers over HTTP."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b"HTTP/1.1 %d Status\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.fixture
def impostor() -> Iterator[Callable[..., ServerAddress]]:
    """A server that says these bytes, whatever it is asked, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        talks: list[threading.Thread] = []

        def starts(*answers: bytes | tuple[bytes, ...], hang_up: bool = False) -> ServerAddress:
            def talk() -> None:
                for answer in answers or (b"",):  # each on a connection of its own, in pieces
                    client, _ = listener.accept()
                    with client, suppress(ConnectionResetError, BrokenPipeError):
                        client.recv(1 << 16)
                        for piece in answer if isinstance(answer, tuple) else (answer,):
                            client.sendall(piece)
                            time.sleep(0.02 * isinstance(answer, tuple))
                        while not hang_up and client.recv(1 << 16):
                            pass

            talks.append(threading.Thread(target=talk))
            talks[-1].start()
            return ServerAddress(host="127.0.0.1", port=listener.getsockname()[1])

        yield starts
        for each in talks:
            each.join(PATIENCE)
            assert not each.is_alive()


def test_a_server_that_is_silent_is_given_up(impostor):
    with pytest.raises(Unreachable, match=r"not answer within 0\.1 s"):
        Console(impostor(), timeout=0.1).get("/version")


def test_a_server_that_trickles_is_given_up_too(impostor):
    """The limit is for the whole answer, however its bytes come."""
    drops = tuple(bytes([each]) for each in answered({"version": "1"}))
    with pytest.raises(Unreachable, match="not answer"):
        Console(impostor(drops), timeout=0.1).get("/version")


def test_a_server_that_never_ends_its_answer_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            client, _ = listener.accept()
            with client, suppress(ConnectionResetError, BrokenPipeError):
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\n")
                while True:
                    client.sendall(b"x")

        thread = threading.Thread(target=talk)
        thread.start()
        address = ServerAddress(host="127.0.0.1", port=listener.getsockname()[1])
        with pytest.raises(Unreachable, match=r"not answer within 0\.2 s"):
            Console(address, timeout=0.2).get("/version")
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"\x15\x03\x01",
    ],
    ids=lambda answer: answer[:60],
)
def test_an_answer_without_an_end_is_not_read(impostor, answer):
    with pytest.raises(Unreachable, match="it answered something unexpected"):
        Console(impostor(answer)).get("/version")


def test_a_server_that_hangs_up_is_named(impostor):
    with pytest.raises(Unreachable, match="closed the connection"):
        Console(impostor(hang_up=True)).get("/version")


@pytest.mark.parametrize(
    "report",
    [b"no json", b"[]", b"{}", b'{"version": "9", "tiers": [], "tokens": {}}', b"null", b"7", b"[" * 100_000]
    + [b'{"version": %s}' % (depth * b"[" + depth * b"]") for depth in (400, 600, 900)],
)
def test_a_report_that_is_none_is_not_believed(impostor, report):
    with pytest.raises(Unreachable):
        Console(impostor(answered(report))).snapshot()
    with pytest.raises(Unreachable):
        Console(impostor(answered(report))).view()


@pytest.mark.parametrize("command", ["pins", "sessions"])
@pytest.mark.parametrize("said", [[5], [None], [[1]], [{}], [{"name": 1, "session": 1, "parent": 0}]])
def test_a_list_of_something_else_is_said_in_a_sentence(impostor, capsys, command, said):
    assert main([command, "--server", str(impostor(answered(said)))]) == 2
    assert capsys.readouterr().err.endswith(f"sent an invalid list of {command}\n")


@pytest.mark.parametrize("said", [None, 5, "rows", {"a": 1}, [5], [{}]])
@pytest.mark.parametrize("name", ["now", "columns", "parts", "tables", "rows"])
def test_a_view_that_is_none_is_not_believed(impostor, now, name, said):
    view: Any = viewed(now)
    part = view["parts"][0]
    {"tables": part, "rows": part["tables"][0]}.get(name, view)[name] = said
    with pytest.raises(Unreachable, match="does not know"):
        Console(impostor(answered(view))).view()


def test_an_error_of_redis_without_an_end_is_not_read(impostor):
    with pytest.raises(Unreachable, match="only knows Redis commands"):
        Console(impostor(b"-" + b"a" * (1 << 20))).get("/version")


def test_what_a_server_says_does_not_steer_the_terminal(impostor, now):
    hostile = "\x1b]0;owned\x07\x9b2J\r\n"
    now["clients"][0]["name"] = now["why_not_ready"] = hostile
    remote = Console(impostor(answered(viewed(now)), answered({"error": hostile}, 400)))
    said = stats(remote.view(), "here")
    with pytest.raises(Unreachable) as error:
        remote.get("/version")
    for text in (said, str(error.value)):
        assert all(letter.isprintable() or letter == "\n" for letter in text)


# ---- addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:6380", ServerAddress(host="127.0.0.1")),
        ("[::1]:7000", ServerAddress(host="::1", port=7000)),
        (":7000", ServerAddress(host="127.0.0.1", port=7000)),
        ("cache-1:6380", ServerAddress(host="cache-1")),
        ("/run/lmtier/socket", ServerAddress(unix="/run/lmtier/socket")),
        ("./socket", ServerAddress(unix="./socket")),
        ("unix:///run/lmtier/socket", ServerAddress(unix="/run/lmtier/socket")),
        ("redis://cache-1", ServerAddress(host="cache-1")),
        ("redis://:s%40cret@cache-1:7000/0", ServerAddress(host="cache-1", port=7000, token="s@cret")),
        ("rediss://default:word@[::1]:7000", ServerAddress(host="::1", port=7000, tls=True, token="word")),
    ],
)
def test_addresses_read_as_people_write_them(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "6380",
        "a:b",
        "http://a:1",
        "redis://",
        "redis://a:99999",
        "redis://a/1",
        "unix://a",
        "redis://w@a",
    ],
)
def test_what_is_no_address_says_how_to_write_one(text):
    with pytest.raises(ConfigError, match="like "):
        parse_address(text)


def test_a_token_in_an_address_is_not_repeated():
    assert TOKEN not in repr(parse_address(f"redis://:{TOKEN}@a:1")) + str(
        parse_address(f"redis://:{TOKEN}@a:1")
    )
    with pytest.raises(ConfigError) as error:
        parse_address(f"redis://:{TOKEN}@a:1/7")
    assert TOKEN not in str(error.value)


def test_a_server_on_every_address_is_asked_on_this_host():
    assert address_from_settings(ServerConfig(listen="0.0.0.0:7000", insecure=True)) == ServerAddress(
        host="127.0.0.1", port=7000
    )
    assert address_from_settings(ServerConfig(listen="[::]:7000")) == ServerAddress(host="::1", port=7000)
    assert address_from_settings(ServerConfig(unix="/run/x")) == ServerAddress(unix="/run/x")
    with pytest.raises(ConfigError, match="name a server"):
        address_from_settings(ServerConfig(listen=""))


# ---- top


@pytest.fixture
def now(shared: Serve) -> Snapshot:
    return Console(parse_address(shared.redis)).snapshot()


def viewed(now: Any, *rows: dict[str, Any], columns: int = 80) -> View:
    """The view of a report and of these rows of its history."""
    history = History()
    for row in rows:
        history.sample(cast(Counters, {**_nothing(), **row}))
    counted = now["counted"]
    latest, lately = history.since(counted, 1.5), history.since(counted, 900.0)
    return view_of(now, latest, lately, history.columns(counted, 900.0, columns))


def test_top_without_a_terminal_is_a_line_a_look(run, shared):
    code, out, _ = run("top", "--server", shared.redis, "--times", "2")
    assert code == 0
    line = r"\d\d:\d\d:\d\d; hit .* of [\d,]+ tokens/s; cpu 3\.9 % full, .*; disk \d\.\d % full, .*; 1 client"
    assert [bool(re.fullmatch(line, each)) for each in out.splitlines()] == [True, True]


def test_the_view_says_what_happens_now_and_what_did_lately(now):
    now["counted"] |= {"seconds": 1000.0, "asked": 3000, "hit": {"cpu": 1500, "disk": 500}}
    now["counted"] |= {"missed": {"evicted": 1000}, "up": {"disk": 64 << 20}}
    now["tiers"][1]["state"] = "loads fail"
    history = [
        {"seconds": 10, "asked": 1000, "missed": {"evicted": 1000}},
        {"seconds": 996, "asked": 2000, "hit": {"cpu": 1000}, "missed": {"evicted": 1000}},
    ]
    lines = frame(viewed(now, *history), "here", 80, 24)
    assert "hit rate   now 100 %   last 16 min 30 s 100 %   since the start 67 %" in lines[2]
    text = "\n".join(lines)
    assert re.search(r"^hit in cpu +125 +1,500 +75 % +█", text, re.MULTILINE)
    assert re.search(r"^disk +loads fail .* 8 MiB +16 MiB/s", text, re.MULTILINE)
    assert set(lines[3]) == {"·", "█"}


def test_every_console_names_a_dead_redis(run, serve, tmp_path):
    """Consoles that watch are no clients."""
    redis = RedisServer(tmp_path / "redis")
    tier = f"redis://127.0.0.1:{redis.port}/0"
    try:
        server = serve(*ANY, "--set", "chunk_tokens=1", "--unix", tmp_path / "socket", "--tier", tier)
        assert "cpu and redis work; no engine is connected" in run("stats", "--server", server.redis)[1]
        redis.kill()
        with (
            Client(str(tmp_path / "socket"), name="the-engine") as client,
            Wire(address_in(server.redis)) as wire,
        ):
            wire.expect("PONG", "PING")

            def is_down() -> bool:
                found = Console(parse_address(server.redis)).snapshot()
                client.release(client.wait(client.match(names(str(found["time"]), 3), FORM)))
                return found["verdicts"][0]["state"] == "bad"

            until(is_down)
            down = Console(parse_address(server.redis)).snapshot()
            said = re.compile(r"redis is down: loads have failed for \d+ s: Connection refused")
            assert said.search("\n".join(frame(viewed(down), "here", 120, 24)[1:3]))
            out = run("top", "--server", server.redis, "--times", "1")[1]
            assert said.search(out)
            assert re.search(r"; redis .*, loads fail;", out)
            assert "2 clients;" in out
            out = run("top", "--server", server.redis, "--server", tmp_path / "socket", "--times", "1")[1]
            assert "2 need help" in out
            assert len(said.findall(out)) == 2
            out = run("stats", "--server", server.redis)[1]
            assert re.search(r"^working +redis is down +loads have failed", out, re.MULTILINE)
            assert re.search(r"^cpu .* works$\n^redis .* loads fail$", out, re.MULTILINE)
            assert len(re.findall(r"^redis +- +127", out, re.MULTILINE)) == 1, "the one that said PING"
            assert "agent session" not in out, "prompts without a session's name are plain traffic"
    finally:
        redis.kill()


def test_three_tiers_and_their_failures_fit_on_80_by_24(now):
    disk = now["tiers"][1]
    redis = {"tier": "redis", "used": None, "capacity": None, "chunks": None, "state": "stores fail"}
    now["tiers"] += [{**disk, **redis}]
    disk |= {"used": 1023 << 30, "capacity": 1023 << 30, "queue": 4096}
    now["counted"]["up"] = {"disk": 1023 << 40}
    missed = dict.fromkeys(("never_stored", "evicted", "tier_down", "partial_chunk"), 250)
    now["counted"] |= {"asked": 4000, "hit": dict.fromkeys(("cpu", "disk", "redis"), 1000), "missed": missed}
    now["curve"] = {tier: dict.fromkeys(("0.5", "1", "2", "4", "8"), 0.5) for tier in ("cpu", "disk")}
    now["clients"] *= 9
    lines = frame(viewed(now), "127.0.0.1:6380", 80, 24)
    text = "\n".join(lines)
    assert len(lines) == 24
    assert all(re.search(f"^missed: {reason} .* 6.2 %", text, re.MULTILINE) for reason in missed)
    assert re.search(r"^redis +stores fail ", text, re.MULTILINE)
    assert re.search(r"^disk +works .* 4,096$", text, re.MULTILINE)
    assert len([line for line in lines if line.startswith("engine ")]) >= 2
    assert "more" in lines[-1]


def test_a_busy_minute_has_no_gaps_in_its_line(now):
    """A column is shorter than the two seconds between rows of the history."""
    now["counted"] |= {"seconds": 900.0, "asked": 90_000, "hit": {"cpu": 45_000}}
    rows = [{"seconds": t, "asked": 100 * t, "hit": {"cpu": 50 * t}} for t in range(2, 900, 2)]
    assert set(frame(viewed(now, *rows, columns=450), "here", 450, 24)[3]) <= {"▄", "▅"}
    now["counted"] |= {"asked": 0, "hit": {}}
    assert set(frame(viewed(now), "here", 80, 24)[3]) == {"·"}, "none were asked"


def test_a_long_name_hides_no_number_of_a_client(now):
    now["clients"][0] |= {"name": "n" * 200, "sent": 3 << 30}
    assert "3 GiB" in "\n".join(frame(viewed(now), "here", 80, 24))


def test_the_view_answers_six_questions_in_their_order(now):
    now["curve"] = {"cpu": {"0.5": 0.25, "1": 0.5, "2": 0.75, "4": 0.75, "8": None}}
    text = "\n".join(frame(viewed(now), "here", 100, 40))
    order = [
        r"^lmtier .* ready",
        r"^works\?   yes: cpu and disk work; 1 engine connection$",
        r"^saves\? ",
        r"^why missed\?",
        r"^bottleneck\? ",
        r"^the thread ",
        r"^more memory\?",
    ]
    found = [re.search(each, text, re.MULTILINE) for each in order]
    assert all(found), text
    starts = [each.start() for each in found if each is not None]
    assert starts == sorted(starts)
    assert re.search(r"^cpu +4 MiB +25 % +50 % +75 % +75 % +-$", text, re.MULTILINE)


def test_stats_say_what_more_memory_would_do(run, shared):
    out = run("stats", "--server", shared.redis)[1]
    assert re.search(r"^hit rate if the tier were +of +× 0.5 +× 1 +× 2 +× 4 +× 8$", out, re.MULTILINE)
    assert re.search(r"^the thread +[\d.< ]+ %$", out, re.MULTILINE)


def test_explain_says_why_in_lines_or_in_json(run, shared):
    code, out, err = run("explain", "--server", shared.redis)
    assert (code, err) == (0, "")
    _, who, *rest = re.split(r" {2,}", out.splitlines()[2].strip())
    assert (who, rest) == ("the-engine", ["30", "10", "10", "10", "never_stored", "1"])
    assert "never stored" in out
    (found,) = json.loads(run("explain", "--server", shared.redis, "--json")[1])
    assert (found["asked"], found["hit"], found["reason"]) == (30, {"cpu": 10}, "never_stored")
    assert run("explain", "--server", shared.redis, "--last", "0")[0] == 2


@pytest.mark.parametrize("reply", [b"{}", b"[1]", b'[{"why": "x"}]', b"no json"])
def test_an_explanation_that_is_none_is_not_believed(impostor, reply):
    with pytest.raises(Unreachable):
        Console(impostor(answered(reply))).explanations(3)


def snapshots() -> st.SearchStrategy[dict[str, Any]]:
    whole = st.integers(0, 1 << 60)
    word = st.text("abcdefgh_-", min_size=1, max_size=130)
    tier = st.fixed_dictionaries(
        {"tier": word, "url": word, "chunks": st.none() | whole, "used": st.none() | whole}
        | {"capacity": st.none() | st.integers(1, 1 << 60), "pinned": st.none() | whole, "write": word}
        | {"queue": whole, "queue_full": st.floats(0, 1), "state": word}
        | {"slowest": st.none() | st.floats(0, 10), "outages": st.just([])}
        | {
            "shares": st.dictionaries(
                word, st.fixed_dictionaries({"used": whole, "share": whole, "evicted": whole}), max_size=3
            ),
        }
    )
    client = st.fixed_dictionaries(
        {"id": whole, "name": word, "kind": word, "address": word, "age": st.floats(0, 1e9)}
        | {"received": whole, "sent": whole}
    )
    counts, amount = st.dictionaries(word, whole, max_size=20), st.floats(0, 1e9)
    kinds = {name: str(kind) for name, kind in Counters.__annotations__.items()}
    counters: dict[str, Any] = {name: counts if "dict" in kind else whole for name, kind in kinds.items()}
    counters |= dict.fromkeys(("seconds", "saved_seconds", "busy", "lookup_seconds"), amount)
    counters |= {"loads": st.dictionaries(word, st.lists(whole, min_size=1, max_size=12), max_size=3)}
    verdicts = [
        st.fixed_dictionaries({"name": st.just(name), "state": word, "word": word, "text": word})
        for name in ("working", "saves", "misses", "bottleneck", "memory")
    ]
    ratios = st.dictionaries(st.sampled_from(["0.5", "1", "2", "4", "8"]), st.none() | st.floats(0, 1))
    worth = {"gpu_hours": amount, "money": amount}
    more = st.dictionaries(word, st.fixed_dictionaries(worth), max_size=3)
    return st.fixed_dictionaries(
        {"name": word, "version": word, "time": st.floats(1e9, 2e9), "why_not_ready": word}
        | {"counted": st.fixed_dictionaries(counters), "tiers": st.lists(tier, min_size=1, max_size=6)}
        | {"verdicts": st.tuples(*verdicts), "models": st.just([]), "tenants": st.just([])}
        | {"sessions": st.fixed_dictionaries({"active": whole, "waiting": whole, "top": st.just([])})}
        | {"clients": st.lists(client, max_size=40), "values": whole}
        | {"curve": st.dictionaries(word, ratios, max_size=6), "curve_lookups": whole}
        | {"savings": st.fixed_dictionaries({"price": word, "gpu_hour": amount} | worth | {"next_gib": more})}
        | {"leased_bytes": whole, "chunk_tokens": whole, "most_clients": whole}
        | {"load_deadline": st.floats(0.1, 10)}
    )


@given(snapshots(), st.integers(1, 200), st.integers(1, 70))
def test_the_view_fits_any_terminal_with_any_content(now, columns, rows):
    view = viewed(now, columns=columns)
    lines = frame(view, "here", columns, rows)
    assert len(lines) <= rows
    assert all(len(line) <= columns for line in lines)
    assert stats(view, "here")


def test_a_small_terminal_shows_tiers_and_clients(now):
    """Many reasons of misses do not push them out."""
    now["counted"]["missed"] = dict.fromkeys(MISS_REASONS, 1)
    text = "\n".join(frame(viewed(now), "here", 80, 24))
    assert re.search(r"^cpu .*^disk .*^engine +the-engine", text, re.MULTILINE | re.DOTALL)


ON_ITS_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that its ^C is a signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background of a script ignore
from lmtier.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *argv: object, columns: int = 80, rows: int = 24) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self.settings = termios.tcgetattr(slave)
        self._slave = slave
        self.output = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_ITS_TERMINAL, *map(str, argv)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment(TERM="xterm"),
        )

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def shows(self, pattern: str, columns: int = 80) -> list[str]:
        """The lines of the first whole frame from now on that has this in it, and is as wide."""
        self.output = b""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self._read(end)
            for data in self.output.split(b"\x1b[H")[1:]:
                text = data.decode(errors="replace")
                lines = text.removesuffix("\x1b[J").replace("\x1b[K", "").split("\r\r\n")
                is_whole = text.endswith("\x1b[J") and columns in map(len, lines[2:5])
                if is_whole and re.search(pattern, "\n".join(lines)):
                    return lines
        pytest.fail(f"{pattern!r} was not shown; {self.output[-2000:]!r}")

    def _read(self, end: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.master, selectors.EVENT_READ)
            if selector.select(max(0.0, end - time.monotonic())):
                self.output += os.read(self.master, 1 << 16)

    def ends(self) -> int:
        """Its exit code; afterwards `output` is complete."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            self._read(min(end, time.monotonic() + 0.05))
            assert time.monotonic() < end, "it does not end"
        self._read(time.monotonic())
        return self.process.returncode

    @property
    def is_as_it_was(self) -> bool:
        return termios.tcgetattr(self._slave) == self.settings and self.output.endswith(Screen.END.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self._slave)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*argv: object, **size: int) -> Terminal:
        opened.append(Terminal(*argv, **size))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_top_fills_the_terminal_and_gives_it_back_on_q(shared, terminal):
    """It follows the size of the terminal."""
    view = terminal("top", "--server", shared.redis)
    lines = view.shows("hit rate")
    assert len(lines) <= 24
    assert lines[0].startswith(f"lmtier {lmtier.__version__}, ready, up ")
    assert lines[0].endswith(f" at {shared.redis}  q quits")
    text = "\n".join(lines)
    assert re.search(
        r"^hit in cpu .*^missed: never_stored .*^cpu .*^disk .*^engine ", text, re.MULTILINE | re.DOTALL
    )
    view.resize(132, 43)
    view.shows("hit rate", columns=132)
    view.resize(40, 10)
    assert len(view.shows("hit rate", columns=40)) == 10
    view.type(b"x")
    view.type(b"\x1b[A")
    view.shows("hit rate", columns=40)
    view.type(b"q")
    assert view.ends() == 0
    assert view.is_as_it_was


@pytest.mark.parametrize(("keys", "number", "code"), [(b"\x03", 0, 0), (b"", signal.SIGTERM, 143)])
def test_top_gives_the_terminal_back_when_it_is_interrupted(shared, terminal, keys, number, code):
    view = terminal("top", "--server", shared.redis)
    view.shows("hit rate")
    if keys:
        view.type(keys)
    else:
        view.process.send_signal(number)
    assert view.ends() == code
    assert view.is_as_it_was


def test_top_waits_for_a_server_that_went_away(serve, terminal, tmp_path):
    server = serve(*ANY, "--unix", tmp_path / "socket")
    view = terminal("top", "--server", tmp_path / "socket")
    view.shows("ready")
    assert server.stop() == 0
    view.shows(r"does\s+not\s+answer:\s+is\s+`lmtier")
    serve(*ANY, "--unix", tmp_path / "socket")
    view.shows(f"lmtier {lmtier.__version__}, ready")
    view.type(b"q")
    assert view.ends() == 0


def test_top_of_no_server_leaves_the_terminal_alone(terminal, tmp_path):
    view = terminal("top", "--server", tmp_path / "socket")
    assert view.ends() == 1
    assert Screen.BEGIN.encode() not in view.output
    assert b"does not answer" in view.output


def test_watched_stats_replace_what_stands_on_a_terminal(shared, terminal):
    view = terminal("stats", "--watch", "--times", "1", "--server", shared.redis)
    assert view.ends() == 0
    assert view.output.startswith(b"\x1b[H\x1b[2J")


# ---- pieces of a terminal


def test_times_are_said_in_their_two_largest_units():
    said = [duration_text(each) for each in (0, 59.9, 60, 200, 3600, 14_700, 86_400 * 9 + 7200 + 61)]
    assert said == ["0 s", "59 s", "1 min", "3 min 20 s", "1 h", "4 h 5 min", "9 d 2 h"]


def test_bars_and_sparks_stay_within_their_room():
    assert [bar(share, 4) for share in (-1, 0, 0.5, 1, 9)] == ["░░░░", "░░░░", "██░░", "████", "████"]
    assert spark([0, 0.5, 1, None, 2]) == "▁▅█·█"


@given(st.text())
def test_what_is_printable_is_left_and_nothing_else(text):
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
