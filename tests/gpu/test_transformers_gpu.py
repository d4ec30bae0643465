"""Prefixes of transformers models on a GPU: the answers of the model alone, from wherever the KV comes."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import DynamicCache

from lmtier_integrations.transformers import PrefixCache
from tests.engines.models import answer, model_of, prompt_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # what torch, cupy and transformers have to say about themselves
]
C = 16
LENGTHS = (C, C + 1, 3 * C + 5, 40 * C + 3)
LATE = 20_000_000  # cycles: 10 ms or more, in which the host is far ahead


def on_gpu(kind: str, dtype: torch.dtype = torch.float32):
    return copy.deepcopy(model_of(kind, dtype)).to("cuda")


def prompt(tokens: int, seed: int = 1) -> torch.Tensor:
    return prompt_of(tokens, seed).to("cuda")


@pytest.fixture
def opened(tmp_path):
    """Opens one store after the other, on the same folder."""
    stores: list[PrefixCache] = []

    def close():
        while stores:
            store = stores.pop()
            store.close()
            store.cache.check()

    def opened(model, *tiers, **settings):
        close()
        tiers = tiers or ("cpu://?capacity=64MiB", f"disk://{tmp_path}/kv?capacity=256MiB")
        settings = {"chunk_tokens": C, "verify": "always", "load_deadline": 30, **settings}
        stores.append(PrefixCache(model, *tiers, **settings))
        assert stores[-1]._buffer.place.device == torch.device("cuda", torch.cuda.current_device())
        return stores[-1]

    yield opened
    close()


def found(store, ids, *args):
    return [row.total() for row in store.cache_for(ids, *args).loaded]


@pytest.mark.parametrize("verify", ["always", "off"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "deepseek-v2"])
def test_answers_are_those_of_the_model_alone(opened, kind, verify):
    model = on_gpu(kind)
    alone = {tokens: answer(model.generate, prompt(tokens, tokens)) for tokens in LENGTHS}
    store = opened(model, verify=verify)
    for tier in ("", "cpu", "disk"):
        if tier == "disk":
            store = opened(model, verify=verify)
        for tokens in LENGTHS:
            ids, whole = prompt(tokens, tokens), (tokens - 1) // C * C
            cache = store.cache_for(ids)
            assert cache.loaded == [{tier: whole} if tier and whole else {}]
            assert answer(model.generate, ids, past_key_values=cache) == alone[tokens], (tier, tokens)


def test_in_bf16_a_hit_is_what_a_cache_kept_by_hand_is(opened):
    """Rounding depends on how many tokens are computed at once, so a hit is compared with its like."""
    model, ids = on_gpu("llama", torch.bfloat16), prompt(900)
    whole = (900 - 1) // C * C
    computed, kept = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=computed)
    for number, layer in enumerate(computed.layers):
        kept.update(layer.keys[:, :, :whole], layer.values[:, :, :whole], number)
    by_hand = answer(model.generate, ids, past_key_values=kept)
    store = opened(model)
    assert answer(store.generate, ids) == answer(model.generate, ids)
    for tier in ("cpu", "disk"):
        if tier == "disk":
            store = opened(model)
        cache = store.cache_for(ids)
        assert cache.loaded == [{tier: whole}]
        for layer, other in zip(cache.layers, computed.layers, strict=True):
            assert torch.equal(layer.keys, other.keys[:, :, :whole])
            assert torch.equal(layer.values, other.values[:, :, :whole])
        assert answer(model.generate, ids, past_key_values=cache) == by_hand


def test_a_model_far_behind_the_host_saves_and_loads_right(opened):
    model, prompts = on_gpu("llama"), [prompt(300 + 40 * seed, seed) for seed in range(6)]
    alone = [answer(model.generate, ids, tokens=2) for ids in prompts]
    store = opened(model, verify="off")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(LATE))
    dice = random.Random(1)
    for _ in range(30):
        number = dice.randrange(len(prompts))
        assert answer(store.generate, prompts[number], tokens=2) == alone[number]
    assert [found(store, ids)[0] for ids in prompts] == [(ids.shape[1] - 1) // C * C for ids in prompts]


def test_chunks_come_and_go_in_a_small_tier(opened):
    model, prompts = on_gpu("llama"), [prompt(100 + 90 * seed, seed) for seed in range(8)]
    alone = [answer(model.generate, ids) for ids in prompts]
    store = opened(model, f"cpu://?capacity={3 * 2 * C * 2 * 16 * 4 * 60}")  # 60 chunks of 210
    dice = random.Random(2)
    for _ in range(60):
        number = dice.randrange(len(prompts))
        assert answer(store.generate, prompts[number]) == alone[number]


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_chunk_of_many_bytes_is_copied_as_one_piece(opened, is_pinned):
    model, ids = on_gpu("gpt2"), prompt(900)
    alone = answer(model.generate, ids)
    store = opened(model, "cpu://?capacity=64MiB", chunk_tokens=512)
    if is_pinned:
        assert store.wait_until_pinned()
    else:
        store._buffer.place.close()
    for kept in (0, 512):
        assert found(store, ids) == [kept]
        assert answer(store.generate, ids) == alone


def test_rows_of_a_batch_and_a_static_cache(opened):
    model = on_gpu("llama")
    ids = torch.cat([prompt(53, seed) for seed in (1, 2, 3)])
    mask = torch.ones_like(ids)
    ids[1, :10] = mask[1, :10] = 0
    alone = answer(model.generate, ids, attention_mask=mask)
    store = opened(model)
    for kept in ([0, 0, 0], [42, 32, 42]):
        assert found(store, ids, mask) == kept
        assert answer(store.generate, ids, mask) == alone
    cache = store.cache_for(ids[:1], max_cache_len=64)
    assert cache.loaded == [{"cpu": 48}]
    assert answer(model.generate, ids[:1], past_key_values=cache, disable_compile=True) == alone[:1]


def test_kv_that_changes_in_memory_is_computed_again(opened):
    model, ids = on_gpu("llama"), prompt(53)
    alone = answer(model.generate, ids)
    store = opened(model, "cpu://?capacity=16MiB")
    assert answer(store.generate, ids) == alone
    assert found(store, ids) == [48]
    for entry in list(store.cache.index.entries()):
        if entry.parent is not None and entry.parent.parent is None:  # the second chunk
            store.cache.slab.view(entry.offsets[0], entry.nbytes)[3::4] = bytes(entry.nbytes // 4)
    assert found(store, ids) == [C]
    assert answer(store.generate, ids) == alone
    assert found(store, ids) == [48], "stored again"
