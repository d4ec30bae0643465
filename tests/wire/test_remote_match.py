"""What a client knows of a match: as much as its server says, and no more than is complete when that dies."""

from typing import Any

import pytest

from lmtier.core.grant import Grant
from lmtier.core.placement import Placement, write_ranges
from lmtier.format.layout import PAGE, LayerShape, Layout, form_of
from lmtier.wire.verbs import RemoteMatch, read_match

LAYOUT = Layout((LayerShape(1, PAGE, 0),), "u8", 16, 16, "page")
FORM = form_of(LAYOUT, (LAYOUT.whole,))
KEYS = tuple(bytes([number]) * 32 for number in range(4))


def reply(chunks: int, state: bytes, sources: bytes = b"disk*4", **more: Any) -> dict[str, Any]:
    placement = Placement(FORM, KEYS[:chunks], [(PAGE * number,) for number in range(chunks)])
    return {"id": 7, "state": state, "sources": sources, **placement.fields(), **more}


def match(*, ends: bool = False) -> RemoteMatch:
    return RemoteMatch(KEYS, 0.0, FORM if ends else None, grant=Grant.of_nothing(FORM))


def flat(fields: dict[str, Any]) -> list[Any]:
    return [part for name, value in fields.items() for part in (name.encode(), value)]


END = flat(reply(1, b"ready", b"disk*1"))
END_BELOW = flat(reply(0, b"found", b"disk*1"))


@pytest.mark.parametrize(
    "fields",
    [reply(3, b"ready"), reply(4, b"ready", loading=write_ranges([2])), reply(4, b"found")],
    ids=["a chunk has no place", "a chunk is loading", "the server waits for more"],
)
def test_a_match_is_ready_if_all_of_it_is_there(fields):
    assert not read_match(match(), fields).is_ready
    assert read_match(match(), reply(4, b"ready")).is_ready


@pytest.mark.parametrize("end", [None, END_BELOW], ids=["none", "below"])
def test_a_match_is_ready_with_its_state(end):
    fields = reply(4, b"ready") | ({} if end is None else {"end": end})
    found = read_match(match(ends=True), fields)
    assert (found.is_ready, found.needs_prefetch, found.grant.state) == (False, True, None)
    found = read_match(match(ends=True), reply(4, b"ready", end=END))
    assert found.is_ready
    assert found.grant.state is not None


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        (reply(1, b"asking"), False),
        (reply(1, b"found"), True),
        (reply(4, b"found", loading=b"1-3"), False),
        (reply(4, b"ready"), False),
    ],
)
def test_what_is_below_is_asked_for_once(fields, needs):
    assert read_match(match(), fields).needs_prefetch is needs


@pytest.mark.parametrize(
    ("fields", "limit", "kept"),
    [
        (reply(2, b"asking"), 9, 2),
        (reply(4, b"found", loading=b"1 3"), 9, 1),
        (reply(4, b"found", loading=b"0-3"), 9, 0),
        (reply(4, b"found", loading=b"3"), 2, 2),
    ],
)
def test_without_its_server_a_match_keeps_what_is_complete(fields, limit, kept):
    found = read_match(match(), fields)
    found.lose_server(limit)
    assert (found.grant.id, found.grant.chunks) == (7, tuple(range(kept)))
    assert found.grant.placement.keys == KEYS[:kept]
    assert found.sources == ["disk"] * kept
    assert (found.is_ready, found.loading, found.pending_lookups) == (True, (), 0)
    assert (found.cut_reason, found.found) == ("tier_down", 4)


def test_without_its_server_a_wait_for_a_state_gets_nothing():
    found = read_match(match(ends=True), reply(4, b"found", end=END_BELOW))
    found.lose_server(9)
    assert (found.is_ready, found.chunks, found.grant.chunks, found.grant.state) == (True, 0, (), None)
