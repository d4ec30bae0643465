"""The object format: what was sealed is read back, and nothing else is ever believed."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.errors import LayoutError
from lmtier.format.layout import PAGE, LayerShape, Layout, Name, Shard, padded
from lmtier.format.objects import (
    MARK_ROOM,
    CorruptObject,
    Header,
    Provenance,
    checksum,
    mark_room,
    peek,
    read_header,
    seal,
    unseal,
)

LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=4, dtype="bf16", block_tokens=2, chunk_tokens=4, packing="token"
)
NAME = Name(bytes(range(32)), LAYOUT.whole)
SIZE = LAYOUT.nbytes(LAYOUT.whole)
MARK = bytes(range(100, 116))
Pair = tuple[bytearray, bytearray]


def sealed(size: int = SIZE) -> Pair:
    page = bytearray(b"\xaa" * PAGE)
    payload = bytearray(np.random.default_rng(4).integers(0, 256, size, np.uint8).tobytes())
    seal(memoryview(page), Header(NAME, LAYOUT, SIZE, MARK), memoryview(payload))
    return page, payload


def read(
    page: bytes | bytearray, payload: bytes | bytearray, name: Name = NAME, got: int | None = None
) -> Header:
    return unseal(memoryview(page), memoryview(payload), name, got)


def reseal(page: bytearray) -> bytearray:
    """What a writer with other ideas would have made: the header's own checksum is right."""
    page[PAGE - 16 :] = checksum(page[: PAGE - 16])
    return page


# ---- what comes back


def test_an_object_comes_back_with_all_it_said():
    header = read(*sealed())
    assert header == Header(NAME, LAYOUT, SIZE, MARK)
    assert header.layout is Layout.from_json(LAYOUT.to_json()), "equal layouts are one object"


@pytest.mark.parametrize("by", ["", "vllm scheduler @host", "é" * 36, "x" * 500])
def test_a_header_says_who_stored_it_and_when(by):
    payload = bytes(SIZE)
    page = bytearray(PAGE)
    header = Header(NAME, LAYOUT, SIZE, MARK, provenance=Provenance(by, 1_700_000_000_000))
    seal(memoryview(page), header, memoryview(payload))
    found, _ = read_header(memoryview(page))
    assert found.provenance == Provenance(by[:72], 1_700_000_000_000)
    assert page[4000:4008] == (1_700_000_000_000).to_bytes(8, "little")  # as docs/FORMAT.md says
    assert page[4008:4080].rstrip(b"\0").decode() == by[:72]


def test_sealing_ignores_what_follows_the_payload():
    page, extent = sealed(PAGE)
    again, _ = sealed(SIZE)
    assert page == again
    extent[SIZE:] = bytes(PAGE - SIZE)
    assert read(page, extent).nbytes == SIZE


@pytest.mark.parametrize("got", [None, SIZE])
def test_an_object_may_arrive_to_the_byte(got):
    page, payload = sealed()
    assert read(page, payload, got=got).nbytes == SIZE


def test_an_object_may_arrive_in_whole_pages():
    page, extent = sealed(padded(SIZE))
    assert read(page, extent, got=padded(SIZE)).nbytes == SIZE
    assert read(page, extent, got=SIZE).nbytes == SIZE


@given(st.binary(max_size=MARK_ROOM))
def test_a_mark_comes_back_with_or_without_its_payload(mark: bytes):
    page, payload = bytearray(PAGE), bytearray(SIZE)
    seal(memoryview(page), Header(NAME, LAYOUT, SIZE, mark), memoryview(payload))
    assert read(page, payload).mark == mark
    assert peek(memoryview(page), NAME)[0].mark == mark


def test_a_mark_longer_than_its_room_is_not_believed():
    page, _ = sealed()
    page[112:116] = struct.pack("<I", 4000)
    with pytest.raises(CorruptObject, match="do not fit"):
        peek(memoryview(reseal(page)), NAME)


def test_golden_header():
    """A change here orphans every object that users have stored: raise the format version instead."""
    page, _ = sealed()
    assert (
        hashlib.sha256(page).hexdigest() == "da9bdbf31cd04e3bb2ab88d2b7e0b369e0c95d5157b359fd61355325a2fbeb80"
    )
    assert page[:16] == b"lmtierKV" + struct.pack("<II", 1, len(LAYOUT.to_json()))
    assert page[16:48] == NAME.key
    assert page[48:64] == struct.pack("<4I", 0, 2, 0, 2)
    assert page[64:80] == b"raw".ljust(16, b"\0")
    assert page[80:96] == struct.pack("<QQ", SIZE, SIZE)
    assert page[112:128] == struct.pack("<I12x", len(MARK))
    assert page[128 + len(LAYOUT.to_json()) :].startswith(MARK)
    assert bytes(page[128:]).rstrip(b"\0").startswith(LAYOUT.to_json())


# ---- what is never believed


