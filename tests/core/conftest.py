"""Caches that a test opens, and that are proved and closed when it is over."""

from __future__ import annotations

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.keys import is_value
from lmtier.tiers.base import Tier


@pytest.fixture
def make(tmp_path):
    caches = []

    def make(*tiers: str, opened: dict[str, Tier] | None = None, **settings) -> Cache:
        patient = {"load_deadline": 30.0, **settings}  # on a busy machine a disk may take seconds
        config = Config(tiers=tiers, chunk_tokens=4, prefault=False, **patient)
        caches.append(Cache(config, tiers=opened, is_record=is_value))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close(timeout=5)
        cache.check()
