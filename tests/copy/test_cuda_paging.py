"""`CudaKV` beside `PagedKV`, over any layout, on a simulated device that runs the real kernels."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lmtier.copy.cuda import chunks, paging
from lmtier.copy.cuda.chunks import Chunks
from lmtier.copy.cuda.kernels import Geometry, TensorMemory
from lmtier.copy.cuda.paging import CudaKV
from lmtier.copy.paging import PagedKV
from lmtier.errors import LayoutError, MisuseError
from lmtier.format.layout import LayerShape, Layout, Shard, padded
from tests.copy.test_paging import BLOCKS, Engine, chunk_ids, engine, engines, make_layout, noise
from tests.cuda_device import SimulatedDevice

NEVER = 1 << 40


def on_device(made: Engine, **options: Any) -> CudaKV:
    device = SimulatedDevice(1)
    device.keep(*made.memory)
    return CudaKV(made.layout, made.shard, made.tensors, device, **options)


def joined(chunks: Iterable[Chunks]) -> Chunks:
    return reduce(add, chunks)


@st.composite
def large_engines(draw: st.DrawFn) -> tuple[Layout, Shard, dict[str, Any]]:
    """With layers that are long enough for marks."""
    layout, shard, how = draw(engines())
    shapes = tuple(LayerShape(s.heads, s.k * 8, s.v * 8) for s in layout.layers)
    layout = Layout(shapes, layout.dtype, layout.block_tokens, layout.chunk_tokens, layout.packing)
    made = engine(layout, shard, **how)
    memories = [[TensorMemory.of(t) for t in (ts if isinstance(ts, tuple) else (ts,))] for ts in made.tensors]
    assume(Geometry(layout, shard, memories).has_fingerprints)
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
def test_every_layout_arrives_the_same_through_gpu_slots(made, way, data):
    (layout, shard, how), number = made, 3
    ours, theirs = (engine(layout, shard, blocks=number * layout.blocks + 2, **how) for _ in range(2))
    cuda, cpu = on_device(ours, **way), theirs.paged()
    device = cuda.device
    assert isinstance(device, SimulatedDevice)
    room = padded(cuda.nbytes)
    cuda.allocate_slots(number * room)
    layer = data.draw(st.sampled_from([None, *cpu.layers]))
    mixed = st.lists(st.sampled_from(["there", "put", "none"]), min_size=number, max_size=number)

    def near(kinds: list[str]) -> list[tuple[int, bool] | None]:
        return [None if kind == "none" else (at * room, kind == "there") for at, kind in enumerate(kinds)]

    # Out: what passes through a place arrives in the slab, and stays in the place.
    ids = np.random.default_rng(3).permutation(cuda.blocks)[:-2].reshape(number, -1).tolist()
    got, wanted = ([noise(cpu.nbytes, 1) for _ in ids] for _ in range(2))
    through = data.draw(mixed.map(lambda kinds: ["put" if kind == "there" else kind for kind in kinds]))
    bounds = joined(cuda.bind(each, payload) for each, payload in zip(ids, got, strict=True))
    cuda.set_gpu_slots(bounds, near(through))
    cuda.wait_for(lambda lane: cuda.enqueue_copies(lane, cuda._these(layer), bounds))
    for each, payload in zip(ids, wanted, strict=True):
        cpu.gather(layer, each, payload)
    assert [each.tobytes() for each in got] == [each.tobytes() for each in wanted]

    # In: a chunk that is there is not read from the slab, one that is put there is as a whole.
    first = data.draw(st.integers(0, layout.blocks))
    kinds = data.draw(mixed)
    payloads = [noise(cpu.nbytes, 5 + at) for at in range(number)]
    for at, kind in enumerate(kinds):
        if kind == "there":
            device.compute.copy([(cuda._slots_address + at * room, payloads[at].ctypes.data, cuda.nbytes)])
    unread = [noise(cpu.nbytes, 9) if kind == "there" else p for p, kind in zip(payloads, kinds, strict=True)]
    bounds = joined(cuda.bind(each, payload, first) for each, payload in zip(ids, unread, strict=True))
    cuda.set_gpu_slots(bounds, near(kinds))
    cuda.wait_for(lambda lane: cuda.enqueue_copies(lane, cuda._these(layer), bounds), device.load)
    for each, payload in zip(ids, payloads, strict=True):
        cpu.scatter(layer, payload, each, first)
    assert ours.snapshot() == theirs.snapshot()

    # And again, now that they are all there.
    again = ["there" if kind == "put" else kind for kind in kinds]
    bounds = joined(cuda.bind(each, payload) for each, payload in zip(ids, unread, strict=True))
    cuda.set_gpu_slots(bounds, near(again))
    cuda.wait_for(lambda lane: cuda.enqueue_copies(lane, cuda._these(layer), bounds), device.load)
    for each, payload in zip(ids, payloads, strict=True):
        cpu.scatter(layer, payload, each)
    assert ours.snapshot() == theirs.snapshot()
    device.check()


def test_places_beyond_the_memory_that_is_held_are_refused():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    cuda = on_device(engine(layout))
    bounds = cuda.bind(chunk_ids(layout), noise(cuda.nbytes))
    with pytest.raises(MisuseError, match="beyond the 0 bytes"):
        cuda.set_gpu_slots(bounds, [(0, False)])
    cuda.allocate_slots(padded(cuda.nbytes))
    cuda.set_gpu_slots(bounds, [(0, False)])
    with pytest.raises(MisuseError, match="beyond"):
        cuda.set_gpu_slots(bounds, [(4096, False)])
    with pytest.raises(MisuseError, match="1 chunks need as many places"):
        cuda.set_gpu_slots(bounds, [None, None])
    with pytest.raises(MisuseError, match="already"):
        cuda.allocate_slots(4096)


def test_layers_of_a_block_that_lie_together_are_one_copy():
    """Where a chunk is one block, and the engine keeps a block's layers side by side."""
    one = make_layout(shapes=(LayerShape(2, 32, 32),) * 3, n=4, chunk=4)
    two = make_layout(shapes=(LayerShape(2, 32, 32),) * 3, n=4, chunk=8)
    nbytes = one.nbytes(one.whole)
    memory = np.zeros((10, 3, 2, 4, 64), np.int16)
    apart = np.zeros((3, 10, 2, 4, 64), np.int16)
    for layout, engine_memory, layers, wanted in (
        (one, list(memory.swapaxes(0, 1)), range(3), [nbytes]),
        (one, list(memory.swapaxes(0, 1)), range(1, 3), [nbytes * 2 // 3]),
        (one, list(apart), range(3), [nbytes // 3] * 3),
        (two, list(memory.swapaxes(0, 1)), range(3), [nbytes // 3] * 6),
    ):
        geometry = Geometry(layout, layout.whole, [[TensorMemory.of(each)] for each in engine_memory])
        ids = np.arange(layout.blocks, dtype=np.int32)[None]
        runs = geometry.runs(layers, [1 << 20], [ids], stores=True)
        back = geometry.runs(layers, [1 << 20], [ids], stores=False)
        assert runs[:, [1, 0, 2]].tolist() == back.tolist()
        assert runs[:, 2].tolist() == wanted
        assert geometry.run_bytes(layers) == wanted[0]
        at, size = geometry.place(layers)
        assert sorted(runs[:, 0].tolist())[0] == (1 << 20) + at
        assert runs[:, 2].sum() == size
        assert len(geometry.runs(layers, [1 << 20], [np.full_like(ids, -1)], stores=True)) == 0


def test_long_runs_take_no_kernel_and_short_ones_share_one():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    for shortest, wanted in ((0, []), (NEVER, ["gather"])):
        cuda = on_device(engine(layout), shortest_run=shortest)
        ids = [chunk_ids(layout, seed) for seed in range(4)]
        payloads = [noise(cuda.nbytes) for _ in ids]
        bounds = joined(cuda.bind(each, payload) for each, payload in zip(ids, payloads, strict=True))
        cuda.wait_for(lambda lane, kv=cuda, b=bounds: kv.enqueue_copies(lane, range(1), b))  # type: ignore[misc]
        device = cuda.device
        assert isinstance(device, SimulatedDevice)
        assert [deed.what for deed in device.history if deed.what not in ("copy", "wait")] == wanted


def test_evenly_spaced_payloads_cross_the_bus_in_one_call():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    cuda = on_device(engine(layout), shortest_run=NEVER)
    nbytes, ids = cuda.nbytes, [chunk_ids(layout, seed) for seed in range(4)]
    assert nbytes % 256 == 0  # so that staging has no gaps either
    slab = noise(6 * nbytes)
    offsets = [number * nbytes for number in (0, 1, 2, 4)]
    bounds = cuda.bind_all(
        np.concatenate([cuda.chunk(each) for each in ids], axis=1),
        offsets,
        lambda at, size: slab[at : at + size],
    )
    cuda.wait_for(lambda lane: cuda.enqueue_copies(lane, cuda.layers, bounds))
    device = cuda.device
    assert isinstance(device, SimulatedDevice)
    copies = [deed for deed in device.history if deed.what == "copy"]
    assert [[end - begin for begin, end in copy.writes] for copy in copies] == [[nbytes] * 3, [nbytes]]
    for layer in cuda.layers:  # and the same of one layer, though these do not follow each other
        cuda.wait_for(lambda lane, n=layer: cuda.enqueue_copies(lane, range(n, n + 1), bounds))  # type: ignore[misc]
    copies = [deed for deed in device.history if deed.what == "copy"][2:]
    assert [len(copy.writes) for copy in copies] == [3, 1] * 2
    for each, at in zip(ids, offsets, strict=True):
        assert slab[at : at + nbytes].tobytes() == payload_of(cuda, each)


def payload_of(cuda: CudaKV, ids: list[int]) -> bytes:
    out = noise(cuda.nbytes)
    cuda.gather(None, ids, out)
    return out.tobytes()


def test_layers_go_in_few_groups_that_are_worth_a_call(monkeypatch):
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 7)
    cuda = on_device(engine(layout))
    monkeypatch.setattr(paging, "GROUP_BYTES", 3 * cuda.nbytes)
    assert cuda.layer_groups(5) == [range(7)]
    assert cuda.layer_groups(6) == [range(3), range(3, 7)]
    assert cuda.layer_groups(1000) == [range(1), range(1, 3), range(3, 5), range(5, 7)]


def test_a_run_is_not_cut_so_short_that_it_needs_a_kernel(monkeypatch):
    monkeypatch.setattr(paging, "GROUP_BYTES", 1)
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 4, n=4, chunk=4)
    memory = np.zeros((10, 4, 2, 4, 64), np.int16)
    for parts, number in ((5, 4), (4, 4), (3, 3), (2, 2), (1, 1), (0.5, 4)):
        shortest = int(layout.nbytes(layout.whole) / parts)
        cuda = CudaKV(
            layout, layout.whole, list(memory.swapaxes(0, 1)), SimulatedDevice(), shortest_run=shortest
        )
        assert len(cuda.layer_groups(1)) == number


def test_layers_of_several_tables_take_their_own_blocks():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 4)
    ours, theirs = engine(layout), engine(layout)
    tables, rows = (0, 1, 0, 1), [[1, 2, 3, 4], [-1, 8, 7, 6]]
    cuda = on_device(ours, tables=tables)
    cpu = PagedKV(layout, layout.whole, theirs.tensors, tables=tables)
    payload = noise(cpu.nbytes)
    for kv in (cuda, cpu):
        kv.bind(rows, payload).scatter(None)
    assert ours.snapshot() == theirs.snapshot()
    with pytest.raises(LayoutError, match="sliding window"):
        cuda.bind(rows, payload).gather(None)
    whole = [[1, 2, 3, 4], [9, 8, 7, 6]]
    assert cuda.raw_fingerprint(whole) == cpu.raw_fingerprint(whole)


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
    with pytest.raises(LayoutError, match="a mark needs all"):
        cuda.raw_fingerprint([0, 1, 2])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12), st.sampled_from([1, 1 << 29]))
def test_rows_of_a_copy_are_within_the_drivers_reach(places, unit):
    """It refuses 2 GiB and more, also where there is one row only."""
    width = 100
    to, source = (
        (np.array(each, np.int64) * unit * width for each in zip(*places, strict=True))
        if places
        else (
            np.empty(0, np.int64),
            np.empty(0, np.int64),
        )
    )
    rows = list(chunks.rows_of(to, source, width))
    assert all(max(each.to_step, each.source_step) < 1 << 31 for each in rows)
    single = [each.part(at, at + 1) for each in rows for at in range(each.number)]
    assert [(each.to, each.source) for each in single] == list(zip(to.tolist(), source.tolist(), strict=True))
    assert {(each.to_step, each.source_step, each.width) for each in single} <= {(width, width, width)}


def test_what_was_taken_of_the_gpu_is_given_back():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    made = engine(layout)
    cuda = on_device(made)
    device = cuda.device
    assert isinstance(device, SimulatedDevice)
    cuda.allocate_slots(4096)
    assert len(device._kept) > len(made.memory)
    cuda.close()
    assert len(device._kept) == len(made.memory)


@pytest.mark.parametrize("last", [0, 2, 5])
def test_memory_taken_before_the_gpu_ran_out_is_freed(monkeypatch, last):
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    made, device = engine(layout), SimulatedDevice(1)
    device.keep(*made.memory)
    take, taken = device.memory, list[int]()

    def memory(nbytes: int) -> int:
        if len(taken) == last:
            raise MemoryError("no more")
        taken.append(nbytes)
        return take(nbytes)

    monkeypatch.setattr(device, "memory", memory)
    with pytest.raises(MemoryError):
        CudaKV(layout, layout.whole, made.tensors, device)
    assert len(device._kept) == len(made.memory)


def test_where_there_is_no_room_for_marks_fewer_are_taken():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 2)
    cuda = on_device(engine(layout))
    most = paging._MARKS_BYTES // 16
    first = cuda.take_fingerprints(most // 2)
    second = cuda.take_fingerprints(most)
    assert (first.chunks, second.chunks) == (most // 2, most // 2)
    assert cuda.take_fingerprints(8).chunks == 0
    for marks in (first, second):
        cuda.free_fingerprints(marks)
    assert cuda.take_fingerprints(most).chunks == most
