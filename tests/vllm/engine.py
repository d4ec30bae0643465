"""A real vLLM engine in a process of its own, told what to do line by line.

    engine = Engine(folder, model, transfer={…});  engine.generate(prompts);  engine.stop()

The same file is what runs in that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Timer
from typing import IO, Any

from tests.vllm import template

PATIENCE = 400.0
"""Seconds that an engine has for each thing it is told, its start among them."""
FORKED = str(Path(__file__).with_name("forked"))
"""A folder for PYTHONPATH. The sitecustomize.py in it lets vLLM fork its processes."""


UNTOUCHED = {"LMTIER_PREFAULT": "false"}
"""For servers whose memory is mostly never used: to touch all of it takes longer than their start."""


class Engine:
    """Outputs are greedy. `log` is what vLLM said.

    `fresh`: it and its processes are interpreters of their own, which hash strings each in its own way; else
    they are copies of one that has imported vLLM, and start several times as fast. `python`: the command of
    such an interpreter.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        transfer: dict[str, Any] | None = None,
        processes: bool = False,
        env: dict[str, str] | None = None,
        fresh: bool = False,
        python: Sequence[str] = (sys.executable,),
        wait: bool = True,
        **options: Any,
    ) -> None:
        self.log = folder / f"engine-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            start = partial(_start, python) if fresh else template.copy
            variables = environment(
                {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)), **UNTOUCHED, **(env or {})}
            )
            del variables["VLLM_CPU_KVCACHE_SPACE"]  # which an engine prefers to its options
            self.process = start(variables, log)
        self._tell({"model": str(model), "transfer": transfer, **options})
        if wait:
            self._hear()

    def _tell(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        limit = Timer(PATIENCE, self.process.kill)
        limit.start()
        began = time.monotonic()
        try:
            for line in self.process.stdout:
                if line.startswith("@"):
                    return json.loads(line[1:])
        finally:
            limit.cancel()
        self._close()
        hung = time.monotonic() - began >= PATIENCE
        ended = f"no answer within {PATIENCE} seconds" if hung else "it ended"
        raise EngineDied(f"{ended}\n{self.log.read_text()[-6000:]}")

    def ask(self, what: str, **given: Any) -> Any:
        self._tell({"do": what, **given})
        return self._hear()

    def generate(
        self,
        prompts: Sequence[list[int] | str],
        tokens: int = 8,
        *,
        salt: str = "",
        lora: str = "",
        in_place: bool = False,
        ttl: object = None,
        params: dict[str, Any] | None = None,
        logprobs: int = 0,
        regex: str = "",
    ) -> list[Output]:
        """All at once, as vLLM schedules them. `params` are their kv_transfer_params.

        `in_place`: vLLM reads the adapter's files again.
        `logprobs`: say so many of the likeliest first tokens. `regex`: answers are structured by it.
        """
        params = params if ttl is None else {"lmtier_ttl": ttl}
        asked = {"salt": salt, "lora": lora, "in_place": in_place, "params": params}
        asked |= {"logprobs": logprobs, "regex": regex}
        return [Output(each) for each in self.ask("generate", prompts=prompts, tokens=tokens, **asked)]

    def beams(self, prompts: list[list[int]], width: int, tokens: int = 8) -> list[list[list[int]]]:
        """Beam search of all at once. Of each the best answers, with their prompt."""
        found: list[list[list[int]]] = self.ask("beams", prompts=prompts, width=width, tokens=tokens)
        return found

    def ask_in_session(
        self, prompt: list[int], session: str, hints: dict[str, Any] | None = None, salt: str = ""
    ) -> Output:
        """One request, with vLLM's own fields for its session and its hints."""
        return Output(self.ask("ask_in_session", prompt=prompt, session=session, hints=hints, salt=salt))

    def see(
        self,
        prompts: list[list[int]],
        images: list[int | None],
        tokens: int = 8,
        *,
        ids: list[str] | None = None,
        salt: str = "",
        processor: dict[str, Any] | None = None,
    ) -> list[Output]:
        """One after the other, each with the image of that number; `ids` are users' names for them."""
        return [
            Output(each)
            for each in self.ask(
                "see", prompts=prompts, images=images, tokens=tokens, ids=ids, salt=salt, processor=processor
            )
        ]

    def add_odd(self, prompt: list[int], cases: list[tuple[str, str]]) -> list[list[int] | str]:
        """Of each a field and a value, in Python: what a request with it is answered. Text: why vLLM itself
        cannot compute it; then only the connector has met it."""
        found: list[list[int] | str] = self.ask("add_odd", prompt=prompt, cases=cases)
        return found

    def embed(
        self, prompts: list[tuple[int, int]], tokens: int = 8, *, params: dict[str, Any] | None = None
    ) -> list[Output]:
        """One after the other: of each the number, and how many embeddings it has instead of tokens."""
        return [Output(each) for each in self.ask("embed", prompts=prompts, tokens=tokens, params=params)]

    def pool(self, prompts: list[list[int]]) -> list[tuple[list[float], int]]:
        """Of a pooling model: the embedding of each, and how many of its tokens were cached."""
        return [(values, cached) for values, cached in self.ask("pool", prompts=prompts)]

    def seconds(self, prompt: list[int]) -> float:
        """Until the first token."""
        return float(self.ask("seconds", prompt=prompt))

    def forget(self, *, external: bool = False) -> None:
        """The engine's own prefix cache; `external`: ours too."""
        assert self.ask("reset", external=external)

    def use_connector(self, wanted: bool) -> None:
        """Or go on as if it had none, while it has no request: for comparisons within one engine."""
        self.ask("connector", wanted=wanted)

    def reset_within(self, prompt: list[int], tokens: int, after: int) -> Output:
        """One request; after so many steps all caches are reset, ours too."""
        return Output(self.ask("reset_within", prompt=prompt, tokens=tokens, after=after))

    def abort_within(self, prompts: list[list[int]], tokens: int, after: int) -> list[Output]:
        """All at once; after so many steps every other one is aborted. What the rest says."""
        return [
            Output(each) for each in self.ask("abort_within", prompts=prompts, tokens=tokens, after=after)
        ]

    def rpc(self, method: str, **kwargs: Any) -> None:
        """Call a method of all workers."""
        assert self.ask("rpc", method=method, kwargs=kwargs)

    def write(self, by: float) -> None:
        """Change all weights of an engine in one process, as its owner can: no call of vLLM's tells of it."""
        assert self.ask("write", by=by)

    def sleep(self, level: int, *, resets: bool = False, aborts: bool = False) -> None:
        """And wake up. `aborts`: meanwhile somebody asks, and hangs up. `resets`: the prefix cache is reset
        once more, while ranks compute the next step."""
        assert self.ask("sleep", level=level, resets=resets, aborts=aborts)

    def add_lora(self, lora: str, *, in_place: bool = False) -> None:
        """`in_place`: instead of what is in memory by that name."""
        assert self.ask("add_lora", lora=lora, in_place=in_place)

    def remove_lora(self, lora: str) -> None:
        assert self.ask("remove_lora", lora=lora)

    def start(self, prompts: list[list[int]], tokens: int, *, lora: str) -> None:
        """Requests that go on while `beside` answers others, and that nobody waits for."""
        assert self.ask("start", prompts=prompts, tokens=tokens, lora=lora)

    def beside(self, asked: list[tuple[list[int], str]], tokens: int = 8) -> list[Output]:
        """Prompts with adapters of their own, all at once, beside requests that go on."""
        return [Output(each) for each in self.ask("beside", asked=asked, tokens=tokens)]

    def log_stats(self) -> None:
        """As a served engine does every 10 seconds."""
        assert self.ask("log_stats")

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self.ask("metrics")
        return found

    def stop(self) -> None:
        if self.process.poll() is None:
            self._tell({"do": "stop"})
        self._close()

    def kill(self) -> None:
        self.process.kill()
        self._close()

    def _close(self) -> None:
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.close()
            self.process.stdout.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _start(python: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["nice", "-n", "5", *python, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        text=True,
    )


def environment(more: dict[str, str], *, forked: bool = False) -> dict[str, str]:
    """One thread, one GiB of KV, and nothing from the network.

    `forked`: vLLM forks its processes, and does not start new interpreters for them.
    """
    if forked:
        path = more.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
        more = {**more, "PYTHONPATH": os.pathsep.join(filter(None, (FORKED, path)))}
    return {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }


class EngineDied(Exception):
    pass


class Output:
    def __init__(self, reply: dict[str, Any]) -> None:
        self.tokens: list[int] = reply["tokens"]
        self.cached: int = reply["cached"]
        self.reason: str = reply["reason"]
        self.first: dict[str, float] = reply["first"]
        """The likeliest first tokens with their log probabilities, if they were asked for."""
        self.seconds: float = reply["seconds"]
        """Until the first token."""


# ---- in the process


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.register_at_fork(after_in_child=replies.close)  # who asks sees its end though others live on
    os.dup2(2, 1)  # what the engine's processes say is for the log

    def say(reply: Any) -> None:
        replies.write("@" + json.dumps(reply) + "\n")
        replies.flush()

    import torch
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig, KVTransferConfig, PoolerConfig
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

    options = json.loads(sys.stdin.readline())
    if Path(options["model"]).name == "jamba":
        from tests.vllm import mamba1  # noqa: F401
    transfer = options.pop("transfer")
    if "kv_events_config" in options:
        options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
    if "pooler_config" in options:
        options["pooler_config"] = PoolerConfig(**options["pooler_config"])
    defaults = {
        "dtype": "float32",  # in bf16 vLLM's own prefix cache changes an answer here and there: near ties
        "max_model_len": 4096,
        "enforce_eager": True,
        "seed": 0,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 256 << 20,  # zeroing a GiB would be a third of an engine's start
    }
    options = {**defaults, **options}
    if options["enforce_eager"]:
        torch.compiler.set_stance("force_eager")  # ranks would compile a function of vLLM's, for seconds each
    llm = LLM(**options, kv_transfer_config=KVTransferConfig(**transfer) if transfer else None)
    say("ready")

    def greedy(tokens: int, params: dict[str, Any] | None = None, logprobs: int = 0, regex: str = "") -> Any:
        more: dict[str, Any] = {"logprobs": logprobs} if logprobs else {}
        if regex:
            more["structured_outputs"] = StructuredOutputsParams(regex=regex)
        if params is not None:
            more["extra_args"] = {"kv_transfer_params": params}
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)

    def outcome(each: Any) -> dict[str, Any]:
        (answer,) = each.outputs
        return {
            "tokens": list(answer.token_ids),
            "cached": each.num_cached_tokens,
            "reason": answer.finish_reason,
            "seconds": each.metrics.first_token_latency if each.metrics else 0.0,
            "first": {key: each.logprob for key, each in answer.logprobs[0].items()}
            if answer.logprobs
            else {},
        }

    def generate(
        prompts: list[list[int] | str],
        tokens: int,
        salt: str,
        lora: str,
        in_place: bool = False,
        params: dict[str, Any] | None = None,
        logprobs: int = 0,
        regex: str = "",
    ) -> Any:
        more = {"cache_salt": salt} if salt else {}
        kinds = ["prompt" if isinstance(each, str) else "prompt_token_ids" for each in prompts]
        asked = [{kind: each, **more} for kind, each in zip(kinds, prompts, strict=True)]
        how = greedy(tokens, params, logprobs, regex)
        return llm.generate(asked, how, use_tqdm=False, lora_request=adapter(lora, in_place=in_place))

    def ask_in_session(prompt: list[int], session: str, hints: dict[str, Any] | None, salt: str) -> Any:
        import msgspec
        from vllm.v1.kv_hints import KvHintsEnvelope

        llm.llm_engine.add_request(
            f"said {time.monotonic_ns()}",
            {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})},
            greedy(8),
            session_id=session,
            kv_hints=None if hints is None else msgspec.convert(hints, KvHintsEnvelope),
        )
        done: list[Any] = []
        while not done:
            done = [each for each in llm.llm_engine.step() if each.finished]
        settle()
        return outcome(done[0])

    def adapter(lora: str, *, in_place: bool = False) -> Any:
        name = Path(lora).name
        return LoRARequest(name, number_of(lora), lora, load_inplace=in_place) if lora else None

    numbers: dict[str, int] = {}

    def number_of(lora: str) -> int:
        """vLLM takes adapters with one number for one adapter."""
        return numbers.setdefault(lora, len(numbers) + 1)

    def begin(prompt: list[int], tokens: int, lora: str) -> str:
        name = f"begun {time.monotonic_ns()}"
        llm.llm_engine.add_request(
            name, {"prompt_token_ids": prompt}, greedy(tokens), lora_request=adapter(lora)
        )
        return name

    def see(
        prompts: list[list[int]],
        images: list[int | None],
        tokens: int,
        ids: list[str] | None,
        salt: str,
        processor: dict[str, Any] | None,
    ) -> list[Any]:
        found = []
        for number, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
            asked: dict[str, Any] = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
            if image is not None:
                asked["multi_modal_data"] = {"image": _image(image)}
                if ids is not None:
                    asked["multi_modal_uuids"] = {"image": [ids[number]]}
                if processor is not None:
                    asked["mm_processor_kwargs"] = processor
            found += llm.generate([asked], greedy(tokens), use_tqdm=False)
            settle()
        return found

    def settle() -> None:
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            for _ in range(4):  # nobody else steps an engine in this process
                llm.llm_engine.step()

    halves: tuple[Any, Any] = None, None
    is_set_aside = False
    for line in sys.stdin:
        given = json.loads(line)
        match given.pop("do"):
            case "generate":
                found = generate(**given)
                settle()
                say([outcome(each) for each in found])
            case "beams":
                how = BeamSearchParams(given["width"], given["tokens"], ignore_eos=True)
                found = llm.beam_search([{"prompt_token_ids": each} for each in given["prompts"]], how)
                settle()
                say([[each.tokens for each in answers.sequences] for answers in found])
            case "ask_in_session":
                say(ask_in_session(**given))
            case "see":
                say([outcome(each) for each in see(**given)])
            case "add_odd":
                from tests.vllm.odd import add_odd

                how = greedy(4)
                say(add_odd(llm, given["prompt"], how, given["cases"]))
            case "embed":
                asked = [{"prompt_embeds": _embeds(llm, *each)} for each in given["prompts"]]
                how = greedy(given["tokens"], given["params"])
                found = [llm.generate([each], how, use_tqdm=False)[0] for each in asked]
                settle()
                say([outcome(each) for each in found])
            case "pool":
                asked = [{"prompt_token_ids": each} for each in given["prompts"]]
                found = llm.embed(asked, use_tqdm=False)
                settle()
                say([(each.outputs.embedding, each.num_cached_tokens) for each in found])
            case "seconds":
                began = time.perf_counter()
                generate([given["prompt"]], 1, "", "")
                took = time.perf_counter() - began
                settle()
                say(took)
            case "reset":
                settle()
                say(bool(llm.reset_prefix_cache(reset_connector=given["external"])))
            case "reset_within":
                llm.llm_engine.add_request(
                    "reset within", {"prompt_token_ids": given["prompt"]}, greedy(given["tokens"])
                )
                for _ in range(given["after"]):
                    llm.llm_engine.step()
                llm.reset_prefix_cache(reset_connector=True)
                last: Any = None
                while llm.llm_engine.has_unfinished_requests():
                    last = (llm.llm_engine.step() or [last])[-1]
                settle()
                say(outcome(last))
            case "abort_within":
                names = [f"abort within {number}" for number in range(len(given["prompts"]))]
                for name, prompt in zip(names, given["prompts"], strict=True):
                    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, greedy(given["tokens"]))
                ended: dict[str, Any] = {}
                for _ in range(given["after"]):
                    ended |= {each.request_id: each for each in llm.llm_engine.step() if each.finished}
                llm.llm_engine.abort_request(names[::2])
                while llm.llm_engine.has_unfinished_requests():
                    ended |= {each.request_id: each for each in llm.llm_engine.step() if each.finished}
                settle()
                say([outcome(ended[name]) for name in names[1::2]])
            case "connector":
                if given["wanted"] == is_set_aside:
                    halves, is_set_aside = _swap_connector(llm, halves), not is_set_aside
                say("done")
            case "rpc":
                llm.collective_rpc(given["method"], kwargs=given["kwargs"])
                say(True)
            case "write":
                for parameter in llm.llm_engine.model_executor.driver_worker.get_model().parameters():
                    parameter.data.mul_(given["by"])
                say(True)
            case "sleep":
                llm.sleep(given["level"])
                if given["aborts"]:
                    llm.llm_engine.add_request("of an impatient", {"prompt_token_ids": [1]}, greedy(1))
                    llm.llm_engine.abort_request(["of an impatient"])
                    llm.llm_engine.step()
                llm.wake_up()
                if given["resets"]:
                    _reset_beside_step(llm.llm_engine.engine_core.engine_core.scheduler)
                say(True)
            case "add_lora":
                say(llm.llm_engine.add_lora(adapter(given["lora"], in_place=given["in_place"])))
            case "remove_lora":
                say(llm.llm_engine.remove_lora(number_of(given["lora"])))
            case "start":
                for prompt in given["prompts"]:
                    begin(prompt, given["tokens"], given["lora"])
                say(True)
            case "beside":
                begun = [begin(prompt, given["tokens"], lora) for prompt, lora in given["asked"]]
                came: dict[str, Any] = {}
                while not all(each in came for each in begun):
                    came |= {each.request_id: each for each in llm.llm_engine.step() if each.finished}
                say([outcome(came[each]) for each in begun])
            case "metrics":
                say(_metrics())
            case "log_stats":
                llm.llm_engine.do_log_stats()
                say(True)
            case "version":
                say(_version())
            case "stop":
                break
    llm.llm_engine.engine_core.shutdown()


