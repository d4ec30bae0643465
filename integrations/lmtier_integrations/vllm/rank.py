"""One rank in a step: its weights, its blocks, its loads and saves, and its report.

If a load fails, the engine computes the tokens instead. A layer that the engine reads without calling its
hook would be read before it is loaded. So loads only rely on the hooks of layers that have called them
before, and only in steps that are not one CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from vllm.config import VllmConfig

from lmtier.client.client import Client
from lmtier.copy.mover import Load, Mover, Save
from lmtier.core.grant import Grant
from lmtier.errors import DeviceError, LayoutError, MisuseError
from lmtier.format.layout import Shard
from lmtier.rules.worth import EngineCosts
from lmtier.wire.verbs import RUN_SHIFT
from lmtier_integrations.vllm.kv import DeclaredKV
from lmtier_integrations.vllm.loaded_model import LoadedModel
from lmtier_integrations.vllm.messages import NULL_BLOCK, Adapter, LoadPlan, Plan, RankReport, SavePlan
from lmtier_integrations.vllm.places import OnCpu, OnGpu
from lmtier_integrations.vllm.settings import log
from lmtier_integrations.vllm.stats import Stats


class Rank:
    def __init__(
        self,
        config: VllmConfig,
        client: Client,
        declared: DeclaredKV,
        place: OnCpu | OnGpu,
        memory: LoadedModel | None,
        stats: Stats,
    ) -> None:
        self.number = config.parallel_config.rank
        self.block_tokens = config.cache_config.block_size
        self.client, self.declared, self.stats = client, declared, stats
        self.place, self.mover = place, place.mover
        self._memory = memory
        self.plan = Plan()
        self.report = RankReport()
        self.epoch = 0
        """The number of failed loads. An older plan may compute from blocks that were not loaded."""
        self._locked = 0
        """The run of the server whose memory was reported as reached without a detour."""
        self._weights_version = 0
        """How often the model's name has changed. An older plan has keys of other weights."""
        self.seconds = {"load_seconds": 0.0, "save_seconds": 0.0}
        """The seconds of this thread for copies in this step."""

    # ---- what is in memory

    def check_memory(self, memory: LoadedModel, plan: Plan) -> None:
        """Check that memory holds the weights and adapters of the plan's names."""
        report = self.report
        has_changed, was_unnoticed = memory.begin(compares=plan.checks_weights)
        if has_changed:
            report.weights_version = self._weights_version = (
                max(self._weights_version, plan.weights_version) + 1
            )
            report.origins[self.number] = memory.origin
            report.was_unnoticed = was_unnoticed
        if memory.is_asleep:  # it cannot compare; the doubt stays open until it can
            return
        if plan.checks_weights:
            report.checked_weights[plan.step] = 1
        if memory.has_slept:
            report.slept_ranks, memory.has_slept = 1, False
        if (adapters := memory.adapters()) is not None:
            report.adapters[self.number] = adapters

    def keys_match_weights(self, names: int, adapter: Adapter | None, since: int | None = None) -> bool:
        """Whether keys with these names fit the memory, and have since step `since` if one is given."""
        memory = self._memory
        if memory is None:
            return True
        return (
            names >= self._weights_version
            and (since is None or memory.since <= since)
            and memory.holds(adapter, since)
        )

    # ---- copies

    def adopt(self, grant: Grant, *shards: Shard) -> bool:
        """Use it in this process. The slab may change, but only while nothing of the old one is in use."""
        is_adopted = self.client.adopt(grant, *shards)
        self.place.follow(self.client)
        return is_adopted

    def kernel_blocks(self, tables: list[list[int]]) -> list[list[int]]:
        """The block ids of the tensors. A block that has left a window, the null block, becomes -1."""
        ratio = self.declared.kernel_blocks_per_block
        if ratio == 1 and not any(NULL_BLOCK in table for table in tables):
            return tables
        return [
            [block * ratio + part if block != NULL_BLOCK else -1 for block in table for part in range(ratio)]
            for table in tables
        ]

    def nbytes(self, tokens: int) -> int:
        return self.mover.kv.nbytes * tokens // self.client.chunk_tokens

    @property
    def state_bytes(self) -> int:
        return self.place.states.kv.nbytes if self.place.states is not None else 0

    def mover_of(self, plan: SavePlan) -> Mover:
        if not plan.is_state:
            return self.mover
        assert self.place.states is not None
        return self.place.states

    def spent(self, what: str, began: float) -> None:
        seconds = time.perf_counter() - began
        self.seconds[what] += seconds
        self.stats.add(what, seconds)

    # ---- what it reports

    def report_pinned(self) -> None:
        if self.place.is_locked and self._locked != self.client.run_id:
            self._locked = self.client.run_id
            self.report.pinned_ranks[self.client.run_id] = 1

    @property
    def has_news(self) -> bool:
        report = self.report
        return bool(
            report.facts
            or report.loaded
            or report.connected_ranks
            or report.pinned_ranks
            or report.failed_loads != self.epoch
            or report.weights_version
            or report.checked_weights
            or report.slept_ranks
            or report.adapters
        )

    def take_report(self, under_way: int) -> RankReport:
        report = self.report
        report.failed_loads, report.under_way = self.epoch, under_way
        self.report = RankReport(failed_loads=self.epoch)
        return report


