"""vLLM's own KV offloading on a machine without a GPU: all of it but the copy, which the CPU makes.

vLLM's offloading copies between a GPU and host memory by DMA, and refuses anything else. `CpuSpec` and
`CpuTieringSpec` are its specs with another worker; scheduling, eviction, the shared memory and the tiers
below are vLLM's. That makes its offloading a baseline that a CPU engine can be measured with, and lets a
tier below be tested there. One thread copies, as one stream does on a GPU, job after job.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
     {"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_offload_spec", "cpu_bytes_to_use": …,
      "secondary_tiers": […]}}

This folder must be on the path of the engine's processes (PYTHONPATH).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Bytes = npt.NDArray[np.int8]


class CopyingWorker(OffloadingWorker):
    """Copies blocks of the engine's KV into chunks of host memory, and back."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        chunks: int,
        region: SharedOffloadRegion | None,
    ) -> None:
        self._region = region
        self._groups = kv_caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._engine: list[Bytes] = []
        """Of each tensor of the engine: blocks, bytes."""
        self._host: list[Bytes] = []
        """Its place in host memory: chunks, blocks of a chunk, bytes."""
        for each in kv_caches.tensors:
            blocks = each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            nbytes = each.page_size_bytes * blocks_per_chunk
            if region is None:
                host = torch.zeros((chunks, nbytes), dtype=torch.int8)
            else:
                host = region.create_next_worker_view(nbytes)
            self._engine.append(blocks.numpy())
            self._host.append(host.numpy().reshape(chunks, blocks_per_chunk, each.page_size_bytes))
        self._thread = ThreadPoolExecutor(1, "cpu-offload")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, src_spec, dst_spec, True)
        return True

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, dst_spec, src_spec, False)
        return True

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [self._jobs.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        wait([job for job_id, job in self._jobs.items() if job_id in job_ids])

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._engine.clear()
        self._host.clear()
        if self._region is not None:
            self._region.cleanup()

    def _copy(
        self, job_id: int, engine: GPULoadStoreSpec, host: CPULoadStoreSpec, is_store: bool
    ) -> TransferResult:
        began, nbytes = time.perf_counter(), 0
        for group, blocks, chunks, slots in self._pairs(engine, host):
            for ref in self._groups[group]:
                there, here = self._engine[ref.tensor_idx], self._host[ref.tensor_idx]
                # One call for all blocks: each call beside a busy engine waits for the interpreter.
                if is_store:
                    here[chunks, slots] = there[blocks]
                else:
                    there[blocks] = here[chunks, slots]
                nbytes += len(blocks) * there.shape[1]
        return TransferResult(job_id, True, nbytes, time.perf_counter() - began)

    def _pairs(
        self, engine: GPULoadStoreSpec, host: CPULoadStoreSpec
    ) -> Iterator[tuple[int, Bytes, Bytes, Bytes]]:
        """For each group of layers: blocks of the engine, and the chunk and the slot in it of each.

        A group's first block need not be the first of its chunk.
        """
        block_at = chunk_at = 0
        for group, (count, first) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            if not count:
                continue
            numbers, slots = np.divmod(
                first % self._blocks_per_chunk + np.arange(count), self._blocks_per_chunk
            )
            blocks = np.asarray(engine.block_ids[block_at : block_at + count])
            chunks = np.asarray(host.chunk_ids[chunk_at:])[numbers]
            yield group, blocks, chunks, slots
            block_at += count
            chunk_at += int(numbers[-1]) + 1


class CpuSpec(CPUOffloadingSpec):
    """Host memory alone."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, None)
        return self._worker


class CpuTieringSpec(TieringOffloadingSpec):
    """Host memory, in a region that the scheduler shares, and the tiers below."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
        return self._worker
