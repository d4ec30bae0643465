"""Keys for tests, and a suite for tiers whose objects are sealed."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from lmtier.format import objects
from lmtier.format.layout import PAGE, Name
from lmtier.format.objects import Scratch
from lmtier.testing import Sample, TierSuite, pages
from lmtier.tiers.base import Tier
from lmtier.tiers.blocking import BlockingTier
from lmtier.tiers.keyring import Keyring


def hex_key(number: int) -> str:
    return hashlib.sha256(f"key {number}".encode()).hexdigest()


def key_file(folder: Path, *numbers: int) -> str:
    """The option `key=`, for a file with these keys. Written again, it is another file."""
    path, fresh = folder / "keys", folder / "keys.new"
    fresh.touch(mode=0o600)
    fresh.write_text("\n".join(map(hex_key, numbers)) + "\n")
    fresh.rename(path)
    return f"file:{path}"


def keyring(*numbers: int, tenants: str = "") -> Keyring:
    with tempfile.TemporaryDirectory() as folder:
        return Keyring(key_file(Path(folder), *(numbers or (0,))), tenants)


ALL_SEALED = "KV_TEST_SEALS_EVERYTHING"
"""A variable of the environment: programs of tests seal every object of every tier if it is set."""


def seal_everything(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """Every tier that is opened from now on has the keys of tests."""
    set_attribute(BlockingTier, "keys", keyring())


def seal_if_asked() -> None:
    """For programs of tests."""
    if ALL_SEALED in os.environ:
        seal_everything()


def sealed_at_rest(each: Sample, keys: Keyring) -> bytes:
    page = pages(PAGE)
    stored = objects.seal(page, each.header, each.payload, keys, Scratch())
    return bytes(page) + bytes(stored)


def without_seal(name: Name, data: bytes, keys: Keyring) -> bytes:
    """The same object as an unsealed tier stores it. Raises as a reader does."""
    page, payload = (memoryview(bytearray(part)) for part in (data[:PAGE], data[PAGE:]))
    header = objects.check(page, payload, name, None, keys)
    objects.seal(page, header, payload)
    return bytes(page) + bytes(payload)


class Sealed(TierSuite):
    """Before another suite, it seals that suite's tier: class TestSealedDisk(Sealed, TestDisk)."""

    keys = keyring()

    def make(self, tmp_path: Path) -> Tier:
        tier = super().make(tmp_path)
        tier.use_keys(self.keys)
        return tier

    def at_rest(self, each: Sample) -> bytes:
        return sealed_at_rest(each, self.keys)

    def stored(self, tmp_path: Path) -> dict[Name, bytes]:
        raw = super().stored(tmp_path)
        return {name: without_seal(name, data, self.keys) for name, data in raw.items()}
