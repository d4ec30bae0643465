"""The layout of an object's bytes: layers, heads, packings, shards, and the arithmetic between them. No I/O.

A payload is L, B, H, N, C: for each layer of the shard, each engine block of the chunk, and each head it
has the head's tokens. They are packed in one of these ways (N tokens a block, K and V elements a token):

    token     N × [K | V]           K and V of a token side by side
    planes    N × K, then N × V     two planes a block and head
    latent    N × C                 one plane, no V (MLA)
    cpu-vec   K × N, then N × V     keys transposed: what vLLM's CPU kernels keep
    other     opaque                only readable by engines with the same packing

Slicing by layers and heads does not need the packing. Converting the packing or the block size does.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from math import gcd
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy.typing as npt

from lmtier.errors import LayoutError, size_text

DTYPE_BYTES = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "u8": 1,
}
OTHER_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
"""What torch, numpy and models call them."""
KNOWN_PACKINGS = ("token", "planes", "latent", "cpu-vec")

PAGE = 4096
"""Objects take whole pages, in memory and in tiers. So does their header."""


MAX_LAYERS = 1024
MAX_LAYOUT = 3800
"""Bytes of JSON. A sealed object's header has room for so much and for a fingerprint."""
MAX_CHUNK = 1 << 48
"""Bytes. Sizes may come from clients; larger ones would not fit into a file or a float."""
_LONGEST_SHARD = len("L65535-65535H65535-65535")

Array = npt.NDArray[Any]


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages: the room of a payload in a slab or in a file."""
    return -(-nbytes // PAGE) * PAGE


def stored_size(nbytes: int) -> int:
    """The bytes of a whole object in a tier: header page and padded payload."""
    return PAGE + padded(nbytes)


class Shard(NamedTuple):
    """The part of a chunk that one rank holds: layers [a, b) × head units [c, d)."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    def __str__(self) -> str:
        return f"L{self.first_layer}-{self.end_layer}H{self.first_head}-{self.end_head}"

    @staticmethod
    def parse(text: str) -> Shard | None:
        """The inverse of str(). It accepts only that spelling. Interned, for scans of many names."""
        return _shard(text) if len(text) <= _LONGEST_SHARD else None

    @property
    def area(self) -> int:
        return (self.end_layer - self.first_layer) * (self.end_head - self.first_head)

    def overlap(self, other: Shard) -> Shard | None:
        both = Shard(
            max(self.first_layer, other.first_layer),
            min(self.end_layer, other.end_layer),
            max(self.first_head, other.first_head),
            min(self.end_head, other.end_head),
        )
        return both if both[0] < both[1] and both[2] < both[3] else None


@lru_cache(maxsize=4096)
def _shard(text: str) -> Shard | None:
    number = "(0|[1-9][0-9]{0,4})"
    found = re.fullmatch(f"L{number}-{number}H{number}-{number}", text)
    return Shard(*map(int, found.groups())) if found else None


class Name(NamedTuple):
    """An object, the unit of storage: one shard of one chunk."""

    key: bytes
    shard: Shard

    def __str__(self) -> str:
        return f"{self.key.hex()}.{self.shard}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        stem, _, tail = text.partition(".")
        shard = Shard.parse(tail)
        try:
            key = bytes.fromhex(stem)
        except ValueError:
            return None
        # fromhex also accepts spaces and capitals, which would be a second spelling of one name.
        return cls(key, shard) if shard and len(key) == 32 and key.hex() == stem else None


class LayerShape(NamedTuple):
    """The KV heads of one layer, and its elements per token and head.

    Opaque: `k` is bytes per head and block.
    """

    heads: int
    k: int
    v: int


