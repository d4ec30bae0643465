"""A real SGLang with HiCache in processes of its own. It is asked line by line.

    engine = Engine(folder, model, server);  engine.generate(prompts);  engine.stop()

The same file is what runs in those processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer
from typing import IO, Any

from tests.vllm.template import Copy, copy

TEMPLATE = str(Path(__file__).with_name("template.py"))
HERE = Path(sys.prefix) / "sglang"
"""SGLang itself, beside an environment that has most of what it imports."""
PATIENCE = 400.0
"""Seconds that an engine has for each thing it is asked, its start among them."""
PAGE = 16
MODELS = "llama", "qwen2"


class Output:
    def __init__(self, reply: dict[str, Any]) -> None:
        self.tokens: list[int] = reply["tokens"]
        self.cached: int = reply["cached"]
        """The tokens that the engine did not compute."""
        self.stored: int = reply["stored"]
        """Those of them that came from the storage backend."""


class Engine:
    """Outputs are greedy. `log` is what SGLang said. Without a server it has no HiCache."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        server: str = "",
        *,
        env: dict[str, str] | None = None,
        extra: dict[str, Any] | None = None,
        fresh: bool = False,
        **options: Any,
    ) -> None:
        """`fresh`: its processes are new interpreters, as SGLang starts them; else copies of one, which start
        thirty times as fast."""
        self.log = folder / f"engine-{time.monotonic_ns()}.log"
        disabled = [
            each.stem for each in (HERE / "sglang/srt/models").glob("*.py") if each.stem not in MODELS
        ]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(HERE), *sys.path)),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(disabled),  # to import all of them takes seconds
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **(env or {}),
        }
        with self.log.open("wb") as log:
            self.process: Any = (_start if fresh else _copy)(variables, log)
        if server:
            options = {**hicache(server, **(extra or {})), **options}
        self._say({"model_path": str(model), **options})
        self._hear()

    def _say(self, line: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def _hear(self) -> Any:
        limit = Timer(PATIENCE, self.process.kill)
        limit.start()
        try:
            for line in self.process.stdout:
                if line.startswith("@"):
                    return json.loads(line[1:])
        finally:
            limit.cancel()
        self._close()
        raise EngineDied(self.log.read_text()[-6000:])

    def _ask(self, what: str, **given: Any) -> Any:
        self._say({"do": what, **given})
        return self._hear()

    def generate(self, prompts: list[list[int]], tokens: int = 8, **more: Any) -> list[Output]:
        """All at once, as SGLang schedules them. `more` is for its own `generate`."""
        return [Output(each) for each in self._ask("generate", prompts=prompts, tokens=tokens, **more)]

    def forget(self) -> None:
        """Its own caches, when all that it stores has been stored."""
        self._ask("forget")

    def update(self, model: Path, *, flush: bool = True) -> None:
        """Read other weights into the running engine."""
        self._ask("update", model=str(model), flush=flush)

    def load_lora(self, name: str, place: Path) -> None:
        """Instead of what is in memory by that name."""
        self._ask("load_lora", name=name, place=str(place))

    def attach(self, server: str) -> None:
        self._ask("attach", extra=extra_config(server))

    def detach(self) -> None:
        self._ask("detach")

    def stop(self) -> None:
        if self.process.poll() is None:
            self._say({"do": "stop"})
        self._close()

    def kill(self) -> None:
        self.process.kill()
        self._close()

    def _close(self) -> None:
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.stdin.close()
            self.process.stdout.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _copy(variables: dict[str, str], log: IO[bytes]) -> Copy:
    return copy(variables, log, TEMPLATE)


def _start(variables: dict[str, str], log: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["nice", "-n", "5", sys.executable, "-m", "tests.sglang.engine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=variables,
        text=True,
    )


class EngineDied(Exception):
    pass


def extra_config(server: str, **more: Any) -> dict[str, Any]:
    return {
        "backend_name": "lmtier",
        "module_path": "lmtier_integrations.sglang",
        "class_name": "LMTierHiCache",
        "interface_v1": 1,
        "server": server,
        "prefetch_threshold": PAGE,
        **more,
    }


def hicache(server: str, **extra: Any) -> dict[str, Any]:
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra_config(server, **extra)),
    }


# ---- in the process


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang's processes say is for the log

    def say(reply: Any) -> None:
        replies.write("@" + json.dumps(reply) + "\n")
        replies.flush()

    import sglang
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    options = json.loads(sys.stdin.readline())
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "page_size": PAGE,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "context_length": 4096,
        "mem_fraction_static": 0.1,
        "random_seed": 0,
        "sleep_on_idle": True,  # else each idle engine takes a core from all tests beside it
        "log_level": "info",
    }
    engine = sglang.Engine(**{**defaults, **options})
    say("ready")

    def generate(prompts: list[list[int]], tokens: int, **more: Any) -> list[dict[str, Any]]:
        greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        found = []
        for each in engine.generate(input_ids=prompts, sampling_params=greedy, **more):
            about = each["meta_info"]
            stored = (about.get("cached_tokens_details") or {}).get("storage", 0)
            found.append({"tokens": each["output_ids"], "cached": about["cached_tokens"], "stored": stored})
        return found

    def forget() -> None:
        while not engine.flush_cache().success:  # SGLang refuses while it stores
            time.sleep(0.05)

    def update(model: str, flush: bool) -> None:
        asked = UpdateWeightFromDiskReqInput(model_path=model, flush_cache=flush)
        done, message = engine.loop.run_until_complete(
            engine.tokenizer_manager.update_weights_from_disk(asked, None)
        )[:2]
        assert done, message

    def load_lora(name: str, place: str) -> None:
        assert engine.unload_lora_adapter(name).success
        reply = engine.load_lora_adapter(name, place)
        assert reply.success, reply.error_message

    def of_storage(name: str, *given: Any, **more: Any) -> None:
        reply = engine.loop.run_until_complete(getattr(engine.tokenizer_manager, name)(*given, **more))
        assert reply.success, reply.message

    def attach(extra: dict[str, Any]) -> None:
        of_storage("attach_hicache_storage", "dynamic", json.dumps(extra), "wait_complete")

    def detach() -> None:
        of_storage("detach_hicache_storage")

    does = {each.__name__: each for each in (generate, forget, update, load_lora, attach, detach)}
    for line in sys.stdin:
        asked = json.loads(line)
        what = asked.pop("do")
        if what == "stop":
            break
        say(does[what](**asked))
    engine.shutdown()


if __name__ in ("__main__", "__mp_main__"):
    from tests.sglang import on_cpu

    on_cpu.install()
if __name__ == "__main__":
    main()
