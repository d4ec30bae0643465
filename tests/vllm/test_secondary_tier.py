"""lmtier's tiers below vLLM's own CPU tier: same answers, after restarts, corruption, eviction and all.

First the class alone, on memory like vLLM's; then real engines.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmtier.errors import ConfigError
from lmtier.format.layout import stored_size
from tests.vllm.conftest import prompts_of
from tests.vllm.engine import Engine

BENCH = str(Path(__file__).parents[2] / "bench")
ROW, ROWS, PATIENCE = 4096, 64, 20.0
AT_REST = stored_size(ROW)


# ---- the class alone


def started(make: Callable[[], Any], model: Path, *, adapters: bool = False) -> Any:
    """Call this while vLLM's core makes its scheduler, as far as a tier asks of both. Returns the core."""
    from vllm.config import LoadConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    class Core(EngineCore):
        def __init__(self) -> None:
            self.vllm_config = config = SimpleNamespace(
                lora_config=object() if adapters else None,
                model_config=SimpleNamespace(model=str(model), revision=None),
                parallel_config=SimpleNamespace(distributed_executor_backend=None, rank=0, world_size=1),
                load_config=LoadConfig(),
                speculative_config=None,
            )
            runner = SimpleNamespace(get_model=lambda: None)
            worker = SimpleNamespace(vllm_config=config, model_runner=runner)
            self.model_executor = SimpleNamespace(collective_rpc=lambda call: [call(worker)])
            self.scheduler = Made()

        def collective_rpc(self, *_: Any) -> None: ...
        def add_lora(self, request: Any) -> None: ...
        def remove_lora(self, number: int) -> None: ...

    class Made(Scheduler):
        is_running = False

        def __init__(self) -> None:
            self.tier = make()

        def reset_prefix_cache(self, running: bool = False, reset_connector: bool = False) -> bool:
            if reset_connector:
                self.tier.drain_jobs()
            return not self.is_running

    return Core()


class Tier:
    """`LMTierSecondary` as vLLM's manager drives it, over memory that is filled with what its row says."""

    def __init__(self, url: str, model: Path, *, row: int = ROW, **given: Any) -> None:
        from vllm.v1.kv_offload.base import ReqContext

        from lmtier_integrations.vllm_tier import LMTierSecondary

        self.memory = np.frombuffer(mmap.mmap(-1, ROWS * row), np.int8).reshape(ROWS, row)
        facts, adapters = spec(model, **given.pop("facts", {})), given.pop("adapters", False)

        def make() -> LMTierSecondary:
            return LMTierSecondary(facts, self.memory.data, "t", tier=url, **given)

        self.core = started(make, model, adapters=adapters)
        self.tier = self.core.scheduler.tier
        self.request = ReqContext("a")
        self.jobs = 0

    def fill(self, seed: int = 0) -> None:
        self.memory[:] = np.random.default_rng(seed).integers(-128, 127, self.memory.shape, np.int8)

    def submit(self, keys: list[bytes], rows: list[int], *, is_load: bool) -> int:
        from vllm.v1.kv_offload.base import ScheduleEndContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self.jobs += 1
        self.tier.on_schedule_end(ScheduleEndContext((), ()))
        for number, key in enumerate(keys):
            self.request.set_offload_key_position(key, 32 * (number + 1))
        job = TransferJob(self.jobs, keys, np.array(rows, np.int32), is_load, self.request)
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return self.jobs

    def finish(self, job: int) -> Any:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for each in self.tier.get_finished_jobs():
                assert each.job_id == job
                return each
        raise AssertionError("the job does not end")

    def store(self, keys: list[bytes], first: int = 0) -> Any:
        return self.finish(self.submit(keys, list(range(first, first + len(keys))), is_load=False))

    def load(self, keys: list[bytes], first: int = 32) -> Any:
        return self.finish(self.submit(keys, list(range(first, first + len(keys))), is_load=True))

    def lookup(self, keys: list[bytes]) -> list[bool]:
        """Step after step, as long as it says to retry."""
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

        request = ReqContext("b")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            found = [self.tier.lookup(key, request) for key in keys]
            if LookupResult.RETRY not in found:
                return [each is LookupResult.HIT for each in found]
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            assert not list(self.tier.get_finished_jobs())
        raise AssertionError("it never answers")


