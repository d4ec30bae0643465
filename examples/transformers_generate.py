"""transformers: two users ask about one document, which is computed once; also by tomorrow's process.

    python examples/transformers_generate.py DIRECTORY   # twice: the second run starts from disk

The model has random weights, so that nothing is downloaded; any other causal language model does as well.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lmtier_integrations.transformers import PrefixCache


def main(directory: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    document = torch.randint(4, 2048, (1, 1500))  # stands for a text of 1,500 tokens
    tiers = ["cpu://?capacity=256MiB", f"disk://{directory}?capacity=2GiB"]
    with PrefixCache(model, *tiers) as store:
        for user in ("one", "another"):
            question = torch.randint(4, 2048, (1, 30))
            prompt = torch.cat([document, question], dim=1)
            everything = torch.ones_like(prompt)
            plain = model.generate(prompt, attention_mask=everything, max_new_tokens=8, do_sample=False)
            began = time.perf_counter()
            cache = store.cache_for(prompt, everything)
            answer = model.generate(
                prompt, attention_mask=everything, past_key_values=cache, max_new_tokens=8, do_sample=False
            )
            took = 1e3 * (time.perf_counter() - began)
            loaded = ", ".join(f"{count} from {tier}" for tier, count in cache.loaded[0].items()) or "none"
            print(f"{user}: {took:.0f} ms; of {prompt.shape[1]} tokens loaded: {loaded}")
            assert torch.equal(answer, plain)


if __name__ == "__main__":
    main(sys.argv[1])
