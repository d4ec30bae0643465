"""SGLang's HiCache finds its pages again, in memory, on disk, and after a restart; whatever fails is a miss.

With an installed or unpacked sglang on the path, the interface is its own, from the file that defines it, and
not the package's __init__, which needs a GPU's libraries. Without one it is what 0.5.23 says, below.
"""

from __future__ import annotations

import ast
import enum
import importlib
import json
import os
import re
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lmtier.client.client import Client
from lmtier.errors import ConfigError, TierError
from lmtier.format.layout import padded
from tests.server.process import PATIENCE, Served, until

PAGE, LAYERS, HEADS, DIM, PAGES = 16, 3, 2, 32, 40
PAGE_BYTES = 2 * LAYERS * PAGE * HEADS * DIM * 2
ROOM = padded(PAGE_BYTES)


# ---- the interface, as recorded from 0.5.23


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def exists(self, key): ...


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(enum.StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    DRAFT = "draft"


class PoolHitPolicy(enum.StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: Any
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: Any = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]
    restorable_prefix_pages: list[int] | None = None


RECORDED: tuple[Any, ...] = (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)


class WeightUpdater:
    """As far as its methods have names: the wheel's own needs a GPU's libraries."""

    def update_weights_from_disk(self, model_path, load_format): ...
    def load_weights_from_distributed(self, named_tensors): ...
    def update_weights_from_tensor(self, named_tensors, load_format=None): ...
    def update_weights_from_ipc(self, recv_req): ...
    def begin_weight_update(self): ...
    def end_weight_update(self, *, run_post_load): ...


class HiCacheController:
    def reset(self): ...


NEED_A_GPU = {
    "sglang.srt.model_executor.model_runner_components.weight_updater": WeightUpdater,
    "sglang.srt.managers.cache_controller": HiCacheController,
}


def package(name: str, *path: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = list(path)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    return module


@contextmanager
def imported() -> Iterator[Any]:
    """The interface, with `real` to say whose, and the module under test as `ours`."""
    found = PathFinder.find_spec("sglang")
    before = set(sys.modules)
    if found is not None and found.submodule_search_locations:
        sys.modules["sglang"] = package("sglang", *found.submodule_search_locations)
    else:
        for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
            sys.modules[name] = package(name)
        storage = ModuleType("sglang.srt.mem_cache.hicache_storage")
        for each in RECORDED:
            setattr(storage, each.__name__, each)
        context = ModuleType("sglang.srt.runtime_context")
        context.get_context = lambda: None  # type: ignore[attr-defined]
        sys.modules |= {module.__name__: module for module in (storage, context)}
    interface = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    ours = importlib.import_module("lmtier_integrations.sglang")
    yield SimpleNamespace(
        **{each.__name__: getattr(interface, each.__name__) for each in RECORDED},
        ours=ours,
        real=found is not None,
    )
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "sglang" or name == "lmtier_integrations.sglang":
            del sys.modules[name]


@pytest.fixture(scope="module")
def sglang() -> Iterator[Any]:
    with imported() as found:
        yield found


@dataclass
class Started:
    """What SGLang made of its arguments, as far as lmtier asks."""

    model_path: str = ""
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    revision: str | None = None
    json_model_override_args: str = "{}"
    context_length: int | None = None
    load_format: str = "auto"
    model_loader_extra_config: str = "{}"
    quantization_param_path: str | None = None
    moe_runner_backend: str = "auto"
    dllm_algorithm: str | None = None
    trust_mm_content_hashes: bool = False
    lora_paths: list[dict[str, str]] | None = None
    lora_target_modules: set[str] | None = None
    mamba_ssm_dtype: str | None = None
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    hicache_storage_backend: str | None = "dynamic"
    enable_tf32_matmul: bool | None = None
    int8_mamba_ckpt_size: int | None = None
    forward_hooks: list[dict[str, Any]] | None = None
    decrypted_config_file: str | None = None
    decrypted_draft_config_file: str | None = None
    modelopt_checkpoint_restore_path: str | None = None
    kt_weight_path: str | None = None
    kt_num_gpu_experts: int | None = None


class HostPool:
    """Pages in host memory as SGLang's MHATokenToKVPoolHost keeps them: K of all, then V of all."""

    def __init__(self, layout: str = "page_first", page_size: int = PAGE, dtype=torch.bfloat16) -> None:
        self.layout, self.page_size, self.dtype = layout, page_size, dtype
        tokens = PAGES * page_size
        shape = (2, LAYERS, tokens) if layout == "layer_first" else (2, tokens, LAYERS)
        self.kv_buffer = torch.zeros(*shape, HEADS, DIM, dtype=dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        start, row = self.kv_buffer.data_ptr(), HEADS * DIM * self.dtype.itemsize
        half = self.kv_buffer.nbytes // 2
        addresses = []
        for index in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                firsts = [start + (layer * PAGES * self.page_size + index) * row for layer in range(LAYERS)]
            else:
                firsts = [start + index * LAYERS * row]
            addresses += [each + plane for each in firsts for plane in (0, half)]
        each = self.page_size * row * (1 if self.layout == "layer_first" else LAYERS)
        return addresses, [each] * len(addresses)

    def page(self, number: int) -> torch.Tensor:
        tokens = slice(number * self.page_size, (number + 1) * self.page_size)
        return self.kv_buffer[:, :, tokens] if self.layout == "layer_first" else self.kv_buffer[:, tokens]

    def fill(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=random))

    def indices(self, *pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])


def hashes(count: int, prompt: str = "a") -> list[str]:
    return [f"{prompt}-{number}" for number in range(count)]


@dataclass
class Engine:
    """One rank's backend and pool."""

    backend: Any
    pool: HostPool
    saved: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, keys: list[str], first: int = 0, prefix: Any = None) -> list[bool]:
        for number, key in enumerate(keys):
            self.saved[key] = self.pool.page(first + number).clone()
        stored: list[bool] = self.backend.batch_set_v1(
            keys, self.pool.indices(*range(first, first + len(keys))), prefix
        )
        return stored

    def load(self, keys: list[str], first: int = 20) -> list[bool]:
        loaded: list[bool] = self.backend.batch_get_v1(
            keys, self.pool.indices(*range(first, first + len(keys)))
        )
        return loaded


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def start(*below: str, pages: int = 64, **config: object) -> Served:
        tiers = (f"cpu://?capacity={pages * ROOM}", *below)
        settings = {"chunk_tokens": PAGE, **config}
        servers.append(Served(tmp_path, *tiers, config=settings, unix=str(tmp_path / "lmtier.sock")))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.check()
            server.stop()


