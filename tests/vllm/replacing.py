"""The connector, as an engine would load it; a checkpoint is replaced when its worker has loaded it."""

import os
import shutil
from pathlib import Path
from typing import Any

from lmtier_integrations.vllm import LMTierConnector as LMTierConnector
from lmtier_integrations.vllm.worker import Worker

_init = Worker.__init__


def _init_and_replace(self: Worker, *given: Any) -> None:
    _init(self, *given)
    new, place = os.environ["LMTIER_TEST_REPLACES"].split(":")
    shutil.copyfile(Path(new, "model.safetensors"), Path(place, "model.safetensors"))


Worker.__init__ = _init_and_replace  # type: ignore[assignment,method-assign]
