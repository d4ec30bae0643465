"""The request log: what was looked up, in a file that stays small, and never in the owner's way."""

import json
import os
import resource
import stat
import time

import pytest

from lmtier.client.client import Client
from lmtier.errors import ConfigError
from lmtier.format.layout import form_of
from lmtier.observe.metrics import Metrics
from lmtier.server import request_log
from lmtier.server.request_log import RequestLog
from lmtier.testing import opaque_layout
from lmtier.tools.sim.traces import read
from tests.server.process import served, until

KEYS = [os.urandom(32) for _ in range(50)]
FORM = form_of(opaque_layout(4096), (opaque_layout(4096).whole,))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "requests.jsonl"


def test_lookups_of_engines_are_logged_and_can_be_replayed(tmp_path, path):
    with served(
        tmp_path, unix=str(tmp_path / "socket"), config={"chunk_tokens": 1}, request_log=str(path)
    ) as server:
        began = time.time()
        with Client(server.where["unix"]) as client:
            for count, tokens in ((3, 3), (5, 6), (0, 1)):
                client.release(client.match(KEYS[:count], FORM, tokens=tokens))
        assert server.stop() == 0
    first, second, third = logged = lines(path)
    assert [each["input_length"] for each in logged] == [3, 6, 1]
    assert first["hash_ids"] == second["hash_ids"][:3]
    assert len(set(second["hash_ids"])) == 6
    assert third["hash_ids"][0] < 0, "a part of a chunk"
    assert set(second["hash_ids"]).isdisjoint(third["hash_ids"])
    assert all(began - 1 <= each["timestamp"] / 1000 <= time.time() + 1 for each in logged)
    assert all(0 <= each < 1 << 53 for each in first["hash_ids"]), "also JavaScript can read it"
    assert [(each.tokens, len(each.blocks)) for each in read(path, block_tokens=1).requests] == [
        (3, 3),
        (6, 6),
        (1, 1),
    ]


def test_without_the_setting_nothing_is_written(tmp_path):
    with served(tmp_path, unix=str(tmp_path / "socket"), config={"chunk_tokens": 1}) as server:
        with Client(server.where["unix"]) as client:
            client.release(client.match(KEYS, FORM))
        assert server.stop() == 0
    assert not list(tmp_path.glob("*.jsonl"))


def test_it_shows_no_whole_key_and_only_to_its_owner(path):
    log = RequestLog(str(path), 1, Metrics())
    log.note(KEYS, 50)
    log.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert lines(path)[0]["hash_ids"] == [int.from_bytes(key[-8:], "little") >> 11 for key in KEYS]


def test_it_is_kept_to_two_files_of_a_size(path):
    log = RequestLog(str(path), 1, Metrics(), max_bytes=4000)
    for count in range(1, 40):
        log.note(KEYS[:count], count)
    log.close()
    assert sorted(path.parent.iterdir()) == [path, path.with_name(f"{path.name}.1")]
    newest = lines(path.with_name(f"{path.name}.1")) + lines(path)
    assert [each["input_length"] for each in newest] == list(range(40 - len(newest), 40))
    assert all(each.stat().st_size <= 4000 for each in path.parent.iterdir())


def test_a_restart_goes_on_in_the_same_file(path):
    for _ in range(2):
        log = RequestLog(str(path), 1, Metrics())
        log.note(KEYS[:1], 1)
        log.close()
    assert len(lines(path)) == 2


def test_a_partial_chunk_gets_a_new_number_after_a_restart(path):
    for _ in range(2):
        log = RequestLog(str(path), 1, Metrics())
        log.note(KEYS[:1], 2)
        log.close()
    first, second = (each["hash_ids"][-1] for each in lines(path))
    assert second < first < 0
    assert second > -(1 << 53), "also JavaScript can read it"


def test_a_disk_that_stalls_costs_lines_and_never_time(path, monkeypatch, caplog):
    """A pipe that nobody reads: the thread stands still in its write."""
    monkeypatch.setattr(request_log, "MAX_KEYS", 1000)
    monkeypatch.setattr(request_log, "_PATIENCE", 0.1)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    metrics = Metrics()
    log = RequestLog(str(path), 1, metrics)
    for _ in range(400):  # more than a pipe and the queue hold
        log.note(KEYS, 50)
        if metrics.value("lmtier_request_log_dropped_total"):
            break
    assert metrics.value("lmtier_request_log_dropped_total") > 0
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 5
    assert not caplog.text
    os.close(reader)  # which ends the thread: its pipe is broken


def test_a_disk_that_fails_ends_the_log_and_is_counted(path, caplog):
    path.symlink_to("/dev/full")
    metrics = Metrics()
    log = RequestLog(str(path), 1, metrics)
    log.note(KEYS, 50)
    until(lambda: "the request log stops" in caplog.text)
    log.note(KEYS, 50)
    log.close()
    assert metrics.value("lmtier_request_log_dropped_total") == 2


def test_a_disk_that_is_full_gets_no_half_of_a_line(path, caplog):
    """A limit of the process stands for the disk: it also ends a write in the middle."""
    log = RequestLog(str(path), 1, Metrics())
    log.note(KEYS, 50)
    until(lambda: path.stat().st_size)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        log.note(KEYS, 50)
        until(lambda: "the request log stops" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.close()
    assert "File too large" in caplog.text
    assert len(read(path, block_tokens=1).requests) == 1


def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"request_log .*: No such file or directory"):
        RequestLog(str(tmp_path / "nowhere" / "log"), 1, Metrics())
