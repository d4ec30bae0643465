"""Keys name exactly these tokens, this model, these images, this salt: the same ones everywhere, for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmtier.errors import LayoutError, MisuseError
from lmtier.format import keys
from lmtier.format.keys import (
    NO_TENANT,
    Extra,
    Identity,
    KeyChain,
    as_tokens,
    check_skip,
    is_value,
    namespace,
    seed,
    tenant,
    tenant_of,
    value_key,
    weights_digest,
)

LLAMA = Identity(
    model="meta-llama/Meta-Llama-3-8B",
    weights="8cde5ca8380496c9a6cc7ef3a8b46a0372a1d920",
    dtype="bf16",
    layers=32,
    kv_heads=8,
    head_dim=128,
    planes=2,
    attention="rope:500000",
)
OTHER: dict[str, Any] = {
    "model": "meta-llama/Meta-Llama-3-8C",
    "weights": "8cde5ca8380496c9a6cc7ef3a8b46a0372a1d921",
    "dtype": "fp16",
    "layers": 33,
    "kv_heads": 4,
    "head_dim": 64,
    "planes": 1,
    "attention": "rope:10000",
}
ROOT = seed(LLAMA, 4)
Key = bytes


def keys_of(tokens: object, extras: tuple[Extra, ...] = (), root: Key = ROOT, size: int = 4) -> list[Key]:
    return KeyChain(root, size, tokens, extras).keys


# ---- golden vectors: a change here orphans every object that users have stored


def test_golden_seed():
    assert LLAMA.digest().hex() == "a38f5a8620814d5ae6144670e346a08c0ae80dfe9613d079832b9cf2052ecfb9"
    assert ROOT.hex() == "f697c55a000000001e2ef1b0e41f95bd3b3cb845e7c59ccba666af93db8d364f"
    assert (
        seed(LLAMA, 256, lora="sql", salt="tenant").hex()
        == "f697c55ae7c39d4755f1ba1c41dbb7558bf3e86418db62889a3aa2238b7df061"
    )


def test_golden_keys():
    assert [key.hex() for key in keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9])] == [
        "f697c55a000000004ce73e534130eddf466a51058798c976d39429df85a5568c",
        "f697c55a00000000762a43528e79694e51bf556b84b149f382817a90af3f771a",
    ]
    assert (
        keys_of(range(-(2**31), -(2**31) + 4))[0].hex()
        == "f697c55a00000000ff0ce9dd42724a9764e85c63c7f218f47a01828b9f57d5df"
    )


def test_golden_keys_with_images():
    extras = (Extra(1, 5, "sha256:cat"), Extra(6, 1, "sha256:dog"))
    assert [key.hex() for key in keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9], extras)] == [
        "f697c55a000000008d9dce6bbfb306b3d866bc034ed65826aa86f3940a643613",
        "f697c55a00000000b404c079d023f88c559aba407ce752c3cbd65758230a30ee",
    ]


# ---- namespaces


def test_every_key_of_a_model_begins_with_its_namespace():
    ours = namespace("llama")
    for lora, salt in (("", ""), ("sql", ""), ("", "tenant")):
        start = seed(Identity(model="llama", weights="w"), 4, lora=lora, salt=salt)
        assert {key[:4] for key in (start, *keys_of(range(9), root=start))} == {ours}
    assert namespace("llama-2") != ours


@given(st.text(), st.text())
def test_every_key_says_whose_it_is(model: str, salt: str):
    start = seed(Identity(model=model, weights="w"), 4, salt=salt)
    whose = {tenant_of(key) for key in (start, *keys_of(range(9), root=start))}
    assert whose == {tenant(salt)}
    assert (tenant(salt) == NO_TENANT) is (salt == "")


def test_a_named_value_is_nobodys():
    assert {tenant_of(value_key(b"%d" % i)) for i in range(100)} == {NO_TENANT}


def test_golden_tenant():
    assert tenant("tenant").hex() == "e7c39d47"


@given(st.text())
def test_no_model_has_the_namespace_of_values(model: str):
    assert not is_value(seed(Identity(model=model, weights="w"), 4))
    assert is_value(value_key(model.encode()))


def test_golden_value_key():
    assert value_key(b"name").hex() == "000000003567cdbd3bfc5f2b5bbe05a0945e8224b386534839b02b5da95d8559"


# ---- what a key stands for


@given(st.integers(0, 40), st.integers(1, 9))
def test_n_tokens_have_a_key_for_each_whole_chunk(tokens, size):
    chain = KeyChain(ROOT, size, range(tokens))
    assert len(chain.keys) == tokens // size
    assert chain.tokens == tokens
    assert all(len(key) == keys.KEY_BYTES for key in chain.keys)


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_prompts_share_only_the_keys_of_their_common_chunks(common, left, right):
    one, two = common + left, common + right
    shared = next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
    ours, theirs = keys_of(one), keys_of(two)
    assert ours[: shared // 4] == theirs[: shared // 4]
    assert not set(ours[shared // 4 :]) & set(theirs[shared // 4 :])


def test_equal_chunks_after_a_difference_have_other_keys():
    one, two = keys_of([1, 1, 1, 1, 7, 7, 7, 7]), keys_of([2, 1, 1, 1, 7, 7, 7, 7])
    assert not set(one) & set(two)


def test_the_same_chunk_twice_has_two_keys():
    assert len(set(keys_of([5] * 40))) == 10


@given(st.data(), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_growing_in_any_steps_gives_the_keys_of_one_go(data, tokens):
    chain, left = KeyChain(ROOT, 4), tokens
    seen: list[Key] = []
    while left:
        cut = data.draw(st.integers(1, len(left)))
        chain.extend([]).extend(left[:cut])
        assert chain.keys[: len(seen)] == seen, "a known key changed"
        seen = list(chain.keys)
        left = left[cut:]
    assert chain.keys == keys_of(tokens)
    assert chain.tokens == len(tokens)


def test_the_chain_does_not_keep_the_callers_array():
    tokens = np.arange(6, dtype=np.int32)
    chain = KeyChain(ROOT, 4, tokens)
    tokens[:] = 0
    assert chain.extend([6, 7]).keys == keys_of(range(8))


@pytest.mark.parametrize("size", [0, -4])
def test_a_chunk_of_no_tokens_is_refused(size):
    with pytest.raises(MisuseError, match="chunk_tokens must be positive"):
        KeyChain(ROOT, size)


# ---- kinds of token rows


@pytest.mark.parametrize(
    "kind",
    [
        tuple,
        lambda ids: array("i", ids),
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, np.uint32),
        lambda ids: np.array(ids, ">i4"),
        lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2],
        lambda ids: torch.tensor(ids),
        lambda ids: torch.tensor(ids, dtype=torch.int32),
    ],
)
def test_every_kind_of_token_row_gives_the_same_keys(kind):
    ids = [1, 128_255, 0, 2**31 - 1, 5, 6, 7, 8, 9]
    assert keys_of(kind(ids)) == keys_of(ids)


def test_an_int32_array_is_not_copied():
    ids = np.arange(8, dtype=np.int32)
    assert as_tokens(ids) is ids


@pytest.mark.parametrize("empty", [[], (), np.array([]), np.array([], np.int64), torch.tensor([])])
def test_no_tokens_no_keys(empty):
    chain = KeyChain(ROOT, 4, [1, 2, 3])
    assert chain.extend(empty).keys == []
    assert chain.extend([4]).keys == keys_of([1, 2, 3, 4])


@pytest.mark.parametrize(
    "ids",
    [
        [2**31],
        [-(2**31) - 1],
        np.array([1, 2**31]),
        np.array([2**32 + 1], np.uint64),
        np.array([-(2**31) - 1]),
        torch.tensor([2**31]),
        [1.5],
        ["a"],
        [None],
        np.array([1.0]),
        np.array([True]),
        np.zeros((2, 2), np.int32),
        torch.zeros(1, 4, dtype=torch.int32),
        "abcd",
        7,
    ],
)
def test_only_rows_of_32_bit_integers_are_token_ids(ids):
    """A refusal changes nothing."""
    chain = KeyChain(ROOT, 1, [1])
    with pytest.raises(LayoutError, match=r"token id"):
        chain.extend(ids)
    assert (chain.tokens, len(chain.keys)) == (1, 1)


# ---- namespaces


@pytest.mark.parametrize("field", [field.name for field in fields(Identity)])
def test_every_field_of_the_identity_changes_every_key(field):
    other = replace(LLAMA, **{field: OTHER[field]})
    assert not set(keys_of(range(16))) & set(keys_of(range(16), root=seed(other, 4)))


@pytest.mark.parametrize(
    "root",
    [seed(LLAMA, 4, lora="a"), seed(LLAMA, 4, salt="a"), seed(LLAMA, 5), seed(LLAMA, 4, lora="a", salt="a")],
)
def test_lora_salt_and_chunk_size_change_every_key(root):
    assert not set(keys_of(range(16))) & set(keys_of(range(16), root=root))


@given(*[st.text(max_size=6)] * 4, st.data())
def test_text_moved_between_fields_changes_the_seed(model, weights, lora, salt, data):
    def root(parts: list[str]) -> Key:
        model, weights, lora, salt = parts
        return seed(Identity(model=model, weights=weights or "w"), 4, lora=lora, salt=salt)

    parts = [model, weights, lora, salt]
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=3, max_size=3)))
    moved = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    same = [*parts[:1], parts[1] or "w", *parts[2:]] == [*moved[:1], moved[1] or "w", *moved[2:]]
    assert (root(parts) == root(moved)) == same


def test_parts_that_only_read_alike_differ():
    assert Identity(model="m", weights="a", dtype="b").digest() != Identity(model="m", weights="ab").digest()
    assert Identity(model="m,weights=w", weights="x").digest() != Identity(model="m", weights="w").digest()
    assert seed(LLAMA, 4, lora="ab") != seed(LLAMA, 4, lora="a", salt="b")
    assert seed(LLAMA, 4, lora="x") != seed(LLAMA, 4, salt="x")


def test_tokens_and_extras_never_trade_bytes():
    plain = keys_of([1, 2, 3, 4, 5, 6, 7, 8])
    for extra in (Extra(0, 1, "\n"), Extra(4, 4, "a"), Extra(0, 8, "\0")):
        assert keys_of([1, 2, 3, 4, 5, 6, 7, 8], (extra,)) != plain
    pair = (Extra(0, 1, "ab"), Extra(1, 1, "c"))
    moved = (Extra(0, 1, "a"), Extra(1, 1, "bc"))
    assert keys_of([1, 2, 3, 4], pair) != keys_of([1, 2, 3, 4], moved)


PRINT_KEYS = """
import sys
from lmtier.format.keys import *
identity = Identity(model="m", weights=sys.argv[1], dtype="bf16")
chain = KeyChain(seed(identity, 4, lora="l", salt="s"), 4, range(12), [Extra(2, 5, "image")])
print(*(key.hex() for key in chain.keys))
"""


def in_another_process(weights: str, hash_seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", PRINT_KEYS, weights]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def test_keys_are_the_same_in_every_process():
    one, two = in_another_process("w", "1"), in_another_process("w", "2")
    assert one == two
    root = seed(Identity(model="m", weights="w", dtype="bf16"), 4, lora="l", salt="s")
    assert one.split() == [key.hex() for key in keys_of(range(12), (Extra(2, 5, "image"),), root)]


def test_unknown_weights_are_shared_with_nobody():
    one, two = in_another_process("", "1"), in_another_process("", "1")
    assert not set(one.split()) & set(two.split())
    private = Identity(model="m")
    assert private.is_private
    assert private.digest() == Identity(model="m").digest(), "one process meets itself"
    assert not LLAMA.is_private


# ---- images


def test_images_under_equal_placeholders_have_other_keys():
    tokens = [1, 9, 9, 9, 9, 9, 2, 3]
    cat, dog = keys_of(tokens, (Extra(1, 5, "cat"),)), keys_of(tokens, (Extra(1, 5, "dog"),))
    assert not set(cat) & set(dog)
    assert cat == keys_of(tokens, (Extra(1, 5, "cat"),))


def test_text_before_an_image_is_unaffected():
    tokens = list(range(16))
    plain, image = keys_of(tokens), keys_of(tokens, (Extra(8, 2, "cat"),))
    assert image[:2] == plain[:2]
    assert not set(image[2:]) & set(plain[2:])


def test_an_image_over_two_chunks_marks_both_and_chains_on():
    tokens = [1, 2, 3, 9, 9, 4, 5, 6, 7, 7, 7, 7]
    cat, dog, none = (
        keys_of(tokens, extras) for extras in ((Extra(3, 2, "cat"),), (Extra(3, 2, "dog"),), ())
    )
    for one, two in ((cat, dog), (cat, none), (dog, none)):
        assert not set(one) & set(two)
    long, short = keys_of(tokens, (Extra(3, 2, "cat"),)), keys_of(tokens, (Extra(3, 1, "cat"),))
    assert long[0] != short[0], "which part of the image the chunk holds is part of the key"


def test_offsets_count_from_the_chunk():
    """What came before is in the parent key; where the prompt began is not asked again."""
    first, second = keys_of(range(8), (Extra(5, 2, "cat"),))
    assert keys_of(range(4, 8), (Extra(1, 2, "cat"),), root=first) == [second]
    assert keys_of(range(4, 8), (Extra(2, 2, "cat"),), root=first) != [second]


def test_the_order_of_images_does_not_matter():
    one, two = Extra(0, 2, "cat"), Extra(2, 2, "dog")
    assert keys_of(range(8), (one, two)) == keys_of(range(8), (two, one))


def test_an_image_that_ends_where_a_chunk_begins_is_outside():
    assert keys_of(range(4), (Extra(4, 2, "cat"),)) == keys_of(range(4))
    assert keys_of(range(8), (Extra(2, 2, "cat"),))[0] != keys_of(range(8))[0]


@pytest.mark.parametrize("wrong", [(0, 0, "cat"), (-1, 2, "cat"), (0, 2, "")])
def test_an_image_without_content_is_refused(wrong):
    with pytest.raises(LayoutError, match="has no content"):
        Extra(*wrong)


def test_images_do_not_depend_on_how_the_prompt_grew():
    extras = (Extra(1, 6, "cat"), Extra(9, 1, "dog"))
    chain = KeyChain(ROOT, 4, [], extras)
    for token in range(12):
        chain.extend([token])
    assert chain.keys == keys_of(range(12), extras)


# ---- skip_leading_tokens


@pytest.mark.parametrize(("tokens", "chunks"), [(0, 0), (256, 1), (1024, 4)])
def test_whole_chunks_can_be_skipped(tokens, chunks):
    assert check_skip(tokens, 256) == chunks


@pytest.mark.parametrize("tokens", [1, 255, 257, -1, -256])
def test_a_skip_inside_a_chunk_is_refused(tokens):
    with pytest.raises(
        LayoutError, match=f"skip_leading_tokens={tokens} is not a multiple of chunk_tokens=256"
    ):
        check_skip(tokens, 256)


# ---- weights


def weights_file(
    folder: Path, name: str, size: int = 300_000, header: bytes = b'{"__metadata__":{}}'
) -> Path:
    path = folder / name
    body = np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes()
    path.write_bytes(header + body[len(header) :])
    return path


def test_weights_are_known_by_content_not_by_name_or_order(tmp_path):
    one, two = weights_file(tmp_path, "a"), weights_file(tmp_path, "b", header=b"other")
    elsewhere = weights_file(tmp_path, "zz")
    assert weights_digest([one, two]) == weights_digest([two, one]) == weights_digest([str(elsewhere), two])


def test_a_header_or_a_size_that_changed_is_noticed(tmp_path):
    same = weights_digest([weights_file(tmp_path, "a")])
    assert same != weights_digest([weights_file(tmp_path, "b", header=b'{"__metadata__":{ }')])
    assert same != weights_digest([weights_file(tmp_path, "c", size=300_001)])
    assert same != weights_digest([weights_file(tmp_path, "d", size=299_999)])
    assert same != weights_digest([tmp_path / "a", tmp_path / "a"])


@pytest.mark.parametrize("at", [0, 20, 2_000_003, 8 << 20, -1])
def test_a_single_byte_that_changed_is_noticed(tmp_path, at):
    path = weights_file(tmp_path, "a", size=(8 << 20) + 5)
    before = weights_digest([path])
    body = bytearray(path.read_bytes())
    body[at] ^= 1
    path.write_bytes(body)
    assert weights_digest([path]) != before


def test_weights_without_files_are_refused():
    with pytest.raises(MisuseError, match="no files"):
        weights_digest([])


@pytest.mark.parametrize("odd", ["\udc80", "x\ud800"])
def test_a_name_with_half_of_a_character_is_refused(odd):
    for words in ({"salt": odd}, {"lora": odd}):
        with pytest.raises(MisuseError, match="half of a character"):
            keys.seed(keys.Identity(model="m", weights="w"), 16, **words)
