"""Engines of a host share one server: each run of this file is an engine that asks one prompt and ends.

    lmtier serve --unix "$HOME/lmtier.sock" --tier 'cpu://?capacity=64MiB' &
    python examples/shared_server.py "$HOME/lmtier.sock" --name a                   # computes, and stores
    python examples/shared_server.py "$HOME/lmtier.sock" --name b                   # loads what a stored
    python examples/shared_server.py "$HOME/lmtier.sock" --name b --first-token 7   # another prompt: a miss
    python examples/shared_server.py "$HOME/lmtier.sock" --name b --salt team-b     # another salt: a miss

With --tell it sends its tokens to the server too: `lmtier explain` then shows where prompts differ.
"""

import argparse

import numpy as np

from lmtier import Client, Identity, Layout, Mover, Origin, PagedKV

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS = 2, 2, 64, 16


def main() -> None:
    options = argparse.ArgumentParser(description="An engine that shares a server.")
    options.add_argument("server", help="the path of the server's socket")
    options.add_argument("--name", default="engine")
    options.add_argument("--tokens", type=int, default=1030, help="length of the prompt")
    options.add_argument("--first-token", type=int, default=1, help="what the prompt starts with")
    options.add_argument("--salt", default="")
    options.add_argument("--source", default="", help="another server whose memory may have the prompt")
    options.add_argument("--tell", action="store_true")
    asked = options.parse_args()

    prompt = [asked.first_token, *range(1000, 999 + asked.tokens)]
    blocks = list(range(-(-asked.tokens // BLOCK_TOKENS)))  # where the engine keeps this request
    spare = len(blocks)  # the blocks after them are free
    with Client(asked.server, name=asked.name) as client:
        chunk = client.chunk_tokens  # the server decides this
        layout = Layout.uniform(
            layers=LAYERS,
            heads=HEADS,
            head_dim=HEAD_DIM,
            dtype="fp32",
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=chunk,
            packing="token",
        )
        spares = range(spare, spare + 2 * chunk // BLOCK_TOKENS)
        kv = [np.zeros((spares.stop, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM), np.float32) for _ in range(LAYERS)]
        identity = Identity(model="example", weights="v1")
        mover = Mover(client, PagedKV(layout, layout.whole, kv), identity, spare_blocks=spares)
        chain = mover.chain(prompt, salt=asked.salt)
        if asked.tell:
            origin = Origin.of({"model": "example", "weights": "v1"}, "", asked.salt)
            client.send_tokens(chain.keys, prompt, origin)
        match = mover.match(chain, source=asked.source)
        with mover.save(chain, blocks) as saving, mover.load(match, blocks) as loading:
            for layer in range(LAYERS):
                loading.layer(layer)
                missing = blocks[loading.tokens // BLOCK_TOKENS :]
                kv[layer][missing] = layer + 1  # what was not stored is computed
                saving.layer(layer)
        assert all((memory[blocks] == layer + 1).all() for layer, memory in enumerate(kv))
        source = f" from {', '.join(dict.fromkeys(match.sources))}" if match.sources else ""
        print(
            f"{asked.name}: {loading.tokens} tokens loaded{source}, {asked.tokens - loading.tokens} computed"
        )


if __name__ == "__main__":
    main()
