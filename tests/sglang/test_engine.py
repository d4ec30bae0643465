"""A real SGLang answers the same with KV that lmtier stored: after restarts, faults and other weights."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.sglang.engine import PAGE, Engine, Output
from tests.vllm.conftest import CacheServer, prompts_of

LAYOUTS = [
    ("page_first", "kernel"),
    ("layer_first", "direct"),
    pytest.param("layer_first", "kernel", marks=pytest.mark.thorough),
    pytest.param("page_first_direct", "direct", marks=pytest.mark.thorough),
]
_SAID: dict[str, list[list[int]]] = {}
BUFFER_ONLY = {"hicache_host_memory_mode": "buffer_only"}


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [each.tokens for each in outputs]


def stored(outputs: list[Output]) -> int:
    return sum(each.stored for each in outputs)


def whole_pages(prompts: list[list[int]]) -> int:
    """The tokens that an engine can load: SGLang computes at least the last one."""
    return sum((len(each) - 1) // PAGE * PAGE for each in prompts)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    tiers = "cpu://?capacity=256MiB", f"disk://{tmp_path}/kv?capacity=1GiB"
    server = CacheServer(tmp_path, *tiers, chunk_tokens=PAGE, patience=15)  # the disk may be busy
    yield server
    server.close()


def plain(folder: Path, model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What the model says in an engine that stores nothing, prompt by prompt."""
    if (asked := f"{model.name} {prompts}") not in _SAID:
        with Engine(folder, model) as engine:
            answers = _SAID[asked] = []
            for each in prompts:
                answers += tokens(engine.generate([each]))
                engine.forget()
    return _SAID[asked]


@pytest.mark.parametrize(("layout", "copies"), LAYOUTS)
def test_a_prompt_is_computed_once_whatever_restarts(
    tmp_path: Path, models: Path, server: CacheServer, layout: str, copies: str
) -> None:
    prompts, model = prompts_of(600, 333), models / "qwen2"
    options: dict[str, Any] = {"hicache_mem_layout": layout, "hicache_io_backend": copies}
    with Engine(tmp_path, model, str(server.path), **options) as engine:
        cold = engine.generate(prompts)
        assert not sum(each.cached for each in cold)
        engine.forget()
        warm = engine.generate(prompts)
    assert tokens(warm) == tokens(cold) == plain(tmp_path, model, prompts)
    assert stored(warm) == whole_pages(prompts)
    server.restart()
    with Engine(tmp_path, model, str(server.path), **options) as engine:
        later = engine.generate(prompts)
    assert tokens(later) == tokens(cold)
    assert stored(later) == whole_pages(prompts)


@pytest.mark.parametrize("options", [{}, BUFFER_ONLY])
def test_small_pools_that_evict_all_the_time(
    tmp_path: Path, models: Path, server: CacheServer, options: dict[str, Any]
) -> None:
    """The engine has room for three of the prompts, and half of each is the same as in others."""
    prompts = prompts_of(*range(300, 420, 10), prefix=160)
    expected = plain(tmp_path, models / "qwen2", prompts)
    options = {"max_total_tokens": 1280, "hicache_ratio": 1.2, **options}
    with Engine(tmp_path, models / "qwen2", str(server.path), **options) as engine:
        for _ in range(3):
            assert tokens(engine.generate(prompts)) == expected
        engine.forget()
        again = engine.generate(prompts)
        assert tokens(again) == expected
        assert stored(again)


def test_it_serves_without_its_server_and_finds_all_later(
    tmp_path: Path, models: Path, server: CacheServer
) -> None:
    first, second = prompts_of(400, 300)
    expected = plain(tmp_path, models / "qwen2", [first, second])
    with Engine(tmp_path, models / "qwen2", str(server.path)) as engine:
        engine.generate([first])
        engine.forget()
        server.kill()
        without = engine.generate([first]) + engine.generate([second])
        engine.forget()
        assert tokens(without) == expected
        assert not stored(without)
        server.start()
        again, until = without, time.monotonic() + 60
        while stored(again) < whole_pages([first, second]) and time.monotonic() < until:
            again = engine.generate([first]) + engine.generate([second])  # a thread tries again each second
            engine.forget()
            assert tokens(again) == expected
        assert stored(again) == whole_pages([first, second])


