"""Secrets by role: who may look, store and administer; wrong tokens; the audit."""

import json
import os
import re
import signal
import urllib.error
import urllib.request
from typing import Any

import pytest

from lmtier.config import ServerConfig
from lmtier.errors import ConfigError
from lmtier.observe.metrics import Metrics
from lmtier.server.access import NAMES, Role, RoleTokens, WrongTokens, own_token
from lmtier.tools.cli import main
from lmtier.wire.resp import Error
from tests.server.process import Wire, served, speak, until

WORDS = {Role.LOOK: "only-look", Role.ENGINE: "the-engines", Role.ADMIN: "administration"}
CALLS: dict[Role, list[tuple[str, Any]]] = {
    Role.LOOK: [("/api/stats", None), ("/api/explain", None), ("/api/pins", None), ("/api/models", None)],
    Role.ENGINE: [("/api/sessions", None), ("/api/hints", {})],
    Role.ADMIN: [
        ("/api/clear", {}),
        ("/api/pin", {"name": "system", "keys": ["ab" * 32]}),
        ("/api/unpin", {"name": "system"}),
        ("/api/forget", {"salt": "a-secret"}),
        ("/api/check", {}),
        ("/api/set", {"settings": {"log_level": "info"}}),
        ("/api/explain?tokens=true", None),
    ],
}
LOOK = [("PING",), ("INFO",), ("CLIENT", "LIST"), ("LMTIER.CALL", "/api/stats")]
ENGINE = [("SET", "name", "value"), ("GET", "name"), ("LMTIER.HELLO", "1"), ("SCAN", "0")]
ADMIN = [("FLUSHALL",), ("FLUSHDB",), ("LMTIER.CALL", "/api/clear")]


@pytest.fixture
def files(tmp_path):
    """The settings that name a file with each role's token."""
    for role, word in WORDS.items():
        (tmp_path / NAMES[role]).write_text(f"{word}\n")
    return {name: str(tmp_path / name) for name in NAMES.values()}


def refused(answer):
    return isinstance(answer, Error) and answer.startswith(("NOPERM", "NOAUTH"))


@pytest.mark.parametrize("role", WORDS)
def test_a_token_allows_its_role_and_those_below_it(tmp_path, files, role):
    with served(tmp_path, token=WORDS[Role.ADMIN], **files) as server, server.connect() as wire:
        wire.expect("OK", "AUTH", WORDS[role])
        for needed, commands in ((Role.LOOK, LOOK), (Role.ENGINE, ENGINE), (Role.ADMIN, ADMIN)):
            for command in commands:
                answer = wire.ask(*command)
                assert refused(answer) == (role < needed), (command, answer)
            for path, arguments in CALLS[needed]:
                status, answer = server.asks(path, arguments, WORDS[role])
                assert (status == 403) == (role < needed), (path, answer)


def test_without_an_admin_file_engines_tokens_administer(tmp_path):
    with served(tmp_path, token="one-for-all") as server, server.connect() as wire:
        assert refused(wire.ask("GET", "name"))
        wire.expect("OK", "AUTH", "one-for-all")
        wire.expect("OK", "FLUSHALL")


def test_without_an_engine_token_only_admins_need_one(tmp_path, files):
    admin = {"admin_token_file": files["admin_token_file"]}
    with served(tmp_path, **admin) as server, server.connect() as wire:
        server._token = WORDS[Role.ADMIN]  # for the check at the end
        wire.expect("OK", "SET", "name", "value")
        assert refused(wire.ask("FLUSHALL"))
        wire.expect("OK", "MULTI")
        assert refused(wire.ask("FLUSHALL"))
        assert wire.ask("EXEC").startswith("EXECABORT")
        wire.expect("OK", "AUTH", WORDS[Role.ADMIN])
        wire.expect("OK", "FLUSHALL")
        assert wire.ask("RESET") == "RESET"
        assert refused(wire.ask("FLUSHALL")), "RESET gives the rights back"


