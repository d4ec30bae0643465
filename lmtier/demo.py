"""`lmtier demo`: a small real engine serves a conversation cold, from CPU, and from disk after a restart."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from lmtier.cache import CPU, Cache
from lmtier.config import Config
from lmtier.errors import MisuseError
from lmtier.keys import Identity
from lmtier.layout import Layout
from lmtier.mover import Mover
from lmtier.paging import PagedKV
from lmtier.terminal import Progress, number, say, table

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 6, 512, 8, 4, 64, 4096
BLOCK_TOKENS, CHUNK_TOKENS, BLOCKS = 16, 256, 256
ANSWER_TOKENS = 16
SYSTEM_TOKENS, MESSAGE_TOKENS, TURNS = 1500, 300, 3

LAYOUT = Layout.uniform(
    layers=LAYERS,
    heads=KV_HEADS,
    head_dim=HEAD_DIM,
    dtype="bf16",
    block_tokens=BLOCK_TOKENS,
    chunk_tokens=CHUNK_TOKENS,
    packing="token",
)

IDENTITY = Identity(
    model="lmtier-demo",
    weights="random, seed 0",
    dtype="bf16",
    layers=LAYERS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
)


class Served(NamedTuple):
    """What became of one prompt."""

    answer: list[int]
    kv: bytes
    """The raw KV of the prompt's whole chunks, as the engine has it afterwards."""
    ms: float
    """To the first token."""
    sources: Sequence[str]
    """The tier of each chunk that was loaded."""


