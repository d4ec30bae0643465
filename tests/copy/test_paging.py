"""Gather, scatter, convert and the witness, against `Layout.address`, element by element."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.copy import paging, plans
from lmtier.copy.blocks import ABSENT
from lmtier.copy.copy_threads import CopyThreads
from lmtier.copy.paging import PagedKV
from lmtier.errors import LayoutError
from lmtier.format.layout import KNOWN_PACKINGS, LayerShape, Layout, Shard, cover

TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
ARRANGEMENTS = {  # the axes of one layer's tensor, outermost first
    "HND": "BHNC",
    "NHD": "BNHC",
    "heads outside": "HBNC",
    "padded blocks": "BHNC+B",
    "padded tokens": "BHNC+N",
    "C scattered": "BHNC+C",
    "C before N": "BHCN",
}
BLOCKS = 11


@dataclass
class Engine:
    """Tensors as an engine would declare them, and the same memory as numpy bits for the reference."""

    layout: Layout
    shard: Shard
    tensors: list[Any]
    bits: list[tuple[np.ndarray, ...]]
    memory: list[np.ndarray]

    def paged(self, crew: CopyThreads | None = None) -> PagedKV:
        return PagedKV(self.layout, self.shard, self.tensors, crew)

    def snapshot(self) -> list[bytes]:
        return [block.tobytes() for block in self.memory]

    def element(self, layer: int, head: int, block: int, slot: int, plane: int, e: int) -> tuple[Any, ...]:
        """The array and index at which the engine keeps one element."""
        held = self.bits[layer - self.shard.first_layer]
        shape, n = self.layout.layers[layer], self.layout.block_tokens
        if len(held) == 2:
            return held[plane], (block, head, slot, e)
        width = shape.k + shape.v
        match self.layout.packing:
            case "planes":
                at = n * shape.k + slot * shape.v + e if plane else slot * shape.k + e
            case "cpu-vec":
                at = n * shape.k + slot * shape.v + e if plane else e * n + slot
            case _:
                at = slot * width + plane * shape.k + e
        return held[0], (block, head, *divmod(at, width))


def engine(
    layout: Layout,
    shard: Shard | None = None,
    *,
    arrangement: str = "HND",
    storage: str = "stacked",
    two: bool = False,
    gap: int = 0,
    seed: int = 0,
    blocks: int = BLOCKS,
) -> Engine:
    """Random KV memory: `stacked` puts all tensors in one storage, `gap` elements apart."""
    shard = shard or layout.whole
    rng = np.random.default_rng(seed)
    axes, _, pad = ARRANGEMENTS[arrangement].partition("+")
    made: list[list[np.ndarray]] = []
    sizes, cuts = [], []
    for layer in range(shard.first_layer, shard.end_layer):
        shape = layout.layers[layer]
        heads, n = layout.heads(layer, shard), layout.block_tokens
        if layout.is_opaque:
            widths, n = [shape.k // layout.itemsize], 1
        else:
            widths = [shape.k, shape.v] if two else [shape.k + shape.v]
        for width in widths:
            size = {"B": blocks, "H": heads, "N": n, "C": width}
            room = {**size, **({pad: size[pad] * 2} if pad else {})}
            sizes.append(math.prod(room.values()) + gap)
            cuts.append((layer, [room[a] for a in axes], [size[a] for a in axes]))
    item = layout.itemsize
    if storage == "stacked":
        memory = [rng.integers(0, 256, sum(sizes) * item, np.uint8).view(f"u{item}")]
        flats = np.split(memory[0], np.cumsum(sizes)[:-1])
    else:
        flats = memory = [rng.integers(0, 256, size * item, np.uint8).view(f"u{item}") for size in sizes]
    for flat, (layer, spread, used) in zip(flats, cuts, strict=True):
        # Every second slot of a padded axis is used, so that a stride is taken for what it is.
        steps = tuple(slice(None, None, r // u) for r, u in zip(spread, used, strict=True))
        view = flat[: math.prod(spread)].reshape(spread)[steps].transpose([axes.index(a) for a in "BHNC"])
        if layer - shard.first_layer == len(made):
            made.append([])
        made[-1].append(view)
    bits = [tuple(views) for views in made]
    return Engine(layout, shard, [as_given(views, memory, layout) for views in made], bits, memory)


def as_given(views: list[np.ndarray], memory: list[np.ndarray], layout: Layout) -> Any:
    """The same views as tensors: views of one array become views of one torch storage."""
    item = layout.itemsize
    signed = {1: np.uint8, 2: np.int16, 4: np.int32}[item]
    tensors = []
    for view in views:
        (whole,) = (one for one in memory if np.may_share_memory(one, view))
        base = torch.from_numpy(whole.view(signed)).view(TORCH[layout.dtype])
        strides = [stride // item for stride in view.strides]
        offset = (view.ctypes.data - whole.ctypes.data) // item
        tensors.append(base.as_strided(view.shape, strides, offset))
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def slow_elements(layout: Layout, part: Shard, layer: int | None) -> Any:
    for number in range(part.first_layer, part.end_layer):
        if layer not in (None, number):
            continue
        heads, k, v = layout.layers[number]
        unit = heads // layout.head_units
        for head in range(part.first_head * unit, part.end_head * unit):
            for token, (plane, width) in product(range(layout.chunk_tokens), ((0, k), (1, v))):
                for e in range(width):
                    yield number, head, token, plane, e


def slow_load(
    to: Engine,
    payload: np.ndarray,
    ids: list[int],
    *,
    stored: Layout | None = None,
    held: Shard | None = None,
    layer: int | None = None,
    first_block: int = 0,
) -> None:
    """Scatter and convert by the definition."""
    stored, held = stored or to.layout, held or to.shard
    part = held.overlap(to.shard)
    assert part is not None
    item = to.layout.itemsize
    for number, head, token, plane, e in slow_elements(to.layout, part, layer):
        block, slot = divmod(token, to.layout.block_tokens)
        if block < first_block:
            continue
        at = stored.address(held, layer=number, head=head, token=token, plane=plane, element=e)
        mine = head - to.shard.first_head * (to.layout.layers[number].heads // to.layout.head_units)
        array, index = to.element(number, mine, ids[block], slot, plane, e)
        array[index] = payload[at : at + item].view(f"u{item}")[0]


def slow_save(of: Engine, ids: list[int], layer: int | None = None) -> np.ndarray:
    """Gather by the definition."""
    payload = np.zeros(of.layout.nbytes(of.shard), np.uint8)
    item = of.layout.itemsize
    for number, head, token, plane, e in slow_elements(of.layout, of.shard, layer):
        block, slot = divmod(token, of.layout.block_tokens)
        at = of.layout.address(of.shard, layer=number, head=head, token=token, plane=plane, element=e)
        mine = head - of.shard.first_head * (of.layout.layers[number].heads // of.layout.head_units)
        array, index = of.element(number, mine, ids[block], slot, plane, e)
        payload[at : at + item].view(f"u{item}")[0] = array[index]
    return payload


def noise(nbytes: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def chunk_ids(layout: Layout, seed: int = 3, blocks: int = BLOCKS) -> list[int]:
    return [int(block) for block in np.random.default_rng(seed).permutation(blocks)[: layout.blocks]]


UNEVEN = (LayerShape(2, 3, 5), LayerShape(4, 4, 4), LayerShape(4, 4, 4))
EVEN = (LayerShape(2, 8, 8),) * 3


def make_layout(
    packing: str = "token",
    shapes: tuple[LayerShape, ...] = EVEN,
    *,
    dtype: str = "bf16",
    n: int = 2,
    chunk: int = 8,
) -> Layout:
    if packing == "latent":
        shapes = tuple(LayerShape(s.heads, s.k, 0) for s in shapes)
    return Layout(shapes, dtype, n, chunk, packing)


@st.composite
def engines(draw: st.DrawFn) -> tuple[Layout, Shard, dict[str, Any]]:
    packing = draw(st.sampled_from(KNOWN_PACKINGS))
    two = packing in ("token", "planes") and draw(st.booleans())
    unit = draw(st.integers(1, 2))
    shape = st.builds(
        LayerShape,
        st.integers(1, 2).map(lambda times: times * unit),
        st.sampled_from([1, 2, 3, 16, 32]),
        st.just(0) if packing == "latent" else st.sampled_from([1, 2, 3, 16, 32]),
    )
    shapes = draw(st.lists(shape, min_size=1, max_size=3))
    if packing != "latent" and draw(st.booleans()):
        shapes = [LayerShape(heads, k, k) for heads, k, _ in shapes]
    if draw(st.booleans()):
        shapes = shapes[:1] * len(shapes)
    layout = Layout(tuple(shapes), draw(st.sampled_from(list(TORCH))), draw(st.integers(1, 3)), 6, packing)
    first = draw(st.integers(0, len(shapes) - 1))
    low = draw(st.integers(0, layout.head_units - 1))
    shard = Shard(
        first,
        draw(st.integers(first + 1, len(shapes))),
        low,
        draw(st.integers(low + 1, layout.head_units)),
    )
    how = {
        "arrangement": draw(st.sampled_from(list(ARRANGEMENTS))),
        "storage": draw(st.sampled_from(["stacked", "apart"])),
        "two": two,
        "gap": draw(st.integers(0, 5)),
        "seed": draw(st.integers(0, 5)),
    }
    return layout, shard, how


@pytest.fixture(params=[1, plans._SMALLEST_ROW, 1 << 30], ids=["rows", "default", "strided"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every way through the memory has to give the same bytes."""
    monkeypatch.setattr(plans, "_SMALLEST_ROW", request.param)
    return int(request.param)