def _version() -> dict[str, Any]:
    """Of the vLLM that runs here, and where its parts lie."""
    import vllm

    modules = [(name, str(getattr(module, "__file__", ""))) for name, module in sys.modules.items()]
    return {
        "version": vllm.__version__,
        "installed": version("vllm-cpu"),
        "package": str(Path(vllm.__file__).parent),
        "compiled": [file for name, file in modules if name.startswith("vllm.") and file.endswith(".so")],
    }


def _embeds(llm: Any, number: int, length: int) -> Any:
    """Of no tokens of the model."""
    import torch

    model = llm.llm_engine.model_config
    shape = length, model.get_hidden_size()
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(model.dtype) * 0.2


def _image(number: int) -> Any:
    """Squares of one colour each."""
    import numpy
    from PIL import Image

    colours = numpy.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=numpy.uint8)
    return Image.fromarray(colours.repeat(14, axis=0).repeat(14, axis=1))


def _swap_connector(llm: Any, halves: tuple[Any, Any]) -> tuple[Any, Any]:
    """Of an engine in one process: where vLLM looks, in each step, whether there is one. What was there."""
    import vllm.distributed.kv_transfer.kv_transfer_state as state

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before = scheduler.connector, state._KV_CONNECTOR_AGENT
    scheduler.connector, state._KV_CONNECTOR_AGENT = halves
    return before


def _reset_beside_step(scheduler: Any) -> None:
    """As a user's reset may come while ranks compute: before the scheduler hears what the step brought."""
    learn = scheduler.update_from_output

    def reset_first(*given: Any) -> Any:
        del scheduler.update_from_output
        assert scheduler.reset_prefix_cache()
        return learn(*given)

    scheduler.update_from_output = reset_first


def _metrics() -> dict[str, float]:
    """`name` or `name{source}`."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            source = sample.labels.get("source")
            name = f"{sample.name}{{{source}}}" if source else sample.name
            found[name] = found.get(name, 0) + sample.value
    return found


if __name__ == "__main__":
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from tests.vllm import second_runner  # noqa: F401  # before vLLM
    main()
