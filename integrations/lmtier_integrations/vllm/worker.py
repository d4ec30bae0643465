"""The worker's half: copies what the scheduler planned between this rank's blocks and the server's slab.

    handle_preemptions        blocks that change hands wait for what is under way in them
    bind_connector_metadata   the step's plan: loads and saves are prepared
    start_load_kv             mode=step: every load, whole; otherwise layers without hooks
    wait_for_layer_load       mode=layerwise on a CPU: this layer of every load
    save_kv_layer             mode=layerwise: this layer of every save
    wait_for_save             what the hooks left over; loads are confirmed, then saves committed

A layer that the engine reads without calling its hook would be read before it was loaded. So loads are left
only to hooks of layers that were seen to call them, and in steps that are not one CUDA graph.

It never looks anything up, and never waits for a tier: what a plan names is in the slab already. On a GPU all
of this is enqueued, and what is said above to be done is done in a later step, whose mover polls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmtier.cache import Match, Reservation
from lmtier.errors import DeviceError, LayoutError, MisuseError
from lmtier.keys import Identity
from lmtier.mover import Load, Save
from lmtier.server.client import Client
from lmtier.server.engines import RUN_SHIFT
from lmtier.worth import Prefill
from lmtier_integrations.vllm.kv import Declared, declare, window_of
from lmtier_integrations.vllm.launch import Launcher
from lmtier_integrations.vllm.memory import Memory, files_of
from lmtier_integrations.vllm.messages import (
    NULL_BLOCK,
    Adapter,
    LoadPlan,
    Plan,
    RankFacts,
    Report,
    SavePlan,
)
from lmtier_integrations.vllm.places import OnCpu, OnGpu, device_of
from lmtier_integrations.vllm.settings import LAYERWISE, START, Settings, check_chunks
from lmtier_integrations.vllm.stats import Stats

log = logging.getLogger("vllm.lmtier")

_GUARDS = 2  # blocks beside the canary's that must not change


@dataclass(eq=False, slots=True)
class _Loading:
    plan: LoadPlan
    match: Match
    load: Load
    names: int
    """Of the plan: what the model was called by."""
    has_failed: bool = False


class Worker:
    def __init__(
        self, config: VllmConfig, cache: KVCacheConfig, settings: Settings, launcher: Launcher
    ) -> None:
        self._config, self._cache, self._settings, self._launcher = config, cache, settings, launcher
        self._is_layerwise = False
        self.copies_layers = False
        """Whether the hooks of layers have something to do in this step."""
        self.loads: list[_Loading] = []
        """Of this step."""
        self._landing: list[_Loading] = []
        """On their way, and nothing in a step has to be done for them any more."""
        self._saves: list[tuple[SavePlan, Save]] = []
        self._leaving: list[tuple[SavePlan, Save]] = []
        """Saves that fill places in GPU memory too, and may be under way."""
        self._plan = Plan()
        self._rests = False
        """Whether nothing is planned for this step, and nothing is left of those before: most only decode."""
        self._prefill = Prefill()
        self._stages = config.parallel_config.pipeline_parallel_size
        self._copying = {"load_seconds": 0.0, "save_seconds": 0.0}
        self._copied = 0
        """What the step has spent on copies, and tokens that it has loaded, on this thread."""
        self._hooked: set[int] = set()
        """Layers that have called their hooks so far."""
        self._first_hooked: int | None = None
        """The one that was first. A draft model's come later, and not in every step."""
        self._listens = False
        """Whether loads of this step are there for hooks to bring about."""
        self._is_due, self._is_seen = False, False
        """Whether the first must call in this step, because loads are left to hooks; whether it has."""
        self._epoch = 0
        self._failed_blocks: set[int] = set()
        self._arrived: set[str] = set()
        self._lost: set[str] = set()
        """Requests that waited for a load: it has ended, and of those, it has failed."""
        self._left_over: list[Reservation] = []
        """Reservations that could not be ended, because the server did not answer just then."""
        self._report = Report()
        self._was_under_way = False
        """Whether the last report said that something was."""
        self._leave = ExitStack()
        """What is to be closed: almost nothing, if the engine does not get as far as `register`."""
        self._memory = Memory.of_this_process(config)
        self._names = 0
        """Counts names of the model: plans with older ones are of other weights."""
        if self._memory is not None:
            self._leave.callback(self._memory.close)
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
        self._files = files_of(self._config) if self._memory is not None else ""
        device = device_of(declared.tensors)
        if device is not None and self._cache.needs_kv_cache_zeroing:
            raise LayoutError(
                "lmtier serves engines on GPUs whose layers keep KV in one precision: others zero the blocks "
                "that they hand out, some before they ask whether a copy of those is under way"
            )
        self._is_layerwise = self._settings.mode == LAYERWISE
        of_all = (
            self.client,
            declared,
            Identity(model=self._config.model_config.model),
            self._settings.config.gpu,
        )
        self._place: OnCpu | OnGpu
        if device is None:
            self._place = OnCpu(*of_all)
        else:
            pins_at_start = self._settings.pin == START
            self._place = OnGpu(
                *of_all, device=device, layerwise=self._is_layerwise, pins_at_start=pins_at_start
            )
        self._leave.callback(self._place.close)
        self.mover = self._place.mover
        self.mover.prove(self._spare_blocks(declared), block_bytes=declared.block_bytes)
        log.info("lmtier: rank %d serves %s as %s", rank, declared.shard, declared.layout.to_json().decode())

    def _spare_blocks(self, declared: Declared) -> list[int]:
        """Blocks that no request has yet; never the engine's null block, which is number 0."""
        kernel_blocks = self._cache.num_blocks * declared.ratio
        need = 2 * declared.layout.blocks * (max(declared.tables) + 1) + _GUARDS
        first = max(declared.ratio, kernel_blocks - need)
        return list(range(kernel_blocks - 1, first - 1, -1))

    def _facts(self) -> RankFacts:
        declared = self._declared
        return RankFacts(
            declared.layout.to_json(),
            declared.shard,
            self.client.run,
            declared.from_scratch,
            self._place.is_asynchronous,
            self._files,
        )

    def close(self) -> None:
        """In this order: nothing is under way any more, the slab is unpinned, the server is left."""
        self._leave.close()

    # ---- a step

    def reuse(self, plan: Plan) -> None:
        """Before the engine does anything to blocks that others had."""
        if self._saves:  # a stage of a pipeline that drafts ends its steps without wait_for_save
            self._finish_saves()
        if plan.taken:
            self.mover.reuse(self._kernel_blocks([plan.taken]))

    def begin(self, plan: Plan) -> None:
        self._plan = plan
        self.copies_layers = False
        if (memory := self._memory) is not None:
            memory.step = plan.step
            if plan.compares or memory.has_news:
                self._look(memory, plan)
        self._rests = not (plan.has_work or self._has_more())
        if self._rests:
            return
        self._land()
        if plan.run:
            self.client.step()
            self._report.runs[self.client.run] = 1
        self._place.follow(self.client)
        if self._left_over:
            self._end_left_over()
        for each in plan.loads:
            self._prepare_load(each)
        if self._declared.writes:
            for save in plan.saves:
                self._prepare_save(save)
        self._copying = {"load_seconds": 0.0, "save_seconds": 0.0}
        self._copied = 0
        waits = any(not each.plan.request for each in self.loads)
        self.copies_layers = self._is_layerwise and (waits or bool(self._saves))
        self._place.begin(plan.computes, waits=waits)

    def _look(self, memory: Memory, plan: Plan) -> None:
        """Is in memory what the plan's names were made of?"""
        report = self._report
        has_changed, was_unnoticed = memory.begin(compares=plan.compares)
        rank = self._config.parallel_config.rank
        if has_changed:
            report.names = self._names = max(self._names, plan.names) + 1
            report.origins[rank] = memory.origin
            report.was_unnoticed = was_unnoticed
        if plan.compares:
            report.compared[plan.step] = 1
        if memory.has_slept:
            report.slept, memory.has_slept = 1, False
        if (adapters := memory.adapters()) is not None:
            report.adapters[rank] = adapters

    def _is_named_right(self, names: int, adapter: Adapter | None, since: int | None = None) -> bool:
        """Whether names that count `names` are of what is in memory; if asked, since that step."""
        memory = self._memory
        if memory is None:
            return True
        return (
            names >= self._names and (since is None or memory.since <= since) and memory.holds(adapter, since)
        )

    def _has_more(self) -> bool:
        """Whether something of earlier steps is to be done, or to be told."""
        return bool(
            self.mover.under_way
            or self._landing
            or self._leaving
            or self._left_over
            or self._was_under_way
            or self._place.is_busy
            or self._is_news()
        )

    def _prepare_load(self, plan: LoadPlan) -> None:
        match = plan.match(self.mover.form)
        if not self._adopt(match):  # first: a load is bound to a slab
            self._fail(plan)
            self._end_load(plan, match)
            return
        if not self._is_named_right(self._plan.names, plan.adapter):
            self._fail(plan)
            self._end_load(plan, match)
            return
        blocks = self._kernel_blocks(plan.block_ids)
        try:
            load = self._place.load(match, blocks, plan.computed_tokens, plan.near)
        except (LayoutError, DeviceError) as error:
            log.error("lmtier: a load could not begin, and is computed instead: %s", error)
            self._fail(plan)
            self._end_load(plan, match)
            return
        self.loads.append(_Loading(plan, match, load, self._plan.names))

    def _adopt(self, thing: Match | Reservation) -> bool:
        """This may bring another slab, but only while nothing of the one before is held, and so copied."""
        is_adopted = self.client.adopt(thing)
        self._place.follow(self.client)
        return is_adopted

    def _prepare_save(self, plan: SavePlan) -> None:
        reservation = plan.reservation(self.mover.form, self.mover.kv.shard)
        if not self._adopt(reservation):
            self.stats.add("save_failures")
            self._left_over.append(reservation)
            self._end_save(plan, is_good=False)
        elif self._plan.epoch < self._epoch or not self._is_named_right(
            self._plan.names, plan.adapter, plan.since
        ):
            self._drop_save(plan, reservation)
        elif not self._place.can_save(reservation):
            self._drop_save(plan, reservation, "unpinned_saves")
        else:
            try:
                blocks = self.mover.kv.check(self._kernel_blocks(plan.block_ids))
                save = self._place.save(reservation, dict(zip(plan.chunks, blocks, strict=True)), plan.near)
            except (LayoutError, DeviceError) as error:
                log.error("lmtier: a save could not begin: %s", error)
                self._drop_save(plan, reservation)
                return
            self._saves.append((plan, save))

    def _drop_save(self, plan: SavePlan, reservation: Reservation, why: str = "save_failures") -> None:
        """Before anything of it was copied."""
        self.stats.add(why)
        self.client.abort(reservation, self.mover.kv.shard)
        self._end_save(plan, is_good=False)

    def _end_left_over(self) -> None:
        """Give back what was reserved while the server stalled. Another run of it knows nothing of that."""
        waiting, self._left_over = self._left_over, []
        for reservation in waiting:
            if self.client.adopt(reservation):
                with suppress(MisuseError):  # given up already, if the connection was lost in between
                    self.client.abort(reservation, self.mover.kv.shard)
            elif reservation.id >> RUN_SHIFT == self.client.run:
                self._left_over.append(reservation)

    def start_load(self, *, calls_hooks: bool) -> None:
        """Of `loads`, those that requests wait for; of others, layers whose hooks are not relied upon."""
        began = time.perf_counter()
        waited_for = [each for each in self.loads if each.plan.request]
        for each in waited_for:
            each.load.start()
        self._landing += waited_for
        self.loads = [each for each in self.loads if not each.plan.request]
        self._listens = self._is_layerwise and calls_hooks and bool(self.loads)
        self._is_due, self._is_seen = self._listens and bool(self._hooked), False
        for each in self.loads:
            if not self._is_due:
                each.load.all()
                continue
            for layer in self.mover.kv.layers:
                if layer not in self._hooked:
                    each.load.layer(layer)
        self._land()
        self._spent("load_seconds", began)

    def wait_for_layer(self, name: str) -> None:
        if not self._listens or (number := self._declared.numbers.get(name)) is None:
            return
        if self._first_hooked is None:
            self._first_hooked = number
        self._is_seen |= number == self._first_hooked
        self._hooked.add(number)
        began = time.perf_counter()
        for each in self.loads:
            each.load.layer(number)
        self._spent("load_seconds", began)

    def save_layer(self, name: str) -> None:
        if self.copies_layers and self._saves and (number := self._declared.numbers.get(name)) is not None:
            began = time.perf_counter()
            self._each_save(lambda save: save.layer(number))
            self._spent("save_seconds", began)

    def _each_save(self, work: Callable[[Save], None]) -> None:
        """What the driver refuses costs that save only. That the device is broken the engine finds out."""
        for each in list(self._saves):
            plan, save = each
            try:
                work(save)
            except DeviceError as error:
                log.error("lmtier: a save is given up: %s", error)
                self._saves.remove(each)
                self._abort_save(plan, save)

    def _abort_save(self, plan: SavePlan, save: Save) -> None:
        save.abort()
        self.stats.add("save_failures")
        if plan.near is not None:
            self._leaving.append((plan, save))

    def finish(self) -> None:
        """After the forward: what this step computed is in its blocks."""
        if self._rests:
            return
        for work, seconds in self._place.end(sum(self._copying.values())):
            self._learn(*work, seconds)
        if self.loads:
            self._finish_loads()
        if self._copied:
            self._prefill.copied(self._copied, self._copying["load_seconds"])
        if self._saves:
            self._finish_saves()
        self._land()
        self._place.tell(self.stats)
        self.copies_layers = False

    def _learn(self, tokens: int, area: float, seconds: float) -> None:
        """What computing takes, for the server: it decides what is worth loading. By the first rank."""
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
        """What was computed on them counts from here on, so what is compared is compared now."""
        is_bad = self._is_due and not self._is_seen
        if is_bad:
            log.error("lmtier: the engine has stopped calling the hooks of its layers: from now on mode=step")
            self._is_layerwise = False
        for each in self.loads:
            each.load.all()  # of layers that did not run in this step: of a draft model, say
            if is_bad:
                self._fail(each.plan)
                each.has_failed = True
            else:
                each.load.confirm()
        self._listens = False
        self._landing += self.loads
        self.loads = []
        self._land()

    def _land(self) -> None:
        """Finish what the device is done with."""
        self.mover.poll()
        if not (self._landing or self._leaving):
            return
        done = [each for each in self._landing if each.load.done]
        if done:
            self._landing = [each for each in self._landing if not each.load.done]
            for each in done:
                self._finish_load(each)
        for plan, save in [each for each in self._leaving if each[1].done]:
            self._leaving.remove((plan, save))
            self._end_save(plan, is_good=not save.reservation.aborted)

    def _finish_load(self, loading: _Loading) -> None:
        plan, load = loading.plan, loading.load
        if not loading.has_failed:
            whole = load.tokens
            believed = load.finish()
            if not self._is_named_right(loading.names, plan.adapter):
                believed = 0
            if believed < whole:
                self._fail(plan, believed)
            copied = whole - plan.computed_tokens
            self.stats.add("load_bytes", self._bytes(copied))
            if load.seconds is None:
                self._copied += copied
            else:
                self.stats.add("load_seconds", load.seconds)
                self._prefill.copied(copied, load.seconds)
        self._end_load(plan, loading.match)

    def _end_load(self, plan: LoadPlan, match: Match) -> None:
        """Nothing of it is under way, so its leases may end."""
        self._report.loaded[plan.id] = 1
        if plan.request:
            self._arrived.add(plan.request)
        self.client.disown(match)

    def _finish_saves(self) -> None:
        began = time.perf_counter()
        if self._plan.epoch >= self._epoch:
            self._each_save(lambda save: save.all())
        for plan, save in self._saves:
            if self._plan.epoch < self._epoch:
                self._abort_save(plan, save)
                continue
            save.commit()
            self.stats.add("save_bytes", self._bytes(save.tokens))
            if plan.near is not None:
                self._leaving.append((plan, save))
        self._saves = []
        self._spent("save_seconds", began)

    def _end_save(self, plan: SavePlan, *, is_good: bool) -> None:
        """Its places in GPU memory are written no more."""
        if plan.near is not None:
            self._report.saved[plan.id] = 1
            if not is_good:
                self._report.failed.add(plan.id)

    def _fail(self, plan: LoadPlan, believed: int = 0) -> None:
        """Tell the engine what to compute after all; nothing that was computed on it is stored."""
        self.stats.add("load_failures")
        self._report.failed.add(plan.id)
        if plan.request:  # nothing was computed on it: it still waits, and starts anew
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
        if self.loads:
            self._finish_loads()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def arrivals(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them that have to be computed."""
        arrived, lost, self._arrived, self._lost = self._arrived, self._lost, set(), set()
        return arrived, lost

    def report(self) -> Report | None:
        if self._rests:
            return None
        report = self._report
        if self._plan.asks:
            report.facts[self._config.parallel_config.rank] = self._facts()
        under_way = self.mover.under_way
        if not (self._is_news() or under_way or self._was_under_way):
            return None
        report.epoch, report.under_way = self._epoch, under_way
        self._was_under_way = under_way > 0
        self._report = Report(epoch=self._epoch)
        return report

    def _is_news(self) -> bool:
        report = self._report
        return bool(
            report.facts
            or report.loaded
            or report.saved
            or report.runs
            or report.epoch != self._epoch
            or report.names
            or report.compared
            or report.slept
            or report.adapters
        )

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
