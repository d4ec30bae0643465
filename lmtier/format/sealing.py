"""Sealing: AES-256-GCM over an object, under a key that is derived for this object alone.

    secret       32 bytes, from an operator or made for one tenant
    key id       HKDF-SHA256(secret, info "lmtier key id"), 8 bytes: names the secret and tells nothing of it
    object key   HKDF-SHA256(secret, salt of the object, info "lmtier object"), 32 bytes

The salt is 32 random bytes for each object as it is stored. So the key of an object encrypts two texts, the
payload and the mark, each with its own nonce, and never anything else: no counter has to survive a restart
or to be shared between threads, processes and hosts. docs/SEALED.md has the bound.

Everything works on buffers of the caller, outside the GIL. The library is `cryptography`, an extra.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple, Protocol, TypeAlias

from lmtier.format.compression import MissingLibrary

AES_256_GCM = "aes-256-gcm"
SEALS = ("", AES_256_GCM)
"""The values of the option `seal=`."""

SECRET_BYTES = 32
ID_BYTES = 8
SALT_BYTES = 32
TAG_BYTES = 16
PAYLOAD_NONCE, MARK_NONCE = bytes(11) + b"\1", bytes(11) + b"\2"
"""The two nonces under the key of an object."""
WRAPPING_NONCE = bytes(12)
"""The only nonce under a key that wraps one secret."""
_PIECE = 1 << 30  # the library takes less than 2 GiB at a time

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_LIBC = ctypes.CDLL(None, use_errno=True)


class NoKey(Exception):
    """The key of this object is unknown here, or was destroyed. The message says which."""


class BadSeal(Exception):
    """These bytes were not written with this key, or have changed since."""


class Modules(NamedTuple):
    ciphers: ModuleType
    hkdf: ModuleType
    hashes: ModuleType
    invalid: type[Exception]


@cache
def library() -> Modules:
    """The parts of `cryptography` that are used here. Raises MissingLibrary."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives import ciphers, hashes
        from cryptography.hazmat.primitives.ciphers import algorithms, modes  # noqa: F401 - of `ciphers`
        from cryptography.hazmat.primitives.kdf import hkdf
    except ImportError:
        raise MissingLibrary(
            f"seal={AES_256_GCM} needs the package cryptography: pip install 'lmtier[crypto]'"
        ) from None
    return Modules(ciphers, hkdf, hashes, InvalidTag)


def derive(secret: Buffer, salt: bytes | None, info: bytes, nbytes: int = SECRET_BYTES) -> bytes:
    """HKDF-SHA256."""
    lib = library()
    made: bytes = lib.hkdf.HKDF(lib.hashes.SHA256(), nbytes, salt, info).derive(secret)
    return made


