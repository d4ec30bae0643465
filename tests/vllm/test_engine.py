"""A real vLLM with the connector answers as one without it, whatever tier the KV came from."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from lmtier.client.client import Client
from tests.server.process import until
from tests.vllm.conftest import (
    AVX512,
    CHUNK,
    alone,
    cached,
    loadable,
    private_servers,
    prompts_of,
    tokens,
    transfer,
)
from tests.vllm.engine import Engine, EngineDied

BLOCK = 32
EDGES = sorted(
    {
        edge + step
        for edge in (1, BLOCK, CHUNK - BLOCK, CHUNK, CHUNK + BLOCK, 2 * CHUNK, 3 * CHUNK, 5 * CHUNK)
        for step in (-1, 0, 1)
        if edge + step > 0
    }
)
PROMPTS = [
    *prompts_of(*EDGES),
    *prompts_of(*(CHUNK + each for each in EDGES), seed=2, prefix=CHUNK),
    *prompts_of(700, 900, 1100, 1300, 1500, 2000, seed=3, prefix=600),
]
DISK = "disk://{}?capacity=1GiB"
RECOVERY = 60.0  # seconds until a server is found again, or a router has heard


def loads_all(engine, prompts, wanted):
    """They are answered as ever; whether all that can be loaded was."""
    engine.forget()
    outputs = alone(engine, prompts)
    assert tokens(outputs) == wanted
    return cached(outputs) >= loadable(prompts)


def is_idle(path: Path) -> bool:
    """The server's books agree, and nothing is leased or half made: all of it can be forgotten."""
    with Client(str(path)) as client:
        client.check()
        client.clear()
        return client.stats()["cpu"]["chunks"] == 0


def idle(path: Path) -> None:
    assert is_idle(path)


@pytest.fixture(scope="session")
def expected(models, tmp_path_factory):
    """What an engine without a connector says to PROMPTS."""
    with Engine(tmp_path_factory.mktemp("plain"), models / "qwen2") as plain:
        return tokens(plain.generate(PROMPTS))


def test_there_are_prompts_around_all_edges():
    assert len(PROMPTS) >= 50


def test_cold_from_memory_from_disk_and_after_a_restart(models, tmp_path, expected):
    how = transfer(tiers=["cpu://?capacity=256MiB", DISK.format(tmp_path / "kv")], verify="always")
    with Engine(tmp_path, models / "qwen2", transfer=how, fresh=True) as engine:
        assert tokens(engine.generate(PROMPTS)) == expected
        engine.forget()
        warm = engine.generate(PROMPTS)
        assert tokens(warm) == expected
        assert cached(warm) >= loadable(PROMPTS)  # more where prompts share blocks
        found = engine.metrics()
        assert found["vllm:prompt_tokens_cached_by_source_total{host}"] > 0
        assert found["vllm:external_prefix_cache_hits_total"] == found["lmtier:loaded_tokens_total"]
        assert not found["lmtier:load_failures_total"]
    with Engine(tmp_path, models / "qwen2", transfer=how, fresh=True) as engine:
        again = engine.generate(PROMPTS)
        assert tokens(again) == expected
        assert cached(again) >= loadable(PROMPTS)
        assert engine.metrics()["vllm:prompt_tokens_cached_by_source_total{disk}"] > 0


def test_embeddings_for_tokens_are_not_cached(models, tmp_path):
    """vLLM shows zeros for their tokens; nor does a prompt of zeros find anything of theirs."""
    how = transfer(tiers=["cpu://?capacity=256MiB"])
    prompts, zeros = [(1, 700), (2, 700), (3, 700)], [[0] * 700]
    with Engine(tmp_path, models / "qwen2", transfer=how, enable_prompt_embeds=True) as engine:
        engine.use_connector(False)
        wanted, of_zeros = tokens(engine.embed(prompts)), tokens(engine.generate(zeros))
        assert len({tuple(each) for each in wanted}) == 3
        engine.forget()
        engine.use_connector(True)
        assert tokens(engine.embed(prompts)) == wanted
        assert engine.metrics()["lmtier:saved_tokens_total"] == 0
        assert tokens(engine.generate(zeros)) == of_zeros
        engine.forget()
        again = engine.embed(prompts[::-1])
        assert tokens(again) == wanted[::-1]
        assert cached(again) == 0
        assert engine.generate(zeros)[0].cached == 2 * CHUNK


def test_engines_of_all_modes_share_a_server(models, tmp_path, expected, server):
    """An engine prefills only what is new."""
    with (
        Engine(
            tmp_path, models / "qwen2", transfer=transfer(server=str(server.path), mode="layerwise")
        ) as layerwise,
        Engine(tmp_path, models / "qwen2", transfer=transfer(server=str(server.path), mode="step")) as whole,
    ):
        half = len(PROMPTS) // 2
        assert tokens(layerwise.generate(PROMPTS[:half])) == expected[:half]
        assert tokens(whole.generate(PROMPTS[half:])) == expected[half:]
        saved = (
            layerwise.metrics()["lmtier:saved_tokens_total"] + whole.metrics()["lmtier:saved_tokens_total"]
        )
        for engine in (layerwise, whole):
            engine.forget()
            outputs = engine.generate(PROMPTS)
            assert tokens(outputs) == expected
            assert cached(outputs) >= loadable(PROMPTS)
            assert not engine.metrics()["lmtier:load_failures_total"]
        again = (
            layerwise.metrics()["lmtier:saved_tokens_total"] + whole.metrics()["lmtier:saved_tokens_total"]
        )
        assert again == saved  # nothing twice
    idle(server.path)


