"""Prefill on one engine, decode on another: both use one cache server.

    python examples/prefill_decode.py MODEL

The first engine only saves (kv_producer): it computes a prompt and one token. The second only loads
(kv_consumer): it finds the prompt's KV in shared memory and generates.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def engine(model: str, role: str, server: Path) -> LLM:
    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMTierConnector",
            kv_connector_module_path="lmtier_integrations.vllm",
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"server": str(server)},
        ),
    )


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "lmtier.sock"
        serve = [sys.executable, "-m", "lmtier", "serve", "--unix", str(socket), "--listen", "", "--http", ""]
        with subprocess.Popen([*serve, "--tier", "cpu://?capacity=512MiB"]) as server:
            try:
                ping = [sys.executable, "-m", "lmtier", "ping", "--server", str(socket)]
                while subprocess.run(ping, capture_output=True).returncode:
                    assert server.poll() is None, "the server did not start"
                split(model, socket)
            finally:
                server.terminate()


def split(model: str, server: Path) -> None:
    prompt = {"prompt_token_ids": [(7 * n * n + n) % 2000 + 10 for n in range(2000)]}

    def answer(instance: LLM, tokens: int) -> tuple[list[int], int]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        (output,) = instance.generate([prompt], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    prefill, decode = (engine(model, role, server) for role in ("kv_producer", "kv_consumer"))
    first, computed_before = answer(prefill, 1)
    text, loaded = answer(decode, 16)
    print(f"prefill computed {2000 - computed_before} tokens, decode loaded {loaded} of them")
    assert text[:1] == first
    for each in (prefill, decode):
        each.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
