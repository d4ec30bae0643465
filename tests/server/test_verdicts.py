"""The five verdicts: the words and the colour follow from the numbers."""

from operator import sub
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from lmtier.observe.metrics import MISS_GROUPS, MISS_REASONS, SECONDS
from lmtier.server.report import _merged, _nothing
from lmtier.server.verdicts import LOST, judge, slowest

ALERTS = Path(__file__).parents[2] / "dashboards" / "prometheus" / "alerts.yml"
NOW = 1e9


def outage(what, since, until=None, why=""):
    """An outage that began, and perhaps ended, so many seconds ago."""
    return {"what": what, "since": NOW - since, "until": None if until is None else NOW - until, "why": why}


def tier(name, *outages, capacity=None, queue_full=0.0, slowest=None, curve=None, **counted):
    """A tier of a report; its curve; what was counted of it in the last minutes."""
    row = {
        "tier": name,
        "outages": outages,
        "capacity": capacity,
        "queue_full": queue_full,
        "slowest": slowest,
    }
    return row, curve, counted


CPU = tier("cpu", capacity=32 << 30)
DISK = tier("disk", capacity=500 << 30)
REDIS = tier("redis")


def verdicts(tiers=(CPU,), clients=None, **facts):
    """The verdicts on a report with these facts, of which the counters are of the last minutes."""
    counted: Any = {**_nothing(), "seconds": 300.0, "lookups": 50}
    counted |= {name: facts.pop(name) for name in {*facts} & {*counted} - {"differed"}}
    for row, _, counts in tiers:
        for name, count in counts.items():
            counted[name] = {**counted[name], row["tier"]: count}
    report: Any = {
        "time": NOW,
        "tiers": [row for row, _, _ in tiers],
        "curve": {row["tier"]: curve for row, curve, _ in tiers if curve},
        "clients": [{"kind": kind} for kind, count in (clients or {}).items() for _ in range(count)],
        **{"why_not_ready": "", "leased_bytes": 0, "curve_lookups": 50},
        **{"load_deadline": 2.0, "most_clients": 100, **facts},
        "counted": {"differed": facts.get("differed", 0)},
        "savings": {"price": facts.get("price", "")},
    }
    return judge(report, counted)


def said(name, **facts):
    """The state, and the whole line, of one verdict."""
    (verdict,) = (each for each in verdicts(**facts) if each["name"] == name)
    return verdict["state"], f"{verdict['word']}: {verdict['text']}"


def test_there_are_five_and_each_is_one_short_line():
    lines = verdicts((CPU, DISK, REDIS))
    assert [each["name"] for each in lines] == ["working", "saves", "misses", "bottleneck", "memory"]
    assert all(each["word"] and each["text"] and len(each["word"] + each["text"]) < 110 for each in lines)


def test_a_group_has_each_reason_for_a_miss_once():
    reasons = [reason for _, some in MISS_GROUPS.values() for reason in some]
    assert sorted(reasons) == sorted(MISS_REASONS)


NEEDED = "of the 50 lookups that a verdict needs"
USELESS = "no prompt came back, so memory of any size would hit nothing"
DOWN = tier("redis", outage("loads", 185.0))
REFUSED = tier("redis", outage("loads", 185.0), outage("stores", 60.0, why="Connection refused"))