@pytest.mark.parametrize("budget", [96, 300, 1000])
def test_a_prefill_in_steps_of_any_size_stores_the_same(models, tmp_path, expected, server, budget):
    how = transfer(server=str(server.path))
    with Engine(
        tmp_path, models / "qwen2", transfer=how, max_num_batched_tokens=budget, max_num_seqs=32
    ) as engine:
        assert tokens(engine.generate(PROMPTS)) == expected
        engine.forget()
        warm = engine.generate(PROMPTS)
        assert tokens(warm) == expected
        assert cached(warm) >= loadable(PROMPTS)
    idle(server.path)


def test_preempted_requests_come_back_right(models, tmp_path, server):
    prompts = prompts_of(*(400 + 17 * n for n in range(8)), prefix=200)
    with Engine(tmp_path, models / "qwen2") as plain:
        wanted = tokens(plain.generate(prompts, 200))
    how = transfer(server=str(server.path), mode="layerwise")
    with Engine(
        tmp_path, models / "qwen2", transfer=how, num_gpu_blocks_override=60, max_model_len=1024
    ) as engine:
        for _ in range(2):
            assert tokens(engine.generate(prompts, 200)) == wanted
            engine.forget()
        found = engine.metrics()
        assert found["vllm:num_preemptions_total"] > 0
        assert found["lmtier:loaded_tokens_total"] > 0
        assert not found["lmtier:load_failures_total"]
    idle(server.path)


def test_requests_that_are_aborted_leave_nothing_behind(models, tmp_path, server):
    prompts = prompts_of(CHUNK - 1, CHUNK - 2, seed=2)  # complete a chunk as they generate
    prompts += prompts_of(*(500 - 37 * n for n in range(8)), prefix=300)
    budget: dict[str, Any] = {
        "max_num_batched_tokens": 512
    }  # some prompts are computed in one step, some are not
    with Engine(tmp_path, models / "qwen2", **budget) as plain:
        wanted = tokens(plain.generate(prompts, 8))
    how = transfer(server=str(server.path))
    with Engine(tmp_path, models / "qwen2", transfer=how, **budget) as engine:
        for after in (0, 1, 2, 5):
            for _ in range(2):  # all is computed, and then much of it is loaded
                assert tokens(engine.abort_within(prompts, 8, after)) == wanted[1::2]
                engine.forget()
            until(lambda: is_idle(server.path), RECOVERY)
        assert engine.metrics()["lmtier:loaded_tokens_total"] > 0


def test_an_idle_engine_leaves_no_reservation_behind(models, tmp_path, server):
    """Its last request was aborted before the server had answered."""
    how = transfer(server=str(server.path))
    with Engine(tmp_path, models / "qwen2", transfer=how, processes=True) as engine:
        alone(engine, prompts_of(40))
        for seed in range(3):
            engine.abort_within(prompts_of(1700, seed=seed), 8, after=0)
            until(lambda: is_idle(server.path), RECOVERY)


def test_without_the_engines_own_prefix_cache(models, tmp_path, expected, server):
    how = transfer(server=str(server.path))
    with Engine(tmp_path, models / "qwen2", transfer=how, enable_prefix_caching=False) as engine:
        assert tokens(engine.generate(PROMPTS)) == expected
        warm = engine.generate(PROMPTS)
        assert tokens(warm) == expected
        assert cached(warm) == loadable(PROMPTS)
    idle(server.path)


def test_generated_tokens_are_kept_unless_told_not_to(models, tmp_path, server):
    (prompt,) = prompts_of(CHUNK - 6)
    for keep, found in ((False, 0), (True, 2 * CHUNK)):
        how = transfer(server=str(server.path), save_decode=keep)
        with Engine(tmp_path, models / "qwen2", transfer=how) as engine:
            for length in (CHUNK + 20, CHUNK + 8, CHUNK + 7):  # the last one's second chunk ends with it
                salt = f"{keep} {length}"  # asking again stores all of it
                answer = engine.generate([prompt], length, salt=salt)[0].tokens
                engine.forget()
                (again,) = engine.generate([prompt + answer], salt=salt)
                assert again.cached == found


def test_a_prompt_beyond_a_request_keeps_its_first_chunks(models, tmp_path, server):
    (prompt,) = prompts_of(5 * CHUNK)
    how = transfer(server=str(server.path))
    how["kv_connector_module_path"] = "tests.vllm.few_keys"
    with Engine(tmp_path, models / "qwen2", transfer=how, max_num_batched_tokens=2 * CHUNK) as engine:
        cold = engine.generate([prompt], CHUNK + 8)
        engine.forget()
        warm = engine.generate([prompt], CHUNK + 8)
        assert tokens(warm) == tokens(cold)
        assert cached(warm) == 3 * CHUNK
        assert engine.metrics()["lmtier:saved_tokens_total"] == 3 * CHUNK
    idle(server.path)


