"""A process that has imported SGLang. Its copies start as engines in seconds: a start costs 40 s of CPU else.

SGLang starts new interpreters for its scheduler and its detokenizer. Here they are copies too.
"""

from __future__ import annotations

import importlib
import multiprocessing

from tests.sglang import on_cpu
from tests.vllm import template

IMPORTED = (
    "lmtier_integrations.sglang",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.mem_cache.unified_radix_cache",
    "sglang.srt.models.llama",
    "sglang.srt.models.qwen2",
)


def _fork() -> None:
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None


if __name__ == "__main__":
    from tests.sglang.engine import main

    on_cpu.install()
    for each in IMPORTED:
        importlib.import_module(each)
    _fork()
    if template.serve():
        main()
        template.end()
