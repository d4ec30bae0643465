"""Lets vLLM fork its processes on a CPU, so that only the first one imports vLLM.

vLLM starts new interpreters there, because a fork does not copy threads of OpenMP. In these tests each
process computes with one thread. Python runs this file at its start if this folder is on PYTHONPATH.
"""

import multiprocessing
from functools import wraps
from typing import Any

_context = multiprocessing.get_context


@wraps(_context)
def _forking(method: str | None = None) -> Any:
    return _context("fork" if method == "spawn" else method)


multiprocessing.get_context = _forking
