"""Placements: the same after texts and pickles, and nothing that does not fit is taken for one."""

import copy
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.core.match import Entry, EntryState, placement_of
from lmtier.core.placement import Placement, read_ranges, read_runs, write_ranges, write_runs
from lmtier.format.layout import PAGE, Layout, form_of

LAYOUT = Layout.uniform(
    layers=2, heads=4, head_dim=8, dtype="bf16", block_tokens=4, chunk_tokens=16, packing="token"
)
WHOLE = form_of(LAYOUT, [LAYOUT.whole])
HALVES = form_of(LAYOUT, [LAYOUT.shard(rank=rank, ranks=2) for rank in range(2)])
FORMS = [WHOLE, HALVES]


@st.composite
def placements(draw):
    number = draw(st.integers(0, 6))
    form = draw(st.sampled_from(FORMS))
    forms = [draw(st.sampled_from(FORMS)) for _ in range(number)]
    page, mark = st.integers(0, 1 << 40), st.binary(max_size=16)
    return Placement(
        form,
        tuple(bytes([n]) * 32 for n in range(number)),
        [tuple(PAGE * draw(page) for _ in each.shards) for each in forms],
        {
            n: marks
            for n, each in enumerate(forms)
            if draw(st.booleans()) and any(marks := tuple(draw(mark) for _ in each.shards))
        },
        {n: each for n, each in enumerate(forms) if each is not form},
    )


@given(placements())
def test_texts_and_pickles_say_it_all(placement):
    assert Placement.of(placement.form, (*placement.keys, b"more"), placement.fields()) == placement
    there = copy.deepcopy(placement)  # by what a pickle would hold
    assert there == placement
    assert there is not placement
    assert [id(form) for form in (there.form, *there.forms)] == [
        id(form) for form in (placement.form, *placement.forms)
    ]


@given(placements())
def test_the_placement_of_entries_has_all_that_they_have(placement):
    entries = []
    for chunk, (key, offsets) in enumerate(zip(placement.keys, placement.offsets, strict=True)):
        entry = Entry(key, placement.form_of(chunk), 0, EntryState.READY)
        entry.offsets, entry.marks = offsets, placement.marks.get(chunk, ())
        entries.append(entry)
    assert placement_of(placement.form, placement.keys, entries) == placement


@given(placements(), st.integers(0, 7))
def test_the_first_chunks_of_a_placement_are_a_placement(placement, count):
    first = placement.leading(count)
    assert copy.deepcopy(first) == first
    for name in ("keys", "offsets", "forms"):
        assert getattr(first, name) == getattr(placement, name)[:count]
    chunks = range(len(placement.keys))
    assert [first.marks.get(chunk) for chunk in chunks] == [
        placement.marks.get(chunk) if chunk < count else None for chunk in chunks
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"offsets": b"{"},
        {"offsets": bytes(16)},
        {"offsets": bytes(8), "marks": b"5:0:00"},
        {"offsets": bytes(8), "marks": b"0:1:00"},
        {"offsets": bytes(8), "forms": b"1*1", "other_forms": [[b"", b"L0-1H0"]]},
        {"offsets": bytes(8), "forms": b"2*1", "other_forms": []},
    ],
)
def test_what_does_not_fit_is_no_placement(fields):
    with pytest.raises((ValueError, IndexError, struct.error)):
        Placement.of(WHOLE, (b"a" * 32,), fields)


@given(st.lists(st.sampled_from(["cpu", "disk", "redis-2"])))
def test_runs(values):
    assert read_runs(write_runs(values)) == values


@given(st.sets(st.integers(0, 50)))
def test_ranges(numbers):
    assert read_ranges(write_ranges(sorted(numbers))) == sorted(numbers)
