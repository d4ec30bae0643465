"""The verbs `LMTIER.*`, in one table with their handlers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lmtier.core.cache import Cache
from lmtier.core.handover import Handover, HandoverWriter
from lmtier.errors import LayoutError, MisuseError
from lmtier.format.keys import tenant
from lmtier.observe.breakdown import Breakdown
from lmtier.server.api import Api
from lmtier.server.commands import (
    MAX_ARGUMENTS,
    Argument,
    Caller,
    Command,
    Handler,
    PendingAnswer,
    Refused,
    Table,
)
from lmtier.server.engines.engine_sessions import EngineSessions
from lmtier.server.engines.peer_read_verbs import PeerReadVerbs
from lmtier.server.engines.service_verbs import ServiceVerbs
from lmtier.server.engines.transfers import TransferVerbs
from lmtier.server.explain import Explain
from lmtier.server.models import Models
from lmtier.server.report import Report
from lmtier.server.request_log import RequestLog
from lmtier.server.tracing import Tracing
from lmtier.wire.resp import Error
from lmtier.wire.verb_table import VERBS
from lmtier.wire.verbs import MAX_KEYS

_MOST = 2 * MAX_KEYS + 16
"""The most arguments: two per chunk."""


class EngineVerbs:
    """The verbs `LMTIER.*` over one cache. The cache's owner calls them."""

    def __init__(
        self,
        cache: Cache,
        log: RequestLog | None = None,
        tracing: Tracing | None = None,
        report: Report | None = None,
        alone: Callable[[PendingAnswer], PendingAnswer] = lambda steps: steps,
    ) -> None:
        """`alone` runs what may delete any named value."""
        self.cache = cache
        self.explain = Explain(cache)
        tenants = {tenant(share.salt): share.name for share in cache.config.shares}
        self._models = Models()
        report = report or Report(cache, list, time.monotonic())
        self.api = Api(cache, self.explain, self._models, report, alone)
        self._sessions = EngineSessions(cache, tracing, self._models)
        self._transfers = TransferVerbs(cache, self._sessions, tracing, log)
        self._services = ServiceVerbs(cache, self.explain, self.api)
        cache.followers.add(Breakdown(cache.metrics, cache.chunk_tokens, tenants, self._models.name_of))
        self._sourcing = PeerReadVerbs(cache)
        self.on_disconnect = self._sessions.on_disconnect

    def dump_sessions(self, callers: Sequence[Caller], writer: HandoverWriter) -> None:
        """Tell another process what these hold, and what else engines have sent."""
        writer.facts["sessions"] = self._sessions.dump(callers, writer) | {
            "models": self._models.dump(writer),
            "journal": self.explain.journal.end,
        }

    def restore_sessions(self, handover: Handover, callers: Sequence[Caller]) -> None:
        """Go on with the sessions of another process. `callers`: as there."""
        facts = handover.facts["sessions"]
        self._models.restore(facts.get("models", []), handover)
        self.explain.journal.begin_at(facts.get("journal", 0))
        self._sessions.restore(facts, handover, callers)

    def table(self) -> Table:
        """The verbs that are answered here, each by the method of its name."""
        found: dict[bytes, Command] = {}
        for part in self._sessions, self._sourcing, self._services, self._transfers:
            for name, verb in VERBS.items():
                if (handler := getattr(part, name.lower(), None)) is not None:
                    most = _MOST if verb.is_long else MAX_ARGUMENTS
                    flags = verb.flag, "loading"
                    command = Command(_answering(handler), verb.arity, flags, max_arguments=most)
                    found[b"LMTIER." + name.encode()] = command
        return found


def _answering(handler: Handler) -> Handler:
    """Answers misuse with an error. A refused call changes nothing."""

    def answer(caller: Caller, arguments: list[Argument]) -> Any:
        try:
            return handler(caller, arguments)
        except Refused as refused:
            return refused.error
        except MisuseError as error:
            return Error(f"MISUSE {error}")
        except LayoutError as error:
            return Error(f"ERR {error}")

    return answer
