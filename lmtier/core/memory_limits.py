"""How much memory this process may use: that of the machine, or less if control groups limit it.

The kernel also grants a slab that is too large. It kills the process with SIGKILL when the slab fills.
The size of /dev/shm does not matter: a slab is not in a file system, whether others map it or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lmtier.errors import ConfigError, log, size_text

_UNLIMITED = 1 << 60
"""In version 1 of control groups a number near 2**63 means that there is no limit."""
_TAKEN = {False: ("total_rss", "total_shmem"), True: ("anon", "shmem")}
"""The memory that a group cannot give back, in version 1 and 2."""


class Limit(NamedTuple):
    nbytes: int
    taken: int
    """The bytes of these that are in use and cannot be reclaimed."""
    whose: str


def check(what: str, nbytes: int, root: Path = Path("/")) -> None:
    """Raise ConfigError if a slab of `nbytes` cannot be filled, and warn if it barely can.

    Other processes may free their memory, so that is no reason to refuse.
    """
    meminfo = _sizes(root / "proc/meminfo")
    total = meminfo.get("MemTotal", _UNLIMITED)
    machine = Limit(total, total - meminfo.get("MemAvailable", total), "this machine has")
    limits = [machine, *_groups(root)]
    lowest, rss = min(limits), _sizes(root / "proc/self/status").get("RssAnon", 0)
    max_bytes = lowest.nbytes + meminfo.get("SwapTotal", 0) - rss
    if nbytes > max_bytes:
        asked, there, used = map(size_text, (nbytes, lowest.nbytes, rss))
        raise ConfigError(
            f"{what}: {asked} is more than the {there} that {lowest.whose}, and this process uses {used} "
            "of it already: it would be killed when the slab fills; choose a smaller capacity"
        )
    tightest_limit = min(limits, key=lambda limit: limit.nbytes - limit.taken)
    if nbytes > tightest_limit.nbytes - tightest_limit.taken:
        log.warning(
            "lmtier: %s: of the %s that %s, %s are in use now, which leaves less than the slab needs: "
            "this process may be killed when the slab fills",
            *(what, size_text(tightest_limit.nbytes), tightest_limit.whose, size_text(tightest_limit.taken)),
        )


def _groups(root: Path) -> Iterator[Limit]:
    """The limits of the control groups that this process is in and can see."""
    paths: dict[bool, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths[not controllers] = path
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        is_unified = kind == "cgroup2"
        if is_unified in paths and (is_unified or (kind == "cgroup" and "memory" in options.split(","))):
            mount_root, mount_point = mount.split(" ")[3:5]
            # Of a group in another name space only its mount point is visible.
            group_path = Path(paths[is_unified])
            inside = group_path.relative_to(mount_root) if group_path.is_relative_to(mount_root) else Path()
            folder = root / mount_point.lstrip("/")
            for ancestor in [inside, *inside.parents]:
                yield from _limit(folder / ancestor, is_unified)


def _limit(group: Path, is_unified: bool) -> Iterator[Limit]:
    file = group / ("memory.max" if is_unified else "memory.limit_in_bytes")
    text = "".join(_lines(file))
    if text.isdigit() and int(text) < _UNLIMITED:
        stat = dict(line.split() for line in _lines(group / "memory.stat"))
        taken = sum(int(stat.get(name, 0)) for name in _TAKEN[is_unified])
        yield Limit(int(text), taken, f"{file} allows")


def _sizes(file: Path) -> dict[str, int]:
    """Reads lines like `MemTotal:  24684092 kB`."""
    words = (line.split() for line in _lines(file))
    return {columns[0].rstrip(":"): int(columns[1]) << 10 for columns in words if columns[2:] == ["kB"]}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # the file does not exist here
        return []
