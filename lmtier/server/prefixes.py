"""Prefixes that a person names by their tokens: pinned, and brought up before anybody asks for them.

A server knows keys and no tokens. Engines told it how they make the one from the other (`LMTIER.MODEL`), so
that whoever has a prompt's tokens, its salt and its adapter can make its keys, and nobody else can.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmtier.breaker import Breaker
from lmtier.errors import ConfigError, LayoutError
from lmtier.keys import Identity, KeyChain, seed
from lmtier.lifetimes import Pinned
from lmtier.server.client import arguments
from lmtier.server.console import Remote
from lmtier.server.engines import MAX_KEYS, PROTOCOL
from lmtier.terminal import span, table

_PATIENCE = 60.0  # seconds for one portion
_PORTION = 16 << 20  # bytes that are brought up at a time, at first
_MOST = 256 << 20
_HASTE = 0.25  # of a tier's deadline, in which a portion is to come: what comes too late counts against it
_PAUSE = max(Breaker.PAUSES) + 0.25  # seconds, after which a tier is asked again, whatever has failed
_TOO_MUCH = frozenset({"deadline", "tier_down"})
_THERE = "cpu"


class Model(NamedTuple):
    """An engine's, as it told its server."""

    identity: Identity
    lora: str
    """Name and content, as the engine says it."""
    layout: str
    shards: list[str]
    room: int
    """Bytes of a chunk."""


@dataclass
class Brought:
    """What became of one prompt. tokens: of whole chunks, which are all that can be kept."""

    tokens: int
    chunks: int
    there: int
    """Chunks that were in memory."""
    brought_up: dict[str, int]
    missing: int
    why: str
    """The first missing one was found and could not be brought up: a reason of metrics.MISS_REASONS."""


def read_prompts(file: Path) -> list[list[int]]:
    """A JSON list of token ids, or one a line."""
    try:
        text = file.read_text()
        try:
            found = [json.loads(text)]
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if len(found) == 1 and isinstance(found[0], list) and found[0] and isinstance(found[0][0], list):
        (found,) = found
    if not found or any(
        not isinstance(each, list) or any(type(x) is not int for x in each) for each in found
    ):
        raise ConfigError(f"{file}: must hold a JSON list of token ids, or one such list a line")
    return found


def model_of(remote: Remote, name: str | None, lora: str = "") -> Model:
    """What engines told of this model, the latest; of the only one if nobody names it."""
    try:
        models = [_model(each) for each in remote.json("LMTIER.MODELS", kind=list)]
    except (TypeError, KeyError, IndexError, ValueError):
        raise ConfigError(f"{remote.address}: a list of models that means nothing") from None
    names = sorted({model.identity.model for model in models})
    if not names:
        raise ConfigError(
            f"no engine has told {remote.address} how it makes its keys: connect one that does, and try again"
        )
    if name is None and len(names) > 1:
        raise ConfigError(f"which model? name it with --model: {', '.join(names)}")
    ours = [model for model in models if name in (None, model.identity.model)]
    if not ours:
        raise ConfigError(f"no engine told {remote.address} of model {name!r}; known: {', '.join(names)}")
    if ours[-1].identity.is_private:
        raise ConfigError(
            f"the engine of {ours[-1].identity.model!r} does not know its weights, so its keys are its own"
            " and nobody else can make them"
        )
    fitting = [model for model in ours if lora in (model.lora, model.lora.partition("\0")[0])]
    if not fitting:
        raise ConfigError(f"no engine has used adapter {lora!r} yet; its content is part of its keys")
    return fitting[-1]


def _model(told: dict[str, Any]) -> Model:
    layout, *parts = told["form"]
    pairs = [part.split(":") for part in parts]
    room = sum(int(nbytes) for _, nbytes in pairs)
    lora = bytes.fromhex(told["lora"]).decode()
    return Model(Identity(**told["identity"]), lora, layout, [shard for shard, _ in pairs], room)


def keys_of(remote: Remote, model: Model, prompts: Sequence[Sequence[int]], salt: str) -> list[list[bytes]]:
    """The keys of the whole chunks of each prompt."""
    chunk_tokens = int(remote.json("LMTIER.REPORT")["chunk_tokens"])
    begin = seed(model.identity, chunk_tokens, lora=model.lora, salt=salt)
    try:
        return [KeyChain(begin, chunk_tokens, prompt).keys for prompt in prompts]
    except LayoutError as error:
        raise ConfigError(str(error)) from None


