"""An agent with tools and sub-agents on `vllm serve`, before and after it says what it knows.

python examples/agent.py MODEL

The agent asks the model, runs the tool that the answer names, and asks again with the result. Each turn it
also starts sub-agents, which work for two turns and are over. The cache has room for the agent and one
sub-agent. Before: the cache sees requests. After: requests name their session and its parent, and the last
one of a sub-agent carries the hint that its session is over. Then the agent's own KV stays.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import APIConnectionError, OpenAI

from lmtier.rules.hints import END, envelope
from lmtier.tools import sizing
from lmtier.tools.console import Console, ServerAddress

PORT = 8124
BLOCK = 32
TURNS, SUB_AGENTS = 4, 3
TRANSFER = {
    "kv_connector": "LMTierConnector",
    "kv_connector_module_path": "lmtier_integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
Tokens = list[int]


def text(number: int, tokens: int) -> Tokens:
    """Stands for a text: a system prompt, a task, a file."""
    return [(number * 7919 + n * n * 7 + n) % 2000 + 10 for n in range(tokens)]


TOOLS = {
    "read": lambda number: text(1000 + number, 64),
    "search": lambda number: text(2000 + number, 32),
}
"""They return texts, as tools do."""


class Agent:
    """One session."""

    def __init__(self, client: OpenAI, model: str, name: str, prompt: Tokens, parent: str = "") -> None:
        self._client, self._model = client, model
        self._name, self._parent = name, parent
        self._prompt = prompt
        self._turn = 0
        self.asked = self.cached = 0

    def turn(self, *, says_what_it_knows: bool, is_last: bool = False) -> None:
        """Ask the model, and run the tool that its answer names."""
        self._turn += 1
        more: dict[str, object] = {"detokenize": False, "return_token_ids": True}
        if says_what_it_knows:
            more["session_id"] = self._name
            params: dict[str, object] = {"lmtier_parent": self._parent} if self._parent else {}
            if is_last:
                params["lmtier_hints"] = envelope(f"{self._name} is over", (END, {}))
            more["kv_transfer_params"] = params
        answer = self._client.completions.create(
            model=self._model, prompt=self._prompt, max_tokens=4, temperature=0, extra_body=more
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        self.asked += len(self._prompt)
        self.cached += answer.usage.prompt_tokens_details.cached_tokens or 0
        said: Tokens = answer.choices[0].model_dump()["token_ids"]
        tool = sorted(TOOLS)[sum(said) % len(TOOLS)]
        self._prompt = [*self._prompt, *said, *TOOLS[tool](sum(said))]


def work(client: OpenAI, model: str, run: int, *, says_what_it_knows: bool) -> tuple[int, int]:
    """Returns how many tokens the agent itself asked for, and how many of them were there."""
    agent = Agent(client, model, f"agent-{run}", text(run, 1024))
    for turn in range(TURNS):
        agent.turn(says_what_it_knows=says_what_it_knows)
        for number in range(SUB_AGENTS):
            name = f"agent-{run}/{turn}.{number}"
            sub = Agent(client, model, name, text(10 * (turn + 10 * run) + number, 960), f"agent-{run}")
            sub.turn(says_what_it_knows=says_what_it_knows)
            sub.turn(says_what_it_knows=says_what_it_knows, is_last=True)
    return agent.asked, agent.cached


@contextmanager
def serving(model: str, folder: Path) -> Iterator[tuple[OpenAI, Console]]:
    """A cache server with room for 2,560 tokens, and an engine that has room for little more itself."""
    room = sizing.read(Path(model), "fp32").form(BLOCK, 1).slab_bytes * 2560 // BLOCK
    lmtier = [sys.executable, "-m", "lmtier", "serve", "--unix", str(folder / "socket")]
    lmtier += ["--tier", f"cpu://?capacity={room}", "--listen", "", "--http", ""]
    lmtier += ["--set", f"chunk_tokens={BLOCK}"]
    transfer = {**TRANSFER, "kv_connector_extra_config": {"server": str(folder / "socket")}}
    vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    vllm += ["--host", "127.0.0.1", "--port", str(PORT), "--kv-transfer-config", json.dumps(transfer)]
    vllm += ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK)]
    vllm += ["--max-model-len", "2048", "--num-gpu-blocks-override", "66", "--enable-prompt-tokens-details"]
    client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", timeout=300, max_retries=0)
    processes = [subprocess.Popen(lmtier, stdout=sys.stderr)]
    try:
        while not (folder / "socket").exists():
            if processes[0].poll() is not None:
                sys.exit("the cache server did not start")
            time.sleep(0.05)  # it starts
        processes.append(subprocess.Popen(vllm, stdout=sys.stderr))
        while True:
            if any(process.poll() is not None for process in processes):
                sys.exit("a server did not start")
            try:
                client.models.list()
                break
            except APIConnectionError:
                time.sleep(0.2)
        yield client, Console(ServerAddress(unix=str(folder / "socket")))
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as folder, serving(model, Path(folder)) as (client, remote):
        for run, says_what_it_knows in enumerate((False, True), 1):
            asked, cached = work(client, model, run, says_what_it_knows=says_what_it_knows)
            print(f"{'after' if says_what_it_knows else 'before'}: {cached} of {asked} tokens were there")
            sessions = {each["session"]: each for each in remote.get("/api/sessions", list)}
            remote.post("/api/clear", {})
        agent = sessions["agent-2"]
        print(f"agent-2 saved {agent['saved']} tokens, and has {agent['children']} children")


if __name__ == "__main__":
    main(*sys.argv[1:])
