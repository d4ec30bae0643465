"""KV events for routers, over ZMQ in vLLM's format: the chunks that enter and leave each tier of this server.

    PUB     topic, sequence number (8 bytes, big-endian), a batch in msgpack
    ROUTER  gets a number, and sends the remembered batches from this number on again

A chunk is sent as a block of `chunk_tokens` tokens; its hash is its key. Its tokens and its parent are
included if an engine has sent them. The owner only queues new changes; a thread encodes and sends them. A
slow subscriber misses batches, and the sequence numbers show that. If this server misses changes, it clears
the routers' state and sends everything again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import zmq

from lmtier.core.cache import Cache
from lmtier.core.match import CPU, State
from lmtier.errors import ConfigError
from lmtier.format.keys import is_state
from lmtier.observe.follower import Follower
from lmtier.observe.journal import Change, Journal
from lmtier.observe.prompts import PromptChunk, Prompts
from lmtier.threads import start_thread

BATCHES = 10_000
"""The most batches that can be replayed, if they are at most BYTES."""
BYTES = 64 << 20
_A_TURN = 4096  # changes
_WAITING = 256  # batches that may wait for the thread; further changes wait in the journal
_HIGH_WATER = 100_000
_PATIENCE = 2.0
_END = (-1).to_bytes(8, "big", signed=True)


class _Told(NamedTuple):
    """Chunks that entered or left a tier together. Each is the child of the one before."""

    tier: str
    came: bool
    keys: list[bytes]
    chunks: list[PromptChunk]
    """The known tokens of these chunks; empty if none are known."""


_Batch = list[_Told] | None
"""None: routers must forget all earlier events."""


class Publisher(Follower):
    def __init__(
        self, cache: Cache, journal: Journal, prompts: Prompts, publish: str, replay: str, topic: str
    ) -> None:
        """`journal` follows the cache."""
        self._cache, self._prompts = cache, prompts
        self._size = cache.chunk_tokens
        self._shared = cache.lower.shared
        self._remote = {tier.label for tier in self._shared}
        self._cleared = 0
        self._places = {CPU: cache.index, **{tier.label: tier.index for tier in cache.lower.owned}}
        self._journal, self._position = journal, journal.end
        self._again: deque[Change] = deque()
        """Changes to send because the chunks were there before, or because some changes were missed."""
        self._announced: set[str] = set()
        self._elsewhere: list[Change] = []
        cache.followers.add(self)
        self._announce()
        self._queue: SimpleQueue[tuple[float, _Batch] | None] = SimpleQueue()
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._pub = self._open(zmq.PUB, publish)
            self._router = self._open(zmq.ROUTER, replay) if replay else None
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._bell)
            raise
        self.where = [("kv-events", _address(self._pub))]
        if self._router is not None:
            self.where.append(("kv-replay", _address(self._router)))
        self._thread = start_thread("lmtier-kv-events", self._run)

    def _open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set_hwm(_HIGH_WATER)
        made.linger = 0
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"serve: kv_events: cannot bind {endpoint}: {error}") from None
        return made

    # ---- the owner

    def changed_elsewhere(self, tier: str, came: bool, keys: Collection[bytes]) -> None:
        self._elsewhere += (Change(tier, came, key) for key in keys if not self._cache.index.is_record(key))

    def turn(self) -> None:
        """Queue the new changes."""
        if (cleared := sum(tier.cleared for tier in self._shared)) != self._cleared:
            self._cleared = cleared  # which keys were cleared is not known
            self.tell_all_again()
        self._announce()
        if self._queue.qsize() >= _WAITING:
            return
        changes = self._journal.since(self._position, _A_TURN)
        if changes is None:
            self.tell_all_again()
            return
        self._position += len(changes)
        if self._elsewhere:
            changes += self._elsewhere
            self._elsewhere = []
        while self._again and len(changes) < _A_TURN:
            change = self._again.popleft()
            # The chunk may have left since, and that event was sent.
            if change.key in self._places[change.tier]:
                changes.append(change)
        # States are no blocks of tokens, so routers need not know them.
        if chunks := [change for change in changes if not is_state(change.key)]:
            self._put(list(self._runs(chunks)))

    def tell_all_again(self) -> None:
        """Make routers forget everything, then send the content of all tiers."""
        self._position = self._journal.end
        self._again.clear()
        self._announced.clear()
        self._elsewhere.clear()
        self._put(None)

    def _announce(self) -> None:
        """Send the chunks that a tier had before it was followed, once they are known."""
        cold = {below.label for below in self._cache.lower if not below.is_warm}
        for tier in self._places.keys() - self._announced - cold:
            self._announced.add(tier)
            ready = (each.key for each in self._places[tier].entries() if each.state is State.READY)
            self._again += (Change(tier, True, key) for key in ready if not self._cache.index.is_record(key))

    def _runs(self, changes: Sequence[Change]) -> Iterator[_Told]:
        for (tier, came), group in groupby(changes, key=lambda change: change[:2]):
            run = _Told(tier, came, [], [])
            for change in group:
                chunk = self._prompts.get(change.key) if came else None
                is_next = (
                    chunk is None if not run.chunks else chunk is not None and chunk.parent == run.keys[-1]
                )
                if run.keys and not is_next:
                    yield run
                    run = _Told(tier, came, [], [])
                run.keys.append(change.key)
                if chunk is not None:
                    run.chunks.append(chunk)
            yield run

    def _put(self, batch: _Batch) -> None:
        self._queue.put((time.time(), batch))
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        self.turn()
        self._queue.put(None)
        os.eventfd_write(self._bell, 1)
        self._thread.join(_PATIENCE)

    # ---- the thread

    def _run(self) -> None:
        sent: deque[tuple[bytes, bytes]] = deque(maxlen=BATCHES)
        held = number = 0
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        is_over = False
        while not is_over:
            ready = dict(poller.poll())
            if self._router is not None and self._router in ready:
                self._replay(sent)
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            while not self._queue.empty():
                told = self._queue.get()
                if told is None:
                    is_over = True
                    break
                payload = self._encoded(*told)
                head = number.to_bytes(8, "big")
                number += 1
                if len(sent) == BATCHES:
                    held -= len(sent[0][1])
                sent.append((head, payload))
                held += len(payload)
                while held > BYTES and len(sent) > 1:
                    held -= len(sent.popleft()[1])
                self._pub.send_multipart((self._topic, head, payload))
        for each in (self._pub, self._router):
            if each is not None:
                each.close(linger=int(_PATIENCE * 500))
        self._context.term()
        os.close(self._bell)

    def _replay(self, sent: Iterable[tuple[bytes, bytes]]) -> None:
        assert self._router is not None
        with suppress(zmq.Again):  # a router that does not read its replay gets no more of it
            frames = self._router.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) != 8:
                return
            client, _, first = frames
            for head, payload in sent:
                if head >= first:
                    self._router.send_multipart((client, b"", self._topic, head, payload), zmq.NOBLOCK)
            self._router.send_multipart((client, b"", b"", _END, b""), zmq.NOBLOCK)

    def _encoded(self, at: float, batch: _Batch) -> bytes:
        events = [{"type": "AllBlocksCleared"}] if batch is None else [self._event(told) for told in batch]
        return msgspec.msgpack.encode([at, events])

    def _event(self, told: _Told) -> dict[str, Any]:
        where: dict[str, Any] = {"medium": "CPU" if told.tier == CPU else "STORAGE"}
        where["locality"] = "REMOTE" if told.tier in self._remote else "LOCAL"
        if told.tier != CPU:
            where["ownership"] = told.tier
        if not told.came:
            return {"type": "BlockRemoved", "block_hashes": told.keys, **where}
        first = told.chunks[0] if told.chunks else None
        return {
            "type": "BlockStored",
            "block_hashes": told.keys,
            "parent_block_hash": first.parent if first is not None else None,
            "token_ids": [token for chunk in told.chunks for token in chunk.token_ids],
            "block_size": self._size,
            "lora_id": None,
            "lora_name": (first.origin.lora or None) if first is not None else None,
            "extra_keys": [_extra(chunk) for chunk in told.chunks] if told.chunks else None,
            **where,
        }


def _extra(chunk: PromptChunk) -> tuple[str, ...] | None:
    """The extra keys of a block in vLLM's format: the adapter, and for the first block the salt."""
    salt = chunk.origin.salt if not chunk.number else ""
    return tuple(each for each in (chunk.origin.lora, salt) if each) or None


def _address(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
