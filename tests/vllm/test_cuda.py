"""A real vLLM whose worker moves KV as on a GPU answers as one without the connector.

The engine is one for CPUs: its blocks are this machine's memory, and a simulated device, whose streams run
late, in any order and at any speed, does what a GPU's would do.
"""

from __future__ import annotations

import itertools
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import partial_hash_hits_enabled
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

import lmtier_integrations.vllm
from lmtier.client.client import Client
from lmtier.errors import ConfigError, LayoutError
from lmtier_integrations.vllm import LMTierConnector
from lmtier_integrations.vllm.settings import Settings
from tests.server.process import until
from tests.vllm.conftest import alone, cached, loadable, prompts_of, tokens, transfer
from tests.vllm.engine import Engine, EngineDied
from tests.vllm.noisy import LONG
from tests.vllm.test_engine import RECOVERY, idle

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 60, "max_model_len": 1024}
ANSWER = 48


def simulated(server):
    """With a few chunks' room in the GPU's memory."""
    how = transfer(server=str(server.path), tiers=["gpu://?capacity=6MiB"])
    del how["kv_connector_extra_config"]["chunk_tokens"], how["kv_connector_extra_config"]["worth"]
    how["kv_connector_module_path"] = "tests.vllm.simulated"
    how["kv_connector_extra_config"]["mode"] = "layerwise"
    return how


def spoil(server) -> None:
    """Every sixteenth number changes its sign. Larger faults outlive their request: engines multiply what
    stands in the free slots of a block by 0, and that of an infinity is none."""
    with Client(str(server.path)) as client:
        np.frombuffer(client.slab.view(0, client.slab.capacity), np.uint8)[103::64] ^= 0x80


def heals(engine: Engine, prompts: list[list[int]], wanted: list[list[int]]) -> int:
    """It answers as ever, and in the end finds nothing spoilt. What has a copy on the GPU is found late.

    Of prompts that share less than a chunk some would load part of one, which has no fingerprint.
    """
    failures = [0]
    while len(failures) < 2 or failures[-1] > failures[-2]:
        engine.forget()
        assert tokens(engine.generate(prompts, len(wanted[0]))) == wanted
        failures.append(int(engine.metrics()["lmtier:load_failures_total"]))
    return failures[-1]


def test_an_adapter_is_read_before_kv_is_loaded_for_it(models, tmp_path, server):
    """vLLM reads it when a request with it computes. Until then its name is only what its files say."""
    prompts = prompts_of(900)
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, **SMALL}
    lora = str(models / "first-adapter")
    answers = []
    for _ in range(2):
        with Engine(tmp_path, models / "qwen2", transfer=simulated(server), **options) as engine:
            outputs = alone(engine, prompts, lora=lora)
            answers.append(tokens(outputs))
            assert not cached(outputs)

            def loads(engine: Engine = engine) -> bool:
                engine.forget()
                outputs = alone(engine, prompts, lora=lora)
                answers.append(tokens(outputs))
                return cached(outputs) >= loadable(prompts)

            until(loads, RECOVERY)
            assert not engine.metrics()["lmtier:load_failures_total"]
    assert all(each == answers[0] for each in answers)


def test_an_adapter_read_anew_has_the_name_of_its_files(models, tmp_path, server):
    """A trainer overwrites them between its requests, which say load_inplace."""
    prompts, place = prompts_of(900), tmp_path / "adapter"
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, **SMALL}
    adapters = models / "first-adapter", models / "second-adapter"
    with Engine(tmp_path, models / "qwen2", **options) as plain:
        wanted = {each: tokens(alone(plain, prompts, lora=str(each))) for each in adapters}
    with Engine(tmp_path, models / "qwen2", transfer=simulated(server), **options) as engine:

        def loads(adapter: Path) -> bool:
            engine.forget()
            outputs = alone(engine, prompts, lora=str(place))
            assert tokens(outputs) == wanted[adapter]
            return cached(outputs) >= loadable(prompts)

        for adapter in (*adapters, *adapters):
            shutil.copytree(adapter, place, dirs_exist_ok=True)
            engine.forget()
            outputs = alone(engine, prompts, lora=str(place), in_place=True)
            assert (tokens(outputs), cached(outputs)) == (wanted[adapter], 0)
            until(partial(loads, adapter), RECOVERY)
        assert not engine.metrics()["lmtier:load_failures_total"]


