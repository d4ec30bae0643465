"""Models that keep a state beside KV are answered as by the engine alone, wherever both came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtier.client.client import Client
from lmtier.format.keys import PREFIX_BYTES, STATE
from lmtier.format.layout import PAGE
from tests.server.process import until
from tests.vllm.conftest import (
    STATE_BLOCK,
    CacheServer,
    alone,
    cached,
    prompts_of,
    tiers_of,
    tokens,
    transfer,
)
from tests.vllm.engine import Engine, EngineDied, Output
from tests.vllm.test_engine import RECOVERY, is_idle

BLOCK = STATE_BLOCK
MODEL: dict[str, Any] = {"dtype": "bfloat16", "block_size": 32}
STEP = 900  # tokens: steps end at multiples of whole blocks
LENGTHS = (1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK + 1, 3100)
PROMPTS = [
    *prompts_of(*LENGTHS),
    # alike but for their first token, on which all that follows hangs
    *([first, *prompts_of(1300, seed=9)[0]] for first in (50, 51, 52)),
    # parting inside a chunk, and at the end of one
    *prompts_of(1000, 1000, seed=3, prefix=700),
    *prompts_of(1000, 1000, seed=4, prefix=2 * BLOCK),
]


def loadable(prompts: Sequence[list[int]]) -> int:
    """The tokens up to the last state before the last token."""
    return sum((len(each) - 1) // BLOCK * BLOCK for each in prompts)


class Running:
    """An engine, its server, and what the engine alone says."""

    def __init__(self, folder: Path, model: Path, *, chunk_tokens: int = BLOCK, **options: Any) -> None:
        self.folder = folder
        tiers = "cpu://?capacity=256MiB", f"disk://{folder}/kv?capacity=1GiB"
        self.server = CacheServer(folder, *tiers, chunk_tokens=chunk_tokens)
        self.engine = Engine(folder, model, transfer=self.server.transfer(), **options)
        self.engine.use_connector(False)
        self.wanted, self.own = [], []
        """Cold, and from the engine's own prefix cache."""
        for prompt in PROMPTS:
            self.engine.forget()
            cold, own = alone(self.engine, [prompt] * 2, logprobs=5)
            self.wanted.append(cold)
            self.own.append(own)
        assert cached(self.wanted) == 0
        self.engine.use_connector(True)

    def ask(self, prompts: Sequence[list[int]] = PROMPTS) -> list[Output]:
        """One after the other, by an engine that forgets its own prefixes before each."""
        found = []
        for prompt in prompts:
            self.engine.forget()
            found += self.engine.generate([prompt], logprobs=5)
        return found

    def hears(self) -> None:
        """Until the engine finds something in a server that has started anew."""
        until(lambda: self.ask(PROMPTS[-1:])[0].cached > 0, RECOVERY)

    def close(self) -> None:
        self.engine.stop()
        self.server.close()


