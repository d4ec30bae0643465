"""Names of what `lmtier bench --gpu` measures, for those who have no GPU and no torch."""

from __future__ import annotations

from collections.abc import Iterator

MODELS = {"8B": (32, 8), "70B, TP 8": (80, 1)}
"""Layers, and heads of 128 on each rank."""
TOKENS = {"2k": 2048, "8k": 8192}
ORDERS = ("", ", layers apart")
"""Of blocks: all layers of one lie together, as lmtier asks of vLLM; or all blocks of a layer."""

BY_LAYER = " layer by layer"
"""Compared with the same transfer of a whole step."""
BUS = 55e9
"""Bytes a second that PCIe 5 x16 moves each way."""


def stub_costs(mode: str = "") -> Iterator[str]:
    """`mode`: "" for transfers of whole steps, or BY_LAYER."""
    for way in ("save", "load"):
        for model in MODELS:
            for tokens in TOKENS:
                for order in ORDERS:
                    yield f"enqueue a GPU's {way}{mode}, {model}, {tokens}{order}"


def rates() -> Iterator[str]:
    for what in ("to the slab", "from the slab", "both ways at once"):
        for model in MODELS:
            for tokens in TOKENS:
                for order in ORDERS:
                    yield f"gpu: {what}, {model}, {tokens}{order}"


def costs() -> Iterator[str]:
    for what in ("enqueue a save", "enqueue a load"):
        for model in MODELS:
            for tokens in TOKENS:
                for order in ORDERS:
                    yield f"gpu: {what}, {model}, {tokens}{order}"
