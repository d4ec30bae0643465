"""Commands on named values: read, write, delete, expire, list."""

from __future__ import annotations

import re

from lmtier.format.layout import padded
from lmtier.format.objects import now_ms
from lmtier.server.commands import (
    ALREADY_SENT,
    NO_ROOM,
    OK,
    PAUSE,
    Argument,
    Caller,
    Payload,
    PendingAnswer,
    Refused,
)
from lmtier.server.redis.arguments import (
    NEVER,
    SYNTAX,
    TIMES,
    compile_glob,
    need_short,
    read_expiry,
    read_integer,
    read_name,
    read_word,
    shown,
)
from lmtier.server.values import Draft, Value, Values
from lmtier.wire.resp import Error, Simple, encode

TRY_AGAIN = Error("TRYAGAIN a tier fails to delete the old value, which a restart might find")
_AT_ONCE = 1000  # names
_CURSOR = re.compile(rb"0|[1-9][0-9]{0,18}")


class ValueCommands:
    def __init__(self, values: Values) -> None:
        self._values = values

    # ---- reading

    def get(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        value = yield from self._values.get(read_name(args[1]))
        return self._payload(value)

    def _payload(self, value: Value | None, start: int = 0, end: int | None = None) -> Payload | None:
        if value is None:
            return None
        return Payload(value.view[start:end], lambda: self._values.release(value))

    def mget(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        yield b"*%d\r\n" % (len(args) - 1)
        for arg in args[1:]:
            # An invalid name is not an error here: such a value does not exist.
            value = yield from self._values.get(bytes(arg))
            yield self._payload(value) or encode(None, caller.resp3)
        return ALREADY_SENT

    def getrange(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        start, end = read_integer(args[2]), read_integer(args[3])
        value = yield from self._values.get(read_name(args[1]))
        if value is None:
            return b""
        size = len(value.view)
        first = max(0, start + size) if start < 0 else start
        last = max(0, end + size) if end < 0 else min(end, size - 1)
        is_empty = first > last or (start < 0 and end < 0 and start > end)
        return self._payload(value, 0, 0) if is_empty else self._payload(value, first, last + 1)

    def strlen(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        mark = yield from self._values.find_info(bytes(args[1]))
        return mark.nbytes if mark else 0

    def exists(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        found = 0
        for arg in args[1:]:
            found += (yield from self._values.find_info(bytes(arg))) is not None
            yield PAUSE
        return found

    def memory(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        """MEMORY USAGE name: the bytes of memory that a value takes, or would take."""
        if read_word(args[1]) != "USAGE" or len(args) not in (3, 5):
            raise Refused("ERR MEMORY knows USAGE name here")
        mark = yield from self._values.find_info(read_name(args[2]))
        return None if mark is None else padded(mark.nbytes)

    def type(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        mark = yield from self._values.find_info(bytes(args[1]))
        return Simple("string" if mark else "none")

    def ttl(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        mark = yield from self._values.find_info(bytes(args[1]))
        if mark is None:
            return -2
        if not mark.expires:
            return -1
        remaining_ms = max(0, mark.expires - now_ms())
        return remaining_ms if read_word(args[0]) == "PTTL" else (remaining_ms + 500) // 1000

    def dbsize(self, caller: Caller, args: list[Argument]) -> int:
        return len(self._values)

    def scan(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        if not _CURSOR.fullmatch(bytes(args[1])):
            raise Refused("ERR invalid cursor")
        count, pattern, kind = 10, re.compile(b""), b"string"
        need_short(args[2:])
        options = iter(args[2:])
        for option in options:
            value = next(options, None)
            if value is None:
                raise Refused(SYNTAX)
            match read_word(option):
                case "MATCH":
                    pattern = compile_glob(bytes(value))
                case "COUNT":
                    if (count := read_integer(value)) < 1:
                        raise Refused(SYNTAX)
                case "TYPE":
                    kind = bytes(value).lower()
                case _:
                    raise Refused(SYNTAX)
        next_cursor, names = yield from self._values.scan(int(bytes(args[1])), min(count, 10_000))
        return [str(next_cursor), [name for name in names if pattern.match(name) and kind == b"string"]]

    def keys(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        need_short(args[1:])
        pattern = compile_glob(bytes(args[1]))
        cursor, names = 0, list[bytes]()
        while True:
            cursor, batch = yield from self._values.scan(cursor, _AT_ONCE)
            names += [name for name in batch if pattern.match(name)]
            if not cursor:
                break
            yield PAUSE
        yield b"*%d\r\n" % len(names)
        for first in range(0, len(names), _AT_ONCE):
            yield b"".join(encode(name, caller.resp3) for name in names[first : first + _AT_ONCE])
        return ALREADY_SENT

    # ---- writing

    def _draft(self, caller: Caller, value: Argument) -> Draft:
        """The draft of the present command's value. It belongs to the caller until it is put."""
        if isinstance(value, bytes) and (draft := self._values.draft(len(value))):  # an inline command's
            draft.view[:] = value
            caller.drafts.append(draft)
        if not caller.drafts:  # its bytes were dropped when they arrived
            raise Refused(NO_ROOM)
        draft = caller.drafts[0]
        assert isinstance(draft, Draft)
        return draft

    def _put(self, caller: Caller, draft: Draft, name: bytes, expires: int = 0) -> PendingAnswer:
        caller.drafts.remove(draft)
        return self._values.put(draft, name, expires)

    def set(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        name = read_name(args[1])
        words: set[str] = set()
        expiry_option: tuple[str, Argument] | None = None
        options = iter(args[3:])
        for option in options:
            word = read_word(option)
            value = next(options, None) if word in TIMES else b""
            if word not in {*TIMES, "NX", "XX", "GET", "KEEPTTL"} or value is None:
                raise Refused(SYNTAX)
            words.add(word)
            if word in TIMES:
                expiry_option = word, value
        if len(words & {*TIMES, "KEEPTTL"}) > 1 or {"NX", "XX"} <= words:
            raise Refused(SYNTAX)
        expires = read_expiry(*expiry_option, "set") if expiry_option else 0
        draft = self._draft(caller, args[2])
        old_payload: Payload | None = None
        if "GET" in words:
            old_payload = self._payload((yield from self._values.get(name)))
        if words & {"NX", "XX", "KEEPTTL"}:
            try:
                mark = yield from self._values.find_info(name)
            except GeneratorExit:
                if old_payload is not None:
                    old_payload.on_sent()
                raise
            if ("NX" in words and mark is not None) or ("XX" in words and mark is None):
                return old_payload
            if mark is not None and "KEEPTTL" in words:
                expires = mark.expires
        try:
            yield from self._put(caller, draft, name, expires)
        except GeneratorExit:
            if old_payload is not None:
                old_payload.on_sent()
            raise
        return old_payload if "GET" in words else OK

    def setnx(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        name, draft = read_name(args[1]), self._draft(caller, args[2])
        if (yield from self._values.find_info(name)) is not None:
            return 0
        yield from self._put(caller, draft, name)
        return 1

    def setex(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        word = read_word(args[0])
        expires = read_expiry("EX" if word == "SETEX" else "PX", args[2], word.lower())
        yield from self._put(caller, self._draft(caller, args[3]), read_name(args[1]), expires)
        return OK

    def getset(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        return (yield from self.set(caller, [b"SET", args[1], args[2], b"GET"]))

    def mset(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        if len(args) % 2 == 0:
            raise Refused("ERR wrong number of arguments for 'mset' command")
        names = [read_name(arg) for arg in args[1::2]]
        for value in args[2::2]:
            self._draft(caller, value)
        if len(caller.drafts) < len(names):
            raise Refused(NO_ROOM)
        for name in names:
            yield from self._put(caller, caller.drafts[0], name)
            yield PAUSE
        return OK

    def getdel(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        name = read_name(args[1])
        value = yield from self._values.get(name)
        answer = self._payload(value)
        try:
            # Also delete a value that cannot be read now: after the answer "none" it must not appear later.
            deleted = yield from self._values.delete(name)
        except GeneratorExit:
            if answer is not None:
                answer.on_sent()
            raise
        if deleted is not None:
            return answer
        if answer is not None:
            answer.on_sent()
        return TRY_AGAIN

    def delete(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        return (yield from self._forget(*map(bytes, dict.fromkeys(args[1:]))))

    def _forget(self, *names: bytes) -> PendingAnswer:
        deleted = yield from self._values.delete(*names)
        return TRY_AGAIN if deleted is None else deleted

    def expire(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        command = read_word(args[0])
        unit = {"EXPIRE": "EX", "PEXPIRE": "PX", "EXPIREAT": "EXAT", "PEXPIREAT": "PXAT"}[command]
        conditions = {read_word(arg) for arg in args[3:]}
        for arg in args[3:]:
            if read_word(arg) not in ("NX", "XX", "GT", "LT"):
                raise Refused(f"ERR Unsupported option {shown(arg)}")
        if "NX" in conditions and len(conditions) > 1:
            raise Refused("ERR NX and XX, GT or LT options at the same time are not compatible")
        if {"GT", "LT"} <= conditions:
            raise Refused("ERR GT and LT options at the same time are not compatible")
        expires = read_expiry(unit, args[2], command.lower(), least=-NEVER)
        name = bytes(args[1])
        mark = yield from self._values.find_info(name)
        if mark is None:
            return (yield from self._forget(name)) if expires <= now_ms() else 0  # as for GETDEL
        current_expiry = mark.expires or NEVER  # which is later than any time
        is_refused = (
            ("NX" in conditions and mark.expires)
            or ("XX" in conditions and not mark.expires)
            or ("GT" in conditions and expires <= current_expiry)
            or ("LT" in conditions and expires >= current_expiry)
        )
        if is_refused:
            return 0
        if expires <= now_ms():
            return (yield from self._forget(name))
        return (yield from self._retime(name, expires))

    def persist(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        name = bytes(args[1])
        mark = yield from self._values.find_info(name)
        if mark is None or not mark.expires:
            return 0
        return (yield from self._retime(name, 0))

    def _retime(self, name: bytes, expires: int) -> PendingAnswer:
        was_set = yield from self._values.set_expiry(name, expires)
        return 0 if was_set is None else 1 if was_set else NO_ROOM

    def flush(self, caller: Caller, args: list[Argument]) -> PendingAnswer:
        if len(args) > 2 or (len(args) == 2 and read_word(args[1]) not in ("SYNC", "ASYNC")):
            raise Refused(SYNTAX)
        return OK if (yield from self._values.clear()) else TRY_AGAIN
