"""The object format with codecs: what is stored is checked, what is decoded is bounded."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.format.compression import CODECS, find
from lmtier.format.keys import VALUES
from lmtier.format.layout import PAGE, Name, padded
from lmtier.format.objects import (
    NO_MARK,
    CorruptObject,
    Header,
    Scratch,
    UnreadableObject,
    check,
    checksum,
    encode,
    max_encoded_bytes,
    peek,
    seal,
    unseal,
)
from lmtier.testing import Sample, pages, sample
from tests.kv_bytes import kv_sample, layout_of, no_library

MARK = bytes(range(16))
EXACT = [name for name, codec in CODECS.items() if codec.is_exact]
SMALLER = ["bitshuffle-lz4", "shuffle-zstd", "fp8", "int8"]
every_codec = pytest.mark.parametrize("name", SMALLER)


def at_rest(each: Sample, name: str) -> tuple[bytearray, bytearray]:
    """What a tier with this codec writes: header page, body in whole pages."""
    page = pages(PAGE)
    header, payload = encode(each.header, each.payload, find(name), Scratch())
    seal(page, header, payload)
    return bytearray(page), bytearray(payload)


def read(
    page: bytearray, body: bytearray, name: Name, room: int, got: int | None = None
) -> tuple[Header, bytes]:
    extent = pages(room)
    extent[:] = b"\xa5" * len(extent)
    extent[: len(body)] = body[: len(extent)]
    header = unseal(memoryview(page), extent, name, len(body) if got is None else got, Scratch())
    return header, bytes(extent)


def reseal(page: bytearray) -> bytearray:
    page[PAGE - 16 :] = checksum(page[: PAGE - 16])
    return page


@every_codec
def test_the_header_says_how_it_is_stored(name):
    each = kv_sample(1, mark=MARK)
    page, body = at_rest(each, name)
    header, digest = peek(memoryview(page), each.name)
    raw, stored = struct.unpack_from("<QQ", page, 80)
    assert page[64:80] == name.encode().ljust(16, b"\0")
    assert raw == header.nbytes == each.header.nbytes
    assert stored == header.encoded == header.stored_nbytes < raw
    assert len(body) == padded(stored) < each.room
    assert digest == checksum(body[:stored]), "the checksum is of what is stored"
    assert not any(body[stored:]), "zeros to the end of the page"
    assert header.codec == name


@every_codec
def test_it_comes_back_and_its_mark_with_it_if_it_is_exact(name):
    each = kv_sample(2, mark=MARK)
    header, extent = read(*at_rest(each, name), each.name, each.room)
    assert (header.name, header.layout, header.nbytes) == (each.name, each.header.layout, each.header.nbytes)
    if name in EXACT:
        assert extent == each.payload
        assert header.mark == MARK
    else:
        assert extent != each.payload
        assert header.mark == NO_MARK, "the blocks it was made of will not come back"


@every_codec
def test_nothing_of_an_earlier_extent_follows_the_payload(name):
    """What is loaded may be stored elsewhere, in whole pages."""
    each = kv_sample(3, replace(layout_of(layers=4), chunk_tokens=56))
    assert each.header.nbytes % PAGE
    header, extent = read(*at_rest(each, name), each.name, each.room)
    assert not any(extent[header.nbytes :])


@pytest.mark.parametrize("name", CODECS)
def test_what_does_not_shrink_enough_is_stored_as_it_is(name):
    each = sample(4, 64 * PAGE)
    page, body = at_rest(each, name)
    assert bytes(page + body) == each.at_rest()
    assert peek(memoryview(page), each.name)[0] == each.header


def test_a_codec_must_save_a_page_and_a_sixteenth():
    assert [max_encoded_bytes(nbytes) for nbytes in (0, 1, PAGE, PAGE + 1, 16 * PAGE, 32 * PAGE)] == [
        *(0, 0, 0, 1, 15 * PAGE, 30 * PAGE)
    ]


@every_codec
def test_a_named_value_is_stored_as_it_is(name):
    each = kv_sample(5, mark=MARK)
    header = replace(each.header, name=Name(VALUES + bytes(28), each.name.shard))
    assert encode(header, each.payload, find(name), Scratch()) == (header, each.payload)


@every_codec
def test_memory_to_work_in_is_taken_once(name):
    scratch, each = Scratch(), kv_sample(6)
    first = scratch.take(each.room)
    for _ in range(3):
        header, body = encode(each.header, each.payload, find(name), scratch)
        page = pages(PAGE)
        seal(page, header, body)
        extent = pages(each.room)
        extent[: len(body)] = body
        unseal(page, extent, each.name, len(body), scratch)
    assert np.shares_memory(np.frombuffer(first, "u1"), np.frombuffer(scratch.take(1), "u1"))


# ---- what is never believed


@every_codec
def test_every_flipped_bit_is_noticed(name):
    each = kv_sample(7)
    page, body = at_rest(each, name)
    chance = np.random.default_rng(0)
    for where, size in ((page, PAGE), (body, peek(memoryview(page), each.name)[0].encoded)):
        for at in {0, size - 1, *chance.integers(0, size, 200).tolist()}:
            where[at] ^= 1 << at % 8
            with pytest.raises(CorruptObject):
                read(page, body, each.name, each.room)
            where[at] ^= 1 << at % 8
    read(page, body, each.name, each.room)


@every_codec
def test_every_other_length_is_noticed(name):
    each = kv_sample(8)
    page, body = at_rest(each, name)
    stored = peek(memoryview(page), each.name)[0].encoded
    for got in {0, 1, stored - 1, stored + 1, len(body) - 1, len(body) + 1, len(body) + PAGE, each.room}:
        if got not in (stored, len(body)):
            with pytest.raises(CorruptObject):
                read(page, body, each.name, each.room, got)


@every_codec
@pytest.mark.parametrize(
    ("raw", "stored"),
    [
        (0, 0),
        (0, 1),
        (1, 1),
        (1, 0),
        (2**64 - 1, 1),
        (2**63, 2**62),
        (None, 2**64 - 1),
        (None, None),
        (-PAGE, -1),
    ],
)
def test_lengths_that_nobody_writes_are_refused(name, raw, stored):
    """None: as it is decoded; negative: so much less."""
    each = kv_sample(9)
    page, body = at_rest(each, name)
    sizes = [
        each.header.nbytes if n is None else n + each.header.nbytes if n < 0 else n for n in (raw, stored)
    ]
    struct.pack_into("<QQ", page, 80, *sizes)
    with pytest.raises(CorruptObject):
        read(reseal(page), body, each.name, each.room)


@pytest.mark.parametrize("name", EXACT)
def test_a_bomb_with_right_checksums_is_corrupt(name):
    """Its bytes stand for more, or for less, than its layout says."""
    each = kv_sample(10)
    for nbytes in (each.header.nbytes - 8, each.header.nbytes + 8, 1 << 24):
        memory = memoryview(bytearray(nbytes * 2))
        got = find(name).encode(memoryview(bytes(nbytes)), memory, each.header.layout, each.name.shard)
        page, body = pages(PAGE), memory[: padded(got)]
        seal(page, replace(each.header, codec=name, encoded=got), body)
        with pytest.raises(CorruptObject, match=name):
            read(bytearray(page), bytearray(body), each.name, each.room)


@every_codec
def test_an_object_beyond_its_readers_room_is_refused(name):
    each = kv_sample(11)
    page, body = at_rest(each, name)
    with pytest.raises(CorruptObject, match="decoded, where"):
        read(page, body, each.name, each.room - PAGE)


@every_codec
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_noise_with_right_checksums_stays_within_bounds(name, data):
    each = kv_sample(12)
    page, body = at_rest(each, name)
    header = peek(memoryview(page), each.name)[0]
    noise = data.draw(st.binary(min_size=1, max_size=40))
    at = data.draw(st.integers(0, 100) | st.integers(0, header.encoded - 1))
    body[at : at + len(noise)] = noise[: len(body) - at]
    other = data.draw(st.sampled_from(list(CODECS)))
    stored = data.draw(st.just(header.encoded) | st.integers(1, header.encoded))
    page = bytearray(PAGE)
    seal(memoryview(page), replace(header, codec=other, encoded=stored), memoryview(body))
    body = body[: padded(stored)]
    guard = pages(each.room + PAGE)
    guard[:] = b"\xc3" * len(guard)
    guard[: len(body)] = body
    with suppress(CorruptObject):
        unseal(memoryview(page), guard[: each.room], each.name, len(body), Scratch())
    assert bytes(guard[each.room :]) == b"\xc3" * PAGE


def test_a_missing_library_makes_no_object_corrupt():
    each = kv_sample(13)
    page, body = at_rest(each, "shuffle-zstd")
    with no_library():
        with pytest.raises(UnreadableObject, match="codec=shuffle-zstd needs the package blosc"):
            read(page, body, each.name, each.room)
        assert check(memoryview(page), memoryview(body), each.name).nbytes == each.header.nbytes
        body[5] ^= 1
        with pytest.raises(CorruptObject, match="checksum"):
            read(page, body, each.name, each.room)
