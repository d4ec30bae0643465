"""What bytes mean: every fast way of reading an object agrees with `Layout.address`, the slow definition."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.errors import LayoutError
from lmtier.format.layout import (
    DTYPE_BYTES,
    KNOWN_PACKINGS,
    PAGE,
    LayerShape,
    Layout,
    Name,
    Shard,
    _shard,
    cover,
    form_of,
    overlapping,
    padded,
    stored_size,
)
from lmtier.format.objects import Header, mark_room, read_header, seal

KEY = bytes(range(32))
LLAMA = Layout.uniform(
    layers=32, heads=8, head_dim=128, dtype="bf16", block_tokens=16, chunk_tokens=256, packing="token"
)


@st.composite
def layouts(draw: st.DrawFn, packings: tuple[str, ...] = (*KNOWN_PACKINGS, "cpu:amx")) -> Layout:
    packing = draw(st.sampled_from(packings))
    unit = draw(st.integers(1, 3))
    one_plane = packing not in KNOWN_PACKINGS or packing == "latent"
    shape = st.builds(
        LayerShape,
        st.integers(1, 3).map(lambda times: times * unit),
        st.integers(1, 4).map(lambda k: k * 4),
        st.just(0) if one_plane else st.integers(1, 5),
    )
    layers = draw(st.lists(shape, min_size=1, max_size=4))
    n = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(list(DTYPE_BYTES)))
    return Layout(tuple(layers), dtype, n, n * draw(st.integers(1, 3)), packing)


@st.composite
def shards(draw: st.DrawFn, layout: Layout) -> Shard:
    first = draw(st.integers(0, len(layout.layers) - 1))
    low = draw(st.integers(0, layout.head_units - 1))
    return Shard(
        first,
        draw(st.integers(first + 1, len(layout.layers))),
        low,
        draw(st.integers(low + 1, layout.head_units)),
    )


def elements(layout: Layout, shard: Shard):
    for layer in range(shard.first_layer, shard.end_layer):
        heads, k, v = layout.layers[layer]
        unit = heads // layout.head_units
        for head, token in product(
            range(shard.first_head * unit, shard.end_head * unit), range(layout.chunk_tokens)
        ):
            for plane, width in ((0, k), (1, v)):
                for element in range(width):
                    yield layer, head, token, plane, element


@settings(deadline=None)
@given(layouts(KNOWN_PACKINGS), st.data())
def test_planes_read_every_element_at_its_address(layout, data):
    shard = data.draw(shards(layout))
    size = layout.itemsize
    payload = np.random.default_rng(0).integers(0, 256, layout.nbytes(shard), np.uint8)
    views = {n: layout.planes(payload, shard, n) for n in range(shard.first_layer, shard.end_layer)}
    for layer, head, token, plane, element in elements(layout, shard):
        at = layout.address(shard, layer=layer, head=head, token=token, plane=plane, element=element)
        block, slot = divmod(token, layout.block_tokens)
        ours = head - shard.first_head * (layout.layers[layer].heads // layout.head_units)
        read = views[layer][plane][block, ours, slot, element]
        assert read.tobytes() == payload[at : at + size].tobytes()


@settings(deadline=None)
@given(layouts(KNOWN_PACKINGS), st.data())
def test_addresses_fill_the_payload_exactly_once(layout, data):
    shard = data.draw(shards(layout))
    found = sorted(
        layout.address(shard, layer=layer, head=head, token=token, plane=plane, element=element)
        for layer, head, token, plane, element in elements(layout, shard)
    )
    assert found == list(range(0, layout.nbytes(shard), layout.itemsize))


@given(layouts(KNOWN_PACKINGS))
def test_planes_are_views_never_copies(layout):
    payload = np.zeros(layout.nbytes(layout.whole), np.uint8)
    for layer in range(len(layout.layers)):
        for plane in layout.planes(payload, layout.whole, layer):
            plane[...] = np.iinfo(plane.dtype).max
    assert (payload == 255).all()


@given(layouts(), st.data())
def test_offsets_are_the_running_sum_of_the_layers(layout, data):
    shard = data.draw(shards(layout))
    offsets = layout.offsets(shard)
    sizes = [layout.layer_bytes(layer, shard) for layer in range(shard.first_layer, shard.end_layer)]
    assert [b - a for a, b in pairwise(offsets)] == sizes
    assert offsets[0] == 0
    assert layout.nbytes(shard) == offsets[-1] == sum(sizes)
    for layer, size in zip(range(shard.first_layer, shard.end_layer), sizes, strict=True):
        assert size == layout.blocks * layout.heads(layer, shard) * layout.head_block_bytes(layer)


def test_llama_takes_32_mib_a_chunk():
    assert LLAMA.nbytes(LLAMA.whole) == 32 << 20
    assert LLAMA.layer_bytes(0, LLAMA.whole) == 1 << 20
    assert LLAMA.blocks == 16


# ---- ranks


@given(layouts(), st.data())
def test_what_the_ranks_write_tiles_the_model_exactly_once(layout, data):
    units = layout.head_units
    ranks = data.draw(
        st.sampled_from([r for r in range(1, 4 * units + 1) if units % r == 0 or r % units == 0])
    )
    cut = data.draw(st.integers(0, len(layout.layers)))
    stages = [(a, b) for a, b in ((0, cut), (cut, len(layout.layers))) if a < b]
    written = [
        layout.shard(rank=rank, ranks=ranks, layers=stage)
        for stage in stages
        for rank in range(ranks)
        if layout.writes(rank=rank, ranks=ranks)
    ]
    cells = [
        (layer, head)
        for shard in written
        for layer in range(shard.first_layer, shard.end_layer)
        for head in range(shard.first_head, shard.end_head)
    ]
    assert sorted(cells) == list(product(range(len(layout.layers)), range(units)))
    assert sum(map(layout.nbytes, written)) == layout.nbytes(layout.whole)


def test_of_ranks_that_share_a_shard_one_writes():
    layout = replace(LLAMA, layers=(LayerShape(2, 128, 128),) * 4)
    held = [layout.shard(rank=rank, ranks=8) for rank in range(8)]
    assert held == [Shard(0, 4, 0, 1)] * 4 + [Shard(0, 4, 1, 2)] * 4
    assert [layout.writes(rank=rank, ranks=8) for rank in range(8)] == [True, False, False, False] * 2


def test_layers_of_unequal_heads_split_in_common_units():
    layout = replace(LLAMA, layers=(LayerShape(8, 64, 64), LayerShape(4, 64, 64), LayerShape(12, 64, 64)))
    half = layout.shard(rank=1, ranks=2)
    assert half == Shard(0, 3, 2, 4)
    assert [layout.heads(layer, half) for layer in range(3)] == [4, 2, 6]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 3), (0, 12), (-1, 2), (2, 2), (0, 0), (0, -1)])
def test_ranks_that_do_not_split_the_heads_are_refused(rank, ranks):
    with pytest.raises(LayoutError, match="does not split 8 KV heads evenly"):
        LLAMA.shard(rank=rank, ranks=ranks)


@pytest.mark.parametrize(
    "shard",
    [
        Shard(0, 33, 0, 8),
        Shard(0, 32, 0, 9),
        Shard(4, 4, 0, 8),
        Shard(5, 4, 0, 8),
        Shard(0, 1, 3, 3),
        Shard(-1, 2, 0, 8),
    ],
)
def test_a_shard_outside_of_the_model_is_refused(shard):
    with pytest.raises(LayoutError, match="empty or outside"):
        LLAMA.nbytes(shard)


# ---- putting shards together


@settings(deadline=None)
@given(st.data())
def test_a_cover_is_exact_and_every_part_is_in_its_source(data):
    def edges(most: int) -> tuple[int, int]:
        low = data.draw(st.integers(0, most - 1))
        return low, data.draw(st.integers(low + 1, most))

    want = Shard(*edges(6), *edges(6))
    have: list[Shard] = []
    for _ in range(data.draw(st.integers(0, 12))):
        shard = Shard(*edges(6), *edges(6))
        is_beside = not any(shard.overlap(each) for each in have)
        assert (overlapping([*have, shard]) is None) == is_beside
        have += [shard] if is_beside else []
    plan = cover(want, have)

    def cells(shard: Shard) -> set[tuple[int, int]]:
        return set(product(range(shard[0], shard[1]), range(shard[2], shard[3])))

    possible = cells(want) <= set().union(*map(cells, have))
    assert (plan is not None) == possible
    if plan is not None:
        supplied = [cell for source, part in plan for cell in cells(part)]
        assert sorted(supplied) == sorted(cells(want)), "each cell once"
        assert all(source in have and cells(part) <= cells(source) for source, part in plan)


@pytest.mark.parametrize(("stored", "wanted"), [(1, 2), (2, 1), (2, 8), (8, 2), (4, 4), (16, 2), (2, 16)])
def test_tensor_parallel_sizes_change_up_and_down(stored, wanted):
    have = {LLAMA.shard(rank=rank, ranks=stored) for rank in range(stored)}
    for rank in range(wanted):
        want = LLAMA.shard(rank=rank, ranks=wanted)
        plan = cover(want, have)
        assert plan is not None
        assert sum(LLAMA.nbytes(part) for _, part in plan) == LLAMA.nbytes(want)
        assert len(plan) == max(1, min(stored, 8) // min(wanted, 8))


def test_a_missing_rank_is_a_miss():
    assert cover(LLAMA.whole, [LLAMA.shard(rank=0, ranks=2)]) is None
    assert cover(LLAMA.whole, []) is None


# ---- what can be read as what


def test_packings_read_one_another_unless_opaque():
    planes = replace(LLAMA, packing="planes", block_tokens=64)
    assert LLAMA.reads(planes)
    assert planes.reads(LLAMA)
    amx = replace(LLAMA, packing="cpu:amx", layers=(LayerShape(8, 4096, 0),) * 32)
    assert amx.reads(replace(amx))
    assert not amx.reads(replace(amx, block_tokens=32))
    assert not amx.reads(replace(amx, packing="cpu:neon"))
    assert not LLAMA.reads(amx)
    assert not amx.reads(LLAMA)


@pytest.mark.parametrize(
    "other",
    [
        replace(LLAMA, dtype="fp16"),
        replace(LLAMA, chunk_tokens=512),
        replace(LLAMA, layers=LLAMA.layers[:-1]),
        replace(LLAMA, layers=(LayerShape(8, 64, 192),) * 32),
    ],
)
def test_another_models_bytes_are_never_read(other):
    assert not LLAMA.reads(other)
    assert not form_of(LLAMA, [LLAMA.whole]).serves(form_of(other, [other.whole]))


def test_opaque_bytes_have_no_elements():
    layout = Layout((LayerShape(1, 8, 0),), "u8", 4, 4, "amx")
    with pytest.raises(LayoutError, match="opaque"):
        layout.planes(np.zeros(8, np.uint8), layout.whole, 0)
    with pytest.raises(LayoutError, match="opaque"):
        layout.address(layout.whole, layer=0, head=0, token=0, plane=0, element=0)


# ---- what cannot be declared


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "fp61"}, "unknown dtype 'fp61'; known: fp32, fp16, bf16"),
        ({"dtype": "float16"}, "unknown dtype 'float16'; write 'fp16'"),
        ({"dtype": "torch.bfloat16"}, "unknown dtype 'torch.bfloat16'; write 'bf16'"),
        ({"dtype": np.float16}, "write 'fp16'"),
        ({"dtype": np.dtype("float32")}, r"unknown dtype dtype\('float32'\); write 'fp32'"),
        ({"dtype": "float8_e4m3fn"}, "write 'fp8_e4m3'"),
        (
            {"packing": "tokens"},
            "'tokens', which is none of token, planes, latent, cpu-vec, so opaque, without V",
        ),
        ({"layers": ()}, "at least one layer"),
        ({"block_tokens": 0}, "whole blocks"),
        ({"block_tokens": -16}, "whole blocks"),
        ({"chunk_tokens": 0}, "whole blocks"),
        ({"chunk_tokens": 100}, "chunk_tokens=100 must be whole blocks of block_tokens=16"),
        ({"packing": ""}, "is not a name"),
        ({"packing": "../token"}, "is not a name"),
        ({"packing": "token\n"}, "is not a name"),
        ({"packing": "x" * 65}, "is not a name"),
        ({"packing": "latent"}, "layer 0: heads=8, k=128, v=128 does not fit packing 'latent'"),
        ({"packing": "amx"}, "does not fit packing 'amx'"),
        ({"layers": (LayerShape(8, 128, 0),)}, "does not fit"),
        ({"layers": (LayerShape(8, 128, 128), LayerShape(0, 128, 128))}, "layer 1"),
        ({"layers": (LayerShape(8, -1, 128),)}, "does not fit"),
        ({"layers": (LayerShape(8, 128, -1),)}, "does not fit"),
        ({"layers": (LayerShape(8, 128, 128),) * 1025}, "at most 1024: not 1025"),
        ({"layers": (LayerShape(8, 10**400, 128),)}, "takes more than 256 TiB"),
        ({"chunk_tokens": 16 * 10**18}, "takes more than 256 TiB"),
        (
            {"layers": (LayerShape(8, 128, 128), LayerShape(8, 64, 64)) * 200},
            "takes 5282 bytes as JSON, and an object's header has room for 3800: too many of its layers",
        ),
    ],
)
def test_impossible_layouts_are_refused_by_name(change, said):
    with pytest.raises(LayoutError, match=said):
        replace(LLAMA, **change)


# ---- JSON


@given(layouts())
def test_json_gives_back_the_same_layout_object(layout):
    text = layout.to_json()
    assert Layout.from_json(text) == layout
    assert Layout.from_json(text) is Layout.from_json(bytes(bytearray(text)))
    assert Layout.from_json(text).to_json() == text


def test_equal_layers_take_one_line():
    assert LLAMA.to_json() == (
        b'{"block_tokens":16,"chunk_tokens":256,"dtype":"bf16","layers":[[32,8,128,128]],"packing":"token"}'
    )


GOOD = json.loads(LLAMA.to_json())
BAD: list[dict[str, Any]] = [
    {"layers": []},
    {"layers": [[0, 8, 128, 128]]},
    {"layers": [[-1, 8, 128, 128]]},
    {"layers": [[10**9, 8, 128, 128]]},
    {"layers": [[2**63, 8, 128, 128]]},
    {"layers": [[-(10**9), 1, 1, 1], [10**9, 1, 1, 1]]},
    {"layers": [[float("inf"), 8, 128, 128]]},
    {"layers": [[1025, 8, 128, 128]]},
    {"packing": "x" * 4000},
    {"layers": [[16, 8, 128, 128], [16, 8, 128, 128]]},
    {"layers": [[32, 8, 128]]},
    {"layers": [[32, 8, 128, 128, 1]]},
    {"layers": [[]]},
    {"layers": ["32"]},
    {"layers": [[32, "8", 128, 128]]},
    {"layers": [[32, 8.0, 128, 128]]},
    {"layers": {"32": 1}},
    {"layers": 7},
    {"dtype": ["bf16"]},
    {"dtype": None},
    {"packing": 5},
    {"packing": None},
    {"block_tokens": "16"},
    {"block_tokens": 16.0},
    {"block_tokens": True, "chunk_tokens": 1},
    {"chunk_tokens": None},
    {"chunk_tokens": float("nan")},
    {"extra": 1},
]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"1",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        LLAMA.to_json() + b" ",
        b" " + LLAMA.to_json(),
        LLAMA.to_json()[:-1],
        *(json.dumps({**GOOD, **change}, separators=(",", ":"), sort_keys=True).encode() for change in BAD),
    ],
)
def test_anything_but_a_canonical_layout_is_refused(text):
    with pytest.raises(LayoutError):
        Layout.from_json(text)


# ---- names


@given(st.binary(min_size=32, max_size=32), st.tuples(*[st.integers(0, 99_999)] * 4))
def test_names_and_shards_round_trip_as_text(key, numbers):
    name = Name(key, Shard(*numbers))
    assert Shard.parse(str(name.shard)) == name.shard
    assert Name.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        "../" + "0" * 61 + ".L0-1H0-1",
        "/etc/passwd",
        "0" * 64,
        "0" * 64 + ".",
        "0" * 64 + ".L0-1",
        "0" * 64 + ".L0-1H0-1.tmp",
        "0" * 64 + ".L0-1H0-1\n",
        "0" * 64 + ".L0-1H0-1/..",
        "0" * 64 + ".L-1-1H0-1",
        "0" * 64 + ".L0-100000H0-1",
        "0" * 64 + ".L0-١H0-1",
        "0" * 63 + ".L0-1H0-1",
        "0" * 65 + ".L0-1H0-1",
        "A" * 64 + ".L0-1H0-1",
        "٠" * 64 + ".L0-1H0-1",
        "0" * 64 + "\0.L0-1H0-1",
    ],
)
def test_what_is_not_a_name_is_none(text):
    assert Name.parse(text) is None


@given(st.text(max_size=100))
def test_no_text_makes_the_parser_raise(text):
    parsed = Name.parse(text)
    assert parsed is None or Name.parse(str(parsed)) == parsed


@pytest.mark.parametrize("text", [f"{KEY.hex()}.L00-1H0-1", f"{KEY.hex()}.L0-01H0-1"])
def test_one_object_has_one_spelling(text):
    parsed = Name.parse(text)
    assert parsed is None or str(parsed) == text


# ---- forms


def test_pages():
    assert [padded(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
    assert stored_size(1) == 2 * PAGE


def test_every_layout_that_can_be_made_fits_a_header():
    """Found too late, each store of it would fail, and the tier be left alone for everybody else's."""
    layers: tuple[LayerShape, ...] = ()
    with suppress(LayoutError):
        while True:
            layers += (LayerShape(8, 128, 128), LayerShape(8, 64, 64))
            fits = replace(LLAMA, layers=layers)
    assert mark_room(fits, is_sealed=True) >= 16, "a fingerprint, also where objects are sealed"
    page, payload = memoryview(bytearray(PAGE)), memoryview(bytearray(fits.nbytes(fits.whole)))
    header = Header(Name(bytes(32), fits.whole), fits, len(payload), mark=bytes(mark_room(fits)))
    seal(page, header, payload)
    assert read_header(page)[0] == header


