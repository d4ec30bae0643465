"""What a lookup is counted as, and what stands in the metrics of a slab."""

from __future__ import annotations

import pytest

from lmtier.core.cache_metrics import CacheMetrics, bounded_tiers
from lmtier.core.index import Index
from lmtier.core.lower_tiers import LowerTiers
from lmtier.core.match import CPU, EntryState, Lookup
from lmtier.format.keys import is_value, value_key
from lmtier.format.layout import form_of
from lmtier.observe.metrics import Metrics
from lmtier.observe.miss_curve import FACTORS, MissCurves
from lmtier.rules.lifetimes import Pins
from lmtier.rules.policy import make_policy
from lmtier.testing import opaque_layout

LAYOUT = opaque_layout(4096)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
C = LAYOUT.chunk_tokens


def key(name: int) -> bytes:
    return b"name" + name.to_bytes(28, "big")


class Counted(CacheMetrics):
    def __init__(self) -> None:
        self.metrics, self.index = (
            Metrics(),
            Index(4 * FORM.slab_bytes, make_policy("lru"), is_record=is_value),
        )
        super().__init__(self.metrics, {CPU: self.index}, LowerTiers(), C)

    def fill(self, name: int, state: EntryState = EntryState.READY) -> None:
        self.index.add(key(name), FORM, FORM.slab_bytes, state, None)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.value(f"lmtier_{name}", **labels)


@pytest.fixture
def gauges():
    return Counted()


def lookup(names: int, *sources: str, tokens: int | None = None) -> Lookup:
    keys = tuple(map(key, range(names)))
    match = Lookup(keys, 0.0, id=1, form=FORM, asked_tokens=names * C if tokens is None else tokens)
    match.sources = list(sources)
    return match


def test_every_token_counts_as_one_hit_or_one_miss(gauges):
    gauges.fill(3, EntryState.FILLING)
    match = lookup(4, CPU, "disk", tokens=4 * C + 1)
    assert gauges.count_lookup(match) == {"never_stored": C, "being_filled": C, "partial_chunk": 1}
    assert gauges.value("asked_tokens_total") == 4 * C + 1
    assert gauges.value("hit_tokens_total", tier=CPU) == gauges.value("hit_tokens_total", tier="disk") == C
    assert gauges.value("missed_tokens_total", reason="being_filled") == C


def test_what_had_been_found_is_missed_for_what_cut_it(gauges):
    match = lookup(3, CPU)
    match.cut_reason, match.found = "deadline", 2
    assert gauges.count_lookup(match) == {"deadline": C, "never_stored": C}


def test_misses_tell_gaps_from_evictions(gauges):
    gauges.fill(1)
    gauges.fill(2)
    gauges.index.evict(FORM.slab_bytes)
    assert gauges.count_lookup(lookup(3)) == {"never_stored": C, "evicted": C, "behind_a_gap": C}


def test_what_is_brought_before_a_request_is_no_lookup(gauges):
    assert gauges.count_lookup(lookup(3, CPU, "disk", tokens=0)) is None
    assert gauges.value("prefetched_tokens_total", tier="disk") == C
    assert gauges.value("lookups_total") == 0


def test_a_named_value_is_in_no_count_of_tokens(gauges):
    name = value_key(b"a")
    match = Lookup((name,), 0.0, id=1, form=FORM)
    match.sources = ["disk"]
    assert gauges.count_lookup(match) is None
    assert gauges.value("prefetched_tokens_total", tier="disk") == 0
    gauges.store([name, key(1)])
    gauges.drop([name, key(1)], "no_room", FORM)
    assert gauges.value("stored_tokens_total", tier=CPU) == C
    assert gauges.value("dropped_tokens_total", tier=CPU, reason="no_room") == C
    assert gauges.value("dropped_objects_total", tier=CPU, reason="no_room") == 2


def test_the_gauges_follow_the_index(gauges):
    outlook = MissCurves(bounded_tiers(gauges.index, LowerTiers()), C)
    gauges.declare(outlook, Pins())
    gauges.fill(0)
    assert [place.tier for place in outlook.tiers] == [CPU]
    assert gauges.value("used_bytes", tier=CPU) == FORM.slab_bytes
    assert gauges.value("capacity_bytes", tier=CPU) == 4 * FORM.slab_bytes
    assert gauges.value("chunks", tier=CPU) == 1
    assert gauges.value("leased_bytes") == gauges.value("pins") == 0
    gauges.index.lease(gauges.index.entries()[0])
    assert gauges.value("leased_bytes") == FORM.slab_bytes
    for _ in range(2):
        outlook.asked([key(0)], C, FORM)
    assert {gauges.value("mrc_hit_ratio", tier=CPU, size_factor=f"{each:g}") for each in FACTORS} == {0.5}
