"""What Python takes to enqueue a GPU's saves and loads: in this tree, and in an older commit, in turn.

    python3 bench/enqueue_before.py [COMMIT] [--rounds 5] [--json enqueue.json]

The driver's calls do nothing, so no GPU is needed. A figure is processor time, in % of the time that the bus
takes for the same bytes (55 GB/s), and the least of all rounds. The commit must have the same mover.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
BUS = 55e9
MODELS = {"8B": (32, 8), "70B, TP 8": (80, 1)}
TOKENS = {"2k": 2048, "8k": 8192}
BLOCK = 16
WAYS = "layers apart, layer by layer", "layers apart, whole", "together, layer by layer", "together, whole"


class Event:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def since(self, earlier: object) -> float:
        return 0.0


class Stream:
    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def record(self, *, timed: bool = False) -> Event:
        return Event()

    def wait(self, event: object) -> None:
        pass

    def launch(self, launch: Any) -> None:
        self._driver.launch(1 << 40, launch, 1 << 41)

    def copy(self, copies: Any) -> None:
        self._driver.copy_batch(np.asarray(copies, np.int64).reshape(-1, 3), 1 << 41)

    def copy_rows(self, rows: Any) -> None:
        self._driver.copy_rows(rows, 1 << 41)


class Device:
    def __init__(self) -> None:
        from lmtier.copy.cuda import driver, kernels, streams

        library = type("Library", (), {})()
        for name in ("cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync_v2", "cuMemcpy2DAsync_v2"):
            # A function of C that looks at nothing but its first two arguments: 0, unless they are the same.
            setattr(library, name, ctypes.CDLL(None).pthread_equal)
        made = driver.Driver(library)
        self.spread = kernels.Spread(8)
        self.compute, *others = (Stream(made) for _ in range(5))
        self.store, self.load = (
            streams.StreamPair(*others[:2], True),
            streams.StreamPair(*others[2:], False),
        )
        self._kept: list[Any] = []

    def memory(self, nbytes: int) -> int:
        self._kept.append(np.empty(nbytes, np.uint8))
        return int(self._kept[-1].ctypes.data)

    def upload(self, table: Any) -> int:
        self._kept.append(table.copy())
        return int(self._kept[-1].ctypes.data)

    def host_memory(self, nbytes: int) -> Any:
        self._kept.append(np.zeros(nbytes, np.uint8))
        return self._kept[-1]


def measure(rounds: int) -> dict[str, float]:
    """Of the tree in sys.path: the fastest of some rounds, by way, direction and prompt."""
    from lmtier.config import Config
    from lmtier.copy.cuda.mover import CudaMover
    from lmtier.copy.cuda.paging import CudaKV
    from lmtier.core.cache import Cache
    from lmtier.format.keys import Identity
    from lmtier.format.layout import Layout, padded

    fastest: dict[str, float] = {}
    for model, (layers, heads) in MODELS.items():
        layout = Layout.uniform(
            layers=layers, heads=heads, head_dim=128, dtype="bf16", block_tokens=BLOCK, chunk_tokens=BLOCK,
            packing="token",
        )  # fmt: skip
        nbytes = layout.nbytes(layout.whole)
        for tokens, number in TOKENS.items():
            chunks = number // BLOCK
            for way in WAYS:
                is_apart, by_layer = way.startswith("layers apart"), way.endswith("layer by layer")
                shape = (layers, 3 * chunks) if is_apart else (3 * chunks, layers)
                every = np.empty((*shape, heads, BLOCK, 256), np.uint16)  # whose pages nobody touches
                tensors = list(every if is_apart else every.swapaxes(0, 1))
                kv = CudaKV(layout, layout.whole, tensors, Device())
                tier = f"cpu://?capacity={4 * chunks * padded(nbytes)}&policy=lru"
                settings = Config(chunk_tokens=BLOCK, tiers=[tier], prefault=False, verify="sample")
                with Cache(settings) as store:
                    identity = Identity(model="bench", weights="bench")
                    made = CudaMover(store, kv, identity, layerwise=by_layer)
                    made._proven, prompts = True, count()
                    for _ in range(rounds + 1):
                        chain = made.chain([next(prompts), *[7] * number])
                        blocks = np.random.default_rng(0).permutation(3 * chunks)
                        for direction, took in (
                            ("save", saved(made, store, chain, blocks[:chunks].tolist(), by_layer)),
                            ("load", loaded(made, chain, blocks[chunks : 2 * chunks].tolist(), by_layer)),
                        ):
                            name = f"{direction}, {model}, {tokens}: {way}"
                            part = 100 * took / (chunks * nbytes / BUS)
                            fastest[name] = min(part, fastest.get(name, part))
    return fastest


def saved(mover: Any, store: Any, chain: Any, ids: list[int], by_layer: bool) -> float:
    reservation = store.reserve(chain.keys, mover.form)
    began = thread_time()
    blocks = mover.blocks_of(ids, 0, len(chain.keys))
    save = mover.fill(reservation, dict(enumerate(blocks)) if isinstance(blocks, list) else blocks)
    for layer in mover.kv.layers if by_layer else ():
        save.layer(layer)
    save.all()
    save.commit()
    took = thread_time() - began
    mover.drain()
    return took


def loaded(mover: Any, chain: Any, ids: list[int], by_layer: bool) -> float:
    match = mover.match(chain)
    began = thread_time()
    with mover.load(match, ids) as load:
        for layer in mover.kv.layers if by_layer else ():
            load.layer(layer)
    took = thread_time() - began
    mover.drain()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tree", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tree:
        sys.path.insert(0, given.tree)
        sys.stdout.write(json.dumps(measure(given.rounds)))
        return
    from lmtier.tools.terminal import say, table

    found: dict[str, dict[str, float]] = {"before": {}, "now": {}}
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", given.commit, "lmtier"], cwd=REPO, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        for _ in range(given.rounds):
            for when, tree in (("before", folder), ("now", str(REPO))):
                command = [sys.executable, __file__, "--tree", tree, "--rounds", "2"]
                said = subprocess.run(command, check=True, capture_output=True, text=True)
                for name, part in json.loads(said.stdout.splitlines()[-1]).items():
                    found[when][name] = min(part, found[when].get(name, part))
    rows = [[name, f"{part:.1f}", f"{found['now'][name]:.1f}"] for name, part in found["before"].items()]
    say(table(["% of the time of the bus", "before", "now"], rows))
    if given.json:
        given.json.write_text(json.dumps({"commit": given.commit, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
