"""SGLang's HiCache over a cache server: pages of its host pool, for every rank, engine and restart.

    page   one object: the buffers of `get_page_buffer_meta` one after the other, opaque
    key    the model's namespace, then sha256 over the identity of the pages and SGLang's page hash
    copy   one, between SGLang's host pool and the slab, which this process maps

SGLang calls from several threads at once. A client has one owner, so each thread has its own client of the
same server. A failure counts as a missing page: an exception would end SGLang's thread.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_context

from lmtier.client.client import Client
from lmtier.config import TOKEN_VARIABLE, suggest
from lmtier.core.grant import Match
from lmtier.errors import ConfigError, MisuseError, TierError
from lmtier.format.keys import KEY_BYTES, PREFIX_BYTES, Identity, namespace, seed
from lmtier.format.layout import LayerShape, Layout, form_of
from lmtier.format.objects import Selector
from lmtier_integrations.identity import WeightFiles, all_in, preparing_files_in, weights_in

log = logging.getLogger("sglang.lmtier")

_OURS = {"server", "model", "weights"}
_SGLANGS = {"backend_name", "module_path", "class_name", "interface_v1", "allocator"}
"""What SGLang reads of the extra config, and leaves in it."""
_CHANGING = """
    json_model_override_args context_length speculative_algorithm speculative_enable_w4a4_mxfp4_megamoe
    rl_on_policy_target moe_runner_backend flashinfer_a2a_dispatch_type
    kt_method kt_num_gpu_experts kt_max_deferred_experts_per_token
    lora_target_modules uno_lora_path mm_process_config image_processor_backend
    enable_mamba_cache_stochastic_rounding mamba_backend
    linear_attn_backend linear_attn_prefill_backend linear_attn_decode_backend
"""
"""The resolved fields of SGLang's ServerArgs that change KV: docs/KEYS.md. A version may lack some."""
_PRECISION = re.compile(r"(?!_|.*_(path|size)$).*(dtype|quant|precis|humming|(fp?|int)\d)", re.IGNORECASE)
"""The names of fields and variables that choose a precision. A list of them is never complete."""
_OF_THIS_RUN = """
    custom_weight_loader quantize_and_serve dllm_algorithm trust_mm_content_hashes forward_hooks
    decrypted_config_file decrypted_draft_config_file modelopt_checkpoint_restore_path
"""
"""The fields that let weights, tokens or images differ from what files, order or names indicate."""
_FROM_FILES = {"auto", "pt", "safetensors", "npcache", "sharded_state", "gguf", "bitsandbytes", "layered"}
_FOR_SPEED = {"enable_multithread_load", "num_threads"}
_UPDATES = (
    "begin_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_disk",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)
"""The methods of SGLang's `WeightUpdater` after which weights in memory are others."""
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_PROCESS = secrets.token_hex(16)
_AGAIN = 1.0  # seconds until a thread that found no server tries again
_IN_USE = 0.01  # seconds between tries while all memory is in use
_POLL = 0.0005  # seconds between polls for the answers of a shared tier

T = TypeVar("T")
Page = Sequence[tuple[int, int]]
"""The buffers of one page: addresses and sizes."""


@dataclass(frozen=True, slots=True)
class NamedPool:
    """One of SGLang's host pools, with the prefix of its pages' keys."""

    host: Any
    identity: Identity
    seed: bytes
    sizes: tuple[int, ...]
    """The sizes of the buffers of one page."""

    def keys(self, page_hashes: Sequence[str]) -> list[bytes]:
        ours, rest = self.seed[:PREFIX_BYTES], KEY_BYTES - PREFIX_BYTES
        digests = (hashlib.sha256(self.seed + each.encode()).digest() for each in page_hashes)
        return [ours + digest[:rest] for digest in digests]

    def pages(self, host_indices: torch.Tensor, count: int) -> list[Page]:
        """The addresses of pages. Raises MisuseError if SGLang's description has changed since the start."""
        addresses, sizes = self.host.get_page_buffer_meta(host_indices)
        if len(addresses) != count * len(self.sizes) or tuple(sizes) != self.sizes * count:
            raise MisuseError(f"SGLang gave {len(addresses)} buffers for {count} pages of {self.sizes} bytes")
        buffers = list(zip(addresses, sizes, strict=True))
        return [buffers[at : at + len(self.sizes)] for at in range(0, len(buffers), len(self.sizes))]


