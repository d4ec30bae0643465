"""The state of one followed request: its keys, its match, and its stored chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.request import Request

from lmtier.client.client import Asked, Client
from lmtier.core.match import Match
from lmtier.format.keys import KeyChain
from lmtier.wire.verbs import MAX_KEYS
from lmtier_integrations.vllm.copying import Copying
from lmtier_integrations.vllm.events import Events
from lmtier_integrations.vllm.identity import lora_of
from lmtier_integrations.vllm.media import Contents
from lmtier_integrations.vllm.messages import Adapter
from lmtier_integrations.vllm.names import Names
from lmtier_integrations.vllm.said import Said
from lmtier_integrations.vllm.stats import Stats

NEVER = float("-inf")
_NO_MORE = 1 << 62  # tokens


class Parts(NamedTuple):
    """The parts of the scheduler's half that every request uses."""

    client: Client
    names: Names
    copying: Copying
    stats: Stats
    events: Events | None


@dataclass(eq=False, slots=True)
class FollowedRequest:
    request: Request
    media: Contents
    """The images, audio and video of its placeholders."""
    adapter: Adapter | None
    """The adapter in its keys."""
    client: Client
    names: Names
    said: Said
    match: Match | None = None
    looked_at: float = NEVER
    computed: int = 0
    """The tokens that the engine had when it got the promise."""
    promise: tuple[Match, list[list[int]]] | None = None
    """The match that the engine has accepted for its next step, with the blocks."""
    taken: int = -1
    """The number of preemptions when the engine last accepted a promise: at most one after each."""
    waits: bool = True
    """Whether it waits for its load, and enters a step when that has arrived."""
    asked: Asked | None = None
    """A requested reservation for its chunks from number `stored` on."""
    stored: int = 0
    """Leading chunks that are stored or reserved."""
    loaded: int = 0
    """Leading chunks that were loaded: what is stored of them has come from here."""
    is_counted: bool = False
    """Whether what was found of it is in the metrics."""
    due: int = field(init=False)
    """The number of tokens at which something is stored next."""
    since: int = 0
    """The first step that may have computed any of its KV."""
    _chain: KeyChain | None = None
    _told: int = 0
    """The number of leading chunks whose tokens were sent to the server."""

    def __post_init__(self) -> None:
        self.due = self.client.chunk_tokens

    def keys(self, tokens: int = 0) -> KeyChain:
        """The keys of the whole chunks among at least its first `tokens` tokens."""
        chain = self._chain
        if chain is None:
            first = self.names.seed(self._lora, self.said.salt)
            chain = self._chain = KeyChain(first, self.client.chunk_tokens, (), self.media)
        if chain.tokens < min(tokens, len(self.said.tokens)):
            chain.extend(self.said.tokens[chain.tokens : tokens])
        if tokens > chain.tokens:
            chain.extend(self.request.all_token_ids[chain.tokens : tokens])
        return chain

    def covered(self, tokens: int) -> int:
        """How many of its first `tokens` tokens may be stored and found: a request to a server has a limit.

        Later chunks have no use without those before them, so a chain ends there.
        """
        return min(tokens, MAX_KEYS * self.client.chunk_tokens)

    @property
    def _lora(self) -> str:
        return lora_of(self.request, self.adapter[1] if self.adapter is not None else "")

    def tell(self) -> None:
        """Send its new tokens to the server, if the user wants that. Placeholders are not sent."""
        if not self.names.tells_tokens or self.media:
            return
        keys: Sequence[bytes] = self.keys().keys
        first, size = self._told, self.client.chunk_tokens
        if new := keys[first:]:
            tokens = self.request.all_token_ids[first * size : len(keys) * size]
            self.names.tell(new, tokens, self._lora, self.said.salt, keys[first - 1] if first else b"")
            self._told = len(keys)

    def drop(self) -> None:
        """End the leases of its match."""
        if self.match is not None:
            self.client.release(self.match)
            self.match = None

    def take_asked(self) -> Asked | None:
        """The requested reservation, which the caller must use or withdraw now."""
        asked, self.asked = self.asked, None
        return asked

    def withdraw(self) -> None:
        if (asked := self.take_asked()) is not None:
            self.client.withdraw(asked)

    def stop_storing(self) -> None:
        """Another connector has loaded a part of it.

        Storing begins again after a later lookup that finds chunks.
        """
        self.withdraw()
        self.stored, self.due = 0, _NO_MORE

    def go_back(self, computed: int) -> None:
        """It was preempted, or a load failed: recomputed chunks are stored again if they are missing."""
        if self.due == _NO_MORE:
            return
        size = self.client.chunk_tokens
        self.stored, self.loaded = min(self.stored, computed // size), min(self.loaded, computed // size)
        self.due = (computed // size + 1) * size

    def begin_anew(self) -> bool:
        """Give it new keys. False: it gets none, because a part of it is computed already."""
        self.drop()
        self.withdraw()
        before, self.adapter = self.adapter, self.names.adapter_of(self.request)
        if self.media and self.adapter != before:
            return False  # the names of its items may be of the adapter before
        if self.request.num_computed_tokens or (self.adapter is not None and not self.adapter[1]):
            return False
        self._chain, self.looked_at = None, NEVER
        self.stored, self.loaded, self.due, self._told = 0, 0, self.client.chunk_tokens, 0
        return True
