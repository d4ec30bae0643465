"""The first screen of the README runs as it stands, and does what the text beside it says."""

import ast
import logging
import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(tokens: int, directory: Path, seed: int = 0) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    kv = [torch.randn(64, 2, 4, 128, generator=generator).bfloat16() for _ in range(2)]
    scope: dict[str, object] = {"kv": kv, "prompt": list(range(tokens)), "blocks": list(range(tokens // 4))}
    exec(EXAMPLE.replace("~/.cache/lmtier", str(directory)), scope)
    return scope


def test_the_example_stores_what_is_new_and_restarts_warm(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "lmtier"):
        first = run(24, tmp_path / "kv")
        first["cache"].close()  # type: ignore[attr-defined]
        again = run(32, tmp_path / "kv", seed=1)
        again["cache"].close()  # type: ignore[attr-defined]
    assert "Storing KV cache for 24 out of 24 tokens (skip_leading_tokens=0)" in caplog.messages
    assert "Storing KV cache for 8 out of 32 tokens (skip_leading_tokens=24)" in caplog.messages
    for one, other in zip(first["kv"], again["kv"], strict=True):  # type: ignore[call-overload]
        assert torch.equal(one[:6], other[:6]), "the first 24 tokens came from disk"
        assert not torch.equal(one[6:8], other[6:8])


def test_the_example_is_short():
    statements = [each for each in ast.walk(ast.parse(EXAMPLE)) if isinstance(each, ast.stmt)]
    assert len(statements) <= 14