class _WeightsInPlace:
    """The changes of weights in this process, which SGLang makes without telling a storage backend.

    From a change on, pages in SGLang's memory may be of other weights than those in use, so nothing is stored
    or loaded. When SGLang has emptied its caches, pages get a name that only this run of the engine has.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._flushed = 0
        """How many there were when SGLang last emptied its caches."""
        self._is_watched = False
        self._backends: weakref.WeakSet[LMTierHiCache] = weakref.WeakSet()

    @property
    def is_stale(self) -> bool:
        """Whether pages in SGLang's memory may be of other weights than those in use."""
        return self._flushed != self.changes

    def watch(self, backend: LMTierHiCache) -> bool:
        """Returns whether a change will be seen. SGLang has loaded both modules before it opens a backend."""
        updater = getattr(sys.modules.get(_UPDATER), "WeightUpdater", None)
        controller = getattr(sys.modules.get(_CONTROLLER), "HiCacheController", None)
        if updater is None or controller is None or not set(dir(updater)).issuperset(_UPDATES):
            return False
        self._backends.add(backend)
        if not self._is_watched:
            self._is_watched = True
            for name in _UPDATES:
                setattr(updater, name, self._updating(getattr(updater, name)))
            controller.reset = self._resetting(controller.reset)
        return True

    def _updating(self, method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def update(*args: Any, **kwargs: Any) -> T:
            self.changes += 1
            log.info("lmtier: weights change: nothing is stored or loaded until SGLang's cache is flushed")
            return method(*args, **kwargs)

        return update

    def _resetting(self, method: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(method)
        def reset(controller: Any) -> None:
            method(controller)  # its threads have ended, and what they had left to do is forgotten
            if self.is_stale:
                for backend in self._backends:
                    backend.rename()
                self._flushed = self.changes  # last, because the controller's new threads run already

        return reset


_in_place = _WeightsInPlace()


class LMTierHiCache(HiCacheStorage):
    """The class for `--hicache-storage-backend dynamic`. Only its start raises."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        for name in extra:
            if name not in _OURS | _SGLANGS:
                raise _wrong(f"unknown {name!r}{suggest(name, _OURS)}")
        if not extra.get("interface_v1"):
            raise _wrong('lmtier needs "interface_v1": 1')
        if not extra.get("server"):
            raise _wrong('lmtier needs "server", the Unix socket of a running `lmtier serve`')
        self._address = str(extra["server"]).removeprefix("unix:/")
        self._storage = storage_config
        args = SimpleNamespace(**get_context().resolved_server_args_dict())
        self._model = str(extra.get("model") or storage_config.model_name or args.model_path)
        self._engine = _changing_kv(args)
        given_weights = str(extra.get("weights") or "")
        self._weights = given_weights or _weights_of(args.model_path, args.revision, args.load_format)
        why = "its weights are neither files nor named; name them with weights in the extra config"
        if not self._weights or (why := _why_private(args, is_named=bool(given_weights))):
            self._weights = self._private_name()
            log.warning("lmtier: only this run of the engine finds the stored KV of %s: %s", self._model, why)
        if not _in_place.watch(self):
            self._weights = self._private_name()
            log.warning(
                "lmtier: this SGLang does not show changes of its weights, so only this run of the engine "
                "finds the stored KV; after an update in place call POST /hicache/storage-backend/clear"
            )
        self._pools: dict[str, NamedPool] = {}
        self._is_closed = False
        self._clients: dict[Any, Client] = {}
        """By the thread that uses it."""
        self._own = threading.local()
        self._own.client = self._connect()  # no server at the start is a mistake

    # ---- SGLang's pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Pools beside the main one: states of linear attention, windows, indexers, drafts."""
        if str(host_pool_name) in self._pools:
            return
        try:
            self._register(host_pool_name, host_pool)
        except Exception as error:  # noqa: BLE001 - whatever SGLang's pools raise, while it serves
            log.warning(
                "lmtier: SGLang's pool %s cannot be stored, so prompts that need it are not found: %s",
                host_pool_name,
                error,
            )

    def _register(self, name: Any, host: Any) -> None:
        storage = self._storage
        if storage.is_mla_model and storage.tp_size > 1 and "MHA" in type(host).__name__:
            raise _wrong(f"each rank has other heads of the pool {name}, but SGLang stores only rank 0's")
        meta = host.get_page_buffer_meta(torch.arange(host.page_size))
        if not meta or not sum(meta[1]):
            raise _wrong(f"the pages of SGLang's pool {name} have no buffers that could be read or written")
        sizes = tuple(int(size) for size in meta[1])
        identity = Identity(
            model=self._model,
            weights=self._weights,
            attention=json.dumps(
                {
                    "engine": self._engine,
                    "pool": [str(name), type(host).__name__, str(host.layout), host.page_size],
                    "dtype": str(self.mem_pool_host.dtype),
                    "buffers": sizes,
                    "rank": self._rank(name),
                }
            ),
        )
        self._pools[str(name)] = NamedPool(host, identity, self._seed(identity), sizes)

    def _seed(self, identity: Identity) -> bytes:
        return seed(identity, self.mem_pool_host.page_size)

    def rename(self) -> None:
        """Weights have changed, and SGLang has emptied its caches: all pages get other names."""
        self._weights = self._private_name()
        for name, pool in self._pools.items():
            identity = replace(pool.identity, weights=self._weights)
            self._pools[name] = replace(pool, identity=identity, seed=self._seed(identity))
        log.info("lmtier: weights were changed in place: only this run of the engine finds KV from now on")

    def _private_name(self) -> str:
        """A name of the weights in memory that only this run of the engine knows.

        If one rank stores the pages for all, they need the same name.
        """
        run = _launch() if self._storage.is_mla_model and torch.distributed.is_initialized() else _process()
        return f"{run} after {_in_place.changes} changes"

    def _rank(self, name: Any) -> list[Any]:
        """The part of the model in this rank: all of MLA, as in the others, but only its part of other
        pools."""
        storage = self._storage
        layers = [storage.pp_rank, storage.pp_size, os.environ.get("SGLANG_PP_LAYER_PARTITION")]
        stage = [*layers, storage.attn_cp_rank, storage.attn_cp_size, storage.dcp_rank, storage.dcp_size]
        is_replicated = storage.is_mla_model and name != PoolName.MAMBA
        return stage if is_replicated else [*stage, storage.tp_rank, storage.tp_size]

    # ---- the main pool

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """The number of leading pages that are stored."""
        return self._leading(PoolName.KV.value, keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._get(self._pools[PoolName.KV.value], keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        prefix = (extra_info.prefix_keys if extra_info else None) or []
        return self._set(self._pools[PoolName.KV.value], keys, host_indices, prefix)

    # ---- all pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that every pool can supply, each by its own rule."""
        kv_pages = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            name, pages = str(transfer.name), keys[:kv_pages]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lengths = set(range(1, self._leading(name, pages) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                is_stored = [self._leading(name, [page]) == 1 for page in pages]
                lengths = {n for n in range(1, kv_pages + 1) if all(is_stored[max(0, n - window) : n])}
            else:
                continue  # other rules must not shorten the hit, and unreported pages are not loaded
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable &= lengths
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {each.name: self._transfer(self._get_each, each) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {each.name: self._transfer(self._set, each) for each in transfers}

    def _transfer(self, move: Callable[..., list[bool]], transfer: PoolTransfer) -> list[bool]:
        pool, keys, indices = self._pools.get(str(transfer.name)), transfer.keys or [], transfer.host_indices
        if pool is None or indices is None or len(indices) != len(keys) * pool.host.page_size:
            return [False] * len(keys)
        return move(pool, keys, indices)

    def _leading(self, name: str, keys: list[str]) -> int:
        pool = self._pools.get(name)
        return 0 if pool is None else self._asked(lambda client: _count(client, pool, pool.keys(keys)), 0)

    # ---- moving pages

    def _get(self, pool: NamedPool, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        """Load the longest stored leading run of pages."""

        def load(client: Client) -> list[bool]:
            pages, page_keys = pool.pages(host_indices, len(keys)), pool.keys(keys)
            loaded = 0
            while loaded < len(keys):  # in several rounds, because the slab may be smaller than the batch
                with _matched(client, pool, page_keys[loaded:]) as match:
                    client.wait(match)
                    ready = match.grant.placement.offsets if match.is_ready else []
                    for offsets, page in zip(ready, pages[loaded:], strict=False):
                        _copy(client, offsets[0], page, is_load=True)
                if not ready:
                    break
                loaded += len(ready)
            return [number < loaded for number in range(len(keys))]

        return self._asked(load, [False] * len(keys))

    def _get_each(self, pool: NamedPool, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        """Load independent pages: after a missing page the next one may be stored."""
        step = pool.host.page_size
        return [
            self._get(pool, [key], host_indices[at * step : (at + 1) * step])[0]
            for at, key in enumerate(keys)
        ]

    def _set(
        self, pool: NamedPool, keys: list[str], host_indices: torch.Tensor, prefix: Sequence[str] = ()
    ) -> list[bool]:
        """Store the pages that are not stored yet. With `prefix`, pages are evicted before their prefix."""
        if not self._storage.is_storage_writer and pool.host is self.mem_pool_host:
            return [True] * len(keys)  # another rank stores the same bytes

        def store(client: Client) -> list[bool]:
            pages, page_keys = pool.pages(host_indices, len(keys)), pool.keys([*prefix, *keys])
            first, handled = len(prefix), 0
            until = time.monotonic() + client.config.load_deadline
            while True:
                unserved = client.unserved
                grant = client.reserve(page_keys, _form(client, pool), first=first)
                try:
                    for number, offsets in zip(grant.chunks, grant.placement.offsets, strict=True):
                        _copy(client, offsets[0], pages[handled + number - first], is_load=False)
                except BaseException:
                    client.abort(grant)
                    raise
                client.commit(grant)
                if client.unserved > unserved:
                    break
                stored = max([grant.leading_stored, *(number + 1 for number in grant.chunks)]) - first
                handled = handled + stored if grant.dropped else len(keys)
                seconds_left = until - time.monotonic()
                if handled == len(keys) or seconds_left < 0 or not client.flush(seconds_left):
                    break
                if not stored:
                    time.sleep(_IN_USE)
                # The pages stored so far are in lower tiers too, so they need not keep their room as a
                # prefix.
                page_keys, first = page_keys[first + stored :], 0
            if len(page_keys) < len(keys):
                # They may have been evicted for this room.
                handled = min(handled, _count(client, pool, pool.keys(keys)))
            return [number < handled for number in range(len(keys))]

        return self._asked(store, [False] * len(keys))

    # ---- the server

    def clear(self) -> None:
        """Delete this model's KV, for all users of the server."""
        self._asked(lambda client: client.clear(Selector(namespace(self._model))), None, for_pages=False)

    def close(self) -> None:
        """Called when SGLang's storage threads have ended."""
        self._is_closed = True
        for client in list(self._clients.values()):
            client.close()

    def _asked(self, ask: Callable[[Client], T], otherwise: T, *, for_pages: bool = True) -> T:
        """The edge of SGLang's threads: any failure counts as a miss."""
        if for_pages and _in_place.is_stale:
            return otherwise
        try:
            client = self._client()
            return otherwise if client is None else ask(client)
        except Exception:  # an exception in SGLang's thread would end its prefetching permanently
            log.exception("lmtier: a call from SGLang failed; it counts as a miss")
            return otherwise

    def _client(self) -> Client | None:
        """The client of this thread."""
        thread_state = self._own.__dict__
        if self._is_closed:
            return None
        if "client" not in thread_state and time.monotonic() > thread_state.get("again", 0.0):
            thread_state["again"] = time.monotonic() + _AGAIN
            try:
                thread_state["client"] = self._connect()
            except TierError as error:
                log.warning("%s", error)
        client: Client | None = thread_state.get("client")
        return client

    def _connect(self) -> Client:
        own = self._storage
        name = f"sglang {os.getpid()} tp{own.tp_rank} pp{own.pp_rank} {threading.current_thread().name}"
        client = Client(self._address, name=name, token=os.environ.get(TOKEN_VARIABLE))
        for thread in list(self._clients):  # SGLang starts new threads after each reset
            if not thread.is_alive() and (ended_client := self._clients.pop(thread, None)) is not None:
                ended_client.close()
        self._clients[threading.current_thread()] = client
        return client

    # ---- the interface without zero copy; unused, because interface_v1 is required

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False


def _form(client: Client, pool: NamedPool) -> Any:
    """The form of a page. A page counts as a chunk with the server's number of tokens."""
    tokens = client.chunk_tokens
    layout = Layout((LayerShape(1, sum(pool.sizes), 0),), "u8", tokens, tokens, "sglang-page")
    return form_of(layout, (layout.whole,))


@contextmanager
def _matched(client: Client, pool: NamedPool, names: list[bytes]) -> Iterator[Match]:
    match = client.match(names, _form(client, pool))
    try:
        yield match
    finally:
        client.release(match)


def _count(client: Client, pool: NamedPool, names: list[bytes]) -> int:
    """The number of leading pages that are stored. Nothing is loaded."""
    with _matched(client, pool, names) as match:
        while match.pending_lookups and time.monotonic() < match.deadline:
            time.sleep(_POLL)  # waiting at the server would load the pages, which is not wanted here
            client.step()
        return match.chunks


def _copy(client: Client, offset: int, page: Page, *, is_load: bool) -> None:
    at = np.frombuffer(client.slab.view(offset, sum(size for _, size in page)), np.uint8).ctypes.data
    for address, size in page:
        if is_load:
            ctypes.memmove(address, at, size)
        else:
            ctypes.memmove(at, address, size)
        at += size


def _changing_kv(server_args: Any) -> list[str]:
    """The engine's start options that change KV and that SGLang does not pass to a storage backend."""
    facts = [_text(getattr(server_args, name, None)) for name in _CHANGING.split()]
    variables = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_")}
    options = {**vars(server_args), **variables}
    # Without values that are unset: the fields that a later version adds must not change all keys.
    precise = sorted(name for name, value in options.items() if value and _PRECISION.match(name))
    facts += [f"{name}={_text(options[name])}" for name in precise]
    if path := getattr(server_args, "quantization_param_path", None):
        facts.append(Path(path).read_text())
    if path := getattr(server_args, "kt_weight_path", None):
        facts.append(weights_in(path))
    if path := getattr(server_args, "speculative_draft_model_path", None):
        revision = getattr(server_args, "speculative_draft_model_revision", None)
        load_format = getattr(server_args, "speculative_draft_load_format", None) or server_args.load_format
        facts.append(_weights_of(path, revision, load_format) or f"{path} {revision}")
    # SGLang identifies these adapters by name and place, and those loaded later at random.
    facts += [f"{name} {_adapter_in(place)}" for name, place in _adapters(server_args)]
    return [*facts, preparing_files_in(server_args.model_path)]


def _weights_of(place: str, revision: str | None, how: str) -> str:
    """All weights in a folder with what chooses among them: configuration, indexes and the load format.

    Or the commit of a hub with the load format. Empty if neither is known.
    """
    indexes = sorted(path.name for path in Path(place).glob("*.index.json"))
    if not (weights := weights_in(place, "config.json", *indexes)):
        return f"{revision} {how}" if re.fullmatch("[0-9a-f]{40}", revision or "") else ""
    if how == "auto" and any(Path(place).glob("*.safetensors")):
        how = "safetensors"  # which SGLang takes before all others
    return f"{weights} {how}"


def _indexed_in(place: str) -> WeightFiles:
    """The .safetensors files that SGLang opens in a folder, in the order in which the folder lists them."""
    index, found = Path(place, "model.safetensors.index.json"), all_in(place)
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
    paths = (path for path in found.paths if path.endswith(".safetensors"))
    return WeightFiles(place, tuple(path for path in paths if named is None or Path(path).name in named))


def _text(value: Any) -> str:
    """The same in every process: the order of a set is not."""
    return str(sorted(value) if isinstance(value, set) else value)


def _process() -> str:
    """The process id is included because a forked child inherits the secret."""
    return f"{os.getpid()} {_PROCESS}"


def _launch() -> str:
    """A secret of the launch that this rank belongs to. The first rank that asks makes it up."""
    store = torch.distributed.distributed_c10d._get_default_store()
    secret: bytes = store.compare_set("lmtier launch", "", secrets.token_hex(16))
    return secret.decode()


def _why_private(given: Any, *, is_named: bool) -> str:
    """Why KV is private to this run although the weights are known; empty if it is shared."""
    if given.hicache_storage_backend != "dynamic" or _in_place.changes:
        return "weights may have changed before lmtier was attached; start SGLang with it to share KV"
    if given.load_format == "dummy" or (given.load_format not in _FROM_FILES and not is_named):
        return f"load_format={given.load_format} makes weights up, or reads them elsewhere"
    for name in _OF_THIS_RUN.split():
        if getattr(given, name, None):
            return f"of {name}"
    extra = getattr(given, "model_loader_extra_config", None) or {}
    if unknown_options := set(json.loads(extra) if isinstance(extra, str) else extra) - _FOR_SPEED:
        return f"model_loader_extra_config may name other weights with {', '.join(sorted(unknown_options))}"
    has_shards = given.load_format == "sharded_state"  # of which each rank reads its own
    if not is_named and not has_shards and _indexed_in(given.model_path).share_tensors():
        return "two files have the same tensor, and SGLang loads them in the order of their folder"
    experts_folder = getattr(given, "kt_weight_path", None)
    if experts_folder and not is_named and not weights_in(experts_folder):
        return "kt_weight_path has no weights that lmtier can read; set weights in the extra config"
    if not all(_adapter_in(place) for _, place in _adapters(given)):
        return "an adapter is no local folder"
    return ""


def _adapters(given: Any) -> list[tuple[str, str]]:
    """The names and places of the adapters that the engine starts with."""
    return [(each["lora_name"], each["lora_path"]) for each in given.lora_paths or ()]


def _adapter_in(place: str) -> str:
    """An adapter by its content, with the numbers that scale it."""
    weights, scales = weights_in(place), Path(place, "adapter_config.json")
    return weights and weights + (scales.read_text() if scales.is_file() else "")


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"hicache-storage-backend-extra-config: {what}")
