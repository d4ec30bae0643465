"""A toy engine with CUDA graphs on a GPU: whether its answers stay the same, and what saving costs it.

    PYTHONPATH=.:backends:integrations python3 bench/gpu_toy.py --json toy.json

Scenarios compare answers without a cache, cold, hit, from copies in GPU memory, and from a disk tier. Figures
are medians of rounds in which what is compared takes turns. `--simulated` rehearses the scenarios on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

# Before cuBLAS starts: so that the same product of matrices is the same to the last bit.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from lmtier._version import __version__
from lmtier.config import Config
from lmtier.copy.cuda.mover import CudaMover
from lmtier.core.cache import Cache
from lmtier.tools.terminal import number_text, say, table
from tests.gpu.toy import (
    LARGE,
    LAYOUTS,
    LONG,
    Cuda,
    Engine,
    Machine,
    Model,
    Request,
    Simulated,
    Spec,
    scenario,
)

LIMIT = 200.0
PARTS = ("scenarios", "figures")
WAYS = (("off", True), ("off", False), ("pieces", True), ("pieces", False), ("whole", False))
"""What is captured, and whether hooks are called layer by layer."""

Figures = dict[str, float]


# ---- figures


@contextmanager
def served(engine: Engine, *, layerwise: bool) -> Iterator[CudaMover]:
    """The engine with a cache as people have it, which holds eight long prompts."""
    spec = engine.spec
    room = 8 * max(1 << 20, spec.longest // spec.chunk_tokens * spec.layout.nbytes(spec.layout.whole))
    tiers = [f"cpu://?capacity={room}&policy=lru"]
    with Cache(Config(tiers=tiers, chunk_tokens=spec.chunk_tokens, worth="always", prefault=False)) as cache:
        cache.slab.prefault()
        with engine.connected(cache, layerwise=layerwise) as mover:
            yield mover


def timed(engine: Engine, work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds until this has returned, and until the device is done with all of it."""
    engine.machine.synchronize()
    began = time.perf_counter()
    work()
    returned = time.perf_counter() - began
    if engine.mover is not None:
        engine.mover.drain()
    engine.machine.synchronize()
    return 1e3 * returned, 1e3 * (time.perf_counter() - began)


def fresh(engine: Engine, tokens: int) -> list[int]:
    """A prompt that nobody has asked before."""
    return [engine.random.randrange(engine.spec.vocab) for _ in range(tokens)]


def long_prompt(spec: Spec) -> int:
    """Whole steps, and a token."""
    return (spec.longest - 2) // spec.step_tokens * spec.step_tokens + 1


def medians(taken: dict[str, list[float]], unit: str) -> Figures:
    return {f"{name}, {unit}": median(values) for name, values in taken.items()}


def hidden_stores(engine: Engine, *, layerwise: bool, rounds: int = 9) -> Figures:
    """A prompt without saving and with it, beside its copies alone: how much of those nobody waits for."""
    spec, tokens = engine.spec, long_prompt(engine.spec)
    taken: dict[str, list[float]] = {"without": [], "answered": [], "stored": [], "copies alone": []}
    with served(engine, layerwise=layerwise) as mover:

        def copies(prompt: list[int]) -> None:
            blocks = engine.take(tokens)
            with mover.save(mover.chain(prompt), blocks) as save:
                for layer in range(spec.layers) if layerwise else ():
                    save.layer(layer)
                if not layerwise:
                    save.all()
            engine.give_back(blocks)

        for which in range(-2, rounds):  # the first ones warm up
            engine.mover = None
            _, without = timed(engine, partial(engine.answer, [fresh(engine, tokens)], 1))
            engine.mover = mover
            answered, stored = timed(engine, partial(engine.answer, [fresh(engine, tokens)], 1))
            _, alone = timed(engine, partial(copies, fresh(engine, tokens)))
            if which >= 0:
                for name, value in zip(taken, (without, answered, stored, alone), strict=True):
                    taken[name].append(value)
    shares: dict[str, list[float]] = {"hidden from the answer": [], "hidden, the last copies too": []}
    for without, answered, stored, alone in zip(*taken.values(), strict=True):
        for name, until in zip(shares, (answered, stored), strict=True):
            shares[name].append(100 * (1 - (until - without) / alone))
    moved = tokens // spec.chunk_tokens * spec.layout.nbytes(spec.layout.whole)
    rate = {"copies alone, GB/s": moved / median(taken["copies alone"]) / 1e6}
    return {**medians(taken, "ms"), **medians(shares, "%"), **rate}