def test_a_forms_memory_grows_with_layers_plus_shards():
    layout = replace(LLAMA, layers=(LayerShape(1024, 64, 64),) * 1024)
    shards = [Shard(0, 1024, head, head + 1) for head in range(1024)]
    tracemalloc.start()
    try:
        form = form_of(layout, shards)
        assert sum(form.sizes) == layout.nbytes(layout.whole)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_long_text_is_no_shard_and_is_not_remembered():
    before = _shard.cache_info().currsize
    for number in range(10):
        assert Shard.parse(f"{number}" * 100) is None
        assert Shard.parse(f"L0-1H0-{number}{'0' * 100}") is None
    assert _shard.cache_info().currsize == before


def test_a_form_is_one_object_and_knows_whom_it_serves():
    halves = [LLAMA.shard(rank=rank, ranks=2) for rank in range(2)]
    form = form_of(LLAMA, halves)
    assert form is form_of(replace(LLAMA), tuple(halves))
    assert form.sizes == (16 << 20,) * 2
    assert form.slab_bytes == 32 << 20
    assert form.stored_bytes == (32 << 20) + 2 * PAGE
    assert form.serves(form)
    assert form.serves(form_of(LLAMA, [LLAMA.whole]))
    assert form.serves(form_of(replace(LLAMA, packing="planes"), [LLAMA.shard(rank=3, ranks=4)]))
    assert not form_of(LLAMA, halves[:1]).serves(form_of(LLAMA, [LLAMA.whole]))
    assert form_of(None, halves, [1, 2]).serves(form)
    with pytest.raises(LayoutError, match="needs the sizes"):
        form_of(None, halves)