@settings(deadline=None, max_examples=300)
@given(made=engines(), smallest=st.sampled_from([1, 64, 1 << 30]), data=st.data())
def test_any_engine_memory_moves_as_the_definition_says(made, smallest, data):
    layout, shard, how = made
    before, plans._SMALLEST_ROW = plans._SMALLEST_ROW, smallest
    try:
        ours, reference = engine(layout, shard, **how), engine(layout, shard, **how)
        kv = ours.paged()
    finally:
        plans._SMALLEST_ROW = before
    ids = data.draw(st.permutations(range(BLOCKS)))[: layout.blocks]
    layer = data.draw(st.sampled_from([None, *range(shard.first_layer, shard.end_layer)]))
    got = np.zeros(layout.nbytes(shard), np.uint8)
    kv.gather(layer, ids, got)
    assert got.tobytes() == slow_save(reference, ids, layer).tobytes()
    assert ours.snapshot() == reference.snapshot(), "gather wrote to the engine"

    first_block = data.draw(st.integers(0, layout.blocks))
    payload = noise(layout.nbytes(shard))
    kv.scatter(layer, payload.data, ids, first_block)
    slow_load(reference, payload, ids, layer=layer, first_block=first_block)
    assert ours.snapshot() == reference.snapshot()


MANY = 40


