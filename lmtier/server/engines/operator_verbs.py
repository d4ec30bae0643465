"""Verbs for operators and their tools: pin, clear, flush, follow, explain and check."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from lmtier.core.cache import Cache
from lmtier.core.forgetting import Steps, forgetting, need_tenant
from lmtier.core.handover import FormTable
from lmtier.core.placement import write_form
from lmtier.errors import ConfigError
from lmtier.format.keys import KEY_BYTES, Identity, namespace, tenant
from lmtier.format.layout import ChunkForm
from lmtier.format.objects import Suspect
from lmtier.observe.prompts import Origin
from lmtier.rules.hints import read_envelope
from lmtier.rules.sessions import MAX_SESSIONS, Agent
from lmtier.server.commands import OK, PAUSE, Argument, Caller, PendingAnswer, Refused
from lmtier.server.engines.arguments import (
    MAX_IDENTITY,
    read_hex,
    read_identity,
    read_keys,
    read_lifetime,
    read_name,
    read_number,
    read_seconds,
    read_text,
    take_option,
    take_wait,
)
from lmtier.server.engines.engine_sessions import EngineSession, engine_session_of
from lmtier.server.explain import MAX_LOOKUPS, Explain
from lmtier.server.hint_execution import run_hints
from lmtier.server.settings import change
from lmtier.wire.resp import Error
from lmtier.wire.verbs import MAX_MODELS, write_changes

MAX_CHANGES = 4096
"""The most changes in one reply."""
MAX_CLEARINGS = 64
"""The most clears that wait for one shared tier."""
_FORGETTING = 60.0
"""Seconds that forgetting a tenant waits for tiers, unless the caller says otherwise."""


class OperatorVerbs:
    def __init__(self, cache: Cache, explain: Explain) -> None:
        self._cache = cache
        self._explain = explain
        self._models: OrderedDict[tuple[Identity, str], ChunkForm] = OrderedDict()
        """The models and adapters that engines have sent, the youngest last. They outlive sessions."""

    # ---- data from engines, and questions about it

    def model(self, caller: Caller, arguments: list[Argument]) -> Any:
        """Store how an engine makes its keys, and its form, so that users can name prompts by tokens."""
        form = engine_session_of(caller).form(arguments[1])
        identity = read_identity(arguments[2])
        lora = read_text(b"".join(arguments[3:])[:MAX_IDENTITY])
        self._models[identity, lora] = form
        for key in (identity, lora), (identity, ""):  # the entry without an adapter becomes the youngest
            if key in self._models:
                self._models.move_to_end(key)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        return OK

    def dump_models(self, forms: FormTable) -> list[Any]:
        models = self._models.items()
        return [[asdict(identity), lora, forms.number(form)] for (identity, lora), form in models]

    def restore_models(self, dumped: list[Any], forms: FormTable) -> None:
        for identity, lora, form in dumped:
            self._models[Identity(**identity), lora] = forms[form]

    def model_of(self, prefix: bytes) -> str:
        """The name of the model whose keys begin so; empty: no engine has sent it."""
        names = (identity.model for identity, _ in self._models)
        return next((name for name in names if namespace(name) == prefix), "")

    def models(self, caller: Caller, arguments: list[Argument]) -> Any:
        return json.dumps(
            [
                # in hexadecimal, because the names of adapters are not always printable
                {
                    "identity": asdict(identity),
                    "lora": lora.encode().hex(),
                    "form": [part.decode() for part in write_form(form)],
                }
                for (identity, lora), form in self._models.items()
            ]
        )

    def tell(self, caller: Caller, arguments: list[Argument]) -> Any:
        engine_session_of(caller)
        origin, parent = Origin.from_json(bytes(arguments[1])), read_keys(arguments[2:3])[-1:]
        tokens = b"".join(map(bytes, arguments[4:]))
        self._explain.prompts.add(read_keys(arguments[3:4]), tokens, origin, *parent)
        return OK

    def explain(self, caller: Caller, arguments: list[Argument]) -> Any:
        words = arguments[1:]
        # In bytes, as who decides on the role reads it: as text, other letters become an S in upper case.
        tokens = bool(words) and bytes(words[-1]).upper() == b"TOKENS"
        if len(words) - tokens > 1:
            raise Refused("ERR LMTIER.EXPLAIN takes [how many] [TOKENS]")
        count = read_number(words[0], "a number of lookups", MAX_LOOKUPS) if len(words) > tokens else 20
        return json.dumps(self._explain.recent(count, tokens=tokens))

    def changes(self, caller: Caller, arguments: list[Argument]) -> Any:
        journal = self._explain.journal
        position = read_number(arguments[1], "a position") if len(arguments) > 1 else journal.end
        changes = journal.since(position, MAX_CHANGES)
        if changes is None:
            return [journal.end, 1]
        return write_changes(position + len(changes), changes)

    def stats(self, caller: Caller, arguments: list[Argument]) -> Any:
        return self._cache.stats()

    def set(self, caller: Caller, arguments: list[Argument]) -> Any:
        words = [read_text(each) for each in arguments[1:]]
        if len(words) % 2:
            raise Refused("ERR LMTIER.SET takes pairs of a name and a value, like cpu.capacity 16GiB")
        try:
            return change(self._cache, dict(zip(words[::2], words[1::2], strict=True)))
        except ConfigError as error:
            raise Refused(f"ERR {error}") from None

    def check(self, caller: Caller, arguments: list[Argument]) -> Any:
        try:
            self._cache.check()
        except AssertionError as error:
            return Error(f"ERR an invariant of the cache does not hold: {error}")
        return OK

    # ---- pins

    def pin(self, caller: Caller, arguments: list[Argument]) -> Any:
        ttl, keys = read_lifetime(arguments[2:])
        return self._cache.pin(read_name(read_text(arguments[1])), keys, ttl)

    def unpin(self, caller: Caller, arguments: list[Argument]) -> Any:
        return int(self._cache.unpin(read_text(arguments[1])))

    def pins(self, caller: Caller, arguments: list[Argument]) -> Any:
        return json.dumps([pin._asdict() for pin in self._cache.pinned()])

    # ---- sessions

    def sessions(self, caller: Caller, arguments: list[Argument]) -> Any:
        """The agent sessions that asked last, with what each tier has of them."""
        if len(arguments) > 2:
            raise Refused("ERR LMTIER.SESSIONS takes [how many]")
        count = read_number(arguments[1], "a number of sessions", MAX_SESSIONS) if len(arguments) > 1 else 20
        return self._listing(self._cache.sessions.recent(count))

    def _listing(self, agents: list[Agent]) -> PendingAnswer:
        rows = []
        for agent in agents:
            rows.append({**self._cache.sessions.now(agent), "kept": self._cache.sessions.kept(agent)})
            yield PAUSE
        return json.dumps(rows)

    def hint(self, caller: Caller, arguments: list[Argument]) -> Any:
        """Execute an envelope of hints of one tenant; its salt is proof enough that it is this tenant's."""
        words = [read_text(each) for each in arguments[2:]]
        salt, session = take_option(words, "SALT") or "", take_option(words, "SESSION") or ""
        if words:
            raise Refused("ERR LMTIER.HINT takes an envelope, [SALT salt], [SESSION name], no more")
        actions = read_envelope(bytes(arguments[1]))
        return run_hints(self._cache, actions, tenant(salt), session, str(caller), caller.role)

    # ---- clear

    def clear(self, caller: Caller, arguments: list[Argument]) -> Any:
        options = [read_text(each) for each in arguments[1:]]
        seconds = take_wait(options)
        deadline = None if seconds is None else time.monotonic() + seconds
        force = bool(options) and options[-1].upper() == "FORCE"
        options = options[:-1] if force else options
        stored_by, since = take_option(options, "STOREDBY"), take_option(options, "SINCE")
        if stored_by == "":  # otherwise a script with an unset variable would clear everything
            raise Refused("ERR STOREDBY needs the name of an engine, or a pattern")
        match options:
            case []:
                prefix = b""
            case [option, model] if option.upper() == "NAMESPACE":
                prefix = namespace(model)
            case [option, digits] if option.upper() == "PREFIX" and 0 < len(digits) <= 2 * KEY_BYTES:
                prefix = read_hex(digits.encode())
            case _:
                raise Refused(
                    "ERR LMTIER.CLEAR takes [NAMESPACE model | PREFIX hex] [STOREDBY pattern] [SINCE ms] "
                    "[FORCE] [WAIT ms]"
                )
        self._need_warm("cleared")
        is_selective = stored_by is not None or since is not None
        if prefix or is_selective:  # a clear of everything makes all others unnecessary
            self._need_few_clears()
        if is_selective:
            since_ms = 0 if since is None else read_number(since.encode(), "a time in milliseconds", 1 << 53)
            return self._clearing(
                self._cache.purge_in_steps(Suspect(prefix, stored_by or "*", since_ms), force=force), deadline
            )
        return self._clearing(self._cache.clear_in_steps(prefix, force=force), deadline)

    def _need_warm(self, done: str) -> None:
        if not self._cache.is_warm:
            raise Refused(f"LOADING the tiers are still being scanned, so they cannot be {done}; try again")

    def _need_few_clears(self) -> None:
        if full_tiers := [tier.label for tier in self._cache.lower if tier.pending_clears >= MAX_CLEARINGS]:
            raise Refused(f"TRYAGAIN tier {full_tiers[0]} has {MAX_CLEARINGS} clears to do; try again later")

    def _clearing(self, steps: Iterator[None], until: float | None) -> PendingAnswer:
        for _ in steps:
            yield PAUSE
        return OK if until is None else (yield from self._cleared(until))

    def _cleared(self, until: float) -> PendingAnswer:
        """Wait until everything is deleted. It does not wait for a tier that fails."""
        tiers = self._cache.lower
        while (
            any(not (tier.is_clear_done or tier.is_clear_failing) for tier in tiers)
            and time.monotonic() < until
        ):
            yield None
        uncleared = [f"{tier.label} {tier.why_uncleared}".strip() for tier in tiers if not tier.is_clear_done]
        if not uncleared:
            return OK
        return Error(f"TRYAGAIN not everything is deleted yet; the rest is not used: {', '.join(uncleared)}")

    def forget(self, caller: Caller, arguments: list[Argument]) -> Any:
        words = [read_text(each) for each in arguments[1:]]
        seconds = take_wait(words)
        match words:
            case [option, name] if option.upper() == "SHARE":
                salts = [share.salt for share in self._cache.config.shares if share.name == name]
                if not salts:
                    raise Refused("ERR this server has no share of that name; give the tenant's salt or id")
                tenant_id = tenant(salts[0])
            case [option, digits] if option.upper() == "ID":
                tenant_id = read_hex(digits.encode())
            case [option, salt] if option.upper() == "SALT":
                tenant_id = tenant(salt)
            case _:
                raise Refused("ERR LMTIER.FORGET takes ID hex | SALT text | SHARE name, and [WAIT ms]")
        self._need_warm("searched")
        self._need_few_clears()
        requester = f"{caller.kind} {caller.name} at {caller.address}"
        need_tenant(tenant_id)
        steps = forgetting(self._cache, tenant_id, _FORGETTING if seconds is None else seconds, requester)
        return self._forgetting(steps)

    def _forgetting(self, steps: Steps) -> PendingAnswer:
        while True:
            try:
                must_wait = next(steps)
            except StopIteration as end:
                return json.dumps(end.value.fields())
            yield None if must_wait else PAUSE

    # ---- flush

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
