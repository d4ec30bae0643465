"""The connector, as an engine would load it, beside a server that takes few keys in one request."""

from __future__ import annotations

from collections.abc import Sequence

from lmtier.client import client
from lmtier.errors import MisuseError
from lmtier.wire import verbs
from lmtier_integrations.vllm import LMTierConnector as LMTierConnector
from lmtier_integrations.vllm import tracked_request

MOST = 3


def arguments(keys: Sequence[bytes]) -> list[bytes]:
    if len(keys) > MOST:
        raise MisuseError(f"{len(keys)} keys: at most {MOST} in one request")
    return verbs.pack_keys(keys)


client.pack_keys = arguments  # type: ignore[attr-defined]
tracked_request.MAX_KEYS = MOST  # type: ignore[attr-defined]
