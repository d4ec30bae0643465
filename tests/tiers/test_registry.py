"""Tiers of other packages: found by their entry points, and told what they lack before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError

TIERS = """
from lmtier import BlockingTier


class Bare(BlockingTier):
    def __init__(self, location):
        super().__init__("theirs", readers=1, writers=1)

    def read(self, item, buffers):
        raise FileNotFoundError

    def write(self, item, buffers):
        pass


class Whole(Bare):
    def __init__(self, location, *, must, may: int = 1, word="x"):
        super().__init__(location)

    def delete(self, names):
        pass

    def contains(self, names):
        return {}
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch) -> str:
    """A package with tiers, installed as pip would."""
    (tmp_path / "their_tiers.py").write_text(TIERS)
    info = tmp_path / "their_tiers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-tiers\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[lmtier.tiers]\nbare = their_tiers:Bare\nwhole = their_tiers:Whole\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "cpu://?capacity=1MiB"


def test_a_tier_of_another_package_opens_with_its_options(theirs):
    with Cache([theirs, "whole://here?capacity=1MiB&must=be&may=2k&word=any"]) as cache:
        assert [tier.label for tier in cache.lower] == ["whole"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "bare://?capacity=1MiB",
            "tier bare://: their_tiers:Bare has no contains, delete; write what its base",
        ),
        ("whole://?capacity=1MiB", r"tier 'whole://\?capacity=1MiB' needs the option must="),
        ("whole://?must=x&may=many", "may='many' is not a size"),
        ("whole://?must=x&maybe=1", "unknown option 'maybe'; did you mean 'may'"),
    ],
)
def test_an_unfit_tier_of_another_package_is_one_sentence(theirs, url, said):
    with pytest.raises(ConfigError, match=said):
        Cache([theirs, url])


def test_a_cache_takes_settings_or_urls_of_tiers():
    for tiers in (["cpu://?capacity=1MiB"], "cpu://?capacity=1MiB", Config(tiers=["cpu://?capacity=1MiB"])):
        with Cache(tiers) as cache:
            assert cache.slab.capacity == 1 << 20
    wrong_tiers: list[Any] = [None, 5, [5]]
    for wrong in wrong_tiers:
        with pytest.raises(ConfigError, match="expected a list of URLs, or one text with spaces"):
            Cache(wrong)
