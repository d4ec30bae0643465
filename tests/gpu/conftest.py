"""These tests need a GPU: without one there is nothing to collect."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from lmtier.copy.cuda import paging

# Before CUDA starts: streams that share one of its queues to the device wait for each other without any edge.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def has_gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
        import torch
    except (OSError, ImportError):
        return False
    return bool(torch.cuda.is_available())


@pytest.fixture(autouse=True, scope="session")
def small_groups() -> Iterator[None]:
    """Where layers are copied one by one, each of a few is a group of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paging, "GROUP_BYTES", 1)
        yield


collect_ignore_glob = [] if has_gpu() else ["test_*.py"]