def test_salts_do_not_see_each_other(models, tmp_path, server):
    prompts = prompts_of(800, 1000)
    with Engine(tmp_path, models / "qwen2", transfer=transfer(server=str(server.path))) as engine:
        ours = engine.generate(prompts, salt="ours")
        for salt, found in (("theirs", 0), ("", 0), ("ours", loadable(prompts))):
            engine.forget()
            outputs = engine.generate(prompts, salt=salt)
            assert cached(outputs) == found
            assert tokens(outputs) == tokens(ours)


def test_lengths_that_change_kv_do_not_see_each_other(models, tmp_path, server):
    """LongRoPE rotates otherwise in an engine that was started with a larger --max-model-len."""
    prompts = prompts_of(900, 1300)
    how = transfer(server=str(server.path))
    with Engine(tmp_path, models / "phi3", max_model_len=4096) as plain:
        wanted = tokens(plain.generate(prompts))
    with Engine(tmp_path, models / "phi3", transfer=how, max_model_len=2048) as short:
        assert tokens(short.generate(prompts)) != wanted
    with Engine(tmp_path, models / "phi3", transfer=how, max_model_len=4096) as long:
        outputs = long.generate(prompts)
        assert tokens(outputs) == wanted
        assert cached(outputs) == 0


def test_adapters_do_not_see_each_other(models, tmp_path, server):
    prompts = prompts_of(800, 1000)
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    first, second = (
        str(shutil.copytree(models / name, tmp_path / name)) for name in ("first-adapter", "second-adapter")
    )
    with Engine(tmp_path, models / "qwen2", **options) as plain:
        wanted = {lora: tokens(alone(plain, prompts, lora=lora)) for lora in ("", first, second)}
    assert wanted[first] != wanted[""] != wanted[second] != wanted[first]
    how = transfer(server=str(server.path))
    with Engine(tmp_path, models / "qwen2", transfer=how, **options) as engine:
        for found in (0, loadable(prompts)):
            for lora, answers in wanted.items():
                engine.forget()
                outputs = alone(engine, prompts, lora=lora)
                assert tokens(outputs) == answers
                assert cached(outputs) == found
        longer = [prompts[0] + prompts[1]]  # stands in part on what the engine has itself
        alone(engine, longer, lora=first)
        engine.forget()
        assert cached(alone(engine, longer, lora=first)) == loadable(longer)
        # An adapter by the same name with other weights is another.
        shutil.rmtree(first)
        shutil.copytree(second, first)
    with Engine(tmp_path, models / "qwen2", transfer=how, **options) as engine:
        outputs = alone(engine, prompts, lora=first)
        assert tokens(outputs) == wanted[second]
        assert cached(outputs) == 0


def test_a_producer_fills_what_a_consumer_uses(models, tmp_path, expected, server):
    with (
        Engine(
            tmp_path, models / "qwen2", transfer=transfer("kv_producer", server=str(server.path))
        ) as fills,
        Engine(tmp_path, models / "qwen2", transfer=transfer("kv_consumer", server=str(server.path))) as uses,
    ):
        assert tokens(uses.generate(PROMPTS)) == expected
        assert not uses.metrics()["lmtier:saved_tokens_total"]
        uses.forget()
        assert tokens(fills.generate(PROMPTS)) == expected
        fills.forget()
        assert tokens(fills.generate(PROMPTS)) == expected
        assert not fills.metrics()["lmtier:loaded_tokens_total"]
        outputs = uses.generate(PROMPTS)
        assert tokens(outputs) == expected
        assert cached(outputs) >= loadable(PROMPTS)
    idle(server.path)


def test_a_reset_of_the_connector_forgets_for_good(models, tmp_path, server):
    prompts, later = prompts_of(800, 1000), prompts_of(900, 1100, seed=2)
    with Engine(tmp_path, models / "qwen2", transfer=transfer(server=str(server.path))) as engine:
        first = engine.generate(prompts)
        engine.forget(external=True)
        assert cached(engine.generate([*prompts, *later])) == 0
        engine.forget()
        again = engine.generate([*prompts, *later])
        assert cached(again) == loadable([*prompts, *later])
        assert tokens(again)[:2] == tokens(first)
    # The weights may have been others since the reset: a new engine must not find what was stored then,
    # and finds what was stored before.
    with Engine(tmp_path, models / "qwen2", transfer=transfer(server=str(server.path))) as engine:
        assert cached(engine.generate(later)) == 0
        assert cached(engine.generate(prompts)) == loadable(prompts)


def test_kv_from_before_a_reset_is_not_stored_after_it(models, tmp_path, server):
    """A request that runs on through a reset holds KV of before."""
    (prompt,) = prompts_of(900)
    with Engine(tmp_path, models / "qwen2", transfer=transfer(server=str(server.path))) as engine:
        through = engine.reset_within(prompt, tokens=60, after=10)
        assert len(through.tokens) == 60
        engine.forget()
        (after,) = engine.generate([prompt])
        assert after.cached == 0
        assert after.tokens == through.tokens[:8]
        engine.forget()
        assert cached(engine.generate([prompt])) == loadable([prompt])
    idle(server.path)