def test_spoilt_bytes_are_computed_again(tmp_path: Path, models: Path, server: CacheServer) -> None:
    prompts = prompts_of(400)
    expected = plain(tmp_path, models / "qwen2", prompts)
    with Engine(tmp_path, models / "qwen2", str(server.path)) as engine:
        engine.generate(prompts)
        engine.forget()
    server.restart()
    files = sorted((tmp_path / "kv").rglob("*.L*"))
    assert len(files) == len(prompts[0]) // PAGE
    for file in files[::3]:
        with file.open("r+b") as opened:
            opened.seek(-100, os.SEEK_END)
            opened.write(b"\xff" * 8)
    with Engine(tmp_path, models / "qwen2", str(server.path)) as engine:
        (spoilt,) = engine.generate(prompts)
        assert spoilt.tokens == expected[0]
        assert spoilt.stored < whole_pages(prompts)
        for _ in range(len(files)):  # a load ends at the first bad page, and finds at most that one
            engine.forget()
            healed = engine.generate(prompts)
            assert tokens(healed) == expected
        assert stored(healed) == whole_pages(prompts)


def test_pages_are_named_by_the_files_that_were_loaded(
    tmp_path: Path, models: Path, server: CacheServer
) -> None:
    prompts, place, trained = prompts_of(400), tmp_path / "model", models / "qwen2-trained"
    shutil.copytree(models / "qwen2", place)
    torch.save(load_file(trained / "model.safetensors"), place / "model.pt")
    with Engine(tmp_path, place, str(server.path)) as engine:
        assert tokens(engine.generate(prompts)) == plain(tmp_path, models / "qwen2", prompts)
        engine.forget()
    with Engine(tmp_path, place, str(server.path), load_format="pt") as engine:
        other = engine.generate(prompts)
        assert tokens(other) == plain(tmp_path, trained, prompts)
        assert not stored(other)
    with Engine(tmp_path, place, str(server.path), load_format="safetensors") as engine:
        assert stored(engine.generate(prompts)) == whole_pages(prompts)


@pytest.mark.parametrize("flush", [True, False])
def test_updated_weights_never_meet_kv_of_the_old_ones(
    tmp_path: Path, models: Path, server: CacheServer, flush: bool
) -> None:
    prompts, more = prompts_of(400), prompts_of(300, seed=2)
    old, new = models / "qwen2", models / "qwen2-trained"
    expected = plain(tmp_path, new, prompts + more)
    with Engine(tmp_path, old, str(server.path)) as engine:
        before = engine.generate(prompts)
        engine.forget()
        engine.update(new, flush=flush)
        if flush:
            assert tokens(engine.generate(prompts)) == expected[:1]
        assert tokens(engine.generate(more)) == expected[1:]  # the engine has no KV of it
        engine.forget()
        for _ in range(2):
            after = engine.generate(prompts + more)
            assert tokens(after) == expected
            engine.forget()
        assert stored(after) == whole_pages(prompts + more)  # of this run of the engine
    with Engine(tmp_path, old, str(server.path)) as engine:
        assert tokens(engine.generate(prompts)) == tokens(before)
        assert not stored(engine.generate(more))
    with Engine(tmp_path, new, str(server.path)) as engine:
        other = engine.generate(prompts + more)
        assert tokens(other) == expected
        assert not stored(other)


def test_salts_share_nothing(tmp_path: Path, models: Path, server: CacheServer) -> None:
    prompts = prompts_of(400)
    expected = plain(tmp_path, models / "qwen2", prompts)
    with Engine(tmp_path, models / "qwen2", str(server.path)) as engine:
        for salt, cached in (("ann", 0), ("bob", 0), (None, 0), ("ann", whole_pages(prompts))):
            answers = engine.generate(prompts, cache_salt=salt)
            assert tokens(answers) == expected
            assert stored(answers) == cached
            engine.forget()


def test_it_attaches_and_detaches_while_the_engine_runs(
    tmp_path: Path, models: Path, server: CacheServer
) -> None:
    prompts = prompts_of(400)
    expected = plain(tmp_path, models / "qwen2", prompts)
    none: dict[str, Any] = {"hicache_storage_backend": None, "hicache_storage_backend_extra_config": None}
    with Engine(tmp_path, models / "qwen2", str(server.path), **none) as engine:
        for _ in range(2):
            engine.attach(str(server.path))
            engine.generate(prompts)
            engine.forget()
            warm = engine.generate(prompts)
            assert tokens(warm) == expected
            assert stored(warm) == whole_pages(prompts)
            engine.forget()
            engine.detach()
            assert not stored(engine.generate(prompts))
            engine.forget()
    with Engine(tmp_path, models / "qwen2", str(server.path)) as engine:
        assert not stored(engine.generate(prompts))  # SGLang might have had other weights before


