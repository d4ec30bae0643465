"""Ways to use an engine that change no KV, or all of it: answers are those of the engine alone."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.vllm.conftest import alone, cached, loadable, prompts_of, tokens
from tests.vllm.engine import Engine

PROMPTS = prompts_of(700, 513, 300)
WORDS = "( ?w[1-9]*[02468]){2,}"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of an engine with a word for each token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = {"<end>": 2} | {f"w{each}": each for each in range(2048) if each != 2}
    made = Tokenizer(WordLevel(words, unk_token="<end>"))
    made.pre_tokenizer = Whitespace()
    end = "<end>"
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token=end, eos_token=end).save_pretrained(folder)
    return {"skip_tokenizer_init": False, "tokenizer": str(folder)}


def test_structured_output_and_beams_go_on_from_loaded_kv(models, tmp_path, server, tokenizer):
    def asked() -> tuple[Any, ...]:
        structured = alone(engine, PROMPTS, regex=WORDS)
        engine.forget()
        return tokens(structured), engine.beams(PROMPTS, 3), cached(structured)

    with Engine(tmp_path, models / "qwen2", transfer=server.transfer(), **tokenizer) as engine:
        engine.use_connector(False)
        free, (*wanted, _) = tokens(alone(engine, PROMPTS)), asked()
        assert wanted[0] != free
        engine.forget()
        engine.use_connector(True)
        assert asked() == (*wanted, 0)
        loaded = engine.metrics()["lmtier:loaded_tokens_total"]
        engine.forget()
        assert asked() == (*wanted, loadable(PROMPTS))
        assert engine.metrics()["lmtier:loaded_tokens_total"] == loaded + 2 * loadable(PROMPTS)
        assert not engine.metrics()["lmtier:load_failures_total"]


def test_a_prompt_is_found_whoever_made_its_tokens(models, tmp_path, server, tokenizer):
    texts = [" ".join(f"w{each}" for each in prompt) for prompt in PROMPTS]
    how: dict[str, Any] = {"transfer": server.transfer()}
    with Engine(tmp_path, models / "qwen2", tokenizer_mode="hf", **how, **tokenizer) as engine:
        wanted = alone(engine, texts)
        assert cached(wanted) == 0
    for mode, asked in (("deepseek_v32", texts), ("auto", PROMPTS)):
        with Engine(tmp_path, models / "qwen2", tokenizer_mode=mode, **how, **tokenizer) as engine:
            found = alone(engine, asked)
            assert tokens(found) == tokens(wanted)
            assert cached(found) == loadable(PROMPTS)


def test_models_of_equal_shapes_share_only_equal_weights(models, tmp_path, server):
    """On one server, under one name. vLLM ignores sleep on a CPU; lmtier does not at level 2."""

    def finds(engine: Engine, wanted: list[list[int]]) -> int:
        engine.forget()
        found = alone(engine, PROMPTS)
        assert tokens(found) == wanted
        return int(cached(found))

    how, trained = server.transfer(model="ours"), models / "qwen2-trained"
    with (
        Engine(tmp_path, models / "qwen2", transfer=how) as one,
        Engine(tmp_path, trained, transfer=how) as other,
    ):
        wanted = []
        for engine in (one, other):
            engine.use_connector(False)
            wanted.append(tokens(alone(engine, PROMPTS)))
            engine.use_connector(True)
        assert wanted[0] != wanted[1]
        for found in (0, loadable(PROMPTS)):
            assert finds(one, wanted[0]) == found
            assert finds(other, wanted[1]) == found
        one.sleep(2)
        assert finds(one, wanted[0]) == 0
        one.rpc("reload_weights", weights_path=str(trained))
        assert finds(one, wanted[1]) == loadable(PROMPTS)
        assert finds(other, wanted[1]) == loadable(PROMPTS)
