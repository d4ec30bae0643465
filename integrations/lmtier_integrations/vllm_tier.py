"""One of lmtier's tiers below vLLM's own CPU tier, by configuration: disk or Redis, checked and bounded.

vLLM's `TieringOffloadingSpec` decides which chunks are stored and loaded. An entry of its `secondary_tiers`
names this class and the URL of a tier. Bytes move between vLLM's CPU memory and the tier on the tier's
threads, without an extra copy. This module only has the keys of chunks, and the requests to notify when a
chunk has arrived or failed.

All of it runs on vLLM's scheduler thread, which calls some of these methods at each step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.model_executor.models.registry import _MULTIMODAL_MODELS, ModelRegistry
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmtier.config import Config
from lmtier.core.index import Index
from lmtier.core.lower import CacheContext
from lmtier.core.lower_tiers import LowerTiers
from lmtier.core.match import Entry, EntryState
from lmtier.errors import ConfigError
from lmtier.format.keys import KEY_BYTES, PREFIX_BYTES, Identity, seed
from lmtier.format.layout import LayerShape, Layout, Name, Shard, form_of
from lmtier.format.objects import Header
from lmtier.observe.follower import CacheObserver, CacheObservers
from lmtier.observe.metrics import Metrics
from lmtier.rules.policy import make_policy
from lmtier.tiers.base import Reason, Stat
from lmtier_integrations.identity import preparing_files_in
from lmtier_integrations.vllm.identity import name_of
from lmtier_integrations.vllm.loaded_model import loaded_by, object_on_stack, wrap_method

log = logging.getLogger("vllm.lmtier")

_WARM_PATIENCE = 60.0  # seconds that the start waits for the tier to know what it holds
_LAST_WRITES = 30.0  # seconds at the end for what still waits to be written
_WAKE = 0.05  # seconds; an open breaker and a passed deadline do not wake this thread
_USED, _CAPACITY = "lmtier:tier_used_bytes", "lmtier:tier_capacity_bytes"
_CORRUPT = "lmtier:tier_corrupt_chunks"


@dataclass(eq=False, slots=True)
class JobProgress:
    """The progress of a job of vLLM."""

    id: JobId
    left: set[OffloadKey]
    began: float = field(default_factory=time.monotonic)
    done: list[OffloadKey] = field(default_factory=list)
    failed: int = 0


@dataclass(eq=False, slots=True)
class RequestState:
    """The state of one request. vLLM keeps it in the request's context and drops it with that."""

    answers: dict[OffloadKey, bool | None] = field(default_factory=dict)
    """The tier's answer for a chunk. None: it is being asked. False: missing, or it failed to load."""
    tails: dict[int, tuple[int, Entry]] = field(default_factory=dict)
    """For each group of layers: where its last stored chunk ends in the prompt, and its entry."""


