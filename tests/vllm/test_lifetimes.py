"""A real vLLM stores for as long as a request says, and tells how its prompts can be named."""

from __future__ import annotations

import json
import time

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from lmtier.tools.cli import main
from lmtier.tools.console import Console, ServerAddress
from lmtier_integrations.vllm.request_inputs import said_by
from tests.server.process import until
from tests.vllm.conftest import CacheServer, prompts_of, transfer
from tests.vllm.engine import Engine


def test_a_request_sets_its_ttl_and_a_person_pins_by_tokens(models, tmp_path, server: CacheServer, capsys):
    short, long, wrong = prompts_of(600, 600, 600)
    how = transfer(server=str(server.path))
    remote = Console(ServerAddress(unix=str(server.path)))
    with (
        Engine(tmp_path, models / "qwen2", transfer=how, max_model_len=2048) as engine,
    ):
        began = time.monotonic()
        engine.generate([short], ttl=1.0)
        until(lambda: time.monotonic() > began + 1.0)
        engine.generate([long], ttl=3600)
        engine.generate([wrong], ttl="for ever")
        until(lambda: remote.snapshot()["tiers"][0]["chunks"] == 4)
        engine.forget()
        assert [each.cached for each in engine.generate([short, long, wrong])] == [0, 512, 512]
        assert remote.snapshot()["counted"]["missed"]["expired"] == 512
        tokens = tmp_path / "tokens.json"
        tokens.write_text(json.dumps(long))
        assert main(["prefetch", str(tokens), "--pin", "p", "--server", str(server.path)]) == 0
        assert "pinned as p: 2 in cpu" in capsys.readouterr().out
    assert engine.log.read_text().count("lmtier_ttl='for ever'") == 1


@pytest.mark.parametrize("said", ["x", ["lmtier_ttl"], 7, {}, {"lmtier_ttl": "x"}, {"lmtier_ttl": -1}])
def test_wrong_words_about_lifetimes_stop_no_engine(said):
    request = Request("r", [1, 2], SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = said  # versions differ in what they let through
    assert said_by(request).ttl is None
