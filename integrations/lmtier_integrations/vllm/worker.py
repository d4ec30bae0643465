"""The worker's half: copies what the scheduler planned between this rank's blocks and the server's slab.

    bind_connector_metadata   the step's plan: loads and saves are prepared
    start_load_kv             mode=step: every load, whole
    wait_for_layer_load       mode=layerwise: this layer of every load
    save_kv_layer             mode=layerwise: this layer of every save
    wait_for_save             what the hooks left over; loads are confirmed, then saves committed

It never looks anything up, and never waits for a tier: what a plan names is in the slab already.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmtier.cache import Match, Reservation
from lmtier.errors import LayoutError, MisuseError
from lmtier.keys import Identity
from lmtier.mover import Load, Mover, Save
from lmtier.paging import PagedKV
from lmtier.server.client import Client
from lmtier.server.engines import RUN_SHIFT
from lmtier.worth import Prefill
from lmtier_integrations.vllm.kv import Declared, declare, window_of
from lmtier_integrations.vllm.launch import Launcher
from lmtier_integrations.vllm.messages import NULL_BLOCK, LoadPlan, Plan, RankFacts, Report, SavePlan
from lmtier_integrations.vllm.settings import LAYERWISE, Settings, check_chunks
from lmtier_integrations.vllm.stats import Stats

log = logging.getLogger("vllm.lmtier")

_GUARDS = 2  # blocks beside the canary's that must not change


class Worker:
    def __init__(
        self, config: VllmConfig, cache: KVCacheConfig, settings: Settings, launcher: Launcher
    ) -> None:
        self._config, self._cache, self._settings, self._launcher = config, cache, settings, launcher
        self._is_layerwise = settings.mode == LAYERWISE
        self._loads: list[tuple[LoadPlan, Match, Load]] = []
        self._saves: list[Save] = []
        self._plan = Plan()
        self._prefill = Prefill()
        self._stages = config.parallel_config.pipeline_parallel_size
        self._began = 0.0
        """When the step's own work began."""
        self._copying = {"load_seconds": 0.0, "save_seconds": 0.0}
        self._copied = 0
        """What it has spent on copies since, and tokens that it has loaded."""
        self._are_hooks_called = False
        self._epoch = 0
        self._failed_blocks: set[int] = set()
        self._arrived: set[str] = set()
        self._lost: set[str] = set()
        """Requests that waited for a load: it has ended, and of those, it has failed."""
        self._left_over: list[Reservation] = []
        """Reservations that could not be ended, because the server did not answer just then."""
        self._report = Report()
        self._leave = ExitStack()
        """What is to be closed: nothing, if the engine does not get as far as `register`."""
        self.stats = Stats()

    # ---- once

    def register(self, tensors: Mapping[str, Any]) -> None:
        """Prove that these tensors can be saved and loaded, and join the server."""
        rank = self._config.parallel_config.rank
        self.client: Client = self._launcher.connect(f"vllm worker {rank}")
        check_chunks(self.client.chunk_tokens, self._config.cache_config.block_size, window_of(self._cache))
        declared = declare(self._config, self._cache, tensors, self.client.chunk_tokens)
        if declared.writes:  # what ends with this process is only known now
            client, self.client = self.client, self._launcher.connect(f"vllm worker {rank}", declared.shard)
            client.close()
        self._leave.callback(self.client.close)
        self._declared = declared
        kv = PagedKV(declared.layout, declared.shard, declared.tensors, tables=declared.tables)
        self.mover = Mover(
            self.client, kv, Identity(model=self._config.model_config.model), ranks=declared.shards
        )
        self.mover.prove(self._spare_blocks(declared), block_bytes=declared.block_bytes)
        log.info("lmtier: rank %d serves %s as %s", rank, declared.shard, declared.layout.to_json().decode())

    def _spare_blocks(self, declared: Declared) -> list[int]:
        """Blocks that no request has yet; never the engine's null block, which is number 0."""
        kernel_blocks = self._cache.num_blocks * declared.ratio
        need = 2 * declared.layout.blocks * (max(declared.tables) + 1) + _GUARDS
        first = max(declared.ratio, kernel_blocks - need)
        return list(range(kernel_blocks - 1, first - 1, -1))

    def facts(self) -> RankFacts:
        declared = self._declared
        return RankFacts(declared.layout.to_json(), declared.shard, self.client.run, declared.from_scratch)

    def close(self) -> None:
        self._leave.close()

    # ---- a step

    def begin(self, plan: Plan) -> None:
        self._plan = plan
        self._are_hooks_called = False
        if plan.run:
            self.client.step()
            self._report.runs[self.client.run] = 1
        if self._left_over:
            self._end_left_over()
        for each in plan.loads:
            self._prepare_load(each)
        if self._declared.writes:
            for save in plan.saves:
                self._prepare_save(save)
        self._copying = {"load_seconds": 0.0, "save_seconds": 0.0}
        self._copied, self._began = 0, time.perf_counter()

    def _prepare_load(self, plan: LoadPlan) -> None:
        match = plan.match(self.mover.form)
        if not self.client.adopt(match):  # first: it may bring another slab, and a load is bound to one
            self._fail(plan)
            return
        try:
            load = Load(self.mover, match, self._kernel_blocks(plan.block_ids), plan.computed_tokens)
        except LayoutError as error:
            log.error("lmtier: a load does not fit the blocks that the engine gave for it: %s", error)
            self.client.disown(match)
            self._fail(plan)
            return
        self._loads.append((plan, match, load))

    def _prepare_save(self, plan: SavePlan) -> None:
        reservation = plan.reservation(self.mover.form, self.mover.kv.shard)
        if not self.client.adopt(reservation):
            self.stats.add("save_failures")
            self._left_over.append(reservation)
        elif self._plan.epoch < self._epoch:
            self.stats.add("save_failures")
            self.client.abort(reservation, self.mover.kv.shard)
        else:
            blocks = self.mover.kv.check(self._kernel_blocks(plan.block_ids))
            self._saves.append(self.mover.fill(reservation, dict(zip(plan.chunks, blocks, strict=True))))

    def _end_left_over(self) -> None:
        """Give back what was reserved while the server stalled. Another run of it knows nothing of that."""
        waiting, self._left_over = self._left_over, []
        for reservation in waiting:
            if self.client.adopt(reservation):
                with suppress(MisuseError):  # given up already, if the connection was lost in between
                    self.client.abort(reservation, self.mover.kv.shard)
            elif reservation.id >> RUN_SHIFT == self.client.run:
                self._left_over.append(reservation)

    def start_load(self) -> None:
        """Whole loads: those that a request waits for, and with mode=step all."""
        began, synchronous = time.perf_counter(), []
        for each in self._loads:
            plan, match, load = each
            if plan.request or not self._is_layerwise:
                load.all()
            if plan.request:
                self._finish_load(plan, match, load)
            else:
                synchronous.append(each)
        if self._loads:
            self._loads = synchronous
            self._spent("load_seconds", began)

    def wait_for_layer(self, name: str) -> None:
        self._are_hooks_called = True
        if self._loads and self._is_layerwise and (number := self._declared.numbers.get(name)) is not None:
            began = time.perf_counter()
            for _, _, load in self._loads:
                load.layer(number)
            self._spent("load_seconds", began)

    def save_layer(self, name: str) -> None:
        if self._saves and self._is_layerwise and (number := self._declared.numbers.get(name)) is not None:
            began = time.perf_counter()
            for save in self._saves:
                save.layer(number)
            self._spent("save_seconds", began)

    def finish(self) -> None:
        """After the forward: what this step computed is in its blocks."""
        if self._plan.computes is not None:
            self._learn(*self._plan.computes)
        if self._loads:
            self._finish_loads()
        if self._copied:
            self._prefill.copied(self._copied, self._copying["load_seconds"])
        if self._saves:
            self._finish_saves()

    def _learn(self, tokens: int, area: float) -> None:
        """What computing takes, for the server: it decides what is worth loading. By the first rank."""
        seconds = time.perf_counter() - self._began - sum(self._copying.values())
        expected = self._prefill.learn(tokens, area, seconds * self._stages)
        if self._config.parallel_config.rank == 0:
            self.stats.add("prefill_seconds", seconds * self._stages)
            self.stats.add("prefill_expected_seconds", expected)
            if (cost := self._prefill.cost) is not None:
                self.client.costs(cost)

    def _spent(self, what: str, began: float) -> None:
        seconds = time.perf_counter() - began
        self._copying[what] += seconds
        self.stats.add(what, seconds)

    def _finish_loads(self) -> None:
        for plan, match, load in self._loads:
            if self._is_layerwise and not self._are_hooks_called:
                log.error("lmtier: the engine did not call the hooks of its layers; set mode=step")
                self._fail(plan)
                self.client.disown(match)
            else:
                load.all()  # of layers that did not run in this step: of a draft model, say
                self._finish_load(plan, match, load)
        self._loads = []

    def _finish_load(self, plan: LoadPlan, match: Match, load: Load) -> None:
        whole = load.tokens
        believed = load.finish()
        if believed < whole:
            self._fail(plan, believed)
        self.stats.add("load_bytes", self._bytes(whole - plan.computed_tokens))
        self._copied += whole - plan.computed_tokens
        self._report.loaded[plan.id] = 1
        if plan.request:
            self._arrived.add(plan.request)
        self.client.disown(match)

    def _finish_saves(self) -> None:
        began = time.perf_counter()
        for save in self._saves:
            if self._plan.epoch < self._epoch:
                save.abort()
                self.stats.add("save_failures")
            else:
                save.all()
                save.commit()
                self.stats.add("save_bytes", self._bytes(save.tokens))
        self._saves = []
        self._spent("save_seconds", began)

    def _fail(self, plan: LoadPlan, believed: int = 0) -> None:
        """Tell the engine what to compute after all; nothing that was computed on it is stored."""
        self.stats.add("load_failures")
        self._report.loaded[plan.id] = 1
        if plan.request:  # nothing was computed on it: it still waits, and starts anew
            self._arrived.add(plan.request)
            self._lost.add(plan.request)
            return
        self._epoch = max(self._epoch, self._plan.epoch) + 1
        size = self._config.cache_config.block_size
        first = max(believed, plan.computed_tokens) // size
        end = len(plan.keys) * self.client.chunk_tokens // size
        (blocks,) = plan.block_ids
        self._failed_blocks.update(blocks[first:end])

    # ---- after a step

    def failed_blocks(self) -> set[int]:
        """What the engine must compute after all.

        One that drafts asks before it calls wait_for_save. By then it must be known, or the token that was
        computed on it is taken for good.
        """
        if self._loads:
            self._finish_loads()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def arrivals(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them that have to be computed."""
        arrived, lost, self._arrived, self._lost = self._arrived, self._lost, set(), set()
        return arrived, lost

    def report(self) -> Report | None:
        if not (self._report.loaded or self._report.runs) and self._report.epoch == self._epoch:
            return None
        report, self._report = self._report, Report(epoch=self._epoch)
        report.epoch = self._epoch
        return report

    # ---- blocks

    def _kernel_blocks(self, tables: list[list[int]]) -> list[list[int]]:
        """As the tensors number them; the null block, which stands for those that left a window, as -1."""
        ratio = self._declared.ratio
        if ratio == 1 and not any(NULL_BLOCK in table for table in tables):
            return tables
        return [
            [block * ratio + part if block != NULL_BLOCK else -1 for block in table for part in range(ratio)]
            for table in tables
        ]

    def _bytes(self, tokens: int) -> int:
        return self.mover.kv.nbytes * tokens // self.client.chunk_tokens
