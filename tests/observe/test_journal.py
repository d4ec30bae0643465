"""Who follows a cache learns of every chunk that comes and goes, in order, or that it has missed some."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.client.client import Client
from lmtier.observe.journal import LENGTH, Change, Journal, Record
from tests.client.test_client import keys, look, serve, store  # noqa: F401  # the fixture
from tests.server.process import until


def test_changes_come_in_order_and_once():
    journal = Journal()
    journal.changed("cpu", True, keys(3), "")
    journal.changed("cpu", False, keys(1), "")
    assert journal.since(0, 2) == [Change("cpu", True, key) for key in keys(2)]
    assert journal.since(2, 10) == [Change("cpu", True, keys(3)[2]), Change("cpu", False, keys(1)[0])]
    assert journal.since(4, 10) == []


def test_who_falls_behind_is_told_so():
    journal = Journal(length=4)
    journal.changed("cpu", True, keys(6), "")
    assert journal.since(1, 10) is None
    assert journal.since(2, 10) == [Change("cpu", True, key) for key in keys(6)[2:]]
    assert journal.since(7, 10) is None


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["cpu", "disk", ""]),  # "": a chunk that was not stored
        st.booleans(),
        st.sampled_from(["", "evicted", "cleared"]),
        st.lists(st.integers(0, 9), max_size=6),
    ),
    max_size=20,
)


@settings(deadline=None)
@given(steps=_STEPS, length=st.integers(1, 12), asked=st.sets(st.integers(0, 9), max_size=4))
def test_what_was_noted_is_found_until_it_is_too_old(steps, length, asked):
    names = keys(10)
    times = iter(range(10_000))
    journal = Journal(length, clock=lambda: float(next(times)), is_record=lambda key: key == names[9])
    changes: list[Record] = []
    unstored: list[Record] = []
    for at, (tier, came, why, numbers) in enumerate(steps):
        noted = [names[number] for number in numbers]
        kept = [key for key in noted if key != names[9]]
        if tier:
            journal.changed(tier, came, noted, why)
            changes += [Record(tier, came, key, at, why, True) for key in kept]
        else:
            journal.not_stored("disk", noted, why)
            unstored += [Record("disk", False, key, at, why, False) for key in kept]
    wanted = {names[number] for number in asked}
    known = changes[-length:] + unstored[-length:]
    assert journal.past(wanted) == [record for record in known if record.key in wanted]
    assert journal.end == len(changes)
    oldest = max(0, len(changes) - length)
    assert journal.since(oldest, 99) == [
        Change(record.tier, record.is_added, record.key) for record in changes[-length:]
    ]
    assert oldest == 0 or journal.since(oldest - 1, 99) is None


def test_a_full_journal_takes_few_bytes_a_record():
    names = keys(64)
    tracemalloc.start()
    journal = Journal()
    for number in range(2 * LENGTH // 64):
        journal.changed("cpu", bool(number % 2), names, "evicted")
        journal.not_stored("disk", names, "no_room")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(journal.past(names[:1])) == 2 * LENGTH // 64
    assert taken < 2 * LENGTH * 50


def test_a_follower_mirrors_what_the_tiers_hold(serve, tmp_path: Path):  # noqa: F811
    server = serve(f"disk://{tmp_path}/kv?capacity=64MiB")
    held: dict[str, set[bytes]] = {"cpu": set(), "disk": set()}

    def follow() -> bool:
        changes = client.changes()
        assert changes is not None
        for tier, came, key in changes:
            assert (key in held[tier]) != came
            (held[tier].add if came else held[tier].discard)(key)
        return {tier: len(found) for tier, found in held.items()} == {
            tier: facts["chunks"] for tier, facts in client.stats().items()
        }

    with Client(server.path) as client:
        assert client.changes() == []
        for number in range(40):  # more than the memory takes
            store(client, keys(4, f"prompt {number}"))
            assert client.flush()
        until(follow)
        assert len(held["cpu"]) < 160 == len(held["disk"])
        first = keys(4, "prompt 0")
        assert not held["cpu"] & {*first}
        assert look(client, first) == ["disk"] * 4
        until(follow)
        assert held["cpu"] >= {*first}
        client.clear()
        until(follow)
        assert held == {"cpu": set(), "disk": set()}


def test_another_run_of_the_server_is_a_gap(serve):  # noqa: F811
    server = serve()
    with Client(server.path) as client:
        assert client.changes() == []
        store(client, keys(2))
        assert client.changes() == [Change("cpu", True, key) for key in keys(2)]
        server.kill()
        assert client.changes() == []  # nothing is known of a server that is not there
        server.start()
        until(lambda: client.changes() is None)
        assert client.changes() == []
