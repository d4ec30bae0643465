"""These tests run real models of transformers, with random weights: pip install lmtier[transformers]."""

from importlib.util import find_spec

import pytest

C = 16
"""Tokens of a chunk."""
if find_spec("transformers") is None:
    collect_ignore_glob = ["test_transformers*.py"]


@pytest.fixture(scope="module")
def one_thread():
    """A second thread costs more than it computes, with models of this size."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def opened(tmp_path):
    """Opens one store after the other, on the same folder."""
    from lmtier_integrations.transformers import PrefixCache

    stores: list[PrefixCache] = []

    def close():
        for store in stores:
            store.close()
            store.cache.check()
        stores.clear()

    def opened(model, *tiers, **settings):
        close()
        tiers = tiers or ("cpu://?capacity=16MiB", f"disk://{tmp_path}/kv?capacity=64MiB")
        settings = {"chunk_tokens": C, "verify": "always", "load_deadline": 10, "prefault": False, **settings}
        stores.append(PrefixCache(model, *tiers, **settings))
        return stores[-1]

    yield opened
    close()
