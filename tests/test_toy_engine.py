"""The engine of `tests/gpu/toy.py` on CPU tensors: its answers are the same wherever its KV comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench import gpu_toy
from lmtier.copy.cuda import paging
from tests.gpu.toy import GRAPHS, LAYOUTS, Engine, Model, Outcome, Simulated, Spec, Tape, prompts_of, scenario

SPEC = Spec()
STAGING = 1 << 14


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More are slower for tensors as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layers are copied one by one, each of these few is a group of its own."""
    monkeypatch.setattr(paging, "GROUP_BYTES", 1)


@pytest.fixture(scope="module")
def model():
    return Model(SPEC, "cpu")


def is_right(outcome: Outcome) -> None:
    assert not outcome.wrong
    assert outcome.verified > 0
    assert len({tuple(each) for each in outcome.alone.tokens}) > 1, "all prompts have one answer"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("graphs", "layerwise"), [("pieces", True), ("whole", False)])
def test_answers_are_the_same_wherever_kv_comes_from(model, tmp_path, layout, graphs, layerwise):
    engine = Engine(Simulated(), model, SPEC, layout, graphs)
    is_right(scenario(engine, tmp_path, layerwise=layerwise, staging_bytes=STAGING))


def test_runs_copied_as_they_are_give_the_same_answers(tmp_path):
    spec = replace(SPEC, dtype=torch.float32)
    engine = Engine(Simulated(3), Model(spec, "cpu"), spec, "HND", "off")
    is_right(scenario(engine, tmp_path, layerwise=True, seed=1, shortest_run=0))


@pytest.mark.parametrize(
    ("edge", "layerwise"),
    [
        ("compute waits for store", True),
        ("compute waits for store", False),
        ("compute waits for load", True),
        ("compute waits for load", False),
        ("store copies waits for store kernels", False),
        ("load kernels waits for load copies", True),
    ],
)
def test_an_edge_that_is_left_out_makes_answers_wrong(model, tmp_path, edge, layerwise):
    """Else the tests above would prove nothing."""

    def wrong(seed: int) -> list[str]:
        engine = Engine(Simulated(100 * seed, without=edge), model, SPEC, "NHD", "off", seed)
        way = {"layerwise": layerwise, "seed": seed, "staging_bytes": STAGING}
        return scenario(engine, tmp_path / str(seed), verify="off", only=("hit",), **way).wrong

    assert any("hit" in wrong(seed) for seed in (1, 0, 2, 3))


def test_graphs_change_no_answer(model):
    """A tape is what a CUDA graph is: what is not in static memory when it is recorded stays as it was."""
    prompts = prompts_of(SPEC, 2)
    found = [Engine(Simulated(), model, SPEC, "HND", graphs).answer(prompts, 3) for graphs in GRAPHS]
    assert found[0].same_as(found[1])
    assert found[0].same_as(found[2])


def test_a_capture_or_a_step_cannot_wait_for_the_device():
    x = torch.zeros(4)
    with pytest.raises(AssertionError, match="waits"), Tape():
        x[0].item()
    with pytest.raises(AssertionError, match="waits"), Simulated().never_waiting():
        x.nonzero()


def test_a_tape_repeats_its_work_on_present_data():
    x, y, factor = torch.ones(2, 3), torch.zeros(3), 2.0

    def deed() -> None:
        y.copy_((x.view(3, 2).max(1)[0] * factor).unsqueeze(0)[0])

    replay = Simulated().recorder()(deed)
    x.copy_(torch.arange(6).view(2, 3))
    factor = 100.0
    replay()
    assert y.tolist() == [2, 6, 10]


def test_every_figure_is_taken():
    """What they say is of no use here."""
    spec = replace(SPEC, step_tokens=16, slots=2, longest=40, blocks=60)
    engine = Engine(Simulated(), Model(spec, "cpu"), spec, "HND", "whole")
    small: dict[str, Any] = {"layerwise": False, "rounds": 1}
    assert gpu_toy.hidden_stores(engine, **small)["copies alone, ms"] > 0
    assert gpu_toy.decode_rates(engine, steps=3, pinned=1 << 20, **small)["stored, GB/s"] > 0
    assert gpu_toy.first_tokens(engine, **small)["hit, ms"] > 0


def test_the_bench_rehearses_its_scenarios(tmp_path):
    out = tmp_path / "toy.json"
    assert gpu_toy.main(["--simulated", "--layouts", "BLHNC", "--json", str(out)]) == 0
    assert '"wrong": []' in out.read_text()
