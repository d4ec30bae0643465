"""Tokens to chained keys: 32 bytes that name the KV of one chunk and of everything before it. Pure.

    key[-1] = N ‖ T ‖ H("seed",  format, chunk_tokens, identity, lora, salt)
    key[i]  = N ‖ T ‖ H("chunk", key[i-1], tokens of chunk i as int32 LE, extras of chunk i)
    state[i] = N ‖ T ‖ S ‖ the first 20 bytes of H("state", key[i], layout of the state)

N is the 4-byte namespace of the model. T is 4 bytes of the tenant, derived from the salt. So a key or a file
name shows its model and tenant without a directory. H is the first 24 bytes of sha256 over length-prefixed
parts, so no two different inputs share an encoding. It is cryptographic because prompts are untrusted: an
attacker cannot craft a prompt with the key of another. Only whole chunks have a key; a tail shorter than a
chunk is recomputed. state[i] names what layers without KV remember of all tokens up to the end of chunk i. S
marks such keys, so that a state is never counted as tokens.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lmtier.errors import LayoutError, MisuseError

KEY_BYTES = 32
_BUFFER = 256 << 10  # in a core's own cache a reading is twice as fast as through memory
NAMESPACE_BYTES = 4
TENANT_BYTES = 4
PREFIX_BYTES = NAMESPACE_BYTES + TENANT_BYTES
"""The first bytes of a key, which are the same along its chain. The rest is a hash."""
VALUES = bytes(NAMESPACE_BYTES)
"""The namespace of named values, which are not KV and may change."""
NO_TENANT = bytes(TENANT_BYTES)
"""The tenant of the empty salt, and of named values."""
STATE = b"\0end"
"""What follows the tenant in the key of a state."""
FORMAT = b"lmtier-key-2"

Tokens = npt.NDArray[np.int32]

_PROCESS_SECRET = os.urandom(16).hex()


def _pack(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The properties that make two KV caches interchangeable. If one field differs, all keys differ.

    `weights` is a hub commit, or `weights_digest(...)` of the files. If it is empty, the namespace is
    private to this process: models with unknown weights must never share keys.
    """

    model: str
    weights: str = ""
    dtype: str = ""
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    planes: int = 2
    attention: str = ""
    """Everything else that changes KV: rope scaling, sliding window, a kernel's private packing."""

    @property
    def is_private(self) -> bool:
        return not self.weights

    def digest(self) -> bytes:
        # The process id is included because a forked child inherits the secret.
        return _digest(self, f"{_PROCESS_SECRET}{os.getpid()}" if self.is_private else "")


@lru_cache(maxsize=64)
def _digest(identity: Identity, secret: str) -> bytes:
    named = (f"{f.name}={getattr(identity, f.name)}" for f in fields(identity))
    return hashlib.sha256(_pack(*(part.encode() for part in (*named, secret)))).digest()


def weights_digest(paths: Iterable[str | os.PathLike[str]]) -> str:
    """Identify weights by all bytes of their files. File names do not count.

    Samples would tell newly trained models apart, but not an edit of a few rows of an embedding.
    """
    digests = []
    buffer = memoryview(bytearray(_BUFFER))
    for path in paths:
        digest = xxhash.xxh3_128()
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
        digests.append(digest.digest())
    if not digests:
        raise MisuseError("weights_digest: no files given; pass the paths of the model's weights")
    return hashlib.sha256(_pack(*sorted(digests))).hexdigest()


def namespace(model: str) -> bytes:
    """The 4 bytes with which every key of this model begins.

    If two models share them, a clear affects both.
    """
    digest = hashlib.sha256(_pack(b"namespace", model.encode())).digest()[:NAMESPACE_BYTES]
    return digest if digest != VALUES else b"\1" * NAMESPACE_BYTES


def tenant(salt: str) -> bytes:
    """The 4 bytes of a tenant in its keys. They are for accounting; all of H separates the contents."""
    if not salt:
        return NO_TENANT
    digest = hashlib.sha256(_pack(b"tenant", _utf8(salt, "salt"))).digest()[:TENANT_BYTES]
    return digest if digest != NO_TENANT else b"\1" * TENANT_BYTES


def tenant_of(key: bytes) -> bytes:
    return NO_TENANT if is_value(key) else key[NAMESPACE_BYTES:PREFIX_BYTES]


def value_key(name: bytes) -> bytes:
    """The key of the named value `name`."""
    return VALUES + hashlib.sha256(_pack(b"value", name)).digest()[: KEY_BYTES - NAMESPACE_BYTES]


def is_value(key: bytes) -> bool:
    return key.startswith(VALUES)


def state_key(key: bytes, layout: bytes) -> bytes:
    """The key of the state at the end of the chunk `key`, for engines that keep it in this layout (JSON)."""
    digest = hashlib.sha256(_pack(b"state", key, layout)).digest()
    head = key[:PREFIX_BYTES] + STATE
    return head + digest[: KEY_BYTES - len(head)]


def is_state(key: bytes) -> bool:
    return key.startswith(STATE, PREFIX_BYTES) and not is_value(key)


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # JSON can name one
        raise MisuseError(
            f"the {what} {text!r:.40} has half of a character: it is no text in UTF-8"
        ) from None


