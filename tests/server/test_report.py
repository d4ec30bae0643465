"""What a server tells about itself: true, cheap, and without secrets."""

import hashlib
import json
import math
from typing import Any

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.layout import form_of, padded
from lmtier.rules.worth import Cost
from lmtier.server.report import History, Report, _nothing
from lmtier.testing import FlakyTier, Gate, MemoryTier, SlowTier, opaque_layout
from lmtier.tiers.base import Op

LAYOUT = opaque_layout(8192)
FORM = form_of(LAYOUT, (LAYOUT.whole,))


def keys(count, name="a"):
    return [hashlib.sha256(f"{name}{i}".encode()).digest() for i in range(count)]


def store(cache, names):
    reservation = cache.reserve(names, FORM)
    if reservation.chunks:
        cache.commit(reservation)


def look(cache, names, tokens=None):
    cache.release(cache.wait(cache.match(names, FORM, tokens=tokens)))


@pytest.fixture
def make():
    caches = []

    def make(*urls, opened=None, queue_length=4096, **options):
        config = Config(
            tiers=[f"cpu://?capacity={4 * padded(8192)}", *urls],
            chunk_tokens=1,
            prefault=False,
            load_deadline=30.0,
            queue_length=queue_length,
        )
        caches.append(Cache(config, tiers=opened, **options))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close(timeout=5)


def report_of(cache, clients=()):
    return Report(cache, lambda: list(clients), started=100.0, clock=lambda: 107.5)


def test_tokens_asked_are_hits_and_misses(make, tmp_path):
    cache = make(f"disk://{tmp_path}?capacity=1MiB")
    store(cache, keys(3))
    cache.flush()
    store(cache, keys(4, "others"))  # drives the first three out of the slab
    cache.flush()
    look(cache, keys(3))
    look(cache, keys(4, "others"), tokens=6)
    look(cache, keys(2, "never"))
    counted = report_of(cache).snapshot()["counted"]
    assert counted["asked"] == 3 + 6 + 2 == sum(counted["hit"].values()) + sum(counted["missed"].values())
    assert counted["hit"]["disk"] >= 3
    assert counted["missed"] == {"partial_chunk": 2, "never_stored": 2}
    assert counted["stored"]["cpu"] == 7
    assert counted["lookups"] == 3


def test_a_tier_tells_what_it_holds_and_moved(make, tmp_path):
    cache = make(f"disk://{tmp_path}?capacity=1MiB")
    store(cache, keys(3))
    cache.flush()
    store(cache, keys(4, "others"))
    cache.flush()
    look(cache, keys(3))
    cache.flush()
    snapshot = report_of(cache).snapshot()
    (cpu, disk), counted = snapshot["tiers"], snapshot["counted"]
    assert (cpu["tier"], cpu["capacity"], cpu["write"]) == ("cpu", cache.index.capacity, None)
    assert (cpu["chunks"], cpu["used"]) == (len(cache.index), cache.index.used)
    below = cache.lower.owned[0].index
    assert (disk["chunks"], disk["used"], disk["capacity"]) == (7, below.used, below.capacity)
    assert counted["down"]["disk"] == 7 * FORM.stored_bytes
    assert counted["up"]["disk"] == 3 * FORM.stored_bytes
    assert counted["moves"]["disk"] == 7 + 3
    assert counted["evicted"]["cpu"] == cache.metrics.value(
        "lmtier_evictions_total", tier="cpu", cause="capacity"
    ) + cache.metrics.value("lmtier_evictions_total", tier="cpu", cause="capacity_unwritten")
    assert counted["evicted"]["cpu"] > 0


def test_sums_agree_with_the_exposition(make, tmp_path):
    cache = make(f"disk://{tmp_path}?capacity=1MiB")
    store(cache, keys(3))
    look(cache, keys(4))
    cache.flush()
    metrics = cache.metrics
    hits = metrics.value("lmtier_hit_tokens_total", tier="cpu")
    assert metrics.sums(metrics.hit_tokens, "tier") == {"cpu": hits, "disk": 0}
    moved = metrics.value("lmtier_transfer_bytes_sum", tier="disk", direction="down")
    assert metrics.sums(metrics.transfer_bytes, "tier", "direction") == {"disk down": moved}
    assert metrics.sums(metrics.hit_ratio) == {"": 0.75}
    assert not any(metrics.sums(metrics.dropped_tokens, "tier", "reason").values())


