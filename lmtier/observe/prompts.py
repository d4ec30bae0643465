"""The prompts of engines that opted in: the tokens of each chunk, and the other inputs of its key.

A key does not contain its tokens, and two prompts that only differ in a salt have no key in common. So "the
salt differs", or the token at which two prompts differ, can only be found if the engine sends both. The data
is bounded, only in memory, and lost with the process. No I/O.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from lmtier.errors import LayoutError
from lmtier.format.keys import tenant_of

MAX_BYTES = 32 << 20
MAX_ORIGIN = 16 << 10
"""Bytes of JSON."""
_EACH = 1200  # bytes of a chunk without its tokens and its origin
_TOKEN = 4


class Origin(NamedTuple):
    """The inputs of a prompt's keys other than its tokens."""

    identity: tuple[tuple[str, str], ...]
    """The fields of the model's `keys.Identity`, by name."""
    lora: str
    salt: str

    @classmethod
    def of(cls, identity: Mapping[str, object], lora: str, salt: str) -> Origin:
        return cls(tuple(sorted((name, str(value)) for name, value in identity.items())), lora, salt)

    @classmethod
    def from_json(cls, text: bytes) -> Origin:
        if len(text) > MAX_ORIGIN:
            raise LayoutError(f"an origin has at most {MAX_ORIGIN} bytes of JSON, not {len(text)}")
        try:
            found = json.loads(text)
            identity, lora, salt = found["identity"], found["lora"], found["salt"]
            json.dumps(found, ensure_ascii=False).encode()  # JSON can name half of a character
            if not isinstance(identity, dict) or not isinstance(lora, str) or not isinstance(salt, str):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise LayoutError("an origin is JSON with identity (an object), lora and salt (texts)") from None
        return cls.of(identity, lora, salt)

    @property
    def nbytes(self) -> int:
        """The bytes of memory. Many short fields take thirty times their JSON."""
        texts = (*(text for pair in self.identity for text in pair), self.lora, self.salt)
        pairs = (len(self.identity) + 2) * sys.getsizeof(("", ""))
        return sum(map(sys.getsizeof, texts)) + pairs

    def to_json(self) -> str:
        return json.dumps({"identity": dict(self.identity), "lora": self.lora, "salt": self.salt})

    def differs_in(self, other: Origin) -> list[str]:
        """The differences in words. Salts are secret and not shown."""
        differences = []
        ours, theirs = dict(self.identity), dict(other.identity)
        if fields := sorted(each for each in ours.keys() | theirs if ours.get(each) != theirs.get(each)):
            differences.append(f"model identity differs ({', '.join(fields)})")
        if self.lora != other.lora:
            differences.append(f"adapter differs ({self.lora or 'none'} here, {other.lora or 'none'} there)")
        if self.salt != other.salt:
            differences.append("salt differs")
        return differences


class PromptChunk(NamedTuple):
    number: int
    """The number of chunks before it in its prompt."""
    parent: bytes | None
    tokens: bytes
    """int32, little-endian."""
    origin: Origin
    plain: bytes
    """A hash of its tokens and all tokens before them, without salt or adapter."""

    @property
    def token_ids(self) -> list[int]:
        return memoryview(self.tokens).cast("i").tolist()


class Prompts:
    def __init__(self, chunk_tokens: int, max_bytes: int = MAX_BYTES) -> None:
        self.chunk_tokens = chunk_tokens
        self._max_bytes = max_bytes
        self._bytes = 0
        self._chunks: OrderedDict[bytes, PromptChunk] = OrderedDict()
        self._origins: dict[Origin, Origin] = {}
        """The origins of the chunks, each once."""
        self._users: dict[int, int] = {}
        """Maps the id of an origin to the number of chunks that have it."""
        self._same: dict[Hashable, dict[bytes, None]] = {}
        """Maps `plain` to the keys of these tokens, the youngest last."""
        self._next: dict[Hashable, dict[bytes, None]] = {}
        """Maps a chunk, or the start of an origin's prompts, to the known chunks that follow."""
        self.get = self._chunks.get

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, keys: Sequence[bytes], tokens: bytes, origin: Origin, parent: bytes | None = None) -> None:
        """Add chunks of a prompt, in order, with their tokens. `parent` is the chunk before them, if any.

        Chunks after an unknown parent are useless for comparisons, so they are dropped.
        """
        size = self.chunk_tokens * _TOKEN
        keys = keys[: len(tokens) // size]
        parent_chunk = self._chunks.get(parent) if parent is not None else None
        if parent is not None and parent_chunk is None:
            return
        plain, first = (parent_chunk.plain, parent_chunk.number + 1) if parent_chunk is not None else (b"", 0)
        origin = self._origins.get(origin, origin)
        for number, key in enumerate(keys):
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk_bytes = tokens[number * size : (number + 1) * size]
                plain = hashlib.sha256(plain + chunk_bytes).digest()[:16]
                self._add(key, PromptChunk(first + number, parent, chunk_bytes, origin, plain))
            else:
                plain = chunk.plain
            parent = key
        for key in reversed(keys):  # a tail is forgotten before its head
            self._chunks.move_to_end(key)
        while self._bytes > self._max_bytes:
            self._forget(*self._chunks.popitem(last=False))

    def _add(self, key: bytes, chunk: PromptChunk) -> None:
        self._chunks[key] = chunk
        self._same.setdefault(chunk.plain, {})[key] = None
        self._next.setdefault(_place(chunk), {})[key] = None
        self._bytes += len(chunk.tokens) + _EACH
        if (origin := id(chunk.origin)) not in self._users:
            self._users[origin] = 0
            self._origins[chunk.origin] = chunk.origin
            self._bytes += chunk.origin.nbytes
        self._users[origin] += 1

    def _forget(self, key: bytes, chunk: PromptChunk) -> None:
        self._bytes -= len(chunk.tokens) + _EACH
        for index, at in ((self._same, chunk.plain), (self._next, _place(chunk))):
            _drop(index, at, key)
        self._users[id(chunk.origin)] -= 1
        if not self._users[id(chunk.origin)]:
            del self._users[id(chunk.origin)], self._origins[chunk.origin]
            self._bytes -= chunk.origin.nbytes

    def forget(self, tenants: Collection[bytes]) -> None:
        """Drop the tokens of these tenants."""
        for key in [key for key in self._chunks if tenant_of(key) in tenants]:
            self._forget(key, self._chunks.pop(key))

    def same(self, key: bytes) -> list[bytes]:
        """Other keys with the same tokens from the start of the prompt on, the youngest first."""
        chunk = self._chunks.get(key)
        return [] if chunk is None else [each for each in reversed(self._same[chunk.plain]) if each != key]

    def after(self, key: bytes) -> list[bytes]:
        """The known chunks whose parent is `key`."""
        return [*self._next.get(key, ())]

    def beside(self, key: bytes) -> list[bytes]:
        """Other chunks with the same parent as `key`, the youngest first."""
        chunk = self._chunks.get(key)
        return [] if chunk is None else [each for each in reversed(self._next[_place(chunk)]) if each != key]


def _place(chunk: PromptChunk) -> bytes | Origin:
    return chunk.origin if chunk.parent is None else chunk.parent


def _drop(index: dict[Hashable, dict[bytes, None]], at: Hashable, key: bytes) -> None:
    keys = index[at]
    del keys[key]
    if not keys:
        del index[at]
