"""Who follows a cache learns of every chunk that comes and goes, in order, or that it has missed some."""

from __future__ import annotations

from pathlib import Path

from lmtier.client.client import Client
from lmtier.observe.journal import Change, Journal
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
