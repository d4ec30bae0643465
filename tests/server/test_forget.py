"""`lmtier forget`, from a running server and without one: what it deletes, says, and does not show."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

import pytest

from lmtier.client.client import Client
from lmtier.format.keys import tenant
from lmtier.format.layout import Layout, form_of
from lmtier.tools.cli import main
from tests.sealed import hex_key, key_file
from tests.server.process import Wire, served, speak
from tests.server.test_console import ANY, Serve

A, B, S = tenant("alice"), tenant("bob"), tenant("a secret salt")
LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=64, dtype="bf16", block_tokens=16, chunk_tokens=16, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))


def keys(who: bytes, count: int) -> list[bytes]:
    return [b"mod_" + who + bytes(20) + i.to_bytes(4, "big") for i in range(count)]


def store(client: Client, names: list[bytes]) -> None:
    reservation = client.reserve(names, FORM)
    assert len(reservation.chunks) == len(names)
    for key, offsets in reservation.places:
        client.slab.view(offsets[0], FORM.slab_bytes)[:] = (key * FORM.slab_bytes)[: FORM.slab_bytes]
    client.commit(reservation)
    assert client.flush(20)


def chunks(client: Client, names: list[bytes]) -> int:
    match = client.match(names, FORM)
    client.release(match)
    return match.chunks


@pytest.fixture
def tiers(tmp_path: Path) -> list[str]:
    seal = f"seal=aes-256-gcm&key={key_file(tmp_path, 1)}&tenants={tmp_path}/tenants"
    return ["cpu://?capacity=4MiB", f"disk://{tmp_path}/kv?capacity=1GiB&{seal}"]


CONFIG = {"chunk_tokens": 16, "shares": {"someone": {"salt": "a secret salt", "share": 0.1}}}


def test_a_running_server_forgets_and_reports_the_outcome(tmp_path, tiers, capsys):
    path = str(tmp_path / "sock")
    with served(tmp_path, *tiers, config=CONFIG, unix=path) as server:
        with Client(path) as client:
            for who in (A, B, S):
                store(client, keys(who, 3))
            assert main(["forget", "alice", "--server", path]) == 0
            out = capsys.readouterr().out
            assert out.startswith(f"tenant {A.hex()} is forgotten\n")
            assert "unreadable for everyone, also in backups" in out
            assert "Engines keep KV in their own memory" in out
            assert [chunks(client, keys(who, 3)) for who in (A, B, S)] == [0, 3, 3]
            assert main(["forget", "--share", "someone", "--server", path, "--json"]) == 0
            told = json.loads(capsys.readouterr().out)
            assert (told["tenant"], told["chunks"], told["in_use"]) == (S.hex(), 3, 0)
            (disk,) = told["tiers"]
            assert disk == {"tier": "disk", "sealed": "tenant", "chunks": 3, "keys": 1, "problem": ""}
            assert [chunks(client, keys(who, 3)) for who in (A, B, S)] == [0, 3, 0]
        log = server.log.read_text()
    assert "alice" not in log
    assert "a secret salt" not in log


def test_no_key_is_shown_anywhere(tmp_path, tiers):
    """Not in the list of processes, the environment, the log, a metric, or an answer."""
    settings = (*ANY, "--unix", tmp_path / "sock", "--set", "chunk_tokens=16", "--set", "prefault=false")
    server = Serve(tmp_path / "log", *settings, *(word for tier in tiers for word in ("--tier", tier)))
    try:
        with Client(str(tmp_path / "sock")) as client:
            store(client, keys(A, 2))
        process = Path(f"/proc/{server.process.pid}")
        shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        assert b"aes-256-gcm" in shown
        with urllib.request.urlopen(f"http://{server.where['http']}/metrics") as answer:
            shown += answer.read()
        host, _, port = server.redis.rpartition(":")
        with Wire((host, int(port))) as wire:
            for words in (("INFO",), ("CONFIG", "GET", "*")):
                shown += repr(wire.ask(*words)).encode()
        for path in ("stats", "models", "pins", "sessions"):
            with Wire((host, int(port))) as wire:
                shown += repr(speak(wire.socket, f"/api/{path}")).encode()
    finally:
        server.end()
    shown += server.log.encode() + server.screen.encode()
    assert hex_key(1).encode() not in shown.lower()


def test_sealed_values_survive_and_hide_their_names(tmp_path, tiers):
    for turn in range(2):
        with served(tmp_path, *tiers) as server:
            if not turn:
                assert server.ask("SET", "a name to look for", "the words of a prompt") == "OK"
            assert server.ask("GET", "a name to look for") == b"the words of a prompt"
            assert server.ask("KEYS", "*") == [b"a name to look for"]
            assert server.stop() == 0
    (path,) = (tmp_path / "kv").glob("??/*")
    data = path.read_bytes()
    assert b"a name" not in data
    assert b"prompt" not in data


def test_without_a_server_the_tiers_of_the_settings_forget(tmp_path, tiers, capsys):
    path = str(tmp_path / "sock")
    with served(tmp_path, *tiers, config=CONFIG, unix=path) as server, Client(path) as client:
        store(client, keys(A, 3))
        store(client, keys(B, 3))
        assert main(["forget", "alice", "-t", tiers[1]]) == os.EX_TEMPFAIL
        assert f"is open in process {server.process.pid}" in capsys.readouterr().err
    salt = tmp_path / "salt"
    salt.write_bytes(b"alice\r\n")
    assert main(["forget", "--salt-file", str(salt), "-t", tiers[1], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tiers"] == [{"tier": "disk", "sealed": "tenant", "chunks": 3, "keys": 1, "problem": ""}]
    with served(tmp_path, *tiers, config=CONFIG, unix=path), Client(path) as client:
        assert [chunks(client, keys(who, 3)) for who in (A, B)] == [0, 3]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--id", "xyz"], "a tenant has 8 hexadecimal digits"),
        (["--salt-file", "/nowhere"], "--salt-file /nowhere: "),
        ([""], "requests without a salt belong to no tenant"),
        (["alice", "--offline"], "the settings name no tier below memory"),
    ],
)
def test_a_mistake_gets_one_sentence(words, said, capsys, monkeypatch):
    monkeypatch.delenv("LMTIER_TIERS", raising=False)
    assert main(["forget", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_server_refuses_what_is_no_tenant(tmp_path):
    with served(tmp_path) as server:
        for words, said in (
            ({"id": "00000000"}, "requests without a salt belong to no tenant"),
            ({"id": "0000"}, "the id of a tenant has 4 bytes, not 2"),
            ({"id": "xy"}, "id='xy' is not hexadecimal"),
            ({"share": "x"}, "this server has no share of that name"),
            ({"everyone": "x"}, "/api/forget takes id, salt, share, seconds: got an unexpected "),
            ({"id": "0000", "salt": "x"}, "/api/forget takes one of id, salt and share"),
            ({}, "/api/forget takes one of id, salt and share"),
            ({"salt": "x", "seconds": 1e9}, "seconds=1000000000.0 is more than a day"),
        ):
            status, answer = server.asks("/api/forget", words)
            assert (status, answer["error"][: len(said)]) == (400, said)
        told = server.call("/api/forget", {"salt": "alice", "seconds": 1})
        assert (told["tenant"], told["tiers"]) == (A.hex(), [])