@st.composite
def free_lists(draw: st.DrawFn) -> list[int]:
    """Block ids as requests that came and went leave them: runs, upwards and downwards."""
    edges = [0, *sorted(draw(st.sets(st.integers(1, MANY - 1), max_size=5))), MANY]
    runs = draw(st.permutations([list(range(a, b)) for a, b in pairwise(edges)]))
    turned = draw(st.lists(st.booleans(), min_size=len(runs), max_size=len(runs)))
    return [block for run, back in zip(runs, turned, strict=True) for block in (run[::-1] if back else run)]


@settings(deadline=None, max_examples=300)
@given(
    made=engines(), smallest=st.sampled_from([1, 64, 1 << 30]), short=st.sampled_from([1, 4]), data=st.data()
)
def test_many_chunks_move_at_once_as_they_move_alone(made, smallest, short, data):
    layout, shard, how = made
    before = plans._SMALLEST_ROW, plans._SHORT_RUN
    plans._SMALLEST_ROW, plans._SHORT_RUN = smallest, short
    try:
        _many_chunks_at_once(layout, shard, how, data)
    finally:
        plans._SMALLEST_ROW, plans._SHORT_RUN = before


def _many_chunks_at_once(layout: Layout, shard: Shard, how: dict[str, Any], data: st.DataObject) -> None:
    ours, one_by_one = (engine(layout, shard, **how, blocks=MANY) for _ in range(2))
    kv, each = ours.paged(), one_by_one.paged()
    chunks = data.draw(st.integers(1, 6))
    row = data.draw(st.one_of(free_lists(), st.permutations(range(MANY))))[: chunks * layout.blocks]
    blocks = kv.check(row)
    gaps = data.draw(st.one_of(st.just([8] * chunks), st.lists(st.sampled_from([0, 8]), min_size=chunks)))
    offsets = [sum(gaps[:n]) + n * kv.nbytes for n in range(chunks)]
    if data.draw(st.booleans()):
        offsets.reverse()
    slab, wanted = (np.zeros(sum(gaps) + chunks * kv.nbytes, np.uint8) for _ in range(2))
    layer = data.draw(st.sampled_from([None, *range(shard.first_layer, shard.end_layer)]))

    def view(offset: int, nbytes: int) -> memoryview:
        return slab.data[offset : offset + nbytes]

    kv.bind_all(blocks, offsets, view).gather(layer)
    for ids, at in zip(blocks[0], offsets, strict=True):
        each.gather(layer, ids, wanted[at : at + kv.nbytes])
    assert slab.tobytes() == wanted.tobytes()

    slab[:] = noise(len(slab))
    first_block = data.draw(st.integers(0, layout.blocks))
    missing = blocks.copy()
    missing[:, 0, :first_block] = ABSENT
    kv.bind_all(missing, offsets, view).scatter(layer)
    for number, (ids, at) in enumerate(zip(blocks[0], offsets, strict=True)):
        each.scatter(layer, view(at, kv.nbytes), ids, 0 if number else first_block)
    assert ours.snapshot() == one_by_one.snapshot()


def test_evenly_spaced_chunks_of_a_prompt_are_one_piece():
    kv = engine(make_layout(), storage="apart", blocks=40).paged()
    slab = np.zeros(20 * kv.nbytes, np.uint8)
    ids = kv.check(list(range(40)))

    def bound(*numbers: int) -> Any:
        offsets = [2 * number * kv.nbytes for number in numbers]
        return kv.bind_all(ids[:, numbers], offsets, lambda at, nbytes: slab[at : at + nbytes])

    all_of_them, some = bound(*range(10)), bound(*range(4), 5, 8, 9)
    assert [len(batch._plans[0]) for batch in (all_of_them, some)] == [1, 3]
    all_of_them.gather(None)
    assert all(slab[2 * number * kv.nbytes :][: kv.nbytes].any() for number in range(10))


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("storage", ["stacked", "apart"])
@pytest.mark.parametrize(("packing", "two"), [("token", False), ("token", True), ("planes", True)])
def test_what_was_saved_comes_back_in_other_blocks(way, dtype, arrangement, storage, packing, two):
    layout = make_layout(packing, UNEVEN, dtype=dtype)
    ours = engine(layout, arrangement=arrangement, storage=storage, two=two)
    kv = ours.paged()
    saved, again = bytearray(kv.nbytes), bytearray(kv.nbytes)
    kv.gather(None, [0, 5, 2, 9], saved)
    kv.scatter(None, saved, [7, 1, 3, 10])
    kv.gather(None, [7, 1, 3, 10], again)
    assert again == saved
    assert kv.raw_blocks([7, 1, 3, 10]) == kv.raw_blocks([0, 5, 2, 9])


