"""Hints: what each does, that one counts once, that unknown ones do nothing, and whose chunks they reach."""

from __future__ import annotations

from typing import Any

import pytest

from lmtier.core.cache import Cache
from lmtier.errors import MisuseError
from lmtier.format.keys import NO_TENANT, tenant
from lmtier.format.layout import Layout, form_of
from lmtier.rules.hints import (
    DONE,
    MAX_ACTIONS,
    REFUSED,
    REPEATED,
    UNKNOWN,
    DoneActions,
    actions_of,
    envelope,
)
from lmtier.rules.lifetimes import MAX_PINS
from lmtier.testing import Gate, MemoryTier, SlowTier
from tests.core.test_pinning import AT_REST, ONE, ROOM, C
from tests.core.test_sessions import ask, make, named, there, time
from tests.server.process import until

__all__ = ["make", "time"]

NEAR = f"near://?capacity={40 * AT_REST}&write=reused"


def hint(cache: Cache, kind: str, salt: str = "", of: str = "", **payload: Any) -> str:
    """The result of one action; `of` is the session that is meant if the payload names none."""
    hint.number += 1  # type: ignore[attr-defined]
    said = envelope(f"m{hint.number}", (kind, payload))  # type: ignore[attr-defined]
    ((_, _, result, why),) = cache.hint(actions_of(said), tenant(salt), of)
    cache.check()
    assert bool(why) == (result == REFUSED)
    return result


hint.number = 0  # type: ignore[attr-defined]


@pytest.fixture
def cache(make):
    return make(f"cpu://?capacity={12 * ROOM}&policy=lru")


@pytest.fixture
def tiered(make):
    """A cache with a lower tier, to which nothing is written unasked."""
    return make(f"cpu://?capacity={12 * ROOM}&policy=lru", NEAR, opened={NEAR: MemoryTier()})


def test_a_pinned_session_stays_and_release_lets_it_go(cache):
    ask(cache, named(3, "one"), "one")
    assert hint(cache, "pin", session="one") == DONE
    ask(cache, named(12, "flood"))
    assert there(cache, named(3, "one")) == 3
    assert hint(cache, "release", session="one") == DONE
    ask(cache, named(12, "more"))
    assert there(cache, named(3, "one")) == 0


def test_retained_chunks_stay_for_their_time(cache, time):
    ask(cache, named(3, "one"), "one")
    assert hint(cache, "retain", session="one") == REFUSED
    assert hint(cache, "retain", session="one", seconds=30) == DONE
    ask(cache, named(12, "flood"))
    assert there(cache, named(3, "one")) == 3
    time.pass_by(31)
    cache.step()
    ask(cache, named(12, "more"))
    assert there(cache, named(3, "one")) == 0


def test_ttl_ends_only_what_no_other_session_needs(cache, time):
    """A longer time that follows does not prolong it."""
    system = named(2, "system")
    ask(cache, [*system, *named(2, "one")], "one")
    ask(cache, [*system, *named(2, "two")], "two")
    assert hint(cache, "ttl", session="one", seconds=10) == DONE
    assert hint(cache, "ttl", session="one", seconds=100) == DONE
    time.pass_by(12)
    cache.step()
    assert there(cache, named(2, "one")) == 0
    assert there(cache, [*system, *named(2, "two")]) == 4


def test_an_end_is_kept_by_what_is_still_being_stored(make, time):
    """The ranks of an engine commit some steps after the request has ended, and its hint was sent."""
    cache = make(f"cpu://?capacity={12 * ROOM}&ttl=1000s")
    names = named(2, "one")
    reservation = cache.reserve(names, ONE)
    assert hint(cache, "ttl", keys=[key.hex() for key in names], seconds=10) == DONE
    cache.commit(reservation)
    time.pass_by(12)
    cache.step()
    assert there(cache, names) == 0


def test_an_end_is_kept_by_what_is_being_read(make, time):
    gate = Gate()
    cache = make(f"cpu://?capacity={12 * ROOM}&policy=lru", NEAR, opened={NEAR: SlowTier(MemoryTier(), gate)})
    names = named(2, "one")
    ask(cache, names, "one")
    assert hint(cache, "demote", session="one") == DONE
    assert cache.flush()
    ask(cache, named(12, "flood"))
    assert there(cache, names) == 0
    gate.hold()
    match = cache.match(names, ONE)
    cache.prefetch(match)
    assert hint(cache, "ttl", keys=[key.hex() for key in names], seconds=10) == DONE
    gate.open()
    cache.wait(match)
    assert len(match.run) == 2
    cache.release(match)
    time.pass_by(12)
    cache.step()
    assert there(cache, names) == 0
    assert not any(cache.lower[0].is_stored(key, ONE) for key in names)


