"""`vllm serve` is restarted, and answers a long prompt as if it had never stopped.

python examples/vllm_serve_restart.py MODEL DIRECTORY
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

PORT = 8123
TRANSFER = {
    "kv_connector": "LMTierConnector",
    "kv_connector_module_path": "lmtier_integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def ask(path: str, body: dict[str, object] | None = None) -> bytes:
    data = json.dumps(body).encode() if body is not None else None
    url = f"http://127.0.0.1:{PORT}{path}"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return reply.read()


def serve(model: str, directory: str) -> subprocess.Popen[bytes]:
    tiers = ["cpu://?capacity=256MiB", f"disk://{directory}?capacity=2GiB"]
    # A request waits longer for the disk than the usual 2 s, so a busy machine shows the same.
    transfer = json.dumps({**TRANSFER, "kv_connector_extra_config": {"tiers": tiers, "load_deadline": 20.0}})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(PORT), "--kv-transfer-config", transfer]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"]
    command += ["--enable-prompt-tokens-details"]
    server = subprocess.Popen(command, stdout=sys.stderr)
    while True:
        if server.poll() is not None:
            sys.exit("vLLM did not start")
        try:
            ask("/health")
            return server
        except OSError:
            time.sleep(0.2)  # it starts


def main(model: str, directory: str) -> None:
    prompt = [(7 * n * n + n) % 2000 + 10 for n in range(2000)]  # stands for a text of 2,000 tokens
    answers = []
    for run in ("first start", "restarted"):
        server = serve(model, directory)
        try:
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "detokenize": False}
            ask("/v1/completions", {**body, "prompt": prompt[:64]})  # warm up
            began = time.perf_counter()
            reply = json.loads(ask("/v1/completions", {**body, "return_token_ids": True}))
            milliseconds = 1e3 * (time.perf_counter() - began)
            loaded = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            print(
                f"{run}: {milliseconds:.0f} ms to the first token, {loaded} of 2000 tokens loaded", flush=True
            )
            answers.append(reply["choices"][0]["token_ids"])
        finally:
            server.terminate()
            server.wait()
    assert answers[0] == answers[1]


if __name__ == "__main__":
    main(*sys.argv[1:])
