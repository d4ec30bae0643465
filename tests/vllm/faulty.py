"""The connector, as an engine would load it; one load of the last rank fails while a file is there."""

import os
from pathlib import Path

from lmtier.core.match import Match
from lmtier_integrations.vllm import LMTierConnector as LMTierConnector
from lmtier_integrations.vllm.messages import LoadPlan
from lmtier_integrations.vllm.rank import RankLoads

_prepare = RankLoads.prepare


def _prepare_or_fail(self: RankLoads, plan: LoadPlan) -> None:
    flag = Path(os.environ["LMTIER_TEST_FAILS"])
    if self._rank.number == int(os.environ["LMTIER_TEST_RANK"]) and flag.exists():
        flag.unlink()
        self._fail(plan)
        self._end(plan, Match.elsewhere(plan.id, plan.placement))
    else:
        _prepare(self, plan)


RankLoads.prepare = _prepare_or_fail  # type: ignore[method-assign]
