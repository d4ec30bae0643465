"""Codecs on bytes: exact ones give back every bit, the others what they promise, all stay in their room."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import blosc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.format import compression
from lmtier.format.compression import CODECS, MissingLibrary, NotDecodable, find
from lmtier.format.layout import LayerShape, Layout, Shard
from tests.kv_bytes import PACKINGS, kv_like, layout_of, no_library, numbers

torch = pytest.importorskip("torch")

EXACT = [name for name, codec in CODECS.items() if codec.is_exact]
APPROXIMATE = [name for name in CODECS if name not in EXACT]
BYTES = Layout((LayerShape(1, 1 << 20, 0),), "u8", 1, 1, "opaque")
GUARD = b"\xc3" * 64


def encoded(name: str, payload: bytes, layout: Layout = BYTES, shard: Shard | None = None) -> bytes:
    """With more room than the payload takes, and a guard behind it. b"": it stays as it is."""
    room = memoryview(bytearray(len(payload) * 2 + 65536) + GUARD)
    got = find(name).encode(memoryview(payload), room[: -len(GUARD)], layout, shard or layout.whole)
    assert bytes(room[-len(GUARD) :]) == GUARD
    return bytes(room[:got])


def decoded(name: str, body: bytes, nbytes: int, layout: Layout = BYTES, shard: Shard | None = None) -> bytes:
    room = memoryview(bytearray(b"\xa5" * nbytes + GUARD))
    try:
        find(name).decode(memoryview(bytearray(body)), room[:nbytes], layout, shard or layout.whole)
    finally:
        assert bytes(room[nbytes:]) == GUARD, "it went beyond its room"
    return bytes(room[:nbytes])


# ---- exact


@pytest.mark.parametrize("name", EXACT)
@settings(deadline=None)
@given(
    st.one_of(
        st.binary(min_size=1, max_size=10_000),
        st.builds(
            lambda piece, times: piece * times, st.binary(min_size=1, max_size=40), st.integers(1, 3000)
        ),
        st.integers(1, 200_000).map(bytes),
    )
)
def test_whatever_goes_in_comes_out(name, payload):
    body = encoded(name, payload)
    if len(payload) < 4096 or len(payload) % 64:
        assert not body, "Blosc's items of 8 bytes come in groups of 8"
    if body:
        assert decoded(name, body, len(payload)) == payload


@pytest.mark.parametrize("name", ["bitshuffle-lz4", "shuffle-zstd"])
def test_blosc_chunks_never_outgrow_what_they_stand_for(name):
    noise = np.random.default_rng(0).bytes(1 << 16)
    assert encoded(name, noise) == b""
    assert 0 < len(encoded(name, bytes(1 << 16))) < 1 << 10


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8_e4m3", "int8", "u8"])
def test_every_kind_of_kv_comes_out_as_it_went_in(name, packing, dtype):
    layout = layout_of(packing, dtype)
    for shard in (layout.whole, Shard(1, 2, 0, 1)):
        size = layout.nbytes(shard)
        payload = kv_like(size // 2, dtype) + bytes(size - size // 2)  # half a chunk of zeros shrinks always
        body = encoded(name, payload, layout, shard)
        assert body
        assert decoded(name, body, size, layout, shard) == payload


def test_bf16_gets_smaller_and_how_much():
    payload, layout = kv_like(1 << 20), layout_of()
    sizes = {name: len(encoded(name, payload, layout)) / len(payload) for name in EXACT}
    assert sizes["shuffle-zstd"] < 0.73 < sizes["bitshuffle-lz4"] < 0.85


@pytest.mark.parametrize("name", CODECS)
def test_an_encoding_too_large_for_its_room_stays_inside(name):
    layout = layout_of(layers=4)
    payload = kv_like(layout.nbytes(layout.whole))
    whole = len(encoded(name, payload, layout))
    for size in sorted({*range(100), whole // 2, whole - 1}):
        room = memoryview(bytearray(size) + GUARD)
        assert find(name).encode(memoryview(payload), room[:size], layout, layout.whole) == 0
        assert bytes(room[size:]) == GUARD


@pytest.mark.parametrize("name", EXACT)
def test_a_bomb_does_not_go_off(name):
    """A few bytes that stand for very many fill the room that was given, or are refused."""
    bomb = encoded(name, bytes(1 << 24))
    assert len(bomb) < 1 << 17
    for room in (0, 1, 4096, 1 << 20, (1 << 24) - 1, (1 << 24) + 1):
        tracemalloc.start()
        try:
            with pytest.raises(NotDecodable):
                decoded_cheaply(name, bomb, room)
        finally:
            tracemalloc.stop()
    assert decoded(name, bomb, 1 << 24) == bytes(1 << 24)


def decoded_cheaply(name: str, body: bytes, nbytes: int) -> None:
    room, source = memoryview(bytearray(nbytes)), memoryview(bytearray(body))
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        find(name).decode(source, room, BYTES, BYTES.whole)
    finally:
        assert tracemalloc.get_traced_memory()[1] - before < 1 << 17


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_spoilt_bytes_are_refused_or_stay_inside_their_room(name, data):
    layout = layout_of()
    size = layout.nbytes(layout.whole)
    body = bytearray(encoded(name, kv_like(size), layout))
    at = data.draw(st.integers(0, 80) | st.integers(0, len(body) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=16))
    body[at : at + len(noise)] = noise
    cut = data.draw(st.none() | st.integers(0, len(body)))
    with suppress(NotDecodable):
        assert len(decoded(name, bytes(body[:cut]), size, layout)) == size


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_noise_is_refused_or_stays_inside_its_room(name, noise):
    layout = layout_of()
    with suppress(NotDecodable):
        decoded(name, noise, layout.nbytes(layout.whole), layout)


@pytest.mark.parametrize("name", ["bitshuffle-lz4", "shuffle-zstd"])
@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, b"\x05"),  # a chunk of Blosc2, which can name plug-ins to load and files to read
        (1, b"\x02"),
        (2, b"\xc5"),  # a compressor that is a plug-in
        (2, b"\x23"),  # a plain copy
        (3, b"\0"),
        (4, struct.pack("<I", 2**31 - 1)),
        (8, struct.pack("<I", 2**31 - 1)),
        (8, bytes(4)),
        (8, struct.pack("<I", 8)),  # blocks so small that the chunk has no room for their offsets
        (12, struct.pack("<I", 2**31 - 1)),
    ],
)
def test_unknown_kinds_of_chunks_are_refused_unread(name, at, value):
    layout = layout_of()
    size = layout.nbytes(layout.whole)
    body = bytearray(encoded(name, kv_like(size), layout))
    body[at : at + len(value)] = value
    with pytest.raises(NotDecodable, match="a chunk"):
        decoded(name, bytes(body), size, layout)


@pytest.mark.parametrize("nbytes", [1 << 16, 3 << 19])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize("name", ["bitshuffle-lz4", "shuffle-zstd"])
def test_what_is_written_is_a_chunk_of_blosc(name, dtype, nbytes):
    """As docs/FORMAT.md says, whatever the writer does on the way; and any reader of Blosc decodes it."""
    payload = kv_like(1 << 15, dtype) + bytes(nbytes - (1 << 15))
    body = encoded(name, payload, layout_of(dtype=dtype))
    item = {"bf16": 2, "fp32": 4, "int8": 8}[dtype]
    flags = {"bitshuffle-lz4": 1 << 5 | 4, "shuffle-zstd": 4 << 5 | 1}[name]
    assert (*body[:2], body[2] & ~0x10, body[3]) == (2, 1, flags, item)
    raw, block, stored = struct.unpack_from("<3I", body, 4)
    assert (raw, stored) == (len(payload), len(body))
    assert (block == nbytes) == (nbytes == 1 << 16), "a small payload is one block"
    assert blosc.decompress(body) == payload


@pytest.mark.parametrize("name", EXACT)
def test_it_works_outside_the_gil(name):
    """A thread that wakes up gets the GIL from nobody who keeps it, so it counts only while a codec works."""
    layout = layout_of()
    payload, room = kv_like(1 << 22), memoryview(bytearray(1 << 23))
    codec, back = find(name), memoryview(bytearray(1 << 22))
    body = encoded(name, payload, layout)
    wakes, is_over = 0, threading.Event()

    def wake() -> None:
        nonlocal wakes
        while not is_over.is_set():
            wakes += 1
            time.sleep(0.0001)

    def moves(work: Callable[[], object]) -> bool:
        before = wakes
        for _ in range(1000):
            work()
            if wakes != before:
                return True
        return False

    thread, interval = threading.Thread(target=wake), sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        assert not moves(lambda: sum(range(10_000))), "a thread that computes keeps the GIL"
        assert moves(lambda: codec.encode(memoryview(payload), room, layout, layout.whole))
        assert moves(lambda: codec.decode(memoryview(bytearray(body)), back, layout, layout.whole))
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()


# ---- approximate


@pytest.mark.parametrize(("name", "error"), [("fp8", 0.03), ("int8", 0.012)])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_an_approximation_is_as_near_as_it_says(name, error, packing, dtype):
    layout = layout_of(packing, dtype)
    for shard in (layout.whole, Shard(1, 2, 1, 2)):
        payload = kv_like(layout.nbytes(shard), dtype)
        body = encoded(name, payload, layout, shard)
        assert len(payload) / len(body) > layout.itemsize * 0.94
        before = numbers(memoryview(payload), layout)
        after = numbers(memoryview(decoded(name, body, len(payload), layout, shard)), layout)
        assert 0 < np.linalg.norm(after - before) / np.linalg.norm(before) < error


@pytest.mark.parametrize("name", APPROXIMATE)
@pytest.mark.parametrize("packing", PACKINGS)
def test_each_head_and_channel_has_a_scale_of_its_own(name, packing):
    layout = layout_of(packing)
    payload = bytearray(layout.nbytes(layout.whole))
    elements = np.frombuffer(payload, "u1")
    for layer in range(len(layout.layers)):
        for plane in layout.planes(elements, layout.whole, layer):
            _, heads, _, channels = plane.shape
            scale = 2.0 ** ((np.arange(heads * channels) * 37 + layer) % 60 - 30)
            values = np.broadcast_to(scale.reshape(1, heads, 1, channels).astype("f4"), plane.shape)
            plane[...] = np.ascontiguousarray(values).view("u4") >> 16
    back = decoded(name, encoded(name, bytes(payload), layout), len(payload), layout)
    assert back == payload, "a channel of one number is exact, however large its neighbours"


@pytest.mark.parametrize("name", APPROXIMATE)
def test_doing_it_twice_adds_nothing(name):
    layout = layout_of("planes")
    once = decoded(
        name, encoded(name, kv_like(layout.nbytes(layout.whole)), layout), layout.nbytes(layout.whole), layout
    )
    twice = decoded(name, encoded(name, once, layout), len(once), layout)
    a, b = numbers(memoryview(once), layout), numbers(memoryview(twice), layout)
    assert np.linalg.norm(a - b) / np.linalg.norm(a) < 0.003, "within the rounding of bf16"


@pytest.mark.parametrize("name", APPROXIMATE)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_not_approximated(name, number):
    layout = layout_of(dtype="fp32")
    values = np.frombuffer(kv_like(layout.nbytes(layout.whole), "fp32"), "f4").copy()
    values[1234] = number
    assert encoded(name, values.tobytes(), layout) == b""


@pytest.mark.parametrize("name", APPROXIMATE)
@pytest.mark.parametrize("layout", [BYTES, layout_of(dtype="fp8_e4m3"), layout_of(dtype="int8")])
def test_what_it_does_not_understand_is_left_alone(name, layout):
    assert encoded(name, bytes(layout.nbytes(layout.whole)), layout) == b""
    with pytest.raises(NotDecodable, match="is not for"):
        decoded(name, bytes(100), layout.nbytes(layout.whole), layout)


@pytest.mark.parametrize("name", APPROXIMATE)
def test_another_length_than_its_layout_says_is_refused(name):
    layout = layout_of()
    size = layout.nbytes(layout.whole)
    body = encoded(name, kv_like(size), layout)
    for wrong in (b"", body[:-1], body + b"\0", body[: len(body) // 2]):
        with pytest.raises(NotDecodable, match="its layout says"):
            decoded(name, wrong, size, layout)


def test_fp8_is_the_one_that_torch_knows():
    """Every e4m3 byte, and the nearest one of every bf16 that is in its range."""
    known = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    finite = np.isfinite(known)
    assert finite.sum() == 254
    assert (compression._fp8_values()[finite] == known[finite]).all()
    every = (np.arange(1 << 16, dtype="u4") << 16).view("f4")
    inside = np.abs(every) <= 448
    theirs = torch.from_numpy(every[inside]).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (compression._as_fp8()[inside] == theirs).all()


# ---- libraries


def test_a_missing_library_is_one_clear_sentence():
    needs = r"^codec=shuffle-zstd needs the package blosc: pip install 'lmtier\[codecs\]'$"
    with no_library():
        with pytest.raises(MissingLibrary, match=needs):
            find("shuffle-zstd")
        assert find("int8").name == "int8", "numpy is enough for it"
    assert find("shuffle-zstd").name == "shuffle-zstd"


def test_nothing_is_loaded_before_it_is_named():
    code = "import lmtier.core.cache; print('libblosc' in open('/proc/self/maps').read())"
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert out.stdout == "False\n"