@pytest.mark.parametrize("pins", ["a part", "all"])
def test_answers_are_those_of_an_engine_alone(models, tmp_path, server, pins):
    """Where the driver pins all memory, loads are part of steps."""
    prompts = prompts_of(*(400 + 17 * n for n in range(8)), prefix=200)
    others = prompts_of(*(350 + 31 * n for n in range(8)), seed=2)
    with Engine(tmp_path, models / "qwen2") as plain:
        wanted, wanted_others = (tokens(plain.generate(each, ANSWER)) for each in (prompts, others))
    fault = tmp_path / "fault"
    fault.write_text("")
    environment = {"LMTIER_TEST_FAULT": str(fault)}
    if pins == "a part":
        environment["LMTIER_TEST_PINS"] = str(100 << 20)
    with Engine(
        tmp_path, models / "qwen2", transfer=simulated(server), processes=True, env=environment, **SMALL
    ) as engine:
        # What the last request has stored becomes visible though no further request comes.
        with Client(str(server.path)) as client:
            pinned = 99 << 20 if pins == "a part" else client.slab.capacity
            client.changes()
            fault.write_text("slow")
            engine.generate(prompts[:1], 1)
            assert not client.changes()
            until(client.changes, RECOVERY)
        fault.write_text("")

        for asked, answers in ((prompts, wanted), (others, wanted_others)) * 2:
            assert tokens(engine.generate(asked, ANSWER)) == answers
            engine.forget()
        for _ in range(2):  # the second time from the GPU's own memory
            assert tokens(engine.generate(prompts[:2], ANSWER)) == wanted[:2]
            engine.forget()
        found = engine.metrics()
        assert found["vllm:num_preemptions_total"] > 0
        assert found["lmtier:loaded_tokens_total"] > found["lmtier:gpu_hit_tokens_total"] > 0
        assert not found["lmtier:load_failures_total"]
        assert not found["lmtier:save_failures_total"]
        assert found["lmtier:pinned_bytes"] == pinned
        assert (found["lmtier:slab_pin_failed"], found["lmtier:slab_pinned"]) == (
            (1, 0) if pins == "a part" else (0, 1)
        )
        assert bool(found["lmtier:loaded_in_step_tokens_total"]) == (pins == "all")

        assert tokens(engine.abort_within(prompts, ANSWER, after=5)) == wanted[1::2]
        engine.forget()
        assert tokens(engine.generate(others, ANSWER)) == wanted_others

        spoil(server)
        assert heals(engine, others, wanted_others)

        # What the driver refuses costs a load or a save, and no more.
        before = engine.metrics()
        engine.forget(external=True)  # so that everything is saved anew
        fault.write_text("refuses")
        for asked, answers in ((prompts, wanted), (others, wanted_others)) * 2:
            engine.forget()
            assert tokens(engine.generate(asked, ANSWER)) == answers
        fault.write_text("")
        refused = engine.metrics()
        for name in ("lmtier:load_failures_total", "lmtier:save_failures_total"):
            assert refused[name] > before[name]

        # Another server's slab is pinned in place of the old one.
        server.kill()
        server.start()

        def loads():
            engine.forget()
            outputs = engine.generate(prompts[:2], 8)
            assert [each.tokens for each in outputs] == [each[:8] for each in wanted[:2]]
            return cached(outputs) >= loadable(prompts[:2])

        until(loads, RECOVERY)
        assert engine.metrics()["lmtier:pinned_bytes"] == pinned

        # The same with something left out answers wrongly: all of this can be seen here.
        engine.forget(external=True)
        fault.write_text("reuse")
        engine.generate(prompts, ANSWER)
        engine.generate(others, ANSWER)
        fault.write_text("")
        assert tokens(engine.generate(prompts, ANSWER)) != wanted
    idle(server.path)


