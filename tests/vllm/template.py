"""A process that has imported vLLM and computed nothing. Its copies start as engines with 1 s of CPU, not 9.

    process = copy(environment, log);  process.stdin, process.stdout;  process.kill()

The same file is what runs in that process. What vLLM reads of its environment while it is imported is the
same for all copies.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MESSAGE = 1 << 18
IMPORTED = (
    "lmtier_integrations.vllm",
    "vllm",
    "vllm.lora.request",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


class Copy:
    """What `subprocess.Popen` tells of a process, but for how it ended."""

    def __init__(self, pid: int, alive: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._alive = alive

    def poll(self) -> int | None:
        return 0 if self._ends_within(0) else None

    def wait(self, seconds: float) -> None:
        if not self._ends_within(seconds):
            raise subprocess.TimeoutExpired("an engine", seconds)

    def _ends_within(self, seconds: float) -> bool:
        return bool(select.select([self._alive], [], [], seconds)[0])

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._alive, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """It ends when nobody can ask it any more. It says what it has to say to the log of the first copy."""

    def __init__(self, script: str, environment: dict[str, str], log: IO[bytes]) -> None:
        self._log = Path(log.name)
        self._asked, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            subprocess.Popen(
                ["nice", "-n", "5", sys.executable, script, str(other.fileno())],
                env=environment,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def copy(self, environment: dict[str, str], log: IO[bytes]) -> Copy:
        its_stdin, stdin = os.pipe()
        stdout, its_stdout = os.pipe()
        try:
            request = json.dumps(environment).encode()
            socket.send_fds(self._asked, [request], [its_stdin, its_stdout, log.fileno()])
            reply, (alive,), _, _ = socket.recv_fds(self._asked, MESSAGE, 1)
        except (OSError, ValueError):
            raise RuntimeError(f"there is nothing to copy:\n{self._log.read_text()}") from None
        finally:
            os.close(its_stdin)
            os.close(its_stdout)
        return Copy(json.loads(reply), alive, os.fdopen(stdin, "w"), os.fdopen(stdout))


_templates: dict[str, Template] = {}


def copy(environment: dict[str, str], log: IO[bytes], script: str = __file__) -> Copy:
    """`script`: a file like this one, which imports another engine."""
    if script not in _templates:
        _templates[script] = Template(script, environment, log)
    return _templates[script].copy(environment, log)


# ---- in the process


def serve() -> bool:
    """False: nobody asks any more. True: this is a copy, and runs an engine."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "only one thread is copied"
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # an engine that ends would look through all that it ever imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for copies here
    while True:
        request, given, _, _ = socket.recv_fds(asked, MESSAGE, 3)
        if not request:
            return False
        if not (pid := os.fork()):
            break
        alive = os.pidfd_open(pid)  # it is there: it waits for a line
        socket.send_fds(asked, [json.dumps(pid).encode()], [alive])
        for each in (*given, alive):
            os.close(each)
    asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, each in enumerate(given):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(json.loads(request))
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in path if each and each not in sys.path]
    return True


def _import() -> None:
    for each in IMPORTED:
        with suppress(ModuleNotFoundError):  # by that name other versions have none
            importlib.import_module(each)


def _override_here() -> None:
    """vLLM looks through everything that is imported for kernels to replace, in each worker that starts."""
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    if hasattr(platform, "register_triton_kernel_overrides"):  # not before 0.31
        platform.register_triton_kernel_overrides()
        platform.register_triton_kernel_overrides = classmethod(lambda _: None)


def _look_here() -> None:
    """vLLM looks into a model's class in a new interpreter, unless a file of this user's knows of it."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()


def _fork_workers() -> None:
    """As vLLM does on GPUs. For CPUs it asks for new interpreters, because threads of OpenMP are not copied.

    In these tests each process computes with one thread.
    """
    from vllm.platforms.cpu import CpuPlatform

    configure: Any = CpuPlatform.check_and_update_config.__func__

    def configure_and_fork(platform: type[CpuPlatform], config: Any) -> None:
        configure(platform, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(configure_and_fork)


def end() -> None:
    """As an interpreter ends, without 2 s in which it takes itself apart."""
    end_threads: Any = vars(threading)["_shutdown"]  # pools end theirs there: to join them alone would hang
    end_threads()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    from tests.vllm.engine import main

    _import()
    _override_here()
    _look_here()
    _fork_workers()
    if serve():
        main()
        end()