def test_hits_are_worth_the_time_of_computing(make):
    cache = make()
    store(cache, keys(3))
    cost = Cost(fixed=9.0, token=2.0, position=0.5, copy=0.0)
    cache.release(cache.wait(cache.match(keys(3), FORM, tokens=4, cost=cost)))
    report = Report(cache, list, started=0.0, clock=lambda: 86_400.0, gpu_hour="3600")
    savings = report.snapshot()["savings"]
    assert savings["money"] == pytest.approx(3 * 2.0 + 0.5 * 9 / 2)
    assert savings["gpu_hours"] * 3600 == pytest.approx(savings["money"])
    assert savings["next_gib"].keys() <= {"cpu"}


def test_the_sessions_that_saved_most_are_in_the_report(make):
    cache = make()
    store(cache, keys(3))
    for name, turns in (("little", 1), ("much", 3)):
        for _ in range(turns):
            cache.release(cache.match(keys(3), FORM, session=name))
    sessions = report_of(cache).snapshot()["sessions"]
    assert [(each["session"], each["saved"]) for each in sessions["top"][:2]] == [("much", 9), ("little", 3)]
    assert (sessions["active"], sessions["waiting"]) == (2, 0)


def test_a_tier_that_fails_is_seen_to_be_left_alone(make):
    url = "null://"
    cache = make(url, opened={url: FlakyTier(MemoryTier(), every=1, ops=(Op.STORE,))})
    for i in range(8):
        store(cache, keys(1, f"x{i}"))
        cache.step()
        cache.flush(timeout=0.2)
    snapshot = report_of(cache).snapshot()
    counted = snapshot["counted"]
    assert [each["state"] for each in snapshot["tiers"]] == ["works", "stores fail"]
    assert counted["failed"]["null"] >= 5
    assert sum(counted["dropped"].values()) >= 5
    assert {name.split()[0] for name in counted["dropped"]} == {"null"}


def test_before_the_first_hit_and_write_both_are_zero(make, tmp_path):
    """A ratio without its upper half is nothing, and no alert."""
    metrics = make(f"disk://{tmp_path}?capacity=1MiB").metrics
    assert metrics.sums(metrics.hit_tokens, "tier") == {"cpu": 0, "disk": 0}
    assert metrics.sums(metrics.stored_tokens, "tier") == {"cpu": 0, "disk": 0}


def test_deletions_do_not_fill_the_queue_of_writes(make):
    url, gate = "disk:///memory?capacity=1MiB", Gate()
    cache = make(url, opened={url: SlowTier(MemoryTier(), gate)}, queue_length=4)
    store(cache, keys(4))
    cache.flush()
    gate.hold()
    for key in keys(4):
        cache.discard(key)
    cache.step()
    snapshot = report_of(cache).snapshot()
    assert snapshot["tiers"][1]["queue"] == 4
    verdict = next(each for each in snapshot["verdicts"] if each["name"] == "bottleneck")
    assert verdict["state"] == "good"
    gate.open()


def test_what_a_tier_does_not_know_is_none(make):
    tier = report_of(make("null://")).snapshot()["tiers"][1]
    assert (tier["chunks"], tier["used"], tier["capacity"]) == (None, None, None)


def test_a_server_is_ready_once_its_tiers_are_scanned(make):
    url, gate = "disk:///memory?capacity=1MiB", Gate()
    cache = make(url, opened={url: SlowTier(MemoryTier(), gate)}, wait_until_warm=False)
    report = report_of(cache)
    snapshot = report.snapshot()
    assert snapshot["tiers"][1]["state"] == "warming up"
    assert snapshot["why_not_ready"] == "the scan of disk is not finished"
    gate.open()
    cache.flush()
    assert report.snapshot()["why_not_ready"] == report.why_not_ready() == ""
    report.stopping = True
    assert report.why_not_ready() == "the server is shutting down"


class UnreadableTier(MemoryTier):
    def scan(self):
        raise OSError("cannot be listed")


