"""What engines that opted in told of their prompts: each chunk's tokens, and what else its key is made of.

A key says nothing of its tokens, and two prompts that differ in nothing but a salt have no key in common.
So who is to say "the salt differs", or at which token two prompts part, must be told both. Bounded, in
memory alone, and gone with the process. Pure.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from lmtier.errors import LayoutError

MAX_BYTES = 32 << 20
MAX_ORIGIN = 16 << 10
"""Bytes of JSON."""
_EACH = 1200  # bytes that a chunk takes beside its tokens and its origin
_TOKEN = 4


class Origin(NamedTuple):
    """What a prompt's keys depend on, beside its tokens."""

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
            if not isinstance(identity, dict) or not isinstance(lora, str) or not isinstance(salt, str):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise LayoutError("an origin is JSON with identity (an object), lora and salt (texts)") from None
        return cls.of(identity, lora, salt)

    @property
    def nbytes(self) -> int:
        """Of memory. Many short fields take thirty times their JSON."""
        texts = (*(text for pair in self.identity for text in pair), self.lora, self.salt)
        pairs = (len(self.identity) + 2) * sys.getsizeof(("", ""))
        return sum(map(sys.getsizeof, texts)) + pairs

    def to_json(self) -> str:
        return json.dumps({"identity": dict(self.identity), "lora": self.lora, "salt": self.salt})

    def differs_in(self, other: Origin) -> list[str]:
        """In words. The salts themselves are nobody's business."""
        words = []
        ours, theirs = dict(self.identity), dict(other.identity)
        if fields := sorted(each for each in ours.keys() | theirs if ours.get(each) != theirs.get(each)):
            words.append(f"model identity differs ({', '.join(fields)})")
        if self.lora != other.lora:
            words.append(f"adapter differs ({self.lora or 'none'} here, {other.lora or 'none'} there)")
        if self.salt != other.salt:
            words.append("salt differs")
        return words


class Chunk(NamedTuple):
    number: int
    """How many chunks are before it in its prompt."""
    parent: bytes | None
    tokens: bytes
    """int32, little-endian."""
    origin: Origin
    plain: bytes
    """Stands for its tokens and all before them, and for nothing else."""

    @property
    def token_ids(self) -> list[int]:
        return memoryview(self.tokens).cast("i").tolist()


class Prompts:
    def __init__(self, chunk_tokens: int, max_bytes: int = MAX_BYTES) -> None:
        self.chunk_tokens = chunk_tokens
        self._max_bytes = max_bytes
        self._bytes = 0
        self._chunks: OrderedDict[bytes, Chunk] = OrderedDict()
        self._origins: dict[Origin, Origin] = {}
        """Those that chunks have, each once."""
        self._users: dict[int, int] = {}
        """The id of each of these -> how many chunks have it."""
        self._same: dict[Hashable, dict[bytes, None]] = {}
        """Plain -> the keys of these tokens, the last one the youngest."""
        self._next: dict[Hashable, dict[bytes, None]] = {}
        """A chunk, or where prompts of an origin begin -> what follows, as far as it was told."""
        self.get = self._chunks.get

    def __len__(self) -> int:
        return len(self._chunks)

    def tell(self, keys: Sequence[bytes], tokens: bytes, origin: Origin, parent: bytes | None = None) -> None:
        """Chunks of a prompt, in order, and their tokens; before them came `parent`, None: nothing.

        Of what follows a chunk that is not known (any more) nothing can be said, so it is not kept.
        """
        size = self.chunk_tokens * _TOKEN
        keys = keys[: len(tokens) // size]
        before = self._chunks.get(parent) if parent is not None else None
        if parent is not None and before is None:
            return
        plain, first = (before.plain, before.number + 1) if before is not None else (b"", 0)
        origin = self._origins.get(origin, origin)
        for number, key in enumerate(keys):
            known = self._chunks.get(key)
            if known is None:
                words = tokens[number * size : (number + 1) * size]
                plain = hashlib.sha256(plain + words).digest()[:16]
                self._add(key, Chunk(first + number, parent, words, origin, plain))
            else:
                plain = known.plain
            parent = key
        for key in reversed(keys):  # a tail is forgotten before its head
            self._chunks.move_to_end(key)
        while self._bytes > self._max_bytes:
            self._forget(*self._chunks.popitem(last=False))

    def _add(self, key: bytes, chunk: Chunk) -> None:
        self._chunks[key] = chunk
        self._same.setdefault(chunk.plain, {})[key] = None
        self._next.setdefault(_place(chunk), {})[key] = None
        self._bytes += len(chunk.tokens) + _EACH
        if (origin := id(chunk.origin)) not in self._users:
            self._users[origin] = 0
            self._origins[chunk.origin] = chunk.origin
            self._bytes += chunk.origin.nbytes
        self._users[origin] += 1

    def _forget(self, key: bytes, chunk: Chunk) -> None:
        self._bytes -= len(chunk.tokens) + _EACH
        for known, at in ((self._same, chunk.plain), (self._next, _place(chunk))):
            _drop(known, at, key)
        self._users[id(chunk.origin)] -= 1
        if not self._users[id(chunk.origin)]:
            del self._users[id(chunk.origin)], self._origins[chunk.origin]
            self._bytes -= chunk.origin.nbytes

    def same(self, key: bytes) -> list[bytes]:
        """Other keys of the same tokens from the first one on: the youngest first."""
        chunk = self._chunks.get(key)
        return [] if chunk is None else [each for each in reversed(self._same[chunk.plain]) if each != key]

    def beside(self, key: bytes) -> list[bytes]:
        """What else follows where `key` does: the youngest first."""
        chunk = self._chunks.get(key)
        return [] if chunk is None else [each for each in reversed(self._next[_place(chunk)]) if each != key]


def _place(chunk: Chunk) -> bytes | Origin:
    return chunk.origin if chunk.parent is None else chunk.parent


def _drop(known: dict[Hashable, dict[bytes, None]], at: Hashable, key: bytes) -> None:
    keys = known[at]
    del keys[key]
    if not keys:
        del known[at]