def spec(model: Path, *, dtype: str = "bfloat16", tp_size: int = 1, blocks_per_chunk: int = 1) -> Any:
    """What a tier reads of vLLM's OffloadingSpec."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    one = dict.fromkeys(("world_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(32, ("layer.0",), 0),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="test",
        model=OffloadingModelConfig(str(model), dtype),
        cache=OffloadingCacheConfig(32, blocks_per_chunk),
        parallel=OffloadingParallelConfig(
            **one,
            rank=0,
            tp_size=tp_size,
            data_parallel_index=0,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )
    return SimpleNamespace(
        config=config, tokens_per_block=(32,), tokens_per_hash=32, blocks_per_chunk=blocks_per_chunk
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    return folder


@pytest.fixture
def opened(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tier]]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the model is newer than this process
    tiers: list[Tier] = []

    def start(url: str, **given: Any) -> Tier:
        tiers.append(Tier(url, model, **given))
        tiers[-1].fill()
        return tiers[-1]

    yield start
    for each in tiers:
        each.tier.shutdown()


def names(count: int, prompt: str = "a") -> list[bytes]:
    return [f"{prompt}{number:03}".encode().ljust(32, b".") + bytes(4) for number in range(count)]


def objects(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size == AT_REST)


def test_chunks_come_back_to_other_places_after_a_restart(opened, tmp_path):
    url = f"disk://{tmp_path}/kv?capacity=1MiB"
    one = opened(url)
    keys = names(10)
    assert one.lookup(keys) == [False] * 10
    assert one.store(keys).success
    wanted = one.memory[:10].copy()
    assert one.lookup([*keys, *names(1, "b")]) == [True] * 10 + [False]
    assert one.load(keys).success
    assert (one.memory[32:42] == wanted).all()
    one.tier.shutdown()
    two = opened(url)
    two.fill(1)
    assert two.lookup(keys) == [True] * 10
    assert two.load(keys).success
    assert (two.memory[32:42] == wanted).all()


def test_a_damaged_chunk_is_not_loaded_or_offered_again(opened, tmp_path):
    url = f"disk://{tmp_path}/kv?capacity=1MiB"
    one = opened(url)
    keys = names(5)
    one.store(keys)
    name = one.tier._key(keys[2]).hex()
    (path,) = (path for path in objects(tmp_path / "kv") if path.name.startswith(name))
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)
    done = one.load(keys)
    assert not done.success
    assert sorted(done.successful_keys) == sorted({*keys} - {keys[2]})
    assert (one.memory[32:34] == one.memory[:2]).all()
    assert one.lookup(keys) == [True, True, False, True, True]
    assert one.store(keys).success
    assert one.load(keys).success
    stats = one.tier.get_stats()
    assert list(stats.data["data"]["lmtier:tier_corrupt_chunks"].values()) == [1]


def test_capacity_is_kept_and_a_tail_leaves_before_its_head(opened, tmp_path):
    one = opened(f"disk://{tmp_path}/kv?capacity={8 * AT_REST}")
    keys = names(6)
    assert one.store(keys).success
    assert one.store(names(5, "b"), 10).success
    assert len(objects(tmp_path / "kv")) == 8
    there = one.lookup(keys)
    assert there == sorted(there, reverse=True)
    assert sum(there) == 3
    assert one.lookup(names(5, "b")) == [True] * 5


def test_what_is_there_or_on_its_way_is_not_written_again(opened, tmp_path):
    one = opened(f"disk://{tmp_path}/kv?capacity=1MiB")
    keys = names(4)
    jobs = [one.submit(keys, [0, 1, 2, 3], is_load=False) for _ in range(3)]
    done: set[int] = set()
    until = time.monotonic() + PATIENCE
    while len(done) < 3 and time.monotonic() < until:
        done |= {each.job_id for each in one.tier.get_finished_jobs() if each.success}
    assert done == {*jobs}
    written = {path: path.stat().st_mtime_ns for path in objects(tmp_path / "kv")}
    assert len(written) == 4
    assert one.store(keys).success
    assert {path: path.stat().st_mtime_ns for path in objects(tmp_path / "kv")} == written


def test_chunks_of_redis_are_asked_for_and_shared(opened, redis_server):
    url = f"unix://{redis_server}?namespace=tier"
    one, two = opened(url), opened(url)
    keys = names(5)
    assert one.store(keys).success
    assert two.lookup(names(6)) == [True] * 5 + [False]
    two.fill(1)
    assert two.load(keys).success
    assert (two.memory[32:37] == one.memory[:5]).all()
    gone = two.load(names(2, "b"))
    assert (gone.success, gone.successful_keys) == (False, None)


def test_an_unreachable_tier_misses_and_keeps_no_memory(opened, tmp_path):
    one = opened(f"unix://{tmp_path}/nobody?namespace=x", load_deadline=0.5)
    for number in range(4):
        keys = names(20, f"{number}")
        assert one.lookup(keys) == [False] * 20
        done = one.store(keys)
        assert (done.success, done.successful_keys) == (False, None)
        assert not one.load(keys).success
    assert not one.tier._jobs
    assert not one.tier._going.entries()


def test_a_full_disk_ends_jobs_and_is_tried_again(opened, tmp_path, monkeypatch):
    one = opened(f"disk://{tmp_path}/kv?capacity=1MiB")
    is_full = True
    write = os.pwritev

    def pwritev(*args: Any) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "no space")
        return write(*args)

    monkeypatch.setattr(os, "pwritev", pwritev)
    assert one.store(names(2, "first")).successful_keys is None
    for number in range(3):
        assert not one.store(names(20, f"{number}")).success
    assert not one.tier._going.entries()
    is_full = False
    until = time.monotonic() + PATIENCE
    while not one.store(names(3)).success:
        assert time.monotonic() < until
    assert one.load(names(3)).success


def test_draining_leaves_nothing_under_way(opened, tmp_path):
    one = opened(f"disk://{tmp_path}/kv?capacity=1MiB")
    stored = one.submit(names(20), list(range(20)), is_load=False)
    one.tier.drain_jobs()
    assert not one.tier._below.storing_entries
    assert [each.job_id for each in one.tier.get_finished_jobs()] == [stored]
    loaded = one.submit(names(20), list(range(32, 52)), is_load=True)
    one.tier.drain_jobs()
    (done,) = one.tier.get_finished_jobs()
    assert (done.job_id, done.success) == (loaded, True)
    assert (one.memory[32:52] == one.memory[:20]).all()


@pytest.mark.parametrize("facts", [{"dtype": "float16"}, {"tp_size": 2}, {"blocks_per_chunk": 2}])
def test_engines_whose_chunks_differ_do_not_meet(opened, redis_server, facts):
    url = f"unix://{redis_server}?namespace=differ"
    opened(url).store(names(3))
    assert opened(url).lookup(names(3)) == [True] * 3
    assert opened(url, facts=facts).lookup(names(3)) == [False] * 3


def test_chunks_of_another_size_do_not_meet(opened, redis_server):
    url = f"unix://{redis_server}?namespace=size"
    opened(url).store(names(3))
    assert opened(url, row=2 * ROW).lookup(names(3)) == [False] * 3


def test_an_unreadable_chunk_is_a_miss_for_one_request(opened, tmp_path, monkeypatch):
    """Else it would be loaded and fail again, step after step."""
    from vllm.v1.kv_offload.base import LookupResult

    one = opened(f"disk://{tmp_path}/kv?capacity=1MiB")
    keys = names(3)
    one.store(keys)

    def preadv(*_: Any) -> int:
        raise OSError(errno.EIO, "no luck")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        done = one.load(keys[:1])
    assert (done.success, done.successful_keys) == (False, None)
    assert one.tier.lookup(keys[0], one.request) is LookupResult.MISS
    assert one.tier.lookup(keys[1], one.request) is LookupResult.HIT
    assert one.lookup(keys) == [True] * 3
    assert one.load(keys).success


def test_other_weights_do_not_meet(opened, redis_server, model):
    url = f"unix://{redis_server}?namespace=weights"
    opened(url).store(names(3))
    (model / "model.safetensors").write_bytes(b"other")
    assert opened(url).lookup(names(3)) == [False] * 3
    assert opened(url, weights="mine").lookup(names(3)) == [False] * 3


def test_files_that_are_newer_than_the_engine_give_no_name(opened, redis_server, monkeypatch):
    """It has loaded its weights before it makes the tier. These may be others."""
    url = f"unix://{redis_server}?namespace=newer"
    opened(url).store(names(3))
    opened(url, weights="mine").store(names(3))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert opened(url).lookup(names(3)) == [False] * 3
    assert opened(url, weights="mine").lookup(names(3)) == [True] * 3


def replaced_in_place() -> Any:
    return SimpleNamespace(lora_name="a", load_inplace=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda core: core.collective_rpc("reload_weights"),
        lambda core: core.remove_lora(1),
        lambda core: core.add_lora(replaced_in_place()),
    ],
)
def test_changes_by_a_call_into_the_ranks_get_a_new_name(opened, redis_server, change):
    url = f"unix://{redis_server}?namespace=changed"
    one = opened(url)
    one.store(names(3))
    change(one.core)
    assert one.lookup(names(3)) == [False] * 3
    assert not one.load(names(3)).success
    assert not one.store(names(3, "b"), first=8).success  # vLLM's memory may have KV of before
    one.core.scheduler.is_running = True  # and the engine too
    assert not one.core.scheduler.reset_prefix_cache(reset_connector=True)
    one.core.scheduler.is_running = False
    assert one.core.scheduler.reset_prefix_cache()
    assert one.lookup(names(3)) == [False] * 3
    assert not one.store(names(3, "b"), first=8).success
    assert one.core.scheduler.reset_prefix_cache(reset_connector=True)
    assert one.lookup(names(3)) == [False] * 3
    assert one.store(names(3), first=16).success
    assert one.lookup(names(3)) == [True] * 3
    assert one.load(names(3)).success
    assert (one.memory[32:35] == one.memory[16:19]).all()
    one.core.collective_rpc("reload_weights")
    one.core.scheduler.reset_prefix_cache(reset_connector=True)
    one.core.collective_rpc("reload_weights")  # nothing was computed since
    assert one.lookup(names(3)) == [False] * 3
    assert one.store(names(3), first=16).success
    other = opened(url)
    assert other.lookup(names(3)) == [True] * 3
    assert other.load(names(3)).success
    assert (other.memory[32:35] == one.memory[0:3]).all()


def test_a_new_adapter_changes_no_name(opened, tmp_path):
    one = opened(f"disk://{tmp_path}/kv?capacity=1MiB")
    one.store(names(3))
    one.core.add_lora(SimpleNamespace(lora_name="a", load_inplace=False))
    assert one.lookup(names(3)) == [True] * 3


def test_kv_of_adapters_is_found_by_this_run_only(opened, redis_server, monkeypatch):
    url = f"unix://{redis_server}?namespace=adapters"
    opened(url, adapters=True).store(names(3))
    opened(url, adapters=True, weights="mine").store(names(3, "b"))
    assert opened(url, adapters=True).lookup(names(3)) == [True] * 3
    monkeypatch.setattr("lmtier.format.keys._PROCESS_SECRET", "of another process")
    assert opened(url, adapters=True).lookup(names(3)) == [False] * 3
    assert opened(url, adapters=True, weights="mine").lookup(names(3, "b")) == [True] * 3


@pytest.mark.parametrize("kind", ["Qwen2VLForConditionalGeneration", "OfAPlugin"])
def test_untrusted_media_ids_are_found_by_this_run_only(opened, redis_server, model, monkeypatch, kind):
    (model / "config.json").write_text(json.dumps({"architectures": [kind]}))
    url = f"unix://{redis_server}?namespace={kind}"
    opened(url).store(names(3))
    opened(url, trust_media_ids=True).store(names(3, "b"))
    with monkeypatch.context() as patch:
        patch.setattr("lmtier.format.keys._PROCESS_SECRET", "of another process")
        assert opened(url).lookup(names(3)) == [False] * 3
        assert opened(url, trust_media_ids=True).lookup(names(3, "b")) == [True] * 3
        (model / "preprocessor_config.json").write_text("{}")
        assert opened(url, trust_media_ids=True).lookup(names(3, "b")) == [False] * 3


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("disk:///tmp/kv", "needs a capacity"),
        ("disk:///tmp/kv?capacity=1MiB&write=evicted", "write="),
        ("lmtier://h", "must take all"),
    ],
)
def test_a_mistake_in_the_url_is_said_at_the_start(opened, url, sentence):
    with pytest.raises(ConfigError, match=sentence):
        opened(url)


# ---- real engines


def start(folder: Path, model: Path, *tiers: str, cpu: int = 64 << 20) -> Engine:
    named = {"type": "LMTierSecondary", "module_path": "lmtier_integrations.vllm_tier"}
    return Engine(
        folder,
        model,
        transfer={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "cpu_offload_spec",
                "cpu_bytes_to_use": cpu,
                "secondary_tiers": [{**named, "tier": each} for each in tiers],
            },
        },
        env={"PYTHONPATH": BENCH},
    )


def from_below(engine: Engine) -> tuple[float, float]:
    """Prompt tokens that came from the disk tier, and from one that is elsewhere."""
    found, name = engine.metrics(), "vllm:prompt_tokens_cached_by_source_total"
    return found.get(f"{name}{{disk}}", 0), found.get(f"{name}{{external_unspecified}}", 0)


def test_an_engine_is_right_after_a_restart_and_damage(models, tmp_path):
    disk = f"disk://{tmp_path}/kv?capacity=64MiB"
    sound, damaged = prompts_of(1000, 810)
    with start(tmp_path, models / "qwen2", disk) as engine:
        wanted = [each.tokens for each in engine.generate([sound, damaged])]

    files = {path for path in (tmp_path / "kv").rglob("*") if path.stat().st_size > 100_000}
    assert len(files) == 1000 // 32 + 810 // 32
    with start(tmp_path, models / "qwen2", disk) as engine:
        restarted = engine.generate([sound])[0]
        assert (restarted.cached, restarted.tokens) == (992, wanted[0])
        assert from_below(engine) == (992, 0)
        for path in files:  # those of `sound` are in memory by now
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        recomputed = engine.generate([damaged])[0]
        assert (recomputed.cached, recomputed.tokens) == (0, wanted[1])
        assert engine.metrics()["lmtier:tier_corrupt_chunks_total"] > 0


def test_weights_reloaded_in_place_have_a_name_of_this_run(models, tmp_path):
    disk = f"disk://{tmp_path}/kv?capacity=64MiB"
    trained = models / "qwen2-trained"
    prompt, later = prompts_of(1000, 810)
    with start(tmp_path, models / "qwen2", disk) as engine:
        (before,) = engine.generate([prompt])
        engine.rpc("reload_weights", weights_path=str(trained))
        engine.forget(external=True)
        first, second = engine.generate([prompt]), engine.generate([prompt])
        engine.forget(external=True)
        (third,) = engine.generate([prompt])
        engine.rpc("reload_weights", weights_path=str(models / "qwen2"))
        engine.forget()
        engine.generate([later])  # vLLM's own memory was not emptied, so nothing of this is stored
    with start(tmp_path, trained, disk) as engine:
        (wanted,) = engine.generate([prompt])
        assert (wanted.cached, engine.generate([later])[0].cached) == (0, 0)
    assert wanted.tokens != before.tokens
    assert [each.tokens for each in (*first, *second, third)] == [wanted.tokens] * 3
    assert (first[0].cached, third.cached) == (0, 992)
    stored = [path for path in (tmp_path / "kv").rglob("*") if path.stat().st_size > 100_000]
    assert len(stored) == 3 * (1000 // 32) + 810 // 32  # of the last engine, too


def test_a_small_disk_fills_and_redis_has_the_rest(models, tmp_path, redis_server):
    """With sliding windows: several groups of layers, each with chunks of its own."""
    capacity = 24 << 20
    disk = f"disk://{tmp_path}/kv?capacity={capacity}"
    redis = f"unix://{redis_server}?namespace=engines"
    prompts = prompts_of(*[700] * 8)
    with start(tmp_path, models / "gemma3", disk, redis, cpu=12 << 20) as engine:
        wanted = [engine.generate([each])[0].tokens for each in prompts]
        engine.forget()
        again = [engine.generate([each])[0] for each in reversed(prompts)]
        assert [each.tokens for each in reversed(again)] == wanted
        assert all(from_below(engine))
        used = sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*") if path.is_file())
        assert capacity / 2 < used <= capacity + 65536  # and some bookkeeping
        metrics = engine.metrics()
        assert metrics["lmtier:tier_used_bytes"] <= metrics["lmtier:tier_capacity_bytes"] == capacity
