"""Copies in GPU memory: never read before they are complete, never given away while they are used."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmtier.copy.gpu_copies import GpuCopies, GpuSlot, GpuSlots
from lmtier.core.match import EntryState
from lmtier.core.placement import Placement
from lmtier.errors import MisuseError
from lmtier.format.layout import PAGE, ChunkForm, Layout, Shard, form_of
from lmtier.rules.policy import POLICIES

LAYOUT = Layout.uniform(
    layers=2, heads=4, head_dim=32, dtype="bf16", block_tokens=4, chunk_tokens=8, packing="token"
)
WHOLE = form_of(LAYOUT, [LAYOUT.whole])
"""Two pages a chunk."""
SPLIT = form_of(LAYOUT, [Shard(0, 2, 0, 3), Shard(0, 2, 3, 4)])
"""The larger one takes two, too."""
QUARTERS = form_of(LAYOUT, [Shard(0, 2, head, head + 1) for head in range(4)])
"""One page."""


def key(name: object) -> bytes:
    return hashlib.sha256(f"{name}".encode()).digest()


def promised(*names: object, form: ChunkForm = WHOLE, mark: bytes = b"") -> Placement:
    """What a match has of the slab."""
    marks = dict.fromkeys(range(len(names) if mark else 0), (mark,) * len(form.shards))
    return Placement(form, tuple(map(key, names)), [(0,) * len(form.shards)] * len(names), marks)


def there(places: GpuSlots) -> list[bool | None]:
    """Of each chunk: is it there, is it to be filled, or has it none?"""
    return [None if place is None else place.is_filled for place in places.by_chunk]


def put(copies: GpuCopies, run: Placement, form: ChunkForm = WHOLE) -> GpuSlots:
    places = copies.load(run, form)
    copies.release(places)
    copies.check()
    return places


def test_the_next_load_finds_gpu_copies_of_the_last():
    copies, run = GpuCopies(8 * PAGE), promised("a", "b")
    first = put(copies, run)
    assert there(first) == [False, False]
    second = copies.load(run, WHOLE)
    assert second.by_chunk == tuple(GpuSlot(place.offset, True) for place in first.by_chunk if place)
    assert second.filled == 2


def test_what_is_being_filled_nobody_else_reads_or_fills():
    copies, run = GpuCopies(8 * PAGE), promised("a")
    filling = copies.load(run, WHOLE)
    meanwhile = copies.load(run, WHOLE)
    assert there(meanwhile) == [None]
    copies.release(meanwhile)
    assert there(copies.load(run, WHOLE)) == [None]
    copies.release(filling)
    assert there(copies.load(run, WHOLE)) == [True]
    copies.check()


def test_what_was_not_believed_is_not_there():
    copies, run = GpuCopies(8 * PAGE), promised("a", "b")
    copies.release(copies.load(run, WHOLE), is_verified=False)
    assert copies.extents.used == 0
    put(copies, promised("a"))
    copies.release(copies.load(run, WHOLE), is_verified=False)
    assert copies.extents.used == 0
    assert there(copies.load(run, WHOLE)) == [False, False]
    copies.check()


def test_without_room_the_rest_of_a_run_goes_as_before():
    copies = GpuCopies(4 * PAGE)
    assert there(copies.load(promised("a", "b", "c"), WHOLE)) == [False, False, None]
    assert there(copies.load(promised("d"), WHOLE)) == [None]
    copies.check()


def test_a_load_makes_no_room_of_what_it_reads_itself():
    copies = GpuCopies(4 * PAGE)
    put(copies, promised("c"))
    put(copies, promised("z"))
    assert there(copies.load(promised("a", "b", "c"), WHOLE)) == [False, None, True]
    copies.check()


def test_a_gpu_copy_being_read_keeps_its_extent():
    copies, run = GpuCopies(2 * PAGE), promised("a")
    put(copies, run)
    reading = copies.load(run, WHOLE)
    assert there(copies.load(promised("b"), WHOLE)) == [None]
    copies.forget([key("a")])
    assert there(copies.load(promised("b"), WHOLE)) == [None]
    copies.release(reading)
    assert there(copies.load(promised("b"), WHOLE)) == [False]
    copies.check()


def test_clearing_frees_room_when_the_last_transfer_ends():
    copies, run = GpuCopies(8 * PAGE), promised("a", "b")
    put(copies, promised("a"))
    one, other = copies.load(run, WHOLE), copies.load(run, WHOLE)
    copies.clear()
    copies.check()
    assert len(copies.index) == 0
    copies.release(one)
    copies.check()
    assert copies.extents.used == 2 * PAGE, "the other load still reads it"
    copies.release(other)
    copies.check()
    assert copies.extents.used == 0
    assert there(copies.load(run, WHOLE)) == [False, False], "what was filled meanwhile is forgotten too"


def test_places_are_given_back_once():
    copies = GpuCopies(8 * PAGE)
    places = put(copies, promised("a"))
    with pytest.raises(MisuseError, match="given back before"):
        copies.release(places)


def test_the_tail_of_a_prompt_leaves_before_its_head():
    copies = GpuCopies(6 * PAGE)
    put(copies, promised("a", "b", "c"))
    put(copies, promised("x", "y"))
    assert [key(name) in copies.index for name in "abcxy"] == [True, False, False, True, True]


def test_a_run_from_the_middle_is_linked_to_its_parent():
    """The engine has the beginning itself, mostly."""
    copies = GpuCopies(8 * PAGE)
    put(copies, promised("a", "b"))
    put(copies, promised("b", "c"))
    put(copies, promised("c", "d"))
    chain = [copies.index.get(key(name)) for name in "abcd"]
    assert [entry.parent for entry in chain if entry] == [None, *chain[:-1]]


def test_a_recomputed_chunk_is_not_read_from_its_old_copy():
    """Its last bits differ, and its fingerprint with them."""
    copies = GpuCopies(8 * PAGE)
    put(copies, promised("a", mark=b"one"))
    assert there(put(copies, promised("a", mark=b"one"))) == [True]
    assert there(put(copies, promised("a", mark=b"two"))) == [False]
    assert there(put(copies, promised("a", mark=b"two"))) == [True]


def test_no_fingerprint_equals_empty_fingerprints():
    copies = GpuCopies(8 * PAGE)
    put(copies, promised("a", form=SPLIT), SPLIT)
    empty = replace(promised("a", form=SPLIT), marks={0: (b"", b"")})
    assert there(copies.load(empty, SPLIT)) == [True]


def test_a_chunk_takes_what_the_largest_shard_does():
    copies = GpuCopies(8 * PAGE)
    put(copies, promised("a", form=SPLIT), SPLIT)
    assert copies.extents.used == 2 * PAGE
    put(copies, promised("b", form=QUARTERS), QUARTERS)
    assert copies.extents.used == 3 * PAGE


def test_a_copy_for_another_form_is_not_read_but_replaced():
    copies = GpuCopies(2 * PAGE)
    put(copies, promised("a"))
    assert there(put(copies, promised("a", "b"), QUARTERS)) == [False, False]
    assert there(put(copies, promised("a", "b"), QUARTERS)) == [True, True]


def test_memory_in_pieces_becomes_whole_again():
    copies = GpuCopies(4 * PAGE)
    put(copies, promised(1, 2, 3, 4, form=QUARTERS), QUARTERS)
    assert there(put(copies, promised("a", "b"))) == [False, False]


def test_room_in_pieces_is_joined_by_one_more_that_leaves():
    copies = GpuCopies(4 * PAGE)
    put(copies, promised(1, 2, 3, 4, form=QUARTERS), QUARTERS)
    copies.forget([key(1), key(3)])
    assert there(put(copies, promised("a"))) == [False]
    assert len(copies.index) == 2


def test_a_chunk_used_often_outlasts_many_used_once():
    copies = GpuCopies(8 * PAGE, "auto")
    for _ in range(3):
        put(copies, promised("system"))
    for once in range(30):
        put(copies, promised(once))
    assert there(put(copies, promised("system"))) == [True]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policies_are_those_of_every_tier(policy):
    copies, chance = GpuCopies(12 * PAGE, policy), Random(policy)
    hits = 0
    for _ in range(300):
        prompt = min(int(chance.expovariate(0.7)), 5)
        places = put(copies, promised("system", *(f"{prompt}.{n}" for n in range(chance.randint(1, 3)))))
        hits += places.filled
    assert hits > 200


class Transfers(RuleBasedStateMachine):
    """Any order of loads and their ends, beside a dict of what can be read, and memory of pages."""

    chunks = st.integers(0, 3), st.integers(1, 4)
    forms = st.sampled_from([WHOLE, WHOLE, WHOLE, QUARTERS])

    @initialize(policy=st.sampled_from(sorted(POLICIES)), pages=st.integers(2, 12))
    def begin(self, policy: str, pages: int) -> None:
        self.copies = GpuCopies(pages * PAGE, policy)
        self.memory: list[object] = [None] * pages
        self.readable: dict[bytes, object] = {}
        self.version = dict.fromkeys((key(n) for n in range(8)), 0)
        self.open: list[tuple[GpuSlots, Placement, int, dict[int, object]]] = []

    def run_of(self, first: int, length: int, form: ChunkForm) -> Placement:
        run = promised(*range(first, first + length), form=form)
        versions = enumerate(self.version[name] for name in run.keys)
        marks = {chunk: (b"%d" % version,) * len(form.shards) for chunk, version in versions if version}
        return replace(run, marks=marks)

    def content(self, name: bytes, form: ChunkForm) -> object:
        return name, self.version[name], form

    def started(self, places: GpuSlots, run: Placement, form: ChunkForm) -> None:
        """It begins at once: reads are right from now to the end, and what is to be filled holds rubbish."""
        pages = max(form.sizes) // PAGE
        contents = {}
        for number, (name, place) in enumerate(zip(run.keys, places.by_chunk, strict=True)):
            if place is None:
                continue
            at = place.offset // PAGE
            if place.is_filled:
                assert self.memory[at : at + pages] == [self.readable[name]] * pages
                assert self.readable[name] == self.content(name, form)
            else:
                self.readable.pop(name, None)
                self.memory[at : at + pages] = [object()] * pages
            contents[number] = self.content(name, form)
        self.open.append((places, run, pages, contents))

    @rule(first=chunks[0], length=chunks[1], form=forms)
    def load(self, first: int, length: int, form: ChunkForm) -> None:
        run = self.run_of(first, length, form)
        self.started(self.copies.load(run, form), run, form)

    @rule(number=st.integers(0, 7))
    def computed_anew(self, number: int) -> None:
        self.version[key(number)] += 1

    @rule(numbers=st.sets(st.integers(0, 7)), everything=st.booleans())
    def forget(self, numbers: set[int], everything: bool) -> None:
        if everything:
            self.copies.clear()
            self.readable.clear()
        self.copies.forget(map(key, numbers))
        for number in numbers:
            self.readable.pop(key(number), None)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), believed=st.booleans())
    def done(self, data: st.DataObject, believed: bool) -> None:
        which = data.draw(st.integers(0, len(self.open) - 1))
        places, run, pages, contents = self.open.pop(which)
        still = {copy.key for copy, _ in places.held if copy.state is not EntryState.GONE}
        for number, (name, place) in enumerate(zip(run.keys, places.by_chunk, strict=True)):
            if place is None:
                continue
            at = place.offset // PAGE
            if place.is_filled:
                assert self.memory[at : at + pages] == [contents[number]] * pages, "read, and overwritten"
            else:
                self.memory[at : at + pages] = [contents[number]] * pages
            if not believed:
                self.readable.pop(name, None) if name in still else None
            elif name in still and not place.is_filled:
                self.readable[name] = contents[number]
        self.copies.release(places, is_verified=believed)

    @invariant()
    def all_books_agree(self) -> None:
        self.copies.check()

    @invariant()
    def what_is_used_is_used_by_one_chunk_alone(self) -> None:
        filled = [
            page
            for places, _, pages, _ in self.open
            for place in places.by_chunk
            if place is not None and not place.is_filled
            for page in range(place.offset // PAGE, place.offset // PAGE + pages)
        ]
        read = {
            page
            for places, _, pages, _ in self.open
            for place in places.by_chunk
            if place is not None and place.is_filled
            for page in range(place.offset // PAGE, place.offset // PAGE + pages)
        }
        assert len(set(filled)) == len(filled)
        assert not read & set(filled)

    def teardown(self) -> None:
        if not hasattr(self, "copies"):
            return
        for places, *_ in self.open:
            self.copies.release(places)
        self.copies.clear()
        self.copies.check()
        assert self.copies.extents.used == 0


Transfers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTransfers = Transfers.TestCase
