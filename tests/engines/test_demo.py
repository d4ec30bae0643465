"""The demo shows what it says, and leaves behind what it says."""

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmtier.client.client import Client
from lmtier.errors import ConfigError, TierError
from lmtier_integrations import demo
from tests.server.process import until


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(demo, "CARRIED", ("no_such_package", ""))
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 2)
    monkeypatch.setattr(demo, "LAYERS", 2)


def rows(out):
    found = [re.split(r" {2,}", line.strip()) for line in out.splitlines() if line.startswith("  user")]
    assert all(row[-1] == "yes" for row in found)
    return {row[0]: tuple(map(int, row[2:5])) for row in found}


def test_every_tier_of_the_demo_gives_the_same_answers(tmp_path, capsys, monkeypatch):
    """The demo shows each answer at once."""
    level, stop = logging.getLogger("lmtier").level, demo.ServerProcess.stop
    shown = [""]

    def stopped(server):
        shown.append(capsys.readouterr().out)
        stop(server)

    monkeypatch.setattr(demo.ServerProcess, "stop", stopped)
    assert demo.run(tmp_path, keep=False)
    assert [len(rows(each)) for each in shown[:4]] == [0, 3, 3, 2], "before the next part begins"
    out = "".join(shown) + capsys.readouterr().out
    came = rows(out)
    assert came["user 1, turn 1"] == (0, 0, 0)
    assert came["user 2, turn 1"][0] > 0  # of the document, which user 1 has brought
    assert came["user 2, turn 2"][1] > 0
    assert came["user 3, turn 2"][2] > 0
    assert "Same: every answer is, token by token, what it is without lmtier." in out
    assert list(tmp_path.iterdir()) == [], "it cleans up after itself"
    assert logging.getLogger("lmtier").level == level


def test_kept_its_server_goes_on_with_what_was_stored(tmp_path):
    code = "import pathlib, sys; from lmtier_integrations import demo; demo.CARRIED = 'none', ''; "
    code += "demo.LAYERS = demo.ANSWER_TOKENS = 2; demo.run(pathlib.Path(sys.argv[1]), keep=True)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert rows(done.stdout)["user 2, turn 2"][1] > 0, done.stderr
    (process,) = map(int, re.findall(r"^  kill (\d+)", done.stdout, re.M))
    try:
        with Client(str(tmp_path / "lmtier.sock")) as client:
            stats = client.stats()
            assert stats["cpu"]["chunks"] > 0
            assert stats["disk"]["chunks"] > 0
    finally:
        os.kill(process, signal.SIGTERM)
        until(lambda: not is_alive(process))


def test_a_second_demo_does_not_use_the_server_of_the_first(tmp_path):
    tiers = ["cpu://?capacity=16MiB"]
    server = demo.ServerProcess(tmp_path, tiers)
    try:
        with pytest.raises(ConfigError, match="the server of another demo runs"):
            demo.ServerProcess(tmp_path, tiers)
    finally:
        server.stop()


def test_a_server_that_does_not_start_in_time_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "PATIENCE", -1)
    with pytest.raises(TierError, match="does not start"):
        demo.ServerProcess(tmp_path, ["cpu://?capacity=16MiB"])
    assert not [each for each in Path("/proc").glob("[0-9]*") if str(tmp_path) in command_of(each)]


def command_of(process):
    try:
        return (process / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_difference_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo.Speaker, "in_two_pieces", lambda *_: [])
    answer, asked = demo.Speaker.answer, iter(range(100))

    def wrong(self, ids, cache):
        tokens, milliseconds = answer(self, ids, cache)
        return ([0] * len(tokens), milliseconds) if next(asked) == 6 else (tokens, milliseconds)

    monkeypatch.setattr(demo.Speaker, "answer", wrong)
    assert not demo.run(tmp_path, keep=False)
    assert "NOT the same" in capsys.readouterr().out
