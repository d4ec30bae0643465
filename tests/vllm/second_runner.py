"""vLLM's second model runner on a CPU: its kernels, which are Triton's, run in Triton's interpreter.

Import this before vLLM, with VLLM_USE_V2_MODEL_RUNNER=1. A step takes a quarter of a second.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

# vLLM for CPUs asks for this backend's driver only. The interpreter needs neither.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