@pytest.mark.parametrize("made", ["LBHNC", "BLHNC", "LBNHC", "BLNHC", "L2BHNC"])
def test_layers_of_one_storage_move_in_one_call(made):
    layout = make_layout("planes" if "2" in made else "token", (LayerShape(2, 32, 32),) * 3, n=16, chunk=32)
    size = {"L": 3, "B": BLOCKS, "H": 2, "N": 16, "C": 32 if "2" in made else 64, "2": 2}
    dims = [size[axis] for axis in made]
    whole = torch.from_numpy(noise(math.prod(dims) * 2).view(np.int16)).reshape(dims)
    wanted = "L2BHNC" if "2" in made else "LBHNC"
    tensors = whole.view(torch.bfloat16).permute([made.index(a) for a in wanted])
    kv = PagedKV(layout, layout.whole, [tuple(t) if "2" in made else t for t in tensors])
    assert repr(kv).count("layer") == 1
    assert "layers 0-3 in rows of" in repr(kv)
    payload, other = noise(kv.nbytes), bytearray(kv.nbytes)
    kv.scatter(None, payload, [4, 2])
    kv.gather(None, [4, 2], other)
    assert other == payload.tobytes()
    for layer, tensor in enumerate(tensors):
        planes = layout.planes(payload, layout.whole, layer)
        ours = tensor.unbind() if "2" in made else tensor.split(32, dim=-1)
        for plane, kept in zip(planes, ours, strict=True):
            assert (plane.view(np.int16) == kept[[4, 2]].view(torch.int16).numpy()).all()


@pytest.mark.parametrize("packing", ["token", "planes"])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_k_and_v_of_one_storage_alternate_as_packed(way, packing, gap):
    layout = make_layout(packing)
    ours, reference = (engine(layout, two=True, gap=gap) for _ in range(2))
    payload, ids = noise(layout.nbytes(layout.whole)), chunk_ids(layout)
    ours.paged().scatter(None, payload, ids)
    slow_load(reference, payload, ids)
    assert ours.snapshot() == reference.snapshot()


def test_layers_that_lie_apart_move_in_a_call_each():
    layout = make_layout(n=4)
    assert repr(engine(layout).paged()).count("rows of") == 1
    assert "layer 0 strided" in repr(engine(make_layout("planes"), two=True, storage="apart").paged())
    assert repr(engine(layout, storage="apart").paged()).count("rows of") == 3


@pytest.mark.parametrize("packing", KNOWN_PACKINGS)
def test_layer_by_layer_and_whole_are_the_same_bytes(way, packing):
    layout = make_layout(packing, UNEVEN)
    kv, ids = engine(layout).paged(), [8, 2, 0, 10]
    whole, layerwise = bytearray(kv.nbytes), bytearray(kv.nbytes)
    kv.gather(None, ids, whole)
    for layer in reversed(range(3)):
        kv.gather(layer, ids, layerwise)
    assert layerwise == whole
    for layer in (1, 0, 2):
        kv.scatter(layer, whole, [1, 3, 5, 7])
    assert kv.raw_blocks([1, 3, 5, 7]) == kv.raw_blocks(ids)


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_a_crew_moves_the_same_bytes(monkeypatch, helpers):
    monkeypatch.setattr(paging, "_SHARED_BYTES", 0)
    crew = CopyThreads(helpers)
    try:
        layout = make_layout("token", UNEVEN)
        alone, shared = engine(layout).paged(), engine(layout).paged(crew)
        one, two = bytearray(alone.nbytes), bytearray(alone.nbytes)
        alone.gather(None, [3, 1, 4, 5], one)
        shared.gather(None, [3, 1, 4, 5], two)
        assert one == two
        shared.scatter(None, one, [9, 2, 6, 8], first_block=1)
        alone.scatter(None, one, [9, 2, 6, 8], first_block=1)
        assert alone.raw_blocks(range(BLOCKS)) == shared.raw_blocks(range(BLOCKS))
    finally:
        crew.close()


def test_who_of_a_crew_comes_late_is_not_waited_for():
    crew = CopyThreads(2)
    held, entered = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        entered.release()
        assert held.wait(20)

    try:
        busy = threading.Thread(target=crew.run, args=([hold] * 3,))
        busy.start()
        for _ in range(3):
            assert entered.acquire(timeout=20)
        done: list[int] = []
        crew.run([partial(done.append, number) for number in range(9)])  # all helpers hold something else
        assert done == list(range(9))
        held.set()
        busy.join(20)
        assert not busy.is_alive()
    finally:
        held.set()
        crew.close()


@pytest.mark.parametrize("helpers", [0, 2])
def test_a_copy_thread_that_fails_raises_after_the_others(helpers):
    crew = CopyThreads(helpers)
    copying, ended = threading.Event(), []

    def fail() -> None:
        if helpers:
            assert copying.wait(20)
        raise OSError("it failed")

    def copy() -> None:
        copying.set()
        time.sleep(0.05)  # a run that did not wait for this would have raised by now
        ended.append(1)

    try:
        with pytest.raises(OSError, match="it failed"):
            crew.run([fail, copy])
        assert len(ended) == (1 if helpers else 0)
    finally:
        crew.close()


