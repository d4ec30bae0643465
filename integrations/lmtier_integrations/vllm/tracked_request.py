"""The state of one followed request: its keys, its match, and its stored chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.request import Request

from lmtier.client.client import Client, PendingReservation
from lmtier.format.keys import KeyChain
from lmtier.wire.verbs import MAX_KEYS, RemoteMatch
from lmtier_integrations.vllm.events import KVEvents
from lmtier_integrations.vllm.identity import lora_of
from lmtier_integrations.vllm.kv_naming import KVNaming
from lmtier_integrations.vllm.load_tracker import LoadTracker
from lmtier_integrations.vllm.media import Contents
from lmtier_integrations.vllm.messages import Adapter
from lmtier_integrations.vllm.request_inputs import RequestHints
from lmtier_integrations.vllm.stats import Stats

NEVER = float("-inf")
_NO_MORE = 1 << 62  # tokens


class SchedulerParts(NamedTuple):
    """The parts of the scheduler's half that every request uses."""

    client: Client
    names: KVNaming
    copying: LoadTracker
    stats: Stats
    events: KVEvents | None


@dataclass(eq=False, slots=True)
class TrackedRequest:
    request: Request
    media: Contents
    """The images, audio and video of its placeholders."""
    adapter: Adapter | None
    """The adapter in its keys."""
    client: Client
    names: KVNaming
    said: RequestHints
    match: RemoteMatch | None = None
    looked_at: float = NEVER
    promised_at_tokens: int = 0
    """The tokens that the engine had when it got the promise."""
    promise: tuple[RemoteMatch, list[list[int]]] | None = None
    """The match that the engine has accepted for its next step, with the blocks."""
    preemptions_at_promise: int = -1
    """The number of preemptions when the engine last accepted a promise: at most one after each."""
    waits: bool = True
    """Whether it waits for its load, and enters a step when that has arrived."""
    pending_reservation: PendingReservation | None = None
    """A requested reservation for its chunks from number `stored_chunks` on."""
    stored_chunks: int = 0
    """Leading chunks that are stored or reserved."""
    loaded_chunks: int = 0
    """Leading chunks that were loaded: what is stored of them has come from here."""
    is_counted: bool = False
    """Whether what was found of it is in the metrics."""
    next_save_tokens: int = field(init=False)
    """The number of tokens at which something is stored next."""
    since: int = 0
    """The first step that may have computed any of its KV."""
    _chain: KeyChain | None = None
    _sent_chunks: int = 0
    """The number of leading chunks whose tokens were sent to the server."""

    def __post_init__(self) -> None:
        self.next_save_tokens = self.client.chunk_tokens

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

    def cacheable_tokens(self, tokens: int) -> int:
        """How many of its first `tokens` tokens may be stored and found: a request to a server has a limit.

        Later chunks have no use without those before them, so a chain ends there.
        """
        return min(tokens, MAX_KEYS * self.client.chunk_tokens)

    @property
    def _lora(self) -> str:
        return lora_of(self.request, self.adapter[1] if self.adapter is not None else "")

    def send_tokens(self) -> None:
        """Send its new tokens to the server, if the user wants that. Placeholders are not sent."""
        if not self.names.sends_tokens or self.media:
            return
        keys: Sequence[bytes] = self.keys().keys
        first, size = self._sent_chunks, self.client.chunk_tokens
        if new := keys[first:]:
            tokens = self.request.all_token_ids[first * size : len(keys) * size]
            self.names.send_tokens(new, tokens, self._lora, self.said.salt, keys[first - 1] if first else b"")
            self._sent_chunks = len(keys)

    def release_match(self) -> None:
        """End the leases of its match."""
        if self.match is not None:
            self.client.release(self.match)
            self.match = None

    def take_pending_reservation(self) -> PendingReservation | None:
        """The requested reservation, which the caller must use or withdraw now."""
        asked, self.pending_reservation = self.pending_reservation, None
        return asked

    def withdraw(self) -> None:
        if (asked := self.take_pending_reservation()) is not None:
            self.client.cancel_reserve(asked)

    def stop_storing(self) -> None:
        """Another connector has loaded a part of it.

        Storing begins again after a later lookup that finds chunks.
        """
        self.withdraw()
        self.stored_chunks, self.next_save_tokens = 0, _NO_MORE

    def rewind(self, computed: int) -> None:
        """It was preempted, or a load failed: recomputed chunks are stored again if they are missing."""
        if self.next_save_tokens == _NO_MORE:
            return
        size = self.client.chunk_tokens
        self.stored_chunks, self.loaded_chunks = (
            min(self.stored_chunks, computed // size),
            min(self.loaded_chunks, computed // size),
        )
        self.next_save_tokens = (computed // size + 1) * size

    def rekey(self) -> bool:
        """Give it new keys. False: it gets none, because a part of it is computed already."""
        self.release_match()
        self.withdraw()
        before, self.adapter = self.adapter, self.names.adapter_of(self.request)
        if self.media and self.adapter != before:
            return False  # the names of its items may be of the adapter before
        if self.request.num_computed_tokens or (self.adapter is not None and not self.adapter[1]):
            return False
        self._chain, self.looked_at = None, NEVER
        self.stored_chunks, self.loaded_chunks, self.next_save_tokens, self._sent_chunks = (
            0,
            0,
            self.client.chunk_tokens,
            0,
        )
        return True
