"""The connector, as an engine would load it; one load of the last rank fails while a file is there.

With LMTIER_TEST_RESUMES all requests but the first one that come meanwhile say that they are resumable.
"""

import os
from pathlib import Path

from vllm.v1.request import Request

from lmtier_integrations.vllm import LMTierConnector as LMTierConnector
from lmtier_integrations.vllm.messages import LoadPlan
from lmtier_integrations.vllm.rank import RankLoads
from lmtier_integrations.vllm.scheduler import Scheduler

_prepare = RankLoads.prepare


def _prepare_or_fail(self: RankLoads, plan: LoadPlan) -> None:
    flag = Path(os.environ["LMTIER_TEST_FAILS"])
    if self._rank.number == int(os.environ["LMTIER_TEST_RANK"]) and flag.exists():
        flag.unlink()
        self._fail(plan)
        self._end(plan)
    else:
        _prepare(self, plan)


RankLoads.prepare = _prepare_or_fail  # type: ignore[method-assign]
_add, _others = Scheduler.add, set[str]()


def _add_or_resume(self: Scheduler, request: Request) -> None:
    if Path(os.environ["LMTIER_TEST_FAILS"]).exists() and "LMTIER_TEST_RESUMES" in os.environ:
        request.resumable = bool(_others)
        _others.add(request.request_id)
    _add(self, request)
    request.resumable = False  # vLLM would wait for more of it


Scheduler.add = _add_or_resume  # type: ignore[method-assign]