def engine_of(
    sglang: Any, folder: Path, started: Started, pool: HostPool, extra: Any = None, **rank: Any
) -> Engine:
    model, socket = str(folder / "model"), str(folder / "lmtier.sock")
    resolved = {"model_path": model, **{name: value for name, value in vars(started).items() if value != ""}}
    sglang.ours.get_context = lambda: SimpleNamespace(resolved_server_args_dict=lambda: resolved)
    plain = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    about = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
    options = {"backend_name": "lmtier", "interface_v1": 1, "server": socket}
    config = sglang.HiCacheStorageConfig(
        **{**plain, **about, "model_name": model, **rank}, extra_config={**options, **(extra or {})}
    )
    backend = sglang.ours.LMTierHiCache(config, {})
    pool.fill()
    backend.register_mem_pool_host(pool)
    return Engine(backend, pool)


@pytest.fixture
def engine(sglang: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    for name, cls in NEED_A_GPU.items():
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        setattr(module, cls.__name__, type(cls.__name__, (cls,), {}))
    monkeypatch.setattr(sglang.ours, "_in_place", sglang.ours._WeightsInPlace())  # as in a new process
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")

    def start(
        pool: HostPool | None = None, started: Started | None = None, extra: Any = None, **rank: Any
    ) -> Engine:
        engines.append(engine_of(sglang, tmp_path, started or Started(), pool or HostPool(), extra, **rank))
        return engines[-1]

    yield start
    for each in engines:
        each.backend.close()


def tensors(path: Path, *names: str, value: float = 1.0) -> None:
    save_file({name: torch.full((2,), value) for name in names or ("a",)}, path)


def exchange(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def test_pages_are_named_by_the_files_that_were_loaded(served, engine, tmp_path):
    """Another load format, an index that names other shards, two files that are exchanged."""
    served()
    folder, keys = tmp_path / "model", hashes(3)
    tensors(folder / "model.safetensors")
    tensors(folder / "stale.safetensors", value=2)
    torch.save({"a": torch.zeros(2)}, folder / "model.pt")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    engine().save(keys)
    assert engine(started=Started(load_format="safetensors")).backend.batch_exists(keys) == 3
    assert engine(started=Started(load_format="pt")).backend.batch_exists(keys) == 0
    exchange(folder / "model.safetensors", folder / "stale.safetensors")
    assert engine().backend.batch_exists(keys) == 0
    exchange(folder / "model.safetensors", folder / "stale.safetensors")
    assert engine().backend.batch_exists(keys) == 3
    index.write_text(json.dumps({"weight_map": {"a": "stale.safetensors"}}))
    assert engine().backend.batch_exists(keys) == 0


@pytest.mark.parametrize(("names", "found"), [(("a",), 0), (("b",), 3)])
def test_files_that_repeat_a_tensor_have_no_name(served, engine, tmp_path, monkeypatch, names, found):
    """Their order is that of the folder."""
    served()
    tensors(tmp_path / "model" / "model.safetensors", "a")
    tensors(tmp_path / "model" / "more.safetensors", *names)
    keys = hashes(3)
    engine().save(keys)
    monkeypatch.setattr(sys.modules["lmtier_integrations.sglang"], "_PROCESS", "another run")
    assert engine().backend.batch_exists(keys) == found


def run_rank(folder: str, number: int) -> None:
    """A tensor-parallel rank of an MLA model, in its own process. Rank 0 stores; each says what it finds."""
    started = Started(model_path="of/a/hub")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=2
    )
    with imported() as sglang:
        one = engine_of(
            sglang, Path(folder), started, HostPool(), tp_rank=number, tp_size=2, is_mla_model=True
        )
        one.save(hashes(3))
        print(one.backend.batch_exists(hashes(3)), flush=True)
        sys.stdin.readline()
        print(one.backend.batch_exists(hashes(3)), flush=True)
        one.backend.close()


def is_right(engine: Engine, source: Engine, keys: list[str], first: int = 20) -> bool:
    return all(engine.pool.page(first + number).equal(source.saved[key]) for number, key in enumerate(keys))


def chunks(server: Served) -> int:
    with Client(server.where["unix"]) as client:
        return client.stats()["cpu"]["chunks"]


def flush(server: Served) -> None:
    with Client(server.where["unix"]) as client:
        assert client.flush()


# ---- promises


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_pages_come_back_to_other_places_of_the_host_pool(served, engine, layout):
    served()
    one = engine(HostPool(layout))
    keys = hashes(10)
    assert one.backend.batch_exists(keys) == 0
    assert one.load(keys) == [False] * 10
    assert one.save(keys) == [True] * 10
    assert one.backend.batch_exists(keys) == 10
    assert one.backend.exists(keys[3])
    before = one.pool.page(30).clone()
    assert one.load(keys) == [True] * 10
    assert is_right(one, one, keys)
    assert one.pool.page(30).equal(before)


def test_what_is_there_ends_with_the_first_page_that_is_not(served, engine):
    served()
    one = engine()
    keys = hashes(10)
    one.save(keys[:4])
    one.save(keys[5:], first=5)
    before = one.pool.page(24).clone()
    assert one.backend.batch_exists(keys) == 4
    assert one.load(keys) == [True] * 4 + [False] * 6
    assert is_right(one, one, keys[:4])
    assert one.pool.page(24).equal(before)


def test_stored_pages_count_as_stored_and_are_written_once(served, engine):
    server = served()
    one, two = engine(), engine()
    keys = hashes(6)
    assert one.save(keys[:4]) == [True] * 4
    assert two.save(keys) == [True] * 6
    assert chunks(server) == 6


def test_another_engine_finds_pages_after_a_server_restart(served, engine, tmp_path):
    server = served(f"disk://{tmp_path}/kv?capacity=8MiB")
    one = engine()
    keys = hashes(10)
    one.save(keys)
    one.backend.close()
    assert server.stop() == 0
    server.start()
    two = engine()
    two.pool.fill(1)
    assert two.backend.batch_exists(keys) == 10
    assert two.load(keys) == [True] * 10
    assert is_right(two, one, keys)


def test_a_flipped_byte_on_disk_is_a_miss_from_there_on(served, engine, tmp_path):
    server = served(f"disk://{tmp_path}/kv?capacity=8MiB")
    one = engine()
    keys = hashes(4)
    one.save(keys)
    server.stop()
    (name,) = one.backend._pools["kv"].keys(keys[2:3])
    (path,) = (path for path in (tmp_path / "kv").rglob("*") if path.name.startswith(name.hex()))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    server.start()
    two = engine()
    assert two.load(keys) == [True, True, False, False]
    assert is_right(two, one, keys[:2])
    assert two.backend.batch_exists(keys) == 2  # and it is gone
    two.pool.fill()
    assert two.save(keys) == [True] * 4
    assert two.load(keys) == [True] * 4


def test_a_fresh_server_finds_pages_in_redis(served, engine, redis_server):
    tier = f"unix://{redis_server}?namespace=sglang"
    server = served(tier)
    one = engine()
    keys = hashes(5)
    one.save(keys)
    server.stop()
    server.start()
    two = engine()
    assert two.backend.batch_exists(hashes(6)) == 5
    assert two.load(keys) == [True] * 5
    assert is_right(two, one, keys)


def test_a_batch_larger_than_the_slab_comes_up_in_parts(served, engine, tmp_path):
    server = served(f"disk://{tmp_path}/kv?capacity=8MiB", pages=10)
    one = engine()
    keys = hashes(20)
    for at in range(0, 20, 4):
        assert one.save(keys[at : at + 4], first=at) == [True] * 4
        flush(server)
    assert one.load(keys) == [True] * 20
    assert is_right(one, one, keys)


def test_a_batch_beyond_the_slab_is_stored_at_disk_speed(served, engine, tmp_path):
    server = served(f"disk://{tmp_path}/kv?capacity=8MiB", pages=6)
    one = engine()
    keys = hashes(18)
    assert one.save(keys) == [True] * 18
    flush(server)
    assert one.load(keys) == [True] * 18
    assert is_right(one, one, keys)


def test_what_finds_no_room_is_not_said_to_be_stored(served, engine):
    """A batch that a slab without anything below cannot hold."""
    served(pages=6, load_deadline=0.2)
    one = engine()
    keys = hashes(18)
    stored = one.save(keys)
    assert stored == sorted(stored, reverse=True)
    assert sum(stored) == one.backend.batch_exists(keys) < 18


def test_a_batch_without_room_does_not_ask_all_the_time(served, engine, sglang, monkeypatch):
    server = served(pages=6, load_deadline=1)
    one = engine()
    one.save(hashes(6))
    pool, asked, reserve = one.backend._pools["kv"], [], Client.reserve

    def counted(client: Client, *args: Any, **options: Any) -> Any:
        asked.append(client)
        return reserve(client, *args, **options)

    monkeypatch.setattr(Client, "reserve", counted)
    with Client(server.where["unix"]) as other:
        match = other.match(pool.keys(hashes(6)), sglang.ours._form(other, pool))
        assert match.chunks == 6
        assert one.save(hashes(3, "b"), 6) == [False] * 3
    assert 1 < len(asked) < 200


def test_with_its_prefix_the_tail_leaves_before_the_head(served, engine, sglang):
    served(pages=8)
    one = engine()
    keys = hashes(6)
    one.save(keys[:3])
    one.save(keys[3:], 3, sglang.HiCacheStorageExtraInfo(prefix_keys=keys[:3]))
    one.save(hashes(5, "b"), 6)
    assert one.backend.batch_exists(keys) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"pool": HostPool("layer_first")},
        {"pool": HostPool(page_size=2 * PAGE)},
        {"pool": HostPool(dtype=torch.float16)},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"started": Started(kv_cache_dtype="fp8_e5m2")},
        {"started": Started(json_model_override_args='{"rope_theta": 1}')},
        {"started": Started(load_format="dummy")},
        {"started": Started(load_format="remote_instance")},
        {"started": Started(moe_runner_backend="marlin")},
        {"started": Started(dllm_algorithm="LowConfidence")},
        {"started": Started(trust_mm_content_hashes=True)},
        {"started": Started(model_loader_extra_config='{"qlora_adapter_name_or_path": "elsewhere"}')},
        {"started": Started(lora_paths=[{"lora_name": "a", "lora_path": "of/a/hub"}])},
        {"started": Started(mamba_ssm_dtype="float16")},
        {"started": Started(speculative_draft_model_path="draft")},
        {"started": Started(enable_tf32_matmul=True)},
        {"started": Started(forward_hooks=[{"name": "scale"}])},
        {"started": Started(decrypted_config_file="config.json")},
        {"started": Started(decrypted_draft_config_file="config.json")},
        {"started": Started(modelopt_checkpoint_restore_path="quantized")},
        {"started": Started(kt_weight_path="of/a/hub")},
        {"started": Started(kt_num_gpu_experts=4)},
        {"extra": {"model": "another"}},
        {"extra": {"weights": "another"}},
    ],
    ids=lambda other: "-".join(f"{name}" for name in other),
)
def test_pages_that_are_not_interchangeable_do_not_meet(served, engine, other):
    served()
    one, two = engine(), engine(**other)
    keys = hashes(3)
    one.save(keys)
    assert two.backend.batch_exists(keys) == 0
    assert two.load(keys) == [False] * 3


