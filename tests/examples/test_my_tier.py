"""The tier in examples/ passes the suite for tiers."""

import importlib.util
from contextlib import closing
from pathlib import Path

import pytest

from lmtier.format.layout import Name
from lmtier.testing import TierSuite
from tests.sealed import Sealed

PATH = Path(__file__).parents[2] / "examples" / "my_tier.py"
SPEC = importlib.util.spec_from_file_location("my_tier", PATH)
assert SPEC is not None
assert SPEC.loader is not None
my_tier = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(my_tier)


class TestMyTier(TierSuite):
    def make(self, tmp_path: Path):
        return my_tier.SqliteTier(str(tmp_path / "file"))

    def raw_objects(self, tmp_path: Path):
        with closing(my_tier.sqlite3.connect(tmp_path / "file")) as file:
            return {Name.parse(name): data for name, data in file.execute("SELECT name, bytes FROM objects")}

    def plant(self, tmp_path: Path, name: Name, data: bytes):
        with closing(my_tier.sqlite3.connect(tmp_path / "file")) as file, file:
            file.execute("PRAGMA synchronous = OFF")
            file.execute("INSERT OR REPLACE INTO objects VALUES (?, 1, ?)", [str(name), data])


@pytest.mark.sealed
class TestMySealedTier(Sealed, TestMyTier):
    """It has no line for that."""


def test_the_suite_says_that_touch_is_missing(tmp_path: Path):
    class Forgetful(my_tier.SqliteTier):  # type: ignore[misc, name-defined]  # it is loaded by its path
        def touch(self, items):
            pass

    class Suite(TestMyTier):
        def make(self, tmp_path: Path):
            return Forgetful(str(tmp_path / "file"))

    with pytest.raises(AssertionError, match="`touch` records nothing that `scan` returns"):
        Suite().test_the_order_of_use_survives_reopening(tmp_path)
