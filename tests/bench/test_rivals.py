"""The policies that docs/POLICIES.md compares with run in the cache, as lmtier's own do."""

from __future__ import annotations

import pytest

from bench.rivals import ARC
from lmtier.rules.policy import POLICIES
from lmtier.tools.sim import synthetic
from lmtier.tools.sim.replay import replay


@pytest.mark.parametrize("capacity", [200, 1_000])
def test_arc_finds_more_than_lru_where_much_comes_once(monkeypatch, capacity):
    monkeypatch.setitem(POLICIES, "arc", ARC)
    trace = synthetic.make("rag", requests=400, seed=1)

    def hits(policy):
        url = f"cpu://?capacity={capacity * 4096}&policy={policy}"
        return replay(
            trace, [url], chunk_tokens=trace.block_tokens, bytes_per_token=4096 / trace.block_tokens
        )

    assert hits("arc").hit_ratio > hits("lru").hit_ratio > 0