def test_unset_arguments_and_sizes_change_no_name(served, engine):
    """A later version has more of them."""
    served()
    engine().save(hashes(3))
    other = engine(started=Started(enable_tf32_matmul=False, int8_mamba_ckpt_size=8))
    assert other.backend.batch_exists(hashes(3)) == 3


@pytest.mark.parametrize(
    "name", ["SGLANG_FP8_IGNORED_LAYERS", "SGLANG_MAMBA_CONV_DTYPE", "SGLANG_PP_LAYER_PARTITION"]
)
def test_variables_that_change_kv_or_layers_change_names(served, engine, monkeypatch, name):
    served()
    engine().save(hashes(3))
    monkeypatch.setenv(name, "2,1")
    assert engine().backend.batch_exists(hashes(3)) == 0
    monkeypatch.delenv(name)
    assert engine().backend.batch_exists(hashes(3)) == 3


def test_unreadable_experts_are_private_unless_named(served, engine, caplog):
    served()
    started = Started(kt_weight_path="of/a/hub")
    engine(started=started, extra={"weights": "one"})
    assert "only this run" not in caplog.text
    engine(started=started)
    assert "kt_weight_path has no weights that lmtier can read" in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "processor_config.json", "own.py"])
def test_another_model_at_the_same_place_is_another_model(served, engine, tmp_path, name):
    served()
    engine().save(hashes(3))
    (tmp_path / "model" / name).write_bytes(b"another one")
    assert engine().backend.batch_exists(hashes(3)) == 0


