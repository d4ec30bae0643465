"""The request log: the lookups of engines as JSON lines in the Mooncake trace format, for replay.

    {"timestamp": ms since 1970, "input_length": tokens, "output_length": 0, "hash_ids": [one a chunk]}

An id is 53 bits of a chunk's key. A partial chunk at the end has a unique negative id. The number of
generated tokens is not known here. The owner only queues; a thread writes. Lookups that the thread cannot
keep up with or cannot write are dropped and counted. The size of the file is bounded: the previous file is
`PATH.1`, older ones are deleted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from lmtier.errors import ConfigError, log
from lmtier.observe.metrics import Metrics
from lmtier.threads import start_thread

MAX_BYTES = 256 << 20
"""The most bytes of each of the two files."""
MAX_KEYS = 1 << 20
"""The most keys that wait to be written: some 100 MB."""
_PATIENCE = 2.0  # seconds for the last lines; a disk that hangs must not keep the server from ending


class RequestLog:
    def __init__(self, path: str, chunk_tokens: int, metrics: Metrics, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = Path(path)
        self._chunk_tokens = chunk_tokens
        self._dropped = metrics.request_log_dropped
        self._max_bytes = max_bytes
        # From the clock, because the file goes on after a restart.
        self._tails = -(time.time_ns() // 1000)
        self._queue: SimpleQueue[tuple[float, Sequence[bytes], int] | None] = SimpleQueue()
        self._room = MAX_KEYS
        self._written = 0
        self._has_failed = False
        try:
            self._file = _open(self._path)
        except OSError as error:
            raise ConfigError(f"serve: request_log {path}: {error.strerror}") from None
        self._bytes = os.fstat(self._file.fileno()).st_size
        self._thread = start_thread("lmtier-requests", self._write)

    def note(self, keys: Sequence[bytes], tokens: int) -> None:
        """Log the lookup of a prompt of `tokens` tokens. `keys` are those of its whole chunks."""
        if self._has_failed or self._room + self._written < len(keys):
            self._dropped.inc()
            return
        self._room -= len(keys)
        self._queue.put((time.time(), keys, tokens))

    def close(self) -> None:
        """Write the waiting lines, if that does not take long."""
        self._queue.put(None)
        self._thread.join(_PATIENCE)

    # ---- the thread

    def _write(self) -> None:
        while (lookup := self._queue.get()) is not None:
            try:
                if self._has_failed:
                    self._dropped.inc()
                else:
                    self._put(self._line(*lookup))
            except OSError as error:
                self._has_failed = True
                self._dropped.inc()
                log.error("lmtier: the request log stops, it cannot write %s: %s", self._path, error.strerror)
            self._written += len(lookup[1])
        self._file.close()

    def _line(self, at: float, keys: Sequence[bytes], tokens: int) -> bytes:
        ids = [int.from_bytes(key[-8:], "little") >> 11 for key in keys]
        if tokens > len(keys) * self._chunk_tokens:
            self._tails -= 1
            ids.append(self._tails)
        line = {"timestamp": int(at * 1000), "input_length": tokens, "output_length": 0, "hash_ids": ids}
        return json.dumps(line).encode() + b"\n"

    def _put(self, line: bytes) -> None:
        if self._bytes and self._bytes + len(line) > self._max_bytes:
            os.replace(self._path, f"{self._path}.1")
            self._file.close()
            self._file = _open(self._path)
            self._bytes = 0
        self._append(line)
        self._bytes += len(line)

    def _append(self, line: bytes) -> None:
        """Write all of the line or nothing: with half a line in it, readers refuse the file."""
        unwritten = memoryview(line)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            if written := len(line) - len(unwritten):
                with suppress(OSError):  # a pipe cannot be shortened
                    self._file.truncate(self._file.tell() - written)
            raise


def _open(path: Path) -> BinaryIO:
    """Only this user may read it: a reader who guesses a prompt can compute its keys and find its lookups."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return os.fdopen(fd, "ab", buffering=0)
