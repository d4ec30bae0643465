"""The disk tier passes the suite for tiers."""

from pathlib import Path

from lmtier.format.layout import Name
from lmtier.testing import TierSuite
from lmtier_backends.disk import DiskTier
from tests.sealed import Sealed


class TestDisk(TierSuite):
    def make(self, tmp_path: Path):
        return DiskTier(tmp_path)

    def raw_objects(self, tmp_path: Path):
        paths = (path for path in tmp_path.glob("??/*.*") if path.is_file())
        return {name: path.read_bytes() for path in paths if (name := Name.parse(path.name))}

    def plant(self, tmp_path: Path, name: Name, data: bytes):
        (tmp_path / name.key.hex()[-2:] / str(name)).write_bytes(data)


class TestSealedDisk(Sealed, TestDisk):
    """With every object sealed."""