def test_two_engines_share_what_one_of_them_computed(
    tmp_path: Path, models: Path, server: CacheServer
) -> None:
    """One has its host pool in shared memory, as SGLang offers to backends."""
    prompts, shm = prompts_of(400, 300), {"allocator": "shm"}
    with (
        Engine(tmp_path, models / "qwen2", str(server.path)) as one,
        Engine(tmp_path, models / "qwen2", str(server.path), extra=shm) as other,
    ):
        one.generate(prompts)
        one.forget()
        warm = other.generate(prompts)
    assert tokens(warm) == plain(tmp_path, models / "qwen2", prompts)
    assert stored(warm) == whole_pages(prompts)


def test_adapters_are_known_by_their_content(tmp_path: Path, models: Path, server: CacheServer) -> None:
    prompts, first, second = prompts_of(400), models / "first-adapter", models / "second-adapter"

    def adapters(**places: Path) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "lora_backend": "torch_native",
            "lora_paths": {name: str(place) for name, place in places.items()},
            "max_lora_rank": 16,
            "lora_target_modules": ["q_proj", "v_proj"],
        }

    def cached(engine: Engine, name: str | None, expected: list[list[int]]) -> int:
        found = engine.generate(prompts, lora_path=name)
        assert tokens(found) == expected
        engine.forget()
        return stored(found)

    with Engine(tmp_path, models / "qwen2", **adapters(mine=first, yours=second)) as engine:
        says = {name: tokens(engine.generate(prompts, lora_path=name)) for name in ("mine", "yours", None)}
    assert len({str(each) for each in says.values()}) == 3
    with Engine(tmp_path, models / "qwen2", str(server.path), **adapters(mine=first, yours=second)) as engine:
        for rounds in (0, whole_pages(prompts)):
            for name, expected in says.items():
                assert cached(engine, name, expected) == rounds
    with Engine(tmp_path, models / "qwen2", str(server.path), **adapters(mine=second, yours=first)) as engine:
        for rounds in (0, whole_pages(prompts)):  # the names have changed places
            assert cached(engine, "mine", says["yours"]) == rounds
            assert cached(engine, "yours", says["mine"]) == rounds
        engine.load_lora("mine", first)
        for rounds in (0, whole_pages(prompts)):
            assert cached(engine, "mine", says["mine"]) == rounds
        assert cached(engine, "yours", says["mine"]) == whole_pages(prompts)


def test_two_ranks_store_and_load_each_its_part(tmp_path: Path, models: Path, server: CacheServer) -> None:
    prompts = prompts_of(600, 333)
    cores = "|".join(2 * [",".join(map(str, sorted(os.sched_getaffinity(0))))])
    two: dict[str, Any] = {"tp_size": 2, "env": {"SGLANG_CPU_OMP_THREADS_BIND": cores}}
    for cached in (0, whole_pages(prompts)):
        with Engine(tmp_path, models / "qwen2", str(server.path), **two) as engine:
            answers = engine.generate(prompts)
            assert stored(answers) == cached
            engine.forget()
            assert tokens(engine.generate(prompts)) == tokens(answers)
        assert tokens(answers) == plain(tmp_path, models / "qwen2", prompts)
    with Engine(tmp_path, models / "qwen2", str(server.path)) as one:
        assert not stored(one.generate(prompts))  # of all heads


@pytest.mark.thorough
def test_an_engine_started_by_users_has_the_same_names(
    tmp_path: Path, models: Path, server: CacheServer
) -> None:
    """Its processes are new interpreters: what lmtier looks for in SGLang's modules must be there in time."""
    prompts = prompts_of(400)
    with Engine(tmp_path, models / "qwen2", str(server.path)) as engine:
        cold = engine.generate(prompts)
        engine.forget()
    with Engine(tmp_path, models / "qwen2", str(server.path), fresh=True) as engine:
        warm = engine.generate(prompts)
    assert tokens(warm) == tokens(cold)
    assert stored(warm) == whole_pages(prompts)
