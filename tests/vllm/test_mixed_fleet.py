"""One prefix, two engines: what vLLM saves transformers loads, and what transformers saves vLLM loads.

vLLM keeps blocks of 32 tokens with keys transposed (cpu-vec), transformers' buffer whole chunks with K and V
of a token side by side.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from lmtier_integrations.transformers import PrefixCache
from tests.vllm.conftest import prompts_of, transfer
from tests.vllm.engine import Engine

CHUNK, ANSWER = 256, 8
LENGTHS = (257, 600, 1030)


def answer(generate, prompt):
    options = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}
    return generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def logits(model, prompt, cache=None):
    """Of what the cache does not hold."""
    first = cache.get_seq_length() if cache is not None else 0
    with torch.no_grad():
        return model(torch.tensor([prompt[first:]]), past_key_values=cache).logits[0]


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_vllm_saves_and_transformers_loads_and_back(models, server, tmp_path, kind):
    folder, how = models / kind, transfer(server=str(server.path))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    of_vllm, of_transformers = prompts_of(*LENGTHS, seed=1), prompts_of(*LENGTHS, seed=2)
    with Engine(tmp_path, folder) as plain:
        wanted = [each.tokens for each in plain.generate(of_vllm + of_transformers)]
    with PrefixCache(model, server=str(server.path), weights=str(folder)) as store:
        alone = [answer(model.generate, prompt) for prompt in of_vllm + of_transformers]
        for prompt in of_transformers:
            answer(store.generate, prompt)
        with Engine(tmp_path, folder, transfer=how) as engine:
            loaded = engine.generate(of_transformers)
            assert [each.cached for each in loaded] == [
                (len(p) - 1) // CHUNK * CHUNK for p in of_transformers
            ]
            assert [each.tokens for each in loaded] == wanted[len(LENGTHS) :]
            assert [each.tokens for each in engine.generate(of_vllm)] == wanted[: len(LENGTHS)]
            assert not engine.metrics()["lmtier:load_failures_total"]
        for prompt, expected in zip(of_vllm, alone, strict=False):
            cache = store.cache_for(torch.tensor([prompt]))
            stored = (len(prompt) - 1) // CHUNK * CHUNK
            assert cache.loaded == [{"cpu": stored}]
            ours, theirs = logits(model, prompt)[stored:], logits(model, prompt, cache)
            torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3 * float(ours.abs().max()))
            assert answer(store.generate, prompt) == expected