def test_hooks_that_are_not_called(models, tmp_path, server):
    """By one layer ever; in steps that are one CUDA graph; at the end of a step."""
    prompts = prompts_of(*(400 + 17 * n for n in range(4)), prefix=200)
    others = prompts_of(*(350 + 31 * n for n in range(4)), seed=2)
    with Engine(tmp_path, models / "qwen2") as plain:
        wanted, wanted_others = (tokens(plain.generate(each, 8)) for each in (prompts, others))
    (fault := tmp_path / "fault").write_text("one has none")
    how = simulated(server)
    del how["kv_connector_extra_config"]["tiers"]
    with Engine(
        tmp_path,
        models / "qwen2",
        transfer=how,
        processes=True,
        env={"LMTIER_TEST_FAULT": str(fault), "LMTIER_TEST_LOADS": "in steps"},
        **SMALL,
    ) as engine:

        def failures() -> float:
            """By loads of the one, while the blocks hold the other."""
            before = engine.metrics()
            for asked, answers in ((others, wanted_others), (prompts, wanted)):
                engine.forget()
                assert tokens(engine.generate(asked, 8)) == answers
            after = engine.metrics()
            assert after["lmtier:loaded_tokens_total"] > before["lmtier:loaded_tokens_total"]
            return after["lmtier:load_failures_total"] - before["lmtier:load_failures_total"]

        for asked, answers in ((others, wanted_others), (prompts, wanted)):
            assert tokens(engine.generate(asked, 8)) == answers
        for hooks in ("one has none", "one has none", "", "replay", "old replay"):
            fault.write_text(hooks)
            assert not failures(), hooks
        engine.forget(external=True)
        fault.write_text("no end")
        for asked, answers in ((others, wanted_others), (prompts, wanted)):
            assert tokens(engine.generate(asked, 8)) == answers
        fault.write_text("")
        assert not failures()
        fault.write_text("untold")
        assert failures()  # found out after the step: computed again
        assert not failures()  # and not relied upon any more
    idle(server.path)


def test_micro_batches_save_nothing_before_the_step_ends(models, tmp_path, server):
    prompts = prompts_of(*(400 + 17 * n for n in range(4)), prefix=200)
    (fault := tmp_path / "fault").write_text("halves")
    how = simulated(server)
    del how["kv_connector_extra_config"]["tiers"]
    with Engine(
        tmp_path,
        models / "qwen2",
        transfer=how,
        env={"LMTIER_TEST_FAULT": str(fault)},
        ubatch_size=2,
        all2all_backend="deepep_low_latency",  # vLLM wants one of these then
        **{**SMALL, "num_gpu_blocks_override": 200},
    ) as engine:
        engine.generate(prompts, 1)  # what ends with this step is saved in it
        engine.generate(prompts_of(40), 4)  # these steps end the saves
        engine.forget()
        outputs = engine.generate(prompts, 8)
        assert cached(outputs) > 0
        engine.forget(external=True)
        assert tokens(engine.generate(prompts, 8)) == tokens(outputs)
    idle(server.path)


def test_loads_that_requests_wait_for(models, tmp_path, server):
    """Two block tables, one of which loses blocks: a load is no part of a step there."""
    prompts = prompts_of(*(500 + 90 * n for n in range(4)), prefix=256)
    longer = [[*each, *prompts_of(200, seed=3)[0]] for each in prompts]
    with Engine(tmp_path, models / "gemma3") as plain:
        wanted, wanted_longer = (tokens(plain.generate(each, 20)) for each in (prompts, longer))
    with Engine(
        tmp_path,
        models / "gemma3",
        transfer=simulated(server),
        processes=True,
        **{**SMALL, "num_gpu_blocks_override": 400},
    ) as engine:
        for asked in (prompts, prompts, prompts[:1], prompts[:1]):
            assert tokens(engine.generate(asked, 20)) == wanted[: len(asked)]
            engine.forget()
        found = engine.metrics()
        assert found["lmtier:loaded_tokens_total"] > found["lmtier:gpu_hit_tokens_total"] > 0
        assert not found["lmtier:load_failures_total"]
        spoil(server)
        assert heals(engine, prompts, wanted)

        # The engine has the first blocks of these, some have left a window; a new server has none of them.
        server.kill()
        server.start()
        fresh = itertools.count(100)

        def is_served():
            engine.generate(prompts_of(600, seed=next(fresh)), 1)
            with Client(str(server.path)) as client:
                return client.stats()["cpu"]["chunks"] > 0

        until(is_served, RECOVERY)
        assert tokens(engine.generate(longer, 20)) == wanted_longer
    idle(server.path)


