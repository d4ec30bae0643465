"""Other users of the host: what they may see of a server that asks for no token, and who counts as one."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # another user can import nothing
import io
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import lmtier.tools.commands.watching  # noqa: F401
from lmtier.client.client import Client
from lmtier.errors import TierError
from lmtier.server.peers import user_of
from lmtier.tools.cli import main
from lmtier.wire.resp import Error, encode_command
from tests.server.other_user import USER, as_user, needs_root
from tests.server.process import Served, Wire, served, until

pytestmark = needs_root
KEY = "ab" * 32
COMMANDS = [
    *("GET name", "SET name other", "MGET name", "KEYS *", "SCAN 0", "DBSIZE", "FLUSHALL", "MULTI", "PING"),
    *("INFO", "CONFIG GET *", "CLIENT LIST", "CLIENT KILL ID 1", "COMMAND COUNT", "HELLO 3", "AUTH guess"),
    *(
        "HELLO 2 AUTH default guess",
        "LMTIER.HELLO 1",
        "LMTIER.CALL /api/changes",
        f"LMTIER.READ {KEY}.L0-1H0-1",
    ),
    *("LMTIER.CALL /api/stats", "LMTIER.CALL /api/clear", "LMTIER.CALL /api/changes", "NOTHING"),
]
PAGES = dict.fromkeys(("/", "/api/stats", "/api/view", "/api/explain", "/version", "/nothing"), 403)
OPEN = dict.fromkeys(("/metrics", "/healthz", "/health", "/readyz"), 200)


def ask(address: Any, commands: list[str]) -> list[Any]:
    """The answers to all of them, on one connection."""
    with Wire(address) as wire:
        return [wire.ask(*each.split()) for each in commands]


def get(address: str, paths: list[str]) -> dict[str, tuple[int, str]]:
    found = {}
    for path in paths:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as page:
                found[path] = page.status, page.read().decode()
        except urllib.error.HTTPError as error:
            found[path] = error.code, error.read().decode()
    return found


def hint(address: str) -> int:
    request = urllib.request.Request(f"http://{address}/api/hints", b"{}")
    request.add_header("Content-Type", "application/json")
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=20)
    raised.value.close()
    return raised.value.code


def tool(*words: str) -> tuple[int, str]:
    """A command of lmtier: its exit code, and what it says."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        return main(list(words)), said.getvalue()


@pytest.fixture
def server(tmp_path: Path):
    with served(tmp_path, http="127.0.0.1:0") as server:
        yield server


def test_another_user_of_the_host_gets_only_a_sentence(server: Served):
    server.ask("SET", "name", "value")
    for said, answer in zip(COMMANDS, as_user(USER, ask, server.address, COMMANDS), strict=True):
        if said != "NOTHING":
            assert isinstance(answer, Error), (said, answer)
            assert answer.startswith(f"FOREIGN you are user {USER}"), (said, answer)
            assert "insecure = true" in answer
    again = as_user(USER, ask, server.address, ["RESET", "GET name"])
    assert again[0] == "RESET"
    assert again[1].startswith("FOREIGN"), "RESET gives no rights"
    assert server.ask("GET", "name") == b"value"


def test_another_user_reads_numbers_and_no_page(server: Served):
    found = as_user(USER, get, server.where["http"], [*PAGES, *OPEN])
    assert {path: status for path, (status, _) in found.items()} == PAGES | OPEN
    assert str(USER) in found["/"][1]
    assert as_user(USER, hint, server.where["http"]) == 403
    own = get(server.where["http"], [*PAGES])
    assert [status for status, _ in own.values()] == [200, 200, 200, 200, 200, 404]


def test_another_user_gets_no_http_from_the_redis_port(server: Served):
    """Also not what the listener for HTTP gives every user: who has closed that one shows it to nobody."""
    paths = [*PAGES, *OPEN, "/api/pins", "/api/models", "/api/sessions"]
    found = as_user(USER, get, "{}:{}".format(*server.address), paths)
    assert {path: status for path, (status, _) in found.items()} == dict.fromkeys(paths, 403)
    assert all(str(USER) in said for _, said in found.values())


def test_public_metrics_name_no_key_value_or_salt(tmp_path: Path):
    shares = {"batch": {"salt": "a-salt-of-a-tenant", "share": 0.5}}
    with served(tmp_path, http="127.0.0.1:0", config={"shares": shares}) as server:
        server.ask("SET", "the-name", "the-value")
        text = as_user(USER, get, server.where["http"], ["/metrics"])["/metrics"][1]
        assert "lmtier_values_total" in text
        assert not any(each in text for each in ("the-name", "the-value", "a-salt-of"))


