"""KV events for routers, over ZMQ in vLLM's format: the chunks that enter and leave each tier of this server.

    PUB     topic, sequence number (8 bytes, big-endian), a batch in msgpack
    ROUTER  gets a number, and sends the remembered batches from this number on again

A chunk is sent as a block of `chunk_tokens` tokens; its hash is the end of its key. Its tokens and its parent
are included if an engine has sent them. The owner only queues new changes; a thread encodes and sends them. A
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
from lmtier.core.lower_tiers import LowerTiers
from lmtier.core.match import CPU, EntryState
from lmtier.errors import ConfigError
from lmtier.format.keys import is_state
from lmtier.observe.follower import CacheObserver
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
_RANK = 0  # vLLM's data-parallel rank, which some routers need
_END = (-1).to_bytes(8, "big", signed=True)


class _EventRun(NamedTuple):
    """Chunks that entered or left a tier together. Each is the child of the one before."""

    tier: str
    is_added: bool
    keys: list[bytes]
    chunks: list[PromptChunk]
    """The known tokens of these chunks; empty if none are known."""


_Batch = list[_EventRun] | None
"""None: routers must forget all earlier events."""


class Publisher(CacheObserver):
    def __init__(
        self, cache: Cache, journal: Journal, prompts: Prompts, publish: str, replay: str, topic: str
    ) -> None:
        """`journal` follows the cache."""
        self._cache, self._prompts = cache, prompts
        self._size = cache.chunk_tokens
        self._shared = [tier for tier in cache.lower.shared if not tier.source]
        self._where = _where_of(cache.lower)
        self._cleared = 0
        self._journal, self._position = journal, journal.end
        self._to_resend: deque[Change] = deque()
        """Changes to send because the chunks were there before, or because some changes were missed."""
        self._announced: set[str] = set()
        self._elsewhere: list[Change] = []
        cache.followers.add(self)
        self._announce()
        self._queue: SimpleQueue[tuple[float, _Batch] | None] = SimpleQueue()
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._pub = self._open(zmq.PUB, publish)
            self._router = self._open(zmq.ROUTER, replay) if replay else None
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake_fd)
            raise
        self.address = [("kv-events", _address(self._pub))]
        if self._router is not None:
            self.address.append(("kv-replay", _address(self._router)))
        self._thread = start_thread("lmtier-kv-events", self._run)

    def _open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(_HIGH_WATER)
        socket.linger = 0
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"serve: kv_events: cannot bind {endpoint}: {error}") from None
        return socket

    # ---- the owner

    def changed_elsewhere(self, tier: str, came: bool, keys: Collection[bytes]) -> None:
        self._elsewhere += (Change(tier, came, key) for key in keys if not self._cache.index.is_record(key))

    def turn(self) -> None:
        """Queue the new changes."""
        if (clear_count := sum(tier.cleared for tier in self._shared)) != self._cleared:
            self._cleared = clear_count  # which keys were cleared is not known
            self.resend_all()
        self._announce()
        if self._queue.qsize() >= _WAITING:
            return
        changes = self._journal.since(self._position, _A_TURN)
        if changes is None:
            self.resend_all()
            return
        self._position += len(changes)
        if self._elsewhere:
            changes += self._elsewhere
            self._elsewhere = []
        while self._to_resend and len(changes) < _A_TURN:
            change = self._to_resend.popleft()
            # The chunk may have left since, and that event was sent.
            if change.key in self._cache.indexes[change.tier]:
                changes.append(change)
        # States are no blocks of tokens, so routers need not know them.
        if chunks := [change for change in changes if not is_state(change.key)]:
            self._put(list(self._runs(self._in_order(chunks))))

    def resend_all(self) -> None:
        """Make routers forget everything, then send the content of all tiers."""
        self._position = self._journal.end
        self._to_resend.clear()
        self._announced.clear()
        self._elsewhere.clear()
        self._put(None)

    def _announce(self) -> None:
        """Send the chunks that a tier had before it was followed, once they are known."""
        cold_tiers = {below.label for below in self._cache.lower if not below.is_warm}
        for tier in self._cache.indexes.keys() - self._announced - cold_tiers:
            self._announced.add(tier)
            ready_keys = (
                entry.key for entry in self._cache.indexes[tier].entries() if entry.state is EntryState.READY
            )
            self._to_resend += (
                Change(tier, True, key) for key in ready_keys if not self._cache.index.is_record(key)
            )

    def _in_order(self, changes: Sequence[Change]) -> Iterator[Change]:
        """The changes, and after a chunk again those that came before it and follow it in a prompt. Disks
        write in any order, and some routers drop a chunk whose parent they do not know yet."""
        upcoming, budget = {change for change in changes if change.is_added}, _A_TURN
        for change in changes:
            yield change
            upcoming.discard(change)
            tier_index = self._cache.indexes.get(change.tier)
            if not change.is_added or tier_index is None:
                continue
            parents = [change.key]
            while parents and budget > 0:
                for key in self._prompts.after(parents.pop()):
                    entry = tier_index.get(key)
                    change_again = Change(change.tier, True, key)
                    if entry is not None and entry.state is EntryState.READY and change_again not in upcoming:
                        yield change_again
                        parents.append(key)
                        budget -= 1

    def _runs(self, changes: Iterable[Change]) -> Iterator[_EventRun]:
        for (tier, came), group in groupby(changes, key=lambda change: change[:2]):
            run = _EventRun(tier, came, [], [])
            for change in group:
                chunk = self._prompts.get(change.key) if came else None
                continues_run = (
                    chunk is None if not run.chunks else chunk is not None and chunk.parent == run.keys[-1]
                )
                if run.keys and not continues_run:
                    yield run
                    run = _EventRun(tier, came, [], [])
                run.keys.append(change.key)
                if chunk is not None:
                    run.chunks.append(chunk)
            yield run

    def _put(self, batch: _Batch) -> None:
        self._queue.put((time.time(), batch))
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        self.turn()
        self._queue.put(None)
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(_PATIENCE)

    # ---- the thread

    def _run(self) -> None:
        replayable: deque[tuple[bytes, bytes]] = deque(maxlen=BATCHES)
        replayable_bytes = number = 0
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        is_closing = False
        while not is_closing:
            ready = dict(poller.poll())
            if self._router is not None and self._router in ready:
                self._replay(replayable)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            while not self._queue.empty():
                changes = self._queue.get()
                if changes is None:
                    is_closing = True
                    break
                payload = self._encoded(*changes)
                sequence = number.to_bytes(8, "big")
                number += 1
                if len(replayable) == BATCHES:
                    replayable_bytes -= len(replayable[0][1])
                replayable.append((sequence, payload))
                replayable_bytes += len(payload)
                while replayable_bytes > BYTES and len(replayable) > 1:
                    replayable_bytes -= len(replayable.popleft()[1])
                self._pub.send_multipart((self._topic, sequence, payload))
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=int(_PATIENCE * 500))
        self._context.term()
        os.close(self._wake_fd)

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
        events = (
            [{"type": "AllBlocksCleared"}] if batch is None else [self._event(changes) for changes in batch]
        )
        return msgspec.msgpack.encode([at, events, _RANK])

    def _event(self, changes: _EventRun) -> dict[str, Any]:
        where = self._where[changes.tier]
        if not changes.is_added:
            return {"type": "BlockRemoved", "block_hashes": [*map(hash_of, changes.keys)], **where}
        first = changes.chunks[0] if changes.chunks else None
        return {
            "type": "BlockStored",
            "block_hashes": [*map(hash_of, changes.keys)],
            "parent_block_hash": hash_of(first.parent) if first is not None and first.parent else None,
            "token_ids": [token for chunk in changes.chunks for token in chunk.token_ids],
            "block_size": self._size,
            "lora_id": None,
            "lora_name": (first.origin.lora or None) if first is not None else None,
            "extra_keys": [_extra(chunk) for chunk in changes.chunks] if changes.chunks else None,
            **where,
        }


def _where_of(lower: LowerTiers) -> dict[str, dict[str, str]]:
    """How events name the tiers. Some routers ignore events with an `ownership` that they do not know, so
    only a tier has one whose events another tier's would contradict."""
    by_tier = {CPU: {"medium": "CPU", "locality": "LOCAL"}}
    for tier in lower.ours:
        fields = {"medium": "STORAGE", "locality": "REMOTE" if tier in lower.shared else "LOCAL"}
        by_tier[tier.label] = {**fields, "ownership": tier.label} if fields in by_tier.values() else fields
    return by_tier


def hash_of(key: bytes) -> int:
    """As vLLM shortens its hashes. Routers hold 64 bits, and some refuse events with longer ones."""
    return int.from_bytes(key[-8:], "big")


def _extra(chunk: PromptChunk) -> tuple[str, ...] | None:
    """The extra keys of a block in vLLM's format: the adapter, and for the first block the salt."""
    salt = chunk.origin.salt if not chunk.number else ""
    return tuple(each for each in (chunk.origin.lora, salt) if each) or None


def _address(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
