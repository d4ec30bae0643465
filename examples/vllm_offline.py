"""vLLM as a library: a prompt is prefilled once, whatever the engine forgets, and whenever it restarts.

python examples/vllm_offline.py MODEL DIRECTORY     # twice: the second run starts from the first one's disk
"""

import sys
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main(model: str, directory: str) -> None:
    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMTierConnector",
            kv_connector_module_path="lmtier_integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "tiers": ["cpu://?capacity=256MiB", f"disk://{directory}?capacity=2GiB"],
                # A request waits longer for the disk than the usual 2 s, so a busy machine shows the same.
                "load_deadline": 20.0,
            },
        ),
    )
    document = [(7 * n * n + n) % 2000 + 10 for n in range(2000)]  # stands for a text of 2,000 tokens
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    engine.generate([{"prompt_token_ids": document[:300][::-1]}], sampling, use_tqdm=False)  # warm up
    answers = []
    for _ in range(3):
        began = time.perf_counter()
        (output,) = engine.generate([{"prompt_token_ids": document}], sampling, use_tqdm=False)
        milliseconds = 1e3 * (time.perf_counter() - began)
        print(f"{milliseconds:5.0f} ms, {output.num_cached_tokens:4} of {len(document)} tokens were there")
        answers.append(output.outputs[0].token_ids)
        engine.reset_prefix_cache()  # the engine forgets; lmtier does not
    assert answers == answers[:1] * 3
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
