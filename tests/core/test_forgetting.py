"""A tenant who leaves: keys, chunks and memory go; what others have stays; a backup cannot be read."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.forgetting import BY_TENANT, BY_TIER, NOT, forget, forgetting
from lmtier.core.handover import Handover, HandoverWriter
from lmtier.core.match import EntryState
from lmtier.errors import MisuseError
from lmtier.format.handover_file import unpack
from lmtier.format.keys import NO_TENANT, tenant, tenant_of
from lmtier.format.layout import Layout, Name, form_of
from lmtier.format.objects import Selector
from lmtier.observe.prompts import Origin, Prompts
from lmtier.server.engines import EngineVerbs
from lmtier.testing import Gate, MemoryTier, SlowTier
from lmtier.tiers.base import Op, Reason
from tests.memory_flags import memory_flags
from tests.model.hand import HandTier
from tests.redis_process import RedisServer, running
from tests.sealed import key_file, keyring
from tests.server.test_engines import Connection

A, B = tenant("alice"), tenant("bob")
LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=64, dtype="bf16", block_tokens=16, chunk_tokens=16, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))


def keys(who: bytes, count: int, model: bytes = b"mod_") -> list[bytes]:
    return [model + who + bytes(20) + i.to_bytes(4, "big") for i in range(count)]


def content(key: bytes) -> bytes:
    return (key * (FORM.slab_bytes // 32))[: FORM.slab_bytes]


def save(cache: Cache, names: list[bytes], *, flushed: bool = True) -> None:
    reservation = cache.reserve(names, FORM, by="engine")
    for key, offsets in reservation.places:
        cache.slab.view(offsets[0], FORM.slab_bytes)[:] = content(key)
    cache.commit(reservation)
    if flushed:
        assert cache.flush()


def found(cache: Cache, names: list[bytes]) -> list[str]:
    match = cache.wait(cache.match(names, FORM, deadline=20))
    for entry in match.run:
        assert cache.slab.view(entry.offsets[0], FORM.slab_bytes) == content(entry.key)
    cache.release(match)
    cache.check()
    return match.sources


def of_memory(cache: Cache, who: bytes) -> bool:
    """Whether any byte of this tenant's chunks is left in the slab, used or free."""
    return who + bytes(20) in bytes(cache.slab.view(0, cache.slab.capacity))