def test_a_crew_runs_where_it_is_told():
    core = min(os.sched_getaffinity(0))
    crew = CopyThreads(1, [core])
    both, seen = threading.Barrier(2), []

    def look() -> None:
        seen.append(os.sched_getaffinity(0))
        both.wait(20)

    try:
        crew.run([look, look])
        assert {core} in seen
    finally:
        crew.close()


def test_a_payload_may_lie_in_a_longer_extent():
    kv = engine(make_layout()).paged()
    extent = bytearray(kv.nbytes + 100)
    kv.gather(None, [0, 1, 2, 3], extent)
    assert extent[kv.nbytes :] == bytes(100)
    with pytest.raises(LayoutError, match=f"takes {kv.nbytes} bytes, the buffer has {kv.nbytes - 1}"):
        kv.gather(None, [0, 1, 2, 3], memoryview(extent)[: kv.nbytes - 1])


def test_a_read_only_buffer_cannot_be_gathered_into():
    for storage in ("stacked", "apart"):
        kv = engine(make_layout("planes"), two=True, storage=storage).paged()
        untouched = bytes(kv.nbytes)
        with pytest.raises(ValueError, match=r"read-only|not writeable|WRITEBACK|writeable"):
            kv.gather(None, [0, 1, 2, 3], untouched)
        assert untouched == bytes(kv.nbytes)


# ---- opaque memory


@pytest.mark.parametrize("shape", [(BLOCKS, 2, 24), (BLOCKS, 2, 3, 4)])
def test_opaque_blocks_come_back_byte_for_byte(way, shape):
    layout = Layout((LayerShape(2, 24, 0),) * 2, "bf16", 16, 32, "amx.int")
    dtype, kind = (np.uint8, torch.uint8) if len(shape) == 3 else (np.int16, torch.bfloat16)
    memory = noise(2 * BLOCKS * 48).view(dtype).reshape(2, *shape)
    kv = PagedKV(layout, layout.whole, list(torch.from_numpy(memory).view(kind)))
    payload = bytearray(kv.nbytes)
    kv.gather(None, [8, 3], payload)
    assert payload == memory[:, [8, 3]].tobytes()
    kv.scatter(None, payload, [1, 0])
    assert memory[:, [1, 0]].tobytes() == bytes(payload)


def test_opaque_memory_may_be_sliced_but_never_reread():
    layout = Layout((LayerShape(4, 8, 0),) * 2, "u8", 16, 32, "amx.int")
    memory = noise(2 * BLOCKS * 2 * 8).reshape(2, BLOCKS, 2, 8)
    half = layout.shard(rank=1, ranks=2)
    kv = PagedKV(layout, half, list(memory))
    stored = noise(layout.nbytes(layout.whole), 2)
    kv.convert(None, stored, layout, layout.whole, [5, 4])
    assert (memory[:, [5, 4]] == stored.reshape(2, 2, 4, 8)[:, :, 2:]).all()
    with pytest.raises(LayoutError, match="cannot be read"):
        kv.convert(None, stored, replace(layout, block_tokens=32), layout.whole, [5, 4])


# ---- conversion

CONVERTIBLE = [
    (packing, two) for packing in KNOWN_PACKINGS[:2] for two in (False, True)
] + [("cpu-vec", False)]  # fmt: skip


@pytest.mark.parametrize(("packing", "two"), CONVERTIBLE)
@pytest.mark.parametrize("stored_packing", ["token", "planes", "cpu-vec"])
@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 4), (4, 2), (4, 6), (6, 4), (12, 1), (3, 12)])
def test_every_packing_and_block_size_reads_every_other(packing, two, stored_packing, n, m):
    layout = make_layout(packing, UNEVEN[:2], n=n, chunk=12)
    stored = make_layout(stored_packing, UNEVEN[:2], n=m, chunk=12)
    for layer, first_block in ((None, 0), (1, 0), (None, 1)):
        ours, reference = (engine(layout, two=two, arrangement="HND", blocks=14) for _ in range(2))
        payload = noise(stored.nbytes(stored.whole))
        ids = chunk_ids(layout, blocks=14)
        ours.paged().convert(layer, payload, stored, stored.whole, ids, first_block=first_block)
        slow_load(
            reference, payload, ids, stored=stored, held=stored.whole, layer=layer, first_block=first_block
        )
        assert ours.snapshot() == reference.snapshot()


@pytest.mark.parametrize("arrangement", ["NHD", "heads outside", "padded tokens", "C scattered"])
def test_conversion_follows_the_strides(arrangement):
    layout, stored = make_layout("token", UNEVEN), make_layout("planes", UNEVEN, n=4)
    ours, reference = (engine(layout, arrangement=arrangement) for _ in range(2))
    payload, ids = noise(stored.nbytes(stored.whole)), chunk_ids(layout)
    ours.paged().convert(None, payload, stored, stored.whole, ids)
    slow_load(reference, payload, ids, stored=stored, held=stored.whole)
    assert ours.snapshot() == reference.snapshot()


