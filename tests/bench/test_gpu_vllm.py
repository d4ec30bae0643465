"""`bench/gpu_vllm.py`: which engines it starts, with what, and how it judges them. None of them is a vLLM."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

import pytest

gpu_vllm: Any = import_module("bench.gpu_vllm")
GIB = gpu_vllm.GIB


class Machine:
    """Its engines have one kind of attention, and answer at once."""

    attention = "TRITON_ATTN"
    shared_memory = 100 * GIB
    healed = 16
    """How many tokens of a healed prompt are loaded."""

    def __init__(self) -> None:
        self.specs: list[dict[str, Any]] = []

    def child(self, *_: object) -> Machine:
        return self

    def end(self) -> None:
        pass

    def run(self, spec: dict[str, Any], limit: float) -> dict[str, Any]:
        self.specs.append(spec)
        if spec["attention"] != self.attention:
            return {"outcome": "FAILED, exit status 1"}
        phases = {name: self.answers(name) for name, *_ in spec["phases"]}
        if spec["kind"] == "ttft":
            phases = {"cold": gpu_vllm._times([{"seconds": 0.1, "cached": 0}])}
        return {"outcome": "done", "done": True, "start_seconds": 1.0, "phases": phases}

    def answers(self, phase: str) -> dict[str, Any]:
        cached = self.healed if phase == "healed" else 16
        return {"outcomes": [{"tokens": [1], "logprobs": [{"1": -0.1}], "cached": cached}], "metrics": {}}


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(gpu_vllm, "Child", machine.child)
    monkeypatch.setattr(gpu_vllm, "shared_memory", lambda: machine.shared_memory)
    return machine


def run(*what: str) -> Any:
    attention = "FLASH_ATTN,TRITON_ATTN"
    given = argparse.Namespace(
        device="cuda", attention=attention, budget=1e6, least=0.0, only=None, json=None, keep=False
    )
    with gpu_vllm._bench(given) as bench:
        bench.run(gpu_vllm._cases(what, "cuda"))
    return bench


@pytest.mark.parametrize("what", [("ttft", "equal"), ("equal", "ttft"), ("ttft",), ("graphs",)])
def test_later_engines_reuse_the_attention_that_worked(machine, what):
    results = run(*what).results
    tried = [spec["attention"] for spec in machine.specs]
    assert tried == ["FLASH_ATTN", *["TRITON_ATTN"] * len(results)]
    assert all(result["done"] for result in results.values())


def test_where_no_attention_works_one_engine_is_tried(machine):
    machine.attention = "none"
    bench = run("ttft", "equal")
    assert {spec["name"] for spec in machine.specs} == {"plain"}
    assert bench.print_report() == 1


def test_the_rival_has_equal_memory_or_is_left_out(machine):
    size = gpu_vllm.ON_GPU.slab
    machine.shared_memory = size + GIB
    ours, theirs = (
        run("ttft").results[name]["transfer"]["kv_connector_extra_config"]
        for name in ("lmtier step", "vLLM OffloadingConnector")
    )
    assert ours["tiers"] == [f"cpu://?capacity={size}"]
    assert theirs["cpu_bytes_to_use"] == size
    machine.shared_memory -= 1
    assert run("ttft").results["vLLM OffloadingConnector"] == {"error": "left out: too little shared memory"}


def test_spoilt_prompts_heal_before_the_next_are_spoilt():
    names = [name for name, *_ in gpu_vllm.OUR_PHASES]
    assert names.index("spoilt") < names.index("healed") < names.index("spoilt together")


@pytest.mark.parametrize(("healed", "status"), [(16, 0), (0, 1)])
def test_prompts_are_healed_if_they_are_loaded_again(machine, healed, status):
    machine.healed = healed
    assert run("equal").print_report() == status
