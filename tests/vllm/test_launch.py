"""How an engine's private server starts, and what the engine's log says of it. It needs no engine."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lmtier.errors import ConfigError, TierError
from lmtier_backends.disk import DiskTier
from lmtier_integrations.vllm import launch
from lmtier_integrations.vllm.launch import Launcher
from lmtier_integrations.vllm.settings import Settings, log
from tests.redis_process import free_port
from tests.server.process import PATIENCE, until

CPU = "cpu://?capacity=16MiB"


class Lines(logging.Handler):
    """What the connector's log gets."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self.came = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.came:
            self.all.append(record.getMessage())
            self.came.notify_all()

    def wait_for(self, part: str) -> bool:
        with self.came:
            return self.came.wait_for(lambda: any(part in each for each in self.all), PATIENCE)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    lines = Lines()
    log.addHandler(lines)
    yield lines
    log.removeHandler(lines)


def launcher(tiers: Any, **more: str) -> Launcher:
    return Launcher(Settings.of({"tiers": tiers, **more}, 256, 0), "an engine")


def servers_log(launcher: Launcher) -> str:
    return launcher.path.with_suffix(".log").read_text()


@pytest.mark.parametrize("kind", ["memory", "no folder", "a file"])
def test_a_hopeless_error_ends_the_start_at_once(tmp_path, lines, kind):
    """It is reported once."""
    (tmp_path / "file").write_text("")
    tiers, why = {
        "memory": (["cpu://?capacity=900TiB"], "choose a smaller capacity"),
        "no folder": ([CPU, "disk:///proc/kv?capacity=1GiB"], "cannot use /proc/kv: "),
        "a file": ([CPU, f"disk://{tmp_path}/file?capacity=1GiB"], f"cannot use {tmp_path}/file: "),
    }[kind]
    one = launcher(tiers)
    with pytest.raises(TierError, match="private server does not start: ") as caught:
        one.connect("a test")
    said = str(caught.value)
    assert said.count(why) == 1
    assert "\n" not in said
    assert str(one.path.with_suffix(".log")) in said
    assert servers_log(one).count(why) == 1, "it was not tried again"
    assert lines.all == []


def test_a_server_starts_while_the_engine_does_other_work(tmp_path, lines):
    """An engine allocates its blocks meanwhile. What fails is said where the engine connects."""
    engine, hopeless = launcher([CPU]), launcher(["cpu://?capacity=900TiB"])
    engine.begin("a worker")
    hopeless.begin("a worker")
    while not engine.path.exists():  # no one has asked for a connection
        time.sleep(0.01)
    with closing(engine.begun("a worker")), closing(engine.connect("a scheduler")):
        pass
    with pytest.raises(TierError, match=r"does not start: .*capacity=900TiB"):
        hopeless.begun("a worker")


def test_a_server_waits_for_an_engine_that_others_hold_up(tmp_path, lines, monkeypatch):
    """Data-parallel engines of a host wait for each other. The server ends if there is no engine."""
    monkeypatch.setattr(launch, "_LINGER", 0.5)
    engine = launcher([CPU])
    engine.begin("a worker")
    with closing(launcher([CPU]).connect("another rank")) as other:
        run = other.run_id
        until(lambda: "a worker" in [each["name"] for each in other.report()["clients"]])
    with closing(engine.begun("a worker")) as client:
        assert client.run_id == run, servers_log(engine)
    until(lambda: "there was no engine" in servers_log(engine))
    unused = launcher([CPU])
    unused.begin("a worker")
    unused.close()
    until(lambda: not unused.path.exists())


def test_a_start_waits_for_a_folder_of_an_earlier_server(tmp_path, lines):
    earlier = DiskTier(tmp_path / "kv")
    one = launcher([CPU, f"disk://{tmp_path}/kv?capacity=64MiB"])
    clients: list[Any] = []
    thread = threading.Thread(target=lambda: clients.append(one.connect("a test")))
    with closing(earlier):
        thread.start()
        assert lines.wait_for("does not start yet: disk tier: "), lines.all
        assert not clients
    thread.join(2 * PATIENCE)
    assert len(clients) == 1, servers_log(one)
    clients[0].close()
    assert sum("does not start yet" in each for each in lines.all) == 1


def test_the_engines_log_has_the_servers_warnings_and_tiers(tmp_path, lines):
    port = free_port()
    one = launcher(f"{CPU} disk://{tmp_path}/kv?capacity=900TiB", http=f"127.0.0.1:{port}")
    with one.connect("a test") as client:
        (said,) = lines.all
        assert re.fullmatch(
            r"lmtier: the private server: tier 'disk://.*': capacity=[\d.]+ [GTPE]iB is more than the "
            r"storage has: the tier uses [\d.]+ [GT]iB, and from then on chunks leave for new ones",
            said,
        )
        place = re.fullmatch(
            rf"cpu 16 MiB → disk {tmp_path}/kv [\d.]+ [GT]iB, private server pid (\d+), log (.*), "
            rf"page http://127\.0\.0\.1:{port}/",
            one.described(client, None),
        )
        assert place is not None, one.described(client, None)
        assert b"serve" in Path(f"/proc/{place[1]}/cmdline").read_bytes().split(b"\0")
        assert os.path.samefile(place[2], one.path.with_suffix(".log"))


def test_tiers_may_be_one_text_as_in_the_environment():
    text = f"{CPU} disk:///kv?capacity=1GiB"
    assert Settings.of({"tiers": text}, 256, 0) == Settings.of({"tiers": text.split()}, 256, 0)
    gpu = {"server": "/s", "tiers": "gpu://?capacity=1GiB"}
    assert (
        Settings.of(gpu, 256, 0).config.gpu
        == Settings.of({**gpu, "tiers": [gpu["tiers"]]}, 256, 0).config.gpu
    )


def test_a_private_servers_wrong_setting_names_its_place():
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config: load_deadline=.soon. from arguments"):
        Settings.of({"load_deadline": "soon"}, 256, 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"server": "127.0.0.1:6380"}, "server='127.0.0.1:6380' is not the path of a Unix socket"),
        ({"server": "redis://host:6380"}, "server='redis://host:6380' is not the path of a Unix socket"),
        ({"server": "socket"}, "server='socket' is not the path of a Unix socket"),
        ({"http": "x"}, "http='x' is not an address; write it like 127.0.0.1:"),
        ({"http": "127.0.0.1:99999"}, "http='127.0.0.1:99999' is not an address"),
        ({"chunk_tokens": 100_000_000}, "chunk_tokens=100000000: must be 1 to 1048576"),
        ({"load_deadline": -1}, "load_deadline=-1 from arguments does not fit: it is not a time"),
    ],
)
def test_an_impossible_setting_is_refused_before_any_start(settings, said):
    with pytest.raises(ConfigError, match=f"^kv_connector_extra_config: {said}"):
        Settings.of(settings, 256, 0)
