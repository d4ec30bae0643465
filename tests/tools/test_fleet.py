"""Many servers on one screen: which of them needs help, and how they do together."""

import signal

import pytest

from lmtier.tools.cli import main
from lmtier.tools.console import parse_address
from lmtier.tools.fleet import FleetServer, ServerStatus, ask_all, lines_of
from tests.redis_process import free_port
from tests.server.process import served
from tests.stopping import stop


def hits(asked, hit):
    return {"time": 9e8, "seconds": 900.0, "asked": asked, "found": {"cpu": hit}}


WELL = ServerStatus("gpu-1:6380", now=hits(10, 9), lately=hits(1000, 900), used=0.5, busy=0.1, clients=8)
POOR = WELL._replace(name="gpu-2:6380", lately=hits(1000, 100))
DOWN = WELL._replace(name="gpu-3:6380", state="bad", verdict="redis is down: loads have failed for 3 min")
GONE = ServerStatus("gpu-4:6380", "is not there")
STARTS = WELL._replace(name="gpu-5:6380", state="warn", verdict="not ready: the scan of disk is not finished")


def test_the_server_that_needs_help_most_is_first():
    looks = sorted([WELL, POOR, DOWN, GONE, STARTS], key=lambda look: look.health_order)
    assert looks == [GONE, DOWN, STARTS, POOR, WELL]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50), (60, 10), (40, 6)])
def test_it_fits_every_screen(columns, rows):
    looks = [WELL._replace(name=f"a-host-with-a-long-name-{i}.cluster.example:6380") for i in range(60)]
    lines = lines_of([GONE, DOWN, *looks], columns, rows)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns
    assert lines[-1].startswith("and ")


def test_a_line_describes_one_server_and_the_first_all():
    title, _, _, gone, down, poor, well = lines_of([GONE, DOWN, POOR, WELL], 120, 24)
    assert title.startswith("4 servers, hit rate of the last minutes 63 %, 1 not reached, 1 needs help")
    assert gone.split()[0] == "gpu-4:6380"
    assert gone.endswith("is not there")
    assert "redis is down: loads" in down
    assert poor.split()[:5] == ["gpu-2:6380", "90", "%", "10", "%"]
    assert well.endswith("works")


def test_an_unreadable_certificate_hides_no_other_server(tmp_path, capsys):
    with served(tmp_path) as server:
        name = "{}:{}".format(*server.address)
        encrypted, missing = f"rediss://localhost:{server.address[1]}", str(tmp_path / "missing")
        assert main(["top", "--server", name, "--server", encrypted, "--ca", missing, "--times", "1"]) == 0
    said = capsys.readouterr().out
    assert "TLS with " in said
    assert any(line.startswith(name) and line.endswith("works") for line in said.splitlines())


def test_a_server_that_hangs_hides_no_other(tmp_path, capsys):
    """Servers are asked together."""
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    with (
        served(tmp_path / "one") as one,
        served(tmp_path / "two") as two,
        served(tmp_path / "three") as three,
    ):
        names = ["{}:{}".format(*each.address) for each in (one, two, three)]
        gone = f"127.0.0.1:{free_port()}"
        assert (
            main(["top", *(word for each in (*names, gone) for word in ("--server", each)), "--times", "1"])
            == 0
        )
        said = capsys.readouterr().out
        assert "4 servers" in said
        assert "1 not reached" in said
        lines = said.splitlines()
        assert lines[3].startswith(gone), "the worst first"
        assert "does not answer" in lines[3]
        assert all(any(line.startswith(name) and line.endswith("works") for line in lines) for name in names)
        hosts = [FleetServer(parse_address(name)) for name in names]
        ask_all(hosts)
        stop(three.process.pid)
        try:
            looks = ask_all(hosts)
        finally:
            three.process.send_signal(signal.SIGCONT)
        assert looks[0].name == names[2]
        assert "did not answer" in looks[0].trouble
        assert [look.trouble for look in looks[1:]] == ["", ""]
        assert not ask_all(hosts)[0].trouble, "it is back"
