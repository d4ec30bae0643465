"""Who may do what: one token for each role, how wrong ones are slowed, and the audit.

A role may do what the roles below it may: LOOK at numbers, ENGINE: read and store KV and values, ADMIN:
delete, pin and change settings. `RIGHTS` has all of it. The tokens come from files, which SIGHUP reads again.
"""

from __future__ import annotations

import hmac
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from lmtier.config import TOKEN_VARIABLE, ServerConfig, first_line
from lmtier.errors import ConfigError, MisuseError, audit, log
from lmtier.observe.metrics import Metrics
from lmtier.wire.command_reader import Argument
from lmtier.wire.verb_table import VERBS

_APART = 0.25  # seconds between the answers to wrong tokens from one host
_LONGEST = 5.0  # seconds that such an answer waits at most
_HOSTS = 1024  # hosts whose wrong tokens are remembered
_SHOWN, _WORD = 6, 64  # words of a command in the audit, and characters of each


class Role(IntEnum):
    """What a client may do."""

    NONE = 0
    LOOK = 1
    ENGINE = 2
    ADMIN = 3


class Right(NamedTuple):
    """Who may do something."""

    role: Role
    """The least role."""
    is_audited: bool = False
    needs_slab: bool = False
    """It is about extents: only who maps the slab may do it."""


def _rows(right: Right, *words: str) -> dict[str, Right]:
    return dict.fromkeys(" ".join(words).split(), right)


RIGHTS: Final[Mapping[str, Right]] = {
    **_rows(Right(Role.NONE), "HELLO AUTH QUIT RESET /healthz /health /readyz"),
    **_rows(
        Right(Role.LOOK),
        "PING ECHO TIME SELECT INFO COMMAND CONFIG CLIENT DBSIZE",
        "/ /metrics /version /api/stats /api/view /api/explain /api/pins /api/models",
    ),
    **_rows(
        Right(Role.ENGINE),
        "GET MGET GETRANGE STRLEN EXISTS MEMORY TYPE TTL PTTL SCAN KEYS SET SETNX SETEX PSETEX GETSET MSET",
        "GETDEL DEL UNLINK EXPIRE PEXPIRE EXPIREAT PEXPIREAT PERSIST MULTI EXEC DISCARD WATCH UNWATCH",
        "/api/sessions /api/changes /api/hints /api/prefetch",
        "hint:prefetch hint:release hint:session_end hint:session_wait hint:demote",
    ),
    **_rows(Right(Role.ENGINE, is_audited=True), "hint:pin hint:retain hint:ttl"),
    **_rows(
        Right(Role.ADMIN, is_audited=True),
        "FLUSHALL FLUSHDB CLIENT:KILL hint:ttl:keys",
        "/api/pin /api/unpin /api/set /api/clear /api/forget /api/check /api/explain:tokens",
    ),
    **{
        f"LMTIER.{name}": Right(Role[verb.role.upper()], verb.is_audited, verb.needs_slab)
        for name, verb in VERBS.items()
    },
}
"""Each command, verb, page and call, and each action of hints. What takes more has a separate row."""


def right_to(name: bytes, arguments: Sequence[Argument] = ()) -> Right:
    """Who may run this command. `arguments` include its name."""
    if name == b"CLIENT" and len(arguments) > 1 and bytes(arguments[1]).upper() == b"KILL":
        return RIGHTS["CLIENT:KILL"]
    return RIGHTS[name.decode()]


def right_to_call(path: str, arguments: Mapping[str, object]) -> Right:
    """Who may make this call. With some arguments it takes more."""
    rows = [f"{path}:{name}" for name, value in arguments.items() if value]
    return next((RIGHTS[row] for row in rows if row in RIGHTS), RIGHTS[path])


def why_not(needed: Role) -> str:
    """What a client lacks that needs this role."""
    if needed is Role.ADMIN:
        return "this needs the token of an administrator (admin_token_file)"
    return "this needs the token of an engine: one for looking may do nothing else"


NAMES = {Role.LOOK: "look_token_file", Role.ENGINE: "token_file", Role.ADMIN: "admin_token_file"}
"""The setting that names the file of each role's token."""