FILES = (
    "adapter/adapter_model.safetensors",
    "adapter/adapter_config.json",
    "scales",
    "experts/experts.safetensors",
    "draft/draft.safetensors",
    "draft/config.json",
)


@pytest.mark.parametrize("name", FILES)
def test_content_names_what_sglang_names_by_place(served, engine, tmp_path, name):
    for each in FILES:
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text("one")
    started = Started(
        lora_paths=[{"lora_name": "a", "lora_path": str(tmp_path / "adapter")}],
        quantization_param_path=str(tmp_path / "scales"),
        kt_weight_path=str(tmp_path / "experts"),
        speculative_draft_model_path=str(tmp_path / "draft"),
    )
    served()
    engine(started=started).save(hashes(3))
    assert engine(started=started).backend.batch_exists(hashes(3)) == 3
    (tmp_path / name).write_text("another")
    assert engine(started=started).backend.batch_exists(hashes(3)) == 0


def test_ranks_store_their_own_pages_and_mla_is_stored_once(served, engine):
    server = served()
    keys = hashes(3)
    left, right = (engine(tp_rank=rank, tp_size=2) for rank in (0, 1))
    right.pool.fill(1)
    left.save(keys)
    assert right.backend.batch_exists(keys) == 0
    right.save(keys)
    for rank in (left, right):
        assert rank.load(keys) == [True] * 3
        assert is_right(rank, rank, keys)
    assert chunks(server) == 6

    left, right = (engine(tp_rank=rank, tp_size=2, is_mla_model=True) for rank in (0, 1))
    assert right.save(keys) == [True] * 3  # it stores nothing: rank 0 does
    assert right.backend.batch_exists(keys) == 0
    left.save(keys)
    assert right.load(keys) == [True] * 3
    assert is_right(right, left, keys)
    assert chunks(server) == 9


