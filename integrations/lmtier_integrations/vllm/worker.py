"""The worker's half: copies what the scheduler planned between this rank's blocks and the server's slab.

    handle_preemptions        blocks that change hands wait for what is under way in them
    bind_connector_metadata   the step's plan: loads and saves are prepared
    start_load_kv             mode=step: every load, whole; otherwise layers without hooks
    wait_for_layer_load       mode=layerwise on a CPU: this layer of every load
    save_kv_layer             mode=layerwise: this layer of every save
    wait_for_save             what the hooks left over; loads are confirmed, then saves committed

It looks nothing up and never waits for a tier: the chunks of a plan are in the slab already. On a GPU all of
this is enqueued, and loads and saves are finished in a later step, when the mover polls.

    Rank         one rank in a step: what is in memory, its blocks, its report
    RankLoads    what it loads, and what becomes of a load that fails
    RankSaves    what it saves
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmtier.format.keys import Identity
from lmtier.rules.worth import EngineCosts
from lmtier_integrations.vllm.kv import DeclaredKV, declare, kv_groups, state_groups, window_of
from lmtier_integrations.vllm.launch import Launcher
from lmtier_integrations.vllm.loaded_model import LoadedModel
from lmtier_integrations.vllm.messages import Plan, RankFacts, RankReport, WeightsOrigin
from lmtier_integrations.vllm.places import OnCpu, OnGpu, device_of
from lmtier_integrations.vllm.rank import Rank, RankLoads, RankSaves
from lmtier_integrations.vllm.settings import LAYERWISE, START, Settings, check_chunks, log
from lmtier_integrations.vllm.states import declare_states, stand_in
from lmtier_integrations.vllm.stats import Stats

_GUARDS = 2  # blocks that the canary must not change


class Worker:
    def __init__(
        self, config: VllmConfig, cache: KVCacheConfig, settings: Settings, launcher: Launcher
    ) -> None:
        self._config, self._cache, self._settings, self._launcher = config, cache, settings, launcher
        self._name = f"vllm worker {config.parallel_config.rank}"
        launcher.begin(self._name)  # the engine allocates its blocks meanwhile
        self.copies_layers = False
        """Whether the hooks of layers have something to do in this step."""
        self._rests = False
        """Whether this step has nothing to do, as most steps that only decode."""
        self._prefill = EngineCosts()
        self._stages = config.parallel_config.pipeline_parallel_size
        self._was_under_way = False
        """Whether the last report had unfinished copies."""
        self._to_close = ExitStack()
        """The things to close: almost none, if the engine does not reach `register`."""
        self._to_close.callback(launcher.close)
        self._memory = LoadedModel.of_this_process(config)
        if self._memory is not None:
            self._to_close.callback(self._memory.close)
        self.stats = Stats()

    # ---- once

    def register(self, tensors: Mapping[str, Any]) -> None:
        """Prove that these tensors can be saved and loaded, and join the server."""
        client = self._launcher.begun(self._name)
        block_tokens, has_states = self._config.cache_config.block_size, bool(state_groups(self._cache))
        check_chunks(client.chunk_tokens, block_tokens, window_of(self._cache), has_states=has_states)
        if kv_groups(self._cache):
            declared = declare(self._config, self._cache, tensors, client.chunk_tokens)
        else:
            declared = stand_in(self._config, self._cache, tensors, client.chunk_tokens)
        if declared.is_writer:  # only now the shard of this process is known
            client.close()
            client = self._launcher.connect(self._name, declared.shard)
        self._to_close.callback(client.close)
        if self._memory is not None:
            self._memory.look_at_files()
        device = device_of(declared.tensors)
        # With micro-batches a layer's hook is called after a part of the step. Then all goes after the step.
        is_layerwise = self._settings.mode == LAYERWISE and not self._config.parallel_config.use_ubatching
        identity = Identity(model=self._config.model_config.model)
        common_args = client, declared, identity, self._settings.config.gpu
        self._states = states = declare_states(self._config, self._cache, tensors, client.chunk_tokens)
        place: OnCpu | OnGpu
        if device is None:
            place = OnCpu(*common_args, states)
        else:
            pins_at_start = self._settings.pin == START
            place = OnGpu(*common_args, device=device, layerwise=is_layerwise, pins_at_start=pins_at_start)
        self._to_close.callback(place.close)
        self.rank = Rank(self._config, client, declared, place, self._memory, self.stats)
        self.loads = RankLoads(self.rank, self._prefill, layerwise=is_layerwise)
        self.saves = RankSaves(self.rank)
        if self._memory is not None:
            self._memory.before_change = self._settle
        for part, mover in ((declared, place.mover), (states, place.states)):
            if part is not None and mover is not None:
                mover.prove(self._spare_blocks(part), block_bytes=part.block_bytes)
                layout = part.layout.to_json().decode()
                log.debug("lmtier: %s serves %s as %s", self._name, part.shard, layout)

    def _spare_blocks(self, declared: DeclaredKV) -> list[int]:
        """Blocks that no request has yet; never the engine's null block, which is number 0."""
        kernel_blocks = self._cache.num_blocks * declared.kernel_blocks_per_block
        need = 2 * declared.layout.blocks * declared.table_count + _GUARDS
        first = max(declared.kernel_blocks_per_block, kernel_blocks - need)
        return list(range(kernel_blocks - 1, first - 1, -1))

    def _facts(self) -> RankFacts:
        rank, declared = self.rank, self.rank.declared
        return RankFacts(
            declared.layout.to_json(),
            declared.shard,
            rank.client.run_id,
            declared.backend_without_prefixes,
            rank.place.is_asynchronous,
            self._memory.origin if self._memory is not None else WeightsOrigin(),
            (self._states.layout.to_json(), self._states.shard) if self._states is not None else None,
        )

    def close(self) -> None:
        """End all copies, then unlock the slab, then leave the server."""
        self._to_close.close()

    # ---- a step

    def reuse(self, plan: Plan) -> None:
        """Called before the engine uses blocks that other requests had."""
        if self.saves.of_step:  # a stage of a pipeline that drafts ends its steps without wait_for_save
            self.saves.finish()
        if plan.reused_blocks:
            self.rank.mover.order_before_reuse(self.rank.kernel_blocks([plan.reused_blocks]))
        if plan.lent:
            self.rank.mover.wait_until_uncopied(self.rank.kernel_blocks([plan.lent]))

    def begin(self, plan: Plan) -> None:
        rank, loads, saves = self.rank, self.loads, self.saves
        self.copies_layers = False
        rank.plan = plan
        if (memory := self._memory) is not None:
            memory.step = plan.step
            if plan.checks_weights or memory.has_news:
                rank.check_memory(memory, plan)
        self._rests = not (plan.has_work or self._has_more())
        if self._rests:
            return
        self.loads.end_finished()
        if plan.run:
            rank.client.step()
            rank.report.connected_ranks[rank.client.run_id] = 1
        rank.place.follow(rank.client)
        saves.end_left_over()
        for load in plan.loads:
            loads.prepare(load)
        for save in plan.saves:
            if save.is_state or rank.declared.is_writer:
                saves.prepare(save)
        rank.seconds = {"load_seconds": 0.0, "save_seconds": 0.0}
        loads.copied = 0
        has_step_loads = loads.are_in_step
        self.copies_layers = loads.is_layerwise and (has_step_loads or bool(saves.of_step))
        rank.place.begin(plan.prefill_work, waits=has_step_loads)

    def _has_more(self) -> bool:
        """Whether earlier steps have left work to do, or something to report."""
        rank = self.rank
        return bool(
            rank.mover.under_way
            or self.loads.unfinished
            or self.saves.left_over
            or self._was_under_way
            or rank.place.is_busy
            or rank.has_news
        )

    def wait_for_layer(self, name: str) -> None:
        if self.loads.listens and (number := self.rank.declared.layer_numbers.get(name)) is not None:
            self.loads.layer(number)

    def save_layer(self, name: str) -> None:
        saves = self.saves
        if (
            self.copies_layers
            and saves.of_step
            and (number := self.rank.declared.layer_numbers.get(name)) is not None
        ):
            saves.layer(number)

    def finish(self) -> None:
        """Called after the forward, when the blocks have the KV of this step."""
        if self._rests:
            return
        rank, loads = self.rank, self.loads
        for work, seconds in rank.place.end(sum(rank.seconds.values())):
            self._learn(*work, seconds)
        if loads.of_step:
            loads.finish()
        if loads.copied:
            self._prefill.learn_copy(loads.copied, rank.seconds["load_seconds"])
        if self.saves.of_step:
            self.saves.finish()
        self.loads.end_finished()
        rank.place.add_to(self.stats)
        self.copies_layers = False

    def _learn(self, tokens: int, area: float, seconds: float) -> None:
        """Learn the cost of computing. The first rank sends it to the server, which decides about loads."""
        expected = self._prefill.learn(tokens, area, seconds * self._stages)
        if self.rank.number == 0:
            self.stats.add("prefill_seconds", seconds * self._stages)
            self.stats.add("prefill_expected_seconds", expected)
            if (cost := self._prefill.cost) is not None:
                self.rank.client.costs(cost)

    def _settle(self) -> None:
        """Wait for all copies and end them: the engine is about to change or unmap memory."""
        if self.saves.of_step:
            self.saves.finish()
        self.rank.mover.drain()
        self.loads.end_finished()

    # ---- after a step

    def report(self) -> RankReport | None:
        if self._rests:
            return None
        rank = self.rank
        if rank.plan.wants_facts:
            rank.report.facts[rank.number] = self._facts()
        rank.report_pinned()
        under_way = rank.mover.under_way
        if not (rank.has_news or under_way or self._was_under_way):
            return None
        self._was_under_way = under_way > 0
        return rank.take_report(under_way)
