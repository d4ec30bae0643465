"""The null tier keeps the contract and nothing else."""

from contextlib import closing
from pathlib import Path

from lmtier.testing import SeamSuite, load, lookup, sample, scan, store
from lmtier.tiers.base import Reason
from lmtier_backends.null import NullTier


class TestNull(SeamSuite):
    def make(self, tmp_path: Path):
        return NullTier()


def test_it_accepts_every_store_and_finds_nothing():
    each = sample(1)
    with closing(NullTier()) as tier:
        assert store(tier, each).ok == {each.name: None}
        assert load(tier, each.name, each.room)[0].failed == {each.name: Reason.ABSENT}
        assert lookup(tier, each.name) == scan(tier) == {}
        assert not tier.keeps
