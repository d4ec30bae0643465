"""The commands that Redis clients know, on named values: worded and answered as redis does.

A command that is not here gets what redis says to one that it does not know. There is one database, 0.
FLUSHALL forgets the named values; the KV of engines is cleared by `lmtier clear`.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lmtier.server.commands import PAUSE, Argument, Caller, Command, Nothing, Payload, Refused, Table, Waiting
from lmtier.server.resp import Error, Simple, Verbatim, encode
from lmtier.server.values import MAX_NAME, Draft, Value, Values, now_ms

REDIS_VERSION = "7.0.15"
"""What INFO and HELLO claim, because clients choose their commands by it."""
OK = Simple("OK")
SYNTAX = Error("ERR syntax error")
NOT_AN_INTEGER = Error("ERR value is not an integer or out of range")
NO_ROOM = Error("OOM command not allowed when used memory > 'maxmemory'.")
TRY_AGAIN = Error("TRYAGAIN a tier fails to delete the older value, which a restart might find")
WRONG_PASS = Error("WRONGPASS invalid username-password pair or user is disabled.")
NO_PASS = Error(
    "ERR AUTH <password> called without any password configured for the default user. "
    "Are you sure your configuration is correct?"
)

_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_NEVER = 1 << 63
_MANY = 1 << 20
"""Names."""
_MAX_PATTERNS = 1024
"""Bytes, of one command. Compiled they are a hundred times as many, and the last 512 patterns stay so."""
_ONE, _ALL, _PAIRS = (1, 1, 1), (1, -1, 1), (1, -1, 2)


class Redis:
    def __init__(
        self,
        values: Values,
        *,
        token: Callable[[], str | None],
        info: Callable[[], Mapping[str, Mapping[str, object]]],
        settings: Callable[[], Mapping[str, str]],
        callers: Callable[[], Iterable[Caller]],
    ) -> None:
        """`info` gives the sections of INFO; `settings` what CONFIG GET may show; `callers` who is here."""
        self._values = values
        self._token = token
        self._info = info
        self._settings = settings
        self._callers = callers
        self.everything: Table = {}
        """All commands of the server, for COMMAND."""

    def table(self) -> Table:
        reads, writes = ("readonly", "fast"), ("write", "denyoom")
        always = ("loading", "stale", "fast")
        return {
            b"GET": Command(self._get, 2, reads, _ONE),
            b"MGET": Command(self._mget, -2, reads, _ALL, most=_MANY),
            b"GETRANGE": Command(self._getrange, 4, ("readonly",), _ONE),
            b"STRLEN": Command(self._strlen, 2, reads, _ONE),
            b"EXISTS": Command(self._exists, -2, reads, _ALL, most=_MANY),
            b"TYPE": Command(self._type, 2, reads, _ONE),
            b"TTL": Command(self._ttl, 2, reads, _ONE),
            b"PTTL": Command(self._ttl, 2, reads, _ONE),
            b"DBSIZE": Command(self._dbsize, 1, reads),
            b"SCAN": Command(self._scan, -2, ("readonly",)),
            b"KEYS": Command(self._keys, 2, ("readonly",)),
            b"SET": Command(self._set, -3, writes, _ONE, range(2, 3)),
            b"SETNX": Command(self._setnx, 3, (*writes, "fast"), _ONE, range(2, 3)),
            b"SETEX": Command(self._setex, 4, writes, _ONE, range(3, 4)),
            b"PSETEX": Command(self._setex, 4, writes, _ONE, range(3, 4)),
            b"GETSET": Command(self._getset, 3, (*writes, "fast"), _ONE, range(2, 3)),
            b"MSET": Command(self._mset, -3, writes, _PAIRS, range(2, 1 << 30, 2), _MANY),
            b"GETDEL": Command(self._getdel, 2, ("write", "fast"), _ONE),
            b"DEL": Command(self._del, -2, ("write",), _ALL, most=_MANY),
            b"UNLINK": Command(self._del, -2, ("write", "fast"), _ALL, most=_MANY),
            b"EXPIRE": Command(self._expire, -3, ("write", "fast"), _ONE),
            b"PEXPIRE": Command(self._expire, -3, ("write", "fast"), _ONE),
            b"EXPIREAT": Command(self._expire, -3, ("write", "fast"), _ONE),
            b"PEXPIREAT": Command(self._expire, -3, ("write", "fast"), _ONE),
            b"PERSIST": Command(self._persist, 2, ("write", "fast"), _ONE),
            b"FLUSHALL": Command(self._flush, -1, ("write",)),
            b"FLUSHDB": Command(self._flush, -1, ("write",)),
            b"PING": Command(self._ping, -1, always),
            b"ECHO": Command(self._echo, 2, always),
            b"TIME": Command(self._time, 1, always),
            b"SELECT": Command(self._select, 2, always),
            b"INFO": Command(self._info_text, -1, always),
            b"COMMAND": Command(self._command, -1, always),
            b"CONFIG": Command(self._config, -2, ("admin", *always)),
            b"CLIENT": Command(self._client, -2, always),
            b"HELLO": Command(self._hello, -1, ("no_auth", *always)),
            b"AUTH": Command(self._auth, -2, ("no_auth", *always)),
            b"QUIT": Command(self._quit, -1, ("no_auth", *always)),
            b"RESET": Command(self._reset, 1, ("no_auth", *always)),
        }

    # ---- reading

    def _get(self, caller: Caller, args: list[Argument]) -> Waiting:
        value = yield from self._values.get(_name(args[1]))
        return self._payload(value)

    def _payload(self, value: Value | None, start: int = 0, end: int | None = None) -> Payload | None:
        if value is None:
            return None
        return Payload(value.view[start:end], lambda: self._values.release(value))

    def _mget(self, caller: Caller, args: list[Argument]) -> Waiting:
        yield b"*%d\r\n" % (len(args) - 1)
        for arg in args[1:]:
            value = yield from self._values.get(bytes(arg))  # no name can be wrong here: it is just not there
            yield self._payload(value) or encode(None, caller.resp3)
        return Nothing

    def _getrange(self, caller: Caller, args: list[Argument]) -> Waiting:
        start, end = _integer(args[2]), _integer(args[3])
        value = yield from self._values.get(_name(args[1]))
        if value is None:
            return b""
        size = len(value.view)
        first = max(0, start + size) if start < 0 else start
        last = max(0, end + size) if end < 0 else min(end, size - 1)
        empty = first > last or (start < 0 and end < 0 and start > end)
        return self._payload(value, 0, 0) if empty else self._payload(value, first, last + 1)

    def _strlen(self, caller: Caller, args: list[Argument]) -> Waiting:
        mark = yield from self._values.mark(bytes(args[1]))
        return mark.nbytes if mark else 0

    def _exists(self, caller: Caller, args: list[Argument]) -> Waiting:
        found = 0
        for arg in args[1:]:
            found += (yield from self._values.mark(bytes(arg))) is not None
            yield PAUSE
        return found

    def _type(self, caller: Caller, args: list[Argument]) -> Waiting:
        mark = yield from self._values.mark(bytes(args[1]))
        return Simple("string" if mark else "none")

    def _ttl(self, caller: Caller, args: list[Argument]) -> Waiting:
        mark = yield from self._values.mark(bytes(args[1]))
        if mark is None:
            return -2
        if not mark.expires:
            return -1
        left = max(0, mark.expires - now_ms())
        return left if _word(args[0]) == "PTTL" else (left + 500) // 1000

    def _dbsize(self, caller: Caller, args: list[Argument]) -> int:
        return len(self._values)

    def _scan(self, caller: Caller, args: list[Argument]) -> Waiting:
        if not _INTEGER.fullmatch(bytes(args[1])) or not 0 <= int(bytes(args[1])) < 1 << 64:
            raise Refused(Error("ERR invalid cursor"))
        most, matches, kind = 10, re.compile(b""), b"string"
        _need_short(args[2:])
        options = iter(args[2:])
        for option in options:
            given = next(options, None)
            if given is None:
                raise Refused(SYNTAX)
            match _word(option):
                case "MATCH":
                    matches = _glob(bytes(given))
                case "COUNT":
                    if (most := _integer(given)) < 1:
                        raise Refused(SYNTAX)
                case "TYPE":
                    kind = bytes(given).lower()
                case _:
                    raise Refused(SYNTAX)
        after, names = yield from self._values.scan(int(bytes(args[1])), min(most, 10_000))
        return [str(after), [name for name in names if matches.match(name) and kind == b"string"]]

    def _keys(self, caller: Caller, args: list[Argument]) -> Waiting:
        _need_short(args[1:])
        matches = _glob(bytes(args[1]))
        cursor, found = 0, []
        while True:
            cursor, names = yield from self._values.scan(cursor, 1000)
            found += [name for name in names if matches.match(name)]
            if not cursor:
                return found
            yield PAUSE

    # ---- writing

    def _draft(self, caller: Caller, value: Argument) -> Draft:
        """Where the value of the present command lies; it stays the caller's until it is put."""
        if isinstance(value, bytes) and (draft := self._values.draft(len(value))):  # an inline command's
            draft.view[:] = value
            caller.drafts.append(draft)
        if not caller.drafts:  # it was dropped when it came
            raise Refused(NO_ROOM)
        draft = caller.drafts[0]
        assert isinstance(draft, Draft)
        return draft

    def _put(self, caller: Caller, draft: Draft, name: bytes, expires: int = 0) -> Waiting:
        caller.drafts.remove(draft)
        return OK if (yield from self._values.put(draft, name, expires)) else TRY_AGAIN

    def _set(self, caller: Caller, args: list[Argument]) -> Waiting:
        name = _name(args[1])
        words: set[str] = set()
        time: tuple[str, Argument] | None = None
        options = iter(args[3:])
        for option in options:
            word = _word(option)
            given = next(options, None) if word in _TIMES else b""
            if word not in {*_TIMES, "NX", "XX", "GET", "KEEPTTL"} or given is None:
                raise Refused(SYNTAX)
            words.add(word)
            if word in _TIMES:
                time = word, given
        if len(words & {*_TIMES, "KEEPTTL"}) > 1 or {"NX", "XX"} <= words:
            raise Refused(SYNTAX)
        expires = _expiry(*time, "set") if time else 0
        draft = self._draft(caller, args[2])
        old: Payload | None = None
        if "GET" in words:
            old = self._payload((yield from self._values.get(name)))
        if words & {"NX", "XX", "KEEPTTL"}:
            try:
                mark = yield from self._values.mark(name)
            except GeneratorExit:
                if old is not None:
                    old.sent()
                raise
            if ("NX" in words and mark is not None) or ("XX" in words and mark is None):
                return old
            if mark is not None and "KEEPTTL" in words:
                expires = mark.expires
        try:
            answer = yield from self._put(caller, draft, name, expires)
        except GeneratorExit:
            if old is not None:
                old.sent()
            raise
        if "GET" not in words:
            return answer
        if answer is not OK and old is not None:
            old.sent()
        return old if answer is OK else answer  # not before: with it, the older value is over

    def _setnx(self, caller: Caller, args: list[Argument]) -> Waiting:
        name, draft = _name(args[1]), self._draft(caller, args[2])
        if (yield from self._values.mark(name)) is not None:
            return 0
        answer = yield from self._put(caller, draft, name)
        return 1 if answer is OK else answer

    def _setex(self, caller: Caller, args: list[Argument]) -> Waiting:
        word = _word(args[0])
        expires = _expiry("EX" if word == "SETEX" else "PX", args[2], word.lower())
        return (yield from self._put(caller, self._draft(caller, args[3]), _name(args[1]), expires))

    def _getset(self, caller: Caller, args: list[Argument]) -> Waiting:
        return (yield from self._set(caller, [b"SET", args[1], args[2], b"GET"]))

    def _mset(self, caller: Caller, args: list[Argument]) -> Waiting:
        if len(args) % 2 == 0:
            raise Refused(Error("ERR wrong number of arguments for 'mset' command"))
        names = [_name(arg) for arg in args[1::2]]
        for value in args[2::2]:
            self._draft(caller, value)
        if len(caller.drafts) < len(names):
            raise Refused(NO_ROOM)
        answer: object = OK
        for name in names:
            done = yield from self._put(caller, caller.drafts[0], name)
            answer = answer if done is OK else done
            yield PAUSE
        return answer

    def _getdel(self, caller: Caller, args: list[Argument]) -> Waiting:
        name = _name(args[1])
        value = yield from self._values.get(name)
        answer = self._payload(value)
        try:
            # Also one that cannot be read just now: who is told that there is none must not find it later.
            deleted = yield from self._values.forget(name)
        except GeneratorExit:
            if answer is not None:
                answer.sent()
            raise
        if deleted is not None:
            return answer
        if answer is not None:
            answer.sent()
        return TRY_AGAIN

    def _del(self, caller: Caller, args: list[Argument]) -> Waiting:
        return (yield from self._forget(*map(bytes, dict.fromkeys(args[1:]))))

    def _forget(self, *names: bytes) -> Waiting:
        deleted = yield from self._values.forget(*names)
        return TRY_AGAIN if deleted is None else deleted

    def _expire(self, caller: Caller, args: list[Argument]) -> Waiting:
        command = _word(args[0])
        word = {"EXPIRE": "EX", "PEXPIRE": "PX", "EXPIREAT": "EXAT", "PEXPIREAT": "PXAT"}[command]
        conditions = {_word(arg) for arg in args[3:]}
        for arg in args[3:]:
            if _word(arg) not in ("NX", "XX", "GT", "LT"):
                raise Refused(Error(f"ERR Unsupported option {_shown(arg)}"))
        if "NX" in conditions and len(conditions) > 1:
            raise Refused(Error("ERR NX and XX, GT or LT options at the same time are not compatible"))
        if {"GT", "LT"} <= conditions:
            raise Refused(Error("ERR GT and LT options at the same time are not compatible"))
        expires = _expiry(word, args[2], command.lower(), least=-_NEVER)
        name = bytes(args[1])
        mark = yield from self._values.mark(name)
        if mark is None:
            return (yield from self._forget(name)) if expires <= now_ms() else 0  # as for GETDEL
        had = mark.expires or _NEVER  # which is later than any time
        refused = (
            ("NX" in conditions and mark.expires)
            or ("XX" in conditions and not mark.expires)
            or ("GT" in conditions and expires <= had)
            or ("LT" in conditions and expires >= had)
        )
        if refused:
            return 0
        if expires <= now_ms():
            return (yield from self._forget(name))
        return (yield from self._retime(name, expires))

    def _persist(self, caller: Caller, args: list[Argument]) -> Waiting:
        name = bytes(args[1])
        mark = yield from self._values.mark(name)
        if mark is None or not mark.expires:
            return 0
        return (yield from self._retime(name, 0))

    def _retime(self, name: bytes, expires: int) -> Waiting:
        done = yield from self._values.retime(name, expires)
        return 0 if done is None else 1 if done else NO_ROOM

    def _flush(self, caller: Caller, args: list[Argument]) -> Waiting:
        if len(args) > 2 or (len(args) == 2 and _word(args[1]) not in ("SYNC", "ASYNC")):
            raise Refused(SYNTAX)
        return OK if (yield from self._values.clear()) else TRY_AGAIN

    # ---- the connection

    def _ping(self, caller: Caller, args: list[Argument]) -> object:
        if len(args) > 2:
            raise Refused(Error("ERR wrong number of arguments for 'ping' command"))
        return bytes(args[1]) if len(args) == 2 else Simple("PONG")

    def _echo(self, caller: Caller, args: list[Argument]) -> object:
        return bytes(args[1])

    def _time(self, caller: Caller, args: list[Argument]) -> object:
        seconds, micros = divmod(time.time_ns() // 1000, 1_000_000)
        return [str(seconds), str(micros)]

    def _select(self, caller: Caller, args: list[Argument]) -> object:
        if _integer(args[1]):
            raise Refused(Error("ERR DB index is out of range"))
        return OK

    def _auth(self, caller: Caller, args: list[Argument]) -> object:
        if len(args) > 3:
            raise Refused(SYNTAX)
        if len(args) == 2 and self._token() is None:
            raise Refused(NO_PASS)
        self._log_in(caller, args[1] if len(args) == 3 else b"default", args[-1])
        return OK

    def _log_in(self, caller: Caller, user: Argument, password: Argument) -> None:
        token = self._token()
        right = token is None or hmac.compare_digest(bytes(password), token.encode())
        if bytes(user) != b"default" or not right:
            raise Refused(WRONG_PASS)
        caller.is_trusted = True

    def _hello(self, caller: Caller, args: list[Argument]) -> object:
        resp3, name = caller.resp3, caller.name
        if len(args) > 1:
            version = _integer(args[1], Error("ERR Protocol version is not an integer or out of range"))
            if version not in (2, 3):
                raise Refused(Error("NOPROTO unsupported protocol version"))
            resp3 = version == 3
        options = iter(args[2:])
        for option in options:
            match _word(option):
                case "AUTH":
                    user, password = next(options, None), next(options, None)
                    if user is None or password is None:
                        raise Refused(_bad_hello(option))
                    self._log_in(caller, user, password)
                case "SETNAME":
                    given = next(options, None)
                    if given is None:
                        raise Refused(_bad_hello(option))
                    name = _client_name(given)
                case _:
                    raise Refused(_bad_hello(option))
        if not caller.is_trusted:
            raise Refused(
                Error(
                    "NOAUTH HELLO must be called with the client already authenticated, otherwise the "
                    "HELLO AUTH <user> <pass> option can be used to authenticate the client and "
                    "select the RESP protocol version at the same time"
                )
            )
        caller.resp3, caller.name = resp3, name
        return {
            "server": "redis",
            "version": REDIS_VERSION,
            "proto": 3 if resp3 else 2,
            "id": caller.id,
            "mode": "standalone",
            "role": "master",
            "modules": [],
        }

    def _quit(self, caller: Caller, args: list[Argument]) -> object:
        caller.closing = True
        return OK

    def _reset(self, caller: Caller, args: list[Argument]) -> object:
        caller.resp3, caller.name = False, ""
        caller.is_trusted = caller.is_local or self._token() is None
        return Simple("RESET")

    def _client(self, caller: Caller, args: list[Argument]) -> object:
        match _word(args[1]), args[2:]:
            case "ID", []:
                return caller.id
            case "GETNAME", []:
                return caller.name or None
            case "SETNAME", [name]:
                caller.name = _client_name(name)
                return OK
            case "SETINFO", [attribute, _]:
                if _word(attribute) not in ("LIB-NAME", "LIB-VER"):
                    raise Refused(Error(f"ERR Unrecognized option '{_shown(attribute)}'"))
                return OK
            case "INFO", []:
                return Verbatim(_line(caller) + "\n")
            case "LIST", []:
                return Verbatim("".join(f"{_line(each)}\n" for each in self._callers()))
            case (("NO-EVICT" | "NO-TOUCH"), [switch]):
                if _word(switch) not in ("ON", "OFF"):
                    raise Refused(SYNTAX)
                return OK
        raise Refused(_no_subcommand(args, *_CLIENT))

    # ---- the server

    def _info_text(self, caller: Caller, args: list[Argument]) -> object:
        wanted = {_word(arg).lower() for arg in args[1:]} - {"all", "default", "everything"}
        sections = [
            f"# {section}\r\n" + "".join(f"{name}:{value}\r\n" for name, value in fields.items())
            for section, fields in self._info().items()
            if not wanted or section.lower() in wanted
        ]
        return Verbatim("\r\n".join(sections))

    def _config(self, caller: Caller, args: list[Argument]) -> object:
        match _word(args[1]), args[2:]:
            case "GET", [_, *_]:
                _need_short(args[2:])
                globs = [_glob(bytes(arg).lower()) for arg in args[2:]]
                shown = self._settings().items()
                return {name: value for name, value in shown if any(g.match(name.encode()) for g in globs)}
            case "SET", _:
                raise Refused(Error("ERR a setting cannot be changed while the server runs"))
        raise Refused(_no_subcommand(args, "GET"))

    def _command(self, caller: Caller, args: list[Argument]) -> object:
        match [_word(arg) for arg in args[1:]]:
            case []:
                return [_described(name, each) for name, each in self.everything.items()]
            case ["COUNT"]:
                return len(self.everything)
            case ["LIST"]:
                return [name.lower() for name in self.everything]
            case ["DOCS", *_]:
                return {}
            case ["INFO", *names]:
                found = [(name.encode(), self.everything.get(name.encode())) for name in names]
                return [each and _described(name, each) for name, each in found]
        raise Refused(_no_subcommand(args, "COUNT", "LIST"))


_TIMES = ("EX", "PX", "EXAT", "PXAT")
_CLIENT = ("ID", "GETNAME", "SETNAME", "SETINFO", "INFO", "LIST", "NO-EVICT", "NO-TOUCH")


def _word(arg: Argument) -> str:
    return bytes(arg).decode("latin-1").upper()


def _shown(arg: Argument) -> str:
    """What a client gave, in an error."""
    return bytes(arg[:128]).decode("utf-8", "surrogateescape")


def _name(arg: Argument) -> bytes:
    if len(arg) > MAX_NAME:
        raise Refused(Error(f"ERR the name has {len(arg)} bytes; names have {MAX_NAME} at most here"))
    return bytes(arg)


def _integer(arg: Argument, error: Error = NOT_AN_INTEGER) -> int:
    text = bytes(arg)
    if not _INTEGER.fullmatch(text) or not -(1 << 63) <= (number := int(text)) < 1 << 63:
        raise Refused(error)
    return number


def _expiry(word: str, arg: Argument, command: str, least: int = 1) -> int:
    """The time that EX, PX, EXAT or PXAT means, in ms since the epoch."""
    number = _integer(arg)
    millis = number if word.startswith("PX") else number * 1000
    when = millis if word.endswith("AT") else now_ms() + millis
    if number < least or not -_NEVER <= millis < _NEVER or when >= _NEVER:
        raise Refused(Error(f"ERR invalid expire time in '{command}' command"))
    return when


def _need_short(patterns: list[Argument]) -> None:
    if (nbytes := sum(map(len, patterns))) > _MAX_PATTERNS:
        raise Refused(Error(f"ERR patterns of {nbytes} bytes; here they have {_MAX_PATTERNS} at most"))


def _glob(pattern: bytes) -> re.Pattern[bytes]:
    """A pattern as redis reads it: * ? [a-c] [^a] and a backslash before what is meant as it is."""
    pieces = [b""]  # between stars
    at = 0
    while at < len(pattern):
        letter = pattern[at : at + 1]
        at += 1
        if letter == b"*":
            pieces.append(b"")
        elif letter == b"?":
            pieces[-1] += b"."
        elif letter == b"[":
            at, group = _group(pattern, at)
            pieces[-1] += group
        else:
            if letter == b"\\" and at < len(pattern):
                letter = pattern[at : at + 1]
                at += 1
            pieces[-1] += re.escape(letter)
    first, *middle = pieces
    last = b".*" + middle.pop() if middle else b""
    # The first place where a piece fits is as good as any other: atomic, or a hostile pattern takes for ever.
    tried = b"".join(b"(?>.*?" + piece + b")" for piece in middle if piece)
    return re.compile(first + tried + last + rb"\Z", re.DOTALL)


def _group(pattern: bytes, at: int) -> tuple[int, bytes]:
    """The class that begins after a [, and where it ends; one that never ends goes to the end."""
    is_not = pattern[at : at + 1] == b"^"
    at += is_not
    parts: list[bytes] = []
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        if pattern[at : at + 1] == b"\\" and at + 1 < len(pattern):
            at += 1
            parts.append(re.escape(pattern[at : at + 1]))
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            low, high = sorted((pattern[at : at + 1], pattern[at + 2 : at + 3]))
            parts.append(re.escape(low) + b"-" + re.escape(high))
            at += 2
        else:
            parts.append(re.escape(pattern[at : at + 1]))
        at += 1
    if not parts:
        return at + 1, b"." if is_not else b"(?!)"
    return at + 1, b"[" + (b"^" if is_not else b"") + b"".join(parts) + b"]"


def _client_name(arg: Argument) -> str:
    if any(byte < 33 or byte > 126 for byte in arg) or len(arg) > 128:
        raise Refused(Error("ERR Client names cannot contain spaces, newlines or special characters."))
    return bytes(arg).decode()


def _line(caller: Caller) -> str:
    return (
        f"id={caller.id} addr={caller.address} name={caller.name} kind={caller.kind} "
        f"resp={3 if caller.resp3 else 2} tot-cmds={caller.asked} cmd={caller.last}"
    )


def _described(name: bytes, command: Command) -> list[Any]:
    flags = frozenset(map(Simple, command.flags))
    none: frozenset[str] = frozenset()
    # Then: categories, hints, how to find the names, subcommands.
    return [name.lower(), command.arity, flags, *command.keys, none, [], [], []]


def _bad_hello(option: Argument) -> Error:
    return Error(f"ERR Syntax error in HELLO option '{_shown(option)}'")


def _no_subcommand(args: list[Argument], *known: str) -> Error:
    """Why no subcommand takes these arguments."""
    if _word(args[1]) in known:
        name = f"{_word(args[0])}|{_word(args[1])}".lower()
        return Error(f"ERR wrong number of arguments for '{name}' command")
    return Error(f"ERR unknown subcommand '{_shown(args[1])}'. Try {_word(args[0])} HELP.")
