"""Verbs that neither load nor save: they tell of prompts, flush, and call what operators call too."""

from __future__ import annotations

import time
from typing import Any

from lmtier.core.cache import Cache
from lmtier.observe.prompts import Origin
from lmtier.server.access import RIGHTS
from lmtier.server.api import Api, Asker
from lmtier.server.arguments import (
    read_keys,
    read_seconds,
    read_text,
)
from lmtier.server.commands import OK, Argument, Caller, PendingAnswer, Refused
from lmtier.server.engines.engine_sessions import EngineSession, engine_session_of
from lmtier.server.explain import Explain


class ServiceVerbs:
    def __init__(self, cache: Cache, explain: Explain, api: Api) -> None:
        self._cache = cache
        self._explain = explain
        self._api = api

    def tell(self, caller: Caller, arguments: list[Argument]) -> Any:
        engine_session_of(caller)
        origin, parent = Origin.from_json(bytes(arguments[1])), read_keys(arguments[2:3])[-1:]
        tokens = b"".join(map(bytes, arguments[4:]))
        self._explain.prompts.add(read_keys(arguments[3:4]), tokens, origin, *parent)
        return OK

    def call(self, caller: Caller, arguments: list[Argument]) -> PendingAnswer:
        """A call of the JSON API, in order with the other requests of this connection."""
        path = read_text(arguments[1])
        if path not in self._api.calls:
            raise Refused(f"ERR there is no such call; there are {', '.join(self._api.calls)}")
        may_ever = caller.role >= RIGHTS[path].role  # what is refused anyway is not worth the time to read it
        pieces = arguments[2:]
        given = self._api.parse(path, b"".join(pieces)) if pieces and may_ever else {}
        return self._api.run(path, given, Asker(str(caller), caller.role))

    def flush(self, caller: Caller, arguments: list[Argument]) -> Any:
        until = time.monotonic() + read_seconds(arguments[1], "a timeout")
        self._cache.step()
        return self._flushing(
            until, caller.engine_session or EngineSession("", lost_at_flush=self._cache.lost)
        )

    def _flushing(self, until: float, session: EngineSession) -> PendingAnswer:
        tiers = self._cache.lower
        while any(tier.is_busy for tier in tiers) and time.monotonic() < until:
            yield None
        lost_before, session.lost_at_flush = session.lost_at_flush, self._cache.lost
        return int(session.lost_at_flush == lost_before and not any(tier.backlog for tier in tiers))
