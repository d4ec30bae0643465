"""Layer by layer: a load needs each layer once and no later one; a save that stops leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lmtier.config import Config
from lmtier.copy.mover import Mover
from lmtier.copy.paging import PagedKV
from lmtier.core.cache import Cache
from lmtier.core.grant import Grant
from lmtier.format.keys import Identity
from lmtier.format.layout import Layout, Name, Shard
from lmtier.testing import MemoryTier

C, N, L, H, D = 8, 4, 4, 2, 8
BLOCKS = 64
SPARE = range(BLOCKS - 8, BLOCKS)
IDENTITY = Identity(model="tiny", weights="w1")
WHOLE = (Shard(0, L, 0, H),)
RANKS = (Shard(0, L, 0, 1), Shard(0, L, 1, 2))
STAGES = (Shard(0, 1, 0, H), Shard(1, L, 0, H))


def layout(packing: str = "token") -> Layout:
    return Layout.uniform(
        layers=L, heads=H, head_dim=D, dtype="bf16", block_tokens=N, chunk_tokens=C, packing=packing
    )


class Engine:
    """All ranks of an engine in one process: random KV behind shuffled block ids, a mover per shard."""

    def __init__(
        self, cache: Cache, seed: int = 0, shards: Sequence[Shard] = WHOLE, packing: str = "token"
    ) -> None:
        self.cache = cache
        random_kv = torch.Generator().manual_seed(seed)
        shape = (BLOCKS, H, N, 2 * D)
        self.layers = [torch.randn(*shape, generator=random_kv).bfloat16() for _ in range(L)]
        self.movers = []
        for shard in shards:
            parts = [
                layer[:, shard.first_head : shard.end_head]
                for layer in self.layers[shard.first_layer : shard.end_layer]
            ]
            planes = [(part[..., :D], part[..., D:]) if packing == "planes" else part for part in parts]
            kv = PagedKV(layout(packing), shard, planes)
            self.movers.append(Mover(cache, kv, IDENTITY, ranks=shards, spare_blocks=SPARE))
        self.mover = self.movers[0]
        self._free = random.Random(seed).sample(range(BLOCKS - 8), BLOCKS - 8)

    def blocks(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // N))]

    def recompute(self, blocks: list[int]) -> None:
        """Other KV in these blocks."""
        for layer in self.layers:
            layer[blocks] = torch.randn(len(blocks), H, N, 2 * D).bfloat16()

    def save(self, tokens, blocks: list[int]) -> Grant:
        chain = self.mover.chain(tokens)
        reservation = self.cache.reserve(chain.keys, self.mover.form)
        for mover in self.movers:
            with mover.save(chain, blocks, grant=reservation) as saving:
                for layer in range(mover.kv.shard.first_layer, mover.kv.shard.end_layer):
                    saving.layer(layer)
        return reservation

    def load(self, tokens, blocks: list[int]) -> int:
        match = self.mover.match(self.mover.chain(tokens))
        with self.mover.load(match, blocks) as loading:
            for layer in range(L):
                loading.layer(layer)
            return loading.finish()

    def matched(self, tokens) -> list[int]:
        """How many chunks each rank finds."""
        found = []
        for mover in self.movers:
            match = mover.match(mover.chain(tokens))
            found.append(match.chunks)
            self.cache.release(match)
        return found

    def kv(self, blocks: list[int], tokens: int) -> torch.Tensor:
        return torch.stack([layer[blocks[: tokens // N]] for layer in self.layers]).view(torch.int16)


@dataclass
class Place:
    """Where the caches of one test keep what they have."""

    path: Path

    def open(self, *more: str, tiers=None) -> Cache:
        urls = ["cpu://?capacity=1MiB", *(more or [self.disk("kv")])]
        config = Config(tiers=urls, chunk_tokens=C, verify="always", load_deadline=30, prefault=False)
        return Cache(config, tiers=tiers)

    def disk(self, name: str) -> str:
        return f"disk://{self.path}/{name}?capacity=10MiB&write=always"

    def files(self, pattern: str = "*.L*") -> list[Path]:
        return list((self.path / "kv").rglob(pattern))


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture
def cache(place):
    with place.open() as cache:
        yield cache
        cache.flush()
        cache.check()
        assert cache.index.leased_bytes == 0


# ---- loading


@pytest.mark.parametrize(
    ("asked", "found"),
    [(range(33), 32), ([*range(16), *range(90, 107)], 16), (range(90, 123), 0)],
    ids=["full hit", "partial hit", "total miss"],
)
@pytest.mark.parametrize("order", [range(L), (2, 0, 3, 1)])
def test_a_load_takes_one_call_a_layer_whatever_was_found(cache, asked, found, order):
    one, other = Engine(cache, 1), Engine(cache, 2)
    blocks, target = one.blocks(32), other.blocks(33)
    one.save(range(32), blocks)
    before = other.kv(target, 32)
    loading = other.mover.load(other.mover.match(other.mover.chain(asked)), target)
    assert loading.tokens == found
    with loading:
        for layer in order:
            loading.layer(layer)
        assert loading.finish() == found
        assert loading.finish() == found, "asking again changes nothing"
    after, chunks = other.kv(target, 32), found // N
    assert torch.equal(after[:, :chunks], one.kv(blocks, found))
    assert torch.equal(after[:, chunks:], before[:, chunks:])


@pytest.mark.parametrize("packing", ["token", "planes"])
@pytest.mark.parametrize("stored_as", [WHOLE, RANKS, STAGES], ids=["whole", "two ranks", "two stages"])
@pytest.mark.parametrize("order", [range(L), (2, 0, 3, 1)])
def test_a_layer_is_ready_alone_and_touches_no_other(cache, packing, stored_as, order):
    """Every layer is garbage in the slab until it is its turn: who reads ahead, or writes aside, is seen."""
    writer = Engine(cache, 1, stored_as)
    blocks = writer.blocks(24)
    writer.save(range(24), blocks)
    reader = Engine(cache, 2, packing=packing)
    target = reader.blocks(25)
    wanted, stored = writer.kv(blocks, 24), layout()
    match = reader.mover.match(reader.mover.chain(range(25)))
    places: dict[int, list[memoryview]] = {layer: [] for layer in range(L)}
    placement = match.grant.placement
    for form, offsets in zip(placement.forms, placement.offsets, strict=True):
        for shard, offset in zip(form.shards, offsets, strict=True):
            for layer in range(shard.first_layer, shard.end_layer):
                at = offset + stored.offsets(shard)[layer - shard.first_layer]
                places[layer].append(cache.slab.view(at, stored.layer_bytes(layer, shard)))
    truth = {layer: [bytes(view) for view in views] for layer, views in places.items()}
    for view in (view for views in places.values() for view in views):
        view[:] = b"\xa5" * len(view)
    with reader.mover.load(match, target) as loading:
        for layer in order:
            for view, data in zip(places[layer], truth[layer], strict=True):
                view[:] = data
            before = [each.clone() for each in reader.layers]
            loading.layer(layer)
            for number, was in enumerate(before):
                if number == layer:
                    was[target[:6]] = wanted[layer].view(torch.bfloat16)
                assert torch.equal(reader.layers[number].view(torch.int16), was.view(torch.int16))
            for view in places[layer]:
                view[:] = b"\x5a" * len(view)  # and it is not read again
        assert loading.finish() == 24


def test_one_load_takes_chunks_from_every_kind_of_tier(place):
    class Asked(MemoryTier):
        keeps = False

    objects: dict[Name, bytes] = {}
    near, far = place.disk("near"), place.disk("far")
    for url, tokens in ((near, 32), (far, 48), ("shared://", 64)):
        with place.open(url, tiers={"shared://": Asked(objects)}) as cache:
            one = Engine(cache, 1)
            blocks = one.blocks(64)
            one.save(range(tokens), blocks[: tokens // N])
    with place.open(near, far, "shared://", tiers={"shared://": Asked(objects)}) as cache:
        other = Engine(cache, 2)
        assert other.load(range(17), other.blocks(17)) == 16
        target = other.blocks(65)
        match = other.mover.match(other.mover.chain(range(65)))
        assert match.sources == [tier for tier in ("cpu", "disk", "disk-2", "shared") for _ in "12"]
        with other.mover.load(match, target) as loading:
            for layer in range(L):
                loading.layer(layer)
            assert loading.finish() == 64
        assert torch.equal(other.kv(target, 64), one.kv(blocks, 64))
        assert cache.metrics.value("lmtier_verified_total") == 2 + 8
        cache.check()


# ---- the longest prefix that every rank has


@pytest.mark.parametrize("lost", [0, 2, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_chunk_that_one_rank_lost_is_lost_for_all(place, lost, rank):
    with place.open() as cache:
        one = Engine(cache, 1, RANKS)
        blocks = one.blocks(40)
        one.save(range(40), blocks)
        key = one.mover.chain(range(40)).keys[lost]
    (file,) = place.files(f"{key.hex()}.{RANKS[rank]}")
    file.unlink()
    with place.open() as cache:
        two, alone = Engine(cache, 1, RANKS), Engine(cache, 2)
        assert two.matched(range(41)) == [lost, lost]
        assert alone.matched(range(41)) == [lost], "nor is half of it of use to a rank that wants both"
        assert two.save(range(40), blocks).chunks == (lost,), "it alone is stored again"
        assert two.matched(range(41)) == [5, 5]
        target = alone.blocks(41)
        assert alone.load(range(41), target) == 40
        assert torch.equal(alone.kv(target, 40), one.kv(blocks, 40))


def test_a_tier_that_is_asked_must_have_every_rank_too(place):
    class Asked(MemoryTier):
        keeps = False

    objects: dict[Name, bytes] = {}
    with place.open("shared://", tiers={"shared://": Asked(objects)}) as cache:
        one = Engine(cache, 1, RANKS)
        one.save(range(40), one.blocks(40))
        key = one.mover.chain(range(40)).keys[3]
    del objects[Name(key, RANKS[1])]
    with place.open("shared://", tiers={"shared://": Asked(objects)}) as cache:
        assert Engine(cache, 1, RANKS).matched(range(41)) == [3, 3]


def test_what_comes_after_a_gap_is_kept_and_not_matched(cache):
    engine = Engine(cache, 1)
    blocks = engine.blocks(40)
    engine.save(range(40), blocks)
    gap = cache.index.get(engine.mover.chain(range(40)).keys[2])
    assert gap is not None
    cache.discard(gap.key, gap.form)
    cache.flush()
    assert engine.matched(range(41)) == [2]
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="behind_a_gap") == 2 * C
    assert engine.save(range(40), blocks).chunks == (2,)
    assert engine.matched(range(41)) == [5]


# ---- saving what grows, stops and comes back


def test_a_chunk_of_prompt_and_answer_is_stored_when_full(cache):
    engine, other = Engine(cache, 1), Engine(cache, 2)
    prompt, answer = list(range(20)), list(range(500, 513))
    blocks = engine.blocks(33)
    chain, stored = engine.mover.chain([]), []
    for fresh in (prompt, *([token] for token in answer)):
        chain.extend(fresh)
        with engine.mover.save(chain, blocks) as saving:
            saving.all()
        stored.append(saving.tokens)
    assert stored == [16, 0, 0, 0, 8, *[0] * 7, 8, 0], "at tokens 20, 24 and 32"
    target = other.blocks(34)
    assert other.load([*prompt, *answer, 7], target) == 32
    assert torch.equal(other.kv(target, 32), engine.kv(blocks, 32))
    assert other.matched([*prompt, *range(600, 620)]) == [2], (
        "another answer shares the prompt's whole chunks"
    )


@pytest.mark.parametrize("done_before", [0, 16], ids=["in its first chunks", "in its second step"])
def test_a_preempted_request_is_saved_from_its_new_blocks(cache, place, done_before):
    engine, other = Engine(cache, 1), Engine(cache, 2)
    blocks = engine.blocks(32)
    if done_before:
        engine.save(range(done_before), blocks)
    had = engine.kv(blocks, 32)
    stored, used = cache.metrics.value("lmtier_stored_tokens_total", tier="cpu"), cache.slab.used
    saving = engine.mover.save(engine.mover.chain(range(32)), blocks)
    for layer in range(L // 2):
        saving.layer(layer)
    saving.abort()
    assert cache.slab.used == used
    assert engine.matched(range(33)) == [done_before // C]
    engine.recompute(blocks)  # they belong to somebody else now

    resumed = engine.blocks(32)
    new = engine.save(range(32), resumed)
    assert sorted(new.chunks) == list(range(done_before // C, 4))
    assert not engine.save(range(32), resumed).chunks
    assert cache.metrics.value("lmtier_stored_tokens_total", tier="cpu") - stored == 32 - done_before
    assert cache.flush()
    assert cache.stats()["cpu"]["chunks"] == cache.stats()["disk"]["chunks"] == len(place.files()) == 4
    target = other.blocks(33)
    assert other.load(range(33), target) == 32
    first = done_before // N
    assert torch.equal(other.kv(target, 32)[:, :first], had[:, :first])
    assert torch.equal(other.kv(target, 32)[:, first:], engine.kv(resumed, 32)[:, first:])
