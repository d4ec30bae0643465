"""What a request says of its session, and the hints that come with it.

vLLM 0.32 has a field for each. A request can also have both in `kv_transfer_params`, in every version:
`lmtier_session`, `lmtier_parent` and `lmtier_hints`. A wrong word of a user's stops no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from vllm.v1.request import Request

from lmtier.rules.hints import is_name
from lmtier_integrations.vllm.settings import log


class Said(NamedTuple):
    session: str
    """Empty: it has no name."""
    parent: str
    source: str
    """The host:port of another server whose memory may have the prompt."""
    hints: tuple[Mapping[str, Any], ...]
    """Envelopes, for after the request."""


def said_by(request: Request) -> Said:
    params = request.kv_transfer_params
    params = params if isinstance(params, dict) else {}
    hints = [params.get("lmtier_hints"), getattr(request, "kv_hints", None)]
    envelopes = tuple(each for each in map(_envelope, hints) if each is not None)
    session = _name(getattr(request, "session_id", None) or params.get("lmtier_session"), "session")
    if envelopes and not session:
        session = request.request_id  # so that hints of a request without a session are about its prompt
    parent, source = (_name(params.get(f"lmtier_{what}"), what) for what in ("parent", "source"))
    return Said(session if is_name(session) else "", parent, source, envelopes)


def _name(name: object, what: str) -> str:
    if isinstance(name, str) and is_name(name):
        return name
    if name is not None:
        log.warning("lmtier: lmtier_%s=%.40r of a request is no name and is ignored", what, name)
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
    log.warning("lmtier: the hints %.40r of a request are no envelope and are ignored", hints)
    return None
