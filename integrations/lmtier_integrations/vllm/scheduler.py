"""The scheduler's half: finds what a request can be given, reserves what it will give, and plans each step.

    on_new_request               look it up; what lies below the slab is on its way up from here
    get_num_new_matched_tokens   so many tokens, or "ask again"; a promise is verified and leased already
    update_state_after_alloc     the promise is taken, or is not
    build_connector_meta         the step's plan: those loads, and chunks that are complete
    update_connector_output      ranks have copied: the lease ends
    request_finished             whatever it still held is released

Every lease is either a request's here, or in `_loading` until all ranks have said that they are done with it.

Names are of what ranks have in memory, and only they know that. So each plan says what its names are made
of; a rank that has something else loads and stores none of it, and tells. Where weights may have changed,
because vLLM was told to forget or somebody called into the ranks, they are asked before anything is promised.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from lmtier.cache import CPU, Match, Reservation
from lmtier.config import parse_seconds
from lmtier.errors import LayoutError
from lmtier.hbm import Hbm, Places
from lmtier.index import State
from lmtier.keys import KeyChain, seed
from lmtier.layout import Form, Layout, form_of
from lmtier.mover import completed
from lmtier.prompts import Origin
from lmtier.server.client import Asked
from lmtier_integrations.identity import adapter_in
from lmtier_integrations.vllm.events import Events
from lmtier_integrations.vllm.facts import why_private
from lmtier_integrations.vllm.identity import identity_of, lora_of, ttl_of
from lmtier_integrations.vllm.kv import window_of
from lmtier_integrations.vllm.launch import Launcher
from lmtier_integrations.vllm.media import Contents, Media
from lmtier_integrations.vllm.memory import caller, origin_of, wrap
from lmtier_integrations.vllm.messages import (
    NULL_BLOCK,
    Adapter,
    LoadPlan,
    Near,
    Plan,
    RankFacts,
    Report,
    SavePlan,
)
from lmtier_integrations.vllm.places import is_on_gpu
from lmtier_integrations.vllm.settings import Settings, check_chunks
from lmtier_integrations.vllm.stats import Stats

log = logging.getLogger("vllm.lmtier")

try:
    _tables_of = KVConnectorBlockState.get_block_ids
    _SHOWS_TABLES = True
except AttributeError:  # before 0.30: only the tables that this step made longer
    _SHOWS_TABLES = False

    def _tables_of(state: KVConnectorBlockState, req_id: str) -> tuple[list[int], ...] | None:
        return state.block_ids.get(req_id)


_ASK = 0.001  # seconds between questions to a server that reads: an engine that waits asks in a loop
_FRESH = 0.1  # seconds until a lookup that found less than everything is made again
_LATE = 1.0  # seconds beyond its deadline after which a match is not waited for, whatever the server says
_TOGETHER = 256  # generated tokens that are stored at once, where they do not leave a window meanwhile
_IN_VAIN = 5.0  # seconds for which a request is not looked up again that has waited until its deadline
_PROMPTS = 8  # tokens a request, on average, from which on a step counts as one that computes prompts
_AHEAD = 0.5  # of the slab may be leased by requests that the engine has not come to


@dataclass(eq=False, slots=True)
class Known:
    """A request, as far as we follow it."""

    request: Request
    media: Contents
    """Images, audio and video behind its tokens."""
    chain: KeyChain | None = None
    match: Match | None = None
    looked_at: float = float("-inf")
    computed: int = 0
    """Tokens that the engine had when it was promised more."""
    taken: int = -1
    """After how many preemptions the engine took a promise last. It takes one each time, and no second."""
    stored: int = 0
    """Leading chunks that are stored or reserved."""
    due: int = 0
    """The number of tokens at which something is stored next."""
    told: int = 0
    """Leading chunks whose tokens the server was told."""
    ttl: float | None = None
    """Of what is stored."""
    asked: Asked | None = None
    """Room for chunks of it, from number `stored` on."""
    adapter: Adapter | None = None
    """What its keys say that it is computed with."""
    since: int = 0
    """The first step that may have computed any of its KV."""


@dataclass(eq=False, slots=True)
class _Copying:
    """What ranks load or save."""

    left: int
    """Ranks that are not done."""
    match: Match | None = None
    places: Places | None = None
    """In their GPUs' own memory."""
    is_believed: bool = True


