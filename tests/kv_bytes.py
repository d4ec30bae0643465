"""Bytes that compress like KV: normals, some channels larger than others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import NoReturn

import numpy as np
import pytest

from lmtier.format import compression
from lmtier.format.layout import DTYPE_BYTES, LayerShape, Layout, Name
from lmtier.format.objects import Header
from lmtier.testing import Sample, pages

PACKINGS = ("token", "planes", "latent", "cpu-vec")


def layout_of(packing: str = "token", dtype: str = "bf16", layers: int = 2) -> Layout:
    """Unequal layers, K and V of different width."""
    shapes = [LayerShape(2, 16, 0 if packing == "latent" else 32), LayerShape(4, 32, 16)]
    if packing == "latent":
        shapes = [shape._replace(v=0) for shape in shapes]
    return Layout(tuple(shapes[i % 2] for i in range(layers)), dtype, 8, 64, packing)


def numbers(payload: memoryview, layout: Layout) -> np.ndarray:
    """The elements of a payload in its own order, as floats."""
    raw = np.frombuffer(payload, f"u{layout.itemsize}")
    if layout.dtype == "bf16":
        return (raw.astype("u4") << 16).view("f4")
    return raw.view({"fp16": "f2", "fp32": "f4"}[layout.dtype]).astype("f4")


def kv_like(nbytes: int, dtype: str = "bf16", seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).normal(size=nbytes // DTYPE_BYTES[dtype]).astype("f4")
    values *= 1 + np.arange(len(values)) % 7
    if dtype == "bf16":
        return (values.view("u4") >> 16).astype("u2").tobytes()
    if dtype in ("fp16", "fp32"):
        return values.astype({"fp16": "f2", "fp32": "f4"}[dtype]).tobytes()
    return (values * 8).astype("i1").tobytes()


def kv_sample(number: int, layout: Layout | None = None, mark: bytes = b"") -> Sample:
    layout = layout or layout_of(layers=4)
    name = Name(b"kv__" + number.to_bytes(28, "big"), layout.whole)
    nbytes = layout.nbytes(layout.whole)
    payload = pages(nbytes)
    payload[:nbytes] = kv_like(nbytes, layout.dtype, number)
    return Sample(Header(name, layout, nbytes, mark), payload)


@contextmanager
def no_library() -> Iterator[None]:
    """As if the package that has the codecs' library were not installed."""

    def distribution(package: str) -> NoReturn:
        raise metadata.PackageNotFoundError(package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "distribution", distribution)
        compression._load.cache_clear()
        try:
            yield
        finally:
            compression._load.cache_clear()
