"""Time to first token of a transformers model: alone, behind lmtier's tiers, and behind a cache kept by hand.

    python bench/transformers_ttft.py --save bench/results/…

Prompt by prompt, in turn, so that noise meets all: the model alone; with lmtier, cold, which also saves; from
memory; a deep copy of a cache that was kept in the process, which is transformers' own way to reuse a prefix;
and, after all of these, from disk, through a new store on the same folder. What is judged is the median over
prompts of `measured / alone`, the two asked in turn. One thread computes: a second one would make the times
depend on who else is awake.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

from lmtier.tools.terminal import say, table
from lmtier_bench import header
from lmtier_integrations.transformers import PrefixCache

ANSWER = 8  # tokens by which answers are compared
TIERS = "cpu://?capacity=1GiB", "disk://{}?capacity=4GiB"


def main() -> int:
    options = parse()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, options.dtype)).eval()
    versions = {name: version(name) for name in ("lmtier", "transformers", "torch")}
    about = (
        f"{header(options.directory)}, transformers {versions['transformers']}, {options.dtype}, "
        f"{options.layers} layers of {options.hidden}, chunks of {options.chunk_tokens}, "
        f"{options.prompts} prompts"
    )
    say(about)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lmtier-ttft-", dir=options.directory) as own:
        for length in options.tokens:
            rows += measure(model, length, options, Path(own) / str(length))
    say()
    say(table(("tokens", "way", "ms", "× alone", "same answers"), [tuple(row.values()) for row in rows]))
    if options.save:
        arguments = [Path(each).name if "/" in each else each for each in sys.argv[1:]]
        found = {
            "about": about,
            "arguments": arguments,
            "versions": versions,
            "time to the first token": rows,
        }
        options.save.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return 0


def measure(model: Any, length: int, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    dice = torch.Generator().manual_seed(length)
    prompts = [torch.randint(4, 2048, (1, length), generator=dice) for _ in range(options.prompts + 1)]
    settings: dict[str, Any] = {"chunk_tokens": options.chunk_tokens, "load_deadline": 30, "verify": "sample"}
    tiers = [tier.format(folder) for tier in TIERS]
    times: dict[str, list[float]] = {"alone": []}
    ratios: dict[str, list[float]] = {}
    same: dict[str, int] = {}

    def ask(way: str, prompt: torch.Tensor, generate: Callable[..., Any], **more: Any) -> None:
        began = time.perf_counter()
        generate(prompt, max_new_tokens=1, do_sample=False, **more)
        times.setdefault(way, []).append(1e3 * (time.perf_counter() - began))
        ratios.setdefault(way, []).append(times[way][-1] / times["alone"][-1])

    def compare(way: str, prompt: torch.Tensor, wanted: list[int], generate: Callable[..., Any]) -> None:
        same[way] = same.get(way, 0) + (answer(prompt, generate) == wanted)

    answers = [
        answer(prompt, model.generate) for prompt in prompts
    ]  # the first of all is slow, whoever it is
    with PrefixCache(model, *tiers, **settings) as store:
        answer(prompts[-1], store.generate)
        for prompt, wanted in zip(prompts[:-1], answers, strict=False):
            ask("alone", prompt, model.generate)
            ask("lmtier, cold", prompt, store.generate)
            ask("lmtier, from memory", prompt, store.generate)
            kept = DynamicCache(config=model.config)
            with torch.no_grad():
                model(
                    prompt[:, : (length - 1) // options.chunk_tokens * options.chunk_tokens],
                    past_key_values=kept,
                )
            ask(
                "by hand: a deep copy",
                prompt,
                lambda p, kept=kept, **o: model.generate(p, past_key_values=copy.deepcopy(kept), **o),
            )
            compare("lmtier, from memory", prompt, wanted, store.generate)
    for prompt, wanted in zip(prompts[:-1], answers, strict=False):
        with PrefixCache(model, *tiers, **settings) as store:
            ask("alone", prompt, model.generate)
            ask("lmtier, new store, from disk", prompt, store.generate)
        with PrefixCache(model, *tiers, **settings) as store:
            compare("lmtier, new store, from disk", prompt, wanted, store.generate)
    return [
        {
            "tokens": length,
            "way": way,
            "milliseconds": round(median(each), 1),
            "ratio": round(median(ratios[way]), 3),
            "same": f"{same[way]}/{options.prompts}" if way in same else "",
        }
        for way, each in times.items()
    ]


def answer(prompt: torch.Tensor, generate: Callable[..., Any]) -> list[int]:
    found: list[int] = generate(prompt, max_new_tokens=ANSWER, do_sample=False)[0, -ANSWER:].tolist()
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 6000])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--directory", type=Path, help="where the disk tier lies; the temporary folder")
    parser.add_argument("--save", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
