"""Sealed objects: the algorithms' own answers, every byte counts, and no key is used twice."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import random
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.format import objects, sealing
from lmtier.format.compression import CODECS, MissingLibrary
from lmtier.format.layout import PAGE
from lmtier.format.objects import (
    CorruptObject,
    Header,
    Provenance,
    Scratch,
    Seal,
    UnsealedObject,
    authenticate,
    encode,
    mark_room,
    peek,
    read_header,
    seal,
    unseal,
)
from lmtier.format.sealing import NoKey, Secret, decrypt, derive, encrypt
from lmtier.testing import Sample, pages, sample
from tests.kv_bytes import kv_sample
from tests.memory_flags import memory_flags

ONE, OTHER = Secret(bytes(range(32))), Secret(bytes(range(1, 33)))


class Ring:
    """The first of some secrets seals."""

    def __init__(self, *secrets: Secret) -> None:
        self.secrets = secrets

    def sealing_secret(self, key: bytes) -> Secret:
        return self.secrets[0]

    def opening_secret(self, key: bytes, key_id: bytes) -> Secret | None:
        return next((each for each in self.secrets if each.id == key_id), None)

    tenants = None


def sealed(each: Sample, ring: Ring, codec: str = "", mark: bytes = b"fingerprint 1234") -> bytearray:
    page, scratch, header = pages(PAGE), Scratch(), replace(each.header, mark=mark)
    body = each.payload
    if codec:
        header, body = encode(header, body, CODECS[codec], scratch)
        assert header.codec == codec
    stored = seal(page, header, body, ring, scratch)
    return bytearray(bytes(page) + bytes(stored))


def opened(data: bytes | bytearray, each: Sample, ring: Ring | None) -> tuple[Header, memoryview]:
    extent = pages(each.room)
    body = memoryview(data)[PAGE:]
    room = min(len(body), len(extent))
    extent[:room] = body[:room]
    header = unseal(memoryview(data)[:PAGE], extent, each.name, len(body), Scratch(), ring)
    return header, extent


# ---- the algorithms


def test_hkdf_gives_the_answers_of_its_standard():
    """RFC 5869, appendix A.1."""
    got = derive(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert got.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_aes_gcm_gives_the_answers_of_its_specification():
    """McGrew and Viega, The Galois/Counter Mode of Operation, test case 16."""
    key = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
    nonce, about = (
        bytes.fromhex("cafebabefacedbaddecaf888"),
        bytes.fromhex("feedfacedeadbeef" * 2 + "abaddad2"),
    )
    plain = bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
    )
    target = bytearray(len(plain))
    tag = encrypt(key, nonce, plain, target, (about[:8], about[8:]))
    assert target.hex() == (
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
    )
    assert tag.hex() == "76fc6ece0f4e1768cddf8853bb2d551b"
    decrypt(key, nonce, target, target, tag, (about,))
    assert target == plain


def test_pieces_make_the_same_text(monkeypatch):
    """The library takes less than 2 GiB at a time."""
    plain, whole, parts = os.urandom(5000), bytearray(5000), bytearray(5000)
    tags = [encrypt(bytes(32), bytes(12), plain, whole, ())]
    monkeypatch.setattr(sealing, "_PIECE", 1024)
    tags.append(encrypt(bytes(32), bytes(12), plain, parts, ()))
    assert (tags[0], whole) == (tags[1], parts)


def hkdf(secret: bytes, salt: bytes, info: bytes, nbytes: int) -> bytes:
    return hmac.digest(hmac.digest(salt or bytes(32), secret, "sha256"), info + b"\1", "sha256")[:nbytes]


def test_a_reader_built_from_the_specification_reads_it():
    """What docs/FORMAT.md says, with other functions."""
    each = sample(1, 3 * PAGE - 100)
    data = bytes(sealed(each, Ring(ONE)))
    secret = bytes(range(32))
    assert data[8:12] == b"\2\0\0\0"
    assert data[3944:3952] == hkdf(secret, b"", b"lmtier key id", 8) == ONE.id
    key = AESGCM(hkdf(secret, data[3952:3984], b"lmtier object", 32))
    payload = key.decrypt(bytes(11) + b"\1", data[PAGE:] + data[96:112], data[:96])
    assert payload == each.payload
    start = 128 + int.from_bytes(data[12:16], "little")
    end = start + int.from_bytes(data[112:116], "little")
    about = data[:start] + data[end:3984] + data[4000:4080]
    assert key.decrypt(bytes(11) + b"\2", data[start:end] + data[3984:4000], about) == b"fingerprint 1234"


def test_the_bytes_are_those_that_they_always_were(monkeypatch):
    monkeypatch.setattr(objects, "new_salt", lambda: bytes(range(100, 132)))
    data = sealed(sample(7, PAGE + 1), Ring(ONE))
    assert hashlib.sha256(data).hexdigest() == GOLDEN


GOLDEN = "4c0500e1b722c75a01b662c69734ad8f0d12c37619926b77aeb8876809773510"


# ---- round trips


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3 * PAGE),
    st.binary(max_size=2950),
    st.text(max_size=20),
    st.integers(0, 1 << 50),
    st.integers(0, 1 << 50),
)
def test_what_was_sealed_is_opened(nbytes, more, by, at, expires):
    each = sample(nbytes, nbytes)
    secret = b"what no header says by itself"
    mark = secret + more
    header = replace(each.header, provenance=Provenance(by.replace("\0", ""), at), expires=expires)
    data = sealed(Sample(header, each.payload), Ring(ONE), mark=mark)
    got, payload = opened(data, each, Ring(OTHER, ONE))
    assert payload == each.payload
    assert (got.mark, got.provenance.at, got.expires) == (mark, at, expires)
    assert len(data) == PAGE + each.room
    assert bytes(each.payload[:nbytes]) not in data or nbytes < 8
    assert secret not in data


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_is_sealed_after_it_encoded(codec):
    each = kv_sample(3)
    data = sealed(each, Ring(ONE), codec)
    _, plain = encode(each.header, each.payload, CODECS[codec], Scratch())
    got, payload = opened(data, each, Ring(ONE))
    assert got.codec == codec
    assert len(data) == PAGE + len(plain)
    assert bytes(plain[:64]) not in data
    extent = pages(each.room)
    CODECS[codec].decode(
        plain[: got.encoded], extent[: each.header.nbytes], each.header.layout, each.name.shard
    )
    assert payload == extent


def test_decoding_leaves_nothing_in_its_working_memory():
    each, scratch = kv_sample(4), Scratch()
    data = sealed(each, Ring(ONE), "shuffle-zstd")
    extent, body = pages(each.room), memoryview(data)[PAGE:]
    extent[: len(body)] = body
    unseal(memoryview(data)[:PAGE], extent, each.name, len(body), scratch, Ring(ONE))
    assert not any(scratch.take(1))


def test_two_seals_of_one_object_have_nothing_in_common():
    each = sample(1, 2 * PAGE)
    one, two = (sealed(each, Ring(ONE)) for _ in range(2))
    same = sum(a == b for a, b in zip(one[PAGE:], two[PAGE:], strict=True))
    assert same < 2 * PAGE / 64


# ---- what is refused


def test_a_flipped_bit_in_any_byte_is_refused():
    """Of the header, of the payload and of the padding of both."""
    each, chance = sample(1, PAGE // 2), random.Random(0)
    sound = sealed(each, Ring(ONE))
    assert len(sound) == 2 * PAGE
    for at in range(len(sound)):
        spoilt = bytearray(sound)
        spoilt[at] ^= 1 << chance.randrange(8)
        with pytest.raises(CorruptObject):
            opened(spoilt, each, Ring(ONE))


def forged(data: bytearray) -> bytearray:
    """With a checksum that fits, as an attacker writes it."""
    data[PAGE - 16 : PAGE] = objects.checksum(bytes(data[: PAGE - 16]))
    return data


def test_a_flipped_bit_with_a_fitting_checksum_is_refused():
    """By the header alone, too. In the id of the key it is an unknown key."""
    each, chance = sample(1, PAGE), random.Random(1)
    sound = sealed(each, Ring(ONE))
    for at in range(PAGE - 16):
        spoilt = bytearray(sound)
        spoilt[at] ^= 1 << chance.randrange(8)
        forged(spoilt)
        refused = NoKey if 3944 <= at < 3952 else CorruptObject
        with pytest.raises(refused):
            opened(spoilt, each, Ring(ONE))
        with pytest.raises(refused):
            authenticate(memoryview(spoilt)[:PAGE], each.name, Ring(ONE))


def test_a_payload_under_another_header_is_refused():
    one, two = (sealed(sample(1), Ring(ONE)) for _ in range(2))
    with pytest.raises(CorruptObject, match="payload"):
        opened(one[:PAGE] + two[PAGE:], sample(1), Ring(ONE))
    with pytest.raises(CorruptObject, match="asked for"):
        opened(two, sample(2), Ring(ONE))


def test_an_unknown_key_is_no_damage_and_says_which():
    each = sample(1)
    data = sealed(each, Ring(OTHER))
    for ring, said in ((Ring(ONE), "that key is not known here"), (None, "no key is given here")):
        with pytest.raises(NoKey, match=f"sealed with key {OTHER.id.hex()}, and {said}"):
            opened(data, each, ring)
        with pytest.raises(NoKey):
            authenticate(memoryview(data)[:PAGE], each.name, ring)


def test_a_reader_with_keys_takes_only_sealed_objects():
    each = sample(1)
    for read in (opened, lambda data, each, ring: authenticate(memoryview(data)[:PAGE], each.name, ring)):
        with pytest.raises(UnsealedObject, match="serves sealed objects only"):
            read(each.at_rest(), each, Ring(ONE))


def test_without_a_key_a_header_shows_all_but_its_mark():
    each = sample(1)
    header, proof = peek(memoryview(sealed(each, Ring(ONE))), each.name)
    assert header == each.header
    assert isinstance(proof, Seal)
    assert proof.key_id == ONE.id
    assert read_header(memoryview(each.at_rest()))[1] == objects.checksum(bytes(each.payload))


def test_a_mark_has_as_much_room_as_is_said():
    each = sample(1)
    most = mark_room(each.header.layout, is_sealed=True)
    assert opened(sealed(each, Ring(ONE), mark=bytes(most)), each, Ring(ONE))[0].mark == bytes(most)


# ---- keys


def test_no_key_is_shown_and_an_erased_one_is_never_used():
    text = os.urandom(32)
    secret = Secret(text)
    assert repr(secret) == f"<Secret {secret.id.hex()}>"
    salt = sealing.new_salt()
    assert secret.key(salt) == derive(text, salt, b"lmtier object")
    secret.erase()
    assert bytes(secret._memory) == bytes(len(secret._memory))
    with pytest.raises(NoKey, match="was destroyed"):
        secret.key(salt)
    with pytest.raises(NoKey, match="was destroyed"):
        secret.wrapped_by(ONE, salt, b"")


def test_the_memory_of_keys_is_in_no_core_dump():
    memory = sealing.unpaged(4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert "dd" in memory_flags(address), "the kernel's word for: do not dump"


def test_without_the_library_it_says_what_to_install():
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from lmtier.tiers.registry import open_tier\n"
        "from lmtier.config import TierSpec\n"
        "open_tier(TierSpec.parse('null://?seal=aes-256-gcm&key=env:HOME'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert MissingLibrary.__name__ in ran.stderr
    assert "needs the package cryptography: pip install 'lmtier[crypto]'" in ran.stderr


def salts(count: int) -> list[bytes]:
    """The salts of that many objects, sealed one after the other."""
    each, page, ring, scratch = sample(1, 1), pages(PAGE), Ring(ONE), Scratch()
    found = []
    for _ in range(count):
        seal(page, each.header, each.payload, ring, scratch)
        found.append(bytes(page[3952:3984]))
    return found


def salts_of_threads(count: int, threads: int = 4) -> bytes:
    found: list[list[bytes]] = [[] for _ in range(threads)]
    running = [
        threading.Thread(target=lambda mine=mine: mine.extend(salts(count // threads))) for mine in found
    ]
    for each in running:
        each.start()
    for each in running:
        each.join()
    return b"".join(salt for mine in found for salt in mine)


def keys_without_repeat(count: int, parts: int) -> int:
    """Seal in `parts` processes: new ones, and forked ones that have the memory of this one."""
    each = count // parts
    code = f"import sys, tests.format.test_sealing as t; sys.stdout.buffer.write(t.salts_of_threads({each}))"
    found = set()
    for number in range(parts):
        if number % 2:
            reader, writer = os.pipe()
            if not (child := os.fork()):
                with os.fdopen(writer, "wb") as out:
                    out.write(b"".join(salts(each)))
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader, "rb") as pipe:
                text = pipe.read()
            os.waitpid(child, 0)
        else:
            ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
            text = ran.stdout
        found |= {text[at : at + 32] for at in range(0, len(text), 32)}
    return len(found)


def test_no_two_objects_have_one_key_in_any_process():
    """Neither threads, processes nor restarts repeat a key."""
    assert keys_without_repeat(8_000, 4) == 8_000


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_million_objects_have_a_million_keys():
    assert keys_without_repeat(1_000_000, 10) == 1_000_000
