"""Sessions in a cache: what a session's end, its waiting and its children mean for chunks.

When a session ends, the chunks that only it needs leave before others. When it waits for a person, they leave
before those that are expected back sooner. A parent lives as long as its children: their requests keep its
chunks young, and until the last child is over, its own end and its waiting have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import TypedDict

from lmtier.core.index import Index
from lmtier.core.match import CPU, Entry
from lmtier.format.keys import is_state, state_key, tenant_of
from lmtier.format.layout import ChunkForm
from lmtier.observe.metrics import Metrics
from lmtier.rules.session_policy import ReturnTimes
from lmtier.rules.sessions import ASKING, ENDED, WAITING, Agent, SessionTable


class SessionNow(TypedDict):
    """A session, for display."""

    session: str
    tenant: str
    state: str
    parent: str
    children: int
    requests: int
    tokens: int
    """Tokens of its last prompt, in whole chunks."""
    asked: int
    saved: int
    age: float
    idle: float
    """Seconds since it asked."""


class AgentSessions:
    def __init__(
        self,
        places: Mapping[str, Index],
        metrics: Metrics,
        chunk_tokens: int,
        returns: ReturnTimes,
    ) -> None:
        """`places`: the indexes of the slab and of owned tiers, by label."""
        self.book = SessionTable()
        self.returns = returns
        self._places = places
        self._slab = places[CPU]
        self._chunk_tokens = chunk_tokens
        self._clock = returns.clock
        self._waiting: dict[Agent, float] = {}
        """Who waits for a person, and since when."""
        self._ended, self._forgotten = metrics.sessions_ended, metrics.sessions_forgotten
        metrics.sessions.labels(ASKING).set_function(lambda: self.active)
        metrics.sessions.labels(WAITING).set_function(lambda: self.waiting)

    @property
    def waiting(self) -> int:
        """How many of those with a name wait for a person."""
        return sum(bool(agent.name) for agent in self._waiting)

    @property
    def active(self) -> int:
        """How many of those with a name do not."""
        return len(self.book.with_names) - self.waiting

    # ---- requests

    def asks(
        self,
        keys: Sequence[bytes],
        form: ChunkForm,
        tokens: int,
        name: str = "",
        parent: str = "",
        ends: ChunkForm | None = None,
    ) -> Agent:
        """A request for `keys`, of which there is at least one, that has to end at a state of form `ends`."""
        agent = self.book.named(tenant_of(keys[0]), name, parent) if name else self.book.nameless(keys)
        now = self._clock()
        if not agent.requests:
            agent.began = now
        if (waiting_since := self._waiting.pop(agent, None)) is not None:
            self.returns.add(now - waiting_since)
        agent.state, agent.last_asked_at, agent.form, agent.state_form = ASKING, now, form, ends
        agent.requests += 1
        agent.asked += tokens
        self._extend(agent, keys)
        ancestor = agent.parent
        while ancestor is not None:  # before the request's own chunks, which so become younger
            self._slab.refresh(self._run(self._slab, self._with_states(ancestor)))
            ancestor = ancestor.parent
        return agent

    def reserves(self, keys: Sequence[bytes]) -> None:
        """A request stores these: its prompt, and what was generated for it; or a state of it."""
        agent = self.book.continued(keys) if keys and not is_state(keys[-1]) else None
        if agent is not None and len(keys) > len(agent.chain):
            self._extend(agent, keys)

    def _extend(self, agent: Agent, keys: Sequence[bytes]) -> None:
        for dropped, parent in self.book.extend(agent, keys):
            self._waiting.pop(dropped, None)
            self._forgotten.inc()
            if parent is not None and parent in self.book:
                self._settle(parent)

    def get(self, tenant: bytes, name: str) -> Agent | None:
        return self.book.get(tenant, name)

    # ---- what becomes of its chunks

    def own(self, agent: Agent) -> tuple[bytes, ...]:
        """The keys of its last prompt that no other session needs, and of the states there."""
        return self._with_states(agent, self.book.needed_by_others(agent))

    @staticmethod
    def _with_states(agent: Agent, first: int = 0) -> tuple[bytes, ...]:
        """The keys of its last prompt from number `first` on, each before that of its state."""
        if agent.state_form is None or agent.state_form.layout is None:
            return agent.chain[first:]
        if agent.keys_with_states[0] is not agent.chain:
            layout = agent.state_form.layout.to_json()
            keys = tuple(each for key in agent.chain for each in (key, state_key(key, layout)))
            agent.keys_with_states = agent.chain, keys
        return agent.keys_with_states[1][2 * first :]

    def end(self, agent: Agent) -> None:
        """It asks for nothing any more."""
        if agent not in self.book:
            return
        self._waiting.pop(agent, None)
        agent.state = ENDED
        self._settle(agent)

    def wait_for_person(self, agent: Agent) -> None:
        """It waits for a person, so it asks again, but late."""
        if agent.state == ENDED or agent not in self.book:
            return
        agent.state = WAITING
        self._waiting.setdefault(agent, self._clock())  # a repeated hint does not begin a new wait
        self._settle(agent)

    def _settle(self, agent: Agent | None) -> None:
        """An end or a wait takes effect once all children are over. An end may be that of the last child."""
        while agent is not None and not agent.children:
            own = self.own(agent)
            if agent.state == WAITING:
                self._slab.wait(self._run(self._slab, own), self._waiting[agent])
            if agent.state != ENDED:
                return
            for index in self._places.values():
                index.evict_first(self._run(index, own))
            parent = agent.parent
            self.book.drop(agent)
            self._ended.inc()
            agent = parent

    def wait_for_tool(self, agent: Agent) -> None:
        """It waits for a tool, so it asks again soon."""
        if self._waiting.pop(agent, None) is not None:
            agent.state = ASKING
            self._slab.refresh(self._run(self._slab, self._with_states(agent)))

    @staticmethod
    def _run(index: Index, keys: Sequence[bytes]) -> list[Entry]:
        return [entry for key in keys if (entry := index.get(key)) is not None]

    # ---- display

    def top(self, most: int) -> list[Agent]:
        """The sessions with a name that saved most, the first the most."""
        return nlargest(most, self.book.with_names, key=lambda agent: agent.saved)

    def recent(self, most: int) -> list[Agent]:
        """The sessions that asked last, the youngest first."""
        return nlargest(most, self.book, key=lambda agent: agent.last_asked_at)

    def now(self, agent: Agent) -> SessionNow:
        now = self._clock()
        return {
            "session": agent.label,
            "tenant": agent.tenant.hex(),
            "state": agent.state,
            "parent": agent.parent.label if agent.parent is not None else "",
            "children": agent.children,
            "requests": agent.requests,
            "tokens": len(agent.chain) * self._chunk_tokens,
            "asked": agent.asked,
            "saved": agent.saved,
            "age": now - agent.began,
            "idle": now - agent.last_asked_at,
        }

    def kept(self, agent: Agent) -> dict[str, int]:
        """How many tokens of its last prompt each tier has."""
        size = self._chunk_tokens
        return {
            label: size * sum(key in index for key in agent.chain) for label, index in self._places.items()
        }

    def check(self) -> None:
        self.book.check()
        waiting = {agent for agent in self.book if agent.state == WAITING}
        assert waiting == set(self._waiting), "who waits is wrong"