def test_ranks_of_one_launch_share_without_a_weights_name(served, tmp_path):
    served()
    script = (
        "import sys; from tests.engines import test_sglang as it; it.run_rank(sys.argv[1], int(sys.argv[2]))"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for number in (0, 1)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.readline()  # both have started, and rank 0 has stored
    assert [rank.communicate("\n", PATIENCE)[0].strip() for rank in ranks] == ["3", "3"]


def test_a_renamed_model_is_found_after_a_restart(served, engine, tmp_path):
    served()
    engine(model_name="as-served").save(hashes(3))
    assert engine(model_name="as-served").backend.batch_exists(hashes(3)) == 3
    (tmp_path / "model" / "model.safetensors").write_bytes(b"another one")
    assert engine(model_name="as-served").backend.batch_exists(hashes(3)) == 0


def test_the_order_of_a_set_is_no_part_of_a_name(sglang):
    assert sglang.ours._text({"v_proj", "q_proj", "k_proj"}) == "['k_proj', 'q_proj', 'v_proj']"


def test_a_server_that_dies_is_a_miss_and_is_found_again(served, engine):
    server = served()
    one = engine()
    keys = hashes(3)
    one.save(keys)
    server.kill()
    assert one.backend.batch_exists(keys) == 0
    assert one.load(keys) == [False] * 3
    assert one.save(keys) == [False] * 3
    server.start()
    until(lambda: all(one.save(keys)))
    assert one.load(keys) == [True] * 3
    assert is_right(one, one, keys)


def test_threads_that_have_ended_keep_no_connection(served, engine):
    """SGLang starts new threads after each flush of its cache."""
    served(pages=30)
    one = engine()
    keys = hashes(3)
    assert one.save(keys) == [True] * 3
    for _ in range(5):
        workers = [threading.Thread(target=one.backend.batch_exists, args=(keys,)) for _ in range(3)]
        for each in workers:
            each.start()
        for each in workers:
            each.join(60)
    assert len(one.backend._clients) <= 4


def test_sglangs_threads_work_at_the_same_time(served, engine):
    """Each has a client of its own: none waits for another, and every page is whole."""
    served(pages=300)
    one = engine()
    failures: list[object] = []
    rounds, threads = 20, 4
    begin = threading.Barrier(threads)

    def work(number: int) -> None:
        begin.wait(30)
        for turn in range(rounds):
            keys = hashes(3, f"{number}-{turn}")
            first = number * 10
            if one.save(keys, first) != [True] * 3 or one.backend.batch_exists(keys) != 3:
                failures.append(keys)
            if one.load(keys, first + 5) != [True] * 3 or not is_right(one, one, keys, first + 5):
                failures.append(keys)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(60)
    assert not failures
    assert len(one.backend._clients) == threads + 1


def test_a_thread_that_waits_for_a_tier_holds_up_no_other(served, engine, tmp_path, sglang):
    served()
    one = engine()
    keys = hashes(3)
    one.save(keys)
    entered, leave = threading.Event(), threading.Event()
    wait = Client.wait

    def stuck(client, match):
        entered.set()
        assert leave.wait(30)
        return wait(client, match)

    loaded: list[list[bool]] = []
    loader = threading.Thread(target=lambda: loaded.append(one.load(keys)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang.ours.Client, "wait", stuck)
        loader.start()
        assert entered.wait(30)
        assert one.save(hashes(2, "b"), 6) == [True] * 2
        assert one.backend.batch_exists(keys) == 3
        leave.set()
        loader.join(30)
    assert loaded == [[True] * 3]


def test_a_changed_pool_is_a_miss_and_is_logged(served, engine, caplog):
    served()
    one = engine()
    keys = hashes(3)
    one.save(keys)
    one.backend._pools["kv"] = replace(one.backend._pools["kv"], sizes=(7, 7))
    assert one.load(keys) == [False] * 3
    assert one.save(hashes(3, "b")) == [False] * 3
    assert "counts as a miss" in caplog.text


def test_after_close_nothing_is_found_and_nothing_raises(served, engine):
    served()
    one = engine()
    one.save(hashes(3))
    one.backend.close()
    assert one.backend.batch_exists(hashes(3)) == 0
    assert one.load(hashes(3)) == [False] * 3
    one.backend.clear()


def test_clear_forgets_this_model_only(served, engine):
    served()
    one, two = engine(), engine(extra={"model": "another"})
    one.save(hashes(3))
    two.save(hashes(3))
    one.backend.clear()
    assert one.backend.batch_exists(hashes(3)) == 0
    assert two.backend.batch_exists(hashes(3)) == 3


def test_models_with_two_pools_restore_what_both_have(served, engine, sglang):
    """State of linear attention is kept for the ends of prompts, and is cut by the ranks also beside MLA."""
    served()
    ranks = [engine(tp_rank=rank, tp_size=2, is_mla_model=True) for rank in (0, 1)]
    states = [HostPool(page_size=1) for _ in ranks]
    keys = hashes(6)
    transfers = []
    for number, (rank, state) in enumerate(zip(ranks, states, strict=True)):
        state.fill(10 + number)
        rank.backend.register_mem_host_pool_v2(state, sglang.PoolName.MAMBA)
        rank.save(keys)
        policy = sglang.PoolHitPolicy.TRAILING_PAGES
        transfers.append(
            sglang.PoolTransfer(
                sglang.PoolName.MAMBA, host_indices=state.indices(4), keys=[keys[3]], hit_policy=policy
            )
        )
        assert rank.backend.batch_set_v2([transfers[-1]]) == {sglang.PoolName.MAMBA: [True]}
    for rank, state, transfer in zip(ranks, states, transfers, strict=True):
        found = rank.backend.batch_exists_v2(keys, [transfer])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
        assert found.extra_pool_hit_pages == {sglang.PoolName.KV: 6, sglang.PoolName.MAMBA: 4}
        wanted = state.page(4).clone()
        get = replace(transfer, host_indices=state.indices(7, 8), keys=[keys[2], keys[3]])
        assert rank.backend.batch_get_v2([get]) == {sglang.PoolName.MAMBA: [False, True]}
        assert state.page(8).equal(wanted)
    assert not states[0].page(8).equal(states[1].page(8))


def test_draft_heads_beside_mla_are_declined_on_many_ranks(served, engine, sglang, caplog):
    """SGLang stores the draft of rank 0 only. Other ranks must not load the heads of rank 0."""

    class MHATokenToKVPoolHost(HostPool):
        """The name by which SGLang's own is known."""

    served()
    alone, *ranks = (
        engine(tp_rank=rank, tp_size=size, is_mla_model=True) for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    draft, keys = MHATokenToKVPoolHost(), hashes(3)
    transfer = sglang.PoolTransfer(sglang.PoolName.DRAFT, keys=keys, host_indices=draft.indices(0, 1, 2))
    alone.backend.register_mem_host_pool_v2(draft, sglang.PoolName.DRAFT)
    assert not caplog.text
    assert alone.backend.batch_set_v2([transfer]) == {sglang.PoolName.DRAFT: [True] * 3}
    for rank in ranks:
        caplog.clear()
        rank.backend.register_mem_host_pool_v2(draft, sglang.PoolName.DRAFT)
        assert "each rank has other heads of the pool" in caplog.text
        assert rank.backend.batch_set_v2([transfer]) == {sglang.PoolName.DRAFT: [False] * 3}
        assert rank.backend.batch_get_v2([transfer]) == {sglang.PoolName.DRAFT: [False] * 3}


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"interface_v1": 0}, '"interface_v1": 1'),
        ({"server": ""}, "lmtier serve"),
        ({"sever": "x"}, "did you mean 'server'"),
    ],
)
def test_a_wrong_setting_is_one_sentence_at_the_start(engine, extra, sentence):
    with pytest.raises(ConfigError, match=sentence):
        engine(extra=extra)