@dataclass(eq=False, slots=True)
class _Loading:
    plan: LoadPlan
    load: Load
    weights_version: int
    """The version of the model's name in the plan."""
    state_load: Load | None = None
    """The load of the state after its last chunk, which comes with all of it or with nothing."""
    has_failed: bool = False

    @property
    def done(self) -> bool:
        return self.load.done and (self.state_load is None or self.state_load.done)

    def start(self) -> None:
        self.load.start()
        if self.state_load is not None:
            self.state_load.start()

    def finish(self) -> int:
        """The leading tokens that are right."""
        verified = self.load.finish()
        if self.state_load is None:
            return verified
        state_tokens = self.state_load.tokens
        return verified if (verified, self.state_load.finish()) == (self.load.tokens, state_tokens) else 0


class RankLoads:
    """Loads from the slab into blocks of requests."""

    def __init__(self, rank: Rank, prefill: EngineCosts, *, layerwise: bool) -> None:
        self._rank, self._prefill = rank, prefill
        self.is_layerwise = layerwise
        self.of_step: list[_Loading] = []
        self.unfinished: list[_Loading] = []
        """Unfinished loads for which a step has nothing to do any more."""
        self.copied = 0
        """The tokens that this thread has loaded in this step."""
        self._hooked: set[int] = set()
        """Layers that have called their hooks so far."""
        self._first_hooked: int | None = None
        """The first of them. Layers of a draft model come later, and not in every step."""
        self.listens = False
        """Whether loads of this step rely on hooks."""
        self._is_due, self._is_seen = False, False
        """Whether the first layer must call its hook in this step, and whether it has."""
        self._failed_blocks: set[int] = set()
        self._arrived: set[str] = set()
        self._lost: set[str] = set()
        """Waiting requests whose load has ended; and those of them whose load has failed."""

    @property
    def are_in_step(self) -> bool:
        """Whether the step computes on its own loads."""
        return any(not each.plan.request for each in self.of_step)

    def prepare(self, plan: LoadPlan) -> None:
        rank = self._rank
        # It is adopted first: a load is bound to a slab.
        if not rank.adopt(plan.grant) or not rank.keys_match_weights(rank.plan.weights_version, plan.adapter):
            self._fail(plan)
            self._end(plan)
            return
        blocks = rank.kernel_blocks(plan.block_ids)
        try:
            load = rank.place.load(plan.grant, blocks, plan.computed_tokens, plan.gpu_slots)
            end = self._end_of(plan, plan.grant.state) if plan.grant.state is not None else None
        except (LayoutError, DeviceError) as error:
            log.error("lmtier: a load could not begin, and is computed instead: %s", error)
            self._fail(plan)
            self._end(plan)
            return
        self.of_step.append(_Loading(plan, load, rank.plan.weights_version, end))

    def _end_of(self, plan: LoadPlan, state: Grant) -> Load:
        """The load of the state; its leases are those of the match."""
        states = self._rank.place.states
        if states is None or any(NULL_BLOCK in table for table in plan.state_block_ids):
            raise LayoutError("the engine has no block for the state at the end of what is loaded")
        return states.begin(state, plan.state_block_ids)

    def start(self, *, calls_hooks: bool) -> None:
        """Start the loads that requests wait for; for the others, load the layers without reliable hooks."""
        began = time.perf_counter()
        waited_for = [loading for loading in self.of_step if loading.plan.request]
        for loading in waited_for:
            loading.start()
        self.unfinished += waited_for
        self.of_step = [loading for loading in self.of_step if not loading.plan.request]
        self.listens = self.is_layerwise and calls_hooks and bool(self.of_step)
        self._is_due, self._is_seen = self.listens and bool(self._hooked), False
        for loading in self.of_step:
            if not self._is_due:
                loading.load.all()
                continue
            for layer in self._rank.mover.kv.layers:
                if layer not in self._hooked:
                    loading.load.layer(layer)
        self.end_finished()
        self._rank.spent("load_seconds", began)

    def layer(self, number: int) -> None:
        """The hook of this layer was called."""
        if self._first_hooked is None:
            self._first_hooked = number
        self._is_seen |= number == self._first_hooked
        self._hooked.add(number)
        began = time.perf_counter()
        for loading in self.of_step:
            loading.load.layer(number)
        self._rank.spent("load_seconds", began)

    def finish(self) -> None:
        """Confirm the loads of this step, because the result of the step counts from now on."""
        missed_hook = self._is_due and not self._is_seen
        if missed_hook:
            log.error("lmtier: the engine has stopped calling the hooks of its layers: from now on mode=step")
            self.is_layerwise = False
        for loading in self.of_step:
            loading.load.all()  # some layers did not run in this step, such as those of a draft model
            if missed_hook:
                self._fail(loading.plan)
                loading.has_failed = True
            else:
                loading.load.confirm()
        self.listens = False
        self.unfinished += self.of_step
        self.of_step = []
        self.end_finished()

    def end_finished(self) -> None:
        """End the loads that the device has finished."""
        self._rank.mover.poll()
        if not self.unfinished:  # most steps
            return
        done = [loading for loading in self.unfinished if loading.done]
        if done:
            self.unfinished = [loading for loading in self.unfinished if not loading.done]
            for loading in done:
                self._finish(loading)

    def _finish(self, loading: _Loading) -> None:
        rank, plan, load = self._rank, loading.plan, loading.load
        if not loading.has_failed:
            expected_tokens = load.tokens
            verified = loading.finish()
            if not rank.keys_match_weights(loading.weights_version, plan.adapter):
                verified = 0
            if verified < expected_tokens:
                self._fail(plan, verified)
            copied = expected_tokens - plan.computed_tokens
            rank.stats.add(
                "load_bytes", rank.nbytes(copied) + rank.state_bytes * (plan.grant.state is not None)
            )
            if load.seconds is None:
                self.copied += copied
            else:
                rank.stats.add("load_seconds", load.seconds)
                rank.report.load_tokens += copied
                rank.report.load_seconds += load.seconds
                self._prefill.learn_copy(copied, load.seconds)
        self._end(plan)

    def _end(self, plan: LoadPlan) -> None:
        """The load has no unfinished copy, so its leases may end."""
        self._rank.report.loaded[plan.grant.id] = 1
        if plan.request:
            self._arrived.add(plan.request)
        self._rank.client.disown(plan.grant)

    def _fail(self, plan: LoadPlan, verified: int = 0) -> None:
        """The engine must compute these tokens. Nothing that was computed from them is stored."""
        rank = self._rank
        rank.stats.add("load_failures")
        rank.report.failed.add(plan.grant.id)
        if plan.request:  # nothing was computed from it: the request still waits, and starts again
            self._lost.add(plan.request)
            return
        rank.epoch = max(rank.epoch, rank.plan.failed_loads) + 1
        block_tokens = rank.block_tokens
        first = max(verified, plan.computed_tokens) // block_tokens
        end = len(plan.grant.chunks) * rank.client.chunk_tokens // block_tokens
        (blocks,) = plan.block_ids
        self._failed_blocks.update(blocks[first:end])

    def failed_blocks(self) -> set[int]:
        """The blocks that the engine must compute, because their loads have failed.

        An engine with a draft model asks before it calls wait_for_save. The loads must be checked by then:
        otherwise the engine keeps the token that was computed from a failed one.
        """
        if self.of_step:
            self.finish()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them whose loads have failed."""
        arrived, failed, self._arrived, self._lost = self._arrived, self._lost, set(), set()
        return arrived, failed


class RankSaves:
    """Saves from blocks into reserved room, layer by layer or whole, and commits."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.of_step: list[tuple[SavePlan, Save]] = []
        self.left_over: list[tuple[Grant, Shard]] = []
        """What could not be ended, because the server did not answer; and the shard of this rank."""

    def prepare(self, plan: SavePlan) -> None:
        rank = self._rank
        mover = rank.mover_of(plan)
        if not rank.adopt(plan.grant, mover.kv.shard):
            rank.stats.add("save_failures")
            self.left_over.append((plan.grant, mover.kv.shard))
        elif rank.plan.failed_loads < rank.epoch or not rank.keys_match_weights(
            rank.plan.weights_version, plan.adapter, plan.since
        ):
            self._drop(plan)
        elif not rank.place.can_save(plan.grant):
            self._drop(plan, "unpinned_saves")
        else:
            try:
                tables = plan.block_ids if plan.is_state else rank.kernel_blocks(plan.block_ids)
                save = mover.fill(plan.grant, mover.kv.check(tables))
            except (LayoutError, DeviceError) as error:
                log.error("lmtier: a save could not begin: %s", error)
                self._drop(plan)
                return
            self.of_step.append((plan, save))

    def _drop(self, plan: SavePlan, why: str = "save_failures") -> None:
        """Abort a save before its first copy."""
        self._rank.stats.add(why)
        self._rank.client.abort(plan.grant, self._rank.mover_of(plan).kv.shard)

    def end_left_over(self) -> None:
        """End the reservations that were made while the server stalled. Other runs do not know them."""
        client = self._rank.client
        unended, self.left_over = self.left_over, []
        for grant, shard in unended:
            if client.adopt(grant, shard):
                with suppress(MisuseError):  # given up already, if the connection was lost in between
                    client.abort(grant, shard)
            elif grant.id >> RUN_SHIFT == client.run_id:
                self.left_over.append((grant, shard))

    def layer(self, number: int) -> None:
        began = time.perf_counter()
        self._each(lambda save: save.layer(number), states=False)
        self._rank.spent("save_seconds", began)

    def _each(self, call: Callable[[Save], None], *, states: bool = True) -> None:
        """What the driver refuses costs that save only. That the device is broken the engine finds out."""
        for each in list(self.of_step):
            plan, save = each
            if plan.is_state and not states:
                continue
            try:
                call(save)
            except DeviceError as error:
                log.error("lmtier: a save is given up: %s", error)
                self.of_step.remove(each)
                self._abort(save)

    def _abort(self, save: Save) -> None:
        save.abort()
        self._rank.stats.add("save_failures")

    def finish(self) -> None:
        """The step has computed. If a load has failed, nothing of the step is stored."""
        rank = self._rank
        began = time.perf_counter()
        if rank.plan.failed_loads >= rank.epoch:
            self._each(lambda save: save.all())
        for plan, save in self.of_step:
            if rank.plan.failed_loads < rank.epoch:
                self._abort(save)
                continue
            save.commit()
            rank.stats.add("save_bytes", rank.state_bytes if plan.is_state else rank.nbytes(save.tokens))
        self.of_step = []
        rank.spent("save_seconds", began)
