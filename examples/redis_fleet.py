"""Two hosts share what either has computed, through Redis.

    python examples/redis_fleet.py redis://127.0.0.1:6379/0

Each host is a separate process with its own memory. The second one finds in Redis the KV of the first.
"""

import multiprocessing
import sys

import numpy as np

from lmtier import Cache, Config, Identity, Layout, Mover, PagedKV

LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=64, dtype="fp32", block_tokens=16, chunk_tokens=64, packing="token"
)
PROMPT, BLOCKS = list(range(256)), list(range(16))


def host(name: str, url: str) -> None:
    kv = [np.zeros((64, 2, 16, 128), np.float32) for _ in range(2)]
    config = Config(chunk_tokens=64, tiers=["cpu://?capacity=64MiB", url])
    with Cache(config) as cache:
        identity = Identity(model="example", weights="v1")
        mover = Mover(cache, PagedKV(LAYOUT, LAYOUT.whole, kv), identity, spare_blocks=range(48, 64))
        chain = mover.chain(PROMPT)
        with mover.load(mover.match(chain), BLOCKS) as loading:
            loading.all()
        if loading.tokens < len(PROMPT):  # the engine computes what was not stored …
            for layer, memory in enumerate(kv):
                memory[BLOCKS] = layer + 1
        with mover.save(chain, BLOCKS) as saving:  # … and that is stored, for all hosts
            saving.all()
        assert all((memory[BLOCKS] == layer + 1).all() for layer, memory in enumerate(kv))
        print(
            f"{name}: {loading.tokens} tokens came from Redis, {len(PROMPT) - loading.tokens} were computed"
        )


if __name__ == "__main__":
    for name in ("host a", "host b"):
        process = multiprocessing.get_context("spawn").Process(target=host, args=(name, sys.argv[1]))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
