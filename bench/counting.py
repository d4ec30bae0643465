"""What counting adds to a lookup: the counters, the miss-ratio curve, and the memory of `lmtier explain`.

A lookup waits until it is put down; it is counted when the owner has answered. A lookup is all that an engine
does to learn of a hit: tokens to keys, the question, the leases, their release.

    .venv/bin/python bench/counting.py

Each is called with what a real lookup gives it, beside that lookup, in one run: medians of many.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from lmtier.client.client import Client
from lmtier.config import Config, ServerConfig
from lmtier.core.cache import Cache
from lmtier.core.match import CPU
from lmtier.format.keys import Identity, KeyChain, Tokens, seed
from lmtier.format.layout import ChunkForm, form_of
from lmtier.server.explain import Explain
from lmtier.testing import opaque_layout
from lmtier.tools.terminal import number_text, say, table
from tests.server.process import Served

ROUNDS = 2000
TOKENS = 256  # a chunk
CHUNKS = (8, 64, 512)
SEED = seed(Identity(model="counting", weights="none"), TOKENS)


def microseconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    took = []
    for _ in range(rounds):
        began = perf_counter()
        work()
        took.append(perf_counter() - began)
    return 1e6 * median(took)


def main() -> None:
    layout = opaque_layout(4096)
    form = form_of(layout, (layout.whole,))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = {"tiers": ["cpu://?capacity=64MiB"], "chunk_tokens": layout.chunk_tokens}
        serving = ServerConfig(unix=f"{folder}/socket").unix
        server = Served(Path(folder), config=config, unix=serving)
        try:
            settings = Config(**config)  # type: ignore[arg-type]  # a dict of fields
            with Cache(settings) as cache, Cache(settings) as idle, Client(serving) as client:
                cache.flush(60)
                explain = Explain(idle)
                for chunks in CHUNKS:
                    tokens = np.random.default_rng(chunks).integers(0, 1 << 17, chunks * TOKENS, np.int32)
                    for store in (cache, client):
                        store.commit(store.reserve(chain(tokens), form))
                    rows += measured(cache, client, explain, tokens, form)
        finally:
            server.kill()
    say(table(("µs", "lookup", "of it waiting for counting", "share", "counted afterwards"), rows))


def chain(tokens: Tokens) -> list[bytes]:
    return KeyChain(SEED, TOKENS).extend(tokens).keys


def measured(
    cache: Cache, client: Client, explain: Explain, prompt: Tokens, form: ChunkForm
) -> list[tuple[object, ...]]:
    match = cache.match(chain(prompt), form)
    tokens = match.asked_tokens
    hits, missed = {CPU: tokens}, {}
    metrics, outlook = cache.metrics, cache.outlook

    def put_down() -> None:
        metrics.looked_up(1e-5)
        metrics.settle(tokens, hits, missed)
        outlook.asked(match.keys, tokens, form)
        explain.settled(match, missed)

    def count() -> None:
        put_down()
        metrics.count()
        outlook.stepped()

    waits, all_of_it = microseconds(put_down), microseconds(count)
    cache.release(match)
    after = number_text(all_of_it - waits)
    found = []
    for name, store in (("in process", cache), ("through a server", client)):

        def look_up(store: Cache | Client = store) -> None:
            store.release(store.match(chain(prompt), form))

        whole = microseconds(look_up)
        what = f"{len(match.keys)} chunks, {name}"
        found.append((what, number_text(whole), number_text(waits), f"{waits / whole:.2%}", after))
    return found


if __name__ == "__main__":
    main()
