"""One of lmtier's tiers below vLLM's own CPU tier, by configuration: disk or Redis, checked and bounded.

vLLM's `TieringOffloadingSpec` decides what goes down and comes up; an entry of its `secondary_tiers` names
this class and the URL of a tier. Bytes move between vLLM's CPU memory and the tier, on the tier's threads,
without a copy between. What stands here are the books: the key of a chunk, and whom to tell that it has
arrived, or cannot be had.

All of it runs on vLLM's scheduler thread, which calls some of these methods at each step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.model_executor.models.registry import _MULTIMODAL_MODELS, ModelRegistry
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

from lmtier.below import UNBOUNDED, Below
from lmtier.codec import Header
from lmtier.config import Config, without_login
from lmtier.errors import ConfigError
from lmtier.index import Entry, Index, State
from lmtier.keys import KEY_BYTES, PREFIX_BYTES, Identity, seed
from lmtier.layout import LayerShape, Layout, Name, Shard, form_of
from lmtier.metrics import Metrics
from lmtier.policy import make_policy
from lmtier.registry import open_tier
from lmtier.tier import Reason, Stat
from lmtier_integrations.identity import preparing_files_in
from lmtier_integrations.weights import weights_of

log = logging.getLogger("vllm.lmtier")

_WARM_PATIENCE = 60.0  # seconds that the start waits for the tier to know what it holds
_LAST_WRITES = 30.0  # seconds at the end for what still waits to be written
_WAKE = 0.05  # seconds; an open breaker and a deadline wake nobody
_USED, _CAPACITY = "lmtier:tier_used_bytes", "lmtier:tier_capacity_bytes"
_CORRUPT = "lmtier:tier_corrupt_chunks"


@dataclass(eq=False, slots=True)
class Transfer:
    """A job of vLLM's, as far as it has come."""

    id: JobId
    left: set[OffloadKey]
    began: float = field(default_factory=time.monotonic)
    done: list[OffloadKey] = field(default_factory=list)
    failed: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """What matters for one request only; vLLM keeps it in the request's context, and forgets it with that."""

    answers: dict[OffloadKey, bool | None] = field(default_factory=dict)
    """What the tier said of a chunk. None: it is being asked. False: also of one that failed to load."""
    tails: dict[int, tuple[int, Entry]] = field(default_factory=dict)
    """Of each group of layers, the last chunk that went down, and where in the prompt that ends."""


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
        _, spec = config.specs
        if spec.write != "always":
            raise ConfigError(f"tier {without_login(tier)!r}: what is written is vLLM's to say, not write=")
        self.locality = Locality.LOCAL if spec.scheme == "disk" else Locality.REMOTE
        if spec.scheme != "disk":
            self.cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED
        self._seed = _seed(offloading_spec, self.block_size_bytes, weights, trust_media_ids)
        # A chunk is what vLLM moves at once: blocks_per_chunk blocks of one group of layers, of all ranks.
        tokens = max(offloading_spec.tokens_per_block) * offloading_spec.blocks_per_chunk
        layout = Layout((LayerShape(1, self.block_size_bytes, 0),), "u8", tokens, tokens, "vllm-offload")
        self._layout, self._form = layout, form_of(layout, (layout.whole,))
        self._memory = primary_kv_view.cast("B")
        self._going = Index(len(self._memory), make_policy("lru"))
        """Chunks that wait to be written, or are: vLLM keeps their memory still until it is told."""
        self._writing: dict[bytes, list[tuple[Transfer, OffloadKey]]] = {}
        """Whom to tell of them."""
        self._written: list[bytes] = []
        self._unwritten: set[bytes] = set()
        self._transfers: dict[JobId, Transfer] = {}
        self._finished: list[JobResult] = []
        self._questions: list[tuple[Request, OffloadKey]] = []
        self._corrupt = 0
        self._patience = config.load_deadline
        self._wake = threading.Event()
        opened = open_tier(spec)
        opened.wake = self._wake.set
        self._below = Below(spec.scheme, spec, opened, Metrics(), tokens, config.queue_length, self._patience)
        self._below.unstored = self._not_stored
        until = time.monotonic() + _WARM_PATIENCE
        while self._below.has_jobs and time.monotonic() < until:
            self._wait()
            self._below.poll()

    # ---- looking

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        below, request = self._below, _request(req_context)
        answer = request.answers.get(key, ...)
        if answer is False or not below.up.allows():
            return LookupResult.MISS
        if below.index is not None:
            return LookupResult.HIT if below.holds(self._key(key), self._form) else LookupResult.MISS
        if answer is True:
            return LookupResult.HIT
        if answer is not None:
            request.answers[key] = None
            self._questions.append((request, key))
        return LookupResult.RETRY

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """One question for all chunks of this step that a tier must be asked for."""
        if self._questions:
            asked, self._questions = self._questions, []
            names = [self._name(key) for _, key in asked]
            deadline = time.monotonic() + self._patience
            if not self._below.lookup(names, deadline, partial(self._answered, asked)):
                self._answered(asked, {})
        self._step()

    def _answered(self, asked: list[tuple[Request, OffloadKey]], found: dict[Name, Stat]) -> None:
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
        transfer = self._begin(job_metadata)
        can_store = self._below.is_warm and self._below.down.allows()
        for each, place in chunks:
            key = self._key(each)
            if self._below.holds(key, self._form):
                self._below.touch([key])
                self._arrived(transfer, each, ok=True)
            elif key in self._going:
                self._writing[key].append((transfer, each))
            elif not can_store:
                self._arrived(transfer, each, ok=False)
            else:
                position = job_metadata.req_context.get_offload_key_position(each) or 0
                group = get_offload_group_idx(each)
                before, parent = request.tails.get(group, (0, None))
                entry = self._going.add(
                    key,
                    self._form,
                    self.block_size_bytes,
                    State.READY,
                    parent if before < position else None,
                )
                entry.offsets = (int(place) * self.block_size_bytes,)
                request.tails[group] = position, entry
                self._writing[key] = [(transfer, each)]
                self._below.offer(entry)
        self._step()

    def _released(self, entry: Entry) -> None:
        """The tier has done with this memory; whether it was written is known when `poll` is over."""
        self._going.release(entry)
        self._going.remove(entry)
        self._written.append(entry.key)

    def _not_stored(self, keys: Iterable[bytes], reason: str) -> None:
        self._unwritten.update(keys)

    # ---- up

    def submit_load(self, job_metadata: TransferJob) -> None:
        request, transfer = _request(job_metadata.req_context), self._begin(job_metadata)
        for each, place in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True):
            key, at = self._key(each), int(place) * self.block_size_bytes
            form = self._below.form(key, self._form)
            if form is None or form.sizes != self._form.sizes or not self._below.up.allows():
                self._loaded(transfer, request, each, Reason.ABSENT)
            else:
                payload = self._memory[at : at + self.block_size_bytes]
                self._below.load(key, form, [payload], partial(self._loaded, transfer, request, each))

    def _loaded(
        self,
        transfer: Transfer,
        request: Request,
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
        self._arrived(transfer, key, ok=ok)

    # ---- jobs

    def _begin(self, job: TransferJob) -> Transfer:
        transfer = Transfer(job.job_id, set(job.keys))
        self._transfers[transfer.id] = transfer
        self._end_if_done(transfer)
        return transfer

    def _arrived(self, transfer: Transfer, key: OffloadKey, *, ok: bool) -> None:
        transfer.left.discard(key)
        if ok:
            transfer.done.append(key)
        else:
            transfer.failed += 1
        self._end_if_done(transfer)

    def _end_if_done(self, transfer: Transfer) -> None:
        if transfer.left or self._transfers.pop(transfer.id, None) is None:
            return
        self._finished.append(
            JobResult(
                job_id=transfer.id,
                success=not transfer.failed,
                successful_keys=tuple(transfer.done) or None,
                transfer_time=time.monotonic() - transfer.began,
                transfer_bytes=len(transfer.done) * self.block_size_bytes,
            )
        )

    def _step(self) -> None:
        below = self._below
        below.poll()
        below.expire()
        if below.down.is_open and not below.down.allows():
            # vLLM cannot use the memory of what waits, and a tier that fails may do so for long.
            self._unwritten.update(entry.key for entry in self._going.entries() if not entry.leases)
        below.pump(self._going, self._view, self._released)
        for key in {*self._written, *self._unwritten}:
            entry = self._going.get(key)
            if entry is not None and not entry.leases:
                self._going.remove(entry)
            for transfer, each in self._writing.pop(key, ()):
                self._arrived(transfer, each, ok=key not in self._unwritten)
        self._written.clear()
        self._unwritten.clear()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._step()
        finished, self._finished = self._finished, []
        return finished

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._below.touch([self._key(key) for key in keys])

    def drain_jobs(self) -> None:
        """Until no tier's thread touches vLLM's memory, however long that takes."""
        self._drain(float("inf"))

    def shutdown(self) -> None:
        self._drain(time.monotonic() + _LAST_WRITES)
        self._below.persist_order()
        self._below.close()
        self._memory = memoryview(b"")  # vLLM unmaps it next

    def _drain(self, until: float) -> None:
        self._step()
        while self._transfers and time.monotonic() < until:
            self._wait()
            self._step()

    def _wait(self) -> None:
        self._wake.wait(_WAKE)
        self._wake.clear()

    # ---- what is told

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
        if below.index is not None:
            stats.set_gauge(_USED, below.index.used + below.deleting, (below.label,))
            if below.index.capacity < UNBOUNDED:
                stats.set_gauge(_CAPACITY, below.index.capacity, (below.label,))
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


def _request(context: ReqContext) -> Request:
    request = context.get_state(Request)
    if request is None:
        request = Request()
        context.set_state(request)
    return request


def _seed(spec: OffloadingSpec, nbytes: int, weights: str, trusts_media: bool) -> bytes:
    """Where keys begin: what vLLM itself says tells KV files apart, and the weights."""
    model = spec.config.model.name
    weights = weights or weights_of(model)
    why = "" if weights else "its weights are neither files nor named; weights in the tier's entry names them"
    if not trusts_media and _takes_media(model):
        why = (
            "vLLM names images, audio and video by a count or as users say; if it hashes them, and no user "
            "names them otherwise, say trust_media_ids in the tier's entry"
        )
    if why:
        weights = ""
        log.warning("lmtier: what is stored of %s is found by this run of the engine only: %s", model, why)
    files = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    facts = {**files.get_run_config(), "bytes": nbytes, "kv_cache_layout": spec.config.kv_cache_layout}
    if preparing := preparing_files_in(model):
        facts["preparing"] = preparing
    identity = Identity(
        model=model, weights=weights, attention=json.dumps(facts, sort_keys=True, default=str)
    )
    return seed(identity, spec.tokens_per_hash)


def _takes_media(model: str) -> bool:
    """A tier sees neither requests nor vLLM's configuration. Unknown counts as yes."""
    cached = try_to_load_from_cache(model, "config.json") if not os.path.exists(model) else None
    file = Path(cached) if isinstance(cached, str) else Path(model, "config.json")
    if not file.is_file():
        return True
    kinds = json.loads(file.read_text()).get("architectures") or [""]
    return any(
        kind in _MULTIMODAL_MODELS or kind not in ModelRegistry.get_supported_archs() for kind in kinds
    )
