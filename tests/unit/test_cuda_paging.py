"""`CudaKV` beside `PagedKV`, over any layout, on a simulated device that runs the real kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lmtier.cuda.kernels import Geometry, Memory
from lmtier.cuda.paging import CudaKV
from lmtier.errors import LayoutError, MisuseError
from lmtier.layout import LayerShape, Layout, Shard, padded
from lmtier.paging import PagedKV
from tests.cuda_device import SimulatedDevice
from tests.unit.test_paging import BLOCKS, Engine, chunk_ids, engine, engines, make_layout, noise

NEVER = 1 << 40


def on_device(made: Engine, **options: Any) -> CudaKV:
    device = SimulatedDevice(1)
    device.keep(*made.memory)
    return CudaKV(made.layout, made.shard, made.tensors, device, **options)


@st.composite
def large_engines(draw: st.DrawFn) -> tuple[Layout, Shard, dict[str, Any]]:
    """With layers that are long enough for marks."""
    layout, shard, how = draw(engines())
    shapes = tuple(LayerShape(s.heads, s.k * 8, s.v * 8) for s in layout.layers)
    layout = Layout(shapes, layout.dtype, layout.block_tokens, layout.chunk_tokens, layout.packing)
    made = engine(layout, shard, **how)
    memories = [[Memory.of(t) for t in (ts if isinstance(ts, tuple) else (ts,))] for ts in made.tensors]
    assume(Geometry(layout, shard, memories).is_marked)
    return layout, shard, how


ways = st.fixed_dictionaries(
    {"staging_bytes": st.sampled_from([1, 5000, 1 << 20]), "shortest_run": st.sampled_from([0, NEVER])}
)


@settings(max_examples=80, deadline=None)
@given(large_engines(), ways, st.data())
def test_a_gpu_does_to_every_layout_what_a_cpu_does(made, way, data):
    layout, shard, how = made
    ours, theirs = engine(layout, shard, **how), engine(layout, shard, **how)
    cuda, cpu = on_device(ours, **way), theirs.paged()
    ids = chunk_ids(layout)
    layer = data.draw(st.sampled_from([None, *cpu.layers]))
    assert cuda.raw_tag == cpu.raw_tag
    assert cuda.raw_fingerprint(ids, layer) == cpu.raw_fingerprint(ids, layer)
    assert cuda.raw_blocks(ids) == cpu.raw_blocks(ids)

    got, wanted = noise(cpu.nbytes), noise(cpu.nbytes)
    cuda.gather(layer, ids, got)
    cpu.gather(layer, ids, wanted)
    assert got.tobytes() == wanted.tobytes()

    first = data.draw(st.integers(0, layout.blocks))
    payload, others = noise(cpu.nbytes, 5), chunk_ids(layout, 8)
    cuda.scatter(layer, payload, others, first)
    cpu.scatter(layer, payload, others, first)
    assert ours.snapshot() == theirs.snapshot()

    written = noise(len(cpu.raw_blocks(ids)), 6).tobytes()
    cuda.write_raw(ids, written)
    cpu.write_raw(ids, written)
    assert ours.snapshot() == theirs.snapshot()
    assert isinstance(cuda.device, SimulatedDevice)
    cuda.device.check()


@settings(max_examples=60, deadline=None)
@given(large_engines(), ways, st.data())
def test_by_way_of_places_in_gpu_memory_every_layout_arrives_as_without(made, way, data):
    (layout, shard, how), number = made, 3
    ours, theirs = (engine(layout, shard, blocks=number * layout.blocks + 2, **how) for _ in range(2))
    cuda, cpu = on_device(ours, **way), theirs.paged()
    device = cuda.device
    assert isinstance(device, SimulatedDevice)
    room = padded(cuda.nbytes)
    cuda.hold(number * room)
    layer = data.draw(st.sampled_from([None, *cpu.layers]))
    mixed = st.lists(st.sampled_from(["there", "put", "none"]), min_size=number, max_size=number)

    def near(kinds: list[str]) -> list[tuple[int, bool] | None]:
        return [None if kind == "none" else (at * room, kind == "there") for at, kind in enumerate(kinds)]

    # Out: what passes through a place arrives in the slab, and stays in the place.
    ids = np.random.default_rng(3).permutation(cuda.blocks)[:-2].reshape(number, -1).tolist()
    got, wanted = ([noise(cpu.nbytes, 1) for _ in ids] for _ in range(2))
    through = data.draw(mixed.map(lambda kinds: ["put" if kind == "there" else kind for kind in kinds]))
    bounds = [cuda.bind(each, payload) for each, payload in zip(ids, got, strict=True)]
    cuda.bring_near(bounds, near(through))
    cuda.wait_for(lambda lane: cuda.enqueue_copies(lane, layer, bounds))
    for each, payload in zip(ids, wanted, strict=True):
        cpu.gather(layer, each, payload)
    assert [each.tobytes() for each in got] == [each.tobytes() for each in wanted]

    # In: a chunk that is there is not read from the slab, one that is put there is as a whole.
    first = data.draw(st.integers(0, layout.blocks))
    kinds = data.draw(mixed)
    payloads = [noise(cpu.nbytes, 5 + at) for at in range(number)]
    for at, kind in enumerate(kinds):
        if kind == "there":
            device.compute.copy([(cuda._held + at * room, payloads[at].ctypes.data, cuda.nbytes)])
    unread = [noise(cpu.nbytes, 9) if kind == "there" else p for p, kind in zip(payloads, kinds, strict=True)]
    bounds = [cuda.bind(each, payload, first) for each, payload in zip(ids, unread, strict=True)]
    cuda.bring_near(bounds, near(kinds))
    cuda.wait_for(lambda lane: cuda.enqueue_copies(lane, layer, bounds), device.load)
    for each, payload in zip(ids, payloads, strict=True):
        cpu.scatter(layer, payload, each, first)
    assert ours.snapshot() == theirs.snapshot()

    # And again, now that they are all there.
    again = ["there" if kind == "put" else kind for kind in kinds]
    bounds = [cuda.bind(each, payload) for each, payload in zip(ids, unread, strict=True)]
    cuda.bring_near(bounds, near(again))
    cuda.wait_for(lambda lane: cuda.enqueue_copies(lane, layer, bounds), device.load)
    for each, payload in zip(ids, payloads, strict=True):
        cpu.scatter(layer, payload, each)
    assert ours.snapshot() == theirs.snapshot()
    device.check()


def test_places_beyond_the_memory_that_is_held_are_refused():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    cuda = on_device(engine(layout))
    bounds = [cuda.bind(chunk_ids(layout), noise(cuda.nbytes))]
    with pytest.raises(MisuseError, match="beyond the 0 bytes"):
        cuda.bring_near(bounds, [(0, False)])
    cuda.hold(padded(cuda.nbytes))
    cuda.bring_near(bounds, [(0, False)])
    with pytest.raises(MisuseError, match="beyond"):
        cuda.bring_near(bounds, [(4096, False)])
    with pytest.raises(MisuseError, match="1 chunks, and 2 places"):
        cuda.bring_near(bounds, [None, None])
    with pytest.raises(MisuseError, match="already"):
        cuda.hold(4096)


def test_neighbouring_blocks_are_one_copy():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    made = engine(layout)
    payloads = np.zeros(layout.nbytes(layout.whole), np.uint8)
    geometry = on_device(made).geometry

    def copies(ids: list[int]) -> list[int]:
        runs = geometry.runs(0, [payloads.ctypes.data], [np.array([ids], np.int32)])
        assert runs is not None
        return [nbytes // 512 for nbytes in runs[:, 2].tolist()]

    assert copies([3, 4, 5, 6]) == [4]
    assert copies([3, 4, 8, 9]) == [2, 2]
    assert copies([6, 5, 4, 3]) == [1, 1, 1, 1]
    assert copies([-1, 4, 5, 9]) == [2, 1]


def test_long_runs_take_no_kernel_and_short_ones_one_a_layer():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    for shortest, wanted in ((0, []), (NEVER, ["gather"])):
        cuda = on_device(engine(layout), shortest_run=shortest)
        ids = [chunk_ids(layout, seed) for seed in range(4)]
        payloads = [noise(cuda.nbytes) for _ in ids]
        bounds = [cuda.bind(each, payload) for each, payload in zip(ids, payloads, strict=True)]
        cuda.wait_for(lambda lane, kv=cuda, b=bounds: kv.enqueue_copies(lane, 0, b))  # type: ignore[misc]
        device = cuda.device
        assert isinstance(device, SimulatedDevice)
        assert [deed.what for deed in device.history if deed.what not in ("copy", "wait")] == wanted


def test_layers_of_several_tables_come_from_their_own_blocks():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 4)
    ours, theirs = engine(layout), engine(layout)
    tables, rows = (0, 1, 0, 1), [[1, 2, 3, 4], [-1, 8, 7, 6]]
    cuda = on_device(ours, tables=tables)
    cpu = PagedKV(layout, layout.whole, theirs.tensors, tables=tables)
    payload = noise(cpu.nbytes)
    for kv in (cuda, cpu):
        kv.bind(kv.check(rows)[0], payload).scatter(None)
    assert ours.snapshot() == theirs.snapshot()
    with pytest.raises(LayoutError, match="sliding window"):
        cuda.bind(cuda.check(rows)[0], payload).gather(None)
    whole = cuda.check([[1, 2, 3, 4], [9, 8, 7, 6]])[0]
    assert cuda.raw_fingerprint(whole) == cpu.raw_fingerprint(whole)


def test_objects_of_another_layout_are_converted():
    shapes = (LayerShape(2, 32, 32),) * 2
    stored, layout = make_layout("planes", shapes, n=4, chunk=16), make_layout(shapes=shapes, chunk=16)
    ours, theirs = engine(layout, blocks=20), engine(layout, blocks=20)
    cuda, cpu, payload = on_device(ours), theirs.paged(), noise(stored.nbytes(stored.whole))
    ids = chunk_ids(layout, blocks=20)
    half = Shard(0, 2, 1, 2)
    for kv in (cuda, cpu):
        kv.convert(1, payload, stored, stored.whole, ids, part=half)
    assert ours.snapshot() == theirs.snapshot()
    for kv in (cuda, cpu):
        kv.convert(None, payload, stored, stored.whole, ids)
    assert ours.snapshot() == theirs.snapshot()


def test_tensors_that_do_not_fit_are_refused():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    made = engine(layout)
    good: list[Any] = made.tensors

    def refused(tensors: list[Any], match: str) -> None:
        with pytest.raises(LayoutError, match=match):
            CudaKV(layout, layout.whole, tensors, SimulatedDevice())

    refused(good[:1], "tensors for 1")
    refused([good[0].half(), good[1]], "expected dtype bf16, got torch.float16")
    refused([good[0], good[1][: BLOCKS - 1]], f"expected {BLOCKS} blocks, got {BLOCKS - 1}")
    refused([good[0], good[1][:, :1]], "expected blocks of")
    refused([good[0], good[1][:, :1].expand(-1, 2, -1, -1)], "spread")
    small = make_layout(shapes=(LayerShape(2, 2, 2),))
    with pytest.raises(LayoutError, match="fingerprint"):
        CudaKV(small, small.whole, engine(small).tensors, SimulatedDevice())


def test_ids_that_the_engine_does_not_have_are_refused():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    cuda = on_device(engine(layout))
    for ids in ([0, 1, 2, BLOCKS], [0, 1, 2, 2], [0, 1, 2]):
        with pytest.raises(LayoutError):
            cuda.gather(None, ids, noise(cuda.nbytes))
    with pytest.raises(LayoutError, match="all of them"):
        cuda.raw_fingerprint([0, 1, 2])
