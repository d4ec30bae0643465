"""Nothing of vLLM's configuration changes KV unnoticed: each field is on the list, and the list counts."""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.config import DiffusionConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from lmtier.errors import LayoutError
from lmtier_integrations.vllm import LMTierConnector
from lmtier_integrations.vllm.identity import identity_of, name_of
from lmtier_integrations.vllm.weights_origin import origin_of
from tests.vllm.fields import entries

NEWEST = "0.32.0"
OLDER = {
    *("CacheConfig.enable_mamba_fine_grained_prefix_cache", "CacheConfig.user_specified_mamba_block_size"),
    *("KVTransferConfig.kv_buffer_size", "KVTransferConfig.kv_ip", "KVTransferConfig.kv_parallel_size"),
    *("KVTransferConfig.kv_rank", "ParallelConfig.sd_worker_cls"),
    "ModelConfig.enable_return_routed_experts",
}
"""Fields that versions before the newest have."""


def classes(of: Any, seen: set[type]) -> Iterator[type]:
    """A configuration class, and all that its fields may hold."""
    if isinstance(of, type) and dataclasses.is_dataclass(of) and of not in seen:
        seen.add(of)
        yield of
        for hint in typing.get_type_hints(of).values():
            yield from classes(hint, seen)
    for part in typing.get_args(of):
        yield from classes(part, seen)


def theirs() -> set[str]:
    return {
        f"{each.__name__}.{field.name}"
        for each in classes(VllmConfig, set())
        for field in dataclasses.fields(each)
    }


def ours() -> list[str]:
    return [f"{entry['of']}.{name}" for entry in entries()["fields"] for name in entry["names"].split()]


def test_each_field_of_vllms_configuration_is_on_the_list():
    listed = ours()
    assert len(listed) == len(set(listed))
    whole = {name.partition(".")[0] for name in listed if name.endswith(".*")}
    found = theirs()
    assert len(found) > 400
    assert {name for name in found if name.partition(".")[0] not in whole} - set(listed) == set()


def test_nothing_is_listed_that_vllm_does_not_have():
    found = theirs()
    found |= {f"{name.partition('.')[0]}.*" for name in found}
    if vllm.__version__ == NEWEST:
        assert set(ours()) - found - {"BaseDummyOptions.*"} == OLDER
        known = vllm.envs.environment_variables
        assert all(name in known for entry in entries()["environment"] for name in entry["names"].split())