@dataclass(frozen=True)
class Layout:
    """How one engine stores the KV of the whole model. Layers may differ in size."""

    layers: tuple[LayerShape, ...]
    dtype: str
    block_tokens: int
    chunk_tokens: int
    packing: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            ours = next((ours for theirs, ours in OTHER_NAMES.items() if theirs in str(self.dtype)), "")
            hint = f"write {ours!r}" if ours else f"known: {', '.join(DTYPE_BYTES)}"
            raise LayoutError(f"unknown dtype {self.dtype!r}; {hint}")
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise LayoutError(
                f"a layout needs at least one layer, and at most {MAX_LAYERS}: not {len(self.layers)}"
            )
        if self.block_tokens <= 0 or self.chunk_tokens <= 0 or self.chunk_tokens % self.block_tokens:
            raise LayoutError(
                f"chunk_tokens={self.chunk_tokens} must be whole blocks of block_tokens={self.block_tokens}"
            )
        if not re.fullmatch(r"[a-z0-9][a-z0-9._:-]{0,63}", self.packing):
            raise LayoutError(f"packing {self.packing!r} is not a name ([a-z0-9._:-], 64 at most)")
        for number, (heads, k, v) in enumerate(self.layers):
            one_plane = self.is_opaque or self.packing == "latent"
            if heads <= 0 or k <= 0 or v < 0 or (one_plane and v) or not (one_plane or v):
                hint = f", which is none of {', '.join(KNOWN_PACKINGS)}, so opaque, without V"
                raise LayoutError(
                    f"layer {number}: heads={heads}, k={k}, v={v} does not fit packing {self.packing!r}"
                    f"{hint if self.is_opaque and v else ''}"
                )
        if self.nbytes(self.whole) > MAX_CHUNK:
            raise LayoutError(f"a chunk of this layout takes more than {size_text(MAX_CHUNK)}")
        if len(self.to_json()) > MAX_LAYOUT:
            raise LayoutError(
                f"this layout takes {len(self.to_json())} bytes as JSON, and an object's header has room "
                f"for {MAX_LAYOUT}: too many of its layers differ from the layer before"
            )

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: str,
        block_tokens: int,
        chunk_tokens: int,
        packing: str,
    ) -> Layout:
        """The common case: equal layers, K and V of the same size."""
        v = 0 if packing == "latent" else head_dim
        shape = LayerShape(heads, head_dim, v)
        return cls((shape,) * layers, dtype, block_tokens, chunk_tokens, packing)

    @property
    def is_opaque(self) -> bool:
        return self.packing not in KNOWN_PACKINGS

    @cached_property
    def head_units(self) -> int:
        """The units of the head ranges of shards: the layers' common divisor, so that every layer splits."""
        units = 0
        for shape in self.layers:
            units = gcd(units, shape.heads)
        return units

    @property
    def blocks(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def whole(self) -> Shard:
        return Shard(0, len(self.layers), 0, self.head_units)

    def heads(self, layer: int, shard: Shard) -> int:
        return self.layers[layer].heads // self.head_units * (shard.end_head - shard.first_head)

    def head_block_bytes(self, layer: int) -> int:
        """Bytes of one head in one block."""
        shape = self.layers[layer]
        if self.is_opaque:
            return shape.k
        return self.block_tokens * (shape.k + shape.v) * self.itemsize

    def layer_bytes(self, layer: int, shard: Shard) -> int:
        return self.blocks * self.heads(layer, shard) * self.head_block_bytes(layer)

    def offsets(self, shard: Shard) -> tuple[int, ...]:
        """Where each layer of the shard begins in the payload. The last number is the payload's size."""
        self.check(shard)
        units, ends = shard.end_head - shard.first_head, self._ends
        first = ends[shard.first_layer]
        return tuple((end - first) * units for end in ends[shard.first_layer : shard.end_layer + 1])

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Bytes of one head unit in all layers before each layer. The last number is for all layers."""
        one = Shard(0, len(self.layers), 0, 1)
        return (0, *accumulate(self.layer_bytes(layer, one) for layer in range(len(self.layers))))

    def nbytes(self, shard: Shard) -> int:
        self.check(shard)
        first, end, low, high = shard
        return (self._ends[end] - self._ends[first]) * (high - low)

    def check(self, shard: Shard) -> None:
        if shard.overlap(self.whole) != shard:
            raise LayoutError(f"shard {shard} is empty or outside of the model's {self.whole}")

    def shard(self, *, rank: int, ranks: int, layers: tuple[int, int] | None = None) -> Shard:
        """The shard of tensor-parallel rank `rank` of `ranks` in the pipeline stage `layers`.

        With more ranks than heads, several ranks get the same shard (see `writes`).
        """
        units = self.head_units
        if not 0 <= rank < ranks or (units % ranks and ranks % units):
            raise LayoutError(f"rank {rank} of {ranks} does not split {units} KV heads evenly")
        first, end = layers or (0, len(self.layers))
        low = rank * units // ranks
        shard = Shard(first, end, low, max(low + 1, (rank + 1) * units // ranks))
        self.check(shard)
        return shard

    def writes(self, *, rank: int, ranks: int) -> bool:
        """Whether this rank stores its shard. Of several ranks with the same shard, one stores it."""
        return rank % max(1, ranks // self.head_units) == 0

    def address(self, shard: Shard, *, layer: int, head: int, token: int, plane: int, element: int) -> int:
        """The byte offset in the payload of one element of K (plane 0) or V (plane 1).

        This is the definition of the layout: all faster code is tested against it. `head` counts within the
        layer of the whole model, `token` within the chunk.
        """
        shape, size = self.layers[layer], self.itemsize
        block, slot = divmod(token, self.block_tokens)
        head -= shape.heads // self.head_units * shard.first_head
        base = self.offsets(shard)[layer - shard.first_layer]
        base += (block * self.heads(layer, shard) + head) * self.head_block_bytes(layer)
        n, k, v = self.block_tokens, shape.k, shape.v
        match self.packing:
            case "token":
                at = slot * (k + v) + plane * k + element
            case "planes":
                at = plane * n * k + slot * (v if plane else k) + element
            case "latent":
                at = slot * k + element
            case "cpu-vec":
                at = n * k + slot * v + element if plane else element * n + slot
            case _:
                raise LayoutError(f"packing {self.packing!r} is opaque: it has no elements")
        return base + at * size

    def planes(self, payload: Array, shard: Shard, layer: int) -> tuple[Array, ...]:
        """Views [B, H, N, D] of K, and V if there is one, onto the payload's bytes (uint8, flat)."""
        start = self.offsets(shard)[layer - shard.first_layer]
        raw = payload[start : start + self.layer_bytes(layer, shard)]
        return self.split(raw.reshape(self.blocks, self.heads(layer, shard), -1), layer)

    def split(self, blocks: Array, layer: int) -> tuple[Array, ...]:
        """The planes [.., H, N, D] of raw head-blocks [.., H, bytes]; elements as unsigned integers."""
        if self.is_opaque:
            raise LayoutError(f"packing {self.packing!r} is opaque: it has no planes")
        _, k, v = self.layers[layer]
        n = self.block_tokens
        flat = blocks.view(f"u{self.itemsize}")
        outer = flat.shape[:-1]
        if self.packing == "token":
            rows = flat.reshape(*outer, n, k + v)
            return rows[..., :k], rows[..., k:]
        if self.packing == "latent":
            return (flat.reshape(*outer, n, k),)
        keys, values = flat[..., : n * k], flat[..., n * k :].reshape(*outer, n, v)
        if self.packing == "cpu-vec":
            return keys.reshape(*outer, k, n).swapaxes(-1, -2), values
        return keys.reshape(*outer, n, k), values

    def reads(self, stored: Layout) -> bool:
        """Whether bytes of layout `stored` can be turned into this one."""
        if self == stored:
            return True
        return (
            not self.is_opaque
            and not stored.is_opaque
            and self.layers == stored.layers
            and self.dtype == stored.dtype
            and self.chunk_tokens == stored.chunk_tokens
        )

    def to_json(self) -> bytes:
        """Canonical JSON for the object header. Equal layers are run-length coded."""
        return self._json

    @cached_property
    def _json(self) -> bytes:
        runs = [[len(list(run)), *shape] for shape, run in groupby(self.layers)]
        fields = {
            "block_tokens": self.block_tokens,
            "chunk_tokens": self.chunk_tokens,
            "dtype": self.dtype,
            "layers": runs,
            "packing": self.packing,
        }
        return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()

    @staticmethod
    def from_json(text: bytes) -> Layout:
        """The inverse of `to_json`.

        Equal layouts are one object. Raises LayoutError if the text is invalid.
        """
        if len(text) > MAX_LAYOUT:
            raise LayoutError(
                f"a layout of {len(text)} bytes of JSON: the header of an object has room for {MAX_LAYOUT}"
            )
        return _layout(text)


@lru_cache(maxsize=256)
def _layout(text: bytes) -> Layout:
    try:
        fields = json.loads(text)
        runs = [(int(count), LayerShape(*map(int, shape))) for count, *shape in fields["layers"]]
        if any(count < 1 for count, _ in runs) or sum(count for count, _ in runs) > MAX_LAYERS:
            raise LayoutError(f"a run of no layers, or more than {MAX_LAYERS} layers")
        layers = tuple(shape for count, shape in runs for _ in range(count))
        rest = {name: fields[name] for name in ("dtype", "block_tokens", "chunk_tokens", "packing")}
        layout = Layout(layers, **rest)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise LayoutError(f"not a layout: {error}") from None
    # 16.0 and true are equal to 16 and 1, but must not be interned instead of them.
    exact = type(layout.block_tokens) is int is type(layout.chunk_tokens)
    if not exact or layout.to_json() != text:
        raise LayoutError("not a layout: not in canonical form")
    return layout


@dataclass(frozen=True, eq=False)
class ChunkForm:
    """How a chunk is cut into objects: the shards that an engine's ranks store, and their layout.

    `form_of` interns forms, so they are compared by identity. `layout` is None for chunks that a scan
    found: file names contain the shards, but only headers contain the layout.
    """

    layout: Layout | None
    shards: tuple[Shard, ...]
    sizes: tuple[int, ...]
    """Payload bytes of each shard."""

    @cached_property
    def slab_bytes(self) -> int:
        """The bytes of its extents, in whole pages."""
        return sum(padded(size) for size in self.sizes)

    @cached_property
    def is_whole_pages(self) -> bool:
        return all(size % PAGE == 0 for size in self.sizes)

    @cached_property
    def stored_bytes(self) -> int:
        """The bytes of its objects in a lower tier, with header pages."""
        return sum(stored_size(size) for size in self.sizes)

    def serves(self, want: ChunkForm) -> bool:
        """Whether a reader of form `want` can read chunks of this form."""
        if self is want:
            return True
        cached = self._serves.get(want)
        if cached is None:
            readable = self.layout is None or want.layout is None or want.layout.reads(self.layout)
            cached = readable and all(cover(shard, self.shards) for shard in want.shards)
            self._serves[want] = cached
        return cached

    @cached_property
    def _serves(self) -> WeakKeyDictionary[ChunkForm, bool]:
        return WeakKeyDictionary()


_FORMS: WeakValueDictionary[tuple[Layout | None, tuple[Shard, ...], tuple[int, ...]], ChunkForm] = (
    WeakValueDictionary()  # values of any size come and go, and their forms with them
)


def form_of(layout: Layout | None, shards: Iterable[Shard], sizes: Iterable[int] | None = None) -> ChunkForm:
    """The interned ChunkForm of this layout and these shards. `sizes` is only needed without a layout."""
    cut = tuple(shards)
    if (shard := overlapping(cut)) is not None:
        raise LayoutError(f"shard {shard} overlaps another of the same form; replicas are stored once")
    if sizes is None:
        if layout is None:
            raise LayoutError("a form without a layout needs the sizes of its shards")
        sizes = (layout.nbytes(shard) for shard in cut)
    parts = (layout, cut, tuple(sizes))
    form = _FORMS.get(parts)
    return form or _FORMS.setdefault(parts, ChunkForm(*parts))


def overlapping(shards: Iterable[Shard]) -> Shard | None:
    """A shard that overlaps another one, if any does. It compares layer by layer, not pair by pair."""
    open_shards: list[Shard] = []  # in this layer, by their heads: disjoint, so only neighbours can overlap
    by_head = attrgetter("first_head")
    layer = -1
    for shard in sorted(each for each in shards if each.overlap(each)):
        if shard.first_layer > layer:
            layer = shard.first_layer
            open_shards = [each for each in open_shards if each.end_layer > layer]
        at = bisect_left(open_shards, shard.first_head, key=by_head)
        if any(shard.overlap(each) for each in open_shards[max(0, at - 1) : at + 1]):
            return shard
        insort(open_shards, shard, key=by_head)
    return None


def cover(want: Shard, have: Iterable[Shard]) -> tuple[tuple[Shard, Shard], ...] | None:
    """Which shard of a form supplies which part of `want`: (stored, part) pairs. None: a part is missing.

    A large shard gives a slice; several small ones are put together. Shards of one form do not overlap, so
    their parts cover `want` if their sizes add up to it.
    """
    plan = tuple((shard, part) for shard in have if (part := shard.overlap(want)))
    return plan if sum(part.area for _, part in plan) == want.area else None
