"""Models that keep a state beside KV, or attend by chunks: the same answers, wherever all that came from.

    .venv-vllm/bin/python bench/vllm_hybrid.py --save bench/results/…

Tiny models with random weights, so wide that no two tokens are nearly equally likely. A plain engine answers
each prompt cold and from its own prefix cache. Engines with lmtier answer it from each tier, and forget their
own prefixes before each. Compared are all tokens of an answer, and how likely its first token and its rivals
were. × is the time to the first token, in the engine with lmtier, over that of the plain engine's own hit.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lmtier.client.client import Client
from lmtier.tools.terminal import say, table
from lmtier_bench import header
from tests.redis_process import RedisServer
from tests.vllm.conftest import CacheServer
from tests.vllm.engine import Engine, Output

ANSWER = 12
RIVALS = 5
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-next": {"chunk": 288, "block_size": 32, "dtype": "bfloat16", "max_num_batched_tokens": 2048},
    "lfm2": {"chunk": 32, "block_size": 32, "max_num_batched_tokens": 2048},
    "jamba": {"chunk": 64, "block_size": 32, "max_num_batched_tokens": 2048},
    # vLLM 0.32 on a CPU dies where a step of these has more than one block.
    "falcon-h1": {"chunk": 256, "block_size": 256, "max_num_batched_tokens": 256},
    "granite-hybrid": {"chunk": 288, "block_size": 288, "max_num_batched_tokens": 288},
    "mamba2": {"chunk": 256, "block_size": 256, "max_num_batched_tokens": 256},
    "llama4": {"chunk": 32, "block_size": 32, "max_num_batched_tokens": 2048},
}
"""`block_size` is given to vLLM, which takes larger blocks where a state would not fit: those of `chunk`."""

OTHER_STEP = 1148
"""Steps of so many tokens instead of 2048: what this changes is what the engine alone shows in two runs."""


def prompts_of(count: int) -> list[list[int]]:
    """A third are alike but for their first token; a third part inside a chunk; all of hundreds to thousands
    of tokens."""
    dice = random.Random(1)
    some = [[dice.randrange(4, 2048) for _ in range(3500)] for _ in range(count)]
    third, shared = count // 3, some[0]
    alike = [[first, *shared[1:1500]] for first in range(50, 50 + third)]
    parting = [[*some[1][: 900 + 7 * n], *some[2 + n][: 400 + 31 * n]] for n in range(third)]
    others = [each[: dice.randrange(600, 3000)] for each in some[: count - 2 * third - 1]]
    return [*alike, *parting, *others, some[-1]]


class Row:
    def __init__(self, name: str, found: list[Output], wanted: list[Output], own: list[Output]) -> None:
        count = len(found)
        self.says: dict[str, Any] = {
            "from": name,
            "same": sum(a.tokens == b.tokens for a, b in zip(found, wanted, strict=True)),
            "prompts": count,
            "most difference of a log probability": max(map(_difference, found, wanted)),
            "hits": sum(each.cached > 0 for each in found),
            "hit tokens": sum(each.cached for each in found),
            "ms": round(1000 * median(each.seconds for each in found), 1),
            "× own hit": round(median(a.seconds / b.seconds for a, b in zip(found, own, strict=True)), 2),
        }


def _difference(one: Output, other: Output) -> float:
    return max(abs(one.first.get(each, -99.0) - other.first[each]) for each in other.first)


def ask(engine: Engine, prompts: list[list[int]]) -> list[Output]:
    found = []
    for prompt in prompts:
        engine.forget()
        found += engine.generate([prompt], ANSWER, logprobs=RIVALS)
    return found


def measure(name: str, models: Path, folder: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    options = dict(MODELS[name])
    chunk = options.pop("chunk")
    options["enable_prefix_caching"] = True
    with Engine(folder, models / name, **options) as plain:
        wanted, own = [], []
        for prompt in prompts:
            plain.forget()
            wanted += plain.generate([prompt], ANSWER, logprobs=RIVALS)
            own += plain.generate([prompt], ANSWER, logprobs=RIVALS)
        plain.forget()
        shared = [plain.generate([each], ANSWER, logprobs=RIVALS)[0] for each in prompts * 2][len(prompts) :]
    rows = [
        Row("nothing (plain, cold)", wanted, wanted, own),
        Row("its own prefix cache", own, wanted, own),
        Row("the same, shared by all prompts", shared, wanted, own),
    ]
    if options["max_num_batched_tokens"] > OTHER_STEP:
        others = {**options, "max_num_batched_tokens": OTHER_STEP}
        with Engine(folder, models / name, **others) as plain:
            rows.append(Row("nothing (plain, cold, other steps)", ask(plain, prompts), wanted, own))
    with ExitStack() as stack:
        redis = RedisServer(folder / "redis")
        stack.callback(redis.process.kill)
        disk, far = f"disk://{folder}/kv?capacity=4GiB", f"redis://127.0.0.1:{redis.port}/0"
        server = CacheServer(folder, "cpu://?capacity=1GiB", disk, far, chunk_tokens=chunk)
        stack.callback(server.close)
        with Engine(folder, models / name, transfer=server.transfer(), **options) as engine:
            rows.append(Row("nothing (lmtier, cold)", ask(engine, prompts), wanted, own))
            rows.append(Row("memory", ask(engine, prompts), wanted, own))
            with Client(str(server.path)) as client:
                assert client.flush()
            for tier in (disk, far):
                server.kill()
                server._command = server._command[: server._command.index("--tier")]
                server._command += ["--tier", "cpu://?capacity=1GiB", "--tier", tier]
                server.start()
                engine.generate([[5] * 700])  # so that the engine hears of the new server
                rows.append(Row(tier.partition(":")[0], ask(engine, prompts), wanted, own))
        with Engine(folder, models / name, transfer=server.transfer(), **options) as engine:
            rows.append(Row("memory, a new engine", ask(engine, prompts), wanted, own))
        redis.process.kill()
    return [row.says for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--folder", type=Path, help="tiny models that tests/vllm/models.py has made")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    prompts = prompts_of(given.prompts)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = given.folder or Path(folder) / "models"
        if given.folder is None:
            maker = Path(__file__).resolve().parents[1] / "tests/vllm/models.py"
            subprocess.run([sys.executable, str(maker), str(models)], check=True)
        for name in given.models:
            here = Path(folder) / name
            here.mkdir()
            found[name] = measure(name, models, here, prompts)
            say(f"\n{name}\n{table(list(found[name][0]), [list(row.values()) for row in found[name]])}")
            if given.save:
                said = {"machine": header(None), "models": found}
                given.save.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
