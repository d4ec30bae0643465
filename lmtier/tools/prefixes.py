"""Prefixes that a user names by their tokens, to pin them or to load them before requests ask for them.

A server knows keys, but no tokens. Engines send it how they make keys from tokens (`LMTIER.MODEL`). So a user
who has a prompt's tokens, its salt and its adapter can make its keys; other users cannot.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmtier.core.placement import read_runs
from lmtier.errors import ConfigError, LayoutError
from lmtier.format.keys import Identity, KeyChain, seed
from lmtier.rules.breaker import Breaker
from lmtier.rules.lifetimes import Pinned
from lmtier.tools.console import ConsoleConnection
from lmtier.tools.terminal import duration_text, table
from lmtier.wire.verbs import MAX_KEYS, PROTOCOL, pack_keys, read_fields

_PATIENCE = 60.0  # seconds for one portion
_PORTION = 16 << 20  # bytes of the first portion
_MOST = 256 << 20
_HASTE = 0.25  # the part of a tier's deadline for a portion: late chunks count as failures of the tier
_PAUSE = max(Breaker.PAUSES) + 0.25  # seconds after which a tier is tried again, whatever has failed
_TOO_MUCH = frozenset({"deadline", "tier_down"})
_IN_MEMORY = "cpu"


class DeclaredModel(NamedTuple):
    """The model of an engine, as the engine has sent it to the server."""

    identity: Identity
    lora: str
    """The adapter's name and content, as the engine sends it."""
    layout: str
    shards: list[str]
    chunk_bytes: int
    """The bytes of a chunk."""


@dataclass
class PrefetchResult:
    """The result for one prompt. `tokens` are those of whole chunks, because only these can be stored."""

    tokens: int
    chunks: int
    there: int
    """Chunks that were in memory already."""
    brought_up: dict[str, int]
    missing: int
    why: str
    """Why the first missing chunk could not be loaded, if it was found: one of metrics.MISS_REASONS."""


