"""The calls of operators and their tools: functions of JSON values, in one table by their paths.

    HTTP, on every listener          ─► http.py: who asks, the method, the body ┐
    LMTIER.CALL, for a client that    ─► engines: in order with its requests    ┴─► Api.run ─► a function
    is connected

The keyword arguments of a function are those of its call: their names, their types, and what may be left out.
`access.RIGHTS` says who may call it, and with which argument more is needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from inspect import Parameter, signature
from itertools import groupby
from types import GeneratorType
from typing import Any, NamedTuple, get_args
from urllib.parse import parse_qsl

from lmtier.core.cache import Cache
from lmtier.core.forgetting import forgetting, need_tenant
from lmtier.core.placement import write_form
from lmtier.errors import ConfigError, MisuseError, excerpt
from lmtier.format.keys import KEY_BYTES, namespace, tenant
from lmtier.format.objects import Selector
from lmtier.rules.hints import actions_of
from lmtier.rules.sessions import MAX_SESSIONS
from lmtier.server.access import Role, right_to_call, why_not, write_audit
from lmtier.server.arguments import read_identity, read_keys, read_name
from lmtier.server.commands import PAUSE, PendingAnswer, Refused
from lmtier.server.explain import MAX_LOOKUPS, Explain
from lmtier.server.hint_execution import run_hints
from lmtier.server.models import Models
from lmtier.server.prefetching import prefetching
from lmtier.server.report import Report
from lmtier.server.settings import change
from lmtier.wire.verbs import MAX_MS

MAX_CLEARINGS = 64
"""The most clears that wait for one shared tier."""
MAX_CHANGES = 4096
"""The most changes in one answer."""
MAX_COLUMNS = 450
"""The most columns of a view: the rows of the history."""
_MISSES = 5
"""Prompts that missed, in a view."""
MAX_BODY = 256 << 10
"""Bytes of the arguments, as JSON."""
MAX_KEYS_BODY = 5 << 20
"""Bytes of arguments that have keys."""
_FORGETTING = 60.0
"""Seconds that forgetting a tenant waits for tiers, unless the caller says otherwise."""
_MOST = 1 << 53
"""The largest number. Every reader of JSON knows it exactly."""
_FACTS = 64  # about a model, in a call
_KINDS = ((str, "text"), (int, "a whole number"), (float, "a number"), (bool, "true or false"))
_NAMES: dict[type, str] = {**dict(_KINDS), dict: "an object", list: "a list"}


class Asker(NamedTuple):
    """Who calls."""

    name: str
    """As in the audit."""
    role: Role


class Call:
    """A function that may be called. GET: it changes nothing. POST: its arguments are a body."""

    def __init__(self, method: str, function: Callable[..., Any]) -> None:
        self.method, self.function = method, function
        self._signature = signature(function, eval_str=True)
        parameters = self._signature.parameters.values()
        self.arguments = {each.name: each for each in parameters if each.kind is Parameter.KEYWORD_ONLY}
        self.max_body = MAX_KEYS_BODY if "keys" in self.arguments else MAX_BODY

    def check(self, path: str, asker: Asker, given: Mapping[str, Any]) -> None:
        """Whether the function takes these arguments. A number is never negative."""
        try:
            self._signature.bind(asker, **given)
        except TypeError as error:
            names = ", ".join(self.arguments) or "no arguments"
            raise Refused(f"ERR {path} takes {names}: {error!s:.100}") from None
        for name in self.arguments.keys() & given.keys():
            annotation, value = self.arguments[name].annotation, given[name]
            if value is None:  # otherwise a script with an unset variable would clear everything
                raise Refused(f"ERR {name} is null: leave it out instead")
            kinds, kind = get_args(annotation) or (annotation,), type(value)
            if not (kind in kinds or (kind is int and float in kinds)):
                raise Refused(f"ERR {name} is {_NAMES[kinds[0]]}, not {excerpt(value)}")
            if kind in (int, float) and not 0 <= value <= _MOST:
                raise Refused(f"ERR {name}={excerpt(value)} is too large, or negative")


class Api:
    """The calls over one cache. A function returns a value for JSON, or a generator of one."""

    def __init__(
        self,
        cache: Cache,
        explain: Explain,
        models: Models,
        report: Report,
        alone: Callable[[PendingAnswer], PendingAnswer],
    ) -> None:
        """`alone` runs what may delete any named value, so that no transaction runs meanwhile."""
        self._cache = cache
        self._explainer = explain
        self._model_table = models
        self._report = report
        self._alone = alone
        self.calls = {
            f"/api/{name}": Call(method, getattr(self, f"_{name}"))
            for method, names in (
                ("GET", "stats view explain pins models sessions changes"),
                ("POST", "hints prefetch pin unpin set clear forget check"),
            )
            for name in names.split()
        }

    def parse(self, path: str, body: bytes) -> dict[str, Any]:
        """The arguments of a call, from JSON."""
        if len(body) > self.calls[path].max_body:
            raise Refused(f"ERR the arguments of {path} have at most {self.calls[path].max_body} bytes")
        try:
            arguments = json.loads(body)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise Refused(f"ERR the arguments of {path} are a JSON object")
        return arguments

    @staticmethod
    def parse_query(query: str) -> dict[str, Any]:
        """The arguments of a call, from `most=5&tokens=true`. Each is JSON, or else text."""
        try:
            fields = parse_qsl(query, keep_blank_values=True, max_num_fields=16)
        except ValueError:
            raise Refused("ERR a query has 16 fields at most") from None
        arguments: dict[str, Any] = {}
        for name, text in fields:
            try:
                arguments[name] = json.loads(text)
            except (ValueError, RecursionError):
                arguments[name] = text
        return arguments

    def run(self, path: str, arguments: Mapping[str, Any], asker: Asker) -> PendingAnswer:
        """The answer, as JSON. Raises Refused, at once or later."""
        call, right = self.calls[path], right_to_call(path, arguments)
        is_refused = asker.role < right.role
        if right.is_audited and asker.role:  # without a token every client could fill the log
            write_audit(asker.name, [path.encode(), *_audit_words(arguments)], refused=is_refused)
        if is_refused:
            raise Refused(f"NOPERM {why_not(right.role)}")
        try:
            call.check(path, asker, arguments)
            answer = call.function(asker, **arguments)
            if isinstance(answer, GeneratorType):
                answer = yield from answer
        except MisuseError as error:
            raise Refused(f"MISUSE {error}") from None
        except ConfigError as error:
            raise Refused(f"ERR {error}") from None
        except (UnicodeError, RecursionError):
            raise Refused("ERR an argument is no text: it has half of a character, or is too deep") from None
        return answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    # ---- read

    def _stats(self, asker: Asker) -> Any:
        return self._report.snapshot()

    def _view(self, asker: Asker, *, minutes: float = 5.0, columns: int = 60) -> PendingAnswer:
        """What the page shows of the last minutes."""
        if not 0.1 <= minutes <= 15:
            raise Refused(f"ERR minutes={minutes} is not between 0.1 and 15")
        columns = max(1, _at_most(columns, MAX_COLUMNS, "columns"))
        misses = self._explainer.recent(_MISSES)
        yield PAUSE
        return self._report.view(minutes, columns, misses)

    def _explain(self, asker: Asker, *, most: int = 20, tokens: bool = False) -> Any:
        return self._explainer.recent(_at_most(most, MAX_LOOKUPS, "lookups"), tokens=tokens)

    def _pins(self, asker: Asker) -> Any:
        return [pin._asdict() for pin in self._cache.pinned()]

    def _models(self, asker: Asker) -> Any:
        return [
            # in hexadecimal, because the names of adapters are not always printable
            {
                "identity": asdict(identity),
                "lora": lora.encode().hex(),
                "form": [part.decode() for part in write_form(form)],
            }
            for (identity, lora), form in self._model_table.items()
        ]

    def _sessions(self, asker: Asker, *, most: int = 20) -> PendingAnswer:
        """The agent sessions that asked last, with what each tier has of them."""
        rows = []
        for agent in self._cache.sessions.recent(_at_most(most, MAX_SESSIONS, "sessions")):
            rows.append({**self._cache.sessions.now(agent), "kept": self._cache.sessions.kept(agent)})
            yield PAUSE
        return rows

    def _changes(self, asker: Asker, *, position: int | None = None) -> Any:
        """Which chunks became findable and which are gone, in runs; without a position from now on."""
        journal = self._explainer.journal
        since = journal.end if position is None else position
        changes = journal.since(since, MAX_CHANGES)
        if changes is None:
            return {"position": journal.end, "is_lost": True, "runs": []}
        runs = groupby(changes, key=lambda change: change[:2])
        return {
            "position": since + len(changes),
            "is_lost": False,
            "runs": [[*what, [change.key.hex() for change in run]] for what, run in runs],
        }

    def _check(self, asker: Asker) -> Any:
        try:
            self._cache.check()
        except AssertionError as error:
            raise Refused(f"BROKEN an invariant of the cache does not hold: {error}") from None
        return {}

    # ---- change

    def _hints(self, asker: Asker, /, *, salt: str = "", session: str = "", **envelope: Any) -> Any:
        """Execute an envelope of hints of one tenant; its salt is proof enough that it is this tenant's.

        A field of an envelope may have any name, that of a parameter too.
        """
        return run_hints(self._cache, actions_of(envelope), tenant(salt), session, *asker)

    def _prefetch(self, asker: Asker, *, identity: dict, lora: str = "", keys: list) -> Any:  # type: ignore[type-arg]
        """Load a prompt of this model into memory, for a while."""
        if len(identity) > _FACTS:
            raise Refused(f"ERR a model has {_FACTS} facts at most, not {len(identity)}")
        model = read_identity(json.dumps(identity).encode()), _of_hex("lora", lora).decode()
        form = self._model_table.get(model)
        if form is None:
            raise Refused("NOSUCH no engine has sent this model, or not with this adapter")
        return prefetching(self._cache, _keys(keys), form)

    def _pin(self, asker: Asker, *, name: str, keys: list, seconds: float | None = None) -> Any:  # type: ignore[type-arg]
        return self._cache.pin(read_name(name), _keys(keys), seconds)

    def _unpin(self, asker: Asker, *, name: str) -> Any:
        return self._cache.unpin(name)

    def _set(self, asker: Asker, *, settings: dict) -> Any:  # type: ignore[type-arg]
        if not settings or not all(isinstance(value, str) for value in settings.values()):
            raise Refused('ERR settings are names with texts, like {"cpu.capacity": "16GiB"}')
        return change(self._cache, settings)

    def _clear(
        self,
        asker: Asker,
        *,
        model: str | None = None,
        prefix: str | None = None,
        stored_by: str | None = None,
        since: int | None = None,
        force: bool = False,
        seconds: float | None = None,
    ) -> Any:
        if stored_by == "":  # otherwise a script with an unset variable would clear everything
            raise Refused("ERR stored_by needs the name of an engine, or a pattern")
        if model is not None and prefix is not None:
            raise Refused("ERR model and prefix do not go together")
        begin = b"" if model is None else namespace(model)
        if prefix is not None:
            begin = _of_hex("prefix", prefix)
            if not 0 < len(begin) <= KEY_BYTES:
                raise Refused(f"ERR prefix has 1 to {KEY_BYTES} bytes")
        self._need_warm("cleared")
        is_selective = stored_by is not None or since is not None
        if begin or is_selective:  # a clear of everything makes all others unnecessary
            self._need_few_clears()
        selector = Selector(begin, stored_by or "*", max(1, since or 0) if is_selective else 0)
        return self._alone(self._clearing(self._cache.clear_in_steps(selector, force=force), seconds))

    def _need_warm(self, done: str) -> None:
        if not self._cache.is_warm:
            raise Refused(f"LOADING the tiers are still being scanned, so they cannot be {done}; try again")

    def _need_few_clears(self) -> None:
        if full_tiers := [tier.label for tier in self._cache.lower if tier.pending_clears >= MAX_CLEARINGS]:
            raise Refused(f"TRYAGAIN tier {full_tiers[0]} has {MAX_CLEARINGS} clears to do; try again later")

    def _clearing(self, steps: Iterator[object], seconds: float | None) -> PendingAnswer:
        """Clear, and wait until all is deleted, but not for a tier that fails."""
        tiers, until = self._cache.lower, _until(seconds or 0.0)
        for _ in steps:
            yield PAUSE
        while any(not (tier.is_clear_done or tier.is_clear_failing) for tier in tiers):
            if time.monotonic() >= until:
                break
            yield None
        left = [f"{tier.label} {tier.why_uncleared}".strip() for tier in tiers if not tier.is_clear_done]
        if left and seconds is not None:
            raise Refused(f"TRYAGAIN not everything is deleted yet; the rest is not used: {', '.join(left)}")
        return {}

    def _forget(
        self,
        asker: Asker,
        *,
        id: str | None = None,
        salt: str | None = None,
        share: str | None = None,
        seconds: float = _FORGETTING,
    ) -> PendingAnswer:
        if [id, salt, share].count(None) != 2:
            raise Refused("ERR /api/forget takes one of id, salt and share")
        if id is not None:
            tenant_id = _of_hex("id", id)
        elif salt is not None:
            tenant_id = tenant(salt)
        else:
            salts = [each.salt for each in self._cache.config.shares if each.name == share]
            if not salts:
                raise Refused("ERR this server has no share of that name; give the tenant's salt or id")
            tenant_id = tenant(salts[0])
        until = _until(seconds)
        self._need_warm("searched")
        self._need_few_clears()
        need_tenant(tenant_id)
        steps = forgetting(self._cache, tenant_id, until - time.monotonic(), asker.name)
        while True:
            try:
                yield None if next(steps) else PAUSE
            except StopIteration as end:
                return end.value.fields()


# ---- arguments


def _at_most(number: int, most: int, what: str) -> int:
    if number > most:
        raise Refused(f"ERR {number} is more than {most}, the most {what}")
    return number


def _until(seconds: float) -> float:
    """When so many seconds are over."""
    if seconds > MAX_MS / 1000:
        raise Refused(f"ERR seconds={seconds} is more than a day")
    return time.monotonic() + seconds


def _of_hex(name: str, digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise Refused(f"ERR {name}={excerpt(digits)} is not hexadecimal") from None


def _keys(digits: list[Any]) -> list[bytes]:
    if not all(isinstance(each, str) and len(each) == 2 * KEY_BYTES for each in digits):
        raise Refused(f"ERR a key has {2 * KEY_BYTES} hexadecimal digits")
    keys = _of_hex("a key", "".join(digits))
    if len(keys) != KEY_BYTES * len(
        digits
    ):  # Python reads over spaces, and all keys after one would be others
        raise Refused(f"ERR a key has {2 * KEY_BYTES} hexadecimal digits")
    return read_keys([keys])


def _audit_words(arguments: Mapping[str, Any]) -> Iterator[bytes]:
    """Arguments as the audit has them. A salt may be a secret, so it is not written."""
    settings = arguments.get("settings")
    for name, value in (settings if isinstance(settings, dict) else arguments).items():
        shown = f"{len(value):,}" if isinstance(value, list) else value
        text = "…" if name == "salt" else shown if isinstance(shown, str) else excerpt(shown)
        yield f"{name}={text}".encode(errors="replace")
