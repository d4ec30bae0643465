"""Beside another connector, in vLLM's MultiConnector: whichever comes first, each is what it is alone."""

from __future__ import annotations

import pytest

from lmtier.tools.console import Console, ServerAddress
from tests.vllm.conftest import cached, loadable, prompts_of, tokens, transfer
from tests.vllm.engine import Engine
from tests.vllm.test_engine import idle

NOISY = {"kv_connector": "Noisy", "kv_connector_module_path": "tests.vllm.noisy", "kv_role": "kv_both"}
BESIDE = {"kv_connector": "Beside", "kv_connector_module_path": "tests.vllm.beside", "kv_role": "kv_both"}


@pytest.mark.parametrize(("ours_is_first", "ranks"), [(True, 1), (False, 2)])
def test_it_saves_and_loads_beside_another(models, tmp_path, server, ours_is_first, ranks):
    prompts = prompts_of(300, 700, 1000)
    ours = transfer(server=str(server.path))
    both = [ours, BESIDE] if ours_is_first else [BESIDE, ours]
    how = {**ours, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": both}}
    del how["kv_connector_module_path"]
    options = {"tensor_parallel_size": ranks, "processes": ranks > 1}
    with Engine(tmp_path, models / "qwen2", transfer=how, **options) as engine:
        cold = engine.generate(prompts)
        assert cached(cold) == 0
        engine.forget()
        warm = engine.generate(prompts)
        assert tokens(warm) == tokens(cold)
        assert cached(warm) == loadable(prompts)
        found = engine.metrics()
        assert found["lmtier:loaded_tokens_total"] == loadable(prompts)
        assert not found["lmtier:load_failures_total"]
    with Engine(tmp_path, models / "qwen2", transfer=how, **options) as engine:
        (first,) = engine.generate(prompts[:1])  # the very first request of an engine, too
        assert cached([first]) == loadable(prompts[:1])
    idle(server.path)


def test_a_prompt_prefilled_elsewhere_is_not_looked_up(models, tmp_path, server):
    """vLLM asks all connectors. While one of them waits for a tier, the request waits too."""
    prompts = prompts_of(300, 700)
    ours = transfer(server=str(server.path))
    both = {"connectors": [BESIDE, ours]}
    how = {**ours, "kv_connector": "MultiConnector", "kv_connector_extra_config": both}
    del how["kv_connector_module_path"]
    remote = Console(ServerAddress(unix=str(server.path)))
    with (
        Engine(tmp_path, models / "qwen2", transfer=how) as engine,
    ):
        engine.generate(prompts)
        engine.forget()
        before = remote.snapshot()["counted"]["lookups"]
        assert cached(engine.generate(prompts, params={"do_remote_prefill": True})) == 0
        assert remote.snapshot()["counted"]["lookups"] == before
        engine.forget()
        assert cached(engine.generate(prompts, params={"do_remote_prefill": False})) == loadable(prompts)
        assert remote.snapshot()["counted"]["lookups"] > before
    idle(server.path)


@pytest.mark.parametrize("ours_is_first", [True, False])
def test_kv_that_another_connector_loaded_is_not_stored(models, tmp_path, server, ours_is_first):
    """Its load may fail after we have stored it, and its names may say less than ours."""
    prompts = prompts_of(300, 700)
    ours = transfer(server=str(server.path))
    both = [ours, NOISY] if ours_is_first else [NOISY, ours]
    how = {**ours, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": both}}
    del how["kv_connector_module_path"]
    longer = prompts[1] + prompts[0]
    with Engine(tmp_path, models / "qwen2", transfer=how) as engine:
        found = [engine.generate([each], tokens=1) for each in prompts]
        (shares,) = engine.generate([longer])
        assert cached([shares]) >= 600, "it shares what the other one has loaded"
        assert not engine.metrics()["lmtier:saved_tokens_total"]
        engine.forget()
        (anew,) = engine.generate([longer])
        assert cached([anew]) == 0
        assert engine.metrics()["lmtier:saved_tokens_total"] >= loadable([longer])
    with Engine(tmp_path, models / "qwen2", transfer=ours) as engine:
        warm = engine.generate([*prompts, longer])
        engine.use_connector(False)
        engine.forget()
        plain = engine.generate([*prompts, longer])
        assert tokens(warm) == tokens(plain)
        assert tokens(found[0])[0] == tokens(plain)[0][:1], "the failed load was computed again"
        assert tokens([anew]) == tokens(plain[2:])
        assert cached(warm[:1]) == 0
    idle(server.path)
