"""The places of chunks in the slab. Movers, the wire protocol and messages of engines share this value."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice, repeat
from typing import Any, TypeAlias

from lmtier.format.keys import KEY_BYTES
from lmtier.format.layout import ChunkForm, Layout, Shard, form_of, overlapping

Fields: TypeAlias = "Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class Placement:
    """All that a copy needs to know about some chunks, in their order. It can be pickled."""

    form: ChunkForm
    """The form of the chunks that `other_forms` does not name."""
    keys: tuple[bytes, ...]
    offsets: Sequence[tuple[int, ...]]
    """For each chunk, the offset of each shard of its form."""
    marks: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Maps few of the chunks to the fingerprint of each shard, or to nothing."""
    other_forms: Mapping[int, ChunkForm] = field(default_factory=dict)
    """Maps a chunk to its form, if it is stored in a form other than `form`."""

    def form_of(self, chunk: int) -> ChunkForm:
        return self.other_forms.get(chunk, self.form)

    @property
    def forms(self) -> list[ChunkForm]:
        """The form of each chunk."""
        return [*map(self.form_of, range(len(self.keys)))]

    def leading(self, count: int) -> Placement:
        marks = {chunk: marks for chunk, marks in self.marks.items() if chunk < count}
        other_forms = {chunk: form for chunk, form in self.other_forms.items() if chunk < count}
        return Placement(self.form, self.keys[:count], self.offsets[:count], marks, other_forms)

    def fields(self) -> dict[str, Any]:
        """The placement as a few fields that are cheap to write and to read, without `form` and `keys`."""
        offsets = [*chain.from_iterable(self.offsets)]
        fields: dict[str, Any] = {"offsets": struct.pack(f"<{len(offsets)}Q", *offsets)}
        if self.other_forms:
            numbers = {self.form: 0}
            form_numbers = [numbers.setdefault(form, len(numbers)) for form in self.forms]
            fields["forms"] = write_runs(form_numbers)
            fields["other_forms"] = [write_form(form) for form in list(numbers)[1:]]
        if self.marks:
            fields["marks"] = " ".join(
                f"{chunk}:{shard}:{mark.hex()}"
                for chunk, marks in self.marks.items()
                for shard, mark in enumerate(marks)
                if mark
            ).encode()
        return fields

    @classmethod
    def of(cls, form: ChunkForm, keys: tuple[bytes, ...], fields: Fields) -> Placement:
        """The inverse of `fields`. `keys` may be longer than the list of places."""
        offsets, other_forms = fields["offsets"], dict[int, ChunkForm]()
        if "forms" in fields:
            table = [form, *map(read_form, fields["other_forms"])]
            forms = [table[int(number)] for number in read_runs(fields["forms"])]
            other_forms = {chunk: each for chunk, each in enumerate(forms) if each is not form}
            offset_stream = iter(struct.unpack(f"<{sum(len(each.shards) for each in forms)}Q", offsets))
            chunk_offsets = [tuple(islice(offset_stream, len(each.shards))) for each in forms]
        else:
            chunk_offsets = list(struct.iter_unpack(f"<{len(form.shards)}Q", offsets))
        if len(chunk_offsets) > len(keys):
            raise ValueError(f"there are places for {len(chunk_offsets)} chunks, but only {len(keys)} keys")
        marks: dict[int, list[bytes]] = {}
        for text in fields.get("marks", b"").decode().split():
            chunk, shard, mark = text.split(":")
            each = marks.setdefault(int(chunk), [b""] * len(chunk_offsets[int(chunk)]))
            each[int(shard)] = bytes.fromhex(mark)
        marks_by_chunk = {chunk: tuple(each) for chunk, each in marks.items()}
        return cls(form, keys[: len(chunk_offsets)], chunk_offsets, marks_by_chunk, other_forms)

    def __reduce__(self) -> tuple[Callable[..., Placement], tuple[Any, ...]]:
        return _unpickled, (write_form(self.form), b"".join(self.keys), self.fields())


def _unpickled(form: Sequence[bytes], keys: bytes, fields: Fields) -> Placement:
    return Placement.of(read_form(form), keys_of(keys), fields)


def keys_of(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))


def write_form(form: ChunkForm) -> list[bytes]:
    """The inverse of `read_form`. A chunk that a scan found has no layout until it is loaded: only sizes."""
    layout = form.layout.to_json() if form.layout is not None else b""
    parts = (f"{shard}:{size}" for shard, size in zip(form.shards, form.sizes, strict=True))
    return [layout, *(part.encode() for part in parts)]


def read_form(text: Sequence[bytes]) -> ChunkForm:
    """The inverse of `write_form`."""
    layout, *parts = text
    pairs = [part.decode().split(":") for part in parts]
    shards = [_shard(shard) for shard, _ in pairs]
    return form_of(Layout.from_json(layout) if layout else None, shards, [int(size) for _, size in pairs])


def _shard(text: str) -> Shard:
    shard = Shard.parse(text)
    if shard is None:
        raise ValueError(f"{text!r} is not a shard")
    return shard


def write_runs(values: Sequence[object]) -> bytes:
    """`cpu*500 disk*12`"""
    if values and values.count(values[0]) == len(values):  # the usual case, at a tenth of the cost
        return f"{values[0]}*{len(values)}".encode()
    return " ".join(f"{value}*{sum(1 for _ in same)}" for value, same in groupby(values)).encode()


def read_runs(text: bytes) -> list[str]:
    """The inverse of `write_runs`."""
    values: list[str] = []
    for part in text.decode().split():
        value, count = part.rsplit("*", 1)
        values += repeat(value, int(count))
    return values


def write_ranges(numbers: Iterable[int]) -> bytes:
    """`0-5 7 9`. The numbers must be ascending."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return " ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in ranges).encode()


def read_ranges(text: bytes) -> list[int]:
    """The inverse of `write_ranges`."""
    numbers: list[int] = []
    for part in text.split():
        first, _, last = part.partition(b"-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def form_of_parts(cut: Iterable[tuple[Shard, int]]) -> ChunkForm | None:
    """The form of a chunk whose parts a scan found. None: they overlap, so no part can be trusted."""
    shards, sizes = zip(*sorted(cut), strict=True)
    if overlapping(shards) is not None:
        return None
    return form_of(None, shards, sizes)
