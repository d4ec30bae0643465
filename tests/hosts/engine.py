"""An engine on a host: asks its server for the prompts that it is sent, one a line, and checks every byte.

Another host whose memory may have the prompt can follow in its line. The line `flush` waits until what was
computed is stored.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from lmtier import Client, Identity, Layout, Mover, PagedKV

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS, TOKENS = 2, 2, 64, 16, 1030
PATIENCE = 30.0


def main() -> None:
    with Client(sys.argv[1], name="engine") as client:
        layout = Layout.uniform(
            layers=LAYERS,
            heads=HEADS,
            head_dim=HEAD_DIM,
            dtype="fp32",
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=client.chunk_tokens,
            packing="token",
        )
        blocks = list(range(-(-TOKENS // BLOCK_TOKENS)))
        spares = range(len(blocks), len(blocks) + 2 * client.chunk_tokens // BLOCK_TOKENS)
        kv = [np.zeros((spares.stop, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM), np.float32) for _ in range(LAYERS)]
        mover = Mover(
            client, PagedKV(layout, layout.whole, kv), Identity(model="m", weights="v1"), spare_blocks=spares
        )
        print("ready", flush=True)
        for line in sys.stdin:
            if line == "flush\n":
                print(json.dumps({"flushed": client.flush(PATIENCE)}), flush=True)
            else:
                print(json.dumps(ask(mover, kv, blocks, *line.split())), flush=True)


def ask(
    mover: Mover, kv: list[np.ndarray], blocks: list[int], number: str, source: str = ""
) -> dict[str, object]:
    """What came from where, how long it took to have all of it, and whether a byte of it was wrong."""
    prompt = int(number)
    right = [
        np.random.default_rng((prompt, layer)).random(kv[layer][blocks].shape, np.float32)
        for layer in range(LAYERS)
    ]
    for memory in kv:
        memory[:] = -1
    began = time.monotonic()
    chain = mover.chain([prompt, *range(1000, 999 + TOKENS)])
    match = mover.match(chain, source=source)
    sources = sorted({*match.sources})
    with mover.load(match, blocks) as loading:
        for layer in range(LAYERS):
            loading.layer(layer)
        loaded = loading.tokens
    seconds = time.monotonic() - began
    whole = blocks[: loaded // BLOCK_TOKENS]
    wrong = any(not np.array_equal(kv[layer][whole], right[layer][whole]) for layer in range(LAYERS))
    for layer in range(LAYERS):
        kv[layer][blocks] = right[layer]
    with mover.save(chain, blocks) as saving:
        for layer in range(LAYERS):
            saving.layer(layer)
    return {"loaded": loaded, "sources": sources, "seconds": seconds, "wrong": wrong}


if __name__ == "__main__":
    main()
