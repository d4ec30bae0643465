"""Prefixes that a user names by their tokens, to pin them or to load them before requests ask for them.

A server knows keys, but no tokens. Engines send it how they make keys from tokens. So a user who has a
prompt's tokens, its salt and its adapter can make its keys; other users cannot.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmtier.core.placement import read_runs
from lmtier.errors import ConfigError, LayoutError
from lmtier.format.keys import Identity, KeyChain, seed
from lmtier.rules.lifetimes import Pinned
from lmtier.server.prefetching import PATIENCE
from lmtier.tools.console import Console
from lmtier.tools.terminal import duration_text, table
from lmtier.wire.verbs import MAX_KEYS

_IN_MEMORY = "cpu"


class DeclaredModel(NamedTuple):
    """The model of an engine, as the engine has sent it to the server."""

    identity: Identity
    lora: str
    """The adapter's name and content, as the engine sends it."""


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


def find_model(remote: Console, name: str | None, lora: str = "") -> DeclaredModel:
    """The latest declaration of this model by an engine. Without a name: the only model."""
    try:
        models = [_model(declaration) for declaration in remote.get("/api/models", list)]
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
    return DeclaredModel(Identity(**declaration["identity"]), bytes.fromhex(declaration["lora"]).decode())


def keys_of(
    remote: Console, model: DeclaredModel, prompts: Sequence[Sequence[int]], salt: str
) -> list[list[bytes]]:
    """The keys of the whole chunks of each prompt."""
    chunk_tokens = int(remote.snapshot()["chunk_tokens"])
    begin = seed(model.identity, chunk_tokens, lora=model.lora, salt=salt)
    try:
        return [KeyChain(begin, chunk_tokens, prompt).keys for prompt in prompts]
    except LayoutError as error:
        raise ConfigError(str(error)) from None


def load_prompts(
    remote: Console,
    model: DeclaredModel,
    prompts: Sequence[list[bytes]],
    progress: Callable[[int], None],
) -> list[PrefetchResult]:
    """Load all stored chunks of these prompts into memory. `progress` is called with the finished chunks."""
    chunk_tokens = int(remote.snapshot()["chunk_tokens"])
    for keys in prompts:
        _check(keys, "one prompt")
    return [_bring_up(remote, model, keys, chunk_tokens, progress) for keys in prompts]


def _bring_up(
    remote: Console,
    model: DeclaredModel,
    keys: list[bytes],
    chunk_tokens: int,
    progress: Callable[[int], None],
) -> PrefetchResult:
    """Load a prompt. The server answers after some seconds, with what it has loaded so far."""
    done, why, is_over, counts = 0, "", not keys, Counter[str]()
    arguments = {
        "identity": asdict(model.identity),
        "lora": model.lora.encode().hex(),
        "keys": [key.hex() for key in keys],
    }
    while not is_over:
        found = remote.post("/api/prefetch", arguments, timeout=4 * PATIENCE)
        try:
            sources = read_runs(found["sources"].encode())
            why, is_over = str(found["why"]), bool(found["is_over"]) or len(sources) <= done
        except (KeyError, AttributeError, ValueError):
            raise ConfigError(f"{remote.address} sent an invalid result of a prefetch") from None
        counts.update(sources[done:])
        progress(len(sources[done:]))
        done = max(done, len(sources))
    progress(len(keys) - done)
    in_memory = counts.pop(_IN_MEMORY, 0)
    return PrefetchResult(len(keys) * chunk_tokens, len(keys), in_memory, dict(counts), len(keys) - done, why)


def pin(remote: Console, name: str, prompts: Sequence[list[bytes]], ttl: float | None) -> dict[str, int]:
    """Pin prompts. Returns how many chunks each tier has pinned."""
    keys = list(dict.fromkeys(key for chain in prompts for key in chain))
    _check(keys, "one pin")
    arguments = {"name": name, "keys": [key.hex() for key in keys]}
    pinned: dict[str, int] = remote.post("/api/pin", arguments | ({} if ttl is None else {"seconds": ttl}))
    return pinned


def _check(keys: Sequence[bytes], what: str) -> None:
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{what} of {len(keys):,} chunks is more than a server takes: at most {MAX_KEYS:,}")


def pinned(remote: Console) -> list[Pinned]:
    try:
        return [Pinned(**each) for each in remote.get("/api/pins", list)]
    except TypeError:
        raise ConfigError(f"{remote.address} sent an invalid list of pins") from None


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
