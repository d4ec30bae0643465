"""Weights are named by the files that vLLM's loader opens, which each version chooses by its own rules."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import LoadConfig, ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import DefaultModelLoader

from lmtier_integrations.vllm.messages import WeightsOrigin
from lmtier_integrations.vllm.weights_origin import combined_origin, origin_of

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def write(path: Path, value: float, *names: str) -> None:
    path.parent.mkdir(exist_ok=True)
    tensors = {name: torch.full((8,), value) for name in names or ("a", "b")}
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)


def name_index(folder: Path, *files: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"of {each}": each for each in files}}))


def exchange(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


@pytest.fixture(scope="module")
def config(models: Path) -> ModelConfig:
    return EngineArgs(model=str(models / "qwen2"), skip_tokenizer_init=True).create_model_config()


@pytest.fixture
def origin(config: ModelConfig) -> Any:
    def origin(
        place: Path | str, load_format: str = "auto", built: Any = None, revision: str = "", **load: Any
    ) -> WeightsOrigin:
        model = copy.copy(config)
        model.model, model.revision = str(place), revision or None
        return origin_of(model, LoadConfig(load_format=load_format, **load), built)

    return origin


def test_equal_loads_have_one_name_and_others_another(origin, tmp_path):
    """A folder with an old .pt, a stale consolidated file, and two checkpoints, one by an index."""
    write(tmp_path / "model.safetensors", 1)
    write(tmp_path / "model.pt", 2)
    first = origin(tmp_path).digest
    assert origin(tmp_path, "safetensors").digest == origin(tmp_path, "hf").digest == first
    assert origin(tmp_path, "pt").digest not in (first, "")
    other = tmp_path / "other"  # in one process vLLM lists a folder once
    shutil.copytree(tmp_path, other)
    write(other / "consolidated.safetensors", 3)
    stale = origin(other).digest
    assert stale == origin(other, "mistral").digest
    write(tmp_path / "model-2.safetensors", 3)
    name_index(tmp_path, "model.safetensors")
    assert origin(tmp_path).digest == origin(tmp_path, "safetensors").digest == first
    name_index(tmp_path, "model-2.safetensors")
    assert len({first, stale, origin(tmp_path).digest, origin(tmp_path, "pt").digest, ""}) == 5


def test_the_contents_of_two_files_may_not_be_exchanged(origin, tmp_path):
    write(tmp_path / ONE, 1)
    write(tmp_path / TWO, 2)  # the same tensors: the last one wins
    before = origin(tmp_path).digest
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert origin(tmp_path / "copy").digest == before
    exchange(tmp_path / ONE, tmp_path / TWO)
    assert origin(tmp_path).digest not in (before, "")


@pytest.mark.parametrize("names", [("a",), ("b",)])
def test_files_without_an_order_need_unique_tensors(origin, tmp_path, names):
    write(tmp_path / ONE, 1, "a")
    write(tmp_path / TWO, 2, *names)
    found = origin(tmp_path, model_loader_extra_config={"enable_multithread_load": True})
    if names == ("a",):
        assert (found.digest, "in no certain order" in found.why) == ("", True)
    else:
        assert found == origin(tmp_path)


def test_weights_from_other_places_are_in_the_name(origin, tmp_path):
    """Towers and language models that a model's class takes from their own folders: Ultravox, Kimi-Audio."""
    for place in ("model", "tower"):
        write(tmp_path / place / "model.safetensors", 1)
    source = DefaultModelLoader.Source(str(tmp_path / "tower"), None, prefix="tower.")
    model, built = tmp_path / "model", SimpleNamespace(secondary_weights=[source])
    before = origin(model, built=built)
    write(tmp_path / "tower" / "model.safetensors", 2)
    after = origin(model, built=built)
    assert len({before.digest, after.digest, origin(model).digest, ""}) == 4
    assert before.files != after.files
    built.secondary_weights = [DefaultModelLoader.Source("of/a-hub", None, prefix="tower.")]
    assert "of/a-hub are neither files nor a commit" in origin(model, built=built).why