def cache_over(*urls: str, **given: object) -> Cache:
    tiers = (f"cpu://?capacity={32 * FORM.slab_bytes}&policy=lru", *urls)
    return Cache(Config(tiers=tiers, chunk_tokens=16, prefault=False, load_deadline=30.0), **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


def sealed_disk(tmp_path: Path, *, tenants: bool = True) -> str:
    more = f"&tenants={tmp_path}/tenants" if tenants else ""
    key = key_file(tmp_path, 1)
    return f"disk://{tmp_path}/kv?capacity=1GiB&seal=aes-256-gcm&key={key}{more}"


def files(tmp_path: Path, who: bytes) -> int:
    return len(list((tmp_path / "kv").glob(f"??/????????{who.hex()}*")))


# ---- what goes and what stays


def test_forgetting_one_tenant_leaves_the_others(tmp_path):
    with cache_over(sealed_disk(tmp_path)) as cache:
        for model in (b"mod_", b"othr"):
            save(cache, keys(A, 3, model))
            save(cache, keys(B, 3, model))
        assert files(tmp_path, A) == files(tmp_path, B) == 6
        report = forget(cache, A)
        assert (report.chunks, report.in_use, report.is_done) == (6, 0, True)
        (told,) = report.tiers
        assert (told.tier, told.chunks, told.keys, told.sealed) == ("disk", 6, 1, BY_TENANT)
        assert files(tmp_path, A) == 0
        assert not (tmp_path / "tenants" / A.hex()).exists()
        assert not of_memory(cache, A)
        assert found(cache, keys(A, 3)) == []
        assert found(cache, keys(B, 3)) == ["cpu"] * 3
    with cache_over(sealed_disk(tmp_path)) as cache:
        assert found(cache, keys(B, 3, b"othr")) == ["disk"] * 3


def test_a_tenant_leaves_a_tier_in_small_steps(monkeypatch):
    """Others have to get their turns."""
    url, looked = "near://?capacity=1GiB", []

    def look(key: bytes) -> bytes:
        looked.append(key)
        return tenant_of(key)

    with cache_over(url, tiers={url: MemoryTier()}) as cache:
        save(cache, keys(A, 30))
        for first in range(0, 1500, 30):
            save(cache, keys(B, 1500)[first : first + 30])
        for module in ("core.forgetting", "core.lower", "format.objects"):
            monkeypatch.setattr(f"lmtier.{module}.tenant_of", look)
        steps = forgetting(cache, A, 20.0, "a test")
        while (must_wait := next(steps, None)) is not None:
            assert len(looked) <= 1024 + 100
            if must_wait:
                cache.wait_for_tiers()
            looked.clear()
        assert [entry.key for entry in cache.lower.owned[0].index.entries()] == keys(B, 1500)


def test_a_failed_delete_of_another_tenant_ends_no_wait():
    url, tier = "near://?capacity=1GiB", HandTier({}, keeps=True)

    def finish(cache: Cache, fault: Reason | None = None) -> None:
        tier.fault = fault
        tier.finish(0)
        cache.step()

    with cache_over(url, tiers={url: tier}) as cache:
        (below,) = cache.lower
        save(cache, keys(B, 1), flushed=False)
        cache.step()
        finish(cache)
        below.discard(keys(B, 1)[0], ())
        while not below.deleting_again.is_open:
            finish(cache, Reason.ERROR)
        save(cache, keys(A, 1), flushed=False)
        cache.step()
        assert [job.op for job in tier.waiting] == [Op.STORE]
        steps, waits = forgetting(cache, A, 20.0, "a test"), 0
        while waits < 9:  # while that is being stored
            waits += next(steps)
        for _ in steps:
            cache.step()
            while tier.waiting:
                finish(cache)
        assert keys(A, 1)[0] not in {name.key for name in tier.kept}


def test_a_backup_gives_nothing_of_who_was_forgotten(tmp_path):
    with cache_over(sealed_disk(tmp_path)) as cache:
        save(cache, keys(A, 3))
        save(cache, keys(B, 3))
        shutil.copytree(tmp_path / "kv", tmp_path / "backup")
        forget(cache, A)
    shutil.rmtree(tmp_path / "kv")
    shutil.move(tmp_path / "backup", tmp_path / "kv")
    with cache_over(sealed_disk(tmp_path)) as cache:
        assert found(cache, keys(B, 3)) == ["disk"] * 3
        assert found(cache, keys(A, 3)) == []
        assert cache.metrics.value("lmtier_missed_tokens_total", reason="sealed") == 48
        while cache.lower[0].has_jobs:  # each of the loads finds out for itself
            cache.wait_for_tiers()
        save(cache, keys(A, 3))
        assert found(cache, keys(A, 3)) == ["cpu"] * 3, "who comes back is served"
    with cache_over(sealed_disk(tmp_path)) as cache:
        assert found(cache, keys(A, 3)) == ["disk"] * 3


def test_what_was_evicted_before_is_overwritten_too(tmp_path):
    with cache_over(sealed_disk(tmp_path)) as cache:
        save(cache, keys(A, 8))
        for entry in cache.index.entries():
            cache.memory.discard(entry.key)
        assert of_memory(cache, A)
        report = forget(cache, A)
        assert report.chunks == 0
        assert report.overwritten == cache.slab.capacity
        assert not of_memory(cache, A)


def test_chunks_being_read_are_overwritten_after_the_read(tmp_path):
    with cache_over(sealed_disk(tmp_path)) as cache:
        save(cache, keys(A, 2))
        match = cache.match(keys(A, 2), FORM)
        report = forget(cache, A)
        assert report.in_use == 2
        for entry in match.run:
            assert cache.slab.view(entry.offsets[0], FORM.slab_bytes) == content(entry.key), "never wrong"
        assert found(cache, keys(A, 2)) == []
        cache.release(match)
        assert not of_memory(cache, A)
        assert not cache.memory.to_wipe
        cache.check()


def test_chunks_cleared_while_read_are_overwritten_too(tmp_path):
    with cache_over(sealed_disk(tmp_path)) as cache:
        save(cache, keys(A, 2))
        match = cache.match(keys(A, 2), FORM)
        cache.clear(force=True)
        assert forget(cache, A).in_use == 2
        cache.release(match)
        assert not of_memory(cache, A)
        cache.check()


def test_forgetting_waits_for_a_tier_that_still_scans(tmp_path):
    url, gate, inner = "memory://?capacity=1MiB", Gate(), MemoryTier()
    with cache_over(url, tiers={url: MemoryTier(inner.objects)}) as cache:
        save(cache, keys(A, 2))
    assert inner.objects
    gate.hold()
    with cache_over(url, tiers={url: SlowTier(inner, gate)}, wait_until_warm=False) as cache:
        assert forget(cache, A, patience=0.1).tiers[0].problem == "what it holds is not known yet"
        gate.open()
        assert forget(cache, A).is_done
        assert not inner.objects
        cache.check()


def test_a_scan_brings_no_tenant_cleared_before_it():
    url, gate, inner = "memory://?capacity=1MiB", Gate(), MemoryTier()
    with cache_over(url, tiers={url: MemoryTier(inner.objects)}) as cache:
        save(cache, keys(A, 2))
        save(cache, keys(B, 2))
    gate.hold()
    with cache_over(url, tiers={url: SlowTier(inner, gate)}, wait_until_warm=False) as cache:
        cache.clear(Selector(tenants=frozenset((A,))), force=True)
        gate.open()
        assert cache.flush()
        assert {name.key for name in inner.objects} == set(keys(B, 2))
        cache.check()


def test_a_store_under_way_leaves_nothing_readable(tmp_path):
    """It gets a new key after the first was destroyed. That key goes too."""
    gate, ring = Gate(), keyring(1, tenants=str(tmp_path / "tenants"))
    inner = MemoryTier()
    tier = SlowTier(inner, gate)
    tier.use_keys(ring)
    with cache_over("null://?capacity=1MiB", tiers={"null://?capacity=1MiB": tier}) as cache:
        save(cache, keys(A, 1))
        (path,) = (tmp_path / "tenants").glob(A.hex())
        gate.hold()
        save(cache, keys(A, 3), flushed=False)
        cache.step()
        gate.wait_for(2)
        report = forget(cache, A, patience=0.2)
        assert "not everything is deleted yet" in report.tiers[0].problem
        assert not path.exists()
        gate.open()
        assert cache.flush()
        assert not inner.objects
        assert forget(cache, A).is_done
        assert not path.exists()
        cache.check()


def test_a_tier_that_others_share_is_searched(redis, tmp_path):
    url = f"redis://127.0.0.1:{redis.port}?namespace=forget"
    key = f"&seal=aes-256-gcm&key={key_file(tmp_path, 1)}&tenants={tmp_path}/tenants"
    with cache_over(url + key) as cache:
        for model in (b"mod_", b"othr"):
            save(cache, keys(A, 3, model))
            save(cache, keys(B, 3, model))
        (told,) = forget(cache, A).tiers
        assert (told.tier, told.chunks, told.keys, told.problem) == ("redis", None, 1, "")
        for entry in cache.index.entries():
            cache.memory.discard(entry.key)
        assert found(cache, keys(A, 3)) == []
        assert found(cache, keys(B, 3, b"othr")) == ["redis"] * 3
        save(cache, keys(A, 1))
        assert cache.flush()


@pytest.mark.parametrize("sealing", [BY_TIER, NOT])
def test_a_tier_without_tenant_keys_says_how_it_forgot(tmp_path, sealing):
    url = (
        sealed_disk(tmp_path, tenants=False) if sealing == BY_TIER else f"disk://{tmp_path}/kv?capacity=1GiB"
    )
    with cache_over(url) as cache:
        save(cache, keys(A, 3))
        (told,) = forget(cache, A).tiers
        assert (told.chunks, told.keys, told.sealed) == (3, 0, sealing)
        assert files(tmp_path, A) == 0


def test_a_key_that_cannot_be_destroyed_is_reported(tmp_path, monkeypatch):
    """The rest is deleted all the same."""
    with cache_over(sealed_disk(tmp_path)) as cache:
        save(cache, keys(A, 2))
        monkeypatch.setattr("lmtier.tiers.keyring.LOCK", "no/such/folder/lock")
        report = forget(cache, A)
        assert not report.is_done
        assert f"{A.hex()} stays: No such file or directory" in report.tiers[0].problem
        assert files(tmp_path, A) == 0


def test_nobody_is_no_tenant():
    with cache_over() as cache:
        for who in (NO_TENANT, b"", b"12345"):
            with pytest.raises(MisuseError):
                forget(cache, who)


def test_each_place_has_a_line_in_the_audit(tmp_path, caplog):
    with cache_over(sealed_disk(tmp_path)) as cache, caplog.at_level(logging.INFO, "lmtier.audit"):
        save(cache, keys(A, 2))
        forget(cache, A, who="an administrator")
    lines = [record.getMessage() for record in caplog.records if record.name == "lmtier.audit"]
    assert lines[0] == f"lmtier: forget tenant {A.hex()}, as an administrator asks"
    assert lines[1].startswith(f"lmtier: tenant {A.hex()}: cpu: 2 chunks deleted, 0 in use, ")
    assert lines[2] == (
        f"lmtier: tenant {A.hex()}: disk: 2 chunks deleted, 1 keys destroyed, sealed by: tenant"
    )
    assert "alice" not in caplog.text, "a salt may be a secret"


# ---- memory


def test_the_slab_is_in_no_core_dump():
    with cache_over() as private, cache_over(shared=True) as shared:
        for cache in (private, shared):
            address = cache.slab._memory._start
            assert "dd" in memory_flags(address), "the kernel's word for: do not dump"
            assert "dd" in memory_flags(address + cache.slab.capacity - 1)


def test_free_memory_is_overwritten_and_used_memory_is_not():
    with cache_over() as cache:
        save(cache, keys(A, 3))
        save(cache, keys(B, 3))
        first = cache.index.get(keys(A, 3)[2])
        assert first is not None
        cache.memory.discard(first.key)
        assert first.state is EntryState.GONE
        before = cache.slab.used
        assert sum(cache.slab.wipe_free()) == cache.slab.capacity - before
        assert found(cache, keys(A, 2)) == ["cpu"] * 2
        assert found(cache, keys(B, 3)) == ["cpu"] * 3


def test_wiping_steps_do_not_grow_with_free_pieces(monkeypatch):
    monkeypatch.setattr("lmtier.core.slab._WIPE_STEP", 8 * FORM.slab_bytes)
    with cache_over() as cache:
        save(cache, keys(A, 32))
        for entry in cache.index.entries()[::2]:
            cache.memory.discard(entry.key)
        assert [*cache.slab.wipe_free()] == [4 * FORM.slab_bytes] * 4


def test_wiping_spares_extents_taken_meanwhile(monkeypatch):
    monkeypatch.setattr("lmtier.core.slab._WIPE_STEP", FORM.slab_bytes)
    with cache_over() as cache:
        names = iter(keys(A, 20))
        saved = []
        for _ in cache.slab.wipe_free():
            if (name := next(names, None)) is not None:
                save(cache, [name])
                saved.append(name)
        for name in saved:
            assert found(cache, [name]) == ["cpu"]


def test_tokens_that_engines_sent_go_as_well():
    prompts = Prompts(1)
    for who in (A, B):
        prompts.add(keys(who, 3), bytes(12), Origin.of({}, "", who.hex()))
    prompts.forget([A])
    assert [prompts.get(key) is None for key in (*keys(A, 3), *keys(B, 3))] == [True] * 3 + [False] * 3
    prompts.forget([B])
    assert not len(prompts)
    assert not prompts._bytes


# ---- forgotten by another server


class SharedMemory(MemoryTier):
    keeps = False


SEALED, OPEN = "null://?capacity=1GiB", "far://?write=always"


def test_a_successor_never_finds_a_forgotten_tenants_kv(tmp_path):
    tenants, objects = str(tmp_path / "tenants"), MemoryTier().objects

    def sealed() -> dict[str, MemoryTier]:
        tier = MemoryTier(objects)
        tier.use_keys(keyring(1, tenants=tenants))
        return {SEALED: tier}

    with cache_over(SEALED, tiers=sealed(), shared=True) as before:
        save(before, keys(A, 2))
        save(before, keys(B, 2))
        writer = HandoverWriter(before)
        writer.write_cache((), ())
        assert before.slab.fd is not None
        keyring(1, tenants=tenants).tenants.forget(A)  # type: ignore[union-attr]  # it has some
        handover = Handover(unpack(writer.pack()), os.dup(before.slab.fd))
        with cache_over(SEALED, tiers=sealed(), shared=True, handover=handover) as after:
            assert found(after, keys(A, 2)) == []
            assert found(after, keys(B, 2)) == ["cpu"] * 2
            while after.forgotten_tenants.covers(keys(A, 1)):
                after.wait_for_tiers()
            assert not of_memory(after, A)
            save(after, keys(A, 2))
            assert found(after, keys(A, 2)) == ["cpu"] * 2


def test_the_audit_counts_reads_of_a_forgotten_tenant(tmp_path, caplog):
    near, ring = MemoryTier(), keyring(1, tenants=str(tmp_path))
    near.use_keys(ring)
    with cache_over(SEALED, tiers={SEALED: near}) as cache, caplog.at_level(logging.INFO, "lmtier.audit"):
        save(cache, keys(A, 2))
        match = cache.match(keys(A, 2), FORM)
        keyring(1, tenants=str(tmp_path)).tenants.forget(A)  # type: ignore[union-attr]  # it has some
        assert ring.tenants is not None
        assert ring.tenants.read_tombstones()
        while cache.forgotten_tenants.step():
            pass
        assert f"lmtier: tenant {A.hex()}: cpu: 2 chunks deleted, 2 in use, " in caplog.text
        cache.release(match)
        assert not of_memory(cache, A)


def test_another_server_gets_nothing_of_a_tenant_who_leaves(tmp_path):
    near, ring = MemoryTier(), keyring(1, tenants=str(tmp_path))
    near.use_keys(ring)
    with cache_over(SEALED, tiers={SEALED: near}) as cache:
        save(cache, keys(A, 1))
        save(cache, keys(B, 1))
        (a, b), other = (str(Name(keys(who, 1)[0], FORM.shards[0])) for who in (A, B)), EngineVerbs(cache)

        def answer(verb: str, *names: str) -> object:
            return Connection(other, "NAME", "b").say(verb, *names)

        assert answer("HAS", a, b) == [FORM.slab_bytes] * 2
        reading = Connection(other, "NAME", "b").ask("READ", a)
        next(reading)  # its checksum is being made
        keyring(1, tenants=str(tmp_path)).tenants.forget(A)  # type: ignore[union-attr]  # it has some
        assert ring.tenants is not None
        assert ring.tenants.read_tombstones()
        with pytest.raises(StopIteration) as end:
            next(reading)
        assert end.value.value is None
        assert answer("HAS", a, b) == [0, FORM.slab_bytes]
        assert answer("READ", a) is None
        assert not cache.index.leased_bytes


def test_a_tenant_forgotten_during_a_start_can_store_again(tmp_path):
    near, ring = MemoryTier(), keyring(1, tenants=str(tmp_path))
    near.use_keys(ring)
    keyring(1, tenants=str(tmp_path)).tenants.forget(A)  # type: ignore[union-attr]  # it has some
    assert ring.tenants is not None
    assert ring.tenants.read_tombstones()
    with cache_over(SEALED, tiers={SEALED: near}) as cache:
        assert cache.forgotten_tenants.covers(keys(A, 1))
        for _ in range(50):
            cache.step()
        assert not cache.forgotten_tenants.covers(keys(A, 1))
        save(cache, keys(A, 2))
        assert found(cache, keys(A, 2)) == ["cpu"] * 2


def test_a_tenant_is_readmitted_once_all_servers_know(tmp_path, monkeypatch):
    """Until then they could give it what is from before."""
    monkeypatch.setattr("lmtier.core.forgetting.LEARNED_WITHIN", 1000.0)
    near, ring = MemoryTier(), keyring(1, tenants=str(tmp_path))
    near.use_keys(ring)
    with cache_over(SEALED, OPEN, tiers={SEALED: near, OPEN: SharedMemory()}) as cache:
        save(cache, keys(A, 2))
        assert forget(cache, A).is_done
        for _ in range(50):
            cache.step()
        assert found(cache, keys(A, 2)) == []
        assert cache.forgotten_tenants.covers(keys(A, 1))
        monkeypatch.setattr("lmtier.core.forgetting.LEARNED_WITHIN", 0.0)
        while cache.forgotten_tenants.covers(keys(A, 1)):
            cache.wait_for_tiers()
        save(cache, keys(A, 2))
        assert found(cache, keys(A, 2)) == ["cpu"] * 2