def test_requests_that_wait_behind_a_failed_load_begin_anew(models, tmp_path, server):
    """One loads the prefix within its step, and it is spoilt. Two have its blocks and wait for more."""
    tries = [prompts_of(300, 900, 930, prefix=256, seed=seed) for seed in range(1, 6)]
    with Engine(tmp_path, models / "qwen2") as plain:
        answers = [tokens(plain.generate(prompts, 12)) for prompts in tries]
    how = simulated(server)
    del how["kv_connector_extra_config"]["tiers"]  # copies on the GPU would not be spoilt
    with (
        Engine(
            tmp_path,
            models / "qwen2",
            transfer=how,
            processes=True,
            env={"LMTIER_TEST_LOADS": "short in steps"},
            **{**SMALL, "num_gpu_blocks_override": 200},
        ) as engine,
        Client(str(server.path)) as client,
    ):

        def is_pinned() -> bool:  # until then nothing is saved
            engine.generate(prompts_of(40), 2)
            return engine.metrics()["lmtier:slab_pinned"] == 1

        until(is_pinned, RECOVERY)
        slab = np.frombuffer(client.slab.view(0, client.slab.capacity), np.uint8)
        for (short, *long), wanted in zip(tries, answers, strict=True):
            before = slab.copy()
            client.changes()
            engine.generate([short], 1)
            until(client.changes, RECOVERY)
            prefix = np.flatnonzero(slab != before)
            engine.generate(long, 1)
            until(client.changes, RECOVERY)
            engine.forget()
            slab[prefix[prefix % 64 == 39]] ^= 0x80
            assert tokens(engine.generate([short, *long], 12)) == wanted
            found = engine.metrics()
            # Two that come when the load has failed find nothing, and wait for nothing: the next try.
            if found["lmtier:loaded_in_step_tokens_total"] < found["lmtier:loaded_tokens_total"]:
                break
        assert 0 < found["lmtier:loaded_in_step_tokens_total"] < found["lmtier:loaded_tokens_total"]
        assert found["lmtier:load_failures_total"] > 0
    idle(server.path)


@pytest.mark.parametrize("loads", ["beside steps", "on a CPU", "in steps"])
def test_the_second_runner_is_right_after_failed_loads(models, tmp_path, server, loads):
    """With asynchronous scheduling, as on a GPU. Left to vLLM, it would go on from a wrong position."""
    prompts = prompts_of(400, 430, prefix=100)
    with Engine(tmp_path, models / "qwen2") as plain:
        wanted = tokens(plain.generate(prompts, 12))
    (fault := tmp_path / "fault").write_text("")
    how = simulated(server)
    del how["kv_connector_extra_config"]["tiers"]  # copies on the GPU would not be spoilt
    if loads == "on a CPU":
        how = transfer(server=str(server.path), mode="layerwise")
    environment = {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "LMTIER_TEST_FAULT": str(fault),
        "LMTIER_TEST_LOADS": loads,
    }
    with Engine(
        tmp_path,
        models / "qwen2",
        transfer=how,
        env=environment,
        fresh=True,
        async_scheduling=True,
        **SMALL,
    ) as engine:
        assert "Using V2 Model Runner" in engine.log.read_text()
        assert tokens(engine.generate(prompts, 12)) == wanted
        engine.forget()
        assert tokens(engine.generate(prompts, 12)) == wanted
        spoil(server)
        engine.forget()
        answers = tokens(engine.generate(prompts, 12))
        found = engine.metrics()
        assert found["lmtier:loaded_tokens_total"] > 0
        assert found["lmtier:load_failures_total"] > 0
        assert answers == wanted
        assert bool(found["lmtier:loaded_in_step_tokens_total"]) == (loads != "beside steps")
    idle(server.path)


