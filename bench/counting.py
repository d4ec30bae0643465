"""What counting adds to a lookup: the counters, the miss-ratio curve, and the memory of `lmtier explain`.

    .venv/bin/python bench/counting.py

Each is called with what a real lookup gives it, beside that lookup, in one run: medians of many.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lmtier.cache import CPU, Cache
from lmtier.config import Config, Serving
from lmtier.explain import Explain
from lmtier.layout import Form, form_of
from lmtier.server.client import Client
from lmtier.terminal import number, say, table
from lmtier.testing import opaque_layout
from tests.server.process import Served

ROUNDS = 2000
CHUNKS = (8, 64, 512)


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
        serving = Serving(unix=f"{folder}/socket").unix
        server = Served(Path(folder), config=config, unix=serving)
        try:
            with Cache(Config(**config)) as cache, Client(serving) as client:  # type: ignore[arg-type]
                cache.flush(60)
                for chunks in CHUNKS:
                    keys = [b"keys" + os.urandom(28) for _ in range(chunks)]
                    for store in (cache, client):
                        store.commit(store.reserve(keys, form))
                    rows += measured(cache, client, keys, form)
        finally:
            server.kill()
    say(table(("µs", "lookup", "counters", "share", "curve", "share", "explain", "share"), rows))


def measured(cache: Cache, client: Client, keys: list[bytes], form: Form) -> list[tuple[object, ...]]:
    match = cache.match(keys, form)
    tokens = match.asked_tokens
    hits, missed = {CPU: tokens}, {}

    def count() -> None:
        cache.metrics.settle(tokens, hits, missed)
        cache.metrics.lookup_seconds.observe(1e-5)

    def curve() -> None:
        cache.outlook.saw(keys, tokens / cache.chunk_tokens, form.room, form.at_rest)

    explain = Explain(cache)
    adds = [microseconds(each) for each in (count, curve, lambda: explain._settled(match, missed))]
    cache.release(match)
    cache.settled = None
    found = []
    for name, store in (("in process", cache), ("through a server", client)):
        whole = microseconds(lambda store=store: store.release(store.match(keys, form)))  # type: ignore[misc]
        shares = [word for each in adds for word in (number(each), f"{each / whole:.2%}")]
        found.append((f"{len(keys)} chunks, {name}", number(whole), *shares))
    return found


if __name__ == "__main__":
    main()
