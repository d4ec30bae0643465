"""These tests need a GPU: without one there is nothing to collect."""

from __future__ import annotations

import ctypes
import os

# Before CUDA starts: streams that share one of its queues to the device wait for each other without any edge.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def has_gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
        import torch
    except (OSError, ImportError):
        return False
    return bool(torch.cuda.is_available())


collect_ignore_glob = [] if has_gpu() else ["test_*.py"]
