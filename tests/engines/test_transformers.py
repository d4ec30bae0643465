"""Prefixes of transformers models: the answers of the model alone, from wherever the prompt's KV comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    JambaConfig,
    MambaConfig,
    MiniMaxConfig,
    RwkvConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from lmtier.errors import ConfigError, LayoutError, MisuseError
from lmtier_integrations.identity import checkpoint_in
from lmtier_integrations.transformers import PrefixCache
from tests.engines.conftest import C
from tests.engines.models import CONFIGS, ORIGINAL, SHAPE, WINDOW, answer, model_of, prompt_of
from tests.server.process import served

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (C - 1, C, C + 1, 3 * C + 5)
assert 2 * WINDOW < LENGTHS[-1] < ORIGINAL, "beyond the sliding windows, and not beyond the short rotation"


def whole(tokens):
    """Tokens of whole chunks, if one token is left to compute."""
    return (tokens - 1) // C * C


def found(store, prompt, *args, **options):
    """How many tokens of each row would be loaded."""
    return [row.total() for row in store.cache_for(prompt, *args, **options).loaded]


# ---- the answers


@pytest.mark.parametrize("kind", [*CONFIGS, "llama in bf16"])
def test_answers_are_those_of_the_model_alone(opened, kind):
    model = model_of(kind.removesuffix(" in bf16"), torch.bfloat16 if "bf16" in kind else torch.float32)
    alone = {tokens: answer(model.generate, prompt_of(tokens, seed=tokens)) for tokens in LENGTHS}
    store = opened(model)
    for tier in ("", "cpu", "disk"):
        if tier == "disk":
            store = opened(model)
        for tokens in LENGTHS:
            prompt = prompt_of(tokens, seed=tokens)
            cache = store.cache_for(prompt)
            assert cache.loaded == [{tier: whole(tokens)} if tier and whole(tokens) else {}]
            assert answer(model.generate, prompt, past_key_values=cache) == alone[tokens], (tier, tokens)
    assert answer(store.generate, prompt) == alone[tokens]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_a_server_is_a_store_and_its_death_costs_only_time(tmp_path, kind):
    model, prompt = model_of(kind), prompt_of(3 * C + 5)
    alone = answer(model.generate, prompt)
    config = {"chunk_tokens": C, "verify": "always"}
    tiers = "cpu://?capacity=16MiB", f"disk://{tmp_path}/kv?capacity=64MiB"
    with served(tmp_path, *tiers, config=config, unix=str(tmp_path / "socket")) as server:
        for kept in (0, 3 * C):
            with PrefixCache(model, server=server.where["unix"]) as store:
                assert found(store, prompt) == [kept]
                assert answer(store.generate, prompt) == alone
        server.stop()
        server.start()
        with PrefixCache(model, server=server.where["unix"]) as store:
            assert store.cache_for(prompt).loaded == [{"disk": 3 * C}]
            server.kill()
            assert answer(store.generate, prompt) == alone
            assert found(store, prompt) == [0]


_OTHER_PROCESS = """
from tests.engines.models import *
from lmtier_integrations.transformers import PrefixCache
import sys
with PrefixCache(model_of("llama"), *sys.argv[1:], chunk_tokens=16, load_deadline=10) as store:
    cache = store.cache_for(prompt_of(53))
    sys.stdout.write(repr((dict(*cache.loaded), answer(store.generate, prompt_of(53)))))