def test_no_server_at_the_start_is_said(engine):
    with pytest.raises(TierError, match="no lmtier server at"):
        engine()


def test_an_unreadable_pool_is_logged_and_costs_hits_only(served, engine, sglang, caplog):
    class Odd(HostPool):
        def get_page_buffer_meta(self, indices):
            raise NotImplementedError("no zero copy here")

    served()
    one = engine()
    one.save(hashes(3))
    one.backend.register_mem_host_pool_v2(Odd(), sglang.PoolName.SWA)
    assert "no zero copy here" in caplog.text
    transfer = sglang.PoolTransfer(
        sglang.PoolName.SWA, keys=hashes(3), host_indices=one.pool.indices(0, 1, 2)
    )
    assert one.backend.batch_exists_v2(hashes(3), [transfer]).kv_hit_pages == 0
    assert one.backend.batch_get_v2([transfer]) == {sglang.PoolName.SWA: [False] * 3}
    assert one.backend.batch_set_v2([transfer]) == {sglang.PoolName.SWA: [False] * 3}


# ---- weights that are updated in place


def updater() -> Any:
    return sys.modules["sglang.srt.model_executor.model_runner_components.weight_updater"].WeightUpdater()


def flush_sglang() -> None:
    """As /flush_cache, and as each update that does not say otherwise."""
    sys.modules["sglang.srt.managers.cache_controller"].HiCacheController().reset()