def test_a_models_class_decides_which_files_count(origin, tmp_path):
    write(tmp_path / "parts" / "part.safetensors", 1)
    built = SimpleNamespace(allow_patterns_overrides=["p*s/*.safetensors"])
    before = origin(tmp_path, built=built).digest
    write(tmp_path / "parts" / "part.safetensors", 2)
    assert origin(tmp_path, built=built).digest not in (before, "")
    write(tmp_path / "model.pt", 3)
    assert origin(tmp_path).digest != before
    assert origin(tmp_path, built=SimpleNamespace(fall_back_to_pt_during_load=False)) == WeightsOrigin()


def test_files_that_say_how_to_read_weights_are_in_the_name(origin, tmp_path):
    write(tmp_path / "model.safetensors", 1)
    found = [origin(tmp_path).digest]
    for bits in (4, 8):
        (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": bits}))
        found.append(origin(tmp_path).digest)
    assert len(set(found)) == 3


def test_a_hubs_commit_is_named_with_its_loaded_files(origin, tmp_path):
    commit, other = "a" * 40, "b" * 40
    for each in (commit, other):
        folder = tmp_path / "models--of--a-hub" / "snapshots" / each
        folder.mkdir(parents=True)
        write(folder / "model.safetensors", 1)
        write(folder / "model.pt", 2)

    def named(load_format: str, revision: str) -> WeightsOrigin:
        found: WeightsOrigin = origin("of/a-hub", load_format, revision=revision, download_dir=str(tmp_path))
        return found

    auto = named("auto", commit)
    assert auto == named("safetensors", commit)
    found = [auto, named("pt", commit), named("auto", other)]
    assert len({each.digest for each in found} | {""}) == 4
    assert len({each.files for each in found}) == 3
    assert not named("auto", "c" * 40).digest


@pytest.mark.parametrize(
    ("load_format", "extra", "why"),
    [
        ("dummy", {}, "random weights"),
        ("npcache", {}, "a copy of the weights"),
        ("auto", {"qlora_adapter_name_or_path": "elsewhere"}, "qlora_adapter_name_or_path"),
        ("sharded_state", {"pattern": "elsewhere"}, "pattern"),
    ],
)
def test_what_cannot_be_known_is_said(origin, tmp_path, load_format, extra, why):
    write(tmp_path / "pytorch_model.bin", 1)
    found = origin(tmp_path, load_format, model_loader_extra_config=extra)
    assert (found.digest, why in found.why) == ("", True)


def test_the_shards_of_all_ranks_are_in_the_name(origin, tmp_path):
    for rank in range(2):
        write(tmp_path / f"model-rank-{rank}-part-0.safetensors", rank)
    before = origin(tmp_path, "sharded_state").digest
    exchange(*tmp_path.glob("*.safetensors"))
    assert origin(tmp_path, "sharded_state").digest not in (before, "")


def test_files_that_change_after_loading_began_give_no_name(config, tmp_path):
    """The folder tells of a file that is gone."""
    write(tmp_path / "model.safetensors", 1)
    stale = tmp_path / "consolidated.safetensors"
    write(stale, 2)
    model, load = copy.copy(config), LoadConfig()
    model.model = str(tmp_path)
    began = os.stat(tmp_path).st_mtime + 0.5
    for path in (*tmp_path.iterdir(), tmp_path):
        os.utime(path, (began - 1, began - 1))
    later = max(path.stat().st_ctime for path in (*tmp_path.iterdir(), tmp_path)) + 0.001
    assert origin_of(model, load, since=later).digest
    while os.stat(tmp_path).st_ctime <= later:  # a file's clock is that of the kernel's ticks
        stale.unlink(missing_ok=True)
        (tmp_path / "tick").touch()
        (tmp_path / "tick").unlink()
    assert origin_of(model, load, since=later) == WeightsOrigin()


def test_a_model_and_its_draft_have_a_name_together():
    model, draft = WeightsOrigin("f", "m"), WeightsOrigin("g", "d")
    assert combined_origin(model, None) == model
    assert len({combined_origin(model, draft).digest, combined_origin(draft, model).digest, "m", "d"}) == 4
    assert combined_origin(model, WeightsOrigin()) == WeightsOrigin()
    assert combined_origin(model, WeightsOrigin(why="of the draft")).why == "of the draft"
