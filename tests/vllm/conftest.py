"""These tests run a real vLLM, in an environment that has one: `make test-vllm`."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # vLLM's and torch's, not ours


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny models with random weights: qwen2, gemma3, deepseek, qwen3-next."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(HERE / "models.py"), str(folder)], check=True, timeout=240)
    return folder


def prompts_of(*lengths: int, seed: int = 1, prefix: int = 0) -> list[list[int]]:
    """Random tokens; the first `prefix` are the same in all."""
    dice = random.Random(seed)
    head = [dice.randrange(4, 2048) for _ in range(prefix)]
    return [head + [dice.randrange(4, 2048) for _ in range(length - prefix)] for length in lengths]


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

    def __init__(self, folder: Path, *tiers: str, worth: str = "always") -> None:
        self.path = folder / "lmtier.sock"
        self._command = [sys.executable, "-P", "-m", "lmtier", "serve", "--unix", str(self.path)]
        self._command += ["--listen", "", "--http", "", "--set", "verify=always", "--set", f"worth={worth}"]
        for tier in tiers or ("cpu://?capacity=256MiB",):
            self._command += ["--tier", tier]
        self._log = (folder / "server.log").open("ab")
        self.start()

    def start(self) -> None:
        from lmtier.errors import TierError
        from lmtier.server.client import Client

        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        while True:
            assert self.process.poll() is None, Path(self._log.name).read_text()
            try:
                Client(str(self.path)).close()
                return
            except TierError:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    server = CacheServer(tmp_path)
    yield server
    server.close()