def test_the_command_line_sends_the_token_of_admins(tmp_path, files, capsys):
    admin, engine = files["admin_token_file"], files["token_file"]
    with served(tmp_path, admin_token_file=admin) as server:
        server._token = WORDS[Role.ADMIN]  # for the check at the end
        server.ask("SET", "name", "value")
        where = server.where["redis"]
        assert main(["clear", "--all", "--server", where]) == 1
        assert main(["clear", "--all", "--server", where, "--token-file", engine]) == 1
        said = capsys.readouterr().err
        assert "refuses this token: this token is wrong" in said
        assert server.ask("DBSIZE") == 1
        assert main(["clear", "--all", "--server", where, "--token-file", admin]) == 0
        assert server.ask("DBSIZE") == 0


def test_the_owner_of_the_unix_socket_may_do_everything(tmp_path, files):
    with (
        served(tmp_path, unix=str(tmp_path / "s"), token=WORDS[Role.ADMIN], **files) as server,
        Wire(server.where["unix"]) as wire,
    ):
        wire.expect("OK", "FLUSHALL")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({Role.ENGINE: "a", Role.ADMIN: "a"}, "token_file and admin_token_file hold the same token"),
        ({Role.LOOK: "a"}, "look_token_file without token_file protects nothing"),
        ({Role.LOOK: "a", Role.ADMIN: "b"}, "look_token_file without token_file protects nothing"),
    ],
)
def test_tokens_that_separate_nothing_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        RoleTokens(given)


def test_a_user_gets_the_best_token_whose_file_is_readable(tmp_path, files):
    assert own_token(ServerConfig(**files)) == WORDS[Role.ADMIN]
    os.unlink(files["admin_token_file"])
    assert own_token(ServerConfig(**files)) == WORDS[Role.ENGINE]
    assert own_token(ServerConfig()) is None
    os.unlink(files["token_file"])
    os.unlink(files["look_token_file"])
    with pytest.raises(ConfigError, match="admin_token_file"):
        own_token(ServerConfig(**files))


def test_sighup_reads_every_token_again(tmp_path, files):
    with served(tmp_path, token=WORDS[Role.ADMIN], http="127.0.0.1:0", **files) as server:
        for role, word in WORDS.items():
            (tmp_path / NAMES[role]).write_text(f"new-{word}")
        server.process.send_signal(signal.SIGHUP)

        def status(word):
            request = urllib.request.Request(f"http://{server.where['http']}/api/stats")
            request.add_header("Authorization", f"Bearer {word}")
            try:
                with urllib.request.urlopen(request, timeout=20) as response:
                    return response.status
            except urllib.error.HTTPError as error:
                return error.code

        until(lambda: status("new-only-look") == 200)
        assert status("only-look") == 401
        with server.connect() as wire:
            assert wire.ask("AUTH", WORDS[Role.ADMIN]).startswith("WRONGPASS")
            wire.expect("OK", "AUTH", "new-administration")
            wire.expect("OK", "FLUSHALL")
        server._token = "new-administration"


# ---- wrong tokens


def test_wrong_tokens_wait_ever_longer_and_right_ones_never():
    now = [100.0]
    wrong = WrongTokens(metrics := Metrics(), clock=lambda: now[0])
    waits = [wrong.register("redis", "10.0.0.9:1") - now[0] for _ in range(30)]
    assert waits[:3] == [0.25, 0.5, 0.75]
    assert waits[-1] == 5.0, "an answer waits at most so long"
    assert wrong.register("redis", "10.0.0.8:1") - now[0] == 0.25, "another host does not wait for that one"
    now[0] += 60
    assert wrong.register("redis", "10.0.0.9:1") - now[0] == 0.25, "it ends with its turn"
    for host in range(5000):
        wrong.register("redis", f"10.1.{host // 256}.{host % 256}:1")
    assert len(wrong._next) <= 1024
    assert metrics.value("lmtier_wrong_tokens_total", kind="redis") == 5032


