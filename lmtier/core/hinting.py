"""Executes hints: pin, retain, ttl, prefetch, release, session_end, session_wait, demote.

A hint acts for one tenant: it reaches only sessions and chunks of this tenant. It changes what the cache
keeps and when, never what it answers, so a wrong one costs hits and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmtier.core.match import EntryState, Lookup
from lmtier.errors import MisuseError
from lmtier.format.keys import is_value, tenant_of
from lmtier.rules import hints
from lmtier.rules.hints import Action, ActionResult, DoneActions
from lmtier.rules.sessions import Agent

if TYPE_CHECKING:
    from lmtier.core.cache import Cache

MAX_BRINGING = 64
"""The most prefetches at a time."""
_DEADLINE = 30.0
"""Seconds that a prefetch may take, unless it says so."""


class Hinting:
    def __init__(self, cache: Cache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._remembered = DoneActions()
        self._bringing: list[Lookup] = []
        """What prefetches load. They lease it until it is in the slab."""

    def execute(self, actions: Sequence[Action], tenant: bytes, session: str = "") -> list[ActionResult]:
        """Execute the actions for a tenant. `session` is meant where an action names none."""
        outcomes = []
        for action in actions:
            outcome = self._execute(action, tenant, session)
            action_label = action.type if action.type in hints.ACTIONS else hints.OTHER
            self._cache.metrics.hints.labels(action_label, outcome.result).inc()
            outcomes.append(outcome)
        return outcomes

    def _execute(self, action: Action, tenant: bytes, session: str) -> ActionResult:
        if not action.is_known:
            reason = "" if action.type not in hints.ACTIONS else "another version"
            return ActionResult(action.id, action.type, hints.UNKNOWN, reason)
        if self._remembered.has(tenant, action.id):
            return ActionResult(action.id, action.type, hints.REPEATED)
        try:
            name, keys = action.target(session)
            self._do(action, tenant, name, keys)
        except MisuseError as error:
            return ActionResult(action.id, action.type, hints.REFUSED, str(error))
        self._remembered.add(tenant, action.id)
        return ActionResult(action.id, action.type, hints.DONE)

    def _do(self, action: Action, tenant: bytes, name: str, keys: tuple[bytes, ...]) -> None:
        if any(is_value(key) or tenant_of(key) != tenant for key in keys):
            raise MisuseError("a key belongs to another tenant")  # also if no such chunk exists
        pin = f"{tenant.hex()} {name or keys[0].hex()}"
        if action.type == hints.RELEASE:
            self._cache.pinning.unpin_hinted(pin)
            return
        agent = self._cache.sessions.get(tenant, name) if name else None
        if name and agent is None:
            raise MisuseError("no such session is known")
        chain = keys if agent is None else agent.chain
        match action.type:
            case hints.PIN | hints.RETAIN:
                seconds = action.seconds(hints.MAX_PIN if action.type == hints.PIN else None, hints.MAX_PIN)
                if seconds is None:
                    raise MisuseError("retain needs seconds")
                self._cache.memory.expire_among(chain)
                self._cache.pinning.pin(pin, chain, seconds, hinted=True)
            case hints.PREFETCH:
                self._prefetch(chain, agent, action.seconds(_DEADLINE) or _DEADLINE, action.source)
            case hints.TTL:
                if (seconds := action.seconds(None)) is None:
                    raise MisuseError("ttl needs seconds")
                self._end_in(self._own(agent, keys), seconds)
            case hints.DEMOTE:
                self._demote(self._own(agent, keys))
            case hints.WAIT:
                assert agent is not None
                self._wait(agent, action.payload.get("for", "person"))
            case hints.END:
                assert agent is not None
                self._cache.pinning.unpin_hinted(pin)
                self._cache.sessions.end(agent)

    def _own(self, agent: Agent | None, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The chunks that an action may harm: of a session, only those that no other session needs."""
        return keys if agent is None else self._cache.sessions.own(agent)

    def _wait(self, agent: Agent, waits_for: object) -> None:
        match waits_for:
            case "person":
                self._cache.sessions.wait_for_person(agent)
            case "tool":
                self._cache.sessions.wait_for_tool(agent)
            case _:
                raise MisuseError("session_wait is for a person or for a tool")

    def _prefetch(self, keys: Sequence[bytes], agent: Agent | None, seconds: float, source: str) -> None:
        form = None if agent is None else agent.form
        if form is None and keys and (first_entry := self._cache.index.get(keys[0])) is not None:
            form = first_entry.form
        if form is None or form.layout is None:  # of what is just loading only the sizes may be known
            raise MisuseError("the form of these chunks is not known: name a session")
        if len(self._bringing) == MAX_BRINGING:
            raise MisuseError(f"{MAX_BRINGING} prefetches are running: try again later")
        match = self._cache.bring(keys, form, deadline=seconds, source=source)
        self._bringing.append(match)
        if not match.pending_lookups:
            self._cache.prefetch(match)

    def _end_in(self, keys: Sequence[bytes], seconds: float) -> None:
        """An end never moves to a later time."""
        expiry = self._clock() + seconds
        for index in self._cache.indexes.values():
            for key in keys:
                if (entry := index.get(key)) is not None and expiry < index.expiries.expiry(entry):
                    index.expiries.set(entry, expiry)

    def _demote(self, keys: Sequence[bytes]) -> None:
        """Write them to the tiers below, and let them leave the slab before others."""
        index = self._cache.index
        entries = [entry for key in keys if (entry := index.get(key)) is not None]
        for entry in entries:
            for tier in self._cache.lower if entry.state is EntryState.READY else ():
                tier.queue_write(entry)
        index.evict_first(entries)

    def step(self) -> None:
        """Continue the prefetches, and release what has arrived."""
        for match in list(self._bringing):
            if not match.pending_lookups and match.below and not match.pending_loads:
                self._cache.prefetch(match)
            if match.is_ready:  # its deadline has passed at the latest
                self._bringing.remove(match)
                self._cache.release(match)
