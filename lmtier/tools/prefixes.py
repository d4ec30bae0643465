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
            found = [json.loads(text)]
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    if len(found) == 1 and isinstance(found[0], list) and found[0] and isinstance(found[0][0], list):
        (found,) = found
    if not found or any(
        not isinstance(each, list) or any(type(x) is not int for x in each) for each in found
    ):
        raise ConfigError(f"{file}: must hold a JSON list of token ids, or one such list per line")
    return found


def find_model(remote: ConsoleConnection, name: str | None, lora: str = "") -> DeclaredModel:
    """The latest declaration of this model by an engine. Without a name: the only model."""
    try:
        models = [_model(each) for each in remote.json("LMTIER.MODELS", kind=list)]
    except (TypeError, KeyError, IndexError, ValueError):
        raise ConfigError(f"{remote.address} sent an invalid list of models") from None
    names = sorted({model.identity.model for model in models})
    if not names:
        raise ConfigError(
            f"no engine has sent {remote.address} how it makes its keys: connect one that does, and try again"
        )
    if name is None and len(names) > 1:
        raise ConfigError(f"which model? name it with --model: {', '.join(names)}")
    ours = [model for model in models if name in (None, model.identity.model)]
    if not ours:
        raise ConfigError(f"{remote.address} does not know model {name!r}; known: {', '.join(names)}")
    if ours[-1].identity.is_private:
        raise ConfigError(
            f"the engine of {ours[-1].identity.model!r} does not know its weights, so its keys are private"
            " and cannot be made here"
        )
    fitting = [model for model in ours if lora in (model.lora, model.lora.partition("\0")[0])]
    if not fitting:
        raise ConfigError(f"no engine has used adapter {lora!r} yet; its content is part of its keys")
    return fitting[-1]


def _model(declaration: dict[str, Any]) -> DeclaredModel:
    layout, *parts = declaration["form"]
    pairs = [part.split(":") for part in parts]
    room = sum(int(nbytes) for _, nbytes in pairs)
    lora = bytes.fromhex(declaration["lora"]).decode()
    return DeclaredModel(
        Identity(**declaration["identity"]), lora, layout, [shard for shard, _ in pairs], room
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
    facts = read_fields(remote.ask("LMTIER.HELLO", str(PROTOCOL), "NAME", "lmtier prefetch"))
    form = str(remote.ask("LMTIER.FORM", model.layout, *model.shards))
    portion = _Portion(model.chunk_bytes, float(facts["load_deadline"]))
    size = int(facts["chunk_tokens"])
    for keys in prompts:
        _check(keys, "one prompt")
    return [_bring_up(remote, form, portion, keys, size, progress) for keys in prompts]


class _Portion:
    """The number of chunks to load at a time, adapted to the time of the last ones."""

    def __init__(self, room: int, deadline: float) -> None:
        self.chunks = max(1, _PORTION // room)
        self._most = max(1, _MOST // room)
        self._soon = _HASTE * deadline

    def learn(self, came: int, seconds: float, *, is_cut: bool) -> None:
        if is_cut or seconds >= self._soon:
            self.chunks = max(1, self.chunks // 2)
        elif came >= self.chunks:  # fewer chunks prove nothing
            self.chunks = min(2 * self.chunks, self._most)


def _bring_up(
    remote: ConsoleConnection,
    form: str,
    portion: _Portion,
    keys: list[bytes],
    size: int,
    progress: Callable[[int], None],
) -> PrefetchResult:
    """Load a prompt in portions. Loaded chunks stay leased, so that they are not evicted for the rest."""
    done, held, why, is_again = 0, "", "", False
    counts: Counter[str] = Counter()
    while done < len(keys):
        began = time.monotonic()
        some = pack_keys(keys[: done + portion.chunks])
        match = read_fields(remote.ask("LMTIER.BRING", form, str(int(_PATIENCE * 1000)), *some))
        number = str(match["id"])
        if match["state"] != b"ready":
            match = read_fields(remote.ask("LMTIER.WAIT", number, timeout=2 * _PATIENCE))
        if held:
            remote.ask("LMTIER.RELEASE", held)
        held = number
        sources = read_runs(match["sources"])
        new, cut = sources[done:], match.get("cut", b"").decode()
        came = len(new) - new.count(_IN_MEMORY)
        portion.learn(came, time.monotonic() - began, is_cut=cut in _TOO_MUCH)
        if not new:
            if cut in _TOO_MUCH and not is_again:
                is_again = True
                time.sleep(_PAUSE)
                continue
            why = cut
            break
        is_again = False
        counts.update(new)
        progress(len(new))
        done = len(sources)
    if held:
        remote.ask("LMTIER.RELEASE", held)
    progress(len(keys) - done)
    there = counts.pop(_IN_MEMORY, 0)
    return PrefetchResult(len(keys) * size, len(keys), there, dict(counts), len(keys) - done, why)


def pin(
    remote: ConsoleConnection, name: str, prompts: Sequence[list[bytes]], ttl: float | None
) -> dict[str, int]:
    """Pin prompts. Returns how many chunks each tier has pinned."""
    keys = list(dict.fromkeys(key for chain in prompts for key in chain))
    times = () if ttl is None else ("TTL", str(max(1, int(ttl * 1000))))
    _check(keys, "one pin")
    pinned = remote.ask("LMTIER.PIN", name, *times, *pack_keys(keys))
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
            f"{each.tokens:,}",
            str(each.chunks),
            str(each.there),
            ", ".join(f"{count} from {tier}" for tier, count in each.brought_up.items()) or "0",
            f"{each.missing} ({each.why})" if each.why else str(each.missing),
        )
        for number, each in enumerate(results, 1)
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