UPDATES: list[Callable[[Any], object]] = [
    lambda weights: weights.update_weights_from_disk("elsewhere", "auto"),
    lambda weights: weights.load_weights_from_distributed([]),
    lambda weights: weights.update_weights_from_tensor([]),
    lambda weights: weights.update_weights_from_ipc(None),
    lambda weights: weights.begin_weight_update(),  # after it a trainer may write to memory itself
]


@pytest.mark.parametrize("update", UPDATES)
def test_weights_updated_in_place_are_named_by_the_run(served, engine, update):
    server = served()
    one, other = engine(), engine()
    keys = hashes(6)
    one.save(keys[:4])
    flush_sglang()
    assert one.backend.batch_exists(keys) == 4  # only flushed
    update(updater())
    assert one.save(keys[4:]) == [False] * 2  # SGLang may still hold pages of the old weights
    assert one.backend.batch_exists(keys) == 0
    assert one.load(keys[:4]) == [False] * 4
    flush_sglang()
    assert one.backend.batch_exists(keys) == 0
    one.pool.fill(seed=1)
    assert one.save(keys) == [True] * 6
    assert one.load(keys) == [True] * 6
    assert is_right(one, one, keys)
    update(updater())
    one.backend.clear()
    assert chunks(server) == 0
    flush_sglang()
    assert one.backend.batch_exists(keys) == 0
    assert other.backend.batch_exists(keys) == 0
    assert engine().backend.batch_exists(keys) == 0


LATE = Started(hicache_storage_backend=None)
"""What SGLang says to a backend that is attached while it runs."""


def test_a_backend_attached_late_keeps_kv_to_its_run(served, engine, caplog):
    """The weights may have been updated before lmtier was there to see it, whatever their name."""
    served()
    named = {"weights": "one"}
    before = engine(extra=named)
    before.save(hashes(4))
    assert not caplog.text
    after = engine(started=LATE, extra=named)
    assert "weights may have changed before lmtier was attached" in caplog.text
    assert after.backend.batch_exists(hashes(4)) == 0
    assert after.save(hashes(4)) == [True] * 4
    assert after.load(hashes(4)) == [True] * 4


@pytest.mark.parametrize("started", [Started(), LATE])
def test_a_backend_attached_after_an_update_awaits_a_flush(served, engine, started):
    served()
    before = engine()
    before.save(hashes(4))
    updater().update_weights_from_disk("elsewhere", "auto")
    after = engine(started=started)
    assert after.save(hashes(4)) == [False] * 4  # SGLang may still hold pages of the old weights
    assert after.backend.batch_exists(hashes(4)) == 0
    flush_sglang()
    assert after.backend.batch_exists(hashes(4)) == 0
    assert after.save(hashes(4)) == [True] * 4
    assert after.load(hashes(4)) == [True] * 4


def test_a_backend_attached_after_a_flush_stores_at_once(served, engine):
    served()
    engine().save(hashes(4))
    updater().update_weights_from_disk("elsewhere", "auto")
    flush_sglang()
    after = engine()
    assert after.backend.batch_exists(hashes(4)) == 0
    assert after.save(hashes(4)) == [True] * 4