def test_every_flipped_bit_of_the_header_page_is_noticed():
    page, payload = sealed()
    for bit in range(PAGE * 8):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptObject):
            read(page, payload)
        page[bit // 8] ^= 1 << bit % 8
    read(page, payload)


def test_every_flipped_bit_of_the_payload_is_noticed():
    page, payload = sealed()
    for bit in range(SIZE * 8):
        payload[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptObject, match="payload checksum"):
            read(page, payload)
        payload[bit // 8] ^= 1 << bit % 8
    read(page, payload)


@given(st.integers(0, SIZE - 1), st.binary(min_size=1, max_size=64))
def test_bytes_written_over_the_payload_are_noticed(at, noise):
    page, payload = sealed()
    before = bytes(payload)
    payload[at : at + len(noise)] = noise[: SIZE - at]
    if payload != before:
        with pytest.raises(CorruptObject):
            read(page, payload)


def test_every_truncation_is_noticed():
    page, payload = sealed()
    whole = bytes(page + payload)
    for length in range(PAGE + SIZE + 17):
        cut = (whole + b"\0" * 16)[:length]
        if length == PAGE + SIZE:
            read(cut[:PAGE], cut[PAGE:])
        else:
            with pytest.raises(CorruptObject):
                read(cut[:PAGE], cut[PAGE:])


def test_every_short_arrival_is_noticed_over_old_bytes():
    page, extent = sealed(padded(SIZE))
    for got in range(-PAGE, padded(SIZE) + 17):
        if got in (SIZE, padded(SIZE)):
            read(page, extent, got=got)
        else:
            with pytest.raises(CorruptObject):
                read(page, extent, got=got)


@pytest.mark.parametrize(
    "name",
    [
        Name(bytes(32), NAME.shard),
        Name(NAME.key, Shard(0, 1, 0, 2)),
        Name(NAME.key, Shard(0, 2, 0, 1)),
    ],
)
def test_another_object_under_our_name_is_noticed(name):
    with pytest.raises(CorruptObject, match="asked for"):
        read(*sealed(), name=name)


def test_a_payload_under_another_objects_header_is_noticed():
    page, payload = sealed()
    with pytest.raises(CorruptObject, match="payload checksum"):
        read(page, bytes(reversed(payload)))


@pytest.mark.parametrize("version", [0, 3, 2**32 - 1])
def test_another_version_with_a_right_checksum_is_refused(version):
    page, payload = sealed()
    page[8:12] = struct.pack("<I", version)
    with pytest.raises(CorruptObject, match=f"format version {version}; this reader knows 1"):
        read(reseal(page), payload)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, b"lmtierkv"),
        (12, struct.pack("<I", 2**32 - 1)),
        (12, struct.pack("<I", 0)),
        (12, struct.pack("<I", PAGE)),
        (48, struct.pack("<4I", 0, 2**32 - 1, 0, 2**32 - 1)),
        (48, struct.pack("<4I", 1, 1, 0, 2)),
        (48, struct.pack("<4I", 2, 1, 0, 2)),
        (64, b"lz4\0"),
        (64, b"\0" * 16),
        (64, b"\0raw"),
        (80, struct.pack("<QQ", 2**63, 2**63)),
        (80, struct.pack("<QQ", 2**64 - 1, 2**64 - 1)),
        (80, struct.pack("<QQ", SIZE, SIZE - 1)),
        (80, struct.pack("<QQ", SIZE - 1, SIZE - 1)),
        (80, struct.pack("<QQ", 0, 0)),
        (128, b"{}"),
        (128, b"\xff\xff"),
        (128, b"[" * 2000),
    ],
)
def test_a_hostile_header_is_refused_and_allocates_nothing(at, value):
    page, payload = sealed()
    page[at : at + len(value)] = value
    refused_cheaply(reseal(page), payload)


@pytest.mark.parametrize(
    "layers",
    [
        "[[1000000000,1,4,4]]",
        "[[-1000000000,1,4,4],[1000000002,2,4,4]]",
        "[[2,2,9223372036854775808,4]]",
        "[" * 3000,
        "[[2,2,4,4]],\"layers\":[[2,2,4,4]]",
    ],
)  # fmt: skip
def test_a_hostile_layout_is_refused_and_allocates_nothing(layers):
    page, payload = sealed()
    text = LAYOUT.to_json().replace(b"[[2,2,4,4]]", layers.encode())
    page[12:16] = struct.pack("<I", len(text))
    page[128 : PAGE - 16] = text.ljust(PAGE - 16 - 128, b"\0")
    refused_cheaply(reseal(page), payload)


def refused_cheaply(page: bytearray, payload: bytearray) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObject):
            read(page, payload)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_raise_anything_else(noise):
    page, payload = sealed()
    for start in (0, 8, 128):
        broken = bytearray(page)
        broken[start : start + len(noise)] = noise
        for text in (broken, reseal(bytearray(broken)), noise):
            try:
                header, _ = read_header(memoryview(text))
            except CorruptObject:
                continue
            assert header.nbytes == header.layout.nbytes(header.name.shard)
    del payload


def test_a_short_payload_is_refused_before_it_is_hashed():
    page, payload = sealed()
    with pytest.raises(CorruptObject, match=f"truncated: {SIZE - 1} of {SIZE}"):
        read(page, payload[:-1])
    with pytest.raises(CorruptObject, match="truncated"):
        read(page, payload[:-1], got=SIZE)


def test_a_mark_too_large_for_the_header_is_not_written():
    layers = tuple(LayerShape(1 + i % 2, 1000 + i, 1000 + i) for i in range(200))
    layout = Layout(layers, "bf16", 1, 1, "token")
    header = Header(Name(NAME.key, layout.whole), layout, 8, mark=bytes(mark_room(layout) + 1))
    page = bytearray(PAGE)
    with pytest.raises(LayoutError, match=r"layout and mark take \d+ \+ \d+ bytes; .* has room for 3872"):
        seal(memoryview(page), header, memoryview(bytearray(8)))
    assert page == bytes(PAGE), "nothing half-written"


def test_the_header_has_room_for_a_hundred_different_layers():
    layers = tuple(LayerShape(1 + i % 2, 1000 + i, 1000 + i) for i in range(100))
    layout = Layout(layers, "bf16", 1, 1, "token")
    shard = Shard(0, 1, 0, 1)
    size = layout.nbytes(shard)
    name = Name(NAME.key, shard)
    page, payload = bytearray(PAGE), bytearray(size)
    seal(memoryview(page), Header(name, layout, size), memoryview(payload))
    assert read(page, payload, name).layout == layout
