"""The scheduler's half: follows the engine's requests, and plans each step for the workers.

on_new_request               look it up; what lies below the slab is on its way up from here
get_num_new_matched_tokens   so many tokens, or "ask again"; a promise is verified and leased already
update_state_after_alloc     the promise is taken, or is not
build_connector_meta         the step's plan: those loads, and chunks that are complete
update_connector_output      ranks have copied: the lease ends; or a load has failed, and is undone
request_finished             whatever it still held is released

followed    one request: its keys, what it waits for, what of it is stored
reuse       what a request may reuse, and how long it waits for it
storing     what a step stores
copying     what ranks load and save just now
said        what a request says: its salt, its session, its hints, …
names       what KV is called, by weights, adapters and media
doubts      whether ranks still have the weights that names say
foreign     what another connector has loaded, which is not stored
undoing     what the engine believed of blocks whose load has failed
limits      what keeps an engine from loading
steps       what vLLM says of a step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from lmtier.config import parse_seconds
from lmtier.errors import LayoutError, size_text
from lmtier.format.layout import Layout, form_of
from lmtier_integrations.vllm.events import KVEvents
from lmtier_integrations.vllm.failed_load_repair import FailedLoadRepair
from lmtier_integrations.vllm.kv import kv_groups, state_groups, window_of
from lmtier_integrations.vllm.kv_naming import KVNaming
from lmtier_integrations.vllm.launch import Launcher
from lmtier_integrations.vllm.limits import pools_whole_prompts, returns_experts
from lmtier_integrations.vllm.load_planner import LoadPlanner
from lmtier_integrations.vllm.load_tracker import LoadTracker
from lmtier_integrations.vllm.messages import NULL_BLOCK, Plan, RankFacts, RankReport
from lmtier_integrations.vllm.other_connector_kv import OtherConnectorKV
from lmtier_integrations.vllm.places import is_on_gpu
from lmtier_integrations.vllm.request_inputs import RequestHints, is_readable, said_by
from lmtier_integrations.vllm.save_planner import SavePlanner
from lmtier_integrations.vllm.settings import Settings, check_chunks, log
from lmtier_integrations.vllm.stats import Stats
from lmtier_integrations.vllm.steps import blocks_taken, prefill_work_of
from lmtier_integrations.vllm.tracked_request import SchedulerParts, TrackedRequest
from lmtier_integrations.vllm.weight_checks import WeightChecks

_PROMPTS = 8  # average tokens per request from which on a step counts as one that computes prompts


class Scheduler:
    def __init__(
        self, config: VllmConfig, cache: KVCacheConfig, settings: Settings, launcher: Launcher
    ) -> None:
        transfer = config.kv_transfer_config
        window, groups = window_of(cache), (kv_groups(cache), state_groups(cache))
        has_windows = bool(window) or bool(groups[1]) or len(cache.kv_cache_groups) > 1
        has_stages = config.parallel_config.pipeline_parallel_size > 1
        self.undoing = FailedLoadRepair()
        self._loads_in_steps = self.undoing.is_possible and not has_windows and not has_stages
        """Whether loads may be part of a step. `LoadPlanner` decides for each request.

        If blocks leave windows, a load that fails within a step cannot be undone: the engine would compute
        from earlier blocks that were never loaded. Of several stages only one knows that its load has failed.
        """
        self._may_wait = is_on_gpu(config) or not self._loads_in_steps
        """Whether some loads are made beside steps."""
        self._launcher = launcher
        self._loads, self._saves = transfer.is_kv_consumer, transfer.is_kv_producer
        if pools_whole_prompts(config):
            self._loads = self._saves = False
            log.warning(
                "lmtier: vLLM has no prefix caching for this pooling model, which mostly means that it needs "
                "all tokens of a prompt in one step: nothing is loaded or stored"
            )
        if self._loads and returns_experts(config):
            self._loads = False
            log.warning(
                "lmtier: enable_return_routed_experts returns experts of all tokens, and those of loaded "
                "tokens are not known: nothing is loaded; what is computed is still saved"
            )
        self._block_tokens = config.cache_config.block_size
        self._ranks = config.parallel_config.world_size
        self._client = client = launcher.connect("vllm scheduler")
        check_chunks(client.chunk_tokens, self._block_tokens, window, has_states=bool(groups[1]))
        if self._loads and transfer.kv_load_failure_policy != "recompute":
            log.warning(
                'lmtier: kv_load_failure_policy is "fail": if the cache loses a promised chunk, the request '
                'fails; set it to "recompute", which only costs time'
            )
        self.stats = Stats()
        told = config.kv_events_config
        self._events = KVEvents(client) if told is not None and told.enable_kv_cache_events else None
        self._names = KVNaming(config, settings, client)
        self._load_tracker = LoadTracker(self._ranks, settings.config.gpu)
        parts = SchedulerParts(client, self._names, self._load_tracker, self.stats, self._events)
        shares = bool(config.cache_config.enable_prefix_caching)
        self._reuse = LoadPlanner(
            parts,
            block_tokens=self._block_tokens,
            loads_in_steps=self._loads_in_steps,
            shares=shares,
            groups=groups,
        )
        self._storing = SavePlanner(
            parts,
            block_tokens=self._block_tokens,
            step_tokens=config.scheduler_config.max_num_batched_tokens,
            has_windows=has_windows,
            saves_decode=settings.save_decode,
            groups=groups,
        )
        self._other_connector_kv = OtherConnectorKV(self._block_tokens)
        self._all: dict[str, Request] = {}
        """The engine's requests, also those that are not followed."""
        self._said: dict[str, RequestHints] = {}
        """What those with hints say."""
        self._declined: set[str] = set()
        """Why requests were not followed, as far as it was said."""
        self._tracked: dict[str, TrackedRequest] = {}
        self._common_run = 0
        """The run of the server to which all ranks are connected. Only its promises can be loaded."""
        self._is_asynchronous = False
        """Whether copies of ranks continue after a step."""
        self._pinned_ranks: Counter[int] = Counter()
        """How many ranks reach all memory of a run of the server without a detour."""
        self._unserved = 0
        self._weight_checks = WeightChecks(self._ranks, parse_seconds(settings.check_weights))
        self._lent: dict[str, Sequence[Sequence[int]]] = {}
        """The blocks of requests that have got some since the last plan, and load nothing from here."""
        self._wrong: list[bytes] = []
        """Stored chunks of other weights than their names say, until the server has deleted them."""
        self._model = config.model_config.model
        if launcher.is_first and (self._loads or self._saves):
            log.info("lmtier: caching in %s", launcher.described(client, settings.config.gpu))

    def _apply_facts(self, ranks: Mapping[int, RankFacts]) -> None:
        """Apply the facts of the workers, which report them in the first step. That step computes nothing.

        Rejected: vLLM's handshake. With several connectors (MultiConnector) it carries the data of only one.
        """
        if len(ranks) != self._ranks:
            raise LayoutError(
                f"only {len(ranks)} of {self._ranks} workers have reported their KV: lmtier needs an "
                "executor of vLLM that gathers the reports of all workers"
            )
        layouts = {facts.layout for facts in ranks.values()}
        if len(layouts) != 1:
            raise LayoutError(f"the workers disagree about the model's KV: {sorted(layouts)}")
        prefixless_backends = {facts.backend_without_prefixes for facts in ranks.values()} - {""}
        if self._loads and prefixless_backends:
            self._loads = False
            log.warning(
                "lmtier: %s computes every prompt from its first token, and would answer wrongly behind "
                "loaded KV: nothing is loaded; what is computed is still saved",
                ", ".join(prefixless_backends),
            )
        layout = Layout.from_json(layouts.pop())
        form = form_of(layout, dict.fromkeys(ranks[rank].shard for rank in sorted(ranks)))
        states = [states for rank in sorted(ranks) if (states := ranks[rank].states) is not None]
        if len({layout for layout, _ in states}) > 1:
            raise LayoutError(f"the workers disagree about the model's states: {sorted(states)}")
        ends = form_of(Layout.from_json(states[0][0]), (shard for _, shard in states)) if states else None
        origins = {rank: facts.origin for rank, facts in ranks.items()}
        self._names.meet(layout, form, origins, ends, is_watched=self._weight_checks.sees_engine)
        self._is_asynchronous = any(facts.is_asynchronous for facts in ranks.values())
        self._reuse.copies_beside = self._is_asynchronous
        if self._launcher.is_first and (self._loads or self._saves):
            verbs = [*(["loads"] if self._loads else []), *(["stores"] if self._saves else [])]
            log.info(
                "lmtier: %s KV of %s in chunks of %d tokens (%s), for %s",
                *(" and ".join(verbs), self._model, self._client.chunk_tokens, size_text(sum(form.sizes))),
                "this run of the engine only" if self._names.is_private else "all engines with its weights",
            )
        runs = {facts.run for facts in ranks.values()}
        self._common_run = runs.pop() if len(runs) == 1 else 0

    @property
    def wants_a_step(self) -> bool:
        """Whether lmtier needs a step, even one that computes nothing."""
        is_at_work = self._load_tracker.is_under_way or self._client.has_late_reservation
        return self._names.form is None or is_at_work or self._weight_checks.wants_a_step

    @property
    def _is_ready(self) -> bool:
        return (
            self._names.form is not None
            and self._common_run == self._client.run_id
            and not self._weight_checks.is_pending
        )

    def _may_load(self, tracked: TrackedRequest) -> bool:
        if self._may_wait and self._names.is_read_later(tracked.request, tracked.adapter):
            return False  # its files may change until then, and the load would be of those before
        if tracked.said.is_remote:
            return False
        return self._loads and self._is_ready and not tracked.request.skip_reading_prefix_cache

    # ---- requests

    def add(self, request: Request) -> None:
        """A new request. It is looked up at once, so that tiers below read while it waits its turn.

        Whatever it brings, this raises nothing.
        """
        self._all[request.request_id] = request
        said = said_by(request)
        if said.hints:
            self._said[request.request_id] = said
        if why_not := self._track(request, said):
            self.stats.add("declined_requests")
            if why_not not in self._declined:
                log.info("lmtier: a request is not cached, and others like it are only counted: %s", why_not)
            self._declined.add(why_not)

    def _track(self, request: Request, said: RequestHints) -> str:
        """Returns why it is not followed, so that nothing of it is loaded or stored; empty if it is."""
        adapter = self._names.adapter_of(request)
        media = self._names.media.of(request, "" if adapter is None else adapter[1] or "unknown")
        if media is None:
            self._distrust({each.identifier for each in request.mm_features if is_readable(each.identifier)})
            return said.why_not or "no name identifies an image, audio or video of it"
        if said.why_not:
            return said.why_not
        if adapter is not None and not adapter[1]:
            return "the content of its adapter is not known"
        tracked = TrackedRequest(request, media, adapter, self._client, self._names, said)
        self._tracked[request.request_id] = tracked
        if self._may_load(tracked) and self._reuse.has_room(self._tracked.values()):
            with self._client.batched():
                self._reuse.look_up(tracked)
                if tracked.match is None and self._saves:
                    self._storing.reserve_ahead(tracked)
        return ""

    def _distrust(self, identifiers: set[str]) -> None:
        """Stop following requests with these names: two contents share each, and vLLM may mix them up."""
        for tracked in list(self._tracked.values()):
            if any(each.identifier in identifiers for each in tracked.request.mm_features):
                self.untrack(tracked.request)

    def matched(self, request: Request, computed_tokens: int) -> int | None:
        """How many tokens beyond those computed can be loaded; None: not known yet."""
        self._other_connector_kv.looked_up(request.request_id, computed_tokens)
        if self._names.form is None or self._weight_checks.is_pending:
            return None  # known after the workers' next report
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0
        tracked.since = self._weight_checks.first_step(computed_tokens)
        if not self._may_load(tracked):
            tracked.release_match()
            return 0
        tokens = self._reuse.matched(tracked, computed_tokens)
        if tokens and not self._client.is_server_alive:  # nor are the matches of all that wait
            for waiting in self._tracked.values():
                waiting.release_match()
            tracked.rewind(computed_tokens)
            return 0
        return tokens

    def waits(self, request: Request) -> bool:
        """Whether the tokens that were just promised are loaded beside steps, and the request waits."""
        return self._tracked[request.request_id].waits

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine has blocks for the request, and accepts so many of the promised tokens."""
        if self._is_asynchronous and not external_tokens:
            self._lent[request.request_id] = blocks.get_block_ids()
        if (tracked := self._tracked.get(request.request_id)) is not None:
            if not tracked.is_counted and tracked.stored_chunks:
                self.stats.add("found_tokens", tracked.stored_chunks * self._client.chunk_tokens)
            tracked.is_counted = True
            self._reuse.allocated(tracked, blocks, external_tokens)
            if external_tokens:
                self._other_connector_kv.loads(request.request_id, external_tokens)

    def sources(self, request: Request, external_tokens: int) -> dict[str, int]:
        """The tiers of the tokens that were just promised."""
        tracked = self._tracked.get(request.request_id)
        return self._reuse.sources(tracked, external_tokens) if tracked is not None else {}

    def finished(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Its hints are sent now: they are about what it has stored."""
        self.untrack(request)
        self._all.pop(request.request_id, None)
        self._other_connector_kv.finished(request.request_id, request.num_computed_tokens, tables)
        if (said := self._said.pop(request.request_id, None)) is not None:
            for envelope in said.hints:
                self._client.hint(envelope, salt=said.salt, session=said.session)

    def untrack(self, request: Request) -> None:
        if (tracked := self._tracked.pop(request.request_id, None)) is not None:
            self._reuse.forget(tracked)
            tracked.withdraw()

    # ---- a step

    def plan(self, output: SchedulerOutput) -> Plan:
        weight_checks, naming, client = self._weight_checks, self._names, self._client
        weight_checks.step += 1
        plan = Plan(
            failed_loads=self._load_tracker.failed_loads,
            step=weight_checks.step,
            weights_version=naming.count,
            checks_weights=weight_checks.is_pending,
        )
        if naming.form is None:
            plan.wants_facts = plan.checks_weights = True
            return plan
        if client.unserved != self._unserved:
            self.stats.add("unserved", client.unserved - self._unserved)
            self._unserved = client.unserved
            self._launcher.revive()
        if client.run_id != self._common_run:
            plan.run = client.run_id
        if client.has_late_reservation:
            client.step()
        if self._wrong and client.is_server_alive:
            self._delete_wrong()
        for request_id in self._other_connector_kv.planned(output):
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.stop_storing()
        loaded_from = self._reuse.plan(plan, output.num_scheduled_tokens)
        if self._loads and self._loads_in_steps:
            self.undoing.planned(output, plan.loads)
        if self._is_asynchronous:
            plan.reused_blocks = blocks_taken(output, loaded_from, self._block_tokens)
            plan.lent = self._blocks_lent(output)
        if self._loads and output.total_num_scheduled_tokens >= _PROMPTS * len(output.num_scheduled_tokens):
            plan.prefill_work = prefill_work_of(output)
        # A replica has no shard to abort. If its load fails, the sums that it adds to other ranks are wrong,
        # and must not be stored.
        has_replicas = self._ranks > len(naming.form.shards)
        if self._saves and self._is_ready and not (has_replicas and self._load_tracker.is_unconfirmed):
            self._storing.plan(plan, output, self._tracked)
        weight_checks.planned(plan)
        return plan

    def _blocks_lent(self, output: SchedulerOutput) -> list[int]:
        """Blocks of requests that are not computed yet: another connector loads them."""
        lent, self._lent = self._lent, {}
        waiting = lent.keys() - output.num_scheduled_tokens.keys() if lent else ()
        blocks = {block for each in waiting for table in lent[each] for block in table}
        return sorted(blocks - {NULL_BLOCK})

    def repair_failed_loads(self, blocks: Set[int]) -> None:
        """These blocks were not loaded in their step. What needs them is computed, and not loaded again."""
        if not self._loads_in_steps:
            return
        for request in self.undoing.failed(blocks):
            if (tracked := self._tracked.get(request.request_id)) is not None:
                tracked.preemptions_at_promise = request.num_preemptions

    def apply_report(self, report: RankReport) -> None:
        """Apply the ranks' report about a step."""
        names = self._names
        if report.facts and names.form is None:
            self._apply_facts(report.facts)
        if report.weights_version > names.count:
            unchecked = self._weight_checks.unchecked()
            if report.was_unnoticed:
                self._wrong = list(dict.fromkeys((*self._wrong, *unchecked)))
                self._delete_wrong()
            names.change(report)
            self._begin_all_anew()
        if report.adapters:
            names.learn_adapters(report.adapters)
            for request_id, tracked in list(self._tracked.items()):
                if not names.is_current(tracked.adapter):
                    self._begin_anew(request_id, tracked)
        names.slept(report.slept_ranks, max(report.checked_weights, default=0))
        if report.checked_weights and self._weight_checks.compared(report) and names.compared():
            self._begin_all_anew()
        for match in self._load_tracker.learn(report):
            self._reuse.release(match)
        for run, ranks in report.pinned_ranks.items():
            self._pinned_ranks[run] += ranks
            if self._pinned_ranks[run] == self._ranks:  # some lock it later than others
                self._reuse.pinned_run = run
        for run, ranks in report.connected_ranks.items():
            if ranks == self._ranks:  # all of them in the same step
                self._common_run = run
                self._load_tracker.forget_gpu()

    def _delete_wrong(self) -> None:
        if self._client.delete(self._wrong):
            self._wrong = []

    # ---- names change

    def clear(self) -> None:
        """The engine has reset its prefix cache."""
        self._names.reset(self._weight_checks.step)
        self._begin_all_anew()

    def _begin_all_anew(self) -> None:
        """Give all requests new keys. Chunks under the old names are no longer found by this engine."""
        for request_id, tracked in list(self._tracked.items()):
            self._begin_anew(request_id, tracked)
        self._load_tracker.forget_gpu()
        if self._events is not None:
            self._events.forget()

    def _begin_anew(self, request_id: str, tracked: TrackedRequest) -> None:
        if not tracked.rekey():
            del self._tracked[request_id]

    # ---- others

    def events(self) -> list[KVCacheEvent]:
        """The events for routers, if the engine publishes any."""
        return self._events.take() if self._events is not None else []

    def close(self) -> None:
        self._weight_checks.close()
        self._client.close()
