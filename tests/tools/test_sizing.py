"""Bytes of KV of models that everybody knows, and what tiers hold of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtier.errors import ConfigError
from lmtier.tools import sizing
from lmtier.tools.cli import main
from lmtier.tools.sizing import model_of

KiB = 1024


def llama(**more: Any) -> dict[str, Any]:
    fields = {"model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 131_072}
    return fields | more


MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": (llama(num_hidden_layers=32, num_attention_heads=32, hidden_size=4096), 512 * KiB),
    "Llama-3-8B": (
        llama(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096),
        128 * KiB,
    ),
    "Llama-3-70B": (
        llama(num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, hidden_size=8192),
        320 * KiB,
    ),
    "Llama-3-405B": (
        llama(num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8, hidden_size=16_384),
        504 * KiB,
    ),
    "Llama-3.2-1B": (
        llama(
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            hidden_size=2048,
            head_dim=64,
        ),
        32 * KiB,
    ),
    "Mistral-7B-v0.3": (
        llama(
            model_type="mistral",
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            hidden_size=4096,
            sliding_window=None,
        ),
        128 * KiB,
    ),
    "Mixtral-8x7B": (
        llama(
            model_type="mixtral",
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            hidden_size=4096,
        ),
        128 * KiB,
    ),
    "Qwen2.5-7B": (
        llama(
            model_type="qwen2",
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            hidden_size=3584,
            sliding_window=131_072,
            use_sliding_window=False,
            max_window_layers=28,
        ),
        56 * KiB,
    ),
    "Qwen2.5-72B": (
        llama(
            model_type="qwen2",
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            hidden_size=8192,
        ),
        320 * KiB,
    ),
    "Qwen3-32B": (
        llama(
            model_type="qwen3",
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            hidden_size=5120,
            head_dim=128,
        ),
        256 * KiB,
    ),
    "Phi-3-mini-4k": (
        llama(
            model_type="phi3",
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            hidden_size=3072,
            sliding_window=2047,
            max_position_embeddings=4096,
        ),
        384 * KiB,
    ),
    "DeepSeek-V3": (
        llama(
            model_type="deepseek_v3",
            num_hidden_layers=61,
            num_attention_heads=128,
            num_key_value_heads=128,
            hidden_size=7168,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            max_position_embeddings=163_840,
        ),
        61 * 576 * 2,
    ),
    "DeepSeek-V2-Lite": (
        llama(
            model_type="deepseek_v2",
            num_hidden_layers=27,
            num_attention_heads=16,
            num_key_value_heads=16,
            hidden_size=2048,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
        ),
        27 * 576 * 2,
    ),
    "Gemma-3-27B": (
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "hidden_size": 5376,
                "sliding_window": 1024,
            },
        },
        496 * KiB,
    ),
    "gpt-oss-20b": (
        llama(
            model_type="gpt_oss",
            num_hidden_layers=24,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            hidden_size=2880,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 12,
        ),
        48 * KiB,
    ),
    "Qwen3-Next-80B": (
        llama(
            model_type="qwen3_next",
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            hidden_size=2048,
            full_attention_interval=4,
        ),
        24 * KiB,
    ),
    "Jamba-v0.1": (
        llama(
            model_type="jamba",
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            hidden_size=4096,
            attn_layer_period=8,
            attn_layer_offset=4,
        ),
        16 * KiB,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token_of_models_that_everybody_knows(name):
    config, expected = MODELS[name]
    model = model_of(config)
    assert model.bytes_per_token == expected
    assert model.form(256, 1).sizes == (256 * expected,)
    assert model_of(config | {"torch_dtype": "float32"}).bytes_per_token == 2 * expected
    assert model_of(config, "fp8").bytes_per_token == expected // 2


@pytest.mark.parametrize(
    ("name", "full", "windowed", "window", "without"),
    [
        ("Llama-3-8B", 32, 0, 0, 0),
        ("Qwen2.5-7B", 28, 0, 0, 0),
        ("Phi-3-mini-4k", 0, 32, 2047, 0),
        ("Gemma-3-27B", 10, 52, 1024, 0),
        ("gpt-oss-20b", 12, 12, 128, 0),
        ("Qwen3-Next-80B", 12, 0, 0, 36),
        ("Jamba-v0.1", 4, 0, 0, 28),
    ],
)
def test_which_layers_see_how_far(name, full, windowed, window, without):
    model = model_of(MODELS[name][0])
    assert (model.full_layers, model.windowed_layers, model.window, model.layers_without_kv) == (
        full,
        windowed,
        window,
        without,
    )


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({"attn_layer_indices": [9, 18, 27]}, 3),  # Bamba
        ({"linear_attn_config": {"full_attn_layers": [4, 8, 32], "kda_layers": [1, 2, 3]}}, 3),  # Kimi Linear
        ({"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 4}, 4),  # MiniMax
        ({"block_types": ["recurrent", "recurrent", "attention"]}, 10),  # RecurrentGemma
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_every_way_to_say_which_layers_have_kv_is_read(fields, full):
    model = model_of({"num_hidden_layers": 32, "num_attention_heads": 8, "hidden_size": 1024, **fields})
    assert (model.full_layers, model.layers_without_kv) == (full, 32 - full)


def test_an_engine_keeps_only_windows_of_windowed_layers():
    model = model_of(MODELS["Gemma-3-27B"][0])
    assert model.engine_bytes(1024) == 1024 * model.bytes_per_token
    assert model.engine_bytes(10_240) == (10 * 10_240 + 52 * 1024) * 8 * KiB


def test_packed_mla_takes_656_bytes_a_token_and_layer():
    model = model_of(MODELS["DeepSeek-V3"][0], "fp8_ds_mla")
    assert model.bytes_per_token == 61 * 656
    assert model.form(256, 8).sizes == (256 * 61 * 656,)


def test_ranks_share_heads_and_store_equal_kv_once():
    eight_heads = model_of(MODELS["Llama-3-8B"][0])
    for ranks, shards in ((1, 1), (2, 2), (8, 8), (16, 8)):
        sizes = eight_heads.form(256, ranks).sizes
        assert sizes == (32 * 1024 * KiB // shards,) * shards
    assert len(model_of(MODELS["DeepSeek-V3"][0]).form(256, 8).sizes) == 1


def test_older_files_have_other_names():
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    model = model_of(gpt2, "fp32")
    assert (model.bytes_per_token, model.longest) == (2 * 12 * 768 * 4, 1024)
    falcon = {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}
    assert model_of(falcon).bytes_per_token == 32 * 2 * 64 * 2


# ---- the command


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "Llama-3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Llama-3-8B"][0]))
    return folder


def test_the_command_says_what_fits(config, capsys):
    argv = ["size", str(config), "--cpu", "64GiB", "--disk", "2TiB", "--tp", "2", "--prefill", "10000"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_per_token"] == 128 * KiB
    assert found["shard_bytes"] == [16 * KiB * KiB] * 2
    cpu, disk = found["tiers"]
    assert cpu["tokens"] == 2048 * 256
    assert cpu["requests"] == {"8192": 64, "32768": 16}
    assert cpu["longest_prompt"] == 131_072
    assert disk["tokens"] == (2 << 40) // (32 * KiB * KiB + 2 * 4096) * 256
    assert found["break_even_bytes_per_second"] == {"10000": 128 * KiB * 10_000}
    assert main(argv) == 0
    out = capsys.readouterr().out
    for words in ("Llama-3-8B: 32 layers of full attention", "128 KiB", "524,288", "1.31 GB/s"):
        assert words in out


def test_the_command_says_what_a_full_tier_saves(config, capsys):
    words = ["size", str(config), "--cpu", "64GiB", "--prefill", "10000", "--gpu-hour", "3.6"]
    assert main(words) == 0
    assert "at 3.6 an hour" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (once,) = said["reused_once"]
    assert once["money"] == pytest.approx(said["tiers"][0]["tokens"] / 10_000 / 3600 * 3.6)
    assert once["money_per_gib"] == pytest.approx(once["money"] / 64)


def test_the_simulator_takes_a_model(config, capsys):
    argv = ["simulate", "--synthetic", "rag", "--requests", "20", "-t", "cpu://?capacity=1GiB"]
    assert main([*argv, "--model", str(config)]) == 0
    assert "128 KiB a token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("[]", [], "not a model's configuration"),
        ("{", [], "not JSON"),
        ("{}", [], "of a language model: it has no 'num_attention_heads'"),
        (json.dumps(MODELS["Llama-3-8B"][0]), ["--tp", "3"], "does not split 8 KV heads evenly"),
        (json.dumps(MODELS["Llama-3-8B"][0]), ["--kv-dtype", "fp7"], "--kv-dtype fp7: unknown"),
        (json.dumps(MODELS["Llama-3-8B"][0]), ["--tp", "0"], "must be more than 0"),
        (json.dumps(MODELS["Llama-3-8B"][0]), ["--cpu", "0", "--gpu-hour", "1"], "--cpu 0: must be more"),
        (json.dumps(MODELS["Llama-3-8B"][0]), ["--chunk-tokens", "100"], "whole blocks"),
        (json.dumps({"num_attention_heads": 1, "hidden_size": 8}), [], "no attention layers"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, capsys, text, more, words):
    (tmp_path / "config.json").write_text(text)
    assert main(["size", str(tmp_path), *more]) != 0
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_model_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="No such file"):
        sizing.read(Path("/nonexistent/config.json"))
