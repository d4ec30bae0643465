"""Power loss under the disk tier: every write is recorded, and replayed as a machine might have lost it.

The tier does not wait for the disk (no fsync), so after a power loss only this is promised: what can be
read is right, and the directory can be used. A state after a loss is made from the record:

    pages      each 4 KiB page of each write is there, or else what lay there before
    directory  "journal": a first part of all creations, renames and deletions, in their order, as journaling
               file systems keep it; "chaos": of each file a first part of its own, whatever became of others
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lmtier.format.layout import PAGE
from lmtier.testing import Sample, delete, load, pages, sample, scan, store
from lmtier_backends import disk
from lmtier_backends.disk import DiskTier


class File:
    """One inode: the sizes it had, the pages that were written, the names it had, each with its moment."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int, bytes]] = []
        self.names: list[tuple[int, str | None]] = []


class Recorder:
    """In place of `os` in the disk tier: does what it is told, and notes what changes the disk."""

    def __init__(self) -> None:
        self.moment = 0
        self.files: list[File] = []
        self.at: dict[str, File] = {}
        self._open: dict[int, File] = {}
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _now(self) -> int:
        self.moment += 1
        return self.moment

    def open(self, path: str, flags: int, *mode: int, **where: int) -> int:
        with self._lock:
            fd = os.open(path, flags, *mode, **where)
            if flags & os.O_CREAT and str(path) not in self.at:
                file = self.at[str(path)] = File()
                file.names.append((self._now(), str(path)))
                self.files.append(file)
            if str(path) in self.at:
                self._open[fd] = self.at[str(path)]
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._open.pop(fd, None)
            os.close(fd)

    def posix_fallocate(self, fd: int, start: int, size: int) -> None:
        with self._lock:
            os.posix_fallocate(fd, start, size)
            self._open[fd].sizes.append((self._now(), start + size))

    def ftruncate(self, fd: int, size: int) -> None:
        with self._lock:
            os.ftruncate(fd, size)
            self._open[fd].sizes.append((self._now(), size))

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        with self._lock:
            done = os.pwritev(fd, buffers, offset)
            data, moment = b"".join(buffers)[:done], self._now()
            for start in range(0, done, PAGE):
                page = (offset + start) // PAGE
                self._open[fd].writes.append((moment, page, data[start : start + PAGE]))
            return done

    def rename(self, old: str, new: str, **where: int) -> None:
        with self._lock:
            os.rename(old, new, **where)
            moment, file = self._now(), self.at.pop(old)
            if (there := self.at.pop(new, None)) is not None:
                there.names.append((moment, None))
            file.names.append((moment, new))
            self.at[new] = file

    def unlink(self, path: str, **where: int) -> None:
        with self._lock:
            os.unlink(path, **where)
            self.at.pop(path).names.append((self._now(), None))


class Loss:
    """One moment at which the power went, and what of the record the disk had by then."""

    def __init__(self, record: Recorder, chance: random.Random) -> None:
        self.chance = chance
        self.end = chance.randint(1, record.moment)
        self.is_journal = chance.random() < 0.5
        self.lost = chance.choice((0.0, 0.02, 0.3, 0.9))
        """The part of the pages that never reached the disk."""
        self.found: dict[str, tuple[bytes, bool]] = {}
        """What is there: its bytes, and whether nothing of it was lost."""
        for file in record.files:
            self._add(file)

    def _add(self, file: File) -> None:
        end = self.end
        if not self.is_journal:
            moments = [moment for moment, _ in file.names if moment <= end] + [end]
            end = self.chance.choice(moments)
        names = [name for moment, name in file.names if moment <= end]
        if not names or names[-1] is None:
            return
        size = next((size for moment, size in reversed(file.sizes) if moment <= end), 0)
        data, whole, now = bytearray(size), bytearray(size), self.end
        for moment, page, content in file.writes:
            if moment <= now and (page + 1) * PAGE <= size:
                whole[page * PAGE : (page + 1) * PAGE] = content
                if self.chance.random() >= self.lost:
                    data[page * PAGE : (page + 1) * PAGE] = content
        self.found[names[-1]] = bytes(data), data == whole and end == self.end

    def write_to(self, root: Path) -> None:
        for path, (data, _) in self.found.items():
            (root / path).write_bytes(data)
            (root / path).chmod(0o600)


