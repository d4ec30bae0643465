"""Models that keep a state beside KV: the answers of the model alone, from wherever both come."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from lmtier.format.keys import PREFIX_BYTES, STATE, is_state
from lmtier.format.layout import PAGE
from lmtier_integrations.transformers import PrefixCache
from lmtier_integrations.transformers.model import probe
from tests.engines.conftest import C
from tests.engines.models import HYBRIDS, answer, model_of, prompt_of
from tests.engines.test_transformers import found, padded, whole
from tests.server.process import served

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (C, C + 1, 3 * C + 5, 7 * C)
QUICK = ("qwen3-next", "falcon-h1", "lfm2", "granite")


def said(generate, prompt, tokens=6, **options):
    """An answer, and the logits of its first token."""
    how: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    result = generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, **how, **options)
    return result.sequences[:, -tokens:].tolist(), result.logits[0]


def same(one, other):
    """Token by token, and the first logits to the last bit."""
    return one[0] == other[0] and torch.equal(one[1], other[1])


def check_model(opened, model, prompts, *, exact):
    alone = [said(model.generate, prompt) for prompt in prompts]
    store = opened(model)
    cold = [said(store.generate, prompt) for prompt in prompts]
    if exact:
        for (tokens, logits), (wanted, others) in zip(cold, alone, strict=True):
            assert tokens == wanted
            torch.testing.assert_close(logits, others, atol=1e-3, rtol=1e-3)
    for tier in ("cpu", "disk"):
        store = opened(model) if tier == "disk" else store
        for prompt, wanted in zip(prompts, cold, strict=True):
            cache = store.cache_for(prompt)
            tokens = whole(len(prompt[0]))
            assert cache.loaded == [{tier: tokens} if tokens else {}]
            assert same(said(model.generate, prompt, past_key_values=cache), wanted), (tier, tokens)


@pytest.mark.parametrize("kind", QUICK)
def test_answers_are_those_of_the_model_alone(opened, kind):
    check_model(opened, model_of(kind), [prompt_of(each, seed=each) for each in LENGTHS], exact=True)


def test_a_state_in_another_dtype_comes_back_as_it_was(opened):
    model = model_of("qwen3-next", torch.bfloat16)
    assert {each.dtype for each in probe(model).states.values()} == {torch.float32, torch.bfloat16}
    check_model(opened, model, [prompt_of(each, seed=each) for each in LENGTHS], exact=False)


@pytest.mark.long
@pytest.mark.parametrize("kind", HYBRIDS)
def test_thirty_prompts_of_each_model(opened, kind):
    """A third are alike but for their first token."""
    model = model_of(kind)
    prompts = [prompt_of(20 + 23 * number, seed=number) for number in range(22)]
    prompts += [torch.cat([torch.tensor([[first]]), prompt_of(299, seed=99)], 1) for first in range(50, 60)]
    check_model(opened, model, prompts, exact=True)


def test_the_state_matters_to_the_answer(opened):
    """So the other tests would see a wrong one."""
    model, prompt = model_of("qwen3-next"), prompt_of(53)
    store = opened(model, verify="off")
    wanted = said(store.generate, prompt)
    assert same(said(store.generate, prompt), wanted)
    for entry in store.cache.index.entries():
        if is_state(entry.key):
            store.cache.slab.view(entry.offsets[0], entry.nbytes)[:] = bytes(entry.nbytes)
    assert found(store, prompt) == [48]
    assert not torch.allclose(said(store.generate, prompt)[1], wanted[1], atol=1e-3)


def test_a_state_damaged_in_memory_is_a_miss(opened):
    """The state is stored again."""
    model, prompt = model_of("falcon-h1"), prompt_of(53)
    store = opened(model, "cpu://?capacity=16MiB")
    wanted = said(store.generate, prompt)
    for entry in store.cache.index.entries():
        if is_state(entry.key):
            store.cache.slab.view(entry.offsets[0], entry.nbytes)[100] ^= 1
    assert found(store, prompt) == [0]
    assert same(said(store.generate, prompt), wanted)
    assert found(store, prompt) == [48]


def test_a_state_that_was_spoilt_on_disk_is_a_miss(opened, tmp_path):
    model, prompt = model_of("lfm2"), prompt_of(53)
    wanted = said(opened(model).generate, prompt)
    opened(model)  # so that the first has written all
    files = (tmp_path / "kv").rglob("*.L*")
    states = [each for each in files if bytes.fromhex(each.name[:64]).startswith(STATE, PREFIX_BYTES)]
    assert states
    for path in states:
        data = bytearray(path.read_bytes())
        data[PAGE + 40] ^= 1
        path.write_bytes(data)
    store = opened(model)
    assert found(store, prompt) == [0]
    assert store.flush()
    assert same(said(store.generate, prompt), wanted)
    assert found(store, prompt) == [48]


def test_the_state_of_an_equally_long_prompt_is_never_taken(opened):
    model = model_of("qwen3-next")
    one, other = (torch.cat([torch.tensor([[first]]), prompt_of(52)], 1) for first in (50, 51))
    store = opened(model)
    wanted = said(store.generate, one)
    said(store.generate, other)
    for entry in store.cache.index.entries():
        if is_state(entry.key):
            store.cache.discard(entry.key, entry.form)
            break  # that of the first prompt
    assert found(store, one) == [0], "a hit without a state is no hit"
    assert found(store, other) == [48]
    assert same(said(store.generate, one), wanted)


def test_states_are_stored_at_ends_forks_and_steps(opened):
    model = model_of("qwen3-next")
    store = opened(model, state_tokens=64)
    said(store.generate, prompt_of(150))
    assert found(store, prompt_of(150)) == [144]
    assert found(store, prompt_of(140)) == [128], "the last step before"
    parting = [torch.cat([prompt_of(100), prompt_of(60, seed=9 + each)], 1) for each in range(3)]
    wanted = [answer(model.generate, each) for each in parting]
    for prompt, loaded, tokens in zip(parting, (64, 96, 96), wanted, strict=True):
        assert found(store, prompt) == [loaded]
        assert answer(store.generate, prompt) == tokens


def test_a_conversation_computes_only_what_is_new(opened):
    model = model_of("granite")
    store = opened(model)
    history = prompt_of(40)
    for turn, stored in enumerate((0, 32, 64)):
        assert found(store, history) == [stored]
        (new,) = answer(store.generate, history, tokens=10)
        assert [new] == answer(model.generate, history, tokens=10)
        history = torch.cat([history, torch.tensor([new]), prompt_of(20, seed=turn + 7)], 1)


@pytest.mark.parametrize("kind", ["qwen3-next", "falcon-h1"])
def test_rows_of_a_batch_are_prompts_however_padded(opened, kind):
    model = model_of(kind)
    prompts = [prompt_of(tokens, seed=tokens) for tokens in (53, 37, 5, 1, 45)]
    ids, mask = padded(*prompts)
    alone = answer(model.generate, ids, attention_mask=mask)
    store = opened(model)
    assert answer(store.generate, ids, mask) == alone
    for prompt, row in zip(prompts, alone, strict=True):
        assert found(store, prompt) == [whole(len(prompt[0]))]
        assert answer(store.generate, prompt) == [row], "alone, from what a batch has saved"
    assert found(store, ids, mask) == [48, 32, 0, 0, 32]
    assert answer(store.generate, ids, mask) == alone


def test_beams_and_a_static_cache_go_on_from_one_prefix(opened):
    model, prompt = model_of("qwen3-next"), prompt_of(60)
    alone = answer(model.generate, prompt, num_beams=3), answer(model.generate, prompt)
    store = opened(model)
    for kept in (0, 48):
        beams = store.cache_for(prompt.expand(3, -1))
        assert [row.total() for row in beams.loaded] == [kept] * 3
        assert answer(model.generate, prompt, past_key_values=beams, num_beams=3) == alone[0]
        cache = store.cache_for(prompt, max_cache_len=80)
        assert answer(model.generate, prompt, past_key_values=cache) == alone[1]


_OTHER_PROCESS = """
from tests.engines.models import *
from lmtier_integrations.transformers import PrefixCache
import sys
torch.set_num_threads(1)
with PrefixCache(model_of("qwen3-next"), *sys.argv[1:], chunk_tokens=16, load_deadline=10) as store:
    cache = store.cache_for(prompt_of(53))
    sys.stdout.write(repr((dict(*cache.loaded), answer(store.generate, prompt_of(53)))))
