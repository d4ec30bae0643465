"""lmtier inside an engine of your own: save a prompt's KV, find it again in another process.

    python examples/library.py DIRECTORY        # twice: the second run loads what the first one stored

The engine here is an array per layer, as vLLM's are: [blocks, heads, tokens of a block, K|V].
"""

import sys

import numpy as np

from lmtier import Cache, Config, Identity, Layout, Mover, PagedKV

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS, CHUNK_TOKENS, BLOCKS = 4, 2, 64, 16, 64, 64


def compute(tokens: list[int], layer: int) -> np.ndarray:
    """What a model would compute: here just something that depends on the tokens and on the layer."""
    random = np.random.default_rng([layer, *tokens])
    return random.standard_normal((len(tokens), HEADS, 2 * HEAD_DIM), np.float32)


def main(directory: str) -> None:
    layout = Layout.uniform(
        layers=LAYERS,
        heads=HEADS,
        head_dim=HEAD_DIM,
        dtype="fp32",
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        packing="token",
    )
    kv = [np.zeros((BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM), np.float32) for _ in range(LAYERS)]
    tiers = ["cpu://?capacity=64MiB", f"disk://{directory}?capacity=1GiB"]
    prompt = list(range(1000, 1000 + 3 * CHUNK_TOKENS))
    blocks = [7, 3, 11, 2, 19, 5, 23, 13, 1, 17, 29, 31]  # where the engine keeps this request

    with Cache(Config(chunk_tokens=CHUNK_TOKENS, tiers=tiers)) as cache:
        identity = Identity(model="example", weights="v1")
        mover = Mover(cache, PagedKV(layout, layout.whole, kv), identity, spare_blocks=range(48, 64))
        chain = mover.chain(prompt)  # the names of its chunks
        match = mover.match(chain)  # the longest stored prefix, and which tier has it
        print(
            f"found {match.chunks} of {len(chain.keys)} chunks, in: {', '.join(match.sources) or 'no tier'}"
        )
        with mover.save(chain, blocks) as saving, mover.load(match, blocks) as loading:
            for layer in range(LAYERS):
                loading.layer(layer)  # in place just before this layer's attention
                for at in range(loading.tokens, len(prompt)):  # what was not stored is computed
                    block = kv[layer][blocks[at // BLOCK_TOKENS]]
                    block[:, at % BLOCK_TOKENS] = compute(prompt[: at + 1], layer)[-1]
                saving.layer(layer)  # only what is new

    for layer in range(LAYERS):
        wanted = np.stack([compute(prompt[: at + 1], layer)[-1] for at in range(len(prompt))])
        held = kv[layer][blocks].transpose(0, 2, 1, 3).reshape(wanted.shape)
        assert np.array_equal(held, wanted)
    print("every byte is what the model computes")


if __name__ == "__main__":
    main(sys.argv[1])