class Router:
    """Listens to an engine's KV events, and believes every word."""

    def __init__(self) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self.port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.stored: dict[str, dict[bytes, BlockStored]] = {"CPU": {}, "STORAGE": {}}

    def config(self) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{self.port}",
        }

    def meet(self, engine: Engine) -> None:
        """A publisher drops what it says before it knows of a subscriber."""

        def hears() -> bool:
            engine.generate(prompts_of(BLOCK + 1, seed=time.monotonic_ns()))
            return bool(self._socket.poll(200))

        until(hears, RECOVERY)
        self.hear()

    def hear(self) -> None:
        while self._socket.poll(0):
            _, _, payload = self._socket.recv_multipart()
            for event in self._decoder.decode(payload).events:
                if isinstance(event, BlockStored) and event.medium in self.stored:
                    size = event.block_size
                    assert len(event.token_ids) == size * len(event.block_hashes)
                    parent = event.parent_block_hash
                    for number, key in enumerate(event.block_hashes):
                        assert key not in self.stored[event.medium]
                        tokens = event.token_ids[number * size : (number + 1) * size]
                        self.stored[event.medium][key] = BlockStored(
                            [key], parent, tokens, size, None, None, None
                        )
                        parent = key
                elif isinstance(event, BlockRemoved) and event.medium in self.stored:
                    for key in event.block_hashes:
                        del self.stored[event.medium][key]

    def prefix(self, medium: str, prompt: list[int]) -> int:
        """How many leading tokens of a prompt the router knows to be there."""
        found, parent = 0, None
        while True:
            head = prompt[found : found + CHUNK]
            known = self.stored[medium].values()
            hit = next((e for e in known if e.parent_block_hash == parent and e.token_ids == head), None)
            if hit is None:
                return found
            found, parent = found + CHUNK, hit.block_hashes[0]


def test_routers_are_told_exactly_what_is_where(models, tmp_path):
    router, again = Router(), Router()
    prompts = prompts_of(900, 1100, 700, 1300, prefix=300)
    tiers = ["cpu://?capacity=64MiB", DISK.format(tmp_path / "kv")]
    how = transfer(tiers=tiers)
    with Engine(tmp_path, models / "qwen2", transfer=how, kv_events_config=router.config()) as engine:
        router.meet(engine)
        for medium in ("CPU", "STORAGE"):

            def knows_all(medium=medium):
                engine.generate(prompts)  # an engine that computes nothing tells nothing
                router.hear()
                return all(router.prefix(medium, each) == len(each) // CHUNK * CHUNK for each in prompts)

            until(knows_all, RECOVERY)
        engine.forget(external=True)

        def knows_nothing():
            engine.generate(prompts_of(20))
            router.hear()
            return not any(router.stored.values())

        until(knows_nothing, RECOVERY)
    with Engine(tmp_path, models / "qwen2", transfer=how) as engine:
        wanted = tokens(engine.generate(prompts))
    # What another engine has stored is told of when a prompt finds it.
    with Engine(tmp_path, models / "qwen2", transfer=how, kv_events_config=again.config()) as engine:
        again.meet(engine)
        assert tokens(engine.generate(prompts[:1])) == wanted[:1]

        def knows_both():
            engine.generate(prompts_of(20))
            again.hear()
            return again.prefix("CPU", prompts[0]) == again.prefix("STORAGE", prompts[0]) == 3 * CHUNK

        until(knows_both, RECOVERY)


# ---- faults


def test_the_server_dies_and_comes_back(models, tmp_path, server, expected):
    with Engine(
        tmp_path, models / "qwen2", transfer=transfer(server=str(server.path), policy="fail")
    ) as engine:
        assert tokens(engine.generate(PROMPTS)) == expected
        server.kill()
        engine.forget()
        outputs = engine.generate(PROMPTS)
        assert tokens(outputs) == expected
        server.start()
        until(lambda: loads_all(engine, PROMPTS, expected), RECOVERY)
        assert not engine.metrics()["lmtier:load_failures_total"]


def test_two_ranks_go_on_with_a_server_of_other_contents(models, tmp_path, server):
    """Offsets of the new server's slab must not be read in the old one's, by no rank."""
    first, second = prompts_of(1300, 900), prompts_of(1100, 700, seed=2)
    how: dict[str, Any] = {"transfer": transfer(server=str(server.path), mode="layerwise"), "processes": True}
    with Engine(tmp_path, models / "qwen2", **how) as one:
        wanted, others = tokens(alone(one, first)), tokens(alone(one, second))
        server.kill()
        server.start()
        with Engine(tmp_path, models / "qwen2", **how, tensor_parallel_size=2) as two:
            assert tokens(alone(two, first)) == wanted  # both slabs are full now, of what is not the same
            server.kill()
            server.start()
            until(lambda: loads_all(one, second, others), RECOVERY)
            until(lambda: loads_all(two, second, others), RECOVERY)
            assert tokens(alone(two, first)) == wanted
            assert not two.metrics()["lmtier:load_failures_total"]


def test_kv_behind_a_failed_load_of_a_rank_is_not_stored(models, tmp_path, server):
    """One KV head on two ranks: both hold all of it, and only the first stores it."""
    (head,) = prompts_of(512)
    (prompt,) = prompts_of(1112, seed=9)
    prompt[:512] = head
    flag = tmp_path / "fails"
    faulty = transfer(server=str(server.path))
    faulty["kv_connector_module_path"] = "tests.vllm.faulty"
    options: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "processes": True,
        "env": {"LMTIER_TEST_FAILS": str(flag), "LMTIER_TEST_RANK": "1"},
    }
    with Engine(tmp_path, models / "mqa", transfer=faulty, **options) as engine:
        alone(engine, [[*head, 5]])
        engine.forget()
        flag.touch()
        wanted = tokens(alone(engine, [prompt]))
        assert not flag.exists()
        assert engine.metrics()["lmtier:load_failures_total"] == 1
        engine.forget()
        assert tokens(alone(engine, [prompt])) == wanted
        engine.forget()
        again = alone(engine, [prompt])
        assert tokens(again) == wanted
        assert cached(again) == loadable([prompt])
    with Engine(tmp_path, models / "mqa") as plain:
        assert tokens(alone(plain, [prompt])) == wanted
    idle(server.path)