@pytest.mark.parametrize("packing", ["planes", "cpu-vec"])
@pytest.mark.parametrize("arrangement", ["heads outside", "padded blocks"])
def test_conversion_writes_through_where_heads_lie_apart(packing, arrangement):
    layout, stored = make_layout(packing, UNEVEN), make_layout("token", UNEVEN, n=4)
    ours, reference = (engine(layout, arrangement=arrangement) for _ in range(2))
    payload, ids = noise(stored.nbytes(stored.whole)), chunk_ids(layout)
    ours.paged().convert(None, payload, stored, stored.whole, ids)
    slow_load(reference, payload, ids, stored=stored, held=stored.whole)
    assert ours.snapshot() == reference.snapshot()


@pytest.mark.parametrize("arrangement", ["NHD", "padded tokens"])
def test_conversion_refuses_a_packed_head_in_pieces(arrangement):
    layout, stored = make_layout("planes"), make_layout("token")
    kv = engine(layout, arrangement=arrangement).paged()
    with pytest.raises(LayoutError, match="layer 0: packing 'planes' needs each head's block in one piece"):
        kv.convert(None, noise(kv.nbytes), stored, stored.whole, [0, 1, 2, 3])


def test_latent_blocks_change_size():
    layout, stored = make_layout("latent", n=2), make_layout("latent", n=8)
    ours, reference = engine(layout), engine(layout)
    payload, ids = noise(stored.nbytes(stored.whole)), chunk_ids(layout)
    ours.paged().convert(None, payload, stored, stored.whole, ids)
    slow_load(reference, payload, ids, stored=stored, held=stored.whole)
    assert ours.snapshot() == reference.snapshot()


@pytest.mark.parametrize("stored_packing", ["token", "planes"])
@pytest.mark.parametrize(("ranks", "stored_ranks"), [(1, 2), (2, 1), (4, 2), (2, 4), (1, 1), (4, 4), (8, 4)])
@pytest.mark.parametrize("cut", [None, 1, 2])
def test_any_parallelism_reads_any_other(stored_packing, ranks, stored_ranks, cut):
    shapes = (LayerShape(4, 4, 4), LayerShape(8, 2, 2), LayerShape(4, 4, 4))
    layout, stored = make_layout("token", shapes, n=4), make_layout(stored_packing, shapes, n=4)
    stages = [(0, 3)] if cut is None else [(0, cut), (cut, 3)]
    have = [
        stored.shard(rank=rank, ranks=stored_ranks, layers=stage)
        for rank in range(stored_ranks)
        for stage in stages
    ]
    objects = {shard: noise(stored.nbytes(shard), seed) for seed, shard in enumerate(have)}
    for rank in range(ranks):
        shard = layout.shard(rank=rank, ranks=ranks)
        ours, reference = engine(layout, shard), engine(layout, shard)
        plan = cover(shard, have)
        assert plan is not None
        for held, part in plan:
            ids, first_block = chunk_ids(layout), rank % 2
            ours.paged().convert(None, objects[held], stored, held, ids, part=part, first_block=first_block)
            slow_load(reference, objects[held], ids, stored=stored, held=held, first_block=first_block)
        assert ours.snapshot() == reference.snapshot()


def test_conversion_of_a_part_touches_only_that_part():
    layout = make_layout("token", (LayerShape(4, 4, 4),) * 2)
    ours, reference = engine(layout), engine(layout)
    payload = noise(layout.nbytes(layout.whole))
    part = Shard(1, 2, 1, 3)
    ours.paged().convert(None, payload, layout, layout.whole, chunk_ids(layout), part=part)
    sliced = np.concatenate(
        [layout_block[:, 1:3].reshape(-1) for layout_block in [payload.reshape(2, 4, 4, -1)[1]]]
    )
    slow_load(reference, sliced, chunk_ids(layout), held=part)
    assert ours.snapshot() == reference.snapshot()


@pytest.mark.parametrize(
    "other",
    [
        make_layout(dtype="fp16"),
        make_layout(chunk=16),
        make_layout(shapes=EVEN[:2]),
        make_layout("latent"),
        Layout((LayerShape(2, 64, 0),) * 3, "bf16", 2, 8, "opaque"),
    ],
)
def test_bytes_of_another_model_are_refused(other):
    ours = engine(make_layout())
    before = ours.snapshot()
    with pytest.raises(LayoutError, match="cannot be read as token bf16, 3 layers, blocks of 2"):
        ours.paged().convert(None, noise(1 << 12), other, other.whole, [0, 1, 2, 3])
    assert ours.snapshot() == before


def test_an_object_that_has_nothing_of_ours_is_refused():
    layout = make_layout()
    kv = engine(layout, layout.shard(rank=0, ranks=2)).paged()
    with pytest.raises(LayoutError, match="has no part of"):
        kv.convert(None, noise(1 << 12), layout, layout.shard(rank=1, ranks=2), [0, 1, 2, 3])