def test_tokens_whose_experts_are_returned_are_computed(models, tmp_path, server):
    """Which experts computed a token is known where it was computed, and nowhere else."""
    prompts = prompts_of(600, 300)
    with Engine(
        tmp_path,
        models / "llama4",
        transfer=transfer(server=str(server.path)),
        env={"VLLM_USE_V2_MODEL_RUNNER": "1"},
        fresh=True,
        enable_return_routed_experts=True,
        **{**SMALL, "num_gpu_blocks_override": 200},
    ) as engine:
        cold = alone(engine, prompts)
        engine.forget()
        warm = alone(engine, prompts)
        assert (tokens(warm), cached(warm)) == (tokens(cold), 0)
        assert engine.metrics()["lmtier:saved_tokens_total"] >= loadable(prompts)
        assert engine.log.read_text().count("returns experts of all tokens") == 1
    idle(server.path)


def test_another_connector_gets_no_block_being_copied(models, tmp_path, server):
    """It writes for a request that no step computes yet, and waits for none of our streams."""
    short, long = prompts_of(400, LONG + 300)
    (fault := tmp_path / "fault").write_text("")
    ours = simulated(server)
    del ours["kv_connector_extra_config"]["tiers"]
    noisy = {"kv_connector": "NoisyAhead", "kv_connector_module_path": "tests.vllm.noisy"}
    both = {"connectors": [ours, {**noisy, "kv_role": "kv_both"}]}
    how = {**ours, "kv_connector": "MultiConnector", "kv_connector_extra_config": both}
    del how["kv_connector_module_path"]
    environment = {"LMTIER_TEST_FAULT": str(fault)}
    few = {**SMALL, "num_gpu_blocks_override": 34}  # so that the second prompt gets blocks of the first one
    with Engine(tmp_path, models / "qwen2", transfer=how, env=environment, **few) as engine:
        engine.generate(prompts_of(100, seed=1))  # the connector's first step has passed
        fault.write_text("stalled")
        wanted = tokens(engine.generate([short], 1))
        engine.generate([long], 1)
        fault.write_text("")

        def loads() -> bool:
            engine.forget()
            outputs = engine.generate([short], 1)
            assert tokens(outputs) == wanted
            return cached(outputs) >= loadable([short])

        until(loads, RECOVERY)
    idle(server.path)


def test_copies_end_before_memory_is_unmapped_or_changed(models, tmp_path, server):
    """An engine in its user's process, which no step of its own ends copies for."""
    prompts = prompts_of(400, 600)
    fault = tmp_path / "fault"
    fault.write_text("stalled")
    environment = {"LMTIER_TEST_FAULT": str(fault)}
    with (
        Engine(tmp_path, models / "qwen2", transfer=simulated(server), env=environment, **SMALL) as engine,
        Client(str(server.path)) as client,
    ):
        changes = partial(engine.sleep, 1), partial(engine.rpc, "reload_weights")
        for prompt, change in zip(prompts, changes, strict=True):
            client.changes()
            wanted = tokens(engine.generate([prompt], 8))
            assert not client.changes()
            change()  # an assertion in `simulated` sees that nothing is under way
            until(client.changes, RECOVERY)
            fault.write_text("")
            engine.forget()
            outputs = engine.generate([prompt], 8)
            assert (tokens(outputs), cached(outputs)) == (wanted, loadable([prompt]))
            fault.write_text("stalled")
        fault.write_text("")


def test_a_tier_in_a_gpus_memory_is_the_engines_own():
    beside = Settings.of({"server": "/a/socket", "tiers": ["gpu://?capacity=2GiB&policy=lru"]}, 32, 0)
    above = Settings.of({"tiers": ["gpu://?capacity=1GiB", "cpu://?capacity=2GiB"]}, 32, 0)
    assert [each.config.gpu and each.config.gpu.capacity for each in (beside, above)] == [2 << 30, 1 << 30]
    for tiers in (["cpu://?capacity=1GiB"], ["gpu://?capacity=1GiB", "cpu://?capacity=2GiB"]):
        with pytest.raises(ConfigError, match="'tiers' is for a private server"):
            Settings.of({"server": "/a/socket", "tiers": tiers}, 32, 0)


