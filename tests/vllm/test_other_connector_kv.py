"""Foreign KV against a model that remembers what each block was computed from."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from lmtier_integrations.vllm.other_connector_kv import OtherConnectorKV

BLOCK = 4  # tokens


class Engine(RuleBasedStateMachine):
    """Shares blocks, preempts, and hands blocks out again, as vLLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign = OtherConnectorKV(BLOCK)
        self.free = list(range(1, 60))
        self.tables: dict[str, list[int]] = {}
        """The blocks of each request that runs."""
        self.ended: list[list[tuple[int, int]]] = []
        """The blocks of others, and how often each had been handed out: unless it is again, it is shared."""
        self.times: Counter[int] = Counter()
        self.users: dict[int, set[str]] = {}
        self.is_foreign: dict[int, bool] = {}
        """Whether a block's KV depends on another connector's load."""
        self.known: set[str] = set()
        """The requests of which lmtier has learnt that they have foreign blocks."""
        self.preempted: list[str] = []
        self.count = 0
        self.new: list[NewRequestData] = []
        self.cached = CachedRequestData.make_empty()

    def take(self, request_id: str, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.users[block] = {request_id}
            self.times[block] += 1
        return taken

    def give_up(self, request_id: str) -> None:
        self.known.discard(request_id)
        table = self.tables.pop(request_id)
        self.ended = [*self.ended[-4:], [(block, self.times[block]) for block in table]]
        for block in table[::-1]:  # heads leave last
            self.users[block].discard(request_id)
            if not self.users[block]:
                self.free.append(block)

    def compute(self, request_id: str, first: int) -> None:
        """Its blocks from number `first` on are computed from all before them."""
        table = self.tables[request_id]
        for number in range(first, len(table)):
            self.is_foreign[table[number]] = any(self.is_foreign[block] for block in table[:number])

    def enter(self, request_id: str, data: st.DataObject) -> tuple[list[int], int]:
        tables = [[], *self.tables.values()]
        for ended in self.ended:
            tables.append(
                [block for block, _ in takewhile(lambda each: self.times[each[0]] == each[1], ended)]
            )
        shared = data.draw(st.sampled_from(tables), label="shares blocks of")
        shared = shared[: data.draw(st.integers(0, len(shared)), label="shared blocks")]
        for block in shared:
            self.users[block].add(request_id)
            if block in self.free:
                self.free.remove(block)
        size = min(data.draw(st.integers(1, 5), label="new blocks"), len(self.free))
        loaded = data.draw(st.integers(0, size), label="loaded blocks")
        by_other = data.draw(st.booleans(), label="by another connector")
        table = self.tables[request_id] = [*shared, *self.take(request_id, size)]
        self.foreign.looked_up(request_id, len(shared) * BLOCK)
        if loaded and not by_other:
            self.foreign.loads(request_id, loaded * BLOCK)
        for block in table[len(shared) : len(shared) + loaded]:
            self.is_foreign[block] = by_other  # whatever lies before: it comes from a store
        self.compute(request_id, len(shared) + loaded)
        return table, (len(shared) + loaded) * BLOCK

    @precondition(lambda self: len(self.free) > 5)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.count += 1
        table, computed = self.enter(str(self.count), data)
        position = data.draw(st.integers(0, len(self.new)), label="place in the step")
        new = NewRequestData(str(self.count), [], [], None, None, (list(table),), computed, None)
        self.new.insert(position, new)

    @precondition(lambda self: len(self.free) > 5)
    @rule(data=st.data())
    def load_and_abort(self, data: st.DataObject) -> None:
        """It ends before its first step, when others may already find what was loaded for it."""
        self.count += 1
        table, computed = self.enter(str(self.count), data)
        loaded = self.tables[str(self.count)] = table[: computed // BLOCK]
        self.foreign.finished(str(self.count), computed, [loaded])
        for block in table[len(loaded) :]:
            self.users[block].clear()
            self.free.append(block)
        self.give_up(str(self.count))

    @precondition(lambda self: self.preempted and len(self.free) > 5)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        request_id = self.preempted.pop()
        table, computed = self.enter(request_id, data)
        self.cached.resumed_req_ids.add(request_id)
        self.schedule(request_id, list(table), computed)

    def schedule(self, request_id: str, blocks: list[int], computed: int) -> None:
        self.cached.req_ids.append(request_id)
        self.cached.new_block_ids.append((blocks,) if blocks else None)
        self.cached.num_computed_tokens.append(computed)

    def at_rest(self) -> list[str]:
        """The requests that this step does not have yet."""
        there = {each.req_id for each in self.new} | {*self.cached.req_ids}
        return [each for each in self.tables if each not in there]

    @precondition(lambda self: self.at_rest())
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.at_rest()))
        before = len(self.tables[request_id])
        blocks = self.take(request_id, data.draw(st.integers(0, 2)))
        self.tables[request_id] += blocks
        self.compute(request_id, before)
        self.schedule(request_id, blocks, before * BLOCK)

    @precondition(lambda self: not self.new and not self.cached.req_ids and self.tables)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tables)))
        self.give_up(request_id)
        self.preempted.append(request_id)

    @precondition(lambda self: not self.new and not self.cached.req_ids and self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tables)))
        table = self.tables[request_id]
        self.foreign.finished(request_id, len(table) * BLOCK, [table])
        self.give_up(request_id)

    @rule()
    def step(self) -> None:
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, output.scheduled_cached_reqs = self.new, self.cached
        self.known |= self.foreign.planned(output)
        self.new, self.cached = [], CachedRequestData.make_empty()

    @invariant()
    def exactly_the_requests_with_foreign_blocks_are_known(self) -> None:
        if not self.new and not self.cached.req_ids:
            has = {each for each, table in self.tables.items() if any(self.is_foreign[one] for one in table)}
            assert self.known == has

    def teardown(self) -> None:
        for request_id in [*self.tables, *self.preempted]:
            self.foreign.finished(request_id, 0, [])
        assert not self.foreign._requests
        assert not self.foreign._looked_up


TestForeign = Engine.TestCase
TestForeign.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
