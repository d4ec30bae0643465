"""What a request says that lmtier uses, read once and checked: nothing that a user sends stops an engine.

A request whose KV cannot be named is not cached, for one of a few reasons. Other words that cannot be read
are ignored.

vLLM 0.32 has a field for sessions and one for hints. A request can also have both in `kv_transfer_params`, in
every version: `lmtier_session`, `lmtier_parent` and `lmtier_hints`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from vllm.v1.request import Request

from lmtier.errors import LayoutError
from lmtier.format.keys import Tokens, as_tokens
from lmtier.rules.hints import is_name
from lmtier.rules.lifetimes import MAX_TTL
from lmtier_integrations.vllm.settings import log

_LONGEST = 16 << 10  # bytes of a text in a name: thousands of them are kept in memory
_TRACE = ("traceparent", "tracestate")
_HEADER = 512  # characters, as many as W3C asks for
_NONE = as_tokens(())


class RequestHints(NamedTuple):
    why_not: str
    """Why it is not cached; empty: nothing that it says is against that. One of a few sentences."""
    tokens: Tokens
    """The tokens of its prompt."""
    salt: str
    ttl: float | None
    """Seconds for which its chunks are kept."""
    is_remote: bool
    """Whether a router says that another engine computes the prompt, and another connector will load it."""
    session: str
    """Empty: it has no name."""
    parent: str
    source: str
    """The host:port of another server whose memory may have the prompt."""
    hints: tuple[Mapping[str, Any], ...]
    """Envelopes, for after the request."""
    trace: Mapping[str, str]
    """The W3C headers of its trace."""


def said_by(request: Request) -> RequestHints:
    params = request.kv_transfer_params
    params = params if isinstance(params, dict) else {}
    tokens, why_not = _prompt_of(request)
    hint_values = [params.get("lmtier_hints"), getattr(request, "kv_hints", None)]
    salt: Any = request.cache_salt or ""
    if not is_readable(salt):
        why_not = f"its cache_salt is not text of at most {_LONGEST} bytes in UTF-8"
        salt, hint_values = "", []  # without their salt they would be about prompts of others
    if request.lora_request is not None and not is_readable(request.lora_request.lora_name):
        why_not = f"the name of its adapter is not text of at most {_LONGEST} bytes in UTF-8"
    envelopes = tuple(each for each in map(_envelope, hint_values) if each is not None)
    session = _name(getattr(request, "session_id", None) or params.get("lmtier_session"), "session")
    if envelopes and not session:
        session = request.request_id  # so that hints of a request without a session are about its prompt
    return RequestHints(
        why_not,
        tokens,
        salt,
        _ttl(params.get("lmtier_ttl")),
        bool(params.get("do_remote_prefill")),
        session if is_name(session) else "",
        _name(params.get("lmtier_parent"), "parent"),
        _name(params.get("lmtier_source"), "source"),
        envelopes,
        _trace_of(request.trace_headers),
    )


def is_readable(text: object) -> bool:
    """Whether it can be a part of a name: JSON can name half of a character."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        return False
    try:
        return len(text.encode()) <= _LONGEST
    except UnicodeEncodeError:
        return False


def _prompt_of(request: Request) -> tuple[Tokens, str]:
    """The tokens of its prompt, or why they do not identify its KV."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return _NONE, "its prompt has embeddings instead of tokens"
    if request.resumable:
        return _NONE, "it is a streaming session, whose prompt may still change"
    try:
        return as_tokens(request.all_token_ids[:]), ""
    except LayoutError:
        return _NONE, "its tokens are not integers of 32 bits"


def _ttl(seconds: object) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= MAX_TTL:
        return float(seconds)
    log.warning("lmtier: lmtier_ttl=%s of a request is no number of seconds and is ignored", _shown(seconds))
    return None


def _name(name: object, what: str) -> str:
    if isinstance(name, str) and is_name(name):
        return name
    if name is not None:
        log.warning("lmtier: lmtier_%s=%s of a request is no name and is ignored", what, _shown(name))
    return ""


def _envelope(hints: object) -> Mapping[str, Any] | None:
    """The hints as JSON can carry them; the server checks the rest."""
    if hints is None:
        return None
    try:
        plain = json.loads(json.dumps(msgspec.to_builtins(hints)))
    except (TypeError, ValueError, RecursionError):
        plain = None
    if isinstance(plain, dict):
        return plain
    log.warning("lmtier: the hints %s of a request are no envelope and are ignored", _shown(hints))
    return None


def _trace_of(headers: object) -> Mapping[str, str]:
    if not isinstance(headers, Mapping):
        return {}
    trace_headers = {name: headers[name] for name in _TRACE if name in headers}
    is_valid = all(
        isinstance(value, str) and len(value) <= _HEADER and value.isascii() and value.isprintable()
        for value in trace_headers.values()
    )
    return trace_headers if is_valid else {}


def _shown(value: object) -> str:
    """The start of it. Only text and some numbers are written: the rest may be large, or deep."""
    return f"{value!r:.40}" if isinstance(value, str | float | bool) else f"of {type(value).__name__}"