def read_prompts(file: Path) -> list[list[int]]:
    """Reads a JSON list of token ids, or one such list per line."""
    try:
        text = file.read_text()
        try:
            prompts = [json.loads(text)]
        except ValueError:
            prompts = [json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    if len(prompts) == 1 and isinstance(prompts[0], list) and prompts[0] and isinstance(prompts[0][0], list):
        (prompts,) = prompts
    if not prompts or any(
        not isinstance(prompt, list) or any(type(token) is not int for token in prompt) for prompt in prompts
    ):
        raise ConfigError(f"{file}: must hold a JSON list of token ids, or one such list per line")
    return prompts


def find_model(remote: ConsoleConnection, name: str | None, lora: str = "") -> DeclaredModel:
    """The latest declaration of this model by an engine. Without a name: the only model."""
    try:
        models = [_model(declaration) for declaration in remote.json("LMTIER.MODELS", kind=list)]
    except (TypeError, KeyError, IndexError, ValueError):
        raise ConfigError(f"{remote.address} sent an invalid list of models") from None
    names = sorted({model.identity.model for model in models})
    if not names:
        raise ConfigError(
            f"no engine has sent {remote.address} how it makes its keys: connect one that does, and try again"
        )
    if name is None and len(names) > 1:
        raise ConfigError(f"which model? name it with --model: {', '.join(names)}")
    of_name = [model for model in models if name in (None, model.identity.model)]
    if not of_name:
        raise ConfigError(f"{remote.address} does not know model {name!r}; known: {', '.join(names)}")
    if of_name[-1].identity.is_private:
        raise ConfigError(
            f"the engine of {of_name[-1].identity.model!r} does not know its weights, so its keys are private"
            " and cannot be made here"
        )
    with_adapter = [model for model in of_name if lora in (model.lora, model.lora.partition("\0")[0])]
    if not with_adapter:
        raise ConfigError(f"no engine has used adapter {lora!r} yet; its content is part of its keys")
    return with_adapter[-1]


def _model(declaration: dict[str, Any]) -> DeclaredModel:
    layout, *parts = declaration["form"]
    shard_sizes = [part.split(":") for part in parts]
    chunk_bytes = sum(int(nbytes) for _, nbytes in shard_sizes)
    lora = bytes.fromhex(declaration["lora"]).decode()
    return DeclaredModel(
        Identity(**declaration["identity"]), lora, layout, [shard for shard, _ in shard_sizes], chunk_bytes
    )


def keys_of(
    remote: ConsoleConnection, model: DeclaredModel, prompts: Sequence[Sequence[int]], salt: str
) -> list[list[bytes]]:
    """The keys of the whole chunks of each prompt."""
    chunk_tokens = int(remote.json("LMTIER.REPORT")["chunk_tokens"])
    begin = seed(model.identity, chunk_tokens, lora=model.lora, salt=salt)
    try:
        return [KeyChain(begin, chunk_tokens, prompt).keys for prompt in prompts]
    except LayoutError as error:
        raise ConfigError(str(error)) from None


def load_prompts(
    remote: ConsoleConnection,
    model: DeclaredModel,
    prompts: Sequence[list[bytes]],
    progress: Callable[[int], None],
) -> list[PrefetchResult]:
    """Load all stored chunks of these prompts into memory. `progress` is called with the finished chunks."""
    hello = read_fields(remote.ask("LMTIER.HELLO", str(PROTOCOL), "NAME", "lmtier prefetch"))
    form_id = str(remote.ask("LMTIER.FORM", model.layout, *model.shards))
    portion = _Portion(model.chunk_bytes, float(hello["load_deadline"]))
    chunk_tokens = int(hello["chunk_tokens"])
    for keys in prompts:
        _check(keys, "one prompt")
    return [_bring_up(remote, form_id, portion, keys, chunk_tokens, progress) for keys in prompts]


class _Portion:
    """The number of chunks to load at a time, adapted to the time of the last ones."""

    def __init__(self, room: int, deadline: float) -> None:
        self.chunks = max(1, _PORTION // room)
        self._most = max(1, _MOST // room)
        self._soon = _HASTE * deadline

    def learn(self, loaded: int, seconds: float, *, is_cut: bool) -> None:
        if is_cut or seconds >= self._soon:
            self.chunks = max(1, self.chunks // 2)
        elif loaded >= self.chunks:  # fewer chunks prove nothing
            self.chunks = min(2 * self.chunks, self._most)


def _bring_up(
    remote: ConsoleConnection,
    form: str,
    portion: _Portion,
    keys: list[bytes],
    chunk_tokens: int,
    progress: Callable[[int], None],
) -> PrefetchResult:
    """Load a prompt in portions. Loaded chunks stay leased, so that they are not evicted for the rest."""
    done, leased_match, why, has_retried = 0, "", "", False
    counts: Counter[str] = Counter()
    while done < len(keys):
        began = time.monotonic()
        key_arguments = pack_keys(keys[: done + portion.chunks])
        match = read_fields(remote.ask("LMTIER.BRING", form, str(int(_PATIENCE * 1000)), *key_arguments))
        match_id = str(match["id"])
        if match["state"] != b"ready":
            match = read_fields(remote.ask("LMTIER.WAIT", match_id, timeout=2 * _PATIENCE))
        if leased_match:
            remote.ask("LMTIER.RELEASE", leased_match)
        leased_match = match_id
        sources = read_runs(match["sources"])
        new_sources, cut_reason = sources[done:], match.get("cut", b"").decode()
        loaded_count = len(new_sources) - new_sources.count(_IN_MEMORY)
        portion.learn(loaded_count, time.monotonic() - began, is_cut=cut_reason in _TOO_MUCH)
        if not new_sources:
            if cut_reason in _TOO_MUCH and not has_retried:
                has_retried = True
                time.sleep(_PAUSE)
                continue
            why = cut_reason
            break
        has_retried = False
        counts.update(new_sources)
        progress(len(new_sources))
        done = len(sources)
    if leased_match:
        remote.ask("LMTIER.RELEASE", leased_match)
    progress(len(keys) - done)
    in_memory = counts.pop(_IN_MEMORY, 0)
    return PrefetchResult(len(keys) * chunk_tokens, len(keys), in_memory, dict(counts), len(keys) - done, why)


def pin(
    remote: ConsoleConnection, name: str, prompts: Sequence[list[bytes]], ttl: float | None
) -> dict[str, int]:
    """Pin prompts. Returns how many chunks each tier has pinned."""
    keys = list(dict.fromkeys(key for chain in prompts for key in chain))
    ttl_arguments = () if ttl is None else ("TTL", str(max(1, int(ttl * 1000))))
    _check(keys, "one pin")
    pinned = remote.ask("LMTIER.PIN", name, *ttl_arguments, *pack_keys(keys))
    return {tier: int(count) for tier, count in read_fields(pinned).items()}


def _check(keys: Sequence[bytes], what: str) -> None:
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{what} of {len(keys):,} chunks is more than a server takes: at most {MAX_KEYS:,}")


def pinned(remote: ConsoleConnection) -> list[Pinned]:
    return [Pinned(**each) for each in remote.json("LMTIER.PINS", kind=list)]


# ---- as text


def prefetch_table(results: Sequence[PrefetchResult]) -> str:
    rows = [
        (
            str(number),
            f"{result.tokens:,}",
            str(result.chunks),
            str(result.there),
            ", ".join(f"{count} from {tier}" for tier, count in result.brought_up.items()) or "0",
            f"{result.missing} ({result.why})" if result.why else str(result.missing),
        )
        for number, result in enumerate(results, 1)
    ]
    return table(("prompt", "tokens", "chunks", "in memory", "brought up", "missing"), rows)


def pins_table(pins: Sequence[Pinned]) -> str:
    rows = [
        (
            each.name,
            str(each.chunks),
            text_of(each.pinned),
            "-" if each.seconds_left is None else duration_text(each.seconds_left),
        )
        for each in pins
    ]
    return table(("pin", "chunks", "pinned", "time left"), rows)


def text_of(pinned: dict[str, int]) -> str:
    return ", ".join(f"{count} in {tier}" for tier, count in pinned.items() if count) or "none"
