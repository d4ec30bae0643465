"""Seconds until a real vLLM on CPU is ready: plain, with a private server of lmtier, and with one that runs.

    .venv-vllm/bin/python bench/vllm_start.py --rounds 7

Engines start in turn, so that noise meets all of them. They are copies of one process that has imported vLLM,
or with `--fresh` interpreters of their own, as users start them. What is judged is the median of the
differences to the plain engine of the same round. Each kind starts once before, so that Python has compiled
what it imports, as `pip install` does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.vllm_ttft import can_run, make_models
from lmtier.tools.terminal import say, table
from lmtier_bench import header
from tests.vllm.conftest import CacheServer
from tests.vllm.engine import Engine

CPU = "cpu://?capacity=256MiB"
PLAIN = "plain"


def transfer(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "LMTierConnector",
        "kv_connector_module_path": "lmtier_integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def seconds(folder: Path, model: Path, given: dict[str, Any] | None, *, fresh: bool) -> float:
    began = time.monotonic()
    engine = Engine(folder, model, transfer=given, processes=True, fresh=fresh, max_model_len=1024)
    took = time.monotonic() - began
    engine.stop()
    return took


def main() -> int:
    if not can_run():
        return 1
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fresh", action="store_true")
    given = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, ["tiny"], None)
        model = folder / "tiny"
        server = CacheServer(folder, CPU)
        kinds = {
            PLAIN: None,
            "a private server": transfer(tiers=[CPU]),
            "a server that runs": transfer(server=str(server.path)),
        }
        for connector in kinds.values():
            seconds(folder, model, connector, fresh=given.fresh)
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(given.rounds):
            for kind, connector in kinds.items():
                times[kind].append(seconds(folder, model, connector, fresh=given.fresh))
            say(f"round {number + 1} of {given.rounds}")
        server.kill()
    say(header(None))
    rows = []
    for kind, found in times.items():
        beyond = median(mine - plain for mine, plain in zip(found, times[PLAIN], strict=True))
        rows.append((kind, f"{median(found):.2f}", f"{beyond:+.2f}" if kind != PLAIN else ""))
    say(table(("engine with", "seconds to its start", "beyond plain"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