"""


@pytest.mark.long
def test_another_process_goes_on_from_the_same_disk(opened, tmp_path):
    store = opened(model_of("qwen3-next"))
    alone = answer(store.generate, prompt_of(53))
    store.close()
    tiers = "cpu://?capacity=16MiB", f"disk://{tmp_path}/kv?capacity=64MiB"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _OTHER_PROCESS, *tiers]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert out.stdout == repr(({"disk": 48}, alone))


def test_a_server_stores_states_and_says_where_prompts_part(tmp_path):
    model = model_of("qwen3-next")
    prompts = [torch.cat([prompt_of(100), prompt_of(60, seed=9 + each)], 1) for each in range(3)]
    wanted = [answer(model.generate, each) for each in prompts]
    config = {"chunk_tokens": C, "verify": "always"}
    with served(tmp_path, "cpu://?capacity=16MiB", config=config, unix=str(tmp_path / "socket")) as server:
        for loads in ([0, 0, 96], [144] * 3):
            with PrefixCache(model, server=server.where["unix"]) as store:
                for prompt, tokens, kept in zip(prompts, wanted, loads, strict=True):
                    cache = store.cache_for(prompt)
                    assert [row.total() for row in cache.loaded] == [kept]
                    assert answer(model.generate, prompt, past_key_values=cache) == tokens


def test_a_forward_that_fails_leaves_no_state_behind(opened):
    model, prompt = model_of("falcon-h1"), prompt_of(53)
    store = opened(model)

    def fail(*_):
        raise ZeroDivisionError

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        store.generate(prompt, max_new_tokens=1)
    hook.remove()
    assert store.cache.stats()["cpu"]["used"] == 0
    assert answer(store.generate, prompt) == answer(model.generate, prompt)
