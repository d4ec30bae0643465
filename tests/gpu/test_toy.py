"""An engine with CUDA graphs on a real GPU: its answers are the same wherever its KV comes from."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from lmtier.copy.cuda.streams import DeviceLoad, DeviceStore, TransferOrder
from tests.gpu.toy import LARGE, LAYOUTS, Cuda, Engine, Model, Outcome, Spec, scenario

# Before cuBLAS starts: so that the same product of matrices is the same to the last bit.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.gpu,
    # What torch and cupy have to say about themselves.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:CUDA path could not be detected:UserWarning"),
]
WAYS = [("off", True), ("off", False), ("pieces", True), ("pieces", False), ("whole", False)]
STAGING = 16 << 20


@pytest.fixture(scope="module")
def model():
    return Model(LARGE, "cuda")


def is_right(outcome: Outcome) -> None:
    assert not outcome.wrong
    assert outcome.verified > 0
    assert len({tuple(each) for each in outcome.alone.tokens}) > 1, "all prompts have one answer"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("graphs", "layerwise"), WAYS)
def test_answers_are_the_same_wherever_kv_comes_from(model, tmp_path, layout, graphs, layerwise):
    engine = Engine(Cuda(), model, LARGE, layout, graphs)
    is_right(scenario(engine, tmp_path, layerwise=layerwise, staging_bytes=STAGING))


@pytest.mark.parametrize("layout", ["HND", "BLHNC"])
def test_runs_copied_as_they_are_give_the_same_answers(model, tmp_path, layout):
    engine = Engine(Cuda(), model, LARGE, layout, "whole")
    is_right(scenario(engine, tmp_path, layerwise=False, staging_bytes=STAGING, shortest_run=0))


def test_kv_of_32_bits_gives_the_same_answers(tmp_path):
    spec = replace(LARGE, dtype=torch.float32)
    engine = Engine(Cuda(), Model(spec, "cuda"), spec, "NHD", "pieces")
    is_right(scenario(engine, tmp_path, layerwise=True, staging_bytes=STAGING))


def late(model: Model, spec: Spec, tmp_path, layerwise: bool, seed: int, verify: str = "always") -> Outcome:
    graphs = "pieces" if layerwise else "whole"
    engine = Engine(Cuda(late=seed), model, spec, "NHD", graphs, seed)
    folder = tmp_path / str(seed)
    return scenario(
        engine, folder, layerwise=layerwise, seed=seed, verify=verify, wanted=2, staging_bytes=STAGING
    )


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_no_delay_changes_an_answer(model, tmp_path, layerwise, seed):
    is_right(late(model, LARGE, tmp_path, layerwise, seed))


@pytest.mark.parametrize(
    ("owner", "forgotten"),
    [(TransferOrder, "reuse"), (DeviceLoad, "let_compute"), (DeviceStore, "_wait_for_compute")],
)
def test_an_edge_that_is_left_out_makes_answers_wrong(model, tmp_path, monkeypatch, owner, forgotten):
    """Else the tests above would prove nothing."""
    monkeypatch.setattr(owner, forgotten, lambda *_, **__: None)
    assert any(late(model, LARGE, tmp_path, False, seed, "off").wrong for seed in range(4))