def versions(number: int) -> list[Sample]:
    """One name, several contents, as named values have it; the second is shorter."""
    first, second = sample(number, (1 + number % 5) * PAGE), sample(number, max(1, number % 3) * PAGE)
    payload = pages(second.room)
    payload[:] = random.Random(-number - 1).randbytes(second.room)
    return [first, Sample(second.header, payload)] if number % 4 == 0 else [first]


def record(root: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Stores, stores over others, stores again, deletions: some hundred writes."""
    chance, recorder = random.Random(seed), Recorder()
    there: dict[int, Sample] = {}
    with monkeypatch.context() as patch:
        patch.setattr(disk, "os", recorder)
        with closing(DiskTier(root, readers=1, writers=1)) as tier:
            for _ in range(60):
                number = chance.randrange(30)
                each = chance.choice(versions(number))
                if there and chance.random() < 0.2:
                    gone = chance.choice(sorted(there))
                    delete(tier, there.pop(gone).name)
                elif there and number not in there and chance.random() < 0.5:
                    gone = chance.choice(sorted(there))
                    store(tier, each, replaces=there.pop(gone).name)
                    there[number] = each
                else:
                    store(tier, each)
                    there[number] = each
    return recorder


CONTENTS = {each.name: [bytes(one.payload) for one in versions(n)] for n in range(30) for each in versions(n)}


def recover(root: Path, loss: Loss) -> Counter[str]:
    """Open what is left, read all of it, and store in it."""
    totals: Counter[str] = Counter(states=1)
    sure = {
        Path(path).name
        for path, (data, is_whole) in loss.found.items()
        if is_whole and Path(path).parent.name not in ("partial", "")
    }
    with closing(DiskTier(root, readers=1, writers=1)) as tier:
        for name, stat in scan(tier).items():
            done, got = load(tier, name, stat.nbytes)
            if name in done.ok:
                totals["read"] += 1
                totals["wrong"] += bytes(got[: stat.nbytes]) not in CONTENTS[name]
            else:
                totals["refused"] += 1
                totals["whole, and refused"] += str(name) in sure
        left = scan(tier)
        again = sample(1000)
        assert again.name in store(tier, again).ok
        assert load(tier, again.name, again.room)[1] == again.payload
        delete(tier, again.name)
        totals["not deleted"] += len(left) - totals["read"]
        totals["partial"] += len(os.listdir(root / "partial"))
    return totals


@pytest.mark.parametrize(
    "states",
    [
        pytest.param(300, id="300"),
        pytest.param(20_000, id="20,000", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_after_a_power_loss_nothing_wrong_is_read(
    tmp_path: Path, states: int, monkeypatch: pytest.MonkeyPatch
):
    totals: Counter[str] = Counter()
    for seed in itertools.count():
        old = tmp_path / f"old{seed}"
        recorded = record(old, seed, monkeypatch)
        root = tmp_path / f"new{seed}"
        DiskTier(root).close()
        for number in range(min(50, states - totals["states"])):
            for file in root.glob("*/*"):
                file.unlink()
            loss = Loss(recorded, random.Random(f"{seed} {number}"))
            loss.write_to(root)
            totals += recover(root, loss)
        if totals["states"] >= states:
            break
    print(dict(totals))
    faults = ("wrong", "whole, and refused", "not deleted", "partial")
    assert {fault: totals[fault] for fault in faults} == dict.fromkeys(faults, 0)
    assert totals["read"] > states
    assert totals["refused"] > states / 4
