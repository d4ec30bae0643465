"""Who is told that a chunk is nowhere can believe it; whoever cannot be told that has to ask."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.presence import SLOTS, Presence, PresenceReader
from lmtier.testing import MemoryTier


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def neighbour(number: int) -> bytes:
    """Different keys of the same count."""
    return number.to_bytes(4, "little") * 4 + key(0)[16:]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.booleans()), max_size=60))
def test_what_is_there_is_never_said_to_be_lacking(changes):
    presence = Presence()
    presence.trust()
    look, held = PresenceReader(presence.fd), set()
    for comes, number, alike in changes:
        name = neighbour(number) if alike else key(number + 1)
        if comes and name not in held:
            held.add(name)
            presence.add(name)
        elif not comes and name in held:
            held.discard(name)
            presence.drop(name)
        assert not any(map(look.lacks, held))
    for name in held:
        presence.drop(name)
    assert look.lacks(key(0)), "a count went up more often than down"
    assert look.lacks(key(1))


def test_a_count_that_ran_over_says_nothing_any_more():
    presence = Presence()
    presence.trust()
    look = PresenceReader(presence.fd)
    for number in range(300):
        presence.add(neighbour(number))
    for number in range(299):
        presence.drop(neighbour(number))
    assert not look.lacks(neighbour(299))


def test_only_the_owner_can_write():
    presence = Presence()
    presence.add(key(1))
    with pytest.raises(TypeError, match="read-only"):
        PresenceReader(presence.fd)._counts[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(presence.fd, SLOTS, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(presence.fd, b"1", 0)
    presence.drop(key(1))


def test_a_reader_cannot_open_it_again_to_write():
    """Root can open every file: it asks without that right here."""
    program = (
        "import os; from lmtier.core.presence import Presence; table = Presence()\n"
        "at = f'/proc/self/fd/{table.fd}'\n"
        "os.close(os.open(at, os.O_RDONLY))\n"
        "try: os.open(at, os.O_RDWR)\n"
        "except PermissionError: print('refused')"
    )
    without = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    said = subprocess.run([*without, sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout == "refused\n", said


def test_keys_of_one_model_and_tenant_are_spread():
    counts = Counter(bytes(hashlib.sha256(b"%d" % n).digest()[16:19]) for n in range(1000))
    presence = Presence()
    presence.trust()
    look = PresenceReader(presence.fd)
    for number in range(1000):
        presence.add(b"model" * 3 + b"x" + key(number)[16:])
    assert len(counts) > 990
    others = sum(not look.lacks(b"model" * 3 + b"x" + key(number)[16:]) for number in range(1000, 3000))
    assert others < 2000 * 4 * 1000 / SLOTS + 5


class Asked(MemoryTier):
    keeps = False


def test_presence_is_trusted_only_where_all_tiers_know():
    config = Config(tiers=["cpu://?capacity=1MiB", "asked://"], prefault=False)
    with Cache(config, tiers={"asked://": Asked()}, shared=True) as cache:
        assert cache.presence is None
    config = Config(tiers=["cpu://?capacity=1MiB"], prefault=False)
    with Cache(config) as cache:
        assert cache.presence is None, "nobody else looks"
    with Cache(config, shared=True) as cache:
        assert cache.presence is not None
        look = PresenceReader(cache.presence.fd)
        assert not look.lacks(key(1)), "it has not begun"
        cache.step()
        assert look.lacks(key(1))


def test_its_memory_cannot_be_cut_short():
    presence = Presence()
    with pytest.raises(PermissionError):
        os.truncate(presence.own, 1)