# ---- misuse never reaches memory


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([0, 1, 2, BLOCKS], "block id 11 is outside of the engine's 11 blocks"),
        ([0, 1, 2, -1], "block id -1 is outside"),
        ([0, 1, 2, 2**62], "is outside"),
        ([0, 1, 2, 1], "twice"),
        ([0, 1, 2], r"a chunk is 4 blocks, got block ids of shape \[3\]"),
        ([[0, 1, 2, 3]] * 2, r"a chunk is 4 blocks of each of 1 tables, got block ids of shape \[2, 4\]"),
        ([0.0, 1.0, 2.0, 3.0], "integers"),
        ([True, False, True, True], "integers"),
    ],
)
def test_wrong_block_ids_are_refused_before_any_byte_moves(ids, said):
    ours = engine(make_layout())
    kv, before, payload = ours.paged(), ours.snapshot(), noise(1 << 12)
    out = bytearray(kv.nbytes)
    with pytest.raises(LayoutError, match=said):
        kv.gather(None, ids, out)
    with pytest.raises(LayoutError, match=said):
        kv.scatter(0, payload, ids)
    stored = make_layout("planes")
    with pytest.raises(LayoutError, match=said):
        kv.convert(None, payload, stored, stored.whole, ids)
    assert ours.snapshot() == before
    assert out == bytes(kv.nbytes)


def test_ids_of_blocks_that_are_not_touched_do_not_matter():
    """Engines repeat a null block where a window has slid past."""
    kv = engine(make_layout()).paged()
    kv.scatter(None, noise(kv.nbytes), [0, 0, 5, 6], first_block=2)


def test_blocks_of_chunks_behind_a_window_are_checked():
    """The first present block is not the first of a chunk. Two chunks may share a block."""
    kv = engine(make_layout()).paged()
    kv.check([-1, 3, 4, 5, 6, 3, 7, 8])
    for wrong in ([-1, 3, 4, 5, 6, 7, 8, 6], [-1, 3, 4, 3, 5, 6, 7, 8]):
        with pytest.raises(LayoutError, match="twice"):
            kv.check(wrong)


def test_a_rank_may_have_no_layer_of_the_last_table():
    """Of an engine that gives each rank the tables of all."""
    layout = make_layout()
    ours = engine(layout)
    tensors = ours.tensors
    kv = PagedKV(layout, layout.whole, tensors, tables=[0] * len(tensors), table_count=2)
    out, expected = bytearray(kv.nbytes), bytearray(kv.nbytes)
    kv.gather(None, [[3, 4, 5, 6], [7, 8, 9, 10]], out)
    ours.paged().gather(None, [3, 4, 5, 6], expected)
    assert out == expected


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.array, torch.tensor])
def test_block_ids_may_be_a_list_an_array_or_a_tensor(kind):
    kv = engine(make_layout()).paged()
    given_ids = np.array([4, 2, 9, 0], np.int32) if kind is np.int32 else kind([4, 2, 9, 0])
    one, two = bytearray(kv.nbytes), bytearray(kv.nbytes)
    kv.gather(None, given_ids, one)
    kv.gather(None, [4, 2, 9, 0], two)
    assert one == two


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(5, 2, 2, 15, dtype=torch.bfloat16), r"layer 1: expected \[blocks, 2, 2, 16\], got \[5"),
        (torch.zeros(5, 3, 2, 16, dtype=torch.bfloat16), r"layer 1: expected \[blocks, 2, 2, 16\], got \[5"),
        (torch.zeros(5, 2, 16, dtype=torch.bfloat16), r"layer 1: expected \[blocks, 2, 2, 16\], got \[5"),
        (torch.zeros(5, 2, 2, 16, dtype=torch.float16), "layer 1: expected dtype bf16, got torch.float16"),
        (torch.zeros(5, 2, 2, 16), "layer 1: expected dtype bf16, got torch.float32"),
        (np.zeros((5, 2, 2, 16), np.uint8), "layer 1: expected dtype bf16, got uint8"),
        (torch.zeros(6, 2, 2, 16, dtype=torch.bfloat16), "layer 1: expected 5 blocks as in layer 0, got 6"),
        (torch.zeros(0, 2, 2, 16, dtype=torch.bfloat16), "layer 1: .* empty"),
        (np.zeros((5, 2, 2, 16), np.int16)[::-1], "layer 1: .* reversed"),
        (np.frombuffer(bytes(640), np.int16).reshape(5, 2, 2, 16), "layer 1: .* read-only"),
        (torch.zeros(5, 2, 2, 16, dtype=torch.bfloat16, device="meta"), "layer 1: expected a CPU .*meta"),
        ([[1]], "layer 1: expected a CPU tensor"),
        ((torch.zeros(5, 2, 2, 8), torch.zeros(5, 2, 2, 8)), "layer 1: expected dtype bf16"),
        ((torch.zeros(1),) * 3, "layer 1: 3 tensors do not make packing 'token'"),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_refused(tensor, said):
    layout = make_layout(shapes=EVEN[:2])
    good = torch.zeros(5, 2, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=said):
        PagedKV(layout, layout.whole, [good, tensor])


def test_a_layer_too_few_is_refused():
    with pytest.raises(LayoutError, match="shard L0-3H0-2 has 3 layers, got tensors for 1"):
        PagedKV(make_layout(), make_layout().whole, [torch.zeros(5, 2, 2, 16)])


