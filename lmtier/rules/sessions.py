"""The book of sessions: who asks, what each asked for last, and what no other needs. No I/O.

A session is a conversation, or one agent: its prompts mostly extend each other. Its name comes from the
engine. A request without a name continues the session whose last prompt it extends, if there is one.

The book keeps the keys of each session's last prompt. Keys are chained, so two prompts share a prefix and
nothing else, and the keys that only one session needs are the end of its prompt. The book is bounded. It
forgets those first that asked least recently, and sessions without a name before others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lmtier.format.keys import tenant_of
from lmtier.format.layout import ChunkForm

MAX_SESSIONS = 4096
MAX_NAMELESS = 1024
MAX_KEYS = 1 << 19
"""The most keys in the book: some 40 MB."""
MAX_ANCESTORS = 8
"""The most ancestors of a session: each of its requests refreshes the prompts of all of them."""
_LOOK_BACK = 256
"""How many chunks a request can be longer than the one that it continues, if it has no name."""

ASKING, WAITING, ENDED = "active", "waiting", "over"


@dataclass(eq=False, slots=True)
class Agent:
    """One session."""

    tenant: bytes
    name: str
    """Empty: it was found by its prompts."""
    number: int
    parent: Agent | None = None
    """The session that started this one and lives as long as it."""
    children: int = 0
    """Sessions that it has started and that are not over."""
    below: int = 0
    """Generations of children below it, at most."""
    state: str = ASKING
    chain: tuple[bytes, ...] = ()
    """The keys of its last prompt."""
    form: ChunkForm | None = None
    state_form: ChunkForm | None = None
    """The form of the states at which its prompts can go on; None: anywhere."""
    keys_with_states: tuple[tuple[bytes, ...], tuple[bytes, ...]] = ((), ())
    """A chain, and its keys with those of its states: made when they are first needed."""
    began: float = 0.0
    last_asked_at: float = 0.0
    """When it asked last."""
    requests: int = 0
    asked: int = 0
    """Tokens of all its prompts."""
    saved: int = 0
    """Tokens of these requests that a tier supplied."""

    def __repr__(self) -> str:
        return f"<Agent {self.label}: {self.state}, {len(self.chain)} chunks, {self.children} children>"

    @property
    def label(self) -> str:
        """A name for display."""
        return self.name or f"(nameless {self.number})"


class SessionTable:
    def __init__(self, max_keys: int = MAX_KEYS, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_keys, self._max_sessions = max_keys, max_sessions
        self._named: OrderedDict[tuple[bytes, str], Agent] = OrderedDict()
        self._nameless: OrderedDict[int, Agent] = OrderedDict()
        self._tails: dict[bytes, Agent] = {}
        """By the last key of a prompt: the session that asked for it last."""
        self._number = 0
        self.keys = 0
        """The number of keys in all chains."""

    def __len__(self) -> int:
        return len(self._named) + len(self._nameless)

    @property
    def with_names(self) -> Collection[Agent]:
        """The sessions that requests name. Prompts without a name are plain traffic, of agents or not."""
        return self._named.values()

    def __iter__(self) -> Iterator[Agent]:
        yield from self._named.values()
        yield from self._nameless.values()

    def get(self, tenant: bytes, name: str) -> Agent | None:
        return self._named.get((tenant, name))

    def __contains__(self, agent: Agent) -> bool:
        if agent.name:
            return self._named.get((agent.tenant, agent.name)) is agent
        return agent.number in self._nameless

    # ---- requests

    def named(self, tenant: bytes, name: str, parent: str = "") -> Agent:
        """The session of this name, which may be new. `parent` is its parent's name."""
        agent = self._named.get((tenant, name))
        if agent is None:
            self._number += 1
            agent = self._named[tenant, name] = Agent(tenant, name, self._number)
        for ancestor in reversed([*_ancestors(agent)]):  # a parent is not forgotten before its child
            if ancestor.name:
                self._named.move_to_end((ancestor.tenant, ancestor.name))
        if parent and agent.parent is None and parent != name:
            parent_agent = self.named(tenant, parent)
            ancestors = [*_ancestors(parent_agent)]
            # Otherwise both would wait for the other's end, or one would have too many ancestors.
            if agent not in ancestors and len(ancestors) + agent.below <= MAX_ANCESTORS:
                agent.parent = parent_agent
                parent_agent.children += 1
                for generation, ancestor in enumerate(ancestors, agent.below + 1):
                    ancestor.below = max(ancestor.below, generation)
        return agent

    def nameless(self, keys: Sequence[bytes]) -> Agent:
        """The session that a request without a name belongs to, which may be new."""
        agent = self.continued(keys)
        if agent is None:
            self._number += 1
            agent = self._nameless[self._number] = Agent(tenant_of(keys[0]), "", self._number)
        if not agent.name:
            self._nameless.move_to_end(agent.number)
        return agent

    def continued(self, keys: Sequence[bytes]) -> Agent | None:
        """The session whose last prompt `keys` extend or repeat, if it is not much shorter."""
        tails = self._tails
        for key in reversed(keys[-_LOOK_BACK:]):
            if (agent := tails.get(key)) is not None:
                return agent
        return None

    def extend(self, agent: Agent, keys: Sequence[bytes]) -> list[tuple[Agent, Agent | None]]:
        """Its last prompt is `keys` now. Returns the sessions that had to be forgotten for it, each with its
        parent."""
        self._set_chain(agent, tuple(keys))
        dropped: list[tuple[Agent, Agent | None]] = []
        while len(self) > 1 and (
            self.keys > self._max_keys
            or len(self._named) > self._max_sessions
            or len(self._nameless) > MAX_NAMELESS
        ):
            tables: tuple[OrderedDict[int, Agent] | OrderedDict[tuple[bytes, str], Agent], ...]
            tables = (self._named, self._nameless)
            if len(self._named) <= self._max_sessions and self._nameless:
                tables = (self._nameless, self._named)
            oldest = next(each for table in tables for each in table.values() if each is not agent)
            dropped.append((oldest, oldest.parent))
            self.drop(oldest)
        return dropped

    def _set_chain(self, agent: Agent, chain: tuple[bytes, ...]) -> None:
        if agent.chain and self._tails.get(agent.chain[-1]) is agent:
            del self._tails[agent.chain[-1]]
        self.keys += len(chain) - len(agent.chain)
        agent.chain = chain
        if chain:
            self._tails[chain[-1]] = agent

    # ---- ends

    def drop(self, agent: Agent) -> None:
        self._set_chain(agent, ())
        if agent.name:
            del self._named[agent.tenant, agent.name]
        else:
            del self._nameless[agent.number]
        if agent.parent is not None:
            agent.parent.children -= 1
            if not agent.parent.children:
                agent.parent.below = 0
            agent.parent = None
        for each in self if agent.children else ():
            if each.parent is agent:
                each.parent = None
                agent.children -= 1

    def needed_by_others(self, agent: Agent) -> int:
        """How many chunks at the start of its last prompt other sessions need too."""
        mine, shared = agent.chain, 0
        for other in self:
            chain = other.chain
            if other is agent or len(chain) <= shared or shared >= len(mine) or chain[shared] != mine[shared]:
                continue
            low, high = shared + 1, min(len(mine), len(chain))
            while low < high:  # equal keys have equal keys before them
                middle = (low + high + 1) // 2
                low, high = (middle, high) if mine[middle - 1] == chain[middle - 1] else (low, middle - 1)
            shared = low
        return shared

    def check(self) -> None:
        """Check every invariant; raises AssertionError."""
        agents = set(self)
        assert self.keys == sum(len(agent.chain) for agent in agents), "the number of keys is wrong"
        assert self.keys <= self._max_keys or len(agents) == 1, "too many keys"
        assert all(self._tails[key].chain[-1] == key for key in self._tails), "a tail is not its session's"
        assert set(self._tails.values()) <= agents, "a tail of a forgotten session"
        parents = [agent.parent for agent in agents if agent.parent is not None]
        assert agents.issuperset(parents), "a forgotten session has a child"
        for agent in agents:
            assert agent.children == parents.count(agent), f"{agent!r} has {parents.count(agent)}"
            for generation, ancestor in enumerate(_ancestors(agent)):
                assert generation <= min(ancestor.below, MAX_ANCESTORS), f"{ancestor!r} has more generations"


def _ancestors(agent: Agent | None) -> Iterator[Agent]:
    while agent is not None:
        yield agent
        agent = agent.parent