def test_blocks_whose_load_has_failed_are_used_by_nobody(models, tmp_path, server):
    """The request that should compute them again is aborted before it does."""
    (prompt,) = prompts_of(1112, seed=9)
    flag = tmp_path / "fails"
    faulty = transfer(server=str(server.path))
    faulty["kv_connector_module_path"] = "tests.vllm.faulty"
    env = {"LMTIER_TEST_FAILS": str(flag), "LMTIER_TEST_RANK": "0"}
    with Engine(tmp_path, models / "qwen2") as plain:
        wanted = tokens(alone(plain, [prompt]))
    with Engine(tmp_path, models / "qwen2", transfer=faulty, env=env, num_gpu_blocks_override=150) as engine:
        assert tokens(alone(engine, [prompt])) == wanted
        engine.forget()
        alone(engine, prompts_of(1100, 1000, seed=3))  # other bytes are in its blocks now
        flag.touch()
        engine.abort_within([prompt, prompt[:20]], 8, after=1)
        assert not flag.exists()
        assert engine.metrics()["lmtier:load_failures_total"] == 1
        assert tokens(alone(engine, [prompt])) == wanted
        engine.forget()
        assert tokens(alone(engine, [prompt])) == wanted, "what was never loaded was stored"
    idle(server.path)


@pytest.mark.parametrize("resumes", [False, True])
def test_requests_that_share_a_failed_load_compute_it_too(models, tmp_path, server, resumes):
    """A step has tokens for the others before the first of them has computed all of these again.

    Also requests that lmtier does not follow, because they may be resumed with other tokens.
    """
    (head,) = prompts_of(1040, seed=9)
    prompts = [[*head, *range(200 + 40 * n, 200 + 40 * n + 30)] for n in range(3)]
    flag = tmp_path / "fails"
    faulty = transfer(server=str(server.path))
    faulty["kv_connector_module_path"] = "tests.vllm.faulty"
    env = {"LMTIER_TEST_FAILS": str(flag), "LMTIER_TEST_RANK": "0"}
    env |= {"LMTIER_TEST_RESUMES": "1"} if resumes else {}
    options: dict[str, Any] = {"long_prefill_token_threshold": 128, "num_gpu_blocks_override": 150}
    with Engine(tmp_path, models / "qwen2") as plain:
        wanted = tokens(plain.generate(prompts))
    with Engine(tmp_path, models / "qwen2", transfer=faulty, env=env, **options) as engine:
        alone(engine, [[*head, 5]])
        engine.forget()
        alone(engine, prompts_of(1100, 1000, seed=3))
        flag.touch()
        assert tokens(engine.generate(prompts)) == wanted
        assert not flag.exists()
        engine.forget()
        assert tokens(engine.generate(prompts)) == wanted
    idle(server.path)


def test_requests_that_wait_as_the_server_dies_are_computed(models, tmp_path, server):
    """They were looked up before. None of them is promised what is gone."""
    prompts = prompts_of(1300, 900, 1000, 800)
    how = transfer(server=str(server.path), policy="fail")
    with Engine(tmp_path, models / "qwen2", transfer=how, max_num_seqs=1) as engine:
        wanted = tokens(alone(engine, prompts))
        engine.forget()
        assert tokens(alone(engine, prompts)) == wanted
        engine.forget()
        alone(engine, prompts_of(40, seed=5))
        engine.start(prompts[:3], 8, lora="")
        server.kill()
        assert tokens(engine.beside([(prompts[3], "")])) == wanted[3:]
        assert not engine.metrics()["lmtier:load_failures_total"]


