"""kill -9 at any instant: what was acknowledged is there, and nothing else is; an oracle keeps count."""

import os
import random
import runpy
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from itertools import chain, repeat, takewhile
from pathlib import Path

import pytest

from lmtier.testing import load, scan
from lmtier_backends.disk import DiskTier

WRITER = Path(__file__).with_name("writer.py")
UNIVERSE = runpy.run_path(str(WRITER))["UNIVERSE"]
NUMBER = {each.name: number for number, each in enumerate(UNIVERSE)}
EITHER, PRESENT, ABSENT = "either", "present", "absent"


class Oracle:
    """What must, may and must not be in the directory, by what the writer said it began and ended."""

    def __init__(self) -> None:
        self.state: dict[int, str] = {}
        self.totals: Counter[str] = Counter()

    def hear(self, line: str) -> None:
        word, *numbers = line.split()
        number, victim = (*map(int, numbers), -1)[:2]
        again = word == "s" and self.state.get(number) == PRESENT  # it is there all the time
        if word in ("s", "d") and not again:
            self.state[number] = EITHER
        elif word in ("S", "D"):
            self.totals["acks"] += 1
            self.state[number] = PRESENT if word == "S" else ABSENT
        if victim >= 0:
            self.state[victim] = ABSENT if word == "S" else EITHER

    def compare(self, root: Path) -> None:
        """Reopen and load everything. What is there now is what the next writer starts from."""
        there = set()
        with closing(DiskTier(root)) as tier:
            self.totals["partial"] += len(os.listdir(root / "partial"))
            for name, stat in scan(tier).items():
                number = NUMBER.get(name, -1)
                self.totals["phantom"] += self.state.get(number, ABSENT) == ABSENT
                done, got = load(tier, name, stat.nbytes)
                self.totals["unreadable"] += name not in done.ok
                self.totals["wrong"] += name in done.ok and got != UNIVERSE[number].payload
                there.add(number)
        for number, state in self.state.items():
            self.totals["lost"] += state == PRESENT and number not in there
            self.state[number] = PRESENT if number in there else ABSENT


def kill_writers(root: Path, kill_at: Iterable[int], acks: int = 0) -> Counter[str]:
    """One writer after another on one directory; kill_at as in writer.py, 0 is a random moment.

    More of those follow until so many stores and deletions were acknowledged.
    """
    oracle, chance = Oracle(), random.Random(1)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(WRITER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        more = takewhile(lambda _: oracle.totals["acks"] <= acks, repeat(0, 1000))
        for seed, call in enumerate(chain(kill_at, more if acks else ())):
            writer.stdin.write(f"{root} {seed} {call}\n")
            writer.stdin.flush()
            for line in writer.stdout:
                word, _, rest = line.strip().partition(" ")
                if word == "pid" and not call:
                    kill = (int(rest), signal.SIGKILL)
                    threading.Timer(chance.uniform(0, 0.25), os.kill, kill).start()
                elif word == "end":
                    assert int(rest) == signal.SIGKILL, "the writer ended by itself"
                    break
                elif word != "pid":
                    oracle.hear(line)
            oracle.compare(root)
            oracle.totals["loops"] += 1
        writer.stdin.close()
    assert writer.returncode == 0
    print(dict(oracle.totals))
    return oracle.totals


def assert_sound(totals: Counter[str]) -> None:
    faults = ("lost", "wrong", "unreadable", "phantom", "partial")
    assert {fault: totals[fault] for fault in faults} == dict.fromkeys(faults, 0)


def test_killed_at_any_moment(tmp_path: Path):
    totals = kill_writers(tmp_path, [0] * 30, acks=300)
    assert_sound(totals)
    assert totals["acks"] > 300


def test_killed_at_each_file_call(tmp_path: Path):
    """The first ones are those of the start, then come stores, new and in place, and deletes."""
    assert_sound(kill_writers(tmp_path, range(1, 61)))


@pytest.mark.slow
def test_killed_at_any_moment_200_times_and_more(tmp_path: Path):
    totals = kill_writers(tmp_path, [0] * 200, acks=20_000)
    assert_sound(totals)
    assert totals["acks"] > 20_000
