"""Hints that came over a socket: which of them their sender may give, and what of them the audit says."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from lmtier.core.cache import Cache
from lmtier.rules.hints import ACTIONS, REFUSED, Action, ActionResult
from lmtier.server.access import RIGHTS, Right, Role, write_audit

_PAUSE = b""


def run_hints(
    cache: Cache, actions: Sequence[Action], of: bytes, session: str, who: str, role: Role
) -> Generator[bytes, None, list[dict[str, Any]]]:
    """Execute them for a tenant, one in each turn. Returns the results."""
    rights = [_right_to(action) for action in actions]
    for is_allowed in (True, False):  # each a line
        audit_words = [
            # Nothing has checked the name yet: JSON can hold half of a character.
            f"{action.type}={action.about(session)}".encode(errors="backslashreplace")
            for action, right in zip(actions, rights, strict=True)
            if right.is_audited and (role >= right.role) is is_allowed
        ]
        if audit_words:
            write_audit(who, [b"/api/hints", *audit_words], refused=not is_allowed)
    results = []
    for action, right in zip(actions, rights, strict=True):
        if role >= right.role:
            results += cache.hint([action], of, session)
        else:
            cache.metrics.hints.labels(action.type, REFUSED).inc()
            why = f"{action.type} of keys needs the token of an administrator; name a session"
            results.append(ActionResult(action.id, action.type, REFUSED, why))
        yield _PAUSE
    return [result._asdict() for result in results]


def _right_to(action: Action) -> Right:
    """What this server does not know is for someone else, and does nothing here."""
    if action.type not in ACTIONS:
        return Right(Role.ENGINE)
    usual = RIGHTS[f"hint:{action.type}"]
    return RIGHTS.get(f"hint:{action.type}:keys", usual) if "keys" in action.payload else usual