@pytest.mark.parametrize("way", ["redis", "http"])
@pytest.mark.parametrize("path", ["/api/explain?tokens=true", "/api/stats"])
def test_every_call_that_checks_a_token_counts_wrong_ones(tmp_path, files, way, path):
    """Also where engines need no token, and a client without one would get an answer."""
    serving = {"admin_token_file": files["admin_token_file"], "http": "127.0.0.1:0"}
    with served(tmp_path, **serving) as server:
        server._token = WORDS[Role.ADMIN]  # for the check at the end
        host, _, port = server.where[way].rpartition(":")
        with Wire((host, int(port))) as wire:
            assert speak(wire.socket, path, token="guess")[0] == 401
        counts = urllib.request.urlopen(f"http://{server.where['http']}/metrics", timeout=20).read()
        assert b'lmtier_wrong_tokens_total{kind="http"} 1.0' in counts


def test_a_guesser_is_slowed_while_others_are_served(tmp_path):
    """Its guesses are counted and logged."""
    with served(tmp_path, token="right", log_format="json", http="127.0.0.1:0") as server:
        with server.connect() as guesser, server.connect() as other:
            other.expect("OK", "AUTH", "right")
            guesser.send(b"AUTH guess\r\nPING\r\n")
            other.expect("PONG", "PING")
            reply = guesser.reply()
            assert reply.startswith("WRONGPASS")
            assert refused(guesser.reply())
            assert guesser.ask("HELLO", "3", "AUTH", "default", "guess").startswith("WRONGPASS")
            guesser.expect("OK", "AUTH", "right")
        request = urllib.request.Request(f"http://{server.where['http']}/metrics")
        request.add_header("Authorization", "Bearer guess")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=20)
        request.add_header("Authorization", "Bearer right")
        with urllib.request.urlopen(request, timeout=20) as response:
            counts = response.read().decode()
        assert 'lmtier_wrong_tokens_total{kind="redis"} 2.0' in counts
        assert 'lmtier_wrong_tokens_total{kind="http"} 1.0' in counts
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        warned = [line["message"] for line in lines if line["level"] == "warning"]
        assert sum("127.0.0.1:" in each and "showed a wrong token" in each for each in warned) == 3
        assert "guess" not in server.log.read_text()


# ---- the audit


def test_the_audit_says_who_did_what_and_when(tmp_path, files):
    settings = {**files, "log_format": "json", "log_level": "error"}
    with served(tmp_path, token=WORDS[Role.ADMIN], **settings) as server:
        with server.connect() as wire:
            wire.expect("OK", "AUTH", WORDS[Role.ENGINE])
            wire.expect("OK", "CLIENT", "SETNAME", "ops")
            assert refused(wire.ask("FLUSHALL"))
            wire.expect("OK", "AUTH", WORDS[Role.ADMIN])
            wire.expect("OK", "FLUSHALL")
            wire.expect(b"false", "LMTIER.CALL", "/api/unpin", '{"name": "a\\nforged line"}')
            wire.expect("OK", "MULTI")
            wire.expect("QUEUED", "FLUSHDB")
            wire.ask("EXEC")
            me = wire.socket.getsockname()
        server.call("/api/clear", {"model": "qwen3", "force": False})
        until(lambda: len(server.log.read_text().splitlines()) >= 5)
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        facts = [(line["audit"], line["what"]) for line in lines if "audit" in line]
        assert facts == [
            ("refused", "FLUSHALL"),
            ("accepted", "FLUSHALL"),
            ("accepted", "/api/unpin name=a?forged line"),
            ("accepted", "FLUSHDB"),
            ("accepted", "/api/clear model=qwen3 force=False"),
        ]
        (who,) = {line["who"] for line in lines[1:4]}
        assert who == f"redis 'ops' at 127.0.0.1:{me[1]} (admin)"
        assert re.fullmatch(r"http 'client' at 127\.0\.0\.1:\d+ \(admin\)", lines[4]["who"])
        assert all(line["time"] for line in lines)
        assert WORDS[Role.ADMIN] not in server.log.read_text()