@pytest.fixture
def key(models: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The digest that all keys of an engine with these options begin from."""

    def key(
        model: Path = models / "qwen2", environment: dict[str, str] | None = None, **options: Any
    ) -> bytes:
        with monkeypatch.context() as patch:
            for name, value in (environment or {}).items():
                patch.setenv(name, value)
            config = EngineArgs(model=str(model), max_model_len=2048, **options).create_engine_config()
            weights, _ = name_of({0: origin_of(config.model_config, config.load_config)}, config)
            return identity_of(config, "model", weights).digest()

    return key


CHANGING: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
    {"hf_overrides": {"rope_theta": 5.0}},
    {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}},
    {"hf_overrides": {"architectures": ["Qwen3ForCausalLM"]}},
    {"additional_config": {"of": "a plug-in"}},
    {"attention_config": {"disable_flashinfer_q_quantization": True}},
    {"attention_config": {"indexer_kv_dtype": "fp8"}},
    {"kernel_config": {"moe_backend": "marlin"}},
    {"linear_backend": "marlin"},
    {"enable_lora": True, "lora_dtype": "float16"},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
    {"environment": {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}},
    {"environment": {"VLLM_MARLIN_INPUT_DTYPE": "int8"}},
    {"environment": {"VLLM_B12X_MOE_FP4_FORCE_A16": "1"}},
    {"environment": {"VLLM_DISABLED_KERNELS": "CutlassFP8ScaledMMLinearKernel"}},
]


def test_what_changes_kv_changes_keys(key):
    found = [key(), *(key(**options) for options in CHANGING)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", ["qwen3-next", "mamba2"])
def test_the_precision_of_states_is_in_the_keys(key, models, name):
    assert key(models / name, mamba_cache_dtype="float32") != key(models / name)


def test_a_length_that_is_fitted_to_memory_is_in_no_key(models):
    """vLLM lowers it after it has built the model, which rotates by its own length: 2048."""

    def key(length: int, fitted: int) -> bytes:
        config = EngineArgs(model=str(models / "phi3"), max_model_len=length).create_engine_config()
        config.model_config.max_model_len = fitted
        return identity_of(config, "model").digest()

    assert key(-1, fitted=1024) == key(-1, fitted=3072) == key(2048, fitted=2048)
    assert key(-1, fitted=1024) != key(1024, fitted=1024)


def test_the_scaling_of_attention_is_always_in_the_key(key, models, tmp_path):
    """Llama 4 takes it from the generation config, and not from its own configuration."""
    model = models / "llama4"
    plain, scaled = key(model), key(model, override_generation_config={"attn_temperature_tuning": True})
    assert plain != scaled
    assert key(model, override_generation_config={"temperature": 0.5}) == plain
    (tmp_path / "generation_config.json").write_text(json.dumps({"attn_temperature_tuning": True}))
    assert key(model, generation_config=str(tmp_path)) == scaled
    # the process that builds the model sees what its class writes there, and others do not
    assert key(model, hf_overrides={"attn_temperature_tuning": False}) == plain


def test_models_that_read_the_generation_config_are_known():
    """Llama 4 scales its attention by it. The others suppress tokens, and diffusion is declined."""
    folders = [Path(vllm.__file__).parent / name for name in ("model_executor", "models")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = {path.stem for path in files if "generation_config" in path.read_text()}
    others = {"config", "diffusion_gemma", "gemma4_mm", "gemma4_mtp", "gemma4_unified"}
    assert found - others == {"llama4"}


@pytest.mark.parametrize(
    "options",
    [
        {
            "seed": 5,
            "enforce_eager": True,
            "max_num_seqs": 7,
            "max_num_batched_tokens": 999,
            "block_size": 64,
        },
        {"enable_lora": True, "max_lora_rank": 32, "enable_prefix_caching": False},
        {"enable_prompt_embeds": True, "tokenizer_mode": "slow", "generation_config": "vllm"},
        {"compilation_config": {"mode": 0}, "gpu_memory_utilization": 0.5, "enable_chunked_prefill": True},
        {"load_format": "safetensors", "model_loader_extra_config": {"enable_multithread_load": True}},
        {"trust_remote_code": True},
        {"mamba_ssm_cache_dtype": "float32", "mamba_cache_dtype": "float32"},  # it keeps no states
    ],
)
def test_what_changes_no_kv_changes_no_key(key, options):
    assert key(**options) == key()


@pytest.mark.parametrize(
    "options",
    [
        {"load_format": "dummy"},
        {"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "elsewhere"}},
        {"model_loader_extra_config": {"qlora_adapter_name_or_path": "elsewhere"}},
        {"model_class_overrides": {"Qwen2ForCausalLM": "vllm.model_executor.models.qwen2:Qwen2ForCausalLM"}},
    ],
)
def test_what_cannot_be_known_keeps_names_to_this_run(key, options, monkeypatch):
    here = key(**options)
    monkeypatch.setattr("lmtier.format.keys._PROCESS_SECRET", "of another process")
    assert key(**options) != here
    assert key() == key()


def test_models_whose_tokens_see_later_ones_are_declined(models):
    config = EngineArgs(model=str(models / "qwen2")).create_engine_config()
    config.diffusion_config = DiffusionConfig(canvas_length=32)
    with pytest.raises(LayoutError, match="only see earlier tokens"):
        LMTierConnector.get_required_kvcache_layout(config)


def test_code_of_the_models_own_is_in_the_key(key, models, tmp_path):
    folder = tmp_path / "own"
    shutil.copytree(models / "qwen2", folder)
    facts = json.loads((folder / "config.json").read_text())
    facts["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "modeling_own.py").write_text("class Own: ...\n")
    before = key(folder, trust_remote_code=True)
    assert key(folder, trust_remote_code=True) == before
    (folder / "modeling_own.py").write_text("class Own: 'another'\n")
    assert key(folder, trust_remote_code=True) != before
