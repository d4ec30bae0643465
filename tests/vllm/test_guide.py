"""docs/START_VLLM.md, as it stands: asked again, the prompt comes from memory; after a restart, from disk."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from tests.guides import blocks, check
from tests.redis_process import free_port
from tests.vllm.engine import PATIENCE, environment

PAGE = Path(__file__).parents[2] / "docs" / "START_VLLM.md"
# The package for CPUs has no `vllm` command that works; and a small model on a CPU needs some options more.
VLLM = """#!/bin/sh
test "$1" = serve && model=$2 && shift 2
exec nice -n 5 "{python}" -m vllm.entrypoints.openai.api_server --model "$model" "$@" --port {port} \\
  --enforce-eager --dtype float32 --block-size 32 --max-model-len 4096
"""


def readable(model: Path, folder: Path) -> Path:
    """The model, with a tokenizer: a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(model, folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(letters, 4)}
    words |= {f"<{number}>": number for number in range(2048) if not 4 <= number < 4 + len(letters)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_the_page_about_starting(models, tmp_path):
    port = free_port()
    model, programs = readable(models / "qwen2", tmp_path / "model"), tmp_path / "bin"
    programs.mkdir()
    vllm = programs / "vllm"
    vllm.write_text(VLLM.format(python=sys.executable, port=port))
    vllm.chmod(0o755)
    variables = environment({"MODEL": str(model)})
    variables["PATH"] = f"{programs}:{Path(sys.executable).parent}:{variables['PATH']}"
    parts = blocks(PAGE, "run with vllm")
    printed = "".join(check(parts, tmp_path, variables, {"8000": str(port)}, patience=3 * PATIENCE))
    asked = [int(each) for each in re.findall(r"'prompt_tokens': (\d+)", printed)]
    cached = [int(each) for each in re.findall(r"'cached_tokens': (\d+)", printed)]
    answers = re.findall(r"^(b.*) \{'prompt_tokens'", printed, re.MULTILINE)
    whole = (asked[0] - 1) // 32 * 32
    assert len(asked) == 3
    assert len(answers) == 3
    assert len(set(answers)) == 1
    assert cached[-2:] == [whole, whole]
    assert sum(cached[:-2]) == 0
