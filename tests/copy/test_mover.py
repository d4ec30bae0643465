"""KV in and out of engine blocks: the same bytes, only what is new, and never after a failed proof."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.config import Config
from lmtier.copy.mover import Mover, fill_identity
from lmtier.copy.paging import PagedKV
from lmtier.core.cache import Cache
from lmtier.errors import CanaryError, LayoutError, MisuseError
from lmtier.format.keys import Identity
from lmtier.format.layout import LayerShape, Layout, Shard

C, N, L, H, D = 8, 4, 3, 2, 8
BLOCKS = 64
SPARE = range(BLOCKS - 8, BLOCKS)
IDENTITY = Identity(model="tiny", weights="w1")


def layout(packing: str = "token", block_tokens: int = N) -> Layout:
    return Layout.uniform(
        layers=L,
        heads=H,
        head_dim=D,
        dtype="bf16",
        block_tokens=block_tokens,
        chunk_tokens=C,
        packing=packing,
    )


class Engine:
    """Paged KV with random content; block ids are handed out from a shuffled free list."""

    def __init__(self, cache: Cache, seed: int = 0, heads: int = H, shard: Shard | None = None, **options):
        generator = torch.Generator().manual_seed(seed)
        self.layers = [torch.randn(BLOCKS, heads, N, 2 * D, generator=generator).bfloat16() for _ in range(L)]
        self.kv = PagedKV(layout(), shard or layout().whole, self.layers)
        self.mover = Mover(cache, self.kv, IDENTITY, spare_blocks=SPARE, **options)
        self._free = random.Random(seed).sample(range(BLOCKS - 8), BLOCKS - 8)

    def blocks(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // N))]

    def bytes_of(self, blocks, tokens: int) -> torch.Tensor:
        return torch.stack([layer[list(blocks[: tokens // N])] for layer in self.layers]).view(torch.int16)


@pytest.fixture
def cache(tmp_path):
    tiers = ["cpu://?capacity=1MiB", f"disk://{tmp_path}/kv?capacity=10MiB"]
    with Cache(Config(tiers=tiers, chunk_tokens=C, verify="always", prefault=False)) as cache:
        yield cache
        cache.check()


def save(engine: Engine, tokens, blocks, *, layerwise: bool = True, **options) -> int:
    with engine.mover.save(engine.mover.chain(tokens), blocks, **options) as saving:
        if layerwise:
            for number in reversed(range(L)):  # any order will do
                saving.layer(number)
        else:
            saving.all()
    return saving.tokens


def load(engine: Engine, tokens, blocks, *, layerwise: bool = True, computed: int = 0) -> int:
    match = engine.mover.match(engine.mover.chain(tokens))
    with engine.mover.load(match, blocks, computed_tokens=computed) as loading:
        if layerwise:
            for number in range(L):
                loading.layer(number)
        else:
            loading.all()
        return loading.finish()


@pytest.mark.parametrize("saved_layerwise", [True, False])
@pytest.mark.parametrize("loaded_layerwise", [True, False])
def test_what_one_engine_saved_another_loads(cache, saved_layerwise, loaded_layerwise):
    one, other = Engine(cache, 1), Engine(cache, 2)
    tokens = list(range(41))
    blocks, target = one.blocks(41), other.blocks(41)
    assert save(one, tokens, blocks, layerwise=saved_layerwise) == 40
    assert load(other, tokens, target, layerwise=loaded_layerwise) == 40
    assert torch.equal(one.bytes_of(blocks, 40), other.bytes_of(target, 40))
    assert cache.metrics.value("lmtier_verified_total") == 5
    assert cache.metrics.value("lmtier_verify_failures_total") == 0


def test_only_new_tokens_are_stored_and_the_log_says_so(cache, caplog):
    engine = Engine(cache)
    blocks = engine.blocks(32)
    save(engine, range(24), blocks)
    with caplog.at_level(logging.INFO, "lmtier"):
        assert save(engine, range(32), blocks) == 8
    assert "Storing KV cache for 8 out of 32 tokens (skip_leading_tokens=24)" in caplog.messages


def test_blocks_of_skipped_tokens_are_never_read(cache):
    engine = Engine(cache)
    blocks = engine.blocks(32)
    reads: list[int] = []
    real = engine.kv.bind_all

    def bind_all(ids, offsets, view):
        reads.extend(ids.reshape(-1).tolist())
        return real(ids, offsets, view)

    engine.kv.bind_all = bind_all  # type: ignore[method-assign]
    assert save(engine, range(32), blocks, skip_leading_tokens=16) == 16
    assert set(reads) == set(blocks[4:])


def test_a_skip_that_ends_inside_a_chunk_is_refused(cache):
    engine = Engine(cache)
    with pytest.raises(LayoutError, match="multiple of chunk_tokens"):
        save(engine, range(32), engine.blocks(32), skip_leading_tokens=12)
    assert cache.index.used == 0


def test_too_few_blocks_drop_that_save_only(cache):
    engine = Engine(cache)
    blocks = engine.blocks(32)
    with pytest.raises(LayoutError, match="chunk 3 needs blocks 6 to 8"):
        save(engine, range(32), blocks[:-1])
    assert cache.index.used == 0
    assert save(engine, range(32), blocks) == 32


def test_a_block_may_serve_two_chunks_but_not_one_twice(cache):
    engine = Engine(cache)
    blocks = engine.blocks(32)
    with pytest.raises(LayoutError, match=rf"twice among \[{blocks[4]}, {blocks[4]}\]"):
        save(engine, range(32), [*blocks[:5], blocks[4], *blocks[6:]])
    assert cache.index.used == 0
    shared = [*blocks[:4], blocks[0], *blocks[5:]]
    assert save(engine, range(32), shared) == 32
    target = engine.blocks(32)
    assert load(engine, [*range(32), 32], target) == 32
    assert torch.equal(engine.bytes_of(shared, 32), engine.bytes_of(target, 32))


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 15), min_size=1, max_size=6), layerwise=st.booleans())
def test_chunked_prefill_stores_what_one_step_stores(cuts, layerwise):
    config = Config(tiers=["cpu://?capacity=1MiB"], chunk_tokens=C, prefault=False)
    with Cache(config) as stepwise, Cache(config) as at_once:
        total = sum(cuts)
        one, other = Engine(stepwise, 1), Engine(at_once, 1)
        blocks = one.blocks(total)
        other.blocks(total)
        chain, done = one.mover.chain([]), 0
        stored = 0
        for cut in cuts:
            chain.extend(range(done, done + cut))
            done += cut
            with one.mover.save(chain, blocks) as saving:
                saving.all()
            stored += saving.tokens
        assert stored == save(other, range(total), blocks, layerwise=layerwise)
        assert {e.key for e in stepwise.index.entries()} == {e.key for e in at_once.index.entries()}
        for entry in stepwise.index.entries():
            twin = at_once.index.get(entry.key)
            assert twin is not None
            views = [
                bytes(c.slab.view(e.offsets[0], one.kv.nbytes))
                for c, e in ((stepwise, entry), (at_once, twin))
            ]
            assert views[0] == views[1]


def test_an_exception_between_layers_leaves_nothing_visible(cache):
    engine = Engine(cache)
    blocks = engine.blocks(16)

    def prefill_that_fails() -> None:
        with engine.mover.save(engine.mover.chain(range(16)), blocks) as saving:
            saving.layer(0)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        prefill_that_fails()
    assert cache.index.used == 0
    assert load(engine, range(17), engine.blocks(17)) == 0


def test_a_save_that_lacks_a_layer_cannot_be_committed(cache):
    engine = Engine(cache)
    saving = engine.mover.save(engine.mover.chain(range(16)), engine.blocks(16))
    saving.layer(0)
    saving.layer(2)
    with pytest.raises(MisuseError, match=r"lacks layers \[1\]"):
        saving.commit()
    saving.abort()


def test_a_full_hit_leaves_at_least_one_token_to_compute(cache):
    engine = Engine(cache)
    save(engine, range(16), engine.blocks(16))
    assert load(engine, range(16), engine.blocks(16)) == 8
    assert load(engine, range(17), engine.blocks(17)) == 16
    assert load(engine, [], []) == 0


def test_slots_the_engine_computed_are_not_overwritten(cache):
    one, other = Engine(cache, 1), Engine(cache, 2)
    blocks, target = one.blocks(24), other.blocks(24)
    save(one, range(24), blocks)
    before = other.bytes_of(target, 24)
    assert load(other, range(25), target, computed=12) == 24
    after, wanted = other.bytes_of(target, 24), one.bytes_of(blocks, 24)
    assert torch.equal(after[:, :3], before[:, :3])
    assert torch.equal(after[:, 3:], wanted[:, 3:])
    with pytest.raises(LayoutError, match="whole blocks"):
        load(other, range(25), target, computed=13)


def test_after_a_restart_the_bytes_come_from_disk(tmp_path):
    tiers = ["cpu://?capacity=1MiB", f"disk://{tmp_path}/kv?capacity=10MiB"]
    config = Config(tiers=tiers, chunk_tokens=C, verify="always", prefault=False)
    with Cache(config) as cache:
        one = Engine(cache, 1)
        blocks = one.blocks(40)
        save(one, range(40), blocks)
    with Cache(config) as cache:
        other = Engine(cache, 2)
        target = other.blocks(41)
        assert load(other, range(41), target) == 40
        assert torch.equal(one.bytes_of(blocks, 40), other.bytes_of(target, 40))
        assert cache.metrics.value("lmtier_hit_tokens_total", tier="disk") == 40
        assert cache.metrics.value("lmtier_verified_total") == 5, "fingerprints came back with the header"


def test_keys_separate_what_must_not_be_shared(cache):
    engine = Engine(cache)
    save(engine, range(16), engine.blocks(16))
    other = Mover(cache, engine.kv, Identity(model="tiny", weights="w2"), spare_blocks=SPARE)
    unknown = Mover(cache, engine.kv, Identity(model="tiny"), spare_blocks=SPARE)
    for mover, salt, lora in (
        (other, "", ""),
        (unknown, "", ""),
        (engine.mover, "tenant", ""),
        (engine.mover, "", "adapter"),
    ):
        match = mover.match(mover.chain(range(17), salt=salt, lora=lora))
        assert match.chunks == 0
        cache.release(match)


def test_a_latent_layout_has_one_plane_in_its_keys():
    latent = Layout((LayerShape(1, 16, 0),), dtype="bf16", block_tokens=N, chunk_tokens=C, packing="latent")
    assert fill_identity(IDENTITY, latent, "").planes == 1
    assert fill_identity(IDENTITY, layout(), "").planes == 2


# ---- what must not leak, or be believed too early


def test_a_load_that_cannot_begin_ends_its_leases(cache):
    engine = Engine(cache)
    save(engine, range(16), engine.blocks(16))
    with pytest.raises(LayoutError, match="needs blocks"):
        load(engine, range(17), engine.blocks(4))
    assert cache.index.leased_bytes == 0


def test_a_released_match_cannot_be_loaded(cache):
    engine = Engine(cache)
    save(engine, range(16), engine.blocks(16))
    match = engine.mover.match(engine.mover.chain(range(17)))
    cache.release(match)
    with pytest.raises(MisuseError, match="was released"):
        engine.mover.load(match, engine.blocks(17))


def test_a_load_that_lacks_a_layer_is_not_confirmed(cache):
    engine = Engine(cache)
    save(engine, range(16), engine.blocks(16))
    loading = engine.mover.load(engine.mover.match(engine.mover.chain(range(17))), engine.blocks(17))
    loading.layer(0)
    with pytest.raises(MisuseError, match=r"lacks layers \[1, 2\]"):
        loading.finish()
    cache.release(loading.match)


def test_a_with_block_that_skips_a_layer_saves_nothing(cache):
    engine = Engine(cache)
    blocks = engine.blocks(16)

    def forgetful() -> None:
        with engine.mover.save(engine.mover.chain(range(16)), blocks) as saving:
            saving.layer(0)

    with pytest.raises(MisuseError, match="lacks layers"):
        forgetful()
    assert cache.index.used == 0
    assert save(engine, range(16), blocks) == 16


def test_a_proof_that_fails_ends_an_earlier_one(cache):
    engine = Engine(cache)
    with pytest.raises(CanaryError):
        engine.mover.prove(SPARE, block_bytes=1)
    with pytest.raises(MisuseError, match="canary"):
        engine.mover.save(engine.mover.chain(range(8)), engine.blocks(8))


def test_a_second_engine_can_prove_itself_on_a_full_cache():
    config = Config(tiers=["cpu://?capacity=8KiB"], chunk_tokens=C, prefault=False)
    with Cache(config) as cache:
        one = Engine(cache, 1)
        save(one, range(64), one.blocks(64))
        assert cache.index.free < one.kv.nbytes
        Engine(cache, 2)


def test_engines_with_another_dtype_never_share_a_key(cache):
    engine = Engine(cache)
    save(engine, range(16), engine.blocks(16))
    half = Layout.uniform(
        layers=L, heads=H, head_dim=D, dtype="fp16", block_tokens=N, chunk_tokens=C, packing="token"
    )
    kv = PagedKV(half, half.whole, [torch.zeros(BLOCKS, H, N, 2 * D).half() for _ in range(L)])
    other = Mover(cache, kv, IDENTITY, spare_blocks=SPARE)
    assert not set(other.chain(range(16)).keys) & set(engine.mover.chain(range(16)).keys)


def test_replicated_ranks_store_once(cache):
    ranks = [layout().shard(rank=rank, ranks=4) for rank in range(4)]  # 2 heads: each shard twice
    kv = PagedKV(layout(), ranks[0], [torch.zeros(BLOCKS, 1, N, 2 * D).bfloat16() for _ in range(L)])
    mover = Mover(cache, kv, IDENTITY, ranks=ranks, spare_blocks=SPARE)
    assert mover.form.shards == (ranks[0], ranks[2])
    with pytest.raises(LayoutError, match="not among ranks"):
        Mover(cache, kv, IDENTITY, ranks=ranks[2:])


def test_ranks_save_one_reservation_together(cache):
    ranks = [layout().shard(rank=rank, ranks=2) for rank in range(2)]
    memory = [[torch.randn(BLOCKS, 1, N, 2 * D).bfloat16() for _ in range(L)] for _ in ranks]
    movers = [
        Mover(cache, PagedKV(layout(), shard, tensors), IDENTITY, ranks=ranks, spare_blocks=SPARE)
        for shard, tensors in zip(ranks, memory, strict=True)
    ]
    chain = movers[0].chain(range(16))
    with pytest.raises(MisuseError, match="reserve once"):
        movers[0].save(chain, range(4))
    reservation = cache.reserve(chain.keys, movers[0].form)
    for mover in movers:
        with mover.save(chain, range(4), grant=reservation) as saving:
            saving.all()
    match = movers[1].match(chain.extend([99]))
    assert match.chunks == 2
    with movers[1].load(match, range(10, 14)) as loading:
        loading.all()
    assert all(torch.equal(layer[:4], layer[10:14]) for layer in memory[1])


def test_grants_for_another_model_are_refused(cache):
    """Its extents are smaller: the chunks behind them would have been overwritten."""
    smaller = replace(layout(), layers=layout().layers[:1])
    tensors = [torch.randn(BLOCKS, layout().layers[0].heads, N, 2 * D).bfloat16()]
    other = Mover(cache, PagedKV(smaller, smaller.whole, tensors), IDENTITY, spare_blocks=SPARE)
    engine = Engine(cache)
    chain = engine.mover.chain(range(16))
    theirs = cache.reserve(chain.keys, other.form)
    with pytest.raises(MisuseError, match="this mover is for"):
        engine.mover.save(chain, engine.blocks(16), grant=theirs)
    with other.save(chain, range(4), grant=theirs) as saving:
        saving.all()
    match = other.match(chain.extend([99]))
    with pytest.raises(MisuseError, match="this mover is for"):
        engine.mover.load(match, engine.blocks(16))
    assert match.released


def test_recomputed_chunks_are_stored_after_a_failed_check(cache):
    engine = Engine(cache)
    blocks = engine.blocks(32)
    save(engine, range(32), blocks)
    victim = cache.index.get(engine.mover.chain(range(32)).keys[1])
    assert victim is not None
    cache.slab.view(victim.offsets[0], 100)[50] ^= 4
    assert load(engine, range(33), engine.blocks(33)) == 8
    assert save(engine, range(32), blocks) == 8, "one chunk, between those that are still there"
    target = engine.blocks(33)
    assert load(engine, range(33), target) == 32
    assert torch.equal(engine.bytes_of(blocks, 32), engine.bytes_of(target, 32))


# ---- proof


def test_nothing_is_copied_before_the_canary_has_run(cache):
    engine = Engine(cache)
    mover = Mover(cache, engine.kv, IDENTITY)
    with pytest.raises(MisuseError, match="canary"):
        mover.save(mover.chain(range(8)), engine.blocks(8))
    mover.prove(SPARE, block_bytes=L * H * N * 2 * D * 2)
    mover.save(mover.chain(range(8)), engine.blocks(8)).abort()


def test_the_canary_leaves_the_engine_as_it_was(cache):
    engine = Engine(cache)
    before = [layer.clone() for layer in engine.layers]
    engine.mover.prove(SPARE)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.layers, strict=True))


def test_the_canary_sees_a_tensor_of_half_a_block(cache):
    """What made every released peer serve garbage: K and V in one row, read as if it were K alone."""
    packed = [torch.randn(BLOCKS, H, N, 2 * D).bfloat16() for _ in range(L)]
    half = Layout.uniform(
        layers=L, heads=H, head_dim=D // 2, dtype="bf16", block_tokens=N, chunk_tokens=C, packing="token"
    )
    kv = PagedKV(half, half.whole, [layer[..., :D] for layer in packed])
    mover = Mover(cache, kv, IDENTITY)
    with pytest.raises(CanaryError, match="part of the KV would be lost"):
        mover.prove(SPARE, block_bytes=L * packed[0][0].nbytes)


@pytest.mark.parametrize("fault", ["gather", "scatter"])
def test_the_canary_refuses_to_serve_when_a_copy_is_wrong(cache, fault, monkeypatch):
    engine = Engine(cache)
    real = getattr(PagedKV, fault)

    def swapped(self, layer, first, second, *rest):
        ids, buffer = (first, second) if fault == "gather" else (second, first)
        (whole,) = ids
        ids = [whole[1], whole[0], *whole[2:]]
        return real(self, layer, *((ids, buffer) if fault == "gather" else (buffer, ids)), *rest)

    monkeypatch.setattr(PagedKV, fault, swapped)
    with pytest.raises(CanaryError, match="does not return the engine's bytes"):
        engine.mover.prove(SPARE)


def test_the_canary_sees_writes_outside_of_the_target(cache, monkeypatch):
    engine = Engine(cache)
    real = PagedKV.scatter

    def sloppy(self, layer, src, ids, first_block=0):
        real(self, layer, src, ids, first_block)
        engine.layers[0][SPARE[-1]] += 1

    monkeypatch.setattr(PagedKV, "scatter", sloppy)
    with pytest.raises(CanaryError, match="outside of the copy"):
        engine.mover.prove(SPARE)


def test_the_canary_needs_enough_spare_blocks(cache):
    engine = Engine(cache)
    with pytest.raises(CanaryError, match="4 different spare blocks, got 3"):
        engine.mover.prove([1, 2, 3])


# ---- fingerprints


def test_a_bit_that_flips_in_memory_is_caught_by_the_load(cache):
    engine = Engine(cache)
    save(engine, range(32), engine.blocks(32))
    victim = cache.index.get(engine.mover.chain(range(32)).keys[2])
    cache.slab.view(victim.offsets[0], 100)[50] ^= 4
    assert load(engine, range(33), engine.blocks(33)) == 16, "up to the chunk that is wrong"
    assert cache.metrics.value("lmtier_verify_failures_total") == 1
    cache.flush()
    assert load(engine, range(33), engine.blocks(33)) == 16, "it is gone from every tier"
    cache.check()


def test_only_loads_that_succeed_are_verified(cache):
    engine = Engine(cache)
    save(engine, range(32), engine.blocks(32))
    cache.slab.view(cache.index.get(engine.mover.chain(range(32)).keys[2]).offsets[0], 100)[50] ^= 4
    match, blocks = engine.mover.match(engine.mover.chain(range(33))), engine.blocks(33)
    loading = engine.mover.load(match, blocks)
    loading.all()
    loading.__exit__(ZeroDivisionError)
    assert cache.metrics.value("lmtier_verify_failures_total") == 0
    with engine.mover.load(engine.mover.match(engine.mover.chain(range(33))), blocks) as loading:
        loading.all()
    assert (loading.tokens, cache.metrics.value("lmtier_verify_failures_total")) == (16, 1)


@pytest.mark.parametrize(("verify", "marked"), [("off", 0), ("sample", None), ("always", 40)])
def test_verify_says_how_many_chunks_are_marked(verify, marked):
    config = Config(tiers=["cpu://?capacity=4MiB"], chunk_tokens=C, verify=verify, prefault=False)
    with Cache(config) as cache:
        engine = Engine(cache)
        for start in range(0, 400, 10):
            blocks = engine.blocks(8)
            save(engine, range(start, start + 8), blocks)
            engine._free += blocks
        count = sum(bool(entry.marks) and any(any(p) for p in entry.marks) for entry in cache.index.entries())
        assert count == marked if marked is not None else 0 <= count < 15


# ---- mixed fleets


def test_what_two_ranks_saved_one_rank_loads_and_back(cache):
    whole = layout().whole
    halves = [layout().shard(rank=rank, ranks=2) for rank in range(2)]
    one = Engine(cache, 1)
    blocks = one.blocks(24)
    rank_tensors = [[layer[:, rank : rank + 1].contiguous() for layer in one.layers] for rank in range(2)]
    movers = []
    for half, tensors in zip(halves, rank_tensors, strict=True):
        kv = PagedKV(layout(), half, tensors)
        movers.append(Mover(cache, kv, IDENTITY, ranks=halves, spare_blocks=SPARE))

    # two ranks store, as an engine with a scheduler would: one reservation, each rank commits its shard
    chain = movers[0].chain(range(24))
    reservation = cache.reserve(chain.keys, movers[0].form)
    for mover in movers:
        for number, (_, offsets) in zip(reservation.chunks, reservation.places, strict=True):
            view = cache.slab.view(offsets[mover.number], mover.kv.nbytes)
            mover.kv.gather(None, blocks[2 * number : 2 * number + 2], view)
        cache.commit(reservation, mover.kv.shard)

    other = Engine(cache, 2, shard=whole)
    target = other.blocks(25)
    assert load(other, range(25), target) == 24
    assert torch.equal(one.bytes_of(blocks, 24), other.bytes_of(target, 24))

    # and one of two ranks takes its half of what a single rank stored
    save(other, range(100, 124), target)
    match = movers[1].match(movers[1].chain(range(100, 125)))
    with movers[1].load(match, blocks) as loading:
        for number in range(L):
            loading.layer(number)
    got = torch.stack([layer[blocks[:6]] for layer in rank_tensors[1]])
    assert torch.equal(got[:, :, 0], torch.stack([layer[target[:6]] for layer in other.layers])[:, :, 1])


def test_an_engine_reads_tokens_of_other_blocks_and_planes(cache):
    one = Engine(cache, 1)
    blocks = one.blocks(24)
    save(one, range(24), blocks)
    planes = layout("planes", block_tokens=8)
    keys = [torch.zeros(16, H, 8, D).bfloat16() for _ in range(L)]
    values = [torch.zeros(16, H, 8, D).bfloat16() for _ in range(L)]
    kv = PagedKV(planes, planes.whole, list(zip(keys, values, strict=True)))
    mover = Mover(cache, kv, IDENTITY, spare_blocks=range(12, 16))
    match = mover.match(mover.chain(range(25)))
    assert match.chunks == 3
    with mover.load(match, [7, 2, 5, 0]) as loading:
        loading.all()
    for number, layer in enumerate(one.layers):
        tokens = torch.cat([layer[b].transpose(0, 1) for b in blocks[:6]])  # [24, H, K|V]
        assert torch.equal(torch.cat([keys[number][b].transpose(0, 1) for b in (7, 2, 5)]), tokens[..., :D])
        assert torch.equal(torch.cat([values[number][b].transpose(0, 1) for b in (7, 2, 5)]), tokens[..., D:])


def test_an_opaque_packing_fits_only_itself(cache):
    def opaque(name: str) -> Layout:
        return Layout((LayerShape(H, 128, 0),) * L, "u8", N, C, name)

    def mover(name: str) -> Mover:
        memory = [torch.randint(0, 255, (BLOCKS, H, 128), dtype=torch.uint8) for _ in range(L)]
        kv = PagedKV(opaque(name), opaque(name).whole, memory)
        return Mover(cache, kv, IDENTITY, spare_blocks=SPARE)

    amx, vec = mover("amx-tiles"), mover("other-tiles")
    with amx.save(amx.chain(range(16)), range(4)) as saving:
        saving.all()
    for reader, found in ((amx, 2), (vec, 0)):
        match = reader.match(reader.chain(range(17)))
        assert match.chunks == found
        cache.release(match)


# ---- engines with several block tables


class TwoTables(Engine):
    """Layers 0 and 2 slide, layer 1 does not; the first two share memory, as vLLM lays out its groups."""

    TABLES = (1, 0, 1)

    def __init__(self, cache: Cache, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        pools = [torch.randn(BLOCKS, H, N, 2 * D, generator=generator).bfloat16() for _ in range(2)]
        self.layers = [pools[0], pools[0], pools[1]]
        self.kv = PagedKV(layout(), layout().whole, self.layers, tables=self.TABLES)
        self.mover = Mover(cache, self.kv, IDENTITY, spare_blocks=range(BLOCKS - 16, BLOCKS))
        self._free = random.Random(seed).sample(range(BLOCKS - 16), BLOCKS - 16)

    def tables(self, tokens: int) -> list[list[int]]:
        return [self.blocks(tokens), self.blocks(tokens)]

    def rows(self, tables, first: int, end: int) -> list[torch.Tensor]:
        """What the blocks [first, end) of the request hold, layer by layer."""
        return [
            layer[tables[table][first:end]].view(torch.int16)
            for layer, table in zip(self.layers, self.TABLES, strict=True)
        ]


@pytest.mark.parametrize("layerwise", [True, False])
def test_each_layer_goes_by_its_own_block_table(cache, layerwise):
    one, other = TwoTables(cache, 1), TwoTables(cache, 2)
    source, target = one.tables(32), other.tables(32)
    untouched = torch.stack(other.rows([other._free] * 2, 0, 9))
    assert save(one, range(32), source, layerwise=layerwise) == 32
    assert load(other, range(33), target, layerwise=layerwise) == 32
    for ours, theirs in zip(one.rows(source, 0, 8), other.rows(target, 0, 8), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(untouched, torch.stack(other.rows([other._free] * 2, 0, 9)))
    # An engine with one table has the same KV for the same tokens.
    plain = Engine(cache, 3)
    blocks = plain.blocks(32)
    assert load(plain, range(33), blocks) == 32
    for ours, theirs in zip(one.rows(source, 0, 8), plain.layers, strict=True):
        assert torch.equal(ours, theirs[blocks].view(torch.int16))


@pytest.mark.parametrize("gone", [1, 2, 5, 8])
def test_loads_pass_over_blocks_that_left_a_window(cache, gone):
    """A save of such blocks is refused."""
    one, other = TwoTables(cache, 1), TwoTables(cache, 2)
    source, target = one.tables(32), other.tables(32)
    save(one, range(32), source)
    before = [layer.clone() for layer in other.layers]
    full, sliding = target
    assert load(other, range(33), [full, [-1] * gone + sliding[gone:]]) == 32
    for number, table in enumerate(TwoTables.TABLES):
        first = gone if table else 0
        theirs = other.layers[number][target[table][first:]].view(torch.int16)
        assert torch.equal(theirs, one.rows(source, first, 8)[number])
    left = sliding[:gone]
    assert torch.equal(other.layers[2][left], before[2][left])
    with pytest.raises(LayoutError, match="left a sliding window"):
        save(other, range(100, 132), [full, [-1] * gone + sliding[gone:]])


def test_a_hole_in_a_window_is_no_window(cache):
    engine = TwoTables(cache)
    full, sliding = engine.tables(32)
    save(engine, range(32), [full, sliding])
    with pytest.raises(LayoutError, match="block id -1 is outside"):
        load(engine, range(33), [full, [*sliding[:3], -1, *sliding[4:]]])


def test_the_canary_tells_layers_apart_that_share_memory(cache, monkeypatch):
    engine = TwoTables(cache)
    real = PagedKV.gather

    def by_one_table(self, layer, ids, out):
        return real(self, layer, ids[[0, 0]], out)

    monkeypatch.setattr(PagedKV, "gather", by_one_table)
    with pytest.raises(CanaryError, match="does not return the engine's bytes"):
        engine.mover.prove(range(BLOCKS - 16, BLOCKS))
