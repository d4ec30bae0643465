"""The connector, as an engine would load it; one load of the second rank fails while a file is there."""

import os
from pathlib import Path

from lmtier_integrations.vllm import LMTierConnector as LMTierConnector
from lmtier_integrations.vllm.messages import LoadPlan
from lmtier_integrations.vllm.worker import Worker

_prepare = Worker._prepare_load


def _prepare_or_fail(self: Worker, plan: LoadPlan) -> None:
    flag = Path(os.environ["LMTIER_TEST_FAILS"])
    if self._config.parallel_config.rank == 1 and flag.exists():
        flag.unlink()
        self._fail(plan)
        self._end_load(plan, plan.match(self.mover.form))
    else:
        _prepare(self, plan)


Worker._prepare_load = _prepare_or_fail  # type: ignore[method-assign]
