"""Tiers that seal: where keys come from, what rotates, what is not served, and what never shows a key."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lmtier.config import Config, TierSpec
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError, TierError, without_secrets
from lmtier.format.keys import NO_TENANT, tenant, value_key
from lmtier.format.layout import PAGE, Name
from lmtier.format.sealing import NoKey
from lmtier.testing import MemoryTier, load, replace_start, run, sample, store
from lmtier.tiers import keyring as keyring_module
from lmtier.tiers.base import Item, Job, Op, Reason, Tier
from lmtier.tiers.keyring import Keyring, TenantKeyFiles
from lmtier.tiers.registry import open_tier
from lmtier.tools.cli import main
from lmtier_backends.disk import Fault, _Checker, verify
from tests.kv_bytes import kv_sample
from tests.memory_flags import memory_flags
from tests.redis_process import RedisServer, running
from tests.sealed import hex_key, key_file, keyring, sealed_at_rest
from tests.tiers.test_encoding_tiers import ONE, C, fill, found, keys

A, B = tenant("alice"), tenant("bob")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["disk", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return f"disk://{tmp_path}/kv?capacity=1GiB"
    server = request.getfixturevalue("redis")
    return f"redis://127.0.0.1:{server.port}?namespace={abs(hash(request.node.name))}"


def sealed(url: str, key: str, more: str = "") -> str:
    return f"{url}&seal=aes-256-gcm&key={key}{more}"


def cache_over(url: str, chunks: int = 8) -> Cache:
    return Cache(
        Config(tiers=(f"cpu://?capacity={chunks * ONE.slab_bytes}", url), chunk_tokens=C, prefault=False)
    )


def missed(cache: Cache, reason: str) -> float:
    return cache.metrics.value("lmtier_missed_tokens_total", reason=reason)


# ---- a tier


@pytest.mark.parametrize("codec", ["raw", "shuffle-zstd", "int8"])
def test_it_composes_with_codecs_and_tiers(url, codec, tmp_path):
    each = kv_sample(1, mark=bytes(range(16)))
    with closing(open_tier(TierSpec.parse(sealed(url, key_file(tmp_path, 1), f"&codec={codec}")))) as tier:
        store(tier, each)
        done, got = load(tier, each.name, each.room)
        (header,) = done.ok.values()
        assert (got == each.payload) == (codec != "int8")
        assert run(tier, Job(0, Op.PEEK, (Item(each.name),))).ok == {each.name: header}


def test_a_sealed_disk_shows_no_kv_fingerprint_or_name(tmp_path):
    each, mark = kv_sample(2, mark=b"a mark to search for"), b"a mark to search for"
    url = sealed(f"disk://{tmp_path}/kv?capacity=1GiB", key_file(tmp_path, 1))
    with closing(open_tier(TierSpec.parse(url))) as tier:
        store(tier, each)
    (path,) = (tmp_path / "kv").glob("??/*")
    data = path.read_bytes()
    assert mark not in data
    assert not any(bytes(each.payload[at : at + 16]) in data for at in range(0, each.header.nbytes, 512))


def test_a_tier_without_keys_misses_and_keeps_sealed_kv(url, tmp_path):
    with cache_over(sealed(url, key_file(tmp_path, 1))) as cache:
        fill(cache, keys(2))
    with cache_over(url) as cache:
        assert found(cache, keys(2)) == []
        assert missed(cache, "sealed") == 2 * C
        assert cache.flush()
    with cache_over(sealed(url, key_file(tmp_path, 1))) as cache:
        assert len(found(cache, keys(2))) == 2


def test_an_unknown_key_is_a_miss_and_allows_a_new_store(url, tmp_path):
    with cache_over(sealed(url, key_file(tmp_path, 1))) as cache:
        fill(cache, keys(2))
    with cache_over(sealed(url, key_file(tmp_path, 2))) as cache:
        assert found(cache, keys(2)) == []
        assert missed(cache, "sealed") == 2 * C
        assert cache.metrics.value("lmtier_breaker_open", tier=url.partition(":")[0], direction="up") == 0
        cache.check()
        if url.startswith("disk"):  # it is not asked for again, and takes its room
            assert found(cache, keys(2)) == []
            assert len(cache.lower.owned[0].index) == 2
        fill(cache, keys(1))
        cache.check()
    with cache_over(sealed(url, key_file(tmp_path, 1, 2))) as cache:
        assert len(found(cache, keys(2))) == 2, "one with each key: nothing was deleted"


def test_a_sealed_tier_does_not_serve_planted_objects(url, tmp_path):
    with cache_over(url) as cache:
        fill(cache, keys(2))
    with cache_over(sealed(url, key_file(tmp_path, 1))) as cache:
        assert found(cache, keys(2)) == []
        assert missed(cache, "unsealed") == 2 * C
        assert cache.flush()
    with cache_over(url) as cache:
        assert found(cache, keys(1)) == [], "what anyone can read is deleted"


def test_a_planted_header_is_not_believed_either():
    each, objects = sample(1), dict[Name, bytes]()
    with closing(MemoryTier(objects)) as tier:
        tier.use_keys(keyring(1))
        objects[each.name] = each.at_rest()
        done = run(tier, Job(0, Op.PEEK, (Item(each.name),)))
        assert done.failed == {each.name: Reason.UNSEALED}
        objects[each.name] = sealed_at_rest(each, keyring(2))
        done = run(tier, Job(0, Op.PEEK, (Item(each.name),)))
        assert done.failed == {each.name: Reason.SEALED}
        assert objects, "its key may come back"


def test_a_tier_of_another_kind_says_that_it_cannot_seal():
    class Other(MemoryTier):
        use_keys = Tier.use_keys

    with closing(Other()) as tier, pytest.raises(ConfigError, match="cannot seal them; remove seal="):
        tier.use_keys(keyring())


# ---- rotation


def test_rotation_seals_with_the_new_key_and_reads_the_old(url, tmp_path):
    """Without a restart: the file is read again when it changes."""
    with cache_over(sealed(url, key_file(tmp_path, 1))) as cache:
        fill(cache, keys(1))
        key_file(tmp_path, 2, 1)
        fill(cache, keys(2))
    with cache_over(sealed(url, key_file(tmp_path, 1))) as cache:
        assert len(found(cache, keys(2))) == 1
    with cache_over(sealed(url, key_file(tmp_path, 3, 2, 1))) as cache:
        assert len(found(cache, keys(2))) == 2


def test_verify_says_which_key_and_seals_again(tmp_path, capsys):
    root = f"{tmp_path}/kv"
    url = f"disk://{root}?capacity=1GiB"
    for number in (1, 2):
        with closing(open_tier(TierSpec.parse(sealed(url, key_file(tmp_path, number))))) as tier:
            store(tier, *(kv_sample(10 * number + i) for i in range(number)))
    with closing(open_tier(TierSpec.parse(url))) as tier:
        store(tier, kv_sample(0))
    one, two = keyring(1), keyring(2)
    (id_one, id_two) = (ring.sealing_secret(bytes(32)).id.hex() for ring in (one, two))

    report = verify(root)
    assert report.keys == {"": 1, id_one: 1, id_two: 2}
    assert (report.ok, report.unchecked, report.findings) == (1, 3, [])
    report = verify(root, keys=one)
    assert report.ok == 1
    assert sorted(each.fault for each in report.findings) == [Fault.SEALED] * 2 + [Fault.UNSEALED]

    key = key_file(tmp_path, 2, 1)
    assert main(["verify", root, "--key", key, "--reseal", "--fix"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{id_one} +1\n", out)
    assert "1 were sealed again with the current key." in out
    report = verify(root, keys=two)
    assert (report.ok, report.keys, report.findings) == (3, {id_two: 3}, [])
    with closing(open_tier(TierSpec.parse(sealed(url, key_file(tmp_path, 2))))) as tier:
        for each in (kv_sample(10), kv_sample(20), kv_sample(21)):
            assert load(tier, each.name, each.room)[1] == each.payload

    assert main(["verify", root, "--key", key_file(tmp_path, 3), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [each["fault"] for each in told["findings"]] == ["sealed"] * 3
    assert verify(root, fix=True, keys=keyring(3)).fixed == 0, "not deleted unless told"
    assert main(["verify", root, "--key", key_file(tmp_path, 3), "--drop-sealed"]) == 0
    assert verify(root).keys == {}


def test_verify_finds_a_flipped_bit_under_a_seal(tmp_path):
    url = sealed(f"disk://{tmp_path}/kv?capacity=1GiB", key_file(tmp_path, 1))
    with closing(open_tier(TierSpec.parse(url))) as tier:
        store(tier, kv_sample(1))
    (path,) = (tmp_path / "kv").glob("??/*")
    data = bytearray(path.read_bytes())
    data[PAGE + 100] ^= 4
    path.write_bytes(data)
    assert [each.fault for each in verify(tmp_path / "kv", keys=keyring(1)).findings] == [Fault.CORRUPT]


def test_verify_needs_keys_for_what_it_does_with_them(tmp_path, capsys):
    assert main(["verify", str(tmp_path), "--reseal"]) == 2
    assert "--tenants, --reseal and --drop-sealed need --key" in capsys.readouterr().err


# ---- sources of keys


def test_a_command_and_the_environment_give_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_KEYS", f"# the one of today\n{hex_key(1)}\n\n{hex_key(2)}\n")
    by_file, by_env = Keyring(key_file(tmp_path, 1, 2)), Keyring("env:KV_KEYS")
    by_command = Keyring(f"command:cat '{tmp_path}/keys'")
    ids = {ring.sealing_secret(bytes(32)).id for ring in (by_file, by_env, by_command)}
    assert len(ids) == 1
    for ring in (by_file, by_env, by_command):
        assert ring.opening_secret(bytes(32), keyring(2).sealing_secret(bytes(32)).id) is not None
        assert ring.opening_secret(bytes(32), bytes(8)) is None


def test_base64_is_a_key_too(tmp_path, monkeypatch):
    made = subprocess.run(["openssl", "rand", "-base64", "32"], capture_output=True, text=True, check=True)
    monkeypatch.setenv("KV_KEYS", made.stdout)
    assert Keyring("env:KV_KEYS").sealing_secret(b"").id


def test_an_unknown_key_asks_the_command_again_but_rarely(tmp_path, monkeypatch):
    script = tmp_path / "kms"
    script.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\ncat {tmp_path}/keys\n")
    script.chmod(0o700)
    key_file(tmp_path, 1)
    ring = Keyring(f"command:{script}")
    key_file(tmp_path, 2, 1)
    new = keyring(2).sealing_secret(b"").id
    assert ring.opening_secret(b"", new) is None, "it was asked less than a minute ago"
    monkeypatch.setattr(keyring_module, "_AGAIN", -1.0)
    assert ring.opening_secret(b"", new) is not None
    monkeypatch.setattr(keyring_module, "_AGAIN", 60.0)
    for _ in range(5):
        assert ring.opening_secret(b"", bytes(8)) is None
    assert ring.sealing_secret(b"").id == new
    assert (tmp_path / "runs").read_text().count("run") == 2


def test_what_has_its_key_does_not_wait_for_a_command(tmp_path, monkeypatch):
    """A service of keys may take as long as it likes: only who needs a key from it waits."""
    script, pipe = tmp_path / "kms", tmp_path / "pipe"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/keys\ntest ! -p {pipe} || cat {pipe}\n")
    script.chmod(0o700)
    key_file(tmp_path, 1)
    ring = Keyring(f"command:{script}")
    monkeypatch.setattr(keyring_module, "_AGAIN", -1.0)
    os.mkfifo(pipe)
    found: list[object] = []
    asker = threading.Thread(
        target=lambda: found.append(ring.opening_secret(b"", keyring(2).sealing_secret(b"").id))
    )
    asker.start()
    with pipe.open("w") as gate:  # the command runs now
        assert ring.sealing_secret(b"").id == keyring(1).sealing_secret(b"").id
        assert ring.opening_secret(b"", keyring(1).sealing_secret(b"").id) is not None
        assert asker.is_alive()
        gate.write(f"{hex_key(2)}\n")
    asker.join()
    assert found != [None]


def test_a_key_file_is_read_again_once_its_mode_is_right(tmp_path, caplog):
    ring = Keyring(key_file(tmp_path, 1))
    (tmp_path / "keys").write_text(hex_key(2))
    (tmp_path / "keys").chmod(0o666)
    assert ring.sealing_secret(b"").id == keyring(1).sealing_secret(b"").id
    assert "chmod 600 it" in caplog.text
    (tmp_path / "keys").chmod(0o600)
    assert ring.sealing_secret(b"").id == keyring(2).sealing_secret(b"").id


def test_a_file_in_the_middle_of_a_change_keeps_the_keys(tmp_path, caplog):
    ring = Keyring(key_file(tmp_path, 1))
    before = ring.sealing_secret(b"").id
    (tmp_path / "keys").write_text(hex_key(2)[:30])
    assert ring.sealing_secret(b"").id == before
    assert "line 1 of the keys is not a key" in caplog.text
    assert hex_key(2)[:30] not in caplog.text
    (tmp_path / "keys").unlink()
    assert ring.sealing_secret(b"").id == before


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (hex_key(1), "key= names a place of keys, and is no key itself"),
        ("vault:secret", "key= names a place of keys, and is no key itself"),
        ("file:/nowhere/at/all", "/nowhere/at/all: No such file"),
        ("env:NO_SUCH_NAME", "the environment has no NO_SUCH_NAME"),
        ("command:false --token hunter2", "ended with status 1; run it yourself to see why"),
        ("command:/no/such/program", "cannot run: No such file"),
        ("command:echo", "no key is there; put one in: openssl rand -hex 32"),
        (f"command:echo {hex_key(1)}0", "line 1 of the keys is not a key; write 64 hexadecimal digits"),
    ],
)
def test_what_is_wrong_is_said_without_any_key(source, said, capsys, tmp_path):
    url = sealed(f"disk://{tmp_path}/kv?capacity=1GiB", source)
    server = ["serve", "-t", "cpu://?capacity=1MiB", "--unix", f"{tmp_path}/sock", "--listen", ""]
    assert main([*server, "--http", "", "-t", url]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert hex_key(1) not in err
    assert "hunter2" not in err
    assert not (tmp_path / "kv").exists(), "keys come before anything is opened"


def test_options_that_need_each_other_are_said():
    for options in ("seal=aes-256-gcm", "key=env:X", "tenants=/x", "tenants=/x&key=env:X"):
        with pytest.raises(ConfigError, match="go together"):
            TierSpec.parse(f"disk:///x?capacity=1GiB&{options}")
    with pytest.raises(ConfigError, match="unknown seal=aes; known: aes-256-gcm"):
        TierSpec.parse("disk:///x?capacity=1GiB&seal=aes&key=env:X")
    with pytest.raises(ConfigError, match="unknown option 'seal'"):
        Config(tiers=("cpu://?capacity=1MiB&seal=aes-256-gcm&key=env:X",))


def test_key_files_that_others_may_change_are_refused(tmp_path, caplog):
    """The log names files that others may read."""
    source = key_file(tmp_path, 1)
    (tmp_path / "keys").chmod(0o644)
    Keyring(source)
    assert f"other users may read the keys in {tmp_path}/keys; chmod 600 it" in caplog.text
    (tmp_path / "keys").chmod(0o620)
    with pytest.raises(ConfigError, match="other users may write to"):
        Keyring(source)
    (tmp_path / "tenants").mkdir(mode=0o777)
    (tmp_path / "tenants").chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write there"):
        keyring(1, tenants=str(tmp_path / "tenants"))


def test_shown_settings_mask_the_place_of_keys(tmp_path):
    spec = TierSpec.parse("disk:///x?capacity=1GiB&seal=aes-256-gcm&key=command:get --password hunter2")
    assert "hunter2" not in f"{spec} {spec!r} {without_secrets(spec.url)}"


# ---- keys of tenants


def of(who: bytes, number: int = 0) -> bytes:
    return b"mod_" + who + bytes(23) + bytes([number])


def test_every_tenant_has_its_own_key_in_all_processes(tmp_path):
    one, two = (keyring(1, tenants=str(tmp_path)) for _ in range(2))
    assert one.sealing_secret(of(A)).id == two.sealing_secret(of(A, 9)).id != one.sealing_secret(of(B)).id
    assert two.opening_secret(of(B), one.sealing_secret(of(B)).id) is not None
    assert two.opening_secret(of(A), one.sealing_secret(of(B)).id) is None, "not even by mistake"
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert not any(secret_in(one, of(A)).hex() in text for text in texts)


def of_tenants(ring: Keyring) -> TenantKeyFiles:
    assert ring.tenants is not None
    return ring.tenants


def secret_in(ring: Keyring, key: bytes) -> bytes:
    return bytes(ring.sealing_secret(key)._memory[:32])


def test_processes_that_need_a_new_key_at_once_make_one(tmp_path):
    rings = [keyring(1, tenants=str(tmp_path)) for _ in range(8)]
    start, ids = threading.Barrier(8), list[bytes]()

    def ask(ring: Keyring) -> None:
        start.wait()
        ids.append(ring.sealing_secret(of(A)).id)

    threads = [threading.Thread(target=ask, args=(ring,)) for ring in rings]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(ids) == 8
    assert len(set(ids)) == 1


def test_a_forgotten_key_is_overwritten_everywhere(tmp_path):
    """It goes from its file and from memory, and other processes notice."""
    one, two = (keyring(1, tenants=str(tmp_path)) for _ in range(2))
    mine, theirs = one.sealing_secret(of(A)), two.sealing_secret(of(A))
    kept = one.sealing_secret(of(B)).id
    path = tmp_path / A.hex()
    with path.open("rb") as file:  # the same blocks, as somebody who reads the disk sees them
        assert of_tenants(one).forget(A) == 1
        assert not any(file.read())
    assert not path.exists()
    assert not any(bytes(mine._memory))
    assert two.opening_secret(of(A), theirs.id) is None
    with pytest.raises(NoKey, match="was destroyed"):
        theirs.key(bytes(32))
    assert two.sealing_secret(of(B)).id == kept
    assert of_tenants(one).forget(A) == 0
    with pytest.raises(NoKey, match="what is from before is not stored again"):
        one.sealing_secret(of(A))
    of_tenants(one).dropped[A] = 2  # its owner has dropped what it held
    assert one.sealing_secret(of(A)).id != mine.id, "who comes back is a new tenant"


def test_a_restored_key_is_refused_and_replaced(tmp_path):
    ring = keyring(1, tenants=str(tmp_path))
    old, path = ring.sealing_secret(of(A)).id, tmp_path / A.hex()
    backup = path.read_bytes()
    of_tenants(ring).forget(A)
    path.write_bytes(backup)
    later = keyring(1, tenants=str(tmp_path))
    assert ring.opening_secret(of(A), old) is later.opening_secret(of(A), old) is None
    assert not path.exists(), "a server that starts destroys it"
    path.write_bytes(backup)
    new = later.sealing_secret(of(A)).id
    assert new != old
    assert len(path.read_text().splitlines()) == 1
    assert ring.opening_secret(of(A), new) is not None
    # Nobody can say that it is of a later generation.
    path.write_text(backup.decode().replace("lmtier-tenant-2 0 ", "lmtier-tenant-2 1 "))
    assert keyring(1, tenants=str(tmp_path)).opening_secret(of(A), old) is None


def test_a_generation_never_goes_back_in_a_server_that_runs(tmp_path):
    ring = keyring(1, tenants=str(tmp_path))
    old, path = ring.sealing_secret(of(A)).id, tmp_path / A.hex()
    backup = path.read_bytes()
    of_tenants(ring).forget(A)
    (tmp_path / "forgotten").unlink()
    path.write_bytes(backup)
    assert ring.opening_secret(of(A), old) is None
    of_tenants(ring).forget(A)
    assert of_tenants(keyring(1, tenants=str(tmp_path))).forgotten[A].generation == 2


def test_a_tombstone_that_a_power_loss_tore_hides_no_other(tmp_path):
    one = keyring(1, tenants=str(tmp_path))
    of_tenants(one).forget(A)
    stones = tmp_path / "forgotten"
    stones.write_text(stones.read_text() + f"lmtier-forgotten-1 {B.hex()} ")
    of_tenants(one).forget(B)
    assert set(of_tenants(keyring(1, tenants=str(tmp_path))).forgotten) == {A, B}


@pytest.mark.parametrize(
    ("who", "generation", "at"),
    [(A, "9" * 5000, "1"), (A, "1", "9" * 5000), (A, "1" * 19, "1"), (NO_TENANT, "1", "1")],
)
def test_a_line_that_no_server_writes_is_no_tombstone(tmp_path, who, generation, at):
    ring = keyring(1, tenants=str(tmp_path))
    with open(tmp_path / "forgotten", "a") as stones:
        stones.write(f"lmtier-forgotten-1 {who.hex()} {generation} {at}\n")
    assert not of_tenants(ring).read_tombstones()
    later = keyring(1, tenants=str(tmp_path))
    assert not of_tenants(later).forgotten
    for key in of(A), value_key(b"name"):
        assert ring.opening_secret(key, later.sealing_secret(key).id) is not None
    of_tenants(ring).forget(A)
    assert of_tenants(ring).forgotten[A].generation == 1


def test_an_object_costs_one_look_at_the_store_of_keys(tmp_path, monkeypatch):
    ring, looked = keyring(1, tenants=str(tmp_path)), list[str]()
    secret, real = ring.sealing_secret(of(A)), os.stat

    def look(path: str, **more: bool) -> os.stat_result:
        looked.append(str(path))
        return real(path, **more)

    monkeypatch.setattr(os, "stat", look)
    assert ring.sealing_secret(of(A)) is ring.opening_secret(of(A), secret.id) is secret
    assert [path for path in looked if path.startswith(str(tmp_path))] == [f"{tmp_path}/forgotten"] * 2


def test_a_new_tier_key_renews_tenants_keys_and_keeps_old(tmp_path):
    folder = str(tmp_path / "tenants")
    source = key_file(tmp_path, 1)
    ring = Keyring(source, folder)
    old = ring.sealing_secret(of(A)).id
    key_file(tmp_path, 2, 1)
    new = ring.sealing_secret(of(A)).id
    assert new != old
    assert ring.opening_secret(of(A), old) is not None
    fresh = Keyring(key_file(tmp_path, 2), folder)
    assert fresh.opening_secret(of(A), new) is not None
    assert fresh.opening_secret(of(A), old) is None, "the key that wraps it is gone"
    key_file(tmp_path, 2, 1)
    assert fresh.opening_secret(of(A), old) is not None, "and back"
    assert of_tenants(fresh).forget(A) == 2
    assert fresh.opening_secret(of(A), old) is fresh.opening_secret(of(A), new) is None


def test_hosts_that_rotate_in_turn_make_two_tenant_keys(tmp_path):
    one, two = (keyring(*numbers, tenants=str(tmp_path)) for numbers in ((2, 1), (1, 2)))
    made = {(ring, ring.sealing_secret(of(A)).id) for _ in range(10) for ring in (one, two)}
    assert len(made) == 2
    assert len((tmp_path / A.hex()).read_text().splitlines()) == 2
    for ring in (one, two):
        assert all(ring.opening_secret(of(A), id_) is not None for _, id_ in made)


def test_waiting_for_another_process_stops_no_reader(tmp_path, monkeypatch):
    """The wait ends."""
    monkeypatch.setattr("lmtier.tiers.keyring._LOCK_SECONDS", 1.0)
    ring = keyring(tenants=str(tmp_path))
    known = ring.sealing_secret(of(A)).id
    failed: list[OSError] = []

    def store() -> None:
        try:
            ring.sealing_secret(of(B))
        except OSError as error:
            failed.append(error)

    with (tmp_path / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        storing = threading.Thread(target=store)
        storing.start()
        while storing.is_alive():
            assert ring.opening_secret(of(A), known) is not None
        storing.join()
        with pytest.raises(TierError, match="another process holds"):
            of_tenants(ring).forget(A)
    assert isinstance(failed[0], TimeoutError)
    assert ring.sealing_secret(of(B)) is not None


def test_a_line_that_a_power_loss_tore_costs_that_key_only(tmp_path):
    ring = keyring(1, tenants=str(tmp_path))
    old = ring.sealing_secret(of(A)).id
    path = tmp_path / A.hex()
    path.write_text(path.read_text()[:-1] + "\nlmtier-tenant-1 0123")
    later = keyring(1, tenants=str(tmp_path))
    assert later.sealing_secret(of(A)).id == old
    other = keyring(2, 1, tenants=str(tmp_path))
    new = other.sealing_secret(of(A)).id
    assert {ring.opening_secret(of(A), each) is not None for each in (old,)} == {True}
    assert keyring(2, 1, tenants=str(tmp_path)).opening_secret(of(A), new) is not None


def test_a_damaged_key_of_a_tenant_is_a_miss_and_is_said(tmp_path, caplog):
    ring = keyring(1, tenants=str(tmp_path))
    old = ring.sealing_secret(of(A)).id
    path = tmp_path / A.hex()
    text = path.read_text()
    path.write_text(text[:-3] + ("0" if text[-3] != "0" else "1") + text[-2:])
    assert keyring(1, tenants=str(tmp_path)).opening_secret(of(A), old) is None
    assert f"a key of tenant {A.hex()} is damaged" in caplog.text


def test_another_tenants_file_is_no_key_for_this_one(tmp_path):
    """An attacker who may write there cannot make B's KV readable with A's key."""
    ring = keyring(1, tenants=str(tmp_path))
    ring.sealing_secret(of(A))
    os.link(tmp_path / A.hex(), tmp_path / B.hex())
    again = keyring(1, tenants=str(tmp_path))
    assert again.sealing_secret(of(B)).id != again.sealing_secret(of(A)).id


def test_objects_from_before_tenants_had_keys_are_read(tmp_path):
    each, objects = replace_start(sample(1), b"mod_" + A), dict[Name, bytes]()
    for ring in (keyring(1), keyring(1, tenants=str(tmp_path))):
        with closing(MemoryTier(objects)) as tier:
            tier.use_keys(ring)
            if not objects:
                store(tier, each)
            assert load(tier, each.name, each.room)[0].ok


def test_a_retired_key_opens_nothing_in_a_running_server(tmp_path):
    """Neither objects nor the keys of tenants."""
    for tenants in ("", str(tmp_path / "tenants")):
        ring = Keyring(key_file(tmp_path, 1), tenants)
        secret = ring.sealing_secret(of(A))
        key_file(tmp_path, 2)
        assert ring.sealing_secret(of(A)).id != secret.id
        assert ring.opening_secret(of(A), secret.id) is None
        with pytest.raises(NoKey, match="was destroyed"):
            secret.key(bytes(32))


def test_what_verify_reads_is_in_no_core_dump():
    checker = _Checker(-1, 0, None)
    for buffer in (checker._page, checker._payload):
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        assert "dd" in memory_flags(address), "the kernel's word for: do not dump"