def test_the_audit_shows_no_salt(tmp_path):
    """It may be a secret."""
    with served(tmp_path, log_format="json") as server:
        server.call("/api/forget", {"salt": "a-secret", "seconds": 5})
        until(lambda: "/api/forget" in server.log.read_text())
        facts = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert "/api/forget salt=… seconds=5" in [line.get("what") for line in facts]
        assert "a-secret" not in server.log.read_text()


# ---- settings


def test_an_administrator_changes_all_settings_or_none(tmp_path, files):
    tiers = "cpu://?capacity=64MiB", f"disk://{tmp_path}/kv?capacity=1GiB"
    settings = {**files, "log_format": "json", "log_level": "warning"}
    with served(tmp_path, *tiers, token=WORDS[Role.ADMIN], **settings) as server:

        def change(**changes):
            return server.asks("/api/set", {"settings": changes})

        assert server.asks("/api/set", {"settings": {"cpu.capacity": "1MiB"}}, WORDS[Role.ENGINE])[0] == 403
        for number in range(40):
            server.ask("SET", f"name{number}", "x" * (1 << 20))
        assert change(**{"cpu.capacity": "8MiB", "disk.policy": "lru", "disk.ttl": "7d"}) == (
            200,
            ["cpu.capacity: 64 MiB -> 8 MiB", "disk.policy: auto -> lru", "disk.ttl: none -> 7d"],
        )
        until(lambda: server.report()["tiers"][0]["capacity"] == 8 << 20)
        report = server.report()
        assert report["tiers"][0]["used"] <= 8 << 20
        assert report["tiers"][1]["url"].endswith("capacity=1GiB&policy=lru&ttl=7d")
        for changes, said in (
            ({"cpu.capacty": "1GiB"}, "did you mean 'cpu.capacity'?"),
            ({"cpu.capacity": "1TiB"}, "the memory was taken at start"),
            ({"cpu.capacity": "1MiB", "log_level": "loud"}, "unknown log_level='loud'"),
            ({"chunk_tokens": "1"}, "cannot change while the server runs"),
            ({"cpu.capacity": 1}, "settings are names with texts"),
            ({}, "settings are names with texts"),
        ):
            status, answer = change(**changes)
            assert status == 400
            assert said in answer["error"]
        assert server.report()["tiers"][0]["capacity"] == 8 << 20
        assert change(log_level="debug") == (200, ["log_level: warning -> debug"])
        until(lambda: "log_level=debug" in server.log.read_text())
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        what = [line["what"] for line in lines if line.get("audit") == "accepted"]
        assert "/api/set cpu.capacity=8MiB disk.policy=lru disk.ttl=7d" in what


def test_the_set_command_shows_what_settings_were(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    with served(tmp_path, unix=str(tmp_path / "s")) as server:
        where = server.where["unix"]
        assert main(["set", "--server", where, "cpu.capacity=33554432", "cpu.ttl=7d", "log_level=error"]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[:2] == ["cpu.capacity: 64 MiB -> 32 MiB", "cpu.ttl: none -> 7d"]
        assert said[2].endswith(" -> error")
        assert main(["set", "--server", where, "cpu.capacity=1TiB"]) == 1
        refused = (
            f"lmtier: {where} answered: cpu: the memory was taken at start: at most 64 MiB is possible\n"
        )
        assert capsys.readouterr().err == refused
        assert server.report()["tiers"][0]["capacity"] == 32 << 20
        assert main(["set", "--server", server.where["unix"], "cpu.capacity"]) == 2
        assert "write it as name=value" in capsys.readouterr().err