def test_a_layer_of_another_rank_is_refused():
    layout = make_layout()
    kv = engine(layout, Shard(0, 2, 0, 2)).paged()
    with pytest.raises(LayoutError, match="layer 2 is not in shard"):
        kv.gather(2, [0, 1, 2, 3], bytearray(kv.nbytes))


def test_importing_paging_does_not_import_torch():
    code = "import lmtier.copy.paging, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the witness


@settings(deadline=None, max_examples=60)
@given(made=engines(), data=st.data())
def test_the_fingerprint_sees_all_bytes_of_its_blocks_only(made, data):
    layout, shard, how = made
    ours = engine(layout, shard, **how)
    kv, ids = ours.paged(), [9, 0, 4]
    before = kv.raw_fingerprint(ids)
    number = data.draw(st.integers(shard.first_layer, shard.end_layer - 1))
    head = data.draw(st.integers(0, layout.heads(number, shard) - 1))
    block = data.draw(st.integers(0, BLOCKS - 1))
    slot = data.draw(st.integers(0, layout.block_tokens - 1))
    shape = layout.layers[number]
    plane = 1 if shape.v and data.draw(st.booleans()) else 0
    element = data.draw(st.integers(0, shape[1 + plane] - 1))
    array, index = ours.element(number, head, block, slot, plane, element)
    array[index] ^= 1 << data.draw(st.integers(0, 8 * layout.itemsize - 1))
    assert (kv.raw_fingerprint(ids) != before) == (block in ids)


@settings(deadline=None, max_examples=60)
@given(made=engines())
def test_writing_raw_blocks_changes_no_other_block(made):
    layout, shard, how = made
    ours = engine(layout, shard, **how)
    kv = ours.paged()
    others = [block for block in range(BLOCKS) if block not in (7, 2)]
    kept = kv.raw_blocks(others)
    data = noise(len(kv.raw_blocks([7, 2]))).tobytes()
    kv.write_raw([7, 2], data)
    assert kv.raw_blocks([7, 2]) == data
    assert kv.raw_blocks(others) == kept


def test_the_fingerprint_survives_a_save_and_a_load(way):
    layout = make_layout("token", UNEVEN)
    kv = engine(layout).paged()
    payload = bytearray(kv.nbytes)
    kv.gather(None, [0, 5, 2, 9], payload)
    kv.scatter(None, payload, [10, 6, 3, 4])
    assert kv.raw_fingerprint([10, 6, 3, 4]) == kv.raw_fingerprint([0, 5, 2, 9])
    assert kv.raw_fingerprint([0, 5, 9, 2]) != kv.raw_fingerprint([0, 5, 2, 9])


def test_the_fingerprint_ignores_where_the_memory_lies():
    layout = make_layout("planes", n=4)
    kinds = [engine(layout, storage=storage, two=True).paged() for storage in ("stacked", "apart")]
    payload = noise(kinds[0].nbytes)
    for kv, ids in zip(kinds, ([4, 5], [9, 1]), strict=True):
        kv.scatter(None, payload, ids)
    assert kinds[0].raw_tag == kinds[1].raw_tag
    assert kinds[0].raw_fingerprint([4, 5]) == kinds[1].raw_fingerprint([9, 1])


def test_fingerprints_of_layers_fold_into_the_objects():
    kv = engine(make_layout()).paged()
    each = [kv.raw_fingerprint([3, 4, 5, 6], layer) for layer in range(3)]
    assert PagedKV.fold(each) == kv.raw_fingerprint([3, 4, 5, 6])


def test_a_single_layers_fingerprint_is_the_objects():
    kv = engine(make_layout(shapes=EVEN[:1])).paged()
    assert kv.raw_fingerprint([3, 4, 5, 6], 0) == kv.raw_fingerprint([3, 4, 5, 6])


def test_golden_fingerprint():
    """Objects at rest carry these: a change here makes every stored fingerprint incomparable."""
    kv = engine(make_layout()).paged()
    kv.scatter(None, bytes(i % 251 for i in range(kv.nbytes)), [7, 0, 3, 10])
    assert kv.raw_tag.hex() == "5b476dc113274527"
    assert kv.raw_fingerprint([7, 0, 3, 10]).hex() == "01b1d77cf08869fe"


def test_arrangements_that_differ_have_tags_that_differ():
    layout = make_layout()
    tags = {
        engine(layout).paged().raw_tag,
        engine(layout, arrangement="NHD").paged().raw_tag,
        engine(layout, two=True).paged().raw_tag,
        engine(make_layout("planes")).paged().raw_tag,
        engine(make_layout(dtype="fp16")).paged().raw_tag,
        engine(make_layout(n=4)).paged().raw_tag,
        engine(layout, Shard(0, 3, 0, 1)).paged().raw_tag,
    }
    assert len(tags) == 7
    assert all(len(tag) == 8 for tag in tags)


def test_raw_misuse_is_refused():
    kv = engine(make_layout()).paged()
    with pytest.raises(LayoutError, match="block id 11 is outside"):
        kv.raw_blocks([11])
    with pytest.raises(LayoutError, match="block id -1 is outside"):
        kv.raw_fingerprint([-1])
    with pytest.raises(LayoutError, match="hold 768 bytes, got 3"):
        kv.write_raw([0, 1], b"abc")