class Scheduler:
    def __init__(
        self, config: VllmConfig, cache: KVCacheConfig, settings: Settings, launcher: Launcher
    ) -> None:
        transfer = config.kv_transfer_config
        window = window_of(cache)
        self._has_windows = bool(window) or len(cache.kv_cache_groups) > 1
        """Whether blocks may leave a request before it ends."""
        self.waits_for_loads = self._has_windows or is_on_gpu(config)
        """Whether loads are asynchronous. Only where they must be: what a step loads by itself is shared at
        once with all requests of the same prefix.

        Where blocks leave windows, a synchronous load that fails cannot be taken back: earlier blocks, which
        the engine would compute from, were never loaded. On a GPU the next step has begun by then, and vLLM's
        second model runner computes on from the wrong token (vLLM #49250).
        """
        self._shares = bool(config.cache_config.enable_prefix_caching)
        self._arriving: Counter[bytes] = Counter()
        """Chunks that requests wait for: who needs the same waits with them, and then shares their blocks."""
        self._settings, self._launcher = settings, launcher
        self._loads, self._saves = transfer.is_kv_consumer, transfer.is_kv_producer
        self._block_tokens = config.cache_config.block_size
        self._step_tokens = config.scheduler_config.max_num_batched_tokens
        self.client = launcher.connect("vllm scheduler")
        self.chunk_tokens = self.client.chunk_tokens
        check_chunks(self.chunk_tokens, self._block_tokens, window)
        if self._loads and transfer.kv_load_failure_policy != "recompute":
            log.warning(
                'lmtier: kv_load_failure_policy is "fail": should the cache lose what it promised, '
                'requests fail; set it to "recompute", which costs them time only'
            )
        self._files = origin_of(config)
        self._identity = identity_of(config, settings.model)
        if origin_of(config) != self._files:
            self._files = ""  # they change just now
        self._is_own = bool(why_private(config))
        """Whether no other run of the engine may ever find what is stored."""
        self._media = Media(config, trusts_ids=settings.trust_media_ids)
        self._form: Form | None = None
        self._seeds: dict[tuple[str, str], bytes] = {}
        self._ranks = config.parallel_config.world_size
        self._agreed = 0
        """The run of the server on which all ranks are: only what is promised there can be loaded."""
        self._known: dict[str, Known] = {}
        self._ahead: Known | None = None
        """The request that has asked for room before the first step that computes it."""
        self._promised: dict[str, tuple[Match, list[list[int]]]] = {}
        """What the engine has taken, and the blocks for it."""
        self._loading: dict[int, _Copying] = {}
        """Matches, by their number."""
        self._saving: dict[int, _Copying] = {}
        """Reservations with places in GPU memory."""
        gpu = settings.config.gpu
        self._hbm = Hbm(gpu.capacity, gpu.policy) if gpu is not None and gpu.capacity else None
        self._is_asynchronous = False
        """Whether ranks copy on after a step."""
        self._is_under_way = False
        """Whether they do so now: only in a further step do they commit and end leases."""
        self._epoch = 0
        self._step = 0
        """The number of the last plan."""
        self._names = 0
        """Counts what the model was called by, as the ranks do."""
        self._weights_before = ""
        """The weights' name before the engine forgot, if it did so since they were compared."""
        self._doubted = 0
        """The first step in which ranks are to compare their weights."""
        self._is_doubted = False
        """Whether they have not yet done so."""
        self._reset_at = 0
        """The last plan before the engine forgot its own prefixes: what it has of them was computed later."""
        self._adapters: dict[int, str] = {}
        """Of each adapter in the ranks' memory, by its number, what it is; empty: they do not agree."""
        self._adapters_of: dict[int, dict[int, str]] = {}
        """The same of each rank."""
        self._unchecked: list[tuple[int, list[bytes]]] = []
        """Chunks that were stored since weights were compared, and in which step."""
        self._period = parse_seconds(settings.check_weights)
        self._compared_at = time.monotonic()
        self._engine: SchedulerInterface | None = caller(SchedulerInterface)
        self._leave = ExitStack()
        if self._engine is not None:
            wrap(self._leave, self._engine, "reset_prefix_cache", self._reset)
        if (core := caller(EngineCore)) is not None:
            for name in ("collective_rpc", "add_lora", "remove_lora"):
                wrap(self._leave, core, name, self._call)
        self._asked_at = float("-inf")
        self._unserved = 0
        self.stats = Stats()
        told = config.kv_events_config
        self._events = Events(self.client) if told is not None and told.enable_kv_cache_events else None

    def _meet(self, ranks: Mapping[int, RankFacts]) -> None:
        """What the workers hold, by rank: they say so in the first step, in which nothing is computed.

        Rejected: vLLM's handshake. Beside other connectors (MultiConnector) it carries what one of them says.
        """
        if len(ranks) != self._ranks:
            raise LayoutError(
                f"{len(ranks)} of {self._ranks} workers have said what KV they hold: lmtier needs an "
                "executor of vLLM that gathers what all of them report"
            )
        layouts = {facts.layout for facts in ranks.values()}
        if len(layouts) != 1:
            raise LayoutError(f"the workers disagree about the model's KV: {sorted(layouts)}")
        backends = {facts.from_scratch for facts in ranks.values()} - {""}
        if self._loads and backends:
            self._loads = False
            log.warning(
                "lmtier: %s computes every prompt from its first token, and would answer wrongly behind "
                "loaded KV: nothing is loaded; what is computed is still saved",
                ", ".join(backends),
            )
        if {facts.files for facts in ranks.values()} != {self._files} or self._engine is None:
            self._identity = replace(self._identity, weights="")
            log.warning(
                "lmtier: the weights' files have changed since the engine began to load them, or it does not "
                "show what it does to weights: what is stored is found by this run of it only"
            )
        layout = Layout.from_json(layouts.pop())
        self._form = form_of(layout, dict.fromkeys(ranks[rank].shard for rank in sorted(ranks)))
        self._identity = completed(self._identity, layout, self.client.approximation)
        self._seeds.clear()
        self.client.declare(self._identity, self._form)
        self._is_asynchronous = any(facts.is_asynchronous for facts in ranks.values())
        runs = {facts.run for facts in ranks.values()}
        self._agreed = runs.pop() if len(runs) == 1 else 0

    @property
    def wants_a_step(self) -> bool:
        """Though there may be nothing to compute in it."""
        return self._form is None or self._is_under_way or (self._is_doubted and not self._is_paused)

    @property
    def _is_paused(self) -> bool:
        """A step would reach an engine that sleeps."""
        return self._engine is not None and self._engine.pause_state != PauseState.UNPAUSED

    @property
    def _is_ready(self) -> bool:
        return self._form is not None and self._agreed == self.client.run and not self._is_doubted

    # ---- what may change weights

    def _reset(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The engine forgets its own prefixes: a trainer makes it do that after it has changed weights."""
        is_done = method(*args, **kwargs)
        if is_done:
            self._reset_at = self._step
        self._doubt()
        return is_done

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Somebody calls into the ranks."""
        try:
            return method(*args, **kwargs)
        finally:
            self._doubt()

    def _doubt(self) -> None:
        self._is_doubted, self._doubted = True, self._step + 1

    # ---- keys

    def _chain(self, known: Known, tokens: int) -> KeyChain:
        """The request's chain over its first `tokens` tokens at least, as far as whole chunks go."""
        request, chain = known.request, known.chain
        if chain is None:
            chain = known.chain = KeyChain(self._seed(known), self.chunk_tokens, (), known.media)
        if tokens > chain.tokens:
            chain.extend(request.all_token_ids[chain.tokens : tokens])
        return chain

    def _adapter(self, request: Request) -> Adapter | None:
        """What the ranks have read. Of one that they have not, its files: they tell if it was another."""
        lora = request.lora_request
        if lora is None:
            return None
        known = self._adapters.get(lora.lora_int_id)
        return lora.lora_int_id, adapter_in(lora.lora_path) if known is None else known

    def _lora(self, known: Known) -> str:
        return lora_of(known.request, known.adapter[1] if known.adapter is not None else "")

    def _seed(self, known: Known) -> bytes:
        lora, salt = self._lora(known), known.request.cache_salt or ""
        found = self._seeds.get((lora, salt))
        if found is None:
            if len(self._seeds) > 4096:
                self._seeds.clear()
            found = seed(self._identity, self.chunk_tokens, lora=lora, salt=salt)
            self._seeds[lora, salt] = found
            if lora and self._form is not None:
                self.client.declare(self._identity, self._form, lora)
        return found

    def _tell(self, known: Known, chain: KeyChain) -> None:
        """Say what is new of a request's tokens, if the user wants that. Placeholders say nothing."""
        new = chain.keys[known.told :]
        if not new or not self._settings.tell_tokens or known.media:
            return
        first, size = known.told, self.chunk_tokens
        tokens = known.request.all_token_ids[first * size : len(chain.keys) * size]
        lora, salt = self._lora(known), known.request.cache_salt or ""
        origin = Origin.of(asdict(self._identity), lora, salt)
        self.client.tell(new, tokens, origin, chain.keys[first - 1] if first else b"")
        known.told = len(chain.keys)

    # ---- load

    def add(self, request: Request) -> None:
        """A new request. It is looked up at once, so that tiers below read while it waits its turn."""
        media = self._media.of(request)
        if media is None:
            self.stats.add("unnamed_requests")
            self._distrust({each.identifier for each in request.mm_features})
            return
        if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
            return  # tokens that do not say what was computed, or that may still change
        adapter = self._adapter(request)
        if adapter is not None and not adapter[1]:
            return  # nobody knows what it is computed with
        known = self._known[request.request_id] = Known(
            request, media, due=self.chunk_tokens, ttl=ttl_of(request), adapter=adapter
        )
        if self._may_load(known) and self._room_ahead():
            with self.client.together():
                self._look(known)
                if known.match is None and self._ahead is None and self._saves:
                    self._ask_ahead(known)

    def _distrust(self, names: set[str]) -> None:
        """vLLM may from now on give one request what it computed for another under the same name."""
        for known in list(self._known.values()):
            if any(each.identifier in names for each in known.request.mm_features):
                self.forget(known.request)

    def _ask_ahead(self, known: Known) -> None:
        """Nothing of it is stored, so it will be. In one message with the lookup: each may wake the server.

        For one request at a time: who comes after many others waits long, and must not hold room meanwhile.
        """
        assert self._form is not None
        tokens = known.request.num_prompt_tokens
        keys = self._chain(known, tokens).keys[: tokens // self.chunk_tokens]
        if keys and tokens <= self._step_tokens:
            self._ahead, known.asked = known, self.client.ask_to_reserve(keys, self._form, ttl=known.ttl)

    def _taken_ask(self, known: Known) -> Asked | None:
        """What was asked for it, to be read or withdrawn now."""
        if self._ahead is known:
            self._ahead = None
        asked, known.asked = known.asked, None
        return asked

    def _may_load(self, known: Known) -> bool:
        return self._loads and self._is_ready and not known.request.skip_reading_prefix_cache

    def _room_ahead(self) -> bool:
        assert self._form is not None
        leased = sum(len(each.match.run) for each in self._known.values() if each.match is not None)
        return leased * self._form.room < _AHEAD * self.client.slab.capacity

    def _look(self, known: Known) -> None:
        """Match anew; what an older match holds is given back only if the new one has more."""
        assert self._form is not None
        known.looked_at = time.monotonic()
        tokens = known.request.num_tokens
        whole = (tokens - 1) // self.chunk_tokens  # something is left to compute
        if not whole:
            return
        chain = self._chain(known, tokens)
        match = self.client.match(chain.keys[:whole], self._form, tokens=tokens)
        self.client.trace(match, known.request.trace_headers)
        self._tell(known, chain)
        self._bring_up(match)
        if self._events is not None:
            ready = {number for number, entry in enumerate(match.run) if entry.state is State.READY}
            there = [
                "" if source == CPU and number not in ready else source
                for number, source in enumerate(match.sources)
            ]
            self._events.saw(known.request, self._chain(known, tokens), there)
        old = known.match
        if not match.chunks and not match.asking:
            self.client.release(match)
        elif old is None or match.chunks > old.chunks:
            known.match = match
            if old is not None:
                self.client.release(old)
        else:
            self.client.release(match)

    def _bring_up(self, match: Match) -> None:
        """Once all tiers have said what they have."""
        if not match.asking and match.below:
            self.client.prefetch(match)

    def _drop(self, known: Known) -> None:
        if known.match is not None:
            self.client.release(known.match)
            known.match = None

    def _withdraw(self, known: Known) -> None:
        if (asked := self._taken_ask(known)) is not None:
            self.client.withdraw(asked)

    def matched(self, request: Request, computed_tokens: int) -> int | None:
        """How many tokens beyond those computed can be loaded; None: not known yet."""
        if self._form is None or self._is_doubted:
            return None  # it begins when the workers have said what they hold: in the next step
        known = self._known.get(request.request_id)
        if known is not None:
            known.since = self._reset_at + 1 if computed_tokens else self._step + 1
        if known is None or not self._may_load(known):
            if known is not None:
                self._drop(known)
            return 0
        if known.taken == request.num_preemptions:
            self._drop(known)  # what was loaded has failed: now it is computed
            return 0
        match = known.match
        is_short = match is None or (
            match.ready
            and match.cut != "deadline"
            and match.chunks < (request.num_tokens - 1) // self.chunk_tokens
        )
        if is_short and time.monotonic() - known.looked_at > _FRESH:
            self._look(known)
            match = known.match
        if match is None:
            return 0
        if not self._has_arrived(match):
            if computed_tokens > match.has and not match.asking:
                match.has = computed_tokens
                self.client.prefetch(match, has=computed_tokens)
            if not match.ready and time.monotonic() < match.deadline + _LATE:
                return None
        if not match.ready:
            self._drop(known)
            return 0
        if match.cut == "deadline":
            known.looked_at = time.monotonic() + _IN_VAIN
        known.stored, known.due = match.chunks, (match.chunks + 1) * self.chunk_tokens
        more = match.chunks * self.chunk_tokens - computed_tokens
        if more <= 0:
            # What the engine had itself is young again by the match, in every tier.
            self._drop(known)
            return 0
        if match.run[computed_tokens // self.chunk_tokens].key in self._arriving:
            return None
        known.computed = computed_tokens
        return more

    def _has_arrived(self, match: Match) -> bool:
        """One question is for all requests that wait."""
        if not match.ready and (now := time.monotonic()) - self._asked_at >= _ASK:
            self._asked_at = now
            self.client.step()
        self._bring_up(match)
        return match.ready

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine has blocks for the request, and takes so many of the tokens that it was promised."""
        known = self._known.get(request.request_id)
        if known is None or known.match is None:
            return
        match = known.match
        if not external_tokens:
            self._drop(known)
            return
        known.match = None
        known.taken = request.num_preemptions
        known.looked_at = float("-inf")  # should it be preempted, another look is due
        self._promised[request.request_id] = match, list(blocks.get_block_ids())
        if self.waits_for_loads and self._shares:
            self._arriving.update(entry.key for entry in match.run)
        self.stats.add("loaded_tokens", external_tokens)

    def sources(self, request: Request, external_tokens: int) -> dict[str, int]:
        """Which tiers the tokens come from that were promised just now."""
        promised, known = self._promised.get(request.request_id), self._known.get(request.request_id)
        if promised is None or known is None:
            return {}
        match, _ = promised
        found: dict[str, int] = {}
        first, inside = divmod(known.computed, self.chunk_tokens)
        for source in match.sources[first:]:
            tier = source if source == CPU else source.partition("-")[0]
            found[tier] = found.get(tier, 0) + self.chunk_tokens - inside
            inside = 0
        return found if sum(found.values()) == external_tokens else {}

    # ---- plan

    def plan(self, output: SchedulerOutput) -> Plan:
        self._step += 1
        plan = Plan(epoch=self._epoch, step=self._step, names=self._names, compares=self._is_doubted)
        if self._form is None:
            plan.asks = plan.compares = True
            return plan
        if self.client.unserved != self._unserved:
            self.stats.add("unserved", self.client.unserved - self._unserved)
            self._unserved = self.client.unserved
            self._launcher.revive()
        if self.client.run != self._agreed:
            plan.run = self.client.run
        loaded_from = self._plan_loads(plan, output) if self._promised else {}
        if self._is_asynchronous:
            plan.taken = self._taken(output, loaded_from, self._block_tokens)
        if self._loads and output.total_num_scheduled_tokens >= _PROMPTS * len(output.num_scheduled_tokens):
            plan.computes = _work_of(output)
        # A replica has no shard to abort: if it fails a load, what it added to the others must not be stored.
        has_replicas = self._ranks > len(self._form.shards)
        is_unconfirmed = has_replicas and self._loading and not self.waits_for_loads
        if self._saves and self._is_ready and not is_unconfirmed:
            for known, computed, tokens in self._complete_after(output):
                self._plan_save(plan, output, known, computed, tokens)
        if plan.saves:
            self._unchecked.append((self._step, [key for save in plan.saves for key in save.keys]))
        if self._period and (self._unchecked or plan.loads):
            self._compare_now_and_then(plan)
        return plan

    def _compare_now_and_then(self, plan: Plan) -> None:
        """By all ranks in one step, before it computes."""
        if (now := time.monotonic()) - self._compared_at >= self._period:
            plan.compares = True
        if plan.compares:
            self._compared_at = now

    def _plan_loads(self, plan: Plan, output: SchedulerOutput) -> dict[str, int]:
        """From which token on requests of this step are loaded."""
        loaded_from: dict[str, int] = {}
        for request_id, (match, tables) in self._promised.items():
            waits = request_id if self.waits_for_loads else ""
            if not waits and request_id not in output.num_scheduled_tokens:
                self._release(match)
                continue
            computed = loaded_from[request_id] = self._known[request_id].computed
            copying = self._loading[match.id] = _Copying(self._ranks, match)
            near = None
            if self._hbm is not None:
                copying.places = self._hbm.load(match.run[computed // self.chunk_tokens :], match.form)
                near = _near(copying.places)
                self.stats.add("gpu_hit_tokens", copying.places.there * self.chunk_tokens)
            adapter = self._known[request_id].adapter
            plan.loads.append(LoadPlan.of(match, tables, computed, waits, near, adapter))
        self._promised.clear()
        return loaded_from

    @staticmethod
    def _taken(output: SchedulerOutput, loaded_from: Mapping[str, int], block_tokens: int) -> list[int]:
        """Blocks that requests get in this step. Not those that they share: nobody writes there."""
        cached = output.scheduled_cached_reqs
        given = [
            (each.req_id, each.num_computed_tokens, each.block_ids) for each in output.scheduled_new_reqs
        ]
        for request_id, computed, tables in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            # Of one that was preempted these are all of its blocks, else only those that are new.
            is_whole = request_id in cached.resumed_req_ids
            given.append((request_id, computed if is_whole else 0, tables or ()))
        return sorted(
            {
                block
                for request_id, computed, tables in given
                for table in tables
                for block in table[loaded_from.get(request_id, computed) // block_tokens :]
            }
            - {NULL_BLOCK}
        )

    def _complete_after(self, output: SchedulerOutput) -> Iterator[tuple[Known, int, int]]:
        """Requests with something to store, and how many of their tokens have KV before it and after."""
        scheduled, size = output.num_scheduled_tokens, self.chunk_tokens
        for request_id, computed in _computed(output):
            known = self._known.get(request_id)
            if known is None:
                continue
            if computed < known.stored * size:
                self._go_back(known, computed)
            # two comparisons: almost always the first says no, and it is cheap
            if (
                computed + scheduled[request_id] >= known.due
                and (tokens := self._tokens(known, computed, scheduled)) >= known.due
            ):
                yield known, computed, tokens

    def _tokens(self, known: Known, computed: int, scheduled: Mapping[str, int]) -> int:
        """Without speculative tokens, which may be taken back."""
        request = known.request
        most: int = request.num_tokens if self._settings.save_decode else request.num_prompt_tokens
        return min(computed + scheduled[request.request_id], most)

    def _go_back(self, known: Known, computed: int) -> None:
        """Preempted, or a load failed: what is computed again is stored again, if it is not there."""
        known.stored = min(known.stored, computed // self.chunk_tokens)
        known.due = (computed // self.chunk_tokens + 1) * self.chunk_tokens

    def _plan_save(
        self, plan: Plan, output: SchedulerOutput, known: Known, computed: int, tokens: int
    ) -> None:
        """Room is asked for in one step and filled in the next, so that none waits for the server's answer.

        In the same one, where the next may not show these blocks. A request that ends sooner than it was to
        loses what was asked for last.
        """
        assert self._form is not None
        tables = self._blocks(output, known.request.request_id)
        if not tables:
            return  # not shown in this step; the one that takes another block will
        will_be_back = self._will_be_back(known, tokens)
        if (asked := known.asked) is not None:
            end = len(asked.keys) * self.chunk_tokens
            if asked.first != known.stored or (tokens < end and not will_be_back):
                self._withdraw(known)  # it was preempted; or the step computes less of it
            elif computed < end and will_be_back:
                return
            elif not self._shows(tables, asked.first, len(asked.keys)):
                self._withdraw(known)  # the engine had these itself, and some have left a window
            else:
                self._fill(plan, known, tables)
        if tokens < known.due:
            return
        full = tokens // self.chunk_tokens
        if not self._shows(tables, known.stored, full):
            self._stored_to(known, full, known.stored)
            return
        keys = self._chain(known, full * self.chunk_tokens).keys[:full]
        with self.client.together():
            known.asked = self.client.ask_to_reserve(keys, self._form, first=known.stored, ttl=known.ttl)
            self._tell(known, self._chain(known, 0))
        if not will_be_back:
            self._fill(plan, known, tables)

    def _will_be_back(self, known: Known, tokens: int) -> bool:
        """Whether another step will compute some of it in the same blocks, as far as can be known."""
        last = known.request.num_prompt_tokens + known.request.max_tokens - 1
        return _SHOWS_TABLES and not self._has_windows and tokens < last

    def _shows(self, tables: Sequence[Sequence[int]], first: int, end: int) -> bool:
        """Whether all blocks of these chunks are there still."""
        a_chunk = self.chunk_tokens // self._block_tokens
        part = slice(first * a_chunk, end * a_chunk)
        return not any(len(table) < part.stop or NULL_BLOCK in table[part] for table in tables)

    def _stored_to(self, known: Known, end: int, stored: int) -> None:
        """Its first `end` chunks are dealt with. Generated ones are stored several at once."""
        size = self.chunk_tokens
        is_prompt = end < known.request.num_prompt_tokens // size
        known.stored = stored
        known.due = end * size + (size if is_prompt or self._has_windows else max(size, _TOGETHER))

    def _fill(self, plan: Plan, known: Known, tables: Sequence[Sequence[int]]) -> None:
        """Save what was asked for."""
        asked = self._taken_ask(known)
        assert asked is not None
        reservation = self.client.reserved(asked)
        self._stored_to(known, len(asked.keys), len(asked.keys) - reservation.dropped)
        if self._events is not None:
            self._events.saw(known.request, self._chain(known, 0), ())
        if reservation.entries:
            self.client.trace(reservation, known.request.trace_headers)
            a_chunk = self.chunk_tokens // self._block_tokens
            near = self._places_for(reservation)
            plan.saves.append(SavePlan.of(reservation, tables, a_chunk, near, known.since, known.adapter))
            self.stats.add("saved_tokens", len(reservation.entries) * self.chunk_tokens)
            self.client.disown(reservation)

    def _places_for(self, reservation: Reservation) -> Near | None:
        assert self._form is not None
        if self._hbm is None or self._ranks > len(self._form.shards):
            return None  # replicas save nothing, so they would have no copy
        places = self._hbm.save(list(reservation.entries.values()), self._form)
        self._saving[reservation.id] = _Copying(self._ranks, places=places)
        return _near(places)

    @staticmethod
    def _blocks(output: SchedulerOutput, request_id: str) -> Sequence[Sequence[int]]:
        state = output.kv_connector_block_state
        return (_tables_of(state, request_id) if state is not None else None) or ()

    # ---- what became of it

    def learn(self, report: Report) -> None:
        if report.facts and self._form is None:
            self._meet(report.facts)
        if report.names > self._names:
            self._change(report)
        if report.adapters:
            self._learn_adapters(report.adapters)
        if report.compared:
            self._compared(report)
        self._epoch = max(self._epoch, report.epoch)
        self._is_under_way = report.under_way > 0
        for reported, known in ((report.loaded, self._loading), (report.saved, self._saving)):
            for number in report.failed & known.keys():
                known[number].is_believed = False
            for number, ranks in reported.items():
                known[number].left -= ranks
                if not known[number].left:
                    self._end(known.pop(number))
        for run, ranks in report.runs.items():
            if ranks == self._ranks:  # in one step: a rank says so in each
                self._agreed = run
                self._forget_near()

    def _change(self, report: Report) -> None:
        """Ranks have other weights than before. All of them know from where: then that is their name."""
        self._names = report.names
        files = {files for files, _ in report.origins.values()}
        digest = max((digest for _, digest in report.origins.values()), default="")
        if report.was_unnoticed and self._unchecked:
            self.client.delete([key for _, keys in self._unchecked for key in keys])
        self._unchecked.clear()
        if len(report.origins) < self._ranks or len(files) > 1 or "" in files or self._is_own:
            digest = ""
        log.info("lmtier: the weights have changed; they are %s", digest[:16] or "known to this run only")
        self._rename(digest or f"since a change {secrets.token_hex(16)}")

    def _compared(self, report: Report) -> None:
        """Ranks have compared their weights: what was stored before stands."""
        step = max((step for step, ranks in report.compared.items() if ranks == self._ranks), default=0)
        self._unchecked = [each for each in self._unchecked if each[0] >= step]
        if not self._is_doubted or step < self._doubted:
            return
        self._is_doubted = False
        before, self._weights_before = self._weights_before, ""
        if report.slept == self._ranks and not report.names and before:
            self._rename(before)  # sleeping forgets all, and yet keeps the weights

    def _learn_adapters(self, told: Mapping[int, dict[int, str]]) -> None:
        """What ranks have read. Who was computed with something else by that name, stores nothing more."""
        self._adapters_of |= told
        ranks = list(self._adapters_of.values())
        self._adapters = {
            number: content if all(each.get(number) == content for each in ranks) else ""
            for rank in ranks
            for number, content in rank.items()
        }
        for request_id, known in list(self._known.items()):
            if known.adapter is not None:
                number, content = known.adapter
                if self._adapters.get(number, content) != content:
                    self._begin_anew(request_id, known)

    def _begin_anew(self, request_id: str, known: Known) -> None:
        """It gets other names. What has been computed of it gets none."""
        self._drop(known)
        self._withdraw(known)
        known.adapter = self._adapter(known.request)
        if known.request.num_computed_tokens or (known.adapter is not None and not known.adapter[1]):
            del self._known[request_id]
            return
        known.chain, known.looked_at = None, float("-inf")
        known.stored, known.due, known.told = 0, self.chunk_tokens, 0

    def _end(self, copying: _Copying) -> None:
        if copying.match is not None:
            self._release(copying.match)
        if self._hbm is not None and copying.places is not None:
            self._hbm.done(copying.places, believed=copying.is_believed)

    def _release(self, match: Match) -> None:
        """One that the engine has taken."""
        for entry in match.run if self.waits_for_loads and self._shares else ():
            if self._arriving[entry.key] > 1:
                self._arriving[entry.key] -= 1
            else:
                del self._arriving[entry.key]
        self.client.release(match)

    def _forget_near(self) -> None:
        if self._hbm is not None:
            self._hbm.clear()

    def forget(self, request: Request) -> None:
        known = self._known.pop(request.request_id, None)
        if known is not None:
            self._drop(known)
            self._withdraw(known)
        match, _ = self._promised.pop(request.request_id, (None, None))
        if match is not None:
            self._release(match)

    def events(self) -> list[KVCacheEvent]:
        """For routers, if the engine publishes events."""
        return self._events.take() if self._events is not None else []

    def clear(self) -> None:
        """The engine wants nothing of before any more: its weights may have changed.

        So the keys from here on are private to this run of the engine, unless it turns out that it has slept.
        The files that they were made of say nothing about them now, and a later start from those files must
        not find this KV. What is stored under the old keys is left to age: other engines may still have
        those weights.
        """
        self._weights_before = self._identity.weights
        self._rename(f"since a reset {secrets.token_hex(16)}")

    def _rename(self, weights: str) -> None:
        """From here on the model's weights are called this."""
        self._identity = replace(self._identity, weights=weights)
        self._seeds.clear()
        for request_id, known in list(self._known.items()):
            self._begin_anew(request_id, known)
        self._forget_near()
        if self._events is not None:
            self._events.forget()
        if self._form is not None:
            self.client.declare(self._identity, self._form)

    def close(self) -> None:
        self._leave.close()
        self.client.close()


def _near(places: Places) -> Near:
    return [place and (place.offset, place.is_there) for place in places.near]


def _computed(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Each request of a step, and how many of its tokens have KV before it."""
    cached = output.scheduled_cached_reqs
    running = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    if not output.scheduled_new_reqs:  # most steps
        return running
    new = ((each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs)
    return itertools.chain(running, new)


def _work_of(output: SchedulerOutput) -> tuple[int, float] | None:
    """A step's tokens, and the sum of their positions; None: there are none."""
    scheduled = output.num_scheduled_tokens
    area = sum(
        scheduled[request_id] * (computed + scheduled[request_id] / 2)
        for request_id, computed in _computed(output)
        if request_id in scheduled
    )
    return (output.total_num_scheduled_tokens, area) if area else None
