"""The next cache begins with what one tells: the same chunks, in their order, held by the same engines."""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.grant import Grant
from lmtier.core.handover import Handover, HandoverWriter
from lmtier.core.match import Lookup
from lmtier.core.presence import PresenceReader
from lmtier.errors import MisuseError, TierError
from lmtier.format.handover_file import HandoverFileError, pack, unpack
from lmtier.format.layout import Layout, form_of
from lmtier_backends.disk import DiskTier

LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=16, dtype="fp16", block_tokens=4, chunk_tokens=8, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
HALVES = form_of(LAYOUT, (LAYOUT.shard(rank=0, ranks=2), LAYOUT.shard(rank=1, ranks=2)))
SIZE = LAYOUT.nbytes(LAYOUT.whole)


def config(policy: str = "lru", capacity: str = "128KiB") -> Config:
    return Config(tiers=[f"cpu://?capacity={capacity}&policy={policy}"], chunk_tokens=8, prefault=False)


def keys(prompt: int) -> list[bytes]:
    return [hashlib.sha256(b"%d/%d" % (prompt, n)).digest() for n in range(3)]


def dumped(cache: Cache, *held: Lookup | Grant) -> tuple[dict[str, Any], list[dict[str, object]]]:
    writer = HandoverWriter(cache)
    writer.write_cache(
        [each for each in held if isinstance(each, Lookup)],
        [each for each in held if isinstance(each, Grant)],
    )
    notes = [writer.match(each) if isinstance(each, Lookup) else writer.reservation(each) for each in held]
    writer.facts["notes"] = notes
    facts = unpack(writer.pack())
    return facts, facts["notes"]


def following(cache: Cache, facts: dict[str, Any], settings: Config) -> tuple[Cache, Handover]:
    assert cache.slab.fd is not None
    assert cache.presence is not None
    handover = Handover(facts, os.dup(cache.slab.fd), os.dup(cache.presence.own))
    return Cache(settings, shared=True, handover=handover), handover


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("save", "begin", "find", "pin", "hint", "discard", "ttl", "halves")),
        st.integers(0, 12),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.sampled_from(("lru", "auto")))