class _Unwritten(CacheObserver):
    """The chunks that were not stored in the tier since the last report to vLLM."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def not_stored(self, tier: str, keys: Collection[bytes], why: str) -> None:
        self.keys.update(keys)


class _Weights:
    """Whether the ranks' weights are still those that the tier's names stand for.

    A tier sees nothing of ranks. But they change weights and adapters in a call through the engine's core.
    From such a call on, chunks in vLLM's memory may be of other weights than those in use, until vLLM empties
    its caches: `reset_prefix_cache` with `reset_connector`.
    """

    def __init__(self, forgotten: Callable[[], None]) -> None:
        """`forgotten`: weights have changed, and vLLM holds no KV of those before."""
        self.have_changed = False
        self.is_drained = False
        """Whether vLLM empties the memory above the tier next."""
        self.is_empty = True
        """Whether vLLM has computed nothing since it emptied its caches."""
        self._forgotten = forgotten
        self._leave = ExitStack()
        self.close = self._leave.close
        core, scheduler = object_on_stack(EngineCore), object_on_stack(SchedulerInterface)
        self.core = core if scheduler is not None else None
        """None: changes are not seen."""
        if core is not None and scheduler is not None:
            for name in ("collective_rpc", "remove_lora"):
                wrap_method(self._leave, core, name, self._call)
            wrap_method(self._leave, core, "add_lora", self._add_lora)
            wrap_method(self._leave, scheduler, "reset_prefix_cache", self._reset)

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        was_known, self.have_changed = self.have_changed, True
        try:
            return method(*args, **kwargs)
        finally:
            self._settle()
            if self.have_changed and not was_known:
                log.warning(
                    "lmtier: a call into the workers may have changed weights: nothing is stored or loaded "
                    "until reset_prefix_cache with reset_connector has emptied vLLM's caches"
                )

    def _add_lora(self, method: Callable[..., Any], request: Any) -> Any:
        """A new one has a new name. It may also replace one in memory."""
        return self._call(method, request) if getattr(request, "load_inplace", False) else method(request)

    def _reset(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.is_drained = False
        is_done = method(*args, **kwargs)
        self.is_empty = bool(is_done) and self.is_drained
        self._settle()
        return is_done

    def _settle(self) -> None:
        if self.have_changed and self.is_empty:
            self.have_changed = False
            self._forgotten()


class LMTierSecondary(SecondaryTierManager):
    """A tier by its URL; the options are those of every lmtier tier: capacity, policy, codec, its own."""

    medium = Medium.STORAGE
    cache_hit_source = CacheHitSource.DISK

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        tier: str,
        weights: str = "",
        load_deadline: float = 2.0,
        trust_media_ids: bool = False,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = Config(tiers=["cpu://?capacity=4KiB", tier], load_deadline=load_deadline)
        _, spec = config.all_tiers
        self.locality = Locality.LOCAL if spec.scheme == "disk" else Locality.REMOTE
        if spec.scheme != "disk":
            self.cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED
        self._weights = _Weights(self._rename)
        self._identity = _identity(
            offloading_spec, self.block_size_bytes, weights, trust_media_ids, self._weights.core
        )
        self._seed = seed(self._identity, offloading_spec.tokens_per_hash)
        # A chunk is vLLM's unit of transfer: blocks_per_chunk blocks of one group of layers, of all ranks.
        tokens = max(offloading_spec.tokens_per_block) * offloading_spec.blocks_per_chunk
        layout = Layout((LayerShape(1, self.block_size_bytes, 0),), "u8", tokens, tokens, "vllm-offload")
        self._layout, self._form = layout, form_of(layout, (layout.whole,))
        self._memory = primary_kv_view.cast("B")
        self._going = Index(len(self._memory), make_policy("lru"))
        """Chunks that wait to be written, or are being written. vLLM keeps their memory until it is
        notified."""
        self._writing: dict[bytes, list[tuple[JobProgress, OffloadKey]]] = {}
        """The jobs to notify for each chunk."""
        self._written: list[bytes] = []
        self._unwritten = _Unwritten()
        self._jobs: dict[JobId, JobProgress] = {}
        self._finished: list[JobResult] = []
        self._questions: list[tuple[RequestState, OffloadKey]] = []
        self._corrupt = 0
        self._patience = config.load_deadline
        self._wake = threading.Event()
        followers = CacheObservers()
        followers.add(self._unwritten)
        above = CacheContext(
            slab=self._going,
            view=self._view,
            release=self._released,
            metrics=Metrics(),
            followers=followers,
            chunk_tokens=tokens,
            queue_length=config.queue_length,
            patience=self._patience,
        )
        lower = LowerTiers()
        lower.open([spec], {}, self._wake.set, above, {}, lambda place: False)
        (self._below,) = lower
        if self._below.write != "always":
            self._below.close(0.0)
            raise ConfigError(f"{spec}: vLLM decides what is written, so it must take all; remove write=")
        self._shared = lower.shared[0] if lower.shared else None
        """The same tier, if it is a shared tier."""
        until = time.monotonic() + _WARM_PATIENCE
        while self._below.has_jobs and not self._below.is_warm and time.monotonic() < until:
            self._wait()
            self._below.poll()

    # ---- looking

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        below, request = self._below, _request(req_context)
        answer = request.answers.get(key, ...)
        if answer is False or self._weights.have_changed or not below.load_breaker.allows():
            return LookupResult.MISS
        if self._shared is None:
            return LookupResult.HIT if below.is_stored(self._key(key), self._form) else LookupResult.MISS
        if answer is True:
            return LookupResult.HIT
        if answer is not None:
            request.answers[key] = None
            self._questions.append((request, key))
        return LookupResult.RETRY

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send one lookup for all chunks of this step, if the tier must be asked."""
        self._weights.is_empty = False
        if self._questions and self._shared is not None:
            asked, self._questions = self._questions, []
            names = [self._name(key) for _, key in asked]
            deadline = time.monotonic() + self._patience
            if not self._shared.lookup(names, deadline, partial(self._answered, asked)):
                self._answered(asked, {})
        self._step()

    def _answered(self, asked: list[tuple[RequestState, OffloadKey]], found: dict[Name, Stat]) -> None:
        for request, key in asked:
            stat = found.get(self._name(key))
            request.answers[key] = stat is not None and stat.nbytes <= self.block_size_bytes

    # ---- down

    def submit_store(self, job_metadata: TransferJob) -> None:
        request = _request(job_metadata.req_context)
        chunks = sorted(
            zip(job_metadata.keys, job_metadata.chunk_ids, strict=True),
            key=lambda chunk: job_metadata.req_context.get_offload_key_position(chunk[0]) or 0,
        )
        progress = self._begin(job_metadata)
        can_store = (
            self._below.is_warm and self._below.store_breaker.allows() and not self._weights.have_changed
        )
        for offload_key, chunk_id in chunks:
            key = self._key(offload_key)
            if not self._weights.have_changed and self._below.is_stored(key, self._form):
                self._below.touch([key])
                self._arrived(progress, offload_key, ok=True)
            elif key in self._going:
                self._writing[key].append((progress, offload_key))
            elif not can_store:
                self._arrived(progress, offload_key, ok=False)
            else:
                position = job_metadata.req_context.get_offload_key_position(offload_key) or 0
                group = get_offload_group_idx(offload_key)
                parent_end, parent = request.tails.get(group, (0, None))
                entry = self._going.add(
                    key,
                    self._form,
                    self.block_size_bytes,
                    EntryState.READY,
                    parent if parent_end < position else None,
                )
                entry.offsets = (int(chunk_id) * self.block_size_bytes,)
                request.tails[group] = position, entry
                self._writing[key] = [(progress, offload_key)]
                self._below.queue_write(entry)
        self._step()

    def _released(self, entry: Entry) -> None:
        """The tier no longer uses this memory. After `poll` it is known whether the chunk was written."""
        self._going.release(entry)
        self._going.remove(entry)
        self._written.append(entry.key)

    # ---- up

    def submit_load(self, job_metadata: TransferJob) -> None:
        request, progress = _request(job_metadata.req_context), self._begin(job_metadata)
        for offload_key, chunk_id in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            key, at = self._key(offload_key), int(chunk_id) * self.block_size_bytes
            form = None if self._weights.have_changed else self._below.load_form(key, self._form)
            if form is None or form.sizes != self._form.sizes or not self._below.load_breaker.allows():
                self._loaded(progress, request, offload_key, Reason.ABSENT)
            else:
                payload = self._memory[at : at + self.block_size_bytes]
                self._below.load(key, form, [payload], partial(self._loaded, progress, request, offload_key))

    def _loaded(
        self,
        progress: JobProgress,
        request: RequestState,
        key: OffloadKey,
        result: dict[Shard, Header] | Reason,
        _end: float = 0.0,
    ) -> None:
        ok = not isinstance(result, Reason) and all(
            header.layout == self._layout for header in result.values()
        )
        if not ok:
            request.answers[key] = False  # this request does not ask again
            self._corrupt += result is Reason.CORRUPT
        self._arrived(progress, key, ok=ok)

    # ---- jobs

    def _begin(self, job: TransferJob) -> JobProgress:
        progress = JobProgress(job.job_id, set(job.keys))
        self._jobs[progress.id] = progress
        self._end_if_done(progress)
        return progress

    def _arrived(self, progress: JobProgress, key: OffloadKey, *, ok: bool) -> None:
        progress.left.discard(key)
        if ok:
            progress.done.append(key)
        else:
            progress.failed += 1
        self._end_if_done(progress)

    def _end_if_done(self, progress: JobProgress) -> None:
        if progress.left or self._jobs.pop(progress.id, None) is None:
            return
        self._finished.append(
            JobResult(
                job_id=progress.id,
                success=not progress.failed,
                successful_keys=tuple(progress.done) or None,
                transfer_time=time.monotonic() - progress.began,
                transfer_bytes=len(progress.done) * self.block_size_bytes,
            )
        )

    def _step(self) -> None:
        below = self._below
        below.poll()
        below.expire()
        if below.store_breaker.is_open and not below.store_breaker.allows():
            # vLLM cannot use the memory of waiting chunks, and a tier may fail for a long time.
            self._unwritten.keys.update(entry.key for entry in self._going.entries() if not entry.leases)
        below.pump()
        for key in {*self._written, *self._unwritten.keys}:
            entry = self._going.get(key)
            if entry is not None and not entry.leases:
                self._going.remove(entry)
            # A disk that has just turned out to be full reports nothing: it offers the chunk again, in vain.
            is_written = self._shared is not None or below.is_stored(key, self._form)
            for progress, offload_key in self._writing.pop(key, ()):
                self._arrived(progress, offload_key, ok=is_written and key not in self._unwritten.keys)
        self._written.clear()
        self._unwritten.keys.clear()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._step()
        finished, self._finished = self._finished, []
        return finished

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._below.touch([self._key(key) for key in keys])

    def drain_jobs(self) -> None:
        """Wait until no thread of the tier uses vLLM's memory, however long that takes.

        vLLM empties that memory next.
        """
        self._drain(float("inf"))
        self._weights.is_drained = True

    def _rename(self) -> None:
        """From here on KV is of other weights, under a name that no other run of the engine has."""
        self._identity = replace(self._identity, weights=f"since a change {secrets.token_hex(16)}")
        self._seed = seed(self._identity, self._offloading_spec.tokens_per_hash)

    def shutdown(self) -> None:
        self._weights.close()
        self._drain(time.monotonic() + _LAST_WRITES)
        self._below.persist_order()
        self._below.close()
        self._memory = memoryview(b"")  # vLLM unmaps it next

    def _drain(self, until: float) -> None:
        self._step()
        while self._jobs and time.monotonic() < until:
            self._wait()
            self._step()

    def _wait(self) -> None:
        self._wake.wait(_WAKE)
        self._wake.clear()

    # ---- metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        labels = ("tier",)
        return {
            _USED: OffloadingGaugeMetadata("Bytes that the tier's objects take.", labels),
            _CAPACITY: OffloadingGaugeMetadata("Bytes that they may take.", labels),
            _CORRUPT: OffloadingCounterMetadata("Chunks that were damaged, and so not loaded.", labels),
        }

    def get_stats(self) -> OffloadingConnectorStats:
        stats, below = OffloadingConnectorStats(), self._below
        held = below.occupancy()
        if held.used is not None:
            stats.set_gauge(_USED, held.used, (below.label,))
        if held.capacity is not None:
            stats.set_gauge(_CAPACITY, held.capacity, (below.label,))
        if news := self._corrupt:
            self._corrupt = 0
            stats.increase_counter(_CORRUPT, news, (below.label,))
        return stats

    # ---- names and places

    def _key(self, key: OffloadKey) -> bytes:
        digest = hashlib.sha256(self._seed + key).digest()
        return self._seed[:PREFIX_BYTES] + digest[: KEY_BYTES - PREFIX_BYTES]

    def _name(self, key: OffloadKey) -> Name:
        return Name(self._key(key), self._layout.whole)

    def _view(self, offset: int, nbytes: int) -> memoryview:
        return self._memory[offset : offset + nbytes]


