"""Of an engine's processes only the first imports vLLM, if this is on PYTHONPATH: the others are its copies.

For CPUs vLLM asks for new interpreters, because threads of OpenMP are not copied. In these tests each process
computes with one thread.
"""

import multiprocessing
from functools import wraps
from typing import Any

_context = multiprocessing.get_context


@wraps(_context)
def _forking(method: str | None = None) -> Any:
    return _context("fork" if method == "spawn" else method)


multiprocessing.get_context = _forking
