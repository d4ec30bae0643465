"""What must hold on every version of vLLM that the connector supports: in a minute or so, on tiny models.

Each test is a row of the table in README.md, which compatibility.py makes: its name is the row's, and the
reason for which it is skipped is what the table says instead of yes.
"""

from __future__ import annotations

import json
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lmtier.client.client import Client
from tests.vllm.conftest import (
    CHUNK,
    HAS_BF16,
    STATE_BLOCK,
    CacheServer,
    alone,
    cached,
    loadable,
    prompts_of,
    tokens,
    transfer,
)
from tests.vllm.engine import Engine, EngineDied, Output

STEP = 512
PROMPTS = [
    *prompts_of(1, 31, 33, 255, 256, 257, 300, 511, 513, 769),
    *prompts_of(700, 900, 1100, 1300, seed=3, prefix=600),
]
COUNTERS = {
    "loaded_tokens",
    "saved_tokens",
    "load_bytes",
    "load_seconds",
    "save_bytes",
    "save_seconds",
    "prefill_seconds",
    "prefill_expected_seconds",
    "load_failures",
    "save_failures",
    "unserved",
}


def short(folder: Path, models: Path, how: dict[str, Any], **options: Any) -> Engine:
    return Engine(folder, models / "qwen2", transfer=how, max_model_len=2048, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("versions")


@pytest.fixture(scope="module")
def shared(folder):
    server = CacheServer(folder, "cpu://?capacity=128MiB", f"disk://{folder}/kv?capacity=1GiB")
    yield server
    server.close()


@pytest.fixture(scope="module")
def first(models, folder, shared):
    """What an engine said to PROMPTS, cold and then warm, and its metrics after that."""
    with short(folder, models, transfer(server=str(shared.path))) as engine:
        cold = engine.generate(PROMPTS)
        engine.forget()
        return cold, engine.generate(PROMPTS), engine.metrics()


@pytest.fixture(scope="module")
def engine(models, folder, shared, first):
    """Another one, after the server was stopped and started; it knows the connector by its name alone."""
    shared.process.terminate()
    shared.process.wait(60)
    shared.start()
    how = transfer(server=str(shared.path), mode="layerwise")
    del how["kv_connector_module_path"]
    with short(folder, models, how, max_num_batched_tokens=STEP) as engine:
        yield engine


def test_this_version_runs(engine, record_testsuite_property):
    found = engine.ask("version")
    record_testsuite_property("vllm", found["version"])
    assert found["installed"] == found["version"]
    folders = {Path(each).parent for each in found["compiled"]}
    # On a CPU without instructions for bf16, vLLM loads nothing that is compiled.
    assert folders == {Path(found["package"])} or (not folders and not HAS_BF16)


def test_answers_cold_and_warm_are_those_of_an_engine_alone(models, folder, first):
    cold, warm, _ = first
    with Engine(folder, models / "qwen2", max_model_len=2048) as plain:
        wanted = tokens(plain.generate(PROMPTS))
    assert tokens(cold) == wanted
    assert tokens(warm) == wanted
    assert cached(warm) >= loadable(PROMPTS)


def test_after_a_restart_it_loads_from_disk(first, engine):
    engine.forget()
    again = engine.generate(PROMPTS)
    assert tokens(again) == tokens(first[0])
    assert cached(again) >= loadable(PROMPTS)


def test_the_name_of_the_connector_is_enough(engine):
    (prompt,) = prompts_of(2 * CHUNK + 1, seed=9)
    engine.generate([prompt])
    engine.forget()
    assert cached(engine.generate([prompt])) == 2 * CHUNK


def test_prefill_in_steps(engine):
    prompts = prompts_of(3 * STEP, 3 * STEP + 1, seed=4)
    cold = engine.generate(prompts)
    engine.forget()
    warm = engine.generate(prompts)
    assert tokens(warm) == tokens(cold)
    assert cached(cold) == 0
    assert cached(warm) == loadable(prompts)


def test_generated_tokens_are_kept(engine):
    (prompt,) = prompts_of(CHUNK - 6, seed=5)
    answer = engine.generate([prompt], CHUNK + 20)[0].tokens
    engine.forget()
    assert cached(engine.generate([prompt + answer])) == 2 * CHUNK


def test_salts_do_not_see_each_other(engine):
    prompts = prompts_of(600, 800, seed=6)
    ours = tokens(engine.generate(prompts, salt="ours"))
    for salt, found in (("theirs", 0), ("", 0), ("ours", loadable(prompts))):
        engine.forget()
        outputs = engine.generate(prompts, salt=salt)
        assert tokens(outputs) == ours
        assert cached(outputs) == found


def test_a_load_that_fails_is_computed(engine, shared):
    """Bits flip in the slab, above all checksums."""
    prompts = prompts_of(700, 900, seed=7)
    wanted = tokens(engine.generate(prompts))
    failures = engine.metrics()["lmtier:load_failures_total"]
    with Client(str(shared.path)) as client:
        slab = client.slab.view(0, client.slab.capacity)
        for at in range(100, client.slab.capacity, 64 << 10):
            slab[at] ^= 0x40
    for _ in range(2):
        engine.forget()
        assert tokens(engine.generate(prompts)) == wanted
    assert engine.metrics()["lmtier:load_failures_total"] > failures


def test_a_server_that_died_is_done_without_and_found_again(engine, shared):
    prompts = prompts_of(700, 900, seed=8)
    wanted = tokens(engine.generate(prompts))
    shared.kill()
    engine.forget()
    assert tokens(engine.generate(prompts)) == wanted
    assert engine.metrics()["lmtier:unserved_total"] > 0
    shared.start()
    until = time.monotonic() + 60
    outputs: list[Output] = []
    while cached(outputs) < loadable(prompts):
        assert time.monotonic() < until
        engine.forget()
        outputs = engine.generate(prompts)
        assert tokens(outputs) == wanted


def test_its_counters_are_in_the_metrics_of_the_engine(first):
    *_, found = first
    assert {f"lmtier:{name}_total" for name in COUNTERS} <= found.keys()
    assert found["vllm:external_prefix_cache_hits_total"] == found["lmtier:loaded_tokens_total"] > 0


def test_the_engine_tells_which_tier_served(first):
    package = find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    if not Path(package.origin).with_name("v1").joinpath("metrics", "cache_hit_source.py").exists():
        pytest.skip("vLLM does not ask")
    *_, found = first
    assert found["vllm:prompt_tokens_cached_by_source_total{host}"] > 0


def test_two_ranks_in_processes_share_a_private_server(models, tmp_path):
    prompts = prompts_of(900, 513, 257)
    how = transfer(tiers=["cpu://?capacity=128MiB"], verify="always")
    with short(tmp_path, models, how, processes=True, tensor_parallel_size=2) as engine:
        cold = alone(engine, prompts)
        engine.forget()
        warm = alone(engine, prompts)
        assert tokens(warm) == tokens(cold)
        assert cached(warm) == loadable(prompts)
        assert not engine.metrics()["lmtier:load_failures_total"]


@pytest.fixture(scope="module")
def windows(models, folder, shared):
    """A model with sliding windows in most layers: what it said cold and then warm, and the engine's log."""
    prompts = prompts_of(1500, 700, 257, seed=10)
    with Engine(folder, models / "gemma3", transfer=transfer(server=str(shared.path))) as engine:
        cold = alone(engine, prompts)
        engine.forget()
        warm = alone(engine, prompts)
        assert cached(warm) == loadable(prompts)
        return cold, warm, engine.log.read_text()


def test_sliding_windows_mixed_with_full_attention(windows):
    cold, warm, _ = windows
    assert tokens(warm) == tokens(cold)


def test_windows_drop_what_has_left_them(windows):
    *_, log = windows
    assert "Turning off hybrid kv cache manager" not in log


def test_layers_that_keep_a_state_and_after_a_restart(models, tmp_path):
    prompts = prompts_of(300, 577, 900, seed=21)
    whole = sum((len(each) - 1) // STATE_BLOCK * STATE_BLOCK for each in prompts)
    tiers = ["cpu://?capacity=128MiB", f"disk://{tmp_path}/kv?capacity=1GiB"]
    options: dict[str, Any] = {
        "transfer": transfer(tiers=tiers, chunk_tokens=STATE_BLOCK),
        "dtype": "bfloat16",
    }
    with Engine(tmp_path, models / "qwen3-next", **options) as engine:
        cold = alone(engine, prompts)
        engine.forget()
        warm = alone(engine, prompts)
    assert tokens(warm) == tokens(cold)
    assert (cached(cold), cached(warm)) == (0, whole)
    with Engine(tmp_path, models / "qwen3-next", **options) as engine:
        again = alone(engine, prompts)
    assert tokens(again) == tokens(cold)
    assert cached(again) == whole


def test_weights_are_named_by_the_files_of_their_loader(models, tmp_path):
    """Its own code is asked, so no engine has to start."""
    from vllm.config import LoadConfig
    from vllm.engine.arg_utils import EngineArgs

    from lmtier_integrations.vllm.weights_origin import origin_of

    place, trained = tmp_path / "model", models / "qwen2-trained" / "model.safetensors"
    shutil.copytree(models / "qwen2", place)
    model = EngineArgs(model=str(place), skip_tokenizer_init=True).create_model_config()

    def named(load_format: str) -> str:
        return origin_of(model, LoadConfig(load_format=load_format)).digest

    auto = named("auto")
    for name in ("model.pt", "model-2.safetensors", "consolidated.safetensors"):
        shutil.copyfile(trained, place / name)
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"all": "model.safetensors"}}))
    assert named("safetensors") == named("hf") == auto
    found = [auto, named("pt"), named("mistral")]
    index.write_text(json.dumps({"weight_map": {"all": "model-2.safetensors"}}))
    assert len({*found, named("safetensors"), ""}) == 5


def test_what_it_cannot_serve_is_declined_in_one_sentence(models, tmp_path):
    options: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": False}
    with pytest.raises(EngineDied, match="a state instead of KV; for those lmtier needs"):
        Engine(tmp_path, models / "qwen3-next", transfer=transfer(), **options)
