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
from lmtier.server.engines.engine_sessions import EngineSession, EngineSessions
from lmtier.server.engines.peer_read_verbs import PeerReadVerbs
from lmtier.server.engines.service_verbs import ServiceVerbs
from lmtier.server.engines.transfers import TransferVerbs
from lmtier.server.explain import Explain
from lmtier.server.models import Models
from lmtier.server.report import Report
from lmtier.server.request_log import RequestLog
from lmtier.server.tracing import Tracing
from lmtier.wire.resp import Error
from lmtier.wire.verbs import MAX_KEYS

_MOST = 2 * MAX_KEYS + 16
"""The most arguments: two per chunk."""
_LONG = {
    *("MATCH", "MISSED", "SEEN", "TELL", "RESERVE"),
    *("COMMIT", "DISCARD", "RELEASE", "HAS"),
}


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
        self._sessions = EngineSessions(cache, tracing)
        self._transfers = TransferVerbs(cache, self._sessions, tracing, log)
        self._services = ServiceVerbs(cache, self.explain, self._models, self.api)
        cache.followers.add(Breakdown(cache.metrics, cache.chunk_tokens, tenants, self._models.name_of))
        self._sourcing = PeerReadVerbs(cache)
        self.on_disconnect = self._sessions.on_disconnect

    def dump_sessions(
        self, callers: Sequence[Caller], teller: HandoverWriter
    ) -> tuple[dict[str, Any], dict[int, int]]:
        """The sessions of these callers, for another process; and the number of each, by its id()."""
        sessions = list(
            {id(each.engine_session): each.engine_session for each in callers if each.engine_session}.values()
        )
        facts = self._sessions.dump(sessions, teller)
        facts["models"] = self._models.dump(teller.forms)
        facts["journal"] = self.explain.journal.end
        return facts, {id(each): index for index, each in enumerate(sessions)}

    def restore_sessions(self, handover: Handover) -> list[EngineSession]:
        """Go on with the sessions of another process."""
        facts = handover.file.facts["sessions"]
        self._models.restore(facts.get("models", []), handover.forms)
        self.explain.journal.begin_at(facts.get("journal", 0))
        return self._sessions.restore(facts, handover)

    def table(self) -> Table:
        sessions, transfers, services = self._sessions, self._transfers, self._services
        sourcing = self._sourcing
        verbs: dict[str, tuple[Handler, int, str]] = {
            "HELLO": (sessions.hello, -2, "fast"),
            "SLAB": (sessions.slab, 1, "fast"),
            "PRESENCE": (sessions.presence, 1, "fast"),
            "FORM": (sessions.form, -3, "fast"),
            "COST": (sessions.cost, 5, "fast"),
            "TRACE": (sessions.trace, -3, "readonly"),
            "MATCH": (transfers.match, -5, "readonly"),
            "MISSED": (transfers.missed, -4, "readonly"),
            "SEEN": (transfers.seen, -2, "readonly"),
            "PREFETCH": (transfers.prefetch, -2, "readonly"),
            "POLL": (transfers.poll, 2, "readonly"),
            "WAIT": (transfers.wait, 2, "readonly"),
            "RELEASE": (transfers.release, -2, "readonly"),
            "VERIFIED": (transfers.verified, 3, "fast"),
            "DISCARD": (transfers.discard, -2, "write"),
            "RESERVE": (transfers.reserve, -4, "write"),
            "COMMIT": (transfers.commit, -3, "write"),
            "ABORT": (transfers.abort, 3, "write"),
            "HAS": (sourcing.has, -2, "readonly"),
            "READ": (sourcing.read, 2, "readonly"),
            "MODEL": (services.model, -3, "fast"),
            "TELL": (services.tell, -5, "readonly"),
            "CHANGES": (services.changes, -1, "readonly"),
            "FLUSH": (services.flush, 2, "write"),
            "CALL": (services.call, -2, "readonly"),
        }
        return {
            f"LMTIER.{name}".encode(): Command(
                _answering(handler),
                arity,
                (flag, "loading"),
                max_arguments=_MOST if name in _LONG else MAX_ARGUMENTS,
            )
            for name, (handler, arity, flag) in verbs.items()
        }


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