class RoleTokens:
    """The token of each role that has one."""

    def __init__(self, by_role: Mapping[Role, str]) -> None:
        self._by_role = by_role
        if "" in by_role.values():
            raise MisuseError("an empty token would allow every client; leave it out instead")
        if len(set(by_role.values())) < len(by_role):
            raise ConfigError(
                f"serve: {' and '.join(NAMES[role] for role in sorted(self._by_role))} hold the same token; "
                "give each role its own"
            )
        if Role.LOOK in self._by_role and Role.ENGINE not in self._by_role:
            raise ConfigError(
                "serve: look_token_file without token_file protects nothing: without a token a client may do "
                "more than look; set token_file too"
            )

    @classmethod
    def read(cls, serving: ServerConfig) -> RoleTokens:
        """As they are now in the files."""
        return cls({role: token for role in NAMES if (token := read_token(serving, role)) is not None})

    def __bool__(self) -> bool:
        return bool(self._by_role)

    def __contains__(self, role: Role) -> bool:
        return role in self._by_role

    @property
    def needs_token(self) -> bool:
        """Whether a client needs a token to be served at all."""
        return Role.ENGINE in self

    def role_without_token(self, foreign: str = "", *, is_local: bool = False) -> Role:
        """The role of a client that has sent no token. `foreign`: why it is not this user's; empty: it is."""
        if foreign:
            return Role.NONE
        if is_local:
            return Role.ADMIN
        if self.needs_token:
            return Role.NONE
        return Role.ENGINE if Role.ADMIN in self else Role.ADMIN

    def role_of(self, shown: bytes) -> Role:
        """The role of the client that shows this token. Takes as long for each wrong one."""
        found = Role.NONE
        for role, token in self._by_role.items():
            if hmac.compare_digest(shown, token.encode()):
                # Without a separate token for it, engines administer too.
                found = Role.ADMIN if role is Role.ENGINE and Role.ADMIN not in self else role
        return found


def read_token(serving: ServerConfig, role: Role = Role.ENGINE) -> str | None:
    """The token of a role. None: there is none."""
    name = NAMES[role]
    file = getattr(serving, name)
    if not file:
        return (os.environ.get(TOKEN_VARIABLE) or None) if role is Role.ENGINE else None
    return first_line(f"serve: {name}", file).strip()


def own_token(serving: ServerConfig) -> str | None:
    """The token with the most rights among those whose files this user may read."""
    first_error: ConfigError | None = None
    for role in sorted(NAMES, reverse=True):
        try:
            if (token := read_token(serving, role)) is not None:
                return token
        except ConfigError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    return None


class WrongTokens:
    """The wrong tokens: each is counted, logged, and answered late. The right one is answered at once."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._count = metrics.wrong_tokens
        for kind in ("redis", "engine", "http"):
            self._count.labels(kind)  # starts at 0, so that the first one shows as a rise
        self._clock = clock
        self._next: OrderedDict[str, float] = OrderedDict()
        """When each host gets its next answer to a wrong token."""

    def register(self, kind: str, address: str) -> float:
        """A client showed a wrong token. Returns the time, by the clock, of its answer."""
        self._count.labels(kind).inc()
        log.warning("lmtier: %s showed a wrong token (%s)", address or "a client", kind)
        now, host = self._clock(), address.rpartition(":")[0]
        answer_at = min(max(now, self._next.pop(host, 0.0)) + _APART, now + _LONGEST)
        self._next[host] = answer_at
        if len(self._next) > _HOSTS:
            self._next.popitem(last=False)
        return answer_at


def write_audit(who: str, words: Sequence[Argument], *, refused: bool = False) -> None:
    """Write to the audit who does what."""
    shown = [_printable(bytes(word[:_WORD])) + "…" * (len(word) > _WORD) for word in words[:_SHOWN]]
    if len(words) > _SHOWN:
        shown.append(f"and {len(words) - _SHOWN:,} more")
    text = " ".join(shown)
    audit.info(
        "lmtier: audit: %s %s: %s",
        *(who, "was refused" if refused else "asks", text),
        extra={"facts": {"audit": "refused" if refused else "accepted", "who": who, "what": text}},
    )


def _printable(word: bytes) -> str:
    try:
        text = word.decode()
    except UnicodeDecodeError:  # the key of a chunk
        return word[:32].hex()
    return "".join(each if each.isprintable() else "?" for each in text)