def decode_rates(
    engine: Engine, *, layerwise: bool, rounds: int = 5, steps: int = 100, pinned: int = 2 << 30
) -> Figures:
    """Tokens a second of all slots: alone, beside stores without end, and while a slab is being pinned."""
    rates: dict[str, list[float]] = {"alone": [], "beside stores": [], "beside pinning": []}
    stored: list[float] = []
    settings = Config(
        tiers=[f"cpu://?capacity={pinned}"], chunk_tokens=engine.spec.chunk_tokens, prefault=False
    )
    with (
        served(engine, layerwise=layerwise) as mover,
        Cache(settings) as other,
        Decoding(engine, mover) as it,
    ):
        other.slab.prefault()

        def while_pinning() -> float:
            pinning = engine.machine.lock_pages(engine.machine.device([]), other.slab.view(0, pinned))
            try:
                return it.rate(lambda _: not pinning.wait(0))
            finally:
                engine.machine.synchronize()
                pinning.close()

        for which in range(-1, rounds):
            before, began = it.stored, time.perf_counter()
            beside = it.rate(lambda done: done < steps, it.store)
            seconds = time.perf_counter() - began
            values = it.rate(lambda done: done < steps), beside, while_pinning()
            if which >= 0:
                for name, value in zip(rates, values, strict=True):
                    rates[name].append(value)
                stored.append((it.stored - before) / seconds / 1e9)
    shares = {
        name: [100 * a / b for a, b in zip(rates[name], rates["alone"], strict=True)]
        for name in ("beside stores", "beside pinning")
    }
    return {**medians(rates, "tokens/s"), **medians(shares, "% of alone"), "stored, GB/s": median(stored)}


class Decoding:
    """Requests in every slot of an engine that never end, and stores of blocks that nobody uses."""

    def __init__(self, engine: Engine, mover: CudaMover) -> None:
        self._engine, self._mover, spec = engine, mover, engine.spec
        self._requests = [
            Request([], 0, slot + 1, 0, engine.take(spec.longest)) for slot in range(spec.slots)
        ]
        self._tokens, self._numbers = fresh(engine, spec.step_tokens - 1), count()
        self._blocks = engine.free[: spec.step_tokens // spec.block_tokens]
        self.stored = 0
        """Bytes so far."""

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *_: object) -> None:
        for request in self._requests:
            self._engine.give_back(request.blocks)

    def rate(self, goes_on: Callable[[int], bool], beside: Callable[[], None] = lambda: None) -> float:
        """Tokens a second for as long as it `goes_on`, by the number of steps that were done."""
        engine, half = self._engine, self._engine.spec.longest // 2
        engine.machine.synchronize()
        began, done = time.perf_counter(), 0
        while not done or goes_on(done):
            with engine.machine.never_waiting(), torch.no_grad():
                for request in self._requests:
                    request.computed = half + done % half
                engine.decode(self._requests)
                beside()
                self._mover.poll()
            engine.keep_pace()
            done += 1
        engine.machine.mark()()
        took = time.perf_counter() - began
        self._mover.drain()
        return done * len(self._requests) / took

    def store(self) -> None:
        """One more, if fewer than two are under way."""
        if self._mover.under_way < 2:
            with self._mover.save(
                self._mover.chain([next(self._numbers), *self._tokens]), self._blocks
            ) as save:
                save.all()
            layout = self._engine.spec.layout
            self.stored += save.tokens // layout.chunk_tokens * layout.nbytes(layout.whole)


def first_tokens(engine: Engine, *, layerwise: bool, rounds: int = 9) -> Figures:
    """Milliseconds to the first token of a prompt that is not there, and of one that is."""
    taken: dict[str, list[float]] = {"cold": [], "hit": []}
    with served(engine, layerwise=layerwise):
        for which in range(-2, rounds):
            prompt = fresh(engine, long_prompt(engine.spec))
            for values in taken.values():
                answered, _ = timed(engine, partial(engine.answer, [prompt], 1))
                if which >= 0:
                    values.append(answered)
    ratios = [cold / hit for cold, hit in zip(*taken.values(), strict=True)]
    return {**medians(taken, "ms"), "cold / hit": median(ratios)}


# ---- what is run


