"""The CUDA kernels without a GPU: compiled for real ones, and run on this CPU beside their numpy twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.copy.cuda import kernels
from lmtier.copy.cuda.kernels import BATCH, PIECE, RAW, Geometry, Spread, TensorMemory
from lmtier.copy.paging import PagedKV
from lmtier.errors import LayoutError
from lmtier.format.layout import LayerShape, Layout, Shard
from tests.copy.test_cuda_paging import large_engines
from tests.copy.test_paging import BLOCKS, Engine, chunk_ids, engine, engines, make_layout, noise
from tests.cuda_shim import Cpu, Nvrtc, cpu

FEW = Spread(3)
spreads = st.integers(1, 9).map(Spread)


def given_as(tensors: Any) -> list[list[TensorMemory]]:
    both = [each if isinstance(each, (tuple, list)) else (each,) for each in tensors]
    return [[TensorMemory.of(tensor) for tensor in each] for each in both]


class Device:
    """One engine's memory, and the kernels that may touch it, its payloads and nothing else."""

    def __init__(self, engine: Engine, tables: tuple[int, ...] = ()) -> None:
        self.cpu: Cpu = cpu()
        self.geometry = Geometry(engine.layout, engine.shard, given_as(engine.tensors), tables)
        self.cpu.allow(*engine.memory)
        self.pieces, self.raws = self.geometry.pieces.copy(), self.geometry.raws.copy()

    def copy(
        self,
        kernel: str,
        payloads: list[np.ndarray],
        ids: Any,
        *,
        layer: int | None = None,
        spread: Spread = FEW,
        backwards: bool = False,
    ) -> int:
        """How many launches it took."""
        self.cpu.allow(*payloads)
        rows = [np.array(each, np.int32) for each in ids]
        at = [payload.ctypes.data for payload in payloads]
        layers = self.geometry.layers if layer is None else range(layer, layer + 1)
        launches = list(
            self.geometry.copy_launches(kernel, layers, self.pieces.ctypes.data, at, rows, spread)
        )
        for launch in launches:
            self.cpu.run(launch, backwards=backwards)
        return len(launches)

    def marks(self, layer: int, ids: list[list[int]], spread: Spread = FEW) -> list[bytes]:
        (marks,) = self.all_marks(range(layer, layer + 1), ids, spread)
        return marks

    def all_marks(
        self, layers: range, ids: list[list[int]], spread: Spread = FEW, room: int = 0
    ) -> list[list[bytes]]:
        """Of each layer, of each chunk. `room`: for the sums, at least of one layer's chunk."""
        room = max(room, *(self.geometry.sums_bytes(layer) for layer in layers))
        sums, marks = np.zeros(room // 8, np.uint64), np.zeros((len(layers), len(ids)), np.uint64)
        self.cpu.allow(sums, marks)
        rows = [np.array(ids, np.int32)] * (max(self.geometry.table) + 1)
        where = self.raws.ctypes.data, rows, (sums.ctypes.data, sums.nbytes), marks.ctypes.data
        for launch in self.geometry.fingerprint_launches(layers, *where, spread):
            self.cpu.run(launch)
        return [[int(mark).to_bytes(8, "big") for mark in each] for each in marks]


def unaligned(nbytes: int, at: int, fill: bytes | None = None) -> np.ndarray:
    """`nbytes` bytes that begin `at` bytes after a multiple of 64."""
    room = np.zeros(nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + at
    out = room[start : start + nbytes]
    out[:] = noise(nbytes) if fill is None else np.frombuffer(fill, np.uint8)
    return out


# ---- the compiler


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_kernels_compile_without_warnings_or_spills(nvrtc, architecture):
    """No kernel uses local memory either."""
    watched = [f"--ptxas-options={each}" for each in ("--warn-on-spills", "--warn-on-local-memory-usage")]
    log, code = nvrtc.compile(
        kernels.source(), [*kernels.OPTIONS, f"--gpu-architecture={architecture}", *watched]
    )
    assert not log
    assert code
    for kernel in kernels.KERNELS:
        assert kernel.encode() in code


def test_a_warning_of_the_compiler_would_be_seen(nvrtc):
    source = kernels.source() + 'extern "C" __global__ void more(u64 *out) { int unused; out[0] = 1; }'
    log, _ = nvrtc.compile(source, [*kernels.OPTIONS, "--gpu-architecture=sm_90"])
    assert "unused" in log


@pytest.mark.parametrize(("struct", "dtype"), [("Piece", PIECE), ("Raw", RAW), ("Batch", BATCH)])
def test_tables_have_the_form_that_the_compiler_gives_them(struct, dtype):
    assert cpu().size_of(struct) == dtype.itemsize


def test_launch_arguments_fit_every_gpu():
    assert BATCH.itemsize + 6 * 8 <= 4096


# ---- the copies


@settings(max_examples=150, deadline=None)
@given(engines(), st.integers(0, 17), st.data())
def test_gather_writes_exactly_the_bytes_of_numpy(made, at, data):
    layout, shard, how = made
    engine_ = engine(layout, shard, **how)
    ids, device = chunk_ids(layout), Device(engine_)
    layer = data.draw(st.sampled_from([None, *range(shard.first_layer, shard.end_layer)]))
    payload = unaligned(layout.nbytes(shard), at)
    wanted = payload.copy()
    engine_.paged().gather(layer, ids, wanted)
    before = engine_.snapshot()
    spread, backwards = data.draw(spreads), data.draw(st.booleans())
    device.copy("gather", [payload], [[ids]], layer=layer, spread=spread, backwards=backwards)
    assert payload.tobytes() == wanted.tobytes()
    assert engine_.snapshot() == before


@settings(max_examples=150, deadline=None)
@given(engines(), st.integers(0, 17), st.data())
def test_scatter_writes_exactly_the_bytes_of_numpy(made, at, data):
    layout, shard, how = made
    ours, theirs = engine(layout, shard, **how), engine(layout, shard, **how)
    ids, device = chunk_ids(layout), Device(ours)
    layer = data.draw(st.sampled_from([None, *range(shard.first_layer, shard.end_layer)]))
    first = data.draw(st.integers(0, layout.blocks))
    payload = unaligned(layout.nbytes(shard), at)
    theirs.paged().scatter(layer, payload, ids, first)
    spread, backwards = data.draw(spreads), data.draw(st.booleans())
    device.copy(
        "scatter", [payload], [[[-1] * first + ids[first:]]], layer=layer, spread=spread, backwards=backwards
    )
    assert ours.snapshot() == theirs.snapshot()


def test_opaque_blocks_of_any_shape_are_copied():
    layout = Layout((LayerShape(2, 48, 0),) * 2, "u8", 2, 8, "mamba")
    rng = np.random.default_rng(1)
    memory = [rng.integers(0, 256, (BLOCKS, 2, 3, 5, 16), np.uint8) for _ in range(2)]
    views = [each[:, :, :, ::2] for each in memory]  # [blocks, 2, 3, 3, 16] with gaps
    layout = Layout((LayerShape(2, 3 * 3 * 16, 0),) * 2, "u8", 2, 8, "mamba")
    kv = PagedKV(layout, layout.whole, views)
    device = Device(Engine(layout, layout.whole, views, [(view,) for view in views], memory))
    ids, payload = chunk_ids(layout), unaligned(layout.nbytes(layout.whole), 0)
    wanted = payload.copy()
    kv.gather(None, ids, wanted)
    device.copy("gather", [payload], [[ids]])
    assert payload.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("order", "launches"),
    [
        (range(300), 2),  # of 250 chunks of 4 blocks at most
        (range(0, 300, 3), 1),
        (range(299, -1, -1), 2),
        ([*range(100), *range(150, 250)], 2),
        ([5], 1),
        ([], 0),
    ],
)
def test_evenly_spaced_payloads_take_few_launches(order, launches):
    layout = make_layout()
    made, nbytes = engine(layout, blocks=1300), layout.nbytes(layout.whole)
    rng = np.random.default_rng(2)
    chunks = rng.permutation(1300)[: len(order) * layout.blocks].reshape(-1, layout.blocks).tolist()
    slab = np.zeros((300, nbytes), np.uint8)
    payloads = [slab[at] for at in order]
    assert Device(made).copy("gather", payloads, [np.reshape(chunks, (-1, layout.blocks))]) == launches
    kv = made.paged()
    for ids, payload in zip(chunks, payloads, strict=True):
        wanted = np.empty_like(payload)
        kv.gather(None, ids, wanted)
        assert payload.tobytes() == wanted.tobytes()


def test_layers_with_own_tables_take_their_own_blocks():
    layout = make_layout(shapes=(LayerShape(2, 8, 8),) * 4)
    made, other = engine(layout), engine(layout)
    tables, rows = (0, 1, 0, 1), [[1, 2, 3, 4], [-1, 8, 7, 6]]
    payload = unaligned(layout.nbytes(layout.whole), 0)
    kv = PagedKV(layout, layout.whole, other.tensors, tables=tables)
    kv.bind(rows, payload).scatter(None)
    assert Device(made, tables).copy("scatter", [payload], [[row] for row in rows]) == 2
    assert made.snapshot() == other.snapshot()


@pytest.mark.parametrize(
    ("arrangement", "two", "run"),
    [("HND", False, 65536), ("NHD", False, 512), ("HND", True, 256), ("padded blocks", False, 65536)],
)
def test_an_8b_models_blocks_move_in_words_of_16_bytes(arrangement, two, run):
    layout = Layout.uniform(
        layers=2, heads=8, head_dim=128, dtype="bf16", block_tokens=16, chunk_tokens=64, packing="token"
    )
    made = engine(layout, arrangement=arrangement, two=two)
    pieces = Geometry(layout, layout.whole, given_as(made.tensors)).pieces
    assert set(pieces["run"].tolist()) == {run}
    # TensorMemory of the tests may begin at any multiple of 8; an engine's begins at one of 256.
    assert set(pieces["width"].tolist()) <= {8, 16}


def test_a_wrong_access_would_be_seen():
    made = engine(make_layout())
    device, payload = Device(made), unaligned(made.layout.nbytes(made.layout.whole), 0)
    with pytest.raises(AssertionError, match="outside of all memory"):
        device.copy("gather", [payload[:-8]], [[chunk_ids(made.layout)]])
    device.pieces["width"] = 16
    device.pieces["at"] += 8
    with pytest.raises(AssertionError, match="outside of all memory"):
        device.copy("gather", [payload], [[chunk_ids(made.layout)]])


def test_what_kernels_cannot_walk_is_refused():
    layout = Layout((LayerShape(2, 2**5, 0),), "u8", 2, 8, "mamba")
    memory = np.zeros((BLOCKS, 4, 4, 4, 4, 4, 4), np.uint8)[:, ::2, ::2, ::2, ::2, ::2, ::2]
    with pytest.raises(LayoutError, match="6 strides"):
        Geometry(layout, layout.whole, given_as([memory]))
    layout = make_layout(n=1, chunk=1001)
    with pytest.raises(LayoutError, match="1001 blocks"):
        Geometry(layout, layout.whole, given_as(engine(layout).tensors))
    layout = make_layout()
    with pytest.raises(LayoutError, match="expected blocks of"):
        Geometry(layout, layout.whole, given_as(engine(make_layout(n=4)).tensors))


# ---- the witness


@settings(max_examples=150, deadline=None)
@given(engines(), st.integers(1, 12), st.data())
def test_marks_are_the_fingerprints_that_numpys_twin_takes(made, times, data):
    layout, shard, how = made
    layout = Layout(
        tuple(LayerShape(s.heads, s.k * times, s.v * times) for s in layout.layers),
        *(layout.dtype, layout.block_tokens, layout.chunk_tokens, layout.packing),
    )
    engine_ = engine(layout, shard, **how)
    device, kv = Device(engine_), engine_.paged()
    chunks = [chunk_ids(layout, seed) for seed in range(data.draw(st.integers(1, 3)))]
    before = engine_.snapshot()
    for layer in kv.layers:
        if not device.geometry.has_fingerprints:
            with pytest.raises(LayoutError, match="too few"):
                device.marks(layer, chunks)
            return
        wanted = [kv.raw_fingerprint(ids, layer) for ids in chunks]
        assert device.marks(layer, chunks, data.draw(spreads)) == wanted
    assert engine_.snapshot() == before


@pytest.mark.parametrize("length", [241, 255, 256, 1023, 1024, 1025, 1088, 1089, 2048, 4095, 4096, 40961])
def test_marks_are_right_at_every_edge_of_the_algorithm(length):
    layout = Layout((LayerShape(1, length, 0),), "u8", 4, 4, "mamba")
    memory = [np.random.default_rng(length).integers(0, 256, (3, 1, 1, length), np.uint8)]
    device = Device(Engine(layout, layout.whole, memory, [(memory[0],)], memory))
    kv = PagedKV(layout, layout.whole, memory)
    assert device.marks(0, [[2], [0]]) == [kv.raw_fingerprint([2]), kv.raw_fingerprint([0])]


def test_a_mark_tells_of_every_byte():
    layout = make_layout(shapes=(LayerShape(2, 8, 8),), chunk=16)
    made = engine(layout)
    device, ids = Device(made), chunk_ids(layout)
    (right,) = device.marks(0, [ids])
    block = made.bits[0][0][ids[3]].reshape(-1).view(np.uint8)
    assert np.may_share_memory(block, made.memory[0])
    for at in range(block.size):
        block[at] ^= 1 << at % 8
        assert device.marks(0, [ids]) != [right]
        block[at] ^= 1 << at % 8
    assert device.marks(0, [ids]) == [right]
    assert device.marks(0, [[*ids[1:], ids[0]]]) != [right]


def test_a_shard_of_the_heads_is_marked_by_its_own_bytes():
    layout = make_layout(shapes=(LayerShape(4, 16, 16),) * 2)
    whole = engine(layout)
    shard = Shard(1, 2, 1, 2)
    part = [whole.bits[1][0][:, 1:2]]
    device = Device(Engine(layout, shard, part, [(part[0],)], whole.memory))
    kv, ids = PagedKV(layout, shard, part), chunk_ids(layout)
    assert device.marks(1, [ids]) == [kv.raw_fingerprint(ids, 1)]


@settings(max_examples=60, deadline=None)
@given(large_engines(), st.integers(1, 5), st.integers(0, 20_000), st.data())
def test_all_layers_fingerprints_take_one_pass_in_any_room(made, chunks, room, data):
    layout, shard, how = made
    number = shard.end_layer - shard.first_layer
    tables = tuple(data.draw(st.lists(st.integers(0, 1), min_size=number, max_size=number)))
    ours = engine(layout, shard, **how)
    device = Device(ours, tables if len(set(tables)) == 2 else ())
    ids = [chunk_ids(layout, seed) for seed in range(chunks)]
    first = data.draw(st.integers(shard.first_layer, shard.end_layer - 1))
    layers = range(first, data.draw(st.integers(first + 1, shard.end_layer)))
    kv = ours.paged()
    wanted = [[kv.raw_fingerprint(each, layer) for each in ids] for layer in layers]
    assert device.all_marks(layers, ids, data.draw(spreads), room) == wanted


def test_fingerprints_of_like_layers_take_three_launches():
    layout = make_layout(shapes=(LayerShape(2, 32, 32),) * 5)
    made = engine(layout)
    geometry = Geometry(layout, layout.whole, given_as(made.tensors))
    ids = [np.array([chunk_ids(layout)] * 3, np.int32)]
    launches = list(geometry.fingerprint_launches(geometry.layers, 0, ids, (0, 1 << 20), 0, FEW))
    assert [launch.kernel for launch in launches] == ["sums", "chain", "merge"]
