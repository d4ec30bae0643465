"""Hosts on one machine: network namespaces with one link each to one bridge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.server.process import until

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
BRIDGE = "lmtier0"


def shell(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True)


def make_bridge() -> None:
    shell("ip", "link", "set", "lo", "up")
    shell("ip", "link", "add", BRIDGE, "type", "bridge")
    shell("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
    shell("ip", "link", "set", BRIDGE, "up")


class Host:
    """A namespace. If it is `far`, its link can delay and lose frames, and is slower."""

    def __init__(self, number: int, folder: Path, *, far: bool = False) -> None:
        self.address = f"{NETWORK}.{number}"
        self.folder = folder
        folder.mkdir(parents=True)
        self._link = f"link{number}"
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.inside = ["nsenter", "--target", str(self._holder.pid), "--net"]
        here = Path("/proc/self/ns/net").readlink()
        until(lambda: Path(f"/proc/{self._holder.pid}/ns/net").readlink() != here)
        self._wire: subprocess.Popen[str] | None = None
        if far:
            end = f"end{number}"
            self._wire = _wire(self._link, end)
            shell("ip", "link", "set", end, "netns", self._holder.pid, "name", "eth0")
        else:
            peer = ("peer", "name", "eth0", "netns", self._holder.pid)
            shell("ip", "link", "add", self._link, "type", "veth", *peer)
        shell("ip", "link", "set", self._link, "master", BRIDGE, "up")
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            shell(*self.inside, "ip", *words)

    def cut(self) -> None:
        shell("ip", "link", "set", self._link, "down")

    def heal(self) -> None:
        shell("ip", "link", "set", self._link, "up")

    def slow_down(self, rate: str) -> None:
        """No more than so many bits a second, both ways."""
        limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
        shell("tc", "qdisc", "replace", "dev", self._link, *limit)
        shell(*self.inside, "tc", "qdisc", "replace", "dev", "eth0", *limit)

    def spoil(self, *, delay: float = 0.0, loss: float = 0.0) -> None:
        """The link of a far host: each frame takes so many seconds, and this part of them is lost."""
        assert self._wire is not None
        assert self._wire.stdin is not None
        self._wire.stdin.write(json.dumps({"delay": delay, "loss": loss}) + "\n")
        self._wire.stdin.flush()

    def close(self) -> None:
        if self._wire is None:
            shell("ip", "link", "delete", self._link)  # it would go with the namespace, but later
        else:
            self._wire.communicate()
        self._holder.kill()
        self._holder.wait()


def _wire(*ends: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.hosts.wire", *ends]
    wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert wire.stdout is not None
    assert wire.stdout.readline() == "ready\n", "this system has no TAP interfaces"
    return wire