@pytest.fixture(scope="module")
def running(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = {"max_num_batched_tokens": STEP, "num_gpu_blocks_override": 64, **MODEL}
    running = Running(tmp_path_factory.mktemp("states"), models / "qwen3-next", **options)
    running.ask()  # so that all is stored
    yield running
    running.close()


def same(found: Sequence[Output], wanted: Sequence[Output]) -> bool:
    """Token by token; and the first token was as likely, and its rivals, to the last bit."""
    return tokens(found) == tokens(wanted) and [each.first for each in found] == [
        each.first for each in wanted
    ]


def is_as_the_engine_rounds(engine: Engine, prompt: list[int], found: Output, wanted: Output) -> bool:
    """Whether both answers are the same up to a place where the engine alone holds them for nearly as likely.

    A processor with AMX rounds one token after the other in another way than many at once. Which of both an
    engine does depends on which requests it preempts, also without a cache.
    """
    if found.tokens == wanted.tokens:
        return True
    pairs = zip(found.tokens, wanted.tokens, strict=True)
    parted = next(place for place, (one, other) in enumerate(pairs) if one != other)
    engine.use_connector(False)
    engine.forget()
    (alone,) = engine.generate([[*prompt, *wanted.tokens[:parted]]], 1, logprobs=5)
    engine.use_connector(True)
    return str(found.tokens[parted]) in alone.first


def test_the_engine_alone_answers_the_same_twice(running):
    """So any difference is ours."""
    assert same(running.own, running.wanted)
    assert cached(running.own) > 0


def test_from_memory_answers_are_those_of_a_cold_engine(running):
    """It loads as much as the engine keeps."""
    found = running.ask()
    assert same(found, running.wanted)
    assert cached(found) == loadable(PROMPTS)


def test_from_disk_too(running):
    running.server.restart()
    running.hears()
    found = running.ask()
    assert same(found, running.wanted)
    assert cached(found) == loadable(PROMPTS)


def state_files(folder: Path) -> list[Path]:
    found = (folder / "kv").rglob("*.L*")
    return [each for each in found if bytes.fromhex(each.name[:64]).startswith(STATE, PREFIX_BYTES)]


def test_flipped_bytes_of_states_are_found_and_never_used(running):
    with Client(str(running.server.path)) as client:
        assert client.flush()
    states = state_files(running.folder)
    assert len(states) > len(PROMPTS)
    running.server.kill()
    before = [each.read_bytes() for each in states]
    at = PAGE + 5000
    spoilt = list(zip(states, before, strict=True))[::2]
    for each, data in spoilt:
        each.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
    running.server.start()
    running.hears()
    found = running.ask()
    assert same(found, running.wanted)
    assert 0 < cached(found) < loadable(PROMPTS)
    with Client(str(running.server.path)) as client:
        assert client.flush()
    assert any(each.read_bytes()[PAGE:] == data[PAGE:] for each, data in spoilt), "none was stored again"
    found = running.ask()
    assert same(found, running.wanted)
    assert cached(found) == loadable(PROMPTS)


def test_flipped_bits_in_memory_are_found_by_fingerprints(running):
    """Above all checksums, and in every state."""
    running.ask()
    before = running.engine.metrics()["lmtier:load_failures_total"]
    with Client(str(running.server.path)) as client:
        np.frombuffer(client.slab.view(0, client.slab.capacity), np.uint8)[5000 :: 1 << 16] ^= 0x40
    found = running.ask()
    assert same(found, running.wanted)
    assert running.engine.metrics()["lmtier:load_failures_total"] > before
    assert same(running.ask(), running.wanted)


def test_the_cache_continues_the_engines_own_prefix(running):
    longest = max(range(len(PROMPTS)), key=lambda number: len(PROMPTS[number]))
    prompt = PROMPTS[longest]
    running.engine.forget()
    running.engine.generate([prompt[: 3 * BLOCK + 1]])
    (found,) = running.engine.generate([prompt], logprobs=5)
    assert same([found], [running.wanted[longest]])
    assert found.cached == loadable([prompt])


def test_requests_that_preempt_others_are_answered_right(running):
    """All need another block for KV, and one for each state, in the same step, and there is none left."""
    prompts = prompts_of(*[2 * BLOCK - 5] * 12, seed=8)
    running.engine.use_connector(False)
    running.engine.forget()
    wanted = running.engine.generate(prompts, 16)
    running.engine.use_connector(True)
    before = running.engine.metrics()["vllm:num_preemptions_total"]
    for loads in (False, True, True):
        running.engine.forget()
        found = running.engine.generate(prompts, 16)
        assert cached(found) == loads * loadable(prompts)
        for each in zip(prompts, found, wanted, strict=True):
            assert is_as_the_engine_rounds(running.engine, *each)
    assert running.engine.metrics()["vllm:num_preemptions_total"] > before


def test_the_answer_of_a_turn_is_part_of_the_next_prompt(running):
    prompt = prompts_of(BLOCK + 10, seed=12)[0]
    running.engine.use_connector(False)
    running.engine.forget()
    (first,) = running.engine.generate([prompt], BLOCK)
    following = [*prompt, *first.tokens, 9, 9]
    (wanted,) = running.engine.generate([following], logprobs=5)
    running.engine.use_connector(True)
    running.engine.forget()
    assert tokens(running.engine.generate([prompt], BLOCK)) == [first.tokens]
    running.engine.forget()
    (found,) = running.engine.generate([following], logprobs=5)
    # A state that was computed token by token has other last bits than one that was computed of a prompt.
    assert is_as_the_engine_rounds(running.engine, following, found, wanted)
    assert found.cached == 2 * BLOCK


def test_aborted_requests_hold_nothing(running):
    prompts = prompts_of(*[1000] * 6, seed=15)
    running.engine.abort_within(prompts, 30, after=3)
    running.engine.forget()
    assert is_idle(running.server.path)


@pytest.mark.parametrize(
    ("options", "need"),
    [
        ({"enable_prefix_caching": False}, "for those lmtier needs .*--enable-prefix-caching"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "needs no speculative decoding",
        ),
        ({"prefix_match_unit": 32}, "needs no --prefix-match-unit"),
        ({"transfer": transfer(chunk_tokens=2 * BLOCK)}, f"is not one block of this engine.*choose {BLOCK}"),
    ],
)
def test_what_it_cannot_serve_is_declined_in_one_sentence(models, tmp_path, options, need):
    with pytest.raises(EngineDied, match=need):
        Engine(tmp_path, models / "qwen3-next", **{"transfer": transfer(), **MODEL, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk_tokens", "options"),
    [
        ("lfm2", 32, {"block_size": 32}),
        ("lfm2", 32, {"block_size": 32, "tensor_parallel_size": 2, "processes": True}),
        ("jamba", 64, {"block_size": 32}),
        (
            "mamba2",
            256,
            {
                "block_size": 256,
                "max_num_batched_tokens": 256,
                "enable_prefix_caching": True,
                "tensor_parallel_size": 2,
                "processes": True,
            },
        ),
        ("falcon-h1", 256, {"block_size": 256, "max_num_batched_tokens": 256}),
        ("granite-hybrid", BLOCK, {"block_size": BLOCK, "max_num_batched_tokens": BLOCK}),
        ("mamba2", 256, {"block_size": 256, "max_num_batched_tokens": 256, "enable_prefix_caching": True}),
    ],
)
def test_other_models_from_memory_disk_and_in_a_new_engine(models, tmp_path, name, chunk_tokens, options):
    """bench/vllm_hybrid.py asks more prompts, of Redis too."""
    server = tiers_of("server", tmp_path, chunk_tokens=chunk_tokens)
    prompts = prompts_of(300, 577, 1153, 2100, seed=21)
    try:
        with Engine(tmp_path, models / name, **options) as plain:
            wanted = alone(plain, prompts, logprobs=5)
        for is_new in (True, False):
            with Engine(tmp_path, models / name, transfer=server.transfer(), **options) as engine:
                first = alone(engine, prompts, logprobs=5)
                assert tokens(first) == tokens(wanted)
                assert (cached(first) == 0) == is_new
                engine.forget()
                again = alone(engine, prompts, logprobs=5)
                assert same(again, wanted)
                assert cached(again) == sum(
                    (len(each) - 1) // chunk_tokens * chunk_tokens for each in prompts
                )
            server.restart()
    finally:
        server.close()
