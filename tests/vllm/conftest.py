"""These tests run a real vLLM, in an environment that has one: `make test-vllm`."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import UNTOUCHED, Engine, Output

HERE = Path(__file__).parent
CHUNK = 256
FLAGS = set(Path("/proc/cpuinfo").read_text().split())
AVX512 = "avx512f" in FLAGS
"""Without it, vLLM on a CPU has no fp8 KV; and in bf16, see docs/LOG.md."""
HAS_BF16 = bool(FLAGS & {"avx512_bf16", "amx_tile"})
STATE_BLOCK = 288 if HAS_BF16 else 160
"""The tokens of a block of the tests' models with states: so many that a state fits. Kernels round up.

vLLM's fast kernels of these models need instructions for bf16, and keep larger states.
"""
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "processes": True}
if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models", help="a folder that models.py has filled")


def pytest_configure(config: pytest.Config) -> None:
    if find_spec("vllm") is not None:  # without it, other tests run here, whose warnings are errors
        config.addinivalue_line("filterwarnings", "ignore")  # vLLM's and torch's, not ours


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine that hangs is killed by PATIENCE, and its log is shown: this limit is for all else."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what lmtier said in the logs of the test's own engines and servers."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        for log in sorted(folder.rglob("*.log")):
            lines = [line for line in log.read_text(errors="replace").splitlines() if "lmtier" in line]
            report.sections.append((f"lmtier in {log.name}", "\n".join(lines[-40:])))
    return report


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Folders of tiny models with random weights, by the names in models.py.

    They are made once for all workers: whoever changes one changes a copy.
    """
    if given := pytestconfig.getoption("--models", default=None):
        return Path(given)
    whole = tmp_path_factory.getbasetemp()
    folder = (whole.parent if "PYTEST_XDIST_WORKER" in os.environ else whole) / "models"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part = folder.with_suffix(".part")
            subprocess.run([sys.executable, str(HERE / "models.py"), str(part)], check=True)
            part.rename(folder)
    return folder


def prompts_of(*lengths: int, seed: int = 1, prefix: int = 0) -> list[list[int]]:
    """Random tokens; the first `prefix` are the same in all."""
    dice = random.Random(seed)
    head = [dice.randrange(4, 2048) for _ in range(prefix)]
    return [head + [dice.randrange(4, 2048) for _ in range(length - prefix)] for length in lengths]


def tokens(outputs: Sequence[Output]) -> list[list[int]]:
    return [each.tokens for each in outputs]


def alone(engine: Engine, prompts: Sequence[list[int] | str], **options: Any) -> list[Output]:
    """One after the other. What meets in a step is chance with several processes, and turns near ties."""
    return [engine.generate([each], **options)[0] for each in prompts]


def cached(outputs: Sequence[Output]) -> int:
    return sum(each.cached for each in outputs)


def loadable(prompts: Sequence[list[int]]) -> int:
    """Tokens that a later engine can load of these, in whole chunks."""
    return sum((len(each) - 1) // CHUNK * CHUNK for each in prompts)


def transfer(role: str = "kv_both", *, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    if "tiers" in extra:  # tiny models compute so fast that a busy disk may not be worth it
        extra = {"chunk_tokens": 256, "worth": "always", **extra}
    return {
        "kv_connector": "LMTierConnector",
        "kv_connector_module_path": "lmtier_integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


class CacheServer:
    """`lmtier serve` on a Unix socket."""

    are_shared = True
    """Several engines may use its tiers at the same time."""

    def __init__(
        self, folder: Path, *tiers: str, worth: str = "always", chunk_tokens: int = CHUNK, patience: float = 2
    ) -> None:
        """`patience`: seconds until a load is late, and its chunks are computed."""
        self.path = folder / "lmtier.sock"
        self._command = [sys.executable, "-P", "-m", "lmtier", "serve", "--unix", str(self.path)]
        self._command += ["--listen", "", "--http", "", "--set", "verify=always", "--set", f"worth={worth}"]
        self._command += ["--set", f"chunk_tokens={chunk_tokens}", "--set", f"load_deadline={patience}"]
        for tier in tiers or ("cpu://?capacity=256MiB",):
            self._command += ["--tier", tier]
        self._log = (folder / "server.log").open("ab")
        self.start()

    def start(self) -> None:
        from lmtier.client.client import Client
        from lmtier.errors import TierError

        self.process = subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, env={**os.environ, **UNTOUCHED}
        )
        while True:
            assert self.process.poll() is None, Path(self._log.name).read_text()
            try:
                Client(str(self.path)).close()
                return
            except TierError:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.05)

    def transfer(self, **extra: Any) -> dict[str, Any]:
        return transfer(server=str(self.path), **extra)

    def hand_on(self, engine: Engine) -> None:
        """Another engine is about to start. That one may run on beside it."""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """What it serves then comes from disk."""
        from lmtier.client.client import Client

        with Client(str(self.path)) as client:
            assert client.flush()
        self.kill()
        self.start()

    def close(self) -> None:
        self.kill()
        self._log.close()


class OwnTiers:
    """Each engine has its own tiers, and finds on disk what the engine before it left there."""

    are_shared = False

    def __init__(self, *tiers: str, chunk_tokens: int = CHUNK) -> None:
        self._extra: dict[str, Any] = {"tiers": list(tiers), "chunk_tokens": chunk_tokens, "verify": "always"}

    def transfer(self, **extra: Any) -> dict[str, Any]:
        return transfer(**self._extra, **extra)

    def hand_on(self, engine: Engine) -> None:
        """Another engine is about to start, and that one holds the disk's folder."""
        engine.stop()

    def restart(self) -> None:
        """They start anew with the next engine."""

    def close(self) -> None: ...


def tiers_of(kind: str, folder: Path, *, chunk_tokens: int = CHUNK) -> CacheServer | OwnTiers:
    """Memory and disk: of a server ("server"), or of each engine ("own tiers")."""
    tiers = "cpu://?capacity=256MiB", f"disk://{folder}/kv?capacity=1GiB"
    if kind == "server":
        return CacheServer(folder, *tiers, chunk_tokens=chunk_tokens)
    return OwnTiers(*tiers, chunk_tokens=chunk_tokens)


def private_servers(home: Path) -> list[int]:
    """The processes of private servers of engines with this XDG_RUNTIME_DIR."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        ours = any(each.startswith(b"LMTIER_SERVE_UNIX=" + str(home).encode()) for each in variables)
        if ours and b"serve" in command.split(b"\0"):
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(tmp_path)
    yield server
    server.close()