def test_an_sglang_without_update_hooks_keeps_kv_to_its_run(served, engine, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.cache_controller")
    served()
    one = engine()
    assert "does not show changes of its weights" in caplog.text
    assert one.save(hashes(4)) == [True] * 4
    assert one.load(hashes(4)) == [True] * 4


def test_the_methods_that_are_watched_are_those_of_sglang(sglang):
    """Its weights change by these and no others, and a flush resets the controller."""
    if not sglang.real:
        pytest.skip("needs the sglang wheel on the path")
    (folder,) = sys.modules["sglang"].__path__

    def methods(module: str, name: str) -> dict[str, str]:
        file = Path(folder, *module.split(".")[1:]).with_suffix(".py")
        body: Any = ast.parse(file.read_text()).body
        (cls,) = (each for each in body if getattr(each, "name", "") == name)
        return {each.name: ast.unparse(each) for each in cls.body if isinstance(each, ast.FunctionDef)}

    theirs = {cls.__name__: methods(module, cls.__name__) for module, cls in NEED_A_GPU.items()}
    for cls in NEED_A_GPU.values():
        assert {name for name in vars(cls) if not name.startswith("__")} <= theirs[cls.__name__].keys()
    writes = {
        name
        for name, code in theirs["WeightUpdater"].items()
        if not name.startswith("_") and ("load_weights" in code or "update_weights_from_ipc(" in code)
    }
    assert writes - {"end_weight_update"} <= set(sglang.ours._UPDATES)
    queues = theirs["HiCacheController"]["reset"]
    assert queues.index("_stop_storage_threads") < queues.index("backup_queue.queue.clear")


PRECISE = {
    *("SGLANG_CPU_QUANTIZATION", "SGLANG_ENABLE_BF16_SPLITK_GEMM", "SGLANG_ENABLE_DP_GATHER_FP8"),
    *("SGLANG_FP8_IGNORED_LAYERS", "SGLANG_HUMMING_INPUT_QUANT_CONFIG"),
    *("SGLANG_HUMMING_ONLINE_QUANT_CONFIG", "SGLANG_HUMMING_USE_F16_ACCUM", "SGLANG_INT4_WEIGHT"),
    *("SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE", "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN"),
    *("bf16_gemm_backend", "deepep_dispatcher_output_dtype", "dtype", "enable_deepseek_v4_fp4_indexer"),
    *("enable_int8_mamba_checkpoint", "enable_precise_embedding_interpolation"),
    *("enable_quant_communications", "enable_tf32_matmul", "enable_w4a4_mxfp4_megamoe"),
    *("flashinfer_mxfp4_moe_precision", "fp4_gemm_runner_backend", "fp8_gemm_runner_backend"),
    *("kv_cache_dtype", "mamba_ssm_dtype", "modelopt_quant", "prefill_kv_cache_dequant_dtype"),
    *("qsa_indexer_dtype", "quantization", "rl_quant_profile", "speculative_draft_kv_cache_dtype"),
    "speculative_draft_model_quantization",
}


def test_the_arguments_that_are_read_are_those_of_sglang(sglang):
    """Names that do not exist would change nothing, and silently."""
    if not sglang.real:
        pytest.skip("needs the sglang wheel on the path")
    srt = Path(*sys.modules["sglang"].__path__) / "srt"

    def names(file: Path) -> set[str]:
        tree = ast.walk(ast.parse(file.read_text()))
        return {ast.unparse(each.target) for each in tree if isinstance(each, ast.AnnAssign)}

    known = set[str]().union(*(names(file) for file in (srt / "arg_groups" / "fields").glob("*.py")))
    needed = {"model_path", "revision", "load_format", "lora_paths", "hicache_storage_backend"}
    needed |= {"speculative_draft_model_path", "speculative_draft_model_revision", "kt_weight_path"}
    needed |= {"quantization_param_path", "model_loader_extra_config", "speculative_draft_load_format"}
    assert needed | {*sglang.ours._CHANGING.split(), *sglang.ours._OF_THIS_RUN.split()} <= known
    assert names(srt / "lora" / "lora_registry.py") >= {"lora_name", "lora_path"}
    assert "SGLANG_PP_LAYER_PARTITION" in (srt / "distributed" / "utils.py").read_text()
    variables = set(re.findall(r"^ +(SGLANG_\w+) = ", (srt / "environ.py").read_text(), re.MULTILINE))
    found = {name for name in known | variables if sglang.ours._PRECISION.match(name)}
    assert found >= PRECISE
    assert not found & {"int8_mamba_ckpt_size", "quantization_param_path"}
    assert not [name for name in found if name.startswith("_")]
    assert "def resolved_server_args_dict(" in (srt / "runtime_context.py").read_text()


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_the_pool_of_these_tests_lies_as_sglangs_own(sglang, layout):
    """SGLang's pool needs a GPU's libraries; its arithmetic is plain Python."""
    if not sglang.real:
        pytest.skip("needs the sglang wheel on the path")
    (folder,) = sys.modules["sglang"].__path__
    body: Any = ast.parse((Path(folder) / "srt/mem_cache/pool_host/mha.py").read_text()).body
    (cls,) = (each for each in body if getattr(each, "name", "") == "MHATokenToKVPoolHost")
    (method,) = (each for each in cls.body if getattr(each, "name", "") == "get_page_buffer_meta")
    found: dict[str, Any] = {}
    exec(compile(ast.Module([method], []), "mha.py", "exec"), found)
    pool: Any = HostPool(layout)
    pool.layer_num, pool.head_num, pool.head_dim, pool.size = LAYERS, HEADS, DIM, PAGES * PAGE
    indices = pool.indices(3, 7, 1)
    assert found["get_page_buffer_meta"](pool, indices) == pool.get_page_buffer_meta(indices)


def test_sglangs_factory_makes_it(served, engine, sglang, tmp_path):
    if not sglang.real:
        pytest.skip("needs the sglang wheel on the path")
    served()
    one = engine()
    factory = importlib.import_module("sglang.srt.mem_cache.storage").StorageBackendFactory
    extra = {
        **one.backend._storage.extra_config,
        "module_path": "lmtier_integrations.sglang",
        "class_name": "LMTierHiCache",
    }
    made = factory.create_backend("dynamic", replace(one.backend._storage, extra_config=extra), one.pool)
    made.register_mem_pool_host(one.pool)
    made.on_host_pools_registered()
    keys = hashes(3)
    assert one.save(keys) == [True] * 3
    assert made.batch_exists(keys) == 3
    assert made.batch_get_v1(keys, one.pool.indices(20, 21, 22)) == [True] * 3
    assert is_right(one, one, keys)
    made.close()
