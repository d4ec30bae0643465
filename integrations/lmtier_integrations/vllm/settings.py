"""The settings in `kv_connector_extra_config`, checked before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lmtier.config import Config, host_and_port, parse_seconds, suggest
from lmtier.errors import ConfigError

log = logging.getLogger("vllm.lmtier")
"""The connector's log, below vLLM's own."""

LAYERWISE, STEP = "layerwise", "step"
ANY, BLHNC = "any", "BLHNC"
BACKGROUND, START = "background", "start"
_ENDLESS = f"cpu://?capacity={1 << 60}"
_CHECK_WEIGHTS = "10s"
_SERVERS = ("tiers", "chunk_tokens", "load_deadline", "worth", "verify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The connector's settings. A private server also takes those of `Config`: tiers, chunk_tokens,
    load_deadline, worth, verify.

    A gpu:// tier belongs to the engine: it is the first tier of a private server, or the only one with
    another server.

    By default a chunk is one block of the engine: tokens after the last whole chunk are always computed, and
    a block over all layers is a large enough object.
    """

    server: str = ""
    """The Unix socket of a running `lmtier serve`. Empty: this engine starts a private server."""
    http: str = ""
    """The host:port of the private server's page and metrics. Empty: none."""
    mode: str = ""
    """layerwise: layers are copied one by one as the engine reaches them; on a GPU this applies to saves.
    step, or empty: all layers at once. On a GPU loads are always whole and asynchronous: requests wait."""
    save_decode: bool = True
    """Whether generated tokens are stored too."""
    tell_tokens: bool = False
    """Whether to send the tokens of prompts to the server, for `lmtier explain` and its KV events."""
    layout: str = BLHNC
    """The requested order of the engine's blocks on a GPU, or "any". Other connectors may request another."""
    pin: str = BACKGROUND
    """When the slab is pinned for GPUs: while the engine serves, or "start": before its first request."""
    trust_media_ids: bool = False
    """Whether vLLM's names of images, audio and video, also those of users, identify their content."""
    model: str = ""
    """The name under which this model's KV is kept. Empty: as vLLM names it."""
    check_weights: str = _CHECK_WEIGHTS
    """The time after which weights are compared with their earlier state. 0s: only when an event shows that
    they may have changed."""
    config: Config = field(default_factory=Config)
    """The settings of the private server. With a running server, only `config.gpu` counts."""

    @classmethod
    def of(
        cls, extra: Mapping[str, Any], block_tokens: int, window: int, *, has_states: bool = False
    ) -> Settings:
        """From vLLM's extra config, for an engine with such blocks and its smallest sliding window."""
        own_types = {each.name: type(each.default) for each in fields(cls) if each.name != "config"}
        for name, value in extra.items():
            if name not in own_types and name not in _SERVERS:
                raise _wrong(f"unknown {name!r}{suggest(name, (*own_types, *_SERVERS))}")
            if name in own_types and type(value) is not own_types[name]:
                raise _wrong(f"{name}={value!r} does not fit: expected {own_types[name].__name__}")
        config_values = {name: extra[name] for name in _SERVERS if name in extra}
        if isinstance(urls := config_values.get("tiers"), str):
            config_values["tiers"] = urls.split()  # as everywhere that tiers are one text
        if server := extra.get("server"):
            server_only = set(config_values)
            match config_values.get("tiers"):
                case [str(url)] if url.startswith("gpu://"):  # the engine's own
                    server_only.remove("tiers")
                    config_values["tiers"] = [url, _ENDLESS]
            for name in sorted(server_only | ({"http"} & set(extra))):
                raise _wrong(f"{name!r} is for a private server; the one at {server} has its own")
            if not server.removeprefix("unix://").startswith("/"):
                raise _wrong(
                    f"server={server!r} is not the path of a Unix socket: an engine needs a server on its "
                    "host; write it like /run/lmtier/socket, as `lmtier serve --unix` has it"
                )
        if (mode := extra.get("mode")) not in (None, LAYERWISE, STEP):
            raise _wrong(f"unknown mode={mode!r}{suggest(mode, (LAYERWISE, STEP))}")
        if (layout := extra.get("layout", ANY)) not in (ANY, BLHNC):
            raise _wrong(f"unknown layout={layout!r}{suggest(layout, (ANY, BLHNC))}")
        if (pin := extra.get("pin", BACKGROUND)) not in (BACKGROUND, START):
            raise _wrong(f"unknown pin={pin!r}{suggest(pin, (BACKGROUND, START))}")
        try:
            parse_seconds(extra.get("check_weights", _CHECK_WEIGHTS))
        except ConfigError as error:
            raise _wrong(f"check_weights: {error}") from None
        try:
            if http := extra.get("http"):
                host_and_port(http, "http")
            config = Config(**config_values)
        except ConfigError as error:
            raise _wrong(str(error)) from None
        if "chunk_tokens" not in extra:
            config = replace(config, chunk_tokens=block_tokens)
        if "server" not in extra:
            check_chunks(config.chunk_tokens, block_tokens, window, has_states=has_states)
        return cls(**{name: extra[name] for name in own_types if name in extra}, config=config)


def check_chunks(chunk_tokens: int, block_tokens: int, window: int, *, has_states: bool = False) -> None:
    """Check the chunk size: a chunk is saved when it is complete, and then all of it must be in the
    window. A state that the engine keeps at the end of a block is only found at the end of a chunk."""
    if chunk_tokens % block_tokens:
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is not whole blocks of this engine, which have {block_tokens} "
            "tokens: choose a multiple of that, or another --block-size"
        )
    if has_states and chunk_tokens != block_tokens:
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is not one block of this engine, at whose end it keeps its states: "
            f"choose {block_tokens}, or another --block-size"
        )
    if window and chunk_tokens > max(window, block_tokens):
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is longer than this model's sliding window of {window} tokens: "
            f"choose {max(block_tokens, window // block_tokens * block_tokens)} or less, or start the engine "
            "with --disable-hybrid-kv-cache-manager"
        )


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config: {what}")