def unpaged(nbytes: int) -> mmap.mmap:
    """Memory that no core dump has, and that is not swapped out if the system allows that."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_DONTDUMP)
    address = ctypes.c_char.from_buffer(memory)
    _LIBC.mlock(ctypes.byref(address), ctypes.c_size_t(nbytes))
    return memory


class Secret:
    """A key of an operator or of a tenant. It shows its id and never itself."""

    __slots__ = ("_is_erased", "_lock", "_memory", "id")

    def __init__(self, secret: Buffer) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a key has {SECRET_BYTES} bytes, not {len(secret)}")
        self._memory = unpaged(mmap.PAGESIZE)
        self._memory[:SECRET_BYTES] = bytes(secret)
        self._lock = threading.Lock()
        self._is_erased = False
        self.id = derive(secret, None, b"lmtier key id", ID_BYTES)

    def __repr__(self) -> str:
        return f"<Secret {self.id.hex()}>"

    def key(self, salt: bytes, info: bytes = b"lmtier object") -> bytes:
        """The key for one object. Raises NoKey after `erase`."""
        with self._lock:  # otherwise a key could be derived from a secret that is half overwritten
            if self._is_erased:
                raise NoKey(f"key {self.id.hex()} was destroyed")
            return derive(memoryview(self._memory)[:SECRET_BYTES], salt, info)

    def wrapped_by(self, other: Secret, salt: bytes, about: bytes) -> bytes:
        """This secret, encrypted by another one. The other is used with this salt only here."""
        target = bytearray(SECRET_BYTES)
        with self._lock:
            if self._is_erased:
                raise NoKey(f"key {self.id.hex()} was destroyed")
            source = memoryview(self._memory)[:SECRET_BYTES]
            tag = encrypt(other.key(salt, b"lmtier tenant"), WRAPPING_NONCE, source, target, (about,))
        return bytes(target) + tag

    def unwrap(self, wrapped: bytes, salt: bytes, about: bytes) -> Secret:
        """The inverse of `wrapped_by`, by the other. Raises BadSeal."""
        secret = bytearray(SECRET_BYTES)
        body, tag = wrapped[:SECRET_BYTES], wrapped[SECRET_BYTES:]
        decrypt(self.key(salt, b"lmtier tenant"), WRAPPING_NONCE, body, secret, tag, (about,))
        try:
            return Secret(secret)
        finally:
            secret[:] = bytes(SECRET_BYTES)

    def erase(self) -> None:
        """Overwrite it. It cannot be used again."""
        with self._lock:
            self._is_erased = True
            self._memory[:] = bytes(len(self._memory))


class Tombstone(NamedTuple):
    """A tenant was forgotten."""

    generation: int
    """How often. Keys of the tenant that are of an earlier generation open and seal nothing."""
    at: int
    """When, in ms since the epoch, by the clock of who wrote it. For people: nothing compares it."""


class TenantKeys(Protocol):
    """A store with keys for each tenant, which servers share, and what one server knows of it."""

    forgotten: Mapping[bytes, Tombstone]
    """By tenant, as last read. It never changes: what is read later is another mapping."""
    dropped: dict[bytes, int]
    """By tenant, the generation before which the owner of the tier holds nothing any more. The owner writes
    it. Until it is that of the tombstone, nothing of the tenant is sealed: it could be from before."""
    place: str
    """Where it is: two tiers of a server may have the same one."""

    def read_tombstones(self) -> bool:
        """Read what was forgotten since. Returns whether anything was. It may take as long as the storage."""

    def forget(self, tenant: bytes) -> int:
        """Write a tombstone, and destroy the keys of a tenant. Returns how many there were.

        Raises TierError.
        """


class SealingKeys(Protocol):
    """The keys of one tier. Called by several threads at once."""

    def sealing_secret(self, key: bytes) -> Secret:
        """The key for new objects under this name. Raises NoKey."""

    def opening_secret(self, key: bytes, key_id: bytes) -> Secret | None:
        """The key with this id, if an object under this name may be sealed with it."""

    @property
    def tenants(self) -> TenantKeys | None:
        """The keys of tenants. None: one key seals for all."""


def new_salt() -> bytes:
    return os.urandom(SALT_BYTES)


def encrypt(key: bytes, nonce: bytes, source: Buffer, target: Buffer, about: Sequence[Buffer]) -> bytes:
    """Encrypt `source` into `target`, which may be the same memory. Returns the tag, over `about` too."""
    modules = library().ciphers
    cipher = modules.Cipher(modules.algorithms.AES(key), modules.modes.GCM(nonce)).encryptor()
    for each in about:
        cipher.authenticate_additional_data(each)
    _through(cipher, source, target)
    cipher.finalize()
    tag: bytes = cipher.tag
    return tag


def decrypt(
    key: bytes, nonce: bytes, source: Buffer, target: Buffer, tag: bytes, about: Sequence[Buffer]
) -> None:
    """The inverse. Raises BadSeal; then `target` holds bytes that must not be used."""
    lib = library()
    cipher = lib.ciphers.Cipher(lib.ciphers.algorithms.AES(key), lib.ciphers.modes.GCM(nonce)).decryptor()
    for each in about:
        cipher.authenticate_additional_data(each)
    _through(cipher, source, target)
    try:
        cipher.finalize_with_tag(tag)
    except lib.invalid:
        raise BadSeal("its seal does not fit: it was changed, or written with another key") from None


def _through(cipher: object, source: Buffer, target: Buffer) -> None:
    into = cipher.update_into  # type: ignore[attr-defined]  # an AEAD context; its type is private
    read, write = memoryview(source), memoryview(target)
    for at in range(0, len(read), _PIECE):
        into(read[at : at + _PIECE], write[at : at + _PIECE])