def test_a_failed_scan_is_said(make):
    url = "disk:///memory?capacity=1MiB"
    report = report_of(make(url, opened={url: UnreadableTier()}))
    assert report.why_not_ready() == "the scan of disk has failed and is tried again"


def test_a_snapshot_is_json_and_knows_its_time(make):
    client = {"name": "one", "kind": "engine", "address": "/run/x", "age": 1.5}
    snapshot = report_of(make(), [client]).snapshot()
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    assert snapshot["counted"]["seconds"] == 7.5
    assert snapshot["clients"] == [client]


def test_no_secret_of_a_tier_is_in_a_snapshot(make):
    url = "null://user:hunter2@host"
    cache = make(url, opened={url: MemoryTier()})
    assert "hunter2" not in json.dumps(report_of(cache).snapshot())


def test_a_snapshot_costs_the_same_however_much_is_held(make, monkeypatch):
    cache = make()
    store(cache, keys(4))
    monkeypatch.setattr(type(cache.index), "entries", lambda index: pytest.fail("walked over all chunks"))
    assert report_of(cache).snapshot()["tiers"][0]["chunks"] == 4


# ---- history


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def rows(*moments, asked=10, hit=5):
    """Counters at these moments: of a steady number of tokens a second."""
    return [{**_nothing(), "seconds": t, "asked": asked * t, "hit": {"cpu": hit * t}} for t in moments]


def test_history_is_bounded_and_evenly_spaced():
    clock = Clock()
    history = History(interval=2.0, minutes=1.0, clock=clock)
    for tick in range(500):
        clock.now = 50.0 + tick * 0.5
        assert math.isclose(history.due(), -tick % 4 * 0.5)
        if not history.due():
            history.sample(rows(clock.now)[0])
    assert [row["seconds"] for row in history.dump()["rows"]] == [298.0 - 2 * i for i in range(30, -1, -1)]


def test_recent_counts_are_the_present_less_the_past(make, tmp_path):
    cache = make(f"disk://{tmp_path}?capacity=1MiB")
    history = History(clock=Clock())
    store(cache, keys(3))
    look(cache, keys(4))
    cache.flush()
    now = report_of(cache).snapshot()["counted"]
    assert history.since(now, 300.0) == now, "nothing was counted before the start"
    history.sample(now)
    look(cache, keys(2))
    later: Any = {**report_of(cache).snapshot()["counted"], "seconds": now["seconds"] + 60}
    lately = history.since(later, 30.0)
    assert (lately["seconds"], lately["asked"], lately["hit"]) == (60, 2, {"cpu": 2})
    assert lately["missed"] == {"never_stored": 0}
    assert set(lately["down"].values()) == {0}
    assert history.since(later, 90.0)["asked"] == 6


def test_columns_stand_still_without_gaps():
    history = History(clock=Clock())
    for row in rows(*range(2, 600, 2)):
        history.sample(row)
    (now,) = rows(599.0)
    for seconds, count in ((60.0, 30), (60.0, 80), (300.0, 60)):
        columns = history.columns(now, seconds, count)
        width = seconds / count
        assert [each["asked"] for each in columns[:-1]] == pytest.approx([10 * width] * (count - 1))
        assert [each["hit"]["cpu"] for each in columns[:-1]] == pytest.approx([5 * width] * (count - 1))
        assert sum(each["asked"] for each in columns) <= 10 * seconds


def test_the_past_is_drawn_where_it_was():
    """Rows are missing from 10 to 450 and from 451 on: what was asked then came at their ends."""
    history = History(clock=Clock())
    for row in rows(10, 450, 451, asked=1, hit=0):
        history.sample(row)
    (now,) = rows(900, asked=1, hit=1)
    asked = [each["asked"] for each in history.columns(now, 900.0, 9)]
    assert asked == pytest.approx([10, 0, 0, 0, 441, 0, 0, 0, 449])
    assert [each["hit"]["cpu"] for each in history.columns(now, 900.0, 9)][-1] == 900


def test_a_young_server_has_empty_columns_before_its_start():
    history = History(clock=Clock())
    asked = [each["asked"] for each in history.columns(rows(30.0)[0], 300.0, 10)]
    assert asked == pytest.approx([0] * 9 + [300])
