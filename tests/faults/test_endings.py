"""However a process ends, it ends soon, and what is on disk is right: T26 and T28 of docs/RELIABILITY.md."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from lmtier.errors import TierError
from lmtier.format.layout import PAGE, Name
from lmtier.testing import load, sample, scan, store
from lmtier_backends.disk import DiskTier, Fault, verify
from tests.stopwatch import Stopwatch

CHILD = """
import os, signal, sys, threading
from lmtier.core.cache import Cache
from lmtier.config import Config
from lmtier.errors import MisuseError
from tests.faults.test_cache_kill import CHAINS, FORM, SIZE, content
from tests.sealed import seal_if_asked
seal_if_asked()
root, how, moment = sys.argv[1], sys.argv[2], int(sys.argv[3])
# A shell that starts tests in the background has them ignore these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
cache = Cache(Config(tiers=["cpu://?capacity=4MiB", f"disk://{root}?capacity=8MiB"], chunk_tokens=16))

def end():
    os.write(1, b"now\\n")
    match how:
        case "returns": pass
        case "sys.exit": sys.exit(0)
        case "raises": raise RuntimeError("on purpose")
        case "os._exit": os._exit(0)
        case "os.abort": os.abort()
        case "SIGTERM": os.kill(os.getpid(), signal.SIGTERM)
        case "SIGINT": os.kill(os.getpid(), signal.SIGINT)
        case "SIGHUP": os.kill(os.getpid(), signal.SIGHUP)
        case "close": cache.close()
        case "fork":
            for _ in range(3):
                child = os.fork()
                if child == 0:
                    sys.exit(0)
                assert os.waitpid(child, 0)[1] == 0
            cache.check()
        case "fork, and the child uses it":
            child = os.fork()
            if child == 0:
                try:
                    cache.match(CHAINS[0], FORM)
                except MisuseError:
                    cache.close()
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            cache.check()
        case "a thread of its own":
            threading.Thread(target=lambda: os.write(1, b"")).start()

for number, chain in enumerate(CHAINS * 4):
    if number == moment:
        end()
        sys.exit(0)
    match = cache.match(chain, FORM)
    cache.prefetch(match)
    reservation = cache.reserve(chain, FORM)
    for key, offsets in reservation.places:
        cache.slab.view(offsets[0], SIZE)[:] = content(key)
    cache.commit(reservation)
    cache.step()
    if number % 3:
        cache.release(match)
"""
WAYS = {
    **dict.fromkeys(("returns", "sys.exit", "os._exit", "close", "fork", "a thread of its own"), 0),
    "fork, and the child uses it": 0,
    "raises": 1,
    "os.abort": -signal.SIGABRT,
    "SIGTERM": -signal.SIGTERM,
    "SIGHUP": -signal.SIGHUP,
    "SIGINT": -signal.SIGINT,
}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.parametrize("how", WAYS)
def test_a_process_ends_soon_and_leaves_nothing_wrong(tmp_path: Path, how: str):
    """In the middle of loads and stores, with leases held; the next one finds only what is right."""
    longest = 0.0
    for moment in (1, 5, 17):
        root = tmp_path / "kv"
        words = [sys.executable, "-c", CHILD, str(root), how, str(moment)]
        with subprocess.Popen(
            words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            said = process.stdout.readline()
            watch = Stopwatch(process.pid)
            said += process.stdout.read()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # /proc still has it
            longest = max(longest, watch.seconds())
            status = process.wait(30)
        assert status == WAYS[how], said.decode()
        assert b"Fatal Python error" not in said.replace(b"Fatal Python error: Aborted", b"")
        report = verify(root)
        assert [each for each in report.findings if each.fault is not Fault.ORPHANED] == []
        with closing(DiskTier(root)) as tier:
            for name, stat in scan(tier).items():
                done, _ = load(tier, name, stat.nbytes)
                assert name in done.ok
    # `close` writes what still waits, however slow the disk is.
    assert longest < (30 if how == "close" else 5)


def test_a_server_ends_within_its_grace_under_load(tmp_path: Path):
    """In tests/server: values that are being received are finished, clients that do not end are left."""
    from tests.server.process import served

    with served(tmp_path, "cpu://?capacity=16MiB", grace=1.0) as server:
        wires = [server.connect() for _ in range(20)]
        for number, wire in enumerate(wires):
            wire.send(b"*3\r\n$3\r\nSET\r\n$2\r\nk%d\r\n$100000\r\n" % (number % 10) + bytes(5000))
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 5
        for wire in wires:
            wire.close()


# ---- T26: objects that were damaged on disk


@pytest.mark.unsealed
def test_all_that_was_damaged_is_found_by_whoever_reads_it(tmp_path: Path):
    """One in a hundred of 2,000 objects, in five ways. There is no scrub beside use: a read checks all it
    reads, and `lmtier verify` all there is."""
    chance, number = random.Random(7), 2000
    objects = {each.name: each for each in (sample(i, PAGE * (1 + i % 3)) for i in range(number))}
    root = tmp_path / "kv"
    with closing(DiskTier(root)) as tier:
        some = list(objects.values())
        for start in range(0, number, 100):
            assert not store(tier, *some[start : start + 100]).failed
    damaged: dict[Name, str] = {}
    for name in chance.sample(sorted(objects), number // 100):
        path = root / str(name)[62:64] / str(name)
        data = bytearray(path.read_bytes())
        way = chance.choice(("a bit of the header", "a bit of the payload", "cut", "zeros", "another's"))
        match way:
            case "a bit of the header":
                data[chance.randrange(200)] ^= 1 << chance.randrange(8)
            case "a bit of the payload":
                data[PAGE + chance.randrange(len(data) - PAGE)] ^= 1 << chance.randrange(8)
            case "cut":
                del data[-PAGE:]
            case "zeros":
                data[PAGE : 2 * PAGE] = bytes(PAGE)
            case _:
                other = chance.choice([each for each in sorted(objects) if each != name])
                data = bytearray((root / str(other)[62:64] / str(other)).read_bytes())
        path.write_bytes(data)
        damaged[name] = way
    began = time.monotonic()
    report = verify(root)
    took = time.monotonic() - began
    extra = [each for each in report.findings if Name.parse(each.path.name) not in damaged]
    assert not extra
    assert len(report.findings) == len(damaged)
    assert report.ok == number - len(damaged)
    found = set()
    with closing(DiskTier(root)) as tier:
        there = scan(tier)
        for name, stat in there.items():
            done, got = load(tier, name, stat.nbytes)
            if name in done.ok:
                assert got == objects[name].payload
            else:
                found.add(name)
        assert found | (objects.keys() - there.keys()) == damaged.keys()
        assert not found & scan(tier).keys(), "it stays where it is"
    ways = Counter(damaged.values())
    print(
        f"{len(damaged)} of {number} damaged {dict(ways)}: all found, "
        f"by verify in {took:.1f} s, and on reading"
    )


def test_a_child_that_ends_leaves_its_parent_the_directory(tmp_path: Path):
    with closing(DiskTier(tmp_path / "kv")):
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(TierError, match="is open in process"):
            DiskTier(tmp_path / "kv")