def test_other_users_are_served_by_permission_or_token(tmp_path: Path):
    with served(tmp_path, insecure=True, unix=str(tmp_path / "socket")) as server:
        assert as_user(USER, ask, server.address, ["SET name value", "GET name"]) == ["OK", b"value"]
    (tmp_path / "admin").write_text("sesame")
    with served(tmp_path, admin_token_file=str(tmp_path / "admin")) as server:
        server._token = "sesame"  # for the check at the end
        said = as_user(USER, ask, server.address, ["GET name", "AUTH sesame", "GET name"])
        assert said[0].startswith("FOREIGN")
        assert said[1:] == ["OK", None]
    with served(tmp_path, token="sesame") as server:
        said = as_user(USER, ask, server.address, ["GET name", "AUTH sesame", "GET name"])
        assert said == [Error("NOAUTH Authentication required."), "OK", None]


def test_an_open_unix_socket_asks_who_its_callers_are(tmp_path: Path, request):
    folder = Path("/tmp") / f"lmtier-{os.getpid()}"
    folder.mkdir()
    request.addfinalizer(folder.rmdir)
    folder.chmod(0o755)
    with served(tmp_path, unix=str(folder / "socket")) as server:
        path = server.where["unix"]
        Path(path).chmod(0o666)
        assert all(each.startswith("FOREIGN") for each in as_user(USER, ask, path, COMMANDS[:-1]))
        with Client(path) as own:
            assert own.flush()

        assert f"you are user {USER}" in as_user(USER, refused, path)
    Path(path).unlink(missing_ok=True)


def refused(path: str) -> str:
    with pytest.raises(TierError) as raised:
        Client(path)
    return str(raised.value)


@pytest.mark.parametrize("words", [("ping",), ("stats",), ("clear", "--all")], ids=" ".join)
def test_another_users_command_gets_a_sentence_and_code_2(tmp_path: Path, words: Any):
    with served(tmp_path) as server:
        where = server.where["redis"]
        code, said = as_user(USER, tool, *words, "--server", where)
        assert (code, said.count("\n")) == (2, 1), said
        assert f"{where} refuses you: you are user {USER}" in said
        assert tool(*words, "--server", where)[0] == 0


def leave(address: Any) -> None:
    """Ask, and be gone before the server looks."""
    with socket.create_connection(address) as wire:
        wire.sendall(encode_command("FLUSHALL"))


def test_a_user_who_leaves_at_once_is_still_another_user(tmp_path: Path):
    """Older kernels say of a socket that was closed that it is root's."""
    with served(tmp_path) as server:
        server.ask("SET", "name", "value")
        server.process.send_signal(signal.SIGSTOP)
        as_user(USER, leave, server.address)
        server.process.send_signal(signal.SIGCONT)
        assert server.ask("GET", "name") == b"value"


PAIRS = [
    ("127.0.0.1", "127.0.0.1", socket.AF_INET),
    ("::1", "::1", socket.AF_INET6),
    ("::ffff:127.0.0.1", "127.0.0.1", socket.AF_INET),
    ("127.0.0.1", "::ffff:127.0.0.1", socket.AF_INET6),
]


def hold(family: int, address: Any) -> None:
    with socket.socket(family) as wire:
        wire.connect(address)
        wire.recv(1)


@pytest.mark.parametrize(("listens", "asked", "family"), PAIRS, ids=str)
def test_the_kernel_says_whose_a_connection_is(listens: str, asked: str, family: int):
    with socket.socket(socket.AF_INET6 if ":" in listens else socket.AF_INET) as listener:
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((listens, 0))
        listener.listen()
        address = asked, listener.getsockname()[1]
        for user in (USER, 0):
            thread = threading.Thread(target=as_user, args=(user, hold, family, address))
            thread.start()
            ours, _ = listener.accept()
            with ours:
                assert user_of(ours) == user
            thread.join()
        with socket.socket(family) as wire:
            wire.connect(address)
            ours, _ = listener.accept()
            with ours:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                wire.close()
                until(lambda: user_of(ours) is None)


def test_finding_a_connections_user_takes_constant_work(tmp_path: Path):
    """It looks one socket up: counted in bytes that it answers, as a list of all would grow."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(listener.getsockname()))
            ours, _ = listener.accept()
            stack.enter_context(ours)
            assert user_of(ours) == os.geteuid()
