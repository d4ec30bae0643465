"""Traffic to replay: readers for Mooncake's, Qwen-Bailian's, Azure's and our own request logs.

    Mooncake, ours   a JSON object per line: timestamp (ms), input_length, output_length, hash_ids
    Qwen-Bailian     the same with chat_id and others; its timestamp is in seconds
    Azure            CSV: TIMESTAMP, ContextTokens, GeneratedTokens. It has no contents: nothing is shared

`hash_ids[i]` names the i-th block of the prompt; the last may be a part of one. A file may be gzipped. A line
of JSON may also have `session_id`, `parent_session_id`, and `hints`: a list of actions, each with an
`action_type` and a `payload`, that are executed after the request.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from lmtier.errors import ConfigError
from lmtier.format.keys import KEY_BYTES, NAMESPACE_BYTES, NO_TENANT, namespace
from lmtier.rules.hints import END, WAIT, Action

HINTS = ("none", "trace", "ends", "waits")
"""Which hints a replay gets: none, and no sessions; those of the trace; the ends of sessions; waits too."""
PERSON_AFTER = 10.0
"""With `waits`: an agent that is silent for so many seconds waits for a person."""
_SPACE = namespace("simulated")


class TraceRequest(NamedTuple):
    at: float
    """Seconds since the first one."""
    tokens: int
    """The number of tokens of the prompt."""
    output: int
    blocks: Sequence[Hashable]
    """The content of the prompt, block by block; the last may be partial. Empty: not known."""
    session: str = ""
    parent: str = ""
    """The session that started this one."""
    hints: tuple[Action, ...] = ()
    """They are executed after it."""


@dataclass(frozen=True)
class Trace:
    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]

    @property
    def seconds(self) -> float:
        return self.requests[-1].at - self.requests[0].at

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    def hinted(self, what: str, person_after: float = PERSON_AFTER) -> Trace:
        """This trace with other hints; `what` is one of HINTS.

        A trace does not say when an agent knew that its session was over, or that it had to wait for a
        person. `ends` and `waits` take both from what comes next in the trace.
        """
        if what == "trace":
            return self
        if what == "none":
            return replace(
                self, requests=[each._replace(session="", parent="", hints=()) for each in self.requests]
            )
        next_arrival: dict[str, float] = {}
        requests: list[TraceRequest] = []
        for number, each in reversed([*enumerate(self.requests)]):
            hints: list[Action] = []
            if each.session:
                next_time = next_arrival.get(each.session)
                if next_time is None:
                    hints.append(Action(f"{number}", END))
                elif what == "waits" and next_time - each.at > person_after:
                    hints.append(Action(f"{number}", WAIT))
                next_arrival[each.session] = each.at
            requests.append(each._replace(hints=tuple(hints)))
        return replace(self, requests=requests[::-1])

    def keys(self, chunk_tokens: int, *, partial: bool = False) -> Iterator[list[bytes]]:
        """The keys of each request's whole chunks. They are chained, so each covers all chunks before it.

        A chunk is some blocks, or an even part of one. `partial` counts a last part as a whole chunk too.
        """
        blocks_per_chunk, parts = chunk_tokens // self.block_tokens, self.block_tokens // chunk_tokens
        if chunk_tokens % self.block_tokens and self.block_tokens % chunk_tokens:
            raise ConfigError(
                f"chunk_tokens={chunk_tokens}: the trace has blocks of {self.block_tokens} tokens; take a"
                " multiple, or an even part"
            )
        known: dict[tuple[bytes, tuple[Hashable, ...]], tuple[bytes, bytes]] = {}
        for number, request in enumerate(self.requests):
            tokens, blocks = request.tokens, request.blocks
            keys: list[bytes] = []
            parent = b"" if blocks else b"%d" % number
            for i in range(-(-tokens // chunk_tokens) if partial else tokens // chunk_tokens):
                if not blocks:
                    content: tuple[Hashable, ...] = ()
                elif blocks_per_chunk:
                    content = tuple(blocks[i * blocks_per_chunk : i * blocks_per_chunk + blocks_per_chunk])
                else:
                    content = blocks[i // parts], i % parts
                link = (parent, content)
                if (found := known.get(link)) is None:
                    digest = hashlib.blake2b(b"%b%r" % link, digest_size=KEY_BYTES - NAMESPACE_BYTES).digest()
                    found = known[link] = _SPACE + digest, _SPACE + NO_TENANT + digest[len(NO_TENANT) :]
                parent, key = found
                keys.append(key)
            yield keys


def read(path: Path, *, block_tokens: int | None = None) -> Trace:
    """Reads the trace in a file, in any of the formats."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode()
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}") from None
    except (EOFError, UnicodeDecodeError, zlib.error):
        raise ConfigError(f"trace {path}: this is neither text nor gzip") from None
    is_json = text.startswith("{")
    requests: list[TraceRequest] = []
    try:
        requests.extend((_jsonl if is_json else _azure)(text.splitlines()))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        message = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ConfigError(f"trace {path}, not a request in any known format: {message}") from None
    if not requests:
        raise ConfigError(f"trace {path}: no requests")
    tokens = block_tokens or (_block_tokens(path, requests) if is_json else 1)
    for request in requests:
        if request.blocks and len(request.blocks) < request.tokens // tokens:
            raise ConfigError(
                f"trace {path}: {request.tokens} tokens in {len(request.blocks)} blocks of {tokens}"
            )
    requests.sort(key=lambda request: request.at)
    start = requests[0].at
    return Trace(path.name, tokens, [each._replace(at=each.at - start) for each in requests])


def _jsonl(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines):
        if line.strip():
            fields: dict[str, Any] = json.loads(line)
            time_divisor = 1 if "chat_id" in fields else 1000
            at = float(fields["timestamp"]) / time_divisor
            hints = [
                Action(f"{number}/{n}", str(hint["action_type"]), payload=dict(hint.get("payload", {})))
                for n, hint in enumerate(fields.get("hints", ()))
            ]
            yield TraceRequest(
                at,
                int(fields["input_length"]),
                int(fields["output_length"]),
                tuple(fields["hash_ids"]),
                str(fields.get("session_id", "")),
                str(fields.get("parent_session_id", "")),
                tuple(hints),
            )


def _azure(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(lines):
        text = row["TIMESTAMP"].strip()[:26]  # without its 7th digit, which Python does not read
        when = datetime.fromisoformat(text).replace(tzinfo=UTC)
        yield TraceRequest(when.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())


def _block_tokens(path: Path, requests: Sequence[TraceRequest]) -> int:
    """The only block size, or the only power of two, that fits the lengths of all prompts."""
    low, high = 1, 1 << 20
    for request in requests:
        tokens, blocks = request.tokens, request.blocks
        if blocks:
            low = max(low, -(-tokens // len(blocks)))
        if len(blocks) > 1:
            high = min(high, (tokens - 1) // (len(blocks) - 1))
    fits = [low] if low == high else [1 << n for n in range(21) if low <= 1 << n <= high]
    if len(fits) != 1:
        raise ConfigError(
            f"trace {path}: its block size does not follow from its lengths; give it with --block-tokens"
        )
    return fits[0]
