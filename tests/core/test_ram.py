"""A slab that this process could not fill is refused before anything is served."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.memory_limits import check
from lmtier.errors import ConfigError

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup/memory")
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2 = "35 31 0:32 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate"


class Machine:
    """What a process sees of one, with 64 GiB of which 60 are free."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory(total=64, available=60)
        self.write("proc/self/status", f"Name:\tx\nRssAnon:\t{GIB >> 12} kB\nThreads:\t1\n")

    def memory(self, total: int, available: int, swap: int = 0) -> None:
        sizes = {"MemTotal": total, "MemAvailable": available, "SwapTotal": swap}
        lines = [f"{name}:   {number << 20} kB" for name, number in sizes.items()]
        self.write("proc/meminfo", "\n".join(lines) + "\nHugePages_Total:       0\n")

    def group(self, mount: str, line: str, **files: str) -> None:
        self.write("proc/self/mountinfo", f"22 1 8:1 / / rw - ext4 /dev/root rw\n{mount}\n")
        self.write("proc/self/cgroup", f"9:name=systemd:/init\n{line}\n")
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{name.replace('__', '/').replace('_of_', '.')}", text)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def most(self, caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
        """The largest slab, in GiB, that is taken without a word; and the largest that is taken."""
        quiet = taken = 0
        for size in range(1, 100):
            caplog.clear()
            try:
                check("tier 'x'", size * GIB, self.root)
            except ConfigError:
                continue
            taken = size
            quiet = quiet if caplog.records else size
        return quiet, taken


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_group_it_is_what_the_machine_has(machine: Machine, caplog):
    assert machine.most(caplog) == (60, 63)
    machine.memory(total=64, available=10, swap=8)
    assert machine.most(caplog) == (10, 71)


def test_a_group_of_version_2_and_those_above_it(machine: Machine, caplog):
    below = {"a__b__memory_of_max": "max\n", "a__memory_of_max": f"{16 * GIB}\n"}
    stat = f"anon {3 * GIB}\nfile {9 * GIB}\nshmem {GIB}\n"
    machine.group(V2.format(top="/"), "0::/a/b", **below, a__memory_of_stat=stat)
    assert machine.most(caplog) == (12, 15)


def test_a_group_of_version_1(machine: Machine, caplog):
    files = {"memory__a__memory_of_limit_in_bytes": f"{16 * GIB}\n"}
    files |= {"memory__memory_of_limit_in_bytes": f"{(1 << 63) - 4096}\n"}
    stat = f"rss 5\ntotal_rss {2 * GIB}\ntotal_shmem {GIB}\n"
    machine.group(V1.format(top="/"), "4:cpu,memory:/a", **files, memory__a__memory_of_stat=stat)
    assert machine.most(caplog) == (13, 15)


@pytest.mark.parametrize("line", ["4:memory:/docker/1", "4:memory:/elsewhere"])
def test_a_container_sees_its_own_group_where_it_is_mounted(machine: Machine, caplog, line: str):
    files = {"memory__memory_of_limit_in_bytes": f"{16 * GIB}\n"}
    machine.group(V1.format(top="/docker/1"), line, **files)
    assert machine.most(caplog) == (15, 15)


def test_where_nothing_is_said_everything_is_taken(tmp_path: Path):
    check("tier 'x'", 1 << 50, tmp_path)


def test_a_slab_beyond_the_machine_is_refused():
    with pytest.raises(ConfigError) as refused:
        Cache(Config(tiers=("cpu://?capacity=1024TiB",)))
    assert "tier 'cpu://?capacity=1024TiB': " in str(refused.value)
    assert "more than the" in str(refused.value)
    assert "choose a smaller capacity" in str(refused.value)


@pytest.fixture
def group() -> Iterator[Path]:
    """A real one, of 256 MiB."""
    place = CGROUP / f"lmtier-test-{os.getpid()}"
    try:
        place.mkdir()
        (place / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    yield place
    place.rmdir()


@pytest.mark.parametrize(("capacity", "says"), [("1GiB", "ConfigError"), ("64MiB", "listens")])
def test_a_real_group_is_heard_before_the_server_listens(group: Path, capacity: str, says: str):
    code = (
        "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from lmtier.config import Config, ServerConfig\nfrom lmtier.server.serve import Server\n"
        "config = Config(tiers=(f'cpu://?capacity={sys.argv[2]}',))\n"
        "Server(config, ServerConfig(listen='127.0.0.1:0', http=''))\nprint('listens')\nos._exit(0)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", code, str(group), capacity]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert says in done.stdout + done.stderr
    assert (str(group / "memory.limit_in_bytes") in done.stderr) == (says == "ConfigError")