def test_the_order_of_blocks_is_a_wish_that_can_be_left_out(monkeypatch):
    """Beside connectors that ask for another one MultiConnector would not start."""
    monkeypatch.setattr(lmtier_integrations.vllm, "is_on_gpu", lambda config: True)

    def asked(**extra: str) -> str | None:
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        config: Any = SimpleNamespace(diffusion_config=None, kv_transfer_config=transfer)
        return LMTierConnector.get_required_kvcache_layout(config)

    assert [asked(), asked(layout="BLHNC"), asked(layout="any")] == ["BLHNC", "BLHNC", None]
    with pytest.raises(ConfigError, match="layout='NHD'"):
        Settings.of({"layout": "NHD"}, 32, 0)


def test_what_writes_blocks_before_it_asks_is_declined(monkeypatch):
    """Model Runner V2 zeroes new blocks, and copies those of partial hits, before `handle_preemptions`."""
    monkeypatch.setattr(lmtier_integrations.vllm, "is_on_gpu", lambda config: True)
    attention: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64}

    def config_of(*dtypes: torch.dtype) -> KVCacheConfig:
        specs = [FullAttentionSpec(block_size=64, dtype=dtype, **attention) for dtype in dtypes]
        groups = [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(specs)]
        return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)

    how = KVTransferConfig(**transfer(tiers=["cpu://?capacity=64MiB"]))
    config: Any = SimpleNamespace(
        kv_transfer_config=how, cache_config=SimpleNamespace(block_size=64), model_config=None
    )
    mixed = config_of(torch.bfloat16, torch.float8_e4m3fn)
    with pytest.raises(LayoutError, match="keep KV in one precision"):
        LMTierConnector(config, KVConnectorRole.WORKER, mixed)

    # Copies there are of layers with state only, which are declined.
    assert not partial_hash_hits_enabled(config_of(torch.bfloat16).kv_cache_groups, hash_block_size=16)
    window = SlidingWindowSpec(block_size=32, dtype=torch.bfloat16, sliding_window=128, **attention)
    groups = [*config_of(torch.bfloat16).kv_cache_groups, KVCacheGroupSpec(["window"], window)]
    assert not partial_hash_hits_enabled(groups, hash_block_size=16)


def test_an_engine_on_a_cpu_declines_it(models, tmp_path):
    how = transfer(tiers=["gpu://?capacity=8MiB", "cpu://?capacity=64MiB"])
    with pytest.raises(EngineDied, match="this engine keeps its KV on a CPU"):
        Engine(tmp_path, models / "qwen2", transfer=how)


def test_two_ranks_run_in_step_mode_with_a_private_server(models, tmp_path):
    prompts = prompts_of(*(500 + 90 * n for n in range(4)), prefix=256)
    how = transfer(tiers=["gpu://?capacity=2MiB", "cpu://?capacity=64MiB"], pin="start")
    how["kv_connector_module_path"] = "tests.vllm.simulated"
    options: dict[str, Any] = {**SMALL, "num_gpu_blocks_override": 200}
    with Engine(
        tmp_path, models / "qwen2", transfer=how, tensor_parallel_size=2, processes=True, **options
    ) as engine:
        wanted = tokens(engine.generate(prompts, 20))
        shared = 0
        for asked in (prompts, prompts, prompts[:1], prompts[:1]):
            engine.forget()
            outputs = engine.generate(asked, 20)
            assert tokens(outputs) == wanted[: len(asked)]
            assert cached(outputs) == loadable(asked)
            shared += 256 * (len(asked) - 1)
        found = engine.metrics()
        assert found["lmtier:loaded_tokens_total"] > found["lmtier:gpu_hit_tokens_total"] > 0
        # What one request loads, those beside it wait for, and do not load again.
        asked_for = 2 * loadable(prompts) + 2 * loadable(prompts[:1])
        assert found["lmtier:loaded_tokens_total"] == asked_for - shared
        assert not found["lmtier:load_failures_total"]
        assert found["lmtier:pinned_bytes"] == 2 * (64 << 20), "by each rank"
        assert found["lmtier:slab_pinned"] == 2
        assert found["lmtier:pin_seconds_total"] > 0
