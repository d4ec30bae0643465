"""Time to first token of a transformers model on a GPU: alone, and behind each of lmtier's tiers.

    PYTHONPATH=.:backends:integrations python3 bench/gpu_transformers.py --json transformers.json

The model is a Llama of 1.1 billion random weights in bf16. Prompt by prompt, in turn: the model alone; with
lmtier, cold, which also saves; from the CPU tier; and with the prompt's KV kept on the GPU, which no tier can
beat. Then, again beside the model alone, from disk, through a new store on the same folder; and through one
more, from copies in GPU memory. A time ends when the host has the token. Before that, in a first pass over
other keys, answers of a few tokens are compared:

    cold           with those of the model alone, which computes the very same
    from tiers     with those of the KV kept on the GPU: both compute the same few tokens. The model alone
                   computes all at once, and in bf16 that may round to another token

`--device cpu` is a rehearsal with a tiny model. The exit status is 1 if an answer differs that must not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "backends"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "integrations"))

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from lmtier.tools.terminal import say, table
from lmtier_bench import header
from lmtier_integrations.transformers import PrefixCache

ANSWER = 8  # tokens by which answers are compared
TIERS = "cpu://?capacity={capacity}", "disk://{folder}?capacity={capacity}"
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "cpu": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {"tokens": [2048, 8192], "chunk_tokens": 256, "dtype": "bfloat16", "capacity": "4GiB"},
    "cpu": {"tokens": [300, 700], "chunk_tokens": 64, "dtype": "float32", "capacity": "256MiB"},
}
ALONE, COLD, CPU, KEPT = "the model alone", "lmtier, cold", "lmtier, from the CPU tier", "KV kept on the GPU"
AGAIN, DISK = "the model alone, again", "lmtier, new store, from disk"
COPIES = "lmtier, from copies in GPU memory"
OTHER_KEYS = "compared"
VERSIONS = "lmtier", "torch", "transformers", "cupy-cuda13x", "numpy"


class Answer(NamedTuple):
    tokens: list[int]
    best: list[list[float]]
    """Of each token, the logits of the two best candidates."""

    def is_as_good_as(self, wanted: Answer, dtype: torch.dtype) -> bool:
        """Until the two part, if they do; there the candidates are as good as equal in this precision."""
        parts = [at for at, (a, b) in enumerate(zip(self.tokens, wanted.tokens, strict=True)) if a != b]
        if not parts:
            return True
        first, second = wanted.best[parts[0]]
        return first - second <= 2 * torch.finfo(dtype).eps * abs(first)


class Bench:
    """One model, and what was measured of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.is_gpu = options.device == "cuda"
        torch.manual_seed(0)
        config = LlamaConfig(
            **SHAPES[options.device],
            max_position_embeddings=16384,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        with torch.device(options.device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
        self.model: Any = model.eval()
        self.weights = sum(each.numel() for each in self.model.parameters())
        self.until = time.monotonic() + options.seconds
        self.wrong = 0

    def measure(self, length: int, folder: Path) -> list[dict[str, Any]]:
        """The rows of prompts of so many tokens."""
        dice = torch.Generator().manual_seed(length)
        high = self.model.config.vocab_size
        prompts = [
            torch.randint(4, high, (1, length), generator=dice).to(self.model.device)
            for _ in range(self.options.prompts)
        ]
        whole = (length - 1) // self.options.chunk_tokens * self.options.chunk_tokens
        times: dict[str, list[float]] = {}
        same: dict[str, list[bool]] = {}
        like_kept: dict[str, list[bool]] = {}
        wanted: list[list[Answer]] = []
        loading: list[float] = []
        with self.opened(folder) as store:
            for prompt in prompts:  # this also warms up every way
                alone, kept = (
                    self.answer(prompt),
                    self.answer(prompt, past_key_values=self.kept(prompt, whole)),
                )
                wanted.append([alone, kept])
                for way in (COLD, CPU):
                    got = self.answer(prompt, store.generate, salt=OTHER_KEYS)
                    self.compare(way, got, wanted[-1], same, like_kept)
            for prompt in self.as_many_as_time_allows(prompts):
                self.time(times, ALONE, prompt)
                self.time(times, COLD, prompt, store.generate)
                self.rest(store)
                self.time(times, CPU, prompt, store.generate)
                self.time(times, KEPT, prompt, past_key_values=self.kept(prompt, whole))
                began = self.now()
                cache = store.cache_for(prompt)
                loading.append(self.now() - began)
                assert cache.loaded == [{"cpu": whole}], cache.loaded
            self.rest(store)
        with self.opened(folder) as store:
            for prompt, answers in zip(prompts, wanted, strict=True):
                got = self.answer(prompt, store.generate, salt=OTHER_KEYS)
                self.compare(DISK, got, answers, same, like_kept)
            for prompt in prompts[: len(times[ALONE])]:
                self.time(times, AGAIN, prompt)
                self.time(times, DISK, prompt, store.generate)
            tiers = {tier: each["used"] for tier, each in store.cache.stats().items() if "used" in each}
        if self.is_gpu:
            with self.opened(folder, "gpu://?capacity={capacity}&policy=lru") as store:
                for prompt, answers in zip(prompts, wanted, strict=True):
                    self.answer(prompt, store.generate, salt=OTHER_KEYS)  # a load leaves copies
                    got = self.answer(prompt, store.generate, salt=OTHER_KEYS)
                    self.compare(COPIES, got, answers, same, like_kept)
                for prompt in prompts[: len(times[ALONE])]:
                    store.generate(prompt, max_new_tokens=1, do_sample=False)
                    self.rest(store)
                    assert store.cache_for(prompt).loaded == [{"gpu": whole}]
                    self.time(times, COPIES, prompt, store.generate)
        nbytes = whole * self.token_bytes
        return [
            {
                "tokens": length,
                "way": way,
                "milliseconds": round(median(each), 2),
                "least": round(min(each), 2),
                "most": round(max(each), 2),
                "beside alone": round(median(each) / median(times[AGAIN if way == DISK else ALONE]), 3),
                "as alone": share(same.get(way)),
                "as kept": share(like_kept.get(way)),
                "loaded tokens": 0 if way in (ALONE, AGAIN, COLD) else whole,
                "loaded bytes": 0 if way in (ALONE, AGAIN, COLD) else nbytes,
                "load alone ms": round(median(loading), 2) if way == CPU else "",
                "load alone GB/s": round(nbytes / median(loading) / 1e6, 2) if way == CPU else "",
                "times": [round(one, 3) for one in each],
                **({"used bytes": tiers} if way == DISK else {}),
            }
            for way, each in times.items()
        ]

    def opened(self, folder: Path, *above: str) -> PrefixCache:
        options = self.options
        store = PrefixCache(
            self.model,
            *(tier.format(folder=folder, capacity=options.capacity) for tier in (*above, *TIERS)),
            chunk_tokens=options.chunk_tokens,
            load_deadline=30,
            verify=options.verify,
        )
        if not store.wait_until_pinned():
            say("the CPU tier could not be pinned: copies are slower")
        return store

    def kept(self, prompt: torch.Tensor, whole: int) -> DynamicCache:
        """The KV of the prompt's whole chunks, as the model leaves it: what the best of caches would have."""
        computed, kept = (DynamicCache(config=self.model.config) for _ in range(2))
        with torch.no_grad():
            self.model(prompt, past_key_values=computed, logits_to_keep=1)
        for number, layer in enumerate(computed.layers):
            kept.update(layer.keys[:, :, :whole], layer.values[:, :, :whole], number)
        return kept

    def rest(self, store: PrefixCache) -> None:
        """Nothing that goes on in the background is to disturb what is measured next."""
        if not store.flush():
            say("the disk tier did not take everything within 30 s")

    def as_many_as_time_allows(self, prompts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for number, prompt in enumerate(prompts):
            if number and time.monotonic() > self.until:
                say(f"out of time after {number} of {len(prompts)} prompts")
                return
            yield prompt

    def now(self) -> float:
        """Milliseconds, when the device has nothing to do."""
        if self.is_gpu:
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    def time(
        self,
        times: dict[str, list[float]],
        way: str,
        prompt: torch.Tensor,
        generate: Callable[..., Any] | None = None,
        **how: Any,
    ) -> None:
        began = self.now()
        found = (generate or self.model.generate)(prompt, max_new_tokens=1, do_sample=False, **how)
        int(found[0, -1])  # the host has it
        times.setdefault(way, []).append(1e3 * time.perf_counter() - began)

    def answer(self, prompt: torch.Tensor, generate: Callable[..., Any] | None = None, **how: Any) -> Answer:
        how |= {"max_new_tokens": ANSWER, "do_sample": False}
        how |= {"return_dict_in_generate": True, "output_logits": True}
        found = (generate or self.model.generate)(prompt, **how)
        best = [step[0].float().topk(2).values.tolist() for step in found.logits]
        return Answer(found.sequences[0, -ANSWER:].tolist(), best)

    def compare(
        self,
        way: str,
        got: Answer,
        wanted: Sequence[Answer],
        same: dict[str, list[bool]],
        like_kept: dict[str, list[bool]],
    ) -> None:
        alone, kept = wanted
        same.setdefault(way, []).append(got.tokens == alone.tokens)
        like_kept.setdefault(way, []).append(got.tokens == kept.tokens)
        self.wrong += not got.is_as_good_as(alone if way == COLD else kept, self.model.dtype)

    @property
    def token_bytes(self) -> int:
        config = self.model.config
        each = 2 * config.num_key_value_heads * config.head_dim * self.model.dtype.itemsize
        return int(config.num_hidden_layers * each)

    def machine(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "host": header(self.options.directory),
            "python": sys.version.split()[0],
            "versions": {
                name: installed(name) for name in ("torch", "transformers", "cupy-cuda13x", "numpy")
            },
        }
        if self.is_gpu:
            found["gpu"] = torch.cuda.get_device_name()
            found["cuda"] = torch.version.cuda
            query = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
            said = subprocess.run(query, shell=True, capture_output=True, text=True, check=False).stdout
            found["name and driver"] = " ".join(said.split()) or found["gpu"]
        return found


def share(answers: Sequence[bool] | None) -> str:
    return f"{sum(answers)}/{len(answers)}" if answers else ""


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def main() -> int:
    options = parse()
    began = time.monotonic()
    bench = Bench(options)
    machine = bench.machine()
    about = (
        f"{bench.weights / 1e9:.2f} billion weights in {options.dtype}, {bench.token_bytes} bytes of KV a "
        f"token, chunks of {options.chunk_tokens} tokens, {options.prompts} prompts of each length"
    )
    say(f"{machine.get('name and driver', machine['host'])}: {about}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lmtier-ttft-", dir=options.directory) as own:
        for length in options.tokens:
            rows += bench.measure(length, Path(own) / str(length))
            shown = ("tokens", "way", "milliseconds", "least", "most", "beside alone", "as alone", "as kept")
            shown = (*shown, "load alone ms", "load alone GB/s")
            say()
            say(table(shown, [[row[name] for name in shown] for row in rows if row["tokens"] == length]))
            if options.json is not None:
                found = {**machine, "model": about, "wrong answers": bench.wrong, "rows": rows}
                options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    say(f"\n{bench.wrong} answers differ that must not; {time.monotonic() - began:.0f} s")
    return int(bench.wrong > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--chunk-tokens", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--capacity", help="of each tier")
    parser.add_argument("--verify", default="sample")
    parser.add_argument("--seconds", type=float, default=150, help="after which no prompt is begun any more")
    parser.add_argument("--directory", type=Path, help="where the disk tier lies; the temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, value in USUAL[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    raise SystemExit(main())