"""


def test_another_process_goes_on_from_the_same_disk(opened, tmp_path):
    store = opened(model_of("llama"))
    alone = answer(store.generate, prompt_of(53))
    store.close()
    tiers = "cpu://?capacity=16MiB", f"disk://{tmp_path}/kv?capacity=64MiB"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS, *tiers],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout == repr(({"disk": 3 * C}, alone))


def test_a_conversation_computes_only_what_is_new(opened):
    model = model_of("gemma3")
    store = opened(model)
    history = prompt_of(40)
    for turn, stored in enumerate((0, 32, 64)):
        assert found(store, history) == [stored]
        (said,) = answer(store.generate, history, tokens=10)
        assert [said] == answer(model.generate, history, tokens=10)
        history = torch.cat([history, torch.tensor([said]), prompt_of(20, seed=turn + 7)], 1)


# ---- several at once


def padded(*prompts):
    """On the left, as tokenizers do for generation."""
    width = max(len(prompt[0]) for prompt in prompts)
    rows = [torch.cat([torch.zeros(1, width - len(p[0]), dtype=p.dtype), p], 1) for p in prompts]
    masks = [
        torch.cat([torch.zeros_like(row[:, : width - len(p[0])]), torch.ones_like(p)], 1)
        for row, p in zip(rows, prompts, strict=True)
    ]
    return torch.cat(rows), torch.cat(masks)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "bloom"])
def test_rows_of_a_batch_are_prompts_however_padded(opened, kind):
    model = model_of(kind)
    prompts = prompt_of(53, seed=1), prompt_of(37, seed=2), prompt_of(45, seed=3)
    ids, mask = padded(*prompts)
    alone = answer(model.generate, ids, attention_mask=mask)
    store = opened(model)
    assert answer(store.generate, ids, mask) == alone
    for prompt, row in zip(prompts, alone, strict=True):
        assert found(store, prompt) == [whole(len(prompt[0]))]
        assert answer(store.generate, prompt) == [row], "alone, from what a batch has saved"
    assert found(store, ids, mask) == [40, 24, 32], "up to the column where all are stored"
    assert answer(store.generate, ids, mask) == alone
    longer, mask = padded(*(torch.cat([prompt, prompt_of(20, seed=9)], 1) for prompt in prompts))
    assert answer(store.generate, longer, mask) == answer(model.generate, longer, attention_mask=mask)
    assert found(store, longer, mask) == [64, 48, 56]


def test_a_batch_with_a_new_row_only_saves(opened):
    """It loads nothing."""
    model = model_of("qwen2")
    store = opened(model)
    answer(store.generate, prompt_of(53, seed=1))
    ids, mask = padded(prompt_of(53, seed=1), prompt_of(20, seed=2))
    assert found(store, ids, mask) == [33, 0], "the columns before the short row begins"
    assert answer(store.generate, ids, mask) == answer(model.generate, ids, attention_mask=mask)
    assert found(store, prompt_of(20, seed=2)) == [C]
    ids = torch.cat([prompt_of(53, seed=1), prompt_of(53, seed=3)])
    assert found(store, ids) == [0, 0]
    assert answer(store.generate, ids) == answer(model.generate, ids)
    assert found(store, ids) == [48, 48]


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_beams_go_on_from_one_prefix(opened, options):
    model = model_of("llama")
    prompt = prompt_of(60)
    alone = answer(model.generate, prompt, **options)
    store = opened(model)
    for kept in (0, 48):
        assert found(store, prompt) == [kept]
        assert answer(store.generate, prompt, **options) == alone


@pytest.mark.parametrize("word", ["num_beams", "num_return_sequences"])
def test_options_merge_with_the_models_as_generate_does(opened, monkeypatch, word):
    model, prompt = model_of("llama"), prompt_of(60)
    monkeypatch.setattr(model.generation_config, "num_beams", 4)
    monkeypatch.setattr(model.generation_config, word, 4)
    how = GenerationConfig(max_new_tokens=6, do_sample=False)
    alone = model.generate(prompt, generation_config=how).tolist()
    store = opened(model)
    for kept in (0, 48):
        assert found(store, prompt) == [kept]
        assert store.generate(prompt, generation_config=how).tolist() == alone


def test_an_old_hybrid_cache_setting_chooses_no_cache(opened, monkeypatch):
    model, prompt = model_of("gemma2"), prompt_of(53)
    monkeypatch.setattr(model.generation_config, "cache_implementation", "hybrid")
    assert answer(opened(model).generate, prompt) == answer(model.generate, prompt)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_a_static_cache_works_like_a_dynamic_one(opened, kind):
    model, prompt = model_of(kind), prompt_of(53)
    alone = answer(model.generate, prompt)
    store = opened(model)
    for kept in (0, 48):
        cache = store.cache_for(prompt, max_cache_len=64)
        assert cache.is_compileable
        assert [row.total() for row in cache.loaded] == [kept]
        assert answer(model.generate, prompt, past_key_values=cache) == alone
    assert answer(store.generate, prompt) == alone
    ids, mask = padded(prompt, prompt_of(40, seed=2))
    alone = answer(model.generate, ids, attention_mask=mask)
    for each in ([13, 0], [45, 32]):
        cache = store.cache_for(ids, mask, max_cache_len=64)
        assert [row.total() for row in cache.loaded] == each
        assert answer(model.generate, ids, attention_mask=mask, past_key_values=cache) == alone


# ---- what is saved


def test_a_prompt_saves_up_to_a_forward_within_a_chunk(opened):
    """A prompt in several forwards is saved up to the first that begins within a chunk."""
    model, prompt = model_of("llama"), prompt_of(80)
    store = opened(model)
    cache = store.cache_for(prompt)
    with torch.no_grad():
        for start, end in ((0, 32), (32, 53), (53, 80)):
            model(prompt[:, start:end], past_key_values=cache)
    assert found(store, prompt) == [48]
    assert answer(store.generate, prompt) == answer(model.generate, prompt)


def test_an_unsavable_row_does_not_keep_others_from_saving(opened):
    model = model_of("llama")
    one, other = prompt_of(80, seed=2), prompt_of(75, seed=3)
    ids, mask = padded(one, other)
    positions = (mask.cumsum(1) - 1).clamp(0)
    store = opened(model)
    cache = store.cache_for(ids, mask)
    with torch.no_grad():
        for start, end in ((0, 5 + 2 * C), (5 + 2 * C, 80)):  # whole chunks of the other
            span = slice(start, end)
            model(
                ids[:, span],
                attention_mask=mask[:, :end],
                position_ids=positions[:, span],
                past_key_values=cache,
            )
    assert (found(store, one), found(store, other)) == ([2 * C], [4 * C])
    for prompt in (one, other):
        assert answer(store.generate, prompt) == answer(model.generate, prompt)


def test_a_forward_that_fails_leaves_nothing_behind(opened):
    model, prompt = model_of("llama"), prompt_of(53)
    store = opened(model)

    def fail(*_):
        raise ZeroDivisionError

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        store.generate(prompt, max_new_tokens=1)
    assert store.cache.stats()["cpu"]["used"] == 0
    cache = store.cache_for(prompt)
    with pytest.raises(ZeroDivisionError):
        model.generate(prompt, past_key_values=cache, max_new_tokens=1)
    hook.remove()
    assert found(store, prompt) == [0]
    assert store.cache.stats()["cpu"]["used"] == 0
    assert answer(store.generate, prompt) == answer(model.generate, prompt)


def test_what_has_no_room_is_computed(opened):
    model, prompt = model_of("llama"), prompt_of(400)
    chunk = 3 * 2 * C * 2 * 16 * 4
    store = opened(model, f"cpu://?capacity={5 * chunk}")
    for _ in range(2):
        assert answer(store.generate, prompt) == answer(model.generate, prompt)
    assert 0 < found(store, prompt)[0] <= 5 * C


@pytest.mark.parametrize("verify", ["always", "off"])
def test_kv_damaged_in_memory_is_computed_again(opened, verify):
    model, prompt = model_of("llama"), prompt_of(53)
    alone = answer(model.generate, prompt)
    store = opened(model, "cpu://?capacity=16MiB", verify=verify)
    assert answer(store.generate, prompt) == alone
    for entry in list(store.cache.index.entries()):
        if entry.parent is not None and entry.parent.parent is None:  # the second chunk
            store.cache.slab.view(entry.offsets[0], entry.nbytes)[3::4] = bytes(entry.nbytes // 4)
    if verify == "off":
        assert answer(store.generate, prompt) != alone, "the damage would be seen"
        return
    assert found(store, prompt) == [C]
    assert answer(store.generate, prompt) == alone
    assert found(store, prompt) == [48], "stored again"
    assert store.cache.metrics.value("lmtier_verify_failures_total") == 1


def test_a_file_that_was_damaged_on_disk_is_computed_again(opened, tmp_path):
    model, prompt = model_of("llama"), prompt_of(53)
    alone = answer(opened(model).generate, prompt)
    store = opened(model)
    files = [
        path for path in Path(tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size > 4096
    ]
    for path in files:
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"damaged")
    assert found(store, prompt) == [0]
    assert store.flush(), "so that all that is damaged is known to be"
    assert answer(store.generate, prompt) == alone
    assert found(store, prompt) == [48]


# ---- whose KV it is


def test_other_weights_salts_and_settings_share_nothing(opened):
    model, prompt = model_of("llama"), prompt_of(53)
    store = opened(model)
    store.generate(prompt, max_new_tokens=1, salt="alice")
    assert found(store, prompt) == found(store, prompt, salt="bob") == [0]
    assert found(store, prompt, salt="alice") == [48]
    store.generate(prompt, max_new_tokens=1)
    assert found(opened(model_of("llama")), prompt) == [48]
    for other in (model_of("llama", seed=1), model_of("llama", torch.bfloat16), model_of("qwen2")):
        assert found(opened(other), prompt) == [0]
    model = AutoModelForCausalLM.from_config(model.config).eval()
    model.load_state_dict(model_of("llama").state_dict())
    assert found(opened(model), prompt) == [48]
    model.config.rope_parameters["rope_theta"] = 5000.0
    assert found(opened(model), prompt) == [0]


def test_weights_that_change_begin_new_keys_at_once(opened):
    model = AutoModelForCausalLM.from_config(model_of("llama").config).eval()
    prompt, store = prompt_of(53), opened(model)
    store.generate(prompt, max_new_tokens=1)
    assert found(store, prompt) == [48]
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight *= 1.5
    assert found(store, prompt) == [0]
    assert answer(store.generate, prompt) == answer(model.generate, prompt)
    assert found(store, prompt) == [48]
    embedding, row = model.model.embed_tokens.weight, int(prompt[0, 20])
    assert embedding.nbytes > 32 * embedding[row].nbytes  # one row of many, in the middle
    with torch.no_grad():
        embedding[row] *= 1.5
    assert found(store, prompt) == [0]
    assert answer(store.generate, prompt) == answer(model.generate, prompt)
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.5)  # torch notes no change
    assert found(store, prompt) == [0]
    assert answer(store.generate, prompt) == answer(model.generate, prompt)
    model.to(torch.bfloat16)
    with pytest.raises(MisuseError, match="open another"):
        store.generate(prompt)


def test_a_cache_from_before_new_weights_saves_nothing(opened):
    model = AutoModelForCausalLM.from_config(model_of("llama").config).eval()
    prompt, store = prompt_of(53), opened(model)
    cache = store.cache_for(prompt)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 2
        model(prompt, past_key_values=cache)
        model.model.embed_tokens.weight /= 2  # the bits of before
    assert found(store, prompt) == [0]
    assert answer(store.generate, prompt) == answer(model.generate, prompt)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_length_dependent_rotation_is_left_to_the_model(opened, kind):
    model = model_of(kind)
    short, long = prompt_of(ORIGINAL - 1), prompt_of(ORIGINAL + 40)

    def after_a_short_one(generate):
        """Such a model rotates by the longest prompt since the last short one."""
        return answer(generate, short, tokens=1), answer(generate, long)

    alone = after_a_short_one(model.generate)
    store = opened(model)
    for _ in range(2):
        assert after_a_short_one(store.generate) == alone
        assert found(store, long) == [], "not even looked up"
    assert found(store, short) == [48]


@pytest.mark.parametrize("kind", ["phi3", "longrope"])
def test_prompts_whose_cache_is_dropped_go_to_the_model(opened, kind):
    """Phi-3 does with more columns than its original length, padding or not, in any rotation."""
    model, kept, columns = model_of(kind), prompt_of(53), ORIGINAL + 2
    store = opened(model)
    answer(store.generate, kept)
    for ids in (prompt_of(columns), torch.nn.functional.pad(kept, (columns - 53, 0))):
        mask = (ids != 0).long()
        assert answer(store.generate, ids, mask) == answer(model.generate, ids, attention_mask=mask)
        assert found(store, ids, mask) == []
    assert found(store, kept) == [48]


# ---- what is declined


def tiny(config):
    return AutoModelForCausalLM.from_config(config).eval()


DECLINED = {
    "encoder-decoder": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    ).eval(),
    "no layer of MambaForCausalLM keeps KV": lambda: tiny(
        MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, state_size=4)
    ),
    "MiniMaxForCausalLM has its own kind of cache": lambda: tiny(
        MiniMaxConfig(**SHAPE, head_dim=16, num_local_experts=2, num_experts_per_tok=1, block_size=16)
    ),
    "JambaForCausalLM does not go on from the state": lambda: tiny(
        JambaConfig(
            **SHAPE, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_expand=2
        )
    ),
    "RwkvForCausalLM has its own kind of cache": lambda: tiny(
        RwkvConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    ),
    "attends to later tokens": lambda: tiny(
        Gemma3TextConfig(**SHAPE, head_dim=16, use_bidirectional_attention=True)
    ),
    "keeps torch.float64": lambda: model_of("llama", torch.float64),
    "Linear is no transformers model": lambda: torch.nn.Linear(2, 2).eval(),
}


@pytest.mark.parametrize("sentence", DECLINED)
def test_models_that_cannot_be_kept_in_full_are_declined(sentence, tmp_path):
    """One sentence says why."""
    with pytest.raises(LayoutError, match=sentence) as error:
        PrefixCache(DECLINED[sentence](), "cpu://?capacity=1MiB", f"disk://{tmp_path}/kv?capacity=1MiB")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "kv").exists(), "before anything is opened"


def test_a_model_in_training_is_declined_whenever_it_is(opened):
    model, prompt = tiny(CONFIGS["llama"]), prompt_of(20)
    store = opened(model)
    cache = store.cache_for(prompt)
    model.train()
    with pytest.raises(MisuseError, match=r"model.eval\(\)"):
        store.generate(prompt)
    with pytest.raises(MisuseError, match=r"model.eval\(\)"):
        model.generate(prompt, past_key_values=cache, max_new_tokens=1)
    with pytest.raises(MisuseError, match=r"model.eval\(\)"):
        opened(model)


def test_autocast_is_declined_whenever_it_is_on(opened):
    model, prompt = model_of("llama"), prompt_of(53)
    alone = answer(model.generate, prompt)
    store = opened(model)
    cache = store.cache_for(prompt)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(MisuseError, match="autocast changes"):
            store.generate(prompt, max_new_tokens=1)
        with pytest.raises(MisuseError, match="autocast changes"):
            model.generate(prompt, past_key_values=cache, max_new_tokens=1)
    assert found(store, prompt) == [0]
    assert answer(store.generate, prompt) == alone
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(MisuseError, match="autocast changes"):
        opened(model)


def test_a_model_with_an_adapter_is_declined_until_merged(opened):
    from peft import LoraConfig, get_peft_model  # slow, and only here

    model, prompt = tiny(CONFIGS["llama"]), prompt_of(3 * C + 5)
    store = opened(model)
    answer(store.generate, prompt)
    adapter = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, adapter, "of-a-user").eval()
    with pytest.raises(MisuseError, match="merge it"):
        store.generate(prompt)
    with adapted.disable_adapter(), pytest.raises(MisuseError, match="merge it"):
        opened(model)
    merged = adapted.merge_and_unload()
    alone = answer(merged.generate, prompt)
    store = opened(merged)
    assert found(store, prompt) == [0]
    assert answer(store.generate, prompt) == alone
    assert found(store, prompt) == [3 * C]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cache_implementation": "static"}, "static"),
        ({"use_cache": False}, "the cache is lmtier's"),
        ({"prefill_chunk_size": 8}, "begin at token 0"),
        ({"prompt_lookup_num_tokens": 3}, "begin at token 0"),
        ({"assistant_model": model_of("llama")}, "begin at token 0"),
        ({"inputs_embeds": torch.zeros(1, 20, 64)}, "inputs_embeds"),
        ({"token_type_ids": torch.zeros(1, 20)}, "token_type_ids"),
        ({"position_ids": torch.arange(1, 21)[None]}, "position_ids is not that of"),
        ({"attention_mask": torch.tensor([[1] * 19 + [0]])}, "padded on the left"),
        ({"attention_mask": torch.ones(1, 21)}, "of their shape"),
    ],
    ids=lambda each: each if isinstance(each, str) else "-".join(each),
)
def test_calls_that_would_make_other_kv_are_refused(opened, options, sentence):
    store = opened(model_of("gpt2"))
    with pytest.raises(MisuseError, match=sentence):
        store.generate(prompt_of(20), max_new_tokens=1, **options)
    assert store.cache.stats()["cpu"]["used"] == 0


def test_padding_without_a_mask_is_refused(opened, monkeypatch):
    ids, mask = padded(prompt_of(20), prompt_of(30))
    store = opened(model_of("llama"))
    with pytest.raises(MisuseError, match="attention_mask"):
        store.generate(ids)
    monkeypatch.setattr(store.model.generation_config, "pad_token_id", None)
    with pytest.raises(MisuseError, match="attention_mask"):
        store.generate(ids, pad_token_id=0, max_new_tokens=1)
    positions = (mask.cumsum(1) - 1).clamp(0)
    wrong = [
        ({}, "need attention_mask"),
        ({"attention_mask": mask}, "need position_ids"),
        ({"position_ids": positions}, "need attention_mask"),
        ({"attention_mask": torch.ones_like(ids), "position_ids": positions}, "attention_mask is not"),
        ({"attention_mask": mask[:, None, None], "position_ids": positions}, "attention_mask is not"),
        ({"attention_mask": mask, "position_ids": positions + 1}, "position_ids is not"),
    ]
    for given, sentence in wrong:
        with pytest.raises(MisuseError, match=sentence), torch.no_grad():
            store.model(ids, **given, past_key_values=store.cache_for(ids, mask))
    with torch.no_grad():
        cache = store.cache_for(ids, mask)
        store.model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    assert found(store, ids, mask) == [6, 16]


def test_masks_and_positions_must_cover_a_forwards_tokens(opened):
    model, prompt = model_of("gpt2"), prompt_of(53)
    store = opened(model)
    positions = torch.arange(53)[None]
    wrong = [
        (prompt, {"attention_mask": torch.ones(1, 20)}, "attention_mask has a width of 20, .* needs 53"),
        (prompt, {"position_ids": positions[:, :1]}, "position_ids has a width of 1, .* needs 53"),
        (prompt[:, :1], {"position_ids": positions}, "position_ids has a width of 53, .* needs 1$"),
    ]
    for ids, given, sentence in wrong:
        with pytest.raises(MisuseError, match=sentence), torch.no_grad():
            model(ids, **given, past_key_values=store.cache_for(prompt))
    assert store.cache.stats()["cpu"]["used"] == 0
    with torch.no_grad():
        model(prompt[:, :32], attention_mask=torch.ones(1, 53), past_key_values=store.cache_for(prompt))
    assert found(store, prompt) == [32]


def test_what_a_forward_is_given_by_position_is_checked_too(opened):
    model, prompt = model_of("llama"), prompt_of(53)
    store = opened(model)
    mask = torch.ones_like(prompt)
    wrong = [
        ((mask[:, :20],), "attention_mask has a width of 20"),
        ((mask * 0,), "attention_mask is not that of"),
        ((mask, torch.arange(1, 54)[None]), "position_ids is not that of"),
    ]
    for given, sentence in wrong:
        with pytest.raises(MisuseError, match=sentence), torch.no_grad():
            model(prompt, *given, past_key_values=store.cache_for(prompt))
    with pytest.raises(MisuseError, match="input_ids is not that of"), torch.no_grad():
        model(prompt_of(53, seed=2), None, None, store.cache_for(prompt))
    assert store.cache.stats()["cpu"]["used"] == 0
    with torch.no_grad():
        model(prompt, mask, None, store.cache_for(prompt))
    assert found(store, prompt) == [48]


def test_a_cache_serves_only_the_prompts_it_was_made_for(opened):
    model = model_of("llama")
    store = opened(model)
    for _ in range(2):
        with pytest.raises(MisuseError, match="input_ids is not that of"):
            model.generate(
                prompt_of(53, seed=2), past_key_values=store.cache_for(prompt_of(53)), max_new_tokens=1
            )
        with pytest.raises(MisuseError, match="1 prompts cannot serve 2"):
            model.generate(
                prompt_of(53), num_beams=2, past_key_values=store.cache_for(prompt_of(53)), max_new_tokens=1
            )
        store.generate(prompt_of(17), max_new_tokens=1)
    assert found(store, prompt_of(53, seed=2)) == [0]


def test_a_server_has_its_own_tiers():
    with pytest.raises(MisuseError, match="one or the other"):
        PrefixCache(model_of("llama"), "cpu://?capacity=1MiB", server="/nowhere")


def test_tiers_are_urls_or_a_list_and_settings_are_checked():
    url = "cpu://?capacity=1MiB"
    for tiers in ([url], [[url]], [(url, "null://")], [url, "null://"], [f"{url} null://"]):
        with PrefixCache(model_of("llama"), *tiers, chunk_tokens=16) as store:
            assert store.cache.config.tiers[0] == url
    wrong_calls: list[tuple[Any, Any, str]] = [
        ([None], {}, "expected a list of URLs, or one text with spaces"),
        ([[url]], {"chunk": 3}, "unknown setting 'chunk' in arguments; known: chunk_tokens, "),
        ([[url]], {"chunk_token": 3}, "did you mean 'chunk_tokens'?"),
        ([[url]], {"chunk_tokens": 100_000_000}, "must be 1 to 1048576"),
    ]
    for wrong, settings, said in wrong_calls:
        with pytest.raises(ConfigError, match=said):
            PrefixCache(model_of("llama"), *wrong, **settings)


def test_weights_at_the_wrong_place_are_refused(tmp_path):
    with pytest.raises(MisuseError, match="no folder with files of weights"):
        PrefixCache(model_of("llama"), weights=str(tmp_path))


@pytest.mark.parametrize("how", [{"variant": "other"}, {"use_safetensors": False}, {"subfolder": "other"}])
def test_a_model_of_other_files_lacks_the_folders_name(tmp_path, how):
    """Nothing in a model says with which options it was loaded. What it holds does."""
    folder, other = tmp_path / "model", model_of("llama", seed=5)
    model_of("llama").save_pretrained(folder)
    other.save_pretrained(folder, variant="other")
    other.save_pretrained(folder / "other")
    torch.save(other.state_dict(), folder / "pytorch_model.bin")
    PrefixCache(AutoModelForCausalLM.from_pretrained(folder).eval(), weights=str(folder)).close()
    model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    with pytest.raises(MisuseError, match="loaded from other files"):
        PrefixCache(model, weights=str(folder))


def test_only_files_that_transformers_loads_make_the_name(tmp_path):
    for name, value in (("model", 1.0), ("consolidated", 2.0), ("model-2", 3.0)):
        save_file({"a": torch.full((2,), value)}, tmp_path / f"{name}.safetensors")
    one = checkpoint_in(str(tmp_path)).digest()
    (tmp_path / "consolidated.safetensors").unlink()
    assert checkpoint_in(str(tmp_path)).digest() == one
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    index, found = tmp_path / "model.safetensors.index.json", set()
    for names in ("model-1",), ("model-2",), ("model-1", "model-2"):
        index.write_text(json.dumps({"weight_map": {each: f"{each}.safetensors" for each in names}}))
        found.add(checkpoint_in(str(tmp_path)).digest())
    assert len({one, *found}) == 4


def test_engines_with_only_files_find_kv_saved_by_name(opened, tmp_path):
    model_of("llama").save_pretrained(tmp_path / "model")
    prompt = prompt_of(53)
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    opened(one, weights=str(tmp_path / "model"), name="mine").generate(prompt, max_new_tokens=1)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert found(opened(other, weights=str(tmp_path / "model"), name="mine"), prompt) == [48]
    assert found(opened(other, weights=str(tmp_path / "model"), name="yours"), prompt) == [0]
    assert found(opened(other), prompt) == [0]