def test_two_prefetches_with_one_head_read_all_of_it(make, tmp_path):
    """Of a chunk that is just loading after a restart only the size at rest is known, behind a codec."""
    tiers = "cpu://?capacity=4MiB", f"disk://{tmp_path}/kv?capacity=4MiB&codec=shuffle-zstd"
    layout = Layout.uniform(
        layers=1, heads=2, head_dim=8192, dtype="bf16", block_tokens=C, chunk_tokens=C, packing="token"
    )
    form = form_of(layout, (layout.whole,))
    head, one, two = named(1, "system"), named(2, "one"), named(2, "two")
    cache = make(*tiers)
    for names in (one, two):
        cache.commit(cache.reserve([*head, *names], form))
    cache.close()
    assert sum(file.stat().st_size for file in (tmp_path / "kv").rglob("*.L*")) < 5 * form.slab_bytes / 2
    cache = make(*tiers)
    for session, names in (("one", one), ("two", two)):
        cache.release(cache.match([*head, *names], form, session=session))
    assert hint(cache, "prefetch", session="one") == DONE
    assert hint(cache, "prefetch", session="two") == DONE
    below = cache.lower.owned[0]
    until(lambda: cache.step() >= 0 and cache.index.leased_bytes == 0 and not below.has_jobs)
    assert there(cache, [*head, *one, *two]) == 5
    assert len(below.index) == 5
    assert cache.metrics.value("lmtier_tier_failures_total", tier="disk", op="load", reason="corrupt") == 0


def test_demoted_chunks_leave_first_and_can_be_prefetched(tiered):
    ask(tiered, named(4, "old"), "old")
    ask(tiered, named(4, "one"), "one")
    assert hint(tiered, "demote", session="one") == DONE
    assert tiered.flush()
    near = tiered.lower.named["near"]
    assert [near.is_stored(key, ONE) for key in [*named(4, "one"), *named(4, "old")]] == [True] * 4 + [
        False
    ] * 4
    ask(tiered, named(8, "new"))
    assert (there(tiered, named(4, "one")), there(tiered, named(4, "old"))) == (0, 4)
    assert hint(tiered, "prefetch", session="one") == DONE
    until(lambda: tiered.step() >= 0 and tiered.index.leased_bytes == 0 and not near.has_jobs)
    assert there(tiered, named(4, "one")) == 4


def test_a_prefetch_of_keys_of_unknown_form_is_refused(tiered):
    assert hint(tiered, "prefetch", keys=[key.hex() for key in named(2, "never")]) == REFUSED


def test_an_ended_session_is_unpinned_too(cache):
    ask(cache, named(3, "one"), "one")
    assert hint(cache, "pin", session="one") == DONE
    assert hint(cache, "session_end", session="one") == DONE
    assert cache.pinned() == []
    ask(cache, named(12, "flood"))
    assert there(cache, named(3, "one")) == 0
    assert hint(cache, "session_end", session="one") == REFUSED  # it is not known any more


def test_a_session_that_waits_says_for_whom(cache):
    ask(cache, named(4, "one"), "one")
    ask(cache, named(4, "two"), "two")
    assert hint(cache, "session_wait", session="two", **{"for": "rain"}) == REFUSED
    assert hint(cache, "session_wait", session="two") == DONE
    assert [each.state for each in cache.sessions.recent(2)].count("waiting") == 1
    assert hint(cache, "session_wait", session="two", **{"for": "tool"}) == DONE
    ask(cache, named(8, "new"))
    assert (there(cache, named(4, "one")), there(cache, named(4, "two"))) == (0, 4)


def test_keys_can_be_named_instead_of_a_session(cache):
    ask(cache, named(3, "one"))
    names = [key.hex() for key in named(3, "one")]
    assert hint(cache, "pin", keys=names) == DONE
    ask(cache, named(12, "flood"))
    assert there(cache, named(3, "one")) == 3
    assert hint(cache, "release", keys=names) == DONE
    assert hint(cache, "session_end", keys=names) == REFUSED
    assert hint(cache, "pin", keys=names, session="one") == REFUSED
    assert hint(cache, "pin", keys=["00"]) == REFUSED
    assert hint(cache, "pin", keys=[7]) == REFUSED
    assert hint(cache, "pin", keys="x") == REFUSED
    assert hint(cache, "pin", keys=names * 2) == REFUSED


def test_a_tenant_reaches_only_its_own_sessions_and_chunks(cache):
    mine, theirs = named(4, "one", "mine"), named(4, "one", "theirs")
    ask(cache, mine, "one")
    ask(cache, theirs, "one")
    assert hint(cache, "session_end", "mine", "one") == DONE
    names = [key.hex() for key in theirs]
    for kind in ("pin", "ttl", "demote", "release", "prefetch"):
        payload: dict[str, Any] = {"seconds": 1} if kind == "ttl" else {}
        assert hint(cache, kind, "mine", keys=names, **payload) == REFUSED
        assert hint(cache, kind, "mine", "one", **payload) == (DONE if kind == "release" else REFUSED)
    ask(cache, named(8, "flood"))
    assert (there(cache, mine), there(cache, theirs)) == (0, 4)
    assert cache.sessions.get(tenant("theirs"), "one") is not None