def _request(context: ReqContext) -> RequestState:
    request = context.get_state(RequestState)
    if request is None:
        request = RequestState()
        context.set_state(request)
    return request


def _identity(
    spec: OffloadingSpec, nbytes: int, given_weights: str, trusts_media: bool, core: EngineCore | None
) -> Identity:
    """vLLM's own digest for KV files, and the weights."""
    model = spec.config.model.name
    weights, why = given_weights, ""
    if core is None:
        why = "this vLLM does not show changes of its weights"
    elif not given_weights:
        loaded = core.model_executor.collective_rpc(loaded_by)
        weights, why = name_of(dict(enumerate(loaded)), core.vllm_config)
        if (config := Path(model, "config.json")).is_file():
            weights = weights and hashlib.sha256(weights.encode() + config.read_bytes()).hexdigest()
        why = why and f"{why}; weights in the tier's entry names them"
    if core is not None and core.vllm_config.lora_config is not None and not given_weights:
        why = "vLLM tells adapters apart by names of users; if the same name always means the same adapter, "
        why += "set weights in the tier's entry"
    if not trusts_media and _takes_media(model):
        why = (
            "vLLM names images, audio and video by a count or by names of users; if it hashes them, and no "
            "user gives other names, set trust_media_ids in the tier's entry"
        )
    if why:
        weights = ""
        log.warning("lmtier: only this run of the engine finds the stored KV of %s: %s", model, why)
    files = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    facts = {**files.get_run_config(), "bytes": nbytes, "kv_cache_layout": spec.config.kv_cache_layout}
    if preparing := preparing_files_in(model):
        facts["preparing"] = preparing
    return Identity(model=model, weights=weights, attention=json.dumps(facts, sort_keys=True, default=str))


def _takes_media(model: str) -> bool:
    """Whether the model takes media: a tier sees neither requests nor vLLM's configuration.

    Unknown is yes.
    """
    cached = try_to_load_from_cache(model, "config.json") if not os.path.exists(model) else None
    file = Path(cached) if isinstance(cached, str) else Path(model, "config.json")
    if not file.is_file():
        return True
    kinds = json.loads(file.read_text()).get("architectures") or [""]
    return any(
        kind in _MULTIMODAL_MODELS or kind not in ModelRegistry.get_supported_archs() for kind in kinds
    )