class Run:
    """Parts in turn, within the limit of time. The JSON is complete after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._began = options, time.monotonic()
        self.parts: dict[str, Any] = {"scenarios": [], "figures": [], "failed": [], "left_out": []}
        self._header = {
            "lmtier": __version__,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": "simulated" if options.simulated else gpu(),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default"),
        }

    def part(self, kind: str, what: dict[str, Any], work: Callable[[], dict[str, Any]]) -> None:
        name = " ".join(map(str, [kind, *what.values()]))
        began = time.monotonic()
        if began - self._began > self._options.limit - 15:
            self.parts["left_out"].append(name)
        else:
            try:
                found = work()
            except Exception:  # noqa: BLE001  # the other parts are worth their time on a GPU
                say(f"{name} failed:\n{traceback.format_exc()}")
                self.parts["failed"].append({"part": name, "error": traceback.format_exc()})
            else:
                row = {**what, **found, "seconds": round(time.monotonic() - began, 2)}
                self.parts[kind].append(row)
                say(f"{name}: {found}")
        if self._options.json is not None:
            self._options.json.write_text(json.dumps({**self._header, **self.parts}, indent=1) + "\n")

    @property
    def failures(self) -> int:
        missing = len(self.parts["failed"]) + len(self.parts["left_out"])
        return missing + sum(bool(row["wrong"]) for row in self.parts["scenarios"])

    def __str__(self) -> str:
        right = [
            [*(row[name] for name in ("layout", "graphs", "hooks", "run")), *_said(row)]
            for row in self.parts["scenarios"]
        ]
        figures = [
            [row["figure"], row["layout"], row["graphs"], row["hooks"], name, number_text(value)]
            for row in self.parts["figures"]
            for name, value in row["values"].items()
        ]
        texts = [" ".join(map(str, self._header.values()))]
        texts.append(table(["layout", "graphs", "hooks", "runs", "answers", "verified", "seconds"], right))
        if figures:
            texts.append(table(["figure", "layout", "graphs", "hooks", "of", "median"], figures))
        texts += [f"failed: {each['part']}" for each in self.parts["failed"]]
        texts += [f"no time was left for: {each}" for each in self.parts["left_out"]]
        return "\n\n".join(texts)


def _said(row: dict[str, Any]) -> list[object]:
    return [", ".join(row["wrong"]) or "the same", row["verified"], row["seconds"]]


def gpu() -> str:
    driver = Path("/sys/module/nvidia/version")
    version = driver.read_text().strip() if driver.exists() else "unknown"
    return f"{torch.cuda.get_device_name()}, driver {version}, CUDA {torch.version.cuda}"


def answers(
    machine: Machine, model: Model, spec: Spec, layout: str, graphs: str, layerwise: bool, **way: Any
) -> dict[str, Any]:
    """One scenario."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(machine, model, spec, layout, graphs)
        outcome = scenario(engine, Path(folder), layerwise=layerwise, **way)
    return {
        "wrong": outcome.wrong,
        "same_tokens": all(each.tokens == outcome.alone.tokens for each in outcome.others.values()),
        "verified": outcome.verified,
        "loaded": {name: sum(each.loaded) for name, each in outcome.others.items()},
    }


def scenarios(run: Run, machine: Machine, spec: Spec, layouts: Sequence[str], staging: int) -> None:
    model = Model(spec, machine.where)
    for layout in layouts:
        for graphs, layerwise in WAYS:
            for shortest in (0, None) if graphs == "whole" else (None,):
                what = {"layout": layout, "graphs": graphs, "hooks": _hooks(layerwise)}
                way = {"staging_bytes": staging, **({} if shortest is None else {"shortest_run": shortest})}
                what["run"] = "as they are" if shortest == 0 else "default"
                work = partial(answers, machine, model, spec, layout, graphs, layerwise, **way)
                run.part("scenarios", what, work)


def figures(run: Run, machine: Machine, spec: Spec, layouts: Sequence[str]) -> None:
    model = Model(spec, machine.where)
    for layout in layouts:
        for graphs, layerwise in (("pieces", True), ("whole", False)):
            engine = Engine(machine, model, spec, layout, graphs)
            what = {"layout": layout, "graphs": graphs, "hooks": _hooks(layerwise)}
            for figure in (hidden_stores, first_tokens, *([] if layerwise else [decode_rates])):
                run.part(
                    "figures",
                    {"figure": figure.__name__, **what},
                    lambda figure=figure, engine=engine, layerwise=layerwise: {  # type: ignore[misc]  # mypy: lambdas
                        "values": figure(engine, layerwise=layerwise)
                    },
                )


def _hooks(layerwise: bool) -> str:
    return "layerwise" if layerwise else "step"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--simulated", action="store_true", help="scenarios alone, without a GPU")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds; then nothing new begins")
    options = parser.parse_args(arguments)
    run = Run(options)
    if options.simulated:
        torch.set_num_threads(1)  # more are slower for tensors as small as these
        scenarios(run, Simulated(), Spec(), options.layouts, 1 << 14)
    else:
        faulthandler.dump_traceback_later(options.limit + 30, exit=True)  # whatever hangs is seen
        machine = Cuda()
        if "scenarios" in options.parts:
            scenarios(run, machine, LARGE, options.layouts, 16 << 20)
        if "figures" in options.parts:
            figures(run, machine, LONG, [each for each in ("NHD", "BLHNC") if each in options.layouts])
        faulthandler.cancel_dump_traceback_later()
    say(f"\n{run}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