@pytest.mark.parametrize(
    ("facts", "state", "line"),
    [
        ({"tiers": (CPU,)}, "good", "yes: cpu works; no engine is connected"),
        (
            {"tiers": (CPU, DISK, REDIS), "clients": {"engine": 1, "redis": 20, "http": 2}},
            *("good", "yes: cpu, disk and redis work; 1 engine connection and 20 Redis clients"),
        ),
        (
            {"tiers": (CPU, REFUSED)},
            *("bad", "redis is down: loads and stores have failed for 3 min 5 s: Connection refused"),
        ),
        (
            {"tiers": (CPU, tier("disk", outage("stores", 3.0)))},
            *("bad", "disk is down: stores have failed for 3 s"),
        ),
        (
            {"tiers": (CPU, tier("disk", outage("stores", 7300.0)), DOWN)},
            *(
                "bad",
                "2 tiers are down: disk has failed for 2 h 1 min; redis has failed for 3 min 5 s",
            ),
        ),
        (
            {"why_not_ready": "the scan of disk is not finished"},
            *("warn", "not ready: the scan of disk is not finished"),
        ),
        ({"corrupt": 2}, "warn", "with losses: 2 chunks damaged and deleted in the last 5 min"),
        (
            {
                "tiers": (CPU, tier("disk", stored=360_000)),
                "dropped": {"disk queue_full": 20_000, "disk write_budget": 9},
            },
            *("warn", "with losses: 20K tokens not stored in disk (5.3 %, queue full) in the last 5 min"),
        ),
        ({"dropped": {"disk write_budget": 9}}, "good", "yes: cpu works; no engine is connected"),
        (
            {"tiers": (CPU, tier("disk", faults=1, moves=18))},
            *("warn", "with losses: 1 object failed in disk in the last 5 min"),
        ),
        (
            {"tiers": (CPU, tier("disk", faults=1, moves=19))},
            *("good", "yes: cpu and disk work; no engine is connected"),
        ),
        (
            {
                "tiers": (CPU, tier("disk", stored=5_000_000)),
                "dropped": {"disk queue_full": 256},
            },
            *("good", "yes: cpu and disk work; no engine is connected"),
        ),
        (
            {"corrupt": 2, "tiers": (CPU, tier("disk", faults=1))},
            *("warn", "with losses: 2 chunks damaged and deleted and 1 more kind of loss in the last 5 min"),
        ),
        (
            {"corrupt": 1, "tiers": (DISK,), "dropped": {"disk queue_full": 256, "disk error": 512}},
            *("warn", "with losses: 1 chunk damaged and deleted and 2 more kinds of loss in the last 5 min"),
        ),
        (
            {
                "tiers": (CPU, tier("redis", outage("loads", 212.0, until=12.0), faults=9)),
                "dropped": {"redis error": 900},
            },
            *("good", "yes, again: redis has worked for 12 s, after 3 min 20 s of failures"),
        ),
        (
            {"differed": 1, "tiers": (CPU, REFUSED)},
            *("bad", "wrong KV: 1 chunk in an engine differed from what was saved"),
        ),
    ],
)
def test_whether_it_works(facts, state, line):
    assert said("working", **facts) == (state, line)


@pytest.mark.parametrize(
    ("facts", "state", "line"),
    [
        ({}, "idle", "nothing yet: no prompt was looked up in the last 5 min"),
        ({"seconds": 40.0}, "idle", "nothing yet: no prompt was looked up in the last 40 s"),
        (
            {"asked": 1_700_000, "hit": {"cpu": 1_207_000}},
            *("good", "71 %: 1.21M of 1.7M tokens were not computed again"),
        ),
        (
            {"asked": 9999, "hit": {"cpu": 999}, "saved_seconds": 4000.0, "price": "$2.50"},
            *("good", "10 %: 999 of 9,999 tokens were not computed again: 1 h 6 min of computing, $2.78"),
        ),
        (
            {"asked": 1000, "hit": {"cpu": 40}, "saved_seconds": 41.0, "price": "2 €"},
            *("good", "4.0 %: 40 of 1,000 tokens were not computed again: 41 s of computing, 0.0228 €"),
        ),
        ({"asked": 1000}, "warn", "0 %: 0 of 1,000 tokens were not computed again"),
        (
            {"asked": 1000, "lookups": 49},
            *("idle", f"too early: 0 of 1,000 tokens were not computed again, in 49 {NEEDED}"),
        ),
        ({"values": {"missed": 49}}, "idle", f"too early: 0 values found, in 49 {NEEDED}"),
        (
            {"values": {"missed": 50}},
            "warn",
            "0 %: of 50 values that Redis clients asked for; no engine asked",
        ),
        (
            {"values": {"hit": 9_000, "missed": 1_000}},
            *("good", "90 %: of 10K values that Redis clients asked for; no engine asked"),
        ),
        ({"values": {"set": 3}}, "idle", "nothing yet: Redis clients stored 3 values and read none"),
    ],
)
def test_what_it_saves(facts, state, line):
    assert said("saves", **facts) == (state, line)


@pytest.mark.parametrize(
    ("facts", "state", "line"),
    [
        ({}, "idle", "none: nothing was asked in the last 5 min"),
        (
            {"asked": 1000, "missed": {"never_stored": 600, "partial_chunk": 20, "not_worth_it": 30}},
            *("good", "none: that could have been hits: the rest is new text, or was not worth loading"),
        ),
        (
            {"asked": 1000, "missed": {"never_stored": 600, "evicted": 30, "deadline": 9, "full": 1}},
            *("good", "4.0 %: could have been hits: 3.0 % evicted, 0.9 % came too late"),
        ),
        ({"asked": 1000, "missed": {"evicted": 60}}, "warn", "6.0 %: could have been hits: 6.0 % evicted"),
        (
            {"asked": 1000, "missed": {"tier_down": 400}},
            *("bad", "40 %: could have been hits: 40 % in a tier that is down"),
        ),
        (
            {"asked": 1000, "lookups": 1, "missed": {"evicted": 600}},
            *("idle", f"too early: 60 % could have been hits, in 1 {NEEDED}"),
        ),
        ({"values": {"missed": 12}}, "idle", "12: values that Redis clients asked for were not here"),
    ],
)
def test_what_could_have_been_a_hit(facts, state, line):
    assert said("misses", **facts) == (state, line)


