"""Decides about each command: it is refused, queued for EXEC, or run. Gives payloads their place."""

from __future__ import annotations

from typing import Any

from lmtier.core.cache import Cache
from lmtier.errors import log
from lmtier.server.access import RIGHTS, Right, right_to, why_not, write_audit
from lmtier.server.commands import ALREADY_SENT, Argument, Caller, Command, Refused, Table, error_of
from lmtier.server.transactions import Transactions
from lmtier.server.values import Values
from lmtier.wire.command_reader import DROP, new_buffer
from lmtier.wire.resp import Error, ProtocolError

_UNTRUSTED_ARGS = 10
_UNTRUSTED_BYTES = 16 << 10

_NO_AUTH = Error("NOAUTH Authentication required.")
_NO_SLAB = Error("MISUSE only who maps the slab may do this: connect to the server's Unix socket")
_LOADING = Error("LOADING lmtier is still scanning its tiers; try again")


class Dispatch:
    """The connections' host."""

    def __init__(self, cache: Cache, values: Values, transactions: Transactions, table: Table) -> None:
        self._cache = cache
        self._values = values
        self._transactions = transactions
        self.held_bytes = transactions.held_bytes
        self.buffer = new_buffer()
        """Where the bytes of each connection arrive. All have the same owner."""
        self._table = {
            name: _audited(name, command) if _is_ever_audited(name) else command
            for name, command in table.items()
        }

    def payload_target(
        self, caller: Caller, args: list[Argument], argc: int, length: int
    ) -> memoryview | None:
        if not caller.role and (argc > _UNTRUSTED_ARGS or length > _UNTRUSTED_BYTES):
            raise ProtocolError(
                "unauthenticated " + ("bulk" if length > _UNTRUSTED_BYTES else "multibulk") + " length"
            )
        name = bytes(args[0]).upper()
        command = self._table.get(name)
        if command is None or len(args) not in command.payloads:
            return None
        if caller.role < right_to(name).role or not self._cache.is_warm:
            return DROP  # the command is refused when it is complete
        draft = self._values.draft(length)
        if draft is None:
            return DROP
        caller.drafts.append(draft)
        return draft.view

    def drop_drafts(self, caller: Caller) -> None:
        while caller.drafts:
            self._values.discard_draft(caller.drafts.pop())

    def answer(self, caller: Caller, args: list[Argument]) -> Any:
        name = bytes(args[0]).upper()
        caller.command_count += 1
        command = self._table.get(name)
        if command is None:
            if name in (b"POST", b"HOST:"):  # an attack: a web page made a browser send to this port
                log.warning("lmtier: %s sends HTTP to the Redis port and was closed", caller.address)
                caller.closing = True
                return ALREADY_SENT
            self._transactions.mark_aborted(caller)
            return _unknown(args)
        caller.last = name.decode().lower()
        if (refused := self._refusal(caller, name, command, args)) is not None:
            self._transactions.mark_aborted(caller)
            return refused
        if self._transactions.must_queue(caller, name):
            return self._transactions.queue_command(caller, name, command, args)
        if name == b"RESET":
            self._transactions.drop_client(caller)
        try:
            return self._transactions.run(caller, command, args)
        except (Refused, OSError) as failure:
            return error_of(failure)

    def _refusal(self, caller: Caller, name: bytes, command: Command, args: list[Argument]) -> Error | None:
        """Why a command is refused before it runs."""
        if len(args) != command.arity if command.arity > 0 else len(args) < -command.arity:
            message = f"wrong number of arguments for '{caller.last}' command"
            if name == b"EXEC" and caller.multi_queue is not None:
                self._transactions.drop_client(caller)
                return Error(f"EXECABORT Transaction discarded because of: {message}")
            return Error(f"ERR {message}")
        if len(args) > command.max_arguments:
            return Error(f"ERR '{caller.last}' takes {command.max_arguments} arguments at most here")
        right = right_to(name, args)
        if right.role and not caller.role:
            return Error(caller.foreign_reason) if caller.foreign_reason else _NO_AUTH
        if caller.role < right.role:
            return _refused(caller, right, args)
        if right.needs_slab and not caller.is_local:
            return _NO_SLAB
        if "loading" not in command.flags and not self._cache.is_warm and not name.startswith(b"LMTIER."):
            return _LOADING
        return None


def _is_ever_audited(name: bytes) -> bool:
    word = name.decode()
    return any(right.is_audited for key, right in RIGHTS.items() if key == word or key.startswith(f"{word}:"))


def _audited(name: bytes, command: Command) -> Command:
    """It writes to the audit when it runs, which may be at EXEC, when its caller may have another role."""

    def handler(caller: Caller, args: list[Argument]) -> Any:
        right = right_to(name, args)
        if caller.role < right.role:
            return _refused(caller, right, args)
        if right.is_audited:
            write_audit(str(caller), args)
        return command.handler(caller, args)

    return command._replace(handler=handler)


def _refused(caller: Caller, right: Right, args: list[Argument]) -> Error:
    if right.is_audited:
        write_audit(str(caller), args, refused=True)
    return Error(f"NOPERM {why_not(right.role)}")


def _unknown(args: list[Argument]) -> Error:
    """Begins as the error of redis does, because clients look for that."""
    name = bytes(args[0][:64]).split(b"\0")[0].decode("utf-8", "surrogateescape")
    return Error(
        f"ERR unknown command '{name}': this is lmtier, a cache of KV and of large values, not redis; "
        "COMMAND LIST lists its commands"
    )
