"""What a server tells about itself: true, cheap, and without secrets."""

import hashlib
import json
import math

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.layout import form_of, padded
from lmtier.observe.metrics import MISS_REASONS
from lmtier.rules.worth import Cost
from lmtier.server.report import History, Report
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
    tokens = report_of(cache).snapshot()["tokens"]
    assert tokens["asked"] == 3 + 6 + 2 == sum(tokens["hit"].values()) + sum(tokens["missed"].values())
    assert tokens["hit"]["disk"] >= 3
    assert tokens["missed"] == {"partial_chunk": 2, "never_stored": 2}
    assert tokens["stored"]["cpu"] == 7
    assert report_of(cache).snapshot()["lookups"] == 3


def test_a_tier_tells_what_it_holds_and_moved(make, tmp_path):
    cache = make(f"disk://{tmp_path}?capacity=1MiB")
    store(cache, keys(3))
    cache.flush()
    store(cache, keys(4, "others"))
    cache.flush()
    look(cache, keys(3))
    cache.flush()
    cpu, disk = report_of(cache).snapshot()["tiers"]
    assert (cpu["tier"], cpu["capacity"], cpu["write"]) == ("cpu", cache.index.capacity, None)
    assert (cpu["chunks"], cpu["used"]) == (len(cache.index), cache.index.used)
    below = cache.lower.owned[0].index
    assert (disk["chunks"], disk["used"], disk["capacity"]) == (7, below.used, below.capacity)
    assert disk["bytes_down"] == 7 * FORM.stored_bytes
    assert disk["bytes_up"] == 3 * FORM.stored_bytes
    assert disk["seconds_up"] > 0
    assert disk["seconds_down"] > 0
    assert cpu["evictions"] == cache.metrics.value(
        "lmtier_evictions_total", tier="cpu", cause="capacity"
    ) + cache.metrics.value("lmtier_evictions_total", tier="cpu", cause="capacity_unwritten")
    assert cpu["evictions"] > 0


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


def test_hits_are_worth_the_time_that_engines_need_not_compute(make):
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
    tier = snapshot["tiers"][1]
    assert [each["state"] for each in snapshot["tiers"]] == ["works", "stores fail"]
    assert tier["failures"] >= 5
    assert sum(snapshot["tokens"]["dropped"].values()) >= 5
    assert {name.split()[0] for name in snapshot["tokens"]["dropped"]} == {"null"}


def test_before_the_first_hit_and_the_first_write_both_are_0(make, tmp_path):
    """A ratio without its upper half is nothing, and no alert."""
    metrics = make(f"disk://{tmp_path}?capacity=1MiB").metrics
    assert metrics.sums(metrics.hit_tokens, "tier") == {"cpu": 0, "disk": 0}
    assert metrics.sums(metrics.stored_tokens, "tier") == {"cpu": 0, "disk": 0}


def test_what_is_to_be_deleted_does_not_fill_the_queue_of_writes(make):
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


def test_a_server_is_not_ready_until_its_tiers_know_what_they_hold(make):
    url, gate = "disk:///memory?capacity=1MiB", Gate()
    cache = make(url, opened={url: SlowTier(MemoryTier(), gate)}, wait_until_warm=False)
    report = report_of(cache)
    snapshot = report.snapshot()
    assert not snapshot["ready"]
    assert not snapshot["tiers"][1]["warm"]
    assert snapshot["why_not_ready"] == "the scan of disk is not finished"
    gate.open()
    cache.flush()
    assert (report.snapshot()["ready"], report.why_not_ready()) == (True, "")
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
    assert snapshot["uptime"] == 7.5
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


def test_history_is_bounded_and_evenly_spaced(make):
    clock = Clock()
    history = History(interval=2.0, minutes=1.0, clock=clock)
    report = report_of(make())
    for tick in range(500):
        clock.now = 50.0 + tick * 0.5
        snapshot = report.snapshot()
        snapshot["time"] = clock.now
        assert math.isclose(history.due(), -tick % 4 * 0.5)
        if not history.due():
            history.sample(snapshot)
    times = [row["time"] for row in json.loads(history.to_json())["rows"]]
    assert times == [298.0 - 2 * i for i in range(30, -1, -1)]


def test_a_row_of_history_has_the_counters_of_its_snapshot(make, tmp_path):
    cache = make(f"disk://{tmp_path}?capacity=1MiB")
    history = History(clock=Clock())
    store(cache, keys(3))
    look(cache, keys(4))
    cache.flush()
    snapshot = report_of(cache).snapshot()
    history.sample(snapshot)
    told = json.loads(history.to_json())
    (row,) = told["rows"]
    assert (row["asked"], row["hit"], row["missed"]) == (4, {"cpu": 3}, {"never_stored": 1})
    for name, field in (("up", "bytes_up"), ("down", "bytes_down")):
        assert row[name] == {tier["tier"]: tier[field] for tier in snapshot["tiers"]}
    assert told["reasons"] == MISS_REASONS


def test_a_history_without_rows_is_json_too():
    assert json.loads(History().to_json())["rows"] == []