class Engine:
    """A transformer with random weights and paged KV: too small to make sense, large enough to take time.

    Prompts are computed a chunk at a time within each layer, so that a token meets the same operations
    whether what stands before it was computed or loaded: results are equal to the bit, not nearly.
    """

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            scaled: Tensor = torch.randn(shape, generator=random) / shape[0] ** 0.5
            return scaled

        self._embed = weight(VOCAB, HIDDEN) * VOCAB**0.5
        self._layers = [
            (
                weight(HIDDEN, HEADS * HEAD_DIM),
                weight(HIDDEN, KV_HEADS * 2 * HEAD_DIM),
                weight(HEADS * HEAD_DIM, HIDDEN),
                weight(HIDDEN, 4 * HIDDEN),
                weight(4 * HIDDEN, HIDDEN),
            )
            for _ in range(LAYERS)
        ]
        self._unembed = weight(HIDDEN, VOCAB)
        self._random = random
        # blocks, heads, tokens, K|V: what LAYOUT says
        memory = torch.zeros(LAYERS, BLOCKS, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM, dtype=torch.bfloat16)
        self.kv = PagedKV(LAYOUT, LAYOUT.whole, list(memory))
        self._memory = memory
        self.spare_blocks = range(BLOCKS - 2 * LAYOUT.blocks, BLOCKS)

    def serve(self, prompt: Sequence[int], mover: Mover | None) -> Served:
        """Answer a prompt. The engine has lost the earlier ones, as if others had needed its memory."""
        self._memory.zero_()
        blocks = torch.randperm(BLOCKS, generator=self._random)[
            : -(-(len(prompt) + ANSWER_TOKENS) // BLOCK_TOKENS)
        ]
        began = perf_counter()
        if mover is None:
            hidden = self._forward(prompt, 0, blocks)
            sources: Sequence[str] = ()
        else:
            # The whole of lmtier in an engine: match, then load and save around each layer.
            chain = mover.chain(prompt)
            match = mover.match(chain)
            sources = list(match.sources)
            ids = blocks.tolist()
            with mover.save(chain, ids) as save:
                with mover.load(match, ids) as load:
                    start = load.tokens
                    x = self._embed[torch.tensor(prompt[start:])]
                    for layer in range(LAYERS):
                        load.layer(layer)
                        x = self._layer(layer, x, start, blocks)
                        save.layer(layer)
                if load.tokens < start:  # an engine computes again from there; nothing of this is kept
                    raise MisuseError(f"what was loaded is not what was saved, from token {load.tokens} on")
            hidden = x
        answer = [self._next(hidden)]
        ms = (perf_counter() - began) * 1e3
        whole = len(prompt) // CHUNK_TOKENS * LAYOUT.blocks
        kv = self.kv.raw_blocks(blocks[:whole].numpy())
        while len(answer) < ANSWER_TOKENS:
            at = len(prompt) + len(answer) - 1
            answer.append(self._next(self._forward(answer[-1:], at, blocks)))
        return Served(answer, kv, ms, sources)

    def _forward(self, tokens: Sequence[int], start: int, blocks: Tensor) -> Tensor:
        x: Tensor = self._embed[torch.tensor(tokens)]
        for layer in range(LAYERS):
            x = self._layer(layer, x, start, blocks)
        return x

    def _layer(self, layer: int, x: Tensor, start: int, blocks: Tensor) -> Tensor:
        """One layer over the tokens at [start, start + len(x)); writes their KV, attends over all before."""
        done = []
        for piece in torch.split(x, CHUNK_TOKENS):  # `start` is whole chunks: always the same pieces
            done.append(self._piece(layer, piece, start, blocks))
            start += len(piece)
        return torch.cat(done)

    def _piece(self, layer: int, x: Tensor, start: int, blocks: Tensor) -> Tensor:
        wq, wkv, wo, up, down = self._layers[layer]
        end = start + len(x)
        normed = layer_norm(x, (HIDDEN,))
        fresh = (normed @ wkv).view(len(x), KV_HEADS, 2 * HEAD_DIM).bfloat16()
        position = torch.arange(start, end)
        memory = self._memory[layer]
        memory[blocks[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS] = fresh
        past = memory[blocks[: -(-end // BLOCK_TOKENS)]].transpose(0, 1).reshape(KV_HEADS, -1, 2 * HEAD_DIM)
        k, v = past[:, :end].float().repeat_interleave(HEADS // KV_HEADS, 0).chunk(2, -1)
        q = (normed @ wq).view(len(x), HEADS, HEAD_DIM).transpose(0, 1)
        seen = torch.arange(end) <= position[:, None]
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + attended.transpose(0, 1).reshape(len(x), -1) @ wo
        out: Tensor = x + gelu(layer_norm(x, (HIDDEN,)) @ up) @ down
        return out

    def _next(self, x: Tensor) -> int:
        return int((layer_norm(x[-1], (HIDDEN,)) @ self._unembed).argmax())


class Lines(logging.Handler):
    """What lmtier logs, as lines above the bar."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.say(f"  {record.getMessage()}")


def run(directory: Path | None, *, keep: bool) -> bool:
    """The whole demo; whether every answer and every byte was the same with and without lmtier."""
    torch.set_num_threads(1)  # a second thread would make the times depend on who else is awake
    with ExitStack() as stack:
        if not keep:
            root = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="lmtier-demo-", dir=directory))
            )
        else:
            root = directory or Path(tempfile.mkdtemp(prefix="lmtier-demo-"))
        say(
            f"A small transformer serves a conversation; before each turn it has forgotten everything.\n"
            f"Its KV goes to CPU memory and, in the background, to {root}.\n"
        )
        progress = stack.enter_context(Progress(2 * (TURNS + 2)))
        lines = Lines(progress)
        logger = logging.getLogger("lmtier")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.INFO)
        logger.addHandler(lines)
        stack.callback(logger.removeHandler, lines)
        rows, same = _conversation(root, progress)
    say()
    say(
        table(
            ("turn", "prompt tokens", "from cpu", "from disk", "computed", "ms", "ms without lmtier", "same"),
            rows,
        )
    )
    say()
    if not same:
        say("NOT the same: an answer or a byte of KV differs from what was computed without lmtier.")
        return False
    say("Same: every answer, and every byte of KV in the engine, is what it is without lmtier.")
    say("\nNext:")
    say("  lmtier bench      what it costs on this machine, beside memcpy and the bare disk")
    say("  lmtier config     what can be set")
    if keep:
        say(f"  lmtier verify {root}    what is on disk now")
        say(f"  lmtier demo --keep --dir {root}    again: this time the first turn comes from disk")
    say("  README.md         the eight lines that put it into your engine")
    return True


def _conversation(root: Path, progress: Progress) -> tuple[list[tuple[object, ...]], bool]:
    engine = Engine()
    config = Config(
        chunk_tokens=CHUNK_TOKENS,
        tiers=["cpu://?capacity=256MiB", f"disk://{root}?capacity=1GiB"],
        load_deadline=10,
        verify="always",
        prefault=False,  # it would take a core during the first turn, of a demo that uses little of the slab
    )
    random = torch.Generator().manual_seed(1)
    history = torch.randint(VOCAB, (SYSTEM_TOKENS,), generator=random).tolist()
    engine.serve(history[: 2 * CHUNK_TOKENS], None)  # the first use of everything is slow, whoever is first
    rows: list[tuple[object, ...]] = []
    same = True

    def turn(name: str, mover: Mover) -> list[int]:
        nonlocal same
        progress.say(f"{name}: {len(history)} tokens")
        served = engine.serve(history, mover)
        progress.step(name)
        plain = engine.serve(history, None)
        progress.step(name)
        equal = served.answer == plain.answer and served.kv == plain.kv
        same = same and equal
        cpu = served.sources.count(CPU) * CHUNK_TOKENS
        below = len(served.sources) * CHUNK_TOKENS - cpu
        computed = len(history) - cpu - below
        times = number(served.ms), number(plain.ms)
        rows.append((name, len(history), cpu, below, computed, *times, "yes" if equal else "NO"))
        return served.answer

    with Cache(config) as cache:
        mover = Mover(cache, engine.kv, IDENTITY, spare_blocks=engine.spare_blocks)
        for n in range(1, TURNS + 1):
            history += torch.randint(VOCAB, (MESSAGE_TOKENS,), generator=random).tolist()
            history += turn(f"turn {n}", mover)
    progress.say("the cache is closed, and opened again on the same directory")
    with Cache(config) as cache:
        mover = Mover(cache, engine.kv, IDENTITY, spare_blocks=engine.spare_blocks)
        history += torch.randint(VOCAB, (MESSAGE_TOKENS,), generator=random).tolist()
        turn(f"turn {TURNS + 1}, after a restart", mover)
        turn(f"turn {TURNS + 1}, once more", mover)
    return rows, same