def seed(identity: Identity, chunk_tokens: int, *, lora: str = "", salt: str = "") -> bytes:
    """key[-1]: where a chain of chunks begins."""
    digest = hashlib.sha256(
        _pack(
            b"seed",
            FORMAT,
            struct.pack("<I", chunk_tokens),
            identity.digest(),
            _utf8(lora, "adapter"),
            _utf8(salt, "salt"),
        )
    ).digest()
    return namespace(identity.model) + tenant(salt) + digest[: KEY_BYTES - PREFIX_BYTES]


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """A multimodal item: `tokens` placeholders from `offset` on stand for the content `identity`."""

    offset: int
    tokens: int
    identity: str

    def __post_init__(self) -> None:
        if self.offset < 0 or self.tokens < 1 or not self.identity:
            raise LayoutError(f"{self!r} has no content: give it an identity and at least one token")


def as_tokens(tokens: Any) -> Tokens:
    """Converts token ids to a contiguous int32 array, from a list, an array, a numpy array or a CPU tensor.

    A numpy array of int32 is not copied.
    """
    if isinstance(tokens, (list, tuple)):
        try:
            # In half the time of array("i", tokens).
            return np.frombuffer(struct.pack(f"<{len(tokens)}i", *tokens), dtype="<i4")
        except struct.error as error:
            raise LayoutError(f"token ids must be integers that fit in 32 bits: {error}") from None
    try:
        ids = np.asarray(tokens)
    except (TypeError, RuntimeError) as error:
        raise LayoutError(f"token ids must be in CPU memory: {error}") from None
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise LayoutError(f"token ids must be one row of integers, not {ids.ndim}-dimensional {ids.dtype}")
    if ids.dtype != np.int32 and ids.size:
        low, high = int(ids.min()), int(ids.max())
        if low < -(2**31) or high >= 2**31:
            raise LayoutError(f"token id {low if low < 0 else high} does not fit in 32 bits")
    return np.ascontiguousarray(ids, dtype="<i4")


class KeyChain:
    """The keys of one growing sequence. `extend` hashes only chunks that became full.

    >>> chain = KeyChain(seed(Identity(model="m", weights="w"), 4), 4)
    >>> len(chain.extend([1, 2, 3, 4, 5]).keys), chain.tokens
    (1, 5)
    """

    __slots__ = ("_extras", "_parent", "_tail", "chunk_tokens", "keys", "tokens")

    def __init__(
        self,
        seed: bytes,
        chunk_tokens: int,
        tokens: Any = (),
        extras: Sequence[Extra] = (),
    ) -> None:
        if chunk_tokens <= 0:
            raise MisuseError(f"chunk_tokens must be positive, not {chunk_tokens}")
        self.chunk_tokens = chunk_tokens
        self.keys: list[bytes] = []
        self.tokens = 0
        self._parent = seed
        self._tail = np.empty(0, dtype="<i4")
        self._extras = sorted(extras)
        self.extend(tokens)

    def extend(self, tokens: Any) -> KeyChain:
        """Append `tokens` and return self. Known keys never change."""
        fresh = as_tokens(tokens)
        self.tokens += len(fresh)
        pending = np.concatenate((self._tail, fresh)) if len(self._tail) else fresh
        size = self.chunk_tokens
        full = len(pending) // size
        if full:
            self._hash(pending, full)
        self._tail = pending[full * size :].copy()
        return self

    def _hash(self, pending: Tokens, full: int) -> None:
        # One hash call per chunk on a reused prefix: 128k tokens cost about a millisecond.
        size = self.chunk_tokens
        row = pending.data.cast("B")
        step = size * 4
        head = _pack(b"chunk") + struct.pack("<I", KEY_BYTES)
        middle, no_extras = struct.pack("<I", step), struct.pack("<I", 0)
        sha256, parent, keys = hashlib.sha256, self._parent, self.keys
        prefix, digest_bytes = parent[:PREFIX_BYTES], KEY_BYTES - PREFIX_BYTES
        for start in range(0, full * step, step):
            digest = sha256(head + parent + middle)
            digest.update(row[start : start + step])
            digest.update(self._encode_extras(len(keys)) if self._extras else no_extras)
            parent = prefix + digest.digest()[:digest_bytes]
            keys.append(parent)
        self._parent = parent

    def _encode_extras(self, chunk: int) -> bytes:
        """The items that overlap chunk number `chunk`, at offsets relative to its first token."""
        low = chunk * self.chunk_tokens
        high = low + self.chunk_tokens
        parts = [
            struct.pack("<qq", extra.offset - low, extra.tokens) + extra.identity.encode()
            for extra in self._extras
            if extra.offset < high and extra.offset + extra.tokens > low
        ]
        return _pack(_pack(*parts)) if parts else struct.pack("<I", 0)


def check_skip(skip_leading_tokens: int, chunk_tokens: int) -> int:
    """The number of whole chunks to skip. Raises if the tokens are not whole chunks, before any work."""
    if skip_leading_tokens < 0 or skip_leading_tokens % chunk_tokens:
        raise LayoutError(
            f"skip_leading_tokens={skip_leading_tokens} is not a multiple of chunk_tokens="
            f"{chunk_tokens}; round it down to whole chunks"
        )
    return skip_leading_tokens // chunk_tokens