@pytest.mark.parametrize(
    ("facts", "state", "line"),
    [
        (
            {"busy": 36.0},
            *("good", "none: nearest to its limit is the server's thread, busy 12 % of the time"),
        ),
        ({"busy": 285.0}, "bad", "the thread: the server's thread, busy 95 % of the time"),
        (
            {"leased_bytes": 24 << 30, "busy": 60.0},
            *("warn", "memory in use soon: the memory: 75 % of it is in use right now"),
        ),
        (
            {"tiers": (CPU, tier("disk", queue_full=1.0))},
            *("bad", "writes to disk: disk: its queue of writes is 100 % full"),
        ),
        (
            {"tiers": (CPU, tier("redis", slowest=1.5)), "load_deadline": 2.0},
            *("warn", "loads from redis soon: redis: 1 load in 100 takes 1.5 s or longer, of 2 s allowed"),
        ),
        ({"clients": {"http": 99}}, "bad", "connections: connections: 99 % of `clients` are open"),
    ],
)
def test_which_resource_is_the_limit(facts, state, line):
    assert said("bottleneck", **facts) == (state, line)


def curve(half, now, twice):
    return tier("cpu", capacity=32 << 30, curve={"0.5": half, "1": now, "2": twice})


@pytest.mark.parametrize(
    ("memory", "state", "line"),
    [
        (CPU, "idle", f"no use yet: {USELESS}"),
        (curve(None, None, None), "idle", f"no use yet: {USELESS}"),
        (curve(0.0, 0.0, 0.0), "idle", f"no use yet: {USELESS}"),
        (
            curve(0.2, 0.5, 0.62),
            *("warn", "cpu is small: cpu × 2 (64 GiB) would give +12 points of hit rate"),
        ),
        (
            curve(0.2, 0.5, 0.525),
            *("good", "enough: cpu × 2 (64 GiB) would give +2.5 points of hit rate"),
        ),
        (curve(0.2, 0.5, 0.5), "good", "enough: cpu × 2 (64 GiB) would give no more hits"),
        (curve(0.5, 0.5, 0.5), "good", "ample: half of cpu (16 GiB) would give as many hits"),
    ],
)
def test_whether_the_memory_is_large_enough(memory, state, line):
    assert said("memory", tiers=(memory,)) == (state, line)
    assert said("memory", tiers=(memory,), curve_lookups=49) == ("idle", f"too early: 49 {NEEDED}")


def test_a_loss_is_the_same_for_the_verdict_and_the_alert():
    alerts = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    (drops,) = (each["expr"] for each in alerts if each["alert"] == "LmtierDrops")
    assert drops.endswith(f" > {LOST}")


def test_more_memory_over_a_complete_disk_adds_no_hits():
    disk = tier("disk", capacity=500 << 30, curve={"0.5": 0.8, "1": 0.88, "2": 0.88})
    line = "enough: cpu × 2 (64 GiB) would give no more hits, but +12 points of hit rate sooner"
    assert said("memory", tiers=(curve(0.2, 0.5, 0.62), disk)) == ("good", line)
    small = tier("disk", capacity=500 << 30, curve={"0.5": 0.8, "1": 0.6, "2": 0.7})
    line = "disk is small: disk × 2 (1000 GiB) would give +10 points of hit rate"
    assert said("memory", tiers=(curve(0.2, 0.5, 0.62), small)) == ("warn", line)


def test_the_time_in_which_99_of_100_loads_ended():
    def counts(**by_bound):
        totals, running = [], 0
        for bound in (*SECONDS, "inf"):
            running += by_bound.get(f"le_{bound}", 0)
            totals.append(running)
        return totals

    assert slowest([]) is None
    assert slowest(counts(**{"le_0.01": 99})) is None, "too few"
    fast = counts(**{"le_0.01": 10_000})
    assert 0.009 < (slowest(fast) or 0) < 0.01
    slow = [a + b for a, b in zip(fast, counts(**{"le_1": 200}), strict=True)]
    assert 0.3 < (slowest(slow) or 0) < 1
    assert slowest(_merged(slow, slow, sub)) is None, "nothing was loaded since"
    assert (slowest(_merged(slow, fast, sub)) or 0) > 0.9, "only what came since counts"
    assert slowest(counts(le_inf=500)) == SECONDS[-1], "longer than the last bound"
