"""A real vLLM stores for as long as a request says, and tells how its prompts can be named."""

from __future__ import annotations

import json
import time

from lmtier.cli import main
from lmtier.server.console import Address, Remote
from tests.server.process import until
from tests.vllm.conftest import CacheServer, prompts_of, transfer
from tests.vllm.engine import Engine


def test_a_request_says_how_long_and_a_person_pins_by_tokens(models, tmp_path, server: CacheServer, capsys):
    short, long, wrong = prompts_of(600, 600, 600)
    how = transfer(server=str(server.path))
    with (
        Engine(tmp_path, models / "qwen2", transfer=how, max_model_len=2048) as engine,
        Remote(Address(unix=str(server.path))) as remote,
    ):
        began = time.monotonic()
        engine.generate([short], ttl=1.0)
        until(lambda: time.monotonic() > began + 1.0)
        engine.generate([long], ttl=3600)
        engine.generate([wrong], ttl="for ever")
        until(lambda: remote.snapshot()["tiers"][0]["chunks"] == 4)
        engine.forget()
        assert [each.cached for each in engine.generate([short, long, wrong])] == [0, 512, 512]
        assert remote.snapshot()["tokens"]["missed"]["expired"] == 512
        tokens = tmp_path / "tokens.json"
        tokens.write_text(json.dumps(long))
        assert main(["prefetch", str(tokens), "--pin", "p", "--server", str(server.path)]) == 0
        assert "pinned as p: 2 in cpu" in capsys.readouterr().out
    assert "lmtier_ttl='for ever'" in engine.log.read_text()
