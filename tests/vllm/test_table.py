"""README.md's table of versions says of each version of vLLM what it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.compatibility import read, run, written

TABLE = read(written())


@pytest.mark.parametrize("version", TABLE)
def test_readme_says_what_a_version_does(models: Path, version: str) -> None:
    assert run(version, models) == TABLE[version], "if this is how it should be: make compatibility"