def test_a_private_server_that_dies_is_started_again(models, tmp_path):
    prompts = prompts_of(1000, 1500)
    home = tmp_path / "run"
    home.mkdir(mode=0o700)
    with Engine(
        tmp_path,
        models / "qwen2",
        transfer=transfer(tiers=["cpu://?capacity=128MiB"]),
        env={"XDG_RUNTIME_DIR": str(home)},
    ) as engine:
        wanted = tokens(engine.generate(prompts))
        (first,) = private_servers(home)
        os.kill(first, signal.SIGKILL)
        until(lambda: loads_all(engine, prompts, wanted), RECOVERY)
        (second,) = private_servers(home)
        assert second != first
        engine.kill()
    until(lambda: not private_servers(home), RECOVERY)  # it ends with its engine, however that ended


def corrupt(client: Client) -> None:
    """Bits flip in seven places of what the slab holds."""
    whole = client.slab.view(0, client.slab.capacity)
    before = bytes(whole)
    spots = [at for at in range(0, len(before), 4096) if any(before[at : at + 4096])]
    assert len(spots) * 4096 >= client.stats()["cpu"]["used"]
    for at in spots[:: max(1, len(spots) // 7)]:
        whole[at + 100] ^= 0x40


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("mode", ["layerwise", "step"])
def test_corruption_in_memory_is_recomputed_and_not_stored(models, tmp_path, server, mode, drafts):
    """Bits flip in the slab, above all checksums: the fingerprints of the engine's blocks find it.

    An engine that drafts takes its tokens before it calls the last hook of a step.
    """
    prompts = prompts_of(700, 900, 1100, 1300, prefix=300)
    options: dict[str, Any] = {}
    if drafts:
        ngram = {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        }
        options["speculative_config"] = ngram
    how = transfer(server=str(server.path), mode=mode)
    with Engine(tmp_path, models / "qwen2", transfer=how, **options) as engine:
        wanted = tokens(engine.generate(prompts))
        with Client(str(server.path)) as client:
            corrupt(client)
        for _ in range(2):
            engine.forget()
            outputs = engine.generate(prompts)
            assert tokens(outputs) == wanted
        assert engine.metrics()["lmtier:load_failures_total"] > 0
        engine.forget()
        healed = engine.metrics()["lmtier:load_failures_total"]
        assert tokens(engine.generate(prompts)) == wanted
        assert engine.metrics()["lmtier:load_failures_total"] == healed
    idle(server.path)


def test_corruption_on_disk_is_recomputed(models, tmp_path, expected):
    how = transfer(tiers=["cpu://?capacity=256MiB", DISK.format(tmp_path / "kv")])
    with Engine(tmp_path, models / "qwen2", transfer=how) as engine:
        assert tokens(engine.generate(PROMPTS)) == expected
    files = sorted(path for path in (tmp_path / "kv").rglob("*.L*") if path.is_file())
    assert len(files) > 50
    for number, path in enumerate(files):
        if number % 5 == 0:
            with path.open("r+b") as file:
                file.seek(4096 + number % 1000)
                file.write(b"\xff\x00\xff")
    with Engine(tmp_path, models / "qwen2", transfer=how) as engine:
        outputs = engine.generate(PROMPTS)
        assert tokens(outputs) == expected
        assert cached(outputs) < loadable(PROMPTS)


# ---- kinds of engines


@pytest.mark.parametrize(
    "options",
    [
        {"processes": True},
        {"processes": True, "tensor_parallel_size": 2, "fresh": True},
        *([{"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}] if AVX512 else []),
        {"dtype": "float16", "block_size": 64},
        {"block_size": 128},
    ],
    ids=str,
)
def test_kinds_of_engines(models, tmp_path, server, options):
    prompts = prompts_of(2000, 700, 513, 257, 100, prefix=90)
    with Engine(tmp_path, models / "qwen2", **{**options, "fresh": False}) as plain:
        wanted = tokens(alone(plain, prompts))
    if options.get("fresh"):
        options = {
            **options,
            "env": {"TORCH_COMPILE_DISABLE": "1"},
        }  # else each rank compiles, as no copy does
    with Engine(
        tmp_path, models / "qwen2", transfer=transfer(server=str(server.path), mode="layerwise"), **options
    ) as engine:
        assert tokens(alone(engine, prompts)) == wanted
        engine.forget()
        warm = alone(engine, prompts)
        assert tokens(warm) == wanted
        assert cached(warm) >= loadable(prompts)
        assert not engine.metrics()["lmtier:load_failures_total"]
    idle(server.path)


def test_a_pipeline_and_one_process_share_what_they_save(models, tmp_path, server):
    prompts = prompts_of(2000, 700, 513, 257, 100, prefix=90)
    # Only where something is compiled, vLLM's CPU workers make room for what an earlier stage hands on.
    how: dict[str, Any] = {
        "processes": True,
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    }
    stages: dict[str, Any] = {"pipeline_parallel_size": 2}
    with Engine(tmp_path, models / "qwen2", **how, **stages) as plain:
        wanted = tokens(alone(plain, prompts))
    how["transfer"] = transfer(server=str(server.path), mode="layerwise")
    with (
        Engine(tmp_path, models / "qwen2", **how, **stages) as two,
        Engine(tmp_path, models / "qwen2", **how) as one,
    ):
        for saves, loads, salt in ((two, one, "saved by two"), (one, two, "saved by one")):
            cold = alone(saves, prompts, salt=salt)
            assert tokens(cold) == wanted
            assert cached(cold) < loadable(prompts)
            saves.forget()
            warm = saves.generate(prompts, salt=salt)
            assert tokens(warm) == wanted
            assert cached(warm) >= loadable(prompts)
            warm = alone(loads, prompts, salt=salt)
            assert tokens(warm) == wanted
            assert cached(warm) >= loadable(prompts)
        for engine in (two, one):
            assert not engine.metrics()["lmtier:load_failures_total"]
    idle(server.path)


def test_a_failed_load_in_a_pipeline_is_computed(models, tmp_path, server):
    """Its next step has begun when that is known."""
    (prefix,) = prompts_of(1024)
    prompts = [prefix + each for each in prompts_of(*[400] * 4, seed=3)]
    options: dict[str, Any] = {
        "processes": True,
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
        "pipeline_parallel_size": 2,
        "max_num_batched_tokens": 256,
    }
    with Engine(tmp_path, models / "qwen2", **options) as plain:
        wanted = tokens(alone(plain, prompts))
    how = transfer(server=str(server.path))
    with Engine(tmp_path, models / "qwen2", transfer=how, **options) as engine:
        for prompt, answer in zip(prompts, wanted, strict=True):
            engine.forget(external=True)
            alone(engine, [prefix])
            with Client(str(server.path)) as client:
                np.frombuffer(client.slab.view(0, client.slab.capacity), np.uint8)[103::64] ^= 0x80
            engine.forget()
            assert tokens(alone(engine, [prompt])) == [answer]
        assert engine.metrics()["lmtier:load_failures_total"] > 0
    idle(server.path)


@pytest.mark.parametrize(("name", "ranks"), [("gemma3", 1), ("gemma3", 2), ("llama4", 1)])
def test_windows_and_full_attention_in_one_model(models, tmp_path, server, name, ranks):
    """The engine keeps a block table for each group of layers, and drops blocks that left the window: a
    sliding one, or one that moves by its whole length (chunked local attention)."""
    prompts = prompts_of(2000, 1700, 1025, 1024, 700, 513, 257, 100, prefix=90)
    options: dict[str, Any] = {"tensor_parallel_size": ranks, "processes": ranks > 1}
    with Engine(tmp_path, models / name, **options) as plain:
        wanted = tokens(alone(plain, prompts))
    how = transfer(server=str(server.path), mode="layerwise")
    with Engine(tmp_path, models / name, transfer=how, **options) as engine:
        assert "Turning off hybrid kv cache manager" not in engine.log.read_text()
        assert tokens(alone(engine, prompts)) == wanted
        engine.forget()
        warm = alone(engine, prompts)
        assert tokens(warm) == wanted
        assert cached(warm) >= loadable(prompts)
        engine.forget()
        assert tokens(engine.generate(prompts[::-1], 40)) == tokens(engine.generate(prompts[::-1], 40))
        assert not engine.metrics()["lmtier:load_failures_total"]
    idle(server.path)


def test_a_prompt_that_a_step_computes_in_part_is_stored(models, tmp_path, server):
    """Room for all of it is asked for ahead. Another request takes a part of the step."""
    short, long = prompts_of(20, 4 * CHUNK)
    how = transfer(server=str(server.path))
    with Engine(tmp_path, models / "gemma3", transfer=how, max_num_batched_tokens=len(long)) as engine:
        alone(engine, prompts_of(40))  # the first request of an engine asks for nothing ahead
        cold = engine.generate([short, long])
        engine.forget()
        warm = engine.generate([short, long])
        assert tokens(warm) == tokens(cold)
        assert cached(warm) == loadable([long])
    idle(server.path)


def test_kv_after_the_engines_own_windowed_prefix_is_stored(models, tmp_path, server):
    """It looks nothing up, so it does not know that the prefix is stored. A part of it has left a window."""
    (prompt,) = prompts_of(1500)
    longer = prompt + prompts_of(700, seed=2)[0]
    fills = transfer("kv_producer", server=str(server.path))
    with Engine(tmp_path, models / "gemma3", transfer=fills) as engine:
        alone(engine, [prompt])
        (cold,) = alone(engine, [longer])
        assert cold.cached > 1024, "it shares what it has itself"
        assert engine.metrics()["lmtier:saved_tokens_total"] == len(longer) // CHUNK * CHUNK
    with Engine(tmp_path, models / "gemma3", transfer=transfer(server=str(server.path))) as engine:
        (warm,) = alone(engine, [longer])
        assert (warm.tokens, warm.cached) == (cold.tokens, loadable([longer]))
    idle(server.path)


def test_a_failed_load_behind_a_window_restarts_the_request(models, tmp_path, server):
    """Computing goes on from block k only if the window before it was loaded; here it was not."""
    prompts = prompts_of(2000, 1700)
    with Engine(tmp_path, models / "gemma3", transfer=transfer(server=str(server.path))) as engine:
        wanted = tokens(alone(engine, prompts))
        for _ in range(3):
            with Client(str(server.path)) as client:
                corrupt(client)
            engine.forget()
            assert tokens(alone(engine, prompts)) == wanted
        assert engine.metrics()["lmtier:load_failures_total"] > 0
        engine.forget()
        healed = alone(engine, prompts)
        assert tokens(healed) == wanted
        assert cached(healed) == loadable(prompts)
    idle(server.path)


def test_a_chunk_is_no_longer_than_the_smallest_window(models, tmp_path):
    with pytest.raises(EngineDied, match="longer than this model's sliding window of 512 tokens: choose 512"):
        Engine(tmp_path, models / "gemma3", transfer=transfer(chunk_tokens=1024))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_cannot_use_loaded_kv_only_saves(models, tmp_path, server, ranks):
    """vLLM's reference MLA for CPUs. Its latents are the same on all ranks, and are stored once."""
    prompts = prompts_of(2000, 700, 513, 257, 100)
    options: dict[str, Any] = {"block_size": 16, "tensor_parallel_size": ranks, "processes": ranks > 1}
    options["attention_backend"] = "CPU_MLA"  # also where there is AMX
    with Engine(
        tmp_path, models / "deepseek", transfer=transfer(server=str(server.path)), **options
    ) as engine:
        cold = alone(engine, prompts)
        assert "CPU_MLA computes every prompt from its first token" in engine.log.read_text()
        again = alone(engine, prompts)
        assert tokens(again) == tokens(cold)
        assert cached(again) == 0
        stored = sum(len(each) // CHUNK * CHUNK for each in prompts)
        assert engine.metrics()["lmtier:save_bytes_total"] == stored * 3 * 576 * 4
    idle(server.path)


@pytest.mark.parametrize(("kind", "saves"), [("MEAN", False), ("LAST", True)])
def test_pooling_over_all_tokens_gets_all_of_them_computed(models, tmp_path, server, kind, saves):
    """Where vLLM has no prefix caching for a pooling model, it also needs each prompt in one step."""
    prompts = prompts_of(700, 513)
    tokenizer = {"skip_tokenizer_init": False, "tokenizer": str(models / "blip2")}  # vLLM wants one here
    options: dict[str, Any] = {"runner": "pooling", "pooler_config": {"seq_pooling_type": kind}, **tokenizer}
    with Engine(tmp_path, models / "qwen2", transfer=transfer(server=str(server.path)), **options) as engine:
        cold = engine.pool(prompts)
        engine.forget()
        warm = engine.pool(prompts)
        assert all(a == pytest.approx(b, abs=1e-4) for (a, _), (b, _) in zip(warm, cold, strict=True))
        assert sum(each for _, each in warm) == (loadable(prompts) if saves else 0)
        assert bool(engine.metrics()["lmtier:saved_tokens_total"]) == saves
        assert engine.log.read_text().count("nothing is loaded or stored") == (not saves)
    idle(server.path)


def test_kv_of_two_ranks_serves_one_and_the_other_way(models, tmp_path, server):
    prompts = prompts_of(900, 1100, 1300)
    how = transfer(server=str(server.path), mode="layerwise")
    two: dict[str, Any] = {"tensor_parallel_size": 2, "processes": True}
    for options, found in ((two, 0), ({}, loadable(prompts))):
        with Engine(tmp_path, models / "qwen2", transfer=how, **options) as engine:
            outputs = engine.generate(prompts)
            assert cached(outputs) == found
            if not found:
                wanted = tokens(outputs)
            assert tokens(outputs) == wanted


# ---- starting


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"tier": []}, "unknown 'tier'; did you mean 'tiers'?"),
        ({"chunk_tokens": 100}, "chunk_tokens=100 is not whole blocks"),
        ({"server": "/nowhere/lmtier.sock"}, "no lmtier server at /nowhere/lmtier.sock"),
        ({"mode": "layered"}, "did you mean 'layerwise'?"),
        ({"tiers": ["cpu://?capacity=1MiB", "disk:///proc/kv?capacity=1GiB"]}, "/proc/kv"),
    ],
)
def test_what_is_wrong_is_said_at_start(models, tmp_path, extra, said):
    with pytest.raises(EngineDied) as error:
        Engine(tmp_path, models / "qwen2", transfer=transfer(**extra))
    assert said in str(error.value)


def test_a_policy_that_fails_requests_is_warned_of(models, tmp_path, server):
    with Engine(
        tmp_path, models / "qwen2", transfer=transfer(server=str(server.path), policy="fail")
    ) as engine:
        assert engine.log.read_text().count("kv_load_failure_policy") >= 1


def test_an_engine_that_hangs_is_killed_and_its_log_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.vllm.engine.PATIENCE", 1.0)
    engine = Engine(tmp_path, tmp_path / "no model", wait=False)
    engine.process.send_signal(signal.SIGSTOP)
    engine.log.write_text("its last words")
    with pytest.raises(EngineDied, match=r"no answer within 1\.0 seconds\nits last words"):
        engine.metrics()
