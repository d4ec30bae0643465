"""These tests run a real SGLang on a CPU, in the environment of tests/vllm: `make test-sglang`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engine import HERE
from tests.vllm.conftest import models  # noqa: F401 - the same models

if not (HERE / "installed").exists():
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    if (HERE / "installed").exists():  # without it, other tests run here, whose warnings are errors
        config.addinivalue_line("filterwarnings", "ignore")  # of templates, which live as long as the tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine that hangs is killed by PATIENCE, and its log is shown: this limit is for all else."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