def test_a_repeated_action_counts_once_unless_refused(cache):
    said = actions_of(envelope("m", ("pin", {"session": "one"})))
    assert [each.result for each in cache.hint(said)] == [REFUSED]
    ask(cache, named(3, "one"), "one")
    assert [each.result for each in cache.hint(said)] == [DONE]
    cache.unpin(cache.pinned()[0].name)
    assert [each.result for each in cache.hint(said)] == [REPEATED]
    assert cache.pinned() == []
    assert [each.result for each in cache.hint(said, tenant("other"))] == [REFUSED]  # ids are a tenant's own


def test_unknown_actions_and_versions_are_only_counted(cache):
    ask(cache, named(3, "one"), "one")
    said = envelope("m", ("fetch", {"from": "elsewhere"}), ("pin", {"session": "one"}))
    said["actions"][1]["action_version"] = "7"
    assert [each.result for each in cache.hint(actions_of(said))] == [UNKNOWN, UNKNOWN]
    said = envelope("n", ("pin", {"session": "one"}))
    said["protocol_version"] = "2"
    assert [each.result for each in cache.hint(actions_of(said))] == [UNKNOWN]
    assert cache.pinned() == []
    counted = cache.metrics.sums(cache.metrics.hints, "action", "result")
    assert counted == {"other unknown": 1, "pin unknown": 2}


def test_a_hint_with_unknown_arguments_is_refused(cache):
    ask(cache, named(3, "one"), "one")
    assert hint(cache, "pin", session="one", colour="red") == REFUSED
    for seconds in (0, -1, True, "5", float("nan"), 1e30):
        assert hint(cache, "retain", session="one", seconds=seconds) == REFUSED


def test_a_pin_beyond_half_of_the_slab_is_refused(cache):
    ask(cache, named(8, "one"), "one")
    assert hint(cache, "pin", session="one") == REFUSED


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, [], {}, {"protocol_version": "1", "message_id": "m"}),
        {"protocol_version": 1, "message_id": "m", "actions": []},
        {"protocol_version": "1", "message_id": "m", "actions": [7]},
        {"protocol_version": "1", "message_id": "m", "actions": [{"action_id": "a"}]},
        {**envelope("m"), "actions": [{}] * (MAX_ACTIONS + 1)},
        {**envelope("m", ("pin", {})), "message_id": "x" * 200},
    ],
)
def test_another_shape_is_refused_in_a_sentence(wrong):
    with pytest.raises(MisuseError):
        actions_of(wrong)


def test_only_so_many_ids_are_remembered():
    remembered = DoneActions(most=2)
    for name in ("a", "b", "c"):
        remembered.add(NO_TENANT, name)
    assert [remembered.has(NO_TENANT, name) for name in "abc"] == [False, True, True]
    assert len(remembered) == 2


# ---- what hints may keep


def test_a_pin_of_a_hint_lasts_a_day_at_most(cache, time):
    ask(cache, named(3, "one"), "one")
    assert hint(cache, "pin", session="one") == DONE
    for kind in ("pin", "retain"):
        assert hint(cache, kind, session="one", seconds=86_401) == REFUSED
    time.pass_by(86_399)
    cache.step()
    assert [pin.seconds_left for pin in cache.pinned()] == [1.0]
    time.pass_by(2)
    cache.step()
    assert cache.pinned() == []


def test_pins_of_hints_leave_room_for_pins_of_people(cache):
    """Also if their chunks come after the pin."""
    later = [key.hex() for key in named(6, "later")]
    assert hint(cache, "pin", keys=later) == DONE
    ask(cache, named(6, "later"))
    assert cache.index.pinned_bytes == 3 * ROOM
    ask(cache, named(2, "one"), "one")
    assert hint(cache, "pin", session="one") == REFUSED
    ask(cache, named(3, "person"))
    assert cache.pin("person", named(3, "person")) == {"cpu": 3}
    assert hint(cache, "release", keys=later) == DONE
    assert hint(cache, "pin", session="one") == REFUSED, "those of people count"


def test_pins_of_hints_have_places_and_names_of_their_own(cache):
    for number in range(MAX_PINS):
        assert hint(cache, "pin", keys=[named(1, f"never{number}")[0].hex()]) == DONE
    ask(cache, named(3, "one"), "one")
    assert hint(cache, "pin", session="one") == REFUSED
    name = f"{NO_TENANT.hex()} one"
    assert cache.pin(name, named(3, "one")) == {"cpu": 3}
    assert hint(cache, "release", session="one") == DONE
    assert hint(cache, "session_end", session="one") == DONE
    assert [pin.name for pin in cache.pinned() if pin.pinned["cpu"]] == [name]


def test_a_chunk_pinned_by_a_hint_outlasts_a_persons_unpin(cache):
    ask(cache, named(3, "one"), "one")
    assert hint(cache, "pin", session="one") == DONE
    assert cache.pin("person", named(3, "one")) == {"cpu": 3}
    assert cache.unpin("person")
    ask(cache, named(12, "flood"))
    assert there(cache, named(3, "one")) == 3
    cache.check()
