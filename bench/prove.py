"""`lmtier prove` on a real vLLM on CPU, with lmtier and with the caches of others below it.

    .venv-vllm/bin/python bench/prove.py --runs 20 --save bench/results/…

One engine after the other: alone, with lmtier, with vLLM's OffloadingConnector and ExampleConnector, with
LMCache. Each is proven whole once, restart included, and in short form as often as --runs says. Then lmtier's
connector with each of the faults of tests/vllm/broken.py, which must all be found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.vllm_ttft import LMCACHE_NEEDS, LMCACHE_PORT, OFFLOAD_NEEDS, connector, lmcache_server, reaching
from lmtier.tools.terminal import say, table
from lmtier_bench import header
from tests.vllm.conftest import transfer
from tests.vllm.faults import FAULTS
from tests.vllm.models import make

ROOT = Path(__file__).resolve().parents[1]
PORT, PATIENCE = 8123, 600
LMTIER = ["cpu://?capacity=2GiB"]


class ServedEngine:
    """`vllm serve` with a connector; `restart` is a shell command that does what its name says."""

    def __init__(
        self, folder: Path, model: Path, how: dict[str, Any] | None, path: Path | None, more: tuple[str, ...]
    ) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(PORT), "--enforce-eager", "--skip-tokenizer-init"]
        command += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "16384"]
        command += ["--enable-prompt-tokens-details", *more]
        if how is not None:
            command += ["--kv-transfer-config", json.dumps(how)]
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TEST_FAULT": str(folder / "fault"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *([str(path)] if path else [])]),
        }
        (folder / "fault").write_text("none")
        start = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        self.log, number = folder / "engine.log", folder / "pid"
        self.script = folder / "restart.sh"
        self.script.write_text(
            f"test -e {number} && kill $(cat {number}) && tail --pid=$(cat {number}) -f /dev/null\n"
            f"{start} nohup {shlex.join(command)} >>{self.log} 2>&1 &\necho $! >{number}\n"
        )
        self._number = number

    @property
    def restart(self) -> str:
        return f"sh {self.script}"

    def stop(self) -> None:
        subprocess.run(["kill", self._number.read_text().strip()], check=False)
        subprocess.run(["tail", f"--pid={self._number.read_text().strip()}", "-f", "/dev/null"], check=False)


@contextmanager
def serving(
    folder: Path,
    model: Path,
    how: dict[str, Any] | None,
    path: Path | None = None,
    more: tuple[str, ...] = (),
) -> Iterator[ServedEngine]:
    folder.mkdir(parents=True)
    served = ServedEngine(folder, model, how, path, more)
    subprocess.run(["sh", str(served.script)], check=True)
    try:
        yield served
    finally:
        served.stop()


def prove(*more: str) -> tuple[int, dict[str, Any], float]:
    command = [sys.executable, "-m", "lmtier", "prove", f"http://127.0.0.1:{PORT}", "--json", *more]
    began = time.monotonic()
    until = began + PATIENCE
    while True:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode != 2 or time.monotonic() > until:
            break
        time.sleep(1)  # the engine starts
        began = time.monotonic()
    return done.returncode, json.loads(done.stdout or "{}"), time.monotonic() - began


def row(name: str, status: int, found: dict[str, Any], seconds: float) -> dict[str, Any]:
    stages = found.get("stages", [])
    return {
        "what": name,
        "status": found.get("status", f"exit {status}"),
        "comparisons": sum(each["compared"] for each in stages),
        "on reused KV": sum(each["reusing"] for each in stages),
        "findings": sum(len(each["findings"]) for each in stages),
        "seconds": round(seconds),
        "report": found,
    }


def caches(
    options: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, Any, Path | None, Any, tuple[str, ...]]]:
    """Name, connector, where its modules are, what must run beside it, and more options of the engine."""
    yield "vLLM alone", None, None, nullcontext(), ()
    disk = f"disk://{folder}/kv?capacity=4GiB"
    yield "lmtier", transfer(tiers=[*LMTIER, disk]), None, nullcontext(), ()
    spec = options.offload_spec
    how = connector(
        "OffloadingConnector", spec_name="CpuSpec", spec_module_path=spec.stem, cpu_bytes_to_use=2 << 30
    )
    yield "vLLM's OffloadingConnector", how, spec.parent, nullcontext(), ()
    how = connector("ExampleConnector", shared_storage_path=str(folder / "example"))
    # Of a prompt that is computed in two steps it stores the first, and loading it ends the engine.
    whole = "--max-num-batched-tokens", "16384"
    yield "vLLM's ExampleConnector", how, None, nullcontext(), whole
    yield "vLLM's ExampleConnector, prefill in steps", how, None, nullcontext(), ()
    if options.lmcache:
        module = "lmcache.integration.vllm.lmcache_mp_connector"
        address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": LMCACHE_PORT}
        server = lmcache_server(folder / "lmcache", options.lmcache)
        how = connector("LMCacheMPConnector", module, **address)
        yield "LMCache 0.5.6", how, Path(reaching(options.lmcache)["PYTHONPATH"]), server, ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="short ones of each")
    parser.add_argument("--only", nargs="+", default=[], help="words of the names of caches; or `faults`")
    spec = Path(__file__).with_name("cpu_offload_spec.py")
    parser.add_argument("--offload-spec", type=Path, metavar="FILE", default=spec, help=OFFLOAD_NEEDS)
    parser.add_argument("--lmcache", type=Path, metavar="FOLDER", help=LMCACHE_NEEDS)
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make(folder / "models")
        model = folder / "models" / "qwen2"
        for name, how, path, beside, more in caches(options, folder):
            if options.only and not any(word in name for word in options.only):
                continue
            with beside, serving(folder / re.sub(r"\W+", "-", name), model, how, path, more) as served:
                rows.append(row(name, *prove("--restart", served.restart)))
                say(f"{name}: {rows[-1]['status']} in {rows[-1]['seconds']} s")
                wrong = rows[-1]["status"] == "wrong"  # it may be dead, and is not asked again
                for number in range(0 if wrong else options.runs):
                    rows.append(row(f"{name}, short", *prove("--short", "--seed", str(number + 1))))
                    say(f"{name}, short: {rows[-1]['status']} in {rows[-1]['seconds']} s")
        if not options.only or "faults" in options.only:
            how = transfer(tiers=LMTIER, verify="off")
            how["kv_connector_module_path"] = "tests.vllm.broken"
            with serving(folder / "faults", model, how):
                for fault in FAULTS:
                    (folder / "faults" / "fault").write_text(fault)
                    rows.append(row(f"fault: {fault}", *prove("--short", "--first")))
                    say(f"{fault}: {rows[-1]['status']} in {rows[-1]['seconds']} s")
    headers = [each for each in rows[0] if each != "report"]
    say(table(headers, [[each[head] for head in headers] for each in rows]))
    if options.save:
        options.save.write_text(json.dumps({"machine": header(None, None), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