def bring_up(
    remote: Remote, model: Model, prompts: Sequence[list[bytes]], progress: Callable[[int], None]
) -> list[Brought]:
    """All of them into memory, as far as they are somewhere; `progress` hears of chunks, as they are done."""
    facts = _fields(remote.ask("LMTIER.HELLO", str(PROTOCOL), "NAME", "lmtier prefetch"))
    form = str(remote.ask("LMTIER.FORM", model.layout, *model.shards))
    portion = _Portion(model.room, float(facts["load_deadline"]))
    size = int(facts["chunk_tokens"])
    for keys in prompts:
        _check(keys, "one prompt")
    return [_bring_up(remote, form, portion, keys, size, progress) for keys in prompts]


class _Portion:
    """How many chunks to bring up at a time, by how long the last ones took."""

    def __init__(self, room: int, deadline: float) -> None:
        self.chunks = max(1, _PORTION // room)
        self._most = max(1, _MOST // room)
        self._soon = _HASTE * deadline

    def learn(self, came: int, seconds: float, *, is_cut: bool) -> None:
        if is_cut or seconds >= self._soon:
            self.chunks = max(1, self.chunks // 2)
        elif came >= self.chunks:  # fewer are no proof
            self.chunks = min(2 * self.chunks, self._most)


def _bring_up(
    remote: Remote,
    form: str,
    portion: _Portion,
    keys: list[bytes],
    size: int,
    progress: Callable[[int], None],
) -> Brought:
    """A portion at a time. All that came before is leased meanwhile: it makes no room for the rest."""
    done, held, why, is_again = 0, "", "", False
    counts: Counter[str] = Counter()
    while done < len(keys):
        began = time.monotonic()
        some = arguments(keys[: done + portion.chunks])
        match = _fields(remote.ask("LMTIER.BRING", form, str(int(_PATIENCE * 1000)), *some))
        number = str(match["id"])
        if match["state"] != b"ready":
            match = _fields(remote.ask("LMTIER.WAIT", number, timeout=2 * _PATIENCE))
        if held:
            remote.ask("LMTIER.RELEASE", held)
        held = number
        sources = _sources(match["sources"].decode())
        new, cut = sources[done:], match.get("cut", b"").decode()
        came = len(new) - new.count(_THERE)
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
    there = counts.pop(_THERE, 0)
    return Brought(len(keys) * size, len(keys), there, dict(counts), len(keys) - done, why)


def _sources(text: str) -> list[str]:
    """`cpu*500 disk*12`"""
    pairs = (part.rsplit("*", 1) for part in text.split())
    return [label for label, count in pairs for _ in range(int(count))]


def _fields(reply: Any) -> dict[str, Any]:
    names = iter(reply)
    return {name.decode(): value for name, value in zip(names, names, strict=True)}


def pin(remote: Remote, name: str, prompts: Sequence[list[bytes]], ttl: float | None) -> dict[str, int]:
    """How many chunks each tier keeps for it."""
    keys = list(dict.fromkeys(key for chain in prompts for key in chain))
    times = () if ttl is None else ("TTL", str(max(1, int(ttl * 1000))))
    _check(keys, "one pin")
    kept = remote.ask("LMTIER.PIN", name, *times, *arguments(keys))
    return {tier: int(count) for tier, count in _fields(kept).items()}


def _check(keys: Sequence[bytes], what: str) -> None:
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{what} of {len(keys):,} chunks is more than a server takes: at most {MAX_KEYS:,}")


def pinned(remote: Remote) -> list[Pinned]:
    return [Pinned(**each) for each in remote.json("LMTIER.PINS", kind=list)]


# ---- as text


def brought_table(results: Sequence[Brought]) -> str:
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
            kept_text(each.kept),
            "-" if each.seconds_left is None else span(each.seconds_left),
        )
        for each in pins
    ]
    return table(("pin", "chunks", "kept", "time left"), rows)


def kept_text(kept: dict[str, int]) -> str:
    return ", ".join(f"{count} in {tier}" for tier, count in kept.items() if count) or "none"
