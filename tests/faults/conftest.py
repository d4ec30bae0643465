"""The faults are met twice: by tiers as they are, and (marked `sealed`) by tiers that seal every object."""

from __future__ import annotations

import os

import pytest

from tests.faults.deadlines import ALONE, BESIDE, Lateness
from tests.sealed import ALL_SEALED, seal_everything


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if marks.isdisjoint({"long", "slow", "unsealed"}):
        both = ["plain", pytest.param("sealed", marks=pytest.mark.sealed)]
        metafunc.parametrize("sealing", both, indirect=True)


@pytest.fixture(autouse=True)
def sealing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", "plain") == "sealed":
        monkeypatch.setitem(os.environ, ALL_SEALED, "1")  # for processes that the test starts
        seal_everything(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def lateness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests nobody can say how late a call is."""
    is_alone = request.node.get_closest_marker("alone") is not None
    monkeypatch.setattr(Lateness, "slack", ALONE if is_alone else BESIDE)
