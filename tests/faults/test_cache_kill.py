"""kill -9 of a process that serves from a whole cache: capacity, tails and heads, and bytes, as before."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.layout import PAGE, Layout, form_of, stored_size

LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=32, dtype="fp16", block_tokens=4, chunk_tokens=16, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
SIZE = LAYOUT.nbytes(LAYOUT.whole)
ON_DISK = 40
CHAINS = [[hashlib.sha256(f"{c}/{i}".encode()).digest() for i in range(12)] for c in range(8)]


def content(key: bytes) -> bytes:
    return (hashlib.sha256(key).digest() * SIZE)[:SIZE]


@contextmanager
def opened(root: str) -> Iterator[Cache]:
    tiers = [f"cpu://?capacity={20 * (SIZE + PAGE)}", f"disk://{root}?capacity={ON_DISK * stored_size(SIZE)}"]
    cache = Cache(Config(tiers=tiers, chunk_tokens=16, prefault=False, load_deadline=30.0))
    try:
        yield cache
    finally:
        cache.close()


def serve(root: str, seed: int, said: Connection) -> None:
    """Look up, load and store chains at random until killed. Says which chunks reached the disk."""
    chance = random.Random(seed)
    with opened(root) as cache:
        while True:
            chain = chance.choice(CHAINS)[: chance.randint(1, 12)]
            match = cache.wait(cache.match(chain, FORM))
            for entry in match.run:
                if bytes(cache.slab.view(entry.offsets[0], SIZE)) != content(entry.key):
                    said.send("wrong")
            cache.release(match)
            reservation = cache.reserve(chain, FORM)
            for key, offsets in reservation.places:
                cache.slab.view(offsets[0], SIZE)[:] = content(key)
            cache.commit(reservation)
            cache.step()
            said.send("served")


@pytest.mark.parametrize("loops", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_after_a_kill_visible_kv_is_right_and_in_capacity(tmp_path: Path, loops: int):
    root, chance = str(tmp_path / "kv"), random.Random(3)
    fork = multiprocessing.get_context("fork")
    served = found = 0
    for seed in range(20 * loops):
        if seed >= loops and found > 5 * loops:
            break  # on a slow disk it takes more of them
        ours, theirs = fork.Pipe()
        child = fork.Process(target=serve, args=(root, seed, theirs))
        child.start()
        theirs.close()
        for _ in range(chance.randint(1, 60)):
            word = ours.recv()
            assert word == "served", word
            served += 1
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        while ours.poll():  # what it said before it died
            try:
                assert ours.recv() == "served"
                served += 1
            except EOFError:
                break
        with opened(root) as cache:
            files = [file.stat().st_size for file in Path(root).rglob("*.L*")]
            assert sum(files) == cache.stats()["disk"]["used"] <= ON_DISK * stored_size(SIZE)
            assert not os.listdir(f"{root}/partial")
            for chain in CHAINS:
                match = cache.wait(cache.match(chain, FORM))
                found += match.chunks
                for entry in match.run:
                    assert bytes(cache.slab.view(entry.offsets[0], SIZE)) == content(entry.key)
                cache.release(match)
            cache.check()
            assert cache.metrics.value("lmtier_missed_tokens_total", reason="corrupt") == 0
    assert served > 3 * loops
    assert found > 5 * loops
