"""One table of exit codes: in the code, in --help and on the page of the server, and commands keep to it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmtier.tools.cli import main
from lmtier.tools.exits import Exit
from tests.server.process import PATIENCE
from tests.tools.test_prove import ReusesNothing, running

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)


def ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code as a shell has it."""
    try:
        code = process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
    return code if code >= 0 else 128 - code


def begin(*words: object, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMTIER_")}
    command = [sys.executable, "-m", "lmtier", *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=stdout, stderr=subprocess.DEVNULL, preexec_fn=_heed_interrupts
    )


def _heed_interrupts() -> None:
    """Who starts the tests in the background may have told them to ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def signalled(number: signal.Signals) -> int:
    """A command that is given a signal while it waits for a server.

    Others give up after five seconds, which a busy machine may need to send the signal.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        process = begin("forget", "--server", "{}:{}".format(*silent.getsockname()), "a tenant")
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)  # it has asked
            process.send_signal(number)
            return ended(process)


@pytest.mark.parametrize("code", Exit, ids=lambda code: code.name)
def test_a_command_ends_with_each_code_of_the_table(code: Exit):
    match code:
        case Exit.DONE:
            found = ended(begin("config"))
        case Exit.NO:
            with socket.socket() as taken:  # nobody listens
                taken.bind(("127.0.0.1", 0))
                found = ended(begin("ping", "--server", "{}:{}".format(*taken.getsockname())))
        case Exit.MISUSE:
            found = ended(begin("sats"))
        case Exit.UNPROVEN:
            with running(ReusesNothing()) as url:
                found = main(["prove", url, "--short"])
        case Exit.TRY_AGAIN:
            with socket.create_server(("127.0.0.1", 0)) as other:
                where = "{}:{}".format(*other.getsockname())
                found = ended(begin("serve", "--listen", where, "--http", "", "-t", "cpu://?capacity=1MiB"))
        case Exit.INTERRUPTED:
            found = signalled(signal.SIGINT)
        case Exit.NO_READER:
            reads, writes = os.pipe()
            os.close(reads)
            found = ended(begin("config", stdout=writes))
            os.close(writes)
        case Exit.ENDED:
            found = signalled(signal.SIGTERM)
    assert found == code


def test_the_pages_and_help_have_the_table(capsys):
    page = (ROOT / "docs" / "SERVER.md").read_text()
    table = page.partition("| exit code | meaning |")[2].partition("\n\n")[0]
    assert ROW.findall(table) == [(str(int(code)), code.meaning) for code in Exit]
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(f"  {code:<3}  {code.meaning}\n" in said for code in Exit)
    proof = (ROOT / "docs" / "PROVE.md").read_text()
    table = proof.partition("| exit code | meaning |")[2].partition("\n\n")[0]
    assert [int(code) for code, _ in ROW.findall(table)] == [Exit.DONE, Exit.NO, Exit.MISUSE, Exit.UNPROVEN]
