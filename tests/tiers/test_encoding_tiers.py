"""Tiers with a codec: what they keep, what they give back, what they count, and under which keys."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtier.client.client import Client
from lmtier.config import Config, TierSpec
from lmtier.copy.mover import Mover, fill_identity
from lmtier.copy.paging import PagedKV
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError
from lmtier.format.compression import CODECS, MissingLibrary
from lmtier.format.keys import Identity
from lmtier.format.layout import PAGE, Layout, Name, Shard, form_of, stored_size
from lmtier.format.objects import Header
from lmtier.testing import MemoryTier, load, lookup, run, sample, store
from lmtier.tiers.base import Item, Job, Op, Reason, Stat, Tier
from lmtier.tiers.registry import open_tier
from lmtier_backends.disk import verify
from tests.kv_bytes import kv_like, kv_sample, no_library
from tests.redis_process import RedisServer, running
from tests.server.process import served

EXACT = [name for name, codec in CODECS.items() if codec.is_exact]
SMALLER = ["bitshuffle-lz4", "shuffle-zstd", "fp8", "int8"]
C = 64
LAYOUT = Layout.uniform(
    layers=4, heads=2, head_dim=64, dtype="bf16", block_tokens=16, chunk_tokens=C, packing="token"
)
ONE = form_of(LAYOUT, (LAYOUT.whole,))
TWO = form_of(LAYOUT, (Shard(0, 4, 0, 1), Shard(0, 4, 1, 2)))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["disk", "redis", "redis in parts"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return f"disk://{tmp_path}/kv?capacity=1GiB"
    server = request.getfixturevalue("redis")
    space = f"{abs(hash(request.node.name))}"
    part = "&part=4KiB" if "parts" in request.param else ""
    return f"redis://127.0.0.1:{server.port}?namespace={space}{part}"


def opened(url: str, codec: str) -> Tier:
    return open_tier(TierSpec.parse(f"{url}&codec={codec}"))


# ---- a tier


@pytest.mark.parametrize("codec", SMALLER)
def test_an_encoding_tier_takes_less_and_gives_all_back(url, codec):
    """Readers with any codec get it."""
    each, mark = kv_sample(1, mark=bytes(range(16))), bytes(range(16))
    with closing(opened(url, codec)) as tier:
        done = store(tier, each)
        stat = done.ok[each.name]
        assert isinstance(stat, Stat)
        assert stat.nbytes < each.room
        assert lookup(tier, each.name)[each.name].nbytes == stat.nbytes
        assert tier.codec == codec
    for word in ("raw", "shuffle-zstd", "int8"):
        with closing(opened(url, word)) as tier:
            done, got = load(tier, each.name, each.room)
            assert not done.failed
            (header,) = done.ok.values()
            assert isinstance(header, Header)
            assert (header.codec, header.nbytes) == (codec, each.header.nbytes)
            assert (got == each.payload, header.mark == mark) == (codec in EXACT, codec in EXACT)
            assert run(tier, Job(0, Op.PEEK, (Item(each.name),))).ok == {each.name: header}


def test_what_does_not_shrink_is_stored_as_it_is(tmp_path):
    each, objects = sample(2, 64 * PAGE), dict[Name, bytes]()
    for codec in CODECS:
        with closing(MemoryTier(objects)) as tier:
            tier.use_codec(codec)
            assert store(tier, each).ok == {each.name: None}
            assert objects == {each.name: each.at_rest()}


@pytest.mark.parametrize("codec", SMALLER)
def test_a_spoilt_object_is_a_miss_and_goes(codec):
    each, objects = kv_sample(3), dict[Name, bytes]()
    with closing(MemoryTier(objects)) as tier:
        tier.use_codec(codec)
        store(tier, each)
        sound = objects[each.name]
        for spoilt in (
            *(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :] for at in (70, 80, 88, PAGE, PAGE + 999)),
            *(sound[:-PAGE], sound[: PAGE + 1], sound[:PAGE], sound[:100], sound + bytes(PAGE)),
            sound[:PAGE] + bytes(len(sound) - PAGE),
        ):
            objects[each.name] = spoilt
            done, _ = load(tier, each.name, each.room)
            assert (done.ok, done.failed) == ({}, {each.name: Reason.CORRUPT})
            assert not objects
        objects[each.name] = sound
        assert load(tier, each.name, each.room)[0].ok


def test_without_its_library_an_object_is_missed_and_kept(caplog):
    """One warning names the library."""
    samples, objects = [kv_sample(i) for i in range(4, 7)], dict[Name, bytes]()
    with closing(MemoryTier(objects)) as tier:
        tier.use_codec("shuffle-zstd")
        store(tier, *samples)
    before = dict(objects)
    with no_library(), closing(MemoryTier(objects)) as tier, caplog.at_level(logging.WARNING):
        for each in samples:
            assert load(tier, each.name, each.room)[0].failed == {each.name: Reason.FOREIGN}
        (warning,) = (record.getMessage() for record in caplog.records)
    assert "codec=shuffle-zstd needs the package blosc" in warning
    assert objects == before, "somebody else may have what it takes"


@pytest.mark.parametrize("word", ["bitshuffle-lz4", "shuffle-zstd"])
def test_a_tier_whose_library_is_missing_does_not_open(word, tmp_path):
    url = f"disk://{tmp_path}/kv?capacity=1GiB&codec={word}"
    with no_library():
        with pytest.raises(MissingLibrary, match=r"needs the package blosc: pip install 'lmtier\[codecs\]'"):
            Cache(Config(tiers=("cpu://?capacity=1MiB", url), prefault=False, load_deadline=30.0))
        with closing(opened(f"disk://{tmp_path}/kv?capacity=1GiB", "raw")):
            pass  # and left nothing open


def test_an_unknown_word_is_told(tmp_path):
    with pytest.raises(ConfigError, match="unknown codec=shufle-zstd; did you mean 'shuffle-zstd'"):
        TierSpec.parse(f"disk://{tmp_path}?codec=shufle-zstd")
    with pytest.raises(ConfigError, match="unknown option 'codec'"):
        Config(tiers=("cpu://?capacity=1MiB&codec=shuffle-zstd",))


def test_a_tier_of_another_kind_says_that_it_has_no_codecs():
    class Other(MemoryTier):
        use_codec = Tier.use_codec

    with closing(Other()) as tier:
        tier.use_codec("raw")
        with pytest.raises(ConfigError, match="has no codecs; remove codec=shuffle-zstd"):
            tier.use_codec("shuffle-zstd")


def test_a_disk_with_codecs_is_verified_without_a_library(tmp_path):
    root = tmp_path / "kv"
    samples = [kv_sample(i) for i in range(6)]
    for codec, each in zip(("raw", *SMALLER), samples, strict=False):
        with closing(opened(f"disk://{root}?readers=1", codec)) as tier:
            store(tier, each)
    with no_library():
        report = verify(root)
    assert (report.ok, report.findings) == (5, [])


# ---- a cache over it


def fill(cache: Cache, names: list[bytes], form=ONE, *, fits: bool = True) -> None:
    reservation = cache.reserve(names, form)
    for key, offsets in reservation.places:
        for offset, shard in zip(offsets, form.shards, strict=True):
            cache.slab.view(offset, LAYOUT.nbytes(shard))[:] = content(key, shard)
    for shard in reservation.form.shards if reservation.chunks else ():
        cache.commit(reservation, shard)
    assert cache.flush() or not fits


def content(key: bytes, shard: Shard) -> bytes:
    return kv_like(LAYOUT.nbytes(shard), seed=int.from_bytes(key[-2:], "big"))


def found(cache: Cache, names: list[bytes], form=ONE) -> list[str]:
    match = cache.wait(cache.match(names, form, deadline=20))
    for entry in match.run:
        for offset, shard in zip(entry.offsets, entry.form.shards, strict=True):
            assert cache.slab.view(offset, LAYOUT.nbytes(shard)) == content(entry.key, shard)
    sources = match.sources
    cache.release(match)
    cache.check()
    return sources


def keys(count: int) -> list[bytes]:
    return [b"kv__" + bytes(26) + i.to_bytes(2, "big") for i in range(count)]


def cache_over(url: str, codec: str, chunks: int = 8) -> Cache:
    tiers = (f"cpu://?capacity={chunks * ONE.slab_bytes}", f"{url}&codec={codec}")
    return Cache(Config(tiers=tiers, chunk_tokens=C, prefault=False, load_deadline=30.0))


@pytest.mark.parametrize("form", [ONE, TWO], ids=["one shard", "two shards"])
def test_encoded_chunks_come_back_after_a_restart(url, form):
    """This holds where the tier has another codec by then."""
    label = url.partition(":")[0]
    with cache_over(url, "shuffle-zstd") as cache:
        fill(cache, keys(6), form)
        for entry in cache.index.entries():
            cache.memory.discard(entry.key)
        assert found(cache, keys(6), form) == [label] * 6
        counted = cache.metrics.sums(cache.metrics.codec_bytes, "stage")
        assert counted["given"] == 6 * LAYOUT.nbytes(LAYOUT.whole)
        assert 1.3 < counted["given"] / counted["stored"] < 1.5
    for word in ("raw", "bitshuffle-lz4"):
        with cache_over(url, word) as cache:
            assert found(cache, keys(6), form) == [label] * 6


def test_a_restart_with_other_ranks_reads_it_too(tmp_path):
    url = f"disk://{tmp_path}/kv?capacity=1GiB"
    with cache_over(url, "shuffle-zstd") as cache:
        fill(cache, keys(3), TWO)
    with cache_over(url, "raw") as cache:
        assert found(cache, keys(3), ONE) == ["disk"] * 3


def files(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("??/*"))


def test_the_capacity_is_that_of_what_is_stored(tmp_path):
    """Room for 6 chunks as they are holds 8; never more than its capacity; and the books are exact."""
    size = stored_size(LAYOUT.nbytes(LAYOUT.whole))
    url = f"disk://{tmp_path}/kv?capacity={6 * size}"
    with cache_over(url, "shuffle-zstd", chunks=20) as cache:
        for count in range(1, 19):
            fill(cache, keys(count), fits=count < 7)
            (below,) = cache.lower.owned
            assert below.index.used == files(tmp_path / "kv") <= 6 * size
            cache.check()
            held = len(below.index)
        assert held >= 7
    with cache_over(url, "shuffle-zstd") as cache:
        (below,) = cache.lower.owned
        assert (len(below.index), below.index.used) == (held, files(tmp_path / "kv"))


def test_without_its_library_a_chunk_is_stored_anew(tmp_path):
    url = f"disk://{tmp_path}/kv?capacity=1GiB"
    with cache_over(url, "shuffle-zstd") as cache:
        fill(cache, keys(2))
    with no_library():
        with cache_over(url, "raw") as cache:
            assert found(cache, keys(2)) == []
            assert cache.metrics.value("lmtier_missed_tokens_total", reason="foreign") == 2 * C
            failures = cache.metrics.value(
                "lmtier_tier_failures_total", tier="disk", op="load", reason="foreign"
            )
            assert failures >= 1
            assert cache.metrics.value("lmtier_breaker_open", tier="disk", direction="up") == 0
            cache.flush()
            fill(cache, keys(2))
        with cache_over(url, "raw") as cache:
            assert found(cache, keys(1)) == ["disk"]


def test_a_shared_tier_keeps_what_one_host_cannot_read(redis):
    url = f"redis://127.0.0.1:{redis.port}?namespace=shared"
    with cache_over(url, "shuffle-zstd") as cache:
        fill(cache, keys(2))
    with no_library(), cache_over(url, "raw") as cache:
        assert found(cache, keys(2)) == []
        assert cache.flush()
    with cache_over(url, "raw") as cache:
        assert found(cache, keys(2)) == ["redis"] * 2


def test_the_codec_in_use_is_a_metric(tmp_path):
    with cache_over(f"disk://{tmp_path}/kv?capacity=1GiB", "bitshuffle-lz4") as cache:
        now = cache.metrics.sums(cache.metrics.codec, "codec")
        assert {name for name, value in now.items() if value} == {"bitshuffle-lz4"}


# ---- approximations


def test_a_store_that_approximates_has_keys_of_its_own():
    identity = Identity(model="m", weights="w")
    words = ("", "fp8", "int8", "fp8,int8")
    assert len({fill_identity(identity, LAYOUT, word).digest() for word in words}) == len(words)
    tiers = (
        "cpu://?capacity=1MiB",
        "disk:///a?capacity=1GiB&codec=int8",
        "disk:///b?capacity=1GiB&codec=fp8",
    )
    assert Config(tiers=tiers).approximation == "fp8,int8"
    exact = "null://?codec=bitshuffle-lz4", "null://?codec=shuffle-zstd"
    assert Config(tiers=(*tiers[:1], *exact)).approximation == ""


def test_an_approximation_is_used_and_never_meets_exact_kv(tmp_path):
    """Marks of the exact blocks are not compared with it; those who did not ask for it do not see it."""
    layers = [torch.randn(64, 2, 16, 128).bfloat16() for _ in range(4)]
    before = [layer[:8].clone() for layer in layers]

    def mover(cache: Cache) -> Mover:
        kv = PagedKV(LAYOUT, LAYOUT.whole, layers)
        return Mover(cache, kv, Identity(model="m", weights="w"), spare_blocks=range(32, 64))

    def opened(codec: str) -> Cache:
        tiers = (f"cpu://?capacity={8 * ONE.slab_bytes}", f"disk://{tmp_path}/kv?capacity=1GiB&codec={codec}")
        return Cache(Config(tiers=tiers, chunk_tokens=C, verify="always", prefault=False, load_deadline=30.0))

    tokens = list(range(2 * C + 1))
    with opened("int8") as cache:
        saver = mover(cache)
        with saver.save(saver.chain(tokens), range(9)) as saving:
            saving.all()
        cache.flush()
    with opened("raw") as cache:
        match = mover(cache).match(mover(cache).chain(tokens))
        assert match.chunks == 0
        cache.release(match)
    with opened("int8") as cache:
        loader = mover(cache)
        match = loader.match(loader.chain(tokens))
        assert match.sources == ["disk"] * 2
        with loader.load(match, range(16, 25)) as loading:
            loading.all()
        assert loading.tokens == 2 * C
        assert cache.metrics.value("lmtier_verify_failures_total") == 0
    for layer, was in zip(layers, before, strict=True):
        error = (layer[16:24].float() - was.float()).norm() / was.float().norm()
        assert 0 < error < 0.012


def test_a_server_that_returns_approximating_is_not_used(tmp_path, caplog):
    """Keys of exact KV do not go where it would be approximated."""
    cpu, disk = "cpu://?capacity=1MiB", f"disk://{tmp_path}/kv?capacity=1MiB"
    path = str(tmp_path / "sock")
    settings: Any = {"config": {"chunk_tokens": C}, "unix": path}
    with served(tmp_path, cpu, disk, **settings) as server, Client(path) as client:
        assert client.approximation == ""
        server.kill()
        with served(tmp_path, cpu, f"{disk}&codec=fp8", **settings):
            assert client.reserve(keys(3), ONE).dropped == 3
            assert "it came back with approximation=fp8, not" in caplog.text
            with Client(path) as other:
                assert other.approximation == "fp8"