@example([("hint", 7), ("halves", 0), ("save", 7), ("pin", 0)], "lru")  # a hint's pin that came first
def test_the_next_cache_has_what_the_one_before_had(operations: list[tuple[str, int]], policy: str):
    held: list[Lookup | Grant] = []
    with Cache(config(policy), shared=True) as cache:
        for what, prompt in operations:
            if what == "find":
                held.append(cache.match(keys(prompt), FORM))
            elif what == "pin" and any(cache.index.get(key) for key in keys(prompt)):
                cache.pin(f"pin {prompt % 2}", keys(prompt))
            elif what == "hint":
                with suppress(MisuseError):  # they have a quarter
                    cache.pinning.pin(f"hint {prompt % 2}", keys(prompt), 60.0, hinted=True)
            elif what == "discard" and (entry := cache.index.get(keys(prompt)[1])) is not None:
                cache.discard(entry.key, entry.form)
            elif what in ("save", "begin", "ttl", "halves"):
                form = HALVES if what == "halves" else FORM
                saving = cache.reserve(keys(prompt), form, ttl=1000 if what == "ttl" else None)
                if what == "begin" and saving.chunks:
                    held.append(saving)
                else:
                    for shard in form.shards if saving.chunks else ():
                        cache.commit(saving, shard)
        facts, notes = dumped(cache, *held)
        after, handover = following(cache, facts, config(policy))
        with after:
            again = [
                handover.reservation(note, after) if "left" in note else handover.match(note, after)
                for note in notes
            ]
            after.complete_takeover()
            after.check()
            assert after.slab._taken == cache.slab._taken
            assert after.index.used == cache.index.used
            assert after.index.leased_bytes == cache.index.leased_bytes
            assert after.pinning.pins.wanted == cache.pinning.pins.wanted
            assert after.pinning.hinted.wanted == cache.pinning.hinted.wanted
            for entry in cache.index.entries():
                mine = after.index.get(entry.key)
                assert mine is not None
                for name in (
                    "form",
                    "nbytes",
                    "state",
                    "leases",
                    "child_count",
                    "is_reused",
                    "offsets",
                    "marks",
                    "provenance",
                ):
                    assert getattr(mine, name) == getattr(entry, name), name
                assert after.index.expiries.expiry(mine) == cache.index.expiries.expiry(entry)
            assert len(after.index) == len(cache.index)
            if policy == "lru":
                order = [entry.key for entry in cache.index.order()]
                assert [entry.key for entry in after.index.order()] == order
            for thing in again:
                if isinstance(thing, Lookup):
                    after.release(thing)
                else:
                    after.commit(thing)
            after.check()


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_damaged_books_are_refused_wherever_the_damage_is(at: int):
    with Cache(config(), shared=True) as cache:
        cache.commit(cache.reserve(keys(1), FORM))
        writer = HandoverWriter(cache)
        writer.write_cache([], [])
        changed = bytearray(writer.pack())
        changed[at * (len(changed) - 1) // 60] ^= 4
        data = bytes(changed)
        with pytest.raises(HandoverFileError):
            unpack(data)
        with pytest.raises(HandoverFileError):
            unpack(data[: len(data) * at // 60])


def test_a_handover_file_with_extra_facts_is_read():
    """A file that contradicts itself is refused."""
    with Cache(config(), shared=True) as cache:
        cache.commit(cache.reserve(keys(1), FORM))
        facts, _ = dumped(cache)
        after, _ = following(cache, unpack(pack(facts | {"of a later version": [b"2"]})), config())
        after.check()
        after.close()
        facts["slab"]["offsets"] = bytes(len(facts["slab"]["offsets"]))  # all chunks at one place
        with pytest.raises(HandoverFileError, match="two chunks at 0"):
            following(cache, facts, config())


def test_presence_changes_only_once_the_next_cache_owns_it():
    with Cache(config(), shared=True) as cache:
        cache.commit(cache.reserve(keys(1), FORM))
        cache.step()
        facts, _ = dumped(cache)
        after, _ = following(cache, facts, config())
        assert cache.presence is not None
        before = bytes(cache.presence._counts)
        after.close()
        assert bytes(cache.presence._counts) == before
        for entry in cache.index.entries():  # the one before goes on
            cache.discard(entry.key, entry.form)


def test_a_new_table_of_presence_has_inherited_chunks():
    """The one before had a tier that must always be asked, so it had no table."""
    with Cache(config(), shared=True) as cache:
        cache.commit(cache.reserve(keys(1), FORM))
        facts, _ = dumped(cache)
        assert cache.slab.fd is not None
        with Cache(config(), shared=True, handover=Handover(facts, os.dup(cache.slab.fd))) as after:
            after.complete_takeover()
            after.step()
            assert after.presence is not None
            reader = PresenceReader(after.presence.fd)
            assert not any(reader.lacks(key) for key in keys(1))
            for key in keys(1):
                after.discard(key, FORM)
            assert all(reader.lacks(key) for key in keys(1))


def with_disk(root: Path) -> Config:
    return Config(tiers=["cpu://?capacity=128KiB", f"disk://{root}?capacity=1MiB"], prefault=False)


def handed_over(cache: Cache) -> Handover:
    """What `cache` leaves, with duplicates of its descriptors, as another process would get them."""
    assert cache.slab.fd is not None
    assert cache.presence is not None
    lock = cache.lower[0].tier.lock
    assert lock is not None
    locks = {cache.config.cache_tiers[1].base_url: os.dup(lock)}
    facts, _ = dumped(cache)
    return Handover(facts, os.dup(cache.slab.fd), os.dup(cache.presence.own), locks)


def test_a_handed_over_directory_opens_again_once_closed(tmp_path: Path):
    cache = Cache(with_disk(tmp_path), shared=True)
    after = Cache(cache.config, shared=True, handover=handed_over(cache))
    with pytest.raises(TierError, match="is open in process"):
        DiskTier(tmp_path)
    cache.close_after_handover()
    after.complete_takeover()
    with pytest.raises(TierError, match="is open in process"):
        DiskTier(tmp_path)
    after.close()
    DiskTier(tmp_path).close()


def test_a_handover_that_fails_leaves_no_thread_and_no_lock(tmp_path: Path):
    cache = Cache(with_disk(tmp_path), shared=True)
    handover = handed_over(cache)
    handover.facts["pins"] = [["one", "abc", 0.0]]
    before = set(threading.enumerate())
    with pytest.raises(HandoverFileError, match="contradicts itself"):
        Cache(cache.config, shared=True, handover=handover)
    assert set(threading.enumerate()) == before
    with pytest.raises(TierError, match="is open in process"):
        DiskTier(tmp_path)
    cache.close()
    DiskTier(tmp_path).close()
