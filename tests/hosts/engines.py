"""The engines of hosts: a small one without a model, and a real vLLM."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

from lmtier.client.client import Client
from tests.hosts.network import ROOT, Host
from tests.vllm.engine import Engine

VLLM = ROOT / ".venv-vllm/bin/python"
PATIENCE = 30.0
TOKENS = 1030


class HostsEngine(Protocol):
    def ask(self, prompt: int, *, source: str = "") -> dict[str, Any]:
        """How many tokens of this prompt were loaded, in how many seconds it was there, whether it was
        wrong. `source`: another host whose memory may have it."""

    def flush(self) -> None:
        """Wait until what it computed is stored, or given up."""

    def kill(self) -> None: ...


class Small:
    """It checks every byte."""

    def __init__(self, host: Host, socket: Path) -> None:
        self._log = host.folder / "engine.log"
        command = [*host.inside, sys.executable, "-m", "tests.hosts.engine", str(socket)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout
        assert self._hear() == "ready\n"

    def ask(self, prompt: int, *, source: str = "") -> dict[str, Any]:
        return self._tell(f"{prompt} {source}")

    def flush(self) -> None:
        self._tell("flush")

    def _tell(self, line: str) -> dict[str, Any]:
        self._asked.write(line + "\n")
        self._asked.flush()
        answer: dict[str, Any] = json.loads(self._hear())
        return answer

    def _hear(self) -> str:
        line = self._answers.readline()
        assert line, self._log.read_text()[-4000:]
        return line

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Real:
    """A vLLM. Its answer to a prompt must be that of all others."""

    answers: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, host: Host, socket: Path, model: Path) -> None:
        transfer = {
            "kv_connector": "LMTierConnector",
            "kv_connector_module_path": "lmtier_integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"server": str(socket)},
        }
        self._client = Client(str(socket))
        python = [*host.inside, str(VLLM)]
        self._engine = Engine(host.folder, model, transfer=transfer, fresh=True, python=python)

    def ask(self, prompt: int, *, source: str = "", with_cache: bool = True) -> dict[str, Any]:
        self._engine.use_connector(with_cache)
        dice = random.Random(prompt)
        tokens = [dice.randrange(4, 2048) for _ in range(TOKENS)]
        (output,) = self._engine.generate([tokens], params={"lmtier_source": source} if source else None)
        is_wrong = output.tokens != self.answers.setdefault(prompt, output.tokens)
        return {"loaded": output.cached, "seconds": output.seconds, "wrong": is_wrong}

    def flush(self) -> None:
        self._client.flush(PATIENCE)

    def kill(self) -> None:
        self._engine.kill()
        self._client.close()
